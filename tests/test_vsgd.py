"""Constant-rate SGD: its stationary distribution, the optimal rate, and its errors.

Quadratic energies theta' H theta / 2 with additive gradient noise of covariance C have known
stationary distributions at any rate: S = J S J' + h^2 C, J = I - h H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer import MCMC
from scipy.linalg import solve_continuous_lyapunov, solve_discrete_lyapunov
from targets import linear, linear_moments, logistic, normal_mean, regression_data, run

from numpyro_geom.baselines.vsgd import VSGD, GradientNoise, optimal_rate

Y = jnp.arange(12.0)
H = np.array([[2.0, 0.5], [0.5, 1.0]])
C = np.array([[40.0, -12.0], [-12.0, 10.0]])
# A score beyond this happens to a correct sampler with probability 3e-7 a comparison.
LIMIT = 5.1


def noisy_quadratic(hessian: np.ndarray, covariance: np.ndarray) -> Callable:
    """An energy whose gradient is H theta plus noise of the given covariance."""
    h, root = jnp.asarray(hessian), jnp.asarray(np.linalg.cholesky(covariance))

    def potential_fn(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        noise = root @ random.normal(rng_key, z.shape)
        return z @ h @ z / 2 + noise @ z

    return potential_fn


def law(hessian: np.ndarray, covariance: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Stationary covariance at any rate, and to first order in it."""
    jump = rate**2 * covariance
    exact = solve_discrete_lyapunov(np.eye(len(hessian)) - rate * hessian, jump)
    return exact, solve_continuous_lyapunov(rate * hessian, jump)


def divergence(covariance: np.ndarray, hessian: np.ndarray, temperature: float) -> float:
    """KL of N(0, covariance) from the posterior, up to a constant."""
    return float(np.trace(hessian @ covariance) / temperature - np.linalg.slogdet(covariance)[1])


def second_moments(z: np.ndarray) -> np.ndarray:
    i, j = np.triu_indices(z.shape[-1])
    return z[..., i] * z[..., j]


def draw_from(covariance: np.ndarray, num: int, seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.multivariate_normal(np.zeros(len(covariance)), covariance, num))


# --- the stationary law


def test_stationary_law_is_the_lyapunov_solution() -> None:
    """At h lam_H = 0.5, where first order is not enough; chains start from the law itself."""
    step_size = 0.2
    exact, first_order = law(H, C, step_size)
    moments = second_moments(np.linalg.cholesky(exact).T).sum(axis=0)
    np.testing.assert_allclose(moments, exact[np.triu_indices(2)])
    kernel = VSGD(potential_fn=noisy_quadratic(H, C), step_size=step_size, num_steps=5)
    state = chains.start(kernel, draw_from(exact, 4000, seed=1), seed=2)
    state, draws = chains.run(kernel, chains.past_warmup(state), 12)
    values = second_moments(draws.z)
    assert np.abs(chains.scores(values, moments)).max() < LIMIT
    # the test can tell the law from its first-order form, and the chains do move
    assert np.abs(chains.scores(values, first_order[np.triu_indices(2)])).max() > 2 * LIMIT
    assert abs(np.corrcoef(draws.z[0, :, 0], draws.z[-1, :, 0])[0, 1]) < 0.1


# --- the rate


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_rate_minimises_the_divergence(temperature: float) -> None:
    best = float(optimal_rate(jnp.asarray(np.diag(C)) / 7**2, 7, temperature))
    assert best == pytest.approx(2 * 2 * temperature / np.trace(C), rel=1e-6)
    at = [divergence(law(H, C, r * best)[1], H, temperature) for r in (0.9, 1.0, 1.1)]
    assert at[1] < min(at[0], at[2])
    # and the mean of z . grad U / D is then the temperature
    assert np.trace(H @ law(H, C, best)[1]) / 2 == pytest.approx(temperature)


def test_rate_of_many_rows() -> None:
    """60,000 squared is beyond 32 bits."""
    rate = jax.jit(lambda noise: optimal_rate(noise, 60_000, 1.0))(jnp.ones(2))
    assert float(rate) == pytest.approx(2 / 60_000**2, rel=1e-6)


def warmed_up(kernel: VSGD, num_chains: int, num_warmup: int, **settings: Any) -> MCMC:
    return run(
        kernel,
        num_warmup=num_warmup,
        seed=3,
        num_chains=num_chains,
        chain_method="vectorized",
        extra_fields=("configurational_temperature",),
        **settings,
    )


