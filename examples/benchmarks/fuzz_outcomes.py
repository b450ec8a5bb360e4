"""What a random case led to: a right answer, a typed error, a wrong answer or an untyped error."""

from __future__ import annotations

import contextlib
import io
import linecache
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpyro_geom
from numpyro_geom.diagnostics import SamplingWarning

PACKAGE = str(Path(numpyro_geom.__file__).parent)
PATIENCE = 600
"""Seconds after which a case counts as hung."""
TYPED = (ValueError, TypeError, RuntimeError, OSError, ImportError, ArithmeticError)

RIGHT, WARNED, REFUSED, FOREIGN, WRONG, UNTYPED = KINDS = (
    "right",
    "warned of",
    "typed error",
    "error of the user's function",
    "wrong",
    "untyped error",
)
FAILURES = (WRONG, UNTYPED)
OF_THE_USER = ("regression", "<lambda>")
"""Names of functions that cases pass to the package."""


class Outcome(NamedTuple):
    """What a case led to.

    Attributes:
        kind: one of `KINDS`.
        told: what was wrong and the warnings, or the message of the error.
    """

    kind: str
    told: str = ""


def outcome_of(case: Callable[[], str]) -> Outcome:
    """Run a case, which returns what is wrong with its result."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"no end after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("always")
            problem = case()
    except Exception as error:
        return Outcome(kind_of(error), _told(error))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    told = [str(x.message) for x in caught if issubclass(x.category, SamplingWarning)]
    if told:
        return Outcome(WARNED, "; ".join([problem or "nothing is seen to be wrong", *told]))
    return Outcome(WRONG, problem) if problem else Outcome(RIGHT)


def kind_of(error: Exception) -> str:
    """What an error counts as.

    It is typed if a `raise` of this package made it, with a sentence and not with a bare value. A
    function of the user, such as a model, can raise what it likes.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    is_ours = last.filename.startswith(PACKAGE) and line.startswith("raise ")
    if is_ours and isinstance(error, TYPED) and " " in str(error):
        return REFUSED
    names = {frame.name for frame in frames}
    return FOREIGN if names & set(OF_THE_USER) else UNTYPED


def _told(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in where if frame.filename.startswith(PACKAGE)]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "outside"
    text = " ".join(str(error).split())
    return f"{type(error).__name__} at {place}: {text}"
