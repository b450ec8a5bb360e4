"""Programs that run a few times: they are compiled fast, and once for all functions that are equal.

A model is a function and may have changed: its closed-over data, or a global that it reads. So a
program is traced again at every call. Programs are equal if XLA is given the same text; this is
also how JAX's cache on disk tells programs apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._util import PyTree, in_trace
from .jaxprs import length, work

MUCH_WORK = 1.5e6
"""Operations for each line of a program from which on an optimising compiler is worth its time."""
LEAST_TURNS = 4
"""Turns of a loop whose length is not known, for the work of a program. A search has dozens."""
MOST_PROGRAMS = 64

_programs: dict[tuple, Callable] = {}


def compiled(fn: Callable, *args: PyTree) -> PyTree:
    """``fn(*args)`` for a pure function, in a program that equal functions share.

    `jax.jit` would compile again for every new function, such as a closure over new data. Closed-
    over arrays are inputs of the program, so that other data of the same shapes share it too.
    Within an outer transformation ``fn`` becomes a part of the outer program.
    """
    if in_trace(args):
        return fn(*args)
    traced, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    treedef = jax.tree.structure(shape)

    def run(consts: list, args: tuple) -> PyTree:
        flat = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))(*jax.tree.leaves(args))
        return jax.tree.unflatten(treedef, flat)

    inputs = traced.consts, args
    lowered = jax.jit(run).lower(*inputs)
    text = lowered.as_text()
    # within pmap, values belong to its mesh
    places = [getattr(x, "sharding", None) for x in jax.tree.leaves(inputs)]
    where = jax.config.jax_default_device, jax.sharding.get_abstract_mesh()  # type: ignore
    key = hashlib.sha256(text.encode()).digest(), lowered.in_tree, treedef, *places, *where
    program = _programs.pop(key, None)
    if program is None:
        quick = work(traced.jaxpr, LEAST_TURNS) < MUCH_WORK * length(traced.jaxpr)
        program = lowered.compile(compiler_options=lean_options(quick))
    if "callback" not in text:  # otherwise functions on the host may differ
        _programs[key] = program  # the last one used is the last one
        if len(_programs) > MOST_PROGRAMS:
            del _programs[next(iter(_programs))]
    return program(*inputs)


@cache
def lean_options(quick: bool = False) -> dict[str, Any] | None:
    """Options of the CPU's compiler that halve the time of compilation; code is as fast.

    If ``quick``, it takes a fifth of the time, and code is 2 to 4 times slower.
    """
    options: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}
    if quick:
        options |= {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda x: -x, compiler_options=options)(0.0)
    except Exception:  # this version does not know one of them
        return None
    return options
