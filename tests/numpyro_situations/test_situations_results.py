"""Starts and what is done with draws (test_infer_util)"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from methods import KEY, LAPLACE, ROUNDING, chains
from numpyro.infer import (
    SVI,
    Predictive,
    Trace_ELBO,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
    initialize_model,
)

pytestmark = pytest.mark.numpyro_situations

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=12), jnp.float32)
Y = 1.5 + 0.7 * X + 0.5 * jnp.asarray(RNG.normal(size=12), jnp.float32)


def line(x: Any, y: Any = None) -> None:
    alpha = numpyro.sample("alpha", dist.Normal(0, 5))
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("rows", len(x)) as i:
        mu = numpyro.deterministic("mu", alpha + x[i] * beta)
        numpyro.sample("obs", dist.Normal(mu, sigma), obs=None if y is None else y[i])


@cache
def of_line(method: Any) -> dict[str, jax.Array]:
    return method.draws(line, X, y=Y)


STRATEGIES: dict[str, tuple[Callable, Any]] = {
    "init_to_feasible": (init_to_feasible, 0.0),
    "init_to_feasible()": (init_to_feasible(), 0.0),
    "init_to_mean": (init_to_mean, None),
    "init_to_median": (init_to_median, None),
    "init_to_median(num_samples=2)": (init_to_median(num_samples=2), None),
    "init_to_sample": (init_to_sample, None),
    "init_to_sample()": (init_to_sample(), None),
    "init_to_uniform": (init_to_uniform, None),
    "init_to_uniform(radius=0.1)": (init_to_uniform(radius=0.1), None),
    "init_to_value(values=all)": (
        init_to_value(values={"alpha": 1.0, "beta": 1.0, "sigma": jnp.array(2.0)}),
        1.0,
    ),
    "init_to_value(values=one)": (init_to_value(values={"alpha": 1.0}), 1.0),
    "init_to_value()": (init_to_value(), None),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_init_strategy(method: Any, strategy: str) -> None:
    """Start: `{strategy}`"""
    chosen, alpha = STRATEGIES[strategy]
    if method is LAPLACE:
        made = method(line, metric="euclidean", init_loc_fn=chosen)
        svi = SVI(line, made, numpyro.optim.Adam(0.1), Trace_ELBO())
        params = svi.get_params(svi.init(KEY, X, y=Y))
        start = made._unpack_and_constrain(params["auto_loc"], params)
    else:
        made = method.quick(line, init_strategy=chosen)
        state = made.init(KEY, 0, None, (X,), {"y": Y})
        start = made.postprocess_fn((X,), {"y": Y})(state.z)
    expected = initialize_model(
        KEY, line, init_strategy=chosen, model_args=(X,), model_kwargs={"y": Y}
    )
    assert set(expected.param_info.z) <= set(start)
    assert np.isfinite(jax.tree.leaves(start)[0]).all()
    if alpha is not None:
        assert start["alpha"] == alpha  # unconstrained: no transform rounds it
    if "radius" in strategy:
        assert np.abs(start["alpha"]) < 0.1  # the radius, likewise


@pytest.mark.parametrize("parallel", [False, True], ids=["in sequence", "in parallel"])
def test_predictive(method: Any, parallel: bool) -> None:
    """`Predictive` of the draws on other rows; deterministic sites are computed anew"""
    draws = of_line(method)
    found = Predictive(line, draws, parallel=parallel)(KEY, X[:5])
    assert set(found) == {"mu", "obs"}
    assert found["mu"].shape == found["obs"].shape == (5, 5)
    found = Predictive(line, draws, return_sites=["beta", "obs"])(KEY, X)
    np.testing.assert_array_equal(found["beta"], draws["beta"])


def test_predictive_of_params(method: Any) -> None:
    """`Predictive` with `params` of a model that has both draws and params"""

    def model(y: Any = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        sigma = numpyro.param("sigma", 1.0, constraint=dist.constraints.positive)
        with numpyro.plate("N", 4 if y is None else len(y)):
            y = numpyro.sample("y", dist.Normal(mu, sigma), obs=y)
        numpyro.deterministic("z", (y - mu) / sigma)

    draws = method.draws(model, Y)
    found = Predictive(model, draws, params={"sigma": 3.0})(KEY, Y[:4])
    assert found["z"].shape == (5, 4)
    np.testing.assert_allclose(
        3 * found["z"], Y[:4] - draws["mu"][:, None], rtol=ROUNDING, atol=ROUNDING
    )


def test_prior_predictive_of_the_kernels_model(kernel: Any) -> None:
    """`Predictive` of the prior, and of the model that a kernel has bound"""
    mcmc = chains(kernel.quick(line))
    mcmc.run(KEY, X, y=Y)
    prior = partial(Predictive, num_samples=3, batch_ndims=1)
    for model in (line, mcmc.sampler.model):
        assert prior(model)(KEY, X)["obs"].shape == (3, 12)
