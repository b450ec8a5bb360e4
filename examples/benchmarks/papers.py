"""The tables of five papers next to ours: writes docs/tables/papers_*.md.

Our figures are read from docs/tables, where other scripts wrote them; this one has the papers' and
their errors. It runs nothing. Figures are compared in standard errors,

    (ours - theirs) / sqrt(s^2 / n + theirs_s^2 / theirs_n),

with the standard deviations s over n runs. If we have one run, or none of our errors is known, the
paper's s stands for ours. Where a paper does not state n, the unit is its s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parents[2] / "docs" / "tables"
HEAD = "| of the paper | what | its figures | ours | in standard errors |"


class Figure(NamedTuple):
    """A figure; its sd over runs, None if unknown; and how many runs."""

    value: float
    sd: float | None = None
    runs: int | None = None


def lines_of(name: str) -> list[list[str]]:
    """The cells of a table, line by line."""
    text = (TABLES / f"{name}.md").read_text()
    return [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]


def line(name: str, *first: str) -> list[str]:
    """The line that begins with these cells."""
    return next(x for x in lines_of(name) if x[: len(first)] == list(first))


def figure(cell: str, runs: int | None = None) -> Figure:
    """The figure of a cell such as ``0.71 ± 0.02``."""
    found = [float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", cell)]
    return Figure(found[0], found[1] if len(found) > 1 else None, runs)


def away(ours: Figure, theirs: Figure) -> str:
    """The difference in standard errors; a dash if no error is known or all are rounded to 0."""
    if not theirs.sd:
        return "–"
    if theirs.runs is None:
        return f"{(ours.value - theirs.value) / theirs.sd:+.1f}"
    sd, runs = (theirs.sd, 1) if ours.sd is None else (ours.sd, ours.runs or 1)
    error = math.sqrt(sd**2 / runs + theirs.sd**2 / theirs.runs)
    return f"{(ours.value - theirs.value) / error:+.1f}"


def row(of: str, what: str, theirs: Sequence[Figure], ours: Sequence[Figure], form: str) -> str:
    """A line whose cells have one figure for each thing that ``what`` names."""
    shown = [", ".join(f"{x.value:{form}}" for x in side) for side in (theirs, ours)]
    differences = ", ".join(away(*pair) for pair in zip(ours, theirs, strict=True))
    return f"| {of} | {what} | {shown[0]} | {shown[1]} | {differences} |"


def open_row(of: str, what: str, cost: str) -> str:
    """A line of what nobody measured here."""
    return f"| {of} | {what} | – | open | {cost} |"


# --- Yu et al. 2023: ten runs of 400 epochs

YU_METRICS = {
    "gaussian": ("identity", "wenzel", "rmsprop", "shampoo"),
    "horseshoe": ("identity", "wenzel", "rmsprop", "monge", "shampoo"),
}
YU_NLL = {
    ("gaussian", 400): ((0.1310, 4), (0.1315, 2), (0.1307, 5), (0.1286, 3)),
    ("horseshoe", 400): ((0.0750, 4), (0.0768, 9), (0.0678, 11), (0.0629, 9), (0.0641, 9)),
    ("horseshoe", 800): ((0.0798, 3), (0.0839, 8), (0.0656, 13), (0.0612, 14), (0.0603, 11)),
}
YU_ECE = {
    ("gaussian", 400): ((0.0430, 4), (0.0438, 4), (0.0447, 3), (0.0421, 3)),
    ("horseshoe", 400): ((0.0281, 4), (0.0248, 5), (0.0124, 9), (0.0180, 9), (0.0164, 8)),
}
YU_SECONDS = {"gaussian": (8.1, 7.7, 8.8, 18.8), "horseshoe": (8.3, 9.5, 10.7, 12.9, 20.1)}
"""Per epoch, 400 units."""
YU_CURVATURE = {"identity": 15.01, "shampoo": 12.74}
"""800 units, horseshoe."""
YU_CONFIDENCE = {"identity": 0.9544, "rmsprop": 0.9684}
NLL, ECE, MS = 5, 7, 12
"""Columns of mnist.md."""


def yu_2023() -> list[str]:
    def theirs(values: Sequence[tuple[float, int]]) -> list[Figure]:
        return [Figure(x, sd * 1e-4, 10) for x, sd in values]

    def ours(table: str, prior: str, column: int, metrics: Sequence[str]) -> list[Figure]:
        found = [figure(line(table, prior, f"SGRLD {m}")[column]) for m in metrics]
        return [x._replace(sd=None) for x in found]

    rows = []
    for prior, metrics in YU_METRICS.items():
        what = f"400 units, {prior}: {', '.join(metrics)}"
        mine = ours("mnist", prior, NLL, metrics)
        rows.append(row("Table 1", f"NLL, {what}", theirs(YU_NLL[prior, 400]), mine, ".4f"))
        mine = ours("mnist", prior, ECE, metrics)
        rows.append(row("Table 8", f"ECE, {what}", theirs(YU_ECE[prior, 400]), mine, ".4f"))
        times = [x.value for x in ours("mnist_20", prior, MS, metrics)]
        pairs = (YU_SECONDS[prior], times)
        ratios = [[Figure(x / side[0]) for x in side[1:]] for side in pairs]
        what = f"time over the identity's, {prior}: {', '.join(metrics[1:])}"
        rows.append(row("Table 2", what, *ratios, ".2f"))
    pair = ("identity", "shampoo")
    mine = ours("mnist_800", "horseshoe", NLL, pair)
    published = theirs([YU_NLL["horseshoe", 800][k] for k in (0, 4)])
    what = "800 units, horseshoe: identity, shampoo"
    rows.append(row("Table 1", f"NLL, {what}; ours of 20 epochs", published, mine, ".4f"))
    mine = ours("mnist_800", "horseshoe", 12, pair)
    rows.append(
        row("Table 2", f"curvature, {what}", [Figure(YU_CURVATURE[m]) for m in pair], mine, ".2f")
    )
    pair = tuple(YU_CONFIDENCE)
    mine = ours("mnist_confidence", "horseshoe", 11, pair)
    published = [Figure(x) for x in YU_CONFIDENCE.values()]
    what = f"confidence, 400 units, horseshoe: {', '.join(pair)}; ours of 20 epochs"
    rows.append(row("Table 10", what, published, mine, ".4f"))
    for prior, gain in (("gaussian", -0.0007), ("horseshoe", -0.0059)):
        short = figure(line("mnist_20", prior, "SGRLD shampoo")[NLL]).value
        long = figure(line("mnist", prior, "SGRLD identity")[NLL]).value
        what = f"NLL at equal time, 400 units, {prior}: shampoo - identity; ours: 20, 40 epochs"
        rows.append(row("Table 6", what, [Figure(gain)], [Figure(short - long)], ".4f"))
    return sorted(rows, key=lambda x: int(x.split()[2])) + [
        open_row("Table 1, 2, 8", "400 units at 400 epochs, ten runs", "29 h; GPU 4 h"),
        open_row("Tables 1, 2, 6, 8", "800 units, the rest", "90 h; GPU 6 h"),
        open_row("Tables 1, 2, 6, 8", "1,200 units", "200 h; GPU 10 h"),
        open_row("Tables 3, 7, 9", "ResNet-20 on CIFAR-10", "2,300 h; GPU 98 h by their times"),
        open_row("Figure 2", "funnel; its constants are not stated", "0.2 h"),
        open_row("Figures 3, 4", "NLL against epochs and alpha squared", "10 h; GPU 1 h"),
    ]


# --- Rensmeyer and Niggemann 2025


def rensmeyer() -> list[str]:
    rows = []
    for name, of in (
        ("PSGLD", "Figure 1"),
        ("SGRLD, Monge", "Figure 1"),
        ("SGRLD, Shampoo", "Figure 1"),
        ("Adam-SGLD", "Figure 1"),
        ("PSGLD, corrected", "Figure 2"),
    ):
        _, derived, found, errors, *_ = line("densities", name)
        rows.append(f"| {of} | variance: {name} | {derived} | {found} | {errors} |")
    return [*rows, open_row("Figure 3", "the same with steps that shrink", "0.2 h")]


# --- Yu et al. 2024

RLA = ("euclidean", "monge", "monge-log", "fisher")


def yu_2024() -> list[str]:
    def pairs(table: str, target: str, metrics: Sequence[str]) -> tuple[list, list]:
        found = [next(x for x in lines_of(table) if x[0] == target and x[2] == m) for m in metrics]
        theirs = [figure(x[8]) for x in found]
        # an sd of 0.000 is at most half of the last digit
        theirs = [x._replace(sd=max(x.sd or 0, 0.0005)) for x in theirs]
        return theirs, [figure(x[3])._replace(sd=None) for x in found]

    rows = []
    for target in ("banana", "banana-hausdorff"):
        what = f"W1, {target}: {', '.join(RLA)}"
        rows.append(row("Table 1", what, *pairs("riemannian_laplace_10000", target, RLA), ".3f"))
    three = ("euclidean", "monge", "fisher")
    for name in ("ripley", "pima", "heart", "australian", "german"):
        what = f"W1, {name}: {', '.join(three)}"
        rows.append(row("Table 2", what, *pairs("riemannian_laplace_10000", name, three), ".3f"))
    for name in ("ripley", "pima", "heart", "australian", "german"):
        sides = pairs("riemannian_laplace", f"{name}-raw", three)
        ratios = [[Figure(x.value / side[0].value) for x in side[1:]] for side in sides]
        what = f"W1 over straight draws', {name}-raw: monge, fisher; ours of 2,000 draws"
        rows.append(row("Table 2", what, *ratios, ".2f"))
    spread = {
        "snelson": {"NUTS": 0.002, "euclidean": 0.064, "monge": 0.003, "fisher": 0.002},
        "snelson-gap": {"NUTS": 0.029, "euclidean": 0.075, "monge": 0.02, "fisher": 0.017},
        "snelson-std": {"NUTS": 0.001, "euclidean": 0.041, "fisher": 0.001},
    }
    for name, sds in spread.items():
        scores = [x for x in lines_of("riemannian_laplace") if x[0] == name]
        found = [next(x for x in scores if x[2] == metric) for metric in sds]
        theirs = [figure(x[8])._replace(sd=sd) for x, sd in zip(found, sds.values(), strict=True)]
        ours = [figure(x[4])._replace(sd=None) for x in found]
        of = "Table 5" if name == "snelson-std" else "Table 3"
        rows.append(row(of, f"NLL, {name}: {', '.join(sds)}", theirs, ours, ".3f"))
    ms = line("laplace_speed", "guide, 10,000 draws")[1]
    rows.append(
        "| Table 4 | seconds per draw, fisher, 25 columns and 1,000 rows | 0.014 "
        f"| {float(ms) / 1000:.4f} | – |"
    )
    return rows


# --- Franzese et al. 2021

SETS = ("wine", "protein", "naval", "kin8nm", "power", "boston")
METHODS = ("MAP", "dropout", "SGLD", "SGHMC", "I-SGD", "VSGD")
LENET = {
    "MAP": (0.0353, 0.0021),
    "SGRLD identity": (0.0280, 0.0017),
    "SGHMC": (0.0268, 0.0007),
    "I-SGD": (0.0264, 0.0016),
    "SWAG": (0.0309, 0.0020),
    "VSGD": (0.0225, 0.0016),
    "dropout": (0.0363, 0.0025),
}


def franzese() -> list[str]:
    rows = []
    splits = {x[0]: int(x[1]) for x in lines_of("uci") if x[1].isdigit()}
    for k, measure in enumerate(("RMSE", "MNLL")):
        for method in METHODS:
            found = [next(x for x in lines_of("uci") if x[0] == s and x[2] == method) for s in SETS]
            theirs = [figure(x[7 + k], 10) for x in found]
            ours = [figure(x[3 + k], splits[x[0]]) for x in found]
            what = f"{measure}, {method}: {', '.join(SETS)}"
            rows.append(row(f"Table {k + 1}", what, theirs, ours, ".3g"))
    known = {x[1]: figure(x[5]) for x in lines_of("mnist_lenet") if len(x) > 5 and x[2].isdigit()}
    names = [name for name in LENET if name in known]
    theirs = [Figure(*LENET[name], 3) for name in names]
    ours = [known[name]._replace(sd=None) for name in names]
    rows.append(row("Table 3", f"MNLL, LeNet-5: {', '.join(names)}", theirs, ours, ".4f"))
    return [
        *rows,
        open_row("Tables 1, 2", "SGLD and SGHMC at temperature 0.01", "0.3 h"),
        open_row("Table 3", "three runs of their length (a million steps)", "60 h; GPU 4 h"),
        open_row("Table 3, Figure 1", "entropies and ROC on NOT-MNIST, not at hand", "0.2 h"),
        open_row("Table A1", "other lengths of Adam", "1 h; GPU 0.2 h"),
        open_row("Table 4", "ResNet-18 on CIFAR-10, six methods, three runs", "3,400 h; GPU 55 h"),
    ]


# --- Kim et al. 2025: four runs, 100 cycles of 5,000 steps of 256 rows


def kim() -> list[str]:
    times = [float(line("networks", f"resnet, {x}")[4]) for x in ("SGHMC", "PXSGHMC")]
    digits = [line("digits_network", "digits", "dense", x) for x in ("SGHMC", "PX factors")]
    nll = [figure(x[5]).value for x in digits]
    ambiguity = [figure(x[7]).value for x in digits]
    return [
        row(
            "Table 7",
            "time of PX-SGHMC over SGHMC's, ResNet-20; ours on a CPU",
            [Figure(64 / 61)],
            [Figure(times[1] / times[0])],
            ".2f",
        ),
        "| Table 7 | parameters: SGHMC, PX-SGHMC | 274,042, 383,098 | PARAMETERS | 0, 0 |",
        row(
            "Table 1",
            "NLL of PX-SGHMC over SGHMC's; ours: digits, one hidden layer",
            [Figure(0.388 / 0.422)],
            [Figure(nll[1] / nll[0])],
            ".2f",
        ),
        row(
            "Table 10",
            "ambiguity of PX-SGHMC over SGHMC's; ours: digits",
            [Figure(0.242 / 0.186)],
            [Figure(ambiguity[1] / ambiguity[0])],
            ".2f",
        ),
        open_row("Tables 1, 2, 6", "CIFAR-10, its shifts, outside images", "3,300 h; GPU 35 h"),
        open_row("Tables 3, 9", "augmented, three data sets", "9,800 h; GPU 104 h"),
        open_row("Table 4", "number of factors", "2,600 h; GPU 28 h"),
        open_row("Table 5, Figure 4", "from HMC's checkpoint, which is not at hand", "GPU 4 h"),
        open_row("Table 8", "factors of low rank", "650 h; GPU 7 h"),
        open_row("Table 10", "constant steps", "1,300 h; GPU 14 h"),
        open_row("Figures 2, 3, 9", "from the runs of Tables 1 and 4", "none more"),
        open_row("Figures 7, 8", "temperatures; acceptance of GGMC", "2,600 h; GPU 28 h"),
    ]


def tables() -> dict[str, str]:
    """File -> Markdown."""
    papers = {
        "yu_2023": yu_2023,
        "rensmeyer": rensmeyer,
        "yu_2024": yu_2024,
        "franzese": franzese,
        "kim": kim,
    }
    head = [HEAD, "|---" * 5 + "|"]
    return {f"papers_{k}.md": "\n".join(head + rows()) + "\n" for k, rows in papers.items()}


def main() -> None:
    for name, text in tables().items():
        (TABLES / name).write_text(text)
        print(f"{name}\n\n{text}")


if __name__ == "__main__":
    main()
