"""RiemannianLaplace: modes, geodesics and draws, against exact maps and exact samplers."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers, optim
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoLaplaceApproximation
from scipy import special, stats
from tiers import short

from numpyro_geom import RiemannianLaplace, _util, to_inference_data
from numpyro_geom.diagnostics import SamplingWarning, diagnose
from numpyro_geom.diagnostics.checks import warn_of_guide
from numpyro_geom.diagnostics.facts import Run
from numpyro_geom.laplace import LaplaceDraws, RiemannianMetric
from numpyro_geom.laplace import draw as drawing
from numpyro_geom.laplace.draw import can_correct, largest_shape
from numpyro_geom.laplace.fit import AtMode, at_mode
from numpyro_geom.laplace.geodesic import Geodesic, exponential_map, log_map
from numpyro_geom.laplace.metrics import (
    acceleration_fn,
    dense_metric,
    fisher_metric,
)

KEY = random.key(0)

pytestmark = pytest.mark.usefixtures("x64")


# --- models


def logistic(X: jax.Array, y: jax.Array | None = None) -> None:
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    numpyro.deterministic("size", jnp.sum(w**2))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=None if y is None else y[i])


def logistic_data(rows: int = 60, columns: int = 3) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, columns))
    y = rng.uniform(size=rows) < 1 / (1 + np.exp(-X @ np.linspace(1.5, -1, columns)))
    return jnp.asarray(X), jnp.asarray(y.astype(float))


def subsampled(X: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    numpyro.deterministic("size", jnp.sum(w**2))
    with numpyro.plate("rows", X.shape[0], subsample_size=7) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def standard(dimension: int) -> None:
    numpyro.sample("x", dist.Normal(0, 1).expand([dimension]).to_event(1))


def banana(y: jax.Array) -> None:
    t = numpyro.sample("t", dist.Normal(0, 2).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(t[0] + t[1] ** 2, 2).expand([y.size]).to_event(1), obs=y)


def banana_data() -> jax.Array:
    """100 values of mean 1.37 and standard deviation 2, as quantiles in place of draws."""
    return jnp.asarray(1.3711657 + 2 * stats.norm.ppf((np.arange(100) + 0.5) / 100))


def banana_exact(count: int) -> np.ndarray:
    """Draws of the banana posterior: the second coordinate by inversion on a grid."""
    rng = np.random.default_rng(1)
    mean = float(np.mean(banana_data()))
    grid = np.linspace(-4, 4, 20001)
    density = np.exp(-(grid**2) / 8 - (mean - grid**2) ** 2 / 8.08)
    t2 = np.interp(rng.uniform(size=count), np.cumsum(density) / np.sum(density), grid)
    t1 = 25 * (mean - t2**2) / 25.25 + rng.normal(size=count) / np.sqrt(25.25)
    return np.stack([t1, t2], 1)


def positive(y: jax.Array) -> None:
    """Sites with other supports, which a chain rule with Jacobians must reach."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    p = numpyro.sample("p", dist.Beta(2.0, 3.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Exponential(rate), obs=y)
        numpyro.sample("z", dist.Bernoulli(p), obs=(y > 1).astype(float))


def near_logistic() -> dict[str, jax.Array]:
    """A position of `logistic` near its mode, where the mode plays no part."""
    return {"auto_loc": jnp.array([1.0, 0.2, -0.8])}


