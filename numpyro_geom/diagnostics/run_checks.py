"""Checks of what a run says of itself: temperatures, step size, length, and steps that failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..warmup.step_size import MAX_NUM_STEPS
from . import checks
from .checks import Check, at_least, at_most, digits, none_of, span
from .monte_carlo import effective_size
from .run_record import SITE_TEMPERATURE, RunRecord


def run_checks(run: RunRecord) -> Iterator[Check]:
    """All that need no draws and no gradients at them."""
    yield from _temperatures(run)
    yield from _step_size(run)
    yield from _length(run.attributes)
    yield from _trouble(run)


def _tolerance(run: RunRecord) -> float:
    return float(run.attributes.get("bias_tolerance", checks.TOLERATED_VARIANCE))


def _temperatures(run: RunRecord) -> Iterator[Check]:
    """In total, of each site, and of the momentum."""
    tau, tolerated = run.temperature, _tolerance(run)
    if tau <= 0:
        return
    sites = [name for name in run.sample_stats if name.startswith(SITE_TEMPERATURE)]
    for name in ("configurational_temperature", *sites, "kinetic_temperature"):
        if name not in run.sample_stats:
            continue
        values = np.asarray(run.sample_stats[name], float)
        mean, error, ok = float(values.mean()), None, None
        if values.shape[1] >= checks.LEAST_DRAWS and values.std() > 0:
            effective = float(effective_size(values[..., None])[0])
            error = float(values.std() / np.sqrt(effective))
            allowed = checks.by_chance(len(sites) if name in sites else 1, effective) * error
            # the bias that is tolerated shows up here too
            wrong = abs(mean - tau) > tolerated * tau + allowed
            ok = checks.verdict(bool(wrong), error, abs(mean - tau), tolerated * tau)
        title = name.replace("_", " ")
        if name in sites:
            title = f"configurational temperature, {name.removeprefix(SITE_TEMPERATURE)}"
        where = checks.HIDDEN if ok is None and error is not None else ""
        advice = (
            "steps are too large (above) or noise is missing (below), or the chain has not reached "
            "the target"
        )
        yield Check(title, mean, error, f"{tau:g}, within {tolerated:.0%}", ok, where, advice)


def _step_size(run: RunRecord) -> Iterator[Check]:
    """The step size and what it costs, to first order."""
    attrs = run.attributes
    for title, name in (("step size", "step_size"), ("steps a draw", "n_steps")):
        if run.of_this_package and name in run.sample_stats:
            means = np.asarray(run.sample_stats[name], float).mean(1)
            differ = digits(means.min()) != digits(means.max())
            where = f"{span(means)} over chains" if differ else ""
            yield Check(title, float(means.mean()), where=where)
    if "scale_condition" in attrs:
        where = f"{span(attrs['scale_condition'])} of the covariance that coordinates are scaled by"
        yield Check("condition number", float(np.max(attrs["scale_condition"])), where=where)
    if "noise_with_control_variate" in attrs:
        plain, corrected = (
            digits(attrs[f"noise_{kind}_control_variate"]) for kind in ("without", "with")
        )
        rows = attrs.get("batch_size")
        where = f"largest noise {plain} without control variate, {corrected} with it, at this size"
        if not isinstance(rows, str | None):
            yield Check("rows a step", float(rows), where=where)
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
    terms = attrs["bias_terms"].format(*map(span, parts)) + ", " if "bias_terms" in attrs else ""
    ok = bool(total <= checks.ROUNDING * tolerance)
    where = f"{terms}to first order; {what}" + (f": {remedy}" if ok and remedy else "")
    advice = "use step_size='auto', a smaller step"
    if "step_size" in run.sample_stats and total > 0:
        h = float(np.mean(run.sample_stats["step_size"])) * tolerance / total
        advice = f"use step_size='auto', or a step size of at most {h:.2g}"
    noisy = largest[1] > largest[0]
    advice += ", a larger batch_size or control_variate=True" if noisy else " or another metric"
    name, threshold = "bias of variances, both", f"at most {tolerance:g}"
    yield Check(name, total, None, threshold, ok, where, advice)


def _what_binds(
    attrs: Mapping[str, Any], parts: list[float], total: float, tolerance: float
) -> tuple[str, str]:
    """What keeps the step size from being larger, by the terms as they are shown; and a remedy."""
    shrink = float(np.min(attrs.get("warmup_shrink", 1.0)))
    if attrs.get("step_size") == "auto" and shrink < 1:
        return (
            "undone steps in warm-up bind, they made the step size smaller by a factor of "
            f"{digits(1 / shrink)}",
            "a model without such regions allows larger steps",
        )
    if total < checks.BINDING * tolerance:
        if attrs.get("step_size") == "auto":
            return "neither binds, but the integrator's own limit", ""
        return "neither binds", ""
    if parts[1] <= parts[0]:
        return "discretisation binds", "a metric that fits the scales allows larger steps"
    known = "control_variate" not in attrs or attrs["control_variate"] or "num_data" not in attrs
    others = "" if known else "control_variate=True or "
    return "minibatch noise binds", f"{others}a larger batch_size allows larger steps"


def _length(attrs: Mapping[str, Any]) -> Iterator[Check]:
    """What warm-up's measurements say of the run's length, and of one step size for all of it."""
    if "relaxations" in attrs:
        spanned, where = np.median(attrs["relaxations"]), span(attrs["relaxation_steps"])
        name, where = "relaxation times a chain spans", f"of {where} steps each"
        advice = _length_advice(attrs, float(spanned))
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
        where = "in the second half of warm-up, the median of the chains"
        yield at_most(name, np.median(ratio), checks.WIDE_CURVATURE, where, advice)


def _length_advice(attrs: Mapping[str, Any], spanned: float) -> str:
    """What to do about too few relaxation times."""
    if spanned * checks.MOST_LONGER >= checks.ENOUGH_RELAXATIONS:
        bounded = np.max(attrs.get("final_num_steps", 0)) >= MAX_NUM_STEPS
        how = f"give num_steps (the automatic one stops at {MAX_NUM_STEPS})"
        return (
            "the draws are few in effect and may not have reached the target. Increase num_samples "
            f"or {how if bounded else 'num_steps'}, use a metric that fits the posterior's scales "
            "better, or a larger batch_size where noise binds"
        )
    times = f"{digits(checks.ENOUGH_RELAXATIONS / spanned)} times " if spanned > 0 else "far "
    how = "step_size='auto' and dense_mass='auto' or True, which learn the posterior's scale"
    if any(attrs.get(name, "none") != "none" for name in ("dense_mass", "inverse_mass_matrix")):
        how = "a longer warm-up, from whose draws the scale is learned"
    return (
        f"the chain has hardly moved, and a run that is long enough is {times}longer. Mend the "
        f"coordinates instead: use {how}, standardise inputs, or reparametrise the model"
    )


def _trouble(run: RunRecord) -> Iterator[Check]:
    """Noise that was clamped, steps that failed or were rejected, and the effort."""
    attrs, stats = run.attributes, run.sample_stats
    if "clamped" in attrs:
        where = (
            "share of entries with more minibatch noise than could be taken from the injected one"
        )
        advice = "use a smaller step or a larger batch_size"
        yield at_most("clamped noise", attrs["clamped"], checks.LARGEST_CLAMPED, where, advice)
    if "diverging" in stats:
        smaller = "a smaller step_size"
        if attrs.get("step_size") == "auto":
            smaller = (
                "a longer warm-up (each undone step in it halves the step size), a smaller "
                "bias_tolerance,"
            )
        advice = (
            "steps after warm-up were not finite or unstable, and draws avoid the region where "
            f"that happens. Use {smaller} or another parametrisation, or check that the model is "
            "proper and finite there"
        )
        name = "draws with undone steps" if run.of_this_package else "divergences"
        where = f"of {stats['diverging'].size} draws"
        yield none_of(name, stats["diverging"].sum(), where, advice)
    if "acceptance_rate" in stats:
        name, rate = "acceptance rate", float(stats["acceptance_rate"].mean())
        if "target_accept" in attrs:
            aim = float(attrs["target_accept"])
            where, advice = f"the aim is {aim:g}", "use a smaller step"
            yield at_least(name, rate, checks.LEAST_ACCEPTANCE * aim, where, advice)
        else:
            yield Check(name, rate)
    if "passes" in attrs:
        passes = float(np.mean(attrs["passes"]))
        yield Check("passes over the data", passes, where="a chain, after warm-up")
