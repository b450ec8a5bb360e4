"""The guide's search for a mode if rounding is as large as the remaining improvement."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.reparam import DiscreteCosineReparam

from numpyro_geom import RiemannianLaplace
from numpyro_geom.diagnostics import SamplingWarning
from numpyro_geom.laplace import fit
from numpyro_geom.laplace.fit import AtMode, Surroundings, check_definite, warn_of_surroundings

KEY = random.key(0)


@pytest.mark.slow
def test_a_search_in_float32_ends_where_the_energy_is_flat_to_rounding() -> None:
    def counts() -> None:
        p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        numpyro.sample("o", dist.Binomial(5_000_000, probs=p), obs=3849)

    guide = RiemannianLaplace(counts)
    guide.fit(KEY)
    assert guide.fit_report is not None
    assert guide.fit_report.num_steps.max() < 100  # of 2,000: the values alternate near the mode
    assert guide.fit_report.distance < 0.01


def test_a_run_that_rounding_has_stopped_goes_on_to_the_mode() -> None:
    noise = random.normal(KEY, (100, 4))
    X = 1 + 0.01 * noise[:, :3]  # columns that are nearly alike, of a response far from 0
    y = 100 + X.sum(1) + 0.3 * noise[:, 3]

    def model() -> None:
        w = numpyro.sample("w", dist.Normal(0, 100).expand([3]).to_event(1))
        s = numpyro.sample("s", dist.Exponential(1))
        with numpyro.plate("rows", 100) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, s), obs=y[i])

    guide = RiemannianLaplace(model)
    guide.fit(KEY, num_starts=1)  # without a warning; L-BFGS alone ends at 0.04
    assert guide.fit_report.distance < 0.01


def test_a_search_goes_around_where_the_objective_is_not_finite() -> None:
    """-log(1 - x^2) - 30 x, whose mode is at the end of where it is finite."""

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return -np.log(1 - x[0] ** 2) - 30 * x[0], 2 * x / (1 - x**2) - 30

    position, _, gradient_norm, _ = fit.find_mode(evaluate, np.zeros(1), max_steps=100)
    exact = ((1 + 30**2) ** 0.5 - 1) / 30
    np.testing.assert_allclose(position, exact, rtol=1e-6)
    assert gradient_norm < 1e-3
    assert fit.find_mode(evaluate, np.full(1, 2.0), max_steps=100)[3] == 0


def centred_schools() -> None:
    y, errors = jnp.array([28.0, 8.0, -3.0, 7.0]), jnp.array([15.0, 10.0, 16.0, 11.0])
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    effect = numpyro.sample("effect", dist.Normal(mu, tau).expand([4]).to_event(1))
    numpyro.sample("y", dist.Normal(effect, errors).to_event(1), obs=y)


def test_a_hierarchy_whose_scale_the_draws_would_miss_is_named() -> None:
    # log tau of these draws has a quarter of the posterior's sd; regressions do not warn
    with pytest.warns(SamplingWarning, match=r"curves between .* times as much .* \['tau'\]"):
        RiemannianLaplace(centred_schools).fit(KEY)


def skewed() -> None:
    numpyro.sample("x", dist.Gumbel(0, 1))


def test_draws_that_gradients_show_to_be_wrong_are_warned_of_once() -> None:
    guide = RiemannianLaplace(skewed, metric="euclidean")
    match = r"error of the means, in sd: -0\.\d.*; x, unconstrained: .* use metric='fisher', or run"
    params = guide.fit(KEY)
    with pytest.warns(SamplingWarning, match=match) as told:
        guide.sample_posterior(KEY, params, sample_shape=(4, 250))
    guide.sample_posterior(KEY, params, sample_shape=(4, 250))
    assert [w.filename for w in told] == [__file__]
    params = guide.fit(KEY)
    with pytest.warns(SamplingWarning, match=match) as told:
        Predictive(skewed, guide=guide, params=params, num_samples=10)(KEY)
    assert [w.filename for w in told] == [__file__]


def test_a_mean_that_is_not_taken_is_warned_of() -> None:
    at = AtMode(*[jnp.zeros(())] * 5)
    near = Surroundings(jnp.array(0.9), jnp.array([0.6, 1.9]), jnp.ones(1))
    warn_of_surroundings(at, lambda x: {"x": x})  # not looked at
    warn_of_surroundings(at._replace(around=near), lambda x: {"x": x})
    for shift in (1.1, jnp.nan):
        far = at._replace(around=near._replace(shift=jnp.array(shift)))
        with pytest.warns(SamplingWarning, match="posterior sd away .expected up to 1."):
            warn_of_surroundings(far, lambda x: {"x": x})


@pytest.mark.parametrize("smallest", [4070.0, 0.0, -4070.0])
def test_a_matrix_without_rank_to_rounding_is_not_called_indefinite(smallest: float) -> None:
    settings = RiemannianLaplace(centred_schools).settings.resolve(
        2, has_factor=False, has_observed=True
    )
    values = (jnp.float32(smallest), jnp.float32(1e11), jnp.float32(0))
    at = AtMode(jnp.full((2, 2), jnp.nan), *values, jnp.zeros(2))
    with pytest.raises(ValueError, match=r"singular in float32: expected .* 2\.4e\+04, rounding"):
        check_definite(settings, at, jnp.zeros(2, jnp.float32))
    lower = at._replace(smallest=jnp.float32(-1e5))
    with pytest.raises(ValueError, match="not positive definite"):
        check_definite(settings, lower, jnp.zeros(2, jnp.float32))


@pytest.mark.slow
def test_a_model_with_a_fourier_transform_has_a_mode_and_draws() -> None:
    def walk(y: jax.Array) -> None:
        x = numpyro.sample("x", dist.Normal(0, 1).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(x, 1).to_event(1), obs=y)

    model = handlers.reparam(walk, config={"x": DiscreteCosineReparam()})
    y = jnp.array([0.0, 1.0, -1.0, 2.0])
    guide = RiemannianLaplace(model, "euclidean")
    params = guide.fit(KEY, y, num_starts=1)
    draws = guide.draw(KEY, params, sample_shape=(400,)).samples["x"]
    # N(y / 2, 1 / 2): 4.5 standard errors
    assert jnp.max(jnp.abs(draws.mean(0) - y / 2)) < 4.5 * (0.5 / 400) ** 0.5
