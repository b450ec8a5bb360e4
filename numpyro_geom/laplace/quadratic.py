"""Quadratic forms v'Q(theta)v: information of observed sites, and the prior parts of metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import random

from ..model.minibatch import Batch
from .information import form as forms
from .information.form import HIGHEST, Flat
from .target import Target


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


def information(target: Target, form: forms.Form, total: Callable) -> Quadratic:
    """Q = K'K of a form, summed over rows by ``total``."""

    def perturb(theta: Flat, rng_key: jax.Array) -> Flat:
        def part(rows: Batch) -> Flat:
            key = rng_key
            for index in rows.values():
                key = random.fold_in(key, index[0])
            noise = random.normal(key, (forms.num_rows(form, theta, rows),), theta.dtype)
            return forms.root_transpose(form, theta, rows)(noise) / target.share(rows) ** 0.5

        return total(part)

    # compiled functions are traced once, for any number of solves and loops that call them
    return Quadratic(
        product=jax.jit(lambda theta, v: total(lambda rows: forms.product(form, theta, v, rows))),
        force=jax.jit(lambda theta, v: total(lambda rows: forms.force(form, theta, v, rows))),
        dense=lambda theta: total(lambda rows: forms.gram(form, theta, rows)),
        perturb=perturb,
    )


def fisher_form(target: Target, prior: Quadratic) -> Quadratic:
    """G = Fisher information of the observed sites + prior part."""
    own = information(target, target.form, target.sum_rows)

    def perturb(theta: Flat, rng_key: jax.Array) -> Flat:
        key_rows, key_prior = random.split(rng_key)
        return own.perturb(theta, key_rows) + prior.perturb(theta, key_prior)

    return Quadratic(
        product=lambda theta, v: own.product(theta, v) + prior.product(theta, v),
        force=lambda theta, v: own.force(theta, v) + prior.force(theta, v),
        dense=lambda theta: own.dense(theta) + prior.dense(theta),
        perturb=perturb,
    )


def hessian_prior(target: Target, *, diagonal: bool) -> Quadratic:
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
        return jnp.sqrt(diagonal_fn(theta)) * noise if diagonal else _colour(dense(theta), noise)

    return Quadratic(
        product=along,
        # both terms are third derivatives of one function, contracted twice with v
        force=lambda theta, v: jax.jvp(lambda x: along(x, v), (theta,), (v,))[1] / 2,
        dense=dense,
        diagonal=diagonal_fn if diagonal else None,
        perturb=perturb,
    )


def expected_prior(target: Target, *, diagonal: bool) -> Quadratic:
    """Q = expected information of the priors, block by block: see `information.model`."""
    whole = information(target, target.expected, target.sum_prior)
    if not diagonal:
        return whole
    return whole._replace(diagonal=lambda theta: whole.product(theta, jnp.ones_like(theta)))


def softabs_prior(target: Target, *, diagonal: bool, sharpness: float = 1e6) -> Quadratic:
    """Q = f(H), f(x) = x coth(sharpness x): the smoothed absolute value of the prior's Hessian.

    Betancourt, "A general metric for Riemannian manifold Hamiltonian Monte Carlo", 2013.
    """
    hessian = hessian_prior(target, diagonal=diagonal)
    if hessian.diagonal is None:
        return dense_form(lambda theta: _softabs(hessian.dense(theta), sharpness))
    values = hessian.diagonal

    def diagonal_fn(theta: Flat) -> Flat:
        return _coth(values(theta), sharpness)

    return dense_form(lambda theta: jnp.diag(diagonal_fn(theta)))._replace(diagonal=diagonal_fn)


def dense_form(dense: Callable[[Flat], jax.Array]) -> Quadratic:
    """Q from a function theta -> Q, shape (D, D); derivatives by autodiff."""

    def product(theta: Flat, v: Flat) -> Flat:
        return jnp.matmul(dense(theta), v, precision=HIGHEST)

    def force(theta: Flat, v: Flat) -> Flat:
        _, change = jax.jvp(lambda x: product(x, v), (theta,), (v,))
        return change - jax.grad(lambda x: jnp.vdot(v, product(x, v), precision=HIGHEST))(theta) / 2

    def perturb(theta: Flat, rng_key: jax.Array) -> Flat:
        return _colour(dense(theta), random.normal(rng_key, theta.shape, theta.dtype))

    return Quadratic(product, force, dense, perturb)


def _colour(matrix: jax.Array, noise: Flat) -> Flat:
    """A draw from N(0, matrix)."""
    return jnp.matmul(jnp.linalg.cholesky(matrix), noise, precision=HIGHEST)


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
