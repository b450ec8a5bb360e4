"""Chains over one axis of a device mesh, rows of the data over another axis.

Row indices are drawn globally, so draws do not depend on the number of devices. Each device holds
its own rows. The rows of a minibatch are fetched from their devices and distributed evenly; the
rows of a stratified minibatch are in place already. The gradients of the parts are summed. XLA
derives the communication from the placement of arrays
(https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html).
`HostRows` stay on the host, and each device asks for its part of the minibatch
(`rows.mesh_rows`).
"""

from __future__ import annotations

import builtins
import functools
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import MCMC

from .._checks import check_start
from .._util import PyTree, from_words, is_traced, words
from ..kernel import SGKernel
from ..model.abstract import abstract_trace
from ..model.arguments import split_arrays
from ..rows.host_rows import check_read, host_rows_in, is_host_rows
from ..rows.mesh_rows import MeshRows, OverMesh


@dataclass(frozen=True)
class DeviceLayout:
    """The placement of the arrays of a run.

    Attributes:
        mesh: the devices; None for one device that JAX chooses.
        chain_axis: axis of the mesh over which the chains are split, or None.
        data_axis: axis over which the rows of the data are split, or None.
        num_chains: number of chains of the run.
        abstract: whether only shapes are needed and nothing is computed.
    """

    mesh: Mesh | None = None
    chain_axis: str | None = None
    data_axis: str | None = None
    num_chains: int = 1
    abstract: bool = False

    @classmethod
    def of(cls, mcmc: MCMC, mesh: Any, chain_axis: Any, data_axis: Any) -> DeviceLayout:
        """The layout for the user's arguments; raises unless they fit each other."""
        axes = {"chain_axis": chain_axis, "data_axis": data_axis}
        given = {name: axis for name, axis in axes.items() if axis is not None}
        if mesh is None:
            if given:
                raise ValueError(
                    f"{' and '.join(given)} name axes of a mesh, and there is none: pass "
                    "mesh=jax.make_mesh(...), or drop them"
                )
            return cls()
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"mesh must be a jax.sharding.Mesh such as jax.make_mesh((8,), ('rows',)), got "
                f"{type(mesh).__name__}"
            )
        _check_mesh(mesh, given)
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
        # always with automatic axes, because models do not specify placements
        mesh = Mesh(mesh.devices, mesh.axis_names)
        return cls(mesh, chain_axis, data_axis, mcmc.num_chains)

    @property
    def processes(self) -> Processes:
        """The processes of this run."""
        return Processes(self._is_shared)

    def at(self, *axes: str | None) -> NamedSharding:
        """Sharding that splits an array's axes over these mesh axes; None leaves an axis whole."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))  # type: ignore[arg-type]

    def arguments(self, model: Callable | None, data: tuple) -> tuple:
        """The model's arguments. On a mesh, rows are split and other arrays are on each device."""
        if self.mesh is None:
            return data
        sizes = set() if self.data_axis is None else _numbers_of_rows(model, data)
        on_host = host_rows_in(data)
        over = OverMesh(self.mesh, self.data_axis, self.chain_axis)
        data = jax.tree.map(
            lambda x: x.over_mesh(over) if is_host_rows(x) else x, data, is_leaf=is_host_rows
        )
        arrays, fill = split_arrays(data)
        has_rows = [x.ndim > 0 and x.shape[0] in sizes for x in arrays]
        some = any(has_rows) or any(len(x) in sizes for x in on_host)
        if self.data_axis is not None and not some:
            raise ValueError(
                f"data_axis={self.data_axis!r} shares out rows, and no argument has as many rows "
                f"as a plate with observed sites (of sizes {sorted(sizes)}): pass the data as "
                "arguments of the model, in plates, or drop data_axis"
            )

        def place(x: Any, by_rows: bool) -> Any:
            if by_rows:
                return MeshRows.of(x, self.mesh, self.data_axis)  # type: ignore[arg-type]
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            return jax.make_array_from_callback(
                x.shape, self.at(), lambda index: np.asarray(x[index]).astype(dtype)
            )

        return fill([place(*each) for each in zip(arrays, has_rows, strict=True)])

    def check_read(self, data: tuple) -> None:
        """Raise, in all processes, the error of a source of `HostRows` that failed in one.

        On a mesh a callback must not fail, because other devices would wait for ever.
        """
        sources = host_rows_in(data)
        if self.mesh is not None and sources:
            self.processes.all(lambda: check_read(sources))

    def readable(self, data: tuple) -> tuple:
        """The arguments for a model outside the program; on a mesh, as JAX arrays."""
        if self.mesh is None:
            return data
        arrays, fill = split_arrays(data)
        return fill([jnp.asarray(x) for x in arrays])

    def start(
        self, kernel: Any, init: Callable, rng_key: jax.Array, init_params: PyTree, data: tuple
    ) -> PyTree:
        """The result of ``init(rng_key, init_params, data)`` of the kernel.

        On a mesh it is compiled, because several processes can only compute together in one
        program.
        """
        if self.mesh is None and not self.abstract:
            return init(rng_key, init_params, data)
        arrays, fill = split_arrays(data)

        def start(rng_key: jax.Array, init_params: PyTree, arrays: list) -> PyTree:
            return init(rng_key, init_params, fill(arrays))

        if self.abstract:
            return jax.eval_shape(start, rng_key, init_params, arrays)
        compiled = jax.jit(start, out_shardings=self.at())
        state = jax.block_until_ready(self.visible(compiled(rng_key, init_params, arrays)))
        self.check_read(data)
        if isinstance(kernel, SGKernel) and is_traced(getattr(kernel.bound.model, "fixed", ())):
            raise ValueError(
                "`param` or `mutable` sites of the model begin with values that depend on the "
                "data, which a mesh cannot do: expected values that do not, or a run without mesh"
            )
        check_start(getattr(state, "potential_energy", jnp.zeros(())))
        return state

    def draws(self, tree: PyTree) -> PyTree:
        """Within compiled code: arrays of shape (length, chains, ...), whose chains are split."""
        if self.chain_axis is None or self.num_chains == 1:
            return tree
        return lax.with_sharding_constraint(tree, self.at(None, self.chain_axis))

    def shardings(self, state: PyTree) -> PyTree:
        """The placement of the state of the chains."""

        def one(x: Any) -> NamedSharding:
            by_chain = self.num_chains > 1 and x.ndim and x.shape[0] == self.num_chains
            return self.at(self.chain_axis) if by_chain else self.at()

        return jax.tree.map(one, state)

    def place(self, state: PyTree) -> PyTree:
        """The state of the chains, moved to where the program needs it."""
        if self.mesh is None:
            return state
        if not self._is_shared:
            return jax.device_put(state, self.shardings(state))
        return _moved(state, self, to_chains=True)

    def visible(self, state: PyTree) -> PyTree:
        """The state of the chains in a form that every process can read."""
        if not self._is_shared:
            return state
        return jax.tree.map(
            lambda x: from_words(jnp.asarray(np.asarray(words(x))), x),
            _moved(state, self, to_chains=False),
        )

    @property
    def _is_shared(self) -> bool:
        return self.mesh is not None and len(_processes(self.mesh)) > 1


