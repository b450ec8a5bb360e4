"""What tells two runs apart: data, settings, and what their code computes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, HostRows, Monge, RMSprop, run_in_segments
from numpyro_geom.runs.identity import _Program, data_of, identity
from numpyro_geom.runs.long_run import _check_processes
from numpyro_geom.runs.segments import Job, Segments, without_mesh

ROOT = Path(__file__).parents[1]
X, Y = np.linspace(-1, 1, 8, dtype="f4"), np.linspace(0, 1, 8, dtype="f4")
DATA = jnp.asarray(X), jnp.asarray(Y)
FIXED = {"step_size": 1e-3, "num_steps": 1, "inverse_mass_matrix": np.ones(1)}


def model(x, y, scale=1.0):
    w = numpyro.sample("w", dist.Normal(0, scale))
    with numpyro.plate("rows", 8) as i:
        numpyro.sample("y", dist.Normal(x[i] * w, 1.0), obs=y[i])


def sgrld(of=model, **changed):
    return SGRLD(of, **{**FIXED, "batch_size": 4, **changed})


def density(of):
    return SGRLD(potential_fn=lambda z: 0.5 * z**2 + of(z), **FIXED)


def texts(kernel, data=DATA, *, key=0, mesh=False, **settings):
    if not isinstance(kernel, NUTS) and kernel.settings.model is None:
        data = ()
        settings["init_params"] = jnp.ones(())
    init_params = settings.pop("init_params", None)
    mcmc = MCMC(kernel, **{"num_warmup": 2, "num_samples": 4, "progress_bar": False, **settings})
    job = Job(mcmc, jax.random.key(key), data, init_params=init_params)
    segments = without_mesh(job, 2) if mesh else Segments(job, 2)
    return identity(segments) | data_of(job, values=True)


def differing(old, new):
    return {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


# Runs


def closing(table):
    return lambda z: jnp.sum(table * z)


def ruled(rate):
    @jax.custom_vjp
    def f(z):
        return 0.1 * z

    f.defvjp(lambda z: (f(z), None), lambda _, g: (rate * g,))
    return f


def free(*data):
    w = numpyro.sample("w", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(w, 1))


def conditioned(value):
    return sgrld(handlers.condition(free, {"y": jnp.array(value)}), batch_size=None)


CHANGES = {
    "step size": (lambda a: sgrld(step_size=a), 1e-3, 2e-3),
    "schedule": (lambda a: sgrld(step_size=lambda t: a / (1 + t)), 1e-3, 2e-3),
    "batch size": (lambda a: sgrld(batch_size=a), 4, 3),
    "field of a metric": (lambda a: sgrld(metric=RMSprop(decay=a)), 0.9, 0.8),
    "thermostat": (lambda a: SGNHT(model, thermostat_mass=a, batch_size=4, **FIXED), 1.0, 2.0),
    "step size of NUTS": (lambda a: NUTS(model, step_size=a), 1.0, 0.5),
    "depth of NUTS": (lambda a: NUTS(model, max_tree_depth=a), 3, 2),
    "prior": (lambda a: sgrld(functools.partial(model, scale=a)), 1.0, 2.0),
    "array that is closed over": (lambda a: density(closing(jnp.array([0.1, a]))), 0.2, 0.3),
    "rule of a derivative": (lambda a: density(ruled(a)), 0.1, 0.2),
    "value in a handler": (conditioned, 1.0, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", short([*CHANGES], kept=[*CHANGES][6:]))
def test_other_kernels_and_models_are_told_apart(name):
    make, old, new = CHANGES[name]
    found = differing(texts(make(old)), texts(make(new)))
    assert found
    assert all(x == "program" or x.startswith("kernel setting") for x in found)


def test_other_data_and_keys_are_told_apart():
    before = texts(sgrld())
    assert differing(before, texts(sgrld(), key=1)) == {"rng_key"}
    changed = X.copy()
    changed[3] = np.nextafter(X[3], 9)
    found = differing(before, texts(sgrld(), (changed, Y)))
    assert {"data args[0]"} <= found <= {"data args[0]", "program"}
    rows = [(HostRows(X), HostRows(y)) for y in (Y, Y + 1)]
    assert "data args[1]" in differing(*(texts(sgrld(), data) for data in rows))
    pair = [texts(sgrld(), data, mesh=True) for data in ((X, Y), (changed, Y))]
    assert "data args[0]" in differing(*pair)
    with jax.numpy_dtype_promotion("strict"):
        assert differing(before, texts(sgrld())) == {"jax_numpy_dtype_promotion"}


SAME = {
    "SGHMC": lambda: SGHMC(model, batch_size=4),
    "control variate": lambda: sgrld(control_variate=True),
    "Monge": lambda: sgrld(metric=Monge(), divergence="frozen"),
    "GGMC": lambda: GGMC(model, batch_size=4, step_size=1e-3),
    "NUTS": lambda: NUTS(model, max_tree_depth=3),
}


@pytest.mark.parametrize("name", short([*SAME], kept=["control variate"]))
def test_a_run_is_the_same_after_other_runs(name):
    """JAX's caches, debugging options, and what a kernel has learned do not count."""
    before = texts(SAME[name]())
    kernel = SAME[name]()
    MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False).run(jax.random.key(0), *DATA)
    with jax.debug_nans(True):
        assert differing(before, texts(kernel)) == set()


