"""What tells two runs apart: every setting, and code by what it does."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import AIES, MCMC, NUTS, init_to_median, init_to_value

import numpyro_geom as g
from numpyro_geom import schedules
from numpyro_geom.runs.digest import BY_BYTE_CODE, PYTHON, digest
from numpyro_geom.runs.fingerprint import check_same, differences, fingerprint, versions
from numpyro_geom.runs.job import Job


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
    "gamma_estimator": (
        {"metric": "rmsprop", "gamma": "corrected"},
        {"metric": "rmsprop", "gamma": "corrected", "gamma_estimator": "exact"},
    ),
    "gamma_probes": (
        {"metric": "monge", "gamma": "corrected"},
        {"metric": "monge", "gamma": "corrected", "gamma_probes": 2},
    ),
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
    "noise_correction": ({"batch_size": 3}, {"batch_size": 3, "noise_correction": True}),
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
KERNELS = (g.SGRLD, g.SGHMC, g.SGNHT, g.GGMC, g.PXSGHMC, g.ISGD, g.VSGD, g.AdamSGLD)


def arguments_of(cls):
    return [name for name in inspect.signature(cls).parameters if name != "self"]


def fingerprint_of(kernel):
    return fingerprint(Job(MCMC(kernel, num_warmup=1, num_samples=1), jax.random.key(0)), 1)


def changed(before, after):
    """Names in which the records of two kernels differ."""
    return {
        text.partition(" (was")[0] for text in differences(*map(fingerprint_of, (before, after)))
    }


@pytest.mark.parametrize("cls", KERNELS)
def test_every_argument_of_a_kernel_is_told(cls):
    for name in arguments_of(cls):
        if (cls.__name__, name) in UNCHANGEABLE:
            continue
        before, after = (cls(**{"model": model, **settings}) for settings in CHANGES[name])
        expected = "model" if name == "model" else f"kernel setting {name}"
        assert changed(before, after) == {expected}, name


METRICS = {
    g.Identity: {},
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
    """A schedule that keeps its setting to itself."""

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


# Code

SCALE = 2.0
TABLE = np.arange(3.0)


def helper(x): return x + SCALE  # fmt: skip  # noqa: E704


def documented(x: int = 3, *args: int, k: float = 1.5, **kw) -> float:
    """Not what it does."""
    y: float = x
    return y * k + helper(x)


two = [lambda x: x + 1, lambda x: x + 2]
nest = lambda a: lambda b: a + b + (lambda: 3)()  # noqa: E731


def enclosing(v, w=2):
    def inner(x):
        return x * v + sum(v * i for i in range(w)) + len([w + j for j in TABLE if j])

    return inner


def strings(x, w=3):
    return f"a{x!r:>{w}}b" "c" f"{x=}" f"{x:.2f}{''}{x:}" + "d" 'e' f'{"q"}'  # fmt: skip


def matching(x):
    match x:
        case {"a": [1, *rest], **others}:
            return rest, others
        case np.ndarray(shape=(_,)) | str() as s if (m := len(s)) > 2:
            return m
        case _:
            return None


def statements(x):
    try:
        with open(x) as f, f:
            return f
    except (OSError, ValueError) as e:
        raise KeyError from e
    finally:
        x = None
    while True:
        if x:
            break
        elif not x:  # noqa: RET508
            continue
    y = z = [1e999, -0.0, 3j, b"s", ..., None, 10**30]
    del z
    return [*x, {**x}, {i + 1 for i in x}, {a: b + 1 for a, b in x}, x[1:2, ::3], y]


async def coroutine(x):
    async for y in x:
        yield await y


def adding(f):
    @functools.wraps(f)
    def wrapped(*a):
        return f(*a) + 1

    return wrapped


@adding
def decorated(x):
    class Local:
        """Not what it does."""

        a: int = 1

        def m(self):
            return super().__init__() or __class__

    return Local


class Base:
    limit = 3

    def method(self, x):
        return x + self.limit


class Child(Base):
    @property
    def p(self):
        return 1

    @staticmethod
    def s(x):
        return helper(x)

    @classmethod
    def c(cls, x):
        return super().method(x)


@dataclasses.dataclass(frozen=True)
class Point:
    x: float = 1.0
    y: tuple = (1, 2)

    def norm(self):
        return self.x


class Two(NamedTuple):
    a: int
    b: float = 2.0

    def total(self):
        return self.a + self.b


CODE = """
import dataclasses
LIMIT = 3
def f(x, names={"a", "b", "c"}):
    return [y for y in x if y in {"d", "e", "f"}] + [LIMIT, lambda: names]
