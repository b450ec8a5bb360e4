"""Products of a tensor's blocks with one matrix per axis, and the derivative of these products.

Blocks have the shape (blocks, n_1, ..., n_d), the matrices of axis i the shape (blocks, n_i, n_i).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

HIGHEST = lax.Precision.HIGHEST
Arrays = tuple[jax.Array, ...]


def _contract(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """Sum over all axes except the first axis, which both share, and ``axis``."""
    others = tuple(i for i in range(1, left.ndim) if i != axis)
    return lax.dot_general(left, right, ((others, others), ((0,), (0,))), precision=HIGHEST)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def gram(x: jax.Array, axis: int) -> jax.Array:
    """x_(axis) x_(axis)' of each block."""
    return _contract(x, x, axis)


@gram.defjvp
def _gram_jvp(axis: int, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    half = _contract(dx, x, axis)  # the other half is its transpose: one product, not two
    return gram(x, axis), half + half.mT


def _product(matrix: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """Product of each block's matrix with its axis ``axis``."""
    blocks, n = x.shape[0], x.shape[axis]
    if axis == x.ndim - 1 and axis > 1:
        y = jnp.matmul(x.reshape(blocks, -1, n), matrix.mT, precision=HIGHEST)
    elif axis == 1:
        y = jnp.matmul(matrix, x.reshape(blocks, n, -1), precision=HIGHEST)
    else:
        before = math.prod(x.shape[1:axis])
        y = jnp.matmul(matrix[:, None], x.reshape(blocks, before, n, -1), precision=HIGHEST)
    return y.reshape(x.shape)


def _products(matrices: Arrays, x: jax.Array) -> jax.Array:
    for axis, matrix in enumerate(matrices, 1):
        x = _product(matrix, x, axis)
    return x


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def kronecker(
    exponent: float,
    statistic: Arrays,
    basis: Arrays,
    eigenvalues: Arrays,
    roots: Arrays,
    x: jax.Array,
) -> jax.Array:
    """Products with ``roots``, which are (statistic + r I)^exponent, along every axis.

    The derivative in ``statistic`` needs the eigendecomposition that is given, and computes none.
    It takes the ridge r as constant.
    """
    return _products(roots, x)


@functools.partial(kronecker.defjvp, symbolic_zeros=True)
def _kronecker_jvp(exponent: float, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    _, basis, eigenvalues, roots, x = primals
    changes, dx = tangents[0], tangents[-1]
    total = jnp.zeros_like(x) if _is_zero(dx) else _products(roots, dx)
    if not all(_is_zero(change) for change in changes):
        total = total + _change(exponent, changes, basis, eigenvalues, x)
    return _products(roots, x), total


def _change(
    exponent: float, changes: Arrays, basis: Arrays, eigenvalues: Arrays, x: jax.Array
) -> jax.Array:
    """Derivative of the products with (H + r I)^exponent along changes of H, in H's eigenbasis."""
    x = _products(tuple(q.mT for q in basis), x)
    scales = [
        (w**exponent).reshape(w.shape[:1] + (1,) * i + w.shape[1:] + (1,) * (x.ndim - 2 - i))
        for i, w in enumerate(eigenvalues)
    ]
    total = jnp.zeros_like(x)
    for i, (change, q, w) in enumerate(zip(changes, basis, eigenvalues, strict=True)):
        if not _is_zero(change):
            others = math.prod(scales[:i] + scales[i + 1 :], start=x)
            rotated = jnp.matmul(jnp.matmul(q.mT, change, precision=HIGHEST), q, precision=HIGHEST)
            slope = rotated * _divided_difference(w[..., :, None], w[..., None, :], exponent)
            total = total + _product(slope, others, i + 1)
    return _products(basis, total)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _divided_difference(a: jax.Array, b: jax.Array, p: float) -> jax.Array:
    """(a^p - b^p) / (a - b), and p a^(p-1) where a = b.

    It is computed as b^(p-1) expm1(p t) / expm1(t), t = log a - log b, stable for all a, b > 0.
    """
    t = jnp.log(a) - jnp.log(b)
    equal = t == 0
    t = jnp.where(equal, 1.0, t)
    return b ** (p - 1) * jnp.where(equal, p, jnp.expm1(p * t) / jnp.expm1(t))
