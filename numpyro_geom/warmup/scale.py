"""The scale of a posterior: from the curvature where the search ended, then from draws.

Above 256 parameters without groups the scale is a diagonal and a low rank: L = A (I + V' (S - I) V)
with A = diag(H)^{-1/2} / s. Lanczos's iteration gives Ritz values t and vectors of the Hessian that
diag(H)^{-1/2} scales, and s is the median of sqrt(t). V has those vectors that are known well and
whose t is far from s^2, and S = s t^{-1/2}. So the stiffest directions do not set the step of all,
and the flattest do not set the relaxation time. Warm-up then learns a width for each of the scaled
coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree as ravel

from .._linalg import MatrixRoot, balanced_roots
from .._util import PyTree, all_finite, lazy_cond, tree_where
from ..model.arrowhead import ArrowRoot
from ..model.potential import Potential
from ..model.scale import LowRankRoot, Scale, scale_about
from ..sampling.algorithm import rule_temperature
from ..sampling.settings import Settings, SiteBlocks
from ..sampling.state import SGState, is_by_site
from .curvature import chance, hessian_at
from .lanczos import ritz_vectors

LOW_RANK_PRODUCTS = 64
"""Products with the Hessian, and so the most directions of a low rank."""
MOST_COUPLED = 0.1
"""Largest curvature, relative to 1, by which a direction is coupled to others after scaling."""
OUTLIER = 1.5
"""A direction is scaled apart from the others if its sd differs from theirs by this factor, and by
what chance explains."""
STANDARD_ERRORS = 2.0
"""Number of standard errors of a correlation, or of a draw, that chance may explain, at least."""


def given_scale(settings: Settings, position: PyTree) -> Scale:
    """The coordinates of ``inverse_mass_matrix`` at ``position``; L is found in 64 bits."""
    centre, _ = ravel(position)
    given: Any = settings.inverse_mass_matrix
    matrix = np.asarray(matrix_of_blocks(given, position) if isinstance(given, dict) else given)
    if matrix.shape[-1] != centre.size:
        raise ValueError(
            f"inverse_mass_matrix has the shape {matrix.shape}, and the model has {centre.size} "
            f"unconstrained parameters: expected ({centre.size},) or ({centre.size}, "
            f"{centre.size}), sites in the order of their names"
        )
    spread = np.sqrt(matrix if matrix.ndim == 1 else np.diagonal(matrix))
    if not settings.dense_scale:
        return scale_about(centre, diagonal_root(jnp.asarray(spread, centre.dtype)))
    matrix = np.diag(matrix) if matrix.ndim == 1 else matrix
    values, vectors = np.linalg.eigh(matrix / spread / spread[:, None])
    root = spread[:, None] * (vectors * np.sqrt(values)) @ vectors.T
    inverse = (vectors / np.sqrt(values)) @ vectors.T / spread
    return scale_about(
        centre, MatrixRoot(jnp.asarray(root, centre.dtype), jnp.asarray(inverse, centre.dtype))
    )


def scale_of_law(law: Any, settings: Settings, position: PyTree) -> Scale:
    """The coordinates of a normal law. Parameters of different blocks are not scaled together."""
    if isinstance(law.root, LowRankRoot) or law.root.layout.num_groups:
        return scale_about(law.centre, law.root)
    root = law.root.corner
    if settings.blocks:
        root = _root_of(root.covariance(), block_mask(settings.blocks, position))
    if not settings.dense_scale:
        root = diagonal_root(jnp.sqrt(root.variances()))
    return scale_about(law.centre, root)


def diagonal_root(width: jax.Array, rank: int = 0) -> LowRankRoot:
    """L of these sds, shape (D,), with room for more directions."""
    ones = jnp.ones_like(width)
    vectors = jnp.zeros((rank, width.size), width.dtype)
    return LowRankRoot(width, vectors, ones[:rank], ones)


def low_rank_root(
    potential: Potential,
    flat: jax.Array,
    diagonal: jax.Array,
    towards: jax.Array,
    rng_key: jax.Array,
) -> tuple[LowRankRoot, jax.Array]:
    """L with L L' about |H|^-1 at a vector, and which of its directions are known well.

    ``diagonal`` is diag(|H|)^-1/2. ``towards`` is a vector such as a gradient g: ``L L' g`` is then
    the step of conjugate gradients.
    """
    product = hessian_at(potential, flat, rng_key)
    low, high = chance(potential, flat.size)
    rank = min(LOW_RANK_PRODUCTS, flat.size)
    found = ritz_vectors(lambda v: diagonal * product(diagonal * v), diagonal * towards, rank)
    finite = all_finite(found)
    values, vectors, errors = (jnp.where(finite, x, 0) for x in found)
    usable = jnp.any(values != 0)
    sizes = jnp.abs(values)
    least = 8 * jnp.finfo(flat.dtype).eps * jnp.max(sizes)
    spread = jnp.sqrt(jnp.where(usable, jnp.maximum(sizes, least), 1))
    level = jnp.median(spread)  # of all other directions
    known = usable & (values > least) & (errors <= MOST_COUPLED * spread * level)
    apart = spread / (OUTLIER * level)
    known &= (apart > high**0.5) | (apart * OUTLIER**2 < low**0.5)
    # a flat direction is as flat as chance does not explain
    factors = jnp.where(spread < level, low**0.5, 1) * level / spread
    return LowRankRoot(diagonal / level, vectors, factors, jnp.ones_like(flat)), known


def rescaled(state: SGState, scale: Scale, settings: Settings, num_data: int) -> SGState:
    """The chain at the same ``z`` in other coordinates.

    A metric's statistics belong to gradients in the old coordinates. They restart at the values for
    which the new coordinates are made: a posterior N(0, tau I), whose gradients have the variance
    tau.
    """
    like = ravel(state.z)[0] if settings.moves_vector else state.z
    position = scale.from_sites(state.z, like)
    metric, metric_state = settings.metric, state.metric_state
    if metric.has_auxiliary:
        zero = jax.tree.map(jnp.zeros_like, position)
        floor = rule_temperature(settings.temperature) ** 0.5 / num_data
        metric_state = metric.from_gradient(metric.init(position), zero, floor)
    return state._replace(
        metric_state=metric_state,
        scaled=position,
        scale=scale,
        drift_ratio=jnp.full_like(state.drift_ratio, jnp.inf),
        trusted=position,
        centre=position,
    )


def with_draw(state: SGState) -> Scale:
    """The scale after one more draw has been counted; less if it is farther out than by chance."""
    scale: Scale = state.scale
    phi, _ = ravel(state.scaled)
    part = jnp.minimum(1, STANDARD_ERRORS * phi.size**0.5 / jnp.linalg.norm(phi))
    change = jnp.where(scale.num_draws > 0, phi - scale.last, 0)
    return scale._replace(
        total=scale.total + part**2 * phi,
        squares=jax.tree.map(jnp.add, scale.squares, scale.root.products(part * phi)),
        num_draws=scale.num_draws + part**2,
        last=phi,
        changes=scale.changes + (part * change) ** 2,
    )


def likeness(scale: Scale) -> jax.Array:
    """The largest correlation of a window's successive draws that chance does not explain."""
    count = jnp.maximum(scale.num_draws, 2)
    squares = jax.tree.leaves(scale.squares)[-1]
    squares = jnp.diagonal(squares) if squares.ndim > 1 else squares
    tiny = jnp.finfo(count.dtype).tiny
    variance = jnp.maximum(squares / count - (scale.total / count) ** 2, tiny)
    found = jnp.clip(1 - scale.changes / (2 * (count - 1) * variance), 0.0, 1.0)
    # the largest of D numbers that are chance alone
    errors = max(STANDARD_ERRORS, (2 * np.log(found.size)) ** 0.5)
    return jnp.max(found - errors * jnp.sqrt((1 - found**2) / count))


