"""Rows of an array on the host: gathered by a thread, ahead of time where that can be told.

Nothing here is JAX's: what runs inside a computation must not call it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import numpy as np

MAX_COMING = 32
"""Gathers that may wait for someone to ask for them; the oldest is dropped."""


class Reader:
    """Gathers rows of a source in a thread of its own; errors name the source."""

    def __init__(self, source: Any, name: str, timeout: float | None):
        self.source, self.name, self.timeout = source, name, timeout
        self.error: Exception | None = None
        self._gather = _gather_for(source)
        self._coming: OrderedDict[Any, Future] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()

    def prepare(self, index: np.ndarray, dtype: Any) -> None:
        """Begin to gather rows for which `take` will ask."""
        with self._lock:
            self._start(_key(index, dtype), index, dtype)

    def take(self, index: np.ndarray, dtype: Any, then: np.ndarray | None = None) -> np.ndarray:
        """The rows of a flat index, in its order; ``then`` says which will be wanted next.

        Raises:
            RuntimeError: if the source raises, from what it raised.
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
            if self._thread is None or not self._thread.is_alive():  # none after a fork
                self._jobs = queue.SimpleQueue()
                self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
                self._thread.start()
                weakref.finalize(self, self._jobs.put, None)
            self._jobs.put((future, self.read, index, dtype))
        return future

    def read(self, index: np.ndarray, dtype: Any) -> np.ndarray:
        """The rows of a flat index, here and now."""
        size = self.source.shape[0]
        if len(index) and (index.min() < 0 or index.max() >= size):  # as JAX indexes
            index = np.clip(np.where(index < 0, index + size, index), 0, size - 1)
        rows = np.asarray(self._gather(self.source, index))
        expected = (len(index), *self.source.shape[1:])
        if rows.shape != expected:
            raise ValueError(f"the source gave rows of shape {rows.shape}, expected {expected}")
        return np.ascontiguousarray(rows, dtype)

    def _explained(self, error: Exception, index: np.ndarray, done: bool) -> Exception:
        rows = f"{len(index)} rows from {index.min()} to {index.max()}"
        if done:
            return RuntimeError(
                f"{self.name} could not read {rows}: {type(error).__name__}: {error}"
            )
        with self._lock:  # the thread may never come back: the next gather gets a new one
            self._jobs.put(None)
            self._thread = None
            self._coming.clear()
        return TimeoutError(
            f"{self.name} did not read {rows} within {self.timeout:g} seconds: see whether the "
            "source (a network drive?) is there, or pass a larger `timeout` to HostRows"
        )


def _key(index: np.ndarray, dtype: Any) -> Any:
    return index.tobytes(), np.dtype(dtype).str


def _serve(jobs: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        future, read, index, dtype = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(read(index, dtype))
            except BaseException as error:
                future.set_exception(error)
        # a thread that waits must not keep rows or their source
        del job, future, read, index, dtype


def _gather_for(source: Any) -> Any:
    """How to get rows from this kind of source."""
    if isinstance(source, np.ndarray):
        return _from_numpy
    return _by_increasing_rows if _takes_arrays(source) else _row_by_row


def _takes_arrays(source: Any) -> bool:
    """Whether a source can be indexed by an array of rows, increasing and without repeats."""
    last = source.shape[0] - 1
    index = np.unique([0, last // 2, last])
    try:
        return np.shape(_orthogonal(source)[index]) == (len(index), *source.shape[1:])
    except (TypeError, IndexError, KeyError, ValueError, NotImplementedError):
        return False


def _orthogonal(source: Any) -> Any:
    return getattr(source, "oindex", source)  # Zarr's name of it


def _from_numpy(source: np.ndarray, index: np.ndarray) -> np.ndarray:
    run = _stretch(index)
    return source[run] if run is not None else source.take(index, axis=0, mode="clip")


def _by_increasing_rows(source: Any, index: np.ndarray) -> np.ndarray:
    run = _stretch(index)
    if run is not None:
        return source[run]
    rows, where = np.unique(index, return_inverse=True)
    run = _stretch(rows)
    return np.asarray(source[run] if run is not None else _orthogonal(source)[rows])[where]


def _row_by_row(source: Any, index: np.ndarray) -> np.ndarray:
    return np.stack([np.asarray(source[row]) for row in index.tolist()])


def _stretch(index: np.ndarray) -> slice | None:
    """The slice that an index is, if it is one without a step."""
    if not len(index) or index[-1] - index[0] != len(index) - 1:
        return None
    if len(index) > 1 and not (np.diff(index) == 1).all():
        return None
    return slice(int(index[0]), int(index[-1]) + 1)
