"""Langevin's move and its Metropolis test."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from .. import _random
from .._checks import check_choice
from .._util import PyTree, tree_vdot, tree_where


def langevin_move(
    position: PyTree,
    drift: PyTree,
    noise: PyTree,
    h: jax.Array,
    tau: jax.Array | float,
) -> PyTree:
    """``position - h drift + sqrt(2 h tau) noise``, in the dtypes of ``position``."""
    spread = jnp.sqrt(2 * h * tau)
    return jax.tree.map(
        lambda x, d, w: x - (h * d).astype(x.dtype) + (spread * w).astype(x.dtype),
        position,
        drift,
        noise,
    )


def metropolis(
    rng_key: jax.Array,
    value_and_grad: Callable,
    here: tuple[jax.Array, PyTree],
    position: PyTree,
    metric: Any,
    metric_state: Any,
    h: jax.Array,
    tau: jax.Array | float,
) -> tuple[PyTree, jax.Array]:
    """Langevin proposal in a constant metric, accepted so that exp(-value / tau) is invariant.

    With b the gradient, the noise of the reverse step is sqrt(h / 2 tau) A^{1/2} (b + b') - xi.
    So neither a determinant nor A^{-1/2} is needed.
    """
    key_move, key_accept = _random.split(rng_key)
    value, grad = here
    xi = _random.tree_normal(key_move, position)
    drift = metric.apply_inverse(metric_state, grad)
    noise = metric.apply_inverse_sqrt(metric_state, xi)
    proposal = langevin_move(position, drift, noise, h, tau)
    new_value, new_grad = value_and_grad(proposal)
    both = metric.apply_inverse_sqrt(metric_state, jax.tree.map(jnp.add, grad, new_grad))
    back = jax.tree.map(lambda b, x: jnp.sqrt(h / (2 * tau)) * b - x, both, xi)
    log_ratio = (value - new_value) / tau + (tree_vdot(xi, xi) - tree_vdot(back, back)) / 2
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
    accept_prob = jnp.exp(jnp.minimum(log_ratio, 0.0))
    accepted = random.uniform(key_accept, (), log_ratio.dtype) < accept_prob
    return tree_where(accepted, proposal, position), accept_prob


# The divergence term Gamma: with it a position-dependent metric leaves the target invariant


DIVERGENCE_MODES = ("corrected", "published", "none", "frozen", "auxiliary")
"""Treatments of Gamma: see `mode_factor`."""


def mode_factor(divergence: str, decay: float) -> float:
    """The factor c of Gamma in the drift, for a metric whose statistic has the memory ``decay``.

    It is 1 for ``"corrected"``, 1 - decay for ``"published"``, and 0 for all others. `SGRLD` says
    what each leaves invariant, and the page on Gamma says why.
    """
    check_choice("divergence", divergence, DIVERGENCE_MODES)
    if divergence == "corrected":
        return 1.0
    return 1.0 - decay if divergence == "published" else 0.0


def has_divergence(metric: Any, position: PyTree) -> bool:
    """Whether Gamma can differ from 0, because the metric's statistic has entries."""
    return len(jax.tree.leaves(jax.eval_shape(metric.statistic, position))) > 0


def check_derivative(settings: Any) -> None:
    """Raise for a metric whose Gamma is needed and has no derivative."""
    if settings.divergence in ("corrected", "published") and not settings.metric.has_derivative:
        raise ValueError(
            f"divergence={settings.divergence!r} needs the derivative of the metric, and "
            f"{settings.metric!r} has none: use divergence='frozen' or 'auxiliary'"
        )


def probe(rng_key: jax.Array, position: PyTree) -> PyTree:
    """A pytree like ``position`` with independent entries, -1 or 1 with equal probability."""
    leaves, treedef = jax.tree.flatten(position)
    sizes = [math.prod(x.shape) for x in leaves]
    # One random word holds 32 signs, because generating words is most of the cost.
    words = _random.bits(rng_key, (math.ceil(sum(sizes) / 32),))
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    signs, start = bits.reshape(-1), 0
    probes = []
    for x, size in zip(leaves, sizes, strict=True):
        part = signs[start : start + size].astype(x.dtype)
        probes.append((2 * part - 1).reshape(x.shape))
        start += size
    return jax.tree.unflatten(treedef, probes)


def divergence_from_probe(
    metric: Any, state: Any, grad: PyTree, z: PyTree, hvp_z: PyTree, product: str = "apply_inverse"
) -> PyTree:
    """Gamma_hat of one probe with a known Hessian-vector product, with c = 1.

    One forward-mode pass computes the gradient and the product together::

        grad, hvp_z = jax.jvp(grad_fn, (position,), (z,))

    ``state`` is the metric's after the update with ``grad``, which is g = grad Uhat / N. ``z`` is
    the probe, and ``hvp_z`` the Hessian of Uhat times z over N. ``product`` names the method of the
    metric whose matrix has the divergence: A, or A^{1/2} with ``"apply_inverse_sqrt"``.
    """
    _, change = jax.jvp(metric.statistic, (grad,), (hvp_z,))

    def of_statistic(statistic: PyTree) -> PyTree:
        return getattr(metric, product)(state._replace(statistic=statistic), z)

    change = jax.tree.map(lambda v, s: s.astype(v.dtype), state.statistic, change)
    return jax.jvp(of_statistic, (state.statistic,), (change,))[1]
