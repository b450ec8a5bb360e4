"""Scaled coordinates theta = c + L phi: the posterior is about equally wide in all directions.

The stiffest direction of the coordinates sets the step of every kernel. The flattest direction sets
how fast the kernel mixes. If L L' is about the posterior's covariance, the two are similar. The map
is linear, so its determinant is constant and drops out: a potential of phi is like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree as ravel

from .._linalg import MatrixRoot, balanced_roots, matmul
from .._util import PyTree
from .arrowhead import ArrowRoot


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["outer", "vectors", "factors", "inner"],
    meta_fields=[],
)
@dataclass(frozen=True)
class LowRankRoot:
    """L = diag(a) (I + V' (diag(s) - I) V) diag(b): a diagonal, and r further directions.

    A product costs O(r D) operations. With r = 0 it is a diagonal.

    Attributes:
        outer: a, shape (D,).
        vectors: V, whose rows are orthonormal, shape (r, D).
        factors: s, shape (r,).
        inner: b, shape (D,).
    """

    outer: jax.Array
    vectors: jax.Array
    factors: jax.Array
    inner: jax.Array

    def times(self, vector: jax.Array) -> jax.Array:
        """L phi."""
        return self.outer * self._stretched(self.inner * vector, self.factors)

    def solve(self, vector: jax.Array) -> jax.Array:
        """L^-1 theta."""
        return self._stretched(vector / self.outer, 1 / self.factors) / self.inner

    def transposed_times(self, vector: jax.Array) -> jax.Array:
        """L' v."""
        return self.inner * self._stretched(self.outer * vector, self.factors)

    def variances(self) -> jax.Array:
        """The diagonal of L L', shape (D,); for a batch of chains one each."""
        if self.outer.ndim > 1:
            return jax.vmap(LowRankRoot.variances)(self)
        squares, change = self.inner**2, self.factors - 1
        middle = change[:, None] * matmul(self.vectors * squares, self.vectors.T) * change
        own = jnp.sum(self.vectors**2 * change[:, None], axis=0)
        both = jnp.sum(self.vectors * matmul(middle, self.vectors), axis=0)
        return self.outer**2 * (squares * (1 + 2 * own) + both)

    def then(self, width: jax.Array) -> LowRankRoot:
        """L diag(width)."""
        return LowRankRoot(self.outer, self.vectors, self.factors, self.inner * width)

    def products(self, vector: jax.Array) -> jax.Array:
        """The squares of phi."""
        return vector**2

    def _stretched(self, vector: jax.Array, factors: jax.Array) -> jax.Array:
        if not len(factors):
            return vector
        return vector + matmul((factors - 1) * matmul(self.vectors, vector), self.vectors)


class Scale(NamedTuple):
    """The coordinates, and the draws of a window of warm-up that give the next coordinates.

    Positions are one vector of D numbers, with sites in the order of their names.

    Attributes:
        centre: c, shape (D,).
        root: L, a `MatrixRoot`, an `ArrowRoot` or a `LowRankRoot`.
        total: sum of the window's phi, shape (D,).
        squares: sum of phi phi', as far as the root takes it in: its ``products(phi)``.
        num_draws: draws in the window; one that is far out counts as a part.
        last: phi of the last draw, shape (D,).
        changes: sum of squared changes of phi from draw to draw, shape (D,).
    """

    centre: jax.Array
    root: Any
    total: jax.Array
    squares: Any
    num_draws: jax.Array
    last: jax.Array
    changes: jax.Array

    @property
    def inverse_mass_matrix(self) -> jax.Array:
        """L L', the covariance that the coordinates assume; for a batch of chains one each.

        With the structure of groups, or a low rank, it is the diagonal.
        """
        is_matrix = isinstance(self.root, MatrixRoot)
        return self.root.covariance() if is_matrix else self.root.variances()

    def variances_given_others(self, index: np.ndarray) -> jax.Array:
        """Variances of some parameters given all others, as the coordinates assume, shape (D,).

        ``index`` are these parameters, those of all groups. A low rank gives marginal variances.
        """
        if isinstance(self.root, ArrowRoot):
            return self.root.variances_given_shared()
        if isinstance(self.root, LowRankRoot):
            return self.root.variances()
        columns = self.root.inverse[:, index]
        within = balanced_roots(matmul(columns.T, columns))[1]
        return jnp.ones_like(self.centre).at[index].set(jnp.sum(within**2, axis=0))

    def to_sites(self, scaled: PyTree, like: PyTree) -> PyTree:
        """Theta of phi, in the structure of ``like``, a position of the model's sites."""
        flat, _ = ravel(scaled)
        return ravel(like)[1](self.centre + self.root.times(flat))

    def from_sites(self, position: PyTree, like: PyTree) -> PyTree:
        """Phi of theta, in the structure of ``like``, a position or a vector."""
        flat, _ = ravel(position)
        return ravel(like)[1](self.root.solve(flat - self.centre))


def scale_about(centre: jax.Array, root: Any) -> Scale:
    """The coordinates with an empty window."""
    zeros, count = jnp.zeros_like(centre), jnp.zeros((), centre.dtype)
    return Scale(centre, root, zeros, root.products(zeros), count, zeros, zeros)
