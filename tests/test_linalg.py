"""Linear algebra under vmap: values, derivatives, absence of deadlocks, and float32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from tiers import short

from numpyro_geom import _linalg
from numpyro_geom._linalg import inverse, log_abs_det, wait_for
from numpyro_geom.laplace.metrics import conjugate_gradients, nystrom

NAMES = ("inverse", "log_abs_det")
LIBRARY: dict[str, Callable] = {
    "inverse": jnp.linalg.inv,
    "log_abs_det": lambda m: jnp.linalg.slogdet(m)[1],
}


def matrices(*shape: int) -> jax.Array:
    return jnp.eye(shape[-1]) * 2 + random.normal(random.key(0), shape) / 2


@pytest.mark.parametrize("name", NAMES)
def test_values_and_derivatives_are_those_of_the_library(name: str, x64: None) -> None:
    ours, theirs = getattr(_linalg, name), LIBRARY[name]
    batch = matrices(3, 4, 4)
    weights = random.normal(random.key(1), (4, 4))

    def curved(fn: Callable) -> Callable:
        return lambda m: jnp.sum(weights * fn(m) ** 2)

    def all_of(fn: Callable) -> Callable:
        whole = curved(fn)
        return jax.jit(jax.vmap(lambda m: (fn(m), jax.grad(whole)(m), jax.hessian(whole)(m))))

    for a, b in zip(all_of(ours)(batch), all_of(theirs)(batch), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere batches are batches")
@pytest.mark.parametrize("name", NAMES)
def test_batches_are_loops_of_calls_on_one_matrix(name: str) -> None:
    # two calls on batches side by side can stop a process for ever
    fn = getattr(_linalg, name)
    derivative = jax.vmap(jax.grad(lambda m: jnp.sum(fn(m))))
    text = jax.jit(derivative).lower(matrices(3, 4, 4)).as_text()
    calls = [row for row in text.splitlines() if "custom_call @lapack" in row]
    assert calls
    assert not [row for row in calls if "3x4x4" in row], calls


def test_waiting_changes_nothing_and_passes_on_what_is_not_finite() -> None:
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(wait_for(x, jnp.ones(2)), x)
    assert bool(jnp.all(jnp.isnan(wait_for(x, jnp.array([1.0, jnp.inf])))))


@pytest.mark.slow
def test_weights_of_many_draws_do_not_stop_the_process() -> None:
    # each geodesic has solves and their derivatives; side by side, in a batch, they blocked all
    # threads of two cores within seconds
    script = """
import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
from numpyro_geom import RiemannianLaplace

def model(X, y):
    w = numpyro.sample("w", dist.Normal(0, 10).expand([25]).to_event(1))
    with numpyro.plate("rows", 300) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])

X = jax.random.normal(jax.random.key(0), (300, 25))
y = (X[:, 0] > 0).astype(int) ^ jax.random.bernoulli(jax.random.key(1), 0.2, (300,))
guide = RiemannianLaplace(model)
params = guide.fit(jax.random.key(0), X, y, num_starts=1)
draws = guide.draw(jax.random.key(1), params, sample_shape=(20,), log_weight=True,
                   progress_bar=False)
print(int(jnp.sum(jnp.isfinite(draws.log_weight))))
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=400, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "20"


@pytest.mark.parametrize("batch", short([False, True], kept=[True]))
def test_a_sketch_finds_the_stiff_directions(batch: bool) -> None:
    # twenty stiff directions and a flat rest
    vectors = jnp.linalg.qr(random.normal(random.key(0), (300, 300)))[0]
    stiff = jnp.concatenate([jnp.geomspace(1e4, 1e2, 20), jnp.full(280, 0.1)])
    matrix = jnp.matmul(vectors * stiff, vectors.T, precision="highest")

    def a(v: jax.Array) -> jax.Array:
        return jnp.matmul(matrix, v, precision="highest")

    sketch = nystrom(a, jnp.zeros(300))

    def inner(v: jax.Array) -> jax.Array:
        return sketch(sketch(v) + a(sketch(v)))

    whole = jax.vmap(inner)(jnp.eye(300))
    ends = np.linalg.eigvalsh(np.asarray(whole + whole.T) / 2)
    assert ends[0] > 0.5
    assert ends[-1] < 2  # 1e4 without

    def solve(b: jax.Array) -> jax.Array:
        return sketch(conjugate_gradients(inner, sketch(b), 1e-3))

    b = random.normal(random.key(2), (3, 300)) if batch else random.normal(random.key(2), (300,))
    found = jax.vmap(solve)(b) if batch else solve(b)
    exact = np.linalg.solve(np.eye(300) + np.asarray(matrix, np.float64), np.asarray(b).T).T
    np.testing.assert_allclose(found, exact, atol=3e-3 * np.abs(exact).max())


def test_a_wrong_product_is_noticed() -> None:
    # bfloat16 keeps 8 bits: the noise of a stiff direction drowns the flat ones
    vectors = jnp.linalg.qr(random.normal(random.key(0), (200, 200)))[0]
    stiff = jnp.concatenate([jnp.full(3, 1e4), jnp.zeros(197)])
    matrix = jnp.eye(200) + jnp.matmul(vectors * stiff, vectors.T, precision="highest")

    def rounded(v: jax.Array) -> jax.Array:
        return (matrix @ v).astype(jnp.bfloat16).astype(jnp.float32)

    b = 100 * vectors[:, 0] + vectors[:, 5]
    assert bool(jnp.all(jnp.isnan(conjugate_gradients(rounded, b, 1e-4))))


def test_conjugate_gradients_have_derivatives(x64: None) -> None:
    matrix = matrices(5, 5)
    matrix = matrix @ matrix.T
    b = jnp.arange(5.0)

    def ours(scale: jax.Array) -> jax.Array:
        return conjugate_gradients(lambda v: scale * (matrix @ v) + v, b, 1e-12)

    def exact(scale: jax.Array) -> jax.Array:
        return jnp.linalg.solve(scale * matrix + jnp.eye(5), b)

    for way in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(way(ours)(1.7), way(exact)(1.7), rtol=1e-8)


@pytest.mark.parametrize("fn", [inverse, log_abs_det])
def test_a_singular_matrix_gives_what_is_not_finite(fn: Callable) -> None:
    assert not bool(jnp.any(jnp.isfinite(fn(jnp.zeros((2, 2))))))
