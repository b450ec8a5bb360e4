"""Argument checks shared by constructors: typed errors that say what to do."""

from __future__ import annotations

import math
from typing import Any

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


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of a few names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")
    return value


def check_key(name: str, value: Any) -> Any:
    """A single random key."""
    if not is_prng_key(value):
        raise TypeError(f"{name} must be a single key, such as jax.random.key(0), got {value!r}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """A plain True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value
