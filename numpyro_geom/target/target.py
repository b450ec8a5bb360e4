"""Target: the potential of a run with everything that wraps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._util import all_finite
from .control_variate import Control, with_control_variate
from .expanded import with_expansion
from .expansion import Expansion
from .potential import Potential

PyTree = Any


@dataclass(frozen=True)
class Target:
    """exp(-U / temperature), and the coordinates in which a chain moves.

    Attributes:
        potential: U of the model's sites, from minibatches.
        temperature: tau.
        expansion: of matrices, or None.
        controlled: whether minibatch gradients are corrected at an anchor.
        transforms: from the unconstrained position to site values, or None where that takes a run
            of the model.
    """

    potential: Potential
    temperature: float
    expansion: Expansion | None = None
    controlled: bool = False
    transforms: Any = None

    def check(self) -> None:
        """Raise where there is nothing that a control variate could correct."""
        potential = self.potential
        if self.controlled and (potential.deterministic or potential.on_all_rows is None):
            raise ValueError(
                "control_variate=True corrects minibatch gradients and needs a model whose rows "
                "are subsampled: pass a model and batch_size, or drop control_variate"
            )

    def with_control(self, control: Control) -> Potential:
        """The potential with its control variate, in the model's coordinates."""
        if not self.controlled:
            return self.potential
        return with_control_variate(self.potential, control.anchor)

    def seen(self, control: Control) -> Potential:
        """What a step sees: with its control variate, and expanded."""
        return self.expanded(self.with_control(control))

    def expanded(self, potential: Potential) -> Potential:
        """A potential in the coordinates in which the chain moves."""
        if self.expansion is None:
            return potential
        return with_expansion(potential, self.expansion, self.temperature)

    def merge(self, position: PyTree) -> PyTree:
        """The position of the model's sites, given that which steps move."""
        return position if self.expansion is None else self.expansion.merge(position)

    def is_usable(self, position: PyTree) -> jax.Array:
        """Whether the constrained values at a position of the model's sites are finite."""
        if self.transforms is None:
            return jnp.ones((), bool)
        return all_finite(self.transforms(position))
