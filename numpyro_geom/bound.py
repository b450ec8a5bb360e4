"""Bound: the settings of a kernel and the model that it samples, before a chain starts.

Settings say what the user asked for. `bind` reads the model and finds a value for each automatic
setting. Some values follow from the model alone, and others are left to a measurement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree as ravel
from numpyro.util import is_prng_key

from ._checks import check_floating, warn_outside
from ._util import PyTree, digest, is_traced, tree_size
from .metrics.base import Metric
from .metrics.by_site import BySite
from .model.arrowhead import Layout, find_layout
from .model.centring import Shares, find_sums, unmeasured
from .model.jaxprs import UNKNOWN_TURNS, is_deep, work
from .model.minibatch import Subsampling
from .model.model import Model, read
from .model.potential import Potential, function_potential, in_coordinates
from .model.start import check_rows, find_start
from .sampling.settings import DENSE_LIMIT, LOW_RANK, LOW_RANK_LIMIT, STRUCTURED, Settings
from .sampling.state import Target, is_by_site
from .warmup.law import MAX_ROUNDS, ROUND_STEPS
from .warmup.start import (
    FEW_OPERATIONS,
    FEW_ROWS,
    FIRST_ROWS,
    USUAL_STEPS,
    Choice,
)

CHOSEN = ("batch_size", "control_variate")
"""Arguments whose automatic values are chosen by measurement."""
NETWORK_GRADIENTS = 100
"""Gradients on all rows of a network that must cost no more than `FEW_OPERATIONS`, so that a step
takes all rows."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """The static facts of a run.

    Attributes:
        settings: the kernel's settings; an interval of one epoch in the metric is in steps.
        model: the model; None with ``potential_fn``.
        undecided: arguments whose values only serve for measuring; the choice follows.
        choice: the choice that was made.
        point: the position of a model without free parameters. Chains then sample a hidden
            standard normal number instead.
        num_warmup: draws of warm-up from which automatic settings follow.
    """

    settings: Settings
    model: Model | None = None
    undecided: tuple[str, ...] = ()
    choice: Choice | None = None
    point: PyTree = None
    num_warmup: int = 0

    @property
    def plan(self) -> Subsampling | None:
        """Plates, batch sizes and N; None with ``potential_fn``."""
        return None if self.model is None else self.model.plan

    @property
    def targets_model(self) -> bool:
        """Whether chains sample the model's posterior, with one energy for all of its keys."""
        model = self.model
        return self.point is None and model is not None and not model.plan.is_random

    def on(self, args: tuple, kwargs: dict[str, Any]) -> Bound:
        """The same with these arguments of the model. A kernel keeps a model without arguments."""
        if self.model is None:
            return self
        return dataclasses.replace(self, model=self.model.replace(args=args, kwargs=kwargs))

    def again(self, fn: Any, args: tuple, kwargs: dict[str, Any]) -> Bound | None:
        """The same with other data of the model; None where the model has to be bound anew.

        Transforms, separate rows and values of automatic arguments are known from earlier data.
        """
        old: Any = self.model
        if old is None or old.fn is not fn or self.point is not None or old.transforms is None:
            return None
        plan = read(old.fn, args, kwargs, batching=old.plan.batching).plan
        sizes = {p: n for p, n in old.plan.batch_sizes.items() if n < plan.sizes.get(p, 0)}
        sites, before = (
            [s if s.kind == "latent" else (s.name, s.kind, s.plates) for s in p.sites]
            for p in (plan, old.plan)
        )
        fixed = not (plan.batch_sizes or plan.has_params or jax.tree.leaves(old.transforms.args))
        if sites != before or not fixed or len(sizes) < len(old.plan.batch_sizes):
            return None
        plan = dataclasses.replace(plan, batch_sizes=sizes)
        model = old.replace(args=args, kwargs=kwargs, plan=plan)
        return dataclasses.replace(self, model=model)

    @property
    def shares(self) -> Shares:
        """Sites that are not centred, see `numpyro_geom.model.centring`."""
        return {} if self.model is None else self.model.shares

    def with_shares(self, shares: Shares) -> Bound:
        """The same with sites that are not centred."""
        model: Any = self.model
        return dataclasses.replace(self, model=model.replace(shares=shares))

    @property
    def built_on(self) -> dict[str, tuple[()]]:
        """The choices that depend on values of the data, see `SGState.built_on`."""
        shares = {
            " ".join([name, *map(digest, jax.tree.leaves(share))]): ()
            for name, share in self.shares.items()
        }
        given = self.settings
        return shares | {f"{given.batch_size} rows, order {given.control_variate}": ()}

    def potential(self) -> Potential:
        """U of the model's sites."""
        given = self.settings
        if self.point is not None:
            return function_potential(lambda z: z**2 / 2)
        if self.model is not None:
            return self.model.potential()
        full, num_data = getattr(given, "full_potential_fn", None), None
        if full is not None:
            num_data = given.num_data
        return function_potential(given.potential_fn, full, num_data)

    def decided(self, choice: Choice) -> Bound:
        """The same with the choice applied."""
        model: Any = self.model
        rows = choice.batch_size
        if "batch_size" in self.undecided:
            sizes = {} if rows is None else dict.fromkeys(model.plan.batch_sizes, rows)
            model = model.replace(plan=dataclasses.replace(model.plan, batch_sizes=sizes))
        settings = self.settings.with_values(
            control_variate=choice.order,
            batch_size=rows if "batch_size" in self.undecided else self.settings.batch_size,
        )
        return dataclasses.replace(
            self, settings=settings, model=model, choice=choice, undecided=()
        )

    def constrain_fn(self) -> Callable:
        """Map from an unconstrained position to site values and any deterministic sites."""
        model, point = self.model, self.point
        if model is None:
            return lambda position: position
        return model.constrain_fn if point is None else lambda _: model.constrain_fn(point)

    def target(self) -> Target:
        """The target that a chain samples."""
        given, model = self.settings, self.model
        known = model is not None and self.point is None
        return Target(
            potential=self.potential(),
            temperature=given.temperature,
            controlled=bool(given.control_variate),
            transforms=model.transforms if known else None,  # type: ignore[union-attr]
        )


