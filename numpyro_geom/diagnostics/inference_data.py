"""Export of a run to ArviZ: InferenceData under ArviZ 0.2x, a DataTree under ArviZ 1.x.

Groups are built as xarray datasets, which both lines of ArviZ share; only `_container`
knows which of them is installed. Everything that needs the data replays the model on all rows,
in chunks, whatever the sampler subsampled.
"""

from __future__ import annotations

import datetime
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import xarray as xr
from jax import random
from numpyro import handlers
from numpyro.distributions import Unit
from numpyro.infer import MCMC, NUTS, init_to_uniform
from numpyro.primitives import Messenger
from numpyro.util import is_prng_key

from .._checks import check_int
from ..kernel import SGKernel
from ..kernels.ggmc import GGMC
from ..minibatch import SubsamplePlates, _abstract_trace
from ..potential import takes_rng_key
from .summary import check_run, is_measured, warn_if_unreliable

PyTree = Any
Arrays = dict[str, np.ndarray]

CHUNK_SIZE = 2**18
"""Pointwise values that are evaluated at once, rows times draws, unless memory forbids."""
CHUNK_MEMORY = 2**28
"""Bytes of temporary device memory above which the automatic chunk is made smaller."""
DRAWS_AT_ONCE = 64
"""Draws that share one pass over a chunk of rows, where there are enough rows."""
PROBE_ROWS = 8
"""Rows on which a model is tried to find out whether its rows can be taken apart."""
LARGE_ARRAY = 10**4
"""Entries from which an argument of the model is passed to compiled code."""
MAX_CONSTANT_SIZE = 10**6
"""Entries up to which an argument of the model is stored without being asked for."""

SAMPLE_DIMS = ["chain", "draw"]
RENAMED = {
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}


class _Site(NamedTuple):
    """A sample or deterministic site, all rows: what it is and what its axes mean."""

    kind: str  # latent, observed, factor or deterministic
    shape: tuple[int, ...]
    plates: tuple[tuple[str, int], ...]  # name and (negative) batch dimension
    batch_shape: tuple[int, ...]
    event_dim: int
    event_names: tuple[str, ...]


