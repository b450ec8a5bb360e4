"""Exponential map: the position on a geodesic after unit time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp

from .information.form import Flat

Acceleration = Callable[[Flat, Flat], Flat]

EVALUATIONS_PER_STEP = 6
"""Evaluations per step of the Dormand-Prince 5(4) pair: its last stage starts the next step."""


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
    acceleration: Acceleration,
    position: Flat,
    velocity: Flat,
    *,
    rtol: float = 1e-3,
    atol: float = 1e-6,
    max_steps: int = 4096,
) -> Geodesic:
    """Integrate theta'' = acceleration(theta, theta') from time 0 to 1.

    The solver is Dormand and Prince's 5(4) pair with adaptive steps, by diffrax. The map is
    differentiable in forward mode; the derivative is that of the numerical map with fixed steps.
    This is for one geodesic: use ``vmap`` for many.

    Args:
        acceleration: ``(position, velocity) -> theta''``, vectors of length D.
        position: theta(0), shape (D,).
        velocity: theta'(0), shape (D,).
        rtol: relative tolerance of the root mean square of a step's error over the 2 D entries.
        atol: absolute tolerance of this error.
        max_steps: steps, rejected ones included, after which the solver gives up.
    """
    acceleration = jax.jit(acceleration)  # traced once

    def field(t: Any, y: Any, args: Any) -> tuple[Flat, Flat]:
        return y[1], acceleration(*y)

    start = (position, velocity)
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
    start = jax.lax.stop_gradient(start)

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
    slopes: tuple[Flat, Flat] = jax.lax.scan(evaluate, start, None, length=2)[1]
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
