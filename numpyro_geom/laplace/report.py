"""What a guide tells its user: errors and warnings of a fit and of draws, and the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._util import is_traced
from .._warning import SamplingWarning, warn_outside
from ..model.arrowhead import ArrowRoot
from .draw import (
    LaplaceDraws,
    advice_on_failures,
    can_correct,
    largest_shape,
    normalized,
    pareto_shape,
)
from .fit import FARTHEST_MEAN, AtMode, FitReport
from .geodesic import Geodesic
from .settings import MATRIX_LIMIT, MEAN_LIMIT, LaplaceSettings

if TYPE_CHECKING:
    from ..diagnostics.checks import Check

CONVERGED = 1e-4
"""A mode is converged if g' P^-1 g / D, its squared distance in posterior sd, is below this."""
ILL_CONDITIONED = 1e6
"""Condition number of P above which float32 is not enough."""
LEAST_EVALUATIONS = 36
"""Fewest evaluations of the acceleration per draw: six steps. Every network so far took more."""
CURVATURES = (0.5, 2.0)
"""Limits of the energy's curvature around the mode over P's. Beyond them the sd of the draws
is off by a factor of 1.4 or more. The ratio is 0.7 to 1.1 on regressions, a Gaussian process and an
autoregression, -0.1 to 0.3 on hierarchies of few or small groups, -30 to 200 on a network."""
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
        can_correct: whether the weights turn the draws into draws of the posterior; None without
            weights.
        effective_draws: 1 / sum of the squared weights, which sum to 1; None without weights.
        moments: checks of the means and sds of the draws without weights, as the weights see them
            (`numpyro_geom.diagnostics.checks.weight_checks`); empty without weights.
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
    moments: tuple[Check, ...] = ()

    @classmethod
    def of(
        cls, draw: Callable[..., LaplaceDraws], fit: FitReport | None, at: AtMode
    ) -> LaplaceReport:
        """Draw, with weights up to `MEAN_LIMIT` dimensions or if they are cheap, and summarise."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)  # the report says the same
            draws = draw(log_weight=at.mean.size <= MEAN_LIMIT or isinstance(at.factor, ArrowRoot))
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
            moments=moments_of(draws),
        )

    @property
    def flagged(self) -> tuple[Check, ...]:
        """The `moments` that are off."""
        return tuple(check for check in self.moments if check.ok is False)

    @property
    def advice(self) -> str:
        """What to do next."""
        if self.failed:
            settings = self.settings["metric"], self.settings["prior_metric"]
            advice = advice_on_failures(*settings)
            return f"some draws failed, and what is left is biased: {advice}"
        if self.can_correct is None:
            return (
                "weights take D + 1 times the time of draws and were not computed: compare "
                "predictions on held-out rows with the mode's, or run MCMC on fewer rows"
            )
        if not self.can_correct:
            return (
                "weights cannot turn these draws into draws of the posterior: reparametrise the "
                "model, try mode='hausdorff', or run MCMC"
            )
        if self.flagged:
            return self.flagged[0].advice
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
        if self.fit is not None and np.isfinite(self.fit.distance):
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
        for check in self.flagged:
            facts[check.name] = f"{check.figure}, expected {check.threshold} ({check.where})"
        facts["next"] = self.advice
        width = max(map(len, facts))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in facts.items())


# --- of a fit


def best_run(values: np.ndarray, gradient_norms: np.ndarray) -> tuple[int, tuple[str, ...]]:
    """The finite run with the lowest objective, and the status of all; raises if none is finite."""
    finite = np.isfinite(values) & np.isfinite(gradient_norms)
    if not finite.any():
        raise RuntimeError(
            f"the search for a mode ended at finite values in none of {len(values)} runs "
            f"(objectives {values}): expected at least one. Pass another `init_loc_fn`, "
            "`init_params`, check the model and the data for values that are not finite, or use "
            "float64 or mode='euclidean', which needs no determinant of the metric"
        )
    best = int(np.argmin(np.where(finite, values, np.inf)))
    status = ["finite" if ok else "not finite" for ok in finite]
    status[best] = "best"
    return best, tuple(status)


def check_definite(
    settings: LaplaceSettings, at: AtMode, unravel: Callable, loc: jax.Array
) -> None:
    """Raise if the precision or a prior part is not positive definite."""
    bend = np.abs(np.asarray(at.prior))
    if np.max(bend) > 1e3 * np.finfo(bend.dtype).eps:
        worst = unravel(jnp.asarray(bend / np.max(bend)))
        sites = sorted(name for name, x in worst.items() if np.max(x) > 0.1)
        raise ValueError(
            "the Hessian of minus the log prior is not positive definite at the mode (its "
            f"most negative eigenvalue is {-np.linalg.norm(bend):.2g} of the largest), along "
            f"the sites {sites}: expected a log-concave prior. Use prior_metric='expected', "
            "or reparametrise these sites"
        )
    if at.factor.size == 0:
        return
    smallest, largest = float(at.smallest), float(at.largest)
    what, dtype = f"the {settings.precision} precision at the mode", np.dtype(loc.dtype)
    resolved = loc.size * np.finfo(dtype).eps * abs(largest)
    if smallest < -resolved:
        fisher = "" if settings.precision == "fisher" else "precision='fisher', "
        raise ValueError(
            f"{what} is not positive definite: expected eigenvalues above 0, got a smallest of "
            f"{smallest:.4g} (largest {largest:.4g}). The position is a saddle: use {fisher}"
            f"damping={-2 * smallest:.2g}, or search again with more `num_starts`"
        )
    if not smallest > 0 or not np.all(np.isfinite(at.factor)):
        wider = "" if dtype == np.float64 else "use float64 (numpyro.enable_x64()), "
        raise ValueError(
            f"{what} is singular in {dtype.name}: expected eigenvalues well above {resolved:.2g}, "
            f"rounding beside the largest of {largest:.4g}, got a smallest of {smallest:.4g}. "
            "Some combination of parameters is not identified, or scales differ too much: "
            f"{wider}standardise the inputs, give every site a proper prior, or use "
            f"damping={10 * resolved:.2g}"
        )
    if loc.dtype == np.float32 and largest > ILL_CONDITIONED * smallest:
        warn_outside(
            f"the precision has condition number {largest / smallest:.2g}, and float32 carries "
            f"{ILL_CONDITIONED:g}: expect many rejected steps and inexact draws. Use float64 "
            "(numpyro.enable_x64()) or standardise the inputs",
        )


def warn_of_mode(report: FitReport, at: AtMode, unravel: Callable) -> None:
    """Warn if the best run is not at a mode, or if the mode's surroundings are not Gaussian."""
    if report.distance**2 < CONVERGED:
        warn_of_surroundings(at, unravel)
        return
    best = report.status.index("best")
    warn_outside(
        f"the search for a mode has not converged: the best of {len(report.status)} runs is "
        f"{report.distance:.2g} posterior standard deviations from the mode (root mean square; "
        f"expected below {CONVERGED**0.5:g}), |gradient| {report.gradient_norm[best]:.3g}. Raise "
        "`max_steps` or `num_starts`, or use float64 (numpyro.enable_x64())",
    )


