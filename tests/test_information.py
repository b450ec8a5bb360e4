"""Fisher information roots against Monte Carlo of scores, exact values, and edge cases.

Monte Carlo: with s the derivative of log p(y) along a tangent, sum(w^2) must equal E[s^2]. Each
case has three sets of parameters with one tangent each, and 70,000 draws for each of them. The mean
of s^2 may be off by 5 standard errors, from the spread of s^2 over the draws. Correct
roots fail with probability 1e-4 in the whole file, and the seeds are fixed. The standard error is
about 0.6% of E[s^2]. Properties that need more accuracy are tested against exact values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from jax import random
from jax.nn import sigmoid, softmax
from numpyro.distributions import constraints, transforms
from tiers import short

from numpyro_geom.laplace.information.closed_forms import trigamma_excess
from numpyro_geom.laplace.information.form import dependence
from numpyro_geom.laplace.information.root import NUM_SCORES, fisher_root, is_reparametrised

NUM_DRAWS = 70_000
BATCH = 3
EYE = np.eye(3, dtype=np.float32)


class Case(NamedTuple):
    """A distribution by functions of unconstrained parameters.

    Attributes:
        build: from arrays of shape (BATCH, *shape).
        k: components expected.
        shapes: of the arguments beyond the batch; scalars unless given.
    """

    build: Callable[..., Any]
    k: int
    shapes: dict[str, tuple[int, ...]] = {}

    def parameters(self, seed: int, scale: float = 0.5) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(seed)
        return tuple(
            jnp.asarray(scale * rng.normal(size=(BATCH, *self.shapes.get(name, ()))))
            for name in inspect.signature(self.build).parameters
        )


def exp(x: Any) -> Any:
    return jnp.exp(x)


def tril(x: Any) -> Any:
    """Lower triangular with a positive diagonal."""
    return jnp.tril(x, -1) + jnp.exp(x) * EYE


def affine(loc: Any, scale: Any, domain: Any = constraints.real) -> Any:
    return transforms.AffineTransform(loc, scale, domain=domain)


MVN = {"m": (3,), "L": (3, 3)}
CASES = {
    "normal": Case(lambda m, s: dist.Normal(m, exp(s)), 2),
    "lognormal": Case(lambda m, s: dist.LogNormal(m, exp(s)), 2),
    "cauchy": Case(lambda m, s: dist.Cauchy(m, exp(s)), 2),
    "laplace": Case(lambda m, s: dist.Laplace(m, exp(s)), 2),
    "logistic": Case(lambda m, s: dist.Logistic(m, exp(s)), 2),
    "student": Case(lambda d, m, s: dist.StudentT(4 * exp(d), m, exp(s)), 3),
    "half_normal": Case(lambda s: dist.HalfNormal(exp(s)), 1),
    "half_cauchy": Case(lambda s: dist.HalfCauchy(exp(s)), 1),
    "exponential": Case(lambda r: dist.Exponential(exp(r)), 1),
    "gamma": Case(lambda a, b: dist.Gamma(2 * exp(a), exp(b)), 2),
    "dirichlet": Case(lambda a: dist.Dirichlet(2 * exp(a)), 4, {"a": (4,)}),
    "mvn": Case(lambda m, L: dist.MultivariateNormal(m, scale_tril=tril(L)), 9, MVN),
    "mvn_covariance": Case(
        lambda m, L: dist.MultivariateNormal(m, covariance_matrix=tril(L) @ tril(L).mT), 9, MVN
    ),
    "poisson": Case(lambda r: dist.Poisson(2 * exp(r)), 1),
    "bernoulli_logits": Case(lambda x: dist.Bernoulli(logits=x), 1),
    "bernoulli_probs": Case(lambda x: dist.Bernoulli(probs=sigmoid(x)), 1),
    "binomial_logits": Case(lambda x: dist.Binomial(7, logits=x), 1),
    "binomial_probs": Case(lambda x: dist.Binomial(jnp.array([2, 5, 9]), probs=sigmoid(x)), 1),
    "categorical_logits": Case(lambda x: dist.Categorical(logits=x), 4, {"x": (4,)}),
    "categorical_probs": Case(lambda x: dist.Categorical(probs=softmax(x)), 4, {"x": (4,)}),
    "multinomial_logits": Case(lambda x: dist.Multinomial(5, logits=x), 4, {"x": (4,)}),
    "multinomial_probs": Case(lambda x: dist.Multinomial(5, probs=softmax(x)), 4, {"x": (4,)}),
    "ordered_logistic": Case(
        lambda x, c: dist.OrderedLogistic(x, jnp.cumsum(exp(c), -1) - 1.5), 4, {"c": (3,)}
    ),
    "gamma_poisson": Case(lambda a, b: dist.GammaPoisson(2 * exp(a), exp(b)), 2),
    # wrappers
    "independent": Case(lambda m, s: dist.Normal(m, exp(s)[:, None]).to_event(1), 6, {"m": (3,)}),
    "expanded": Case(lambda m, s: dist.Normal(m[0], exp(s[1])).expand([BATCH]), 2),
    "expanded_inside": Case(lambda m: dist.Normal(m[:1], 1.0).expand([BATCH]), 2),
    "masked": Case(lambda m, s: dist.Logistic(m, exp(s)).mask(np.array([True, False, True])), 2),
    "masked_event": Case(
        lambda x: dist.Normal(x, 1.0).to_event(1).mask(np.array([True, False, True])),
        6,
        {"x": (3,)},
    ),
    "affine": Case(
        lambda m, s, a, b: dist.TransformedDistribution(
            dist.Logistic(m, exp(s)), affine(a, -exp(b))
        ),
        2,
    ),
    "affine_of_constants": Case(
        lambda a: dist.TransformedDistribution(dist.Normal(0.0, 1.0), affine(a, 2.0)), 2
    ),
    "invariant": Case(
        lambda m, s: dist.TransformedDistribution(
            dist.Logistic(m, exp(s)), [transforms.SigmoidTransform()]
        ),
        2,
    ),
}


def directions(case: Case, seed: int = 0) -> tuple[tuple, tuple]:
    return case.parameters(seed), case.parameters(seed + 1, 1.0)


@functools.partial(jax.jit, static_argnums=0)
def information_of(build: Callable, primals: tuple, tangents: tuple) -> jax.Array:
    return jnp.sum(jnp.square(fisher_root(*jax.jvp(build, primals, tangents))), -1)


def deviation(values: Any, expected: Any) -> np.ndarray:
    """Deviation of the mean over the first axis from its expectation, in standard errors."""
    values = np.asarray(values)
    error = values.std(axis=0, ddof=1) / np.sqrt(values.shape[0])
    return np.abs(values.mean(axis=0) - np.asarray(expected)) / np.maximum(error, 1e-12)


# to compile: 3 to 19 s each, and the families of most have another member here
COSTLY = {"dirichlet", "gamma_poisson", "student", "binomial_logits", "mvn_covariance"}


@pytest.mark.parametrize("name", short(CASES, kept=CASES.keys() - COSTLY))
def test_against_scores_and_float32(name: str) -> None:
    case = CASES[name]

    def root(primals: tuple, tangents: tuple) -> jax.Array:
        return fisher_root(*jax.jvp(case.build, primals, tangents))

    def scores(primals: tuple, tangents: tuple) -> jax.Array:
        y = jax.lax.stop_gradient(case.build(*primals).sample(random.key(1), (NUM_DRAWS,)))
        return jax.jvp(lambda *p: case.build(*p).log_prob(y), primals, tangents)[1]

    with jax.enable_x64(True):
        given = directions(case)
        w, score = jax.jit(lambda *given: (root(*given), scores(*given)))(*given)
    assert w.shape == (BATCH, case.k)
    assert w.dtype == jnp.float64
    assert np.max(deviation(np.square(score), np.sum(np.square(w), -1))) < 5

    single = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), given)
    w32 = jax.jit(root)(*single)
    assert w32.dtype == jnp.float32
    # rounding, 6e-8, through cancellations by up to 1e2
    np.testing.assert_allclose(w32, w, rtol=1e-5, atol=1e-5 * np.max(np.abs(w)))


@functools.partial(jax.jit, static_argnums=0)
def derivatives(function: Callable, at: Any) -> tuple[jax.Array, ...]:
    """A function of a number, and its first and second derivative there."""

    def slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.jvp(function, (x,), (jnp.ones_like(x),))

    (value, first), (_, second) = jax.jvp(slope, (at,), (jnp.ones_like(at),))
    return value, first, second


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            lambda m, a: dist.NegativeBinomial2(3 * exp(m), exp(a)),
            lambda m, a: dist.GammaPoisson(exp(a), exp(a - m) / 3),
        ),
        (
            lambda n, x: dist.NegativeBinomialLogits(3 * exp(n), x),
            lambda n, x: dist.GammaPoisson(3 * exp(n), exp(-x)),
        ),
        (
            lambda n, x: dist.NegativeBinomialProbs(3 * exp(n), sigmoid(x)),
            lambda n, x: dist.GammaPoisson(3 * exp(n), exp(-x)),
        ),
        (
            lambda m, c: dist.BetaProportion(sigmoid(m), exp(c)),
            lambda m, c: dist.Beta(sigmoid(m) * exp(c), sigmoid(-m) * exp(c)),
        ),
        (
            lambda a, b: dist.InverseGamma(exp(a), exp(b)),
            lambda a, b: dist.Gamma(exp(a), exp(b)),
        ),
        (lambda a: dist.Chi2(exp(a)), lambda a: dist.Gamma(exp(a) / 2, 0.5)),
        (
            lambda a, b: dist.Beta(exp(a), exp(b)),
            lambda a, b: dist.Dirichlet(jnp.stack([exp(a), exp(b)], -1)),
        ),
    ],
    ids=["negative_binomial_2", "logits", "probs", "beta_proportion", "inverse", "chi2", "beta"],
)
def test_one_distribution_two_names(one: Callable, other: Callable) -> None:
    case = Case(one, 2)
    given = directions(case, 7)
    np.testing.assert_allclose(
        information_of(one, *given), information_of(other, *given), rtol=1e-10
    )


# --- exact values


def information_matrix(build: Callable, *at: Any) -> np.ndarray:
    """F of two scalar parameters."""
    at = tuple(jnp.asarray(x) for x in at)
    ones, zeros = jnp.ones_like(at[0]), jnp.zeros_like(at[0])
    w = [fisher_root(*jax.jvp(build, at, t)) for t in ((ones, zeros), (zeros, ones))]
    return np.asarray(jnp.stack([jnp.stack([jnp.sum(a * b, -1) for b in w]) for a in w]))


def integral(f: Callable, low: float, high: float) -> float:
    return scipy.integrate.quad(f, low, high, epsabs=0, epsrel=1e-11, limit=500)[0]


@functools.cache
def student_t_information(df: float) -> np.ndarray:
    """Of the degrees of freedom and the scale, at scale 1."""
    digamma, law = scipy.special.digamma, scipy.stats.t(df)

    def score(t: float) -> tuple[float, float]:
        ratio = t * t / df
        of_df = digamma((df + 1) / 2) - digamma(df / 2) - 1 / df - np.log1p(ratio)
        of_df += (df + 1) / df * ratio / (1 + ratio)
        return of_df / 2, (df + 1) * ratio / (1 + ratio) - 1

    def entry(i: int, j: int) -> float:
        # t = sinh(x): the tail of a small df is long
        return 2 * integral(
            lambda x: (
                score(np.sinh(x))[i] * score(np.sinh(x))[j] * law.pdf(np.sinh(x)) * np.cosh(x)
            ),
            0,
            60,
        )

    return np.array([[entry(i, j) for j in range(2)] for i in range(2)])


@pytest.mark.parametrize("dtype", short(["float64", "float32"], kept=["float32"]))
def test_student_t_exact(dtype: str) -> None:
    # on both sides of where the expansion takes over, 8 in float32 and 30 in float64
    with jax.enable_x64(dtype == "float64"):
        for df in (0.7, 7.5, 8.5, 29.0, 31.0, 300.0):
            got = information_matrix(
                lambda df, s: dist.StudentT(df, 0.0, s), *np.asarray([df, 1.0], dtype)
            )
            rtol = 2e-9 if dtype == "float64" else 1e-4
            np.testing.assert_allclose(got, student_t_information(df), rtol=rtol)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_dispersion_exact(dtype: str) -> None:
    # At a fixed mean. With r = 1e4 and p = 1e-4 the counts are Poisson to 1e-4, and the usual
    # difference of two sums would have lost 8 digits.
    k = np.arange(2, 200_000)
    r, p = (x.ravel() for x in np.meshgrid([0.7, 5.0, 100.0, 1e4], [1e-4, 0.1, 0.7, 0.999]))
    expected = [
        np.sum(np.exp(k * np.log(b) + scipy.special.betaln(k, a)) / k)
        for a, b in zip(r, p, strict=True)
    ]
    with jax.enable_x64(dtype == "float64"):
        mean, r = jnp.asarray(r * p / (1 - p), dtype), jnp.asarray(r, dtype)
        got = information_of(lambda r: dist.NegativeBinomial2(mean, r), (r,), (jnp.ones_like(r),))
    np.testing.assert_allclose(got, expected, rtol=1e-5 if dtype == "float64" else 1e-4)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_trigamma_excess_exact(dtype: str) -> None:
    a = np.concatenate([np.logspace(-6, 1.3, 40), [19.9, 20.1, 50.0]])
    expected = a**2 * scipy.special.polygamma(1, a) - a
    with jax.enable_x64(dtype == "float64"):
        far_away = np.array([1e3, 1e6, 1e20])
        whole = jnp.asarray(np.concatenate([a, far_away]), dtype)
        got, far = np.split(np.asarray(jax.jit(trigamma_excess)(whole)), [a.size])
    np.testing.assert_allclose(got, expected, rtol=1e-12 if dtype == "float64" else 1e-5)
    np.testing.assert_allclose(far, 0.5 + 1 / np.array([6e3, 6e6, 6e20]), rtol=1e-6)


# --- edges


EDGES: dict[str, tuple[Callable, list]] = {
    "bernoulli_logits": (lambda x: dist.Bernoulli(logits=x), [-1e4, -200, -80, 80, 200, 1e4]),
    "bernoulli_probs": (lambda x: dist.Bernoulli(probs=sigmoid(x)), [-200, -80, -40, 40, 200]),
    "binomial_logits": (lambda x: dist.Binomial(0, logits=x), [-200, 0, 200]),
    "poisson": (lambda x: dist.Poisson(exp(x)), [-200, -95, -80, -37, -34, 40]),
    "categorical_logits": (
        lambda x: dist.Categorical(logits=jnp.stack([x, -x, 2 * x], -1)),
        [-1e4, -50, 50, 200],
    ),
    "categorical_probs": (
        lambda x: dist.Categorical(probs=softmax(jnp.stack([x, -x, 2 * x], -1))),
        [-1e4, -50, -11, 11, 50, 200],
    ),
    "ordered_logistic": (
        lambda x: dist.OrderedLogistic(x, jnp.array([-1.0, 0.0, 2.0])),
        [-200, -50, 50, 200],
    ),
    "negative_binomial": (lambda x: dist.NegativeBinomialLogits(exp(x / 20), x), [-200, -80, 80]),
    "gamma": (lambda x: dist.Gamma(exp(x), 2.0), [-20, 40]),
    "dirichlet": (lambda x: dist.Dirichlet(exp(x)[:, None] * np.ones(3, np.float32)), [-20, 20]),
    "student": (lambda x: dist.StudentT(exp(x), 0.0, 1.0), [-20, 20]),
}


@pytest.mark.parametrize("name", EDGES)
def test_finite_with_two_derivatives_at_the_edges(name: str) -> None:
    build, at = EDGES[name]
    x = jnp.asarray(at, jnp.float32)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(information_of(build, (x,), (jnp.ones_like(x),)))

    value, (slope, curvature) = jax.jit(
        lambda x: (total(x), jax.jvp(jax.grad(total), (x,), (jnp.ones_like(x),)))
    )(x)
    for each in (value, slope, curvature):
        assert np.all(np.isfinite(each)), (value, slope, curvature)


# --- parameters that are known to be constant


@pytest.mark.parametrize(
    ("build", "k"),
    [
        (lambda x: dist.Normal(x, 1.0), 1),
        (lambda x: dist.Normal(x, x), 2),
        (lambda x: dist.StudentT(4.0, x, x), 2),
        (lambda x: dist.Gamma(x, 2.0), 1),
        (lambda x: dist.Beta(2.0, 3.0), 0),
        (lambda x: dist.InverseGamma(x, 2.0), 1),
        (lambda x: dist.NegativeBinomial2(x, 3.0), 1),
        (lambda x: dist.MultivariateNormal(x * jnp.ones(3), scale_tril=EYE), 3),
        (lambda x: dist.Normal(x, jnp.ones(3)).to_event(1).mask(jnp.array(True)), 3),
        (lambda x: dist.Kumaraswamy(2.0, 3.0), 0),
        (lambda x: dist.Kumaraswamy(2.0, x), NUM_SCORES),
        (lambda x: dist.Unit(x), 0),
    ],
)
def test_constant_parameters_take_no_components(build: Callable, k: int) -> None:
    moves = [bool(d) for d in dependence(lambda x: jax.tree.leaves(build(x)), jnp.float32(1.3))]

    def total(x: jax.Array, drop: bool) -> tuple[jax.Array, jax.Array]:
        d, tangent = jax.jvp(build, (x,), (jnp.ones_like(x),))
        leaves, treedef = jax.tree.flatten(tangent)
        if drop:
            leaves = [t if yes else None for t, yes in zip(leaves, moves, strict=True)]
        w = fisher_root(d, jax.tree.unflatten(treedef, leaves))
        return jnp.sum(jnp.square(w)), w

    run = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1)
    (value, w), slope = run(jnp.float32(1.3), True)
    (plain, _), plain_slope = run(jnp.float32(1.3), False)
    assert w.shape[-1] == k
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    np.testing.assert_allclose(slope, plain_slope, rtol=1e-5)


# --- fallbacks


fallback = fisher_root.dispatch(dist.Distribution)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: dist.Categorical(logits=x * jnp.arange(4.0)),
        lambda x: dist.Binomial(6, logits=x * jnp.ones(2)),
        lambda x: dist.OrderedLogistic(x * jnp.arange(5.0), jnp.array([-1.0, 0.5])),
    ],
)
def test_enumeration_is_exact(build: Callable) -> None:
    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        d, tangent = jax.jvp(build, (x,), (1.0,))
        return fallback(d, tangent), fisher_root(d, tangent)

    w, closed = both(0.4)
    assert w.shape[-1] == build(0.4).enumerate_support().shape[0]
    expected = np.sum(np.square(closed), -1)
    np.testing.assert_allclose(np.sum(np.square(w), -1), expected, rtol=1e-5)


def test_enumeration_without_a_closed_form() -> None:
    def build(x: Any) -> Any:
        return dist.ZeroInflatedDistribution(dist.Binomial(3, logits=x), gate=sigmoid(-x))

    p, dp = jax.jvp(lambda x: jnp.exp(build(x).log_prob(jnp.arange(4))), (0.4,), (1.0,))
    w = jax.jit(lambda x: fisher_root(*jax.jvp(build, (x,), (1.0,))))(0.4)
    assert w.shape == (4,)
    np.testing.assert_allclose(np.sum(np.square(w)), np.sum(dp**2 / p), rtol=1e-5)
    # supports of unequal size cannot be enumerated together
    uneven = dist.Binomial(np.array([2, 4]), logits=jnp.zeros(2))
    w = jax.eval_shape(
        lambda x: fisher_root(
            *jax.jvp(lambda x: dist.ZeroInflatedDistribution(uneven, gate=x), (x,), (1.0,))
        ),
        0.3,
    )
    assert w.shape == (2, NUM_SCORES)


@pytest.mark.parametrize(
    ("build", "exact"),
    [
        (lambda s: dist.Normal(0.0, s), lambda s: 2 / s**2),
        (lambda s: dist.Cauchy(s, 2.0), lambda s: 0.125 + 0 * s),
    ],
)
def test_draws_follow_the_parameters(build: Callable, exact: Callable) -> None:
    # the mean of the information over 2,000 entries with draws of their own, and two derivatives
    def information(s: jax.Array) -> jax.Array:
        x = s * jnp.ones(2000)
        return jnp.sum(jnp.square(fallback(*jax.jvp(build, (x,), (jnp.ones_like(x),)))), -1)

    value, slope, curvature = derivatives(information, 1.7)
    expected, expected_slope, _ = derivatives(exact, 1.7)
    assert deviation(value, expected) < 5
    assert deviation(slope, expected_slope) < 5
    assert np.all(np.isfinite(curvature))


def test_draws_that_cannot_follow_are_constants() -> None:
    def mixture(x: Any) -> Any:
        parts = dist.Normal(jnp.stack([x, -x], -1), 1.0)
        return dist.MixtureSameFamily(dist.Categorical(logits=jnp.stack([x, 0 * x], -1)), parts)

    assert not is_reparametrised(mixture(jnp.ones(3)))
    assert not is_reparametrised(dist.Poisson(1.0))
    x = 2 * jnp.ones(2000)
    value = information_of(mixture, (x,), (jnp.ones_like(x),))
    grid = np.linspace(-12, 12, 20_001, dtype=np.float32)
    log_p, score = jax.jvp(lambda x: mixture(x).log_prob(grid), (2.0,), (1.0,))
    exact = np.sum(np.exp(log_p) * score**2) * (grid[1] - grid[0])
    assert deviation(value, exact) < 5


def test_transformed_with_parameters_falls_back() -> None:
    def build(x: Any) -> Any:
        steps = [transforms.ExpTransform(), affine(0.0, x, constraints.positive)]
        return dist.TransformedDistribution(dist.Normal(0.0, 0.5), steps)

    # log y is Normal(log x, 0.5)
    x = 3 * jnp.ones(2000)
    value = information_of(build, (x,), (jnp.ones_like(x),))
    assert deviation(value, 4 / 9) < 5
    folded = information_of(lambda x: dist.FoldedDistribution(dist.Normal(0.0, x)), (x,), (x,))
    assert deviation(folded, 2.0) < 5


# --- extension, errors, transformations


class Plain(dist.Distribution):
    arg_constraints = {"rate": constraints.positive}
    support = constraints.positive

    def __init__(self, rate: Any) -> None:
        self.rate = jnp.asarray(rate)
        super().__init__(self.rate.shape)


class Rounded(Plain):
    def sample(self, key: Any, sample_shape: tuple = ()) -> Any:
        return random.exponential(key, sample_shape + self.batch_shape) / self.rate

    def log_prob(self, value: Any) -> Any:
        return jax.pure_callback(
            lambda x: np.log(x), jax.ShapeDtypeStruct(value.shape, value.dtype), self.rate * value
        )


def test_registration() -> None:
    class Mine(Plain):
        pass

    with pytest.raises(TypeError, match="no Fisher information for Mine.*register"):
        fisher_root(*jax.jvp(Mine, (2.0,), (1.0,)))

    @fisher_root.register(Mine)
    def _(d: Any, tangent: Any) -> Any:
        return (tangent.rate / d.rate)[..., None]

    def build(x: Any) -> Any:
        return Mine(x).expand([3]).to_event(1)

    np.testing.assert_allclose(fisher_root(*jax.jvp(build, (2.0,), (1.0,))), [0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (Plain, "Plain: expected a closed form.*NotImplementedError.*register"),
        (Rounded, "Rounded: expected a closed form.*differentiable log_prob"),
        (dist.Delta, "Delta has no Fisher information.*numpyro.factor"),
        (lambda x: x, "needs a numpyro Distribution, got"),
    ],
)
def test_errors(build: Callable, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        fisher_root(*jax.jvp(build, (2.0,), (1.0,)))


def test_no_data_no_components() -> None:
    assert fisher_root(*jax.jvp(dist.Unit, (jnp.ones(3),), (jnp.ones(3),))).shape == (3, 0)
    observed = jax.jvp(lambda x: dist.Delta(np.array([1, 2]), x), (1.0,), (1.0,))
    assert fisher_root(*observed).shape == (2, 0)


def test_vmap_jit_and_grad_agree_with_a_loop() -> None:
    def build(x: Any) -> Any:
        return dist.MultivariateNormal(x, scale_tril=tril(jnp.outer(x, x)))

    @jax.jit
    def root(x: jax.Array, v: jax.Array) -> jax.Array:
        return fisher_root(*jax.jvp(build, (x,), (v,)))

    x, v = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 3)), jnp.float32)
    together = jax.vmap(root)(x, v)
    alone = jnp.stack([root(a, b) for a, b in zip(x, v, strict=True)])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
    # linear in the tangent: transposes, and is its own derivative
    (back,) = jax.linear_transpose(lambda v: root(x[0], v), v[0])(alone[0])
    np.testing.assert_allclose(jnp.vdot(back, v[0]), jnp.sum(alone[0] ** 2), rtol=1e-4)
