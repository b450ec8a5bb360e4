"""The automatic step size: its measurements, and the bias on seven posteriors."""

from __future__ import annotations

from math import gamma as gamma_function
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scripts import load_script
from targets import SIGMAS, run, vectorized
from tiers import short

from numpyro_geom import SGHMC, SGRLD, diagnose
from numpyro_geom.model.model import CURVATURE_ROWS, Model
from numpyro_geom.model.plates import read_subsampling
from numpyro_geom.model.potential import function_potential
from numpyro_geom.sampling.algorithm import num_steps_from
from numpyro_geom.sampling.state import init_adaptation
from numpyro_geom.warmup import curvature
from numpyro_geom.warmup.adapt import what_is_due

P = load_script("benchmarks/posteriors")


def measure(potential, position, root=lambda v: v, **options):
    adaptation = init_adaptation(100, jnp.float32)
    return curvature.measure(potential, position, root, random.key(0), adaptation, **options)


def test_curvature_of_a_quadratic_is_exact():
    scales = jnp.geomspace(1.0, 1e3, 12)
    potential = function_potential(lambda z: 0.5 * jnp.sum(scales * z**2))
    learned = measure(potential, jnp.ones(12))
    # twelve Lanczos steps in twelve dimensions too are exact but for float32 rounding, which is
    # relative to the largest eigenvalue: 1e-7 * 1e3 * a few
    assert float(learned.curvature) == pytest.approx(1e3, rel=1e-5)
    assert float(learned.flattest) == pytest.approx(1.0, rel=5e-3)
    assert float(learned.noise) == 0.0
    # A^{1/2} (H + f H^2) A^{1/2} with A = 1 / H is I + f H
    preconditioned = measure(
        potential, jnp.ones(12), lambda v: v / jnp.sqrt(scales), second_order=jnp.array(0.01)
    )
    assert float(preconditioned.curvature) == pytest.approx(11.0, rel=1e-4)
    assert float(preconditioned.flattest) == pytest.approx(1.01, rel=1e-3)


def test_scaled_coordinates_have_the_curvature_of_their_middle_too():
    core = function_potential(lambda z: 2 * jnp.sum(jnp.log1p(z**2 / 3)))  # Student t, 3 degrees
    assert float(measure(core, jnp.full(2, 20.0), scaled=True).curvature) == pytest.approx(4 / 3)
    assert float(measure(core, jnp.full(2, 20.0)).curvature) < 0.02
    # between two modes it is negative along their line, and no step is unstable by that
    wells = function_potential(lambda z: (z[0] ** 2 - 1) ** 2 + 1.25 * z[1] ** 2)
    assert float(measure(wells, jnp.full(2, 0.7), scaled=True).curvature) == pytest.approx(2.5)
    core = function_potential(lambda z: (z[0] ** 2 - 1) ** 2 + jnp.log1p(1.25 * z[1] ** 2))
    found = measure(core, jnp.array([0.7, 9.0]), scaled=True)  # -4 and 2.5 in the middle
    assert float(found.curvature) == pytest.approx(2.5)


def test_noise_is_the_largest_eigenvalue_of_the_minibatch_covariance():
    X = random.normal(random.key(0), (300, 4)) * jnp.array([1.0, 2.0, 0.5, 1.0])
    y = random.normal(random.key(1), (300,))

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        with numpyro.plate("data", 300) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 1.0), obs=y[i])

    plan = read_subsampling(model, (X, y), {}, 30)
    potential = Model(model, (X, y), {}, plan).potential()
    w = jnp.array([0.3, -0.2, 0.1, 0.5])
    scores = -(y - X @ w)[:, None] * X
    exact = 300**2 / 30 * np.linalg.eigvalsh(np.cov(np.asarray(scores).T, bias=True))[-1]
    # 300 rows are fewer than CURVATURE_ROWS, so all of them are used; float32
    assert float(measure(potential, {"w": w}).noise) == pytest.approx(exact, rel=1e-4)


