"""Sites that are not centred: their coordinates, the measured shares, and the law of chains."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro import distributions as dist
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro.infer.util import log_density
from targets import vectorized
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGRLD
from numpyro_geom.chain import centre_in
from numpyro_geom.model.centring import (
    Path,
    Positive,
    Product,
    Sum,
    alike,
    find_paths,
    find_shares,
    find_sums,
    unmeasured,
)
from numpyro_geom.model.model import read

SDS = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
EFFECTS = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])


def schools(sds: Any, effects: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(sds)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effect", dist.Normal(theta, sds), obs=effects)


def test_a_density_in_other_coordinates(x64: None) -> None:
    """The density of u is that of x times |dx/du|, and the two maps are inverse."""

    def model() -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.LogNormal(0, 1))
        with numpyro.plate("groups", 3):
            a = numpyro.sample("a", dist.Normal(mu, tau))
        b = numpyro.sample("b", dist.Normal(a.sum(), tau).expand([2, 4]).to_event(2))
        numpyro.deterministic("sum", a.sum())
        numpyro.sample("y", dist.StudentT(3, a.mean() + b, 1).to_event(2), obs=jnp.ones((2, 4)))

    shares = {"a": np.array([0.0, 0.3, 1.0]), "b": np.full((2, 4), 0.25)}
    position = dict(zip("abmt", random.normal(random.key(0), (4,)), strict=True))
    position = {
        "a": random.normal(random.key(1), (3,)),
        "b": random.normal(random.key(2), (2, 4)),
        "mu": position["m"],
        "tau": position["t"],
    }
    assert_density(model, shares, position)


def test_a_density_of_series_in_other_coordinates(x64: None) -> None:
    """The same where neighbours depend on each other, and the scale is within a loop."""

    def model() -> None:
        tau = numpyro.sample("tau", dist.LogNormal(0, 1))

        def next_time(before: Any, y: Any) -> tuple:
            a = numpyro.sample("a", dist.Normal(0.1 + 0.9 * before, 2 * tau))
            numpyro.sample("y", dist.StudentT(3, a, 1), obs=y)
            return a, None

        scan(next_time, jnp.zeros(()), jnp.ones(3))
        width = numpyro.sample("width", dist.LogNormal(0, 1))
        b = numpyro.sample("b", dist.GaussianRandomWalk(width, num_steps=4))
        numpyro.deterministic("sum", b.sum())

    position = {"a": 3, "b": 4, "tau": (), "width": ()}
    position = {
        n: random.normal(random.key(len(n)), np.empty(x).shape) for n, x in position.items()
    }
    shares = {
        "a": Path(np.full(1, 0.3), np.arange(3.0), np.full(1, 0.7)),
        "b": Path(np.zeros(1), np.ones(4), np.full(1, 1.2)),
    }
    assert_density(model, shares, position)


def test_a_density_of_sums_in_other_coordinates(x64: None) -> None:
    """The same for innovations, with a factor and without."""

    def model() -> None:
        tau = numpyro.sample("tau", dist.LogNormal(0, 1))
        a = numpyro.sample("a", dist.Normal(0, 1).expand([4]).to_event(1))
        width = numpyro.sample("width", dist.LogNormal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, width).expand([3, 2]).to_event(2))
        numpyro.deterministic("sum", b.sum())
        x = jnp.concatenate([tau * jnp.cumsum(a), jnp.cumsum(b, 0).ravel()])
        numpyro.sample("y", dist.Normal(x, 1).to_event(1), obs=jnp.ones(10))

    shapes = {"a": (4,), "b": (3, 2), "tau": (), "width": ()}
    position = {n: random.normal(random.key(len(n)), x) for n, x in shapes.items()}
    shares = {
        "a": Sum(np.full(1, 0.3), np.arange(4.0), np.full(1, 0.7)),
        "b": Sum(np.zeros((1, 1)), np.ones((3, 2)), np.full((1, 1), 1.2)),
    }
    assert_density(model, shares, position)
    level = read(model).replace(shares=shares).constrain(position)
    expected = 1 + (level["width"] / 1.2) * (position["b"] - 1)
    np.testing.assert_allclose(np.cumsum(level["b"], axis=0), expected, rtol=1e-10)


def test_a_density_of_products_in_other_coordinates(x64: None) -> None:
    """The same for values that a scale multiplies, alone and by group; the scale's own too."""

    def model() -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.LogNormal(0, 1).expand([4]))
        a = numpyro.sample("a", dist.Normal(0, 1).expand([2, 4]).to_event(2))
        b = numpyro.sample("b", dist.Normal(0, 2).expand([3]).to_event(1))
        numpyro.deterministic("sum", a.sum())
        numpyro.sample("y", dist.StudentT(3, mu + tau * a, 1).to_event(2), obs=jnp.ones((2, 4)))
        numpyro.sample("x", dist.StudentT(3, tau[0] * b, 1).to_event(1), obs=jnp.ones(3))

    shapes = {"a": (2, 4), "b": (3,), "mu": (), "tau": (4,)}
    position = {n: random.normal(random.key(len(x)), x) for n, x in shapes.items()}
    shares = {"a": Product(np.full((2, 4), 0.3)), "b": Product(np.array([0.0, 0.5, 1.0]))}
    shares["tau"] = Positive(np.array([0.0, 0.25, 4.0, 1e9]))
    assert set(unmeasured(read(model), position)) == {"a", "b", "tau"}
    assert_density(model, shares, position)
    # logarithms far below 1 / k, and linear far above it
    u = np.array([-90.0, -60.0, 200.0])
    np.testing.assert_allclose(Positive(np.ones(3)).x_of(u), [-90.0, -60.0, np.log(200.0)])
    np.testing.assert_allclose(
        Positive(np.ones(3)).u_of(np.array([-90.0, -60, 6])), [*u[:2], np.exp(6)]
    )
    slope = jax.vmap(jax.grad(lambda u: Positive(np.ones(())).x_of(u)))(u)
    np.testing.assert_allclose(slope, [1, 1, 1 / 200])


