"""Fisher metric of a NumPyro model, from the distributions of its sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from jax.extend.core import JaxprEqn
from numpyro import handlers
from numpyro.infer.util import _unconstrain_reparam

from ..._util import PyTree
from ...model import minibatch
from ...model.jaxprs import followed
from ...model.minibatch import Batch, Subsampling
from .form import Form, Structure
from .prior import prior_root, relative_to_location
from .root import fisher_root

Sites = Callable[[PyTree, Batch], tuple[Mapping[str, dict], dict]]
"""Function of an unconstrained position and rows: a trace of the model, and its latent values."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """Static data, as a pytree without leaves."""

    treedef: Any
    floating: tuple[bool, ...]


def model_sites(model: Callable, plan: Subsampling, args: tuple, kwargs: dict) -> Sites:
    """The sites of a model, with ``param`` sites substituted, on some of its rows."""

    def sites(position: PyTree, batch: Batch) -> tuple[Mapping[str, dict], dict]:
        values = minibatch.gather_local(plan, position, batch)
        run = handlers.substitute(
            minibatch.SubsamplePlates(model, batch, plan.sizes),
            substitute_fn=partial(_unconstrain_reparam, values),
        )
        return handlers.trace(run).get_trace(*args, **kwargs), values

    return sites


def likelihood_form(
    sites: Sites, *, empirical: bool = False, structure: Structure | None = None
) -> Form:
    """The Fisher information of a model's observed sites, in unconstrained space.

    With ``empirical``, the outer products of the scores at the data replace their expectations.
    This is not the Fisher information, and is for comparison only. Without a structure from
    `learn_structure`, no work is saved.
    """
    structure = Structure() if structure is None else structure
    if empirical:  # the score has no separate entries for each leaf
        structure = structure._replace(diagonal=False)

    def features(position: PyTree, batch: Batch) -> tuple[list, PyTree]:
        found = {n: s for n, s in sites(position, batch)[0].items() if has_information(s)}
        others = {n: (_weight(s), s["value"] if empirical else ()) for n, s in found.items()}
        return _split({n: s["fn"] for n, s in found.items()}, others, structure.constant)

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


def learn_structure(sites: Sites, position: PyTree) -> Structure:
    """The `Structure` of a likelihood form, from its program and one set of concrete values."""
    form = likelihood_form(sites)
    constant = tuple(not d for d in dependence(lambda x: form.features(x, {})[0], position))
    structure = Structure(constant)
    form = likelihood_form(sites, structure=structure)

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


def prior_form(sites: Sites) -> Form:
    """The expected information of a model's priors, block by block; positive definite.

    Each latent site contributes two parts: the expected negative Hessian of its log density in its
    own unconstrained value, and the Fisher information of its distribution in the values of its
    parent sites. There are also mixed blocks between a value and the parameters of its
    distribution. Only those with the location of a location-scale family are included.
    """

    def features(position: PyTree, batch: Batch) -> tuple[list, PyTree]:
        trace, values = sites(position, batch)
        latent = {n: s for n, s in trace.items() if s["type"] == "sample" and n in values}
        tree = {name: (site["fn"], values[name]) for name, site in latent.items()}
        return _split(tree, {name: _weight(site) for name, site in latent.items()})

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


def prior_energy(sites: Sites, position: PyTree, batch: Batch) -> jax.Array:
    """The part of the energy that `likelihood_form` leaves out.

    It is minus the log density of the latent sites, with the log-Jacobians of their transforms, and
    of ``numpyro.factor`` sites, which have no distribution and so no Fisher information.
    """
    total = jnp.zeros(())
    for site in sites(position, batch)[0].values():
        if site["type"] != "sample" or has_information(site):
            continue
        log_prob = site["fn"].log_prob(site["value"])
        if site["scale"] is not None:
            log_prob = site["scale"] * log_prob
        total = total - jnp.sum(log_prob)
    return total


def has_information(site: Mapping[str, Any]) -> bool:
    """Whether a site is observed and has a distribution; a ``numpyro.factor`` site has none."""
    return site["type"] == "sample" and site["is_observed"] and not is_unit(site["fn"])


def is_unit(fn: Any) -> bool:
    """Whether a distribution is that of a ``numpyro.factor``, possibly inside wrappers."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, dist.Unit)


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


def _merge(
    eta: list, tangent: list, rest: PyTree, *, zeros: bool = False
) -> tuple[PyTree, PyTree, PyTree]:
    """The tree of values, the tree of tangents, and the other data that `_split` received.

    Leaves that do not vary have the tangent None, or zeros. With None, `fisher_root` leaves out the
    components of these leaves.
    """
    fixed, others, static = rest
    treedef, floating = static.treedef, static.floating

    def build(given: list, constants: list) -> PyTree:
        changing, constant = iter(given), iter(constants)
        return jax.tree.unflatten(
            treedef, [next(changing) if yes else next(constant) for yes in floating]
        )

    def still(x: Any) -> Any:
        if not is_float(x):
            return np.zeros(jnp.shape(x), jax.dtypes.float0)
        return jnp.zeros_like(x) if zeros else None

    return build(eta, fixed), build(tangent, [still(x) for x in fixed]), others
