"""How a run is cut into segments, and how one of them is done."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import MCMC

from ..bound import on_device
from ..diagnostics.summary import _outside
from .fingerprint import differences, fingerprint
from .mesh import Layout
from .processes import Alone, Together
from .progress import Progress
from .segments import Segments

PyTree = Any


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
    args: tuple
    kwargs: dict[str, Any]
    extra_fields: tuple[str, ...]
    init_params: PyTree

    def for_readers(self, layout: Layout | None) -> tuple[tuple, dict[str, Any]]:
        """Arguments for a model that is run as it is: NumPy arrays need not do on a mesh alone."""
        data = self.args, self.kwargs
        return data if layout is None else on_device(*data)


class Plan(NamedTuple):
    """How a run is cut into segments.

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

    @classmethod
    def of(cls, mcmc: MCMC, length: int) -> Plan:
        """For the lengths that an MCMC was given."""
        return cls(mcmc.num_warmup, mcmc.num_samples // mcmc.thinning, mcmc.thinning, length)

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


class Done(NamedTuple):
    """A segment.

    Attributes:
        state: of the chains after it.
        states: by field of the state arrays of shape (chains, length, ...), zero beyond the draws.
        draws: number of draws of each chain.
        divergences: among them, of all chains.
    """

    state: PyTree
    states: dict[str, PyTree]
    draws: int
    divergences: int


def check_alike(processes: Alone, job: Job, *others: Any) -> None:
    """Check that all processes were given the same, of arrays the same shapes.

    Raises:
        ValueError: if not; the text names what differs.
    """
    if isinstance(processes, Together):
        data = jax.tree.map(
            lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else x,
            (job.args, job.kwargs, job.init_params),
        )
        args, kwargs, init_params = data
        shapes = job._replace(args=args, kwargs=kwargs, init_params=init_params)
        here = fingerprint(*shapes, 0)
        here["num_samples"] = str(job.mcmc.num_samples)
        here["draws_per_segment, directory, resume"] = str(others)
        changed = differences(processes.first(lambda: here), here)

        def check() -> None:
            if changed:
                raise ValueError(
                    f"process {jax.process_index()} was given other arguments than process 0: "
                    f"{'; '.join(changed)}. Expected the same in all"
                )

        processes.all(check)


def do_segment(segments: Segments, plan: Plan, number: int, state: PyTree) -> Done:
    """Do the segment with this number, the first of which is 0."""
    if number < plan.warmup_segments:
        steps = plan.steps(number + 1) - plan.steps(number)
        return Done(*segments.advance(state, 1, steps), 0, 0)
    draws = plan.draws(number + 1) - plan.draws(number)
    state, states = segments.advance(state, draws, plan.thinning)
    diverging = states.get("diverging", np.zeros((1, 0)))
    return Done(state, states, draws, int(np.sum(diverging[:, :draws])))


def no_draws(segments: Segments) -> dict[str, PyTree]:
    """Draws of a segment that has not been done."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), segments.shapes)


def progress_of(mcmc: MCMC, plan: Plan, number: int) -> Progress:
    """A bar for a run that begins with this segment."""
    return Progress(plan.steps(number), plan.steps(plan.segments), mcmc.progress_bar)


def show(progress: Progress, plan: Plan, number: int, divergences: int, state: PyTree) -> None:
    """Let the bar tell of the segment with this number."""
    phase = "warmup" if number < plan.warmup_segments else "sample"
    progress.update(plan.steps(number + 1) - plan.steps(number), phase, divergences, state)


def warn(message: str) -> None:
    """Warn where the caller of the package is."""
    warnings.warn(message, RuntimeWarning, stacklevel=_outside())


def warn_if_stopped(signal: str | None, draws: int, plan: Plan, then: str) -> None:
    """Warn where a signal left draws undone."""
    if signal is not None and draws < plan.num_draws:
        warn(f"{signal} ended the run after {draws} of {plan.num_draws} draws: {then}")
