"""The divergence term: against a closed formula, dense autodiff and dense finite differences."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_geom import SGHMC, SGRLD
from numpyro_geom.algorithms.langevin import (
    DIVERGENCE_MODES,
    divergence_from_probe,
    has_divergence,
    mode_factor,
    probe,
)
from numpyro_geom.metrics import (
    Identity,
    Metric,
    MetricState,
    Monge,
    RMSprop,
    Shampoo,
    Wenzel,
    get_metric,
)

N = 3.0
"""Rows: g = grad U / N."""


def position(shapes: dict[str, tuple], seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}


def energy(theta: Any) -> jax.Array:
    """An energy whose Hessian is dense and varies, with gradients of order N."""
    x = ravel_pytree(theta)[0]
    rng = np.random.default_rng(7)
    a, b = rng.normal(size=(2, x.size, x.size)) / np.sqrt(x.size)
    return N * (jnp.sum(jnp.cosh(a @ x)) + jnp.sum(jnp.sin(b @ x)) + x @ x / 2)


@jax.jit
def gradient(theta: Any) -> Any:
    return jax.tree.map(lambda g: g / N, jax.grad(energy)(theta))


def hessian_product(theta: Any, z: Any) -> Any:
    return jax.jvp(gradient, (theta,), (z,))[1]


def divergence(
    metric: Any, state: Any, grad: Any, hvp: Callable, key: Any, theta: Any, exact: bool = False
) -> Any:
    """Gamma estimated with one probe, or exactly: the sum over unit vectors."""

    def one(z: Any) -> Any:
        return divergence_from_probe(metric, state, grad, z, hvp(z))

    if not exact:
        return one(probe(key, theta))
    x, unravel = ravel_pytree(theta)
    columns = jax.vmap(lambda e: one(unravel(e)))(jnp.eye(x.size, dtype=x.dtype))
    return jax.tree.map(lambda c: jnp.sum(c, axis=0), columns)


@functools.partial(jax.jit, static_argnums=0, static_argnames="exact")
def estimate(metric: Any, state: Any, theta: Any, key: Any = None, **kwargs: Any) -> Any:
    hvp = functools.partial(hessian_product, theta)
    return divergence(metric, state, gradient(theta), hvp, key, theta, **kwargs)


@functools.partial(jax.jit, static_argnums=0)
def state_at(metric: Any, theta: Any) -> Any:
    """The state after one gradient."""
    return metric.update(metric.init(theta), gradient(theta))


@functools.partial(jax.jit, static_argnums=0)
def exact_at(metric: Any, theta: Any) -> Any:
    """Gamma at the state after one gradient."""
    return estimate(metric, state_at(metric, theta), theta, exact=True)


def jacobian_trace(matrix: Callable, x: Any) -> np.ndarray:
    """Sum over k of d/dx_k matrix(x)[:, k], by autodiff."""
    return np.einsum("jkk->j", jax.jit(jax.jacfwd(matrix))(x))


def flat(tree: Any) -> np.ndarray:
    return np.asarray(ravel_pytree(tree)[0])


@dataclasses.dataclass(frozen=True)
class CubeRoot(Metric):
    """The example of a user's own metric."""

    decay: float = 0.99
    eps: float = 0.1

    def statistic(self, grad: Any) -> Any:
        return jax.tree.map(jnp.square, grad)

    def apply_inverse(self, state: Any, vector: Any) -> Any:
        return jax.tree.map(lambda v, x: x / (v + self.eps) ** (1 / 3), state.statistic, vector)

    def apply_inverse_sqrt(self, state: Any, vector: Any) -> Any:
        return jax.tree.map(lambda v, x: x / (v + self.eps) ** (1 / 6), state.statistic, vector)


class Curl:
    """Without the base class: A = I + u u' / (1 + u'u) with u a rotation of g, D = 2."""

    decay = 0.0

    def init(self, theta: Any) -> MetricState:
        return MetricState((jnp.zeros_like(theta), jnp.zeros(())))

    def statistic(self, grad: Any) -> Any:
        return jnp.array([-grad[1], grad[0]]), jnp.sum(grad**2)

    def update(self, state: MetricState, grad: Any) -> MetricState:
        return MetricState(self.statistic(grad))

    def apply_inverse(self, state: MetricState, x: Any) -> Any:
        u, q = state.statistic
        return x + u * jnp.vdot(u, x) / (1 + q)

    def apply_inverse_sqrt(self, state: MetricState, x: Any) -> Any:
        raise NotImplementedError


