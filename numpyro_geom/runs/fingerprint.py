"""What a run is of, as texts that tell two runs apart: model, kernel, settings, key and data."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import platform
import re
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel

from ..diagnostics.results import _versions
from ..host_rows import HostRows
from ..kernel import SGKernel

PyTree = Any
MAX_HASHED_BYTES = 2**32
"""Size of an array up to which all of it is hashed; of a larger one a thousand blocks are."""
ROW_BLOCK_BYTES = 2**22
"""Size of what is read and hashed at a time of rows on the host."""
LIBRARIES = {"builtins", "flax", "jax", "jaxlib", "numpy", "numpyro", "numpyro_geom", "optax"}
"""Packages whose code is compared by name only: their versions tell the rest."""
PLAIN = (type(None), bool, int, float, complex, str, bytes)


def fingerprint(
    mcmc: MCMC,
    rng_key: jax.Array,
    args: tuple,
    kwargs: Mapping[str, Any],
    extra_fields: tuple[str, ...],
    init_params: PyTree,
    length: int,
) -> dict[str, str]:
    """What decides the draws of a run, by name.

    Code is compared by what it does: comments and names of files do not matter; functions of
    the same package that the model calls, values that it closes over and global constants that it
    reads do.
    """
    method = mcmc.chain_method
    found = {
        "model": digest(_model(mcmc.sampler)),
        "kernel": f"{type(mcmc.sampler).__qualname__} {digest(type(mcmc.sampler))}",
        **{f"kernel setting {n}": text for n, text in _kernel_settings(mcmc.sampler).items()},
        "num_warmup": str(mcmc.num_warmup),
        "thinning": str(mcmc.thinning),
        "num_chains": str(mcmc.num_chains),
        "chain_method": method if isinstance(method, str) else getattr(method, "__name__", "?"),
        "postprocess_fn": digest(mcmc.postprocess_fn),
        "extra_fields": ", ".join(extra_fields),
        "draws_per_segment": str(length),
        "rng_key": digest(rng_key),
        "x64": str(bool(jax.config.read("jax_enable_x64"))),
    }
    trees = {"args": list(args), "kwargs": dict(kwargs), "init_params": init_params}
    for root, tree in trees.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_host_rows)[0]:
            found[f"data {root}{jax.tree_util.keystr(path)}"] = _data(leaf)
    return found


def versions() -> dict[str, str]:
    """What may change the last bits of draws without being a mistake."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {**_versions(), "python": python, "device": jax.devices()[0].device_kind}


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names of what differs, with both values where they can be read."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name, "absent"), new.get(name, "absent")
        if before != now:
            found.append(f"{name} (was {before}, is {now})")
    return found


def digest(value: Any) -> str:
    """A short text that is the same for the same value, in another process too."""
    state = hashlib.sha256()
    _feed(state, value, set())
    return state.hexdigest()[:16]


def _data(leaf: Any) -> str:
    if isinstance(leaf, (np.ndarray, jax.Array, HostRows)):
        return f"{leaf.dtype}{list(leaf.shape)} {digest(leaf)}"
    return repr(leaf) if isinstance(leaf, PLAIN) else digest(leaf)


def _is_host_rows(value: Any) -> bool:
    return isinstance(value, HostRows)


def _kernel_settings(kernel: Any) -> dict[str, str]:
    """Settings of a kernel by name, as text."""
    if isinstance(kernel, SGKernel):
        return {name: _setting(value) for name, value in kernel.settings.as_dict().items()}
    names = {
        name
        for cls in type(kernel).__mro__
        if "__init__" in vars(cls)
        for name in inspect.signature(vars(cls)["__init__"]).parameters
    }
    found = {}
    for name in sorted(names - {"self", "model", "args", "kwargs"}):
        # the schedule is what this package keeps of a step size
        for attribute in (f"_given_{name}", f"_{name}", name):
            if attribute in vars(kernel):
                found[name] = _setting(vars(kernel)[attribute])
                break
    for name in ("_schedule",):
        if name in vars(kernel):
            found["step_size"] = _setting(vars(kernel)[name])
    return found


def _model(kernel: Any) -> Any:
    given = kernel.settings.model if isinstance(kernel, SGKernel) else None
    return getattr(kernel, "_model", given)


