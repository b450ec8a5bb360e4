"""Inverse roots of the statistics of `Shampoo`.

Lists run over all axes of all sites. A matrix axis has an array (blocks, n, n), a diagonal axis an
array (n,).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .kronecker import HIGHEST


class Roots(NamedTuple):
    """The fields of `ShampooState` that a refresh renews: lists, or arrays for one axis."""

    statistic: Any
    basis: Any
    eigenvalues: Any
    inverse: Any
    inverse_sqrt: Any


def ridge(dtype: Any) -> float:
    """Ridge relative to the largest eigenvalue: several times the error of the eigenvalues."""
    return 1e-12 if jnp.dtype(dtype) == jnp.float64 else 1e-6


def diagonal_like(axis: Any, value: float) -> jax.Array:
    """``value`` times the identity in the shape of an axis."""
    if len(axis.shape) == 1:
        return jnp.full(axis.shape, value, axis.dtype)
    return jnp.broadcast_to(value * jnp.eye(axis.shape[-1], dtype=axis.dtype), axis.shape)


def compose(basis: jax.Array, spectrum: jax.Array) -> jax.Array:
    """The matrices with these eigenvectors and eigenvalues; a diagonal matrix is a vector."""
    if spectrum.ndim == 1:
        return spectrum
    return jnp.matmul(basis * spectrum[..., None, :], basis.mT, precision=HIGHEST)


def roots_at_start(statistic: list[jax.Array], eps: float, powers: list[float]) -> Roots:
    """Roots of eps I, to the powers -p and -p / 2."""

    def of_axis(h: jax.Array, p: float) -> Roots:
        w = eps * (1 + ridge(h.dtype))
        basis = diagonal_like(h, 1.0) if h.ndim == 3 else jnp.zeros((0,), h.dtype)
        spectrum = jnp.full(h.shape[:2], w, h.dtype)
        return Roots(h, basis, spectrum, diagonal_like(h, w**-p), diagonal_like(h, w ** (-p / 2)))

    return _by_field(list(map(of_axis, statistic, powers)))


def refresh(statistic: list[jax.Array], powers: list[float], old: Roots) -> Roots:
    """Roots of ``statistic``; each block keeps its old roots if the new ones are not finite."""
    matrices = [i for i, h in enumerate(statistic) if h.ndim == 3]
    of_matrices = dict(zip(matrices, _matrix_roots(statistic, powers, matrices), strict=True))

    def keep(ok: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        if a.size == 0:
            return a
        return jnp.where(ok.reshape(ok.shape + (1,) * (a.ndim - ok.ndim)), a, b)

    renewed = []
    for i, (h, p) in enumerate(zip(statistic, powers, strict=True)):
        finite, new = of_matrices[i] if i in of_matrices else _diagonal_roots(h, p)
        renewed.append(Roots(*(keep(finite, a, b[i]) for a, b in zip(new, old, strict=True))))
    return _by_field(renewed)


def _by_field(axes: list[Roots]) -> Roots:
    return Roots(*([axis[k] for axis in axes] for k in range(len(Roots._fields))))


def _diagonal_roots(h: jax.Array, p: float) -> tuple[jax.Array, Roots]:
    """The roots of a diagonal axis, and whether they are finite (first)."""
    w = h + ridge(h.dtype) * jnp.max(h)
    finite = jnp.isfinite(w) & jnp.isfinite(w**-p)
    return finite, Roots(h, jnp.zeros((0,), h.dtype), w, w**-p, w ** (-p / 2))


def _matrix_roots(
    statistic: list[jax.Array], powers: list[float], chosen: list[int]
) -> list[tuple[jax.Array, Roots]]:
    """For each chosen axis: whether each block's roots are finite, and the roots.

    All blocks go through one batched eigendecomposition, because several independent ones in one
    program can deadlock on two cores. Smaller blocks are padded with an eigenvalue above their own
    eigenvalues, so that their own come first.
    """
    if not chosen:
        return []
    matrices = [statistic[i] for i in chosen]
    counts, sides = [h.shape[0] for h in matrices], [h.shape[-1] for h in matrices]
    side = max(sides)
    margins = [((0, 0), (0, side - n), (0, side - n)) for n in sides]
    batch = jnp.concatenate([jnp.pad(h, m) for h, m in zip(matrices, margins, strict=True)])
    own = jnp.arange(side) < np.repeat(sides, counts)[:, None]
    row_sums = jnp.sum(jnp.abs(batch), axis=-1, keepdims=True)
    above = 2 * jnp.max(row_sums, axis=-2, keepdims=True)
    batch = jnp.where(jnp.eye(side, dtype=bool) & ~own[..., None], above, batch)

    w, basis = jnp.linalg.eigh(batch)
    w = jnp.maximum(w, 0)  # rounding makes some zeros of a singular matrix negative
    relative = np.repeat([ridge(h.dtype) for h in matrices], counts)[:, None]
    w = w + relative.astype(w.dtype) * jnp.max(jnp.where(own, w, 0), axis=-1, keepdims=True)
    p = np.repeat([powers[i] for i in chosen], counts)[:, None].astype(w.dtype)
    inverse, inverse_sqrt = compose(basis, w**-p), compose(basis, w ** (-p / 2))
    finite = jnp.all(jnp.isfinite(inverse) & jnp.isfinite(inverse_sqrt), axis=(-2, -1))

    found, start = [], 0
    for h, count, n in zip(matrices, counts, sides, strict=True):
        rows = slice(start, start + count)
        fields = basis[rows, :n, :n], w[rows, :n], inverse[rows, :n, :n], inverse_sqrt[rows, :n, :n]
        found.append((finite[rows], Roots(h, *(field.astype(h.dtype) for field in fields))))
        start += count
    return found
