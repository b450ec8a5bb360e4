"""The guide's search for a mode where rounding is as large as what it looks for."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random

from numpyro_geom import RiemannianLaplace
from numpyro_geom.laplace import mode

KEY = random.key(0)


def test_a_search_in_float32_ends_where_the_energy_is_flat_to_rounding() -> None:
    def counts() -> None:
        p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        numpyro.sample("o", dist.Binomial(5_000_000, probs=p), obs=3849)

    guide = RiemannianLaplace(counts)
    # a search without an end would hold the main thread for ever
    search = threading.Thread(target=lambda: guide.fit(KEY), daemon=True)
    search.start()
    search.join(timeout=180)
    assert not search.is_alive()
    assert guide.report is not None
    assert guide.report.num_steps.max() < 100  # of 2,000: the values alternate near the mode
    assert guide.report.distance < 0.01


def test_a_line_search_that_finds_nothing_ends_at_its_start() -> None:
    def evaluate(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(x) * jnp.nan, -jnp.ones_like(x)

    start = mode._Point(jnp.zeros(2), jnp.zeros(()), -jnp.ones(2))
    point, found = jax.jit(lambda p: mode._line_search(evaluate, p, jnp.ones(2)))(start)
    assert not found
    assert jnp.array_equal(point.position, start.position)


def test_a_line_search_goes_further_where_the_slope_stays() -> None:
    evaluate = jax.value_and_grad(lambda x: jnp.sum((x - 100) ** 2) / 2)
    start = mode._Point(jnp.zeros(1), *evaluate(jnp.zeros(1)))
    point, found = mode._line_search(evaluate, start, jnp.ones(1))
    assert found
    assert abs(point.gradient[0]) <= 0.9 * 100
    assert point.position[0] == 16  # 1, 2, 4, 8, 16: the first that leaves 90% of the slope
