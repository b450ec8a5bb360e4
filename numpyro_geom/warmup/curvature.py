"""Curvature and gradient noise at a chain's position, from matrix-vector products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.flatten_util import ravel_pytree as ravel

from .._linalg import matmul
from .._util import PyTree, key_word, lazy_cond, scattered_floats, tree_where
from ..model.arrowhead import Layout
from ..model.derivatives import jvp, linearize
from ..model.model import CURVATURE_ROWS
from ..model.potential import Potential
from ..model.scale import LowRankRoot
from ..sampling.algorithm import rule_temperature
from ..sampling.settings import DENSE_LIMIT
from ..sampling.state import Adaptation
from .lanczos import LANCZOS_STEPS, Extremes, extreme_eigenvalues, normalise

ROWS_PER_PARAMETER = 4
"""Rows per parameter from which products with a Hessian are taken, at least. The eigenvalues of a
Hessian that is the identity then come out between .25 and 2.25."""
PROBES = 24
"""Number of random vectors that estimate a diagonal, and what noise does to means."""
FAR = 0.99
"""Quantile of the estimated noise of many parameters that counts as the largest. The estimates have
heavy tails, and the largest of thousands is many times what it estimates."""
POWER_STEPS = 12
"""Power steps towards the direction of a noise. It must be known to some tens of percent."""


def measure(
    potential: Potential,
    position: PyTree,
    apply_inverse_sqrt: Callable[[PyTree], PyTree],
    rng_key: jax.Array,
    adaptation: Adaptation,
    replacing: Any = True,
    noise_factor: float = 1.0,
    second_order: jax.Array | None = None,
    scaled: bool = False,
    **of_noise: Any,
) -> Adaptation:
    """Measure lam_H, lam_min and lam_C at a position.

    Args:
        potential: the target.
        position: where to measure.
        apply_inverse_sqrt: x -> A^{1/2} x.
        rng_key: for the rows and the starting vectors.
        adaptation: the state to fill in.
        replacing: whether to replace earlier measurements; otherwise the extremes are kept.
        noise_factor: variance of the gradient in a step, relative to the whole batch's gradient.
        second_order: factor of the squared Hessian that is added to the Hessian.
        scaled: whether 0 is the middle of the target.
        of_noise: further arguments of `noise_at`.

    Returns:
        The adaptation with new ``curvature``, ``flattest`` and ``noise``. A measurement that is not
        finite leaves the value of ``adaptation``.
    """
    flat, unravel = ravel(position)
    start = scattered_floats(key_word(rng_key), flat.size, flat.dtype)

    def root(v: jax.Array) -> jax.Array:
        return ravel(apply_inverse_sqrt(unravel(v)))[0]

    def extremes(place: jax.Array) -> Extremes:
        """Of A^{1/2} H A^{1/2}."""
        hvp = hessian_at(potential, unravel(place), rng_key)

        def product(v: jax.Array) -> jax.Array:
            v = ravel(hvp(unravel(root(v))))[0]
            if second_order is not None:
                v = v + second_order * ravel(hvp(unravel(v)))[0]
            return root(v)

        return extreme_eigenvalues(product, start, LANCZOS_STEPS)

    # in scaled coordinates a step is also stable in the middle, where a heavy tail has its core
    largest, positive, smallest = lax.map(extremes, jnp.stack([flat, *[0 * flat] * scaled]))
    curvature = jnp.max(jnp.array([largest[0], -smallest[0], jnp.nan_to_num(largest[-1])]))
    # along negative curvature the chain drifts about as slowly as it would relax
    flattest = jnp.minimum(jnp.abs(smallest[0]), positive[0])
    flattest = jnp.where(jnp.isfinite(flattest) & (flattest > 0), flattest, curvature)
    # what chance explains is not flat
    flattest = jnp.minimum(flattest / chance(potential, flat.size)[0], curvature)
    noise = noise_factor * noise_at(potential, position, rng_key, root=root, **of_noise)[0]
    fresh = adaptation._replace(curvature=curvature, flattest=flattest, noise=noise)
    extended = fresh._replace(
        curvature=jnp.maximum(curvature, adaptation.curvature),
        flattest=jnp.minimum(flattest, adaptation.flattest),
        noise=jnp.maximum(noise, adaptation.noise),
    )
    usable = jnp.isfinite(curvature) & jnp.isfinite(noise) & (curvature + noise > 0)
    return tree_where(usable, tree_where(replacing, fresh, extended), adaptation)


def noise_at(
    potential: Potential,
    position: PyTree,
    rng_key: jax.Array,
    *,
    scores: Callable[[jax.Array], tuple] | None = None,
    root: Callable[[jax.Array], jax.Array] = lambda v: v,
    layout: Layout | None = None,
    plain: Potential | None = None,
    temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Estimates of lam_C, the largest eigenvalue of the gradient's covariance, and of tr C.

    Random signs of rows give the diagonal of C. Power steps give a direction, and |C v| is then
    measured on other rows: the largest eigenvalue of one sample is too large unless the sample has
    many more rows than there are parameters. |C v| is too small if some rows do not show the
    direction, as those of a player with few matches. The quantile `FAR` of C's diagonal is a lower
    bound, or the mean where a matrix has mixed all parameters. One loop takes all estimates, so
    that the energy of the rows occurs once.

    With groups, in coordinates in which the target is about equally wide in all directions about 0,
    it is a mean over positions, as the noise that widens a group: at any position a few groups are
    far from an anchor.

    The shift by the noise is tau^{1/2} |grad tr(H C)| / 2 along the shared parameters. Where noise
    widens the law by the covariance b tau C, it moves the mean by -b tau grad tr(H C) / 2. In sd
    this is b times the shift, as b lam_C is the error of a variance. It is by far the larger one
    for a scale of many values: each of them says little about the scale, but all are too wide.

    Args:
        potential: the target.
        position: where to measure, or how far from 0.
        rng_key: for rows, positions and signs.
        scores: `Potential.score_noise` of the gradients that steps see, if these are corrected.
        root: v -> A^{1/2} v.
        layout: the parameters that belong to groups.
        plain: the target without a control variate, which changes nothing in the shift, because it
            is at most quadratic. None if noise moves no mean, or its effect is corrected.
        temperature: tau.
    """
    flat, unravel = ravel(position)
    scores = potential.score_noise if scores is None else scores
    if not scores(rng_key):
        return jnp.zeros((), flat.dtype), jnp.zeros((), flat.dtype)
    far = jnp.linalg.norm(flat) / flat.size**0.5
    plain = None if layout is None else plain

    def shift_of(_: Any, noise: jax.Array, place: Any, key: Any) -> jax.Array:
        """The gradient of v' H v, for noise v from other rows, by differences of up to one sd."""
        rows = plain.curvature_batch(random.fold_in(key, 1))  # type: ignore[union-attr]
        length = 1 / jnp.maximum(jnp.max(jnp.abs(noise)), jnp.finfo(flat.dtype).tiny)
        away = root(length * noise)

        def force(side: jax.Array) -> jax.Array:
            gradient = jax.grad(plain.energy)(unravel(place + side * away), rows)  # type: ignore
            return layout.parts(root(ravel(gradient)[0]))[0]  # type: ignore[union-attr]

        here, ahead, behind = lax.map(force, jnp.array([0.0, 1.0, -1.0], flat.dtype))
        return (ahead + behind - 2 * here) / length**2

    def look(k: jax.Array, found: tuple) -> tuple:
        v, _, last, diagonal, shifts = found
        key, probing = random.fold_in(rng_key, k), k < PROBES
        there, along = flat, unravel(root(v))
        if layout is not None:
            there = far * random.normal(key, flat.shape, flat.dtype)
        place = unravel(there)
        product, entries = jnp.zeros_like(v), jnp.zeros_like(v)
        for weight, rows_fn in scores(key):
            rows, push = linearize(rows_fn, place)
            signs = jnp.sign(scattered_floats(key_word(key), rows.size, rows.dtype))
            slopes = jnp.where(probing, signs.reshape(rows.shape), push(along) / rows.size)
            slopes -= slopes.ravel()[0]  # equal ones have no noise, not even by rounding
            pulled = ravel(jax.vjp(push, place)[1](slopes - jnp.mean(slopes))[0])[0]
            product = product + weight * pulled
            noise = (weight / rows.size) ** 0.5 * root(pulled)
            entries = entries + noise**2
            if plain is not None:
                shift = lazy_cond(probing, shift_of, shifts[0], noise, there, key)
                shifts = shifts.at[k % 2].add(jnp.where(probing, shift / (PROBES / 2), 0))
        product = root(product)
        turning = ~probing & (k < PROBES + POWER_STEPS)
        turned = jnp.where(turning, normalise(product)[0], v)
        return turned, last, product, diagonal + jnp.where(probing, entries, 0) / PROBES, shifts

    start = scattered_floats(key_word(rng_key), flat.size, flat.dtype)
    nothing = jnp.zeros_like(start)
    none = jnp.zeros((2, 0 if layout is None else layout.num_shared), flat.dtype)
    found = normalise(start)[0], nothing, nothing, nothing, none
    _, one, other, diagonal, shifts = lax.fori_loop(0, PROBES + POWER_STEPS + 2, look, found)
    shift = jnp.sqrt(rule_temperature(temperature) * jnp.abs(jnp.vdot(*shifts))) / 2
    mixed = layout is None and flat.size <= DENSE_LIMIT
    least = jnp.mean(diagonal) if mixed else jnp.quantile(diagonal, FAR)
    most = jnp.maximum(jnp.sqrt(jnp.abs(jnp.vdot(one, other))), least)
    return jnp.where(jnp.isfinite(shift), jnp.maximum(most, shift), most), jnp.sum(diagonal)


