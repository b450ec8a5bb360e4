"""The checks of a run: one list, shown by the summary, the warnings and `diagnose`."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS
from targets import as_if_run
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, to_inference_data
from numpyro_geom.diagnostics import (
    Check,
    SamplingWarning,
    checks,
    diagnose,
    print_summary,
    step_size_summary,
    warn_if_unreliable,
)
from numpyro_geom.diagnostics.checks import advice_on_length, draw_checks, run_checks
from numpyro_geom.diagnostics.record import (
    RunRecord,
    is_measured,
    record_of_container,
    record_of_mcmc,
)
from numpyro_geom.diagnostics.report import GROUPS, KINDS
from numpyro_geom.diagnostics.table import WIDTH
from numpyro_geom.sampling.algorithm import MAX_NUM_STEPS

BIAS, LENGTH = "bias of variances, both", "relaxation times per chain"
TEMPERATURE = "configurational temperature"
CURVATURE = "largest over smallest curvature"


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
    return run(gamma="none", **options)


def changed(mcmc: MCMC, draws: int | None = None, **adaptation: Any) -> MCMC:
    """The run after its first draws, or as if warm-up had learned this."""
    state = mcmc.last_state
    state = state._replace(adaptation=state.adaptation._replace(**adaptation))
    fields = mcmc.get_extra_fields(group_by_chain=True)
    some = jax.tree.map(lambda x: x[:, :draws], (mcmc.get_samples(group_by_chain=True), fields))
    return as_if_run(mcmc, some[0], fields=some[1], last_state=state)


def checks_of(mcmc: MCMC) -> dict[str, Check]:
    return {check.name: check for check in run_checks(record_of_mcmc(mcmc))}


def made_up(stats: dict | None = None, **attributes: Any) -> dict[str, Check]:
    """Checks of a run of which this is known."""
    known = {"final_step_size": 0.1, **attributes}
    found = run_checks(RunRecord({}, {} if stats is None else stats, known))
    return {check.name: check for check in found}


def warnings_of(function: Callable, mcmc: MCMC) -> str:
    """Messages of the warnings, which all point here, a line each."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        function(mcmc)
    assert {(w.filename, w.category) for w in warned} <= {(__file__, SamplingWarning)}
    return "\n".join(str(w.message) for w in warned)


# One list of checks


@functools.cache
def flagged_run() -> MCMC:
    """Biased, too short, and with curvature that varies."""
    mcmc = plain(step_size=0.2)
    low = mcmc.last_state.adaptation.curvature / (2 * checks.WIDE_CURVATURE)
    return changed(mcmc, draws=9, curvature_low=low)


RUNS = {
    "flagged": flagged_run,
    "fine": plain,
    "momentum": lambda: run(SGHMC, draws=100),
    "exact": lambda: run(GGMC, draws=100, target_accept=0.65),
    "not measured": lambda: plain(step_size=0.2, num_steps=3),
}


@pytest.mark.arviz
@pytest.mark.parametrize("kind", short(RUNS, kept=["flagged", "fine", "not measured"]))
def test_summary_warnings_and_both_reports_show_the_same_checks(kind: str) -> None:
    mcmc = RUNS[kind]()
    found = checks_of(mcmc)
    flagged = {name for name, check in found.items() if check.ok is False}
    assert flagged >= ({BIAS, LENGTH, CURVATURE} if kind == "flagged" else set())
    assert not flagged or kind in ("flagged", "not measured")
    first = {found[name].advice: name for name in reversed(flagged_in(found))}
    names = [name for name in flagged_in(found) if name in first.values()]
    expected = "\n".join(found[name].sentence for name in names)
    assert warnings_of(to_inference_data, mcmc) == warnings_of(warn_if_unreliable, mcmc) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        idata = to_inference_data(mcmc)
    text = step_size_summary(mcmc).splitlines()
    table = text[text.index("") + 2 :]
    rows = [row for row in table if not row.startswith("      ") and row not in GROUPS]
    assert sorted(row[4:].split("  ")[0] for row in rows) == sorted(found)
    marked = {row[4:].split("  ")[0] for row in rows if row.startswith("!!")}
    assert marked == set(flagged_in(found))
    assert all(len(row) <= WIDTH for row in text)
    assert not [name for name in found if name.partition(",")[0] not in KINDS]
    for report in (diagnose(mcmc), diagnose(idata)):
        own = {check.name: check for check in report.checks if check.name in found}
        assert same([own[name] for name in found], list(found.values()))
    assert same(list(run_checks(record_of_container(idata))), list(found.values()))


