"""Which cases of a table of tests are in the default run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def short(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """All cases of a parametrized test; those beside `kept` are slow, so they run on demand.

    Raises:
        ValueError: if one of `kept` is no case.
    """
    cases = list(cases)
    if unknown := [case for case in kept if case not in cases]:
        raise ValueError(f"expected cases among {cases}, got {unknown}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in kept else pytest.mark.slow,
        )
        for case in cases
    ]
