"""Before a chain's first draw: a search for the bulk, the first anchor and the first scale."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

from .._util import ravel
from ..model.control_variate import replace_anchor, with_control_variate
from ..model.scale import Scale, times
from ..model.target import Target
from ..sampling.blocks import block_mask
from ..sampling.settings import Settings
from ..sampling.step_size import rule_temperature
from .approach import MOST_STEPS, approach
from .curvature import DENSE_LIMIT
from .scale import given_scale, roots_at, scale_of_curvature, scale_of_diagonal, share_along
from .search import descend

PyTree = Any

REFINEMENTS = 2
"""Number of searches with a control variate, after the search without one."""


def find_start(
    target: Target,
    settings: Settings,
    position: PyTree,
    control: Any,
    rng_key: jax.Array,
    searching: bool,
) -> tuple[PyTree, Any, Any]:
    """Move near the bulk, and place the scale and the control variate's anchor there.

    Args:
        target: the target to sample, in the model's coordinates.
        settings: the kernel's settings.
        position: position of the model's sites where NumPyro's strategy or the user starts.
        control: the control variate's state, empty without one.
        rng_key: for the rows.
        searching: whether to search at all.

    Returns:
        The position, the control variate's state, and the scale, empty without one.
    """
    sites = position
    position, to_sites = ravel(sites)  # a vector compiles faster than many leaves
    target = target.in_coordinates(to_sites)
    potential, temperature = target.potential, target.temperature
    curved = settings.finds_scale and position.size <= DENSE_LIMIT
    key_scale = random.fold_in(rng_key, 0)
    if curved or not target.controlled:
        if searching:
            mode = descend(potential, position, rng_key, temperature, of_mass=curved)
            # an improper model can have its mode where values overflow
            position = jnp.where(target.is_usable(mode), mode, position)
        if curved and potential.on_all_rows is not None:
            anchor, roots = approach(target, position, key_scale, MOST_STEPS if searching else 1)
            position = anchor.position
            if target.controlled:
                control = control._replace(anchor=anchor)
        elif curved:
            roots = roots_at(potential, position, potential.curvature_batch(key_scale))
    else:
        position, control = _with_anchors(target, position, control, rng_key, searching)
    scale: Any = ()
    if curved:
        blocks = block_mask(settings.blocks, sites) if settings.blocks else None
        scale = scale_of_curvature(target, settings, position, roots, key_scale, blocks)
        if searching:
            position = typical_place(target, scale, position, random.fold_in(rng_key, 1))
    elif settings.finds_scale:
        scale = scale_of_diagonal(target, settings, position, key_scale)
    elif settings.scales:
        scale = given_scale(settings, to_sites(position))
    return to_sites(position), control, scale


def typical_place(
    target: Target, scale: Scale, position: jax.Array, rng_key: jax.Array
) -> jax.Array:
    """A draw of the normal law about ``position`` that the scale describes, within its reach.

    The middle of D dimensions is not typical: U is tau D / 2 below its mean there.
    """
    tau = rule_temperature(target.temperature)
    noise = times(scale.root, random.normal(rng_key, position.shape, position.dtype))
    rows = target.potential.curvature_batch(rng_key)
    share = share_along(target.potential, noise, position, rows, target.temperature)
    found = position + share * tau**0.5 * noise
    return jnp.where(target.is_usable(found), found, position)


def _with_anchors(
    target: Target, position: jax.Array, control: Any, rng_key: jax.Array, searching: bool
) -> tuple[jax.Array, Any]:
    """Search without a control variate first, then more exactly, with anchors on the way."""
    potential = target.potential
    if not searching:
        return position, replace_anchor(potential, control, position)

    def closer(k: jax.Array, found: tuple) -> tuple:
        mode, control = found
        share = jnp.minimum(k, 1).astype(control.anchor.energy.dtype)
        corrected = with_control_variate(potential, control.anchor, share)
        mode = descend(corrected, mode, random.fold_in(rng_key, k), target.temperature)
        mode = jnp.where(target.is_usable(mode), mode, position)
        return mode, replace_anchor(potential, control, mode)

    return lax.fori_loop(0, 1 + REFINEMENTS, closer, (position, control))
