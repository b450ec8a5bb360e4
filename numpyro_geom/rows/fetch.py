"""Rows from the host within a computation, with as few callbacks as possible.

A loop over minibatches knows which rows come next. It fetches the rows of many steps at once and
passes them by `hints` to the `HostRows` that the model indexes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from .reader import NO_ROW

HostRows = Any
"""`numpyro_geom.HostRows`."""
PIECE = 16384
"""Entries of an index that travel to the host in one array. JAX copies arrays above 100 KiB in a
thread of the pool in which computations wait for the callback, and that can deadlock."""

BLOCK_ROWS = 65536
"""Rows that travel from the host at once, over all their batches and arrays."""
BLOCK_BYTES = 2**25
"""Bytes that travel from the host at once."""
BLOCK_BATCHES = 64
"""Batches whose rows travel from the host at once."""


class Hint(NamedTuple):
    """What is known about an index with which a model will request rows.

    Attributes:
        index: the traced index.
        rows: rows that are on the device already.
        used: a list that collects the arrays that were indexed.
        ordered: whether it has one row from each of equal stretches of all rows, in their order.
    """

    index: Any
    rows: Mapping[HostRows, jax.Array] = {}
    used: list[HostRows] | None = None
    ordered: bool = False


_hints: ContextVar[list[Hint]] = ContextVar("hints", default=[])  # noqa: B039, never changed


@contextmanager
def hints(*given: Hint) -> Iterator[None]:
    """Tell `HostRows` what is known about an index while a model is traced."""
    token = _hints.set([*given, *_hints.get()])
    try:
        yield
    finally:
        _hints.reset(token)


def hint_part(index: jax.Array, part: jax.Array, start: int, stop: int) -> None:
    """Pass what is known about an index on to a slice of it."""
    for hint in hints_of(index):
        if hint.rows:
            rows = {x: found[start:stop] for x, found in hint.rows.items()}
            _hints.get().append(Hint(part, rows))


def hints_of(index: Any) -> list[Hint]:
    """What is known about an index."""
    return [hint for hint in _hints.get() if hint.index is index]


def batches_at_once(sizes: Mapping[HostRows, int]) -> int:
    """For how many batches rows should travel together, given the rows per batch of each array."""
    rows = sum(sizes.values())
    size = sum(n * x.dtype.itemsize * (x.size // len(x)) for x, n in sizes.items())
    return max(1, min(BLOCK_BATCHES, BLOCK_ROWS // rows, BLOCK_BYTES // max(1, size)))


def fetch(
    wanted: tuple[tuple[HostRows, int], ...],
    here: tuple,
    then: tuple = (),
    *,
    ordered: bool = False,
    mapped: bool = False,
) -> tuple[jax.Array, ...]:
    """Rows by one callback to the host, also under `jax.vmap`; over a mesh by one of each device.

    Args:
        wanted: pairs of an array and the place of its index in ``here``.
        here: traced indices of any shape.
        then: indices that will be needed next; empty if they are not known.
        ordered: whether each index has one row from each of equal stretches, in their order.
        mapped: whether the first axis of the indices is that of a ``vmap``, such as over chains.

    Returns:
        For each pair, rows of shape ``index.shape + X.shape[1:]``.
    """

    @custom_vmap
    def rows(here: tuple, then: tuple) -> tuple[jax.Array, ...]:
        over = wanted[0][0].over
        if over is None:
            return _call_host(wanted, here, then)
        call_host = partial(_call_host, raises=False)
        return over.rows(call_host, wanted, (here, then), ordered=ordered, mapped=mapped)

    @rows.def_vmap
    def batched_rows(size: int, batched: tuple, here: tuple, then: tuple) -> tuple:
        here, then = jax.tree.map(
            lambda x, yes: x if yes else jnp.broadcast_to(x, (size, *x.shape)),
            (here, then),
            tuple(batched),
        )
        found = fetch(wanted, here, then, ordered=ordered, mapped=True)
        return found, (True,) * len(wanted)

    return rows(here, then)


def _call_host(
    wanted: tuple, here: tuple, then: tuple, raises: bool = True
) -> tuple[jax.Array, ...]:
    """Rows by one callback. Without ``raises``, an error gives zeros and is kept in a reader."""
    # plain values, because the callback must not call JAX
    rows = [(x.reader, k, x.dtype, here[k].shape + x.shape[1:]) for x, k in wanted]

    def on_host(here: list, then: list) -> tuple[np.ndarray, ...]:
        now = [np.concatenate(pieces) for pieces in here]
        # no rows: the loop is at its end
        soon = [p if (p != NO_ROW).any() else None for p in map(np.concatenate, then)]
        soon = soon or [None] * len(now)
        # all gathers begin before the first wait
        for reader, k, dtype, _ in rows[1:]:
            reader.prepare(now[k], dtype)
        return tuple(
            _sent(reader.take(now[k], dtype, soon[k]).reshape(shape))
            for reader, k, dtype, shape in rows
        )

    def on_host_or_zeros(here: list, then: list) -> tuple[np.ndarray, ...]:
        readers = [reader for reader, *_ in rows]
        try:
            if all(reader.error is None for reader in readers):
                return on_host(here, then)
        except Exception as error:
            if all(reader.error is None for reader in readers):
                readers[0].error = error
        return tuple(_sent(np.zeros(shape, dtype)) for _, _, dtype, shape in rows)

    shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for _, _, dtype, shape in rows)
    out = tuple(
        jax.ShapeDtypeStruct((*x.shape, 2), np.uint32) if _is_wide(x) else x for x in shapes
    )
    pieces = [list(map(_pieces, indices)) for indices in (here, then)]
    function = on_host if raises else on_host_or_zeros
    found = jax.pure_callback(function, out, *pieces, vmap_method="sequential")
    return tuple(
        lax.bitcast_convert_type(x, like.dtype) if _is_wide(like) else x
        for x, like in zip(found, shapes, strict=True)
    )


def _is_wide(x: Any) -> bool:
    """Whether the array is sent as pairs of words.

    JAX rounds 64 bits from the host in threads, where ``jax.enable_x64()`` has no effect.
    """
    return x.dtype.itemsize == 8 and x.dtype.kind in "iuf"


def _sent(x: np.ndarray) -> np.ndarray:
    return x[..., np.newaxis].view(np.uint32) if _is_wide(x) else x


def _pieces(index: jax.Array) -> list[jax.Array]:
    flat = index.reshape(-1).astype(jnp.int32)
    return [flat[k : k + PIECE] for k in range(0, flat.size, PIECE)] or [flat]