def assert_density(model: Any, shares: Any, position: Any) -> None:
    changed = read(model).replace(shares=shares)
    values = changed.constrain(position)
    of_sum = "a" if "mu" in position else "b"
    np.testing.assert_allclose(values["sum"], values[of_sum].sum())
    back = changed.unconstrain({name: values[name] for name in position})
    for name, x in position.items():
        np.testing.assert_allclose(back[name], x, rtol=1e-10)

    def flat_values(flat: jax.Array) -> jax.Array:
        found = changed.constrain(unravel(flat))
        return ravel_pytree({name: found[name] for name in position})[0]

    flat, unravel = ravel_pytree(position)
    jacobian = jax.jacobian(flat_values)(flat)
    expected = -log_density(model, (), {}, values)[0] - jnp.linalg.slogdet(jacobian)[1]
    np.testing.assert_allclose(changed.energy(position), expected, rtol=1e-10)


def test_new_data_in_a_compiled_program_have_their_own_shares() -> None:
    """With the data as arguments, a run on data with other shares is that of a new `MCMC`."""
    settings = {"num_warmup": 4, "num_samples": 4, "progress_bar": False, "jit_model_args": True}
    mcmc, other = (MCMC(SGHMC(schools), **settings) for _ in range(2))
    mcmc.run(random.key(0), SDS / 30, EFFECTS)
    before = mcmc.sampler.bound.shares
    for one in (mcmc, other):
        one.run(random.key(0), SDS, EFFECTS)
        assert not alike(one.sampler.bound.shares, before)
    for name, x in other.get_samples().items():
        np.testing.assert_array_equal(mcmc.get_samples()[name], x)


def test_a_rate_that_was_far_off_is_measured_again() -> None:
    """In a funnel rows seem to know more of a small scale than they do."""
    near, far, none = ({"tau": Positive(np.float32(x))} for x in (2.0, 0.5, 0.0))
    assert alike(near, {"tau": Positive(np.float32(8.0))})
    assert not alike({"tau": Positive(np.float32(4.0))}, far)
    assert not alike(far, none)
    assert alike(none, none)


