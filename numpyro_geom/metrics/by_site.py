"""Different metrics for different sites, selected by patterns of site names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import jax

from .._checks import check_number
from .base import Metric, check_interval, get_metric

PyTree = Any


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

    def __post_init__(self) -> None:
        pairs = self.metrics.items() if isinstance(self.metrics, Mapping) else self.metrics
        try:
            pairs = tuple((pattern, metric) for pattern, metric in pairs)
        except (TypeError, ValueError):
            raise TypeError(
                "metrics must be a dict of patterns and metrics, such as {'*': 'rmsprop'}, or "
                f"pairs of them, got {self.metrics!r}"
            ) from None
        pairs = tuple((pattern, get_metric(metric)) for pattern, metric in pairs)
        if not pairs:
            raise ValueError(
                "expected at least one pattern with its metric, such as {'*': 'rmsprop'}, got none"
            )
        for pattern, _ in pairs:
            if not isinstance(pattern, str):
                raise TypeError(f"a pattern must be a string such as 'head.*', got {pattern!r}")
        check_interval(self.interval)
        if self.interval is not None:
            pairs = tuple(
                (pattern, dataclasses.replace(m, interval=self.interval))
                if m.interval is None
                else (pattern, m)
                for pattern, m in pairs
            )
        members = [metric for _, metric in pairs]
        intervals = [m.interval for m in members]
        epoch = None in intervals
        facts = {
            "metrics": pairs,
            "interval": None if epoch else max(i for i in intervals if i is not None),
            "decay": max(m.decay for m in members),
            "is_diagonal": all(m.is_diagonal for m in members),
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    @property
    def has_auxiliary(self) -> bool:
        """False: the auxiliary gradient has a single memory and a single interval."""
        return False

    def statistic(self, grad: PyTree) -> tuple:
        """The statistics of the metrics."""
        groups = self._split(grad)
        return tuple(m.statistic(g) for (_, m), g in zip(self.metrics, groups, strict=True))

    def init(self, position: PyTree) -> BySiteState:
        """The states of the metrics before any gradient."""
        self._check(position)
        groups = self._split(position)
        return _packed(m.init(p) for (_, m), p in zip(self.metrics, groups, strict=True))

    def update(self, state: BySiteState, grad: PyTree) -> BySiteState:
        """The states after a gradient."""
        groups = self._split(grad)
        return _packed(m.update(s, g) for m, s, g in self._each(state, groups))

    def keep_if(self, good: jax.Array, new: BySiteState, old: BySiteState) -> BySiteState:
        """The result of each metric's own ``keep_if``."""
        before = [state for _, state, _ in self._each(old, self.metrics)]
        return _packed(m.keep_if(good, s, o) for m, s, o in self._each(new, before))

    def apply_inverse(self, state: BySiteState, vector: PyTree) -> PyTree:
        """A x, block by block."""
        return self._product("apply_inverse", state, vector)

    def apply_inverse_sqrt(self, state: BySiteState, vector: PyTree) -> PyTree:
        """A^{1/2} x, block by block."""
        return self._product("apply_inverse_sqrt", state, vector)

    def _product(self, method: str, state: BySiteState, vector: PyTree) -> PyTree:
        groups = self._split(vector)
        products = [getattr(m, method)(s, x) for m, s, x in self._each(state, groups)]
        owners, treedef = self._owners(vector)
        leaves = [iter(product) for product in products]
        return jax.tree.unflatten(treedef, [next(leaves[k]) for k in owners])

    def _each(self, state: BySiteState, others: Any) -> Any:
        """Each group's metric, its state, and its part of the other arguments."""
        for (_, metric), statistic, rest, other in zip(
            self.metrics, state.statistic, state.rest, others, strict=True
        ):
            yield metric, rest._replace(statistic=statistic), other

    def _split(self, tree: PyTree) -> list[list]:
        """The leaves of each metric's sites."""
        owners, _ = self._owners(tree)
        groups: list[list] = [[] for _ in self.metrics]
        for owner, leaf in zip(owners, jax.tree.leaves(tree), strict=True):
            groups[owner].append(leaf)
        return groups

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
    """A metric times a number, which changes the step of its sites.

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
        metric = get_metric(self.metric)
        if metric.interval is None and self.interval is not None:
            metric = dataclasses.replace(metric, interval=self.interval)  # type: ignore[type-var]
        facts = {"metric": metric, "interval": metric.interval, "decay": metric.decay}
        for name, value in (facts | {"is_diagonal": metric.is_diagonal}).items():
            object.__setattr__(self, name, value)

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
        return _times(self.by, self.metric.apply_inverse(state, vector))

    def apply_inverse_sqrt(self, state: Any, vector: PyTree) -> PyTree:
        """The square root of ``by`` times the product with A^{1/2} of ``metric``."""
        return _times(self.by**0.5, self.metric.apply_inverse_sqrt(state, vector))


def _times(factor: float, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: (factor * x).astype(x.dtype), tree)


def _packed(states: Any) -> BySiteState:
    states = tuple(states)
    statistics = tuple(s.statistic for s in states)
    return BySiteState(statistics, tuple(s._replace(statistic=()) for s in states))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
