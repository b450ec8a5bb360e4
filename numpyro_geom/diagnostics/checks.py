"""Checks of a run. Each is one function: what it measured, whether that is right, what to do.

A check takes what is known of a run and returns a `Check`, or None if it does not apply. The order
is that of causes: the verdict on a run is the first check that is flagged. `diagnose` shows all
checks, and a run warns at its end of those in `WORTHLESS`.

To add a check, write a function with the decorator `check`, and describe its line in
docs/how_to/flagged.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size
from scipy.special import bdtrc, stdtrit

from .._checks import warn_outside
from .._util import AT_ONCE, evenly
from ..laplace.draw import EQUAL_WEIGHTS, can_correct, largest_shape, normalized
from ..laplace.settings import MATRIX_LIMIT
from ..sampling.algorithm import MAX_NUM_STEPS, rule_temperature
from ..warmup.start import FAR_ABOVE
from .draws import (
    LEAST_PER_CHAIN,
    MAX_ENTRIES,
    Arrays,
    effective_size,
    entries,
    host,
    is_numeric,
    numeric,
)
from .facts import Run
from .table import FALSE_ALARM

LEAST_DRAWS = 20
"""Draws of a chain from which it can be told that the chain is off."""
LOOKED_AT = 50
"""Number of draws, evenly spaced, that are compared to tell whether a chain has moved."""
NOISE = 5.0
"""Standard errors, or changes of the energy between draws, that minibatches may cause."""
BRIDGED = 10.0
"""Difference between the energies of chains that sampling can bridge, in units of tau, besides the
spread D / 2 of the energies in a target."""
LARGEST_FAILED, LARGEST_REJECTED = 0.01, 0.005
"""Share of draws with steps that were undone, and with trajectories that were rejected because of
huge errors, beyond chance. Right runs of the benchmark have up to 0.0065 of the former, and of a
Poisson process 0.0085 of the latter."""
LEAST_ESS = 400
"""Effective draws over all chains (Vehtari et al., Bayesian Analysis 16(2), 2021)."""
LARGEST_RHAT = 1.01
"""Bound for up to four chains (same source as `LEAST_ESS`); see `largest_rhat`."""
APART = 1.2
"""R-hat above which chains that are long enough for themselves are in different modes: their means
differ by about a standard deviation."""
TOLERATED_MEAN = 0.25
"""Error of a mean, in standard deviations. It widens the spread around the true mean by 3%."""
TOLERATED_SD = 0.03
"""Relative error of a standard deviation."""
TOLERATED_VARIANCE = 0.1
"""Relative error of a variance; for temperatures and step sizes without a known
``bias_tolerance``."""
ROUNDING = 1.05
"""Factor on the tolerance: the automatic step size reaches the tolerance up to rounding."""
BINDING = 0.8
"""Share of the tolerance from which the larger term of the bias limits the step size. The rules of
kernels with a momentum aim at tolerance / (1 + tolerance)."""
ENOUGH_RELAXATIONS = 50
"""Relaxation times below which a run is too short; 50 of them give about 25 independent draws."""
MOST_LONGER = 25.0
"""Largest factor by which a run may have to be longer if the advice is to draw more."""
FEWEST_WEIGHTS = 25
"""Smallest number of draws for a Pareto shape. The tail is a fifth of the draws, and the shape
needs five values in the tail."""
MOMENTS = "error of the means, in sd", "relative error of the sd"
MEANS, SDS = (f"{name}, by weights" for name in MOMENTS)
HIDDEN, UNKNOWN = "Monte Carlo error hides it", "Monte Carlo error is far too large to tell"
OTHER_COORDINATES = (
    "standardise the inputs, or reparametrise the model (a non-centred hierarchy, for instance)"
)


class Check(NamedTuple):
    """One figure of a run, and whether it is as expected.

    Attributes:
        name: name of the figure, the key of `CHECKS`.
        value: the figure; NaN if the check has only text.
        error: its Monte Carlo standard error, or None.
        threshold: the expected value, in words; empty if any value is fine.
        ok: whether the figure is as expected; None if any value is fine, or if Monte Carlo error
            is too large to decide.
        where: what the figure refers to, for instance the worst coordinate.
        advice: what to do if the figure is not as expected.
    """

    name: str
    value: float
    error: float | None = None
    threshold: str = ""
    ok: bool | None = None
    where: str = ""
    advice: str = ""

    @property
    def remark(self) -> str:
        """What the figure refers to, and what to do if it is flagged."""
        if self.ok is False and self.advice:
            return f"{self.where}: {self.advice}" if self.where else self.advice
        return self.where

    @property
    def figure(self) -> str:
        """The value with its error, in a few digits."""
        if np.isnan(self.value):
            return "-"
        error = "" if self.error is None else f" +- {self.error:.2g}"
        # the third decimal of R-hat matters
        return (f"{self.value:.4g}" if self.name == "R-hat" else digits(self.value)) + error

    @property
    def sentence(self) -> str:
        """The whole check in one line, for a warning."""
        expected = f", expected {self.threshold}" if self.threshold else ""
        return f"{self.name}: {self.figure}{expected}; {self.remark}"


class Kind(NamedTuple):
    """A kind of check.

    Attributes:
        group: where a report shows it: Mixing, Bias, Step or Cost.
        problem: what is wrong with the run if it is flagged; empty if it never is.
        find: from a `Run` to the `Check`, or to None if it does not apply.
    """

    group: str
    problem: str
    find: Callable[[Run], Check | None]


CHECKS: dict[str, Kind] = {}
"""All checks by name; an earlier one is the cause of a later one."""


def check(name: str, group: str, problem: str = "") -> Callable[[Callable], Callable]:
    """Register a function ``(name, run) -> Check | None`` as a check."""

    def register(find: Callable[[str, Run], Check | None]) -> Callable:
        CHECKS[name] = Kind(group, problem, lambda run: find(name, run))
        return find

    return register


def checks_of(run: Run) -> list[Check]:
    """All checks that apply to a run."""
    found = (kind.find(run) for kind in CHECKS.values())
    return [check for check in found if check is not None]


def at_most(name: str, value: Any, bound: float, where: str, advice: str) -> Check:
    """A check that a figure is at most ``bound``."""
    ok = bool(value <= bound)
    return Check(name, float(value), None, f"at most {bound:.3g}", ok, where, advice)


def at_least(name: str, value: Any, bound: float, where: str, advice: str) -> Check:
    """A check that a figure is at least ``bound``."""
    ok = bool(value >= bound)
    return Check(name, float(value), None, f"at least {bound:.3g}", ok, where, advice)


def none_of(name: str, count: Any, where: str, advice: str) -> Check:
    """A check that something never happened."""
    return Check(name, float(count), None, "0", bool(count == 0), where, advice)


def worst_of(
    name: str,
    figures: tuple[tuple[str, ...], np.ndarray, np.ndarray, np.ndarray],
    tolerated: float,
    advice: str,
) -> Check | None:
    """A check of the worst of several figures that are about 0 for exact draws.

    ``figures`` are names, values, their Monte Carlo errors, and effective draws. Figures that are
    not finite are left out. A figure is wrong if it exceeds what is tolerated, and what Monte Carlo
    error explains with the probability `FALSE_ALARM` over all figures together.
    """
    names, values, errors, sizes = figures
    known = np.isfinite(values) & np.isfinite(errors)
    if not known.any():
        return None
    sure = known & (np.abs(values) > by_chance(int(known.sum()), sizes) * errors)
    worst = int(np.argmax(np.where(sure if sure.any() else known, np.abs(values), -1.0)))
    value, error = float(values[worst]), float(errors[worst])
    ok = verdict(bool(sure.any() and abs(value) > tolerated), errors[known].max(), value, tolerated)
    return _undecided(
        Check(name, value, error, f"within {tolerated:g} of 0", ok, names[worst], advice), tolerated
    )


def _undecided(check: Check, tolerated: float) -> Check:
    """A check whose error hides it says so; a figure says nothing if its error is 10 times that."""
    if check.ok is not None or check.error is None:
        return check
    if check.error > 10 * tolerated:
        return check._replace(value=np.nan, error=None, where=UNKNOWN)
    return check._replace(where="; ".join(filter(None, (check.where, HIDDEN))))


def by_chance(count: int, effective: Any) -> Any:
    """Standard errors that the largest of ``count`` figures exceeds by chance, two-sided."""
    freedom = np.maximum(np.asarray(effective) - 1, 1.0)
    return -stdtrit(freedom, FALSE_ALARM / (2 * count))


def verdict(wrong: bool, error: float, value: float, tolerated: float) -> bool | None:
    """Whether a figure is as expected; None if Monte Carlo error is too large to decide."""
    if wrong:
        return False
    return True if max(error, abs(value)) <= tolerated else None


def digits(x: float) -> str:
    """The number with three digits; large figures are shown as whole numbers."""
    text = f"{x:.3g}"
    return f"{float(text):,.0f}" if 1000 <= abs(x) < 1e9 else text


def span(values: Any) -> str:
    """One figure, or the range over chains if they differ visibly."""
    low, high = digits(float(np.min(values))), digits(float(np.max(values)))
    return low if low == high else f"{low} to {high}"


# Remedies: each is written once, with the condition under which it is one


def smaller_step(facts: Mapping[str, Any]) -> str:
    """How to get smaller steps; what the run does already is not advised."""
    if "final_step_size" not in facts and "kernel" in facts:
        return "a larger target_accept_prob"
    if facts.get("step_size") != "auto":
        return "step_size='auto' or a smaller step_size"
    return "a larger target_accept" if "target_accept" in facts else "a smaller bias_tolerance"


def less_noise(facts: Mapping[str, Any]) -> str:
    """How to get less minibatch noise; empty for a run on all rows."""
    if "num_data" in facts and facts.get("batch_sizes", "{}") == "{}":
        return ""
    corrected = facts.get("control_variate", False)
    return "a larger batch_size" + ("" if corrected else " or control_variate=True")


def longer(run: Run) -> str:
    """Advice for too few effective draws: draw more, unless far too many would be needed."""
    spanned, facts = relaxations(run), run.facts
    steps, condition = np.max(facts.get("final_num_steps", 0)), ""
    if "lam_min" in facts and facts.get("num_steps") == "auto" and steps >= MAX_NUM_STEPS:
        ratio = np.max(np.asarray(facts["lam_H"]) / np.asarray(facts["lam_min"]))
        condition = f"draws of {steps} steps are too short for a condition of {digits(ratio)}: "
    elif spanned is None or spanned * MOST_LONGER >= ENOUGH_RELAXATIONS:
        return f"increase num_samples or num_steps, or {OTHER_COORDINATES}"
    times = f"{digits(ENOUGH_RELAXATIONS / spanned)} times " if spanned else "far "
    how = [f"{n}='auto'" for n in ("step_size", "num_steps") if facts.get(n, "auto") != "auto"]
    if "dense_mass" in facts and (not facts.get("scaled") or facts["dense_mass"] == "low_rank"):
        how.append("dense_mass=True, for up to some 2,000 parameters")
    hardly = f"the chain has hardly moved, and a run that is long enough is {times}longer: "
    return f"{condition or hardly}{''.join(f'use {x}, ' for x in how)}{OTHER_COORDINATES}"


# The checks


@check("entries that are not finite", "Mixing", "draws are not finite")
def not_finite(name: str, run: Run) -> Check | None:
    """Draws of which other checks cannot say anything."""
    names = () if run.mixing is None else run.mixing.not_finite
    if not names:
        return None
    where = f"{names[0]}, for instance"
    advice = "check that the model is proper there; other figures leave them out"
    return none_of(name, len(names), where, advice)


@check("divergences", "Step", "steps diverged")
def divergences(name: str, run: Run) -> Check | None:
    """Draws with steps that were undone, or with trajectories rejected because of huge errors."""
    if "diverging" not in run.stats:
        return None
    diverging, smaller = run.stats["diverging"].astype(bool), smaller_step(run.facts)
    if "target_accept" in run.facts or not run.of_this_package:
        most = LARGEST_REJECTED
        advice = (
            "the energy errors were not finite or very large, and the steps were rejected. That is "
            "exact, but chains hardly enter such regions, or cannot leave them: use "
            f"{smaller}, or another parametrisation"
        )
    else:
        most = LARGEST_FAILED
        advice = (
            "steps were not finite or not stable: draws avoid the region where that happens, or "
            f"are thrown out of it. Use {smaller}, a larger num_warmup, or another "
            "parametrisation, or make the model finite there"
        )
    count = int(diverging.sum())
    by_chance_too = bdtrc(count - 1, diverging.size, most) >= FALSE_ALARM
    ok = True if diverging.mean() <= most else None if by_chance_too else False
    where = f"of {diverging.size} draws" + (f"; {HIDDEN}" if ok is None else "")
    return Check(name, float(count), None, f"at most {most:.1%}", ok, where, advice)


@check("chains that do not move", "Mixing", "the chains do not move")
def stuck_chains(name: str, run: Run) -> Check | None:
    """Chains of which most steps were undone, or whose draws are all the same."""
    facts = run.facts  # a descent may come to rest
    if run.temperature <= 0 or "guide" in facts or facts.get("dimensions") == 0:
        return None
    arrays = sorted(run.draws.values(), key=lambda x: x.size)
    draws = next((x.shape[1] for x in arrays), 0)
    if draws < LEAST_DRAWS:
        return None
    chains = arrays[0].shape[0]
    still = np.ones(chains, bool)
    stride = max(1, draws // LOOKED_AT)  # a slice is one small program, an index is several
    for x in arrays:  # the smallest first: one that changes is enough
        if not still.any():
            break
        looked = np.asarray(x[:, ::stride])
        still &= np.all(looked == looked[:, :1], axis=tuple(range(1, looked.ndim)))
    still |= np.asarray(facts.get("undone", 0.0)) > 0.5
    if not still.any():
        return None
    where = f"chain {int(np.argmax(still))}" + (", for instance" if still.sum() > 1 else "")
    advice = (
        f"do not use its draws: use {smaller_step(run.facts)}, a larger num_warmup, another "
        "parametrisation, or init_params of higher density"
    )
    return none_of(name, still.sum(), where, advice)


@check("energy above the start", "Mixing", "a chain has left the typical set")
def energy_above_the_start(name: str, run: Run) -> Check | None:
    """By how much the energy of a chain stays above the energy where the chain has started."""
    energies, start = _energies(run), run.facts.get("start_energy")
    if energies is None or start is None:
        return None
    rise = np.median(energies, 1) - np.asarray(start)
    # over two draws, because of chains of which each second draw is one that was undone
    noise = np.median(np.abs(energies[:, 2:] - energies[:, :-2]), 1)
    usual = FAR_ABOVE * rule_temperature(run.temperature) * run.facts["dimensions"]
    excess = rise - usual - NOISE * noise
    if not np.any(excess > 0):
        return None
    worst = int(np.argmax(excess))
    advice = (
        f"do not use its draws: use {smaller_step(run.facts)}, a larger num_warmup, or init_params "
        "of higher density"
    )
    return at_most(name, rise[worst], usual, f"in nats, chain {worst}", advice)


@check("energy above the best chain", "Mixing", "a chain stays far above another")
def energy_above_the_best_chain(name: str, run: Run) -> Check | None:
    """Energies of chains that differ by more than sampling can bridge: one is in a lesser mode."""
    energies = _energies(run)
    if energies is None or "dimensions" not in run.facts:
        return None
    middles = np.median(energies, 1)
    best = int(np.argmin(middles))
    noise = np.median(np.abs(np.diff(energies, axis=1)), 1) / energies.shape[1] ** 0.5
    above = middles - middles[best] - NOISE * (noise + noise[best])
    bridged = rule_temperature(run.temperature) * (BRIDGED + run.facts["dimensions"] / 2)
    worst = int(np.argmax(above))
    if not above[worst] > bridged:
        return None
    advice = (
        f"it is in another mode than chain {best}, of much less mass by its energy, and does not "
        "cross: leave it out, or start it from init_params among the draws of the better chain"
    )
    early, late = (np.median(x) for x in np.array_split(energies[worst], 2))
    if early - late > above[worst] / 10:
        advice = "its energy still falls, so it has not converged: use a larger num_warmup"
    where = f"in nats, chain {worst}"
    return at_most(name, middles[worst] - middles[best], bridged, where, advice)


def _energies(run: Run) -> np.ndarray | None:
    energies = run.stats.get("energy")
    if energies is None or energies.shape[1] < LEAST_DRAWS:
        return None
    return np.asarray(energies, float)


@check("memory of the metric", "Bias", "the metric cannot follow the position")
def memory_of_the_metric(name: str, run: Run) -> Check | None:
    """Memory of a corrected metric's statistics, in units of the steps in which gradients change.

    The correction is right for statistics without memory.
    """
    lag = run.facts.get("metric_lag", 0.0)
    if not lag > 1:
        return None
    where = "over the steps in which the gradient changes"
    advice = (
        "with divergence='corrected' the draws are biased: use divergence='auxiliary' or "
        f"divergence='frozen', or a step_size that is more than {lag:.2g} times smaller"
    )
    return at_most(name, lag, 1.0, where, advice)


@check("bias of variances", "Bias", "the step is too large")
def bias_of_variances(name: str, run: Run) -> Check | None:
    """The bias of the step size, to first order in the worst direction."""
    facts = run.facts
    if "bias_noise" not in facts:
        note = facts.get("bias_note")
        return None if note is None else Check(name, np.nan, where=note)
    parts = [np.atleast_1d(facts[f"bias_{kind}"]) for kind in ("discretisation", "noise")]
    noisy = float(np.max(parts[1])) > float(np.max(parts[0]))
    tolerance, total = _tolerance(run), float(np.max(parts[0] + parts[1]))
    binds = f"{'minibatch noise' if noisy else 'discretisation'} binds"
    binds = binds if total >= BINDING * tolerance else "neither binds"
    terms = facts["bias_terms"].format(*map(span, parts)) + ", " if "bias_terms" in facts else ""
    advice = "use a larger num_warmup, in which the step size is found"
    if facts.get("step_size") != "auto":
        advice = "use step_size='auto'"
        if "step_size" in run.stats and total > 0:
            h = float(np.mean(run.stats["step_size"])) * tolerance / total
            advice += f", a step_size of at most {h:.2g}"
    advice += f", {less_noise(facts) or 'more rows'}" if noisy else " or another metric"
    ok, threshold = bool(total <= ROUNDING * tolerance), f"at most {tolerance:g}"
    where = f"{terms}to first order; {binds}"
    return Check(name, total, None, threshold, ok, where, advice)


def _tolerance(run: Run) -> float:
    return float(run.facts.get("bias_tolerance", TOLERATED_VARIANCE))


@check("relaxation times per chain", "Mixing", "the chains are too short")
def length_of_chains(name: str, run: Run) -> Check | None:
    """How often the median chain forgets its slowest direction."""
    spanned = relaxations(run)
    if spanned is None:
        return None
    where = f"of {span(run.facts['relaxation_steps'])} steps each"
    return at_least(name, spanned, ENOUGH_RELAXATIONS, where, longer(run))


def relaxations(run: Run) -> float | None:
    """Relaxation times that the median chain spans; steps that did not move are not counted."""
    if "relaxations" not in run.facts:
        return None
    moved = 1.0
    if "acceptance_rate" in run.stats:
        moved = float(np.mean(run.stats["acceptance_rate"]))
    elif "undone" in run.facts:
        moved = 1 - float(np.mean(run.facts["undone"]))
    return float(np.median(run.facts["relaxations"])) * moved


@check("R-hat", "Mixing", "the chains disagree")
def rhat(name: str, run: Run) -> Check | None:
    """Rank-normalised R-hat of the worst entry."""
    mixing = run.mixing
    if mixing is None or mixing.rhat is None:
        return None
    worst, advice = int(np.argmax(mixing.rhat)), f"chains disagree; {longer(run)}"
    if mixing.rhat[worst] > APART and mixing.alone >= LEAST_ESS / 4:
        advice = (
            "each chain is long enough for itself, but they are in different modes, or in "
            "different labellings of parts that can be exchanged. Longer chains do not help: order "
            "the parts, or look at what does not depend on labels"
        )
    chains = next(iter(run.draws.values())).shape[0]
    return at_most(name, mixing.rhat[worst], largest_rhat(chains), mixing.names[worst], advice)


def largest_rhat(chains: int) -> float:
    """The value of R-hat at 400 effective draws, from the spread of the means of half chains.

    For four chains it is the usual 1.01. With more chains, each chain has fewer effective draws, so
    the bound is larger.
    """
    return max(LARGEST_RHAT, (1 + 2 * chains / LEAST_ESS) ** 0.5)


@check("draws with a finite gradient", "Bias", "gradients are not finite at the draws")
def finite_gradients(name: str, run: Run) -> Check | None:
    """Draws from which errors of moments can be computed."""
    if run.moments is None or run.moments.usable >= LEAST_PER_CHAIN:
        return None
    advice = (
        "draws are at the edge of the support, U overflows, or rounding of constrained values "
        "hides all coordinates: run in 64 bits, or check the model"
    )
    return at_least(name, run.moments.usable, LEAST_PER_CHAIN, "", advice)


@check(MOMENTS[0], "Bias", "the draws are not centred on the target")
def error_of_the_means(name: str, run: Run) -> Check | None:
    """Error of the worst mean, from gradients at the draws."""
    advice = f"the draws are not centred on the target; {_other_guide(run.facts)}"
    if "guide" not in run.facts:
        advice = "the draws are not centred on the target; increase num_warmup and num_samples"
    return _moment(name, run, "mean", TOLERATED_MEAN, advice)


@check(MOMENTS[1], "Bias", "the draws are biased")
def error_of_the_sds(name: str, run: Run) -> Check | None:
    """Relative error of the worst standard deviation, from gradients at the draws."""
    facts = run.facts
    remedies = [smaller_step(facts), less_noise(facts) if run.of_this_package else ""]
    advice = f"use {', '.join(filter(None, remedies))}, or increase num_samples"
    if "guide" in facts:
        advice = _other_guide(facts)
    if facts.get("divergence") in ("none", "published"):
        advice = (
            f"divergence={facts['divergence']!r} has another invariant distribution if the metric "
            "moves: leave divergence at its default; or " + advice
        )
    advice = f"the draws are too wide (+) or too narrow (-) for the target; {advice}"
    return _moment(name, run, "sd", TOLERATED_SD, advice)


def _other_guide(facts: Mapping[str, Any]) -> str:
    other = "use metric='fisher'"
    if facts.get("metric") == "fisher":
        other = "look at draw(..., log_weight=True), whose weights may correct them"
    return f"{other}, or run MCMC"


def _moment(name: str, run: Run, kind: str, tolerated: float, advice: str) -> Check | None:
    if "gradient_seconds" in run.facts:
        each = digits(float(run.facts["gradient_seconds"]))
        where = f"not looked at: a gradient on all rows takes {each} s"
        return Check(name, np.nan, None, "about 0", None, where)
    found = run.moments
    if found is None or found.usable < LEAST_PER_CHAIN:
        return None
    names = tuple(f"{name}, unconstrained" for name in found.names)
    figures = names, *(getattr(found, f"{kind}{x}") for x in ("", "_error", "_size"))
    line = worst_of(name, figures, tolerated, advice)
    if line is None:
        return None
    where = line.where
    if found.left_out:
        where += f", {found.left_out} draws without a finite gradient left out"
    if found.hidden:
        where += f", {len(found.hidden)} coordinates left out: not finite, or hidden by rounding"
    if not found.full:
        where += ", correlations not known, so this is no error of a moment"
    return line._replace(where=where, ok=line.ok if found.full or not line.ok else None)


@check("kinetic temperature", "Bias", "the momenta are biased")
@check("configurational temperature", "Bias", "the draws are biased")
def temperature(name: str, run: Run) -> Check | None:
    """A mean that is tau: of (theta - c) . grad U / D for draws, of r'M^-1 r / D for momenta."""
    tau, tolerated = run.temperature, _tolerance(run)
    values = run.stats.get(name.replace(" ", "_"))
    if tau <= 0 or values is None:
        return None
    mean, error, ok = float(values.mean()), None, None
    if values.shape[1] >= LEAST_PER_CHAIN:
        effective = float(effective_size(np.asarray(values, float)[..., None])[0])
        error = float(values.std() / np.sqrt(effective))
        # the tolerated bias also changes the temperature
        wrong = abs(mean - tau) > tolerated * tau + by_chance(1, effective) * error
        ok = verdict(bool(wrong), error, mean - tau, tolerated * tau)
    cause, remedy = "noise is missing", ""
    if mean > tau:
        cause, remedy = "the steps are too large", f"{smaller_step(run.facts)}, or "
    advice = f"{cause}, or the chain has not converged: use {remedy}a larger num_warmup"
    expected = f"{tau:g}, within {tolerated:.0%}"
    return _undecided(Check(name, mean, error, expected, ok, "", advice), tolerated * tau)


