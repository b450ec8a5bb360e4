"""Keyed pseudo-random permutations of ``range(size)``, evaluated one index at a time.

An explicit permutation of 10^5 rows per epoch costs a sort and an array of 10^5 indices. The
permutations here are functions: the image of an index costs a few integer operations. So a batch
of B indices costs O(B) work and memory, whatever the size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._checks import check_int
from .._util import mixed

NUM_ROUNDS = 8
"""Number of Feistel rounds. Test: the joint distribution of the images of two indices, over 2
million keys and sizes 65 to 127. It differs from uniform at 4 to 6 rounds (by 5 to 30 standard
deviations at 6, and up to 7 at 7 rounds), but not at 8 rounds. Larger sizes need fewer rounds."""

_SMALL_SIZE = 64
"""Largest size that is permuted by ranking. A Feistel network on so few cells is far from uniform:
at size 16 and 8 rounds, the joint distribution of two images is off by 1.2%."""

_MAX_SIZE = 2**31 - 1


def round_keys(key: Array, num_rounds: int = NUM_ROUNDS) -> Array:
    """Expand a PRNG key into the keys of the rounds of `permute`.

    The words w of the key are hashed in turn, in one chain per round r:
    ``k_r = mix(... mix(mix(c_r ^ w_0) ^ w_1) ...)`` with ``c_r = (r + 1) * 2654435769``.
    (``jax.random.bits`` is not used: with the ``rbg`` generator under ``vmap``, its result depends
    on the rest of the batch.)

    Returns:
        uint32 array of shape (num_rounds,).
    """
    num_rounds = check_int("num_rounds", num_rounds)
    words = jax.random.key_data(key)
    if words.ndim != 1:
        raise ValueError(
            f"key must be a single PRNG key, got {words.shape[:-1]} of them: use jax.vmap"
        )
    chain = jnp.asarray((np.arange(1, num_rounds + 1) * 0x9E3779B9) & 0xFFFFFFFF, jnp.uint32)
    for i in range(words.shape[-1]):
        chain = mixed(chain ^ words[i])
    return chain


def permute(round_keys: Array, index: ArrayLike, size: int) -> Array:
    """Image of each index under a keyed permutation of ``range(size)``.

    Write ``index = l * b + r`` on a grid of a rows and b columns, the smallest nearly square grid
    with a b >= size cells. The rounds alternate ``l <- l + F(r) mod a`` and
    ``r <- r + F(l) mod b``. Each round is a bijection of the grid for any F. F(x) is the murmur3
    finaliser of x XOR the round's key, scaled to the range. An image outside ``range(size)`` is
    mapped again until it is inside (cycle walking), which is still a bijection. This is rare,
    because the excess a b - size is small. Up to size 64, the image is the rank of the index's hash
    among all hashes, close to uniform over all permutations.

    Args:
        round_keys: uint32 array from `round_keys`, of shape (num_rounds,); or of shape
            ``index.shape + (num_rounds,)`` if each index has its own permutation.
        index: integer array of any shape, entries in [0, size); others are clipped to this range.
        size: number of elements, a Python integer from 1 to 2^31 - 1.

    Returns:
        int32 array of the shape of ``index``, entries in [0, size).

    Examples:
        >>> keys = round_keys(jax.random.key(0))
        >>> sorted(permute(keys, jnp.arange(5), 5).tolist())
        [0, 1, 2, 3, 4]

    Source: Black and Rogaway (2002), Ciphers with arbitrary finite domains, section 4 (cycle
    walking) and section 5 (generalised Feistel); the hash here is fast and not secure.
    """
    size = _check_size(size)
    index = jnp.clip(jnp.asarray(index), 0, size - 1).astype(jnp.uint32)
    if size <= _SMALL_SIZE:
        return _rank(round_keys, index, size)
    rows, columns = _grid(size)
    image = _feistel(round_keys, index, rows, columns)
    if rows * columns > size:
        image = jax.lax.while_loop(
            lambda x: jnp.any(x >= size),
            lambda x: jnp.where(x >= size, _feistel(round_keys, x, rows, columns), x),
            image,
        )
    return image.astype(jnp.int32)


def epoch_indices(
    key: Array, epoch: ArrayLike, offset: ArrayLike, batch_size: int, size: int
) -> tuple[Array, Array, Array]:
    """Draw the next batch of an endless stream that shuffles ``range(size)`` anew in each epoch.

    Epoch e is the permutation keyed by ``fold_in(key, e)``. The batch has the elements with numbers
    offset, ..., offset + batch_size - 1. Elements past the end of the epoch are the first elements
    of epoch e + 1. So each index occurs exactly once per epoch, and a batch that spans two epochs
    can hold an index twice. The cost is O(batch_size) work and memory; there is no array of length
    ``size``.

    Args:
        key: PRNG key, typed or legacy, the same in every call. JAX's ``unsafe_rbg`` generator must
            not be used, because its ``fold_in`` depends on the rest of a batch.
        epoch: integer scalar, 0 at the start.
        offset: integer scalar, the number of elements already taken of this epoch, in [0, size);
            0 at the start.
        batch_size: number of indices, a Python integer from 1 to ``size``.
        size: number of elements, a Python integer from 1 to 2^31 - 1.

    Returns:
        The int32 array of indices, shape (batch_size,), then epoch and offset of the next batch as
        int32 scalars.

    Examples:
        >>> key, epoch, offset, seen = jax.random.key(0), 0, 0, []
        >>> for _ in range(4):
        ...     indices, epoch, offset = epoch_indices(key, epoch, offset, 3, 6)
        ...     seen += indices.tolist()
        >>> sorted(seen[:6]), sorted(seen[6:]), int(epoch), int(offset)
        ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], 2, 0)
    """
    size = _check_size(size)
    batch_size = check_int("batch_size", batch_size)
    if batch_size > size:
        raise ValueError(f"batch_size must be at most size = {size}, got {batch_size}")
    epoch = jnp.asarray(epoch).astype(jnp.int32)
    # A position goes up to 2 size - 1, past int32.
    position = jnp.asarray(offset).astype(jnp.uint32) + jnp.arange(batch_size + 1, dtype=jnp.uint32)
    is_next = position >= size
    position = jnp.where(is_next, position - jnp.uint32(size), position)
    this, following = jax.vmap(lambda e: round_keys(jax.random.fold_in(key, e)))(
        jnp.stack([epoch, epoch + 1])
    )
    keys = jnp.where(is_next[:-1, None], following, this)
    indices = permute(keys, position[:-1], size)
    return indices, epoch + is_next[-1].astype(jnp.int32), position[-1].astype(jnp.int32)


def _check_size(size: int) -> int:
    """Accept sizes whose indices are non-negative int32 numbers."""
    size = check_int("size", size)
    if size > _MAX_SIZE:
        raise ValueError(f"size must be at most 2^31 - 1, got {size}: split the rows in parts")
    return size


@functools.cache
def _grid(size: int) -> tuple[int, int]:
    """Choose the grid with the fewest cells >= size and at most 2 columns per row."""
    root = int(np.sqrt(size))
    rows = np.arange(root, int(np.ceil(root / np.sqrt(2))) - 1, -1)
    best = int(rows[np.argmin(-size % rows)])
    return best, -(-size // best)


def _feistel(keys: Array, x: Array, rows: int, columns: int) -> Array:
    """Apply all rounds to cells numbered row by row."""
    row, column = x // jnp.uint32(columns), x % jnp.uint32(columns)
    for i in range(keys.shape[-1]):
        if i % 2 == 0:
            row = _shift(row, mixed(column ^ keys[..., i]), rows)
        else:
            column = _shift(column, mixed(row ^ keys[..., i]), columns)
    return row * jnp.uint32(columns) + column


def _shift(x: Array, bits: Array, modulus: int) -> Array:
    """Add floor(bits * modulus / 2^32) to x, modulo the modulus, which is at most 2^16."""
    m = jnp.uint32(modulus)
    # The high word of a 48-bit product in 32-bit arithmetic, far cheaper than a division.
    x = x + (((bits >> 16) * m + (((bits & 0xFFFF) * m) >> 16)) >> 16)
    return jnp.where(x >= m, x - m, x)


def _rank(keys: Array, x: Array, size: int) -> Array:
    """Count elements with a smaller hash than x; hashes differ, because each is a bijection."""
    table = jnp.arange(size, dtype=jnp.uint32)
    for i in range(keys.shape[-1]):
        x = mixed(x ^ keys[..., i])
        table = mixed(table ^ keys[..., i, None])
    return jnp.sum(table < x[..., None], axis=-1, dtype=jnp.int32)
