"""Less injected noise where the minibatch gradient already brings some.

If the gradient has noise of covariance C, a Langevin step adds noise of covariance 2 h tau A + h^2
A C A. The target needs only the first term. With a diagonal A and an estimate of diag C the
injected noise is

    2 h tau A - h^2 A diag(C) A,

so the noise h^2 A (C - diag C) A remains in excess. The two halves of a batch have independent
gradients g1 and g2 with twice the noise variance of their mean. So (g1 - g2)^2 / 4 estimates diag C
of the mean without bias. Where the noise is normal, the estimate is independent of the mean's own
error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._util import PyTree, tree_scale
from ..metrics import METRICS
from ..model.minibatch import Subsampling
from ..model.potential import Potential
from ..sampling.algorithm import check_noisy
from ..sampling.settings import Settings

DECAY = 0.998
"""Memory of the noise estimate: its relative standard error is sqrt(2 (1 - decay) / 2) = 0.045."""
NOISE_SETTLING_STEPS = 500


class NoiseEstimate(NamedTuple):
    """Estimate of the gradient's noise.

    Attributes:
        variance: running mean of (g1 - g2)^2 / 4, of gradients over all data, times ``weight``.
        weight: weight of the running mean; it starts at zero.
        clamped: share of the entries whose noise could not be removed in full, a running mean
            over steps.
    """

    variance: PyTree
    weight: jax.Array
    clamped: jax.Array


def check_noise_correction(settings: Settings) -> None:
    """Raise if a smaller injected noise cannot compensate the gradient's noise."""
    metric, batching = settings.metric, settings.batching
    if not metric.is_diagonal:
        diagonal = [name for name, kind in METRICS.items() if kind.is_diagonal]
        raise ValueError(
            f"noise_correction=True needs a diagonal metric: expected one of {diagonal} or an "
            f"object with `is_diagonal = True`, got {type(metric).__name__}"
        )
    if batching != "replacement":
        raise ValueError(
            f"noise_correction=True needs batching='replacement', got {batching!r}: the rows of a "
            "batch must be independent, for the correction to count their errors"
        )
    if settings.temperature == 0:
        raise ValueError(
            "noise_correction=True needs temperature > 0, got 0: no noise is injected that could "
            "be lowered. Raise temperature, or drop noise_correction"
        )


def check_halves(potential: Potential, plan: Subsampling | None) -> None:
    """Raise if there is no noise, or if batches have no equal halves."""
    check_noisy(potential, "noise_correction=True needs minibatch noise", "drop noise_correction")
    batches = {} if plan is None else plan.batch_sizes
    odd = {plate: rows for plate, rows in batches.items() if rows % 2}
    if odd:
        raise ValueError(
            f"noise_correction=True compares halves of a batch, and these are odd: {odd}. "
            "Expected an even batch_size"
        )


def noise_factor(settings: Settings) -> float:
    """Variance of the gradient, relative to the whole batch's gradient."""
    # two evaluations of a stochastic function, but two halves of a batch of rows
    return 0.5 if settings.model is None else 1.0


def init_noise(position: PyTree) -> NoiseEstimate:
    """The state before any gradient."""
    zero = jnp.zeros((), jnp.result_type(*jax.tree.leaves(position)))
    return NoiseEstimate(jax.tree.map(jnp.zeros_like, position), zero, zero)


def noise_diagonal(state: NoiseEstimate) -> PyTree:
    """The estimate of diag C, a pytree like the position."""
    return tree_scale(1 / jnp.maximum(state.weight, 1e-30), state.variance)


def halves(
    potential: Potential, position: PyTree, batch: Any, old: NoiseEstimate
) -> tuple[jax.Array, PyTree, NoiseEstimate]:
    """Energy and gradient of a batch, and the noise estimate updated from its halves."""
    first, second = (
        jax.value_and_grad(potential.energy)(position, half) for half in potential.split(batch, 2)
    )
    energy = (first[0] + second[0]) / 2
    grad = jax.tree.map(lambda a, b: (a + b) / 2, first[1], second[1])
    spread = jax.tree.map(lambda a, b: jnp.square(a - b) / 4, first[1], second[1])
    noise = old._replace(
        variance=jax.tree.map(_mix, old.variance, spread), weight=_mix(old.weight, 1.0)
    )
    return energy, grad, noise


def count_clamped(noise: NoiseEstimate, missing: PyTree) -> NoiseEstimate:
    """The state after a step that needed ``missing`` injected variances, some perhaps negative."""
    size = sum(x.size for x in jax.tree.leaves(missing))
    share = sum(jnp.sum(x < 0) for x in jax.tree.leaves(missing)) / size
    return noise._replace(clamped=_mix(noise.clamped, share))


def _mix(old: jax.Array, new: Any) -> jax.Array:
    return (old + (1 - DECAY) * (new - old)).astype(old.dtype)
