"""Solves that only use products: conjugate gradients, with a sketch as preconditioner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._linalg import dot, one_by_one
from .._util import lazy_cond

Array = jax.Array

PLAIN, SKETCHED, CHECK, END = range(4)
"""Stages of `conjugate_gradients`."""


class Sketch(NamedTuple):
    """S = I - U' diag(c) U, near the inverse root of I + A for a positive semidefinite A.

    Attributes:
        basis: U, shape (rank, D), orthonormal rows.
        shrink: c, shape (rank,).
    """

    basis: Array
    shrink: Array

    def times(self, v: Array) -> Array:
        """S v."""
        along = self.shrink * jnp.matmul(self.basis, v, precision=lax.Precision.HIGHEST)
        return v - jnp.matmul(along, self.basis, precision=lax.Precision.HIGHEST)


def nystrom(product: Callable[[Array], Array], probes: Array) -> Sketch:
    """A sketch of A from its products with random vectors.

    Frangella, Tropp and Udell, "Randomized Nystrom preconditioning", SIAM J. Matrix Anal. Appl.
    44(2), 2023. Directions that are not found keep the identity, so that S^2 >= (I + A)^-1.

    ``probes`` are random vectors, shape (rank, D).
    """
    times = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    pushed = lax.map(product, probes)
    core = times(probes, pushed.T)
    values, vectors = one_by_one(lambda x: jnp.linalg.eigh(x))((core + core.T) / 2)
    least = probes.shape[0] * jnp.finfo(values.dtype).eps * values[-1]
    values = jnp.maximum(values, least + jnp.finfo(values.dtype).tiny)
    columns = times(pushed.T, vectors / jnp.sqrt(values))
    basis, sizes, _ = one_by_one(lambda x: jnp.linalg.svd(x, full_matrices=False))(columns)
    return Sketch(basis.T, 1 - (1 + sizes**2) ** -0.5)


def conjugate_gradients(
    product: Callable[[Array], Array],
    b: Array,
    tolerance: float,
    max_steps: int,
    sketch: Callable[[], Sketch] | None = None,
    patience: int = 0,
) -> Array:
    """``G^-1 b`` by conjugate gradients, for G of the form I + A; NaN without convergence.

    The iteration ends when the residual r has ``|r|^2 <= tolerance^2 x'b``. With G >= I this bounds
    the relative error of x in the norm of G. (The criterion of `jax.scipy.sparse.linalg.cg`,
    ``|r| <= tolerance |b|``, allows a completely wrong x where G is stiff along b.) The recursion's
    residual differs from the true residual b - G x, which rounding keeps above zero. If b - G x
    fails the test, a second solve for it gives the error of x, which is subtracted. If this error
    is more than 30 tolerances in the norm of G (in float32 3e-2), the solve has failed.
    Differentiable, by solves of the same kind.

    In float32 the tolerance is at least 1e-4. ``sketch`` makes a preconditioner, used if more than
    ``patience`` products are needed without: about as many as the sketch costs.
    """
    single = b.dtype != jnp.float64
    tolerance = max(tolerance, 1e-4 if single else 1e-9)
    most = max(30 * tolerance, 3e-2 if single else 0.0)  # largest error that may be subtracted

    def solve(product: Callable[[Array], Array], b: Array) -> Array:
        def descend(x: Array, left: Array, known: Sketch, share: Any, limit: Any) -> tuple:
            """Improve x by a solution for ``left``; its size in the norm of G, and convergence."""

            def precondition(v: Array) -> Array:
                return known.times(known.times(v))  # positive with any rounding errors

            def enough(step: Array) -> Array:
                return jnp.maximum(share**2 * dot(step, left), tolerance**2 * dot(x + step, b))

            def proceed(carry: tuple) -> Array:
                step, _, _, size, count = carry
                return (size > enough(step)) & (count < limit)

            def advance(carry: tuple) -> tuple:
                step, residual, direction, size, count = carry
                pushed = product(direction)
                length = size / dot(direction, pushed)
                step, residual = step + length * direction, residual - length * pushed
                scaled = precondition(residual)
                new = dot(residual, scaled)
                return step, residual, scaled + new / size * direction, new, count + 1

            scaled = precondition(left)
            start = jnp.zeros_like(b), left, scaled, dot(left, scaled), jnp.zeros((), jnp.int32)
            step, _, _, size, _ = lax.while_loop(proceed, advance, start)
            return x + step, dot(step, left), size <= enough(step)

        def advance(carry: tuple) -> tuple:
            x, left, known, stage, _ = carry
            if sketch is not None:
                known = lazy_cond(stage == SKETCHED, lambda _: sketch(), known)
            share = jnp.where(stage == CHECK, 0.1, 0.0)
            limit = jnp.where(stage == PLAIN, patience, max_steps)
            x, worth, found = descend(x, left, known, share, limit)
            left, whole = b - product(x), dot(x, b)
            sound = found & ((stage != CHECK) | (worth <= most**2 * whole))
            close = dot(left, left) <= (3 * tolerance) ** 2 * whole
            after = jnp.where(close | (stage == CHECK), END, CHECK)
            stage = jnp.where(found, after, jnp.where(stage == PLAIN, SKETCHED, END))
            return x, left, known, stage, sound

        rank = 0 if sketch is None else jax.eval_shape(sketch).shrink.size
        known = Sketch(jnp.zeros((rank, b.size), b.dtype), jnp.zeros(rank, b.dtype))
        first = jnp.asarray(SKETCHED if sketch is None else PLAIN)
        start = jnp.zeros_like(b), b, known, first, jnp.ones((), bool)
        x, *_, sound = lax.while_loop(lambda carry: carry[3] != END, advance, start)
        return jnp.where(sound, x, jnp.nan)

    return lax.custom_linear_solve(product, b, solve, symmetric=True)
