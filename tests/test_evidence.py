"""The log evidence of a guide's weights, against closed forms and importance sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import stats
from scipy.special import logsumexp
from tiers import short

from numpyro_geom import RiemannianLaplace, diagnose, to_inference_data
from numpyro_geom.laplace import LaplaceDraws

RNG = np.random.default_rng(0)


def draws_of(model: Callable, *args: Any, count: int = 2000, **settings: Any) -> LaplaceDraws:
    guide = RiemannianLaplace(model, **{"metric": "euclidean", **settings})
    params = guide.fit(random.key(0), *args, num_starts=1)
    return guide.draw(random.key(1), params, sample_shape=(count,), log_weight=True)


def line(X: Any, y: Any) -> None:
    """A linear regression with a known variance."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=y[i])


def conjugate(X: Any, y: Any) -> None:
    """The same, whose unknown variance has a conjugate prior and a bounded support."""
    variance = numpyro.sample("variance", dist.InverseGamma(3, 2))
    w = numpyro.sample("w", dist.Normal(0, jnp.sqrt(variance)).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, jnp.sqrt(variance)), obs=y[i])


def rows(count: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    X = RNG.normal(size=(count, columns)).astype(np.float32)
    return X, (X[:, 0] + RNG.normal(size=count)).astype(np.float32)


@pytest.mark.parametrize(
    ("columns", "settings"),
    [(2, {}), (2, {"precision": "fisher"}), (200, {}), (2, {"mode": "hausdorff"})],
)
def test_of_a_normal_posterior_it_is_exact(columns: int, settings: dict) -> None:
    """All weights are equal: the error is that of rounding."""
    X, y = rows(columns + 50, columns)
    exact = stats.multivariate_normal.logpdf(y, cov=np.eye(len(y)) + X @ X.T)
    value, error = draws_of(line, X, y, **settings).log_evidence()
    assert value == pytest.approx(exact, abs=0.01)
    assert error < 3e-3  # of weights near -300 in 32 bits


@pytest.mark.parametrize("columns", short([1, 19], kept=[19]))
def test_with_a_bounded_site_it_is_right_within_its_error(columns: int) -> None:
    """y has a multivariate t distribution. Four standard errors: once in 16,000 runs."""
    X, y = rows(300, columns)
    shape = (np.eye(len(y)) + X @ X.T) * 2 / 3
    exact = stats.multivariate_t.logpdf(y, shape=shape, df=6)
    draws = draws_of(conjugate, X, y)
    value, error = draws.log_evidence()
    assert 1e-4 < error < 0.1
    assert abs(value - exact) < 4 * error + 2e-3  # the last is rounding
    report = str(diagnose(to_inference_data(draws)))
    assert f"log evidence {value:.2f} +- {error:.2g}" in report


def test_of_groups_it_is_that_of_the_law() -> None:
    """The nearest normal law of a hierarchy whose posterior is normal."""

    def groups(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("groups", 5):
            x = numpyro.sample("x", dist.Normal(mu, 0.5).to_event(1))
            numpyro.sample("y", dist.Normal(x, 1).to_event(1), obs=y)

    y = RNG.normal(size=(5, 2)).astype(np.float32)
    cov = 1.25 * np.eye(5) + 1
    exact = stats.multivariate_normal.logpdf(y.T, cov=cov).sum()
    draws = draws_of(groups, y, mode="mean", count=100)
    assert draws.log_evidence()[0] == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("data", short(["synthetic", "breast cancer"], kept=["breast cancer"]))
def test_of_a_logistic_regression_it_is_that_of_importance_sampling(data: str) -> None:
    def logistic(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])

    if data == "synthetic":
        X, y = rows(100, 3)
        y = (y > 0).astype(np.int32)
    else:
        sets = pytest.importorskip("sklearn.datasets", reason="the examples extra is needed")
        X, y = sets.load_breast_cancer(return_X_y=True)
        X = ((X - X.mean(0)) / X.std(0))[:, :10].astype(np.float32)
    draws = draws_of(logistic, X, y)
    value, error = draws.log_evidence()
    of_draws = np.asarray(draws.samples["w"])
    law = stats.multivariate_t(of_draws.mean(0), 1.2 * np.cov(of_draws.T), df=5)
    w = law.rvs(50_000, random_state=1)
    logits = w @ X.T
    joint = (logits * y - np.logaddexp(0, logits)).sum(1) + stats.norm.logpdf(w).sum(1)
    logs = joint - law.logpdf(w)
    weights = np.exp(logs - logs.max())
    noise = weights.std() / weights.mean() / len(w) ** 0.5
    assert noise < 0.01
    reference = logsumexp(logs) - np.log(len(w))
    assert abs(value - reference) < 4 * np.hypot(error, noise) + 2e-3  # the last is rounding


def test_without_weights_or_with_bad_ones_it_is_refused() -> None:
    logs = np.log(RNG.pareto(1.1, 1000))  # k of .9
    fields = LaplaceDraws(**dict.fromkeys(LaplaceDraws._fields))
    with pytest.raises(ValueError, match="expected draws with weights"):
        fields.log_evidence()
    narrow = {"unconstrained": np.zeros((1000, 3)), "settings": {}}
    draws = fields._replace(log_weight=jnp.asarray(logs), pareto_k=0.9, **narrow)
    with pytest.raises(ValueError, match="expected a pareto_k below 0.67, got 0.9"):
        draws.log_evidence()
    wide = {"unconstrained": np.zeros((1000, 3000)), "settings": {"precision": "fisher"}}
    with pytest.raises(ValueError, match="at most 2000 dimensions, got 3000"):
        draws._replace(pareto_k=0.3, **wide).log_evidence()
