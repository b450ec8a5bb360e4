"""Langevin steps, with Gamma or with a Metropolis test, and functions that other steps share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from .._util import tree_normal, tree_scale, tree_vdot, tree_where
from ..model.potential import Potential
from ..sampling.algorithm import Step
from ..sampling.gamma import divergence, divergence_from_probe, has_divergence, mode_factor, probe
from ..sampling.settings import Settings
from ..sampling.state import Chain, StepReport

PyTree = Any


def langevin_step(settings: Settings, learn: Callable) -> Step:
    """The plain step. One pass gives the gradient and Gamma's Hessian-vector product.

    Args:
        settings: the settings of `numpyro_geom.SGRLD`.
        learn: from `numpyro_geom.sampling.algorithm.metric_learner`.
    """
    metric, max_norm = settings.metric, settings.max_norm
    factor = mode_factor(settings.gamma, metric.decay)

    def step(
        rng_key: jax.Array,
        potential: Potential,
        batch: Any,
        chain: Chain,
        h: jax.Array,
        tau: jax.Array | float,
        learning: jax.Array,
    ) -> tuple[Chain, StepReport]:
        position = chain.position
        with_gamma = factor > 0 and has_divergence(metric, position)

        def value_and_grad(p: PyTree) -> tuple[jax.Array, PyTree]:
            return jax.value_and_grad(potential.energy)(p, batch)

        if with_gamma:
            rng_key, key_probe = random.split(rng_key)
            (energy, grad), gamma_of = _with_hessian(value_and_grad, position, settings, key_probe)
        else:
            energy, grad = value_and_grad(position)
        metric_state = learn(chain.metric_state, grad, potential.num_data, learning)
        drift = metric.apply_inverse(metric_state, grad)
        noise = metric.apply_inverse_sqrt(metric_state, tree_normal(rng_key, position))
        if with_gamma:
            scale = 1 / potential.num_data
            gamma = gamma_of(metric_state, tree_scale(scale, grad), scale)
            drift = jax.tree.map(lambda d, c: d - factor * tau * c, drift, gamma)
        if max_norm is not None:
            raw = tree_normal(rng_key, position)
            length = jnp.sqrt(tree_vdot(drift, drift))
            shrink = max_norm / jnp.sqrt(tree_vdot(grad, grad))
            too_long = ~(length <= max_norm)
            drift = tree_where(too_long, tree_scale(shrink, grad), drift)
            noise = tree_where(too_long, tree_scale(jnp.sqrt(shrink), raw), noise)
        position = langevin_move(position, drift, noise, h, tau)
        squared_drift = h * tree_vdot(grad, drift) / 2
        return Chain(position, metric_state, ()), StepReport(energy, grad, squared_drift)

    return step


def adjusted_step(metric: Any, learn: Callable) -> Step:
    """Langevin proposal with constant A and a Metropolis test on U."""

    def step(
        rng_key: jax.Array,
        potential: Potential,
        batch: Any,
        chain: Chain,
        h: jax.Array,
        tau: jax.Array | float,
        learning: jax.Array,
    ) -> tuple[Chain, StepReport]:
        def value_and_grad(p: PyTree) -> tuple[jax.Array, PyTree]:
            return jax.value_and_grad(potential.energy)(p, batch)

        energy, grad = value_and_grad(chain.position)
        metric_state = learn(chain.metric_state, grad, potential.num_data, learning)
        position, accept_prob = metropolis(
            rng_key,
            value_and_grad,
            (energy, grad),
            chain.position,
            lambda x: metric.apply_inverse(metric_state, x),
            lambda x: metric.apply_inverse_sqrt(metric_state, x),
            h,
            tau,
        )
        report = StepReport(energy, grad, jnp.zeros_like(energy), accept_prob)
        return Chain(position, metric_state, ()), report

    return step


def _with_hessian(
    value_and_grad: Callable, position: PyTree, settings: Settings, key_probe: jax.Array
) -> tuple[tuple, Callable]:
    """Value and gradient, and ``(metric_state, g, scale) -> Gamma`` on the same minibatch.

    A single probe uses forward mode, which stores no intermediate values.
    """
    metric = settings.metric
    if settings.gamma_estimator == "hutchinson" and settings.gamma_probes == 1:
        z = probe(key_probe, position)
        pair, (_, hz) = jax.jvp(value_and_grad, (position,), (z,))
        return pair, lambda state, g, scale: divergence_from_probe(
            metric, state, g, z, tree_scale(scale, hz)
        )
    pair, hvp = linearize(value_and_grad, position)
    return pair, lambda state, g, scale: divergence(
        metric,
        state,
        g,
        lambda z: tree_scale(scale, hvp(z)),
        key_probe,
        position,
        num_probes=settings.gamma_probes,
        estimator=settings.gamma_estimator,
    )


def metropolis(
    rng_key: jax.Array,
    value_and_grad: Callable,
    here: tuple[jax.Array, PyTree],
    position: PyTree,
    apply_inverse: Callable,
    apply_root: Callable,
    h: jax.Array,
    tau: jax.Array | float,
) -> tuple[PyTree, jax.Array]:
    """Langevin proposal in a constant metric, accepted so that exp(-value / tau) is invariant.

    With b the gradient, the noise of the reverse step is sqrt(h / 2 tau) A^{1/2} (b + b') - xi.
    So neither a determinant nor A^{-1/2} is needed.
    """
    key_move, key_accept = random.split(rng_key)
    value, grad = here
    xi = tree_normal(key_move, position)
    proposal = langevin_move(position, apply_inverse(grad), apply_root(xi), h, tau)
    new_value, new_grad = value_and_grad(proposal)
    both = apply_root(jax.tree.map(jnp.add, grad, new_grad))
    back = jax.tree.map(lambda b, x: jnp.sqrt(h / (2 * tau)) * b - x, both, xi)
    log_ratio = (value - new_value) / tau + (tree_vdot(xi, xi) - tree_vdot(back, back)) / 2
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
    accept_prob = jnp.exp(jnp.minimum(log_ratio, 0.0))
    accepted = random.uniform(key_accept, (), log_ratio.dtype) < accept_prob
    return tree_where(accepted, proposal, position), accept_prob


def langevin_move(
    position: PyTree, drift: PyTree, noise: PyTree, h: jax.Array, tau: jax.Array | float
) -> PyTree:
    """``position - h drift + sqrt(2 h tau) noise``, in the dtypes of ``position``."""
    spread = jnp.sqrt(2 * h * tau)
    return jax.tree.map(
        lambda x, d, w: x - (h * d).astype(x.dtype) + (spread * w).astype(x.dtype),
        position,
        drift,
        noise,
    )


def linearize(value_and_grad: Callable, position: PyTree) -> tuple[tuple, Callable]:
    """Value and gradient, and the Hessian-vector product, from one pass."""
    pair, tangent = jax.linearize(value_and_grad, position)
    return pair, lambda v: tangent(v)[1]
