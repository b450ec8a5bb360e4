"""Where the chains of a model start: ``param`` sites, a valid position, the user's position."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.initialization import init_to_sample, init_to_value
from numpyro.infer.util import constrain_fn, initialize_model, transform_fn, unconstrain_fn

from .._checks import check_wide_enough, warn_outside
from .._numpyro import states_of, validates
from .._util import PyTree, all_finite, at_once, evenly, in_trace, is_traced, words
from .abstract import with_start
from .arguments import differentiated
from .bad_rows import check_finite, listed
from .jaxprs import compiled, program
from .minibatch import RNG_KEY, SubsamplePlates, Subsampling
from .model import Model
from .plates import warn_of_deterministic

MANY_ALIKE = 16
"""Sites of a shape, on average, above which a start is no program: its operations are compiled once
for a shape, and a program takes longer for each site."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class init_to_draws:  # noqa: N801, as NumPyro's strategies are called
    """A strategy for ``init_strategy``: chains start at draws that exist already.

    This is how a run starts where an earlier one has ended, with new rows or other arguments::

        kernel = SGHMC(model, init_strategy=init_to_draws(mcmc))
        MCMC(kernel, num_warmup=0, num_samples=1000).run(rng_key, X_new, y_new)

    Each chain starts at one draw, chosen at random. The draws may be a run with the same kernel and
    settings. Then the chains take over what it has learned: the scale, the step size, the number of
    steps, rows per step and the control variate. No search is needed. With ``num_warmup=0`` nothing
    is learned anew, and the program compiles faster. Pass some tens of draws if new data move the
    posterior by a standard deviation or more, because the step size may then be too large.

    With another kernel, and with the draws of a guide or of SVI, the chains only start at the
    draws, and warm-up does the rest. So it does if sites have grown, for instance by new groups.
    The new values are drawn from the site's distribution, given the draws of the sites before it.

    Args:
        draws: a `numpyro.infer.MCMC` that has run; the result of `RiemannianLaplace.draw`; or a
            dict from latent sites to draws in their supports, shape (draws, ...), as from
            ``guide.sample_posterior`` of SVI.

    Raises:
        TypeError: for other arguments.
        ValueError: in ``mcmc.run``, if a latent site of the model has no draws, has fewer entries
            than its draws, or if the earlier run had sites that the model does not have.
    """

    draws: Any

    def __post_init__(self) -> None:
        if not self.values:
            raise TypeError(
                "init_to_draws needs a finished numpyro.infer.MCMC, the result of guide.draw, or a "
                f"dict of draws by site, got {type(self.draws).__name__}"
            )

    @cached_property
    def values(self) -> dict[str, Any]:
        """Draws by site, chains concatenated."""
        given = self.draws
        if isinstance(given, Mapping):
            return dict(given)
        found, axes = getattr(given, "samples", {}), np.ndim(getattr(given, "success", 0))
        if isinstance(given, MCMC):
            found = {} if states_of(given) is None else given.get_samples(group_by_chain=True)
            axes = 2
        flat = partial(jax.tree.map, lambda x: jnp.reshape(x, (-1, *jnp.shape(x)[axes:])))
        return compiled(flat, dict(found))

    def __call__(self, site: Any = None) -> Any:
        """The value of a site in the first draw."""
        return partial(self.value, 0) if site is None else self.value(0, site)

    def row(self, rng_key: jax.Array) -> Any:
        """The number of the draw at which a chain with this key starts."""
        key = words(rng_key)
        key = key if is_traced(key) else np.asarray(key)  # on the host this compiles nothing
        return key[..., -1] % len(next(iter(self.values.values())))

    def positions(self, rng_key: jax.Array, transforms: Mapping) -> PyTree:
        """Unconstrained values of a draw for each key, for sites as in the draws."""
        rows = self.row(rng_key)
        array: Any = jnp.asarray if is_traced(rows) else np.asarray
        values = {n: jnp.asarray(array(self.values[n])[rows], float) for n in transforms}
        inverse = partial(transform_fn, transforms, invert=True)
        return (jax.vmap(inverse) if rows.ndim else inverse)(values)

    def value(self, row: Any, site: Any) -> Any:
        """The value of a site in a draw, as NumPyro's strategies give it."""
        if site["type"] != "sample" or site["is_observed"] or site["fn"].support.is_discrete:
            return None
        value, shape = jnp.asarray(self.values[site["name"]])[row], site["fn"].shape()
        if value.shape == shape:
            return value
        if value.ndim != len(shape) or any(k > n for k, n in zip(value.shape, shape, strict=True)):
            raise ValueError(
                f"init_to_draws has draws of site {site['name']!r} with shape {value.shape}, and "
                f"the site has shape {shape}: expected as many entries as before, or more along "
                "the same axes"
            )
        grown = init_to_sample(site)
        return grown.at[tuple(slice(k) for k in value.shape)].set(value)

    def check(self, names: Sequence[str]) -> None:
        """Raise a ValueError unless there are draws of these latent sites."""
        before = getattr(getattr(self.draws, "last_state", None), "z", self.values)
        missing, gone = sorted(set(names) - set(self.values)), sorted(set(before) - set(names))
        if missing or (gone and before is not self.values):
            raise ValueError(
                f"init_to_draws has no draws of the latent sites {missing}, and draws of {gone}, "
                f"which the model does not have: expected draws of {sorted(names)}. A model with "
                "other sites needs a new run, without init_strategy"
            )


