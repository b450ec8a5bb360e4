"""What a chain learns before and after each draw of warm-up, and when: the timetable.

With W draws of warm-up::

    before draw 0     a search for the typical set, unless the start is given; the first anchor
    draw 0            statistics settle (of the metric, of noise); the position does not move
    before draw 1     curvature and noise are measured: the first step size
    W/8 W/4 W/2       the scale is renewed from the draws since the previous time, the anchor moves
                      to their mean, and curvature and noise are measured again
    9/16 ... W - 1    measured again nine times; the extremes are kept
    3W/4 7W/8         the anchor moves to the mean of the second half (`GGMC` with an anchor of
                      second order leaves it where the search ended)
    7W/8              statistics stop changing, so that the last measurements see the final ones
    after W draws     nothing changes any more

A network is measured before each draw of warm-up, see `measure_by_energy`.

If neither step size nor number of steps is automatic, nothing is measured, and the position moves
from draw 0 on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.flatten_util import ravel_pytree as ravel

from .. import _random
from .._util import PyTree, lazy_cond, tree_axpy, tree_size, tree_vdot, tree_where
from ..model.control_variate import Control, replace_anchor
from ..model.potential import Potential
from ..model.scale import Scale
from ..sampling.algorithm import MAX_NUM_STEPS, Algorithm, adapts, num_steps_from, rule_temperature
from ..sampling.settings import DENSE_LIMIT, Settings
from ..sampling.state import Adaptation, Chain, SGState, Target
from .curvature import measure
from .scale import emptied, likeness, with_draw

LEAST_SCALED = 0.5
"""Smallest curvature that counts if a covariance scales the coordinates. Variances are about 1 in
these, and an eigenvalue of 0 at one place does not tell how long the chain takes to relax. The
largest curvature is at least 1."""
FEWEST_IN_WINDOW = 12
"""Fewest draws in a window whose mean may be an anchor, and whose correlation counts."""
MOST_SLOWER = 8.0
"""Largest factor by which one window may slow the assumed rate of a chain."""


class Due(NamedTuple):
    """Events at a draw, boolean scalars.

    Attributes:
        first: whether this is draw 0.
        warming: whether this is a draw of warm-up.
        moving: whether the position moves.
        learning: whether statistics of the metric and of noise may change.
        measuring: whether curvature and noise are measured before the draw.
        anchoring: whether the anchor moves to the mean of draws.
        early: whether a measurement replaces earlier ones, the mean of draws is restarted when the
            anchor has moved, and the coordinates are rescaled then.
        closing: whether this is the last draw of warm-up, or a later draw.
    """

    first: jax.Array
    warming: jax.Array
    moving: jax.Array
    learning: jax.Array
    measuring: jax.Array
    anchoring: jax.Array
    early: jax.Array
    closing: jax.Array


def what_is_due(i: jax.Array, num_warmup: jax.Array, adapts: bool) -> Due:
    """The timetable at draw ``i``.

    ``adapts`` tells whether any setting follows from measurements.
    """
    eighths = jnp.array([1, 2, 4, 6, 7], jnp.int32) * num_warmup // 8
    warming, last = i < num_warmup, i == num_warmup - 1
    anchoring = (i > 1) & jnp.any(i == eighths)
    early = i <= jnp.maximum(num_warmup // 2, 1)
    sixteenth = ~early & (16 * i % jnp.maximum(num_warmup, 1) < 16)
    return Due(
        first=i == 0,
        warming=warming,
        moving=(i > 0) | (not adapts),
        learning=(i < num_warmup * 7 // 8) | (i == 0),
        measuring=(i == 1) | (i > 1) & warming & (anchoring | sixteenth | last),
        anchoring=anchoring,
        early=early,
        closing=i >= num_warmup - 1,
    )


def heed_draws(state: SGState, due: Due, settings: Settings, algorithm: Algorithm) -> SGState:
    """Make draws longer if draws of a window are correlated, because the chain is slow.

    In scaled coordinates the covariance is assumed to tell the slowest relaxation. This is
    wrong if the scale is wrong, or in a funnel, and draws that are too short never correct the
    scale. After t relaxation times the correlation should be about exp(-t).
    """
    if settings.given_num_steps is not None or not _knows_covariance(state, settings):
        return state
    scale: Scale = state.scale
    adaptation: Adaptation = state.adaptation
    times = state.num_steps * state.step_size * algorithm.rate(adaptation.slowest, state.dynamics)
    judging = due.anchoring & (scale.num_draws >= FEWEST_IN_WINDOW)
    least = 1 / jnp.maximum(scale.num_draws, 1).astype(times.dtype)  # of n draws nothing is less
    passed = -jnp.log(jnp.maximum(likeness(scale), least))  # relaxation times that a draw spans
    factor = jnp.clip(passed / times, 1 / MOST_SLOWER, 1.0)
    factor = jnp.where(passed >= -jnp.log(least), 2.0, factor)  # no correlation left
    old = adaptation.rate_factor
    new = jnp.clip(old * factor, 1 / MAX_NUM_STEPS, 1.0)  # draws cannot become longer than that
    new = jnp.where(judging, new, old).astype(old.dtype)
    slowest = adaptation.slowest * (new / old)
    scale = lazy_cond(judging & ~due.early, emptied, scale)
    return state._replace(
        adaptation=adaptation._replace(rate_factor=new, slowest=slowest), scale=scale
    )


def _knows_covariance(state: SGState, settings: Settings) -> bool:
    """Whether a covariance of draws scales the coordinates, and curvature is measured exactly."""
    if not settings.scales:
        return False
    known = settings.dense_scale and state.scale.centre.size <= DENSE_LIMIT
    return known or settings.layout is not None


def before_draw(
    state: SGState,
    due: Due,
    target: Target,
    algorithm: Algorithm,
    settings: Settings,
    rng_key: jax.Array,
) -> SGState:
    """Move the anchor, measure, and set step size and number of steps, if these are due."""
    # a trajectory of second order keeps its anchor: to form Hessians again would gain little
    stays = algorithm.trajectory and settings.control_variate == 2 and settings.finds_scale
    if target.controlled and not stays:
        control = lazy_cond(
            due.anchoring,
            lambda control, restarting: _move_to_mean(
                target.potential, control, restarting, state.z, state.root
            ),
            state.control,
            due.early,
        )
        state = state._replace(control=control)
    if adapts(settings, algorithm):
        state = _adapt(state, due, target, algorithm, settings, rng_key)
    centring, here = state.i <= state.adaptation.num_warmup, state.chain.position
    return state._replace(centre=tree_where(centring, here, state.centre))


def after_draw(
    state: SGState, due: Due, target: Target, algorithm: Algorithm, settings: Settings
) -> SGState:
    """Add the draw to the anchor's mean, and correct the step size by the result of the draw."""
    counts = due.warming & due.moving
    if target.controlled:
        old = state.control
        new = old._replace(total=old.total + ravel(state.z)[0], num_draws=old.num_draws + 1)
        state = state._replace(control=tree_where(counts, new, old))
    if settings.scales:
        state = state._replace(scale=tree_where(counts, with_draw(state), state.scale))
    if settings.schedule is None:
        learned = algorithm.observe(state.adaptation, state)
        state = state._replace(adaptation=tree_where(counts, learned, state.adaptation))
    return state


