"""Export to ArviZ; the same under ArviZ 0.2x and 1.x."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS, Predictive, log_likelihood
from scipy import stats
from targets import as_if_run, vectorized

import numpyro_geom
from numpyro_geom import SGRLD, RiemannianLaplace
from numpyro_geom._numpyro import arguments_of
from numpyro_geom.diagnostics import diagnose, replay, to_inference_data
from numpyro_geom.laplace import LaplaceDraws

pytestmark = pytest.mark.arviz

ROWS = 53
LOG_PROB_ATOL = 2e-5
"""Float32 log probabilities here are sums of a few terms of at most about 10, each rounded to
6e-7 relative: two orders of summation differ by a few 1e-6."""


def logistic(X: jax.Array, y: jax.Array | None = None) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    numpyro.deterministic("odds", jnp.exp(w))
    with numpyro.plate("data", X.shape[0]) as i:
        logits = numpyro.deterministic("logits", X[i] @ w)
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=None if y is None else y[i])


def logistic_data(rows: int = ROWS) -> tuple[jax.Array, jax.Array]:
    X = random.normal(random.key(0), (rows, 3))
    return X, (X[:, 0] + random.normal(random.key(1), (rows,)) > 0).astype(int)


def vector(rows: int, *shape: int) -> jax.Array:
    return random.normal(random.key(8), (rows, *shape))


def sample(kernel: Any, *args: Any, **options: Any) -> MCMC:
    """A run of a few draws, unless the options say more."""
    run = {k: options.pop(k) for k in ("init_params", "extra_fields") if k in options}
    options = {"num_warmup": 5, "num_samples": 6, "progress_bar": False, **options}
    mcmc = MCMC(kernel, **options)
    mcmc.run(random.key(3), *args, **run)
    return mcmc


def as_run(kernel: Any, draws: Any, *args: Any, **kwargs: Any) -> MCMC:
    """An MCMC as it is after a run that drew this, chains and draws first."""
    leaves = jax.tree.leaves(draws)
    chains, num_samples = leaves[0].shape[:2] if leaves else (1, 1)
    return as_if_run(vectorized(kernel, 0, num_samples, chains), draws, *args, **kwargs)


def drawn(model: Callable, *args: Any, num_draws: int = 2) -> MCMC:
    """Two chains of prior draws in a run's place: nothing of a sampler has to be compiled."""

    def one(key: jax.Array) -> dict[str, jax.Array]:
        seeded = handlers.uncondition(handlers.seed(model, key))
        trace = handlers.trace(seeded).get_trace(*args)
        return {
            name: site["value"]
            for name, site in trace.items()
            if site["type"] in ("sample", "deterministic")
            and "was_observed" not in site.get("infer", {})
        }

    draws = [one(key) for key in random.split(random.key(5), 2 * num_draws)]
    stacked = jax.tree.map(
        lambda *x: np.stack(x).reshape((2, num_draws, *np.shape(x[0]))), *jax.device_get(draws)
    )
    return as_run(NUTS(model), stacked, *args)


def quick(model: Callable, step_size: float = 1e-3, **options: Any) -> SGRLD:
    """A kernel that compiles fast and measures nothing."""
    return SGRLD(model, step_size=step_size, num_steps=2, **options)


@pytest.fixture(scope="module")
def nuts() -> MCMC:
    """As NUTS leaves it; test_compare.py has a run that it made."""
    args, rng = logistic_data(), np.random.default_rng(3)
    w = rng.normal(size=(2, 60, 3)).astype(np.float32)
    energy = rng.normal(size=(2, 60)).astype(np.float32)
    fields = {
        "potential_energy": energy,
        "energy": energy + 1,
        "num_steps": rng.choice([1, 3, 7, 15], size=(2, 60)),
        "adapt_state.step_size": np.full((2, 60), 0.3, np.float32),
        "diverging": np.zeros((2, 60), bool),
    }
    draws = {"w": w, "odds": np.exp(w), "logits": w @ np.asarray(args[0]).T}
    return as_if_run(vectorized(NUTS(logistic), 50, 60, 2), draws, *args, fields=fields)


@pytest.fixture(scope="module")
def sgrld() -> MCMC:
    return sample(
        quick(logistic, step_size=5e-3, batch_size=20),
        *logistic_data(),
        num_warmup=200,
        num_samples=200,
        num_chains=2,
        chain_method="vectorized",
    )


@pytest.fixture(scope="module")
def unmeasured() -> MCMC:
    """All rows at every step, nothing automatic; NumPy arguments, every second draw kept."""
    return sample(
        quick(logistic),
        *(np.asarray(x) for x in logistic_data()),
        thinning=2,
        extra_fields=("accept_prob", "metric_state"),
    )


