"""How `Shampoo` cuts a tensor into blocks."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Blocks(NamedTuple):
    """How a site is cut into blocks, each a tensor of its own. All fields are static.

    Attributes:
        shape: shape of the site.
        merged: axes after dropping and merging.
        counts: number of blocks along each merged axis.
        sizes: side of a block along each merged axis; empty for a site with the identity.
        diagonal: whether the site has a diagonal metric and is not cut.
    """

    shape: tuple[int, ...]
    merged: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    diagonal: bool = False

    @property
    def padded(self) -> tuple[int, ...]:
        """The merged axes, with padding."""
        return tuple(count * size for count, size in zip(self.counts, self.sizes, strict=True))

    def split(self, x: jax.Array) -> jax.Array:
        """The site's blocks, (blocks, n_1, ..., n_d), padded with zeros."""
        d = len(self.sizes)
        padding = [(0, n - m) for n, m in zip(self.padded, self.merged, strict=True)]
        interleaved = itertools.chain.from_iterable(zip(self.counts, self.sizes, strict=True))
        x = jnp.pad(x.reshape(self.merged), padding).reshape(*interleaved)
        order = (*range(0, 2 * d, 2), *range(1, 2 * d, 2))
        return x.transpose(order).reshape(-1, *self.sizes)

    def join(self, blocks: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        d = len(self.sizes)
        order = tuple(itertools.chain.from_iterable((i, d + i) for i in range(d)))
        x = blocks.reshape(*self.counts, *self.sizes).transpose(order).reshape(self.padded)
        return x[tuple(slice(axis) for axis in self.merged)].reshape(self.shape)

    def weights(self) -> list[np.ndarray]:
        """For each axis and index: the number of block entries with it, over 2d; 0 for padding."""
        d = len(self.sizes)
        if self.diagonal:
            return [np.full(self.sizes, 0.5)]
        if d == 0:
            return []
        # lengths[i][k]: number of entries of block k along axis i that are not padding.
        lengths = [
            np.minimum(n, m - n * np.arange(c))
            for m, c, n in zip(self.merged, self.counts, self.sizes, strict=True)
        ]
        lengths = [block.ravel() for block in np.meshgrid(*lengths, indexing="ij")]
        volume = np.prod(lengths, axis=0)
        return [
            (np.arange(n) < length[:, None]) * (volume / length)[:, None] / (2 * d)
            for n, length in zip(self.sizes, lengths, strict=True)
        ]


@functools.cache
def blocks_of(shape: tuple[int, ...], block_size: int, vector: str) -> Blocks:
    """The cut of a site with this shape; see `Shampoo` for the rules and the arguments."""
    if 0 in shape or (len(shape) <= 1 and vector == "identity"):
        return Blocks(shape)
    if len(shape) == 0 or (len(shape) == 1 and vector == "diagonal"):
        size = shape or (1,)
        return Blocks(shape, size, (1,), size, diagonal=True)
    axes = [n for n in shape if n > 1] or [1]
    merged = axes[:1]
    for n in axes[1:]:
        if merged[-1] * n <= block_size:
            merged[-1] *= n
        else:
            merged.append(n)
    counts = tuple(_num_blocks(n, block_size) for n in merged)
    sizes = tuple(math.ceil(n / count) for n, count in zip(merged, counts, strict=True))
    return Blocks(shape, tuple(merged), counts, sizes)


def _num_blocks(size: int, block_size: int) -> int:
    """Blocks along an axis: a divisor of the size, if one is close to the least number."""
    least = math.ceil(size / block_size)
    # Padding costs more than a few extra blocks: XLA computes padded arrays entry by entry.
    return next((n for n in range(least, 2 * least + 1) if size % n == 0), least)
