"""Expected information of a prior on its unconstrained value, as a root applied to tangents.

For a latent site with the prior d and the bijection T = biject_to(d.support) of NumPyro, u is the
unconstrained value, T(u) the constrained one, and

    I = E[-d^2 log p(u) / du^2],    log p(u) = log d(T(u)) + log |det dT / du|,  u ~ p,

which depends on the parameters of d and not on u. It is positive definite where the Hessian itself
need not be. `value_root` gives w with sum_k w_k^2 = u' I u' for a tangent u'.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from numpyro.distributions import constraints
from numpyro.distributions.transforms import (
    AffineTransform,
    ExpTransform,
    IdentityTransform,
    IndependentTransform,
    ParameterFreeTransform,
    biject_to,
)
from numpyro.distributions.util import sum_rightmost

from .information import as_float, core, is_reparametrised, masked, merge_events, solve_lower, stack

NUM_DRAWS = 256
"""Draws of the Monte Carlo fallback. They cost time, and no components."""


@singledispatch
def value_root(d: Any, tangent: Any) -> jax.Array:
    """A root of the expected information of a prior in its unconstrained value.

    With w the result, ``sum(w**2, -1)`` is tangent' I tangent per batch entry, and w is linear in
    the tangent. By type of ``d``:

    - a family that a shift of u moves along its location or log scale (Normal, StudentT, Cauchy,
      Laplace, Logistic, Gumbel; LogNormal, Gamma, InverseGamma, Exponential, Weibull, HalfNormal,
      HalfCauchy in u = log y): its information on that parameter.
    - Beta a b / (a + b + 1), Uniform 1 / 3, Dirichlet that of its independent stick-breaking Betas.
    - MultivariateNormal: its precision, with LowRankMultivariateNormal, MultivariateStudentT and
      GaussianRandomWalk.
    - Independent, ExpandedDistribution, MaskedDistribution; TransformedDistribution of shifts and
      scales, with NumPyro's own bijection as the last transform or none.
    - ImproperUniform: no component.
    - any other: the diagonal of E[score score'] from `NUM_DRAWS` draws with a fixed key, drawn as
      in `numpyro_geom.information.fisher_root`. Correlations within an event are left out.

    Laplace has the information E[score^2], which counts the kink of its density.

    Args:
        d: the prior of a continuous site.
        tangent: of the unconstrained value, shape ``batch + event`` of u; its batch may be larger
            than that of ``d``.

    Returns:
        w of shape ``batch + (k,)``; k is the number of entries of u in one event.

    Raises:
        TypeError: for discrete sites, and where the prior cannot be sampled or differentiated.

    Examples:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_geom.value_information import value_root
        >>> value_root(dist.Normal(0.0, 2.0), jnp.ones(()))
        Array([0.5], dtype=float32)
        >>> value_root(dist.HalfNormal(3.0).expand([2]).to_event(1), jnp.ones(2))
        Array([1.41421, 1.41421], dtype=float32)
    """
    if not isinstance(d, dist.Distribution):
        raise TypeError(f"value_root needs a numpyro Distribution, got {type(d).__name__}")
    name = type(d).__name__
    if d.support is not None and d.support.is_discrete:
        raise TypeError(f"value_root needs a continuous site, got the discrete {name}")
    try:
        return _by_draws(d, jnp.asarray(tangent))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise TypeError(
            f"no value information for {name}: expected a closed form, or a sampler, a bijection "
            f"of its support and a differentiable log_prob, got {type(error).__name__}: {error}. "
            f"Register a root with @value_root.register({name})"
        ) from error


# --- wrappers


@value_root.register
def _(d: dist.Independent, tangent: Any) -> jax.Array:
    return merge_events(value_root(d.base_dist, tangent), d.reinterpreted_batch_ndims)


@value_root.register
def _(d: dist.ExpandedDistribution, tangent: Any) -> jax.Array:
    return value_root(d.base_dist, tangent)


@value_root.register
def _(d: dist.MaskedDistribution, tangent: Any) -> jax.Array:
    return masked(d, value_root(d.base_dist, tangent))


@value_root.register
def _(d: dist.TransformedDistribution, tangent: Any) -> jax.Array:
    """Undo shifts and scales, where what they act on is the unconstrained value."""
    steps = list(d.transforms)
    bijection = biject_to(d.support)
    while isinstance(bijection, IndependentTransform):
        bijection = bijection.base_transform
    if not isinstance(bijection, IdentityTransform):
        known = isinstance(bijection, (ExpTransform, ParameterFreeTransform))
        if not (known and type(steps[-1]) is type(bijection)):
            return value_root.dispatch(dist.Distribution)(d, tangent)
        steps.pop()
    real = core(d.base_dist).support in (constraints.real, constraints.real_vector)
    if not (real and all(isinstance(t, AffineTransform) for t in steps)):
        return value_root.dispatch(dist.Distribution)(d, tangent)
    for t in steps:
        tangent = tangent / t.scale
    return value_root(d.base_dist, tangent)


@value_root.register(dist.FoldedDistribution)
def _(d: Any, tangent: Any) -> jax.Array:
    return value_root.dispatch(dist.Distribution)(d, tangent)


@value_root.register
def _(d: dist.ImproperUniform, tangent: Any) -> jax.Array:
    return stack([], jnp.shape(tangent)[: jnp.ndim(tangent) - d.event_dim])


# --- closed forms


def _coefficient_of(*types: type) -> Callable[[Callable], Callable]:
    """Register the square root of I as a function of the parameters by name."""

    def register(rule: Callable[..., jax.Array]) -> Callable:
        names = tuple(inspect.signature(rule).parameters)

        def root(d: Any, tangent: Any) -> jax.Array:
            return (rule(*(as_float(getattr(d, name)) for name in names)) * tangent)[..., None]

        for each in types:
            value_root.register(each)(root)
        return rule

    return register


@_coefficient_of(dist.Normal, dist.LogNormal, dist.Laplace, dist.Gumbel)
def _one_over_scale(scale: jax.Array) -> jax.Array:
    return 1 / scale


@_coefficient_of(dist.Cauchy)
def _cauchy(scale: jax.Array) -> jax.Array:
    return math.sqrt(1 / 2) / scale


@_coefficient_of(dist.Logistic)
def _logistic(scale: jax.Array) -> jax.Array:
    return math.sqrt(1 / 3) / scale


@_coefficient_of(dist.StudentT)
def _student_t(df: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.sqrt((df + 1) / (df + 3)) / scale


@_coefficient_of(dist.Gamma, dist.InverseGamma)
def _gamma(concentration: jax.Array) -> jax.Array:
    return jnp.sqrt(concentration)


@_coefficient_of(dist.Weibull)
def _weibull(concentration: jax.Array) -> jax.Array:
    return concentration


@_coefficient_of(dist.Exponential)
def _exponential(rate: jax.Array) -> jax.Array:
    return jnp.ones_like(rate)


@_coefficient_of(dist.HalfNormal)
def _half_normal(scale: jax.Array) -> jax.Array:
    return jnp.full_like(scale, math.sqrt(2))


@_coefficient_of(dist.HalfCauchy)
def _half_cauchy(scale: jax.Array) -> jax.Array:
    return jnp.full_like(scale, math.sqrt(1 / 2))


@_coefficient_of(dist.Uniform)
def _uniform(low: jax.Array) -> jax.Array:
    return jnp.full_like(low, math.sqrt(1 / 3))


@_coefficient_of(dist.Beta)
def _beta(concentration1: jax.Array, concentration0: jax.Array) -> jax.Array:
    a, b = concentration1, concentration0
    return jnp.sqrt(a / (a + b + 1)) * jnp.sqrt(b)


@value_root.register
def _(d: dist.Dirichlet, tangent: Any) -> jax.Array:
    alpha = as_float(d.concentration)
    rest = jnp.flip(jnp.cumsum(jnp.flip(alpha, -1), -1), -1)[..., 1:]
    return _beta(alpha[..., :-1], rest) * tangent


@value_root.register
def _(d: dist.MultivariateNormal, tangent: Any) -> jax.Array:
    return solve_lower(as_float(d.scale_tril), jnp.asarray(tangent))


@value_root.register
def _(d: dist.LowRankMultivariateNormal, tangent: Any) -> jax.Array:
    return solve_lower(jnp.linalg.cholesky(d.covariance_matrix), jnp.asarray(tangent))


@value_root.register
def _(d: dist.MultivariateStudentT, tangent: Any) -> jax.Array:
    df, size = as_float(d.df), d.event_shape[0]
    w = solve_lower(as_float(d.scale_tril), jnp.asarray(tangent))
    return jnp.sqrt((df + size) / (df + size + 2))[..., None] * w


@value_root.register
def _(d: dist.GaussianRandomWalk, tangent: Any) -> jax.Array:
    steps = jnp.diff(jnp.asarray(tangent), axis=-1, prepend=0.0)
    return steps / as_float(d.scale)[..., None]


# --- fallback


def _by_draws(d: Any, tangent: jax.Array) -> jax.Array:
    bijection = biject_to(d.support)
    draws = d.sample(random.key(0), (NUM_DRAWS,))
    u = bijection.inv(draws if is_reparametrised(d) else lax.stop_gradient(draws))

    def log_density(u: jax.Array) -> jax.Array:
        y = bijection(u)
        log_prob = d.log_prob(y)
        jacobian = bijection.log_abs_det_jacobian(u, y)
        return jnp.sum(log_prob + sum_rightmost(jacobian, jacobian.ndim - jnp.ndim(log_prob)))

    square = jnp.mean(jnp.square(jax.grad(log_density)(u)), axis=0)
    w = jnp.sqrt(jnp.maximum(square, jnp.finfo(square.dtype).tiny)) * tangent
    num_events = square.ndim - len(d.batch_shape)
    return w.reshape(*w.shape[: w.ndim - num_events], -1)