def flagged_in(found: dict[str, Check]) -> list[str]:
    return [name for name, check in found.items() if check.ok is False]


def same(x: list[Check], y: list[Check]) -> bool:
    """Equality, where a figure that there is not is one that there is not."""
    return [c._replace(value=str(c.value)) for c in x] == [
        c._replace(value=str(c.value)) for c in y
    ]


def test_a_warning_has_figure_threshold_and_advice() -> None:
    check = Check("figure", 1.5, 0.1, "at most 1", False, "of w", "turn the knob")
    assert check.sentence == "figure: 1.5 +- 0.1, expected at most 1; of w: turn the knob"
    assert Check("figure", 1.5, ok=True, where="of w", advice="turn").remark == "of w"


def test_no_warning_for_a_good_run() -> None:
    warn_if_unreliable(plain())
    assert not [c for c in checks_of(plain()).values() if c.ok is False]


# Facts of real runs


def test_facts_of_a_gaussian() -> None:
    mcmc = plain()
    found = checks_of(mcmc)
    # h = 0.1 / (4 / 2), relaxation 1 / (h 1) = 20 steps, a draw is half of that (rounded up)
    assert found["step size"].value == pytest.approx(0.05)
    steps = found["steps per draw"].value
    assert steps in (10, 11)
    assert found["bias of variances, discretisation"].value == pytest.approx(0.1)
    assert found["bias of variances, minibatch noise"].value == 0
    assert found[BIAS].value == pytest.approx(0.1)
    assert (found[BIAS].ok, found[BIAS].threshold) == (True, "at most 0.1")
    assert found[BIAS].where == (
        "h lam_H / 2 = 0.1 from discretisation, h lam_C / (2 tau) = 0 from minibatch noise, to "
        "first order; discretisation binds: dense_mass=True allows larger steps"
    )
    assert found[LENGTH].where == "of 20 steps each"
    assert found[LENGTH].value == pytest.approx(200 * steps / 20)
    assert found["draws with failed steps"].where == "of 200 draws"
    assert found[CURVATURE].value == pytest.approx(1)
    assert found["configurational temperature"].threshold == "1, within 10%"
    assert "kinetic temperature" not in found


def test_steps_between_kept_draws_count() -> None:
    every, thinned = plain(), changed(plain())
    thinned.thinning = 2
    for name in (LENGTH, "passes over the data"):
        assert checks_of(thinned)[name].value == pytest.approx(2 * checks_of(every)[name].value)


def test_minibatch_noise_is_measured_and_binds() -> None:
    mcmc = run(gamma="none", potential_fn=stochastic)
    where = checks_of(mcmc)[BIAS].where
    assert "minibatch noise binds: a larger batch_size allows larger steps" in where
    # the gradient's noise has variance 4, estimated from 128 keys: sd 4 sqrt(2 / 128) = 0.5; the
    # largest of about ten estimates is taken
    noise = float(mcmc.last_state.adaptation.noise)
    assert 3 < noise < 4 + 5 * 0.5


