"""What to run, its numbers of steps and draws, and the result of a run."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from numpyro.infer import MCMC

from .._util import PyTree


class Job(NamedTuple):
    """What to run, with the arguments of ``mcmc.run``.

    Attributes:
        mcmc: kernel, lengths and chains.
        rng_key: a key, or one for each chain.
        args: the model's arguments.
        kwargs: its keyword arguments.
        extra_fields: fields of the state to keep, in addition to those that the kernel names.
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
        """Number of draws to keep of each chain."""
        return self.mcmc.num_samples // self.mcmc.thinning


class Lengths(NamedTuple):
    """How a run is cut into segments; those of warm-up come first.

    Attributes:
        num_warmup: steps of warm-up, calls of ``kernel.sample``.
        num_draws: number of draws to keep of each chain.
        thinning: steps per draw.
        length: draws per segment.
    """

    num_warmup: int
    num_draws: int
    thinning: int
    length: int

    @property
    def warmup_segments(self) -> int:
        """Number of segments of warm-up."""
        return -(-self.num_warmup // (self.length * self.thinning))

    @property
    def segments(self) -> int:
        """Number of all segments."""
        return self.warmup_segments - (-self.num_draws // self.length)

    def draws(self, done: int) -> int:
        """Number of draws of each chain after ``done`` segments."""
        return min(max(0, done - self.warmup_segments) * self.length, self.num_draws)

    def steps(self, done: int) -> int:
        """Number of steps after ``done`` segments."""
        warmup = min(done * self.length * self.thinning, self.num_warmup)
        return warmup + self.draws(done) * self.thinning


class Run(NamedTuple):
    """What `run` returns.

    Attributes:
        mcmc: a copy of the MCMC that holds the draws. With a directory, all draws are read from it
            when they are first requested. The method ``run`` of this MCMC continues from the last
            state.
        idata: an ``arviz.InferenceData`` under ArviZ 0.2x, an ``xarray.DataTree`` under ArviZ 1.x.
            With a directory, values are read chunk by chunk when they are requested.
        num_draws: number of draws of each chain so far.
        finished: whether the run has all requested draws.
    """

    mcmc: MCMC
    idata: Any
    num_draws: int
    finished: bool
