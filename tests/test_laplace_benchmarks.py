"""Benchmarks and digits of the Laplace guide: their arithmetic, and that they run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

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
    assert scale.applies("fisher, cholesky", 30, 10**6)
    assert not scale.applies("fisher, cholesky", 98, 10)
    assert scale.applies("fisher, woodbury", 314, 2000)
    assert not scale.applies("fisher, woodbury", 8, 2001)


def test_data_are_a_noisy_sine(scale: ModuleType) -> None:
    X, y = scale.make_data(20_000)
    np.testing.assert_allclose([X.mean(), X.std()], [0, 1], atol=1e-3)
    x = X[:, 0] * 8 / 12**0.5  # uniform on [-4, 4]
    # the sd of a sd of n normal numbers is 0.3 / sqrt(2 n) = 0.0015; 5 of them
    assert abs(float(jnp.std(y - jnp.sin(x))) - 0.3) < 0.0075


def test_slopes_and_ratios_are_of_the_same_size(scale: ModuleType) -> None:
    part = scale.Part("N = 10 rows", ((2, 10), (4, 10)))
    nan = (np.nan,) * 3
    cells = [
        scale.Cell(2, 10, "monge", 2.0, 60.0, 1.0, 0, 23.0),  # D + N = 13 + 10
        scale.Cell(2, 10, "fisher, cg", 3.0, 30.0, 1.5, 1, 23.0),
        scale.Cell(4, 10, "monge", 4.0, 60.0, 1.0, 0, 43.0),  # 33 + 10
        scale.Cell(4, 10, "fisher, cg", *nan, 0, 23.0 * (43 / 23) ** 2, "not run: long"),
    ]
    assert scale.slope(cells, "monge") == pytest.approx(1)
    assert scale.slope(cells, "fisher, cg") == pytest.approx(2)
    assert np.isnan(scale.slope(cells, "fisher, woodbury"))
    text = scale.table(part, cells)
    head, *rows = columns(text)
    ratio, failed = head.index("over monge"), head.index("failed")
    assert [row[ratio] for row in rows] == ["1", "1.5", "1", "-"]
    assert [row[failed] for row in rows] == ["0 of 2", "1 of 2", "0 of 2", "-"]
    assert "fisher, cg at D = 33, N = 10 not run: long." in text
    assert "monge 1.00, fisher, cg 2.00" in text


def test_finished_sizes_are_kept_and_what_takes_too_long_is_not_run(
    scale: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, seen = scale.Part("N = 10 rows", ((2, 10), (4, 10))), []

    def fake(hidden: int, num_rows: int, methods: list, before: dict, *rest: float) -> list:
        seen.append((hidden, sorted(before)))
        return [scale.Cell(hidden, num_rows, "monge", np.nan, 6.0, 1.0, 0, 1.0, "not run")]

    monkeypatch.setattr(scale, "run_size", fake)
    path = tmp_path / "cells"
    for _ in range(3):
        cells = scale.run_part(part, scale.Store(path, 1), ["monge"], 1.0, 1)
    assert [c.hidden for c in cells] == [2, 4]
    assert np.isnan(cells[0].seconds)
    assert seen == [(2, []), (4, ["monge"])]
    assert scale.skip_reason(cells[0], 4, 10, 60.0).startswith("not run: too long")
    ran = cells[0]._replace(seconds=1.0)  # 33 parameters against 13, twice the rows: 5.1 s
    assert scale.skip_reason(ran, 4, 20, 6.0) == ""
    assert scale.skip_reason(ran, 4, 20, 5.0) == "not run: 5 s expected, more than 5 s a draw"


@pytest.mark.slow
def test_the_scale_benchmark_runs_small(
    scale: ModuleType,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scale, "TABLE", tmp_path / "table.md")
    cells = scale.main(["--quick", "--write"])
    text = (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out.endswith(text + "\n")
    assert [c.method for c in cells] == scale.QUICK_METHODS
    assert all(c.seconds > 0 and c.evaluations >= 6 and c.megabytes > 0 for c in cells)
    assert not any(c.failed for c in cells)
    head, *rows = columns(text)
    assert head == [
        *("D", "N", "method", "s a draw", "evaluations", "over monge", "failed", "temporary MB")
    ]
    assert [row[:3] for row in rows] == [["13", "40", method] for method in scale.QUICK_METHODS]
    assert rows[0][5] == "1"
    with pytest.raises(SystemExit):
        scale.main(["--limit", "0"])


# --- the defaults


@pytest.mark.slow
def test_the_benchmark_of_the_defaults_runs_small_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    defaults = load_script("benchmarks/laplace_defaults")
    kept = ["--references", str(tmp_path), "--rows", str(tmp_path / "rows"), "--models", "Poisson"]
    small = ["--draws", "250", "--nuts-draws", "400"]
    (row,) = defaults.main([*kept, *small, "--methods", "straight, hausdorff"])
    assert row.mean[0] < 0.5  # 5 standard errors of both
    assert len(row.parts) == defaults.PARTS
    again = defaults.main([*kept, *small, "--methods", "straight, hausdorff"])
    assert [r.model for r in again] == ["Poisson"]
    assert f"| Poisson | {row.mean[0]:.2f} |" in capsys.readouterr().out


def test_errors_are_those_of_weighted_draws() -> None:
    defaults = load_script("benchmarks/laplace_defaults")
    exact, x = np.array([[-1.0], [1.0]]), np.array([[0.0], [2.0]])
    assert defaults.errors(exact, x, 0.0) == pytest.approx((1.0, 1.0, 1.0))
    # weights of 3/4 and 1/4: mean 1/2, sd sqrt(3/4)
    weighted = defaults.errors(exact, x, np.log(np.array([3.0, 1.0])))
    assert weighted == pytest.approx((0.5, 0.75**0.5, 0.5))


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
