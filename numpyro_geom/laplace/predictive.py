"""Predictions from draws of a guide, through the model or through its linearisation at the mode."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro import handlers
from numpyro.distributions import biject_to, constraints

from .._numpyro import unconstrained_value
from .._util import LANES
from ..model.minibatch import SubsamplePlates
from ..model.plates import is_unit
from .information.form import Flat, is_float
from .posterior import FlatPosterior


class Predictions(NamedTuple):
    """Predictions of new rows from draws of the parameters; leading dimensions are the draws'.

    Attributes:
        samples: site name -> samples of the observed sites, from their distributions.
        log_likelihood: site name -> log p(value | draw), one for each row, for the sites whose
            values the model was given.
    """

    samples: dict[str, jax.Array]
    log_likelihood: dict[str, jax.Array]


def predict(
    posterior: FlatPosterior, loc: Flat, rng_key: jax.Array, draws: Flat, *, linearized: bool
) -> Predictions:
    """Distributions of the observed sites at each draw, sampled and evaluated.

    ``draws`` are flat positions, shape (num_draws, D). See `RiemannianLaplace.predictive`.
    """
    model, unravel = posterior.model, posterior.unravel
    latent = set(unravel(loc))

    def sites(flat: Flat) -> tuple[dict, dict]:
        run = handlers.substitute(
            handlers.seed(SubsamplePlates(model.runnable), random.key(0)),
            substitute_fn=partial(unconstrained_value, unravel(flat)),
        )
        trace = handlers.trace(run).get_trace(*model.args, **model.kwargs)
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
            fns = sites(flat)[0].values()
            return [[bijection.inv(x) for x, bijection in _parameters(fn)] for fn in fns]

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
    return lax.map(one, (keys, draws), batch_size=LANES)


def _parameters(fn: Any) -> list[tuple[Any, Any]]:
    """A distribution's floating point leaves, each with the bijection to its support."""
    inner = fn
    while hasattr(inner, "base_dist"):
        inner = inner.base_dist
    named = [(getattr(inner, name, None), c) for name, c in inner.arg_constraints.items()]
    found = []
    for leaf in filter(is_float, jax.tree.leaves(fn)):
        support = next((c for x, c in named if x is leaf), constraints.real)
        try:
            found.append((leaf, biject_to(support)))
        except NotImplementedError as error:
            raise ValueError(
                f"the parameters of {type(fn).__name__} have a support without a bijection to the "
                f"reals ({support}): expected one such as Normal, Bernoulli(logits=...) or "
                "Categorical(logits=...). Use linearized=False"
            ) from error
    return found


def _from_free(fn: Any, free: list) -> Any:
    """The distribution with these leaves instead of its own."""
    pairs = zip(_parameters(fn), free, strict=True)
    moved = iter([bijection(x) for (_, bijection), x in pairs])
    return jax.tree.map(lambda x: next(moved) if is_float(x) else x, fn)
