"""Arrays as the groups of an ArviZ container, with names of dimensions and coordinates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from .arrays import Arrays, stored_name
from .full_data import FullDataModel

SAMPLE_DIMS = ["chain", "draw"]


def container(datasets: dict[str, Any]) -> Any:
    """The one place that knows the lines of ArviZ: what the installed one works on."""
    import arviz  # slow to import, and only needed here

    if int(arviz.__version__.partition(".")[0]) >= 1:
        return xr.DataTree.from_dict(datasets)
    return arviz.InferenceData(**datasets)


class Labels:
    """Names of dimensions and their coordinates, from plates and from the user."""

    def __init__(
        self,
        model: FullDataModel | None,
        coords: Mapping[str, Sequence] | None,
        dims: Mapping[str, Sequence[str | None]] | None,
        variables: Collection[str],
    ) -> None:
        self.sites = {} if model is None else model.sites
        self.sizes = {} if model is None else model.sizes
        self.coords = {} if coords is None else coords
        self.dims = {} if dims is None else dims
        self.variables = {stored_name(name) for name in variables}

    def plate(self, name: str) -> str:
        """The dimension of a plate."""
        taken = self.variables | set(SAMPLE_DIMS)
        return f"{stored_name(name)}_dim" if stored_name(name) in taken else stored_name(name)

    def axes(self, name: str, shape: tuple[int, ...], group: str) -> list[str]:
        """A name for every axis after those of chains and draws."""
        names: list[str | None] = [None] * len(shape)
        site = self.sites.get(name)
        has_events = group != "log_likelihood"
        if site is not None:
            rows = len(shape) - (site.event_dim if has_events else 0)
            for order, (plate, dim) in enumerate(site.plates):
                # which axes of a deterministic site are events is not known: plates come first
                axis = order if site.kind == "deterministic" else rows + dim
                if 0 <= axis < len(shape) and shape[axis] == self.sizes[plate]:
                    names[axis] = self.plate(plate)
            if has_events and len(site.event_names) <= len(shape):
                names[len(shape) - len(site.event_names) :] = site.event_names
        given = list(self.dims.get(name, self.dims.get(stored_name(name), ())))
        if len(given) > len(shape) and has_events:
            raise ValueError(
                f"dims[{name!r}] names {len(given)} dimensions, and {name!r} in {group} has "
                f"{len(shape)} (after chain and draw): {shape}"
            )
        for axis, chosen in enumerate(given[: len(shape)]):
            names[axis] = names[axis] if chosen is None else chosen
        unnamed = iter(range(len(shape)))
        return [f"{stored_name(name)}_dim_{next(unnamed)}" if n is None else n for n in names]

    def dataset(self, group: str, arrays: Arrays, attrs: dict[str, Any]) -> xr.Dataset:
        """One group as a dataset with coordinates for all dimensions."""
        leading = [] if group.endswith("data") else SAMPLE_DIMS
        variables: dict[str, tuple[list[str], np.ndarray]] = {}
        sizes: dict[str, int] = {}
        for name, x in arrays.items():
            dims = leading + self.axes(name, x.shape[len(leading) :], group)
            for dim, size in zip(dims, x.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(
                        f"dimension {dim!r} has {size} entries in {name!r} and {sizes[dim]} "
                        f"elsewhere in {group}: give it another name in `dims`"
                    )
                if dim in self.variables:
                    raise ValueError(
                        f"dims[{name!r}] names a dimension {dim!r}, which is a variable: expected "
                        "another name"
                    )
            if stored_name(name) in variables:
                raise ValueError(
                    f"two variables of {group} are called {stored_name(name)!r}, in which '/' and "
                    "'.' are one: rename a site"
                )
            variables[stored_name(name)] = (dims, x)
        coords = {}
        for dim, size in sizes.items():
            labels = np.asarray(self.coords.get(dim, np.arange(size)))
            if labels.shape != (size,):
                raise ValueError(
                    f"coords[{dim!r}] must have {size} labels, one for each entry of dimension "
                    f"{dim!r} in {group}, got shape {labels.shape}"
                )
            coords[dim] = labels
        if leading:
            attrs = {**attrs, "sample_dims": leading}
        return xr.Dataset(variables, coords, attrs)
