"""The potential of a function that replaces the model, exact or stochastic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from .minibatch import Batch
from .potential import Potential

PyTree = Any

CURVATURE_KEYS = 128
"""Evaluations of a stochastic ``potential_fn`` that measure curvature and noise."""


def function_potential(
    potential_fn: Callable, full_potential_fn: Callable | None = None, num_data: int | None = None
) -> Potential:
    """The potential of a function ``potential_fn(z)`` or ``potential_fn(z, rng_key)``.

    The second form is a stochastic energy: any unbiased estimate of U, with one key per estimate.

    Args:
        potential_fn: the function.
        full_potential_fn: U itself, if ``potential_fn`` is stochastic. Without it there is no
            ``on_all_rows``.
        num_data: N; None for 1. Metrics then see the gradient of the whole energy.
    """
    stochastic = takes_rng_key(potential_fn)

    def energy(position: PyTree, batch: Batch) -> jax.Array:
        if batch is None:  # all rows of a stochastic function
            return full_potential_fn(position)  # type: ignore[misc]
        if not stochastic:
            return potential_fn(position)
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