@check("draws per chain", "Mixing", "the draws are too few")
def draws_per_chain(name: str, run: Run) -> Check | None:
    """Draws that are too few for an effective sample size."""
    if run.mixing is None or "guide" in run.facts or run.mixing.draws >= LEAST_PER_CHAIN:
        return None
    advice = "nothing can be said about so few draws: increase num_samples"
    return at_least(name, run.mixing.draws, LEAST_PER_CHAIN, "", advice)


@check("effective sample size", "Mixing", "the draws are too few")
def effective_size_of(name: str, run: Run) -> Check | None:
    """Effective draws of the worst entry; a chain that hardly enters a tail has few for squares."""
    if run.mixing is None or not run.mixing.names:
        return None
    sizes = run.mixing.size
    worst = int(np.argmin(sizes))
    return at_least(name, sizes[worst], LEAST_ESS, run.mixing.names[worst], longer(run))


@check("acceptance rate", "Step")
@check("steps per draw", "Step")
@check("step size", "Step")
def mean_over_draws(name: str, run: Run) -> Check | None:
    """The mean over draws."""
    figure = "n_steps" if name == "steps per draw" else name.replace(" ", "_")
    if figure not in run.stats or not run.of_this_package:
        return None
    means = np.asarray(run.stats[figure], float).mean(1)
    differ = digits(means.min()) != digits(means.max())
    return Check(name, float(means.mean()), where=f"{span(means)} over chains" if differ else "")


