"""Long runs: in segments, with every finished segment on disk, resumed after a crash.

A run is a row of segments, those of warm-up first. After each its draws are added to a Zarr store
and the state of the chains is saved; the saved state says that the segment is done. A run that
goes on from it does to the chains what it would have done without the break, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from numpyro.infer import MCMC
from tqdm.auto import tqdm

from .._checks import check_int, check_keys
from .._mcmc import holding
from .._util import PyTree
from .._warning import warn_outside
from ..diagnostics.container import container
from ..rows.bad_rows import checked_rows
from ..rows.host_rows import source_errors
from .checkpoint import Checkpoint
from .describe import Describer, now
from .disk import OTHER_PROGRAM, OnDisk
from .files import Lock, stop_on_signal
from .fingerprint import check_alike, warn
from .job import Job, Lengths, Run
from .mesh import Layout
from .segments import Done, Segments

FROZEN = 0.25
"""Share of the steps of a draw that are undone, above which a chain hardly moves."""


def run(
    mcmc: MCMC,
    rng_key: jax.Array,
    *args: Any,
    directory: str | os.PathLike[str] | None = None,
    draws_per_segment: int | None = None,
    resume: bool | Literal["auto", "other_program"] = "auto",
    on_bad_rows: Literal["error", "drop", "keep"] = "error",
    extra_fields: tuple[str, ...] | list[str] = (),
    init_params: PyTree = None,
    monitor: Callable[[PyTree], Any] | None = None,
    mesh: Mesh | None = None,
    chain_axis: str | None = None,
    data_axis: str | None = None,
    **kwargs: Any,
) -> Run:
    """Run an MCMC in segments that are on disk when they are done.

    Called again with the same arguments after a crash it goes on where the last finished segment
    ended, and the draws are, bit for bit, those of a run without a break. Any kernel of NumPyro
    will do. With a larger ``num_samples`` a finished run is continued.

    In ``directory`` there are ``draws.zarr``, which ``xarray.open_datatree`` opens at any time,
    also while the run is under way; ``state``, what is needed to go on; and ``lock``. Memory does
    not grow with the number of draws. SIGINT and SIGTERM end the run after the segment at hand;
    a second SIGINT ends it at once.

    Differences from ``mcmc.run``: draws are ``num_samples // thinning``, and if that leaves a
    remainder no steps are skipped for it. ``mcmc`` itself holds no draws afterwards: those are
    in the result.

    Args:
        mcmc: kernel, lengths and chains; need not have run.
        rng_key: a key, such as ``jax.random.key(0)``, or one for each chain.
        args: the model's arguments.
        directory: where to keep the run; None for memory only.
        draws_per_segment: draws of each chain in a segment, the unit of what a crash can lose and
            of what is held in memory; a segment should take a second at least, for what is
            done between two takes some hundredths. None for up to 1,000 and 32 MiB.
        resume: ``"auto"`` to go on with what is in the directory, if there is something; True to
            insist that there is; False to insist that there is not; ``"other_program"`` to go on
            though the program is not the one that began the run, as with another version of JAX.
            Settings, key and data must be the same even so.
        on_bad_rows: what to do about rows of the arguments' arrays that hold NaN: ``"error"``;
            ``"drop"`` to leave them out of every array with as many rows; ``"keep"`` for models
            that mask them.
        extra_fields: as for ``mcmc.run``.
        init_params: as for ``mcmc.run``.
        monitor: called with the draws of each segment, shaped (chains, draws, ...), when it is
            done; draws of earlier calls of `run` that are on disk come first. What the draws are
            is the MCMC's ``postprocess_fn``: have it return predictions, and a
            `numpyro_geom.diagnostics.predictive.PredictionStream` gathers them, while weights
            are not kept at all. Of several processes the first one calls it.
        mesh: devices that share the work, of this process or of all; see "Many devices" in the
            guide. Draws are the same on any mesh, up to the rounding of sums. A run may go on
            with another mesh, or with none.
        chain_axis: axis of the mesh that shares out the chains.
        data_axis: axis of the mesh that shares out the rows of the data: of each argument with as
            many rows as a plate with observed sites.
        kwargs: the model's keyword arguments.

    Returns:
        Draws so far, as an MCMC and as an ArviZ object.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: if mesh, axes, chains and data do not fit each other, or several processes
            were given different arguments.
        ValueError: for NaN in the arguments (the text names the rows).
        ValueError: if the directory holds another run, which is one of other settings, data or
            program (the text names what differs), one with more draws, or one none of whose
            states can be read.
        ValueError: if draws and states in the directory are of different runs, or a site has a name
            that cannot be stored.
        FileExistsError: if the directory holds a run and ``resume`` is False; if it holds draws
            without states; if ``lock``, ``state`` or ``draws.zarr`` is a link, or a file or folder
            that no run has made.
        FileNotFoundError: if it holds none and ``resume`` is True.
        RuntimeError: if another process is writing to the directory, or the source of `HostRows`
            raises.
        TimeoutError: if the source of `HostRows` stalls.
        OSError: if a segment cannot be stored, or the lock was lost; all segments before it are
            stored.
        ImportError: if there is a directory and Zarr is missing.

    Warns:
        SamplingWarning: once, where over a quarter of the steps of a chain's last draw in a segment
            were undone.
        RuntimeWarning: where a file is damaged and its segment is done again; where versions have
            changed, and with them perhaps the last bits; where a signal ended the run.

    Examples:
        >>> import jax, numpyro, tempfile
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_geom.runs import run
        >>> def model():
        ...     numpyro.sample("x", dist.Normal(0, 1))
        >>> mcmc = MCMC(NUTS(model), num_warmup=100, num_samples=200, progress_bar=False)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     result = run(mcmc, jax.random.key(0), directory=directory, draws_per_segment=50)
        ...     result.idata.posterior["x"].shape
        (1, 200)
    """
    _check(mcmc, rng_key, resume, directory, extra_fields)
    if monitor is not None and not callable(monitor):
        raise TypeError(
            f"monitor must be a function of draws, such as `stream.add`, got {monitor!r}"
        )
    layout = Layout.of(mcmc, mesh, chain_axis, data_axis)
    if draws_per_segment is not None:
        draws_per_segment = check_int("draws_per_segment", draws_per_segment)
    args, kwargs = checked_rows(args, kwargs, on_bad_rows)
    job = Job(mcmc, rng_key, args, kwargs, tuple(extra_fields), init_params)
    given = {"draws_per_segment": draws_per_segment, "directory": directory, "resume": resume}
    check_alike(layout.processes, job, **given)
    with source_errors((args, kwargs)), contextlib.ExitStack() as held:
        if directory is None:
            return _all_of_it(InMemory(job, draws_per_segment, layout), monitor)
        # absolute, for a program may go elsewhere while it runs, and before it reads the result
        lock = Lock(Path(directory).expanduser().absolute())
        held.callback(lock.release)
        layout.processes.first(lock.take)
        return _all_of_it(OnDisk(job, draws_per_segment, layout, lock, resume), monitor)


class InMemory:
    """Keeps the draws of a run in memory."""

    to_go_on = "with a directory it could go on"

    def __init__(self, job: Job, length: int | None, layout: Layout) -> None:
        self.segments = Segments(job, length, layout)
        self._kept = [jax.tree.map(lambda x: x[:, :0], self.segments.no_draws)]
        arguments = self._arguments = layout.readable((job.args, job.kwargs))
        self._describer = Describer(job.mcmc, arguments, now())

    def start(self) -> Checkpoint:
        """Before the first segment."""
        # names that cannot be exported are an error before there are draws
        self._describer.datasets(self.segments.no_draws, self.segments.start)
        return Checkpoint(0, self.segments.start, {"draws": 0, "divergences": 0})

    def keep(self, number: int, done: Done, after: Checkpoint) -> Checkpoint:
        """Keep the draws of a segment."""
        if done.draws:
            self._kept.append(jax.tree.map(lambda x: x[:, : done.draws], done.states))
        return after

    def draws(self, first: int, last: int) -> PyTree:
        """Draws of a segment, numbers from the first to before the last."""
        kept = self._kept[1 + first // self.segments.lengths.length]
        return kept[self.segments.fields[0]]

    def result(self, here: Checkpoint) -> Run:
        """All draws."""
        job = self.segments.job
        states = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *self._kept)
        mcmc = holding(job.mcmc, self._arguments, states, here.state)
        mcmc.post_warmup_state = here.state
        datasets = self._describer.datasets(states, here.state)
        draws = here.record["draws"]
        if draws:
            self._describer.summarise(datasets, states, here.state)
        return Run(mcmc, container(datasets), draws, draws == job.num_draws)


def _all_of_it(keeper: InMemory | OnDisk, monitor: Callable[[PyTree], Any] | None) -> Run:
    """Do segment after segment, to the end or until a signal."""
    segments = keeper.segments
    lengths, signal_of = segments.lengths, segments.layout.processes.signal
    here, shown = keeper.start(), 0

    def show(shown: int) -> int:
        """Give the monitor what it has not seen; returns how many draws it has."""
        first_process = segments.layout.processes.is_first
        for first in range(shown, here.record["draws"], lengths.length):
            last = min(first + lengths.length, here.record["draws"])
            if monitor is not None and first_process:
                monitor(keeper.draws(first, last))
            shown = last
        return shown

    bar = tqdm(
        total=lengths.steps(lengths.segments),
        initial=lengths.steps(here.number),
        disable=not (segments.job.mcmc.progress_bar and segments.layout.processes.is_first),
        unit="step",
    )
    with stop_on_signal() as noted, bar:
        stopped, shown, told = signal_of(noted), show(shown), False
        while here.number < lengths.segments and stopped is None:
            number, done = here.number, segments.do(here.number, here.state)
            divergences = here.record["divergences"] + done.divergences
            record = {"draws": lengths.draws(number + 1), "divergences": divergences}
            here = keeper.keep(number, done, Checkpoint(number + 1, done.state, record))
            _show(bar, lengths, number, here.record["divergences"], here.state)
            told = told or _told_of_frozen_chains(here.state, lengths.steps(number + 1))
            stopped, shown = signal_of(noted), show(shown)
    draws = here.record["draws"]
    if stopped is not None and draws < lengths.num_draws:
        warn(f"{stopped} ended the run after {draws} of {lengths.num_draws} draws: "
             f"{keeper.to_go_on}")  # fmt: skip
    return keeper.result(here)


def _show(bar: tqdm, lengths: Lengths, number: int, divergences: int, state: PyTree) -> None:
    """The segment with this number is done: steps, divergences and the mean step size."""
    facts = {"divergences": str(divergences)}
    step_size = getattr(getattr(state, "adapt_state", state), "step_size", None)
    if step_size is not None:
        facts["step size"] = f"{float(np.mean(np.asarray(step_size))):.2e}"
    bar.set_description("warmup" if number < lengths.warmup_segments else "sample", refresh=False)
    bar.set_postfix(facts, refresh=False)
    bar.update(lengths.steps(number + 1) - lengths.steps(number))
    bar.refresh()


def _told_of_frozen_chains(state: PyTree, draw: int) -> bool:
    """Warn where more steps of a chain's last draw were undone than `FROZEN`; whether it did."""
    undone, steps = (getattr(state, name, None) for name in ("num_diverging", "num_steps"))
    if undone is None or steps is None:  # not of a kernel of this package
        return False
    undone, steps = np.atleast_1d(*np.broadcast_arrays(np.asarray(undone), np.asarray(steps)))
    frozen = np.flatnonzero(undone > FROZEN * steps)
    if not frozen.size:
        return False
    worst = frozen[np.argmax(undone[frozen] / steps[frozen])]
    warn_outside(
        f"chain {worst} hardly moves: {undone[worst]} of the {steps[worst]} steps of draw {draw}, "
        "counted with warm-up, were not finite or not stable and have been undone "
        f"({frozen.size} of {undone.size} chains are like it). Use a smaller step_size, "
        "step_size='auto', or start from init_params of higher density"
    )
    return True


def _check(mcmc: Any, rng_key: Any, resume: Any, directory: Any, extra_fields: Any) -> None:
    if not isinstance(mcmc, MCMC):
        raise TypeError(
            f"expected a numpyro.infer.MCMC, got {type(mcmc).__name__}: pass "
            "MCMC(kernel, num_warmup=..., num_samples=...)"
        )
    check_keys("rng_key", rng_key)
    if not isinstance(extra_fields, (tuple, list)):
        raise TypeError(
            f"extra_fields must be a tuple of names such as ('step_size',), got {extra_fields!r}"
        )
    if not isinstance(resume, bool) and resume not in ("auto", OTHER_PROGRAM):
        raise ValueError(f"resume must be 'auto', True, False or {OTHER_PROGRAM!r}, got {resume!r}")
    if directory is None and resume in (True, OTHER_PROGRAM):
        raise ValueError(
            f"resume={resume!r} needs a directory: expected the one of the run to go on with"
        )
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory must be a path, got {type(directory).__name__}")
