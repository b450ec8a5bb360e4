"""Neural networks (test_module)"""

from __future__ import annotations

import contextlib
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.example_libraries.stax import Dense
from methods import KEY
from numpyro.contrib.module import (
    eqx_module,
    flax_module,
    nnx_module,
    random_eqx_module,
    random_flax_module,
    random_nnx_module,
)

linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
pytestmark = pytest.mark.numpyro_situations

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 2)).astype(np.float32)
Y = (X @ np.array([1.0, -1.0]) + 0.5 * RNG.normal(size=20)).astype(np.float32)
NOISE = 0.5


class Linear(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.w = nnx.Param(jnp.zeros((2, 1)))
        self.b = nnx.Param(jnp.zeros(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...] + self.b[...]


def observe(net: Any, shift: Any = 0.0) -> None:
    with numpyro.plate("rows", 20):
        numpyro.sample("y", dist.Normal(jnp.squeeze(net(X), -1) + shift, NOISE), obs=Y)


# --- networks whose weights have priors

PRIORS = {
    "a distribution": dist.Normal(0, 1),
    "a dict": {"kernel": dist.Normal(0, 1), "bias": dist.Normal(0, 1)},
    "a function": lambda name, shape: dist.Normal(0, 1),
}
INPUTS = {"a distribution": {"input_shape": (2,)}, "a dict": {"inputs": X}, "a function": {}}


def random_linen(prior: str) -> None:
    args = (jnp.ones(2),) if prior == "a function" else ()
    observe(random_flax_module("nn", linen.Dense(1), PRIORS[prior], *args, **INPUTS[prior]))


def moments() -> tuple[np.ndarray, np.ndarray]:
    """Posterior mean and sd of the weights and the bias, all with standard normal priors."""
    design = np.column_stack([X, np.ones(20)]).astype(float)
    covariance = np.linalg.inv(np.eye(3) + design.T @ design / NOISE**2)
    return covariance @ design.T @ Y / NOISE**2, np.sqrt(np.diag(covariance))


def test_random_flax(method: Any) -> None:
    """`random_flax_module`: the Gaussian posterior of a linear layer"""
    found = method.posterior(random_linen, "a distribution")
    mean, sd = moments()
    found.check("nn/kernel", mean[:2, None], sd[:2, None])
    found.check("nn/bias", mean[2:], sd[2:])


def test_random_flax_priors(method: Any) -> None:
    """`random_flax_module`: priors by a dict and a function, inputs by name and by position"""
    for prior in ("a dict", "a function"):
        assert set(method.draws(random_linen, prior)) == {"nn/kernel", "nn/bias"}


def test_random_nnx(method: Any) -> None:
    """`random_nnx_module`"""
    module = Linear(nnx.Rngs(0))
    draws = method.draws(lambda: observe(random_nnx_module("nn", module, dist.Normal(0, 1))))
    assert {"nn/w", "nn/b"} <= set(draws)


def test_random_equinox(method: Any) -> None:
    """`random_eqx_module`"""
    module = equinox.nn.Linear(2, 1, key=KEY)

    def model() -> None:
        observe(jax.vmap(random_eqx_module("nn", module, dist.Normal(0, 1))))

    assert {"nn/weight", "nn/bias"} <= set(method.draws(model))


# --- networks whose weights are params, and keep their values

untrained = pytest.mark.filterwarnings("ignore:the param sites .* stay at random first values")


@untrained
def test_fixed_networks(method: Any) -> None:
    """`flax_module`, `nnx_module`, `eqx_module`, `numpyro.module`: weights keep their values"""
    eqx, module = equinox.nn.Linear(2, 1, key=KEY), Linear(nnx.Rngs(0))

    def model() -> None:
        shift = numpyro.sample("shift", dist.Normal(0, 1))
        nets = {
            "flax": flax_module("flax", linen.Dense(1), input_shape=(2,)),
            "nnx": nnx_module("nnx", module),
            "eqx": jax.vmap(eqx_module("eqx", eqx)),
            "stax": numpyro.module("stax", Dense(1), (2,)),
        }
        total = sum(jnp.squeeze(net(X), -1) for net in nets.values())
        numpyro.deterministic("total", total)
        with numpyro.plate("rows", 20):
            numpyro.sample("y", dist.Normal(total + shift, NOISE), obs=Y)

    total = np.asarray(method.draws(model)["total"])
    assert np.abs(total).max() > 0
    np.testing.assert_array_equal(total, np.broadcast_to(total[0], total.shape))


class Normalised(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.BatchNorm(use_running_average=False)(linen.Dense(3)(x))
        return linen.Dense(1)(linen.Dropout(0.5, deterministic=False)(x))


@pytest.fixture
def fresh_keys(method: Any) -> Any:
    """``with fresh_keys:`` the block runs, or is refused where all needs to be of one energy."""
    if method.name in ("GGMC", "RiemannianLaplace"):
        return pytest.raises(ValueError, match="leave the randomness out")
    return contextlib.nullcontext()


@untrained
def test_batch_norm_and_dropout(method: Any, fresh_keys: Any) -> None:
    """A network with batch statistics (a mutable site) and dropout (`numpyro.prng_key`)"""

    def model() -> None:
        net = flax_module(
            *("nn", Normalised()), apply_rng=["dropout"], mutable=["batch_stats"], input_shape=(2,)
        )
        shift = numpyro.sample("shift", dist.Normal(0, 1))
        observe(lambda x: net(x, rngs={"dropout": numpyro.prng_key()}), shift)

    with fresh_keys:
        assert np.isfinite(method.draws(model)["shift"]).all()


def test_random_with_statistics(method: Any, fresh_keys: Any) -> None:
    """A network with priors on its weights and batch statistics"""

    def model() -> None:
        net = random_flax_module(
            *("nn", Normalised(), dist.Normal(0, 1)),
            apply_rng=["dropout"],
            mutable=["batch_stats"],
            input_shape=(2,),
        )
        observe(lambda x: net(x, rngs={"dropout": numpyro.prng_key()}))

    with fresh_keys:
        draws = method.draws(model)
        assert draws["nn/Dense_0.kernel"].shape[1:] == (2, 3)
