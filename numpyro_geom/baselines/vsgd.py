"""Constant-rate stochastic gradient descent as approximate inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer import init_to_uniform

from .._util import lazy_cond, tree_axpy, tree_vdot
from ..kernel import PyTree, SGKernel
from ..metrics.base import Metric
from ..model.potential import Potential
from ..sampling.algorithm import Algorithm, Step, check_noisy, langevin_algorithm, settling_steps
from ..sampling.settings import Settings
from ..sampling.state import Adaptation, Chain, SGState, StepReport

SETTLING_STEPS = 200
"""Steps at the start that measure gradient noise while the position does not move."""


class NoiseVariance(NamedTuple):
    """Variance of the minibatch gradient, coordinate by coordinate.

    Attributes:
        statistic: running mean of the squared noise of g = grad Uhat / N, like the position.
        num_updates: number of updates in this mean.
    """

    statistic: PyTree
    num_updates: jax.Array


@dataclasses.dataclass(frozen=True)
class GradientNoise(Metric):
    """The metric of `VSGD`: A = I, and a mean of squared noise for the rate.

    It is a mean over all updates in which the t-th update has the weight t^2. So the noise on the
    way to the mode is soon forgotten, and five ninths of the updates count.
    """

    def init(self, position: PyTree) -> NoiseVariance:
        """The state before any gradient."""
        return NoiseVariance(jax.tree.map(jnp.zeros_like, position), jnp.zeros((), jnp.int32))

    def statistic(self, grad: PyTree) -> PyTree:
        """Entry by entry the square."""
        return jax.tree.map(jnp.square, grad)

    def update(self, state: NoiseVariance, grad: PyTree) -> NoiseVariance:
        """The state after a draw of g's noise; non-finite entries change nothing."""
        num_updates = state.num_updates + 1

        def mix(old: jax.Array, new: jax.Array) -> jax.Array:
            weight = (3 / (num_updates + 2)).astype(old.dtype)
            return jnp.where(jnp.isfinite(new), old + weight * (new - old), old)

        return NoiseVariance(jax.tree.map(mix, state.statistic, self.statistic(grad)), num_updates)

    def apply_inverse(self, state: NoiseVariance, vector: PyTree) -> PyTree:
        """A x = x."""
        return vector

    def apply_inverse_sqrt(self, state: NoiseVariance, vector: PyTree) -> PyTree:
        """A^{1/2} x = x."""
        return vector


class VSGD(SGKernel):
    """Stochastic gradient descent at a constant rate: approximate, with minibatch noise alone.

    One step from theta. No noise is injected::

        theta' = theta - h grad Uhat(theta)

    Stationary law: NOT the posterior. Take a mode with Hessian H, where the minibatch gradient has
    the covariance C. Near it the law is a Gaussian around the mode whose covariance S solves, to
    first order in h::

        H S + S H = h C

    S is the posterior's tau H^-1 where h C = 2 tau I, which needs a C that is a multiple of the
    identity. C is proportional to H if the rows are drawn from the model itself. Then the draws
    have the same variance in every direction, for any shape of the posterior. The rate only sets
    the width of the draws. ``step_size="auto"`` takes the rate that minimises KL(N(0, S) ||
    posterior). This rate makes tr(H S) = tau D, so the mean ``configurational_temperature`` is
    tau::

        h = 2 tau D / tr C

    Warm-up measures C as half the squared difference of the gradients of two independent batches.
    After warm-up C is frozen. h is bounded by 1 / lam_H, lam_H the largest eigenvalue of H. The
    optimal rate is unstable where batches are a large share of the rows, or where the largest
    curvature is more than about N / 2B times the mean curvature. Draws at the bound are narrower
    still. `SGRLD` with the same batches has no such limits.

    Choose `VSGD` as the baseline that shows the effect of minibatch noise alone. Cost per step: one
    minibatch gradient, in warm-up two.

    Args:
        model: a NumPyro model with continuous latent sites and a plate over its rows.
        potential_fn: replaces the model: a stochastic energy ``potential_fn(z, rng_key)``.
        batch_size: rows per step: an int, or a dict plate -> int; fewer than all rows.
        temperature: tau, above 0.
        batching: ``"replacement"``. With ``"epoch"`` the noise would cancel over an epoch.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range, and for a model or a ``potential_fn`` whose gradients
            have no noise.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_geom import VSGD
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> y = 3 + jax.random.normal(jax.random.key(0), (1000,))
        >>> mcmc = MCMC(VSGD(model, batch_size=50), num_warmup=200, num_samples=200,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool(abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.02)
        True

    References:
        Mandt, Hoffman and Blei, "Stochastic Gradient Descent as Approximate Bayesian Inference",
        JMLR 18 (2017): the stationary law and the optimal constant rate. In the paper's notation
        the loss is U / N, the rate is h N, and the noise covariance B B' / S, with S the batch
        size, is C / N^2. So 2 D S / (N tr B B') is the h above. Deviations: the temperature and the
        bound by curvature.
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        step_size: float | Callable | Literal["auto"] = "auto",
        batch_size: int | Mapping[str, int] | None = None,
        num_steps: int | Literal["auto"] = "auto",
        temperature: float = 1.0,
        batching: Literal["replacement", "epoch"] = "replacement",
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        super().__init__(locals(), metric=GradientNoise())
        if self.settings.temperature == 0:
            raise ValueError(
                "temperature must be above 0, got 0: the rate is proportional to the "
                "temperature. For descent to the mode use SGRLD(..., temperature=0)"
            )
        if batching == "epoch":
            raise ValueError(
                "VSGD needs batching='replacement', got 'epoch': the noise of an epoch's batches "
                "sums to zero, and the noise is what spreads the draws"
            )

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings."""
        learns = settings.schedule is None
        others: dict[str, Any] = {"propose": partial(_propose, settings)} if learns else {}
        return langevin_algorithm(
            settings,
            _step(settings.metric, learns),
            settling_steps=SETTLING_STEPS if learns else settling_steps(settings.metric),
            bias=None,
            check=lambda potential, plan: check_noisy(
                potential, "VSGD draws with the noise of minibatch gradients", "use SGRLD"
            ),
            **others,
        )


