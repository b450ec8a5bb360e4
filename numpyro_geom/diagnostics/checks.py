"""Checks of a run: their form, their thresholds, and the checks of its draws and its records.

`moments` has the checks that need gradients at the draws. `diagnose`, `step_size_summary` and
`warn_if_unreliable` only show the results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from scipy.stats import t as student

from ..laplace.draw import EQUAL_WEIGHTS, can_correct, largest_shape, normalized
from ..sampling.algorithm import MAX_NUM_STEPS
from ..sampling.settings import ANY_DIRECTION
from ..wreck import above_the_best
from .draws import LEAST_PER_CHAIN, Arrays, Scalars, effective_size, entries, numeric
from .record import SITE_TEMPERATURE, RunRecord
from .table import FALSE_ALARM

LEAST_ESS = 400
"""Effective draws over all chains (Vehtari et al., Bayesian Analysis 16(2), 2021)."""
LARGEST_RHAT = 1.01
"""Bound for up to four chains (same source as `LEAST_ESS`); see `largest_rhat`."""
TOLERATED_MEAN = 0.25
"""Error of a mean, in standard deviations. It widens the spread around the true mean by 3%."""
TOLERATED_SHIFT = 0.15
"""Shift of a mean by the step size, in standard deviations. The first-order estimate is up to a
quarter smaller than the real shift."""
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
APART = 1.2
"""R-hat above which chains that are long enough for themselves are in different places: their means
differ by about a standard deviation."""
MOST_LONGER = 25.0
"""Largest factor by which a run may have to be longer if the advice is to draw more."""
WIDE_CURVATURE = 15.0
"""Ratio of curvatures along the median chain above which one step size does not fit. The largest
ratio over chains is less informative, because in many correct runs one chain meets an unusual
place. Of 72 correct runs, none has a ratio above 11.6. Of the wrong runs that no other check
flags, one has a ratio of 31. In a metric that moves, the metric's own movement is part of it: right
runs on curved targets have up to 35."""
MOMENTS = "error of the means, in sd", "relative error of the sd"
"""Share of entries whose minibatch noise exceeds the noise that the kernel injects."""
LARGEST_FAILED = 0.02
"""Largest share of a variance that lies at draws with failed steps: a third of what a tolerated
error of the sd changes in a variance, because the target may have more mass there than draws. Runs
of the benchmark with an error of the sd below 3% have up to 0.015, and one has 0.046."""
LARGEST_DIVERGING = 0.005
"""The same for divergences. A trajectory that is rejected leaves no draw where it diverged."""
LARGEST_SEEN = 0.05
"""The same for both, if gradients at the draws tell that means and sds are right. They do not tell
of places that the draws avoid: in wrong runs whose moments seem right it is 0.06 and more."""
LEAST_ACCEPTANCE = 0.5
"""Share of the target acceptance rate."""
FEWEST_WEIGHTS = 25
"""Smallest number of draws for a Pareto shape. The tail is a fifth of the draws, and the shape
needs five values in the tail."""
LARGEST_JUMP = 0.3
"""In nats. Kinks of a ReLU network are at most 0.06; jumps of a change point are 2 to 4."""
MAX_ENTRIES = 500
"""Largest number of entries of a variable, evenly spaced, that are looked at."""
HIDDEN = "Monte Carlo error hides it"


class Check(NamedTuple):
    """One figure of a run, and whether it is as expected.

    Attributes:
        name: name of the figure.
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


def largest_rhat(chains: int) -> float:
    """The value of R-hat at 400 effective draws, from the spread of the means of half chains.

    For four chains it is the usual 1.01. With more chains, each chain has fewer effective draws, so
    the bound is larger.
    """
    return max(LARGEST_RHAT, (1 + 2 * chains / LEAST_ESS) ** 0.5)


def by_chance(count: int, effective: Any) -> Any:
    """Standard errors that the largest of ``count`` figures exceeds by chance, two-sided."""
    return student.isf(FALSE_ALARM / (2 * count), np.maximum(np.asarray(effective) - 1, 1.0))


