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
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

Array = jax.Array

SMALL = 64
"""Numbers in a vector up to which its product with a matrix is a sum: this compiles faster than
XLA's product, and is as fast."""


def wait_for(x: Array, done: Array) -> Array:
    """``x``, but not available before ``done`` is; NaN if ``done`` is not finite."""
    return jnp.where(jnp.all(jnp.isfinite(done)), x, jnp.nan)


@jax.custom_jvp
def log_abs_det(matrix: Array) -> Array:
    """Log of the absolute determinant of a square matrix."""
    return one_by_one(lambda x: jnp.linalg.slogdet(x)[1])(matrix)


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


def eigenpairs(matrix: Array) -> tuple[Array, Array]:
    """Eigenvalues of a symmetric matrix, ascending, and eigenvectors as columns."""
    return one_by_one(lambda x: tuple(jnp.linalg.eigh(x)))(matrix)


@partial(jax.tree_util.register_dataclass, data_fields=["matrix", "inverse"], meta_fields=[])
@dataclass(frozen=True)
class MatrixRoot:
    """L as a matrix.

    Attributes:
        matrix: L, shape (D, D).
        inverse: L^-1.
    """

    matrix: Array
    inverse: Array

    def times(self, vector: Array) -> Array:
        """L phi."""
        return _times(self.matrix, vector)

    def solve(self, vector: Array) -> Array:
        """L^-1 theta."""
        return _times(self.inverse, vector)

    def transposed_times(self, vector: Array) -> Array:
        """L' v."""
        return matmul(vector, self.matrix)

    def variances(self) -> Array:
        """The diagonal of L L', shape (D,)."""
        return jnp.sum(self.matrix**2, axis=-1)

    def covariance(self) -> Array:
        """L L', shape (D, D); for a batch of chains one each."""
        return matmul(self.matrix, jnp.swapaxes(self.matrix, -1, -2))

    def then(self, other: MatrixRoot) -> MatrixRoot:
        """L R."""
        both = matmul(self.matrix, other.matrix), matmul(other.inverse, self.inverse)
        return MatrixRoot(*both)

    def products(self, vector: Array) -> Array:
        """Of phi with itself, shape (D, D)."""
        return vector[:, None] * vector


def _times(matrix: Array, vector: Array) -> Array:
    if vector.size <= SMALL:
        return jnp.sum(matrix * vector, axis=-1)
    return matmul(matrix, vector)


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
    root, inverse = one_by_one(_symmetric_roots)(matrix / spread / spread[:, None])
    return spread[:, None] * root, inverse / spread


def _symmetric_roots(matrix: Array) -> tuple[Array, Array]:
    """``|M|^{1/2}`` and its inverse, symmetric; eigenvalues below rounding are raised to it."""
    values, vectors = jnp.linalg.eigh(matrix)
    values = jnp.abs(values)
    least = matrix.shape[0] * jnp.finfo(values.dtype).eps * jnp.max(values)
    values = jnp.sqrt(jnp.maximum(values, least))
    return matmul(vectors * values, vectors.T), matmul(vectors / values, vectors.T)


def one_by_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, whose batches become loops on the CPU."""
    return sequential_vmap(fn) if jax.default_backend() == "cpu" else fn


def matmul(a: Array, b: Array) -> Array:
    """Matrix product in full precision."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def dot(a: Array, b: Array) -> Array:
    """Scalar product in full precision."""
    return jnp.vdot(a, b, precision=lax.Precision.HIGHEST)
