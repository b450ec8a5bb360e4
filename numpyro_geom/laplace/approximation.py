"""The approximation at a mode: its Fisher metric, its solver and its precision.

These are pure functions of the settings and a target, or of a `Posterior` that gives targets.
`numpyro_geom.laplace.guide` compiles and runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.linalg import cho_solve, solve_triangular

from .information.form import Flat
from .information.model import learn_structure, model_sites
from .metrics import RiemannianMetric, dense_metric, fisher_metric, monge_acceleration
from .quadratic import Quadratic, expected_prior, fisher_form, hessian_prior, softabs_prior
from .settings import LaplaceSettings, check_dense, is_wide
from .target import Posterior, Target, make_target

FEW = 200
"""Dimensions (or outputs) up to which matrices are formed: equally fast, and faster to compile."""
FARTHEST_MEAN = 1.0
"""Shift in posterior sd above which `_look_around`, an expansion at the mode, is not trusted."""


class Around(NamedTuple):
    """The energy at one posterior sd from the mode, as ``mode="mean"`` sees it.

    Attributes:
        shift: length of the velocities' mean in posterior sd, before it is limited.
        curvature: smallest and largest ratio of the curvature of U to that of P, over directions.
        direction: the direction where this ratio is furthest from 1, entries in posterior sd.
    """

    shift: jax.Array
    curvature: jax.Array
    direction: Flat


class AtMode(NamedTuple):
    """Quantities that are computed once at a mode.

    Attributes:
        factor: lower Cholesky factor of P; without entries if P is not formed.
        smallest: smallest eigenvalue of P (NaN if P is not formed).
        largest: largest eigenvalue of P.
        distance: distance of the position from the mode, in posterior sd, root mean square.
        prior: direction of the most negative curvature of minus the log prior, times this
            curvature over the largest one. Zeros if there is none or it was not computed.
        mean: mean of the velocities.
        around: see `Around`; None if it was not computed.
    """

    factor: jax.Array
    smallest: jax.Array
    largest: jax.Array
    distance: jax.Array
    prior: jax.Array
    mean: jax.Array
    around: Around | None = None


def targets(settings: LaplaceSettings, posterior: Posterior) -> tuple[Target, Target]:
    """The posterior with its Fisher form, and the posterior with the form of the draws' metric."""
    target = make_target(posterior)
    if settings.metric != "empirical-fisher":
        return target, target
    return target, make_target(posterior, empirical=True)


def learn(settings: LaplaceSettings, posterior: Posterior, start: Flat) -> Posterior:
    """The posterior, of concrete data, with its structure, learned from its program and values."""
    if not settings.uses_fisher:
        return posterior
    model, plan, args, kwargs, *_ = posterior
    sites = model_sites(model, plan, args, kwargs)
    structure = learn_structure(sites, posterior.unravel(start))
    target = make_target(posterior._replace(structure=structure))
    if target.num_outputs == 0 and settings.needs_outputs:
        raise ValueError(
            "the model has no observed site with a distribution (numpyro.factor has none), and "
            f"metric={settings.metric!r} is the information of such sites: expected "
            "`numpyro.sample(..., obs=data)`. Pass the data, metric='euclidean', or a function of "
            "the position that returns your metric"
        )
    diagonal = _is_diagonal(settings, target, start)
    return posterior._replace(structure=structure, diagonal_prior=diagonal)


def _is_diagonal(settings: LaplaceSettings, target: Target, start: Flat) -> bool:
    """Whether Q is diagonal: whether Q z is Q 1 times z, entry by entry, for a random z."""

    def gap(theta: Flat, z: Flat) -> jax.Array:
        product = prior_part(settings, target).product
        diagonal = product(theta, jnp.ones_like(theta))
        scale = jnp.max(jnp.abs(diagonal)) * jnp.max(jnp.abs(z))
        return jnp.max(jnp.abs(product(theta, z) - diagonal * z)) / scale

    key_theta, key_z = random.split(random.key(1))
    theta = start + random.normal(key_theta, start.shape) / 10
    z = random.normal(key_z, theta.shape, theta.dtype)
    return bool(jax.jit(gap)(theta.astype(z.dtype), z) < 1e-4)


def prior_part(settings: LaplaceSettings, target: Target) -> Quadratic:
    """The prior part of the Fisher metric."""
    makers = {"hessian": hessian_prior, "softabs": softabs_prior}
    make = makers.get(settings.prior_metric, expected_prior)
    return make(target, diagonal=target.diagonal_prior)


