"""SWAG: its algebra, its automatic rate, its results, and its errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer import Predictive
from targets import linear, linear_moments, normal_mean, regression, regression_data, replayed

from numpyro_geom.baselines import swag as swag_module
from numpyro_geom.baselines.swag import SWAG, SWAGParams

X, Y = regression_data(500, 3)
SHORT: dict[str, Any] = {
    "batch_size": 50,
    "num_steps": 250,
    "rank": 4,
}
MODE = {"w": jnp.asarray(linear_moments(X, Y)[0], X.dtype)}
WITH_SCALE = {**MODE, "s": jnp.asarray(np.log(0.5), X.dtype)}
# A score beyond this happens to a correct sampler with probability 3e-7 a comparison.
LIMIT = 5.1


def curvature_and_noise(batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Hessian and covariance of the minibatch gradient of `linear` at its mode."""
    mean, covariance = linear_moments(X, Y)
    x, y = np.asarray(X), np.asarray(Y)
    slopes = x * (x @ mean - y)[:, None] / 0.25
    return np.linalg.inv(covariance), np.cov(slopes.T, bias=True) * len(x) ** 2 / batch_size


# --- algebra


def test_moments_are_those_of_the_sequence() -> None:
    values = np.random.default_rng(0).normal(3.0, 1e-3, size=(11, 5)).astype(np.float32)
    moments = jnp.zeros(5), jnp.zeros(5), jnp.zeros((4, 5))
    for k, value in enumerate(values, 1):
        moments = swag_module.update_moments(moments, jnp.asarray(value), jnp.asarray(k))
    mean, squares, deviations = moments
    exact = values.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(axis=0), rtol=1e-6)
    # with raw second moments nothing of 1e-6 would be left beside 9 in float32
    np.testing.assert_allclose(squares / 11, exact.var(axis=0), rtol=2e-3)
    running = np.cumsum(exact, axis=0) / np.arange(1, 12)[:, None]
    np.testing.assert_allclose(deviations, (exact - running)[-4:], atol=5e-7)


def test_covariance_of_draws_is_half_diagonal_and_half_low_rank() -> None:
    """Against the formula, entry by entry, in standard errors of a Gaussian's covariance."""
    rng = np.random.default_rng(1)
    num, rank, size = 200_000, 3, 4
    params = SWAGParams(
        mean=jnp.asarray(rng.normal(size=size)),
        variance=jnp.asarray(rng.uniform(0.5, 2.0, size=size)),
        deviations=jnp.asarray(rng.normal(size=(rank, size))),
        learning_rate=jnp.asarray(0.1),
    )
    keys = random.split(random.key(2), num)
    draws = jax.vmap(lambda key: swag_module.normal_draw(key, params))(keys)
    draws = np.asarray(draws, np.float64)
    d = np.asarray(params.deviations, np.float64)
    expected = np.diag(params.variance) / 2 + d.T @ d / (2 * (rank - 1))
    variances = np.diag(expected)
    assert np.abs((draws.mean(axis=0) - params.mean) / np.sqrt(variances / num)).max() < LIMIT
    error = np.sqrt((np.outer(variances, variances) + expected**2) / num)
    assert np.abs((np.cov(draws.T) - expected) / error).max() < LIMIT


def snapshots_from(params: SWAGParams) -> np.ndarray:
    """All snapshots, where there are no more than deviations.

    With m_k the running mean, d_k = theta_k - m_k and m_k - m_(k-1) = d_k / (k - 1).
    """
    deviations = np.asarray(params.deviations["w"], np.float64)
    mean = np.asarray(params.mean["w"], np.float64)
    snapshots = []
    for k in range(len(deviations), 0, -1):
        snapshots.append(mean + deviations[k - 1])
        mean = mean - deviations[k - 1] / max(k - 1, 1)
    return np.array(snapshots[::-1])


