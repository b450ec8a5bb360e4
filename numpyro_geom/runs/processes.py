"""Several processes for one run: the first one decides and reads, and informs the others.

Only the first process uses the run's directory. It sends what it finds there, and whether it could
write, to the others. So an error in one process is an error in all, and no process waits forever.
"""

from __future__ import annotations

import builtins
import json
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._util import PyTree, from_words, words


class Processes:
    """The processes of a run; all of them call the same methods in the same order.

    Attributes:
        several: whether there are several processes.
        is_first: whether this is the first process.
    """

    def __init__(self, several: bool) -> None:
        self.several = several
        self.is_first = not several or jax.process_index() == 0

    def first(self, function: Callable[[], Any]) -> Any:
        """A function's result in the first process, in JSON types, or the error that it raises."""
        if not self.several:
            return function()
        error: Exception | None = None
        found: dict[str, Any] = {}
        if self.is_first:
            try:
                found = {"value": function()}
            except Exception as caught:
                error, found = caught, {"error": type(caught).__name__, "text": str(caught)}
        content = np.frombuffer(json.dumps(found).encode(), np.uint8)
        size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
        if not self.is_first:
            content = np.zeros(size, np.uint8)
        content = np.asarray(multihost_utils.broadcast_one_to_all(content))
        found = json.loads(content.tobytes())
        if error is not None:
            raise error
        if "error" in found:
            kind = getattr(builtins, found["error"], RuntimeError)
            raise kind(f"{found['text']} (in process 0)")
        return found["value"]

    def all(self, function: Callable[[], None]) -> None:
        """Call a function in each process; an error in one process is an error in all."""
        if not self.several:
            return function()
        error = None
        try:
            function()
        except Exception as caught:
            error = caught
        failed = self._gather(error is not None)
        if error is not None:
            raise error
        if failed.any():
            where = ", ".join(str(k) for k in np.flatnonzero(failed))
            raise RuntimeError(f"another process of the run failed: see what process {where} says")
        return None

    def spread(self, state: PyTree) -> PyTree:
        """Send arrays and keys of the first process to all processes."""
        if not self.several:
            return state
        plain = multihost_utils.broadcast_one_to_all(jax.tree.map(words, state))
        return jax.tree.map(
            lambda x, like: from_words(np.asarray(x, words(like).dtype), like), plain, state
        )

    def each(self, text: str) -> list[str]:
        """The texts of all processes, which have the same length."""
        if not self.several:
            return [text]
        words = np.frombuffer(text.encode(), np.uint8)
        return [x.tobytes().decode() for x in multihost_utils.process_allgather(words)]

    def signal(self, noted: list[str]) -> str | None:
        """The last signal that this process got, or one that another process got."""
        if not self.several:
            return noted[-1] if noted else None
        number = int(self._gather(signal.Signals[noted[-1]].value if noted else 0).max())
        return signal.Signals(number).name if number else None

    def _gather(self, number: int | bool) -> np.ndarray:
        return np.asarray(multihost_utils.process_allgather(np.int32(number))).reshape(-1)