class _Model(NamedTuple):
    """A model with its arguments, `param` sites fixed, and its sites.

    Compiled code copies the arrays that it closes over, so large ones are passed to it.
    """

    fn: Callable
    leaves: list[Any]  # of the arguments
    structure: Any
    passed: list[int]  # which of the leaves are large arrays
    sites: dict[str, _Site]
    sizes: dict[str, int]

    @property
    def arrays(self) -> list[jax.Array]:
        return [self.leaves[k] for k in self.passed]

    @property
    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        return jax.tree.unflatten(self.structure, self.leaves)

    def of_kind(self, *kinds: str) -> list[str]:
        return [name for name, site in self.sites.items() if site.kind in kinds]

    def trace(
        self, fn: Callable, arrays: Sequence[jax.Array], indices: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run ``fn``, the model within handlers, on these large arrays and rows."""
        leaves = list(self.leaves)
        for k, x in zip(self.passed, arrays, strict=True):
            leaves[k] = x
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return handlers.trace(SubsamplePlates(fn, indices)).get_trace(*args, **kwargs)


def to_inference_data(
    mcmc: MCMC,
    *,
    log_likelihood: bool | str | Sequence[str] = False,
    posterior_predictive: bool | Mapping[str, Any] | None = None,
    prior: bool | Mapping[str, Any] | None = None,
    constant_data: bool | Mapping[str, Any] | None = None,
    coords: Mapping[str, Sequence] | None = None,
    dims: Mapping[str, Sequence[str | None]] | None = None,
    rng_key: jax.Array | None = None,
    num_samples: int = 500,
    chunk_size: int | None = None,
) -> Any:
    """Put a finished run into the form that ArviZ works on.

    Any kernel of NumPyro will do. Groups:

    - ``posterior``: draws of latent and deterministic sites, in the model's own space. With
      ``potential_fn`` the entries of ``z``: an array is called ``z``, the leaves of other pytrees
      are named by their path.
    - ``sample_stats``: ``diverging``, ``energy`` (U in nats where the last step of a draw
      started, a minibatch estimate if rows were drawn), ``lp`` (its negative), ``step_size``,
      ``n_steps``, ``grad_norm``, ``configurational_temperature``, ``kinetic_temperature`` for
      kernels with a momentum, ``acceptance_rate`` for kernels with a Metropolis test, and every
      array among the run's ``extra_fields``.
    - ``observed_data``: the values of observed sites, all rows.
    - ``constant_data``: the other array arguments of the model.
    - ``log_likelihood``: log p(row | draw) of every row under every draw, on the full data. As
      in `numpyro.infer.log_likelihood` a masked row has 0, and the factors of ``scale``
      handlers and of plates are left out.
    - ``posterior_predictive``, ``prior``, ``prior_predictive``: on request.

    A site in a plate has the plate's name as a dimension, with coordinates 0, 1, ...; other axes
    are called ``<site>_dim_0`` and so on, or as the model says in ``infer={"event_dims": ...}``.
    A plate with the name of a variable gets ``_dim`` appended, and ``/`` in names becomes ``.``
    (netCDF reserves it). The attributes of ``posterior`` hold kernel, settings, N, batch sizes,
    seeds, what warm-up has measured, and versions; all of it can be written to netCDF.

    Args:
        mcmc: a run `numpyro.infer.MCMC`.
        log_likelihood: True for all observed sites, or names of some (the only way for a
            ``numpyro.factor`` site to get in). Size: chains x draws x rows.
        posterior_predictive: True to draw observed sites anew for each posterior draw (needs
            ``rng_key``), or draws by name, shaped (chains, draws, ...) or (chains * draws, ...).
        prior: True to draw ``num_samples`` times from the prior (needs ``rng_key``), or draws by
            name, shaped (draws, ...) or (chains, draws, ...); those of observed sites go to
            ``prior_predictive``.
        constant_data: True for all array arguments, False for none, None for those of up to
            a million entries; or arrays by name. An argument that holds the values of an
            observed site is not stored a second time.
        coords: labels of dimensions, by name; in place of 0, 1, ...
        dims: names of a variable's dimensions after chain and draw, by variable; in place of
            those from plates. None, or a list that is too short, leaves the rest as it was.
        rng_key: a key for what is drawn.
        num_samples: draws from the prior.
        chunk_size: pointwise values, rows times draws, that the device holds at once. None for
            262,144, or fewer if the model's temporary arrays then exceed 256 MiB. Where the
            model does not index its data by the plate, a chunk has at least all rows of a draw.

    Returns:
        An ``arviz.InferenceData`` under ArviZ 0.2x, an ``xarray.DataTree`` under ArviZ 1.x.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC, and for other arguments of the wrong type.
        ValueError: if it has not run; if the model that a group needs, a key, or the draws of a
            site are missing; for unknown sites; for labels that do not fit.

    Warns:
        SamplingWarning: see `numpyro_geom.diagnostics.warn_if_unreliable`.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_geom import to_inference_data
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=50, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), 3 + jax.random.normal(jax.random.key(1), (20,)))
        >>> idata = to_inference_data(mcmc, log_likelihood=True)
        >>> idata.log_likelihood["y"].dims
        ('chain', 'draw', 'data')
    """
    check_run(mcmc)
    if chunk_size is not None:
        chunk_size = check_int("chunk_size", chunk_size)
    num_samples = check_int("num_samples", num_samples)
    for name, value in (("coords", coords), ("dims", dims)):
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict, got {type(value).__name__}")
    model = _read_model(mcmc)
    pointwise = _pointwise_sites(model, log_likelihood)
    _check_request("posterior_predictive", posterior_predictive, model, rng_key)
    _check_request("prior", prior, model, rng_key)
    warn_if_unreliable(mcmc)

    posterior = _name_leaves(mcmc.get_samples(group_by_chain=True), "z")
    shape = next(iter(posterior.values())).shape[:2]
    observed = {} if model is None else _observed(model)
    groups: dict[str, Arrays] = {
        "posterior": posterior,
        "sample_stats": _sample_stats(mcmc),
        "observed_data": observed,
        "constant_data": _constants(mcmc, model, constant_data, observed),
    }
    if model is not None and pointwise:
        found = _log_likelihood(model, _latent_draws(model, posterior), pointwise, chunk_size)
        groups["log_likelihood"] = {n: x.reshape((*shape, *x.shape[1:])) for n, x in found.items()}
    if model is not None and posterior_predictive is True:
        draws, names = _latent_draws(model, posterior), model.of_kind("observed")
        found = _predictive(model, draws, shape[0] * shape[1], names, rng_key, chunk_size)
        posterior_predictive = {n: x.reshape((*shape, *x.shape[1:])) for n, x in found.items()}
    if model is not None and prior is True:
        names = model.of_kind("latent", "deterministic", "observed")
        prior = _predictive(model, {}, num_samples, names, rng_key, chunk_size)
    if isinstance(posterior_predictive, Mapping):
        groups["posterior_predictive"] = _by_chain(posterior_predictive, shape)
    if isinstance(prior, Mapping):
        groups["prior"], groups["prior_predictive"] = _split_prior(model, prior)

    labels = _Labels(model, coords, dims, {n for arrays in groups.values() for n in arrays})
    created = {
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
        **_library(mcmc.sampler),
    }
    datasets = {
        group: labels.dataset(group, arrays, created) for group, arrays in groups.items() if arrays
    }
    datasets["posterior"].attrs.update(_attributes(mcmc))
    if "sample_stats" in datasets:
        _describe(datasets["sample_stats"], mcmc.sampler)
    return _container(datasets)


def _container(datasets: dict[str, Any]) -> Any:
    """The one place that knows the lines of ArviZ: what the installed one works on."""
    import arviz  # slow to import, and only needed here

    if int(arviz.__version__.partition(".")[0]) >= 1:
        return xr.DataTree.from_dict(datasets)
    return arviz.InferenceData(**datasets)


# The model


def _read_model(mcmc: MCMC) -> _Model | None:
    """The model's sites and plates, without computing anything; None with ``potential_fn``."""
    kernel = mcmc.sampler
    fn = getattr(kernel, "model", None)
    if fn is None:
        return None
    leaves, structure = jax.tree.flatten((mcmc._args, mcmc._kwargs))
    if isinstance(kernel, SGKernel):
        fn = kernel._runnable_model()
        # as the kernel does: traced row indices cannot index a NumPy array
        leaves = [jnp.asarray(x) if _is_numeric(x) else x for x in leaves]
    args, kwargs = jax.tree.unflatten(structure, leaves)
    trace, declared = _abstract_trace(fn, args, kwargs, {})
    sites = {
        name: _site(site)
        for name, site in trace.items()
        if site["type"] in ("sample", "deterministic")
    }
    sizes = {name: size for name, (size, _) in declared.items()}
    passed = [k for k, x in enumerate(leaves) if _is_numeric(x) and x.size >= LARGE_ARRAY]
    model = _Model(fn, leaves, structure, passed, sites, sizes)
    if passed:
        try:
            jax.eval_shape(_values_fn(model, []), model.arrays)
        except Exception:  # the model wants to know values, for instance the largest of an index
            return model._replace(passed=[])
    return model


