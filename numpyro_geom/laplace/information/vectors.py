"""Fisher information of distributions with vectors of parameters, in closed form."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.nn import log_softmax
from jax.scipy.linalg import solve_triangular

from .arrays import (
    as_float,
    drop_null,
    inverse_sqrt,
    is_constant,
    smallest,
    solve_lower,
    spread,
    sqrt_count,
    stack,
)
from .root import fisher_root
from .special import trigamma_excess


@fisher_root.register(dist.CategoricalLogits)
def _categorical_logits(d: Any, tangent: Any) -> jax.Array:
    dot = tangent.logits
    if is_constant(dot):
        return stack([], d.batch_shape)
    root = jnp.exp(log_softmax(as_float(d.logits)) / 2)
    w = root * (dot - jnp.sum(jnp.square(root) * dot, -1, keepdims=True))
    return spread(drop_null(w, root), d.batch_shape)


@fisher_root.register(dist.CategoricalProbs)
def _categorical_probs(d: Any, tangent: Any) -> jax.Array:
    dot, p = tangent.probs, as_float(d.probs)
    if is_constant(dot):
        return stack([], d.batch_shape)
    w = drop_null(inverse_sqrt(p) * dot, jnp.sqrt(jnp.maximum(p, smallest(p))))
    return spread(w, d.batch_shape)


@fisher_root.register
def _(d: dist.MultinomialLogits, tangent: Any) -> jax.Array:
    return sqrt_count(d.total_count)[..., None] * _categorical_logits(d, tangent)


@fisher_root.register
def _(d: dist.MultinomialProbs, tangent: Any) -> jax.Array:
    return sqrt_count(d.total_count)[..., None] * _categorical_probs(d, tangent)


@fisher_root.register
def _(d: dist.Beta, tangent: Any) -> jax.Array:
    a, b = as_float(d.concentration1), as_float(d.concentration0)
    da, db = tangent.concentration1, tangent.concentration0
    if is_constant(da) and is_constant(db):
        return stack([], d.batch_shape)
    a, b, da, db = jnp.broadcast_arrays(
        a, b, 0 * a if is_constant(da) else da, 0 * b if is_constant(db) else db
    )
    return _dirichlet(d, jnp.stack([a, b], -1), jnp.stack([da, db], -1))


@fisher_root.register
def _(d: dist.Dirichlet, tangent: Any) -> jax.Array:
    if is_constant(tangent.concentration):
        return stack([], d.batch_shape)
    return _dirichlet(d, as_float(d.concentration), tangent.concentration)


def _dirichlet(d: Any, alpha: jax.Array, dot: jax.Array) -> jax.Array:
    """Root of diag(trigamma(alpha)) - trigamma(s) 1 1', s the sum of alpha, in x = dalpha / alpha.

    It is the symmetric root of I - c q q', multiplied by the roots of the diagonal. ``rest`` is
    1 - c |q|^2, computed without cancellation.
    """
    s = jnp.sum(alpha, -1, keepdims=True)
    g, g_s, share = trigamma_excess(alpha), trigamma_excess(s), alpha / s
    x, mean = dot / alpha, jnp.sum(dot, -1, keepdims=True) / s
    kept = jnp.sum(share * g / (alpha + g), -1, keepdims=True)
    lost = jnp.sum(share * (share / (alpha + g)), -1, keepdims=True)
    rest = jnp.maximum(kept - g_s * lost, jnp.finfo(alpha.dtype).eps)
    pull = share * (s + g_s) / (1 + jnp.sqrt(rest)) * mean
    w = jnp.sqrt(alpha + g) * x - pull / jnp.sqrt(alpha + g)
    return spread(w, d.batch_shape)


@fisher_root.register
def _(d: dist.MultivariateNormal, tangent: Any) -> jax.Array:
    """L^-1 dloc, and M = L^-1 dL: off the diagonal M_ij, on it sqrt(2) M_ii."""
    factor = as_float(d.scale_tril)
    parts = []
    if not is_constant(tangent.loc):
        parts.append(solve_lower(factor, tangent.loc))
    if not is_constant(tangent.scale_tril):
        m = solve_triangular(factor, jnp.tril(tangent.scale_tril), lower=True)
        rows, columns = np.tril_indices(d.event_shape[0])
        parts.append(m[..., rows, columns] * np.where(rows == columns, math.sqrt(2), 1.0))
    if not parts:
        return stack([], d.batch_shape)
    return jnp.concatenate([spread(x, d.batch_shape) for x in parts], -1)
