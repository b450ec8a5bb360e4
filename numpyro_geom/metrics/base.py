"""The metric protocol, and the base class with the moving-average machinery.

A metric is a small immutable object with pure methods on pytrees. It turns a stream of gradients
g = grad Uhat / N into a preconditioner A = G^-1, in the update of the position

    theta' = theta - h A grad Uhat + tau h Gamma + sqrt(2 h tau) A^{1/2} xi.

Any object with these methods is a metric; none of the classes here needs to be a base of it:

- ``init(position) -> state``: a NamedTuple with a field ``statistic``, the pytree from which A is
  computed and in which A is differentiable;
- ``statistic(grad) -> pytree``: the increment s(g), in the structure of ``state.statistic``;
- ``update(state, grad) -> state``: V <- decay V + (1 - decay) s(g), or a rule of one's own;
- ``apply_inverse(state, vector)``: A x, and ``apply_inverse_sqrt(state, vector)``: A^{1/2} x;
- ``decay``: memory of the statistic, in [0, 1); 0 is no memory.

Optional: ``interval`` (steps between recomputations of A, 1 unless given; None is one epoch, which
a kernel fills in with `dataclasses.replace`), ``is_diagonal`` (True where A is a diagonal matrix,
which the correction of minibatch noise needs), ``default_gamma`` (the treatment of Gamma that
`SGRLD` takes if none is given; ``"frozen"`` without it), ``from_gradient(state, grad, floor)``
(A as a function of one gradient-like vector, which the auxiliary metric needs),
``apply_sqrt(state, vector)`` (G^{1/2} x) and ``log_det(state)`` (log det G).

With the base class a metric is its statistic and its two products. Here a diagonal metric with a
cube root in place of RMSprop's square root::

    @dataclasses.dataclass(frozen=True)
    class CubeRoot(Metric):
        decay: float = 0.99
        eps: float = 1e-4

        def statistic(self, grad):
            return jax.tree.map(jnp.square, grad)

        def apply_inverse(self, state, vector):
            return jax.tree.map(
                lambda v, x: x / (v + self.eps) ** (1 / 3), state.statistic, vector
            )

        def apply_inverse_sqrt(self, state, vector):
            return jax.tree.map(
                lambda v, x: x / (v + self.eps) ** (1 / 6), state.statistic, vector
            )

    kernel = SGRLD(model, metric=CubeRoot())
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import check_int, check_number

PyTree = Any

PROTOCOL = ("init", "statistic", "update", "apply_inverse", "apply_inverse_sqrt")
"""Methods that every metric has; ``decay`` is the one attribute."""


class MetricState(NamedTuple):
    """State of a metric without an update interval.

    Attributes:
        statistic: V, the pytree from which A is computed; no leaves for a constant metric.
    """

    statistic: PyTree


class Metric(ABC):
    """Base class of metrics whose statistic is an exponential moving average from zero.

    V <- decay V + (1 - decay) s(g) at every step, V = 0 at the start. A subclass is a frozen
    dataclass with a field ``decay``; it supplies ``statistic``, ``apply_inverse`` and
    ``apply_inverse_sqrt``, and may override the rest. See the module's text for the protocol and
    an example.

    Attributes:
        is_diagonal: whether A is a diagonal matrix.
        decay: memory of the statistic, in [0, 1).
        interval: steps between recomputations of A; None is one epoch.
    """

    is_diagonal: ClassVar[bool] = False
    default_gamma: ClassVar[str] = "frozen"
    decay: float
    interval: int | None = 1

    @abstractmethod
    def statistic(self, grad: PyTree) -> PyTree:
        """The increment s(g).

        Args:
            grad: g = grad Uhat / N, a pytree like the position, in nats per row and unit of it.
        """

    @abstractmethod
    def apply_inverse(self, state: Any, vector: PyTree) -> PyTree:
        """A x = G^-1 x, a pytree like ``vector``."""

    @abstractmethod
    def apply_inverse_sqrt(self, state: Any, vector: PyTree) -> PyTree:
        """A^{1/2} x with the symmetric positive definite root, a pytree like ``vector``."""

    def init(self, position: PyTree) -> Any:
        """The state before any gradient: V = 0.

        Args:
            position: unconstrained position, any pytree of floating-point arrays.
        """
        return MetricState(zeros_of(jax.eval_shape(self.statistic, position)))

    def update(self, state: Any, grad: PyTree) -> Any:
        """The state after a gradient: V <- decay V + (1 - decay) s(g).

        Args:
            state: the state before.
            grad: g = grad Uhat / N, a pytree like the position.
        """
        return state._replace(statistic=self.average(state.statistic, grad))

    def average(self, average: PyTree, grad: PyTree) -> PyTree:
        """``decay * average + (1 - decay) * statistic(grad)``, in the dtypes of ``average``."""
        return jax.tree.map(
            lambda v, s: (self.decay * v + (1.0 - self.decay) * s).astype(v.dtype),
            average,
            self.statistic(grad),
        )


def get_metric(metric: Any) -> Any:
    """The metric of a name, or the object itself where it is a metric.

    Args:
        metric: ``"identity"``, ``"rmsprop"``, ``"wenzel"``, ``"monge"`` or ``"shampoo"`` (each with
            its default settings), or an object that follows the protocol.

    Returns:
        A metric.

    Raises:
        ValueError: for an unknown name.
        TypeError: for a class, and for an object without the protocol's methods.
    """
    from . import METRICS  # not above: the metrics import this module

    if isinstance(metric, str):
        if metric not in METRICS:
            raise ValueError(
                f"metric must be one of {sorted(METRICS)} or a metric object, got {metric!r}"
            )
        return METRICS[metric]()
    if isinstance(metric, type):
        raise TypeError(
            f"metric must be an object and not a class: write {metric.__name__}() in place of "
            f"{metric.__name__}; methods {', '.join(PROTOCOL)} are looked up on the object"
        )
    missing = [name for name in PROTOCOL if not callable(getattr(metric, name, None))]
    if not hasattr(metric, "decay"):
        missing.append("decay")
    if missing:
        raise TypeError(
            f"metric must be one of {sorted(METRICS)} or an object with {', '.join(PROTOCOL)} and "
            f"decay; got {metric!r} of type {type(metric).__name__}, which lacks "
            f"{', '.join(missing)}"
        )
    return metric


def zeros_of(shapes: PyTree) -> PyTree:
    """Zeros in the shapes and dtypes of a pytree."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def check_decay(decay: Any) -> None:
    """Raise unless ``decay`` is a number in [0, 1)."""
    if check_number("decay", decay, least=0.0) >= 1:
        raise ValueError(
            f"decay must be a number in [0, 1), got {decay!r}: it is the weight of the past, and "
            "1 would never learn"
        )


def check_interval(interval: Any) -> None:
    """Raise unless ``interval`` is None or an integer of at least 1."""
    if interval is not None:
        check_int("interval", interval, least=1)