def _propose(
    settings: Settings, adaptation: Adaptation, state: SGState, potential: Potential
) -> tuple[jax.Array, jax.Array, PyTree]:
    """The optimal rate, in the place of the step of a bias tolerance."""
    h = optimal_rate(state.metric_state.statistic, potential.num_data, settings.temperature)
    h = adaptation.step_size_factor * jnp.minimum(h, 1 / adaptation.curvature)
    return h, adaptation.slowest, state.dynamics


def _step(metric: GradientNoise, learns: bool) -> Step:
    """One step of SGD; in warm-up a second gradient measures the noise of the first."""

    def step(
        rng_key: jax.Array,
        potential: Potential,
        batch: Any,
        chain: Chain,
        step_size: jax.Array,
        temperature: jax.Array | float,
        learning: jax.Array,
    ) -> tuple[Chain, StepReport]:
        position = chain.position
        energy, grad = jax.value_and_grad(potential.energy)(position, batch)

        def learn(carry: tuple[jax.Array, NoiseVariance]) -> tuple[jax.Array, NoiseVariance]:
            # another batch at the same position: the difference is pure noise
            key, state = carry
            key, key_stream, key_batch = random.split(key, 3)
            other, _ = potential.draw(key_batch, potential.init_stream(key_stream))
            again = jax.grad(potential.energy)(position, other)
            scale = 0.5**0.5 / potential.num_data
            noise = jax.tree.map(lambda a, b: scale * (a - b), grad, again)
            return key, metric.update(state, noise)

        metric_state = chain.metric_state
        if learns:
            _, metric_state = lazy_cond(learning, learn, (rng_key, metric_state))
        position = tree_axpy(-step_size, grad, position)
        squared_drift = step_size * tree_vdot(grad, grad) / 2
        return Chain(position, metric_state, ()), StepReport(energy, grad, squared_drift)

    return step


def optimal_rate(noise: PyTree, num_data: int, temperature: float) -> jax.Array:
    """The rate 2 tau D / tr C, for which SGD comes closest to the posterior.

    ``noise`` are variances of g = grad Uhat / N, a pytree like the position.

    >>> optimal_rate(jnp.array([1.0, 3.0]), 10, 1.0)
    Array(0.01, dtype=float32)
    """
    leaves = jax.tree.leaves(noise)
    mean = sum(jnp.sum(x) for x in leaves) / sum(x.size for x in leaves)
    return 2 * temperature / jnp.maximum(mean * float(num_data) ** 2, jnp.finfo(mean.dtype).tiny)
