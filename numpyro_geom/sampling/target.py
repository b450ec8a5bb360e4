"""Target: the potential of a run with all its wrappers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .._util import PyTree, all_finite
from ..model.control_variate import Control, with_control_variate
from ..model.potential import Potential, in_coordinates
from ..model.scale import Scale
from .state import SGState


@dataclass(frozen=True)
class Target:
    """exp(-U / temperature), and the coordinates in which a chain moves.

    Attributes:
        potential: U of the model's sites, from minibatches.
        temperature: tau.
        controlled: whether minibatch gradients are corrected at an anchor.
        transforms: map from the unconstrained position to site values, or None if this map needs a
            run of the model.
        scale: the coordinates of the chain, if they are scaled.
        like: a position of the model's sites, if coordinates are scaled; its values do not
            matter.
    """

    potential: Potential
    temperature: float
    controlled: bool = False
    transforms: Any = None
    scale: Scale | None = None
    like: PyTree = None

    def check(self) -> None:
        """Raise if a control variate has no noise to correct."""
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
        """The potential that a step sees: with control variate, in the chain's coordinates."""
        return self.in_chain(self.with_control(control))

    def in_chain(self, potential: Potential) -> Potential:
        """A potential in the coordinates in which the chain moves."""
        return potential if self.scale is None else in_coordinates(potential, self.to_sites)

    def to_sites(self, position: PyTree) -> PyTree:
        """The position of the model's sites for a position that steps move."""
        return position if self.scale is None else self.scale.to_sites(position, self.like)

    def in_coordinates(self, to_sites: Callable[[PyTree], PyTree]) -> Target:
        """The target as a function of other coordinates of the model's sites, before any scale."""
        given, transforms = self.transforms, None
        if given is not None:
            transforms = lambda coordinates: given(to_sites(coordinates))  # noqa: E731
        return replace(
            self, potential=in_coordinates(self.potential, to_sites), transforms=transforms
        )

    def scaled(self, state: SGState) -> Target:
        """The target in the coordinates of a chain; unchanged if they are not scaled."""
        return replace(self, scale=state.scale, like=state.z) if state.scale else self

    def is_usable(self, position: PyTree) -> jax.Array:
        """Whether the constrained values at a position of the model's sites are finite."""
        if self.transforms is None:
            return jnp.ones((), bool)
        return all_finite(self.transforms(position))
