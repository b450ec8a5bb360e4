"""The tables of five papers next to ours: writes docs/tables/papers_*.md.

Our figures are read from docs/tables, where other scripts wrote them, and from the folder long,
which has what these print where docs/tables has less. This script has the papers' figures and their
errors. It runs nothing. A cell has the paper's figure, ours, and the difference in standard errors
in brackets,

    (ours - theirs) / sqrt(s^2 / n + theirs_s^2 / theirs_n),

with the standard deviations s over n runs. If we have one run, the paper's s stands for ours. Where
a paper does not state n, the unit is its s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parents[2] / "docs" / "tables"
LONG = Path(__file__).with_name("long")


class Figure(NamedTuple):
    """A figure; its sd over runs, None if unknown; and how many runs."""

    value: float
    sd: float | None = None
    runs: int | None = None


def lines_of(name: str) -> list[list[str]]:
    """The cells of a table, line by line."""
    path = LONG / f"{name}.md"
    text = (path if path.exists() else TABLES / path.name).read_text()
    return [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]


def line(name: str, *first: str) -> list[str]:
    """The line that begins with these cells."""
    return next(x for x in lines_of(name) if x[: len(first)] == list(first))


def figure(cell: str, runs: int | None = None) -> Figure:
    """The figure of a cell such as ``0.71 ± 0.02``; without ``runs``, only its value."""
    found = [float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", cell)]
    return Figure(found[0], found[1] if len(found) > 1 and runs else None, runs)


def away(theirs: Figure, ours: Figure) -> str:
    """The difference in standard errors; empty if no error is known or all are rounded to 0."""
    if not theirs.sd:
        return ""
    if theirs.runs is None:
        return f"{(ours.value - theirs.value) / theirs.sd:+.1f}"
    sd, runs = (theirs.sd, 1) if ours.sd is None else (ours.sd, ours.runs or 1)
    error = math.sqrt(sd**2 / runs + theirs.sd**2 / theirs.runs)
    return f"{(ours.value - theirs.value) / error:+.1f}"


def cell(theirs: Figure, ours: Figure, form: str) -> str:
    """``paper, ours (difference)``."""
    difference = away(theirs, ours)
    text = f"{theirs.value:{form}}, {ours.value:{form}}"
    return f"{text} ({difference})" if difference else text


def table(*lines: Iterable[str]) -> str:
    """Markdown; the first line is the head, and lines are filled up with empty cells."""
    rows = [list(x) for x in lines]
    width = len(rows[0])
    text = [f"| {' | '.join(x + [''] * (width - len(x)))} |" for x in rows]
    return "\n".join([text[0], "|---" * width + "|", *text[1:]])


def still_open(*lines: tuple[str, str]) -> str:
    """What nobody measured here, and in how many hours two cores would."""
    return f"Not run, with hours on two cores: {'; '.join(f'{x} ({y})' for x, y in lines)}."


# --- Yu et al. 2023: ten runs of 400 epochs

METRICS = ("identity", "wenzel", "rmsprop", "shampoo", "monge")
YU = {
    ("accuracy", "gaussian"): ((96.85, 5), (96.86, 3), (96.89, 4), (96.89, 4)),
    ("accuracy", "horseshoe"): ((98.23, 3), (98.07, 3), (97.98, 8), (98.20, 6), (98.31, 5)),
    ("NLL", "gaussian"): ((0.1310, 4), (0.1315, 2), (0.1307, 5), (0.1286, 3)),
    ("NLL", "horseshoe"): ((0.0750, 4), (0.0768, 9), (0.0678, 11), (0.0641, 9), (0.0629, 9)),
    ("ECE", "gaussian"): ((0.0430, 4), (0.0438, 4), (0.0447, 3), (0.0421, 3)),
    ("ECE", "horseshoe"): ((0.0281, 4), (0.0248, 5), (0.0124, 9), (0.0164, 8), (0.0180, 9)),
}
"""Tables 1 (accuracies in %) and 8, 400 units: figure and sd in its last digit."""
YU_SECONDS = {"gaussian": (8.1, 7.7, 8.8, 18.8), "horseshoe": (8.3, 9.5, 10.7, 20.1, 12.9)}
"""Table 2: seconds per epoch."""
YU_EQUAL_TIME = {
    "gaussian": Figure(-0.0007, 4.5e-4, 10),
    "horseshoe": Figure(-0.0059, 9.8e-4, 10),
}
"""Table 6: NLL of Shampoo minus that of the identity, and the sd of this difference."""
YU_SHORT = {
    ("curvature", "gaussian"): {"identity": 5.93},
    ("curvature", "horseshoe"): {"identity": 14.65, "rmsprop": 25.76, "monge": 15.08},
    ("confidence", "horseshoe"): {"identity": 0.9544, "rmsprop": 0.9684, "monge": 0.9648},
}
"""Tables 2 and 10; ours are of ten epochs with the Gaussian prior."""
YU_1200 = {"identity": Figure(0.0809, 4e-4, 10), "shampoo": Figure(0.0564, 7e-4, 10)}
"""Table 1: NLL with 1,200 units and the horseshoe prior."""
FUNNEL = (
    ("1% of the scale is below, exact -20.8", 3, ".1f", ("missed", "", "missed", "–", "reached")),
    ("failed steps", 4, ".3f", ("–", "", "–", "–", "some")),
)
"""Label, column in densities.md, form, and what appendix A.4 says of the funnel's end."""
COLUMN = {"accuracy": 4, "NLL": 5, "ECE": 7, "ms": 12, "confidence": 11, "curvature": 12}
"""Columns of mnist.md and mnist_20.md, and the last two of mnist_short.md and mnist_400.md."""