def verdict(wrong: bool, error: float, size: float, tolerated: float) -> bool | None:
    """Whether a figure is as expected; None if Monte Carlo error is too large to decide."""
    if wrong:
        return False
    return True if max(error, size) <= tolerated else None


def worst_of(
    values: np.ndarray, errors: np.ndarray, sizes: np.ndarray, known: np.ndarray, tolerated: float
) -> tuple[int, bool | None]:
    """The worst of several figures that are about 0 for exact draws, and its `verdict`.

    ``errors`` and ``sizes`` are Monte Carlo errors and effective draws. Figures that are not
    ``known`` are left out.
    """
    sure = known & (np.abs(values) > by_chance(int(known.sum()), sizes) * errors)
    worst = int(np.argmax(np.where(sure if sure.any() else known, np.abs(values), -1.0)))
    size = float(np.abs(values[worst]))
    wrong = bool(sure.any() and size > tolerated)
    return worst, verdict(wrong, float(errors[known].max()), size, tolerated)


def digits(x: float) -> str:
    """The number with three digits; large figures are shown as whole numbers."""
    text = f"{x:.3g}"
    return f"{float(text):,.0f}" if 1000 <= abs(x) < 1e9 else text


def span(values: Any) -> str:
    """One figure, or the range over chains if they differ visibly."""
    low, high = digits(float(np.min(values))), digits(float(np.max(values)))
    return low if low == high else f"{low} to {high}"


# Remedies: each is written once, with the condition under which it is one


def smaller_step(attrs: Mapping[str, Any]) -> str:
    """How to get smaller steps; what the run does already is not advised."""
    if attrs.get("step_size") != "auto":
        return "step_size='auto' or a smaller step_size"
    return "a larger target_accept" if "target_accept" in attrs else "a smaller bias_tolerance"


def less_noise(attrs: Mapping[str, Any]) -> str:
    """How to get less minibatch noise; empty for a run on all rows."""
    if "num_data" in attrs and attrs.get("batch_sizes", "{}") == "{}":
        return ""
    corrected = attrs.get("control_variate", False)
    return "a larger batch_size" + ("" if corrected else " or control_variate=True")


def takes_scale(attrs: Mapping[str, Any]) -> bool:
    """Whether the kernel has ``dense_mass``, and can use it."""
    expanded = attrs.get("expansion", "none") != "none"
    return not expanded and ("kernel" not in attrs or "dense_mass" in attrs)


STANDARDISE = "standardise the inputs"


def other_coordinates(run: RunRecord) -> str:
    """How to get a posterior that is easier. Without a model, several sites may be a hierarchy."""
    sites = [x for x in run.posterior.values() if x.dtype.kind == "f"]
    if not run.attributes.get("hierarchy", len(sites) > 1):
        return f"{STANDARDISE}, or give a prior that is less wide"
    return "reparametrise the model (a non-centred hierarchy, for instance)"


def moments_right(found: Sequence[Check]) -> bool:
    """Whether checks of moments tell that means and standard deviations are right."""
    return all(any(check.name == name and check.ok for check in found) for name in MOMENTS)


def run_checks(run: RunRecord, right: bool = False) -> Iterator[Check]:
    """All checks that need neither the draws of a chain nor gradients at the draws.

    ``right`` tells whether gradients at the draws show that means and sds are right. Curvatures of
    a wide range and a few failed steps have then done nothing to the draws.
    """
    yield from _starts(run)
    yield from _temperatures(run)
    yield from _step_size(run)
    yield from _length(run, right)
    yield from _trouble(run, right)
    yield from _guide(run)


def _starts(run: RunRecord) -> Iterator[Check]:
    """Searches that ended in worse modes, and chains in a worse mode than others; if there are any.

    Energies differ between chains by more than sampling can bridge if one is in a mode with less
    mass.
    """
    attrs = run.attributes
    if np.max(attrs.get("searches_above", 0)) > 0:
        count, gap = span(attrs["searches_above"]), digits(float(np.max(attrs["search_gap"])))
        where = f"per chain; {count} of them ended in other modes, up to {gap} nats above"
        yield Check("searches for a start", float(attrs["searches"]), where=where)
    energies = run.sample_stats.get("energy")
    if energies is None or "bridged" not in attrs or energies.shape[1] < LEAST_PER_CHAIN:
        return
    above, noise = above_the_best(np.asarray(energies, float))
    worst = int(np.argmax(above))
    if above[worst] > float(attrs["bridged"]) + noise[worst]:
        advice = (
            f"chain {worst} is in another mode than chain {np.argmin(above)}, of much less mass by "
            "its energy, and does not cross: leave it out, or start it from init_params among the "
            "draws of the better chain"
        )
        name, value = "energy above the best chain, in nats", float(above[worst])
        yield at_most(name, value, float(attrs["bridged"]), f"chain {worst}", advice)


