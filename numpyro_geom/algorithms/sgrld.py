"""Stochastic-gradient Riemannian Langevin dynamics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from numpyro.infer import init_to_uniform

from .. import _random
from .._checks import check_flag
from .._util import tree_scale, tree_vdot
from ..kernel import PyTree, SGKernel
from ..metrics.base import MetricLike
from ..metrics.by_site import BySite
from ..model.derivatives import jvp
from ..model.potential import Potential
from ..sampling.algorithm import (
    Algorithm,
    Step,
    langevin_algorithm,
    metric_learner,
    settling_steps,
)
from ..sampling.schedules import check_always_noisy
from ..sampling.settings import Settings, one_of, optional
from ..sampling.state import Chain, StepReport
from .auxiliary import (
    auxiliary_curvature,
    auxiliary_step,
    check_auxiliary,
    check_thirds,
    init_auxiliary,
    renewed_next,
)
from .langevin import (
    DIVERGENCE_MODES,
    check_derivative,
    divergence_from_probe,
    has_divergence,
    langevin_move,
    metropolis,
    mode_factor,
    probe,
)


class SGRLD(SGKernel):
    """Langevin dynamics with minibatch gradients in a Riemannian metric.

    One step from theta, with A = G^-1 the inverse metric and xi standard normal::

        theta' = theta - h A grad Uhat(theta) + tau h Gamma(theta) + sqrt(2 h tau) A^{1/2} xi

    The invariant distribution as h -> 0 depends on ``divergence``:

    - ``"frozen"``: exp(-U / tau). The metric adapts in warm-up only. Then A is constant, and the
      mean of the last step's xi and a new one takes the place of xi. So discretisation has an
      error of second order in h in place of first, and none on a Gaussian.
    - ``"auxiliary"``: exp(-U / tau), at any decay. A is a function of an auxiliary gradient V
      that is part of the chain, so no Gamma is needed. The step needs second derivatives of U.
      Its error is of first order in h: in the Wenzel metric on a funnel a mean was off by .04 and
      .12 sd in two runs at the automatic step, and by nothing at a fifth of ``bias_tolerance``.
    - ``"corrected"``: exp(-U / tau). A moves with theta, and Gamma is the divergence of A. h must
      be so small that the running statistics follow theta.
    - ``"published"``: Gamma is scaled by 1 - decay, as in most papers. This is biased: in one
      dimension the law is p A^{-decay}. Use it only to reproduce the literature.
    - ``"none"``: no Gamma. This is biased: in one dimension the law is p / A. Use it only to
      reproduce the literature.

    At a finite h, discretisation and minibatch noise change the variances. With
    ``step_size="auto"`` this bias is at most about ``bias_tolerance``. With ``adjusted=True`` a
    Metropolis test makes the law exact at any h. This test needs all rows at every step, and
    ``divergence`` ``"frozen"`` or ``"auxiliary"``.

    Choose `SGRLD` for models with more rows than a full gradient can take, or as the baseline for
    comparisons with other kernels. Cost per step: one minibatch gradient. ``"corrected"``,
    ``"published"`` and ``"auxiliary"`` add one Hessian-vector product.

    Args:
        divergence: the treatment of Gamma, see above. None takes the metric's own choice:
            ``"auxiliary"`` for a Monge metric with a given alpha2, ``"frozen"`` for all others.
        adjusted: whether to add the Metropolis test.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range and combinations that have no invariant law.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_geom import SGRLD
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> y = 3 + jax.random.normal(jax.random.key(0), (1000,))
        >>> mcmc = MCMC(SGRLD(model, batch_size=100), num_warmup=200, num_samples=200,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool(abs(mcmc.get_samples()["mu"].mean() - 3) < 0.2)
        True

    References:
        Yu, Hartmann, Williams, Klami, "Scalable Stochastic Gradient Riemannian Langevin Dynamics
        in Non-Diagonal Metrics", TMLR 2023, Eq. 3 (the step; the paper leaves Gamma out).
        Leimkuhler, Matthews, "Rational Construction of Stochastic Numerical Methods for Molecular
        Sampling", 2013 (the averaged noise; the limit of large friction of BAOAB). Deviation: with
        ``adjusted=True`` the noise is not averaged.
        Rensmeyer, Niggemann, "On the Convergence of Locally Adaptive and Scalable Diffusion-Based
        Sampling Methods for Deep Bayesian Neural Network Posteriors", AISTATS 2025 (the
        corrected Gamma, Algorithm 1). The auxiliary metric is ours, see the page on Gamma.
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        metric: MetricLike = "identity",
        divergence: Literal["corrected", "published", "none", "frozen", "auxiliary"] | None = None,
        step_size: float | Callable | Literal["auto"] = "auto",
        batch_size: int | Mapping[str, int] | Literal["auto"] | None = "auto",
        num_steps: int | Literal["auto"] = "auto",
        temperature: float = 1.0,
        batching: Literal["replacement", "stratified", "epoch"] = "replacement",
        adjusted: bool = False,
        bias_tolerance: float = 0.1,
        control_variate: bool | int | Literal["auto"] = "auto",
        dense_mass: bool | Sequence | Literal["auto", "structured", "low_rank"] | None = "auto",
        inverse_mass_matrix: Any = None,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        super().__init__(
            locals(), {"divergence": optional(one_of(DIVERGENCE_MODES)), "adjusted": check_flag}
        )
        _check(self.settings)

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings."""
        metric = settings.metric
        others: dict[str, Any] = {}
        if settings.divergence == "auxiliary":
            step = auxiliary_step(metric, settings.adjusted)
            # the drift uses two of three parts of the batch
            others = {"noise_factor": 1.5}
            others["second_order"] = lambda state, potential: auxiliary_curvature(
                state, settings, potential.num_data
            )
            others["at_rest"] = renewed_next
            others["init"] = lambda position, _: init_auxiliary(position)
        else:
            step = _langevin_step(settings)
        if _averages(settings):
            others["init"] = lambda position, rng_key: _random.tree_normal(rng_key, position)
            # without the noise that led to the failed step
            others["at_rest"] = lambda noise: jax.tree.map(jnp.zeros_like, noise)
        return langevin_algorithm(
            settings,
            step,
            adjusted=settings.adjusted,
            averaged=_averages(settings),
            settling_steps=settling_steps(metric),
            check=lambda potential, plan: _check_potential(settings, potential, plan),
            **others,
        )


def _averages(settings: Settings) -> bool:
    """Whether a step averages its noise with that of the step before.

    This is of second order only for a constant A.
    """
    return settings.divergence == "frozen" and not settings.adjusted


def _langevin_step(settings: Settings) -> Step:
    """A gradient, the metric, and a move or a Metropolis test of it.

    The step's memory is xi of the step before, or nothing.
    """
    metric = settings.metric
    factor = mode_factor(settings.divergence, metric.decay)
    learn = metric_learner(metric, frozen=settings.divergence == "frozen")
    averages = _averages(settings)

    def step(
        rng_key: jax.Array,
        potential: Potential,
        batch: Any,
        chain: Chain,
        h: jax.Array,
        tau: jax.Array | float,
        learning: jax.Array,
    ) -> tuple[Chain, StepReport]:
        position, memory = chain.position, chain.dynamics
        with_divergence = factor > 0 and has_divergence(metric, position)

        def value_and_grad(p: PyTree) -> tuple[jax.Array, PyTree]:
            return jax.value_and_grad(potential.energy)(p, batch)

        if with_divergence:  # one pass gives the gradient and Gamma's Hessian-vector product
            rng_key, key_probe = _random.split(rng_key)
            z = probe(key_probe, position)
            here, (_, hz) = jvp(value_and_grad, position, z)
        else:
            here = value_and_grad(position)
        grad = here[1]
        metric_state = learn(chain.metric_state, grad, potential.num_data, learning)
        if settings.adjusted:
            position, accept_prob = metropolis(
                rng_key, value_and_grad, here, position, metric, metric_state, h, tau
            )
            report = StepReport(grad, jnp.zeros_like(accept_prob), accept_prob)
            return Chain(position, metric_state, ()), report
        drift = metric.apply_inverse(metric_state, grad)
        xi = _random.tree_normal(rng_key, position)
        if averages:
            memory, xi = xi, jax.tree.map(lambda old, new: (old + new) / 2, memory, xi)
        noise = metric.apply_inverse_sqrt(metric_state, xi)
        if with_divergence:
            g, hz = tree_scale(1 / potential.num_data, (grad, hz))
            divergence = divergence_from_probe(metric, metric_state, g, z, hz)
            drift = jax.tree.map(lambda d, c: d - factor * tau * c, drift, divergence)
        position = langevin_move(position, drift, noise, h, tau)
        squared_drift = h * tree_vdot(grad, drift) / 2
        return Chain(position, metric_state, memory), StepReport(grad, squared_drift)

    return step


def _check(settings: Settings) -> None:
    """Raise for combinations that have no invariant law."""
    divergence, metric = settings.divergence, settings.metric
    check_derivative(settings)
    if divergence == "auxiliary":
        check_auxiliary(settings)
    if divergence == "published" and isinstance(metric, BySite):
        raise ValueError(
            "divergence='published' multiplies Gamma by 1 - decay, and each metric by site has a "
            "decay of its own: use divergence='corrected', or one metric for all sites"
        )
    if settings.adjusted:
        _check_adjusted(settings)


def _check_adjusted(settings: Settings) -> None:
    if settings.divergence not in ("frozen", "auxiliary"):
        raise ValueError(
            "adjusted=True needs a metric that is constant within a step: expected divergence "
            f"'frozen' or 'auxiliary', got {settings.divergence!r}"
        )
    if settings.batch_size not in (None, "auto"):
        raise ValueError(
            "adjusted=True needs the full-data energy: drop batch_size, or drop adjusted"
        )
    if settings.temperature == 0:
        raise ValueError("adjusted=True needs temperature > 0, got 0: nothing to test against")
    check_always_noisy(settings.step_size, "adjusted=True", ", or drop adjusted")


def _check_potential(settings: Settings, potential: Potential, plan: Any) -> None:
    if settings.adjusted and not potential.deterministic:
        raise ValueError(
            "adjusted=True needs the full-data energy, and the model subsamples its rows (or "
            "potential_fn takes a key): use all rows, or drop adjusted"
        )
    if settings.divergence == "auxiliary":
        check_thirds(plan)
