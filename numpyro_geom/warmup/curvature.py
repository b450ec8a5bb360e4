"""Curvature and gradient noise where a chain is, by Lanczos iteration without any matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.flatten_util import ravel_pytree

from .._util import tree_where
from ..target.potential import Potential
from .lanczos import Extremes, extreme_eigenvalues
from .step_size import Adaptation

PyTree = Any

LANCZOS_STEPS = 20


def measure(
    potential: Potential,
    position: PyTree,
    apply_inverse_sqrt: Callable[[PyTree], PyTree],
    rng_key: jax.Array,
    adaptation: Adaptation,
    replacing: jax.Array | bool = True,
    noise_factor: float = 1.0,
    second_order: jax.Array | float = 0.0,
    known_noise: PyTree | None = None,
    bias_tolerance: float = 0.1,
    temperature: float = 1.0,
) -> Adaptation:
    """Measure lam_H, lam_min and lam_C at a position, by Lanczos iteration without any matrix.

    Args:
        potential: the target.
        position: where.
        apply_inverse_sqrt: x -> A^{1/2} x.
        rng_key: for the rows and the starting vectors.
        adaptation: the state to fill in.
        replacing: whether to replace earlier measurements, not to keep the extremes.
        noise_factor: variance of the gradient in a step, relative to the whole batch's.
        second_order: factor of the squared Hessian that is added to the Hessian.
        known_noise: diagonal of the gradient's covariance, if the injected noise makes up for it:
            then ``noise`` is that of the rest of the covariance.
        bias_tolerance: of the step-size rule; used with ``known_noise``.
        temperature: tau.

    Returns:
        The adaptation with new ``curvature``, ``slowest`` and ``noise``; those of ``adaptation``
        where a measurement is not finite.
    """
    key_batch, key_rows, key_h, key_c, key_z = random.split(rng_key, 5)
    flat, unravel = ravel_pytree(position)
    num_iterations = min(LANCZOS_STEPS, flat.size)

    def root(v: jax.Array) -> jax.Array:
        return ravel_pytree(apply_inverse_sqrt(unravel(v)))[0]

    batch = potential.curvature_batch(key_batch)
    start = random.normal(key_h, flat.shape, flat.dtype)

    def spectrum_at(flat: jax.Array) -> Extremes:
        _, hvp = jax.linearize(jax.grad(lambda p: potential.energy(p, batch)), unravel(flat))

        def hessian(v: jax.Array) -> jax.Array:
            return ravel_pytree(hvp(unravel(v)))[0]

        def curvature_product(v: jax.Array) -> jax.Array:
            product = hessian(root(v))
            if isinstance(second_order, jax.Array):
                product = product + second_order * hessian(product)
            return root(product)

        return extreme_eigenvalues(curvature_product, flat.size, start, num_iterations)

    direction = root(random.normal(key_z, flat.shape, flat.dtype))
    tau = temperature if temperature > 0 else 1.0

    def too_far(length: jax.Array) -> jax.Array:
        """Whether U is higher there by more than tau D, twice its mean rise in a Gaussian."""
        here, there = (potential.energy(unravel(flat + s * direction), batch) for s in (0, length))
        return ~(there - here <= tau * flat.size) & (length > 0)

    def look(k: jax.Array, old: Extremes) -> Extremes:
        """At the position, then as far off as the target spreads: by the curvature, and by U."""
        length = jnp.sqrt(tau / jnp.maximum(old.largest_magnitude, jnp.finfo(flat.dtype).tiny))
        # no curvature at all says nothing of a length
        length = lax.while_loop(too_far, lambda x: x / 2, jnp.where(k == 0, 0.0, length))
        new = spectrum_at(flat + length * direction)
        larger = new.largest_magnitude > old.largest_magnitude
        rest = old._replace(
            largest_magnitude=jnp.where(larger, new.largest_magnitude, old.largest_magnitude)
        )
        return tree_where(k == 0, new, rest)

    # a mode can be flat where the target is not; later the chain itself has gone everywhere
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(spectrum_at, flat))
    spectrum = lax.fori_loop(0, jnp.where(replacing, 2, 1), look, nothing)
    noise = _largest_noise(
        potential.score_noise(key_rows),
        position,
        unravel,
        root,
        random.normal(key_c, flat.shape, flat.dtype),
        num_iterations,
        noise_factor,
        known_noise,
    )
    if known_noise is not None:
        # at least half of the injected noise stays, so that it is rarely too little to take from
        diagonal = ravel_pytree(known_noise)[0]
        inverse = root(root(jnp.ones_like(flat)))  # a diagonal metric
        noise = jnp.maximum(noise, 2 * bias_tolerance * jnp.max(inverse * diagonal))
    curvature = jnp.abs(spectrum.largest_magnitude)
    # where curvature is negative the chain drifts along it about as slowly as it would relax
    slowest = jnp.minimum(jnp.abs(spectrum.smallest), spectrum.smallest_positive)
    slowest = jnp.where(jnp.isfinite(slowest) & (slowest > 0), slowest, curvature)
    fresh = adaptation._replace(
        curvature=curvature, curvature_low=curvature, slowest=slowest, noise=noise
    )
    extended = fresh._replace(
        curvature=jnp.maximum(curvature, adaptation.curvature),
        curvature_low=jnp.minimum(curvature, adaptation.curvature_low),
        slowest=jnp.minimum(slowest, adaptation.slowest),
        noise=jnp.maximum(noise, adaptation.noise),
    )
    usable = jnp.isfinite(curvature) & jnp.isfinite(noise) & (curvature + noise > 0)
    return jax.tree.map(
        lambda old, new, both: jnp.where(usable, jnp.where(replacing, new, both), old),
        adaptation,
        fresh,
        extended,
    )


def _largest_noise(
    groups: tuple,
    position: PyTree,
    unravel: Callable[[jax.Array], PyTree],
    root: Callable[[jax.Array], jax.Array],
    start: jax.Array,
    num_iterations: int,
    noise_factor: float,
    known_noise: PyTree | None,
) -> jax.Array:
    """Largest absolute eigenvalue of A^{1/2} C A^{1/2}, or of A^{1/2} (C - known) A^{1/2}."""
    if not groups:
        return jnp.zeros((), start.dtype)
    products = [
        (noise_factor * weight, _score_covariance(rows_fn, position, unravel, root))
        for weight, rows_fn in groups
    ]

    def covariance(v: jax.Array) -> jax.Array:
        total = sum(weight * product(v) for weight, product in products)
        if known_noise is not None:
            total = total - root(ravel_pytree(known_noise)[0] * root(v))
        return total

    largest = extreme_eigenvalues(covariance, start.size, start, num_iterations)
    return jnp.abs(largest.largest_magnitude)


def _score_covariance(
    rows_fn: Callable[[PyTree], jax.Array],
    position: PyTree,
    unravel: Callable[[jax.Array], PyTree],
    root: Callable[[jax.Array], jax.Array],
) -> Callable[[jax.Array], jax.Array]:
    """V -> A^{1/2} J'J A^{1/2} v / n with J the centred Jacobian of per-row energies."""
    rows, jvp = jax.linearize(rows_fn, position)
    _, vjp = jax.vjp(rows_fn, position)

    def product(v: jax.Array) -> jax.Array:
        slopes = jvp(unravel(root(v)))
        centred = slopes - jnp.mean(slopes)
        return root(ravel_pytree(vjp(centred)[0])[0]) / rows.shape[0]

    return product