def test_where_nothing_was_measured() -> None:
    # far beyond the tolerance, which cannot be known
    mcmc = plain(step_size=0.2, num_steps=3)
    found = checks_of(mcmc)
    assert (found["step size"].value, found["steps per draw"].value) == (pytest.approx(0.2), 3)
    assert np.isnan(found[BIAS].value)
    assert found[BIAS].where.startswith("not measured, because step_size and num_steps are both")
    assert LENGTH not in found
    # h lam_H / 2 is .4 in one of two directions and .1 in the other: the temperature tells
    assert flagged_in(found) == [TEMPERATURE]
    assert re.search(r"bias of variances, both +-\n +not measured", step_size_summary(mcmc))


def test_one_draw_is_too_early_for_a_measurement() -> None:
    mcmc = plain()
    assert is_measured(mcmc)
    state = mcmc.last_state._replace(i=jnp.asarray(1))
    fields = mcmc.get_extra_fields(group_by_chain=True)
    early = as_if_run(mcmc, mcmc.get_samples(True), fields=fields, last_state=state)
    assert not is_measured(early)
    assert "not measured" in step_size_summary(early)


def kinetic_mean(mcmc: MCMC) -> float:
    return float(np.mean(np.asarray(mcmc.get_extra_fields()["kinetic_temperature"], float)))


def test_facts_of_a_momentum_whose_terms_do_not_bind() -> None:
    mcmc = run(SGHMC, draws=100)
    found = checks_of(mcmc)
    # h = 2 sqrt(s / 4), s = .1 / 1.1; the friction sqrt(1) relaxes at the rate 1 / 2
    assert found["step size"].value == pytest.approx(0.302, abs=5e-4)
    # a draw is a relaxation time of 6.63 steps, rounded up
    assert found["steps per draw"].value == 7
    # both terms are 0: neither of them is what holds the step
    assert found[BIAS].value == 0
    assert found[BIAS].where == (
        "0 from discretisation on a Gaussian (where h^2 lam_H / 4 < 1), "
        "h^2 lam_C / (4 tau tanh(gamma h / 2)) = 0 from minibatch noise, to first order; "
        "neither binds: the integrator is not stable at larger steps"
    )
    assert found[LENGTH].where == "of 6.63 steps each"
    assert found[LENGTH].value == pytest.approx(700 / 6.633, abs=0.05)
    assert found["kinetic temperature"].value == pytest.approx(kinetic_mean(mcmc))
    stats = to_inference_data(mcmc).sample_stats
    text = "r'M^-1 r / D of the momentum, a mean over the draw's steps"
    assert stats["kinetic_temperature"].attrs["description"] == text
    assert "acceptance_rate" not in stats


def test_facts_where_a_thermostat_takes_noise() -> None:
    mcmc = run(SGNHT, draws=100, potential_fn=stochastic)
    found, state = checks_of(mcmc), mcmc.last_state
    h, friction = float(state.step_size), float(state.dynamics.friction)
    noise = h**2 * float(state.adaptation.noise) / (4 * np.tanh(friction * h / 2))
    bias = noise / (1 - h**2 * float(state.adaptation.curvature) / 4)
    assert bias > 0.01
    assert found["bias of variances, minibatch noise"].value == pytest.approx(bias)
    assert (
        f"h^2 lam_C / (4 tau tanh(gamma h / 2)) = {bias:.3g} from minibatch "
        "noise at most (the thermostat takes its isotropic part)" in found[BIAS].where
    )
    assert "minibatch noise binds" in found[BIAS].where
    assert found["kinetic temperature"].value == pytest.approx(kinetic_mean(mcmc))


