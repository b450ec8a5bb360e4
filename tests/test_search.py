"""The search for a mode at the beginning of warm-up."""

from __future__ import annotations

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import init_to_median, init_to_uniform
from numpyro.infer.util import potential_energy
from targets import assert_trees_equal, run
from tiers import short

from numpyro_geom import SGHMC, SGRLD, Monge
from numpyro_geom._checks import SamplingWarning
from numpyro_geom.model import read
from numpyro_geom.model.arrowhead import Layout
from numpyro_geom.model.potential import function_potential, in_coordinates
from numpyro_geom.sampling.state import Target
from numpyro_geom.warmup import law as warmup


def search(energy, start, num_chains=8, temperature=1.0, rounds=False):
    potential = function_potential(energy)
    keys = random.split(random.key(0), num_chains)
    starts = jax.vmap(start)(random.split(random.key(1), num_chains))

    def one(z, k):
        if not rounds:
            return warmup.search(potential, z, k, temperature)[0]
        layout = Layout.without_groups(z.size)
        return warmup.find_law(Target(potential, temperature), layout, z, k, True).centre

    return np.asarray(jax.jit(jax.vmap(one))(starts, keys))


def uniform(dim):
    return lambda key: random.uniform(key, (dim,), minval=-2.0, maxval=2.0)


@pytest.mark.parametrize(
    ("scale", "rounds"),
    short(
        itertools.product([1e-3, 1.0, 1e3], [False, True]),
        kept=[(1e-3, False), (1.0, False), (1e3, True)],
    ),
)
def test_ends_within_the_spread_of_a_gaussian(scale, rounds):
    sds = scale * jnp.array([1.0, 0.1, 0.01])
    start = lambda k: 5 * sds[0] * uniform(3)(k)  # noqa: E731
    found = search(lambda z: jnp.sum((z / sds) ** 2) / 2, start, rounds=rounds)
    energies = np.sum((found / np.asarray(sds)) ** 2, axis=1) / 2
    if scale == 1e3:  # further away than it ever goes: 60 rounds of 25 steps of 0.05
        before = jax.vmap(start)(random.split(random.key(1), 8))
        assert (energies < np.sum((before / sds) ** 2, axis=1) / 2).all()
    else:
        # the target has the mean 1.5 and the standard deviation 1.2; the law's rounds go by
        # gradients at draws of the target
        assert (energies < (5 if rounds else 3)).all(), energies


def test_no_search_from_where_an_earlier_one_ended():
    potential = function_potential(lambda z: jnp.sum(z**2) / 2)
    look = jax.jit(lambda near: warmup.search(potential, jnp.ones(3), random.key(0), 1.0, near)[0])
    np.testing.assert_array_equal(look(True), jnp.ones(3))
    assert np.all(look(False) < 1)


@pytest.mark.parametrize("rounds", [False, True])
def test_gradients_whose_squares_overflow_are_followed(rounds):
    """Where it starts U is 1e28 to 1e36, and its slope, in float32, has no finite square."""
    energy = lambda z: jnp.sum(jnp.exp(20 * z) + z**2 / 2)  # noqa: E731
    found = search(energy, lambda k: 3.6 + 0.2 * uniform(3)(k), rounds=rounds)
    assert np.array([energy(z) for z in found]).max() < 5


def test_minibatch_noise_does_not_keep_it_away():
    # gradient noise of 30 standard deviations of the posterior's own gradient
    sds = jnp.array([0.01, 0.003])

    def energy(z, rng_key):
        return jnp.sum((z / sds) ** 2) / 2 + 30 * jnp.dot(random.normal(rng_key, (2,)), z / sds)

    found = search(energy, uniform(2))
    # from 2 / 0.003 = 700 standard deviations away
    assert (np.abs(found / np.asarray(sds)) < 10).all(), found / np.asarray(sds)


@pytest.mark.parametrize("rounds", [False, True])
def test_does_not_chase_an_unbounded_density(rounds):
    """The centred hierarchy's density grows without bound as its scale vanishes."""
    groups = 20

    def energy(z):
        log_scale, effects = z[0], z[1:]
        return (
            jnp.sum((effects * jnp.exp(-log_scale)) ** 2) / 2
            + groups * log_scale
            + log_scale**2 / 18
        )

    found = search(energy, uniform(groups + 1), rounds=rounds)
    # log_scale is N(0, 3): the search ends within its sd; the energy's minimum is at -180
    assert (found[:, 0] > -3).all(), found[:, 0]


def test_more_parameters_than_rows():
    """Of few rows the energy falls by few nats, and that is no reason to stop."""

    def energy(z):
        return 1e-3 * jnp.sum(z**2)  # 40 nats at the start, 400 parameters

    position, key = jnp.full((400,), 10.0), random.key(0)
    for num_data, near in ((10, True), (1000, False)):
        potential = function_potential(energy, num_data=num_data)
        found = warmup.search(potential, position, key, 1.0)[0]
        assert (jnp.abs(found).max() < 2) == near


