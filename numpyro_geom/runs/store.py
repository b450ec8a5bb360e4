"""What a run keeps on disk: one file for each segment, written whole or not at all.

A file is an ``.npz`` archive of plain arrays, read without pickle. Its name is the number of steps
of the run until its end. It holds the draws of the segment, the state of the chains after it, a
record in JSON, and a SHA-256 of these. The record says what the run is, and has the SHA-256 of the
file before. So the files of a run are a chain, and a file that is damaged, renamed or of another
run does not fit.

A file does not store the structure of a state. The kernel's ``init`` gives the structure, so files
on disk cannot decide which objects are built.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import warn_outside
from .._util import PyTree, from_words, raw, words
from .identity import check_same

NAME = re.compile(r"\d{10}\.npz")
UNFINISHED = re.compile(r"\d{10}\.npz\.[0-9a-f]{8}\.new")
REMEDY = (
    "Restore it from a copy, or delete it, and call `run_in_segments` again: segments that are "
    "missing are computed again"
)


class Store:
    """The files of a run in one folder. Only the first process of a run looks and writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[Path, dict[str, Any]] = {}
        self._next: dict[str, tuple[int, str]] = {}
        self._about: dict[str, Any] = {}

    def look(self) -> int | None:
        """Find the files of a run; returns its number of draws per segment, None without a run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.iterdir()):
            if UNFINISHED.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another process has just renamed it
                    if path.lstat().st_mtime < time.time() - 86_400:
                        path.unlink()  # of a process that was killed while it wrote
            if not NAME.fullmatch(path.name):
                continue
            with _opened(path) as file:
                record = json.loads(file["record"].tobytes())
                digest = file["sha256"].tobytes().hex()
                step, after = record["step"], record["after"]
            if step != int(path.stem):
                raise ValueError(f"{path} was renamed from {self._path(step).name}. {REMEDY}")
            self._records[path] = record
            self._next[after] = step, digest
        return next((record["length"] for record in self._records.values()), None)

    def open(self, about: Mapping[str, Any], steps: int) -> None:
        """Raise a ValueError unless all files are of the run that is described.

        Args:
            about: ``same``, texts that distinguish runs; ``versions``; and ``length``.
            steps: number of steps of the run.
        """
        self._about = {**about}
        step, digest, known = 0, "", self._next
        while digest in known and known[digest][0] > step:
            step, digest = known[digest]
        for path, record in self._records.items():
            check_same(f"{path} holds a segment of a run that", record["same"], about["same"])
            if record["step"] > steps:
                raise ValueError(
                    f"{path} is of a longer run: num_samples asks for {steps} steps, warm-up "
                    "included. Expected at least as many, or another directory"
                )
        late = [path for path, record in self._records.items() if record["step"] > step]
        if late:
            warn_outside(
                f"{late[0]} follows a segment that is missing or has changed. The run goes on "
                "from the last segment before, and computes the others again",
                RuntimeWarning,
            )
        others = [p for p, r in self._records.items() if r["versions"] != about["versions"]]
        if others:
            warn_outside(
                "the run goes on with other versions, and draws may differ in their last bits: "
                f"{others[0]} has {self._records[others[0]]['versions']}, now {about['versions']}",
                RuntimeWarning,
            )

    def after(self, digest: str) -> tuple[int, str] | None:
        """Step and digest of the segment after the one with this digest; "" for the first."""
        return self._next.get(digest)

    def write(self, step: int, after: str, content: PyTree) -> str:
        """Write the segment that ends at a step; returns its digest."""
        record = {**self._about, "step": step, "after": after}
        arrays = {name: _stored(x) for name, x in _named(content)}
        arrays["record"] = np.frombuffer(json.dumps(record).encode(), np.uint8)
        digest = _digest(arrays)
        path = self._path(step)
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        try:
            with open(new, "xb") as file:
                arrays["sha256"] = np.frombuffer(digest, np.uint8)
                np.savez(file, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
            _sync(self.folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            raise OSError(
                error.errno,
                f"{error.strerror}: {path} could not be stored. All segments before it are safe: "
                f"make {self.folder} writable, with more room, and call `run_in_segments` again "
                "with the same arguments",
            ) from error
        self._next[after] = step, digest.hex()
        return digest.hex()

    def read(self, step: int, digest: str, like: PyTree) -> PyTree:
        """Arrays of the segment that ends at a step, with the structure and types of ``like``.

        ``like`` may be a part of the content; its sizes need not be those of the arrays.
        """
        path = self._path(step)
        with _opened(path) as file:
            arrays = {name: file[name] for name in file.files}
            stated = arrays.pop("sha256").tobytes()
        if not stated == _digest(arrays) == bytes.fromhex(digest):
            raise ValueError(f"{path} is damaged, or was replaced: its SHA-256 differs. {REMEDY}")
        names = [name for name, _ in _named(like)]
        if not set(names) <= set(arrays):
            raise ValueError(
                f"{path} was saved by another version of numpyro_geom or NumPyro, whose states "
                "have other parts. Go on with that version, or begin anew in another directory"
            )
        leaves, structure = jax.tree.flatten(like)
        found = [_restored(arrays[n], x) for n, x in zip(names, leaves, strict=True)]
        return jax.tree.unflatten(structure, found)

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:010d}.npz"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An archive; a ValueError if it is damaged."""
    try:
        # opened here, because NumPy does not close a file that it cannot read
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            yield arrays
    except OSError:
        raise
    except Exception as error:  # flipped bits can cause any error
        raise ValueError(f"{path} is damaged, or no run has made it ({error}). {REMEDY}") from error


def _sync(folder: Path) -> None:
    """Wait until the entries of a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(tree: PyTree) -> Iterator[tuple[str, Any]]:
    """The leaves of a dict of pytrees, with names such as ``draws['z']['w']``."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        yield f"{path[0].key}{jax.tree_util.keystr(path[1:])}", x


def _stored(x: Any) -> np.ndarray:
    array = np.asarray(words(x))
    # NumPy's format does not support bfloat16 and similar types
    return array.view(np.dtype(f"u{array.dtype.itemsize}")) if array.dtype.kind == "V" else array


def _restored(array: np.ndarray, like: Any) -> Any:
    """The array with the type of ``like``: of JAX for an array of JAX, of NumPy for a shape."""
    if not isinstance(like, jax.Array):
        return array.view(like.dtype) if like.dtype.kind == "V" else array
    wanted = words(like)
    return from_words(jnp.asarray(array.view(wanted.dtype)), like)


def _digest(arrays: Mapping[str, np.ndarray]) -> bytes:
    digest = hashlib.sha256()
    for name, x in sorted(arrays.items()):
        digest.update(f"{name} {x.shape} {x.dtype.str}".encode())
        digest.update(raw(x))
    return digest.digest()
