"""Small helpers on pytrees, and a conditional that stays cheap under ``vmap``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any


def lazy_cond(pred: Any, fn: Callable[[PyTree], PyTree], operand: PyTree) -> PyTree:
    """``fn(operand)`` where ``pred`` holds, else ``operand``; without the work where it does not.

    ``jax.lax.cond`` under ``vmap`` with a batched predicate computes both branches for every
    element. This is a loop of no or one trip, so a batch pays for ``fn`` only when at least one of
    its predicates holds.

    Args:
        pred: boolean scalar.
        fn: pure function whose result has the structure, shapes and dtypes of ``operand``; what
            it closes over may differ from call to call.
        operand: any pytree of arrays.

    Returns:
        A pytree like ``operand``. Forward-mode differentiable, not reverse-mode.
    """

    def body(carry: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
        return jnp.zeros_like(carry[0]), fn(carry[1])

    start = (jnp.asarray(pred, dtype=bool), operand)
    return lax.while_loop(lambda carry: carry[0], body, start)[1]


def tree_vdot(left: PyTree, right: PyTree) -> jax.Array:
    """Inner product of two pytrees of the same structure, a scalar; 0 without leaves."""
    products = jax.tree.map(
        lambda a, b: jnp.vdot(a, b, precision=lax.Precision.HIGHEST), left, right
    )
    leaves = jax.tree.leaves(products)
    return functools.reduce(jnp.add, leaves) if leaves else jnp.zeros(())


def tree_axpy(scale: Any, x: PyTree, y: PyTree) -> PyTree:
    """``y + scale x`` leaf by leaf, in the dtypes of ``y``."""
    return jax.tree.map(lambda a, b: (b + scale * a).astype(b.dtype), x, y)
