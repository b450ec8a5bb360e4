"""The report of a run: a verdict with its cause, then the figures by group."""

from __future__ import annotations

import dataclasses
import html
import textwrap
from collections.abc import Iterator
from typing import Any

from .checks import Check
from .text_table import FLAGGED, html_row

WIDTH = 100
"""Width of the text in columns."""
UNDECIDED = "?"
GROUPS = ("Mixing", "Bias", "Step", "Cost", "Other")
KINDS: dict[str, tuple[str, str]] = {
    "entries that are not finite": ("Mixing", "draws are not finite"),
    "failed geodesics": ("Step", "geodesics failed"),
    "draws with failed steps": ("Step", "steps were not finite or not stable"),
    "divergences": ("Step", "trajectories diverged"),
    "acceptance rate": ("Step", "too many steps are rejected"),
    "jump of the energy": ("Bias", "the density jumps where gradients do not see it"),
    "entries that change from draw to draw": ("Mixing", "the chains do not move"),
    "bias of variances": ("Bias", "the step is too large"),
    "clamped noise": ("Bias", "minibatch noise is larger than the noise to inject"),
    "largest over smallest curvature": ("Step", "one step size does not fit all of the posterior"),
    "relaxation times per chain": ("Mixing", "the chains are too short"),
    "R-hat": ("Mixing", "the chains disagree"),
    "error of the means": ("Bias", "the draws are not centred on the target"),
    "shift of the means by the step": ("Bias", "the step is too large"),
    "scaled force": ("Bias", "the draws are not centred on the target"),
    "relative error of the sd": ("Bias", "the draws are biased"),
    "scaled virial": ("Bias", "the draws are biased"),
    "configurational temperature": ("Bias", "the draws are biased"),
    "kinetic temperature": ("Bias", "the momenta are biased"),
    "draws per chain": ("Mixing", "the draws are too few"),
    "effective sample size": ("Mixing", "the draws are too few"),
    "Pareto shape of weights": ("Bias", "the guide is far from the posterior"),
    "draws with a finite gradient": ("Bias", "gradients are not finite at the draws"),
    "coordinates with a gradient": ("Bias", "gradients are not finite at the draws"),
    "step size": ("Step", ""),
    "steps per draw": ("Step", ""),
    "rows per step": ("Step", ""),
    "condition number": ("Step", ""),
    "effective draws per gradient": ("Cost", ""),
    "effective draws per second": ("Cost", ""),
    "passes over the data": ("Cost", ""),
}
"""For each figure (its name up to a comma): its group, and the problem if it is flagged. An earlier
entry is the cause of a later one."""


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What `diagnose` found; prints as a table, also in notebooks.

    Attributes:
        checks: tuple of `Check`, in the order of printing.
        of_step: whether these are the checks of `step_size_summary`, which does not use the draws.
    """

    checks: tuple[Check, ...]
    of_step: bool = False

    def __post_init__(self) -> None:
        ordered = sorted(self.checks, key=lambda check: GROUPS.index(_kind(check)[0]))
        object.__setattr__(self, "checks", tuple(ordered))

    @property
    def ok(self) -> bool:
        """Whether no check is flagged."""
        return not self.flagged

    @property
    def flagged(self) -> tuple[Check, ...]:
        """Checks whose figure is not as expected."""
        return tuple(check for check in self.checks if check.ok is False)

    @property
    def undecided(self) -> tuple[Check, ...]:
        """Checks with an expected value for which Monte Carlo error prevents a decision."""
        return tuple(check for check in self.checks if check.ok is None and check.threshold)

    @property
    def verdict(self) -> str:
        """One sentence: whether the run is fine, or what is wrong with it."""
        subject = "Verdict on the step alone" if self.of_step else "Verdict"
        if not self.flagged:
            said = "fine, as far as can be told" if self.undecided else "fine"
            return f"{subject}: {said}."
        names = list(KINDS)
        cause = min(
            self.flagged,
            key=lambda c: names.index(_name(c)) if _name(c) in names else len(names),
        )
        figure = f"{cause.name}: {cause.figure}, expected {cause.threshold}"
        return f"{subject}: {_kind(cause)[1]} ({figure})."

    def to_dataframe(self) -> Any:
        """A `pandas.DataFrame` with one row per check, indexed by name."""
        import pandas as pd  # comes with xarray

        return pd.DataFrame(self.checks, columns=Check._fields).set_index("name")

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        cells = [_cells(check) for check in self.checks]
        header = ("", "figure", "value", "expected")
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        widths[0] = len(FLAGGED)
        lines = [*textwrap.wrap(self.verdict, WIDTH), *textwrap.wrap(self._counts(), WIDTH), ""]
        lines.append(_join(header, widths))
        for group, checks in self._groups():
            lines.append(group)
            for check, advice in checks:
                lines += _lines(check, advice, widths)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for group, checks in self._groups():
            rows.append(f'<tr><th colspan="5" style="text-align:left">{group}</th></tr>')
            for check, advice in checks:
                text = ": ".join(filter(None, (check.where, advice)))
                rows.append(html_row((*_cells(check), text), "td"))
        head = html_row(("", "figure", "value", "expected", ""), "th")
        above = "".join(f"<p>{html.escape(line)}</p>" for line in (self.verdict, self._counts()))
        return f"{above}<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"

    def _counts(self) -> str:
        flagged, hidden = len(self.flagged), len(self.undecided)
        text = (
            f"{flagged} of {len(self.checks)} figures flagged"
            if flagged
            else ("Nothing is flagged")
        )
        if hidden:
            text += f", {hidden} undecided (marked {UNDECIDED})"
        return text + (". diagnose(mcmc) looks at the draws too." if self.of_step else ".")

    def _groups(self) -> Iterator[tuple[str, list[tuple[Check, str]]]]:
        """Checks by group; each has its advice, unless an earlier check has the same advice."""
        given: set[str] = set()
        for group in GROUPS:
            found = []
            for check in self.checks:
                if _kind(check)[0] == group:
                    new = check.ok is False and check.advice not in given
                    found.append((check, check.advice if new else ""))
                    given |= {check.advice} if new else set()
            if found:
                yield group, found


def _name(check: Check) -> str:
    return check.name.partition(",")[0]


def _kind(check: Check) -> tuple[str, str]:
    return KINDS.get(_name(check), ("Other", check.name))


def _cells(check: Check) -> tuple[str, str, str, str]:
    undecided = UNDECIDED if check.threshold else ""
    mark = {True: "ok", False: FLAGGED, None: undecided}[check.ok]
    return mark, check.name, check.figure, check.threshold


def _join(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(x.ljust(w) for x, w in zip(cells, widths, strict=True)).rstrip()


def _lines(check: Check, advice: str, widths: list[int]) -> Iterator[str]:
    """A line with the figure, and further lines for text that does not fit."""
    line = _join(_cells(check), widths)
    start = sum(widths) + 2 * len(widths)
    fits = start + len(check.where) <= WIDTH
    yield line.ljust(start) + check.where if check.where and fits else line
    for text in ("" if fits else check.where, advice):
        yield from textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
