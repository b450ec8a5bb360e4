"""GGMC leaves exp(-U / tau) invariant exactly: at large steps, with minibatches, on models.

Chains are vectorised; Monte Carlo errors come from the spread of the chains' own means. The
thresholds are also shown to detect two faults that are easy to make: a momentum that is not negated
on rejection, and a cached energy that belongs to another position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import potential_energy, unconstrain_fn
from scipy.special import gamma as gamma_function
from targets import columns, linear, linear_moments, logistic, regression_data, run, vectorized
from tiers import short

from numpyro_geom import GGMC
from numpyro_geom.kernel import SGState
from numpyro_geom.sampling.algorithm import Algorithm
from numpyro_geom.sampling.settings import Settings

pytestmark = pytest.mark.usefixtures("optimised_file")
PyTree = Any
NUM_CHAINS = 4096
BURN_IN = 200
NUM_DRAWS = 1500
SIGMAS = 5.5
MOST_ERROR = 0.005
"""Largest Monte Carlo error, relative, that a gate may have: a worse one would prove little."""
FRICTIONS = (0.05, 0.25, 1.0)


def normal(z: jax.Array) -> jax.Array:
    return jnp.sum(z**2) / 2


def quartic(z: jax.Array) -> jax.Array:
    return jnp.sum(z**4) / 4


# E x^2 and E x^4; the second of the quartic is E x U'(x) = 1
MOMENTS: dict[Callable, tuple[float, float]] = {
    normal: (1.0, 3.0),
    quartic: (2 * gamma_function(0.75) / gamma_function(0.25), 1.0),
}


def noisy(energy: Callable, size: float) -> dict[str, Any]:
    """Arguments for an energy whose gradient has artificial noise of this standard deviation."""

    def estimate(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        return energy(z) + size * jnp.sum(z * random.normal(rng_key, z.shape))

    return {"potential_fn": estimate, "full_potential_fn": energy, "num_data": 1}


def means(kernel: GGMC, *, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    """Means over each chain's draws of x^2, x^4, p^2, x U', and acceptance: (chains, 5).

    A third of the chains has each of the frictions.
    """
    start = 0.5 * scale * random.normal(random.key(seed), (NUM_CHAINS, 1))
    state = kernel.init(random.split(random.key(seed + 1), NUM_CHAINS), 0, start, (), {})
    frictions = jnp.asarray(FRICTIONS)[jnp.arange(NUM_CHAINS) % 3]
    state = state._replace(dynamics=state.dynamics._replace(friction=frictions))

    @jax.jit
    def totals(state: SGState) -> jax.Array:
        def one(k: jax.Array, carry: tuple) -> tuple:
            state, sums = carry
            state = kernel.sample(state, (), {})
            x, p = state.z[:, 0], state.dynamics.momentum[:, 0]
            new = jnp.stack(
                [x**2, x**4, p**2, state.configurational_temperature, state.accept_prob], axis=1
            )
            return state, sums + jnp.where(k < BURN_IN, 0.0, new)

        zeros = jnp.zeros((NUM_CHAINS, 5))
        return lax.fori_loop(0, BURN_IN + NUM_DRAWS, one, (state, zeros))[1] / NUM_DRAWS

    return np.asarray(totals(state), np.float64)


def deviations(values: np.ndarray, exact: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the means against exact values, and the relative Monte Carlo errors."""
    error = values.std(0, ddof=1) / len(values) ** 0.5
    return (values.mean(0) - exact) / error, error / exact


def assert_exact(values: np.ndarray, target: Callable, temperature: float = 1.0) -> None:
    for k, friction in enumerate(FRICTIONS):
        group = values[k::3]
        exact = (*MOMENTS[target], temperature, temperature)
        scores, errors = deviations(group[:, :4], exact)
        assert np.all(np.abs(scores) < SIGMAS), (friction, scores, group.mean(0))
        assert errors[0] < MOST_ERROR, errors
        assert 0.3 < group[:, 4].mean() < 0.999


# steps at the edge of usefulness, where an uncorrected step has a very different distribution
GATES = [(normal, 1.6), (normal, 0.8), (quartic, 0.6), (quartic, 0.3)]


@pytest.mark.parametrize(("target", "step_size"), short(GATES, kept=[(quartic, 0.6)]))
def test_full_gradients(target: Callable, step_size: float) -> None:
    kernel = GGMC(potential_fn=target, step_size=step_size, num_steps=1, friction=1.0)
    assert_exact(means(kernel), target)


@pytest.mark.parametrize(("target", "step_size"), short(GATES, kept=[(normal, 1.6)]))
def test_minibatch_noise(target: Callable, step_size: float) -> None:
    kernel = GGMC(**noisy(target, 1.0), step_size=step_size, num_steps=1, friction=1.0)
    assert_exact(means(kernel), target)


