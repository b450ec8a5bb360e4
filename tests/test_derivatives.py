"""Directional derivatives of functions without forward mode, and chains on such densities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro.infer import MCMC
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGRLD, RiemannianLaplace
from numpyro_geom._checks import SamplingWarning
from numpyro_geom.model.derivatives import jvp, linearize
from numpyro_geom.model.jaxprs import inner


def plain(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.sin(x[0]) * x[1], jnp.exp(x[1] * x[2])])


def in_a_loop(x: jax.Array) -> jax.Array:
    """``x``; reverse mode cannot pass a loop whose length is not known."""
    return lax.while_loop(
        lambda state: state[0] < 1, lambda state: (state[0] + 1, 2 * state[1]), (0, x / 2)
    )[1]


def without_forward_mode(change: Callable = lambda x: x) -> Callable:
    @jax.custom_vjp
    def fn(x: jax.Array) -> jax.Array:
        return plain(x)

    fn.defvjp(
        lambda x: (fn(x), x),
        lambda x, u: (
            change(
                jnp.stack(
                    [
                        u[0] * jnp.cos(x[0]) * x[1],
                        u[0] * jnp.sin(x[0]) + u[1] * x[2] * jnp.exp(x[1] * x[2]),
                        u[1] * x[1] * jnp.exp(x[1] * x[2]),
                    ]
                )
            ),
        ),
    )
    return fn


# differences in 64 bits have a relative error of eps^(2/3) = 4e-11
FUNCTIONS = {
    "nested reverse": (without_forward_mode(), 1e-12),
    "differences": (without_forward_mode(in_a_loop), 1e-8),
}
X, T = jnp.array([0.7, 0.4, 1.3]), jnp.array([0.3, -1.1, 0.6])


def gradient(fn: Callable) -> Callable:
    return jax.grad(lambda x: jnp.sum(jnp.square(fn(x) - 0.3)) + jnp.sum(jnp.square(x)))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "of", short([lambda fn: fn, gradient], kept=[gradient]), ids=["function", "gradient"]
)
def test_products_are_those_of_forward_mode(x64: None, name: str, of: Callable) -> None:
    fn, tolerance = FUNCTIONS[name]
    x, t = X.astype(float), T.astype(float)
    value, tangent = jax.jvp(of(plain), (x,), (t,))

    def products(x: jax.Array, t: jax.Array) -> tuple:
        there, push = linearize(of(fn), x)
        return *jvp(of(fn), x, t), there, push(t), jax.vmap(push)(jnp.stack([t, -t]))[1]

    for run in (products, jax.jit(products)):
        for one, two in zip(run(x, t), (value, tangent, value, tangent, -tangent), strict=True):
            np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_of_rows_can_be_transposed(x64: None, name: str) -> None:
    """The rows of a control variate contain a product, and their covariance needs both ways."""
    fn, tolerance = FUNCTIONS[name]
    x, t = X.astype(float), T.astype(float)
    anchor = jnp.full(3, 0.9)
    _, push = linearize(lambda x: fn(x) - jvp(fn, anchor, x - anchor)[1], x)
    jacobian = jax.jacfwd(plain)(x) - jax.jacfwd(plain)(anchor)
    np.testing.assert_allclose(push(t), jacobian @ t, atol=100 * tolerance)
    u = jnp.array([0.6, -0.8])
    np.testing.assert_allclose(jax.vjp(push, x)[1](u)[0], u @ jacobian, atol=100 * tolerance)


def test_the_derivative_of_a_loop_adds_to_arrays_that_are_seen_to_be_zero() -> None:
    """A loop that reads one entry of an array in each turn: the reverse adds one entry to zeros."""
    size = 64

    def energy(x: jax.Array) -> jax.Array:
        def turn(before: jax.Array, k: jax.Array) -> tuple:
            return x[k], jnp.exp(x[k]) * before

        return jnp.sum(lax.scan(turn, 1.0, jnp.arange(size))[1])

    def hidden(jaxpr: Any) -> list[bool]:
        found = [
            e.invars[0] in jaxpr.invars
            for e in jaxpr.eqns
            if e.primitive.name == "dynamic_update_slice"
        ]
        return found + [x for e in jaxpr.eqns for part in inner(e) for x in hidden(part)]

    x = jnp.linspace(-1, 1, size)
    push = linearize(jax.grad(energy), x)[1]
    np.testing.assert_allclose(push(x), jax.jvp(jax.grad(energy), (x,), (x,))[1], rtol=1e-6)
    assert hidden(jax.make_jaxpr(jax.linearize(jax.grad(energy), x)[1])(x).jaxpr)[0]
    assert not any(hidden(jax.make_jaxpr(push)(x).jaxpr))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_differences_do_not_depend_on_the_length_of_the_direction(size: float) -> None:
    fn, _ = FUNCTIONS["differences"]
    product = jax.jit(lambda t: jvp(gradient(fn), X, t)[1])(size * T)
    exact = jax.jvp(gradient(plain), (X,), (T,))[1]
    np.testing.assert_allclose(product / size, exact, rtol=1e-3)
    np.testing.assert_array_equal(jvp(gradient(fn), X, 0 * T)[1], 0)


def test_forward_mode_is_used_where_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("numpyro_geom.model.derivatives._by_reverse_mode", refuse)
    linearize(jnp.sin, X)[1](X)
    jvp(jax.grad(lambda x: jnp.sum(jax.nn.relu(x))), X, X)  # with a custom_jvp


@jax.custom_vjp
def softplus(x: jax.Array) -> jax.Array:
    return jax.nn.softplus(x)


softplus.defvjp(lambda x: (softplus(x), x), lambda x, u: (u * jax.nn.sigmoid(x),))


def counts(link: Callable) -> tuple[Callable, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    y = rng.poisson(np.log1p(np.exp(x @ [0.5, -0.3] + 1)))

    def model(x: jax.Array, y: jax.Array) -> None:
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("data", x.shape[0]) as i:
            numpyro.sample("y", dist.Poisson(link(x[i] @ slope + level)), obs=y[i])

    return model, jnp.asarray(x), jnp.asarray(y)


MINIBATCHES: dict[str, Any] = {"batch_size": 30, "control_variate": True}


@pytest.mark.parametrize(
    "make",
    [
        partial(SGHMC, **MINIBATCHES, step_size=1e-3, num_steps=3, friction=1.0, dense_mass=None),
        pytest.param(partial(SGHMC, **MINIBATCHES), marks=pytest.mark.slow),
        pytest.param(
            partial(SGRLD, metric="monge", divergence="corrected"), marks=pytest.mark.slow
        ),
        pytest.param(
            partial(SGRLD, adjusted=True, metric="rmsprop", divergence="auxiliary"),
            marks=pytest.mark.slow,
        ),
        pytest.param(GGMC, marks=pytest.mark.slow),
    ],
)
def test_chains_are_those_of_the_same_density_with_forward_mode(x64: None, make: Callable) -> None:
    def draws(link: Callable) -> Any:
        model, *data = counts(link)
        mcmc = MCMC(make(model), num_warmup=20, num_samples=3, progress_bar=False)
        mcmc.run(jax.random.key(0), *data)
        return mcmc.get_samples()["slope"]

    # rounding differs, and a chain of some hundred steps multiplies it
    np.testing.assert_allclose(draws(softplus), draws(jax.nn.softplus), rtol=1e-6)


def on_host(x: jax.Array) -> jax.Array:
    """The slope of softplus, by a callback, which has no derivative."""
    return jax.pure_callback(
        lambda x: 1 / (1 + np.exp(-np.asarray(x))), x, x, vmap_method="expand_dims"
    )


@jax.custom_jvp
def softplus_once(x: jax.Array) -> jax.Array:
    return jax.nn.softplus(x)


softplus_once.defjvp(lambda x, t: (softplus_once(*x), t[0] * on_host(*x)))


@pytest.mark.parametrize("link", [softplus, softplus_once])
def test_a_guide_in_the_fisher_metric_says_what_to_do(link: Callable) -> None:
    model, *data = counts(link)
    with pytest.raises(ValueError, match="expected a model with forward-mode derivatives, twice"):
        RiemannianLaplace(model).fit(jax.random.key(0), *data, num_starts=1, max_steps=0)


def test_a_callback_without_a_derivative_is_named() -> None:
    model, *data = counts(on_host)
    said = pytest.raises(ValueError, match="callback without a derivative: expected .*custom_jvp")
    with said:
        SGHMC(model).init(jax.random.key(0), 1, None, tuple(data), {})
    with said:
        RiemannianLaplace(model).fit(jax.random.key(0), *data, num_starts=1, max_steps=0)


def test_linearised_predictions_without_forward_mode() -> None:
    """The logarithm of a rate is linear in the draws."""
    model, x, y = counts(softplus)
    guide, keys = RiemannianLaplace(model, "euclidean", mode="euclidean"), jax.random.key(1)
    start = {"slope": jnp.zeros(2), "level": jnp.zeros(())}
    with pytest.warns(SamplingWarning, match="has not converged"):
        params = guide.fit(jax.random.key(0), x, y, init_params=start, max_steps=0)
    found = guide.predictive(keys, params, x, y, num_samples=4, linearized=True).log_likelihood
    draws = guide.sample_posterior(jax.random.split(keys)[0], params, sample_shape=4)
    moved = (draws["slope"] @ x.T + draws["level"][:, None]) / 2 / np.log(2)
    expected = dist.Poisson(np.log(2) * np.exp(moved)).log_prob(y)
    np.testing.assert_allclose(found["y"], expected, rtol=1e-4)


@jax.custom_jvp
def cubes(x: jax.Array) -> jax.Array:
    """Sum of x^3 / 3, whose derivative is a loop that has no reverse mode."""
    return jnp.sum(x**3) / 3


@cubes.defjvp
def _cubes_jvp(primals: tuple, tangents: tuple) -> tuple:
    (x,), (t,) = primals, tangents
    start = jnp.zeros((), jnp.int32), jnp.ones_like(x)
    _, square = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * x), start)
    return cubes(x), jnp.sum(square * t)


@jax.custom_vjp
def waves(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(x)) ** 2


waves.defvjp(lambda x: (waves(x), x), lambda x, u: (2 * u * jnp.sum(jnp.sin(x)) * jnp.cos(x),))


@pytest.mark.parametrize(
    ("fn", "like"),
    [
        (lambda x: jnp.sum(jnp.sin(x)) ** 2, lambda x: jnp.sum(jnp.sin(x)) ** 2),
        (cubes, lambda x: jnp.sum(x**3) / 3),
        (waves, lambda x: jnp.sum(jnp.sin(x)) ** 2),
    ],
    ids=["both modes", "no reverse mode of the slope", "no forward mode"],
)
def test_value_slope_and_product_at_several_places(fn: Callable, like: Callable, x64: None) -> None:
    x = jnp.array([[0.3, -1.2, 0.7], [1.0, 0.1, -0.4]])
    t = jnp.array([[1.0, 0.0, 0.0], [0.2, -0.5, 2.0]])

    def asked(x: jax.Array, t: jax.Array) -> tuple:
        (value, _), (slope, product) = jvp(jax.value_and_grad(fn), x, t)
        return value, slope, product

    values, slopes, products = jax.jit(jax.vmap(asked))(x, t)
    np.testing.assert_allclose(values, [like(z) for z in x], rtol=1e-12)
    np.testing.assert_allclose(
        slopes, [jax.grad(like)(z) @ v for z, v in zip(x, t, strict=True)], rtol=1e-10
    )
    expected = [jax.hessian(like)(z) @ v for z, v in zip(x, t, strict=True)]
    np.testing.assert_allclose(products, expected, rtol=1e-9)


@jax.custom_jvp
def tides(x: jax.Array) -> jax.Array:
    """Sum of x^3 / 3, whose derivative is a callback that has none."""
    return jnp.sum(x**3) / 3


@tides.defjvp
def _tides_jvp(primals: tuple, tangents: tuple) -> tuple:
    (x,), (t,) = primals, tangents
    square = jax.pure_callback(np.square, x, x, vmap_method="broadcast_all")
    return tides(x), jnp.sum(square * t)


def test_gradients_without_a_derivative_are_enough(x64: None) -> None:
    """Their differences are exact for a polynomial of this order, up to rounding."""
    x, t = X.astype(float), T.astype(float)
    gradient = jax.grad(tides)

    def products(x: jax.Array, t: jax.Array) -> tuple:
        return jvp(gradient, x, t)[1], linearize(gradient, x)[1](t)

    for product in jax.jit(products)(x, t):
        np.testing.assert_allclose(product, 2 * x * t, rtol=1e-8)


def test_an_error_of_the_function_itself_is_raised() -> None:
    def wrong(x: jax.Array) -> jax.Array:
        raise ValueError("wrong model")

    with pytest.raises(ValueError, match="wrong model"):
        linearize(wrong, X)