def bind(
    settings: Settings,
    rng_key: jax.Array,
    num_warmup: int,
    init_params: PyTree,
    args: tuple,
    kwargs: dict,
    *,
    trajectory: bool = False,
) -> tuple[Bound, PyTree]:
    """Read the model, find where chains start, and give automatic settings their values.

    Returns:
        The bound model, and the position of the chain, or of all chains in one pytree.

    Raises:
        ValueError: if the model and its arguments do not fit the settings, or ``init_params``
            does not fit the model.
        TypeError: for positions that are not floating point.
    """
    bound, position, rows = Bound(settings, num_warmup=num_warmup), init_params, None
    batched = not is_prng_key(rng_key)
    if settings.model is not None:
        model, rows = _planned(settings, args, kwargs, num_warmup)
        model, position = find_start(
            model,
            rng_key,
            init_params,
            settings.init_strategy,
            batched=batched,
        )
        bound = dataclasses.replace(bound, model=model)
    elif not tree_size(init_params):
        raise ValueError(
            "init_params is needed with potential_fn: pass "
            "`mcmc.run(rng_key, init_params=...)`, a pytree of floating point arrays"
        )
    check_floating(position)
    one = jax.tree.map(lambda x: x[0], position) if batched else position
    if not tree_size(one):
        warn_outside(
            "the model has no free parameter, so every draw is the same: expected a "
            "`numpyro.sample` without `obs` whose support is more than a point",
            UserWarning,
        )
        plan, rows = dataclasses.replace(model.plan, batch_sizes={}), None
        bound = dataclasses.replace(bound, model=model.replace(plan=plan), point=one)
        one = jnp.zeros(())
        position = jnp.zeros(rng_key.shape[:1]) if batched else one
    if bound.model is not None:
        check_rows(bound.model, one)
    if bound.model is not None and bound.point is None:
        draw, init = bound.model.potential().draw, bound.model.potential().init_stream
        like, _ = jax.eval_shape(lambda k: draw(k, init(k)), jax.random.key(0))
        if is_deep(jax.make_jaxpr(bound.model.energy)(one, like).jaxpr):
            bound = dataclasses.replace(bound, settings=settings.with_values(deep=True))
    asked = settings.control_variate in (1, 2)
    if asked and num_warmup == 0:
        if init_params is None:
            raise ValueError(
                "control_variate=True finds its anchor in warm-up, and num_warmup is 0: expect"
                "ed a warm-up, or init_params near the middle of the target"
            )
    moves = init_params is None
    found, undecided = _resolved(bound, rows, one, num_warmup, trajectory, moves)
    number = MAX_ROUNDS * ROUND_STEPS + USUAL_STEPS * 2 * num_warmup
    number /= 2 ** int(found.control_variate)  # a step costs as many gradients
    cheap = set(undecided) == set(CHOSEN) and _is_cheap(bound, one, number)
    if rows and found.deep and settings.batch_size == "auto":  # noise limits a network's steps
        cheap = _is_cheap(bound, one, NETWORK_GRADIENTS)
    free = settings.batch_size == "auto" and settings.control_variate in ("auto", 0)
    if cheap or (trajectory and free and rows and not undecided):
        plan = dataclasses.replace(bound.model.plan, batch_sizes={})  # type: ignore[union-attr]
        bound = dataclasses.replace(bound, model=bound.model.replace(plan=plan))  # type: ignore
        metric = _with_interval(settings.metric, plan)
        found = found.with_values(batch_size=None, control_variate=0, metric=metric)
        undecided = ()
    return dataclasses.replace(bound, settings=found, undecided=undecided), position


