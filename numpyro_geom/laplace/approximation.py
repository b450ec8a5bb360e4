"""The approximation at a mode: which metric, precision and solver, and the way of one draw.

All of it is pure functions of a `Target`; `numpyro_geom.laplace.guide` compiles and runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from ..fisher import Structure
from .geodesic import Geodesic, exponential_map
from .log_map import log_map, shoot
from .metrics import (
    DENSE_LIMIT,
    HIGHEST,
    Metric,
    Prior,
    dense_metric,
    expected_prior,
    fisher_metric,
    hessian_prior,
    log_det,
    monge_acceleration,
    softabs_prior,
    velocity_from,
)
from .target import Target

Flat = jax.Array


class Settings(NamedTuple):
    """Arguments of the guide, checked, and what is known of the model; see `RiemannianLaplace`.

    Attributes:
        metric: name or function.
        mode: name.
        precision: name, or None for the choice that fits.
        prior_metric: name.
        solver: name.
        alpha2: scale of the gradient in Monge's metric.
        damping: added to P.
        rtol: of the geodesics.
        atol: of the geodesics.
        max_steps: of the geodesics.
        structure: of the Fisher form.
        diagonal_prior: whether the prior part of the metric is diagonal.
    """

    metric: str | Callable
    mode: str
    precision: str | None
    prior_metric: str
    solver: str
    alpha2: float
    damping: float
    rtol: float
    atol: float
    max_steps: int
    structure: Structure = Structure()
    diagonal_prior: bool = False

    @property
    def needs_outputs(self) -> bool:
        """Whether the metric of the draws is information of observed sites."""
        return self.metric in ("fisher", "empirical-fisher")

    def uses_fisher(self, size: int) -> bool:
        """Whether the Fisher form of the model has any part in the draws."""
        return (
            self.needs_outputs
            or self.chosen_precision(size) == "fisher"
            or self.mode == "hausdorff"
        )

    def chosen_precision(self, size: int) -> str:
        """The precision, in D = ``size`` dimensions."""
        if self.precision is not None:
            return self.precision
        wide = size > DENSE_LIMIT and self.metric != "monge-log"
        return "fisher" if wide or self.mode == "hausdorff" else "hessian"


class AtMode(NamedTuple):
    """What is computed once at a mode.

    Attributes:
        factor: lower Cholesky factor of P; without entries where P is not formed.
        smallest: smallest eigenvalue of P (NaN where P is not formed).
        largest: largest eigenvalue.
        distance: of the position from the mode, in posterior sd, root mean square.
        prior: direction of the most negative curvature of minus the log prior, times that
            curvature over the largest; zeros where there is none or it was not looked at.
    """

    factor: jax.Array
    smallest: jax.Array
    largest: jax.Array
    distance: jax.Array
    prior: jax.Array


class Start(NamedTuple):
    """How a geodesic starts.

    Attributes:
        velocity: v.
        found: whether the logarithmic map converged, where there is one.
        square: s'Ps of the Gaussian draw s behind v.
        volume: log |det dv/ds|.
    """

    velocity: Flat
    found: jax.Array
    square: jax.Array
    volume: jax.Array


def check_dense(size: int, what: str, instead: str) -> None:
    """Raise where D x D matrices would be too large."""
    if size > DENSE_LIMIT:
        raise ValueError(
            f"{what} forms matrices of the model's dimension, {size}: expected at most "
            f"{DENSE_LIMIT}. Use {instead}"
        )


def prior_part(settings: Settings, target: Target) -> Prior:
    """The prior part of the Fisher metric."""
    if settings.prior_metric == "softabs":
        return softabs_prior(target)
    make = hessian_prior if settings.prior_metric == "hessian" else expected_prior
    return make(target, diagonal=settings.diagonal_prior)


def fisher_of(settings: Settings, target: Target, solver: str, mode: Flat | None) -> Metric:
    """The Fisher metric."""
    # a hundredth of the geodesic's own tolerance is as good as exact
    tolerance = settings.rtol / 100
    return fisher_metric(target, prior_part(settings, target), solver, mode, tolerance)


def choose_solver(settings: Settings, target: Target) -> str:
    """The cheapest solver, or the one that was asked for if it can be had."""
    few = target.num_outputs < target.size and target.num_outputs <= DENSE_LIMIT
    if settings.solver == "woodbury" and not settings.diagonal_prior:
        raise ValueError(
            "solver='woodbury' needs a prior part that is diagonal (independent priors, "
            "prior_metric='hessian' or 'expected'), and this model's is not: use 'cholesky' or 'cg'"
        )
    if settings.solver != "auto":
        chosen = settings.solver
    elif few and settings.diagonal_prior:
        chosen = "woodbury"
    else:
        chosen = "cholesky" if target.size <= DENSE_LIMIT else "cg"
    if chosen == "cholesky":
        check_dense(target.size, "solver='cholesky'", "solver='cg'")
    if chosen == "woodbury" and target.num_outputs > DENSE_LIMIT:
        raise ValueError(
            f"solver='woodbury' forms matrices of the number of outputs, {target.num_outputs}: "
            f"expected at most {DENSE_LIMIT}. Use solver='cholesky' or 'cg'"
        )
    return chosen


def objective(settings: Settings, target: Target) -> Callable[[Flat], jax.Array]:
    """What the mode minimises: U, or U + log det G / 2."""
    if settings.mode == "euclidean":
        return target.energy
    return lambda theta: target.energy(theta) + half_log_det(settings, target, theta)


def half_log_det(settings: Settings, target: Target, theta: Flat) -> jax.Array:
    """The log volume log det G / 2 of the Fisher metric."""
    check_dense(target.size, "mode='hausdorff'", "mode='euclidean'")
    return log_det(fisher_of(settings, target, "cholesky", None).dense(theta)) / 2


def at_mode(settings: Settings, target: Target, loc: Flat) -> AtMode:
    """See `AtMode`."""
    slope = jax.grad(objective(settings, target))(loc)
    prior = _prior_bend(settings, target, loc)
    if not _forms_precision(settings, target):
        solve = fisher_of(settings, target, choose_solver(settings, target), loc).solver(loc)
        distance = jnp.sqrt(jnp.vdot(slope, solve(slope)) / target.size)
        nan = jnp.full((), jnp.nan, loc.dtype)
        return AtMode(jnp.zeros((0, 0), loc.dtype), nan, nan, distance, prior)
    eye = jnp.eye(target.size, dtype=loc.dtype)
    if settings.chosen_precision(target.size) == "fisher":
        matrix = fisher_of(settings, target, "cholesky", None).dense(loc)
    else:
        _, push = jax.linearize(jax.grad(target.energy), loc)
        matrix = lax.map(push, eye, batch_size=64)
    matrix = (matrix + matrix.T) / 2 + settings.damping * eye
    values, vectors = jnp.linalg.eigh(matrix)
    shift = (vectors.T @ slope) ** 2 / jnp.abs(values)
    return AtMode(
        factor=jnp.linalg.cholesky(matrix),
        smallest=values[0],
        largest=values[-1],
        distance=jnp.sqrt(jnp.mean(shift)),
        prior=prior,
    )


def _forms_precision(settings: Settings, target: Target) -> bool:
    """Whether P is formed, or its draws come from perturb-and-solve."""
    if settings.metric == "monge-log":
        check_dense(target.size, "metric='monge-log'", "metric='monge'")
        return True
    if settings.chosen_precision(target.size) == "hessian":
        check_dense(target.size, "precision='hessian'", "precision='fisher'")
        return True
    if settings.damping > 0:
        check_dense(target.size, "damping", "damping=0")
        return True
    return False


def _prior_bend(settings: Settings, target: Target, loc: Flat) -> Flat:
    """See `AtMode.prior`."""
    none = jnp.zeros_like(loc)
    if not settings.uses_fisher(target.size) or settings.prior_metric != "hessian":
        return none
    prior = prior_part(settings, target)
    if prior.diagonal is not None:
        values = prior.diagonal(loc)
        lowest = jnp.argmin(values)
        return none.at[lowest].set(jnp.minimum(values[lowest] / jnp.max(jnp.abs(values)), 0))
    if target.size > DENSE_LIMIT:
        return none
    values, vectors = jnp.linalg.eigh(prior.dense(loc))
    return vectors[:, 0] * jnp.minimum(values[0] / jnp.max(jnp.abs(values)), 0)


def gaussian_fn(
    settings: Settings, target: Target, loc: Flat, at: AtMode
) -> Callable[[jax.Array], tuple[Flat, jax.Array]]:
    """``rng_key ->`` a draw s ~ N(0, P^-1), and s'Ps."""
    if at.factor.size:

        def from_factor(key: jax.Array) -> tuple[Flat, jax.Array]:
            noise = random.normal(key, loc.shape, loc.dtype)
            return velocity_from(at.factor, noise), jnp.vdot(noise, noise)

        return from_factor

    metric = fisher_of(settings, target, choose_solver(settings, target), loc)
    solve = metric.solver(loc)

    def perturb_and_solve(key: jax.Array) -> tuple[Flat, jax.Array]:
        draw = solve(metric.perturb(loc, key))
        return draw, jnp.vdot(draw, metric.product(loc, draw))

    return perturb_and_solve


