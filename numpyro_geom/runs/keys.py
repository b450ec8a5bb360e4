"""Arrays and PRNG keys as plain words that can be stored and sent, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def is_key(x: Any) -> bool:
    """Whether an array holds typed keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_words(x: Any) -> np.ndarray:
    """An array's entries; of a key its words."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def from_words(words: Any, like: Any) -> jax.Array:
    """An array, or a key if ``like`` is one."""
    words = jnp.asarray(words)
    return (
        jax.random.wrap_key_data(words, impl=jax.random.key_impl(like)) if is_key(like) else words
    )


def local(tree: PyTree) -> PyTree:
    """Arrays and keys that every process has in full, as arrays of this process alone."""
    return jax.tree.map(lambda x: from_words(as_words(x), x), tree)
