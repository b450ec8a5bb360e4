"""What is known about the index by which a model asks for rows, while the model is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax


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