def test_noise_of_many_parameters_is_not_that_of_a_sample():
    """Of 2,048 rows with 400 parameters, whose own largest eigenvalue is far too large."""
    size, num_rows, batch_size = 400, 20_000, 100
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, size))
    y = rng.normal(size=num_rows)

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("data", num_rows) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 1.0), obs=y[i])

    def covariance(rows):
        scores = y[rows, None] * X[rows]  # at w = 0
        return num_rows**2 / batch_size * np.cov(scores.T, bias=True)

    def largest(rows):
        return np.linalg.eigvalsh(covariance(rows))[-1]

    args = jnp.asarray(X), jnp.asarray(y)
    plan = read_subsampling(model, args, {}, batch_size)
    potential = Model(model, args, {}, plan).potential()
    exact, sampled = largest(slice(None)), largest(slice(0, CURVATURE_ROWS))
    assert sampled > 1.5 * exact
    found = float(measure(potential, {"w": jnp.zeros(size)}).noise)
    # the mean eigenvalue is 1 / 1.3 of the largest here, and along a direction the variance of
    # 2,048 products of two normal numbers has a relative standard error of (8 / 2048)^1/2 = .06
    least, most = 1 / 1.3 - 4 * 0.06, 1 + 4 * 0.06
    assert least < found / exact < most
    _, total = curvature.noise_at(potential, {"w": jnp.zeros(size)}, random.key(0))
    # the mean of y^2 of all rows has the relative standard error (2 / 20000)^1/2 = .01, and 24
    # squared lengths in 400 dimensions (2 / 9600)^1/2 = .014, times some 1.3 for unequal values
    assert float(total) == pytest.approx(np.trace(covariance(slice(None))), rel=4 * 0.021)


def test_a_potential_that_ignores_its_key_has_no_noise():
    learned = measure(function_potential(lambda z, rng_key: 3.5 * z @ z), jnp.ones(300))
    assert float(learned.curvature) == pytest.approx(7.0, rel=1e-3)
    assert float(learned.noise) == 0.0


def test_noise_of_a_stochastic_potential():
    sigma = jnp.array([3.0, 1.0, 0.1])
    potential = function_potential(
        lambda z, rng_key: 0.5 * z @ z + z @ (sigma * random.normal(rng_key, (3,)))
    )
    noise = float(measure(potential, jnp.zeros(3)).noise)
    # the variance of 128 normal draws has a relative standard error of sqrt(2 / 127) = .125
    assert noise == pytest.approx(9.0, rel=4 * 0.125)


def test_step_size_formula():
    learned = init_adaptation(10, jnp.float32)._replace(
        curvature=jnp.float32(4.0), noise=jnp.float32(6.0), slowest=jnp.float32(0.5)
    )
    plain, averaged = (
        SGRLD(potential_fn=lambda z: z @ z / 2, temperature=0.5, divergence=divergence).facts
        for divergence in ("none", "frozen")
    )
    state = SimpleNamespace(step_size=None, dynamics=None)
    # 0.1 / (4 / 2 + 6 / (2 * 0.5))
    assert float(plain.propose(learned, state, None)[0]) == pytest.approx(0.1 / 8)
    h = float(averaged.propose(learned, state, None)[0])
    assert (h * 4 / 2) ** 2 + h * 6 / (2 * 0.5) == pytest.approx(0.1)
    assert sum(averaged.bias(4.0, 6.0, h, None)[:2]) == pytest.approx(0.1)
    steps = num_steps_from(learned.slowest, jnp.float32(0.01))
    assert int(steps) == 100  # 0.5 / (0.01 * 0.5)


