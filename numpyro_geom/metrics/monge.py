"""The Monge metric: the identity plus a rank-one term along the mean gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._checks import check_number, check_share
from .._util import PyTree, tree_axpy, tree_size, tree_vdot
from .base import Metric, MetricState


@dataclasses.dataclass(frozen=True)
class Monge(Metric):
    """The metric of the graph of the energy: it shortens steps along the mean gradient.

    With g = grad Uhat / N, a2 = ``alpha2`` and one v for all sites, with v = 0 at the start::

        v <- decay v + (1 - decay) g,    q = 1 + a2 v'v
        G = I + a2 v v',    A = I - (a2 / q) v v',    A^{1/2} = I - a2 / (q + sqrt(q)) v v'

    Without a given number a2 is 1 / r, with r <- decay r + (1 - decay) g'g. As v'v <= r, G lies
    between I and 2 I at any scale of g. One direction then takes up to twice as many steps as with
    the identity.

    When: to reproduce the literature; see the page on metrics for the gain. The mean of g over the
    posterior is 0. So a frozen v only reflects the last steps of warm-up, and G is about I. With
    a given number G has no bound and must follow the position, so the default is then
    ``divergence="auxiliary"``. Cost per step: three passes over the parameters. Memory: one copy.

    Args:
        alpha2: alpha squared, in squared units of the position per squared nat; at least 0, where
            0 is the identity. None for 1 / r.
        decay: memory of v, in [0, 1).

    Raises:
        TypeError: for an argument that is not a number.
        ValueError: for an argument out of range.

    Source: Yu, Hartmann, Williams and Klami, "Scalable Stochastic Gradient Riemannian Langevin
    Dynamics in Non-Diagonal Metrics" (TMLR 2023), section 3.1, Eq. 5. Deviations: 1 / r. The factor
    of A^{1/2} avoids the paper's division by v'v, undefined at v = 0; the values are the same.

    >>> metric = Monge(alpha2=3.0, decay=0.0)
    >>> state = metric.update(metric.init(jnp.zeros(2)), jnp.array([0.0, 1.0]))
    >>> metric.apply_inverse(state, jnp.ones(2))
    Array([1.  , 0.25], dtype=float32)
    """

    scales: ClassVar[bool] = False
    alpha2: float | None = None
    decay: float = 0.99

    def __post_init__(self) -> None:
        if self.alpha2 is not None:
            check_number("alpha2", self.alpha2, least=0.0)
        check_share("decay", self.decay)

    @property
    def default_divergence(self) -> str:  # type: ignore[override]
        """``"auxiliary"`` if the user gave a number: G is then unbounded and must follow theta."""
        return "frozen" if self.alpha2 is None else "auxiliary"

    def statistic(self, grad: PyTree) -> PyTree:
        """The gradient itself; without ``alpha2`` the pair ``(g, g'g)``."""
        return grad if self.alpha2 is not None else (grad, tree_vdot(grad, grad))

    def from_gradient(self, state: MetricState, grad: PyTree, floor: Any) -> MetricState:
        """The state with v = ``grad``, and r = v'v + D floor^2 in D dimensions."""
        if self.alpha2 is not None:
            return MetricState(grad)
        size = tree_size(grad)
        square = tree_vdot(grad, grad) + size * floor**2
        return MetricState((grad, square.astype(state.statistic[1].dtype)))

    def apply_inverse(self, state: MetricState, vector: PyTree) -> PyTree:
        """A x = x - (a2 / q) v (v'x)."""
        v, a2, q = self._parts(state)
        return tree_axpy(-a2 / q * tree_vdot(v, vector), v, vector)

    def apply_inverse_sqrt(self, state: MetricState, vector: PyTree) -> PyTree:
        """A^{1/2} x = x - a2 / (q + sqrt(q)) v (v'x)."""
        v, a2, q = self._parts(state)
        return tree_axpy(-a2 / (q + jnp.sqrt(q)) * tree_vdot(v, vector), v, vector)

    def _parts(self, state: MetricState) -> tuple[PyTree, Any, jax.Array]:
        """The vector v, a2 and q."""
        a2: Any = self.alpha2
        if self.alpha2 is not None:
            v = state.statistic
        else:
            v, r = state.statistic
            a2 = jnp.where(r > 0, 1 / jnp.where(r > 0, r, 1), 0)
        return v, a2, 1 + a2 * tree_vdot(v, v)
