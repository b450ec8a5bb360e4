"""Calibration by simulation, in short: examples/benchmarks/calibration.py has every kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import random
from numpyro import distributions as dist
from numpyro.infer import MCMC, Predictive
from scipy.stats import norm

from numpyro_geom import SGHMC

SIMULATIONS, KEPT = 1000, 40


def counts(y: Any = None) -> None:
    rate = numpyro.sample("rate", dist.LogNormal(0.5, 0.7))
    share = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("rows", 4):
        numpyro.sample("y", dist.ZeroInflatedPoisson(share, rate), obs=y)


def test_ranks_of_parameters_among_draws_are_uniform() -> None:
    """Of 1,000 runs on data from the prior predictive, the lanes of one program.

    Normal scores of uniform ranks have mean 0 and a known variance. A limit of 4.5 standard errors
    gives a false alarm in 40,000 runs of this test. At temperature 1.3, which makes standard
    deviations 14% too large, the variance of one was 5.4 standard errors away.
    """
    prior = Predictive(counts, num_samples=SIMULATIONS)(random.key(0))
    settings = {"num_warmup": 100, "num_samples": 5 * KEPT, "thinning": 5}
    mcmc = MCMC(SGHMC(counts), progress_bar=False, **settings)

    def draws(key: jax.Array, y: jax.Array) -> Any:
        mcmc.run(key, y)
        return mcmc.get_samples()

    found = jax.jit(jax.vmap(draws))(random.split(random.key(1), SIMULATIONS), prior["y"])
    scores = norm.ppf((np.arange(KEPT + 1) + 0.5) / (KEPT + 1))
    for name, x in found.items():
        score = scores[np.asarray(jnp.sum(x < prior[name][:, None], 1))]
        bias = score.mean() / scores.std() * SIMULATIONS**0.5
        spread = (score.var() / scores.var() - 1) * (SIMULATIONS / 2) ** 0.5
        assert max(abs(bias), abs(spread)) < 4.5, (name, bias, spread)
