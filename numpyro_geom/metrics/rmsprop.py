"""The RMSprop metric: each coordinate scaled by the root of its mean squared gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import check_number, check_share
from .._util import PyTree
from .base import Metric, MetricState


@dataclasses.dataclass(frozen=True)
class RMSprop(Metric):
    """The diagonal metric of pSGLD.

    Per entry, with g = grad Uhat / N and V = 0 at the start::

        V <- decay V + (1 - decay) g^2,    A = 1 / (sqrt(V) + eps),    A^{1/2} = sqrt(A)

    When: coordinates of very different scales, few correlations. Gradients near zero make A as
    large as 1 / eps: the default ``eps`` only prevents a division by zero.
    Cost per step: two passes over the parameters. Memory: one copy of them.

    Args:
        decay: memory of V, in [0, 1).
        eps: added to sqrt(V), in nats per row and unit of the position; above 0.

    Raises:
        TypeError: for an argument that is not a number.
        ValueError: for an argument out of range.

    Source: Li, Chen, Carlson and Carin, "Preconditioned Stochastic Gradient Langevin Dynamics for
    Deep Neural Networks" (AAAI 2016), Algorithm 1; Yu et al. (TMLR 2023), section 2.1. Deviations:
    none. Where V = 0, d sqrt(V) is taken as 0 (the one-sided limit is infinite).

    >>> metric = RMSprop(decay=0.0, eps=1.0)
    >>> state = metric.update(metric.init(jnp.zeros(2)), jnp.array([1.0, 3.0]))
    >>> metric.apply_inverse(state, jnp.ones(2)).round(3)
    Array([0.5 , 0.25], dtype=float32)
    """

    decay: float = 0.99
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_share("decay", self.decay)
        check_number("eps", self.eps, above=0.0)

    def statistic(self, grad: PyTree) -> PyTree:
        """Entry by entry g * g."""
        return jax.tree.map(jnp.square, grad)

    def from_gradient(self, state: MetricState, grad: PyTree, floor: Any) -> MetricState:
        """The state in which sqrt(V) is sqrt(grad^2 + floor^2)."""
        return MetricState(jax.tree.map(lambda v: (v * v + floor**2).astype(v.dtype), grad))

    def apply_inverse(self, state: MetricState, vector: PyTree) -> PyTree:
        """A x = x / (sqrt(V) + eps)."""
        # the square of apply_inverse_sqrt's factor, so that a step needs only one division
        return jax.tree.map(
            lambda v, x: x * jax.lax.rsqrt(self._scale(v)) ** 2, state.statistic, vector
        )

    def apply_inverse_sqrt(self, state: MetricState, vector: PyTree) -> PyTree:
        """A^{1/2} x = x / sqrt(sqrt(V) + eps)."""
        return jax.tree.map(lambda v, x: x * jax.lax.rsqrt(self._scale(v)), state.statistic, vector)

    def _scale(self, v: jax.Array) -> jax.Array:
        """Diagonal of G; its derivative at V = 0 is 0 and not infinite."""
        root = jnp.sqrt(jnp.where(v > 0, v, 1.0))
        return jnp.where(v > 0, root, 0.0) + self.eps
