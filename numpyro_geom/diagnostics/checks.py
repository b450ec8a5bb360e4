"""What a check of a run is, and every threshold that one has.

`draw_checks` looks at the draws, `moment_checks` at gradients at them, `run_checks` at what the
run says of itself, `guide_checks` at the draws of a guide. `diagnose`, `step_size_summary` and
`warn_if_unreliable` show what these find, and judge nothing themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

LEAST_DRAWS = 8
"""Draws a chain that split chains need."""
LEAST_ESS = 400
"""Effective draws in all chains together (Vehtari et al., Bayesian Analysis 16(2), 2021)."""
LARGEST_RHAT = 1.01
"""Of up to four chains (the same source); see `largest_rhat`."""
TOLERATED_MEAN = 0.25
"""Error of a mean, in standard deviations: it widens the spread around the true mean by 3%."""
TOLERATED_SHIFT = 0.15
"""What the step size may shift a mean by, in standard deviations. To first order it is up to a
quarter less than it turns out to be."""
TOLERATED_SD = 0.05
"""Relative error of a standard deviation that the default ``bias_tolerance`` allows."""
TOLERATED_VARIANCE = 2 * TOLERATED_SD
"""Of a variance, likewise; for temperatures and step sizes where no ``bias_tolerance`` is known."""
ROUNDING = 1.05
"""Times the tolerance: the automatic step size reaches it, up to rounding."""
BINDING = 0.8
"""Share of the tolerance from which the larger term of a bias is what binds: the rules of kernels
with a momentum aim at tolerance / (1 + tolerance)."""
ENOUGH_RELAXATIONS = 50
"""Relaxation times below which a run is too short: about 25 independent draws."""
MOST_LONGER = 25.0
"""Times that a run may have to be longer for more draws to be an advice."""
WIDE_CURVATURE = 15.0
"""Ratio of curvatures measured along the median chain above which one step size does not fit. The
largest of the chains says less: one of them meets an odd place in many a run that is right. Of 72
right runs none is above 11.6, and of those that no other check flags one wrong one is at 31."""
LARGEST_CLAMPED = 0.05
"""Share of entries with more noise than there is to take from."""
LEAST_ACCEPTANCE = 0.5
"""Share of the acceptance rate that was aimed at."""
FEWEST_WEIGHTS = 25
"""Draws below which a tail, a fifth of them, has fewer than the five values that a shape needs."""
FALSE_ALARMS = 0.01
"""Chance that Monte Carlo error alone flags one of the figures of a check."""

LARGEST_JUMP = 0.3
"""In nats. Kinks of a network with ReLU are at most 0.06, jumps of a change point 2 to 4."""

HIDDEN = "Monte Carlo error hides it"


class Check(NamedTuple):
    """One figure of a run, and whether it is as it should be.

    Attributes:
        name: of the figure.
        value: the figure; NaN where there is only something to say.
        error: its Monte Carlo standard error; None where it has none.
        threshold: what it should be, in words; empty where any value is fine.
        ok: whether it is; None where any value is fine, or Monte Carlo error hides it.
        where: what the figure is of, the worst coordinate for instance.
        advice: what to do if it is not what it should be.
    """

    name: str
    value: float
    error: float | None = None
    threshold: str = ""
    ok: bool | None = None
    where: str = ""
    advice: str = ""

    @property
    def remark(self) -> str:
        """What the figure is of, and what to do if it is flagged."""
        if self.ok is False and self.advice:
            return f"{self.where}: {self.advice}" if self.where else self.advice
        return self.where

    @property
    def figure(self) -> str:
        """The value with its error, in a few digits."""
        if np.isnan(self.value):
            return "-"
        error = "" if self.error is None else f" +- {self.error:.2g}"
        # R-hat is judged by its third decimal
        return (f"{self.value:.4g}" if self.name == "R-hat" else digits(self.value)) + error

    @property
    def sentence(self) -> str:
        """All of it in a line, for a warning."""
        expected = f", expected {self.threshold}" if self.threshold else ""
        return f"{self.name}: {self.figure}{expected}; {self.remark}"


def at_most(name: str, value: Any, bound: float, where: str, advice: str) -> Check:
    """A check that a figure is no larger than this."""
    ok = bool(value <= bound)
    return Check(name, float(value), None, f"at most {bound:.3g}", ok, where, advice)


def at_least(name: str, value: Any, bound: float, where: str, advice: str) -> Check:
    """A check that a figure is no smaller than this."""
    ok = bool(value >= bound)
    return Check(name, float(value), None, f"at least {bound:.3g}", ok, where, advice)


def none_of(name: str, count: Any, where: str, advice: str) -> Check:
    """A check that something never happened."""
    return Check(name, float(count), None, "0", bool(count == 0), where, advice)


def largest_rhat(chains: int) -> float:
    """What R-hat is at 400 effective draws, which spread the means of the half chains.

    Of four chains it is the usual 1.01. More chains share the draws, and each says less.
    """
    return max(LARGEST_RHAT, (1 + 2 * chains / LEAST_ESS) ** 0.5)


def by_chance(count: int, effective: Any) -> Any:
    """Standard errors that the largest of so many figures exceeds by chance, two-sided."""
    return student.isf(FALSE_ALARMS / (2 * count), np.maximum(np.asarray(effective) - 1, 1.0))


def verdict(wrong: bool, error: float, size: float, tolerated: float) -> bool | None:
    """Whether a figure is as it should be; None where Monte Carlo error hides it."""
    if wrong:
        return False
    return True if max(error, size) <= tolerated else None


def digits(x: float) -> str:
    """Three digits; large figures are counts."""
    text = f"{x:.3g}"
    return f"{float(text):,.0f}" if 1000 <= abs(x) < 1e9 else text


def span(values: Any) -> str:
    """One figure, or the range over chains where they differ visibly."""
    low, high = digits(float(np.min(values))), digits(float(np.max(values)))
    return low if low == high else f"{low} to {high}"
