"""Results of a run: export to ArviZ, reports and warnings, comparisons and predictions."""

from .._checks import SamplingWarning
from .checks import Check
from .comparison import Comparison, ScalarDifference, calibrate, compare_draws
from .inference_data import to_inference_data
from .predictive import PredictionStream, loo
from .report import Report, diagnose

__all__ = [
    "Check",
    "Comparison",
    "PredictionStream",
    "Report",
    "SamplingWarning",
    "ScalarDifference",
    "calibrate",
    "compare_draws",
    "diagnose",
    "loo",
    "to_inference_data",
]
