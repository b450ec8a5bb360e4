"""Control variates: the same target with a minibatch gradient that is exact at an anchor.

Let theta* be the anchor and U_B the energy estimate of a minibatch. The energy

    U_B(theta) - U_B(theta*) - <grad U_B(theta*), theta - theta*>
               + U(theta*) + <grad U(theta*), theta - theta*>

has the same expectation as U_B. Its gradient is

    grad U(theta*) + grad U_B(theta) - grad U_B(theta*).

The noise of this gradient vanishes with the distance to the anchor; the noise of grad U_B does not.
The parts of U that do not depend on the rows, such as the prior, cancel between the two minibatch
terms. One step costs two minibatch gradients. Placing an anchor costs one pass over all rows.

To second order, with the Hessians H at the anchor, the gradient is

    grad U(theta*) + H (theta - theta*) + grad U_B(theta) - grad U_B(theta*) - H_B (theta - theta*).

Its noise vanishes with the square of the distance. It is unbiased only if H is the Hessian of all
rows, so H is tried in a random direction where the anchor is placed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree as ravel

from .._util import PyTree, tree_vdot, tree_where
from .arrowhead import Arrowhead, ArrowRoot, Layout, derivatives_at, no_arrowhead
from .derivatives import jvp
from .potential import Potential, in_coordinates

MOST_MISFIT = 0.003
"""Largest `Curvature.misfit` of a Hessian that counts as exact. An error of the Hessian biases
covariances by about the same share."""


class Curvature(NamedTuple):
    """The Hessian at an anchor.

    Attributes:
        hessian: of U on all rows, as an arrowhead.
        misfit: its relative error in a random direction, see `derivatives_at`.
    """

    hessian: Arrowhead
    misfit: jax.Array


class Anchor(NamedTuple):
    """The position where the gradient is exact, and the energy and gradient there.

    Attributes:
        position: theta*, one vector of all sites in the order of their names, shape (D,).
        energy: U(theta*) on all rows, in nats.
        grad: grad U(theta*) on all rows, shape (D,).
        curvature: the Hessian there; empty for a control variate of first order.
    """

    position: jax.Array
    energy: jax.Array
    grad: jax.Array
    curvature: Any = ()


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

    def of_order(self, order: int) -> Control:
        """The same for a control variate of this or a lower order."""
        return self if order > 1 else self._replace(anchor=self.anchor._replace(curvature=()))


def anchor_at(
    potential: Potential, position: PyTree, layout: Layout | None = None, root: Any = None
) -> Anchor:
    """An anchor at ``position``: one pass over all rows, in chunks.

    An anchor of second order needs a ``layout``, and with groups ``root``, about a root of the
    inverse Hessian.
    """
    if layout is not None:
        flat, unravel = ravel(position)
        vector = in_coordinates(potential, unravel)
        root = root if isinstance(root, ArrowRoot) else None
        energy, grad, hessian, misfit = derivatives_at(vector, flat, layout, root)
        return Anchor(flat, energy, grad, Curvature(hessian, misfit))
    energy, grad = potential.on_all_rows(  # type: ignore[misc]
        lambda rows: jax.value_and_grad(potential.energy)(position, rows)
    )
    return Anchor(ravel(position)[0], energy, ravel(grad)[0])


def with_control_variate(potential: Potential, anchor: Anchor, order: Any = None) -> Potential:
    """The potential whose minibatch energies are corrected at the anchor.

    ``order`` is from 0 for none to 2; by default the order for which there is an anchor.
    """
    curvature = anchor.curvature
    exact: Any = False
    if curvature:
        exact = curvature.misfit <= MOST_MISFIT
        exact = exact if order is None else exact & (order > 1)

    def applied(x: PyTree) -> PyTree:
        # without a correction, values that are not finite must have no effect
        if order is None:
            return x
        return jax.tree.map(lambda x: jnp.where(order > 0, x, 0).astype(x.dtype), x)

    def energy(position: PyTree, batch: Any) -> jax.Array:
        flat, unravel = ravel(position)
        gap = flat - anchor.position
        of_batch = jax.value_and_grad(lambda x: potential.energy(unravel(x), batch))
        if not curvature:
            there, grad = of_batch(anchor.position)
            slope, offset = applied((anchor.grad - grad, anchor.energy - there))
            return potential.energy(position, batch) + offset + tree_vdot(slope, gap)

        def parts(gap: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            (there, grad), (_, product) = jvp(of_batch, anchor.position, gap)
            bend = jnp.where(exact, curvature.hessian.times(gap) - product, 0)
            return *applied((anchor.energy - there, anchor.grad - grad)), bend

        @jax.custom_jvp  # else the gradient would differentiate `parts` once more
        def correction(gap: jax.Array) -> jax.Array:
            offset, slope, bend = parts(gap)
            return offset + tree_vdot(slope + bend / 2, gap)

        @correction.defjvp
        def derivative(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
            offset, slope, bend = parts(*primals)
            value = offset + tree_vdot(slope + bend / 2, *primals)
            return value, tree_vdot(slope + bend, *tangents)

        return potential.energy(position, batch) + correction(gap)

    def score_noise(rng_key: jax.Array) -> tuple:
        return tuple(
            (weight, corrected(rows_fn)) for weight, rows_fn in potential.score_noise(rng_key)
        )

    def corrected(rows_fn: Callable) -> Callable:
        def rows(position: PyTree) -> jax.Array:
            flat, unravel = ravel(position)
            gap = flat - anchor.position

            def slopes_at(x: jax.Array) -> jax.Array:
                return jvp(lambda x: rows_fn(unravel(x)), x, gap)[1]

            if not curvature:
                return rows_fn(position) - applied(slopes_at(anchor.position))
            slopes, bends = jvp(slopes_at, anchor.position, gap)
            return rows_fn(position) - applied(slopes) - jnp.where(exact, bends / 2, 0)

        return rows

    return potential._replace(energy=energy, score_noise=score_noise)


def init_control(position: PyTree, energy: jax.Array, layout: Layout | None = None) -> Control:
    """A state whose anchor is not yet placed; it is of second order with a ``layout``."""
    flat, _ = ravel(position)
    zeros = jnp.zeros_like(flat)
    curvature: Any = ()
    if layout is not None:
        infinite = jnp.full((), jnp.inf, flat.dtype)
        curvature = Curvature(no_arrowhead(layout, flat.dtype), infinite)
    return Control(Anchor(flat, energy, zeros, curvature), zeros, jnp.zeros((), jnp.int32))


def replace_anchor(
    potential: Potential, control: Control, position: PyTree, root: Any = None
) -> Control:
    """Move the anchor to ``position``, unless the energy or gradient there is not finite.

    ``potential`` has no control variate. ``root`` is the chain's `Scale.root`, for an anchor of
    second order.
    """
    curvature = control.anchor.curvature
    layout = curvature.hessian.layout if curvature else None
    anchor = anchor_at(potential, position, layout, root)
    finite = jnp.isfinite(anchor.energy) & jnp.isfinite(tree_vdot(anchor.grad, anchor.grad))
    return control._replace(anchor=tree_where(finite, anchor, control.anchor))
