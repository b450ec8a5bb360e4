"""Automatic choice of the batch size and of the control variate."""

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from targets import SIGMAS, linear, linear_moments, local_latents, regression_data, run
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD
from numpyro_geom._checks import SamplingWarning
from numpyro_geom._util import key_word, scattered_floats
from numpyro_geom.bound import bind
from numpyro_geom.runs import run_in_segments
from numpyro_geom.warmup.start import FEW_ROWS, FIRST_ROWS

ROWS = regression_data(20_000, 3)
FEW = regression_data(FEW_ROWS, 3)


@pytest.fixture(autouse=True)
def no_rows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data stand for large ones."""
    monkeypatch.setattr("numpyro_geom.bound.FEW_OPERATIONS", 0)


def settings_of(kernel: Any, *rows: Any) -> Any:
    """Settings when the model has been read, or after measurements if these are needed."""
    given = random.key(0), 8, None, rows or ROWS, {}
    found, _ = bind(kernel.settings, *given, trajectory=kernel.facts.trajectory)
    if not found.undecided:
        return found.settings
    kernel.init(*given)
    return kernel.settings


def chosen(kernel: Any, *rows: Any) -> tuple:
    found = settings_of(kernel, *rows)
    return found.batch_size, found.control_variate


@pytest.mark.parametrize("kind", short([SGRLD, SGHMC, SGNHT], kept=[SGHMC]))
def test_many_rows_are_drawn_and_corrected(kind: type) -> None:
    kernel = kind(linear)
    rows, controlled = chosen(kernel)
    assert 32 <= rows <= 1024
    assert controlled == 1
    assert dict(kernel.bound.plan.batch_sizes) == {"data": rows}
    assert kernel.settings.record()["batch_size"] == rows  # what an export says


def test_noise_is_that_of_the_scores() -> None:
    """In coordinates in which the posterior is N(0, I), against its formula."""
    kernel = SGHMC(linear, batch_size=100)
    state = kernel.init(random.key(0), 8, None, ROWS, {})
    plain, corrected = kernel.bound.choice.noise
    # scores of a model that is right have covariance I / N; from 2,048 rows known to some percent
    assert plain == pytest.approx(20_000 / 100, rel=0.15)
    # x (x . phi) of normal x has the largest eigenvalue 2 |phi|^2 / N^2; fourth moments: 20%
    phi = scattered_floats(key_word(state.rng_key), 3, jnp.float32)
    assert corrected == pytest.approx(2 * float(phi @ phi) / 100, rel=0.3)


def test_few_rows_are_all_taken() -> None:
    assert chosen(SGHMC(linear), *FEW) == (None, False)
    assert chosen(SGHMC(linear), *regression_data(FEW_ROWS + 500, 3))[0] is not None


def rare(X: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 10).expand(X.shape[1:]).to_event(1))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w - 8), obs=y[i])


def test_rare_events_are_seen_or_take_all_rows() -> None:
    """If a sample of rows misses them, its gradients have nearly no noise."""
    for X, seen in ((ROWS[0], True), (random.normal(random.key(0), (200_000, 1)), False)):
        y = jnp.zeros(len(X)).at[jnp.argsort(X[:, 0])[-3:]].set(1)
        kernel = SGHMC(rare)
        rows, order = chosen(kernel, X, y)
        plain, _ = kernel.bound.choice.noise
        if seen:
            # the largest eigenvalue of the covariance of all rows' gradients, for 256 rows
            assert 85 / 2 < plain * rows / FIRST_ROWS < 2 * 85
            assert order == 1
        else:
            assert plain < 1
            assert (rows, order) == (None, 0)


def test_many_players_of_few_matches_take_all_rows() -> None:
    """The noise is largest along players whom a sample of the matches shows once or never."""
    rng, players, matches = np.random.default_rng(0), 1_000, 30_000
    weight = (np.arange(players) + 5.0) ** -0.8
    pairs = rng.choice(players, (2, matches), p=weight / weight.sum())

    def model(pairs: Any, won: Any) -> None:
        with numpyro.plate("players", players):
            skill = numpyro.sample("skill", dist.Normal(0, 1))
        with numpyro.plate("matches", matches) as i:
            logits = skill[pairs[0][i]] - skill[pairs[1][i]]
            numpyro.sample("won", dist.Bernoulli(logits=logits), obs=won[i])

    kernel = SGHMC(model)
    assert chosen(kernel, pairs, rng.integers(0, 2, matches)) == (None, 0)
    plain, corrected = kernel.bound.choice.noise
    # rows have most of the information, so that the noise is about N / B with 256 rows, times the
    # largest curvature in the chain's coordinates: a low rank leaves up to about 3, in four keys
    assert 0.5 < plain * FIRST_ROWS / matches < 4
    assert corrected > 1


def test_a_run_with_few_gradients_takes_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run is done sooner with fewer rows per step, although their choice takes a second."""
    monkeypatch.undo()
    for num_warmup, takes_all in ((50, True), (50_000, False)):
        kernel = SGHMC(linear)
        found, _ = bind(kernel.settings, random.key(0), num_warmup, None, ROWS, {})
        assert (found.settings.batch_size is None) == (not found.undecided) == takes_all


