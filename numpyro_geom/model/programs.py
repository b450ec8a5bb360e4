"""Programs before the chains move, each compiled once for all callers.

NumPyro compiles its sampling loop at every ``run``, because a model is a function and may have
changed: its closed-over data, or a global that it reads. So programs are also traced again here,
which is cheap. If the trace is the same, the compiled program is used again.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from .._util import is_traced, words

PyTree = Any

MOST_PROGRAMS = 64
"""Number of programs that are kept; the least recently used one is dropped first."""

RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "rule")
"""Rules of derivatives and vmap: new in every trace, but a program no longer needs them."""
_RULES = re.compile(rf"\b({'|'.join(RULES)})=[^\n]*")
_CALLS_HOST = object()

_programs: OrderedDict[tuple, Callable] = OrderedDict()


def compiled(
    fn: Callable,
    *args: PyTree,
    at_most: float = float("inf"),
    otherwise: Callable | None = None,
) -> PyTree:
    """``fn(*args)``, in a program that is compiled once for all functions with the same trace.

    Within an outer transformation ``fn`` becomes a part of the outer program.

    Args:
        fn: a pure function; its closed-over values may change from call to call.
        args: pytrees of arrays.
        at_most: most operations of a program that is compiled. ``otherwise`` runs instead of a
            longer program.
        otherwise: the replacement, by default ``fn`` itself. It runs operation by operation, each
            compiled once for each shape. This is faster if ``fn`` runs once and repeats its
            operations, like a deep network.
    """
    leaves, treedef = jax.tree.flatten(args)
    if is_traced(leaves):
        return fn(*args)
    traced, shape = jax.make_jaxpr(
        lambda *flat: fn(*jax.tree.unflatten(treedef, flat)), return_shape=True
    )(*leaves)
    if is_traced(traced.consts):
        return fn(*args)
    hidden = list(_hidden(traced.jaxpr))
    if _length(traced.jaxpr) > at_most:
        return (otherwise or fn)(*args)
    if traced.effects or _CALLS_HOST in hidden:  # the text does not show the called function
        return jax.jit(fn)(*args)
    # within pmap, values belong to its mesh
    key = _RULES.sub("", str(traced.jaxpr)), jax.sharding.get_abstract_mesh(), *hidden
    if key not in _programs:
        jaxpr = traced.jaxpr
        _programs[key] = jax.jit(
            lambda consts, flat: jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*flat)
        )
        while len(_programs) > MOST_PROGRAMS:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return jax.tree.unflatten(jax.tree.structure(shape), _programs[key](traced.consts, leaves))


def _length(jaxpr: Jaxpr) -> int:
    inner = (x for e in jaxpr.eqns for x in jax.tree.leaves(e.params, is_leaf=_is_jaxpr))
    parts = (x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in inner if _is_jaxpr(x))
    return len(jaxpr.eqns) + sum(map(_length, parts))


def _hidden(jaxpr: Jaxpr) -> Iterator[Any]:
    """Parts of a trace that its text does not show: digests of inner arrays, and functions."""
    for equation in jaxpr.eqns:
        if "callback" in equation.primitive.name:
            yield _CALLS_HOST
        for variable in equation.invars:
            literal = getattr(variable, "val", 0)
            if np.ndim(literal) > 0:
                yield _digest(literal)
        for name, value in equation.params.items():
            for leaf in jax.tree.leaves(value, is_leaf=_is_jaxpr):
                if isinstance(leaf, ClosedJaxpr):
                    yield from map(_digest, leaf.consts)
                    yield from _hidden(leaf.jaxpr)
                elif isinstance(leaf, Jaxpr):
                    yield from _hidden(leaf)
                elif isinstance(leaf, (np.ndarray, jax.Array)):
                    yield _digest(leaf)
                elif callable(leaf) and name not in RULES:
                    yield leaf


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, (ClosedJaxpr, Jaxpr))


def _digest(x: Any) -> str:
    array = np.ascontiguousarray(words(x))
    return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
