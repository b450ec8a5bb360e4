"""The Fisher metric J'FJ of a model as feature maps and roots, without the full J'FJ.

A site's distribution has parameters eta(theta). With F(eta) the Fisher information of the
distribution and J the Jacobian of eta, the site contributes J' F J. Here it is a function
of the position and a vector, K(theta) v with K = F^{1/2}' J. Then

    G v = K' (K v)     v' G v = |K v|^2     geodesic force b = (d_v G) v - grad_theta (v' G v) / 2

are each a few Jacobian-vector products. First the forms and their products; then the forms of a
NumPyro model, from the distributions of its sites.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.extend.core import JaxprEqn

from ..._util import AT_ONCE, PyTree
from ...model.jaxprs import followed
from ...model.minibatch import Batch, gather_local
from ...model.model import Model
from ...model.start import some_rows
from .prior import prior_root, relative_to_location
from .root import fisher_root

Flat = jax.Array

HIGHEST = lax.Precision.HIGHEST


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
        if jacobian.size * position.size <= AT_ONCE:
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


# --- forms of a model


def likelihood_form(model: Model, structure: Structure | None = None) -> Form:
    """The Fisher information of a model's observed sites, in unconstrained space.

    Without a structure from `learn_structure`, no work is saved.
    """
    structure = Structure() if structure is None else structure
    names = model.of_kind("observed")

    def features(position: PyTree, batch: Batch) -> tuple[list, PyTree]:
        trace = model.trace(position, batch, unconstrained=True)
        weights = {name: _weight(trace[name]) for name in names}
        return _split({name: trace[name]["fn"] for name in names}, weights, structure.constant)

    def root(eta: list, tangent: list, rest: PyTree) -> jax.Array:
        fns, tangents, weights = _merge(eta, tangent, rest)
        parts = [_weighted(fisher_root(fns[n], tangents[n]), weights[n]) for n in fns]
        return jnp.concatenate(parts) if parts else jnp.zeros((0,), jnp.result_type(float))

    return Form(features, root, structure)


def prior_form(model: Model) -> Form:
    """The expected information of a model's priors, block by block; positive definite.

    Each latent site contributes two parts: the expected negative Hessian of its log density in its
    own unconstrained value, and the Fisher information of its distribution in the values of its
    parent sites. There are also mixed blocks between a value and the parameters of its
    distribution. Only the blocks with the location of a location-scale family are included.
    """
    names = model.of_kind("latent")

    def features(position: PyTree, batch: Batch) -> tuple[list, PyTree]:
        trace = model.trace(position, batch, unconstrained=True)
        values = gather_local(model.plan, position, batch)
        tree = {name: (trace[name]["fn"], values[name]) for name in names}
        return _split(tree, {name: _weight(trace[name]) for name in names})

    def root(eta: list, tangent: list, rest: PyTree) -> jax.Array:
        trees, tangents, weights = _merge(eta, tangent, rest)
        parts = []
        for name, (fn, _) in trees.items():
            of_fn, of_value = relative_to_location(fn, *tangents[name])
            parts.append(_weighted(prior_root(fn, of_value), weights[name]))
            if jax.tree.leaves(fn):
                parts.append(_weighted(fisher_root(fn, of_fn), weights[name]))
        return jnp.concatenate(parts)

    return Form(features, root)


def prior_energy(model: Model, position: PyTree, batch: Batch) -> jax.Array:
    """The part of the energy that `likelihood_form` leaves out.

    It is minus the log density of the latent sites, with the log-Jacobians of their transforms, and
    of ``numpyro.factor`` sites, which have no distribution and so no Fisher information.
    """
    observed, total = model.of_kind("observed"), jnp.zeros(())
    for name, site in model.trace(position, batch, unconstrained=True).items():
        if site["type"] != "sample" or name in observed:
            continue
        log_prob = site["fn"].log_prob(site["value"])
        if site["scale"] is not None:
            log_prob = site["scale"] * log_prob
        total = total - jnp.sum(log_prob)
    return total


# --- what a form's features depend on


def learn_structure(model: Model, position: PyTree) -> Structure:
    """The `Structure` of a likelihood form, from its program and one set of concrete values."""
    form, rows = likelihood_form(model), some_rows(model.plan)
    constant = tuple(not d for d in dependence(lambda x: form.features(x, rows)[0], position))
    form = likelihood_form(model, Structure(constant))

    def tangents(x: PyTree, v: PyTree) -> list:
        return jax.jvp(lambda y: form.features(y, rows)[0], (x,), (v,))[1]

    affine = all(0 not in d for d in dependence(tangents, position, position))

    def is_diagonal(position: PyTree, rng_key: jax.Array) -> jax.Array | bool:
        eta, rest = form.features(position, rows)
        if len(eta) != 1 or form.root(eta, eta, rest).size != eta[0].size:
            return False
        some = random.normal(rng_key, eta[0].shape, eta[0].dtype)
        expected = form.root(eta, [jnp.ones_like(some)], rest) * some.reshape(-1)
        close = jnp.abs(form.root(eta, [some], rest) - expected) <= 1e-3 * jnp.abs(expected)
        return jnp.all(close)

    diagonal = bool(jax.jit(is_diagonal)(position, random.key(1)))
    return Structure(constant, diagonal, affine)


def dependence(fn: Callable, *args: Any) -> list[frozenset[int]]:
    """For each output leaf of ``fn(*args)``, the arguments (by position) that it may depend on.

    An argument that is not in the set has no influence. An argument in the set may have none.

    ``args`` are pytrees of arrays, or of their shapes.
    """
    counts = [len(jax.tree.leaves(a)) for a in args]
    inputs = [frozenset([i]) for i, n in enumerate(counts) for _ in range(n)]

    def all_of(equation: JaxprEqn, given: list[frozenset[int]]) -> list[frozenset[int]]:
        # also of loops and branches, each output may depend on each input
        return [frozenset().union(*given)] * len(equation.outvars)

    return followed(jax.make_jaxpr(fn)(*args).jaxpr, inputs, all_of, frozenset())


# --- distributions as lists of arrays


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """Static data, as a pytree without leaves."""

    treedef: Any
    floating: tuple[bool, ...]


def _weight(site: Mapping[str, Any]) -> Any:
    scale = site["scale"]
    return jnp.ones(()) if scale is None else jnp.asarray(scale, jnp.result_type(float))


def _weighted(w: jax.Array, weight: jax.Array) -> jax.Array:
    """Rows of a root times the square roots of their weights, as one vector."""
    root = jnp.sqrt(weight).astype(w.dtype)
    return (w * root[..., None] if jnp.ndim(root) else w * root).reshape(-1)


def is_float(x: Any) -> bool:
    """Whether ``x`` is an array or number of floating-point type."""
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _split(tree: PyTree, others: PyTree, constant: tuple[bool, ...] = ()) -> tuple[list, PyTree]:
    """Floating-point leaves that may vary, and the rest, from which `_merge` rebuilds the tree."""
    leaves, treedef = jax.tree.flatten(tree)
    fixed_ones = iter(constant)
    floating = tuple(is_float(x) and not next(fixed_ones, False) for x in leaves)
    eta = [jnp.asarray(x) for x, yes in zip(leaves, floating, strict=True) if yes]
    fixed = [x for x, yes in zip(leaves, floating, strict=True) if not yes]
    return eta, (fixed, others, _Static(treedef, floating))


def _merge(eta: list, tangent: list, rest: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """The tree of values, the tree of tangents, and the other data that `_split` received.

    Leaves that do not vary have the tangent None, and so `fisher_root` leaves out the components of
    these leaves.
    """
    fixed, others, static = rest
    treedef, floating = static.treedef, static.floating

    def build(given: list, constants: list) -> PyTree:
        changing, constant = iter(given), iter(constants)
        return jax.tree.unflatten(
            treedef, [next(changing) if yes else next(constant) for yes in floating]
        )

    still = [None if is_float(x) else np.zeros(jnp.shape(x), jax.dtypes.float0) for x in fixed]
    return build(eta, fixed), build(tangent, still), others
