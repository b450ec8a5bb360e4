"""Read plates and sites of a NumPyro model, and check that it can be subsampled."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.infer.inspect import get_dependencies
from numpyro.infer.util import log_density
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from .._checks import warn_outside
from .abstract import abstract_trace, with_start
from .arguments import by_name, explained
from .jaxprs import followed, needed
from .minibatch import RNG_KEY, Site, SubsamplePlates, Subsampling
from .trial import check_separate

Declared = Mapping[str, tuple[int, int | None]]
"""Plate -> its size, and the ``subsample_size`` that the model asks for."""
KEEPS = ("lt", "add", "select_n", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze")
"""Operations that JAX applies to row numbers before it gathers rows."""


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

    The arguments are those of `numpyro_geom.model.read`. A batch as large as its plate means no
    subsampling of that plate.

    Raises:
        ValueError: for a model without rows, with discrete latent sites that cannot be summed out,
            for unknown plates, batches larger than their plate, an observed site that its
            subsampled plate does not index, rows that lean on each other (see
            `numpyro_geom.model.trial`), or minibatches of a model that changes its state.
        ImportError: for discrete latent sites without the package funsor.
    """
    try:
        with explained(model, args, kwargs):
            trace, plates = abstract_trace(model, args, kwargs, {})
    except AssertionError as error:
        if "size of plate" in str(error):
            raise ValueError(
                "the data are empty: a plate of the model has size 0; expected at least one row"
            ) from error
        raise
    every = on_all_rows(trace, plates)
    for plate, size in every.sizes.items():
        if size > np.iinfo(np.int32).max:
            raise ValueError(
                f"expected at most 2^31 - 1 rows, which JAX numbers in 32 bits, got {size} in the "
                f"plate {plate!r}: use a part of the rows, or put several into one row"
            )
    _check_values(trace)
    _check_lengths(model, args, kwargs, plates.declared)
    batch_sizes = _resolve_batch_sizes(every.sites, plates.declared, batch_size)
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
        _check_indexed(model, args, kwargs, subsampling, plate)
    if subsampling.local_axes:
        _check_local(model, args, kwargs, subsampling)
    for plate in batch_sizes:
        check_separate(model, args, kwargs, subsampling, plate)
    _warn_of_missing_data(model, args, kwargs, every)
    return subsampling


def on_all_rows(trace: Mapping[str, Any], plates: SubsamplePlates) -> Subsampling:
    """The plates and sites of an `abstract_trace`, without minibatches."""
    # plates inside control flow are only known from their sites
    frames = [f for s in trace.values() for f in s.get("cond_indep_stack", ())]
    sizes = {frame.name: frame.size for frame in frames}
    sizes.update({name: size for name, (size, _) in plates.declared.items()})
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
            "pass the data, put the observed site under `numpyro.plate` and index its data with "
            "the plate's indices, or drop batch_size"
        )
    raise ValueError(
        f"batch_size={batch_size} needs exactly one plate that holds observed rows, and the model "
        f"has {found}: {advice}"
    )


def _check_values(trace: Mapping[str, Any]) -> None:
    """Raise for observed values that do not fit their distribution or its plates.

    NumPyro would broadcast values or laws that have an axis more or fewer than their plates, and
    every pair of rows would count. A single number may stand for all rows.
    """
    for site in trace.values():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        given, shape = jnp.shape(site["value"]), site["fn"].shape()
        try:
            np.broadcast_shapes(given, shape)
        except ValueError as error:
            raise ValueError(
                f"the observed values of site {site['name']!r} have shape {given}, and its "
                f"distribution has shape {shape}: expected one value for each row. Index values by "
                "the plate, pass some that fit, such as `y[:, 0]`, or change the distribution"
            ) from error
        rows, expected = _rows_of_values(site), tuple(site["fn"].batch_shape)
        if not rows or not site["cond_indep_stack"]:
            continue
        wider = np.broadcast_shapes(rows, expected) != expected
        plates = {frame.name: frame.size for frame in site["cond_indep_stack"]}
        lacking = any(
            frame.size > 1 and (len(rows) < -frame.dim or rows[frame.dim] == 1)
            for frame in site["cond_indep_stack"]
        )
        # columns beside the axis of a plate are independent values; a `numpyro.factor` has none
        if wider and lacking and not site["infer"].get("is_auxiliary", False):
            remedy = "y[..., None]" if len(rows) < len(expected) else "y[:, 0]"
            raise ValueError(
                f"the observed values of site {site['name']!r} have rows of shape {rows}, and its "
                f"plates {plates} ask for {expected}: every pair of rows would count. Expected one "
                f"value for each row: pass `{remedy}` in place of y, or make an axis a part of the "
                "value by `.to_event(1)` on the distribution"
            )
        dims = {frame.dim for frame in site["cond_indep_stack"]}
        sizes = {size: plate for plate, size in plates.items() if size > 1}
        for axis in set(range(-len(expected), 0)) - dims:
            if rows != expected and expected[axis] in sizes:
                raise _two_axes(sizes[expected[axis]], site["name"], axis)


