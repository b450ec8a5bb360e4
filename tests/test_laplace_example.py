"""The Riemannian Laplace example: its exact draws and maps, its scores, and that it runs small."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer.util import log_density
from scipy import stats
from scripts import load_script
from tiers import short


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("riemannian_laplace")


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMPYRO_GEOM_DATA", raising=False)


def log_densities(target: Any, points: np.ndarray) -> np.ndarray:
    """Of the target's model, up to a constant."""
    one = lambda theta: log_density(target.model, target.args, {}, {"theta": theta})[0]  # noqa: E731
    return np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(points)))


# --- exact draws and maps

BOXES = {
    "banana": ((-8, 4, 800), (-4, 4, 800)),
    "squiggle": ((-14, 14, 1400), (-4, 4, 800)),
}


@pytest.mark.usefixtures("x64", "no_data")
@pytest.mark.parametrize("name", BOXES)
def test_exact_draws_have_the_moments_of_the_models_density(example: ModuleType, name: str) -> None:
    target = example.TARGETS[name](None)
    axes = [np.linspace(*box) for box in BOXES[name]]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    values = log_densities(target, points)
    weight = np.exp(values - values.max())
    weight /= weight.sum()
    draws = target.exact(np.random.default_rng(1), 40_000)
    # 5 standard errors of eight averages: a false alarm in 2e5 runs
    # the last tells a squiggle from its mirror image
    for fn in (
        lambda x: x,
        lambda x: x**2,
        lambda x: x**2 * x[:, ::-1],
        lambda x: x * np.sin(1.5 * x[:, ::-1]),
    ):
        exact, found = weight @ fn(points), fn(draws)
        error = found.std(axis=0) / len(draws) ** 0.5
        assert np.all(np.abs(found.mean(axis=0) - exact) < 5 * error)


@pytest.mark.usefixtures("x64")
def test_the_funnel_is_a_gaussian_where_it_is_compared(example: ModuleType) -> None:
    target = example.TARGETS["funnel"](None)
    draws = target.exact(np.random.default_rng(1), 1000)
    straight = target.compare(draws)
    # log density = log N(straight; 0, I) + log |d straight / d theta|, which is -theta2 / 2
    expected = stats.norm.logpdf(straight).sum(axis=1) - draws[:, 1] / 2
    gap = log_densities(target, draws) - expected
    np.testing.assert_allclose(gap, gap[0], atol=1e-9)
    assert abs(straight.std() - 1) < 5 / 2000**0.5


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", short(["squiggle-narrow", "funnel"], kept=["funnel"]))
def test_geodesics_end_where_the_exact_map_says(example: ModuleType, name: str) -> None:
    effort = example.Effort(draws=200, reference=300, repeats=1, num_warmup=0)
    rows, shown = example.run_target(name, example.TARGETS[name](None), ["fisher"], effort, 0)
    assert rows[0].failed == 0
    assert rows[0].map_error < 1e-3  # the solver's relative tolerance
    assert shown["fisher"].shape == (200, 2)
    # both are distances of 200 exact draws from the same 300: of sd sqrt(tr / 200) at most
    total = np.sqrt(example.TARGETS[name](None).compare(shown["reference"]).var(axis=0).sum())
    assert abs(rows[0].scores[0, 0] - rows[0].floor[0]) < 4 * total * (2 / 200) ** 0.5


# --- data


@pytest.mark.usefixtures("x64")
def test_inputs_are_standardised_before_ones_are_added(example: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(5, 3, size=(30, 2)), rng.integers(2, size=30)
    np.savez(tmp_path / "logistic_ripley.npz", X=X, y=y)
    raw = np.asarray(example.TARGETS["ripley-raw"](tmp_path).args[0])
    np.testing.assert_array_equal(raw, np.concatenate([X, np.ones((30, 1))], axis=1))
    scaled, labels = map(np.asarray, example.TARGETS["ripley"](tmp_path).args)
    np.testing.assert_allclose(scaled[:, :2].mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(scaled[:, :2].std(axis=0), 1)
    np.testing.assert_array_equal(scaled[:, 2], 1)
    np.testing.assert_array_equal(labels, y)


@pytest.mark.usefixtures("x64")
def test_the_empirical_fisher_matrix_is_of_the_scores_of_rows(example: ModuleType) -> None:
    rng = np.random.default_rng(0)
    y, theta = rng.integers(2, size=30), jnp.array([0.3, -0.2, 0.1])
    target = example.logistic(rng.normal(size=(30, 2)), y, "–", raw=True)
    log_p = lambda t: -jnp.logaddexp(0, (1 - 2 * y) * (target.args[0] @ t))  # noqa: E731
    scores = jax.jacobian(log_p)(theta)
    expected = scores.T @ scores - jax.hessian(lambda t: -t @ t / 200)(theta)
    np.testing.assert_allclose(target.empirical({"theta": theta}), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"X": np.zeros((3, 1))}, r"must have the arrays \['X', 'y'\], and lacks \['y'\]"),
        ({"X": np.zeros((3, 1)), "y": np.zeros(2)}, r"got \(3, 1\) and \(2,\)"),
        ({"X": np.zeros((3, 1)), "y": np.array([0, 1, 2])}, "y of zeros and ones"),
    ],
)
def test_bad_files(example: ModuleType, tmp_path: Path, arrays: dict, says: str) -> None:
    np.savez(tmp_path / "logistic_pima.npz", **arrays)
    with pytest.raises(ValueError, match=says):
        example.TARGETS["pima"](tmp_path)


