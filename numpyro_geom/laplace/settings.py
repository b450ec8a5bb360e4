"""Settings of a Laplace guide: its arguments, checked once and frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .._checks import check_choice, check_int, check_number
from .metrics import RiemannianMetric

METRICS = ("euclidean", "monge", "monge-log", "fisher", "empirical-fisher")
MODES = ("euclidean", "hausdorff")
PRECISIONS = ("hessian", "fisher")
PRIORS = ("hessian", "expected", "softabs")
SOLVERS = ("auto", "cholesky", "woodbury", "cg")
DENSE_LIMIT = 2000
"""Largest dimension at which D x D matrices are formed."""


def is_wide(size: int) -> bool:
    """Whether matrices of this dimension are too large to be formed."""
    return size > DENSE_LIMIT


def check_dense(size: int, what: str, instead: str, *, of: str = "model's dimension") -> None:
    """Raise where D x D matrices would be too large."""
    if is_wide(size):
        raise ValueError(
            f"{what} forms matrices of the {of}, {size}: expected at most {DENSE_LIMIT}. "
            f"Use {instead}"
        )


@dataclasses.dataclass(frozen=True)
class LaplaceSettings:
    """Arguments of `numpyro_geom.RiemannianLaplace`, which documents them."""

    metric: str | Callable | RiemannianMetric
    mode: str
    precision: str | None
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
            check_choice("metric", self.metric, METRICS)
        if self.precision is not None:
            check_choice("precision", self.precision, PRECISIONS)
        check_choice("mode", self.mode, MODES)
        check_choice("prior_metric", self.prior_metric, PRIORS)
        check_choice("solver", self.solver, SOLVERS)
        checked: dict[str, Any] = {
            "alpha2": check_number("alpha2", self.alpha2, least=0.0),
            "damping": check_number("damping", self.damping, least=0.0),
            "rtol": check_number("rtol", self.rtol, above=0.0),
            "atol": check_number("atol", self.atol, above=0.0),
            "max_steps": check_int("max_steps", self.max_steps),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def needs_outputs(self) -> bool:
        """Whether the metric of the draws is information of observed sites."""
        return self.metric in ("fisher", "empirical-fisher")

    def uses_fisher(self, size: int) -> bool:
        """Whether the Fisher form of a model of D = ``size`` has any part in the draws."""
        fisher = self.chosen_precision(size) == "fisher" or self.mode == "hausdorff"
        return fisher or self.needs_outputs

    def chosen_precision(self, size: int) -> str:
        """The precision, in D = ``size`` dimensions."""
        if self.precision is not None:
            return self.precision
        wide = is_wide(size) and self.metric != "monge-log"
        return "fisher" if wide or self.mode == "hausdorff" else "hessian"

    def as_dict(self) -> dict[str, Any]:
        """Arguments by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def record(self, size: int) -> dict[str, Any]:
        """Names and numbers of what is in use in D = ``size`` dimensions, for files."""
        record = self.as_dict() | {"precision": self.chosen_precision(size)}
        if not isinstance(self.metric, str):
            kind = type(self.metric).__name__
            record["metric"] = getattr(self.metric, "__name__", kind)
        batch_size = record.pop("batch_size")
        if batch_size is not None:
            record["batch_size"] = batch_size if isinstance(batch_size, int) else str(batch_size)
        return record

    @property
    def fingerprint(self) -> tuple:
        """What must be the same for a compiled program to be used again; hashable."""
        return tuple(v for name, v in self.as_dict().items() if name != "batch_size")
