r"""Checks that need gradients at the draws: errors of moments, and their shift by the step size.

For a target exp(-U / tau) and a vector field phi, integration by parts gives

    E[phi . grad U] = tau E[div phi].

Two fields per coordinate j turn this identity into errors of moments, for any kernel. Let m, S and
s be the mean, the covariance and the standard deviations of the draws; a star marks the target's.
Then

    phi = S e_j:                  mean[(S grad U)_j] / (tau s_j)       is about (m_j - m*_j) / s_j
    phi = S e_j (theta_j - m_j):  mean[(theta_j - m_j) (S grad U)_j] / (tau s_j^2)
                                                                       is about (s_j / s*_j)^2

For draws of any target, the expectations are 0 and 1. For a Gaussian target, the first is the error
of the mean, and the second minus 1 is the relative error of the variance, to first order. Both
include the Monte Carlo error of these draws. The factor S makes them errors of coordinate j. With
the field phi = e_j (theta_j - m_j), the configurational temperature of a coordinate, stiff
directions that hardly contribute to its variance would dominate.

If there are too few draws to estimate S, its diagonal replaces S. Draws of the target still have 0
and 1, but a deviation is then not an error of a moment.

Each half of a chain is multiplied by the S of the other halves, so that the noise of S does not add
up. The Monte Carlo errors are those for given S: they come from the series S (grad U - g), where g
is the mean of grad U over all draws. Draws of the target have E[grad U] = 0, so g changes nothing
for them. If g is not 0, the product S g differs between halves, because S does. Without g taken
off, this step would look like a chain that moves once, and its size would grow with the error to be
detected. A step of grad U itself remains in the series. For the same reason the second identity is
computed from grad U - g: its mean stays, because theta - m has mean 0.

A Langevin step theta - h grad U + (2 h tau)^1/2 xi leaves exp(-U / tau + h rho) invariant up to
h^2, with rho = |grad U|^2 / (4 tau) - laplacian U / 2. So the mean of a function f has the error
h Cov(f, rho). For a coordinate, integration by parts leaves only the gradient:

    E_h[theta_j] - E[theta_j] is about -Cov(theta_j, h |grad U|^2 / 4 tau).

The same formula holds in coordinates of a constant metric. On a Gaussian, the shift is 0. It is not
0 if one parameter sets the scale of many others, each of which is a little too wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from . import checks
from .checks import MAX_ENTRIES, Check, at_least, at_most
from .draws import LEAST_PER_CHAIN, effective_size, entries, evenly, named
from .gradients import GRADIENT, POSITION
from .record import RunRecord

MAX_FULL_COVARIANCE = 200
"""Number of coordinates above which S is diagonal."""
DRAWS_A_COORDINATE = 10
"""Effective draws per coordinate below which S is diagonal, because its noise would dominate."""


class MomentErrors(NamedTuple):
    """Errors of the draws' moments in each unconstrained coordinate; arrays of shape (D,)."""

    names: tuple[str, ...]  # of the coordinates, such as w[3]
    mean: np.ndarray  # error of the mean, in standard deviations
    mean_error: np.ndarray  # Monte Carlo standard error of ``mean``
    mean_size: np.ndarray  # effective draws behind ``mean``
    sd: np.ndarray  # relative error of the standard deviation
    sd_error: np.ndarray  # Monte Carlo standard error of ``sd``
    sd_size: np.ndarray  # effective draws behind ``sd``
    full: bool  # whether S is the full covariance; if not, see the module's docstring
    left_out: int  # draws whose position or gradient is not finite
    hidden: tuple[str, ...]  # coordinates that are left out, because no draw has a gradient there


