"""A chain as pure functions: its start and its next draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.flatten_util import ravel_pytree as ravel
from numpyro.infer import MCMC
from numpyro.util import is_prng_key

from . import _random
from ._checks import check_energy
from ._util import PyTree, all_finite, is_traced, tree_size, tree_vdot, tree_where, words
from .bound import Bound
from .model.arrowhead import ArrowRoot, Layout
from .model.centring import (
    Path,
    Positive,
    Series,
    Shares,
    Sum,
    alike,
    coordinates,
    find_paths,
    find_shares,
    onto_paths,
    unmeasured,
)
from .model.control_variate import init_control, replace_anchor
from .model.jaxprs import compiled
from .sampling.algorithm import Algorithm, adapts, check_random, draw_of, rows_of_energies
from .sampling.settings import Settings
from .sampling.state import SGState, Target, init_adaptation
from .warmup.adapt import after_draw, before_draw, heed_draws, what_is_due
from .warmup.scale import renew_scale, rescaled
from .warmup.start import Choice, choose, find_typical_set


def start_chains(
    bound: Bound,
    algorithm: Algorithm,
    rng_key: jax.Array,
    num_warmup: int,
    position: PyTree,
    *,
    unknown: bool,
    near: bool = False,
) -> SGState:
    """The state of one chain before its first draw, or of several chains.

    There are as many chains as keys; their positions are in one pytree. ``unknown`` tells that
    NumPyro and not the user chose the position, so that a search may improve it. With ``near`` an
    earlier search has been there.

    Raises:
        ValueError: if the algorithm cannot use the potential.
    """
    target = bound.target()
    target.check()
    if bound.plan is not None and bound.plan.is_random:
        check_random(bound.settings, algorithm)
    algorithm.check(target.potential, bound.plan)
    settings, searches = bound.settings, algorithm.searches
    if searches is None:
        searches = settings.schedule is None or settings.control_variate
    moving = searches and unknown and num_warmup > 0

    def start(rng_key: jax.Array, position: PyTree, near: jax.Array) -> SGState:
        of_chain = replace(target, near=near)
        return init_chain(of_chain, algorithm, settings, rng_key, num_warmup, position, moving)

    lanes = start if is_prng_key(rng_key) else jax.vmap(start, (0, 0, None))
    return compiled(lanes, rng_key, position, np.asarray(near))


def shares_at(bound: Bound, state: SGState) -> Shares:
    """The sites that should not be centred, by the scale of the first chain at its start.

    Shares that differ little from those in use stay as they are.
    """
    if is_traced(state):
        return {}
    used: Any = bound.shares
    parts: Any = state.z, state.scale
    if not is_prng_key(state.rng_key):
        parts = jax.tree.map(lambda x: x[0], parts)
    z, scale = parts
    unravel, model = ravel(z)[1], bound.model.replace(shares={})  # type: ignore[union-attr]
    position = unravel(scale.centre)
    if (series := _series(bound)) is not None:
        there = unravel(scale.centre + compiled(_of_series, scale.root))
        if used:  # from these coordinates to those in which all shares are 1
            ones: Any = model.replace(shares=unmeasured(model, position, series))
            position, there = (in_shares(ones, _as_written(bound, x)) for x in (position, there))
        found = find_paths(model, series, position, jax.tree.map(jnp.subtract, there, position))
        now = used
    else:
        position = _as_written(bound, position)
        now = used or unmeasured(model, position)
        found = find_shares(model, position, scale.variances_given_others, now)
    return used if not found or alike(found, now) else found


def centre_in(bound: Bound, new: Bound, state: SGState, position: PyTree) -> PyTree:
    """Where a search in new coordinates starts: at the centre of the scale in the present ones.

    If that is not finite, at ``position``.
    """

    def moved(centre: jax.Array, z: PyTree, position: PyTree) -> PyTree:
        model: Any = new.model
        plain = _as_written(bound, ravel(z)[1](centre))
        found = in_shares(model, plain)
        return tree_where(all_finite(found), found, position)

    single = is_prng_key(state.rng_key)
    return compiled(moved if single else jax.vmap(moved), state.scale.centre, state.z, position)


def in_shares(model: Any, position: PyTree) -> PyTree:
    """The position in the coordinates of a model with shares, from those in which it is written."""
    record = model.replace(shares={}).trace(position, unconstrained=True)
    return position | coordinates(record, model.shares) | onto_paths(model, position)


def _as_written(bound: Bound, position: PyTree) -> PyTree:
    """The position in the coordinates in which the model is written."""
    model: Any = bound.model
    if not bound.shares:
        return position
    values, logs = model.constrain(position), bound.shares.items()
    plain = {n: jnp.log(values[n]) if isinstance(x, Positive) else values[n] for n, x in logs}
    return position | plain


def first_shares(bound: Bound, position: PyTree, *, batched: bool) -> Shares:
    """Shares of 1 for the sites whose shares are to be measured.

    There are none with a scale that the user gives, and within a transformation.
    """
    if bound.model is None or bound.point is not None or not bound.settings.finds_scale:
        return {}
    if is_traced((position, bound.model.args, bound.model.kwargs)):
        return {}
    position = jax.tree.map(lambda x: x[0], position) if batched else position
    return unmeasured(bound.model, position, _series(bound))


def _series(bound: Bound) -> Series | None:
    """The sites of a series; None if the model is no series."""
    layout = bound.settings.layout
    if layout is None or not layout.is_series:
        return None
    return dict.fromkeys(layout.local_names, Sum if layout.is_summed else Path)


def _of_series(root: ArrowRoot) -> jax.Array:
    """A draw of the times of a normal law about 0, given the shared parameters."""
    layout = root.layout
    draw = random.normal(random.key(0), (layout.num_groups, layout.num_local), root.blocks.dtype)
    return root.times(layout.join(jnp.zeros(layout.num_shared, draw.dtype), draw))


def decide(
    bound: Bound, algorithm: Algorithm, state: SGState, choice: Choice | None
) -> tuple[Bound, SGState]:
    """Choose open arguments by measurements at the start of the first chain.

    ``bound`` has the values that serve for measuring. An earlier ``choice`` is kept.

    Returns:
        The bound model and the state, without parts that are no longer needed. Within a
        transformation no choice is possible, and the values that serve for measuring stay.
    """
    plan: Any = bound.plan
    if choice is None:
        if is_traced(state):
            return bound, state
        one = state if is_prng_key(state.rng_key) else jax.tree.map(lambda x: x[0], state)
        choice = choose(
            bound.target(),
            algorithm,
            bound.settings,
            one,
            num_rows=max(plan.sizes[plate] for plate in plan.batch_sizes),
            batch_size=max(plan.batch_sizes.values()),
            open_rows="batch_size" in bound.undecided,
            open_control="control_variate" in bound.undecided,
        )
    bound = bound.decided(choice)
    plan = bound.plan
    if isinstance(state.stream, dict):
        state = state._replace(stream={plate: state.stream[plate] for plate in plan.batch_sizes})
    control = state.control.of_order(choice.order) if choice.order else ()
    return bound, state._replace(control=control)


def init_chain(
    target: Target,
    algorithm: Algorithm,
    settings: Settings,
    rng_key: jax.Array,
    num_warmup: int,
    position: PyTree,
    moving: bool,
) -> SGState:
    """The state of a chain before its first draw.

    A search for the typical set finds where the scale and the anchor are. With ``moving`` the chain
    also starts there, and not at ``position``.

    Raises:
        ValueError: if the energy is not a scalar, or the algorithm cannot use the potential.
    """
    potential = target.potential
    key_state, key_stream, _, key_dynamics = random.split(rng_key, 4)
    position = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), position)
    dtype = jnp.result_type(*jax.tree.leaves(position))
    stream = potential.init_stream(key_stream)
    rows = rows_of_energies(potential)

    def energy_at(position: PyTree) -> jax.Array:
        energy = potential.energy(position, rows)
        check_energy("the potential", energy)
        return energy

    jax.eval_shape(energy_at, position)
    energy: Any = None
    if potential.full_energy is not None:
        energy = potential.full_energy(position)
        check_energy("full_potential_fn", energy)
    zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
    control: Any = ()
    if target.controlled:
        layout = None
        if settings.control_variate == 2:
            layout = settings.layout or Layout.without_groups(tree_size(position))
        control = init_control(position, zero, layout)
    searching = moving or (num_warmup > 0 and (settings.finds_scale or target.controlled))
    often = moving and settings.starts_anywhere
    key_search = random.split(key_state, 4)[3]
    found, energy_there, control, scale = find_typical_set(
        target, settings, position, control, key_search, searching, often
    )
    if moving:
        position = found
    if potential.full_energy is None:
        known = moving and energy_there is not None
        energy = energy_there if known else energy_at(position)
    start: PyTree = ravel(position)[0] if settings.moves_vector else position
    count = jnp.zeros((), jnp.int32)
    schedule, num_steps = settings.schedule, settings.given_num_steps
    num_steps = algorithm.settling_steps if num_steps is None else num_steps
    state = SGState(
        i=count,
        z=position,
        potential_energy=jnp.asarray(energy, dtype),
        grad_norm=zero,
        configurational_temperature=zero,
        kinetic_temperature=zero,
        step_size=one if schedule is None else jnp.asarray(schedule(count), dtype),
        num_steps=jnp.asarray(num_steps, jnp.int32),
        diverging=jnp.zeros((), bool),
        num_diverging=count,
        accept_prob=one,
        metric_state=settings.metric.init(start),
        dynamics=algorithm.init(start, key_dynamics),
        scaled=start if settings.moves_vector else (),
        scale=(),
        centre=start,
        trusted=start,
        drift_ratio=jnp.asarray(jnp.inf, dtype),
        retry_factor=one,
        stream=stream,
        control=control,
        steps_taken=count,
        adaptation=init_adaptation(num_warmup, dtype),
        built_on={},
        seed=words(rng_key),
        rng_key=key_state,
    )
    return rescaled(state, scale, settings, potential.num_data) if settings.scales else state


def taken_over(bound: Bound, earlier: MCMC, position: PyTree, *, single: bool) -> Bound | None:
    """With the choices of an ``earlier`` run; None if its chains do not fit this model.

    ``position`` is that of a ``single`` chain, or of several.
    """
    old, state = earlier.sampler.bound, earlier.last_state
    shapes = [
        jax.tree.map(lambda x, k=k: np.shape(x)[k:], z)
        for z, k in ((state.z, np.ndim(state.i)), (position, 0 if single else 1))
    ]
    alike = shapes[0] == shapes[1] and bound.settings.layout == old.settings.layout
    if not alike or (old.choice is None) != (not bound.undecided) or bound.point is not None:
        return None
    bound = bound if old.choice is None else bound.decided(old.choice)
    return bound.with_shares(old.shares)


def handed_on(
    bound: Bound,
    algorithm: Algorithm,
    rng_key: jax.Array,
    num_warmup: int,
    position: PyTree,
    earlier: SGState,
) -> SGState:
    """The state of one chain or of several at new positions, with what earlier chains have learned.

    Each chain takes over the scale, the anchor, the step size and the number of steps of one of the
    ``earlier`` chains; several have a leading axis. What depends on the model's arguments is
    computed for the new ones.
    """
    potential, single = bound.potential(), np.ndim(earlier.i) == 0

    def hand(rng_key: jax.Array, position: PyTree) -> SGState:
        key_state, key_stream, key_chain = _random.split(rng_key, 3)
        count = jnp.zeros((), jnp.int32)
        number = () if single else random.randint(key_chain, (), 0, earlier.i.shape[0])
        state: Any = jax.tree.map(lambda x: x[number], earlier)
        adaptation = state.adaptation._replace(num_warmup=jnp.asarray(num_warmup, jnp.int32))
        state = state._replace(
            i=count,
            z=position,
            retry_factor=jnp.ones_like(state.retry_factor),
            stream=potential.init_stream(key_stream),
            steps_taken=count,
            adaptation=adaptation,
            seed=words(rng_key),
            rng_key=key_state,
        )
        return for_new_arguments(bound, algorithm, state)

    return compiled(hand if is_prng_key(rng_key) else jax.vmap(hand), rng_key, position)


def next_draw(bound: Bound, algorithm: Algorithm, state: SGState) -> SGState:
    """The state after the next draw."""
    target, settings = bound.target(), bound.settings
    rng_key, key_steps, key_measure, _ = _random.split(state.rng_key, 4)
    due = what_is_due(state.i, state.adaptation.num_warmup, adapts(settings, algorithm))
    if settings.settled:
        due = due._replace(moving=~due.warming, learning=due.warming)
    elif settings.scales:
        state = heed_draws(state, due, settings, algorithm)
        state = renew_scale(state, due, settings, target.potential.num_data)
    target = target.scaled(state)
    if not settings.settled:
        state = before_draw(state, due, target, algorithm, settings, key_measure)
    draw = draw_of(algorithm, settings)
    before = state.potential_energy
    state = draw(key_steps, target, state, due.moving, due.learning)
    # a chain that adapts has not moved in draw 0, and its search may have ended far from `before`
    energy = state.potential_energy if adapts(settings, algorithm) else before
    energy = jnp.where(due.first, energy, state.adaptation.start_energy)
    state = state._replace(adaptation=state.adaptation._replace(start_energy=energy))
    if not settings.settled:
        state = after_draw(state, due, target, algorithm, settings)
    return state._replace(i=state.i + 1, rng_key=rng_key)


def for_new_arguments(bound: Bound, algorithm: Algorithm, state: SGState) -> SGState:
    """The state for other arguments or at another position; U is that at an anchor, if any."""
    target = bound.target().scaled(state)
    potential = target.potential
    if target.controlled:  # the values at the anchor belong to the old arguments
        anchor = ravel(state.z)[1](state.control.anchor.position)
        control = replace_anchor(potential, state.control, anchor, state.root)
        state = state._replace(control=control)
        _, energy, grad, _ = control.anchor
    else:
        energy, grad = jax.value_and_grad(potential.energy)(state.z, rows_of_energies(potential))
    if jax.tree.leaves(state.scaled):
        flat = ravel(state.z)[0]
        new = state.scale.from_sites(flat, state.scaled) if state.scale else flat
        state = state._replace(scaled=new)
    dtype = state.potential_energy.dtype
    unknown = jnp.full_like(state.drift_ratio, jnp.inf)
    return state._replace(
        adaptation=state.adaptation._replace(start_energy=unknown),
        drift_ratio=unknown,
        trusted=state.chain.position,
        dynamics=algorithm.forget(state.dynamics),
        potential_energy=energy.astype(dtype),
        grad_norm=jnp.sqrt(tree_vdot(grad, grad)).astype(dtype),
    )
