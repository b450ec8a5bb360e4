"""The warning about misleading draws, and the line of the user's code that it points to."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings


class SamplingWarning(UserWarning):
    """The draws may be wrong or too few; the message says what to do."""


def warn_outside(message: str, category: type[Warning] = SamplingWarning) -> None:
    """Warn at the line outside of this package that led here."""
    warnings.warn(message, category, stacklevel=_outside())


def _outside() -> int:
    """Stack level of the first caller outside this package, seen from `warn_outside`."""
    # decorators made from context managers add a frame of contextlib in between
    inside = os.path.dirname(os.path.abspath(__file__)), os.path.abspath(contextlib.__file__)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level