def yu_2023() -> list[str]:
    def by_metric(name: str, prior: str, column: str) -> dict[str, Figure]:
        found = {x[1].removeprefix("SGRLD "): x for x in lines_of(name) if x[0] == prior}
        runs = {m: int(x[2]) for m, x in found.items()}
        return {m: figure(found[m][COLUMN[column]], runs[m]) for m in METRICS if m in found}

    def ours(name: str, prior: str, column: str) -> list[Figure]:
        return list(by_metric(name, prior, column).values())

    def in_short(prior: str, metric: str) -> str:
        """Prior and epochs of 600 steps, from draws every 100 steps after 1,000."""
        draws = int(line("mnist_short", prior, f"SGRLD {metric}")[3])
        return f"{prior}, {(draws + 10) // 6} epochs"

    measured = [("400 units; * 40 epochs", *METRICS)]
    for (measure, prior), published in YU.items():
        unit, form = (1e-2, ".2f") if measure == "accuracy" else (1e-4, ".4f")
        theirs = dict(zip(METRICS, (Figure(x, sd * unit, 10) for x, sd in published), strict=False))
        short, whole = by_metric("mnist", prior, measure), by_metric("mnist_400", prior, measure)
        cells = [
            cell(theirs[m], (short | whole)[m], form) + "*" * (m not in whole)
            if m in theirs
            else ""
            for m in METRICS
        ]
        measured.append((f"Table {8 if measure == 'ECE' else 1}: {measure}, {prior}", *cells))
    for prior, seconds in YU_SECONDS.items():
        times = [x.value for x in ours("mnist_20", prior, "ms")]
        pairs = zip(seconds, times, strict=True)
        ratios = [(Figure(x / seconds[0]), Figure(y / times[0])) for x, y in pairs]
        measured.append((f"Table 2: time, {prior}", *(cell(*x, ".2f") for x in ratios)))
    for (measure, prior), published in YU_SHORT.items():
        name = "mnist_400" if prior == "horseshoe" else "mnist_short"
        found = by_metric(name, prior, measure)
        of, form = {"curvature": ("Table 2", ".2f"), "confidence": ("Table 10", ".4f")}[measure]
        cells = {m: cell(Figure(x), found[m], form) for m, x in published.items()}
        what = in_short(prior, "identity") if name == "mnist_short" else prior
        label = f"{of}: {measure}, {what}"
        measured.append((label, *(cells.get(m, "") for m in METRICS)))
    for prior, gain in YU_EQUAL_TIME.items():
        short = by_metric("mnist_short", prior, "NLL")["shampoo"]
        long = by_metric("mnist", prior, "NLL")["identity"]
        difference = cell(gain, Figure(short.value - long.value), ".4f")
        label = f"Table 6: NLL minus identity's*, {in_short(prior, 'shampoo')}"
        measured.append((label, "", "", "", difference))
    prior = "horseshoe, 1,200 units"
    found = by_metric("mnist_short", prior, "NLL")
    cells = {m: cell(x, found[m], ".4f") for m, x in YU_1200.items()}
    label = f"Table 1: NLL, {in_short(prior, 'shampoo')}"
    measured.append((label, *(cells.get(m, "") for m in METRICS)))
    lines = {x[0]: x for x in lines_of("densities")}
    for label, column, form, said in FUNNEL:
        cells = [
            f"{x}, {figure(lines[m][column]).value:{form}}" if m in lines else ""
            for m, x in zip(METRICS, said, strict=True)
        ]
        measured.append((f"Figure 2, funnel: {label}", *cells))
    return [
        table(*measured),
        still_open(
            ("400 units at 400 epochs, the rest", "20"),
            ("800 units; horseshoe, 0.0798 to 0.0603", "77"),
            ("1,200 units at 400 epochs", "170"),
            ("ResNet-20 on CIFAR-10, 2 priors", "2,300"),
            ("Monge's alpha squared", "30"),
        ),
    ]


