"""Users' models: every kind of site and plate, against NumPyro's energy and exact distributions.

First algebra, in 64 bits: the minibatch energy and gradient, averaged over all batches, equal
NumPyro's on all rows. Then draws: of independent chains, against exact moments, with thresholds
from the Monte Carlo error (`targets.SIGMAS`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.module import (
    flax_module,
    nnx_module,
    random_flax_module,
    random_nnx_module,
)
from numpyro.infer import MCMC, init_to_uniform
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import initialize_model, potential_energy
from targets import (
    all_batches,
    assert_moments,
    columns,
    langevin_law,
    last_draws,
    linear,
    linear_moments,
    linear_quadratics,
    local_latents,
    local_quadratics,
    regression,
    regression_data,
    replayed,
    run,
    vectorized,
)
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGRLD, diagnose, to_inference_data
from numpyro_geom.model.model import Model
from numpyro_geom.model.plates import read_subsampling

linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

ROUNDING = 1e-12
"""Relative: sums of at most some thousand terms of like size, at 1e-16 each."""

RNG = np.random.default_rng(7)
Y = RNG.normal(size=5) + 1.0
X = RNG.normal(size=(5, 2))
TABLE = RNG.normal(size=(3, 4))
GROUPS = np.array([0, 1, 2, 0, 1])


# --- models


def noncentred(y: jax.Array) -> None:
    """Local latents of a scale mixture, one of them constrained, with a deterministic site."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    t = numpyro.sample("t", dist.HalfNormal(1))
    with numpyro.plate("data", y.shape[0]) as i:
        z = numpyro.sample("z", dist.Normal(mu, t))
        u = numpyro.sample("u", dist.Gamma(2, 1))
        numpyro.deterministic("zu", z * u)
        numpyro.sample("y", dist.Normal(z * u, 1), obs=y[i])


