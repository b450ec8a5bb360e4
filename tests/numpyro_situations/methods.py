"""The methods of the table, small settings for them, and what their draws are compared with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from numpyro_geom import GGMC, SGHMC, SGRLD, RiemannianLaplace

KEY = random.key(0)
QUICK = {"step_size": 0.01, "num_steps": 1, "dense_mass": None, "control_variate": False}
"""Settings with which nothing is measured: a run takes a second, nearly all of it compiling."""
PLAIN = {"metric": "euclidean", "precision": "fisher"}
"""Settings of the guide that derive the Fisher information from the model, and compile in half the
time of the defaults, whose geodesics follow it."""
STILL = 1e-20
"""A step size with which a chain stays: noise of sd 1e-10, times 300 in the metric, is rounding."""
ROUNDING = 1e-4
"""How far draws may be apart that are the same but for rounding. Two programs round sums of a dozen
terms differently, 1e-6 in a gradient, and ten steps of 0.01 at a curvature below 100 add up ten of
these. Draws with another key are 0.1 apart."""
SIGMAS = 5.0
"""Standard errors that a moment may be off: one in 1.7 million by chance."""
BIAS = 0.1
"""What a moment may be off beside, in posterior standard deviations: twice the ``bias_tolerance``
of the kernels, which is one of variances."""
LEAST = 100
"""Effective draws without which a comparison says nothing."""


class Kernel(NamedTuple):
    """A column: a kernel of this package."""

    name: str
    create: Callable

    def __call__(self, model: Callable | None = None, **settings: Any) -> Any:
        """The kernel with its defaults and these settings."""
        return self.create(model, **settings)

    def quick(self, model: Callable | None = None, **settings: Any) -> Any:
        """The kernel with `QUICK` settings."""
        return self.create(model, **{**QUICK, **settings})

    def draws(
        self, model: Callable, *args: Any, settings: dict | None = None, **kwargs: Any
    ) -> dict[str, jax.Array]:
        """A few draws."""
        mcmc = chains(self.quick(model, **settings or {}))
        mcmc.run(KEY, *args, **kwargs)
        return mcmc.get_samples()

    def posterior(self, model: Callable, *args: Any, **kwargs: Any) -> Posterior:
        """Draws with the default settings, enough to see their law."""
        settings = {"num_chains": 4, "chain_method": "vectorized"}
        mcmc = chains(self(model), num_warmup=300, num_samples=300, **settings)
        mcmc.run(KEY, *args, **kwargs)
        return Posterior(mcmc.get_samples(group_by_chain=True))


class Laplace(NamedTuple):
    """The column of the guide."""

    name: str

    def __call__(self, model: Callable, **settings: Any) -> RiemannianLaplace:
        """The guide with its defaults and these settings."""
        return RiemannianLaplace(model, **settings)

    def draws(
        self, model: Callable, *args: Any, settings: dict = PLAIN, **kwargs: Any
    ) -> dict[str, jax.Array]:
        """A few draws."""
        guide = self(model, **settings)
        with warnings.catch_warnings():
            # a few draws do not ask how good the mode of a made-up model is
            warnings.filterwarnings("ignore", "draws from this mode are probably biased")
            params = guide.fit(KEY, *args, num_starts=1, **kwargs)
        return guide.sample_posterior(KEY, params, sample_shape=(5,))

    def posterior(
        self, model: Callable, *args: Any, metric: str = "euclidean", **kwargs: Any
    ) -> Posterior:
        """Draws with the weights that make them draws of the posterior, whatever the metric."""
        guide = self(model, metric=metric)
        params = guide.fit(KEY, *args, num_starts=1, **kwargs)
        settings = {"sample_shape": (4000,), "log_weight": True, "progress_bar": False}
        found = guide.draw(KEY, params, **settings)
        assert found.success.all()
        assert found.pareto_k < 0.7  # above it weights cannot correct the draws
        log_weight = np.asarray(found.log_weight, np.float64)[None]
        weights = np.exp(log_weight - log_weight.max())
        return Posterior({n: x[None] for n, x in found.samples.items()}, weights)


class Posterior(NamedTuple):
    """Draws of shape (chains, draws, ...), with weights of shape (chains, draws) or without."""

    draws: dict[str, jax.Array]
    weights: np.ndarray | None = None

    def moment(self, values: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean of a function of the draws, and its standard error."""
        values = np.asarray(values, np.float64)
        if self.weights is None:
            size = effective_sample_size(values)
            assert np.min(size) > LEAST, size
            return values.mean((0, 1)), values.std((0, 1)) / np.sqrt(size)
        weights = self.weights / self.weights.sum()
        assert 1 / (weights**2).sum() > LEAST
        weights = weights.reshape(*weights.shape, *(1,) * (values.ndim - 2))
        mean = (weights * values).sum((0, 1))
        return mean, np.sqrt((weights**2 * (values - mean) ** 2).sum((0, 1)))

    def check(self, name: str, mean: Any, sd: Any) -> None:
        """Fail unless a site has this mean and this standard deviation."""
        values = np.asarray(self.draws[name], np.float64)
        mean, sd = np.broadcast_to(mean, values.shape[2:]), np.broadcast_to(sd, values.shape[2:])
        found, error = self.moment(values)
        assert np.all(np.abs(found - mean) < SIGMAS * error + BIAS * sd), (name, found, mean, sd)
        found, error = self.moment(((values - mean) / sd) ** 2)
        assert np.all(np.abs(found - 1) < SIGMAS * error + 2 * BIAS), (name, found, error)


def chains(kernel: Any, num_warmup: int = 3, num_samples: int = 5, **settings: Any) -> MCMC:
    """NumPyro's ``MCMC``, not yet run, without a progress bar."""
    settings = {"progress_bar": False, **settings}
    return MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **settings)


def same(left: Any, right: Any) -> bool:
    """Whether two pytrees have the same bits."""
    left, right = jax.tree.flatten(left), jax.tree.flatten(right)
    pairs = zip(left[0], right[0], strict=True)
    return left[1] == right[1] and all(jnp.array_equal(a, b) for a, b in pairs)


KERNELS = (
    Kernel("SGRLD", SGRLD),
    Kernel("SGRLD monge", partial(SGRLD, metric="monge")),
    Kernel("SGHMC", SGHMC),
    Kernel("GGMC", GGMC),
)
LAPLACE = Laplace("RiemannianLaplace")
METHODS = (*KERNELS, LAPLACE)
