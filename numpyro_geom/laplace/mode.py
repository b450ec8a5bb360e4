"""Search for a mode from several starts, with an account of every run."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..information.form import Flat
from .approximation import objective
from .settings import LaplaceSettings
from .target import Posterior, make_target

NEWTON_LIMIT = 200
"""Largest dimension at which runs end with Newton steps on the dense Hessian."""
NEWTON_STEPS = 50
HALVINGS = 30
STALLED_STEPS = 5


def find_modes(
    settings: LaplaceSettings, posterior: Posterior, loc: None, starts: Flat, *, max_steps: int
) -> tuple[Flat, jax.Array, jax.Array, jax.Array]:
    """Minimise from each start, shape (num_starts, D), by L-BFGS (optax), and then Newton steps.

    With ``max_steps=0`` the starts are left as they are. Returned are, for each run, the position
    where it ended, the objective's value there in nats, the norm of its gradient, and the number of
    steps of both kinds.
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

    zero = jnp.zeros((), jnp.int32)
    carry = (start, optimiser.init(start), zero, zero, objective(start))
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
