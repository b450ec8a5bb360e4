"""The fit of a guide: the search for a mode, and the approximation at the mode.

The search runs from several starts, with an account of every run. At the mode its precision, its
distance from the true mode and the velocities' mean are computed once, for all draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.scipy.linalg import cho_solve, solve_triangular

from .._linalg import symmetric_roots
from .._util import LANES
from ..model.arrowhead import ArrowRoot, Layout
from ..model.derivatives import linearize
from ..model.newton import Place, newton
from ..model.potential import in_coordinates
from ..sampling.target import Target
from ..warmup.start import find_arrow
from .information.form import Flat
from .metrics import acceleration_fn, fisher_metric, fisher_of, prior_part
from .posterior import FlatPosterior
from .settings import check_dense, is_wide

NEWTON_LIMIT = 200
"""Largest dimension at which runs end with Newton steps on the dense Hessian."""
MODE_STEPS = 50
NEARER_STEPS = 10
"""Steps -P^-1 grad from where the best run has ended, while each halves the distance from the mode.
L-BFGS ends early where rounding of U hides its fall: on splines, 1.6 posterior sd away in 18
directions together."""
LAW_PAIRS = 4
"""Pairs of draws for a mean gradient of the nearest normal law."""
STALLED_STEPS = 5
LINE_STEPS = 30
DECREASE = 1e-4
"""Share of the slope by which a step must lower the objective."""
CURVATURE = 0.9
"""Largest share of the slope that may remain at the end of a step."""
FARTHEST_MEAN = 1.0
"""Shift in posterior sd above which `_look_around`, an expansion at the mode, is not trusted."""


class FitReport(NamedTuple):
    """An account of the runs of `RiemannianLaplace.fit`, one entry per run.

    Attributes:
        objective: value at the end of the run, in nats: U, or U + log det G / 2 for a Hausdorff
            mode.
        gradient_norm: Euclidean norm of the gradient at the end of the run.
        num_steps: L-BFGS and Newton steps.
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


class Around(NamedTuple):
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
        prior: direction of the most negative curvature of minus the log prior, times this
            curvature over the largest one. Zeros if there is none or it was not computed.
        mean: mean of the velocities.
        around: see `Around`; None if it was not computed.
        left: the step to the mode, -P^-1 grad of the objective; None if it was not computed.
    """

    factor: Any
    smallest: jax.Array
    largest: jax.Array
    distance: jax.Array
    prior: jax.Array
    mean: jax.Array
    around: Around | None = None
    left: Any = None


# --- the search


def find_modes(
    posterior: FlatPosterior, loc: None, starts: Flat, *, max_steps: int
) -> tuple[Flat, jax.Array, jax.Array, jax.Array]:
    """Minimise from each start, shape (num_starts, D), by L-BFGS and then Newton steps.

    ``max_steps=0`` leaves the starts unchanged. For each run this returns the final position, the
    objective's value there in nats, the norm of its gradient, and the number of steps of both
    kinds.
    """
    energy = objective(posterior)

    def run(start: Flat) -> tuple[Flat, jax.Array, jax.Array, jax.Array]:
        position, steps = start, jnp.zeros((), jnp.int32)
        if max_steps > 0:
            position, steps = _lbfgs(energy, start, max_steps)
            if posterior.settings.mode == "euclidean" and posterior.size <= NEWTON_LIMIT:
                position, more = _newton(energy, position)
                steps = steps + more
        value, gradient = jax.value_and_grad(energy)(position)
        return position, value, jnp.linalg.norm(gradient), steps

    return lax.map(run, starts)


def _lbfgs(
    objective: Callable[[Flat], jax.Array], start: Flat, max_steps: int
) -> tuple[Flat, jax.Array]:
    """L-BFGS until `STALLED_STEPS` in a row find no new lowest value, up to rounding."""
    optimiser = optax.scale_by_lbfgs()
    evaluate = jax.value_and_grad(objective)
    fresh = optimiser.init(start)

    def proceed(carry: tuple) -> jax.Array:
        point, _, _, steps, stalled = carry
        return (steps < max_steps) & (stalled < STALLED_STEPS) & jnp.isfinite(point.value)

    def step(carry: tuple) -> tuple:
        point, state, lowest, steps, stalled = carry
        scaled, state = optimiser.update(point.gradient, state, point.position)
        point, found = _line_search(evaluate, point, -scaled)
        # a memory that gives no descent is dropped: the next step follows the gradient
        state = jax.tree.map(lambda old, new: jnp.where(found, old, new), state, fresh)
        lower = lowest - point.value > _rounding(lowest)
        stalled = jnp.where(lower, 0, stalled + 1)
        return point, state, jnp.minimum(lowest, point.value), steps + 1, stalled

    zero = jnp.zeros((), jnp.int32)
    first = _Point(start, *evaluate(start))
    point, _, _, steps, _ = lax.while_loop(proceed, step, (first, fresh, first.value, zero, zero))
    return point.position, steps


class _Point(NamedTuple):
    """A position with the objective's value and gradient."""

    position: Flat
    value: jax.Array
    gradient: Flat


