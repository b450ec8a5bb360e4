"""The Wenzel metric: one scale for each site, from its mean squared gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import check_int, check_number, check_share
from .._util import PyTree
from .base import Metric


class WenzelState(NamedTuple):
    """State of `Wenzel`.

    Attributes:
        statistic: per site the scalar V from which A is computed, constant within an interval.
        running: per site the scalar moving average, which replaces V at each refresh.
        steps: steps since the last refresh, int32.
    """

    statistic: PyTree
    running: PyTree
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Wenzel(Metric):
    """The layer-wise metric: a multiple of the identity for each site.

    Per site, with g = grad Uhat / N and V = 1 at the start::

        V <- decay V + (1 - decay) mean(g^2),   s = sqrt(eps + V),   A = min over sites of s / s

    A is 1 for the site with the smallest gradients and smaller for the others. It is recomputed
    every ``interval`` steps. Until the first recomputation A is the identity.

    When: a network whose layers have gradients of different sizes. This is the mildest metric.
    Cost per step: one pass over the parameters. Memory: a few scalars per site.

    Args:
        decay: memory of V, in [0, 1).
        eps: added to V, in squared nats per row and unit of the position; above 0.
        interval: steps between recomputations of A. None is one epoch; a kernel replaces None by
            the number of steps.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for an argument out of range, and from ``update`` while ``interval`` is None.

    Source: Wenzel et al., "How Good is the Bayes Posterior in Deep Neural Networks Really?" (ICML
    2020), as in Yu et al. (TMLR 2023), section 2.1. Deviation: the average is of mean(g^2) and not
    of g^2 entry by entry. Only the mean is ever used, so the values are the same.

    >>> metric = Wenzel(decay=0.0, interval=1)
    >>> position = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
    >>> grad = {"a": jnp.full(2, 4.0), "b": jnp.full(3, 2.0)}
    >>> state = metric.update(metric.init(position), grad)
    >>> metric.apply_inverse(state, grad)
    {'a': Array([2., 2.], dtype=float32), 'b': Array([2., 2., 2.], dtype=float32)}
    """

    scales: ClassVar[bool] = False
    decay: float = 0.99
    eps: float = 1e-8
    interval: int | None = None

    def __post_init__(self) -> None:
        check_share("decay", self.decay)
        check_number("eps", self.eps, above=0.0)
        if self.interval is not None:
            check_int("interval", self.interval)

    def statistic(self, grad: PyTree) -> PyTree:
        """Mean of g * g, one scalar per site."""
        return jax.tree.map(lambda g: jnp.mean(jnp.square(g)), grad)

    def init(self, position: PyTree) -> WenzelState:
        """The state before any gradient: V = 1, A = I."""
        ones = jax.tree.map(lambda x: jnp.ones((), x.dtype), position)
        return WenzelState(ones, ones, jnp.zeros((), jnp.int32))

    def update(self, state: WenzelState, grad: PyTree) -> WenzelState:
        """The state after a gradient; A only changes at every ``interval``-th update."""
        running = self.average(state.running, grad)
        steps = (state.steps + 1) % self.steps_between_updates()
        due = steps == 0
        # Selecting a few scalars is cheaper than any branch.
        statistic = jax.tree.map(
            lambda new, old: jnp.where(due, new, old), running, state.statistic
        )
        return state._replace(statistic=statistic, running=running, steps=steps)

    def from_gradient(self, state: WenzelState, grad: PyTree, floor: Any) -> WenzelState:
        """The state in which V is the site's mean of grad^2 + floor^2, at once."""
        statistic = jax.tree.map(
            lambda s, old: (s + floor**2).astype(old.dtype), self.statistic(grad), state.statistic
        )
        return state._replace(statistic=statistic, running=statistic)

    def apply_inverse(self, state: WenzelState, vector: PyTree) -> PyTree:
        """A x = (min s) x / s."""
        return self._multiply(state, vector, -1.0)

    def apply_inverse_sqrt(self, state: WenzelState, vector: PyTree) -> PyTree:
        """A^{1/2} x = sqrt(min s / s) x."""
        return self._multiply(state, vector, -0.5)

    def _scales(self, state: WenzelState) -> PyTree:
        """Diagonal of G, one scalar per site: s / min s."""
        roots = jax.tree.map(lambda v: jnp.sqrt(v + self.eps), state.statistic)
        least = jnp.min(jnp.stack(jax.tree.leaves(roots)))
        return jax.tree.map(lambda s: s / least, roots)

    def _multiply(self, state: WenzelState, vector: PyTree, power: float) -> PyTree:
        return jax.tree.map(
            lambda s, x: x * (s**power).astype(x.dtype), self._scales(state), vector
        )