def _planned(settings: Settings, args: tuple, kwargs: dict, num_warmup: int) -> tuple[Model, Any]:
    """The model with its minibatches, and rows per step in the form of ``batch_size``.

    Automatic minibatches are used only with many rows and an automatic step size, and not if each
    row has a latent value: those of rows that are not drawn move by noise alone.

    Warns:
        UserWarning: for many rows in a model that cannot be subsampled, and for an automatic step
            size with minibatches of latent rows.
    """
    by_rows = partial(read, settings.model, args, kwargs, batching=settings.batching)
    given = settings.batch_size != "auto"
    model = by_rows(batch_size=settings.batch_size) if given else by_rows()
    plan = model.plan
    adapts = settings.schedule is None and num_warmup > 0 and not getattr(settings, "adjusted", 0)
    for name, ((plate, _), *_) in plan.local_axes.items() if adapts else ():
        rows, size = plan.batch_sizes[plate], plan.sizes[plate]
        warn_outside(
            f"site {name!r} has a value for each of the {size} rows of plate {plate!r}, and a step "
            f"moves all of them with gradients for {rows}: a draw takes many more steps than with "
            "all rows. Take all rows: leave batch_size and subsample_size out",
            UserWarning,
        )
    if given:
        return model, settings.batch_size
    if any(s.discrete for s in plan.sites):  # they are summed out, on all rows
        return model, None
    if adapts and not any(s.observed and s.plates for s in plan.sites):
        _warn_without_plate(model)
    if plan.batch_sizes or plan.num_data <= FEW_ROWS or not adapts:
        return model, None
    try:
        drawn = by_rows(batch_size=FIRST_ROWS)
        return (model, None) if drawn.plan.local_axes else (drawn, FIRST_ROWS)
    except ValueError as error:
        warn_outside(
            f"every step takes all {plan.num_data} rows, since minibatches are not possible: "
            f"{error}. Pass batch_size=None to take all rows without this warning",
            UserWarning,
        )
        return model, None


def _warn_without_plate(model: Model) -> None:
    """Warn if a plate would let the kernel draw minibatches."""
    for name, site in model.sites.items():
        rows = max(site.shape, default=0)
        if site.kind == "observed" and rows > FEW_ROWS:
            warn_outside(
                f"every step takes all {rows} entries of site {name!r}, because it is in no plate. "
                f"With `with numpyro.plate('data', {rows}) as i:` around it, and data indexed by "
                "i, a step takes some of the rows. Pass batch_size=None to take all rows without "
                "this warning",
                UserWarning,
            )
            return