@pytest.mark.slow
def test_longer_trajectories_at_a_temperature() -> None:
    settings = {"step_size": 0.4, "num_steps": 4, "friction": 1.0, "temperature": 0.5}
    values = means(GGMC(**noisy(normal, 1.0), **settings))
    # variance tau, fourth moment 3 tau^2
    for k in range(3):
        scores, _ = deviations(values[k::3, :4], (0.5, 0.75, 0.5, 0.5))
        assert np.all(np.abs(scores) < SIGMAS), scores


class Faulty(GGMC):
    """A kernel whose draws go wrong in one way."""

    def algorithm(self, settings: Settings) -> Algorithm:
        algorithm = super().algorithm(settings)

        def draw(rng_key: jax.Array, target: Any, state: SGState, *due: Any) -> SGState:
            return self.spoil(state, algorithm.draw(rng_key, target, state, *due))

        return algorithm._replace(draw=draw)


class Unflipped(Faulty):
    """The fault of not negating the momentum on rejection."""

    def spoil(self, state: SGState, new: SGState) -> SGState:
        rejected = jnp.all(new.z == state.z)
        momentum = jnp.where(rejected, -1.0, 1.0) * new.dynamics.momentum
        return new._replace(dynamics=new.dynamics._replace(momentum=momentum))


class Stale(Faulty):
    """The fault of using the energy of the previous draw in the test."""

    def spoil(self, state: SGState, new: SGState) -> SGState:
        old = jnp.where(
            state.dynamics.extra.known, state.dynamics.extra.energy, new.potential_energy
        )
        extra = new.dynamics.extra._replace(energy=old)
        return new._replace(dynamics=new.dynamics._replace(extra=extra))


FAULTS = [(*gate, fault) for gate in GATES[::2] for fault in (Unflipped, Stale)]


@pytest.mark.parametrize(
    ("target", "step_size", "fault"),
    short(FAULTS, kept=[(normal, 1.6, Unflipped), (quartic, 0.6, Stale)]),
)
def test_the_gates_see_known_faults(target: Callable, step_size: float, fault: type) -> None:
    kernel = fault(potential_fn=target, step_size=step_size, num_steps=1, friction=1.0)
    with pytest.raises(AssertionError):
        assert_exact(means(kernel), target)


@pytest.mark.slow
def test_energies_of_many_rows_keep_their_last_digits() -> None:
    """In 32 bits. Without a level the energies' error of 0.1 nats would reject one draw in 20."""
    X, y = regression_data(1_000_000, 3)
    settings = {"batch_size": 64, "step_size": 1e-4, "num_steps": 4, "dense_mass": None}
    kernel = GGMC(linear, control_variate=2, **settings)
    mcmc = run(kernel, X, y, num_warmup=20, num_samples=200, extra_fields=("accept_prob",))
    draws = np.asarray(mcmc.get_samples()["w"], np.float64)
    moved = np.abs(np.diff(draws, axis=0)).mean(0)
    assert np.all(moved > 0.05 * np.sqrt(np.diag(linear_moments(X, y)[1])))
    assert mcmc.get_extra_fields()["accept_prob"].mean() > 0.98


@pytest.mark.parametrize("temperature", short([1.0, 0.3], kept=[0.3]))
def test_the_energy_follows_new_rows_and_the_anchor(temperature: float) -> None:
    settings = {"step_size": 1e-3, "num_steps": 3, "dense_mass": None, "batch_size": 50}
    kernel = GGMC(linear, temperature=temperature, control_variate=True, **settings)
    X, y = regression_data(20_000, 3)
    start = {"w": jnp.asarray(linear_moments(X, y)[0], float)}
    state = kernel.init(random.key(0), 0, start, (X, y), {})
    draw = jax.jit(lambda state, args: kernel.sample(state, args, {}))
    for args in ((X, y), (X, y + 1)):
        state = draw(draw(kernel.refresh(state, args, {}), args), args)
        exact = float(jax.jit(lambda z, args: potential_energy(linear, args, {}, z))(state.z, args))
        extra = state.dynamics.extra
        assert extra.level == state.control.anchor.energy
        assert abs(float(extra.energy)) < 0.01 * exact
        assert float(extra.energy + extra.level) == pytest.approx(exact, rel=1e-5)
        assert float(state.potential_energy) == pytest.approx(exact, rel=1e-5)
    anchor = state.control.anchor
    lower = state.control._replace(anchor=anchor._replace(energy=anchor.energy - 1000))
    state = draw(state._replace(control=lower), args)
    assert state.accept_prob > 0.3  # an energy above the earlier level would reject


# --- models: chains that start from a reference's draws keep its distribution


