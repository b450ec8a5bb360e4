"""Metrics by name, and different metrics for different sites, selected by patterns of names."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import jax

from .._checks import check_number
from .._util import PyTree, tree_scale
from .base import Metric, check_interval
from .identity import Identity
from .monge import Monge
from .rmsprop import RMSprop
from .shampoo import Shampoo
from .wenzel import Wenzel

METRICS: dict[str, type[Metric]] = {
    "identity": Identity,
    "rmsprop": RMSprop,
    "wenzel": Wenzel,
    "monge": Monge,
    "shampoo": Shampoo,
}
"""Metrics by name."""


class BySiteState(NamedTuple):
    """State of `BySite`.

    Attributes:
        statistic: the statistics of the metrics, a tuple in their order.
        rest: the states of the metrics without the statistic.
    """

    statistic: tuple
    rest: tuple


def get_metric(metric: Any) -> Metric:
    """The metric with this name, or the object itself if it is a metric.

    Args:
        metric: a `MetricLike`: a name in `METRICS` (with default settings), a metric, or a dict
            from patterns of site names to metrics, see `BySite`.

    Raises:
        ValueError: for an unknown name.
        TypeError: for a class, and for an object that is no metric.
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, Mapping):
        return BySite(metric)
    if isinstance(metric, str) and metric in METRICS:
        return METRICS[metric]()
    expected = f"metric must be one of {sorted(METRICS)} or an object of a subclass of Metric"
    if isinstance(metric, str):
        close = difflib.get_close_matches(metric.lower(), METRICS, 1)
        advice = f": did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{expected}, got {metric!r}{advice}")
    if isinstance(metric, type):
        raise TypeError(
            f"metric must be an object and not a class: write {metric.__name__}() in place of "
            f"{metric.__name__}"
        )
    raise TypeError(f"{expected}, got {metric!r} of type {type(metric).__name__}")