def with_params(model: Model, rows: Mapping[str, jax.Array]) -> Model:
    """The model with the initial values of ``param`` and ``mutable`` sites, one for all chains.

    ``rows`` are some rows, on which a model with `numpyro_geom.HostRows` runs.
    """
    if not model.plan.has_params:
        return model
    rows = dict(rows) if model.on_host else {}
    seen = SubsamplePlates(model.fn, rows)
    with at_once():
        again = SubsamplePlates(model.fn, {RNG_KEY: random.key(1)} | rows)
    return model.replace(
        fixed=_param_values(seen, again, model.args, model.kwargs, model.plan.idle_params)
    )


@differentiated()
def find_start(
    model: Model,
    rng_key: jax.Array,
    init_params: PyTree = None,
    init_strategy: Callable = numpyro.infer.init_to_uniform,
    *,
    batched: bool = False,
) -> tuple[Model, PyTree]:
    """Find where chains start, and the transforms of the sites on the way.

    Returns:
        The model with its ``param`` sites and transforms, and the position of the chain, or of all
        chains in one pytree.

    Raises:
        ValueError: if there is no valid start, or ``init_params`` does not fit the model.
        TypeError: for positions that are not floating point.
    """
    plan, args, kwargs = model.plan, model.args, model.kwargs
    rows = some_rows(plan)
    warn_of_deterministic(model.fn, args, kwargs, plan)
    model = with_params(model, rows)
    _check_names(model, init_strategy)
    gibbs = GIBBS_SITES_KWARG in kwargs
    if gibbs and init_params:
        init_strategy = init_to_value(values=dict(init_params))
    replays = False
    runnable = SubsamplePlates(model.runnable, rows)

    def start(rng_key: jax.Array) -> tuple[PyTree, jax.Array, dict]:
        """A position, whether energy and gradient are finite there, and the sites' transforms."""
        nonlocal replays
        strategy = init_strategy
        if isinstance(strategy, init_to_draws):
            strategy = partial(strategy.value, strategy.row(rng_key))
        info = initialize_model(
            rng_key,
            runnable,
            init_strategy=strategy,
            model_args=args,
            model_kwargs=kwargs,
            validate_grad=not isinstance(init_strategy, init_to_draws),
        )
        replays = getattr(info.postprocess_fn, "func", None) is not transform_fn
        found = info.param_info
        valid = jnp.isfinite(found.potential_energy) & all_finite(found.z_grad)
        # `init_to_value` leaves values as they are, possibly with fewer bits than a position
        wide = jnp.result_type(float)
        position = {n: x.astype(jnp.promote_types(x.dtype, wide)) for n, x in found.z.items()}
        return position, valid, {} if replays else info.postprocess_fn.args[0]

    if init_params is None and isinstance(init_strategy, init_to_draws):
        init_strategy.check([x.name for x in plan.sites if x.kind == "latent" and not x.discrete])
        if batched:  # NumPyro does not tell a strategy which chain it is for
            start = jax.vmap(start, out_axes=(0, 0, None))
    if init_params is None:
        found = None
        if len(plan.sites) > MANY_ALIKE * len({x.shape for x in plan.sites}):
            with suppress(RuntimeError):  # no valid start was found; it is told below
                found = start(rng_key)
        position, valid, transforms = found or compiled(start, rng_key)
        if not is_traced(valid):
            check_support(model)
        if not is_traced(valid) and not np.asarray(valid).all():
            check_finite(model.fn, args, kwargs)
            start(rng_key)  # on concrete values, so that NumPyro's errors about the model appear
    else:
        position, _, transforms = jax.eval_shape(start, rng_key)
        if jax.tree.leaves(transforms):
            transforms = compiled(lambda key: start(key)[2], rng_key)
    # arrays in transforms that belong to an outer transformation must not outlive it
    if not replays and not is_traced(transforms):
        model = model.replace(transforms=partial(transform_fn, transforms))
    if init_params is None:
        return model, position
    data = SubsamplePlates(handlers.seed(model.runnable, random.key(0))), args, kwargs
    # composite kernels pass values in the supports of the sites
    return model, as_position(init_params, position, *data, batched=batched, constrained=gibbs)