@pytest.mark.slow
def test_automatic_rate_and_the_posterior_where_the_noise_allows() -> None:
    """C a multiple of the identity: the draws are the posterior's.

    Each chain has measured C with about 5/9 of 200 + 7/8 100 n pairs, n steps per draw in warm-up:
    at least 290 / 2 effective ones, so that log h has the standard deviation sqrt(2 / 145 D) at
    most; its mean over chains is compared with 5 standard errors of their own spread, plus the
    bias 2 / 145 of the inverse of a mean.
    """
    num_chains, noise = 300, 60.0 * np.eye(2)
    kernel = VSGD(potential_fn=noisy_quadratic(H, noise))
    init = draw_from(np.linalg.inv(H), num_chains, seed=4)
    mcmc = warmed_up(kernel, num_chains, 100, init_params=init, num_samples=30)
    state = mcmc.last_state
    learned = np.asarray(state.metric_state.statistic)
    spread = learned.std(axis=0) / np.sqrt(num_chains)
    assert np.all(np.abs(learned.mean(axis=0) - np.diag(noise)) < 5 * spread)
    log_h = np.log(np.asarray(state.step_size) / (2 * 2 / np.trace(noise)))
    assert log_h.std() < np.sqrt(2 / (2 * 145)) * 1.3
    assert abs(log_h.mean()) < 5 * log_h.std() / np.sqrt(num_chains) + 2 / 145
    # the law at the exact rate, up to the bias of h: 2 / 145 of variances up to 1.1
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)).swapaxes(0, 1)
    exact, _ = law(H, noise, 2 / 60.0)
    values = second_moments(draws)
    error = values.mean(axis=0).std(axis=0) / np.sqrt(num_chains)
    gap = np.abs(values.mean(axis=(0, 1)) - exact[np.triu_indices(2)])
    assert np.all(gap < LIMIT * error + 0.015)
    # which is the posterior up to the discretisation, h lam_H / 2 of the variance
    np.testing.assert_allclose(exact, np.linalg.inv(H), atol=0.05)
    assert not np.any(mcmc.get_extra_fields()["diverging"])


def test_noise_proportional_to_curvature_makes_round_draws() -> None:
    """What the docstring warns of: the same variance in all directions, not the posterior's."""
    hessian = np.diag([4.0, 0.25])
    _, first_order = law(hessian, 30 * hessian, 2 * 2 / np.trace(30 * hessian))
    np.testing.assert_allclose(first_order, np.eye(2) * 2 / np.trace(hessian), atol=1e-12)


def test_the_rate_is_bounded_by_curvature_and_then_frozen() -> None:
    """Little noise asks for a rate beyond stability: h lam_H = 1 is taken instead."""
    kernel = VSGD(potential_fn=noisy_quadratic(H, 0.01 * np.eye(2)))
    mcmc = warmed_up(kernel, 2, 40, init_params=jnp.ones((2, 2)), num_samples=2)
    frozen = mcmc.last_state
    largest = np.linalg.eigvalsh(H)[-1]
    np.testing.assert_allclose(frozen.step_size, 1 / largest, rtol=1e-4)
    assert not np.any(mcmc.get_extra_fields()["diverging"])
    mcmc.post_warmup_state = frozen
    mcmc.run(random.key(9))
    after = mcmc.last_state
    assert int(after.i[0]) > int(frozen.i[0])
    np.testing.assert_array_equal(after.step_size, frozen.step_size)
    np.testing.assert_array_equal(after.metric_state.statistic, frozen.metric_state.statistic)


# --- the learned noise


def test_the_mean_forgets_the_way_to_the_mode() -> None:
    """Weights t^2: a first tenth with a thousandfold noise is a thousandth of the weight."""
    metric = GradientNoise()
    state = metric.init({"a": jnp.zeros(1)})
    values = np.concatenate([np.full(30, 1000.0), np.ones(270)])
    for value in values:
        state = metric.update(state, {"a": jnp.asarray([np.sqrt(value)])})
    t = np.arange(1, 301)
    weights = t * (t + 1)
    expected = (weights * values).sum() / weights.sum()
    np.testing.assert_allclose(state.statistic["a"], expected, rtol=1e-4)
    assert expected < 2.1


def test_bad_differences_change_nothing() -> None:
    metric = GradientNoise()
    state = metric.update(metric.init(jnp.zeros(2)), jnp.array([1.0, 2.0]))
    state = metric.update(state, jnp.array([jnp.nan, jnp.inf]))
    np.testing.assert_array_equal(state.statistic, [1.0, 4.0])


