"""Long runs: in segments, with every finished segment on disk, resumed after a crash.

A run is a row of segments, those of warm-up first. After each its draws are added to a Zarr store
and the state of the chains is saved; the saved state says that the segment is done. A run that
goes on from it does to the chains what it would have done without the break, bit for bit.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpyro.infer import MCMC

from .._checks import check_int
from ..diagnostics.container import container
from ..host_rows import source_errors
from .describe import Describer, view_of
from .disk import run_on_disk
from .files import only_writer, stop_on_signal
from .mesh import Layout
from .plan import Job, Plan, check_alike, do_segment, no_draws, progress_of, show, warn_if_stopped
from .processes import Alone
from .result import Run, finish
from .rows import checked_rows
from .segments import Segments

PyTree = Any


def run(
    mcmc: MCMC,
    rng_key: jax.Array,
    *args: Any,
    directory: str | os.PathLike[str] | None = None,
    draws_per_segment: int | None = None,
    resume: bool | str = "auto",
    on_bad_rows: str = "error",
    extra_fields: tuple[str, ...] | list[str] = (),
    init_params: PyTree = None,
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
            insist that there is; False to insist that there is not.
        on_bad_rows: what to do about rows of the arguments' arrays that hold NaN: ``"error"``;
            ``"drop"`` to leave them out of every array with as many rows; ``"keep"`` for models
            that mask them.
        extra_fields: as for ``mcmc.run``.
        init_params: as for ``mcmc.run``.
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
        ValueError: if the directory holds another run (the text names what differs), one with
            more draws, or one none of whose states can be read.
        FileExistsError: if the directory holds a run and ``resume`` is False.
        FileNotFoundError: if it holds none and ``resume`` is True.
        RuntimeError: if another process is writing to the directory, or the source of `HostRows`
            raises.
        TimeoutError: if the source of `HostRows` stalls.
        OSError: if a segment cannot be stored; all before it are.
        ImportError: if there is a directory and Zarr is missing.

    Warns:
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
    _check(mcmc, resume, directory)
    layout = Layout.of(mcmc, mesh, chain_axis, data_axis)
    processes = Alone() if layout is None else layout.processes
    if draws_per_segment is not None:
        draws_per_segment = check_int("draws_per_segment", draws_per_segment)
    args, kwargs = checked_rows(args, kwargs, on_bad_rows)
    job = Job(mcmc, rng_key, args, kwargs, tuple(extra_fields), init_params)
    check_alike(processes, job, draws_per_segment, directory, resume)
    with source_errors((args, kwargs)):
        if directory is None:
            return _run_in_memory(job, draws_per_segment, layout, processes)
        folder = Path(directory).expanduser()
        with contextlib.ExitStack() as held:
            processes.first(lambda: _take(folder, held))
            return run_on_disk(job, folder, draws_per_segment, resume, layout, processes)


def _take(folder: Path, held: contextlib.ExitStack) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    held.enter_context(only_writer(folder))


def _check(mcmc: Any, resume: Any, directory: Any) -> None:
    if not isinstance(mcmc, MCMC):
        raise TypeError(
            f"expected a numpyro.infer.MCMC, got {type(mcmc).__name__}: pass "
            "MCMC(kernel, num_warmup=..., num_samples=...)"
        )
    if not isinstance(resume, bool) and resume != "auto":
        raise ValueError(f"resume must be 'auto', True or False, got {resume!r}")
    if directory is None and resume is True:
        raise ValueError("resume=True needs a directory: expected the one of the run to go on with")
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory must be a path, got {type(directory).__name__}")


def _run_in_memory(job: Job, length: int | None, layout: Layout | None, processes: Alone) -> Run:
    segments = Segments(*job, length, layout)
    mcmc = job.mcmc
    plan = Plan.of(mcmc, segments.length)
    state, kept, number, divergences = segments.start, [], 0, 0
    with stop_on_signal() as stop, progress_of(mcmc, plan, 0) as progress:
        stopped = processes.signal(stop.signal)
        while number < plan.segments and stopped is None:
            done = do_segment(segments, plan, number, state)
            state = done.state
            divergences += done.divergences
            kept.append(jax.tree.map(lambda x, n=done.draws: x[:, :n], done.states))
            show(progress, plan, number, divergences, state)
            number += 1
            stopped = processes.signal(stop.signal)
    draws = plan.draws(number)
    warn_if_stopped(stopped, draws, plan, "with a directory it could go on")
    args, kwargs = job.for_readers(layout)
    result = finish(view_of(mcmc, args, kwargs), state)
    empty = jax.tree.map(lambda x: x[:, :0], no_draws(segments))
    result._states = jax.tree.map(lambda *x: np.concatenate(x, axis=1), empty, *kept)
    created_at = datetime.datetime.now(datetime.UTC).isoformat()
    describer = Describer(mcmc, args, kwargs, created_at)
    datasets = describer.datasets(result._states, state)
    if draws:
        describer.summarise(datasets, result._states)
    return Run(result, container(datasets), draws, draws == plan.num_draws)