@check("effective draws per gradient", "Cost")
def draws_per_gradient(name: str, run: Run) -> Check | None:
    """The effective draws of the worst entry over all gradients."""
    if run.mixing is None or not run.mixing.names:
        return None
    chains = next(iter(run.draws.values())).shape[0]
    if "gradients" in run.facts:
        gradients = float(np.sum(np.broadcast_to(run.facts["gradients"], chains)))
    elif "n_steps" in run.stats:
        gradients = float(run.stats["n_steps"].sum()) * int(run.facts.get("thinning", 1))
    else:
        return None
    rows = json.loads(run.facts.get("batch_sizes", "{}"))
    where = f"each on {', '.join(f'{n} rows of {k}' for k, n in rows.items())}" if rows else ""
    return Check(name, float(run.mixing.size.min()) / gradients, where=where)


@check("effective draws per second", "Cost")
def draws_per_second(name: str, run: Run) -> Check | None:
    """The effective draws of the worst entry over the sampling time."""
    if run.mixing is None or not run.mixing.names or run.seconds is None:
        return None
    return Check(name, float(run.mixing.size.min()) / run.seconds)


@check("passes over the data", "Cost")
def passes(name: str, run: Run) -> Check | None:
    """Passes of a chain after warm-up."""
    if "passes" not in run.facts:
        return None
    return Check(name, float(np.mean(run.facts["passes"])), where="per chain, after warm-up")


