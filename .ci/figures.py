"""Numbers in the text of a page must stand in tables of their section, or of pages linked there.

A section without either has all tables of its page. A number agrees with a table if a number there
is the same after rounding. Years, integers below 100, numbers with one digit, code and formulas are
not looked at. `SETTINGS` has numbers that nobody measured.
"""

from __future__ import annotations

import logging
import posixpath
import re
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
log = logging.getLogger("mkdocs.hooks.figures")

LEFT_OUT = re.compile(
    r"^```.*?^```|`[^`]*`|\]\([^)]*\)|\\\(.*?\\\)|\\\[.*?\\\]|<[^>]*>|\{[^}]*\}|^--8<--.*?$",
    re.S | re.M,
)
NUMBER = re.compile(r"(?<![\w.,/^{_#-])(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?(e[-+]?\d+)?(?![\w,]*\w)")
YEARS = range(1950, 2030)
SETTINGS = {
    "0.032", "0.22", "0.32", "0.47", "0.574", "0.67", "1.25", "1e-6", "3.11", "3.13", "128", "256",
    "400", "569", "784", "2,048", "2410.19780", "8,192", "10,000", "20,000", "50,000", "60,000",
    "65,530", "65,536",
}  # fmt: skip
"""Versions, sizes of data sets, limits, numbers of steps or rows by hand, and exact results."""


def numbers(text: str) -> Iterator[tuple[str, float, float]]:
    """Each number of a text, its value, and the place value of its last digit that counts."""
    for found in NUMBER.finditer(text):
        whole, part, power = (x or "" for x in found.groups())
        if whole or part:
            digits = whole.replace(",", "")
            zeros = 0 if part else len(digits) - len(digits.rstrip("0"))
            place = 10.0 ** (int(power[1:] or 0) + zeros - len(part[1:]))
            yield found.group(), float(found.group().replace(",", "")), place


def tables_in(text: str) -> set[str]:
    """The names of the tables that a text shows or names."""
    named = set(re.findall(r"tables/(\w+)\.md", text))
    return {name for name in named if (DOCS / f"tables/{name}.md").is_file()}


def unknown(page: str, text: str) -> list[str]:
    """The numbers of a section of a page that stand in no table."""
    links = re.findall(r"\]\(([^):#]+\.md)", text)
    near = {posixpath.normpath(posixpath.join(posixpath.dirname(page), x)) for x in links}
    names = tables_in(text).union(*(tables_in((DOCS / x).read_text()) for x in near))
    if not names:
        names = tables_in((DOCS / page).read_text())
    tables = ((DOCS / f"tables/{name}.md").read_text() for name in sorted(names))
    known = sorted({x for table in tables for _, x, _ in numbers(table)})

    def stands(x: float, place: float) -> bool:
        k = bisect_left(known, x - 0.5001 * place)
        return k < len(known) and known[k] <= x + 0.5001 * place

    return [
        written
        for written, x, place in numbers(LEFT_OUT.sub("", text))
        if len(written.strip("0,.")) > 1 and (x >= 100 or x != int(x))
        if x not in YEARS and written not in SETTINGS and not stands(x, place)
    ]


def check(page: str, text: str) -> None:
    """Warn, which a strict build takes for an error."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for section in re.split(r"^(?=#)", text, flags=re.M):
        for number in unknown(page, section):
            log.warning(f"{page}: {number} stands in no table of its section, or of a linked page")


def on_pre_build(**_: Any) -> None:
    """README.md is no page, and is read on its own."""
    check("../README.md", (DOCS.parent / "README.md").read_text())


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Called for each page."""
    name = page.file.src_uri
    if not name.startswith(("tables/", "reference/", "changelog")):
        check(name, markdown)
