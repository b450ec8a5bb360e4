"""Extreme eigenvalues of a symmetric operator that is known only by its products with vectors.

Lanczos's iteration is ``beta_j q_{j+1} = A q_j - alpha_j q_j - beta_{j-1} q_{j-1}``. The Ritz
values are the eigenvalues of T = Q'AQ, which is tridiagonal: alpha on the diagonal, beta beside it.
Every vector is orthogonalised against all earlier ones, three times, so no value is a ghost. The
Krylov space may be exhausted: beta_j is at rounding level (the identity, operators of low rank, a
start in an invariant subspace). Then beta_j is set to 0, and the iteration continues with another
vector orthogonal to all earlier ones. So every number is a Ritz value, and as many products as
dimensions give all eigenvalues.

Source: Golub and Van Loan (2013), Matrix computations, section 10.3 (full reorthogonalisation),
with restarts instead of a stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .._linalg import eigenpairs, matmul
from .._util import all_finite, scattered_floats

LANCZOS_STEPS = 20
"""Usual number of products, with which the largest eigenvalue is known to about 1%."""


class Extremes(NamedTuple):
    """The ends of a spectrum; all fields NaN if a product was not finite.

    Attributes:
        largest: largest Ritz value, signed; a lower bound.
        smallest_positive: smallest Ritz value that is positive beyond rounding, a scalar; 0 if
            there is none. If the operator has no smaller eigenvalue, it is an upper bound.
        smallest: smallest Ritz value, signed; an upper bound.
    """

    largest: Array
    smallest_positive: Array
    smallest: Array


def ritz_vectors(
    matvec: Callable[[Array], Array], start: Array, num_iterations: int
) -> tuple[Array, Array, Array]:
    """Ritz values and vectors of v -> A v, with the errors of each; all NaN if one is not finite.

    With Ritz value t and unit vector y, the error is the length of A y - t y. A ``start`` that is
    zero or not finite, as a failed estimate gives, is replaced. It takes at most D products.

    Returns:
        The values, shape (r,), ascending; the vectors as rows, shape (r, D); the errors, shape
        (r,).
    """
    dim, dtype = start.size, start.dtype
    tolerance = 10 * jnp.finfo(dtype).eps

    def clean(vector: Array, basis: Array) -> Array:
        return normalise(vector - matmul(matmul(basis, vector), basis))[0]

    def step(carry: tuple[Array, Array, Array], j: Array) -> tuple[tuple, tuple[Array, Array]]:
        basis, vector, scale = carry
        basis = lax.dynamic_update_index_in_dim(basis, vector, j, 0)
        product = matvec(vector).astype(dtype)
        scale = jnp.maximum(scale, _norm(product))
        residual = product - matmul(matmul(basis, product), basis)
        length = _norm(residual)
        exhausted = ~(length > tolerance * scale)
        fresh = scattered_floats(1 + j.astype(jnp.uint32), dim, dtype)
        vector = jnp.where(exhausted, fresh, residual / length)
        # A residual needs one more pass, as after any cancellation. Two more passes are for a fresh
        # vector, which has little outside an almost complete basis, and a residual at rounding.
        vector = lax.fori_loop(0, 2, lambda _, x: clean(x, basis), vector)
        beta = jnp.where(exhausted, 0, matmul(vector, product))
        return (basis, vector, scale), (matmul(basis[j], product), beta)

    number, length = min(num_iterations, dim), _norm(start)
    usable = (length > 0) & jnp.isfinite(length)
    first = normalise(jnp.where(usable, start, scattered_floats(jnp.uint32(0), dim, dtype)))[0]
    carry = (jnp.zeros((number, dim), dtype), first, jnp.zeros((), dtype))
    (basis, _, _), (alpha, beta) = lax.scan(step, carry, jnp.arange(number))
    matrix = jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1)
    finite = all_finite(matrix)
    found = eigenpairs(jnp.where(finite, matrix, 0))
    values, within = (jnp.where(finite, x, jnp.nan) for x in found)
    return values, matmul(within.T, basis), jnp.abs(beta[-1] * within[-1])


def extreme_eigenvalues(
    matvec: Callable[[Array], Array], start: Array, num_iterations: int
) -> Extremes:
    """Largest and smallest eigenvalues of a symmetric operator v -> A v, see `ritz_vectors`.

    Outer values are approached from inside. Twenty products usually give the largest to 1%, twelve
    to 3%. The smallest of a badly conditioned operator needs a number of products of the order of
    the square root of the condition number (20 products at condition number 1e4 overestimate it 6
    to 11 times). In an indefinite operator ``smallest_positive`` is an interior value. Values
    within rounding of zero, ``4 eps`` of the largest, count as zero in it.
    """
    values, _, _ = ritz_vectors(matvec, start, num_iterations)
    size = jnp.max(jnp.abs(values))
    is_positive = values > 4 * jnp.finfo(values.dtype).eps * size
    positive = jnp.min(jnp.where(is_positive, values, jnp.inf))
    positive = jnp.where(jnp.any(is_positive), positive, jnp.where(jnp.isnan(size), size, 0))
    return Extremes(values[-1], positive, values[0])


def _norm(x: Array) -> Array:
    """Euclidean norm whose squares neither overflow nor underflow."""
    largest = jnp.max(jnp.abs(x))
    unit = jnp.where(largest > 0, largest, 1)
    return unit * jnp.sqrt(jnp.sum((x / unit) ** 2))


def normalise(x: Array) -> tuple[Array, Array]:
    """Unit vector and length; zero for zero, as after the last vector of a complete basis."""
    length = _norm(x)
    return jnp.where(length > 0, x / length, 0), length