# The draws of a guide


@check("failed geodesics", "Step", "geodesics failed")
def failed_geodesics(name: str, run: Run) -> Check | None:
    """Draws whose geodesic was not followed to its end."""
    if "success" not in run.stats:
        return None
    facts, failed = run.facts, ~run.stats["success"].astype(bool)
    other = "use metric='fisher' if the model has observed sites"
    if facts.get("metric") == "fisher":
        hessian = facts.get("prior_metric") == "hessian"
        other = "use prior_metric='expected'" if hessian else "reparametrise the model"
    cause = f"no end within max_steps={facts.get('max_steps')}, or not finite"
    if facts.get("metric") == "monge-log":
        cause += ", or a logarithmic map that did not converge"
    other = f"draw again from a guide with a larger max_steps or rtol, or {other}"
    if np.any(failed & (run.stats.get("n_fevals", 1) == 0)):
        cause = "the velocity, a solve with the Fisher metric, was not found"
        other = (
            "give sites priors of similar scales, or, up to "
            f"{MATRIX_LIMIT} dimensions, use solver='cholesky'"
        )
    advice = (
        f"{cause}. These draws are NaN (`success` marks them), and leaving them out biases the "
        "other draws. Use float64 (numpyro.enable_x64()), standardise the inputs, " + other
    )
    where = f"{failed.sum()} of {failed.size} geodesics failed"
    return none_of(name, failed.sum(), where, advice)


