"""Laplace approximations that follow the geodesics of a Riemannian metric."""

from .draws import FitReport, LaplaceDraws
from .guide import RiemannianLaplace
from .metrics import RiemannianMetric
from .predictive import Predictions
from .report import LaplaceReport

__all__ = [
    "FitReport",
    "LaplaceDraws",
    "LaplaceReport",
    "Predictions",
    "RiemannianLaplace",
    "RiemannianMetric",
]
