"""Metrics of a guide: solves and geodesic accelerations on flat positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.linalg import cho_factor, cho_solve, solve

from .._linalg import conjugate_gradients, wait_for
from ..information.form import HIGHEST, Flat, root_matrix
from ..warmup.lanczos import extreme_eigenvalues
from .quadratic import Quadratic, dense_form, fisher_form, information
from .target import Target

CG_STEPS = 1000
"""Steps after which conjugate gradients give up."""
DIAGONAL_PROBES = 32
LANCZOS_STEPS = 30


class RiemannianMetric(NamedTuple):
    """What geodesics ask of a metric G(theta), on flat positions of length D.

    Attributes:
        solver: ``theta -> (b -> G^-1 b)``; the work on ``theta`` alone is done once.
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

    Only the solver ``"cg"`` needs a mode, where its preconditioner is made, and a tolerance, see
    `conjugate_gradients`.
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
            # the difference cancels where G is stiff: once more for what rounding has left
            x = divide(b)
            return x + divide(b - times(x))

        return lambda b: lax.custom_linear_solve(times, b, refined, symmetric=True)

    def cg(theta: Flat) -> Callable[[Flat], Flat]:
        along = partial(whole.product, theta)
        return lambda b: conjugate_gradients(along, b, precondition, tolerance, CG_STEPS)

    if solver == "cg":
        assert mode is not None
        precondition = _preconditioner(target, prior, whole.product, mode)
    solvers = {"cholesky": cholesky, "woodbury": woodbury, "cg": cg}
    return RiemannianMetric(solvers[solver], whole.force)


def _preconditioner(
    target: Target, prior: Quadratic, product: Callable[[Flat, Flat], Flat], mode: Flat
) -> Callable[[Flat], Flat]:
    """A diagonal approximate inverse of G from the mode: by the prior, or by all of G's diagonal.

    The one with the smaller condition number there. Not a factor of G: that of a network turns so
    fast along a geodesic that the mode's is worse than none.
    """
    draw = information(target, target.form, target.sum_rows).perturb
    keys = random.split(random.key(0), DIAGONAL_PROBES)
    own = jnp.mean(lax.map(lambda key: draw(mode, key) ** 2, keys), 0)
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


def dense_metric(metric: Callable[[Flat], jax.Array]) -> RiemannianMetric:
    """A metric given as a function theta -> G, shape (D, D); derivatives by autodiff."""

    def solver(theta: Flat) -> Callable[[Flat], Flat]:
        return partial(solve, metric(theta), assume_a="pos")

    return RiemannianMetric(solver, dense_form(metric).force)
