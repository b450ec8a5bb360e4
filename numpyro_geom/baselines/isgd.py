"""Isotropic SGD: injected noise makes the minibatch noise isotropic and sets the learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.infer import init_to_uniform

from .._checks import check_share
from .._random import tree_normal
from .._util import tree_vdot, tree_where
from ..kernel import PyTree, SGKernel
from ..metrics.base import Metric
from ..model.potential import Potential
from ..sampling.algorithm import Algorithm, Step, langevin_algorithm
from ..sampling.settings import Settings
from ..sampling.state import Chain, StepReport

RATE_STEPS = 200
"""Memory of the groups' mean squared gradients, in steps."""
STILL_STEPS = 50
"""Steps before the position first moves, because fewer gradients give too uncertain a rate."""


class RateState(NamedTuple):
    """State of `GroupRate`.

    Attributes:
        statistic: b, the running mean of g * g / 2, a pytree like the position.
        lam: the sum of b over each group, averaged over a longer memory, shape (groups,).
        weight: weight of this average, from 0 to 1, a scalar.
    """

    statistic: PyTree
    lam: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True)
class GroupRate(Metric):
    """The metric of `ISGD`: A = 1 / lam for all entries of a group, h = 1.

    g = grad Uhat is the gradient of ALL data (not divided by N, unlike in the other metrics). The
    averages b (of memory ``decay``) and lam (of `RATE_STEPS`) are corrected for their start.

    Args:
        groups: site -> name of its group, or None for one group per array.
        decay: memory of b, in [0, 1).

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for a decay out of range, and from ``init`` where ``groups`` does not fit.

    >>> metric = GroupRate(decay=0.0)
    >>> state = metric.update(metric.init(jnp.zeros(2)), jnp.array([1.0, 3.0]))
    >>> metric.apply_inverse(state, jnp.ones(2))
    Array([0.2, 0.2], dtype=float32)
    """

    groups: Mapping[str, str] | None = None
    decay: float = 0.5

    def __post_init__(self) -> None:
        check_share("decay", self.decay)
        if self.groups is None:
            return
        if not isinstance(self.groups, Mapping) or not all(
            isinstance(x, str) for x in (*self.groups, *self.groups.values())
        ):
            raise TypeError(
                "groups must map names of sites to names of groups, such as "
                f"{{'w': 'first layer', 'b': 'first layer'}}, got {self.groups!r}"
            )

    def statistic(self, grad: PyTree) -> PyTree:
        """Entry by entry g * g / 2: half the variance of g where the mean of g is small."""
        return jax.tree.map(lambda g: g * g / 2, grad)

    def init(self, position: PyTree) -> RateState:
        """The state before any gradient, with lam = 1."""
        num_groups = max(jax.tree.leaves(self._indices(position))) + 1
        dtype = jnp.result_type(*jax.tree.leaves(position))
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(self.statistic, position))
        return RateState(zeros, jnp.ones(num_groups, dtype), jnp.zeros((), dtype))

    def update(self, state: RateState, grad: PyTree) -> RateState:
        """The state after a gradient grad Uhat: b and lam."""
        indices = jax.tree.leaves(self._indices(grad))
        sums = [jnp.zeros((), state.lam.dtype)] * state.lam.shape[0]
        for index, x in zip(indices, jax.tree.leaves(self.statistic(grad)), strict=True):
            sums[index] = sums[index] + jnp.sum(x)
        weight = state.weight + (1 - state.weight) / RATE_STEPS
        lam = state.lam + (jnp.stack(sums) - state.lam) / (RATE_STEPS * weight)
        return RateState(
            self.average(state.statistic, grad),
            lam.astype(state.lam.dtype),
            weight.astype(state.weight.dtype),
        )

    def apply_inverse(self, state: RateState, vector: PyTree) -> PyTree:
        """A x = x / lam, a pytree like ``vector``."""
        return jax.tree.map(lambda lam, x: (x / lam).astype(x.dtype), self.spread(state), vector)

    def apply_inverse_sqrt(self, state: RateState, vector: PyTree) -> PyTree:
        """A^{1/2} x = x / sqrt(lam)."""
        return jax.tree.map(
            lambda lam, x: (x / jnp.sqrt(lam)).astype(x.dtype), self.spread(state), vector
        )

    def spread(self, state: RateState) -> PyTree:
        """The lam of the group, a scalar for each leaf of the position."""
        lam = jnp.maximum(state.lam, jnp.finfo(state.lam.dtype).tiny)
        return jax.tree.map(lambda index: lam[index], self._indices(state.statistic))

    def _indices(self, tree: PyTree) -> PyTree:
        """The group number of each leaf."""
        leaves, treedef = jax.tree.flatten(tree)
        if self.groups is None:
            return jax.tree.unflatten(treedef, range(len(leaves)))
        if not isinstance(tree, Mapping):
            raise TypeError(
                "groups names sites, and the position has none: expected a dict of arrays by site, "
                f"got {type(tree).__name__}. Leave groups out, or use a dict as position"
            )
        missing = sorted(set(tree) - set(self.groups))
        unknown = sorted(set(self.groups) - set(tree))
        if missing or unknown:
            raise ValueError(
                f"groups does not match the latent sites {sorted(tree)}: missing {missing}, "
                f"unknown {unknown}. Expected a group for each of them, and for no other"
            )
        names, groups = sorted(set(self.groups.values())), self.groups
        return jax.tree_util.tree_map_with_path(
            lambda path, _: names.index(groups[path[0].key]), tree
        )


