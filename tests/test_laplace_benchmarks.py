"""Benchmarks and digits of the Laplace guide: their arithmetic, and that they run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scripts import load_script

pytest.importorskip("sklearn", reason="the examples extra is not installed")


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    return load_script("benchmarks/laplace_scale")


def columns(text: str) -> list[list[str]]:
    """Cells of the rows of a Markdown table, its head first and the rule left out."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


# --- the scale benchmark


def test_memory_grows_in_parameters_and_in_rows_separately(scale: ModuleType) -> None:
    """100 D + N: linear in both, at most as fast as either, and of no one slope on D + N."""
    sizes = [(h, n) for h in (2, 4) for n in (10, 1000)]  # D = 13 and 33

    def cell(h: int, n: int, method: str, megabytes: float) -> Any:
        return scale.Cell(h, n, method, megabytes, 1.0)

    cells = [cell(h, n, "monge", 100 * scale.num_parameters(h) + n) for h, n in sizes]
    cells += [cell(h, n, "fisher", n**2) for h, n in sizes]
    rows = columns(scale.slopes_of_memory(cells))
    assert rows[0] == ["slope of log memory", "monge", "fisher"]
    d10, d1000 = (np.log((3300 + n) / (1300 + n)) / np.log(33 / 13) for n in (10, 1000))
    n13, n33 = (np.log((100 * d + 1000) / (100 * d + 10)) / np.log(100) for d in (13, 33))
    assert rows[1:] == [
        ["in D, N = 10", f"{d10:.2f}", "0.00"],
        ["in D, N = 1,000", f"{d1000:.2f}", "0.00"],
        ["in N, D = 13", f"{n13:.2f}", "2.00"],
        ["in N, D = 33", f"{n33:.2f}", "2.00"],
    ]


@pytest.mark.slow
def test_the_scale_benchmark_runs_small(
    scale: ModuleType,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scale, "TABLE", tmp_path / "table.md")
    monkeypatch.setattr(scale, "QUICK_SIZES", ((2, 40),))
    monkeypatch.setattr(scale, "METHODS", {"linearised": "euclidean", "monge": "monge"})
    cells = scale.main(["--quick", "--write"])
    text = (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out.endswith(text + "\n")
    assert [c.method for c in cells] == list(scale.METHODS)
    assert all(c.seconds > 0 and c.megabytes > 0 and not c.failed for c in cells)
    assert [c.evaluations > 0 for c in cells] == [False, True]


@pytest.mark.slow
def test_the_law_of_groups_is_compared_with_exact_moments(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "GUIDES", {"RiemannianLaplace": scale.RiemannianLaplace})
    _, row = columns(scale.table_of_groups([101]))
    size, shared, local, _, widths, fitted, drawn = row[1:2] + row[3:]
    assert size == "206"
    assert float(shared) < 0.5
    assert float(local) < 0.1
    assert widths == "1.00 to 1.00"
    assert int(fitted) > 0
    assert int(drawn) > 0


# --- the defaults


@pytest.mark.slow
def test_the_benchmark_of_the_defaults_runs_small(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = load_script("benchmarks/laplace_defaults")
    kept = ["--references", str(tmp_path), "--models", "Poisson"]
    small = ["--draws", "250", "--nuts-draws", "400"]
    methods = ["--methods", "fisher, mean", "AutoLaplaceApproximation"]
    monkeypatch.setattr(defaults, "SVI_STEPS", 10_000)
    row, host = defaults.main([*kept, *small, *methods])
    assert row.mean < 0.5  # 5 standard errors of both
    assert host.mean < 0.7  # and a bias of 0.2
    assert len(row.sets) == defaults.PARTS + 1
    assert f"| Poisson | {row.mean:.2f} | {host.mean:.2f} |" in capsys.readouterr().out


def test_errors_are_those_of_weighted_draws() -> None:
    defaults = load_script("benchmarks/laplace_defaults")
    exact, x = np.array([[-1.0], [1.0]]), np.array([[0.0], [2.0]])
    assert defaults.largest_error(exact, x, 0.0) == pytest.approx(1.0)
    # weights of 3/4 and 1/4
    assert defaults.largest_error(exact, x, np.log(np.array([3.0, 1.0]))) == pytest.approx(0.5)
