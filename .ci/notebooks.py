"""A notebook of each page that links one, made in memory: the page's text and its Python blocks.

Figures and printed output are left out, because the notebook makes its own. Times stay, because the
notebook does not measure them. Links to other pages become plain text.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import pages  # noqa: E402

FRONT = re.compile(r"\A---\n.*?^---\n", re.M | re.S)
TIMES = re.compile(r'^--8<-- "(tables/\w+_cost\.md)"$', re.M)
PRINTED = re.compile(
    r'^(--8<-- "tables/(?!\w+_cost).*"|!\[.*\]\(.*\)|```text\n.*?^```)$\n?', re.M | re.S
)
LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:)[^)]*\)")
FORMULA = re.compile(r"\\[()]|\\[\[\]]")


def cell(kind: str, text: str) -> dict[str, Any]:
    """A cell of this type."""
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text, **code}


def notebook(page: str) -> str:
    """The notebook of a page."""
    text, cells = pages.with_scripts(FRONT.sub("", page)), []
    for k, part in enumerate(re.split(r"^```python\n(.*?)^```\n", text, flags=re.M | re.S)):
        if k % 2 == 0:
            part = LINK.sub(r"\1", PRINTED.sub("", part))
            part = FORMULA.sub(lambda sign: "$" if sign[0][1] in "()" else "$$", part)
            part = TIMES.sub(lambda match: (pages.ROOT / "docs" / match[1]).read_text(), part)
            part = re.sub(r"\n{3,}", "\n\n", part)
        if part.strip():
            cells.append(cell("code" if k % 2 else "markdown", part.strip()))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}}
    return json.dumps({**content, "nbformat": 4, "nbformat_minor": 4}, indent=1)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs when it knows the files."""
    for page in [*files.documentation_pages()]:
        name = f"{Path(page.src_uri).stem}.ipynb"
        if f"({name})" in page.content_string:
            uri = str(Path(page.src_uri).with_name(name))
            files.append(File.generated(config, uri, content=notebook(page.content_string)))
    return files
