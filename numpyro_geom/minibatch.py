"""Which rows come next: plates, index draws, plate substitution and the N/B scaling.

A NumPyro model says which rows are exchangeable by putting them in a ``plate``. This module reads
the plates off a model once (`make_plan`), draws row indices for the plates that are to be
subsampled (`draw`), and runs the model with those indices in the plate's place
(`SubsamplePlates`). NumPyro's plate then scales every site in it by ``size / batch_size``,
which makes the minibatch energy an unbiased estimate of the full one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import random
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.inspect import get_dependencies
from numpyro.primitives import Messenger

from .rows.permutation import epoch_indices

Batch = Any
"""What a step's energy is estimated from: plate -> row indices, a PRNG key, or an empty dict."""

BATCHING = ("replacement", "epoch")


@dataclass(frozen=True)
class Site:
    """What the plan keeps of one ``sample`` site: names and shapes, no arrays."""

    name: str
    observed: bool
    plates: tuple[tuple[str, int], ...]
    batch_shape: tuple[int, ...]
    event_dim: int
    discrete: bool
    factor: bool = False


@dataclass(frozen=True)
class Plan:
    """The static facts of a model that minibatches need.

    Attributes:
        sizes: size of every plate.
        batch_sizes: rows drawn a step, for the subsampled plates only.
        batching: ``"replacement"`` or ``"epoch"``.
        local_axes: for each latent site that lives in subsampled plates, the axes of its
            unconstrained value that those plates index, as ``(plate, axis)`` pairs.
        num_data: number of observations N (1 for a model without a data plate).
        sites: the sample sites, in the order in which the model runs them.
        has_params: whether the model has ``param`` or ``mutable`` sites.
    """

    sizes: Mapping[str, int]
    batch_sizes: Mapping[str, int]
    batching: str
    local_axes: Mapping[str, tuple[tuple[str, int], ...]]
    num_data: int
    sites: tuple[Site, ...] = field(repr=False)
    has_params: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which as many rows were drawn as there are (1 without subsampling)."""
        return max(
            (math.ceil(self.sizes[p] / b) for p, b in self.batch_sizes.items()),
            default=1,
        )


class SubsamplePlates(Messenger):
    """Run a model with given row indices in its plates.

    NumPyro's own subsampling draws the indices inside the model by a sequential loop over the
    batch; handing them in from outside costs a tenth of a step or less. A plate that is not in
    ``indices`` runs at its full size, also where the model asks for ``subsample_size``.

    Args:
        fn: the model.
        indices: plate name -> integer array of row indices.
        sizes: plate name -> size that the indices were drawn for; another size is an error.
    """

    def __init__(
        self,
        fn: Callable | None = None,
        indices: Mapping[str, Any] | None = None,
        sizes: Mapping[str, int] | None = None,
    ):
        super().__init__(fn)
        self.sizes = {} if sizes is None else sizes
        self.indices = {} if indices is None else indices
        self.declared: dict[str, tuple[int, int | None]] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        """Substitute plate indices; give models that ask for a key a fixed one."""
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            self.declared[msg["name"]] = (size, subsample_size)
            expected = self.sizes.get(msg["name"], size)
            if expected != size:
                raise ValueError(
                    f"plate {msg['name']!r} has {size} rows now, and the chain was started with "
                    f"{expected}: start a new run for other data"
                )
            rows = self.indices.get(msg["name"])
            rows = jnp.arange(size) if rows is None else rows
            msg["value"] = rows
            msg["args"] = (size, rows.shape[0])
        elif msg["type"] == "prng_key" and msg["value"] is None:
            msg["value"] = random.key(0)


def _abstract_trace(
    model: Callable, args: tuple, kwargs: dict, batch_sizes: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, tuple[int, int | None]]]:
    """Trace the model without computing anything; returns the sites and the declared plates."""
    record = handlers.trace()
    plates = SubsamplePlates()

    def run() -> None:
        plates.indices = {p: jnp.zeros(b, jnp.int32) for p, b in batch_sizes.items()}
        seeded = handlers.substitute(
            handlers.seed(model, random.key(0)), substitute_fn=init_to_uniform()
        )
        with record, plates:
            seeded(*args, **kwargs)

    try:
        jax.eval_shape(run)
    except Exception as error:
        error.trace = record.trace  # type: ignore[attr-defined]
        raise
    return dict(record.trace), plates.declared


def _site(site: dict[str, Any]) -> Site:
    fn = site["fn"]
    return Site(
        name=site["name"],
        observed=bool(site["is_observed"]),
        plates=tuple((frame.name, frame.dim) for frame in site["cond_indep_stack"]),
        batch_shape=tuple(fn.batch_shape),
        event_dim=fn.event_dim,
        discrete=bool(fn.support.is_discrete) if not site["is_observed"] else False,
        factor=isinstance(fn, dist.Unit),
    )


def make_plan(
    model: Callable,
    args: tuple,
    kwargs: dict,
    batch_size: int | Mapping[str, int] | None = None,
    batching: str = "replacement",
) -> Plan:
    """Read plates and sites off a model and check that it can be subsampled.

    Args:
        model: a NumPyro model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        batch_size: rows a step: an int for the only plate that holds observed rows, a dict
            plate -> int, or None for what the model itself subsamples (all rows where it does
            not). A batch as large as its plate means no subsampling of that plate.
        batching: ``"replacement"`` or ``"epoch"``.

    Returns:
        The `Plan`.

    Raises:
        ValueError: for a model without rows or latent sites, with discrete latent sites, for
            unknown plates, batches larger than their plate, or an observed site that its
            subsampled plate does not index.
    """
    try:
        trace, declared = _abstract_trace(model, args, kwargs, {})
    except AssertionError as error:
        if "size of plate" in str(error):
            raise ValueError(
                "the data are empty: a plate of the model has size 0; expected at least one row"
            ) from error
        raise
    sites = tuple(_site(s) for s in trace.values() if s["type"] == "sample")
    # plates inside control flow are known by their sites alone
    frames = [f for s in trace.values() for f in s.get("cond_indep_stack", ())]
    sizes = {frame.name: frame.size for frame in frames}
    sizes.update({name: size for name, (size, _) in declared.items()})
    _check_latents(sites)
    batch_sizes = _resolve_batch_sizes(sites, declared, batch_size)
    plan = Plan(
        sizes=sizes,
        batch_sizes=batch_sizes,
        batching=batching,
        local_axes={
            s.name: axes
            for s in sites
            if not s.observed
            and (
                axes := tuple(
                    (p, len(s.batch_shape) + dim) for p, dim in s.plates if p in batch_sizes
                )
            )
        },
        num_data=_count_rows(sites, sizes),
        sites=sites,
        has_params=any(s["type"] in ("param", "mutable") for s in trace.values()),
    )
    for plate in batch_sizes:
        if not any(s.observed and plate in dict(s.plates) for s in sites):
            raise ValueError(
                f"plate {plate!r} cannot be subsampled: it holds no observed site. Leave it out of "
                "batch_size, and subsample a plate with observed rows"
            )
        _check_indexed(model, args, kwargs, plan, plate)
    if plan.local_axes:
        _check_local(model, args, kwargs, plan)
    return plan


def _check_declared(
    sites: tuple[Site, ...], declared: Mapping[str, Any], plates: Iterable[str]
) -> None:
    hidden = {p for s in sites for p, _ in s.plates} - set(declared)
    for plate in plates:
        if plate in hidden:
            raise ValueError(
                f"plate {plate!r} is inside control flow such as scan and cannot be subsampled: "
                "drop it from batch_size"
            )


def _check_latents(sites: tuple[Site, ...]) -> None:
    latent = [s for s in sites if not s.observed]
    if not latent:
        raise ValueError(
            "the model has no latent site: expected at least one `numpyro.sample` without `obs`"
        )
    discrete = [s.name for s in latent if s.discrete]
    if discrete:
        raise ValueError(
            f"discrete latent sites {discrete}: gradients need continuous ones. Pass the data if "
            "a site should be observed, sum the site out of the model, or sample it with "
            "numpyro.infer.DiscreteGibbs in a numpyro.infer.Gibbs kernel"
        )


def _data_plates(sites: tuple[Site, ...]) -> list[str]:
    """Plates that hold observed rows, in model order."""
    return list(dict.fromkeys(p for s in sites if s.observed for p, _ in s.plates))


def _count_rows(sites: tuple[Site, ...], sizes: Mapping[str, int]) -> int:
    """N: the product of nested data plates, the sum over independent ones."""
    groups = {frozenset(p for p, _ in s.plates) for s in sites if s.observed and s.plates}
    maximal = [g for g in groups if not any(g < other for other in groups)]
    return sum(math.prod(sizes[p] for p in g) for g in maximal) if maximal else 1


def _resolve_batch_sizes(
    sites: tuple[Site, ...],
    declared: Mapping[str, tuple[int, int | None]],
    batch_size: int | Mapping[str, int] | None,
) -> dict[str, int]:
    chosen = {p: b for p, (size, b) in declared.items() if b is not None and b < size}
    if isinstance(batch_size, Mapping):
        _check_declared(sites, declared, batch_size)
        unknown = sorted(set(batch_size) - set(declared))
        if unknown:
            raise ValueError(
                f"batch_size names unknown plates {unknown}: the model's plates are "
                f"{sorted(declared)}"
            )
        chosen.update(batch_size)
    elif batch_size is not None:
        plates = _data_plates(sites)
        if len(plates) != 1:
            found = f"{len(plates)} ({plates})" if plates else "none"
            raise ValueError(
                f"batch_size={batch_size} needs exactly one plate that holds observed rows, and "
                f"the model has {found}: "
                + (
                    "pass a dict, such as batch_size={" + f"{plates[0]!r}: {batch_size}" + "}"
                    if plates
                    else "put the observed site under `numpyro.plate` and index its data with the "
                    "plate's indices, or drop batch_size"
                )
            )
        _check_declared(sites, declared, plates)
        chosen[plates[0]] = batch_size
    for plate, rows in chosen.items():
        if rows > declared[plate][0]:
            raise ValueError(
                f"batch_size={rows} is larger than plate {plate!r}, which has "
                f"{declared[plate][0]} rows: expected a batch_size between 1 and that"
            )
    return {p: b for p, b in chosen.items() if b < declared[p][0]}


def _check_local(model: Callable, args: tuple, kwargs: dict, plan: Plan) -> None:
    """Latent rows of a subsampled plate may be used inside that plate only."""
    depends = get_dependencies(model, args, kwargs)["prior_dependencies"]
    plates = {s.name: dict(s.plates) for s in plan.sites}
    for name, upstream in depends.items():
        for latent in upstream:
            for plate, _ in plan.local_axes.get(latent, ()):
                if plate not in plates.get(name, {plate: 0}):
                    raise ValueError(
                        f"latent site {latent!r} has rows in the subsampled plate {plate!r}, and "
                        f"site {name!r} depends on it outside of that plate: it would see only the "
                        f"drawn rows. Move {name!r} into the plate, or do not subsample it"
                    )


def _check_indexed(model: Callable, args: tuple, kwargs: dict, plan: Plan, plate: str) -> None:
    """Run the model abstractly on two rows and find observed sites that kept them all.

    At one row a site that ignores the indices would broadcast silently, so the check uses two
    whatever the batch size is. A plate of two rows cannot be told from its subsample.
    """
    size, probe = plan.sizes[plate], 2
    if size <= probe:
        return

    def complain(name: str, cause: Exception | None = None) -> None:
        raise ValueError(
            f"site {name!r} is not indexed by plate {plate!r}: with {probe} of its {size} rows "
            f"drawn, the site still has other shapes. Index every array that has one entry a row: "
            f"`with numpyro.plate({plate!r}, {size}) as i:` and then `X[i]`, `obs=y[i]` (guard "
            "`y is None`), or use `numpyro.subsample`; or run without batch_size"
        ) from cause

    try:
        trace, _ = _abstract_trace(model, args, kwargs, {plate: probe})
    except (TypeError, ValueError) as error:
        seen = getattr(error, "trace", {})
        # sites run in a fixed order: the first one that is missing is where it broke
        broken = next(
            (s.name for s in plan.sites if s.name not in seen and plate in dict(s.plates)), None
        )
        if broken is None:
            raise
        complain(broken, error)
    for site in trace.values():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        frames = {frame.name: frame.dim for frame in site["cond_indep_stack"]}
        if plate not in frames:
            continue
        fn = site["fn"]
        scale = jnp.shape(1.0 if site["scale"] is None else site["scale"])
        if len(scale) >= -frames[plate] and scale[frames[plate]] not in (1, probe):
            complain(site["name"])
        shape = jnp.shape(site["value"])
        rows = shape[: len(shape) - fn.event_dim] if fn.event_dim else shape
        if tuple(rows) != tuple(fn.batch_shape) and not site["infer"].get("is_auxiliary", False):
            dim = frames[plate]
            if len(rows) >= -dim and rows[dim] not in (1, probe):
                complain(site["name"])


def gather_local(plan: Plan, position: dict, batch: Mapping[str, Any]) -> dict:
    """Pick the rows of latent sites that live in subsampled plates."""
    if not plan.local_axes:
        return position
    gathered = dict(position)
    for name, axes in plan.local_axes.items():
        for plate, axis in axes:
            if plate in batch and name in gathered:
                gathered[name] = jnp.take(gathered[name], batch[plate], axis=axis)
    return gathered


def init_stream(plan: Plan, rng_key: jax.Array) -> Any:
    """State of the row stream: empty with replacement; key, epoch and offset per plate else."""
    if plan.batching == "replacement":
        return ()
    zero = jnp.zeros((), jnp.int32)
    return {
        plate: (key, zero, zero)
        for plate, key in zip(
            plan.batch_sizes, random.split(rng_key, max(1, len(plan.batch_sizes))), strict=False
        )
    }


def draw(plan: Plan, rng_key: jax.Array, stream: Any) -> tuple[dict[str, jax.Array], Any]:
    """Row indices of the next minibatch: plate -> int32 array, and the advanced stream.

    ``"replacement"`` draws independent uniform indices. ``"epoch"`` walks through a fresh keyed
    permutation every epoch in O(batch) work and memory; all rows come once an epoch.
    """
    if not plan.batch_sizes:
        return {}, stream
    batch, advanced = {}, {}
    keys = [rng_key] if len(plan.batch_sizes) == 1 else random.split(rng_key, len(plan.batch_sizes))
    for (plate, rows), key in zip(plan.batch_sizes.items(), keys, strict=False):
        size = plan.sizes[plate]
        if plan.batching == "replacement":
            batch[plate] = random.randint(key, (rows,), 0, size)
        else:
            plate_key, epoch, offset = stream[plate]
            batch[plate], epoch, offset = epoch_indices(plate_key, epoch, offset, rows, size)
            advanced[plate] = (plate_key, epoch, offset)
    return batch, (advanced if plan.batching == "epoch" else stream)
