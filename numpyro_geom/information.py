"""Fisher information of NumPyro distributions, as a root that is applied to tangents.

`fisher_root` maps a distribution d and a tangent of its parameters eta to an array w, linear in the
tangent, with

    sum_k w_k^2 = eta' F(eta) eta',    F = E[score score'],  score = d log p(y; eta) / d eta,

per batch entry. So J' F J of a model is a sum of squares of what forward mode returns, and no
matrix is built. `value_root` does the same for a prior and its unconstrained value.

Accuracy: closed forms hold in the arithmetic of the parameters, also where a naive formula cancels
(large concentrations, nearly Poisson counts) and where probabilities underflow (w is 0 there).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax, random
from jax.nn import log_softmax, softplus
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import i0e, i1e
from numpyro.distributions.conjugate import NegativeBinomialLogits, NegativeBinomialProbs
from numpyro.distributions.transforms import AbsTransform, AffineTransform

from ._special import bessel_ratio_slope, dispersion_root, student_t_tail, trigamma_excess

PyTree = Any
Row = dict[str, jax.Array]

NUM_SCORES = 64
"""Draws of the Monte Carlo fallback of `fisher_root`: one component each. The error of one entry's
information is about sqrt(2 / NUM_SCORES) of it, and averages out over entries."""


@singledispatch
def fisher_root(d: Any, tangent: Any) -> jax.Array:
    """A root of the Fisher information of a distribution, applied to a tangent.

    With w the result, ``sum(w**2, -1)`` is tangent' F tangent, F = E[score score'], per batch
    entry, and w is linear in the tangent: F = R' R and w = R tangent.

    By type of ``d``, along its bases:

    - a closed form, with as few components as F has rank: 1 for Bernoulli or Poisson, 2 for Normal
      or Gamma, K - 1 for K categories, D + D (D + 1) / 2 for MultivariateNormal.
    - Independent, ExpandedDistribution and MaskedDistribution are unwrapped.
      TransformedDistribution too where no parameter is in the transforms (information is
      invariant), or where they shift and scale a location-scale family.
    - ``Unit`` (`numpyro.factor`) and ImproperUniform have no component: they hold no data.
    - any other with ``enumerate_support``: sqrt(p(y)) times the score at each y, exact.
    - any other: scores at `NUM_SCORES` draws with a fixed key, over sqrt(NUM_SCORES). Where NumPyro
      reparametrises the draws they move with the parameters, so that w is smooth; other draws are
      taken as constants, and w jumps where they do. Gamma draws have no second derivative by
      reverse over reverse mode (a loop inside of JAX); forward over reverse mode has it.

    Uniform and Pareto move the ends of their support: what is returned is E[score score'], which
    is not the information in the usual sense. NegativeBinomial: the mean part is exact, the part of
    the dispersion is a quadrature of 48 nodes.

    Args:
        d: the distribution; under `jax.vmap` it must be built inside the mapped function.
        tangent: of the same structure, as `jax.jvp` of a function that builds ``d`` returns it. A
            leaf that is None or of type float0 is a parameter that is known to be constant: its
            components are left out (1 in place of 2 for Normal with a known scale).

    Returns:
        w of shape ``d.batch_shape + (k,)``.

    Raises:
        TypeError: where there is neither a closed form nor a sampler with a differentiable
            ``log_prob``, and for Delta.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_geom.information import fisher_root
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
    if all(_still(t) for t in _leaves(tangent)):
        return stack([], d.batch_shape)
    try:
        return _by_enumeration(d, tangent) if d.has_enumerate_support else _by_draws(d, tangent)
    except (NotImplementedError, TypeError, ValueError) as error:
        name = type(d).__name__
        raise TypeError(
            f"no Fisher information for {name}: expected a closed form, a finite support, or a "
            f"sampler and a differentiable log_prob, got {type(error).__name__}: {error}. Register "
            f"a root with @fisher_root.register({name}), see numpyro_geom.information.fisher_root"
        ) from error


# --- wrappers


@fisher_root.register
def _(d: dist.Independent, tangent: Any) -> jax.Array:
    w = fisher_root(d.base_dist, tangent.base_dist)
    return merge_events(w, d.reinterpreted_batch_ndims)


@fisher_root.register
def _(d: dist.ExpandedDistribution, tangent: Any) -> jax.Array:
    w = fisher_root(d.base_dist, tangent.base_dist)
    return jnp.broadcast_to(w, (*d.batch_shape, w.shape[-1]))


@fisher_root.register
def _(d: dist.MaskedDistribution, tangent: Any) -> jax.Array:
    return masked(d, fisher_root(d.base_dist, tangent.base_dist))


@fisher_root.register
def _(d: dist.TransformedDistribution, tangent: Any) -> jax.Array:
    """Move shifts and scales into the base, and drop what is left if it has no parameter."""
    base, dbase = core(d.base_dist), core(tangent.base_dist)
    steps = list(zip(d.transforms, tangent.transforms, strict=True))
    bijective = not any(isinstance(t, AbsTransform) for t in d.transforms)
    if bijective and all(_still(t) for _, dt in steps for t in _leaves(dt)):
        return fisher_root(d.base_dist, tangent.base_dist)
    while steps and isinstance(base, LOCATION_SCALE) and isinstance(steps[0][0], AffineTransform):
        base, dbase = _affine(base, dbase, *steps.pop(0))
    if not bijective or any(not _still(t) for _, dt in steps for t in _leaves(dt)):
        return fisher_root.dispatch(dist.Distribution)(d, tangent)
    base._batch_shape = d.base_dist.shape()
    return merge_events(fisher_root(base, dbase), d.base_dist.event_dim)


@fisher_root.register(dist.FoldedDistribution)
def _(d: Any, tangent: Any) -> jax.Array:
    return fisher_root.dispatch(dist.Distribution)(d, tangent)


@fisher_root.register(dist.Unit)
@fisher_root.register(dist.ImproperUniform)
def _(d: Any, tangent: Any) -> jax.Array:
    return stack([], d.batch_shape)


@fisher_root.register
def _(d: dist.Delta, tangent: Any) -> jax.Array:
    if _still(tangent.v):
        return stack([], d.batch_shape)
    raise TypeError(
        "Delta has no Fisher information (its log_prob has no derivative): use numpyro.factor for "
        "a term of the log density, or a Normal with a small scale for a soft constraint"
    )


def core(d: Any) -> Any:
    """What is inside of Independent and ExpandedDistribution; of a tangent as well."""
    while isinstance(d, (dist.Independent, dist.ExpandedDistribution)):
        d = d.base_dist
    return d


def _affine(d: Any, dd: Any, t: Any, dt: Any) -> tuple[Any, Any]:
    """A location-scale distribution and its tangent after y = t.loc + t.scale x.

    The scale keeps the sign of ``t.scale``: the roots below hold for both signs.
    """
    new, dnew = copy.copy(d), copy.copy(dd)
    new.loc, new.scale = t.loc + t.scale * d.loc, t.scale * d.scale
    dnew.loc = _linear((1.0, dt.loc), (d.loc, dt.scale), (t.scale, dd.loc))
    dnew.scale = _linear((d.scale, dt.scale), (t.scale, dd.scale))
    return new, dnew


def _linear(*terms: tuple[Any, Any]) -> Any:
    moving = [c * t for c, t in terms if not _still(t)]
    return sum(moving[1:], moving[0]) if moving else None


# --- closed forms: scalar parameters


def rows_of(*types: type) -> Callable[[Callable], Callable]:
    """Register rows of R, which a function of the parameters by name returns.

    A row maps names of parameters to coefficients. Parameters that are known to be constant drop
    out, and what then has one parameter left has one row.
    """

    def register(rule: Callable[..., Sequence[Row]]) -> Callable:
        names = tuple(inspect.signature(rule).parameters)

        def root(d: Any, tangent: Any) -> jax.Array:
            rows = rule(*(as_float(getattr(d, name)) for name in names))
            dots = {n: getattr(tangent, n) for row in rows for n in row}
            dots = {n: t for n, t in dots.items() if not _still(t)}
            if len(dots) == 1:
                ((name, dot),) = dots.items()
                c = [row[name] for row in rows if name in row]
                norm = c[0] if len(c) == 1 else jnp.sqrt(sum(jnp.square(x) for x in c))
                return stack([norm * dot], d.batch_shape)
            kept = [[(c, dots[n]) for n, c in row.items() if n in dots] for row in rows]
            return stack([sum(c * t for c, t in row) for row in kept if row], d.batch_shape)

        for each in types:
            fisher_root.register(each)(root)
        return rule

    return register


def _location_scale(of_loc: float, of_scale: float) -> Callable[..., Sequence[Row]]:
    def rule(scale: jax.Array) -> Sequence[Row]:
        return {"loc": math.sqrt(of_loc) / scale}, {"scale": math.sqrt(of_scale) / scale}

    return rule


def _scale(of_scale: float) -> Callable[..., Sequence[Row]]:
    def rule(scale: jax.Array) -> Sequence[Row]:
        return ({"scale": math.sqrt(of_scale) / scale},)

    return rule


LOCATION_SCALE = (dist.Normal, dist.Cauchy, dist.Laplace, dist.Logistic, dist.Gumbel, dist.StudentT)
rows_of(dist.Normal)(_location_scale(1.0, 2.0))
rows_of(dist.Cauchy)(_location_scale(0.5, 0.5))
rows_of(dist.Laplace)(_location_scale(1.0, 1.0))
rows_of(dist.Logistic)(_location_scale(1 / 3, (3 + math.pi**2) / 9))
rows_of(dist.HalfNormal)(_scale(2.0))
rows_of(dist.HalfCauchy)(_scale(0.5))


@rows_of(dist.Gumbel)
def _gumbel(scale: jax.Array) -> Sequence[Row]:
    return (
        {"loc": 1 / scale, "scale": (np.euler_gamma - 1) / scale},
        {"scale": math.pi / math.sqrt(6) / scale},
    )


@rows_of(dist.Weibull)
def _weibull(scale: jax.Array, concentration: jax.Array) -> Sequence[Row]:
    # log y is a smallest-value Gumbel with location log(scale) and scale 1 / concentration
    return (
        {"scale": concentration / scale, "concentration": (np.euler_gamma - 1) / concentration},
        {"concentration": math.pi / math.sqrt(6) / concentration},
    )


@rows_of(dist.StudentT)
def _student_t(df: jax.Array, scale: jax.Array) -> Sequence[Row]:
    s = jnp.sqrt(2 * df / (df + 3)) / scale
    return (
        {"loc": jnp.sqrt((df + 1) / (df + 3)) / scale},
        {"scale": s, "df": -jnp.sqrt(2 / (df * (df + 3))) / (df + 1)},
        {"df": jnp.sqrt(student_t_tail(df)) / df},
    )


@rows_of(dist.Exponential)
def _exponential(rate: jax.Array) -> Sequence[Row]:
    return ({"rate": 1 / rate},)


@rows_of(dist.Gamma, dist.InverseGamma)
def _gamma(concentration: jax.Array, rate: jax.Array) -> Sequence[Row]:
    a = concentration
    return (
        {"rate": jnp.sqrt(a) / rate, "concentration": -1 / jnp.sqrt(a)},
        {"concentration": jnp.sqrt(trigamma_excess(a)) / a},
    )


@rows_of(dist.Pareto)
def _pareto(scale: jax.Array, alpha: jax.Array) -> Sequence[Row]:
    return {"alpha": 1 / alpha}, {"scale": alpha / scale}


@rows_of(dist.Uniform)
def _uniform(low: jax.Array, high: jax.Array) -> Sequence[Row]:
    return ({"low": -1 / (high - low), "high": 1 / (high - low)},)


@rows_of(dist.VonMises)
def _von_mises(concentration: jax.Array) -> Sequence[Row]:
    ratio = i1e(concentration) / i0e(concentration)
    return (
        {"loc": jnp.sqrt(concentration * ratio)},
        {"concentration": jnp.sqrt(bessel_ratio_slope(concentration)) / concentration},
    )


@rows_of(dist.Poisson)
def _poisson(rate: jax.Array) -> Sequence[Row]:
    return ({"rate": inverse_sqrt(rate)},)


@rows_of(dist.BernoulliProbs)
def _bernoulli_probs(probs: jax.Array) -> Sequence[Row]:
    return ({"probs": inverse_sqrt(probs) * inverse_sqrt(1 - probs)},)


@rows_of(dist.BernoulliLogits)
def _bernoulli_logits(logits: jax.Array) -> Sequence[Row]:
    # sqrt(p (1 - p)) = 1 / (2 cosh(logits / 2)), with one exponential that cannot overflow
    e = jnp.exp(jnp.where(logits > 0, -logits, logits) / 2)
    return ({"logits": e / (1 + jnp.square(e))},)


@rows_of(dist.BinomialProbs)
def _binomial_probs(probs: jax.Array, total_count: jax.Array) -> Sequence[Row]:
    return ({"probs": _sqrt_count(total_count) * _bernoulli_probs(probs)[0]["probs"]},)


@rows_of(dist.BinomialLogits)
def _binomial_logits(logits: jax.Array, total_count: jax.Array) -> Sequence[Row]:
    return ({"logits": _sqrt_count(total_count) * _bernoulli_logits(logits)[0]["logits"]},)


@rows_of(dist.GeometricProbs)
def _geometric_probs(probs: jax.Array) -> Sequence[Row]:
    return ({"probs": inverse_sqrt(1 - probs) / probs},)


@rows_of(dist.GeometricLogits)
def _geometric_logits(logits: jax.Array) -> Sequence[Row]:
    return ({"logits": jnp.exp(-softplus(logits) / 2)},)


# Counts with the mean m and the concentration r, whose variance is m + m^2 / r: in (m, r) the
# information is diag(r / (m (m + r)), dispersion), and p = m / (m + r). dm / m is written in each
# family's own parameters.


@rows_of(dist.GammaPoisson)
def _gamma_poisson(concentration: jax.Array, rate: jax.Array) -> Sequence[Row]:
    r, p, q = concentration, 1 / (1 + rate), rate / (1 + rate)
    return (
        {"concentration": jnp.sqrt(p / r), "rate": -jnp.sqrt(r * p) / rate},
        {"concentration": dispersion_root(r, p, q)},
    )


@rows_of(NegativeBinomialProbs)
def _negative_binomial_probs(total_count: jax.Array, probs: jax.Array) -> Sequence[Row]:
    r, p = total_count, probs
    return (
        {
            "total_count": p * inverse_sqrt(p) / jnp.sqrt(r),
            "probs": jnp.sqrt(r) * inverse_sqrt(p) / (1 - p),
        },
        {"total_count": dispersion_root(r, p, 1 - p)},
    )


@rows_of(NegativeBinomialLogits)
def _negative_binomial_logits(total_count: jax.Array, logits: jax.Array) -> Sequence[Row]:
    r, root_p = total_count, jnp.exp(-softplus(-logits) / 2)
    return (
        {"total_count": root_p / jnp.sqrt(r), "logits": jnp.sqrt(r) * root_p},
        {"total_count": dispersion_root(r, jnp.square(root_p), jnp.exp(-softplus(logits)))},
    )


# --- closed forms: vectors of parameters


@fisher_root.register
def _(d: dist.CategoricalLogits, tangent: Any) -> jax.Array:
    return _categories(d, d.logits, tangent.logits)


@fisher_root.register
def _(d: dist.MultinomialLogits, tangent: Any) -> jax.Array:
    w = _categories(d, d.logits, tangent.logits)
    return _sqrt_count(d.total_count)[..., None] * w


@fisher_root.register
def _(d: dist.CategoricalProbs, tangent: Any) -> jax.Array:
    return _simplex(d, d.probs, tangent.probs)


@fisher_root.register
def _(d: dist.MultinomialProbs, tangent: Any) -> jax.Array:
    w = _simplex(d, d.probs, tangent.probs)
    return _sqrt_count(d.total_count)[..., None] * w


@fisher_root.register
def _(d: dist.Beta, tangent: Any) -> jax.Array:
    a, b = as_float(d.concentration1), as_float(d.concentration0)
    da, db = tangent.concentration1, tangent.concentration0
    if _still(da) and _still(db):
        return stack([], d.batch_shape)
    a, b, da, db = jnp.broadcast_arrays(
        a, b, 0 * a if _still(da) else da, 0 * b if _still(db) else db
    )
    return _dirichlet(d, jnp.stack([a, b], -1), jnp.stack([da, db], -1))


@fisher_root.register
def _(d: dist.Dirichlet, tangent: Any) -> jax.Array:
    return _dirichlet(d, as_float(d.concentration), tangent.concentration)


@fisher_root.register
def _(d: dist.MultivariateNormal, tangent: Any) -> jax.Array:
    """L^-1 dloc, and M = L^-1 dL: off the diagonal M_ij, on it sqrt(2) M_ii."""
    factor = as_float(d.scale_tril)
    size = d.event_shape[0]
    parts = []
    if not _still(tangent.loc):
        parts.append(solve_lower(factor, tangent.loc))
    if not _still(tangent.scale_tril):
        m = solve_triangular(factor, jnp.tril(tangent.scale_tril), lower=True)
        rows, columns = np.tril_indices(size)
        parts.append(m[..., rows, columns] * np.where(rows == columns, math.sqrt(2), 1.0))
    if not parts:
        return stack([], d.batch_shape)
    spread = [jnp.broadcast_to(x, (*d.batch_shape, x.shape[-1])) for x in parts]
    return jnp.concatenate(spread, -1)


def _categories(d: Any, logits: Any, dot: Any) -> jax.Array:
    if _still(dot):
        return stack([], d.batch_shape)
    root = jnp.exp(log_softmax(as_float(logits)) / 2)
    w = root * (dot - jnp.sum(jnp.square(root) * dot, -1, keepdims=True))
    w = drop_null(w, root)
    return jnp.broadcast_to(w, (*d.batch_shape, w.shape[-1]))


def _simplex(d: Any, probs: Any, dot: Any) -> jax.Array:
    if _still(dot):
        return stack([], d.batch_shape)
    p = as_float(probs)
    w = drop_null(inverse_sqrt(p) * dot, jnp.sqrt(jnp.maximum(p, _floor(p))))
    return jnp.broadcast_to(w, (*d.batch_shape, w.shape[-1]))


def drop_null(w: jax.Array, root: jax.Array) -> jax.Array:
    """The same lengths in one component less, for w orthogonal to the unit vector ``root`` >= 0.

    The reflection that maps ``root`` to minus the last axis, without its last component.
    """
    last = w[..., -1:] / (1 + root[..., -1:])
    return w[..., :-1] - root[..., :-1] * last


def _dirichlet(d: Any, alpha: jax.Array, dot: Any) -> jax.Array:
    """Root of diag(trigamma(alpha)) - trigamma(s) 1 1', s the sum of alpha, in x = dalpha / alpha.

    The symmetric root of I - c q q' between the roots of the diagonal, with what cancels in
    1 - c |q|^2 taken out: it is ``rest``.
    """
    if _still(dot):
        return stack([], d.batch_shape)
    s = jnp.sum(alpha, -1, keepdims=True)
    g, g_s, share = trigamma_excess(alpha), trigamma_excess(s), alpha / s
    x, mean = dot / alpha, jnp.sum(dot, -1, keepdims=True) / s
    kept = jnp.sum(share * g / (alpha + g), -1, keepdims=True)
    lost = jnp.sum(share * (share / (alpha + g)), -1, keepdims=True)
    rest = jnp.maximum(kept - g_s * lost, jnp.finfo(alpha.dtype).eps)
    pull = share * (s + g_s) / (1 + jnp.sqrt(rest)) * mean
    w = jnp.sqrt(alpha + g) * x - pull / jnp.sqrt(alpha + g)
    return jnp.broadcast_to(w, (*d.batch_shape, w.shape[-1]))


# --- fallbacks


def _by_enumeration(d: Any, tangent: Any) -> jax.Array:
    try:
        support = d.enumerate_support(expand=True)
    except (NotImplementedError, jax.errors.JAXTypeError):
        # unequal supports in one batch, or a size that depends on a traced value
        return _by_draws(d, tangent)
    log_prob, score = _scores(d, tangent, support)
    root = jnp.exp(jnp.moveaxis(log_prob, 0, -1) / 2)
    return drop_null(root * jnp.moveaxis(score, 0, -1), root)


def _by_draws(d: Any, tangent: Any) -> jax.Array:
    draws = d.sample(random.key(0), (NUM_SCORES,))
    if not is_reparametrised(d):
        draws = lax.stop_gradient(draws)
    _, score = _scores(d, tangent, draws)
    return jnp.moveaxis(score, 0, -1) / math.sqrt(NUM_SCORES)


def _scores(d: Any, tangent: Any, values: Any) -> tuple[jax.Array, jax.Array]:
    """Log p(y) and its derivative along the tangent, y held fixed; y along the first axis."""
    leaves, treedef = jax.tree.flatten(d, is_leaf=lambda x: x is None)
    dots = _leaves(tangent)
    moving = [i for i, t in enumerate(dots) if not _still(t)]

    def log_prob(floats: list) -> jax.Array:
        new = list(leaves)
        for i, x in zip(moving, floats, strict=True):
            new[i] = x
        return jnp.asarray(jax.tree.unflatten(treedef, new).log_prob(values))

    primals = [as_float(leaves[i]) for i in moving]
    return jax.jvp(log_prob, (primals,), ([jnp.asarray(dots[i]) for i in moving],))


def is_reparametrised(d: Any) -> bool:
    """Whether draws are differentiable functions of the parameters, with the right law."""
    # NumPyro calls what has no parameters of its own reparametrised, mixtures among them
    if isinstance(d, dist.TransformedDistribution):
        return is_reparametrised(core(d.base_dist))
    return bool(d.arg_constraints) and d.has_rsample


# --- shared pieces


def stack(parts: Sequence[jax.Array], batch_shape: tuple[int, ...]) -> jax.Array:
    """Components, each broadcast to the batch, along a new last axis."""
    if not parts:
        return jnp.zeros((*batch_shape, 0))
    return jnp.stack([jnp.broadcast_to(p, batch_shape) for p in parts], -1)


def merge_events(w: jax.Array, num_dims: int) -> jax.Array:
    """Make the last ``num_dims`` batch dimensions part of the components."""
    return w.reshape(*w.shape[: w.ndim - 1 - num_dims], -1) if num_dims else w


def masked(d: Any, w: jax.Array) -> jax.Array:
    """Zero where the mask of ``d`` is False."""
    if d._mask is True:
        return w
    return jnp.where(jnp.asarray(d._mask)[..., None], w, 0.0)


def as_float(x: Any) -> jax.Array:
    """An array of a floating-point type; integers get the default one."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))


def inverse_sqrt(p: jax.Array) -> jax.Array:
    """p^(-1/2), and 0 where p is so small that the second derivative would overflow.

    A probability or rate that is a smooth function of a parameter has no information in the
    parameter as it goes to 0.
    """
    floor = _floor(p)
    return jnp.where(p > floor, lax.rsqrt(jnp.maximum(p, floor)), 0.0)


def solve_lower(factor: jax.Array, x: jax.Array) -> jax.Array:
    """L^-1 x for vectors x, both with batches that broadcast."""
    if factor.ndim == 2:
        flat = x.reshape(-1, x.shape[-1])
        return solve_triangular(factor, flat.T, lower=True).T.reshape(x.shape)
    batch = jnp.broadcast_shapes(factor.shape[:-2], x.shape[:-1])
    factor = jnp.broadcast_to(factor, (*batch, *factor.shape[-2:]))
    x = jnp.broadcast_to(x, (*batch, x.shape[-1]))
    return solve_triangular(factor, x[..., None], lower=True)[..., 0]


def _leaves(tree: PyTree) -> list:
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def _still(t: Any) -> bool:
    return t is None or getattr(t, "dtype", None) == jax.dtypes.float0


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _floor(p: jax.Array) -> float:
    return float(jnp.finfo(p.dtype).tiny) ** 0.4


def _sqrt_count(n: Any) -> jax.Array:
    return lax.stop_gradient(jnp.sqrt(as_float(n)))
