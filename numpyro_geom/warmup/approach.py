"""From the end of the search to the middle of the target, in the coordinates of the curvature.

Adam's steps are equal in all coordinates. If scales differ strongly, Adam ends many standard
deviations off the mode. The scale and the minibatch noise that are measured there are not those of
the posterior. Newton's steps do not depend on scales. They minimise U - tau log |det L| with
L L' = |H|^-1, which is minus the log mass of a normal law. This is better than the density: towards
zero scale the density of a centred hierarchy grows without bound, and its mass does not.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._linalg import log_abs_det
from .._util import settled, tree_where
from ..model.control_variate import Anchor, anchor_at
from ..model.scale import times
from ..model.target import Target
from ..sampling.step_size import rule_temperature
from .scale import roots_at

MOST_STEPS = 8
NEAR = 0.02
"""The approach ends if the next step promises a smaller fall of U than this, in units of tau. This
is 0.2 of a standard deviation."""


class _Place(NamedTuple):
    """The best position so far.

    Attributes:
        anchor: the position with U and grad U on all rows.
        root: L at the position, and its inverse.
        loss: U - tau log |det L|.
        length: length of the next step, as a share of Newton's step.
        num_steps: steps so far.
    """

    anchor: Anchor
    root: tuple[jax.Array, jax.Array]
    loss: jax.Array
    length: jax.Array
    num_steps: jax.Array


def approach(
    target: Target, position: jax.Array, rng_key: jax.Array, most_steps: int
) -> tuple[Anchor, tuple[jax.Array, jax.Array]]:
    """Newton steps from ``position``, each with a gradient on all rows and a Hessian on some rows.

    Args:
        target: of a vector in the model's coordinates, with energies on all rows.
        position: where to start, shape (D,).
        rng_key: for the rows of the Hessian.
        most_steps: largest number of steps; 1 to stay at ``position``.

    Returns:
        The last position with U and its gradient; L with L L' = |H|^-1 there, and its inverse. The
        start and I if nothing is finite.
    """
    potential, tau = target.potential, rule_temperature(target.temperature)
    rows = potential.curvature_batch(rng_key)

    def decrement(place: _Place) -> jax.Array:
        slope = times(place.root[0].T, place.anchor.grad)
        return jnp.vdot(slope, slope) / 2

    def step(place: _Place) -> _Place:
        direction = times(place.root[0].T, place.anchor.grad)
        new = place.anchor.position - place.length * times(place.root[0], direction)
        anchor = anchor_at(potential, new)
        root = roots_at(potential, new, rows)
        loss = anchor.energy - tau * log_abs_det(root[0])
        better = (loss < place.loss) & target.is_usable(new)
        better = settled(better & jnp.all(jnp.isfinite(anchor.grad)))
        best = (anchor, root, loss), (place.anchor, place.root, place.loss)
        length = jnp.where(better, jnp.ones_like(place.length), place.length / 4)
        anchor, root, loss = tree_where(better, *best)
        return _Place(anchor, root, loss, length, place.num_steps + 1)

    def unfinished(place: _Place) -> jax.Array:
        far = ~(decrement(place) <= NEAR * tau)
        return (place.num_steps == 0) | (far & (place.num_steps < most_steps))

    one, unit = jnp.ones((), position.dtype), jnp.eye(position.size, dtype=position.dtype)
    nothing = Anchor(position, jnp.inf * one, jnp.zeros_like(position))
    start = _Place(nothing, (unit, unit), jnp.inf * one, one, jnp.zeros((), jnp.int32))
    place = lax.while_loop(unfinished, step, start)
    return place.anchor, place.root