def warn_of_surroundings(at: AtMode, unravel: Callable) -> None:
    """Warn if the energy around the mode is far from a Gaussian's with the precision P."""
    if at.around is None:
        return
    (low, high), shift = np.asarray(at.around.curvature), float(at.around.shift)
    reasons = []
    if not (CURVATURES[0] <= low and high <= CURVATURES[1]):
        size = np.abs(np.asarray(at.around.direction))
        parts = unravel(jnp.asarray(size / np.max(size)))
        sites = sorted(name for name, x in parts.items() if x.size and np.max(x) > 0.5)
        reasons.append(
            f"the energy curves between {low:.2g} and {high:.2g} times as much as the precision "
            f"says (expected {CURVATURES[0]:g} to {CURVATURES[1]:g}), furthest along the sites "
            f"{sites}"
        )
    if not shift <= FARTHEST_MEAN:
        reasons.append(
            f"the mean is {shift:.2g} posterior sd away (expected up to {FARTHEST_MEAN:g}), too "
            "far for draws about it"
        )
    if reasons:
        warn_outside(
            f"draws from this mode are probably biased: around it {', and '.join(reasons)}. Look "
            "at draw(..., log_weight=True), whose weights may repair them, reparametrise the "
            "model, or run MCMC"
        )


# --- of draws


