"""Tables on pages: the date of each, and a look whether it was drawn.

The date is that of the last commit that put a new number into the table's file, so that words or
columns that move do not make it younger. Without Git there are no dates.
"""

from __future__ import annotations

import logging
import re
import subprocess
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
log = logging.getLogger("mkdocs.hooks.tables")

INCLUDE = re.compile(r'^--8<-- "tables/(\w+)\.md"$', re.M)
NUMBER = re.compile(r"\d[\d,.]*")
DAYS = 14
"""So much older than the last change of the package a table may be, or the build says so."""


def git(*arguments: str) -> str:
    """What Git prints about the repository; nothing where there is none."""
    command = ["git", "-C", str(ROOT), "log", "--no-renames", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def newest(history: str) -> dict[str, str]:
    """The date of the last new number of each table, from ``git log --patch``, newest first."""
    found: dict[str, str] = {}
    for commit in re.split(r"^commit ", history, flags=re.M)[1:]:
        day, *patches = re.split(r"^diff --git a/docs/tables/(\w+)\.md .*$", commit, flags=re.M)
        for name, patch in zip(patches[::2], patches[1::2], strict=True):
            there, new = (
                set(NUMBER.findall(" ".join(re.findall(rf"^{sign}(?!{sign})(.*)", patch, re.M))))
                for sign in (r"\-", r"\+")
            )
            if new - there:
                found.setdefault(name, day.strip())
    return found


@cache
def dates() -> dict[str, str]:
    """The date of each table."""
    return newest(git("--patch", "--unified=0", "--format=commit %cs", "--", "docs/tables"))


def on_pre_build(**_: Any) -> None:
    """Name old tables. That is no warning, because a strict build would then fail with time."""
    code = git("-1", "--format=%cs", "--", "numpyro_geom").strip()
    old = [
        f"{name} ({day})"
        for name, day in dates().items()
        if (ROOT / f"docs/tables/{name}.md").exists()
        if (date.fromisoformat(code) - date.fromisoformat(day)).days > DAYS
    ]
    if old:
        log.info(f"tables older than the code by more than {DAYS} days: {', '.join(sorted(old))}")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for each page: a date below each table that has none."""

    def dated(match: re.Match[str]) -> str:
        text = (ROOT / f"docs/tables/{match[1]}.md").read_text()
        day = dates().get(match[1])
        if day is None or "\n|" not in text or re.search(r"20\d\d-\d\d-\d\d", text):
            return match[0]
        return f"{match[0]}\n\n<small>As of {day}.</small>"

    return INCLUDE.sub(dated, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """Called for each page: a paragraph of bars is a table that was not drawn."""
    for line in re.findall(r"<p>\s*(\|.*)", html):
        log.warning(f"{page.file.src_uri}: a table that was not drawn: {line[:60]}")