SHAPES = {"a": (), "b": (3,), "c": (2, 2)}
AUTODIFF = {
    "rmsprop": (RMSprop(decay=0.0, eps=0.1), SHAPES),
    "rmsprop-memory": (RMSprop(decay=0.8, eps=0.1), SHAPES),
    "wenzel": (Wenzel(decay=0.0, eps=0.1, interval=1), SHAPES),
    "wenzel-memory": (Wenzel(decay=0.8, eps=0.1, interval=1), SHAPES),
    "monge": (Monge(alpha2=0.7, decay=0.0), SHAPES),
    "monge-memory": (Monge(alpha2=0.7, decay=0.8), SHAPES),
    "monge-auto": (Monge(decay=0.8), SHAPES),
    "user": (CubeRoot(decay=0.8), SHAPES),
    "by-site": (
        get_metric({"a": RMSprop(0.8, eps=0.1), "b": CubeRoot(0.8), "*": Monge(0.7, 0.8)}),
        SHAPES,
    ),
}


@pytest.mark.parametrize(("metric", "shapes"), AUTODIFF.values(), ids=AUTODIFF.keys())
def test_exact_equals_dense_autodiff(metric: Any, shapes: Any, x64: None) -> None:
    """Against the Jacobian of theta -> A(theta), whose memory holds 1 - decay of theta."""
    theta = position(shapes)
    x, unravel = ravel_pytree(theta)
    memory = state_at(metric, position(shapes, seed=1))

    def matrix(x: jax.Array) -> jax.Array:
        state = metric.update(memory, gradient(unravel(x)))
        return jax.vmap(lambda e: ravel_pytree(metric.apply_inverse(state, unravel(e)))[0])(
            jnp.eye(x.size)
        )

    dense = jacobian_trace(matrix, x)
    state = jax.jit(metric.update)(memory, gradient(theta))
    found = estimate(metric, state, theta, exact=True)
    assert jax.tree.structure(found) == jax.tree.structure(theta)
    expected = dense / (1 - metric.decay)
    # Two orders of the same sums of at most D^2 = 64 products: some hundred roundoffs.
    np.testing.assert_allclose(flat(found), expected, rtol=0, atol=1e-13 * np.abs(dense).max() * 10)


def test_exact_equals_dense_autodiff_for_any_object(x64: None) -> None:
    metric, theta = Curl(), jnp.array([0.4, -0.9])

    def matrix(t: jax.Array) -> jax.Array:
        return jax.vmap(lambda e: metric.apply_inverse(state_at(metric, t), e))(jnp.eye(2))

    found = estimate(metric, state_at(metric, theta), theta, exact=True)
    np.testing.assert_allclose(found, jacobian_trace(matrix, theta), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["rmsprop", "wenzel"])
def test_diagonal_metrics_equal_their_formula_differentiated(name: str, x64: None) -> None:
    """As above, with A(theta) written out here and not taken from the metric."""
    metric, shapes = AUTODIFF[name]
    theta = position(shapes)
    x, unravel = ravel_pytree(theta)

    def diagonal(x: jax.Array) -> jax.Array:
        g = gradient(unravel(x))
        if name == "rmsprop":
            return 1 / (jnp.abs(ravel_pytree(g)[0]) + 0.1)
        scale = {k: jnp.sqrt(0.1 + jnp.mean(v**2)) for k, v in g.items()}
        least = jnp.sort(jnp.stack(list(scale.values())))[0]
        rows = {k: jnp.full(v.shape, least) / scale[k] for k, v in g.items()}
        return ravel_pytree(rows)[0]

    expected = np.diagonal(jax.jit(jax.jacfwd(diagonal))(x))
    found = flat(estimate(metric, state_at(metric, theta), theta, exact=True))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_monge_equals_the_closed_formula(x64: None) -> None:
    """Gamma = -a2 (H g + tr(H) g) / q + 2 a2^2 g (g'H g) / q^2, q = 1 + a2 g'g."""
    metric, a2 = Monge(alpha2=0.7, decay=0.0), 0.7
    theta = position(SHAPES)
    x, unravel = ravel_pytree(theta)
    g = flat(gradient(theta))
    h = np.asarray(jax.jit(jax.hessian(lambda x: energy(unravel(x)) / N))(x))
    q = 1 + a2 * g @ g
    expected = -a2 * (h @ g + np.trace(h) * g) / q + 2 * a2**2 * g * (g @ h @ g) / q**2
    found = flat(estimate(metric, state_at(metric, theta), theta, exact=True))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * np.abs(expected).max() * 10)


MANY = 4000


