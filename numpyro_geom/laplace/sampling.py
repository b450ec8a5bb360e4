"""Draws: a Gaussian velocity at the mode, and the end of its geodesic after unit time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.linalg import solve_triangular
from numpyro.infer.util import constrain_fn
from tqdm import tqdm

from ..model.minibatch import SubsamplePlates
from ..model.model import CHUNK_ROWS
from .approximation import (
    AtMode,
    acceleration_fn,
    choose_solver,
    fisher_metric_of,
    fisher_of,
    targets,
)
from .geodesic import Geodesic, exponential_map
from .information.form import HIGHEST, Flat
from .log_map import log_map, shoot
from .settings import LaplaceSettings, check_dense
from .target import Posterior, Target, make_target

CHUNK_ENTRIES = 2**23
"""About how many floating point numbers the draws of one chunk have."""
MOST_AT_ONCE = 256
FIRST_STEPS = 32
"""Steps after which a geodesic leaves its chunk. It is then followed again with other long ones."""
FEWEST_AT_ONCE = 8


def draw(
    settings: LaplaceSettings,
    posterior: Posterior,
    loc: Flat,
    at: AtMode,
    keys: jax.Array,
    *,
    log_weight: bool,
    chunk: int,
) -> tuple[Geodesic, jax.Array]:
    """One draw for each key. Under a transformation of JAX all at once, otherwise in chunks."""

    def one(key: jax.Array) -> tuple[Geodesic, jax.Array]:
        first = gaussian(settings, posterior, loc, at, key[None])
        ends = follow(settings, posterior, loc, at, *first, log_weight=log_weight)
        return jax.tree.map(lambda x: x[0], ends)

    return lax.map(one, keys, batch_size=chunk)


def gaussian_in_chunks(
    gaussian: Callable[[jax.Array], tuple], keys: jax.Array, chunk: int
) -> tuple[Flat, jax.Array]:
    """Draws and squares of `gaussian` for each key, from a compiled function for one chunk."""
    count = keys.shape[0]
    starts = [gaussian(keys[piece]) for piece in _pieces(count, chunk)]
    draws, squares = (jnp.concatenate(x)[:count] for x in zip(*starts, strict=True))
    return draws, squares


def follow_in_chunks(
    follow: Callable[[Flat, jax.Array, int], tuple],
    draws: Flat,
    squares: jax.Array,
    chunk: int,
    max_steps: int,
    *,
    progress_bar: bool,
) -> tuple[Geodesic, jax.Array]:
    """The geodesic of each draw, from a compiled function for one chunk.

    The function is `follow` of draws, squares and the largest number of steps. Work of more than
    five seconds shows a progress bar.
    """

    def follow_all(which: np.ndarray, chunk: int, limit: int) -> tuple[Geodesic, jax.Array]:
        parts = []
        pieces = _pieces(which.size, chunk)
        for piece in tqdm(pieces, delay=5, disable=not progress_bar, desc="geodesics"):
            now = which[piece]
            parts.append(jax.block_until_ready(follow(draws[now], squares[now], limit)))
        return jax.tree.map(lambda *x: jnp.concatenate(x)[: which.size], *parts)

    # a chunk takes as long as its longest geodesic, so short and long ones are separated
    order = np.argsort(np.asarray(squares), kind="stable")
    limit = min(FIRST_STEPS, max_steps)
    ends = follow_all(order, chunk, limit)
    lost = ~np.isfinite(np.asarray(squares))[order]  # no velocity: more steps do not help
    late = np.flatnonzero(~np.asarray(ends[0].success) & ~lost)
    if late.size and limit < max_steps:
        width = FEWEST_AT_ONCE
        while width < late.size:
            width *= 2  # few widths, because each is compiled
        more = follow_all(order[late], min(width, chunk), max_steps)
        ends = jax.tree.map(lambda x, y: x.at[late].set(y), ends, more)
    back = np.argsort(order, kind="stable")
    return jax.tree.map(lambda x: x[back], ends)


def _pieces(count: int, chunk: int) -> list[np.ndarray]:
    """Indices of chunks of equal size; the last chunk wraps around."""
    return [np.arange(i, i + chunk) % count for i in range(0, count, chunk)]


def chunk_size(settings: LaplaceSettings, posterior: Posterior, *, log_weight: bool) -> int:
    """Number of draws whose numbers fit together in a bounded memory."""
    target = make_target(posterior)
    rows = target.num_outputs
    if settings.batch_size is not None or posterior.plan.batch_sizes:
        rows = min(rows, CHUNK_ROWS)
    entries = 20 * target.size + 20 * rows
    if settings.needs_outputs and choose_solver(settings, target) != "cg":
        fast = posterior.structure.affine and posterior.structure.diagonal
        entries += (0 if fast else rows * target.size) + target.size**2
    if log_weight:
        entries *= target.size + 1
    return int(np.clip(CHUNK_ENTRIES // entries, 1, MOST_AT_ONCE))


def gaussian(
    settings: LaplaceSettings, posterior: Posterior, loc: Flat, at: AtMode, keys: jax.Array
) -> tuple[Flat, jax.Array]:
    """Draws s ~ N(m, P^-1), one for each key, and (s - m)'P(s - m); m is zero or `AtMode.mean`."""
    if at.factor.size:

        def from_factor(key: jax.Array) -> tuple[Flat, jax.Array]:
            noise = random.normal(key, loc.shape, loc.dtype)
            draw = solve_triangular(at.factor, noise, trans=1, lower=True)
            return draw + at.mean, jnp.vdot(noise, noise)

        return jax.vmap(from_factor)(keys)

    target = make_target(posterior)
    metric, solve = fisher_of(settings, target), fisher_metric_of(settings, target, loc).solver(loc)

    def perturb_and_solve(key: jax.Array) -> tuple[Flat, jax.Array]:
        draw = solve(metric.perturb(loc, key))
        return draw, jnp.vdot(draw, metric.product(loc, draw))

    return jax.vmap(perturb_and_solve)(keys)


