"""Search for a mode from several starts, with an account of every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .approximation import gradient_and_hessian, objective
from .information.form import Flat
from .settings import LaplaceSettings
from .target import Posterior, make_target

NEWTON_LIMIT = 200
"""Largest dimension at which runs end with Newton steps on the dense Hessian."""
NEWTON_STEPS = 50
HALVINGS = 30
STALLED_STEPS = 5
LINE_STEPS = 30
DECREASE = 1e-4
"""Share of the slope by which a step must lower the objective."""
CURVATURE = 0.9
"""Largest share of the slope that may remain at the end of a step."""


def find_modes(
    settings: LaplaceSettings, posterior: Posterior, loc: None, starts: Flat, *, max_steps: int
) -> tuple[Flat, jax.Array, jax.Array, jax.Array]:
    """Minimise from each start, shape (num_starts, D), by L-BFGS and then Newton steps.

    ``max_steps=0`` leaves the starts unchanged. For each run this returns the final position, the
    objective's value there in nats, the norm of its gradient, and the number of steps of both
    kinds.
    """
    target = make_target(posterior)
    energy = objective(settings, target)

    def run(start: Flat) -> tuple[Flat, jax.Array, jax.Array, jax.Array]:
        position, steps = start, jnp.zeros((), jnp.int32)
        if max_steps > 0:
            position, steps = _lbfgs(energy, start, max_steps)
            if settings.mode == "euclidean" and target.size <= NEWTON_LIMIT:
                position, more = _newton(energy, position)
                steps = steps + more
        value, gradient = jax.value_and_grad(energy)(position)
        return position, value, jnp.linalg.norm(gradient), steps

    return lax.map(run, starts)


def _lbfgs(
    objective: Callable[[Flat], jax.Array], start: Flat, max_steps: int
) -> tuple[Flat, jax.Array]:
    """L-BFGS until `STALLED_STEPS` in a row find no new lowest value, up to rounding."""
    optimiser = optax.scale_by_lbfgs()
    evaluate = jax.value_and_grad(objective)
    fresh = optimiser.init(start)

    def proceed(carry: tuple) -> jax.Array:
        point, _, _, steps, stalled = carry
        return (steps < max_steps) & (stalled < STALLED_STEPS) & jnp.isfinite(point.value)

    def step(carry: tuple) -> tuple:
        point, state, lowest, steps, stalled = carry
        scaled, state = optimiser.update(point.gradient, state, point.position)
        point, found = _line_search(evaluate, point, -scaled)
        # a memory that gives no descent is dropped: the next step follows the gradient
        state = jax.tree.map(lambda old, new: jnp.where(found, old, new), state, fresh)
        lower = lowest - point.value > _rounding(lowest)
        stalled = jnp.where(lower, 0, stalled + 1)
        return point, state, jnp.minimum(lowest, point.value), steps + 1, stalled

    zero = jnp.zeros((), jnp.int32)
    first = _Point(start, *evaluate(start))
    point, _, _, steps, _ = lax.while_loop(proceed, step, (first, fresh, first.value, zero, zero))
    return point.position, steps


class _Point(NamedTuple):
    """A position with the objective's value and gradient."""

    position: Flat
    value: jax.Array
    gradient: Flat


def _line_search(
    evaluate: Callable[[Flat], tuple[jax.Array, Flat]], start: _Point, direction: Flat
) -> tuple[_Point, jax.Array]:
    """A point along a direction that fulfils Wolfe's weak conditions, by doubling and bisection.

    Lewis and Overton, "Nonsmooth optimization via quasi-Newton methods", Mathematical Programming
    141, 2013. If rounding hides the decrease, the approximate condition of Hager and Zhang holds
    instead: "A new conjugate gradient method with guaranteed descent", SIAM J. Optim. 16, 2005.

    The search ends after `LINE_STEPS` for any values. Line searches that end by their values alone
    have run for ever, because a compiler may round two copies of one value differently.

    Returns:
        The point, the last point that is low enough or the start, and whether both conditions hold.
    """
    slope = jnp.vdot(start.gradient, direction)

    def proceed(trial: tuple) -> jax.Array:
        *_, found, count = trial
        return ~found & (count < LINE_STEPS)

    def step(trial: tuple) -> tuple:
        point, scale, low, high, _, count = trial
        there = start.position + scale * direction
        new = _Point(there, *evaluate(there))
        along = jnp.vdot(new.gradient, direction)
        flat = new.value <= start.value + _rounding(start.value)
        flat = flat & (along <= (2 * DECREASE - 1) * slope)
        fell = (new.value <= start.value + DECREASE * scale * slope) | flat
        fell = fell & jnp.isfinite(along)
        point = jax.tree.map(lambda x, y: jnp.where(fell, x, y), new, point)
        low, high = jnp.where(fell, scale, low), jnp.where(fell, high, scale)
        found = fell & (along >= CURVATURE * slope)
        scale = jnp.where(jnp.isfinite(high), (low + high) / 2, 2 * scale)
        return point, scale, low, high, found, count + 1

    one = jnp.ones((), direction.dtype)
    trial = (start, one, 0 * one, jnp.inf * one, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
    point, *_, found, _ = lax.while_loop(proceed, step, trial)
    return point, found


def _rounding(value: jax.Array) -> jax.Array:
    """The size of rounding errors in a value."""
    return 4 * jnp.finfo(value.dtype).eps * (1 + jnp.abs(value))


def _newton(objective: Callable[[Flat], jax.Array], start: Flat) -> tuple[Flat, jax.Array]:
    """Newton steps with absolute eigenvalues of the Hessian, halved until they descend."""
    resolution = 4 * jnp.finfo(start.dtype).eps

    def proceed(carry: tuple) -> jax.Array:
        _, _, steps, going = carry
        return going & (steps < NEWTON_STEPS)

    def step(carry: tuple) -> tuple:
        position, value, steps, _ = carry
        slope, hessian = gradient_and_hessian(objective, position)
        sizes, vectors = jnp.linalg.eigh(hessian)
        sizes = jnp.abs(sizes)
        sizes = jnp.maximum(sizes, resolution * jnp.max(sizes) + jnp.finfo(sizes.dtype).tiny)
        direction = -vectors @ ((vectors.T @ slope) / sizes)

        def shorten(trial: tuple) -> tuple:
            scale, _, count = trial
            return scale / 2, objective(position + scale / 2 * direction), count + 1

        def too_long(trial: tuple) -> jax.Array:
            # accept a tie up to rounding once: the gradient is more accurate than the energy
            return ~(trial[1] <= value + _rounding(value)) & (trial[2] < HALVINGS)

        one = jnp.ones((), position.dtype)
        scale, after, count = lax.while_loop(
            too_long, shorten, (one, objective(position + direction), jnp.zeros((), jnp.int32))
        )
        better = after <= value + _rounding(value)
        moved = jnp.where(better, position + scale * direction, position)
        gain = value - after > _rounding(value)
        return moved, jnp.where(better, after, value), steps + 1, better & gain

    carry = (start, objective(start), jnp.zeros((), jnp.int32), jnp.ones((), bool))
    position, _, steps, _ = lax.while_loop(proceed, step, carry)
    return position, steps
