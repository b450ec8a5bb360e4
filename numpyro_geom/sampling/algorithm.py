"""Algorithm: a sampler as one value of pure functions and facts, and the draw that repeats a step.

An algorithm says how a step moves a chain, how step size and number of steps follow from what
warm-up has measured, and a few facts. A kernel is `Settings` plus an algorithm. A draw repeats the
step, with a guard that undoes invalid steps (`draw_of`). A sampler that does not repeat a step
(but, for example, runs a trajectory with an acceptance test) defines its draw directly.

The page on the step size derives the automatic step size of a Langevin step::

    h = bias_tolerance / (lam_H / 2 + lam_C / (2 tau)),    relaxation time = 1 / (h lam_min) steps

With averaged noise the first term is (h lam_H / 2)^2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from .. import _random
from .._util import (
    PyTree,
    all_finite,
    at_once,
    lazy_cond,
    tree_axpy,
    tree_scale,
    tree_size,
    tree_vdot,
    tree_where,
)
from ..model.jaxprs import compiled
from ..model.potential import Potential
from .loop import loop_over_batches
from .settings import Settings
from .state import Adaptation, Chain, SGState, StepReport, Target, virial

MAX_NUM_STEPS = 500
"""Largest number of steps between two draws under ``num_steps="auto"``, and of those for which a
metric's statistics settle before the position moves."""
TARGET_ACCEPTANCE = 0.574
GRADIENT_COST = 3
"""Cost of a gradient in evaluations of the energy."""

UNSTABLE_DRIFT = 100.0
"""A drift this many times longer (squared, in the metric) than the noise, and twice as long as one
step before, marks an unstable integrator. A stationary chain has about the bias tolerance."""
FARTHEST_DRIFT = 1000.0
"""Above this value drifts may only become shorter, as in a chain that starts far from the target. A
barely unstable step never doubles the drift."""

LEAST_RETRY = 2.0**-10
"""The smallest factor on the step size after steps that were undone."""
KICK = 10.0
"""A drift that is shorter than the noise when a draw starts, and this many times longer in one of
its steps, throws out a chain with a momentum. The draw is then marked, unless the chain
has just started. The step is kept, since the chain can come back."""

Step = Callable[..., tuple[Chain, StepReport]]
"""``(rng_key, potential, batch, chain, step_size, temperature, learning) -> (chain, report)``.

``learning`` says whether the statistics of warm-up may still change."""

Draw = Callable[..., SGState]
"""``(rng_key, target, state, moving, learning) -> state``: the state after the steps of one draw.

``moving`` says whether the position may change. Before the first measurement it does not move."""


def num_steps_from(
    rate: jax.Array,
    step_size: jax.Array,
    potential: Any = None,
    *,
    draw_length: float = 0.5,
) -> jax.Array:
    """Steps per draw, so that a draw spans ``draw_length`` relaxation times.

    ``rate`` is the relaxation rate of the slowest direction, per unit of step size; the potential
    is not used.
    """
    wanted = draw_length / (step_size * rate)
    return jnp.clip(jnp.ceil(wanted), 1, MAX_NUM_STEPS).astype(jnp.int32)


def retried(retry_factor: jax.Array, finite: jax.Array) -> jax.Array:
    """The factor on the step size after a step.

    Each step that is undone halves it, so that a chain in a place that is too narrow for its step
    size gets out. Each step that moves the chain doubles it, up to 1. It is negative directly after
    a step was undone: the next step starts from the same position again, and has not moved yet.
    """
    size = jnp.abs(retry_factor)
    longer = jnp.where(retry_factor < 0, size, jnp.minimum(2 * size, 1))
    return jnp.where(finite, longer, -jnp.maximum(size / 2, LEAST_RETRY))


