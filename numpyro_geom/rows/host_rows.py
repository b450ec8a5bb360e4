"""HostRows: a model argument that replaces an array and keeps its rows on the host.

A traced index becomes a callback to the host, which gathers the rows (`fetch`). A loop over
minibatches knows which rows come next. It fetches the rows of many steps by one callback, while a
thread gathers the next rows (`rows.reader`), and passes them by `hints` to the `HostRows` that the
model indexes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from .._checks import check_number
from .._util import PyTree, num_at_once
from .mesh_rows import OverMesh
from .reader import NO_ROW, Reader, hints_of

PIECE = 16384
"""Entries of an index that travel to the host in one array. JAX copies arrays above 100 KiB in a
thread of the pool in which computations wait for the callback, and that can deadlock."""


class HostRows:
    """An array whose rows stay on the host; it replaces a device array in a model.

    The model indexes it by the rows of a plate, ``X[i]``, and only those rows travel to the device.
    The rows of the next minibatches are gathered while the device computes. The draws are the same
    as with ``jnp.asarray(array_like)``. Any operation that needs the whole array at once, for
    instance ``X @ w``, raises an error. A forked process cannot use it, because the thread that
    gathers the rows is not copied: start processes by ``spawn``.

    Args:
        array_like: a NumPy array or memmap, an array of Zarr or HDF5, or any other object with
            ``shape``, ``dtype`` (of numbers), and indexing by a slice and by an increasing array of
            rows. It must not change during a run.
        timeout: seconds that one gather of the source may take before the source counts as stalled;
            None for no limit.

    Attributes:
        source: the original array.
        timeout: as given.
        shape: of the array, when the object was made.
        reader: the object that gathers the rows.
        over: the mesh whose devices ask for rows, within a run on a mesh.

    Raises:
        TypeError: for an object that is not such an array.
        ValueError: for an array without rows; for a memory map of a file that was cut short.

    Examples:
        >>> import jax, numpy as np
        >>> from numpyro_geom import HostRows
        >>> X = HostRows(np.arange(6.0).reshape(3, 2))
        >>> X.shape, X.dtype
        ((3, 2), dtype('float32'))
        >>> jax.jit(lambda i: X[i])(np.array([2, 0])).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """

    __iter__ = None

    def __init__(self, array_like: Any, *, timeout: float | None = 300.0):
        timeout = None if timeout is None else check_number("timeout", timeout, above=0.0)
        _check_source(array_like)
        self.source, self.timeout = array_like, timeout
        self.shape = tuple(int(n) for n in array_like.shape)
        self.over: OverMesh | None = None
        name = f"HostRows of a {type(array_like).__name__} of shape {self.shape}"
        self.reader = Reader(array_like, name, self.shape, timeout)

    def over_mesh(self, over: OverMesh) -> HostRows:
        """The same rows with the same reader, for programs on a mesh."""
        new = object.__new__(HostRows)
        vars(new).update(vars(self), over=over)
        return new

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype:
        """Type of the entries on the device: 32 bits instead of 64 unless x64 is enabled."""
        return np.dtype(jax.dtypes.canonicalize_dtype(self.source.dtype)).newbyteorder("=")

    def blocks(self) -> Iterator[np.ndarray]:
        """All rows, in blocks; the next one is read ahead."""
        length, numbers = num_at_once(self.size // len(self)), range(len(self))
        for k in range(0, len(self), length):
            then = numbers[k + length : k + 2 * length]
            rows = np.asarray(numbers[k : k + length])
            yield self.reader.take(rows, self.dtype, np.asarray(then) if then else None)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"HostRows(<{type(self.source).__name__}>, shape={self.shape}, dtype={self.dtype})"

    def __reduce__(self) -> tuple:
        return partial(HostRows, timeout=self.timeout), (self.source,)

    def __getitem__(self, item: Any) -> jax.Array:
        """The rows; further indices (numbers and slices) select entries of them."""
        first, rest = (item[0], item[1:]) if isinstance(item, tuple) and item else (item, ())
        if isinstance(first, slice):
            first = jnp.arange(*first.indices(len(self)))
        index = first if isinstance(first, jax.Array) else np.asarray(first)
        if first is None or first is Ellipsis or index.dtype.kind not in "iu":
            raise TypeError(
                f"HostRows is indexed by row numbers, got {first!r}: expected integers or a slice, "
                "such as the rows of a plate, `X[i]`"
            )
        for part in rest:
            if not (part is None or part is Ellipsis or isinstance(part, (slice, int, np.integer))):
                raise TypeError(
                    "HostRows takes rows first, and then numbers or slices: for columns by an "
                    "array write `X[i][:, columns]`"
                )
        rows = self._rows(index)
        return rows[(slice(None),) * index.ndim + tuple(rest)] if rest else rows

    def _rows(self, index: Any) -> jax.Array:
        known = hints_of(index)
        for hint in known:
            if self in hint.rows:
                return hint.rows[self]
            if hint.used is not None and self not in hint.used:
                hint.used.append(self)
        # on a mesh each device gets its part, also of an index that is known during a trace
        if isinstance(index, jax.core.Tracer) or (
            isinstance(index, jax.Array) and self.over is not None
        ):
            return fetch(((self, 0),), (index,))[0]
        flat = np.asarray(index).reshape(-1)
        rows = self.reader.take(flat, self.dtype)
        return jnp.asarray(rows.reshape(np.shape(index) + self.shape[1:]))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be used as a whole: its rows stay on the host. Index it by the rows "
            "of a plate, `with numpyro.plate('data', len(X)) as i:` and `X[i]`; to take all of it "
            "to the device write `X[:]`"
        )

    __array__ = __jax_array__ = __bool__ = __pow__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


# no leaves: jit, vmap and MCMC treat it as part of the structure, equal only to itself
jax.tree_util.register_static(HostRows)


def is_host_rows(x: Any) -> bool:
    """Whether ``x`` is a HostRows; for ``is_leaf``, because a HostRows has no leaves."""
    return isinstance(x, HostRows)


def host_rows_in(tree: PyTree) -> list[HostRows]:
    """The HostRows in a pytree: they are in its structure and not among its leaves."""
    leaves = jax.tree.leaves(tree, is_leaf=is_host_rows)
    return list(dict.fromkeys(x for x in leaves if isinstance(x, HostRows)))


def check_read(sources: list[HostRows]) -> None:
    """Raise the error of a source that gave zeros instead of rows."""
    for x in sources:
        if x.reader.error is not None:
            raise x.reader.error


@contextmanager
def source_errors(tree: PyTree) -> Iterator[None]:
    """Raise the original error of a source of ``tree``, not the error that JAX made of it."""
    readers = [x.reader for x in host_rows_in(tree)]
    for reader in readers:
        reader.error = None
    try:
        yield
    except Exception:
        for reader in readers:
            if reader.error is not None:
                raise reader.error from reader.error.__cause__
        raise


# --- rows within a computation


def batches_at_once(sizes: Mapping[HostRows, int]) -> int:
    """For how many batches rows should travel together, given the rows per batch of each array."""
    return num_at_once(sum(n * max(128, x.size // len(x)) for x, n in sizes.items()))


def fetch(
    wanted: tuple[tuple[HostRows, int], ...],
    here: tuple,
    then: tuple = (),
    *,
    mapped: bool = False,
) -> tuple[jax.Array, ...]:
    """Rows by one callback to the host, also under `jax.vmap`; over a mesh by one of each device.

    ``wanted`` are pairs of an array and the place of its index in ``here``. ``then`` are indices
    that will be needed next; empty if they are not known. With ``mapped``, their first axis is the
    axis of a ``vmap``, such as chains.

    Returns:
        For each pair, rows of shape ``index.shape + X.shape[1:]``.
    """

    @custom_vmap
    def rows(here: tuple, then: tuple) -> tuple[jax.Array, ...]:
        over = wanted[0][0].over
        if over is None:
            return _call_host(wanted, here, then)
        call_host = partial(_call_host, wanted, raises=False)
        return over.rows(call_host, wanted, (here, then), mapped=mapped)

    @rows.def_vmap
    def batched_rows(size: int, batched: tuple, here: tuple, then: tuple) -> tuple:
        here, then = jax.tree.map(
            lambda x, yes: x if yes else jnp.broadcast_to(x, (size, *x.shape)),
            (here, then),
            tuple(batched),
        )
        found = fetch(wanted, here, then, mapped=True)
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


def _check_source(source: Any) -> None:
    expected = "HostRows expects an array of numbers on the host, of NumPy, Zarr or HDF5"
    kind, shape = type(source).__name__, getattr(source, "shape", None)
    known = all(hasattr(source, n) for n in ("shape", "dtype", "__getitem__"))
    if not known or isinstance(source, (jax.Array, HostRows, np.ma.MaskedArray)):
        raise TypeError(
            f"{expected}, got {kind}: pass `np.asarray(x)`, of a masked array `x.filled(value)`, "
            "and a jax.Array or HostRows to the model as it is"
        )
    if hasattr(source, "iloc") or getattr(source.dtype, "kind", None) not in [*"biufc"]:
        raise TypeError(
            f"{expected}, got {kind} of dtype {source.dtype}: convert it, for instance by "
            "`np.asarray(x, np.float32)`"
        )
    if not shape or not all(isinstance(n, (int, np.integer)) for n in shape):
        raise TypeError(f"{expected}, got {kind} of shape {shape}: expected rows to index")
    if shape[0] == 0:
        raise ValueError(f"{expected}, got shape {shape}: expected at least one row")