@functools.cache
def fitted(model: Any, mode: str = "euclidean") -> tuple[RiemannianLaplace, dict]:
    """A guide with the Fisher metric and its parameters; compiled once for all tests."""
    data = {logistic: logistic_data, banana: lambda: (banana_data(),)}[model]()
    precision = "fisher" if model is banana else "auto"
    guide = RiemannianLaplace(model, mode=mode, precision=precision)
    # NumPy's arrays do as well as JAX's
    return guide, guide.fit(KEY, *map(np.asarray, data), num_starts=2 if model is logistic else 4)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All draws in chunks of 10, so that any number of them is one program."""
    monkeypatch.setattr(drawing, "MOST_AT_ONCE", 10)


# --- geodesics against exact exponential maps


SQUIGGLES = {"wide": (1.5, (5.0, 0.05)), "narrow": (1.5, (10.0, 0.001))}


def squiggle_metric(a: float, variances: tuple[float, float]) -> Any:
    inverse = jnp.diag(1 / jnp.asarray(variances))

    def metric(t: jax.Array) -> jax.Array:
        jacobian = jnp.array([[1.0, 0.0], [a * jnp.cos(a * t[0]), 1.0]])
        return jacobian.T @ inverse @ jacobian

    return metric


def funnel_metric(t: jax.Array) -> jax.Array:
    """Of (t0, t1), t1 ~ N(0, 9) and t0 ~ N(0, e^t1)."""
    jacobian = jnp.array([[jnp.exp(-t[1] / 2), -t[0] * jnp.exp(-t[1] / 2) / 2], [0.0, 1 / 3]])
    return jacobian.T @ jacobian


@pytest.mark.parametrize("target", short(["wide", "narrow", "funnel"], kept=["narrow"]))
def test_geodesics_of_known_metrics_end_where_the_exact_map_says(target: str) -> None:
    if target == "funnel":
        metric, exact = funnel_metric, lambda v: jnp.array([v[0] * jnp.exp(v[1] / 2), v[1]])
    else:
        a, variances = SQUIGGLES[target]
        metric = squiggle_metric(a, variances)
        exact = lambda v: jnp.array([v[0], a * v[0] + v[1] - jnp.sin(a * v[0])])  # noqa: E731
    factor = jnp.linalg.cholesky(metric(jnp.zeros(2)))
    noise = random.normal(KEY, (200, 2))
    velocities = jax.scipy.linalg.solve_triangular(factor, noise.T, trans=1, lower=True).T
    acceleration = dense_metric(metric).acceleration
    for rtol, atol, allowed in ((1e-3, 1e-6, 1e-3), (1e-11, 1e-13, 1e-8)):
        ends = jax.jit(
            jax.vmap(
                lambda v, rtol=rtol, atol=atol: exponential_map(
                    acceleration, jnp.zeros(2), v, rtol=rtol, atol=atol
                )
            )
        )(velocities)
        expected = jax.vmap(exact)(velocities)
        error = jnp.linalg.norm(ends.position - expected, axis=1)
        assert bool(jnp.all(ends.success))
        assert float(jnp.max(error / jnp.linalg.norm(expected, axis=1))) < allowed


def test_a_straight_geodesic_takes_one_step_and_a_failed_one_says_so() -> None:
    line = exponential_map(lambda x, v: jnp.zeros_like(x), jnp.zeros(2), jnp.ones(2))
    np.testing.assert_allclose(line.position, jnp.ones(2), rtol=1e-12)
    assert int(line.num_evaluations) == 6
    stopped = exponential_map(lambda x, v: -1e8 * x, jnp.ones(1), jnp.ones(1), max_steps=20)
    assert not bool(stopped.success)
    assert int(stopped.num_evaluations) == 120


# --- what each metric does to a Gaussian


BIAS_OF_MONGE = {1: 0.111, 2: 0.145, 3: 0.171, 5: 0.211, 10: 0.271}


@pytest.mark.filterwarnings("ignore:relative error of the sd")
@pytest.mark.parametrize("dimension", short([1, 3, 10], kept=[3]))
def test_monge_is_too_narrow_on_a_gaussian_by_the_known_amount(dimension: int) -> None:
    # and the Gaussian draws behind them, P = I: the same noise, so that most of its error cancels
    draws, gaussian = (
        RiemannianLaplace(standard, metric).draw(
            *(random.key(1), {"auto_loc": jnp.zeros(dimension)}, dimension),
            sample_shape=(20_000,),
            progress_bar=False,
        )
        for metric in ("monge", "euclidean")
    )
    gap = np.sort(draws.unconstrained[:, 0]) - np.sort(gaussian.unconstrained[:, 0])
    assert np.mean(np.abs(gap)) == pytest.approx(BIAS_OF_MONGE[dimension], rel=0.02)


def test_the_logarithmic_map_has_its_closed_form_where_the_precision_is_isotropic() -> None:
    targets = random.normal(KEY, (100, 2))
    velocities, found = jax.jit(jax.vmap(lambda s: log_map(jnp.eye(2), s)))(targets)
    r = jnp.linalg.norm(targets, axis=1)
    expected = (r * jnp.sqrt(1 + r**2) + jnp.arcsinh(r)) / 2
    assert bool(jnp.all(found))
    np.testing.assert_allclose(jnp.linalg.norm(velocities, axis=1), expected, rtol=1e-4)


@pytest.mark.slow
def test_monge_with_the_logarithmic_map_leaves_a_gaussian_as_it_is() -> None:
    def gaussian() -> None:
        covariance = jnp.array([[1.0, 0.6], [0.6, 2.0]])
        numpyro.sample("x", dist.MultivariateNormal(jnp.array([1.0, -1.0]), covariance))

    names = ("monge-log", "euclidean")
    guides = {name: RiemannianLaplace(gaussian, name, rtol=1e-8, atol=1e-10) for name in names}
    params = guides["euclidean"].fit(KEY, num_starts=1)
    bent, straight = (
        guides[name].draw(random.key(1), params, sample_shape=(100,)) for name in names
    )
    assert bool(jnp.all(bent.success))
    # the map is solved to 1e-5 of a standard deviation, with geodesics to 1e-6 per step
    np.testing.assert_allclose(bent.unconstrained, straight.unconstrained, atol=1e-4)


WAYS = {"whole": (logistic, None), "parts": (logistic, 10), "subsampled": (subsampled, None)}


def bound(metric: str, way: str = "whole") -> tuple[RiemannianLaplace, Any]:
    """A guide of logistic regression and its posterior, without a fit."""
    model, batch_size = WAYS[way]
    guide = RiemannianLaplace(model, metric, batch_size=batch_size, precision="fisher")
    with handlers.seed(rng_seed=0):
        guide._setup_prototype(*logistic_data())
    return guide, guide._posterior({}, guide._captured())


@pytest.mark.parametrize("metric", short(["fisher", "monge"], kept=["monge"]))
def test_geodesics_do_not_depend_on_how_rows_are_taken(
    metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "numpyro_geom.model.model.num_at_once", lambda _: 25
    )  # 60 rows: 20 + 20 + 20
    velocity, results = jnp.array([0.3, -0.5, 0.7]), []
    for way in WAYS:
        guide, posterior = bound(metric, way)
        at = near_logistic()["auto_loc"]
        acceleration = acceleration_fn(posterior, at)
        results.append((jax.jit(posterior.energy)(at), jax.jit(acceleration)(at, velocity)))
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10)


@pytest.mark.slow
def test_every_solver_gives_the_same_velocities_geodesics_and_draws() -> None:
    X, y = logistic_data(rows=4, columns=6)  # fewer outputs than parameters
    near, v = {"auto_loc": jnp.linspace(-0.5, 0.5, 6)}, jnp.linspace(1.0, -2.0, 6)
    straight, forces, draws = [], [], []
    for solver in ("cholesky", "cg"):
        guide = RiemannianLaplace(logistic, precision="fisher", solver=solver, rtol=1e-6)
        with handlers.seed(rng_seed=0):
            guide._setup_prototype(X, y)
        posterior, loc = guide._posterior({}, guide._captured()), near["auto_loc"]
        unformed = AtMode(jnp.zeros((0, 0)), *[jnp.nan] * 3, jnp.zeros(6))

        @jax.jit
        def velocities(keys: jax.Array, posterior: Any = posterior, at: Any = unformed) -> tuple:
            return drawing.gaussian(posterior, near["auto_loc"], at, keys)

        straight += [jnp.column_stack(velocities(random.split(KEY, 10)))]
        metric = fisher_metric(posterior, loc)
        forces.append(jax.jit(metric.acceleration)(loc + 0.1, v))
        draws.append(guide.draw(KEY, near, X, y, sample_shape=(10,)))
        assert bool(jnp.all(draws[-1].success))
    # conjugate gradients are solved to a hundredth of rtol
    for found in (straight, forces, [d.unconstrained for d in draws]):
        for other in found[1:]:
            np.testing.assert_allclose(other, found[0], atol=1e-6)


@pytest.mark.parametrize("of", short(["sites", "vectors"], kept=["sites"]))
def test_a_function_as_metric_gives_the_draws_of_the_fisher_metric_it_repeats(of: str) -> None:
    X, y = logistic_data()

    def metric(position: dict[str, jax.Array]) -> jax.Array:
        p = jax.nn.sigmoid(X @ position["w"])
        return X.T @ (X * (p * (1 - p))[:, None]) + jnp.eye(3) / 9

    whole = dense_metric(lambda theta: metric({"w": theta}))
    options = {"sample_shape": (20,)}
    expected = fitted(logistic)[0].draw(KEY, near_logistic(), X, y, **options)
    # as a function of the sites, or as an object that works on vectors
    given = {"sites": metric, "vectors": RiemannianMetric(*whole)}[of]
    found = RiemannianLaplace(logistic, given).draw(KEY, near_logistic(), X, y, **options)
    np.testing.assert_allclose(found.unconstrained, expected.unconstrained, rtol=1e-9)
    assert np.all(found.num_evaluations == expected.num_evaluations)
    assert found.settings["metric"] == {"sites": "metric", "vectors": "RiemannianMetric"}[of]


# --- modes


def test_the_banana_has_its_euclidean_and_hausdorff_modes() -> None:
    straight = fitted(banana)[1]["auto_loc"]
    np.testing.assert_allclose([straight[0], abs(straight[1])], [0.5, 0.930680], atol=1e-5)
    guide, params = fitted(banana, "hausdorff")
    np.testing.assert_allclose(params["auto_loc"], [1.357590, 0.0], atol=1e-5)
    assert guide.fit_report is not None
    assert guide.fit_report.status.count("best") == 1
    assert str(guide.fit_report).count("\n") == 5
    with pytest.raises(ValueError, match=r"not positive definite.*precision='fisher'"):
        RiemannianLaplace(banana, mode="hausdorff", precision="hessian").draw(
            KEY, params, banana_data()
        )


@functools.cache
def regression_scale(mode: str) -> float:
    """Error of the mean of log sigma in a linear regression of 40 rows on 8 columns, in its sd."""
    rng = np.random.default_rng(0)
    X, y = jnp.asarray(rng.normal(size=(40, 8))), jnp.asarray(rng.normal(size=40))

    def model(X: jax.Array, y: jax.Array) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1e3).expand([8]).to_event(1))
        sigma = numpyro.sample("sigma", dist.LogNormal(0, 1e3))
        numpyro.sample("y", dist.Normal(X @ b, sigma).to_event(1), obs=y)

    guide = RiemannianLaplace(model, mode=mode)
    draws = guide.sample_posterior(KEY, guide.fit(KEY, X, y), sample_shape=(4000,))
    residual = y - X @ jnp.linalg.lstsq(X, y)[0]
    # sum of squares / sigma^2 has a chi-squared law with 32 degrees of freedom
    mean = (jnp.log(residual @ residual) - special.digamma(16) - np.log(2)) / 2
    return float((jnp.log(draws["sigma"]).mean() - mean) / (special.polygamma(1, 16) ** 0.5 / 2))


def test_the_default_has_the_posterior_mean_of_a_scale() -> None:
    # Monte Carlo error .015; what the expansion leaves out is of the order of (8 / 32)^2
    assert abs(regression_scale("auto")) < 0.12


@pytest.mark.slow
def test_a_mode_alone_has_not_the_posterior_mean_of_a_scale() -> None:
    with pytest.warns(SamplingWarning, match="error of the means"):
        assert regression_scale.__wrapped__("hausdorff") < -0.3


@pytest.mark.slow
def test_a_mean_too_far_from_the_mode_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    near = regression_scale("auto")
    monkeypatch.setattr("numpyro_geom.laplace.fit.FARTHEST_MEAN", 0.1)
    with pytest.warns(SamplingWarning, match="too far for draws about it"):
        far = regression_scale.__wrapped__("auto")
    with pytest.warns(SamplingWarning, match="error of the means"):
        mode = regression_scale.__wrapped__("hausdorff")
    # the velocities are others: 5 standard errors of both
    assert far == pytest.approx(mode, abs=0.11)
    assert abs(near - far) > 0.3


@pytest.mark.slow
def test_svi_finds_the_same_modes_as_fit() -> None:
    y = banana_data()
    for mode in ("euclidean", "hausdorff"):
        guide = RiemannianLaplace(banana, "euclidean", mode=mode, precision="fisher")
        svi = SVI(banana, guide, optim.Adam(0.05), Trace_ELBO())
        params = svi.run(random.key(3), 1500, y, progress_bar=False).params
        found, expected = params["auto_loc"], fitted(banana, mode)[1]["auto_loc"]
        np.testing.assert_allclose(
            [found[0], abs(found[1])], [expected[0], abs(expected[1])], atol=2e-3
        )
    draws = guide.sample_posterior(random.key(4), params, sample_shape=(5,))
    assert draws["t"].shape == (5, 2)


def test_a_start_that_is_given_is_the_mode_without_steps() -> None:
    X, y = logistic_data()
    given = {"w": jnp.array([0.1, 0.2, 0.3])}
    guide = RiemannianLaplace(logistic)
    with pytest.warns(SamplingWarning, match="has not converged"):
        params = guide.fit(KEY, X, y, init_params=given, max_steps=0)
    np.testing.assert_array_equal(params["auto_loc"], given["w"])
    with pytest.raises(ValueError, match="does not match the latent sites"):
        guide.fit(KEY, X, y, init_params={"v": 1.0})
    with pytest.raises(ValueError, match="expected the unconstrained shape"):
        guide.fit(KEY, X, y, init_params={"w": jnp.ones(2)})


# --- importance weights: draws of the posterior where they can be


def weighted_moments(draws: Any, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    log_weight = np.asarray(draws.log_weight)
    weight = np.exp(log_weight - np.max(log_weight))
    weight /= weight.sum()
    mean = weight @ values
    return mean, np.sqrt(weight @ (values - mean) ** 2), 1 / np.sum(weight**2)


@functools.cache
def logistic_reference() -> np.ndarray:
    mcmc = MCMC(NUTS(logistic), num_warmup=500, num_samples=20_000, progress_bar=False)
    mcmc.run(random.key(2), *logistic_data())
    return np.asarray(mcmc.get_samples()["w"])


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["fisher", "euclidean"])
def test_weights_turn_draws_of_logistic_regression_into_the_posterior(metric: str) -> None:
    X, y = logistic_data()
    # the parameters of this mode
    guide = RiemannianLaplace(logistic, metric, mode="euclidean")
    _, params = fitted(logistic)
    draws = guide.draw(random.key(1), params, X, y, sample_shape=(8000,), log_weight=True)
    assert draws.pareto_k is not None
    assert draws.pareto_k < 0.7
    mean, sd, size = weighted_moments(draws, np.asarray(draws.samples["w"]))
    reference = logistic_reference()
    # 4.5 standard errors of both; NUTS has at least 5,000 independent draws here
    allowed = 4.5 * (1 / size + 1 / 5000) ** 0.5
    assert np.all(np.abs(mean - reference.mean(0)) / reference.std(0) < allowed)
    assert np.all(np.abs(sd / reference.std(0) - 1) < allowed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Pareto shape")  # few draws
def test_weights_of_monge_on_a_gaussian_have_their_closed_form() -> None:
    # in one dimension v = (x sqrt(1 + x^2) + asinh x) / 2 and dv/dx = sqrt(1 + x^2)
    tight = {"rtol": 1e-9, "atol": 1e-11}
    params = {"auto_loc": jnp.zeros(1)}
    guide = RiemannianLaplace(standard, "monge", **tight)
    draws = guide.draw(random.key(1), params, 1, sample_shape=(50,), log_weight=True)
    x = draws.unconstrained[:, 0]
    v = (x * jnp.sqrt(1 + x**2) + jnp.arcsinh(x)) / 2
    expected = -(x**2) / 2 + v**2 / 2 - jnp.log1p(x**2) / 2
    given = draws.log_weight - draws.log_weight[0]
    np.testing.assert_allclose(given, expected - expected[0], atol=1e-7)
    # the logarithmic map takes all of it back
    guide = RiemannianLaplace(standard, "monge-log", **tight)
    draws = guide.draw(random.key(1), params, 1, sample_shape=(50,), log_weight=True)
    assert float(jnp.ptp(draws.log_weight)) < 1e-4


@pytest.mark.filterwarnings("ignore:Pareto shape")  # few draws
@pytest.mark.parametrize("name", short(["exact", "monge"], kept=["exact"]))
def test_weights_of_an_exact_guide_are_equal(name: str) -> None:
    a, (wide, narrow) = 1.5, (5.0, 0.05)

    def squiggle() -> None:
        t = numpyro.sample("t", dist.ImproperUniform(dist.constraints.real_vector, (), (2,)))
        bent = jnp.array([t[0], t[1] + jnp.sin(a * t[0])])
        numpyro.factor("log_density", -(bent[0] ** 2) / (2 * wide) - bent[1] ** 2 / (2 * narrow))

    metric = squiggle_metric(a, (wide, narrow))
    params = {"auto_loc": jnp.zeros(2)}  # the mode
    if name == "exact":
        guide = RiemannianLaplace(squiggle, lambda z: metric(z["t"]), rtol=1e-9, atol=1e-11)
        draws = guide.draw(random.key(1), params, sample_shape=(200,), log_weight=True)
        assert float(jnp.ptp(draws.log_weight)) < 1e-6
    else:  # draws of the same velocities through Monge's metric have other weights
        monge = RiemannianLaplace(squiggle, "monge")
        draws = monge.draw(random.key(1), params, sample_shape=(8,), log_weight=True)
        assert float(jnp.ptp(draws.log_weight)) > 0.1


def test_the_banana_from_its_hausdorff_mode_is_near_and_its_weights_bring_it_home() -> None:
    guide, params = fitted(banana, "hausdorff")
    draws = guide.draw(random.key(1), params, sample_shape=(10_000,), log_weight=True)
    exact = banana_exact(100_000)
    plain = np.asarray(draws.samples["t"])
    mean, sd, size = weighted_moments(draws, plain)
    allowed = 4.5 * (1 / size + 1e-5) ** 0.5
    assert np.all(np.abs(mean - exact.mean(0)) / exact.std(0) < allowed)
    # the second moment of a curved density varies more than a Gaussian's: twice its error
    assert np.all(np.abs(sd / exact.std(0) - 1) < 2 * allowed)
    assert np.mean(draws.num_evaluations) == pytest.approx(32.7, rel=0.1)  # the paper's


# --- as NumPyro's guides are used


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_a_guide_is_used_as_numpyro_uses_guides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numpyro_geom.laplace.guide.SUMMARY_DRAWS", 600)
    X, _ = logistic_data()
    guide, params = fitted(logistic)
    draws = guide.sample_posterior(random.key(1), params, sample_shape=(2, 300))
    assert draws["w"].shape == (2, 300, 3)
    assert draws["size"].shape == (2, 300)
    median, spread = guide.median(params), guide.quantiles(params, [0.05, 0.5, 0.95])
    assert median["w"].shape == (3,)
    assert spread["w"].shape == (3, 3)
    assert bool(jnp.all(spread["w"][0] < spread["w"][2]))
    np.testing.assert_array_equal(spread["w"][1], median["w"])
    straight = RiemannianLaplace(logistic, "euclidean")
    assert straight.sample_posterior(random.key(1), params, *logistic_data())["w"].shape == (3,)
    # on other rows the draws are still those of the training data
    some = Predictive(logistic, guide=guide, params=params, num_samples=200)(random.key(2), X[:7])
    assert some["y"].shape == (200, 7)
    sites = Predictive(guide, params=params, num_samples=200)(random.key(2), X[:7])
    direct = draws["w"].reshape(-1, 3)
    # 5 standard errors of 200 and 600 draws
    assert np.all(
        np.abs(sites["w"].mean(0) - direct.mean(0)) / direct.std(0) < 5 * (1 / 200 + 1 / 600) ** 0.5
    )
    assert np.all(np.abs(sites["w"].std(0) / direct.std(0) - 1) < 5 * (1 / 400 + 1 / 1200) ** 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_draws_are_the_same_compiled_and_after_pickling() -> None:
    X, y = logistic_data()
    guide, params = fitted(logistic)
    expected = guide.draw(random.key(1), params, sample_shape=(10,)).unconstrained

    @jax.jit
    def compiled(key: jax.Array) -> jax.Array:
        return guide.draw(key, params, sample_shape=(10,)).unconstrained

    np.testing.assert_allclose(compiled(random.key(1)), expected, rtol=1e-5)
    copy = pickle.loads(pickle.dumps(guide))
    again = copy.sample_posterior(random.key(1), params, sample_shape=(10,))
    np.testing.assert_allclose(again["w"], expected, rtol=1e-5)
    named = guide.sample_posterior(random.key(1), params, X, y=y, sample_shape=(10,))
    np.testing.assert_allclose(named["w"], expected, rtol=1e-5)


def test_a_second_call_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    guide, params = fitted(logistic)
    counts = []
    for seed in (1, 2):
        caplog.clear()
        with jax.log_compiles(True):
            guide.draw(random.key(seed), params, sample_shape=(7,))
        counts.append(sum("Compiling" in record.getMessage() for record in caplog.records))
    assert counts[0] > 0
    assert counts[1] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Pareto shape")  # few draws
def test_other_supports_and_networks_with_params_work() -> None:
    y = jnp.asarray(np.random.default_rng(0).exponential(0.5, 80))
    guide = RiemannianLaplace(positive, prior_metric="expected")
    params = guide.fit(KEY, y, num_starts=1)
    bent = guide.draw(random.key(1), params, sample_shape=(200,))
    straight = RiemannianLaplace(positive, "euclidean")
    draws = straight.draw(random.key(1), params, y, sample_shape=(200,), log_weight=True)
    for found in (bent, draws):
        assert bool(jnp.all(found.samples["rate"] > 0))
        assert bool(jnp.all((found.samples["p"] > 0) & (found.samples["p"] < 1)))
    mean, _, size = weighted_moments(draws, np.asarray(draws.samples["rate"])[:, None])
    exact = (2 + 80) / (1 + float(jnp.sum(y)))  # conjugate
    # 5 standard errors: a Gamma(82) has sd 1 / sqrt(82) of its mean
    assert abs(mean[0] / exact - 1) < 5 / np.sqrt(82 * size)

    def shifted(y: jax.Array) -> None:
        shift = numpyro.param("shift", 3.0)
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(x + shift, 1), obs=y)

    guide = RiemannianLaplace(shifted, "euclidean")
    params = guide.fit(KEY, jnp.array(5.0))
    assert float(params["shift"]) == 3.0
    np.testing.assert_allclose(params["auto_loc"], [1.0], atol=1e-8)
    moved = guide.sample_posterior(KEY, params | {"shift": jnp.array(4.0)})
    assert moved["x"].shape == ()


# --- predictions


def two_outputs(X: jax.Array, y: jax.Array | None = None) -> None:
    """A nonlinear model with a mean and a scale."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    s = numpyro.sample("s", dist.LogNormal(0, 1))
    with numpyro.plate("rows", X.shape[0]) as i:
        obs = None if y is None else y[i]
        numpyro.sample("y", dist.Normal(jnp.sin(X[i] @ w), s), obs=obs)


