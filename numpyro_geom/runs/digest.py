"""A short text for any value: the same in another process and under another version of Python."""

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
from ..kernel import SGKernel
from ..rows.host_rows import HostRows
from .keys import as_words, is_key
from .source import nested, syntax_of

MAX_HASHED_BYTES = 2**32
"""Size of an array up to which all of it is hashed; of a larger one a thousand blocks are."""
ROW_BLOCK_BYTES = 2**22
"""Size of what is read and hashed at a time of rows on the host."""
LIBRARIES = {"builtins", "flax", "jax", "jaxlib", "numpy", "numpyro", "numpyro_geom", "optax"}
"""Packages whose code is compared by name only, as Python's own: their versions tell the rest."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
WRITTEN = {
    f"__{name}__"
    for name in "delattr eq ge getnewargs gt hash init le lt new replace repr setattr".split()
}
"""What dataclasses and named tuples write themselves, otherwise under each version of Python."""
KEPT_APART = ("_kernels", "_specs", "_weights")
"""Settings of NumPyro's kernels that are not under the names of their arguments."""


def digest(value: Any) -> str:
    """Of any value; of code what it does: its syntax, and what it closes over and reads.

    Where a function has no source its byte code is taken, and the text says of which Python.
    """
    state = _Digest()
    text = state.of(value)[:16]
    python = ".".join(platform.python_version_tuple()[:2])
    return f"{text} by byte code of Python {python}" if state.by_byte_code else text


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
    text = without_addresses(repr(value)) if dataclasses.is_dataclass(value) else ""
    return f"{text} {digest(value)}" if 0 < len(text) < 80 else digest(value)


def without_addresses(text: str) -> str:
    """The ``repr`` of an object as it is in another process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


class _Digest:
    """A hash that can be fed with anything.

    Attributes:
        hash: so far.
        by_byte_code: whether a function was without source.
    """

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.by_byte_code = False
        self._known: dict[int, tuple[Any, str]] = {}
        """What was fed, kept alive since an id is only unique while its value lives."""

    def write(self, text: str) -> None:
        self.hash.update(text.encode())

    def of(self, value: Any) -> str:
        """The digest of a value, whatever it is."""
        if id(value) not in self._known:
            outer, self.hash = self.hash, hashlib.sha256()
            self._known[id(value)] = value, "seen"  # within itself
            self.feed(value) if isinstance(value, PLAIN) else self._feed(value)
            self._known[id(value)] = value, self.hash.hexdigest()
            self.hash = outer
        return self._known[id(value)][1]

    def feed(self, value: Any) -> None:
        """Add a value."""
        plain = isinstance(value, PLAIN)
        self.write(f"{type(value).__name__} {value!r};" if plain else f"{self.of(value)};")

    def _feed(self, value: Any) -> None:
        self.write(f"{type(value).__qualname__}(")
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            self._feed_array(value)
        elif isinstance(value, HostRows):
            self.write(f"{value.dtype} {value.shape} ")
            for block in value.blocks(ROW_BLOCK_BYTES, MAX_HASHED_BYTES):
                self.hash.update(block.data)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                self.feed(key)
                self.feed(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.feed(item)
        elif isinstance(value, (set, frozenset)):
            self.write(repr(sorted(map(repr, value))))
        elif isinstance(value, functools.partial):
            self.feed((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            self._feed_function(value)
        elif isinstance(value, types.MethodType):
            self.feed((value.__func__, value.__self__))
        elif hasattr(value, "__wrapped__"):  # a compiled function
            self.feed(value.__wrapped__)
        elif isinstance(value, type):
            self._feed_type(value)
        elif isinstance(value, types.BuiltinFunctionType):
            self.write(value.__qualname__)
        elif isinstance(value, MCMCKernel):
            self.feed((type(value), model_of(value), settings_of(value)))
        elif dataclasses.is_dataclass(value):
            names = [f.name for f in dataclasses.fields(value) if f.init and hasattr(value, f.name)]
            self.feed((type(value), {name: getattr(value, name) for name in names}))
        elif hasattr(value, "__dict__") and not isinstance(value, types.ModuleType):
            self.feed((type(value), _kept(value)))
        else:
            self.write(without_addresses(repr(value)))
        self.write(");")

    def _feed_array(self, value: Any) -> None:
        if is_key(value):
            self.write(str(jax.random.key_impl(value)))
            value = as_words(value)
        array = np.asarray(value)
        self.write(f"{array.dtype} {array.shape} ")
        if array.dtype.hasobject:
            self.write(repr(array.tolist()))
            return
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if raw.size <= MAX_HASHED_BYTES:
            self.hash.update(raw.data)
            return
        for start in np.linspace(0, raw.size - 2**20, 1000).astype(int):
            self.hash.update(raw[start : start + 2**20].data)

    def _feed_function(self, function: types.FunctionType) -> None:
        self.write(function.__qualname__)
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        for name in sorted(cells):
            self.write(name)
            try:
                self.feed(cells[name].cell_contents)
            except ValueError:  # not yet filled
                self.write("empty;")
        if _of_library(function.__globals__.get("__name__")):
            return
        self.feed((function.__defaults__, function.__kwdefaults__))
        names = {name for part in nested(code) for name in part.co_names}
        syntax = syntax_of(function)
        if syntax is not None:
            self.write(syntax[0])
            names &= syntax[1]
        else:
            self.by_byte_code = True
            for part in nested(code):
                self.hash.update(part.co_code)
                self.write(repr(part.co_names))
                self.feed([x for x in part.co_consts if not isinstance(x, types.CodeType)])
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if _is_code(value) or isinstance(value, (*PLAIN, tuple, np.ndarray, jax.Array)):
                self.write(name)
                self.feed(value)

    def _feed_type(self, cls: type) -> None:
        for base in cls.__mro__:
            self.write(f"{base.__module__}.{base.__qualname__}")
            if not _of_library(base.__module__):
                for name, value in _members(base):
                    self.feed((name, value))


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
            written = name in WRITTEN and syntax_of(inner) is None
            if not (made and (written or _of_library(inner.__globals__.get("__name__")))):
                yield name, value
        elif isinstance(value, (*PLAIN, tuple, np.ndarray, jax.Array)) and name[:1] != "_":
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
