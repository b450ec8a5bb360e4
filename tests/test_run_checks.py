"""The checks of a run: facts of real runs, and each rule on its own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer import MCMC
from targets import as_if_run
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, diagnose, to_inference_data
from numpyro_geom.diagnostics import Check
from numpyro_geom.diagnostics.checks import CHECKS, checks_of, longer
from numpyro_geom.diagnostics.facts import Run, is_measured
from numpyro_geom.diagnostics.table import WIDTH

BIAS, LENGTH = "bias of variances", "relaxation times per chain"
TEMPERATURE = "configurational temperature"


def gaussian(z: jax.Array) -> jax.Array:
    """Curvatures 4 and 1."""
    return 2 * z[0] ** 2 + z[1] ** 2 / 2


def stochastic(z: jax.Array, rng_key: jax.Array) -> jax.Array:
    return jnp.sum(z**2) / 2 + 2.0 * jnp.sum(z * random.normal(rng_key, z.shape))


@functools.cache
def run(kind: type = SGRLD, draws: int = 200, **options: Any) -> MCMC:
    """A run on the Gaussian in its own coordinates, automatic unless the options say more."""
    dim = 1 if options.get("potential_fn") is stochastic else 2
    kernel = kind(**{"potential_fn": gaussian, "dense_mass": None, **options})
    mcmc = MCMC(kernel, num_warmup=20, num_samples=draws, progress_bar=False)
    mcmc.run(random.key(3), init_params=jnp.zeros(dim))
    return mcmc


def plain(**options: Any) -> MCMC:
    return run(divergence="none", **options)


def first_draws(mcmc: MCMC, draws: int | None = None) -> MCMC:
    """The run after its first draws."""
    fields = mcmc.get_extra_fields(group_by_chain=True)
    some = jax.tree.map(lambda x: x[:, :draws], (mcmc.get_samples(group_by_chain=True), fields))
    return as_if_run(mcmc, some[0], fields=some[1], last_state=mcmc.last_state)


def checks_in(mcmc: MCMC) -> dict[str, Check]:
    return {check.name: check for check in diagnose(mcmc).checks}


def made_up(stats: dict | None = None, **facts: Any) -> dict[str, Check]:
    """Checks of a run of which this is known."""
    found = checks_of(Run({}, {} if stats is None else stats, {"final_step_size": 0.1, **facts}))
    return {check.name: check for check in found}


RUNS = {
    "flagged": lambda: first_draws(plain(step_size=0.2), draws=9),  # biased, and too short
    "fine": plain,
    "momentum": lambda: run(SGHMC, draws=100),
    "exact": lambda: run(GGMC, draws=100, target_accept=0.65),
    "not measured": lambda: plain(step_size=0.2, num_steps=3),
}


@pytest.mark.arviz
@pytest.mark.parametrize("kind", short(RUNS, kept=["flagged", "fine", "not measured"]))
def test_a_run_and_its_export_have_the_same_checks(kind: str) -> None:
    mcmc = RUNS[kind]()
    report, exported = diagnose(mcmc), diagnose(to_inference_data(mcmc))
    flagged = {check.name for check in report.flagged}
    assert flagged >= ({BIAS, LENGTH} if kind == "flagged" else set())
    assert "effective draws per gradient" in [check.name for check in report.checks]
    assert [c._replace(value=str(c.value)) for c in report.checks] == [
        c._replace(value=str(c.value)) for c in exported.checks
    ]
    # in the order of causes, under names of the list of checks
    names = [check.name for check in report.checks]
    assert names == [name for name in CHECKS if name in names]
    assert all(len(row) <= WIDTH for row in str(report).splitlines())


def test_a_warning_has_figure_threshold_and_advice() -> None:
    check = Check("figure", 1.5, 0.1, "at most 1", False, "of w", "turn the knob")
    assert check.sentence == "figure: 1.5 +- 0.1, expected at most 1; of w: turn the knob"
    assert Check("figure", 1.5, ok=True, where="of w", advice="turn").remark == "of w"


# Facts of real runs


@pytest.mark.arviz
def test_facts_of_a_gaussian() -> None:
    mcmc = plain()
    found = checks_in(mcmc)
    # h = 0.1 / (4 / 2), relaxation 1 / (h 1) = 20 steps, a draw is half of that (rounded up)
    assert found["step size"].value == pytest.approx(0.05)
    steps = found["steps per draw"].value
    assert steps in (10, 11)
    assert found[BIAS].value == pytest.approx(0.1)
    assert (found[BIAS].ok, found[BIAS].threshold) == (True, "at most 0.1")
    assert found[BIAS].where == (
        "0.1 from discretisation, 0 from minibatch noise, to first order; discretisation binds"
    )
    assert found[LENGTH].where == "of 20 steps each"
    assert found[LENGTH].value == pytest.approx(200 * steps / 20)
    assert found["divergences"].where == "of 200 draws"
    assert found[TEMPERATURE].threshold == "1, within 10%"
    assert "kinetic temperature" not in found


@pytest.mark.arviz
def test_steps_between_kept_draws_count() -> None:
    every, thinned = plain(), first_draws(plain())
    thinned.thinning = 2
    for name in (LENGTH, "passes over the data"):
        assert checks_in(thinned)[name].value == pytest.approx(2 * checks_in(every)[name].value)


def test_minibatch_noise_is_measured_and_binds() -> None:
    mcmc = run(divergence="none", potential_fn=stochastic)
    assert "minibatch noise binds" in checks_in(mcmc)[BIAS].where
    # the gradient's noise has variance 4, estimated from 128 keys: sd 4 sqrt(2 / 128) = 0.5; the
    # largest of about ten estimates is taken
    noise = float(mcmc.last_state.adaptation.noise)
    assert 3 < noise < 4 + 5 * 0.5


def test_where_nothing_was_measured() -> None:
    # far beyond the tolerance, which cannot be known
    found = checks_in(plain(step_size=0.2, num_steps=3))
    assert (found["step size"].value, found["steps per draw"].value) == (pytest.approx(0.2), 3)
    assert np.isnan(found[BIAS].value)
    assert found[BIAS].where.startswith("not measured, because step_size and num_steps are both")
    assert LENGTH not in found
    # h lam_H / 2 is .4 in one of two directions and .1 in the other: the temperature tells
    assert found[TEMPERATURE].ok is False


def test_one_draw_is_too_early_for_a_measurement() -> None:
    mcmc = plain()
    assert is_measured(mcmc.sampler, mcmc.last_state)
    assert not is_measured(mcmc.sampler, mcmc.last_state._replace(i=jnp.asarray(1)))


def kinetic_mean(mcmc: MCMC) -> float:
    return float(np.mean(np.asarray(mcmc.get_extra_fields()["kinetic_temperature"], float)))


@pytest.mark.arviz
def test_facts_of_a_momentum_whose_terms_do_not_bind() -> None:
    mcmc = run(SGHMC, draws=100)
    found = checks_in(mcmc)
    # h = 2 sqrt(s / 4), s = .1 / 1.1; the friction sqrt(1) relaxes at the rate 1 / 2
    assert found["step size"].value == pytest.approx(0.302, abs=5e-4)
    # a draw is a relaxation time of 6.63 steps, rounded up
    assert found["steps per draw"].value == 7
    # both terms are 0: neither of them is what holds the step
    assert found[BIAS].value == 0
    assert found[BIAS].where == (
        "0 from discretisation on a Gaussian, 0 from minibatch noise, to first order; neither binds"
    )
    assert found[LENGTH].where == "of 6.63 steps each"
    assert found[LENGTH].value == pytest.approx(700 / 6.633, abs=0.05)
    assert found["kinetic temperature"].value == pytest.approx(kinetic_mean(mcmc))
    assert "acceptance_rate" not in to_inference_data(mcmc).sample_stats


def test_facts_where_a_thermostat_takes_noise() -> None:
    mcmc = run(SGNHT, draws=100, potential_fn=stochastic)
    found, state = checks_in(mcmc), mcmc.last_state
    h, friction = float(state.step_size), float(state.dynamics.friction)
    noise = h**2 * float(state.adaptation.noise) / (4 * np.tanh(friction * h / 2))
    bias = noise / (1 - h**2 * float(state.adaptation.curvature) / 4)
    assert bias > 0.01
    assert (
        f"{bias:.3g} from minibatch "
        "noise at most (the thermostat takes its isotropic part)" in found[BIAS].where
    )
    assert "minibatch noise binds" in found[BIAS].where
    assert found["kinetic temperature"].value == pytest.approx(kinetic_mean(mcmc))


@pytest.mark.arviz
def test_facts_of_an_exact_kernel() -> None:
    mcmc = run(GGMC, draws=100, target_accept=0.65)
    found = checks_in(mcmc)
    assert found[BIAS].where == "none, steps are Metropolis-adjusted"
    rate = float(np.mean(mcmc.get_extra_fields()["accept_prob"]))
    assert found["acceptance rate"].value == pytest.approx(rate)
    # half critical again: the rate is 1 / 2 in units of 1 / h
    assert found[LENGTH].where == f"of {2 / float(mcmc.last_state.step_size):.3g} steps each"
    assert found["kinetic temperature"].value == pytest.approx(kinetic_mean(mcmc))
    stats = to_inference_data(mcmc).sample_stats
    of_state = mcmc.get_extra_fields(group_by_chain=True)
    for name, field in (("acceptance_rate", "accept_prob"), ("energy", "potential_energy")):
        np.testing.assert_array_equal(stats[name], of_state[field])


def test_adjusted_and_noiseless_runs() -> None:
    fixed = {"step_size": 0.1, "num_steps": 2}
    found = checks_in(run(divergence="frozen", adjusted=True, **fixed))
    assert found[BIAS].where == "none, steps are Metropolis-adjusted"
    cold = checks_in(plain(temperature=0.0, **fixed))
    assert "path of an optimiser" in cold[BIAS].where
    assert TEMPERATURE not in cold


def test_a_given_step_size_beyond_the_tolerance() -> None:
    # h lam_H / 2 = 0.2 * 4 / 2 = 0.4, four times the tolerance
    found = checks_in(plain(step_size=0.2))[BIAS]
    assert (found.ok, found.value) == (False, pytest.approx(0.4))
    assert "discretisation binds" in found.where
    assert "step_size of at most 0.05 or another metric" in found.advice


@pytest.mark.arviz
def test_undone_steps() -> None:
    def cliff(z: jax.Array) -> jax.Array:
        return jnp.where(z > 1.0, jnp.nan, z**2 / 2)

    kernel = SGRLD(potential_fn=cliff, step_size=0.3, num_steps=5)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=50, progress_bar=False)
    mcmc.run(random.key(3), init_params=jnp.zeros(()))
    undone = int(to_inference_data(mcmc).sample_stats["diverging"].sum())
    assert undone > 0
    found = checks_in(mcmc)["divergences"]
    assert (found.value, found.ok, found.where) == (undone, False, "of 50 draws")


# Rules, each on its own


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((0.06, 0.04), "discretisation binds"),
        ((0.04, 0.06), "minibatch noise binds"),
        ((0.0, 0.07), "neither binds"),
        ((0.0, 0.09), "minibatch noise binds"),
        ((0.3, 0.1), "discretisation binds"),
        (([0.02, 0.1], [0.09, 0.0]), "discretisation binds"),  # as the figures shown are
    ],
)
def test_what_binds_follows_from_the_terms_that_are_shown(parts: tuple, expected: str) -> None:
    found = made_up(bias_discretisation=parts[0], bias_noise=parts[1])
    assert found[BIAS].where.endswith(f"; {expected}")


@pytest.mark.parametrize(
    ("name", "facts", "ok"),
    [
        (BIAS, {"bias_discretisation": [0.05, 0.1], "bias_noise": [0.0, 0.004]}, True),
        (BIAS, {"bias_discretisation": [0.01, 0.1], "bias_noise": [0.0, 0.006]}, False),
        (BIAS, {"bias_discretisation": 0.02, "bias_noise": 0.0, "bias_tolerance": 0.01}, False),
        (LENGTH, {"relaxations": 50.0, "relaxation_steps": 5.0}, True),
        (LENGTH, {"relaxations": [10.0, 49.0, 90.0], "relaxation_steps": 5.0}, False),
    ],
)
def test_thresholds(name: str, facts: dict, ok: bool) -> None:
    assert made_up(**facts)[name].ok is ok


@pytest.mark.parametrize(
    ("exact", "count", "ok"),  # chance explains some more than the bound
    [(False, 40, True), (False, 41, None), (False, 60, False)]
    + [(True, 20, True), (True, 21, None), (True, 34, False)],
)
def test_share_of_divergences(exact: bool, count: int, ok: bool) -> None:
    stats = {"diverging": np.arange(4000).reshape(4, 1000) < count}
    found = made_up(stats, **({"target_accept": 0.8} if exact else {}))["divergences"]
    assert (found.value, found.ok) == (count, ok)
    assert ("That is exact" in found.advice) is exact
    assert ("draws avoid" in found.advice) is not exact


@pytest.mark.arviz
def test_temperature_is_held_against_tau() -> None:
    values = 0.5 + 0.01 * np.random.default_rng(0).normal(size=(2, 200))
    stats = {"configurational_temperature": values, "kinetic_temperature": values}
    for name in (TEMPERATURE, "kinetic temperature"):
        assert made_up(stats, temperature=0.5)[name].ok
        assert made_up(stats)[name].ok is False
        assert name not in made_up(stats, temperature=0.0)


@pytest.mark.parametrize(
    ("relaxations", "more_draws"), [(60.0, True), (3.0, True), (0.002, False), (0.0, False)]
)
def test_more_draws_are_advised_where_they_help(relaxations: float, more_draws: bool) -> None:
    advice = longer(Run({}, {}, {"relaxations": relaxations, "relaxation_steps": 1e6}))
    assert ("increase num_samples" in advice) is more_draws
    assert ("the chain has hardly moved" in advice) is not more_draws


def test_draws_of_most_steps_ask_for_other_coordinates() -> None:
    facts = {"lam_H": [9.0, 45.3], "lam_min": 1e-3, "num_steps": "auto", "relaxations": 9.0}
    advice = longer(Run({}, {}, facts | {"final_num_steps": [200, 500]}))
    assert advice.startswith("draws of 500 steps are too short for a condition of 45,300: standard")
    assert longer(Run({}, {}, facts | {"final_num_steps": 200})).startswith("increase num_samples")


def test_steps_that_moved_nothing_are_no_relaxation() -> None:
    known = {"relaxations": 100.0, "relaxation_steps": 5.0}
    assert made_up({}, undone=[0.5, 0.7], **known)[LENGTH].value == pytest.approx(40)
    rejected = {"acceptance_rate": np.full((1, 10), 0.3), "diverging": np.zeros((1, 10), bool)}
    assert made_up(rejected, **known, target_accept=0.8)[LENGTH].value == pytest.approx(30)


def test_chains_have_a_range() -> None:
    stats = {"step_size": np.array([[0.1, 0.1], [0.3, 0.3]]), "n_steps": np.full((2, 2), 4)}
    found = made_up(stats)
    assert found["step size"] == Check(
        "step size", pytest.approx(0.2), where="0.1 to 0.3 over chains"
    )
    assert found["steps per draw"] == Check("steps per draw", 4.0)
