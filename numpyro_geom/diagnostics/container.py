"""Arrays as the groups of an ArviZ container, with names of dimensions and coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from .arrays import Arrays, stored_name
from .full_data import FullDataModel
from .run_record import RunRecord

SAMPLE_DIMS = ["chain", "draw"]


def container(datasets: dict[str, Any]) -> Any:
    """The object for the installed version of ArviZ; only this function knows the version."""
    import arviz  # slow to import, and only needed here

    if int(arviz.__version__.partition(".")[0]) >= 1:
        return xr.DataTree.from_dict(datasets)
    return arviz.InferenceData(**datasets)


class Labels:
    """Groups of arrays with names of dimensions and coordinates, from plates and from the user."""

    def __init__(
        self,
        groups: Mapping[str, Arrays],
        model: FullDataModel | None,
        coords: Mapping[str, Sequence] | None = None,
        dims: Mapping[str, Sequence[str | None]] | None = None,
    ) -> None:
        self._groups = groups
        self._sites, self._sizes = ({}, {}) if model is None else (model.sites, model.sizes)
        self._coords = {} if coords is None else coords
        self._dims = {} if dims is None else dims
        self._variables = {stored_name(name) for arrays in groups.values() for name in arrays}

    def datasets(self, run: RunRecord, created_at: str) -> dict[str, xr.Dataset]:
        """The groups that are not empty, as datasets; facts about the run are attributes."""
        created = {"created_at": created_at, **run.library}
        found = {
            group: self._dataset(group, arrays).assign_attrs(created)
            for group, arrays in self._groups.items()
            if arrays
        }
        found["posterior"].attrs.update(run.attributes)
        if run.scale is not None:
            found["sample_stats"]["inverse_mass_matrix"] = run.scale
        for name, text in run.descriptions.items():
            if name in run.sample_stats:
                found["sample_stats"][name].attrs["description"] = text
        return found

    def _axes(self, name: str, shape: tuple[int, ...], group: str) -> list[str]:
        """A name for every axis after those of chains and draws."""
        names: list[str | None] = [None] * len(shape)
        site = self._sites.get(name)
        has_events = group != "log_likelihood"
        if site is not None:
            rows = len(shape) - (site.event_dim if has_events else 0)
            for order, (plate, dim) in enumerate(site.plates):
                # the event axes of a deterministic site are unknown: assume that plates come first
                axis = order if site.kind == "deterministic" else rows + dim
                if 0 <= axis < len(shape) and shape[axis] == self._sizes[plate]:
                    taken = stored_name(plate) in {*self._variables, *SAMPLE_DIMS}
                    names[axis] = stored_name(plate) + ("_dim" if taken else "")
            if has_events and len(site.event_names) <= len(shape):
                names[len(shape) - len(site.event_names) :] = site.event_names
        given = list(self._dims.get(name, self._dims.get(stored_name(name), ())))
        if len(given) > len(shape) and has_events:
            raise ValueError(
                f"dims[{name!r}] names {len(given)} dimensions, and {name!r} in {group} has "
                f"{len(shape)} (after chain and draw): {shape}"
            )
        for axis, chosen in enumerate(given[: len(shape)]):
            names[axis] = names[axis] if chosen is None else chosen
        unnamed = iter(range(len(shape)))
        return [f"{stored_name(name)}_dim_{next(unnamed)}" if n is None else n for n in names]

    def _dataset(self, group: str, arrays: Arrays) -> xr.Dataset:
        """One group as a dataset with coordinates for all dimensions."""
        leading = [] if group.endswith("data") else SAMPLE_DIMS
        variables: dict[str, tuple[list[str], np.ndarray]] = {}
        sizes: dict[str, int] = {}
        for name, x in arrays.items():
            dims = leading + self._axes(name, x.shape[len(leading) :], group)
            for dim, size in zip(dims, x.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(
                        f"dimension {dim!r} has {size} entries in {name!r} and {sizes[dim]} "
                        f"elsewhere in {group}: give it another name in `dims`"
                    )
                if dim in self._variables:
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
            labels = np.asarray(self._coords.get(dim, np.arange(size)))
            if labels.shape != (size,):
                raise ValueError(
                    f"coords[{dim!r}] must have {size} labels, one for each entry of dimension "
                    f"{dim!r} in {group}, got shape {labels.shape}"
                )
            coords[dim] = labels
        return xr.Dataset(variables, coords, {"sample_dims": leading} if leading else {})
