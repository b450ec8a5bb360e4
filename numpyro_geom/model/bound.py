"""Bound: a model with its arguments, and the facts that are known before a chain starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import random
from numpyro import handlers
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.initialization import init_to_value
from numpyro.infer.util import constrain_fn, initialize_model, transform_fn

from .._checks import check_floating
from .._mcmc import validates
from .._util import all_finite, is_traced
from .._warning import warn_outside
from ..rows.bad_rows import check_finite
from ..rows.host_rows import host_rows_in
from ..sampling.settings import Settings
from ..warmup.start import Choice
from . import minibatch
from .abstract import with_start
from .automatic import planned, resolved
from .expanded import WithoutPrior
from .function import function_potential
from .init_params import as_position
from .minibatch import SubsamplePlates, Subsampling
from .plates import warn_of_deterministic
from .potential import Potential, model_potential
from .programs import compiled
from .target import Target

PyTree = Any
LONGEST_START = 1_500
"""Most operations of a start that is compiled as one program. A model has about 110 for each site.
From a dozen sites on, running them one by one is faster, since sites repeat operations."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """The static facts of a run.

    Attributes:
        settings: the kernel's settings; an interval of one epoch in the metric is in steps.
        plan: plates, batch sizes and N; None with ``potential_fn``.
        fixed: values of ``param`` and ``mutable`` sites.
        transforms: map from the unconstrained position to site values; None if this map needs a
            run of the model.
        replaced: sites whose prior an expansion replaces by a prior on their factors.
        undecided: arguments whose values only serve for measuring; the choice follows.
        choice: the choice that was made.
        point: the position of a model without free parameters. Chains then sample a hidden
            standard normal number instead.
    """

    settings: Settings
    plan: Subsampling | None = None
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    transforms: Callable | None = None
    replaced: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    choice: Choice | None = None
    point: PyTree = None

    @property
    def model(self) -> Callable | None:
        """The user's model, with ``param`` sites substituted."""
        if not self.fixed:
            return self.settings.model
        return handlers.substitute(self.settings.model, data=self.fixed)

    @property
    def targets_model(self) -> bool:
        """Whether chains sample the model's posterior, with one energy for all of its keys."""
        own = self.point is None and not self.replaced
        return own and self.plan is not None and not self.plan.is_random

    def potential(self, args: tuple, kwargs: dict) -> Potential:
        """U of the model's sites for these arguments."""
        model, given = self.model, self.settings
        if self.point is not None:
            return function_potential(lambda z: z**2 / 2)
        if model is None:
            full, num_data = getattr(given, "full_potential_fn", None), None
            if full is not None:
                num_data = given.num_data
            return function_potential(given.potential_fn, full, num_data)
        if self.replaced:
            model = WithoutPrior(model, self.replaced)
        return model_potential(model, self.plan, args, kwargs)  # type: ignore[arg-type]

    def decided(self, choice: Choice) -> Bound:
        """The same with the choice applied."""
        plan: Any = self.plan
        rows = choice.batch_size
        if "batch_size" in self.undecided:
            sizes = {} if rows is None else dict.fromkeys(plan.batch_sizes, rows)
            plan = dataclasses.replace(plan, batch_sizes=sizes)
        settings = self.settings.with_values(
            control_variate=choice.control_variate,
            batch_size=rows if "batch_size" in self.undecided else self.settings.batch_size,
        )
        return dataclasses.replace(self, settings=settings, plan=plan, choice=choice, undecided=())

    def constrain_fn(self, args: tuple, kwargs: dict) -> Callable:
        """Map from an unconstrained position to site values and any deterministic sites.

        If this map needs a run of the model, the run is on all rows. Rows that no requested site
        needs are never computed.
        """
        if self.model is None:
            return lambda position: position
        if self.point is not None:
            constrain_point = dataclasses.replace(self, point=None).constrain_fn(args, kwargs)
            return lambda _: constrain_point(self.point)
        if self.transforms is not None:
            return self.transforms
        model = SubsamplePlates(self.model)

        def constrain(position: PyTree) -> PyTree:
            # in a composite kernel, sites of the other kernels are requested, and need a key
            seeded = handlers.seed(model, random.key(0))
            return constrain_fn(seeded, args, kwargs, position, return_deterministic=True)

        # compiled even if NumPyro calls it eagerly, so that unused rows are not gathered
        return jax.jit(constrain)

    def target(self, args: tuple, kwargs: dict) -> Target:
        """The target that a chain samples for these arguments."""
        given = self.settings
        return Target(
            potential=self.potential(args, kwargs),
            temperature=given.temperature,
            expansion=given.expansion,
            controlled=given.control_variate,
            transforms=None if self.point is not None else self.transforms,
        )


