"""What a run returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpyro.infer import MCMC


class Run(NamedTuple):
    """What `run` returns.

    Attributes:
        mcmc: a copy of the MCMC that holds the draws; with a directory they are read from it when
            they are asked for, all at once. Its ``run`` goes on from the last state.
        idata: an ``arviz.InferenceData`` under ArviZ 0.2x, an ``xarray.DataTree`` under ArviZ 1.x;
            with a directory its values are read when they are asked for, chunk by chunk.
        num_draws: draws of each chain that there are.
        finished: whether these are all that were asked for.
    """

    mcmc: MCMC
    idata: Any
    num_draws: int
    finished: bool
