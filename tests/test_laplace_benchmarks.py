"""Benchmarks and digits of the Laplace guide: their arithmetic, and that they run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import load_script

pytest.importorskip("sklearn", reason="the examples extra is not installed")


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    return load_script("benchmarks/laplace_scale")


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return load_script("laplace_digits")


def columns(text: str) -> list[list[str]]:
    """Cells of the rows of a Markdown table, its head first and the rule left out."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


# --- the scale benchmark


def test_networks_have_the_dimensions_that_are_told(scale: ModuleType) -> None:
    for size, hidden in scale.HIDDEN.items():
        assert abs(scale.num_parameters(hidden) / size - 1) < 0.04
    data = scale.make_data(20)
    mode = jax.eval_shape(lambda *data: scale.near_a_mode(*data, 3, 2), *data)
    assert sum(x.size for x in mode.values()) == scale.num_parameters(3)


def test_data_are_a_noisy_sine(scale: ModuleType) -> None:
    X, y = scale.make_data(20_000)
    np.testing.assert_allclose([X.mean(), X.std()], [0, 1], atol=1e-3)
    x = X[:, 0] * 8 / 12**0.5  # uniform on [-4, 4]
    # the sd of a sd of n normal numbers is 0.3 / sqrt(2 n) = 0.0015; 5 of them
    assert abs(float(jnp.std(y - jnp.sin(x))) - 0.3) < 0.0075


def test_memory_grows_in_parameters_and_in_rows_separately(scale: ModuleType) -> None:
    """100 D + N: linear in both, at most as fast as either, and of no one slope on D + N."""
    sizes = [(h, n) for h in (2, 4) for n in (10, 1000)]  # D = 13 and 33

    def cell(h: int, n: int, method: str, megabytes: float) -> Any:
        return scale.Cell(h, n, method, 1.0, 0.0, 0, megabytes, 1.0, "run")

    cells = [cell(h, n, "monge", 100 * scale.num_parameters(h) + n) for h, n in sizes]
    cells += [cell(h, n, "fisher", n**2) for h, n in sizes]
    rows = columns(scale.memory(cells))
    assert rows[0] == ["slope of log memory", "monge", "fisher"]
    d10, d1000 = (np.log((3300 + n) / (1300 + n)) / np.log(33 / 13) for n in (10, 1000))
    n13, n33 = (np.log((100 * d + 1000) / (100 * d + 10)) / np.log(100) for d in (13, 33))
    assert rows[1:] == [
        ["in D, N = 10", f"{d10:.2f}", "0.00"],
        ["in D, N = 1,000", f"{d1000:.2f}", "0.00"],
        ["in N, D = 13", f"{n13:.2f}", "2.00"],
        ["in N, D = 33", f"{n33:.2f}", "2.00"],
    ]


