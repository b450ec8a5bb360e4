"""Predictions gathered from a stream of draws, against scikit-learn and NumPyro."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from scipy import stats
from scipy.special import softmax
from tiers import short

from numpyro_geom import SGHMC
from numpyro_geom.diagnostics import PredictionStream
from numpyro_geom.runs import run_in_segments

metrics = pytest.importorskip("sklearn.metrics", reason="the examples extra is not installed")

CHAINS, DRAWS, ROWS, CLASSES = 2, 30, 40, 3
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, CLASSES, ROWS)
# draws agree a little with each other and with the labels
LOGITS = np.eye(CLASSES)[LABELS] + RNG.normal(size=(CHAINS, DRAWS, ROWS, CLASSES))
P = softmax(LOGITS, axis=-1)


def told(predictions: Any, labels: Any = LABELS, **settings: Any) -> PredictionStream:
    stream = PredictionStream(labels, **settings)
    stream.add(np.asarray(predictions))
    return stream


@pytest.mark.parametrize("cuts", [[30], [1] * 30, [7, 11, 12]])
@pytest.mark.parametrize("logits", [True, False])
def test_scores_are_those_of_scikit_learn(cuts: list[int], logits: bool) -> None:
    stream, first = PredictionStream(LABELS, logits=logits), 0
    for draws in cuts:
        stream.add((LOGITS if logits else P)[:, first : first + draws])
        first += draws
    mean = P.mean((0, 1))
    assert stream.num_draws == CHAINS * DRAWS
    np.testing.assert_allclose(stream.probabilities, mean, rtol=1e-12)
    assert stream.accuracy == metrics.accuracy_score(LABELS, mean.argmax(1))
    assert stream.nll == pytest.approx(metrics.log_loss(LABELS, mean))
    np.testing.assert_allclose(stream.entropy, stats.entropy(mean, axis=1), rtol=1e-12)
    own = stats.entropy(P, axis=-1).mean((0, 1))
    np.testing.assert_allclose(stream.mutual_information, stream.entropy - own, atol=1e-12)
    of_label = np.take_along_axis(P, LABELS[None, None, :, None], 3)[..., 0]
    np.testing.assert_allclose(stream.label_probabilities, of_label, rtol=1e-6)


def test_rows_without_labels_have_entropies() -> None:
    """Draws that disagree on the first row, and are each unsure of the second."""
    sure, doubt = [0.9, 0.1], [0.5, 0.5]
    stream = told([[[sure, doubt], [sure[::-1], doubt]]], None)
    own = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    np.testing.assert_allclose(stream.entropy, np.log(2) * np.ones(2))
    np.testing.assert_allclose(stream.mutual_information, [np.log(2) - own, 0], atol=1e-12)
    for name in ("accuracy", "nll", "calibration_error", "label_probabilities"):
        with pytest.raises(ValueError, match=r"expected labels, .*PredictionStream\(labels\)"):
            getattr(stream, name)


def test_labels_may_be_booleans() -> None:
    few = LABELS.clip(0, 1)
    streams = [told(LOGITS[..., :2], few.astype(t), logits=True) for t in (int, bool)]
    assert streams[0].nll == streams[1].nll


def test_labels_that_are_improbable_do_not_underflow() -> None:
    stream = told([[[[0.0, 800.0]], [[0.0, 900.0]]]], [0], logits=True)
    assert stream.nll == pytest.approx(800 + np.log(2))
    # one draw may rule a label out, and all draws together
    assert told([[[[0.0, 1.0]], [[0.5, 0.5]]]], [0]).nll == pytest.approx(-np.log(0.25))
    assert told([[[[0.0, 1.0]]]], [0]).nll == np.inf


def test_calibration_error() -> None:
    # right yes yes yes no at .9: |0.75 - 0.9|
    p = np.repeat([[0.1, 0.9]], 4, axis=0)
    assert told([[p]], [1, 1, 1, 0]).calibration_error == pytest.approx(0.15)
    # bins (l, r]: 9 / 15 is alone in (8 / 15, 9 / 15]
    q = np.array([0.6, 0.61, 0.66, 1.0])
    found = told([[np.stack([1 - q, q], 1)]], [1, 0, 1, 1]).calibration_error
    assert found == pytest.approx((0.4 + abs(1 - 0.61 - 0.66) + 0) / 4)
    rng = np.random.default_rng(0)
    q, y = rng.uniform(0.5, 1, size=500), rng.binomial(1, 0.8, size=500)
    inside = [(q > k / 15) & (q <= (k + 1) / 15) for k in range(15)]
    total = sum(abs(y[x].sum() - q[x].sum()) for x in inside)
    assert told([[np.stack([1 - q, q], 1)]], y).calibration_error == pytest.approx(total / 500)


def test_the_label_is_followed_in_up_to_a_thousand_rows() -> None:
    p = np.random.default_rng(1).dirichlet(np.ones(2), size=(1, 3, 3000))
    kept = told(p, np.zeros(3000, int)).label_probabilities
    assert kept.shape == (1, 3, 1000)
    np.testing.assert_allclose(kept[..., [0, -1]], p[..., [0, -1], 0], rtol=1e-6)


def model(x: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, CLASSES]).to_event(2))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Categorical(logits=x[i] @ w), obs=y[i])


X = jnp.asarray(RNG.normal(size=(ROWS, 2)), jnp.float32)


@pytest.mark.parametrize("on_disk", short([False, True], kept=[True]))
def test_a_run_is_monitored_and_goes_on(on_disk: bool, tmp_path: Path) -> None:
    def sampler(num_samples: int, **settings: Any) -> MCMC:
        kernel = SGHMC(model, step_size=0.05, num_steps=2)
        lengths = {"num_warmup": 3, "num_samples": num_samples, "num_chains": CHAINS}
        return MCMC(kernel, chain_method="vectorized", progress_bar=False, **lengths, **settings)

    def predict(z: dict[str, jax.Array]) -> jax.Array:
        return X @ z["w"]

    given: dict[str, Any] = {"draws_per_segment": 4}
    if on_disk:
        given["directory"] = tmp_path / "run"
        seen: list[Any] = []
        first = sampler(6, postprocess_fn=predict)
        run_in_segments(first, random.key(0), X, LABELS, monitor=seen.append, **given)
        assert [x.shape[1] for x in seen] == [4, 2]
    stream = PredictionStream(LABELS, logits=True)
    found = run_in_segments(
        sampler(10, postprocess_fn=predict), random.key(0), X, LABELS, monitor=stream.add, **given
    )
    logits = found.mcmc.get_samples(group_by_chain=True)
    weights = run_in_segments(sampler(10), random.key(0), X, LABELS).mcmc.get_samples(
        group_by_chain=True
    )["w"]
    np.testing.assert_allclose(logits, np.einsum("ri,cdik->cdrk", X, weights), atol=1e-5)
    together = PredictionStream(LABELS, logits=True)
    together.add(logits)
    assert stream.num_draws == 10 * CHAINS
    assert stream.nll == pytest.approx(together.nll)


@pytest.mark.parametrize(
    ("error", "match", "act"),
    [
        (ValueError, "no draws have been added", lambda s: s.nll),
        (ValueError, "no draws have been added", lambda s: s.probabilities),
        (ValueError, r"shape \(chains, draws, rows, classes\)", lambda s: s.add(P[0])),
        (ValueError, "two classes or more", lambda s: s.add(P[..., :1])),
        (ValueError, r"labels must have shape \(3,\)", lambda s: s.add(P[:, :, :3])),
        (ValueError, "between 0 and 1, got some from 0 to 2", lambda s: s.add(P[..., :2])),
        (ValueError, r"\(2, 40, 3\) as before", lambda s: (s.add(P), s.add(P[:1]))),
        (ValueError, "must sum to 1", lambda s: s.add(2 * P)),
        (ValueError, "must not be negative", lambda s: s.add(P - [0.9, 0, -0.9])),
        (ValueError, "pass logits=True", lambda s: s.add(LOGITS)),
        (ValueError, "finite, and 7200 of 7200 are not", lambda s: s.add(np.nan * P)),
        (TypeError, "predictions must be real", lambda s: s.add(P > 0)),
        (TypeError, "labels must be integers", lambda _: PredictionStream(LABELS + 0.0)),
        (TypeError, "logits must be True or False", lambda _: PredictionStream(logits=1)),
    ],
)
def test_bad_input(error: type[Exception], match: str, act: Any) -> None:
    with pytest.raises(error, match=match):
        act(PredictionStream(LABELS))


def test_monitor_must_be_a_function() -> None:
    with pytest.raises(TypeError, match=r"monitor must be a function of draws.* got 3"):
        run_in_segments(
            MCMC(SGHMC(model), num_warmup=1, num_samples=1), random.key(0), X, LABELS, monitor=3
        )
