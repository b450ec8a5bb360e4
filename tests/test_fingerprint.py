"""Distinguishing two runs: by every setting, and by what their code computes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax
from numpyro.infer import AIES, ESS, HMC, HMCECS, MCMC, NUTS, SA, init_to_median, init_to_value
from scripts import load_script
from targets import KERNELS
from tiers import short

import numpyro_geom as g
from numpyro_geom.model.digests import PYTHON, Digests, code_of
from numpyro_geom.model.programs import Program
from numpyro_geom.runs.fingerprint import (
    SCHEME,
    KernelDigests,
    changes,
    check_alike,
    check_same,
    fingerprint,
    program_of,
)
from numpyro_geom.runs.segments import Job, Segments
from numpyro_geom.sampling import schedules


def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 2]).to_event(2))
    with numpyro.plate("rows", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal((x[i] @ w).sum(-1), 1), obs=None if y is None else y[i])


def other_model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([2, 2]).to_event(2))
    with numpyro.plate("rows", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal((x[i] @ w).sum(-1), 1), obs=None if y is None else y[i])


def energy(z):
    return jnp.sum(z**2)


def other_energy(z):
    return jnp.sum(z**4)


def estimate(z, rng_key):
    return jnp.sum(z**2)


# Settings

NO_MODEL = {"model": None, "potential_fn": estimate, "full_potential_fn": energy, "num_data": 9}
CHANGES = {
    "model": ({}, {"model": other_model}),
    "potential_fn": (
        {"model": None, "potential_fn": energy},
        {"model": None, "potential_fn": other_energy},
    ),
    "full_potential_fn": (NO_MODEL, {**NO_MODEL, "full_potential_fn": other_energy}),
    "num_data": (NO_MODEL, {**NO_MODEL, "num_data": 10}),
    "metric": ({}, {"metric": "rmsprop"}),
    "gamma": ({"metric": "rmsprop"}, {"metric": "rmsprop", "gamma": "none"}),
    "max_norm": ({"metric": "monge"}, {"metric": "monge", "max_norm": 2.0}),
    "friction": ({}, {"friction": 2.0}),
    "dense_mass": ({"dense_mass": True}, {"dense_mass": False}),
    "inverse_mass_matrix": (
        {"inverse_mass_matrix": np.array([1.0, 2.0])},
        {"inverse_mass_matrix": np.array([1.0, 3.0])},
    ),
    "adapt_mass_matrix": (
        {"dense_mass": True},
        {"dense_mass": True, "adapt_mass_matrix": False},
    ),
    "thermostat_mass": ({}, {"thermostat_mass": 2.0}),
    "target_accept": ({}, {"target_accept": 0.7}),
    "integrator": ({"integrator": "euler"}, {}),
    "step_size": ({}, {"step_size": 1e-3}),
    "batch_size": ({}, {"batch_size": 3}),
    "num_steps": ({}, {"num_steps": 3}),
    "temperature": ({}, {"temperature": 0.5}),
    "batching": ({}, {"batching": "epoch"}),
    "adjusted": ({}, {"adjusted": True}),
    "bias_tolerance": ({}, {"bias_tolerance": 0.2}),
    "control_variate": ({}, {"control_variate": True}),
    "anchor_interval": (
        {"control_variate": True},
        {"control_variate": True, "anchor_interval": 7},
    ),
    "expansion": ({}, {"expansion": g.Expansion(left=2)}),
    "init_strategy": ({}, {"init_strategy": init_to_median}),
    "constrained_init": ({}, {"constrained_init": True}),
    "groups": ({}, {"groups": {"w": "one"}}),
    "decay": ({}, {"decay": 0.4}),
    "preconditioner": ({}, {"preconditioner": "diagonal"}),
    "drift": ({}, {"drift": 0.5}),
    "mean_decay": ({}, {"mean_decay": 0.8}),
    "square_decay": ({}, {"square_decay": 0.9}),
    "eps": ({}, {"eps": 1e-6}),
}
"""Two settings of a kernel that differ in one argument alone."""
UNCHANGEABLE = {
    ("GGMC", "batching"),
    ("SGNHT", "gamma"),
    ("PXSGHMC", "gamma"),
    ("VSGD", "batching"),
}
"""Arguments that take one value only."""


def arguments_of(cls):
    return [name for name in inspect.signature(cls).parameters if name != "self"]


def fingerprint_of(kernel):
    return fingerprint(Job(MCMC(kernel, num_warmup=1, num_samples=1), jax.random.key(0)), 1)


def changed(before, after):
    """Names in which the records of two kernels differ."""
    return {text.partition(" (was")[0] for text in changes(*map(fingerprint_of, (before, after)))}


@pytest.mark.parametrize("cls", KERNELS)
def test_every_argument_of_a_kernel_is_told(cls):
    for name in arguments_of(cls):
        if (cls.__name__, name) in UNCHANGEABLE:
            continue
        before, after = (cls(**{"model": model, **settings}) for settings in CHANGES[name])
        # what functions do is in the program
        expected = set() if name in FUNCTION_ARGUMENTS else {f"kernel setting {name}"}
        assert changed(before, after) == expected, name


FUNCTION_ARGUMENTS = ("model", "potential_fn", "full_potential_fn")


@pytest.mark.parametrize("name", FUNCTION_ARGUMENTS)
def test_functions_are_told_by_the_program(name):
    def of(settings):
        settings = {"model": model, **settings}
        cls = g.GGMC if name == "full_potential_fn" else g.SGRLD
        kernel = cls(**{**settings, **FIXED, "batch_size": None})
        start = None if settings["model"] else jnp.ones(2)
        data = (jnp.ones((4, 2)), jnp.ones(4)) if settings["model"] else ()
        job = Job(MCMC(kernel, num_warmup=1, num_samples=1), jax.random.key(0), data)
        return program_of(Segments(job._replace(init_params=start), 1), Digests())

    before, after = map(of, CHANGES[name])
    assert before.digest != after.digest
    assert before == of(CHANGES[name][0])


METRICS = {
    g.Identity: {"scale": 2.0},
    g.RMSprop: {"decay": 0.5, "eps": 1e-3},
    g.Wenzel: {"decay": 0.5, "eps": 1e-3, "interval": 7},
    g.Monge: {"alpha2": 2.0, "decay": 0.5},
    g.Shampoo: {"decay": 0.5, "eps": 1e-3, "interval": 7, "block_size": 8, "vector": "full"},
}
EXPANSION = {
    "left": 2,
    "right": 2,
    "rank": 1,
    "sites": {"w": g.Factors(left=2)},
    "biases": ("kernel", "bias"),
    "target": "factors",
    "factor_scale": 0.1,
    "factor_friction": 0.1,
    "prior_scale": 2.0,
    "factor_prior_scale": 2.0,
}
FACTORS = {"left": 2, "right": 2, "vectors": "b", "side": "left"}


def fields_of(cls):
    return {field.name for field in dataclasses.fields(cls) if field.init}


@pytest.mark.parametrize("cls", METRICS)
def test_every_field_of_a_metric_is_told(cls):
    assert fields_of(cls) == METRICS[cls].keys()
    for name, value in METRICS[cls].items():
        before = g.SGRLD(model, metric=cls(), gamma="frozen")
        after = g.SGRLD(model, metric=cls(**{name: value}), gamma="frozen")
        assert changed(before, after) == {"kernel setting metric"}, name


def test_every_field_of_an_expansion_is_told():
    assert fields_of(g.Expansion) == EXPANSION.keys()
    assert fields_of(g.Factors) == FACTORS.keys()

    def kernel(**settings):
        return g.SGRLD(model, expansion=g.Expansion(**settings))

    for name, value in EXPANSION.items():
        assert changed(kernel(), kernel(**{name: value})) == {"kernel setting expansion"}, name
    for name, value in FACTORS.items():
        one, two = g.Factors(left=1), g.Factors(**{"left": 1, name: value})
        found = changed(kernel(sites={"w": one}), kernel(sites={"w": two}))
        assert found == {"kernel setting expansion"}, name


class Halving:
    """A schedule with a private setting."""

    def __init__(self, rate):
        self._rate = rate

    def __call__(self, t):
        return self._rate * 0.5**t


def closing(rate):
    return lambda t: rate / (1 + t)


SCHEDULES = {
    schedules.Constant: [(1e-3,), (2e-3,)],
    schedules.Polynomial: [(1e-2, 1e-3, 0.5, 1.0), (2e-2, 2e-3, 0.6, 2.0)],
    schedules.Cyclical: [(1e-2, 10, 0.0, 0.0), (2e-2, 20, 1e-3, 0.5)],
    schedules.Wrapped: [(closing(1.0),), (closing(2.0),)],
}
FUNCTIONS = {
    "closure": [closing(1.0), closing(2.0)],
    "lambda": [lambda t: 1.0 / (t + 1), lambda t: 1.0 / (t + 2)],
    "object": [Halving(1.0), Halving(2.0)],
    "partial": [functools.partial(closing(1.0)), functools.partial(closing(3.0))],
    "optax": [optax.exponential_decay(rate, 10, 0.5) for rate in (1e-3, 2e-3)],
}


def test_every_field_of_a_schedule_is_told():
    pairs = {name: tuple(functions) for name, functions in FUNCTIONS.items()}
    for cls, (old, new) in SCHEDULES.items():
        names = [field.name for field in dataclasses.fields(cls) if field.init]
        assert len(names) == len(old)
        for k, name in enumerate(names):
            mixed = (*old[:k], new[k], *old[k + 1 :])
            pairs[f"{cls.__name__}.{name}"] = cls(*old), cls(*mixed)
    for name, pair in pairs.items():
        before, after = (g.SGRLD(model, step_size=x) for x in pair)
        assert changed(before, after) == {"kernel setting step_size"}, name
        assert changed(before, g.SGRLD(model, step_size=pair[0])) == set()


def test_settings_of_other_kernels():
    nuts = functools.partial(NUTS, model)
    for name, value in {
        "step_size": 0.5,
        "dense_mass": True,
        "target_accept_prob": 0.9,
        "max_tree_depth": 5,
        "init_strategy": init_to_value(values={"w": 1.0}),
    }.items():
        assert changed(nuts(), nuts(**{name: value})) == {f"kernel setting {name}"}
    one = {AIES.DEMove(): 0.5, AIES.StretchMove(): 0.5}
    other = {AIES.DEMove(): 0.6, AIES.StretchMove(): 0.4}
    assert changed(AIES(model, moves=one), AIES(model, moves=other)) == {"kernel setting _weights"}


# Values and functions on the host


@dataclasses.dataclass(frozen=True)
class Point:
    x: float = 1.0
    y: tuple = (1, 2)


CODE = """
SCALE = {scale}
def helper(x): return x * SCALE
def f(x, names={{"a", "b", "c"}}):
    return [y for y in x if y in {{"d", "e", "f"}}] + [helper(x), lambda: names]
