"""Predictions from draws of a guide, through the model or through its linearisation at the mode."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import _unconstrain_reparam

from ..information.model import is_unit
from ..target.minibatch import SubsamplePlates
from .settings import LaplaceSettings
from .target import Posterior

PyTree = Any
Flat = jax.Array

DRAWS_AT_ONCE = 32


class Predictions(NamedTuple):
    """What draws of the parameters say of new rows; leading dimensions are those of the draws.

    Attributes:
        samples: site name -> draws of the observed sites, from their distributions.
        log_likelihood: site name -> log p(value | draw), one for each row, of the sites for which
            the model was given values.
    """

    samples: dict[str, jax.Array]
    log_likelihood: dict[str, jax.Array]


def predict(
    settings: LaplaceSettings,
    posterior: Posterior,
    loc: Flat,
    rng_key: jax.Array,
    draws: Flat,
    *,
    linearized: bool,
) -> Predictions:
    """Distributions of the observed sites at each draw, sampled and evaluated.

    Args:
        settings: of the guide.
        posterior: the model with the new rows.
        loc: the mode, shape (D,).
        rng_key: of what is sampled.
        draws: flat unconstrained positions, shape (num_draws, D).
        linearized: whether the parameters of the distributions, on their own unconstrained space,
            are replaced by their first-order expansion in the position around the mode.
    """
    model, _, args, kwargs, unravel, *_ = posterior

    def sites(flat: Flat) -> tuple[dict, dict]:
        run = handlers.substitute(
            handlers.seed(SubsamplePlates(model), random.key(0)),
            substitute_fn=partial(_unconstrain_reparam, unravel(flat)),
        )
        trace = handlers.trace(run).get_trace(*args, **kwargs)
        latent = set(unravel(flat))
        found = {
            name: site
            for name, site in trace.items()
            if site["type"] == "sample" and name not in latent and not is_unit(site["fn"])
        }
        given = {name: site["value"] for name, site in found.items() if site["is_observed"]}
        return {name: site["fn"] for name, site in found.items()}, given

    if linearized:
        # the parameters as one vector in the space where any value is allowed
        def free(flat: Flat) -> list:
            return [_to_free(fn) for fn in sites(flat)[0].values()]

        origin, push = jax.linearize(free, loc)

        def distributions(flat: Flat) -> tuple[dict, dict]:
            fns, given = sites(loc)
            moved = jax.tree.map(jnp.add, origin, push(flat - loc))
            pairs = zip(fns.items(), moved, strict=True)
            return {name: _from_free(fn, leaves) for (name, fn), leaves in pairs}, given

    else:
        distributions = sites

    def one(pair: tuple[jax.Array, Flat]) -> Predictions:
        key, flat = pair
        fns, given = distributions(flat)
        keys = random.split(key, max(len(fns), 1))
        samples = {n: fn.sample(k) for (n, fn), k in zip(fns.items(), keys, strict=True)}
        return Predictions(samples, {name: fns[name].log_prob(y) for name, y in given.items()})

    keys = random.split(rng_key, draws.shape[0])
    return lax.map(one, (keys, draws), batch_size=DRAWS_AT_ONCE)


def _supports(fn: Any) -> list:
    """Constraint of each leaf of a distribution; None for leaves that are not parameters."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    named = [(getattr(fn, name, None), c) for name, c in fn.arg_constraints.items()]
    return [next((c for x, c in named if x is leaf), None) for leaf in jax.tree.leaves(fn)]


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _to_free(fn: Any) -> list:
    """Floating point leaves of a distribution where any value is allowed."""
    pairs = zip(jax.tree.leaves(fn), _supports(fn), strict=True)
    return [
        x if support is None else _bijection(fn, support).inv(x)
        for x, support in pairs
        if _is_float(x)
    ]


def _from_free(fn: Any, free: list) -> Any:
    """The distribution with these leaves in place of its own."""
    leaves, treedef = jax.tree.flatten(fn)
    values = iter(free)

    def moved(x: Any, support: Any) -> Any:
        if not _is_float(x):
            return x
        return next(values) if support is None else _bijection(fn, support)(next(values))

    pairs = zip(leaves, _supports(fn), strict=True)
    return jax.tree.unflatten(treedef, [moved(x, support) for x, support in pairs])


def _bijection(fn: Any, support: Any) -> Any:
    try:
        return biject_to(support)
    except NotImplementedError as error:
        raise ValueError(
            f"the parameters of {type(fn).__name__} have a support without a bijection to the "
            f"reals ({support}): expected one such as Normal, Bernoulli(logits=...) or "
            "Categorical(logits=...). Use linearized=False"
        ) from error
