"""Checks of the draws against their target, by gradients at them: errors of moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .checks import (
    HIDDEN,
    LEAST_DRAWS,
    TOLERATED_MEAN,
    TOLERATED_SD,
    Check,
    at_least,
    by_chance,
    verdict,
)
from .gradients import POSITION
from .moment_errors import moment_errors
from .run_record import RunRecord


def moment_checks(run: RunRecord) -> Iterator[Check]:
    """Errors of means and standard deviations, from gradients at the draws."""
    first = next((x for n, x in run.unconstrained.items() if n.startswith(POSITION)), None)
    if first is None or run.temperature <= 0 or first.shape[1] < LEAST_DRAWS:
        return
    found = moment_errors(run.unconstrained, run.temperature)
    number = first.shape[0] * first.shape[1]
    if not found.names:
        yield at_least(
            "coordinates with a gradient",
            0.0,
            1,
            advice="none is finite, or rounding of constrained values hides all: run in 64 bits",
        )
        return
    if number - found.left_out < LEAST_DRAWS:
        yield at_least(
            "draws with a finite gradient",
            float(number - found.left_out),
            LEAST_DRAWS,
            advice="draws are at the edge of the support, or U overflows: run in 64 bits, or check "
            "the model",
        )
        return
    left = f", {found.left_out} draws without a finite gradient left out" if found.left_out else ""
    if found.hidden:
        left += f", {len(found.hidden)} coordinates left out: not finite, or hidden by rounding"
    if not found.full:
        left += ", correlations not known: no error of a moment"
    names = ("error of the means, in sd", "relative error of the sd")
    if not found.full:
        names = ("scaled force", "scaled virial, less 1")
    advice = _moment_advice(run.attributes)
    parts = (
        (names[0], found.mean, found.mean_error, found.mean_size, TOLERATED_MEAN, advice[0]),
        (names[1], found.sd, found.sd_error, found.sd_size, TOLERATED_SD, advice[1]),
    )
    for name, values, errors, sizes, tolerated, remedy in parts:
        known = np.isfinite(values) & np.isfinite(errors)
        if not known.any():
            continue
        sure = known & (np.abs(values) > by_chance(int(known.sum()), sizes) * errors)
        size = np.where(sure if sure.any() else known, np.abs(values), -1.0)
        worst = int(np.argmax(size))
        wrong = bool(sure.any() and size[worst] > tolerated)
        ok = verdict(wrong, float(errors[known].max()), float(size[worst]), tolerated)
        if ok and not found.full:
            ok = None
        hides = f"; {HIDDEN}" if ok is None and found.full else ""
        yield Check(
            name,
            float(values[worst]),
            float(errors[worst]),
            f"within {tolerated:g} of 0",
            ok,
            f"{found.names[worst]}, unconstrained{left}{hides}",
            remedy,
        )


def _moment_advice(attrs: Mapping[str, Any]) -> tuple[str, str]:
    """What to do about means and about standard deviations."""
    if "guide" in attrs:
        other = "use metric='fisher', or run MCMC"
    elif "final_step_size" not in attrs:
        other = "run longer, reparametrise, or let the sampler take smaller steps"
    else:
        other = (
            "use step_size='auto', a smaller bias_tolerance, a larger batch_size or "
            "control_variate=True, or run longer"
        )
    if attrs.get("gamma") in ("none", "published"):
        other = (
            f"gamma={attrs['gamma']!r} has another invariant distribution: leave gamma at its "
            "default; or " + other
        )
    longer = other if "guide" in attrs else "run longer, and warm up longer"
    return (
        "the draws are not centred on the target; " + longer,
        "the draws are too wide (+) or too narrow (-) for the target; " + other,
    )
