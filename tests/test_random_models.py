"""Models that request keys (`numpyro.prng_key`): augmentation and dropout, new at every step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.contrib.module import flax_module, random_flax_module
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from targets import vectorized
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGRLD, HostRows, RiemannianLaplace, diagnose
from numpyro_geom.model.minibatch import RNG_KEY, draw
from numpyro_geom.model.model import Model
from numpyro_geom.model.plates import read_subsampling

ROWS, NOISE = 40, 2.0
Y = np.random.default_rng(0).normal(1.0, NOISE, ROWS).astype(np.float32)
ON_DEVICE = jnp.asarray(Y)
SHIFT = 0.5


def shifted(y: Any) -> None:
    """Rows are moved by one random number: it adds a constant to the mean of U, and noise."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", len(Y)) as i:
        e = SHIFT * random.normal(numpyro.prng_key())
        numpyro.sample("y", dist.Normal(mu + e, NOISE), obs=y[i])


def posterior() -> tuple[float, float]:
    precision = 1 + ROWS / NOISE**2
    return float(Y.sum() / NOISE**2 / precision), precision**-0.5


@pytest.mark.parametrize("batch_size", short([None, 10], kept=[10]))
def test_law_is_that_of_the_mean_energy(batch_size: int | None) -> None:
    kernel = SGRLD(shifted, batch_size=batch_size, bias_tolerance=0.05)
    mcmc = vectorized(kernel, 300, 1000, 4)
    mcmc.run(random.key(0), Y)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])
    mean, sd = posterior()
    assert abs(draws.mean() - mean) < 4 * sd / effective_sample_size(draws) ** 0.5
    # a fixed key moves the mean by up to its shift, several of these errors
    assert abs(draws.std() / sd - 1) < 0.025 + 4 / (2 * effective_sample_size(draws**2)) ** 0.5
    assert not any("error of the means" in check.name for check in diagnose(mcmc).checks)


def test_noise_of_the_keys_is_measured() -> None:
    plan = read_subsampling(shifted, (ON_DEVICE,), {})
    potential = Model(shifted, (ON_DEVICE,), {}, plan).potential()
    ((weight, energies),) = potential.score_noise(random.key(1))
    slopes = jax.jacrev(lambda mu: energies({"mu": mu}))(jnp.float32(0.3))
    exact = (ROWS * SHIFT / NOISE**2) ** 2
    error = exact * (2 / len(slopes)) ** 0.5
    assert weight * np.var(slopes, ddof=1) == pytest.approx(exact, abs=4 * error)


def test_a_step_has_one_key_and_the_next_another() -> None:
    plan = read_subsampling(shifted, (ON_DEVICE,), {}, 10)
    assert plan.is_random
    potential = Model(shifted, (ON_DEVICE,), {}, plan).potential()
    z = {"mu": jnp.float32(0.3)}
    batch, _ = draw(plan, random.key(0), ())
    again, _ = draw(plan, random.key(1), ())
    same_rows = {**again, "rows": batch["rows"]}
    assert potential.energy(z, batch) == potential.energy(z, batch)
    assert potential.energy(z, batch) != potential.energy(z, same_rows)
    one, other = potential.split(batch, 2)
    assert (random.key_data(one[RNG_KEY]) != random.key_data(other[RNG_KEY])).any()


def test_two_keys_of_a_model_differ() -> None:
    def model() -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        one, other = (random.normal(numpyro.prng_key()) for _ in range(2))
        numpyro.factor("difference", mu * 0 + jnp.where(one == other, 0.0, 100.0))

    plan = read_subsampling(model, (), {})
    potential = Model(model, (), {}, plan).potential()
    assert potential.energy({"mu": jnp.float32(0)}, {}) < -50


@pytest.mark.parametrize(
    "kernel",
    [
        GGMC(shifted, batch_size=10),
        SGRLD(shifted, adjusted=True),
        SGHMC(shifted, batch_size=10, control_variate=True),
    ],
)
def test_what_needs_one_energy_refuses(kernel: Any) -> None:
    with pytest.raises(ValueError, match=r"asks for a random key .* use "):
        kernel.init(random.key(0), 10, None, (Y,), {})


def test_a_guide_refuses() -> None:
    with pytest.raises(ValueError, match=r"asks for a random key .* use SGRLD"):
        RiemannianLaplace(shifted).fit(random.key(0), Y)


@pytest.mark.parametrize(
    "settings",
    short([{"batching": "epoch"}, {"divergence": "auxiliary"}, {}], kept=[{"batching": "epoch"}]),
)
def test_other_ways_of_drawing_rows(settings: dict) -> None:
    kernel = SGRLD(shifted, batch_size=10, step_size=0.01, num_steps=3, **settings)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=3, progress_bar=False)
    mcmc.run(random.key(0), HostRows(Y) if settings.get("batching") else Y)
    assert np.isfinite(mcmc.get_samples()["mu"]).all()


def test_automatic_settings() -> None:
    kernel = SGHMC(shifted)
    mcmc = MCMC(kernel, num_warmup=50, num_samples=3, progress_bar=False)
    mcmc.run(random.key(0), Y)
    assert kernel.settings.control_variate == 0


linen = pytest.importorskip("flax.linen", reason="needs flax")


class Normalised(linen.Module):
    """A layer with batch statistics."""

    learns: bool

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.BatchNorm(use_running_average=not self.learns)(linen.Dense(1)(x))


@pytest.mark.parametrize("learns", [True, False])
def test_batch_statistics_go_with_all_rows(learns: bool) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 2)), jnp.float32)

    def model(x: Any) -> None:
        net = flax_module("net", Normalised(learns), mutable=["batch_stats"], input_shape=(2,))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", 20) as i:
            numpyro.sample("y", dist.Normal(net(x[i])[:, 0], scale), obs=jnp.zeros(20)[i])

    assert not read_subsampling(model, (x,), {}).batch_sizes
    if learns:
        with pytest.raises(ValueError, match=r"changes its state 'net\$state'.* LayerNorm"):
            read_subsampling(model, (x,), {}, 5)
    else:
        assert read_subsampling(model, (x,), {}, 5).batch_sizes == {"rows": 5}


def test_keys_of_initial_weights_do_not_count() -> None:
    def model(x: Any) -> None:
        net = random_flax_module("net", linen.Dense(1), dist.Normal(0, 1), input_shape=(2,))
        with numpyro.plate("rows", 20) as i:
            numpyro.sample("y", dist.Normal(net(x[i])[:, 0], 1), obs=jnp.zeros(20)[i])

    assert not read_subsampling(model, (jnp.ones((20, 2)),), {}).is_random


def test_dropout_is_random() -> None:
    def model(x: Any) -> None:
        layers = linen.Sequential([linen.Dropout(0.5, deterministic=False), linen.Dense(1)])
        net = random_flax_module(
            "net", layers, dist.Normal(0, 1), input_shape=(2,), apply_rng=["dropout"]
        )
        with numpyro.plate("rows", 20) as i:
            mean = net(x[i], rngs={"dropout": numpyro.prng_key()})[:, 0]
            numpyro.sample("y", dist.Normal(mean, 1), obs=jnp.zeros(20)[i])

    assert read_subsampling(model, (jnp.ones((20, 2)),), {}).is_random
