"""What a run keeps on disk: draws in a Zarr store, and the state of the chains.

Draws: a segment is one chunk of every variable. A chunk is a separate file that ends with a
checksum (Zarr's ``crc32c`` codec), so every reader detects a flipped bit. Readers get the number of
draws from the root's consolidated metadata. This file is replaced atomically when all chunks are
on disk. So the store is valid at every moment. The root and the saved states name the run, so draws
and states of different runs cannot be mixed up.

The Zarr package makes the content of all files, in memory. Its store for local files does not wait
until a file is on disk, and it writes through links. So `files.write_atomically` writes them.

States: a checkpoint after each segment is an ``.npz`` file of plain arrays with a checksum, read
without pickle. The file does not store the structure of the state. The kernel's ``init`` gives
the structure, so files on disk cannot decide which objects are built.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from .._util import PyTree, from_words, words
from .files import TEMPORARY, own_folder, remove, remove_temporaries, write_atomically
from .fingerprint import warn

Datasets = dict[str, xr.Dataset]
METADATA = "zarr.json"
CHECKSUM_BYTES = 4
RUN = "numpyro_geom_run"
"""Attribute of the root with the name of the run."""
MAX_NAME_BYTES = 250
"""Largest length of a variable's name and so of a folder's. File systems allow 255."""
KEEP_EVERY = 10
"""Before the last two checkpoints, only those whose number is divisible by this are kept."""


class DrawStore:
    """Groups of variables; variables with a dimension ``draw`` grow.

    In all methods, variables of ``datasets`` have one segment along the dimension ``draw``.

    Args:
        path: the store's folder.
        length: draws per segment, and the length of a chunk.
        run: name of the run of these draws; None for a run from a version without names.

    Attributes:
        visible: number of draws that readers see.

    Raises:
        ImportError: if the Zarr package is missing.
    """

    def __init__(self, path: Path, length: int, run: str | None) -> None:
        try:
            self._zarr: Any = importlib.import_module("zarr")
            self._checksum = importlib.import_module("google_crc32c").value
        except ImportError as error:
            raise ImportError(
                "a run with a directory needs Zarr: pip install 'numpyro_geom[runs]'"
            ) from error
        self.path = path
        self.length = length
        self.run = run
        self.visible = 0

    def check_same_run(self, datasets: Datasets) -> None:
        """Raise a ValueError if there is a store of another run, or one that `run` has not made."""
        if not os.path.lexists(self.path):
            return
        own_folder(self.path)
        root = root_of(self.path)
        others = _strangers(self.path, {*datasets, METADATA}) if root is None else []
        name = self.run if root is None else root["attributes"].get(RUN)
        if others or name != self.run:
            found = (
                f"a folder with {', '.join(others)}" if others else f"the draws of {_called(name)}"
            )
            raise ValueError(
                f"{self.path} is not of the run whose states are beside it: expected the draws of "
                f"{_called(self.run)}, got {found}. Put back the store that belongs to the states, "
                "or move this one away, and all draws are made again"
            )

    def create(self, datasets: Datasets, draws: int) -> None:
        """Write the variables that do not grow, and metadata for ``draws`` draws."""
        for dataset in datasets.values():
            for name in dataset.variables:
                _check_name(str(name))
        own_folder(self.path)
        if root_of(self.path) is None:  # marks the files that follow as this run's
            self._save(self._in_memory({}, 0)[0])
        for folder in [self.path, *(self.path / group for group in datasets)]:
            own_folder(folder)
            remove_temporaries(folder)
        places: dict[tuple[int, int], str] = {}
        for folder, _ in self._variables(datasets):
            own_folder(folder)
            remove_temporaries(folder)
            found = os.lstat(folder)
            other = places.setdefault((found.st_dev, found.st_ino), folder.name)
            if other != folder.name:
                raise ValueError(
                    f"{other!r} and {folder.name!r} are one name for the file system of "
                    f"{self.path}: rename one of the sites, or use a directory on another one"
                )
        content, arrays = self._in_memory(datasets, draws)
        for array, variable in arrays:
            if "draw" not in variable.dims and variable.size:
                array[...] = variable.values
        self.visible = draws
        self._save(content)

    def write(self, segment: int, datasets: Datasets, draws: int) -> None:
        """Write the chunks of a segment, and then let readers see at least ``draws`` draws.

        If a chunk of new draws cannot be written, none of the segment's chunks is left.
        """
        first, visible = segment * self.length, max(self.visible, draws)
        content, arrays = self._in_memory(datasets, visible)
        last = min(first + self.length, visible)
        for array, variable in arrays:
            if "draw" in variable.dims and variable.size:
                new = {**dict.fromkeys(variable.dims, slice(None)), "draw": slice(first, last)}
                values = variable[{"draw": slice(last - first)}].values
                values = np.arange(first, last) if variable.dims == ("draw",) else values
                array[tuple(new.values())] = values
        metadata = {key: x for key, x in content.items() if key.endswith(METADATA)}
        try:
            self._save({key: x for key, x in content.items() if key not in metadata})
        except OSError:
            if first >= self.visible:
                with contextlib.suppress(OSError):
                    for path, _ in self._chunks(segment, datasets):
                        remove(path)
            raise
        self.visible = visible
        self._save(metadata)

    def describe(self, datasets: Datasets) -> None:
        """Replace the metadata with the attributes, atomically."""
        self._save(self._in_memory(datasets, self.visible)[0])

    def problem(self, segment: int, datasets: Datasets) -> str:
        """The problem with the chunks of a segment; empty if there is none.

        Zarr's readers take a missing chunk for zeros.
        """
        for path, size in self._chunks(segment, datasets):
            try:
                content = path.read_bytes()
            except OSError as error:
                return f"{path} cannot be read ({error.strerror})"
            if len(content) != size:
                return f"{path} has {len(content)} bytes, expected {size}"
            checksum = self._checksum(content[:-CHECKSUM_BYTES]).to_bytes(CHECKSUM_BYTES, "little")
            if checksum != content[-CHECKSUM_BYTES:]:
                return f"{path} does not agree with its checksum"
        return ""

    def open(self) -> xr.DataTree:
        """All groups; values are read when they are requested."""
        return xr.open_datatree(self.path, engine="zarr", consolidated=True)

    def _in_memory(self, datasets: Datasets, draws: int) -> tuple[dict[str, Any], list[tuple]]:
        """A store of ``draws`` draws in memory, made by the Zarr package.

        Returns:
            Its files by name, and its arrays, each with its variable. What is written to an array
            appears among the files.
        """
        content: dict[str, Any] = {}
        store = self._zarr.storage.MemoryStore(content)
        attributes = {} if self.run is None else {RUN: self.run}
        root, arrays = self._zarr.create_group(store, attributes=attributes), []
        for group, dataset in datasets.items():
            node = root.create_group(group, attributes=_plain(dataset.attrs))
            for name, variable in dataset.variables.items():
                sizes = {**variable.sizes} | ({"draw": draws} if "draw" in variable.dims else {})
                array = node.create_array(
                    str(name),
                    shape=tuple(sizes.values()),
                    chunks=tuple(max(1, size) for size in variable.shape),
                    dtype=variable.dtype,
                    filters=None,
                    compressors=[{"name": "crc32c"}],
                    chunk_key_encoding={"name": "default", "separator": "."},
                    attributes=_plain(variable.attrs),
                    dimension_names=list(variable.dims),
                    config={"write_empty_chunks": True},
                )
                arrays.append((array, variable))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # format 3 does not specify this, and readers use it
            self._zarr.consolidate_metadata(store)
        return content, arrays

    def _save(self, content: Mapping[str, Any]) -> None:
        """Write files: chunks, then metadata, and the root's metadata last."""
        for key in sorted(content, key=lambda key: (key.endswith(METADATA), key == METADATA)):
            # metadata of groups and variables are for readers without consolidated metadata
            durable = key == METADATA or not key.endswith(METADATA)
            write_atomically(self.path / key, content[key].to_bytes(), durable=durable)

    def _variables(self, datasets: Datasets) -> Iterator[tuple[Path, xr.Variable]]:
        """Each variable with its folder."""
        for group, dataset in datasets.items():
            for name, variable in dataset.variables.items():
                yield self.path / group / str(name), variable

    def _chunks(self, segment: int, datasets: Datasets) -> Iterator[tuple[Path, int]]:
        """Files of a segment and their sizes."""
        for folder, variable in self._variables(datasets):
            if "draw" in variable.dims and variable.size:
                place = (str(segment) if dim == "draw" else "0" for dim in variable.dims)
                yield folder / ".".join(["c", *place]), variable.nbytes + CHECKSUM_BYTES