def _two_axes(plate: str, site: str, axis: int) -> ValueError:
    return ValueError(
        f"the rows of plate {plate!r} are on two axes of site {site!r}, on the plate's own and on "
        f"axis {axis}: every pair of rows would count. Expected values and a distribution of the "
        "shape that the plate's dim asks for, such as `obs=y[i][:, None]` for dim=-2, or "
        "`dist.Normal(loc[:, 0], scale)` for dim=-1"
    )


def _warn_of_missing_data(model: Callable, args: tuple, kwargs: dict, plan: Subsampling) -> None:
    """Warn if no site is observed, and an argument is left at None: draws of the prior."""
    try:
        signature = inspect.signature(model)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):  # a callable without a signature
        return
    bound.apply_defaults()
    missing = [name for name, value in bound.arguments.items() if value is None]
    if missing and not any(s.kind in ("observed", "factor") for s in plan.sites):
        warn_outside(
            f"no site of the model is observed, and its argument {missing[-1]!r} is None: the "
            "draws are those of the prior. Pass the data, if it should be the posterior",
            UserWarning,
        )


def _check_lengths(model: Callable, args: tuple, kwargs: dict, declared: Declared) -> None:
    """Raise if rows of a plate index an array that has fewer rows, and warn of one that has more.

    A longer array is read as the model says where the rows are shifted, as in ``y[i + 1]``.
    """
    sizes = {plate: size for plate, (size, _) in declared.items()}
    rows = {plate: jax.ShapeDtypeStruct((size,), jnp.int32) for plate, size in sizes.items()}
    names = jax.tree.leaves({plate: plate for plate in rows})
    found: list[tuple[str, tuple, int]] = []
    added: set[tuple[str, int]] = set()

    def run(rows: dict) -> None:
        SubsamplePlates(with_start(model), rows)(*args, **kwargs)

    def rows_of(equation: JaxprEqn, plates: list[str | None]) -> list[str | None]:
        """For each output the plate whose row numbers it holds, or None."""
        if equation.primitive.name == "gather" and plates[1] is not None:
            axes = equation.params["dimension_numbers"].start_index_map
            aval: Any = equation.invars[0].aval
            if len(axes) == 1:
                found.append((plates[1], aval.shape, aval.shape[axes[0]]))
        plate = next(x for x in plates if x is not None)
        if equation.primitive.name == "add":
            added.update(
                (plate, int(x.val))
                for x in equation.invars
                if isinstance(x, Literal) and np.ndim(x.val) == 0
            )
        return [plate if equation.primitive.name in KEEPS else None] * len(equation.outvars)

    followed(jax.make_jaxpr(run)(rows).jaxpr, names, rows_of, None)
    # JAX adds the length of an array to row numbers below 0
    shifted = {plate for plate, _ in added - {(plate, length) for plate, _, length in found}}
    named = by_name(model, args, kwargs)
    for plate, shape, length in found:
        same = [name for name, x in named.items() if getattr(x, "shape", None) == shape]
        if length < sizes[plate]:
            which = f", such as the argument {same[0]!r}" if same else ""
            raise ValueError(
                f"the rows of plate {plate!r} index an array of shape {shape}{which}, and the "
                f"plate has {sizes[plate]} rows: expected one entry per row. JAX reads the "
                "last entry in the place of one that is missing, without an error"
            )
        if length > sizes[plate] and same and plate not in shifted:
            warn_outside(
                f"the argument {same[0]!r} of shape {shape} has more rows than the plate "
                f"{plate!r}, which reads the first {sizes[plate]}. Expected one entry per row: an "
                "array may be transposed, or of other data",
                UserWarning,
            )


