"""A search for the posterior's bulk from minibatch gradients, at the start of warm-up.

NumPyro starts chains uniformly in (-2, 2) on the unconstrained space. Gradients there can be many
orders of magnitude larger than in the posterior. A chain with a step size for such gradients never
leaves. Adam's steps do not depend on the gradient's magnitude, so Adam goes down first.

The mode can be far from the mass of a target: towards zero scale, the density of a centred
hierarchical model grows without bound. So if Hessians are formed, the search is for the middle of
a normal law with the covariance tau L L', L L' = |H|^-1. Gradients are means over this law. The
search minimises U - tau log |det L|, because the law's mass is exp(-U / tau) |det L|.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax, random

from .._linalg import log_abs_det
from .._util import key_word, ravel, scattered_floats, settled, tree_where
from ..model.potential import Potential
from ..model.scale import times
from ..sampling.step_size import rule_temperature
from .scale import roots_at, share_within_reach

PyTree = Any

LEARNING_RATE = 0.05
"""Adam's first learning rate: about the largest step of an unconstrained coordinate."""
ROUND_STEPS = 25
"""Steps between two evaluations of the energy."""
MAX_ROUNDS = 60
LEAST_FALL = 0.2
"""A smaller fall of the energy per round, in units of tau * D, reduces the learning rate. Without
Hessians the smaller of D and N replaces D."""
REDUCTION = 1 / 3
"""Factor on the learning rate after a round that did not lower the energy enough."""
MAX_REDUCTIONS = 5
MEMORY = 0.95
"""Adam's memory of squared gradients: a start with large gradients is soon forgotten."""
HUGE = 1e6
"""Entries of a gradient over N above this grow only as a logarithm. Their squares would overflow,
and Adam would take long to forget them."""


class _Search(NamedTuple):
    """State of the search between two rounds.

    Attributes:
        position: the best position so far.
        root: L at the position, within its reach; empty in a search for the mode.
        log_det: log |det L|; NaN before it is known; 0 in a search for the mode.
        optimiser: Adam's moments.
        stream: position in the stream of rows.
        num_rounds: rounds so far.
        num_reductions: number of reductions of the learning rate.
    """

    position: PyTree
    root: Any
    log_det: jax.Array
    optimiser: PyTree
    stream: Any
    num_rounds: jax.Array
    num_reductions: jax.Array


def descend(
    potential: Potential,
    position: PyTree,
    rng_key: jax.Array,
    temperature: float,
    *,
    of_mass: bool = False,
) -> PyTree:
    """Minimise with Adam from ``position``, until the energy falls no more than noise would.

    The energy is U, or with ``of_mass`` U - tau log |det L|. The unit of its fall is
    ``temperature * D``, the spread of U in the target. A round with a fall below a share of this
    unit reduces the learning rate. A round that raises the energy is also undone. Five reductions
    end the search. So it stops near the typical set, which need not be near the mode.

    Args:
        potential: the target.
        position: where to start, a pytree.
        rng_key: for the rows.
        temperature: tau.
        of_mass: whether to search for the most mass instead of the mode, with Hessians.

    Returns:
        A position like ``position``. If the energy was never finite, ``position`` itself.
    """
    adam = optax.scale_by_adam(b2=MEMORY)
    flat, unravel = ravel(position)
    tau = rule_temperature(temperature)
    size, num_data = flat.size, potential.num_data
    if not of_mass and num_data > 1:  # otherwise N is not known
        size = min(size, num_data)  # rows determine at most as many directions as rows
    enough = LEAST_FALL * (tau if of_mass else max(temperature, 1e-2)) * size
    key_stream, key_rounds = random.split(rng_key)

    def spread_at(position: PyTree, rows: Any) -> tuple[Any, jax.Array]:
        """L within its reach, and log |det L|."""
        if not of_mass:
            return (), jnp.zeros((), flat.dtype)
        root, _ = roots_at(potential, position, rows)
        share = share_within_reach(potential, root, position, rows, key_rounds, temperature)
        return share * root, log_abs_det(root)

    def off(position: PyTree, root: Any, rng_key: jax.Array) -> PyTree:
        """A draw of the normal law."""
        if not of_mass:
            return position
        noise = tau**0.5 * scattered_floats(key_word(rng_key), flat.size, flat.dtype)
        return jax.tree.map(jnp.add, position, unravel(times(root, noise)))

    def one_round(search: _Search) -> _Search:
        key_steps, key_check = random.split(random.fold_in(key_rounds, search.num_rounds))
        rate = LEARNING_RATE * REDUCTION ** search.num_reductions.astype(jnp.float32)

        def step(k: jax.Array, carry: tuple) -> tuple:
            current, optimiser, stream = carry
            key_step = random.fold_in(key_steps, k)
            batch, stream = potential.draw(key_step, stream)
            grad = jax.grad(potential.energy)(off(current, search.root, key_step), batch)
            grad = shortened(jax.tree.map(lambda x: x / potential.num_data, grad))
            direction, optimiser = adam.update(grad, optimiser)
            current = jax.tree.map(lambda x, d: (x - rate * d).astype(x.dtype), current, direction)
            return current, optimiser, stream

        carry = (search.position, search.optimiser, search.stream)
        new, optimiser, stream = lax.fori_loop(0, ROUND_STEPS, step, carry)
        rows = potential.curvature_batch(key_check)  # both on the same rows, so the noise cancels
        fall = potential.energy(search.position, rows) - potential.energy(new, rows)
        root, log_det = spread_at(new, rows)
        fall = settled(fall + tau * jnp.nan_to_num(log_det - search.log_det))
        finite = jnp.isfinite(fall)  # otherwise Adam's moments may be not finite either
        return _Search(
            position=tree_where(fall > 0, new, search.position),
            root=tree_where(fall > 0, root, search.root),
            log_det=jnp.where(fall > 0, log_det, search.log_det),
            optimiser=tree_where(finite, optimiser, adam.init(search.position)),
            stream=stream,
            num_rounds=search.num_rounds + 1,
            num_reductions=search.num_reductions + ~(fall > enough),
        )

    def unfinished(search: _Search) -> jax.Array:
        return (search.num_rounds < MAX_ROUNDS) & (search.num_reductions < MAX_REDUCTIONS)

    zero, stream = jnp.zeros((), jnp.int32), potential.init_stream(key_stream)
    root = jnp.zeros((flat.size, flat.size), flat.dtype) if of_mass else ()
    unknown = jnp.full((), jnp.nan, flat.dtype)
    start = _Search(position, root, unknown, adam.init(position), stream, zero, zero)
    return lax.while_loop(unfinished, one_round, start).position


def shortened(grad: PyTree) -> PyTree:
    """The gradient, shortened: beyond `HUGE` its largest entry grows as a logarithm."""
    largest = jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in jax.tree.leaves(grad)]).max()
    excess = jnp.maximum(largest / HUGE, 1.0)
    return jax.tree.map(lambda x: (x / excess * (1 + jnp.log(excess))).astype(x.dtype), grad)