class Checkpoint(NamedTuple):
    """A position in a run.

    Attributes:
        number: number of finished segments, warm-up included.
        state: the kernel's state.
        record: other facts about the run, in types of JSON.
    """

    number: int
    state: PyTree
    record: dict[str, Any]


class DamagedError(ValueError):
    """A file whose content does not match its checksum or its name."""


class Checkpoints:
    """The checkpoints of a run, in one folder; it is made if it is missing.

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
        """Read a checkpoint whose state has the structure, shapes and types of ``like``."""
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


def check_free(path: Path) -> None:
    """Raise a FileExistsError unless a path is free, or holds a store without draws."""
    if not os.path.lexists(path):
        return
    own_folder(path)
    root = root_of(path)
    if root is None:
        others = _strangers(path, {METADATA})
        if not others:
            return
        found = f"a folder with {', '.join(others)}"
    else:
        name = root["attributes"].get(RUN)
        if name is not None and _draws(root) == 0:
            return
        found = f"the draws of {_called(name)}"
    raise FileExistsError(
        f"{path} holds {found}, and there are no states from which a run could go on: expected "
        "both or neither. Put back the folder `state` from a copy, move the draws away, or use "
        "another directory"
    )


def root_of(path: Path) -> dict[str, Any] | None:
    """Metadata of a store's root; None if they are missing or damaged."""
    try:
        root = json.loads((path / METADATA).read_bytes())
        return root if isinstance(root["attributes"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _draws(root: Mapping[str, Any]) -> int | None:
    """Number of draws that readers see; None if it is unknown."""
    try:
        metadata = root["consolidated_metadata"]["metadata"]
        return metadata["posterior/draw"]["shape"][0] if metadata else 0
    except (KeyError, TypeError):
        return None


def _called(run: str | None) -> str:
    return "a run without a name" if run is None else f"run {run}"


def _strangers(path: Path, ours: set[str]) -> list[str]:
    """Names in a folder that do not belong to a store."""
    names = (name for name in os.listdir(path) if not TEMPORARY.fullmatch(name))
    return sorted(name for name in names if name not in ours)


def _check_name(name: str) -> None:
    """Check that a variable's name can be the name of a folder in a group of a store."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    of_points = not name.strip(".")
    if of_points or name == METADATA or {*"/\0"} & {*name} or not 0 < size <= MAX_NAME_BYTES:
        shown = repr(name) if len(name) < 60 else f"{name[:40]!r}... ({size} bytes)"
        raise ValueError(
            f"a site or axis called {shown} cannot be stored: expected a name of 1 to "
            f"{MAX_NAME_BYTES} bytes of UTF-8 that is not made of points alone and not zarr.json. "
            "Rename the site"
        )


def _plain(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes in types of JSON."""
    return json.loads(json.dumps(dict(attributes), default=lambda x: x.tolist()))


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