@pytest.mark.filterwarnings("ignore:error of the means")
@pytest.mark.slow
def test_linearised_predictions_expand_the_parameters_around_the_mode() -> None:
    X, _ = logistic_data(rows=30)
    y = jnp.sin(X @ jnp.array([0.3, -0.2, 0.1])) + 0.1 * random.normal(KEY, (30,))
    guide = RiemannianLaplace(two_outputs, "euclidean", damping=1.0)
    params = guide.fit(KEY, X, y)
    loc, new = params["auto_loc"], X[:4]
    position = guide.draw(random.split(KEY)[0], params, sample_shape=(200,)).unconstrained
    shapes = {False: "plain", True: "linear"}
    found = {
        name: guide.predictive(KEY, params, new, y[:4], num_samples=200, linearized=flag)
        for flag, name in shapes.items()
    }
    # the log scale is a coordinate itself: "s" comes before "w" or after, by the order of sites
    index = {k: v for k, v in guide._unpack_latent(jnp.arange(4)).items()}
    w, log_s = position[:, index["w"]], position[:, index["s"]]
    w0 = loc[index["w"]]
    mean = {
        "plain": jnp.sin(w @ new.T),
        "linear": jnp.sin(new @ w0) + jnp.cos(new @ w0) * ((w - w0) @ new.T),
    }
    for name, predictions in found.items():
        expected = dist.Normal(mean[name], jnp.exp(log_s)[:, None]).log_prob(y[:4])
        np.testing.assert_allclose(predictions.log_likelihood["y"], expected, rtol=1e-9)
        assert predictions.samples["y"].shape == (200, 4)
    assert guide.predictive(KEY, params, new, num_samples=3).log_likelihood == {}
    with pytest.raises(TypeError, match="linearized must be"):
        guide.predictive(KEY, params, new, linearized=1)