def _adapt(
    state: SGState,
    due: Due,
    target: Target,
    algorithm: Algorithm,
    settings: Settings,
    rng_key: jax.Array,
) -> SGState:
    """Measure the target at a few draws of warm-up; set step size and number of steps."""
    metric = settings.metric
    seen = target.seen(state.control)
    measuring = due.measuring | (due.warming & due.moving & settings.by_energy)

    def remeasure(
        adaptation: Adaptation,
        chain: Chain,
        control: Any,
        rng_key: jax.Array,
        replacing: jax.Array,
    ) -> Adaptation:
        seen = target.seen(control)
        # of few rows of each group the curvature is a noise that an anchor of second order corrects
        exact = target.controlled and control.anchor.curvature
        second_order = algorithm.second_order
        plain = target.in_chain(target.potential)
        if settings.by_energy:
            return measure_by_energy(seen, chain, algorithm, settings, rng_key, adaptation, state.i)
        found = measure(
            seen if exact else plain,
            chain.position,
            lambda v: metric.apply_inverse_sqrt(chain.metric_state, v),
            rng_key,
            adaptation,
            replacing,
            algorithm.noise_factor,
            None if second_order is None else second_order(chain.dynamics, seen),
            scaled=settings.scales,
            temperature=settings.temperature,
            scores=seen.score_noise,
            layout=settings.layout,
            plain=None if algorithm.adjusted else plain,
        )
        least, most = found.flattest, found.curvature
        if _knows_covariance(state, settings):
            least, most = jnp.maximum(least, LEAST_SCALED), jnp.maximum(most, 1)
        return found._replace(slowest=found.rate_factor * least, curvature=most)

    adaptation = lazy_cond(
        measuring,
        remeasure,
        state.adaptation,
        state.chain,
        state.control,
        rng_key,
        due.early,
    )
    changes = ~due.first & due.warming | measuring
    h, rate, dynamics = algorithm.propose(adaptation, state, seen)
    step_size, num_steps = state.step_size, state.num_steps
    if settings.schedule is None:
        step_size = jnp.where(changes, h, step_size).astype(step_size.dtype)
    if settings.given_num_steps is None:
        if settings.by_energy:
            # a Langevin step is one with a new momentum
            h = step_size if algorithm.momentum else jnp.sqrt(2 * step_size)
            steps = num_steps_from(jnp.sqrt(adaptation.slowest), h, draw_length=1.0)
        else:
            steps = algorithm.num_steps(rate, step_size, seen)
        num_steps = jnp.where(due.first, num_steps, steps)
    return state._replace(
        adaptation=adaptation,
        step_size=step_size,
        num_steps=num_steps,
        dynamics=tree_where(changes, dynamics, state.dynamics),
    )


