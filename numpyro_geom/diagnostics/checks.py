"""The definition of a check of a run, and the thresholds of all checks.

`draw_checks` checks the draws, `moment_checks` the gradients at the draws, `run_checks` the
records of the run, and `guide_checks` the draws of a guide. `diagnose`, `step_size_summary` and
`warn_if_unreliable` only show the results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

LEAST_DRAWS = 8
"""Draws per chain that split chains need."""
LEAST_ESS = 400
"""Effective draws over all chains (Vehtari et al., Bayesian Analysis 16(2), 2021)."""
LARGEST_RHAT = 1.01
"""Bound for up to four chains (same source as `LEAST_ESS`); see `largest_rhat`."""
TOLERATED_MEAN = 0.25
"""Error of a mean, in standard deviations. It widens the spread around the true mean by 3%."""
TOLERATED_SHIFT = 0.15
"""Shift of a mean by the step size, in standard deviations. The first-order estimate is up to a
quarter smaller than the real shift."""
TOLERATED_SD = 0.05
"""Relative error of a standard deviation that the default ``bias_tolerance`` allows."""
TOLERATED_VARIANCE = 2 * TOLERATED_SD
"""Relative error of a variance; for temperatures and step sizes without a known
``bias_tolerance``."""
ROUNDING = 1.05
"""Factor on the tolerance: the automatic step size reaches the tolerance up to rounding."""
BINDING = 0.8
"""Share of the tolerance from which the larger term of the bias limits the step size. The rules of
kernels with a momentum aim at tolerance / (1 + tolerance)."""
ENOUGH_RELAXATIONS = 50
"""Relaxation times below which a run is too short; 50 of them give about 25 independent draws."""
MOST_LONGER = 25.0
"""Largest factor by which a run may have to be longer if the advice is to draw more."""
WIDE_CURVATURE = 15.0
"""Ratio of curvatures along the median chain above which one step size does not fit. The largest
ratio over chains is less informative, because in many correct runs one chain meets an unusual
place. Of 72 correct runs, none has a ratio above 11.6. Of the wrong runs that no other check
flags, one has a ratio of 31."""
LARGEST_CLAMPED = 0.05
"""Share of entries whose minibatch noise exceeds the noise that the kernel injects."""
LEAST_ACCEPTANCE = 0.5
"""Share of the target acceptance rate."""
FEWEST_WEIGHTS = 25
"""Smallest number of draws for a Pareto shape. The tail is a fifth of the draws, and the shape
needs five values in the tail."""
FALSE_ALARMS = 0.01
"""Chance that Monte Carlo error alone flags one of the figures of a check."""

LARGEST_JUMP = 0.3
"""In nats. Kinks of a ReLU network are at most 0.06; jumps of a change point are 2 to 4."""

HIDDEN = "Monte Carlo error hides it"


class Check(NamedTuple):
    """One figure of a run, and whether it is as expected.

    Attributes:
        name: name of the figure.
        value: the figure; NaN if the check has only text.
        error: its Monte Carlo standard error, or None.
        threshold: the expected value, in words; empty if any value is fine.
        ok: whether the figure is as expected; None if any value is fine, or if Monte Carlo error
            is too large to decide.
        where: what the figure refers to, for instance the worst coordinate.
        advice: what to do if the figure is not as expected.
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
        """What the figure refers to, and what to do if it is flagged."""
        if self.ok is False and self.advice:
            return f"{self.where}: {self.advice}" if self.where else self.advice
        return self.where

    @property
    def figure(self) -> str:
        """The value with its error, in a few digits."""
        if np.isnan(self.value):
            return "-"
        error = "" if self.error is None else f" +- {self.error:.2g}"
        # the third decimal of R-hat matters
        return (f"{self.value:.4g}" if self.name == "R-hat" else digits(self.value)) + error

    @property
    def sentence(self) -> str:
        """The whole check in one line, for a warning."""
        expected = f", expected {self.threshold}" if self.threshold else ""
        return f"{self.name}: {self.figure}{expected}; {self.remark}"


def at_most(name: str, value: Any, bound: float, where: str, advice: str) -> Check:
    """A check that a figure is at most ``bound``."""
    ok = bool(value <= bound)
    return Check(name, float(value), None, f"at most {bound:.3g}", ok, where, advice)


def at_least(name: str, value: Any, bound: float, where: str, advice: str) -> Check:
    """A check that a figure is at least ``bound``."""
    ok = bool(value >= bound)
    return Check(name, float(value), None, f"at least {bound:.3g}", ok, where, advice)


def none_of(name: str, count: Any, where: str, advice: str) -> Check:
    """A check that something never happened."""
    return Check(name, float(count), None, "0", bool(count == 0), where, advice)


def largest_rhat(chains: int) -> float:
    """The value of R-hat at 400 effective draws, from the spread of the means of half chains.

    For four chains it is the usual 1.01. With more chains, each chain has fewer effective draws, so
    the bound is larger.
    """
    return max(LARGEST_RHAT, (1 + 2 * chains / LEAST_ESS) ** 0.5)


def by_chance(count: int, effective: Any) -> Any:
    """Standard errors that the largest of ``count`` figures exceeds by chance, two-sided."""
    return student.isf(FALSE_ALARMS / (2 * count), np.maximum(np.asarray(effective) - 1, 1.0))


def verdict(wrong: bool, error: float, size: float, tolerated: float) -> bool | None:
    """Whether a figure is as expected; None if Monte Carlo error is too large to decide."""
    if wrong:
        return False
    return True if max(error, size) <= tolerated else None


def digits(x: float) -> str:
    """The number with three digits; large figures are shown as whole numbers."""
    text = f"{x:.3g}"
    return f"{float(text):,.0f}" if 1000 <= abs(x) < 1e9 else text


def span(values: Any) -> str:
    """One figure, or the range over chains if they differ visibly."""
    low, high = digits(float(np.min(values))), digits(float(np.max(values)))
    return low if low == high else f"{low} to {high}"
