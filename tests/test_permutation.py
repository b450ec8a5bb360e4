"""The keyed permutation: a bijection at every size, close to uniform, and its epochs."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_geom.rows.permutation import NUM_ROUNDS, _shift, epoch_indices, permute, round_keys

LARGEST = 2**31 - 1
permute_jit = jax.jit(permute, static_argnums=2)
# Each statistical test fails a correct implementation with this probability (per statistic tested,
# over fresh seeds; the seeds here are fixed).
FALSE_ALARM = 1e-5


def many_keys(num: int, seed: int) -> jax.Array:
    """Round keys of ``num`` epochs, shape (num, rounds), made as ``epoch_indices`` makes them."""
    key = jax.random.key(seed)
    return jax.jit(jax.vmap(lambda e: round_keys(jax.random.fold_in(key, e))))(jnp.arange(num))


def assert_uniform(counts: np.ndarray) -> None:
    """Chi-square test of equal expected counts; the approximation wants at least 5 per cell."""
    assert counts.mean() >= 5
    statistic = np.sum((counts - counts.mean()) ** 2) / counts.mean()
    # two-sided: counts that are too even are as wrong as uneven ones
    limits = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], counts.size - 1)
    assert limits[0] < statistic < limits[1], (statistic, limits)


# Ranked (up to 64), just past it, primes, powers of two and their neighbours, squares, and a
# product just below a square: with and without cells in excess of the size.
AWKWARD = [1, 2, 3, 4, 5, 7, 10, 31, 63, 64, 65, 66, 67, 97, 127, 128, 129, 257, 961, 1023, 1024]
AWKWARD += [1025, 65537, 99_991, 100_000]


@pytest.mark.parametrize("size", AWKWARD)
def test_every_index_occurs_exactly_once(size: int) -> None:
    image = permute_jit(round_keys(jax.random.key(size)), jnp.arange(size), size)
    assert image.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


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
    first = permute_jit(round_keys(jax.random.key(1)), jnp.arange(num), size)
    last = permute_jit(round_keys(jax.random.key(1)), size - 1 - jnp.arange(num), size)
    for image in (first, last):
        assert image.min() >= 0
        assert image.max() < size
        assert np.unique(image).size == num
    assert np.intersect1d(first, last).size == 0
    # uniform over the range, in 64 equal parts
    assert_uniform(np.bincount(np.asarray(first, np.int64) * 64 // size, minlength=64))


def test_indices_out_of_range_are_clipped() -> None:
    keys = round_keys(jax.random.key(0))
    for size in (10, 1000, LARGEST):
        inside = permute(keys, jnp.array([0, size - 1]), size)
        outside = permute(keys, jnp.array([-5, min(size + 5, LARGEST)]), size)
        np.testing.assert_array_equal(inside, outside)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_small_size_are_equally_frequent(size: int) -> None:
    keys = many_keys(60_000, seed=size)
    images = jax.jit(jax.vmap(lambda k: permute(k, jnp.arange(size), size)))(keys)
    number = {order: i for i, order in enumerate(itertools.permutations(range(size)))}
    found = [number[tuple(row)] for row in np.asarray(images).tolist()]
    assert_uniform(np.bincount(found, minlength=math.factorial(size)))


# 65 is the smallest Feistel network, hence the worst; 100,000 is put in 100 parts
@pytest.mark.parametrize("size", [7, 10, 64, 65, 97, 1000, 100_000])
def test_the_image_of_an_index_is_uniform_over_keys(size: int) -> None:
    index = jnp.array([0, 1, size // 2, size - 1])
    keys = many_keys(100_000, seed=size)
    images = np.asarray(jax.jit(jax.vmap(lambda k: permute(k, index, size)))(keys), np.int64)
    parts = min(size, 100)
    for column in images.T:
        assert_uniform(np.bincount(column * parts // size, minlength=parts))


# A Feistel network of 6 rounds fails this at sizes 65 and 89, one of 4 rounds at each of the four.
@pytest.mark.parametrize("size", [10, 65, 89, 127])
def test_pairs_of_images_are_uniform_over_keys(size: int) -> None:
    # Neighbours share a row of the Feistel grid, the others a column (width 11, 10, 16) or neither.
    width = {10: 3, 65: 11, 89: 10, 127: 16}[size]
    pairs = jnp.array([0, 1, width, size - 1])
    num = 1_000_000
    images = jax.jit(jax.vmap(lambda k: permute(k, pairs, size)))(many_keys(num, seed=size))
    images = np.asarray(images)
    for column in images.T[1:]:
        counts = np.bincount(images[:, 0] * size + column, minlength=size * size)
        counts = counts.reshape(size, size)
        assert np.all(np.diagonal(counts) == 0)
        assert_uniform(counts[~np.eye(size, dtype=bool)])


@pytest.mark.parametrize("size", [64, 65, 1000])
def test_successive_epochs_and_neighbours_are_uncorrelated(size: int) -> None:
    num = 2000
    images = jax.jit(jax.vmap(lambda k: permute(k, jnp.arange(size), size)))(many_keys(num, seed=1))
    images = np.asarray(images, float)
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


def test_each_bit_of_the_key_affects_all_round_keys() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (2,), dtype=np.uint32)
    flipped = np.broadcast_to(words, (64, 2)).copy()
    for bit in range(64):
        flipped[bit, bit // 32] ^= np.uint32(1 << (bit % 32))
    change = np.asarray(jax.vmap(round_keys)(flipped) ^ round_keys(jnp.asarray(words)))
    num = np.unpackbits(change.view(np.uint8), axis=1).sum(axis=1)
    # of 256 bits each flips with probability 1/2: mean 128, standard deviation 8
    assert np.all(np.abs(num - 128.0) < 8 * stats.norm.isf(FALSE_ALARM / 2))


@pytest.mark.parametrize("size", [20, 200])
def test_each_index_may_have_a_permutation_of_its_own(size: int) -> None:
    keys = many_keys(7, seed=0)
    index = jnp.array([0, 3, 3, 19, 5, 0, 1])
    each = [permute_jit(k, i, size) for k, i in zip(keys, index, strict=True)]
    np.testing.assert_array_equal(permute(keys, index, size), jnp.stack(each))
    grid = permute(keys[0], index.reshape(7, 1), size)
    np.testing.assert_array_equal(grid[:, 0], permute(keys[0], index, size))


@pytest.mark.parametrize("size", [20, 200])
def test_jit_vmap_and_x64_leave_the_permutation_as_it_is(size: int) -> None:
    index = jnp.arange(20)
    plain = permute(round_keys(jax.random.key(3)), index, size)
    legacy = permute(round_keys(jax.random.PRNGKey(3)), index, size)
    np.testing.assert_array_equal(plain, legacy)
    jitted = permute_jit(round_keys(jax.random.key(3)), index, size)
    np.testing.assert_array_equal(plain, jitted)
    mapped = jax.vmap(lambda k, i: permute(round_keys(k), i, size), (None, 0))(
        jax.random.key(3), index
    )
    np.testing.assert_array_equal(plain, mapped)
    with jax.enable_x64(True):
        wide = permute(round_keys(jax.random.key(3)), jnp.arange(20), size)
        assert wide.dtype == jnp.int32
    np.testing.assert_array_equal(plain, wide)


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
    # and epoch e is the documented permutation
    for e in (0, 1, stream.shape[0] - 1):
        keys = round_keys(jax.random.fold_in(key, e))
        np.testing.assert_array_equal(stream[e], permute_jit(keys, jnp.arange(size), size))


def test_epochs_differ_and_keys_differ() -> None:
    size = 1000  # two random permutations agree in one position on average
    indices = take(jax.random.key(0), 2, size, size)[0]
    other = take(jax.random.key(1), 1, size, size)[0]
    assert np.sum(indices[0] == indices[1]) < 10
    assert np.sum(indices[0] == other[0]) < 10


def test_positions_past_int32_do_not_overflow() -> None:
    indices, epoch, offset = take(jax.random.key(0), 1, 1000, LARGEST, 5, LARGEST - 300)
    keys = [round_keys(jax.random.fold_in(jax.random.key(0), e)) for e in (5, 6)]
    old = permute_jit(keys[0], LARGEST - 300 + jnp.arange(300), LARGEST)
    new = permute_jit(keys[1], jnp.arange(700), LARGEST)
    np.testing.assert_array_equal(indices[0], jnp.concatenate([old, new]))
    assert (int(epoch[0]), int(offset[0])) == (6, 700)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_stream_of_a_chain_does_not_depend_on_other_chains(impl: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    size, batch_size = 100, 30
    chains = jax.vmap(lambda k: take(k, 10, batch_size, size)[0])(keys)
    for key, indices in zip(keys, chains, strict=True):
        np.testing.assert_array_equal(indices, take(key, 10, batch_size, size)[0])
        stream = np.asarray(indices).reshape(-1, size)
        np.testing.assert_array_equal(np.sort(stream), [np.arange(size)] * 3)


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


KEYS = round_keys(jax.random.key(0))
BAD = [
    (lambda: permute(KEYS, jnp.arange(2), 0), ValueError, "size must be .* at least 1, got 0"),
    (lambda: permute(KEYS, jnp.arange(2), -3), ValueError, "size must be .* at least 1, got -3"),
    (lambda: permute(KEYS, jnp.arange(2), 2**31), ValueError, r"size must be at most 2\^31 - 1"),
    (lambda: permute(KEYS, jnp.arange(2), 3.0), TypeError, "size must be an integer"),
    (lambda: permute(KEYS, jnp.arange(2), True), TypeError, "size must be an integer"),
    (lambda: epoch_indices(jax.random.key(0), 0, 0, 0, 5), ValueError, "batch_size must be"),
    (lambda: epoch_indices(jax.random.key(0), 0, 0, 6, 5), ValueError, "at most size = 5, got 6"),
    (lambda: epoch_indices(jax.random.key(0), 0, 0, 2.0, 5), TypeError, "batch_size must be"),
    (lambda: epoch_indices(jax.random.key(0), 0, 0, 1, 0), ValueError, "size must be"),
    (lambda: round_keys(jax.random.key(0), 0), ValueError, "num_rounds must be"),
    (lambda: round_keys(jax.random.key(0), 2.5), TypeError, "num_rounds must be"),
    (lambda: round_keys(jax.random.split(jax.random.key(0))), ValueError, "single PRNG key"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_errors_say_what_was_expected(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
