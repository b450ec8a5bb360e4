"""Docstrings as Markdown, for the reference: tables, literal blocks and doctests of plain text."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

RULER = re.compile(r"=+( +=+)+$")
POWER = re.compile(r"(`[^`]*`)|\^(?:\{([^{}]*)\}|\(([^()]*)\)|(-?\w+(?:/\d+)?))")
"""Code, or an exponent: in braces, in parentheses, or a number or letter."""
STATEMENT = re.compile(
    r"^( *)>>> (?:def|for|with|class|if|@).*\n(?:\1\.\.\. .*\n)+(?=\1>>> )", re.M
)
"""A compound statement of a doctest before another one: a prompt needs an empty line between."""


def table(lines: list[str]) -> list[str]:
    """A Markdown table of one with rulers; a line whose first cell is empty goes on with a row."""
    starts = [match.start() for match in re.finditer("=+", lines[0])]
    rows: list[list[str]] = []
    for line in (lines[1], *lines[3:-1]):
        ends = [*starts[1:], len(line)]
        cells = [line[i:j].strip().replace("|", r"\|") for i, j in zip(starts, ends, strict=True)]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [f"{x} {y}".strip() for x, y in zip(rows[-1], cells, strict=True)]
    rows.insert(1, ["---"] * len(starts))
    return ["| " + " | ".join(row) + " |" for row in rows]


def raised(text: str) -> str:
    """The same text with exponents as superscripts."""
    return POWER.sub(lambda m: m[1] or f"<sup>{m[2] or m[3] or m[4]}</sup>", text)


def markdown(text: str) -> str:
    """The same text in Markdown."""
    text = re.sub(r" ?::$", ":", text, flags=re.MULTILINE)
    text = STATEMENT.sub(r"\g<0>\1...\n", text)
    blocks = text.split("\n\n")
    for i, block in enumerate(blocks):
        lines = block.splitlines()
        if len(lines) > 3 and RULER.match(lines[0]):
            blocks[i] = raised("\n".join(table(lines)))
        elif block.startswith(">>> "):
            blocks[i] = f"```pycon\n{block}\n```"
        elif not block.startswith("    "):  # a literal block stays as it is
            blocks[i] = raised(block)
    return "\n\n".join(blocks)


class Markdown(griffe.Extension):
    """Changes every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object."""
        if not obj.docstring:
            return
        text = obj.docstring.value
        if obj.is_class and any("SGKernel" in str(base) for base in obj.bases):
            # the class itself has entries for arguments that several kernels share
            text = inspect.getdoc(getattr(importlib.import_module(obj.module.path), obj.name))
        obj.docstring.value = markdown(text)
