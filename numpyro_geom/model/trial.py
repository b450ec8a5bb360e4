"""The trial of a model's rows: the log density of a row must not depend on the other rows drawn.

The energy of a minibatch estimates the energy of all rows only if rows are separate terms of a sum.
So some rows are evaluated in two batches, among different other rows and in other places. Rows
that lean on each other then have two log densities: by a cumulative sum or a sort, by statistics
or groups of the rows drawn, by normalisation over the batch, by the mean in a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.extend.core import Jaxpr
from numpyro import handlers
from numpyro.distributions.transforms import biject_to
from numpyro.infer.util import potential_energy

from .._util import at_once, is_traced
from ..rows.host_rows import host_rows_in
from .abstract import with_start
from .jaxprs import compiled, inner
from .minibatch import SubsamplePlates, Subsampling

MOST_ROWS = 64
"""Rows of a batch, at most: stretches of neighbours, which often are of one group."""
STRETCH = 8
"""Rows of a stretch. The first one is in both batches."""
RADIUS = 0.5
"""Positions are uniform in this radius, where no network saturates."""
POSITIONS = 2
"""Number of positions: at one of them, the largest row of a batch may be in both batches."""
TOLERANCE = 1e-4
"""Relative difference of log densities that counts as rounding."""


def check_separate(
    model: Callable, args: tuple, kwargs: dict, plan: Subsampling, plate: str
) -> None:
    """Raise if the log density of a row depends on which other rows of a plate are drawn.

    What differs is evaluated again in 64 bits, if the model runs there. Nothing is tried within a
    transformation of the arguments, where their values are unknown, and for `HostRows` on a mesh.

    Raises:
        ValueError: with the name of the first such site, and the plate.
    """
    on_mesh = any(x.over is not None for x in host_rows_in((args, kwargs)))
    if is_traced((args, kwargs)) or on_mesh:
        return
    rows, places, again = _batches(plan, plate)
    others = {
        other: np.arange(min(size, MOST_ROWS)) * size // min(size, MOST_ROWS)
        for other, size in plan.sizes.items()
        if other in plan.batch_sizes and other != plate
    }
    sites = [s for s in plan.sites if s.kind != "deterministic"]

    def position() -> dict[str, jax.Array]:
        run = SubsamplePlates(with_start(model))
        found = handlers.trace(run).get_trace(*args, **kwargs)
        latent = [found[s.name] for s in sites if s.kind == "latent" and not s.discrete]
        return {s["name"]: biject_to(s["fn"].support).inv(s["value"]) for s in latent}

    def densities(z: dict, rows: Any) -> dict[str, jax.Array]:
        seeded = handlers.seed(model, random.key(0))
        drawn = {p: jnp.asarray(r) for p, r in {**others, plate: rows}.items()}
        with handlers.trace() as found:
            potential_energy(SubsamplePlates(seeded, drawn), args, kwargs, z)
        return {s.name: _terms(found[s.name], plate) for s in sites}

    def evaluated(z: dict) -> dict[str, np.ndarray]:
        """Log densities of the same rows in both batches, shape (2, positions, ...)."""
        batches = np.tile(rows, (POSITIONS, 1))
        terms = compiled(lambda *x: lax.map(lambda x: densities(*x), x), z, batches)
        found = {}
        for site in sites:
            both = np.asarray(terms[site.name], float)
            first, second = both[::2], both[1::2]
            if plate in dict(site.plates):
                first, second = first[:, places], second[:, again]
            found[site.name] = np.stack([first, second])
        return found

    # chains in parallel read the model within a transformation, though its data are known
    with at_once():
        z = _positions(plan, jax.eval_shape(position), plate, rows.shape[1], places, again, others)
        found = evaluated(z)
        if not any(_differ(x, TOLERANCE).any() for x in found.values()):
            return
        one = jax.tree.map(lambda x: x[0], (z, rows))
        tolerance = max(TOLERANCE, 16 * _coarsest(jax.make_jaxpr(densities)(*one).jaxpr))
        try:
            with jax.enable_x64(True):
                found = evaluated(jax.tree.map(lambda x: x.astype(float), z))
        except Exception:  # such as a loop in the model with numbers of 32 bits
            tolerance = max(tolerance, 1e-2)
    for name, x in found.items():
        differ = _differ(x, tolerance)
        if differ.any():
            where: Any = np.unravel_index(differ.argmax(), differ.shape)
            inside = plate in dict(next(s for s in sites if s.name == name).plates)
            row = rows[0, places[where[1]]] if inside else None
            raise ValueError(_told(name, plate, row, x[:, *where]))


def _told(name: str, plate: str, row: int | None, pair: np.ndarray) -> str:
    values = f"{pair[0]:.6g} in one batch and {pair[1]:.6g} in another"
    if row is None:
        return (
            f"site {name!r} is outside of plate {plate!r}, and its log density depends on which "
            f"rows of the plate are drawn: it is {values}. Only sites in the plate are scaled to "
            "all rows: move the site into the plate, compute it from all rows outside of the "
            "plate, or take all rows by batch_size=None"
        )
    return (
        f"the rows of plate {plate!r} lean on each other: at site {name!r} the log density of a "
        f"row depends on which other rows come along. For instance, row {row} has {values}. "
        "Expected rows that are separate terms of the log density: compute what joins rows (a sum, "
        "a mean, a rank) outside of the plate from all rows, and index the result; normalise over "
        "features and not over the batch; or take all rows by batch_size=None"
    )


def _batches(plan: Subsampling, plate: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two batches, shape (2, rows), and the places in each of the rows that both have."""
    size = plan.sizes[plate]
    run = max(2, min(size // 2, STRETCH))
    count = max(1, min(size // 2, MOST_ROWS) // run)
    space = size // count
    first = (np.arange(count)[:, np.newaxis] * space + np.arange(run)).ravel() % size
    rows = np.stack([first, (first + space // 2) % size]).astype(np.int32)
    places = np.arange(count) * run
    # a model that asks for keys has a random number for each place
    again = places if plan.is_random else rows.shape[1] - 1 - places
    rows[1, again] = rows[0, places]
    return rows, places, again


def _positions(
    plan: Subsampling,
    shapes: dict,
    plate: str,
    length: int,
    places: np.ndarray,
    again: np.ndarray,
    others: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Unconstrained values of the latent sites for all batches, shapes (2 positions, ...)."""
    rng, found = np.random.default_rng(0), {}
    for name, known in shapes.items():
        shape, axes = [2 * POSITIONS, *known.shape], dict(plan.local_axes.get(name, ()))
        for p, axis in axes.items():
            shape[1 + axis] = length if p == plate else len(others[p])
        x = rng.uniform(-RADIUS, RADIUS, shape).astype(known.dtype)
        if plate in axes:  # a row has its value in both batches
            rows = np.moveaxis(x, 1 + axes[plate], 1)
            rows[1::2, again] = rows[::2, places]
        else:
            x[1::2] = x[::2]
        found[name] = x
    return found


def _terms(site: dict[str, Any], plate: str) -> jax.Array:
    """Log densities of a site, with the plate's axis first."""
    terms = site["fn"].log_prob(site["value"])
    if site["scale"] is not None:
        terms = terms * site["scale"]
    dims = {frame.name: frame.dim for frame in site["cond_indep_stack"]}
    return jnp.moveaxis(terms, dims[plate], 0) if plate in dims else terms


def _differ(pair: np.ndarray, tolerance: float) -> np.ndarray:
    """Where two log densities differ by more than rounding."""
    first, second = pair
    size = (np.abs(first) + np.abs(second)) / 2
    usual = np.median(size[np.isfinite(size)]) if np.isfinite(size).any() else 0.0
    with np.errstate(invalid="ignore"):
        near = np.abs(first - second) <= tolerance * (size + usual)
    return ~(near | (first == second) | (np.isnan(first) & np.isnan(second)))


def _coarsest(jaxpr: Jaxpr) -> float:
    """The largest relative rounding error among the types of a program's numbers."""
    found = [0.0]
    for equation in jaxpr.eqns:
        kinds = [getattr(x.aval, "dtype", np.dtype(int)) for x in equation.outvars]
        found += [float(jnp.finfo(k).eps) for k in kinds if jnp.issubdtype(k, jnp.floating)]
        found += map(_coarsest, inner(equation))
    return max(found)
