"""The guide as NumPyro's guides (test_autoguide)"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from methods import KEY, PLAIN, ROUNDING
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO, init_to_value

pytestmark = pytest.mark.numpyro_situations

DATA = jnp.stack([jnp.repeat(jnp.array([1.0, 0.0]), jnp.array(n)) for n in ([8, 2], [4, 6])], -1)


def bernoulli(data: Any) -> None:
    f = numpyro.sample("beta", dist.Beta(jnp.ones(2), jnp.ones(2)).to_event())
    with numpyro.plate("N", 10):
        numpyro.sample("obs", dist.Bernoulli(f).to_event(1), obs=data)


@cache
def fitted(guide: Any) -> tuple[Any, dict]:
    """One guide with its mode, and what it has compiled, for the tests that do not fit again."""
    made = guide(bernoulli, **PLAIN)
    return made, made.fit(KEY, DATA, num_starts=1)


def trained(guide: Any, model: Any, *args: Any, steps: int = 300) -> tuple[Any, dict]:
    made = guide(model, **PLAIN)
    svi = SVI(model, made, numpyro.optim.Adam(0.1), Trace_ELBO())
    return made, svi.run(KEY, steps, *args, progress_bar=False).params


def test_svi(guide: Any) -> None:
    """SVI finds the mode that `fit` finds; both keys of `params` are there"""
    made, params = trained(guide, bernoulli, DATA)
    # SVI with Adam ends within a hundredth, a fiftieth of the posterior's sd
    np.testing.assert_allclose(params["auto_loc"], fitted(guide)[1]["auto_loc"], atol=0.02)
    draws = made.sample_posterior(KEY, params, sample_shape=(1000,))
    exact = (DATA.sum(0) + 1) / 12
    # the guide's own error and that of 1,000 draws of sd 0.13
    np.testing.assert_allclose(draws["beta"].mean(0), exact, atol=0.05)


def test_quantiles(guide: Any) -> None:
    """`median` and `quantiles`, of a number and of a list"""
    made, params = fitted(guide)
    assert made.quantiles(params, [0.2, 0.5, 0.8])["beta"].shape == (3, 2)
    assert made.median(params)["beta"].shape == (2,)


def test_predictive(guide: Any) -> None:
    """`Predictive` with draws, and with the guide and its params"""
    made, params = fitted(guide)
    draws = made.sample_posterior(KEY, params, sample_shape=(2, 3))
    found = Predictive(bernoulli, posterior_samples=draws, batch_ndims=2)(KEY, None)
    assert found["obs"].shape == (2, 3, 10, 2)
    predictive = Predictive(bernoulli, guide=made, params=params, num_samples=3)
    assert predictive(KEY, None)["obs"].shape == (3, 10, 2)


def test_one_draw(guide: Any) -> None:
    """`sample_posterior` without a shape, inside of `jit` and under `vmap`"""
    made, params = fitted(guide)
    one = made.sample_posterior(KEY, params)["beta"]
    assert one.shape == (2,)
    inside = jax.jit(lambda key: made.sample_posterior(key, params)["beta"])
    np.testing.assert_allclose(inside(KEY), one, rtol=ROUNDING)
    keys = jax.random.split(KEY, 3)
    found = jax.vmap(lambda key: made.sample_posterior(key, params)["beta"])(keys)
    assert found.shape == (3, 2)


def test_call(guide: Any) -> None:
    """The guide called under `seed` and `trace` has the model's latent sites"""
    trace = handlers.trace(handlers.seed(guide(bernoulli), 0)).get_trace(DATA)
    assert {"auto_loc", "beta"} <= set(trace)
    assert trace["beta"]["value"].shape == (2,)


def test_scalar_init(guide: Any) -> None:
    """`init_loc_fn=init_to_value` with a plain number"""

    def model() -> None:
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("obs", dist.Normal(x, 1), obs=1.0)

    made = guide(model, init_loc_fn=init_to_value(values={"x": 1.0}))
    svi = SVI(model, made, numpyro.optim.Adam(1.0), Trace_ELBO())
    assert svi.get_params(svi.init(KEY))["auto_loc"] == 1.0


def test_singular_hessian(guide: Any) -> None:
    """A Hessian that is singular in 32 bits (4 coefficients, 3 points, noise of 0.001)"""

    def model(x: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = numpyro.sample("b", dist.Normal(0, 10).expand([3]).to_event())
        with numpyro.plate("N", len(x)):
            mean = a + b[0] * x + b[1] * x**2 + b[2] * x**3
            numpyro.sample("y", dist.Normal(mean, 0.001), obs=y)

    x = jnp.array([-1.0, 0.5, 1.5])
    y = 1 + 2 * x + 3 * x**2 + 4 * x**3
    made = guide(model)
    with pytest.raises(RuntimeError, match="float64"):
        made.sample_posterior(KEY, made.fit(KEY, x, y))


def test_metric_of_ones_own(guide: Any) -> None:
    """A function for the curvature (`hessian_fn` of `AutoLaplaceApproximation`, here `metric`)"""
    made = guide(bernoulli, metric=lambda position: jnp.eye(2))
    draws = made.sample_posterior(KEY, made.fit(KEY, DATA, num_starts=1), sample_shape=(3,))
    assert draws["beta"].shape == (3, 2)


def test_get_posterior(guide: Any) -> None:
    """`get_posterior`, `get_transform`: a distribution in closed form"""
    made, params = fitted(guide)
    with pytest.raises(NotImplementedError, match="sample_posterior"):
        made.get_posterior(params)
