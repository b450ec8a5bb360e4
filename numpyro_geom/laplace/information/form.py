"""A metric J'FJ as a feature map and a root: products, force and Gram matrix without the full J'FJ.

A site's distribution has parameters eta(theta). With F(eta) the Fisher information of the
distribution and J the Jacobian of eta, the site contributes J' F J. Here it is a function
of the position and a vector, K(theta) v with K = F^{1/2}' J. Then

    G v = K' (K v)     v' G v = |K v|^2     geodesic force b = (d_v G) v - grad_theta (v' G v) / 2

are each a few Jacobian-vector products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._util import PyTree
from ...model.minibatch import Batch

Flat = jax.Array

HIGHEST = lax.Precision.HIGHEST
MAX_PAIRS = 2**23
"""Largest number of entries of a table of products of columns that `gram` stores. Beyond it, `gram`
recomputes the products."""


class Structure(NamedTuple):
    """Properties of a form that are known before its values. They save work and change no result.

    Attributes:
        constant: for each leaf of eta, whether it does not depend on the position.
        diagonal: whether the rows of the root are the entries of the only varying leaf, each times
            its own factor.
        affine: whether eta is an affine function of the position.
    """

    constant: tuple[bool, ...] = ()
    diagonal: bool = False
    affine: bool = False


class Form(NamedTuple):
    """A metric J' F J as a feature map eta(theta) and a root of F on the features' tangents.

    Attributes:
        features: ``(position, batch) -> (eta, rest)``. ``eta`` is a list of the floating-point
            arrays that may vary, ``rest`` is all else that the root needs.
        root: ``(eta, tangent, rest) -> w``, a vector with ``|w|^2 = tangent' F(eta) tangent``,
            linear in the tangent.
        structure: a `Structure`.
    """

    features: Callable[[PyTree, Batch], tuple[list, PyTree]]
    root: Callable[[list, list, PyTree], jax.Array]
    structure: Structure = Structure()


def root_product(form: Form, position: PyTree, vector: PyTree, batch: Batch) -> jax.Array:
    """K v, shape (rows of K,), for a vector with the structure of the position."""
    eta, tangent, rest = jax.jvp(
        lambda x: form.features(x, batch), (position,), (vector,), has_aux=True
    )
    return form.root(eta, tangent, rest)


def root_transpose(form: Form, position: PyTree, batch: Batch) -> Callable[[jax.Array], PyTree]:
    """The function w -> K' w."""
    eta, pull, rest = jax.vjp(lambda x: form.features(x, batch), position, has_aux=True)
    _, pull_root = jax.vjp(lambda tangent: form.root(eta, tangent, rest), eta)
    return lambda w: pull(pull_root(w)[0])[0]


def product(form: Form, position: PyTree, vector: PyTree, batch: Batch) -> PyTree:
    """G v = K' (K v), with the structure of the position."""
    return root_transpose(form, position, batch)(root_product(form, position, vector, batch))


def force(form: Form, position: PyTree, velocity: PyTree, batch: Batch) -> PyTree:
    """(d_v G) v - grad_theta (v' G v) / 2, like the position. Geodesics satisfy G theta'' = -force.

    With the path eta(theta + t v) and its derivatives eta', eta'' at t = 0, the force is
    J' [F eta'' + (d_eta' F) eta' - grad_eta (eta'^T F eta') / 2]. So derivatives of the model are
    needed along one direction only, and derivatives of F act on each row alone. For a constant F,
    the last two terms vanish.
    """

    def path(x: PyTree) -> tuple[tuple[list, list], PyTree]:
        eta, tangent, rest = jax.jvp(
            lambda y: form.features(y, batch), (x,), (velocity,), has_aux=True
        )
        return (eta, tangent), rest

    (eta, first), (_, second), rest = jax.jvp(path, (position,), (velocity,), has_aux=True)

    def apply(eta: list, tangent: list) -> list:  # F(eta) tangent
        w, pull = jax.vjp(lambda u: form.root(eta, u, rest), tangent)
        return pull(w)[0]

    def energy(eta: list) -> jax.Array:
        return jnp.sum(form.root(eta, first, rest) ** 2) / 2

    _, change = jax.jvp(lambda e: apply(e, first), (eta,), (first,))
    total = jax.tree.map(
        lambda a, b, c: a + b - c, apply(eta, second), change, jax.grad(energy)(eta)
    )
    _, pull, _ = jax.vjp(lambda x: form.features(x, batch), position, has_aux=True)
    return pull(total)[0]


def root_matrix(form: Form, position: Flat, batch: Batch) -> jax.Array:
    """K itself, shape (rows of K, D), for a flat position of length D."""
    eta, push, rest = jax.linearize(lambda x: form.features(x, batch), position, has_aux=True)
    num_rows = jax.eval_shape(lambda: form.root(eta, eta, rest)).shape[0]
    if num_rows < position.size:
        pull = root_transpose(form, position, batch)
        return jax.vmap(pull)(jnp.eye(num_rows, dtype=position.dtype))
    columns = jax.vmap(push)(jnp.eye(position.size, dtype=position.dtype))
    return jax.vmap(lambda tangent: form.root(eta, tangent, rest), 0, 1)(columns)


def gram(form: Form, position: Flat, batch: Batch) -> jax.Array:
    """K' K, shape (D, D), for a flat position of length D."""
    if form.structure.affine and form.structure.diagonal:
        origin = jnp.zeros_like(position)
        eta, push, rest = jax.linearize(lambda x: form.features(x, batch), origin, has_aux=True)
        jacobian = jax.vmap(push)(jnp.eye(position.size, dtype=position.dtype))[0]
        jacobian = jacobian.reshape(position.size, -1)  # the same at all positions
        if jacobian.size * position.size <= MAX_PAIRS:
            eta, rest = form.features(position, batch)
            factor = form.root(eta, [jnp.ones_like(eta[0])], rest) ** 2
            rows, columns = np.triu_indices(position.size)
            pairs = jacobian[rows] * jacobian[columns]
            total = jnp.matmul(pairs, factor, precision=HIGHEST)
            place = np.zeros((position.size, position.size), np.int32)
            place[rows, columns] = place[columns, rows] = np.arange(rows.size)
            return total[place]
    matrix = root_matrix(form, position, batch)
    return jnp.matmul(matrix.T, matrix, precision=HIGHEST)


def num_rows(form: Form, position: PyTree, batch: Batch) -> int:
    """Rows of K for a batch, without numerical computation."""
    return jax.eval_shape(lambda x: root_product(form, x, x, batch), position).shape[0]