def renew_scale(state: SGState, due: Any, settings: Settings, num_data: int) -> SGState:
    """Renew the scale by the covariance of a window's draws, if that is due.

    In the coordinates in use, the covariance S is replaced by (n S / tau + D I) / (n + D), where n
    is the number of draws a relaxation time apart. The draws say little about S before n is several
    times D, and I is the prior knowledge. In place of D, a diagonal has 2, and the variances of
    groups have 2 / e, where e is the mean squared error of the present variances, by the draws of
    all groups together. The worst of thousands of variances from a few draws would be far off.
    """
    tau = rule_temperature(settings.temperature)

    def renew(state: SGState) -> SGState:
        scale: Scale = state.scale
        dtype = scale.total.dtype
        count = jnp.maximum(scale.num_draws, 1)
        time = jnp.asarray(state.num_steps, dtype) * jnp.asarray(state.step_size, dtype)
        weight = count * jnp.minimum(1.0, time)  # in these coordinates a relaxation takes about 1
        mean = scale.total / count
        covariances = jax.tree.map(
            lambda x, y: (x / count - y) / tau, scale.squares, scale.root.products(mean)
        )

        def known(covariance: jax.Array, prior: Any = 2.0) -> jax.Array:
            unit = jnp.ones_like(covariance)
            if covariance.ndim > 1:
                prior, unit = len(covariance), jnp.eye(len(covariance), dtype=dtype)
            return (weight * covariance + prior * unit) / (weight + prior)

        centre, root = scale.centre + scale.root.times(mean), scale.root
        if isinstance(root, ArrowRoot):
            shared, each = covariances
            # from n draws a variance has the squared error 2 / n; the rest is of the present one
            error = jnp.mean((each - 1) ** 2) - 2 / weight
            prior = 2 / jnp.clip(error, jnp.finfo(dtype).eps, 1.0)
            root = root.then(_root_of(known(shared)), jnp.sqrt(known(each, prior)))
        elif isinstance(root, LowRankRoot):
            root = root.then(jnp.sqrt(known(covariances)))
        else:
            within = block_mask(settings.blocks, state.z) if settings.blocks else True
            root = root.then(_root_of(known(covariances), within))
        new = tree_where(all_finite(root), scale_about(centre, root), emptied(scale))
        return rescaled(state, new, settings, num_data)

    return lazy_cond(due.anchoring & due.early, renew, state)