@pytest.mark.parametrize("num_warmup", short([0, 1, 2, 10, 100, 1000], kept=[0, 2, 100]))
def test_checkpoints_are_few_and_the_last_is_at_the_end(num_warmup):
    draws = jnp.arange(num_warmup + 5)
    due = jax.vmap(lambda i: what_is_due(i, jnp.asarray(num_warmup), True).measuring)(draws)
    assert bool(due[1])
    assert not bool(due[0])
    assert int(due.sum()) <= 13
    if num_warmup > 2:
        assert bool(due[num_warmup - 1])
        assert not bool(due[num_warmup:].any())


@pytest.mark.slow
@pytest.mark.parametrize("kernel_class", [SGRLD, SGHMC])
def test_a_flat_mode_does_not_hide_the_curvature_around_it(kernel_class):
    # half of the chains start where there is no curvature at all, half where it is 3e-4: it
    # is 2 on average
    first = jnp.tile(jnp.array([0.0, 0.01]), 100)
    mcmc = vectorized(kernel_class(potential_fn=lambda z: z**4 / 4), 20, 50, 200)
    mcmc.run(random.key(0), init_params=first)
    squares = np.asarray(mcmc.get_samples(group_by_chain=True), np.float64) ** 2
    exact = 2 * gamma_function(0.75) / gamma_function(0.25)
    for of_chain in (squares.mean(1)[::2], squares.mean(1)[1::2]):
        ratio, error = of_chain.mean() / exact, of_chain.std(ddof=1) / exact / np.sqrt(100)
        # .016 to .019 measured; .05 and more where chains stand still or go astray
        assert error < 0.03
        assert abs(ratio - 1) < SIGMAS * error, (ratio, error)


TARGETS = {
    "gaussian": P.gaussian,
    "logistic": lambda: P.logistic(batch_size=128),
    "logistic-raw": lambda: P.logistic(raw=True, batch_size=128),
    "poisson": P.poisson,
    "hierarchical": P.hierarchical,
    "network": P.network,
    "banana": P.banana,
}


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", short(TARGETS, kept=["banana"]))
def test_default_keeps_the_tolerance_or_says_why_not(name):
    posterior = TARGETS[name]()
    mean, sd = posterior.reference(2000)
    kernel = SGRLD(posterior.model, batch_size=posterior.batch_size)
    mcmc = vectorized(kernel, 60, 60, 16)
    mcmc.run(random.key(3), *posterior.args)
    draws = {k: jnp.swapaxes(v, 0, 1) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    values = np.asarray(posterior.scalars(draws))
    assert np.isfinite(values).all()
    _, _, ratio, ratio_error = P.errors(values, mean, sd)
    error = 2 * ratio * ratio_error  # of the variance ratio, over chains
    excess = abs(ratio**2 - 1) - kernel.settings.bias_tolerance
    report = diagnose(mcmc, gradients=False)
    bias = {check.name: check for check in report.checks}["bias of variances"].where
    assert " bind" in bias  # "discretisation binds", for instance
    # the worst of up to 31 scalars: 4 standard errors have a false-alarm rate of about 0.2%; the
    # reference's own error, from 2000 NUTS draws, is sqrt(2 / 1000) of a variance at most
    assert excess < 4 * (error + 0.045) or report.flagged, (ratio**2, error, report)


def test_averaged_noise_shifts_no_mean():
    def log_gamma():
        """The logarithm of a Gamma(2) variable: U = exp(x) - 2 x, up to a wide prior."""
        x = numpyro.sample("x", dist.Normal(0, 20))
        numpyro.factor("rest", 2 * x - jnp.exp(x))

    kernel = SGRLD(log_gamma, step_size=0.3, num_steps=10)
    chains = {"num_chains": 4, "chain_method": "vectorized"}
    draws = run(kernel, num_warmup=100, num_samples=2000, **chains).get_samples()["x"]
    mean, sd = 1 - np.euler_gamma, (np.pi**2 / 6 - 1) ** 0.5
    # 8,000 draws whose correlation is about exp(-10 h / 2 var) = .1; a plain step is .15 off
    assert abs(np.mean(draws) - mean) / sd < 5 * (1.2 / 8000) ** 0.5
