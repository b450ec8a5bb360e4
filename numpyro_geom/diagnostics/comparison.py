"""Compare draws with reference draws: every difference comes with its Monte Carlo error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist, pdist

from .._checks import check_flag, check_int, check_names
from .draws import Scalars, chosen, named, read_draws, stored_name, to_scalars
from .monte_carlo import MomentEstimates, effective_size, estimate_moments
from .table import FALSE_ALARM, SHOWN, Printed, Row, caveat

INTERVAL = 0.9
"""Probability of the reference's central interval in which the shares of draws are compared."""
MOST_DRAWS = 500
"""Largest number of draws per side in a joint distance."""
LEAST_JOINT = 20
"""Smallest number of draws per side in a joint distance."""
PERMUTATIONS = 599
"""Number of permutations of the labels; their smallest possible p-value is 1 in 600."""
SOLVED_PERMUTATIONS = 19
"""Number of permutations if each needs the solution of an assignment problem."""
PROJECTIONS = 32
"""Number of directions of the sliced distance."""
KERNEL_ROWS = 256
"""Rows of a kernel matrix in memory at once."""
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


class Distance(NamedTuple):
    """A distance between two joint distributions.

    Attributes:
        name: name of the distance.
        value: the distance, in reference standard deviations.
        floor: its mean if both distributions are equal.
        floor_error: its standard deviation in that case.
        p_value: probability of a value at least as large in that case.
    """

    name: str
    value: float
    floor: float
    floor_error: float
    p_value: float


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
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
        return text + caveat((min(s.ess, s.reference_ess), s.name) for s in self.scalars)

    def _table(self) -> list[Row]:
        shown: Sequence[ScalarDifference] = self.scalars
        if len(shown) > SHOWN:
            shown = sorted(shown, key=lambda s: s.p_value)[:SHOWN]
        rows = [
            [s.name, *(format(getattr(s, name), spec) for name, (_, spec) in COLUMNS.items())]
            for s in shown
        ]
        return [Row(["scalar", *(title for title, _ in COLUMNS.values())]), *map(Row, rows)]

    def _below(self) -> list[str]:
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


def compare(
    draws: Any,
    reference: Any,
    *,
    var_names: str | Sequence[str] | None = None,
    wasserstein: bool = False,
    seed: int = 0,
) -> Comparison:
    """Compare draws with reference draws of the same posterior, for instance from NUTS.

    For each scalar, in units of the reference's standard deviation (sd), the table has the error of
    the mean, the ratio of sds, the Wasserstein-1 distance (W1), and the share of draws in the
    reference's central 90% interval (coverage). For all scalars jointly, it has two distances
    between the standardised draws: sliced Wasserstein-2 over 32 directions, and the maximum mean
    discrepancy (MMD) with the kernel exp(-|x - y|^2 / 2 l^2), where l is the median distance.
    Every figure comes with its Monte Carlo noise, from the effective sample sizes (ESS) of both
    sides:

    - means and sds: standard errors; for an sd by the delta method, with the ESS of the
      squares;
    - coverage: p (1 - p) over the ESS of the indicator, for both sides;
    - W1: if both sides have the same distribution, its mean is
      ``sqrt(2 / pi) int sqrt(F (1 - F) (1 / n + 1 / m)) dx``. It exceeds this mean with Gaussian
      tails whose scale is at most the error of the mean (inequality of Borell, Tsirelson, Ibragimov
      and Sudakov);
    - joint distances: permutations of the labels over up to 500 draws per side. The draws are
      thinned until they are about independent.

    The verdict is "within noise" unless a difference is larger than chance allows. The level is
    corrected for the number of comparisons (Bonferroni). So two correct runs are said to differ at
    most about once in a hundred times. Draws that are "within noise" may still differ by less than
    the errors in the table. The error of an sd is too small if the tails are so heavy that the
    square has no variance.

    Args:
        draws: an MCMC that has run, an InferenceData or DataTree, or a dict of arrays of shape
            (chains, draws, ...).
        reference: the reference draws, in one of the same forms.
        var_names: variable or variables to compare; None for all numeric variables of both sides.
        wasserstein: add the exact Wasserstein-1 distance (about 20 assignment problems).
        seed: seed of the directions and permutations.

    Returns:
        The comparison; ``print`` shows it.

    Raises:
        TypeError: for draws in another form.
        ValueError: for runs without common variables; for shapes that differ; for values that are
            not finite; for fewer than 8 draws per chain; for plain arrays with more than 10 times
            as many chains as draws; for scalars that are constant in the reference and vary in the
            draws.

    Examples:
        >>> import numpy as np
        >>> from numpyro_geom.diagnostics import compare
        >>> rng = np.random.default_rng(0)
        >>> reference = {"mu": rng.normal(size=(4, 1000))}
        >>> compare({"mu": rng.normal(size=(4, 1000))}, reference).within_noise
        True
        >>> compare({"mu": 1.2 * rng.normal(size=(4, 1000))}, reference).within_noise
        False
    """
    check_flag("wasserstein", wasserstein)
    check_int("seed", seed, least=0)
    x, y, left_out, constant = common(draws, reference, var_names)
    own, other = estimate_moments(x.values), estimate_moments(y.values)
    scalars = scalar_differences(x, y, own, other)
    rng = np.random.default_rng(seed)
    few = [
        about_independent((s.values - other.mean) / other.sd, float(np.min(m.least_size)))
        for s, m in ((x, own), (y, other))
    ]
    number = min(map(len, few))
    joint: tuple[Distance, ...] = ()
    if number >= LEAST_JOINT:
        a, b = (z[rng.permutation(len(z))[:number]] for z in few)
        joint = joint_distances(a, b, rng, wasserstein=wasserstein)
    sizes = x.values.shape[:2], y.values.shape[:2]
    return Comparison(scalars, joint, left_out, constant, sizes)


