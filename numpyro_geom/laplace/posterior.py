"""A guide's view of a model: energy, prior and Fisher form as functions of a flat position."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._util import PyTree
from ..model.minibatch import Batch
from ..model.model import Model
from .information.form import (
    Flat,
    Form,
    Structure,
    likelihood_form,
    num_rows,
    prior_energy,
    prior_form,
)
from .settings import LaplaceSettings


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
    """

    model: Model
    unravel: Callable[[Flat], PyTree]
    size: int
    settings: LaplaceSettings
    structure: Structure = Structure()
    diagonal_prior: bool = False

    def replace(self, **values: Any) -> FlatPosterior:
        """The posterior with other values of some attributes."""
        return dataclasses.replace(self, **values)

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