def test_what_takes_too_long_is_expected_from_a_smaller_size(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Program:
        def memory_analysis(self) -> Any:
            return SimpleNamespace(temp_size_in_bytes=3e6)

    calls = []

    def run(program: Any, arguments: tuple, rounds: int = 3) -> tuple:
        calls.append(rounds)
        return 20.0, np.ones(2, bool), np.full(2, 60)

    monkeypatch.setattr(scale, "compile_draws", lambda *args, **settings: (Program(), ()))
    monkeypatch.setattr(scale, "run", run)
    size = scale.Size(4, None, np.zeros(20), {})  # 33 parameters and 20 rows
    first = scale.measure(size, "fisher", None, 2.0, 50.0)
    assert (first.seconds, first.evaluations, first.megabytes, first.how) == (
        10.0,
        60.0,
        3.0,
        "run",
    )
    larger = size._replace(y=np.zeros(80))  # 40 seconds
    assert scale.measure(larger, "fisher", first, 2.0, 50.0).how == "run"
    step = scale.measure(larger, "fisher", first, 2.0, 39.0)  # 20 s are 9 evaluations and 2 s
    assert (step.seconds, step.how, calls[-1]) == (2.0 + 60 * 18 / 9, "step", 1)
    scaled = scale.measure(larger, "fisher", first, 2.0, 5.0)  # 9 of 60 evaluations are 6 s
    assert (scaled.seconds, scaled.evaluations, scaled.how) == (40.0, 60.0, "scaled")
    text = columns(scale.table([first, step]))
    assert [row[3:7] for row in text[1:3]] == [
        ["10", "run", "60", "0 of 2"],
        ["120", "expected, from a step", "-", "-"],
    ]


def test_finished_sizes_are_kept(
    scale: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, seen = ((2, 10), (2, 20), (4, 10), (4, 20)), []

    def fake(hidden: int, num_rows: int, smaller: dict, *rest: float) -> list:
        seen.append((hidden, num_rows, [(c.hidden, c.rows) for c in smaller.values()]))
        return [scale.Cell(hidden, num_rows, "monge", 1.0, 6.0, 0, 1.0, 1.0, "run")]

    monkeypatch.setattr(scale, "run_size", fake)
    path = tmp_path / "cells"
    for _ in range(5):
        cells = scale.run_sizes(sizes, scale.Store(path, 1), 1.0, 1)
    assert [(c.hidden, c.rows) for c in cells] == list(sizes)
    assert seen == [(2, 10, []), (2, 20, [(2, 10)]), (4, 10, [(2, 10)]), (4, 20, [(4, 10)])]


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
    # the whole first step of a geodesic: nine evaluations, of which diffrax counts six
    data = scale.make_data(40)
    size = scale.Size(2, *data, scale.near_a_mode(*data, 2, 50))
    step = scale.compile_draws(size, "monge", 1, max_steps=1)
    _, success, evaluations = scale.run(*step)
    assert not success.any()
    assert evaluations.tolist() == [6]
    with pytest.raises(SystemExit):
        scale.main(["--limit", "0"])


def test_the_law_of_groups_is_compared_with_exact_moments(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "GUIDES", {"RiemannianLaplace": scale.RiemannianLaplace})
    _, row = columns(scale.table_of_groups([101]))
    size, shared, local, _, widths, gradients = (row[k] for k in (1, 3, 4, 5, 6, 7))
    assert size == "206"
    assert float(shared) < 0.5
    assert float(local) < 0.1
    assert widths == "1.00 to 1.00"
    assert int(gradients.replace(",", "")) > 800


# --- the defaults


@pytest.mark.slow
def test_the_benchmark_of_the_defaults_runs_small_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = load_script("benchmarks/laplace_defaults")
    kept = ["--references", str(tmp_path), "--rows", str(tmp_path / "rows"), "--models", "Poisson"]
    small = ["--draws", "250", "--nuts-draws", "400"]
    methods = ["--methods", "straight, hausdorff", "AutoLaplaceApproximation"]
    monkeypatch.setattr(defaults, "SVI_STEPS", 10_000)
    row, host = defaults.main([*kept, *small, *methods])
    assert row.mean[0] < 0.5  # 5 standard errors of both
    assert host.mean[0] < 0.7  # and a bias of 0.2
    assert len(row.parts) == defaults.PARTS
    again = defaults.main([*kept, *small, *methods])
    assert [r.model for r in again] == ["Poisson", "Poisson"]
    assert f"| Poisson | {row.mean[0]:.2f} | {host.mean[0]:.2f} |" in capsys.readouterr().out


def test_errors_are_those_of_weighted_draws() -> None:
    defaults = load_script("benchmarks/laplace_defaults")
    exact, x = np.array([[-1.0], [1.0]]), np.array([[0.0], [2.0]])
    assert defaults.errors(exact, x, 0.0) == pytest.approx((1.0, 1.0, 1.0))
    # weights of 3/4 and 1/4: mean 1/2, sd sqrt(3/4)
    weighted = defaults.errors(exact, x, np.log(np.array([3.0, 1.0])))
    assert weighted == pytest.approx((0.5, 0.75**0.5, 0.5))


def test_exact_draws_have_the_errors_of_their_number() -> None:
    """The largest of 3 standard normal errors: median 1.26, 95% quantile 2.39 standard errors."""
    defaults = load_script("benchmarks/laplace_defaults")
    exact = np.random.default_rng(1).normal(size=(20_000, 3))
    median, high = defaults.exact_errors(exact, 100.4)
    # 400 repeats: sd 0.04 of the median and 0.07 of the quantile, in standard errors; 4 of them
    assert 10 * median == pytest.approx(1.26, abs=0.16)
    assert 10 * high == pytest.approx(2.39, abs=0.28)


def test_weighted_errors_are_listed_where_the_report_trusts_the_weights() -> None:
    defaults = load_script("benchmarks/laplace_defaults")
    good = defaults.Row("a", "fisher, mean", 0.3, (0.5, 0.04), effective=900.0, trusted=True)
    some = good._replace(model="b", mean=(0.5, 0.06), exact=(0.05, 0.08))
    bad = some._replace(model="c", mean=(0.5, 0.9), shape=0.8, trusted=False)
    _, only = columns(defaults.listed([good, some, bad]))
    assert only == ["b", "fisher, mean", "0.06", "0.30", "900", "0.05", "0.08"]


# --- digits


def test_pixels_are_standardised_by_the_training_rows(digits: ModuleType) -> None:
    data = digits.make_data(300)
    assert data.X.shape == (300, 64)
    assert data.test_X.shape == (359, 64)
    whole = (data.X.std(axis=0) > 0) & (np.abs(data.X).max(axis=0) < 5)  # no entry is cut
    assert np.sum(whole) > 30
    np.testing.assert_allclose(data.X.std(axis=0)[whole], 1, atol=1e-4)
    np.testing.assert_allclose(data.X.mean(axis=0)[whole], 0, atol=1e-4)
    assert np.max(np.abs(data.test_X)) <= 5
    assert sum(np.prod(s) for s in digits.shapes(digits.Effort().hidden).values()) == 10_554


def test_linearised_logits_are_the_tangent(digits: ModuleType) -> None:
    """Twice the move: twice the change, four times the distance to the network's own logits."""
    rng, sizes = np.random.default_rng(0), digits.shapes((4, 3))
    mode, step = ({name: rng.normal(size=shape) for name, shape in sizes.items()} for _ in range(2))
    X, moves = rng.normal(size=(5, 64)) / 8, np.array([0.0, 1e-3, 2e-3])
    draws = jax.tree.map(lambda a, b: a + np.tensordot(moves, b, 0), mode, step)
    with jax.enable_x64(True):
        straight, bent = map(
            np.asarray,
            jax.jit(
                lambda mode, draws, X: (
                    digits.linearised(mode, draws, X),
                    jax.vmap(lambda w: digits.logits(w, X))(draws),
                )
            )(mode, draws, X),
        )
        np.testing.assert_allclose(straight[0], bent[0], rtol=1e-12)
        change = straight - straight[0]
        np.testing.assert_allclose(change[2], 2 * change[1], rtol=1e-9)
        gap = np.linalg.norm((bent - straight).reshape(3, -1), axis=1)
        assert float(gap[2] / gap[1]) == pytest.approx(4, rel=0.05)


def test_measures_are_of_averaged_probabilities(digits: ModuleType) -> None:
    of_draws = jnp.log(jnp.array([[[0.9, 0.1], [0.2, 0.8]], [[0.7, 0.3], [0.4, 0.6]]]))
    accuracy, nll, ece = digits.measure(of_draws, np.array([0, 0]))
    assert accuracy == 0.5
    assert nll == pytest.approx(-(np.log(0.8) + np.log(0.3)) / 2)
    # confidences 0.8 (right) and 0.7 (wrong), in bins of their own
    assert ece == pytest.approx((0.2 + 0.7) / 2)


@pytest.mark.slow
def test_the_digits_run_small(
    digits: ModuleType,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digits, "TABLES", tmp_path)
    table = tmp_path / "laplace_digits_315.md"
    kept = ["--quick", "--results", str(tmp_path / "results")]
    results = digits.main([*kept, "--write"])
    assert capsys.readouterr().out.endswith(table.read_text() + "\n")
    assert [r.method for r in results] == list(digits.METHODS)
    assert all(np.all(np.isfinite(r[2:5])) for r in results)
    assert not any(r.failed for r in results)
    assert all(r.seconds > 0 for r in results[1:])
    settings, _, *_ = table.read_text().splitlines()
    assert "40 rows to train on and 359 to test on" in settings
    head, *rows = columns(table.read_text())
    assert head == [
        *("method", "draws", "accuracy, %", "NLL", "ECE", "CPU s per draw", "evaluations", "failed")
    ]
    evaluations = dict(zip([row[0] for row in rows], [row[6] for row in rows], strict=True))
    straight = ("euclidean", digits.LINEARISED, digits.LAST)
    assert {evaluations[method] for method in straight} == {"0"}
    assert int(evaluations["monge"]) > 0
    assert int(evaluations["fisher"]) > 0
    assert len(digits.main([*kept, "--methods", "fisher"])) == len(results)  # taken from the file
    with pytest.raises(SystemExit):
        digits.main(["--draws", "0"])
