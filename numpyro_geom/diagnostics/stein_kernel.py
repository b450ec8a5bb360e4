"""The Stein kernel of the inverse multiquadric, and its sums over all pairs of draws.

All computations use whitened coordinates z = L^-1 x with t = L' s, where S = L L' is the
preconditioner and s is the score of x. With r = z - z', q = 1 + |r|^2 and k = q^(-1/2)::

    k0(z, z') = D q^(-3/2) - 3 |r|^2 q^(-5/2) + r . (t - t') q^(-3/2) + t . t' q^(-1/2)

Under the target, k0 has expectation 0 in either argument.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.spatial.distance import pdist

from .._checks import check_choice
from .arrays import as_array, evenly, real_numbers

MEDIAN_DRAWS = 1000
"""Number of draws, evenly spaced, for the median distance."""
PRECONDITIONERS = ("scale", "covariance", "median", "identity")


class Whitened(NamedTuple):
    """Draws and scores in the whitened coordinates of the kernel, both of shape (n, D)."""

    z: jax.Array  # draws, centred and whitened
    t: jax.Array  # scores there


def whiten(draws: Any, scores: Any, precondition: Any) -> Whitened:
    """Check the arguments of `ksd`, flatten chains, and transform to whitened coordinates."""
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(np.float64))
    x, s = _matrix("draws", draws), _matrix("scores", scores)
    if np.shape(draws) != np.shape(scores):
        raise ValueError(
            f"draws and scores must have one shape, got {np.shape(draws)} and {np.shape(scores)}"
        )
    root = _root(x, precondition)
    # far from the origin, float32 would round away the distances between draws
    x = x - x.mean(axis=0)
    if root.ndim == 1:
        z, t = x / root, s * root
    else:
        z, t = np.linalg.solve(root, x.T).T, s @ root
    with np.errstate(over="ignore"):
        z, t = z.astype(dtype), t.astype(dtype)
    if not (np.isfinite(z).all() and np.isfinite(t).all()):
        raise ValueError(
            f"precondition must be about the variances of the draws, got {precondition!r}: with it "
            f"draws or scores exceed the range of {dtype}"
        )
    return Whitened(jnp.asarray(z), jnp.asarray(t))


def kernel(a: Whitened, b: Whitened) -> jax.Array:
    """The Stein kernel of all pairs, shape (draws of a, draws of b)."""

    def dot(u: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.matmul(u, v.T, precision=lax.Precision.HIGHEST)

    square = jnp.sum(a.z**2, 1)[:, None] + jnp.sum(b.z**2, 1) - 2 * dot(a.z, b.z)
    square = jnp.maximum(square, 0.0)
    # r . (t - t') without an array of all pairwise differences
    cross = jnp.sum(a.z * a.t, 1)[:, None] + jnp.sum(b.z * b.t, 1)
    cross = cross - dot(a.z, b.t) - dot(a.t, b.z)
    k = lax.rsqrt(1.0 + square)
    k_2 = k * k
    dim = a.z.shape[1]
    return k * (dot(a.t, b.t) + k_2 * (dim + cross - 3.0 * square * k_2))


def diagonal(a: Whitened) -> jax.Array:
    """The Stein kernel of each draw with itself, D + |t|^2."""
    return a.z.shape[1] + jnp.sum(a.t**2, axis=1)


def off_diagonal(a: Whitened, weights: jax.Array, chunk_size: int) -> np.ndarray:
    """``sum over i != j of w_i w_j k0(i, j)`` for each column w of ``weights``.

    A block of ``chunk_size`` squared entries is in memory at once. The final sum is in 64 bits.
    """
    rows = a.z.shape[0]
    chunk = min(chunk_size, rows)
    pad = -rows % chunk
    padded = [jnp.pad(x, ((0, pad), (0, 0))) for x in (*a, weights)]
    parts = [x.reshape((-1, chunk, x.shape[1])) for x in padded]
    return np.asarray(_forms(*parts)).astype(np.float64).sum(axis=0)


@jax.jit
def _forms(z: jax.Array, t: jax.Array, weights: jax.Array) -> jax.Array:
    """Quadratic forms, by chunk of rows. The diagonal counts as 0; padded draws have weight 0."""
    numbers = jnp.arange(z.shape[0])
    same = jnp.eye(z.shape[1], dtype=bool)

    def of_rows(first: tuple) -> jax.Array:
        i, z_i, t_i, w_i = first

        def add(total: jax.Array, second: tuple) -> tuple[jax.Array, None]:
            j, z_j, t_j, w_j = second
            block = kernel(Whitened(z_i, t_i), Whitened(z_j, t_j))
            block = jnp.where((i == j) & same, 0.0, block)
            return total + jnp.matmul(block, w_j, precision=lax.Precision.HIGHEST), None

        total, _ = lax.scan(add, jnp.zeros_like(w_i), (numbers, z, t, weights))
        return jnp.sum(w_i * total, axis=0)

    return lax.map(of_rows, (numbers, z, t, weights))


def _matrix(name: str, value: Any) -> np.ndarray:
    """The array with chains concatenated, in 64 bits; all values must be finite."""
    x = real_numbers(name, value, finite=False)
    if x.ndim not in (2, 3) or 0 in x.shape:
        raise ValueError(
            f"{name} must have shape (n, D) or (chains, draws, D), none of them 0, got {x.shape}: "
            "one number per draw is x[:, None]"
        )
    flat = x.reshape((-1, x.shape[-1]))
    bad = np.flatnonzero(~np.isfinite(flat).all(axis=1))
    if bad.size:
        raise ValueError(
            f"{name} must be finite, and {bad.size} of {len(flat)} draws are not (the first is "
            f"number {bad[0]}): leave these draws out and say so, or find out why they are there"
        )
    return flat


def _root(x: np.ndarray, precondition: Any) -> np.ndarray:
    """L with L L' = S: shape (D,) if S is diagonal, else (D, D)."""
    num_draws, dim = x.shape
    if isinstance(precondition, str):
        kind = check_choice("precondition", precondition, PRECONDITIONERS)
        if kind == "identity":
            return np.ones(dim)
        if kind == "covariance":
            return _cholesky(
                np.atleast_2d(np.cov(x, rowvar=False)) if num_draws > 1 else np.zeros((dim, dim)),
                f"more than D = {dim} distinct draws, and there are {num_draws}; or use 'scale'",
            )
        return _spread(x, kind)
    given = as_array("precondition", precondition)
    if given.dtype.kind not in "fiu" or given.shape not in ((), (dim,), (dim, dim)):
        raise ValueError(
            f"precondition must be one of {list(PRECONDITIONERS)}, or an array: variances of shape "
            f"({dim},) or a covariance matrix of shape ({dim}, {dim}); got {given.dtype} of shape "
            f"{given.shape}"
        )
    given = given.astype(np.float64)
    if given.ndim < 2:
        if not (np.isfinite(given) & (given > 0)).all():
            raise ValueError("precondition must hold finite positive variances: check its entries")
        return np.sqrt(np.broadcast_to(given, (dim,)))
    return _cholesky(given, "a matrix with finite entries")


