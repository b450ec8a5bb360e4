"""Fisher information of NumPyro distributions, as a root that is applied to tangents.

So J' F J of a model is a sum of squares of forward-mode derivatives, and no matrix is built. Closed
forms are in `closed_forms`. This module has the fallbacks, the distributions that wrap or combine
others, and helper functions for all roots.

Accuracy: closed forms are accurate in the precision of the parameters, even where a naive formula
cancels (large concentrations, nearly Poisson counts) or probabilities underflow (w is 0 there).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax, random
from jax.scipy.linalg import solve_triangular
from numpyro.distributions.transforms import AbsTransform, AffineTransform

NUM_SCORES = 64
"""Draws of the Monte Carlo fallback of `fisher_root`; each draw is one component. The relative
error of one entry's information is about sqrt(2 / NUM_SCORES), and averages out over entries."""


@singledispatch
def fisher_root(d: Any, tangent: Any) -> jax.Array:
    """A root of the Fisher information of a distribution, applied to a tangent.

    With w the result, ``sum(w**2, -1)`` is tangent' F tangent per batch entry, F = E[score score'].
    w is linear in the tangent: F = R' R and w = R tangent. The score is d log p(y; eta) / d eta.

    The method depends on the type of ``d``, or else on its base classes:

    - a closed form, with few components: 1 for Bernoulli or Poisson, 2 for
      Normal or Gamma, K for K categories, D + D (D + 1) / 2 for MultivariateNormal.
    - Independent, ExpandedDistribution and MaskedDistribution are unwrapped.
      TransformedDistribution is unwrapped too if the transforms have no parameters (the
      information is invariant), or if it shifts and scales a Normal or the like.
    - ``Unit`` (`numpyro.factor`) and ImproperUniform have no component, because they hold no data.
    - any other with ``enumerate_support``: sqrt(p(y)) times the score at each y, exact.
    - any other: scores at `NUM_SCORES` draws with a fixed key, over sqrt(NUM_SCORES). If NumPyro
      reparametrises the draws, they move with the parameters, and w is smooth. Other draws are
      treated as constants, and w jumps where they jump. Gamma draws have no second derivative by
      reverse over reverse mode (JAX uses a loop); forward over reverse mode works.

    Uniform and Pareto: the parameters move the ends of the support. The result is E[score score'],
    which is not the information in the usual sense.

    Args:
        d: the distribution; under `jax.vmap` it must be built inside the mapped function.
        tangent: of the same structure, as `jax.jvp` of a function that builds ``d`` returns it. A
            leaf that is None or of type float0 marks a constant parameter. Its components are left
            out (1 instead of 2 for Normal with a known scale).

    Returns:
        w of shape ``d.batch_shape + (k,)``.

    Raises:
        TypeError: if there is neither a closed form nor a sampler with a differentiable
            ``log_prob``, and for Delta.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_geom.laplace.information import fisher_root
        >>> d, tangent = jax.jvp(lambda scale: dist.Normal(0.0, scale), (2.0,), (1.0,))
        >>> jnp.sum(fisher_root(d, tangent) ** 2)  # 2 / scale^2
        Array(0.5, dtype=float32)

        One's own distribution, with parameters as NumPyro keeps them:

        >>> class Rayleigh(dist.Distribution):
        ...     arg_constraints = {"scale": dist.constraints.positive}
        ...     support = dist.constraints.positive
        ...
        ...     def __init__(self, scale):
        ...         self.scale = jnp.asarray(scale)
        ...         super().__init__(self.scale.shape)
        >>> @fisher_root.register(Rayleigh)
        ... def _(d, tangent):
        ...     return (2 * tangent.scale / d.scale)[..., None]
        >>> float(fisher_root(*jax.jvp(Rayleigh, (4.0,), (1.0,)))[0])
        0.5
    """
    if not isinstance(d, dist.Distribution):
        raise TypeError(f"fisher_root needs a numpyro Distribution, got {type(d).__name__}")
    if all(is_constant(t) for t in leaves(tangent)):
        return stack([], d.batch_shape)
    try:
        return _by_enumeration(d, tangent) if d.has_enumerate_support else _by_draws(d, tangent)
    except (NotImplementedError, TypeError, ValueError) as error:
        name = type(d).__name__
        raise TypeError(
            f"no Fisher information for {name}: expected a closed form, a finite support, or a "
            f"sampler and a differentiable log_prob, got {type(error).__name__}: {error}. Register "
            f"a root with @fisher_root.register({name})"
        ) from error


