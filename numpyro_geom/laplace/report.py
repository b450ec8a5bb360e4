"""A report on a guide and its draws in a few lines, with advice on what to do next."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._warning import SamplingWarning
from .approximation import AtMode
from .draws import FitReport, LaplaceDraws, can_correct, largest_shape, normalized
from .settings import MEAN_LIMIT

LONG = 20.0
"""Seconds of all draws, compilation included, above which they are not timed again without it."""


class LaplaceReport(NamedTuple):
    """An account of a guide: its mode, its metric, and the status of some draws.

    Attributes:
        size: D, unconstrained dimensions.
        settings: the guide's settings by name, defaults filled in.
        condition: largest over smallest eigenvalue of P; NaN if P is not formed.
        fit: account of the search for the mode; None for a mode from elsewhere.
        draws: number of draws.
        failed: number of draws whose geodesic has no end.
        evaluations: evaluations of the acceleration, mean over the draws.
        seconds: seconds per draw, without compilation if all draws took less than `LONG`.
        pareto_k: see `LaplaceDraws`; None without weights.
        can_correct: whether the weights turn the draws into those of the posterior; None without
            weights.
        effective_draws: 1 / sum of the squared weights, which sum to 1; None without weights.
    """

    size: int
    settings: dict[str, Any]
    condition: float
    fit: FitReport | None
    draws: int
    failed: int
    evaluations: float
    seconds: float
    pareto_k: float | None
    can_correct: bool | None
    effective_draws: float | None

    @classmethod
    def of(
        cls, draw: Callable[..., LaplaceDraws], fit: FitReport | None, at: AtMode
    ) -> LaplaceReport:
        """Draw, with weights up to `MEAN_LIMIT` dimensions, and summarise."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)  # the report says the same
            draws = draw(log_weight=at.mean.size <= MEAN_LIMIT)
            if draws.seconds * draws.success.size < LONG:
                draws = draw(log_weight=draws.log_weight is not None)
        effective, holds = None, None
        if draws.log_weight is not None and draws.pareto_k is not None:
            holds = can_correct(np.asarray(draws.log_weight), draws.pareto_k)
            weights = normalized(draws.log_weight)
            effective = 1 / np.sum(weights**2) if np.any(weights) else 0.0
        return cls(
            size=draws.unconstrained.shape[-1],
            settings=draws.settings,
            condition=float(at.largest / at.smallest),
            fit=fit,
            draws=draws.success.size,
            failed=int(np.sum(~np.asarray(draws.success))),
            evaluations=float(np.mean(draws.num_evaluations)),
            seconds=draws.seconds,
            pareto_k=draws.pareto_k,
            can_correct=holds,
            effective_draws=effective,
        )

    @property
    def advice(self) -> str:
        """What to do next."""
        if self.failed:
            return (
                "some draws failed, and what is left is biased: raise max_steps, standardise the "
                "inputs, use float64 (numpyro.enable_x64()), or another metric"
            )
        if self.can_correct is None:
            return (
                "weights take D + 1 times the time of draws and were not computed: compare "
                "predictions on held-out rows with those of the mode, or run MCMC on fewer rows"
            )
        if not self.can_correct:
            return (
                "weights cannot turn these draws into draws of the posterior: reparametrise the "
                "model, try mode='hausdorff', or run MCMC"
            )
        return (
            "draws can be used, and sample_posterior(..., resample=True) takes off what bias the "
            "weights see"
        )

    def __str__(self) -> str:
        """A line for each fact."""
        names = ("metric", "mode", "precision", "prior_metric")
        facts = {
            "dimensions": f"{self.size:,}",
            "settings": ", ".join(f"{name}={self.settings[name]!r}" for name in names),
        }
        if self.fit is not None:
            runs = len(self.fit.status)
            facts["mode"] = f"{self.fit.distance:.2g} posterior sd away, best of {runs} runs"
        if np.isfinite(self.condition):
            facts["condition of P"] = f"{self.condition:.3g}"
        facts["draws"] = (
            f"{self.draws}, {self.failed} failed, {self.evaluations:.1f} evaluations and "
            f"{1000 * self.seconds:.3g} ms per draw"
        )
        if self.pareto_k is not None:
            facts["weights"] = (
                f"pareto_k {self.pareto_k:.2f} (expected below {largest_shape(self.draws):.2f}), "
                f"worth {self.effective_draws:.0f} of {self.draws} draws"
            )
        facts["next"] = self.advice
        width = max(map(len, facts))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in facts.items())
