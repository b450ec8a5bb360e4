"""The numbers of `jax.random`, from programs that compile and run faster on the CPU.

There, JAX writes each of its calls as a loop over five groups of Threefry rounds: some twenty
kernels, which take longer than a step on a small minibatch. Written out, the rounds are one kernel.
XLA would copy it into every kernel that uses the numbers; two operations that change no value
prevent this. Other generators than Threefry, and other devices, go to `jax.random`.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.flatten_util import ravel_pytree

from ._util import from_words, is_key, is_traced, words

Shape = tuple[int, ...]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def split(rng_key: jax.Array, num: int = 2) -> jax.Array:
    """`jax.random.split`."""
    if not _written_out(rng_key):
        return random.split(rng_key, num)
    pairs = jnp.stack(_pairs(rng_key, (num,)), axis=-1)
    return from_words(lax.optimization_barrier(pairs), rng_key)  # one kernel for all keys


def pair(rng_key: jax.Array) -> Any:
    """`split` of a key, or of each key of a batch: on the host if they are known there."""
    key = words(rng_key)
    if is_traced(key) or not _written_out(rng_key):
        return (split if key.ndim == 1 else jax.vmap(split, out_axes=1))(rng_key)
    count = np.arange(2, dtype=np.uint32).reshape(2, *[1] * (key.ndim - 1))
    pairs = np.stack(_threefry(np.moveaxis(np.asarray(key), -1, 0), 0 * count, count), -1)
    return [from_words(jnp.asarray(x), rng_key) for x in pairs]


def bits(rng_key: jax.Array, shape: Shape) -> jax.Array:
    """`jax.random.bits` of 32 bits."""
    if not _written_out(rng_key):
        return random.bits(rng_key, shape, jnp.uint32)
    first, second = _pairs(rng_key, shape)
    return first ^ second


def normal(rng_key: jax.Array, shape: Shape = (), dtype: Any = float) -> jax.Array:
    """`jax.random.normal`."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if not _written_out(rng_key) or dtype != jnp.float32:
        return random.normal(rng_key, shape, dtype)
    # the bits of a number in [1, 2)
    mantissa = bits(rng_key, shape) >> np.uint32(9)
    unit = lax.bitcast_convert_type(mantissa | np.float32(1).view(np.uint32), jnp.float32) - 1
    low, one = np.nextafter(np.float32(-1), np.float32(0)), np.float32(1)
    inside = jnp.maximum(low, unit * (one - low) + low)
    found = lax.erf_inv(inside) * np.float32(sqrt(2))
    # XLA copies cheap operations into each kernel that uses them, and a division is not cheap
    return found / (1 + 0 * found)


def tree_normal(rng_key: jax.Array, like: Any) -> Any:
    """Standard normal numbers in the shapes and dtypes of a pytree, from one draw."""
    flat, unravel = ravel_pytree(like)
    return unravel(normal(rng_key, flat.shape, flat.dtype))


def _written_out(rng_key: jax.Array) -> bool:
    config: Any = jax.config
    name = str(random.key_impl(rng_key)) if is_key(rng_key) else config.jax_default_prng_impl
    threefry = name == "threefry2x32" and config.jax_threefry_partitionable
    return threefry and words(rng_key).shape[-1] == 2 and jax.default_backend() == "cpu"


def _pairs(rng_key: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    counts = lax.iota(jnp.uint32, prod(shape)).reshape(shape)
    return _threefry(words(rng_key), jnp.zeros_like(counts), counts)


def _threefry(key: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds."""
    keys = key[0], key[1], key[0] ^ key[1] ^ np.uint32(PARITY)
    x, y = x + keys[0], y + keys[1]
    for k in range(5):
        for distance in ROTATIONS[k % 2]:
            x = x + y
            y = x ^ (y << np.uint32(distance) | y >> np.uint32(32 - distance))
        x, y = x + keys[(k + 1) % 3], y + keys[(k + 2) % 3] + np.uint32(k + 1)
    return x, y
