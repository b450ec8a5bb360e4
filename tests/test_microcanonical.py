"""Microcanonical: the flow of its direction, and its invariant law with and without the test."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from scipy.special import gamma as gamma_function
from targets import linear, linear_moments, regression_data, vectorized

from numpyro_geom import Microcanonical
from numpyro_geom.algorithms.microcanonical import CONSTANT_LENGTH

CHAINS, BURN_IN, DRAWS = 1024, 60, 240
SIGMAS = 5.0


def momentum(key: int, size: int, tau: float) -> jax.Array:
    return CONSTANT_LENGTH.draw(random.key(key), jnp.zeros(size), tau)


@pytest.mark.parametrize("tau", [1.0, 0.3])
@pytest.mark.parametrize("strength", [0.1, 3.0])
def test_work_is_the_jacobian_of_the_flow(tau, strength):
    """The direction's law stays uniform only if the work is minus tau times its logarithm."""
    with jax.enable_x64(True):
        p = momentum(0, 5, tau)
        force = strength * random.normal(random.key(1), (5,))

        def turned(p: jax.Array) -> jax.Array:  # of any length, so that its Jacobian is full
            length = jnp.linalg.norm(p)
            kept = CONSTANT_LENGTH.kick(p / length, force, 0.4, tau)[0]
            return kept / jnp.linalg.norm(kept) * length

        _, work = CONSTANT_LENGTH.kick(p, force, 0.4, tau)
        _, log_det = jnp.linalg.slogdet(jax.jacfwd(turned)(p))
        np.testing.assert_allclose(work, -tau * log_det, rtol=1e-8)


def test_two_kicks_are_one_and_a_kick_back_undoes_it():
    with jax.enable_x64(True):
        p, force = momentum(2, 7, 1.0), random.normal(random.key(3), (7,))
        half, first = CONSTANT_LENGTH.kick(p, force, 0.3, 1.0)
        both, second = CONSTANT_LENGTH.kick(half, force, 0.5, 1.0)
        once, work = CONSTANT_LENGTH.kick(p, force, 0.8, 1.0)
        np.testing.assert_allclose(both, once, rtol=1e-10)
        np.testing.assert_allclose(first + second, work, rtol=1e-10)
        back, undone = CONSTANT_LENGTH.kick(-once, force, 0.8, 1.0)
        np.testing.assert_allclose(back, -p, rtol=1e-8)
        np.testing.assert_allclose(undone, -work, rtol=1e-8)


@pytest.mark.parametrize("force", [0.0, 1e15])
def test_a_kick_by_no_force_and_by_a_huge_force_is_finite(force):
    p, work = CONSTANT_LENGTH.kick(momentum(4, 3, 1.0), jnp.full(3, force), 0.1, 1.0)
    assert np.isfinite(p).all()
    np.testing.assert_allclose(jnp.vdot(p, p), 3, rtol=1e-5)
    assert np.isfinite(work) or force > 1
    again = CONSTANT_LENGTH.refresh(p, jnp.arange(3.0), 0.5, 1.0)
    np.testing.assert_allclose(jnp.vdot(again, again), 3, rtol=1e-5)


def normal(z: jax.Array) -> jax.Array:
    return jnp.sum((z / jnp.array([0.5, 1.0, 2.0])) ** 2) / 2


def quartic(z: jax.Array) -> jax.Array:
    return jnp.sum(z**4) / 4


def banana(z: jax.Array) -> jax.Array:
    return z[0] ** 2 / 2 + (z[1] - (z[0] ** 2 - 1) / 2) ** 2


def mean_squares(potential: Any, size: int, start: Any = None, **settings: Any) -> tuple:
    """Means of squares of each coordinate, and their errors from the chains' own means."""
    kernel = Microcanonical(**potential, batch_size=None, **settings)
    mcmc = vectorized(kernel, BURN_IN, DRAWS, CHAINS)
    init = random.normal(random.key(5), (CHAINS, size)) if start is None else start
    mcmc.run(random.key(6), init_params=init, extra_fields=("accept_prob",))
    squares = np.square(np.asarray(mcmc.get_samples(group_by_chain=True), float)).mean(1)
    accepted = float(mcmc.get_extra_fields()["accept_prob"].mean())
    return squares.mean(0), squares.std(0) / CHAINS**0.5, accepted


LAWS = {
    "normal": (normal, 3, np.array([0.25, 1.0, 4.0]), 0.5),
    "quartic": (quartic, 2, np.full(2, 2 * gamma_function(0.75) / gamma_function(0.25)), 0.5),
    "banana": (banana, 2, np.array([1.0, 1.0]), 0.4),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_adjusted_law_is_exact_at_a_large_step(name):
    energy, size, expected, h = LAWS[name]
    found, error, accepted = mean_squares(
        {"potential_fn": energy}, size, adjusted=True, step_size=h, num_steps=4, friction=0.7
    )
    assert accepted < 0.97
    assert (error < 0.02 * expected).all()
    np.testing.assert_array_less(np.abs(found - expected), SIGMAS * error)


def test_the_adjusted_law_is_exact_with_minibatches_of_a_tenth():
    X, y = regression_data(200, 3)
    mean, covariance = linear_moments(X, y)
    kernel = Microcanonical(
        linear, adjusted=True, batch_size=20, step_size=0.006, num_steps=5, friction=20.0
    )
    root, chains = np.linalg.cholesky(covariance), 8 * CHAINS
    start = mean + np.random.default_rng(0).normal(size=(chains, 3)) @ root.T
    state = kernel.init(
        random.split(random.key(1), chains), 0, {"w": jnp.asarray(start, jnp.float32)}, (X, y), {}
    )
    draw = jax.jit(
        lambda state: lax.fori_loop(0, 40, lambda _, s: kernel.sample(s, (X, y), {}), state)
    )
    state = draw(state)
    assert 0.2 < np.mean(state.accept_prob) < 0.9
    end = np.asarray(state.z["w"], float)
    moved = np.sqrt(np.mean((end - start) ** 2, 0)) / start.std(0)
    assert np.all(moved > 0.3), moved
    for shift in (end - start, (end - mean) ** 2 - (start - mean) ** 2):
        scores = shift.mean(0) / (shift.std(0) / chains**0.5)
        assert np.abs(scores).max() < SIGMAS, scores


def test_the_law_at_a_temperature_and_a_small_step():
    """Without the test the error of the variances is of second order in the step."""
    expected = np.array([0.25, 1.0, 4.0]) * 0.5
    found, error, _ = mean_squares(
        {"potential_fn": normal}, 3, temperature=0.5, step_size=0.1, num_steps=20, friction=0.7
    )
    assert (error < 0.02 * expected).all()
    np.testing.assert_array_less(np.abs(found - expected), SIGMAS * error + 0.01 * expected)


def test_errors():
    with pytest.raises(ValueError, match="temperature must be above 0 with Microcanonical"):
        Microcanonical(potential_fn=normal, temperature=0.0)
    kernel = Microcanonical(potential_fn=lambda z: z**2 / 2)
    with pytest.raises(ValueError, match="the model has one parameter"):
        kernel.init(random.key(0), 10, jnp.zeros(()), (), {})
