"""Errors and warnings of a guide."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .._util import is_traced
from .._warning import warn_outside
from .approximation import FARTHEST_MEAN, AtMode
from .draws import FitReport, can_correct, largest_shape, pareto_shape
from .geodesic import Geodesic
from .settings import DENSE_LIMIT, LaplaceSettings

CONVERGED = 1e-4
"""A mode is converged if g' P^-1 g / D, its squared distance in posterior sd, is below this."""
ILL_CONDITIONED = 1e6
"""Condition number of P above which float32 is not enough."""
LEAST_EVALUATIONS = 36
"""Fewest evaluations of the acceleration per draw: six steps. Every network so far took more."""
CURVATURES = (0.5, 2.0)
"""Limits of the energy's curvature around the mode over that of P. Beyond them the sd of the draws
is off by a factor of 1.4 or more. The ratio is 0.7 to 1.1 on regressions, a Gaussian process and an
autoregression, -0.1 to 0.3 on hierarchies of few or small groups, -30 to 200 on a network."""


def best_run(values: np.ndarray, gradient_norms: np.ndarray) -> tuple[int, tuple[str, ...]]:
    """The finite run with the lowest objective value, and the status of all runs.

    Raises:
        RuntimeError: if no run is finite.
    """
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


def check_precision(
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
            f"the sites {sites}: expected a log-concave prior. Use prior_metric='expected' or "
            "'softabs', or reparametrise these sites"
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
    """Warn if the energy around the mode is not that of a Gaussian with the precision P."""
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
    warn_of_weights(np.asarray(weights), shape, settings.prior_metric)
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
            "metric, was not found. Such draws are NaN and "
            "`draw(...).success` tells which. Use float64 (numpyro.enable_x64()), standardise the "
            f"inputs, give sites priors of similar scales, or, up to {DENSE_LIMIT} dimensions, use "
            "solver='cholesky'"
        )
    if not failed:
        return
    why = f"no end within max_steps={settings.max_steps}, or not finite"
    if settings.metric == "monge-log":
        why += ", or a logarithmic map that did not converge"
    if settings.metric != "fisher":
        other = "use metric='fisher' if the model has observed sites"
    elif settings.prior_metric == "hessian":
        other = "use prior_metric='expected'"
    else:
        other = "reparametrise the model"
    warn_outside(
        f"{failed} of {success.size} geodesics failed: {why}. Their draws and weights are NaN and "
        "`draw(...).success` tells which; leaving them out biases the rest. Raise max_steps, "
        f"loosen rtol, standardise the inputs, or {other}",
    )


def warn_of_weights(log_weights: np.ndarray, shape: float, prior_metric: str | None = None) -> None:
    """Warn if the weights cannot turn the draws into draws of the posterior."""
    unknown = bool(np.any(np.isnan(log_weights)))
    if unknown and prior_metric == "softabs":
        warn_outside(
            "log weights are NaN: prior_metric='softabs' has no second derivatives where priors "
            "depend on each other and have equal curvatures, as in a hierarchy. Expected other "
            "priors or another metric: use prior_metric='expected'"
        )
    if unknown or can_correct(log_weights, shape):
        return
    warn_outside(
        f"pareto_k is {shape:.2f}: expected below {largest_shape(log_weights.size):.2f} for "
        f"{log_weights.size} weights. They do not turn the draws into draws of the posterior: draw "
        "more, reparametrise the model, or run MCMC",
    )