def start_again(model: Model, strategy: init_to_draws, rng_key: jax.Array) -> PyTree:
    """Positions at draws of a model whose transforms are known. Its data are checked."""
    check_support(model)
    transforms: Any = model.transforms
    position, single = strategy.positions(rng_key, transforms.args[0]), words(rng_key).ndim == 1
    check_rows(model, position if single else jax.tree.map(lambda x: x[0], position))
    return position


def check_rows(model: Model, position: PyTree) -> None:
    """Raise if the energy at a position is not finite, and values of some rows are the reason."""
    sizes = {plate: model.plan.sizes[plate] for plate in model.plan.batch_sizes}
    if not sizes or is_traced(position):
        return
    energy = jax.value_and_grad(model.energy)

    def on_rows(rows: dict) -> tuple:
        return compiled(lambda rows: energy(position, rows), jax.tree.map(jnp.asarray, rows))

    check_finite(model.fn, model.args, model.kwargs, on_rows, sizes)


def check_lanes(model: Model | None, position: PyTree) -> None:
    """Raise if energies or sites of chains in one batch differ from the same one by one."""
    if model is None or model.on_host or is_traced((position, model.args, model.kwargs)):
        return
    # a program with the gradient can be right where one without it is wrong
    fns = jax.value_and_grad(model.energy), model.energy
    fns += (model.replay,) * bool(model.of_kind("deterministic"))
    check_batch("energy, gradient or sites", fns, position, model.plan.sizes.values())


def check_batch(what: str, fns: Iterable, positions: PyTree, sizes: Iterable[int]) -> None:
    """Raise if `wrong_lane` finds a chain."""
    if found := wrong_lane(fns, positions, sizes):
        lane, error, largest = found
        raise RuntimeError(
            f"jaxlib computes the {what} of chain {lane} wrongly in a batch of chains: off by "
            f"{error:.3g}, of {largest:.3g}. Use MCMC(..., chain_method='sequential'), or another "
            "version of jaxlib than 0.10.2"
        )


def wrong_lane(
    fns: Iterable[Callable], positions: PyTree, sizes: Iterable[int]
) -> tuple[int, Any, Any] | None:
    """A lane where a function of positions differs from itself of one position, and by how much.

    jaxlib 0.10.2 sums wrongly on a CPU where arrays of more than 2^15 rows, all lanes together,
    share an operand without lanes. Only such batches, of plates of these sizes, are evaluated.
    Results with an entry for each row, or for 16, are compared by their mean difference.
    """
    lanes, many = np.shape(jax.tree.leaves(positions)[0])[0], np.prod([*sizes], dtype=float)
    if lanes * many <= 2**15 or in_trace(positions) or not sums_wrongly():
        return None
    for fn in fns:
        each = [jax.tree.map(lambda x, k=k: x[k], positions) for k in evenly(lanes, 8)]
        # as runs are compiled: with fewer optimisations sums can be right
        together = program(jax.vmap(fn), positions, quick=False)(positions)
        one = program(fn, each[0], quick=False)
        for k, position in zip(evenly(lanes, 8), each, strict=True):  # the last lanes are wrong
            alone = one(position)
            for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
                kind, by_row = jnp.result_type(y, float), 16 * y.size >= many
                errors, largest = jnp.abs(x[k] - y).astype(kind), jnp.max(jnp.abs(y), initial=0)
                error = jnp.mean(errors) if by_row else jnp.max(errors, initial=0)
                # sums over rows have errors of their own
                if error > jnp.finfo(kind).eps ** 0.5 * ((1 if by_row else many) + largest):
                    return int(k), error, largest
    return None