def _tolerance(run: RunRecord) -> float:
    return float(run.attributes.get("bias_tolerance", TOLERATED_VARIANCE))


def _temperatures(run: RunRecord) -> Iterator[Check]:
    """Temperatures: in total, of each site, and of the momentum."""
    tau, tolerated = run.temperature, _tolerance(run)
    if tau <= 0:
        return
    sites = [name for name in run.sample_stats if name.startswith(SITE_TEMPERATURE)]
    for name in ("configurational_temperature", *sites, "kinetic_temperature"):
        if name not in run.sample_stats:
            continue
        values = np.asarray(run.sample_stats[name], float)
        mean, error, ok = float(values.mean()), None, None
        if values.shape[1] >= LEAST_PER_CHAIN:
            effective = float(effective_size(values[..., None])[0]) if values.std() > 0 else 1.0
            error = float(values.std() / np.sqrt(effective))
            allowed = by_chance(len(sites) if name in sites else 1, effective) * error
            # the tolerated bias also changes the temperature
            wrong = abs(mean - tau) > tolerated * tau + allowed
            ok = verdict(bool(wrong), error, abs(mean - tau), tolerated * tau)
        title = name.replace("_", " ")
        if name in sites:
            title = f"configurational temperature, {name.removeprefix(SITE_TEMPERATURE)}"
        where = HIDDEN if ok is None and error is not None else ""
        cause, remedy = "noise is missing", ""
        if mean > tau:
            cause, remedy = "the steps are too large", f"{smaller_step(run.attributes)}, or "
        advice = (
            f"{cause}, or the chain has not reached the target: use {remedy}a larger num_warmup"
        )
        yield Check(title, mean, error, f"{tau:g}, within {tolerated:.0%}", ok, where, advice)


def _step_size(run: RunRecord) -> Iterator[Check]:
    """The step size and its bias, to first order."""
    attrs = run.attributes
    for title, name in (("step size", "step_size"), ("steps per draw", "n_steps")):
        if run.of_this_package and name in run.sample_stats:
            means = np.asarray(run.sample_stats[name], float).mean(1)
            differ = digits(means.min()) != digits(means.max())
            where = f"{span(means)} over chains" if differ else ""
            yield Check(title, float(means.mean()), where=where)
    if "scale_condition" in attrs:
        where = "of the learned covariance"
        if "scale_structure" in attrs:
            where = f"of the learned variances: {attrs['scale_structure']}"
        yield Check("condition number", float(np.max(attrs["scale_condition"])), where=where)
    if "noise_with_control_variate" in attrs:
        plain, corrected = (
            digits(attrs[f"noise_{kind}_control_variate"]) for kind in ("without", "with")
        )
        rows = attrs.get("batch_size")
        kind = "total noise" if "target_accept" in attrs else "largest noise"
        where = f"{kind} {plain} without control variate, {corrected} with it, at this size"
        if not isinstance(rows, str | None):
            yield Check("rows per step", float(rows), where=where)
    if "bias_noise" not in attrs:
        if "bias_note" in attrs:
            yield Check("bias of variances, both", np.nan, where=attrs["bias_note"])
        return
    parts = [np.atleast_1d(attrs[f"bias_{kind}"]) for kind in ("discretisation", "noise")]
    largest = [float(np.max(part)) for part in parts]
    for title, value in zip(("discretisation", "minibatch noise"), largest, strict=True):
        yield Check(f"bias of variances, {title}", value)
    tolerance, total = _tolerance(run), float(np.max(parts[0] + parts[1]))
    what, remedy = _what_binds(attrs, largest, total, tolerance)
    ok = bool(total <= ROUNDING * tolerance)
    terms = attrs["bias_terms"].format(*map(span, parts)) + ", " if "bias_terms" in attrs else ""
    where = f"{terms}to first order; {what}" + (f": {remedy}" if ok and remedy else "")
    automatic, noisy = attrs.get("step_size") == "auto", largest[1] > largest[0]
    advice = "use a larger num_warmup, in which the step size is found"
    if not automatic:
        advice = "use step_size='auto'"
        if "step_size" in run.sample_stats and total > 0:
            h = float(np.mean(run.sample_stats["step_size"])) * tolerance / total
            advice += f", a step_size of at most {h:.2g}"
    advice += f", {less_noise(attrs) or 'more rows'}" if noisy else " or another metric"
    name, threshold = "bias of variances, both", f"at most {tolerance:g}"
    yield Check(name, total, None, threshold, ok, where, advice)


