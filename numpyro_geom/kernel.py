"""SGKernel: the protocol of NumPyro's ``MCMC``, and nothing else. Read this file first.

A kernel is `numpyro_geom.sampling.settings.Settings`, its validated arguments, and an
`numpyro_geom.sampling.algorithm.Algorithm`, a value of pure functions. ``init`` binds the model to
its arguments (`numpyro_geom.bound`) and starts the chains. ``sample`` takes the next draw
(`numpyro_geom.chain`). `SGState` holds everything that changes during a run.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from operator import is_
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.mcmc import MCMC, MCMCKernel
from numpyro.util import fori_collect, is_prng_key, tqdm

from . import _random
from ._checks import (
    FirstAsked,
    check_arguments,
    check_keys,
    check_precision,
    check_start,
    warn_outside,
)
from ._util import PyTree, in_trace, is_traced
from .bound import Bound, bind
from .chain import (
    centre_in,
    decide,
    first_shares,
    for_new_arguments,
    handed_on,
    in_shares,
    next_draw,
    shares_at,
    start_chains,
    taken_over,
)
from .model.arguments import differentiated, on_device
from .model.bad_rows import check_finite, fault_at
from .model.centring import Shares
from .model.jaxprs import compiled, program
from .model.minibatch import AllRows
from .model.start import check_lanes, init_to_draws, start_again
from .sampling.algorithm import Algorithm
from .sampling.settings import Settings, Validator, documented
from .sampling.state import DEFAULT_FIELDS, Chain, SGState, StepReport
from .warmup.start import check_arrival
from .warmup.training import trained

__all__ = ["Chain", "PyTree", "SGKernel", "SGState", "StepReport"]


class SGKernel(MCMCKernel):
    """Base of the stochastic-gradient kernels: the protocol of NumPyro's ``MCMC``.

    A subclass has a constructor with explicit arguments, which passes ``locals()`` to this
    constructor, and defines `algorithm`. Its docstring need not describe arguments that are in
    `numpyro_geom.sampling.settings.SHARED`.

    Args:
        arguments: the constructor's arguments by name.
        checks: functions ``(name, value) -> value`` by name, for arguments that are not shared.
        fixed: settings that the kernel does not leave to its user.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.
    """

    def __new__(cls, *args: Any, **arguments: Any) -> Self:  # noqa: D102
        # each subclass has its own signature: this refuses other arguments, with a remedy
        check_arguments(cls, args, arguments)
        _watch_runs()
        return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__doc__ = documented(cls)

    def __init__(
        self,
        arguments: Mapping[str, Any],
        checks: Mapping[str, Validator] = MappingProxyType({}),
        **fixed: Any,
    ) -> None:
        given = {n: x for n, x in arguments.items() if n not in ("self", "__class__")}
        self._arguments = {n: dict(x) if isinstance(x, Mapping) else x for n, x in given.items()}
        self._settings = Settings(self._arguments, checks, fixed)
        self._bound: Bound | None = None
        self._given: Any = None  # the arguments for which it was bound

    @abstractmethod
    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings; a pure function of them."""

    def __repr__(self) -> str:
        defaults = {n: p.default for n, p in inspect.signature(type(self)).parameters.items()}
        given = [
            f"{name}={getattr(x, '__name__', repr(x))}"
            for name, x in self._arguments.items()
            if x is not defaults[name] and np.any(x != defaults[name])
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise, because only models and guides are called."""
        name = type(self).__name__
        raise TypeError(
            f"expected a model or a guide, got the kernel {name}: run it with "
            f"MCMC({name}(model), num_warmup=1000, num_samples=1000), or pass SVI a guide such as "
            "RiemannianLaplace(model)"
        )

    # What a kernel is

    @property
    def bound(self) -> Bound:
        """The settings with what ``init`` has learned about the model."""
        return Bound(self._settings) if self._bound is None else self._bound

    @property
    def settings(self) -> Settings:
        """The validated arguments; after ``init`` an interval of one epoch is in steps."""
        return self.bound.settings

    @property
    def facts(self) -> Algorithm:
        """The algorithm for the settings in use, with facts about it."""
        return self.algorithm(self.settings)

    @property
    def model(self) -> Callable | None:
        """The user's model; after ``init`` with plates that run at full size."""
        model = self.settings.model
        bound = self.bound.model
        return model if bound is None else AllRows(model, bound.runnable)

    def replace(self, **changes: Any) -> SGKernel:
        """A new kernel with other values of some arguments."""
        return type(self)(**{**self._arguments, **changes})

    # NumPyro's protocol

    @property
    def _sample_fn(self) -> Bound | None:
        return self._bound  # if this is None, `MCMC` calls `init` even where it resumes

    @FirstAsked
    def sample_field(self) -> str:
        """Name of the state field that holds the draw."""
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        """Fields that NumPyro collects with every draw."""
        of = self.facts
        own = ("kinetic_temperature",) * of.momentum + ("accept_prob",) * of.adjusted
        return (*DEFAULT_FIELDS, *own)

    def get_diagnostics_str(self, state: SGState) -> str:
        """One line for the progress bar."""
        text = f"{int(state.num_steps)} steps of size {float(state.step_size):.2e}"
        if self.facts.adjusted:
            text += f". acc. prob={float(state.accept_prob):.2f}"
        if int(state.num_diverging) > 0:
            text += f". {int(state.num_diverging)} failed"
        return text

    @differentiated()
    def init(
        self,
        rng_key: jax.Array,
        num_warmup: int,
        init_params: PyTree,
        model_args: tuple,
        model_kwargs: dict | None,
    ) -> SGState:
        """Start one chain, or one per key; search for the typical set, and place the anchor.

        Raises:
            ValueError: if the model and its arguments do not fit the kernel's settings, or
                ``init_params`` does not fit the model.
            TypeError: for positions that are not floating point.
        """
        check_keys("rng_key", rng_key)
        given = jax.tree.flatten((model_args, model_kwargs))
        args, kwargs = on_device(model_args, model_kwargs)
        single = is_prng_key(rng_key)
        key_state, key_model = _random.pair(rng_key)
        earlier: Any = self._earlier() if init_params is None else None
        old: Any = earlier and earlier.sampler.bound
        taken = old and old.again(self._settings.model, args, kwargs)
        if taken:
            position = start_again(taken.model, self._settings.init_strategy, key_model)
        else:
            # settings that follow from a warm-up are those of the run that has learned them
            warmup = num_warmup if earlier is None else old.num_warmup
            trajectory = self.algorithm(self._settings).trajectory
            bound, position = bind(
                self._settings, key_model, warmup, init_params, args, kwargs, trajectory=trajectory
            )
            taken = earlier and taken_over(bound, earlier, position, single=single)
        if taken:
            settled = num_warmup == 0 and taken.settings.schedule is None
            taken = replace(taken, settings=taken.settings.with_values(settled=settled))
            position = _moved(taken, position, single=single)
            algorithm, last = self.algorithm(taken.settings), earlier.last_state
            state = handed_on(taken, algorithm, key_state, num_warmup, position, last)
            _check_start(taken, state)
            return self._started(taken, state, given)
        # what another chain has learned from the same arguments
        last = self._given
        same = last is not None and last[1] == given[1] and all(map(is_, last[0], given[0]))
        known = self.bound if same else Bound(self._settings)
        if known.shares and init_params is None:
            bound = bound.with_shares(known.shares)
        if num_warmup == 0 and self.settings.schedule is None:
            warn_outside(
                "num_warmup=0 and step_size='auto': the step size is found in warm-up, and there "
                "is none, so the step size is a first guess. Pass num_warmup of some hundred "
                "draws, or a step_size"
            )

        unknown, algorithm = init_params is None, self.algorithm(bound.settings)
        if bound.model is not None and bound.settings.trains and unknown and num_warmup > 0:
            position, unknown = trained(bound.model, key_model, position, single=single), False

        def start(position: PyTree, shares: Shares, near: bool = False) -> SGState:
            one = bound.with_shares(shares) if shares else bound
            return start_chains(
                one, algorithm, key_state, num_warmup, position, unknown=unknown, near=near
            )

        opening: Shares = {}
        if init_params is None and not bound.shares:
            opening = first_shares(bound, position, batched=not single)
        layout, used = bound.settings.layout, bound.with_shares(opening) if opening else bound
        drawn = isinstance(self.settings.init_strategy, init_to_draws)
        if init_params is None and (drawn or (layout is not None and layout.is_summed)):
            unknown = unknown and (bool(opening) or not drawn)
            position = _moved(used, position, single=single)
        state = start(position, opening)
        if opening:
            for _ in range(3):
                shares = shares_at(bound, state)
                if shares is bound.shares or not (shares or bound.shares):
                    break
                bound = bound.with_shares(shares)
                position = centre_in(used, bound, state, position)
                used = bound
                state = start(position, {**opening, **shares}, near=True)
        _check_start(bound, state)
        if not single:
            check_lanes(bound.model, state.z)
        if num_warmup > 0 and init_params is None and bound.point is None:
            check_arrival(bound.model, bound.potential(), bound.settings, state)
        if bound.undecided:
            # once for all chains, by the chain that starts first
            bound, state = decide(bound, algorithm, state, known.choice)
        return self._started(bound, state, given)

    def _started(self, bound: Bound, state: SGState, given: tuple) -> SGState:
        """Keep what is bound, and return the state that tells on what programs are built."""
        self._bound = bound.on((), {})  # data, possibly traced, must not outlive the call
        self._given = None if is_traced(given[0]) else given
        return state._replace(built_on=bound.built_on)

    def _earlier(self) -> MCMC | None:
        """The run with this kernel where chains start, if there is one."""
        given = self._settings.init_strategy
        run: Any = given.draws if isinstance(given, init_to_draws) else None
        old = getattr(run, "sampler", None)
        if type(old) is not type(self) or run.last_state is None:
            return None
        same = old.replace(model=self._settings.model, init_strategy=given).settings
        return run if same == self._settings else None

    def sample(self, state: SGState, model_args: tuple, model_kwargs: dict | None) -> SGState:
        """Take ``num_steps`` stochastic-gradient steps and return the next state."""
        if self._bound is None:
            raise RuntimeError(
                "`init` must run before `sample`: call it, or use numpyro.infer.MCMC"
            )
        check_precision(state.z)
        return self._by_chain(next_draw, state, model_args, model_kwargs)

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """A function from the unconstrained position to site values and deterministic sites.

        If the model has deterministic sites, or supports that depend on other sites, the function
        replays the model on all rows. Rows that no requested site needs are never computed.
        """
        return self.bound.on(*on_device(model_args, model_kwargs)).constrain_fn()

    def refresh(self, state: SGState, model_args: tuple, model_kwargs: dict | None) -> SGState:
        """Re-estimate energy and gradient norm for changed model arguments."""
        return self._by_chain(for_new_arguments, state, model_args, model_kwargs)

    def _by_chain(
        self, fn: Callable, state: SGState, model_args: tuple, model_kwargs: dict | None
    ) -> SGState:
        """``fn(bound, algorithm, state)`` for one chain or for each of several."""
        bound = self.bound.on(*on_device(model_args, model_kwargs))
        of_chain = partial(fn, bound, self.algorithm(bound.settings))
        return (of_chain if is_prng_key(state.rng_key) else jax.vmap(of_chain))(state)

    def wrap_model(self, wrapper: Callable) -> SGKernel:
        """A copy of this kernel on ``wrapper(model)``.

        Raises:
            ValueError: for a kernel that has a ``potential_fn``.
        """
        if self.settings.model is None:
            raise ValueError(
                "wrap_model needs a kernel with a model, and this one has potential_fn"
            )
        return self.replace(model=wrapper(self.settings.model))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given": None}


def _check_start(bound: Bound, state: SGState) -> None:
    """Raise if the energy is not finite where chains start."""
    anchored = state.control.anchor.energy if state.control else 0.0
    try:
        check_start(state.potential_energy, anchored)
    except ValueError as error:
        model: Any = bound.model
        if model is not None:
            check_finite(bound.settings.model, model.args, model.kwargs)  # its error names rows
        z, finite = state.z, np.isfinite(state.potential_energy)
        if finite.ndim:
            z = jax.tree.map(lambda x: x[int(np.argmin(finite))], z)
        if not (fault := fault_at(model, z)):
            raise
        raise ValueError(f"{error}; {fault}") from None


def _moved(bound: Bound, position: PyTree, *, single: bool) -> PyTree:
    """Positions in the coordinates of the bound model, from those in which it is written."""
    if not bound.shares:
        return position
    move = partial(in_shares, bound.model)
    return compiled(move if single else jax.vmap(move), position)


def _watch_runs() -> None:
    """Run the loops of this package's kernels as programs, and look at their draws.

    NumPyro calls nothing at the end of a run. `MCMC.run` is all that is replaced, when the first
    kernel is made, and for other kernels it does what it did.
    """
    run = MCMC.run
    if hasattr(run, "watches"):
        return

    @wraps(run)
    def watched(self: MCMC, *args: Any, **kwargs: Any) -> None:
        ours = isinstance(self.sampler, SGKernel)
        if ours:  # this run has another loop
            chain = type(self)._single_chain_mcmc
            names = {**chain.__globals__, "fori_collect": _collect}
            self._single_chain_mcmc = MethodType(FunctionType(chain.__code__, names), self)
        try:
            run(self, *args, **kwargs)
        finally:
            vars(self).pop("_single_chain_mcmc", None)
        if ours:  # by name, because reports are above kernels
            import_module("numpyro_geom.diagnostics.inference_data").after_run(self)

    watched.watches = True  # type: ignore[attr-defined]
    MCMC.run = watched


def _collect(lower: int, upper: int, body: Any, state: Any, **options: Any) -> tuple:
    """NumPyro's `fori_collect`, but for data that are inputs of the loop and not its constants.

    So other data of the same shapes share the program.
    """
    if in_trace(state):
        return fori_collect(lower, upper, body, state, **options)
    transform, thinning = options["transform"], options["thinning"]
    size = options["collection_size"] or (upper - lower) // thinning
    one = jax.eval_shape(transform, state)
    kept = compiled(lambda: jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), one))
    start = lower + (upper - lower) % thinning
    turns = _turns(body, transform, start, thinning, kept, state)
    if not options["progbar"]:
        return turns(0, upper, kept, state)
    with tqdm.trange(upper, miniters=max(1, upper // 20)) as bar:
        for k in bar:
            kept, state = turns(k, k + 1, kept, state)
            bar.set_description(options["progbar_desc"](k), refresh=False)
            bar.set_postfix_str(options["diagnostics_fn"](state), refresh=False)
    return kept, state


def _turns(body: Any, transform: Any, start: int, thinning: int, *like: PyTree) -> Callable:
    """A program of some turns of NumPyro's loop, from the first draw that is kept."""

    def turns(first: Any, last: Any, *carry: PyTree) -> tuple:
        def turn(k: Any, carry: tuple) -> tuple:
            kept, state = carry[0], body(carry[1])
            row = jnp.maximum((k - start) // thinning, 0)  # what comes before a row is replaced
            put = partial(jax.lax.dynamic_update_index_in_dim, index=row, axis=0)  # `at` is slower
            return jax.tree.map(put, kept, transform(state)), state

        return jax.lax.fori_loop(first, last, turn, carry)

    leaves, tree = jax.tree.flatten(like)
    shapes = [(jax.typeof(x), getattr(x, "sharding", None)) for x in leaves]
    known = vars(body).setdefault("programs", {})  # for another run of the same `MCMC`
    key = transform, start, thinning, tree, *shapes
    if key not in known:
        known[key] = program(turns, 0, 0, *like, donated=(2,))
    return known[key]
