"""Solves with positive definite matrices: by a factor, and by products alone."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve

Array = jax.Array


@jax.custom_jvp
def solve_positive(matrix: Array, b: Array) -> Array:
    """``matrix^-1 b`` by a Cholesky factor; NaN where ``matrix`` is not positive definite.

    Each call of LAPACK in it, and in its derivative ``matrix^-1 (db - dmatrix x)``, waits for the
    one before, and the first for ``b``. On the CPU (jaxlib 0.10) a call on a batch waits, in a
    thread of the pool, for work that it gives to the same pool: two calls that may run at the same
    time stop a machine of two cores for ever, and the derivatives of `jnp.linalg.cholesky` and
    `solve_triangular` have such pairs.

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
