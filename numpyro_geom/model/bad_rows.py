"""Values that are not finite: an error names the row or the site."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import random

from .._checks import check_choice, warn_outside
from .._util import PyTree, all_finite, in_trace, is_traced, num_at_once
from ..rows.host_rows import HostRows, host_rows_in, is_host_rows
from ..rows.reader import check_mapped
from .arguments import by_name
from .jaxprs import compiled

ON_BAD_ROWS = ("error", "keep")
NAMED = 10
"""Largest number of rows that an error names."""
SOME_ROWS = 1024
"""Number of rows with values that are not finite on which the model is tried."""


def check_rows(args: tuple, kwargs: dict[str, Any], on_bad_rows: str) -> None:
    """Raise for rows of the model's arguments that hold NaN.

    A row is an index of an array's first axis. ``on_bad_rows="keep"`` allows NaN.

    Raises:
        ValueError: for ``"error"`` and NaN; the message names arguments and rows.
    """
    check_choice("on_bad_rows", on_bad_rows, ON_BAD_ROWS)
    named = {"args": list(args), "kwargs": dict(kwargs)}
    _check_readable(named)
    _, told = _found(named, np.isnan) if on_bad_rows == "error" else ({}, "")
    if told:
        raise ValueError(
            f"the data hold NaN in {told}. Expected numbers: repair the rows, leave them out of "
            "all arrays, or pass on_bad_rows='keep' if the model masks them"
        )


def check_finite(
    model: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    energy: Callable[[dict[str, np.ndarray]], tuple] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Raise if rows with values that are not finite make the energy or its gradient not finite.

    ``energy`` maps the rows of each plate to the energy and its gradient; None if it is known to be
    not finite. ``sizes`` are those of the plates whose rows it takes. Rows that stay on the host
    are not checked.
    """
    if in_trace(args, kwargs):  # values are unknown
        return
    named = {n: x for n, x in by_name(model, args, kwargs).items() if not host_rows_in(x)}
    bad, told = _found(named, lambda x: ~np.isfinite(x))
    if energy is not None and bad:
        rows = {p: bad.get(n, np.arange(n))[:SOME_ROWS] for p, n in (sizes or {}).items()}
        bad = {} if bool(all_finite(energy(rows))) else bad
    if not bad:
        return
    raise ValueError(
        f"the data hold NaN or infinity in {told}, and the model's log density or its gradient is "
        "not finite there. Expected numbers: repair or drop the rows, or mask them and put finite "
        "values in place of the missing ones"
    )


def _check_readable(named: dict[str, Any]) -> None:
    """Check that arrays can be read, and warn of integers that the device cannot hold."""
    for name, array in _arrays(named, np.number):
        source = array.source if isinstance(array, HostRows) else array
        check_mapped(source, name)
        kept = jax.dtypes.canonicalize_dtype(source.dtype)
        if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.dtype != kept:
            limits = np.iinfo(kept)
            if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
                warn_outside(
                    f"{name} holds whole numbers beyond {kept}, which become other numbers on the "
                    "device. Expected numbers within its range: enable 64 bits, "
                    "`jax.config.update('jax_enable_x64', True)`, if the model uses them there",
                    RuntimeWarning,
                )


def _found(named: dict[str, Any], is_bad: Callable) -> tuple[dict[int, np.ndarray], str]:
    """Bad rows, by the number of rows of the arrays that hold them, and a text that names them."""
    bad: dict[int, np.ndarray] = {}
    told = []
    for name, array in _arrays(named, np.floating):
        rows = _bad_rows(array, is_bad)
        if len(rows):
            told.append(f"{name}: {listed(rows)} of {array.shape[0]}")
            found = bad.get(array.shape[0], np.zeros(0, int))
            bad[array.shape[0]] = np.union1d(found, rows)
    return bad, "; ".join(told)


def _arrays(named: dict[str, Any], kind: Any) -> Iterator[tuple[str, Any]]:
    for root, tree in named.items():
        leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_host_rows)[0]
        for path, leaf in leaves:
            here = getattr(leaf, "is_fully_addressable", True)  # others' parts cannot be read
            if here and isinstance(leaf, (np.ndarray, jax.Array, HostRows)) and leaf.shape:
                if jnp.issubdtype(leaf.dtype, kind):
                    yield root + jax.tree_util.keystr(path), leaf


def _bad_rows(array: Any, is_bad: Callable) -> np.ndarray:
    """Indices of rows with a bad entry (NaN, for instance); reads one part at a time."""
    if isinstance(array, jax.Array) and bool(compiled(all_finite, array)):
        return np.zeros(0, int)
    numbers = range(array.shape[0])
    width = math.prod(array.shape[1:])
    step = num_at_once(width)
    found = []
    for k in range(0, len(numbers), step):
        rows = numbers[k : k + step]
        if isinstance(array, HostRows):
            part = array.reader.take(np.asarray(rows), array.dtype)
        else:
            part = np.asarray(array[rows.start : rows.stop])
        part = part.reshape(-1, width)
        # a sum that is not finite means a bad entry or an overflow: check the entries there
        with np.errstate(all="ignore"):
            suspects = np.flatnonzero(~np.isfinite(part.sum(1)))
        bad = is_bad(part[suspects]).any(1)
        found.append(rows.start + suspects[bad])
    return np.concatenate(found) if found else np.zeros(0, int)


def listed(rows: np.ndarray) -> str:
    """A text that names the first of some rows."""
    text = ", ".join(map(str, rows[:NAMED]))
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return f"row{'s' if len(rows) > 1 else ''} {text}{more}"


def fault_at(model: Any, position: PyTree) -> str:
    """Which site makes the energy not finite at a position of one chain; empty if none is found."""
    if model is None or model.on_host or is_traced((position, model.args, model.kwargs)):
        return ""
    with numpyro.validation_enabled(False):
        trace = model.trace(position, unconstrained=True, rng_key=random.key(0))
        for name, site in trace.items():
            if site["type"] != "sample":
                continue
            if not site["is_observed"] and not np.all(np.isfinite(site["value"])):
                return (
                    f"site {name!r} has the value {farthest(site['value'])}, for "
                    f"{farthest(position.get(name, np.nan))} in its unconstrained space: give it a "
                    "start that is less far out"
                )
            if not np.all(np.isfinite(site["fn"].log_prob(site["value"]))):
                return f"the log density of site {name!r} is not finite there"
    return ""


def farthest(values: Any) -> str:
    """The entry of an array that is not finite, or is farthest from 0."""
    flat = np.ravel(np.asarray(values, float))
    return f"{flat[np.argmax(np.where(np.isfinite(flat), np.abs(flat), np.inf))]:.3g}"