def hierarchical(X: jax.Array, y: jax.Array) -> None:
    """Non-centred: 8 groups, rows of group i mod 8."""
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    between = numpyro.sample("between", dist.HalfNormal(1))
    within = numpyro.sample("within", dist.HalfNormal(2))
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    with numpyro.plate("groups", 8):
        z = numpyro.sample("z", dist.Normal(0, 1))
    with numpyro.plate("data", X.shape[0]) as i:
        centre = mean + between * z[i % 8] + slope * X[i, 0]
        numpyro.sample("y", dist.Normal(centre, within), obs=y[i])


def rows(model: Callable) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(5)
    X = rng.normal(size=(500, 3))
    if model is logistic:
        X = np.concatenate([X, np.ones((500, 1))], axis=1)
        y = rng.uniform(size=500) < 1 / (1 + np.exp(-(X @ [1.0, -0.5, 0.3, 0.3])))
    else:
        y = 1 + 0.7 * rng.normal(size=8)[np.arange(500) % 8] + 0.5 * X[:, 0] + rng.normal(size=500)
    return jnp.asarray(X), jnp.asarray(y, float)


@pytest.fixture(
    scope="module",
    params=[(logistic, 0.012), pytest.param((hierarchical, 0.004), marks=pytest.mark.slow)],
)
def reference(request: pytest.FixtureRequest) -> tuple[Callable, float, PyTree]:
    """A model, a step size, and unconstrained draws of NUTS."""
    model, step_size = request.param
    mcmc = vectorized(NUTS(model, target_accept_prob=0.9), 500, 4000, 2)
    mcmc.run(random.key(0), *rows(model))
    samples = jax.tree.map(lambda x: x[::2], mcmc.get_samples())
    return model, step_size, jax.vmap(partial(unconstrain_fn, model, rows(model), {}))(samples)


@pytest.mark.slow
@pytest.mark.parametrize("control_variate", short([False, True], kept=[False]))
def test_posteriors_with_minibatches_of_a_tenth(
    reference: tuple[Callable, float, PyTree], control_variate: bool
) -> None:
    model, step_size, start = reference
    args = rows(model)
    # plain minibatches have the larger error
    step_size *= 2 if control_variate else 1
    kernel = GGMC(
        model,
        batch_size=50,
        num_steps=10,
        friction=1.0,
        step_size=step_size,
        control_variate=control_variate,
    )
    num_chains = len(start[next(iter(start))])
    # the first draw places an anchor: where another chain starts, so that it is independent
    others = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), start)
    state = kernel.init(random.split(random.key(1), num_chains), 1, others, args, {})
    draw = jax.jit(
        lambda state, n: lax.fori_loop(0, n, lambda _, s: kernel.sample(s, args, {}), state)
    )
    state = kernel.refresh(draw(state, 1)._replace(z=start), args, {})
    state = draw(state, 40)
    before, after = columns(start, tuple(start)), columns(state.z, tuple(start))
    # chains have moved by a good part of a standard deviation in every direction
    moved = np.sqrt(np.mean((after - before) ** 2, axis=0)) / before.std(0)
    assert np.all(moved > 0.2), moved
    assert 0.3 < np.mean(state.accept_prob) < 0.95
    mean = before.mean(0)
    # 4,000 independent chains, each paired with its start: errors of .008 to .022 sd
    for shift in (after - before, (after - mean) ** 2 - (before - mean) ** 2):
        scores = shift.mean(0) / (shift.std(0) / num_chains**0.5)
        assert np.abs(scores).max() < SIGMAS, scores
    energy = partial(potential_energy, model, args, {})
    grads = jax.vmap(jax.grad(energy))(state.z)
    for tree, other in ((state.dynamics.momentum,) * 2, (state.z, grads)):
        products = jax.tree.map(lambda a, b: np.asarray(a * b, np.float64), tree, other)
        sites = {name: x.reshape(num_chains, -1).mean(1) for name, x in products.items()}
        every = np.concatenate([x.reshape(num_chains, -1) for x in products.values()], 1).mean(1)
        for name, values in {**sites, "all": every}.items():
            score = (values.mean() - 1) / (values.std() / num_chains**0.5)
            assert abs(score) < SIGMAS, (name, values.mean(), score)


def test_no_proposal_takes_a_place_of_infinite_density() -> None:
    def energy(z: jax.Array) -> jax.Array:
        return jnp.where(z > 1, -jnp.inf, z**2 / 2)

    kernel = GGMC(potential_fn=energy, step_size=0.5, num_steps=3)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=100, progress_bar=False)
    mcmc.run(random.key(0), init_params=jnp.array(0.5))
    assert -4 < mcmc.get_samples().min() < mcmc.get_samples().max() <= 1