def diagonal_curvature(
    potential: Potential,
    position: jax.Array,
    rng_key: jax.Array,
    before: jax.Array,
    root: LowRankRoot,
) -> jax.Array:
    """Estimate of the diagonal of |H|, shape (D,), from products with random vectors of signs.

    Each product uses other rows, so that a group with few rows is also seen. The vectors are scaled
    by an estimate ``before``. Otherwise the stiffest parameters would hide the others. An entry
    below the noise of its estimate counts as that noise. What the stiff directions of a ``root`` of
    H^-1 explain is not estimated, so the rest has less noise.
    """
    width = before**-0.5
    directions, values = root.vectors / root.outer, jnp.maximum(root.factors**-2 - 1, 0)
    own = jnp.sum(values[:, None] * directions**2, axis=0)

    def look(k: jax.Array, sums: tuple) -> tuple:
        key = random.fold_in(rng_key, k)
        batch = potential.curvature_batch(key)
        signs = jnp.sign(scattered_floats(key_word(key), position.size, position.dtype))
        product = jvp(jax.grad(lambda x: potential.energy(x, batch)), position, signs * width)[1]
        product -= matmul(values * matmul(directions, signs * width), directions)
        entries = own + signs * product / width
        return sums[0] + entries, sums[1] + entries**2

    zeros = jnp.zeros_like(position)
    total, squares = lax.fori_loop(0, PROBES, look, (zeros, zeros))
    mean = total / PROBES
    variance = jnp.maximum(squares / PROBES - mean**2, 0.0)
    found = jnp.sqrt(mean**2 + variance / PROBES)
    return jnp.where(jnp.isfinite(found) & (found > 0), found, before)


