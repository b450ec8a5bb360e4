"""Metrics of a guide: solves and geodesic accelerations on flat positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.linalg import cho_factor, cho_solve, solve

from .._linalg import Sketch, conjugate_gradients, nystrom, wait_for
from ..warmup.lanczos import extreme_eigenvalues
from .information.form import HIGHEST, Flat, root_matrix
from .quadratic import Quadratic, dense_form, fisher_form, information
from .target import Target

CG_STEPS = 1000
"""Steps after which conjugate gradients give up."""
LEAST_RANK, MOST_RANK = 16, 64
"""Limits of the rank of sketches of G. Between them the rank is the square root of D."""
DIAGONAL_PROBES = 32
LANCZOS_STEPS = 30


class RiemannianMetric(NamedTuple):
    """A metric G(theta) as geodesics need it, on flat positions of length D.

    Attributes:
        solver: ``theta -> (b -> G^-1 b)``. Work that depends on ``theta`` alone is done once.
        force: ``(theta, v) -> (d_v G) v - grad_theta (v'Gv) / 2``.
    """

    solver: Callable[[Flat], Callable[[Flat], Flat]]
    force: Callable[[Flat, Flat], Flat]

    def acceleration(self, position: Flat, velocity: Flat) -> Flat:
        """Theta'' = -G^-1 force of a geodesic."""
        force = self.force(position, velocity)
        return -self.solver(wait_for(position, force))(force)


def fisher_metric(
    target: Target,
    prior: Quadratic,
    solver: str,
    mode: Flat | None = None,
    tolerance: float = 0.0,
) -> RiemannianMetric:
    """G = K'K + Q: Fisher information of the observed sites K'K, and a prior part Q.

    Only the solver ``"cg"`` needs a mode, where its diagonal is chosen, and a tolerance (see
    `conjugate_gradients`).
    """
    whole = fisher_form(target, prior)

    def cholesky(theta: Flat) -> Callable[[Flat], Flat]:
        return partial(solve, whole.dense(theta), assume_a="pos")

    def woodbury(theta: Flat) -> Callable[[Flat], Flat]:
        assert prior.diagonal is not None
        inverse = 1 / prior.diagonal(theta)
        matrix = root_matrix(target.form, theta, {})
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
            # cancellation where G is stiff: solve once more for the rounding error
            x = divide(b)
            return x + divide(b - times(x))

        return lambda b: lax.custom_linear_solve(times, b, refined, symmetric=True)

    def cg(theta: Flat) -> Callable[[Flat], Flat]:
        root = lax.stop_gradient(jnp.sqrt(diagonal(theta)))
        now = lax.stop_gradient(theta)

        def sketch() -> Sketch:
            return nystrom(lambda v: own.product(now, v / root) / root, probes)

        def divide(b: Flat) -> Flat:
            scaled = conjugate_gradients(
                lambda v: whole.product(theta, v / root) / root,
                *(b / root, tolerance, CG_STEPS, sketch, rank),
            )
            return scaled / root

        return divide

    if solver == "cg":
        assert mode is not None
        own = information(target, target.form, target.sum_rows)
        diagonal = _diagonal(prior, own, whole, mode)
        rank = int(np.clip(target.size**0.5, min(LEAST_RANK, target.size), MOST_RANK))
        probes = random.rademacher(random.key(0), (rank, target.size), dtype=mode.dtype)
    solvers = {"cholesky": cholesky, "woodbury": woodbury, "cg": cg}
    return RiemannianMetric(solvers[solver], whole.force)


def _diagonal(
    prior: Quadratic, own: Quadratic, whole: Quadratic, mode: Flat
) -> Callable[[Flat], Flat]:
    """A diagonal near that of G: the prior part's, alone or plus the observed sites' at the mode.

    Returns the choice with the smaller condition number at the mode.
    """
    keys = random.split(random.key(0), DIAGONAL_PROBES)
    observed = jnp.mean(lax.map(lambda key: own.perturb(mode, key) ** 2, keys), 0)
    if prior.diagonal is None:
        fixed = observed + jnp.maximum(prior.product(mode, jnp.ones_like(mode)), 0) + 1e-30
        return lambda theta: fixed

    def of_prior(theta: Flat) -> Flat:
        assert prior.diagonal is not None
        return jnp.maximum(prior.diagonal(theta), 1e-30)

    def condition(diagonal: Flat) -> jax.Array:
        root = jnp.sqrt(diagonal)

        ends = extreme_eigenvalues(
            lambda v: whole.product(mode, v / root) / root, mode.size, random.key(1), LANCZOS_STEPS
        )
        return ends.largest_magnitude / ends.smallest_positive

    # False if the comparison is not possible
    better = condition(observed + of_prior(mode)) < condition(of_prior(mode))
    return lambda theta: of_prior(theta) + jnp.where(better, observed, 0)


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


def dense_metric(metric: Callable[[Flat], jax.Array]) -> RiemannianMetric:
    """A metric given as a function theta -> G, shape (D, D); derivatives by autodiff."""

    def solver(theta: Flat) -> Callable[[Flat], Flat]:
        return partial(solve, metric(theta), assume_a="pos")

    return RiemannianMetric(solver, dense_form(metric).force)