def _check_indexed(
    model: Callable, args: tuple, kwargs: dict, subsampling: Subsampling, plate: str
) -> None:
    """Run the model abstractly on two rows, and find observed sites that do not follow the plate.

    A site may have kept all rows, or may have the rows on a second axis, too. The check uses two
    rows for any batch size, because with one row a site that ignores the indices would broadcast
    silently. A plate of two rows cannot be told from its subsample.
    """
    size, probe = subsampling.sizes[plate], 2
    if size <= probe:
        return

    def complain(name: str) -> None:
        raise ValueError(
            f"site {name!r} is not indexed by plate {plate!r}: with {probe} of its {size} rows "
            "drawn, the site still has other shapes. Index every array that has one entry per "
            f"row: `with numpyro.plate({plate!r}, {size}) as i:` and then `X[i]`, `obs=y[i]` "
            "(guard `y is None`), or use `numpyro.subsample`; or run without batch_size"
        ) from None  # what JAX says of shapes hides this sentence

    try:
        trace, _ = abstract_trace(model, args, kwargs, {plate: probe})
    except (TypeError, ValueError) as error:
        seen = getattr(error, "trace", {})
        # sites run in a fixed order, so the first missing site is where the run failed
        broken = next(
            (s.name for s in subsampling.sites if s.name not in seen and plate in dict(s.plates)),
            None,
        )
        if broken is None:
            raise
        complain(broken)
    twice: list[tuple[str, int]] = []
    for site in trace.values():
        dims = {frame.name: frame.dim for frame in site.get("cond_indep_stack", ())}
        if site["type"] != "sample" or not site["is_observed"] or plate not in dims:
            continue
        dim, rows = dims[plate], _rows_of_values(site)
        shapes = [jnp.shape(1.0 if site["scale"] is None else site["scale"])]
        auxiliary = site["infer"].get("is_auxiliary", False)
        if rows != tuple(site["fn"].batch_shape) and not auxiliary:
            shapes.append(rows)
        if any(len(shape) >= -dim and shape[dim] not in (1, probe) for shape in shapes):
            complain(site["name"])
        terms = _shape_of_terms(site)
        others = set(range(-len(terms), 0)) - set(dims.values())
        twice += [(site["name"], axis) for axis in others if terms[axis] == probe]
    if not twice or size <= probe + 1:
        return
    # an axis of length two may have another reason, but then it stays
    again, _ = abstract_trace(model, args, kwargs, {plate: probe + 1})
    for name, axis in twice:
        if _shape_of_terms(again[name])[axis] == probe + 1:
            raise _two_axes(plate, name, axis)


def _check_local(model: Callable, args: tuple, kwargs: dict, subsampling: Subsampling) -> None:
    """Raise if latent rows of a subsampled plate are used outside this plate."""
    depends = get_dependencies(model, args, kwargs)["prior_dependencies"]
    plates = {s.name: dict(s.plates) for s in subsampling.sites}
    for name, upstream in depends.items():
        for latent in upstream:
            for plate, _ in subsampling.local_axes.get(latent, ()):
                if plate not in plates.get(name, {plate: 0}):
                    raise ValueError(
                        f"latent site {latent!r} has rows in the subsampled plate {plate!r}, and "
                        f"site {name!r} depends on it outside of that plate: it would see only the "
                        f"drawn rows. Move {name!r} into the plate, or do not subsample it"
                    )


def _rows_of_values(site: dict[str, Any]) -> tuple[int, ...]:
    """Shape of a site's values without the axes of events."""
    value = jnp.shape(site["value"])
    return tuple(value[: len(value) - site["fn"].event_dim])


def _shape_of_terms(site: dict[str, Any]) -> tuple[int, ...]:
    """Shape of a site's log density; of its distribution alone, if the values do not fit."""
    batch_shape = tuple(site["fn"].batch_shape)
    try:
        return np.broadcast_shapes(_rows_of_values(site), batch_shape)
    except ValueError:
        return batch_shape


# Discrete latent sites: they are summed out of the density as in NumPyro's NUTS


def check_discrete(trace: Mapping[str, Any], batch_sizes: Mapping[str, int], sums: bool) -> None:
    """Raise if a model has discrete latent sites that cannot be summed out.

    ``sums`` tells whether the caller can sum out discrete sites at all.

    Raises:
        ValueError: for discrete sites with infinite support; if there is no continuous site; with
            subsampled plates; for unmarked discrete sites if there is no observed site, because
            the data are then probably missing.
        ImportError: without the package funsor.
    """
    sites = [s for s in trace.values() if s["type"] == "sample"]
    latent = [s for s in sites if not s["is_observed"]]
    discrete = [s for s in latent if s["fn"].support.is_discrete]
    if not discrete:
        return
    names = [s["name"] for s in discrete]
    marked = all(s["infer"].get("enumerate") is not None for s in discrete)
    if (
        not sums
        or len(discrete) == len(latent)
        or not all(s["fn"].has_enumerate_support for s in discrete)
        or (len(sites) == len(latent) and not marked)
    ):
        raise ValueError(
            f"discrete latent sites {names}: gradients need continuous ones. Pass the data if "
            "a site should be observed, sum the site out of the model, or sample it with "
            "numpyro.infer.DiscreteGibbs in a numpyro.infer.Gibbs kernel"
        )
    if batch_sizes:
        raise ValueError(
            f"plates {sorted(batch_sizes)} cannot be subsampled, because the discrete latent sites "
            f"{names} are summed out on all rows: drop batch_size and subsample_size, or sum the "
            "sites out of the model, for instance by `dist.MixtureSameFamily`"
        )
    if importlib.util.find_spec("funsor") is None:
        raise ImportError(
            f"the discrete latent sites {names} are summed out by the package funsor: expected "
            "`pip install funsor`, or a model that sums them out itself, for instance by "
            "`dist.MixtureSameFamily`"
        )