def moment_checks(run: RunRecord) -> Iterator[Check]:
    """Jumps of U; errors of means and standard deviations, from gradients at the draws."""
    if "energy_jump" in run.attributes:
        advice = (
            "the log density is not continuous: U jumps between the draws, and a sampler that "
            "follows gradients does not see a jump. Smooth the jump (a sigmoid in place of a "
            "comparison, for instance), sum the parameter out, or use a sampler without gradients"
        )
        jump, where = run.attributes["energy_jump"], "the largest on lines between draws, in nats"
        yield at_most("jump of the energy", jump, checks.LARGEST_JUMP, where, advice)
    if "gradient_seconds" in run.attributes:
        each = checks.digits(float(run.attributes["gradient_seconds"]))
        where = f"not looked at: a gradient on all rows takes {each} s"
        for name in ("scaled force", "scaled virial, less 1"):
            yield Check(name, np.nan, None, "about 0", None, where)
    first = next((x for n, x in run.unconstrained.items() if n.startswith(POSITION)), None)
    if first is None and "success" in run.sample_stats and "pareto_k" not in run.attributes:
        advice = (
            "draw(..., log_weight=True) or to_inference_data(draws, gradients=True) tells how near "
            "a guide's draws are to the posterior"
        )
        given = np.nan, None, "either", False, "there are none"
        yield Check("weights or gradients", *given, advice)
    if first is None or run.temperature <= 0 or first.shape[1] < LEAST_PER_CHAIN:
        return
    positions = [x for n, x in run.unconstrained.items() if n.startswith(POSITION)]
    if not any(np.ptp(x, axis=(0, 1)).any() for x in positions):
        return  # no draw moves, as other checks report
    found = moment_errors(run.unconstrained, run.temperature)
    if not found.names:
        advice = (
            "no gradient is finite, or rounding of constrained values hides all: run in 64 bits"
        )
        yield at_least("coordinates with a gradient", 0, 1, "", advice)
        return
    usable = first.shape[0] * first.shape[1] - found.left_out
    if usable < LEAST_PER_CHAIN:
        advice = (
            "draws are at the edge of the support, or U overflows: run in 64 bits, or check the "
            "model"
        )
        yield at_least("draws with a finite gradient", usable, LEAST_PER_CHAIN, "", advice)
        return
    left = f", {found.left_out} draws without a finite gradient left out" if found.left_out else ""
    if found.hidden:
        left += f", {len(found.hidden)} coordinates left out: not finite, or hidden by rounding"
    names = checks.MOMENTS
    if not found.full:
        left += ", correlations not known, so this is no error of a moment"
        names = ("scaled force", "scaled virial, less 1")
    means = found.mean, found.mean_error, found.mean_size, checks.TOLERATED_MEAN
    sds = found.sd, found.sd_error, found.sd_size, checks.TOLERATED_SD
    remedies = _moment_advice(run.attributes)
    for name, figures, remedy in zip(names, (means, sds), remedies, strict=True):
        values, errors, sizes, tolerated = figures
        known = np.isfinite(values) & np.isfinite(errors)
        if not known.any():
            continue
        worst, ok = checks.worst_of(values, errors, sizes, known, tolerated)
        if ok and not found.full:
            ok = None
        where = f"{found.names[worst]}, unconstrained{left}"
        if ok is None and found.full:
            where += f"; {checks.HIDDEN}"
        threshold, value, error = f"within {tolerated:g} of 0", values[worst], errors[worst]
        yield Check(name, float(value), float(error), threshold, ok, where, remedy)


def _moment_advice(attrs: Mapping[str, Any]) -> tuple[str, str]:
    """What to do about means and about standard deviations."""
    if "guide" in attrs:
        other = "use metric='fisher', or run MCMC"
    elif "final_step_size" not in attrs:
        other = "increase num_samples, reparametrise, or let the sampler take smaller steps"
    else:
        remedies = [checks.smaller_step(attrs), checks.less_noise(attrs)]
        other = f"use {', '.join(filter(None, remedies))}, or increase num_samples"
    if attrs.get("gamma") in ("none", "published"):
        other = (
            f"gamma={attrs['gamma']!r} has another invariant distribution if the metric moves: "
            "leave gamma at its default; or " + other
        )
    longer = other if "guide" in attrs else "increase num_warmup and num_samples"
    return (
        "the draws are not centred on the target; " + longer,
        "the draws are too wide (+) or too narrow (-) for the target; " + other,
    )


