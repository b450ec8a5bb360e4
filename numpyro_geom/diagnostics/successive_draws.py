"""Distances between successive draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._checks import check_flag
from .arrays import as_array, chosen, real_numbers
from .sources import draws_of

MANY = 10
"""If the second axis is this many times longer than the first, the first is probably one of
chains."""


def draw_distances(
    draws: Any, *, normalised: bool = False, var_names: str | Sequence[str] | None = None
) -> np.ndarray:
    """Euclidean distances between successive draws, |theta' - theta| or |theta' - theta| / |theta|.

    Args:
        draws: an MCMC that has run; an ArviZ object with a ``posterior``; an array, shape (draws,
            D) or (chains, draws, D); or a dict of arrays by site (which may be nested) of one
            chain, each shaped (draws, ...). The result of ``get_samples(group_by_chain=True)`` has
            another shape: pass the MCMC instead. A distance is over all sites together.
        normalised: divide by the norm of the earlier draw. This removes the scale that
            normalisation layers leave free.
        var_names: for an ArviZ object, the variable or variables to use; None for all, including
            deterministic sites.

    Returns:
        Array of shape (draws - 1,), or (chains, draws - 1) with chains.

    Raises:
        TypeError: for values that are not real numbers.
        ValueError: for shapes that do not fit; for fewer than two draws; for values that are not
            finite; for unknown variables; for a dict whose leading axis seems to be one of chains;
            for an MCMC that has not run; with ``normalised``, for a draw of norm 0.

    Examples:
        >>> from numpyro_geom.diagnostics.predictive import draw_distances
        >>> draw_distances([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
        array([0., 5.])
        >>> draw_distances([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]], normalised=True)
        array([0., 1.])

    References:
        Kim et al., "Parameter Expanded SG-MCMC" (ICLR 2025), section 5.3.
    """
    parts = _parts(draws, var_names)
    square = sum(np.sum(np.diff(x, axis=-2) ** 2, axis=-1) for x in parts)
    distance = np.sqrt(square)
    if not check_flag("normalised", normalised):
        return distance
    norm = np.sqrt(sum(np.sum(x[..., :-1, :] ** 2, axis=-1) for x in parts))
    if (norm == 0).any():
        raise ValueError(
            f"normalised=True divides by the norm of a draw, and {(norm == 0).sum()} draws are 0: "
            "use normalised=False"
        )
    return distance / norm


def _parts(draws: Any, var_names: str | Sequence[str] | None) -> list[np.ndarray]:
    """Finite float64 arrays, all of shape (draws, k) or all of (chains, draws, k)."""
    if var_names is not None and not hasattr(draws, "posterior"):
        raise ValueError("var_names is for ArviZ objects: pick entries of a dict before the call")
    known = draws_of(draws)
    if known is not None:
        names = known if var_names is None else chosen(var_names, known, "the posterior")
        values, leading = [known[name] for name in names], 2
    elif isinstance(draws, Mapping):
        values, leading = [as_array("draws", x) for x in jax.tree.leaves(dict(draws))], 1
        leads = {x.shape[:2] for x in values}
        if len(leads) == 1 and len(lead := leads.pop()) == 2 and lead[1] > MANY * lead[0]:
            raise ValueError(
                f"arrays in a dict must have shape (draws, ...), and all begin with {lead}, which "
                "looks like (chains, draws): pass the MCMC itself or one chain; if these are "
                "draws, then as one array (draws, D)"
            )
    else:
        values = [as_array("draws", draws)]
        leading = values[0].ndim - 1
    shapes = {x.shape[:leading] for x in values}
    shape = shapes.pop() if len(shapes) == 1 else ()
    if leading not in (1, 2) or len(shape) < leading or 0 in shape or shape[-1] < 2:
        raise ValueError(
            "draws must be an array of shape (draws, D) or (chains, draws, D), or a dict of arrays "
            "that all have the same number of draws, at least two; got "
            f"{[x.shape for x in values]}"
        )
    return [real_numbers("draws", x).reshape((*shape, -1)) for x in values]
