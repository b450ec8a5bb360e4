"""Short digests of values and of functions on the host, the same in every process.

A digest is of content: of the bytes of arrays and rows, of the fields of objects, of the byte code
of a function and of what it reads. Names of users' functions and classes do not count.
"""

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
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from .._util import is_key, words
from ..rows.host_rows import HostRows
from ..rows.reader import Reader

MAX_HASHED_BYTES = 2**32
"""Largest size of an array that is hashed completely. Of a larger array, a thousand blocks are
hashed."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
PYTHON = ".".join(platform.python_version_tuple()[:2])
FUNCTION = "a function"
"""Replaces the name of a user's function or object; the program contains what it computes."""
OTHER_CLASS = "a class of the user"

_known_arrays: dict[int, str] = {}
"""Digests of arrays of JAX, for as long as these live. Such arrays cannot change."""


class Digests:
    """Digests of values by their content; each array is hashed only once."""

    def __init__(self) -> None:
        # with the values, because an id is only unique during the life of its value
        self._known: dict[int, tuple[Any, str]] = {}

    def know(self, rows: HostRows, text: str) -> None:
        """Give a text for rows on the host; they are then not read."""
        self._known |= {id(x): (x, text) for x in (rows, rows.reader)}

    def of(self, value: Any) -> str:
        """A text of 16 digits; functions and objects of unknown classes do not count."""
        if isinstance(value, jax.Array):
            if id(value) not in _known_arrays:
                _known_arrays[id(value)] = self._new(value)
                weakref.finalize(value, _known_arrays.pop, id(value), None)
            return _known_arrays[id(value)]
        if not (is_array(value) or isinstance(value, HostRows)):
            return self._new(value)
        if id(value) not in self._known:
            found = self._new(value)
            if isinstance(value, HostRows):
                self.know(value, found)
            else:
                self._known[id(value)] = value, found
        return self._known[id(value)][1]

    def reader(self, reader: Reader) -> str:
        """Digest of the rows that a reader gathers."""
        if id(reader) not in self._known:
            first, num_rows = reader.held.start, reader.shape[0]
            rows = HostRows(reader.source, timeout=reader.timeout, first=first, num_rows=num_rows)
            self._known[id(reader)] = reader, self.of(rows)
        return self._known[id(reader)][1]

    def _new(self, value: Any) -> str:
        found = hashlib.sha256()
        for part in self.parts(value):
            found.update(part.encode() if isinstance(part, str) else part)
        return found.hexdigest()[:16]

    def parts(self, value: Any) -> Iterator[Any]:
        """Texts and bytes that distinguish a value from others."""
        if isinstance(value, PLAIN):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, HostRows):
            yield f"{value.dtype} {value.shape} "
            yield f"{value.held} " if value.is_part else ""
            yield from value.blocks(MAX_HASHED_BYTES)
        elif is_array(value):
            yield from _array(value)
        elif isinstance(value, Mapping):
            entries = sorted(self.of(key) + self.of(x) for key, x in value.items())
            yield from ("mapping ", *entries)
        elif isinstance(value, (list, tuple)):
            yield from ("sequence ", *map(self.of, value))
        elif isinstance(value, (set, frozenset)):
            yield from ("set ", *sorted(map(self.of, value)))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value) if f.init and hasattr(value, f.name)]
            yield class_name(value) + self.of({name: getattr(value, name) for name in names})
        elif isinstance(value, functools.partial):
            yield self.of((value.func, value.args, value.keywords))
        elif hasattr(value, "iloc") or hasattr(value, "tocsr"):
            yield from map(self.of, _tables(value))
        else:
            yield function_name(value)


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array of NumPy or JAX, of any of their classes."""
    kinds = (np.ndarray, np.generic, jax.Array)
    of_jax = type(x).__module__.partition(".")[0] in ("jax", "jaxlib")
    return isinstance(x, kinds) or (of_jax and hasattr(x, "__array__") and hasattr(x, "dtype"))


def code_of(function: Callable, digests: Digests) -> str:
    """Digest of a function that a program calls on the host: its byte code and what it reads.

    Names, comments and annotations do not count. Byte code depends on Python's version.
    """
    found = hashlib.sha256()
    for part in _Code(digests).parts(function):
        found.update(part.encode() if isinstance(part, str) else part)
    return found.hexdigest()[:16]


class _Code:
    """Visits functions and the values that they read, each once."""

    def __init__(self, digests: Digests) -> None:
        self.digests = digests
        self._seen: dict[int, Any] = {}

    def parts(self, value: Any) -> Iterator[Any]:
        """Texts and bytes of a function, or of a value that a function reads."""
        if isinstance(value, Reader):
            yield self.digests.reader(value)
            return
        if isinstance(value, (*PLAIN, set, frozenset, HostRows)) or is_array(value):
            yield self.digests.of(value)
            return
        if id(value) in self._seen:
            yield "seen;"
            return
        self._seen[id(value)] = value
        if isinstance(value, functools.partial):
            value = value.func, value.args, value.keywords
        elif isinstance(value, types.MethodType):
            value = value.__func__, value.__self__
        elif hasattr(value, "__wrapped__"):  # a compiled function
            value = (value.__wrapped__,)
        if isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                yield from self.parts(key)
                yield from self.parts(value[key])
        elif isinstance(value, (list, tuple)):
            yield f"{len(value)} "
            for x in value:
                yield from self.parts(x)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
            yield value.__name__
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            call = type(value).__call__ if callable(value) else None
            yield from self.parts((call, kept(value)))
        else:
            yield without_addresses(repr(value))

    def _function(self, function: types.FunctionType) -> Iterator[Any]:
        library = _of_library(function.__globals__.get("__name__"))
        for cell in function.__closure__ or ():
            try:
                yield from self.parts(cell.cell_contents)
            except ValueError:  # an empty cell
                yield "empty;"
        if library:
            yield function.__qualname__
            return
        yield from self.parts((function.__defaults__, function.__kwdefaults__))
        for code in _nested(function.__code__):
            yield code.co_code
            for name in code.co_names:
                if name in function.__globals__:
                    yield from self.parts(function.__globals__[name])
                else:
                    yield f"{name};"
            for x in code.co_consts:
                if not isinstance(x, types.CodeType):
                    yield self.digests.of(None if x is function.__doc__ else x)


def _tables(value: Any) -> Iterator[Any]:
    """Arrays and labels of pandas objects, and arrays of sparse matrices."""
    if hasattr(value, "tocsr"):
        found = value.tocsr()
        yield from (found.shape, found.data, found.indices, found.indptr)
        return
    yield value.index.to_numpy()
    if not hasattr(value, "columns"):
        yield value.to_numpy()
        return
    yield value.columns.to_numpy()
    for k in range(value.shape[1]):
        yield value.iloc[:, k].to_numpy()


def _array(value: Any) -> Iterator[Any]:
    if is_key(value):
        yield str(jax.random.key_impl(value))
    if not getattr(value, "is_fully_addressable", True):
        yield f"{value.dtype} {value.shape} of several processes"
        return
    array = np.asarray(words(value))
    yield f"{array.dtype} {array.shape} "
    if array.dtype.hasobject:
        yield without_addresses(repr(array.tolist()))
        return
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if raw.size <= MAX_HASHED_BYTES:
        yield raw
        return
    for start in np.linspace(0, raw.size - 2**20, 1000).astype(int):
        yield raw[start : start + 2**20]


def function_name(value: Any) -> str:
    """Name of a function of NumPyro, such as an init strategy; a user's may be renamed."""
    if isinstance(value, functools.partial):
        return function_name(value.func)
    root = (getattr(value, "__module__", None) or "").partition(".")[0]
    return value.__qualname__ if root == "numpyro" and hasattr(value, "__name__") else FUNCTION


def class_name(value: Any) -> str:
    """Name of an object's class if it is of this package or NumPyro; a user's may be renamed."""
    cls = type(value)
    known = cls.__module__.partition(".")[0] in ("numpyro", "numpyro_geom")
    return cls.__qualname__ if known else OTHER_CLASS


def kept(value: Any) -> dict[str, Any]:
    """The values that define an object: public attributes, and arguments kept under private names.

    Other private attributes can change while the object is used.
    """
    found = {name: x for name, x in vars(value).items() if not name.startswith("_")}
    for cls in type(value).__mro__:
        if isinstance(vars(cls).get("__init__"), types.FunctionType):
            for name in inspect.signature(vars(cls)["__init__"]).parameters:
                if f"_{name}" in vars(value):
                    found[name] = vars(value)[f"_{name}"]
    return dict(sorted(found.items()))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all code objects within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def without_addresses(text: str) -> str:
    """The ``repr`` of an object without memory addresses; these differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


@functools.cache
def _of_library(module: str | None) -> bool:
    """Whether a module is in an installed package, whose version already identifies its code."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    first = (module or "").partition(".")[0]
    return first in {"numpyro_geom", *sys.builtin_module_names} or file.startswith(tuple(folders))
