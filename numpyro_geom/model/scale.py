"""Scaled coordinates theta = c + L phi: the posterior is about equally wide in all directions.

The stiffest direction of the coordinates sets the step of every kernel. The flattest direction sets
how fast the kernel mixes. If L L' is about the posterior's covariance, the two are similar. The map
is linear, so its determinant is constant and drops out: a potential of phi is like any other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._util import ravel

PyTree = Any


class Scale(NamedTuple):
    """The coordinates, and the draws of a window of warm-up that give the next coordinates.

    Positions are one vector of D numbers, with sites in the order of their names.

    Attributes:
        centre: c, shape (D,).
        root: L, shape (D, D), or (D,) if it is diagonal.
        inverse: L^-1, in the shape of ``root``.
        total: sum of the window's phi, shape (D,).
        squares: sum of phi phi', in the shape of ``root``.
        num_draws: draws in the window.
        last: phi of the last draw, shape (D,).
        changes: sum of squared changes of phi from draw to draw, shape (D,).
    """

    centre: jax.Array
    root: jax.Array
    inverse: jax.Array
    total: jax.Array
    squares: jax.Array
    num_draws: jax.Array
    last: jax.Array
    changes: jax.Array

    @property
    def is_dense(self) -> bool:
        """Whether L is a matrix."""
        return self.root.ndim > self.centre.ndim

    @property
    def inverse_mass_matrix(self) -> jax.Array:
        """L L', the covariance that the coordinates assume; for a batch of chains one each."""
        if not self.is_dense:
            return self.root**2
        transposed = jnp.swapaxes(self.root, -1, -2)
        return jnp.matmul(self.root, transposed, precision=lax.Precision.HIGHEST)

    def to_sites(self, scaled: PyTree, like: PyTree) -> PyTree:
        """Theta of phi, in the structure of ``like``, a position of the model's sites."""
        flat, _ = ravel(scaled)
        return ravel(like)[1](self.centre + times(self.root, flat))

    def from_sites(self, position: PyTree, like: PyTree) -> PyTree:
        """Phi of theta, in the structure of ``like``, a position or a vector."""
        flat, _ = ravel(position)
        return ravel(like)[1](times(self.inverse, flat - self.centre))


def times(matrix: jax.Array, other: jax.Array) -> jax.Array:
    """A product of matrices; the first may be given as a diagonal."""
    if matrix.ndim == 2:
        return jnp.matmul(matrix, other, precision=lax.Precision.HIGHEST)
    return matrix * other


def scale_about(centre: jax.Array, root: jax.Array, inverse: jax.Array) -> Scale:
    """The coordinates with an empty window."""
    zeros, count = jnp.zeros_like(centre), jnp.zeros((), jnp.int32)
    return Scale(centre, root, inverse, zeros, jnp.zeros_like(root), count, zeros, zeros)
