"""Search for a mode from several starts, with an account of every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .approximation import objective, targets
from .settings import LaplaceSettings
from .target import Posterior

Flat = jax.Array

NEWTON_LIMIT = 200
"""Largest dimension at which runs end with Newton steps on the dense Hessian."""
NEWTON_STEPS = 50
HALVINGS = 30
STALLED_STEPS = 5


class Runs(NamedTuple):
    """Ends of several runs of a search, along a leading axis.

    Attributes:
        position: where a run ended, shape (num_starts, D).
        objective: its value there, in nats.
        gradient_norm: Euclidean norm of the gradient there.
        num_steps: L-BFGS and Newton steps together.
    """

    position: Flat
    objective: jax.Array
    gradient_norm: jax.Array
    num_steps: jax.Array


def find_modes(
    settings: LaplaceSettings, posterior: Posterior, loc: None, starts: Flat, *, max_steps: int
) -> Runs:
    """Search from each start for what ``settings.mode`` asks for."""
    target, _ = targets(settings, posterior)
    newton = settings.mode == "euclidean" and target.size <= NEWTON_LIMIT
    return search(objective(settings, target), starts, max_steps, newton=newton)


def search(
    objective: Callable[[Flat], jax.Array], starts: Flat, max_steps: int, *, newton: bool
) -> Runs:
    """Minimise from each start by L-BFGS (optax), and then by Newton steps.

    Args:
        objective: of one flat position.
        starts: shape (num_starts, D).
        max_steps: L-BFGS steps of a run at most; 0 leaves the starts as they are.
        newton: whether Newton steps follow.
    """

    def run(start: Flat) -> Runs:
        position, steps = (start, jnp.zeros((), jnp.int32))
        if max_steps > 0:
            position, steps = _lbfgs(objective, start, max_steps)
            if newton:
                position, more = _newton(objective, position)
                steps = steps + more
        value, gradient = jax.value_and_grad(objective)(position)
        return Runs(position, value, jnp.linalg.norm(gradient), steps)

    return lax.map(run, starts)


def _lbfgs(
    objective: Callable[[Flat], jax.Array], start: Flat, max_steps: int
) -> tuple[Flat, jax.Array]:
    optimiser = optax.lbfgs()
    evaluate = optax.value_and_grad_from_state(objective)
    resolution = 4 * jnp.finfo(start.dtype).eps

    def proceed(carry: tuple) -> jax.Array:
        _, _, steps, stalled, value = carry
        return (steps < max_steps) & (stalled < STALLED_STEPS) & jnp.isfinite(value)

    def step(carry: tuple) -> tuple:
        position, state, steps, stalled, before = carry
        value, gradient = evaluate(position, state=state)
        updates, state = optimiser.update(
            gradient, state, position, value=value, grad=gradient, value_fn=objective
        )
        moved = optax.apply_updates(position, updates)
        after = optax.tree.get(state, "value")
        still = ~(before - after > resolution * (1 + jnp.abs(after)))
        finite = jnp.all(jnp.isfinite(moved)) & jnp.isfinite(after)
        position = jnp.where(finite, moved, position)
        return position, state, steps + 1, jnp.where(still, stalled + 1, 0), after

    value = objective(start)
    carry = (
        start,
        optimiser.init(start),
        jnp.zeros((), jnp.int32),
        jnp.zeros((), jnp.int32),
        value,
    )
    position, _, steps, _, _ = lax.while_loop(proceed, step, carry)
    return position, steps


def _newton(objective: Callable[[Flat], jax.Array], start: Flat) -> tuple[Flat, jax.Array]:
    """Newton steps on absolute eigenvalues of the Hessian, halved until they descend."""
    gradient = jax.grad(objective)
    eye = jnp.eye(start.size, dtype=start.dtype)
    resolution = 4 * jnp.finfo(start.dtype).eps

    def proceed(carry: tuple) -> jax.Array:
        _, _, steps, going = carry
        return going & (steps < NEWTON_STEPS)

    def step(carry: tuple) -> tuple:
        position, value, steps, _ = carry
        slope, push = jax.linearize(gradient, position)
        hessian = jax.vmap(push)(eye)
        sizes, vectors = jnp.linalg.eigh((hessian + hessian.T) / 2)
        sizes = jnp.abs(sizes)
        sizes = jnp.maximum(sizes, resolution * jnp.max(sizes) + jnp.finfo(sizes.dtype).tiny)
        direction = -vectors @ ((vectors.T @ slope) / sizes)

        def shorten(trial: tuple) -> tuple:
            scale, _, count = trial
            return scale / 2, objective(position + scale / 2 * direction), count + 1

        def too_long(trial: tuple) -> jax.Array:
            # a tie to rounding is accepted once: the gradient sees further than the energy
            return ~(trial[1] <= value + resolution * (1 + jnp.abs(value))) & (trial[2] < HALVINGS)

        one = jnp.ones((), position.dtype)
        scale, after, count = lax.while_loop(
            too_long, shorten, (one, objective(position + direction), jnp.zeros((), jnp.int32))
        )
        better = after <= value + resolution * (1 + jnp.abs(value))
        moved = jnp.where(better, position + scale * direction, position)
        gain = value - after > resolution * (1 + jnp.abs(value))
        return moved, jnp.where(better, after, value), steps + 1, better & gain

    carry = (start, objective(start), jnp.zeros((), jnp.int32), jnp.ones((), bool))
    position, _, steps, _ = lax.while_loop(proceed, step, carry)
    return position, steps