def moment_errors(arrays: Mapping[str, np.ndarray], temperature: float) -> MomentErrors:
    """Errors from the arrays of `gradients_at_draws`, for at least four draws and tau above 0."""
    sites = [key.removeprefix(POSITION) for key in arrays if key.startswith(POSITION)]
    position = entries({site: arrays[POSITION + site] for site in sites})
    grad = entries({site: arrays[GRADIENT + site] for site in sites}).values
    told = ~np.isnan(grad).all((0, 1))
    hidden = named(position.names, ~told)
    (names, z), grad = position.keep(told), grad[..., told]
    finite = np.isfinite(z).all(-1) & np.isfinite(grad).all(-1)
    left_out = int((~finite).sum())
    if finite.sum() < 4 or not names:
        none = np.full(len(names), np.nan)
        return MomentErrors(names, none, none, none, none, none, none, False, left_out, hidden)
    middle = np.mean(z[finite], 0)
    centred = np.where(finite[..., None], z - middle, 0.0)
    size = z.shape[-1]
    if size > MAX_ENTRIES:
        some = evenly(size, MAX_ENTRIES)
        names, centred, grad = tuple(names[k] for k in some), centred[..., some], grad[..., some]
    of_draws = effective_size(centred)
    full = size <= min(MAX_FULL_COVARIANCE, of_draws.min() / 2 // DRAWS_A_COORDINATE)
    multiply = np.matmul if full else np.multiply
    # about one draw first, so that a gradient that never changes becomes 0 and not its rounding
    start = grad[finite][0]
    average = start + np.mean(grad[finite] - start, 0)
    varying = np.where(finite[..., None], grad - start - (average - start), 0.0)
    half = z.shape[1] // 2
    parts = [(slice(half, None), slice(None, half)), (slice(None, half), slice(half, None))]
    mean, around, ratio = np.full((3, *centred.shape), np.nan)
    for here, there in parts:
        others = centred[:, there][finite[:, there]]
        variance = np.mean(others**2, 0)
        scale = np.where(variance > 0, variance, np.nan)
        factor = others.T @ others / len(others) if full else variance
        pull, mean_pull = (multiply(g, factor) / temperature for g in (varying[:, here], average))
        around[:, here] = pull / np.sqrt(scale)
        mean[:, here] = (pull + mean_pull) / np.sqrt(scale)
        ratio[:, here] = centred[:, here] * pull / scale
    # for a Gaussian, the spreads are 1 and 2^1/2; an estimate that is too low has a low spread
    mean_error, mean_size = _error(around, finite, 1.0, of_draws)
    error, sd_size = _error(ratio, finite, 2**0.5, of_draws)
    mean, ratio = mean[finite].mean(0), ratio[finite].mean(0)
    sd = np.sqrt(np.maximum(ratio, 0.0))
    # below a ratio of 0 the sd stays at 0, so the error is made smaller as the ratio moves away
    sd_error = error / np.where(ratio > 0, 2 * np.maximum(sd, 0.5), 1 - ratio)
    return MomentErrors(
        names, mean, mean_error, mean_size, sd - 1, sd_error, sd_size, full, left_out, hidden
    )


def _error(
    values: np.ndarray, finite: np.ndarray, least_spread: float, still: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Monte Carlo errors of means over draws of (chains, draws, D), and effective draws.

    ``still`` is the number of effective draws where the values never change.
    """
    filled = np.where(finite[..., None], values, values[finite].mean(0))
    spread = np.maximum(filled.std((0, 1)), least_spread)
    effective = effective_size(np.nan_to_num(filled), still)
    return spread / np.sqrt(effective), effective


def shift_checks(run: RunRecord) -> Iterator[Check]:
    """The largest shift of a mean, if the draws have recorded squared drifts."""
    positions = {n: x for n, x in run.unconstrained.items() if n.startswith(POSITION)}
    drift = run.sample_stats.get("squared_drift")
    if drift is None or not positions or int(run.attributes.get("thinning", 1)) > 1:
        return  # with thinning, the recorded drifts are not at the kept draws
    every = int(run.attributes.get("gradients_every", 1))
    drift = np.asarray(drift[:, 1:], float)[:, ::every]  # the next draw has the drift at a draw
    sites = {n.removeprefix(POSITION): x[:, : drift.shape[1]] for n, x in positions.items()}
    names, z = entries(sites, MAX_ENTRIES)
    z = z - z.mean(1, keepdims=True)
    spread = np.sqrt(np.mean(z**2, (0, 1)))
    usable = np.isfinite(spread) & (spread > 0)
    if z.shape[1] < LEAST_PER_CHAIN or not usable.any() or not np.isfinite(drift).all():
        return
    products = z * (drift - drift.mean(1, keepdims=True))[..., None] / np.where(usable, spread, 1)
    shifts = -products.mean((0, 1)) / 2
    sizes = effective_size(products)
    errors = products.std((0, 1)) / 2 / np.sqrt(sizes)
    tolerated = checks.TOLERATED_SHIFT
    worst, ok = checks.worst_of(shifts, errors, sizes, usable, tolerated)
    size, error = float(np.abs(shifts[worst])), float(errors[worst])
    where = f"{names[worst]}, unconstrained, from discretisation, to first order"
    factor = tolerated / size if size > 0 else 1.0
    smaller = f"divide step_size by {1 / factor:.2g}, or use SGHMC or GGMC"
    if run.attributes.get("step_size") == "auto" and "bias_tolerance" in run.attributes:
        tolerance = factor * float(run.attributes["bias_tolerance"])
        smaller = f"use a bias_tolerance of at most {tolerance:.1g}, or SGHMC or GGMC"
    advice = f"means move with the step, most where one parameter sets the scale of many: {smaller}"
    threshold = f"within {tolerated:g} of 0"
    name = "shift of the means by the step, in sd"
    yield Check(name, float(shifts[worst]), error, threshold, ok, where, advice)
