"""Lines of a report on draws against their target: moments from gradients, and temperatures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from scipy.stats import t as student

from .lines import LEAST_DRAWS, TOLERATED_SD, Kernel, Line, Run
from .replay import Arrays
from .scalars import effective_size
from .summary import SITE_TEMPERATURE
from .temperature import POSITION, moment_errors

FALSE_ALARMS = 0.01
"""Chance that Monte Carlo error alone flags one of a line's figures."""
TOLERATED_MEAN = 0.25
"""Error of a mean, in standard deviations: it widens the spread around the true mean by 3%."""


def _largest(count: int, effective: Any) -> Any:
    """Standard errors that the largest of so many figures exceeds by chance, two-sided."""
    return student.isf(FALSE_ALARMS / (2 * count), np.maximum(np.asarray(effective) - 1, 1.0))


def _verdict(wrong: bool, error: float, size: float, tolerated: float) -> bool | None:
    """Whether a figure is as it should be; None where Monte Carlo error hides it."""
    if wrong:
        return False
    return True if max(error, size) <= tolerated else None


HIDDEN = "Monte Carlo error hides it; run longer to tell"


def moment_lines(run: Run, temperature: float) -> Iterator[Line]:
    """Errors of means and standard deviations, from gradients at the draws."""
    first = next((x for n, x in run.unconstrained.items() if n.startswith(POSITION)), None)
    if first is None or temperature <= 0 or first.shape[1] < LEAST_DRAWS:
        return
    found = moment_errors(run.unconstrained, temperature)
    number = first.shape[0] * first.shape[1]
    if not found.names:
        yield Line(
            "coordinates with a gradient",
            0.0,
            threshold="at least 1",
            ok=False,
            advice="none is finite, or rounding of constrained values hides all: run in 64 bits",
        )
        return
    if number - found.left_out < LEAST_DRAWS:
        yield Line(
            "draws with a finite gradient",
            float(number - found.left_out),
            threshold=f"at least {LEAST_DRAWS}",
            ok=False,
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
    advice = _moment_advice(run.attrs)
    parts = (
        (names[0], found.mean, found.mean_error, found.mean_size, TOLERATED_MEAN, advice[0]),
        (names[1], found.sd, found.sd_error, found.sd_size, TOLERATED_SD, advice[1]),
    )
    for name, values, errors, sizes, tolerated, remedy in parts:
        known = np.isfinite(values) & np.isfinite(errors)
        if not known.any():
            continue
        sure = known & (np.abs(values) > _largest(int(known.sum()), sizes) * errors)
        size = np.where(sure if sure.any() else known, np.abs(values), -1.0)
        worst = int(np.argmax(size))
        wrong = bool(sure.any() and size[worst] > tolerated)
        ok = _verdict(wrong, float(errors[known].max()), float(size[worst]), tolerated)
        if ok and not found.full:
            ok = None
        hides = f"; {HIDDEN}" if ok is None and found.full else ""
        yield Line(
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


def temperature_lines(stats: Arrays, kernel: Kernel) -> Iterator[Line]:
    """Temperatures in total, of each site, and of the momentum."""
    tau, tolerated = kernel.temperature, kernel.bias_tolerance
    if tau <= 0:
        return
    sites = [name for name in stats if name.startswith(SITE_TEMPERATURE)]
    for name in ("configurational_temperature", *sites, "kinetic_temperature"):
        if name not in stats:
            continue
        values = np.asarray(stats[name], float)
        mean, error, ok = float(values.mean()), None, None
        if values.shape[1] >= LEAST_DRAWS and values.std() > 0:
            effective = float(effective_size(values[..., None])[0])
            error = float(values.std() / np.sqrt(effective))
            allowed = _largest(len(sites) if name in sites else 1, effective) * error
            wrong = abs(mean - tau) > tolerated * tau + allowed
            ok = _verdict(bool(wrong), error, abs(mean - tau), tolerated * tau)
        title = name.replace("_", " ")
        if name in sites:
            title = f"configurational temperature, {name.removeprefix(SITE_TEMPERATURE)}"
        yield Line(
            title,
            mean,
            error,
            f"{tau:g}, within {tolerated:.0%}",
            ok,
            HIDDEN if ok is None and error is not None else "",
            "steps are too large (above) or noise is missing (below), or the chain has not reached "
            "the target",
        )