def groups_of(sizes: Any, width: Any, y: Any) -> None:
    tau = numpyro.sample("tau", dist.LogNormal(0, 1))
    with numpyro.plate("groups", len(sizes)):
        level = numpyro.sample("level", dist.Normal(0, tau * jnp.array(width)))
    with numpyro.plate("fixed", len(sizes)):
        numpyro.sample("other", dist.Normal(0, 0.1))  # a scale that is known makes no funnel
    group = jnp.repeat(jnp.arange(len(sizes)), jnp.asarray(sizes), total_repeat_length=len(y))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Normal(level[group[i]], 2), obs=y[i])


def by_hessian(model: Any, position: Any) -> Any:
    """The variances of parameters given all others, by the Hessian at a position."""
    flat, unravel = ravel_pytree(position)

    def variance(index: np.ndarray) -> jax.Array:
        hessian = jax.hessian(lambda x: model.energy(unravel(x)))(flat)
        within = jnp.linalg.inv(hessian[np.ix_(index, index)])
        return jnp.ones_like(flat).at[index].set(jnp.diag(within))

    return variance


@pytest.mark.parametrize(
    ("sizes", "width", "found"),
    [
        ((1, 4, 36), (1, 1, 1), True),
        ((16, 16, 16), (1, 1, 1), True),  # c is .8, but .34 at the lower scale of three groups
        ((36,) * 24, (1,) * 24, False),  # .9, and .82 at that of 24
        ((400,) * 3, (1,) * 3, False),  # .99, and .94; three groups leave log tau open, but not 0
        ((36, 36, 36), (1, 1, 0.5), True),  # .04 for the third: its scale is its own
    ],
)
def test_shares_are_those_of_the_rows(sizes: tuple, width: tuple, found: bool) -> None:
    """At a scale that is two standard deviations lower, as groups of equal scales know its log."""
    y = jnp.zeros(sum(sizes))
    model = read(groups_of, (sizes, width, y))
    n = len(sizes)
    position = {"level": jnp.ones(n), "other": jnp.zeros(n), "tau": jnp.zeros(())}  # tau is 1
    shares = find_shares(model, position, by_hessian(model, position), unmeasured(model, position))

    def rows_of(low: Any) -> Any:
        precision = np.array(sizes) / 4
        return precision / (precision + (np.array(width) * low) ** -2.0)

    information = [sum(2 * rows_of(1)[np.array(width) == w] ** 2) for w in width]
    expected = rows_of(np.exp(-2 / np.sqrt(information)))
    assert (expected.min() < 0.75) == found
    assert alike(shares, unmeasured(model, position)) != found
    np.testing.assert_allclose(shares["level"], expected, atol=1 / 32)
    # tau = 1 is the scale of the first groups
    of_it = np.array(sizes)[np.array(width) == 1] / 4
    rate = 2 * (np.sum(of_it**2) / 2) ** 0.25
    rate *= np.exp(-2 / np.sqrt(information[0])) * rate < 4
    assert 2**-0.5 * rate <= shares["tau"].rate <= 2**0.5 * rate
    ones = unmeasured(model, position)
    within = jax.jit(lambda z: (find_shares(model, z, by_hessian(model, z), ones), z)[1])
    assert within(position)["tau"] == 0