# --- Rensmeyer and Niggemann 2025


def rensmeyer() -> list[str]:
    names = ("PSGLD", "SGRLD, Monge", "SGRLD, Shampoo", "Adam-SGLD", "PSGLD, corrected")
    found = {x[0]: f"{x[1]}, {x[2]} ({x[3]})" for x in lines_of("densities") if len(x) == 6}
    return [
        table(
            ("variance", *names),
            ("Figures 1, 2", *(found[name] for name in names)),
            ("Figure 3, shrinking steps", *(found.get(f"{name}, shrinking", "") for name in names)),
        ),
        still_open(("Figure 2 at the paper's step, 40 times smaller", "2")),
    ]


# --- Yu et al. 2024

RLA = ("euclidean", "monge", "monge-log", "fisher")
SETS = ("ripley", "pima", "heart", "australian", "german")
RLA_SPREAD = {
    "snelson": {
        "NUTS": (0.0, 0.002),
        "euclidean": (0.617, 0.064),
        "monge": (0.237, 0.003),
        "fisher": (0.0, 0.002),
    },
    "snelson-gap": {
        "NUTS": (0.02, 0.029),
        "euclidean": (0.407, 0.075),
        "monge": (2.722, 0.02),
        "fisher": (0.066, 0.017),
    },
    "snelson-std": {"NUTS": (0.0, 0.001), "euclidean": (0.231, 0.041), "fisher": (0.0, 0.001)},
}
"""Tables 3 and 5: sd of the MSE and of the NLL."""
BIAS = {"euclidean": "exact", "monge": "grows", "monge-log": "exact", "fisher": "exact"}
"""Sections 3 and 11: what the paper says of Gaussians of 1 to 10 dimensions."""
LEAST = 5e-4
"""An sd of 0.000 is at most half of the last digit."""


