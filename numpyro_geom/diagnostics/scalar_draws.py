"""Draws as a table of scalars, from whatever holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .arrays import Arrays, entry_names, numeric, stored_name
from .checks import LEAST_DRAWS
from .finished_mcmc import draws_of

MOST_CHAINS = 10
"""Times as many chains as draws: in a plain array that is rather draws of a vector."""


class Scalars(NamedTuple):
    """Draws of scalars.

    Attributes:
        names: of the scalars, ``w[0, 1]`` for an entry of an array.
        values: shape (chains, draws, scalars), float64.
    """

    names: tuple[str, ...]
    values: np.ndarray

    def keep(self, flags: Sequence[bool] | np.ndarray) -> Scalars:
        """Those that are flagged."""
        return Scalars(named(self.names, flags), self.values[..., np.asarray(flags)])


def named(names: Sequence[str], flags: Sequence[bool] | np.ndarray) -> tuple[str, ...]:
    """Names that are flagged."""
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


def read_draws(source: Any, what: str) -> Arrays:
    """Numeric variables of a run by name, each of shape (chains, draws, ...).

    Args:
        source: a run MCMC, an InferenceData or DataTree with a posterior, a Dataset of such, or a
            dict of arrays. A slash in a name becomes a dot, as in exports.
        what: its name, for errors.

    Raises:
        TypeError: for anything else.
        ValueError: for a run without draws, for arrays without both leading axes, and for dicts
            of arrays whose axis of chains seems to be one of draws.
    """
    given = draws_of(source)
    known = given is not None
    if given is None:
        if not isinstance(source, Mapping):
            raise TypeError(
                f"{what} must be a run MCMC, an InferenceData or DataTree with a posterior, or a "
                f"dict of arrays (chains, draws, ...), got {type(source).__name__}"
            )
        given = {name: np.asarray(x) for name, x in source.items()}
    arrays = {stored_name(name): x for name, x in given.items()}
    if len(arrays) < len(given):
        raise ValueError(
            f"{what} must have names that differ once each slash is a dot, as exports have it, got "
            f"{sorted(map(str, given))}"
        )
    for name, x in arrays.items():
        if x.ndim < 2:
            problem = f"got {name!r} of shape {x.shape}"
        elif not known and x.shape[0] > MOST_CHAINS * x.shape[1]:
            problem = (
                f"and {name!r} of shape {x.shape} would be {x.shape[0]} chains of {x.shape[1]}"
            )
        else:
            continue
        raise ValueError(
            f"{what} must have arrays of shape (chains, draws, ...), {problem}: use "
            "`mcmc.get_samples(group_by_chain=True)`, or x[None] for one chain"
        )
    return numeric(arrays)


def to_scalars(arrays: Mapping[str, np.ndarray], what: str) -> Scalars:
    """Entries of all variables side by side.

    Raises:
        ValueError: for values that are not finite, for too few draws, and for variables whose
            numbers of chains or draws differ.
    """
    names: list[str] = []
    columns = []
    lead = next(iter(arrays.values())).shape[:2]
    for name, x in arrays.items():
        if x.shape[:2] != lead:
            raise ValueError(
                f"{what} must have as many chains and draws of every variable, got {lead} and, "
                f"for {name!r}, {x.shape[:2]}"
            )
        if not np.all(np.isfinite(x)):
            raise ValueError(
                f"{what} has draws of {name!r} that are not finite ({np.sum(~np.isfinite(x))} "
                "values): look for undone or diverging steps, or leave it out by var_names"
            )
        names.extend(entry_names(name, x.shape[2:]))
        columns.append(x.reshape(*lead, -1).astype(np.float64))
    if lead[0] < 1 or lead[1] < LEAST_DRAWS:
        raise ValueError(
            f"{what} must have at least {LEAST_DRAWS} draws a chain, which an effective sample "
            f"size needs, got {lead[0]} chains of {lead[1]}"
        )
    return Scalars(tuple(names), np.concatenate(columns, axis=-1))