class ISGD(SGKernel):
    """Isotropic SGD: Langevin steps without a step size; minibatch noise sets their rate.

    For a group p of entries, with g = grad Uhat over all data and n standard normal::

        b <- decay b + (1 - decay) g * g / 2,    lam_p = sum of b over the group
        theta' = theta - (g + sqrt(2 max(tau lam_p - b, 0)) n) / lam_p

    Minibatch noise and injected noise together have the covariance 2 tau lam_p I, so that
    1 / lam_p can be a large step. In warm-up lam_p is an average over some 200 steps, because b
    remembers only about two gradients and would make lam_p random. After warm-up lam_p is
    constant, and b still changes.

    Invariant distribution: exp(-U / tau), at this finite step, for a Gaussian target with the
    Hessian H and one group, where C + H S H is diagonal (C the noise covariance of g, S that of the
    target) and nothing is clipped at 0. Otherwise the law is biased at every step size, and no
    setting makes the bias small. Correlated inputs cause the largest bias. A single number should
    share a group with others. The page on kernels has the size of each bias.

    Choose `ISGD` to sample around a trained network without tuning a step size. Where the
    posterior itself matters use `SGRLD`, whose bias can be made small. A site whose gradient has
    no minibatch noise (a scale in the prior, for example) has no rate of its own: put it in a
    group with others. Cost per step: one minibatch gradient. Memory: one copy of the position.

    Args:
        potential_fn: replaces the model: a stochastic energy ``potential_fn(z, rng_key)``.
        groups: site -> name of its group, for every site. Sites with the same name share a rate.
            None makes one group per site. (The paper's groups are layers.)
        decay: memory mu of b, in [0, 1).
        batch_size: rows per step: an int or a dict plate -> int. None for the model's subsampling.
        num_steps: steps between two draws, or ``"auto"`` for half a relaxation time.
        init_strategy: NumPyro's strategy for where the search for a mode starts. The search runs
            before warm-up unless ``init_params`` are given. Far from a mode g is mostly not noise,
            and the rate is small.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range, for groups that do not fit the model, and for
            gradients without noise. (With all rows b is the mean gradient alone, so the rate
            would be infinite at a mode.)

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_geom.baselines import ISGD
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10).expand([3]).to_event(1))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])
        >>> y = 3 + jax.random.normal(jax.random.key(0), (1000, 3))
        >>> mcmc = MCMC(ISGD(model, batch_size=100), num_warmup=200, num_samples=200,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool((abs(mcmc.get_samples()["mu"].mean(0) - 3) < 0.2).all())
        True

    References:
        Franzese, Milios, Filippone, Michiardi, "A Scalable Bayesian Sampling Method Based on
        Stochastic Gradient Descent Isotropization", Entropy 2021, Algorithm 2, Eq. A1. Deviations:
        the square root that Algorithm 2 leaves out; b is the average of Eq. A1 also in the noise;
        lam from a longer average; the rate is Algorithm 2's 1 / lam, not Appendix B.3's 2 / lam.
        The paper does not say how it tempers; scaling the energy by 1 / tau would give the rate
        tau / lam. The stationary covariance above is ours.
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        groups: Mapping[str, str] | None = None,
        decay: float = 0.5,
        batch_size: int | Mapping[str, int] | None = None,
        num_steps: int | Literal["auto"] = "auto",
        temperature: float = 1.0,
        batching: Literal["replacement", "stratified", "epoch"] = "replacement",
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        super().__init__(
            locals(),
            metric=GroupRate(dict(groups) if isinstance(groups, Mapping) else groups, decay),
            step_size=1.0,
        )

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings."""
        # search for a mode although nothing is tuned: far from a mode the rate is too small
        return langevin_algorithm(
            settings,
            _step(settings.metric),
            settling_steps=2 * RATE_STEPS,
            searches=settings.potential_fn is None,
            bias=None,
            check=_check_noisy,
        )


def _check_noisy(potential: Potential, plan: Any) -> None:
    if potential.deterministic:
        raise ValueError(
            "ISGD takes its rate from minibatch noise, and this gradient has none: pass "
            "batch_size, below the number of rows (or a potential_fn with a key), or use SGRLD"
        )


def _step(metric: GroupRate) -> Step:
    """One step; the position does not move until the rate is known well enough."""

    def step(
        rng_key: jax.Array,
        potential: Potential,
        batch: Any,
        chain: Chain,
        step_size: jax.Array,
        temperature: jax.Array | float,
        learning: jax.Array,
    ) -> tuple[Chain, StepReport]:
        old = chain.metric_state
        grad = jax.grad(potential.energy)(chain.position, batch)
        still = old.weight < 1 - (1 - 1 / RATE_STEPS) ** STILL_STEPS
        new = metric.update(old, grad)
        kept = new._replace(lam=old.lam, weight=old.weight)
        metric_state = tree_where(learning | still, new, kept)

        rate = jnp.where(still, 0.0, step_size)

        def move(x: jax.Array, g: jax.Array, b: jax.Array, lam: jax.Array, n: jax.Array) -> Any:
            lacking = jnp.maximum(temperature * lam - b, 0.0)
            return x - (rate / lam * (g + jnp.sqrt(2 * lacking) * n)).astype(x.dtype)

        position = jax.tree.map(
            move,
            chain.position,
            grad,
            metric_state.statistic,
            metric.spread(metric_state),
            tree_normal(rng_key, chain.position),
        )
        squared_drift = step_size * tree_vdot(grad, metric.apply_inverse(metric_state, grad)) / 2
        return Chain(position, metric_state, ()), StepReport(grad, squared_drift)

    return step
