"""Laplace approximations that follow the geodesics of a Riemannian metric."""

from .draw import LaplaceDraws
from .fit import FitReport
from .geodesic import RiemannianMetric
from .guide import RiemannianLaplace
from .predictive import Predictions

__all__ = [
    "FitReport",
    "LaplaceDraws",
    "Predictions",
    "RiemannianLaplace",
    "RiemannianMetric",
]
