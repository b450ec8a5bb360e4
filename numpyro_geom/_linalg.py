"""Linear algebra that batches cannot stop, and solves by products alone.

On the CPU (jaxlib 0.10) a call of LAPACK on a batch waits, in a thread of the pool, for work that
it gives to the same pool: two calls that may run at the same time stop a machine of two cores for
ever. Batches come from `jax.vmap`, over chains or draws. So either one call waits for the other
(`wait_for`), or a batch is a loop of calls on one matrix, which wait for nothing (`inverse`,
`log_abs_det`). Of the library's own functions `jax.scipy.linalg.solve` with ``assume_a="pos"`` has
a derivative whose calls wait for each other; those of `jnp.linalg.cholesky` and of
`solve_triangular` do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

Array = jax.Array


def wait_for(x: Array, done: Array) -> Array:
    """``x``, not known before ``done`` is; NaN where that is not finite."""
    return jnp.where(jnp.all(jnp.isfinite(done)), x, jnp.nan)


@jax.custom_jvp
def log_abs_det(matrix: Array) -> Array:
    """Log of the absolute determinant of a square matrix."""
    return _one_by_one(_log_abs_det)(matrix)


@log_abs_det.defjvp
def _log_abs_det_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (matrix,), (change,) = primals, tangents
    return log_abs_det(matrix), _dot(inverse(matrix).T, change)


@jax.custom_jvp
def inverse(matrix: Array) -> Array:
    """Inverse of a square matrix."""
    return _one_by_one(jnp.linalg.inv)(matrix)


@inverse.defjvp
def _inverse_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    whole = inverse(*primals)
    first = jnp.matmul(whole, tangents[0], precision=lax.Precision.HIGHEST)
    return whole, -jnp.matmul(first, whole, precision=lax.Precision.HIGHEST)


def eigenvalues(matrix: Array) -> Array:
    """Eigenvalues of a symmetric matrix, ascending."""
    return _one_by_one(lambda x: jnp.linalg.eigvalsh(x))(matrix)


def symmetric_roots(matrix: Array) -> tuple[Array, Array]:
    """``|M|^{1/2}`` and its inverse, symmetric; eigenvalues below rounding count as rounding."""
    return _one_by_one(_symmetric_roots)(matrix)


def _symmetric_roots(matrix: Array) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(matrix)
    values = jnp.abs(values)
    least = matrix.shape[0] * jnp.finfo(values.dtype).eps * jnp.max(values)
    values = jnp.sqrt(jnp.maximum(values, least))
    times = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return times(vectors * values, vectors.T), times(vectors / values, vectors.T)


def _log_abs_det(matrix: Array) -> Array:
    return jnp.linalg.slogdet(matrix)[1]


def _one_by_one(fn: Callable[[Array], Any]) -> Callable[[Array], Any]:
    """``fn``, of which a batch is a loop on the CPU."""
    return sequential_vmap(fn) if jax.default_backend() == "cpu" else fn


def conjugate_gradients(
    product: Callable[[Array], Array],
    b: Array,
    precondition: Callable[[Array], Array],
    tolerance: float,
    max_steps: int,
) -> Array:
    """``G^-1 b`` by preconditioned conjugate gradients; NaN where they do not converge.

    They end where the residual r has ``r'Mr <= tolerance^2 x'b``. With M >= G^-1, as that of a
    prior is, this bounds the relative error of x in the norm of G. (The criterion of
    `jax.scipy.sparse.linalg.cg`, ``|r| <= tolerance |b|``, lets all of x be wrong where G is stiff
    along b.) Differentiable, by solves of the same kind.

    Args:
        product: ``v -> G v``, for positive definite G.
        b: right-hand side, shape (D,).
        precondition: ``v -> M v``, an approximate inverse of G.
        tolerance: see above; of the residual as the recursion has it, which rounding does not
            touch. In float32 it is at least 1e-4.
        max_steps: products after which they give up.
    """
    single = b.dtype != jnp.float64
    tolerance = max(tolerance, 1e-4 if single else 1e-9)
    # what rounding may leave of a residual that the recursion takes for small
    accepted = max(30 * tolerance, 3e-2 if single else 0.0)

    def solve(product: Callable[[Array], Array], b: Array) -> Array:
        def proceed(carry: tuple) -> Array:
            x, _, _, size, step = carry
            return (size > tolerance**2 * _dot(x, b)) & (step < max_steps)

        def advance(carry: tuple) -> tuple:
            x, residual, direction, size, step = carry
            pushed = product(direction)
            length = size / _dot(direction, pushed)
            x, residual = x + length * direction, residual - length * pushed
            scaled = precondition(residual)
            new = _dot(residual, scaled)
            return x, residual, scaled + new / size * direction, new, step + 1

        scaled = precondition(b)
        start = (jnp.zeros_like(b), b, scaled, _dot(b, scaled), jnp.zeros((), jnp.int32))
        x = lax.while_loop(proceed, advance, start)[0]
        residual = b - product(x)
        left = _dot(residual, precondition(residual))
        return jnp.where(left <= accepted**2 * _dot(x, b), x, jnp.nan)

    return lax.custom_linear_solve(product, b, solve, symmetric=True)


def _dot(a: Array, b: Array) -> Array:
    return jnp.vdot(a, b, precision=lax.Precision.HIGHEST)
