"""Which sites `Expansion` multiplies, and by which factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._checks import check_choice, check_int
from .factors import Side

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of one site, where they differ from the general ones of `Expansion`.

    Args:
        left: number of factors on the left, the input side of a site W in ``x @ W``. None takes
            the number of `Expansion`.
        right: number of factors on the right, the output side. None takes that of `Expansion`.
        vectors: name or names of 1-D sites that share the factors of one side: the bias of a
            layer, or the other vectors of a normalisation layer.
        side: the side that the vectors share: ``"right"`` for ``x @ W + b``, ``"left"`` for
            ``W @ x + b``.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: if there is no factor at all, or no such side.
    """

    left: int | None = None
    right: int | None = None
    vectors: tuple[str, ...] = ()
    side: Literal["left", "right"] = "right"

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                keep(self, name, check_int(name, getattr(self, name), least=0))
        if self.left == 0 and self.right == 0:
            raise ValueError("left and right are both 0: expected a factor, or leave the site out")
        given: Any = self.vectors
        keep(self, "vectors", check_names("vectors", (given,) if isinstance(given, str) else given))
        check_choice("side", self.side, ("left", "right"))


def sides_of(expansion: Any, position: PyTree) -> list[Side]:
    """Every side that has factors under an `Expansion`, checked against a position's shapes.

    Raises:
        TypeError: if the position is not a dict site -> array.
        ValueError: for sites that do not exist or have the wrong shape, and for no sites at all.
    """
    if not isinstance(position, Mapping):
        raise TypeError(
            f"expected a position that is a dict site -> array, got {type(position).__name__}: "
            "an expansion needs a model, or a potential_fn of a dict"
        )
    nested = [n for n, x in position.items() if not jax.tree_util.all_leaves([x])]
    if nested:
        raise TypeError(
            f"expected a position that is a dict site -> array, got a "
            f"{type(position[nested[0]]).__name__} at {nested[0]!r}: flatten it, or drop the "
            "expansion"
        )
    shapes = {name: jnp.shape(value) for name, value in position.items()}
    given = expansion.sites
    if given is None:
        given = tuple((n, Factors()) for n, shape in shapes.items() if len(shape) in (2, 4))
    sides: list[Side] = []
    owner: dict[str, str] = {}
    for site, setting in given:
        counts = {
            "left": expansion.left if setting.left is None else setting.left,
            "right": expansion.right if setting.right is None else setting.right,
        }
        vectors = setting.vectors or _by_rule(expansion.biases, site, shapes, counts)
        for name in (site, *vectors):
            if name not in shapes:
                raise ValueError(f"no site {name!r} to expand: expected one of {list(shapes)}")
            if name in owner:
                raise ValueError(
                    f"site {name!r} is multiplied with {owner[name]!r} and with {site!r}: "
                    "expected every site once, as a key of `sites` or in one `vectors`"
                )
            owner[name] = site
        dtype = jnp.result_type(position[site])
        sides += _sides_of_site(site, shapes, counts, setting, vectors, expansion.rank, dtype)
    if expansion.biases is not None and len(owner) == len(given):
        raise ValueError(
            f"biases={expansion.biases!r} pairs no bias with a matrix: expected names such as "
            f"'{expansion.biases[0]}' and '{expansion.biases[1]}', got the sites {list(shapes)}"
        )
    if not sides:
        raise ValueError(
            f"nothing to expand: expected a site with two axes or four, got {shapes}; name "
            "others in `sites`, or drop the expansion"
        )
    return sides


def _by_rule(
    words: tuple[str, str] | None, site: str, shapes: Mapping, counts: Mapping
) -> tuple[str, ...]:
    """The bias that shares the right factors of a site, by the naming rule ``biases``."""
    if words is None or counts["right"] == 0 or words[0] not in site:
        return ()
    start, _, end = site.rpartition(words[0])
    name = start + words[1] + end
    return (name,) if len(shapes.get(name, ())) == 1 else ()


def _sides_of_site(
    site: str,
    shapes: Mapping[str, tuple[int, ...]],
    counts: Mapping[str, int],
    setting: Factors,
    vectors: tuple[str, ...],
    rank: int | float | None,
    dtype: Any,
) -> list[Side]:
    shape = shapes[site]
    if not shape:
        raise ValueError(f"site {site!r} is a scalar: expected a matrix, a kernel or a vector")
    axes = {"right": -1} if len(shape) == 1 else {"left": -2, "right": -1}
    if len(shape) == 1 and (setting.left or setting.side == "left"):
        raise ValueError(f"site {site!r} is a vector and has right factors only, got {setting}")
    axes = {side: axis for side, axis in axes.items() if counts[side]}
    if not axes:
        raise ValueError(
            f"site {site!r} of shape {shape} gets no factor: expected Factors(left=1) or "
            "Factors(right=1) for it in `sites` (a vector has right factors only)"
        )
    for name in vectors:
        if setting.side not in axes:
            raise ValueError(
                f"vector {name!r} shares the {setting.side} factors of {site!r}, which has none: "
                f"expected Factors({setting.side}=1), or the vector left out"
            )
        if shapes[name] != (shape[axes[setting.side]],):
            raise ValueError(
                f"vector {name!r} shares the {setting.side} side of {site!r} and must have the "
                f"shape {(shape[axes[setting.side]],)}, got {shapes[name]}: the other side is "
                "Factors(side='left') for W @ x + b, Factors(side='right') for x @ W + b"
            )
    sides = []
    for side, axis in axes.items():
        dimension = shape[axis]
        if isinstance(rank, int) and rank > dimension:
            raise ValueError(
                f"rank is {rank} and the {side} side of site {site!r} has dimension {dimension}: "
                "expected at most this dimension, or a fraction of the side such as rank=0.25"
            )
        own = max(1, int(rank * dimension)) if isinstance(rank, float) else rank
        shared = vectors if setting.side == side else ()
        multiplicity = math.prod(shape) // dimension + len(shared)
        members = (site, *shared)
        sides.append(Side(site, side, dimension, counts[side], own, members, multiplicity, dtype))
    return sides


def as_pairs(sites: Any) -> tuple[tuple[str, Factors], ...] | None:
    """``sites`` as pairs (name, `Factors`); such pairs are accepted as well."""
    if sites is None:
        return None
    if isinstance(sites, Mapping):
        pairs = tuple(sites.items())
    elif isinstance(sites, tuple) and all(isinstance(pair, tuple) for pair in sites):
        pairs = sites
    else:
        pairs = tuple((name, Factors()) for name in check_names("sites", sites))
    if not pairs:
        raise ValueError("sites is empty: expected names, or None for all matrices")
    for name, setting in pairs:
        if not isinstance(name, str) or not isinstance(setting, Factors):
            raise TypeError(
                "sites must map names to Factors(...), such as {'w': Factors(left=0)}, got "
                f"{name!r}: {setting!r}"
            )
    return pairs


def check_names(label: str, names: Any) -> tuple[str, ...]:
    """A sequence of site names, as a tuple."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"{label} must be a sequence of names, got {names!r}")
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(f"{label} must be names of sites, got {wrong[0]!r}")
    return tuple(names)


def keep(settings: Any, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass. Only its own constructor may call this."""
    object.__setattr__(settings, name, value)
