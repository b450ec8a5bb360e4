"""Progress bars: shown if requested, and not otherwise; runs that take long say so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from targets import normal_mean

from numpyro_geom import GGMC, SGRLD, RiemannianLaplace, pace, run
from numpyro_geom._numpyro import Plan
from numpyro_geom.laplace import draw
from numpyro_geom.laplace.geodesic import Geodesic
from numpyro_geom.runs import mesh
from numpyro_geom.sampling.algorithm import MAX_NUM_STEPS

Y = jnp.arange(6.0)


@pytest.mark.parametrize("asked", [True, False])
def test_a_run_obeys_its_mcmc(asked: bool, capsys: pytest.CaptureFixture) -> None:
    kernel = SGRLD(normal_mean, step_size=0.01, num_steps=1)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.progress_bar = asked  # the constructor turns it off where tests run in parallel
    run(mcmc, random.key(0), Y)
    assert ("3/3" in capsys.readouterr().err) is asked


def test_one_process_of_several_shows_the_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    kernel = SGRLD(normal_mean, step_size=0.01, num_steps=1)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.progress_bar = True

    class Second(mesh.Processes):
        def __init__(self, several: bool) -> None:
            super().__init__(several)
            self.is_first = False

    monkeypatch.setattr(mesh, "Processes", Second)
    run(mcmc, random.key(0), Y)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("asked", [True, False])
def test_predictions_obey_their_argument(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def bar(pieces: Any, *, disable: bool, **_: Any) -> Any:
        shown.append(not disable)
        return pieces

    monkeypatch.setattr(draw, "tqdm", bar)
    guide = RiemannianLaplace(normal_mean, metric="euclidean")
    params = guide.fit(random.key(0), Y, num_starts=1)
    guide.predictive(random.key(1), params, Y, num_samples=3, progress_bar=asked)
    guide.sample_posterior(random.key(1), params, sample_shape=(3,), progress_bar=asked)
    assert shown == [asked, asked]


# Runs that take long


def narrow_and_wide() -> None:
    numpyro.sample("x", dist.Normal(0, jnp.array([1e-3, 1.0])).to_event(1))


def rotated() -> None:
    x = numpyro.sample("x", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.factor("ridge", -1e6 * (x[0] - x[1]) ** 2 / 2)


SECONDS = 0.5
"""Pretended time of a gradient."""


def long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SLOWEST", 1.0)  # any gradient could take hours
    monkeypatch.setattr(pace, "_seconds", lambda *_: SECONDS)


def noisy() -> None:
    x = numpyro.sample("x", dist.Normal(0, 1))
    with numpyro.plate("rows", 1000) as i:
        numpyro.sample("y", dist.Normal(x, 1), obs=jnp.arange(1000.0)[i])


LONG: dict[str, tuple[Callable, dict[str, Any], str]] = {
    # 40 draws of 100 steps of half a second
    "given": (
        narrow_and_wide,
        {"step_size": 1e-7, "num_steps": 100},
        "100 steps per draw, 0.5 s .*was given",
    ),
    # relaxation takes 2 / (h 1e-6) steps, with h about .1 / 1
    "curvature": (
        narrow_and_wide,
        {"dense_mass": None},
        rf"{MAX_NUM_STEPS} steps .*0.5 s .*posterior differ by a factor of 1e\+06.*Reparametrise",
    ),
    "expensive": (
        noisy,
        {"step_size": 1e-7, "num_steps": 40},
        r"A gradient on all 1,000 rows is expensive. Use fewer draws, batch_size=... if the model",
    ),
    "noise": (
        noisy,
        {"batch_size": 1, "dense_mass": None},
        r"minibatch noise limits .*: use control_variate=True or a larger batch_size",
    ),
    "rotated": (
        rotated,
        {"dense_mass": False},
        r"The scale is a diagonal: use dense_mass=True, or .*differ by a factor of [12]",
    ),
}


@pytest.mark.parametrize(("model", "settings", "match"), LONG.values(), ids=LONG.keys())
def test_a_long_run_without_a_bar_is_told_of_before_the_first_draw(
    model: Callable, settings: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_runs(monkeypatch)
    steps = settings.get("num_steps", MAX_NUM_STEPS)
    expected = pace.duration(40 * steps * (SECONDS + pace.LEAST_STEP))
    mcmc = MCMC(SGRLD(model, **settings), num_warmup=20, num_samples=20)
    mcmc.progress_bar = False
    with pytest.warns(UserWarning, match=f"takes about {expected}: 40 draws.*{match}") as told:
        mcmc.run(random.key(0))
    assert len(told) == 1


def test_energies_on_all_rows_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 draws of 4 steps of half a second, and an energy of 1,000 / 3 gradients of one row."""
    long_runs(monkeypatch)
    expected = pace.duration(40 * (4 + 1000 / 3) * SECONDS)
    kernel = GGMC(noisy, batch_size=1, step_size=1e-7, num_steps=4)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=20)
    mcmc.progress_bar = False
    with pytest.warns(UserWarning, match=f"about {expected}: .*The energy on all rows, once per"):
        mcmc.run(random.key(0))