# --- bad input


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"metric": "riemann"}, ValueError, "metric must be one of"),
        ({"mode": "map"}, ValueError, "mode must be one of"),
        ({"precision": "exact"}, ValueError, "precision must be one of"),
        ({"prior_metric": "none"}, ValueError, "prior_metric must be one of"),
        ({"solver": "lu"}, ValueError, "solver must be one of"),
        ({"alpha2": -1.0}, ValueError, "alpha2 must be"),
        ({"damping": -1.0}, ValueError, "damping must be"),
        ({"rtol": 0.0}, ValueError, "rtol must be"),
        ({"max_steps": 0}, ValueError, "max_steps must be"),
    ],
)
def test_arguments_out_of_range_are_refused(kwargs: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        RiemannianLaplace(logistic, **kwargs)


@pytest.mark.parametrize(
    ("given", "size", "has_factor", "chosen"),
    [
        ({}, 200, False, ("mean", "fisher", "expected")),
        ({}, 201, False, ("euclidean", "hessian", "expected")),
        ({}, 2001, False, ("euclidean", "fisher", "expected")),
        ({}, 3, True, ("euclidean", "hessian", "hessian")),
        ({"metric": "fisher"}, 3, False, ("mean", "fisher", "expected")),
        ({"prior_metric": "hessian"}, 3, False, ("euclidean", "hessian", "hessian")),
        ({"precision": "hessian"}, 3, False, ("euclidean", "hessian", "expected")),
        ({"mode": "hausdorff"}, 3, False, ("hausdorff", "fisher", "expected")),
        ({"metric": "monge"}, 3, False, ("euclidean", "hessian", "expected")),
        ({"metric": "monge-log"}, 2001, False, ("euclidean", "hessian", "expected")),
    ],
)
def test_what_is_not_given_is_chosen(
    given: dict, size: int, has_factor: bool, chosen: tuple
) -> None:
    guide = RiemannianLaplace(logistic, **given)
    s = guide.settings.resolve(size, has_factor=has_factor, has_observed=True)
    assert (s.mode, s.precision, s.prior_metric) == chosen
    assert s.metric == given.get("metric", "fisher")


def test_a_model_of_factors_alone_has_straight_draws() -> None:
    def model() -> None:
        x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.factor("density", -2 * (x - 3) ** 2)

    guide = RiemannianLaplace(model)
    draws = guide.draw(KEY, guide.fit(KEY), sample_shape=(300,), log_weight=True)
    assert np.all(draws.num_evaluations == 0)
    assert can_correct(draws.log_weight, draws.pareto_k)
    settings = guide.settings
    assert (settings.metric, settings.mode) == ("euclidean", "euclidean")
    assert settings.precision == "hessian"


@pytest.mark.slow
def test_a_constant_metric_costs_one_step() -> None:
    """A linear model with known noise: straight lines are the geodesics of the Fisher metric."""

    def model(X: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(0, 3).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(X @ w, 0.5).to_event(1), obs=y)

    X = random.normal(KEY, (20, 3))
    guide = RiemannianLaplace(model)
    params = guide.fit(random.key(1), X, X[:, 0])
    draws = guide.draw(KEY, params, sample_shape=(100,), log_weight=True)
    assert np.all(draws.num_evaluations == 6)
    assert np.ptp(draws.log_weight) < 1e-6


def test_factors_are_seen_and_their_curvature_is_in_the_precision() -> None:
    def model(y: jax.Array) -> None:
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.factor("prior", -20 * x**2)
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    guide = RiemannianLaplace(model)
    params = guide.fit(KEY, jnp.ones(()), num_starts=1)
    assert guide.settings.prior_metric == "hessian"
    factor = guide._run(at_mode, guide._captured(), params).factor
    assert float(factor[0, 0]) == pytest.approx(42**0.5)  # 1 + 40 + 1


def test_a_model_that_is_not_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be callable, got str"):
        RiemannianLaplace("logistic")


def test_a_discrete_latent_site_is_refused() -> None:
    def discrete(y: jax.Array) -> None:
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(k, 1), obs=y)

    with pytest.raises(ValueError, match=r"discrete latent sites \['k'\]"):
        RiemannianLaplace(discrete).fit(KEY, jnp.ones(()))


