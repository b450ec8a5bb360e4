"""Chains and calls (test_mcmc)"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from methods import KEY, ROUNDING, chains, same
from numpyro.infer.util import initialize_model
from numpyro.util import fori_collect

pytestmark = pytest.mark.numpyro_situations

Y = jnp.linspace(-1.0, 2.0, 12)


def normal(y: Any = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.deterministic("twice", 2 * mu)
    with numpyro.plate("data", 12 if y is None else y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(mu, sigma), obs=None if y is None else y[i])


def gaussian(z: jax.Array) -> jax.Array:
    return 0.5 * jnp.sum(((z - 1.0) / 0.5) ** 2)


def test_new_data(kernel: Any) -> None:
    """A second run on data of another shape forgets the first"""
    mcmc = chains(kernel(normal), 300, 300)
    mcmc.run(KEY, 0.3 * Y + 3.0)
    mcmc.run(KEY, 0.3 * Y[:8] - 3.0)
    # the posterior's sd is 0.1, and its mean that of the data up to a hundredth
    np.testing.assert_allclose(mcmc.get_samples()["mu"].mean(), 0.3 * Y[:8].mean() - 3, atol=0.1)


def test_warmup_apart(kernel: Any) -> None:
    """`warmup`, then `run` with the state's key, are one `run`; `collect_warmup` collects"""
    mcmc = chains(kernel.quick(normal), 4, 6)
    mcmc.run(KEY, Y)
    expected = mcmc.get_samples()
    mcmc.warmup(KEY, Y, collect_warmup=True)
    assert mcmc.get_samples()["mu"].shape == (4,)
    assert mcmc.post_warmup_state is not None
    mcmc.run(mcmc.post_warmup_state.rng_key, Y)
    assert same(mcmc.get_samples(), expected)


def test_functional(kernel: Any) -> None:
    """`initialize_model`'s potential and start, with `init` and `sample` in `fori_collect`"""
    info = initialize_model(KEY, normal, model_args=(Y,))
    made = kernel.quick(potential_fn=info.potential_fn)
    state = made.init(KEY, 2, info.param_info.z, (), {})
    draws = fori_collect(
        *(2, 6, lambda s: made.sample(s, (), {}), state),
        transform=lambda s: info.postprocess_fn(s.z),
        progbar=False,
    )
    assert draws["twice"].shape == (4,)
    np.testing.assert_allclose(draws["twice"], 2 * draws["mu"], rtol=1e-6)
    assert (draws["sigma"] > 0).all()


def test_mapped(kernel: Any) -> None:
    """`init` and `sample` of a potential under `vmap` and `pmap`"""
    made = kernel.quick(potential_fn=gaussian)
    starts, keys = jnp.array([0.0, -1.0]), random.split(KEY, 2)
    found = []
    for mapped in (jax.vmap, jax.pmap):
        states = mapped(lambda z, key: made.init(key, 0, z, (), {}))(starts, keys)
        for _ in range(2):
            states = mapped(lambda s: made.sample(s, (), {}))(states)
        found.append(states.z)
    assert (found[0] != starts).all()
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_run_in_jit(kernel: Any) -> None:
    """A whole run inside `jax.jit`, data traced"""

    @jax.jit
    def draws(key: jax.Array, y: jax.Array) -> dict:
        mcmc = chains(kernel.quick(normal), num_chains=2, chain_method="vectorized")
        mcmc.run(key, y)
        return mcmc.get_samples()

    mcmc = chains(kernel.quick(normal), num_chains=2, chain_method="vectorized")
    mcmc.run(KEY, Y)
    np.testing.assert_allclose(draws(KEY, Y)["mu"], mcmc.get_samples()["mu"], rtol=ROUNDING)


def test_traced_step_size(kernel: Any) -> None:
    """A `step_size` that is traced"""

    @jax.jit
    def draws(step_size: jax.Array) -> dict:
        mcmc = chains(kernel.quick(normal, step_size=step_size))
        mcmc.run(KEY, Y)
        return mcmc.get_samples()

    assert np.isfinite(draws(0.01)["mu"]).all()


def test_empty_model(kernel: Any) -> None:
    """A model without any site: a run without draws"""
    mcmc = chains(kernel.quick(lambda: None))
    with pytest.warns(UserWarning, match="no free parameter"):
        mcmc.run(KEY)
    assert mcmc.get_samples() == {}


def paths(a: Any = None, b: Any = None, z: Any = None) -> None:
    mean = numpyro.sample("a", dist.Normal(0, 1))
    if a is not None:
        mean = mean + a * numpyro.sample("x", dist.HalfNormal(0.5))
    if b is not None:
        mean = mean + b * numpyro.sample("y", dist.HalfNormal(0.5))
    numpyro.sample("obs", dist.Normal(mean, 1), obs=z)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit_model_args"])
def test_execution_paths(kernel: Any, jit: bool) -> None:
    """Arguments that are None or not decide which sites a model has, run after run"""
    mcmc = chains(kernel.quick(paths), jit_model_args=jit)
    x, z = np.arange(10.0), np.linspace(-1, 1, 10)
    mcmc.run(KEY, x, b=None, z=z)
    assert set(mcmc.get_samples()) == {"a", "x"}
    mcmc.run(KEY, a=None, b=x, z=z)
    assert set(mcmc.get_samples()) == {"a", "y"}
    mcmc.run(KEY, a=x, b=x, z=z)
    assert set(mcmc.get_samples()) == {"a", "x", "y"}


def test_validation(kernel: Any) -> None:
    """With `numpyro.enable_validation` a good model runs and a value out of its support raises"""
    with numpyro.validation_enabled():
        kernel.draws(normal, Y)

        def bad(y: Any) -> None:
            rate = numpyro.sample("rate", dist.HalfNormal(1))
            numpyro.sample("y", dist.Exponential(rate), obs=y)

        with pytest.raises(ValueError, match="'y' are outside of the support .* in rows"):
            kernel.draws(bad, Y)