# --- on models


def test_minibatches_of_a_model() -> None:
    """The noise that rows make: C = N^2 / B times the covariance of the rows' gradients."""
    X, y = regression_data(500, 3)
    mean, covariance = linear_moments(X, y)
    kernel = VSGD(linear, batch_size=10)
    start = {"w": jnp.asarray(mean, jnp.float32)}
    mcmc = run(kernel, X, y, num_warmup=200, num_samples=400, init_params=start)
    slopes = np.asarray(X) * (np.asarray(X) @ mean - np.asarray(y))[:, None] / 0.25
    trace = 500**2 / 10 * slopes.var(axis=0).sum()
    # away from the mode residuals, and with them the noise, are larger by about D / N + h tr H / 2N
    h = float(mcmc.last_state.step_size)
    assert h == pytest.approx(2 * 3 / trace, rel=0.15)
    draws = np.asarray(mcmc.get_samples()["w"])
    # the mean is the mode; 400 draws at half a relaxation time are worth about 80
    sd = np.sqrt(np.diag(covariance))
    assert np.abs((draws.mean(axis=0) - mean) / sd).max() < 5 / np.sqrt(80)
    # X is white here, so H and C are near multiples of the identity, and the width is right too
    assert np.abs(draws.var(axis=0) / np.diag(covariance) - 1).max() < 5 * np.sqrt(2 / 80)


def test_logistic_regression_from_anywhere() -> None:
    rng = np.random.default_rng(5)
    X = jnp.asarray(rng.normal(size=(2000, 4)))
    truth = jnp.array([1.0, -1.0, 0.5, 0.0])
    y = random.bernoulli(random.key(6), jax.nn.sigmoid(X @ truth)).astype(int)
    mcmc = run(
        VSGD(logistic, batch_size=50),
        X,
        y,
        num_warmup=200,
        num_samples=400,
        seed=7,
        num_chains=2,
        chain_method="sequential",
    )
    draws = np.asarray(mcmc.get_samples()["w"])

    def negative_log_posterior(w: jax.Array) -> jax.Array:
        return w @ w / 2 + jnp.sum(jax.nn.softplus(X @ w) - y * (X @ w))

    mode = jnp.zeros(4)
    for _ in range(20):
        hessian = jax.hessian(negative_log_posterior)(mode)
        mode = mode - jnp.linalg.solve(hessian, jax.grad(negative_log_posterior)(mode))
    sd = np.sqrt(np.diag(np.linalg.inv(np.asarray(hessian, np.float64))))
    # at least 100 effective draws: five standard errors, and 20% of sd for the mean's own shift
    assert np.abs((draws.mean(axis=0) - np.asarray(mode)) / sd).max() < 0.5 + 0.2
    # widths: five standard errors are 35% of sd; the model is right, so C is close to H and the
    # draws are round where curvatures differ by 1.2
    assert np.abs(np.log(draws.std(axis=0) / sd)).max() < 0.35 + 0.1
    assert not np.any(mcmc.get_extra_fields()["diverging"])


# --- mistakes


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"temperature": 0}, ValueError, r"above 0, got 0.*temperature=0"),
        ({"temperature": -1}, ValueError, "temperature"),
        ({"batching": "epoch"}, ValueError, "batching='replacement', got 'epoch'"),
        ({"step_size": "adaptive"}, ValueError, "step_size must be 'auto'"),
        ({"step_size": -0.1}, ValueError, "step_size"),
        ({"num_steps": 0}, ValueError, "num_steps"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"metric": "rmsprop"}, TypeError, "metric"),
    ],
)
def test_bad_settings(settings: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        VSGD(normal_mean, **settings)


@pytest.mark.parametrize("batch_size", [None, 12])
def test_all_rows_are_refused(batch_size: int | None) -> None:
    kernel = VSGD(normal_mean, batch_size=batch_size)
    with pytest.raises(ValueError, match="noise of minibatch gradients.*pass batch_size"):
        kernel.init(random.key(0), 10, None, (Y,), {})


def test_exact_energies_are_refused() -> None:
    kernel = VSGD(potential_fn=lambda z: z @ z / 2)
    with pytest.raises(ValueError, match=r"potential_fn with a key"):
        kernel.init(random.key(0), 10, jnp.zeros(2), (), {})