def _what_binds(
    attrs: Mapping[str, Any], parts: list[float], total: float, tolerance: float
) -> tuple[str, str]:
    """The term that limits the step size, as the table shows the terms; and a remedy."""
    shrink = float(np.min(attrs.get("warmup_shrink", 1.0)))
    if attrs.get("step_size") == "auto" and shrink < 1:
        return (
            "failed steps in warm-up bind, they made the step size smaller by a factor of "
            f"{digits(1 / shrink)}",
            "a model without such regions allows larger steps",
        )
    if total < BINDING * tolerance:
        if attrs.get("step_size") == "auto":
            return "neither binds: the integrator is not stable at larger steps", ""
        return "neither binds", ""
    if parts[1] <= parts[0]:
        can = takes_scale(attrs) and "scale_condition" not in attrs  # else no metric is better
        return "discretisation binds", "dense_mass=True allows larger steps" if can else ""
    known = "control_variate" not in attrs or attrs["control_variate"] or "num_data" not in attrs
    others = "" if known else "control_variate=True or "
    return "minibatch noise binds", f"{others}a larger batch_size allows larger steps"


def _length(run: RunRecord, right: bool) -> Iterator[Check]:
    """Checks from the measurements of warm-up: length of the run, and range of curvatures."""
    attrs = run.attributes
    if "relaxations" in attrs:
        spanned = _relaxations(run)
        where = f"of {span(attrs['relaxation_steps'])} steps each"
        advice = advice_on_length(run)
        name = "relaxation times per chain"
        yield at_least(name, spanned, ENOUGH_RELAXATIONS, where, advice)
    if "curvature_ratio" in attrs:
        closer = "or compare with a run at a larger target_accept"
        if "target_accept" not in attrs:
            closer = "or compare with a run at a tenth of the bias_tolerance"
        advice = (
            "one step size does not fit all of the posterior, and where the curvature is largest "
            f"the draws are the most biased: {other_coordinates(run)}, {closer}"
        )
        name, ratio = "largest over smallest curvature", float(np.median(attrs["curvature_ratio"]))
        where = "in late warm-up, median chain"
        if right and ratio > WIDE_CURVATURE:
            yield Check(name, ratio, ok=True, where=f"{where}; means and sds are right")
        else:
            yield at_most(name, ratio, WIDE_CURVATURE, where, advice)


def _relaxations(run: RunRecord) -> float:
    """Relaxation times that the median chain spans; steps that did not move are not counted."""
    moved = 1.0
    if "acceptance_rate" in run.sample_stats:
        moved = float(np.mean(run.sample_stats["acceptance_rate"]))
    elif "diverging" in run.sample_stats:
        moved = 1 - float(np.mean(run.sample_stats["diverging"]))
    return float(np.median(run.attributes["relaxations"])) * moved