def yu_2024() -> list[str]:
    def pairs(name: str, target: str, metrics: Iterable[str]) -> dict[str, tuple]:
        found = {x[2]: x for x in lines_of(name) if x[0] == target}
        both = {}
        for m in metrics:
            if m in found and found[m][8] != "–":
                theirs = figure(found[m][8], 1)
                theirs = Figure(theirs.value, max(theirs.sd or 0.0, LEAST))
                both[m] = theirs, figure(found[m][3])
        return both

    def ratios(name: str, target: str, metrics: Iterable[str]) -> dict[str, list[Figure]]:
        """To straight draws."""
        both = pairs(name, target, metrics)
        return {
            m: [Figure(x.value / y.value) for x, y in zip(v, both["euclidean"], strict=True)]
            for m, v in both.items()
        }

    measured = [("", "NUTS", *RLA)]
    for target in ("banana", "banana-hausdorff", *SETS):
        both = pairs("riemannian_laplace_10000", target, RLA)
        of = "Table 2" if target in SETS else "Table 1"
        cells = [cell(*both[m], ".3f") if m in both else "" for m in RLA]
        measured.append((f"{of}: W1, {target}", "", *cells))
    for name in SETS:
        found = ratios("riemannian_laplace", f"{name}-raw", RLA)
        cells = [cell(*found[m], ".2f") if m in found else "" for m in RLA[1:]]
        measured.append((f"Table 2: ratio of W1, {name}-raw", "", "", *cells))
    for name, sds in RLA_SPREAD.items():
        found = {x[2]: x for x in lines_of("riemannian_laplace") if x[0] == name}
        of = "Table 5" if name == "snelson-std" else "Table 3"
        for k, measure in enumerate(("MSE", "NLL")):
            cells = [
                cell(
                    Figure(figure(found[m][7 + k]).value, max(sds[m][k], LEAST)),
                    figure(found[m][3 + k]),
                    ".3f",
                )
                if m in sds
                else ""
                for m in ("NUTS", *RLA)
            ]
            measured.append((f"{of}: {measure}, {name}", *cells))
    for size in (1, 10):
        lines = [line("riemannian_laplace", f"gaussian-{size}", str(size), m) for m in RLA]
        cells = [f"{BIAS[x[2]]}, {figure(x[3]).value:.3f}" for x in lines]
        floor = figure(lines[0][4]).value
        measured.append((f"Figure 3: W1 in 1 of {size} dimensions, floor {floor:.3f}", "", *cells))
    ms = figure(line("laplace_speed", "guide, 10,000 draws")[1])
    seconds = cell(Figure(0.014), Figure(ms.value / 1000), ".4f")
    measured.append(("Table 4: seconds per draw, german's size", *[""] * 4, seconds))
    name, sets = "riemannian_laplace_empirical", SETS[:3]
    both = [pairs(name, x, ["empirical"])["empirical"] for x in sets]
    raw = [ratios(name, f"{x}-raw", ("euclidean", "empirical"))["empirical"] for x in sets]
    empirical = [
        ("Table 6: empirical Fisher matrix", *sets),
        ("W1", *(cell(*x, ".3f") for x in both)),
        ("ratio of W1, raw", *(cell(*x, ".2f") for x in raw)),
    ]
    return [
        table(*measured),
        table(*empirical),
        still_open(
            ("raw inputs with 10,000 draws", "6"),
            ("monge-log, the rest; the standardised gap", "10"),
            ("seconds per draw, the rest", "0.5"),
        ),
    ]


# --- Franzese et al. 2021: ten splits, and three runs

UCI = ("wine", "protein", "naval", "kin8nm", "power", "boston")
UCI_METHODS = ("MAP", "dropout", "SGLD", "SGLD T", "SGHMC", "SGHMC T", "I-SGD")
UCI_FAILED = {
    ("SGLD", "naval"): 6,
    ("SGLD", "kin8nm"): 3,
    ("SGLD T", "naval"): 6,
    ("SGLD T", "kin8nm"): 3,
    ("SGHMC", "naval"): 2,
    ("SGHMC", "kin8nm"): 1,
    ("SGHMC T", "naval"): 6,
}
"""How many of their ten splits failed."""
LENET = {
    "MAP": ((98.87, 0.11), (0.0353, 0.0021), (0.0468, 0.0001)),
    "SGRLD identity": ((99.27, 0.01), (0.0280, 0.0017), (0.0531, 0.0004)),
    "SGHMC": ((99.31, 0.02), (0.0268, 0.0007), (0.0531, 0.0003)),
    "I-SGD": ((99.16, 0.03), (0.0264, 0.0016), (0.0491, 0.0003)),
}
"""Table 3: accuracy in %, MNLL and ECE, with their sd. A run of SGLD failed."""


