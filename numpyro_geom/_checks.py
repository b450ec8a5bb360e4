"""Checks of arguments and of positions: typed errors that say what to do."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import operator
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import Distribution
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from ._util import PyTree, are_known


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float = math.inf,
) -> float:
    """A finite real number, strictly ``above`` or at ``least`` a bound, and ``below`` another."""
    if not _is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    value = value.item() if hasattr(value, "dtype") else value
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    bound = f"above {above:g}" if above is not None else f"at least {least:g}"
    bound += f" and below {below:g}" if below < math.inf else ""
    too_small = (above is not None and number <= above) or (least is not None and number < least)
    if not math.isfinite(number) or too_small or number >= below:
        raise ValueError(f"{name} must be a finite number {bound}, got {value!r}")
    return number


check_share = functools.partial(check_number, least=0.0, below=1.0)
"""A number in [0, 1)."""


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
    if not least <= number < 2**63:
        expected = f"of at least {least}" if number < least else "below 2^63"
        raise ValueError(f"{name} must be an integer {expected}, got {value!r}")
    return number


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
    """A function, such as a NumPyro model, that is not a kernel, guide or distribution."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}: pass a function")
    if isinstance(value, (MCMCKernel, Distribution)) or hasattr(value, "sample_posterior"):
        raise TypeError(
            f"{name} must be a function, got a kernel, guide or distribution, "
            f"{type(value).__name__}: pass the {name} itself"
        )
    return value


def check_strategy(name: str, value: Any) -> Any:
    """A strategy for where chains and searches start."""
    if not callable(value):
        raise TypeError(
            f"{name} must be one of numpyro.infer's, such as init_to_median, got {value!r}"
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


# Arguments of other samplers, and classes in place of kernels

OF_MCMC = ("num_warmup", "num_samples", "num_chains", "thinning", "chain_method", "progress_bar")
OF_RUN = ("init_params", "extra_fields", "rng_key")


def check_arguments(cls: type, args: tuple, arguments: Mapping[str, Any]) -> None:
    """Raise for arguments that a class's constructor does not have.

    Raises:
        TypeError: for an unknown name, and for too many positional arguments.
    """
    parameters = inspect.signature(cls).parameters
    kinds = [p.kind for p in parameters.values()]
    places = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(places) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise TypeError(
            f"{cls.__name__} takes {len(places)} positional argument{'s' * (len(places) > 1)}, "
            f"{' and '.join(places)}, got {len(args)}: pass the others by name, such as "
            f"{next(n for n in parameters if n not in places)}=..."
        )
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    own = list(parameters)
    for name in arguments:
        if name in own:
            continue
        close = difflib.get_close_matches(name, own, n=1, cutoff=0.7)
        remedy = f"did you mean {close[0]!r}?" if close else f"expected some of {own}"
        if issubclass(cls, MCMCKernel) and name in (*OF_MCMC, *OF_RUN):
            remedy = f"pass it to {'MCMC(kernel, ...)' if name in OF_MCMC else 'mcmc.run'}"
        raise TypeError(f"{cls.__name__} got an unexpected keyword argument {name!r}: {remedy}")


class FirstAsked(property):
    """The property that `MCMC` reads first. Read from a class, it raises an error with advice."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The value, if there is an instance."""
        if instance is None:
            name = getattr(owner, "__name__", owner)
            raise AttributeError(
                f"expected a kernel, got the class {name}: make one with a model, as in "
                f"MCMC({name}(model), num_warmup=1000, num_samples=1000)"
            )
        return super().__get__(instance, owner)


# Where chains start


def check_energy(name: str, energy: Any) -> None:
    """Raise unless ``energy`` is a single real number."""
    known = isinstance(energy, (jax.Array, np.ndarray, np.generic, float))
    if not known or np.shape(energy) or not jnp.issubdtype(jnp.result_type(energy), jnp.floating):
        raise ValueError(
            f"{name} must be a floating point scalar, got {_kind(energy)}: return the energy "
            "alone, summed over rows"
        )


def check_start(energy: jax.Array, on_all_rows: Any = 0.0) -> None:
    """Raise unless the energies at the start are finite: of a minibatch, and of all rows."""
    for value, what in ((energy, ""), (on_all_rows, " on all rows")):
        if are_known(value) and not np.all(np.isfinite(value)):
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


# The warning about misleading draws, and the line of the user's code that it points to


class SamplingWarning(UserWarning):
    """The draws may be wrong or too few; the message says what to do."""


def warn_outside(message: str, category: type[Warning] = SamplingWarning) -> None:
    """Warn at the user's line: outside of this package, NumPyro and JAX."""
    warnings.warn(message, category, stacklevel=_outside())


def _outside() -> int:
    """Stack level of the user's line that led here, seen from `warn_outside`."""
    # context managers and cached properties add a frame of these modules in between
    files = __file__, numpyro.__file__, jax.__file__
    inside = *map(os.path.dirname, files), contextlib.__file__, functools.__file__
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level