def test_shares_of_values_that_lean_on_each_other() -> None:
    """The rows know the sum of coefficients whose columns are nearly equal, and little of each."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 1)) + 0.1 * rng.normal(size=(50, 6))

    def model(X: Any) -> None:
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        w = numpyro.sample("w", dist.Normal(0, tau).expand([6]).to_event(1))
        with numpyro.plate("rows", 50) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 10), obs=jnp.ones(len(i)))

    found = read(model, (jnp.asarray(X),))
    position = {"tau": jnp.zeros(()), "w": jnp.zeros(6)}
    shares = find_shares(found, position, by_hessian(found, position), unmeasured(found, position))
    precision = 1 / np.diag(np.linalg.inv(X.T @ X / 100 + np.eye(6)))
    ratio = (precision - 1) * np.exp(-4 / np.sqrt(np.sum(2 * (1 - 1 / precision) ** 2)))
    np.testing.assert_allclose(shares["w"], 1 - 1 / (1 + ratio), atol=1 / 32)


@pytest.mark.parametrize(
    ("effect", "found"),
    [
        (lambda z, tau, mu: mu + tau * z, True),
        (lambda z, tau, mu: mu + (tau / (1 + tau)) ** 0.5 * z, True),
        (lambda z, tau, mu: tau * z[jnp.array([2, 0, 1])], True),
        (
            lambda z, tau, mu: jnp.array([1.0, 2, 3]) * tau * z[jnp.array([2, 0, 1])],
            False,
        ),  # by row
        (lambda z, tau, mu: tau * jnp.cumsum(z), False),  # a sum
        (lambda z, tau, mu: lax.scan(lambda x, z: (x + tau * z,) * 2, mu, z)[1], False),
        (lambda z, tau, mu: mu * z, False),  # not positive
        (lambda z, tau, mu: (1 + tau * mu) * z, False),
        (lambda z, tau, mu: tau * z + 0.1 * z**2, False),  # not alone
        (lambda z, tau, mu: tau + z, False),
        (lambda z, tau, mu: 2.0 * z, False),  # no parameter
    ],
)
def test_what_is_a_product(effect: Any, found: bool) -> None:
    def model() -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", 3):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(effect(z, tau, mu), 1), obs=jnp.ones(3))

    position = {"mu": jnp.ones(()), "tau": jnp.zeros(()), "z": jnp.ones(3)}
    assert set(unmeasured(read(model), position)) == ({"z", "tau"} if found else set())


@pytest.mark.parametrize(
    ("scale", "effect", "found"),
    [
        (1.0, lambda z, tau, mu: tau * jnp.cumsum(z), True),
        (1.0, lambda z, tau, mu: lax.scan(lambda x, z: (x + tau * z,) * 2, mu, z)[1], True),
        (1.0, lambda z, tau, mu: mu * jnp.cumsum(z), False),  # not positive
        (1.0, lambda z, tau, mu: lax.scan(lambda x, z: (x + mu * z,) * 2, mu, z)[1], False),
        (1.0, lambda z, tau, mu: jnp.cumsum(z), False),  # no parameter
        (None, lambda z, tau, mu: jnp.cumsum(z), True),
        (None, lambda z, tau, mu: mu * jnp.cumsum(z), False),
    ],
)
def test_what_may_be_a_sum(scale: Any, effect: Any, found: bool) -> None:
    """Innovations with a positive factor, or a scale (None for tau) and no factor."""

    def model() -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        z = numpyro.sample("z", dist.Normal(0, scale or tau).expand([40]).to_event(1))
        numpyro.sample("y", dist.Normal(effect(z, tau, mu), 1).to_event(1), obs=jnp.ones(40))

    position = {"mu": jnp.ones(()), "tau": jnp.zeros(()), "z": jnp.ones(40)}
    assert (set(find_sums(read(model), position)) == {"z"}) is found


def test_shares_do_not_depend_on_how_a_model_is_written() -> None:
    """Values z ~ N(0, 1) times tau have the shares of values ~ N(0, tau)."""
    sizes, y = (1, 4, 36, 100, 400), jnp.linspace(-1, 1, 541)
    group = np.repeat(np.arange(5), sizes)

    def model(centred: bool) -> None:
        tau = numpyro.sample("tau", dist.LogNormal(0, 1))
        with numpyro.plate("groups", 5):
            x = numpyro.sample("x", dist.Normal(0, tau if centred else 1))
        level = x if centred else tau * x
        numpyro.sample("y", dist.Normal(level[group], 2).to_event(1), obs=y)

    log_tau, level = jnp.array(-0.7), jnp.linspace(-0.5, 0.5, 5)
    found = []
    for centred in (True, False):
        written = read(model, (centred,))
        x = level if centred else level / jnp.exp(log_tau)
        position = {"tau": log_tau, "x": x}
        share = find_shares(
            written, position, by_hessian(written, position), unmeasured(written, position)
        )["x"]
        found.append(share if centred else share.share)
    np.testing.assert_allclose(*found, atol=1 / 16)
    assert found[0].min() < 0.1
    assert found[0].max() > 0.8


def series(step: Any, y: Any) -> None:
    tau = numpyro.sample("tau", dist.LogNormal(0, 1))

    def next_time(before: Any, y: Any) -> tuple:
        level = numpyro.sample("level", dist.Normal(before, step(tau, before)))
        numpyro.sample("y", dist.Normal(level, 1), obs=y)
        return level, None

    scan(next_time, jnp.zeros(()), y)


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (lambda tau, before: tau, True),
        (lambda tau, before: 1.0, False),
        (lambda tau, before: tau * jnp.exp(before), False),
    ],
    ids=["shared", "known", "of the times"],
)
def test_the_share_of_a_series_is_its_mean_over_frequencies(step: Any, found: bool) -> None:
    """Of the frequency w the rows have the share 1 / (1 + |1 - exp(i w)|^2 / tau^2)."""
    size, tau = 2000, 0.3
    model = read(series, (step, jnp.zeros(size)))
    differences = np.eye(size) - np.eye(size, k=-1)
    precision = differences.T @ differences / tau**2 + np.eye(size)
    away = np.linalg.solve(
        np.linalg.cholesky(precision).T, np.random.default_rng(0).normal(size=size)
    )
    position = {"level": jnp.ones(size), "tau": jnp.log(tau)}
    paths = find_paths(model, {"level": Path}, position, {"level": jnp.asarray(away, jnp.float32)})
    assert bool(paths) is found
    for path in paths.values():
        # the mean of 2000 squares of variance 1 - share has the standard error .03
        np.testing.assert_allclose(path.share, 1 / np.sqrt(1 + 4 / tau**2), atol=0.09 + 1 / 32)
        np.testing.assert_allclose(path.width, tau, rtol=1e-5)


def schools_apart(sds: Any, effects: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(sds)):
        z = numpyro.sample("theta", dist.Normal(0, 1))
        numpyro.sample("effect", dist.Normal(mu + tau * z, sds), obs=effects)


def exact_log_tau() -> tuple[float, float]:
    """Mean and sd of log tau by quadrature over mu and log tau."""
    mu = np.linspace(-25, 35, 601)[:, None, None]
    log_tau = np.linspace(-9, 6, 1501)[:, None]
    variance = np.exp(2 * log_tau) + SDS**2
    log_p = -0.5 * (np.log(variance) + (EFFECTS - mu) ** 2 / variance).sum(-1)
    log_p += -0.5 * mu[..., 0] ** 2 / 25 - np.log1p(np.exp(2 * log_tau[:, 0]) / 25) + log_tau[:, 0]
    p = np.exp(log_p - log_p.max()).sum(0)
    p /= p.sum()
    mean = (p * log_tau[:, 0]).sum()
    return mean, ((p * (log_tau[:, 0] - mean) ** 2).sum()) ** 0.5


def test_a_search_in_new_coordinates_starts_at_the_centre_of_the_present_ones() -> None:
    """And not at the first start, from where it may end elsewhere."""
    kernel, data = SGHMC(schools), (jnp.asarray(SDS), jnp.asarray(EFFECTS))
    state = kernel.init(random.key(0), 100, None, data, {})
    before = kernel.bound.on(data, {})
    assert before.shares
    centre = dict(zip(state.z, jnp.split(state.scale.centre, [1, 2]), strict=True))
    centre = {n: x.reshape(state.z[n].shape) for n, x in centre.items()}
    expected = before.model.constrain(centre)
    for shares in ({}, {"theta": np.linspace(0, 1, 8, dtype="f4")}):
        after = before.with_shares(shares)
        position = centre_in(before, after, state, state.z)
        found = after.model.constrain(position)
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-4)
        unusable = state._replace(scale=state.scale._replace(centre=jnp.nan * state.scale.centre))
        kept = centre_in(before, after, unusable, state.z)
        assert all(np.array_equal(kept[n], x) for n, x in state.z.items())


@pytest.mark.slow
def test_a_search_in_a_funnel_does_not_decide() -> None:
    """400 groups of 5 answers: by one measurement the share is .31, as at tau = .6."""
    group = np.repeat(np.arange(400), 5)
    rng = np.random.default_rng(0)
    p = 1 / (1 + np.exp(-0.5 * rng.normal(size=400)[group]))

    def answers(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.LogNormal(-1, 1))
        with numpyro.plate("levels", 400):
            level = numpyro.sample("level", dist.Normal(mu, tau))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Bernoulli(logits=level[jnp.asarray(group)[i]]), obs=y[i])

    kernel = SGHMC(answers)
    y = jnp.asarray(rng.uniform(size=group.size) < p, jnp.float32)
    kernel.init(random.key(1), 1000, None, (y,), {})
    # NUTS finds tau between .08 and .5 in nine of ten draws: shares of .01 to .24
    assert kernel.bound.shares["level"].max() < 0.25


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("kernel", short([GGMC, SGHMC], kept=[SGHMC]))
def test_eight_schools_as_everybody_writes_them(kernel: Any, centred: bool) -> None:
    """Centred by all shares of 1, log tau has an ESS of 3 and of 70, and an sd of 1.0."""
    mean, sd = exact_log_tau()
    mcmc = vectorized(kernel(schools if centred else schools_apart), 500, 1500, 2)
    mcmc.run(random.key(0), jnp.asarray(SDS), jnp.asarray(EFFECTS))
    assert mcmc.get_samples().keys() == {"mu", "tau", "theta"}
    x = np.log(np.asarray(mcmc.get_samples(group_by_chain=True)["tau"], float))
    ess = effective_sample_size(x)
    assert ess > 1000
    assert abs(x.mean() - mean) / sd * ess**0.5 < 4
    # the fourth moment of log tau is 6.1 times the squared variance, by quadrature
    assert abs(x.var() / sd**2 - 1) < 0.1 * (kernel is SGHMC) + 4 * (5.1 / ess) ** 0.5


@pytest.mark.slow  # `test_what_is_a_product` shows a product that is not seen at once
def test_a_model_written_non_centred_costs_what_the_other_one_does() -> None:
    """6,000 matches of 60 players: in z, a draw takes 11 steps, not 8, and s has half the ESS."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 60, 6000)
    second = (first + rng.integers(1, 60, 6000)) % 60
    skill = 0.8 * rng.normal(size=60)
    won = rng.random(6000) < 1 / (1 + np.exp(skill[second] - skill[first]))

    def matches(centred: bool) -> None:
        s = numpyro.sample("s", dist.HalfNormal(1))
        with numpyro.plate("players", 60):
            x = numpyro.sample("x", dist.Normal(0, s if centred else 1))
        x = x if centred else s * x
        with numpyro.plate("matches", 6000) as i:
            x = x[jnp.asarray(first)[i]] - x[jnp.asarray(second)[i]]
            numpyro.sample("won", dist.Bernoulli(logits=x), obs=jnp.asarray(won)[i])

    moments, steps = [], []
    for centred in (True, False):
        mcmc = MCMC(SGHMC(matches), num_warmup=300, num_samples=250, progress_bar=False)
        mcmc.run(random.key(0), centred, extra_fields=("num_steps",))
        s = np.asarray(mcmc.get_samples()["s"], float)
        assert effective_sample_size(s[None]) > 250
        moments.append((s.mean(), s.std() / 250**0.5))
        steps.append(mcmc.get_extra_fields()["num_steps"].mean())
    (first_mean, first_error), (second_mean, second_error) = moments
    assert abs(first_mean - second_mean) < 4 * np.hypot(first_error, second_error)
    assert steps[1] < 1.2 * steps[0]


