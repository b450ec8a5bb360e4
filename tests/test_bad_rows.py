"""Rows that hold NaN: named, or left to the model."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC

from numpyro_geom import GGMC, SGHMC, SGRLD, HostRows, RiemannianLaplace, run_in_segments
from numpyro_geom.model import bad_rows
from numpyro_geom.model.bad_rows import check_rows

BAD = [3, 17]


def regression(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1.0), obs=y[i])


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 2)).astype(np.float32)
    return X, (X @ [1.0, -1.0] + rng.normal(size=30)).astype(np.float32)


def with_nan() -> tuple[np.ndarray, np.ndarray]:
    X, y = data()
    X[BAD[0], 1] = y[BAD[1]] = np.nan
    return X, y


def draws(X, y, **settings) -> np.ndarray:
    kernel = SGRLD(regression, batch_size=8, step_size=1e-3, num_steps=3)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=5, progress_bar=False)
    return np.asarray(
        run_in_segments(mcmc, random.key(0), X, y, **settings).mcmc.get_samples()["w"]
    )


KINDS = {"numpy": lambda x: x, "jax": jnp.asarray, "host": HostRows}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_named(kind: str) -> None:
    X, y = map(KINDS[kind], with_nan())
    with pytest.raises(ValueError, match=r"args\[0\]: row 3 of 30; args\[1\]: row 17 of 30.*leave"):
        draws(X, y)


def test_whole_data_and_kept_rows_pass() -> None:
    check_rows(with_nan(), {}, "keep")
    check_rows(data(), {}, "error")
    check_rows((np.array([np.inf, -np.inf]), random.key(0), "text", 3), {}, "error")


def test_large_arrays_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_rows, "num_at_once", lambda _: 8)
    X = np.zeros((30, 2), np.float32)
    X[[0, 7, 8, 29], 0] = np.nan
    X[5] = np.inf, -np.inf  # whose sum is NaN
    for kind in KINDS.values():
        with pytest.raises(ValueError, match="rows 0, 7, 8, 29 of 30"):
            check_rows((kind(X),), {}, "error")


def test_many_rows_are_counted() -> None:
    X = np.full((30, 2), np.nan)
    with pytest.raises(ValueError, match="rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 20 more of 30"):
        check_rows((X,), {}, "error")


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="on_bad_rows must be"):
        draws(*data(), on_bad_rows="ignore")


PLAIN = {
    "all rows": lambda: GGMC(regression),
    "minibatches": lambda: SGHMC(regression, batch_size=4, step_size=1e-3),
    "minibatches, automatic": lambda: SGHMC(regression, batch_size=4),
}


@pytest.mark.parametrize("kernel", PLAIN)
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_a_plain_mcmc_names_rows(kernel: str, kind: str) -> None:
    X, y = map(KINDS[kind], with_nan())
    mcmc = MCMC(PLAIN[kernel](), num_warmup=5, num_samples=5, progress_bar=False)
    with pytest.raises(ValueError, match=r"in X: row 3 of 30; y: row 17 of 30, and the model"):
        mcmc.run(random.key(0), X, y)


def test_a_guide_names_rows() -> None:
    with pytest.raises(ValueError, match=r"in X: row 3 of 30; y: row 17 of 30, and the model"):
        RiemannianLaplace(regression).fit(random.key(0), *with_nan())


def test_rows_that_the_model_closes_over_are_told_of() -> None:
    X, y = map(jnp.asarray, with_nan())

    def model():
        regression(X, y)

    mcmc = MCMC(SGHMC(model, batch_size=4), num_warmup=5, num_samples=5, progress_bar=False)
    with pytest.raises(
        ValueError, match="is not finite where the chain starts .* check that the data"
    ):
        mcmc.run(random.key(0))


def test_rows_that_the_model_masks_are_no_error() -> None:
    def masked(X, y):
        seen = ~jnp.isnan(y)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", X.shape[0]) as i:
            likelihood = dist.Normal(X[i] @ w, 1.0).mask(seen[i])
            numpyro.sample("y", likelihood, obs=jnp.nan_to_num(y)[i])

    X, _ = data()
    kernel = SGHMC(masked, batch_size=4, step_size=1e-3)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0), X, with_nan()[1])
    assert np.isfinite(mcmc.get_samples()["w"]).all()


def test_whole_numbers_that_the_device_does_not_hold_are_told_of() -> None:
    with pytest.warns(RuntimeWarning, match=r"args\[0\] holds whole numbers beyond int32.*enable"):
        check_rows((np.array([1, 2**40]),), {}, "keep")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_rows((np.array([1, 2**31 - 1]),), {}, "keep")
