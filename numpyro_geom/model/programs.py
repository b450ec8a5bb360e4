"""Programs that are compiled once for all callers.

A traced program is a graph: each value is the result of an operation with parameters and input
values. The digest of a value is computed from its operation and the digests of its inputs, back to
the arguments. The digest of a program is computed from its results and from its calls to the host
that have effects. So the digest does not depend on unused values, the order of lines, or names.

The digest also has all that decides how something is computed: placement and devices. Compiled
programs are kept by it.

A model is a function and may have changed: its closed-over data, or a global that it reads. So
programs are traced again at every call, which is cheap. If the trace is the same, the compiled
program is used again. NumPyro's sampling loop is such a program too (`loop_program`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from .._util import PyTree, digest, is_key, is_traced
from .jaxprs import alike, counts_of_scan, length, needed, work

MOST_PROGRAMS = 64
"""Number of programs that are kept; the least recently used one is dropped first."""
MUCH_WORK = 1.5e6
"""Operations for each line of a program from which on an optimising compiler is worth its time."""
LEAST_TURNS = 4
"""Turns of a loop whose length is not known, for the work of a program. A search has dozens."""
NOT_TOLD = {
    "bwd", "debug", "debug_info", "fwd_jaxpr_thunk", "in_tree", "jvp_jaxpr_fun", "name",
    "name_and_src_info", "out_tree", "out_trees", "rule", "symbolic_zeros",
}  # fmt: skip
"""Parameters of operations that are names, or rules for derivatives and ``vmap``. These are new in
every trace, and already applied."""

_programs: OrderedDict[tuple, Callable] = OrderedDict()


def compiled(
    fn: Callable,
    *args: PyTree,
    at_most: float = float("inf"),
    otherwise: Callable | None = None,
) -> PyTree:
    """``fn(*args)``, in a program that is compiled once for all functions with the same trace.

    Within an outer transformation ``fn`` becomes a part of the outer program.

    ``fn`` is pure; its closed-over values may change from call to call. A program with more than
    ``at_most`` alike operations, as a mean over its operations, is not compiled. ``otherwise`` runs
    instead, by default ``fn`` itself: operation by operation, each compiled once for each shape.
    This is faster if ``fn`` runs once and repeats its operations, like a deep network.
    """
    if is_traced(args):
        return fn(*args)
    return _found(fn, args, at_most=at_most, otherwise=otherwise)(*args)


def repeated(fn: Callable) -> Callable:
    """``fn`` for several calls of `compiled`, between which no closed-over value changes.

    It is traced once for each structure, shape and dtype of its arguments.
    """
    return _by_type(lambda args: fn if is_traced(args) else _found(fn, args))


def traced_once(fn: Callable) -> Callable:
    """``fn``, which runs in Python once for each structure, shape and dtype of its arguments.

    A program that uses the result several times holds it several times. But JAX derives and lowers
    it once, for all programs that use a function with the same trace. The arrays that ``fn`` closes
    over must stay valid as long as the result is used.
    """
    return _by_type(lambda args: _found(fn, args, part=True))


def _by_type(find: Callable[[tuple], Callable]) -> Callable:
    """The function that ``find`` returns, once for each structure, shape and dtype of arguments."""
    known: dict[Any, Callable] = {}

    def run(*args: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(args)
        key = is_traced(args), treedef, *map(jax.typeof, leaves)
        if key not in known:
            known[key] = find(args)
        return known[key](*args)

    return run


def _found(
    fn: Callable,
    args: tuple,
    *,
    at_most: float = float("inf"),
    otherwise: Callable | None = None,
    part: bool = False,
) -> Callable:
    """The program of ``fn``, see `compiled`, or ``fn`` itself within an outer transformation."""
    traced, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    if is_traced(traced.consts) and not part:
        return fn
    if at_most < float("inf") and alike(traced.jaxpr) > at_most:
        return otherwise or fn
    return _program(traced, args, shape, part=part) or jax.jit(fn)


def loop_program(
    fn: Callable, static_argnums: tuple[int, ...] = (), donate_argnums: int | None = 0
) -> Callable:
    """`jax.jit` for the sampling loop of NumPyro, as a program that runs with equal traces share.

    Data are inputs of the program. As constants, they would be copied into the program while it
    compiles, and other data would need another program.
    """
    call: Callable | None = None

    def run(*args: Any) -> PyTree:
        nonlocal call
        static, args = args[: len(static_argnums)], args[len(static_argnums) :]
        if call is None:
            donated = () if donate_argnums is None else (donate_argnums - len(static),)
            call = find(partial(fn, *static) if static else fn, args, donated)
        return call(*args)

    def find(fn: Callable, args: tuple, donated: tuple[int, ...]) -> Callable:
        if is_traced(args):
            return fn
        traced = jax.jit(fn).trace(*args)  # JAX knows it from an earlier run with the same function
        jaxpr, shape = traced.jaxpr, traced.out_info
        program = None if is_traced(jaxpr.consts) else _program(jaxpr, args, shape, donated)
        if program is None:
            return jax.jit(fn, donate_argnums=donated, compiler_options=lean_options())
        return program

    return run


def _program(
    traced: ClosedJaxpr,
    args: tuple,
    shape: PyTree,
    donated: tuple[int, ...] | None = None,
    *,
    part: bool = False,
) -> Callable | None:
    """The program of a trace. None if it cannot be shared, because it calls the host.

    With ``donated`` arguments a loop's result may use their memory. A ``part`` of other programs
    has no compiler options, and if it cannot be shared, it belongs to this trace alone.
    """
    traced = _with_constants_once(traced)
    key, order = (None, range(len(traced.consts))) if traced.effects else _exact(traced.jaxpr)
    if key is None:
        if not part:
            return None
        key = (object(),)
    treedefs = jax.tree.structure(args), jax.tree.structure(shape)
    key += *treedefs, donated, part
    if key not in _programs:
        jaxpr = traced.jaxpr.replace(constvars=[traced.jaxpr.constvars[k] for k in order])

        def run(consts: list, *args: PyTree) -> PyTree:
            flat = jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*jax.tree.leaves(args))
            return jax.tree.unflatten(treedefs[1], flat)

        short = donated is None and work(jaxpr, LEAST_TURNS) < MUCH_WORK * length(jaxpr)
        # compiled in a fifth of the time, to code that is 2 to 4 times slower
        options = _known_options() or None if short else lean_options()
        _programs[key] = jax.jit(
            run,
            donate_argnums=tuple(1 + k for k in donated or ()),
            compiler_options=None if part else options,
        )
        while len(_programs) > MOST_PROGRAMS:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return partial(_programs[key], [traced.consts[k] for k in order])


def _with_constants_once(traced: ClosedJaxpr) -> ClosedJaxpr:
    """A trace in which no two constants are the same array, as they may be in JAX's traces."""
    jaxpr, first = traced.jaxpr, dict[Any, Any]()
    known = {
        x: first.setdefault((_identity(value), str(x.aval)), x)
        for x, value in zip(jaxpr.constvars, traced.consts, strict=True)
    }
    if len(first) == len(known):
        return traced

    def once(values: list) -> list:
        return [x if isinstance(x, Literal) else known.get(x, x) for x in values]

    left = [k for k, x in enumerate(jaxpr.constvars) if known[x] is x]
    new = jaxpr.replace(
        constvars=[jaxpr.constvars[k] for k in left],
        eqns=[equation.replace(invars=once(equation.invars)) for equation in jaxpr.eqns],
        outvars=once(jaxpr.outvars),
    )
    return ClosedJaxpr(new, [traced.consts[k] for k in left])


