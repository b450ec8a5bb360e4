"""Where the anchor of a control variate is: at a mode first, then at the mean of draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._util import tree_where
from ..target.control_variate import Control, refresh
from ..target.potential import Potential

PyTree = Any

LEAST_DRAWS = 16
"""Draws of warm-up whose mean makes a better anchor than a mode."""


def move_to_mean(potential: Potential, control: Control, restarting: jax.Array) -> Control:
    """Move the anchor to the mean of the last draws, if they are enough.

    Args:
        potential: the target, without a control variate.
        control: the state.
        restarting: whether the mean is then started anew.
    """
    enough = jnp.maximum(control.num_draws, 1)
    mean = jax.tree.map(lambda x: (x / enough).astype(x.dtype), control.total)
    usable = control.num_draws >= LEAST_DRAWS
    moved = tree_where(usable, refresh(potential, control, mean), control)
    empty = control._replace(
        total=jax.tree.map(jnp.zeros_like, control.total),
        num_draws=jnp.zeros_like(control.num_draws),
    )
    return tree_where(restarting, empty._replace(anchor=moved.anchor), moved)


def add_draw(control: Control, position: PyTree) -> Control:
    """Count a draw of warm-up into the running mean."""
    total = jax.tree.map(jnp.add, control.total, position)
    return control._replace(total=total, num_draws=control.num_draws + 1)
