"""The MNIST example: its data, model and measures; it runs, resumes and reports failures."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer.util import potential_energy
from scripts import load_script

from numpyro_geom.diagnostics.predictive import input_curvature

pytest.importorskip("sklearn", reason="the examples extra is not installed")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("mnist")


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMPYRO_GEOM_DATA", raising=False)


def save(folder: Path, name: str, rows: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(rows).integers(0, 256, (rows, 16)).astype(np.uint8)
    y = np.arange(rows) % 10
    np.savez(folder / f"{name}.npz", X=X, y=y, n_train=first)
    return X, y


# --- data


def test_data_from_a_folder(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = save(tmp_path, "mnist_784", 12, 8)
    others, _ = save(tmp_path, "fashion_mnist", 9, 4)
    monkeypatch.setattr(example, "OUTSIDE_ROWS", 3)
    data = example.load(tmp_path)
    np.testing.assert_allclose(np.concatenate([data.X, data.test_X]), X / 255, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([data.y, data.test_y]), y)
    assert len(data.y) == 8
    np.testing.assert_allclose(data.outside_X, others[[4, 6, 8]] / 255, rtol=1e-6)
    monkeypatch.setenv("NUMPYRO_GEOM_DATA", str(tmp_path))
    np.testing.assert_array_equal(example.load().y, data.y)


def test_what_cannot_be_found(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match="change --data-dir"):
        example.load(tmp_path)
    np.savez(tmp_path / "mnist_784.npz", X=np.zeros((2, 4)), y=np.zeros(2))
    with pytest.raises(ValueError, match=r"lacks \['n_train'\]"):
        example.load(tmp_path)
    np.savez(tmp_path / "mnist_784.npz", X=np.zeros((2, 4)), y=np.zeros(2), n_train=2)
    with pytest.raises(ValueError, match=r"got \(2, 4\), \(2,\) and 2"):
        example.load(tmp_path)
    save(tmp_path, "mnist_784", 12, 8)
    np.savez(tmp_path / "fashion_mnist.npz", X=np.zeros((2, 4)), y=np.zeros(2), n_train=1)
    with pytest.raises(ValueError, match="images of one size, got 16 pixels"):
        example.load(tmp_path)

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", unreachable)
    with pytest.raises(ConnectionError, match="put mnist_784.npz"):
        example.load()
    with pytest.raises(SystemExit, match="OpenML"):
        example.main([])
    with pytest.raises(SystemExit):
        example.main(["--epochs", "1"])


# --- model


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["gaussian", "horseshoe"])
def test_chains_start_at_all_sites(example: ModuleType, prior: str) -> None:
    """The energy there is that of the densities written out."""
    data = example.digits()
    task = example.Task(data, prior, hidden=8)
    X, y = (x[:20] for x in task.rows)
    z = task.start(random.key(0))
    trace = handlers.trace(handlers.seed(task.model, random.key(0))).get_trace(X, y)
    latent = {k for k, v in trace.items() if v["type"] == "sample" and not v["is_observed"]}
    assert set(z) == latent
    found = potential_energy(task.model, (X, y), {}, z)
    log_p = jax.nn.log_softmax(example.logits_of(z, X))[jnp.arange(20), y].sum()
    for name in ("w1", "b1", "w2", "b2", "w3", "b3"):
        scale = (2 / z[name].shape[0]) ** 0.5 if name[0] == "w" else 1.0
        if prior == "horseshoe":
            u = z[f"scale_{name}"]
            assert jax.nn.softplus(u) == pytest.approx(1.0, rel=1e-5)
            log_p += dist.HalfCauchy(1.0).log_prob(1.0) + jax.nn.log_sigmoid(u)
        log_p += dist.Normal(0, scale).log_prob(z[name]).sum()
    assert float(found) == pytest.approx(-float(log_p), rel=1e-4)


def test_lenet_is_that_of_flax(example: ModuleType) -> None:
    """LeNet-5 with edges of zeros: as many weights as it is known for, and flax's logits."""
    nn = pytest.importorskip("flax.linen")
    shapes = example.shapes_of("lenet", 784, 0)
    z = example.start(random.key(0), shapes, "gaussian")
    assert sum(x.size for x in z.values()) == 61_706
    z = {k: x + 0.1 for k, x in z.items()}

    class LeNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            pool = {"window_shape": (2, 2), "strides": (2, 2)}
            x = nn.max_pool(nn.relu(nn.Conv(6, (5, 5), name="1")(x)), **pool)
            x = nn.relu(nn.Conv(16, (5, 5), padding="VALID", name="2")(x))
            x = nn.max_pool(x, **pool).reshape(len(x), -1)
            x = nn.relu(nn.Dense(120, name="3")(x))
            return nn.Dense(10, name="5")(nn.relu(nn.Dense(84, name="4")(x)))

    X = random.uniform(random.key(1), (3, 784))
    weights = {k: {"kernel": z[f"w{k}"], "bias": z[f"b{k}"]} for k in shapes}
    expected = LeNet().apply({"params": weights}, X.reshape(3, 28, 28, 1))
    np.testing.assert_allclose(example.logits_of(z, X), expected, rtol=1e-4, atol=1e-4)


