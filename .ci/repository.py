"""The address of the repository on pages: buttons to edit, and links in the footer.

Pages write it as REPOSITORY. It stands in pyproject.toml alone. mkdocs' own ``repo_url`` is not
set, because the theme would then fetch the numbers of stars from the network.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
WHERE = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Called by mkdocs when it has read its settings."""
    config.edit_uri_template = f"{WHERE}/edit/main/docs/{{path}}"
    config.extra["social"] = [
        {"icon": "fontawesome/brands/git-alt", "link": WHERE, "name": "The repository"},
        {"icon": "material/bug-outline", "link": f"{WHERE}/issues", "name": "Report an issue"},
    ]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for each page."""
    return markdown.replace("](REPOSITORY", f"]({WHERE}")
