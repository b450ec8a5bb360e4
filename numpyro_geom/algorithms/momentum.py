"""Shared by kernels with a momentum: the whitened momentum, its friction, the step-size rule.

With the mass matrix M = G the momentum r is stored as p = G^{-1/2} r, which has the law N(0, tau I)
for any metric. So the dynamics only need products with A^{1/2},

    d theta = A^{1/2} p dt,    d p = -A^{1/2} grad U dt - gamma p dt + sqrt(2 gamma tau) dW,

and a change of the metric in warm-up does not change p.
The page on momentum has the bias of a step, from which the step-size rule follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._util import PyTree, tree_size, tree_vdot
from ..model.potential import Potential
from ..sampling.algorithm import (
    NEWTON,
    Algorithm,
    Motion,
    Step,
    num_steps_from,
    rule_temperature,
)
from ..sampling.settings import Settings
from ..sampling.state import Adaptation, SGState

MOST_FRICTION = 1.0
"""Largest gamma h of ``friction="auto"``. If noise needs more friction, the step shrinks."""

STIFF_FRICTION = 20.0
"""Friction of a network in units of the square root of lam_min. With less, a momentum of a Gaussian
law gains energy at stiff places, and leaves the mass."""

num_steps = partial(num_steps_from, draw_length=1.0)
"""Steps per draw under ``num_steps="auto"``."""


class Momentum(NamedTuple):
    """The momentum between two steps.

    Attributes:
        momentum: p, a pytree like the position; N(0, tau I) in the target.
        friction: gamma, a scalar in units of 1 / step size.
        extra: other state of the kernel.
    """

    momentum: PyTree
    friction: jax.Array
    extra: Any


def init_momentum(
    settings: Settings,
    position: PyTree,
    rng_key: jax.Array,
    extra: Any = (),
    motion: Motion = NEWTON,
) -> Momentum:
    """A momentum drawn from its law."""
    dtype = jnp.result_type(*jax.tree.leaves(position))
    momentum = motion.draw(rng_key, position, settings.temperature)
    given = settings.given_friction
    return Momentum(momentum, jnp.asarray(1.0 if given is None else given, dtype), extra)


def at_rest(dynamics: Momentum) -> Momentum:
    """The state without its momentum, so that a failed step does not fail again."""
    return dynamics._replace(momentum=jax.tree.map(jnp.zeros_like, dynamics.momentum))


def kinetic_temperature(momentum: PyTree) -> jax.Array:
    """Squared length of p over its number of entries D; its mean in the target is tau."""
    return tree_vdot(momentum, momentum) / tree_size(momentum)


def momentum_algorithm(
    settings: Settings,
    step: Step,
    *,
    follow: Callable = lambda dynamics, friction: dynamics._replace(friction=friction),
    remark: str = "",
    **others: Any,
) -> Algorithm:
    """The algorithm of a BAOAB step with a momentum; `momentum_rule` gives its automatic settings.

    ``follow`` maps the dynamics to those for another friction, ``remark`` is added to the text of
    the bias, and ``others`` are further fields of `Algorithm`.
    """

    def propose(adaptation: Adaptation, state: SGState, _: Potential) -> tuple:
        schedule = settings.schedule
        h, friction, rate = momentum_rule(
            adaptation,
            settings.bias_tolerance,
            settings.temperature,
            None if schedule is None else schedule(state.steps_taken),
            settings.given_friction,
            STIFF_FRICTION if settings.by_energy and fields["motion"] is NEWTON else 1.0,
        )
        dynamics = state.dynamics
        return h, rate, follow(dynamics, friction.astype(dynamics.friction.dtype))

    def bias(curvature: Any, noise: Any, step_size: Any, dynamics: Any) -> tuple[Any, Any, str]:
        friction, tau = np.asarray(dynamics.friction), settings.temperature
        tau, bend = rule_temperature(tau), step_size**2 * curvature / 4
        part = step_size**2 * noise / (4 * tau * np.tanh(friction * step_size / 2)) / (1 - bend)
        text = "{0} from discretisation on a Gaussian, {1} from minibatch noise"
        return 0 * part, part, text + remark

    fields = {"at_rest": at_rest, "motion": NEWTON, **others}
    return Algorithm(
        propose=propose,
        step=step,
        rate=lambda slowest, dynamics: relaxation_rate(slowest, dynamics.friction),
        bias=bias,
        num_steps=num_steps,
        momentum=True,
        measures=settings.given_friction is None,
        **fields,
    )


def momentum_rule(
    adaptation: Adaptation,
    bias_tolerance: float,
    temperature: float,
    given_step: jax.Array | None,
    given_friction: jax.Array | float | None,
    least_friction: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Step size, friction, and relaxation rate per unit of step size.

    Let s = bias_tolerance / (1 + bias_tolerance). Neither h^2 lam_H / 4 nor the noise term exceeds
    s, so the error on a Gaussian stays within the tolerance. An automatic friction is that of
    `least_damping`, or as much more as noise needs. It is ``least_friction`` times this where stiff
    places would throw a momentum out. If noise needs more than `MOST_FRICTION`, or more than a
    given friction, the step shrinks.
    """
    tau = rule_temperature(temperature)
    share = bias_tolerance / (1 + bias_tolerance)
    noise = adaptation.noise / (4 * tau * share)  # the least tanh(gamma h / 2) over h^2
    tiny = jnp.finfo(noise.dtype).tiny
    most = jnp.tanh(MOST_FRICTION / 2)
    if given_step is None:
        h = 2 * jnp.sqrt(share / jnp.maximum(adaptation.curvature, tiny))
        if given_friction is None:
            h = jnp.minimum(h, jnp.sqrt(most / (noise + tiny)))
        else:
            # the tangent is at least (gamma h / 2) / sqrt(1 + (gamma h / 2)^2), solved for h
            bound = 1 / (noise + tiny)
            root = 2 / given_friction**2 + jnp.hypot(2 / given_friction**2, bound)
            h = jnp.minimum(h, bound / jnp.sqrt(root))
    else:
        h = given_step
    if given_friction is None:
        damping = jnp.minimum(noise * h**2, most)
        least = least_friction * least_damping(adaptation)
        friction = jnp.maximum(least, 2 * jnp.arctanh(damping) / h)
        friction = jnp.minimum(friction, MOST_FRICTION / h)
    else:
        friction = jnp.asarray(given_friction, h.dtype)
    return h, friction, relaxation_rate(adaptation.slowest, friction)


def least_damping(adaptation: Adaptation) -> jax.Array:
    """Half of the critical friction of the direction with the least curvature, sqrt(lam_min).

    Autocorrelation times of theta fall with the friction, and those of theta^2 are least there.
    Correlated draws do not lower it: the energy would relax more slowly still.
    """
    return jnp.sqrt(adaptation.slowest / adaptation.rate_factor)


def relaxation_rate(slowest: Any, friction: Any) -> Any:
    """The real part of the slowest root of s^2 + friction s + slowest = 0, negated."""
    half = friction / 2
    spread = jnp.sqrt(jnp.maximum(half**2 - slowest, 0.0))
    return jnp.where(spread > 0, slowest / (half + spread), half)
