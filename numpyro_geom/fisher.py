"""Fisher metric of a NumPyro model, from the distributions of its sites and never formed whole.

A site's distribution has parameters eta(theta); with F(eta) the Fisher information of the
distribution and J the Jacobian of eta, the site contributes J' F J. Here it is kept as a function
of the position and a vector, K(theta) v with K = F^{1/2}' J, so that

    G v = K' (K v)     v' G v = |K v|^2     geodesic force b = (d_v G) v - grad_theta (v' G v) / 2

are each a few Jacobian-vector products. See `numpyro_geom.information.fisher_root` for F.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.infer.util import _unconstrain_reparam

from ._dependence import dependence
from .information import fisher_root
from .target import minibatch
from .target.minibatch import Batch, Subsampling
from .value_information import value_root

PyTree = Any
Flat = jax.Array

HIGHEST = lax.Precision.HIGHEST
MAX_PAIRS = 2**23
"""Entries of a table of products of columns that `gram` may keep instead of multiplying anew."""


class Structure(NamedTuple):
    """What of a form can be known before any value: it saves work and changes no result.

    Attributes:
        constant: for each leaf of eta, whether it does not depend on the position.
        diagonal: whether the rows of the root are the entries of the one varying leaf, each times
            a factor of its own.
        affine: whether eta is an affine function of the position.
    """

    constant: tuple[bool, ...] = ()
    diagonal: bool = False
    affine: bool = False


class Form(NamedTuple):
    """A metric J' F J as a feature map eta(theta) and a root of F on the features' tangents.

    Attributes:
        features: ``(position, batch) -> (eta, rest)``: ``eta`` is a list of floating point
            arrays, ``rest`` what else the root needs and what does not depend on the position.
        root: ``(eta, tangent, rest) -> w``, a vector with ``|w|^2 = tangent' F(eta) tangent``,
            linear in the tangent.
        structure: see there.
    """

    features: Callable[[PyTree, Batch], tuple[list, PyTree]]
    root: Callable[[list, list, PyTree], jax.Array]
    structure: Structure = Structure()


@jax.tree_util.register_static
class _Static:
    """What is known without values (a tree structure), as a pytree without leaves."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def root_product(form: Form, position: PyTree, vector: PyTree, batch: Batch) -> jax.Array:
    """K v, shape (rows of K,).

    Args:
        form: from `likelihood_form` or `prior_form`.
        position: where.
        vector: v, like the position.
        batch: rows of the data, as a `numpyro_geom.target.potential.Potential` gives them.
    """
    eta, tangent, rest = jax.jvp(
        lambda x: form.features(x, batch), (position,), (vector,), has_aux=True
    )
    return form.root(eta, tangent, rest)


def root_transpose(form: Form, position: PyTree, batch: Batch) -> Callable[[jax.Array], PyTree]:
    """The function w -> K' w."""
    eta, pull, rest = jax.vjp(lambda x: form.features(x, batch), position, has_aux=True)
    _, pull_root = jax.vjp(lambda tangent: form.root(eta, tangent, rest), _zeros(eta))
    return lambda w: pull(pull_root(w)[0])[0]


def product(form: Form, position: PyTree, vector: PyTree, batch: Batch) -> PyTree:
    """G v = K' (K v), like the position."""
    return root_transpose(form, position, batch)(root_product(form, position, vector, batch))