class Motion(NamedTuple):
    """What a momentum is. In a step the position moves by h A^{1/2} p.

    Attributes:
        draw: ``(rng_key, like, tau) -> p``, a draw of the momentum's law, a pytree like ``like``.
        kick: ``(p, force, h, tau) -> (p, work)``, the momentum after a time h in which the whitened
            gradient is ``force``, and how much kinetic energy it has gained, in nats.
        refresh: ``(p, normal, damping, tau) -> p``, with standard normal numbers. It keeps the
            share exp(-damping) of the momentum, and leaves its law invariant.
    """

    draw: Callable[[jax.Array, PyTree, Any], PyTree]
    kick: Callable[[PyTree, PyTree, Any, Any], tuple[PyTree, jax.Array]]
    refresh: Callable[[PyTree, PyTree, Any, Any], PyTree]


def _gaussian(rng_key: jax.Array, like: PyTree, tau: Any) -> PyTree:
    return tree_scale(tau**0.5, _random.tree_normal(rng_key, like))


def _kicked(p: PyTree, force: PyTree, h: Any, tau: Any) -> tuple[PyTree, jax.Array]:
    new = tree_axpy(-h, force, p)
    return new, -h / 2 * (tree_vdot(force, p) + tree_vdot(force, new))


def _thermalised(p: PyTree, normal: PyTree, damping: Any, tau: Any) -> PyTree:
    kept, gained = jnp.exp(-damping), jnp.sqrt(-tau * jnp.expm1(-2 * damping))
    return jax.tree.map(
        lambda p, n: kept.astype(p.dtype) * p + gained.astype(p.dtype) * n, p, normal
    )


NEWTON = Motion(_gaussian, _kicked, _thermalised)
"""A momentum with the law N(0, tau I)."""


class Algorithm(NamedTuple):
    """A sampler as a value. `langevin_algorithm` makes one of a Langevin step.

    Attributes:
        propose: ``(adaptation, state, potential) -> (step_size, rate, dynamics)``: the step size,
            the relaxation rate per unit of step size, and the dynamics for this step size. If the
            user gave a ``step_size``, the first is the step size of ``state``.
        step: see `Step`; None if ``draw`` is given.
        draw: see `Draw`; None repeats the step.
        init: ``(position, rng_key) -> dynamics``, the algorithm's own state at the start. For the
            position see `numpyro_geom.sampling.state.Chain`.
        at_rest: ``dynamics -> dynamics``, the dynamics after a step that had to be undone.
        check: ``(potential, plan)``, raises if the algorithm cannot use the potential.
        forget: ``dynamics -> dynamics``, without anything that depends on the model's arguments.
        rate: ``(slowest, dynamics)``: relaxation rate of the slowest direction, per unit of step
            size.
        bias: ``(curvature, noise, step_size, dynamics) -> (discretisation, noise, text)``: relative
            errors of variances, and a text with the fields ``{0}`` and ``{1}`` for both errors.
            None if the bias does not come from a step size.
        num_steps: ``(rate, step_size, potential)``: steps of the next draw under
            ``num_steps="auto"``.
        observe: ``(adaptation, state) -> adaptation`` after a draw of warm-up.
        noise_factor: variance of the gradient in the step, relative to the whole batch's gradient.
        second_order: ``(dynamics, potential) -> scalar``, or None: factor of the squared Hessian in
            the curvature that the step sees.
        adjusted: whether a Metropolis test makes it exact at any step size.
        momentum: whether it has a momentum.
        trajectory: whether a draw is one trajectory, with one more gradient than steps, and one
            energy on all rows.
        target_accept: mean acceptance probability that an automatic step size aims at.
        settling_steps: steps for which statistics settle before the position first moves.
        measures: whether a setting besides step size and number of steps follows from curvature.
        motion: the momentum, or the one of which a Langevin step is one step with a new momentum.
        searches: whether a run starts with a search for the typical set. None: it does if the
            step size or an anchor is learned there.
    """

    propose: Callable
    step: Step | None = None
    draw: Draw | None = None
    init: Callable[[PyTree, jax.Array], PyTree] = lambda position, rng_key: ()
    at_rest: Callable[[PyTree], PyTree] = lambda dynamics: dynamics
    check: Callable[[Potential, Any], None] = lambda potential, plan: None
    forget: Callable[[PyTree], PyTree] = lambda dynamics: dynamics
    rate: Callable = lambda slowest, dynamics: slowest
    bias: Callable | None = None
    num_steps: Callable = num_steps_from
    observe: Callable = lambda adaptation, state: adaptation
    noise_factor: float = 1.0
    second_order: Callable | None = None
    adjusted: bool = False
    momentum: bool = False
    trajectory: bool = False
    target_accept: float = TARGET_ACCEPTANCE
    settling_steps: int = 1
    measures: bool = False
    motion: Motion = NEWTON
    searches: bool | None = None


