"""Draws in a Zarr store that is valid at every instant.

A segment of draws is one chunk of every variable, a file of its own that ends with a checksum
(Zarr's ``crc32c`` codec, so that every reader notices a flipped bit). Readers learn the number of
draws from the root's consolidated metadata, one file that is replaced in one instant once all
chunks are on disk. Zarr format 3, https://zarr-specs.readthedocs.io/en/latest/v3/core/.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from .files import write_atomically

Datasets = Mapping[str, xr.Dataset]
CHECKSUM_BYTES = 4


class DrawStore:
    """Groups of variables, of which those with a dimension ``draw`` grow.

    Args:
        path: the store's folder.
        length: draws a segment, and so a chunk.

    Raises:
        ImportError: if the Zarr package is missing.
    """

    def __init__(self, path: Path, length: int) -> None:
        for module in ("zarr", "google_crc32c"):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ImportError(
                    "a run with a directory needs Zarr: pip install 'numpyro_geom[runs]'"
                ) from error
        self.path = path
        self.length = length

    def create(self, datasets: Datasets, draws: int) -> None:
        """Write what does not grow, and metadata for so many draws.

        Of the dimension ``draw`` variables have one segment, here as elsewhere.
        """
        for folder, variable in self._variables(datasets):
            folder.mkdir(parents=True, exist_ok=True)
            if "draw" not in variable.dims and variable.size:
                self._write_chunk(folder / _key(variable, 0), variable.values)
        self.grow(datasets, draws)

    def write(self, segment: int, datasets: Datasets) -> None:
        """Write the chunks of a segment; readers do not see new ones yet."""
        for folder, variable in self._variables(datasets):
            if "draw" in variable.dims and variable.size:
                values = variable.values
                if folder.name == "draw":
                    values = segment * self.length + np.arange(self.length)
                self._write_chunk(folder / _key(variable, segment), values)

    def grow(self, datasets: Datasets, draws: int) -> None:
        """Let readers see so many draws, in one instant."""
        metadata: dict[str, Any] = {}
        for group, dataset in datasets.items():
            metadata[group] = _group(dataset.attrs)
            for name, variable in dataset.variables.items():
                metadata[f"{group}/{name}"] = _array(variable, draws)
        # these are for readers that pass over consolidated metadata
        for name, content in metadata.items():
            write_atomically(self.path / name / "zarr.json", _json(content), durable=False)
        root = _group({}) | {
            "consolidated_metadata": {
                "kind": "inline",
                "must_understand": False,
                "metadata": metadata,
            }
        }
        write_atomically(self.path / "zarr.json", _json(root))

    def discard(self, segment: int, datasets: Datasets) -> None:
        """Remove the chunks of a segment that no reader sees."""
        for path, _ in self._chunks(segment, datasets):
            path.unlink(missing_ok=True)

    def problem(self, segment: int, datasets: Datasets) -> str:
        """What is wrong with the chunks of a segment; empty if nothing is."""
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
        """All groups, whose values are read when they are asked for."""
        return xr.open_datatree(self.path, engine="zarr", consolidated=True)

    def _variables(self, datasets: Datasets) -> Iterator[tuple[Path, xr.Variable]]:
        """Each with its folder."""
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
