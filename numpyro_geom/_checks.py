"""Argument checks shared by constructors: typed errors that say what to do."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key


def check_number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None
) -> float:
    """A finite real number, strictly ``above`` or at ``least`` a bound."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        if getattr(value, "shape", None) != () or isinstance(value, bool):
            raise TypeError(
                f"{name} must be a number, got {value!r} of type {type(value).__name__}"
            )
        return check_number(name, value.item(), above=above, least=least)
    bound = f"above {above:g}" if above is not None else f"at least {least:g}"
    if not math.isfinite(value) or (above is not None and value <= above):
        raise ValueError(f"{name} must be a finite number {bound}, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be a finite number {bound}, got {value!r}")
    return float(value)


def check_int(name: str, value: Any, *, least: int = 1) -> int:
    """An integer that is at least ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{name} must be an integer of at least {least}, got {value!r} of type "
            f"{type(value).__name__}"
        )
    if value.__index__() < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value.__index__()


def check_shape(name: str, value: Any) -> tuple[int, ...]:
    """A tuple of integers."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(
            f"{name} must be a tuple of integers such as (100,), got {value!r} of type "
            f"{type(value).__name__}"
        )
    return tuple(check_int(name, n, least=0) for n in value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of several names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")
    return value


def check_key(name: str, value: Any) -> Any:
    """A single random key."""
    if not is_prng_key(value):
        raise TypeError(
            f"{name} must be a single key, such as jax.random.key(0), got {_kind(value)}"
        )
    return value


def check_keys(name: str, value: Any) -> Any:
    """A single random key, or a batch of them."""
    if isinstance(value, (jax.Array, np.ndarray)):
        is_raw = value.dtype == np.uint32 and np.shape(value)[-1:] == (2,)
        if is_raw or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
    raise TypeError(
        f"{name} must be a key such as jax.random.key(0), before the arguments of the model, got "
        f"{_kind(value)}"
    )


def check_model(name: str, value: Any) -> Any:
    """A NumPyro model: a function that is not a kernel or guide."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}: pass a function")
    if isinstance(value, MCMCKernel) or hasattr(value, "sample_posterior"):
        raise TypeError(
            f"{name} must be a NumPyro model, got a kernel or guide, {type(value).__name__}: pass "
            "the model itself"
        )
    return value


def check_flag(name: str, value: Any) -> bool:
    """A plain True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _kind(value: Any) -> str:
    """A short description of a value; for an array its shape and dtype."""
    if getattr(value, "dtype", None) is not None:
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    plain = isinstance(value, (int, float, str, type(None)))
    return repr(value) if plain else type(value).__name__