def _site(site: dict[str, Any]) -> _Site:
    kind, batch_shape, event_dim = "deterministic", (), 0
    if site["type"] == "sample":
        fn = site["fn"]
        batch_shape, event_dim = tuple(fn.batch_shape), fn.event_dim
        kind = "observed" if site["is_observed"] else "latent"
        while hasattr(fn, "base_dist"):
            fn = fn.base_dist
        if kind == "observed" and isinstance(fn, Unit):
            kind = "factor"
    return _Site(
        kind=kind,
        shape=jnp.shape(site["value"]),
        plates=tuple(
            (f.name, f.dim) for f in sorted(site["cond_indep_stack"], key=lambda f: f.dim)
        ),
        batch_shape=batch_shape,
        event_dim=event_dim,
        event_names=tuple(site.get("infer", {}).get("event_dims", ())),
    )


def _pointwise_sites(model: _Model | None, request: Any) -> list[str]:
    """Names of the sites whose log likelihood is asked for."""
    if request is False:
        return []
    if model is None:
        raise ValueError(
            "log_likelihood needs a kernel with a model, and this one has potential_fn"
        )
    if request is True:
        return model.of_kind("observed")
    names = [request] if isinstance(request, str) else request
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"log_likelihood must be True, False, or names of observed sites, got {request!r}"
        )
    known = model.of_kind("observed", "factor")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"log_likelihood names {unknown}, which are not observed sites of the model: expected "
            f"some of {known}"
        )
    return list(names)


