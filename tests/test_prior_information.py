"""Information of priors in their unconstrained values, against Monte Carlo of scores.

As in `test_information`: 70,000 draws for each of three tangents, and 5 standard errors of the mean
of squared scores. NumPyro's own bijection of the support is used everywhere, so a change of it
fails here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import biject_to, constraints
from tiers import short

from numpyro_geom.laplace.information.prior import NUM_DRAWS, prior_root

NUM_SCORES = 70_000
SCALES = np.array([0.4, 1.0, 2.5], np.float32)
SHAPES = np.array([0.8, 2.0, 5.0], np.float32)
TRIL = np.array([[1.0, 0, 0], [0.5, 2.0, 0], [-1.0, 0.3, 0.6]], np.float32)

# the number of components is the size of an event of u
CLOSED = {
    "normal": dist.Normal(1.0, SCALES),
    "lognormal": dist.LogNormal(1.0, SCALES),
    "student": dist.StudentT(SHAPES, 0.5, SCALES),
    "cauchy": dist.Cauchy(0.0, SCALES),
    "laplace": dist.Laplace(0.0, SCALES),
    "logistic": dist.Logistic(0.0, SCALES),
    "gamma": dist.Gamma(SHAPES, SCALES),
    "chi2": dist.Chi2(SHAPES),
    "exponential": dist.Exponential(SCALES),
    "inverse_gamma": dist.InverseGamma(SHAPES, SCALES),
    "half_normal": dist.HalfNormal(SCALES),
    "half_cauchy": dist.HalfCauchy(SCALES),
    "beta": dist.Beta(SHAPES, SCALES),
    "uniform": dist.Uniform(-1.0, SCALES),
    "dirichlet": dist.Dirichlet(np.stack([SHAPES, SCALES, SHAPES], -1)),
    "mvn": dist.MultivariateNormal(np.zeros((3, 3), np.float32), scale_tril=TRIL),
    "walk": dist.GaussianRandomWalk(SCALES, 4),
    "independent": dist.Gamma(SHAPES, SCALES[:, None]).to_event(1),
    "expanded": dist.Exponential(2.0).expand([3]),
    "affine": dist.TransformedDistribution(
        dist.Normal(0.5, 2.0), [dist.transforms.AffineTransform(1.0, SCALES)] * 2
    ),
    "masked": dist.Normal(0.0, SCALES).mask(np.array([True, False, True])),
}
DRAWN = {
    "pareto": dist.Pareto(SCALES, SHAPES),
    "kumaraswamy": dist.Kumaraswamy(SHAPES, SCALES),
    "truncated": dist.TruncatedNormal(0.0, SCALES, low=-0.5),
    "von_mises": dist.VonMises(0.0, SHAPES),
    "folded": dist.FoldedDistribution(dist.Normal(0.5, SCALES)),
}
# to compile: 4 to 14 s each
COSTLY = {"dirichlet", "independent", "chi2", "inverse_gamma", "von_mises"}


def squared_scores(d: Any, tangent: Any, num: int) -> jax.Array:
    """Of log p(u) along a tangent of u, shape (num, batch)."""
    bijection = biject_to(d.support)
    u = bijection.inv(d.sample(random.key(3), (num,)))

    def log_density(u: Any) -> Any:
        y = bijection(u)
        log_prob, jacobian = d.log_prob(y), bijection.log_abs_det_jacobian(u, y)
        if isinstance(d, dist.MaskedDistribution):
            jacobian = jnp.where(d._mask, jacobian, 0.0)
        return log_prob + jacobian.reshape(*log_prob.shape, -1).sum(-1)

    score = jax.jvp(log_density, (u,), (jnp.broadcast_to(tangent, u.shape),))[1]
    return jnp.square(score)


def tangent_of(d: Any) -> Any:
    shape = biject_to(d.support).inverse_shape(d.shape())
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.result_type(float))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", short(CLOSED, kept=CLOSED.keys() - COSTLY))
def test_closed_form_against_scores(name: str) -> None:
    d = CLOSED[name]
    tangent = tangent_of(d)
    w = jax.jit(lambda t: prior_root(d, t))(tangent)
    assert w.shape == (3, tangent[0].size)
    square = jax.jit(lambda t: squared_scores(d, t, NUM_SCORES))(tangent)
    mean, error = np.mean(square, 0), np.std(square, 0) / np.sqrt(NUM_SCORES)
    # the score of Laplace is constant up to its sign, and parameters are rounded to float32
    assert np.all(np.abs(np.sum(np.square(w), -1) - mean) <= 5 * error + 1e-6 * mean)


@pytest.mark.parametrize("name", short(DRAWN, kept=DRAWN.keys() - COSTLY))
def test_draws_against_more_draws(name: str) -> None:
    # The mean of 256 squares against that of 70,000; the standard error of the former is that of
    # the latter times sqrt(70,000 / 256), and 5 of them are allowed.
    d = DRAWN[name]
    tangent = tangent_of(d)
    w = jax.jit(lambda t: prior_root(d, t))(tangent)
    assert w.shape == (3, 1)
    assert w.dtype == jnp.float32
    square = jax.jit(lambda t: squared_scores(d, t, NUM_SCORES))(tangent)
    mean, error = np.mean(square, 0), np.std(square, 0) / np.sqrt(NUM_DRAWS)
    assert np.all(np.abs(np.sum(np.square(w), -1) - mean) <= 5 * error)


def test_draws_in_an_event() -> None:
    d = dist.MatrixNormal(jnp.zeros((3, 2)), TRIL, TRIL[:2, :2])
    tangent = jnp.arange(1.0, 7).reshape(3, 2)
    w = jax.jit(lambda t: prior_root(d, t))(tangent)
    assert w.shape == (6,)
    rows, columns = (np.diag(np.linalg.inv(x @ x.T)) for x in (TRIL, TRIL[:2, :2]))
    expected = np.outer(rows, columns).ravel()
    # the diagonal; the standard error of the mean of 256 squared normal variables, 5 of them
    error = 5 * np.sqrt(2 / NUM_DRAWS)
    np.testing.assert_allclose(np.square(w / tangent.ravel()), expected, rtol=error)


@pytest.mark.parametrize(
    "build",
    [
        lambda s: dist.Normal(0.0, s),
        lambda s: dist.StudentT(s, 0.0, s),
        lambda s: dist.Beta(s, s),
        lambda s: dist.MultivariateNormal(jnp.zeros(3), scale_tril=s * TRIL),
        lambda s: dist.Kumaraswamy(s, s),
        lambda s: dist.TruncatedNormal(0.0, s, low=-0.5),
    ],
)
def test_float32_with_two_derivatives(build: Any) -> None:
    def total(s: jax.Array) -> jax.Array:
        d = build(s)
        shape = biject_to(d.support).inverse_shape(d.shape())
        return jnp.sum(jnp.square(prior_root(d, jnp.ones(shape, jnp.float32))))

    @jax.jit
    def all_three(s: jax.Array) -> tuple:
        return total(s), *jax.jvp(jax.grad(total), (s,), (jnp.ones_like(s),))

    value, slope, curvature = all_three(jnp.float32(1.7))
    assert value.dtype == jnp.float32
    assert np.all(np.isfinite([value, slope, curvature]))
    step = 0.02
    low, high = all_three(jnp.float32(1.7 - step))[0], all_three(jnp.float32(1.7 + step))[0]
    # the error of the difference quotient is of order step^2, rounding 1e-7 / step
    np.testing.assert_allclose((high - low) / (2 * step), slope, rtol=5e-3, atol=1e-4 * value)


def test_tangents_with_a_larger_batch() -> None:
    t = jnp.ones((5, 3))
    assert prior_root(dist.Exponential(SCALES).expand([5, 3]), t).shape == (5, 3, 1)
    assert prior_root(
        dist.MultivariateNormal(jnp.zeros(3), scale_tril=TRIL).expand([5]), t
    ).shape == (
        5,
        3,
    )
    assert prior_root(dist.Pareto(1.0, SCALES).expand([5, 3]).to_event(1), t).shape == (5, 3)


def test_flat_priors_have_no_component() -> None:
    d = dist.ImproperUniform(constraints.real, (3,), (2,))
    assert prior_root(d, jnp.ones((3, 2))).shape == (3, 0)


def test_registration_and_errors() -> None:
    class Mine(dist.Distribution):
        support = constraints.positive

        def __init__(self) -> None:
            super().__init__(())

    with pytest.raises(TypeError, match=r"no prior information for Mine.*@prior_root.register"):
        prior_root(Mine(), jnp.ones(()))
    prior_root.register(Mine)(lambda d, tangent: 3 * tangent[..., None])
    np.testing.assert_allclose(prior_root(Mine().expand([2]).to_event(1), jnp.ones(2)), [3.0, 3.0])
    with pytest.raises(TypeError, match="continuous site, got the discrete Poisson"):
        prior_root(dist.Poisson(1.0), jnp.ones(()))
    with pytest.raises(TypeError, match="needs a numpyro Distribution, got float"):
        prior_root(1.0, jnp.ones(()))