@cache
def sums_wrongly() -> bool:
    """Whether two sums of one array are wrong in this version of jaxlib, from 2^15 rows on."""
    lanes = np.full((2, 20_000, 2), [[[1]], [[2]]], np.float32)
    with at_once():
        found = jax.jit(lambda x, c: (x * c).sum(-1) - c.sum(-1))(3 * lanes[0], lanes)
    return bool(np.any(np.asarray(found) != np.array([[4], [8]])))


def _check_names(model: Model, init_strategy: Callable) -> None:
    """Raise for a value of ``init_to_value`` that belongs to no site: NumPyro leaves it out."""
    if getattr(init_strategy, "func", None) is not init_to_value:
        return
    values, sites = init_strategy.keywords["values"], model.plan.sites  # type: ignore[attr-defined]
    unknown = sorted(set(values) - {x.name for x in sites})
    if unknown:
        raise ValueError(
            f"init_to_value has values of {unknown}, and the model has no such sites: expected "
            f"some of {sorted(x.name for x in sites if not x.observed)}"
        )


def some_rows(plan: Subsampling) -> dict[str, jax.Array]:
    """Enough rows to find shapes and a valid start. Latent rows need all rows."""
    return {
        plate: jnp.asarray(evenly(plan.sizes[plate], number), jnp.int32)
        for plate, number in plan.batch_sizes.items()
        if not plan.local_axes
    }


def check_support(model: Model) -> None:
    """Raise if observed values are outside of their supports, if NumPyro checks this.

    All rows are checked, except those that stay on the host.
    """
    if not validates() or in_trace(model.args, model.kwargs):
        return
    seen = SubsamplePlates(model.runnable, some_rows(model.plan) if model.on_host else {})

    def inside(reduce: Callable) -> dict[str, jax.Array]:
        with numpyro.validation_enabled(False):  # supports are checked here
            trace = handlers.trace(with_start(seen)).get_trace(*model.args, **model.kwargs)
        observed = [s for s in trace.values() if s["type"] == "sample" and s["is_observed"]]
        return {s["name"]: reduce(_inside(s["fn"], s["value"])) for s in observed}

    for name, every in compiled(partial(inside, jnp.all)).items():
        if bool(every):
            continue
        wrong = ~np.atleast_1d(compiled(partial(inside, lambda x: x))[name])
        places = np.unique(np.argwhere(wrong)[:, 0])
        raise ValueError(
            f"observed values of site {name!r} are outside of the support of its distribution, in "
            f"{listed(places)}. Expected values in the support: recode the data (the labels of "
            "Bernoulli and Categorical count from 0), or choose another distribution"
        )


def _inside(fn: Any, value: Any) -> jax.Array:
    """Whether values are in the support; NaN counts as inside, see `check_finite`."""
    inside = fn.support(value)
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return inside
    return inside | jnp.any(jnp.isnan(value), axis=tuple(range(-fn.support.event_dim, 0)))


def _param_values(
    model: Callable, again: Callable, args: tuple, kwargs: dict, idle: tuple[str, ...]
) -> dict[str, Any]:
    """Values of ``param`` and ``mutable`` sites, the same for all chains; zeros for idle sites.

    ``again`` is the model with other keys.

    Warns:
        UserWarning: for values that depend on the keys.
    """

    def values(only_idle: bool, seed: int = 0) -> dict[str, Any]:
        # without a draw from a prior: it may be improper
        trace = handlers.trace(with_start((model, again)[seed], seed)).get_trace(*args, **kwargs)
        types = ("param",) if seed else ("param", "mutable")  # batch statistics follow other values
        kept = {n: s["value"] for n, s in trace.items() if s["type"] in types}
        return {n: x for n, x in kept.items() if (n in idle) == only_idle}

    used, unused = (jax.eval_shape(partial(values, x)) for x in (False, True))
    with at_once():
        fixed = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), unused)
        if not used or is_traced((args, kwargs)):
            return fixed | (values(False) if used else {})
        found, other = compiled(lambda: (values(False), values(False, 1)))
    equal = partial(jax.tree.map, partial(np.array_equal, equal_nan=True))
    if by_key := [n for n in sorted(other) if not all(jax.tree.leaves(equal(found[n], other[n])))]:
        warn_outside(
            f"the param sites {by_key} stay at random first values, because chains move sample "
            "sites only: expected trained values. Pass handlers.substitute(model, data=params) "
            "with the params of a finished SVI (guide AutoDelta), or give the sites priors, as "
            "random_flax_module does",
            UserWarning,
        )
    return fixed | found


