"""Minibatches: draws of row indices, their substitution into plates, and the N/B scaling.

A ``plate`` in a NumPyro model says which rows are exchangeable. `numpyro_geom.model.plates` reads
the plates off a model. This module draws row indices for the plates that are to be subsampled
(`draw`), and runs the model with these indices in its plates (`SubsamplePlates`). NumPyro's plate
then scales every site in it by ``size / batch_size``. So the minibatch energy is an unbiased
estimate of the full energy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.primitives import Messenger

from .. import _random
from .._util import mixed, words
from .arguments import on_device

Batch = Any
"""The input of a step's energy estimate: plate -> row indices, a PRNG key, or an empty dict."""

RNG_KEY = "numpyro.prng_key"
"""The entry of a batch that holds the key for a model that asks for one."""

BATCHING = ("replacement", "stratified", "epoch")


@jax.tree_util.register_pytree_node_class
class Strata(dict[str, Any]):
    """A batch whose rows are one from each of equal stretches of a plate, in their order.

    Over a mesh each device then has the rows of its part of the batch.
    """

    def tree_flatten(self) -> tuple[tuple, tuple[str, ...]]:
        """Arrays and names."""
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], arrays: Iterable[Any]) -> Strata:
        """The reverse."""
        return cls(zip(names, arrays, strict=True))