def test_mass_of_a_hierarchy_with_data():
    """40 centred groups of one row each: the energy is least at no scale, far from the mass."""
    rng = np.random.default_rng(0)
    y = 0.3 * rng.normal(size=40) + 0.4 * rng.normal(size=40)

    def energy(z):
        log_scale, mean, effects = z[0], z[1], z[2:]
        prior = jnp.sum(((effects - mean) * jnp.exp(-log_scale)) ** 2) / 2 + 40 * log_scale
        hyper = log_scale**2 / 8 + mean**2 / 2
        return prior + hyper + jnp.sum(((y - effects) / 0.4) ** 2) / 2

    # the law of log_scale without the effects: y is N(mean, scale^2 + .16)
    grid = np.linspace(-8, 3, 2000)
    variance = np.exp(2 * grid) + 0.16
    precise = 1 + 40 / variance  # of mean
    log_density = -(grid**2) / 8 - 20 * np.log(variance) - np.log(precise) / 2
    log_density -= (np.sum(y**2) / variance - (np.sum(y) / variance) ** 2 / precise) / 2
    weights = np.exp(log_density - log_density.max())
    mean = np.sum(weights * grid) / np.sum(weights)
    sd = np.sqrt(np.sum(weights * (grid - mean) ** 2) / np.sum(weights))
    found = search(energy, uniform(42), rounds=True)[:, 0]
    assert (np.abs(found - mean) < 2 * sd).all(), (found, mean, sd)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_start_whose_energy_is_not_finite_is_left(rounds):
    def energy(z):
        return jnp.where(z[0] > 0, jnp.sum((z - 1) ** 2) / 0.02, jnp.nan)

    found = search(energy, lambda key: uniform(2)(key) - jnp.array([2.0, 0.0]), rounds=rounds)
    assert np.abs(found - 1).max() < 0.5


def test_no_place_is_taken_where_the_density_is_infinite():
    """The normaliser of a truncated normal law underflows in float32 where it is far out."""

    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 10))
        with numpyro.plate("data", y.size) as i:
            numpyro.sample("y", dist.TruncatedNormal(mean, 0.1, low=1.0), obs=y[i])

    y = jnp.asarray(1 + np.abs(np.random.default_rng(0).normal(0, 0.1, 300)), jnp.float32)
    far = {"mean": jnp.float32(-1.9)}
    assert potential_energy(model, (y,), {}, far) == -jnp.inf
    assert read(model, (y,)).energy(far) == jnp.inf


@pytest.mark.usefixtures("optimised")
def test_places_are_evaluated_one_by_one():
    """A batch of two of this model is where jaxlib 0.10.2 sums wrongly: 6,000 off of 6,000."""

    def model(X, y):
        w = numpyro.sample("w", dist.Normal().expand([4]).to_event(1))
        size = numpyro.sample("size", dist.HalfNormal(5))
        with numpyro.plate("rows", len(y)) as i:
            mean = jax.nn.sigmoid(X[i] @ w)
            numpyro.sample("y", dist.BetaBinomial(size * mean, size * (1 - mean), 10), obs=y[i])

    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(20_000, 4)), rng.binomial(10, 0.4, 20_000)
    found = read(model, (jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)))
    to_sites = lambda z: {"w": z[:4], "size": z[4]}  # noqa: E731
    potential = in_coordinates(found.potential(), to_sites)
    places = jnp.asarray([[0.3, -0.1, 0.2, 0.1, 1.0], [0.2, 0.1, -0.3, 0.0, 1.1]])
    law = jax.jit(lambda x: warmup._on_all_rows(potential, x, random.key(0)))(places)
    alone = [jax.jit(jax.grad(lambda z: potential.energy(z, {})))(z) for z in places]
    np.testing.assert_allclose(law[1], (alone[0] + alone[1]) / 2, rtol=1e-4)


def test_a_wall_of_infinite_energy_is_not_crossed():
    found = search(
        lambda z: jnp.sum(jnp.where(z > 0, z - jnp.log(z), jnp.inf)), lambda k: uniform(2)(k) + 2.5
    )
    assert np.abs(found - 1).max() < 0.5  # the mode is at 1


def poisson(X, y):
    b = numpyro.sample("b", dist.Normal(0, 2))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([5]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(b + X[i] @ w)), obs=y[i])


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1000, 5))
    y = rng.poisson(np.exp(0.5 + X @ np.array([0.5, -0.3, 0.2, 0.0, 0.4])))
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("metric", short(["identity", "rmsprop", Monge()], kept=["rmsprop"]))
def test_rates_far_from_the_start_are_found_without_tuning(data, metric):
    """Where chains start, exp(b + x'w) makes gradients a thousand times those of the posterior."""
    kernel = SGRLD(poisson, metric=metric, batch_size=100)
    chains = {"num_chains": 4, "chain_method": "vectorized"}
    mcmc = run(kernel, *data, num_warmup=20, num_samples=5, **chains)
    w = np.asarray(mcmc.get_samples()["w"])
    # the posterior's standard deviations are about 0.02
    assert np.abs(w - [0.5, -0.3, 0.2, 0.0, 0.4]).max() < 0.2


