"""Long runs in segments, kept on disk and resumed after a crash."""

from .long_run import Run, run_in_segments

__all__ = ["Run", "run_in_segments"]
