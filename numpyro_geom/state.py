"""What moves in a step, what a step reports, and what a chain is between two draws."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._util import tree_vdot
from .warmup.step_size import Adaptation

PyTree = Any


DEFAULT_FIELDS = (
    *("z", "diverging", "potential_energy", "grad_norm", "configurational_temperature"),
    *("site_temperatures", "step_size", "num_steps"),
)
"""Fields that NumPyro collects with every draw of any kernel."""


def site_sizes(position: PyTree, z: PyTree) -> dict[str, int]:
    """Sizes of the sites whose temperatures are told apart, in the order of their names.

    Args:
        position: what steps move: a vector in place of the sites, or a pytree.
        z: a position of the model's sites.
    """
    sites = z if isinstance(position, jax.Array) else position
    return {name: sites[name].size for name in sorted(sites)} if is_by_site(sites) else {}


def virials(position: PyTree, centre: PyTree, grad: PyTree, sizes: dict[str, int]) -> jax.Array:
    """(theta - c) . grad U by site, shape (sites,); all together, shape (1,), without ``sizes``."""
    away = jax.tree.map(jnp.subtract, position, centre)
    if not sizes:
        return tree_vdot(away, grad)[None]
    if not isinstance(position, jax.Array):
        return jnp.stack([tree_vdot(away[name], grad[name]) for name in sizes])
    site = np.repeat(np.arange(len(sizes)), [*sizes.values()])
    return jax.ops.segment_sum(away * grad, site, len(sizes), indices_are_sorted=True)


def is_by_site(position: PyTree) -> bool:
    """Whether a position is a dict of arrays by site, as that of a model is."""
    return isinstance(position, dict) and jax.tree_util.all_leaves(position.values())


class Chain(NamedTuple):
    """What one stochastic-gradient step moves.

    Attributes:
        position: the unconstrained position of the model's sites; in scaled coordinates with the
            identity metric one vector, shape (D,), in place of the sites. A step that goes through
            `jax.tree.map` serves both.
        metric_state: statistics of the metric.
        dynamics: what the algorithm carries besides (momentum, auxiliary variables, ...).
    """

    position: PyTree
    metric_state: PyTree
    dynamics: PyTree


class StepReport(NamedTuple):
    """What one step says of itself; scalars.

    Attributes:
        energy: minibatch estimate of U where the step started.
        grad: the gradient estimate there, a pytree.
        squared_drift: squared length, in the metric, of what the gradient did to the position or
            the momentum, in units in which the step's noise has tau D: h grad'A grad / 2 for a
            Langevin step.
        accept_prob: probability with which the step was accepted; 1 without a correction.
        kinetic_temperature: squared momentum over D; 0 without a momentum.
    """

    energy: jax.Array
    grad: PyTree
    squared_drift: jax.Array
    accept_prob: jax.Array | float = 1.0
    kinetic_temperature: jax.Array | float = 0.0


class SGState(NamedTuple):
    """State of a chain between two draws.

    Attributes:
        i: draws so far, warm-up included.
        z: the unconstrained position, a dict site -> array (any pytree with ``potential_fn``).
        potential_energy: minibatch estimate of U at the start of the last step, in nats; before any
            step, of U where the search for a mode began.
        grad_norm: Euclidean norm of the gradient estimate there.
        configurational_temperature: mean of (z - c) . grad U / D over the draw's steps, with c the
            ``centre``; its mean is the temperature.
        site_temperatures: the same of each site alone, a dict site -> scalar; empty with an
            expansion, and where the position is not a dict of arrays.
        kinetic_temperature: mean of r'M^-1 r / D over the draw's steps, likewise (in GGMC that of
            the momentum at the end of the trajectory); 0 for kernels without a momentum r.
        squared_drift: of the draw's first step, which begins where the draw before ended: h g'A g /
            (2 tau) of a Langevin step with gradient g, see `StepReport`.
        step_size: h of the last step (of the next draw under ``step_size="auto"``).
        num_steps: stochastic-gradient steps of the next draw.
        diverging: whether a step of the last draw was not finite or not stable.
        num_diverging: how many were.
        accept_prob: mean acceptance probability of the last draw's steps (1 if not adjusted).
        metric_state: statistics of the metric.
        dynamics: what the algorithm carries besides.
        expanded: the position that steps move, where that is not ``z`` but scaled or expanded;
            empty otherwise.
        scale: the scaled coordinates, see `numpyro_geom.target.scale.Scale`; empty without.
        centre: the position from which temperatures are measured, that at the end of warm-up; any
            fixed one is right, and one near the target keeps the Monte Carlo error small. In
            warm-up it is the draw's start, and temperatures mean nothing yet.
        trusted: the last position whose energy and gradient were finite and not those of an
            unstable step: undone steps go back to it.
        drift_ratio: squared drift of the last step over its noise, beyond 1,000 the least so far;
            infinite before any.
        stream: position in the stream of rows.
        control: the control variate's anchor; empty without one.
        steps_taken: stochastic-gradient steps so far; schedules are functions of it.
        adaptation: what warm-up has learned, see `numpyro_geom.warmup.step_size.Adaptation`.
        seed: the raw key with which the chain was initialised.
        rng_key: key of the next draw.
    """

    i: jax.Array
    z: PyTree
    potential_energy: jax.Array
    grad_norm: jax.Array
    configurational_temperature: jax.Array
    site_temperatures: dict[str, jax.Array]
    kinetic_temperature: jax.Array
    squared_drift: jax.Array
    step_size: jax.Array
    num_steps: jax.Array
    diverging: jax.Array
    num_diverging: jax.Array
    accept_prob: jax.Array
    metric_state: PyTree
    dynamics: PyTree
    expanded: PyTree
    scale: Any
    centre: PyTree
    trusted: PyTree
    drift_ratio: jax.Array
    stream: Any
    control: Any
    steps_taken: jax.Array
    adaptation: Adaptation
    seed: jax.Array
    rng_key: jax.Array

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):  # what NumPyro asks for a field that is no attribute
            figures = self._fields[: self._fields.index("metric_state")]
            raise ValueError(
                f"extra_fields names {index!r}, and the state has no such field: expected some of "
                f"{list(figures)}"
            )
        return tuple.__getitem__(self, index)  # a NamedTuple has no super()

    @property
    def chain(self) -> Chain:
        """What steps move."""
        empty = type(self.expanded) is tuple and not self.expanded  # a position may be a tuple too
        position = self.z if empty else self.expanded
        return Chain(position, self.metric_state, self.dynamics)

    def with_temperatures(self, virial: jax.Array) -> SGState:
        """The state with temperatures from the mean of `virials` over a draw."""
        position = self.chain.position
        sizes = site_sizes(position, self.z)
        return self._replace(
            configurational_temperature=jnp.sum(virial)
            / sum(x.size for x in jax.tree.leaves(position)),
            site_temperatures={n: virial[k] / sizes[n] for k, n in enumerate(sizes)},
        )
