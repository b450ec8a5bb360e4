"""Algorithm: what a sampler is, as a value of pure functions.

An algorithm says how its own state starts, how a draw is made, how step size and number of steps
follow from what warm-up measured, and a few facts. A kernel is `Settings` plus an algorithm.
`numpyro_geom.repeat.repeat` makes a draw of a pure step. Whoever has something other than a step to
repeat (a trajectory with its acceptance test) writes a draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ._util import lazy_cond, tree_scale
from .settings import Settings
from .state import Chain, SGState, StepReport
from .target.potential import Potential
from .warmup import step_size as auto
from .warmup.step_size import Adaptation

PyTree = Any

Step = Callable[..., tuple[Chain, StepReport]]
"""``(rng_key, potential, batch, chain, step_size, temperature, learning)``, to chain and report.

``learning`` says whether statistics that warm-up learns may still change."""

Draw = Callable[..., SGState]
"""``(rng_key, target, state, moving, learning) -> state``: the state after the steps of one draw.

``moving`` is whether the position may change: before the first measurement it holds still."""


class Facts(NamedTuple):
    """What an algorithm is, for those who report on it.

    Attributes:
        adjusted: whether a Metropolis test makes it exact at any step size.
        momentum: whether it has one.
        trajectory: whether a draw is one trajectory, with a gradient more than it has steps and an
            energy on all rows.
        target_accept: mean acceptance probability that an automatic step size aims at.
        settling_steps: steps for which statistics settle before the position first moves.
        measures: whether a setting besides step size and number of steps follows from curvature.
        searches: whether a run starts with a search for the bulk; None for where something is
            learned there: the step size or an anchor.
    """

    adjusted: bool = False
    momentum: bool = False
    trajectory: bool = False
    target_accept: float = auto.TARGET_ACCEPTANCE
    settling_steps: int = 1
    measures: bool = False
    searches: bool | None = None


class Noise(NamedTuple):
    """What a step makes of its potential, which the measurement of curvature must know.

    Attributes:
        factor: variance of the gradient in the step, relative to the whole batch's gradient.
        known: ``dynamics -> pytree``, the gradient's variance, entry by entry, that the injected
            noise makes up for; or None.
        second_order: ``(dynamics, potential) -> scalar``, factor of the squared Hessian in the
            curvature that the step sees; or None.
    """

    factor: float = 1.0
    known: Callable | None = None
    second_order: Callable | None = None


PLAIN_NOISE = Noise()


class Rule(NamedTuple):
    """How the automatic settings follow from what was measured, and what bias they cause.

    Attributes:
        propose: ``(adaptation, state, potential) -> (step_size, rate, dynamics)``: step size,
            relaxation rate per unit of it, and the dynamics for it. With a ``step_size`` of the
            user's the first is that of ``state``.
        rate: ``(slowest, dynamics)``: relaxation rate of the slowest direction, per unit of step
            size.
        bias: ``(curvature, noise, step_size, dynamics) -> (discretisation, noise, text)``: relative
            errors of variances, and a text with the fields ``{0}`` and ``{1}`` for both; None
            where the bias is not that of a step size.
        num_steps: ``(rate, step_size, potential)``: steps of the next draw
            under ``num_steps="auto"``.
        observe: ``(adaptation, state) -> adaptation`` after a draw of warm-up.
        noise: what the step makes of the minibatch noise.
    """

    propose: Callable
    rate: Callable
    bias: Callable | None
    num_steps: Callable
    observe: Callable
    noise: Noise = PLAIN_NOISE


class Algorithm(NamedTuple):
    """A sampler as a value.

    Attributes:
        init: ``(position, rng_key) -> dynamics``, the algorithm's own state at the start; for the
            position see `numpyro_geom.state.Chain`.
        draw: see `Draw`.
        rule: see `Rule`.
        facts: see `Facts`.
        check: ``(potential, plan)``, raises where the potential cannot be used.
        forget: ``dynamics -> dynamics`` without what it knows of the model's arguments.
    """

    init: Callable[[PyTree, jax.Array], PyTree]
    draw: Draw
    rule: Rule
    facts: Facts = Facts()
    check: Callable[[Potential, Any], None] = lambda potential, plan: None
    forget: Callable[[PyTree], PyTree] = lambda dynamics: dynamics


def adapts(settings: Settings, facts: Facts) -> bool:
    """Whether anything follows from measurements of curvature and noise."""
    return settings.schedule is None or settings.given_num_steps is None or facts.measures


def langevin_rule(
    settings: Settings, *, adjusted: bool = False, noise: Noise = PLAIN_NOISE
) -> Rule:
    """The rule of a Langevin step, see `numpyro_geom.warmup.step_size`."""
    tau = auto.rule_temperature(settings.temperature)

    def propose(adaptation: Adaptation, state: SGState, _: Potential) -> tuple:
        h = state.step_size
        if settings.schedule is None:
            tolerance, temperature = settings.bias_tolerance, settings.temperature
            h = auto.step_size_from(adaptation, tolerance, temperature, adjusted)
        return h, adaptation.slowest, state.dynamics

    def bias(curvature: Any, noise: Any, step_size: Any, dynamics: PyTree) -> tuple[Any, Any, str]:
        text = "h lam_H / 2 = {0} from discretisation, h lam_C / (2 tau) = {1} from minibatch noise"
        return step_size * curvature / 2, step_size * noise / (2 * tau), text

    return Rule(
        propose=propose,
        rate=lambda slowest, dynamics: slowest,
        bias=bias,
        num_steps=auto.num_steps_from,
        observe=auto.follow_acceptance if adjusted else auto.halve_if_failed,
        noise=noise,
    )


def metric_learner(metric: Any, *, frozen: bool = True) -> Callable:
    """``(state, grad, num_data, learning) -> state`` after a gradient over all data.

    Args:
        metric: the metric.
        frozen: statistics change while ``learning`` only, and then cost nothing.
    """

    def update(state: PyTree, grad: PyTree, num_data: int) -> PyTree:
        return metric.update(state, tree_scale(1 / num_data, grad))

    def learn(state: PyTree, grad: PyTree, num_data: int, learning: jax.Array) -> PyTree:
        if not frozen:
            return update(state, grad, num_data)
        return lazy_cond(learning, lambda s, g: update(s, g, num_data), state, grad)

    return learn