def masked_and_scaled(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with handlers.scale(scale=0.5):
        numpyro.sample("s", dist.Exponential(1))
    with numpyro.plate("data", y.shape[0]) as i:
        seen = jnp.array([True, False, True, True, False])[i]
        with handlers.mask(mask=seen), handlers.scale(scale=jnp.arange(1.0, 6.0)[i]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def partly_observed(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", y.shape[0]) as i:
        seen = jnp.array([True, False, True, True, False])[i]
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i], obs_mask=seen)


def factors(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    numpyro.factor("prior", -(mu**4))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.factor("likelihood", -((y[i] - mu) ** 2) / 2)


def local_events(y: jax.Array) -> None:
    covariance = jnp.array([[1.0, 0.6], [0.6, 2.0]])
    mu = numpyro.sample("mu", dist.MultivariateNormal(jnp.zeros(2), covariance))
    with numpyro.plate("data", y.shape[0]) as i:
        z = numpyro.sample("z", dist.Dirichlet(jnp.ones(3)))
        chol = numpyro.sample("chol", dist.LKJCholesky(2, 1.0))
        loc = mu * z[..., :2]
        numpyro.sample("y", dist.MultivariateNormal(loc, scale_tril=chol), obs=y[i])


def nested(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    s = numpyro.sample("s", dist.Uniform(0.0, 3.0))
    with numpyro.plate("group", y.shape[0], dim=-2) as j:
        a = numpyro.sample("a", dist.Normal(mu, 1))
        with numpyro.plate("row", y.shape[1], dim=-1) as i:
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(a + b, s), obs=y[j[:, None], i])


def grouped(y: jax.Array) -> None:
    """Rows refer to groups by an index column, as most hierarchical models do."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("group", 3):
        a = numpyro.sample("a", dist.Normal(mu, 1))
    with numpyro.plate("row", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(a[jnp.asarray(GROUPS)[i]], 1), obs=y[i])


def two_tables(y1: jax.Array, y2: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("first", y1.shape[0]) as i:
        numpyro.sample("y1", dist.Normal(mu, 1), obs=y1[i])
    with numpyro.plate("second", y2.shape[0]) as j:
        numpyro.sample("y2", dist.Normal(mu**2, 1), obs=y2[j])


def subsampling(y: jax.Array, subsample_size: int | None = 2) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", y.shape[0], subsample_size=subsample_size):
        rows = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(mu, 1), obs=rows)


def left_batch(y: jax.Array) -> None:
    with numpyro.plate("copies", 2, dim=-2), numpyro.plate("data", y.shape[0], dim=-1) as i:
        z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(z.sum(-1), 1), obs=y[i])


def moving_support(y: jax.Array) -> None:
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Uniform(a, a + 2))
    c = numpyro.sample("c", dist.TruncatedNormal(a, 1, low=b))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(c, 1), obs=y[i])


def mixture(y: jax.Array) -> None:
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([2]).to_event(1))
    with numpyro.plate("data", y.shape[0]) as i:
        parts = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(mu, 1))
        numpyro.sample("y", parts, obs=y[i])


def series(y: jax.Array) -> None:
    """A state-space model: a latent and an observation at each step of a `scan`."""
    s = numpyro.sample("s", dist.HalfNormal(1))

    def step(z: jax.Array, row: jax.Array) -> tuple:
        z = numpyro.sample("z", dist.Normal(0.5 * z, s))
        numpyro.sample("y", dist.Normal(z, 1), obs=row)
        return z, None

    scan(step, 0.0, y)


def panel(y: jax.Array) -> None:
    """As :func:`series` for several series: the plate is inside the body of `scan`."""
    s = numpyro.sample("s", dist.HalfNormal(1))

    def step(z: jax.Array, row: jax.Array) -> tuple:
        with numpyro.plate("series", y.shape[1]) as i:
            z = numpyro.sample("z", dist.Normal(0.5 * z, s))
            numpyro.sample("y", dist.Normal(z, 1), obs=row[i])
        return z, None

    scan(step, jnp.zeros(y.shape[1]), y)


class Net(linen.Module):
    hidden: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(1)(jnp.tanh(linen.Dense(self.hidden)(x)))


class LinearNNX(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.layer = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def random_network(x: jax.Array, y: jax.Array) -> None:
    net = random_flax_module("net", Net(3), dist.Normal(0, 1), input_shape=(2,))
    with numpyro.plate("data", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal(net(x[i])[:, 0], 1), obs=y[i])


def fixed_network(x: jax.Array, y: jax.Array) -> None:
    """`param` sites, a network's weights and a scale among them, keep their initial values."""
    net = flax_module("net", Net(3), input_shape=(2,))
    scale = numpyro.param("scale", 2.0, constraint=dist.constraints.positive)
    b = numpyro.sample("b", dist.Normal(0, 1))
    loc = numpyro.deterministic("loc", net(x)[:, 0])
    with numpyro.plate("data", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal(b + loc[i], scale), obs=y[i])


def linear_flax(x: jax.Array, y: jax.Array) -> None:
    net = random_flax_module("net", linen.Dense(1), dist.Normal(0, 1), input_shape=(2,))
    with numpyro.plate("data", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal(net(x[i])[:, 0], 0.5), obs=y[i])


def linear_nnx(x: jax.Array, y: jax.Array) -> None:
    net = random_nnx_module("net", LinearNNX(nnx.Rngs(0)), dist.Normal(0, 1))
    with numpyro.plate("data", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal(net(x[i])[:, 0], 0.5), obs=y[i])


def fixed_nnx(x: jax.Array, y: jax.Array) -> None:
    net = nnx_module("net", LinearNNX(nnx.Rngs(0)))
    scale = numpyro.param("scale", 1.5)
    b = numpyro.sample("b", dist.Normal(0, 1))
    loc = numpyro.deterministic("loc", net(x)[:, 0])
    with numpyro.plate("data", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal(b + loc[i], scale), obs=y[i])


# --- param sites


def test_only_params_that_nothing_depends_on_are_not_computed() -> None:
    """Values of the others are those of the model, wherever they enter."""

    def model(x: jax.Array) -> None:
        scale = numpyro.param("scale", 2.0, constraint=dist.constraints.positive)
        shift = numpyro.param("shift", lambda key: 5 + random.normal(key))
        numpyro.param("weights", lambda key: random.normal(key, (3,)))
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.deterministic("shifted", b + shift)
        with numpyro.plate("data", x.shape[0]) as i:
            numpyro.sample("x", dist.Normal(b, scale), obs=x[i])

    kernel = SGRLD(model, batch_size=2, step_size=1e-3)
    with pytest.warns(UserWarning, match=r"param sites \['shift'\] stay at random"):
        state = kernel.init(random.key(0), 0, None, (X[:, 0],), {})
    assert kernel.bound.plan.idle_params == ("weights",)
    sites = kernel.postprocess_fn((X[:, 0],), {})(state.z)
    shift = float(sites["shifted"] - sites["b"])
    assert abs(shift - 5) < 5
    assert shift != 0


# --- energies


class Case(NamedTuple):
    """A model, its arguments, rows per step, and plates that are subsampled of the latent sites."""

    model: Callable
    args: tuple
    batch_size: Any
    local: dict[str, tuple] = {}


CASES = {
    "constrained": Case(regression, (X, Y), 2),
    "deterministic": Case(replayed, (X, Y), 2),
    "local": Case(noncentred, (Y,), 2, {"z": (("data", 0),), "u": (("data", 0),)}),
    "reparam": Case(
        handlers.reparam(noncentred, config={"z": LocScaleReparam(0.0)}),
        (Y,),
        2,
        {"z_decentered": (("data", 0),), "u": (("data", 0),)},
    ),
    "scope": Case(
        handlers.scope(local_latents, prefix="part"), (Y,), 2, {"part/z": (("part/data", 0),)}
    ),
    "masked, scaled": Case(masked_and_scaled, (Y,), 2),
    "obs_mask": Case(partly_observed, (Y,), 2, {"y_unobserved": (("data", 0),)}),
    "factors": Case(factors, (Y,), 3),
    "events": Case(local_events, (X[:3],), 1, {"z": (("data", 0),), "chol": (("data", 0),)}),
    "nested, groups": Case(
        nested, (TABLE,), {"group": 2}, {"a": (("group", 0),), "b": (("group", 0),)}
    ),
    "nested, rows": Case(nested, (TABLE,), {"row": 2}, {"b": (("row", 1),)}),
    "nested, both": Case(
        nested,
        (TABLE,),
        {"row": 2, "group": 1},
        {"a": (("group", 0),), "b": (("group", 0), ("row", 1))},
    ),
    "grouped": Case(grouped, (Y,), 2),
    "two tables": Case(two_tables, (Y, TABLE[0]), {"first": 1, "second": 2}),
    "one of two tables": Case(two_tables, (Y, TABLE[0]), {"second": 2}),
    "numpyro.subsample": Case(subsampling, (Y,), None),
    "left batch": Case(left_batch, (Y,), {"data": 2}, {"z": (("data", 1),)}),
    "moving support": Case(moving_support, (Y,), 2),
    "mixture": Case(mixture, (Y,), 2),
    "scan": Case(series, (Y,), None),
    "plate in scan": Case(panel, (TABLE,), None),
    "linen": Case(random_network, (X, Y), 2),
    "nnx": Case(linear_nnx, (X, Y), 2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_energy_and_gradient_average_to_the_full_ones(x64: None, case: Case) -> None:
    args = jax.tree.map(jnp.asarray, case.args)
    plan = read_subsampling(case.model, args, {}, case.batch_size)
    assert {k: tuple(sorted(v)) for k, v in plan.local_axes.items()} == case.local
    potential = Model(case.model, args, {}, plan).potential()
    # NumPyro's own answers come from the model with nothing subsampled
    full_args = (*args, None) if case.model is subsampling else args
    # only shapes are computed, so that nothing is compiled
    start = jax.eval_shape(
        lambda: initialize_model(random.key(0), case.model, model_args=full_args).param_info.z
    )
    rng = np.random.default_rng(0)
    position = {k: jnp.asarray(rng.uniform(-0.9, 1.1, x.shape)) for k, x in start.items()}
    grids = [all_batches(plan.sizes[p], b) for p, b in plan.batch_sizes.items()]
    choices = np.array(list(itertools.product(*[range(len(g)) for g in grids])))
    batches = {
        p: jnp.asarray(grid[choices[:, k]])
        for k, (p, grid) in enumerate(zip(plan.batch_sizes, grids, strict=True))
    }

    @jax.jit
    def evaluate(position: Any) -> tuple:
        of_batch = jax.value_and_grad(potential.energy)
        if batches:
            averaged = jax.vmap(of_batch, (None, 0))(position, batches)
            averaged = jax.tree.map(lambda x: x.mean(0), averaged)
        else:
            averaged = of_batch(position, {})
        full = jax.value_and_grad(lambda p: potential_energy(case.model, full_args, {}, p))
        return averaged, full(position)

    (energy, grad), (full_energy, full_grad) = evaluate(position)
    np.testing.assert_allclose(energy, full_energy, rtol=ROUNDING)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(full_grad))
    for name, value in full_grad.items():
        np.testing.assert_allclose(
            grad[name], value, rtol=ROUNDING, atol=ROUNDING * scale, err_msg=name
        )


@pytest.mark.slow
def test_epoch_batches_sum_to_the_full_energy(x64: None) -> None:
    y = jnp.asarray(RNG.normal(size=6))
    plan = read_subsampling(noncentred, (y,), {}, 2, "epoch")
    potential = Model(noncentred, (y,), {}, plan).potential()
    position = {
        k: jnp.asarray(RNG.normal(size=s)) for k, s in {"mu": (), "t": (), "z": 6, "u": 6}.items()
    }
    stream, energies = potential.init_stream(random.key(0)), []
    for _ in range(3):
        batch, stream = potential.draw(random.key(1), stream)
        energies.append(potential.energy(position, batch))
    full = potential_energy(noncentred, (y,), {}, position)
    np.testing.assert_allclose(np.mean(energies), full, rtol=ROUNDING)


# --- draws, against exact distributions


def zoo(tosses: jax.Array, counts: jax.Array, kinds: jax.Array, xs: jax.Array) -> None:
    """Models side by side: each constrained or multi-event site has a known posterior.

    (A MultivariateNormal is in the energies above; its triangular solve is slow under `vmap`.)
    """
    p = numpyro.sample("p", dist.Beta(2, 3))
    rate = numpyro.sample("rate", dist.Gamma(3, 2))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])))
    chol = numpyro.sample("chol", dist.LKJCholesky(2, 2.0))
    numpyro.deterministic("correlation", chol[1, 0])
    with numpyro.plate("tosses", tosses.shape[0]) as i:
        numpyro.sample("toss", dist.Bernoulli(p), obs=tosses[i])
    with numpyro.plate("counts", counts.shape[0]) as i:
        numpyro.sample("count", dist.Poisson(rate), obs=counts[i])
    with numpyro.plate("kinds", kinds.shape[0]) as i:
        numpyro.sample("kind", dist.Categorical(shares), obs=kinds[i])
    with numpyro.plate("xs", xs.shape[0]) as i:
        # a bivariate normal with this Cholesky factor, written as a chain
        first = numpyro.sample("first", dist.Normal(0, 1), obs=xs[i, 0])
        numpyro.sample("second", dist.Normal(chol[1, 0] * first, chol[1, 1]), obs=xs[i, 1])


