"""Constant-rate descent: its path, the moments of the path, and the Gaussian with these moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax, random

from ..model.potential import Potential
from ..warmup.lanczos import extreme_eigenvalues
from .vsgd import optimal_rate

RATE_BATCHES = 8
"""Minibatches whose curvature bounds the learning rate."""
NOISE_BATCHES = 64
"""Minibatches from which the noise of the gradient is measured."""
LARGEST_DRIFT = 0.5
"""Bound on the product of the rate and the curvature of a minibatch."""
LANCZOS_STEPS = 20


class SWAGParams(NamedTuple):
    """The fitted Gaussian, on the flattened unconstrained space of dimension D.

    Attributes:
        mean: mean of the snapshots, shape (D,).
        variance: second central moment of the snapshots, entry by entry, shape (D,).
        deviations: the last ``rank`` snapshots, each minus the mean of all snapshots up to it,
            oldest first, shape (rank, D).
        learning_rate: the constant rate l of theta' = theta - l grad Uhat / N, a scalar.
    """

    mean: jax.Array
    variance: jax.Array
    deviations: jax.Array
    learning_rate: jax.Array


class Moments(NamedTuple):
    """Running moments of a sequence of vectors.

    Attributes:
        mean: shape (D,).
        sum_squares: sum of squared differences from the mean, shape (D,).
        deviations: the last deviations, in a ring, shape (rank, D).
        num_values: number of vectors so far.
    """

    mean: jax.Array
    sum_squares: jax.Array
    deviations: jax.Array
    num_values: jax.Array


def descend(
    potential: Potential,
    unravel: Callable,
    start: jax.Array,
    learning_rate: jax.Array | None,
    rng_key: jax.Array,
    *,
    rank: int,
    burn_in: int,
    collect_every: int,
    num_snapshots: int,
    mode_steps: int,
    mode_learning_rate: float,
) -> tuple[jax.Array, SWAGParams, jax.Array]:
    """Find a mode with Adam, then descend: returns the mode, parameters, and energies at both ends.

    Without a given rate the constant rate is the automatic one. The settings are those of `SWAG`.
    """
    key_stream, key_mode, key_rate, key_descent, key_rows = random.split(rng_key, 5)
    num_data = potential.num_data

    def energy(flat: jax.Array, batch: Any) -> jax.Array:
        return potential.energy(unravel(flat), batch)

    def walk(direction: Callable, carry: tuple, num_steps: int) -> tuple:
        def step(_: int, carry: tuple) -> tuple:
            flat, state, stream, key = carry
            key, key_batch = random.split(key)
            batch, stream = potential.draw(key_batch, stream)
            update, state = direction(jax.grad(energy)(flat, batch) / num_data, state)
            return (flat + update).astype(flat.dtype), state, stream, key

        return lax.fori_loop(0, num_steps, step, carry)

    adam = optax.adam(optax.cosine_decay_schedule(mode_learning_rate, mode_steps))
    carry = (start, adam.init(start), potential.init_stream(key_stream), key_mode)
    mode, _, stream, _ = walk(adam.update, carry, mode_steps)
    rate = learning_rate
    if rate is None:
        rate = num_data * stable_rate(energy, potential, mode, key_rate)

    def sgd(grad: jax.Array, state: tuple) -> tuple[jax.Array, tuple]:
        return -rate * grad, state

    def snapshot(carry: tuple, _: None) -> tuple[tuple, None]:
        walker, moments = carry
        walker = walk(sgd, walker, collect_every)
        return (walker, update_moments(moments, walker[0])), None

    walker = walk(sgd, (mode, (), stream, key_descent), burn_in)
    begin = (walker, init_moments(mode, rank))
    (walker, moments), _ = lax.scan(snapshot, begin, None, num_snapshots)
    rows = potential.curvature_batch(key_rows)
    energies = jnp.stack([energy(mode, rows), energy(walker[0], rows)])
    params = SWAGParams(
        mean=moments.mean,
        variance=moments.sum_squares / num_snapshots,
        deviations=jnp.roll(moments.deviations, -(num_snapshots % rank), axis=0),
        learning_rate=rate,
    )
    return mode, params, energies


def draw(rng_key: jax.Array, params: SWAGParams, sample_shape: tuple[int, ...] = ()) -> jax.Array:
    """Flat unconstrained positions from the Gaussian of `SWAG`, shape (*sample_shape, D)."""
    key_diagonal, key_deviations = random.split(rng_key)
    rank, size = params.deviations.shape
    dtype = params.mean.dtype
    z1 = random.normal(key_diagonal, (*sample_shape, size), dtype)
    z2 = random.normal(key_deviations, (*sample_shape, rank), dtype)
    low_rank = jnp.matmul(z2, params.deviations, precision=lax.Precision.HIGHEST)
    scale = jnp.sqrt(params.variance / 2)
    return params.mean + scale * z1 + low_rank / (2 * (rank - 1)) ** 0.5


def init_moments(like: jax.Array, rank: int) -> Moments:
    """Moments of no vectors yet, for vectors like ``like``."""
    zeros = jnp.zeros_like(like)
    return Moments(zeros, zeros, jnp.zeros((rank, like.size), like.dtype), jnp.zeros((), jnp.int32))


def update_moments(moments: Moments, value: jax.Array) -> Moments:
    """Moments with one more vector, by Welford's recursion."""
    num_values = moments.num_values + 1
    before = value - moments.mean
    mean = moments.mean + before / num_values.astype(value.dtype)
    after = value - mean
    oldest = moments.num_values % moments.deviations.shape[0]
    return Moments(
        mean=mean,
        sum_squares=moments.sum_squares + before * after,
        deviations=moments.deviations.at[oldest].set(after),
        num_values=num_values,
    )


def stable_rate(
    energy: Callable[[jax.Array, Any], jax.Array],
    potential: Potential,
    position: jax.Array,
    rng_key: jax.Array,
) -> jax.Array:
    """The rate h = min(2 D / tr C, 1 / (2 lam)) of theta' = theta - h grad Uhat; see `SWAG`."""
    key_noise, key_curvature = random.split(rng_key)

    def fresh_batch(key: jax.Array) -> Any:
        key_stream, key_batch = random.split(key)
        return potential.draw(key_batch, potential.init_stream(key_stream))[0]

    def add_gradient(moments: Moments, key: jax.Array) -> tuple[Moments, None]:
        return update_moments(moments, jax.grad(energy)(position, fresh_batch(key))), None

    keys = random.split(key_noise, NOISE_BATCHES)
    gradients, _ = lax.scan(add_gradient, init_moments(position, 1), keys)
    best = optimal_rate(gradients.sum_squares / (NOISE_BATCHES - 1), 1, 1.0)

    def curvature(key: jax.Array) -> jax.Array:
        key_batch, key_start = random.split(key)
        batch = fresh_batch(key_batch)
        _, product = jax.linearize(jax.grad(lambda flat: energy(flat, batch)), position)
        start = random.normal(key_start, position.shape, position.dtype)
        return extreme_eigenvalues(product, position.size, start, LANCZOS_STEPS).largest_magnitude

    lam = jnp.max(jnp.abs(lax.map(curvature, random.split(key_curvature, RATE_BATCHES))))
    return jnp.minimum(best, LARGEST_DRIFT / lam)
