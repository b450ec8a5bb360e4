"""Linear algebra that does not deadlock in batches.

On the CPU (jaxlib 0.10) a LAPACK call on a batch occupies a thread of a pool and waits for work
that it gives to the same pool. So two calls at the same time can stop a machine of two cores for
ever. Batches come from `jax.vmap`, over chains or draws. There are two remedies. One call waits for
the other (`wait_for`), or a batch becomes a loop of calls on single matrices, which wait for
nothing (`inverse`, `log_abs_det`). In JAX, `jax.scipy.linalg.solve` with ``assume_a="pos"`` has a
derivative whose calls wait for each other. The derivatives of `jnp.linalg.cholesky` and
`solve_triangular` do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

Array = jax.Array


def wait_for(x: Array, done: Array) -> Array:
    """``x``, but not available before ``done`` is; NaN if ``done`` is not finite."""
    return jnp.where(jnp.all(jnp.isfinite(done)), x, jnp.nan)


@jax.custom_jvp
def log_abs_det(matrix: Array) -> Array:
    """Log of the absolute determinant of a square matrix."""
    return one_by_one(_log_abs_det)(matrix)


@log_abs_det.defjvp
def _log_abs_det_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (matrix,), (change,) = primals, tangents
    return log_abs_det(matrix), dot(inverse(matrix).T, change)


@jax.custom_jvp
def inverse(matrix: Array) -> Array:
    """Inverse of a square matrix."""
    return one_by_one(jnp.linalg.inv)(matrix)


@inverse.defjvp
def _inverse_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    whole = inverse(*primals)
    return whole, -matmul(matmul(whole, tangents[0]), whole)


def eigenvalues(matrix: Array) -> Array:
    """Eigenvalues of a symmetric matrix, ascending."""
    return one_by_one(lambda x: jnp.linalg.eigvalsh(x))(matrix)


def symmetric_roots(matrix: Array) -> tuple[Array, Array]:
    """``|M|^{1/2}`` and its inverse, symmetric; eigenvalues below rounding are raised to it."""
    return one_by_one(_symmetric_roots)(matrix)


def balanced_roots(matrix: Array) -> tuple[Array, Array]:
    """R with R R' = |M|, and R^-1, for a symmetric M.

    First, rows and columns are divided by the square roots of the diagonal. Otherwise float32 could
    not hold scales that differ strongly.
    """
    if matrix.size == 0:
        return matrix, matrix
    if matrix.size == 1:  # no call of LAPACK for each of many groups
        root = jnp.sqrt(jnp.abs(matrix))
        return root, 1 / root
    diagonal = jnp.abs(jnp.diagonal(matrix))
    spread = jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1.0))
    root, inverse = symmetric_roots(matrix / spread / spread[:, None])
    return spread[:, None] * root, inverse / spread


def _symmetric_roots(matrix: Array) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(matrix)
    values = jnp.abs(values)
    least = matrix.shape[0] * jnp.finfo(values.dtype).eps * jnp.max(values)
    values = jnp.sqrt(jnp.maximum(values, least))
    return matmul(vectors * values, vectors.T), matmul(vectors / values, vectors.T)


def _log_abs_det(matrix: Array) -> Array:
    return jnp.linalg.slogdet(matrix)[1]


def one_by_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, whose batches become loops on the CPU."""
    return sequential_vmap(fn) if jax.default_backend() == "cpu" else fn


def matmul(a: Array, b: Array) -> Array:
    """Matrix product in full precision."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def dot(a: Array, b: Array) -> Array:
    """Scalar product in full precision."""
    return jnp.vdot(a, b, precision=lax.Precision.HIGHEST)