def fisher_of(settings: LaplaceSettings, target: Target) -> Quadratic:
    """The Fisher metric, as a quadratic form."""
    return fisher_form(target, prior_part(settings, target))


def fisher_metric_of(settings: LaplaceSettings, target: Target, loc: Flat) -> RiemannianMetric:
    """The Fisher metric for geodesics from ``loc``, by the cheapest solver."""
    # a hundredth of the geodesic's own tolerance is accurate enough
    prior, tolerance = prior_part(settings, target), settings.rtol / 100
    return fisher_metric(target, prior, choose_solver(settings, target), loc, tolerance)


def acceleration_fn(
    settings: LaplaceSettings, target: Target, own: Target, loc: Flat
) -> Callable[[Flat, Flat], Flat]:
    """``(position, velocity) -> theta''``."""
    metric = settings.metric
    if metric in ("monge", "monge-log"):
        return monge_acceleration(target.energy, settings.alpha2)
    if isinstance(metric, RiemannianMetric):
        return metric.acceleration
    if callable(metric):
        given: Callable[[Any], Any] = metric
        return dense_metric(lambda theta: jnp.asarray(given(target.unravel(theta)))).acceleration
    return fisher_metric_of(settings, own, loc).acceleration


def choose_solver(settings: LaplaceSettings, target: Target) -> str:
    """The cheapest solver, or the requested one if it is possible."""
    structure, fewest = target.form.structure, min(target.num_outputs, target.size)
    # forming a matrix takes one product per column; only a linear map is cheaper
    dense = fewest <= FEW or (structure.affine and structure.diagonal and not is_wide(target.size))
    if settings.solver == "woodbury" and not target.diagonal_prior:
        raise ValueError(
            "solver='woodbury' needs a prior part that is diagonal (independent priors, "
            "prior_metric='hessian' or 'expected'), and this model's is not: use 'cholesky' or 'cg'"
        )
    if settings.solver != "auto":
        chosen = settings.solver
    elif not dense:
        chosen = "cg"
    elif fewest < target.size and target.diagonal_prior:
        chosen = "woodbury"
    else:
        chosen = "cg" if is_wide(target.size) else "cholesky"
    if chosen == "cholesky":
        check_dense(target.size, "solver='cholesky'", "solver='cg'")
    if chosen == "woodbury":
        what, instead = "solver='woodbury'", "solver='cholesky' or 'cg'"
        check_dense(target.num_outputs, what, instead, of="number of outputs")
    return chosen


def objective(settings: LaplaceSettings, target: Target) -> Callable[[Flat], jax.Array]:
    """The objective of the mode: U, or U + log det G / 2 for the Hausdorff mode."""
    if settings.mode == "euclidean":
        return target.energy
    return lambda theta: target.energy(theta) + half_log_det(settings, target, theta)


def half_log_det(settings: LaplaceSettings, target: Target, theta: Flat) -> jax.Array:
    """The log volume log det G / 2 of the Fisher metric."""
    check_dense(target.size, f"mode={settings.mode!r}", "mode='euclidean'")
    factor = jnp.linalg.cholesky(fisher_of(settings, target).dense(theta))
    return jnp.sum(jnp.log(jnp.diagonal(factor)))  # NaN where G is not positive definite


def gradient_and_hessian(energy: Callable[[Flat], jax.Array], theta: Flat) -> tuple:
    """Gradient and Hessian at a position; columns of the Hessian by forward over reverse mode."""
    # XLA's CPU Fourier transforms do not accept the memory layout of a batch for LAPACK
    transforms = "fft[" in str(jax.make_jaxpr(energy)(theta))
    gradient, push = jax.linearize(jax.grad(energy), theta)
    eye = jnp.eye(theta.size, dtype=theta.dtype)
    matrix = lax.map(push, eye, batch_size=None if transforms else 64)
    return gradient, (matrix + matrix.T) / 2


