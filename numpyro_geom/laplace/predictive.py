"""Predictions from draws of a guide, through the model or through its linearisation at the mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro import handlers
from numpyro.distributions import biject_to, constraints

from .._numpyro import unconstrained_value
from .._util import LANES, PyTree
from ..model.derivatives import linearize
from ..model.minibatch import Batch, SubsamplePlates
from ..model.model import Model
from ..model.plates import is_unit
from .information.form import (
    Flat,
    Form,
    Structure,
    is_float,
    likelihood_form,
    num_rows,
    prior_energy,
    prior_form,
)
from .settings import LaplaceSettings


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
    posterior: FlatPosterior,
    loc: Flat,
    rng_key: jax.Array,
    draws: Flat,
    *,
    linearized: bool,
    lanes: int,
) -> Predictions:
    """Distributions of the observed sites at each draw, sampled and evaluated.

    ``draws`` are flat positions, shape (num_draws, D), of which some are ``lanes`` of one
    evaluation. See `RiemannianLaplace.predictive`.
    """
    one = predicted(posterior, loc, linearized=linearized)
    keys = random.split(rng_key, draws.shape[0])
    return lax.map(lambda pair: one(*pair), (keys, draws), batch_size=lanes)


def predicted(
    posterior: FlatPosterior, loc: Flat, *, linearized: bool
) -> Callable[[jax.Array, Flat], Predictions]:
    """Predictions from a key and one draw."""
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

        origin, push = linearize(free, loc)

        def distributions(flat: Flat) -> tuple[dict, dict]:
            fns, given = sites(loc)
            moved = jax.tree.map(jnp.add, origin, push(flat - loc))
            pairs = zip(fns.items(), moved, strict=True)
            return {name: _from_free(fn, leaves) for (name, fn), leaves in pairs}, given

    else:
        distributions = sites

    def one(key: jax.Array, flat: Flat) -> Predictions:
        fns, given = distributions(flat)
        keys = random.split(key, max(len(fns), 1))
        samples = {n: fn.sample(k) for (n, fn), k in zip(fns.items(), keys, strict=True)}
        return Predictions(samples, {name: fns[name].log_prob(y) for name, y in given.items()})

    return one


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


# A guide's view of a model: energy, prior and Fisher form as functions of a flat position


@dataclasses.dataclass(frozen=True, eq=False)
class FlatPosterior:
    """The posterior exp(-U) on the unconstrained space, flattened to vectors of length D.

    Sums over rows go through them in parts of bounded memory.

    Attributes:
        model: the model with its data, `param` sites at their values.
        unravel: flat position -> dict of unconstrained site values.
        size: D.
        settings: the guide's settings.
        structure: from `numpyro_geom.laplace.information.form.learn_structure`.
        diagonal_prior: whether the prior part of the metric is diagonal.
        lanes: number of positions that are evaluated at once.
    """

    model: Model
    unravel: Callable[[Flat], PyTree]
    size: int
    settings: LaplaceSettings
    structure: Structure = Structure()
    diagonal_prior: bool = False
    lanes: int = LANES

    def energy(self, flat: Flat) -> jax.Array:
        """U in nats, of all rows."""
        position = self.unravel(flat)
        return self.sum_rows(lambda rows: self.model.energy(position, rows))

    def prior_energy(self, flat: Flat, rows: Batch) -> jax.Array:
        """U without the observed distributions, in nats."""
        return prior_energy(self.model, self.unravel(flat), rows)

    @property
    def form(self) -> Form:
        """The Fisher form of the observed sites."""
        return self._on_flat(likelihood_form(self.model, self.structure))

    @property
    def expected(self) -> Form:
        """The form of the expected information of the priors."""
        return self._on_flat(prior_form(self.model))

    @property
    def num_outputs(self) -> int:
        """Rows of the form's K on all data, M."""
        position = jax.ShapeDtypeStruct((self.size,), jnp.result_type(float))
        return num_rows(self.form, position, {})

    def sum_rows(self, fn: Callable[[Batch], PyTree]) -> PyTree:
        """The sum of ``fn(rows)`` over all rows."""
        return self.model.sum_over_rows(fn)

    def sum_prior(self, fn: Callable[[Batch], PyTree]) -> PyTree:
        """The same for a function that depends on the prior alone."""
        plan, kinds = self.model.plan, self.model.of_kind("factor")
        by_rows = bool(plan.local_axes) or any(s.name in kinds and s.plates for s in plan.sites)
        return self.sum_rows(fn) if by_rows else fn({})

    def share(self, rows: Batch) -> float:
        """The share of all rows that a batch has."""
        sizes = self.model.plan.sizes
        return float(np.prod([r.shape[0] / sizes[p] for p, r in rows.items()]))

    def _on_flat(self, form: Form) -> Form:
        return form._replace(features=lambda flat, rows: form.features(self.unravel(flat), rows))
