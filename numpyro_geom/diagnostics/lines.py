"""The lines of a report: figures of a run, what they should be, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from scipy.stats import t as student

from .replay import Arrays
from .results import LARGEST_SHAPE
from .scalars import effective_size
from .summary import ENOUGH_RELAXATIONS, SITE_TEMPERATURE, WIDE_CURVATURE, _figure
from .temperature import POSITION, entry_name, moment_errors

LEAST_ESS = 400
"""Effective draws in all chains together (Vehtari et al., Bayesian Analysis 16(2), 2021)."""
LARGEST_RHAT = 1.01
"""Of up to four chains (the same source); see `_largest_rhat`."""
FALSE_ALARMS = 0.01
"""Chance that Monte Carlo error alone flags one of a line's figures."""
TOLERATED_SD = 0.05
"""Relative error of a standard deviation that the default ``bias_tolerance`` allows."""
TOLERATED_MEAN = 0.25
"""Error of a mean, in standard deviations: it widens the spread around the true mean by 3%."""
TOLERATED_VARIANCE = 2 * TOLERATED_SD
"""Of a variance, likewise; for temperatures and step sizes where no ``bias_tolerance`` is known."""
LARGEST_CLAMPED = 0.05
"""Share of entries with more noise than there is to take from."""
LEAST_DRAWS = 8
"""Draws a chain that split chains need."""
MAX_ENTRIES = 500
"""Entries of a variable that R-hat and effective sample sizes look at, evenly spaced."""


