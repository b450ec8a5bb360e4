"""Networks by default: which models they are, their starts, their steps, their diagnosis."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen as nn
from jax import lax, random
from numpyro import handlers
from numpyro.contrib.module import flax_module, random_flax_module
from numpyro.infer import MCMC
from targets import vectorized

from numpyro_geom import (
    SGHMC,
    SGRLD,
    Expanded,
    Microcanonical,
    diagnose,
    to_inference_data,
    train,
)
from numpyro_geom.bound import bind
from numpyro_geom.metrics import Identity
from numpyro_geom.model.model import read
from numpyro_geom.model.potential import function_potential
from numpyro_geom.sampling.algorithm import MAX_NUM_STEPS
from numpyro_geom.sampling.state import Chain, init_adaptation
from numpyro_geom.warmup.adapt import measure_by_energy

X = random.normal(random.key(0), (300, 3))
Y = jnp.sin(2 * X[:, 0]) * X[:, 1] + 0.1 * random.normal(random.key(1), (300,))


def network(X: jax.Array, y: jax.Array, width: int = 16, layers: int = 2) -> None:
    """Layers by hand, with a mean and a scale as outputs."""
    sizes, weights = [X.shape[1], *[width] * layers, 2], []
    for k, shape in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        w = numpyro.sample(f"w{k}", dist.Normal(0, 1).expand(shape).to_event(2))
        b = numpyro.sample(f"b{k}", dist.Normal(0, 1).expand(shape[1:]).to_event(1))
        weights.append((w, b))
    with numpyro.plate("data", X.shape[0]) as i:
        h = X[i]
        for w, b in weights[:-1]:
            h = jnp.maximum(h @ w + b, 0)
        h = h @ weights[-1][0] + weights[-1][1]
        numpyro.sample("y", dist.Normal(h[:, 0], 1e-3 + jax.nn.softplus(h[:, 1])), obs=y[i])


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(nn.tanh(nn.Dense(8)(x)))))[..., 0]


def flax_network(X: jax.Array, y: jax.Array) -> None:
    net = random_flax_module("net", Net(), dist.Normal(0, 1), input_shape=(3,))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(net(X[i]), 0.3), obs=y[i])


def recurrent(X: jax.Array, y: jax.Array) -> None:
    """One layer, whose output the next turn multiplies again."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4, 4]).to_event(2))
    with numpyro.plate("data", X.shape[0]) as i:
        start = jnp.ones((X[i].shape[0], 4))
        h, _ = lax.scan(lambda h, x: (jnp.tanh(h @ w + x[:, None]), None), start, X[i].T)
        numpyro.sample("y", dist.Normal(h.sum(-1), 0.3), obs=y[i])


def linear(X: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 2]).to_event(2))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal((X[i] @ w).sum(-1), scale), obs=y[i])


def correlated(X: jax.Array, y: jax.Array) -> None:
    """Slopes by groups, non-centred: a product of two latent matrices, of one layer."""
    factor = numpyro.sample("factor", dist.LKJCholesky(3, 1.0))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([10, 3]).to_event(2))
    slopes = z @ factor.T
    with numpyro.plate("data", X.shape[0]) as i:
        group = jnp.arange(X.shape[0])[i] % 10
        numpyro.sample("y", dist.Normal((X[i] * slopes[group]).sum(-1), 1.0), obs=y[i])


def process(X: jax.Array, y: jax.Array) -> None:
    """A Gaussian process, non-centred: its factor depends on a length scale."""
    length = numpyro.sample("length", dist.HalfNormal(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([20]).to_event(1))
    gap = jnp.arange(20.0)[:, None] - jnp.arange(20.0)
    cov = jnp.exp(-((gap / (1 + length)) ** 2)) + 1e-3 * jnp.eye(20)
    with numpyro.plate("data", X.shape[0]) as i:
        f = (jnp.linalg.cholesky(cov) @ z)[jnp.arange(X.shape[0])[i] % 20]
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y[i])


def solved(X: jax.Array, y: jax.Array) -> None:
    """A linear system, whose program has programs with other results within."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 3]).to_event(2))
    x, _ = jax.scipy.sparse.linalg.cg(lambda v: (w @ w.T + jnp.eye(3)) @ v, jnp.ones(3))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ x, 1.0), obs=y[i])


@pytest.mark.parametrize(
    ("model", "deep"),
    [
        (network, True),
        (flax_network, True),
        (recurrent, True),
        (linear, False),
        (correlated, False),
        (handlers.reparam(linear, config={"w": Expanded()}), False),
        (handlers.reparam(network, config={"w1": Expanded()}), True),
        (process, False),
        (solved, False),
    ],
)
def test_models_of_several_layers_are_networks(model, deep):
    settings = bind(SGHMC(model).settings, random.key(0), 10, None, (X, Y), {})[0].settings
    assert settings.deep is deep
    assert settings.by_energy is deep


def test_a_scale_or_a_step_size_that_is_given_is_kept():
    kernel = SGHMC(network, dense_mass=False)
    settings = bind(kernel.settings, random.key(0), 10, None, (X, Y), {})[0].settings
    assert settings.deep
    assert not settings.by_energy


def test_ten_trainings_of_a_deep_network_end_well():
    """From uniform starts in (-2, 2) they end at errors many times the data's own spread."""
    y = jnp.abs(X[:, 0]) + X[:, 1] + 0.1 * random.normal(random.key(7), (300,))
    found = train(
        partial(network, layers=4),
        random.key(2),
        X,
        y,
        batch_size=32,
        optimiser=optax.adam(3e-3),
        num_epochs=100,
        patience=100,
        num_starts=10,
    )
    assert (found.validation.min(1) < 0.9).all(), found.validation.min(1)  # a constant has 1.6