_general = fisher_root.dispatch(object)


@fisher_root.register
def _(d: dist.Independent, tangent: Any) -> jax.Array:
    w = fisher_root(d.base_dist, tangent.base_dist)
    return merge_events(w, d.reinterpreted_batch_ndims)


@fisher_root.register
def _(d: dist.ExpandedDistribution, tangent: Any) -> jax.Array:
    w = fisher_root(d.base_dist, tangent.base_dist)
    return spread(w, d.batch_shape)


@fisher_root.register
def _(d: dist.MaskedDistribution, tangent: Any) -> jax.Array:
    return masked(d, fisher_root(d.base_dist, tangent.base_dist))


@fisher_root.register
def _(d: dist.TransformedDistribution, tangent: Any) -> jax.Array:
    """Bijections without parameters change nothing; one shift and scale moves into the base."""
    bijective = not any(isinstance(t, AbsTransform) for t in d.transforms)
    if bijective and all(is_constant(t) for dt in tangent.transforms for t in leaves(dt)):
        return fisher_root(d.base_dist, tangent.base_dist)
    base, dbase = core(d.base_dist), copy.copy(core(tangent.base_dist))
    t, dt = d.transforms[0], tangent.transforms[0]
    affine = len(d.transforms) == 1 and isinstance(t, AffineTransform)
    if not (affine and isinstance(base, LOCATION_SCALE)):
        return _general(d, tangent)
    dbase.loc = _sum((1.0, dt.loc), (base.loc, dt.scale), (t.scale, dbase.loc))
    dbase.scale = _sum((base.scale, dt.scale), (t.scale, dbase.scale))
    parameters = {name: getattr(base, name) for name in base.arg_constraints}
    parameters |= {"loc": t.loc + t.scale * base.loc, "scale": t.scale * base.scale}
    w = fisher_root(type(base)(**parameters, validate_args=False), dbase)  # for both signs
    return merge_events(spread(w, d.base_dist.shape()), d.base_dist.event_dim)


def _sum(*terms: tuple[Any, Any]) -> Any:
    moving = [c * t for c, t in terms if not is_constant(t)]
    return sum(moving) if moving else None


@fisher_root.register(dist.Unit)
@fisher_root.register(dist.ImproperUniform)
def _(d: Any, tangent: Any) -> jax.Array:
    return stack([], d.batch_shape)


@fisher_root.register
def _(d: dist.Delta, tangent: Any) -> jax.Array:
    if is_constant(tangent.v):
        return stack([], d.batch_shape)
    raise TypeError(
        "Delta has no Fisher information (its log_prob has no derivative): use numpyro.factor for "
        "a term of the log density, or a Normal with a small scale for a soft constraint"
    )


def core(d: Any) -> Any:
    """The distribution inside Independent and ExpandedDistribution; also for a tangent."""
    while isinstance(d, (dist.Independent, dist.ExpandedDistribution)):
        d = d.base_dist
    return d


LOCATION_SCALE = (dist.Normal, dist.Cauchy, dist.Laplace, dist.Logistic, dist.StudentT)


# --- fallbacks


def _by_enumeration(d: Any, tangent: Any) -> jax.Array:
    try:
        support = d.enumerate_support(expand=True)
    except (NotImplementedError, jax.errors.JAXTypeError):
        # unequal supports in one batch, or a size that depends on a traced value
        return _by_draws(d, tangent)
    log_prob, score = _scores(d, tangent, support)
    root = jnp.exp(jnp.moveaxis(log_prob, 0, -1) / 2)
    return root * jnp.moveaxis(score, 0, -1)


def _by_draws(d: Any, tangent: Any) -> jax.Array:
    draws = d.sample(random.key(0), (NUM_SCORES,))
    if not is_reparametrised(d):
        draws = lax.stop_gradient(draws)
    _, score = _scores(d, tangent, draws)
    return jnp.moveaxis(score, 0, -1) / math.sqrt(NUM_SCORES)