def common(
    draws: Any, reference: Any, var_names: str | Sequence[str] | None
) -> tuple[Scalars, Scalars, tuple[str, ...], tuple[str, ...]]:
    """Scalars of both sides, names of variables left out, and names of constant scalars."""
    mine, theirs = read_draws(draws, "draws"), read_draws(reference, "reference")
    if var_names is None:
        names = [name for name in mine if name in theirs]
        left_out = tuple(sorted(set(mine) ^ set(theirs)))
    else:
        asked = check_names("var_names", var_names)
        names, left_out = [stored_name(name) for name in asked], ()
        for what, arrays in (("draws", mine), ("reference", theirs)):
            names = chosen(names, arrays, what)
    if not names:
        raise ValueError(
            f"draws and reference have no variable in common: {sorted(mine)} and {sorted(theirs)}"
        )
    for name in names:
        if mine[name].shape[2:] != theirs[name].shape[2:]:
            raise ValueError(
                f"{name!r} must have one shape after chains and draws, got {mine[name].shape[2:]} "
                f"in the draws and {theirs[name].shape[2:]} in the reference"
            )
    x = to_scalars({n: mine[n] for n in names}, "draws")
    y = to_scalars({n: theirs[n] for n in names}, "reference")
    fixed = np.ptp(y.values, axis=(0, 1)) == 0
    same = fixed & np.all(x.values == y.values[0, 0], axis=(0, 1))
    odd = named(y.names, fixed & ~same)
    if odd:
        raise ValueError(
            f"the scalars {list(odd)} vary in the draws and are constant in the reference, whose "
            "sd is the unit of comparison. Check that both are of one model, or leave these "
            "scalars out by var_names"
        )
    if np.all(same):
        raise ValueError("expected scalars that vary, got draws that are constant and all equal")
    return x.keep(~same), y.keep(~same), left_out, named(y.names, same)


