"""Several processes that do one run: what the first decides and reads, all of them know.

Only the first process touches the run's directory. What it finds there, and whether it could
write, goes to the others, so that an error in one is an error in all and nobody waits for ever.
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

from .keys import as_words, from_words

PyTree = Any


class Alone:
    """The only process of a run."""

    several = False
    is_first = True

    def first(self, function: Callable[[], Any]) -> Any:
        """What a function returns in the first process, as JSON has it; or the error it raises."""
        return function()

    def all(self, function: Callable[[], None]) -> None:
        """Call a function in each process; an error in one of them is an error in all."""
        function()

    def spread(self, state: PyTree) -> PyTree:
        """Arrays and keys of the first process."""
        return state

    def signal(self, name: str | None) -> str | None:
        """The signal that this process was sent, or another one of them."""
        return name


class Together(Alone):
    """One of several processes, all of which call the same methods in the same order."""

    several = True

    def __init__(self) -> None:
        self.is_first = jax.process_index() == 0

    def first(self, function: Callable[[], Any]) -> Any:
        """What a function returns in the first process, as JSON has it; or the error it raises."""
        error: Exception | None = None
        found: dict[str, Any] = {}
        if self.is_first:
            try:
                found = {"value": function()}
            except Exception as caught:
                error, found = caught, {"error": type(caught).__name__, "text": str(caught)}
        found = self._tell(found)
        if error is not None:
            raise error
        if "error" in found:
            kind = getattr(builtins, found["error"], RuntimeError)
            raise kind(f"{found['text']} (in process 0)")
        return found["value"]

    def all(self, function: Callable[[], None]) -> None:
        """Call a function in each process; an error in one of them is an error in all."""
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

    def spread(self, state: PyTree) -> PyTree:
        """Arrays and keys of the first process."""
        words = multihost_utils.broadcast_one_to_all(jax.tree.map(as_words, state))
        return jax.tree.map(
            lambda x, like: from_words(np.asarray(x, as_words(like).dtype), like), words, state
        )

    def signal(self, name: str | None) -> str | None:
        """The signal that this process was sent, or another one of them."""
        number = int(self._gather(0 if name is None else signal.Signals[name].value).max())
        return signal.Signals(number).name if number else None

    def _tell(self, value: Any) -> Any:
        content = np.frombuffer(json.dumps(value).encode(), np.uint8)
        size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
        if not self.is_first:
            content = np.zeros(size, np.uint8)
        return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(content)).tobytes())

    def _gather(self, number: int | bool) -> np.ndarray:
        return np.asarray(multihost_utils.process_allgather(np.int32(number))).reshape(-1)