# Programs


def program(function):
    return _Program().of(jax.make_jaxpr(function)(jnp.float32(1.0), jnp.arange(3.0)))


def looped(step):
    return lambda x, y: lax.fori_loop(0, 3, lambda _, c: step(c), x)


def on_host(rate):
    return lambda x, y: jax.pure_callback(lambda x: rate * np.asarray(x), x, x)


BIG = np.arange(5.0, dtype="f4")
DIFFERENT = {
    "number": (lambda x, y: x + 1, lambda x, y: x + 2),
    "operation": (lambda x, y: x + y, lambda x, y: x - y),
    "argument": (lambda x, y: x - y[0], lambda x, y: y[0] - x),
    "parameter": (lambda x, y: y.sum(), lambda x, y: y.sum(keepdims=True)),
    "array": (lambda x, y: x + BIG, lambda x, y: x + 2 * BIG),
    "result": (lambda x, y: (x, x + 1), lambda x, y: (x + 1, x)),
    "number in a loop": (looped(lambda c: c + 1), looped(lambda c: c + 2)),
    "array in a loop": (looped(lambda c: c + BIG.sum()), looped(lambda c: c + 2 * BIG.sum())),
    "array in a function": (
        lambda x, y: jax.jit(lambda x: x + jnp.asarray(BIG))(x),
        lambda x, y: jax.jit(lambda x: x + 2 * jnp.asarray(BIG))(x),
    ),
    "branch": (
        lambda x, y: lax.cond(x > 0, lambda: x, lambda: x + 1),
        lambda x, y: lax.cond(x > 0, lambda: x + 1, lambda: x),
    ),
    "direction of a scan": (
        lambda x, y: lax.scan(lambda c, z: (c + z, c), x, y),
        lambda x, y: lax.scan(lambda c, z: (c + z, c), x, y, reverse=True),
    ),
    "precision": (
        lambda x, y: jnp.dot(y, y, precision="default"),
        lambda x, y: jnp.dot(y, y, precision="highest"),
    ),
    "kind of key": (
        lambda x, y: jax.random.normal(jax.random.key(0)),
        lambda x, y: jax.random.normal(jax.random.key(0, impl="rbg")),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_programs_are_told_apart(name):
    one, two = DIFFERENT[name]
    assert program(one) == program(one)
    assert program(one) != program(two)


def test_what_is_computed_on_the_host_is_not_told():
    """A documented limit: a traced program only says that it calls a function."""
    assert program(on_host(1.0)) == program(on_host(2.0))


# Processes

SCRIPT = """
import sys
sys.path[:0] = [{tests!r}]
import conftest, test_identity as t
print(t.go({directory!r}, {draws}).num_draws)
"""


def go(directory, draws, **changed):
    mcmc = MCMC(sgrld(**changed), num_warmup=2, num_samples=draws, progress_bar=False)
    rows = HostRows(X), HostRows(Y)
    return run_in_segments(mcmc, jax.random.key(0), *rows, directory=directory, draws_per_segment=2)


@pytest.mark.slow
def test_another_process_goes_on_and_another_model_does_not(tmp_path):
    expected = go(None, 6).mcmc.get_samples()["w"]
    for seed, draws in ((1, 4), (2, 6)):
        script = SCRIPT.format(tests=str(ROOT / "tests"), directory=str(tmp_path), draws=draws)
        environment = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)}
        told = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env=os.environ | environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert told.stdout.split()[-1:] == [str(draws)], told.stderr
    np.testing.assert_array_equal(go(tmp_path, 6).mcmc.get_samples()["w"], expected)
    with pytest.raises(ValueError, match=r"a run that differs in: program \(was"):
        go(tmp_path, 6, of=functools.partial(model, scale=2.0))


class Others:
    """Processes of which the first was given these texts."""

    def __init__(self, told):
        self.told = told

    def first(self, function):
        return self.told

    def all(self, function):
        return function()


def test_processes_that_were_given_other_programs():
    old, new = texts(sgrld()), texts(sgrld(functools.partial(model, scale=2.0)))
    _check_processes(Others(old), old)
    with pytest.raises(ValueError, match=r"other arguments than process 0: .* program \(was"):
        _check_processes(Others(old), new)