def at_mode(settings: LaplaceSettings, posterior: Posterior, loc: Flat) -> AtMode:
    """The quantities of `AtMode` at a position."""
    target = make_target(posterior)
    slope = jax.grad(objective(settings, target))(loc)
    prior = _prior_bend(settings, target, loc)
    if not _forms_precision(settings, target):
        solve = fisher_metric_of(settings, target, loc).solver(loc)
        distance = jnp.sqrt(jnp.vdot(slope, solve(slope)) / target.size)
        nan = jnp.full((), jnp.nan, loc.dtype)
        unformed = jnp.zeros((0, 0), loc.dtype)
        return AtMode(unformed, nan, nan, distance, prior, jnp.zeros_like(loc))
    if settings.precision == "fisher":
        matrix = fisher_of(settings, target).dense(loc)
    else:
        _, matrix = gradient_and_hessian(target.energy, loc)
    eye = jnp.eye(target.size, dtype=loc.dtype)
    matrix = (matrix + matrix.T) / 2 + settings.damping * eye
    values, vectors = jnp.linalg.eigh(matrix)
    shift = (vectors.T @ slope) ** 2 / jnp.abs(values)
    factor, mean, around = jnp.linalg.cholesky(matrix), jnp.zeros_like(loc), None
    if settings.mode == "mean":
        mean, around = _look_around(settings, posterior, loc, factor)
    return AtMode(
        factor=factor,
        smallest=values[0],
        largest=values[-1],
        distance=jnp.sqrt(jnp.mean(shift)),
        prior=prior,
        mean=mean,
        around=around,
    )


def _look_around(
    settings: LaplaceSettings, posterior: Posterior, loc: Flat, factor: jax.Array
) -> tuple[Flat, Around]:
    """The velocities' mean that puts the mean of the draws at the posterior's, to first order.

    At the posterior's mean the expected gradient is zero. Let u_i be the columns of a root of P^-1.
    The expected gradient under N(loc, P^-1) comes from the points loc +- u_i. One Newton step gives
    the mean of the end points. Geodesics with velocities u_i bend away from it by half of their
    accelerations. The differences of the same gradients show the curvature of the energy there.
    """
    target, own = targets(settings, posterior)
    gradient, acceleration = jax.grad(target.energy), acceleration_fn(settings, target, own, loc)
    roots = solve_triangular(factor, jnp.eye(loc.size, dtype=loc.dtype), lower=True)

    def along(root: Flat) -> tuple[Flat, Flat, Flat]:
        up, down = gradient(loc + root), gradient(loc - root)
        return (up + down) / 2 - gradient(loc), acceleration(loc, root) / 2, (up - down) / 2

    slopes, bends, changes = lax.map(along, roots, batch_size=64)
    mean = -cho_solve((factor, True), gradient(loc) + jnp.sum(slopes, 0)) - jnp.sum(bends, 0)
    shift = jnp.linalg.norm(factor.T @ mean)
    curvature = roots @ changes.T
    values, vectors = jnp.linalg.eigh((curvature + curvature.T) / 2)
    furthest = jnp.argmax(jnp.abs(jnp.log(jnp.maximum(values, jnp.finfo(loc.dtype).tiny))))
    direction = (vectors[:, furthest] @ roots) / jnp.linalg.norm(roots, axis=0)
    around = Around(shift, values[jnp.array([0, -1])], direction)
    return jnp.where(shift <= FARTHEST_MEAN, mean, 0.0), around


def _forms_precision(settings: LaplaceSettings, target: Target) -> bool:
    """Whether P is formed. If not, its draws come from perturb-and-solve."""
    if settings.metric == "monge-log":
        check_dense(target.size, "metric='monge-log'", "metric='monge'")
        return True
    if settings.precision == "hessian":
        check_dense(target.size, "precision='hessian'", "precision='fisher'")
        return True
    if settings.damping > 0:
        check_dense(target.size, "damping", "damping=0")
        return True
    return settings.mode == "mean"


def _prior_bend(settings: LaplaceSettings, target: Target, loc: Flat) -> Flat:
    """The direction `AtMode.prior`."""
    none = jnp.zeros_like(loc)
    if not settings.uses_fisher or settings.prior_metric != "hessian":
        return none
    prior = prior_part(settings, target)
    if prior.diagonal is not None:
        values = prior.diagonal(loc)
        lowest = jnp.argmin(values)
        return none.at[lowest].set(jnp.minimum(values[lowest] / jnp.max(jnp.abs(values)), 0))
    if is_wide(target.size):
        return none
    values, vectors = jnp.linalg.eigh(prior.dense(loc))
    return vectors[:, 0] * jnp.minimum(values[0] / jnp.max(jnp.abs(values)), 0)
