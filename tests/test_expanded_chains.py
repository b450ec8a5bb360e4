"""Chains on factors: users see only the merged matrix, and its distribution is the model's.

Chains that start from the distribution that they should leave invariant keep it from the first
draw, see `chains`. The distribution of the factors is checked together with that of the matrix. A
determinant that is missing from the energy does not change the distribution of the matrix, but
drives the factors into a singular one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import chains
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro.infer import MCMC, NUTS
from targets import SIGMAS, run
from tiers import short

from numpyro_geom import (
    GGMC,
    PXSGHMC,
    SGHMC,
    SGNHT,
    SGRLD,
    Expansion,
    Factors,
    SGKernel,
    SGState,
    to_inference_data,
)
from numpyro_geom.model.arguments import on_device
from numpyro_geom.model.control_variate import anchor_at

ROWS, INPUTS, OUTPUTS = 12, 3, 2
_rng = np.random.default_rng(0)
X = jnp.asarray(_rng.normal(size=(ROWS, INPUTS)), jnp.float32)
W = jnp.asarray(_rng.normal(size=(INPUTS, OUTPUTS)), jnp.float32)
Y = X @ W + jnp.asarray(_rng.normal(size=(ROWS, OUTPUTS)), jnp.float32)
FIXED: dict[str, Any] = {"step_size": 0.05, "num_steps": 3, "friction": 5.0}


def layer(X: Any, y: Any) -> None:
    """A matrix of coefficients with known noise: Gaussian, its columns independent."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([INPUTS, OUTPUTS]).to_event(2))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1).to_event(1), obs=y[i])


def layer_moments() -> tuple[np.ndarray, np.ndarray]:
    """Mean (3, 2), and the covariance (3, 3) of each column, of ``w`` in :func:`layer`."""
    x, y = np.asarray(X, np.float64), np.asarray(Y, np.float64)
    covariance = np.linalg.inv(np.eye(INPUTS) + x.T @ x)
    return covariance @ x.T @ y, covariance


# --- what users see

TWO = Expansion(left=2, rank=1)
START = {"w": jnp.stack([W, -W])}
PARTS = ("expanded", "factor", "sites")


@pytest.fixture(scope="module")
def finished() -> MCMC:
    """Two chains of six draws of an expanded kernel, from given matrices."""
    kernel = PXSGHMC(layer, expansion=TWO, **FIXED)
    return run(
        kernel,
        X,
        Y,
        num_samples=6,
        num_chains=2,
        chain_method="vectorized",
        init_params=START,
        extra_fields=("expanded",),
    )


def test_draws_are_of_the_merged_matrix(finished: MCMC) -> None:
    draws = finished.get_samples(group_by_chain=True)
    assert {name: x.shape for name, x in draws.items()} == {"w": (2, 6, INPUTS, OUTPUTS)}
    assert finished.get_samples()["w"].shape == (12, INPUTS, OUTPUTS)
    expanded = finished.get_extra_fields(group_by_chain=True)["expanded"]
    assert expanded["sites"].keys() == {"w"}
    assert expanded["factors"]["w"]["left"][1].first.shape == (2, 6, 1, INPUTS)
    # the factors have moved, and every draw is their product, to the last bit
    assert np.ptp(expanded["factors"]["w"]["right"][0].diagonal) > 0.01
    merged = jax.jit(jax.vmap(jax.vmap(TWO.merge)))(expanded)["w"]
    np.testing.assert_array_equal(merged, draws["w"])
    np.testing.assert_array_equal(finished.last_state.z["w"], draws["w"][:, -1])


def test_starts_at_merged_values() -> None:
    kernel = PXSGHMC(layer, expansion=TWO, **FIXED)
    state = kernel.init(random.split(random.key(0)), 0, START, (X, Y), {})
    np.testing.assert_array_equal(state.z["w"], START["w"])
    np.testing.assert_array_equal(jax.vmap(TWO.merge)(state.expanded)["w"], START["w"])
    assert state.dynamics.momentum["factors"]["w"]["left"][0].diagonal.shape == (2, INPUTS)


def test_goes_on_and_exports_without_factors(finished: MCMC) -> None:
    before = finished.last_state
    finished.post_warmup_state = before
    finished.run(before.rng_key, X, Y, extra_fields=("expanded",))
    draws = finished.get_samples(group_by_chain=True)["w"]
    assert int(finished.last_state.i[0]) == 12
    _, by_hand = chains.run(finished.sampler, before, 6, args=(X, Y))
    # two programs may round differently: 0 measured; a change of the last bit of the start (by
    # hand, five times) is one of 5e-7 at most in six draws
    np.testing.assert_allclose(draws, np.swapaxes(by_hand.z["w"], 0, 1), atol=1e-5)
    assert "expanded" not in finished.sampler.default_fields
    data = to_inference_data(finished)
    assert set(data.posterior.data_vars) == {"w"}
    assert data.posterior["w"].shape == (2, 6, INPUTS, OUTPUTS)
    names = [str(name) for name in data.sample_stats.data_vars]
    assert "kinetic_temperature" in names
    assert not [name for name in names if any(part in name for part in PARTS)]


