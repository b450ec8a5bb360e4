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
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._util import LANES, evenly, num_at_once
from ..model.jaxprs import lean_options, work
from ..model.model import Model
from ..model.start import wrong_lane
from .draws import (
    LEAST_PER_CHAIN,
    MAX_ENTRIES,
    Arrays,
    effective_size,
    entries,
    host,
    named,
)
from .replay import latent_draws, summed_out

MAX_FULL_COVARIANCE = 200
"""Number of coordinates above which S is diagonal."""


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
    usable: int  # draws whose position and gradient are finite
    left_out: int  # the other draws
    hidden: tuple[str, ...]  # coordinates that are left out, because no draw has a gradient there


def moment_errors(arrays: Mapping[str, np.ndarray], temperature: float) -> MomentErrors | None:
    """Errors from the arrays of `gradients_at_draws`.

    None if there are no arrays or few draws, at temperature 0, and if no draw moves.
    """
    sites = [key.removeprefix(POSITION) for key in arrays if key.startswith(POSITION)]
    if not sites or temperature <= 0:
        return None
    position = entries({site: arrays[POSITION + site] for site in sites})
    if position.values.shape[1] < LEAST_PER_CHAIN or not np.ptp(position.values, (0, 1)).any():
        return None
    grad = entries({site: arrays[GRADIENT + site] for site in sites}).values
    told = ~np.isnan(grad).all((0, 1))
    hidden = named(position.names, ~told)
    (names, z), grad = position.keep(told), grad[..., told]
    finite = np.isfinite(z).all(-1) & np.isfinite(grad).all(-1)
    usable = int(finite.sum()) if names else 0
    left_out = finite.size - usable
    if usable < LEAST_PER_CHAIN:
        none = np.full(len(names), np.nan)
        nothing = none, none, none, none, none, none
        return MomentErrors(names, *nothing, False, usable, left_out, hidden)
    middle = np.mean(z[finite], 0)
    centred = np.where(finite[..., None], z - middle, 0.0)
    size = z.shape[-1]
    if size > MAX_ENTRIES:
        some = evenly(size, MAX_ENTRIES)
        names, centred, grad = tuple(names[k] for k in some), centred[..., some], grad[..., some]
    of_draws = effective_size(centred)
    full = size <= min(MAX_FULL_COVARIANCE, of_draws.min() / 2 // 10)
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
        drift, mean_drift = (multiply(g, factor) / temperature for g in (varying[:, here], average))
        around[:, here] = drift / np.sqrt(scale)
        mean[:, here] = (drift + mean_drift) / np.sqrt(scale)
        ratio[:, here] = centred[:, here] * drift / scale
    # for a Gaussian, the spreads are 1 and 2^1/2; an estimate that is too low has a low spread
    mean_error, mean_size = _error(around, finite, 1.0, of_draws)
    error, sd_size = _error(ratio, finite, 2**0.5, of_draws)
    mean, ratio = mean[finite].mean(0), ratio[finite].mean(0)
    sd = np.sqrt(np.maximum(ratio, 0.0))
    # below a ratio of 0 the sd stays at 0, so the error is made smaller as the ratio moves away
    sd_error = error / np.where(ratio > 0, 2 * np.maximum(sd, 0.5), 1 - ratio)
    errors = mean, mean_error, mean_size, sd - 1, sd_error, sd_size
    return MomentErrors(names, *errors, full, usable, left_out, hidden)


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


# Gradients on all rows at the draws of a run


POSITION, GRADIENT = "z.", "grad_U."
"""Prefixes of the names of a site's arrays."""
MAX_WORK = 2**28
"""Largest number of observed values times draws for gradients; beyond it, draws are left out."""
MOST_SECONDS = 10.0
"""Longest time for gradients; compiling them comes on top."""


def gradients_at_draws(
    model: Model,
    posterior: Mapping[str, np.ndarray],
    *,
    least_draws: int = 1,
) -> tuple[Arrays, dict[str, Any]]:
    """Unconstrained positions and gradients of U on all rows, at evenly spaced draws.

    For each latent site ``w`` with entries, there are the arrays ``z.w`` and ``grad_U.w`` (in
    nats), shaped (chains, draws, ...). All draws are used, unless they need more than `MAX_WORK`
    rows in total, or more time than there is: one block of gradients is timed, and draws are left
    out accordingly. There are no arrays if fewer than ``least_draws`` of each chain would be left.
    The gradient is NaN in coordinates that the constrained draws, as floating-point numbers, do not
    determine (the small entries of a sparse simplex in float32).

    Returns:
        The arrays and a dict. If there are arrays, the dict has ``gradients_every``, k if every
        k-th draw is used. Otherwise it has ``gradient_seconds``, of one gradient.
    """
    summed = summed_out(model, posterior)
    latent = [name for name in model.of_kind("latent") if name in posterior]
    discrete = [name for name in latent if posterior[name].dtype.kind != "f"]
    if discrete:
        raise ValueError(
            f"the sites {discrete} are discrete, and U has no gradient there: leave gradients out"
        )
    chains, draws = next(iter(posterior.values())).shape[:2]
    rows = 1 + sum(int(np.prod(model.sites[n].shape)) for n in model.of_kind("observed"))
    every = -(-chains * draws * rows // MAX_WORK)
    arrays: Any = model.arrays

    def places_of(every: int) -> dict[str, jax.Array]:
        some = {name: x[:, ::every] for name, x in posterior.items()}
        return {name: jnp.asarray(x) for name, x in latent_draws(model, some, summed).items()}

    places = places_of(every)
    empty = {name: x[0] for name, x in places.items() if x.size == 0}

    @partial(jax.jit, compiler_options=lean_options())
    def positions(arrays: list[jax.Array], draws: dict[str, jax.Array]) -> tuple[dict, dict]:
        known = model.with_arrays(arrays)

        def unconstrained(draw: dict[str, jax.Array]) -> dict[str, jax.Array]:
            z = known.unconstrain(draw | empty)
            return {name: z[name] for name in draw}

        following = jax.tree.map(lambda x: jnp.nextafter(x, jnp.inf), draws)
        z = jax.vmap(unconstrained)(draws)
        return z, jax.tree.map(jnp.subtract, jax.vmap(unconstrained)(following), z)

    def gradients(arrays: list[jax.Array], z: dict[str, jax.Array]) -> dict[str, jax.Array]:
        known = model.with_arrays(arrays)
        return jax.vmap(jax.grad(lambda z: known.energy(z | empty)))(z)

    def filled(places: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: x for name, x in places.items() if name not in empty}

    z, rounding = jax.tree.map(host, positions(arrays, filled(places)))
    at_once = min(len(next(iter(z.values()))), LANES, num_at_once(32 * rows))
    one = {name: x[:1] for name, x in z.items()}
    operations = work(jax.make_jaxpr(gradients)(arrays, one).jaxpr, 100)
    at_once = max(1, min(at_once, int(MAX_WORK / operations)))
    block = {name: x[:at_once] for name, x in z.items()}
    gradient = jax.grad(lambda z: model.energy(z | empty))
    if wrong_lane((gradient,), block, model.plan.sizes.values()):
        block, at_once = one, 1
    program = jax.jit(gradients, compiler_options=lean_options()).lower(arrays, block).compile()
    begin = time.perf_counter()
    jax.block_until_ready(program(arrays, block))
    each = (time.perf_counter() - begin) / at_once
    affordable = int(MOST_SECONDS / each)
    if chains * min(draws, least_draws) > affordable and least_draws > 1:
        return {}, {"gradient_seconds": each}
    fewer = -(-chains * draws // max(1, affordable))
    if fewer > every:
        every = fewer
        z, rounding = jax.tree.map(host, positions(arrays, filled(places_of(every))))
    size = next(iter(z.values())).shape[0]
    parts = []
    for first in range(0, size, at_once):
        index = np.minimum(np.arange(first, first + at_once), size - 1)
        parts.append(program(arrays, {name: x[index] for name, x in z.items()}))
    grad = jax.tree.map(lambda *x: np.concatenate([host(y) for y in x])[:size], *parts)
    found: Arrays = {}
    for name, x in z.items():
        finite = np.isfinite(x) & np.isfinite(rounding[name])
        changes = np.mean(np.where(finite, rounding[name], 0.0) ** 2, 0) ** 0.5
        hidden = changes > 0.1 * np.std(np.where(finite, x, 0.0), 0)
        shape = (chains, -(-draws // every), *x.shape[1:])
        found[POSITION + name] = x.reshape(shape)
        found[GRADIENT + name] = np.where(hidden, np.nan, grad[name]).reshape(shape)
    return found, {"gradients_every": every}
