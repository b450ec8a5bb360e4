"""Helper functions for the roots of all distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular


def is_constant(tangent: Any) -> bool:
    """Whether a tangent marks its parameter as constant: None, or of type float0."""
    return tangent is None or getattr(tangent, "dtype", None) == jax.dtypes.float0


def leaves(tree: Any) -> list:
    """Leaves of a tree, including None."""
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def as_float(x: Any) -> jax.Array:
    """An array of a floating-point type; integers become the default one."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))


def stack(parts: Sequence[jax.Array], batch_shape: tuple[int, ...]) -> jax.Array:
    """Components, each broadcast to the batch, along a new last axis."""
    if not parts:
        return jnp.zeros((*batch_shape, 0))
    return jnp.stack([jnp.broadcast_to(p, batch_shape) for p in parts], -1)


def spread(w: jax.Array, batch_shape: tuple[int, ...]) -> jax.Array:
    """Components along the last axis, broadcast to the batch."""
    return jnp.broadcast_to(w, (*batch_shape, w.shape[-1]))


def merge_events(w: jax.Array, num_dims: int) -> jax.Array:
    """Make the last ``num_dims`` batch dimensions part of the components."""
    return w.reshape(*w.shape[: w.ndim - 1 - num_dims], -1) if num_dims else w


def masked(d: Any, w: jax.Array) -> jax.Array:
    """Set entries to zero where the mask of ``d``, a MaskedDistribution, is False."""
    mask = d._mask  # NumPyro has no public access
    return w if mask is True else jnp.where(jnp.asarray(mask)[..., None], w, 0.0)


def smallest(p: jax.Array) -> float:
    """Threshold of a probability or rate for 0: below it, second derivatives would overflow."""
    return float(jnp.finfo(p.dtype).tiny) ** 0.4


def inverse_sqrt(p: jax.Array) -> jax.Array:
    """p^(-1/2), and 0 where p is so small that the second derivative would overflow.

    If a probability or rate is a smooth function of a parameter and goes to 0, then its information
    on the parameter goes to 0 too.
    """
    floor = smallest(p)
    return jnp.where(p > floor, lax.rsqrt(jnp.maximum(p, floor)), 0.0)


def sqrt_count(n: Any) -> jax.Array:
    """Square root of a number of trials, which is not a parameter."""
    return lax.stop_gradient(jnp.sqrt(as_float(n)))


def drop_null(w: jax.Array, root: jax.Array) -> jax.Array:
    """Vectors of the same length in one dimension less, if w is orthogonal to ``root``.

    ``root`` is a unit vector with entries >= 0. The result is the image of w under the reflection
    that maps ``root`` to minus the last axis, without its last component.
    """
    last = w[..., -1:] / (1 + root[..., -1:])
    return w[..., :-1] - root[..., :-1] * last


def solve_lower(factor: jax.Array, x: jax.Array) -> jax.Array:
    """L^-1 x for vectors x; the batches of both broadcast."""
    if factor.ndim == 2:
        flat = x.reshape(-1, x.shape[-1])
        return solve_triangular(factor, flat.T, lower=True).T.reshape(x.shape)
    batch = np.broadcast_shapes(factor.shape[:-2], x.shape[:-1])
    factor = jnp.broadcast_to(factor, (*batch, *factor.shape[-2:]))
    return solve_triangular(factor, spread(x, batch)[..., None], lower=True)[..., 0]