def adapts(settings: Settings, algorithm: Algorithm) -> bool:
    """Whether any setting follows from measurements of curvature and noise."""
    return settings.schedule is None or settings.given_num_steps is None or algorithm.measures


# A Langevin algorithm


def langevin_algorithm(
    settings: Settings, step: Step, *, adjusted: bool = False, averaged: bool = False, **others: Any
) -> Algorithm:
    """The algorithm of a Langevin step.

    Args:
        settings: the kernel's settings.
        step: the pure step.
        adjusted: whether the step has a Metropolis test.
        averaged: whether a step's noise is the mean of its own and the previous step's xi. The
            error of discretisation is then of second order.
        others: further fields of `Algorithm`.
    """
    tau = rule_temperature(settings.temperature)

    def propose(adaptation: Adaptation, state: SGState, _: Potential) -> tuple:
        h = state.step_size
        if settings.schedule is None:
            t = settings.bias_tolerance
            bend, part = adaptation.curvature / 2, adaptation.noise / (2 * tau)
            if adjusted:
                h = adaptation.step_size_factor / bend
            elif averaged:  # h bend squared plus h part is t
                h = 2 * t / (part + jnp.hypot(part, 2 * t**0.5 * bend))
            else:
                h = t / (bend + part)
        return h, adaptation.slowest, state.dynamics

    def bias(curvature: Any, noise: Any, step_size: Any, dynamics: PyTree) -> tuple[Any, Any, str]:
        bend, part = step_size * curvature / 2, step_size * noise / (2 * tau)
        text = "{0} from discretisation, {1} from minibatch noise"
        return bend**2 if averaged else bend, part, text

    fields = {"propose": propose, "bias": bias, **others}
    if adjusted:
        fields["observe"] = follow_acceptance
    return Algorithm(step=step, adjusted=adjusted, **fields)


def rule_temperature(temperature: float) -> float:
    """Tau of the rules. At 0 there is no variance to bias, and noise counts as at tau = 1."""
    return temperature if temperature > 0 else 1.0


def follow_acceptance(adaptation: Adaptation, state: Any) -> Adaptation:
    """Move the step towards the target acceptance rate, and halve it if steps failed."""
    factor = jnp.where(state.diverging, 0.5, 1.0)
    gain = 5.0 / (10.0 + state.i.astype(factor.dtype)) ** 0.75
    factor = factor * jnp.exp(gain * (state.accept_prob - TARGET_ACCEPTANCE))
    return adaptation._replace(
        step_size_factor=adaptation.step_size_factor
        * factor.astype(adaptation.step_size_factor.dtype)
    )


# Statistics of a metric and of noise


def metric_learner(metric: Any, *, frozen: bool = True) -> Callable:
    """``(state, grad, num_data, learning) -> state`` after a gradient over all data.

    If ``frozen``, statistics change only while ``learning``; after it they cost nothing.
    """

    def update(state: PyTree, grad: PyTree, num_data: int) -> PyTree:
        return metric.update(state, tree_scale(1 / num_data, grad))

    def learn(state: PyTree, grad: PyTree, num_data: int, learning: jax.Array) -> PyTree:
        if not frozen:
            return update(state, grad, num_data)
        return lazy_cond(learning, lambda s, g: update(s, g, num_data), state, grad)

    return learn


