"""Small helpers on pytrees, and a conditional that stays cheap under ``vmap``."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

PyTree = Any

AT_ONCE = 2**23
"""Numbers that are in memory at once where work is done in parts."""
LANES = 32
"""Evaluations of a model under one `vmap`. More of them would use a processor no better."""


def num_at_once(entries_of_one: int) -> int:
    """How many parts of a work, of so many numbers each, are in memory at once; at least one."""
    return max(1, AT_ONCE // max(1, entries_of_one))


def lazy_cond(pred: Any, fn: Callable[..., PyTree], operand: PyTree, *args: PyTree) -> PyTree:
    """``fn(operand, *args)`` if ``pred`` holds, else ``operand`` without the work of ``fn``.

    ``jax.lax.cond`` under ``vmap`` with a batched predicate computes both branches for every
    element. This function is a loop of zero or one iterations. So a batch pays for ``fn`` only if
    at least one of its predicates holds.

    ``fn`` is pure, and its result has the structure, shapes and dtypes of ``operand``. Work on
    closed-over values alone may be moved out of the condition: pass expensive inputs as ``args``.
    Forward-mode differentiable, not reverse-mode.
    """
    leaves, treedef = jax.tree.flatten(args)

    def body(carry: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
        # without the barrier XLA treats the arguments as constants of the loop. It then computes
        # all that depends only on them before the loop, even if it is not needed
        # (keys pass as words, because the check of key reuse would count a barrier as a use)
        flag, given = lax.optimization_barrier((carry[0], [words(x) for x in leaves]))
        given = [from_words(x, y) for x, y in zip(given, leaves, strict=True)]
        return jnp.zeros_like(flag), fn(carry[1], *jax.tree.unflatten(treedef, given))

    start = (jnp.asarray(pred, dtype=bool), operand)
    return lax.while_loop(lambda carry: carry[0], body, start)[1]


def is_traced(tree: PyTree) -> bool:
    """Whether some leaf of a pytree is a tracer, whose values are not known."""
    leaves = jax.tree.leaves(tree)
    return any(isinstance(getattr(x, "device_value", x), jax.core.Tracer) for x in leaves)


def in_trace(*trees: PyTree) -> bool:
    """Whether the caller is within a transformation that traces, or has values from one."""
    return is_traced((trees, jnp.zeros(())))  # new arrays are traced there too


def at_once() -> AbstractContextManager:
    """A context in which operations on known values are carried out, also in a transformation.

    Within `jax.ensure_compile_time_eval` JAX would also trace a program operation by operation,
    each compiled on its own.
    """
    return jax.core.eval_context()


def are_known(tree: PyTree) -> bool:
    """Whether values are known here: not traced, and not on other processes."""
    if is_traced(tree):
        return False
    return all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(tree))


def is_key(x: Any) -> bool:
    """Whether an array holds typed keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def words(x: Any) -> Any:
    """The array itself; for typed keys their words; they can be stored and sent."""
    return random.key_data(x) if is_key(x) else x


def from_words(x: Any, like: Any) -> Any:
    """The inverse of `words`: keys again if ``like`` holds keys."""
    return random.wrap_key_data(x, impl=random.key_impl(like)) if is_key(like) else x


def raw(array: np.ndarray) -> memoryview:
    """The bytes of an array's entries, in their order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def digest(x: Any) -> str:
    """SHA-256 of the type, the shape and the entries of an array; the same in every process."""
    array = np.asarray(words(x))
    found = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
    if array.dtype.hasobject:
        found.update(repr(array.tolist()).encode())
    else:
        found.update(raw(array))
    return found.hexdigest()


def tree_vdot(left: PyTree, right: PyTree) -> jax.Array:
    """Inner product of two pytrees of the same structure, a scalar; 0 without leaves."""
    products = jax.tree.map(
        lambda a, b: jnp.vdot(a, b, precision=lax.Precision.HIGHEST), left, right
    )
    leaves = jax.tree.leaves(products)
    return functools.reduce(jnp.add, leaves) if leaves else jnp.zeros(())


def tree_size(tree: PyTree) -> int:
    """Number of entries of all leaves."""
    return sum(map(np.size, jax.tree.leaves(tree)))


def evenly(size: int, most: int) -> np.ndarray:
    """Up to ``most`` indices of ``size`` entries, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(int))


def tree_axpy(scale: Any, x: PyTree, y: PyTree) -> PyTree:
    """``y + scale x`` leaf by leaf, in the dtypes of ``y``."""
    return jax.tree.map(lambda a, b: (b + scale * a).astype(b.dtype), x, y)


def tree_where(pred: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """``yes`` where the scalar ``pred`` holds, else ``no``, leaf by leaf."""
    # XLA computes cheap operations anew for each leaf, with all on which they depend, such as an
    # energy. An exponential is none
    pred = jnp.exp(jnp.asarray(pred, jnp.float32)) > 2
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(pred, a, b), yes, no)


def tree_scale(factor: Any, tree: PyTree) -> PyTree:
    """``factor`` times each leaf, in the leaf's dtype."""
    return jax.tree.map(lambda x: (factor * x).astype(x.dtype), tree)


def all_finite(tree: PyTree) -> jax.Array:
    """Whether every entry of every leaf is finite."""
    # one row of all scalars and vectors: a sum of many would be fused with each of their inputs
    parts = [jnp.sum(x * 0) if jnp.ndim(x) > 1 else x for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.isfinite(jnp.hstack([0.0, *parts])))


def key_word(rng_key: jax.Array) -> jax.Array:
    """The last 32-bit word of a key, a seed for `scattered`."""
    return words(rng_key)[-1]


def scattered(word: Any, size: int) -> jax.Array:
    """32-bit integers that look random, shape (size,), for uses that need no true randomness.

    They choose rows and starting vectors, which only have to be without a pattern. Each draw from
    `jax.random` would take some 350 lines of a compiled program. Another ``word`` gives other
    numbers.
    """
    # Murmur's finaliser of a Weyl sequence
    return mixed(
        lax.iota(jnp.uint32, size) * jnp.uint32(0x9E3779B9) + jnp.asarray(word, jnp.uint32)
    )


def mixed(x: jax.Array) -> jax.Array:
    """The finaliser of murmur3: a bijection of uint32 in which each bit affects all bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def scattered_floats(word: Any, size: int, dtype: Any) -> jax.Array:
    """Uniform numbers of mean 0 and variance 1, from `scattered`."""
    unit = (scattered(word, size) >> 8).astype(dtype) / 2**24
    return (12**0.5 * (unit - 0.5)).astype(dtype)