ENERGY_MOMENTA = 4
"""Steps with momenta of their own whose errors are measured at once."""
MOST_ROUNDS = 12
"""Most step sizes that a measurement of the energy's error tries."""


def measure_by_energy(
    potential: Potential,
    chain: Chain,
    algorithm: Algorithm,
    settings: Settings,
    rng_key: jax.Array,
    adaptation: Adaptation,
    i: jax.Array,
) -> Adaptation:
    """Measure the errors of an average parameter, where no scale fits.

    A step that is short enough for the stiffest of many weights does not move a network. So the
    step is one whose error of the energy has a small variance per parameter, and the noise is a
    mean over parameters. The curvature is then that of a normal target in which all directions
    have this step size, and its slowest relaxation is that over the parameters' root mean square.
    """
    metric, tau = settings.metric, settings.temperature
    position, size = chain.position, tree_size(chain.position)
    key_rows, key_momenta, key_noise, key_root = random.split(rng_key, 4)
    batch = potential.curvature_batch(key_rows)

    def root(x: PyTree) -> PyTree:
        return metric.apply_inverse_sqrt(chain.metric_state, x)

    def value_and_force(x: PyTree) -> tuple[jax.Array, PyTree]:
        value, grad = jax.value_and_grad(potential.energy)(x, batch)
        return value, root(grad)

    value, force = value_and_force(position)

    def error(key: jax.Array, h: jax.Array) -> jax.Array:
        """Squared error of the energy in one step, for each parameter, over what is allowed."""
        p = algorithm.motion.draw(key, position, tau)
        p, begun = algorithm.motion.kick(p, force, h / 2, tau)
        new, force_there = value_and_force(tree_axpy(h, root(p), position))
        _, ended = algorithm.motion.kick(p, force_there, h / 2, tau)
        gap = (new - value + begun + ended) / rule_temperature(tau)
        return gap**2 / (size * settings.bias_tolerance)

    def attempt(carry: tuple) -> tuple:
        k, h, _ = carry
        keys = random.split(random.fold_in(key_momenta, k), ENERGY_MOMENTA)
        found = jnp.mean(jax.vmap(error, (0, None))(keys, h))
        found = jnp.where(jnp.isfinite(found), found, jnp.inf)
        factor = jnp.clip(found ** (-1 / 6), 0.25, 4.0)  # the error goes as h^3
        return k + 1, h * factor, (factor < 0.7) | (factor > 1.4)

    t, dtype = settings.bias_tolerance, adaptation.curvature.dtype
    h = 2 * jnp.sqrt(t / adaptation.curvature)
    begun = jnp.int32(0), h, jnp.asarray(True)
    _, h, _ = lax.while_loop(lambda x: x[2] & (x[0] < MOST_ROUNDS), attempt, begun)
    # means of variances of the energy's error, which go as the third power of the curvature
    second_half = jnp.maximum(i - adaptation.num_warmup // 2, 0)
    share = jnp.where(i <= 1, 1, 1 / (2.0 + second_half)).astype(dtype)
    old = adaptation.curvature
    curvature = old * (1 - share + share * (4 * t / h**2 / old) ** 3) ** (1 / 3)

    def force_of(key: jax.Array) -> PyTree:
        return root(jax.grad(potential.energy)(position, potential.draw(key, stream)[0]))

    def noise_of(key: jax.Array) -> jax.Array:
        gap = jax.tree.map(jnp.subtract, *map(force_of, random.split(key)))
        return tree_vdot(gap, gap) / (2 * size)

    noise = jnp.zeros((), dtype)
    if not potential.deterministic:
        stream = potential.init_stream(key_noise)
        now = jnp.mean(lax.map(noise_of, random.split(key_noise, ENERGY_MOMENTA)))
        now = algorithm.noise_factor * now.astype(dtype)
        noise = adaptation.noise + share * (now - adaptation.noise)
    scaled = root(_random.tree_normal(key_root, position))
    squared = jnp.maximum(tree_vdot(position, position), jnp.finfo(dtype).tiny)
    slowest = (tree_vdot(scaled, scaled) / squared).astype(dtype)
    slowest = adaptation.slowest + share * (slowest - adaptation.slowest)
    return adaptation._replace(curvature=curvature, flattest=slowest, slowest=slowest, noise=noise)


def _move_to_mean(
    potential: Potential, control: Control, restarting: jax.Array, like: PyTree, root: Any
) -> Control:
    """Move the anchor to the mean of the last draws, if there are enough."""
    enough = jnp.maximum(control.num_draws, 1)
    mean = ravel(like)[1]((control.total / enough).astype(control.total.dtype))
    usable = control.num_draws >= FEWEST_IN_WINDOW
    moved = tree_where(usable, replace_anchor(potential, control, mean, root), control)
    empty = jax.tree.map(jnp.zeros_like, control)._replace(anchor=moved.anchor)
    return tree_where(restarting, empty, moved)
