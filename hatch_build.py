"""Metadata of the package that follow from the address of its repository, which pyproject.toml has.

On an index README.md stands alone, so its links and figures get whole addresses.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(\]\(|srcset=\"|src=\")(?!https?:|#)([^)\"]+)")


def for_an_index(readme: str, repository: str) -> str:
    """README.md with whole addresses: of pages for readers, and of the files of figures."""

    def whole(match: re.Match[str]) -> str:
        kind = "blob" if match[1] == "](" else "raw"
        return f"{match[1]}{repository}/{kind}/main/{match[2]}"

    return LINK.sub(whole, readme)


class Hook(MetadataHookInterface):
    """Called by hatchling."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add README.md and the addresses."""
        where = self.config["repository"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(text, where)}
        metadata["urls"] = {
            "Repository": where,
            "Documentation": f"{where}/tree/main/docs",
            "Changelog": f"{where}/blob/main/CHANGELOG.md",
            "Issues": f"{where}/issues",
        }
