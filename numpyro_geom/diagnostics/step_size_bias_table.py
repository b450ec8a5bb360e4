"""Results of runs at several step sizes, as a table with a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t

from .reference_table import FALSE_ALARM, FEW
from .text_table import Table, TextTable

SHOWN = 30
"""Number of lines of the printed table; the data frame has all lines."""


class ScalarBias(NamedTuple):
    """How the mean or the sd of one scalar depends on the step size; errors are standard errors.

    Attributes:
        name: name of the scalar.
        moment: ``"mean"`` or ``"sd"``.
        values: the moment at each step size.
        errors: Monte Carlo errors of the values.
        limit: value of the fitted line at h = 0.
        limit_error: standard error of the limit.
        slope: slope of the line, per unit of h.
        slope_error: standard error of the slope.
        bias: slope times the kernel's own step size, over the sd at the smallest h. (That sd is
            always positive; the limit of an sd may not be.) The bias of a mean is in sds, the bias
            of an sd is relative.
        bias_error: standard error of the bias.
        fit: p-value of the F test that the line fits.
        ess: smallest effective sample size of mean and sd over the runs.
    """

    name: str
    moment: str
    values: tuple[float, ...]
    errors: tuple[float, ...]
    limit: float
    limit_error: float
    slope: float
    slope_error: float
    bias: float
    bias_error: float
    fit: float
    ess: float

    @property
    def is_negative(self) -> bool:
        """Whether this is an sd whose fitted line is not above 0 at h = 0."""
        return self.moment == "sd" and self.limit <= 0


@dataclass(frozen=True, repr=False)
class BiasCurve(TextTable):
    """What `bias_vs_step` found; prints as a table and a verdict.

    Attributes:
        scalars: mean and sd of each scalar.
        step_size: the kernel's own step size h.
        step_sizes: the step sizes of the runs.
        num_steps: steps per draw at each of them.
        undone: number of draws with failed steps at each of them.
        constant: names of scalars that have one value in all runs; they are left out.
    """

    scalars: tuple[ScalarBias, ...]
    step_size: float
    step_sizes: tuple[float, ...]
    num_steps: tuple[int, ...]
    undone: tuple[int, ...]
    constant: tuple[str, ...] = ()

    def to_dataframe(self) -> Any:
        """All means and sds as a pandas DataFrame; ``at_<h>`` and ``error_<h>`` for each run."""
        import pandas as pd

        rows = []
        for s in self.scalars:
            row = s._asdict()
            values, errors = row.pop("values"), row.pop("errors")
            for h, value, error in zip(self.step_sizes, values, errors, strict=True):
                row[f"at_{h:.3g}"], row[f"error_{h:.3g}"] = value, error
            rows.append(row)
        return pd.DataFrame(rows).set_index(["name", "moment"])

    @property
    def biased(self) -> tuple[ScalarBias, ...]:
        """Scalars with a bias larger than chance allows, at 1% for all together; the largest first.

        The test uses Student's t, with effective draws minus one degrees of freedom. Scalars in
        ``negative`` are left out.
        """
        level = FALSE_ALARM / 2 / len(self.scalars)
        limits = t.isf(level, np.maximum([s.ess - 1 for s in self.scalars], 1.0))
        seen = [
            s
            for s, limit in zip(self.scalars, limits, strict=True)
            if not s.is_negative and abs(s.bias) > limit * s.bias_error
        ]
        return tuple(sorted(seen, key=lambda s: -abs(s.bias)))

    @property
    def negative(self) -> tuple[ScalarBias, ...]:
        """Sds whose fitted line is not above 0 at h = 0; they have no verdict."""
        return tuple(s for s in self.scalars if s.is_negative)

    @property
    def bent(self) -> tuple[ScalarBias, ...]:
        """Moments that a line in h does not fit, at 1% for all together; the worst first."""
        ranked = sorted(self.scalars, key=lambda s: s.fit)
        return tuple(s for s in ranked if s.fit < FALSE_ALARM / len(ranked))

    @property
    def verdict(self) -> str:
        """The largest bias at the kernel's own step size, or how large a bias was detectable."""
        where = f"at h = {self.step_size:.3g}, the kernel's own"
        if self.biased:
            worst = self.biased[0]
            unit, percent = ("%", 100) if worst.moment == "sd" else (" sd", 1)
            text = (
                f"biased {where}: {len(self.biased)} of {len(self.scalars)} means and sds, "
                f"most of all the {worst.moment} of {worst.name} by {percent * worst.bias:+.2g} +- "
                f"{percent * worst.bias_error:.1g}{unit}"
            )
        else:
            means = [s.bias_error for s in self.scalars if s.moment == "mean"]
            sds = [s.bias_error for s in self.scalars if s.moment == "sd" and not s.is_negative]
            text = (
                f"no bias seen {where}: the bias of means and sds of {len(self.scalars) // 2} "
                f"scalars is within noise, which is up to {max(means, default=0.0):.1g} sd for "
                f"means and {100 * max(sds, default=0.0):.2g}% for sds"
            )
            least = min(self.scalars, key=lambda s: s.ess)
            if least.ess < FEW:
                text += f". That says little: {least.name} has {least.ess:.0f} effective draws"
        if self.bent:
            text += (
                f". A line in h does not fit {_named(self.bent)}: the limits at h = 0 are off, "
                "use smaller factors"
            )
        if self.negative:
            text += (
                f". A line in h gives an sd below 0 at h = 0 for {_named(self.negative)}, so "
                "these have no verdict: use smaller factors"
            )
        return text

    def ranked(self, most: int) -> tuple[ScalarBias, ...]:
        """The moments with the largest ratio of bias to its error."""
        return tuple(sorted(self.scalars, key=lambda s: -abs(s.bias) / s.bias_error)[:most])

    def _table(self) -> Table:
        header = ["scalar", "", *(f"h={h:.3g}" for h in self.step_sizes)]
        header += ["h -> 0", "+-", f"bias at {self.step_size:.3g}", "+-", "line fits, p"]
        shown = self.scalars if len(self.scalars) <= SHOWN else self.ranked(SHOWN)
        rows = []
        for s in shown:
            percent, unit = (100.0, "%") if s.moment == "sd" else (1.0, " sd")
            limits = [*(f"{v:.4g}" for v in (*s.values, s.limit)), f"{s.limit_error:.2g}"]
            bias = [f"{percent * s.bias:+.3f}{unit}", f"{percent * s.bias_error:.2g}"]
            rows.append([s.name, s.moment, *limits, *bias, f"{s.fit:.2g}"])
        return header, rows

    def _lines(self) -> list[str]:
        lines = []
        if len(self.scalars) > SHOWN:
            lines.append(f"the {SHOWN} of {len(self.scalars)} whose bias stands out the most")
        lines.append(f"steps per draw: {', '.join(map(str, self.num_steps))}")
        if any(self.undone):
            lines.append(
                f"draws with failed steps: {', '.join(map(str, self.undone))}. They avoid part of "
                "the target, which no line in h describes: use smaller factors"
            )
        if self.constant:
            lines.append(f"constant, left out: {', '.join(self.constant)}")
        return [*lines, self.verdict]


def _named(scalars: tuple[ScalarBias, ...]) -> str:
    """The number of scalars, and the first names."""
    names = ", ".join(f"{s.moment} of {s.name}" for s in scalars[:3])
    return f"{len(scalars)} of them ({names})"
