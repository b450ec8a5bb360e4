"""Gradients on all rows at the draws of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._util import LANES, num_at_once
from ..model.jaxprs import work
from ..model.model import Model
from ..model.programs import lean_options
from .draws import Arrays, host
from .replay import latent_draws, summed_out

POSITION, GRADIENT = "z.", "grad_U."
"""Prefixes of the names of a site's arrays."""
MAX_WORK = 2**28
"""Largest number of observed values times draws for gradients; beyond it, draws are left out."""
MOST_SECONDS = 10.0
"""Longest time for gradients; compiling them comes on top."""
UNKNOWN_LOOP = 100
"""Turns of a loop whose length is not known, for the number of positions."""
LARGEST_ROUNDING = 0.1
"""Largest rounding error of an unconstrained coordinate, in sd. It is the change of the coordinate
if the constrained draw changes to the next floating-point number. Above it, the coordinate is
hidden."""


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
    operations = work(jax.make_jaxpr(gradients)(arrays, one).jaxpr, UNKNOWN_LOOP)
    at_once = max(1, min(at_once, int(MAX_WORK / operations)))
    block = {name: x[:at_once] for name, x in z.items()}
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
        hidden = changes > LARGEST_ROUNDING * np.std(np.where(finite, x, 0.0), 0)
        shape = (chains, -(-draws // every), *x.shape[1:])
        found[POSITION + name] = x.reshape(shape)
        found[GRADIENT + name] = np.where(hidden, np.nan, grad[name]).reshape(shape)
    return found, {"gradients_every": every}
