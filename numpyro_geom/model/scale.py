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
from .arrowhead import ArrowRoot

PyTree = Any


class Scale(NamedTuple):
    """The coordinates, and the draws of a window of warm-up that give the next coordinates.

    Positions are one vector of D numbers, with sites in the order of their names.

    Attributes:
        centre: c, shape (D,).
        root: L, shape (D, D), or (D,) if it is diagonal, or an `ArrowRoot`.
        inverse: L^-1, in the shape of ``root``; empty for an `ArrowRoot`, which has both.
        total: sum of the window's phi, shape (D,).
        squares: sum of phi phi', in the shape of ``root``; for an `ArrowRoot` of the shared
            parameters, shape (d, d), and the diagonal for those of groups, shape (G, k).
        num_draws: draws in the window.
        last: phi of the last draw, shape (D,).
        changes: sum of squared changes of phi from draw to draw, shape (D,).
    """

    centre: jax.Array
    root: Any
    inverse: Any
    total: jax.Array
    squares: Any
    num_draws: jax.Array
    last: jax.Array
    changes: jax.Array

    @property
    def is_dense(self) -> bool:
        """Whether L is a matrix without structure."""
        return not self.is_structured and self.root.ndim > self.centre.ndim

    @property
    def is_structured(self) -> bool:
        """Whether L has the structure of groups."""
        return isinstance(self.root, ArrowRoot)

    @property
    def inverse_mass_matrix(self) -> jax.Array:
        """L L', the covariance that the coordinates assume; for a batch of chains one each.

        With the structure of groups it is the diagonal.
        """
        if self.is_structured:
            return self.root.variances()
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
        away = flat - self.centre
        phi = self.root.solve(away) if self.is_structured else times(self.inverse, away)
        return ravel(like)[1](phi)


def times(matrix: Any, other: jax.Array) -> jax.Array:
    """A product of matrices; the first may be given as a diagonal, or be an `ArrowRoot`."""
    if isinstance(matrix, ArrowRoot):
        return matrix.times(other)
    if matrix.ndim == 2:
        return jnp.matmul(matrix, other, precision=lax.Precision.HIGHEST)
    return matrix * other


def scale_about(centre: jax.Array, root: Any, inverse: Any = ()) -> Scale:
    """The coordinates with an empty window."""
    zeros, count = jnp.zeros_like(centre), jnp.zeros((), jnp.int32)
    squares: Any = jnp.zeros_like(root) if not isinstance(root, ArrowRoot) else None
    if squares is None:
        squares = jnp.zeros_like(root.corner), root.layout.split(zeros)[1]
    return Scale(centre, root, inverse, zeros, squares, count, zeros, zeros)