def start_of(settings: Settings, at: AtMode, draw: Flat, square: jax.Array) -> Start:
    """The geodesic's start that belongs to a Gaussian draw; see `gaussian_fn`."""
    if settings.metric != "monge-log":
        return Start(draw, jnp.ones((), bool), square, jnp.zeros((), draw.dtype))
    precision = jnp.matmul(at.factor, at.factor.T, precision=HIGHEST)
    velocity, found = log_map(precision, draw, settings.alpha2)

    def end(v: Flat) -> Geodesic:
        position = shoot(precision, v, settings.alpha2)
        return Geodesic(position, found, jnp.zeros((), jnp.int32))

    return Start(velocity, found, square, -with_log_volume(end, velocity)[1])


def end_fn(
    settings: Settings, target: Target, own: Target, loc: Flat
) -> Callable[[Flat], Geodesic]:
    """``velocity -> Geodesic``.

    Args:
        settings: of the guide.
        target: the posterior.
        own: the same, with the form of the metric of the draws.
        loc: where geodesics start.
    """
    name = settings.metric
    if name == "euclidean":
        return lambda v: Geodesic(loc + v, jnp.all(jnp.isfinite(v)), jnp.zeros((), jnp.int32))
    acceleration: Callable[[Flat, Flat], Flat]
    if name in ("monge", "monge-log"):
        acceleration = monge_acceleration(target.energy, settings.alpha2)
    elif callable(name):
        given: Callable[[Any], Any] = name
        metric = dense_metric(lambda theta: jnp.asarray(given(target.unravel(theta))))
        acceleration = metric.acceleration
    else:
        solver = choose_solver(settings, own)
        acceleration = fisher_of(settings, own, solver, loc).acceleration
    return lambda v: exponential_map(
        acceleration,
        loc,
        v,
        rtol=settings.rtol,
        atol=settings.atol,
        max_steps=settings.max_steps,
    )