def _parts(potential: Potential, size: int) -> int:
    """Number of sets of rows that measure the curvature of this many parameters."""
    rows = min(ROWS_PER_PARAMETER * size, potential.num_data)
    return 1 if potential.deterministic else -(-rows // min(CURVATURE_ROWS, potential.num_data))


def chance(potential: Potential, size: int) -> tuple[float, float]:
    """Smallest and largest eigenvalue that chance gives `hessian_at` where all should be 1.

    They are the edges (1 -+ sqrt(D / n))^2 of the law of Marchenko and Pastur (1967), for n rows.
    """
    rows = CURVATURE_ROWS * _parts(potential, size)
    if potential.deterministic or rows >= potential.num_data:
        return 1.0, 1.0
    away = (size / rows) ** 0.5
    return max(1 - away, 0) ** 2, (1 + away) ** 2


def hessian_at(
    potential: Potential, position: PyTree, rng_key: jax.Array
) -> Callable[[PyTree], PyTree]:
    """The product with the Hessian at a position, on `ROWS_PER_PARAMETER` or on all rows."""
    flat, unravel = ravel(position)
    parts = _parts(potential, flat.size)

    def grad_on(rng_key: jax.Array) -> Callable:
        batch = potential.curvature_batch(rng_key)
        return jax.grad(lambda position: potential.energy(position, batch))

    if parts <= 1:
        return linearize(grad_on(rng_key), position)[1]

    def product(v: PyTree) -> PyTree:
        def add(k: jax.Array, total: PyTree) -> PyTree:
            found = jvp(grad_on(random.fold_in(rng_key, k)), position, v)[1]
            return jax.tree.map(lambda x, y: x + y / parts, total, found)

        return lax.fori_loop(0, parts, add, jax.tree.map(jnp.zeros_like, v))

    return product