@pytest.mark.parametrize("name", ["wenzel", "monge", "user"])
def test_hutchinson_is_unbiased(name: str, x64: None) -> None:
    metric, shapes = AUTODIFF[name]
    theta = position(shapes)
    state = state_at(metric, theta)
    keys = jax.random.split(jax.random.key(3), MANY)

    def one(key: jax.Array) -> jax.Array:
        return ravel_pytree(estimate(metric, state, theta, key=key))[0]

    draws = np.asarray(jax.jit(jax.vmap(one))(keys))
    exact = flat(estimate(metric, state, theta, exact=True))
    error = draws.std(axis=0, ddof=1) / np.sqrt(MANY)
    # 4.5 standard errors: false alarm 7e-6 for each of at most 8 entries. 1e-12 is for entries
    # without variance.
    assert np.all(np.abs(draws.mean(axis=0) - exact) <= 4.5 * error + 1e-12 * np.abs(exact).max())
    # The test has power: an estimate without its largest entry, or doubled, would fail.
    assert np.abs(exact).max() > 9 * error.min()


def test_product_known_from_the_gradient_pass(x64: None) -> None:
    """One pass gives gradient and product; the same key gives the same estimate."""
    metric, theta, key = Monge(decay=0.0), position(SHAPES), jax.random.key(5)
    z = jax.jit(probe)(key, theta)

    @jax.jit
    def both(theta: Any, z: Any) -> tuple[Any, Any]:
        g, hvp_z = jax.jvp(gradient, (theta,), (z,))
        state = metric.update(metric.init(theta), g)
        found = divergence_from_probe(metric, state, g, z, hvp_z)
        return found, divergence(metric, state, g, lambda _: hvp_z, key, theta)

    found, given = both(theta, z)
    expected = estimate(metric, state_at(metric, theta), theta, key=key)
    np.testing.assert_allclose(flat(found), flat(expected), rtol=1e-13)
    np.testing.assert_array_equal(flat(given), flat(found))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_probe_is_signs_in_the_dtype_of_the_position(dtype: str, x64: None) -> None:
    shapes = {"a": (), "b": (7, 9), "c": (5,)}
    like = {k: jnp.zeros(s, dtype) for k, s in shapes.items()}
    z = jax.eval_shape(probe, jax.random.key(0), like)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), z) == jax.tree.map(
        lambda x: (x.shape, x.dtype), like
    )
    draws = jax.jit(jax.vmap(lambda k: ravel_pytree(probe(k, like))[0]))(
        jax.random.split(jax.random.key(1), 2000)
    )
    draws = np.asarray(draws, np.float64)
    assert set(np.unique(draws)) == {-1.0, 1.0}
    # The largest of 69 + 69 * 69 means of 2000 signs: 5.5 standard deviations, false alarm 2e-4.
    moments = np.concatenate([draws.mean(0), (draws.T @ draws / 2000 - np.eye(69)).ravel()])
    assert np.abs(moments).max() < 5.5 / np.sqrt(2000)


def test_result_keeps_dtypes(x64: None) -> None:
    theta = {k: v.astype(jnp.float32) for k, v in position(SHAPES).items()}
    for metric, _ in AUTODIFF.values():
        state = jax.eval_shape(metric.init, theta)
        found = jax.eval_shape(
            lambda s, t, m=metric: estimate(m, s, t, key=jax.random.key(0)), state, theta
        )
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
            lambda x: (x.shape, x.dtype), theta
        )


def test_has_divergence() -> None:
    theta = position(SHAPES)
    assert not has_divergence(Identity(), theta)
    assert has_divergence(Monge(), theta)


@pytest.mark.parametrize("metric", ["shampoo", {"w": Shampoo(), "*": "rmsprop"}])
def test_a_metric_without_derivative_has_no_gamma(metric: Any) -> None:
    for kernel, mode in (SGRLD, "corrected"), (SGRLD, "published"), (SGHMC, "corrected"):
        with pytest.raises(ValueError, match="needs the derivative of the metric, and .*Shampoo"):
            kernel(potential_fn=energy, metric=metric, divergence=mode)


def test_constant_metric_has_no_gamma() -> None:
    theta = position(SHAPES)
    found = estimate(Identity(), Identity().init(theta), theta, key=jax.random.key(0))
    assert np.all(flat(found) == 0)


def test_mode_factor() -> None:
    factors = {mode: mode_factor(mode, 0.75) for mode in DIVERGENCE_MODES}
    assert factors == {
        "corrected": 1.0,
        "published": 0.25,
        "none": 0.0,
        "frozen": 0.0,
        "auxiliary": 0.0,
    }


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="divergence must be one of .*'corrected'.* got 'exact'"):
        mode_factor("exact", 0.9)
