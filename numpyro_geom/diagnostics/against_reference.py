"""Draws against reference draws: every difference with its Monte Carlo error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from .arrays import Scalars, chosen, named, stored_name
from .joint_distances import FEWEST_DRAWS, Distance, distances, thin
from .monte_carlo import MomentEstimates, effective_size, estimate_moments
from .reference_table import Comparison, ScalarDifference
from .sources import read_draws, to_scalars

INTERVAL = 0.9
"""Of the reference, whose share of the draws is compared."""


def compare(
    draws: Any,
    reference: Any,
    *,
    var_names: str | Sequence[str] | None = None,
    wasserstein: bool = False,
    seed: int = 0,
) -> Comparison:
    """Compare draws with reference draws of the same posterior, from NUTS for instance.

    For each scalar, in units of the reference's standard deviation: the error of the mean, the
    ratio of standard deviations, the Wasserstein-1 distance and the share of draws in the
    reference's central 90% interval. For all of them together: sliced Wasserstein-2 over 32
    directions, and MMD with the kernel exp(-|x - y|^2 / 2 l^2), l the median distance, both of
    standardised draws. Nothing is compared without its noise, which counts the effective draws
    of both sides:

    - means and sds: standard errors; of an sd by the delta method, from the ESS of the squares;
    - coverage: p (1 - p) over the ESS of the indicator, of both sides;
    - W1: by chance it is on average ``sqrt(2 / pi) int sqrt(F (1 - F) (1 / n + 1 / m)) dx``, and
      exceeds that with Gaussian tails whose scale is at most the error of the mean (inequality of
      Borell, Tsirelson, Ibragimov and Sudakov);
    - joint distances: permutations of labels over up to 500 draws a side, thinned until they
      are about independent.

    The verdict is "within noise" unless a comparison is larger than chance allows; the level is
    corrected for their number (Bonferroni), so that two good runs are said to differ at most about
    once in a hundred. What is within noise may still differ by less than the errors in the table.
    Errors of an sd are too small where tails are so heavy that its square has no variance.

    Args:
        draws: a run MCMC, an InferenceData or DataTree, or a dict of arrays (chains, draws, ...).
        reference: draws to hold against, likewise.
        var_names: variable or variables to compare; None for all numeric ones that both have.
        wasserstein: add the exact Wasserstein-1 distance (some 20 assignment problems).
        seed: of directions and permutations.

    Returns:
        The comparison; ``print`` shows it.

    Raises:
        TypeError: for draws in another form.
        ValueError: for runs without common variables, for shapes that differ, values that are not
            finite, fewer than 8 draws a chain, plain arrays with more than 10 times as many chains
            as draws, and scalars that vary in the draws alone.

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
    """Scalars of both sides, names of variables left out, and of scalars that are constant."""
    mine, theirs = read_draws(draws, "draws"), read_draws(reference, "reference")
    if var_names is None:
        names = [name for name in mine if name in theirs]
        left_out = tuple(sorted(set(mine) ^ set(theirs)))
    else:
        asked = [var_names] if isinstance(var_names, str) else var_names
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
            f"constant in the reference, where a sd is needed, but not in the draws: {list(odd)}. "
            "Check that both are of one model, or leave them out by var_names"
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
    # on the log scale, where the error of an sd is the same whatever the sd
    safe = np.where(own.sd > 0, own.sd, np.finfo(float).tiny)
    relative = own.sd_error / safe, other.sd_error / scale
    means = own.mean_size, other.mean_size
    coverage, share, coverage_parts = _coverage(x.values, y.values, means)
    w1, unit_floor = _wasserstein(x.values, y.values, scale)
    # no more than there are draws
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
    p_value = np.where(own.sd > 0, p_value, 0.0)  # no chance at all where the reference varies
    mean_noise, sd_noise = np.hypot(*mean_parts), ratio * np.hypot(*relative)
    table = (mean_error, mean_noise, ratio, sd_noise, w1, floor, mean_noise, coverage)
    rows = np.stack([*table, np.hypot(*coverage_parts), *sizes, p_value], axis=1)
    return tuple(
        ScalarDifference(name, *map(float, row)) for name, row in zip(x.names, rows, strict=True)
    )


def _two_sided(
    value: np.ndarray, parts: tuple[np.ndarray, np.ndarray], degrees: list[np.ndarray]
) -> np.ndarray:
    """Probability of a deviation as large, by Student's t with Welch's degrees of freedom."""
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

    Where all draws are inside, or none, autocovariances tell nothing, and the effective sizes of
    the means, ``sizes``, are used.
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
    """W1 over sd, and sqrt(2 / pi) int sqrt(F (1 - F)) dx over sd with F of both together."""
    w1, floor = np.empty(scale.size), np.empty(scale.size)
    for k, sd in enumerate(scale):
        a, b = x[..., k].ravel(), y[..., k].ravel()
        w1[k] = stats.wasserstein_distance(a, b) / sd
        pooled = np.sort(np.concatenate([a, b]))
        share = np.arange(1, pooled.size) / pooled.size
        floor[k] = np.sqrt(2 / np.pi) * np.sum(np.sqrt(share * (1 - share)) * np.diff(pooled)) / sd
    return w1, floor
