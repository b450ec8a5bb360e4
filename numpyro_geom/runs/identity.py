"""What makes two runs the same: texts and SHA-256 of what decides their draws.

The program of a segment, as JAX traces it, has all that model, kernel and ``postprocess_fn``
compute, with the arrays that they read. It does not show what a function computes that the program
calls on the host (by `jax.pure_callback`), nor how the first state is found. So arguments,
settings and the key are compared, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import Mesh
from numpyro.infer.mcmc import MCMCKernel

from .._util import digest, raw
from ..diagnostics.inference_data import package_versions
from ..kernel import SGKernel
from ..rows.host_rows import HostRows, is_host_rows
from .segments import Job, Segments

CONFIG = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)
"""Settings of JAX that affect numbers; a traced program does not show some of them."""
NOT_TOLD = {
    "bwd", "debug_info", "fwd_jaxpr_thunk", "jvp_jaxpr_fun", "name", "out_trees", "rule",
}  # fmt: skip
"""Parameters of operations that are names, or rules for derivatives that are applied already."""


def identity(segments: Segments) -> dict[str, str]:
    """All that determines the draws of a run, by name, except the values of the data."""
    job, mcmc = segments.job, segments.job.mcmc
    return {
        "kernel": type(mcmc.sampler).__name__,
        **{f"kernel setting {name}": _text(x) for name, x in settings_of(mcmc.sampler).items()},
        "num_warmup": str(mcmc.num_warmup),
        "thinning": str(mcmc.thinning),
        "num_chains": str(mcmc.num_chains),
        "chain_method": _text(mcmc.chain_method),
        "extra_fields": ", ".join(job.extra_fields),
        "draws_per_segment": str(segments.lengths.length),
        "rng_key": _text(job.rng_key),
        "on a mesh": str(segments.layout.abstract),
        **{name: str(getattr(jax.config, name)) for name in CONFIG},
        "program": _Program().of(segments.traced()),
    }


def versions(mesh: Mesh | None) -> str:
    """What may change the last bits of draws without being an error."""
    found = [f"{name.removesuffix('_version')} {x}" for name, x in package_versions().items()]
    axes = "no mesh" if mesh is None else f"mesh {dict(mesh.shape)}"
    return ", ".join([*found, jax.devices()[0].device_kind, axes])


def data_of(job: Job, *, values: bool) -> dict[str, str]:
    """Texts of the arrays among the arguments; without ``values`` only types and shapes."""
    found = {}
    trees = {"args": list(job.args), "kwargs": job.kwargs, "init_params": job.init_params}
    for path, x in jax.tree_util.tree_leaves_with_path(trees, is_leaf=is_host_rows):
        if hasattr(x, "dtype"):
            text = f"{x.dtype}{list(x.shape)}" + (f" {_digest(x)}" if values else "")
            found[f"data {path[0].key}{jax.tree_util.keystr(path[1:])}"] = text
    return found


def check_same(run: str, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Raise a ValueError that names what differs between two runs."""
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    changed = "; ".join(
        f"{name} (was {old.get(name, 'absent')}, is {new.get(name, 'absent')})" for name in names
    )
    if changed:
        raise ValueError(
            f"{run} differs in: {changed}. Expected the same arguments, model and kernel as "
            "before, with all values that they read, and the same version of JAX; or another "
            "directory"
        )


def settings_of(kernel: MCMCKernel) -> dict[str, Any]:
    """Arguments of a kernel's constructor, except functions and what the kernel does not keep."""
    if isinstance(kernel, SGKernel):  # their values before ``init``
        found = kernel.replace().settings.as_dict()
    else:
        names = inspect.signature(type(kernel)).parameters
        found = {n: getattr(kernel, n, getattr(kernel, f"_{n}", None)) for n in names}
    return {
        name: x
        for name, x in found.items()
        if name != "model" and x is not None and not (callable(x) and not _is_data(x))
    }


def _is_data(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


def _text(value: Any) -> str:
    """A text for a value: digests of arrays, and no addresses and functions."""
    leaves, treedef = jax.tree.flatten(value)
    if jax.tree_util.treedef_is_leaf(treedef):
        return _leaf(value)
    return f"{_leaf(treedef)} {' '.join(map(_leaf, leaves))}"


def _leaf(x: Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)} {_digest(x)}"
    if callable(x) and not _is_data(x):
        return "a function"
    return re.sub(r" (at )?0x[0-9a-f]+", "", repr(x))


def _digest(x: Any) -> str:
    """The beginning of the SHA-256 of an array."""
    if not getattr(x, "is_fully_addressable", True):
        return "of several processes"
    if not isinstance(x, HostRows):
        return digest(x)[:16]
    found = hashlib.sha256()
    for block in x.blocks():
        found.update(raw(block))
    return found.hexdigest()[:16]


class _Program:
    """Digests of traced programs; each part is visited once."""

    def __init__(self) -> None:
        # with the parts, because an id is only unique during the life of its object
        self._known: dict[int, tuple[Any, str]] = {}

    def of(self, part: ClosedJaxpr | Jaxpr) -> str:
        """Digest of the operations, with their parameters, numbers and arrays, in their order."""
        if id(part) not in self._known:
            found = hashlib.sha256("\n".join(self._lines(part)).encode()).hexdigest()[:16]
            self._known[id(part)] = part, found
        return self._known[id(part)][1]

    def _lines(self, part: ClosedJaxpr | Jaxpr) -> list[str]:
        jaxpr: Any = getattr(part, "jaxpr", part)
        values: dict[Any, str] = {x: f"input {k} {x.aval}" for k, x in enumerate(jaxpr.invars)}
        for x, value in zip(jaxpr.constvars, getattr(part, "consts", ()), strict=False):
            values[x] = _leaf(value)

        def told(x: Any) -> str:
            if isinstance(x, Literal):
                return f"{x.aval} {_leaf(x.val) if getattr(x.val, 'ndim', 0) else x.val}"
            return values.get(x, "a constant")

        lines = []
        for k, e in enumerate(jaxpr.eqns):
            params = (
                f"{n}={self._param(x)}" for n, x in sorted(e.params.items()) if n not in NOT_TOLD
            )
            lines.append(" ".join([e.primitive.name, *params, *map(told, e.invars)]))
            values |= {x: f"{k}.{number} {x.aval}" for number, x in enumerate(e.outvars)}
        return [*lines, *map(told, jaxpr.outvars)]

    def _param(self, x: Any) -> str:
        if isinstance(x, (ClosedJaxpr, Jaxpr)):
            return self.of(x)
        if isinstance(x, (list, tuple)):
            return f"({', '.join(map(self._param, x))})"
        return _leaf(x)
