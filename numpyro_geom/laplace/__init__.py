"""Laplace approximations that follow the geodesics of a Riemannian metric."""

from .draw import LaplaceDraws
from .fit import FitReport
from .geodesic import RiemannianMetric
from .guide import RiemannianLaplace
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