def advice_on_length(run: RunRecord) -> str:
    """Advice for too few effective draws: draw more, unless far too many would be needed."""
    attrs = run.attributes
    if "relaxations" not in attrs:
        return f"increase num_samples, or {other_coordinates(run)}"
    spanned = _relaxations(run)
    capped = np.max(attrs.get("final_num_steps", 0)) >= MAX_NUM_STEPS
    if spanned >= ENOUGH_RELAXATIONS or (
        spanned * MOST_LONGER >= ENOUGH_RELAXATIONS and not capped
    ):
        return "increase num_samples or num_steps"
    slow = "the chain has hardly moved"
    if capped:
        slow += f" with {MAX_NUM_STEPS:,} steps per draw, the most that num_steps='auto' takes"
    times = f"{digits(ENOUGH_RELAXATIONS / spanned)} times " if spanned > 0 else "far "
    how = [
        f"{name}='auto'"
        for name, usual in (("step_size", ""), ("num_steps", "auto"))
        if attrs.get(name, usual) != "auto"
    ]
    if attrs.get("dense_mass") == 0:
        how.append(ANY_DIRECTION)
    elif "scale_condition" in attrs:
        how.append("a larger num_warmup, from whose draws the scale is learned")
    elif takes_scale(attrs):
        how.append("dense_mass=True, which learns the posterior's scale")
    use = f"use {' and '.join(how)}, " if how else ""
    others = other_coordinates(run).removeprefix(f"{STANDARDISE}, or ")
    return (
        f"{slow}, and a run that is long enough is {times}longer. Mend the coordinates instead: "
        f"{use}{STANDARDISE}, or {others}"
    )


def _trouble(run: RunRecord, right: bool) -> Iterator[Check]:
    """Failed or rejected steps, and passes over the data."""
    attrs, stats = run.attributes, run.sample_stats
    if "diverging" in stats:
        yield _failed(run, right)
    if "acceptance_rate" in stats:
        name, rate = "acceptance rate", float(stats["acceptance_rate"].mean())
        if "target_accept" in attrs:
            aim = float(attrs["target_accept"])
            where, advice = f"the aim is {aim:g}", f"use {smaller_step(attrs)}"
            if attrs.get("step_size") == "auto":
                advice = "use a larger num_warmup, in which the step size is found"
            yield at_least(name, rate, LEAST_ACCEPTANCE * aim, where, advice)
        else:
            yield Check(name, rate)
    if "passes" in attrs:
        passes = float(np.mean(attrs["passes"]))
        yield Check("passes over the data", passes, where="per chain, after warm-up")


def _failed(run: RunRecord, right: bool) -> Check:
    """Draws with failed steps, or with trajectories that were rejected because of huge errors."""
    diverging, automatic = run.sample_stats["diverging"], run.attributes.get("step_size") == "auto"
    exact = "target_accept" in run.attributes or not run.of_this_package
    name = "divergences" if exact else "draws with failed steps"
    mass, most = _mass_at(diverging.astype(bool), run.posterior)
    where = f"of {diverging.size} draws"
    if mass > 0:
        where += f", where {mass:.2g} of the {most} is"
    if 0 < mass <= (LARGEST_SEEN if right else LARGEST_DIVERGING if exact else LARGEST_FAILED):
        return Check(name, float(diverging.sum()), None, "few", True, where)
    if not run.of_this_package:
        advice = "use a larger target_accept_prob or another parametrisation"
    elif exact:
        smaller = "larger target_accept or num_warmup" if automatic else "smaller step_size"
        advice = (
            "the energy errors were not finite or very large, and the steps were rejected. That is "
            "exact, but chains hardly enter such regions, or cannot leave them. Use a "
            f"{smaller}, or another parametrisation"
        )
    else:
        smaller = "a smaller step_size"
        if automatic:
            smaller = (
                "a larger num_warmup (failed steps halve the step size), a smaller bias_tolerance"
            )
        advice = (
            "steps after warm-up were not finite or not stable: draws avoid the region where that "
            f"happens, or are thrown out of it. Use {smaller} or another parametrisation, or make "
            "the model finite there"
        )
    return none_of(name, diverging.sum(), where, advice)