class Line(NamedTuple):
    """A line of a report.

    Attributes:
        name: of the figure.
        value: the figure.
        error: its Monte Carlo standard error; None where it has none.
        threshold: what it should be, in words; empty where any value is fine.
        ok: whether it is; None where any value is fine.
        where: what the figure is of, the worst coordinate for instance.
        advice: what to do if it is not what it should be.
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
        """What the figure is of, and what to do if it is flagged."""
        if self.ok is False and self.advice:
            return f"{self.where}: {self.advice}" if self.where else self.advice
        return self.where


class Run(NamedTuple):
    """What a report is made from.

    Attributes:
        posterior: draws by name, shaped (chains, draws, ...).
        stats: figures of each draw by name, shaped likewise.
        unconstrained: what `numpyro_geom.diagnostics.temperature.gradients_at_draws` returns.
        attrs: settings of the kernel, and what the run says of itself.
    """

    posterior: Arrays
    stats: Arrays
    unconstrained: Arrays
    attrs: Mapping[str, Any]


class Kernel(NamedTuple):
    """Settings that lines depend on.

    Attributes:
        temperature: tau of the target.
        bias_tolerance: tolerated relative error of variances.
    """

    temperature: float
    bias_tolerance: float

    @staticmethod
    def read(attrs: Mapping[str, Any]) -> Kernel:
        """From the attributes of ``posterior``; the defaults where there are none."""
        return Kernel(
            float(attrs.get("temperature", 1.0)),
            float(attrs.get("bias_tolerance", TOLERATED_VARIANCE)),
        )


# Draws


def draw_lines(posterior: Arrays, run: Run, seconds: float | None) -> Iterator[Line]:
    """R-hat and effective sample sizes of these draws, or why there are none."""
    names, values = _entries(posterior)
    if not names:
        return
    draws = values.shape[1]
    finite = np.isfinite(values).all((0, 1))
    if not finite.all():
        yield Line(
            "entries that are not finite",
            float((~finite).sum()),
            threshold="0",
            ok=False,
            where=f"{names[int(np.argmin(finite))]}, for instance",
            advice="check that the model is proper there; the lines below leave them out",
        )
    if "guide" in run.attrs:  # independent draws, to which none of this applies
        return
    moving = finite & (np.ptp(np.nan_to_num(values), (0, 1)) > 0)
    if draws < LEAST_DRAWS:
        yield Line(
            "draws a chain",
            float(draws),
            threshold=f"at least {LEAST_DRAWS}",
            ok=False,
            advice="nothing can be said of so few: increase num_samples",
        )
    elif not moving.any():
        yield Line(
            "entries that change from draw to draw",
            0.0,
            threshold="at least 1",
            ok=False,
            advice="the chain does not move: look at undone steps, acceptance and step size",
        )
    else:
        kept = [name for name, x in zip(names, moving, strict=True) if x]
        yield from _mixing_lines(kept, values[..., moving], run, seconds)


def _mixing_lines(
    names: list[str], values: np.ndarray, run: Run, seconds: float | None
) -> Iterator[Line]:
    found = _arviz_figures(values)
    longer = "run longer (num_samples or num_steps), or let a metric or a reparametrisation mix it"
    if "rhat" in found:
        largest = _largest_rhat(values.shape[0])
        worst = int(np.argmax(found["rhat"]))
        yield Line(
            "R-hat",
            float(found["rhat"][worst]),
            threshold=f"at most {largest:.3g}",
            ok=bool(found["rhat"][worst] <= largest),
            where=names[worst],
            advice=f"chains disagree; {longer}",
        )
    for kind in ("bulk", "tail"):
        worst = int(np.argmin(found[kind]))
        yield Line(
            f"effective sample size, {kind}",
            float(found[kind][worst]),
            threshold=f"at least {LEAST_ESS}",
            ok=bool(found[kind][worst] >= LEAST_ESS),
            where=names[worst],
            advice=longer,
        )
    bulk, gradients = float(found["bulk"].min()), _gradients(run)
    if gradients is not None:
        yield Line("effective draws a gradient", bulk / gradients, where=_batches(run))
    if seconds is not None:
        yield Line("effective draws a second", bulk / seconds)


def _largest_rhat(chains: int) -> float:
    """What R-hat is at 400 effective draws, which spread the means of the half chains.

    Of four chains it is the usual 1.01. More chains share the draws, and each says less.
    """
    return max(LARGEST_RHAT, (1 + 2 * chains / LEAST_ESS) ** 0.5)


def _entries(posterior: Arrays) -> tuple[list[str], np.ndarray]:
    """Names and values of the scalars to look at, shaped (chains, draws, scalars)."""
    names: list[str] = []
    columns = []
    for name, x in posterior.items():
        size = int(np.prod(x.shape[2:]))
        if size == 0:
            continue
        chosen = np.unique(np.linspace(0, size - 1, min(size, MAX_ENTRIES)).astype(int))
        names += [entry_name(name, np.unravel_index(k, x.shape[2:])) for k in chosen]
        columns.append(x.reshape((*x.shape[:2], -1))[..., chosen].astype(float))
    return names, np.concatenate(columns, -1) if columns else np.zeros((0, 0, 0))


def _arviz_figures(values: np.ndarray) -> dict[str, np.ndarray]:
    """Effective sample sizes of each entry and, of several chains, R-hat; the worst for none."""
    import arviz  # slow to import, and only needed here

    # a dataset is what both lines of ArviZ take
    data = xr.Dataset({"x": (["chain", "draw", "entry"], values)})
    found = {}
    with np.errstate(divide="ignore", invalid="ignore"):  # chains that do not move
        for kind in ("bulk", "tail"):
            found[kind] = np.nan_to_num(arviz.ess(data, method=kind)["x"].values, nan=0.0)
        if values.shape[0] > 1:
            found["rhat"] = np.nan_to_num(arviz.rhat(data)["x"].values, nan=np.inf)
    return found


def _gradients(run: Run) -> float | None:
    chains = next(iter(run.posterior.values())).shape[0]
    if "gradients" in run.attrs:
        return float(np.sum(np.broadcast_to(run.attrs["gradients"], chains)))
    steps = run.stats.get("n_steps")
    if steps is None:
        return None
    return float(steps.sum()) * int(run.attrs.get("thinning", 1))


def _batches(run: Run) -> str:
    rows = json.loads(run.attrs.get("batch_sizes", "{}"))
    return f"each on {', '.join(f'{n} rows of {k}' for k, n in rows.items())}" if rows else ""


# Against the target


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


def step_size_lines(attrs: Mapping[str, Any], kernel: Kernel) -> Iterator[Line]:
    """What warm-up's measurements say of the step size and of the run's length."""
    if "bias_noise" in attrs:
        parts = [np.asarray(attrs[f"bias_{kind}"]) for kind in ("discretisation", "noise")]
        noisy = np.max(parts[1]) > np.max(parts[0])
        yield Line("bias of variances, discretisation", float(np.max(parts[0])))
        yield Line("bias of variances, minibatch noise", float(np.max(parts[1])))
        total = float(np.max(parts[0] + parts[1]))
        yield Line(
            "bias of variances, both",
            total,
            threshold=f"at most {kernel.bias_tolerance:g}",
            # the rule reaches the tolerance itself, up to rounding
            ok=bool(total <= 1.05 * kernel.bias_tolerance),
            where=f"to first order; {'minibatch noise' if noisy else 'discretisation'} binds",
            advice="use step_size='auto', a smaller step"
            + (", a larger batch_size or control_variate=True" if noisy else " or another metric"),
        )
    if "relaxations" in attrs:
        spanned = float(np.median(attrs["relaxations"]))
        steps = float(np.median(attrs["relaxation_steps"]))
        yield Line(
            "relaxation times a chain spans",
            spanned,
            threshold=f"at least {ENOUGH_RELAXATIONS}",
            ok=bool(spanned >= ENOUGH_RELAXATIONS),
            where=f"of {_figure(steps)} steps each",
            advice="increase num_samples or num_steps",
        )
    if "curvature_ratio" in attrs:
        yield Line(
            "largest over smallest curvature",
            float(np.max(attrs["curvature_ratio"])),
            where=f"along warm-up; above {WIDE_CURVATURE:g} one step size hardly fits all draws",
        )


def trouble_lines(run: Run) -> Iterator[Line]:
    """Steps that failed, noise that was clamped, weights, and the effort."""
    attrs, stats = run.attrs, run.stats
    if "diverging" in stats:
        count = int(stats["diverging"].sum())
        yield Line(
            "draws with undone steps" if "final_step_size" in attrs else "divergences",
            float(count),
            threshold="0",
            ok=count == 0,
            where=f"of {stats['diverging'].size} draws",
            advice="the draws avoid a region; use a smaller step, or reparametrise",
        )
    if "acceptance_rate" in stats:
        rate, target = float(stats["acceptance_rate"].mean()), attrs.get("target_accept")
        yield Line(
            "acceptance rate",
            rate,
            threshold="" if target is None else f"at least {target / 2:g}",
            ok=None if target is None else bool(rate >= target / 2),
            where="" if target is None else f"the aim is {target:g}",
            advice="use a smaller step",
        )
    if "clamped" in attrs:
        share = float(attrs["clamped"])
        yield Line(
            "clamped noise",
            share,
            threshold=f"at most {LARGEST_CLAMPED:g}",
            ok=share <= LARGEST_CLAMPED,
            where="share of entries with more minibatch noise than is injected",
            advice="use a smaller step or a larger batch_size",
        )
    if "success" in stats:
        failed = int((~stats["success"].astype(bool)).sum())
        yield Line(
            "failed geodesics",
            float(failed),
            threshold="0",
            ok=failed == 0,
            where=f"of {stats['success'].size}",
            advice="use a larger max_steps or metric='fisher'",
        )
    if "pareto_k" in attrs:
        shape = float(attrs["pareto_k"])
        yield Line(
            "Pareto shape of weights",
            shape,
            threshold=f"below {LARGEST_SHAPE:g}",
            ok=shape < LARGEST_SHAPE,
            advice="the guide is too far from the posterior for weights; run MCMC",
        )
    if "passes" in attrs:
        yield Line(
            "passes over the data", float(np.mean(attrs["passes"])), where="a chain, after warm-up"
        )
