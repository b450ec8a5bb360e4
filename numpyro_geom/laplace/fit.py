"""The fit of a guide: the search for a mode, the approximation at the mode, and its warnings.

The search runs from several starts, with an account of every run. At the mode its precision, its
distance from the true mode and the velocities' mean are computed once, for all draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.linalg import cho_solve, solve_triangular

from .._checks import warn_outside
from .._util import LANES, in_trace, num_at_once
from ..model.arrowhead import ArrowRoot, Layout
from ..model.derivatives import jvp, linearize
from ..model.jaxprs import largest
from ..model.potential import in_coordinates
from ..model.start import wrong_lane
from ..sampling.state import Target
from ..warmup.law import find_law
from .information.form import Flat
from .metrics import acceleration_fn, fisher_metric, fisher_of
from .predictive import FlatPosterior
from .settings import LaplaceSettings, check_dense

NEARER_STEPS = 10
"""Steps -P^-1 grad from where the best run has ended, while each halves the distance from the mode.
L-BFGS ends early where rounding of U hides its fall: on splines, 1.6 posterior sd away in 18
directions together."""
FARTHEST_MEAN = 1.0
"""Shift in sd above which `_surroundings_of`, an expansion at the mode, is not trusted."""

CONVERGED = 1e-4
"""A mode is converged if g' P^-1 g / D, its squared distance in posterior sd, is below this."""
ILL_CONDITIONED = 1e6
"""Condition number of P above which float32 is not enough."""
CURVATURES = (0.5, 2.0)
"""Limits of the energy's curvature around the mode over P's. Beyond them the sd of the draws
is off by a factor of 1.4 or more. The ratio is 0.7 to 1.1 on regressions, a Gaussian process and an
autoregression, -0.1 to 0.3 on hierarchies of few or small groups, -30 to 200 on a network."""


class FitReport(NamedTuple):
    """An account of the runs of `RiemannianLaplace.fit`, one entry per run.

    Attributes:
        objective: value at the end of the run, in nats: U, or U + log det G / 2 for a Hausdorff
            mode.
        gradient_norm: Euclidean norm of the gradient at the end of the run.
        num_steps: steps of L-BFGS.
        status: ``"best"``, ``"finite"`` or ``"not finite"``.
        distance: distance of the best run from the mode in posterior standard deviations, root
            mean square over the D directions, after steps in the metric of P; NaN for a nearest
            normal law.
    """

    objective: np.ndarray
    gradient_norm: np.ndarray
    num_steps: np.ndarray
    status: tuple[str, ...]
    distance: float

    def __str__(self) -> str:
        """A line for each run."""
        lines = ["run  status          objective  |gradient|  steps"]
        rows = zip(self.status, self.objective, self.gradient_norm, self.num_steps, strict=True)
        lines += [
            f"{i:3d}  {status:<10s} {value:14.6g} {norm:11.3g} {steps:6d}"
            for i, (status, value, norm, steps) in enumerate(rows)
        ]
        if np.isfinite(self.distance):
            lines.append(f"best run: {self.distance:.2g} posterior sd from the mode")
        return "\n".join(lines)


class Surroundings(NamedTuple):
    """The energy at one posterior sd from the mode, as ``mode="mean"`` sees it.

    Attributes:
        shift: length of the velocities' mean in posterior sd, before it is limited.
        curvature: smallest and largest ratio of the curvature of U to P's, over directions.
        direction: the direction where this ratio is furthest from 1, entries in posterior sd.
    """

    shift: jax.Array
    curvature: jax.Array
    direction: Flat


class AtMode(NamedTuple):
    """Quantities that are computed once at a mode.

    Attributes:
        factor: lower Cholesky factor of P; without entries if P is not formed. For a law with
            groups an `ArrowRoot` L, with L L' = P^-1.
        smallest: smallest eigenvalue of P (NaN if P is not formed).
        largest: largest eigenvalue of P.
        distance: distance of the position from the mode, in posterior sd, root mean square.
        mean: mean of the velocities.
        around: see `Surroundings`; None if it was not computed.
        left: the step to the mode, -P^-1 grad of the objective; None if it was not computed.
    """

    factor: Any
    smallest: jax.Array
    largest: jax.Array
    distance: jax.Array
    mean: jax.Array
    around: Surroundings | None = None
    left: Any = None


# --- the search


