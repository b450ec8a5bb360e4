"""The state that a step moves, the report of a step, and the state of a chain between draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree as ravel

from .._util import PyTree, all_finite, tree_vdot
from ..model.control_variate import Control, with_control_variate
from ..model.potential import Potential, in_coordinates
from ..model.scale import Scale

DEFAULT_FIELDS = (
    *("z", "diverging", "potential_energy", "grad_norm", "configurational_temperature"),
    *("step_size", "num_steps"),
)
"""Fields that NumPyro collects with every draw of any kernel."""


def virial(position: PyTree, centre: PyTree, grad: PyTree) -> jax.Array:
    """(theta - c) . grad U."""
    return tree_vdot(jax.tree.map(jnp.subtract, position, centre), grad)


def is_by_site(position: PyTree) -> bool:
    """Whether a position is a dict of arrays by site, like the position of a model."""
    return isinstance(position, dict) and jax.tree_util.all_leaves(position.values())


class Chain(NamedTuple):
    """The part of the state that one stochastic-gradient step moves.

    Attributes:
        position: the unconstrained position of the model's sites. In scaled coordinates with the
            identity metric it is one vector, shape (D,), in place of the sites. A step that uses
            `jax.tree.map` handles both.
        metric_state: statistics of the metric.
        dynamics: other state of the algorithm (momentum, auxiliary variables, ...).
    """

    position: PyTree
    metric_state: PyTree
    dynamics: PyTree


class StepReport(NamedTuple):
    """Quantities that a step reports. All except ``grad`` are scalars.

    Attributes:
        grad: the gradient estimate where the step started, a pytree.
        squared_drift: squared length, in the metric, of the gradient's change of the position or
            momentum. In its units the step's noise has tau D. For a Langevin step it is
            h grad'A grad / 2.
        accept_prob: probability with which the step was accepted; 1 without an acceptance test.
        kinetic_temperature: squared momentum over D; 0 without a momentum.
    """

    grad: PyTree
    squared_drift: jax.Array
    accept_prob: jax.Array | float = 1.0
    kinetic_temperature: jax.Array | float = 0.0


class Adaptation(NamedTuple):
    """What warm-up has learned about the target.

    Attributes:
        num_warmup: warm-up length in draws, int32 scalar.
        step_size_factor: factor on the step size of a Metropolis test, from acceptance.
        curvature: lam_H, largest absolute eigenvalue of A^{1/2} H A^{1/2}; the largest of the
            measurements in the second half of warm-up.
        flattest: smallest eigenvalue, or smallest absolute eigenvalue if the Hessian is indefinite;
            the smallest of these measurements.
        rate_factor: measured rate of relaxation over the expected one, a factor of at most 1.
        slowest: lam_min, the curvature that says how slowly the chain relaxes.
        noise: lam_C, largest eigenvalue of A^{1/2} Cov(grad Uhat) A^{1/2}; the largest of these
            measurements.
        start_energy: U where the chain has started, from the rows of a draw's, or at an anchor.
            Infinite before draw 0, and after a change of the model's arguments.
    """

    num_warmup: jax.Array
    step_size_factor: jax.Array
    curvature: jax.Array
    flattest: jax.Array
    rate_factor: jax.Array
    slowest: jax.Array
    noise: jax.Array
    start_energy: jax.Array


def init_adaptation(num_warmup: int, dtype: Any) -> Adaptation:
    """An adaptation state before anything is known."""
    one = jnp.ones((), dtype)
    return Adaptation(
        num_warmup=jnp.asarray(num_warmup, jnp.int32),
        step_size_factor=one,
        curvature=one,
        flattest=one,
        rate_factor=one,
        slowest=one,
        noise=jnp.zeros((), dtype),
        start_energy=jnp.asarray(jnp.inf, dtype),
    )


class SGState(NamedTuple):
    """State of a chain between two draws.

    Attributes:
        i: draws so far, warm-up included.
        z: the unconstrained position, a dict site -> array (any pytree with ``potential_fn``).
        potential_energy: U at ``z`` in nats, from the same rows for all draws; that of the draw
            before if the end of a draw was undone.
        grad_norm: Euclidean norm of the gradient estimate at the start of the last step.
        configurational_temperature: mean of (z - c) . grad U / D over the draw's steps, with c the
            ``centre``. Its expectation is the temperature.
        kinetic_temperature: mean of r'M^-1 r / D over the draw's steps (in GGMC of the momentum at
            the end of the trajectory). Its expectation is the temperature too. 0 for kernels
            without a momentum r.
        step_size: h of the last step (of the next draw under ``step_size="auto"``).
        num_steps: stochastic-gradient steps of the next draw.
        diverging: whether a step of the last draw was not finite or not stable.
        num_diverging: number of such steps in the last draw.
        accept_prob: mean acceptance probability of the last draw's steps (1 if not adjusted).
        metric_state: statistics of the metric.
        dynamics: other state of the algorithm.
        scaled: the position that steps move, if it is scaled or one vector; empty otherwise.
        scale: the scaled coordinates, see `numpyro_geom.model.scale.Scale`; empty without.
        centre: the position from which temperatures are measured: the position at the end of
            warm-up. Any fixed position is right; one near the target keeps the Monte Carlo error
            small. In warm-up it is the draw's start, and temperatures have no meaning yet.
        trusted: the last position known to have finite energy and gradient and no unstable step,
            where a draw starts, or any step after an undone one. Undone steps return to it.
        drift_ratio: squared drift of the last step over its noise; above 1,000 the smallest value
            so far. Infinite before any step.
        retry_factor: factor on the step size after steps that were undone, see
            `numpyro_geom.sampling.algorithm.retried`; 1 in most chains.
        stream: position in the stream of rows.
        control: the control variate's anchor; empty without one.
        steps_taken: stochastic-gradient steps so far. Schedules are functions of this number.
        adaptation: what warm-up has learned, see `numpyro_geom.sampling.state.Adaptation`.
        built_on: what ``init`` has chosen by the data and programs are built on. A dict without
            arrays: its keys are part of the state's structure, so that JAX compiles again if
            another data set leads to another choice.
        seed: the raw key with which the chain was initialised.
        rng_key: key of the next draw.
    """

    i: jax.Array
    z: PyTree
    potential_energy: jax.Array
    grad_norm: jax.Array
    configurational_temperature: jax.Array
    kinetic_temperature: jax.Array
    step_size: jax.Array
    num_steps: jax.Array
    diverging: jax.Array
    num_diverging: jax.Array
    accept_prob: jax.Array
    metric_state: PyTree
    dynamics: PyTree
    scaled: PyTree
    scale: Any
    centre: PyTree
    trusted: PyTree
    drift_ratio: jax.Array
    retry_factor: jax.Array
    stream: Any
    control: Any
    steps_taken: jax.Array
    adaptation: Adaptation
    built_on: dict[str, tuple[()]]
    seed: jax.Array
    rng_key: jax.Array

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):  # NumPyro asks like this for a field that is no attribute
            figures = self._fields[: self._fields.index("metric_state")]
            raise ValueError(
                f"extra_fields names {index!r}, and the state has no such field: expected some of "
                f"{list(figures)}"
            )
        return tuple.__getitem__(self, index)  # a NamedTuple has no super()

    @property
    def root(self) -> Any:
        """L of the scaled coordinates; None without."""
        return self.scale.root if self.scale else None

    @property
    def chain(self) -> Chain:
        """The part of the state that steps move."""
        position = self.scaled if jax.tree.leaves(self.scaled) else self.z
        return Chain(position, self.metric_state, self.dynamics)


# Target: the potential of a run with all its wrappers


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
        like: a position of the model's sites, if the chain moves in other coordinates; its values
            do not matter.
        near: whether a start is near the typical set, from an earlier search.
    """

    potential: Potential
    temperature: float
    controlled: bool = False
    transforms: Any = None
    scale: Scale | None = None
    like: PyTree = None
    near: jax.Array | bool = False

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
        return potential if self.like is None else in_coordinates(potential, self.to_sites)

    def to_sites(self, position: PyTree) -> PyTree:
        """The position of the model's sites for a position that steps move."""
        if self.scale:
            return self.scale.to_sites(position, self.like)
        return position if self.like is None else ravel(self.like)[1](position)

    def in_coordinates(self, to_sites: Callable[[PyTree], PyTree]) -> Target:
        """The target as a function of other coordinates of the model's sites, before any scale."""
        given, transforms = self.transforms, None
        if given is not None:
            transforms = lambda coordinates: given(to_sites(coordinates))  # noqa: E731
        return replace(
            self, potential=in_coordinates(self.potential, to_sites), transforms=transforms
        )

    def scaled(self, state: SGState) -> Target:
        """The target in the coordinates of a chain; unchanged if they are those of the sites."""
        own = jax.tree.leaves(state.scaled)
        return replace(self, scale=state.scale, like=state.z) if own else self

    def is_usable(self, position: PyTree) -> jax.Array:
        """Whether the constrained values at a position of the model's sites are finite."""
        if self.transforms is None:
            return jnp.ones((), bool)
        return all_finite(self.transforms(position))
