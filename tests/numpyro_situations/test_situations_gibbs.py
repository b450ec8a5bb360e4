"""Composite kernels (test_hmc_gibbs, test_gibbs)"""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from methods import KEY, chains, same
from numpyro.contrib.control_flow import scan
from numpyro.infer import (
    HMCECS,
    NUTS,
    CustomGibbs,
    DiscreteHMCGibbs,
    Gibbs,
    HMCGibbs,
    MixedHMC,
)

pytestmark = pytest.mark.numpyro_situations


def two(scale: Any = 2.0) -> None:
    x = numpyro.sample("x", dist.Normal(0.0, scale))
    y = numpyro.sample("y", dist.Normal(0.0, scale))
    numpyro.deterministic("sum", x + y)
    numpyro.sample("obs", dist.Normal(x + y, 1.0), obs=jnp.array([1.0]))


def of_x(rng_key: jax.Array, gibbs_sites: dict, hmc_sites: dict) -> dict:
    """x given y, for a prior of sd 2: a Gaussian of variance 4/5 about 4/5 (1 - y)."""
    return {"x": dist.Normal(0.8 * (1 - hmc_sites["y"]), jnp.sqrt(0.8)).sample(rng_key)}


def composite(kernel: Any, model: Any = two, **settings: Any) -> Gibbs:
    return Gibbs([(CustomGibbs(of_x), ["x"]), (kernel.quick(model, **settings), None)])


def mixture(probs: Any, locs: Any) -> None:
    c = numpyro.sample("c", dist.Categorical(probs))
    x = numpyro.sample("x", dist.Normal(locs[c], 1.0))
    numpyro.sample("obs", dist.Normal(x, 1.0), obs=0.5)


def test_several_blocks(kernel: Any) -> None:
    """`Gibbs` with two blocks of this kernel, and with one of NUTS"""

    def model() -> None:
        x = numpyro.sample("x", dist.Normal(0, 1))
        y = numpyro.sample("y", dist.HalfNormal(1))
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("obs", dist.Normal(x + z, y), obs=jnp.array([0.5, -0.5, 1.0]))

    blocks = [(kernel.quick(model), ["x"]), (NUTS(model), ["y"]), (kernel.quick(model), None)]
    mcmc = chains(Gibbs(blocks))
    mcmc.run(KEY)
    for values in mcmc.get_samples().values():
        assert len(np.unique(values)) > 1


def test_nested_gibbs(kernel: Any) -> None:
    """`Gibbs` within `Gibbs`, with a deterministic site"""
    inner = Gibbs([(CustomGibbs(of_x), ["x"])] + [(kernel.quick(two), ["y"])])
    mcmc = chains(Gibbs([(inner, None)]))
    mcmc.run(KEY)
    draws = mcmc.get_samples()
    np.testing.assert_allclose(draws["sum"], draws["x"] + draws["y"], rtol=1e-5)


def test_gibbs_chains(kernel: Any) -> None:
    """`Gibbs`: chain methods, fields of the blocks, a second run, pickling"""
    for method in ("sequential", "parallel", jax.vmap):
        mcmc = chains(composite(kernel), num_chains=2, chain_method=method)
        mcmc.run(KEY, extra_fields=("block_states.1.diverging",))
        assert mcmc.get_samples(group_by_chain=True)["y"].shape == (2, 5)
        assert mcmc.get_extra_fields()["block_states.1.diverging"].shape == (10,)
    copy = pickle.loads(pickle.dumps(mcmc))
    for either in (mcmc, copy):
        either.post_warmup_state = either.last_state
        either.run(KEY)
    assert same(mcmc.get_samples(), copy.get_samples())
    assert "steps of size" in mcmc.sampler.get_diagnostics_str(
        jax.tree.map(lambda x: x[0], mcmc.last_state)
    )


def test_gibbs_scan(kernel: Any) -> None:
    """`Gibbs` on a model with `scan`"""

    def model() -> None:
        y = numpyro.sample("y", dist.Normal(0, 1))
        x = numpyro.sample("x", dist.Normal(0, 1))

        def step(state: jax.Array, row: jax.Array) -> tuple:
            state = numpyro.sample("z", dist.Normal(0.5 * state, 1))
            numpyro.sample("obs", dist.Normal(state + x, 1), obs=row)
            return state, None

        scan(step, y, jnp.linspace(-1, 1, 4))

    mcmc = chains(composite(kernel, model))
    mcmc.run(KEY)
    assert mcmc.get_samples()["z"].shape == (5, 4)


def test_gibbs_dynamic_support(kernel: Any) -> None:
    """`Gibbs` on a model whose supports depend on sites"""

    def model() -> None:
        y = numpyro.sample("y", dist.Normal(0, 1))
        x = numpyro.sample("x", dist.Normal(0, 1))
        z = numpyro.sample("z", dist.Uniform(y, y + 1.0))
        numpyro.sample("obs", dist.Normal(x + z, 1), obs=0.5)

    mcmc = chains(composite(kernel, model))
    mcmc.run(KEY)
    draws = mcmc.get_samples()
    assert (draws["z"] >= draws["y"]).all()


@pytest.mark.parametrize("host", ["HMCGibbs", "DiscreteHMCGibbs", "MixedHMC", "HMCECS"])
def test_hmc_composites(kernel: Any, host: str) -> None:
    """This kernel inside of `{host}`, which takes HMC and NUTS"""
    made = {
        "HMCGibbs": lambda: HMCGibbs(kernel.quick(two), of_x, ["x"]),
        "DiscreteHMCGibbs": lambda: DiscreteHMCGibbs(kernel.quick(mixture)),
        "MixedHMC": lambda: MixedHMC(kernel.quick(mixture)),
        "HMCECS": lambda: HMCECS(kernel.quick(two)),
    }
    with pytest.raises(
        ValueError, match="inner_kernel must be an HMC"
    ):  # by NumPyro, before this package
        chains(made[host]()).run(KEY)