def as_position(
    init_params: Any,
    position: dict,
    model: Callable,
    args: tuple,
    kwargs: dict,
    *,
    batched: bool,
    constrained: bool,
) -> dict[str, jax.Array]:
    """The position that ``init_params`` describes.

    The parameters of a module may be the module's nested dict: ``{"nn": {"Dense_0": {"kernel":
    ...}}}`` for the site ``nn/Dense_0.kernel``. ``position`` gives shapes and dtypes.

    Raises:
        TypeError: for values that are not floating point arrays.
        ValueError: for unknown sites, wrong shapes, and values outside of the support.
    """
    if not isinstance(init_params, Mapping):
        raise TypeError(
            f"init_params must be a dict of site values, got {type(init_params).__name__}: pass "
            f"one with the sites {sorted(position)}"
        )
    given = start = dict(_by_site(init_params))
    like = position
    if constrained:

        def values(z: dict) -> dict:
            return constrain_fn(model, args, kwargs, z)

        like = jax.eval_shape(jax.vmap(values) if batched else values, position)
    if constrained:  # draws contain deterministic sites as well
        given = start = {name: x for name, x in given.items() if name in like}
    _check(given, like, batched, constrained)
    if constrained:

        def back(x: dict) -> dict:
            with numpyro.validation_enabled(False):  # errors are reported below
                return unconstrain_fn(model, args, kwargs, x)

        start = {name: jnp.asarray(x) for name, x in given.items()}
        start = (jax.vmap(back) if batched else back)(start)
    for name, x in start.items():
        finite = jnp.all(jnp.isfinite(jnp.asarray(x)))
        if not isinstance(finite, jax.core.Tracer) and not bool(finite):
            problem = (
                "is not finite, or outside of the site's support"
                if constrained
                else ("is not finite")
            )
            inside = "values in the support" if constrained else "finite unconstrained values"
            raise ValueError(
                f"init_params[{name!r}] {problem}: expected {inside}, got {given[name]}"
            )
    return {name: jnp.asarray(start[name]).astype(x.dtype) for name, x in position.items()}


def _by_site(tree: Mapping) -> Iterator[tuple[str, Any]]:
    """Site names and values; a nested dict belongs to a module."""
    for name, value in tree.items():
        if not isinstance(value, Mapping):
            yield name, value
            continue
        module = value["params"] if [*value] == ["params"] else value
        for path, leaf in _leaves(module):
            yield f"{name}/{path}", leaf


def _leaves(tree: Mapping) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{path}", leaf) for path, leaf in _leaves(value))
        else:
            yield str(name), value


def _check(given: Mapping, like: Mapping, batched: bool, constrained: bool) -> None:
    missing, unknown = sorted(set(like) - set(given)), sorted(set(given) - set(like))
    if missing or unknown:
        raise ValueError(
            f"init_params does not match the latent sites {sorted(like)}: missing {missing}, "
            f"unknown {unknown}"
        )
    for name, expected in like.items():
        x = given[name]
        kind = None if x is None or isinstance(x, (list, tuple)) else jnp.result_type(x)
        if kind is None or not jnp.issubdtype(kind, jnp.floating):
            got = ("None" if x is None else type(x).__name__) if kind is None else f"dtype {kind}"
            raise TypeError(
                f"init_params[{name!r}] must be floating point, got {got}: convert it with "
                "jnp.asarray(x, float)"
            )
        check_wide_enough(f"init_params[{name!r}]", kind)
        if jnp.shape(x) != expected.shape:
            space = "" if constrained else "unconstrained "
            raise ValueError(
                f"init_params[{name!r}] has shape {jnp.shape(x)}, expected the {space}shape "
                f"{expected.shape}{' (chains first)' if batched else ''}"
            )
