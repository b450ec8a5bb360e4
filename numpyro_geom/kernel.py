"""SGState and SGKernel: what every stochastic-gradient kernel shares. Read this file first.

A kernel's ``sample`` runs ``num_steps`` stochastic-gradient steps in one compiled loop. A step:
split the key, draw row indices, let the leaf kernel take its pure step (gradient, metric, move),
check that everything is finite, and keep the new values or go back to the last position whose
energy and gradient were. Everything that evolves is in `SGState`; a kernel object holds
settings and the static facts of a model.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.initialization import init_to_value
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import constrain_fn, initialize_model, transform_fn, unconstrain_fn
from numpyro.util import is_prng_key

from . import control_variate as cv
from . import minibatch
from . import step_size as auto
from ._checks import check_choice, check_flag, check_int, check_number
from ._start import check_batch_size, check_energy, check_floating, check_init_params
from ._util import lazy_cond, tree_scale, tree_vdot, tree_where
from .expansion import Expansion, WithoutPrior, with_expansion
from .metrics import get_metric
from .minibatch import BATCHING, Plan, SubsamplePlates, make_plan
from .potential import Potential, function_potential, model_potential
from .rows.host_rows import host_rows_in
from .rows.loop import loop_over_batches
from .schedules import as_schedule
from .search import find_mode
from .state import SGState, StepReport, Walker, is_by_site, virials
from .step_size import Adaptation

PyTree = Any
__all__ = ["PyTree", "SGKernel", "SGState", "StepReport", "Walker"]
UNSTABLE_DRIFT = 100.0
"""A drift this many times longer (squared, in the metric) than the noise, and twice as long as one
step before, is the mark of an unstable integrator: in a stationary chain the ratio is about the
bias tolerance."""
MAX_METRIC_STEPS = 500
"""Most steps for which a metric's statistics settle before the position first moves."""


