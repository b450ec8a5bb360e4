"""The UCI example: its scores, and its count of failures."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax import random
from scipy.special import logsumexp
from scipy.stats import norm
from scripts import load_script


@pytest.fixture(scope="module")
def uci() -> ModuleType:
    return load_script("uci_regression")


# --- score


def test_score_is_that_of_the_mixture_on_the_targets_scale(uci: ModuleType) -> None:
    rng = np.random.default_rng(2)
    means, sds = rng.normal(size=(6, 9)), rng.uniform(0.2, 2, size=6)
    y, target = rng.normal(30, 4, size=9), uci.Scale(np.array(30.0), np.array(4.0))
    found = uci.score(means, sds, y, target)
    locations = 30 + 4 * means
    density = norm.logpdf(y, locations, 4 * sds[:, None])
    assert found.mnll == pytest.approx(-np.mean(logsumexp(density, axis=0) - np.log(6)))
    assert found.rmse == pytest.approx(np.sqrt(np.mean((y - locations.mean(axis=0)) ** 2)))
    # one draw is one Gaussian
    single = uci.score(means[:1], sds[:1], y, target)
    assert single.mnll == pytest.approx(-np.mean(norm.logpdf(y, locations[0], 4 * sds[0])))
    # and far out, where every density underflows, nothing is lost
    assert uci.score(means, sds / 1e3, y, target).mnll > 1e4


def test_predictions_are_the_network(uci: ModuleType) -> None:
    rng = np.random.default_rng(3)
    shapes = {"w1": (2, uci.HIDDEN), "b1": (uci.HIDDEN,), "w2": (uci.HIDDEN,), "b2": ()}
    draws = {k: rng.normal(size=(4, *s)).astype(np.float32) for k, s in shapes.items()}
    draws["precision"] = np.full(4, 4.0)
    x = rng.normal(size=(5, 2))
    means, sds = uci.predict(draws, x)
    for s in range(4):
        hidden = np.maximum(x @ draws["w1"][s] + draws["b1"][s], 0)
        np.testing.assert_allclose(means[s], hidden @ draws["w2"][s] + draws["b2"][s], atol=1e-4)
    np.testing.assert_allclose(sds, 0.5)


# --- experiment


@pytest.mark.slow
def test_failures_are_counted(uci: ModuleType, capsys: pytest.CaptureFixture) -> None:
    def explodes(part: Any, key: jax.Array, X: np.ndarray) -> tuple:
        raise RuntimeError("too hot")

    def not_finite(part: Any, key: jax.Array, X: np.ndarray) -> tuple:
        means, sds = uci.run_map(part, key, X)
        return means * np.inf, sds

    chosen = {"MAP": uci.run_map, "explodes": explodes, "not finite": not_finite}
    effort = uci.Effort(mode_steps=50)
    data = uci.generated(40, 2)
    results = [r for k in (0, 1) for r in uci.run_split("small", data, k, chosen, effort, 0)]
    assert [r.score is None for r in results] == [False, True, True] * 2
    errors = capsys.readouterr().err
    assert "small split 1, explodes failed: RuntimeError: too hot" in errors
    assert "FloatingPointError: the score is not finite" in errors
    lines = uci.table(results).splitlines()
    assert len(lines) == 5
    good = np.array([r.score for r in results if r.score is not None])
    assert f"{good[:, 0].mean():.4g} ± {good[:, 0].std():.2g}" in lines[2]
    assert "| 0 of 2 |" in lines[2]
    assert lines[3].startswith("| small | 2 | explodes | – | – | 2 of 2 |")
    head, _, *lines = uci.likelihoods(results).splitlines()
    assert head == "| MNLL | small |"
    assert lines[:2] == [f"| MAP | {good[:, 1].mean():.3g} |", "| explodes | – |"]


def test_linear_predictions_and_dropout(uci: ModuleType) -> None:
    rng = np.random.default_rng(4)
    shapes = {"w1": (2, uci.HIDDEN), "b1": (uci.HIDDEN,), "w2": (uci.HIDDEN,), "b2": ()}
    mode = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    x, step = rng.normal(size=(5, 2)), 1e-3
    near = {k: np.stack([v + step, v + 2 * step]) for k, v in mode.items()}
    near["precision"] = np.ones(2)
    (one, two), _ = uci.predict(near, x, around=mode)
    bent, _ = uci.predict(near, x)
    at_mode, _ = uci.predict({k: v[None] for k, v in mode.items()} | {"precision": np.ones(1)}, x)
    np.testing.assert_allclose(two - at_mode[0], 2 * (one - at_mode[0]), atol=1e-4)
    np.testing.assert_allclose(bent[0], one, atol=1e-3)
    same = {k: np.stack([v] * 2000) for k, v in mode.items()} | {"precision": np.ones(2000)}
    means, _ = uci.predict(same, x, key=random.key(0))
    error = means.std(axis=0) / 2000**0.5
    assert np.all(error > 0)
    assert np.all(np.abs(means.mean(axis=0) - at_mode[0]) < 4 * error)


def test_training_data_alone_decide_the_scale(
    uci: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = uci.generated(40, 2)
    far = data._replace(X=data.X.copy(), y=data.y.copy())
    far.X[far.test_index[0]] *= 100
    far.y[far.test_index[0]] *= 100
    seen = []
    monkeypatch.setattr(uci, "prepare", lambda X, y, *rest: seen.append((X, y)))
    for each in (data, far):
        uci.run_split("small", each, 0, {"MAP": uci.run_map}, uci.QUICK, 0)
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    np.testing.assert_allclose(seen[0][0].mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(seen[0][1].std(), 1)


@pytest.mark.slow
def test_main_runs(uci: ModuleType, capsys: pytest.CaptureFixture) -> None:
    results = uci.main(["--quick", "--methods", "MAP", "ensemble"])
    assert [r.method for r in results] == ["MAP", "ensemble"]
    assert all(r.score is not None for r in results)
    assert "| generated | 1 | ensemble |" in capsys.readouterr().out