@dataclasses.dataclass(frozen=True)
class BySite(Metric):
    """One metric for each group of sites: A is block diagonal.

    A kernel makes a `BySite` of a dict, as in ``metric={"head.*": "shampoo", "*": "identity"}``. A
    site belongs to the first pattern that its name matches. A metric sees only the gradients of its
    own sites: the smallest scale of `Wenzel` and the inner product of `Monge` are taken over these
    sites. Metrics differ in the units of A, and so need different steps. `Scaled` multiplies the A
    of one metric.

    Args:
        metrics: pattern -> metric, or pairs of them. In a pattern ``*`` stands for anything, ``?``
            for one character and ``[ab]`` for one of the listed characters. In nested positions
            the name of an entry is its path, joined by dots.
        interval: number of steps that replaces an interval of one epoch (None) of a metric. None
            leaves the choice to the kernel.

    Raises:
        ValueError: if there is no pattern; when a chain starts, for sites that match no pattern
            and for patterns that get no site.
        TypeError: for objects that are not metrics.

    >>> import jax.numpy as jnp
    >>> metric = BySite({"a": Scaled(0.25), "*": "identity"})
    >>> position = {"a": jnp.ones(2), "b": jnp.ones(1)}
    >>> metric.apply_inverse(metric.init(position), position)
    {'a': Array([0.25, 0.25], dtype=float32), 'b': Array([1.], dtype=float32)}
    """

    metrics: Any
    interval: int | None = None
    # the auxiliary gradient has a single memory and a single interval
    has_auxiliary: ClassVar[bool] = False

    def __post_init__(self) -> None:
        pairs = self.metrics.items() if isinstance(self.metrics, Mapping) else self.metrics
        try:
            pairs = tuple((pattern, metric) for pattern, metric in pairs)
        except (TypeError, ValueError):
            raise TypeError(
                "metrics must be a dict of patterns and metrics, such as {'*': 'rmsprop'}, or "
                f"pairs of them, got {self.metrics!r}"
            ) from None
        if not pairs:
            raise ValueError(
                "expected at least one pattern with its metric, such as {'*': 'rmsprop'}, got none"
            )
        for pattern, _ in pairs:
            if not isinstance(pattern, str):
                raise TypeError(f"a pattern must be a string such as 'head.*', got {pattern!r}")
        check_interval(self.interval)
        pairs = tuple((pattern, _in_steps(metric, self.interval)) for pattern, metric in pairs)
        members = [metric for _, metric in pairs]
        intervals = [m.interval for m in members if m.interval is not None]
        _set(
            self,
            metrics=pairs,
            interval=max(intervals) if len(intervals) == len(members) else None,
            decay=max(m.decay for m in members),
        )

    def statistic(self, grad: PyTree) -> tuple:
        """The statistics of the metrics."""
        return tuple(m.statistic(g) for m, g in self._with_parts(grad))

    def init(self, position: PyTree) -> BySiteState:
        """The states of the metrics before any gradient."""
        self._check(position)
        return _packed(m.init(p) for m, p in self._with_parts(position))

    def update(self, state: BySiteState, grad: PyTree) -> BySiteState:
        """The states after a gradient."""
        parts = zip(self._with_parts(grad), _unpacked(state), strict=True)
        return _packed(m.update(s, g) for (m, g), s in parts)

    def keep_if(self, good: jax.Array, new: BySiteState, old: BySiteState) -> BySiteState:
        """The result of each metric's own ``keep_if``."""
        parts = zip(self.metrics, _unpacked(new), _unpacked(old), strict=True)
        return _packed(m.keep_if(good, s, o) for (_, m), s, o in parts)

    def apply_inverse(self, state: BySiteState, vector: PyTree) -> PyTree:
        """A x, block by block."""
        return self._product("apply_inverse", state, vector)

    def apply_inverse_sqrt(self, state: BySiteState, vector: PyTree) -> PyTree:
        """A^{1/2} x, block by block."""
        return self._product("apply_inverse_sqrt", state, vector)

    def _product(self, method: str, state: BySiteState, vector: PyTree) -> PyTree:
        parts = zip(self._with_parts(vector), _unpacked(state), strict=True)
        products = [iter(getattr(m, method)(s, x)) for (m, x), s in parts]
        owners, treedef = self._owners(vector)
        return jax.tree.unflatten(treedef, [next(products[k]) for k in owners])

    def _with_parts(self, tree: PyTree) -> Iterator[tuple[Metric, list]]:
        """Each metric, with the leaves of its sites."""
        owners, leaves = self._owners(tree)[0], jax.tree.leaves(tree)
        for number, (_, metric) in enumerate(self.metrics):
            yield metric, [x for k, x in zip(owners, leaves, strict=True) if k == number]

    def _owners(self, tree: PyTree) -> tuple[list[int], Any]:
        """Each leaf's metric number; the number of metrics where no pattern matches."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        owners = [
            next(
                (k for k, (p, _) in enumerate(self.metrics) if fnmatchcase(name, p)),
                len(self.metrics),
            )
            for name in (_name(path) for path, _ in leaves)
        ]
        return owners, treedef

    def _check(self, position: PyTree) -> None:
        """Raise unless every site has a metric, and every metric a site."""
        names = [_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(position)[0]]
        owners, _ = self._owners(position)
        patterns = [pattern for pattern, _ in self.metrics]
        without = [n for n, owner in zip(names, owners, strict=True) if owner == len(patterns)]
        if without:
            raise ValueError(
                f"metric has patterns {patterns}, and sites {without} match none: add one, or "
                "'*' for all that remain"
            )
        idle = [pattern for k, pattern in enumerate(patterns) if k not in owners]
        if idle:
            raise ValueError(
                f"metric has patterns {idle} for which there is no site: the first pattern that "
                f"matches counts, and sites are {names}"
            )


@dataclasses.dataclass(frozen=True)
class Scaled(Metric):
    """A metric times a number: it changes the step of its sites.

    A is ``by`` times the A of ``metric``. For its sites `SGRLD` then has the step size ``by`` h,
    and kernels with a momentum have the mass G / ``by``. The invariant distribution stays the same.

    Args:
        by: the multiplier of A, above 0.
        metric: a name or a metric.
        interval: number of steps that replaces an interval of one epoch of the metric.

    Raises:
        TypeError: if ``by`` is not a number or ``metric`` is not a metric.
        ValueError: if ``by`` is not above 0.

    >>> import jax.numpy as jnp
    >>> metric = Scaled(4.0)
    >>> metric.apply_inverse_sqrt(metric.init(jnp.ones(1)), jnp.ones(1))
    Array([2.], dtype=float32)
    """

    by: float
    metric: Any = "identity"
    interval: int | None = None
    has_auxiliary: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("by", self.by, above=0.0)
        check_interval(self.interval)
        metric = _in_steps(self.metric, self.interval)
        _set(
            self,
            metric=metric,
            interval=metric.interval,
            decay=metric.decay,
            scales=metric.scales,
        )

    def statistic(self, grad: PyTree) -> PyTree:
        """The statistic of ``metric``."""
        return self.metric.statistic(grad)

    def init(self, position: PyTree) -> Any:
        """The first state of ``metric``."""
        return self.metric.init(position)

    def update(self, state: Any, grad: PyTree) -> Any:
        """The updated state of ``metric``."""
        return self.metric.update(state, grad)

    def keep_if(self, good: jax.Array, new: Any, old: Any) -> Any:
        """The result of ``metric.keep_if``."""
        return self.metric.keep_if(good, new, old)

    def apply_inverse(self, state: Any, vector: PyTree) -> PyTree:
        """``by`` times the product with A of ``metric``."""
        return tree_scale(self.by, self.metric.apply_inverse(state, vector))

    def apply_inverse_sqrt(self, state: Any, vector: PyTree) -> PyTree:
        """The square root of ``by`` times the product with A^{1/2} of ``metric``."""
        return tree_scale(self.by**0.5, self.metric.apply_inverse_sqrt(state, vector))


def _in_steps(metric: Any, interval: int | None) -> Metric:
    """The metric, with an interval of one epoch replaced by a number of steps, if one is given."""
    metric = get_metric(metric)
    if metric.interval is not None or interval is None:
        return metric
    return dataclasses.replace(metric, interval=interval)


def _set(this: Metric, **fields: Any) -> None:
    """Set fields of a frozen dataclass. Only its own constructor may call this."""
    for name, value in fields.items():
        object.__setattr__(this, name, value)


def _packed(states: Iterable[Any]) -> BySiteState:
    states = tuple(states)
    statistics = tuple(s.statistic for s in states)
    return BySiteState(statistics, tuple(s._replace(statistic=()) for s in states))


def _unpacked(state: BySiteState) -> list[Any]:
    parts = zip(state.rest, state.statistic, strict=True)
    return [rest._replace(statistic=statistic) for rest, statistic in parts]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
