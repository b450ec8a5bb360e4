"""Energies and gradients on all rows, at the draws of a run and on lines between draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
MOST_LINES = 15
"""Number of lines between draws, unless they would take more than `LINE_SHARE` of the time."""
LINE_SHARE = 0.25
LINE_ROUNDS = 2
"""Number of times that a line is cut."""
LINE_POINTS = 65
"""Points of a line between two draws at which U is compared with its gradient."""
FEWEST_LINES = 4
"""Smallest number of lines for the search for jumps."""
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
        k-th draw is used, and ``energy_jump``, the largest of `energy_jumps`, unless there are too
        few draws or too little time. Otherwise it has ``gradient_seconds``, of one gradient.
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

    def gradients(arrays: list[jax.Array], z: dict[str, jax.Array]) -> tuple[jax.Array, dict]:
        known = model.with_arrays(arrays)
        return jax.vmap(jax.value_and_grad(lambda z: known.energy(z | empty)))(z)

    def filled(places: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: x for name, x in places.items() if name not in empty}

    z, rounding = jax.tree.map(host, positions(arrays, filled(places)))
    at_once = min(len(next(iter(z.values()))), LANES, num_at_once(32 * rows))
    one = {name: x[:1] for name, x in z.items()}
    operations = work(jax.make_jaxpr(gradients)(arrays, one).jaxpr, UNKNOWN_LOOP)
    at_once = max(1, min(at_once, int(MAX_WORK / operations)))
    block = {name: x[:at_once] for name, x in z.items()}
    energies = jax.jit(gradients, compiler_options=lean_options()).lower(arrays, block).compile()
    begin = time.perf_counter()
    jax.block_until_ready(energies(arrays, block))
    each = (time.perf_counter() - begin) / at_once
    affordable = int(MOST_SECONDS / each)
    if chains * min(draws, least_draws) > affordable and least_draws > 1:
        return {}, {"gradient_seconds": each}
    per_line = LINE_ROUNDS * LINE_POINTS
    num_lines = min(MOST_LINES, int(LINE_SHARE * affordable / per_line))
    num_lines = num_lines if num_lines >= FEWEST_LINES else 0
    fewer = -(-chains * draws // max(1, affordable - num_lines * per_line))
    if fewer > every:
        every = fewer
        z, rounding = jax.tree.map(host, positions(arrays, filled(places_of(every))))
    size = next(iter(z.values())).shape[0]

    def in_blocks(z: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        size = next(iter(z.values())).shape[0]
        parts = []
        for first in range(0, size, at_once):
            index = np.minimum(np.arange(first, first + at_once), size - 1)
            parts.append(energies(arrays, {name: x[index] for name, x in z.items()}))
        return jax.tree.map(lambda *x: np.concatenate([host(y) for y in x])[:size], *parts)

    _, grad = in_blocks(z)
    found: Arrays = {}
    for name, x in z.items():
        finite = np.isfinite(x) & np.isfinite(rounding[name])
        changes = np.mean(np.where(finite, rounding[name], 0.0) ** 2, 0) ** 0.5
        hidden = changes > LARGEST_ROUNDING * np.std(np.where(finite, x, 0.0), 0)
        shape = (chains, -(-draws // every), *x.shape[1:])
        found[POSITION + name] = x.reshape(shape)
        found[GRADIENT + name] = np.where(hidden, np.nan, grad[name]).reshape(shape)
    jumps = energy_jumps(in_blocks, z, min(num_lines, size // LINE_POINTS), chains)
    told = {} if jumps is None else {"energy_jump": float(np.max(jumps))}
    return found, told | {"gradients_every": every}


def energy_jumps(
    energies: Callable, z: dict[str, np.ndarray], num_lines: int, chains: int = 1
) -> np.ndarray | None:
    """Jumps of U along lines between draws, in nats: changes that its gradient does not explain.

    Both ends of a line are draws of one chain. A line between chains in different modes could lead
    far out of the posterior, where U is so large that its rounding looks like a jump.

    Each line is cut into cells. The cell with the largest error of the trapezoidal rule is cut
    again. In the smaller cells, the error of the rule is much smaller, also at a kink, but a jump
    keeps its size.

    ``energies`` maps z to U and its gradient, with a leading axis of positions; draws are chain
    after chain.

    Returns:
        The largest jump of each line, or 0 if rounding explains it; None without lines.
    """
    count = next(iter(z.values())).shape[0]
    if num_lines < FEWEST_LINES or count < 2 * num_lines or count < 2 * chains:
        return None
    rng, draws = np.random.default_rng(0), count // chains
    ends_of = [rng.choice(draws, 2, replace=False) for _ in range(num_lines)]
    pairs = np.transpose(ends_of) + draws * (np.arange(num_lines) % chains)
    ends = {name: x[pairs] for name, x in z.items()}
    for _ in range(LINE_ROUNDS):
        shares = np.linspace(0.0, 1.0, LINE_POINTS)
        points = {n: _between(x, shares).reshape(-1, *x.shape[2:]) for n, x in ends.items()}
        energy, grad = energies(points)
        energy = energy.astype(float).reshape(LINE_POINTS, num_lines)
        slope: np.ndarray = np.zeros((LINE_POINTS, num_lines))
        for name, x in ends.items():
            gap = (x[1] - x[0]).reshape(num_lines, -1)
            slope += np.sum(grad[name].reshape(LINE_POINTS, num_lines, -1) * gap, -1, dtype=float)
        told = (slope[1:] + slope[:-1]) / 2 / (LINE_POINTS - 1)
        error = np.nan_to_num(np.abs(np.diff(energy, axis=0) - told), posinf=0.0)
        worst = np.argmax(error, 0)
        lines = np.arange(num_lines)
        ends = {
            name: np.stack(
                [x.reshape(LINE_POINTS, num_lines, *x.shape[1:])[worst + k, lines] for k in (0, 1)]
            )
            for name, x in points.items()
        }
    jumps = error[worst, lines]
    rounding = 64 * np.finfo(next(iter(z.values())).dtype).eps * np.abs(energy).max(0)
    return np.where(jumps > rounding, jumps, 0.0)


def _between(ends: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Points at these fractions of the way, with a leading axis of points."""
    shares = shares.reshape(-1, *[1] * (ends.ndim - 1))
    return (ends[0] + shares * (ends[1] - ends[0])).astype(ends.dtype)
