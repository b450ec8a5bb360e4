"""What a run says: export to ArviZ, reports and warnings, comparisons, scores and pictures."""

from . import plots, predictive, stein
from .bias import bias_vs_step
from .bias_curve import BiasCurve, ScalarBias
from .compare import compare
from .comparison import Comparison, ScalarDifference
from .inference_data import to_inference_data
from .joint import Distance
from .report import Report, diagnose
from .summary import SamplingWarning, print_summary, step_size_summary, warn_if_unreliable

__all__ = [
    "BiasCurve",
    "Comparison",
    "Distance",
    "Report",
    "SamplingWarning",
    "ScalarBias",
    "ScalarDifference",
    "bias_vs_step",
    "compare",
    "diagnose",
    "plots",
    "predictive",
    "print_summary",
    "step_size_summary",
    "stein",
    "to_inference_data",
    "warn_if_unreliable",
]
