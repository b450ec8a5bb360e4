"""Leave-one-out of many rows: against az.loo on all rows, and a closed form."""

from __future__ import annotations

from typing import Any

import arviz as az
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from scipy import stats
from targets import as_if_run, vectorized

from numpyro_geom import HostRows, to_inference_data
from numpyro_geom.diagnostics import loo
from numpyro_geom.laplace import LaplaceDraws

pytestmark = pytest.mark.arviz

ROWS, CHAINS, DRAWS = 1000, 2, 300
RNG = np.random.default_rng(0)
Y = RNG.normal(1, 2, ROWS).astype(np.float32)
GROUP = np.arange(ROWS) % 4
VARIANCE = 1 / (1 + ROWS / 4)
MEAN = VARIANCE * Y.sum() / 4


def model(y: Any, sd: float = 2.0) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("y", dist.Normal(mu, sd), obs=y[i])


def run(kernel: Any, draws: dict[str, Any], *args: Any) -> MCMC:
    """As after a run, with draws that were made otherwise."""
    return as_if_run(vectorized(kernel, 0, DRAWS, CHAINS), draws, *args)


@pytest.fixture(scope="module")
def mcmc() -> MCMC:
    return run(NUTS(model), {"mu": RNG.normal(MEAN, VARIANCE**0.5, (CHAINS, DRAWS))}, Y)


def elpd(found: Any) -> float:
    return getattr(found, "elpd_loo", None) or found["elpd"]


def by_row(found: Any) -> np.ndarray:
    return found["loo_i" if hasattr(found, "loo_i") else "elpd_i"].values


def left_out() -> np.ndarray:
    """Log density of each row given the others, in closed form."""
    variance = 1 / (1 / VARIANCE - 1 / 4)
    return stats.norm.logpdf(Y, variance * (Y.sum() - Y) / 4, (variance + 4) ** 0.5)


def test_with_all_rows_it_is_that_of_arviz(mcmc: MCMC) -> None:
    full = az.loo(to_inference_data(mcmc, log_likelihood=True), pointwise=True)
    found = loo(mcmc, num_rows=ROWS)
    assert elpd(found) == pytest.approx(elpd(full), abs=0.01)
    assert found["se"] == pytest.approx(full["se"], rel=1 / ROWS)  # 1.x divides by N - 1
    np.testing.assert_allclose(by_row(found), by_row(full), atol=1e-3)
    assert np.abs(found["pareto_k"].values - full["pareto_k"].values).max() < 0.1  # by r_eff
    assert found["subsampling_se"] == 0


def test_some_rows_tell_all_within_the_stated_error(mcmc: MCMC) -> None:
    """Over six choices of rows, errors have the stated size: 4 standard errors of one."""
    exact = left_out()
    found = [loo(mcmc, num_rows=300, seed=k) for k in range(6)]
    # what remains between draws and the closed form: Monte Carlo error of 600 draws
    full = elpd(loo(mcmc, num_rows=ROWS))
    assert full == pytest.approx(exact.sum(), abs=0.2)
    errors = np.array([(elpd(x) - full) / x["subsampling_se"] for x in found])
    assert np.abs(errors).max() < 4
    assert 0.3 < np.sqrt(np.mean(errors**2)) < 1.9
    for x in found:
        assert 0 < x["subsampling_se"] < 0.1
        assert x["se"] == pytest.approx((ROWS * exact.var()) ** 0.5, rel=0.01)
        assert x["n_data_points"] == ROWS == by_row(x).size
        assert x["pareto_k"].size == 300
        assert by_row(x).sum() == pytest.approx(elpd(x))


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # pandas, of ArviZ 0.2x
def test_models_are_compared(mcmc: MCMC) -> None:
    """The difference of two models, which az.compare takes from the pointwise values."""
    other = run(NUTS(model), {"mu": mcmc.get_samples(group_by_chain=True)["mu"]}, Y, 2.2)
    pair = {"right": mcmc, "wide": other}
    of_all = {
        name: az.loo(to_inference_data(x, log_likelihood=True), pointwise=True)
        for name, x in pair.items()
    }
    expected = az.compare(of_all, method="pseudo-BMA")
    found = az.compare(
        {name: loo(x, num_rows=500) for name, x in pair.items()}, method="pseudo-BMA"
    )
    assert list(found.index) == list(expected.index)
    for column in ("elpd_diff", "dse"):
        assert float(found[column]["wide"]) == pytest.approx(float(expected[column]["wide"]), 0.1)


