"""The user's starting points of chains, as positions of the chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from numpyro.infer.util import constrain_fn, unconstrain_fn

from .._checks import check_wide_enough

PyTree = Any


def as_position(
    init_params: Any,
    position: dict,
    model: Callable,
    args: tuple,
    kwargs: dict,
    *,
    batched: bool,
    constrained: bool,
) -> dict[str, jax.Array]:
    """The position that ``init_params`` describes.

    Args:
        init_params: values by site. The parameters of a module may be the module's nested dict:
            ``{"nn": {"Dense_0": {"kernel": ...}}}`` for the site ``nn/Dense_0.kernel``.
        position: position of the chain, or of all chains in one pytree; gives shapes and dtypes.
        model: the model with all sites.
        args: the model's arguments.
        kwargs: the model's keyword arguments.
        batched: whether leaves have a leading axis of chains.
        constrained: whether values are site values and not unconstrained values.

    Raises:
        TypeError: for values that are not floating point arrays.
        ValueError: for unknown sites, wrong shapes, and values outside of the support.
    """
    if not isinstance(init_params, Mapping):
        raise TypeError(
            f"init_params must be a dict of site values, got {type(init_params).__name__}: pass "
            f"one with the sites {sorted(position)}"
        )
    given = start = dict(_by_site(init_params))
    like = position
    if constrained:

        def values(z: dict) -> dict:
            return constrain_fn(model, args, kwargs, z)

        like = jax.eval_shape(jax.vmap(values) if batched else values, position)
    if constrained:  # draws contain deterministic sites as well
        given = start = {name: x for name, x in given.items() if name in like}
    _check(given, like, batched, constrained)
    if constrained:

        def back(x: dict) -> dict:
            with numpyro.validation_enabled(False):  # errors are reported below
                return unconstrain_fn(model, args, kwargs, x)

        start = {name: jnp.asarray(x) for name, x in given.items()}
        start = (jax.vmap(back) if batched else back)(start)
    for name, x in start.items():
        finite = jnp.all(jnp.isfinite(jnp.asarray(x)))
        if not isinstance(finite, jax.core.Tracer) and not bool(finite):
            problem = (
                "is not finite, or outside of the site's support"
                if constrained
                else ("is not finite")
            )
            inside = "values in the support" if constrained else "finite unconstrained values"
            raise ValueError(
                f"init_params[{name!r}] {problem}: expected {inside}, got {given[name]}"
            )
    return {name: jnp.asarray(start[name]).astype(x.dtype) for name, x in position.items()}


def _by_site(tree: Mapping) -> Iterator[tuple[str, Any]]:
    """Site names and values; a nested dict belongs to a module."""
    for name, value in tree.items():
        if not isinstance(value, Mapping):
            yield name, value
            continue
        module = value["params"] if [*value] == ["params"] else value
        for path, leaf in _leaves(module):
            yield f"{name}/{path}", leaf


def _leaves(tree: Mapping) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{path}", leaf) for path, leaf in _leaves(value))
        else:
            yield str(name), value


def _check(given: Mapping, like: Mapping, batched: bool, constrained: bool) -> None:
    missing, unknown = sorted(set(like) - set(given)), sorted(set(given) - set(like))
    if missing or unknown:
        raise ValueError(
            f"init_params does not match the latent sites {sorted(like)}: missing {missing}, "
            f"unknown {unknown}"
        )
    for name, expected in like.items():
        x = given[name]
        kind = None if x is None or isinstance(x, (list, tuple)) else jnp.result_type(x)
        if kind is None or not jnp.issubdtype(kind, jnp.floating):
            got = ("None" if x is None else type(x).__name__) if kind is None else f"dtype {kind}"
            raise TypeError(
                f"init_params[{name!r}] must be floating point, got {got}: convert it with "
                "jnp.asarray(x, float)"
            )
        check_wide_enough(f"init_params[{name!r}]", kind)
        if jnp.shape(x) != expected.shape:
            space = "" if constrained else "unconstrained "
            raise ValueError(
                f"init_params[{name!r}] has shape {jnp.shape(x)}, expected the {space}shape "
                f"{expected.shape}{' (chains first)' if batched else ''}"
            )