def _identity(array: Any) -> Any:
    """Equal for arrays that are views of the same memory."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data, array.strides
    return id(array)


@cache
def _known_options() -> dict[str, Any]:
    """Those options of the CPU's compiler for quick compilation that this version knows."""
    options = {
        "xla_cpu_use_fusion_emitters": False,
        "xla_backend_optimization_level": 0,
        "xla_cpu_parallel_codegen_split_count": 1,
    }

    def knows(options: dict[str, Any]) -> bool:
        try:
            jax.jit(lambda x: -x, compiler_options=options)(0.0)
        except Exception:
            return False
        return True

    if jax.default_backend() != "cpu":
        return {}
    if knows(options):
        return options
    return {name: x for name, x in options.items() if knows({name: x})}


def lean_options() -> dict[str, Any] | None:
    """Options for half of the compile time, and code that is as fast."""
    name = "xla_cpu_use_fusion_emitters"
    return {name: False} if name in _known_options() else None


def _exact(jaxpr: Jaxpr) -> tuple[tuple | None, list[int]]:
    """A key that is equal for programs that can replace each other, whatever their constants are.

    Returns:
        The key, or None if the program calls a function on the host: it differs from call to call.
        Then the numbers of the constants in the order of use, which JAX's caches do not change.
    """
    constants, arguments = jaxpr.constvars, jaxpr.invars
    walk = _Walk()
    places = {_Constant(k): k for k in range(len(constants))}
    program = jaxpr.replace(constvars=[], invars=[*constants, *arguments])
    found = walk.part(program, {k: text for text, k in places.items()})
    order = [places[text] for text in dict.fromkeys([*walk.constants, *places])]
    if walk.calls_host:
        return None, order
    inputs = tuple(str(x.aval) for x in (*(constants[k] for k in order), *arguments))
    # within pmap, values belong to its mesh
    mesh = jax.sharding.get_abstract_mesh()
    return (inputs, found, tuple(walk.objects), mesh), order