def test_rows_on_the_host_and_in_groups_count_by_row() -> None:
    """Rows with two sites, one of several entries, and a latent value of their own."""

    def several(y: Any, z: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([4]).to_event(1))
        with numpyro.plate("data", len(y)) as i:
            own = numpyro.sample("own", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mu[jnp.asarray(GROUP)[i]] + own, 2), obs=y[i])
            numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1), obs=z[i])

    z = RNG.normal(size=(ROWS, 3)).astype(np.float32)
    draws = {"mu": RNG.normal(1, 0.05, (CHAINS, DRAWS, 4)).astype(np.float32)}
    draws["own"] = RNG.normal(0, 0.1, (CHAINS, DRAWS, ROWS)).astype(np.float32)
    plain, on_host = (
        loo(run(NUTS(several), draws, *data), num_rows=50)
        for data in ((Y, z), (HostRows(Y), HostRows(z)))
    )
    assert elpd(plain) == pytest.approx(elpd(on_host), rel=1e-6)
    expected = stats.norm.logpdf(Y, 1, 2).sum() + stats.norm.logpdf(z).sum()
    assert elpd(plain) == pytest.approx(expected, abs=30)  # .1 of a row's noise is left out
    assert by_row(plain).shape == (ROWS,)


def test_draws_of_a_guide_count_with_their_weights() -> None:
    """Draws twice too wide and off by one sd; without weights the value would be off by 2."""
    sd = VARIANCE**0.5
    mu = RNG.normal(MEAN + sd, 2 * sd, 2000)
    weight = stats.norm.logpdf(mu, MEAN, sd) - stats.norm.logpdf(mu, MEAN + sd, 2 * sd)
    none = np.zeros(2000)
    draws = LaplaceDraws(
        *({"mu": jnp.asarray(mu)}, jnp.asarray(mu)[:, None], none == 0, none),
        *(jnp.asarray(weight), 0.0, 0.0, model, (Y,), {}, {}),
    )
    assert elpd(loo(draws)) == pytest.approx(left_out().sum(), abs=0.3)
    with pytest.raises(ValueError, match="expected draws with weights"):
        loo(draws._replace(log_weight=None))


@pytest.mark.parametrize("plates", [0, 2])
def test_rows_need_a_plate(plates: int) -> None:
    def pairs(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        if not plates:
            numpyro.sample("y", dist.Normal(mu, 1).expand([4]).to_event(1), obs=y[0])
            return
        with numpyro.plate("rows", 10, dim=-2) as i, numpyro.plate("columns", 4, dim=-1):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    draws = {"mu": RNG.normal(0, 0.1, (CHAINS, DRAWS)).astype(np.float32)}
    y = RNG.normal(size=(10, 4)).astype(np.float32)
    with pytest.raises(ValueError, match=r"expected one of \[.*\] as plate, got None"):
        loo(run(NUTS(pairs), draws, y))
    if plates:
        found = loo(run(NUTS(pairs), draws, y), plate="rows")
        assert elpd(found) == pytest.approx(stats.norm.logpdf(y).sum(), abs=2)
        assert by_row(found).shape == (10,)


def test_rows_without_a_density_at_the_mean_are_an_error() -> None:
    def two_sided(y: Any) -> None:
        edge = numpyro.sample("edge", dist.Normal(0, 10))
        with numpyro.plate("data", len(y)) as i:
            numpyro.sample("y", dist.Normal(0, 1 / edge**2), obs=y[i])

    draws = {"edge": np.where(np.arange(DRAWS) % 2, 2.0, -2.0)[None].repeat(CHAINS, 0)}
    with pytest.raises(ValueError, match="a row has no finite log density at the posterior mean"):
        loo(run(NUTS(two_sided), draws, Y))
