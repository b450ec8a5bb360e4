"""Noise correction: the stationary distribution with known minibatch noise, and its step size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from targets import SIGMAS, assert_moments, linear, linear_moments, regression_data, run

from numpyro_geom import SGRLD, Monge, RMSprop, step_size_summary
from numpyro_geom.algorithms.noise_correction import init_noise, noise_diagonal
from numpyro_geom.metrics import MetricState

DIM, CHAINS = 4, 60_000
CURVATURE = 2.0


def noisy(covariance: np.ndarray) -> Any:
    """k |z|^2 / 2 with gradient noise of this covariance when two evaluations are averaged."""
    root = jnp.asarray(np.linalg.cholesky(2 * covariance), jnp.float32)

    def energy(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        return CURVATURE * z @ z / 2 + z @ (root @ random.normal(rng_key, z.shape))

    return energy


def stationary(kernel: SGRLD, temperature: float = 1.0, metric_state: Any = None) -> np.ndarray:
    """Draws of many chains that start from the target, after three to six relaxation times."""
    start = np.sqrt(temperature / CURVATURE) * random.normal(random.key(1), (CHAINS, DIM))
    state = kernel.init(random.split(random.key(0), CHAINS), 0, start, (), {})
    if metric_state is not None:
        state = state._replace(
            i=state.i + 1,  # past warm-up, so that the metric keeps this state
            metric_state=jax.tree.map(
                lambda x: jnp.broadcast_to(x, (CHAINS, *x.shape)), metric_state
            ),
        )
    # the noise estimate starts anew in each chain; it has settled before the chains have
    return np.asarray(jax.jit(lambda s: kernel.sample(s, (), {}))(state).z, np.float64)


def discretised(h: float, temperature: float = 1.0) -> float:
    """Variance of theta' = (1 - h k) theta + N(0, 2 h tau): all that a full gradient has wrong."""
    return temperature / CURVATURE / (1 - h * CURVATURE / 2)


H = 0.005
EVEN = 120.0 * np.eye(DIM)
"""With H, h C / 2 tau = 0.3."""


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_variance_is_right_to_a_percent_where_it_was_off_by_thirty(temperature: float) -> None:
    settings = {"step_size": H, "num_steps": 300, "temperature": temperature}
    covariance = temperature * EVEN
    plain = SGRLD(potential_fn=averaged(noisy(covariance)), **settings)
    corrected = SGRLD(potential_fn=noisy(covariance), noise_correction=True, **settings)
    exact = discretised(H, temperature)  # .5% above the target's
    # 240,000 independent entries: the standard error of a variance is sqrt(2 / 240000) = .3%
    error = np.sqrt(2 / (CHAINS * DIM))
    ratio = np.mean(stationary(corrected, temperature) ** 2) / exact
    assert abs(ratio - 1) < min(0.01 + SIGMAS * error, 0.02), ratio
    ratio = np.mean(stationary(plain, temperature) ** 2) / exact
    assert abs(ratio - 1.3) < SIGMAS * 1.3 * error, ratio


