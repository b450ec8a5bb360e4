"""Long runs in segments, kept on disk and resumed after a crash."""

from .job import Run
from .loop import run

__all__ = ["Run", "run"]