def _scores(d: Any, tangent: Any, values: Any) -> tuple[jax.Array, jax.Array]:
    """Log p(y) and its derivative along the tangent for fixed y; the first axis is y's."""
    values_of, treedef = jax.tree.flatten(d, is_leaf=lambda x: x is None)
    dots = leaves(tangent)
    moving = [i for i, t in enumerate(dots) if not is_constant(t)]

    def log_prob(floats: list) -> jax.Array:
        new = list(values_of)
        for i, x in zip(moving, floats, strict=True):
            new[i] = x
        return jnp.asarray(jax.tree.unflatten(treedef, new).log_prob(values))

    primals = [as_float(values_of[i]) for i in moving]
    return jax.jvp(log_prob, (primals,), ([jnp.asarray(dots[i]) for i in moving],))


def is_reparametrised(d: Any) -> bool:
    """Whether draws are differentiable functions of the parameters, with the right distribution."""
    # NumPyro marks distributions without own parameters as reparametrised, also mixtures
    if isinstance(d, dist.TransformedDistribution):
        return is_reparametrised(core(d.base_dist))
    return bool(d.arg_constraints) and d.has_rsample


# --- helpers for the roots of all distributions


def is_constant(tangent: Any) -> bool:
    """Whether a tangent marks its parameter as constant: None, or of type float0."""
    return tangent is None or getattr(tangent, "dtype", None) == jax.dtypes.float0


def leaves(tree: Any) -> list:
    """Leaves of a tree, including None."""
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def as_float(x: Any) -> jax.Array:
    """An array of a floating-point type; integers become the default one."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))


def stack(parts: Sequence[jax.Array], batch_shape: tuple[int, ...]) -> jax.Array:
    """Components, each broadcast to the batch, along a new last axis."""
    if not parts:
        return jnp.zeros((*batch_shape, 0))
    return jnp.stack([jnp.broadcast_to(p, batch_shape) for p in parts], -1)


def spread(w: jax.Array, batch_shape: tuple[int, ...]) -> jax.Array:
    """Components along the last axis, broadcast to the batch."""
    return jnp.broadcast_to(w, (*batch_shape, w.shape[-1]))


def merge_events(w: jax.Array, num_dims: int) -> jax.Array:
    """Make the last ``num_dims`` batch dimensions part of the components."""
    return w.reshape(*w.shape[: w.ndim - 1 - num_dims], -1) if num_dims else w


def masked(d: Any, w: jax.Array) -> jax.Array:
    """Set entries to zero where the mask of ``d``, a MaskedDistribution, is False."""
    mask = d._mask  # NumPyro has no public access
    return w if mask is True else jnp.where(jnp.asarray(mask)[..., None], w, 0.0)


def smallest(p: jax.Array) -> float:
    """Threshold of a probability or rate for 0: below it, second derivatives would overflow."""
    return float(jnp.finfo(p.dtype).tiny) ** 0.4


def inverse_sqrt(p: jax.Array) -> jax.Array:
    """p^(-1/2), and 0 where p is so small that the second derivative would overflow.

    If a probability or rate is a smooth function of a parameter and goes to 0, then its information
    on the parameter goes to 0 too.
    """
    floor = smallest(p)
    return jnp.where(p > floor, lax.rsqrt(jnp.maximum(p, floor)), 0.0)


def sqrt_count(n: Any) -> jax.Array:
    """Square root of a number of trials; it is no parameter."""
    return lax.stop_gradient(jnp.sqrt(as_float(n)))


def solve_lower(factor: jax.Array, x: jax.Array) -> jax.Array:
    """L^-1 x for vectors x; the batches of both broadcast."""
    if factor.ndim == 2:
        flat = x.reshape(-1, x.shape[-1])
        return solve_triangular(factor, flat.T, lower=True).T.reshape(x.shape)
    batch = np.broadcast_shapes(factor.shape[:-2], x.shape[:-1])
    factor = jnp.broadcast_to(factor, (*batch, *factor.shape[-2:]))
    return solve_triangular(factor, spread(x, batch)[..., None], lower=True)[..., 0]
