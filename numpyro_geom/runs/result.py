"""What a run returns: an MCMC that holds the draws, and an ArviZ object."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpyro.infer import MCMC

from .describe import Names
from .store import DrawStore

PyTree = Any


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


class StoredMCMC(MCMC):
    """An MCMC whose draws are in a store and are read from it when they are asked for."""

    _store: DrawStore | None
    _names: Names
    _loaded: Any

    @classmethod
    def of(cls, mcmc: MCMC, store: DrawStore, names: Names) -> StoredMCMC:
        """A copy of ``mcmc`` with the draws of a store."""
        new = cls.__new__(cls)
        new.__dict__.update({n: x for n, x in vars(mcmc).items() if n != "_states"})
        new._store, new._names, new._loaded = store, names, None
        return new

    @property
    def _states(self) -> Any:
        if self._store is None:
            return self._loaded
        with self._store.open() as groups:
            return self._names.read(groups)

    @_states.setter
    def _states(self, states: Any) -> None:  # it has run by itself
        self._store, self._loaded = None, states


def finish(mcmc: MCMC, state: PyTree) -> MCMC:
    """With what it needs to go on without a warm-up."""
    mcmc._last_state = state
    mcmc.post_warmup_state = state
    return mcmc
