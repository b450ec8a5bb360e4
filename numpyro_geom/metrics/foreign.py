"""A metric that is not a `Metric`: an object of any class that has the protocol's methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from .base import Metric


def _own(name: str) -> Callable[..., Any]:
    """A method that calls the wrapped object's own method of that name."""

    def method(self: ForeignMetric, *args: Any) -> Any:
        return getattr(self.metric, name)(*args)

    method.__name__, method.__doc__ = name, "The object's own."
    return method


@dataclasses.dataclass(frozen=True, repr=False)
class ForeignMetric(Metric):
    """A metric of another class; `Metric` gives the defaults for missing parts.

    Attributes:
        metric: the object itself.
        interval: interval of the object; `dataclasses.replace` changes it in the object too.
    """

    metric: Any
    interval: int | None = 1

    def __post_init__(self) -> None:
        """Copy the attributes that the object declares."""
        if self.interval != getattr(self.metric, "interval", 1):
            if not dataclasses.is_dataclass(self.metric):
                raise TypeError(
                    "interval=None means one epoch and needs a metric that is a dataclass, got "
                    f"{type(self.metric).__name__}: make it one, or give the interval in steps"
                )
            changed = dataclasses.replace(self.metric, interval=self.interval)  # type: ignore
            object.__setattr__(self, "metric", changed)
        for name in ("decay", "default_gamma", "is_diagonal"):
            object.__setattr__(self, name, getattr(self.metric, name, getattr(Metric, name)))

    init = _own("init")
    statistic = _own("statistic")
    update = _own("update")
    from_gradient = _own("from_gradient")
    apply_inverse = _own("apply_inverse")
    apply_inverse_sqrt = _own("apply_inverse_sqrt")

    @property
    def has_auxiliary(self) -> bool:
        """Whether the object has a ``from_gradient``."""
        return hasattr(self.metric, "from_gradient")

    def keep_if(self, good: jax.Array, new: Any, old: Any) -> Any:
        """The object's own ``keep_if``, or the default."""
        own = getattr(self.metric, "keep_if", super().keep_if)
        return own(good, new, old)

    def __repr__(self) -> str:
        return repr(self.metric)

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of the object."""
        if name == "metric" or name.startswith("__"):  # unpickling asks for these
            raise AttributeError(name)
        return getattr(self.metric, name)
