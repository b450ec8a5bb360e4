"""Algorithm: what a sampler is, as a value of pure functions; and the loop that repeats a step.

An algorithm says how its own state starts, how a draw is made, how step size and number of steps
follow from what warm-up measured, and a few facts. A kernel is `Settings` plus an algorithm.
`repeat` makes a draw of a pure step: it holds the loop, the guard and the means over a draw, once
for all. Whoever has something other than a step to repeat (a trajectory with its acceptance test)
writes a draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random

from ._programs import compiled
from ._util import all_finite, lazy_cond, tree_scale, tree_vdot, tree_where
from .rows.loop import loop_over_batches
from .settings import Settings
from .state import Chain, SGState, StepReport, is_by_site, virials
from .target.control_variate import refresh
from .target.potential import Potential
from .target.target import Target
from .warmup import step_size as auto
from .warmup.step_size import Adaptation

PyTree = Any

UNSTABLE_DRIFT = 100.0
"""A drift this many times longer (squared, in the metric) than the noise, and twice as long as one
step before, marks an unstable integrator: a stationary chain has about the bias tolerance."""
FARTHEST_DRIFT = 1000.0
"""Beyond this one drifts may only get shorter, as those of a chain that starts far out do. A step
that is barely unstable never doubles them."""

CALM, KICK = 1.0, 10.0
"""A drift that is shorter than the noise when a draw starts, and this many times longer in one of
its steps, throws a chain with a momentum out: the draw is marked, unless the chain has just
started. The step stands, since the chain can come back."""

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
        init: ``(position, rng_key) -> dynamics``, the algorithm's own state at the start.
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
        return jax.lax.cond(
            learning,
            lambda state, grad: update(state, grad, num_data),
            lambda state, _: state,
            state,
            grad,
        )

    return learn


def repeat(
    step: Step,
    settings: Settings,
    facts: Facts,
    *,
    at_rest: Callable[[PyTree], PyTree] = lambda dynamics: dynamics,
) -> Draw:
    """A draw of several steps; a step that cannot be is undone.

    Args:
        step: the pure step.
        settings: step size, number of steps, temperature and anchor interval are taken from it.
        facts: of the algorithm.
        at_rest: ``dynamics -> dynamics``, what it carries after a step that had to be undone.
    """
    schedule, given_num_steps = settings.schedule, settings.given_num_steps
    adapting = adapts(settings, facts)
    watches_drift = settings.temperature > 0 and not facts.adjusted

    def draw(
        rng_key: jax.Array,
        target: Target,
        state: SGState,
        moving: jax.Array | bool,
        learning: jax.Array,
    ) -> SGState:
        potential = target.potential
        key_steps, _ = random.split(rng_key)
        with jax.ensure_compile_time_eval():  # the same rows for every draw's last check
            stream = potential.init_stream(random.key(1))
            some_batch, _ = compiled(potential.draw, random.key(0), stream)
        dtype = state.potential_energy.dtype
        start = state.chain
        size = sum(x.size for x in jax.tree.leaves(start.position))
        num_virials = len(start.position) if is_by_site(start.position) else 1

        def body(_: jax.Array, key_step: jax.Array, batch: Any, carry: tuple) -> tuple:
            chain, trusted, control, t, old, old_ratio, failed, sums = carry
            if settings.anchor_interval is not None:
                control = lazy_cond(
                    t % settings.anchor_interval == 0,
                    lambda c, z: refresh(potential, c, z),
                    control,
                    target.merge(chain.position),
                )
            seen = target.seen(control)
            h, tau = state.step_size, jnp.asarray(settings.temperature, dtype)
            if schedule is not None:
                h = jnp.asarray(schedule(t), dtype)
                tau = tau * jnp.asarray(schedule.noise(t), dtype)
            if adapting:
                h = jnp.where(moving, h, 0.0)
            new, report = step(key_step, seen, batch, chain, h, tau, learning)
            facts = (
                report.energy.astype(dtype),
                tree_vdot(report.grad, report.grad).astype(dtype),
                h,
            )
            virial = virials(chain.position, state.centre, report.grad).astype(dtype)
            finite = jnp.isfinite(facts[0]) & jnp.isfinite(facts[1]) & all_finite(new.position)
            kicked = jnp.zeros((), bool)
            if watches_drift:
                ratio = (report.squared_drift / (settings.temperature * size)).astype(dtype)
                kicked = calm & (ratio > KICK)
                finite &= (ratio < UNSTABLE_DRIFT) | (ratio < 2 * old_ratio)
                least = jnp.where(ratio < FARTHEST_DRIFT, ratio, jnp.minimum(ratio, old_ratio))
                old_ratio = jnp.where(finite, least, old_ratio)
            # energy and gradient are of where the step started: if they fail, the step before led
            # astray, and the chain goes back to where they did not
            back = chain._replace(position=trusted, dynamics=at_rest(chain.dynamics))
            trusted = tree_where(finite, chain.position, trusted)
            chain, facts = tree_where(finite, (new, facts), (back, old))
            others = jnp.stack([report.accept_prob, report.kinetic_temperature]).astype(dtype)
            sums = sums + jnp.where(finite, jnp.concatenate([others, virial]), 0.0)
            failed = failed + (~finite | kicked)
            return chain, trusted, control, t + 1, facts, old_ratio, failed, sums

        num_steps = state.num_steps if given_num_steps is None else given_num_steps
        # the first step that moves may be long: a chain can start far out
        first = (state.i == 1) & adapting
        ratio_before = jnp.where(first, jnp.inf, state.drift_ratio).astype(dtype)
        arrived = state.i > state.adaptation.num_warmup // 16
        calm = facts.momentum & arrived & (ratio_before < CALM)
        carry = (
            start,
            state.trusted,
            state.control,
            state.steps_taken,
            (state.potential_energy, jnp.zeros((), dtype), state.step_size),
            ratio_before,
            jnp.zeros((), jnp.int32),
            jnp.zeros(2 + num_virials, dtype),
        )
        stream, carry = loop_over_batches(
            potential,
            target.merge(start.position),
            key_steps,
            state.stream,
            num_steps,
            body,
            carry,
        )
        chain, trusted, control, taken, facts_, drift_ratio, failed, sums = carry
        merged = target.merge(chain.position)  # a draw, which no step has evaluated yet
        finite = jnp.isfinite(potential.energy(merged, some_batch))
        if target.transforms is not None:
            finite &= target.is_usable(merged)
            # values can overflow all along the draw; where it started they did not
            usable = target.is_usable(target.merge(trusted))
            trusted = tree_where(usable, trusted, start.position)
        position = tree_where(finite, chain.position, trusted)
        dynamics = tree_where(finite, chain.dynamics, at_rest(chain.dynamics))
        failed = failed + ~finite
        energy, squared_norm, step_size = facts_
        means = sums / jnp.asarray(num_steps, dtype)
        state = state.with_temperatures(means[2:])
        return state._replace(
            z=target.merge(position),
            potential_energy=energy,
            grad_norm=jnp.sqrt(squared_norm),
            kinetic_temperature=means[1] if facts.momentum else state.kinetic_temperature,
            step_size=state.step_size if schedule is None else step_size,
            diverging=failed > 0,
            num_diverging=failed,
            accept_prob=means[0] if facts.adjusted else state.accept_prob,
            metric_state=chain.metric_state,
            dynamics=dynamics,
            expanded=() if target.moves_sites else position,
            trusted=trusted,
            drift_ratio=drift_ratio,
            stream=stream,
            control=control,
            steps_taken=taken,
        )

    return draw