def force(form: Form, position: PyTree, velocity: PyTree, batch: Batch) -> PyTree:
    """(d_v G) v - grad_theta (v' G v) / 2, like the position; geodesics have G theta'' = -force.

    With the path eta(theta + t v) and its derivatives eta', eta'' at t = 0 this is
    J' [F eta'' + (d_eta' F) eta' - grad_eta (eta'' F eta') / 2]: derivatives of the model are taken
    along one direction only, and those of F act on each row alone. For a constant F the last two
    terms vanish.
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
    num_rows = jax.eval_shape(lambda: form.root(eta, _zeros(eta), rest)).shape[0]
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
    """Rows of K for a batch, without computing anything."""
    return jax.eval_shape(lambda x: root_product(form, x, x, batch), position).shape[0]


def likelihood_form(
    model: Callable,
    plan: Subsampling,
    args: tuple,
    kwargs: dict,
    *,
    empirical: bool = False,
    structure: Structure | None = None,
) -> Form:
    """The Fisher information of a model's observed sites, on its unconstrained space.

    Args:
        model: a NumPyro model, ``param`` sites substituted.
        plan: from `numpyro_geom.target.plates.read_subsampling`.
        args: model arguments.
        kwargs: model keyword arguments.
        empirical: the outer products of the scores at the data in place of their expectations.
            A comparison only: it is not the Fisher information.
        structure: from `learn_structure`; None for one that saves nothing.
    """
    if structure is None:
        structure = Structure()
    if empirical:  # the score has no entries of its own for each leaf
        structure = structure._replace(diagonal=False)

    def features(position: PyTree, batch: Batch) -> tuple[list, PyTree]:
        trace = trace_sites(model, plan, args, kwargs, position, batch)
        sites = {name: site for name, site in trace.items() if has_information(site)}
        others = {n: (_weight(s), s["value"] if empirical else ()) for n, s in sites.items()}
        return _split({n: s["fn"] for n, s in sites.items()}, others, structure.constant)

    def root(eta: list, tangent: list, rest: PyTree) -> jax.Array:
        fns, tangents, others = _merge(eta, tangent, rest, zeros=empirical)
        parts = []
        for name, fn in fns.items():
            weight, value = others[name]
            if empirical:
                _, score = jax.jvp(lambda d, y=value: d.log_prob(y), (fn,), (tangents[name],))
                parts.append(_weighted(score[..., None], weight))
            else:
                parts.append(_weighted(fisher_root(fn, tangents[name]), weight))
        return jnp.concatenate(parts) if parts else jnp.zeros((0,), jnp.result_type(float))

    return Form(features, root, structure)


def learn_structure(
    model: Callable, plan: Subsampling, args: tuple, kwargs: dict, position: PyTree
) -> Structure:
    """The `Structure` of a likelihood form, from a look at its program and at one set of values.

    Args:
        model: a NumPyro model.
        plan: its plan.
        args: model arguments, not traced.
        kwargs: model keyword arguments.
        position: any position, not traced.
    """
    form = likelihood_form(model, plan, args, kwargs)
    constant = tuple(not d for d in dependence(lambda x: form.features(x, {})[0], position))
    structure = Structure(constant)
    form = likelihood_form(model, plan, args, kwargs, structure=structure)

    def tangents(x: PyTree, v: PyTree) -> list:
        return jax.jvp(lambda y: form.features(y, {})[0], (x,), (v,))[1]

    affine = all(0 not in d for d in dependence(tangents, position, position))

    def is_diagonal(position: PyTree, rng_key: jax.Array) -> jax.Array | bool:
        eta, rest = form.features(position, {})
        if len(eta) != 1 or form.root(eta, eta, rest).size != eta[0].size:
            return False
        some = random.normal(rng_key, eta[0].shape, eta[0].dtype)
        expected = form.root(eta, [jnp.ones_like(some)], rest) * some.reshape(-1)
        close = jnp.abs(form.root(eta, [some], rest) - expected) <= 1e-3 * jnp.abs(expected)
        return jnp.all(close)

    diagonal = bool(jax.jit(is_diagonal)(position, random.key(1)))
    return Structure(constant, diagonal, affine)


def prior_form(model: Callable, plan: Subsampling, args: tuple, kwargs: dict) -> Form:
    """The expected information of a model's priors, block by block; positive definite.

    Each latent site gives the expected negative Hessian of its log density in its own unconstrained
    value, and the Fisher information of its distribution in the values of the sites above it. Mixed
    blocks between a value and the parameters of its own distribution are left out.
    """

    def features(position: PyTree, batch: Batch) -> tuple[list, PyTree]:
        trace = trace_sites(model, plan, args, kwargs, position, batch)
        values = minibatch.gather_local(plan, position, batch)
        sites = {n: s for n, s in trace.items() if s["type"] == "sample" and n in values}
        tree = {name: (site["fn"], values[name]) for name, site in sites.items()}
        return _split(tree, {name: _weight(site) for name, site in sites.items()})

    def root(eta: list, tangent: list, rest: PyTree) -> jax.Array:
        trees, tangents, weights = _merge(eta, tangent, rest)
        parts = []
        for name, (fn, _) in trees.items():
            fn_tangent, value_tangent = tangents[name]
            own = value_root(fn, value_tangent)
            parts.append(_weighted(own, weights[name]))
            if jax.tree.leaves(fn):
                parts.append(_weighted(fisher_root(fn, fn_tangent), weights[name]))
        return jnp.concatenate(parts)

    return Form(features, root)


def prior_energy_fn(
    model: Callable, plan: Subsampling, args: tuple, kwargs: dict
) -> Callable[[PyTree, Batch], jax.Array]:
    """The part of the energy that `likelihood_form` leaves out.

    That is minus the log density of the latent sites, with the log-Jacobians of their transforms,
    and of ``numpyro.factor`` sites, which have no distribution to take a Fisher information of.
    """

    def energy(position: PyTree, batch: Batch) -> jax.Array:
        total = jnp.zeros(())
        for site in trace_sites(model, plan, args, kwargs, position, batch).values():
            if site["type"] != "sample" or has_information(site):
                continue
            log_prob = site["fn"].log_prob(site["value"])
            if site["scale"] is not None:
                log_prob = site["scale"] * log_prob
            total = total - jnp.sum(log_prob)
        return total

    return energy


def trace_sites(
    model: Callable, plan: Subsampling, args: tuple, kwargs: dict, position: PyTree, batch: Batch
) -> Mapping[str, dict]:
    """The sites of a model run at an unconstrained position on some of its rows."""
    run = handlers.substitute(
        minibatch.SubsamplePlates(model, batch, plan.sizes),
        substitute_fn=partial(_unconstrain_reparam, minibatch.gather_local(plan, position, batch)),
    )
    return handlers.trace(run).get_trace(*args, **kwargs)


def has_information(site: Mapping[str, Any]) -> bool:
    """Whether a site is observed and has a distribution, which a ``numpyro.factor`` has not."""
    return (
        site["type"] == "sample"
        and site["is_observed"]
        and not isinstance(_base(site["fn"]), dist.Unit)
    )


def _base(fn: Any) -> Any:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def _weight(site: Mapping[str, Any]) -> Any:
    return (
        jnp.ones(())
        if site["scale"] is None
        else jnp.asarray(site["scale"], jnp.result_type(float))
    )


def _weighted(w: jax.Array, weight: jax.Array) -> jax.Array:
    """Rows of a root times the square root of their weight, as one vector."""
    root = jnp.sqrt(weight).astype(w.dtype)
    return (w * root[..., None] if jnp.ndim(root) else w * root).reshape(-1)


def _zeros(leaves: list) -> list:
    return [jnp.zeros(jnp.shape(x), jnp.result_type(x)) for x in leaves]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _split(tree: PyTree, others: PyTree, constant: tuple[bool, ...] = ()) -> tuple[list, PyTree]:
    """Floating point leaves that may vary, and the rest from which `_merge` rebuilds the tree."""
    leaves, treedef = jax.tree.flatten(tree)
    fixed_ones = iter(constant)
    floating = tuple(_is_float(x) and not next(fixed_ones, False) for x in leaves)
    eta = [jnp.asarray(x) for x, yes in zip(leaves, floating, strict=True) if yes]
    fixed = [x for x, yes in zip(leaves, floating, strict=True) if not yes]
    return eta, (fixed, others, _Static((treedef, floating)))


def _merge(
    eta: list, tangent: list, rest: PyTree, *, zeros: bool = False
) -> tuple[PyTree, PyTree, PyTree]:
    """The tree of values, that of tangents, and what was handed to `_split` beside it.

    Leaves that do not vary have the tangent None, with which `fisher_root` leaves out what only
    they would reach, or zeros.
    """
    fixed, others, static = rest
    treedef, floating = static.value

    def build(given: list, constants: list) -> PyTree:
        changing, constant = iter(given), iter(constants)
        return jax.tree.unflatten(
            treedef, [next(changing) if yes else next(constant) for yes in floating]
        )

    def still(x: Any) -> Any:
        if not _is_float(x):
            return np.zeros(jnp.shape(x), jax.dtypes.float0)
        return jnp.zeros_like(x) if zeros else None

    return build(eta, fixed), build(tangent, [still(x) for x in fixed]), others