def _mass_at(these: np.ndarray, posterior: Arrays) -> tuple[float, str]:
    """Share of these draws, or the largest share of a variance that they make up; and of what.

    An entry that is positive counts by its logarithm: as for a half-Cauchy scale, its own variance
    may be that of a few draws, wherever steps fail.
    """
    mass = float(these.mean())
    arrays = {name: x for name, x in posterior.items() if x.size and x.dtype.kind == "f"}
    if mass == 0 or not arrays:
        return mass, "mass"
    names, values = entries(arrays, MAX_ENTRIES)
    positive = np.all(values > 0, axis=(0, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.where(positive, np.log(values), values)
        squares = (values - values.mean((0, 1))) ** 2
        parts = np.nan_to_num(squares[these].sum(0) / squares.sum((0, 1)))
    worst = int(np.argmax(parts))
    name = f"log {names[worst]}" if positive[worst] else names[worst]
    return max((mass, "mass"), (float(parts[worst]), f"variance of {name}"))


def draw_checks(posterior: Arrays, run: RunRecord, seconds: float | None) -> Iterator[Check]:
    """R-hat and effective sample sizes of the draws, or the reason why there are none."""
    posterior = {name: x for name, x in posterior.items() if x.size}
    if not posterior:
        return
    names, values = entries(posterior, MAX_ENTRIES)
    finite = np.isfinite(values).all((0, 1))
    if not finite.all():
        where = f"{names[int(np.argmin(finite))]}, for instance"
        advice = "check that the model is proper there; other figures leave them out"
        yield none_of("entries that are not finite", np.sum(~finite), where, advice)
    if "guide" in run.attributes:  # independent draws need no check of mixing
        return
    moving = finite & (np.ptp(np.nan_to_num(values), (0, 1)) > 0)
    if values.shape[1] < LEAST_PER_CHAIN:
        advice = "nothing can be said about so few draws: increase num_samples"
        yield at_least("draws per chain", values.shape[1], LEAST_PER_CHAIN, "", advice)
    elif not moving.any():
        advice = f"the chain does not move: use {smaller_step(run.attributes)}"
        yield at_least("entries that change from draw to draw", 0, 1, "", advice)
    else:
        yield from _mixing(Scalars(names, values).keep(moving), run, seconds)


def _mixing(scalars: Scalars, run: RunRecord, seconds: float | None) -> Iterator[Check]:
    names, values = scalars
    found = _arviz_figures(values)
    longer = advice_on_length(run)
    if "rhat" in found:
        worst, advice = int(np.argmax(found["rhat"])), f"chains disagree; {longer}"
        if found["rhat"][worst] > APART and _within_chains(values[..., worst]) >= LEAST_ESS / 4:
            advice = (
                "each chain is long enough for itself, but they are in different places: in "
                "different modes, or in different labellings of parts that can be exchanged. "
                "Longer chains do not help: order the parts, or look at what does not depend on "
                "labels"
            )
        bound = largest_rhat(values.shape[0])
        yield at_most("R-hat", found["rhat"][worst], bound, names[worst], advice)
    for kind in ("bulk", "tail"):
        worst, name = int(np.argmin(found[kind])), f"effective sample size, {kind}"
        yield at_least(name, found[kind][worst], LEAST_ESS, names[worst], longer)
    bulk, gradients = float(found["bulk"].min()), _gradients(run)
    if gradients is not None:
        rows = json.loads(run.attributes.get("batch_sizes", "{}"))
        where = f"each on {', '.join(f'{n} rows of {k}' for k, n in rows.items())}" if rows else ""
        yield Check("effective draws per gradient", bulk / gradients, where=where)
    if seconds is not None:
        yield Check("effective draws per second", bulk / seconds)


def _within_chains(values: np.ndarray) -> float:
    """Effective draws of an entry about each chain's own mean, in all chains together."""
    own = values - values.mean(1, keepdims=True)
    return float(effective_size(own[..., None])[0]) if own.std() > 0 else 0.0


def _arviz_figures(values: np.ndarray) -> Arrays:
    """Effective sample sizes of each entry (0 if undefined), and R-hat of several chains."""
    import arviz  # slow to import, and only needed here

    # ArviZ 0.2x and 1.x both accept a dataset
    data = xr.Dataset({"x": (["chain", "draw", "entry"], values)})
    found = {}
    with np.errstate(divide="ignore", invalid="ignore"):  # chains that do not move
        for kind in ("bulk", "tail"):
            found[kind] = np.nan_to_num(arviz.ess(data, method=kind)["x"].values, nan=0.0)
        if values.shape[0] > 1:
            found["rhat"] = arviz.rhat(data)["x"].values
    return found


def _gradients(run: RunRecord) -> float | None:
    chains = next(iter(run.posterior.values())).shape[0]
    if "gradients" in run.attributes:
        return float(np.sum(np.broadcast_to(run.attributes["gradients"], chains)))
    if "n_steps" in run.sample_stats:
        return float(run.sample_stats["n_steps"].sum()) * int(run.attributes.get("thinning", 1))
    return None


def _guide(run: RunRecord) -> Iterator[Check]:
    """Failed geodesics, the Pareto shape of weights and what they correct, if a guide has them."""
    stats, attributes = run.sample_stats, run.attributes
    is_fisher = attributes.get("metric") == "fisher"
    if "success" in stats:
        failed = np.sum(~stats["success"].astype(bool))
        where = f"{failed} of {stats['success'].size} geodesics failed"
        advice = (
            "these draws are NaN (`success` in sample_stats marks them), and leaving them out "
            "biases the other draws. Draw again from a guide with a larger max_steps "
            "or rtol, standardise the inputs, or "
        )
        other = "reparametrise the model" if is_fisher else "use metric='fisher'"
        yield none_of("failed geodesics", failed, where, advice + other)
    if "pareto_k" in attributes:
        shape, weights = float(attributes["pareto_k"]), stats.get("log_weight")
        num_draws = math.prod(next(iter(run.posterior.values())).shape[:2])
        yield _shape_of_weights(shape, weights, num_draws, is_fisher)
        if weights is not None:
            yield from weight_checks(run.posterior, weights, can_correct(weights, shape))


def _shape_of_weights(
    shape: float, log_weight: np.ndarray | None, num_draws: int, is_fisher: bool
) -> Check:
    largest = largest_shape(num_draws)
    name, threshold = "Pareto shape of weights", f"below {largest:.2g}"
    if shape < largest:
        return Check(name, shape, None, threshold, True)
    where = f"from {largest:.2g} on, weights cannot correct {num_draws} draws to the posterior"
    other = "draw more" if is_fisher else "try metric='fisher'"
    advice = (
        "do not use log_weight, and take means and intervals as rough ones. Run MCMC, "
        f"reparametrise the model, or {other}"
    )
    if log_weight is not None:
        weights = log_weight[np.isfinite(log_weight)].astype(float)
        enough = weights.size >= FEWEST_WEIGHTS
        if enough and np.ptp(weights) < EQUAL_WEIGHTS:
            return Check(name, shape, ok=True, where="all weights are equal")
        if not enough or not np.isfinite(shape):
            where = f"it could not be estimated from {weights.size} draws with a weight"
            advice = "how near the draws are to the posterior is not known: draw hundreds or more"
    return Check(name, shape, None, threshold, False, where, advice)


def weight_checks(draws: Arrays, log_weight: np.ndarray, correct: bool) -> Iterator[Check]:
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
        return
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
        figures = (
            ("error of the means, in sd, by weights", shift, of_shift),
            ("relative error of the sd, by weights", ratio - 1, of_ratio),
        )
        errors = [terms.std(0) / number**0.5 for _, _, terms in figures]
    sizes = np.full(len(names), 1 / np.sum(w**2))
    problems = "not centred on the posterior", "too wide (+) or too narrow (-) for the posterior"
    tolerances = TOLERATED_MEAN, TOLERATED_SD
    rows = zip(figures, errors, problems, tolerances, strict=True)
    for (name, value, _), error, problem, tolerated in rows:
        known = np.isfinite(value) & np.isfinite(error)
        if not known.any():
            continue
        worst, ok = worst_of(value, error, sizes, known, tolerated)
        where = names[worst] + (f"; {HIDDEN}" if ok is None else "")
        weighted_draws = "sample_posterior(..., resample=True), " if correct else ""
        advice = (
            f"the draws without weights are {problem}: use {weighted_draws}another metric or mode, "
            "or an exact kernel such as NUTS"
        )
        threshold = f"within {tolerated:g} of 0"
        yield Check(name, float(value[worst]), float(error[worst]), threshold, ok, where, advice)
