"""Long runs in segments, kept on disk and resumed after a crash."""

from .loop import run
from .result import Run

__all__ = ["Run", "run"]
