"""Programs that are compiled once: shared by equal traces, never with data of another call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_geom import _programs
from numpyro_geom._programs import compiled


def scaled_by(factor: float):
    """A new function in every call, with an array inside of a compiled one."""
    inside = jnp.arange(3.0) * factor
    return jax.jit(lambda x: x * inside)


def test_equal_traces_share_a_program_and_other_constants_do_not() -> None:
    before = len(_programs._programs)
    for factor in (2.0, 2.0, 5.0):
        found = compiled(lambda x, f=factor: scaled_by(f)(x) + 1, jnp.ones(3))
        np.testing.assert_array_equal(found, factor * np.arange(3) + 1)
    assert len(_programs._programs) == before + 2


def test_functions_on_the_host_are_those_of_the_call() -> None:
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    for number in (1.0, 2.0):
        found = compiled(
            lambda x, n=number: jax.pure_callback(lambda y: np.float32(y + n), shape, x),
            jnp.float32(0),
        )
        assert found == number