def settling_steps(metric: Any) -> int:
    """Steps of draw 0: enough for the metric's statistics.

    It is twice the memory of the statistics plus one recomputation of A, within bounds.
    """
    memory = int(2.0 / (1.0 - metric.decay)) if metric.decay > 0 else 1
    interval = 1 if metric.interval is None else metric.interval
    return min(MAX_NUM_STEPS, max(memory, interval + 1))


def check_random(settings: Settings, algorithm: Algorithm) -> None:
    """Raise if a model that asks for keys would not get a new key at every step."""
    what = None
    if algorithm.adjusted:
        what, other = "a Metropolis test", "SGRLD, SGHMC or SGNHT without one"
    elif settings.control_variate in (1, 2):
        what, other = "control_variate=True", "control_variate=False"
    if what is not None:
        raise ValueError(
            f"the model asks for a random key (numpyro.prng_key, as dropout does), and {what} "
            f"needs the energy of all rows without it: use {other}, or leave the randomness out"
        )


# The draw


def rows_of_energies(potential: Potential) -> Any:
    """The rows of which every draw has its energy: those of other draws would be a noise."""
    with at_once():
        return compiled(partial(_some_rows, potential), np.uint32(0))


def _some_rows(potential: Potential, seed: Any) -> Any:
    stream = potential.init_stream(random.key(seed + 1))
    return potential.draw(random.key(seed), stream)[0]


