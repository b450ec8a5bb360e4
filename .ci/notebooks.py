"""A notebook of each page that links one, made in memory: the page's text and its Python blocks.

What a block printed and drew for the page is the output of its cell. Times stay in the text,
because the notebook does not measure them. Links to other pages become plain text.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import pages  # noqa: E402

DOCS = pages.ROOT / "docs"
FRONT = re.compile(r"\A---\n.*?^---\n", re.M | re.S)
TIMES = re.compile(r'^--8<-- "(tables/\w+_cost\.md)"$', re.M)
PRINTED = re.compile(
    r'^(?:--8<-- "(tables/(?!\w+_cost)\w+\.md)"|!\[[^]]*\]\(.*/(\w+\.png).*\)'
    r"|```text\n((?:.*\n)*?)```)$\n?",
    re.M,
)
TEXT = re.compile(r"^```text\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:)[^)]*\)")
FORMULA = re.compile(r"\\[()]|\\[\[\]]")


def cell(kind: str, text: str) -> dict[str, Any]:
    """A cell of this type."""
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text, **code}


def outputs(text: str) -> list[dict[str, Any]]:
    """What the page shows after a block, as outputs of the block's cell."""
    found: list[dict[str, Any]] = []
    for table, figure, printed in PRINTED.findall(text):
        if figure:
            picture = base64.b64encode((DOCS / "figures" / figure).read_bytes()).decode()
            data = {"image/png": picture}
            found.append({"output_type": "display_data", "data": data, "metadata": {}})
        else:
            lines = printed or "".join(TEXT.findall((DOCS / table).read_text()))
            found.append({"output_type": "stream", "name": "stdout", "text": lines})
    return found


def notebook(page: str) -> str:
    """The notebook of a page."""
    text, cells, count = pages.with_scripts(FRONT.sub("", page)), [], 0
    for k, part in enumerate(re.split(r"^```python\n(.*?)^```\n", text, flags=re.M | re.S)):
        if k % 2 == 0:
            if count:
                cells[-1]["outputs"] = outputs(part)
            part = LINK.sub(r"\1", PRINTED.sub("", part))
            part = FORMULA.sub(lambda sign: "$" if sign[0][1] in "()" else "$$", part)
            part = TIMES.sub(lambda match: (DOCS / match[1]).read_text(), part)
            part = re.sub(r"\n{3,}", "\n\n", part)
        if part.strip():
            cells.append(cell("code" if k % 2 else "markdown", part.strip()))
        if k % 2:
            count += 1
            cells[-1]["execution_count"] = count
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}}
    return json.dumps({**content, "nbformat": 4, "nbformat_minor": 4}, indent=1)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs when it knows the files."""
    from mkdocs.structure.files import File  # not at the top: a test without mkdocs reads cells

    for page in [*files.documentation_pages()]:
        name = f"{Path(page.src_uri).stem}.ipynb"
        if f"({name})" in page.content_string:
            uri = str(Path(page.src_uri).with_name(name))
            files.append(File.generated(config, uri, content=notebook(page.content_string)))
    return files