@check("Pareto shape of weights", "Bias", "the guide is far from the posterior")
def shape_of_weights(name: str, run: Run) -> Check | None:
    """Whether weights can correct the draws to the posterior."""
    if "pareto_k" not in run.facts:
        return None
    shape, log_weight = float(run.facts["pareto_k"]), run.stats.get("log_weight")
    num_draws = math.prod(next(iter(run.draws.values())).shape[:2])
    largest = largest_shape(num_draws)
    threshold = f"below {largest:.2g}"
    evidence = run.facts.get("log_evidence")
    told = "" if evidence is None else "log evidence {:.2f} +- {:.2g}".format(*evidence)
    if shape < largest:
        return Check(name, shape, None, threshold, True, told)
    where = f"from {largest:.2g} on, weights cannot correct {num_draws} draws to the posterior"
    other = "draw more" if run.facts.get("metric") == "fisher" else "try metric='fisher'"
    advice = (
        "do not use log_weight, and take means and intervals as rough ones. Run MCMC, "
        f"reparametrise the model, or {other}"
    )
    if log_weight is not None:
        weights = log_weight[np.isfinite(log_weight)].astype(float)
        enough = weights.size >= FEWEST_WEIGHTS
        if enough and np.ptp(weights) < EQUAL_WEIGHTS:
            return Check(name, shape, ok=True, where=f"all weights are equal; {told}")
        if not enough or not np.isfinite(shape):
            where = f"it could not be estimated from {weights.size} draws with a weight"
            advice = "how near the draws are to the posterior is not known: draw hundreds or more"
    return Check(name, shape, None, threshold, False, where, advice)