def walk(written: str, y: Any) -> None:
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    sd = tau if written == "innovations" else 1.0
    z = numpyro.sample("z", dist.Normal(0, sd).expand([len(y)]).to_event(1))
    if written in ("cumsum", "innovations"):
        x = (tau if written == "cumsum" else 1.0) * jnp.cumsum(z)
    else:
        kept = 0.5 if written == "stationary" else 1.0
        x = lax.scan(lambda x, z: (kept * x + tau * z,) * 2, 0.0, z)[1]
    numpyro.sample("y", dist.Normal(x, 0.2).to_event(1), obs=y)


def exact_walk(y: np.ndarray) -> tuple[float, float]:
    """Mean and sd of tau of `walk`, by quadrature: y ~ N(0, tau^2 C + .04 I)."""
    size = len(y)
    eigenvalues, vectors = np.linalg.eigh(np.minimum(*np.indices((size, size))) + 1.0)
    tau = np.linspace(1e-3, 1, 1000)[:, None]
    variance = tau**2 * eigenvalues + 0.04
    log_p = -0.5 * np.sum(np.log(variance) + (vectors.T @ y) ** 2 / variance, 1)
    log_p -= tau[:, 0] ** 2 / 2
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p @ tau[:, 0]
    return mean, (p @ (tau[:, 0] - mean) ** 2) ** 0.5