def subsampling_model(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    shift = numpyro.param("shift", 5.5)
    with numpyro.plate("data", y.shape[0], subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(mu + shift, 1), obs=y[i])


@pytest.fixture(scope="module")
def subsampling() -> MCMC:
    """The model itself requests 10 rows, and has a `param` site."""
    y = vector(ROWS)
    return sample(quick(subsampling_model), y, num_chains=2, chain_method="vectorized")


def groups_of(idata: Any) -> set[str]:
    groups = idata.groups() if callable(idata.groups) else idata.groups
    return {name.strip("/") for name in groups} - {""}


def full_log_likelihood(mcmc: MCMC, name: str = "y") -> np.ndarray:
    """NumPyro's own, all rows at once, shaped (chains, draws, ...)."""
    seeded = handlers.seed(mcmc.sampler.model, random.key(0))
    found = log_likelihood(
        seeded,
        mcmc.get_samples(group_by_chain=True),
        *arguments_of(mcmc)[0],
        batch_ndims=2,
        parallel=True,
    )
    return np.asarray(found[name])


# Groups, dimensions, statistics, attributes


def test_container_is_what_the_installed_arviz_works_on(nuts: MCMC) -> None:
    line = "DataTree" if int(az.__version__.split(".")[0]) >= 1 else "InferenceData"
    assert type(to_inference_data(nuts)).__name__ == line


def test_groups_values_and_dimensions(sgrld: MCMC) -> None:
    _, y = logistic_data()
    idata = to_inference_data(sgrld, log_likelihood=True)
    assert groups_of(idata) == {
        "posterior",
        "sample_stats",
        "observed_data",
        "log_likelihood",
    }
    draws = sgrld.get_samples(group_by_chain=True)
    for name, dims in {"w": "w_dim_0", "odds": "odds_dim_0", "logits": "data"}.items():
        assert idata.posterior[name].dims == ("chain", "draw", dims)
        np.testing.assert_array_equal(idata.posterior[name], draws[name])
    assert idata.observed_data["y"].dims == ("data",)
    np.testing.assert_array_equal(idata.observed_data["y"], y)
    assert idata.log_likelihood["y"].dims == ("chain", "draw", "data")
    np.testing.assert_array_equal(idata.log_likelihood["data"], np.arange(ROWS))


def test_sample_stats_of_a_stochastic_gradient_kernel(sgrld: MCMC) -> None:
    stats = to_inference_data(sgrld).sample_stats
    fields = sgrld.get_extra_fields(group_by_chain=True)
    assert set(stats.data_vars) == {
        "configurational_temperature",
        "diverging",
        "energy",
        "grad_norm",
        "lp",
        "n_steps",
        "step_size",
    }
    np.testing.assert_array_equal(stats["energy"], fields["potential_energy"])
    np.testing.assert_array_equal(stats["lp"], -fields["potential_energy"])
    np.testing.assert_array_equal(stats["n_steps"], fields["num_steps"])


def test_acceptance_rate_where_steps_are_adjusted(unmeasured: MCMC) -> None:
    kernel = quick(logistic, divergence="frozen", adjusted=True)
    mcmc = sample(kernel, *logistic_data())
    rate = to_inference_data(mcmc).sample_stats["acceptance_rate"]
    np.testing.assert_array_equal(rate, mcmc.get_extra_fields(True)["accept_prob"])
    # the field is there on request, but without a test it says nothing
    assert "accept_prob" in unmeasured.get_extra_fields()
    assert "acceptance_rate" not in to_inference_data(unmeasured).sample_stats


def test_sample_stats_of_nuts_have_arviz_names(nuts: MCMC) -> None:
    stats = to_inference_data(nuts).sample_stats
    fields = nuts.get_extra_fields(group_by_chain=True)
    np.testing.assert_array_equal(stats["lp"], -fields["potential_energy"])
    np.testing.assert_array_equal(stats["energy"], fields["energy"])
    np.testing.assert_array_equal(stats["step_size"], fields["adapt_state.step_size"])
    np.testing.assert_array_equal(
        stats["tree_depth"], np.floor(np.log2(fields["num_steps"])).astype(int) + 1
    )


def test_attributes_name_kernel_settings_data_seeds_and_versions(sgrld: MCMC) -> None:
    attrs = to_inference_data(sgrld).posterior.attrs
    state = sgrld.last_state
    assert attrs["kernel"] == "SGRLD"
    assert attrs["inference_library"] == "numpyro_geom"
    assert attrs["numpyro_geom_version"] == numpyro_geom.__version__
    assert attrs["numpyro_version"] == numpyro.__version__
    assert attrs["jax_version"] == jax.__version__
    assert attrs["arviz_version"] == az.__version__
    for name, value in sgrld.sampler.settings.record().items():
        assert attrs[name] == value
    assert (attrs["num_data"], attrs["num_warmup"], attrs["num_chains"]) == (ROWS, 200, 2)
    assert json.loads(attrs["batch_sizes"]) == {"data": 20}
    assert json.loads(attrs["plate_sizes"]) == {"data": ROWS}
    np.testing.assert_array_equal(json.loads(attrs["seed"]), state.seed)
    np.testing.assert_array_equal(attrs["final_step_size"], state.step_size)
    np.testing.assert_array_equal(attrs["final_num_steps"], state.num_steps)


def test_attributes_leave_out_what_was_not_measured(nuts: MCMC, unmeasured: MCMC) -> None:
    attrs = to_inference_data(unmeasured).posterior.attrs
    assert "lam_H" not in attrs
    attrs = to_inference_data(nuts).posterior.attrs
    assert (attrs["kernel"], attrs["inference_library"]) == ("NUTS", "numpyro")
    assert "num_data" not in attrs


def test_numpy_arguments_thinning_and_a_single_chain(unmeasured: MCMC) -> None:
    idata = to_inference_data(unmeasured, log_likelihood=True)
    np.testing.assert_array_equal(idata.observed_data["y"], logistic_data()[1])
    assert idata.posterior["w"].shape == (1, 3, 3)
    assert idata.log_likelihood["y"].shape == (1, 3, ROWS)
    assert isinstance(idata.posterior.attrs["final_step_size"], float)


def test_netcdf_round_trip(sgrld: MCMC, tmp_path: Any) -> None:
    idata = to_inference_data(
        sgrld,
        log_likelihood=True,
        constant_data={"X": logistic_data()[0]},
        prior={"w": np.ones((1, 5, 3))},
    )
    path = str(tmp_path / "run.nc")
    idata.to_netcdf(path)
    read = az.from_netcdf(path)
    assert groups_of(read) == groups_of(idata)
    for group in groups_of(idata):
        for name, values in idata[group].data_vars.items():
            np.testing.assert_array_equal(read[group][name], values)
            assert read[group][name].dims == values.dims
    attrs = idata.posterior.attrs
    assert set(read.posterior.attrs) == set(attrs)
    for name, value in attrs.items():
        np.testing.assert_array_equal(read.posterior.attrs[name], value)
    read.close()


@pytest.mark.filterwarnings("ignore:Estimated shape parameter:UserWarning")  # of few draws
def test_arviz_summary_loo_and_trace_plot(sgrld: MCMC) -> None:
    idata = to_inference_data(sgrld, log_likelihood=True)
    table = az.summary(idata, var_names=["w"], round_to="none")
    # ArviZ takes the mean in another order: float32 rounding of some hundred terms below 10
    np.testing.assert_allclose(
        table["mean"].astype(float), sgrld.get_samples()["w"].mean(0), atol=1e-4
    )
    loo = az.loo(idata)
    assert loo.n_data_points == ROWS
    az.plot_trace(idata, var_names=["w"])


def test_from_numpyro_accepts_the_kernel(sgrld: MCMC) -> None:
    idata = az.from_numpyro(sgrld, log_likelihood=True)
    assert idata.log_likelihood["y"].shape == (2, 200, ROWS)


def test_from_numpyro_accepts_a_model_that_subsamples(subsampling: MCMC) -> None:
    idata = az.from_numpyro(subsampling, log_likelihood=True)
    assert idata.observed_data["y"].shape == (ROWS,)
    assert idata.log_likelihood["y"].shape == (2, 6, ROWS)


# Log likelihood


@pytest.mark.parametrize("chunk_size", [1, 7, 60, 1000])
def test_log_likelihood_is_numpyros_whatever_the_chunks(
    nuts: MCMC, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "LANES", chunk_size)
    idata = to_inference_data(nuts, log_likelihood=True)
    np.testing.assert_allclose(
        idata.log_likelihood["y"], full_log_likelihood(nuts), rtol=0, atol=LOG_PROB_ATOL
    )


def test_log_likelihood_covers_all_rows_of_a_subsampling_model(subsampling: MCMC) -> None:
    y = np.asarray(vector(ROWS))
    assert dict(subsampling.sampler.bound.plan.batch_sizes) == {"data": 10}
    # `param` sites have the values that the kernel sampled with: another key gives another shift
    shift = float(subsampling.sampler.bound.model.fixed["shift"])
    idata = to_inference_data(subsampling, log_likelihood=True)
    np.testing.assert_array_equal(idata.observed_data["y"], y)
    residual = y - np.asarray(subsampling.get_samples(True)["mu"], float)[..., None] - shift
    # halves of squared residuals of up to 60, rounded to 6e-7 relative
    np.testing.assert_allclose(
        idata.log_likelihood["y"],
        -(residual**2) / 2 - np.log(2 * np.pi) / 2,
        rtol=2e-6,
        atol=LOG_PROB_ATOL,
    )


def local_latents(y: jax.Array, group: jax.Array) -> None:
    """One latent per row, latents in nested plates, and a likelihood of vectors."""
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.3))
    with numpyro.plate("groups", 4):
        level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]) as i:
        shift = numpyro.sample("shift", dist.Normal(level[group[i]], scale))
        mix = numpyro.sample("mix", dist.LogNormal(0, 1).expand([3]).to_event(1))
        numpyro.deterministic("doubled", 2 * shift)
        numpyro.sample("y", dist.Normal(shift[:, None] + mix, scale[None]).to_event(1), obs=y[i])


