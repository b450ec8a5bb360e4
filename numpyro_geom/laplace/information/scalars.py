"""Fisher information of distributions with scalar parameters, in closed form."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.nn import softplus
from jax.scipy.special import i0e, i1e
from numpyro.distributions.conjugate import NegativeBinomialLogits, NegativeBinomialProbs

from .arrays import as_float, inverse_sqrt, is_constant, sqrt_count, stack
from .root import fisher_root
from .special import bessel_ratio_slope, dispersion_root, student_t_tail, trigamma_excess

Row = dict[str, jax.Array]
"""Parameter -> coefficient of its tangent: a row of the root R of F = R' R."""
Rule = Callable[..., Sequence[Row]]
"""Function from named parameters to rows."""


def _location_scale(of_loc: float, of_scale: float) -> Rule:
    def rule(scale: jax.Array) -> Sequence[Row]:
        return {"loc": math.sqrt(of_loc) / scale}, {"scale": math.sqrt(of_scale) / scale}

    return rule


def _gumbel(scale: jax.Array) -> Sequence[Row]:
    return (
        {"loc": 1 / scale, "scale": (np.euler_gamma - 1) / scale},
        {"scale": math.pi / math.sqrt(6) / scale},
    )


def _weibull(scale: jax.Array, concentration: jax.Array) -> Sequence[Row]:
    # log y is a smallest-value Gumbel with location log(scale) and scale 1 / concentration
    return (
        {"scale": concentration / scale, "concentration": (np.euler_gamma - 1) / concentration},
        {"concentration": math.pi / math.sqrt(6) / concentration},
    )


def _student_t(df: jax.Array, scale: jax.Array) -> Sequence[Row]:
    s = jnp.sqrt(2 * df / (df + 3)) / scale
    return (
        {"loc": jnp.sqrt((df + 1) / (df + 3)) / scale},
        {"scale": s, "df": -jnp.sqrt(2 / (df * (df + 3))) / (df + 1)},
        {"df": jnp.sqrt(student_t_tail(df)) / df},
    )


def _gamma(concentration: jax.Array, rate: jax.Array) -> Sequence[Row]:
    a = concentration
    return (
        {"rate": jnp.sqrt(a) / rate, "concentration": -1 / jnp.sqrt(a)},
        {"concentration": jnp.sqrt(trigamma_excess(a)) / a},
    )


def _von_mises(concentration: jax.Array) -> Sequence[Row]:
    ratio = i1e(concentration) / i0e(concentration)
    return (
        {"loc": jnp.sqrt(concentration * ratio)},
        {"concentration": jnp.sqrt(bessel_ratio_slope(concentration)) / concentration},
    )


def _of_probs(probs: jax.Array) -> jax.Array:
    return inverse_sqrt(probs) * inverse_sqrt(1 - probs)


def _of_logits(logits: jax.Array) -> jax.Array:
    # sqrt(p (1 - p)) = 1 / (2 cosh(logits / 2)), with one exponential that cannot overflow
    e = jnp.exp(jnp.where(logits > 0, -logits, logits) / 2)
    return e / (1 + jnp.square(e))


# Counts with the mean m and the concentration r, whose variance is m + m^2 / r: in (m, r) the
# information is diag(r / (m (m + r)), dispersion), and p = m / (m + r). dm / m is written in each
# family's own parameters.


def _gamma_poisson(concentration: jax.Array, rate: jax.Array) -> Sequence[Row]:
    r, p, q = concentration, 1 / (1 + rate), rate / (1 + rate)
    return (
        {"concentration": jnp.sqrt(p / r), "rate": -jnp.sqrt(r * p) / rate},
        {"concentration": dispersion_root(r, p, q)},
    )


def _negative_binomial_probs(total_count: jax.Array, probs: jax.Array) -> Sequence[Row]:
    r, p = total_count, probs
    of_count = p * inverse_sqrt(p) / jnp.sqrt(r)
    return (
        {"total_count": of_count, "probs": jnp.sqrt(r) * inverse_sqrt(p) / (1 - p)},
        {"total_count": dispersion_root(r, p, 1 - p)},
    )


def _negative_binomial_logits(total_count: jax.Array, logits: jax.Array) -> Sequence[Row]:
    r, root_p = total_count, jnp.exp(-softplus(-logits) / 2)
    return (
        {"total_count": root_p / jnp.sqrt(r), "logits": jnp.sqrt(r) * root_p},
        {"total_count": dispersion_root(r, jnp.square(root_p), jnp.exp(-softplus(logits)))},
    )


RULES: dict[Any, Rule] = {
    dist.Normal: _location_scale(1.0, 2.0),
    dist.Cauchy: _location_scale(0.5, 0.5),
    dist.Laplace: _location_scale(1.0, 1.0),
    dist.Logistic: _location_scale(1 / 3, (3 + math.pi**2) / 9),
    dist.HalfNormal: lambda scale: ({"scale": math.sqrt(2.0) / scale},),
    dist.HalfCauchy: lambda scale: ({"scale": math.sqrt(0.5) / scale},),
    dist.Gumbel: _gumbel,
    dist.Weibull: _weibull,
    dist.StudentT: _student_t,
    dist.Exponential: lambda rate: ({"rate": 1 / rate},),
    dist.Gamma: _gamma,
    dist.InverseGamma: _gamma,
    dist.Pareto: lambda scale, alpha: ({"alpha": 1 / alpha}, {"scale": alpha / scale}),
    dist.Uniform: lambda low, high: ({"low": -1 / (high - low), "high": 1 / (high - low)},),
    dist.VonMises: _von_mises,
    dist.Poisson: lambda rate: ({"rate": inverse_sqrt(rate)},),
    dist.BernoulliProbs: lambda probs: ({"probs": _of_probs(probs)},),
    dist.BernoulliLogits: lambda logits: ({"logits": _of_logits(logits)},),
    dist.BinomialProbs: lambda probs, total_count: (
        {"probs": sqrt_count(total_count) * _of_probs(probs)},
    ),
    dist.BinomialLogits: lambda logits, total_count: (
        {"logits": sqrt_count(total_count) * _of_logits(logits)},
    ),
    dist.GeometricProbs: lambda probs: ({"probs": inverse_sqrt(1 - probs) / probs},),
    dist.GeometricLogits: lambda logits: ({"logits": jnp.exp(-softplus(logits) / 2)},),
    dist.GammaPoisson: _gamma_poisson,
    NegativeBinomialProbs: _negative_binomial_probs,
    NegativeBinomialLogits: _negative_binomial_logits,
}


def _register(kind: Any, rule: Rule) -> None:
    """Register a rule. Constant parameters drop out; if one parameter is left, there is one row."""
    names = tuple(inspect.signature(rule).parameters)

    def root(d: Any, tangent: Any) -> jax.Array:
        rows = rule(*(as_float(getattr(d, name)) for name in names))
        dots = {n: getattr(tangent, n) for row in rows for n in row}
        dots = {n: t for n, t in dots.items() if not is_constant(t)}
        if len(dots) == 1:
            ((name, dot),) = dots.items()
            c = [row[name] for row in rows if name in row]
            norm = c[0] if len(c) == 1 else jnp.sqrt(sum(jnp.square(x) for x in c))
            return stack([norm * dot], d.batch_shape)
        kept = [[(c, dots[n]) for n, c in row.items() if n in dots] for row in rows]
        return stack([sum(c * t for c, t in row) for row in kept if row], d.batch_shape)

    fisher_root.register(kind)(root)


for _kind, _rule in RULES.items():
    _register(_kind, _rule)
