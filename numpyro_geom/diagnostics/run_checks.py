"""Checks of the records of a run: temperatures, step size, length, and failed steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..sampling.algorithm import MAX_NUM_STEPS
from . import checks
from .checks import Check, at_least, at_most, digits, none_of, span
from .monte_carlo import effective_size
from .run_record import SITE_TEMPERATURE, RunRecord


def run_checks(run: RunRecord) -> Iterator[Check]:
    """All checks that need neither draws nor gradients at the draws."""
    yield from _temperatures(run)
    yield from _step_size(run)
    yield from _length(run)
    yield from _trouble(run)


def _tolerance(run: RunRecord) -> float:
    return float(run.attributes.get("bias_tolerance", checks.TOLERATED_VARIANCE))


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
        if values.shape[1] >= checks.LEAST_DRAWS:
            effective = float(effective_size(values[..., None])[0]) if values.std() > 0 else 1.0
            error = float(values.std() / np.sqrt(effective))
            allowed = checks.by_chance(len(sites) if name in sites else 1, effective) * error
            # the tolerated bias also changes the temperature
            wrong = abs(mean - tau) > tolerated * tau + allowed
            ok = checks.verdict(bool(wrong), error, abs(mean - tau), tolerated * tau)
        title = name.replace("_", " ")
        if name in sites:
            title = f"configurational temperature, {name.removeprefix(SITE_TEMPERATURE)}"
        where = checks.HIDDEN if ok is None and error is not None else ""
        advice = _temperature_advice(run, too_hot=mean > tau)
        yield Check(title, mean, error, f"{tau:g}, within {tolerated:.0%}", ok, where, advice)


def _temperature_advice(run: RunRecord, *, too_hot: bool) -> str:
    """What to do about a temperature that is not the target's."""
    if not too_hot:
        return "noise is missing, or the chain has not reached the target: use a larger num_warmup"
    automatic = run.attributes.get("step_size") == "auto"
    smaller = "a smaller bias_tolerance" if automatic else "step_size='auto' or a smaller step_size"
    return (
        f"the steps are too large, or the chain has not reached the target: use {smaller}, or a "
        "larger num_warmup"
    )


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
        yield Check("condition number", float(np.max(attrs["scale_condition"])), where=where)
    if "noise_with_control_variate" in attrs:
        plain, corrected = (
            digits(attrs[f"noise_{kind}_control_variate"]) for kind in ("without", "with")
        )
        rows = attrs.get("batch_size")
        where = f"largest noise {plain} without control variate, {corrected} with it, at this size"
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
    ok = bool(total <= checks.ROUNDING * tolerance)
    terms = attrs["bias_terms"].format(*map(span, parts)) + ", " if "bias_terms" in attrs else ""
    where = f"{terms}to first order; {what}" + (f": {remedy}" if ok and remedy else "")
    automatic, noisy = attrs.get("step_size") == "auto", largest[1] > largest[0]
    advice = "use a larger num_warmup, in which the step size is found"
    if not automatic:
        advice = "use step_size='auto'"
        if "step_size" in run.sample_stats and total > 0:
            h = float(np.mean(run.sample_stats["step_size"])) * tolerance / total
            advice += f", a step_size of at most {h:.2g}"
    advice += ", a larger batch_size or control_variate=True" if noisy else " or another metric"
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
    if total < checks.BINDING * tolerance:
        if attrs.get("step_size") == "auto":
            return "neither binds: the integrator is not stable at larger steps", ""
        return "neither binds", ""
    if parts[1] <= parts[0]:
        scaled = "scale_condition" in attrs  # then no other metric is better
        return "discretisation binds", "" if scaled else "dense_mass=True allows larger steps"
    known = "control_variate" not in attrs or attrs["control_variate"] or "num_data" not in attrs
    others = "" if known else "control_variate=True or "
    return "minibatch noise binds", f"{others}a larger batch_size allows larger steps"