def nested(y: jax.Array, w: jax.Array) -> None:
    """Observed sites in nested plates, in an independent plate, and in none."""
    with numpyro.plate("rows", y.shape[1]) as j:
        row = numpyro.sample("row", dist.Normal(0, 1))
    columns = numpyro.plate("columns", y.shape[0], dim=-2)
    with columns as i:
        column = numpyro.sample("column", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[1], dim=-1) as j:
            cell = numpyro.sample("cell", dist.Normal(row + column, 1))
            numpyro.sample("y", dist.Normal(cell, 1), obs=y[i][:, j])
    with numpyro.plate("others", w.shape[0]) as k:
        numpyro.sample("w", dist.Normal(row[0], 1), obs=w[k])
    numpyro.sample("total", dist.Normal(column.sum(), 1), obs=1.5)


def unindexed(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def no_plate(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu, 1).expand(y.shape), obs=y)


def random_walk(y: jax.Array) -> None:
    """Rows that depend on each other although the data are indexed."""
    with numpyro.plate("data", y.shape[0]) as i:
        step = numpyro.sample("step", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(jnp.cumsum(step), 1), obs=y[i])


def in_a_scan(y: jax.Array) -> None:
    """A plate that is known from its site alone."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))

    def step(carry: None, row: jax.Array) -> tuple[None, None]:
        with numpyro.plate("series", y.shape[1]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=row)
        return carry, None

    scan(step, None, y)


def masked_and_scaled(y: jax.Array, present: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]) as i, handlers.scale(scale=3.0):
        numpyro.sample("y", dist.Normal(mu, 1).mask(present[i]), obs=y[i])


# model, arguments, and observed sites
MODELS = {
    "local latents": (local_latents, (vector(37, 3), jnp.arange(37) % 4), {"y"}),
    "nested plates": (nested, (vector(3, 37), vector(29)), {"y", "w", "total"}),
    "unindexed": (unindexed, (vector(37),), {"y"}),
    "no plate": (no_plate, (vector(37),), {"y"}),
    "in a scan": (in_a_scan, (vector(3, 37),), {"y"}),
    "random walk": (random_walk, (vector(37),), {"y"}),
    "masked and scaled": (masked_and_scaled, (vector(37), jnp.arange(37) % 3 > 0), {"y"}),
}


@functools.cache
def awkward(name: str) -> MCMC:
    return drawn(MODELS[name][0], *MODELS[name][1])


@pytest.mark.parametrize("name", MODELS)
def test_log_likelihood_of_awkward_models(name: str) -> None:
    mcmc, sites = awkward(name), MODELS[name][2]
    idata = to_inference_data(mcmc, log_likelihood=True)
    assert set(idata.log_likelihood.data_vars) == sites
    for site in sites:
        expected = full_log_likelihood(mcmc, site)
        assert idata.log_likelihood[site].shape == expected.shape
        # prior draws: log probabilities of up to some hundreds
        np.testing.assert_allclose(
            idata.log_likelihood[site], expected, rtol=1e-5, atol=LOG_PROB_ATOL
        )


def test_masked_rows_have_no_likelihood_and_scale_is_left_out() -> None:
    mcmc = awkward("masked and scaled")
    y, present = arguments_of(mcmc)[0]
    found = np.asarray(to_inference_data(mcmc, log_likelihood=True).log_likelihood["y"])
    assert np.all(found[..., ~np.asarray(present)] == 0)
    residual = np.asarray(y) - np.asarray(mcmc.get_samples(True)["mu"], float)[..., None]
    expected = np.where(present, -(residual**2) / 2 - np.log(2 * np.pi) / 2, 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOG_PROB_ATOL)


def test_dimensions_of_nested_plates_and_local_latents() -> None:
    idata = to_inference_data(awkward("nested plates"), log_likelihood=True)
    sample_dims = ("chain", "draw")
    assert idata.posterior["row"].dims == (*sample_dims, "rows")
    # a plate at dimension -2 leaves an axis of length one behind it
    assert idata.posterior["column"].dims == (*sample_dims, "columns", "column_dim_0")
    assert idata.posterior["cell"].dims == (*sample_dims, "columns", "rows")
    assert idata.log_likelihood["y"].dims == (*sample_dims, "columns", "rows")
    assert idata.log_likelihood["total"].dims == sample_dims
    assert idata.observed_data["y"].dims == ("columns", "rows")
    assert idata.observed_data["total"].dims == ()

    idata = to_inference_data(awkward("local latents"), log_likelihood=True)
    assert idata.posterior["mix"].dims == (*sample_dims, "data", "mix_dim_0")
    assert idata.posterior["doubled"].dims == (*sample_dims, "data")
    assert idata.posterior["level"].dims == (*sample_dims, "groups")
    assert idata.observed_data["y"].dims == ("data", "y_dim_0")
    # an event of the likelihood is one value
    assert idata.log_likelihood["y"].dims == (*sample_dims, "data")


PRIOR_SD = 0.1


def conflicting(y: jax.Array) -> None:
    """A prior that says 0 and data that say 1; a scale whose prior says little."""
    numpyro.sample("scale", dist.HalfNormal(10))
    with numpyro.plate("groups", 2):
        level = numpyro.sample("level", dist.Normal(0, PRIOR_SD))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(level[i % 2], 1), obs=y[i])


def test_log_prior_and_sensitivity_to_the_prior() -> None:
    rng = np.random.default_rng(0)
    y = 1 + rng.normal(size=40)
    scale = rng.uniform(0.8, 1.2, size=(2, 500))
    precision = 1 / PRIOR_SD**2 + y.size / 2
    mean = np.array([y[0::2].sum(), y[1::2].sum()]) / precision
    level = mean + rng.normal(size=(2, 500, 2)) / np.sqrt(precision)
    mcmc = as_run(NUTS(conflicting), {"scale": scale, "level": level}, jnp.asarray(y))
    idata = to_inference_data(mcmc, log_likelihood=True, log_prior=True)

    prior = idata.log_prior
    assert prior["level"].dims == ("chain", "draw", "groups")
    tails = np.log(2) + stats.norm.logpdf(scale, 0, 10)  # no Jacobian: a density of the scale
    for name, expected in {"scale": tails, "level": stats.norm.logpdf(level, 0, PRIOR_SD)}.items():
        np.testing.assert_allclose(prior[name], expected, rtol=1e-5, atol=LOG_PROB_ATOL)
    # a prior to the power 1.5 moves the mean as its precision times 1.5 does
    weight = np.exp(0.5 * prior["level"].sum("groups"))
    moved = idata.posterior["level"].weighted(weight).mean(("chain", "draw"))
    expected = mean * precision / (precision + 0.5 / PRIOR_SD**2)
    errors = 5 / np.sqrt(precision * level[..., 0].size)  # one in a million runs is outside
    np.testing.assert_allclose(moved, expected, rtol=0, atol=errors)
    assert np.all(level.mean((0, 1)) - expected > errors)
    sensitivity = az.psense(idata) if hasattr(az, "psense") else az.psens(idata)
    assert sensitivity["level"].min() > 0.05 > sensitivity["scale"]  # the authors' threshold


def test_log_prior_needs_a_model(potential_run: MCMC) -> None:
    with pytest.raises(ValueError, match="log_prior needs a kernel with a model"):
        to_inference_data(potential_run, log_prior=True)


def factored(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.factor("extra", -jnp.abs(y[i] - mu))
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def test_factors_only_by_name() -> None:
    y = vector(ROWS)
    mcmc = drawn(factored, y)
    idata = to_inference_data(mcmc, log_likelihood=True)
    assert list(idata.log_likelihood.data_vars) == ["y"]
    assert list(idata.observed_data.data_vars) == ["y"]
    idata = to_inference_data(mcmc, log_likelihood="extra")
    assert list(idata.log_likelihood.data_vars) == ["extra"]
    mu = np.asarray(mcmc.get_samples(True)["mu"])[..., None]
    np.testing.assert_allclose(
        idata.log_likelihood["extra"], -np.abs(np.asarray(y) - mu), rtol=0, atol=LOG_PROB_ATOL
    )


def test_models_that_need_to_know_values() -> None:
    def model(y: jax.Array, group: np.ndarray) -> None:
        with numpyro.plate("groups", int(group.max()) + 1):
            level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("y", dist.Normal(level[group], 1), obs=y)

    mcmc = drawn(model, vector(ROWS), np.arange(ROWS) % 4)
    expected = full_log_likelihood(mcmc)
    found = to_inference_data(mcmc, log_likelihood=True).log_likelihood["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOG_PROB_ATOL)


# Groups that the user adds, labels


def normal_mean(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(2, 3))
    numpyro.deterministic("twice", 2 * mu)
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(mu, 0.1), obs=y[i])


@pytest.fixture(scope="module")
def mean_run() -> MCMC:
    return drawn(normal_mean, vector(ROWS), num_draws=30)


def test_groups_of_the_user(mean_run: MCMC) -> None:
    y = arguments_of(mean_run)[0][0]
    unobserved = handlers.uncondition(normal_mean)
    draws = mean_run.get_samples(group_by_chain=True)
    after = Predictive(unobserved, draws, batch_ndims=2)(random.key(0), y)["y"]
    idata = to_inference_data(
        mean_run,
        posterior_predictive={"y": after},
        constant_data={"X": y},
        coords={"data": [f"row{k}" for k in range(ROWS)], "unused": [1]},
    )
    np.testing.assert_array_equal(idata.posterior_predictive["y"], after)
    assert idata.posterior_predictive["y"].dims == ("chain", "draw", "data")
    np.testing.assert_array_equal(idata.constant_data["X"], y)
    assert idata.constant_data["X"].dims == ("X_dim_0",)
    assert idata.observed_data["data"].values[1] == "row1"


def test_event_dimensions_named_in_the_model() -> None:
    def model(y: jax.Array) -> None:
        prior = dist.Normal(0, 1).expand([2]).to_event(1)
        mu = numpyro.sample("mu", prior, infer={"event_dims": ["side"]})
        with numpyro.plate("data", y.shape[0]) as i:
            numpyro.sample("y", dist.Normal(mu.sum(), 1), obs=y[i])

    assert to_inference_data(drawn(model, vector(5))).posterior["mu"].dims[2] == "side"


def test_names_that_clash_or_that_netcdf_reserves(tmp_path: Any) -> None:
    def model(data: jax.Array) -> None:
        with numpyro.plate("data", data.shape[0]) as i, numpyro.plate("draw", 2):
            mu = numpyro.sample("mu", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mu.sum(0), 1), obs=2 * data[i])

    mcmc = drawn(handlers.scope(model, prefix="part", hide_types=["plate"]), vector(5))
    idata = to_inference_data(mcmc, log_likelihood=True, constant_data={"data": vector(5)})
    assert idata.posterior["part.mu"].dims == ("chain", "draw", "draw_dim", "data_dim")
    assert idata.log_likelihood["part.y"].dims == ("chain", "draw", "draw_dim", "data_dim")
    assert idata.observed_data["part.y"].dims == ("data_dim",)
    idata.to_netcdf(str(tmp_path / "names.nc"))


# potential_fn


def gaussian(z: jax.Array) -> jax.Array:
    """Curvatures 4 and 1."""
    return 2 * z[0] ** 2 + z[1] ** 2 / 2


@pytest.mark.parametrize(
    ("z", "names"),
    [
        (jnp.zeros((2, 4, 3)), {"z": (2, 4, 3)}),
        ((jnp.zeros((2, 4, 2)), [jnp.zeros((2, 4))]), {"z.0": (2, 4, 2), "z.1.0": (2, 4)}),
        (
            {"a": {"b": jnp.zeros((2, 4))}, "c": (jnp.zeros((2, 4)),)},
            {"a.b": (2, 4), "c.0": (2, 4)},
        ),
    ],
    ids=["array", "tuple", "dict"],
)
def test_positions_of_any_structure_become_variables(z: Any, names: dict) -> None:
    idata = to_inference_data(as_run(NUTS(potential_fn=gaussian), z))
    assert groups_of(idata) == {"posterior"}
    assert {name: x.shape for name, x in idata.posterior.data_vars.items()} == names


def test_a_potential_has_no_data(potential_run: MCMC) -> None:
    idata = to_inference_data(potential_run)
    assert groups_of(idata) == {"posterior", "sample_stats"}


@pytest.mark.filterwarnings("ignore:energy above the start")  # in every second draw
def test_the_draw_before_an_undone_step_is_marked() -> None:
    """If the guard undoes a step, the draw before it was already bad."""
    kernel = SGRLD(potential_fn=lambda z: jnp.sum(z**4) / 4, step_size=0.5, num_steps=1)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=200, progress_bar=False)
    mcmc.run(random.key(0), init_params=jnp.array([3.0]))
    undone = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["diverging"])
    assert 0 < undone.sum() < 150
    idata = to_inference_data(mcmc)
    marked = idata.sample_stats["diverging"].values
    np.testing.assert_array_equal(marked[:, :-1], undone[:, :-1] | undone[:, 1:])
    assert undone.mean() <= 0.5 < marked.mean()
    assert "chains that do not move" not in str(diagnose(idata))  # most steps were done


# Draws of a guide


@pytest.fixture(scope="module")
def guided() -> LaplaceDraws:
    """Two chains of weighted draws. Evaluations are made up: a curved metric compiles for long."""
    guide = RiemannianLaplace(logistic, metric="euclidean")
    params = guide.fit(random.key(4), *logistic_data(), num_starts=1)
    draws = guide.draw(random.key(8), params, sample_shape=(2, 100), log_weight=True)
    # half of the log weights call for half of the correction, which is within what is tolerated
    evaluations, log_weight = jnp.arange(200).reshape(2, 100), draws.log_weight / 2
    return draws._replace(num_evaluations=evaluations, log_weight=log_weight)


def reshaped(draws: LaplaceDraws, *shape: int) -> LaplaceDraws:
    """The first of the draws, in another shape."""
    count = int(np.prod(shape))

    def some(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])[:count].reshape(*shape, *x.shape[2:])

    return draws._replace(
        samples=jax.tree.map(some, draws.samples),
        unconstrained=some(draws.unconstrained),
        success=some(draws.success),
        num_evaluations=some(draws.num_evaluations),
        log_weight=some(draws.log_weight),
    )


def test_draws_of_a_guide(guided: LaplaceDraws, tmp_path: Any) -> None:
    _, y = logistic_data()
    idata = to_inference_data(guided, log_likelihood=True)
    for name, dim in {"w": "w_dim_0", "odds": "odds_dim_0", "logits": "data"}.items():
        assert idata.posterior[name].dims == ("chain", "draw", dim)
        np.testing.assert_array_equal(idata.posterior[name], guided.samples[name])
    stats = idata.sample_stats
    assert set(stats.data_vars) == {"success", "n_fevals", "log_weight"}
    np.testing.assert_array_equal(stats["success"], guided.success)
    np.testing.assert_array_equal(stats["n_fevals"], guided.num_evaluations)
    np.testing.assert_array_equal(stats["log_weight"], guided.log_weight)
    np.testing.assert_array_equal(idata.observed_data["y"], y)
    attrs = idata.posterior.attrs
    assert (attrs["guide"], attrs["inference_library"]) == ("RiemannianLaplace", "numpyro_geom")
    assert "kernel" not in attrs
    assert attrs["numpyro_geom_version"] == numpyro_geom.__version__
    assert (attrs["pareto_k"], attrs["seconds_per_draw"]) == (guided.pareto_k, guided.seconds)
    assert attrs.items() >= guided.settings.items()
    assert "created_at" in stats.attrs
    # what ArviZ makes of it
    table = az.summary(idata, var_names=["w"], round_to="none")
    # float32 rounding of some hundred terms below 10
    np.testing.assert_allclose(
        table["mean"].astype(float), guided.samples["w"].mean((0, 1)), atol=1e-4
    )
    assert az.loo(idata).n_data_points == ROWS
    path = str(tmp_path / "draws.nc")
    idata.to_netcdf(path)
    read = az.from_netcdf(path)
    np.testing.assert_array_equal(read.sample_stats["success"], guided.success)
    assert read.posterior.attrs["metric"] == "euclidean"
    read.close()


def test_chains_of_a_guides_draws(guided: LaplaceDraws) -> None:
    idata = to_inference_data(reshaped(guided, 150))
    assert idata.posterior["w"].shape == (1, 150, 3)
    np.testing.assert_array_equal(idata.posterior["w"][0], guided.samples["w"].reshape(-1, 3)[:150])
    assert idata.sample_stats["log_weight"].shape == (1, 150)
    unweighted = guided._replace(log_weight=None, pareto_k=None)
    idata = to_inference_data(unweighted, coords={"w_dim_0": list("abc")})
    assert "log_weight" not in idata.sample_stats
    assert "pareto_k" not in idata.posterior.attrs
    assert list(idata.posterior["w_dim_0"].values) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (),
            r"got a single draw, sample_shape=\(\): call `guide.draw\(rng_key, params",
        ),
        ((2, 3, 4), r"\(chains, draws\), at least one, got sample_shape=\(2, 3, 4\)"),
        ((2, 0), r"at least one, got sample_shape=\(2, 0\)"),
    ],
)
def test_a_guides_draws_have_chains_or_not(
    guided: LaplaceDraws, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        to_inference_data(reshaped(guided, *shape))


def test_a_guides_model_is_replayed_on_all_rows_with_its_params() -> None:
    y = vector(ROWS)
    guide = RiemannianLaplace(subsampling_model, metric="euclidean")
    params = {
        "auto_loc": jnp.zeros(1),
        "shift": jnp.asarray(3.0),
    }  # no fit, which compiles for long
    draws = guide.draw(random.key(5), params, y, sample_shape=(2, 5))
    idata = to_inference_data(draws, log_likelihood=True)
    mean = np.asarray(draws.samples["mu"], float)[..., None] + 3
    # halves of squared residuals of up to some tens, rounded to 6e-7 relative
    np.testing.assert_allclose(
        idata.log_likelihood["y"],
        -((np.asarray(y) - mean) ** 2) / 2 - np.log(2 * np.pi) / 2,
        rtol=2e-6,
        atol=LOG_PROB_ATOL,
    )


def test_draws_of_one_weight_are_fine(guided: LaplaceDraws) -> None:
    exact = guided._replace(log_weight=jnp.full_like(guided.log_weight, -3.0), pareto_k=np.inf)
    assert diagnose(to_inference_data(exact)).ok


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(success=np.arange(200).reshape(2, 100) != 3), "1 of 200 geodesics failed: .* rtol"),
        (
            dict(pareto_k=0.7),
            "of weights: 0.7, expected below 0.57; .* Run MCMC, .* or try metric='fisher'",
        ),
        (dict(pareto_k=np.inf), "could not be estimated from 200 draws"),
        (dict(pareto_k=np.nan), "could not be estimated from 200 draws"),
    ],
    ids=["failed", "far", "infinite", "nan"],
)
def test_reports_on_draws_of_a_guide(guided: LaplaceDraws, changes: dict, message: str) -> None:
    (flagged,) = diagnose(to_inference_data(guided._replace(**changes))).flagged
    assert re.search(message, flagged.sentence)


# Wrong input


def stochastic(z: jax.Array, rng_key: jax.Array) -> jax.Array:
    return jnp.sum(z**2) / 2 + 2.0 * jnp.sum(z * random.normal(rng_key, z.shape))


@pytest.fixture(scope="module")
def potential_run() -> MCMC:
    kernel = SGRLD(potential_fn=stochastic, step_size=0.01, num_steps=1)
    return sample(kernel, init_params=jnp.zeros(1))


BAD = {
    "log_likelihood type": (
        dict(log_likelihood=3),
        TypeError,
        "log_likelihood must be a name",
    ),
    "unknown site": (
        dict(log_likelihood=["y", "mu"]),
        ValueError,
        r"the model has no variables \['mu'\]: it has",
    ),
    "coords type": (dict(coords=[1]), TypeError, "coords must be a dict, got list"),
    "group type": (dict(prior=True), TypeError, "prior must be a dict, got bool"),
    "clashing names": (
        dict(constant_data={"a/b": np.ones(2), "a.b": np.ones(2)}),
        ValueError,
        "two variables of constant_data have one name",
    ),
}


@pytest.mark.parametrize("row", BAD)
def test_wrong_arguments(mean_run: MCMC, row: str) -> None:
    options, error, message = BAD[row]
    with pytest.raises(error, match=message):
        to_inference_data(mean_run, **options)


def test_a_model_is_needed(potential_run: MCMC) -> None:
    with pytest.raises(ValueError, match="needs a kernel with a model"):
        to_inference_data(potential_run, log_likelihood=True)


@pytest.mark.parametrize("function", [to_inference_data, diagnose])
def test_only_a_run_mcmc_will_do(function: Callable, warmed_up: MCMC) -> None:
    with pytest.raises(TypeError, match=r"expected a numpyro.infer.MCMC.*, got dict"):
        function({"w": np.ones(3)})
    mcmc = MCMC(quick(unindexed), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match="has not run"):
        function(mcmc)
    with pytest.raises(ValueError, match="has only been warmed up"):
        function(warmed_up)
    with pytest.raises(ValueError, match="holds no draws of any site"):
        function(as_run(NUTS(unindexed), {}))


@pytest.fixture(scope="module")
def warmed_up() -> MCMC:
    mcmc = MCMC(quick(unindexed), num_warmup=1, num_samples=1, progress_bar=False)
    mcmc.warmup(random.key(0), vector(5))
    return mcmc


def test_a_run_about_to_be_resumed_has_draws(unmeasured: MCMC) -> None:
    mcmc = copy.copy(unmeasured)
    mcmc.post_warmup_state = mcmc.last_state
    to_inference_data(mcmc)


def test_draws_that_were_not_collected() -> None:
    mcmc = awkward("local latents")
    samples = {n: x for n, x in mcmc.get_samples(True).items() if n != "level"}
    mcmc = as_run(NUTS(local_latents), samples, *arguments_of(mcmc)[0])
    assert "level" not in to_inference_data(mcmc).posterior
    with pytest.raises(ValueError, match=r"no draws of the latent sites \['level'\]"):
        to_inference_data(mcmc, log_likelihood=True)