class _Constant(str):
    """The text of a constant, until it is used and gets a number."""


class _Walk:
    """Visits each part of a program once.

    Whatever is not plain or an array is an entry of ``objects``, and its number there is its text.
    """

    def __init__(self) -> None:
        self.calls_host = False
        self.objects: dict[Any, int] = {}
        self.constants: dict[_Constant, int] = {}
        # with the values, because an id is only unique during the life of its value
        self._known: dict[int, tuple[Any, str]] = {}

    def part(
        self, part: ClosedJaxpr | Jaxpr, bound: Mapping[int, str] | None = None, depth: int = 0
    ) -> str:
        """Digest of a part of a program.

        It is visited only once, if its values depend on its own arguments alone. ``bound`` are
        texts of arguments that are values of the part around this one, by number. The ``depth``
        keeps arguments of different parts apart.
        """
        if bound is not None:
            return self._digest(part, bound, depth)
        if id(part) not in self._known:
            self._known[id(part)] = part, self._digest(part, {}, 0)
        return self._known[id(part)][1]

    def _digest(self, part: ClosedJaxpr | Jaxpr, bound: Mapping[int, str], depth: int) -> str:
        jaxpr = part.jaxpr if isinstance(part, ClosedJaxpr) else part
        equations, variables = needed(jaxpr, jaxpr.outvars, _has_effects)
        values: dict[Any, str] = {}
        # from JAX 0.12 on, the two classes are one, with constants
        consts = part.consts if isinstance(part, ClosedJaxpr) else ()
        for k, x in enumerate(jaxpr.constvars):
            if k >= len(consts):
                values[x] = f"constant {k}"
            elif x in variables:
                values[x] = self._array(consts[k])
        # the number of bound arguments does not count
        numbers = itertools.count()
        for k, x in enumerate(jaxpr.invars):
            free = bound.get(k)
            values[x] = f"{depth}.{next(numbers)} {self._object(x.aval)}" if free is None else free

        def value(x: Any) -> str:
            return self._literal(x) if isinstance(x, Literal) else values[x]

        effects = []
        for equation in equations:
            found = self._equation(equation, [value(x) for x in equation.invars], depth)
            for k, x in enumerate(equation.outvars):
                values[x] = f"{k} {self._object(x.aval)} {found}"
            if _has_effects(equation):
                effects.append(found)
        results = self._numbered(value(x) for x in jaxpr.outvars)
        return _hash(*results, "effects", *effects)

    def _numbered(self, values: Iterable[str]) -> Iterator[str]:
        for x in values:
            if isinstance(x, _Constant):
                yield f"constant {self.constants.setdefault(x, len(self.constants))}"
            else:
                yield x

    def _equation(self, equation: JaxprEqn, values: list[str], depth: int) -> str:
        name, params = equation.primitive.name, dict(equation.params)
        texts = [name]
        # values that loops and branches close over are bound; their order and number do not count
        if name == "while":
            split = params.pop("cond_nconsts"), params.pop("body_nconsts")
            for k, part in enumerate((params.pop("cond_jaxpr"), params.pop("body_jaxpr"))):
                consts, values = values[: split[k]], values[split[k] :]
                texts.append(self.part(part, dict(enumerate(consts)), depth + 1))
        elif name == "scan":
            number, carried = counts_of_scan(params)
            consts, values = values[:number], values[number:]
            body = self.part(params.pop("jaxpr"), dict(enumerate(consts)), depth + 1)
            texts += [f"carries {carried}", body]
        elif name == "cond":
            bound = dict(enumerate(values[1:]))
            values = values[:1]
            texts += [self.part(part, bound, depth + 1) for part in params.pop("branches")]
        for key, x in sorted(params.items()):
            if key not in NOT_TOLD:
                texts += [key, self._parameter(x)]
        texts.append(self._object(equation.ctx))
        self.calls_host |= "callback" in name
        return _hash(*texts, "of", *self._numbered(values))

    def _literal(self, literal: Literal) -> str:
        aval: Any = literal.aval
        return f"{self._object(aval)} {self._array(literal.val, aval.dtype)}"

    def _array(self, x: Any, dtype: Any = None) -> str:
        """Digest of an array in the program."""
        if np.ndim(x) == 0 and not (hasattr(x, "dtype") and is_key(x)):
            return str(np.asarray(x, dtype))
        if not getattr(x, "is_fully_addressable", True):
            return self._object(object())
        return f"{self._object(getattr(x, 'sharding', None))} {digest(x)}"

    def _parameter(self, value: Any) -> str:
        """A text for a parameter of an operation, without addresses and names."""
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            return self.part(value)
        if hasattr(value, "__array__") and hasattr(value, "dtype"):
            return self._array(value)
        if isinstance(value, Mapping):
            return _hash(*(f"{key!r} {self._parameter(value[key])}" for key in sorted(value)))
        if isinstance(value, (frozenset, set)):
            return _hash(*sorted(map(self._parameter, value)))
        if hasattr(value, "tag"):  # an implementation of random numbers
            return str(value.tag)
        if isinstance(value, (list, tuple)):
            return _hash(type(value).__name__, *map(self._parameter, value))
        if isinstance(value, (type(None), bool, int, float, complex, str)):
            return repr(value)
        return self._object(value)

    def _object(self, value: Any) -> str:
        try:
            number = self.objects.setdefault(value, len(self.objects))
        except TypeError:  # no hash: equal to nothing
            number = self.objects.setdefault(object(), len(self.objects))
        return f"object {number}"


def _has_effects(equation: JaxprEqn) -> bool:
    """Whether an operation has an effect on the host. Printing does not count."""
    names = (type(effect).__name__ for effect in equation.effects)
    return any("Debug" not in name for name in names)


def _hash(*texts: str) -> str:
    # the length before each text keeps their boundaries
    return hashlib.sha256("".join(f"{len(x)}:{x}" for x in texts).encode()).hexdigest()[:32]
