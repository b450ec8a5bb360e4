"""Arrays by name, from pytrees and from ArviZ containers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Arrays = dict[str, np.ndarray]


class Scalars(NamedTuple):
    """Draws of scalars, with names such as ``w[0, 1]`` for an entry of an array."""

    names: tuple[str, ...]
    values: np.ndarray  # shape (chains, draws, scalars), float64

    def keep(self, flags: Any) -> Scalars:
        """Those that are flagged."""
        return Scalars(named(self.names, flags), self.values[..., np.asarray(flags)])


def named(names: Sequence[str], flags: Any) -> tuple[str, ...]:
    """Names that are flagged."""
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


def host(x: Any) -> np.ndarray:
    """A NumPy array of a type that can be stored."""
    array = np.asarray(jax.device_get(x))
    # bfloat16 and its like are unknown to xarray and netCDF
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def is_numeric(x: Any) -> bool:
    """Whether it is an array of numbers or of truth values."""
    return isinstance(x, (np.ndarray, jax.Array)) and (
        jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
    )


def paths(
    tree: PyTree, root: str, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """Leaves of a pytree, named by path; ``root`` comes before paths that start with a number."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        keys = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path]
        if not keys or not isinstance(keys[0], str):
            keys.insert(0, root)
        yield ".".join(map(str, keys)), leaf


def stored_name(name: Any) -> str:
    """What an export calls a site: netCDF reserves the slash."""
    return str(name).replace("/", ".")


def evenly(size: int, most: int) -> np.ndarray:
    """Numbers of up to ``most`` of so many entries, spread over all of them."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(int))


def entries(arrays: Mapping[str, np.ndarray], most: int | None = None) -> Scalars:
    """Entries of all variables side by side; of each up to ``most``, spread over all of them."""
    names: list[str] = []
    columns = []
    for name, x in arrays.items():
        flat = x.reshape((*x.shape[:2], -1))
        chosen = evenly(flat.shape[2], flat.shape[2] if most is None else most)
        indices = (np.unravel_index(k, x.shape[2:]) for k in chosen)
        names += [f"{name}[{', '.join(map(str, i))}]" if i else name for i in indices]
        columns.append(flat[..., chosen].astype(np.float64))
    return Scalars(tuple(names), np.concatenate(columns, axis=-1))


def chosen(names: str | Iterable[str], known: Iterable[str], what: str) -> list[str]:
    """The names of one or several variables, each once; an error for none and unknown ones."""
    given = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    missing = [name for name in given if name not in known]
    if not given:
        raise ValueError(f"expected names of variables, got none: {what} has {sorted(known)}")
    if missing:
        raise ValueError(f"{what} has no variables {missing}: it has {sorted(known)}")
    return given


def variables_of(dataset: Any) -> Arrays:
    """Variables of a Dataset, or DataTree node, that have chains and draws, these first."""
    return {
        str(name): x.transpose("chain", "draw", ...).values
        for name, x in dataset.data_vars.items()
        if {"chain", "draw"} <= set(x.dims)
    }


def numeric(arrays: Arrays) -> Arrays:
    """Those of numbers or truth values."""
    return {name: x for name, x in arrays.items() if x.dtype.kind in "biuf"}


def group_of(container: Any, name: str) -> Arrays:
    """Numeric variables of a group of an InferenceData or DataTree; none if it is missing."""
    return numeric(variables_of(container[name])) if hasattr(container, name) else {}


def real_numbers(name: str, value: Any, *, finite: bool = True) -> np.ndarray:
    """An array in 64 bits, finite unless said otherwise."""
    x = np.asarray(jax.device_get(value))
    if x.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be real numbers, got dtype {x.dtype}")
    if finite and not np.isfinite(x).all():
        raise ValueError(
            f"{name} must be finite, and {(~np.isfinite(x)).sum()} of {x.size} are not"
        )
    return x.astype(np.float64)