def bind(
    settings: Settings,
    rng_key: jax.Array,
    num_warmup: int,
    init_params: PyTree,
    args: tuple,
    kwargs: dict,
    *,
    batched: bool,
) -> tuple[Bound, PyTree]:
    """Plan the minibatches, fix ``param`` sites, and find where chains start.

    Args:
        settings: the kernel's settings.
        rng_key: one key, or one for each chain.
        num_warmup: draws of warm-up.
        init_params: the user's starting point of the chains, or None.
        args: the model's arguments.
        kwargs: the model's keyword arguments.
        batched: whether there are several chains.

    Returns:
        The bound model, and the position of the chain, or of all chains in one pytree.

    Raises:
        ValueError: if the model and its arguments do not fit the settings, or ``init_params``
            does not fit the model.
        TypeError: for positions that are not floating point.
    """
    bound, position, rows = Bound(settings), init_params, None
    if settings.model is not None:
        plan, rows = planned(settings, args, kwargs, num_warmup)
        bound, position = _bind_model(settings, plan, rng_key, init_params, args, kwargs, batched)
    elif not _size(init_params):
        raise ValueError(
            "init_params is needed with potential_fn: pass "
            "`mcmc.run(rng_key, init_params=...)`, a pytree of floating point arrays"
        )
    check_floating(position)
    one = jax.tree.map(lambda x: x[0], position) if batched else position
    if not _size(one):
        warn_outside(
            "the model has no free parameter, so every draw is the same: expected a "
            "`numpyro.sample` without `obs` whose support is more than a point",
            UserWarning,
        )
        plan, rows = dataclasses.replace(plan, batch_sizes={}, local_axes={}), None
        bound, one = dataclasses.replace(bound, plan=plan, point=one), jnp.zeros(())
        position = jnp.zeros(rng_key.shape[:1]) if batched else one
    if bound.plan is not None and bound.plan.batch_sizes and not is_traced(one):
        energy = jax.value_and_grad(bound.potential(args, kwargs).energy)

        def on_rows(rows: dict) -> tuple:
            return compiled(lambda rows: energy(one, rows), jax.tree.map(jnp.asarray, rows))

        sizes = {plate: bound.plan.sizes[plate] for plate in bound.plan.batch_sizes}
        check_finite(settings.model, args, kwargs, on_rows, sizes)
    if settings.control_variate is True and settings.anchor_interval is None and num_warmup == 0:
        if init_params is None:
            raise ValueError(
                "control_variate=True finds its anchor in warm-up, and num_warmup is 0: expect"
                "ed a warm-up, init_params near the middle of the target, or anchor_interval"
            )
    found, undecided = resolved(settings, bound.plan, rows, one, num_warmup)
    return dataclasses.replace(
        bound,
        settings=found,
        replaced=_replaced(settings, bound.plan, one),
        undecided=undecided,
    ), position


def _size(position: PyTree) -> int:
    return sum(map(jnp.size, jax.tree.leaves(position)))


