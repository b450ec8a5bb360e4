"""The automatic step size and number of steps per draw, from curvature and gradient noise.

Take a Gaussian target and a direction where the preconditioned Hessian has the eigenvalue lam and
the preconditioned covariance of the minibatch gradient is c. There the stationary variance of a
Langevin step of size h is too large by the factor 1 + h lam / 2 + h c / (2 tau), to first order. So
a bias tolerance gives a step size, and the flattest direction gives the relaxation time::

    h = bias_tolerance / (lam_H / 2 + lam_C / (2 tau)),    relaxation time = 1 / (h lam_min) steps
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MAX_NUM_STEPS = 1000
"""Largest number of steps between two draws under ``num_steps="auto"``."""
DRAW_LENGTH = 0.5
"""Relaxation times per draw of a Langevin kernel under ``num_steps="auto"``, within the bounds. In
theory, draws with correlation exp(-t) reach 98% of the best effective draws per gradient here."""
MOMENTUM_DRAW_LENGTH = 1.0
"""The same for kernels with a momentum. At 1, half of the critical friction reaches 100%, with
independent draws. With the correlation exp(-t), at a friction that noise makes large, it is 92%."""
TARGET_ACCEPTANCE = 0.574


class Adaptation(NamedTuple):
    """What warm-up has learned about the target.

    Attributes:
        num_warmup: warm-up length in draws, int32 scalar.
        shrink: factor on the step size, halved for each warm-up draw with a failed step. With a
            Metropolis test the acceptance rate controls it as well.
        curvature: lam_H, largest absolute eigenvalue of A^{1/2} H A^{1/2}; the largest of the
            measurements in the second half of warm-up.
        curvature_low: the smallest of these measurements. If it is far below ``curvature``, no
            single step size fits the whole posterior.
        flattest: smallest eigenvalue, or smallest absolute eigenvalue if the Hessian is indefinite;
            the smallest of these measurements.
        slower: measured rate of relaxation over the expected one, a factor of at most 1.
        slowest: lam_min, the curvature that says how slowly the chain relaxes.
        noise: lam_C, largest eigenvalue of A^{1/2} Cov(grad Uhat) A^{1/2}; the largest of these
            measurements.
    """

    num_warmup: jax.Array
    shrink: jax.Array
    curvature: jax.Array
    curvature_low: jax.Array
    flattest: jax.Array
    slower: jax.Array
    slowest: jax.Array
    noise: jax.Array


def init_adaptation(num_warmup: int, dtype: Any) -> Adaptation:
    """An adaptation state before anything is known."""
    one = jnp.ones((), dtype)
    return Adaptation(
        num_warmup=jnp.asarray(num_warmup, jnp.int32),
        shrink=one,
        curvature=one,
        curvature_low=one,
        flattest=one,
        slower=one,
        slowest=one,
        noise=jnp.zeros((), dtype),
    )


def rule_temperature(temperature: float) -> float:
    """Tau of the rules. At 0 there is no variance to bias, and noise counts as at tau = 1."""
    return temperature if temperature > 0 else 1.0


def step_size_from(
    adaptation: Adaptation, bias_tolerance: float, temperature: float, adjusted: bool
) -> jax.Array:
    """The step size h that keeps the first-order bias of variances within the tolerance."""
    rate = adaptation.curvature / 2
    if not adjusted:
        rate = rate + adaptation.noise / (2 * rule_temperature(temperature))
    tolerance = 1.0 if adjusted else bias_tolerance
    return adaptation.shrink * tolerance / rate


def num_steps_from(
    rate: jax.Array,
    step_size: jax.Array,
    potential: Any = None,
    *,
    draw_length: float = DRAW_LENGTH,
) -> jax.Array:
    """Steps per draw, so that a draw spans ``draw_length`` relaxation times.

    Args:
        rate: relaxation rate of the slowest direction, per unit of step size.
        step_size: h.
        potential: unused.
        draw_length: number of relaxation times.
    """
    wanted = draw_length / (step_size * rate)
    return jnp.clip(jnp.ceil(wanted), 1, MAX_NUM_STEPS).astype(jnp.int32)


def halve_if_failed(adaptation: Adaptation, state: Any) -> Adaptation:
    """Halve the step after a draw with failed steps."""
    factor = jnp.where(state.diverging, 0.5, 1.0).astype(adaptation.shrink.dtype)
    return adaptation._replace(shrink=jnp.maximum(adaptation.shrink * factor, 1e-6))


def follow_acceptance(adaptation: Adaptation, state: Any) -> Adaptation:
    """Move the step towards the target acceptance rate, and halve it if steps failed."""
    factor = jnp.where(state.diverging, 0.5, 1.0)
    gain = 5.0 / (10.0 + state.i.astype(factor.dtype)) ** 0.75
    factor = factor * jnp.exp(gain * (state.accept_prob - TARGET_ACCEPTANCE))
    return adaptation._replace(shrink=adaptation.shrink * factor.astype(adaptation.shrink.dtype))
