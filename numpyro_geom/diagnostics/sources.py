"""Draws from several sources: an MCMC that has run, an ArviZ object or a dict of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC

from .._numpyro import holding, sample_field, states_of
from .arrays import (
    Arrays,
    Scalars,
    as_array,
    entries,
    host,
    numeric,
    paths,
    stored_name,
    variables_of,
)
from .checks import LEAST_DRAWS

MOST_CHAINS = 10
"""A plain array with more than this many times as many chains as draws is an error: its first axis
is probably one of draws."""


def check_run(mcmc: Any) -> None:
    """Raise unless ``mcmc`` is an MCMC that has drawn something."""
    if not isinstance(mcmc, MCMC):
        raise TypeError(
            f"expected a numpyro.infer.MCMC, got {type(mcmc).__name__}: pass the object itself, "
            "not its draws"
        )
    if states_of(mcmc) is None:
        raise ValueError("the MCMC has not run: call `mcmc.run(rng_key, ...)` first")
    state = mcmc.last_state
    if state is not None and state is mcmc.post_warmup_state:  # as before a run is resumed
        draws = getattr(state, "i", None)
        if draws is not None and int(np.max(draws)) <= mcmc.num_warmup:
            raise ValueError(
                "the MCMC has only been warmed up and holds no draws of the posterior: call "
                "`mcmc.run(rng_key, ...)` first"
            )
    if not jax.tree.leaves(mcmc.get_samples(group_by_chain=True)):
        raise ValueError(
            "the run holds no draws of any site: do not exclude all of them in `extra_fields`"
        )


def draws_by_name(mcmc: MCMC) -> Arrays:
    """Draws of a run, shaped (chains, draws, ...); the leaves of a pytree are named by path."""
    return {name: host(x) for name, x in paths(mcmc.get_samples(group_by_chain=True), "z")}


def draws_of(source: Any) -> Arrays | None:
    """Draws by name, (chains, draws, ...), of an MCMC or an ArviZ object; None for others."""
    if isinstance(source, MCMC):
        check_run(source)
        return draws_by_name(source)
    return variables_of(source["posterior"]) if hasattr(source, "posterior") else None


def read_draws(source: Any, what: str) -> Arrays:
    """Numeric variables of a source, each (chains, draws, ...); errors call the source ``what``.

    A slash in a name becomes a dot, as in exports. A dict whose axis of chains seems to be one of
    draws is an error.
    """
    given = draws_of(source)
    if given is None and hasattr(source, "data_vars"):  # a group of an ArviZ object
        given = variables_of(source)
    known = given is not None
    if given is None:
        if not isinstance(source, Mapping):
            raise TypeError(
                f"{what} must be a run MCMC, an InferenceData or DataTree with a posterior, or a "
                f"dict of arrays (chains, draws, ...), got {type(source).__name__}"
            )
        given = {name: as_array(what, x) for name, x in source.items()}
    arrays = {stored_name(name): x for name, x in given.items()}
    if len(arrays) < len(given):
        raise ValueError(
            f"{what} must have names that differ after each slash becomes a dot, as in exports, "
            f"got {sorted(map(str, given))}"
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
    """Entries of all variables side by side: finite, of equal length, and enough draws."""
    lead = next(iter(arrays.values())).shape[:2]
    for name, x in arrays.items():
        if x.shape[:2] != lead:
            raise ValueError(
                f"{what} must have the same chains and draws for every variable, got {lead} and, "
                f"for {name!r}, {x.shape[:2]}"
            )
        if not np.all(np.isfinite(x)):
            raise ValueError(
                f"{what} has draws of {name!r} that are not finite ({np.sum(~np.isfinite(x))} "
                "values): look for undone or diverging steps, or leave it out by var_names"
            )
    if lead[0] < 1 or lead[1] < LEAST_DRAWS:
        raise ValueError(
            f"{what} must have at least {LEAST_DRAWS} draws per chain, which an effective sample "
            f"size needs, got {lead[0]} chains of {lead[1]}"
        )
    return entries(arrays)


def as_if_run(
    mcmc: MCMC,
    draws: Any,
    *args: Any,
    fields: Mapping[str, Any] | None = None,
    last_state: Any = None,
    **kwargs: Any,
) -> MCMC:
    """A copy of an MCMC as after ``run``, with draws that were made elsewhere.

    ``draws`` are the values of its ``sample_field``, and ``fields`` are the other fields of the
    state. All are shaped (chains, draws, ...). ``args`` and ``kwargs`` are the model's arguments.
    """
    states = {sample_field(mcmc): draws, **({} if fields is None else fields)}
    return holding(mcmc, (args, kwargs), states, last_state)