class SGKernel(MCMCKernel):
    """Base of the stochastic-gradient kernels: data, loop, step size, guard, host protocol.

    A leaf kernel supplies ``_init_dynamics`` and the pure ``_step``.

    Args:
        model: a NumPyro model with continuous latent sites.
        potential_fn: in the model's place, an energy ``potential_fn(z)`` or an unbiased
            stochastic one ``potential_fn(z, rng_key)``, in nats; needs ``init_params``.
        metric: a name or an object, see `numpyro_geom.metrics`.
        step_size: ``"auto"``, a number, or a schedule (a function of the step count).
        batch_size: rows a step: an int for the only plate with observed rows, a dict
            plate -> int for several, None for all rows (or for what the model subsamples).
        num_steps: stochastic-gradient steps a draw, or ``"auto"``: half a relaxation time.
        temperature: tau of the target exp(-U / tau), at least 0.
        batching: ``"replacement"`` or ``"epoch"`` (each epoch a fresh permutation).
        bias_tolerance: relative error of the variances that ``"auto"`` may cause.
        control_variate: correct minibatch gradients by those at an anchor, where the gradient of
            all rows is known.
        anchor_interval: steps between two moves of the anchor to the chain's own position; None
            leaves it where warm-up found the middle of the target.
        expansion: expand matrices W = P V Q, see `numpyro_geom.Expansion`; draws are of W.
        init_strategy: NumPyro's, where the chains start.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.
    """

    _adjusted = False
    _bias_is_known = True
    """Whether the bias is that of a Langevin step: h lam_H / 2 + h lam_C / (2 tau)."""
    _target_accept = auto.TARGET_ACCEPTANCE
    _has_momentum = False
    _measures = False
    """Whether a setting besides step size and number of steps follows from the curvature."""

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        metric: Any = "identity",
        step_size: Any = "auto",
        batch_size: int | Mapping[str, int] | None = None,
        num_steps: int | str = "auto",
        temperature: float = 1.0,
        batching: str = "replacement",
        bias_tolerance: float = 0.1,
        control_variate: bool = False,
        anchor_interval: int | None = None,
        expansion: Expansion | None = None,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        if (model is None) == (potential_fn is None):
            raise ValueError(
                "expected exactly one of `model` and `potential_fn`, got "
                + ("neither" if model is None else "both")
            )
        for name, value in (("model", model), ("potential_fn", potential_fn)):
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be callable, got {type(value).__name__}")
        if not callable(init_strategy):
            raise TypeError(
                "init_strategy must be one of numpyro.infer's, such as init_to_median, got "
                f"{init_strategy!r}"
            )
        if isinstance(step_size, str) and step_size != "auto":
            raise ValueError(
                f"step_size must be 'auto', a positive number or a schedule, got {step_size!r}"
            )
        if isinstance(num_steps, str) and num_steps != "auto":
            raise ValueError(
                f"num_steps must be 'auto' or an integer of at least 1, got {num_steps!r}"
            )
        if potential_fn is not None and batch_size is not None:
            raise ValueError(
                "batch_size needs a model, whose plates can be subsampled: with potential_fn, "
                "draw the minibatch in `potential_fn(z, rng_key)`"
            )
        self._model = model
        self._potential_fn = potential_fn
        self._given_metric = self._metric = get_metric(metric)
        self._schedule = None if isinstance(step_size, str) else as_schedule(step_size)
        self._num_steps = None if isinstance(num_steps, str) else check_int("num_steps", num_steps)
        self._batch_size = check_batch_size(batch_size)
        self._temperature = check_number("temperature", temperature, least=0.0)
        self._batching = check_choice("batching", batching, BATCHING)
        self._bias_tolerance = check_number("bias_tolerance", bias_tolerance, above=0.0)
        self._control_variate = check_flag("control_variate", control_variate)
        self._anchor_interval = (
            None if anchor_interval is None else check_int("anchor_interval", anchor_interval)
        )
        if self._anchor_interval is not None and not self._control_variate:
            raise ValueError(
                f"anchor_interval={anchor_interval} needs a control variate: pass "
                "control_variate=True, or drop anchor_interval"
            )
        self._expansion = _check_expansion(expansion, model)
        self._init_strategy = init_strategy
        self._forget_model()

    def _forget_model(self) -> None:
        """Drop what `init` derives from the model and its arguments."""
        self._plan: Plan | None = None
        self._fixed: dict[str, Any] = {}
        self._transforms: Callable | None = None
        self._constrain_cache: tuple | None = None
        self._sample_fn: Callable | None = None
        self._replaced: tuple[str, ...] = ()

    # The leaf kernel's part

    @abstractmethod
    def _init_dynamics(self, position: PyTree, rng_key: jax.Array) -> PyTree:
        """The leaf's own state at the start."""

    @abstractmethod
    def _step(
        self,
        rng_key: jax.Array,
        potential: Potential,
        batch: Any,
        walker: Walker,
        step_size: jax.Array,
        temperature: jax.Array | float,
        learning: jax.Array,
    ) -> tuple[Walker, StepReport]:
        """One pure step; the caller checks that the result is finite.

        ``learning`` says whether settings that warm-up learns may still change.
        """

    def _learn_metric(
        self, metric_state: PyTree, grad: PyTree, num_data: int, learning: jax.Array
    ) -> PyTree:
        """The metric's statistics after a gradient over all data; no work once they are frozen."""
        return lax.cond(
            learning,
            lambda state, grad: self._metric.update(state, tree_scale(1 / num_data, grad)),
            lambda state, _: state,
            metric_state,
            grad,
        )

    def _rule(
        self, adaptation: Adaptation, state: SGState, potential: Potential
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """Step size, relaxation rate per unit of it, and dynamics for what was measured.

        With a ``step_size`` of the user's the first is that of ``state``.
        """
        h = state.step_size
        if self._schedule is None:
            h = auto.step_size_from(
                adaptation, self._bias_tolerance, self._temperature, self._adjusted
            )
        return h, adaptation.slowest, state.dynamics

    def _num_steps_from(
        self, adaptation: Adaptation, rate: jax.Array, step_size: jax.Array, warming: jax.Array
    ) -> jax.Array:
        """Steps of the next draw under ``num_steps="auto"``."""
        return auto.num_steps_from(rate, adaptation.num_warmup, step_size, warming)

    def _bias(
        self, curvature: Any, noise: Any, step_size: Any, dynamics: PyTree
    ) -> tuple[Any, Any, str]:
        """Relative error of variances from discretisation and from noise, and a text of both.

        The text has two fields, ``{0}`` and ``{1}``, for the figures.
        """
        tau = self._temperature if self._temperature > 0 else 1.0
        text = "h lam_H / 2 = {0} from discretisation, h lam_C / (2 tau) = {1} from minibatch noise"
        return step_size * curvature / 2, step_size * noise / (2 * tau), text

    def _relaxation_rate(self, slowest: Any, dynamics: PyTree) -> Any:
        """Rate of the slowest direction per unit of step size."""
        return slowest

    def _at_rest(self, dynamics: PyTree) -> PyTree:
        """What the leaf carries after a step that had to be undone."""
        return dynamics

    @property
    def _noise_factor(self) -> float:
        """Variance of the gradient in the step, relative to the whole batch's gradient."""
        return 1.0

    def _second_order(self, dynamics: PyTree, potential: Potential) -> jax.Array | float:
        """Factor of the squared Hessian in the curvature that the step sees."""
        return 0.0

    def _known_noise(self, dynamics: PyTree) -> PyTree | None:
        """The gradient's variance, entry by entry, if the injected noise makes up for it."""

    def _check_potential(self, potential: Potential) -> None:
        """Raise where the leaf cannot use this potential."""

    # The host's protocol

    @property
    def model(self) -> Callable | None:
        """The user's model; after ``init``, with plates that run at full size."""
        if self._model is None or self._plan is None:
            return self._model
        return _AllRows(self._model, self._runnable_model())

    @property
    def metric(self) -> Any:
        """The metric object; an interval of one epoch is in steps after ``init``."""
        return self._metric

    @property
    def plan(self) -> Plan | None:
        """Plates, batch sizes and N, after ``init``; None with ``potential_fn``."""
        return self._plan

    @property
    def temperature(self) -> float:
        """The temperature tau."""
        return self._temperature

    @property
    def bias_tolerance(self) -> float:
        """Tolerated relative error of variances under ``step_size="auto"``."""
        return self._bias_tolerance

    @property
    def settings(self) -> dict[str, Any]:
        """Constructor arguments by name, for records."""
        return {
            "metric": repr(self._metric),
            "step_size": "auto" if self._schedule is None else repr(self._schedule),
            "num_steps": "auto" if self._num_steps is None else self._num_steps,
            "batch_size": repr(self._batch_size),
            "temperature": self._temperature,
            "batching": self._batching,
            "bias_tolerance": self._bias_tolerance,
            "control_variate": self._control_variate,
            "anchor_interval": "none" if self._anchor_interval is None else self._anchor_interval,
            "expansion": "none" if self._expansion is None else repr(self._expansion),
        }

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
        if self._has_momentum:
            fields = (*fields, "kinetic_temperature")
        return (*fields, "accept_prob") if self._adjusted else fields

    def get_diagnostics_str(self, state: SGState) -> str:
        """One line for the progress bar."""
        text = f"{int(state.num_steps)} steps of size {float(state.step_size):.2e}"
        if self._adjusted:
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
        model_args, model_kwargs = _on_device(model_args, model_kwargs)
        single = is_prng_key(rng_key)
        key_state, key_model = (
            random.split(rng_key) if single else jnp.swapaxes(jax.vmap(random.split)(rng_key), 0, 1)
        )
        if self._model is not None:
            position = self._init_position(
                key_model, init_params, model_args, model_kwargs, batched=not single
            )
        else:
            if init_params is None:
                raise ValueError(
                    "init_params is needed with potential_fn: pass "
                    "`mcmc.run(rng_key, init_params=...)`, a pytree of floating point arrays"
                )
            position = init_params
        check_floating(position)
        if self._expansion is not None:
            one = position if single else jax.tree.map(lambda x: x[0], position)
            self._expansion.check(one)
            local = set() if self._plan is None else set(self._plan.local_axes)
            wide = sorted(local & set(self._expansion.replaced(one)))
            if wide:
                raise ValueError(
                    f"expansion would multiply sites with a value for each row of the data: {wide}."
                    " Expected sites outside of subsampled plates: name them in `sites`"
                )
            if self._expansion.target == "factors":
                self._replaced = self._expansion.replaced(one)
        if self._control_variate and self._anchor_interval is None and num_warmup == 0:
            if init_params is None:
                raise ValueError(
                    "control_variate=True finds its anchor in warm-up, and num_warmup is 0: expect"
                    "ed a warm-up, init_params near the middle of the target, or anchor_interval"
                )
        self._metric = self._given_metric
        if getattr(self._metric, "interval", 1) is None:
            if not dataclasses.is_dataclass(self._metric):
                raise TypeError(
                    "interval=None means one epoch and needs a metric that is a dataclass, got "
                    f"{type(self._metric).__name__}: make it one, or give the interval in steps"
                )
            steps = 1 if self._plan is None else self._plan.steps_per_epoch
            self._metric = dataclasses.replace(self._metric, interval=steps)  # type: ignore

        def init_one(key: jax.Array, position: PyTree) -> SGState:
            state = self._init_chain(key, num_warmup, position, model_args, model_kwargs)
            searching = jnp.asarray(init_params is None and num_warmup > 0)
            return state._replace(adaptation=state.adaptation._replace(searching=searching))

        state = (init_one if single else jax.vmap(init_one))(key_state, position)
        if not isinstance(state.potential_energy, jax.core.Tracer) and not bool(
            jnp.all(jnp.isfinite(state.potential_energy))
        ):
            raise ValueError(
                "the energy is not finite where the chain starts (potential energy "
                f"{state.potential_energy}): pass other `init_params` or another `init_strategy`"
            )
        self._sample_fn = self._sample_one if single else self._sample_batch
        return state

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
        return self._sample_fn(state, *_on_device(model_args, model_kwargs))

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """A function from the unconstrained position to site values and deterministic sites."""
        return self.get_constrain_fn(model_args, model_kwargs)

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """A function from the unconstrained position to constrained site values.

        Where the model has deterministic sites or supports that depend on other sites it replays
        the model on all rows; rows that no requested site needs are never computed.
        """
        if self._model is None:
            return _identity
        if self._transforms is not None:
            return self._transforms
        leaves, treedef = jax.tree.flatten((model_args, model_kwargs))
        cached = self._constrain_cache
        if cached is not None and cached[1] == treedef and _same(cached[0], leaves):
            return cached[2]
        model = SubsamplePlates(self._runnable_model())
        args, kwargs = _on_device(model_args, model_kwargs)

        def constrain(position: PyTree) -> PyTree:
            return constrain_fn(model, args, kwargs, position, return_deterministic=True)

        # compiled also where the host calls it eagerly, so that unused rows are not gathered
        compiled = jax.jit(constrain)
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            self._constrain_cache = (leaves, treedef, compiled)
        return compiled

    def refresh(self, state: SGState, model_args: tuple, model_kwargs: dict | None) -> SGState:
        """Estimate the energy and the gradient norm anew for changed model arguments."""
        if not is_prng_key(state.rng_key):
            return jax.vmap(lambda s: self.refresh(s, model_args, model_kwargs))(state)
        potential = self._potential(*_on_device(model_args, model_kwargs))
        if self._control_variate:  # what is known at the anchor is of the old arguments
            control = cv.refresh(potential, state.control, state.control.anchor.position)
            state = state._replace(control=control)
            potential = self._with_control(potential, control)
        state = self._moved_to(state, state.z, True)  # another kernel may have done that
        state = state._replace(push=jnp.full_like(state.push, jnp.inf))
        batch, _ = potential.draw(random.fold_in(state.rng_key, 1), state.stream)
        energy, grad = jax.value_and_grad(potential.energy)(state.z, batch)
        dtype = state.potential_energy.dtype
        return state._replace(
            potential_energy=energy.astype(dtype),
            grad_norm=jnp.sqrt(tree_vdot(grad, grad)).astype(dtype),
        )

    def wrap_model(self, wrapper: Callable) -> SGKernel:
        """A copy of this kernel on ``wrapper(model)``.

        Raises:
            ValueError: for a kernel that has a ``potential_fn``.
        """
        if self._model is None:
            raise ValueError(
                "wrap_model needs a kernel with a model, and this one has potential_fn"
            )
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._forget_model()
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_constrain_cache=None)
        return state

    # Initialisation

    def _init_position(
        self, rng_key: jax.Array, init_params: PyTree, args: tuple, kwargs: dict, *, batched: bool
    ) -> PyTree:
        """Plan the minibatches, fix `param` sites, and find where the chain starts."""
        self._fixed = {}
        model: Callable = self._runnable_model()
        self._plan = plan = make_plan(model, args, kwargs, self._batch_size, self._batching)
        # Some rows are enough to find out shapes and a valid start; latent rows need all of them.
        rows: dict[str, jax.Array] = {}
        if not plan.local_axes:
            rows, _ = minibatch.draw(
                dataclasses.replace(plan, batching="replacement"), random.key(0), ()
            )
        if plan.has_params:
            # with one key for all chains: they sample one posterior
            with jax.ensure_compile_time_eval():
                plates = SubsamplePlates(model, rows if host_rows_in((args, kwargs)) else {})
                seeded = handlers.seed(plates, random.key(0))
                trace = handlers.trace(seeded).get_trace(*args, **kwargs)
            self._fixed = {
                name: site["value"]
                for name, site in trace.items()
                if site["type"] in ("param", "mutable")
            }
        gibbs = GIBBS_SITES_KWARG in kwargs
        strategy = self._init_strategy
        if gibbs and init_params:
            strategy = init_to_value(values=dict(init_params))
        info = initialize_model(
            rng_key,
            SubsamplePlates(self._runnable_model(), rows),
            init_strategy=strategy,
            model_args=args,
            model_kwargs=kwargs,
        )
        replays = getattr(info.postprocess_fn, "func", None) is not transform_fn
        # arrays in transforms that belong to an outer transformation must not outlive it
        leaked = any(
            isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(info.postprocess_fn.args)
        )
        self._transforms = None if replays or leaked else info.postprocess_fn
        position = info.param_info.z
        if init_params is None:
            return position
        if gibbs:  # composite kernels hand over constrained values
            init_params = unconstrain_fn(
                SubsamplePlates(self._runnable_model()), args, kwargs, dict(init_params)
            )
        check_init_params(init_params, position, batched)
        return {
            name: jnp.asarray(init_params[name]).astype(value.dtype)
            for name, value in position.items()
        }

    def _init_chain(
        self, rng_key: jax.Array, num_warmup: int, position: PyTree, args: tuple, kwargs: dict
    ) -> SGState:
        key_state, key_stream, key_batch, key_dynamics = random.split(rng_key, 4)
        position = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), position)
        dtype = jnp.result_type(*jax.tree.leaves(position))
        potential = self._potential(args, kwargs)
        self._check_potential(potential)
        if self._control_variate and (potential.deterministic or potential.on_all_rows is None):
            raise ValueError(
                "control_variate=True corrects minibatch gradients and needs a model whose rows "
                "are subsampled: pass a model and batch_size, or drop control_variate"
            )
        stream = potential.init_stream(key_stream)
        batch, _ = potential.draw(key_batch, stream)
        energy = potential.energy(position, batch)
        check_energy("the potential", energy)
        start: PyTree = position
        expanded: PyTree = ()
        if self._expansion is not None:
            key_dynamics, key_factors = random.split(key_dynamics)
            start = expanded = self._expansion.init(key_factors, position)
        zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
        count = jnp.zeros((), jnp.int32)
        step_size = one if self._schedule is None else jnp.asarray(self._schedule(count), dtype)
        return SGState(
            i=count,
            z=position,
            potential_energy=jnp.asarray(energy, dtype),
            grad_norm=zero,
            configurational_temperature=zero,
            site_temperatures=dict.fromkeys(_sites(start), zero),
            kinetic_temperature=zero,
            step_size=step_size,
            num_steps=jnp.asarray(
                self._settling_steps() if self._num_steps is None else self._num_steps, jnp.int32
            ),
            diverging=jnp.zeros((), bool),
            num_diverging=count,
            accept_prob=one,
            metric_state=self._metric.init(start),
            dynamics=self._init_dynamics(start, key_dynamics),
            expanded=expanded,
            centre=start,
            trusted=start,
            push=jnp.asarray(jnp.inf, dtype),
            stream=stream,
            control=(
                cv.init_control(position, jnp.asarray(energy, dtype))
                if self._control_variate
                else ()
            ),
            steps_taken=count,
            adaptation=auto.init_adaptation(num_warmup, dtype),
            seed=_key_data(rng_key),
            rng_key=key_state,
        )

    def _settling_steps(self) -> int:
        """Steps for which statistics settle while the position holds still, before all else."""
        decay = getattr(self._metric, "decay", 0.0)
        steps = min(MAX_METRIC_STEPS, int(2.0 / (1.0 - decay))) if decay > 0 else 1
        return max(steps, min(MAX_METRIC_STEPS, getattr(self._metric, "interval", 1) + 1))

    def _runnable_model(self) -> Callable:
        if not self._fixed:
            return self._model  # type: ignore[return-value]
        return handlers.substitute(self._model, data=self._fixed)

    def _potential(self, args: tuple, kwargs: dict) -> Potential:
        if self._model is None:
            return function_potential(self._potential_fn)  # type: ignore[arg-type]
        model = self._runnable_model()
        if self._replaced:
            model = WithoutPrior(model, self._replaced)
        return model_potential(model, self._plan, args, kwargs)  # type: ignore

    def _with_control(self, potential: Potential, control: Any) -> Potential:
        if not self._control_variate:
            return potential
        return cv.with_control_variate(potential, control.anchor)

    def _target(self, potential: Potential, control: Any) -> Potential:
        """What a step sees of the potential: with its control variate, and expanded."""
        return self._expanded(self._with_control(potential, control))

    def _expanded(self, potential: Potential) -> Potential:
        if self._expansion is None:
            return potential
        return with_expansion(potential, self._expansion, self._temperature)

    def _merge(self, position: PyTree) -> PyTree:
        """The position of the model's sites, given that which steps move."""
        return position if self._expansion is None else self._expansion.merge(position)

    def _with_temperatures(self, state: SGState, virial: jax.Array, position: PyTree) -> SGState:
        """The state with temperatures from the mean of `virials` over a draw."""
        sizes = [x.size for x in jax.tree.leaves(position)]
        return state._replace(
            configurational_temperature=jnp.sum(virial) / sum(sizes),
            site_temperatures={
                name: virial[k] / position[name].size for k, name in enumerate(_sites(position))
            },
        )

    def _walker(self, state: SGState) -> Walker:
        position = state.z if self._expansion is None else state.expanded
        return Walker(position, state.metric_state, state.dynamics)

    # The loop

    @property
    def _adapts(self) -> bool:
        return self._schedule is None or self._num_steps is None or self._measures

    @property
    def _searches(self) -> bool:
        """Whether warm-up begins with a search for a mode, where no start is given."""
        return self._schedule is None or self._control_variate

    def _sample_batch(self, state: SGState, args: tuple, kwargs: dict) -> SGState:
        return jax.vmap(self._sample_one, in_axes=(0, None, None))(state, args, kwargs)

    def _sample_one(self, state: SGState, args: tuple, kwargs: dict) -> SGState:
        rng_key, key_steps, key_measure, key_search = random.split(state.rng_key, 4)
        potential = self._potential(args, kwargs)
        warming = state.i < state.adaptation.num_warmup
        if self._searches:
            state = self._search(state, potential, key_search)
        if self._adapts:
            state = self._adapt(state, potential, key_measure, warming)
        # the first draw lets a metric's statistics settle before anything is measured or moved
        moving = (state.i > 0) | (not self._adapts)
        # what stops changing does so before curvature is measured for the last time
        learning = (state.i < state.adaptation.num_warmup * 7 // 8) | (state.i == 0)
        # in warm-up the centre moves along, and temperatures mean nothing yet
        here = state.i <= state.adaptation.num_warmup
        state = state._replace(centre=tree_where(here, self._walker(state).position, state.centre))
        state = self._draw(state, potential, key_steps, moving, learning)
        control, adaptation = state.control, state.adaptation
        if self._control_variate:
            control = tree_where(warming & moving, cv.add_draw(control, state.z), control)
        if self._schedule is None:
            adaptation = tree_where(
                warming & moving,
                self._update_shrink(adaptation, state),
                adaptation,
            )
        return state._replace(
            i=state.i + 1, control=control, adaptation=adaptation, rng_key=rng_key
        )

    def _update_shrink(self, adaptation: Adaptation, state: SGState) -> Adaptation:
        """Correct the automatic step size by how the draw went."""
        return auto.update_shrink(
            adaptation, state.i, state.diverging, state.accept_prob, self._adjusted
        )

    def _draw(
        self,
        state: SGState,
        potential: Potential,
        rng_key: jax.Array,
        moving: jax.Array | bool,
        learning: jax.Array,
    ) -> SGState:
        """Take the steps of one draw; a step that cannot be is undone."""
        key_steps, key_check = random.split(rng_key)
        dtype = state.potential_energy.dtype
        start = self._walker(state).position
        size = sum(x.size for x in jax.tree.leaves(start))
        num_virials = len(start) if is_by_site(start) else 1

        def body(_: jax.Array, key_step: jax.Array, batch: Any, carry: tuple) -> tuple:
            walker, trusted, control, t, old, old_ratio, undone, sums = carry
            if self._anchor_interval is not None:
                control = lazy_cond(
                    t % self._anchor_interval == 0,
                    lambda c, z: cv.refresh(potential, c, z),
                    control,
                    self._merge(walker.position),
                )
            target = self._target(potential, control)
            h, tau = state.step_size, jnp.asarray(self._temperature, dtype)
            if self._schedule is not None:
                h = jnp.asarray(self._schedule(t), dtype)
                tau = tau * jnp.asarray(self._schedule.noise(t), dtype)
            if self._adapts:
                h = jnp.where(moving, h, 0.0)
            new, report = self._step(key_step, target, batch, walker, h, tau, learning)
            facts = (
                report.energy.astype(dtype),
                tree_vdot(report.grad, report.grad).astype(dtype),
                h,
            )
            virial = virials(walker.position, state.centre, report.grad).astype(dtype)
            finite = jnp.isfinite(facts[0]) & jnp.isfinite(facts[1]) & _all_finite(new.position)
            ratio = old_ratio
            if self._temperature > 0 and not self._adjusted:
                ratio = (report.push / (self._temperature * size)).astype(dtype)
                finite &= (ratio < UNSTABLE_DRIFT) | (ratio < 2 * old_ratio)
            # energy and gradient belong to the position where the step started: if they fail,
            # the step before led astray, and the chain goes back to where they did not
            back = walker._replace(position=trusted, dynamics=self._at_rest(walker.dynamics))
            trusted = tree_where(finite, walker.position, trusted)
            walker, facts = tree_where(finite, (new, facts), (back, old))
            old_ratio = jnp.where(finite, ratio, old_ratio)
            others = jnp.stack([report.accept_prob, report.kinetic_temperature]).astype(dtype)
            sums = sums + jnp.where(finite, jnp.concatenate([others, virial]), 0.0)
            undone = undone + ~finite
            return walker, trusted, control, t + 1, facts, old_ratio, undone, sums

        num_steps = state.num_steps if self._num_steps is None else self._num_steps
        walker = self._walker(state)
        carry = (
            walker,
            state.trusted,
            state.control,
            state.steps_taken,
            (state.potential_energy, jnp.zeros((), dtype), state.step_size),
            # the first step that moves may be long: a chain can start far out
            jnp.where((state.i == 1) & self._adapts, jnp.inf, state.push).astype(dtype),
            jnp.zeros((), jnp.int32),
            jnp.zeros(2 + num_virials, dtype),
        )
        stream, carry = loop_over_batches(
            potential, self._merge(walker.position), key_steps, state.stream, num_steps, body, carry
        )
        walker, trusted, control, taken, facts, push, undone, sums = carry
        # the last position is a draw, and no step has evaluated it yet
        merged = self._merge(walker.position)
        finite = jnp.isfinite(potential.energy(merged, potential.draw(key_check, stream)[0]))
        if self._transforms is not None:
            finite &= _all_finite(self._transforms(merged))
            # values can overflow all along the draw; where it started they did not
            usable = _all_finite(self._transforms(self._merge(trusted)))
            trusted = tree_where(usable, trusted, self._walker(state).position)
        position = tree_where(finite, walker.position, trusted)
        dynamics = tree_where(finite, walker.dynamics, self._at_rest(walker.dynamics))
        undone = undone + ~finite
        energy, squared_norm, step_size = facts
        means = sums / jnp.asarray(num_steps, dtype)
        state = self._with_temperatures(state, means[2:], start)
        return state._replace(
            z=self._merge(position),
            potential_energy=energy,
            grad_norm=jnp.sqrt(squared_norm),
            kinetic_temperature=means[1] if self._has_momentum else state.kinetic_temperature,
            step_size=state.step_size if self._schedule is None else step_size,
            diverging=undone > 0,
            num_diverging=undone,
            accept_prob=means[0] if self._adjusted else state.accept_prob,
            metric_state=walker.metric_state,
            dynamics=dynamics,
            expanded=() if self._expansion is None else position,
            trusted=trusted,
            push=push,
            stream=stream,
            control=control,
            steps_taken=taken,
        )

    def _search(self, state: SGState, potential: Potential, rng_key: jax.Array) -> SGState:
        """Come near a mode before the first draw, and place the control variate's anchor."""

        def search(z: PyTree, key: jax.Array) -> PyTree:
            key_first, key_second = random.split(key)
            start, z = z, find_mode(potential, z, key_first, self._temperature)
            if self._control_variate:
                z = cv.search_with_anchor(potential, z, key_second, self._temperature)
            if self._transforms is None:
                return z
            # the mode of an improper model can be where values overflow
            return tree_where(_all_finite(self._transforms(z)), z, start)

        first = state.i == 0
        z = lazy_cond(first & state.adaptation.searching, search, state.z, rng_key)
        state = self._moved_to(state, z, first)
        if not self._control_variate:
            return state
        control = lazy_cond(first, lambda c, z: cv.refresh(potential, c, z), state.control, z)
        if self._anchor_interval is None:
            num_warmup = state.adaptation.num_warmup
            control = lazy_cond(
                cv.is_refresh(state.i, num_warmup),
                lambda c, i: cv.refresh_from_mean(potential, c, i, num_warmup),
                control,
                state.i,
            )
        return state._replace(control=control)

    def _moved_to(self, state: SGState, z: PyTree, moved: jax.Array | bool) -> SGState:
        """The state at ``z``, where something other than the kernel's steps has led."""
        state = state._replace(z=z)
        if self._expansion is not None:
            state = state._replace(expanded=self._expansion.contract(z, state.expanded))
        trusted = tree_where(jnp.asarray(moved), self._walker(state).position, state.trusted)
        return state._replace(trusted=trusted)

    def _adapt(
        self, state: SGState, potential: Potential, rng_key: jax.Array, warming: jax.Array
    ) -> SGState:
        """Measure the target at a few draws of warm-up; set step size and number of steps."""
        due = auto.is_checkpoint(state.i, state.adaptation.num_warmup)

        def measure(adaptation: Adaptation, state: SGState, rng_key: jax.Array) -> Adaptation:
            target = self._target(potential, state.control)
            return auto.measure(
                target,
                self._walker(state).position,
                lambda v: self._metric.apply_inverse_sqrt(state.metric_state, v),
                rng_key,
                adaptation,
                state.i,
                self._noise_factor,
                self._second_order(state.dynamics, target),
                self._known_noise(state.dynamics),
                self._bias_tolerance,
                self._temperature,
            )

        adaptation = lazy_cond(due, measure, state.adaptation, state, rng_key)
        started = state.i > 0
        changes = started & warming | due
        h, rate, dynamics = self._rule(adaptation, state, potential)
        step_size, num_steps = state.step_size, state.num_steps
        if self._schedule is None:
            step_size = jnp.where(changes, h, step_size).astype(step_size.dtype)
        if self._num_steps is None:
            steps = self._num_steps_from(adaptation, rate, step_size, warming)
            num_steps = jnp.where(started, steps, num_steps)
        return state._replace(
            adaptation=adaptation,
            step_size=step_size,
            num_steps=num_steps,
            dynamics=tree_where(changes, dynamics, state.dynamics),
        )


class _AllRows(SubsamplePlates):
    """A model on all its rows, equal to the model it wraps: what an outside reader should see."""

    def __init__(self, model: Callable, runnable: Callable):
        super().__init__(runnable)
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _on_device(args, kwargs)
        return super().__call__(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self.model == (other.model if isinstance(other, _AllRows) else other)

    def __hash__(self) -> int:
        return hash(self.model)


def _on_device(args: tuple, kwargs: dict | None) -> tuple[tuple, dict]:
    """Model arguments with NumPy arrays as JAX arrays, which traced row indices can index."""
    kwargs = {} if kwargs is None else kwargs
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) and x.dtype.kind in "biufc" else x,
        (args, kwargs),
    )


def _check_expansion(expansion: Any, model: Callable | None) -> Expansion | None:
    if expansion is None or isinstance(expansion, Expansion):
        if expansion is not None and model is None and expansion.target == "factors":
            raise ValueError(
                "target='factors' replaces the prior of a model, and potential_fn has none to "
                "find: pass a model, or use target='posterior'"
            )
        return expansion
    raise TypeError(
        "expansion must be a numpyro_geom.Expansion such as Expansion(left=1, right=1), or None, "
        f"got {type(expansion).__name__}"
    )


def _sites(position: PyTree) -> tuple[str, ...]:
    """Names of the sites whose temperatures are told apart."""
    return tuple(sorted(position)) if is_by_site(position) else ()


def _identity(x: PyTree) -> PyTree:
    return x


def _same(old: list, new: list) -> bool:
    return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))


def _all_finite(tree: PyTree) -> jax.Array:
    # a sum is not finite if an entry is not; one fused reduction in place of one a leaf
    return jnp.isfinite(sum((jnp.sum(x * 0) for x in jax.tree.leaves(tree)), jnp.zeros(())))


def _key_data(rng_key: jax.Array) -> jax.Array:
    if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        return random.key_data(rng_key)
    return rng_key