@dataclass(frozen=True)
class Site:
    """The stored facts of a sample or deterministic site on all rows: no arrays.

    Attributes:
        name: its name.
        kind: ``"latent"``, ``"observed"``, ``"factor"`` or ``"deterministic"``.
        shape: shape of its values.
        plates: names of its plates with their negative batch dimensions, the outermost first.
        batch_shape: batch shape of its distribution; empty for a deterministic site.
        event_dim: number of event dimensions; 0 for a deterministic site.
        event_names: names of event dimensions that the model gives.
        discrete: whether it is latent and has a discrete support.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    plates: tuple[tuple[str, int], ...] = ()
    batch_shape: tuple[int, ...] = ()
    event_dim: int = 0
    event_names: tuple[str, ...] = ()
    discrete: bool = False

    @property
    def observed(self) -> bool:
        """Whether its value is given: data, or the density of a ``numpyro.factor``."""
        return self.kind in ("observed", "factor")


@dataclass(frozen=True)
class Subsampling:
    """The rows of the plates that a step draws, and the facts of the model that this needs.

    This is a hashable value, so it can be a static argument of a compiled function.

    Attributes:
        sizes: size of every plate.
        sites: sample and deterministic sites, in the order in which the model runs them.
        batch_sizes: rows drawn per step, for the subsampled plates only.
        batching: ``"replacement"``, ``"stratified"`` or ``"epoch"``.
        has_params: whether the model has ``param`` or ``mutable`` sites.
        idle_params: ``param`` sites whose values do not matter, see `plates.Effects`.
        is_random: whether the model asks for keys (``numpyro.prng_key``).
    """

    sizes: Mapping[str, int] = field(hash=False)
    sites: tuple[Site, ...] = field(repr=False)
    batch_sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    batching: str = "replacement"
    has_params: bool = False
    idle_params: tuple[str, ...] = ()
    is_random: bool = False

    def __post_init__(self) -> None:
        # in the order of the model, which the keys of a step follow
        drawn = {p: self.batch_sizes[p] for p in self.sizes if p in self.batch_sizes}
        object.__setattr__(self, "batch_sizes", drawn)

    @property
    def local_axes(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """For each latent site inside subsampled plates, ``(plate, axis of its value)`` pairs."""
        drawn = self.batch_sizes
        axes = {
            s.name: tuple((p, len(s.batch_shape) + dim) for p, dim in s.plates if p in drawn)
            for s in self.sites
            if s.kind == "latent"
        }
        return {name: pairs for name, pairs in axes.items() if pairs}

    @property
    def num_data(self) -> int:
        """N: the product over nested data plates, the sum over independent ones; 1 without any."""
        groups = {frozenset(p for p, _ in s.plates) for s in self.sites if s.observed and s.plates}
        maximal = [g for g in groups if not any(g < other for other in groups)]
        return sum(math.prod(self.sizes[p] for p in g) for g in maximal) if maximal else 1

    @property
    def steps_per_epoch(self) -> int:
        """Steps that draw as many rows as there are (1 without subsampling)."""
        steps = (math.ceil(self.sizes[p] / b) for p, b in self.batch_sizes.items())
        return max(steps, default=1)


class SubsamplePlates(Messenger):
    """Run a model with given row indices in its plates, and with a given key if it asks for one.

    NumPyro's own subsampling draws the indices inside the model by a sequential loop over the
    batch. Indices from outside cost a tenth of a step or less. A plate that is not in ``indices``
    runs at its full size, even if the model asks for ``subsample_size``.

    Args:
        fn: the model.
        indices: plate name -> integer array of row indices; `RNG_KEY` -> the key from which each
            ``numpyro.prng_key()`` of the model is derived, a fixed key by default.
        sizes: plate name -> size for which the indices were drawn; another size is an error.
    """

    def __init__(
        self,
        fn: Callable | None = None,
        indices: Mapping[str, Any] | None = None,
        sizes: Mapping[str, int] | None = None,
    ):
        super().__init__(fn)
        self.sizes = {} if sizes is None else sizes
        self.indices = {} if indices is None else indices
        self.declared: dict[str, tuple[int, int | None]] = {}
        self.keys_given = 0

    def __enter__(self) -> None:
        self.keys_given = 0
        super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        """Substitute plate indices; give keys to models that ask for them."""
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            before = self.declared.setdefault(msg["name"], (size, subsample_size))[0]
            if before != size:
                raise ValueError(
                    f"plate {msg['name']!r} has {before} rows in one place of the model and {size} "
                    "in another: expected one size. Give the plates different names"
                )
            expected = self.sizes.get(msg["name"], size)
            if expected != size:
                raise ValueError(
                    f"plate {msg['name']!r} has {size} rows now, and the chain was started with "
                    f"{expected}: start a new run for other data, with init_strategy="
                    "init_to_draws(mcmc) at the draws of this one"
                )
            rows = self.indices.get(msg["name"])
            rows = jnp.arange(size) if rows is None else rows
            msg["value"] = rows
            msg["args"] = (size, rows.shape[0])
        elif msg["type"] == "prng_key":
            if msg["value"] is None and msg["kwargs"]["rng_key"] is None:  # no seed gave a key
                key = self.indices.get(RNG_KEY)
                key = random.key(0) if key is None else key
                msg["value"] = random.fold_in(key, self.keys_given)
            self.keys_given += 1


class AllRows(SubsamplePlates):
    """A model on all its rows, equal to the model that it wraps, for use outside of the sampler."""

    def __init__(self, model: Callable, runnable: Callable | None):
        super().__init__(runnable)
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        args, kwargs = on_device(args, kwargs)
        return super().__call__(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self.model == (other.model if isinstance(other, AllRows) else other)

    def __hash__(self) -> int:
        return hash(self.model)


def gather_local(subsampling: Subsampling, position: dict, batch: Mapping[str, Any]) -> dict:
    """Pick the rows of latent sites that live in subsampled plates."""
    if not subsampling.local_axes:
        return position
    gathered = dict(position)
    for name, axes in subsampling.local_axes.items():
        for plate, axis in axes:
            if plate in batch and name in gathered:
                gathered[name] = jnp.take(gathered[name], batch[plate], axis=axis)
    return gathered


def init_stream(subsampling: Subsampling, rng_key: jax.Array) -> Any:
    """State of the row stream: key, epoch and offset per plate with epochs, else empty."""
    if subsampling.batching != "epoch":
        return ()
    zero = jnp.zeros((), jnp.int32)
    return {
        plate: (key, zero, zero)
        for plate, key in zip(
            subsampling.batch_sizes,
            _random.split(rng_key, max(1, len(subsampling.batch_sizes))),
            strict=False,
        )
    }


def draw(
    subsampling: Subsampling, rng_key: jax.Array, stream: Any
) -> tuple[dict[str, jax.Array], Any]:
    """Row indices of the next minibatch: plate -> int32 array, and the advanced stream.

    ``"replacement"`` draws independent uniform indices. ``"stratified"`` draws one index from each
    of B equal stretches of the plate, and each row has the same probability. ``"epoch"`` goes
    through a new keyed permutation in every epoch, in O(batch) work and memory, so each row comes
    once per epoch. A model that asks for keys gets a new key with each minibatch.
    """
    batch: dict[str, Any] = Strata() if subsampling.batching == "stratified" else {}
    advanced = {}
    if subsampling.is_random:
        rng_key, batch[RNG_KEY] = _random.split(rng_key)
    if not subsampling.batch_sizes:
        return batch, stream
    keys = (
        [rng_key]
        if len(subsampling.batch_sizes) == 1
        else _random.split(rng_key, len(subsampling.batch_sizes))
    )
    for (plate, rows), key in zip(subsampling.batch_sizes.items(), keys, strict=False):
        size = subsampling.sizes[plate]
        if subsampling.batching == "replacement":
            batch[plate] = _uniform_rows(key, rows, size)
        elif subsampling.batching == "stratified":
            batch[plate] = _stratified_rows(key, rows, size)
        else:
            plate_key, epoch, offset = stream[plate]
            batch[plate], epoch, offset = epoch_indices(plate_key, epoch, offset, rows, size)
            advanced[plate] = (plate_key, epoch, offset)
    return batch, (advanced if subsampling.batching == "epoch" else stream)


def _uniform_rows(rng_key: jax.Array, rows: int, size: int) -> jax.Array:
    """Independent indices below ``size``, uniform to 2^-32: ``size`` times a 64-bit fraction.

    ``random.randint`` is uniform only to ``size`` / 2^32, and it draws bits three times.
    """
    first, second = _random.bits(rng_key, (2, rows))
    low = first * jnp.uint32(size)
    carry = (low + _high_word(second, size) < low).astype(jnp.uint32)
    index = (_high_word(first, size) + carry).astype(jnp.int32)
    # no change of values, but XLA then computes no remainder for each entry of a gathered row
    return lax.rem(index, jnp.int32(size))


def _stratified_rows(rng_key: jax.Array, rows: int, size: int) -> jax.Array:
    """One index of each of ``rows`` stretches of ``size / rows`` rows, in their order.

    Stretch j gives the floor of (j size + r) / rows, with r uniform below ``size``. A row may lie
    in two stretches in part. Each row comes ``rows / size`` times on average.
    """
    first, rest = np.divmod(np.arange(rows) * size, rows)  # in 64 bits
    within = _uniform_rows(rng_key, rows, size)
    return jnp.asarray(first, jnp.int32) + (jnp.asarray(rest, jnp.int32) + within) // rows


def _high_word(x: jax.Array, factor: int) -> jax.Array:
    """The upper 32 of the 64 bits of a product of 32-bit integers."""
    upper, lower = x >> 16, x & 0xFFFF
    factor_upper, factor_lower = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    middle = lower * factor_upper + (lower * factor_lower >> 16)
    other = upper * factor_lower + (middle & 0xFFFF)
    return upper * factor_upper + (middle >> 16) + (other >> 16)


# Epochs: keyed pseudo-random permutations of ``range(size)``, evaluated one index at a time


NUM_ROUNDS = 8
"""Number of Feistel rounds. Test: the joint distribution of the images of two indices, over 2
million keys and sizes 65 to 127. It differs from uniform at 4 to 6 rounds (by 5 to 30 standard
deviations at 6, and up to 7 at 7 rounds), but not at 8 rounds. Larger sizes need fewer rounds."""

_SMALL_SIZE = 64
"""Largest size that JAX permutes. A Feistel network on so few cells is far from uniform: at size 16
and 8 rounds, the joint distribution of two images is off by 1.2%."""


def epoch_indices(
    key: Array, epoch: ArrayLike, offset: ArrayLike, batch_size: int, size: int
) -> tuple[Array, Array, Array]:
    """Draw the next batch of an endless stream that shuffles ``range(size)`` anew in each epoch.

    Epoch e is the permutation keyed by ``fold_in(key, e)``. The batch has the elements with numbers
    offset, ..., offset + batch_size - 1. Elements past the end of the epoch are the first elements
    of epoch e + 1. So each index occurs exactly once per epoch, and a batch that spans two epochs
    can hold an index twice. Epoch and offset are 0 at the start.

    Returns:
        The indices, then epoch and offset of the next batch.
    """
    epoch = jnp.asarray(epoch).astype(jnp.int32)
    # A position goes up to 2 size - 1, past int32.
    position = jnp.asarray(offset).astype(jnp.uint32) + jnp.arange(batch_size + 1, dtype=jnp.uint32)
    is_next = position >= size
    position = jnp.where(is_next, position - jnp.uint32(size), position)
    # a Threefry key of the words: under vmap, numbers of other generators depend on the other lanes
    key_words = words(key)
    key = jax.random.wrap_key_data(key_words[:2], impl="threefry2x32")
    for word in key_words[2:]:
        key = jax.random.fold_in(key, word)
    this, following = jax.random.fold_in(key, epoch), jax.random.fold_in(key, epoch + 1)
    if size <= _SMALL_SIZE:
        orders = [jax.random.permutation(k, size).astype(jnp.int32) for k in (this, following)]
        indices = jnp.where(is_next, orders[1][position], orders[0][position])[:-1]
    else:
        keys = [jax.random.bits(k, (NUM_ROUNDS,)) for k in (this, following)]
        indices = permute(jnp.where(is_next[:-1, None], keys[1], keys[0]), position[:-1], size)
    return indices, epoch + is_next[-1].astype(jnp.int32), position[-1].astype(jnp.int32)


def permute(round_keys: Array, index: Array, size: int) -> Array:
    """Image of each index under a keyed permutation of ``range(size)``.

    Write ``index = l * b + r`` on a grid of a rows and b columns, the smallest nearly square grid
    with a b >= size cells. The rounds alternate ``l <- l + F(r) mod a`` and
    ``r <- r + F(l) mod b``. Each round is a bijection of the grid for any F. F(x) is the murmur3
    finaliser of x XOR the round's key, scaled to the range. An image outside ``range(size)`` is
    mapped again until it is inside (cycle walking), which is still a bijection. This is rare,
    because the excess a b - size is small. The last axis of ``round_keys`` has the rounds.

    Source: Black and Rogaway (2002), Ciphers with arbitrary finite domains, section 4 (cycle
    walking) and section 5 (generalised Feistel); the hash here is fast and not secure.
    """
    rows, columns = _grid(size)
    image = _feistel(round_keys, index, rows, columns)
    if rows * columns > size:
        image = jax.lax.while_loop(
            lambda x: jnp.any(x >= size),
            lambda x: jnp.where(x >= size, _feistel(round_keys, x, rows, columns), x),
            image,
        )
    return image.astype(jnp.int32)


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
