"""Control variates: the same target with a minibatch gradient that is exact at an anchor.

Let theta* be the anchor and U_B the energy estimate of a minibatch. The energy

    U_B(theta) - U_B(theta*) - <grad U_B(theta*), theta - theta*>
               + U(theta*) + <grad U(theta*), theta - theta*>

has the same expectation as U_B. Its gradient is

    grad U(theta*) + grad U_B(theta) - grad U_B(theta*).

The noise of this gradient vanishes with the distance to the anchor; the noise of grad U_B does not.
The parts of U that do not depend on the rows, such as the prior, cancel between the two minibatch
terms. One step costs two minibatch gradients. Placing an anchor costs one pass over all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._util import ravel, settled, tree_vdot, tree_where
from .derivatives import jvp
from .potential import Potential

PyTree = Any


class Anchor(NamedTuple):
    """The position where the gradient is exact, and the energy and gradient there.

    Attributes:
        position: theta*, one vector of all sites in the order of their names, shape (D,).
        energy: U(theta*) on all rows, in nats.
        grad: grad U(theta*) on all rows, shape (D,).
    """

    position: jax.Array
    energy: jax.Array
    grad: jax.Array


class Control(NamedTuple):
    """The anchor, and the running mean of warm-up's draws: the next anchor.

    Attributes:
        anchor: the anchor in use.
        total: sum of the draws since the mean was last restarted, shape (D,).
        num_draws: number of these draws.
    """

    anchor: Anchor
    total: jax.Array
    num_draws: jax.Array


def anchor_at(potential: Potential, position: PyTree) -> Anchor:
    """An anchor at ``position``: one pass over all rows, in chunks."""
    energy, grad = potential.on_all_rows(  # type: ignore[misc]
        lambda rows: jax.value_and_grad(potential.energy)(position, rows)
    )
    return Anchor(ravel(position)[0], energy, ravel(grad)[0])


def with_control_variate(potential: Potential, anchor: Anchor, share: Any = None) -> Potential:
    """The potential whose minibatch energies are linearly corrected at the anchor.

    Args:
        potential: the target.
        anchor: the anchor.
        share: share of the correction that is applied, 1 by default; at 0 there is no correction.
    """

    def energy(position: PyTree, batch: Any) -> jax.Array:
        flat, unravel = ravel(position)
        there, grad = jax.value_and_grad(lambda x: potential.energy(unravel(x), batch))(
            anchor.position
        )
        slope, offset = anchor.grad - grad, anchor.energy - there
        if share is not None:  # at share 0, values that are not finite must have no effect
            offset, slope = jax.tree.map(
                lambda x: jnp.where(share > 0, share * x, 0).astype(x.dtype), (offset, slope)
            )
        return potential.energy(position, batch) + offset + tree_vdot(slope, flat - anchor.position)

    def score_noise(rng_key: jax.Array) -> tuple:
        return tuple(
            (weight, _corrected_rows(rows_fn, anchor, 1.0 if share is None else share))
            for weight, rows_fn in potential.score_noise(rng_key)
        )

    return potential._replace(energy=energy, score_noise=score_noise)


def _corrected_rows(rows_fn: Callable, anchor: Anchor, share: Any) -> Callable:
    def rows(position: PyTree) -> jax.Array:
        flat, unravel = ravel(position)
        gap = flat - anchor.position
        _, slopes = jvp(lambda x: rows_fn(unravel(x)), anchor.position, gap)
        return rows_fn(position) - share * slopes

    return rows


def init_control(position: PyTree, energy: jax.Array) -> Control:
    """A state whose anchor is not yet placed."""
    flat, _ = ravel(position)
    zeros = jnp.zeros_like(flat)
    return Control(Anchor(flat, energy, zeros), zeros, jnp.zeros((), jnp.int32))


def replace_anchor(potential: Potential, control: Control, position: PyTree) -> Control:
    """Move the anchor to ``position``, unless the energy or gradient there is not finite."""
    anchor = anchor_at(potential, position)
    finite = jnp.isfinite(anchor.energy) & jnp.isfinite(tree_vdot(anchor.grad, anchor.grad))
    finite = settled(finite)
    return control._replace(anchor=tree_where(finite, anchor, control.anchor))
