"""Chains over one axis of a device mesh, rows of the data over another.

Row indices are drawn globally, so that draws do not depend on how many devices there are. Each
device has its own rows; those of a minibatch come from where they are and are dealt out evenly,
and the gradients of the shares are summed. XLA derives the communication from where arrays are
placed (https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import MCMC

from ..minibatch import _abstract_trace
from ..rows.host_rows import HostRows
from ..rows.mesh_rows import MeshRows
from .processes import Alone, Together, local

PyTree = Any


@dataclass(frozen=True)
class Layout:
    """Where the arrays of a run are.

    Attributes:
        mesh: the devices.
        chain_axis: axis of the mesh that shares out the chains, or None.
        data_axis: axis that shares out the rows of the data, or None.
        num_chains: chains of the run.
    """

    mesh: Mesh
    chain_axis: str | None
    data_axis: str | None
    num_chains: int

    @classmethod
    def of(cls, mcmc: MCMC, mesh: Any, chain_axis: Any, data_axis: Any) -> Layout | None:
        """Check what the user gave; None without a mesh.

        Raises:
            TypeError: if ``mesh`` is no mesh.
            ValueError: if axes, chains and mesh do not fit each other.
        """
        axes = {"chain_axis": chain_axis, "data_axis": data_axis}
        given = {name: axis for name, axis in axes.items() if axis is not None}
        if mesh is None:
            if given:
                raise ValueError(
                    f"{' and '.join(given)} name axes of a mesh, and there is none: pass "
                    "mesh=jax.make_mesh(...), or drop them"
                )
            return None
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"mesh must be a jax.sharding.Mesh such as jax.make_mesh((8,), ('rows',)), got "
                f"{type(mesh).__name__}"
            )
        _check_axes(mesh, given)
        _check_processes(mesh)
        if mcmc.num_chains > 1 and mcmc.chain_method != "vectorized":
            raise ValueError(
                "a mesh runs its chains as one program: expected "
                f"MCMC(..., chain_method='vectorized'), got {mcmc.chain_method!r}"
            )
        if chain_axis is not None and mcmc.num_chains % mesh.shape[chain_axis]:
            raise ValueError(
                f"num_chains={mcmc.num_chains} cannot be shared out evenly over the "
                f"{mesh.shape[chain_axis]} devices of axis {chain_axis!r}: expected a multiple"
            )
        # of automatic axes, whatever those given are: models are written without placements
        mesh = Mesh(mesh.devices, mesh.axis_names)
        return cls(mesh, chain_axis, data_axis, mcmc.num_chains)

    @property
    def processes(self) -> Alone:
        """The processes that do this run."""
        return Together() if self._is_shared else Alone()

    @property
    def text(self) -> str:
        """Axes and their sizes, for records."""
        return ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())

    @property
    def replicated(self) -> NamedSharding:
        """The same on all devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    def arguments(self, model: Callable | None, data: tuple) -> tuple:
        """The model's arguments on the mesh: rows shared out, other arrays on each device.

        Raises:
            ValueError: if there is an axis for rows and no argument has any; for `HostRows`.
        """
        if any(isinstance(x, HostRows) for x in jax.tree.leaves(data, is_leaf=_is_host_rows)):
            raise ValueError(
                "HostRows stay on the host and a mesh shares rows out over devices: expected the "
                "array itself (a memory map will do: each process reads its own rows), or no mesh"
            )
        sizes: set[int] = set()
        if self.data_axis is not None:
            sizes = _numbers_of_rows(model, data)
        found = 0

        def place(x: Any) -> Any:
            nonlocal found
            if not _is_array(x):
                return x
            if x.ndim and x.shape[0] in sizes:
                found += 1
                return MeshRows.of(x, self.mesh, self.data_axis)  # type: ignore[arg-type]
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            return jax.make_array_from_callback(
                x.shape, self.replicated, lambda index: np.asarray(x[index]).astype(dtype)
            )

        data = jax.tree.map(place, data)
        if self.data_axis is not None and not found:
            raise ValueError(
                f"data_axis={self.data_axis!r} shares out rows, and no argument has as many rows "
                f"as a plate with observed sites (of sizes {sorted(sizes)}): pass the data as "
                "arguments of the model, in plates, or drop data_axis"
            )
        return data

    def draws(self, tree: PyTree, axis: int = 0) -> PyTree:
        """Within compiled code: arrays whose chains, on this axis, are shared out."""
        if self.chain_axis is None or self.num_chains == 1:
            return tree
        spec = PartitionSpec(*[None] * axis, self.chain_axis)
        return lax.with_sharding_constraint(tree, NamedSharding(self.mesh, spec))

    def shardings(self, state: PyTree) -> PyTree:
        """Where the state of the chains is."""

        def one(x: Any) -> NamedSharding:
            by_chain = self.num_chains > 1 and x.ndim and x.shape[0] == self.num_chains
            spec = PartitionSpec(self.chain_axis) if by_chain else PartitionSpec()
            return NamedSharding(self.mesh, spec)

        return jax.tree.map(one, state)

    def place(self, state: PyTree) -> PyTree:
        """The state of the chains on the mesh, from wherever it is."""
        if not self._is_shared:
            return jax.device_put(state, self.shardings(state))
        return _moved(self, jax.tree.structure(state), True)(state)

    def visible(self, state: PyTree) -> PyTree:
        """The state of the chains as every process can read it."""
        if not self._is_shared:
            return state
        return local(_moved(self, jax.tree.structure(state), False)(state))

    @property
    def _is_shared(self) -> bool:
        return len(_processes(self.mesh)) > 1


