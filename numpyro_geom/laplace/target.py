"""A guide's view of a model: energy, prior and Fisher form as functions of a flat position."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._util import PyTree
from ..model.minibatch import Batch, Subsampling
from ..model.model import Model
from .information.form import Flat, Form, Structure, num_rows
from .information.model import likelihood_form, model_sites, prior_energy, prior_form


class Posterior(NamedTuple):
    """A model with its data and its known structure.

    Attributes:
        model: a NumPyro model, ``param`` sites substituted.
        plan: from `numpyro_geom.model.plates.read_subsampling`.
        args: model arguments, possibly traced.
        kwargs: model keyword arguments.
        unravel: flat position -> dict of unconstrained site values.
        size: D.
        structure: from `numpyro_geom.laplace.information.model.learn_structure`.
        diagonal_prior: whether the prior part of the metric is diagonal.
    """

    model: Callable
    plan: Subsampling
    args: tuple
    kwargs: dict
    unravel: Callable[[Flat], PyTree]
    size: int
    structure: Structure = Structure()
    diagonal_prior: bool = False


class Target(NamedTuple):
    """The posterior exp(-U) on the unconstrained space, flattened to vectors of length D.

    All energies are of all rows. ``sum_rows`` goes through the rows in parts of bounded memory.

    Attributes:
        size: D.
        unravel: flat position -> dict of unconstrained site values.
        energy: U in nats.
        prior_energy: ``(position, batch) -> nats``, U without the observed distributions.
        form: the Fisher form of the observed sites.
        expected: the form of the expected information of the priors.
        sum_rows: ``fn -> pytree``, the sum of ``fn(batch)`` over all rows.
        sum_prior: the same for functions that depend on the prior alone.
        share: the share of all rows that a batch has.
        num_outputs: rows of the form's K on all data, M.
        diagonal_prior: whether the prior part of the metric is diagonal.
    """

    size: int
    unravel: Callable[[Flat], PyTree]
    energy: Callable[[Flat], jax.Array]
    prior_energy: Callable[[Flat, Batch], jax.Array]
    form: Form
    expected: Form
    sum_rows: Callable[[Callable[[Batch], PyTree]], PyTree]
    sum_prior: Callable[[Callable[[Batch], PyTree]], PyTree]
    share: Callable[[Batch], float]
    num_outputs: int
    diagonal_prior: bool


def make_target(posterior: Posterior, *, empirical: bool = False) -> Target:
    """Energy, prior and Fisher form of a posterior; ``empirical`` for the empirical Fisher form."""
    model, plan, args, kwargs, unravel, size, structure, diagonal_prior = posterior
    potential = Model(model, args, kwargs, plan).potential()
    sum_rows = potential.on_all_rows
    assert sum_rows is not None
    sites = model_sites(model, plan, args, kwargs)
    form = likelihood_form(sites, empirical=empirical, structure=structure)
    form = _on_flat(form, unravel)
    by_rows = bool(plan.local_axes) or any(s.kind == "factor" and s.plates for s in plan.sites)
    position = jax.ShapeDtypeStruct((size,), jnp.result_type(float))
    return Target(
        size=size,
        unravel=unravel,
        energy=lambda flat: sum_rows(lambda rows: potential.energy(unravel(flat), rows)),
        prior_energy=lambda flat, rows: prior_energy(sites, unravel(flat), rows),
        form=form,
        expected=_on_flat(prior_form(sites), unravel),
        sum_rows=sum_rows,
        sum_prior=sum_rows if by_rows else lambda fn: fn({}),
        share=lambda rows: float(np.prod([r.shape[0] / plan.sizes[p] for p, r in rows.items()])),
        num_outputs=num_rows(form, position, {}),
        diagonal_prior=diagonal_prior,
    )


def _on_flat(form: Form, unravel: Callable) -> Form:
    return form._replace(features=lambda flat, rows: form.features(unravel(flat), rows))