def _length(run: RunRecord) -> Iterator[Check]:
    """Checks from the measurements of warm-up: length of the run, and range of curvatures."""
    attrs = run.attributes
    if "relaxations" in attrs:
        spanned = _relaxations(run)
        where = f"of {span(attrs['relaxation_steps'])} steps each"
        advice = advice_on_length(run)
        name = "relaxation times per chain"
        yield at_least(name, spanned, checks.ENOUGH_RELAXATIONS, where, advice)
    if "curvature_ratio" in attrs:
        closer = "or compare with a run at a larger target_accept"
        if "target_accept" not in attrs:
            closer = "or compare with a run at a tenth of the bias_tolerance"
        advice = (
            "one step size does not fit all of the posterior, and where the curvature is largest "
            "the draws are the most biased. Reparametrise the model (a non-centred hierarchy, for "
            f"instance), {closer}"
        )
        name, ratio = "largest over smallest curvature", attrs["curvature_ratio"]
        where = "in late warm-up, median chain"
        yield at_most(name, np.median(ratio), checks.WIDE_CURVATURE, where, advice)


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
        return "increase num_samples, or reparametrise the model"
    spanned = _relaxations(run)
    capped = np.max(attrs.get("final_num_steps", 0)) >= MAX_NUM_STEPS
    if spanned >= checks.ENOUGH_RELAXATIONS or (
        spanned * checks.MOST_LONGER >= checks.ENOUGH_RELAXATIONS and not capped
    ):
        return "increase num_samples or num_steps"
    slow = "the chain has hardly moved"
    if capped:
        slow += f" with {MAX_NUM_STEPS:,} steps per draw, the most that num_steps='auto' takes"
    times = f"{digits(checks.ENOUGH_RELAXATIONS / spanned)} times " if spanned > 0 else "far "
    how = "step_size='auto' and dense_mass=True, which learn the posterior's scale"
    if "scale_condition" in attrs:
        how = "a larger num_warmup, from whose draws the scale is learned"
    return (
        f"{slow}, and a run that is long enough is {times}longer. Mend the coordinates instead: "
        f"use {how}, standardise the inputs, or reparametrise the model"
    )


def _trouble(run: RunRecord) -> Iterator[Check]:
    """Clamped noise, failed or rejected steps, and passes over the data."""
    attrs, stats = run.attributes, run.sample_stats
    if "clamped" in attrs:
        where = (
            "share of entries with more minibatch noise than could be taken from the injected one"
        )
        advice = "use a smaller step_size or a larger batch_size"
        yield at_most("clamped noise", attrs["clamped"], checks.LARGEST_CLAMPED, where, advice)
    if "diverging" in stats:
        yield _failed(run)
    if "acceptance_rate" in stats:
        name, rate = "acceptance rate", float(stats["acceptance_rate"].mean())
        if "target_accept" in attrs:
            aim = float(attrs["target_accept"])
            where, advice = f"the aim is {aim:g}", "use step_size='auto', or a smaller step_size"
            yield at_least(name, rate, checks.LEAST_ACCEPTANCE * aim, where, advice)
        else:
            yield Check(name, rate)
    if "passes" in attrs:
        passes = float(np.mean(attrs["passes"]))
        yield Check("passes over the data", passes, where="per chain, after warm-up")


def _failed(run: RunRecord) -> Check:
    """Draws with failed steps, or with trajectories that were rejected because of huge errors."""
    diverging, automatic = run.sample_stats["diverging"], run.attributes.get("step_size") == "auto"
    where = f"of {diverging.size} draws"
    if not run.of_this_package:
        advice = "use a larger target_accept_prob or another parametrisation"
        return none_of("divergences", diverging.sum(), where, advice)
    if "target_accept" in run.attributes:
        smaller = "larger target_accept or num_warmup" if automatic else "smaller step_size"
        advice = (
            "the energy errors were not finite or very large, and the steps were rejected. That is "
            "exact, but chains hardly enter such regions, or cannot leave them. Use a "
            f"{smaller}, or another parametrisation"
        )
        return none_of("divergences", diverging.sum(), where, advice)
    smaller = "a smaller step_size"
    if automatic:
        smaller = "a larger num_warmup (failed steps halve the step size), a smaller bias_tolerance"
    advice = (
        "steps after warm-up were not finite or not stable: draws avoid the region where that "
        f"happens, or are thrown out of it. Use {smaller} or another parametrisation, or make the "
        "model finite there"
    )
    return none_of("draws with failed steps", diverging.sum(), where, advice)
