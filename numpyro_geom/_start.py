"""Checks of batch sizes, of schedules, and of the starting points of chains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_int
from ._util import is_traced

PyTree = Any


def check_batch_size(batch_size: Any) -> int | dict[str, int] | None:
    """Rows per step: None, a positive integer, or one integer for each plate."""
    if batch_size is None:
        return None
    if isinstance(batch_size, Mapping):
        if not batch_size or not all(isinstance(p, str) for p in batch_size):
            raise TypeError(
                f"batch_size as a dict maps plate names to rows, got {dict(batch_size)!r}"
            )
        return {p: check_int(f"batch_size[{p!r}]", b) for p, b in batch_size.items()}
    return check_int("batch_size", batch_size)


def check_always_noisy(schedule: Any, what: str, other: str = "") -> None:
    """Raise if some steps of a schedule (None for ``"auto"``) have no noise.

    Args:
        schedule: the step sizes.
        what: the object that needs the noise; begins the message.
        other: a remedy besides ``explore=0``; ends the message.
    """
    if getattr(schedule, "explore", 0.0) > 0:
        raise ValueError(
            f"{what} needs noise at every step, and the explore phase of the schedule has none: "
            f"use explore=0{other}"
        )


def check_random(settings: Any, facts: Any) -> None:
    """Raise if a model that asks for keys would not get a new key at every step."""
    what = None
    if facts.adjusted:
        what, other = "a Metropolis test", "SGRLD, SGHMC or SGNHT without one"
    elif settings.control_variate is True:
        what, other = "control_variate=True", "control_variate=False"
    if what is not None:
        raise ValueError(
            f"the model asks for a random key (numpyro.prng_key, as dropout does), and {what} "
            f"needs the energy of all rows without it: use {other}, or leave the randomness out"
        )


def check_energy(name: str, energy: Any) -> None:
    """Raise unless ``energy`` is a single real number."""
    if not isinstance(energy, (jax.Array, np.ndarray, np.generic, float, int, complex)):
        raise ValueError(
            f"{name} must be a floating point scalar, got {energy!r} of type "
            f"{type(energy).__name__}: return the energy alone"
        )
    if jnp.shape(energy) != () or not jnp.issubdtype(jnp.result_type(energy), jnp.floating):
        raise ValueError(
            f"{name} must be a floating point scalar, got shape {jnp.shape(energy)} and dtype "
            f"{jnp.result_type(energy)}: sum over rows"
        )


def check_start(energy: jax.Array, on_all_rows: Any = 0.0) -> None:
    """Raise unless the energies at the start are finite: of a minibatch, and of all rows."""
    for value, what in ((energy, ""), (on_all_rows, " on all rows")):
        finite = jnp.all(jnp.isfinite(value))  # traced inside jit, even if value is not traced
        if not is_traced(finite) and not bool(finite):
            raise ValueError(
                f"the energy{what} is not finite where the chain starts (potential energy "
                f"{value}): check that the data are finite and in the support of the model, or "
                "pass other `init_params` or another `init_strategy`"
            )


def check_precision(position: PyTree) -> None:
    """Raise for 64-bit positions while 64-bit mode is off."""
    wide = any(x.dtype == jnp.float64 for x in jax.tree.leaves(position))
    if wide and not jax.config.read("jax_enable_x64"):
        raise TypeError(
            "the state is float64 and 64-bit mode is off: expected both alike, switch x64 on "
            "(`numpyro.enable_x64()`) or start a new run"
        )


def check_floating(position: PyTree) -> None:
    """Raise unless all leaves of a position are floating point numbers of at least 32 bits."""
    for leaf in jax.tree.leaves(position):
        kind = jnp.result_type(leaf)
        if not jnp.issubdtype(kind, jnp.floating):
            raise TypeError(
                f"positions must be floating point, got dtype {kind}: convert "
                "init_params with jnp.asarray(x, float)"
            )
        check_wide_enough("positions", kind)


def check_wide_enough(what: str, kind: Any) -> None:
    """Raise for bfloat16 and float16, in which rounding would lose the steps of a chain."""
    if jnp.dtype(kind).itemsize < 4:
        raise TypeError(
            f"{what} must have 32 bits or 64, got dtype {kind}, which rounds away what a step "
            "adds: convert with jnp.asarray(x, jnp.float32), and cast inside the model to compute "
            "in fewer bits, as in `x @ w.astype(jnp.bfloat16)`"
        )
