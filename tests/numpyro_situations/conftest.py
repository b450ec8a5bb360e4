"""Columns and rows of the table of situations, and the option that writes it.

    python -m pytest tests/numpyro_situations --write-table

Each method is a column, each file is a section of rows, and each test is a row with its docstring.
By default a test runs with one kernel, the next test with the next, and with the guide; with the
other kernels it is slow. For the table all run, whatever ``-m`` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from methods import KERNELS, LAPLACE, METHODS

TABLE = Path(__file__).resolve().parents[2] / "docs" / "tables" / "numpyro_tests.md"
HEAD = """\
Situations that NumPyro's own tests cover, written anew and run with the kernels and the guide of
this package. Each situation is a test: *holds* means that the result is what a user of NumPyro
expects, and *refused* means an error that says what to do instead. A dash marks a situation that
only kernels have, or only guides.
"""

Cell = tuple[str, int, str, str]
"""Section, place in it, description, and method."""
results: dict[Cell, set[str]] = {}
"""What tests of a cell came to: holds, fails, or the text of an error."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help=f"run all, write {TABLE.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("write_table"):
        config.option.markexpr = ""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test slow with all kernels but one: the next of `KERNELS` from test to test."""
    turns: dict[Any, dict] = defaultdict(dict)  # of each file, so that it can run alone
    for item in items:
        given = getattr(item, "callspec", None) and item.callspec.params
        column = given and (given.get("kernel") or given.get("method"))
        if column in KERNELS:
            shared = item.get_closest_marker("one_run") is not None
            turn = turns[item.module].setdefault(
                "one run" if shared else item.function, len(turns[item.module])
            )
            if column is not KERNELS[turn % len(KERNELS)]:
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


@pytest.fixture(autouse=True)
def cell(request: pytest.FixtureRequest, record_property: Callable) -> None:
    """Tell the report where it belongs in the table."""
    given = request.node.callspec.params
    column = next(given[kind].name for kind in ("kernel", "method", "guide") if kind in given)
    section = request.module.__doc__.splitlines()[0]
    row = request.function.__doc__.format(**given)
    place = request.function.__code__.co_firstlineno
    record_property("cell", [section, place, row, column])


@pytest.fixture
def refuses(record_property: Callable) -> Callable[[Any, str], AbstractContextManager]:
    """``with refuses(error, remedy):`` the block raises that error, whose text has the remedy."""

    @contextmanager
    def refuses(error: Any, remedy: str) -> Iterator[None]:
        with pytest.raises(error, match=remedy) as found:
            yield
        record_property("refused", str(found.value))

    return refuses


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    told = dict(report.user_properties)
    if "cell" in told and not report.skipped and (report.when == "call" or report.failed):
        found = "fails" if report.failed else told.get("refused", "holds")
        results.setdefault(tuple(told["cell"]), set()).add(found)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("write_table"):
        TABLE.write_text(table(results))
        terminalreporter.write_line(f"wrote {TABLE}")


def table(results: dict[Cell, set[str]]) -> str:
    """The counts of each method, and the situations that one of them refuses."""
    columns = [m.name for m in METHODS]
    rows = sorted({cell[:3] for cell in results})
    lines = []
    for row in rows:
        cells = [_cell(results.get((*row, column), set())) for column in columns]
        if set(cells) - {"holds", "–"}:
            lines.append(f"| {row[2]} | {' | '.join(cells)} |")
    text = HEAD + "\n| |" + "".join(f" {c} |" for c in columns) + "\n|---|" + "---|" * len(columns)
    for name, test in (
        ("hold", lambda found: found == {"holds"}),
        ("refused", lambda found: bool(found - {"holds", "fails"})),
        ("fail", lambda found: "fails" in found),
        ("do not apply", lambda found: not found),
    ):
        counts = [sum(test(results.get((*row, c), set())) for row in rows) for c in columns]
        text += f"\n| {name} |" + "".join(f" {n} |" for n in counts)
    text += "\n\n| situation |" + "".join(f" {c} |" for c in columns) + "\n"
    return text + "|---|" + "---|" * len(columns) + "\n" + "\n".join(lines) + "\n"


def _cell(found: set[str]) -> str:
    if not found:
        return "–"
    if "fails" in found:
        return "FAILS"
    return "*refused*" if found - {"holds"} else "holds"
