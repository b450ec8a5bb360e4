"""Geometric and stochastic-gradient Bayesian inference for NumPyro models.

Reports, guides and runs are imported at their first use. Their dependencies (xarray, SciPy's
statistics, diffrax) would triple the time of ``import numpyro_geom``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .algorithms import GGMC, SGHMC, SGNHT, SGRLD, Microcanonical
from .kernel import SGKernel
from .metrics import Identity, Metric, Monge, RMSprop, Shampoo, Wenzel
from .model.expansion import Expanded
from .model.start import init_to_draws
from .rows.host_rows import HostRows
from .sampling.schedules import cyclical
from .warmup.training import train

if TYPE_CHECKING:
    from .diagnostics.inference_data import to_inference_data
    from .diagnostics.report import diagnose
    from .laplace import RiemannianLaplace
    from .runs import run_in_segments

__version__ = "0.2.0"

__all__ = [
    "GGMC",
    "SGHMC",
    "SGNHT",
    "SGRLD",
    "Expanded",
    "HostRows",
    "Identity",
    "Metric",
    "Microcanonical",
    "Monge",
    "RMSprop",
    "RiemannianLaplace",
    "SGKernel",
    "Shampoo",
    "Wenzel",
    "cyclical",
    "diagnose",
    "init_to_draws",
    "run_in_segments",
    "to_inference_data",
    "train",
]

_LATER = {
    "RiemannianLaplace": "laplace",
    "diagnose": "diagnostics",
    "run_in_segments": "runs",
    "to_inference_data": "diagnostics",
}
_MODULES = ("baselines", "diagnostics", "laplace", "metrics")


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
