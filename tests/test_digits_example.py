"""The digits example: its measures against known answers, its data, and that all methods run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro import handlers
from scripts import load_script
from tiers import short

pytest.importorskip("sklearn", reason="the examples extra is not installed")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("digits_network")


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMPYRO_GEOM_DATA", raising=False)


def logits_of(*p: list) -> np.ndarray:
    return np.log(np.array(p))


# --- measures


def test_calibration_error_of_hand_made_predictions(example: ModuleType) -> None:
    """Two bins, (0, 1/2] and (1/2, 1]: one row in the first, three in the second."""
    p = np.array([[0.4, 0.3, 0.3], [0.9, 0.1, 0.0], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    y = np.array([0, 0, 1, 1])
    # |1 - 0.4| / 4, and |(1 - 0.9) + (0 - 0.7) + (1 - 0.8)| / 4
    assert example.calibration_error(p, y, 2) == pytest.approx(0.6 / 4 + 0.4 / 4)
    # each in a bin of its own: no cancellation
    assert example.calibration_error(p, y, 15) == pytest.approx((0.6 + 0.1 + 0.7 + 0.2) / 4)


def test_bins_hold_their_upper_edge(example: ModuleType) -> None:
    """1/2 belongs to (0, 1/2] and 0.6 to (1/2, 1]: the gaps 0.5 and -0.6 do not cancel."""
    p, y = np.array([[0.5, 0.25, 0.25], [0.6, 0.2, 0.2]]), np.array([0, 1])
    assert example.calibration_error(p, y, 2) == pytest.approx((0.5 + 0.6) / 2)
    assert example.calibration_error(p, y, 1) == pytest.approx(0.1 / 2)
    sure = np.eye(3)  # a confidence of 1 is in the last bin
    assert example.calibration_error(sure, np.arange(3)) == 0.0


def test_nll_is_that_of_averaged_probabilities(example: ModuleType) -> None:
    logits = logits_of([[0.9, 0.1]], [[0.1, 0.9]]) + 3.0  # shifts of logits change nothing
    np.testing.assert_allclose(example.averaged(logits), np.log([[0.5, 0.5]]))
    logits = logits_of([[0.9, 0.1], [0.2, 0.8]], [[0.7, 0.3], [0.4, 0.6]])
    log_p = example.averaged(logits)
    np.testing.assert_allclose(np.exp(log_p), [[0.8, 0.2], [0.3, 0.7]])
    expected = -(np.log(0.8) + np.log(0.7)) / 2
    assert example._nll(log_p, np.array([0, 1])) == pytest.approx(expected)


def test_ambiguity_of_opposite_draws(example: ModuleType) -> None:
    """The mean of opposite logits is 0: the ensemble's loss is log 2."""
    logits, y = logits_of([[0.9, 0.1]], [[0.1, 0.9]]), np.array([0])
    single = -(np.log(0.9) + np.log(0.1)) / 2
    assert example.ensemble_ambiguity(logits, y) == pytest.approx(single - np.log(2))
    assert example.ensemble_ambiguity(logits[[0, 0]], y) == pytest.approx(0, abs=1e-12)
    # whatever the class, by convexity
    many = np.random.default_rng(0).normal(size=(5, 7, 3))
    for k in range(3):
        assert example.ensemble_ambiguity(many, np.full(7, k)) > 0


def test_distances_are_over_all_sites(example: ModuleType) -> None:
    draws = {"w": np.zeros((3, 2, 2)), "b": np.zeros((3, 1))}
    draws["w"][:, 0, 0], draws["b"][:, 0] = [3, 6, 6], [4, 8, 8]
    mean, relative = example.distances(draws)
    assert mean == pytest.approx((5 + 0) / 2)
    assert relative == pytest.approx((5 / 5 + 0) / 2)
    assert example.distances({"w": np.ones((1, 2))}) == (0.0, 0.0)


# --- data


def test_digits_are_split_the_same_way_each_time(example: ModuleType) -> None:
    data, again = example.load_digits(), example.load_digits()
    assert data.X.shape[1:] == (8, 8, 1)
    assert len(data.y) + len(data.test_y) == 1797
    assert data.X.min() == 0
    assert data.X.max() == 1
    np.testing.assert_array_equal(data.test_X, again.test_X)
    part = example.held_out(data)
    np.testing.assert_array_equal(np.concatenate([part.y, part.test_y]), data.y)


