"""Posteriors for tests of samplers: small, varied, each with reference moments.

Used by the tables in this folder and by the tests of the automatic step size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import NUTS


@dataclass(frozen=True)
class Posterior:
    """A target, its data, the scalars to compare, and the source of their moments.

    Attributes:
        name: name in tables.
        model: a NumPyro model.
        args: its arguments.
        batch_size: rows per step, or None.
        scalars: sites (arrays with leading draw axes) -> array (..., number of scalars).
        exact: means and standard deviations of the scalars, or None for NUTS.
    """

    name: str
    model: Callable
    args: tuple
    batch_size: int | None
    scalars: Callable[[dict[str, Any]], Any]
    exact: tuple[np.ndarray, np.ndarray] | None = None

    def reference(self, num_samples: int = 4000) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations of the scalars, exact or from NUTS."""
        if self.exact is not None:
            return self.exact
        mcmc = common.chains(NUTS(self.model, target_accept_prob=0.95), 1000, num_samples // 4)
        mcmc.run(random.key(123), *self.args)
        values = np.asarray(self.scalars(mcmc.get_samples()))
        return values.mean(0), values.std(0)


def columns(*sites: str) -> Callable:
    """Entries of these sites side by side; ``w``, ``x`` and ``group`` are vectors."""

    def scalars(draws: dict[str, Any]) -> Any:
        lead = draws[sites[0]].ndim - (sites[0] in ("w", "x", "group"))
        parts = [draws[s].reshape(*draws[s].shape[:lead], -1) for s in sites]
        return jnp.concatenate(parts, -1)

    return scalars


def banana() -> Posterior:
    """x1 ~ N(0, 1), x2 given x1 ~ N(x1^2, 1/4)."""

    def model() -> None:
        x1 = numpyro.sample("x1", dist.Normal(0, 1))
        numpyro.sample("x2", dist.Normal(x1**2, 0.5))

    moments = np.array([0.0, 1.0]), np.sqrt([1.0, 2.25])
    return Posterior("banana", model, (), None, columns("x1", "x2"), moments)


def funnel() -> Posterior:
    """A centred funnel: v ~ N(0, 1.5^2), two x ~ N(0, exp(v))."""

    def model() -> None:
        v = numpyro.sample("v", dist.Normal(0, 1.5))
        numpyro.sample("x", dist.Normal(0, jnp.exp(v / 2)).expand([2]).to_event(1))

    sd = np.exp(1.5**2 / 4)
    moments = np.zeros(3), np.array([1.5, sd, sd])
    return Posterior("funnel", model, (), None, columns("v", "x"), moments)


def gaussian(condition: float = 1e4, dim: int = 10) -> Posterior:
    """A Gaussian; the ratio of its standard deviations is the root of the condition number."""
    sd = np.geomspace(1.0, condition**-0.5, dim)

    def model() -> None:
        numpyro.sample("x", dist.Normal(jnp.zeros(dim), jnp.asarray(sd)).to_event(1))

    name = f"Gaussian, condition {condition:.0e}"
    return Posterior(name, model, (), None, columns("x"), (np.zeros(dim), sd))


def logistic(raw: bool = False, batch_size: int = 64) -> Posterior:
    """Breast cancer data: five standardised columns, or three raw ones, and an intercept."""
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    X = X[:, [0, 1, 4]] if raw else ((X - X.mean(0)) / X.std(0))[:, [0, 1, 4, 8, 9]]
    X = jnp.asarray(np.column_stack([X, np.ones(len(X))]), jnp.float32)
    name = "logistic, raw columns" if raw else "logistic, standardised"
    model = partial(common.logistic, scale=10.0 if raw else 1.0)
    return Posterior(name, model, (X, jnp.asarray(y, jnp.int32)), batch_size, columns("w"))


def poisson(batch_size: int = 100) -> Posterior:
    """Poisson regression on 1,000 generated rows with five columns."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1000, 5))
    y = rng.poisson(np.exp(0.5 + X @ np.array([0.5, -0.3, 0.2, 0.0, 0.4])))

    def model(X: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 2))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([5]).to_event(1))
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(b + X[i] @ w)), obs=y[i])

    args = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.int32)
    return Posterior("Poisson regression", model, args, batch_size, columns("b", "w"))


def hierarchical(batch_size: int = 50) -> Posterior:
    """Group means with unknown mean and spread, centred: 12 groups, 360 rows."""
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(12), 30)
    y = 1.0 + 0.8 * rng.normal(size=12)[groups] + rng.normal(size=360)

    def model(groups: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        tau = numpyro.sample("tau", dist.HalfNormal(2.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
        with numpyro.plate("groups", 12):
            a = numpyro.sample("group", dist.Normal(mu, tau))
        with numpyro.plate("data", len(y)) as i:
            numpyro.sample("y", dist.Normal(a[groups[i]], sigma), obs=y[i])

    args = jnp.asarray(groups), jnp.asarray(y, jnp.float32)
    scalars = columns("mu", "tau", "sigma", "group")
    return Posterior("hierarchical, centred", model, args, batch_size, scalars)


def network(batch_size: int = 25) -> Posterior:
    """A 1-5-1 tanh network on 100 points; its values at five inputs are compared."""
    rng = np.random.default_rng(2)
    x = np.sort(rng.uniform(-2, 2, 100))
    y = np.sin(2 * x) + 0.3 * rng.normal(size=100)
    grid = jnp.linspace(-2, 2, 5)

    def forward(draw: dict[str, Any], x: Any) -> Any:
        hidden = jnp.tanh(x[:, None] * draw["w1"] + draw["b1"])
        return hidden @ draw["w2"] + draw["b2"]

    def model(x: Any, y: Any) -> None:
        draw = {
            name: numpyro.sample(name, dist.Normal(0, 1).expand([5]).to_event(1))
            for name in ("w1", "b1", "w2")
        }
        draw["b2"] = numpyro.sample("b2", dist.Normal(0, 1))
        with numpyro.plate("data", len(x)) as i:
            numpyro.sample("y", dist.Normal(forward(draw, x[i]), 0.3), obs=y[i])

    def scalars(draws: dict[str, Any]) -> Any:
        fn = lambda d: forward(d, grid)  # noqa: E731
        for _ in range(draws["b2"].ndim):
            fn = jax.vmap(fn)
        return fn({k: v for k, v in draws.items() if k in ("w1", "b1", "w2", "b2")})

    args = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Posterior("network 1-5-1", model, args, batch_size, scalars)


def run_chains(
    kernel: Any,
    posterior: Posterior,
    *,
    num_chains: int,
    num_warmup: int,
    num_samples: int,
    seed: int = 0,
) -> tuple[np.ndarray, Any, float]:
    """Run vectorised chains, by one program for warm-up and sampling.

    Returns:
        The scalars, shape (draws, chains, scalars); the last state, with the failed steps of all
        draws; and the seconds of sampling, without compiling.
    """
    args, length = posterior.args, math.gcd(num_warmup, num_samples)
    state = kernel.init(random.split(random.key(seed), num_chains), num_warmup, None, args, {})

    @jax.jit
    def advance(state: Any) -> Any:
        def body(state: Any, _: Any) -> Any:
            state = kernel.sample(state, args, {})
            return state, (state.z, state.num_diverging)

        return jax.lax.scan(body, state, None, length)

    for _ in range(num_warmup // length):
        state, _ = jax.block_until_ready(advance(state))
    parts, seconds = [], []
    for _ in range(num_samples // length):
        start = time.perf_counter()
        state, part = jax.block_until_ready(advance(state))
        seconds.append(time.perf_counter() - start)
        parts.append(part)
    z, undone = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    constrain = jax.jit(jax.vmap(jax.vmap(kernel.postprocess_fn(args, {}))))
    values = np.asarray(posterior.scalars(constrain(z)), np.float64)
    # the machine is shared: the median ignores parts that had to wait
    taken = float(np.median(seconds)) * len(seconds)
    return values, state._replace(num_diverging=jnp.sum(undone)), taken


def errors(
    values: np.ndarray, mean: np.ndarray, sd: np.ndarray
) -> tuple[float, float, float, float]:
    """Worst mean error in sd and its Monte Carlo error, worst sd ratio and its Monte Carlo error.

    Monte Carlo errors come from the spread of the chains' own means and second moments.
    """
    chains = values.shape[1]
    centred = (values - mean) / sd
    chain_means = centred.mean(0)
    bias = chain_means.mean(0)
    second = ((centred - bias) ** 2).mean(0)
    ratio = np.sqrt(second.mean(0))
    worst_mean = np.argmax(np.abs(bias))
    worst_sd = np.argmax(np.abs(np.log(np.maximum(ratio, 1e-12))))
    return (
        float(np.abs(bias[worst_mean])),
        float(chain_means[:, worst_mean].std() / chains**0.5),
        float(ratio[worst_sd]),
        float(second[:, worst_sd].std() / chains**0.5 / (2 * ratio[worst_sd])),
    )
