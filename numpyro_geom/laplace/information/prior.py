"""Expected information of a prior in its unconstrained value, as a root applied to tangents.

For a latent site with the prior d and the bijection T = biject_to(d.support) of NumPyro, u is the
unconstrained value and T(u) is the constrained value. The expected information is

    I = E[-d^2 log p(u) / du^2],    log p(u) = log d(T(u)) + log |det dT / du|,  u ~ p.

It depends on the parameters of d and not on u. It is positive definite, even if the Hessian itself
is not. `prior_root` gives w with sum_k w_k^2 = u' I u' for a tangent u'.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from numpyro.distributions.transforms import AffineTransform, biject_to
from numpyro.distributions.util import sum_rightmost

from .root import (
    LOCATION_SCALE,
    as_float,
    core,
    is_constant,
    is_reparametrised,
    masked,
    merge_events,
    solve_lower,
    stack,
)

NUM_DRAWS = 256
"""Draws of the Monte Carlo fallback. They cost time, but add no components."""


@singledispatch
def prior_root(d: Any, tangent: Any) -> jax.Array:
    """A root of the expected information of a prior in its unconstrained value.

    With w the result, ``sum(w**2, -1)`` is tangent' I tangent per batch entry, and w is linear in
    the tangent. By type of ``d``:

    - a family in which a shift of u changes its location or log scale (Normal, StudentT, Cauchy,
      Laplace, Logistic; and LogNormal, Gamma, InverseGamma, Exponential, HalfNormal, HalfCauchy in
      u = log y): its information on that parameter.
    - Beta: a b / (a + b + 1); Uniform: 1 / 3; Dirichlet: its independent stick-breaking Betas.
    - MultivariateNormal and GaussianRandomWalk: their precision.
    - Independent, ExpandedDistribution, MaskedDistribution and an affine Normal are unwrapped.
    - ImproperUniform: no component.
    - any other: the diagonal of E[score score'] from `NUM_DRAWS` draws with a fixed key, drawn as
      in `numpyro_geom.laplace.information.fisher_root`. Correlations within an event are left out.

    The information of Laplace is E[score^2], which includes the kink of its density.

    Args:
        d: the prior of a continuous site.
        tangent: tangent of the unconstrained value, with the shape ``batch + event`` of u. Its
            batch may be larger than the batch of ``d``.

    Returns:
        w of shape ``batch + (k,)``; k is the number of entries of u in one event.

    Raises:
        TypeError: for discrete sites, and if the prior cannot be sampled or differentiated.

    Examples:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_geom.laplace.information import prior_root
        >>> prior_root(dist.Normal(0.0, 2.0), jnp.ones(()))
        Array([0.5], dtype=float32)
        >>> prior_root(dist.HalfNormal(3.0).expand([2]).to_event(1), jnp.ones(2))
        Array([1.41421, 1.41421], dtype=float32)
    """
    name = type(d).__name__
    if not isinstance(d, dist.Distribution):
        raise TypeError(f"prior_root needs a numpyro Distribution, got {name}")
    if d.support is not None and d.support.is_discrete:
        raise TypeError(f"prior_root needs a continuous site, got the discrete {name}")
    try:
        return _by_draws(d, jnp.asarray(tangent))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise TypeError(
            f"no prior information for {name}: expected a closed form, or a sampler, a bijection "
            f"of its support and a differentiable log_prob, got {type(error).__name__}: {error}. "
            f"Register a root with @prior_root.register({name}), or use prior_metric='hessian'"
        ) from error


_general = prior_root.dispatch(object)


@prior_root.register
def _(d: dist.Independent, tangent: Any) -> jax.Array:
    return merge_events(prior_root(d.base_dist, tangent), d.reinterpreted_batch_ndims)


@prior_root.register
def _(d: dist.ExpandedDistribution, tangent: Any) -> jax.Array:
    return prior_root(d.base_dist, tangent)


@prior_root.register
def _(d: dist.MaskedDistribution, tangent: Any) -> jax.Array:
    return masked(d, prior_root(d.base_dist, tangent))


@prior_root.register
def _(d: dist.TransformedDistribution, tangent: Any) -> jax.Array:
    affine = all(isinstance(t, AffineTransform) for t in d.transforms)
    if not (affine and isinstance(core(d.base_dist), LOCATION_SCALE)):
        return _general(d, tangent)
    return prior_root(d.base_dist, tangent / math.prod(t.scale for t in d.transforms))


@prior_root.register
def _(d: dist.ImproperUniform, tangent: Any) -> jax.Array:
    return stack([], jnp.shape(tangent)[: jnp.ndim(tangent) - d.event_dim])


def relative_to_location(d: Any, of_fn: Any, of_value: jax.Array) -> tuple[Any, jax.Array]:
    """Tangents of a prior and of its value, with the location's tangent moved to the value.

    The density of a location family depends on the difference of value and location. So the result
    gives the expected information of both, with their mixed block. Other families are unchanged.
    """
    loc: Any = getattr(core(of_fn), "loc", None)
    if not isinstance(core(d), LOCATION_SCALE) or is_constant(loc):
        return of_fn, of_value

    def without(tangent: Any) -> Any:
        tangent = copy.copy(tangent)
        if hasattr(tangent, "base_dist"):
            tangent.base_dist = without(tangent.base_dist)
        else:
            tangent.loc = None
        return tangent

    return without(of_fn), of_value - loc


# --- closed forms


def _of_beta(concentration1: jax.Array, concentration0: jax.Array) -> jax.Array:
    a, b = concentration1, concentration0
    return jnp.sqrt(a / (a + b + 1)) * jnp.sqrt(b)


def _one_over(scale: jax.Array) -> jax.Array:
    return 1 / scale


ROOTS: dict[Any, Callable[..., jax.Array]] = {
    dist.Normal: _one_over,
    dist.LogNormal: _one_over,
    dist.Laplace: _one_over,
    dist.Cauchy: lambda scale: math.sqrt(1 / 2) / scale,
    dist.Logistic: lambda scale: math.sqrt(1 / 3) / scale,
    dist.StudentT: lambda df, scale: jnp.sqrt((df + 1) / (df + 3)) / scale,
    dist.Gamma: lambda concentration: jnp.sqrt(concentration),
    dist.InverseGamma: lambda concentration: jnp.sqrt(concentration),
    dist.Exponential: lambda rate: jnp.ones_like(rate),
    dist.HalfNormal: lambda scale: jnp.full_like(scale, math.sqrt(2)),
    dist.HalfCauchy: lambda scale: jnp.full_like(scale, math.sqrt(1 / 2)),
    dist.Uniform: lambda low: jnp.full_like(low, math.sqrt(1 / 3)),
    dist.Beta: _of_beta,
}
"""Families with one unconstrained value -> function from named parameters to the root of I."""


def _register(kind: Any, rule: Callable[..., jax.Array]) -> None:
    names = tuple(inspect.signature(rule).parameters)

    def root(d: Any, tangent: Any) -> jax.Array:
        return (rule(*(as_float(getattr(d, name)) for name in names)) * tangent)[..., None]

    prior_root.register(kind)(root)


for _kind, _rule in ROOTS.items():
    _register(_kind, _rule)


@prior_root.register
def _(d: dist.Dirichlet, tangent: Any) -> jax.Array:
    alpha = as_float(d.concentration)
    rest = jnp.flip(jnp.cumsum(jnp.flip(alpha, -1), -1), -1)[..., 1:]
    return _of_beta(alpha[..., :-1], rest) * tangent


@prior_root.register
def _(d: dist.MultivariateNormal, tangent: Any) -> jax.Array:
    return solve_lower(as_float(d.scale_tril), jnp.asarray(tangent))


@prior_root.register
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
