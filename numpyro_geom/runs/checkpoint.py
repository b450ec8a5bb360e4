"""Checkpoints: the state of a chain after each segment, as arrays with a checksum.

A checkpoint is an ``.npz`` file of plain arrays, read without pickle. The file does not store the
structure of the state. The structure is that of the state from the kernel's ``init``, so files on
disk cannot decide which objects are built.
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
"""Before the last two checkpoints, only those whose number is divisible by this are kept."""


class Checkpoint(NamedTuple):
    """A position in a run.

    Attributes:
        number: number of finished segments, including those of warm-up.
        state: the kernel's state.
        record: other facts about the run, in types of JSON.
    """

    number: int
    state: PyTree
    record: dict[str, Any]


class DamagedError(ValueError):
    """A file whose content does not match its checksum or its name."""


class Checkpoints:
    """The checkpoints of a run, in one folder, which is made if it is missing.

    The record of a checkpoint has the name of the run and the number of segments. So a renamed
    file, or a file of another run, is not accepted. ``run`` names the run; "" accepts any run.
    """

    def __init__(self, folder: Path, run: str | None = "") -> None:
        self.folder, self.run = folder, run
        own_folder(folder)
        remove_temporaries(folder)

    def numbers(self) -> list[int]:
        """Numbers of all checkpoints in the folder, including damaged ones, the newest first."""
        found = (re.fullmatch(r"(\d{8,})\.npz", path.name) for path in self.folder.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint completely or not at all, and remove old ones."""
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
        """Apply a function to the newest checkpoint that it can read; None if there is none.

        It warns of the checkpoints that cannot be read.
        """
        for number in self.numbers():
            if number <= at_most:
                try:
                    return read(number)
                except DamagedError as error:
                    warn(f"{error}: the run goes on from an earlier state")
        return None

    def record(self, number: int) -> dict[str, Any]:
        """The facts about the run, without the state."""
        return self._read(number)[1]

    def load(self, number: int, like: PyTree) -> Checkpoint:
        """Read a checkpoint whose state has the structure, shapes and types of ``like``.

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
            # opened here, because NumPy does not close a file that it cannot read
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            digest = arrays.pop("sha256").tobytes()
            intact = digest == _digest(arrays)
            record = json.loads(arrays.pop("record").tobytes()) if intact else {}
        except Exception as error:  # flipped bits can cause any error
            raise DamagedError(f"{path} cannot be read ({error})") from error
        if not intact:
            raise DamagedError(f"{path} does not agree with its checksum")
        # earlier versions stored neither
        if record.get("number", number) != number:
            raise DamagedError(f"{path} is the state after {record['number']} segments")
        if self.run not in ("", record.get("run")):
            raise DamagedError(f"{path} is a state of another run")
        return arrays, record

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.npz"


def _stored(x: Any) -> np.ndarray:
    array = np.asarray(words(x))
    # NumPy's format does not support bfloat16 and similar types
    return array.view(np.dtype(f"u{array.dtype.itemsize}")) if array.dtype.kind == "V" else array


def _restored(array: np.ndarray, like: Any) -> jax.Array | None:
    """The array with the type and shape of ``like``; None if they do not match."""
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