g = lambda x: f(x)
@dataclasses.dataclass
class Point:
    x: float
    def norm(self):
        return abs(self.x)
"""
ROOT = Path(__file__).parents[1]
VALUES = {
    "documented": documented,
    "first lambda": two[0],
    "second lambda": two[1],
    "outer lambda": nest,
    "inner lambda": nest(1),
    "closure": enclosing(3),
    "closure of an array": enclosing(TABLE, 4),
    "strings": strings,
    "match": matching,
    "statements": statements,
    "coroutine": coroutine,
    "decorated": decorated,
    "class": Child,
    "method": Child().method,
    "class method": Child.c,
    "data class": Point,
    "object of a data class": Point(2.0),
    "named tuple": Two(1),
    "object": Halving(3.0),
    "partial": functools.partial(documented, 1, k=2),
    "set": {"a", "b"},
    "model": model,
    "compiled": jax.jit(documented),
}


def test_digests_tell_values_apart():
    found = {name: digest(value) for name, value in VALUES.items()}
    assert found == {name: digest(value) for name, value in VALUES.items()}
    assert len(set(found.values())) == len(found)
    plain = {name for name, text in found.items() if BY_BYTE_CODE not in text}
    assert plain == {"named tuple", "set"}


def test_digests_are_the_same_in_another_process(tmp_path):
    (tmp_path / "apart.py").write_text(CODE)
    found = [
        subprocess.run(
            [sys.executable, "-c", "import apart; from numpyro_geom.runs.digest import digest; "
             "print(digest([apart.f, apart.g, apart.Point(2.0), {'a', 'b', 'c'}]))"],
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONHASHSEED": str(seed)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in (1, 2)
    ]  # fmt: skip
    assert found[0] == found[1]


def test_digests_do_not_depend_on_comments_and_annotations(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def of(text, name):
        (tmp_path / f"{name}.py").write_text(text)
        return digest(__import__(name).f)

    plain = of("SCALE = 2\ndef f(x):\n    return x * SCALE\n", "plain")
    noted = of("SCALE = 2\n# n\ndef f(x: 'int') -> int:\n    'Doc.'\n    return x*SCALE", "noted")
    scaled = of("SCALE = 3\ndef f(x):\n    return x * SCALE\n", "scaled")
    longer = of("SCALE = 2\ndef f(x):\n    return x * SCALE + 1\n", "longer")
    assert plain == noted
    assert len({plain, scaled, longer}) == 3


def test_modules_of_flax():
    nn = pytest.importorskip("flax.linen")

    def net(activation, size):
        class Net(nn.Module):
            size: int

            @nn.compact
            def __call__(self, x):
                return activation(nn.Dense(self.size)(x))

        return Net(size)

    found = {digest(net(f, size)) for f in (nn.relu, nn.tanh) for size in (2, 3)}
    assert len(found) == 4
    assert digest(net(nn.relu, 2)) in found


def test_another_version_of_python():
    kernel = functools.partial(g.SGRLD, model, step_size=closing(1.0))
    here = {"fingerprint": fingerprint_of(kernel()), "versions": versions()}
    text = json.dumps(here).replace(f"Python {PYTHON}", "Python 3.9")
    there = json.loads(text.replace(f'"python": "{PYTHON}"', '"python": "3.9"'))
    with pytest.warns(RuntimeWarning) as told:
        check_same("here", there, here)
    first, second = (str(warning.message) for warning in told)
    assert "begun with another version of Python" in first
    assert first.endswith("are the same as then: kernel setting step_size, model")
    assert f"python (was 3.9, is {PYTHON})" in second
    for change in ({"step_size": 0.1}, {"batch_size": 3}):
        new = here | {"fingerprint": fingerprint_of(kernel(**change))}
        with (
            pytest.warns(RuntimeWarning, match="another version of Python"),
            pytest.raises(ValueError, match=f"differs in: kernel setting {next(iter(change))} "),
        ):
            check_same("here", there, new)
