"""Draws in a Zarr store that is valid at every moment.

A segment of draws is one chunk of every variable. A chunk is a separate file that ends with a
checksum (Zarr's ``crc32c`` codec), so every reader detects a flipped bit. Readers get the number of
draws from the root's consolidated metadata. This file is replaced atomically when all chunks are
on disk. The root and the saved states name the run, so draws and states of different runs
cannot be mixed up. Zarr format 3, https://zarr-specs.readthedocs.io/en/latest/v3/core/.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from .files import TEMPORARY, own_folder, remove, remove_temporaries, write_atomically

Datasets = Mapping[str, xr.Dataset]
CHECKSUM_BYTES = 4
RUN = "numpyro_geom_run"
"""Attribute of the root with the name of the run."""
MAX_NAME_BYTES = 250
"""Largest length of a variable's name, which is the name of a folder. File systems allow 255."""


class DrawStore:
    """Groups of variables; variables with a dimension ``draw`` grow.

    Args:
        path: the store's folder.
        length: draws per segment, which is the length of a chunk.
        run: name of the run of these draws; None for a run from a version without names.

    Raises:
        ImportError: if the Zarr package is missing.
    """

    def __init__(self, path: Path, length: int, run: str | None) -> None:
        for module in ("zarr", "google_crc32c"):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ImportError(
                    "a run with a directory needs Zarr: pip install 'numpyro_geom[runs]'"
                ) from error
        self.path = path
        self.length = length
        self.run = run

    def check_same_run(self, datasets: Datasets) -> None:
        """Check that an existing store belongs to this run; it may be missing or damaged.

        Raises:
            ValueError: if it holds draws of another run, or was not made by `run`.
        """
        if not os.path.lexists(self.path):
            return
        own_folder(self.path)
        root = root_of(self.path)
        others = _strangers(self.path, {*datasets, "zarr.json"}) if root is None else []
        name = self.run if root is None else root["attributes"].get(RUN)
        if others or name != self.run:
            found = f"a folder with {', '.join(others)}" if others else f"those of {_called(name)}"
            raise ValueError(
                f"{self.path} is not of the run whose states are beside it: expected the draws of "
                f"{_called(self.run)}, got {found}. Put back the store that belongs to the states, "
                "or move this one away, and all draws are made again"
            )

    def create(self, datasets: Datasets, draws: int) -> None:
        """Write the variables that do not grow, and metadata for ``draws`` draws.

        In ``datasets``, as in all methods here, variables have one segment along the dimension
        ``draw``.

        Raises:
            ValueError: for a name that cannot be stored.
            FileExistsError: if there is a link or a file in place of a folder.
        """
        variables = list(self._variables(datasets))
        for dataset in datasets.values():
            for name in dataset.variables:
                _check_name(str(name))
        own_folder(self.path)
        if root_of(self.path) is None:  # marks the files that follow as this run's
            self._write_root({})
        for folder in [self.path, *(self.path / group for group in datasets)]:
            own_folder(folder)
            remove_temporaries(folder)
        places: dict[tuple[int, int], str] = {}
        for folder, variable in variables:
            own_folder(folder)
            remove_temporaries(folder)
            found = os.lstat(folder)
            other = places.setdefault((found.st_dev, found.st_ino), folder.name)
            if other != folder.name:
                raise ValueError(
                    f"{other!r} and {folder.name!r} are one name for the file system of "
                    f"{self.path}: rename one of the sites, or use a directory on another one"
                )
            if "draw" not in variable.dims and variable.size:
                self._write_chunk(folder / _key(variable, 0), variable.values)
        self.grow(datasets, draws)

    def write(self, segment: int, datasets: Datasets) -> None:
        """Write the chunks of a segment; readers do not see new chunks yet."""
        for folder, variable in self._variables(datasets):
            if "draw" in variable.dims and variable.size:
                values = variable.values
                if folder.name == "draw":
                    values = segment * self.length + np.arange(self.length)
                self._write_chunk(folder / _key(variable, segment), values)

    def grow(self, datasets: Datasets, draws: int) -> None:
        """Let readers see ``draws`` draws, atomically."""
        metadata: dict[str, Any] = {}
        for group, dataset in datasets.items():
            metadata[group] = _group(dataset.attrs)
            for name, variable in dataset.variables.items():
                metadata[f"{group}/{name}"] = _array(variable, draws)
        # for readers that do not use consolidated metadata
        for name, content in metadata.items():
            write_atomically(self.path / name / "zarr.json", _json(content), durable=False)
        self._write_root(metadata)

    def discard(self, segment: int, datasets: Datasets) -> None:
        """Remove the chunks of a segment that readers do not see."""
        for path, _ in self._chunks(segment, datasets):
            remove(path)

    def problem(self, segment: int, datasets: Datasets) -> str:
        """The problem with the chunks of a segment; empty if there is none."""
        for path, size in self._chunks(segment, datasets):
            try:
                content = path.read_bytes()
            except OSError as error:
                return f"{path} cannot be read ({error.strerror})"
            if len(content) != size:
                return f"{path} has {len(content)} bytes, expected {size}"
            values = np.frombuffer(content, np.uint8)[:-CHECKSUM_BYTES]
            if _checksum(values) != content[-CHECKSUM_BYTES:]:
                return f"{path} does not agree with its checksum"
        return ""

    def open(self) -> xr.DataTree:
        """All groups; values are read when they are requested."""
        return xr.open_datatree(self.path, engine="zarr", consolidated=True)

    def _write_root(self, metadata: dict[str, Any]) -> None:
        consolidated = {"kind": "inline", "must_understand": False, "metadata": metadata}
        attributes = {} if self.run is None else {RUN: self.run}
        root = _group(attributes) | {"consolidated_metadata": consolidated}
        write_atomically(self.path / "zarr.json", _json(root))

    def _variables(self, datasets: Datasets) -> Iterator[tuple[Path, xr.Variable]]:
        """Each variable with its folder."""
        for group, dataset in datasets.items():
            for name, variable in dataset.variables.items():
                yield self.path / group / str(name), variable

    def _chunks(self, segment: int, datasets: Datasets) -> list[tuple[Path, int]]:
        """Files of a segment and their sizes."""
        return [
            (folder / _key(variable, segment), variable.nbytes + CHECKSUM_BYTES)
            for folder, variable in self._variables(datasets)
            if "draw" in variable.dims and variable.size
        ]

    def _write_chunk(self, path: Path, values: np.ndarray) -> None:
        content = np.ascontiguousarray(values)
        content = content.astype(content.dtype.newbyteorder("<"), copy=False)
        raw = content.reshape(-1).view(np.uint8)
        write_atomically(path, raw, _checksum(raw))