class Processes:
    """The processes of a run; all of them call the same methods in the same order.

    Attributes:
        several: whether there are several processes.
        is_first: whether this is the first process.
    """

    def __init__(self, several: bool) -> None:
        self.several = several
        self.is_first = not several or jax.process_index() == 0

    def first(self, function: Callable[[], Any]) -> Any:
        """A function's result in the first process, in JSON types, or the error that it raises."""
        if not self.several:
            return function()
        error: Exception | None = None
        found: dict[str, Any] = {}
        if self.is_first:
            try:
                found = {"value": function()}
            except Exception as caught:
                error, found = caught, {"error": type(caught).__name__, "text": str(caught)}
        content = np.frombuffer(json.dumps(found).encode(), np.uint8)
        size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
        if not self.is_first:
            content = np.zeros(size, np.uint8)
        content = np.asarray(multihost_utils.broadcast_one_to_all(content))
        found = json.loads(content.tobytes())
        if error is not None:
            raise error
        if "error" in found:
            kind = getattr(builtins, found["error"], RuntimeError)
            raise kind(f"{found['text']} (in process 0)")
        return found["value"]

    def all(self, function: Callable[[], Any]) -> Any:
        """Call a function in each process; an error in one process is an error in all."""
        if not self.several:
            return function()
        found = error = None
        try:
            found = function()
        except Exception as caught:
            error = caught
        failed = self._gather(error is not None)
        if error is not None:
            raise error
        if failed.any():
            where = ", ".join(str(k) for k in np.flatnonzero(failed))
            raise RuntimeError(f"another process of the run failed: see what process {where} says")
        return found

    def spread(self, state: PyTree) -> PyTree:
        """Send arrays and keys of the first process to all processes."""
        if not self.several:
            return state
        plain = multihost_utils.broadcast_one_to_all(jax.tree.map(words, state))
        return jax.tree.map(
            lambda x, like: from_words(np.asarray(x, words(like).dtype), like), plain, state
        )

    def signal(self, noted: list[str]) -> str | None:
        """The last signal that this process got, or one that another process got."""
        if not self.several:
            return noted[-1] if noted else None
        number = int(self._gather(signal.Signals[noted[-1]].value if noted else 0).max())
        return signal.Signals(number).name if number else None

    def _gather(self, number: int | bool) -> np.ndarray:
        return np.asarray(multihost_utils.process_allgather(np.int32(number))).reshape(-1)


@functools.partial(jax.jit, static_argnames=("layout", "to_chains"))
def _moved(state: PyTree, layout: DeviceLayout, to_chains: bool) -> PyTree:
    """Move a state from all devices to the devices of its chains, or back."""
    shardings = layout.shardings(state) if to_chains else layout.at()
    return lax.with_sharding_constraint(state, shardings)


def _numbers_of_rows(model: Callable | None, data: tuple) -> set[int]:
    """Sizes of the plates that have observed sites."""
    if model is None:
        raise ValueError(
            "data_axis shares out the rows of a model's plates, and this kernel has no model: "
            "expected a kernel with one, or drop data_axis"
        )
    arrays, fill = split_arrays(data)
    sizes: set[int] = set()

    def look(arrays: list) -> None:
        args, kwargs = fill(arrays)
        trace, _ = abstract_trace(model, args, kwargs, {})
        for site in trace.values():
            if site["type"] == "sample" and site["is_observed"]:
                sizes.update(frame.size for frame in site["cond_indep_stack"])

    # only shapes, because the data may be too large for one device
    jax.eval_shape(
        look,
        [jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in arrays],
    )
    return sizes


def _processes(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


def _check_mesh(mesh: Mesh, given: dict[str, Any]) -> None:
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
            "'chains' and 'rows' of jax.make_mesh((2, 4), ('chains', 'rows'))"
        )
    found, number = _processes(mesh), jax.process_count()
    if found != {jax.process_index()} and len(found) < number:
        raise ValueError(
            f"the mesh has devices of the processes {sorted(found)}, and there are {number}: "
            "expected devices of all processes, or of this process alone"
        )