def follow(
    settings: LaplaceSettings,
    posterior: Posterior,
    loc: Flat,
    at: AtMode,
    draws: Flat,
    squares: jax.Array,
    *,
    log_weight: bool,
    max_steps: int | None = None,
) -> tuple[Geodesic, jax.Array]:
    """The ends of the geodesics of Gaussian draws, and the logs of their importance weights.

    A log weight is, up to a constant, -U(theta) - log N(v; m, P^-1) + log |det d theta / d v|. It
    is 0 unless requested. Position and weight of a failed geodesic are NaN. ``max_steps`` replaces
    that of the settings.
    """
    if max_steps is not None:
        settings = dataclasses.replace(settings, max_steps=max_steps)
    target, own = targets(settings, posterior)
    end = end_fn(settings, target, own, loc)
    if log_weight:
        check_dense(target.size, "log_weight=True", "log_weight=False")

    def one(draw: Flat, square: jax.Array) -> tuple[Geodesic, jax.Array]:
        velocity, found, start_volume = _start(settings, at, draw)
        given = jnp.all(jnp.isfinite(draw))
        found, velocity = found & given, jnp.where(given, velocity, 0.0)
        if not log_weight:
            geodesic, weight = end(velocity), jnp.zeros((), draw.dtype)
        else:
            # the geodesic waits for the start's volume: two calls of LAPACK must not overlap
            found = found & jnp.isfinite(start_volume)
            geodesic, volume = _with_log_volume(end, jnp.where(found, velocity, 0.0))
            weight = -target.energy(geodesic.position) + square / 2 + start_volume + volume
        success = geodesic.success & found
        position = jnp.where(success, geodesic.position, jnp.nan)
        evaluations = jnp.where(given, geodesic.num_evaluations, 0)
        geodesic = Geodesic(position, success, evaluations)
        return geodesic, jnp.where(success, weight, jnp.nan)

    return jax.vmap(one)(draws, squares)


def accelerate(settings: LaplaceSettings, posterior: Posterior, loc: Flat, velocity: Flat) -> Flat:
    """The acceleration of a geodesic at its start. Every draw computes dozens of accelerations."""
    target, own = targets(settings, posterior)
    return acceleration_fn(settings, target, own, loc)(loc, velocity)


def constrain(settings: LaplaceSettings, posterior: Posterior, loc: Flat, flat: Flat) -> dict:
    """Site values at flat positions, deterministic sites included."""
    model, (_, _, args, kwargs, unravel, *_) = SubsamplePlates(posterior.model), posterior

    def one(flat: Flat) -> dict:
        return constrain_fn(model, args, kwargs, unravel(flat), return_deterministic=True)

    return lax.map(one, flat, batch_size=32)


def _start(settings: LaplaceSettings, at: AtMode, draw: Flat) -> tuple[Flat, Any, jax.Array]:
    """For a Gaussian draw s the velocity v, whether it was found, and log |det dv/ds|."""
    if settings.metric != "monge-log":
        return draw, jnp.ones((), bool), jnp.zeros((), draw.dtype)
    precision = jnp.matmul(at.factor, at.factor.T, precision=HIGHEST)
    velocity, found = log_map(precision, draw, settings.alpha2)

    def end(v: Flat) -> Geodesic:
        position = shoot(precision, v, settings.alpha2)
        return Geodesic(position, found, jnp.zeros((), jnp.int32))

    return velocity, found, -_with_log_volume(end, velocity)[1]


def end_fn(
    settings: LaplaceSettings, target: Target, own: Target, loc: Flat
) -> Callable[[Flat], Geodesic]:
    """``velocity -> Geodesic`` from ``loc``; ``own`` is the target with the metric of the draws."""
    if settings.metric == "euclidean":
        return lambda v: Geodesic(loc + v, jnp.all(jnp.isfinite(v)), jnp.zeros((), jnp.int32))
    acceleration = acceleration_fn(settings, target, own, loc)
    return lambda v: exponential_map(
        *(acceleration, loc, v),
        rtol=settings.rtol,
        atol=settings.atol,
        max_steps=settings.max_steps,
    )


def _with_log_volume(end: Callable[[Flat], Geodesic], x: Flat) -> tuple[Geodesic, jax.Array]:
    """A geodesic and log |det d position / dx|, by derivatives along all directions."""

    def along(u: Flat) -> tuple[Geodesic, Flat]:
        def position(v: Flat) -> tuple[Flat, Geodesic]:
            geodesic = end(v)
            return geodesic.position, geodesic

        _, push, geodesic = jax.jvp(position, (x,), (u,), has_aux=True)
        return geodesic, push

    # the geodesic is the same along all directions and is followed once
    eye = jnp.eye(x.size, dtype=x.dtype)
    geodesic, jacobian = jax.vmap(along, out_axes=(None, 0))(eye)
    return geodesic, jnp.linalg.slogdet(jacobian)[1]
