"""Langevin's move and its Metropolis test."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .. import _random
from .._util import PyTree, tree_vdot, tree_where


def langevin_move(
    position: PyTree,
    drift: PyTree,
    noise: PyTree,
    h: jax.Array,
    tau: jax.Array | float,
    variance: PyTree | None = None,
) -> PyTree:
    """``position - h drift + sqrt(2 h tau) noise``, in the dtypes of ``position``.

    A ``variance``, a pytree like the position, takes the place of 2 h tau; below 0 it counts as 0.
    """
    spread = jax.tree.map(lambda v: jnp.sqrt(jnp.maximum(v, 0)), variance)
    if variance is None:
        common = jnp.sqrt(2 * h * tau)
        spread = jax.tree.map(lambda _: common, position)
    return jax.tree.map(
        lambda x, d, s, w: x - (h * d).astype(x.dtype) + (s * w).astype(x.dtype),
        position,
        drift,
        spread,
        noise,
    )


def metropolis(
    rng_key: jax.Array,
    value_and_grad: Callable,
    here: tuple[jax.Array, PyTree],
    position: PyTree,
    apply_inverse: Callable,
    apply_root: Callable,
    h: jax.Array,
    tau: jax.Array | float,
) -> tuple[PyTree, jax.Array]:
    """Langevin proposal in a constant metric, accepted so that exp(-value / tau) is invariant.

    With b the gradient, the noise of the reverse step is sqrt(h / 2 tau) A^{1/2} (b + b') - xi.
    So neither a determinant nor A^{-1/2} is needed.
    """
    key_move, key_accept = _random.split(rng_key)
    value, grad = here
    xi = _random.tree_normal(key_move, position)
    proposal = langevin_move(position, apply_inverse(grad), apply_root(xi), h, tau)
    new_value, new_grad = value_and_grad(proposal)
    both = apply_root(jax.tree.map(jnp.add, grad, new_grad))
    back = jax.tree.map(lambda b, x: jnp.sqrt(h / (2 * tau)) * b - x, both, xi)
    log_ratio = (value - new_value) / tau + (tree_vdot(xi, xi) - tree_vdot(back, back)) / 2
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
    accept_prob = jnp.exp(jnp.minimum(log_ratio, 0.0))
    accepted = _random.uniform(key_accept, (), log_ratio.dtype) < accept_prob
    return tree_where(accepted, proposal, position), accept_prob
