"""Rows of an array on the host, gathered by a thread, in advance if the next rows are known.

This module does not use JAX, because code that runs inside a computation must not call JAX.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import numpy as np

MAX_COMING = 32
"""Largest number of gathers that wait for a `take`; beyond it, the oldest is dropped."""


NO_ROW = int(np.iinfo(np.int32).min)
"""A number in an index that asks for no row, after the last step; it gives zeros."""


class Reader:
    """Gathers rows of a source in its own thread; errors name the source.

    The source's shape is fixed at the start, even if the source grows.

    ``timeout`` is in seconds for one gather.
    """

    def __init__(self, source: Any, name: str, shape: tuple[int, ...], timeout: float | None):
        self.source, self.name, self.shape, self.timeout = source, name, shape, timeout
        self.error: Exception | None = None
        self._coming: OrderedDict[Any, Future] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        if isinstance(source, np.ndarray):
            check_mapped(source, name)

    def prepare(self, index: np.ndarray, dtype: Any) -> None:
        """Begin to gather rows that `take` will request."""
        with self._lock:
            self._start(_key(index, dtype), index, dtype)

    def take(self, index: np.ndarray, dtype: Any, then: np.ndarray | None = None) -> np.ndarray:
        """The rows of a flat index, in its order; ``then`` is the index of the next request.

        Raises:
            RuntimeError: if the source raises; the source's error is its cause.
            TimeoutError: if it takes longer than ``timeout``.
        """
        key = _key(index, dtype)
        with self._lock:
            future = self._start(key, index, dtype)
            self._coming.pop(key, None)
        if then is not None:
            self.prepare(then, dtype)
        try:
            return future.result(self.timeout)
        except Exception as error:
            self.error = self._explained(error, index, future.done())
            raise self.error from (error if future.done() else None)

    def _start(self, key: Any, index: np.ndarray, dtype: Any) -> Future:
        future = self._coming.get(key)
        if future is None:
            future = self._coming[key] = Future()
            if len(self._coming) > MAX_COMING:
                self._coming.popitem(last=False)[1].cancel()
            self._submit(future, self.read, index, dtype)
        return future

    def _submit(self, future: Future, function: Callable, *args: Any) -> None:
        """Let the thread call a function."""
        if self._thread is None or not self._thread.is_alive():
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put((future, function, args))

    def read(self, index: np.ndarray, dtype: Any) -> np.ndarray:
        """The rows of a flat index, read in this thread; zeros for `NO_ROW`.

        Raises:
            ValueError: for rows of another shape, and for values that the type cannot hold.
        """
        there = index != NO_ROW
        if not there.all():
            found = np.zeros((len(index), *self.shape[1:]), dtype)
            if there.any():
                found[there] = self.read(index[there], dtype)
            return found
        size = self.shape[0]
        if len(index) and (index.min() < 0 or index.max() >= size):  # as JAX indexes
            index = np.clip(np.where(index < 0, index + size, index), 0, size - 1)
        check_mapped(self.source, "the array")
        rows = np.asarray(_gathered(self.source, index))
        expected = (len(index), *self.shape[1:])
        if rows.shape != expected:
            raise ValueError(f"the source gave rows of shape {rows.shape}, expected {expected}")
        return _converted(_converted(rows, np.dtype(self.source.dtype)), np.dtype(dtype))

    def _explained(self, error: Exception, index: np.ndarray, done: bool) -> Exception:
        index = index[index != NO_ROW]
        rows = f"{len(index)} rows"
        if len(index):  # otherwise it has waited for other rows
            rows += f" from {index.min()} to {index.max()}"
        if not done:
            return self._stalled(rows)
        return RuntimeError(f"{self.name} could not read {rows}: {type(error).__name__}: {error}")

    def _stalled(self, rows: str) -> TimeoutError:
        with self._lock:  # the thread may never return: the next gather uses a new thread
            self._jobs.put(None)
            self._thread = None
            self._coming.clear()
        return TimeoutError(
            f"{self.name} did not read {rows} within {self.timeout:g} seconds: see whether the "
            "source (a network drive?) is there, or pass a larger `timeout` to HostRows"
        )


def check_mapped(array: Any, name: str) -> None:
    """Raise a ValueError if the file under a memory map is shorter than the map.

    Reading beyond the end of the file would end the process by SIGBUS, or give zeros.
    """
    offset, base = 0, array
    while base is not None and not isinstance(base, mmap.mmap):
        offset = base.offset if isinstance(base, np.memmap) else offset
        base = base.base if isinstance(base, np.ndarray) else getattr(base, "obj", None)
    if base is None:
        return
    # a map begins at the start of a page
    expected = offset - offset % mmap.ALLOCATIONGRANULARITY + len(base)
    found = base.size()
    if found < expected:
        raise ValueError(
            f"the file under {name} has {found} bytes, and {expected} were mapped: it was cut "
            "short. Expected a file that does not change: restore it, and map it again"
        )


def _converted(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rows in another type; values may change only by rounding."""
    if rows.dtype == dtype:
        return np.ascontiguousarray(rows)
    is_number = rows.dtype.kind in "biufc"
    if is_number and (rows.dtype.kind != "c" or dtype.kind == "c"):
        with contextlib.suppress(FloatingPointError), np.errstate(over="raise", invalid="ignore"):
            found = np.ascontiguousarray(rows, dtype)
            exact = dtype.kind in "fc" or np.can_cast(rows.dtype, dtype)
            if exact or (found == rows).all():
                return found
    advice = ", or enable 64 bits, `jax.config.update('jax_enable_x64', True)`" if is_number else ""
    raise ValueError(
        f"the source gave values of type {rows.dtype} that {dtype} cannot hold: expected numbers "
        f"within its range. Convert or scale them{advice}"
    )