@check("weights or gradients", "Bias", "how near the guide is to the posterior is not known")
def known_at_all(name: str, run: Run) -> Check | None:
    """A guide's draws without weights and gradients."""
    if "success" not in run.stats or "pareto_k" in run.facts or run.moments is not None:
        return None
    advice = (
        "draw(..., log_weight=True) or to_inference_data(draws, gradients=True) tells how near "
        "a guide's draws are to the posterior"
    )
    return Check(name, np.nan, None, "either", False, "there are none", advice)


@check(SDS, "Bias", "the draws are biased")
@check(MEANS, "Bias", "the draws are not centred on the target")
def moment_by_weights(name: str, run: Run) -> Check | None:
    """Errors of the means or sds of the draws without weights, see `weight_checks`."""
    log_weight = run.stats.get("log_weight")
    if log_weight is None or "pareto_k" not in run.facts:
        return None
    correct = can_correct(log_weight, float(run.facts["pareto_k"]))
    found = weight_checks(dict(run.draws), log_weight, correct)
    return next((check for check in found if check.name == name), None)


def weight_checks(draws: Arrays, log_weight: np.ndarray, correct: bool) -> list[Check]:
    r"""Errors of means and sds of a guide's draws without weights, as their weights see them.

    With w_i the weights (their sum is 1), m and s the mean and the sd of n independent draws x_i,
    and m_w and s_w those with weights,

        (m - m_w) / s    and    s / s_w - 1

    are the error of the mean, in sd, and the relative error of the sd. Both are 0 in expectation,
    up to 1 / n, for draws of the posterior. The Monte Carlo errors are those of the differences,
    by the delta method: with r_i = n w_i and q_i = (x_i - m)^2 / s^2 - 1, the sds over the draws,
    divided by n^1/2, of

        [x_i - m - r_i (x_i - m_w)] / s - q_i (m - m_w) / 2 s    and
        (s / s_w) [q_i - r_i ((x_i - m_w)^2 / s_w^2 - 1)] / 2.

    They are for the worst entry of a site, deterministic sites included. Equal weights have figures
    and errors of 0. Weights see only where there are draws: in a tail without draws an error is
    larger than its figure. With a Pareto shape that is too large, the errors are too small.

    ``log_weight`` has the shape (chains, draws), up to a constant; NaN for failed draws, which are
    left out. ``correct`` tells whether the weights turn the draws into draws of the posterior.
    """
    used = np.isfinite(log_weight)
    arrays = {name: x for name, x in numeric(draws).items() if x.size}
    if used.sum() < FEWEST_WEIGHTS or not arrays:
        return []
    names, values = entries(arrays, MAX_ENTRIES)
    x, w = values[used], normalized(log_weight[used])
    number, r = len(x), len(x) * w[:, None]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean, weighted_mean = x.mean(0), w @ x
        sd, weighted_sd = x.std(0), np.sqrt(w @ (x - weighted_mean) ** 2)
        shift, ratio = (mean - weighted_mean) / sd, sd / weighted_sd
        square = ((x - mean) / sd) ** 2 - 1
        of_shift = (x - mean - r * (x - weighted_mean)) / sd - square * shift / 2
        of_ratio = ratio * (square - r * (((x - weighted_mean) / weighted_sd) ** 2 - 1)) / 2
    sizes = np.full(len(names), 1 / np.sum(w**2))
    weighted_draws = "sample_posterior(..., resample=True), " if correct else ""
    found = [
        worst_of(
            name,
            (names, value, terms.std(0) / number**0.5, sizes),
            tolerated,
            f"the draws without weights are {problem}: use {weighted_draws}another metric or mode, "
            "or an exact kernel such as NUTS",
        )
        for name, value, terms, tolerated, problem in (
            (MEANS, shift, of_shift, TOLERATED_MEAN, "not centred on the posterior"),
            (SDS, ratio - 1, of_ratio, TOLERATED_SD, "too wide (+) or too narrow (-)"),
        )
    ]
    return [check for check in found if check is not None]


