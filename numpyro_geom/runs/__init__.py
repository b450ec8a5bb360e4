"""Long runs in segments, kept on disk and resumed after a crash."""

from .keep import Run
from .long_run import run

__all__ = ["Run", "run"]
