"""Find arrays shorter than the plate that indexes them; JAX reads these without an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .arguments import by_name
from .jaxprs import followed

KEEPS = ("lt", "add", "select_n", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze")
"""Operations that JAX applies to row numbers before it gathers rows."""


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
    names = jax.tree.leaves({plate: plate for plate in rows})
    found: list[tuple[str, tuple, int]] = []

    def rows_of(equation: JaxprEqn, plates: list[str | None]) -> list[str | None]:
        """For each output the plate whose row numbers it holds, or None."""
        if equation.primitive.name == "gather" and plates[1] is not None:
            axes = equation.params["dimension_numbers"].start_index_map
            aval: Any = equation.invars[0].aval
            if len(axes) == 1:
                found.append((plates[1], aval.shape, aval.shape[axes[0]]))
        plate = next(x for x in plates if x is not None)
        return [plate if equation.primitive.name in KEEPS else None] * len(equation.outvars)

    followed(jax.make_jaxpr(run)(rows).jaxpr, names, rows_of, None)
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