def averaged(energy: Any) -> Any:
    """As much noise as the corrected chain's gradient has."""

    def twice(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        first, second = random.split(rng_key)
        return (energy(z, first) + energy(z, second)) / 2

    return twice


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_correlated_noise_stays() -> None:
    correlation = 0.3 * np.ones((DIM, DIM)) + 0.7 * np.eye(DIM)
    covariance = 100.0 * correlation
    kernel = SGRLD(
        potential_fn=noisy(covariance), noise_correction=True, step_size=H, num_steps=300
    )
    draws = stationary(kernel)
    left = covariance - np.diag(np.diag(covariance))
    exact = (2 * H * np.eye(DIM) + H**2 * left) / (1 - (1 - H * CURVATURE) ** 2)
    assert_moments(draws, np.zeros(DIM), exact)
    assert np.linalg.eigvalsh(exact)[-1] > 1.2 / CURVATURE  # what is left matters


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_law_in_a_metric() -> None:
    """A = diag(1, 2, 3, 4): rates differ, the target does not."""
    inverse = jnp.array([1.0, 2.0, 3.0, 4.0])
    metric = RMSprop(eps=1e-12)
    kernel = SGRLD(
        potential_fn=noisy(EVEN / 4),
        metric=metric,
        noise_correction=True,
        step_size=H,
        num_steps=600,
    )
    draws = stationary(kernel, metric_state=MetricState(1 / inverse**2))
    exact = 1 / CURVATURE / (1 - H * np.asarray(inverse) * CURVATURE / 2)
    error = np.sqrt(2 / CHAINS)
    ratio = np.mean(draws**2, axis=0) / exact
    assert np.abs(ratio - 1).max() < 0.01 + SIGMAS * error, ratio


def test_estimate_of_the_noise() -> None:
    covariance = np.diag([1.0, 4.0, 25.0, 100.0])
    kernel = SGRLD(
        potential_fn=noisy(covariance), noise_correction=True, step_size=1e-6, num_steps=2000
    )
    state = kernel.init(random.key(0), 0, jnp.zeros(DIM), (), {})
    state = kernel.sample(state, (), {})
    found = noise_diagonal(state.dynamics) / np.diag(covariance)
    # each an average over some 1000 squares: relative standard error sqrt(2 / 1000) = .045
    assert np.abs(found - 1).max() < SIGMAS * 0.045, found
    assert not noise_diagonal(init_noise(jnp.zeros(3))).any()


ROWS = regression_data(4000, 3)


@pytest.mark.slow
def test_automatic_step_counts_what_is_left() -> None:
    """Columns are independent: what noise is correlated is that of a sample."""
    chains = {"num_chains": 4, "chain_method": "vectorized"}
    plain_minibatches = {"batch_size": 50, "dense_mass": None, "control_variate": False}
    plain, corrected = (
        run(
            SGRLD(linear, noise_correction=correction, **plain_minibatches),
            *ROWS,
            num_warmup=50,
            num_samples=200,
            **chains,
        )
        for correction in (False, True)
    )
    gain = corrected.last_state.step_size / plain.last_state.step_size
    assert (gain > 3).all(), gain
    mean, covariance = linear_moments(*ROWS)
    sd = np.sqrt(np.diag(covariance))
    z = np.asarray(corrected.get_samples(group_by_chain=True)["w"], np.float64)
    ratio = ((z - mean) / sd).reshape(-1, 3).std(0)
    # 800 draws, half a relaxation time apart: about 200 in effect, 5% of a standard deviation
    assert (np.abs(ratio - 1) < 0.05 + 5 * 0.05).all(), ratio
    assert "more minibatch noise than could be taken" in step_size_summary(corrected)
    assert (corrected.last_state.dynamics.clamped < 0.05).all()
    assert "noise correction" not in step_size_summary(plain)


def test_clamped_share_is_reported() -> None:
    covariance = np.diag([1.0, 1.0, 1e4, 1e4])
    kernel = SGRLD(
        potential_fn=noisy(covariance), noise_correction=True, step_size=1e-3, num_steps=3000
    )
    state = kernel.init(random.key(0), 0, jnp.zeros(DIM), (), {})
    state = kernel.sample(state, (), {})
    # h C / 2 = 5 in two of four coordinates; a running mean with a memory of 500 steps
    assert float(state.dynamics.clamped) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "kind", "match"),
    [
        ({"noise_correction": 1}, TypeError, "noise_correction must be True or False"),
        ({"metric": Monge()}, ValueError, "needs a diagonal metric: .*got Monge"),
        ({"metric": "shampoo"}, ValueError, "needs a diagonal metric: .*got Shampoo"),
        ({"metric": "rmsprop", "gamma": "corrected"}, ValueError, "needs gamma 'frozen' or 'none'"),
        ({"batching": "epoch"}, ValueError, "needs batching='replacement'"),
        ({"max_norm": 10.0}, ValueError, "max_norm=10.0 cannot be combined"),
    ],
)
def test_bad_settings(settings: dict, kind: type, match: str) -> None:
    with pytest.raises(kind, match=match):
        SGRLD(linear, **{"noise_correction": True, "batch_size": 10, **settings})


@pytest.mark.parametrize(
    ("batch_size", "match"),
    [(None, "needs minibatch noise, and this gradient has none"), (5, "Expected an even batch")],
)
def test_bad_batches(batch_size: int | None, match: str) -> None:
    kernel = SGRLD(linear, noise_correction=True, batch_size=batch_size)
    with pytest.raises(ValueError, match=match):
        kernel.init(random.key(0), 1, None, ROWS, {})
