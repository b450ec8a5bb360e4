"""Stein discrepancies: algebra, closed forms, biased samplers, the test, thinning, scores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy
from scipy import stats
from targets import linear, linear_moments, local_latents, regression, regression_data

from numpyro_geom import SGRLD, to_inference_data
from numpyro_geom.diagnostics import stein
from numpyro_geom.diagnostics.stein import (
    ScoredDraws,
    diagonal,
    ksd,
    ksd_test,
    scores,
    stein_kernel,
    thin,
    whiten,
)

UNIT = [1.0]
"""The preconditioner of all comparisons in one dimension."""
GRID = np.linspace(-12, 12, 200_001)


def generated(num_draws: int, dim: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Correlated draws and scores that have little to do with them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_draws, dim)) @ rng.normal(size=(dim, dim)) + 3.0
    return x, rng.normal(size=(num_draws, dim)) - 0.3 * x


def by_autodiff(root: np.ndarray) -> Callable:
    """k0(x, y) = the Stein operator S of both arguments applied to k, by forward mode."""
    precision = np.linalg.inv(root @ root.T)

    def k(x: jax.Array, y: jax.Array) -> jax.Array:
        return 1 / jnp.sqrt(1 + (x - y) @ precision @ (x - y))

    def k0(x: jax.Array, y: jax.Array, s_x: jax.Array, s_y: jax.Array) -> jax.Array:
        in_x, in_y = jax.grad(k, 0)(x, y), jax.grad(k, 1)(x, y)
        both = jax.jacfwd(jax.grad(k, 0), 1)(x, y)
        S = root @ root.T
        return jnp.trace(S @ both) + s_y @ S @ in_x + s_x @ S @ in_y + (s_x @ S @ s_y) * k(x, y)

    over_y = jax.vmap(k0, (None, 0, None, 0))
    return jax.jit(jax.vmap(over_y, (0, None, 0, None)))


# --- algebra


@pytest.mark.parametrize("kind", ["identity", "scale", "covariance", "median"])
def test_kernel_agrees_with_autodiff_and_sums_with_a_double_loop(kind: str, x64: None) -> None:
    x, s = generated(23, 3)
    centred = x - x.mean(0)
    distance = [np.linalg.norm(a - b) for i, a in enumerate(x) for b in x[:i]]
    roots = {
        "identity": np.eye(3),
        "scale": np.diag(centred.std(0)),
        "covariance": np.linalg.cholesky(np.cov(x, rowvar=False)),
        "median": np.median(distance) * np.eye(3),
    }
    expected = np.asarray(by_autodiff(roots[kind])(x, x, s, s))
    at = whiten(x, s, kind)
    np.testing.assert_allclose(stein_kernel(at, at), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(diagonal(at), np.diag(expected), rtol=1e-10)
    total = sum(expected[i, j] for i in range(23) for j in range(23) if i != j)
    full = total + sum(expected[i, i] for i in range(23))
    for chunk in (1, 8, 23, 64):  # neither divides, nor fills the last
        v = ksd(x, s, precondition=kind, chunk_size=chunk)
        u = ksd(x, s, precondition=kind, chunk_size=chunk, statistic="U")
        np.testing.assert_allclose([v, u], [full / 23**2, total / (23 * 22)], rtol=1e-9)


def test_single_precision_far_from_the_origin() -> None:
    x, s = generated(300, 4)
    with jax.enable_x64(True):
        exact = ksd(x, s), ksd(x, s, statistic="U")
    # the draws are exact in float64; 1e6 standard deviations away float32 has three bits left
    found = ksd(x + 1e6, s), ksd(x + 1e6, s, statistic="U")
    np.testing.assert_allclose(found, exact, rtol=1e-4)


def test_units_and_affine_maps_do_not_matter(x64: None) -> None:
    x, s = generated(23, 3)
    scale, shift = np.array([1e-3, 1.0, 1e4]), np.array([5.0, 0.0, -7.0])
    np.testing.assert_allclose(ksd(x * scale + shift, s / scale), ksd(x, s), rtol=1e-9)
    A = np.random.default_rng(3).normal(size=(3, 3))
    moved = ksd(x @ A.T, s @ np.linalg.inv(A), precondition="covariance")
    np.testing.assert_allclose(moved, ksd(x, s, precondition="covariance"), rtol=1e-9)
    plain = ksd(x * scale, s / scale, precondition="identity")
    assert not np.isclose(plain, ksd(x, s, precondition="identity"), rtol=0.5)


def test_arrays_as_preconditioners_and_chains(x64: None) -> None:
    x, s = generated(24, 3)
    variances, matrix = x.var(0), np.cov(x, rowvar=False)
    assert ksd(x, s, precondition=variances) == pytest.approx(ksd(x, s), rel=1e-12)
    assert ksd(x, s, precondition=np.diag(variances)) == pytest.approx(ksd(x, s), rel=1e-10)
    assert ksd(x, s, precondition=matrix) == ksd(x, s, precondition="covariance")
    assert ksd(x, s, precondition=1.0) == ksd(x, s, precondition="identity")
    chains = x.reshape(4, 6, 3), s.reshape(4, 6, 3)
    assert ksd(*chains) == ksd(x, s)


@pytest.mark.parametrize(("mean", "sd"), [(0.5, 1.0), (0.0, 1.2), (0.0, 0.8), (-0.3, 1.1)])
def test_gaussian_against_gaussian_in_closed_form(mean: float, sd: float, x64: None) -> None:
    """KSD^2 = E[d(x) k(x, y) d(y)], d the difference of the scores of draws and target."""
    nodes = np.linspace(mean - 9 * sd, mean + 9 * sd, 1201)
    weights = stats.norm.pdf(nodes, mean, sd) * (nodes[1] - nodes[0])
    d = weights * (nodes - (nodes - mean) / sd**2)
    expected = d @ (1 / np.sqrt(1 + (nodes[:, None] - nodes) ** 2)) @ d
    # draws at quantiles: no Monte Carlo error, an O(1 / n) one from the tails
    x = stats.norm.ppf((np.arange(2000) + 0.5) / 2000, mean, sd)[:, None]
    assert ksd(x, -x, precondition=UNIT) == pytest.approx(expected, rel=2e-3)


def test_mean_of_both_statistics_on_exact_draws() -> None:
    """E[U] = 0 and E[V] = E[k0(x, x)] / n = (D + E|x|^2) / n = 2 D / n."""
    rng = np.random.default_rng(1)
    found = np.empty((300, 2))
    for k in range(300):
        x = rng.normal(size=(100, 2))
        found[k] = [ksd(x, -x, precondition="identity", statistic=name) for name in "UV"]
    error = found.std(0, ddof=1) / np.sqrt(300)
    # two comparisons at 4 standard errors: one false alarm in 8,000
    assert (np.abs(found.mean(0) - [0.0, 0.04]) < 4 * error).all()
    assert (found[:, 1] > 0).all()
    assert error[1] < 0.001  # 4 of them tell 0.04 from 0


def test_memory_does_not_grow_with_the_square_of_the_draws() -> None:
    chunks, chunk, dim = 200, 512, 10
    shapes = [jax.ShapeDtypeStruct((chunks, chunk, k), np.float32) for k in (dim, dim, 1)]
    compiled = stein._forms.lower(*shapes).compile()
    # 102,400 draws have a kernel of 42 GB
    assert compiled.memory_analysis().temp_size_in_bytes < 60e6


# --- biased and unbiased samplers


@cache
def oracle(name: str) -> np.ndarray:
    """Cumulative distribution on the grid of what samplers of N(0, 1) leave invariant."""
    x = np.abs(GRID)
    factor = {
        "exact": np.ones_like(x),
        "rmsprop published": (0.1 + x) ** 0.9,
        "monge none": 1 + x**2,
        "shampoo none": x,
        "Adam-SGLD": np.exp(-x) * (x + 0.1) ** 0.1,
    }
    density = np.exp(-(GRID**2) / 2) * factor[name]
    return np.cumsum(density) / density.sum()


def draws_of(name: str, uniforms: np.ndarray) -> np.ndarray:
    return np.interp(uniforms, oracle(name), GRID)[:, None]


def total_variation(name: str) -> float:
    return float(np.abs(np.diff(oracle(name)) - np.diff(oracle("exact"))).sum() / 2)


ORACLES = ("exact", "Adam-SGLD", "monge none", "rmsprop published", "shampoo none")


def test_ranks_the_oracles_as_total_variation_does(x64: None) -> None:
    distance = [total_variation(name) for name in ORACLES]
    assert (np.diff(distance) > 0).all()
    even = (np.arange(2000) + 0.5) / 2000
    values = [ksd(x, -x, precondition=UNIT) for x in (draws_of(name, even) for name in ORACLES)]
    assert (np.diff(values) > 0).all()
    assert values[0] < 1e-6


def test_ranks_the_oracles_from_random_draws() -> None:
    rng = np.random.default_rng(2)
    clear = ("exact", "Adam-SGLD", "monge none", "shampoo none")
    # 500 draws: sd of V .0035 exact, .009 .015 .014 biased (measured); gaps are above .06
    for _ in range(20):
        drawn = [draws_of(name, rng.uniform(size=500)) for name in clear]
        assert (np.diff([ksd(x, -x, precondition=UNIT) for x in drawn]) > 0).all()
        # also with the spread of the draws themselves, where order among the biased may differ
        own = [ksd(x, -x) for x in drawn]
        assert max(own[0], 0.02) < min(own[1:])


def test_grows_with_the_error_of_the_variance(x64: None) -> None:
    x = stats.norm.ppf((np.arange(2000) + 0.5) / 2000)[:, None]
    for sds in ([1.0, 1.05, 1.1, 1.2, 1.4], [1.0, 0.95, 0.9, 0.8, 0.6]):
        values = [ksd(sd * x, -sd * x, precondition=UNIT) for sd in sds]
        assert (np.diff(values) > 0).all()


# --- the test

NUM_TESTS, TEST_DRAWS, BOOTSTRAP = 300, 100, 199


@cache
def p_values(noise: float) -> np.ndarray:
    """Of tests on independent draws from the target, with this much noise in the scores."""
    rng = np.random.default_rng(4)
    found = np.empty(NUM_TESTS)
    for k in range(NUM_TESTS):
        x = rng.normal(size=(TEST_DRAWS, 1))
        s = -x + noise * rng.normal(size=x.shape)
        found[k] = ksd_test(x, s, random.key(k), num_bootstrap=BOOTSTRAP).p_value
    return found


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_p_values_are_uniform_on_exact_draws(noise: float) -> None:
    found = p_values(noise)
    # fixed seeds, false alarm rate 1e-3 each: Kolmogorov-Smirnov, and the binomial of rejections
    assert stats.kstest(found, "uniform").pvalue > 1e-3
    rejected = int((found <= 0.05).sum())
    low, high = stats.binom.interval(0.999, NUM_TESTS, 0.05)
    assert low <= rejected <= high


@pytest.mark.parametrize("sd", [0.8, 1.2])
def test_power_on_a_standard_deviation_wrong_by_a_fifth(sd: float) -> None:
    rng = np.random.default_rng(5)
    rejected = 0
    for k in range(20):
        x = sd * rng.normal(size=(500, 1))
        rejected += ksd_test(x, -x, random.key(k), num_bootstrap=BOOTSTRAP).p_value <= 0.05
    assert rejected >= 18


def test_result_of_the_test_and_its_key() -> None:
    x = np.random.default_rng(6).normal(size=(TEST_DRAWS, 1))
    found = ksd_test(x, -x, random.key(0), num_bootstrap=BOOTSTRAP)
    assert found.statistic == pytest.approx(ksd(x, -x, statistic="U"), rel=1e-4, abs=1e-6)
    assert found.bootstrap.shape == (BOOTSTRAP,)
    count = np.sum(found.bootstrap >= found.statistic)
    assert found.p_value == (1 + count) / (1 + BOOTSTRAP)
    again = ksd_test(x, -x, random.key(0), num_bootstrap=BOOTSTRAP)
    np.testing.assert_array_equal(again.bootstrap, found.bootstrap)
    other = ksd_test(x, -x, random.key(1), num_bootstrap=BOOTSTRAP)
    assert not np.array_equal(other.bootstrap, found.bootstrap)


def test_bootstrap_value_by_hand(x64: None) -> None:
    """U* of given weights, from the kernel itself."""
    x, s = generated(23, 3)
    at = whiten(x, s, "scale")
    weights = np.random.default_rng(0).multinomial(23, np.full(23, 1 / 23), size=4) / 23 - 1 / 23
    block = np.array(stein_kernel(at, at))
    np.fill_diagonal(block, 0)
    expected = [w @ block @ w for w in weights]
    found = stein.off_diagonal(at, jnp.asarray(weights.T), 8)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_noise_of_scores_is_in_v_and_not_in_u() -> None:
    rng = np.random.default_rng(7)
    x, noise = rng.normal(size=(100, 2)), 1.5
    kwargs: dict[str, Any] = {"precondition": "identity"}
    exact = np.array([ksd(x, -x, statistic=name, **kwargs) for name in "UV"])
    found = np.empty((300, 2))
    for k in range(300):
        s = -x + noise * rng.normal(size=x.shape)
        found[k] = [ksd(x, s, statistic=name, **kwargs) for name in "UV"]
    shift, error = found.mean(0) - exact, found.std(0, ddof=1) / np.sqrt(300)
    assert (np.abs(shift - [0.0, 2 * noise**2 / 100]) < 4 * error).all()
    assert shift[1] > 8 * error[1]


# --- thinning


def test_thinning_is_greedy(x64: None) -> None:
    x, s = generated(23, 3)
    at = whiten(x, s, "scale")
    block = np.asarray(stein_kernel(at, at))
    chosen: list[int] = []
    for _ in range(12):
        objective = [block[i, i] / 2 + sum(block[i, j] for j in chosen) for i in range(23)]
        chosen.append(int(np.argmin(objective)))
    found = thin(x, s, 12)
    assert found.tolist() == chosen
    assert found.dtype.kind == "i"
    assert thin(x, s, 5).tolist() == chosen[:5]


def test_thinning_leaves_burn_in_out_and_beats_every_kth_draw() -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(1000, 2))
    x[:100] += 6.0
    rows = thin(x, -x, 50, precondition=np.ones(2))
    assert (rows >= 100).all()
    chosen = ksd(x[rows], -x[rows], precondition="identity")
    every = np.arange(100, 1000, 18)  # burn-in taken away by hand
    assert chosen < 0.3 * ksd(x[every], -x[every], precondition="identity")


@pytest.mark.arviz
def test_indices_pick_draws_of_an_arviz_object() -> None:
    rng = np.random.default_rng(9)
    X, y = regression_data(20, 3)
    mean, covariance = linear_moments(X, y)
    w = rng.multivariate_normal(mean, covariance, size=(2, 50)).astype(np.float32)
    idata = az.from_dict(*([{"posterior": {"w": w}}] if az.__version__ >= "1" else [{"w": w}]))
    found = scores(linear, idata, X, y)
    rows = thin(*found, 10)
    posterior = getattr(idata.posterior, "dataset", idata.posterior)  # ArviZ 1.x has the former
    picked = posterior.stack(sample=("chain", "draw")).isel(sample=rows)
    np.testing.assert_array_equal(picked["w"].values.T, w.reshape(100, 3)[rows])
    np.testing.assert_array_equal(found.draws[rows], picked["w"].values.T)
    # the same from arrays with chains
    by_chain = [a.reshape(2, 50, 3) for a in found]
    np.testing.assert_array_equal(thin(*by_chain, 10), rows)


# --- scores of models


def test_scores_of_a_gaussian_posterior() -> None:
    X, y = regression_data(20, 3)
    mean, covariance = linear_moments(X, y)
    w = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    found = scores(linear, {"w": w}, X, y, draws_at_once=2)
    assert isinstance(found, ScoredDraws)
    np.testing.assert_array_equal(found.draws, w)
    expected = -(w - mean) @ np.linalg.inv(covariance)
    np.testing.assert_allclose(found.scores, expected, rtol=1e-3, atol=1e-3)
    again = scores(linear, {"w": w.reshape(1, 7, 3), "other": np.zeros(3)}, X, y=y)
    np.testing.assert_allclose(again.scores, found.scores, rtol=1e-5)


def test_scores_have_jacobians_and_the_order_of_names(x64: None) -> None:
    X, y = regression_data(20, 3)
    rng = np.random.default_rng(1)
    sample = {"w": rng.normal(size=(5, 3)), "s": rng.uniform(0.3, 2, size=5)}
    found = scores(regression, sample, X, y)
    flat = np.column_stack([np.log(sample["s"]), sample["w"]])
    np.testing.assert_allclose(found.draws, flat, rtol=1e-12)

    def minus_energy(x: jax.Array) -> jax.Array:
        return -potential_energy(regression, (X, y), {}, {"s": x[0], "w": x[1:]})

    expected = jax.jit(jax.vmap(jax.grad(minus_energy)))(flat)
    np.testing.assert_allclose(found.scores, expected, rtol=1e-9)


@pytest.mark.parametrize("model", [linear, local_latents])
def test_minibatch_scores_are_unbiased_and_differ_by_draw(model: Callable) -> None:
    """The same draw 4,000 times, each with its own minibatch."""
    X, y = regression_data(12, 2)
    rng = np.random.default_rng(2)
    if model is linear:
        args: tuple = (X, y)
        sample = {"w": rng.normal(size=2)}
    else:
        args = (y,)
        sample = {"mu": rng.normal(), "z": rng.normal(size=12)}
    copies = {name: np.broadcast_to(x, (4000, *np.shape(x))) for name, x in sample.items()}
    found = scores(model, copies, *args, batch_size=3, rng_key=random.key(0)).scores
    exact = scores(model, {n: x[:1] for n, x in copies.items()}, *args).scores[0]
    error = found.std(0, ddof=1) / np.sqrt(4000)
    assert (error > 0).all()
    # at most 13 entries at 4.5 standard errors: one false alarm in 10,000
    assert (np.abs(found.mean(0, dtype=np.float64) - exact) < 4.5 * error + 1e-4).all()


def test_full_scores_of_a_model_that_subsamples_itself() -> None:
    X, y = regression_data(20, 3)

    def itself(X: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("data", 20, subsample_size=5) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 0.5), obs=y[i])

    w = np.random.default_rng(0).normal(size=(4, 3))
    found, expected = scores(itself, {"w": w}, X, y), scores(linear, {"w": w}, X, y)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4, atol=1e-4)


def with_param(y: jax.Array) -> None:
    scale = numpyro.param("scale", 2.0)
    mu = numpyro.sample("a/mu", dist.Normal(0, scale))
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(mu, s), obs=y[i])


@pytest.mark.arviz
def test_scores_of_a_run_and_of_its_export() -> None:
    y = jnp.arange(5.0)
    kernel = SGRLD(with_param, step_size=0.01, num_steps=1)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0), y)
    found = scores(with_param, mcmc)  # on the arguments of the run, param sites as they were
    mu, log_s = found.draws.T.astype(np.float64)
    np.testing.assert_allclose(mu, mcmc.get_samples()["a/mu"], rtol=1e-6)
    precision = np.exp(-2 * log_s)
    square = ((np.arange(5.0)[:, None] - mu) ** 2).sum(0)
    by_hand = precision * (10 - 5 * mu) - mu / 4, precision * square - 5 - np.exp(2 * log_s) + 1
    np.testing.assert_allclose(found.scores, np.column_stack(by_hand), rtol=1e-4, atol=1e-4)
    fixed = numpyro.handlers.substitute(with_param, data={"scale": 2.0})
    idata = to_inference_data(mcmc)
    again = scores(fixed, idata, y)  # the slash in the name is a dot there
    np.testing.assert_allclose(again.scores, found.scores, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="param sites"):
        scores(with_param, idata, y)


def test_a_run_that_has_not_run() -> None:
    mcmc = MCMC(SGRLD(with_param), num_warmup=0, num_samples=5, progress_bar=False)
    with pytest.raises(ValueError, match="the MCMC has not run"):
        scores(with_param, mcmc)


# --- bad input

GOOD = np.random.default_rng(0).normal(size=(10, 2))
NAN = np.where(np.arange(10)[:, None] == 3, np.nan, GOOD)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (
            ValueError,
            r"statistic must be one of \['V', 'U'\]",
            lambda: ksd(GOOD, GOOD, statistic="W"),
        ),
        (
            ValueError,
            "at least two draws",
            lambda: ksd(GOOD[:1], GOOD[:1], statistic="U", precondition="identity"),
        ),
        (
            ValueError,
            "at least two draws",
            lambda: ksd_test(GOOD[:1], GOOD[:1], random.key(0), precondition="identity"),
        ),
        (ValueError, r"must have shape \(n, D\)", lambda: ksd(GOOD[:, 0], GOOD[:, 0])),
        (ValueError, r"must have shape \(n, D\)", lambda: ksd(GOOD[:0], GOOD[:0])),
        (ValueError, "must have one shape", lambda: ksd(GOOD, GOOD[:5])),
        (ValueError, "must have one shape", lambda: ksd(GOOD, GOOD.reshape(2, 5, 2))),
        (ValueError, "draws must be finite, and 1 of 10 .* number 3", lambda: ksd(NAN, GOOD)),
        (ValueError, "scores must be finite, and 1 of 10 .* number 3", lambda: ksd(GOOD, NAN)),
        (TypeError, "real numbers", lambda: ksd(GOOD.astype(complex), GOOD)),
        (ValueError, "precondition must be one of", lambda: ksd(GOOD, GOOD, precondition="sclmed")),
        (
            ValueError,
            "precondition must be one of",
            lambda: ksd(GOOD, GOOD, precondition=np.ones(3)),
        ),
        (ValueError, "finite positive variances", lambda: ksd(GOOD, GOOD, precondition=[1.0, 0.0])),
        (ValueError, "positive definite", lambda: ksd(GOOD, GOOD, precondition=-np.eye(2))),
        (
            ValueError,
            "positive definite",
            lambda: ksd(GOOD, GOOD, precondition=[[1.0, 1.0], [0.0, 1.0]]),
        ),
        (
            ValueError,
            "more than D = 2 distinct draws",
            lambda: ksd(GOOD[:2], GOOD[:2], precondition="covariance"),
        ),
        (ValueError, "1 of 2 coordinates have no spread", lambda: ksd(GOOD * [1, 0] + 0.1, GOOD)),
        (ValueError, "no spread", lambda: ksd(GOOD[:1], GOOD[:1], precondition="median")),
        (TypeError, "chunk_size must be an integer", lambda: ksd(GOOD, GOOD, chunk_size=2.5)),
        (TypeError, "single key", lambda: ksd_test(GOOD, GOOD, 0)),
        (ValueError, "num_bootstrap", lambda: ksd_test(GOOD, GOOD, random.key(0), num_bootstrap=0)),
        (ValueError, "num_points", lambda: thin(GOOD, GOOD, 0)),
    ],
)
def test_bad_arrays(error: type[Exception], match: str, call: Callable) -> None:
    with pytest.raises(error, match=match):
        call()


def bad_scores(sample: Any, **kwargs: Any) -> Callable:
    X, y = regression_data(20, 3)
    return lambda: scores(regression, sample, X, y, **kwargs)


W, S = np.zeros((5, 3)), np.ones(5)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (TypeError, "source must be an MCMC", bad_scores(W)),
        (ValueError, r"lack the latent sites \['s'\]", bad_scores({"w": W})),
        (ValueError, r"draws of site 'w' must have shape", bad_scores({"w": W[:, :2], "s": S})),
        (ValueError, r"draws of site 'w' must have shape", bad_scores({"w": W[0], "s": S})),
        (ValueError, "same number of draws", bad_scores({"w": W, "s": S[:3]})),
        (ValueError, "needs a single rng_key", bad_scores({"w": W, "s": S}, batch_size=5)),
        (
            ValueError,
            "unknown plates",
            bad_scores({"w": W, "s": S}, batch_size={"x": 1}, rng_key=random.key(0)),
        ),
        (TypeError, "draws_at_once", bad_scores({"w": W, "s": S}, draws_at_once=1.5)),
        (
            ValueError,
            r"2 of 5 draws are not finite .* number 1, in the sites \['s'\]",
            bad_scores({"w": W, "s": np.array([1.0, 0.0, 1.0, -1.0, 1.0])}),
        ),
        (
            ValueError,
            r"1 of 5 scores are not finite .* number 2, in the sites \['s'\]",
            bad_scores({"w": W + 1e30 * (np.arange(5) == 2)[:, None], "s": S}),
        ),
    ],
)
def test_bad_draws(error: type[Exception], match: str, call: Callable) -> None:
    with pytest.raises(error, match=match):
        call()


# --- the benchmark


@pytest.mark.slow
def test_benchmark_runs() -> None:
    script = Path(__file__).parents[1] / "examples" / "benchmarks" / "stein.py"
    command = [sys.executable, str(script), "--draws", "200", "--dimensions", "3"]
    found = subprocess.run(
        [*command, "--work", "ksd V"], check=True, capture_output=True, text=True, timeout=120
    )
    cells = found.stdout.splitlines()[-1].strip("|").split("|")
    first, second, peak = map(float, cells[1:])
    assert cells[0].strip() == "ksd V"
    assert first > second
    assert 100 < peak < 1000
