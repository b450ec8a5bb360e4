"""How often the energy stands in the programs of a start and of a draw: compile time follows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.extend.core import Jaxpr

from numpyro_geom import SGHMC, SGRLD, Monge
from numpyro_geom.bound import bind
from numpyro_geom.chain import start_chains
from numpyro_geom.model.jaxprs import inner, work


def occurrences(jaxpr: Jaxpr, name: str) -> int:
    """How often an operation stands in a program, and in all that it calls."""
    here = Counter(equation.primitive.name for equation in jaxpr.eqns)[name]
    return here + sum(occurrences(part, name) for e in jaxpr.eqns for part in inner(e))


def marked(y: jax.Array) -> None:
    """Two sites and rows; atan2 stands once in the energy, and in none of its derivatives."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    v = numpyro.sample("v", dist.Normal(0, 1))
    numpyro.factor("mark", 1e-3 * jnp.arctan2(v, 2.0))
    with numpyro.plate("rows", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(jnp.sum(w) + v, 1), obs=y[i])


Y = jnp.asarray(np.random.default_rng(0).normal(size=4000), jnp.float32)
FEW = Y[:50]


@pytest.mark.parametrize(
    ("kernel", "y", "at_start", "in_draw"),
    [
        # Adam's gradient and the look around; a step, its last check, the measurement (2)
        (lambda: SGHMC(marked), FEW, 2, 4),
        pytest.param(lambda: SGRLD(marked), FEW, 2, 4, marks=pytest.mark.slow),
        pytest.param(lambda: SGRLD(marked, metric=Monge()), FEW, 2, 4, marks=pytest.mark.slow),
        # and the gradient on all rows; the anchor's part of a step, noise with the anchor's part,
        # and the anchor's move
        (lambda: SGHMC(marked, batch_size=100, control_variate=True), Y, 3, 8),
    ],
)
def test_the_energy_stands_in_a_program_this_often(
    kernel: Callable[[], Any], y: jax.Array, at_start: int, in_draw: int
) -> None:
    chosen = kernel()
    bound, position = bind(chosen._settings, random.key(0), 100, None, (y,), {}, batched=False)
    algorithm = chosen.algorithm(bound.settings)

    def start(key: jax.Array, z: Any) -> Any:
        return start_chains(bound.target(), algorithm, bound, key, 100, z, unknown=True)

    program = jax.make_jaxpr(start)(random.key(0), position).jaxpr
    assert occurrences(program, "atan2") == at_start
    state = chosen.init(random.key(0), 100, None, (y,), {})
    draw = jax.make_jaxpr(lambda state: chosen.sample(state, (y,), {}))(state).jaxpr
    assert occurrences(draw, "atan2") == in_draw


def test_work_counts_products_and_repeats() -> None:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return a @ b

    small = jax.make_jaxpr(product)(jnp.ones((2, 3)), jnp.ones((3, 4))).jaxpr
    assert work(small) == 2 * 2 * 3 * 4

    def repeated(a: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x + 1, None), a, length=10)[0]

    assert work(jax.make_jaxpr(repeated)(jnp.ones(5)).jaxpr) >= 50
    image, kernel = jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 16))

    def convolution(x: jax.Array, w: jax.Array) -> jax.Array:
        kind = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=kind)

    found = work(jax.make_jaxpr(convolution)(image, kernel).jaxpr)
    assert found == 2 * 8 * 8 * 16 * 27