def scalar_differences(
    x: Scalars, y: Scalars, own: MomentEstimates, other: MomentEstimates
) -> tuple[ScalarDifference, ...]:
    """All columns of the table, from the moments of both sides."""
    sizes = own.least_size, other.least_size
    scale = other.sd
    mean_error = (own.mean - other.mean) / scale
    mean_parts = own.mean_error / scale, other.mean_error / scale
    ratio = own.sd / scale
    # on the log scale, the error of an sd does not depend on the sd
    safe = np.where(own.sd > 0, own.sd, np.finfo(float).tiny)
    relative = own.sd_error / safe, other.sd_error / scale
    means = own.mean_size, other.mean_size
    coverage, share, coverage_parts = _coverage(x.values, y.values, means)
    w1, unit_floor = _wasserstein(x.values, y.values, scale)
    # an effective size above the number of draws is cut to that number
    n, m = (np.minimum(size, s.values[..., 0].size) for size, s in zip(sizes, (x, y), strict=True))
    floor = unit_floor * np.sqrt(1 / n + 1 / m)
    degrees = [size - 1 for size in sizes]
    p_values = np.stack(
        [
            _two_sided(mean_error, mean_parts, degrees),
            _two_sided(np.log(safe / scale), relative, degrees),
            _two_sided(coverage - share, coverage_parts, degrees),
            _two_sided(np.maximum(w1 - floor, 0), mean_parts, degrees),
        ]
    )
    p_value = np.minimum(1.0, p_values.min(axis=0) * p_values.size)
    p_value = np.where(own.sd > 0, p_value, 0.0)  # constant draws, varying reference
    mean_noise, sd_noise = np.hypot(*mean_parts), ratio * np.hypot(*relative)
    table = (mean_error, mean_noise, ratio, sd_noise, w1, floor, mean_noise, coverage)
    rows = np.stack([*table, np.hypot(*coverage_parts), *sizes, p_value], axis=1)
    return tuple(
        ScalarDifference(name, *map(float, row)) for name, row in zip(x.names, rows, strict=True)
    )


def _two_sided(
    value: np.ndarray, parts: tuple[np.ndarray, np.ndarray], degrees: list[np.ndarray]
) -> np.ndarray:
    """Two-sided p-value of a deviation: Student's t with Welch's degrees of freedom."""
    own, other = (part**2 for part in parts)
    total = own + other
    safe = np.where(total > 0, total, 1.0)
    nu = [np.maximum(d, 1.0) for d in degrees]
    welch = safe**2 / np.maximum(own**2 / nu[0] + other**2 / nu[1], np.finfo(float).tiny)
    p_value = 2 * stats.t.sf(np.abs(value) / np.sqrt(safe), np.maximum(welch, 1.0))
    return np.where(total > 0, p_value, np.where(value == 0, 1.0, 0.0))


