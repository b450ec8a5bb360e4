"""Special functions of Fisher informations, accurate where a naive formula cancels.

Each function has two branches; the argument of each branch is clipped to the range of that branch.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import i0e, i1e


def _either(x: jax.Array, at: float, below: Callable, above: Callable) -> jax.Array:
    return jnp.where(x < at, below(jnp.minimum(x, at)), above(jnp.maximum(x, at)))


def _by_precision(x: jax.Array, single: float, double: float) -> float:
    return double if x.dtype == jnp.float64 else single


def _trigamma(x: jax.Array) -> jax.Array:
    """Eight steps of the recurrence, then the asymptotic series.

    Exact to rounding for x > 0.5. JAX's polygamma is a zeta function, whose derivatives take
    seconds to compile.
    """
    u = 1 / (x + 8)
    bernoulli = [7 / 6, -691 / 2730, 5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6]
    tail = jnp.polyval(jnp.asarray(bernoulli, x.dtype), u**2)
    steps = sum((1 / jnp.square(x + k) for k in range(1, 8)), 1 / jnp.square(x))
    return steps + u + u**2 / 2 + u**3 * tail


def trigamma_excess(a: jax.Array) -> jax.Array:
    """a^2 trigamma(a) - a: falls from 1 at 0 to 1/2 at infinity."""

    def asymptotic(a: jax.Array) -> jax.Array:
        u = 1 / a
        terms = [5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6]
        return 0.5 + u * jnp.polyval(jnp.asarray(terms, a.dtype), u**2)

    return _either(a, 20.0, lambda a: 1 - a + a**2 * _trigamma(1 + a), asymptotic)


def student_t_tail(df: jax.Array) -> jax.Array:
    """df^2 times the information on df that remains if the scale is unknown."""

    def direct(df: jax.Array) -> jax.Array:
        x = df / 2
        first = trigamma_excess(x) + x - x**2 * _trigamma(x + 0.5)
        rational = df * (df + 5) / (2 * (df + 1) * (df + 3))
        return first - rational - 2 * df / ((df + 1) ** 2 * (df + 3))

    def asymptotic(df: jax.Array) -> jax.Array:
        # in 1 / df, from trigamma(x) ~ 1 / x + 1 / (2 x^2) + sum_k B_2k / x^(2 k + 1)
        terms = [1.5, -3, 3.5, -3, 5.5, -15, 7.5, 69, 9.5, -1047, 11.5, 19101]
        u = 1 / df
        return u**2 * jnp.polyval(jnp.asarray(terms[::-1], df.dtype), u)

    return _either(df, _by_precision(df, 8.0, 30.0), direct, asymptotic)


def bessel_ratio_slope(k: jax.Array) -> jax.Array:
    """k^2 times the derivative of I1(k) / I0(k): rises from 0 to 1/2."""

    def direct(k: jax.Array) -> jax.Array:
        ratio = i1e(k) / i0e(k)
        return k**2 * (1 - ratio**2) - k * ratio

    def asymptotic(k: jax.Array) -> jax.Array:
        terms = [1 / 2, 1 / 4, 3 / 8, 25 / 32, 65 / 32, 3219 / 512, 721 / 32, 375733 / 4096]
        terms += [214173 / 512]
        u = 1 / k
        return jnp.polyval(jnp.asarray(terms[::-1], k.dtype), u)

    return _either(k, _by_precision(k, 16.0, 60.0), direct, asymptotic)


# x = exp(y - exp(-y)) maps the line to (0, inf). The trapezoidal rule then converges fast, even for
# integrands that change on many scales of x.
_GRID = np.linspace(-3.3, 3.75, 48)
_NODES = np.exp(_GRID - np.exp(-_GRID))
_WEIGHTS = (_GRID[1] - _GRID[0]) * _NODES * (1 + np.exp(-_GRID)) * np.exp(-_NODES)


def dispersion_root(r: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Square root of the information on r at a fixed mean, for p = m / (m + r) and q = 1 - p.

    Take the part of the score of r that is orthogonal to the counts, in Meixner polynomials. Its
    variance is sum_{k >= 2} p^k B(k, r) / k, with all terms positive. With B as an integral, the
    sum over k is p^2 integral_0^1 (1 - v)^(r - 1) v psi(p v) dv, where psi(z) = (-log(1 - z) - z) /
    z^2 and 1 - v = exp(-x / r).
    """
    r, p, q = (x[..., None] for x in jnp.broadcast_arrays(r, p, q))
    ratio = jnp.asarray(_NODES, r.dtype) / r
    v, z_rest = -jnp.expm1(-ratio), q + p * jnp.exp(-ratio)
    terms = [1 / k for k in range(14, 1, -1)]
    z = p * v
    psi = _either(
        z,
        0.1,
        lambda z: jnp.polyval(jnp.asarray(terms, z.dtype), z),
        # log of the exact 1 - z, because 1 - z loses precision for z near 1
        lambda z: (-jnp.log(jnp.clip(z_rest, jnp.finfo(z.dtype).tiny, 0.9)) - z) / z**2,
    )
    return p[..., 0] * jnp.sqrt(jnp.sum(jnp.asarray(_WEIGHTS, r.dtype) * v * psi / r, -1))
