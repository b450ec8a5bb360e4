"""Rows over a device mesh: arrays split over its devices (`MeshRows`), and `HostRows` of a mesh.

On a mesh each device asks the host for its part of an index (`OverMesh`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .reader import hints_of


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["blocks"],
    meta_fields=["num_rows", "mesh", "axis"],
)
@dataclasses.dataclass(eq=False, repr=False)
class MeshRows:
    """An array whose rows are split over an axis of a mesh.

    ``X[i]`` with an array of row numbers has the same result as for a plain array. Only the
    selected rows travel, not the whole array: each device selects the rows in its own block, the
    words of all other rows are zero, and the devices' words are summed. The rows of a stratified
    minibatch do not travel. All other operations are applied to the plain array. XLA keeps it in
    place.

    Args:
        blocks: shape (devices, rows of each, ...); the first axis is split. If rows cannot be
            split evenly, each block begins with some rows of the block before, as the stretches of
            a stratified minibatch do.
        num_rows: number of rows; the last block may be padded.
        mesh: the devices.
        axis: axis of the mesh.
    """

    blocks: Any
    num_rows: int
    mesh: Mesh
    axis: str

    @classmethod
    def of(cls, array: Any, mesh: Mesh, axis: str) -> MeshRows:
        """Split an array; each process reads only the rows of its own devices."""
        parts = mesh.shape[axis]
        rows, before = _shares(array.shape[0], parts)
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)

        @functools.cache
        def block(k: int) -> np.ndarray:
            first = max(k * rows - before, 0)
            found = np.asarray(array[first : (k + 1) * rows]).astype(dtype)
            ahead = first - (k * rows - before)
            behind = before + rows - ahead - found.shape[0]
            padding = [(ahead, behind)] + [(0, 0)] * (found.ndim - 1)
            return np.pad(found, padding)[np.newaxis]

        blocks = jax.make_array_from_callback(
            (parts, before + rows, *array.shape[1:]),
            NamedSharding(mesh, PartitionSpec(axis)),
            lambda index: block(index[0].start or 0),  # type: ignore[index]
        )
        return cls(blocks, array.shape[0], mesh, axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the plain array."""
        return (self.num_rows, *self.blocks.shape[2:])

    @property
    def ndim(self) -> int:
        """Number of axes of the plain array."""
        return self.blocks.ndim - 1

    @property
    def size(self) -> int:
        """Number of entries of the plain array."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> Any:
        """Type of the entries."""
        return self.blocks.dtype

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"MeshRows({self.dtype}{list(self.shape)} over {self.axis!r})"

    def __jax_array__(self) -> jax.Array:
        _, before = _shares(self.num_rows, self.blocks.shape[0])
        plain = self.blocks[:, before:].reshape(-1, *self.shape[1:])[: self.num_rows]
        return self._shared_out(plain)

    def __getitem__(self, index: Any) -> jax.Array:
        first, *others = index if isinstance(index, tuple) else (index,)
        are_rows = isinstance(first, (jax.Array, np.ndarray)) and first.ndim > 0
        simple = all(isinstance(x, (slice, int, type(None))) for x in others)
        if not (are_rows and simple and jnp.issubdtype(first.dtype, jnp.integer)):
            return self.__jax_array__()[index]
        parts = self.blocks.shape[0]
        shared = first.shape[0] < self.num_rows and first.shape[0] % parts == 0
        if shared and first.ndim == 1 and any(hint.ordered for hint in hints_of(first)):
            found = self._in_place(jnp.asarray(first))
            return found[(slice(None), *others)] if others else found
        first = jnp.asarray(first)
        found = self.rows(first.reshape(-1)).reshape(*first.shape, *self.shape[1:])
        return found[(*[slice(None)] * first.ndim, *others)] if others else found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in MeshRows.__annotations__:
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def rows(self, i: jax.Array) -> jax.Array:
        """The rows with the numbers in a flat array."""
        i = jnp.where(i < 0, i + self.num_rows, i).clip(0, self.num_rows - 1)
        if i.shape[0] != self.num_rows:
            return self._gathered(i)
        # a plate at its full size requests all rows in order, which are already in place
        in_order = jnp.all(self._shared_out(i) == jnp.arange(self.num_rows, dtype=i.dtype))
        return lax.cond(in_order, lambda _: self.__jax_array__(), self._gathered, i)

    def _gathered(self, i: jax.Array) -> jax.Array:
        parts = self.blocks.shape[0]
        rows, before = _shares(self.num_rows, parts)
        words = self.dtype
        if jnp.issubdtype(words, jnp.floating) or words.kind == "b":
            # integers, whose sum with zeros is exact, also for -0 and NaN
            words = np.dtype(f"u{words.itemsize}")

        def of_one(block: jax.Array, k: jax.Array) -> jax.Array:
            place = i - (k * rows).astype(i.dtype)
            mine = (place >= 0) & (place < rows)
            taken = block[before + jnp.clip(place, 0, rows - 1)].view(words)
            return jnp.where(mine.reshape(-1, *[1] * (taken.ndim - 1)), taken, 0)

        found = jax.vmap(of_one)(self.blocks, jnp.arange(parts))
        found = found.sum(0, dtype=found.dtype)
        if i.shape[0] % parts == 0:
            found = self._shared_out(found)
        return found.view(self.dtype)

    def _in_place(self, i: jax.Array) -> jax.Array:
        """Rows that are already on their devices, in the order of the devices."""
        parts = self.blocks.shape[0]
        rows, before = _shares(self.num_rows, parts)
        starts = rows * jnp.arange(parts, dtype=i.dtype) - before
        place = self._shared_out(i.reshape(parts, -1) - starts[:, None])
        found = jax.vmap(operator.getitem)(self.blocks, place)
        return self._shared_out(found.reshape(i.shape[0], *self.shape[1:]))

    def _shared_out(self, x: jax.Array) -> jax.Array:
        if not isinstance(x, jax.core.Tracer):  # only compiled code can split unevenly
            return x
        spec = PartitionSpec(self.axis)
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def _forwarded(function: Callable, swapped: bool) -> Callable:
    def method(self: MeshRows, *others: Any) -> jax.Array:
        here = self.__jax_array__()
        values = [x.__jax_array__() if isinstance(x, MeshRows) else x for x in others]
        return function(*values, here) if swapped else function(here, *values)

    return method


for _name in "add sub mul truediv floordiv mod pow matmul and or xor".split():
    _function = getattr(operator, f"__{_name}__")
    setattr(MeshRows, f"__{_name}__", _forwarded(_function, False))
    setattr(MeshRows, f"__r{_name}__", _forwarded(_function, True))
for _name in "lt le gt ge eq ne neg abs invert".split():
    setattr(MeshRows, f"__{_name}__", _forwarded(getattr(operator, f"__{_name}__"), False))
MeshRows.__hash__ = object.__hash__  # type: ignore[method-assign]


@dataclasses.dataclass(frozen=True)
class OverMesh:
    """The axes of a mesh over which chains and rows are split.

    Attributes:
        mesh: the devices.
        data_axis: axis over which the rows are split, or None.
        chain_axis: axis over which the chains are split, or None.
    """

    mesh: Mesh
    data_axis: str | None
    chain_axis: str | None

    def rows(
        self, call_host: Callable, wanted: tuple, indices: tuple, *, mapped: bool
    ) -> tuple[jax.Array, ...]:
        """Rows by one callback of each device, which takes an equal share of each index.

        ``wanted`` and ``mapped`` are those of `fetch`, whose callback is ``call_host(here, then)``.
        ``indices`` are those to fetch, and those that will be needed next.
        """
        here, _ = indices
        parts, chains = self._devices(self.data_axis), self._devices(self.chain_axis)
        even = all(index.ndim > mapped and index.shape[-1] % parts == 0 for index in here)

        def spec(index: Any) -> PartitionSpec:
            axes: list[str | None] = [None] * index.ndim
            if mapped and index.shape[0] % chains == 0:
                axes[0] = self.chain_axis
            if even:
                axes[-1] = self.data_axis
            return PartitionSpec(*axes)

        return jax.shard_map(
            call_host,
            mesh=self.mesh,
            in_specs=jax.tree.map(spec, indices),
            out_specs=tuple(spec(here[k]) for _, k in wanted),
            check_vma=False,
        )(*indices)

    def _devices(self, axis: str | None) -> int:
        return 1 if axis is None else self.mesh.shape[axis]


def _shares(num_rows: int, parts: int) -> tuple[int, int]:
    """Number of rows in each part, and of rows from the part before that each part repeats."""
    rows = -(-num_rows // parts)
    return rows, (parts - 1) * rows - (parts - 1) * num_rows // parts