def quadrature(log_density: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Mean and variance of a value on an even grid with these log densities."""
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = (weights * values).sum()
    return mean, (weights * (values - mean) ** 2).sum()


@pytest.mark.slow
def test_constrained_and_multi_event_sites_against_conjugate_posteriors() -> None:
    rng = np.random.default_rng(0)
    tosses, counts = rng.integers(2, size=8), rng.poisson(2.0, size=3)
    kinds = rng.integers(3, size=10)
    xs = rng.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=6)
    args = tuple(jnp.asarray(a) for a in (tosses, counts, kinds, xs))
    # the Metropolis test leaves no bias; two hundred steps are some thirty relaxation times
    kernel = SGRLD(
        zoo,
        adjusted=True,
        step_size=0.08,
        num_steps=200,
        init_strategy=init_to_uniform(radius=0.1),
    )
    state, draws = last_draws(kernel, args, num_chains=2000)
    assert 0.3 < float(state.accept_prob.mean()) < 0.97

    a, b = 2 + tosses.sum(), 3 + (1 - tosses).sum()
    assert_moments(
        columns(draws, ("p",)),
        np.array([a / (a + b)]),
        np.array([[a * b / ((a + b) ** 2 * (a + b + 1))]]),
    )
    a, b = 3 + counts.sum(), 2 + len(counts)
    assert_moments(columns(draws, ("rate",)), np.array([a / b]), np.array([[a / b**2]]))
    alpha = np.array([1, 2, 3]) + np.bincount(kinds, minlength=3)
    share = alpha / alpha.sum()
    assert_moments(
        columns(draws, ("shares",)),
        share,
        (np.diag(share) - np.outer(share, share)) / (alpha.sum() + 1),
    )
    # the correlation r of two unit normals, prior (1 - r^2)^(eta - 1) with eta = 2
    r = np.linspace(-1, 1, 20_001)[1:-1]
    square, cross = (xs**2).sum(), (xs[:, 0] * xs[:, 1]).sum()
    log_density = np.log1p(-(r**2)) * (1 - len(xs) / 2) - (square - 2 * r * cross) / (
        2 * (1 - r**2)
    )
    mean, variance = quadrature(log_density, r)
    assert_moments(columns(draws, ("correlation",)), np.array([mean]), np.array([[variance]]))
    np.testing.assert_array_equal(draws["correlation"], draws["chol"][:, 1, 0])


def test_moving_support_against_quadrature() -> None:
    def model(y: jax.Array) -> None:
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Uniform(a, a + 2))
        with numpyro.plate("data", y.shape[0]) as i:
            numpyro.sample("y", dist.Normal(b, 1), obs=y[i])

    y = np.array([0.5, 1.5, 2.0])
    kernel = SGRLD(model, adjusted=True, step_size=0.15, num_steps=600)
    _, draws = last_draws(kernel, (jnp.asarray(y),), num_chains=3000)
    a, share = np.meshgrid(np.linspace(-7, 7, 2001), (np.arange(1000) + 0.5) / 1000)
    b = a + 2 * share
    log_density = -(a**2) / 2 - ((y[:, None, None] - b) ** 2).sum(0) / 2
    for name, values in (("a", a), ("b", b)):
        mean, variance = quadrature(log_density, values)
        assert_moments(columns(draws, (name,)), np.array([mean]), np.array([[variance]]))
    assert np.all((draws["b"] >= draws["a"]) & (draws["b"] <= draws["a"] + 2))


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("step_size", [0.08])
def test_local_latents_have_the_exact_law_of_the_minibatch_chain(step_size: float) -> None:
    """Bias of the step size and of the minibatches included: nothing is left to a tolerance."""
    y = jnp.asarray(Y)
    kernel = SGRLD(local_latents, batch_size=2, step_size=step_size, num_steps=400)
    state, draws = last_draws(kernel, (y,), num_chains=20_000)
    mean, covariance = langevin_law(local_quadratics(y), 2, step_size)
    draws = columns(draws, ("mu", "z"))
    assert int(state.num_diverging.sum()) == 0
    assert_moments(draws, mean, covariance)
    # the test has the power to tell it from the posterior
    _, posterior = local_quadratics(y).moments()
    with pytest.raises(AssertionError, match="covariance off"):
        assert_moments(draws, mean, posterior)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("temperature", short([0.5, 2.0], kept=[2.0]))
def test_regression_has_the_exact_law_of_the_minibatch_chain(temperature: float) -> None:
    inputs, y = regression_data(5, 2, seed=1)
    kernel = SGRLD(linear, batch_size=2, step_size=0.004, num_steps=800, temperature=temperature)
    _, draws = last_draws(kernel, (inputs, y), num_chains=10_000)
    mean, covariance = langevin_law(linear_quadratics(inputs, y), 2, 0.004, temperature)
    assert_moments(columns(draws, ("w",)), mean, covariance)


@pytest.mark.parametrize(
    "model", short([linear_flax, linear_nnx], kept=[linear_flax]), ids=["linen", "nnx"]
)
def test_linear_networks_have_their_gaussian_posterior(model: Callable) -> None:
    inputs, y = regression_data(12, 2, seed=2)
    kernel = SGRLD(model, adjusted=True, step_size=0.02, num_steps=400)
    _, draws = last_draws(kernel, (inputs, y), num_chains=3000)
    with_bias = jnp.concatenate([jnp.ones((12, 1)), inputs], axis=1)
    mean, covariance = linear_moments(with_bias, y)
    names = sorted(draws, key=lambda name: "bias" not in name)
    assert len(names) == 2
    assert_moments(columns(draws, tuple(names)), mean, covariance)


@pytest.mark.parametrize(
    ("model", "scale"),
    short([(fixed_network, 2.0), (fixed_nnx, 1.5)], kept=[(fixed_nnx, 1.5)]),
    ids=["linen", "nnx"],
)
def test_param_sites_keep_their_values(model: Callable, scale: float) -> None:
    """The posterior of the one latent site is Gaussian, given the values of the `param` sites."""
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    h = 0.05
    kernel = SGRLD(model, batch_size=2, step_size=h, num_steps=200)
    state, draws = last_draws(kernel, (x, y), num_chains=4000)
    assert set(state.z) == {"b"}
    np.testing.assert_array_equal(draws["loc"], np.tile(draws["loc"][0], (4000, 1)))
    residual = np.asarray(y - draws["loc"][0], np.float64)
    precision = 1 + 5 / scale**2
    mean = residual.sum() / scale**2 / precision
    # targets.langevin_law in one dimension with the same Hessian for all batches
    noise = 5**2 / 2 * residual.var() / scale**4
    variance = 1 / precision + h**2 * noise / (1 - (1 - h * precision) ** 2)
    assert_moments(columns(draws, ("b",)), np.array([mean]), np.array([[variance]]))


def test_two_tables_with_batch_sizes_of_their_own() -> None:
    def model(y1: jax.Array, y2: jax.Array) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("first", y1.shape[0]) as i:
            numpyro.sample("y1", dist.Normal(mu, 1), obs=y1[i])
        with numpyro.plate("second", y2.shape[0]) as j, handlers.scale(scale=2.0):
            numpyro.sample("y2", dist.Normal(mu, 1), obs=y2[j])

    y1, y2 = Y, TABLE[0]
    args = jnp.asarray(y1, jnp.float32), jnp.asarray(y2, jnp.float32)
    h, batch_size = 0.05, {"first": 2, "second": 1}
    kernel = SGRLD(model, batch_size=batch_size, step_size=h, num_steps=200)
    _, draws = last_draws(kernel, args, num_chains=4000)
    precision = 1 + 5 + 2 * 4
    mean = (y1.sum() + 2 * y2.sum()) / precision
    noise = 5**2 / 2 * y1.var() + 4**2 / 1 * (2 * y2).var()
    variance = 1 / precision + h**2 * noise / (1 - (1 - h * precision) ** 2)
    assert_moments(columns(draws, ("mu",)), np.array([mean]), np.array([[variance]]))


def test_models_that_subsample_themselves_get_their_batches() -> None:
    """`numpyro.subsample` and the model's own `subsample_size`, against the exact distribution."""
    y, h = jnp.asarray(Y, jnp.float32), 0.1
    kernel = SGRLD(subsampling, step_size=h, num_steps=100)
    _, draws = last_draws(kernel, (y,), num_chains=4000)
    precision = 1 / 25 + 5
    noise = 5**2 / 2 * Y.var()
    variance = 1 / precision + h**2 * noise / (1 - (1 - h * precision) ** 2)
    assert_moments(columns(draws, ("mu",)), np.array([Y.sum() / precision]), np.array([[variance]]))


# --- deterministic sites


def test_deterministic_sites_have_values_on_all_rows() -> None:
    inputs, y = regression_data(7, 2)
    kernel = SGRLD(replayed, batch_size=3, step_size=1e-3, num_steps=5)
    draws = run(kernel, inputs, y, num_warmup=2, num_samples=6).get_samples()
    assert {name: x.shape for name, x in draws.items()} == {
        "w": (6, 2),
        "s": (6,),
        "norm": (6,),
        "fitted": (6, 7),
    }
    # float32 sums of two products
    np.testing.assert_allclose(draws["fitted"], draws["w"] @ inputs.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(draws["norm"], jnp.linalg.norm(draws["w"], axis=1), rtol=1e-6)


def test_deterministic_sites_of_local_latents_have_values_on_all_rows() -> None:
    y = jnp.asarray(Y, jnp.float32)
    kernel = SGRLD(noncentred, batch_size=2, step_size=0.1)
    position = kernel.init(random.key(0), 0, None, (y,), {}).z
    draw = kernel.postprocess_fn((y,), {})(position)
    assert draw["zu"].shape == (5,)
    np.testing.assert_array_equal(draw["z"], position["z"])
    np.testing.assert_allclose(draw["u"], np.exp(position["u"]), rtol=1e-6)
    np.testing.assert_array_equal(draw["zu"], draw["z"] * draw["u"])


def test_plates_within_scan_run_on_all_rows_and_cannot_be_subsampled() -> None:
    y = jnp.asarray(TABLE, jnp.float32)
    kernel = SGRLD(panel, step_size=1e-3, num_steps=2)
    state = kernel.init(random.key(0), 0, None, (y,), {})
    assert kernel.bound.plan.num_data == 4
    assert state.z["z"].shape == (3, 4)
    for batch_size in (2, {"series": 2}):
        with pytest.raises(ValueError, match="series.*inside.*scan"):
            SGRLD(panel, batch_size=batch_size).init(random.key(0), 0, None, (y,), {})


def improper_scale() -> None:
    numpyro.sample("s", dist.ImproperUniform(dist.constraints.positive, (), ()))


def test_a_position_whose_value_overflows_is_undone() -> None:
    """The energy, -log s, is finite all the way; s = exp(z) is not beyond z = 88.7."""
    kernel = SGRLD(improper_scale, step_size=1.0, num_steps=1)
    state = kernel.init(random.key(0), 0, {"s": jnp.asarray(80.0)}, (), {})
    step = jax.jit(lambda state: kernel.sample(state, (), {}))
    constrain = kernel.postprocess_fn((), {})
    undone = 0
    for _ in range(30):
        state = step(state)
        assert np.isfinite(constrain(state.z)["s"])
        undone += int(state.num_diverging)
    assert undone > 0


@pytest.mark.parametrize("kernel", short([SGHMC, GGMC], kept=[SGHMC]))
def test_a_latent_of_size_zero(kernel: Any) -> None:
    def model() -> None:
        a = numpyro.sample("a", dist.Normal(0, 1).expand([0]))
        b = numpyro.sample("b", dist.Normal(jnp.sum(a), 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=1.0)

    mcmc = MCMC(kernel(model), num_warmup=50, num_samples=300, progress_bar=False)
    mcmc.run(random.key(0))
    assert mcmc.get_samples()["a"].shape == (300, 0)
    # N(1/2, 1/2); no fewer than 50 effective draws
    assert abs(np.mean(mcmc.get_samples()["b"]) - 0.5) < 5 * (0.5 / 50) ** 0.5
    assert {"error of the means, in sd"} <= {check.name for check in diagnose(mcmc).checks}
    to_inference_data(mcmc)


def one_point(y: jax.Array) -> None:
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(1)))
    numpyro.deterministic("mean", p * y.mean())
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(p[0], 1), obs=y[i])


def no_site(y: jax.Array) -> None:
    numpyro.deterministic("mean", y.mean()[None])


@pytest.mark.parametrize("model", short([one_point, no_site], kept=[one_point]))
@pytest.mark.parametrize("kernel", short([SGRLD, SGHMC, GGMC], kept=[SGHMC]))
def test_a_model_without_free_parameters_has_draws_that_are_all_the_same(
    kernel: Any, model: Any
) -> None:
    mcmc = vectorized(kernel(model), 5, 7, 2)
    y = jnp.asarray(Y, jnp.float32)
    with pytest.warns(UserWarning, match="no free parameter, so every draw is the same"):
        mcmc.run(random.key(0), y)
    draws = mcmc.get_samples(group_by_chain=True)
    assert set(draws) == ({"p", "mean"} if model is one_point else {"mean"})
    np.testing.assert_allclose(draws["mean"], np.full((2, 7, 1), Y.mean()), rtol=1e-6)
    if model is one_point:
        np.testing.assert_array_equal(draws["p"], np.ones((2, 7, 1)))
    assert not mcmc.last_state.diverging.any()
    diagnose(mcmc)
    with pytest.raises(ValueError, match="without free parameters"):
        to_inference_data(mcmc, gradients=True)