def check_free(path: Path) -> None:
    """Check that a run can begin at a path: nothing is there, or a store without draws.

    Raises:
        FileExistsError: if there is something else.
    """
    if not os.path.lexists(path):
        return
    own_folder(path)
    root = root_of(path)
    if root is None:
        others = _strangers(path, {"zarr.json"})
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
        root = json.loads((path / "zarr.json").read_bytes())
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
    """Check that a variable's name can be the name of a folder in a group of a store.

    Raises:
        ValueError: if it cannot.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    of_points = not name.strip(".")
    if of_points or name == "zarr.json" or {*"/\0"} & {*name} or not 0 < size <= MAX_NAME_BYTES:
        shown = repr(name) if len(name) < 60 else f"{name[:40]!r}... ({size} bytes)"
        raise ValueError(
            f"a site or axis called {shown} cannot be stored: expected a name of 1 to "
            f"{MAX_NAME_BYTES} bytes of UTF-8 that is not made of points alone and not zarr.json. "
            "Rename the site"
        )


def _checksum(content: np.ndarray) -> bytes:
    value = importlib.import_module("google_crc32c").value(content)
    return int(value).to_bytes(CHECKSUM_BYTES, "little")


def _key(variable: xr.Variable, segment: int) -> str:
    """Name of a chunk's file in its array's folder."""
    return ".".join(["c", *(str(segment) if dim == "draw" else "0" for dim in variable.dims)])


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, default=lambda x: x.tolist()).encode()


def _group(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def _array(variable: xr.Variable, draws: int) -> dict[str, Any]:
    fill: dict[str, Any] = {"b": False, "f": 0.0, "c": [0.0, 0.0]}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [draws if dim == "draw" else n for dim, n in variable.sizes.items()],
        "data_type": variable.dtype.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [max(1, size) for size in variable.shape]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill.get(variable.dtype.kind, 0),
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "attributes": dict(variable.attrs),
        "dimension_names": list(variable.dims),
        "storage_transformers": [],
    }
