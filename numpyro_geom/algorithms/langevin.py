"""Langevin's move and its Metropolis test."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import random

from .. import _random
from .._util import PyTree, tree_vdot, tree_where


def langevin_move(
    position: PyTree,
    drift: PyTree,
    noise: PyTree,
    h: jax.Array,
    tau: jax.Array | float,
) -> PyTree:
    """``position - h drift + sqrt(2 h tau) noise``, in the dtypes of ``position``."""
    spread = jnp.sqrt(2 * h * tau)
    return jax.tree.map(
        lambda x, d, w: x - (h * d).astype(x.dtype) + (spread * w).astype(x.dtype),
        position,
        drift,
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
    accepted = random.uniform(key_accept, (), log_ratio.dtype) < accept_prob
    return tree_where(accepted, proposal, position), accept_prob