def test_mnist_from_a_folder(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = np.arange(12 * 16, dtype=np.uint8).reshape(12, 16)
    y = np.arange(12) % 10
    np.savez(tmp_path / "mnist_784.npz", X=X, y=y, n_train=8)
    data = example.load_mnist(tmp_path, num_rows=3)
    assert data.X.shape == data.test_X.shape == (3, 4, 4, 1)
    np.testing.assert_allclose(data.X[1, 0, :, 0], np.arange(16, 20) / 255, rtol=1e-6)
    np.testing.assert_array_equal(data.y, y[:3])
    np.testing.assert_array_equal(data.test_y, y[8:11])
    monkeypatch.setenv("NUMPYRO_GEOM_DATA", str(tmp_path))
    assert len(example.load_mnist().y) == 8
    assert len(example.load_mnist().test_y) == 4


def test_what_cannot_be_found(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pass --data-dir"):
        example.load_mnist()
    with pytest.raises(FileNotFoundError, match="change --data-dir"):
        example.load_mnist(tmp_path)
    np.savez(tmp_path / "mnist_784.npz", X=np.zeros((2, 4)), y=np.zeros(2))
    with pytest.raises(ValueError, match=r"lacks \['n_train'\]"):
        example.load_mnist(tmp_path)
    np.savez(tmp_path / "mnist_784.npz", X=np.zeros((2, 5)), y=np.zeros(2), n_train=1)
    with pytest.raises(ValueError, match=r"got \(2, 5\) and \(2,\)"):
        example.load_mnist(tmp_path)
    with pytest.raises(SystemExit, match="no data set could be loaded"):
        example.main(["--datasets", "mnist"])
    with pytest.raises(SystemExit):
        example.main(["--seeds", "0"])


# --- networks


def test_convolution_looks_at_neighbours(example: ModuleType) -> None:
    """A kernel of its centre alone passes the largest pixel on, one of a neighbour all but it."""
    X = np.zeros((1, 8, 8, 1), np.float32)
    X[0, 0, 0, 0] = 2.0  # has no neighbour to its right whose left neighbour it is not
    centre = np.zeros((3, 3, 1, 1), np.float32)
    centre[1, 1] = 1.0
    below = np.zeros((3, 3, 1, 1), np.float32)
    below[2, 1] = 1.0  # the output at a pixel is the input one row below: nothing for row 0
    w = {"k2": centre, "b1": np.zeros(1), "b2": np.zeros(1), "w3": np.ones((1, 10))}
    w["b3"] = np.arange(10.0)
    found = example.convolution_logits({**w, "k1": centre}, jnp.asarray(X))
    np.testing.assert_allclose(found, [2 + np.arange(10)])
    found = example.convolution_logits({**w, "k1": below}, jnp.asarray(X))
    np.testing.assert_allclose(found, [np.arange(10)])


SHAPES: list[tuple[str, dict]] = [
    ("dense", {"w1": {"right": 400}, "w2": {"left": 400}}),
    ("convolution", {"k1": {"right": 8}, "k2": {"left": 8, "right": 16}, "w3": {"left": 16}}),
]


@pytest.mark.parametrize(
    ("name", "shapes"),
    short(SHAPES, kept=SHAPES[:1]),
)
def test_outer_sides_have_no_factor(example: ModuleType, name: str, shapes: dict) -> None:
    network, data = example.NETWORKS[name], example.load_digits()
    X, y = jnp.asarray(data.X[:4]), jnp.asarray(data.y[:4])
    sites = handlers.trace(handlers.seed(network.model, random.key(0))).get_trace(X, y)
    start = {k: v["value"] for k, v in sites.items() if k not in ("rows", "y")}
    for method, expansion in example.methods(network).items():
        if expansion is None or expansion.rank is not None:
            continue
        factors = expansion.init(random.key(0), start)["factors"]
        found = jax.tree.map(lambda x: x.shape[0], factors)
        assert found == {k: {s: (n,) for s, n in v.items()} for k, v in shapes.items()}, method
    paired = [name for factors in network.sites.values() for name in factors.vectors]
    assert paired == ["b1", "b2"][: len(shapes) - 1]


# --- experiment


@pytest.mark.slow
def test_all_methods_give_finite_tables(example: ModuleType, capsys: pytest.CaptureFixture) -> None:
    results = example.main(["--quick"])
    names = list(example.methods(example.NETWORKS["dense"]))
    assert [r.method for r in results] == [example.START, *names]
    assert all(np.all(np.isfinite(r.measures)) for r in results)
    assert all(r.measures.accuracy > 0.5 for r in results)  # chance is 0.1
    assert all(r.seconds > 0 for r in results[1:])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| digits | dense |")]
    assert len(rows) == len(results)
    assert len({line.count("|") for line in rows}) == 1
    assert rows[1].endswith("| 1.0 |")  # SGHMC over itself


@pytest.mark.slow
def test_convolution_runs(example: ModuleType) -> None:
    data = example.load_digits()
    small = data._replace(X=data.X[:128], y=data.y[:128])
    network = example.NETWORKS["convolution"]
    effort = example.Effort(mode_steps=100, period=5, left_out=1, cycles=2, batch_size=32)
    names = ["PX posterior"]
    rates = dict.fromkeys(names, 0.01)
    args = ("digits", small, "convolution", network, names, rates, effort, [0])
    results = example.run_network(*args)
    assert len(results) == 2
    assert all(np.all(np.isfinite(r.measures)) for r in results)
    assert all(r.measures.distance > 0 for r in results[1:])


@pytest.mark.slow
def test_tuning_takes_the_least_loss(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    data = example.load_digits()
    seen = []

    def fake(kernel, sample, start, rows, key, effort):
        seen.append(len(rows[1]))
        return example.Chain({"rate": kernel.rate}, 0.0, 0.0)

    losses = dict(zip(example.GRID, [3.0, float("nan"), 1.0, 2.0, 4.0], strict=True))

    def measure(network, draws, data):
        loss = losses[draws["rate"]]
        if np.isnan(loss):
            raise FloatingPointError("not finite")
        return example.Measures(0, loss, 0, 0, 0, 0)

    def make_kernel(model, expansion, rate, num_rows, effort):
        return SimpleNamespace(rate=rate, sample=lambda state: state)

    monkeypatch.setattr(example, "run_chain", fake)
    monkeypatch.setattr(example, "measure", measure)
    monkeypatch.setattr(example, "prepare", lambda *args: {})
    monkeypatch.setattr(example, "make_kernel", make_kernel)
    network = example.NETWORKS["dense"]
    best = example.tune("digits", data, "dense", network, ["SGHMC"], example.TUNE)
    assert best == {"SGHMC": 0.03}
    assert set(seen) == {round(0.8 * len(data.y))}  # the held-out rows are not trained on