def find_mode(
    evaluate: Callable[[np.ndarray], tuple[Any, Any]], start: Flat, max_steps: int
) -> tuple[np.ndarray, float, float, int]:
    """Minimise by SciPy's L-BFGS, from a function that returns the objective and its gradient.

    Returns where the search has ended, the objective in nats and its gradient's norm there, and the
    number of steps.

    The search ends where rounding hides the fall of the objective. Where the objective is not
    finite, the line search sees a value above all others. ``max_steps=0`` leaves the start
    unchanged.
    """
    from scipy.optimize import minimize  # slow to import

    first = np.asarray(start)
    value, slope = (np.asarray(a, float) for a in evaluate(first))
    if max_steps == 0 or not np.isfinite(value):
        return first, float(value), float(np.linalg.norm(slope)), 0
    highest = value

    def finite(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nonlocal highest
        value, slope = (np.asarray(a, float) for a in evaluate(x.astype(first.dtype)))
        if not (np.isfinite(value) and np.all(np.isfinite(slope))):
            return highest + np.abs(highest) + 1, np.zeros_like(slope)
        highest = np.maximum(highest, value)
        return value, slope

    options = {"maxiter": max_steps, "maxfun": np.inf, "gtol": 0.0}
    options["ftol"] = 4 * float(np.finfo(first.dtype).eps)
    found = minimize(finite, first, method="L-BFGS-B", jac=True, options=options)
    position = found.x.astype(first.dtype)
    return position, float(found.fun), float(np.linalg.norm(found.jac)), int(found.nit)


def value_and_slope(posterior: FlatPosterior, loc: None, position: Flat) -> tuple[jax.Array, Flat]:
    """The objective of the mode, and its gradient."""
    return jax.value_and_grad(objective(posterior))(position)


def _hessian(posterior: FlatPosterior, theta: Flat) -> jax.Array:
    """The Hessian of U; columns by forward over reverse mode."""
    # XLA's CPU Fourier transforms do not accept the memory layout of a batch for LAPACK
    transforms = "fft[" in str(jax.make_jaxpr(posterior.energy)(theta))
    _, push = linearize(jax.grad(posterior.energy), theta)
    eye = jnp.eye(theta.size, dtype=theta.dtype)
    return lax.map(push, eye, batch_size=None if transforms else posterior.lanes)


def num_lanes(posterior: FlatPosterior, theta: Flat) -> int:
    """How many positions are evaluated at once: few with large arrays, one if jaxlib is wrong."""
    if in_trace(theta) or posterior.model.on_host:
        return LANES
    lanes = min(LANES, num_at_once(largest(jax.make_jaxpr(posterior.energy)(theta).jaxpr)))
    near = theta + random.normal(random.key(0), (lanes, theta.size), theta.dtype) / 10
    gradient = jax.grad(posterior.energy)
    fns: list[Callable] = [posterior.energy, gradient, lambda v: jvp(gradient, theta, v)[1]]
    fns.append(lambda x: posterior.model.replay(posterior.unravel(x)))
    return 1 if wrong_lane(fns, near, posterior.model.plan.sizes.values()) else lanes


def objective(posterior: FlatPosterior) -> Callable[[Flat], jax.Array]:
    """The objective of the mode: U, or U + log det G / 2 for the Hausdorff mode."""
    if posterior.settings.mode == "euclidean":
        return posterior.energy
    return lambda theta: posterior.energy(theta) + half_log_det(posterior, theta)


def half_log_det(posterior: FlatPosterior, theta: Flat) -> jax.Array:
    """The log volume log det G / 2 of the Fisher metric."""
    check_dense(posterior.size, f"mode={posterior.settings.mode!r}", "mode='euclidean'")
    factor = jnp.linalg.cholesky(fisher_of(posterior).dense(theta))
    return jnp.sum(jnp.log(jnp.diagonal(factor)))  # NaN where G is not positive definite


# --- the approximation at the mode


def nearest_law(
    posterior: FlatPosterior,
    loc: None,
    start: Flat,
    rng_key: jax.Array,
    *,
    layout: Layout,
    searching: bool,
) -> tuple:
    """The mean m and the root L of the nearest normal law, then U and |grad U| at m.

    See `numpyro_geom.warmup.law.find_law`.
    """
    potential: Any = in_coordinates(posterior.model.potential(), posterior.unravel)
    law = find_law(Target(potential, 1.0), layout, start, rng_key, searching, 4)
    energy, gradient = potential.on_all_rows(
        lambda rows: jax.value_and_grad(potential.energy)(law.centre, rows)
    )
    return law.centre, law.root, energy, jnp.linalg.norm(gradient)


def at_law(root: ArrowRoot) -> AtMode:
    """The quantities of `AtMode` for a law with groups."""
    zeros = jnp.zeros_like(root.variances())
    unknown = jnp.full((), jnp.nan, zeros.dtype)
    return AtMode(root, unknown, unknown, unknown, zeros)


def at_mode(posterior: FlatPosterior, loc: Flat) -> AtMode:
    """The quantities of `AtMode` at a position."""
    settings = posterior.settings
    slope = jax.grad(objective(posterior))(loc)
    if not _forms_precision(posterior):
        solve = fisher_metric(posterior, loc).solver(loc)
        left = -solve(slope)
        distance = jnp.sqrt(-jnp.vdot(slope, left) / posterior.size)
        nan = jnp.full((), jnp.nan, loc.dtype)
        unformed = jnp.zeros((0, 0), loc.dtype)
        return AtMode(unformed, nan, nan, distance, jnp.zeros_like(loc), left=left)
    if settings.precision == "fisher":
        matrix = fisher_of(posterior).dense(loc)
    else:
        matrix = _hessian(posterior, loc)
    eye = jnp.eye(posterior.size, dtype=loc.dtype)
    matrix = (matrix + matrix.T) / 2 + settings.damping * eye
    values, vectors = jnp.linalg.eigh(matrix)
    along = vectors.T @ slope
    factor, mean, around = jnp.linalg.cholesky(matrix), jnp.zeros_like(loc), None
    if settings.mode == "mean":
        mean, around = _surroundings_of(posterior, loc, factor)
    return AtMode(
        factor=factor,
        smallest=values[0],
        largest=values[-1],
        distance=jnp.sqrt(jnp.mean(along**2 / jnp.abs(values))),
        mean=mean,
        around=around,
        left=-vectors @ (along / jnp.abs(values)),
    )


def _surroundings_of(
    posterior: FlatPosterior, loc: Flat, factor: jax.Array
) -> tuple[Flat, Surroundings]:
    """The velocities' mean that puts the mean of the draws at the posterior's, to first order.

    At the posterior's mean the expected gradient is zero. Let u_i be the columns of a root of P^-1.
    The expected gradient under N(loc, P^-1) comes from the points loc +- u_i. One Newton step gives
    the mean of the end points. Geodesics with velocities u_i bend away from it by half of their
    accelerations. The differences of the same gradients show the curvature of the energy there.
    """
    gradient = jax.grad(posterior.energy)
    acceleration = acceleration_fn(posterior, loc)
    roots = solve_triangular(factor, jnp.eye(loc.size, dtype=loc.dtype), lower=True)

    def along(root: Flat) -> tuple[Flat, Flat, Flat]:
        up, down = gradient(loc + root), gradient(loc - root)
        return (up + down) / 2 - gradient(loc), acceleration(loc, root) / 2, (up - down) / 2

    slopes, bends, changes = lax.map(along, roots, batch_size=posterior.lanes)
    mean = -cho_solve((factor, True), gradient(loc) + jnp.sum(slopes, 0)) - jnp.sum(bends, 0)
    shift = jnp.linalg.norm(factor.T @ mean)
    curvature = roots @ changes.T
    values, vectors = jnp.linalg.eigh((curvature + curvature.T) / 2)
    furthest = jnp.argmax(jnp.abs(jnp.log(jnp.maximum(values, jnp.finfo(loc.dtype).tiny))))
    direction = (vectors[:, furthest] @ roots) / jnp.linalg.norm(roots, axis=0)
    around = Surroundings(shift, values[jnp.array([0, -1])], direction)
    return jnp.where(shift <= FARTHEST_MEAN, mean, 0.0), around


def _forms_precision(posterior: FlatPosterior) -> bool:
    """Whether P is formed. If not, its draws come from perturb-and-solve."""
    settings = posterior.settings
    for forms, what, instead in (
        (settings.metric == "monge-log", "metric='monge-log'", "metric='monge'"),
        (settings.precision == "hessian", "precision='hessian'", "precision='fisher'"),
        (settings.damping > 0, "damping", "damping=0"),
    ):
        if forms:
            check_dense(posterior.size, what, instead)
            return True
    return settings.mode == "mean"


# --- what a fit tells its user


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


def check_definite(settings: LaplaceSettings, at: AtMode, loc: jax.Array) -> None:
    """Raise if the precision is not positive definite."""
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
            f"the energy curves {largest / smallest:.2g} times more in one direction than in "
            f"another, and float32 is exact up to {ILL_CONDITIONED:g} times: expect failed and "
            "inexact draws. Use float64 (numpyro.enable_x64()) or standardise the inputs",
        )