# --- the distribution of the product


NUM_CHAINS, NUM_DRAWS, TEMPERATURE = 1000, 25, 0.5


def whitened(
    expansion: Expansion, temperature: float, w: jax.Array, factors: dict
) -> tuple[jax.Array, jax.Array]:
    """W and the entries of P and Q, each standard normal and independent in the law to hold."""
    mean, covariance = layer_moments()
    root = np.linalg.inv(np.linalg.cholesky(covariance * temperature))
    entries = [
        ((x - jnp.eye(len(x))) * math.sqrt(len(x)) / expansion.factor_scale).ravel()
        for x in jax.tree.leaves(factors)
    ]
    return (root @ (w - mean)).ravel(), jnp.concatenate(entries)


def at_law(kernel: SGKernel, expansion: Expansion, positions: Any, args: tuple) -> SGState:
    """Chains at these positions; factors come from their distribution, independently."""
    state = chains.start(kernel, positions, seed=2, args=args)
    rng = np.random.default_rng(1)

    def scatter(x: jax.Array) -> jax.Array:
        scale = expansion.factor_scale / math.sqrt(x.shape[-1])
        return x + jnp.asarray(scale * rng.normal(size=x.shape), x.dtype)

    factors = jax.tree.map(scatter, state.expanded["factors"])
    expanded = jax.jit(jax.vmap(expansion.contract))(positions, {"factors": factors})
    return state._replace(expanded=expanded, trusted=expanded)


def held_law() -> dict[str, np.ndarray]:
    """Scores of moments of W, of the factors and of V; acceptance; how far chains have moved.

    W and (P, Q) start from their exact distributions, independently of each other.
    """
    expansion = Expansion()
    kernel = GGMC(
        layer,
        expansion=expansion,
        batch_size=10,
        temperature=TEMPERATURE,
        step_size=0.04,
        num_steps=6,
        friction=1.0,
    )
    mean, covariance = layer_moments()
    normal = np.random.default_rng(0).normal(size=(NUM_CHAINS, INPUTS, OUTPUTS))
    root = np.linalg.cholesky(covariance * TEMPERATURE)
    positions = {"w": jnp.asarray(mean + root @ normal, jnp.float32)}
    state = at_law(kernel, expansion, positions, (X, Y))

    def functions(state: SGState) -> dict[str, jax.Array]:
        sites, factors = state.expanded["sites"], state.expanded["factors"]
        w, f = whitened(expansion, TEMPERATURE, state.z["w"], factors)
        v, _ = whitened(expansion, TEMPERATURE, sites["w"], factors)
        upper = jnp.triu_indices(w.size)
        return {
            "w": jnp.concatenate([w, jnp.outer(w, w)[upper]]),
            "v": jnp.concatenate([v, jnp.outer(v, v)[upper]]),
            "factors": jnp.concatenate([f, f**2]),
            "both": jnp.outer(w, f).ravel(),
            "accept": state.accept_prob[None],
        }

    @jax.jit
    def draw(state: SGState) -> tuple[SGState, dict]:
        def one(state: SGState, _: Any) -> tuple:
            state = kernel.sample(state, (X, Y), {})
            return state, jax.vmap(functions)(state)

        return lax.scan(one, state, None, length=NUM_DRAWS)

    values = jax.tree.map(np.asarray, draw(state)[1])
    size = INPUTS * OUTPUTS
    exact = np.concatenate([np.zeros(size), np.eye(size)[np.triu_indices(size)]])
    of_factors = np.repeat([0.0, 1.0], INPUTS**2 + OUTPUTS**2)
    first, last = values["w"][0, :, :size], values["w"][-1, :, :size]
    return {
        "w": chains.scores(values["w"], exact),
        "v": chains.scores(values["v"], exact),
        "factors": chains.scores(values["factors"], of_factors),
        "both": chains.scores(values["both"], np.zeros(values["both"].shape[-1])),
        "accept": values["accept"].mean(),
        "memory": np.mean(first * last),
    }


