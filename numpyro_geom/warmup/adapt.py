"""What a chain learns before and after each draw of warm-up, following the timetable."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._util import lazy_cond, tree_where
from ..model.scale import Scale
from ..model.target import Target
from ..sampling.algorithm import Algorithm, Rule, adapts
from ..sampling.settings import Settings
from ..sampling.state import Chain, SGState
from ..sampling.step_size import Adaptation
from .anchor import add_draw, move_to_mean
from .curvature import DENSE_LIMIT, measure
from .scale import emptied, likeness, with_draw
from .timetable import Due

PyTree = Any

LEAST_SCALED = 0.5
"""Smallest curvature that counts if a covariance scales the coordinates. Variances are about 1 in
these, and an eigenvalue of 0 at one place does not tell how long the chain takes to relax."""
FEWEST_DRAWS = 12
"""Fewest draws in a window whose correlation counts."""
LEAST_TIMES = 0.4
"""Relaxation times that a draw must span for its correlation with the previous draw to count."""
LEAST_ALIKE = 0.05
"""Correlation of draws below which it does not tell how fast it decays."""
SLOW = 0.5
"""A chain slower than this share of the expected rate takes longer draws."""
MOST_AT_ONCE = 8.0
"""Largest factor by which one window may slow the assumed rate of a chain."""
LEAST_FACTOR = 2.0**-8
"""The smallest ``slower``."""


def heed_draws(state: SGState, due: Due, settings: Settings, rule: Rule) -> SGState:
    """Make draws longer if those of a window are correlated, because the chain is slow.

    In scaled coordinates the slowest relaxation is assumed to be that of the covariance. This is
    wrong if the scale is wrong, or in a funnel, and draws that are too short never correct the
    scale. After t relaxation times the correlation should be about exp(-t).
    """
    if settings.given_num_steps is not None or not _knows_covariance(state, settings):
        return state
    scale: Scale = state.scale
    adaptation: Adaptation = state.adaptation
    times = state.num_steps * state.step_size * rule.rate(adaptation.slowest, state.dynamics)
    # the rate over the expected rate: the estimate, and the largest value that chance allows
    found, most = (-jnp.log(jnp.maximum(x, LEAST_ALIKE)) / times for x in likeness(scale))
    factor = jnp.where(most < SLOW, jnp.clip(found, 1 / MOST_AT_ONCE, 1.0), 1.0)
    factor = jnp.where(most * times >= -jnp.log(LEAST_ALIKE), 2.0, factor)  # no correlation left
    judging = due.anchoring & (scale.num_draws >= FEWEST_DRAWS) & (times >= LEAST_TIMES)
    slower = jnp.clip(adaptation.slower * factor, LEAST_FACTOR, 1.0)
    slower = jnp.where(judging, slower, adaptation.slower).astype(adaptation.slower.dtype)
    slowest = adaptation.slowest * (slower / adaptation.slower)
    scale = lazy_cond(judging & ~due.rescaling, emptied, scale)
    return state._replace(
        adaptation=adaptation._replace(slower=slower, slowest=slowest), scale=scale
    )


def _knows_covariance(state: SGState, settings: Settings) -> bool:
    """Whether a covariance of draws scales the coordinates, and curvature is measured exactly."""
    return settings.learns_scale and settings.dense_scale and state.scale.centre.size <= DENSE_LIMIT


def before_draw(
    state: SGState,
    due: Due,
    target: Target,
    algorithm: Algorithm,
    settings: Settings,
    rng_key: jax.Array,
) -> SGState:
    """Move the anchor, measure, and set step size and number of steps, if these are due."""
    if target.controlled and settings.anchor_interval is None:
        control = lazy_cond(
            due.anchoring,
            lambda control, restarting: move_to_mean(
                target.potential, control, restarting, state.z
            ),
            state.control,
            due.restarting,
        )
        state = state._replace(control=control)
    if adapts(settings, algorithm.facts):
        state = _adapt(state, due, target, algorithm, settings, rng_key)
    position = state.chain.position
    return state._replace(centre=tree_where(due.recentring, position, state.centre))


def after_draw(
    state: SGState, due: Due, target: Target, algorithm: Algorithm, settings: Settings
) -> SGState:
    """Add the draw to the anchor's mean, and correct the step size by the result of the draw."""
    counts = due.warming & due.moving
    if target.controlled:
        control = tree_where(counts, add_draw(state.control, state.z), state.control)
        state = state._replace(control=control)
    if settings.learns_scale:
        state = state._replace(scale=tree_where(counts, with_draw(state), state.scale))
    if settings.schedule is None:
        learned = algorithm.rule.observe(state.adaptation, state)
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
    rule, metric = algorithm.rule, settings.metric
    noise = rule.noise
    seen = target.seen(state.control)

    def remeasure(
        adaptation: Adaptation,
        chain: Chain,
        control: Any,
        rng_key: jax.Array,
        replacing: jax.Array,
    ) -> Adaptation:
        seen = target.seen(control)
        second_order = noise.second_order
        found = measure(
            seen,
            chain.position,
            lambda v: metric.apply_inverse_sqrt(chain.metric_state, v),
            rng_key,
            adaptation,
            replacing,
            noise.factor,
            None if second_order is None else second_order(chain.dynamics, seen),
            None if noise.known is None else noise.known(chain.dynamics),
            settings.bias_tolerance,
            settings.temperature,
        )
        least = LEAST_SCALED if _knows_covariance(state, settings) else 0.0
        return found._replace(slowest=found.slower * jnp.maximum(found.flattest, least))

    adaptation = lazy_cond(
        due.measuring,
        remeasure,
        state.adaptation,
        state.chain,
        state.control,
        rng_key,
        due.replacing,
    )
    changes = ~due.first & due.warming | due.measuring
    h, rate, dynamics = rule.propose(adaptation, state, seen)
    step_size, num_steps = state.step_size, state.num_steps
    if settings.schedule is None:
        step_size = jnp.where(changes, h, step_size).astype(step_size.dtype)
    if settings.given_num_steps is None:
        steps = rule.num_steps(rate, step_size, seen)
        num_steps = jnp.where(due.first, num_steps, steps)
    return state._replace(
        adaptation=adaptation,
        step_size=step_size,
        num_steps=num_steps,
        dynamics=tree_where(changes, dynamics, state.dynamics),
    )
