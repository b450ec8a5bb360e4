"""Results that print as a table with lines of text below, also in notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


class TextTable:
    """A result with a table and lines of text; ``print`` shows text, and a notebook shows HTML."""

    def _table(self) -> Table:
        """Header and rows."""
        raise NotImplementedError

    def _lines(self) -> list[str]:
        """Lines of text below the table."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join([align(*self._table()), "", *self._lines()])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        header, rows = self._table()
        body = "".join(html_row(row, "td") for row in rows)
        below = "".join(f"<p>{html.escape(line)}</p>" for line in self._lines())
        head = f"<thead>{html_row(header, 'th')}</thead>"
        return f"<table>{head}<tbody>{body}</tbody></table>{below}"


def align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table: the first column is left-aligned, the others are right-aligned."""
    table = [list(header), *map(list, rows)]
    columns = []
    for k, column in enumerate(zip(*table, strict=True)):
        width = max(map(len, column))
        columns.append([x.ljust(width) if k == 0 else x.rjust(width) for x in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def html_row(cells: Sequence[str], tag: str) -> str:
    """Cells of a row of an HTML table; a flagged row is coloured."""
    style = ' style="background:#fdd;color:#000"' if cells[0] == FLAGGED else ""
    return f"<tr{style}>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in cells) + "</tr>"


FLAGGED = "!!"
"""First cell of a row that stands out."""
