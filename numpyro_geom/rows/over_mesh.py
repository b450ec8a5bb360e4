"""Rows from the host over a device mesh: each device asks the host for its part of an index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .reader import NO_ROW


@dataclass(frozen=True)
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

    def owned(self, num_rows: int) -> range:
        """Rows of which the devices of this process have a part, without gaps."""
        parts = self._devices(self.data_axis)
        here = np.vectorize(lambda device: device.process_index)(self.mesh.devices)
        mine = here == jax.process_index()
        if self.data_axis is not None:
            axis = self.mesh.axis_names.index(self.data_axis)
            mine = mine.any(tuple(k for k in range(mine.ndim) if k != axis))
        places = np.flatnonzero(np.atleast_1d(mine)) if parts > 1 else np.zeros(1, int)
        first, last = int(places[0]), int(places[-1]) + 1
        # a row may lie in two stretches in part
        return range(first * num_rows // parts, -(-last * num_rows // parts))

    def rows(
        self, call_host: Callable, wanted: tuple, indices: tuple, *, ordered: bool, mapped: bool
    ) -> tuple[jax.Array, ...]:
        """Rows by one callback of each device.

        A device takes an equal share of each index. If processes hold parts of the rows, this is
        right only for stratified batches. For other indices, each device then asks for those rows
        that it owns, and the devices' words are summed.

        Args:
            call_host: ``(wanted, here, then) -> rows``, the callback.
            wanted: pairs of an array and the place of its index.
            indices: the indices to fetch, and those that will be needed next.
            ordered: whether each index has one row from each of equal stretches, in their order.
            mapped: whether the first axis of the indices is that of chains.
        """
        here, _ = indices
        parts, chains = self._devices(self.data_axis), self._devices(self.chain_axis)
        even = all(index.ndim > mapped and index.shape[-1] % parts == 0 for index in here)
        by_owner = any(x.is_part for x, _ in wanted) and not (even and ordered)

        def spec(index: Any, by_rows: bool) -> PartitionSpec:
            axes: list[str | None] = [None] * index.ndim
            if mapped and index.shape[0] % chains == 0:
                axes[0] = self.chain_axis
            if by_rows:
                axes[-1] = self.data_axis
            return PartitionSpec(*axes)

        def each(here: tuple, then: tuple) -> tuple[jax.Array, ...]:
            if not by_owner:
                return call_host(wanted, here, then)
            kinds = list(dict.fromkeys((k, len(x)) for x, k in wanted))
            own = [tuple(self._own(of[k], n) for k, n in kinds if of) for of in (here, then)]
            found = call_host(tuple((x, kinds.index((k, len(x)))) for x, k in wanted), *own)
            return tuple(
                self._summed(rows, here[k].ndim - 1, even)
                for rows, (_, k) in zip(found, wanted, strict=True)
            )

        return jax.shard_map(
            each,
            mesh=self.mesh,
            in_specs=jax.tree.map(lambda x: spec(x, even and not by_owner), indices),
            out_specs=tuple(spec(here[k], even) for _, k in wanted),
            check_vma=False,
        )(*indices)

    def _devices(self, axis: str | None) -> int:
        return 1 if axis is None else self.mesh.shape[axis]

    def _own(self, index: jax.Array, num_rows: int) -> jax.Array:
        """The index with `NO_ROW` for rows of other devices."""
        parts = self._devices(self.data_axis)
        bounds = jnp.asarray(np.arange(parts + 1) * num_rows // parts, jnp.int32)
        index = index.astype(jnp.int32)
        row = jnp.where(index < 0, index + num_rows, index).clip(0, num_rows - 1)
        k = lax.axis_index(self.data_axis)
        mine = (row >= bounds[k]) & (row < bounds[k + 1]) & (index != NO_ROW)
        return jnp.where(mine, row, NO_ROW)

    def _summed(self, rows: jax.Array, axis: int, even: bool) -> jax.Array:
        """Rows of which each device has its own and zeros; on each device all, or its share."""
        found = words_of(rows)
        if even:
            found = lax.psum_scatter(found, self.data_axis, scatter_dimension=axis, tiled=True)
        else:
            found = lax.psum(found, self.data_axis)
        return from_words_of(found, rows.dtype)


def words_of(x: jax.Array) -> jax.Array:
    """Entries as integers, whose sum with zeros is exact, also for -0 and NaN."""
    if jnp.issubdtype(x.dtype, jnp.bool_):
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return lax.bitcast_convert_type(x, jnp.dtype(f"u{x.dtype.itemsize}"))
    return x


def from_words_of(found: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `words_of`."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return found.astype(bool)
    return found if found.dtype == dtype else lax.bitcast_convert_type(found, dtype)