@pytest.mark.slow
def test_a_start_that_is_given_is_kept(data):
    far = {"b": jnp.full((1,), -3.0), "w": jnp.zeros((1, 5))}
    kernel = SGRLD(poisson, batch_size=100)
    state = kernel.init(random.split(random.key(0), 1), 10, far, data, {})
    assert_trees_equal(state.z, far)
    # the first draw is for the metric's statistics
    z = kernel.sample(state, data, {}).z
    for name, x in far.items():  # up to the rounding of coordinates and back
        np.testing.assert_allclose(z[name], x, atol=1e-5)


def test_searches_where_warm_up_chooses_the_step_only(data):
    automatic = SGRLD(poisson, batch_size=100)
    fixed = SGRLD(poisson, batch_size=100, step_size=1e-9, num_steps=1)
    with pytest.warns(SamplingWarning, match="num_warmup=0"):
        starts = {"no warm-up": automatic.init(random.key(0), 0, None, data, {}).z}
    for name, kernel in (("fixed", fixed), ("searched", automatic)):
        starts[name] = kernel.init(random.key(0), 10, None, data, {}).z
    assert_trees_equal(starts["fixed"], starts["no warm-up"])
    assert all(np.all(starts["searched"][k] != x) for k, x in starts["fixed"].items())


# Several searches


def three_normals(y):
    loc = numpyro.sample("loc", dist.Normal(0, 5).expand([3]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(2).expand([3]).to_event(1))
    with numpyro.plate("rows", y.shape[0]) as i:
        parts = dist.MixtureSameFamily(dist.Categorical(jnp.ones(3) / 3), dist.Normal(loc, sd))
        numpyro.sample("y", parts, obs=y[i])


@pytest.mark.slow
def test_several_searches_find_the_mode_with_the_mass():
    rng = np.random.default_rng(0)
    component = rng.choice(3, 200, p=[0.3, 0.4, 0.3])
    centres, sds = np.array([-3.0, 0.0, 4.0]), np.array([0.5, 1.0, 0.7])
    y = jnp.asarray(centres[component] + sds[component] * rng.normal(size=200), jnp.float32)
    kernel = SGHMC(three_normals)
    state = kernel.init(random.split(random.key(0), 8), 100, None, (y,), {})
    # one search of three ends where a component is lost, with tens of nats more
    constrain = kernel.bound.on((y,), {}).model.constrain
    loc = np.sort(np.asarray(jax.vmap(constrain)(state.z)["loc"]), axis=1)
    # draws of the posterior, whose standard deviations are some .1, about means with these errors
    np.testing.assert_allclose(loc, np.broadcast_to(centres, loc.shape), atol=0.6)


def test_an_end_is_chosen_by_its_mass():
    log_masses = np.log([0.8, 0.2])

    def energy(z):
        return -jax.nn.logsumexp(log_masses - (z[0] - jnp.array([-1.0, 1.0])) ** 2 / 2e-2)

    target = Target(function_potential(energy), 1.0)
    keys = random.split(random.key(0), 400)
    starts = jax.vmap(uniform(1))(random.split(random.key(1), 400))

    def ends_of(number):
        search = partial(warmup.search_often, target, Layout.without_groups(1), number=number)
        return jax.vmap(lambda z, key: search(z, key).centre[0])(starts, keys)

    found = jax.jit(ends_of, static_argnums=0)(3)
    # k of 3 searches end at the first mode, each with the chance 1 / 2, up to the boundary
    first = np.mean(jax.jit(ends_of, static_argnums=0)(1) < 0)
    chance = sum(
        math.comb(3, k) * first**k * (1 - first) ** (3 - k) * 0.8 * k / (0.8 * k + 0.2 * (3 - k))
        for k in range(4)
    )
    # `first` is from 400 searches too, and the chance changes by less than it
    variance = (chance * (1 - chance) + first * (1 - first)) / 400
    assert abs(np.mean(found < 0) - chance) < 4 * variance**0.5


@pytest.mark.parametrize(
    ("strategy", "several"),
    [(init_to_uniform, True), (init_to_uniform(radius=1), True), (init_to_median, False)],
)
def test_a_given_strategy_has_one_search(strategy, several):
    kernel = SGHMC(lambda: numpyro.sample("x", dist.Normal()), init_strategy=strategy)
    assert kernel.settings.starts_anywhere is several
