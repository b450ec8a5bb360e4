"""The Monge metric: the identity plus a rank-one term along the mean gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._checks import check_number
from .._util import tree_axpy, tree_vdot
from .base import Metric, MetricState, check_decay

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Monge(Metric):
    """The metric of the graph of the energy: steps are short along the gradient.

    With g = grad Uhat / N, a2 = ``alpha2``, one v over all sites, v = 0 at the start::

        v <- decay v + (1 - decay) g,    q = 1 + a2 v'v
        G = I + a2 v v',    A = I - (a2 / q) v v',    A^{1/2} = I - a2 / (q + sqrt(q)) v v'

    When: targets with regions of strong curvature (funnels), where it is exact, cheap and keeps
    steps short; in networks only after tuning ``alpha2``. The scale of g falls with N, so does
    the useful ``alpha2`` rise. ``alpha2 = 0`` is the identity. The metric lives by following the
    position: frozen after warm-up it shortens steps along one gradient, the last one, and a step
    size that fits there can be too large elsewhere. So the default treatment of Gamma is
    ``"auxiliary"``.
    Cost per step: three passes over the parameters, memory of one copy of them.

    Args:
        alpha2: alpha squared, in squared units of the position per squared nat; at least 0.
        decay: memory of v, in [0, 1).

    Raises:
        TypeError: for an argument that is not a number.
        ValueError: for one out of range.

    Source: Yu, Hartmann, Williams and Klami, "Scalable Stochastic Gradient Riemannian Langevin
    Dynamics in Non-Diagonal Metrics" (TMLR 2023), section 3.1, Eq. 5. Deviation: the factor of
    A^{1/2} is written without the paper's division by v'v, which fails at v = 0; same values.

    >>> metric = Monge(alpha2=3.0, decay=0.0)
    >>> state = metric.update(metric.init(jnp.zeros(2)), jnp.array([0.0, 1.0]))
    >>> metric.apply_inverse(state, jnp.ones(2))
    Array([1.  , 0.25], dtype=float32)
    """

    default_gamma: ClassVar[str] = "auxiliary"
    alpha2: float = 1.0
    decay: float = 0.9

    def __post_init__(self) -> None:
        check_number("alpha2", self.alpha2, least=0.0)
        check_decay(self.decay)

    def statistic(self, grad: PyTree) -> PyTree:
        """The gradient itself."""
        return grad

    def from_gradient(self, state: MetricState, grad: PyTree, floor: Any) -> MetricState:
        """The state with v = ``grad``; G >= I, so ``floor`` is not needed."""
        return MetricState(grad)

    def apply_inverse(self, state: MetricState, vector: PyTree) -> PyTree:
        """A x = x - (a2 / q) v (v'x)."""
        q = self._q(state)
        return self._add(state, vector, -self.alpha2 / q)

    def apply_inverse_sqrt(self, state: MetricState, vector: PyTree) -> PyTree:
        """A^{1/2} x = x - a2 / (q + sqrt(q)) v (v'x)."""
        q = self._q(state)
        return self._add(state, vector, -self.alpha2 / (q + jnp.sqrt(q)))

    def apply_sqrt(self, state: MetricState, vector: PyTree) -> PyTree:
        """G^{1/2} x = x + a2 / (1 + sqrt(q)) v (v'x)."""
        return self._add(state, vector, self.alpha2 / (1 + jnp.sqrt(self._q(state))))

    def log_det(self, state: MetricState) -> jax.Array:
        """Log det G = log(1 + a2 v'v)."""
        return jnp.log1p(self.alpha2 * tree_vdot(state.statistic, state.statistic))

    def _q(self, state: MetricState) -> jax.Array:
        return 1 + self.alpha2 * tree_vdot(state.statistic, state.statistic)

    @staticmethod
    def _add(state: MetricState, x: PyTree, factor: jax.Array) -> PyTree:
        return tree_axpy(factor * tree_vdot(state.statistic, x), state.statistic, x)
