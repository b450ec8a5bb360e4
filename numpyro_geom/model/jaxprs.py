"""Walks over a traced program: its length, what is needed for its results, what these depend on.

A program is a list of equations (`jax.extend.core.Jaxpr
<https://docs.jax.dev/en/latest/jaxpr.html>`_). An equation may have programs of its own: the
program of a function that it calls, the body of a loop, the branches of a choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from .._util import PyTree, in_trace

Fact = TypeVar("Fact")

CALLS = (
    "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit",
    "remat",
)  # fmt: skip
"""Operations that call a program once, with all of their inputs."""

UNKNOWN_TURNS = 1000
"""Turns of a loop whose length is not known, such as that of an adaptive integrator."""
FACTORISATIONS = {
    "cholesky": 1 / 3, "triangular_solve": 1.0, "lu": 2 / 3, "geqrf": 4 / 3, "eigh": 9.0,
    "svd": 20.0, "eig": 25.0,
}  # fmt: skip
"""Operations per entry of the result and column of the matrix: LAPACK's, about."""


def inner(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs within an equation."""
    for given in equation.params.values():
        for value in given if isinstance(given, (tuple, list)) else (given,):
            if isinstance(value, (ClosedJaxpr, Jaxpr)):
                yield value.jaxpr if isinstance(value, ClosedJaxpr) else value


def length(jaxpr: Jaxpr) -> int:
    """Number of equations of a program, with the equations of all programs within it."""
    return len(jaxpr.eqns) + sum(length(part) for e in jaxpr.eqns for part in inner(e))


def largest(jaxpr: Jaxpr) -> int:
    """Entries of the largest array that a program computes."""
    own = [x.aval.size for e in jaxpr.eqns for x in e.outvars if hasattr(x.aval, "size")]
    return max([*own, *(largest(part) for e in jaxpr.eqns for part in inner(e))], default=1)


def work(jaxpr: Jaxpr, unknown: int = 1) -> float:
    """About the number of operations of a program.

    ``unknown`` is the number of turns of a loop whose length is not known.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        shapes: list[tuple] = [getattr(x.aval, "shape", ()) for x in equation.invars]
        per_number = 1.0
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            per_number = 2 * prod(shapes[0][k] for k in contracted)
        elif name == "conv_general_dilated":
            per_number = 2 * prod(shapes[1]) / shapes[1][params["dimension_numbers"].rhs_spec[0]]
        elif name in FACTORISATIONS:
            per_number = FACTORISATIONS[name] * shapes[0][-1]
        total += per_number * sum(prod(getattr(x.aval, "shape", ())) for x in equation.outvars)
        repeats = {"scan": params.get("length", 1), "while": unknown}.get(name, 1)
        total += repeats * sum(work(part, unknown) for part in inner(equation))
    return total


def needed(jaxpr: Jaxpr, results: Iterable[Any]) -> tuple[list[JaxprEqn], set[Any]]:
    """Equations that results depend on, and the variables among their inputs and the results.

    Literals among the results do not count.
    """
    variables = {x for x in results if not isinstance(x, Literal)}
    found = []
    for equation in reversed(jaxpr.eqns):
        if not variables.isdisjoint(equation.outvars):
            found.append(equation)
            variables.update(x for x in equation.invars if not isinstance(x, Literal))
    return found[::-1], variables


def followed(
    jaxpr: Jaxpr,
    inputs: Iterable[Fact],
    rule: Callable[[JaxprEqn, list[Fact]], list[Fact]],
    nothing: Fact,
) -> list[Fact]:
    """Facts about the results of a program, from facts about its inputs.

    Equations of which nothing is known are passed over: nothing is known about their results.

    ``rule`` gives facts about the results of an equation, from the equation and facts about its
    inputs. An equation that calls a program (`CALLS`) is entered instead. ``nothing`` is the fact
    about literals and constants.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def about(variables: Iterable[Any]) -> list[Fact]:
        return [nothing if isinstance(x, Literal) else known.get(x, nothing) for x in variables]

    for equation in jaxpr.eqns:
        given = about(equation.invars)
        if all(fact == nothing for fact in given):
            continue
        if equation.primitive.name in CALLS:
            (called,) = inner(equation)
            found = followed(called, given, rule, nothing)
        else:
            found = rule(equation, given)
        known.update(zip(equation.outvars, found, strict=True))
    return about(jaxpr.outvars)


def counts_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """How many values a scan closes over, and how many it carries; removed from its parameters."""
    if "ft_in" not in params:  # before JAX 0.12
        return params.pop("num_consts"), params.pop("num_carry")
    params.pop("ft_out")
    consts, carried, _ = map(len, params.pop("ft_in").unpack())
    return consts, carried


RESHAPES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze")
"""Operations that keep all entries in their order; the first one may repeat them."""
CONTRACTIONS = ("conv_general_dilated", "dot_general")
LINEAR = (
    "add", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "div",
    "dynamic_slice", "gather", "mul", "neg", "reshape", "slice", "squeeze", "sub", "transpose",
)  # fmt: skip
"""Operations after which an entry of an input is still an entry or a multiple of it."""
SUMS = (*LINEAR, *CONTRACTIONS, "cumsum", "pad", "reduce_sum", "select_n")
"""Operations after which sums of products are still such sums."""


class Layered(NamedTuple):
    """What a value has to do with the inputs.

    Attributes:
        raw: whether its entries are multiples of inputs.
        layered: whether products of an input with other values are summed up in it.
        bent: whether a function of such sums is in it.
    """

    raw: bool
    layered: bool
    bent: bool


def is_deep(jaxpr: Jaxpr) -> bool:
    """Whether functions of sums of products with inputs are multiplied by inputs, and summed again.

    A network of at least two layers does this. Its units can be exchanged, so that its posterior
    has many equal modes. A product of matrices has no function between them.
    """
    found = []
    nothing = Layered(False, False, False)

    def rule(equation: JaxprEqn, given: list[Layered]) -> list[Layered]:
        name = equation.primitive.name
        layered, bent = any(x.layered for x in given), any(x.bent for x in given)
        if name in CONTRACTIONS:
            left, right = given[:2]
            found.append((left.bent and right.raw) or (right.bent and left.raw))
            layered = True
        raw = name in LINEAR and any(x.raw for x in given) and not layered
        new = Layered(raw, layered, bent or (layered and name not in SUMS))
        results = [new] * len(equation.outvars)
        for program in inner(equation):
            inputs = given[len(given) - len(program.invars) :]
            # one that gives the results, such as a loop's body, and not its condition
            if (len(inputs), len(results)) == (len(program.invars), len(program.outvars)):
                results = followed(program, inputs, rule, nothing)
                if name == "scan":  # what the first turn carries to the second
                    consts, carried = counts_of_scan(dict(equation.params))
                    inputs[consts : consts + carried] = results[:carried]
                    results = followed(program, inputs, rule, nothing)
        return results

    followed(jaxpr, [Layered(True, False, False)] * len(jaxpr.invars), rule, nothing)
    return any(found)


# Programs that run a few times: they are compiled fast, and once for all functions that are equal


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
    return fn(*args) if in_trace(args) else program(fn, *args)(*args)


def program(
    fn: Callable, *args: PyTree, donated: tuple[int, ...] = (), quick: bool = True
) -> Callable:
    """The program of `compiled`, for values of the shapes and dtypes of ``args``.

    It may overwrite the ``donated`` ones, as a loop over draws does. Such a program is optimised,
    as are those with much work and those that need not be compiled in ``quick`` time.
    """
    traced, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    treedef, jaxpr = jax.tree.structure(shape), traced.jaxpr
    if not jaxpr.effects:  # what nothing depends on would be lowered first
        jaxpr = jaxpr.replace(eqns=needed(jaxpr, jaxpr.outvars)[0])

    def run(consts: list, *args: PyTree) -> PyTree:
        flat = jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*jax.tree.leaves(args))
        return jax.tree.unflatten(treedef, flat)

    inputs, numbers = (traced.consts, *args), [k + 1 for k in donated]
    lowered = jax.jit(run, keep_unused=True, donate_argnums=numbers).lower(*inputs)
    text = lowered.as_text()  # with all inputs
    # within pmap, values belong to its mesh
    places = [getattr(x, "sharding", None) for x in jax.tree.leaves(inputs)]
    where = jax.config.jax_default_device, jax.sharding.get_abstract_mesh()  # type: ignore
    key = hashlib.sha256(text.encode()).digest(), lowered.in_tree, treedef, *places, *where
    found = _programs.pop(key, None)
    if found is None:
        little = work(traced.jaxpr, LEAST_TURNS) < MUCH_WORK * length(traced.jaxpr)
        found = lowered.compile(compiler_options=lean_options(quick and little and not donated))
    if "callback" not in text:  # otherwise functions on the host may differ
        _programs[key] = found  # the last one used is the last one
        if len(_programs) > MOST_PROGRAMS:
            del _programs[next(iter(_programs))]
    return lambda *args: found(traced.consts, *args)


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
