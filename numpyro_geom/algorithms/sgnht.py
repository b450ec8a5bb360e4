"""Stochastic-gradient Nose-Hoover thermostat: a friction that adapts to unknown gradient noise.

The page on momentum shows why the law is invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.infer import init_to_uniform

from .. import _random
from .._util import tree_axpy, tree_size, tree_vdot
from ..kernel import PyTree, SGKernel
from ..metrics.base import MetricLike
from ..model.potential import Potential
from ..sampling.algorithm import Algorithm, Step, metric_learner, settling_steps
from ..sampling.schedules import check_always_noisy
from ..sampling.settings import Settings, auto_or, positive
from ..sampling.state import Chain, StepReport
from .momentum import (
    Momentum,
    at_rest,
    init_momentum,
    kinetic_temperature,
    momentum_algorithm,
)

HOTTEST = (4.0, 40.0)
"""The two numbers a, b: the thermostat counts p'p / (D tau) - 1 as at most a + b / D. A stationary
chain exceeds this with a probability below 2e-9 for any D (Chernoff). Without the limit a start far
from the mode would raise xi, which falls slowly (tau / mass per time unit), and stop the chain."""


class Thermostat(NamedTuple):
    """The thermostat between two steps.

    Attributes:
        friction: xi, a scalar in units of 1 / step size, for all momenta; may be negative.
    """

    friction: jax.Array


class SGNHT(SGKernel):
    """Langevin dynamics with a momentum and a friction that holds the kinetic temperature.

    One step from theta, the whitened momentum p = M^{-1/2} r and the thermostat xi, with
    A = M^-1 the inverse metric and N standard normal (BADODAB)::

        p <- p - h A^{1/2} grad Uhat(theta)         (two half-kicks at one position)
        theta <- theta + (h / 2) A^{1/2} p
        xi <- xi + (h / 2) (p'p / D - tau) / mass
        p <- e^{-xi h} p + sqrt(gamma tau (1 - e^{-2 xi h}) / xi) N
        xi <- xi + (h / 2) (p'p / D - tau) / mass
        theta <- theta + (h / 2) A^{1/2} p

    Invariant distribution as h -> 0: exp(-U / tau) for theta, N(0, tau I) for p, and
    N(gamma + h c / (2 tau), tau / (D mass)) for xi, where c I is the covariance of the noise in
    A^{1/2} grad Uhat. So xi removes isotropic noise of unknown size. At a finite h and large D:

    - With full gradients it is exact for the marginal of theta on a Gaussian. Isotropic noise
      changes the variances by about -h^2 c tanh(xi h / 2) / (4 tau), of second order in h.
    - Noise that differs between directions is removed on average. Let c_j be the noise of a
      direction and c the mean over all D directions. If directions exchange no energy, the error
      h (c_j - c) / (2 tau xi) remains. It is positive where noise is above average.

    ``step_size="auto"`` and ``friction="auto"`` use the rule of `SGHMC`. The rule counts all the
    noise, also the isotropic part that the thermostat removes. So the automatic values are too
    cautious where noise is isotropic: give both yourself for the full gain. The momentum persists
    from draw to draw. The metric and an automatic friction adapt in warm-up only, and xi is scaled
    with the friction. Two limits keep xi from growing too large after a start far from the mode,
    see the page on momentum.

    Choose `SGNHT` over `SGHMC` where minibatch noise is strong and about equal in all directions
    of the metric, and D is not small. Cost per step: one minibatch gradient.

    Args:
        friction: gamma of the injected noise in units of 1 / h, or ``"auto"``. xi starts at gamma.
            The papers' diffusion A is gamma tau.
        thermostat_mass: inertia of xi in units of tau h^2, or ``"auto"`` for 2 tau / gamma^2, with
            which the thermostat settles in a time 1 / gamma. The papers' value is 1. Where U is
            summed over many rows, it is slow by the square of U's time scale.
        step_size: ``"auto"``, a number h, or a schedule, all steps of which have noise.
        temperature: tau, above 0.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range and combinations that have no invariant law.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_geom import SGNHT
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> y = 3 + jax.random.normal(jax.random.key(0), (1000,))
        >>> mcmc = MCMC(SGNHT(model, batch_size=100), num_warmup=200, num_samples=200,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool(abs(mcmc.get_samples()["mu"].mean() - 3) < 0.2)
        True

    References:
        Ding, Fang, Babbush, Chen, Skeel, Neven, "Bayesian Sampling Using Stochastic Gradient
        Thermostats", NeurIPS 2014 (theirs is Euler's scheme). Leimkuhler, Shang, "Adaptive
        Thermostats for Noisy Gradient Systems", SIAM J. Sci. Comput. 38 (2016) (here the two
        half-kicks at one position are one kick, which keeps the law of theta and needs one gradient
        per step). Deviations: a metric, in whose coordinates the thermostat acts; a temperature; a
        mass of the thermostat that follows the friction.
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        metric: MetricLike = "identity",
        friction: float | Literal["auto"] = "auto",
        thermostat_mass: float | Literal["auto"] = "auto",
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
        super().__init__(locals(), {"thermostat_mass": auto_or(positive, "a positive number")})
        settings = self.settings
        if settings.temperature == 0:
            raise ValueError(
                "temperature must be above 0 with SGNHT, got 0: its thermostat would have nothing "
                "to hold. Use SGHMC(temperature=0) for a damped descent"
            )
        check_always_noisy(settings.step_size, "SGNHT", ", or SGHMC")

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings."""

        def init(position: PyTree, rng_key: jax.Array) -> Momentum:
            dynamics = init_momentum(settings, position, rng_key)
            return dynamics._replace(extra=Thermostat(dynamics.friction))

        def rest(dynamics: Momentum) -> Momentum:
            xi = dynamics.extra.friction
            kept = jnp.where(jnp.isfinite(xi), xi, dynamics.friction)
            return at_rest(dynamics)._replace(extra=Thermostat(kept))

        return momentum_algorithm(
            settings,
            _step(settings),
            follow=lambda dynamics, friction: _follow(settings, dynamics, friction),
            # an upper bound, because the thermostat removes the isotropic part
            remark=" at most (the thermostat takes its isotropic part)",
            init=init,
            at_rest=rest,
            settling_steps=settling_steps(settings.metric),
        )


def _follow(settings: Settings, dynamics: Momentum, friction: jax.Array) -> Momentum:
    """The dynamics for another friction; xi is scaled with the friction."""
    # with the automatic mass xi / gamma has the standard deviation 1 / sqrt(2 D), and its mean
    # exceeds 1 by no more than the bias that the rule allows: so xi follows gamma
    xi = dynamics.extra.friction * (friction / dynamics.friction)
    if settings.schedule is None:
        # limit the xi that the way to the mode has raised: it would take long to fall
        tau, size = settings.temperature, tree_size(dynamics.momentum)
        spread = jnp.sqrt(tau / (size * _inertia(settings, friction, tau)))
        most = friction * (1 + 2 * settings.bias_tolerance) + 5 * spread
        xi = jnp.minimum(xi, most.astype(xi.dtype))
    return dynamics._replace(friction=friction, extra=Thermostat(xi))


def _inertia(settings: Settings, friction: jax.Array, tau: jax.Array | float) -> Any:
    """The thermostat's mass."""
    mass = settings.thermostat_mass
    return 2 * tau / friction**2 if isinstance(mass, str) else mass


def _step(settings: Settings) -> Step:
    metric = settings.metric
    learn = metric_learner(metric)

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
        h, tau, gamma = step_size, temperature, old.friction
        grad = jax.grad(potential.energy)(position, batch)
        metric_state = learn(chain.metric_state, grad, potential.num_data, learning)
        force = metric.apply_inverse_sqrt(metric_state, grad)
        mass = _inertia(settings, gamma, tau)
        hottest = HOTTEST[0] + HOTTEST[1] / tree_size(position)

        def regulate(xi: jax.Array, p: PyTree, time: jax.Array) -> jax.Array:
            excess = jnp.minimum(kinetic_temperature(p) / tau - 1, hottest)
            return xi + (time * tau * excess / mass).astype(xi.dtype)

        def thermalise(p: jax.Array, n: jax.Array) -> jax.Array:
            loss = h * xi
            gained = 2 * h * gamma * tau * _shortfall(loss)
            return jnp.exp(-loss).astype(p.dtype) * p + jnp.sqrt(gained).astype(p.dtype) * n

        normal = _random.tree_normal(rng_key, position)
        kicked = tree_axpy(-h, force, old.momentum)
        xi = regulate(old.extra.friction, kicked, h / 2)
        momentum = jax.tree.map(thermalise, kicked, normal)
        xi = regulate(xi, momentum, h / 2)
        travelled = jax.tree.map(lambda p, q: (p + q) / 2, kicked, momentum)
        velocity = metric.apply_inverse_sqrt(metric_state, travelled)
        position = tree_axpy(h, velocity, position)
        report = StepReport(
            grad,
            squared_drift=h**2 * tree_vdot(force, force),
            kinetic_temperature=kinetic_temperature(momentum),
        )
        return Chain(position, metric_state, Momentum(momentum, gamma, Thermostat(xi))), report

    return step


def _shortfall(loss: jax.Array) -> jax.Array:
    """(1 - e^{-2 x}) / (2 x), and 1 at x = 0, for x of either sign."""
    small = jnp.abs(loss) < 1e-6
    safe = jnp.where(small, 1.0, loss)
    return jnp.where(small, 1.0 - loss, -jnp.expm1(-2 * safe) / (2 * safe))