def _coverage(
    x: np.ndarray, y: np.ndarray, sizes: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Shares of the draws and of the reference within its central interval, and their errors.

    If all draws of a side are inside the interval, or none, the indicator is constant. Then the
    effective sample sizes of the means, ``sizes``, are used.
    """
    tail = (1 - INTERVAL) / 2
    low, high = np.quantile(y, [tail, 1 - tail], axis=(0, 1))
    inside = [((z >= low) & (z <= high)).astype(float) for z in (x, y)]
    share = inside[1].mean(axis=(0, 1))  # not 0.9 where values are discrete
    variance = np.maximum(share * (1 - share), tail * tail)
    errors = []
    for z, size in zip(inside, sizes, strict=True):
        errors.append(np.sqrt(variance / effective_size(z, size)))
    return inside[0].mean(axis=(0, 1)), share, (errors[0], errors[1])


def _wasserstein(x: np.ndarray, y: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """W1 / sd, and sqrt(2 / pi) int sqrt(F (1 - F)) dx / sd with F of both sides pooled."""
    w1, floor = np.empty(scale.size), np.empty(scale.size)
    for k, sd in enumerate(scale):
        a, b = x[..., k].ravel(), y[..., k].ravel()
        w1[k] = stats.wasserstein_distance(a, b) / sd
        pooled = np.sort(np.concatenate([a, b]))
        share = np.arange(1, pooled.size) / pooled.size
        floor[k] = np.sqrt(2 / np.pi) * np.sum(np.sqrt(share * (1 - share)) * np.diff(pooled)) / sd
    return w1, floor


def about_independent(values: np.ndarray, size: float, most: int = MOST_DRAWS) -> np.ndarray:
    """Thinned draws of all chains: every k-th draw, k twice the autocorrelation time.

    From shape (chains, draws, scalars) to (number, scalars). ``size`` is the number of effective
    draws of the slowest scalar.
    """
    number = values.shape[0] * values.shape[1]
    time = number / size
    every = 1 if time <= 1.2 else int(np.ceil(2 * time))  # the remaining correlation is e^-4
    every = max(every, -(-number // most))
    return values[:, ::every].reshape(-1, values.shape[2])[:most]


def joint_distances(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator, *, wasserstein: bool
) -> tuple[Distance, ...]:
    """Sliced Wasserstein-2, MMD and, on request, exact Wasserstein-1.

    Both sides are standardised and have the same number of draws, shape (n, scalars), about
    independent. If both distributions are equal, a permutation of the labels "draws" and
    "reference" does not change the distribution of a distance. So random permutations of the labels
    give the values of the distance by chance, its floor.
    """
    n = len(x)
    pooled = np.concatenate([x, y])
    labels = np.zeros((PERMUTATIONS + 1, 2 * n), bool)
    labels[0, :n] = True
    for row in labels[1:]:
        row[rng.permutation(2 * n)[:n]] = True
    values = {"sliced Wasserstein-2": _sliced(pooled, labels, rng), "MMD": _mmd(pooled, labels)}
    if wasserstein:
        values["Wasserstein-1"] = _exact(pooled, labels[: SOLVED_PERMUTATIONS + 1])
    return tuple(_judge(name, *x) for name, x in values.items())


def _judge(name: str, value: float, *by_permutation: float) -> Distance:
    chance = np.array(by_permutation)
    mean, sd = chance.mean(), chance.std(ddof=1)
    if chance.size <= SOLVED_PERMUTATIONS:  # few, but enough to fit a normal distribution
        score = (value - mean) / (sd * np.sqrt(1 + 1 / chance.size))
        p_value = stats.t.sf(score, chance.size - 1)
    else:
        # values that differ by rounding alone count as equal
        p_value = (1 + np.sum(chance >= value * (1 - 1e-9))) / (1 + chance.size)
    return Distance(name, *map(float, (value, mean, sd, p_value)))


def _sliced(pooled: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Root mean square over directions of the one-dimensional W2, for each labelling.

    Bonneel, Rabin, Peyre and Pfister (2015). Both sides have the same number of draws, so the
    sorted draws are matched in order.
    """
    total = np.zeros(len(labels))
    half = labels.shape[1] // 2
    for _ in range(PROJECTIONS):
        direction = rng.standard_normal(pooled.shape[1])
        line = pooled @ (direction / np.linalg.norm(direction))
        order = np.argsort(line, kind="stable")
        ranked = labels[:, order]
        ranks = np.broadcast_to(line[order], ranked.shape)
        # a mask selects entries row by row, in order
        gaps = ranks[ranked].reshape(-1, half) - ranks[~ranked].reshape(-1, half)
        total += np.einsum("ij,ij->i", gaps, gaps) / half
    return np.sqrt(total / PROJECTIONS)


def _mmd(pooled: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Maximum mean discrepancy for each labelling, with the kernel exp(-|x - y|^2 / 2 l^2).

    Gretton, Borgwardt, Rasch, Schoelkopf and Smola (JMLR 13, 2012). This is the biased estimate,
    which is never negative; l is the median distance between two draws.
    """
    number = len(pooled)
    weights = np.where(labels, 1.0, -1.0).T / (number // 2)
    gaps = pdist(pooled[:: max(1, number // 500)], "sqeuclidean")
    scale = max(float(np.median(gaps)), np.finfo(float).tiny)
    total = np.zeros(len(labels))
    for start in range(0, number, KERNEL_ROWS):
        rows = slice(start, start + KERNEL_ROWS)
        kernel = np.exp(-cdist(pooled[rows], pooled, "sqeuclidean") / (2 * scale))
        total += np.einsum("ij,ij->j", weights[rows], kernel @ weights)
    return np.sqrt(np.maximum(total, 0))


def _exact(pooled: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Wasserstein-1 with Euclidean cost for each labelling: the optimal matching of both sides."""
    costs = (cdist(pooled[row], pooled[~row]) for row in labels)
    return np.array([cost[linear_sum_assignment(cost)].mean() for cost in costs])
