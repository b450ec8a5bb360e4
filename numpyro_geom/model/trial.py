"""The trial of a model's rows: the log density of a row must not depend on the other rows drawn.

The energy of a minibatch estimates the energy of all rows only if rows are separate terms of a sum.
So some rows are evaluated in two batches, among different other rows and in other places. Rows
that lean on each other then have two log densities: by a cumulative sum or a sort, by statistics
or groups of the rows drawn, by normalisation over the batch, by the mean in a factor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.extend.core import Jaxpr
from numpyro import handlers
from numpyro.distributions.transforms import biject_to
from numpyro.infer.util import potential_energy
from numpyro.ops.provenance import eval_provenance

from .._util import at_once, is_traced
from ..rows.host_rows import host_rows_in
from .abstract import with_start
from .jaxprs import inner
from .minibatch import SubsamplePlates, Subsampling
from .programs import compiled

MOST_ROWS = 512
"""Rows of a batch, at most. More rows find rarer groups, and dilute the statistics of a batch."""
SMALL_BATCH = 64
"""Rows of a batch, at most, if the kernel draws less than half as many."""
TESTED = 8
"""One in so many rows of a batch is in both batches."""
OTHER_ROWS = 16
"""Rows of every other subsampled plate."""
RADII = (2.0, 0.25)
"""Positions are uniform in these radii: as NumPyro's starts, and where no network saturates."""
NOISES = 997
"""Different values of a local latent site; rows share them."""

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""Differences of log densities in 32 bits that need no further look."""
NUDGE = 2.0**-10
"""Relative change of positions that measures how much rounding is amplified."""
ROUNDINGS = 16.0
"""Rounding errors that a log density may have, each amplified as much as a change of positions."""


class Batches(NamedTuple):
    """Two batches for each position that have some rows in common.

    Attributes:
        rows: row numbers, shape (positions, 2, rows).
        places: where the common rows are in a batch, in one order, shape (positions, 2, common).
    """

    rows: np.ndarray
    places: np.ndarray


def check_separate(
    model: Callable, args: tuple, kwargs: dict, plan: Subsampling, plate: str
) -> None:
    """Raise for the first site of `leaning`."""
    for _, told in leaning(model, args, kwargs, plan, plate):
        raise ValueError(told)


def leaning(
    model: Callable, args: tuple, kwargs: dict, plan: Subsampling, plate: str
) -> Iterator[tuple[str, str]]:
    """Sites whose log density of a row depends on which other rows of a plate are drawn.

    Nothing is tried within a transformation of the arguments, where their values are unknown, and
    for `HostRows` of which a process holds a part or that are on a mesh.

    Yields:
        The site's name, and a text with the plate, and the module of a network that is the reason.
    """
    in_parts = any(x.is_part or x.over is not None for x in host_rows_in((args, kwargs)))
    if is_traced((args, kwargs)) or in_parts:  # a process may lack the rows of a trial
        return
    batches = _batches(plan, plate)
    others = {
        other: np.arange(min(size, OTHER_ROWS)) * size // min(size, OTHER_ROWS)
        for other, size in plan.sizes.items()
        if other in plan.batch_sizes and other != plate
    }
    sites = [s for s in plan.sites if s.kind != "deterministic"]
    inside = [s.name for s in sites if plate in dict(s.plates)]

    def position() -> dict[str, jax.Array]:
        run = SubsamplePlates(with_start(model))
        found = handlers.trace(run).get_trace(*args, **kwargs)
        latent = [found[s.name] for s in sites if s.kind == "latent" and not s.discrete]
        return {s["name"]: biject_to(s["fn"].support).inv(s["value"]) for s in latent}

    shapes = {name: x.shape for name, x in jax.eval_shape(position).items()}
    noise = _noise(plan, shapes, plate, batches.rows, others)

    def densities(noise: dict, rows: Any) -> dict[str, jax.Array]:
        seeded = handlers.seed(model, random.key(0))
        drawn = {p: jnp.asarray(r) for p, r in {**others, plate: rows}.items()}
        with handlers.trace() as found:
            potential_energy(SubsamplePlates(seeded, drawn), args, kwargs, noise)
        return {s.name: _terms(found[s.name], plate) for s in sites}

    one = {name: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for name, x in noise.items()}
    local = {name: one.pop(name) for name in plan.local_axes if name in one}
    drawn = jax.ShapeDtypeStruct(batches.rows.shape[2:], batches.rows.dtype)
    sources = eval_provenance(
        lambda rows, local, rest: densities({**rest, **local}, rows),
        rows=drawn,
        local=local,
        rest=one,
    )
    names = [name for name in sources if sources[name] & {"rows", "local"}]

    def of_batch(noise: dict, rows: Any) -> dict[str, jax.Array]:
        found = densities(noise, rows)
        return {name: found[name] for name in names}

    def evaluated(noise: dict) -> dict[str, np.ndarray]:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (noise, batches.rows))
        terms = compiled(lambda noise, rows: lax.map(lambda x: of_batch(*x), (noise, rows)), *flat)
        found = {n: np.asarray(x, float).reshape(-1, 2, *x.shape[1:]) for n, x in terms.items()}
        return {n: _common(x, batches.places) if n in inside else x for n, x in found.items()}

    # chains in parallel read the model within a transformation, though its data are known
    with at_once():
        found = evaluated(noise)
        suspects = [name for name, x in found.items() if (_excess(x) > 0).any()]
        if not suspects:
            return
        nudged = evaluated(jax.tree.map(_nudged, noise))
        eps = _coarsest(jax.make_jaxpr(densities)({**one, **local}, drawn).jaxpr)
    for name in suspects:
        amplified = np.abs(nudged[name] - found[name]).max(1) / NUDGE
        excess = _excess(found[name], eps, np.nan_to_num(amplified, posinf=0.0))
        if (excess <= 0).all():
            continue
        where: Any = np.unravel_index(excess.argmax(), excess.shape)
        pair = found[name][(where[0], slice(None), *where[1:])]
        if name not in inside:
            yield name, _of_another_place(name, plate, pair)
            continue
        values, rows, places = jax.tree.map(lambda x: x[where[0]], (noise, *batches))  # noqa: B023
        module = _module(densities, values, rows, places) if plan.has_params else ""
        yield name, _of_a_row(name, plate, rows[0, places[0, where[1]]], pair, module)


def _of_a_row(name: str, plate: str, row: int, pair: np.ndarray, module: str) -> str:
    first, second = pair
    reason = f" They meet in the module {module}." if module else ""
    return (
        f"the rows of plate {plate!r} lean on each other: at site {name!r} the log density of a "
        f"row depends on which other rows come along. For instance, row {row} has "
        f"{first:.6g} in one batch and {second:.6g} in another.{reason} "
        "Expected rows that are separate terms of the log density: compute what joins rows (a sum, "
        "a mean, a rank) outside of the plate from all rows, and index the result; normalise over "
        "features and not over the batch; or take all rows by batch_size=None"
    )


def _of_another_place(name: str, plate: str, pair: np.ndarray) -> str:
    first, second = pair
    return (
        f"site {name!r} is outside of plate {plate!r}, and its log density depends on which rows "
        f"of the plate are drawn: it is {first:.6g} for one batch and {second:.6g} for another. "
        "Only sites in the plate are scaled to all rows: move the site into the plate, compute it "
        "from all rows outside of the plate, or take all rows by batch_size=None"
    )


def _batches(plan: Subsampling, plate: str) -> Batches:
    size, drawn = plan.sizes[plate], plan.batch_sizes[plate]
    length = max(2, min(size // 2, MOST_ROWS, max(SMALL_BATCH, 2 * drawn)))
    count = max(1, length // TESTED)
    rng = np.random.default_rng(0)
    # evenly spread, so that the reverse order has other places, too
    places = np.arange(count) * (length // count)
    # a model that asks for keys has a random number for each place
    again = places if plan.is_random else length - 1 - places
    free = [np.setdiff1d(np.arange(length), p) for p in (places, again)]
    rows = np.empty((len(RADII), 2, length), np.int32)
    for pair in rows:
        tested = rng.choice(size, count, replace=False)
        beside = (tested[:, None] + np.arange(1, length + 1)) % size
        first = _distinct(beside.T.ravel(), tested)[: length - count]
        elsewhere = _distinct(rng.integers(size, size=4 * length), np.append(tested, first))
        if size <= 4 * length:
            elsewhere = np.setdiff1d(np.arange(size), np.append(tested, first))
            elsewhere = rng.permutation(elsewhere)
        second = np.append(elsewhere, tested)  # of two rows one is all there is
        pair[0, places], pair[0, free[0]] = tested, np.resize(first, length - count)
        pair[1, again], pair[1, free[1]] = tested, np.resize(second, length - count)
    return Batches(rows, np.broadcast_to(np.stack([places, again]), (len(RADII), 2, count)))


def _distinct(rows: np.ndarray, without: np.ndarray) -> np.ndarray:
    """Rows in their order, each once, without some."""
    _, first = np.unique(rows, return_index=True)
    rows = rows[np.sort(first)]
    return rows[~np.isin(rows, without)]


def _noise(
    plan: Subsampling, shapes: dict, plate: str, rows: np.ndarray, others: dict
) -> dict[str, np.ndarray]:
    """Unconstrained values of the latent sites for every batch, shapes (positions, 2, ...)."""
    rng, kind = np.random.default_rng(1), jnp.result_type(float)
    found = {}
    for name, known in shapes.items():
        shape = list(known)
        axes = dict(plan.local_axes.get(name, ()))
        for p, axis in axes.items():
            shape[axis] = NOISES if p == plate else others[p].shape[0]
        values = []
        for radius, pair in zip(RADII, rows, strict=True):
            x = rng.uniform(-radius, radius, shape).astype(kind)
            of_batch = [np.take(x, r % NOISES, axes[plate]) if plate in axes else x for r in pair]
            values.append(np.stack(of_batch))
        found[name] = np.stack(values)
    return found


def _terms(site: dict[str, Any], plate: str) -> jax.Array:
    """Log densities of a site, with the plate's axis first."""
    terms = site["fn"].log_prob(site["value"])
    if site["scale"] is not None:
        terms = terms * site["scale"]
    dims = {frame.name: frame.dim for frame in site["cond_indep_stack"]}
    return jnp.moveaxis(terms, dims[plate], 0) if plate in dims else terms


