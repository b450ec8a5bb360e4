"""What is to be run, how many steps and draws that is, and what a run returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from numpyro.infer import MCMC

from .._util import PyTree


class Job(NamedTuple):
    """What is to be run, as for ``mcmc.run``.

    Attributes:
        mcmc: kernel, lengths and chains.
        rng_key: a key, or one for each chain.
        args: the model's arguments.
        kwargs: its keyword arguments.
        extra_fields: fields of the state to keep besides those that the kernel names.
        init_params: where the chains start, or None.
    """

    mcmc: MCMC
    rng_key: jax.Array
    args: tuple = ()
    kwargs: dict[str, Any] = {}
    extra_fields: tuple[str, ...] = ()
    init_params: PyTree = None

    @property
    def num_draws(self) -> int:
        """Draws to keep of each chain."""
        return self.mcmc.num_samples // self.mcmc.thinning


class Lengths(NamedTuple):
    """How a run is cut into segments, those of warm-up first.

    Attributes:
        num_warmup: steps of warm-up, calls of ``kernel.sample``.
        num_draws: draws to keep of each chain.
        thinning: steps a draw.
        length: draws a segment.
    """

    num_warmup: int
    num_draws: int
    thinning: int
    length: int

    @property
    def warmup_segments(self) -> int:
        """Segments of warm-up."""
        return -(-self.num_warmup // (self.length * self.thinning))

    @property
    def segments(self) -> int:
        """All segments."""
        return self.warmup_segments - (-self.num_draws // self.length)

    def draws(self, done: int) -> int:
        """Draws of each chain after so many segments."""
        return min(max(0, done - self.warmup_segments) * self.length, self.num_draws)

    def steps(self, done: int) -> int:
        """Steps after so many segments."""
        warmup = min(done * self.length * self.thinning, self.num_warmup)
        return warmup + self.draws(done) * self.thinning


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
