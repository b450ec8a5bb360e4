"""What a run says: export to ArviZ, the summary table, and warnings."""

from .inference_data import to_inference_data
from .summary import SamplingWarning, print_summary, step_size_summary, warn_if_unreliable

__all__ = [
    "SamplingWarning",
    "print_summary",
    "step_size_summary",
    "to_inference_data",
    "warn_if_unreliable",
]
