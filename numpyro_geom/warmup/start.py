"""What happens before a chain's first draw: a search for a mode, and the first anchor."""

from __future__ import annotations

from typing import Any

import jax
from jax import random

from .._util import tree_where
from ..target.control_variate import refresh
from ..target.target import Target
from .anchor import search_with_anchor
from .search import find_mode

PyTree = Any


def find_start(
    target: Target, position: PyTree, control: Any, rng_key: jax.Array, searching: bool
) -> tuple[PyTree, Any]:
    """Come near a mode, and place the control variate's anchor there.

    Args:
        target: what will be sampled.
        position: of the model's sites, where NumPyro's strategy or the user starts.
        control: the control variate's state, empty without one.
        rng_key: for the rows.
        searching: whether to search at all.

    Returns:
        The position and the control variate's state.
    """
    potential, temperature = target.potential, target.temperature
    if searching:
        key_first, key_second = random.split(rng_key)
        mode = find_mode(potential, position, key_first, temperature)
        if target.controlled:
            mode = search_with_anchor(potential, mode, key_second, temperature)
        # the mode of an improper model can be where values overflow
        position = tree_where(target.is_usable(mode), mode, position)
    if target.controlled:
        control = refresh(potential, control, position)
    return position, control