def draw_one(
    target: Target, start: Start, end: Callable[[Flat], Geodesic], *, log_weight: bool
) -> tuple[Geodesic, jax.Array]:
    """A draw, and the log of its importance weight up to a constant (0 unless asked for).

    The weight is -U(theta) - log N(v; 0, P^-1) + log |det d theta / d v|, minus infinity for a
    geodesic that failed.
    """
    if not log_weight:
        geodesic = end(start.velocity)
        volume = jnp.zeros((), start.velocity.dtype)
    else:
        check_dense(target.size, "log_weight=True", "log_weight=False")
        # the geodesic after the volume of the start: no two calls of LAPACK at a time
        known = jnp.isfinite(start.volume)
        geodesic, volume = with_log_volume(end, jnp.where(known, start.velocity, 0.0))
        geodesic = geodesic._replace(success=geodesic.success & known)
    geodesic = geodesic._replace(success=geodesic.success & start.found)
    if not log_weight:
        return geodesic, volume
    weight = -target.energy(geodesic.position) + start.square / 2 + start.volume + volume
    usable = geodesic.success & jnp.isfinite(weight)
    return geodesic, jnp.where(usable, weight, -jnp.inf)


def with_log_volume(end: Callable[[Flat], Geodesic], x: Flat) -> tuple[Geodesic, jax.Array]:
    """A geodesic and log |det d position / dx|, by derivatives along all directions."""

    def along(u: Flat) -> tuple[Geodesic, Flat]:
        def position(v: Flat) -> tuple[Flat, Geodesic]:
            geodesic = end(v)
            return geodesic.position, geodesic

        _, push, geodesic = jax.jvp(position, (x,), (u,), has_aux=True)
        return geodesic, push

    # the geodesic is the same along all directions, and is followed once
    eye = jnp.eye(x.size, dtype=x.dtype)
    geodesic, jacobian = jax.vmap(along, out_axes=(None, 0))(eye)
    return geodesic, jnp.linalg.slogdet(jacobian)[1]