def draw_of(algorithm: Algorithm, settings: Settings) -> Draw:
    """The algorithm's own draw, or several of its steps, of which invalid ones are undone."""
    if algorithm.draw is not None:
        return algorithm.draw
    step: Any = algorithm.step
    schedule, given_num_steps = settings.schedule, settings.given_num_steps
    noise = getattr(settings.step_size, "noise", None)
    adapting = adapts(settings, algorithm)
    watches_drift = settings.temperature > 0 and not algorithm.adjusted
    rescues = adapting and watches_drift and schedule is None

    def draw(
        rng_key: jax.Array,
        target: Target,
        state: SGState,
        moving: jax.Array | bool,
        learning: jax.Array,
    ) -> SGState:
        potential = target.potential
        key_steps, _ = _random.split(rng_key)
        same_rows = rows_of_energies(potential)
        dtype = state.potential_energy.dtype
        start = state.chain
        size = tree_size(start.position)

        def body(k: jax.Array, key_step: jax.Array, batch: Any, carry: tuple) -> tuple:
            chain, trusted, control, t, old, old_ratio, retry_factor, failed, sums = carry
            seen = target.seen(control)
            h, tau = state.step_size, jnp.asarray(settings.temperature, dtype)
            if schedule is not None:
                h = jnp.asarray(schedule(t), dtype)
            if noise is not None:
                tau = tau * jnp.asarray(noise(t), dtype)
            if adapting:
                h = jnp.where(moving, h, 0.0)
            if rescues:
                h = h * jnp.abs(retry_factor)
            # after a draw or step that was undone, U is read at each step, and else where draws end
            watched = state.diverging | (failed > 0)
            energy = lazy_cond(
                watched,
                lambda _, *at: seen.energy(*at).astype(dtype),
                jnp.zeros((), dtype),
                chain.position,
                batch,
            )
            new, report = step(key_step, seen, batch, chain, h, tau, learning)
            figures = tree_vdot(report.grad, report.grad).astype(dtype), h
            temperature = virial(chain.position, state.centre, report.grad) / size
            of_step = jnp.stack([report.accept_prob, report.kinetic_temperature, temperature])
            finite = jnp.isfinite(figures[0] + energy) & all_finite(new.position)
            kicked = False
            if watches_drift:
                ratio = (jnp.asarray(report.squared_drift) / (settings.temperature * size)).astype(
                    dtype
                )
                kicked = calm & (ratio > KICK)
                finite &= (ratio < UNSTABLE_DRIFT) | (ratio < 2 * old_ratio)
                least = jnp.where(ratio < FARTHEST_DRIFT, ratio, jnp.minimum(ratio, old_ratio))
                old_ratio = jnp.where(finite, least, old_ratio)
            # energy and gradient are those at the start of the step. If they are not finite, the
            # previous step failed, and the chain returns to the last position where both were known
            back = chain._replace(position=trusted, dynamics=algorithm.at_rest(chain.dynamics))
            kept = settings.metric.keep_if(finite, new.metric_state, chain.metric_state)
            new, back = new._replace(metric_state=kept), back._replace(metric_state=kept)
            trusted = tree_where(finite & (watched | (k == 0)), chain.position, trusted)
            chain, figures = tree_where(finite, (new, figures), (back, old))
            sums = sums + jnp.where(finite, of_step.astype(dtype), 0.0)
            failed = failed + (~finite | kicked).astype(failed.dtype)
            if rescues:
                retry_factor = retried(retry_factor, finite)
            carry = figures, old_ratio, retry_factor, failed, sums
            return chain, trusted, control, t + 1, *carry

        num_steps = state.num_steps if given_num_steps is None else given_num_steps
        # the first moving step may be long, because a chain can start far from the target
        first = (state.i == 1) & adapting
        ratio_before = jnp.where(first, jnp.inf, state.drift_ratio).astype(dtype)
        arrived = state.i > state.adaptation.num_warmup // 16
        calm = algorithm.momentum & arrived & (ratio_before < 1)
        carry = (
            start,
            state.trusted,
            state.control,
            state.steps_taken,
            (jnp.zeros((), dtype), state.step_size),
            ratio_before,
            state.retry_factor,
            jnp.zeros((), jnp.int32),
            jnp.zeros(3, dtype),
        )
        stream, carry = loop_over_batches(
            potential,
            target.to_sites(start.position),
            key_steps,
            state.stream,
            num_steps,
            body,
            carry,
        )
        chain, trusted, control, taken, figures, drift_ratio, *rest = carry
        retry_factor, failed, sums = rest
        energy = target.seen(control).energy(chain.position, same_rows).astype(dtype)
        finite = jnp.isfinite(energy)  # no step has evaluated this draw yet
        if target.transforms is not None:
            finite &= target.is_usable(target.to_sites(chain.position))
            # values can overflow during the whole draw, but they did not at its start
            usable = target.is_usable(target.to_sites(trusted))
            trusted = tree_where(usable, trusted, start.position)
        position = tree_where(finite, chain.position, trusted)
        dynamics = tree_where(finite, chain.dynamics, algorithm.at_rest(chain.dynamics))
        energy = jnp.where(finite, energy, state.potential_energy)
        failed = failed + (~finite).astype(failed.dtype)
        if rescues:
            retry_factor = jnp.where(finite, retry_factor, retried(retry_factor, finite))
        squared_norm, step_size = figures
        means = sums / jnp.asarray(num_steps, dtype)
        return state._replace(
            z=target.to_sites(position),
            potential_energy=energy,
            grad_norm=jnp.sqrt(squared_norm),
            configurational_temperature=means[2],
            kinetic_temperature=means[1] if algorithm.momentum else state.kinetic_temperature,
            step_size=state.step_size if schedule is None else step_size,
            diverging=failed > 0,
            num_diverging=failed,
            accept_prob=means[0] if algorithm.adjusted else state.accept_prob,
            metric_state=chain.metric_state,
            dynamics=dynamics,
            scaled=position if jax.tree.leaves(state.scaled) else (),
            trusted=trusted,
            drift_ratio=drift_ratio,
            retry_factor=retry_factor,
            stream=stream,
            control=control,
            steps_taken=taken,
        )

    return draw
