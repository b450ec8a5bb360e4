"""Riemannian stochastic-gradient MCMC kernels for NumPyro models."""

from .diagnostics.inference_data import to_inference_data
from .diagnostics.summary import print_summary, step_size_summary
from .expansion import Expansion, Factors
from .kernel import SGKernel, SGState
from .kernels import GGMC, ISGD, PXSGHMC, SGHMC, SGNHT, SGRLD, VSGD, AdamSGLD
from .laplace import RiemannianLaplace
from .metrics import Identity, Metric, MetricState, Monge, RMSprop, Shampoo, Wenzel
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
    "Identity",
    "Metric",
    "MetricState",
    "Monge",
    "RMSprop",
    "RiemannianLaplace",
    "SGKernel",
    "SGState",
    "Shampoo",
    "Wenzel",
    "constant",
    "cyclical",
    "polynomial",
    "print_summary",
    "step_size_summary",
    "to_inference_data",
]