def bound(kernel: Any, rows: jax.Array) -> Any:
    return bind(kernel.settings, random.key(0), 8, None, (rows,), {})[0]


def test_all_rows_are_taken_if_each_has_a_latent_value() -> None:
    rows = jnp.zeros(FEW_ROWS + 100)
    found = bound(SGHMC(local_latents), rows)
    assert (found.settings.batch_size, dict(found.plan.batch_sizes)) == (None, {})
    assert (found.settings.layout.num_groups, found.settings.layout.num_local) == (len(rows), 1)
    with pytest.warns(UserWarning, match="'z' has a value for each of the 2148 rows of plate"):
        assert bound(SGHMC(local_latents, batch_size=100), rows).settings.batch_size == 100
    # with steps that the user gives, nothing is said
    assert bound(SGHMC(local_latents, batch_size=100, step_size=1e-3), rows).plan.local_axes


def test_few_draws_leave_the_variances_of_many_groups_right() -> None:
    mcmc = MCMC(SGHMC(local_latents), num_warmup=100, num_samples=1, progress_bar=False)
    mcmc.run(random.key(0), 1 + 2**0.5 * random.normal(random.key(1), (FEW_ROWS + 100,)))
    scale = mcmc.last_state.scale
    # the Hessian tells them exactly; from 50 draws the estimates would be 20% off
    np.testing.assert_allclose(scale.inverse_mass_matrix[1:] / (1 / 2), 1, atol=0.2)
    assert mcmc.last_state.num_steps <= 5


@pytest.mark.slow
def test_law_of_latent_values_of_rows() -> None:
    """Against the normal law: mu | y, with y_n ~ N(mu, 2) and mu ~ N(0, 4); z_n | mu, y_n."""
    y = 1 + 2**0.5 * random.normal(random.key(1), (FEW_ROWS + 1000,))
    mcmc = MCMC(SGHMC(local_latents), num_warmup=200, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(0), y)
    draws = mcmc.get_samples()
    variance = 1 / (1 / 4 + len(y) / 2)
    mean = variance * float(jnp.sum(y)) / 2
    # draws are about independent: four standard errors
    error = 4 * (2 / len(draws["mu"])) ** 0.5
    assert abs(float(draws["mu"].mean()) - mean) < error * variance**0.5
    assert float(draws["mu"].std()) == pytest.approx(variance**0.5, rel=error)
    away = np.asarray(draws["z"].mean(0)) - (mean + np.asarray(y)) / 2
    spread = (1 / 2 + variance / 4) ** 0.5
    assert np.sqrt(np.mean(away**2)) < spread * (2 / len(draws["mu"])) ** 0.5
    assert float(draws["z"].std(0).mean()) == pytest.approx(spread, rel=0.01)


def test_a_temperature_that_drowns_the_noise_needs_no_control_variate() -> None:
    kernel = SGRLD(linear, batch_size=1000, temperature=1e4)
    state = kernel.init(random.key(0), 8, None, ROWS, {})
    assert (kernel.settings.batch_size, kernel.settings.control_variate) == (1000, False)
    assert state.control == ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": None}, (None, False)),
        ({"batch_size": 128, "control_variate": False}, (128, False)),
        ({"batch_size": 128, "control_variate": True}, (128, True)),
        ({"batch_size": {"data": 128}}, ({"data": 128}, True)),
        ({"control_variate": False}, (None, False)),
        ({"step_size": 1e-5}, (None, False)),
        ({"step_size": 1e-5, "batch_size": 128}, (128, False)),
        ({"adjusted": True}, (None, False)),
        ({"dense_mass": None}, (FIRST_ROWS, False)),
    ],
    ids=str,
)
def test_what_is_given_stays(settings: dict, expected: tuple) -> None:
    assert chosen(SGRLD(linear, **settings)) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": 256}, (256, 2)),
        ({"batch_size": 256, "control_variate": 1}, (256, 1)),
        ({"batch_size": None}, (None, 0)),
        ({"dense_mass": None}, (None, 0)),  # the noise is not measured
        ({"step_size": 0.1}, (None, 0)),
    ],
    ids=str,
)
def test_a_trajectory_with_minibatches_is_corrected(settings: dict, expected: tuple) -> None:
    kernel = GGMC(linear, **settings)
    found = settings_of(kernel)
    assert (found.batch_size, found.control_variate) == expected
    assert kernel.algorithm(found).target_accept == (0.8 if expected[1] == 1 else 0.95)


