"""Potential: the energy U of a NumPyro model (or of a function) and its unbiased estimates.

A Potential is a NamedTuple of pure functions. Kernels use the target distribution only through it.
So a wrapper (a control variate, other coordinates) is a function from a Potential to a Potential.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random

from .._util import PyTree
from .minibatch import Batch

CURVATURE_KEYS = 128
"""Evaluations of a stochastic ``potential_fn`` that measure curvature and noise."""


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


def in_coordinates(potential: Potential, to_sites: Callable[[PyTree], PyTree]) -> Potential:
    """The potential as a function of other coordinates of the position."""

    def energy(coordinates: PyTree, batch: Batch) -> jax.Array:
        return potential.energy(to_sites(coordinates), batch)

    def score_noise(rng_key: jax.Array) -> tuple:
        return tuple(
            (weight, lambda coordinates, rows=rows: rows(to_sites(coordinates)))
            for weight, rows in potential.score_noise(rng_key)
        )

    return potential._replace(energy=energy, score_noise=score_noise)


def function_potential(
    potential_fn: Callable, full_potential_fn: Callable | None = None, num_data: int | None = None
) -> Potential:
    """The potential of a function ``potential_fn(z)`` or ``potential_fn(z, rng_key)``.

    The second form is a stochastic energy: any unbiased estimate of U, with one key per estimate.
    Without U itself (``full_potential_fn``) it has no ``on_all_rows``. Without ``num_data``,
    metrics see the gradient of the whole energy.
    """
    stochastic = takes_rng_key(potential_fn)

    def energy(position: PyTree, batch: Batch) -> jax.Array:
        if batch is None:  # all rows of a stochastic function
            return full_potential_fn(position)  # type: ignore[misc]
        if not stochastic:
            found = potential_fn(position)  # a constant may be a float
            return jnp.asarray(found) if isinstance(found, float) else found
        if batch.ndim > random.key(0).ndim:  # several keys: take their mean
            return jnp.mean(jax.vmap(potential_fn, (None, 0))(position, batch))
        return potential_fn(position, batch)

    def score_noise(rng_key: jax.Array) -> tuple:
        if not stochastic:
            return ()
        keys = _typed_keys(rng_key, CURVATURE_KEYS)
        return ((1.0, lambda position: jax.vmap(potential_fn, (None, 0))(position, keys)),)

    return Potential(
        energy=energy,
        init_stream=lambda rng_key: (),
        draw=lambda rng_key, stream: (
            (_typed_keys(rng_key, None) if stochastic else {}),
            stream,
        ),
        split=lambda batch, parts: (
            tuple(random.split(batch, parts)) if stochastic else (batch,) * parts
        ),
        curvature_batch=lambda rng_key: _typed_keys(rng_key, CURVATURE_KEYS) if stochastic else {},
        score_noise=score_noise,
        on_all_rows=(
            None
            if stochastic and full_potential_fn is None
            else lambda fn: fn(None if stochastic else {})
        ),
        num_data=1 if num_data is None else num_data,
        steps_per_epoch=1,
        deterministic=not stochastic,
        full_energy=full_potential_fn,
    )


def takes_rng_key(potential_fn: Callable) -> bool:
    """Whether ``potential_fn`` has a second required argument, the key of a stochastic energy."""
    try:
        parameters = inspect.signature(potential_fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 2


def _typed_keys(rng_key: jax.Array, num: int | None) -> jax.Array:
    """Typed keys, so that one key and a stack of them differ in rank."""
    if not jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        rng_key = random.wrap_key_data(rng_key)
    return rng_key if num is None else random.split(rng_key, num)
