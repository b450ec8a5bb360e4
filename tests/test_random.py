"""Random numbers from programs of our own: they are those of `jax.random`, bit for bit."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from tiers import short

from numpyro_geom import _random

KEYS = {
    "threefry": lambda: random.key(3),
    "raw": lambda: random.PRNGKey(7),
    "other generator": lambda: random.key(1, impl="rbg"),
}


def raw(x: jax.Array) -> np.ndarray:
    return np.asarray(random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_those_of_jax(name: str) -> None:
    key = KEYS[name]()
    for num in (1, 2, 5):
        np.testing.assert_array_equal(raw(_random.split(key, num)), raw(random.split(key, num)))
    keys = random.split(key, 3)
    for given, batch in ((key[None], False), (keys, True)):
        expected = jax.vmap(random.split, out_axes=1)(given)
        found = _random.pair(given if batch else key)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(raw(x), raw(y if batch else y[0]))


@pytest.mark.parametrize(
    ("name", "wide"),
    short(
        itertools.product(KEYS, [False, True]),
        kept=[("threefry", True), ("other generator", False)],
    ),
)
def test_numbers_are_those_of_jax(name: str, wide: bool) -> None:
    with jax.enable_x64(wide):
        key = KEYS[name]()
        for shape in ((), (3,), (2, 5)):
            found = _random.bits(key, shape)
            np.testing.assert_array_equal(found, random.bits(key, shape, jnp.uint32))
            for dtype in (float, jnp.float32, jnp.bfloat16):
                found = _random.normal(key, shape, dtype)
                expected = random.normal(key, shape, dtype)
                np.testing.assert_array_equal(found, expected)
                assert found.dtype == expected.dtype


def test_batches_and_pytrees() -> None:
    keys = random.split(random.key(0), 4)
    found = jax.vmap(lambda k: _random.normal(k, (3,)))(keys)
    np.testing.assert_array_equal(found, jax.vmap(lambda k: random.normal(k, (3,)))(keys))
    tree = _random.tree_normal(random.key(0), {"a": jnp.zeros(2), "b": jnp.zeros(())})
    flat = random.normal(random.key(0), (3,))
    np.testing.assert_array_equal([*tree["a"], tree["b"]], flat)


def test_a_program_has_no_loop() -> None:
    text = jax.jit(lambda k: _random.normal(k, (3,))).lower(random.key(0)).as_text()
    assert ("while" in text) == (jax.default_backend() != "cpu")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="Threefry is written out on the CPU")
def test_a_compiled_program_has_the_rounds_of_threefry_once() -> None:
    def step(key: jax.Array) -> tuple:
        first, second = _random.split(key)
        x = _random.normal(first, (10,))
        return second, x + 1, jnp.sum(x**2), jnp.max(x)

    compiled = jax.jit(step).lower(random.key(0)).compile().as_text()
    assert compiled.count(" xor(") < 3 * 20  # 20 rounds for the keys, and 20 for the numbers
