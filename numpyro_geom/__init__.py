"""Geometric and stochastic-gradient Bayesian inference for NumPyro models.

Reports, guides and runs are imported at their first use. Their dependencies (xarray, SciPy's
statistics, diffrax) would triple the time of ``import numpyro_geom``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .algorithms import GGMC, SGHMC, SGNHT, SGRLD, Microcanonical
from .baselines.adam_sgld import AdamSGLD
from .baselines.isgd import ISGD
from .baselines.swag import SWAG
from .kernel import SGKernel, SGState
from .metrics import (
    Identity,
    Metric,
    MetricState,
    Monge,
    RMSprop,
    Shampoo,
    Wenzel,
)
from .model.expansion import Expanded
from .rows.host_rows import HostRows
from .sampling.schedules import cyclical
from .warmup.training import Trained, train

if TYPE_CHECKING:
    from .diagnostics.inference_data import to_inference_data
    from .diagnostics.report import diagnose
    from .laplace import RiemannianLaplace
    from .runs import Run, run

__version__ = "0.2.0"

__all__ = [
    "GGMC",
    "ISGD",
    "SGHMC",
    "SGNHT",
    "SGRLD",
    "SWAG",
    "AdamSGLD",
    "Expanded",
    "HostRows",
    "Identity",
    "Metric",
    "MetricState",
    "Microcanonical",
    "Monge",
    "RMSprop",
    "RiemannianLaplace",
    "Run",
    "SGKernel",
    "SGState",
    "Shampoo",
    "Trained",
    "Wenzel",
    "cyclical",
    "diagnose",
    "run",
    "to_inference_data",
    "train",
]

_LATER = {
    "RiemannianLaplace": "laplace",
    "Run": "runs",
    "diagnose": "diagnostics",
    "run": "runs",
    "to_inference_data": "diagnostics",
}
_MODULES = ("diagnostics", "laplace", "metrics")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        value = getattr(import_module(f".{_LATER[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__all__", "__doc__", "__version__"])
