"""Extreme eigenvalues of a symmetric operator that is known only by its products with vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._checks import check_int
from .._linalg import eigenpairs, matmul
from .._util import all_finite, key_word, scattered_floats

LANCZOS_STEPS = 20
"""Usual number of products, with which the largest eigenvalue is known to about 1%."""


class Extremes(NamedTuple):
    """The ends of a spectrum; all fields NaN if a product was not finite.

    Attributes:
        largest_magnitude: largest absolute Ritz value, a scalar >= 0; a lower bound.
        smallest_positive: smallest Ritz value that is positive beyond rounding, a scalar; 0 if
            there is none. If the operator has no smaller eigenvalue, it is an upper bound.
        smallest: smallest Ritz value, signed; an upper bound.
    """

    largest_magnitude: Array
    smallest_positive: Array
    smallest: Array


def lanczos(matvec: Callable[[Array], Array], dim: int, start: Array, num_iterations: int) -> Array:
    """Ritz values of a symmetric operator A by the Lanczos iteration.

    ``beta_j q_{j+1} = A q_j - alpha_j q_j - beta_{j-1} q_{j-1}``

    The Ritz values are the eigenvalues of T = Q'AQ, which is tridiagonal: alpha on the diagonal,
    beta beside it. Every vector is orthogonalised against all earlier ones, three times, so no
    value is a ghost. The Krylov space may be exhausted: beta_j is at rounding level (the identity,
    operators of low rank, a start in an invariant subspace). Then beta_j is set to 0, and the
    iteration continues with another vector orthogonal to all earlier ones. So every returned number
    is a Ritz value, and with ``num_iterations >= dim`` they are all the eigenvalues. There is one
    loop with one product per iteration, and 12 dim num_iterations further operations per iteration.
    Memory: dim x num_iterations numbers. Works under ``jit`` and ``vmap``.

    Args:
        matvec: v -> A v, both of shape (dim,), for symmetric A. Not checked for symmetry.
        dim: dimension, a Python integer >= 1.
        start: a vector of shape (dim,), best with a share of the eigenvectors of interest; or a
            PRNG key (typed or uint32) for a vector without a pattern. Such a vector also replaces
            a start that is zero or not finite, as a failed estimate gives.
        num_iterations: number of products, a Python integer >= 1; at most ``dim`` are taken.

    Returns:
        The Ritz values, shape (min(num_iterations, dim),), ascending, in the dtype of ``start``
        (the default float type for a key); all NaN if a product was not finite.

    Raises:
        ValueError: if ``dim``, ``num_iterations`` or a shape does not fit.
        TypeError: if ``dim`` or ``num_iterations`` is not an integer, or ``start`` is neither a
            float vector nor a key.

    Examples:
        >>> values = lanczos(lambda v: jnp.array([1.0, 2.0, 5.0]) * v, 3, jax.random.key(0), 3)
        >>> [round(float(value), 3) for value in values]
        [1.0, 2.0, 5.0]

    Source: Golub and Van Loan (2013), Matrix computations, section 10.3 (full
    reorthogonalisation), with restarts instead of a stop.
    """
    return ritz_vectors(matvec, dim, start, num_iterations)[0]


def ritz_vectors(
    matvec: Callable[[Array], Array], dim: int, start: Array, num_iterations: int
) -> tuple[Array, Array, Array]:
    """Ritz values and vectors of a symmetric operator by `lanczos`, with the errors of each.

    With Ritz value t and unit vector y, the error is the length of A y - t y. Arguments and
    exceptions are as in `lanczos`.

    Returns:
        The values, shape (r,), ascending; the vectors as rows, shape (r, D); the errors, shape
        (r,). All NaN if a product was not finite.
    """
    basis, alpha, beta = _tridiagonal(matvec, dim, start, num_iterations)
    matrix = jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1)
    finite = all_finite(matrix)
    found = eigenpairs(jnp.where(finite, matrix, 0))
    values, within = (jnp.where(finite, x, jnp.nan) for x in found)
    return values, matmul(within.T, basis), jnp.abs(beta[-1] * within[-1])


def _tridiagonal(
    matvec: Callable[[Array], Array], dim: int, start: Array, num_iterations: int
) -> tuple[Array, Array, Array]:
    """The basis as rows, alpha, and beta, whose last entry leads out of the basis."""
    dim, num_iterations = check_int("dim", dim), check_int("num_iterations", num_iterations)
    num_iterations = min(num_iterations, dim)
    first, word = _first_vector(start, dim)
    dtype = first.dtype
    tolerance = 10 * jnp.finfo(dtype).eps

    def clean(vector: Array, basis: Array) -> Array:
        return normalise(vector - matmul(matmul(basis, vector), basis))[0]

    def step(carry: tuple[Array, Array, Array], j: Array) -> tuple[tuple, tuple[Array, Array]]:
        basis, vector, scale = carry
        basis = lax.dynamic_update_index_in_dim(basis, vector, j, 0)
        product = matvec(vector)
        if jnp.shape(product) != (dim,):
            raise ValueError(
                f"matvec must return an array of shape ({dim},), got {jnp.shape(product)}"
            )
        product = product.astype(dtype)
        scale = jnp.maximum(scale, _norm(product))
        residual = product - matmul(matmul(basis, product), basis)
        length = _norm(residual)
        exhausted = ~(length > tolerance * scale)
        fresh = scattered_floats(word + 1 + j.astype(jnp.uint32), dim, dtype)
        vector = jnp.where(exhausted, fresh, residual / length)
        # A residual needs one more pass, as after any cancellation. Two more passes are for a fresh
        # vector, which has little outside an almost complete basis, and a residual at rounding.
        vector = lax.fori_loop(0, 2, lambda _, x: clean(x, basis), vector)
        beta = jnp.where(exhausted, 0, matmul(vector, product))
        return (basis, vector, scale), (matmul(basis[j], product), beta)

    carry = (jnp.zeros((num_iterations, dim), dtype), first, jnp.zeros((), dtype))
    (basis, _, _), (alpha, beta) = lax.scan(step, carry, jnp.arange(num_iterations))
    return basis, alpha, beta


def extreme_eigenvalues(
    matvec: Callable[[Array], Array], dim: int, start: Array, num_iterations: int
) -> Extremes:
    """Largest and smallest eigenvalues of a symmetric operator, by `lanczos`.

    Exact to rounding (relative to the largest) with ``num_iterations >= dim``. Otherwise the outer
    values are approached from inside. Twenty products usually give the largest to 1%, twelve to 3%.
    The smallest of a badly conditioned operator needs a number of products of the order of the
    square root of the condition number (20 products at condition number 1e4 overestimate it 6 to 11
    times). In an indefinite operator ``smallest_positive`` is an interior value. Short runs can be
    too high or too low there. Values within rounding of zero, ``4 eps`` of the largest, count as
    zero in ``smallest_positive``, as in operators of low rank. Arguments and errors are as in
    `lanczos`.

    Examples:
        >>> diagonal = jnp.array([-1.0, 0.5, 3.0])
        >>> ends = extreme_eigenvalues(lambda v: diagonal * v, 3, jax.random.key(0), 3)
        >>> [round(float(end), 3) for end in ends]
        [3.0, 0.5, -1.0]
    """
    return ends(lanczos(matvec, dim, start, num_iterations))


def ends(values: Array) -> Extremes:
    """The extremes of eigenvalues in ascending order; all NaN if the eigenvalues are NaN."""
    largest = jnp.max(jnp.abs(values))
    is_positive = values > 4 * jnp.finfo(values.dtype).eps * largest
    positive = jnp.min(jnp.where(is_positive, values, jnp.inf))
    positive = jnp.where(jnp.any(is_positive), positive, jnp.where(jnp.isnan(largest), largest, 0))
    return Extremes(largest, positive, values[0])


def _first_vector(start: Array, dim: int) -> tuple[Array, Array]:
    """The first unit vector, and the seed of the vectors for restarts."""
    start = jnp.asarray(start)
    word = jnp.zeros((), jnp.uint32)
    if jnp.issubdtype(start.dtype, jax.dtypes.prng_key) or start.dtype == jnp.uint32:
        word = key_word(start)
        start = scattered_floats(word, dim, jnp.result_type(float))
    elif not jnp.issubdtype(start.dtype, jnp.floating):
        raise TypeError(f"start must be a PRNG key or a float vector, got dtype {start.dtype}")
    if start.shape != (dim,):
        raise ValueError(
            f"start must be a PRNG key or a vector of shape ({dim},), got shape {start.shape}"
        )
    length = _norm(start)
    usable = (length > 0) & jnp.isfinite(length)
    vector = jnp.where(usable, start, scattered_floats(word, dim, start.dtype))
    return normalise(vector)[0], word


def _norm(x: Array) -> Array:
    """Euclidean norm whose squares neither overflow nor underflow."""
    largest = jnp.max(jnp.abs(x))
    unit = jnp.where(largest > 0, largest, 1)
    return unit * jnp.sqrt(jnp.sum((x / unit) ** 2))


def normalise(x: Array) -> tuple[Array, Array]:
    """Unit vector and length; zero for zero, as after the last vector of a complete basis."""
    length = _norm(x)
    return jnp.where(length > 0, x / length, 0), length