@pytest.mark.parametrize(
    "written", short(["cumsum", "scan", "innovations", "stationary"], kept=["scan", "stationary"])
)
def test_a_walk_may_be_written_by_its_innovations(written: str) -> None:
    """A draw takes some ten steps, as of a `GaussianRandomWalk`; in z hundreds."""
    rng = np.random.default_rng(0)
    y = np.cumsum(0.3 * rng.normal(size=300)) + 0.2 * rng.normal(size=300)
    kernel = SGHMC(walk)
    mcmc = MCMC(kernel, num_warmup=300, num_samples=500, progress_bar=False)
    mcmc.run(random.key(0), written, jnp.asarray(y), extra_fields=("num_steps",))
    if written == "stationary":  # its times depend on all earlier sums
        assert "z" not in mcmc.sampler.bound.shares
        assert mcmc.get_samples()["tau"].min() > 0.2  # near 0 is density without mass
        return
    assert isinstance(mcmc.sampler.bound.shares["z"], Sum)
    assert mcmc.get_extra_fields()["num_steps"].mean() < 20
    tau = np.asarray(mcmc.get_samples()["tau"], float)
    mean, sd = exact_walk(y)
    ess = effective_sample_size(tau[None])
    assert ess > 200
    assert abs(tau.mean() - mean) / sd * ess**0.5 < 4
    assert abs(tau.var() / sd**2 - 1) < 0.05 + 4 * (2 / ess) ** 0.5
    z = np.asarray(mcmc.get_samples()["z"], float)
    squares = np.mean(z**2, 1) / (tau**2 if written == "innovations" else 1)
    # their prior is N(0, 1), and rows know little of each
    assert abs(squares.mean() - 1) < 0.1


