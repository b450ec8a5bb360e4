"""One table, kernels x metrics and the options of each, on one small model.

Each combination is compiled once, in 64 bits and with checks of random keys. This program shows
four things: structure, shapes and dtypes are kept (the program rejects any others); chains move;
chains stay finite; a pickled copy has the same program and the same state. A second program, with a
batch of chains, must equal single chains. Automatic settings and treatments of Gamma have larger
programs. They are checked abstractly (`jax.eval_shape`), without compilation.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.errors import KeyReuseError
from targets import KERNELS, assert_trees_equal, regression, regression_data
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, Microcanonical, SGKernel
from numpyro_geom.algorithms.langevin import DIVERGENCE_MODES
from numpyro_geom.baselines import ISGD, AdamSGLD
from numpyro_geom.kernel import SGState
from numpyro_geom.metrics import METRICS
from numpyro_geom.sampling.settings import FUNCTIONS

X, Y = regression_data(24, 2)
BATCH, NUM_WARMUP, NUM_DRAWS = 6, 2, 4
FIXED: dict[str, Any] = {"step_size": 1e-3, "num_steps": 2}
DAMPED: dict[str, Any] = {**FIXED, "friction": 10.0}


class Case(NamedTuple):
    """A kernel with options, and the fixed settings that make it cheap to compile.

    Attributes:
        make: the kernel's constructor with its options.
        fixed: settings beyond these, which are otherwise automatic.
    """

    make: Callable[..., SGKernel]
    fixed: dict[str, Any]

    def kernel(self, *, fixed: bool) -> SGKernel:
        return self.make(batch_size=BATCH, **(self.fixed if fixed else {}))


def of_metrics(name: str, kernel: type[SGKernel], fixed: dict[str, Any]) -> dict[str, Case]:
    return {f"{name} {m}": Case(partial(kernel, regression, metric=m), fixed) for m in METRICS}


def option(kernel: type[SGKernel], fixed: dict[str, Any], **options: Any) -> Case:
    return Case(partial(kernel, regression, **options), fixed)


CASES: dict[str, Case] = {
    **of_metrics("sgrld", SGRLD, FIXED),
    **of_metrics("sghmc", SGHMC, DAMPED),
    **of_metrics("sgnht", SGNHT, DAMPED),
    # in RMSprop's metric longer trajectories are rejected
    **of_metrics("ggmc", GGMC, {**DAMPED, "step_size": 1e-5}),
    "corrected": option(
        SGRLD, {**FIXED, "step_size": 1e-6}, metric="rmsprop", divergence="corrected"
    ),
    "auxiliary": option(SGHMC, DAMPED, metric="rmsprop", divergence="auxiliary"),
    "microcanonical": option(Microcanonical, DAMPED),
    # more steps per draw than those for which it stands still
    "isgd": option(ISGD, {"num_steps": 60}, groups={"w": "all", "s": "all"}),
    "adam": option(AdamSGLD, FIXED, eps=0.1),
    "ggmc anchor": option(GGMC, DAMPED, control_variate=True),
    "anchor": option(SGRLD, FIXED, control_variate=True),
}
# a program takes ten times as long as a trace: each option is in one of the two short tables
TRACED_SHORT = [
    "sgrld monge",
    "sgnht wenzel",
    "corrected",
    "auxiliary",
    "microcanonical",
    "isgd",
    "adam",
    "ggmc anchor",
    "anchor",
]
COMPILED_SHORT = ["sgrld shampoo", "sghmc rmsprop", "ggmc monge", "microcanonical", "anchor"]
DIVERGENCE_SHORT = [
    ("identity", "none"),
    ("rmsprop", "published"),
    ("wenzel", "frozen"),
    ("monge", "auxiliary"),
    ("rmsprop", "corrected"),
]


# --- without compiling


def signature(state: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), state)


def assert_types_are_kept(kernel: SGKernel, *, x64: bool) -> None:
    """A state that changed its type, weakly typed scalars included, would compile anew.

    Tracing also fails for a random key that is used twice.
    """
    with jax.enable_x64(x64):
        args = (jnp.asarray(np.asarray(X), float), jnp.asarray(np.asarray(Y), float))
        state = jax.eval_shape(lambda key: kernel.init(key, 20, None, args, {}), random.key(0))
        dtype = np.dtype(np.float64 if x64 else np.float32)
        floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert {x.dtype for x in floats} == {dtype}
        with jax.debug_key_reuse(True):
            after = jax.eval_shape(jax.jit(lambda s: kernel.sample(s, args, {})), state)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert signature(after) == signature(state)


def test_every_kernel_is_in_the_table() -> None:
    for names in (CASES, TRACED_SHORT + COMPILED_SHORT):
        kernels = {CASES[name].make.func for name in names}  # type: ignore[attr-defined]
        assert kernels == set(KERNELS)


def test_tracing_sees_a_key_that_is_used_twice() -> None:
    def twice(key: jax.Array) -> jax.Array:
        return random.normal(key) + random.uniform(key)

    with jax.debug_key_reuse(True), pytest.raises(KeyReuseError):
        jax.eval_shape(jax.jit(twice), random.key(0))


@pytest.mark.parametrize(
    ("metric", "divergence"),
    short(
        (
            pair
            for pair in itertools.product(METRICS, DIVERGENCE_MODES)
            if pair not in [("shampoo", "corrected"), ("shampoo", "published")]
        ),
        kept=DIVERGENCE_SHORT,
    ),
)
def test_treatments_of_gamma_keep_structure_shapes_and_dtypes(metric: str, divergence: str) -> None:
    """In 32 bits as by default, and in 64 with fixed settings."""
    make = partial(SGRLD, regression, metric=metric, divergence=divergence, batch_size=BATCH)
    assert_types_are_kept(make(), x64=False)
    wide = {"step_size": 1e-3, "num_steps": 3, "batching": "epoch"}
    assert_types_are_kept(make(**wide), x64=True)


@pytest.mark.parametrize("name", short(CASES, kept=TRACED_SHORT))
def test_automatic_settings_keep_structure_shapes_and_dtypes(name: str) -> None:
    assert_types_are_kept(CASES[name].kernel(fixed=False), x64=False)


# --- one program each


class Program(NamedTuple):
    """A kernel's sampling program, and what two chains did in it.

    Attributes:
        case: what was compiled.
        kernel: with its fixed settings.
        text: the program before optimisation.
        chains: states of each of two chains, from its start on.
    """

    case: Case
    kernel: SGKernel
    text: str
    chains: list[list[SGState]]


def lowered(kernel: SGKernel, state: SGState) -> Any:
    with jax.debug_key_reuse(True):
        return jax.jit(lambda s: kernel.sample(s, (X, Y), {})).lower(state)


@pytest.fixture(scope="module", params=short(CASES, kept=COMPILED_SHORT))
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    """In 64 bits: in 32 a search of 1500 steps of Adam multiplies rounding errors to 3e-4."""
    case = CASES[request.param]
    with jax.enable_x64(True):
        kernel = case.kernel(fixed=True)
        starts = [
            kernel.init(key, NUM_WARMUP, None, (X, Y), {}) for key in random.split(random.key(0))
        ]
        program = lowered(kernel, starts[0])
        sample = program.compile()  # takes a state of the same types and no other
        chains = []
        for state in starts:
            chains.append([state])
            for _ in range(NUM_DRAWS):
                chains[-1].append(sample(chains[-1][-1]))
        yield Program(case, kernel, program.as_text(), chains)


def test_every_combination_compiles_once_and_moves(program: Program) -> None:
    for states in program.chains:
        assert int(states[-1].i) == NUM_DRAWS
        assert signature(jax.eval_shape(lambda s: s, states[-1])) == signature(
            jax.eval_shape(lambda s: s, states[0])
        )
        leaves = jax.tree.leaves((states[-1].z, states[-1].control, states[-1].dynamics))
        assert all(np.all(np.isfinite(x)) for x in leaves)
        moved = [
            all(np.all(before.z[site] != after.z[site]) for site in ("w", "s"))
            for before, after in zip(states, states[1:], strict=False)
        ]
        # a trajectory that is rejected stays where it was
        assert (any if program.kernel.facts.trajectory else all)(moved)
        assert not any(state.diverging for state in states[1:])


def test_chains_in_a_batch_are_those_one_by_one(program: Program) -> None:
    kernel = program.case.kernel(fixed=True)
    keys = random.split(random.key(0))
    state = kernel.init(keys, NUM_WARMUP, None, (X, Y), {})
    # as "vmap" and "parallel" start chains: with `init` traced
    traced = jax.eval_shape(
        jax.vmap(lambda key: program.case.kernel(fixed=True).init(key, 2, None, (X, Y), {})), keys
    )
    assert signature(traced) == signature(jax.eval_shape(lambda s: s, state))
    sample = jax.jit(lambda s: kernel.sample(s, (X, Y), {}))
    for draw in range(1, NUM_DRAWS + 1):
        state = sample(state)
        for chain in (0, 1):
            for site, value in program.chains[chain][draw].z.items():
                # sums over a few rows in another order
                np.testing.assert_allclose(state.z[site][chain], value, rtol=1e-9, atol=1e-10)
    assert not np.allclose(state.z["w"][0], state.z["w"][1])


def test_a_pickled_copy_is_the_same_program(program: Program) -> None:
    kernel, last = program.kernel, program.chains[0][-1]
    copy, state = pickle.loads(pickle.dumps((kernel, last)))
    assert copy.settings.record() == kernel.settings.record()
    arguments = list(inspect.signature(type(kernel)).parameters)
    assert ["model", *copy.settings.as_dict()] == arguments
    assert set(arguments) - set(copy.settings.record()) <= {"model", *FUNCTIONS}
    assert_trees_equal(state, last)
    assert lowered(copy, state).as_text() == program.text
    draws = [k.postprocess_fn((X, Y), {})(state.z) for k in (kernel, copy)]
    assert_trees_equal(*draws)
    assert draws[0]["s"] > 0
