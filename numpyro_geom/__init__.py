"""Geometric and stochastic-gradient Bayesian inference for NumPyro models."""

from .algorithms import GGMC, PXSGHMC, SGHMC, SGNHT, SGRLD
from .baselines.adam_sgld import AdamSGLD
from .baselines.isgd import ISGD
from .baselines.vsgd import VSGD
from .diagnostics.inference_data import to_inference_data
from .diagnostics.report import diagnose
from .diagnostics.summary import print_summary, step_size_summary
from .expansion import Expansion, Factors
from .host_rows import HostRows
from .kernel import SGKernel, SGState
from .laplace import RiemannianLaplace
from .metrics import Identity, Metric, MetricState, Monge, RMSprop, Shampoo, Wenzel
from .runs import Run, run
from .schedules import constant, cyclical, polynomial
from .swag import SWAG

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
