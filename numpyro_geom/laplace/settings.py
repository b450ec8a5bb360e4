"""Settings of a Laplace guide: its arguments, validated once and frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .._checks import check_batch_size, check_choice, check_int, check_number
from .geodesic import RiemannianMetric

GUIDE_METRICS = ("auto", "euclidean", "monge", "monge-log", "fisher")
MODES = ("auto", "euclidean", "hausdorff", "mean")
PRECISIONS = ("auto", "hessian", "fisher")
PRIORS = ("auto", "hessian", "expected")
SOLVERS = ("auto", "cholesky", "cg")
MATRIX_LIMIT = 2000
"""Largest dimension at which D x D matrices are formed."""
MEAN_LIMIT = 200
"""Largest dimension at which ``mode="mean"`` is the default."""


def is_wide(size: int) -> bool:
    """Whether matrices of this dimension are too large to form."""
    return size > MATRIX_LIMIT


def check_dense(size: int, what: str, instead: str) -> None:
    """Raise if D x D matrices would be too large."""
    if is_wide(size):
        raise ValueError(
            f"{what} forms matrices of the model's dimension, {size}: expected at most "
            f"{MATRIX_LIMIT}. Use {instead}"
        )


@dataclasses.dataclass(frozen=True)
class LaplaceSettings:
    """Arguments of `numpyro_geom.RiemannianLaplace`; its docstring explains them.

    `resolve` replaces ``"auto"`` by the choice for a model. The solver's choice comes later.
    """

    metric: str | Callable | RiemannianMetric
    mode: str
    precision: str
    prior_metric: str
    solver: str
    alpha2: float
    damping: float
    batch_size: int | Mapping[str, int] | None
    rtol: float
    atol: float
    max_steps: int

    def __post_init__(self) -> None:
        if not callable(self.metric) and not isinstance(self.metric, RiemannianMetric):
            check_choice("metric", self.metric, GUIDE_METRICS)
        check_choice("mode", self.mode, MODES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("prior_metric", self.prior_metric, PRIORS)
        check_choice("solver", self.solver, SOLVERS)
        checked: dict[str, Any] = {
            "alpha2": check_number("alpha2", self.alpha2, least=0.0),
            "damping": check_number("damping", self.damping, least=0.0),
            "rtol": check_number("rtol", self.rtol, above=0.0),
            "atol": check_number("atol", self.atol, above=0.0),
            "max_steps": check_int("max_steps", self.max_steps),
            "batch_size": check_batch_size(self.batch_size),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def wants_law(self, size: int) -> bool:
        """Whether the draws come from the nearest normal law, if the model has groups."""
        if self.precision != "auto" or self.damping > 0:
            return False
        if (self.metric, self.mode) == ("euclidean", "mean"):
            return True
        able = self.metric in ("auto", "euclidean") and self.mode in ("auto", "mean")
        return able and size > MEAN_LIMIT

    def resolve(
        self, size: int, *, has_factor: bool, has_observed: bool, has_law: bool = False
    ) -> LaplaceSettings:
        """The settings with the choices for a model of D = ``size`` dimensions.

        With a ``numpyro.factor``, curvature is only in the Hessian of the prior part. This prior
        part may become indefinite along a geodesic, and so the Euclidean mode is safer. Without an
        observed site with a distribution, there is no Fisher information. Monge's metric is not
        chosen, because its draws are too narrow. ``has_law`` tells whether the draws come from the
        nearest normal law.
        """
        metric, mode, precision, prior = self.metric, self.mode, self.precision, self.prior_metric
        if has_law:
            metric, mode, precision = "euclidean", "mean", "hessian"
        if metric == "auto":
            metric = "euclidean" if has_factor and not has_observed else "fisher"
        if prior == "auto":
            prior = "hessian" if has_factor else "expected"
        if mode == "auto":
            able = metric == "fisher" and prior == "expected" and precision != "hessian"
            mode = "mean" if able and size <= MEAN_LIMIT else "euclidean"
        if precision == "auto":
            wide = is_wide(size) and metric != "monge-log"
            precision = "fisher" if wide or mode != "euclidean" else "hessian"
        return dataclasses.replace(
            self, metric=metric, mode=mode, precision=precision, prior_metric=prior
        )

    def record(self) -> dict[str, Any]:
        """Arguments by name as plain names and numbers, for files."""
        record = dict(vars(self))
        if not isinstance(self.metric, str):
            kind = type(self.metric).__name__
            record["metric"] = getattr(self.metric, "__name__", kind)
        batch_size = record.pop("batch_size")
        if batch_size is not None:
            record["batch_size"] = batch_size if isinstance(batch_size, int) else str(batch_size)
        return record