def _resolved(
    bound: Bound, rows: Any, position: PyTree, num_warmup: int, trajectory: bool, moves: bool
) -> tuple[Settings, tuple[str, ...]]:
    """Settings with a value for each automatic argument.

    ``rows`` are rows per step, in the form of ``batch_size``, and ``position`` is that of one
    chain. A ``trajectory`` has a cost besides its gradients, which makes a Hessian worth while. A
    chain ``moves`` to other coordinates before the first draw if its start is not given.

    Returns:
        The settings, and the names of those arguments in `CHOSEN` whose values only serve for
        measuring.
    """
    settings, plan = bound.settings, bound.plan
    found = settings.with_values(
        dense_mass=_dense_mass(bound, position, num_warmup, moves),
        batch_size=rows,
        metric=_with_interval(settings.metric, plan),
    )
    measures = (
        found.scales
        and found.schedule is None
        and num_warmup > 0
        and plan is not None
        and len(plan.batch_sizes) > 0
    )
    undecided, size = [], tree_size(position)
    if measures and settings.batch_size == "auto" and rows is not None:
        undecided.append("batch_size")
    if settings.control_variate == "auto":
        correctable = measures and not plan.is_random  # type: ignore[union-attr]
        second = found.layout is not None or (trajectory and size <= DENSE_LIMIT)
        found = found.with_values(control_variate=1 + second if correctable else 0)
        undecided += ["control_variate"] * correctable
    if found.control_variate == 2 and found.layout is None and size > DENSE_LIMIT:
        raise ValueError(
            f"control_variate=2 needs the Hessian, and the model has {size} parameters that belong "
            f"to no groups: expected at most {DENSE_LIMIT}, or a plate of groups with "
            "dense_mass='structured'; use control_variate=1"
        )
    return found, tuple(undecided)


def _is_cheap(bound: Bound, position: PyTree, number: float) -> bool:
    """Whether so many gradients on all rows cost less than measurements for fewer rows."""
    model = bound.model
    if model is None or model.on_host:
        return False
    jaxpr = jax.make_jaxpr(jax.grad(model.energy))(position).jaxpr
    return number * work(jaxpr, UNKNOWN_TURNS) <= FEW_OPERATIONS


def _with_interval(metric: Metric, plan: Subsampling | None) -> Metric:
    """The metric, with an interval of one epoch replaced by a number of steps."""
    return metric.with_interval(1 if plan is None else plan.steps_per_epoch)


def _dense_mass(bound: Bound, position: PyTree, num_warmup: int, moves: bool) -> Any:
    """The argument ``dense_mass``, with a value instead of ``"auto"`` or ``"structured"``."""
    settings = bound.settings
    if not isinstance(settings.dense_mass, str):
        return settings.dense_mass
    if settings.dense_mass == LOW_RANK:
        return LOW_RANK
    if settings.dense_mass == STRUCTURED:
        layout = _layout(bound, position, moves)
        if layout is None:
            raise ValueError(
                "dense_mass='structured' needs a plate of at least 8 groups with up to 32 "
                "parameters in each, of which no row sees two, or a series of at least 32 times "
                "that depend on their neighbours only; and at most 256 other parameters. "
                "The model has none: use dense_mass=False, or True with few parameters"
            )
        return layout
    size = tree_size(position)
    # a given step size refers to the parameters as they are
    free = settings.schedule is None and num_warmup > 0 and not settings.deep
    if not free or isinstance(settings.metric, BySite):  # one matrix for all would mix the sites
        return None
    if size <= DENSE_LIMIT:
        return True
    if settings.metric.scales:
        return None
    layout = None if settings.inverse_mass_matrix is not None else _layout(bound, position, moves)
    if layout is not None:
        return layout
    free = settings.inverse_mass_matrix is None and size <= LOW_RANK_LIMIT
    return LOW_RANK if free else False


def _layout(bound: Bound, position: PyTree, moves: bool) -> Layout | None:
    """The groups of a model, see `find_layout`; of sums of its values if chains ``moves`` there."""
    if not is_by_site(position):
        return None
    flat, to_sites = ravel(position)
    shapes = {name: jnp.shape(position[name]) for name in sorted(position)}
    sites = () if bound.plan is None else bound.plan.sites

    def found(bound: Bound) -> Layout | None:
        return find_layout(in_coordinates(bound.potential(), to_sites), sites, shapes, flat.dtype)

    layout = found(bound)
    if layout is not None or bound.model is None or not moves or is_traced(position):
        return layout
    sums = unmeasured(bound.model, position, find_sums(bound.model, position))
    layout = found(bound.with_shares(sums)) if sums else None
    if layout is None or not layout.is_series or not sums.keys() >= {*layout.local_names}:
        return None
    return dataclasses.replace(layout, is_summed=True)
