"""Geometric and stochastic-gradient Bayesian inference for NumPyro models."""

from .baselines.swag import SWAG
from .diagnostics.inference_data import to_inference_data
from .diagnostics.report import diagnose
from .diagnostics.summary import print_summary, step_size_summary
from .host_rows import HostRows
from .kernel import SGKernel, SGState
from .kernels import GGMC, ISGD, PXSGHMC, SGHMC, SGNHT, SGRLD, VSGD, AdamSGLD
from .laplace import RiemannianLaplace
from .metrics import Identity, Metric, MetricState, Monge, RMSprop, Shampoo, Wenzel
from .runs import Run, run
from .schedules import constant, cyclical, polynomial
from .target.expansion import Expansion
from .target.expansion_sides import Factors

__version__ = "0.1.0"

__all__ = [
    "GGMC",
    "ISGD",
    "PXSGHMC",
    "SGHMC",
    "SGNHT",
    "SGRLD",
    "SWAG",
    "VSGD",
    "AdamSGLD",
    "Expansion",
    "Factors",
    "HostRows",
    "Identity",
    "Metric",
    "MetricState",
    "Monge",
    "RMSprop",
    "RiemannianLaplace",
    "Run",
    "SGKernel",
    "SGState",
    "Shampoo",
    "Wenzel",
    "constant",
    "cyclical",
    "diagnose",
    "polynomial",
    "print_summary",
    "run",
    "step_size_summary",
    "to_inference_data",
]