def warn_of_hours(seconds: float, count: int) -> None:
    """Warn if the draws take hours, from the seconds of one evaluation of the acceleration."""
    hours = LEAST_EVALUATIONS * seconds * count / 3600
    if hours < 1:
        return
    warn_outside(
        f"{count} draws will take {hours:.2g} hours at least: an evaluation of the acceleration "
        f"takes {seconds:.2g} s, and a draw {LEAST_EVALUATIONS} or more of them. Draw fewer, use "
        "metric='euclidean' and `predictive(..., linearized=True)`, or MCMC"
    )


def judge(
    settings: LaplaceSettings, geodesics: Geodesic, weights: jax.Array | None
) -> float | None:
    """Warn of failed draws and of bad weights; returns the weights' shape, None while tracing."""
    if is_traced(geodesics.position):
        return None
    fate = np.asarray(geodesics.success), np.asarray(geodesics.num_evaluations)
    warn_of_failures(settings, *fate)
    if weights is None:
        return None
    shape = pareto_shape(np.asarray(weights))
    warn_of_weights(np.asarray(weights), shape)
    return shape


def warn_of_failures(
    settings: LaplaceSettings, success: np.ndarray, evaluations: np.ndarray
) -> None:
    """Warn of geodesics that were not followed to their end, or that have no velocity."""
    lost = int(np.sum(~success & (evaluations == 0)))
    failed = int(np.sum(~success)) - lost
    if lost:
        warn_outside(
            f"{lost} of {success.size} draws failed: the velocity, a solve with the Fisher "
            "metric, was not found. Such draws are NaN and `draw(...).success` tells which. Use "
            "float64 (numpyro.enable_x64()), standardise the inputs, give sites priors of similar "
            f"scales, or, up to {MATRIX_LIMIT} dimensions, use solver='cholesky'"
        )
    if not failed:
        return
    why = f"no end within max_steps={settings.max_steps}, or not finite"
    if settings.metric == "monge-log":
        why += ", or a logarithmic map that did not converge"
    advice = advice_on_failures(str(settings.metric), settings.prior_metric)
    warn_outside(
        f"{failed} of {success.size} geodesics failed: {why}. Their draws and weights are NaN and "
        "`draw(...).success` tells which; leaving them out biases the rest. "
        f"{advice[0].upper()}{advice[1:]}"
    )


def warn_of_weights(log_weights: np.ndarray, shape: float) -> None:
    """Warn if the weights cannot turn the draws into draws of the posterior."""
    if np.any(np.isnan(log_weights)) or can_correct(log_weights, shape):
        return
    warn_outside(
        f"pareto_k is {shape:.2f}: expected below {largest_shape(log_weights.size):.2f} for "
        f"{log_weights.size} weights. They do not turn the draws into draws of the posterior: draw "
        "more, reparametrise the model, or run MCMC",
    )


def moments_of(draws: LaplaceDraws) -> tuple[Check, ...]:
    """Checks of the means and sds of the draws without weights; none without weights."""
    from ..diagnostics.checks import weight_checks  # which imports the draws of this package

    if draws.log_weight is None or draws.pareto_k is None:
        return ()
    logs = np.asarray(draws.log_weight)
    flat = {
        name: np.asarray(x).reshape(1, -1, *x.shape[logs.ndim :])
        for name, x in draws.samples.items()
    }
    correct = can_correct(logs, draws.pareto_k)
    return tuple(weight_checks(flat, logs.reshape(1, -1), correct))


def warn_of_moments(draws: LaplaceDraws) -> None:
    """Warn if the weights say that a mean or an sd of the draws without them is off."""
    for check in moments_of(draws):
        if check.ok is False:
            warn_outside(check.sentence)
