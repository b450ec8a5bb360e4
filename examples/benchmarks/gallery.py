"""Figures of the gallery page, from the tables in docs/tables that other scripts have written.

    python examples/benchmarks/gallery.py

Writes docs/figures/gallery_*.png, transparent and in grey ink, for light and dark pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[2] / "docs"
GREY, COLOURS = "#808080", ("#e07b39", "#5c7cfa", "#808080")
STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), GREY),
    **dict.fromkeys(("xtick.color", "ytick.color"), GREY),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=COLOURS),
    "legend.frameon": False,
    "savefig.transparent": True,
}
Rows = list[dict[str, str]]


def table(name: str) -> Rows:
    """Rows of the first table of a file by the names of columns; a second one alike is "name 2"."""
    text = (DOCS / "tables" / f"{name}.md").read_text()
    lines = re.search(r"(^\|.*\n)+", text, re.M)[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    head = [f"{x} 2" if x in head[:k] else x for k, x in enumerate(head)]
    return [dict(zip(head, row, strict=True)) for row in rows]


def number(cell: str) -> float:
    """The first number of a cell; NaN where there is none."""
    found = re.search(r"-?\d[\d,]*\.?\d*", cell)
    return float(found[0].replace(",", "")) if found else float("nan")


def mnist(ax: plt.Axes) -> None:
    """Negative log-likelihood by method and prior."""
    rows = table("mnist")
    names = sorted(
        {row["method"] for row in rows},
        key=lambda name: -min(number(row["NLL"]) for row in rows if row["method"] == name),
    )
    for prior in ("gaussian", "horseshoe"):
        found = {row["method"]: number(row["NLL"]) for row in rows if row["prior"] == prior}
        shown = [name for name in names if name in found]
        ax.plot([found[name] for name in shown], shown, "o", label=f"{prior} prior")
    ax.set(xscale="log", xlabel="negative log-likelihood of test images")
    ax.legend()


def uci(ax: plt.Axes) -> None:
    """Data sets on which a method wins and loses against MAP."""
    rows = [row for row in table("uci_standing") if "/" in row["MNLL"]]
    standing = [[int(x) for x in row["MNLL"].split("/")] for row in rows]
    names = [row["method"] for row in rows]
    ax.barh(names, [wins for wins, _, _ in standing], label="wins")
    ax.barh(names, [-losses for _, _, losses in standing], label="losses")
    ax.set(xlabel="data sets, against MAP in likelihood")
    ax.axvline(0, color=GREY, linewidth=0.8)
    ax.legend()


def laplace_weights(ax: plt.Axes) -> None:
    """Error of the worst mean, plain and weighted."""
    rows = table("laplace_weights")
    names = [f"{row['data']}, D = {row['D']}" for row in rows]
    for column in ("mean, plain", "mean, weighted", "of exact draws"):
        ax.plot([number(row[column]) for row in rows], names, "o", label=column)
    ax.set(xlabel="error of the worst mean, posterior sd", xlim=(0, None))
    ax.legend()


def laplace_digits(ax: plt.Axes) -> None:
    """Negative log-likelihood over the time of a draw."""
    for row in table("laplace_digits_10554"):
        seconds, loss = number(row["CPU s per draw"]), number(row["NLL"])
        if row["method"] == "MAP":
            ax.axhline(loss, color=GREY, linewidth=0.8, label="MAP")
            continue
        ax.loglog(seconds, loss, "o", color=COLOURS[1])
        ax.annotate(row["method"], (seconds, loss), (5, 5), textcoords="offset points", fontsize=9)
    ax.set(xlabel="CPU seconds per draw", ylabel="negative log-likelihood", xlim=(0.008, 60))
    ax.legend()


def networks(ax: plt.Axes) -> None:
    """Time of a step over that of a step written by hand."""
    rows = [row for row in table("networks") if "by hand" not in row["network, sampler"]]
    ax.barh(
        [row["network, sampler"] for row in rows], [number(row["over by hand 2"]) for row in rows]
    )
    ax.axvline(1, color=GREY, linewidth=0.8)
    ax.set(xlabel="time per step over one written by hand")


def digits(ax: plt.Axes) -> None:
    """Negative log-likelihood of dense networks by method."""
    rows = [row for row in table("digits_network") if row["network"] == "dense"][::-1]
    ax.barh([row["method"] for row in rows], [number(row["NLL"]) for row in rows])
    ax.set(xlabel="negative log-likelihood of test digits")


def main() -> None:
    for draw in (mnist, uci, laplace_weights, laplace_digits, networks, digits):
        with mpl.rc_context(STYLE):
            figure, ax = plt.subplots(figsize=(5.6, 3.6), constrained_layout=True)
            draw(ax)
            path = DOCS / "figures" / f"gallery_{draw.__name__}.png"
            figure.savefig(path, dpi=120, metadata={"Software": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
