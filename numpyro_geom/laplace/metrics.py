"""Metrics of a guide: products, solves and geodesic accelerations on flat positions.

A metric G = K'K + Q has the Fisher information of the observed sites in K and the priors in Q.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.linalg import cho_factor, cho_solve, solve, solve_triangular

from .. import fisher
from .._linalg import conjugate_gradients, wait_for
from ..warmup.lanczos import extreme_eigenvalues
from .target import Target, perturbation

Flat = jax.Array
HIGHEST = lax.Precision.HIGHEST

DENSE_LIMIT = 2000
"""Largest dimension at which D x D matrices are formed."""
CG_STEPS = 1000
"""Steps after which conjugate gradients give up."""
DIAGONAL_PROBES = 32
LANCZOS_STEPS = 30


class Prior(NamedTuple):
    """The prior part Q(theta) of a metric.

    Attributes:
        product: ``(theta, v) -> Q v``.
        force: ``(theta, v) -> (d_v Q) v - grad_theta (v'Qv) / 2``.
        dense: ``theta -> Q``, shape (D, D).
        diagonal: ``theta -> diag Q`` where Q is diagonal everywhere, else None.
        perturb: ``(theta, rng_key) ->`` a draw from N(0, Q).
    """

    product: Callable[[Flat, Flat], Flat]
    force: Callable[[Flat, Flat], Flat]
    dense: Callable[[Flat], jax.Array]
    diagonal: Callable[[Flat], Flat] | None
    perturb: Callable[[Flat, jax.Array], Flat]


class Metric(NamedTuple):
    """A metric G(theta) = K'K + Q, matrix-free.

    Attributes:
        product: ``(theta, v) -> G v``.
        solver: ``theta -> (b -> G^-1 b)``; the work on ``theta`` alone is done once.
        force: ``(theta, v) -> (d_v G) v - grad_theta (v'Gv) / 2``.
        dense: ``theta -> G``, shape (D, D).
        perturb: ``(theta, rng_key) ->`` a draw from N(0, G).
    """

    product: Callable[[Flat, Flat], Flat]
    solver: Callable[[Flat], Callable[[Flat], Flat]]
    force: Callable[[Flat, Flat], Flat]
    dense: Callable[[Flat], jax.Array]
    perturb: Callable[[Flat, jax.Array], Flat]

    def acceleration(self, position: Flat, velocity: Flat) -> Flat:
        """Theta'' = -G^-1 force of a geodesic."""
        force = self.force(position, velocity)
        return -self.solver(wait_for(position, force))(force)


def hessian_prior(target: Target, *, diagonal: bool) -> Prior:
    """Q = the Hessian of minus the log prior, log-Jacobians of the transforms included."""

    def gradient(theta: Flat) -> Flat:
        return target.sum_prior(lambda rows: jax.grad(target.prior_energy)(theta, rows))

    def along(theta: Flat, v: Flat) -> Flat:
        return jax.jvp(gradient, (theta,), (v,))[1]

    def dense(theta: Flat) -> jax.Array:
        if diagonal:
            return jnp.diag(diagonal_fn(theta))
        return jax.vmap(lambda v: along(theta, v))(jnp.eye(target.size, dtype=theta.dtype))

    def diagonal_fn(theta: Flat) -> Flat:
        return along(theta, jnp.ones_like(theta))

    def perturb(theta: Flat, rng_key: jax.Array) -> Flat:
        noise = random.normal(rng_key, theta.shape, theta.dtype)
        if diagonal:
            return jnp.sqrt(diagonal_fn(theta)) * noise
        return jnp.matmul(jnp.linalg.cholesky(dense(theta)), noise, precision=HIGHEST)

    return Prior(
        product=along,
        # both terms are third derivatives of one function, contracted twice with v
        force=lambda theta, v: jax.jvp(lambda x: along(x, v), (theta,), (v,))[1] / 2,
        dense=dense,
        diagonal=diagonal_fn if diagonal else None,
        perturb=perturb,
    )


def expected_prior(target: Target, *, diagonal: bool) -> Prior:
    """Q = expected information of the priors, block by block: see `numpyro_geom.fisher`."""
    form, total = target.expected, target.sum_prior

    def product(theta: Flat, v: Flat) -> Flat:
        return total(lambda rows: fisher.product(form, theta, v, rows))

    return Prior(
        product=product,
        force=lambda theta, v: total(lambda rows: fisher.force(form, theta, v, rows)),
        dense=lambda theta: total(lambda rows: fisher.gram(form, theta, rows)),
        diagonal=(lambda theta: product(theta, jnp.ones_like(theta))) if diagonal else None,
        perturb=lambda theta, key: perturbation(target, form, theta, key, total),
    )


def softabs_prior(target: Target, sharpness: float = 1e6) -> Prior:
    """Q = f(H), f(x) = x coth(sharpness x): the smoothed absolute value of the prior's Hessian.

    Betancourt, "A general metric for Riemannian manifold Hamiltonian Monte Carlo", 2013.
    """
    hessian = hessian_prior(target, diagonal=False)

    def dense(theta: Flat) -> jax.Array:
        return _softabs(hessian.dense(theta), sharpness)

    return _dense_prior(dense)


def _dense_prior(dense: Callable[[Flat], jax.Array]) -> Prior:
    def product(theta: Flat, v: Flat) -> Flat:
        return jnp.matmul(dense(theta), v, precision=HIGHEST)

    def force(theta: Flat, v: Flat) -> Flat:
        _, change = jax.jvp(lambda x: product(x, v), (theta,), (v,))
        return change - jax.grad(lambda x: jnp.vdot(v, product(x, v), precision=HIGHEST))(theta) / 2

    def perturb(theta: Flat, rng_key: jax.Array) -> Flat:
        noise = random.normal(rng_key, theta.shape, theta.dtype)
        return jnp.matmul(jnp.linalg.cholesky(dense(theta)), noise, precision=HIGHEST)

    return Prior(product, force, dense, None, perturb)


@jax.custom_jvp
def _softabs(matrix: jax.Array, sharpness: float) -> jax.Array:
    values, vectors = jnp.linalg.eigh(matrix)
    return jnp.matmul(vectors * _coth(values, sharpness), vectors.T, precision=HIGHEST)


def _coth(x: jax.Array, sharpness: float) -> jax.Array:
    """X coth(sharpness x), 1 / sharpness at 0."""
    small = jnp.abs(sharpness * x) < 1e-3
    safe = jnp.where(small, 1.0, x)
    return jnp.where(
        small, (1 + (sharpness * x) ** 2 / 3) / sharpness, safe / jnp.tanh(sharpness * safe)
    )


@_softabs.defjvp
def _softabs_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # divided differences: eigenvectors of equal eigenvalues have no derivative, the function has
    (matrix, sharpness), (change, _) = primals, tangents
    values, vectors = jnp.linalg.eigh(matrix)
    f = _coth(values, sharpness)
    slope = jax.vmap(jax.grad(lambda x: _coth(x, sharpness)))(values)
    gap = values[:, None] - values
    equal = jnp.abs(gap) <= 1e-6 * (jnp.abs(values[:, None]) + jnp.abs(values)) + 1e-30
    ratio = jnp.where(
        equal, (slope[:, None] + slope) / 2, (f[:, None] - f) / jnp.where(equal, 1.0, gap)
    )
    rotated = vectors.T @ change @ vectors
    out = jnp.matmul(vectors * f, vectors.T, precision=HIGHEST)
    return out, vectors @ (ratio * rotated) @ vectors.T


def fisher_metric(
    target: Target, prior: Prior, solver: str, mode: Flat | None = None, tolerance: float = 0.0
) -> Metric:
    """G = Fisher information of the observed sites + prior part.

    Args:
        target: the posterior.
        prior: its prior part.
        solver: ``"cholesky"``, ``"woodbury"`` or ``"cg"``.
        mode: where the preconditioner of ``"cg"`` is made.
        tolerance: of ``"cg"``, see `conjugate_gradients`.
    """
    form = target.form

    def product(theta: Flat, v: Flat) -> Flat:
        own = target.sum_rows(lambda rows: fisher.product(form, theta, v, rows))
        return own + prior.product(theta, v)

    def dense(theta: Flat) -> jax.Array:
        return target.sum_rows(lambda rows: fisher.gram(form, theta, rows)) + prior.dense(theta)

    def force(theta: Flat, v: Flat) -> Flat:
        own = target.sum_rows(lambda rows: fisher.force(form, theta, v, rows))
        return own + prior.force(theta, v)

    def perturb(theta: Flat, rng_key: jax.Array) -> Flat:
        key_rows, key_prior = random.split(rng_key)
        own = perturbation(target, form, theta, key_rows, target.sum_rows)
        return own + prior.perturb(theta, key_prior)

    def cholesky(theta: Flat) -> Callable[[Flat], Flat]:
        return partial(solve, dense(theta), assume_a="pos")

    def woodbury(theta: Flat) -> Callable[[Flat], Flat]:
        assert prior.diagonal is not None
        inverse = 1 / prior.diagonal(theta)
        matrix = fisher.root_matrix(form, theta, {})
        inner = jnp.matmul(matrix * inverse, matrix.T, precision=HIGHEST)
        inner = inner + jnp.eye(inner.shape[0], dtype=inner.dtype)
        factor = cho_factor(lax.stop_gradient(inner), lower=True)

        def times(v: Flat) -> Flat:
            rows = jnp.matmul(matrix, v, precision=HIGHEST)
            return jnp.matmul(rows, matrix, precision=HIGHEST) + v / inverse

        def divide(b: Flat) -> Flat:
            scaled = inverse * b
            weights = cho_solve(factor, jnp.matmul(matrix, scaled, precision=HIGHEST))
            return scaled - inverse * jnp.matmul(weights, matrix, precision=HIGHEST)

        def refined(times: Callable[[Flat], Flat], b: Flat) -> Flat:
            # the difference cancels where G is stiff: once more for what rounding has left
            x = divide(b)
            return x + divide(b - times(x))

        return lambda b: lax.custom_linear_solve(times, b, refined, symmetric=True)

    def cg(theta: Flat) -> Callable[[Flat], Flat]:
        along = partial(product, theta)
        return lambda b: conjugate_gradients(along, b, precondition, tolerance, CG_STEPS)

    if solver == "cg":
        assert mode is not None
        precondition = _preconditioner(target, prior, product, mode)
    solvers = {"cholesky": cholesky, "woodbury": woodbury, "cg": cg}
    return Metric(product, solvers[solver], force, dense, perturb)


def _preconditioner(
    target: Target, prior: Prior, product: Callable[[Flat, Flat], Flat], mode: Flat
) -> Callable[[Flat], Flat]:
    """A diagonal approximate inverse of G from the mode: by the prior, or by all of G's diagonal.

    The one with the smaller condition number there. Not a factor of G: that of a network turns so
    fast along a geodesic that the mode's is worse than none.
    """

    def squares(key: jax.Array) -> Flat:
        return perturbation(target, target.form, mode, key, target.sum_rows) ** 2

    own = jnp.mean(lax.map(squares, random.split(random.key(0), DIAGONAL_PROBES)), 0)
    if prior.diagonal is None:
        rest = jnp.maximum(prior.product(mode, jnp.ones_like(mode)), 0)
        inverse = 1 / (own + rest + 1e-30)
        return lambda b: inverse * b

    rest = jnp.maximum(prior.diagonal(mode), 1e-30)

    def condition(diagonal: Flat) -> jax.Array:
        root = jnp.sqrt(diagonal)
        ends = extreme_eigenvalues(
            lambda v: product(mode, v / root) / root, mode.size, random.key(1), LANCZOS_STEPS
        )
        return ends.largest_magnitude / ends.smallest_positive

    # not better if it cannot be told
    better = condition(own + rest) < condition(rest)
    inverse = 1 / jnp.where(better, own + rest, rest)
    return lambda b: inverse * b


def monge_acceleration(
    energy: Callable[[Flat], jax.Array], alpha2: float
) -> Callable[[Flat, Flat], Flat]:
    """Geodesics of G = I + alpha2 g g', g the gradient of the energy."""

    def acceleration(position: Flat, velocity: Flat) -> Flat:
        gradient, along = jax.jvp(jax.grad(energy), (position,), (velocity,))
        bend = jnp.vdot(velocity, along, precision=HIGHEST)
        size = jnp.vdot(gradient, gradient, precision=HIGHEST)
        return -alpha2 * bend / (1 + alpha2 * size) * gradient

    return acceleration


def dense_metric(metric: Callable[[Flat], jax.Array]) -> Metric:
    """A metric given as a function theta -> G, shape (D, D); derivatives by autodiff."""
    parts = _dense_prior(metric)

    def solver(theta: Flat) -> Callable[[Flat], Flat]:
        return partial(solve, metric(theta), assume_a="pos")

    return Metric(parts.product, solver, parts.force, metric, parts.perturb)


def log_det(matrix: jax.Array) -> jax.Array:
    """Log determinant of a positive definite matrix; NaN for another."""
    return 2 * jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(matrix))))


def velocity_from(factor: jax.Array, noise: Flat) -> Flat:
    """L^-T z, of covariance P^-1 where P = L L'."""
    return solve_triangular(factor, noise, trans=1, lower=True)