def _setting(value: Any) -> str:
    text = _without_addresses(repr(value))
    readable = isinstance(value, PLAIN) or dataclasses.is_dataclass(value)
    return text if readable and len(text) < 80 else digest(value)


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _feed(state: Any, value: Any, seen: set[int]) -> None:
    """Add a value to a hash, whatever it is."""
    if isinstance(value, PLAIN):
        state.update(f"{type(value).__name__} {value!r};".encode())
        return
    if id(value) in seen:
        state.update(b"seen;")
        return
    seen.add(id(value))
    state.update(f"{type(value).__qualname__}(".encode())
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        _feed_array(state, value)
    elif isinstance(value, HostRows):
        state.update(f"{value.dtype} {value.shape} ".encode())
        for block in value.blocks(ROW_BLOCK_BYTES, MAX_HASHED_BYTES):
            state.update(block.data)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            _feed(state, key, seen)
            _feed(state, value[key], seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(state, item, seen)
    elif isinstance(value, (set, frozenset)):
        state.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, functools.partial):
        _feed(state, (value.func, value.args, value.keywords), seen)
    elif _is_code(value) and _of_library(value):
        state.update(getattr(value, "__qualname__", "").encode())
    elif isinstance(value, types.FunctionType):
        _feed_function(state, value, seen)
    elif isinstance(value, types.MethodType):
        _feed(state, (value.__func__, value.__self__), seen)
    elif hasattr(value, "__wrapped__"):  # a compiled function
        _feed(state, value.__wrapped__, seen)
    elif isinstance(value, type):
        _feed_type(state, value, seen)
    elif isinstance(value, MCMCKernel):
        _feed(state, (_model(value), _kernel_settings(value)), seen)
    elif dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if f.init and hasattr(value, f.name)]
        _feed(state, type(value), seen)
        _feed(state, {name: getattr(value, name) for name in fields}, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, types.ModuleType):
        _feed(state, type(value), seen)
        # what objects keep for themselves changes while they are used
        _feed(state, {n: x for n, x in vars(value).items() if not n.startswith("_")}, seen)
    else:
        state.update(_without_addresses(repr(value)).encode())
    state.update(b");")
    # an id is only unique while its value lives
    seen.discard(id(value))


def _feed_array(state: Any, value: Any) -> None:
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        state.update(str(jax.random.key_impl(value)).encode())
        value = jax.random.key_data(value)
    array = np.asarray(value)
    state.update(f"{array.dtype} {array.shape} ".encode())
    if array.dtype.hasobject:
        state.update(repr(array.tolist()).encode())
        return
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if raw.size <= MAX_HASHED_BYTES:
        state.update(raw.data)
        return
    for start in np.linspace(0, raw.size - 2**20, 1000).astype(int):
        state.update(raw[start : start + 2**20].data)


def _feed_function(state: Any, function: types.FunctionType, seen: set[int]) -> None:
    state.update(function.__qualname__.encode())
    _feed(state, (function.__defaults__, function.__kwdefaults__), seen)
    for cell in function.__closure__ or ():
        try:
            _feed(state, cell.cell_contents, seen)
        except ValueError:  # not yet filled
            state.update(b"empty;")
    names: set[str] = set()
    _feed_code(state, function.__code__, names, seen)
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if _is_code(value) or isinstance(value, (*PLAIN, tuple, np.ndarray, jax.Array)):
            state.update(name.encode())
            _feed(state, value, seen)


def _feed_code(state: Any, code: types.CodeType, names: set[str], seen: set[int]) -> None:
    """Instructions, constants and names, but not lines, files and comments."""
    state.update(code.co_code)
    state.update(repr(code.co_names).encode())
    names.update(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _feed_code(state, constant, names, seen)
        else:
            _feed(state, constant, seen)


def _feed_type(state: Any, cls: type, seen: set[int]) -> None:
    state.update(f"{cls.__module__}.{cls.__qualname__}".encode())
    if not _of_library(cls):
        for name, value in sorted(vars(cls).items()):
            if isinstance(value, types.FunctionType):
                _feed(state, (name, value), seen)


def _is_code(value: Any) -> bool:
    kinds = (type, types.FunctionType, types.BuiltinFunctionType, functools.partial)
    return isinstance(value, kinds) or hasattr(value, "__wrapped__")


def _of_library(value: Any) -> bool:
    """Whether versions already tell what code it is."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] in LIBRARIES