@pytest.mark.arviz
def test_summary_and_export_of_an_exact_kernel(capsys: pytest.CaptureFixture) -> None:
    mcmc = run(GGMC, draws=100, target_accept=0.65)
    print_summary(mcmc)
    printed = capsys.readouterr().out
    assert "r_hat" in printed
    assert printed.endswith(step_size_summary(mcmc) + "\n")
    found = checks_of(mcmc)
    assert found[BIAS].where == "none, steps are Metropolis-adjusted"
    rate = float(np.mean(mcmc.get_extra_fields()["accept_prob"]))
    assert found["acceptance rate"].value == pytest.approx(rate)
    assert found["acceptance rate"].where == "the aim is 0.65"
    # half critical again: the rate is 1 / 2 in units of 1 / h
    assert found[LENGTH].where == f"of {2 / float(mcmc.last_state.step_size):.3g} steps each"
    assert found["kinetic temperature"].value == pytest.approx(kinetic_mean(mcmc))
    stats = to_inference_data(mcmc).sample_stats
    of_state = mcmc.get_extra_fields(group_by_chain=True)
    for name, field, text in (
        ("acceptance_rate", "accept_prob", "acceptance probability of the draw's trajectory"),
        (
            "kinetic_temperature",
            "kinetic_temperature",
            "r'M^-1 r / D of the draw's momentum, after the trajectory",
        ),
        ("energy", "potential_energy", "U in nats of the draw, on all data"),
    ):
        np.testing.assert_array_equal(stats[name], of_state[field])
        assert stats[name].attrs["description"].startswith(text)


def test_adjusted_and_noiseless_runs() -> None:
    fixed = {"step_size": 0.1, "num_steps": 2}
    found = checks_of(run(gamma="frozen", adjusted=True, **fixed))
    assert found[BIAS].where == "none, steps are Metropolis-adjusted"
    assert found["acceptance rate"].ok
    cold = checks_of(plain(temperature=0.0, **fixed))
    assert "path of an optimiser" in cold[BIAS].where
    assert "configurational temperature" not in cold


def test_a_given_step_size_beyond_the_tolerance() -> None:
    # h lam_H / 2 = 0.2 * 4 / 2 = 0.4, four times the tolerance
    message = (
        "both: 0.4, expected at most 0.1; .*; discretisation binds: use .* step_size of at most "
        "0.05 or another metric"
    )
    assert re.search(message, warnings_of(to_inference_data, plain(step_size=0.2)))


def test_a_run_that_is_too_short() -> None:
    # six draws of half a relaxation time each, or of 11 of its 20 steps by rounding
    message = r"per chain: 3(\.3)?, expected at least 50; .* increase num_samples or num_steps"
    assert re.search(message, warnings_of(print_summary, changed(plain(), draws=6)))


