"""Checkpoints: the state of a chain after each segment, as arrays with a checksum.

A checkpoint is an ``.npz`` of plain arrays, read without pickle. Its structure is not stored: it
is that of the state that the kernel's ``init`` makes, so that nothing read from disk decides
what is built.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._util import PyTree, from_words, words
from .files import own_folder, remove, remove_temporaries, write_atomically
from .fingerprint import warn

KEEP_EVERY = 10
"""Of the checkpoints before the last two, those with a number that this divides are kept."""


class Checkpoint(NamedTuple):
    """A position in a run.

    Attributes:
        number: segments done, those of warm-up included.
        state: the kernel's state.
        record: what else there is to know of the run, as JSON can hold it.
    """

    number: int
    state: PyTree
    record: dict[str, Any]


class DamagedError(ValueError):
    """A file whose content does not agree with its checksum or its place."""


class Checkpoints:
    """The checkpoints of a run, in one folder, which is made if it is missing.

    What a checkpoint is of, the run and the number of segments, is in its record: neither a file
    with another name nor one of another run is taken for it. ``run`` names the run; "" for any.
    """

    def __init__(self, folder: Path, run: str | None = "") -> None:
        self.folder, self.run = folder, run
        own_folder(folder)
        remove_temporaries(folder)

    def numbers(self) -> list[int]:
        """Those that are there, damaged ones included, the newest first."""
        found = (re.fullmatch(r"(\d{8,})\.npz", path.name) for path in self.folder.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write one in full or not at all, and let go of old ones."""
        arrays = {f"leaf_{k}": _stored(x) for k, x in enumerate(jax.tree.leaves(checkpoint.state))}
        record = {**checkpoint.record, "number": checkpoint.number}
        arrays["record"] = np.frombuffer(json.dumps(record).encode(), np.uint8)
        arrays["sha256"] = np.frombuffer(_digest(arrays), np.uint8)
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        write_atomically(self._path(checkpoint.number), buffer.getbuffer())
        newest = self.numbers()
        for number in newest[2:]:
            if number % KEEP_EVERY:
                remove(self._path(number))

    def newest(self, read: Callable[[int], Any], at_most: float = math.inf) -> Any:
        """What a function returns for the newest that it can read, warning of others; or None."""
        for number in self.numbers():
            if number <= at_most:
                try:
                    return read(number)
                except DamagedError as error:
                    warn(f"{error}: the run goes on from an earlier state")
        return None

    def record(self, number: int) -> dict[str, Any]:
        """What is known of the run, without the state."""
        return self._read(number)[1]

    def load(self, number: int, like: PyTree) -> Checkpoint:
        """Read one, whose state has the structure, shapes and types of another.

        Raises:
            DamagedError: if the file is damaged.
            ValueError: if it holds a state of another form.
        """
        arrays, record = self._read(number)
        leaves, structure = jax.tree.flatten(like)
        if len(arrays) == len(leaves):
            found = [_restored(arrays[f"leaf_{k}"], x) for k, x in enumerate(leaves)]
        if len(arrays) != len(leaves) or any(x is None for x in found):
            raise ValueError(
                f"{self._path(number)} holds a state of another form than the kernel's: it was "
                "saved by another version of numpyro_geom or NumPyro. Go on with that version, or "
                "begin anew in another directory"
            )
        return Checkpoint(number, jax.tree.unflatten(structure, found), record)

    def _read(self, number: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        path = self._path(number)
        try:
            # opened here, because NumPy leaves a file open that it cannot read
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            digest = arrays.pop("sha256").tobytes()
            intact = digest == _digest(arrays)
            record = json.loads(arrays.pop("record").tobytes()) if intact else {}
        except Exception as error:  # whatever a reader makes of flipped bits
            raise DamagedError(f"{path} cannot be read ({error})") from error
        if not intact:
            raise DamagedError(f"{path} does not agree with its checksum")
        # earlier versions gave neither
        if record.get("number", number) != number:
            raise DamagedError(f"{path} is the state after {record['number']} segments")
        if self.run not in ("", record.get("run")):
            raise DamagedError(f"{path} is a state of another run")
        return arrays, record

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.npz"


def _stored(x: Any) -> np.ndarray:
    array = np.asarray(words(x))
    # bfloat16 and its like are unknown to NumPy's format
    return array.view(np.dtype(f"u{array.dtype.itemsize}")) if array.dtype.kind == "V" else array


def _restored(array: np.ndarray, like: Any) -> jax.Array | None:
    """An array of the type and shape of another one; None if it is not."""
    wanted = words(like)
    if wanted.dtype.kind == "V" and array.dtype.itemsize == wanted.dtype.itemsize:
        array = array.view(wanted.dtype)
    if array.shape != wanted.shape or array.dtype != wanted.dtype:
        return None
    return from_words(jnp.asarray(array), like)


def _digest(arrays: dict[str, np.ndarray]) -> bytes:
    digest = hashlib.sha256()
    for name, x in arrays.items():
        digest.update(f"{name} {x.shape} {x.dtype.str}".encode())
        digest.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return digest.digest()
