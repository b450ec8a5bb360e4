"""Where a control variate has its anchor: at a mode first, then at the mean of draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._util import ravel, tree_where
from ..model.control_variate import Control, replace_anchor
from ..model.potential import Potential

PyTree = Any

LEAST_DRAWS = 16
"""Fewest draws of warm-up whose mean is a better anchor than a mode."""


def move_to_mean(
    potential: Potential, control: Control, restarting: jax.Array, like: PyTree
) -> Control:
    """Move the anchor to the mean of the last draws, if there are enough.

    Args:
        potential: the target, without a control variate.
        control: the state.
        restarting: whether the mean is then restarted.
        like: a position of the model's sites.
    """
    enough = jnp.maximum(control.num_draws, 1)
    mean = ravel(like)[1]((control.total / enough).astype(control.total.dtype))
    usable = control.num_draws >= LEAST_DRAWS
    moved = tree_where(usable, replace_anchor(potential, control, mean), control)
    empty = control._replace(
        total=jnp.zeros_like(control.total),
        num_draws=jnp.zeros_like(control.num_draws),
    )
    return tree_where(restarting, empty._replace(anchor=moved.anchor), moved)


def add_draw(control: Control, position: PyTree) -> Control:
    """Add a draw of warm-up to the running mean."""
    total = control.total + ravel(position)[0]
    return control._replace(total=total, num_draws=control.num_draws + 1)
