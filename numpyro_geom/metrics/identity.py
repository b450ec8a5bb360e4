"""The identity metric: no preconditioning."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from .._util import PyTree
from .base import Metric, MetricState


@dataclasses.dataclass(frozen=True)
class Identity(Metric):
    """The identity metric, with which SGRLD is plain SGLD.

    G = A = I. There is no statistic, so there is no Gamma term and nothing adapts.

    When: the posterior's scales are similar, or as the reference for the other metrics.
    Cost: none. Invariant distribution: the target, with every choice of ``gamma``.

    Source: Welling and Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics" (2011);
    Yu et al., "Scalable Stochastic Gradient Riemannian Langevin Dynamics in Non-Diagonal Metrics"
    (TMLR 2023), Eq. 4.

    >>> import jax.numpy as jnp
    >>> metric = Identity()
    >>> state = metric.init({"w": jnp.zeros(2)})
    >>> metric.apply_inverse(state, {"w": jnp.array([1.0, 2.0])})
    {'w': Array([1., 2.], dtype=float32)}
    """

    scales: ClassVar[bool] = False

    def statistic(self, grad: PyTree) -> PyTree:
        """Nothing: the empty pytree."""
        return ()

    def update(self, state: MetricState, grad: PyTree) -> MetricState:
        """The state as it was."""
        return state

    def from_gradient(self, state: MetricState, grad: PyTree, floor: Any) -> MetricState:
        """The state as it was."""
        return state

    def apply_inverse(self, state: MetricState, vector: PyTree) -> PyTree:
        """The vector."""
        return vector

    apply_inverse_sqrt = apply_inverse
