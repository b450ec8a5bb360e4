"""The timetable of warm-up: all events before and during draw ``i``.

With W draws of warm-up::

    before draw 0     a search for the bulk, unless the chain's start is given; the first anchor
    draw 0            statistics settle (of the metric, of noise); the position does not move
    before draw 1     curvature and noise are measured: the first step size
    1/16 ... W - 1    measured again a dozen times; from W / 2 on the extremes are kept
    W/8 W/4 W/2       the scale is renewed from the draws since W/16, or since the previous time
    W/8 W/4 W/2       the anchor moves to the mean of the draws, and the mean is restarted
    3W/4 7W/8         the anchor moves to the mean of the second half
    7W/8              statistics stop changing, so that the last measurements see the final ones
    after W draws     nothing changes any more

If neither step size nor number of steps is automatic, nothing is measured, and the position moves
from draw 0 on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MAX_SETTLING_STEPS = 500
"""Largest number of steps for which a metric's statistics settle before the position moves."""


class Due(NamedTuple):
    """Events at a draw, boolean scalars.

    Attributes:
        first: whether this is draw 0.
        warming: whether this is a draw of warm-up.
        moving: whether the position moves.
        learning: whether statistics of the metric and of noise may change.
        measuring: whether curvature and noise are measured before the draw.
        renewing: whether a measurement renews the scale from which acceptance adapts the step
            size. The last measurements do not.
        replacing: whether a measurement replaces earlier ones; otherwise the extremes are kept.
        anchoring: whether the anchor moves to the mean of draws.
        restarting: whether this mean is then restarted.
        opening: whether the window of draws for the scale is emptied.
        rescaling: whether the coordinates are rescaled before the draw.
        recentring: whether temperatures are measured from the start of the draw.
        closing: whether this is the last draw of warm-up, or a later draw.
    """

    first: jax.Array
    warming: jax.Array
    moving: jax.Array
    learning: jax.Array
    measuring: jax.Array
    renewing: jax.Array
    replacing: jax.Array
    anchoring: jax.Array
    restarting: jax.Array
    opening: jax.Array
    rescaling: jax.Array
    recentring: jax.Array
    closing: jax.Array


def what_is_due(i: jax.Array, num_warmup: jax.Array, adapts: bool) -> Due:
    """The timetable at draw ``i``.

    Args:
        i: draws so far.
        num_warmup: W.
        adapts: whether any setting follows from measurements.
    """
    eighths = jnp.array([1, 2, 4, 6, 7], jnp.int32) * num_warmup // 8
    sixteenths = jnp.array([1, 2, 4, 8, 9, 10, 11, 12, 13, 14, 15], jnp.int32) * num_warmup // 16
    times = jnp.concatenate([sixteenths, num_warmup[None] - 1])
    measuring = (i == 1) | ((i >= 1) & (i < num_warmup) & jnp.any(i == times))
    return Due(
        first=i == 0,
        warming=i < num_warmup,
        moving=(i > 0) | (not adapts),
        learning=(i < num_warmup * 7 // 8) | (i == 0),
        measuring=measuring,
        renewing=measuring & (i <= num_warmup * 7 // 8),
        replacing=i <= jnp.maximum(num_warmup // 2, 1),
        anchoring=(i > 1) & jnp.any(i == eighths),
        restarting=i <= num_warmup // 2,
        opening=i == num_warmup // 16,
        rescaling=(i > 1) & jnp.any(i == eighths[:3]),
        recentring=i <= num_warmup,
        closing=i >= num_warmup - 1,
    )


def settling_steps(metric: Any, least: int = 1) -> int:
    """Steps of draw 0: enough for the metric's statistics, and at least ``least``.

    It is twice the memory of the statistics plus one recomputation of A, within bounds.
    """
    memory = int(2.0 / (1.0 - metric.decay)) if metric.decay > 0 else 1
    interval = 1 if metric.interval is None else metric.interval
    return max(least, min(MAX_SETTLING_STEPS, max(memory, interval + 1)))