def test_parameters_are_those_of_the_path() -> None:
    steps = {"batch_size": 50, "num_steps": 125}
    params = SWAG(linear, rank=100, **steps).fit(random.key(0), X, Y, init_params=MODE)
    snapshots = snapshots_from(params)
    np.testing.assert_allclose(params.deviations["w"][0], 0.0)
    np.testing.assert_allclose(snapshots.mean(axis=0), params.mean["w"], rtol=1e-5)
    np.testing.assert_allclose(snapshots.var(axis=0), params.variance["w"], rtol=1e-3)
    assert np.all(np.diff(snapshots, axis=0) != 0)
    # a smaller rank keeps the last ones of the same path, oldest first
    fewer = SWAG(linear, rank=70, **steps).fit(random.key(0), X, Y, init_params=MODE)
    np.testing.assert_array_equal(fewer.variance["w"], params.variance["w"])
    np.testing.assert_array_equal(fewer.deviations["w"], params.deviations["w"][-70:])


# --- where it goes


def test_linear_regression() -> None:
    """X is white, so the law of SGD at the automatic rate is the posterior, up to h lam / 2.

    h lam is about 2 B / N = 0.2 and a relaxation time 5 steps: 8,000 steps give the mean to
    sqrt(2 5 / 8000) = 0.035 standard deviations, and 800 snapshots variances to sqrt(2 / 800).
    """
    guide = SWAG(linear, batch_size=50, rank=800)
    params = guide.fit(random.key(0), X, Y, init_params=MODE)
    mean, covariance = linear_moments(X, Y)
    sd = np.sqrt(np.diag(covariance))
    assert np.abs((params.mean["w"] - mean) / sd).max() < LIMIT * 0.035
    # the law's width is proportional to the rate, which is known to a tenth
    rate = 500 * 2 * 3 / np.trace(curvature_and_noise(50)[1])
    width = params.variance["w"] / (sd**2 * params.learning_rate / rate)
    assert np.abs(width - 1).max() < LIMIT * 0.05 + 0.1
    draws = guide.sample_posterior(random.key(1), params, sample_shape=(2000,))["w"]
    # and of the draws
    assert np.abs(np.log(np.std(draws, axis=0) / sd)).max() < 0.5


def test_the_rate_is_the_one_closest_to_the_posterior() -> None:
    _, noise = curvature_and_noise(10)
    guide = SWAG(linear, **{**SHORT, "batch_size": 10})
    params = guide.fit(random.key(0), X, Y, init_params=MODE)
    expected = 500 * 2 * 3 / np.trace(noise)
    # the trace from 64 pairs of gradients
    error = np.sqrt(2 * np.sum(noise**2) / 64) / np.trace(noise)
    assert abs(float(params.learning_rate) / expected - 1) < LIMIT * error + 0.05


def test_the_rate_is_bounded_by_curvature_of_minibatches() -> None:
    """With half the rows the best rate has h lam near 1: 1 / (2 lam) is taken instead."""
    curvature, noise = curvature_and_noise(250)
    largest = np.linalg.eigvalsh(curvature)[-1]
    assert 2 * 3 / np.trace(noise) * largest > 0.8
    guide = SWAG(linear, **{**SHORT, "batch_size": 250})
    h = float(guide.fit(random.key(0), X, Y, init_params=MODE).learning_rate) / 500
    # the largest of 8 minibatches is above that of all rows, and by less than a third
    assert 0.5 / 1.33 < h * largest < 0.5


def test_a_given_rate_is_used() -> None:
    guide = SWAG(linear, learning_rate=0.01, **SHORT)
    wide = guide.fit(random.key(0), X, Y, init_params=MODE)
    assert float(wide.learning_rate) == pytest.approx(0.01)
    guide = SWAG(linear, learning_rate=0.0001, **SHORT)
    narrow = guide.fit(random.key(0), X, Y, init_params=MODE)
    assert np.all(narrow.variance["w"] < wide.variance["w"])


# --- what it returns


def test_sites_are_constrained_and_deterministic_sites_included() -> None:
    guide = SWAG(replayed, **SHORT)
    params = guide.fit(random.key(0), X, Y, init_params=WITH_SCALE)
    for shape in ((), (6,), (2, 3), (40,)):
        draws = guide.sample_posterior(random.key(1), params, sample_shape=shape)
        assert {k: v.shape for k, v in draws.items()} == {
            "w": (*shape, 3),
            "s": shape,
            "norm": shape,
            "fitted": (*shape, 500),
        }
        assert np.all(np.asarray(draws["s"]) > 0)
        np.testing.assert_allclose(draws["norm"], np.linalg.norm(draws["w"], axis=-1), rtol=1e-5)
    np.testing.assert_allclose(draws["fitted"], draws["w"] @ X.T, atol=1e-4)
    middle = guide.median(params)
    np.testing.assert_allclose(np.log(middle["s"]), params.mean["s"], atol=1e-5)
    np.testing.assert_allclose(middle["w"], params.mean["w"], rtol=1e-6)
    assert 0.4 < float(middle["s"]) < 0.6