def _common(terms: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The terms of the rows that two batches have in common, in one order."""
    return np.take_along_axis(terms, places.reshape(*places.shape, *[1] * (terms.ndim - 3)), 2)


def _nudged(x: np.ndarray) -> np.ndarray:
    signs = np.random.default_rng(2).choice([-1.0, 1.0], x.shape[2:])
    return (x * (1 + NUDGE * signs)).astype(x.dtype)


def _excess(found: np.ndarray, eps: float = 0.0, amplified: Any = 0.0) -> np.ndarray:
    """By how much two log densities differ beyond rounding, relative to what is allowed, less one.

    Log densities have the shape (positions, 2, ...). ``eps`` is the coarsest rounding of the
    program, relative, and ``amplified`` their change for a relative change of 1 of the position.
    """
    first, second = found[:, 0], found[:, 1]
    allowed = max(RELATIVE, ROUNDINGS * eps) * np.maximum(np.abs(first), np.abs(second))
    allowed = allowed + max(ABSOLUTE, ROUNDINGS * eps) + ROUNDINGS * eps * amplified
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid="ignore"):
        excess = np.abs(first - second) / allowed - 1
    excess[~np.isfinite(excess)] = np.inf
    return np.where(same, -1.0, excess)


def _coarsest(jaxpr: Jaxpr) -> float:
    """The largest relative rounding error among the types of a program's numbers."""
    found = [0.0]
    for equation in jaxpr.eqns:
        kinds = [getattr(x.aval, "dtype", np.dtype(int)) for x in equation.outvars]
        found += [float(jnp.finfo(k).eps) for k in kinds if jnp.issubdtype(k, jnp.floating)]
        found += map(_coarsest, inner(equation))
    return max(found)


def _module(densities: Callable, noise: dict, rows: np.ndarray, places: np.ndarray) -> str:
    """The first module of Flax in which rows meet; empty without one."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return ""
    told: list[list[tuple[str, np.ndarray]]] = [[], []]

    def record(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        value = call(*args, **kwargs)
        name = f"{'/'.join(context.module.path)!r} ({type(context.module).__name__})"
        for x in jax.tree.leaves(value):
            if jnp.ndim(x) and x.shape[0] == rows.shape[1]:
                told[k].append((name, np.asarray(x, float)[places[k]]))
        return value

    for k in (0, 1):
        with linen.intercept_methods(record):
            densities(jax.tree.map(lambda x: jnp.asarray(x[k]), noise), rows[k])  # noqa: B023
    for (name, first), (_, second) in zip(*told, strict=False):
        if not np.allclose(first, second, rtol=1e-3, atol=1e-3 * np.abs(first).max()):
            return name
    return ""