@pytest.mark.parametrize("key", short([0, 1, 2], kept=[1]))
def test_the_law_of_a_start_has_arrived_at_the_scale_of_a_series(key: int) -> None:
    """Each step towards the scale is short, because the path follows the scale."""
    num_times = 500
    level = np.cumsum(0.1 * np.random.default_rng(8).normal(size=num_times))
    y = np.exp(level / 2) * np.random.default_rng(9).normal(size=num_times)

    def model() -> None:
        s = numpyro.sample("s", dist.Exponential(10.0))
        m = numpyro.sample("m", dist.Normal(0, 2))
        h = numpyro.sample("h", dist.GaussianRandomWalk(s, num_steps=num_times))
        numpyro.sample("y", dist.Normal(0, jnp.exp((m + h) / 2)), obs=jnp.asarray(y, jnp.float32))

    state = SGHMC(model).init(random.key(key), 100, None, (), {})
    found = ravel_pytree(state.z)[1](state.scale.centre)
    # of log s by NUTS on the sums of innovations, with an effective sample size of 860
    mean, sd = -2.341, 0.238
    assert abs(found["s"] - mean) < 1.5 * sd


def test_other_starts_and_metrics() -> None:
    data = jnp.asarray(SDS), jnp.asarray(EFFECTS)
    kernel = SGRLD(schools, metric="rmsprop", dense_mass=False)
    kernel.init(random.key(0), 10, None, data, {})
    assert kernel.bound.shares.keys() == {"theta", "tau"}
    first = kernel.bound.shares["theta"]
    state = kernel.init(random.key(1), 10, None, data, {})  # another chain of the same run
    np.testing.assert_array_equal(kernel.bound.shares["theta"], first)
    # values of the user are the model's own
    given = {"mu": 1.0, "tau": 0.5, "theta": np.arange(8.0)}
    given = {name: jnp.asarray(x) for name, x in given.items()}
    state = kernel.init(random.key(0), 10, given, data, {})
    assert not kernel.bound.shares
    values = kernel.postprocess_fn(data, {})(state.z)
    np.testing.assert_allclose(values["theta"], given["theta"])