def test_a_saddle_is_refused_and_damping_is_a_way_out() -> None:
    def saddle() -> None:
        x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real_vector, (), (2,)))
        numpyro.factor("log_density", -(x[0] ** 2) / 2 - (x[1] ** 2 - 1) ** 2)

    start = {"init_params": {"x": jnp.zeros(2)}, "max_steps": 0}
    with pytest.raises(ValueError, match=r"smallest of -4 .*damping=8"):
        RiemannianLaplace(saddle, "monge").fit(KEY, **start)
    RiemannianLaplace(saddle, "monge", damping=8.0).fit(KEY, **start)


def test_geodesics_that_are_given_up_are_flagged_and_warned_of() -> None:
    guide, (_, params) = RiemannianLaplace(logistic, "monge", max_steps=3), fitted(logistic)
    match = "of 20 geodesics failed: no end within max_steps=3.* use metric='fisher'"
    with pytest.warns(SamplingWarning, match=match):
        draws = guide.draw(
            random.key(1), params, *logistic_data(), sample_shape=(20,), log_weight=True
        )
    assert 0 < jnp.sum(draws.success) < 20
    for values in (draws.unconstrained[:, 0], draws.samples["w"][:, 2], draws.log_weight):
        np.testing.assert_array_equal(jnp.isnan(values), ~draws.success)
    assert draws.pareto_k == np.inf


