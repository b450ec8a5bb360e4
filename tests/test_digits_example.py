"""The digits example: its measures against known answers, and that all methods run."""

from __future__ import annotations

from types import ModuleType

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


def logits_of(*p: list) -> np.ndarray:
    return np.log(np.array(p))


# --- measures


def test_ambiguity_of_opposite_draws(example: ModuleType) -> None:
    """The mean of opposite logits is 0: the ensemble's loss is log 2."""
    logits = logits_of([[0.9, 0.1]], [[0.1, 0.9]])
    single = -(np.log(0.9) + np.log(0.1)) / 2
    assert example.ensemble_ambiguity(logits) == pytest.approx(single - np.log(2))
    assert example.ensemble_ambiguity(logits[[0, 0]]) == pytest.approx(0, abs=1e-12)


# --- networks


SHAPES: list[tuple[str, dict]] = [
    ("dense", {"w1": {"right": 400}, "w2": {"left": 400}}),
    ("convolution", {"k1": {"right": 8}, "k2": {"left": 8, "right": 16}, "w3": {"left": 16}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shapes"),
    short(SHAPES, kept=SHAPES[:1]),
)
def test_outer_sides_have_no_factor(example: ModuleType, name: str, shapes: dict) -> None:
    network, data = example.NETWORKS[name], example.load_digits()
    X, y = jnp.asarray(data.X[:4]), jnp.asarray(data.y[:4])
    for method, factors in example.methods(network).items():
        if not factors or next(iter(factors.values())).rank is not None:
            continue
        new = handlers.reparam(network.model, config=factors)
        sites = handlers.trace(handlers.seed(new, random.key(0))).get_trace(X, y)
        found = {
            f"{site}_expanded_{'P1' if side == 'left' else 'Q1'}": (n, n)
            for site, sides in shapes.items()
            for side, n in sides.items()
        }
        assert found == {
            name: x["value"].shape for name, x in sites.items() if name[-2:] in ("P1", "Q1")
        }, method


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
