"""The draw of `GGMC`: a trajectory with minibatch gradients and its acceptance test."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer.hmc_util import dual_averaging

from .._util import lazy_cond, tree_axpy, tree_normal, tree_vdot, tree_where
from ..kernel import PyTree
from ..model.potential import Potential
from ..model.target import Target
from ..sampling.algorithm import Draw, metric_learner
from ..sampling.loop import loop_over_batches
from ..sampling.settings import Settings
from ..sampling.state import SGState, site_sizes, virials
from ..sampling.step_size import Adaptation, num_steps_from
from ..warmup.timetable import what_is_due
from .momentum import (
    Momentum,
    friction_scale,
    given_friction,
    init_momentum,
    kinetic_temperature,
    relaxation_rate,
)
from .momentum import num_steps as momentum_num_steps

GRADIENT_COST = 3
"""Cost of a gradient in evaluations of the energy. Under ``num_steps="auto"`` the minibatch
gradients of a trajectory cost about as much as its one energy on all rows."""
MINIBATCH_DRAW_LENGTH = 3.0
"""Relaxation times per trajectory, if the energy on all rows costs more than the gradients."""
HOPELESS = 1000.0
"""An energy error (over tau) beyond which a trajectory counts as divergent."""

_averaging_init, _averaging_update = dual_averaging()


class GGMCState(NamedTuple):
    """State of the acceptance test and its step size between draws.

    Attributes:
        energy: energy on all rows at the position that was kept, in nats.
        known: whether ``energy`` is valid: False at the start and after `refresh`.
        scale: step size that curvature suggests, from which dual averaging starts.
        averaging: state of the dual averaging of log(step_size / scale).
    """

    energy: jax.Array
    known: jax.Array
    scale: jax.Array
    averaging: PyTree


def init(settings: Settings, position: PyTree, rng_key: jax.Array) -> Momentum:
    """A momentum drawn from its law, and an energy that is not yet known."""
    dtype = jnp.result_type(*jax.tree.leaves(position))
    zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
    averaging = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.int32 if jnp.result_type(x).kind == "i" else dtype),
        _averaging_init(zero),
    )
    extra = GGMCState(zero, jnp.zeros((), bool), one, averaging)
    return init_momentum(position, rng_key, settings.temperature, given_friction(settings), extra)


def forget(dynamics: Momentum) -> Momentum:
    """The dynamics without the energy of the old model arguments."""
    extra: GGMCState = dynamics.extra
    return dynamics._replace(extra=extra._replace(known=jnp.zeros_like(extra.known)))


def propose(
    settings: Settings, adaptation: Adaptation, state: SGState, _: Potential
) -> tuple[jax.Array, jax.Array, PyTree]:
    """Step size from dual averaging, relative to a scale that late measurements do not change."""
    old: Momentum = state.dynamics
    extra: GGMCState = old.extra
    due = what_is_due(state.i, adaptation.num_warmup, True)
    tiny = jnp.finfo(extra.scale.dtype).tiny
    scale = jnp.maximum(adaptation.curvature, tiny) ** -0.5
    scale = jnp.where(due.renewing, scale, extra.scale)
    latest, average = extra.averaging[0], extra.averaging[1]
    h = state.step_size
    if settings.schedule is None:
        h = scale * jnp.exp(jnp.where(due.closing, average, latest))
    given = given_friction(settings) is not None
    friction = old.friction if given else jnp.sqrt(adaptation.slowest)
    rate = relaxation_rate(adaptation.slowest, friction)
    extra = extra._replace(scale=scale.astype(extra.scale.dtype))
    return h, rate, old._replace(friction=friction.astype(old.friction.dtype), extra=extra)


def num_steps(rate: jax.Array, step_size: jax.Array, potential: Potential) -> jax.Array:
    """One relaxation time; with minibatches several, which cost no more than the energy."""
    if potential.steps_per_epoch == 1:
        return momentum_num_steps(rate, step_size)
    steps = num_steps_from(rate, step_size, draw_length=MINIBATCH_DRAW_LENGTH)
    return jnp.minimum(steps, -(-potential.steps_per_epoch // GRADIENT_COST))


def trajectory(settings: Settings) -> Draw:
    """A draw: one trajectory and its acceptance test."""
    metric = settings.metric
    learn = metric_learner(metric)

    def draw(
        rng_key: jax.Array,
        target: Target,
        state: SGState,
        moving: jax.Array | bool,
        learning: jax.Array,
    ) -> SGState:
        key_steps, key_accept = random.split(rng_key)
        potential, given = target.potential, settings.given_num_steps
        metric_state = state.metric_state
        start, dynamics = state.chain.position, state.dynamics
        extra: GGMCState = dynamics.extra
        dtype, tau = state.potential_energy.dtype, settings.temperature
        noisy = target.seen(state.control)
        exact = target.expanded(potential)
        h = state.step_size
        if settings.schedule is not None:
            h = jnp.asarray(settings.schedule(state.steps_taken), dtype)
        stride = jnp.where(moving, h, 0.0)
        last = jnp.asarray(state.num_steps if given is None else given)
        scale = friction_scale(target.expansion, start)
        sites = site_sizes(start, state.z)

        def energy_on_all_rows(_: jax.Array, position: PyTree) -> jax.Array:
            energy = exact.on_all_rows(lambda rows: exact.energy(position, rows))  # type: ignore
            return energy.astype(dtype)

        def half_squared(p: PyTree) -> jax.Array:
            return (tree_vdot(p, p) / 2).astype(dtype)

        def gradient(k: jax.Array, key_noise: jax.Array, batch: Any, carry: tuple) -> tuple:
            """Apply gradient k of L + 1, which ends one step and begins the next step."""
            position, momentum, learned, work, first = carry
            grad = jax.grad(noisy.energy)(position, batch)
            learned = learn(learned, grad, potential.num_data, learning)
            virial = virials(position, state.centre, grad, sites)
            facts = jnp.concatenate([tree_vdot(grad, grad)[None], virial]).astype(dtype)
            first = jnp.where(k == 0, facts, first)
            force = metric.apply_inverse_sqrt(metric_state, grad)
            ends, begins = k > 0, k < last
            momentum = tree_axpy(jnp.where(ends, -stride / 2, 0.0), force, momentum)
            work = work + jnp.where(ends, half_squared(momentum), 0.0)
            # one O for the O at the end of a step and the O at the beginning of the next step
            duration = dynamics.friction * stride * jnp.where(ends & begins, 1.0, 0.5)
            momentum = jax.tree.map(
                lambda p, n, s: (
                    jnp.exp(-s * duration).astype(p.dtype) * p
                    + jnp.sqrt(-jnp.expm1(-2 * s * duration) * tau).astype(p.dtype) * n
                ),
                momentum,
                tree_normal(key_noise, momentum),
                scale,
            )
            work = work - jnp.where(begins, half_squared(momentum), 0.0)
            momentum = tree_axpy(jnp.where(begins, -stride / 2, 0.0), force, momentum)
            velocity = metric.apply_inverse_sqrt(metric_state, momentum)
            position = tree_axpy(jnp.where(begins, stride, 0.0), velocity, position)
            return position, momentum, learned, work, first

        zero = jnp.zeros((), dtype)
        carry = (
            start,
            dynamics.momentum,
            metric_state,
            zero,
            jnp.zeros(1 + max(len(sites), 1), dtype),
        )
        stream, carry = loop_over_batches(
            potential, target.merge(start), key_steps, state.stream, last + 1, gradient, carry
        )
        position, momentum, learned, work, first = carry
        old_energy = lazy_cond(~extra.known, energy_on_all_rows, extra.energy, start)
        new_energy = energy_on_all_rows(zero, position)
        error = (new_energy - old_energy + work) / tau
        if target.transforms is not None:
            error = jnp.where(target.is_usable(target.merge(position)), error, jnp.inf)
        error = jnp.where(jnp.isnan(error), jnp.inf, error)
        accept_prob = jnp.exp(-jnp.maximum(error, 0.0))
        accepted = random.uniform(key_accept, (), dtype) < accept_prob
        kept, momentum, energy = tree_where(
            accepted,
            (position, momentum, new_energy),
            (start, jax.tree.map(jnp.negative, dynamics.momentum), old_energy),
        )
        # a gradient that is not finite must not reach the metric
        finite = jnp.isfinite(error)
        adapting = moving & (state.i < state.adaptation.num_warmup)
        averaging = _averaging_update(settings.target_accept - accept_prob, extra.averaging)
        averaging = jax.tree.map(lambda x, y: x.astype(y.dtype), averaging, extra.averaging)
        extra = extra._replace(
            energy=energy,
            known=jnp.ones_like(extra.known),
            averaging=tree_where(adapting, averaging, extra.averaging),
        )
        diverging = ~(error < HOPELESS)
        state = state.with_temperatures(first[1:])
        return state._replace(
            z=target.merge(kept),
            potential_energy=energy,
            grad_norm=jnp.sqrt(first[0]),
            kinetic_temperature=kinetic_temperature(momentum).astype(dtype),
            step_size=h,
            diverging=diverging,
            num_diverging=diverging.astype(jnp.int32),
            accept_prob=accept_prob,
            metric_state=tree_where(finite, learned, metric_state),
            dynamics=Momentum(momentum, dynamics.friction, extra),
            expanded=() if target.moves_sites else kept,
            trusted=kept,
            stream=stream,
            steps_taken=state.steps_taken + last.astype(jnp.int32),
        )

    return draw
