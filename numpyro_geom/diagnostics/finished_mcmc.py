"""What a `numpyro.infer.MCMC` that has run holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC

from .._mcmc import holding, sample_field, states_of
from .arrays import Arrays, host, paths, variables_of


def check_run(mcmc: Any) -> None:
    """Raise unless ``mcmc`` is an MCMC that has drawn something.

    Raises:
        TypeError: if it is not a `numpyro.infer.MCMC`.
        ValueError: if it has no draws.
    """
    if not isinstance(mcmc, MCMC):
        raise TypeError(
            f"expected a numpyro.infer.MCMC, got {type(mcmc).__name__}: pass the object itself, "
            "not its draws"
        )
    if states_of(mcmc) is None:
        raise ValueError("the MCMC has not run: call `mcmc.run(rng_key, ...)` first")
    state = mcmc.last_state
    if state is not None and state is mcmc.post_warmup_state:  # so it is before a run is resumed
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


def draws_of(source: Any) -> Arrays | None:
    """Draws by name, shaped (chains, draws, ...), of a run MCMC, an ArviZ object or a Dataset.

    The leaves of a pytree are named by path. None for a source of another kind.
    """
    if isinstance(source, MCMC):
        check_run(source)
        return {name: host(x) for name, x in paths(source.get_samples(group_by_chain=True), "z")}
    dataset = source["posterior"] if hasattr(source, "posterior") else source
    return variables_of(dataset) if hasattr(dataset, "data_vars") else None


def as_if_run(
    mcmc: MCMC,
    draws: Any,
    *args: Any,
    fields: Mapping[str, Any] | None = None,
    last_state: Any = None,
    **kwargs: Any,
) -> MCMC:
    """A copy of an MCMC as `run` would have left it, with draws that were made elsewhere.

    Args:
        mcmc: which is not changed.
        draws: what its kernel's ``sample_field`` would hold, shaped (chains, draws, ...).
        args: the model's arguments.
        fields: the other fields that were collected, shaped likewise.
        last_state: the chains' state after them.
        kwargs: the model's keyword arguments.
    """
    states = {sample_field(mcmc): draws, **({} if fields is None else fields)}
    return holding(mcmc, (args, kwargs), states, last_state)