def enumerating(model: Callable, sites: Iterable[Any]) -> Callable:
    """The model with one axis for the values of each discrete latent site, left of all plates.

    ``model`` is on all rows. Each of its sites has ``plates``: pairs of a name and a negative
    dimension.
    """
    from numpyro.contrib.funsor import config_enumerate, enum

    depth = max((-dim for s in sites for _, dim in s.plates), default=0)
    return enum(config_enumerate(model), -depth - 1)


# Effects besides the density: a model asks for random keys, or changes a state


class Effects(NamedTuple):
    """Effects of a model.

    Attributes:
        is_random: whether its energy depends on keys that it asks for (``numpyro.prng_key``).
        changed: names of ``mutable`` sites that it changes, such as batch statistics.
        idle: names of ``param`` sites whose values affect neither the energy nor a deterministic
            site: for example initial weights of a module, when sampled weights replace them.
    """

    is_random: bool = False
    changed: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()


class States(Messenger):
    """Records the ``mutable`` sites of a run: name -> the value, and its leaves before the run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[Any, list]] = {}

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Store the value of a state when the model gets it."""
        if msg["type"] == "mutable":
            self.found[msg["name"]] = msg["value"], jax.tree.leaves(msg["value"])


def effects_of(model: Callable, args: tuple, kwargs: dict, trace: Mapping[str, Any]) -> Effects:
    """Find the effects in the model's program, without computing anything.

    A key counts only if the energy depends on it: modules draw initial weights with a key.

    ``trace`` is the model's, with values or their shapes.
    """
    kept = ("param", "mutable")
    values = {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), value)
        for name, site in trace.items()
        if (value := site["value"]) is not None
        and (site["type"] in kept or (site["type"] == "sample" and not site["is_observed"]))
    }
    names: list[str] = []

    def run(key: jax.Array, values: dict[str, Any]) -> tuple:
        states = States()
        with states:
            seen = SubsamplePlates(model, {RNG_KEY: key})
            density, sites = log_density(seen, args, kwargs, values)
        names.extend(states.found)
        told = [s["value"] for s in sites.values() if s["type"] == "deterministic"]
        told = [x for x in jax.tree.leaves(told) if isinstance(x, jax.Array)]
        pairs = [(old, jax.tree.leaves(new)) for new, old in states.found.values()]
        return density, pairs, told

    program, shapes = jax.make_jaxpr(run, return_shape=True)(random.key(0), values)
    jaxpr = program.jaxpr
    structure = jax.tree.structure(shapes)
    on_key = [True] + [False] * (len(jaxpr.invars) - 1)
    on_key = followed(jaxpr, on_key, lambda e, _: [True] * len(e.outvars), False)
    density, states, told = jax.tree.unflatten(structure, jaxpr.outvars)
    sources = _sources(jaxpr)
    changed = tuple(
        name
        for name, (old, new) in zip(names, states, strict=True)
        if [sources.get(id(x), x) for x in new] != old
    )
    _, used = needed(jaxpr, (density, *told, *jax.tree.leaves(states)))
    inputs = jax.tree.unflatten(jax.tree.structure(values), jaxpr.invars[1:])
    idle = tuple(
        name
        for name, leaves in inputs.items()
        if trace[name]["type"] == "param" and used.isdisjoint(jax.tree.leaves(leaves))
    )
    return Effects(jax.tree.unflatten(structure, on_key)[0], changed, idle)


def _sources(jaxpr: Jaxpr) -> dict[int, Any]:
    """For variables that are only other names of a source, that source, by identity."""
    found: dict[int, Any] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "stop_gradient":
            (x,), (y,) = equation.invars, equation.outvars
            found[id(y)] = found.get(id(x), x)
    return found
