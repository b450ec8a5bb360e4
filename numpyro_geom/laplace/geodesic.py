"""Exponential map: the position on a geodesic after unit time. Logarithmic map: its inverse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._linalg import dot, matmul, wait_for
from ..model.derivatives import jvp
from .information.form import Flat

EVALUATIONS_PER_STEP = 6
"""Evaluations per step of the Dormand-Prince 5(4) pair: its last stage starts the next step."""


class RiemannianMetric(NamedTuple):
    """A metric G(theta) as geodesics need it, on flat positions of length D.

    Attributes:
        solver: ``theta -> (b -> G^-1 b)``. Work that depends on ``theta`` alone is done once.
        force: ``(theta, v) -> (d_v G) v - grad_theta (v'Gv) / 2``.
    """

    solver: Callable[[Flat], Callable[[Flat], Flat]]
    force: Callable[[Flat, Flat], Flat]

    def acceleration(self, position: Flat, velocity: Flat) -> Flat:
        """Theta'' = -G^-1 force of a geodesic."""
        force = self.force(position, velocity)
        return -self.solver(wait_for(position, force))(force)


def monge_acceleration(
    gradient: Callable[[Flat], Flat], alpha2: float | jax.Array
) -> Callable[[Flat, Flat], Flat]:
    """Geodesics of G = I + alpha2 g g', g the gradient of an energy."""

    def acceleration(position: Flat, velocity: Flat) -> Flat:
        g, along = jvp(gradient, position, velocity)
        return -alpha2 * dot(velocity, along) / (1 + alpha2 * dot(g, g)) * g

    return acceleration


class Geodesic(NamedTuple):
    """The end of a geodesic.

    Attributes:
        position: theta(1), or the position where the solver stopped.
        success: whether unit time was reached with finite values.
        num_evaluations: evaluations of the acceleration, 6 per step, rejected steps included.
    """

    position: Flat
    success: jax.Array
    num_evaluations: jax.Array


def exponential_map(
    acceleration: Callable[[Flat, Flat], Flat],
    position: Flat,
    velocity: Flat,
    *,
    rtol: float = 1e-3,
    atol: float = 1e-6,
    max_steps: int = 4096,
) -> Geodesic:
    """Integrate theta'' = acceleration(theta, theta') from time 0 to 1.

    The solver is Dormand and Prince's 5(4) pair with adaptive steps, by diffrax. The map is
    differentiable in forward mode, as the numerical map with fixed steps.
    This is for one geodesic: use ``vmap`` for many.

    ``rtol`` and ``atol`` are tolerances of the root mean square of a step's error over the 2 D
    entries. After ``max_steps``, rejected ones included, the solver gives up.
    """
    acceleration = jax.jit(acceleration)  # traced once

    def field(t: Any, y: Any, args: Any) -> tuple[Flat, Flat]:
        return y[1], acceleration(*y)

    start = (position, velocity)
    import diffrax  # takes as long to import as this package

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Dopri5(),
        t0=0.0,
        t1=1.0,
        dt0=_first_step(field, start, rtol, atol),
        y0=start,
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=atol),
        max_steps=max_steps,
        throw=False,
        saveat=diffrax.SaveAt(t1=True),
        adjoint=diffrax.ForwardMode(),
    )
    end = solution.ys[0][-1]
    success = (solution.result == diffrax.RESULTS.successful) & jnp.all(jnp.isfinite(end))
    return Geodesic(end, success, EVALUATIONS_PER_STEP * solution.stats["num_steps"])


def _first_step(field: Callable, start: tuple[Flat, Flat], rtol: float, atol: float) -> jax.Array:
    """A first step by the rule of Hairer, Norsett and Wanner, Solving ODEs I, II.4, order 5.

    Without a given first step diffrax starts at 0.01, five steps more than a mild geodesic needs.
    Where the field is the same at the start and after a trial step, the first step is the whole
    way: the geodesics of a constant metric are straight.
    """
    start = lax.stop_gradient(start)

    def norm(y: tuple[Flat, Flat]) -> jax.Array:
        scaled = [v / (atol + rtol * jnp.abs(v0)) for v, v0 in zip(y, start, strict=True)]
        return jnp.sqrt(jnp.mean(jnp.concatenate(scaled) ** 2))

    size = norm(start)

    def trial_step(slope: tuple[Flat, Flat]) -> jax.Array:
        rate = norm(slope)
        tiny = (size < 1e-5) | (rate < 1e-5)
        return jnp.where(tiny, 1e-6, 0.01 * size / jnp.where(tiny, 1.0, rate))

    def evaluate(y: tuple[Flat, Flat], _: None) -> tuple:
        slope = field(jnp.zeros(()), y, None)
        return tuple(a + trial_step(slope) * b for a, b in zip(start, slope, strict=True)), slope

    # a loop over the start and a trial step compiles the acceleration only once
    slopes: tuple[Flat, Flat] = lax.scan(evaluate, start, None, length=2)[1]
    slope, after = ((slopes[0][i], slopes[1][i]) for i in (0, 1))
    trial, rate = trial_step(slope), norm(slope)
    bend = norm((after[0] - slope[0], after[1] - slope[1])) / trial
    largest = jnp.maximum(rate, bend)
    flat = largest <= 1e-15
    step = jnp.where(
        flat, jnp.maximum(1e-6, trial * 1e-3), (0.01 / jnp.where(flat, 1.0, largest)) ** 0.2
    )
    step = jnp.where(bend == 0, 1.0, jnp.minimum(100 * trial, step))
    return jnp.minimum(step, 1.0).astype(start[0].dtype)


# --- the logarithmic map

STAGES = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Fractions of the gradient's scale in the metric, one after another."""
LARGEST_MISS = 1e-3
"""Largest distance of an end point that hits its target, root mean square in posterior sd."""


def shoot(precision: jax.Array, velocity: Flat, alpha2: float | jax.Array) -> Flat:
    """The end of the geodesic that starts at 0 with this velocity; see `log_map`."""
    rtol, atol = (1e-6, 1e-9) if velocity.dtype == jnp.float64 else (1e-4, 1e-6)
    acceleration = monge_acceleration(partial(matmul, precision), alpha2)
    origin = jnp.zeros_like(velocity)
    return exponential_map(acceleration, origin, velocity, rtol=rtol, atol=atol).position


def log_map(precision: jax.Array, target: Flat, alpha2: float = 1.0) -> tuple[Flat, jax.Array]:
    """The velocity whose geodesic from 0 reaches ``target`` after unit time.

    The metric is I + alpha2 (P x)(P x)', Monge's for the energy x'Px / 2. Its geodesics are

        x'' = -alpha2 (x''' P x') P x / (1 + alpha2 |P x|^2)    (x' twice in the bracket)

    The method is shooting with Newton steps. The scale of the gradient is continued from a nearly
    flat metric to the requested one. The end point is checked, and a miss is reported.

    The result is the velocity x'(0), and whether its geodesic hits the target.
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
            return (size(residual) > LARGEST_MISS / 100) & (count < 8)

        start = (unknown, miss(fraction, unknown), jnp.zeros((), jnp.int32))
        unknown, residual, _ = lax.while_loop(proceed, newton, start)
        return unknown, size(residual)

    fractions = jnp.asarray(STAGES, target.dtype)
    unknown, misses = lax.scan(stage, factor.T @ target, fractions)
    return scale @ unknown, misses[-1] <= LARGEST_MISS