@functools.lru_cache(maxsize=16)
def _moved(layout: Layout, structure: Any, to_chains: bool) -> Callable[[PyTree], PyTree]:
    """A program that moves a state between being shared out and being everywhere."""
    if not to_chains:
        return jax.jit(lambda state: state, out_shardings=layout.replicated)

    def constrain(state: PyTree) -> PyTree:
        return lax.with_sharding_constraint(state, layout.shardings(state))

    return jax.jit(constrain)


def _is_array(x: Any) -> bool:
    """Whether a leaf is an array that compiled code can be given."""
    if isinstance(x, jax.Array):
        return not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return isinstance(x, np.ndarray) and x.dtype.kind in "biufc"


def _is_host_rows(x: Any) -> bool:
    return isinstance(x, HostRows)


def _numbers_of_rows(model: Callable | None, data: tuple) -> set[int]:
    """Sizes of the plates that have observed sites."""
    if model is None:
        raise ValueError(
            "data_axis shares out the rows of a model's plates, and this kernel has no model: "
            "expected a kernel with one, or drop data_axis"
        )
    leaves, structure = jax.tree.flatten(data)
    places = [k for k, x in enumerate(leaves) if _is_array(x)]
    sizes: set[int] = set()

    def look(arrays: list) -> None:
        filled = list(leaves)
        for k, x in zip(places, arrays, strict=True):
            filled[k] = x
        args, kwargs = jax.tree.unflatten(structure, filled)
        trace, _ = _abstract_trace(model, args, kwargs, {})
        for site in trace.values():
            if site["type"] == "sample" and site["is_observed"]:
                sizes.update(frame.size for frame in site["cond_indep_stack"])

    # shapes alone: the data may be too large for one device
    shapes = [
        jax.ShapeDtypeStruct(leaves[k].shape, jax.dtypes.canonicalize_dtype(leaves[k].dtype))
        for k in places
    ]
    jax.eval_shape(look, shapes)
    return sizes


def _processes(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


def _check_axes(mesh: Mesh, given: dict[str, Any]) -> None:
    if not given:
        raise ValueError(
            f"a mesh needs chain_axis, data_axis or both: expected names of its axes, which are "
            f"{mesh.axis_names}"
        )
    for name, axis in given.items():
        if axis not in mesh.axis_names:
            raise ValueError(f"{name} must be an axis of the mesh {mesh.axis_names}, got {axis!r}")
    if len(set(given.values())) < len(given):
        raise ValueError(
            f"chain_axis and data_axis are both {axis!r}: expected two axes, such as "
            "those of jax.make_mesh((2, 4), ('chains', 'rows'))"
        )


def _check_processes(mesh: Mesh) -> None:
    found, number = _processes(mesh), jax.process_count()
    if found != {jax.process_index()} and len(found) < number:
        raise ValueError(
            f"the mesh has devices of the processes {sorted(found)}, and there are {number}: "
            "expected devices of all of them, or of one's own alone"
        )
