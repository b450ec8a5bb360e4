"""A scale by blocks of sites: which covariance entries count, and scales given by blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .state import is_by_site

PyTree = Any
Blocks = tuple[tuple[str, ...], ...]


def check_blocks(name: str, value: Any) -> Blocks:
    """Tuples of site names, as in NumPyro's kernels.

    Raises:
        TypeError: for anything else.
        ValueError: for a site in two blocks.
    """
    given = None
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        given = [(block,) if isinstance(block, str) else tuple(block) for block in value]
    if given is None or not all(isinstance(site, str) for block in given for site in block):
        raise TypeError(
            f"{name} must be True, False, None, 'auto' or tuples of names of sites such as "
            f"[('a', 'b')], got {value!r}"
        )
    sites = [site for block in given for site in block]
    twice = sorted({site for site in sites if sites.count(site) > 1})
    if twice:
        raise ValueError(f"{name} must have each site in one block, got {twice} in several")
    return tuple(given)


def block_mask(blocks: Blocks, position: PyTree) -> np.ndarray:
    """Shape (D, D): whether two parameters are in the same block; other sites are diagonal."""
    where = _places(blocks, position)
    mask = np.eye(sum(map(len, where.values())), dtype=bool)
    for block in blocks:
        index = np.concatenate([where[site] for site in block])
        mask[np.ix_(index, index)] = True
    return mask


def matrix_of_blocks(given: Mapping[Any, np.ndarray], position: PyTree) -> np.ndarray:
    """The covariance, shape (D, D), from covariances of blocks; variance 1 for other sites.

    Raises:
        ValueError: for a block of the wrong size, or unknown sites.
    """
    where = _places(given, position)
    matrix = np.eye(sum(map(len, where.values())))
    for block, values in given.items():
        index = np.concatenate([where[site] for site in block])
        if len(values) != len(index):
            raise ValueError(
                f"inverse_mass_matrix has the shape {np.shape(values)} for the sites {block}, "
                f"which have {len(index)} unconstrained parameters: expected ({len(index)},) or "
                f"({len(index)}, {len(index)})"
            )
        matrix[np.ix_(index, index)] = np.diag(values) if np.ndim(values) == 1 else values
    return matrix


def _places(blocks: Iterable, position: PyTree) -> dict[str, np.ndarray]:
    """The indices of each site's parameters in the vector of all parameters."""
    sites = (
        {name: np.size(position[name]) for name in sorted(position)} if is_by_site(position) else {}
    )
    unknown = sorted({site for block in blocks for site in block} - set(sites))
    if unknown:
        raise ValueError(
            f"blocks of the scale name sites that the position does not have: {unknown}. Expected "
            f"some of {list(sites)}"
        )
    ends = np.cumsum([*sites.values()])
    return {name: np.arange(end - sites[name], end) for name, end in zip(sites, ends, strict=True)}
