"""The lines of a report: figures of a run, what they should be, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .replay import Arrays
from .results import LARGEST_SHAPE
from .summary import ENOUGH_RELAXATIONS, WIDE_CURVATURE, _figure

TOLERATED_SD = 0.05
"""Relative error of a standard deviation that the default ``bias_tolerance`` allows."""
TOLERATED_VARIANCE = 2 * TOLERATED_SD
"""Of a variance, likewise; for temperatures and step sizes where no ``bias_tolerance`` is known."""
LARGEST_CLAMPED = 0.05
"""Share of entries with more noise than there is to take from."""
LEAST_DRAWS = 8
"""Draws a chain that split chains need."""


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
