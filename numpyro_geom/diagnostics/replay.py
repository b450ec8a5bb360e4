"""The model behind draws: its observed values, likelihoods and predictions, on all rows.

They are computed in chunks of draws and rows, so that the device holds a bounded number of values.
The results are collected on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.infer import MCMC

from .._numpyro import arguments_of
from .._util import num_at_once
from ..laplace.draw import LaplaceDraws
from ..model.abstract import abstract_trace, with_start
from ..model.arguments import on_device
from ..model.model import Model
from ..model.plates import on_all_rows
from ..model.trial import leaning
from .draws import Arrays, host

SHARED_DRAWS = 64
"""Draws that share one pass over a chunk of rows, if there are enough rows."""
FEW_ROWS = 16
"""Most rows of a plate that is never cut into chunks."""


def model_of(source: MCMC | LaplaceDraws) -> Model | None:
    """The model behind draws, with the arguments of the run; None with a ``potential_fn``."""
    if isinstance(source, LaplaceDraws):
        return unchecked(source.model, source.args, source.kwargs)
    kernel, (args, kwargs) = source.sampler, arguments_of(source)
    if hasattr(kernel, "bound"):
        return kernel.bound.on(*on_device(args, kwargs)).model
    fn = getattr(kernel, "model", None)
    return None if fn is None else unchecked(fn, args, kwargs)


def unchecked(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Model:
    """A model that NumPyro can run. Its rows need no check, because none are drawn."""
    args, kwargs = on_device(args, kwargs)
    return Model(fn, args, kwargs, on_all_rows(*abstract_trace(fn, args, kwargs, {})))


def summed_out(model: Model, posterior: Mapping[str, Any]) -> list[str]:
    """Discrete latent sites without draws."""
    return [name for name, site in model.sites.items() if site.discrete and name not in posterior]


def latent_draws(
    model: Model, posterior: Mapping[str, np.ndarray], summed: Sequence[str] = ()
) -> Arrays:
    """Draws of the latent sites except the ``summed`` ones, with chains concatenated."""
    latent = [name for name in model.of_kind("latent") if name not in summed]
    missing = [name for name in latent if name not in posterior]
    if missing:
        raise ValueError(
            f"the run holds no draws of the latent sites {missing}, and the model cannot be "
            "replayed without them: keep them in `extra_fields`, or do not ask for gradients, "
            "log_likelihood and posterior_predictive. Draws of discrete sites that were summed out "
            "come from `numpyro.infer.Predictive(model, samples, infer_discrete=True)`"
        )
    values = {name: posterior[name] for name in latent}
    return {n: x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])) for n, x in values.items()}


def observed_values(model: Model) -> Arrays:
    """Values of the observed sites on all rows; nothing else of the model is computed."""
    names = model.of_kind("observed")
    if not names:
        return {}

    @jax.jit
    def values(arrays: list) -> dict[str, jax.Array]:
        known = model.with_arrays(arrays).replace(fn=with_start(model.runnable), fixed={})
        trace = known.trace({})
        return {name: trace[name]["value"] for name in names}

    return {name: host(x) for name, x in values(model.arrays).items()}


def pointwise_log_prob(
    model: Model, draws: Arrays, names: list[str], chunk_size: int | None
) -> Arrays:
    """Pointwise log likelihood; sites with the same largest plate are computed together."""
    by_plate: dict[str | None, list[str]] = {}
    for name in names:
        by_plate.setdefault(row_plate(model, name), []).append(name)
    found: Arrays = {}
    num_draws = next(iter(draws.values())).shape[0]
    for plate, group in by_plate.items():
        log_prob = _log_prob_fn(model, group, plate)
        found |= _evaluate(log_prob, model, draws, num_draws, plate, chunk_size)
    return {name: found[name] for name in names}


def _log_prob_fn(model: Model, names: list[str], plate: str | None) -> Callable:
    def log_prob(arrays: list, _: jax.Array, draw: dict, rows: jax.Array) -> dict[str, jax.Array]:
        batch = {} if plate is None else {plate: rows}
        return model.with_arrays(arrays).log_prob(draw, batch, names)

    return log_prob


def row_plate(model: Model, name: str) -> str | None:
    """The largest plate of an observed site; None if it is small, or rows lean on each other."""
    site, sizes = model.sites[name], model.plan.sizes
    plate = max(dict(site.plates), key=lambda plate: sizes[plate], default=None)
    if plate is None or sizes[plate] <= FEW_ROWS:
        return None
    half = {plate: sizes[plate] // 2}
    plan = dataclasses.replace(model.plan, batch_sizes=half)
    given = model.runnable, model.args, model.kwargs
    try:
        trace, _ = abstract_trace(*given, half)
        found = dict(leaning(*given, plan, plate))
    except Exception:  # a user's model can raise anything if shapes do not fit
        return None
    # a plate in a loop keeps all of its rows
    in_loop = trace[name]["fn"].batch_shape[dict(site.plates)[plate]] != half[plate]
    return None if in_loop or name in found else plate


def predictive_values(
    model: Model,
    draws: Arrays,
    num_draws: int,
    names: list[str],
    rng_key: Any,
    chunk_size: int | None,
) -> Arrays:
    """Values of all sites on all rows, for each draw or from the prior; observed sites are redrawn.

    Each draw has its own key, so the result does not depend on the chunks.
    """

    def sample(arrays: list, number: jax.Array, draw: dict, _: Any) -> dict[str, jax.Array]:
        key = random.fold_in(rng_key, number)
        trace = model.with_arrays(arrays).trace(draw, rng_key=key, redraw=True)
        return {name: trace[name]["value"] for name in names}

    try:
        return _evaluate(sample, model, draws, num_draws, None, chunk_size)
    except NotImplementedError as error:
        raise ValueError(
            "the model has a site whose distribution cannot be drawn from, such as an "
            "ImproperUniform: give the draws as a dict, or replace the distribution"
        ) from error


def _evaluate(
    fn: Callable[[list, jax.Array, dict, jax.Array], dict],
    model: Model,
    draws: Arrays,
    num_draws: int,
    plate: str | None,
    chunk_size: int | None,
) -> Arrays:
    """All values of ``fn(arrays, number of the draw, draw, rows of the plate)``, on the host.

    The function is pure. Its results, by site, have an axis for the rows of the plate, unless the
    plate is None. At most ``chunk_size`` entries of all results together are computed at once.
    """
    batched = jax.vmap(fn, (None, 0, 0, None))
    # latent sites in the plate, with the axis of its rows (the axis of draws is 0)
    plan = dataclasses.replace(model.plan, batch_sizes={} if plate is None else {plate: 1})
    local_axes = {name: 1 + axis for name, ((_, axis),) in plan.local_axes.items()}
    num_rows = 1 if plate is None else model.plan.sizes[plate]

    def abstract(n_draws: int, n_rows: int) -> tuple:
        chunk = {}
        for name, x in draws.items():
            shape = [n_draws, *x.shape[1:]]
            if name in local_axes:
                shape[local_axes[name]] = n_rows
            chunk[name] = jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))
        numbers, rows = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (n_draws, n_rows))
        return model.arrays, numbers, chunk, rows

    whole = jax.eval_shape(batched, *abstract(num_draws, num_rows))
    per_row = max(1, sum(s.size for s in whole.values()) // (num_draws * num_rows))
    held = max(1, sum(x[0].size for name, x in draws.items() if name not in local_axes))
    limit = num_at_once(32) if chunk_size is None else chunk_size
    for _ in range(5):
        n_draws, n_rows = _chunk_shape(num_draws, num_rows, per_row, held, limit)
        compiled = jax.jit(batched).lower(*abstract(n_draws, n_rows)).compile()
        memory = compiled.memory_analysis()
        excess = 0.0 if memory is None else memory.temp_size_in_bytes / (32 * num_at_once(1))
        if chunk_size is not None or excess <= 1 or n_draws * n_rows == 1:
            break
        limit = max(1, int(n_draws * n_rows * per_row / (1.2 * excess)))

    found = {name: np.empty(s.shape, s.dtype) for name, s in whole.items()}
    for first in range(0, num_draws, n_draws):
        # the last chunk repeats its last entry: all chunks have one shape and one compilation
        numbers = np.minimum(np.arange(first, first + n_draws, dtype=np.int32), num_draws - 1)
        some = {name: x[numbers] for name, x in draws.items()}
        shared = {name: jnp.asarray(x) for name, x in some.items() if name not in local_axes}
        for start in range(0, num_rows, n_rows):
            rows = np.minimum(np.arange(start, start + n_rows, dtype=np.int32), num_rows - 1)
            local = {n: jnp.asarray(np.take(some[n], rows, axis=a)) for n, a in local_axes.items()}
            chunk = {**shared, **local}
            values = compiled(model.arrays, jnp.asarray(numbers), chunk, jnp.asarray(rows))
            for name, value in jax.device_get(values).items():
                where = [slice(first, first + n_draws)] + [slice(None)] * (value.ndim - 1)
                if plate is not None:
                    where[dict(model.sites[name].plates)[plate]] = slice(start, start + n_rows)
                target = found[name][tuple(where)]
                target[...] = value[tuple(slice(n) for n in target.shape)]
    return found


def _chunk_shape(
    num_draws: int, num_rows: int, per_row: int, held: int, limit: int
) -> tuple[int, int]:
    """Number of draws and rows of a chunk: first enough draws to share a pass, then rows."""
    most = max(1, min(num_draws, limit // held, limit // per_row))
    n_draws = min(most, SHARED_DRAWS)
    n_rows = max(1, min(num_rows, limit // (per_row * n_draws)))
    return max(n_draws, min(most, limit // (per_row * n_rows))), n_rows
