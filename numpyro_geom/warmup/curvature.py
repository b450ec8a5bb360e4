"""Curvature and gradient noise at a chain's position, from matrix-vector products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.flatten_util import ravel_pytree as ravel

from .._linalg import eigenvalues, matmul
from .._util import LANES, PyTree, key_word, lazy_cond, scattered_floats
from ..model.arrowhead import Layout
from ..model.derivatives import jvp, linearize
from ..model.model import CURVATURE_ROWS
from ..model.potential import Potential
from ..model.scale import LowRankRoot
from ..sampling.algorithm import rule_temperature
from ..sampling.settings import DENSE_LIMIT
from ..sampling.state import Adaptation
from .lanczos import LANCZOS_STEPS, Extremes, ends, extreme_eigenvalues, normalise

SMALLEST_SHARE = 2.0**-20
"""Smallest share of a length: it means that no energy within reach is finite."""
ROWS_PER_PARAMETER = 4
"""Rows per parameter from which products with a Hessian are taken, at least. The eigenvalues of a
Hessian that is the identity then come out between .25 and 2.25."""
PROBES = 24
"""Number of random vectors that estimate a diagonal."""
SHIFT_PROBES = 8
"""Number of probes that also tell what noise does to means."""
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
    replacing: jax.Array | bool = True,
    noise_factor: float = 1.0,
    second_order: jax.Array | None = None,
    temperature: float = 1.0,
    score_noise: Callable[[jax.Array], tuple] | None = None,
    layout: Layout | None = None,
    plain: Potential | None = None,
) -> Adaptation:
    """Measure lam_H, lam_min and lam_C at a position; beyond `DENSE_LIMIT` by iterations.

    Args:
        potential: the target.
        position: where to measure.
        apply_inverse_sqrt: x -> A^{1/2} x.
        rng_key: for the rows and the starting vectors.
        adaptation: the state to fill in.
        replacing: whether to replace earlier measurements; otherwise the extremes are kept.
        noise_factor: variance of the gradient in a step, relative to the whole batch's gradient.
        second_order: factor of the squared Hessian that is added to the Hessian.
        temperature: tau.
        score_noise: `Potential.score_noise` of the gradients that steps see, if these are
            corrected. The curvature does not depend on a linear correction.
        layout: the parameters that belong to groups, in coordinates in which the target is about
            equally wide in all directions about 0. Noise is then a mean over positions, and what
            it does to the means of shared parameters counts as well.
        plain: the target without a control variate; None if noise moves no mean, or its effect is
            corrected.

    Returns:
        The adaptation with new ``curvature``, ``flattest`` and ``noise``. A measurement that is not
        finite leaves the value of ``adaptation``.
    """
    flat, unravel = ravel(position)
    tau = rule_temperature(temperature)

    def root(v: jax.Array) -> jax.Array:
        return ravel(apply_inverse_sqrt(unravel(v)))[0]

    scores = potential.score_noise if score_noise is None else score_noise
    batch, noisy = potential.curvature_batch(rng_key), bool(scores(rng_key))
    start = scattered_floats(key_word(rng_key), flat.size, flat.dtype)
    direction = root(start)

    def curvature_at(flat: jax.Array) -> Callable:
        """The product with A^{1/2} H A^{1/2}."""
        hvp = hessian_at(potential, unravel(flat), rng_key)

        def product(v: jax.Array) -> jax.Array:
            v = ravel(hvp(unravel(root(v))))[0]
            if second_order is not None:
                v = v + second_order * ravel(hvp(unravel(v)))[0]
            return root(v)

        return product

    def covariance_at(flat: jax.Array, rng_key: jax.Array) -> Callable:
        """The product with A^{1/2} C A^{1/2}, where C is of the rows that a key selects."""
        covariance = _noise_covariance(scores, unravel(flat), rng_key)
        return lambda v: root(noise_factor * covariance(root(v)))

    def covariance_matrix(flat: jax.Array) -> jax.Array:
        """The matrix of `covariance_at`, from derivatives of the rows in D directions."""
        total = jnp.zeros((flat.size, flat.size), flat.dtype)
        for weight, rows_fn in scores(rng_key):
            rows, push = linearize(rows_fn, unravel(flat))
            slopes = _matrix(lambda v, push=push: push(unravel(root(v))), flat)
            slopes -= jnp.mean(slopes, axis=1, keepdims=True)
            product = matmul(slopes, slopes.T)
            total += weight / rows.size * product
        return noise_factor * total

    def ends_at(flat: jax.Array, of_noise: jax.Array) -> Extremes:
        """The extreme eigenvalues of the curvature, or of the noise."""
        if flat.size <= DENSE_LIMIT:
            wanted = [lambda flat: _matrix(curvature_at(flat), flat)]
            if noisy:
                wanted.append(covariance_matrix)
            matrix = lax.switch(of_noise.astype(jnp.int32), wanted, flat)
            finite = jnp.all(jnp.isfinite(matrix))
            values = eigenvalues(jnp.where(finite, matrix + matrix.T, 0) / 2)
            return ends(jnp.where(finite, values, jnp.nan))

        def of_curvature(flat: jax.Array) -> Extremes:
            return extreme_eigenvalues(curvature_at(flat), flat.size, start, LANCZOS_STEPS)

        def of_covariance(flat: jax.Array) -> Extremes:
            if layout is not None:
                largest = _noise_of_groups(
                    scores,
                    unravel(flat),
                    root,
                    noise_factor,
                    rng_key,
                    layout,
                    plain,
                    temperature,
                )
            else:
                largest = _on_other_rows(
                    partial(covariance_at, flat), start, rng_key, _parts(potential, flat.size)
                )
            return Extremes(largest, largest, largest)

        if not noisy:
            return of_curvature(flat)
        return lax.cond(of_noise, of_covariance, of_curvature, flat)

    def energy(flat: jax.Array) -> jax.Array:
        return potential.energy(unravel(flat), batch)

    def look(k: jax.Array, found: tuple[jax.Array, jax.Array, jax.Array]) -> tuple:
        """Measure curvature at the position, or at the target's spread from it, or noise."""
        largest, flattest, noise = found
        of_noise, off = k == 2, k == 1
        length = jnp.sqrt(tau / jnp.maximum(largest, jnp.finfo(flat.dtype).tiny))
        # without any curvature there is no length
        length = in_trust_region(energy, flat, direction, jnp.where(off, length, 0.0), temperature)
        new = ends_at(flat + length * direction, of_noise)
        higher = ~of_noise & ((k == 0) | (new.largest_magnitude > largest))
        # along negative curvature the chain drifts about as slowly as it would relax
        least = jnp.minimum(jnp.abs(new.smallest), new.smallest_positive)
        return (
            jnp.where(higher, new.largest_magnitude, largest),
            jnp.where(k == 0, least, flattest),
            jnp.where(of_noise, new.largest_magnitude, noise),
        )

    # a mode can be flat where the target is not; later the chain itself has visited the target
    looks = jnp.where(replacing, jnp.array([0, 1, 2]), jnp.array([0, 2, 2]))
    num_looks = jnp.where(replacing, 2, 1) + noisy
    zero = jnp.zeros((), flat.dtype)
    curvature, flattest, noise = lax.fori_loop(
        0, num_looks, lambda j, found: look(looks[j], found), (zero, zero, zero)
    )
    flattest = jnp.where(jnp.isfinite(flattest) & (flattest > 0), flattest, curvature)
    if flat.size > DENSE_LIMIT:  # what chance explains is not flat
        flattest = jnp.minimum(flattest / chance(potential, flat.size)[0], curvature)
    fresh = adaptation._replace(curvature=curvature, flattest=flattest, noise=noise)
    extended = fresh._replace(
        curvature=jnp.maximum(curvature, adaptation.curvature),
        flattest=jnp.minimum(flattest, adaptation.flattest),
        noise=jnp.maximum(noise, adaptation.noise),
    )
    usable = jnp.isfinite(curvature) & jnp.isfinite(noise) & (curvature + noise > 0)
    return jax.tree.map(
        lambda old, new, both: jnp.where(usable, jnp.where(replacing, new, both), old),
        adaptation,
        fresh,
        extended,
    )