def test_exact_chains_hold_the_law_of_matrix_and_factors() -> None:
    # scores of independent chains' means: one of these 131 exceeds 5.5 with probability 5e-6
    law = held_law()
    assert 0.3 < law["accept"] < 0.99
    assert law["memory"] < 0.3  # of 1: chains that stood still would hold any law
    for name in ("w", "factors", "both"):
        assert np.abs(law[name]).max() < SIGMAS, (name, law[name])
    # V cannot replace W, because its distribution is different
    assert np.abs(law["v"]).max() > 2 * SIGMAS


@pytest.mark.slow
def test_without_the_determinant_the_factors_lose_their_law(monkeypatch: Any) -> None:
    # exp(-U(P V Q) / tau) q(P, Q) is as a law of (W, P, Q) exp(-U / tau) q / (|P|^2 |Q|^3): the
    # factors come close to singular ones, and until they have, W leaves its law too
    correction = Expansion.correction

    def without(self: Expansion, expanded: dict, temperature: Any) -> jax.Array:
        (p,), (q,) = (expanded["factors"]["w"][side] for side in ("left", "right"))
        log_det = OUTPUTS * jnp.linalg.slogdet(p)[1] + INPUTS * jnp.linalg.slogdet(q)[1]
        return correction(self, expanded, temperature) + temperature * log_det

    monkeypatch.setattr(Expansion, "correction", without)
    law = held_law()
    assert np.abs(law["factors"]).max() > 2 * SIGMAS


# --- a network


HIDDEN = 3
INPUT = jnp.linspace(-2.0, 2.0, 60)[:, None]
RESPONSE = jnp.sin(1.5 * INPUT[:, 0]) + 0.5 * random.normal(random.key(3), (60,))
PLACES = jnp.array([-2.5, -1.0, 0.0, 2.0])[:, None]


def predict(sites: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return (jnp.tanh(x @ sites["in"] + sites["b"]) @ sites["out"])[..., 0]


def network(x: Any, y: Any) -> None:
    shapes = {"in": (1, HIDDEN), "b": (HIDDEN,), "out": (HIDDEN, 1)}
    sites = {
        name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))
        for name, shape in shapes.items()
    }
    with numpyro.plate("data", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal(predict(sites, x[i]), 0.5), obs=y[i])


def predictive(draws: dict[str, jax.Array]) -> np.ndarray:
    """Predictions and their squares at all places, for sites of shape (chains, draws, ...)."""
    values = np.asarray(jax.vmap(jax.vmap(partial(predict, x=PLACES)))(draws), np.float64)
    return np.concatenate([values, values**2], axis=2)


LAYERS = Expansion(sites={"in": Factors(left=0, vectors="b"), "out": Factors(right=0)})


@pytest.mark.slow
def test_predictions_of_a_network_agree_with_nuts() -> None:
    # 200 chains start from draws of NUTS (20 chains, 20 draws apart) and forget them. Errors of
    # the mean and the second moment of the prediction at four inputs are from the spread of the
    # chains' own means, for both, as if the two were independent: one of 8 scores exceeds 5 with
    # probability 5e-6. The bias of the small steps is about h^2 lam / 4 of a variance, below 0.02
    # for curvatures lam below 1000 (the network's own are about 200): less than the errors.
    mcmc = run(
        NUTS(network, max_tree_depth=5),
        INPUT,
        RESPONSE,
        num_warmup=150,
        num_samples=200,
        num_chains=20,
        chain_method="vectorized",
    )
    reference = mcmc.get_samples(group_by_chain=True)
    kernel = PXSGHMC(network, expansion=LAYERS, step_size=0.01, num_steps=30, friction=1.0)
    shapes = {"in": (1, HIDDEN), "b": (HIDDEN,), "out": (HIDDEN, 1)}
    start = {n: reference[n][:, ::20].reshape(-1, *shape) for n, shape in shapes.items()}
    state = at_law(kernel, LAYERS, start, (INPUT, RESPONSE))

    @jax.jit
    def draw(state: SGState) -> tuple:
        def one(state: SGState, _: Any) -> tuple:
            state = kernel.sample(state, (INPUT, RESPONSE), {})
            return state, (state.z, state.diverging)

        return lax.scan(one, state, None, length=25)[1]

    z, diverging = draw(state)
    assert np.mean(diverging) < 0.02
    values = predictive(jax.tree.map(lambda x: x.swapaxes(0, 1), z)), predictive(reference)
    ours, theirs = (x.mean(axis=1) for x in values)
    errors = [x.std(axis=0, ddof=1) / math.sqrt(len(x)) for x in (ours, theirs)]
    error = np.hypot(*errors)
    assert np.abs((ours.mean(0) - theirs.mean(0)) / error).max() < 5
    # and this says something: means are known to a tenth of the standard deviations
    mean, square = np.split(theirs.mean(0), 2)
    assert np.all(error[: len(PLACES)] < 0.1 * np.sqrt(square - mean**2))
    first, last = values[0][:, 0, 0], values[0][:, -1, 0]
    assert np.corrcoef(first, last)[0, 1] < 0.3


