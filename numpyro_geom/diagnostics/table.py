"""Results that print as a table with lines of text around it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

WIDTH = 100
"""Width of wrapped text in columns."""
FLAGGED = "!!"
"""First cell of a row that stands out."""
SHOWN = 25
"""Number of scalars in a printed table; the data frame has all scalars."""
FALSE_ALARM = 0.01
"""Probability that chance alone causes a verdict against the draws."""


class Row(NamedTuple):
    """A row of a table; a row with a single cell is a heading."""

    cells: Sequence[str]
    notes: Sequence[str] = ()  # the first one follows the cells if it fits, the others go below


class Printed:
    """A result that is shown as text."""

    _align: tuple[Callable, Callable] = (str.ljust, str.rjust)  # of the first column, of others

    def _table(self) -> list[Row]:
        """The rows; the first one is the header."""
        raise NotImplementedError

    def _above(self) -> list[str]:
        """Lines of text above the table."""
        return []

    def _below(self) -> list[str]:
        """Lines of text below the table."""
        return []

    def __str__(self) -> str:
        above = [part for line in self._above() for part in textwrap.wrap(line, WIDTH)]
        parts = (above, [*_text(self._table(), *self._align)], self._below())
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def __repr__(self) -> str:
        return str(self)


def _text(rows: list[Row], first: Callable, others: Callable) -> Iterator[str]:
    columns = zip(*(row.cells for row in rows if len(row.cells) > 1), strict=True)
    widths = [max(map(len, column)) for column in columns]
    start = sum(widths) + 2 * len(widths)
    align = [first, *[others] * (len(widths) - 1)]
    for cells, notes in rows:
        padded = (
            cells
            if len(cells) == 1
            else [f(x, w) for f, x, w in zip(align, cells, widths, strict=True)]
        )
        line = "  ".join(padded).rstrip()
        beside = "" if not notes or start + len(notes[0]) > WIDTH else notes[0]
        yield line.ljust(start) + beside if beside else line
        for text in notes[bool(beside) :]:
            yield from textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