def franzese() -> list[str]:
    found = {(x[0], x[2]): x for x in lines_of("uci")}
    measured = [("", *UCI)]
    for k, measure in enumerate(("RMSE", "MNLL")):
        for method in UCI_METHODS:
            lines = [found[name, method] for name in UCI]
            runs = [10 - UCI_FAILED.get((method, name), 0) for name in UCI]
            cells = [
                cell(figure(x[7 + k], n), figure(x[3 + k], int(x[1])), ".4g")
                for x, n in zip(lines, runs, strict=True)
            ]
            measured.append((f"Table {k + 1}: {measure}, {method}", *cells))
    ours = {x[1]: x for x in lines_of("mnist_lenet") if x[0] == "gaussian"}
    lenet = [("LeNet-5", *LENET)]
    for k, (measure, column, form) in enumerate(
        (("accuracy", 4, ".2f"), ("MNLL", 5, ".4f"), ("ECE", 7, ".4f"))
    ):
        cells = [
            cell(Figure(*x[k], 3 - (m == "SGRLD identity")), figure(ours[m][column]), form)
            for m, x in LENET.items()
        ]
        lenet.append((f"Table 3: {measure}", *cells))
    return [
        table(*measured),
        table(*lenet),
        still_open(
            ("ten epochs of VSGD and dropout", "1"),
            ("three runs of a million steps", "100"),
            ("entropies and ROC on NOT-MNIST, not at hand", "0.2"),
            ("other lengths of Adam", "1"),
            ("ResNet-18 on CIFAR-10, six methods", "3,400"),
        ),
    ]


# --- Kim et al. 2025: four runs, 100 cycles of 5,000 steps of 256 rows

PARAMETERS = {
    "SGHMC": "274,042",
    "one factor on each side": "383,098",
    "two": "492,154",
    "of rank p / 8": "303,610",
    "of rank p / 4": "330,874",
}
"""Tables 7 and 8. Ours are the same by `tests/test_cifar_example.py`."""


def kim() -> list[str]:
    times = [float(line("networks", f"resnet, {x}")[4]) for x in ("SGHMC", "PXSGHMC")]
    digits = [line("digits_network", "digits", "dense", x) for x in ("SGHMC", "PX factors")]
    nll, ambiguity = ([figure(x[k]).value for x in digits] for k in (5, 7))
    memory = [float(x[1]) + float(x[2]) for x in lines_of("cifar_memory")[2:]]
    ratios = (
        ("Table 7: time, ResNet-20", 64 / 61, times, ".2f"),
        ("memory", 1838 / 1818, memory, ".3f"),
        ("memory, two factors", 1852 / 1818, memory[::2], ".3f"),
        ("Table 1: NLL, ours of digits", 0.388 / 0.422, nll, ".2f"),
        ("Table 10: ambiguity, ours of digits", 0.242 / 0.186, ambiguity, ".2f"),
    )
    return [
        table(
            ("Tables 7, 8: parameters", *PARAMETERS),
            ("theirs and ours", *PARAMETERS.values()),
        ),
        table(
            ("PX-SGHMC over SGHMC", *(x[0] for x in ratios)),
            ("", *(cell(Figure(x), Figure(y[1] / y[0]), form) for _, x, y, form in ratios)),
        ),
        still_open(
            ("CIFAR-10, shifts, out-of-distribution", "3,300"),
            ("augmented, three data sets", "9,800"),
            ("number of factors", "1,300"),
            ("from HMC's checkpoint, not at hand", "7,300"),
            ("factors of low rank", "650"),
            ("constant steps", "1,300"),
            ("cold posteriors, acceptance of GGMC", "2,600"),
        ),
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
    return {f"papers_{k}.md": "\n\n".join(parts()) + "\n" for k, parts in papers.items()}


def main() -> None:
    for name, text in tables().items():
        (TABLES / name).write_text(text)
        print(f"{name}\n\n{text}")


if __name__ == "__main__":
    main()