def test_a_trajectory_takes_few_rows_if_the_energy_costs_more() -> None:
    rows, order = chosen(GGMC(linear))
    assert (rows <= 256, order) == (True, 2)
    # without a correction the noise would be rejected
    assert chosen(GGMC(linear, control_variate=False)) == (None, 0)


def test_without_a_warm_up_all_rows_are_taken() -> None:
    kernel = SGRLD(linear)
    with pytest.warns(SamplingWarning, match="num_warmup=0"):
        kernel.init(random.key(0), 0, None, ROWS, {})
    assert (kernel.settings.batch_size, kernel.settings.control_variate) == (None, False)


def not_indexed(X: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def test_a_model_that_is_not_indexed_keeps_all_rows_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"all 20000 rows.*not indexed by plate 'data'") as told:
        assert chosen(SGHMC(not_indexed)) == (None, False)
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen(SGHMC(not_indexed, batch_size=None))


def test_what_the_model_subsamples_is_kept() -> None:
    def subsampled(X: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("data", X.shape[0], subsample_size=70) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 0.5), obs=y[i])

    kernel = SGHMC(subsampled)
    chosen(kernel)
    assert dict(kernel.bound.plan.batch_sizes) == {"data": 70}


@pytest.mark.parametrize(
    ("kind", "batching", "method"),
    short(
        [
            *itertools.product([SGHMC], ["replacement", "epoch"], ["sequential", "vectorized"]),
            (GGMC, "replacement", "vectorized"),
        ],
        kept=[(SGHMC, "epoch", "vectorized")],
    ),
)
def test_law_under_the_choice_and_chains_that_agree_on_it(
    kind: type, batching: str, method: str
) -> None:
    kernel = kind(linear) if kind is GGMC else kind(linear, batching=batching)
    mcmc = run(kernel, *ROWS, num_warmup=200, num_samples=1000, num_chains=2, chain_method=method)
    assert kernel.settings.control_variate
    assert mcmc.last_state.control.num_draws.shape == (2,)
    mean, covariance = linear_moments(*ROWS)
    sd = np.sqrt(np.diag(covariance))
    z = (np.asarray(mcmc.get_samples()["w"], np.float64) - mean) / sd
    # 2,000 draws of which one in four counts
    assert np.abs(z.mean(0)).max() < SIGMAS / np.sqrt(500)
    assert np.abs(z.std(0) - 1).max() < 0.05 + SIGMAS / np.sqrt(2 * 500)


def test_within_a_transformation_nothing_is_measured() -> None:
    kernel = SGHMC(linear)
    start = jax.jit(lambda key: kernel.init(key, 8, None, ROWS, {}))
    state = start(random.key(0))
    assert kernel.settings.batch_size == FIRST_ROWS
    assert state.control != ()
    state = jax.jit(lambda s: kernel.sample(s, ROWS, {}))(state)
    assert np.isfinite(state.z["w"]).all()


def test_the_first_chain_decides_for_the_same_data() -> None:
    kernel = SGHMC(linear)
    found = chosen(kernel)
    choice = kernel.bound.choice
    kernel.init(random.key(1), 8, None, ROWS, {})
    assert kernel.bound.choice is choice
    other = tuple(jnp.array(x) for x in ROWS)
    kernel.init(random.key(1), 8, None, other, {})
    assert kernel.bound.choice is not choice
    assert kernel.settings.control_variate == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("method", short(["sequential", "vectorized"], kept=["sequential"]))
def test_a_run_on_disk_goes_on_with_its_choice_and_scale(tmp_path: Any, method: str) -> None:
    def of_length(num_samples: int) -> MCMC:
        settings = {"num_chains": 2, "chain_method": method, "progress_bar": False}
        return MCMC(SGHMC(linear), num_warmup=30, num_samples=num_samples, **settings)

    whole = run_in_segments(of_length(40), random.key(0), *ROWS)
    run_in_segments(of_length(20), random.key(0), *ROWS, directory=tmp_path)
    resumed = run_in_segments(of_length(40), random.key(0), *ROWS, directory=tmp_path)
    for draws in (resumed.mcmc.get_samples()["w"], whole.mcmc.get_samples()["w"]):
        assert np.isfinite(draws).all()
    np.testing.assert_array_equal(resumed.mcmc.get_samples()["w"], whole.mcmc.get_samples()["w"])
