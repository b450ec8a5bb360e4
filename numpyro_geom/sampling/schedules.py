"""Step sizes as functions of the number of steps taken.

A kernel's ``step_size`` is a number, or any callable of the step count, such as an Optax schedule.
Step sizes are h of ``theta' = theta - h A grad U + ...``. The step count t starts at 0 and counts
stochastic-gradient steps, not draws. A callable may have a method ``noise``: the multiplier of the
injected noise at step t, 1.0 or 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .._checks import check_int, check_number, check_share


@dataclass(frozen=True)
class Cyclical:
    """Cosine cycles: each falls from ``peak`` almost to ``floor``, then the next one starts.

    ``h_t = floor + (peak - floor) / 2 (1 + cos(pi mod(t, T) / T))``

    Large steps leave a mode, and small steps sample the next one. This suits multimodal targets
    such as networks. With ``period`` steps per draw each draw is the end of a cycle. In the first
    part ``explore`` of each cycle no noise is injected (``noise(t) == 0``). These steps optimise
    and do not sample: keep only draws from the rest of each cycle. A time-varying step has no
    invariant law. If the cycle is long enough, draws at its end have about the bias of its last
    steps.

    Args:
        peak: step size at the start of a cycle.
        period: steps T of a cycle, 1 to 2^31 - 1. With 1 the step stays at the peak.
        floor: step size at the end of a cycle, which comes as near as (peak - floor) (pi / 2T)^2.
        explore: fraction of each cycle without injected noise, in [0, 1): the steps with
            mod(t, T) / T < explore.

    Raises:
        ValueError: if an argument is out of range or ``explore`` covers the whole cycle.
        TypeError: if an argument is not a number, or ``period`` not an integer.

    Examples:
        >>> schedule = cyclical(peak=0.1, period=4, explore=0.5)
        >>> [round(float(schedule(t)), 3) for t in range(5)]
        [0.1, 0.085, 0.05, 0.015, 0.1]
        >>> [float(schedule.noise(t)) for t in range(5)]
        [0.0, 0.0, 1.0, 1.0, 0.0]

    Source: Zhang, Li, Zhang, Chen and Wilson (2020), Cyclical stochastic gradient MCMC for
    Bayesian deep learning, equation 1 and algorithm 1, where the floor is 0, the period is the run
    length over the number of cycles and ``explore`` is beta.
    """

    peak: float
    period: int
    floor: float = 0.0
    explore: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak", check_number("peak", self.peak, above=0))
        object.__setattr__(self, "period", check_int("period", self.period))
        object.__setattr__(self, "floor", check_number("floor", self.floor, least=0))
        object.__setattr__(self, "explore", check_share("explore", self.explore))
        if self.period > 2**31 - 1:
            raise ValueError(f"period must be at most 2^31 - 1 steps, got {self.period}")
        if self.floor >= self.peak:
            raise ValueError(
                f"floor must be below peak, got peak={self.peak!r}, floor={self.floor!r}: "
                "a step size that does not cycle is a number"
            )
        if self._num_explore == self.period:
            raise ValueError(
                f"explore={self.explore!r} leaves no step with noise in a cycle of period="
                f"{self.period}: take a smaller fraction or a longer period"
            )

    @property
    def _num_explore(self) -> int:
        """Count of k in 0, 1, ... with k / T < explore, safe from rounding: 7 for 0.07 of 100."""
        count = math.ceil(self.explore * self.period)
        return count - 1 if count > 0 and (count - 1) / self.period >= self.explore else count

    def __call__(self, t: ArrayLike) -> Array:
        """h_t = floor + (peak - floor) / 2 (1 + cos(pi mod(t, T) / T))."""
        # sin^2 of the remaining steps is equal; 1 + cos cancels towards the end of a cycle
        left = self.period - jnp.remainder(t, self.period)
        angle = (math.pi / 2) * (jnp.asarray(left, float) / self.period)
        return self.floor + (self.peak - self.floor) * jnp.sin(angle) ** 2

    def noise(self, t: ArrayLike) -> Array:
        """0.0 in the exploration stage, mod(t, T) / T < explore, and 1.0 after it."""
        return jnp.asarray(jnp.remainder(t, self.period) >= self._num_explore, float)


cyclical = Cyclical
"""`numpyro_geom` exports it under this name."""


def check_step_size(value: Any) -> Any:
    """What a user gives for ``step_size``: a positive number, as a float, or a function.

    The value of a function is checked at step 0 only.

    Raises:
        ValueError: for a number that is not positive and finite, for a string, and for a function
            whose first value is negative or not finite.
        TypeError: for anything else, and for a function whose value is not a real scalar.
    """
    if isinstance(value, str):
        raise ValueError(
            f"step_size must be 'auto', a positive number or a schedule, got {value!r}"
        )
    if isinstance(value, jax.core.Tracer):  # the run is inside of jax.jit
        return value
    if callable(value):
        _check_function(value)
        return value
    try:
        return check_number("step_size", value, above=0)
    except TypeError:
        raise TypeError(
            "step_size must be 'auto', a positive number or a schedule (a function of the step "
            f"count), got {value!r} of type {type(value).__name__}"
        ) from None


def _check_function(function: Callable[[Any], Any]) -> None:
    """Check its shape, dtype and first value. Errors of the function itself pass through."""
    result = jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.int32))
    dtype = result.dtype if isinstance(result, jax.ShapeDtypeStruct) else None
    kinds = (jnp.floating, jnp.integer)
    if dtype is None or result.shape or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise TypeError(
            "a step_size function must map the step count, an integer scalar, to a real scalar, "
            f"got {result} from {function!r}"
        )
    with jax.ensure_compile_time_eval():
        first = float(function(jnp.zeros((), jnp.int32)))
    if not (math.isfinite(first) and first >= 0):
        raise ValueError(
            "step_size as a function must be finite and not negative at every step, got "
            f"{first} at step 0 from {function!r}: count from 1, for instance 0.1 / (1 + t)"
        )


def check_always_noisy(step_size: Any, what: str, other: str = "") -> None:
    """Raise if some steps of a schedule have no noise.

    ``what`` needs the noise and begins the message. ``other``, a remedy besides ``explore=0``, ends
    it.
    """
    if getattr(step_size, "explore", 0.0) > 0:
        raise ValueError(
            f"{what} needs noise at every step, and the explore phase of the schedule has none: "
            f"use explore=0{other}"
        )
