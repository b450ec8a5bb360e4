"""SGKernel: the host's protocol, and nothing else. Read this file first.

A kernel is `numpyro_geom.settings.Settings`, its validated arguments, and an
`numpyro_geom.algorithm.Algorithm`, a value of pure functions. ``init`` binds the model to its
arguments (`numpyro_geom.bound`) and starts the chains, ``sample`` takes the next draw
(`numpyro_geom.chain`); everything that evolves is in `SGState`.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import constrain_fn
from numpyro.util import is_prng_key

from ._programs import compiled
from .algorithm import Algorithm, Facts, Rule
from .bound import Bound, bind, on_device
from .chain import for_new_arguments, init_chain, next_draw
from .schedules import Schedule
from .settings import Settings
from .state import Chain, SGState, StepReport
from .target.minibatch import SubsamplePlates, Subsampling
from .target.potential import Potential
from .warmup.adapt import adapts

PyTree = Any
__all__ = ["Chain", "PyTree", "SGKernel", "SGState", "StepReport"]


class SGKernel(MCMCKernel):
    """Base of the stochastic-gradient kernels: the protocol of NumPyro's ``MCMC``.

    A leaf has a constructor with explicit arguments, which hands ``locals()`` to this one, and
    `algorithm`.

    Args:
        arguments: the constructor's arguments by name; see `numpyro_geom.settings`.
        fixed: settings that the kernel does not leave to its user.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.
    """

    def __init__(self, arguments: Mapping[str, Any], **fixed: Any) -> None:
        own = ("self", "__class__")
        self._arguments = {name: x for name, x in arguments.items() if name not in own}
        self._settings = Settings(self._arguments, fixed)
        self._bound: Bound | None = None
        self._sample_fn: Callable | None = None
        self._constrain_cache: tuple | None = None

    @abstractmethod
    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings; a pure function of them."""

    def __repr__(self) -> str:
        defaults = {n: p.default for n, p in inspect.signature(type(self)).parameters.items()}
        given = [
            f"{name}={getattr(x, '__name__', repr(x))}"
            for name, x in self._arguments.items()
            if x is not defaults[name] and x != defaults[name]
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    # What a kernel is

    @property
    def settings(self) -> Settings:
        """The arguments, validated; an interval of one epoch is in steps after ``init``."""
        return self._settings if self._bound is None else self._bound.settings

    @property
    def facts(self) -> Facts:
        """What the algorithm is."""
        return self.algorithm(self.settings).facts

    @property
    def rule(self) -> Rule:
        """How the automatic settings follow from measurements."""
        return self.algorithm(self.settings).rule

    @property
    def model(self) -> Callable | None:
        """The user's model; after ``init``, with plates that run at full size."""
        if self.settings.model is None or self._bound is None:
            return self.settings.model
        return _AllRows(self.settings.model, self._bound.model)

    @property
    def runnable_model(self) -> Callable | None:
        """The user's model with its ``param`` sites substituted."""
        return self.settings.model if self._bound is None else self._bound.model

    @property
    def replaced_sites(self) -> tuple[str, ...]:
        """Sites whose prior an expansion replaces: then the target is not the model's."""
        return () if self._bound is None else self._bound.replaced

    @property
    def plan(self) -> Subsampling | None:
        """Plates, batch sizes and N, after ``init``; None with ``potential_fn``."""
        return None if self._bound is None else self._bound.plan

    @property
    def fixed(self) -> dict[str, Any]:
        """Values of the model's ``param`` and ``mutable`` sites, after ``init``."""
        return {} if self._bound is None else self._bound.fixed

    @property
    def potential_fn(self) -> Callable | None:
        """The energy that was given in a model's place."""
        return self.settings.potential_fn

    @property
    def metric(self) -> Any:
        """The metric object."""
        return self.settings.metric

    @property
    def temperature(self) -> float:
        """The temperature tau."""
        return self.settings.temperature

    @property
    def bias_tolerance(self) -> float:
        """Tolerated relative error of variances under ``step_size="auto"``."""
        return self.settings.bias_tolerance

    @property
    def schedule(self) -> Schedule | None:
        """The step sizes; None where they are automatic."""
        return self.settings.schedule

    @property
    def automatic(self) -> bool:
        """Whether the step size is automatic."""
        return self.schedule is None

    @property
    def measures(self) -> bool:
        """Whether warm-up measures curvature and noise."""
        return adapts(self.settings, self.algorithm(self.settings))

    def potential(self, args: tuple, kwargs: dict | None) -> Potential:
        """The potential for these model arguments, after ``init``."""
        return self._ready().potential(*on_device(args, kwargs))

    def replace(self, **changes: Any) -> SGKernel:
        """A new kernel with other values of some arguments."""
        return type(self)(**{**self._arguments, **changes})

    # The host's protocol

    @property
    def sample_field(self) -> str:
        """Field of the state that holds the draw."""
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        """Fields that NumPyro collects with every draw."""
        fields: tuple[str, ...] = (
            "z",
            "diverging",
            "potential_energy",
            "grad_norm",
            "configurational_temperature",
            "site_temperatures",
            "step_size",
            "num_steps",
        )
        if self.facts.momentum:
            fields = (*fields, "kinetic_temperature")
        return (*fields, "accept_prob") if self.facts.adjusted else fields

    def get_diagnostics_str(self, state: SGState) -> str:
        """One line for the progress bar."""
        text = f"{int(state.num_steps)} steps of size {float(state.step_size):.2e}"
        if self.facts.adjusted:
            text += f". acc. prob={float(state.accept_prob):.2f}"
        if int(state.num_diverging) > 0:
            text += f". {int(state.num_diverging)} undone"
        return text

    def init(
        self,
        rng_key: jax.Array,
        num_warmup: int,
        init_params: PyTree,
        model_args: tuple,
        model_kwargs: dict | None,
    ) -> SGState:
        """Start a chain, or a batch of them if ``rng_key`` is a batch of keys.

        Raises:
            ValueError: if the model and its arguments do not fit the kernel's settings, or
                ``init_params`` does not fit the model.
            TypeError: for positions that are not floating point.
        """
        if not hasattr(rng_key, "dtype"):
            raise TypeError(f"rng_key must be a key such as jax.random.key(0), got {rng_key!r}")
        args, kwargs = on_device(model_args, model_kwargs)
        single = is_prng_key(rng_key)
        key_state, key_model = (
            random.split(rng_key) if single else jnp.swapaxes(jax.vmap(random.split)(rng_key), 0, 1)
        )
        position = self.bind(key_model, num_warmup, init_params, args, kwargs)
        state = self._start(key_state, num_warmup, position, args, kwargs, init_params is None)
        if not isinstance(state.potential_energy, jax.core.Tracer) and not bool(
            jnp.all(jnp.isfinite(state.potential_energy))
        ):
            raise ValueError(
                "the energy is not finite where the chain starts (potential energy "
                f"{state.potential_energy}): pass other `init_params` or another `init_strategy`"
            )
        self._sample_fn = self._sample_one if single else self._sample_batch
        return state

    def bind(
        self,
        rng_key: jax.Array,
        num_warmup: int,
        init_params: PyTree,
        args: tuple,
        kwargs: dict,
    ) -> PyTree:
        """Read the model, and return the position, or positions, where NumPyro starts it.

        Args:
            rng_key: one key, or one for each chain.
            num_warmup: draws of warm-up.
            init_params: the user's unconstrained positions, or None.
            args: the model's arguments on the device.
            kwargs: its keyword arguments.
        """
        batched = not is_prng_key(rng_key)
        self._bound, position = bind(
            self._settings, rng_key, num_warmup, init_params, args, kwargs, batched=batched
        )
        return position

    def sample(self, state: SGState, model_args: tuple, model_kwargs: dict | None) -> SGState:
        """Take ``num_steps`` stochastic-gradient steps and return the next state."""
        if self._sample_fn is None:
            raise RuntimeError(
                "`init` must run before `sample`: call it, or use numpyro.infer.MCMC"
            )
        wide = [x.dtype for x in jax.tree.leaves(state.z) if x.dtype == jnp.float64]
        if wide and not jax.config.read("jax_enable_x64"):
            raise TypeError(
                "the state is float64 and 64-bit mode is off: expected both alike, switch x64 on "
                "(`numpyro.enable_x64()`) or start a new run"
            )
        return self._sample_fn(state, *on_device(model_args, model_kwargs))

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """A function from the unconstrained position to site values and deterministic sites."""
        return self.get_constrain_fn(model_args, model_kwargs)

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """A function from the unconstrained position to constrained site values.

        Where the model has deterministic sites or supports that depend on other sites it replays
        the model on all rows; rows that no requested site needs are never computed.
        """
        bound = self._ready()
        if bound.settings.model is None:
            return lambda position: position
        if bound.transforms is not None:
            return bound.transforms
        leaves, treedef = jax.tree.flatten((model_args, model_kwargs))
        cached = self._constrain_cache
        if cached is not None and cached[1] == treedef and _same(cached[0], leaves):
            return cached[2]
        model = SubsamplePlates(bound.model)
        args, kwargs = on_device(model_args, model_kwargs)

        def constrain(position: PyTree) -> PyTree:
            return constrain_fn(model, args, kwargs, position, return_deterministic=True)

        # compiled also where the host calls it eagerly, so that unused rows are not gathered
        compiled = jax.jit(constrain)
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            self._constrain_cache = (leaves, treedef, compiled)
        return compiled

    def refresh(self, state: SGState, model_args: tuple, model_kwargs: dict | None) -> SGState:
        """Estimate the energy and the gradient norm anew for changed model arguments."""
        bound = self._ready()
        target = bound.target(*on_device(model_args, model_kwargs))
        algorithm = self.algorithm(bound.settings)

        def refresh(state: SGState) -> SGState:
            return for_new_arguments(target, algorithm, state)

        return (refresh if is_prng_key(state.rng_key) else jax.vmap(refresh))(state)

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
        return {**self.__dict__, "_constrain_cache": None}

    # Chains

    def _ready(self) -> Bound:
        return Bound(self._settings) if self._bound is None else self._bound

    def _start(
        self,
        rng_key: jax.Array,
        num_warmup: int,
        position: PyTree,
        args: tuple,
        kwargs: dict,
        unknown: bool,
    ) -> SGState:
        bound = self._ready()
        algorithm = self.algorithm(bound.settings)
        target = bound.target(args, kwargs)
        target.check()
        algorithm.check(target.potential, bound.plan)
        given = bound.settings
        searches = algorithm.facts.searches
        if searches is None:
            searches = given.schedule is None or given.control_variate
        searching = searches and unknown and num_warmup > 0

        def start(rng_key: jax.Array, position: PyTree) -> SGState:
            return init_chain(target, algorithm, given, rng_key, num_warmup, position, searching)

        started = start if is_prng_key(rng_key) else jax.vmap(start)
        return compiled(started, rng_key, position)

    def _sample_one(self, state: SGState, args: tuple, kwargs: dict) -> SGState:
        bound = self._ready()
        return next_draw(
            bound.target(args, kwargs), self.algorithm(bound.settings), bound.settings, state
        )

    def _sample_batch(self, state: SGState, args: tuple, kwargs: dict) -> SGState:
        return jax.vmap(self._sample_one, in_axes=(0, None, None))(state, args, kwargs)


class _AllRows(SubsamplePlates):
    """A model on all its rows, equal to the model it wraps: what an outside reader should see."""

    def __init__(self, model: Callable, runnable: Callable | None):
        super().__init__(runnable)
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = on_device(args, kwargs)
        return super().__call__(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self.model == (other.model if isinstance(other, _AllRows) else other)

    def __hash__(self) -> int:
        return hash(self.model)


def _same(old: list, new: list) -> bool:
    return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
