"""Metrics of a guide: quadratic forms v'G(theta)v, solves with G, and geodesic accelerations.

First the quadratic forms: information of observed sites, and the prior parts of metrics. Then the
metrics as geodesics need them. Last the choice for a guide's settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.linalg import cho_factor, cho_solve, solve

from .._linalg import dot, eigenpairs, matmul, one_by_one
from ..model.derivatives import has_forward_mode, jvp
from ..model.minibatch import Batch
from ..model.start import some_rows
from .geodesic import RiemannianMetric, monge_acceleration
from .information import form as forms
from .information.form import Flat
from .predictive import FlatPosterior
from .settings import MEAN_LIMIT, check_dense, is_wide

CG_STEPS = 1000
"""Steps after which conjugate gradients give up."""
RANK = 32
"""Rank of the sketches of G."""


# --- quadratic forms


class Quadratic(NamedTuple):
    """A positive definite matrix Q(theta) that need not be formed.

    Attributes:
        product: ``(theta, v) -> Q v``.
        force: ``(theta, v) -> (d_v Q) v - grad_theta (v'Qv) / 2``.
        dense: ``theta -> Q``, shape (D, D).
        perturb: ``(theta, rng_key) ->`` a draw from N(0, Q).
        diagonal: ``theta -> diag Q`` if Q is known to be diagonal everywhere, else None.
    """

    product: Callable[[Flat, Flat], Flat]
    force: Callable[[Flat, Flat], Flat]
    dense: Callable[[Flat], jax.Array]
    perturb: Callable[[Flat, jax.Array], Flat]
    diagonal: Callable[[Flat], Flat] | None = None


def information(posterior: FlatPosterior, form: forms.Form, total: Callable) -> Quadratic:
    """Q = K'K of a form, summed over rows by ``total``."""

    def perturb(theta: Flat, rng_key: jax.Array) -> Flat:
        def part(rows: Batch) -> Flat:
            key = rng_key
            for index in rows.values():
                key = random.fold_in(key, index[0])
            noise = random.normal(key, (forms.num_rows(form, theta, rows),), theta.dtype)
            return forms.root_transpose(form, theta, rows)(noise) / posterior.share(rows) ** 0.5

        return total(part)

    # compiled functions are traced once, for any number of solves and loops that call them
    return Quadratic(
        product=jax.jit(lambda theta, v: total(lambda rows: forms.product(form, theta, v, rows))),
        force=jax.jit(lambda theta, v: total(lambda rows: forms.force(form, theta, v, rows))),
        dense=lambda theta: total(lambda rows: forms.gram(form, theta, rows)),
        perturb=perturb,
    )


def fisher_form(posterior: FlatPosterior, prior: Quadratic) -> Quadratic:
    """G = Fisher information of the observed sites + prior part."""
    own = information(posterior, posterior.form, posterior.sum_rows)

    def perturb(theta: Flat, rng_key: jax.Array) -> Flat:
        key_rows, key_prior = random.split(rng_key)
        return own.perturb(theta, key_rows) + prior.perturb(theta, key_prior)

    return Quadratic(
        product=lambda theta, v: own.product(theta, v) + prior.product(theta, v),
        force=lambda theta, v: own.force(theta, v) + prior.force(theta, v),
        dense=lambda theta: own.dense(theta) + prior.dense(theta),
        perturb=perturb,
    )


def hessian_prior(posterior: FlatPosterior) -> Quadratic:
    """Q = the Hessian of minus the log prior, log-Jacobians of the transforms included."""
    diagonal = posterior.diagonal_prior

    def gradient(theta: Flat) -> Flat:
        return posterior.sum_prior(lambda rows: jax.grad(posterior.prior_energy)(theta, rows))

    def along(theta: Flat, v: Flat) -> Flat:
        return jvp(gradient, theta, v)[1]

    def dense(theta: Flat) -> jax.Array:
        if diagonal:
            return jnp.diag(diagonal_fn(theta))
        return jax.vmap(lambda v: along(theta, v))(jnp.eye(posterior.size, dtype=theta.dtype))

    def diagonal_fn(theta: Flat) -> Flat:
        return along(theta, jnp.ones_like(theta))

    def perturb(theta: Flat, rng_key: jax.Array) -> Flat:
        noise = random.normal(rng_key, theta.shape, theta.dtype)
        if diagonal:
            return jnp.sqrt(diagonal_fn(theta)) * noise
        return matmul(jnp.linalg.cholesky(dense(theta)), noise)

    return Quadratic(
        product=along,
        # both terms are third derivatives of one function, contracted twice with v
        force=lambda theta, v: jax.jvp(lambda x: along(x, v), (theta,), (v,))[1] / 2,
        dense=dense,
        diagonal=diagonal_fn if diagonal else None,
        perturb=perturb,
    )


def expected_prior(posterior: FlatPosterior) -> Quadratic:
    """Q = expected information of the priors, block by block: see `information.form`."""
    whole = information(posterior, posterior.expected, posterior.sum_prior)
    if not posterior.diagonal_prior:
        return whole
    return whole._replace(diagonal=lambda theta: whole.product(theta, jnp.ones_like(theta)))


# --- metrics


def fisher_metric(posterior: FlatPosterior, loc: Flat) -> RiemannianMetric:
    """The Fisher metric for geodesics from ``loc``, by the cheapest solver."""
    prior = prior_part(posterior)
    whole = fisher_form(posterior, prior)

    def cholesky(theta: Flat) -> Callable[[Flat], Flat]:
        factor = cho_factor(lax.stop_gradient(whole.dense(theta)))

        def divide(_: Callable, b: Flat) -> Flat:
            return cho_solve(factor, b)

        product = partial(whole.product, theta)  # its derivatives are cheaper than the matrix's
        return lambda b: lax.custom_linear_solve(product, b, divide, symmetric=True)

    if choose_solver(posterior) == "cholesky":
        return RiemannianMetric(cholesky, whole.force)
    own = information(posterior, posterior.form, posterior.sum_rows)
    scale = _scale(prior, own, loc)
    # a hundredth of the geodesic's own tolerance is accurate enough
    tolerance = posterior.settings.rtol / 100

    def by_products(theta: Flat) -> Callable[[Flat], Flat]:
        root, now = lax.stop_gradient((scale(theta), theta))
        sketch = nystrom(lambda v: own.product(now, v / root) / root, theta)

        def scaled(v: Flat) -> Flat:
            return sketch(whole.product(theta, sketch(v) / root) / root)

        def divide(b: Flat) -> Flat:
            return sketch(conjugate_gradients(scaled, sketch(b / root), tolerance)) / root

        return divide

    return RiemannianMetric(by_products, whole.force)


def _scale(prior: Quadratic, own: Quadratic, mode: Flat) -> Callable[[Flat], Flat]:
    """The root of a diagonal near G's: the prior part's, or G's at the mode if that is not one."""
    if prior.diagonal is not None:
        diagonal = prior.diagonal
        return lambda theta: jnp.sqrt(jnp.maximum(diagonal(theta), 1e-30))
    keys = random.split(random.key(0), 32)
    observed = jnp.mean(lax.map(lambda key: own.perturb(mode, key) ** 2, keys), 0)
    fixed = observed + jnp.maximum(prior.product(mode, jnp.ones_like(mode)), 0) + 1e-30
    return lambda theta: jnp.sqrt(fixed)


def nystrom(product: Callable[[Flat], Flat], like: Flat) -> Callable[[Flat], Flat]:
    """Product with S, near the inverse root of I + A for a positive semidefinite A.

    S = I - U diag(c) U' comes from products of A with random vectors of the shape of ``like``. It
    has no derivatives.

    Frangella, Tropp and Udell, "Randomized Nystrom preconditioning", SIAM J. Matrix Anal. Appl.
    44(2), 2023. Directions that are not found keep the identity, so that S^2 >= (I + A)^-1.
    """
    rank = min(RANK, like.size)
    probes = random.rademacher(random.key(0), (rank, like.size), dtype=like.dtype)
    pushed = lax.map(product, probes)
    core = matmul(probes, pushed.T)
    values, vectors = eigenpairs((core + core.T) / 2)
    least = rank * jnp.finfo(values.dtype).eps * values[-1]
    values = jnp.maximum(values, least + jnp.finfo(values.dtype).tiny)
    columns = matmul(pushed.T, vectors / jnp.sqrt(values))
    basis, sizes, _ = one_by_one(lambda x: jnp.linalg.svd(x, full_matrices=False))(columns)
    basis, shrink = lax.stop_gradient((basis, 1 - (1 + sizes**2) ** -0.5))
    return lambda v: v - matmul(basis, shrink * matmul(v, basis))


def conjugate_gradients(product: Callable[[Flat], Flat], b: Flat, tolerance: float) -> Flat:
    """``G^-1 b`` by conjugate gradients, for a G >= I that is well scaled; NaN without convergence.

    The iteration ends when the residual r has ``|r|^2 <= tolerance^2 x'b``. With G >= I this bounds
    the relative error of x in the norm of G. (The criterion of `jax.scipy.sparse.linalg.cg`,
    ``|r| <= tolerance |b|``, does not: with it geodesics took four times as many steps.) If the
    true residual b - G x is above 30 tolerances (in float32 3e-2), the solve has failed.
    In float32 the tolerance is at least 1e-4.
    """
    single = b.dtype != jnp.float64
    tolerance = max(tolerance, 1e-4 if single else 1e-9)
    most = max(30 * tolerance, 3e-2 if single else 0.0)

    def solve(product: Callable[[Flat], Flat], b: Flat) -> Flat:
        def proceed(carry: tuple) -> jax.Array:
            x, _, _, size, count = carry
            return (size > tolerance**2 * dot(x, b)) & (count < CG_STEPS)

        def advance(carry: tuple) -> tuple:
            x, residual, direction, size, count = carry
            pushed = product(direction)
            length = size / dot(direction, pushed)
            x, residual = x + length * direction, residual - length * pushed
            new = dot(residual, residual)
            return x, residual, residual + new / size * direction, new, count + 1

        start = jnp.zeros_like(b), b, b, dot(b, b), jnp.zeros((), jnp.int32)
        x, *_ = lax.while_loop(proceed, advance, start)
        left = b - product(x)
        return jnp.where(dot(left, left) <= most**2 * dot(x, b), x, jnp.nan)

    return lax.custom_linear_solve(product, b, solve, symmetric=True)


def dense_metric(metric: Callable[[Flat], jax.Array]) -> RiemannianMetric:
    """A metric given as a function theta -> G, shape (D, D); derivatives by autodiff."""

    def solver(theta: Flat) -> Callable[[Flat], Flat]:
        return partial(solve, metric(theta), assume_a="pos")

    def force(theta: Flat, v: Flat) -> Flat:
        def product(x: Flat) -> Flat:
            return matmul(metric(x), v)

        _, change = jax.jvp(product, (theta,), (v,))
        return change - jax.grad(lambda x: dot(v, product(x)))(theta) / 2

    return RiemannianMetric(solver, force)


# --- the choice for a guide


def prior_part(posterior: FlatPosterior) -> Quadratic:
    """The prior part of the Fisher metric."""
    make = hessian_prior if posterior.settings.prior_metric == "hessian" else expected_prior
    return make(posterior)


def fisher_of(posterior: FlatPosterior) -> Quadratic:
    """The Fisher metric, as a quadratic form."""
    return fisher_form(posterior, prior_part(posterior))


def acceleration_fn(posterior: FlatPosterior, loc: Flat) -> Callable[[Flat, Flat], Flat]:
    """``(position, velocity) -> theta''`` of the geodesics from ``loc``."""
    metric = posterior.settings.metric
    if metric in ("monge", "monge-log"):
        return monge_acceleration(jax.grad(posterior.energy), posterior.settings.alpha2)
    if isinstance(metric, RiemannianMetric):
        return metric.acceleration
    if callable(metric):
        given: Callable[[Any], Any] = metric
        return dense_metric(lambda theta: jnp.asarray(given(posterior.unravel(theta)))).acceleration
    return fisher_metric(posterior, loc).acceleration


def choose_solver(posterior: FlatPosterior) -> str:
    """The requested solver, or the cheaper one."""
    chosen, size, structure = posterior.settings.solver, posterior.size, posterior.structure
    if chosen == "auto":
        # forming a matrix takes one product per column; only a linear map is cheaper
        cheap = min(size, posterior.num_outputs) <= MEAN_LIMIT or (
            structure.affine and structure.diagonal
        )
        chosen = "cholesky" if cheap and not is_wide(size) else "cg"
    if chosen == "cholesky":
        check_dense(size, "solver='cholesky'", "solver='cg'")
    return chosen


def learn(posterior: FlatPosterior, start: Flat) -> FlatPosterior:
    """The posterior, of concrete data, with its structure, learned from its program and values."""
    settings = posterior.settings
    if settings.mode == "euclidean" and "fisher" not in (settings.precision, settings.metric):
        return posterior
    position, model = posterior.unravel(start), posterior.model
    form = forms.likelihood_form(model)
    rows = some_rows(model.plan)
    needed: list[Callable] = [lambda x: form.features(x, rows)[0]]
    if settings.metric == "fisher" or settings.mode != "euclidean":  # then G moves
        needed.append(lambda x: jax.jvp(needed[0], (x,), (x,))[1])
    if not all(has_forward_mode(fn, position) for fn in needed):
        raise ValueError(
            "metric='fisher' expected a model with forward-mode derivatives, twice, got one "
            "without, as that of jax.custom_vjp, of a callback, of jax.scipy.special.gammainc in "
            "its parameter, of jax.experimental.ode.odeint and of diffrax with its default "
            "adjoint. Pass adjoint=diffrax.DirectAdjoint() or diffrax.ForwardMode() to the "
            "solver; or choose metric='monge' or 'euclidean' with precision='hessian' and "
            "mode='euclidean'"
        )
    structure = forms.learn_structure(model, position)
    posterior = replace(posterior, structure=structure)
    if posterior.num_outputs == 0 and posterior.settings.metric == "fisher":
        raise ValueError(
            "the model has no observed site with a distribution (numpyro.factor has none), and "
            "metric='fisher' is the information of such sites: expected "
            "`numpyro.sample(..., obs=data)`. Pass the data, metric='euclidean', or a function of "
            "the position that returns your metric"
        )
    return replace(posterior, diagonal_prior=_is_diagonal(posterior, start))


def _is_diagonal(posterior: FlatPosterior, start: Flat) -> bool:
    """Whether Q is diagonal: whether Q z is Q 1 times z, entry by entry, for a random z."""

    def gap(theta: Flat, z: Flat) -> jax.Array:
        product = prior_part(posterior).product
        diagonal = product(theta, jnp.ones_like(theta))
        scale = jnp.max(jnp.abs(diagonal)) * jnp.max(jnp.abs(z))
        return jnp.max(jnp.abs(product(theta, z) - diagonal * z)) / scale

    key_theta, key_z = random.split(random.key(1))
    theta = start + random.normal(key_theta, start.shape) / 10
    z = random.normal(key_z, theta.shape, theta.dtype)
    return bool(jax.jit(gap)(theta.astype(z.dtype), z) < 1e-4)
