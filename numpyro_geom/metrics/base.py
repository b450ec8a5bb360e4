"""The metric protocol, and the base class with the moving-average machinery.

A metric is a small immutable object with pure methods on pytrees. It turns a stream of gradients
g = grad Uhat / N into a preconditioner A = G^-1. The position changes by

    theta' = theta - h A grad Uhat + tau h Gamma + sqrt(2 h tau) A^{1/2} xi.

A subclass of `Metric` only defines its statistic and its two products; the page on metrics has an
example.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .._util import PyTree, tree_where


class MetricState(NamedTuple):
    """State of a metric without an update interval.

    Attributes:
        statistic: V, the pytree from which A is computed; no leaves for a constant metric.
    """

    statistic: PyTree


class Metric(ABC):
    """Base class of metrics whose statistic is an exponential moving average from zero.

    V <- decay V + (1 - decay) s(g) at every step, with V = 0 at the start. A subclass is a frozen
    dataclass, usually with a field ``decay``. It supplies ``statistic``, ``apply_inverse`` and
    ``apply_inverse_sqrt``, and may override the rest. The state is a NamedTuple with a field
    ``statistic``.

    Attributes:
        decay: memory of the statistic, in [0, 1); 0 is no memory.
        interval: steps between recomputations of A. None is one epoch; a kernel replaces None by
            the number of steps, see `with_interval`.
        default_divergence: the treatment of Gamma that `SGRLD` takes if none is given.
        has_derivative: whether A is differentiable in the field ``statistic`` of the state, as
            Gamma needs.
        scales: whether A fits the step to each parameter, as a learned scale does. In many
            dimensions there is then no other scale by default.
    """

    decay: float = 0.0
    interval: int | None = 1
    default_divergence: ClassVar[str] = "frozen"
    has_derivative: ClassVar[bool] = True
    scales: ClassVar[bool] = True

    @property
    def has_auxiliary(self) -> bool:
        """Whether the metric has a ``from_gradient``, as ``divergence="auxiliary"`` needs."""
        return type(self).from_gradient is not Metric.from_gradient

    @abstractmethod
    def statistic(self, grad: PyTree) -> PyTree:
        """The increment s(g), structured like ``state.statistic``; g is like the position."""

    @abstractmethod
    def apply_inverse(self, state: Any, vector: PyTree) -> PyTree:
        """A x = G^-1 x, a pytree like ``vector``."""

    @abstractmethod
    def apply_inverse_sqrt(self, state: Any, vector: PyTree) -> PyTree:
        """A^{1/2} x with the symmetric positive definite root, a pytree like ``vector``."""

    def init(self, position: PyTree) -> Any:
        """The state before any gradient, V = 0, at a position (any pytree of floats)."""
        shapes = jax.eval_shape(self.statistic, position)
        return MetricState(jax.tree.map(jnp.zeros_like, shapes))

    def update(self, state: Any, grad: PyTree) -> Any:
        """The state after a gradient g: V <- decay V + (1 - decay) s(g)."""
        return state._replace(statistic=self.average(state.statistic, grad))

    def keep_if(self, good: jax.Array, new: Any, old: Any) -> Any:
        """The state after a step: ``new``, or a state like ``old`` if the step is undone.

        A metric may keep those fields of ``new`` that it recomputes before their next use. This
        saves work for large fields: otherwise every step would read both and write one.

        Args:
            good: boolean scalar, whether the step is kept.
            new: the state after the step.
            old: the state before the step.
        """
        return tree_where(good, new, old)

    def from_gradient(self, state: Any, grad: PyTree, floor: Any) -> Any:
        """Optional: the state whose A is a function of one gradient-like vector alone.

        Args:
            state: a state of this metric, for everything that does not depend on the vector.
            grad: a vector like g.
            floor: standard deviation of the vector's noise, a scalar in the vector's units. A has
                to be smooth on this scale.
        """
        raise NotImplementedError(
            "divergence='auxiliary' needs a method from_gradient, and "
            f"{type(self).__name__} has none"
        )

    def average(self, average: PyTree, grad: PyTree) -> PyTree:
        """``decay * average + (1 - decay) * statistic(grad)``, in the dtypes of ``average``."""
        return jax.tree.map(
            lambda v, s: (self.decay * v + (1.0 - self.decay) * s).astype(v.dtype),
            average,
            self.statistic(grad),
        )

    def steps_between_updates(self) -> int:
        """``interval``. Raises if it is None: only a kernel turns None into a number."""
        if self.interval is None:
            name = type(self).__name__
            raise ValueError(
                f"{name}(interval=None) means one epoch, and outside a kernel nothing says how "
                f"many steps that is: give a number of steps, {name}(interval=...)"
            )
        return self.interval

    def with_interval(self, steps: int) -> Metric:
        """The metric, with an interval of one epoch (None) replaced by a number of steps."""
        if self.interval is not None:
            return self
        this: Any = self  # a metric need not be a dataclass
        if not dataclasses.is_dataclass(type(self)):
            raise TypeError(
                "interval=None means one epoch and needs a metric that is a dataclass, got "
                f"{type(self).__name__}: make it one, or give the interval in steps"
            )
        changed: Metric = dataclasses.replace(this, interval=steps)
        return changed


MetricLike: TypeAlias = str | Metric | Mapping[str, Any]
"""What kernels take as ``metric``: a name, a metric, or a dict from patterns of site names to
metrics."""