def test_failures_are_warned_of_with_advice_that_is_not_followed_yet() -> None:
    success = np.array([[True, False]])
    for given, advice in (
        ({"metric": "euclidean"}, "metric='fisher'"),
        ({"metric": "fisher", "prior_metric": "hessian"}, "prior_metric='expected'"),
        ({"metric": "fisher"}, "reparametrise the model"),
    ):
        run = Run({}, {"success": success, "n_fevals": np.full((1, 2), 6)}, given)
        with pytest.warns(SamplingWarning, match=f"1 of 2 geodesics failed.*or (use )?{advice}"):
            warn_of_guide(run)


def test_late_geodesics_leave_their_chunk_and_come_back_to_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 12 draws, in chunks of 4, those with the indices 0, 5 and 11 need 100 steps."""
    steps, calls = np.full(12, 5), []
    steps[[0, 5, 11]] = 100

    def follow(draws: jax.Array, squares: jax.Array, limit: int) -> tuple:
        calls.append((draws.shape[0], limit))
        done = jnp.asarray(steps)[draws.astype(int)] <= limit
        spent = 6 * jnp.minimum(jnp.asarray(steps)[draws.astype(int)], limit)
        evaluations = jnp.where(jnp.isnan(squares), 0, spent)
        ends = Geodesic(jnp.where(done, draws, jnp.nan), done, evaluations)
        return ends, squares

    def run(max_steps: int) -> Geodesic:
        calls.clear()
        draws = jnp.arange(12.0)
        given = (follow, draws, -draws, 4, max_steps)
        return drawing.follow_in_chunks(*given, progress_bar=False)[0]

    first = drawing.FIRST_STEPS
    np.testing.assert_array_equal(run(1000).position, jnp.arange(12.0))
    # the last of the first pass is timed once it is compiled
    assert calls == [(4, first)] * 4 + [(4, 1000)]
    np.testing.assert_array_equal(np.flatnonzero(~run(50).success), [0, 5, 11])
    assert calls == [(4, first)] * 4 + [(4, 50)]
    run(first)
    assert calls == [(4, first)] * 3
    # without velocities they are not followed anew
    draws, calls[:] = jnp.arange(12.0), []
    squares = (-draws).at[jnp.array([0, 5, 11])].set(jnp.nan)
    drawing.follow_in_chunks(follow, draws, squares, 4, 1000, progress_bar=False)
    assert calls == [(4, first)] * 3
    clock = iter(range(9))  # a second for each look
    monkeypatch.setattr(drawing.time, "perf_counter", lambda: next(clock))
    with pytest.warns(UserWarning, match=r"3 of 12 geodesics .* may take 31 s, 94 s in all"):
        run(4000)


def test_the_shape_that_weights_may_have_grows_with_their_number() -> None:
    assert [largest_shape(n) for n in (100, 1000, 10_000)] == pytest.approx([1 / 2, 2 / 3, 0.7])
    assert largest_shape(1) < 0

    def warn(weights: np.ndarray) -> None:
        arrays = {"x": weights[None]}, {"log_weight": weights[None]}
        warn_of_guide(Run(*arrays, {"pareto_k": 0.6}))

    with pytest.warns(SamplingWarning, match="of weights: 0.6, expected below 0.5; .* 100 draws"):
        warn(np.linspace(0, 5, 100))
    for fine in (np.linspace(0, 5, 1000), np.zeros(100)):  # more weights, equal weights
        warn(fine)


def test_a_search_that_finds_nothing_finite_is_an_error() -> None:
    def broken(y: jax.Array) -> None:
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)
        numpyro.factor("bad", jnp.where(jnp.abs(x) < 100, jnp.log(-jnp.abs(y)), 0.0))

    with pytest.raises((RuntimeError, ValueError), match="finite|valid initial"):
        RiemannianLaplace(broken, "monge", init_loc_fn=init_to_value(values={"x": 0.1})).fit(
            KEY, jnp.ones(())
        )


def test_models_without_observed_sites_have_no_fisher_metric() -> None:
    with pytest.raises(ValueError, match="no observed site with a distribution"):
        RiemannianLaplace(standard).fit(KEY, 2)


def test_dimensions_too_large_for_what_is_asked_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("numpyro_geom.laplace.settings.MATRIX_LIMIT", 2)
    X, y = logistic_data()
    straight = {"mode": "euclidean"}
    for kwargs, match in (
        ({"precision": "hessian"}, "precision='hessian' forms matrices.*precision='fisher'"),
        ({"solver": "cholesky", **straight}, "solver='cholesky' forms matrices.*solver='cg'"),
        ({"mode": "hausdorff"}, "mode='hausdorff' forms matrices"),
        ({"metric": "monge-log"}, "metric='monge-log' forms matrices"),
    ):
        with pytest.raises(ValueError, match=match):
            RiemannianLaplace(logistic, **kwargs).draw(KEY, near_logistic(), X, y)
    with pytest.raises(ValueError, match="log_weight=True forms matrices"):
        RiemannianLaplace(logistic, "monge").draw(KEY, near_logistic(), X, y, log_weight=True)


def test_float32_with_an_ill_conditioned_precision_is_warned_of() -> None:
    def stretched(y: jax.Array) -> None:
        x = numpyro.sample("x", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x * jnp.array([1.0, 3000.0]), 1).to_event(1), obs=y)

    start = {"init_params": {"x": jnp.zeros(2)}, "max_steps": 0}  # the mode
    with (
        jax.enable_x64(False),
        pytest.warns(SamplingWarning, match="curves .* times more in one direction .* float32"),
    ):
        RiemannianLaplace(stretched).fit(KEY, jnp.zeros(2, jnp.float32), **start)


def test_a_precision_of_lower_rank_is_called_singular() -> None:
    def twice(y: jax.Array) -> None:
        x = numpyro.sample("x", dist.Normal(0, 1e4).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x[0] + x[1], 1e-3), obs=y)

    start = {"init_params": {"x": jnp.zeros(2)}, "max_steps": 0}
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match=r"is singular in float32: .* use float64"),
    ):
        RiemannianLaplace(twice, "euclidean").fit(KEY, jnp.zeros((), jnp.float32), **start)
    RiemannianLaplace(twice, "euclidean").fit(KEY, jnp.zeros(()), **start)  # 1e-8 of 2e6


def test_params_and_data_that_are_missing_are_asked_for() -> None:
    guide = RiemannianLaplace(logistic)
    with pytest.raises(RuntimeError, match="does not know the training data"):
        guide.sample_posterior(KEY, {"auto_loc": jnp.zeros(3)})
    free = RiemannianLaplace(lambda: numpyro.sample("x", dist.Normal(0, 1)), "euclidean")
    assert free.sample_posterior(KEY, {"auto_loc": jnp.zeros(1)})["x"].shape == ()
    guide, _ = fitted(logistic)
    with pytest.raises(ValueError, match="expected params with 'auto_loc'"):
        guide.sample_posterior(KEY, {})
    with pytest.raises(NotImplementedError, match="use `sample_posterior`"):
        guide.get_posterior({})
    with handlers.seed(rng_seed=0), pytest.raises(TypeError, match="log_weight must be"):
        guide.draw(KEY, {"auto_loc": jnp.zeros(3)}, log_weight=1)


def test_resampled_draws_have_the_mean_of_the_weights() -> None:
    """Each draw is taken n times its weight, rounded up or down; one that failed never is."""
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=(2, 50))
    logs = np.log(weights)
    logs[1, 7] = np.nan
    values = jnp.arange(100.0).reshape(2, 50)
    fields = dict.fromkeys(LaplaceDraws._fields)
    draws = LaplaceDraws(**fields)._replace(samples={"x": values}, log_weight=jnp.asarray(logs))
    taken = np.asarray(draws.resample(KEY)["x"])
    assert taken.shape == (2, 50)
    counts = np.bincount(taken.reshape(-1).astype(int), minlength=100)
    wanted = 100 * np.where(np.isnan(logs), 0, weights).reshape(-1)
    wanted /= np.where(np.isnan(logs), 0, weights).sum()
    assert np.all(np.abs(counts - wanted) < 1)
    assert counts[57] == 0
    assert np.any(np.diff(taken[0]) < 0)  # in random order


@pytest.mark.parametrize(
    ("log_weight", "match"),
    [
        (None, "use draw.*log_weight=True"),
        (jnp.zeros(()), "several draws"),
        (jnp.full(4, jnp.nan), "none among 4"),
    ],
)
def test_draws_that_cannot_be_resampled_are_refused(log_weight: object, match: str) -> None:
    draws = LaplaceDraws(**dict.fromkeys(LaplaceDraws._fields))._replace(log_weight=log_weight)
    with pytest.raises(ValueError, match=match):
        draws.resample(KEY)


def proportion() -> None:
    p = numpyro.sample("p", dist.Beta(1, 1))
    numpyro.sample("y", dist.Binomial(200, p), obs=0.0)


@pytest.mark.slow
def test_draws_that_are_too_narrow_are_flagged_however_good_their_weights_are() -> None:
    guide = RiemannianLaplace(proportion)
    params = guide.fit(KEY)
    draws = guide.draw(KEY, params, sample_shape=(4, 400), log_weight=True)
    # the posterior is Beta(1, 201), with an sd that 1,600 draws know to 0.04
    assert float(draws.samples["p"].std()) < 0.9 * (201 / 202**2 / 203) ** 0.5
    (flagged,) = diagnose(to_inference_data(draws)).flagged
    assert flagged.name == "relative error of the sd, by weights"
    assert "resample=True" in flagged.advice


def test_equal_weights_need_no_shape() -> None:
    """Draws that are right have no tail of weights, and a shape that says nothing."""
    some = np.random.default_rng(0).normal(size=100)
    assert can_correct(1e-4 * some, np.inf)
    assert can_correct(some, 0.4)
    assert not can_correct(some, 0.6)
    assert not can_correct(np.where(np.arange(100) == 3, np.nan, some), 0.4)


def test_velocities_that_are_not_found_are_told_from_geodesics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four Gaussian draws one is NaN: it is not followed, nor followed anew with more steps."""
    guide, params = fitted(logistic)
    gaussian = drawing.gaussian

    def lost(*args: Any) -> tuple:
        draws, squares = gaussian(*args)
        return draws.at[2].set(jnp.nan), squares.at[2].set(jnp.nan)

    monkeypatch.setattr(drawing, "gaussian", lost)
    with pytest.warns(
        SamplingWarning, match="1 of 4 geodesics failed: the velocity.*enable_x64"
    ) as told:
        draws = guide.draw(KEY, params, sample_shape=(4,))
    assert len(told) == 1
    np.testing.assert_array_equal(draws.success, [True, True, False, True])
    np.testing.assert_array_equal(np.isnan(draws.unconstrained).all(1), ~draws.success)
    assert draws.num_evaluations[2] == 0


