"""Which outputs of a function can depend on which of its inputs, read off its jaxpr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def dependence(fn: Callable, *args: Any) -> list[frozenset[int]]:
    """For each output leaf of ``fn(*args)`` the positions of the arguments that it may depend on.

    An argument that is left out certainly has no influence; one that is named may have none.

    Args:
        fn: a function that can be traced.
        args: pytrees of arrays, or of their shapes.
    """
    closed = jax.make_jaxpr(fn)(*args)
    counts = [len(jax.tree.leaves(a)) for a in args]
    inputs = [frozenset([i]) for i, n in enumerate(counts) for _ in range(n)]
    return _reach(closed.jaxpr, inputs)


def _reach(jaxpr: Any, inputs: list[frozenset[int]]) -> list[frozenset[int]]:
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variable: Any) -> frozenset[int]:
        if isinstance(variable, core.Literal):
            return frozenset()
        return known.get(variable, frozenset())

    for equation in jaxpr.eqns:
        given = [of(v) for v in equation.invars]
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if equation.primitive.name in _CALLS and inner is not None:
            outputs = _reach(getattr(inner, "jaxpr", inner), given)
        else:  # loops and branches too: everything may depend on everything
            outputs = [frozenset().union(*given)] * len(equation.outvars)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [of(v) for v in jaxpr.outvars]


_CALLS = ("pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "remat", "checkpoint")
