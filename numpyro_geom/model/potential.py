"""Potential: the energy U of a NumPyro model (or of a function) and its unbiased estimates.

A Potential is a NamedTuple of pure functions. Kernels use the target distribution only through it.
So a wrapper (a control variate, a parameter expansion) is a function from a Potential to a
Potential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro import handlers
from numpyro.infer.util import potential_energy

from .._util import key_word, scattered
from ..rows.host_rows import (
    Hint,
    HostRows,
    batches_at_once,
    fetch,
    hint_part,
    hints,
    host_rows_in,
)
from . import minibatch
from .enumeration import enumerating
from .minibatch import RNG_KEY, Batch, Strata, Subsampling

CURVATURE_ROWS = 2048
"""Number of rows that measure curvature and gradient noise in warm-up."""
RANDOM_KEYS = 32
"""Number of keys that measure the noise of a model that asks for keys."""
CHUNK_ROWS = 8192
"""Rows at a time in a pass over all rows."""

PyTree = Any


class Potential(NamedTuple):
    """The target exp(-U / temperature), as pure functions of the position.

    Attributes:
        energy: ``(position, batch) -> scalar``, an unbiased estimate of U in nats, summed over
            all data, with the log-Jacobians of the constraining transforms. Exact if
            ``deterministic``.
        init_stream: ``rng_key -> stream``, the state of the row stream.
        draw: ``(rng_key, stream) -> (batch, stream)``, the next minibatch.
        split: ``(batch, num_parts) -> batches``, disjoint parts, each with an unbiased energy.
        curvature_batch: ``rng_key -> batch``, a larger batch for the Hessian in warm-up.
        score_noise: ``(rng_key) -> tuple of (weight, rows)``. ``rows(position)`` is a vector whose
            entries each have a gradient. The covariance of the minibatch gradient is the sum of
            ``weight`` times the covariance of these gradients over the entries.
        on_all_rows: ``fn -> pytree``, the weighted sum of ``fn(batch)`` over batches that together
            are all rows, in a loop of bounded memory. It is exact for functions that are linear in
            the energy, so ``on_all_rows(lambda rows: energy(position, rows))`` is U. None for a
            stochastic ``potential_fn``. A model that asks for keys gets a fixed key here.
        num_data: number of observations N.
        steps_per_epoch: steps in one pass over the data.
        deterministic: whether ``energy`` ignores the batch: all rows, and no keys.
        on_host: whether rows come from `numpyro_geom.HostRows`.
        full_energy: ``position -> U`` if it was given with a stochastic ``potential_fn``, else
            None.
    """

    energy: Callable[[PyTree, Batch], jax.Array]
    init_stream: Callable[[jax.Array], Any]
    draw: Callable[[jax.Array, Any], tuple[Batch, Any]]
    split: Callable[[Batch, int], tuple[Batch, ...]]
    curvature_batch: Callable[[jax.Array], Batch]
    score_noise: Callable[[jax.Array], tuple[tuple[float, Callable[[PyTree], jax.Array]], ...]]
    on_all_rows: Callable[[Callable[[Batch], PyTree]], PyTree] | None
    num_data: int
    steps_per_epoch: int
    deterministic: bool
    on_host: bool = False
    full_energy: Callable[[PyTree], jax.Array] | None = None


def model_potential(model: Callable, plan: Subsampling, args: tuple, kwargs: dict) -> Potential:
    """The potential of a NumPyro model, with the minibatches of a plan.

    Args:
        model: a NumPyro model; ``param`` sites already substituted.
        plan: from `numpyro_geom.model.plates.read_subsampling`.
        args: model arguments; arrays in them may be traced.
        kwargs: model keyword arguments.
    """
    sums = any(s.discrete for s in plan.sites)

    def energy(position: PyTree, batch: Batch) -> jax.Array:
        run = minibatch.SubsamplePlates(model, batch, plan.sizes)
        ordered = batch.values() if isinstance(batch, Strata) else ()
        with hints(*(Hint(index, ordered=True) for index in ordered)):
            return potential_energy(
                enumerating(run, plan.sites) if sums else run,
                args,
                kwargs,
                minibatch.gather_local(plan, position, batch),
                enum=sums,
            )

    def some_rows(rng_key: jax.Array, at_most: Mapping[str, int]) -> Batch:
        return Strata(
            (
                plate,
                _spread_rows(
                    key_word(rng_key) + i, plan.sizes[plate], at_most.get(plate, CURVATURE_ROWS)
                ),
            )
            for i, plate in enumerate(plan.batch_sizes)
        )

    def score_noise(rng_key: jax.Array) -> tuple:
        groups = []
        for plate, batch_rows in plan.batch_sizes.items():
            # other subsampled plates keep about their batch size
            others = {other: rows for other, rows in plan.batch_sizes.items() if other != plate}
            batch = some_rows(rng_key, others)
            rows_fn = row_energies(model, plan, args, kwargs, plate, batch)
            groups.append((plan.sizes[plate] ** 2 / batch_rows, rows_fn))
        if plan.is_random:
            groups.append(
                (1.0, partial(_key_energies, energy, some_rows(rng_key, plan.batch_sizes)))
            )
        return tuple(groups)

    return Potential(
        energy=energy,
        init_stream=lambda rng_key: minibatch.init_stream(plan, rng_key),
        draw=lambda rng_key, stream: minibatch.draw(plan, rng_key, stream),
        split=_split_rows,
        curvature_batch=lambda rng_key: some_rows(rng_key, {}),
        score_noise=score_noise,
        on_all_rows=lambda fn: _sum_over_chunks(plan, fn),
        num_data=plan.num_data,
        steps_per_epoch=plan.steps_per_epoch,
        deterministic=not plan.batch_sizes and not plan.is_random,
        on_host=bool(host_rows_in((args, kwargs))),
    )


def in_coordinates(
    potential: Potential,
    to_sites: Callable[[PyTree], PyTree],
    correction: Callable[[PyTree], jax.Array] | None = None,
) -> Potential:
    """The potential as a function of other coordinates of the position.

    Args:
        potential: potential of the position.
        to_sites: map from the coordinates to the position.
        correction: an addition to the energy, as a function of the coordinates.
    """

    def energy(coordinates: PyTree, batch: Batch) -> jax.Array:
        total = potential.energy(to_sites(coordinates), batch)
        return total if correction is None else total + correction(coordinates)

    def score_noise(rng_key: jax.Array) -> tuple:
        return tuple(
            (weight, lambda coordinates, rows=rows: rows(to_sites(coordinates)))
            for weight, rows in potential.score_noise(rng_key)
        )

    return potential._replace(energy=energy, score_noise=score_noise)


def _spread_rows(word: jax.Array, size: int, at_most: int) -> jax.Array:
    """Distinct rows from all over a plate: one from each of its equal stretches."""
    num_rows = min(size, at_most)
    bounds = np.arange(num_rows + 1) * size // num_rows
    first = jnp.asarray(bounds[:-1], jnp.int32)
    if num_rows == size:
        return first
    lengths = jnp.asarray(np.diff(bounds), jnp.uint32)
    return first + (scattered(word, num_rows) % lengths).astype(jnp.int32)


def _split_rows(batch: dict[str, jax.Array], num_parts: int) -> tuple[Batch, ...]:
    parts: tuple[dict, ...] = tuple({} for _ in range(num_parts))
    for plate, rows in batch.items():
        if plate == RNG_KEY:
            for part, key in zip(parts, random.split(rows, num_parts), strict=True):
                part[plate] = key
            continue
        share = rows.shape[0] // num_parts
        for k, part in enumerate(parts):
            stretch = k * share, (k + 1) * share
            part[plate] = rows[slice(*stretch)]
            hint_part(rows, part[plate], *stretch)
    return parts


def _sum_over_chunks(plan: Subsampling, fn: Callable[[Batch], PyTree]) -> PyTree:
    """``sum_k w_k fn(chunk k)``, where w_k is the chunk's share of its plate's rows.

    A plate scales its sites by its size over the number of given rows, and w_k cancels this factor.
    Terms outside the plate count with the sum of the w_k, which is 1. With several plates the sum
    runs over all pairs of their chunks, which is right for nested and for independent plates.
    """
    plates = list(plan.batch_sizes)

    def over(k: int, batch: Batch) -> PyTree:
        if k == len(plates):
            return fn(batch)
        plate, size = plates[k], plan.sizes[plates[k]]
        chunk = min(size, CHUNK_ROWS)
        num_chunks, rest = divmod(size, chunk)

        def part(index: jax.Array, **known: Any) -> PyTree:
            with hints(Hint(index, **known)):
                value = over(k + 1, {**batch, plate: index})
            return jax.tree.map(lambda x: x * (index.size / size), value)

        def indices(first: Any, rows: int = chunk) -> jax.Array:
            return first + jnp.arange(rows, dtype=jnp.int32)

        if num_chunks == 1:
            total = part(indices(0))
        else:
            on_host: list[HostRows] = []
            shapes = jax.eval_shape(lambda: part(indices(0), used=on_host))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            if on_host:
                total = _add_from_host(part, zeros, on_host, chunk, num_chunks)
            else:
                total = lax.fori_loop(
                    0,
                    num_chunks,
                    lambda j, old: jax.tree.map(jnp.add, old, part(indices(j * chunk))),
                    zeros,
                )
        if rest:
            total = jax.tree.map(jnp.add, total, part(indices(num_chunks * chunk, rest)))
        return total

    return over(0, {})


def _add_from_host(
    part: Callable, total: PyTree, sources: list[HostRows], chunk: int, num_chunks: int
) -> PyTree:
    """``total`` plus the parts of all whole chunks; several chunks are transferred at a time."""
    length = min(num_chunks, batches_at_once(dict.fromkeys(sources, chunk)))
    wanted = tuple((x, 0) for x in sources)

    def block(first: Any, total: PyTree, chunks: int = length) -> PyTree:
        index = first + jnp.arange(chunks * chunk, dtype=jnp.int32).reshape(chunks, chunk)
        rows = fetch(wanted, (index,), (index + chunks * chunk,))

        def add(c: jax.Array, total: PyTree) -> PyTree:
            known = {x: r[c] for x, r in zip(sources, rows, strict=True)}
            return jax.tree.map(jnp.add, total, part(index[c], rows=known))

        return lax.fori_loop(0, chunks, add, total)

    num_blocks, rest = divmod(num_chunks, length)
    total = lax.fori_loop(0, num_blocks, lambda j, old: block(j * length * chunk, old), total)
    return block(num_blocks * length * chunk, total, rest) if rest else total


def _key_energies(energy: Callable, rows: Batch, position: PyTree) -> jax.Array:
    """Energies on the same rows with different keys."""
    keys = random.split(random.key(0), RANDOM_KEYS)
    return lax.map(lambda key: energy(position, {**rows, RNG_KEY: key}), keys)


def row_energies(
    model: Callable, plan: Subsampling, args: tuple, kwargs: dict, plate: str, batch: Batch
) -> Callable[[PyTree], jax.Array]:
    """Energies of single rows of a plate: position -> array of shape (rows of the batch,).

    The plate's own factor N/B is removed. The factors of other plates and of ``scale`` handlers
    remain.
    """
    num_rows = batch[plate].shape[0]

    def rows_fn(position: PyTree) -> jax.Array:
        with handlers.trace() as trace:
            potential_energy(
                minibatch.SubsamplePlates(model, batch, plan.sizes),
                args,
                kwargs,
                minibatch.gather_local(plan, position, batch),
            )
        total = jnp.zeros(())
        for site in trace.values():
            if site["type"] != "sample":
                continue
            dims = {frame.name: frame.dim for frame in site["cond_indep_stack"]}
            if plate not in dims:
                continue
            log_prob = site["fn"].log_prob(site["value"])
            if site["scale"] is not None:
                log_prob = log_prob * site["scale"]
            kept = log_prob.ndim + dims[plate]
            total = total - jnp.sum(log_prob, [a for a in range(log_prob.ndim) if a != kept])
        return total * (num_rows / plan.sizes[plate])

    return rows_fn
