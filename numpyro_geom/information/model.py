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
from numpyro import handlers
from numpyro.infer.util import _unconstrain_reparam

from ..target import minibatch
from ..target.minibatch import Batch, Subsampling
from .dependence import dependence
from .form import Form, Structure
from .prior import prior_root
from .root import fisher_root

PyTree = Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """What is known without values, as a pytree without leaves."""

    treedef: Any
    floating: tuple[bool, ...]


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
            of_fn, of_value = tangents[name]
            parts.append(_weighted(prior_root(fn, of_value), weights[name]))
            if jax.tree.leaves(fn):
                parts.append(_weighted(fisher_root(fn, of_fn), weights[name]))
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
    return site["type"] == "sample" and site["is_observed"] and not is_unit(site["fn"])


def is_unit(fn: Any) -> bool:
    """Whether a distribution is that of a ``numpyro.factor``, in whatever it is wrapped."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, dist.Unit)


def _weight(site: Mapping[str, Any]) -> Any:
    scale = site["scale"]
    return jnp.ones(()) if scale is None else jnp.asarray(scale, jnp.result_type(float))


def _weighted(w: jax.Array, weight: jax.Array) -> jax.Array:
    """Rows of a root times the square root of their weight, as one vector."""
    root = jnp.sqrt(weight).astype(w.dtype)
    return (w * root[..., None] if jnp.ndim(root) else w * root).reshape(-1)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _split(tree: PyTree, others: PyTree, constant: tuple[bool, ...] = ()) -> tuple[list, PyTree]:
    """Floating point leaves that may vary, and the rest from which `_merge` rebuilds the tree."""
    leaves, treedef = jax.tree.flatten(tree)
    fixed_ones = iter(constant)
    floating = tuple(_is_float(x) and not next(fixed_ones, False) for x in leaves)
    eta = [jnp.asarray(x) for x, yes in zip(leaves, floating, strict=True) if yes]
    fixed = [x for x, yes in zip(leaves, floating, strict=True) if not yes]
    return eta, (fixed, others, _Static(treedef, floating))


def _merge(
    eta: list, tangent: list, rest: PyTree, *, zeros: bool = False
) -> tuple[PyTree, PyTree, PyTree]:
    """The tree of values, that of tangents, and what was handed to `_split` beside it.

    Leaves that do not vary have the tangent None, with which `fisher_root` leaves out what only
    they would reach, or zeros.
    """
    fixed, others, static = rest
    treedef, floating = static.treedef, static.floating

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
