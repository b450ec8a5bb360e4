"""Find arrays shorter than the plate that indexes them; JAX reads these without an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from .arguments import by_name

KEEPS = ("lt", "add", "select_n", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze")
"""Operations that JAX applies to row numbers before it gathers rows."""
CALLS = ("jit", "pjit")


def check_lengths(
    model: Callable,
    args: tuple,
    kwargs: dict,
    sizes: Mapping[str, int],
    run: Callable[[dict[str, jax.Array]], None],
) -> None:
    """Raise if rows of a plate index an array that has fewer rows.

    Args:
        model: the user's model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        sizes: sizes of the plates.
        run: runs the model with the given rows in its plates.

    Raises:
        ValueError: with the plate, the array, and the model argument that the array may be.
    """
    rows = {plate: jax.ShapeDtypeStruct((size,), jnp.int32) for plate, size in sizes.items()}
    traced = jax.make_jaxpr(run)(rows).jaxpr
    names = jax.tree.leaves({plate: plate for plate in rows})
    found: list[tuple[str, tuple, int]] = []
    _follow(traced, dict(zip(traced.invars, names, strict=True)), found)
    for plate, shape, length in found:
        if length < sizes[plate]:
            named = by_name(model, args, kwargs)
            same = [name for name, x in named.items() if getattr(x, "shape", None) == shape]
            which = f", such as the argument {same[0]!r}" if same else ""
            raise ValueError(
                f"the rows of plate {plate!r} index an array of shape {shape}{which}, and the "
                f"plate has {sizes[plate]} rows: expected one entry per row. JAX reads the "
                "last entry in the place of one that is missing, without an error"
            )


def _follow(jaxpr: Jaxpr, plates: Mapping[Any, str], found: list) -> list[str | None]:
    """Find arrays that row numbers of plates index: plate, shape, and length of the indexed axis.

    Args:
        jaxpr: program of the model.
        plates: variable that holds row numbers -> name of its plate.
        found: a list to which the arrays are added.

    Returns:
        For each output the plate whose row numbers it holds, or None.
    """
    known = dict(plates)

    def plate_of(x: Any) -> str | None:
        return None if isinstance(x, Literal) else known.get(x)

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [plate_of(x) for x in equation.invars]
        plate = next((x for x in inputs if x is not None), None)
        if plate is None:
            continue
        if name == "gather" and inputs[1] is not None:
            axes = equation.params["dimension_numbers"].start_index_map
            aval: Any = equation.invars[0].aval
            shape = aval.shape
            if len(axes) == 1:
                found.append((inputs[1], shape, shape[axes[0]]))
        elif name in CALLS:
            inner = equation.params["jaxpr"].jaxpr
            given = {x: p for x, p in zip(inner.invars, inputs, strict=True) if p is not None}
            outputs = _follow(inner, given, found)
            known.update({x: p for x, p in zip(equation.outvars, outputs, strict=True) if p})
        elif name in KEEPS:
            known.update(dict.fromkeys(equation.outvars, plate))
    return [plate_of(x) for x in jaxpr.outvars]