def _line_search(
    evaluate: Callable[[Flat], tuple[jax.Array, Flat]], start: _Point, direction: Flat
) -> tuple[_Point, jax.Array]:
    """A point along a direction that fulfils Wolfe's weak conditions, by doubling and bisection.

    Lewis and Overton, "Nonsmooth optimization via quasi-Newton methods", Mathematical Programming
    141, 2013. If rounding hides the decrease, the approximate condition of Hager and Zhang holds
    instead: "A new conjugate gradient method with guaranteed descent", SIAM J. Optim. 16, 2005.

    The search ends after `LINE_STEPS` for any values. Line searches that end by their values alone
    have run for ever, because a compiler may round two copies of one value differently.

    Returns:
        The point, the last point that is low enough or the start, and whether both conditions hold.
    """
    slope = jnp.vdot(start.gradient, direction)

    def proceed(trial: tuple) -> jax.Array:
        *_, found, count = trial
        return ~found & (count < LINE_STEPS)

    def step(trial: tuple) -> tuple:
        point, scale, low, high, _, count = trial
        there = start.position + scale * direction
        new = _Point(there, *evaluate(there))
        along = jnp.vdot(new.gradient, direction)
        flat = new.value <= start.value + _rounding(start.value)
        flat = flat & (along <= (2 * DECREASE - 1) * slope)
        fell = (new.value <= start.value + DECREASE * scale * slope) | flat
        fell = fell & jnp.isfinite(along)
        point = jax.tree.map(lambda x, y: jnp.where(fell, x, y), new, point)
        low, high = jnp.where(fell, scale, low), jnp.where(fell, high, scale)
        found = fell & (along >= CURVATURE * slope)
        scale = jnp.where(jnp.isfinite(high), (low + high) / 2, 2 * scale)
        return point, scale, low, high, found, count + 1

    one = jnp.ones((), direction.dtype)
    trial = (start, one, 0 * one, jnp.inf * one, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
    point, *_, found, _ = lax.while_loop(proceed, step, trial)
    return point, found


def _rounding(value: jax.Array) -> jax.Array:
    """The size of rounding errors in a value."""
    return 4 * jnp.finfo(value.dtype).eps * (1 + jnp.abs(value))


def _newton(objective: Callable[[Flat], jax.Array], start: Flat) -> tuple[Flat, jax.Array]:
    """Newton steps until the fall that is left is far below rounding."""

    def evaluate(position: Flat) -> Place:
        value, slope, hessian = _with_hessian(objective, position)
        inverse, root = symmetric_roots(hessian)
        return Place(position, value, slope, root, inverse, value)

    rounding = _rounding(objective(start))
    enough = rounding * jnp.finfo(start.dtype).eps ** 0.5
    place, steps = newton(evaluate, start, most_steps=MODE_STEPS, enough=enough, rounding=rounding)
    return place.position, steps


def _with_hessian(energy: Callable[[Flat], jax.Array], theta: Flat) -> tuple:
    """Energy, gradient and Hessian; columns of the Hessian by forward over reverse mode."""
    # XLA's CPU Fourier transforms do not accept the memory layout of a batch for LAPACK
    transforms = "fft[" in str(jax.make_jaxpr(energy)(theta))
    (value, gradient), push = linearize(jax.value_and_grad(energy), theta)
    eye = jnp.eye(theta.size, dtype=theta.dtype)
    matrix = lax.map(lambda v: push(v)[1], eye, batch_size=None if transforms else LANES)
    return value, gradient, (matrix + matrix.T) / 2


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


def find_law(
    posterior: FlatPosterior,
    loc: None,
    start: Flat,
    rng_key: jax.Array,
    *,
    layout: Layout,
    searching: bool,
) -> tuple:
    """The mean m and the root L of the nearest normal law, then U and |grad U| at m.

    See `numpyro_geom.warmup.start.find_arrow`.
    """
    target = Target(in_coordinates(posterior.model.potential(), posterior.unravel), 1.0)
    anchor, root = find_arrow(target, layout, start, rng_key, searching, LAW_PAIRS)
    return anchor.position, root, anchor.energy, jnp.linalg.norm(anchor.grad)


def at_law(root: ArrowRoot) -> AtMode:
    """The quantities of `AtMode` for a law with groups."""
    zeros = jnp.zeros_like(root.variances())
    unknown = jnp.full((), jnp.nan, zeros.dtype)
    return AtMode(root, unknown, unknown, unknown, zeros, zeros)


def at_mode(posterior: FlatPosterior, loc: Flat) -> AtMode:
    """The quantities of `AtMode` at a position."""
    settings = posterior.settings
    slope = jax.grad(objective(posterior))(loc)
    prior = _prior_bend(posterior, loc)
    if not _forms_precision(posterior):
        solve = fisher_metric(posterior, loc).solver(loc)
        left = -solve(slope)
        distance = jnp.sqrt(-jnp.vdot(slope, left) / posterior.size)
        nan = jnp.full((), jnp.nan, loc.dtype)
        unformed = jnp.zeros((0, 0), loc.dtype)
        return AtMode(unformed, nan, nan, distance, prior, jnp.zeros_like(loc), left=left)
    if settings.precision == "fisher":
        matrix = fisher_of(posterior).dense(loc)
    else:
        *_, matrix = _with_hessian(posterior.energy, loc)
    eye = jnp.eye(posterior.size, dtype=loc.dtype)
    matrix = (matrix + matrix.T) / 2 + settings.damping * eye
    values, vectors = jnp.linalg.eigh(matrix)
    along = vectors.T @ slope
    factor, mean, around = jnp.linalg.cholesky(matrix), jnp.zeros_like(loc), None
    if settings.mode == "mean":
        mean, around = _look_around(posterior, loc, factor)
    return AtMode(
        factor=factor,
        smallest=values[0],
        largest=values[-1],
        distance=jnp.sqrt(jnp.mean(along**2 / jnp.abs(values))),
        prior=prior,
        mean=mean,
        around=around,
        left=-vectors @ (along / jnp.abs(values)),
    )


def _look_around(posterior: FlatPosterior, loc: Flat, factor: jax.Array) -> tuple[Flat, Around]:
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

    slopes, bends, changes = lax.map(along, roots, batch_size=LANES)
    mean = -cho_solve((factor, True), gradient(loc) + jnp.sum(slopes, 0)) - jnp.sum(bends, 0)
    shift = jnp.linalg.norm(factor.T @ mean)
    curvature = roots @ changes.T
    values, vectors = jnp.linalg.eigh((curvature + curvature.T) / 2)
    furthest = jnp.argmax(jnp.abs(jnp.log(jnp.maximum(values, jnp.finfo(loc.dtype).tiny))))
    direction = (vectors[:, furthest] @ roots) / jnp.linalg.norm(roots, axis=0)
    around = Around(shift, values[jnp.array([0, -1])], direction)
    return jnp.where(shift <= FARTHEST_MEAN, mean, 0.0), around


def _forms_precision(posterior: FlatPosterior) -> bool:
    """Whether P is formed. If not, its draws come from perturb-and-solve."""
    settings = posterior.settings
    if settings.metric == "monge-log":
        check_dense(posterior.size, "metric='monge-log'", "metric='monge'")
        return True
    if settings.precision == "hessian":
        check_dense(posterior.size, "precision='hessian'", "precision='fisher'")
        return True
    if settings.damping > 0:
        check_dense(posterior.size, "damping", "damping=0")
        return True
    return settings.mode == "mean"


def _prior_bend(posterior: FlatPosterior, loc: Flat) -> Flat:
    """The direction `AtMode.prior`."""
    none, settings = jnp.zeros_like(loc), posterior.settings
    if not settings.uses_fisher or settings.prior_metric != "hessian":
        return none
    prior = prior_part(posterior)
    if prior.diagonal is not None:
        values = prior.diagonal(loc)
        lowest = jnp.argmin(values)
        return none.at[lowest].set(jnp.minimum(values[lowest] / jnp.max(jnp.abs(values)), 0))
    if is_wide(posterior.size):
        return none
    values, vectors = jnp.linalg.eigh(prior.dense(loc))
    return vectors[:, 0] * jnp.minimum(values[0] / jnp.max(jnp.abs(values)), 0)
