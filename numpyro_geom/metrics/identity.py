"""The identity metric: no preconditioning."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from .._checks import check_number
from .._util import PyTree, tree_scale
from .base import Metric, MetricState


@dataclasses.dataclass(frozen=True)
class Identity(Metric):
    """The identity metric, with which SGRLD is plain SGLD.

    A = c I with a number c, 1 by default. There is no statistic, so there is no Gamma term and
    nothing adapts. With a number for each group of sites, as in
    ``metric={"*.bias": Identity(0.1), "*": "identity"}``, `SGRLD` moves some sites with c times the
    step, and kernels with a momentum give them the mass 1 / c.

    When: the posterior's scales are similar, or as the reference for the other metrics.
    Cost: none. Invariant distribution: the target, with every choice of ``divergence``.

    Args:
        scale: the number c, above 0.

    Raises:
        TypeError: if ``scale`` is not a number.
        ValueError: if it is not above 0.

    Source: Welling and Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics" (2011);
    Yu et al., "Scalable Stochastic Gradient Riemannian Langevin Dynamics in Non-Diagonal Metrics"
    (TMLR 2023), Eq. 4.

    >>> import jax.numpy as jnp
    >>> metric = Identity(2.0)
    >>> state = metric.init({"w": jnp.zeros(2)})
    >>> metric.apply_inverse(state, {"w": jnp.array([1.0, 2.0])})
    {'w': Array([2., 4.], dtype=float32)}
    """

    scale: float = 1.0
    scales: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0.0)

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
        """C times the vector."""
        return vector if self.scale == 1 else tree_scale(self.scale, vector)

    def apply_inverse_sqrt(self, state: MetricState, vector: PyTree) -> PyTree:
        """The square root of c times the vector."""
        return vector if self.scale == 1 else tree_scale(self.scale**0.5, vector)
