"""The figure of the home page: seconds to 1,000 effective draws against the number of rows.

    python examples/benchmarks/large_figure.py

It reads docs/tables/large.md, which `large_tables.py` writes, and measures nothing. It
writes docs/figures/time_to_accuracy.png, and the same for dark pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
METHODS = {"NUTS(model, dense_mass=True)": "NUTS", "SGHMC(model)": "SGHMC"}
BADLY_SCALED = 1e6
"""Smallest condition number of the tables in the figure."""
COLUMN = "seconds to ESS 1,000"


def read(text: str) -> dict[str, list[tuple[int, float]]]:
    """Rows and seconds by method, from the tables of badly scaled columns."""
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in METHODS.values()}
    for part in text.split("\n**")[0:]:
        title = re.match(r"\**([\d,]+) rows, condition ([\d.e+]+)", part)
        if title is None or float(title[2]) < BADLY_SCALED:
            continue
        rows = int(title[1].replace(",", ""))
        lines = [[x.strip() for x in line.split("|")] for line in part.splitlines() if "|" in line]
        column = lines[0].index(COLUMN)
        for line in lines[2:]:
            name = METHODS.get(line[1].strip("`"))
            if name is not None:
                points[name].append((rows, float(line[column].replace(",", ""))))
    return points


def draw(points: dict[str, list[tuple[int, float]]], path: Path, style: str) -> None:
    """Seconds over rows, in the colours of light or dark pages."""
    with plt.style.context(style):
        figure, ax = plt.subplots(figsize=(6.4, 3.6), constrained_layout=True)
        for (name, values), colour in zip(points.items(), ("#e07b39", "#5c7cfa"), strict=True):
            ax.loglog(*zip(*values, strict=True), marker="o", label=name, color=colour)
            for rows, seconds in values:
                others = [t for x in points.values() for n, t in x if n == rows]
                above = -15 if seconds == min(others) else 7
                ax.annotate(
                    f"{seconds:,.0f} s",
                    (rows, seconds),
                    (0, above),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
        ax.set(xlabel="rows", ylabel="seconds to 1,000 effective draws", ylim=(5, 4000))
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, loc="upper left")
        figure.savefig(path, dpi=150, transparent=True, metadata={"Software": None})
        plt.close(figure)


def main() -> None:
    """Draw both."""
    points = read((DOCS / "tables" / "large.md").read_text())
    for name, style in (
        ("time_to_accuracy", "default"),
        ("time_to_accuracy_dark", "dark_background"),
    ):
        draw(points, DOCS / "figures" / f"{name}.png", style)
    print(points)


if __name__ == "__main__":
    main()
