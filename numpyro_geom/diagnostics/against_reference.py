"""Compare draws with reference draws: every difference comes with its Monte Carlo error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from .._checks import check_flag, check_int, check_names
from .arrays import Scalars, chosen, named, stored_name
from .joint_distances import FEWEST_DRAWS, Distance, distances, thin
from .monte_carlo import MomentEstimates, effective_size, estimate_moments
from .reference_table import Comparison, ScalarDifference
from .sources import read_draws, to_scalars

INTERVAL = 0.9
"""Probability of the reference's central interval in which the shares of draws are compared."""


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

    - means and sds: standard errors. Those of an sd use the delta method and the ESS of the
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
    scalars = differences(x, y, own, other)
    rng = np.random.default_rng(seed)
    few = [
        thin((s.values - other.mean) / other.sd, float(np.min(m.least_size)))
        for s, m in ((x, own), (y, other))
    ]
    number = min(map(len, few))
    joint: tuple[Distance, ...] = ()
    if number >= FEWEST_DRAWS:
        a, b = (z[rng.permutation(len(z))[:number]] for z in few)
        joint = distances(a, b, rng, wasserstein=wasserstein)
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


def differences(
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
        moves = np.ptp(z, axis=(0, 1)) > 0
        errors.append(np.sqrt(variance / np.where(moves, effective_size(z), size)))
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
