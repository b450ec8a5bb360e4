"""Results of a run: export to ArviZ, reports and warnings, comparisons, scores and plots."""

from .._warning import SamplingWarning
from . import plots, predictive, stein
from .against_reference import compare
from .checks import Check
from .inference_data import to_inference_data
from .joint_distances import Distance
from .reference_table import Comparison, ScalarDifference
from .report import diagnose, print_summary, step_size_summary, warn_if_unreliable
from .report_table import Report
from .step_size_bias import bias_vs_step
from .step_size_bias_table import BiasCurve, ScalarBias

__all__ = [
    "BiasCurve",
    "Check",
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