def _bind_model(
    settings: Settings,
    plan: Subsampling,
    rng_key: jax.Array,
    init_params: PyTree,
    args: tuple,
    kwargs: dict,
    batched: bool,
) -> tuple[Bound, PyTree]:
    # Some rows are enough to find shapes and a valid start. Latent rows need all rows.
    rows: dict[str, jax.Array] = {}
    if not plan.local_axes:
        some = dataclasses.replace(plan, batching="replacement")
        rows, _ = compiled(lambda key: minibatch.draw(some, key, ()), random.key(0))
    bound = Bound(settings, plan)
    warn_of_deterministic(settings.model, args, kwargs, plan)
    if plan.has_params:
        used = rows if host_rows_in((args, kwargs)) else {}
        seen = SubsamplePlates(settings.model, used)
        fixed = _param_values(seen, args, kwargs, plan.idle_params)
        bound = dataclasses.replace(bound, fixed=fixed)
    gibbs = GIBBS_SITES_KWARG in kwargs
    strategy = settings.init_strategy
    if gibbs and init_params:
        strategy = init_to_value(values=dict(init_params))
    replays = False
    runnable = SubsamplePlates(bound.model, rows)

    def start(in_parts: bool = False) -> tuple[PyTree, jax.Array, dict]:
        """A position, whether energy and gradient are finite there, and the sites' transforms."""
        nonlocal replays
        info = initialize_model(
            rng_key,
            runnable,
            init_strategy=strategy,
            model_args=args,
            model_kwargs=kwargs,
            validate_grad=not in_parts,
        )
        replays = getattr(info.postprocess_fn, "func", None) is not transform_fn
        found = info.param_info
        valid = jnp.isfinite(found.potential_energy)

        def has_gradient(z: PyTree) -> jax.Array:
            return all_finite(jax.grad(info.potential_fn)(z))

        if not in_parts:
            valid &= all_finite(found.z_grad)
        elif not compiled(
            lambda z: jnp.all((jax.vmap(has_gradient) if batched else has_gradient)(z)), found.z
        ):
            return start()  # NumPyro's search continues until the gradient is finite
        return found.z, valid, {} if replays else info.postprocess_fn.args[0]

    if init_params is None:
        position, valid, transforms = compiled(
            start, at_most=LONGEST_START, otherwise=partial(start, in_parts=True)
        )
        if not is_traced(valid) and not (jnp.all(valid) and _supported(runnable, args, kwargs)):
            check_finite(settings.model, args, kwargs)
            start()  # on concrete values, so that NumPyro's errors about the model appear
    else:
        position, _, transforms = jax.eval_shape(start)
        transforms = compiled(lambda: start()[2]) if jax.tree.leaves(transforms) else transforms
    # arrays in transforms that belong to an outer transformation must not outlive it
    if not replays and not is_traced(transforms):
        bound = dataclasses.replace(bound, transforms=partial(transform_fn, transforms))
    if init_params is None:
        return bound, position
    constrained = gibbs or settings.constrained_init  # composite kernels pass site values
    data = SubsamplePlates(handlers.seed(bound.model, random.key(0))), args, kwargs
    return bound, as_position(
        init_params, position, *data, batched=batched, constrained=constrained
    )


def _supported(model: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether observed values are in their supports, if NumPyro checks this."""
    if not validates():
        return True

    def supported() -> list[jax.Array]:
        with numpyro.validation_enabled(False):  # supports are checked below
            trace = handlers.trace(with_start(model)).get_trace(*args, **kwargs)
        observed = [s for s in trace.values() if s["type"] == "sample" and s["is_observed"]]
        return [jnp.all(site["fn"].support(site["value"])) for site in observed]

    return all(map(bool, compiled(supported)))


def _param_values(
    model: Callable, args: tuple, kwargs: dict, idle: tuple[str, ...]
) -> dict[str, Any]:
    """Values of ``param`` and ``mutable`` sites, the same for all chains; zeros for idle sites."""

    def values(only_idle: bool) -> dict[str, Any]:
        # without a draw from a prior, which may be improper
        trace = handlers.trace(with_start(model)).get_trace(*args, **kwargs)
        kept = {n: s["value"] for n, s in trace.items() if s["type"] in ("param", "mutable")}
        return {n: x for n, x in kept.items() if (n in idle) == only_idle}

    used, unused = (jax.eval_shape(partial(values, x)) for x in (False, True))
    with jax.ensure_compile_time_eval():
        fixed = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), unused)
        if not used:
            return fixed
        by_now = is_traced((args, kwargs))
        return fixed | (values(False) if by_now else compiled(partial(values, False)))


def _replaced(settings: Settings, plan: Subsampling | None, position: PyTree) -> tuple[str, ...]:
    """Sites whose prior the expansion replaces.

    Raises:
        ValueError: if the expansion does not fit the position.
    """
    expansion = settings.expansion
    if expansion is None:
        return ()
    expansion.check(position)
    sites = expansion.replaced(position)
    wide = sorted(set() if plan is None else set(plan.local_axes) & set(sites))
    if wide:
        raise ValueError(
            f"expansion would multiply sites with a value for each row of the data: {wide}."
            " Expected sites outside of subsampled plates: name them in `sites`"
        )
    return sites if expansion.target == "factors" else ()
