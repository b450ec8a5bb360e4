"""Training ends at the highest density, or by early stopping on held-out rows.

Chains start where it ends.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import MCMC
from tqdm import tqdm

from numpyro_geom import SGHMC, RiemannianLaplace, train
from numpyro_geom.warmup import training
from numpyro_geom.warmup.training import Trained

ROWS, COLUMNS = 200, 3
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(ROWS, COLUMNS)), jnp.float32)
Y = jnp.asarray(X @ np.array([1.0, -2.0, 0.5]) + 0.5 * RNG.normal(size=ROWS), jnp.float32)


def regression(X: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 0.5), obs=y[i])


def ridge() -> np.ndarray:
    precision = np.asarray(X.T @ X) / 0.25 + np.eye(COLUMNS)
    return np.linalg.solve(precision, np.asarray(X.T @ Y) / 0.25)


def to_the_mode() -> Trained:
    adam = optax.adam(optax.cosine_decay_schedule(0.05, 1500))
    return train(regression, random.key(0), X, Y, optimiser=adam, num_epochs=1500)


def test_without_validation_it_ends_at_the_mode() -> None:
    found = to_the_mode()
    np.testing.assert_allclose(found.position["w"], ridge(), atol=1e-4)
    assert found.epoch == 1500
    assert found.losses.shape == (1500,)
    assert np.isnan(found.validation).all()


def test_progress_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def at_once(**given: Any) -> Any:
        return tqdm(**{**given, "delay": 0, "mininterval": 0})

    monkeypatch.setattr(training, "tqdm", at_once)
    found = train(regression, random.key(0), X, Y, num_epochs=120)
    assert found.losses.shape == (120,)
    assert "training: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["train", "guide"])
def test_params_at_random_values_are_named(method: str) -> None:
    def model(X: Any, y: Any) -> None:
        numpyro.factor("pull", numpyro.param("shift", lambda key: random.normal(key)))
        regression(X, y)

    fits = {
        "train": partial(train, model),
        "guide": RiemannianLaplace(model).fit,
    }
    with pytest.warns(UserWarning, match=r"param sites \['shift'\] stay at random first"):
        fits[method](random.key(0), X, Y, init_params={"w": jnp.zeros(COLUMNS)})


def test_minibatches_end_near_the_mode_and_starts_differ() -> None:
    schedule = optax.cosine_decay_schedule(0.05, 30 * 10)
    found = train(
        *(regression, random.key(0), X, Y),
        batch_size=20,
        optimiser=optax.adam(schedule),
        num_epochs=30,
        validation=0,
        num_starts=3,
    )
    w = found.position["w"]
    assert w.shape == (3, COLUMNS)
    sd = 0.5 / ROWS**0.5
    np.testing.assert_allclose(w, np.tile(ridge(), (3, 1)), atol=2 * sd)
    assert len(np.unique(w[:, 0])) == 3


def overfitted(X: Any, y: Any) -> None:
    """More columns than rows, and a prior that says nothing."""
    w = numpyro.sample("w", dist.Normal(0, 100).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=y[i])


def test_it_ends_where_held_out_rows_are_most_probable() -> None:
    rng = np.random.default_rng(1)
    inputs = jnp.asarray(rng.normal(size=(80, 100)), jnp.float32)
    y = jnp.asarray(inputs[:, 0] + 2 * rng.normal(size=80), jnp.float32)
    settings: dict[str, Any] = {"batch_size": 16, "optimiser": optax.adam(0.01), "validation": 0.25}
    settings["init_params"] = {"w": jnp.asarray(rng.uniform(-2, 2, 100), jnp.float32)}
    found = train(overfitted, random.key(0), inputs, y, num_epochs=400, **settings)
    best = int(found.epoch)
    assert found.validation.argmin() == best - 1
    assert len(found.validation) == best + 10  # ten epochs without a better one
    # and it would have gone on; means of ten epochs, because batches are noisy
    assert found.losses[best:].mean() < found.losses[best - 10 : best].mean()
    # the rows that judge are none of those that are trained on, and are judged by the model
    left = train(overfitted, random.key(0), inputs, y, num_epochs=best, patience=200, **settings)
    np.testing.assert_allclose(left.position["w"], found.position["w"])
    energies = 0.5 * np.asarray(y - inputs @ left.position["w"]) ** 2 + 0.5 * np.log(2 * np.pi)
    assert energies.mean() < found.validation[best - 1] < 2 * np.sort(energies)[-20:].mean()


@pytest.mark.slow
def test_chains_and_guides_start_there() -> None:
    found = train(regression, random.key(0), X, Y, batch_size=20, num_starts=2, num_epochs=5)
    kernel = SGHMC(regression, step_size=1e-5, num_steps=1)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=1, num_chains=2, progress_bar=False)
    mcmc.run(random.key(0), X, Y, init_params=found.position)
    np.testing.assert_allclose(mcmc.get_samples()["w"], found.position["w"], atol=0.01)
    one = to_the_mode().position
    guide = RiemannianLaplace(regression)
    params = guide.fit(random.key(0), X, Y, init_params=one, max_steps=0)
    np.testing.assert_allclose(params["auto_loc"], one["w"])
    again = train(regression, random.key(1), X, Y, init_params=one, num_epochs=1)
    np.testing.assert_allclose(again.position["w"], one["w"], atol=2e-3)


@pytest.mark.parametrize(
    ("error", "match", "settings"),
    [
        (TypeError, "optimiser must be one of optax", {"optimiser": "adam"}),
        (ValueError, "validation must be .* below 1", {"validation": 1.0, "batch_size": 20}),
        (ValueError, "expected a batch_size, or validation=0", {"validation": 0.1}),
        (ValueError, r"batch_size=190 is more than the 180 rows", {"batch_size": 190}),
        (ValueError, "num_epochs must be an integer", {"num_epochs": 0}),
        (FloatingPointError, "smaller learning rate", {"optimiser": optax.sgd(1e30)}),
    ],
)
def test_bad_input(error: type[Exception], match: str, settings: dict) -> None:
    with pytest.raises(error, match=match):
        train(regression, random.key(0), X, Y, **settings)
