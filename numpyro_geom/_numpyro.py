"""Private names of NumPyro and its `MCMC`, and the ends of its runs: no other module uses them."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from numpyro import distributions as dist
from numpyro import util
from numpyro.infer import MCMC
from numpyro.infer import mcmc as loops
from numpyro.infer.util import _unconstrain_reparam as unconstrained_value

from ._util import PyTree, few_collections

__all__ = [
    "Plan",
    "announce",
    "arguments_of",
    "fields_of",
    "holding",
    "plan_of",
    "sample_field",
    "seconds_of",
    "states_of",
    "traces_arguments",
    "unconstrained_value",
    "validates",
]


def validates() -> bool:
    """Whether NumPyro checks values and parameters, as after `numpyro.enable_validation`."""
    return dist.Distribution._validate_args


def arguments_of(mcmc: MCMC) -> tuple[tuple, dict[str, Any]]:
    """The model's arguments in the last run."""
    return mcmc._args, mcmc._kwargs


def states_of(mcmc: MCMC) -> dict[str, PyTree] | None:
    """The fields that the last run has collected: arrays of shape (chains, draws, ...)."""
    return mcmc._states


def sample_field(mcmc: MCMC) -> str:
    """Name of the state field that holds the draw."""
    return mcmc._sample_field


def fields_of(mcmc: MCMC, extra_fields: tuple[str, ...]) -> tuple[tuple[str, ...], set[str]]:
    """State fields to collect, with the draw first; and sites to leave out of the draw."""
    field = mcmc._sample_field
    asked = (field, *mcmc._default_fields, *extra_fields)
    removed = {name.removeprefix(f"~{field}.") for name in asked if name.startswith(f"~{field}.")}
    return tuple(dict.fromkeys(name for name in asked if not name.startswith("~"))), removed


def traces_arguments(mcmc: MCMC) -> bool:
    """Whether the model's arguments are inputs of the compiled program and not constants."""
    return mcmc._jit_model_args


def holding(
    mcmc: MCMC,
    arguments: tuple[tuple, dict[str, Any]],
    states: Mapping[str, PyTree] | None = None,
    last_state: PyTree = None,
) -> MCMC:
    """A copy of an MCMC with these arguments and draws, and without any earlier run."""
    new = copy.copy(mcmc)
    new._args, new._kwargs = arguments
    new._states, new._states_flat = None if states is None else dict(states), None
    new._last_state = last_state
    return new


class Plan(NamedTuple):
    """What a run will do.

    Attributes:
        draws: draws of a chain, warm-up included.
        repeats: number of chains that run one after the other.
        bar: whether the kernel is asked for a text for the progress bar after every draw.
    """

    draws: int
    repeats: int
    bar: bool


def plan_of(mcmc: MCMC) -> Plan:
    """The next run of an MCMC."""
    resumes = mcmc._warmup_state is not None
    draws = mcmc.num_samples if resumes else mcmc._collection_params["upper"]
    repeats = mcmc.num_chains if mcmc.chain_method == "sequential" else 1
    return Plan(draws, repeats, bool(mcmc.progress_bar) and repeats == mcmc.num_chains)


def announce(mcmc: MCMC, plan: Plan) -> None:
    """Tell the kernel what the next run will do, if it has a method ``before_run``."""
    before_run = getattr(mcmc.sampler, "before_run", None)
    if before_run is not None:
        before_run(plan)


def seconds_of(mcmc: MCMC) -> float | None:
    """Seconds of the last run, compilation included, or at least a part of them; None if unknown.

    NumPyro's own kernels may still be running when `MCMC.run` returns.
    """
    return getattr(mcmc, "_seconds", None)


def jit_of(mcmc: MCMC) -> Callable | None:
    """The `jax.jit` that a kernel wants for loops, if it wants one."""
    return getattr(mcmc.sampler, "jit", None)


def with_ends(run: Callable[..., None]) -> Callable[..., None]:
    """`MCMC.run` with calls of the kernel's ``before_run`` and ``after_run``, if there are any.

    NumPyro calls nothing at the ends of a run, and does not tell a kernel the number of draws. A
    callback in the sampling loop could not know which draw is the last one, and programs with
    callbacks are compiled again for every run.
    """

    @functools.wraps(run)
    def to_the_end(self: MCMC, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        announce(self, plan_of(self))
        token = _jit_of_loops.set(jit_of(self))
        try:
            run(self, *args, **kwargs)
        finally:
            _jit_of_loops.reset(token)
        after_run = getattr(self.sampler, "after_run", None)
        if after_run is not None:
            after_run(self._states, self._last_state)
        self._seconds = time.perf_counter() - begin

    return to_the_end


_jit_of_loops: ContextVar[Callable | None] = ContextVar("jit_of_loops", default=None)


def _own_jit() -> Callable | None:
    """The ``jit`` of the kernel that runs, unless NumPyro's loops are not compiled."""
    return None if util._DISABLE_CONTROL_FLOW_PRIM else _jit_of_loops.get()


def in_one_program(fori_collect: Callable) -> Callable:
    """NumPyro's sampling loop; without a progress bar it is one program of a kernel's ``jit``.

    NumPyro makes the arrays for the draws before the loop. Each operation is a program of its own.
    """

    @functools.wraps(fori_collect)
    def collect(lower: int, upper: int, body: Callable, init: PyTree, **options: Any) -> PyTree:
        own = _own_jit()
        if own is None or options.get("progbar", True):
            return fori_collect(lower, upper, body, init, **options)
        with few_collections():
            return own(
                lambda init: fori_collect(lower, upper, body, init, **options), donate_argnums=None
            )(init)

    return collect


def with_jit_of_kernels(maybe_jit: Callable) -> Callable:
    """NumPyro's `jax.jit` of the sampling loop, or a kernel's own one, its attribute ``jit``."""

    @functools.wraps(maybe_jit)
    def jit(fn: Callable, *args: Any, **kwargs: Any) -> Callable:
        return (_own_jit() or maybe_jit)(fn, *args, **kwargs)

    return jit


MCMC.run = with_ends(MCMC.run)
util.maybe_jit = with_jit_of_kernels(util.maybe_jit)
loops.fori_collect = in_one_program(loops.fori_collect)
