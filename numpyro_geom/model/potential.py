"""Potential: the energy U of a NumPyro model (or of a function) and its unbiased estimates.

A Potential is a NamedTuple of pure functions. Kernels use the target distribution only through it.
So a wrapper (a control variate, a parameter expansion) is a function from a Potential to a
Potential.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .minibatch import Batch

PyTree = Any


class Potential(NamedTuple):
    """The target exp(-U / temperature), as pure functions of the position.

    Attributes:
        energy: ``(position, batch) -> scalar``, an unbiased estimate of U in nats, summed over
            all data, with the log-Jacobians of the constraining transforms. Exact if
            ``deterministic``.
        init_stream: ``rng_key -> stream``, the state of the row stream.
        draw: ``(rng_key, stream) -> (batch, stream)``, the next minibatch.
        split: ``(batch, num_parts) -> batches``, disjoint parts, each with an unbiased energy.
        curvature_batch: ``rng_key -> batch``, a larger batch for the Hessian in warm-up.
        score_noise: ``(rng_key) -> tuple of (weight, rows)``. ``rows(position)`` is a vector whose
            entries each have a gradient. The covariance of the minibatch gradient is the sum of
            ``weight`` times the covariance of these gradients over the entries.
        on_all_rows: ``fn -> pytree``, the weighted sum of ``fn(batch)`` over batches that together
            are all rows, in a loop of bounded memory. It is exact for functions that are linear in
            the energy, so ``on_all_rows(lambda rows: energy(position, rows))`` is U. None for a
            stochastic ``potential_fn``. A model that asks for keys gets a fixed key here.
        num_data: number of observations N.
        steps_per_epoch: steps in one pass over the data.
        deterministic: whether ``energy`` ignores the batch: all rows, and no keys.
        on_host: whether rows come from `numpyro_geom.HostRows`.
        full_energy: ``position -> U`` if it was given with a stochastic ``potential_fn``, else
            None.
    """

    energy: Callable[[PyTree, Batch], jax.Array]
    init_stream: Callable[[jax.Array], Any]
    draw: Callable[[jax.Array, Any], tuple[Batch, Any]]
    split: Callable[[Batch, int], tuple[Batch, ...]]
    curvature_batch: Callable[[jax.Array], Batch]
    score_noise: Callable[[jax.Array], tuple[tuple[float, Callable[[PyTree], jax.Array]], ...]]
    on_all_rows: Callable[[Callable[[Batch], PyTree]], PyTree] | None
    num_data: int
    steps_per_epoch: int
    deterministic: bool
    on_host: bool = False
    full_energy: Callable[[PyTree], jax.Array] | None = None


def in_coordinates(
    potential: Potential,
    to_sites: Callable[[PyTree], PyTree],
    correction: Callable[[PyTree], jax.Array] | None = None,
) -> Potential:
    """The potential as a function of other coordinates of the position.

    Args:
        potential: potential of the position.
        to_sites: map from the coordinates to the position.
        correction: an addition to the energy, as a function of the coordinates.
    """

    def energy(coordinates: PyTree, batch: Batch) -> jax.Array:
        total = potential.energy(to_sites(coordinates), batch)
        return total if correction is None else total + correction(coordinates)

    def score_noise(rng_key: jax.Array) -> tuple:
        return tuple(
            (weight, lambda coordinates, rows=rows: rows(to_sites(coordinates)))
            for weight, rows in potential.score_noise(rng_key)
        )

    return potential._replace(energy=energy, score_noise=score_noise)
