"""Solves and determinants that batches cannot stop, and solves by products alone.

On the CPU (jaxlib 0.10) a call of LAPACK on a batch waits, in a thread of the pool, for work that
it gives to the same pool: two calls that may run at the same time stop a machine of two cores for
ever. Batches come from `jax.vmap`, over chains or draws. So either each call waits for the one
before (`solve_positive`), or a batch is a loop of calls on one matrix, which wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.scipy.linalg import cho_solve

Array = jax.Array


@jax.custom_jvp
def solve_positive(matrix: Array, b: Array) -> Array:
    """``matrix^-1 b`` by a Cholesky factor; NaN where ``matrix`` is not positive definite.

    It waits for ``b``. The derivative is ``matrix^-1 (db - dmatrix x)``; those of
    `jnp.linalg.cholesky` and `solve_triangular` have calls of LAPACK side by side.

    Args:
        matrix: symmetric, shape (D, D).
        b: shape (D,).
    """
    return _factor_and_solve(matrix, b)[1]


@solve_positive.defjvp
def _solve_positive_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (matrix, b), (change, push) = primals, tangents
    factor, x = _factor_and_solve(matrix, b)
    rest = push - jnp.matmul(change, x, precision=lax.Precision.HIGHEST)
    return x, cho_solve((factor, True), rest)


def _factor_and_solve(matrix: Array, b: Array) -> tuple[Array, Array]:
    # not finite anyway if b is not: what makes the factor wait for b
    factor = jnp.linalg.cholesky(jnp.where(jnp.all(jnp.isfinite(b)), matrix, jnp.nan))
    return factor, cho_solve((factor, True), b)


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


def _log_abs_det(matrix: Array) -> Array:
    return jnp.linalg.slogdet(matrix)[1]


def _one_by_one(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
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
    prior is, this bounds the relative error of x in the norm of G. (The usual criterion,
    ``|r| <= tolerance |b|``, lets all of x be wrong where G is stiff along b.) Differentiable, by
    solves of the same kind.

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