@pytest.mark.parametrize(("tau", "first"), [(1.0, 1e-4), (0.5, 1.0)])
def test_a_step_has_its_variance_of_the_energy_from_first_steps_of_four_decades(tau, first):
    """On a normal target, against steps of leapfrog in NumPy."""
    size, kernel = 200, SGHMC(potential_fn=lambda z: 0.0, temperature=tau)
    sds = jnp.geomspace(0.1, 1.0, size)
    potential = function_potential(lambda z: jnp.sum((z / sds) ** 2) / 2)
    chain = Chain(tau**0.5 * sds * random.normal(random.key(3), (size,)), Identity().init(sds), ())
    curvature = jnp.float32(4 * kernel.settings.bias_tolerance / first**2)
    adaptation = init_adaptation(100, jnp.float32)._replace(curvature=curvature)

    @jax.jit
    def measured(key, adaptation, i):
        return measure_by_energy(
            potential, chain, kernel.facts, kernel.settings, key, adaptation, i
        )

    for key in range(40):  # from the second half of warm-up on, means
        i = 99 if key else 1
        adaptation = measured(random.key(key), adaptation, jnp.int32(i))
    h = float(2 * jnp.sqrt(kernel.settings.bias_tolerance / adaptation.curvature))
    rng, sds = np.random.default_rng(0), np.asarray(sds)
    x = tau**0.5 * sds * rng.normal(size=(4000, size))
    p = tau**0.5 * rng.normal(size=(4000, size))
    half = p - h / 2 * x / sds**2
    new = x + h * half
    last = half - h / 2 * new / sds**2
    gap = ((new / sds) ** 2 + last**2 - (x / sds) ** 2 - p**2).sum(1) / 2 / tau
    wanted = kernel.settings.bias_tolerance
    # at one position, with 4 momenta each time: the sixth root leaves some per cent of a step
    assert 0.6 < np.mean(gap**2) / size / wanted < 1.6


@pytest.fixture(scope="module")
def finished() -> MCMC:
    mcmc = vectorized(Microcanonical(flax_network), 40, 40, 4)
    mcmc.run(random.key(4), X, Y, extra_fields=("num_diverging",))
    return mcmc


def errors(z: dict, truth: jax.Array) -> np.ndarray:
    """Root mean squared errors of the mean prediction of each chain."""

    def predict(z: dict) -> jax.Array:
        tree: dict[str, Any] = {}
        for name, x in z.items():
            layer, leaf = name.removeprefix("net/").split(".")
            tree.setdefault(layer, {})[leaf] = x
        return Net().apply({"params": tree}, X)

    mean = jax.vmap(jax.vmap(predict))(z).mean(1)
    return np.sqrt(np.asarray(jnp.mean((mean - truth) ** 2, 1)))


def test_chains_start_trained_and_stay_in_the_mass(finished):
    draws = finished.get_samples(group_by_chain=True)
    truth = jnp.sin(2 * X[:, 0]) * X[:, 1]
    assert (errors(draws, truth) < 0.2).all()  # .1 with all 300 rows; .71 for a constant
    assert finished.get_extra_fields()["num_diverging"].sum() == 0
    state = finished.last_state  # a draw moves weights by about their size
    steps = 1 / (state.step_size * np.sqrt(state.adaptation.slowest))
    np.testing.assert_array_equal(state.num_steps, np.clip(np.ceil(steps), 1, MAX_NUM_STEPS))


def test_networks_are_judged_by_densities_of_rows(finished):
    report = diagnose(finished)
    mixing = next(c for c in report.checks if c.name == "R-hat")
    assert mixing.where.startswith("density of y")
    weights = diagnose(finished, var_names=["net/Dense_0.kernel"])
    worst = next(c for c in weights.checks if c.name == "R-hat")
    assert worst.value > mixing.value  # units of a layer can be exchanged
    stored = diagnose(to_inference_data(finished))
    assert "R-hat" not in [c.name for c in stored.checks]


@pytest.mark.slow
def test_a_single_chain_is_trained_as_well():
    model = partial(network, width=4)
    state = SGRLD(model).init(random.key(5), 10, None, (X, Y), {})
    assert state.z["w1"].shape == (4, 4)
    assert float(read(model, (X, Y)).energy(state.z)) < 1.2 * 300


def test_one_draw_of_warm_up_sets_the_step():
    mcmc = vectorized(Microcanonical(network), 1, 2, 2)
    mcmc.run(random.key(2), X, Y)
    # a first guess is 400 times as long, and throws chains out
    longer = vectorized(Microcanonical(network), 2, 1, 2)
    longer.run(random.key(2), X, Y)
    ratio = mcmc.last_state.step_size / longer.last_state.step_size
    assert np.all((ratio > 0.25) & (ratio < 4)), ratio


def with_param(X: jax.Array, y: jax.Array) -> None:
    net = flax_module("net", Net(), input_shape=(3,))
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    scale = numpyro.param("scale", 0.3)
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(shift + net(X[i]), scale), obs=y[i])


def test_params_at_random_values_are_named():
    kernel = SGHMC(with_param)
    with pytest.warns(UserWarning, match=r"param sites \['net\$params'\] stay at random first"):
        kernel.init(random.key(6), 10, None, (X, Y), {})
    fixed = kernel.bound.model.fixed
    trained = handlers.substitute(with_param, data={"net$params": fixed["net$params"]})
    SGHMC(trained).init(random.key(6), 10, None, (X, Y), {})
    assert read(trained, (X, Y)).plan.has_params