def test_dropout_leaves_a_share_of_the_units_out(example: ModuleType) -> None:
    """On average over patterns the hidden units are those without."""
    z = example.start(random.key(0), example.shapes_of("dense", 16, 8), "gaussian")
    del z["w3"], z["b3"]  # so that the second layer's are linear in those left out
    X = jnp.ones((1, 16))
    keys = random.split(random.key(2), 4000)
    found = jax.vmap(lambda key: example.features_of(z, X, key)[0])(keys)
    whole = example.features_of(z, X)[0]
    error = found.std(0) / len(keys) ** 0.5
    assert np.all(np.abs(found.mean(0) - whole) <= 4 * error)
    left_out = (found == 0)[:, whole > 0].mean()
    assert abs(left_out - example.DROPOUT) < 4 * (0.16 / found.size) ** 0.5


# --- measures


def test_curvature_is_that_of_the_library(example: ModuleType) -> None:
    data = example.digits()
    z = example.start(random.key(0), example.shapes_of("dense", 64, 8), "gaussian")
    X, y = jnp.asarray(data.X[:5]), jnp.asarray(data.y[:5])

    def loss(label: int, w: dict, x: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(example.logits_of(w, x[None])[0])[label]

    draw = jax.tree.map(lambda x: x[None], z)
    expected = [
        input_curvature(partial(loss, int(k)), draw, x[None], num_iterations=200)[0, 0]
        for x, k in zip(X, y, strict=True)
    ]
    np.testing.assert_allclose(example.curvature_of(z, X, y), expected, rtol=1e-3)


def test_measures_of_hand_made_predictions(example: ModuleType) -> None:
    """Two draws that follow each other; entropies tell what is outside from what is not."""
    data = example.digits()._replace(test_y=np.array([0, 1]), outside_X=np.zeros((2, 4)))
    sure, doubt = np.log([0.9, 0.1]), np.log([0.5, 0.5])
    draws = {
        "test": np.array([[[sure, sure[::-1]], [sure, sure[::-1]]]]),
        "outside": np.array([[[doubt, doubt], [doubt, doubt]]]),
        "weights": np.array([[[3.0, 4.0], [3.0, 5.0]]]),
        "curvature": np.array([[2.0, 3.0]]),
    }
    measures = example.Measures(data)
    measures.add(draws)
    found = measures.result()
    assert found.accuracy == found.auroc == 1.0
    assert found.nll == pytest.approx(-np.log(0.9))
    assert found.ece == pytest.approx(0.1)
    assert found.ambiguity == pytest.approx(0, abs=1e-12)
    assert found.distance == pytest.approx(1 / 5)
    assert found.draws == 2
    assert found.confidence == pytest.approx(0.9)
    assert found.curvature == 2.5
    assert np.isnan(measures.result(follow=False).distance)


def test_table_shows_failures_and_what_is_published(example: ModuleType) -> None:
    common = {"prior": "gaussian", "method": "SGRLD identity"}
    good = example.Result(0.97, 0.1, 0.05, 0.03, 0.9, 0.01, 0.1, 7, 0.0, 5.0)._asdict()
    records = [
        {**common, "seed": 0, **good},
        {**common, "seed": 1, **good, "nll": 0.2, "milliseconds": float("nan")},
        {"prior": "horseshoe", "method": "VSGD", "seed": 0, "failed": "ValueError: no"},
    ]
    head, line, one, other = example.table(records, "dense").splitlines()
    assert len({x.count("|") for x in (head, line, one, other)}) == 1
    cells = [x.strip() for x in one.split("|")]
    assert cells[3:7] == ["2", "7", "97.00 ± 0.00", "0.1500 ± 0.0707"]
    assert cells[15:19] == ["5.00", "96.85", "0.1310", "0.0430"]
    assert "failed" in other
    head, _, one, other = example.short(records, "dense").splitlines()
    assert [x.strip() for x in one.split("|")][2:7:3] == ["97.00 ± 0.00", "0.900 ± 0.000"]
    assert head.endswith("AUROC | horseshoe: accuracy, % | NLL | ECE | AUROC |")
    assert other.startswith("| VSGD | – | – |")


# --- experiment


def test_names_agree(example: ModuleType) -> None:
    assert {method for *_, method in example.PUBLISHED} <= set(example.METHODS)
    assert set(example.QUICK_METHODS) <= set(example.METHODS)
    assert not any(example.skipped(*pair) for _, *pair in example.PUBLISHED)


def test_a_failure_is_a_result(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*args: object) -> None:
        raise FloatingPointError("lost")

    monkeypatch.setitem(example.METHODS, "MAP", fails)
    task = example.Task(example.digits(), "gaussian")
    (record,) = example.run_seeds(task, "MAP", [3], tmp_path)
    assert record["failed"] == "FloatingPointError: lost"
    assert json.loads((tmp_path / "gaussian-MAP-3.json").read_text()) == record


@pytest.mark.slow
def test_baselines_predict(example: ModuleType) -> None:
    data = example.digits()
    task = example.Task(data, "gaussian", hidden=16, epochs=60, batch_size=50)
    for method in ("dropout", "last layer"):
        (found,) = example.METHODS[method](task, random.key(0), None)
        assert found.accuracy > 0.9
        assert found.draws == example.BASELINE_DRAWS
        assert found.ambiguity > 0


def test_seeds_of_a_run_are_those_of_runs_alone(example: ModuleType, tmp_path: Path) -> None:
    """Chains of one run end where runs of one seed end, and both seeds are kept."""
    whole = example.digits()
    data = whole._replace(X=whole.X[:100], y=whole.y[:100])
    task = example.Task(
        data, "gaussian", hidden=4, epochs=20, burn_in=100, batch_size=10, timed=False
    )
    both = example.run_seeds(task, "SGRLD identity", [3, 4], None)
    alone = example.run_seeds(task, "SGRLD identity", [4], None)
    assert [r["seed"] for r in both] == [3, 4]
    assert both[1]["draws"] == alone[0]["draws"] == 1
    assert both[1]["nll"] == pytest.approx(alone[0]["nll"], rel=1e-3)
    assert both[0]["nll"] != pytest.approx(alone[0]["nll"], rel=1e-3)


@pytest.mark.slow
def test_quick_run_predicts_and_is_not_repeated(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("zarr", reason="the runs extra is not installed")
    arguments = ["--quick", "--priors", "horseshoe", "--cache", str(tmp_path), "--out"]
    records = example.main([*arguments, str(tmp_path / "table.md")])
    assert [r["method"] for r in records] == list(example.QUICK_METHODS)
    assert all(r["accuracy"] > 0.9 for r in records)  # chance is 0.1
    assert all(r["auroc"] > 0.9 for r in records)
    assert records[0]["undone"] == 0
    assert len((tmp_path / "table.md").read_text().splitlines()) == 4
    assert sorted(x.suffix for x in (tmp_path / "quick").iterdir()) == [".json", ".json"]
    monkeypatch.setattr(example, "METHODS", dict.fromkeys(example.METHODS))
    with pytest.raises(SystemExit):
        example.main([*arguments[:-1], "--network", "lenet"])
    assert str(example.main(arguments[:-1])) == str(records)  # NaN is not equal to itself
