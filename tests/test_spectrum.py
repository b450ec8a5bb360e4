"""Lanczos iteration against dense eigenvalues, its speed, and operators that break it down."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_geom._util import key_word, scattered_floats
from numpyro_geom.warmup.lanczos import Extremes, extreme_eigenvalues, ritz_vectors

DTYPES = [np.float32, np.float64]


@pytest.fixture(params=DTYPES, ids=["float32", "float64"])
def dtype(request):
    """Both precisions; x64 mode for the second one only."""
    with jax.enable_x64(request.param is np.float64):
        yield request.param


def scattered(size: int, seed: int = 0) -> jax.Array:
    """A start without a pattern."""
    return scattered_floats(key_word(random.key(seed)), size, jnp.result_type(float))


def symmetric(eigenvalues, seed: int) -> np.ndarray:
    """Dense float64 matrix of given eigenvalues in a random orthonormal basis."""
    size = len(eigenvalues)
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))
    matrix = (basis * np.asarray(eigenvalues)) @ basis.T
    return (matrix + matrix.T) / 2


def rounding(dtype, dim: int) -> float:
    """Error of the eigenvalues relative to the largest.

    The products round by at most eps sqrt(dim) relative to the norm (a sum of dim terms of random
    sign), and so do the projections; the bisection adds eps. Measured: at most 5 eps in float32
    and 11 eps in float64 over dimensions 1 to 100 and the spectra below.
    """
    return float(np.finfo(dtype).eps) * (4 + 2 * np.sqrt(dim))


def magnitude(ends: Extremes) -> float:
    """The largest absolute value."""
    return max(ends.largest, -ends.smallest)


# Compiling is what takes time here: operators are arguments, so that tests share functions.
@functools.partial(jax.jit, static_argnames="num_iterations")
def diagonal_ends(eigenvalues, start, num_iterations: int):
    """Extremes of a diagonal matrix: in exact arithmetic the basis does not matter."""
    return extreme_eigenvalues(lambda v: eigenvalues * v, start, num_iterations)


@functools.partial(jax.jit, static_argnames="num_iterations")
def diagonal_values(eigenvalues, start, num_iterations: int):
    return ritz_vectors(lambda v: eigenvalues * v, start, num_iterations)[0]


@jax.jit
def full(matrix, start):
    dim = matrix.shape[0]
    values = ritz_vectors(lambda v: matrix @ v, start, dim)[0]
    return values, extreme_eigenvalues(lambda v: matrix @ v, start, dim + 5)


SPECTRA = {
    "random": lambda n, rng: rng.normal(size=n),
    "positive": lambda n, rng: rng.gamma(1.0, size=n) + 0.1,
    "negative": lambda n, rng: -rng.gamma(1.0, size=n) - 0.1,
    "spans 1e6": lambda n, rng: np.logspace(-6, 0, n),
    "two clusters": lambda n, rng: np.repeat([1.0, 2.0], [n - n // 2, n // 2]),
    "half rank": lambda n, rng: np.repeat([0.0, 1.0], [n // 2, n - n // 2]),
    "opposite pairs": lambda n, rng: np.linspace(-1, 1, n),
    "identity": lambda n, rng: np.ones(n),
    "one eigenvalue, negative": lambda n, rng: -3 * np.ones(n),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("dim", [1, 3, 20])
def test_all_eigenvalues_when_iterations_suffice(spectrum: str, dim: int, dtype) -> None:
    rng = np.random.default_rng(dim)
    matrix = symmetric(SPECTRA[spectrum](dim, rng), seed=dim).astype(dtype)
    exact = np.linalg.eigvalsh(matrix.astype(np.float64))
    scale = np.abs(exact).max()
    values, ends = full(jnp.asarray(matrix), jnp.asarray(rng.normal(size=dim), dtype))
    tolerance = rounding(dtype, dim) * scale
    assert values.shape == (dim,)
    assert values.dtype == ends.largest.dtype == dtype
    np.testing.assert_allclose(values, exact, rtol=0, atol=tolerance)
    np.testing.assert_allclose(magnitude(ends), scale, rtol=0, atol=tolerance)
    np.testing.assert_allclose(ends.smallest, exact[0], rtol=0, atol=tolerance)
    positive = exact[exact > 4 * np.finfo(dtype).eps * scale]
    wanted = positive[0] if positive.size else 0.0
    np.testing.assert_allclose(ends.smallest_positive, wanted, rtol=0, atol=tolerance)


def wishart(dim: int, num: int, seed: int) -> np.ndarray:
    return np.linalg.eigvalsh(np.cov(np.random.default_rng(seed).normal(size=(dim, num))))


# A curvature's decay, sample covariances, a condition number of 1e4, one large eigenvalue. Relative
# errors over 400 starts as measured: the mean is 0.23 per cent at most ("wishart 1000" and "1e4"),
# and of these two 1.3 to 2 per cent of starts are off by more than 1 per cent, 1.8 at most. Normal
# starts do no better (0.24 per cent, 2 per cent of starts, 1.8).
@pytest.mark.parametrize(
    "eigenvalues",
    [
        1 / np.arange(1.0, 1001.0),
        wishart(100, 400, seed=0),
        wishart(1000, 4000, seed=0),
        wishart(300, 300, seed=0),
        np.logspace(-4, 0, 1000),
        np.append(np.ones(500), 100.0),
    ],
    ids=["power law", "wishart 100", "wishart 1000", "square wishart", "1e4", "spike"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_largest_to_two_percent_in_twenty_products(eigenvalues, seed: int) -> None:
    ends = diagonal_ends(
        jnp.asarray(eigenvalues, jnp.float32), scattered(len(eigenvalues), seed), 20
    )
    largest = np.abs(eigenvalues).max()
    assert 0.98 * largest < magnitude(ends) <= largest * (1 + rounding(np.float32, 1000))


def test_smallest_of_a_badly_conditioned_operator_is_an_upper_bound(x64: None) -> None:
    # Condition number 1e4 at dimension 100: 20 products find it within a factor of 6 to 11
    # (ten starts), 60 within 1.6: the price of products alone.
    eigenvalues = np.logspace(-4, 0, 100)
    factor = {
        num: float(diagonal_ends(eigenvalues, scattered(100), num).smallest_positive) / 1e-4
        for num in (20, 60, 100)
    }
    assert 1 < factor[20] < 12
    assert 1 < factor[60] < 2
    # error eps times the norm, 1e4 times larger relative to this eigenvalue
    assert factor[100] == pytest.approx(1, abs=1e4 * rounding(np.float64, 100))


# Start vectors in an invariant subspace: the iteration must leave it to see the whole spectrum.
@pytest.mark.parametrize("num_iterations", [2, 6])
def test_start_at_an_eigenvector_still_finds_the_others(num_iterations: int, dtype) -> None:
    eigenvalues = jnp.asarray([5.0, 5.0, -7.0, 1.0, 2.0, 3.0], dtype)
    tolerance = 7 * rounding(dtype, 6)
    for first in (0, 2, 5):
        start = jnp.zeros(6, dtype).at[first].set(1)
        values = diagonal_values(eigenvalues, start, num_iterations)
        # a random vector orthogonal to an exact eigenvector keeps that eigenvalue
        assert np.abs(values - eigenvalues[first]).min() < tolerance
        if num_iterations == 6:
            np.testing.assert_allclose(values, np.sort(eigenvalues), rtol=0, atol=tolerance)


def test_low_rank_has_no_spurious_positive_value() -> None:
    # J'J of 12 rows in 400 dimensions: 20 iterations exhaust its range and meet the null space.
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(12, 400)), jnp.float32)
    exact = np.linalg.svd(np.asarray(rows, np.float64), compute_uv=False) ** 2
    ends = extreme_eigenvalues(lambda v: rows.T @ (rows @ v), scattered(400), 20)
    tolerance = rounding(np.float32, 400) * exact[0]
    assert ends.smallest_positive == pytest.approx(exact[-1], abs=tolerance)
    assert magnitude(ends) == pytest.approx(exact[0], abs=tolerance)
    assert ends.smallest == pytest.approx(0, abs=tolerance)


@pytest.mark.parametrize("top", [-3.0, 3.0])
def test_indefinite_operator_takes_the_larger_magnitude(top: float) -> None:
    eigenvalues = np.append(np.linspace(-1, 2, 300), top)
    ends = diagonal_ends(jnp.asarray(eigenvalues), scattered(301), 30)
    assert magnitude(ends) == pytest.approx(3, rel=1e-5)
    assert ends.largest == pytest.approx(max(top, 2), rel=0.01)
    assert ends.smallest == pytest.approx(min(top, -1), rel=0.01)
    assert ends.smallest_positive > 0


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_of_the_operator_does_not_matter(scale: float) -> None:
    # squares of these products are outside the range of float32
    eigenvalues = np.linspace(1, 2, 10)
    ends = diagonal_ends(jnp.asarray(eigenvalues * scale, jnp.float32), jnp.ones(10), 10)
    tolerance = 2 * rounding(np.float32, 10)
    assert magnitude(ends) / scale == pytest.approx(2, abs=tolerance)
    assert ends.smallest_positive / scale == pytest.approx(1, abs=tolerance)


# what a failed estimate leaves behind must not poison the next one
@pytest.mark.parametrize("bad", [0.0, 3e38, np.nan, np.inf])  # the norm of 3e38 overflows
def test_useless_start_is_replaced(bad: float) -> None:
    ends = diagonal_ends(jnp.linspace(1, 2, 10), jnp.full(10, bad), 10)
    assert magnitude(ends) == pytest.approx(2, abs=2 * rounding(np.float32, 10))


@jax.jit
def spoilt(bad, threshold):
    """A diagonal operator that gives a bad entry for vectors whose last entry is large."""

    def matvec(v):
        product = jnp.arange(1.0, 9.0) * v
        return jnp.where(jnp.abs(v[-1]) > threshold, product.at[3].set(bad), product)

    start = jnp.ones(8)
    return ritz_vectors(matvec, start, 8)[0], extreme_eigenvalues(matvec, start, 8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
# all entries of the first vector are 8^-1/2 = 0.35: at once, or in a later product
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_non_finite_product_gives_nan_throughout(bad: float, threshold: float) -> None:
    for leaf in jax.tree.leaves(spoilt(bad, threshold)):
        assert np.all(np.isnan(leaf))
    for leaf in jax.tree.leaves(spoilt(bad, 2.0)):  # no entry of a unit vector is that large
        assert np.all(np.isfinite(leaf))


def test_vmap() -> None:
    eigenvalues = jnp.stack([jnp.linspace(1, 2, 12), jnp.ones(12), jnp.linspace(-9, 3, 12)])
    bad = eigenvalues.at[1, 0].set(jnp.nan)
    starts = jnp.stack([scattered(12, seed) for seed in range(3)])

    def run(eigenvalues, start):
        return extreme_eigenvalues(lambda v: eigenvalues * v, start, 6)

    each = [diagonal_ends(e, x, 6) for e, x in zip(eigenvalues, starts, strict=True)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    vmapped = jax.jit(jax.vmap(run))
    together, broken = vmapped(eigenvalues, starts), vmapped(bad, starts)
    for name in ("largest", "smallest_positive", "smallest"):
        found = getattr(together, name)
        # six of twelve: rounding in another order passes on to unconverged values
        np.testing.assert_allclose(found, getattr(stacked, name), rtol=1e-4)
        # a chain whose product is not finite leaves the others alone
        np.testing.assert_array_equal(np.isnan(getattr(broken, name)), [False, True, False])
        np.testing.assert_allclose(getattr(broken, name)[::2], found[::2], rtol=1e-4)


def test_ritz_vectors_have_the_errors_that_they_say() -> None:
    """Of a matrix with two eigenvalues apart from a hundred others."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(102, 102)))[0]
    exact = np.concatenate([rng.uniform(1, 2, 100), [30.0, 50.0]])
    matrix = (basis * exact) @ basis.T
    array = jnp.asarray(matrix, jnp.float32)
    values, vectors, errors = ritz_vectors(lambda v: array @ v, scattered(102), 12)
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(12), atol=1e-5)
    found = np.linalg.norm(vectors @ matrix - values[:, None] * vectors, axis=1)
    np.testing.assert_allclose(errors, found, atol=1e-4)
    np.testing.assert_allclose(values[-2:], exact[-2:], rtol=1e-5)
    np.testing.assert_allclose(np.abs(vectors[-2:] @ basis[:, -2:]), np.eye(2), atol=1e-4)
