"""The MNIST example: its model and measures; it runs and resumes."""

from __future__ import annotations

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

pytest.importorskip("sklearn", reason="the examples extra is not installed")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("mnist")


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMPYRO_GEOM_DATA", raising=False)


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


# --- measures


def test_curvature_is_that_of_the_hessian(example: ModuleType) -> None:
    data = example.digits()
    z = example.start(random.key(0), example.shapes_of("dense", 64, 8), "gaussian")
    X, y = jnp.asarray(data.X[:5]), jnp.asarray(data.y[:5])

    def loss(x: jax.Array, label: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(example.logits_of(z, x[None])[0])[label]

    hessians, gradients = (jax.jit(jax.vmap(d(loss)))(X, y) for d in (jax.hessian, jax.grad))
    largest = jnp.abs(jnp.linalg.eigvalsh(hessians)).max(-1)
    expected = largest / (jnp.linalg.norm(gradients, axis=-1) + 1e-6)
    np.testing.assert_allclose(jax.jit(example.curvature_of)(z, X, y), expected, rtol=1e-3)


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


# --- experiment


@pytest.mark.slow
def test_baselines_predict(example: ModuleType) -> None:
    data = example.digits()
    task = example.Task(data, "gaussian", hidden=16, epochs=60, batch_size=50)
    for method in ("dropout", "last layer"):
        (found,) = example.METHODS[method](task, random.key(0), None)
        assert found.accuracy > 0.9
        assert found.draws == example.BASELINE_DRAWS
        assert found.ambiguity > 0


@pytest.mark.slow
def test_quick_run_predicts_and_is_not_repeated(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