class Table:
    def __init__(self, a): self.a, self._b = a, a
    def __call__(self, x): return self.a
def nested(v):
    def g(x): return v, f(x)
    return g
"""
ROOT = Path(__file__).parents[1]
ARRAY = np.arange(3.0)
VALUES = {
    "number": 1,
    "float": 1.0,
    "flag": True,
    "text": "1",
    "array": ARRAY,
    "its last bit": np.nextafter(ARRAY, 9),
    "another type": ARRAY.astype("f4"),
    "another shape": ARRAY[None],
    "keys": jax.random.key(0),
    "another key": jax.random.key(1),
    "texts": np.array(["a", "b"]),
    "objects": np.array(["a", None], object),
    "list": [1, 2],
    "nested list": [[1], 2],
    "set": {"a", "b"},
    "dict": {"a": 1, "b": 2},
    "swapped dict": {"a": 2, "b": 1},
    "object of a data class": Point(2.0),
    "partial": functools.partial(init_to_value, values={"w": 1.0}),
    "another partial": functools.partial(init_to_value, values={"w": 2.0}),
    "NumPyro's function": init_to_median,
    "kernel": NUTS(model, step_size=0.5),
    "another kernel": NUTS(model, step_size=0.6),
}


def digest(value):
    return KernelDigests().of(value)


def test_digests_tell_values_apart():
    found = {name: digest(value) for name, value in VALUES.items()}
    assert found == {name: digest(value) for name, value in VALUES.items()}
    assert len(set(found.values())) == len(found)
    assert digest({"b": 2, "a": 1}) == found["dict"]
    # what functions and objects of the user do is in the program
    assert digest(energy) == digest(other_energy) == digest(Halving(1.0))
    assert digest(jnp.arange(3.0)) == digest(np.arange(3, dtype="f4"))


def test_tables_are_told_by_their_content_and_fast():
    pandas = pytest.importorskip("pandas")
    sparse = pytest.importorskip("scipy.sparse")
    rows = 200_000
    table = pandas.DataFrame({k: np.arange(rows) * 0.5 for k in "abcde"})
    begin = time.perf_counter()
    before = digest(table)
    assert time.perf_counter() - begin < 1
    found = [table.copy() for _ in range(5)]
    found[0].iloc[7, 2] += 1e-9
    found[1] = found[1].rename(columns={"a": "z"})
    found[2].index = found[2].index + 1
    found[3]["text"] = "a"
    found[4] = found[4]["a"]
    found += [sparse.csr_matrix(x) for x in (np.eye(3), 2 * np.eye(3))]
    assert len({before, *map(digest, found)}) == 8
    assert digest(table.copy()) == before


def test_functions_on_the_host_are_told_by_what_they_do(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    numbers = itertools.count()

    def of(text, make="f"):
        name = f"code{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return code_of(eval(make, vars(importlib.import_module(name))), Digests())

    code = CODE.format(scale=2)
    plain = of(code)
    noted = code.replace("return x *", "'Doc.'; return x *")
    noted = noted.replace("helper(x): ", "helper(x: int): ")
    assert plain == of(noted.replace("SCALE", "OTHER").replace("helper", "called") + "# n")
    others = [
        CODE.format(scale=3),
        code.replace("x * SCALE", "x + SCALE"),
        code.replace('"d"', "1"),
    ]
    makes = ["nested(1)", "nested(2)", "Table(1)", "Table(2)", "Table(1).__call__", "helper"]
    found = [plain, *map(of, others), *(of(code, make) for make in makes)]
    assert len(set(found)) == len(found)
    assert of(code, "nested(1)") == found[4]
    # levels of helpers that call the one below twice
    levels = [f"def f{k}(x): return f{k - 1}(x) + f{k - 1}(x)\n" for k in range(1, 40)]
    begin = time.perf_counter()
    of("def f0(x): return x\n" + "".join(levels), "f39")
    assert time.perf_counter() - begin < 1


# Programs


def program(function, *args):
    args = args or (jnp.float32(1.0), jnp.arange(3.0))
    return Program.of(jax.make_jaxpr(function)(*args), Digests())


def looped(f, consts=()):
    return lambda x, y: lax.fori_loop(0, 3, lambda k, c: f(c, y, *consts), x)


def two_loops(inner):
    """Loops in which the carry of the inner one may be taken for that of the outer one."""

    def outer(x, y):
        return lax.fori_loop(0, 3, lambda _, c: lax.fori_loop(0, 2, inner(c), c * 0.5), x)

    return outer


def ruled(rule):
    @jax.custom_vjp
    def f(x):
        return x * 2

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g * rule,))
    return jax.grad(lambda x, y: f(x))


def printing(text):
    def f(x, y):
        jax.debug.print(text, x)
        return x

    return f


@jax.jit
def doubled(x):
    return 2 * x


@jax.jit
def renamed(argument):
    return 2 * argument


def ladder(depth, x):
    return doubled(x) if depth == 0 else jax.jit(ladder, static_argnums=0)(depth - 1, x) + x


BIG, WIDE = np.arange(5.0, dtype="f4"), jnp.ones((2, 3))
SAME = {
    "names": (lambda x, y: doubled(x), lambda x, y: renamed(x)),
    "order": (lambda x, y: (x + 1) * (y * 2), lambda x, y: (lambda b: (x + 1) * b)(y * 2)),
    "lines that decide nothing": (lambda x, y: (y**3, x)[1], lambda x, y: x),
    "printed text": (printing("a {}"), printing("b {}")),
    "array of another class": (lambda x, y: x + BIG, lambda x, y: x + jnp.asarray(BIG)),
    "order of what a loop closes over": (
        looped(lambda c, y: c + jnp.sum(y * c * WIDE) + jnp.sum(c * BIG)),
        looped(lambda c, y: c + jnp.sum(y * c * np.asarray(WIDE)) + jnp.sum(c * BIG)),
    ),
    "shared rules": (ruled(3.0), ruled(3.0)),
}
DIFFERENT = {
    "number": (lambda x, y: x + 1, lambda x, y: x + 2),
    "type of a number": (lambda x, y: x, lambda x, y: x * 1),
    "operation": (lambda x, y: x + y, lambda x, y: x - y),
    "argument": (lambda x, y: x - y[0], lambda x, y: y[0] - x),
    "parameter": (lambda x, y: y.sum(), lambda x, y: y.sum(keepdims=True)),
    "array": (lambda x, y: x + BIG, lambda x, y: x + 2 * BIG),
    "order of results": (lambda x, y: (x, x + 1), lambda x, y: (x + 1, x)),
    "number in a loop": (looped(lambda c, y: c + 1), looped(lambda c, y: c + 2)),
    "array in a loop": (looped(lambda c, y: c + BIG[1]), looped(lambda c, y: c + BIG[2])),
    "branch": (
        lambda x, y: lax.cond(x > 0, lambda: x, lambda: x + 1),
        lambda x, y: lax.cond(x > 0, lambda: x + 1, lambda: x),
    ),
    "scan": (
        lambda x, y: lax.scan(lambda c, z: (c + z, c), x, y),
        lambda x, y: lax.scan(lambda c, z: (c + z, c), x, y, reverse=True),
    ),
    "whose carry": (
        two_loops(lambda c: lambda _, d: c + d),
        two_loops(lambda c: lambda _, d: d + d),
    ),
    "rule": (ruled(3.0), ruled(4.0)),
    "precision": (
        lambda x, y: jnp.dot(y, y, precision="default"),
        lambda x, y: jnp.dot(y, y, precision="highest"),
    ),
    "kind of key": (
        lambda x, y: jax.random.normal(jax.random.key(0)),
        lambda x, y: jax.random.normal(jax.random.key(0, impl="rbg")),
    ),
    "how random numbers are made": (
        lambda x, y: jax.random.normal(jax.random.key(0)),
        jax.threefry_partitionable(False)(lambda x, y: jax.random.normal(jax.random.key(0))),
    ),
    "effect": (
        lambda x, y: (jax.experimental.io_callback(print, None, x), x)[1],
        lambda x, y: x,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_programs_that_are_the_same(name):
    one, two = map(program, SAME[name])
    assert one.digest == two.digest
    assert one.host == two.host


@pytest.mark.parametrize("name", DIFFERENT)
def test_programs_that_are_not(name):
    one, two = map(program, DIFFERENT[name])
    assert one.digest != two.digest


def test_what_is_said_of_programs():
    def after(name):
        one, two = map(program, DIFFERENT[name])
        return two.after(one)

    assert after("number") == (
        "the same operations with other numbers, by count: 1.0 (was 1, is 0), 2.0 (was 0, is 1)"
    )
    assert after("array") == "the same operations with other arrays: float32[5]"
    assert after("operation") == (
        "other numbers of operations: add (was 1, is 0), sub (was 0, is 1)"
    )
    assert after("whose carry") == "as many operations of each kind, on other values"


def test_an_array_may_be_given_or_be_inside():
    digests = Digests()
    inside = jax.make_jaxpr(lambda x: jnp.sum(x * BIG))(jnp.ones(5))
    given = jax.make_jaxpr(lambda a, x: jnp.sum(x * a))(jnp.asarray(BIG), jnp.ones(5))
    found = Program.of(given, digests, {0: digests.of(BIG)})
    assert found.digest == Program.of(inside, digests).digest
    assert Program.of(given, digests, {0: digests.of(2 * BIG)}).digest != found.digest


def test_a_function_that_is_called_twice_is_gone_through_once():
    begin = time.perf_counter()
    traced = jax.make_jaxpr(lambda x: ladder(18, x))(1.0)
    Program.of(traced, Digests())
    assert time.perf_counter() - begin < 4


def subsampled(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 2]).to_event(2))
    with numpyro.plate("rows", 6, subsample_size=3):
        rows, seen = numpyro.subsample(x, 1), numpyro.subsample(y, 0)
        numpyro.sample("y", dist.Normal((rows @ w).sum(-1), 1), obs=seen)


FIXED = {"step_size": 1e-3, "batch_size": 3, "num_steps": 1, "adapt_mass_matrix": False}


def pair(method):
    return {"num_chains": 2, "chain_method": method}


ENSEMBLE = {"num_chains": 4, "chain_method": "vectorized"}
ALL = {
    **{cls.__name__: (functools.partial(cls, model, **FIXED), {}) for cls in (
        g.SGRLD, g.SGHMC, g.SGNHT, g.GGMC)},
    "PXSGHMC": (lambda: g.PXSGHMC(model, step_size=1e-3, batch_size=3, num_steps=1), {}),
    "ISGD": (lambda: g.ISGD(model, batch_size=3, num_steps=1), {}),
    "VSGD": (lambda: g.VSGD(model, batch_size=3, num_steps=1), {}),
    "AdamSGLD": (lambda: g.AdamSGLD(model, step_size=1e-3, batch_size=3, num_steps=1), {}),
    "sequential": (lambda: g.SGRLD(model, **FIXED), pair("sequential")),
    "parallel": (lambda: g.SGRLD(model, **FIXED), pair("parallel")),
    "vmap": (lambda: g.SGRLD(model, **FIXED), pair(jax.vmap)),
    "vectorized": (lambda: g.SGRLD(model, **FIXED), pair("vectorized")),
    "NUTS": (lambda: NUTS(model), {}),
    "HMC": (lambda: HMC(model), {}),
    "SA": (lambda: SA(model), {}),
    "HMCECS": (lambda: HMCECS(NUTS(subsampled), num_blocks=2), {}),
    "AIES": (lambda: AIES(model, moves={AIES.DEMove(): 0.5, AIES.StretchMove(): 0.5}), ENSEMBLE),
    "ESS": (lambda: ESS(model), ENSEMBLE),
}  # fmt: skip


def programs(host_rows=False):
    """The program of each kernel, and the other texts about it."""
    x, y = jnp.arange(12.0).reshape(6, 2), jnp.arange(6.0)
    found = {}
    for name, (kernel, settings) in ALL.items():
        mcmc = MCMC(kernel(), num_warmup=1, num_samples=2, progress_bar=False, **settings)
        job, digests = Job(mcmc, jax.random.key(0), (x, y)), KernelDigests()
        found[name] = program_of(Segments(job, 1), digests)._asdict() | fingerprint(job, 1, digests)
    rows = g.HostRows(np.asarray(x)), g.HostRows(np.asarray(y))
    job = Job(MCMC(g.SGRLD(model, **FIXED), num_warmup=1, num_samples=2), jax.random.key(0), rows)
    return found | {"HostRows": program_of(Segments(job, 1), Digests())._asdict()}


@pytest.mark.slow
def test_programs_are_the_same_in_another_process():
    code = f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}]; import conftest, json; "
    code += "import test_fingerprint as t; print(json.dumps(t.programs()))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)},
        )
        for seed in (1, 2)
    ]  # fmt: skip
    first, second = (json.loads(p.communicate()[0].splitlines()[-1]) for p in processes)
    assert first.keys() == {*ALL, "HostRows"}
    for name in first:
        assert first[name] == second[name], name
    digests = [x["digest"] for x in first.values()]
    # chains in turn, in parallel and by a function are the program of one
    same = {first[name]["digest"] for name in ("SGRLD", "sequential", "parallel", "vmap")}
    assert len(same) == 1
    assert len(set(digests)) == len(digests) - 3


# Comparison of what is recorded


def record(function=doubled, python=PYTHON, jax_version="1", host="", **told):
    found = program(lambda x, y: function(x))._replace(host=host)
    return {
        "fingerprint": {"fingerprint": SCHEME, "rng_key": "0", **told},
        "versions": {"python": python, "jax_version": jax_version},
        "program": json.loads(json.dumps(found._asdict())),
    }


@jax.jit
def tripled(x):
    return 3 * x


def test_another_program():
    check_same("here", record(), record(renamed))
    with pytest.raises(ValueError, match=r"another program: .* 2.0 \(was 1, is 0\).*as they were"):
        check_same("here", record(), record(tripled))
    with pytest.raises(ValueError, match=r"jax_version \(was 1, is 2\).*resume='other_program'"):
        check_same("here", record(), record(tripled, jax_version="2"))
    with pytest.warns(RuntimeWarning, match="other versions"):
        check_same("here", record(), record(tripled, jax_version="2"), True)
    with pytest.raises(ValueError, match=r"differs in: rng_key \(was 0, is 1\)"):
        check_same("here", record(), record(tripled, rng_key="1"), True)


def test_another_version_of_python():
    with pytest.raises(ValueError, match="the functions that the program calls on the host"):
        check_same("here", record(host="a"), record(host="b"))
    with pytest.warns(RuntimeWarning) as told:
        check_same("here", record(host="a"), record(host="b", python="3.9"))
    first, second = (str(warning.message) for warning in told)
    assert "another version of Python" in first
    assert f"python (was {PYTHON}, is 3.9)" in second


def test_the_search_for_errors_does_not_count():
    def of():
        mcmc = MCMC(g.SGRLD(model, **FIXED), num_warmup=1, num_samples=1)
        data = jnp.ones((4, 2)), jnp.ones(4)
        return program_of(Segments(Job(mcmc, jax.random.key(0), data), 1), Digests())

    before = of()
    with jax.debug_nans(True):
        assert of() == before


class Others:
    """Processes of which the first has told something already, or tells the same."""

    several = True
    told = None

    def first(self, function):
        self.told = function() if self.told is None else self.told
        return self.told

    def all(self, function):
        return function()


def test_processes_that_were_given_other_programs():
    def job(kernel):
        mcmc = MCMC(kernel, num_warmup=1, num_samples=1)
        return Job(mcmc, jax.random.key(0), (jnp.ones((4, 2)), jnp.ones(4)))

    others = Others()
    check_alike(others, job(g.SGRLD(model, **FIXED)))
    check_alike(others, job(g.SGRLD(model, **FIXED)))
    with pytest.raises(ValueError, match=r"other arguments than process 0: program \(was"):
        check_alike(others, job(g.SGRLD(other_model, **FIXED)))


# Real runs: `examples/benchmarks/other_runs.py` has more of them

REAL = [
    "lambda as a schedule", "thermostat_mass of SGNHT", "data in handlers.condition",
    "private attribute of a global object", "function of an imported module",
    "rule of a custom_vjp", "array that a function on the host reads",
    "jax_threefry_partitionable", "another schedule on a mesh", "name of a function",
    "text that is printed", "cell of a notebook, run again", "on a mesh",
    "version of JAX and resume='other_program'",
]  # fmt: skip
REAL_SHORT = [
    "data in handlers.condition", "function of an imported module",
    "array that a function on the host reads",
]  # fmt: skip


@pytest.mark.arviz
@pytest.mark.parametrize("name", short(REAL, kept=REAL_SHORT))
def test_real_runs(name):
    pytest.importorskip("zarr")
    script = load_script("benchmarks/other_runs")
    [(expected, case)] = [(e, case) for e, case in script.all_cases() if case.name == name]
    assert script.outcome(case).startswith(expected)