def in_trust_region(
    energy: Callable[[jax.Array], jax.Array],
    position: jax.Array,
    direction: jax.Array,
    length: Any,
    temperature: float,
) -> jax.Array:
    """The first of ``length`` and its halves where the energy is higher by no more than tau D.

    This is twice the mean rise in a Gaussian. The rise is the mean of both sides: some rows have
    their mode elsewhere, and their slope must not count. The last value tried is `SMALLEST_SHARE`
    of ``length``.
    """
    most = rule_temperature(temperature) * position.size

    def too_far(tried: jax.Array) -> jax.Array:
        sides = jnp.array([0.0, 1.0, -1.0], position.dtype)
        here, ahead, behind = lax.map(
            lambda side: energy(position + side * tried * direction), sides
        )
        return ~((ahead + behind) / 2 - here <= most) & (tried > SMALLEST_SHARE * length)

    return lax.while_loop(too_far, lambda tried: tried / 2, jnp.asarray(length, position.dtype))


def largest_noise(
    potential: Potential,
    position: PyTree,
    rng_key: jax.Array,
    layout: Layout | None = None,
    plain: Potential | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """Estimate of lam_C, the largest eigenvalue of the gradient's covariance; see `measure`."""
    flat, _ = ravel(position)
    start = scattered_floats(key_word(rng_key), flat.size, flat.dtype)
    scores = potential.score_noise
    if layout is not None:
        return _noise_of_groups(
            scores,
            position,
            lambda v: v,
            1.0,
            rng_key,
            layout,
            plain,
            temperature,
        )
    covariance = partial(_noise_covariance, scores, position)
    return _on_other_rows(covariance, start, rng_key, _parts(potential, flat.size))


def total_noise(potential: Potential, position: PyTree, rng_key: jax.Array) -> jax.Array:
    """Estimate of tr C, the squared length of a gradient's noise, as a mean over positions."""
    flat, unravel = ravel(position)

    def look(k: jax.Array, total: jax.Array) -> jax.Array:
        key = random.fold_in(rng_key, k)
        for weight, rows_fn in potential.score_noise(key):
            rows, pull = jax.vjp(rows_fn, unravel(_elsewhere(flat, key)))
            word = key_word(random.fold_in(key, 1))
            signs = jnp.sign(scattered_floats(word, rows.size, rows.dtype))
            noise = ravel(pull((signs - jnp.mean(signs)).reshape(rows.shape))[0])[0]
            total += weight / rows.size * jnp.vdot(noise, noise)
        return total

    return lax.fori_loop(0, SHIFT_PROBES, look, jnp.zeros((), flat.dtype)) / SHIFT_PROBES


def _elsewhere(position: jax.Array, rng_key: jax.Array) -> jax.Array:
    """A position as far from 0 as a given one, for targets about equally wide in all directions."""
    distance = jnp.linalg.norm(position) / position.size**0.5
    return distance * random.normal(rng_key, position.shape, position.dtype)


def _noise_of_groups(
    score_noise: Callable[[jax.Array], tuple],
    position: PyTree,
    root: Callable[[jax.Array], jax.Array],
    noise_factor: float,
    rng_key: jax.Array,
    layout: Layout,
    plain: Potential | None,
    temperature: float,
) -> jax.Array:
    """The largest noise of many groups: lam_C of `_on_other_rows`, `FAR` of C's diagonal, or shift.

    If each of many groups has few rows, a power iteration from some rows misses the group with the
    largest noise. And at any position a few groups are far from an anchor. The noise that widens a
    group is its mean over positions. One loop takes all estimates, so that the energy of the rows
    occurs once.

    The shift by the noise is tau^{1/2} |grad tr(H C)| / 2 along the shared parameters. Where noise
    widens the law by the covariance b tau C, it moves the mean by -b tau grad tr(H C) / 2. In sd
    this is b times the shift, as b lam_C is the error of a variance. It is by far the larger one
    for a scale of many values: each of them says little about the scale, but all are too wide.

    For ``noise_factor`` and ``plain`` see `measure`. A control variate changes nothing in it,
    because it is at most quadratic.
    """
    flat, unravel = ravel(position)
    sides = jnp.array([0.0, 1.0, -1.0], flat.dtype)

    def shift_of(plain: Potential, _: Any, noise: jax.Array, place: Any, key: Any) -> jax.Array:
        """The gradient of v' H v, for noise v from other rows, by differences of up to one sd."""
        rows = plain.curvature_batch(random.fold_in(key, 1))
        length = 1 / jnp.maximum(jnp.max(jnp.abs(noise)), jnp.finfo(flat.dtype).tiny)
        away = root(length * noise)

        def force(side: jax.Array) -> jax.Array:
            gradient = jax.grad(plain.energy)(unravel(place + side * away), rows)
            return layout.parts(root(ravel(gradient)[0]))[0]

        here, ahead, behind = lax.map(force, sides)
        return (ahead + behind - 2 * here) / length**2

    def look(j: jax.Array, found: tuple) -> tuple:
        v, _, last, diagonal, shifts = found
        k = j - PROBES
        key = random.fold_in(rng_key, jnp.where(k < 0, j, jnp.maximum(k - POWER_STEPS + 1, 0)))
        there, along = _elsewhere(flat, key), root(v)
        place = unravel(there)
        product, entries = jnp.zeros_like(v), jnp.zeros_like(v)
        for weight, rows_fn in score_noise(key):
            rows, push = linearize(rows_fn, place)
            signs = jnp.sign(scattered_floats(key_word(key), rows.size, rows.dtype))
            slopes = jnp.where(k < 0, signs.reshape(rows.shape), push(unravel(along)) / rows.size)
            pulled = ravel(jax.vjp(push, place)[1](slopes - jnp.mean(slopes))[0])[0]
            product = product + weight * pulled
            noise = (weight / rows.size) ** 0.5 * root(pulled)
            entries = entries + noise**2
            if plain is None:
                continue
            told = partial(shift_of, plain)
            shift = lazy_cond(j < SHIFT_PROBES, told, shifts[0], noise, there, key)
            shift = jnp.where(j < SHIFT_PROBES, noise_factor * shift / (SHIFT_PROBES / 2), 0)
            shifts = shifts.at[j % 2].add(shift)
        product = root(noise_factor * product)
        turned = jnp.where((k >= 0) & (k < POWER_STEPS), normalise(product)[0], v)
        return turned, last, product, diagonal + jnp.where(k < 0, entries, 0) / PROBES, shifts

    start = scattered_floats(key_word(rng_key), flat.size, flat.dtype)
    nothing = jnp.zeros_like(start)
    none = jnp.zeros((2, layout.num_shared), flat.dtype)
    found = normalise(start)[0], nothing, nothing, nothing, none
    _, one, other, diagonal, shifts = lax.fori_loop(0, PROBES + POWER_STEPS + 2, look, found)
    diagonal = noise_factor * diagonal
    shift = jnp.sqrt(rule_temperature(temperature) * jnp.abs(jnp.vdot(*shifts))) / 2
    most = jnp.maximum(jnp.sqrt(jnp.abs(jnp.vdot(one, other))), jnp.quantile(diagonal, FAR))
    return jnp.where(jnp.isfinite(shift), jnp.maximum(most, shift), most)


def _on_other_rows(
    product_of: Callable, start: jax.Array, rng_key: jax.Array, parts: int
) -> jax.Array:
    """|C v| with C the covariance of some rows, v about the first eigenvector for other rows.

    The largest eigenvalue of one sample is too large unless the sample has many more rows than
    there are parameters. With five times as many rows it is twice as large. With fewer rows the
    factor has no bound. |C v| is too small if some rows do not show the direction, as those of a
    player with few matches. The mean eigenvalue is known from any rows, and is a lower bound.

    ``product_of(rng_key)`` is x -> C x, with C the covariance of the rows of that key. C is the
    mean over ``parts`` sets of rows.
    """

    def mean_product(rng_key: jax.Array, v: jax.Array) -> jax.Array:
        def add(k: jax.Array, total: jax.Array) -> jax.Array:
            return total + product_of(random.fold_in(rng_key, k))(v) / parts

        if parts <= 1:
            return product_of(rng_key)(v)
        return lax.fori_loop(0, parts, add, jnp.zeros_like(v))

    def closer(k: jax.Array, found: tuple) -> tuple:
        v, _, last, mean = found
        which = jnp.maximum(k - POWER_STEPS + 1, 0)  # rows 0 for the direction, then 1 and 2
        product = mean_product(random.fold_in(rng_key, which), v)
        mean = jnp.where(k == 0, jnp.vdot(v, product), mean)
        return jnp.where(k < POWER_STEPS, normalise(product)[0], v), last, product, mean

    nothing = jnp.zeros_like(start)
    begun = normalise(start)[0], nothing, nothing, jnp.zeros((), start.dtype)
    _, one, other, mean = lax.fori_loop(0, POWER_STEPS + 2, closer, begun)
    return jnp.maximum(jnp.sqrt(jnp.abs(jnp.vdot(one, other))), mean)


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


def _noise_covariance(
    score_noise: Callable[[jax.Array], tuple], position: PyTree, rng_key: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """The product with the covariance C of the minibatch gradient, for the rows of a key."""
    flat, unravel = ravel(position)
    groups = [(w, _score_covariance(f, position)) for w, f in score_noise(rng_key)]

    def product(v: jax.Array) -> jax.Array:
        total = jnp.zeros_like(v)
        for weight, score_product in groups:
            total = total + weight * ravel(score_product(unravel(v)))[0]
        return total

    return product


def _score_covariance(rows_fn: Callable, position: PyTree) -> Callable[[PyTree], PyTree]:
    """V -> J'J v / n with J the centred Jacobian of per-row energies."""
    rows, push = linearize(rows_fn, position)
    pull = jax.vjp(push, position)[1]

    def product(v: PyTree) -> PyTree:
        slopes = push(v)
        return pull((slopes - jnp.mean(slopes)) / rows.shape[0])[0]

    return product


def _matrix(product: Callable, like: jax.Array) -> jax.Array:
    """The transposed matrix of an operator on vectors like ``like``, some columns at a time."""
    columns = min(LANES, like.size)
    num_blocks = -(-like.size // columns)
    units = jnp.eye(num_blocks * columns, like.size, dtype=like.dtype)
    blocks = units.reshape(num_blocks, columns, like.size)
    found = lax.map(jax.vmap(product), blocks)
    return found.reshape(-1, found.shape[-1])[: like.size]
