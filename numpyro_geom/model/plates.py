"""Read plates and sites of a NumPyro model, and check that it can be subsampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.ops.provenance import eval_provenance

from .._warning import warn_outside
from .abstract import Declared, abstract_run, with_start
from .arguments import explained
from .effects import Effects, effects_of
from .enumeration import check_discrete
from .indexed import check_indexed, check_local, check_values
from .lengths import check_lengths
from .minibatch import Site, SubsamplePlates, Subsampling
from .trial import check_separate


def read_subsampling(
    model: Callable,
    args: tuple,
    kwargs: dict,
    batch_size: int | Mapping[str, int] | None = None,
    batching: str = "replacement",
    *,
    sums: bool = True,
) -> Subsampling:
    """Read plates and sites of a model and check that it can be subsampled.

    Args:
        model: a NumPyro model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        batch_size: rows per step: an int for the only plate that holds observed rows, a dict
            plate -> int, or None for the model's own subsampling (all rows if there is none). A
            batch as large as its plate means no subsampling of that plate.
        batching: ``"replacement"``, ``"stratified"`` or ``"epoch"``.
        sums: whether discrete latent sites are summed out, on all rows; otherwise they are errors.

    Raises:
        ValueError: for a model without rows, with discrete latent sites that cannot be summed out,
            for unknown plates, batches larger than their plate, an observed site that its
            subsampled plate does not index, rows that lean on each other (see
            `numpyro_geom.model.trial`), or minibatches of a model that changes its state.
        ImportError: for discrete latent sites without the package funsor.
    """

    def run(args: tuple, kwargs: dict) -> tuple:
        return abstract_run(model, args, kwargs, {})

    try:
        with explained(model, args, kwargs, run):
            trace, plates = run(args, kwargs)
    except AssertionError as error:
        if "size of plate" in str(error):
            raise ValueError(
                "the data are empty: a plate of the model has size 0; expected at least one row"
            ) from error
        raise
    check_values(trace)
    declared = plates.declared
    all_rows = {plate: size for plate, (size, _) in declared.items()}
    started = with_start(model)

    def run_on(rows: dict) -> None:
        SubsamplePlates(started, rows)(*args, **kwargs)

    check_lengths(model, args, kwargs, all_rows, run_on)
    every = on_all_rows(trace, declared)
    batch_sizes = _resolve_batch_sizes(every.sites, declared, batch_size)
    check_discrete(trace, batch_sizes, sums)
    kept = [s["type"] for s in trace.values() if s["type"] in ("param", "mutable")]
    effects = Effects()
    if plates.keys_given or "mutable" in kept:
        effects = effects_of(model, args, kwargs, trace)
    subsampling = dataclasses.replace(
        every,
        batch_sizes=batch_sizes,
        batching=batching,
        has_params=bool(kept),
        idle_params=effects.idle,
        is_random=effects.is_random,
    )
    if batch_sizes and effects.changed:
        raise ValueError(
            f"the model changes its state {effects.changed[0]!r}, as BatchNorm does, so "
            "the energy of some rows is no part of the energy of all rows: use LayerNorm, "
            "GroupNorm or filter response normalisation, the state as it is "
            "(use_running_average=True), or batch_size=None"
        )
    for plate in batch_sizes:
        if not any(s.observed and plate in dict(s.plates) for s in every.sites):
            raise ValueError(
                f"plate {plate!r} cannot be subsampled: it holds no observed site. Leave it out of "
                "batch_size, and subsample a plate with observed rows"
            )
        check_indexed(model, args, kwargs, subsampling, plate)
    if subsampling.local_axes:
        check_local(model, args, kwargs, subsampling)
    for plate in batch_sizes:
        check_separate(model, args, kwargs, subsampling, plate)
    return subsampling


def on_all_rows(trace: Mapping[str, Any], declared: Declared) -> Subsampling:
    """The plates and sites of an abstract trace, without minibatches."""
    # plates inside control flow are only known from their sites
    frames = [f for s in trace.values() for f in s.get("cond_indep_stack", ())]
    sizes = {frame.name: frame.size for frame in frames}
    sizes.update({name: size for name, (size, _) in declared.items()})
    kinds = ("sample", "deterministic")
    return Subsampling(sizes, tuple(_site_of(s) for s in trace.values() if s["type"] in kinds))


def warn_of_deterministic(model: Any, args: tuple, kwargs: dict, plan: Subsampling) -> None:
    """Warn of deterministic sites that depend on discrete sites: a run has no draws of them."""
    discrete = [s.name for s in plan.sites if s.discrete]
    if not discrete:
        return

    def values(**given: jax.Array) -> dict[str, jax.Array]:
        run = handlers.trace(handlers.substitute(with_start(model), data=given))
        trace = run.get_trace(*args, **kwargs).items()
        return {n: s["value"] for n, s in trace if s["type"] == "deterministic" or n in discrete}

    shapes = jax.eval_shape(values)
    found = eval_provenance(values, **{name: shapes[name] for name in discrete})
    wrong = [name for name in shapes if name not in discrete and found[name]]
    if wrong:
        warn_outside(
            f"the deterministic sites {wrong} depend on the discrete sites {discrete}, which are "
            "summed out. The values here come from draws of the prior: take them from "
            "`numpyro.infer.Predictive(model, samples, infer_discrete=True)`",
            UserWarning,
        )


def _site_of(site: dict[str, Any]) -> Site:
    """The facts that are kept of a site in a trace of shapes."""
    fn: Any = site.get("fn")
    kind = site["type"]
    facts: dict[str, Any] = {}
    if kind == "sample":
        kind = "latent" if not site["is_observed"] else "factor" if is_unit(fn) else "observed"
        facts = {"batch_shape": tuple(fn.batch_shape), "event_dim": fn.event_dim}
        facts["discrete"] = kind == "latent" and bool(fn.support.is_discrete)
    frames = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
    return Site(
        name=site["name"],
        kind=kind,
        shape=jnp.shape(site["value"]),
        plates=tuple((frame.name, frame.dim) for frame in frames),
        event_names=tuple(site.get("infer", {}).get("event_dims", ())),
        **facts,
    )


def is_unit(fn: Any) -> bool:
    """Whether a distribution is the one of a ``numpyro.factor``, possibly inside wrappers."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, dist.Unit)