def warn_of_mode(report: FitReport, at: AtMode, unravel: Callable) -> bool:
    """Warn if the best run is not at a mode, or if the mode's surroundings are not Gaussian."""
    if report.distance**2 < CONVERGED:
        return warn_of_surroundings(at, unravel)
    best = report.status.index("best")
    warn_outside(
        f"the search for a mode has not converged: the best of {len(report.status)} runs is "
        f"{report.distance:.2g} posterior standard deviations from the mode (root mean square; "
        f"expected below {CONVERGED**0.5:g}), |gradient| {report.gradient_norm[best]:.3g}. Raise "
        "`max_steps` or `num_starts`, or use float64 (numpyro.enable_x64())",
    )
    return True


def warn_of_surroundings(at: AtMode, unravel: Callable) -> bool:
    """Warn if the energy around the mode is far from a Gaussian's with the precision P."""
    if at.around is None:
        return False
    (low, high), shift = np.asarray(at.around.curvature), float(at.around.shift)
    reasons = []
    if not (CURVATURES[0] <= low and high <= CURVATURES[1]):
        size = np.abs(np.asarray(at.around.direction))
        parts = unravel(jnp.asarray(size / np.max(size)))
        sites = sorted(name for name, x in parts.items() if x.size and np.max(x) > 0.5)
        reasons.append(
            f"the energy curves between {low:.2g} and {high:.2g} times as much as the guide's "
            f"normal law says (expected {CURVATURES[0]:g} to {CURVATURES[1]:g}), furthest along "
            f"the sites {sites}"
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
    return bool(reasons)
