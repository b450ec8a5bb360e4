"""Kernels take turns: a test runs with one of them, the next test with the next.

With the other kernels it is slow. In tests of models the guide takes a turn too.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from methods import KERNELS, LAPLACE, METHODS


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test slow with all methods but one: the next of a fixture's from test to test."""
    turns: dict[Any, dict] = defaultdict(dict)  # of each file, so that it can run alone
    for item in items:
        given = getattr(item, "callspec", None) and item.callspec.params
        fixture = "kernel" if given and "kernel" in given else "method"
        columns = {"kernel": KERNELS, "method": METHODS}[fixture]
        column = given and given.get(fixture)
        if column in columns:
            shared = item.get_closest_marker("one_run") is not None
            turn = turns[item.module].setdefault(
                "one run" if shared else item.function, len(turns[item.module])
            )
            if column is not columns[turn % len(columns)]:
                item.add_marker(pytest.mark.slow)


def _names(value: Any) -> str:
    return value.name


@pytest.fixture(params=KERNELS, ids=_names)
def kernel(request: pytest.FixtureRequest) -> Any:
    """Each kernel."""
    return request.param


@pytest.fixture(params=METHODS, ids=_names)
def method(request: pytest.FixtureRequest) -> Any:
    """Each kernel, and the guide."""
    return request.param


@pytest.fixture(params=[LAPLACE], ids=_names)
def guide(request: pytest.FixtureRequest) -> Any:
    """The guide alone."""
    return request.param
