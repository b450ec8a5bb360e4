"""Predictions gathered from a stream of draws, against those of all draws at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from scipy.special import log_softmax
from tiers import short

from numpyro_geom import SGHMC
from numpyro_geom.diagnostics.predictive import PredictionStream, classification
from numpyro_geom.runs import run

CHAINS, DRAWS, ROWS, CLASSES = 2, 30, 7, 3
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, CLASSES, ROWS)
LOGITS = RNG.normal(size=(CHAINS, DRAWS, ROWS, CLASSES))


@pytest.mark.parametrize("cuts", [[30], [1] * 30, [7, 11, 12]])
def test_it_is_what_all_draws_at_once_give(cuts: list[int]) -> None:
    stream, first = PredictionStream(LABELS, logits=True), 0
    for draws in cuts:
        stream.add(LOGITS[:, first : first + draws])
        first += draws
    found = stream.classification()._asdict()
    together = LOGITS.reshape(-1, ROWS, CLASSES)
    expected = classification(together, LABELS, logits=True)._asdict()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)
    p = np.exp(log_softmax(together, -1))
    np.testing.assert_allclose(stream.probabilities, p.mean(0), rtol=1e-12)
    own = -(p * np.log(p)).sum(-1).mean()
    assert found["mutual_information"] == pytest.approx(found["entropy"] - own)
    assert stream.num_draws == CHAINS * DRAWS


def test_rows_without_labels_have_entropies() -> None:
    """Draws that disagree on the first row, and are each unsure of the second."""
    unlabelled, sure, doubt = PredictionStream(), [0.9, 0.1], [0.5, 0.5]
    labelled = PredictionStream([1, 0])
    p = np.array([[[sure, doubt], [sure[::-1], doubt]]])
    for stream in (unlabelled, labelled):
        stream.add(p[:, :1])
        stream.add(p[:, 1:])
        own = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
        np.testing.assert_allclose(stream.entropy, np.log(2) * np.ones(2))
        np.testing.assert_allclose(stream.mutual_information, [np.log(2) - own, 0], atol=1e-12)
    assert labelled.classification().mutual_information == pytest.approx((np.log(2) - own) / 2)
    assert labelled.classification().brier == pytest.approx(0.25)
    for measure in (unlabelled.classification, unlabelled.function_space):
        with pytest.raises(ValueError, match=r"expected labels, .*PredictionStream\(labels\)"):
            measure()
    for name in ("entropy", "mutual_information"):
        with pytest.raises(ValueError, match="call `add`"):
            getattr(PredictionStream(), name)


def test_labels_may_be_booleans() -> None:
    streams = [PredictionStream(LABELS.clip(0, 1).astype(t), logits=True) for t in (int, bool)]
    for stream in streams:
        stream.add(LOGITS[..., :2])
    expected, found = (stream.classification() for stream in streams)
    np.testing.assert_equal(found._asdict(), expected._asdict())


def test_labels_that_are_improbable_do_not_underflow() -> None:
    stream = PredictionStream([0], logits=True)
    for shift in (800.0, 900.0):
        stream.add(np.array([[[[0.0, shift]]]]))
    assert stream.classification().nll == pytest.approx(800 + np.log(2))


@pytest.mark.arviz
@pytest.mark.parametrize(("rho", "draws", "whole"), [(0.0, 500, 496), (0.9, 8000, 7936)])
def test_function_space_is_that_of_the_draws(rho: float, draws: int, whole: int) -> None:
    """Batches of 8 and of 128 draws; the last one has only begun."""
    chains, rows = 4, 20
    rng = np.random.default_rng(1)
    x = np.zeros((chains, draws, rows))
    x[:, 0] = rng.normal(size=(chains, rows))
    for k in range(1, draws):
        x[:, k] = rho * x[:, k - 1] + (1 - rho**2) ** 0.5 * rng.normal(size=(chains, rows))
    x[0, :, 0] += 1.0  # a chain that is elsewhere
    p = 0.5 + 0.01 * x
    stream = PredictionStream(np.ones(rows, int))
    for first in range(0, draws, 130):
        stream.add(p[:, first : first + 130])
    rhat, ess = stream.function_space()
    used = p[:, :whole]
    expected = [arviz.rhat(used[:, :, k], method="split") for k in range(rows)]
    np.testing.assert_allclose(rhat, expected, rtol=1e-6)
    assert rhat[0] > 1.03
    assert rhat[1:].max() < 1.03
    theory = chains * draws * (1 - rho) / (1 + rho)
    # the variance of so many means; with a correlation time of 19 that of 128 draws is 7% low
    batches = chains * min(draws**0.5, 63)
    error = (2 / batches) ** 0.5 / (rows - 1) ** 0.5
    assert np.mean(1 / ess[1:]) * theory == pytest.approx(1, abs=4 * error + 0.1)


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
        run(first, random.key(0), X, LABELS, monitor=seen.append, **given)
        assert [x.shape[1] for x in seen] == [4, 2]
    stream = PredictionStream(LABELS, logits=True)
    found = run(
        sampler(10, postprocess_fn=predict), random.key(0), X, LABELS, monitor=stream.add, **given
    )
    logits = found.mcmc.get_samples(group_by_chain=True)
    weights = run(sampler(10), random.key(0), X, LABELS).mcmc.get_samples(group_by_chain=True)["w"]
    np.testing.assert_allclose(logits, np.einsum("ri,cdik->cdrk", X, weights), atol=1e-5)
    together = np.reshape(logits, (-1, ROWS, CLASSES))
    expected = classification(together, LABELS, logits=True)
    assert stream.num_draws == 10 * CHAINS
    assert stream.classification().nll == pytest.approx(expected.nll)


@pytest.mark.parametrize(
    ("error", "match", "act"),
    [
        (ValueError, "no draws have been added", lambda s: s.classification()),
        (ValueError, "no draws have been added", lambda s: s.probabilities),
        (ValueError, r"shape \(chains, draws, rows, classes\)", lambda s: s.add(LOGITS[0, 0])),
        (ValueError, r"labels must have shape \(3,\)", lambda s: s.add(LOGITS[:, :, :3])),
        (ValueError, "one array, got a dict of", lambda s: s.add({"a": LOGITS, "b": LOGITS})),
        (ValueError, "of 2 chains as before, got 1", lambda s: (s.add(LOGITS), s.add(LOGITS[:1]))),
        (ValueError, "at least 16 draws", lambda s: (s.add(LOGITS[:, :9]), s.function_space())),
        (
            ValueError,
            r"of shape \(7, 3\) for each draw as before",
            lambda s: (s.add(LOGITS), s.add(np.concatenate([LOGITS, LOGITS], -1))),
        ),
    ],
)
def test_bad_input(error: type[Exception], match: str, act: Any) -> None:
    with pytest.raises(error, match=match):
        act(PredictionStream(LABELS, logits=True))


def test_monitor_must_be_a_function() -> None:
    with pytest.raises(TypeError, match=r"monitor must be a function of draws.* got 3"):
        run(MCMC(SGHMC(model), num_warmup=1, num_samples=1), random.key(0), X, LABELS, monitor=3)
