"""The keyed permutation: a bijection at every size, close to uniform, and its epochs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_geom.model.minibatch import NUM_ROUNDS, _shift, epoch_indices, permute

LARGEST = 2**31 - 1
# Each statistical test fails a correct implementation with this probability (per statistic tested,
# over fresh seeds; the seeds here are fixed).
FALSE_ALARM = 1e-5


def epochs(num: int, seed: int, size: int, index: Any = None) -> np.ndarray:
    """Elements with some numbers, by default all, of the first ``num`` epochs."""
    numbers = jnp.arange(size) if index is None else jnp.asarray(np.array(index), jnp.int32)

    def of_epoch(e: jax.Array) -> jax.Array:
        if size <= 64:
            return epoch_indices(jax.random.key(seed), e, 0, size, size)[0][numbers]
        keys = jax.random.bits(jax.random.fold_in(jax.random.key(seed), e), (NUM_ROUNDS,))
        return permute(keys, numbers.astype(jnp.uint32), size)

    return np.asarray(jax.jit(jax.vmap(of_epoch))(jnp.arange(num)), np.int64)


def assert_uniform(counts: np.ndarray) -> None:
    """Chi-square test of equal expected counts; the approximation wants at least 5 per cell."""
    assert counts.mean() >= 5
    statistic = np.sum((counts - counts.mean()) ** 2) / counts.mean()
    # two-sided: counts that are too even are as wrong as uneven ones
    limits = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], counts.size - 1)
    assert limits[0] < statistic < limits[1], (statistic, limits)


# By JAX (up to 64), just past it, primes, powers of two and their neighbours, squares, and a
# product just below a square: with and without cells in excess of the size.
AWKWARD = [1, 2, 3, 4, 5, 7, 10, 31, 63, 64, 65, 66, 67, 97, 127, 128, 129, 257, 961, 1023, 1024]
AWKWARD += [1025, 65537, 99_991, 100_000]


@pytest.mark.parametrize("size", AWKWARD)
def test_every_index_occurs_exactly_once(size: int) -> None:
    np.testing.assert_array_equal(np.sort(epochs(1, size, size)[0]), np.arange(size))


@pytest.mark.parametrize("modulus", [1, 7, 46_341, 65_536])
def test_round_function_scales_the_whole_hash(modulus: int) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    bits[:4] = [0, 65_535, 65_536, 2**32 - 1]
    exact = (bits.astype(np.uint64) * modulus) >> 32
    np.testing.assert_array_equal(_shift(jnp.uint32(0), jnp.asarray(bits), modulus), exact)
    wrapped = _shift(jnp.uint32(modulus - 1), jnp.asarray(bits), modulus)
    np.testing.assert_array_equal(wrapped, (exact + modulus - 1) % modulus)


# prime, with excess; even, without; a square grid; the largest square
@pytest.mark.parametrize("size", [LARGEST, LARGEST - 1, 2**30, 2**30 + 1, 46340**2])
def test_large_sizes_stay_in_range_and_collide_nowhere(size: int) -> None:
    # 2^18 random images would have 2^36 / 2 / size >= 16 collisions on average, and none with
    # probability below exp(-16) = 1e-7: a many-to-one map does not pass.
    num = 2**18
    first = epochs(1, 1, size, range(num))[0]
    last = epochs(1, 1, size, size - 1 - np.arange(num))[0]
    for image in (first, last):
        assert image.min() >= 0
        assert image.max() < size
        assert np.unique(image).size == num
    assert np.intersect1d(first, last).size == 0
    # uniform over the range, in 64 equal parts
    assert_uniform(np.bincount(first * 64 // size, minlength=64))


# 65 is the smallest Feistel network, hence the worst; 100,000 is put in 100 parts
@pytest.mark.parametrize("size", [65, 97, 1000, 100_000])
def test_the_image_of_an_index_is_uniform_over_keys(size: int) -> None:
    images = epochs(100_000, size, size, [0, 1, size // 2, size - 1])
    parts = min(size, 100)
    for column in images.T:
        assert_uniform(np.bincount(column * parts // size, minlength=parts))


# A Feistel network of 6 rounds fails this at sizes 65 and 89, one of 4 rounds at each of the three.
@pytest.mark.parametrize("size", [65, 89, 127])
def test_pairs_of_images_are_uniform_over_keys(size: int) -> None:
    # Neighbours share a row of the Feistel grid, the others a column (width 11, 10, 16) or neither.
    width = {65: 11, 89: 10, 127: 16}[size]
    images = epochs(1_000_000, size, size, [0, 1, width, size - 1])
    for column in images.T[1:]:
        counts = np.bincount(images[:, 0] * size + column, minlength=size * size)
        counts = counts.reshape(size, size)
        assert np.all(np.diagonal(counts) == 0)
        assert_uniform(counts[~np.eye(size, dtype=bool)])


@pytest.mark.parametrize("size", [65, 1000])
def test_successive_epochs_and_neighbours_are_uncorrelated(size: int) -> None:
    num = 2000
    images = epochs(num, 1, size).astype(float)
    # In a random pair of permutations the number of common positions has mean 1 and variance 1.
    z = (np.sum(images[1:] == images[:-1]) - (num - 1)) / math.sqrt(num - 1)
    bound = stats.norm.isf(FALSE_ALARM / 2)
    assert abs(z) < bound
    # The correlation of two random permutations has mean 0 and variance 1 / (size - 1) exactly.
    scores = (images - (size - 1) / 2) / np.sqrt((size**2 - 1) / 12)
    between = np.mean(scores[1:] * scores[:-1], axis=1)
    assert abs(between.sum()) < bound * math.sqrt((num - 1) / (size - 1))
    # The circular serial correlation within one has mean -1 / (size - 1) exactly, and variance
    # below 1 / (size - 3) (Wald and Wolfowitz, for uniform scores).
    within = np.mean(scores * np.roll(scores, 1, axis=1), axis=1)
    assert abs(within.sum() + num / (size - 1)) < bound * math.sqrt(num / (size - 3))


def take(key: jax.Array, num: int, batch_size: int, size: int, epoch=0, offset=0):
    """``num`` successive batches, and the states after them."""

    def step(carry, _):
        indices, epoch, offset = epoch_indices(key, *carry, batch_size, size)
        return (epoch, offset), (indices, epoch, offset)

    start = (jnp.int32(epoch), jnp.int32(offset))
    return jax.jit(lambda: jax.lax.scan(step, start, length=num)[1])()


@pytest.mark.parametrize(
    ("batch_size", "size"), [(1, 1), (1, 3), (3, 3), (2, 5), (4, 5), (7, 64), (32, 100), (99, 100)]
)
def test_stream_is_one_permutation_after_another(batch_size: int, size: int) -> None:
    key = jax.random.key(batch_size)
    num = 3 * size  # batches: 3 batch_size whole epochs
    indices, epoch, offset = take(key, num, batch_size, size)
    stream = np.asarray(indices).reshape(-1, size)
    np.testing.assert_array_equal(np.sort(stream), np.broadcast_to(np.arange(size), stream.shape))
    # the state counts the elements taken
    taken = np.arange(1, num + 1) * batch_size
    np.testing.assert_array_equal(epoch, taken // size)
    np.testing.assert_array_equal(offset, taken % size)
    assert indices.dtype == epoch.dtype == offset.dtype == jnp.int32
    # whatever the batches, the epochs are the same
    np.testing.assert_array_equal(stream[:2], take(key, 2, size, size)[0])


def test_epochs_differ_and_keys_differ() -> None:
    size = 1000  # two random permutations agree in one position on average
    indices = take(jax.random.key(0), 2, size, size)[0]
    other = take(jax.random.key(1), 1, size, size)[0]
    assert np.sum(indices[0] == indices[1]) < 10
    assert np.sum(indices[0] == other[0]) < 10


def test_positions_past_int32_do_not_overflow() -> None:
    indices, epoch, offset = take(jax.random.key(0), 1, 1000, LARGEST, 5, LARGEST - 300)
    old = take(jax.random.key(0), 1, 300, LARGEST, 5, LARGEST - 300)[0][0]
    new = take(jax.random.key(0), 1, 700, LARGEST, 6)[0][0]
    np.testing.assert_array_equal(indices[0], jnp.concatenate([old, new]))
    assert (int(epoch[0]), int(offset[0])) == (6, 700)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("size", [50, 100])
def test_stream_of_a_chain_does_not_depend_on_other_chains(impl: str, size: int) -> None:
    """Chains out of step; with rbg, numbers of JAX under vmap depend on the other lanes."""
    keys, starts = jax.random.split(jax.random.key(0, impl=impl), 3), jnp.array([0, 40, 10])
    chains = jax.vmap(lambda k, s: take(k, 10, 30, size, 0, s)[0])(keys, starts)
    for key, start, indices in zip(keys, starts, chains, strict=True):
        np.testing.assert_array_equal(indices, take(key, 10, 30, size, 0, start)[0])
        stream = np.asarray(indices).ravel()[(size - start) % size :][: 2 * size]
        np.testing.assert_array_equal(np.sort(stream.reshape(2, size)), [np.arange(size)] * 2)


def test_no_array_grows_with_the_size() -> None:
    def largest(jaxpr) -> int:
        found = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
        for eqn in jaxpr.eqns:
            subs = [p for p in eqn.params.values() if hasattr(p, "jaxpr") or hasattr(p, "eqns")]
            found += [largest(getattr(sub, "jaxpr", sub)) for sub in subs]
        return max(found, default=0)

    key = jax.random.key(0)
    sizes = [
        largest(jax.make_jaxpr(lambda e, o, n=n: epoch_indices(key, e, o, 64, n))(0, 0).jaxpr)
        for n in (101, 10**9 + 1)
    ]
    # the round keys of each element of the batch
    assert sizes == [64 * NUM_ROUNDS, 64 * NUM_ROUNDS]
