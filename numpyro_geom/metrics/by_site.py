"""Metrics by name, and different metrics for different sites, selected by patterns of names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax

from .._util import PyTree
from .base import Metric
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


def get_metric(metric: Any) -> Metric:
    """The metric with this name, or the object itself if it is a metric.

    Args:
        metric: a `MetricLike`: a name in `METRICS` (with default settings), a metric, or a dict
            from patterns of site names to names or metrics, see `BySite`.

    Raises:
        ValueError: for an unknown name, and for a dict without entries.
        TypeError: for a class, for an object that is no metric, and for a pattern that is no text.
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, Mapping):
        if not metric or not all(isinstance(pattern, str) for pattern in metric):
            raise (TypeError if metric else ValueError)(
                "metric must have at least one pattern of site names with its metric, such as "
                f"{{'head.*': 'shampoo', '*': 'rmsprop'}}, got {metric!r}"
            )
        return BySite(tuple((pattern, get_metric(one)) for pattern, one in metric.items()))
    if isinstance(metric, str) and metric in METRICS:
        return METRICS[metric]()
    expected = f"metric must be one of {sorted(METRICS)} or an object of a subclass of Metric"
    if isinstance(metric, str):
        raise ValueError(f"{expected}, got {metric!r}")
    if isinstance(metric, type):
        raise TypeError(
            f"metric must be an object and not a class: write {metric.__name__}() in place of "
            f"{metric.__name__}"
        )
    raise TypeError(f"{expected}, got {metric!r} of type {type(metric).__name__}")


class BySiteState(NamedTuple):
    """State of `BySite`.

    Attributes:
        statistic: the statistics of the metrics, a tuple in their order.
        rest: the states of the metrics without the statistic.
    """

    statistic: tuple
    rest: tuple


@dataclasses.dataclass(frozen=True)
class BySite(Metric):
    """One metric for each group of sites: A is block diagonal. Kernels make it of a dict.

    A site belongs to the first pattern that its name matches. A metric sees only the gradients of
    its own sites: the smallest scale of `Wenzel` and the inner product of `Monge` are taken over
    these sites.

    Args:
        metrics: pairs of a pattern and a metric. In a pattern ``*`` stands for anything, ``?`` for
            one character and ``[ab]`` for one of the listed characters. In nested positions the
            name of an entry is its path, joined by dots.
    """

    metrics: tuple[tuple[str, Metric], ...]

    @property
    def decay(self) -> float:  # type: ignore[override]
        """The longest memory."""
        return max(metric.decay for _, metric in self.metrics)

    @property
    def interval(self) -> int | None:  # type: ignore[override]
        """The longest interval; None if one is None."""
        steps = [metric.interval for _, metric in self.metrics]
        return None if None in steps else max(steps)  # type: ignore[type-var]

    @property
    def has_derivative(self) -> bool:  # type: ignore[override]
        """Whether all metrics have one."""
        return all(metric.has_derivative for _, metric in self.metrics)

    def with_interval(self, steps: int) -> Metric:
        """The same with this interval in each metric whose interval is one epoch."""
        return BySite(tuple((name, metric.with_interval(steps)) for name, metric in self.metrics))

    def statistic(self, grad: PyTree) -> tuple:
        """The statistics of the metrics."""
        return tuple(self._map(lambda metric, g: metric.statistic(g), grad))

    def init(self, position: PyTree) -> BySiteState:
        """The states of the metrics before any gradient.

        Raises:
            ValueError: for sites that match no pattern, and for patterns that get no site.
        """
        names, owners = self._owners(position)
        without = [name for name, owner in zip(names, owners, strict=True) if owner is None]
        if without:
            raise ValueError(
                f"metric has patterns {[p for p, _ in self.metrics]}, and sites {without} match "
                "none: add one, or '*' for all that remain"
            )
        idle = [pattern for k, (pattern, _) in enumerate(self.metrics) if k not in owners]
        if idle:
            raise ValueError(
                f"metric has patterns {idle} for which there is no site: the first pattern that "
                f"matches counts, and sites are {names}"
            )
        return _packed(self._map(lambda metric, x: metric.init(x), position))

    def update(self, state: BySiteState, grad: PyTree) -> BySiteState:
        """The states after a gradient."""
        return _packed(self._map(lambda metric, g, s: metric.update(s, g), grad, state))

    def keep_if(self, good: jax.Array, new: BySiteState, old: BySiteState) -> BySiteState:
        """The states after a step, each as its metric keeps it."""
        parts = zip(self.metrics, _unpacked(new), _unpacked(old), strict=True)
        return _packed([metric.keep_if(good, *states) for (_, metric), *states in parts])

    def apply_inverse(self, state: BySiteState, vector: PyTree) -> PyTree:
        """A x, block by block."""
        return self._joined(
            self._map(lambda metric, x, s: metric.apply_inverse(s, x), vector, state), vector
        )

    def apply_inverse_sqrt(self, state: BySiteState, vector: PyTree) -> PyTree:
        """A^{1/2} x, block by block."""
        return self._joined(
            self._map(lambda metric, x, s: metric.apply_inverse_sqrt(s, x), vector, state), vector
        )

    def _map(self, function: Any, tree: PyTree, state: BySiteState | None = None) -> list:
        """Values of a function of each metric, the leaves of its sites, and its state if given."""
        owners, leaves = self._owners(tree)[1], jax.tree.leaves(tree)
        states: list[tuple] = [()] * len(self.metrics)
        if state is not None:
            states = [(one,) for one in _unpacked(state)]
        return [
            function(metric, [x for j, x in zip(owners, leaves, strict=True) if j == k], *states[k])
            for k, (_, metric) in enumerate(self.metrics)
        ]

    def _joined(self, parts: list[list], like: PyTree) -> PyTree:
        """The pytree whose leaves are those of the metrics' sites."""
        leaves = [iter(part) for part in parts]
        owners: Any = self._owners(like)[1]
        return jax.tree.unflatten(jax.tree.structure(like), [next(leaves[k]) for k in owners])

    def _owners(self, tree: PyTree) -> tuple[list[str], list[int | None]]:
        """Names of the leaves, and the number of each one's metric; None if no pattern matches."""
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
        patterns = [pattern for pattern, _ in self.metrics]
        owners = [
            next((k for k, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), None)
            for name in names
        ]
        return names, owners


def _packed(states: list[Any]) -> BySiteState:
    statistics = tuple(s.statistic for s in states)
    return BySiteState(statistics, tuple(s._replace(statistic=()) for s in states))


def _unpacked(state: BySiteState) -> list[Any]:
    parts = zip(state.rest, state.statistic, strict=True)
    return [rest._replace(statistic=statistic) for rest, statistic in parts]
