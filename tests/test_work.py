"""How much work a program does, counted from its operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_geom.model.jaxprs import work


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
