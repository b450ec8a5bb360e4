"""The table of all warnings of the package, from the calls in its code.

``docs/warnings.md`` has a mark in the place of the table. Values that a message fills in are dots.
"""

from __future__ import annotations

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files

PACKAGE = Path(__file__).parents[1] / "numpyro_geom"
MARK = "<!-- all warnings -->"
WHERE = {
    "laplace": "a guide",
    "runs": "a run in segments",
    "model": "a model is read",
}
"""When the warnings of a folder come; those of others come when a run starts."""


def message(call: ast.Call) -> str:
    """The text of a warning, or nothing where the text is made elsewhere."""
    text = call.args[0]
    if isinstance(text, ast.Constant):
        return str(text.value)
    if not isinstance(text, ast.JoinedStr):
        return ""
    parts = (str(x.value) if isinstance(x, ast.Constant) else "…" for x in text.values)
    return "".join(parts)


def parts(text: str) -> tuple[str, str]:
    """What is the case, and what to do about it."""
    for between in (". ", ": "):
        first, found, rest = text.partition(between)
        if found:
            return first, rest
    return text, ""


def all_warnings() -> list[tuple[str, str]]:
    """The folder and the text of each warning."""
    return [
        (path.relative_to(PACKAGE).parts[0], text)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "warn_outside"
        if (text := message(node))
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs when it knows the files."""
    lines = ["| message | what to do | comes with |", "|---|---|---|"]
    for folder, text in all_warnings():
        cells = (x.strip().replace("|", "\\|") for x in parts(text))
        lines.append(f"| {' | '.join(cells)} | {WHERE.get(folder, 'the start of a run')} |")
    page = files.get_file_from_path("warnings.md")
    page.content_string = page.content_string.replace(MARK, "\n".join(lines))
    return files
