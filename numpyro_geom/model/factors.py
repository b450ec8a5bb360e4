"""Factors P and Q of a matrix: their products, inverses, determinants and energies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import _linalg
from .._linalg import inverse

PyTree = Any


class LowRank(NamedTuple):
    """The factor D + L1' L2 on a side of dimension m.

    Attributes:
        diagonal: D, of shape (m,).
        first: L1, of shape (rank, m).
        second: L2, of shape (rank, m).
    """

    diagonal: jax.Array
    first: jax.Array
    second: jax.Array


class Side(NamedTuple):
    """One side of one site that has factors: names, shapes and counts.

    Attributes:
        site: the key in ``"factors"``.
        side: ``"left"`` or ``"right"``.
        dimension: number of rows of a factor.
        num_factors: number of factors.
        rank: rows of L1 and L2, None for full factors.
        members: the sites that the factors multiply.
        multiplicity: how often each determinant counts: the rows of all members together.
        dtype: dtype of the site and of its factors.
    """

    site: str
    side: str
    dimension: int
    num_factors: int
    rank: int | None
    members: tuple[str, ...]
    multiplicity: int
    dtype: Any


# Factors act on the last axis from the right; the left side is the right side of the transpose.
# Products are exact to the dtype on every device, because W must match the position exactly.
_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def identity(side: Side) -> Any:
    """The identity factor of a side."""
    if side.rank is None:
        return jnp.eye(side.dimension, dtype=side.dtype)
    none = jnp.zeros((side.rank, side.dimension), side.dtype)
    return LowRank(jnp.ones(side.dimension, side.dtype), none, none)


def on_side(x: jax.Array, factor: Any, side: str, apply: Callable) -> jax.Array:
    """P x for the left side, x Q for the right side; ``apply`` is the product or its inverse."""
    if side == "right":
        return apply(x, factor)
    if isinstance(factor, LowRank):
        factor = LowRank(factor.diagonal, factor.second, factor.first)
    else:
        factor = factor.T
    return apply(x, factor) if x.ndim == 1 else apply(x.mT, factor).mT


def times(x: jax.Array, factor: Any) -> jax.Array:
    """The product of x and a factor."""
    if isinstance(factor, LowRank):
        return x * factor.diagonal + _matmul(_matmul(x, factor.first.T), factor.second)
    return _matmul(x, factor)


def divide(x: jax.Array, factor: Any) -> jax.Array:
    """The y whose product with the factor is x."""
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(factor, LowRank):
        rows = rows / factor.diagonal
        part = _matmul(_matmul(rows, factor.first.T), inverse(_capacitance(factor)))
        rows = rows - _matmul(part, factor.second / factor.diagonal)
    else:
        rows = _matmul(rows, inverse(factor))
    return rows.reshape(x.shape)


def log_abs_det(factor: Any) -> jax.Array:
    """Log of the absolute determinant of a factor."""
    if isinstance(factor, LowRank):
        small = _linalg.log_abs_det(_capacitance(factor))
        return jnp.sum(jnp.log(jnp.abs(factor.diagonal))) + small
    return _linalg.log_abs_det(factor)


def _capacitance(factor: LowRank) -> jax.Array:
    """I + L2 D^-1 L1', of shape (rank, rank), whose determinant is det P / det D."""
    own = _matmul(factor.second / factor.diagonal, factor.first.T)
    return jnp.eye(own.shape[0], dtype=own.dtype) + own


def half_squares(tree: PyTree, scale: float) -> jax.Array:
    """The energy of normal numbers of standard deviation ``scale``, up to a constant."""
    squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)]
    return functools.reduce(jnp.add, squares) / (2 * scale**2)
