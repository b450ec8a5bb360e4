"""Geometric and stochastic-gradient Bayesian inference for NumPyro models."""

from .algorithms import GGMC, PXSGHMC, SGHMC, SGNHT, SGRLD
from .baselines.adam_sgld import AdamSGLD
from .baselines.isgd import ISGD
from .baselines.swag import SWAG
from .baselines.vsgd import VSGD
from .diagnostics.inference_data import to_inference_data
from .diagnostics.report import diagnose, print_summary, step_size_summary
from .kernel import SGKernel, SGState
from .laplace import RiemannianLaplace
from .metrics import (
    BySite,
    Identity,
    Metric,
    MetricState,
    Monge,
    RMSprop,
    Scaled,
    Shampoo,
    Wenzel,
)
from .rows.host_rows import HostRows
from .runs import Run, run
from .schedules import constant, cyclical, polynomial
from .target.expansion import Expansion
from .target.expansion_sides import Factors
from .training import Trained, train

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
    "BySite",
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
    "Scaled",
    "Shampoo",
    "Trained",
    "Wenzel",
    "constant",
    "cyclical",
    "diagnose",
    "polynomial",
    "print_summary",
    "run",
    "step_size_summary",
    "to_inference_data",
    "train",
]