@pytest.mark.slow
def test_a_guide_in_a_list_is_what_numpyros_own_is_there() -> None:
    """The straight one is NumPyro's; hidden sites have the seed's value in both."""

    def model(X: jax.Array, y: jax.Array | None = None) -> None:
        w = numpyro.sample("w", dist.Normal(0, 3).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)

    X = random.normal(random.key(0), (50, 2))
    y = X @ jnp.array([1.0, -1.0]) + random.normal(random.key(1), (50,)) / 2

    def spread(make: Any) -> tuple[jax.Array, jax.Array]:
        seen = handlers.block(handlers.seed(model, rng_seed=0), hide=["scale"])
        other = handlers.block(handlers.seed(model, rng_seed=1), hide=["w"])
        guides = AutoGuideList(model)
        guides.append(make(seen, prefix="a"))
        guides.append(AutoDelta(other, prefix="b"))
        svi = SVI(model, guides, optim.Adam(0.05), Trace_ELBO())
        params = svi.run(KEY, 300, X, y, progress_bar=False).params
        draws = guides.sample_posterior(KEY, params, X, y, sample_shape=(2000,))["w"]
        return draws.mean(0), draws.std(0)

    ours = spread(functools.partial(RiemannianLaplace, metric="euclidean"))
    theirs = spread(AutoLaplaceApproximation)
    # 5 standard errors of two samples of 2,000
    assert np.all(np.abs(ours[0] - theirs[0]) / theirs[1] < 5 * (2 / 2000) ** 0.5)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=5 / 2000**0.5)


def test_a_model_with_large_arrays_is_evaluated_at_few_positions_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = logistic_data()
    found = {}
    for numbers in (_util.AT_ONCE, 2 * data[0].size):  # its largest array are the rows drawn
        monkeypatch.setattr(_util, "AT_ONCE", numbers)
        guide = RiemannianLaplace(logistic, "euclidean")
        params = guide.fit(KEY, *data)
        draws = guide.sample_posterior(KEY, params, sample_shape=(5,))
        found[guide._learned["lanes"]] = draws["w"]
    assert [*found] == [_util.LANES, 2]
    np.testing.assert_allclose(found[2], found[_util.LANES], rtol=1e-6)