def _resolve_batch_sizes(
    sites: tuple[Site, ...], declared: Declared, batch_size: int | Mapping[str, int] | None
) -> dict[str, int]:
    """Rows per step of every plate that is to be subsampled."""
    chosen = {p: b for p, (size, b) in declared.items() if b is not None and b < size}
    if batch_size is not None and not isinstance(batch_size, Mapping):
        batch_size = {_data_plate(sites, batch_size): batch_size}
    given = {} if batch_size is None else batch_size
    inside = {p for s in sites for p, _ in s.plates} - set(declared)
    for plate in given:
        if plate in inside:
            raise ValueError(
                f"plate {plate!r} is inside control flow such as scan and cannot be subsampled: "
                "drop it from batch_size"
            )
    unknown = sorted(set(given) - set(declared))
    if unknown:
        raise ValueError(
            f"batch_size names unknown plates {unknown}: the model's plates are {sorted(declared)}"
        )
    chosen.update(given)
    for plate, rows in chosen.items():
        if rows > declared[plate][0]:
            raise ValueError(
                f"batch_size={rows} is larger than plate {plate!r}, which has "
                f"{declared[plate][0]} rows: expected a batch_size between 1 and that"
            )
    return {p: b for p, b in chosen.items() if b < declared[p][0]}


def _data_plate(sites: tuple[Site, ...], batch_size: int) -> str:
    """The only plate that holds observed rows."""
    plates = list(dict.fromkeys(p for s in sites if s.observed for p, _ in s.plates))
    if len(plates) == 1:
        return plates[0]
    if plates:
        found = f"{len(plates)} ({plates})"
        advice = f"pass a dict, such as batch_size={ {plates[0]: batch_size} }"
    else:
        found = "none"
        advice = (
            "put the observed site under `numpyro.plate` and index its data with the plate's "
            "indices, or drop batch_size"
        )
    raise ValueError(
        f"batch_size={batch_size} needs exactly one plate that holds observed rows, and the model "
        f"has {found}: {advice}"
    )
