"""A short text for any value, the same in another process; of code what it does: its byte code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import platform
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from numpyro.infer.mcmc import MCMCKernel

from .._mcmc import model_of
from .._util import is_key, words
from ..kernel import SGKernel
from ..rows.host_rows import HostRows

MAX_HASHED_BYTES = 2**32
"""Size of an array up to which all of it is hashed; of a larger one a thousand blocks are."""
ROW_BLOCK_BYTES = 2**22
"""Size of what is read and hashed at a time of rows on the host."""
LIBRARIES = {"builtins", "flax", "jax", "jaxlib", "numpy", "numpyro", "numpyro_geom", "optax"}
"""Packages whose code is compared by name only, as Python's own: their versions tell the rest."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
CONSTANTS = (*PLAIN, tuple, np.ndarray, jax.Array)
KEPT_APART = ("_kernels", "_specs", "_weights")
"""Settings of NumPyro's kernels that are not under the names of their arguments."""
PYTHON = ".".join(platform.python_version_tuple()[:2])
BY_BYTE_CODE = " by byte code of Python "
"""In the digest of what has code of the user, before the version, with which byte code changes."""


def digest(value: Any) -> str:
    """Of any value; of code what it does: its byte code, and what it closes over and reads."""
    state = _Digest()
    text = hashlib.sha256(state.of(value).encode()).hexdigest()[:16]
    return f"{text}{BY_BYTE_CODE}{PYTHON}" if state.has_code else text


def settings_of(kernel: MCMCKernel) -> dict[str, Any]:
    """Arguments of a kernel's constructor, all of them or as far as it keeps them."""
    if isinstance(kernel, SGKernel):  # as they were before it has seen a model
        return kernel.replace().settings.as_dict()
    found = {name: x for name, x in _kept(kernel).items() if name != "model"}
    return found | {name: x for name, x in vars(kernel).items() if name in KEPT_APART}


def as_text(value: Any) -> str:
    """A digest, with the value itself where that is short."""
    if isinstance(value, PLAIN):
        return repr(value)
    text = _without_addresses(repr(value)) if dataclasses.is_dataclass(value) else ""
    return f"{text} {digest(value)}" if 0 < len(text) < 80 else digest(value)


class _Digest:
    """Hashes values by what they are made of.

    Attributes:
        has_code: whether code of the user was among them.
    """

    def __init__(self) -> None:
        self.has_code = False
        # with the values, kept alive since an id is only unique while its value lives
        self._known: dict[int, tuple[Any, str]] = {}

    def of(self, value: Any) -> str:
        """A text for a value."""
        if isinstance(value, PLAIN):
            return f"{type(value).__name__} {value!r};"
        if id(value) not in self._known:
            self._known[id(value)] = value, "seen"  # within itself
            found = hashlib.sha256(f"{type(value).__qualname__} ".encode())
            for part in self._parts(value):
                found.update(part.encode() if isinstance(part, str) else part)
            self._known[id(value)] = value, found.hexdigest()
        return self._known[id(value)][1]

    def _parts(self, value: Any) -> Iterator[Any]:
        """Texts and bytes that tell a value from others of its type."""
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            yield from _array(value)
        elif isinstance(value, HostRows):
            yield f"{value.dtype} {value.shape} "
            yield from value.blocks(ROW_BLOCK_BYTES, MAX_HASHED_BYTES)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                yield self.of(key) + self.of(value[key])
        elif isinstance(value, (list, tuple)):
            yield from map(self.of, value)
        elif isinstance(value, (set, frozenset)):
            yield repr(sorted(map(repr, value)))
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, type):
            for base in value.__mro__:
                yield f"{base.__module__}.{base.__qualname__} "
                if not _of_library(base.__module__):
                    yield from map(self.of, _members(base))
        else:
            found = _made_of(value)
            yield found if isinstance(found, str) else self.of(found)

    def _function(self, function: types.FunctionType) -> Iterator[Any]:
        yield function.__qualname__
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield name
            try:
                yield self.of(cell.cell_contents)
            except ValueError:  # not yet filled
                yield "empty;"
        if _of_library(function.__globals__.get("__name__")):
            return
        self.has_code = True
        yield self.of((function.__defaults__, function.__kwdefaults__))
        names: set[str] = set()
        for part in _nested(code):
            names.update(part.co_names)
            yield part.co_code
            yield repr((part.co_names, part.co_varnames))
            for x in part.co_consts:
                if not isinstance(x, types.CodeType):
                    yield self.of(None if x is function.__doc__ else x)
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if _is_code(value) or isinstance(value, CONSTANTS):
                yield name
                yield self.of(value)


def _array(value: Any) -> Iterator[Any]:
    if is_key(value):
        yield str(jax.random.key_impl(value))
    array = np.asarray(words(value))
    yield f"{array.dtype} {array.shape} "
    if array.dtype.hasobject:
        yield repr(array.tolist())
        return
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if raw.size <= MAX_HASHED_BYTES:
        yield raw
        return
    for start in np.linspace(0, raw.size - 2**20, 1000).astype(int):
        yield raw[start : start + 2**20]


def _made_of(value: Any) -> Any:
    """What decides what an object does, as simpler values."""
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if hasattr(value, "__wrapped__"):  # a compiled function
        return value.__wrapped__
    if isinstance(value, types.BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, MCMCKernel):
        return type(value), model_of(value), settings_of(value)
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if f.init and hasattr(value, f.name)]
        return type(value), {name: getattr(value, name) for name in names}
    if hasattr(value, "__dict__") and not isinstance(value, types.ModuleType):
        return type(value), _kept(value)
    return _without_addresses(repr(value))


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """What a class defines: functions, and constants that are not its own business."""
    made = dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")
    for name, value in sorted(vars(cls).items()):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        if isinstance(value, types.FunctionType):
            inner = inspect.unwrap(value)
            # dataclasses and named tuples write some themselves, which say nothing new
            written = inner.__code__.co_filename.startswith("<")
            if not (made and (written or _of_library(inner.__globals__.get("__name__")))):
                yield name, value
        elif isinstance(value, CONSTANTS) and name[:1] != "_":
            yield name, value


def _kept(value: Any) -> dict[str, Any]:
    """What an object was made of: public attributes, and arguments kept under private names.

    What else objects keep for themselves changes while they are used.
    """
    found = {name: x for name, x in vars(value).items() if not name.startswith("_")}
    for cls in type(value).__mro__:
        if isinstance(vars(cls).get("__init__"), types.FunctionType):
            for name in inspect.signature(vars(cls)["__init__"]).parameters:
                if f"_{name}" in vars(value):
                    found[name] = vars(value)[f"_{name}"]
    return dict(sorted(found.items()))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _without_addresses(text: str) -> str:
    """The ``repr`` of an object as it is in another process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _is_code(value: Any) -> bool:
    kinds = (type, types.FunctionType, types.BuiltinFunctionType, functools.partial)
    return isinstance(value, kinds) or hasattr(value, "__wrapped__")


@functools.cache
def _of_library(module: str | None) -> bool:
    """Whether versions already tell what code a module has."""
    first = (module or "").partition(".")[0]
    if first in LIBRARIES:
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return first in sys.stdlib_module_names and (
        not file or any(file.startswith(folder) for folder in folders)
    )
