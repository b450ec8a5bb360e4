"""Calibration by simulation: right draws pass, wrong ones fail; the default kernel passes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from jax import random
from numpyro import distributions as dist
from numpyro.infer import MCMC

from numpyro_geom import SGHMC
from numpyro_geom.diagnostics import calibrate


def counts(y: Any = None) -> None:
    rate = numpyro.sample("rate", dist.LogNormal(0.5, 0.7))
    share = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("rows", 4):
        numpyro.sample("y", dist.ZeroInflatedPoisson(share, rate), obs=y)


def test_draws_of_the_default_kernel_are_calibrated() -> None:
    """1,000 data sets. A limit of 1 in 10,000 for the p-value is the rate of false alarms.

    At temperature 1.3, which makes standard deviations 14% too large, the p-value was 1e-8.
    """
    mcmc = MCMC(SGHMC(counts), num_warmup=100, num_samples=200, progress_bar=False)
    found = calibrate(counts, mcmc, random.key(1), num_datasets=1000)
    assert list(found.scalar.values) == ["rate", "share"]
    assert found.num_draws > 20
    assert found.p > 1e-4, found.p_values


def normal(rows: int, y: Any = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("same", jnp.ones(()))
    with numpyro.plate("rows", rows):
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y)


def posterior(key: Any, rows: int, y: Any = None, *, sd: float = 1.0, lag: float = 0.0) -> Any:
    """Draws given y, for a prior of this sd, as a chain with this autocorrelation."""
    variance = 1 / (sd**-2 + rows)
    noise = random.normal(key, (300, 2))
    if lag:
        decay = lag ** jnp.abs(jnp.arange(300)[:, None] - jnp.arange(300))
        noise = jnp.linalg.cholesky(decay) @ noise
    return {"mu": variance * y.sum(0) + variance**0.5 * noise, "same": jnp.ones(300)}


@pytest.mark.parametrize("lag", [0.0, 0.9])
def test_right_draws_pass(lag: float) -> None:
    """Also those of a slow chain, few of which are ranked, and with a scalar that never changes."""
    found = calibrate(normal, lambda *a, **k: posterior(*a, lag=lag, **k), random.key(0), 3)
    assert list(found.scalar.values) == ["mu[0]", "mu[1]", "same"]
    assert found.shares.shape == (200, 3)
    assert (found.num_draws < 40) == (lag > 0)
    assert found.p > 0.01


def test_a_prior_that_is_not_the_generators_fails() -> None:
    found = calibrate(normal, lambda *a, **k: posterior(*a, sd=0.5, **k), random.key(0), 3)
    assert found.p < 1e-3
    assert int(found.p_values.values.argmin()) < 2


def test_data_sets_one_by_one_are_those_in_lanes() -> None:
    lanes = calibrate(normal, posterior, random.key(0), 3, num_datasets=20)
    loop = calibrate(normal, posterior, random.key(0), 3, num_datasets=20, lanes=False)
    np.testing.assert_allclose(lanes.shares, loop.shares, atol=0.01)


def test_a_model_that_takes_no_data_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an argument of the model with the name"):
        calibrate(lambda x=None: normal(3), posterior, random.key(0))
