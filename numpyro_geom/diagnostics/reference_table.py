"""The comparison of draws with reference draws, as a table with a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .joint_distances import Distance
from .text_table import Table, TextTable

FALSE_ALARM = 0.01
"""Probability that two runs on the same target are said to differ."""
SHOWN = 25
"""Number of scalars in the printed comparison; the data frame has all."""
FEW = 100
"""Number of effective draws below which a verdict means little."""
COLUMNS = {
    "mean_error": ("mean error", "+.3f"),
    "mean_noise": ("+-", ".3f"),
    "sd_ratio": ("sd ratio", ".3f"),
    "sd_noise": ("+-", ".3f"),
    "w1": ("W1", ".3f"),
    "w1_floor": ("floor", ".3f"),
    "coverage": ("in 90%", ".3f"),
    "coverage_noise": ("+-", ".3f"),
    "ess": ("ESS", ".0f"),
    "reference_ess": ("ref. ESS", ".0f"),
    "p_value": ("p, corrected", ".2g"),
}
"""Columns of the printed table: title and format of each figure."""


class ScalarDifference(NamedTuple):
    """How the draws of one scalar differ from the reference's; errors are standard errors.

    Attributes:
        name: name of the scalar.
        mean_error: (mean - reference mean) / reference sd.
        mean_noise: Monte Carlo error of ``mean_error``.
        sd_ratio: sd / reference sd.
        sd_noise: Monte Carlo error of ``sd_ratio``.
        w1: Wasserstein-1 distance / reference sd.
        w1_floor: mean of ``w1`` if both sides have the same distribution.
        w1_noise: bound on the standard deviation of ``w1`` in that case.
        coverage: share of the draws in the reference's central 90% interval.
        coverage_noise: Monte Carlo error of ``coverage``.
        ess: effective sample size of the draws, the smaller one of mean and sd.
        reference_ess: the same for the reference.
        p_value: smallest p-value of the four comparisons, corrected for the number of comparisons
            over all scalars.
    """

    name: str
    mean_error: float
    mean_noise: float
    sd_ratio: float
    sd_noise: float
    w1: float
    w1_floor: float
    w1_noise: float
    coverage: float
    coverage_noise: float
    ess: float
    reference_ess: float
    p_value: float

    @property
    def least_ess(self) -> float:
        """The smaller effective sample size of both sides."""
        return min(self.ess, self.reference_ess)


@dataclass(frozen=True, repr=False)
class Comparison(TextTable):
    """What `compare` found; prints as a table and a verdict.

    Attributes:
        scalars: the differences, one per scalar, in the order of the draws.
        joint: distances between the joint distributions; empty for too few effective draws.
        left_out: variables that only one side has.
        constant: scalars that are the same constant on both sides.
        sizes: (chains, draws) of the draws and of the reference.
    """

    scalars: tuple[ScalarDifference, ...]
    joint: tuple[Distance, ...]
    left_out: tuple[str, ...]
    constant: tuple[str, ...]
    sizes: tuple[tuple[int, int], tuple[int, int]]

    def to_dataframe(self) -> Any:
        """All scalars as a pandas DataFrame, indexed by name."""
        import pandas as pd

        return pd.DataFrame(self.scalars, columns=ScalarDifference._fields).set_index("name")

    @property
    def _differing(self) -> tuple[str, ...]:
        """Names of the scalars and joint distances that differ by more than chance allows."""
        share = FALSE_ALARM / 2  # half for the scalars, half for the joint distances
        scalars = (s.name for s in self.scalars if s.p_value < share)
        return (*scalars, *(d.name for d in self.joint if d.p_value < share / len(self.joint)))

    @property
    def within_noise(self) -> bool:
        """Whether no difference is larger than chance allows, at 1% for all together."""
        return not self._differing

    @property
    def verdict(self) -> str:
        """The result in words."""
        number = len(self.scalars)
        if self._differing:
            worst = min(self.scalars, key=lambda s: s.p_value)
            named = ", ".join(self._differing[:5]) + (", ..." if len(self._differing) > 5 else "")
            return (
                f"differs: {len(self._differing)} of {number + len(self.joint)} ({named}); "
                f"the mean of {worst.name} is off by {worst.mean_error:+.2g} +- "
                f"{worst.mean_noise:.1g} sd, and its sd is {worst.sd_ratio:.3g} +- "
                f"{worst.sd_noise:.1g} times the reference's"
            )
        mean = max(s.mean_noise for s in self.scalars)
        sd = max(s.sd_noise for s in self.scalars)
        text = (
            f"within noise: {number} scalars and {len(self.joint)} joint distances agree as well "
            f"as two runs on one target; Monte Carlo errors are up to {mean:.1g} sd of a mean and "
            f"{100 * sd:.2g}% of an sd"
        )
        least = min(self.scalars, key=lambda s: s.least_ess)
        if least.least_ess < FEW:
            text += f". That says little: {least.name} has {least.least_ess:.0f} effective draws"
        return text

    def _table(self) -> Table:
        shown: Sequence[ScalarDifference] = self.scalars
        if len(shown) > SHOWN:
            shown = sorted(shown, key=lambda s: s.p_value)[:SHOWN]
        header = ["scalar", *(title for title, _ in COLUMNS.values())]
        rows = [
            [s.name, *(format(getattr(s, name), spec) for name, (_, spec) in COLUMNS.items())]
            for s in shown
        ]
        return header, rows

    def _lines(self) -> list[str]:
        own, other = (f"{chains} chains of {draws}" for chains, draws in self.sizes)
        lines = [f"draws: {own}; reference: {other}"]
        if len(self.scalars) > SHOWN:
            lines.append(f"the {SHOWN} of {len(self.scalars)} scalars that differ the most")
        for d in self.joint:
            lines.append(
                f"{d.name}: {d.value:.3f}, by chance {d.floor:.3f} +- {d.floor_error:.3f} "
                f"(p = {d.p_value:.2g})"
            )
        if not self.joint:
            lines.append("joint distances: not computed, too few effective draws")
        if self.left_out:
            lines.append(f"in one of the two only, left out: {', '.join(self.left_out)}")
        if self.constant:
            lines.append(f"constant, left out: {', '.join(self.constant)}")
        return [*lines, self.verdict]
