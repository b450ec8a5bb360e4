"""Array arguments of a model, by the names in its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .arrays import Arrays, host, is_numeric, paths
from .full_data import FullDataModel

MAX_CONSTANT_SIZE = 10**6
"""Largest number of entries of an array argument that is stored by default."""


def constants(model: FullDataModel | None, request: Any, observed: Arrays) -> Arrays:
    """Array arguments of the model by name, without those that are observed values."""
    if isinstance(request, Mapping):
        return {name: host(x) for name, x in request.items()}
    if request is not None and not isinstance(request, bool):
        raise TypeError(
            f"constant_data must be True, False, None or a dict, got {type(request).__name__}"
        )
    if request is False or model is None:
        return {}
    arguments = _arguments(model.fn, *model.fill(model.arrays))
    return {
        name: host(leaf)
        for name, leaf in paths(arguments, "", lambda x: not isinstance(x, (dict, list, tuple)))
        if is_numeric(leaf)
        and (request is True or leaf.size <= MAX_CONSTANT_SIZE)
        and not any(
            leaf.shape == y.shape and np.array_equal(host(leaf), y, equal_nan=y.dtype.kind == "f")
            for y in observed.values()
        )
    }


def _arguments(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names in the model's signature."""
    try:
        signature = inspect.signature(fn)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # there is no signature
        return dict(kwargs)
    found: dict[str, Any] = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found
