"""Algorithm: a sampler as a value of pure functions.

An algorithm defines the start of its own state, how a draw is made, how step size and number of
steps follow from measurements in warm-up, and a few facts. A kernel is `Settings` plus an
algorithm. `numpyro_geom.sampling.repeat.repeat` makes a draw of a pure step. A sampler that does
not repeat a step (but, for example, runs a trajectory with an acceptance test) defines its draw
directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._util import lazy_cond, tree_scale
from ..model.potential import Potential
from . import step_size as auto
from .settings import Settings
from .state import Chain, SGState, StepReport
from .step_size import Adaptation

PyTree = Any

Step = Callable[..., tuple[Chain, StepReport]]
"""``(rng_key, potential, batch, chain, step_size, temperature, learning) -> (chain, report)``.

``learning`` says whether the statistics of warm-up may still change."""

Draw = Callable[..., SGState]
"""``(rng_key, target, state, moving, learning) -> state``: the state after the steps of one draw.

``moving`` says whether the position may change. Before the first measurement it does not move."""


class Facts(NamedTuple):
    """Facts about an algorithm, for code that reports on it.

    Attributes:
        adjusted: whether a Metropolis test makes it exact at any step size.
        momentum: whether it has a momentum.
        trajectory: whether a draw is one trajectory, with one more gradient than steps, and one
            energy on all rows.
        target_accept: mean acceptance probability that an automatic step size aims at.
        settling_steps: steps for which statistics settle before the position first moves.
        measures: whether a setting besides step size and number of steps follows from curvature.
        searches: whether a run starts with a search for the bulk. None: it does if the step size
            or an anchor is learned there.
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
    """Facts about a step's noise that the measurement of curvature needs.

    Attributes:
        factor: variance of the gradient in the step, relative to the whole batch's gradient.
        known: ``dynamics -> pytree``, or None: the part of the gradient's variance, entry by entry,
            for which the step injects less noise.
        second_order: ``(dynamics, potential) -> scalar``, or None: factor of the squared Hessian in
            the curvature that the step sees.
    """

    factor: float = 1.0
    known: Callable | None = None
    second_order: Callable | None = None


PLAIN_NOISE = Noise()


class Rule(NamedTuple):
    """How automatic settings follow from measurements, and which bias they cause.

    Attributes:
        propose: ``(adaptation, state, potential) -> (step_size, rate, dynamics)``: the step size,
            the relaxation rate per unit of step size, and the dynamics for this step size. If the
            user gave a ``step_size``, the first is that of ``state``.
        rate: ``(slowest, dynamics)``: relaxation rate of the slowest direction, per unit of step
            size.
        bias: ``(curvature, noise, step_size, dynamics) -> (discretisation, noise, text)``: relative
            errors of variances, and a text with the fields ``{0}`` and ``{1}`` for both errors.
            None if the bias does not come from a step size.
        num_steps: ``(rate, step_size, potential)``: steps of the next draw
            under ``num_steps="auto"``.
        observe: ``(adaptation, state) -> adaptation`` after a draw of warm-up.
        noise: facts about the step's noise.
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
        init: ``(position, rng_key) -> dynamics``, the algorithm's own state at the start. For the
            position see `numpyro_geom.sampling.state.Chain`.
        draw: see `Draw`.
        rule: see `Rule`.
        facts: see `Facts`.
        check: ``(potential, plan)``, raises if the algorithm cannot use the potential.
        forget: ``dynamics -> dynamics``, without anything that depends on the model's arguments.
    """

    init: Callable[[PyTree, jax.Array], PyTree]
    draw: Draw
    rule: Rule
    facts: Facts = Facts()
    check: Callable[[Potential, Any], None] = lambda potential, plan: None
    forget: Callable[[PyTree], PyTree] = lambda dynamics: dynamics


def adapts(settings: Settings, facts: Facts) -> bool:
    """Whether any setting follows from measurements of curvature and noise."""
    return settings.schedule is None or settings.given_num_steps is None or facts.measures


def langevin_rule(
    settings: Settings, *, adjusted: bool = False, noise: Noise = PLAIN_NOISE
) -> Rule:
    """The rule of a Langevin step, see `numpyro_geom.sampling.step_size`."""
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
        frozen: whether statistics change only while ``learning``; after it they cost nothing.
    """

    def update(state: PyTree, grad: PyTree, num_data: int) -> PyTree:
        return metric.update(state, tree_scale(1 / num_data, grad))

    def learn(state: PyTree, grad: PyTree, num_data: int, learning: jax.Array) -> PyTree:
        if not frozen:
            return update(state, grad, num_data)
        return lazy_cond(learning, lambda s, g: update(s, g, num_data), state, grad)

    return learn
