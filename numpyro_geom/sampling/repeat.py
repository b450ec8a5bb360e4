"""The loop of an algorithm's steps that makes a draw, with its guard and the draw's means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from .._util import MANY_LEAVES, all_finite, lazy_cond, settled, tree_vdot, tree_where
from ..model.control_variate import replace_anchor
from ..model.programs import compiled
from ..model.target import Target
from .algorithm import Draw, Facts, Step, adapts
from .loop import loop_over_batches
from .settings import Settings
from .state import SGState, site_sizes, virials

PyTree = Any

UNSTABLE_DRIFT = 100.0
"""A drift this many times longer (squared, in the metric) than the noise, and twice as long as one
step before, marks an unstable integrator. A stationary chain has about the bias tolerance."""
FARTHEST_DRIFT = 1000.0
"""Above this value drifts may only become shorter, as in a chain that starts far from the target. A
barely unstable step never doubles the drift."""

CALM, KICK = 1.0, 10.0
"""A drift that is shorter than the noise when a draw starts, and this many times longer in one of
its steps, throws out a chain with a momentum. The draw is then marked, unless the chain
has just started. The step is kept, since the chain can come back."""


def repeat(
    step: Step,
    settings: Settings,
    facts: Facts,
    *,
    at_rest: Callable[[PyTree], PyTree] = lambda dynamics: dynamics,
) -> Draw:
    """A draw of several steps, which undoes invalid steps.

    Args:
        step: the pure step.
        settings: gives step size, number of steps, temperature and anchor interval.
        facts: facts of the algorithm.
        at_rest: ``dynamics -> dynamics``, the dynamics after a step that had to be undone.
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
        sites = site_sizes(start.position, state.z)
        many = len(jax.tree.leaves(state.z)) >= MANY_LEAVES

        def body(k: jax.Array, key_step: jax.Array, batch: Any, carry: tuple) -> tuple:
            chain, trusted, control, t, old, old_ratio, opening, failed, sums = carry
            if settings.anchor_interval is not None:
                control = lazy_cond(
                    t % settings.anchor_interval == 0,
                    lambda c, z: replace_anchor(potential, c, z),
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
            virial = virials(chain.position, state.centre, report.grad, sites).astype(dtype)
            finite = jnp.isfinite(facts[0]) & jnp.isfinite(facts[1]) & all_finite(new.position)
            kicked = False
            if watches_drift:
                ratio = (report.squared_drift / (settings.temperature * size)).astype(dtype)
                opening = jnp.where(k == 0, ratio, opening)
                kicked = calm & (ratio > KICK)
                finite &= (ratio < UNSTABLE_DRIFT) | (ratio < 2 * old_ratio)
                least = jnp.where(ratio < FARTHEST_DRIFT, ratio, jnp.minimum(ratio, old_ratio))
                old_ratio = jnp.where(finite, least, old_ratio)
            if many:
                finite = settled(finite)
            # energy and gradient are those at the start of the step. If they are not finite, the
            # previous step failed, and the chain returns to the last position where they were
            back = chain._replace(position=trusted, dynamics=at_rest(chain.dynamics))
            kept = settings.metric.keep_if(finite, new.metric_state, chain.metric_state)
            new, back = new._replace(metric_state=kept), back._replace(metric_state=kept)
            trusted = tree_where(finite, chain.position, trusted)
            chain, facts = tree_where(finite, (new, facts), (back, old))
            others = jnp.stack([report.accept_prob, report.kinetic_temperature]).astype(dtype)
            sums = sums + jnp.where(finite, jnp.concatenate([others, virial]), 0.0)
            failed = failed + (~finite | kicked)
            return chain, trusted, control, t + 1, facts, old_ratio, opening, failed, sums

        num_steps = state.num_steps if given_num_steps is None else given_num_steps
        # the first moving step may be long, because a chain can start far from the target
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
            jnp.zeros((), dtype),
            jnp.zeros((), jnp.int32),
            jnp.zeros(2 + max(len(sites), 1), dtype),
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
        chain, trusted, control, taken, facts_, drift_ratio, opening, failed, sums = carry
        merged = target.merge(chain.position)  # a draw that no step has evaluated yet
        finite = jnp.isfinite(potential.energy(merged, some_batch))
        if target.transforms is not None:
            finite &= target.is_usable(merged)
            # values can overflow during the whole draw, but they did not at its start
            usable = target.is_usable(target.merge(trusted))
            trusted = tree_where(usable, trusted, start.position)
        finite = settled(finite)
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
            squared_drift=opening * size,
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