@pytest.mark.arviz
def test_undone_steps() -> None:
    def cliff(z: jax.Array) -> jax.Array:
        return jnp.where(z > 1.0, jnp.nan, z**2 / 2)

    kernel = SGRLD(potential_fn=cliff, step_size=0.3, num_steps=5)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=50, progress_bar=False)
    mcmc.run(random.key(3), init_params=jnp.zeros(()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        undone = int(to_inference_data(mcmc).sample_stats["diverging"].sum())
    assert undone > 0
    message = f"failed steps: {undone}, expected 0; of 50 draws, .* is: .* smaller step_size"
    assert re.search(message, warnings_of(to_inference_data, mcmc))


# Rules, each on its own


def test_undone_steps_in_warmup_bind() -> None:
    where = checks_of(changed(plain(), shrink=jnp.asarray(0.25)))[BIAS].where
    assert "failed steps in warm-up bind, they made the step size smaller by a factor of 4" in where
    assert "discretisation binds" not in where


@pytest.mark.parametrize(
    ("parts", "step_size", "expected"),
    [
        ((0.06, 0.04), "auto", "discretisation binds"),
        ((0.04, 0.06), "auto", "minibatch noise binds"),
        ((0.0, 0.0), "auto", "neither binds: the integrator is not stable at larger steps"),
        ((0.0, 0.07), "auto", "neither binds: the integrator is not stable at larger steps"),
        ((0.0, 0.09), "auto", "minibatch noise binds"),
        ((0.01, 0.02), "constant(0.1)", "neither binds"),
        ((0.3, 0.1), "constant(0.1)", "discretisation binds"),
        (([0.02, 0.1], [0.09, 0.0]), "auto", "discretisation binds"),  # as the figures shown are
    ],
)
def test_what_binds_follows_from_the_terms_that_are_shown(
    parts: tuple, step_size: str, expected: str
) -> None:
    found = made_up(bias_discretisation=parts[0], bias_noise=parts[1], step_size=step_size)
    assert f"; {expected}" in found[BIAS].where
    for other in ("discretisation binds", "minibatch noise binds", "neither binds"):
        assert (other in found[BIAS].where) is expected.startswith(other)


@pytest.mark.parametrize(
    ("attributes", "remedy"),
    [
        ({}, ": a larger batch_size allows"),
        ({"control_variate": 0, "num_data": 9}, ": control_variate=True or a larger batch_size"),
        ({"control_variate": 1, "num_data": 9}, ": a larger batch_size allows"),
    ],
)
def test_remedies_against_noise(attributes: dict, remedy: str) -> None:
    found = made_up(bias_discretisation=0.01, bias_noise=0.09, **attributes)
    assert f"minibatch noise binds{remedy}" in found[BIAS].where


@pytest.mark.parametrize(
    ("name", "attributes", "ok"),
    [
        (BIAS, {"bias_discretisation": [0.05, 0.1], "bias_noise": [0.0, 0.004]}, True),
        (BIAS, {"bias_discretisation": [0.01, 0.1], "bias_noise": [0.0, 0.006]}, False),
        (BIAS, {"bias_discretisation": 0.02, "bias_noise": 0.0, "bias_tolerance": 0.01}, False),
        (LENGTH, {"relaxations": 50.0, "relaxation_steps": 5.0}, True),
        (LENGTH, {"relaxations": [10.0, 49.0, 90.0], "relaxation_steps": 5.0}, False),
        (CURVATURE, {"curvature_ratio": [1.0, 15.0, 99.0]}, True),
        (CURVATURE, {"curvature_ratio": [1.0, 15.1, 15.1]}, False),
    ],
)
def test_thresholds(name: str, attributes: dict, ok: bool) -> None:
    assert made_up(**attributes)[name].ok is ok


def test_acceptance_of_less_than_half_the_aim() -> None:
    for rate, ok in ((0.4, True), (0.39, False)):
        stats = {"acceptance_rate": np.full((2, 10), rate)}
        assert made_up(stats, target_accept=0.8)["acceptance rate"].ok is ok
        assert made_up(stats)["acceptance rate"].ok is None


def test_temperature_is_held_against_tau() -> None:
    values = 0.5 + 0.01 * np.random.default_rng(0).normal(size=(2, 200))
    stats = {"configurational_temperature": values, "kinetic_temperature": values}
    for name in ("configurational temperature", "kinetic temperature"):
        assert made_up(stats, temperature=0.5)[name].ok
        assert made_up(stats)[name].ok is False
        assert name not in made_up(stats, temperature=0.0)


@pytest.mark.parametrize(
    ("relaxations", "num_steps", "more_draws"),
    [(60.0, 1000, True), (3.0, 20, True), (3.0, 1000, False), (0.002, 20, False), (0.0, 20, False)],
)
def test_more_draws_are_advised_where_they_help(
    relaxations: float, num_steps: int, more_draws: bool
) -> None:
    known = {"relaxations": relaxations, "relaxation_steps": 1e6, "final_num_steps": num_steps}
    run = RunRecord({}, {}, {"final_step_size": 0.1, **known})
    assert ("increase num_samples" in advice_on_length(run)) is more_draws
    assert ("Mend the coordinates" in advice_on_length(run)) is not more_draws
    assert (f"{MAX_NUM_STEPS} steps per draw" in advice_on_length(run)) is (
        relaxations == 3 and not more_draws
    )
    # effective sample sizes are too small for the same reason
    draws = np.random.default_rng(0).normal(size=(2, 20))
    run = run._replace(posterior={"x": draws})
    checks_of_draws = draw_checks({"x": draws}, run, None)
    sizes = [check for check in checks_of_draws if check.name.startswith("effective sample")]
    assert [check.advice for check in sizes] == [advice_on_length(run)] * 2
    assert advice_on_length(run).count("standardise") == (not more_draws)


def test_a_chain_that_has_hardly_moved_needs_other_coordinates() -> None:
    known = {"relaxations": 0.002, "relaxation_steps": 1e6}
    found = made_up(**known)[LENGTH]
    assert found.ok is False
    assert "25,000 times longer" in found.advice
    assert "step_size='auto' and dense_mass=True" in found.advice
    assert "a larger num_warmup" in made_up(**known, scale_condition=3.0)[LENGTH].advice
    assert "far longer" in made_up(**{**known, "relaxations": 0.0})[LENGTH].advice


def test_steps_that_moved_nothing_are_no_relaxation() -> None:
    known = {"relaxations": 100.0, "relaxation_steps": 5.0}
    stuck = {"diverging": np.arange(10)[None] < 6}
    assert made_up(stuck, **known)[LENGTH].value == pytest.approx(40)
    rejected = {"acceptance_rate": np.full((1, 10), 0.3), "diverging": np.zeros((1, 10), bool)}
    assert made_up(rejected, **known, target_accept=0.8)[LENGTH].value == pytest.approx(30)


def test_rejected_trajectories_are_not_called_undone() -> None:
    stats = {"diverging": np.arange(10)[None] == 3}
    exact = made_up(stats, target_accept=0.8, step_size="auto")["divergences"]
    assert (exact.ok, exact.value) == (False, 1)
    assert "avoid" not in exact.advice
    assert "That is exact, but chains hardly enter" in exact.advice
    assert "larger target_accept" in exact.advice
    assert "smaller step_size" in made_up(stats, target_accept=0.8)["divergences"].advice
    assert "draws avoid" in made_up(stats)["draws with failed steps"].advice


def test_failed_steps_count_by_the_mass_that_lies_there() -> None:
    x = np.random.default_rng(0).normal(size=(4, 1000, 2))
    few = np.zeros((4, 1000), bool)
    few[0, :8] = True
    apart = np.abs(x[..., 1]) >= np.sort(np.abs(x[..., 1]).ravel())[-8]  # as many, where x[1] ends
    for these, ok, what in ((few, True, "0.00"), (apart, False, "variance of x[1]")):
        for attributes, name in (
            ({}, "divergences"),  # of NUTS
            ({"final_step_size": 0.1}, "draws with failed steps"),
        ):
            run = RunRecord({"x": x}, {"diverging": these}, attributes)
            (found,) = [check for check in run_checks(run) if check.name == name]
            assert (found.ok, found.value) == (ok, 8)
            assert what in found.where


def test_failed_steps_in_the_tail_of_a_scale_count_by_its_logarithm() -> None:
    x = np.abs(np.random.default_rng(0).standard_cauchy(size=(4, 1000)))
    run = RunRecord({"x": x}, {"diverging": x >= np.sort(x.ravel())[-2]}, {"final_step_size": 0.1})
    (found,) = [check for check in run_checks(run) if check.name == "draws with failed steps"]
    assert (found.ok, found.value) == (True, 2)
    assert "variance of log x" in found.where


def test_advice_on_a_temperature_has_its_sign() -> None:
    for temperature, step_size, advice in (
        (1.5, "auto", "too large.* smaller bias_tolerance"),
        (1.5, "constant(0.1)", "too large.* step_size='auto' or a smaller step_size"),
        (0.5, "auto", "noise is missing.* larger num_warmup"),
    ):
        values = temperature + 0.01 * np.random.default_rng(0).normal(size=(2, 200))
        found = made_up({"configurational_temperature": values}, step_size=step_size)
        assert re.search(advice, found[TEMPERATURE].advice)


def test_a_run_to_compare_with_keeps_the_scale() -> None:
    # a step size that is given would switch the learned scale off
    wide = {"curvature_ratio": 50.0}
    ratio = "largest over smallest curvature"
    assert "a tenth of the bias_tolerance" in made_up(**wide)[ratio].advice
    assert "larger target_accept" in made_up(**wide, target_accept=0.8)[ratio].advice


def test_chains_have_a_range() -> None:
    stats = {"step_size": np.array([[0.1, 0.1], [0.3, 0.3]]), "n_steps": np.full((2, 2), 4)}
    found = made_up(stats)
    assert found["step size"] == Check(
        "step size", pytest.approx(0.2), where="0.1 to 0.3 over chains"
    )
    assert found["steps per draw"] == Check("steps per draw", 4.0)


def test_other_kernels_have_a_table_alone(capsys: pytest.CaptureFixture) -> None:
    mcmc = MCMC(NUTS(potential_fn=gaussian), num_warmup=0, num_samples=40, progress_bar=False)
    draws = np.random.default_rng(0).normal(size=(1, 40, 3))
    ended = as_if_run(mcmc, {"w": draws}, fields={"diverging": np.arange(40)[None] == 3})
    print_summary(ended, prob=0.8, exclude_deterministic=False)
    printed = capsys.readouterr().out
    assert "w[2]" in printed
    assert "10.0%" in printed
    assert "step size" not in printed
    assert "entries of" not in printed
    with pytest.raises(TypeError, match="needs a kernel of numpyro_geom, such as SGRLD, got NUTS"):
        step_size_summary(ended)


@pytest.mark.parametrize("exclude_deterministic", [True, False])
def test_sites_of_many_entries_have_quantiles_over_their_entries(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, exclude_deterministic: bool
) -> None:
    monkeypatch.setattr("numpyro_geom.diagnostics.report.num_at_once", lambda _: 70)
    draws = np.random.default_rng(0).normal(size=(2, 40, 100, 2)) + np.arange(100)[:, None]
    draws[:, :, 0, 0] = 0.0  # its figures are NaN
    sites = {"w": draws[:, :, 0, 1], "wide": draws, "twice": 2 * draws}
    mcmc = MCMC(NUTS(potential_fn=gaussian), num_warmup=0, num_samples=40, progress_bar=False)
    last = plain().last_state._replace(z={"w": 0, "wide": 0})
    ended = as_if_run(mcmc, sites, last_state=last)
    print_summary(ended, exclude_deterministic=exclude_deterministic)
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert len(lines) < 30
    assert ("twice" in printed) != exclude_deterministic
    assert sum(line.strip().startswith("w ") for line in lines) == 1
    start = next(k for k, line in enumerate(lines) if "200 entries of wide" in line)
    table = [line.split() for line in lines[start : start + 6]]
    means = draws.mean((0, 1)).ravel()
    for row, q in zip(table[1:4], (0.05, 0.5, 0.95), strict=True):
        assert row[:2] == [f"{q:.0%}", "quantile"]
        assert float(row[2]) == pytest.approx(np.quantile(means, q), abs=0.006)
    with np.errstate(invalid="ignore"):
        found = summary({"x": draws})["x"]
    worst = np.nanargmin(found["n_eff"]), np.nanargmax(found["r_hat"])
    assert worst[0] != worst[1]
    for row, name, index in zip(table[4:], ("n_eff", "r_hat"), worst, strict=True):
        assert row[:3] == ["worst", f"{name},", f"wide[{index // 2},{index % 2}]"]
        expected = [x.ravel()[index] for x in found.values()]
        assert [float(x) for x in row[3:]] == pytest.approx(expected, abs=0.006)
