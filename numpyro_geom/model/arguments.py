"""Model arguments: host code reads their values, and traced row indices index them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._util import PyTree

_TRACED = (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError)


class HostArray(np.ndarray):
    """A NumPy array that JAX replaces by its copy on the device.

    For NumPy it is the array itself: `np.unique` and `int(x.max())` work within a trace. It is
    read-only, so that the array and its copy cannot differ.

    Attributes:
        device_value: the copy; None for an array that NumPy computed from a HostArray.
    """

    device_value: jax.Array | None = None

    @classmethod
    def of(cls, array: np.ndarray, device_value: jax.Array) -> HostArray:
        """A view of ``array`` with this copy."""
        new = array.view(cls)
        new.flags.writeable = False
        new.device_value = device_value
        return new

    def __jax_array__(self) -> jax.Array:
        value = self.device_value
        return jnp.asarray(self.view(np.ndarray)) if value is None else value

    def __getitem__(self, item: Any) -> Any:
        if any(isinstance(x, jax.Array) for x in (item if isinstance(item, tuple) else (item,))):
            return self.__jax_array__()[item]
        return super().__getitem__(item)


def on_device(args: tuple, kwargs: dict | None) -> tuple[tuple, dict]:
    """Model arguments whose NumPy arrays traced row indices can index."""
    return jax.tree.map(
        lambda x: HostArray.of(x, jnp.asarray(x)) if _is_plain(x) else x,
        (args, kwargs or {}),
    )


def split_arrays(tree: PyTree) -> tuple[list, Callable[[list], PyTree]]:
    """The arrays that compiled code can take, and a function that replaces them by others.

    For a `HostArray` this takes the copy on the device.
    """
    leaves, structure = jax.tree.flatten(tree)

    def is_array(x: Any) -> bool:
        if isinstance(x, jax.Array):
            return not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        return isinstance(x, HostArray) or _is_plain(x)

    places = [k for k, x in enumerate(leaves) if is_array(x)]

    def fill(arrays: list) -> PyTree:
        filled = list(leaves)
        for k, x in zip(places, arrays, strict=True):
            on_host = isinstance(leaves[k], HostArray)
            filled[k] = HostArray.of(leaves[k], x) if on_host else x
        return jax.tree.unflatten(structure, filled)

    return [without_host(leaves[k]) for k in places], fill


def without_host(tree: PyTree) -> PyTree:
    """A pytree with each `HostArray` replaced by its copy on the device."""
    return jax.tree.map(lambda x: x.__jax_array__() if isinstance(x, HostArray) else x, tree)


def reads_values(run: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether host code reads values of the arguments, so that the model fails without them.

    ``run(args, kwargs)`` runs the model abstractly, with arguments from `on_device`.
    """
    if not any(isinstance(x, HostArray) for x in jax.tree.leaves((args, kwargs))):
        return False
    arrays, fill = split_arrays(without_host((args, kwargs)))
    try:
        jax.eval_shape(lambda arrays: run(*fill(arrays)), arrays)
    except Exception:  # a user's model can raise anything
        return True
    return False


@contextmanager
def explained(model: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
    """Name the arguments that do not fit if the model fails by a type or an attribute."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        with suppress(ValueError):  # a model without a signature
            try:
                inspect.signature(model).bind(*args, **kwargs)
            except TypeError as misfit:
                raise TypeError(
                    f"the arguments do not fit the model: {misfit}. Expected the model's alone, as "
                    "in mcmc.run(rng_key, X, y), and settings in SGHMC(model, batch_size=...)"
                ) from error
        unusable = [
            f"{name!r} is a {_kind(x)}" for name, x in _named(model, args, kwargs) if not _fits(x)
        ]
        if unusable:
            raise TypeError(
                "the model needs arrays that JAX can index, and its argument "
                f"{', '.join(unusable)}: pass `np.asarray(x, float)`, of a sparse matrix "
                "`x.toarray()`, of a masked array `x.filled(value)` and `x.mask`"
            ) from error
        if isinstance(error, _TRACED):
            raise TypeError(
                "the model uses a NumPy array where JAX needs a JAX array: pass the array as an "
                "argument of the model, or use `jnp.asarray(array)`. Code for the host such as "
                "`np.unique` can read arguments, and nothing that is computed from sites"
            ) from error
        raise


WITHOUT_GRADIENT = {
    "requires real-valued outputs": "the energy of the model is complex: expected a real one. Pass "
    "real arguments, or let the density use `x.real`, `x.imag` or `jnp.abs(x)`",
    "callbacks do not support JVP": "the model calls the host by a callback without a derivative: "
    "expected one within a function of `jax.custom_jvp`, whose rule gives its derivative",
    "Reverse-mode differentiation does not work for": "the model has a `lax.while_loop`, or a "
    "`lax.fori_loop` with traced bounds, whose gradient JAX cannot take: expected a fixed number "
    "of steps. Use `lax.scan`, or a `fori_loop` with Python integers as bounds, or sample this "
    "model with `NUTS(model, forward_mode_differentiation=True)`",
}
"""What JAX says of a model without a gradient, and the remedy."""


@contextmanager
def differentiated() -> Iterator[None]:
    """Explain the remedy if the model has no gradient."""
    try:
        yield
    except (TypeError, ValueError) as error:
        for said, remedy in WITHOUT_GRADIENT.items():
            if said in str(error):
                raise type(error)(remedy) from error
        raise


def _is_plain(x: Any) -> bool:
    """Whether x is a NumPy array of numbers without a mask, and without a copy."""
    numbers = isinstance(x, np.ndarray) and x.dtype.kind in "biufc" and not np.ma.isMA(x)
    return numbers and getattr(x, "device_value", None) is None


def by_name(model: Callable | None, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by their names in the model's signature, where it has names for them."""
    try:
        return inspect.signature(model).bind_partial(*args).arguments | kwargs  # type: ignore
    except (TypeError, ValueError):
        return {f"args[{k}]": x for k, x in enumerate(args)} | kwargs


def _named(model: Callable, args: tuple, kwargs: dict) -> Iterator[tuple[str, Any]]:
    for name, value in by_name(model, args, kwargs).items():
        if isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", x) for key, x in value.items())
        else:
            yield name, value


def _fits(x: Any) -> bool:
    """Whether x is no table, sparse or masked array, list of numbers, or array of objects."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "OSU" and not np.ma.isMA(x)
    if isinstance(x, (list, tuple)):
        return not x or any(np.ndim(v) > 1 for v in x)
    return not (hasattr(x, "to_numpy") or hasattr(x, "tocsr"))


def _kind(x: Any) -> str:
    return f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}".removeprefix("builtins.")
