"""Named arrays, from pytrees and from ArviZ containers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_names

PyTree = Any
Arrays = dict[str, np.ndarray]


class Scalars(NamedTuple):
    """Draws of scalars, with names such as ``w[0, 1]`` for an entry of an array."""

    names: tuple[str, ...]
    values: np.ndarray  # shape (chains, draws, scalars), float64

    def keep(self, flags: Any) -> Scalars:
        """The scalars whose flag is True."""
        return Scalars(named(self.names, flags), self.values[..., np.asarray(flags)])


def named(names: Sequence[str], flags: Any) -> tuple[str, ...]:
    """The names whose flag is True."""
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


def host(x: Any) -> np.ndarray:
    """A NumPy array of a type that can be stored."""
    array = np.asarray(jax.device_get(x))
    # xarray and netCDF do not support bfloat16 and similar types
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def is_numeric(x: Any) -> bool:
    """Whether ``x`` is an array of numbers or booleans."""
    return isinstance(x, (np.ndarray, jax.Array)) and (
        jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
    )


def paths(
    tree: PyTree, root: str, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """Leaves of a pytree, named by path; ``root`` is put before paths that start with a number."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        keys = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path]
        if not keys or not isinstance(keys[0], str):
            keys.insert(0, root)
        yield ".".join(map(str, keys)), leaf


def stored_name(name: Any) -> str:
    """The name of a site in an export; netCDF reserves the slash."""
    return str(name).replace("/", ".")


def evenly(size: int, most: int) -> np.ndarray:
    """Up to ``most`` indices of ``size`` entries, evenly spaced."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(int))


def entries(arrays: Mapping[str, np.ndarray], most: int | None = None) -> Scalars:
    """Entries of all variables side by side; up to ``most`` evenly spaced entries of each."""
    names: list[str] = []
    columns = []
    for name, x in arrays.items():
        flat = x.reshape((*x.shape[:2], -1))
        chosen = evenly(flat.shape[2], flat.shape[2] if most is None else most)
        indices = (np.unravel_index(k, x.shape[2:]) for k in chosen)
        names += [f"{name}[{', '.join(map(str, i))}]" if i else name for i in indices]
        columns.append(flat[..., chosen].astype(np.float64))
    return Scalars(tuple(names), np.concatenate(columns, axis=-1))


def chosen(names: Any, known: Iterable[str], what: str) -> list[str]:
    """The names of one or several variables, each once; an error for no names and unknown names."""
    given = check_names("var_names", names)
    missing = [name for name in given if name not in known]
    if not given:
        raise ValueError(f"expected names of variables, got none: {what} has {sorted(known)}")
    if missing:
        raise ValueError(f"{what} has no variables {missing}: it has {sorted(known)}")
    return given


def variables_of(dataset: Any) -> Arrays:
    """Variables of a Dataset or DataTree node with chains and draws, as their first axes."""
    return {
        str(name): x.transpose("chain", "draw", ...).values
        for name, x in dataset.data_vars.items()
        if {"chain", "draw"} <= set(x.dims)
    }


def numeric(arrays: Arrays) -> Arrays:
    """The arrays of numbers or booleans."""
    return {name: x for name, x in arrays.items() if x.dtype.kind in "biuf"}


def group_of(container: Any, name: str) -> Arrays:
    """Numeric variables of a group of an InferenceData or DataTree; empty without the group."""
    return numeric(variables_of(container[name])) if hasattr(container, name) else {}


def as_array(name: str, value: Any) -> np.ndarray:
    """The value as a NumPy array."""
    try:
        return np.asarray(jax.device_get(value))
    except (TypeError, ValueError) as error:  # keys; lists of unequal length
        raise TypeError(
            f"{name} must be an array, got {type(value).__name__}, which NumPy cannot read: {error}"
        ) from None


def real_numbers(name: str, value: Any, *, finite: bool = True) -> np.ndarray:
    """The value as a float64 array; it must be finite unless ``finite`` is False."""
    x = as_array(name, value)
    if x.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be real numbers, got dtype {x.dtype}")
    if finite and not np.isfinite(x).all():
        raise ValueError(
            f"{name} must be finite, and {(~np.isfinite(x)).sum()} of {x.size} are not"
        )
    return x.astype(np.float64)
