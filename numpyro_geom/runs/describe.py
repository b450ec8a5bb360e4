"""Converts segments of draws to the groups of an ArviZ container, and back."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import xarray as xr
from numpyro.infer import MCMC

from .._numpyro import holding, sample_field
from .._util import PyTree
from ..diagnostics.arrays import paths
from ..diagnostics.constants import constants
from ..diagnostics.container import Labels
from ..diagnostics.full_data import observed_values, read_model
from ..diagnostics.run_facts import facts_as_attributes
from ..diagnostics.run_record import record_of_mcmc, sample_stats
from ..kernel import SGKernel
from ..rows.host_rows import host_rows_in

Datasets = dict[str, xr.Dataset]


class Describer:
    """Names, dimensions and attributes of a run's draws, the same as in `to_inference_data`.

    Args:
        mcmc: the MCMC of the draws.
        arguments: the model's arguments, positional and by keyword.
        created_at: start time of the run, in ISO format.
    """

    def __init__(self, mcmc: MCMC, arguments: tuple, created_at: str) -> None:
        self._mcmc, self._arguments, self._created_at = mcmc, arguments, created_at
        self._static: dict[str, dict[str, np.ndarray]] | None = None
        self._model: Any = None

    def datasets(self, states: Mapping[str, PyTree], last_state: PyTree) -> Datasets:
        """Groups of an ArviZ container, from arrays of shape (chains, draws, ...) by field."""
        view = holding(self._mcmc, self._arguments, states, last_state)
        results = _quietly(record_of_mcmc, view)
        if self._static is None:
            observed = {}
            if results.model is not None:
                self._model = read_model(results.model, results.args, results.kwargs)
                # of rows in parts, each process lacks those of others
                in_parts = any(x.is_part for x in host_rows_in(self._arguments))
                observed = {} if in_parts else observed_values(self._model)
            given = constants(self._model, None, observed)
            self._static = {"observed_data": observed, "constant_data": given}
        groups = {
            "posterior": results.posterior,
            "sample_stats": results.sample_stats,
            **self._static,
        }
        # attributes that depend on the draws are set when all draws exist
        later = _quietly(facts_as_attributes, view) if _is_ours(view) else {}
        settings = {name: x for name, x in results.attributes.items() if name not in later}
        # the scale is not learned yet; the state of the chains will have it
        results = results._replace(attributes=settings, scale=None)
        return Labels(groups, self._model).datasets(results, self._created_at)

    def summarise(
        self, datasets: Datasets, states: Mapping[str, PyTree], last_state: PyTree
    ) -> None:
        """Set attributes that depend on all draws; ``states`` may lack the draws themselves."""
        if _is_ours(self._mcmc):
            states = {**states, sample_field(self._mcmc): {}}
            view = holding(self._mcmc, self._arguments, states, last_state)
            datasets["posterior"].attrs.update(facts_as_attributes(view))


def now() -> str:
    """The time in ISO format."""
    return datetime.datetime.now(datetime.UTC).isoformat()


def _is_ours(mcmc: MCMC) -> bool:
    return isinstance(mcmc.sampler, SGKernel)


def _quietly(function: Callable[[MCMC], Any], mcmc: MCMC) -> Any:
    """Call a function without warnings: before the first segment, all draws are zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return function(mcmc)


class Names:
    """The place of each field of the state in an ArviZ container.

    The places are found by exporting one draw in which every entry has a different number. So they
    are right for any names that the export chooses. A field that the export leaves out has no
    place. ``shapes`` are a segment's shapes by field, the field of the draw first.
    """

    def __init__(self, mcmc: MCMC, shapes: Mapping[str, PyTree]) -> None:
        self.shapes = shapes
        field, *others = shapes
        self.draw = [(name, leaf) for name, leaf in paths(shapes[field], "z")]
        leaves, structure = jax.tree.flatten({name: shapes[name] for name in others})
        # not integers, because the export might produce the same integers
        marks = [np.full((1, 1), k + 0.5) for k in range(len(leaves))]
        fields: dict[str, PyTree] = jax.tree.unflatten(structure, marks)
        view = holding(mcmc, ((), {}), {field: {}, **fields})
        found = {float(x.ravel()[0]): name for name, x in sample_stats(view).items()}
        self.stats: dict[str, list[tuple[str, int]]] = {
            name: [
                (found[sign * float(mark[0, 0])], sign)
                for mark in jax.tree.leaves(fields[name])
                for sign in (1, -1)
                if sign * float(mark[0, 0]) in found
            ]
            for name in others
        }

    def read(self, groups: Any, *, all_of_them: bool = True) -> dict[str, PyTree]:
        """Fields of all draws, (chains, draws, ...); or only those with one number per draw."""
        found: dict[str, PyTree] = {}
        field, *others = self.shapes
        if all_of_them:
            found[field] = self.read_draws(groups["posterior"])
        for name in others:
            leaves, structure = jax.tree.flatten(self.shapes[name])
            if not all_of_them and any(len(leaf.shape) > 2 for leaf in leaves):
                continue
            if len(leaves) == len(self.stats[name]):
                values = []
                for (variable, sign), leaf in zip(self.stats[name], leaves, strict=True):
                    value = _read(groups["sample_stats"], variable, leaf)
                    values.append(-value if sign < 0 else value)
                found[name] = jax.tree.unflatten(structure, values)
        return found

    def read_draws(self, posterior: Any) -> PyTree:
        """The draws themselves, shaped (chains, draws, ...)."""
        field, *_ = self.shapes
        leaves = [_read(posterior, name, leaf) for name, leaf in self.draw]
        return jax.tree.unflatten(jax.tree.structure(self.shapes[field]), leaves)


def _read(group: Any, name: str, like: Any) -> np.ndarray:
    return np.asarray(group[name.replace("/", ".")].values).astype(like.dtype)
