"""Programs that are compiled once: shared by equal traces, never with the data of another call."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import monitoring, random
from jax.experimental.compilation_cache import compilation_cache
from numpyro.infer import MCMC
from tiers import short

from numpyro_geom import SGHMC
from numpyro_geom._checks import SamplingWarning
from numpyro_geom.model import jaxprs as _programs
from numpyro_geom.model import read
from numpyro_geom.model.jaxprs import compiled


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> OrderedDict:
    """The programs of one test alone."""
    monkeypatch.setattr(_programs, "_programs", OrderedDict())
    return _programs._programs


def scaled_by(factor: float):
    """A new function in every call, with an array inside of a compiled one."""
    inside = jnp.arange(3.0) * factor
    return jax.jit(lambda x: x * inside)


def test_equal_traces_share_a_program_and_other_constants_do_not(programs: OrderedDict) -> None:
    for factor in (2.0, 2.0, 5.0):
        found = compiled(lambda x, f=factor: scaled_by(f)(x) + 1, jnp.ones(3))
        np.testing.assert_array_equal(found, factor * np.arange(3) + 1)
    assert len(programs) == 2


def test_programs_that_use_other_inputs_are_not_shared(programs: OrderedDict) -> None:
    """XLA is not given what a program does not use, so its text alone does not tell them apart."""
    few, other = jnp.arange(3.0), jnp.ones((2, 2))

    def first(x: jax.Array, y: jax.Array) -> jax.Array:
        return 2 * x

    def second(x: jax.Array, y: jax.Array) -> jax.Array:
        return 2 * y

    np.testing.assert_array_equal(compiled(first, few, few + 1), 2 * few)
    np.testing.assert_array_equal(compiled(second, few, few + 1), 2 * few + 2)
    np.testing.assert_array_equal(compiled(first, few, other), 2 * few)


def test_the_program_that_was_used_longest_ago_goes(
    programs: OrderedDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_programs, "MOST_PROGRAMS", 2)
    for size in (1, 2, 1, 3):
        compiled(lambda x: x + 1, jnp.ones(size))
    assert len(programs) == 2
    sizes = [jax.tree.leaves(program.in_avals)[0].size for program in programs.values()]
    assert sizes == [1, 3]


def test_functions_on_the_host_are_those_of_the_call() -> None:
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    for number in (1.0, 2.0):
        found = compiled(
            lambda x, n=number: jax.pure_callback(lambda y: np.float32(y + n), shape, x),
            jnp.float32(0),
        )
        assert found == number


def test_a_program_of_pmap_is_not_one_of_other_devices(programs: OrderedDict) -> None:
    """Values within pmap belong to its mesh, which the text of a trace does not show."""

    def within(x: jax.Array) -> jax.Array:
        with jax.ensure_compile_time_eval():
            return x + compiled(jnp.sin, jnp.ones(3)).sum()

    jax.pmap(within)(jnp.ones(1))
    compiled(jnp.sin, jnp.ones(3))
    assert len(programs) == 2


def placed(x: jax.Array, *axes: str | None) -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.lax.with_sharding_constraint(x, place)


ONES, ZEROS = np.ones(3), np.zeros(3)
OTHERS = {
    "constants": (lambda x: x + ONES, lambda x: x + ZEROS),
    "which constant": (
        lambda x: (x + ONES) * ZEROS + ONES,
        lambda x: (x + ONES) * ZEROS + ZEROS,
    ),
    "an array within a part": (scaled_by(2.0), scaled_by(3.0)),
    "a number": (lambda x: x * 2, lambda x: x * 3),
    "a type": (lambda x: x, lambda x: x.astype(jnp.bfloat16)),
    "where rows are": (lambda x: placed(x), lambda x: placed(x, "rows")),
    "random numbers": (
        lambda x: random.normal(random.key(0), x.shape),
        jax.threefry_partitionable(False)(lambda x: random.normal(random.key(0), x.shape)),
    ),
}
"""Two functions that differ in one respect."""


@pytest.mark.parametrize(("one", "other"), OTHERS.values(), ids=OTHERS)
def test_a_program_is_not_one_of_another_function(one: Callable, other: Callable) -> None:
    x = jnp.arange(3.0)
    for fn in (one, other, one):
        np.testing.assert_array_equal(compiled(fn, x), jax.jit(fn)(x))


def half_square(z: dict[str, jax.Array]) -> jax.Array:
    return sum((jnp.sum(x**2) for x in z.values()), jnp.zeros(())) / 2


def instructions(function: Callable, argument: Any) -> int:
    return jax.jit(function).lower(argument).compile().as_text().count(" = ")


@pytest.mark.slow
def test_a_compiled_draw_grows_in_proportion_to_the_arrays() -> None:
    kernel = SGHMC(
        potential_fn=half_square, step_size=0.1, num_steps=5, friction=1.0, dense_mass=None
    )
    sizes = []
    for num_arrays in (20, 40, 80):
        start = {f"x{k}": jnp.ones((k % 7 + 1, 3)) for k in range(num_arrays)}
        state = kernel.init(jax.random.key(0), 0, start, (), {})
        sizes.append(instructions(lambda state: kernel.sample(state, (), {}), state))
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0])


def test_a_compiled_start_grows_in_proportion_to_the_scalar_sites() -> None:
    kernel = SGHMC(potential_fn=half_square)
    sizes = []
    for num_sites in (35, 70, 140):
        start = {f"x{k}": jnp.ones(()) for k in range(num_sites)}
        given = {"num_warmup": 100, "init_params": start, "model_args": (), "model_kwargs": {}}
        sizes.append(instructions(partial(kernel.init, **given), jax.random.key(0)))
    # 1.7, and 4.5 if the density chooses between its value and another one by the value
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0])


def test_a_gradient_grows_in_proportion_to_the_sites() -> None:
    """No entry of it depends on the energy itself, which XLA would compute anew for each."""

    def model(num_sites: int) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        for k in range(num_sites):
            numpyro.sample(f"x{k}", dist.Normal(mean, 1))

    sizes = []
    for num_sites in (10, 20, 40):
        found = read(model, (num_sites,))
        position = {f"x{k}": jnp.ones(()) for k in range(num_sites)} | {"mean": jnp.ones(())}
        sizes.append(instructions(jax.grad(found.energy), position))
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0])


@pytest.fixture
def missed(tmp_path: Path, programs: OrderedDict) -> Iterator[Callable[[], int]]:
    """How many programs JAX did not find in an empty folder since the last call."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    events: list[str] = []

    def record(event: str, **_: Any) -> None:
        events.append(event)

    def count() -> int:
        found = sum(event.endswith("/cache_misses") for event in events)
        events.clear()
        jax.clear_caches()
        programs.clear()
        return found

    for name, value in zip(names, (str(tmp_path), 0, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    monitoring.register_event_listener(record)
    count()
    yield count
    monitoring.unregister_event_listener(record)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def few_rows(X: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", y.size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


@pytest.mark.parametrize("batch_size", short([None, 20], kept=[20]))
def test_other_data_of_the_same_shapes_compile_nothing(
    batch_size: int | None, missed: Callable[[], int]
) -> None:
    """With a cache on disk: data are inputs of all programs."""
    found = []
    for seed in (0, 1):
        _programs._programs.clear()
        rng = np.random.default_rng(seed)
        X = jnp.asarray(rng.normal(size=(60, 2)), jnp.float32)
        y = jnp.asarray(rng.random(60) < 0.5, jnp.float32)
        kernel = SGHMC(few_rows, batch_size=batch_size)
        chain = {"num_warmup": 8, "num_samples": 4, "progress_bar": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)
            MCMC(kernel, **chain).run(jax.random.key(seed), X, y)
        found.append(missed())
    assert found[0] > 10
    assert found[1] == 0