@pytest.mark.slow
def test_draws_are_reproducible() -> None:
    guides = [SWAG(regression, **SHORT) for _ in range(2)]
    params = [g.fit(random.key(0), X, Y, init_params=WITH_SCALE) for g in guides]
    other = guides[0].fit(random.key(1), np.asarray(X), y=np.asarray(Y), init_params=WITH_SCALE)
    jax.tree.map(np.testing.assert_array_equal, *params)
    assert np.any(other.mean["w"] != params[0].mean["w"])
    draws = [
        g.sample_posterior(random.key(2), p, sample_shape=(5,))
        for g, p in zip(guides, params, strict=True)
    ]
    np.testing.assert_array_equal(draws[0]["w"], draws[1]["w"])
    again = guides[0].sample_posterior(random.key(3), params[0], sample_shape=(5,))
    assert np.all(again["w"] != draws[0]["w"])
    # saved parameters in a new guide: the model's arguments tell the rest
    fresh = SWAG(regression, **SHORT)
    with pytest.raises(RuntimeError, match=r"expected `fit` first, or the model's arguments"):
        fresh.sample_posterior(random.key(2), params[0])
    same = fresh.sample_posterior(random.key(2), params[0], X, Y, sample_shape=(5,))
    np.testing.assert_array_equal(same["w"], draws[0]["w"])


@pytest.mark.slow
def test_predictive_takes_the_draws() -> None:
    guide = SWAG(regression, **SHORT)
    params = guide.fit(random.key(0), X, Y, init_params=WITH_SCALE)
    draws = guide.sample_posterior(random.key(1), params, sample_shape=(20,))
    new = Predictive(regression, draws)(random.key(2), X[:7])
    assert new["y"].shape == (20, 7)


@pytest.mark.slow
def test_dtype_follows_the_position() -> None:
    with jax.enable_x64(True):
        x, y = (jnp.asarray(np.asarray(a), float) for a in (X, Y))
        guide = SWAG(linear, **SHORT)
        params = guide.fit(random.key(0), x, y, init_params={"w": jnp.zeros(3)})
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float64)}


# --- mistakes


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"rank": 1}, ValueError, "rank must be an integer of at least 2, got 1"),
        ({"rank": 2.5}, TypeError, "rank"),
        ({"learning_rate": "best"}, ValueError, "'auto' or a positive number, got 'best'"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate"),
        ({"num_steps": 0}, ValueError, "num_steps"),
        ({"num_steps": 20}, ValueError, "at least rank=20 snapshots, got 16 steps"),
        ({"batch_size": 0}, ValueError, "batch_size"),
    ],
)
def test_bad_settings(settings: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        SWAG(normal_mean, **settings)


def test_the_model_must_be_callable() -> None:
    with pytest.raises(TypeError, match="model must be callable"):
        SWAG("model")


@pytest.mark.parametrize("batch_size", [None, 500])
def test_all_rows_are_refused(batch_size: int | None) -> None:
    with pytest.raises(ValueError, match="SWAG describes the noise.*below the number of rows"):
        SWAG(linear, batch_size=batch_size).fit(random.key(0), X, Y)


def test_a_mode_is_needed() -> None:
    with pytest.raises(ValueError, match=r"expected init_params, such as train\(model"):
        SWAG(linear, **SHORT).fit(random.key(0), X, Y)


@pytest.mark.parametrize("shape", ["5", (2.5,), (-1,)])
def test_bad_sample_shapes(shape: Any) -> None:
    guide = SWAG(linear, batch_size=50)
    with pytest.raises((TypeError, ValueError), match="sample_shape must be"):
        guide.sample_posterior(random.key(0), None, X, Y, sample_shape=shape)


def test_a_rate_that_explodes_is_an_error() -> None:
    guide = SWAG(linear, learning_rate=100.0, **SHORT)
    with pytest.raises(FloatingPointError, match="learning_rate=100. Pass a smaller one"):
        guide.fit(random.key(0), X, Y, init_params=MODE)