# Draws that are worth nothing

WORTHLESS = (
    "chains that do not move",
    "energy above the start",
    "energy above the best chain",
    "memory of the metric",
)
"""Checks of which a run warns at its end: nobody should read a summary of such draws."""


def warn_of_run(run: Run) -> None:
    """Warn of the first check in `WORTHLESS` that is flagged, or of chains that hardly move.

    Warns:
        SamplingWarning: with the figure, and what to do.
    """
    for name in WORTHLESS:
        found = CHECKS[name].find(run)
        if found is not None and found.ok is False:
            warn_outside(found.sentence)
            return
    if run.temperature > 0 and not run.facts.get("network") and (slow := _slow(run)):
        warn_outside(slow.sentence)


def _slow(run: Run) -> Check | None:
    """The effective draws of the worst entry, if they leave a mean open by a quarter of its sd.

    Chains are taken about their own means, because they may be in different modes. It takes at
    least `LEAST_DRAWS` draws for an effective one, so that no run is told that it is short.
    """
    found: list[tuple[float, str]] = []
    for name, x in run.draws.items():
        if not is_numeric(x) or x.size == 0:
            continue
        x = host(x) if x.size <= AT_ONCE else x
        some = x.reshape(*x.shape[:2], -1)[..., evenly(math.prod(x.shape[2:]), LOOKED_AT)]
        some = np.asarray(some, float) - np.mean(some, 1, float, keepdims=True)
        some = some[..., np.isfinite(some).all((0, 1)) & (some != 0).any((0, 1))]
        if some.size:
            sizes = effective_sample_size(some)  # below 0 for draws that alternate
            found.append((float(np.min(np.where(sizes > 0, sizes, np.inf))), name))
    size, name = min(found, default=(np.inf, ""))
    draws = math.prod(next(iter(run.draws.values())).shape[:2])
    if size >= min(TOLERATED_MEAN**-2, draws / LEAST_DRAWS):
        return None
    return at_least("effective sample size", size, LEAST_ESS, name, longer(run))


def warn_of_guide(run: Run) -> None:
    """Warn of failed draws, weights that correct nothing, and moments that are off by a quarter.

    A quarter of an sd of a mean, or a quarter of a variance.

    Warns:
        SamplingWarning: with the figure, and what to do.
    """
    names = "failed geodesics", "Pareto shape of weights", *MOMENTS
    for name in names:
        found = CHECKS[name].find(run)
        if found is None or found.ok is not False:
            continue
        power = 1 + (name == MOMENTS[1])
        slight = abs((1 + found.value) ** power - 1) <= TOLERATED_MEAN
        if name not in MOMENTS or (run.moments.full and not slight):
            warn_outside(found.sentence)
            return