def _spread(x: np.ndarray, kind: str) -> np.ndarray:
    num_draws, dim = x.shape
    if kind == "scale":
        root = x.std(axis=0)
    else:
        distances = pdist(x[evenly(num_draws, MEDIAN_DRAWS)])
        root = np.full(dim, np.median(distances) if distances.size else 0.0)
    # the spread of equal draws is a rounding error
    still = np.flatnonzero(root <= 1e-12 * np.abs(x).max(axis=0))
    if still.size:
        raise ValueError(
            f"precondition={kind!r} needs draws that differ, and {still.size} of {dim} coordinates "
            f"have no spread (the first is number {still[0]}): pass more draws, or an array of "
            "variances, or precondition='identity'"
        )
    return root


def _cholesky(matrix: np.ndarray, needs: str) -> np.ndarray:
    finite = np.isfinite(matrix).all()
    if finite and np.abs(matrix - matrix.T).max() <= 1e-4 * np.abs(matrix).max():
        try:
            root = np.linalg.cholesky((matrix + matrix.T) / 2)
        except np.linalg.LinAlgError:
            root = np.full_like(matrix, np.nan)
        # the conditional variance given the earlier coordinates; rounding can make 0 positive
        if (np.diag(root) ** 2 > 1e-12 * np.diag(matrix)).all():
            return root
    raise ValueError(f"precondition must be symmetric and positive definite: pass {needs}")