def test_a_cheap_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> float:
        raise AssertionError

    monkeypatch.setattr(pace, "_seconds", fail)
    kernel = SGRLD(normal_mean, step_size=0.01, num_steps=100)
    MCMC(kernel, num_warmup=1, num_samples=2000, progress_bar=False).run(random.key(0), Y)


@pytest.mark.parametrize(("dense_mass", "measured"), [(True, False), (None, True)])
def test_a_run_that_is_long_only_with_most_steps_is_not_measured_in_scaled_coordinates(
    dense_mass: Any, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 draws of 500 steps of 40 ms are 800 seconds, and of 10 steps 16."""
    seen = []
    monkeypatch.setattr(pace, "SLOWEST", 1.0)
    monkeypatch.setattr(pace, "_seconds", lambda *_: 0.04)
    monkeypatch.setattr(pace, "_measured", lambda bound, algorithm, state: seen.append(1) or state)
    kernel = SGRLD(normal_mean, dense_mass=dense_mass)
    kernel.before_run(pace.Plan(draws=40, repeats=1, bar=False))
    kernel.init(random.key(0), 20, None, (Y,), {})
    assert bool(seen) is measured


def test_the_time_of_a_gradient_is_measured() -> None:
    def slow(z: dict) -> jax.Array:
        return jnp.sum(jnp.linalg.inv(jnp.eye(200) * (1 + z["x"] ** 2)))

    def fast(z: dict) -> jax.Array:
        return z["x"] ** 2

    seconds = []
    for potential_fn in (slow, fast):
        kernel = SGRLD(potential_fn=potential_fn, step_size=0.01, num_steps=1)
        state = kernel.init(random.key(0), 0, {"x": jnp.ones(())}, (), {})
        seconds.append(pace._seconds(kernel.bound.potential(), state))
    # two products and an inverse of matrices of 200 columns: some 3e7 operations, against 10
    assert 3e-5 < seconds[0] < 10
    assert seconds[0] > 10 * seconds[1]


def test_the_bar_says_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    kernel = SGRLD(normal_mean, step_size=0.01, num_steps=10)
    state = kernel.init(random.key(0), 0, None, (Y,), {})
    plain = kernel.get_diagnostics_str(state)
    assert "left" not in plain
    kernel.before_run(Plan(draws=1000, repeats=1, bar=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first draw is compiled, and a few seconds are too few
        for seconds in (100.0, 0.1, 0.1):
            now[0] += seconds
            text = kernel.get_diagnostics_str(state)
    assert text == f"{plain}. about 100 seconds left"  # 997 draws of a tenth of a second
    longer = state._replace(num_steps=jnp.asarray(1000))
    now[0] += 10.0
    with pytest.warns(UserWarning, match="takes about 3 hours: 1,000 draws"):
        kernel.get_diagnostics_str(longer)
    now[0] += 10.0  # told once
    assert kernel.get_diagnostics_str(longer).endswith(". about 3 hours left")


def test_weighted_draws_that_take_long_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(draw.time, "perf_counter", lambda: now[0])

    def follow(draws: jax.Array, squares: jax.Array, limit: int) -> tuple:
        now[0] += 50.0
        ends = Geodesic(draws, squares >= 0, jnp.ones_like(squares, int))
        return ends, squares

    given = follow, jnp.zeros((40, 2)), jnp.zeros(40), 2, 64
    with pytest.warns(UserWarning, match="other 36 of 40 draws take about 15 minutes") as told:
        draw.follow_in_chunks(*given, progress_bar=False)
    assert len(told) == 1
