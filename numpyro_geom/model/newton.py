"""Newton's method with the absolute eigenvalues of the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._util import tree_where
from .scale import times

SHRINKAGE = 1 / 4
"""Factor on the length of the next step after a step that lowered nothing."""
LEAST_LENGTH = SHRINKAGE**8
"""Shortest step, as a share of Newton's step."""


class Place(NamedTuple):
    """A position, and the normal law that the energy's curvature there suggests.

    Attributes:
        position: shape (D,).
        energy: U in nats.
        gradient: of U, shape (D,).
        root: L with L L' = |H|^-1, shape (D, D), or an object with products and ``T``.
        inverse: L^-1; empty with such an object.
        loss: what the steps lower, in nats: U, or minus the log mass of the normal law. Infinite
            at a position that must not be taken.
        extra: what else is known about the position.
    """

    position: jax.Array
    energy: jax.Array
    gradient: jax.Array
    root: Any
    inverse: Any
    loss: jax.Array
    extra: Any = ()

    def promise(self) -> jax.Array:
        """By how much U falls in Newton's step, if it is quadratic."""
        slope = times(self.root.T, self.gradient)
        return jnp.vdot(slope, slope) / 2

    def ahead(self, length: jax.Array) -> jax.Array:
        """The position after a share of Newton's step."""
        return self.position - length * times(self.root, times(self.root.T, self.gradient))


def nowhere(start: jax.Array, extra: Any = ()) -> Place:
    """A place of which nothing is known but its position."""
    infinite, unit = jnp.full((), jnp.inf, start.dtype), jnp.eye(start.size, dtype=start.dtype)
    return Place(start, infinite, jnp.zeros_like(start), unit, unit, infinite, extra)


def newton(
    evaluate: Callable[[jax.Array], Place],
    start: jax.Array,
    *,
    most_steps: int,
    enough: float | jax.Array,
    rounding: float | jax.Array = 0.0,
    first: Place | None = None,
) -> tuple[Place, jax.Array]:
    """Steps theta - h L L' grad U from ``start``, where h is 1, or a quarter after each failure.

    A step with a finite gradient that lowers the loss is taken. ``evaluate`` occurs once in the
    program.

    The search ends after ``most_steps`` evaluations, or if the next step promises a smaller fall of
    U than ``enough``, in nats. ``rounding`` is the size of rounding errors in the loss. A step that
    raises the loss by less is taken, since the gradient is more accurate. A smaller fall makes the
    next step shorter. ``first`` is the place before the first evaluation, by default `nowhere`,
    with L = I.

    Returns:
        The last position taken, and the number of evaluations. If nothing is finite, the start with
        L = I and an infinite loss.
    """

    def proceed(carry: tuple) -> jax.Array:
        place, length, steps = carry
        far = ~(place.promise() <= enough)
        return (steps == 0) | (far & (length >= LEAST_LENGTH) & (steps < most_steps))

    def step(carry: tuple) -> tuple:
        place, length, steps = carry
        new = evaluate(place.ahead(length))
        taken = new.loss < place.loss + rounding
        taken = taken & jnp.all(jnp.isfinite(new.gradient))
        fell = taken & (new.loss < place.loss - rounding)
        length = jnp.where(fell, jnp.ones_like(length), SHRINKAGE * length)
        return tree_where(taken, new, place), length, steps + 1

    first = nowhere(start) if first is None else first
    carry = first, jnp.ones((), start.dtype), jnp.zeros((), jnp.int32)
    place, _, steps = lax.while_loop(proceed, step, carry)
    return place, steps