def emptied(scale: Scale) -> Scale:
    """The same coordinates with a window that has no draws."""
    return scale_about(scale.centre, scale.root)


def _root_of(matrix: jax.Array, within: Any = True) -> MatrixRoot:
    """R with R R' = |M|; 0 between parameters that are not ``within`` the same block."""
    both = balanced_roots(jnp.where(within, matrix, 0))
    return MatrixRoot(*(jnp.where(within, x, 0) for x in both))


# SiteBlocks of sites


def block_mask(blocks: SiteBlocks, position: PyTree) -> np.ndarray:
    """Shape (D, D): whether two parameters are in the same block; other sites are diagonal."""
    where = _places(blocks, position)
    mask = np.eye(sum(map(len, where.values())), dtype=bool)
    for block in blocks:
        index = np.concatenate([where[site] for site in block])
        mask[np.ix_(index, index)] = True
    return mask


def matrix_of_blocks(given: Mapping[Any, np.ndarray], position: PyTree) -> np.ndarray:
    """The covariance, shape (D, D), from covariances of blocks; variance 1 for other sites.

    Raises:
        ValueError: for a block of the wrong size, or unknown sites.
    """
    where = _places(given, position)
    matrix = np.eye(sum(map(len, where.values())))
    for block, values in given.items():
        index = np.concatenate([where[site] for site in block])
        if len(values) != len(index):
            raise ValueError(
                f"inverse_mass_matrix has the shape {np.shape(values)} for the sites {block}, "
                f"which have {len(index)} unconstrained parameters: expected ({len(index)},) or "
                f"({len(index)}, {len(index)})"
            )
        matrix[np.ix_(index, index)] = np.diag(values) if np.ndim(values) == 1 else values
    return matrix


def _places(blocks: Iterable, position: PyTree) -> dict[str, np.ndarray]:
    """The indices of each site's parameters in the vector of all parameters."""
    sites = (
        {name: np.size(position[name]) for name in sorted(position)} if is_by_site(position) else {}
    )
    unknown = sorted({site for block in blocks for site in block} - set(sites))
    if unknown:
        raise ValueError(
            f"blocks of the scale name sites that the position does not have: {unknown}. Expected "
            f"some of {list(sites)}"
        )
    ends = np.cumsum([*sites.values()])
    return {name: np.arange(end - sites[name], end) for name, end in zip(sites, ends, strict=True)}
