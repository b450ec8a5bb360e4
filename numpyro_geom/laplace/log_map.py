"""Logarithmic map at a mode for Monge's metric of a quadratic energy."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .geodesic import exponential_map
from .information.form import HIGHEST, Flat

STAGES = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Fractions of the gradient's scale in the metric, one after another."""
NEWTON_STEPS = 8
LARGEST_MISS = 1e-3
"""Largest distance of an end point that hits its target, root mean square in posterior sd."""


def shoot(precision: jax.Array, velocity: Flat, alpha2: float | jax.Array) -> Flat:
    """The end of the geodesic that starts at 0 with this velocity; see `log_map`."""
    rtol, atol = (1e-6, 1e-9) if velocity.dtype == jnp.float64 else (1e-4, 1e-6)

    def acceleration(x: Flat, v: Flat) -> Flat:
        gradient = jnp.matmul(precision, x, precision=HIGHEST)
        bend = jnp.vdot(v, jnp.matmul(precision, v, precision=HIGHEST))
        return -alpha2 * bend / (1 + alpha2 * jnp.vdot(gradient, gradient)) * gradient

    origin = jnp.zeros_like(velocity)
    return exponential_map(acceleration, origin, velocity, rtol=rtol, atol=atol).position


def log_map(precision: jax.Array, target: Flat, alpha2: float = 1.0) -> tuple[Flat, jax.Array]:
    """The velocity whose geodesic from 0 reaches ``target`` after unit time.

    The metric is I + alpha2 (P x)(P x)', Monge's for the energy x'Px / 2. Its geodesics are

        x'' = -alpha2 (x''' P x') P x / (1 + alpha2 |P x|^2)    (x' twice in the bracket)

    The method is shooting with Newton steps. The scale of the gradient is continued from a nearly
    flat metric to the requested one. The end point is checked, and a miss is reported.

    Args:
        precision: P, shape (D, D).
        target: x(1), shape (D,).
        alpha2: scale of the gradient's outer product.

    Returns:
        The velocity x'(0), shape (D,), and whether its geodesic hits the target.
    """
    eye = jnp.eye(target.size, dtype=target.dtype)
    # unknowns in posterior standard deviations: Newton's system is then well scaled
    factor = jnp.linalg.cholesky(precision)
    scale = jax.scipy.linalg.solve_triangular(factor, eye, lower=True).T  # L^-T

    def miss(fraction: jax.Array, unknown: Flat) -> Flat:
        return factor.T @ (shoot(precision, scale @ unknown, alpha2 * fraction**2) - target)

    def size(residual: Flat) -> jax.Array:
        value = jnp.sqrt(jnp.mean(residual**2))
        return jnp.where(jnp.isfinite(value), value, jnp.inf)

    def stage(unknown: Flat, fraction: jax.Array) -> tuple[Flat, jax.Array]:
        def newton(carry: tuple) -> tuple:
            unknown, residual, count = carry
            jacobian = jax.vmap(
                lambda u: jax.jvp(partial(miss, fraction), (unknown,), (u,))[1], out_axes=1
            )(eye)
            step = jnp.linalg.solve(jacobian, residual)
            trials = unknown - jnp.asarray([1.0, 0.3, 0.1], unknown.dtype)[:, None] * step
            residuals = jax.vmap(partial(miss, fraction))(trials)
            best = jnp.argmin(jax.vmap(size)(residuals))
            better = size(residuals[best]) < size(residual)
            unknown = jnp.where(better, trials[best], unknown)
            return unknown, jnp.where(better, residuals[best], residual), count + 1

        def proceed(carry: tuple) -> jax.Array:
            _, residual, count = carry
            return (size(residual) > LARGEST_MISS / 100) & (count < NEWTON_STEPS)

        start = (unknown, miss(fraction, unknown), jnp.zeros((), jnp.int32))
        unknown, residual, _ = lax.while_loop(proceed, newton, start)
        return unknown, size(residual)

    fractions = jnp.asarray(STAGES, target.dtype)
    unknown, misses = lax.scan(stage, factor.T @ target, fractions)
    return scale @ unknown, misses[-1] <= LARGEST_MISS
