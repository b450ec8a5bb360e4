"""Laplace approximations on Riemannian manifolds."""

from .draws import FitReport, LaplaceDraws
from .guide import RiemannianLaplace
from .metrics import RiemannianMetric
from .predictive import Predictions

__all__ = ["FitReport", "LaplaceDraws", "Predictions", "RiemannianLaplace", "RiemannianMetric"]
