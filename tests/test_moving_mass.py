"""SGHMC in a metric that varies with the position: quadrature tests for both treatments.

The metric follows the gradient of the step (decay 0), so that A is a function of theta. In one
dimension, the distribution without the correction is exp(-U) A^{-1/2} up to a constant: a
coordinate y with dy = A^{-1/2} dtheta moves as if it had a constant mass. Errors of a step are of
first order in h. In one dimension, they are removed by extrapolation from two step sizes (for the
corrected E x^2 they are .10 and .04). For the banana, the step is so short that they do not show.
Thresholds are 5 standard errors.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer import MCMC

from numpyro_geom import SGHMC, Monge, RMSprop

EPS = 0.3


def draws_of(
    potential_fn: Any, start: jax.Array, step_size: float, *, chains: int = 1, **settings: Any
) -> np.ndarray:
    kernel = SGHMC(
        potential_fn=potential_fn,
        step_size=step_size,
        num_steps=round(1.5 / step_size),
        friction=1.0,
        dense_mass=None,
        **settings,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=10,
        num_samples=100,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), init_params=start)
    return np.asarray(mcmc.get_samples())


def energy(x: Any, xp: Any = np) -> Any:
    return xp.sum(x**2 / 2 + xp.sin(2 * x) / 2, -1)


@pytest.mark.parametrize("gamma", ["corrected", "none"])
def test_the_law_in_one_dimension(gamma: str) -> None:
    grid = np.linspace(-8, 8, 4001)[:, None]
    a = 1 / (np.abs(grid + np.cos(2 * grid)) + EPS)
    log_law = -energy(grid) - (0.5 * np.log(a[:, 0]) if gamma == "none" else 0.0)
    law = np.exp(log_law - log_law.max())
    law /= law.sum()
    functions = [lambda x: x, lambda x: x**2, np.cos, lambda x: np.sin(2 * x)]
    exact = np.array([law @ f(grid[:, 0]) for f in functions])

    means, errors = [], []
    for h in (0.04, 0.02):
        start = random.normal(random.key(1), (1000,))  # as many chains
        draws = draws_of(
            lambda x: energy(x, jnp), start, h, gamma=gamma, metric=RMSprop(decay=0.0, eps=EPS)
        )
        of_chains = np.stack([f(draws).mean(0) for f in functions])
        means.append(of_chains.mean(1))
        errors.append(of_chains.std(1) / np.sqrt(len(start)))
    extrapolated = 2 * means[1] - means[0]
    margin = 5 * np.sqrt(5) * errors[1]
    assert np.all(np.abs(extrapolated - exact) < margin)
    assert margin[1] < 0.1  # between both laws E x^2 differs by .21
    assert margin[2] < 0.03  # and E cos x by .07


def test_the_correction_of_a_metric_that_is_no_diagonal() -> None:
    """A banana: a ~ N(0, 1), b given a ~ N(a^2 / 4, 1), in chains that start in the law.

    Without the correction the second moments of a and of the noise in b are 1.4.
    """

    def banana(x: jax.Array) -> jax.Array:
        return x[0] ** 2 / 2 + (x[1] - x[0] ** 2 / 4) ** 2 / 2

    a, noise = random.normal(random.key(1), (2, 200))
    draws = draws_of(
        banana,
        jnp.stack([a, a**2 / 4 + noise], 1),
        0.02,
        gamma="corrected",
        metric=Monge(alpha2=0.3, decay=0.0),
        chains=200,
    )
    a, b = np.moveaxis(draws.reshape(200, -1, 2), -1, 0)
    of_chains = np.stack([a, b, a**2, (b - a**2 / 4) ** 2, a**2 * b]).mean(2)
    errors = of_chains.std(1) / np.sqrt(200)
    assert np.all(np.abs(of_chains.mean(1) - [0, 0.25, 1, 1, 0.75]) < 5 * errors)
    assert np.all(errors[2:4] < 0.02)
