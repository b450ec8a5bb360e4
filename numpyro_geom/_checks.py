"""Argument checks shared by constructors: typed errors that say what to do."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key


def check_number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None
) -> float:
    """A finite real number, strictly ``above`` or at ``least`` a bound."""
    if not _is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    value = value.item() if hasattr(value, "dtype") else value
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    bound = f"above {above:g}" if above is not None else f"at least {least:g}"
    too_small = (above is not None and number <= above) or (least is not None and number < least)
    if not math.isfinite(number) or too_small:
        raise ValueError(f"{name} must be a finite number {bound}, got {value!r}")
    return number


def check_int(name: str, value: Any, *, least: int = 1) -> int:
    """An integer that is at least ``least``."""
    try:
        number = operator.index(value)
    except TypeError:  # arrays have __index__, too
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(
            f"{name} must be an integer of at least {least}, got {value!r} of type "
            f"{type(value).__name__}"
        )
    if number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return number


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
    """A NumPyro model: a function that is not a kernel, guide or distribution."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}: pass a function")
    if isinstance(value, (MCMCKernel, Distribution)) or hasattr(value, "sample_posterior"):
        raise TypeError(
            f"{name} must be a NumPyro model, got a kernel, guide or distribution, "
            f"{type(value).__name__}: pass the model itself"
        )
    return value


def check_names(name: str, value: Any) -> list[str]:
    """A name or several, each once."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, Iterable) or isinstance(given, (jax.Array, np.ndarray)):
        given = [None]
    names = list(given)
    if not all(isinstance(n, str) for n in names):
        raise TypeError(f"{name} must be a name or a list of names, got {_kind(value)}")
    return list(dict.fromkeys(names))


def check_flag(name: str, value: Any) -> bool:
    """A plain True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    """Whether a value is a real number, or an array of shape () that holds one."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return np.shape(value) == () and is_real


def _kind(value: Any) -> str:
    """A short description of a value; for an array its shape and dtype."""
    if getattr(value, "dtype", None) is not None:
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    plain = isinstance(value, (int, float, str, type(None)))
    return repr(value) if plain else type(value).__name__
