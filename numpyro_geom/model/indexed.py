"""Checks that a model uses the indices of a plate of which only some rows are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpyro.infer.inspect import get_dependencies

from .abstract import abstract_trace
from .minibatch import Subsampling


def check_indexed(
    model: Callable, args: tuple, kwargs: dict, subsampling: Subsampling, plate: str
) -> None:
    """Run the model abstractly on two rows, and find observed sites that do not follow the plate.

    A site may have kept all rows, or may have the rows on a second axis, too. The check uses two
    rows for any batch size, because with one row a site that ignores the indices would broadcast
    silently. A plate of two rows cannot be told from its subsample.
    """
    size, probe = subsampling.sizes[plate], 2
    if size <= probe:
        return

    def complain(name: str, cause: Exception | None = None) -> None:
        raise ValueError(
            f"site {name!r} is not indexed by plate {plate!r}: with {probe} of its {size} rows "
            "drawn, the site still has other shapes. Index every array that has one entry per "
            f"row: `with numpyro.plate({plate!r}, {size}) as i:` and then `X[i]`, `obs=y[i]` "
            "(guard `y is None`), or use `numpyro.subsample`; or run without batch_size"
        ) from cause

    try:
        trace, _ = abstract_trace(model, args, kwargs, {plate: probe})
    except (TypeError, ValueError) as error:
        seen = getattr(error, "trace", {})
        # sites run in a fixed order, so the first missing site is where the run failed
        broken = next(
            (s.name for s in subsampling.sites if s.name not in seen and plate in dict(s.plates)),
            None,
        )
        if broken is None:
            raise
        complain(broken, error)
    twice: list[tuple[str, int]] = []
    for site in _observed_in(plate, trace):
        dims = {frame.name: frame.dim for frame in site["cond_indep_stack"]}
        dim, rows = dims[plate], _rows_of_values(site)
        shapes = [jnp.shape(1.0 if site["scale"] is None else site["scale"])]
        auxiliary = site["infer"].get("is_auxiliary", False)
        if rows != tuple(site["fn"].batch_shape) and not auxiliary:
            shapes.append(rows)
        if any(len(shape) >= -dim and shape[dim] not in (1, probe) for shape in shapes):
            complain(site["name"])
        terms = _shape_of_terms(site)
        others = set(range(-len(terms), 0)) - set(dims.values())
        twice += [(site["name"], axis) for axis in others if terms[axis] == probe]
    if not twice or size <= probe + 1:
        return
    # an axis of length two may have another reason, but then it stays
    again, _ = abstract_trace(model, args, kwargs, {plate: probe + 1})
    for name, axis in twice:
        if _shape_of_terms(again[name])[axis] == probe + 1:
            raise ValueError(
                f"the rows of plate {plate!r} are on two axes of site {name!r}, on the plate's "
                f"own and on axis {axis}: every pair of rows would count. Expected values of the "
                "shape that the plate's dim asks for, such as `obs=y[i][:, None]` for dim=-2"
            )


def check_values(trace: Mapping[str, Any]) -> None:
    """Raise for observed values that have an axis more or fewer than the plates of their site.

    NumPyro would broadcast them, and every pair of rows would count. A single number may stand for
    all rows.

    Args:
        trace: of the model on all rows, with values or their shapes.
    """
    for site in trace.values():
        if site["type"] != "sample" or not site["is_observed"] or not site["cond_indep_stack"]:
            continue
        rows, expected = _rows_of_values(site), tuple(site["fn"].batch_shape)
        if not rows or site["infer"].get("is_auxiliary", False):
            continue
        try:
            wider = np.broadcast_shapes(rows, expected) != expected
        except ValueError:
            wider = True
        plates = {frame.name: frame.size for frame in site["cond_indep_stack"]}
        lacking = any(
            frame.size > 1 and (len(rows) < -frame.dim or rows[frame.dim] == 1)
            for frame in site["cond_indep_stack"]
        )
        if wider and lacking:  # columns beside the axis of a plate are independent values
            raise ValueError(
                f"the observed values of site {site['name']!r} have rows of shape {rows}, and its "
                f"plates {plates} ask for {expected}: every pair of rows would count. Expected one "
                "value for each row: pass `y[:, 0]` or `y[..., None]` in place of y, or make an "
                "axis a part of the value by `.to_event(1)` on the distribution"
            )


def _observed_in(plate: str, trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Observed sites in a plate."""
    return [
        site
        for site in trace.values()
        if site["type"] == "sample"
        and site["is_observed"]
        and any(frame.name == plate for frame in site["cond_indep_stack"])
    ]


def _rows_of_values(site: dict[str, Any]) -> tuple[int, ...]:
    """Shape of a site's values without the axes of events."""
    value = jnp.shape(site["value"])
    return tuple(value[: len(value) - site["fn"].event_dim])


def _shape_of_terms(site: dict[str, Any]) -> tuple[int, ...]:
    """Shape of a site's log density; of its distribution alone, if the values do not fit."""
    batch_shape = tuple(site["fn"].batch_shape)
    try:
        return np.broadcast_shapes(_rows_of_values(site), batch_shape)
    except ValueError:
        return batch_shape


def check_local(model: Callable, args: tuple, kwargs: dict, subsampling: Subsampling) -> None:
    """Raise if latent rows of a subsampled plate are used outside this plate."""
    depends = get_dependencies(model, args, kwargs)["prior_dependencies"]
    plates = {s.name: dict(s.plates) for s in subsampling.sites}
    for name, upstream in depends.items():
        for latent in upstream:
            for plate, _ in subsampling.local_axes.get(latent, ()):
                if plate not in plates.get(name, {plate: 0}):
                    raise ValueError(
                        f"latent site {latent!r} has rows in the subsampled plate {plate!r}, and "
                        f"site {name!r} depends on it outside of that plate: it would see only the "
                        f"drawn rows. Move {name!r} into the plate, or do not subsample it"
                    )
