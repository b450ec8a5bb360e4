"""Stochastic-gradient Hamiltonian Monte Carlo: Langevin dynamics with a momentum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from numpyro.infer import init_to_uniform

from .. import _random
from .._util import tree_axpy, tree_scale, tree_vdot
from ..kernel import PyTree, SGKernel
from ..metrics.base import MetricLike
from ..model.derivatives import jvp
from ..model.potential import Potential
from ..sampling.algorithm import NEWTON, Algorithm, Motion, Step, metric_learner, settling_steps
from ..sampling.settings import Settings, one_of, optional
from ..sampling.state import Chain, StepReport
from .auxiliary import (
    auxiliary_curvature,
    auxiliary_kick,
    check_auxiliary,
    check_thirds,
    init_auxiliary,
    renewed_next,
)
from .langevin import check_derivative, divergence_from_probe, has_divergence, probe
from .momentum import (
    Momentum,
    at_rest,
    init_momentum,
    kinetic_temperature,
    momentum_algorithm,
)

MASS_MODES = ("frozen", "auxiliary", "corrected", "none")
"""Whether the metric moves with the position, and whether this movement is corrected."""


class SGHMC(SGKernel):
    """Hamiltonian Monte Carlo with minibatch gradients: the first choice for many rows.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_geom import SGHMC
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> y = 3 + jax.random.normal(jax.random.key(0), (1000,))
        >>> mcmc = MCMC(SGHMC(model, batch_size=100), num_warmup=200, num_samples=200,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool(abs(mcmc.get_samples()["mu"].mean() - 3) < 0.2)
        True

    One step (BAOAB), with momentum r, inverse metric A = M^-1, xi standard normal::

        r <- r - h grad Uhat(theta)
        theta <- theta + (h / 2) A r
        r <- c r + sqrt((1 - c^2) tau) M^{1/2} xi,    c = exp(-gamma h)
        theta <- theta + (h / 2) A r

    Invariant distribution as h -> 0: exp(-U / tau); with all rows, on a Gaussian, at any stable h.
    The automatic step keeps errors of variances below ``bias_tolerance``.

    Cost per step: one minibatch gradient, two with a control variate. Where
    curvature limits h, it takes fewer steps than `SGRLD`.

    Args:
        divergence: ``"frozen"``: the metric is constant after warm-up. ``"auxiliary"``: it follows
            the position, for two Hessian-vector products. For comparisons: ``"corrected"`` (SGRHMC,
            far off at usual steps), ``"none"``. None: the metric's choice.
        step_size: ``"auto"``, a number h, or a schedule. The papers' learning rate is N h^2.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.

    References:
        Chen, Fox, Guestrin, "Stochastic Gradient Hamiltonian Monte Carlo", ICML 2014
        (Euler's scheme). Leimkuhler, Matthews, "Rational Construction of Stochastic Numerical
        Methods for Molecular Sampling", 2013 (two half-kicks are one here). Ma, Chen, Fox, "A
        Complete Recipe for Stochastic Gradient MCMC", 2015 (SGRHMC; its friction is G^{-1}).
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        metric: MetricLike = "identity",
        friction: float | Literal["auto"] = "auto",
        divergence: Literal["frozen", "auxiliary", "corrected", "none"] | None = None,
        step_size: float | Callable | Literal["auto"] = "auto",
        batch_size: int | Mapping[str, int] | Literal["auto"] | None = "auto",
        num_steps: int | Literal["auto"] = "auto",
        temperature: float = 1.0,
        batching: Literal["replacement", "stratified", "epoch"] = "replacement",
        bias_tolerance: float = 0.1,
        control_variate: bool | int | Literal["auto"] = "auto",
        dense_mass: bool | Sequence | Literal["auto", "structured", "low_rank"] | None = "auto",
        inverse_mass_matrix: Any = None,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        super().__init__(locals(), {"divergence": optional(one_of(MASS_MODES))})
        check_derivative(self.settings)
        if self.settings.divergence == "auxiliary":
            check_auxiliary(self.settings)

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings."""
        others: dict[str, Any] = {}
        extra: Callable[[PyTree], Any] = lambda position: ()  # noqa: E731
        if settings.divergence == "auxiliary":
            extra = init_auxiliary
            # the force uses two of three parts of the batch
            others = {"noise_factor": 1.5, "check": lambda _, plan: check_thirds(plan)}
            others["second_order"] = lambda dynamics, potential: auxiliary_curvature(
                dynamics.extra, settings, potential.num_data
            )
            others["at_rest"] = lambda dynamics: at_rest(
                dynamics._replace(extra=renewed_next(dynamics.extra))
            )
        return momentum_algorithm(
            settings,
            baoab_step(settings),
            init=lambda position, key: init_momentum(settings, position, key, extra(position)),
            settling_steps=settling_steps(settings.metric),
            **others,
        )


def baoab_step(settings: Settings, motion: Motion = NEWTON) -> Step:
    """The step of `SGHMC` for a momentum of any kind."""
    metric = settings.metric
    learn = metric_learner(metric, frozen=settings.divergence == "frozen")

    def step(
        rng_key: jax.Array,
        potential: Potential,
        batch: Any,
        chain: Chain,
        step_size: jax.Array,
        temperature: jax.Array | float,
        learning: jax.Array,
    ) -> tuple[Chain, StepReport]:
        position, old = chain.position, chain.dynamics
        h, tau, extra = step_size, temperature, old.extra
        with_divergence = settings.divergence == "corrected" and has_divergence(metric, position)
        auxiliary = settings.divergence == "auxiliary"

        def gradient(p: PyTree) -> PyTree:
            return jax.grad(potential.energy)(p, batch)

        if auxiliary:
            rng_key, key_v = _random.split(rng_key)
            new, force = auxiliary_kick(
                metric, key_v, potential, batch, chain, extra, tau, learning
            )
            grad, extra, metric_state = new.grad, new.state, new.metric_state
        elif with_divergence:
            rng_key, key_probe = _random.split(rng_key)
            z = probe(key_probe, position)
            grad, hz = jvp(gradient, position, z)
        else:
            grad = gradient(position)
        if not auxiliary:
            metric_state = learn(chain.metric_state, grad, potential.num_data, learning)
            force = metric.apply_inverse_sqrt(metric_state, grad)
        if with_divergence:
            g, hz = tree_scale(1 / potential.num_data, (grad, hz))
            divergence = divergence_from_probe(metric, metric_state, g, z, hz, "apply_inverse_sqrt")
            force = tree_axpy(-tau, divergence, force)
        normal = _random.tree_normal(rng_key, position)
        kicked, _ = motion.kick(old.momentum, force, h, tau)
        momentum = motion.refresh(kicked, normal, old.friction * h, tau)
        travelled = jax.tree.map(lambda p, q: (p + q) / 2, kicked, momentum)
        velocity = metric.apply_inverse_sqrt(metric_state, travelled)
        position = tree_axpy(h, velocity, position)
        kick = jax.tree.map(jnp.subtract, kicked, old.momentum)
        report = StepReport(
            grad,
            squared_drift=tree_vdot(kick, kick),
            kinetic_temperature=kinetic_temperature(momentum),
        )
        return Chain(position, metric_state, Momentum(momentum, old.friction, extra)), report

    return step
