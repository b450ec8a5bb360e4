"""Long runs in segments, kept on disk and resumed after a crash."""

from .long_run import Run, run

__all__ = ["Run", "run"]