@pytest.mark.usefixtures("no_data")
def test_targets_without_their_data_are_left_out(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="no target could be run"):
        example.main(["--targets", "ripley", "snelson"])
    errors = capsys.readouterr().err
    assert "ripley is left out: expected a folder with logistic_ripley.npz, got none" in errors
    assert "snelson is left out" in errors
    with pytest.raises(SystemExit, match="no target could be run"):
        example.main(["--targets", "german", "--data-dir", str(tmp_path)])
    assert "logistic_german.npz, which is not there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        example.main(["--draws", "0"])
    assert "--draws must be at least 1, got 0" in capsys.readouterr().err


# --- scores


def test_distance_is_that_of_sorted_points_in_one_dimension(example: ModuleType) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=30), rng.normal(1, 2, size=50)
    expected = stats.wasserstein_distance(x, y)
    assert example.wasserstein(x[:, None], y[:, None]) == pytest.approx(expected, rel=1e-9)
    # and a shift of all points is its length
    points = rng.normal(size=(40, 3))
    assert example.wasserstein(points, points + [0, 3, 4]) == pytest.approx(5.0, rel=1e-9)


def test_distances_without_pot_say_what_to_install(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(ImportError, match="pip install pot"):
        example.wasserstein(np.zeros((2, 1)), np.zeros((3, 1)))


@pytest.mark.usefixtures("x64")
def test_predictions_are_scored_as_a_mixture(example: ModuleType) -> None:
    rng = np.random.default_rng(0)
    theta, x, y = rng.normal(size=(4, 31)), rng.normal(size=6), rng.normal(size=6)
    w1, b1, w2, b2 = np.split(theta, [10, 20, 30], axis=1)
    hidden = np.tanh(x[None, :, None] * w1[:, None] + b1[:, None])
    expected = np.einsum("sxh,sh->sx", hidden, w2) + b2
    outputs = example.predictions(theta, x)
    np.testing.assert_allclose(outputs, expected, rtol=1e-9)
    mse, nll = example.predictive_score(outputs, 0.3, y)
    assert mse == pytest.approx(np.mean((y - expected.mean(axis=0)) ** 2))
    density = stats.norm.pdf(y, expected, 0.3).mean(axis=0)
    assert nll == pytest.approx(-np.mean(np.log(density)))


def test_failures_are_counted_and_their_draws_are_not_compared(example: ModuleType) -> None:
    target = example.TARGETS["squiggle"](None)
    reference = np.random.default_rng(0).normal(size=(20, 2))
    position = np.stack([reference, reference])
    position[1, :5] = 1e6
    success = np.ones((2, 20), bool)
    success[1, :5] = False
    draws = example.Draws(position, success, np.full((2, 20), 24))
    floor = np.array([0.1, 0.3])
    row = example.summarise("squiggle", "monge", target, draws, [reference] * 2)
    row = row._replace(floor=floor)
    assert row.failed == pytest.approx(5 / 40)
    assert row.scores[0, 0] < 1e-6
    assert 0 < row.scores[1, 0] < 2
    line = example.table([row, row._replace(target="pima", metric="fisher")]).splitlines()
    assert "| 0.200 ± 0.141 | 24.0 | 12.5% | – | – | – |" in line[2]
    assert line[3].endswith("| 0.147 ± 0.000 | 12.2 |")


# --- the whole


@pytest.mark.slow
@pytest.mark.usefixtures("no_data")
def test_main_runs(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = example.main(["--quick", "--write", str(tmp_path)])
    found = {(r.target, r.metric): r for r in rows}
    assert set(found) == {
        (target, metric)
        for target in ("banana-hausdorff", "breast-cancer")
        for metric in ("euclidean", "fisher")
    }
    for target in ("banana-hausdorff", "breast-cancer"):
        assert found[target, "fisher"].scores.mean() < found[target, "euclidean"].scores.mean()
        assert found[target, "fisher"].failed == 0
    assert found["banana-hausdorff", "fisher"].evaluations == pytest.approx(32.7, rel=0.1)
    text = (tmp_path / "tables" / "riemannian_laplace.md").read_text()
    assert text.startswith("100 draws against 200 reference draws, 2 repeats")
    assert "| target | floor | euclidean | fisher |" in text
    distance = found["breast-cancer", "fisher"].scores.mean()
    assert f"| {distance:.3f} (" in text
    figure = tmp_path / "figures" / "riemannian_laplace_banana.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size < 150_000


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_fisher_metric_is_nearer_on_ripleys_data(example: ModuleType, data_dir: Path) -> None:
    target = example.TARGETS["ripley"](data_dir)
    effort = example.Effort(draws=1000, reference=2000, repeats=2, num_warmup=300)
    rows, shown = example.run_target("ripley", target, ["euclidean", "fisher"], effort, 0)
    straight, bent = rows
    # equal velocities and references: what is left of the noise of the difference is below that of
    # one distance, whose sd is at most sqrt(tr / draws + tr / reference) by Efron and Stein's bound
    variance = shown["reference"].var(axis=0).sum()
    noise = np.sqrt(variance / effort.draws + variance / effort.reference)
    assert straight.scores.mean() - bent.scores.mean() > 0
    assert straight.scores.mean() - straight.floor.mean() > 2 * noise
    assert bent.scores.mean() - bent.floor.mean() < 2 * noise
    assert bent.evaluations == pytest.approx(12.2, rel=0.1)  # the paper's
    with np.load(data_dir / "derived_maps.npz") as modes:
        params = example.find_mode(example.make_guide(target, "euclidean"), target, random.key(0))
        np.testing.assert_allclose(params["auto_loc"], modes["ripley_std_map"], atol=1e-6)