def _check_request(name: str, value: Any, model: _Model | None, rng_key: Any) -> None:
    if value is None or value is False or isinstance(value, Mapping):
        return
    if value is not True:
        raise TypeError(f"{name} must be True or a dict of draws, got {type(value).__name__}")
    if model is None:
        raise ValueError(f"{name}=True needs a kernel with a model, and this one has potential_fn")
    if rng_key is None:
        raise ValueError(f"{name}=True draws anew: pass rng_key, such as jax.random.key(0)")
    if not is_prng_key(rng_key):
        raise TypeError(f"rng_key must be a single key, such as jax.random.key(0), got {rng_key!r}")


def _latent_draws(model: _Model, posterior: Arrays) -> Arrays:
    """Draws of the latent sites, chains one after the other."""
    latent = model.of_kind("latent")
    missing = [name for name in latent if name not in posterior]
    if missing:
        raise ValueError(
            f"the run holds no draws of the latent sites {missing}, and the model cannot be "
            "replayed without them: keep them in `extra_fields`, or do not ask for log_likelihood "
            "and posterior_predictive"
        )
    return {name: posterior[name].reshape((-1, *posterior[name].shape[2:])) for name in latent}


# Replaying it, in chunks


def _evaluate(
    fn: Callable[[list, jax.Array, dict, jax.Array], dict],
    arrays: list[jax.Array],
    draws: Arrays,
    num_draws: int,
    num_rows: int,
    local_axes: Mapping[str, int],
    row_axes: Mapping[str, int | None],
    chunk_size: int | None,
) -> Arrays:
    """All values of ``fn(arrays, number of the draw, draw, rows)``, with bounded device memory.

    Args:
        fn: pure; its results are a dict of arrays.
        arrays: passed through.
        draws: one entry a draw, on the host.
        num_draws: draws.
        num_rows: rows.
        local_axes: for sites that have an entry a row, its axis (that of draws included).
        row_axes: for each result, the negative axis of the rows, or None if it has none.
        chunk_size: most entries of all results together that are computed at once.

    Returns:
        Arrays on the host, draws first.
    """
    batched = jax.vmap(fn, (None, 0, 0, None))

    def abstract(n_draws: int, n_rows: int) -> tuple:
        chunk = {}
        for name, x in draws.items():
            shape = [n_draws, *x.shape[1:]]
            if name in local_axes:
                shape[local_axes[name]] = n_rows
            chunk[name] = jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))
        numbers, rows = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (n_draws, n_rows))
        return arrays, numbers, chunk, rows

    whole = jax.eval_shape(batched, *abstract(num_draws, num_rows))
    per_row = max(1, sum(s.size for s in whole.values()) // (num_draws * num_rows))
    held = max(1, sum(x[0].size for name, x in draws.items() if name not in local_axes))
    limit = CHUNK_SIZE if chunk_size is None else chunk_size
    for _ in range(5):
        n_draws, n_rows = _chunk_shape(num_draws, num_rows, per_row, held, limit)
        compiled = jax.jit(batched).lower(*abstract(n_draws, n_rows)).compile()
        memory = compiled.memory_analysis()
        excess = 0.0 if memory is None else memory.temp_size_in_bytes / CHUNK_MEMORY
        if chunk_size is not None or excess <= 1 or n_draws * n_rows == 1:
            break
        limit = max(1, int(n_draws * n_rows * per_row / (1.2 * excess)))

    found = {name: np.empty(s.shape, s.dtype) for name, s in whole.items()}
    for first in range(0, num_draws, n_draws):
        # the last chunk repeats its last entry, so that all have one shape: one compilation
        numbers = np.minimum(np.arange(first, first + n_draws, dtype=np.int32), num_draws - 1)
        some = {name: x[numbers] for name, x in draws.items()}
        shared = {name: jnp.asarray(x) for name, x in some.items() if name not in local_axes}
        for start in range(0, num_rows, n_rows):
            rows = np.minimum(np.arange(start, start + n_rows, dtype=np.int32), num_rows - 1)
            local = {n: jnp.asarray(np.take(some[n], rows, axis=a)) for n, a in local_axes.items()}
            chunk = {**shared, **local}
            values = compiled(arrays, jnp.asarray(numbers), chunk, jnp.asarray(rows))
            for name, value in jax.device_get(values).items():
                where = [slice(first, first + n_draws)] + [slice(None)] * (value.ndim - 1)
                axis = row_axes[name]
                if axis is not None:
                    where[axis] = slice(start, start + n_rows)
                target = found[name][tuple(where)]
                target[...] = value[tuple(slice(n) for n in target.shape)]
    return found


def _chunk_shape(
    num_draws: int, num_rows: int, per_row: int, held: int, limit: int
) -> tuple[int, int]:
    """Draws and rows of a chunk: many draws share a pass over rows, the rest goes to rows."""
    most = max(1, min(num_draws, limit // held, limit // per_row))
    n_draws = min(most, DRAWS_AT_ONCE)
    n_rows = max(1, min(num_rows, limit // (per_row * n_draws)))
    return max(n_draws, min(most, limit // (per_row * n_rows))), n_rows


def _log_likelihood(
    model: _Model, draws: Arrays, names: list[str], chunk_size: int | None
) -> Arrays:
    """Pointwise log likelihood, sites together that are indexed by the same largest plate."""
    by_plate: dict[str | None, list[str]] = {}
    for name in names:
        by_plate.setdefault(_row_plate(model, draws, name), []).append(name)
    found: Arrays = {}
    num_draws = next(iter(draws.values())).shape[0]
    for plate, group in by_plate.items():
        num_rows = 1 if plate is None else model.sizes[plate]
        found |= _evaluate(
            _log_prob_fn(model, group, plate),
            model.arrays,
            draws,
            num_draws,
            num_rows,
            {} if plate is None else _local_axes(model, plate),
            {n: None if plate is None else dict(model.sites[n].plates)[plate] for n in group},
            chunk_size,
        )
    return {name: found[name] for name in names}


def _log_prob_fn(model: _Model, names: list[str], plate: str | None) -> Callable:
    def log_prob(arrays: list, _: jax.Array, draw: dict, rows: jax.Array) -> dict[str, jax.Array]:
        fn = handlers.substitute(handlers.seed(model.fn, random.key(0)), data=draw)
        trace = model.trace(fn, arrays, {} if plate is None else {plate: rows})
        return {name: trace[name]["fn"].log_prob(trace[name]["value"]) for name in names}

    return log_prob


def _local_axes(model: _Model, plate: str) -> dict[str, int]:
    """Latent sites that live in the plate, with the axis of its rows (after that of draws)."""
    return {
        name: 1 + len(site.batch_shape) + dim
        for name, site in model.sites.items()
        for p, dim in site.plates
        if site.kind == "latent" and p == plate
    }


def _row_plate(model: _Model, draws: Arrays, name: str) -> str | None:
    """The largest plate of an observed site, or None where its rows cannot be taken apart.

    The model is tried on a few rows, twice, in other company and order. One that does not index
    its data by the plate fails or keeps another shape; one that mixes its rows (a cumulative sum,
    a normalisation over the batch) gives other values.
    """
    site = model.sites[name]
    if not site.plates:
        return None
    plate, dim = max(site.plates, key=lambda pair: model.sizes[pair[0]])
    size = model.sizes[plate]
    if size <= 2 * PROBE_ROWS:
        return None
    few = np.arange(PROBE_ROWS) * (size // PROBE_ROWS)
    others = np.where(np.arange(PROBE_ROWS) % 2 == 0, few, few + 1)[::-1]
    expected = list(site.batch_shape)
    expected[dim] = PROBE_ROWS
    local_axes = _local_axes(model, plate)
    log_prob = jax.jit(_log_prob_fn(model, [name], plate))
    found = []
    for rows in (few, others):
        draw = {
            n: np.take(x[0], rows, local_axes[n] - 1) if n in local_axes else x[0]
            for n, x in draws.items()
        }
        try:
            values = log_prob(model.arrays, np.int32(0), draw, rows.astype(np.int32))[name]
        except Exception:  # whatever a user's model raises when shapes do not fit
            return None
        if values.shape != tuple(expected):
            return None
        found.append(np.asarray(values))
    even = np.arange(0, PROBE_ROWS, 2)
    alone, again = np.take(found[0], even, dim), np.take(found[1], PROBE_ROWS - 1 - even, dim)
    # rounding is far smaller, and rows that depend on each other far more different
    return plate if np.allclose(alone, again, rtol=1e-3, atol=1e-3, equal_nan=True) else None


def _predictive(
    model: _Model,
    draws: Arrays,
    num_draws: int,
    names: list[str],
    rng_key: Any,
    chunk_size: int | None,
) -> Arrays:
    """Values of sites with observed ones drawn anew, all rows, for each draw (or from the prior).

    A draw has its own key, so the result does not depend on the chunks.
    """

    def sample(arrays: list, number: jax.Array, draw: dict, _: Any) -> dict[str, jax.Array]:
        fn = handlers.seed(model.fn, random.fold_in(rng_key, number))
        trace = model.trace(handlers.uncondition(handlers.substitute(fn, data=draw)), arrays)
        return {name: trace[name]["value"] for name in names}

    try:
        return _evaluate(
            sample, model.arrays, draws, num_draws, 1, {}, dict.fromkeys(names), chunk_size
        )
    except NotImplementedError as error:
        raise ValueError(
            "the model has a site whose distribution cannot be drawn from, such as an "
            "ImproperUniform: give the draws as a dict, or replace the distribution"
        ) from error


def _observed(model: _Model) -> Arrays:
    """Values of the observed sites on all rows; nothing else of the model is computed."""
    names = model.of_kind("observed")
    if not names:
        return {}
    values = jax.jit(_values_fn(model, names))(model.arrays)
    return {name: _host(x) for name, x in values.items()}


def _values_fn(model: _Model, names: list[str]) -> Callable[[list], dict[str, jax.Array]]:
    def values(arrays: list) -> dict[str, jax.Array]:
        fn = handlers.seed(model.fn, random.key(0))
        trace = model.trace(handlers.substitute(fn, substitute_fn=init_to_uniform()), arrays)
        return {name: trace[name]["value"] for name in names}

    return values


# Arrays by name


def _host(x: Any) -> np.ndarray:
    array = np.asarray(jax.device_get(x))
    # bfloat16 and its like are unknown to xarray and netCDF
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _is_numeric(x: Any) -> bool:
    return isinstance(x, (np.ndarray, jax.Array)) and (
        jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
    )


def _same(x: Any, y: np.ndarray) -> bool:
    return x.shape == y.shape and np.array_equal(_host(x), y, equal_nan=y.dtype.kind == "f")


def _paths(
    tree: PyTree, root: str, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """Leaves of a pytree, named by path; ``root`` comes before paths that start with a number."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        keys = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path]
        if not keys or not isinstance(keys[0], str):
            keys.insert(0, root)
        yield ".".join(map(str, keys)), leaf


def _name_leaves(tree: PyTree, root: str) -> Arrays:
    return {name: _host(leaf) for name, leaf in _paths(tree, root)}


def _by_chain(draws: Mapping[str, Any], shape: tuple[int, ...]) -> Arrays:
    """Posterior predictive draws split into chains, where they are not yet."""
    found = {}
    for name, value in draws.items():
        x = _host(value)
        if x.shape[:2] != shape and x.shape[:1] != (shape[0] * shape[1],):
            raise ValueError(
                f"posterior_predictive[{name!r}] has shape {x.shape}, expected it to start with "
                f"{shape} (chains, draws) or ({shape[0] * shape[1]},)"
            )
        found[name] = x if x.shape[:2] == shape else x.reshape((*shape, *x.shape[1:]))
    return found


def _split_prior(model: _Model | None, prior: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Prior draws of latent and of observed sites, both shaped (chains, draws, ...)."""
    latent: Arrays = {}
    observed: Arrays = {}
    sites = {} if model is None else model.sites
    for name, value in prior.items():
        x = _host(value)
        if x.ndim == 0:
            raise ValueError(f"prior[{name!r}] is a scalar, expected draws along the first axis")
        if name not in sites or x.ndim < len(sites[name].shape) + 2:
            x = x[np.newaxis]
        is_observed = name in sites and sites[name].kind == "observed"
        (observed if is_observed else latent)[name] = x
    return latent, observed


def _sample_stats(mcmc: MCMC) -> Arrays:
    kernel = mcmc.sampler
    stats: Arrays = {}
    for field, value in mcmc.get_extra_fields(group_by_chain=True).items():
        if not _is_numeric(value):
            continue
        if field == "accept_prob" and isinstance(kernel, SGKernel) and not kernel._adjusted:
            continue
        x = _host(value)
        if field == "potential_energy":
            if isinstance(kernel, SGKernel):
                stats["energy"] = x
            stats["lp"] = -x
        else:
            stats[RENAMED.get(field, field)] = x
    if isinstance(kernel, NUTS) and "n_steps" in stats:
        stats["tree_depth"] = np.log2(stats["n_steps"]).astype(int) + 1
    return stats


def _constants(mcmc: MCMC, model: _Model | None, request: Any, observed: Arrays) -> Arrays:
    """Array arguments of the model by name, without those that are observed values."""
    if isinstance(request, Mapping):
        return {name: _host(x) for name, x in request.items()}
    if request is not None and not isinstance(request, bool):
        raise TypeError(
            f"constant_data must be True, False, None or a dict, got {type(request).__name__}"
        )
    if request is False or model is None:
        return {}
    arguments = _arguments(mcmc.sampler.model, *model.arguments)
    return {
        name: _host(leaf)
        for name, leaf in _paths(arguments, "", lambda x: not isinstance(x, (dict, list, tuple)))
        if _is_numeric(leaf)
        and (request is True or leaf.size <= MAX_CONSTANT_SIZE)
        and not any(_same(leaf, values) for values in observed.values())
    }


def _arguments(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names in the model's signature."""
    while isinstance(fn, Messenger) and fn.fn is not None:
        fn = fn.fn
    try:
        signature = inspect.signature(fn)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature to read
        return dict(kwargs)
    found: dict[str, Any] = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


# Labels and attributes


class _Labels:
    """Names of dimensions and their coordinates, from plates and from the user."""

    def __init__(
        self,
        model: _Model | None,
        coords: Mapping[str, Sequence] | None,
        dims: Mapping[str, Sequence[str | None]] | None,
        variables: Collection[str],
    ) -> None:
        self.sites = {} if model is None else model.sites
        self.sizes = {} if model is None else model.sizes
        self.coords = {} if coords is None else coords
        self.dims = {} if dims is None else dims
        self.variables = {_clean(name) for name in variables}

    def plate(self, name: str) -> str:
        taken = self.variables | set(SAMPLE_DIMS)
        return f"{_clean(name)}_dim" if _clean(name) in taken else _clean(name)

    def axes(self, name: str, shape: tuple[int, ...], group: str) -> list[str]:
        """A name for every axis after those of chains and draws."""
        names: list[str | None] = [None] * len(shape)
        site = self.sites.get(name)
        has_events = group != "log_likelihood"
        if site is not None:
            rows = len(shape) - (site.event_dim if has_events else 0)
            for order, (plate, dim) in enumerate(site.plates):
                # which axes of a deterministic site are events is not known: plates come first
                axis = order if site.kind == "deterministic" else rows + dim
                if 0 <= axis < len(shape) and shape[axis] == self.sizes[plate]:
                    names[axis] = self.plate(plate)
            if has_events and len(site.event_names) <= len(shape):
                names[len(shape) - len(site.event_names) :] = site.event_names
        given = list(self.dims.get(name, self.dims.get(_clean(name), ())))
        if len(given) > len(shape) and has_events:
            raise ValueError(
                f"dims[{name!r}] names {len(given)} dimensions, and {name!r} in {group} has "
                f"{len(shape)} (after chain and draw): {shape}"
            )
        for axis, chosen in enumerate(given[: len(shape)]):
            names[axis] = names[axis] if chosen is None else chosen
        unnamed = iter(range(len(shape)))
        return [f"{_clean(name)}_dim_{next(unnamed)}" if n is None else n for n in names]

    def dataset(self, group: str, arrays: Arrays, attrs: dict[str, Any]) -> xr.Dataset:
        """One group as a dataset with coordinates for all dimensions."""
        leading = [] if group.endswith("data") else SAMPLE_DIMS
        variables: dict[str, tuple[list[str], np.ndarray]] = {}
        sizes: dict[str, int] = {}
        for name, x in arrays.items():
            dims = leading + self.axes(name, x.shape[len(leading) :], group)
            for dim, size in zip(dims, x.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(
                        f"dimension {dim!r} has {size} entries in {name!r} and {sizes[dim]} "
                        f"elsewhere in {group}: give it another name in `dims`"
                    )
                if dim in self.variables:
                    raise ValueError(
                        f"dims[{name!r}] names a dimension {dim!r}, which is a variable: expected "
                        "another name"
                    )
            if _clean(name) in variables:
                raise ValueError(
                    f"two variables of {group} are called {_clean(name)!r}, in which '/' and '.' "
                    "are one: rename a site"
                )
            variables[_clean(name)] = (dims, x)
        coords = {}
        for dim, size in sizes.items():
            labels = np.asarray(self.coords.get(dim, np.arange(size)))
            if labels.shape != (size,):
                raise ValueError(
                    f"coords[{dim!r}] must have {size} labels, one for each entry of dimension "
                    f"{dim!r} in {group}, got shape {labels.shape}"
                )
            coords[dim] = labels
        if leading:
            attrs = {**attrs, "sample_dims": leading}
        return xr.Dataset(variables, coords, attrs)


def _clean(name: str) -> str:
    return name.replace("/", ".")


def _library(kernel: Any) -> dict[str, str]:
    if not isinstance(kernel, SGKernel):
        return {"inference_library": "numpyro", "inference_library_version": numpyro.__version__}
    from .. import __version__  # not yet defined while the package is being imported

    return {"inference_library": "numpyro_geom", "inference_library_version": __version__}


def _attributes(mcmc: MCMC) -> dict[str, Any]:
    """What is needed to repeat a run, in types that netCDF can store."""
    from .. import __version__

    kernel, state = mcmc.sampler, mcmc.last_state
    attrs: dict[str, Any] = {
        "kernel": type(kernel).__name__,
        "num_chains": mcmc.num_chains,
        "num_warmup": mcmc.num_warmup,
        "num_samples": mcmc.num_samples,
        "thinning": mcmc.thinning,
        "numpyro_geom_version": __version__,
        "numpyro_version": numpyro.__version__,
        "jax_version": jax.__version__,
        "arviz_version": metadata.version("arviz"),
    }
    if not isinstance(kernel, SGKernel):
        return attrs
    for name, value in kernel.settings.items():
        attrs[name] = int(value) if isinstance(value, bool) else value
    if kernel.plan is not None:
        attrs["num_data"] = kernel.plan.num_data
        attrs["plate_sizes"] = json.dumps(dict(kernel.plan.sizes))
        attrs["batch_sizes"] = json.dumps(dict(kernel.plan.batch_sizes))
    attrs["seed"] = json.dumps(np.asarray(state.seed).tolist())
    figures = {
        "final_step_size": state.step_size,
        "final_num_steps": state.num_steps,
        "steps_taken": state.steps_taken,
    }
    if is_measured(mcmc):
        figures["lam_H"] = state.adaptation.curvature
        figures["lam_C"] = state.adaptation.noise
        figures["lam_min"] = state.adaptation.slowest
    # a number, or one a chain
    attrs.update({name: np.asarray(x).tolist() for name, x in figures.items()})
    return attrs


def _describe(stats: xr.Dataset, kernel: Any) -> None:
    """Say in ``sample_stats`` what the figures are, energies above all."""
    if not isinstance(kernel, SGKernel):
        return
    if kernel.plan is None:
        estimated = takes_rng_key(kernel._potential_fn)  # type: ignore[arg-type]
    else:
        estimated = bool(kernel.plan.batch_sizes)
    source = "minibatch estimate" if estimated else "on all data"
    texts = {
        "energy": f"U in nats where the last step of the draw started, {source}",
        "lp": f"minus U in nats where the last step of the draw started, {source}",
        "diverging": "a step of the draw was not finite or unstable, and was undone",
        "grad_norm": f"Euclidean norm of grad U where the last step of the draw started, {source}",
        "configurational_temperature": "z . grad U / D there; its mean estimates the temperature",
        "kinetic_temperature": "r'M^-1 r / D of the momentum, a mean over the draw's steps",
        "step_size": "h of the last step of the draw",
        "n_steps": "stochastic-gradient steps of the draw",
        "acceptance_rate": "mean acceptance probability of the draw's steps",
    }
    if isinstance(kernel, GGMC):
        texts["energy"] = "U in nats of the draw, on all data"
        texts["lp"] = "minus U in nats of the draw, on all data"
        texts["diverging"] = "the trajectory's energy error was not finite or above 1000 tau"
        texts["acceptance_rate"] = "acceptance probability of the draw's trajectory"
        for where in ("grad_norm", "configurational_temperature"):
            texts[where] += "; at the trajectory's start"
    for name in stats.data_vars:
        if name in texts:
            stats[name].attrs["description"] = texts[name]