# --- other kernels and options


@pytest.mark.slow
def test_langevin_steps_in_a_metric_of_the_factors() -> None:
    kernel = SGRLD(
        layer, metric="rmsprop", expansion=TWO, step_size=2e-5, num_steps=20, batch_size=4
    )
    start = {"w": jnp.stack([W, W / 2])}
    state = chains.start(kernel, start, seed=0, num_warmup=4, args=(X, Y))
    state, draws = chains.run(kernel, state, 5, args=(X, Y))
    assert not draws.diverging.any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.z, state.metric_state)))
    merged = jax.jit(jax.vmap(jax.vmap(TWO.merge)))(draws.expanded)["w"]
    np.testing.assert_array_equal(merged, draws.z["w"])
    # the metric is one of the factors, and every entry of them has moved
    shapes = {x.shape for x in jax.tree.leaves(state.metric_state)}
    assert {x.shape for x in jax.tree.leaves(state.expanded)} <= shapes
    for before, after in zip(
        jax.tree.leaves(draws.expanded), jax.tree.leaves(state.expanded), strict=True
    ):
        assert np.all(before[0] != after)


@pytest.mark.slow
def test_anchor_of_a_control_variate_is_a_merged_position() -> None:
    kernel = SGRLD(
        layer, expansion=TWO, step_size=1e-3, num_steps=5, batch_size=4, control_variate=True
    )
    state = kernel.init(random.key(0), 40, None, (X, Y), {})
    sample = jax.jit(lambda s: kernel.sample(s, (X, Y), {}))
    for _ in range(41):
        state = sample(state)
    anchor = state.control.anchor
    position, grad = (x.reshape(state.z["w"].shape) for x in (anchor.position, anchor.grad))
    potential = kernel.bound.on(*on_device((X, Y), {})).potential()
    exact = anchor_at(potential, {"w": position}).grad.reshape(grad.shape)
    # 0 measured; sums of 12 rows near the mode are up to 2e-6 from those of 64 bits (measured)
    np.testing.assert_allclose(grad, exact, rtol=1e-4, atol=1e-5)
    # it has been found, near the middle of the law
    mean, covariance = layer_moments()
    off = (position - mean) / np.sqrt(np.diag(covariance))[:, None]
    assert np.abs(off).max() < 3
    np.testing.assert_array_equal(jax.jit(TWO.merge)(state.expanded)["w"], state.z["w"])
    assert np.isfinite(state.z["w"]).all()


GAMMA, LENGTH, SLOW = 30.0, 0.01, 0.2
DECAYING: dict[str, tuple[Callable[..., SGKernel], Callable, float]] = {
    "baoab": (partial(SGHMC, temperature=0.0), lambda a: np.exp(-a), 1e-5),
    # those that need a temperature have a low one: its noise is below sqrt(tau), of which the
    # tolerance is 8, and a rate that is not the factors' own would be off by 0.2
    "thermostat": (
        partial(SGNHT, temperature=1e-14, thermostat_mass=1.0),
        lambda a: np.exp(-a),
        1e-5,
    ),
    "adjusted": (partial(GGMC, temperature=1e-4), lambda a: np.exp(-a), 0.08),
}


@pytest.mark.parametrize("name", short(DECAYING, kept=["thermostat", "adjusted"]))
def test_momenta_of_factors_decay_at_their_own_rate(name: str) -> None:
    # a flat energy and no noise: what is left of a momentum after one step is what friction leaves
    make, left, tolerance = DECAYING[name]
    kernel = make(
        potential_fn=lambda z: 0.0 * jnp.sum(z["w"]),
        expansion=Expansion(factor_friction=SLOW),
        friction=GAMMA,
        step_size=LENGTH,
        num_steps=1,
    )
    state = kernel.init(random.key(0), 0, {"w": W}, (), {})
    ones = jax.tree.map(jnp.ones_like, state.dynamics.momentum)
    state = state._replace(dynamics=state.dynamics._replace(momentum=ones))
    momentum = jax.jit(lambda s: kernel.sample(s, (), {}))(state).dynamics.momentum
    for part, scale in (("sites", 1.0), ("factors", SLOW)):
        for leaf in jax.tree.leaves(momentum[part]):
            np.testing.assert_allclose(leaf, left(scale * GAMMA * LENGTH), atol=tolerance)