def _key(index: np.ndarray, dtype: Any) -> Any:
    return index.tobytes(), np.dtype(dtype).str


def _serve(jobs: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        future, function, args = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # otherwise an error in a thread would be lost
                future.set_exception(RuntimeError(f"it raised {error!r}"))
        # a waiting thread must not keep rows or their source in memory
        del job, future, function, args


def _gathered(source: Any, index: np.ndarray) -> Any:
    """Rows in the order of an index; other sources than NumPy's see increasing rows only."""
    run = _stretch(index)
    if run is not None:
        return source[run]
    if isinstance(source, np.ndarray):
        return source.take(index, axis=0, mode="clip")
    rows, where = np.unique(index, return_inverse=True)
    run = _stretch(rows)
    orthogonal = getattr(source, "oindex", source)  # the attribute of Zarr arrays
    return np.asarray(source[run] if run is not None else orthogonal[rows])[where]


def _stretch(index: np.ndarray) -> slice | None:
    """The slice with step 1 that equals an index, or None."""
    if not len(index) or index[-1] - index[0] != len(index) - 1:
        return None
    if len(index) > 1 and not (np.diff(index) == 1).all():
        return None
    return slice(int(index[0]), int(index[-1]) + 1)


# What is known about the index by which a model asks for rows, while the model is traced


class Hint(NamedTuple):
    """What is known about an index with which a model will request rows.

    Attributes:
        index: the traced index.
        rows: rows of `HostRows` that are on the device already.
        used: a list that collects the `HostRows` that were indexed.
        ordered: whether it has one row from each of equal stretches of all rows, in their order.
    """

    index: Any
    rows: Mapping[Any, jax.Array] = {}
    used: list | None = None
    ordered: bool = False


_hints: ContextVar[list[Hint]] = ContextVar("hints", default=[])  # noqa: B039, never changed


@contextmanager
def hints(*given: Hint) -> Iterator[None]:
    """Tell `HostRows` and `MeshRows` what is known about an index while a model is traced."""
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
