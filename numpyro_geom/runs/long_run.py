"""Long runs in segments: every finished segment is on disk, and a crashed run can be resumed.

A run is a sequence of segments, and warm-up comes first. After each segment, its draws are
added to a Zarr store, and then the state of the chains is saved. The saved state marks the
segment as done. A resumed run gives the same draws, bit for bit, as a run without a break.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from numpyro.infer import MCMC
from tqdm.auto import tqdm

from .._checks import check_int, check_keys
from .._numpyro import announce, plan_of
from .._util import PyTree
from .._warning import warn_outside
from ..model.bad_rows import checked_rows
from ..rows.host_rows import source_errors
from .files import Lock
from .fingerprint import check_alike, warn
from .keep import OTHER_PROGRAM, InMemory, OnDisk, Run
from .mesh import Layout
from .segments import Job, Lengths
from .store import Checkpoint

FROZEN = 0.25
"""Share of undone steps of a draw above which a chain hardly moves."""


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
    """Run an MCMC in segments and store each finished segment on disk.

    After a crash, call `run` again with the same arguments. The run then continues where the last
    finished segment ended. A run without a break has the same draws, bit for bit. Any kernel of
    NumPyro can be used. To continue a finished run, call `run` with a larger ``num_samples``.

    ``directory`` holds three entries: ``draws.zarr``, which ``xarray.open_datatree`` can open at
    any time, also during the run; ``state``, which a continued run starts from; and ``lock``.
    Memory does not grow with the number of draws. SIGINT and SIGTERM end the run after the current
    segment. A second SIGINT ends it at once.

    Differences from ``mcmc.run``: the number of draws is ``num_samples // thinning``, and a
    remainder of this division skips no steps. ``mcmc`` itself holds no draws afterwards; the result
    of `run` holds them.

    Args:
        mcmc: kernel, lengths and chains; need not have run.
        rng_key: a key, such as ``jax.random.key(0)``, or one for each chain.
        args: the model's arguments.
        directory: where to keep the run; None for memory only.
        draws_per_segment: draws of each chain in a segment. A crash can lose at most one segment,
            and one segment is held in memory. A segment should take at least a second, because
            the work between two segments takes some hundredths of a second. None for up to 1,000
            draws and 32 MiB.
        resume: ``"auto"`` to continue the run in the directory if there is one; True to require
            a run there; False to require that there is none; ``"other_program"`` to continue even
            if a different program began the run, for instance one compiled by another version of
            JAX. Settings, key and data must be the same in every case.
        on_bad_rows: what to do about rows of the arguments' arrays that hold NaN: ``"error"`` to
            raise; ``"drop"`` to leave the rows out of every array with the same number of rows;
            ``"keep"`` for models that mask them.
        extra_fields: as for ``mcmc.run``.
        init_params: as for ``mcmc.run``.
        monitor: called after each segment with its draws, shaped (chains, draws, ...). Draws on
            disk from earlier calls of `run` come first. The draws are what the MCMC's
            ``postprocess_fn`` returns. If it returns predictions, a
            `numpyro_geom.diagnostics.predictive.PredictionStream` can gather them, and no weights
            are stored. With several processes, only the first one calls it.
        mesh: devices that share the work, of this process or of all; see "Many devices" in the
            guide. Draws are the same on any mesh, up to the rounding of sums. A run can continue
            on another mesh, or on none.
        chain_axis: axis of the mesh over which the chains are split.
        data_axis: axis of the mesh over which the rows of the data are split, in each argument
            with as many rows as a plate with observed sites.
        kwargs: the model's keyword arguments.

    Returns:
        The draws so far, as an MCMC and as an ArviZ object.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: if mesh, axes, chains and data do not fit each other, or if several processes
            were given different arguments.
        ValueError: for NaN in the arguments (the message names the rows).
        ValueError: if the directory holds a run with other settings, data or program (the message
            names the difference), a run with more draws, or a run whose states cannot be read.
        ValueError: if draws and states in the directory are of different runs, or a site has a name
            that cannot be stored.
        FileExistsError: if the directory holds a run and ``resume`` is False; if it holds draws
            without states; if ``lock``, ``state`` or ``draws.zarr`` is a link, or a file or folder
            that no run has made.
        FileNotFoundError: if the directory holds no run and ``resume`` is True.
        RuntimeError: if another process is writing to the directory, or if the source of
            `HostRows` raises.
        TimeoutError: if the source of `HostRows` stalls.
        OSError: if a segment cannot be stored, or if the lock was lost. All earlier segments are
            stored.
        ImportError: if there is a directory and Zarr is missing.

    Warns:
        SamplingWarning: once, if over a quarter of the steps of a chain's last draw in a segment
            were undone.
        RuntimeWarning: if a file is damaged and its segment is computed again; if versions have
            changed, which may change the last bits; if a signal ended the run.

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
    args, kwargs = layout.processes.all(lambda: checked_rows(args, kwargs, on_bad_rows))
    job = Job(mcmc, rng_key, args, kwargs, tuple(extra_fields), init_params)
    given = {"draws_per_segment": draws_per_segment, "directory": directory, "resume": resume}
    check_alike(layout.processes, job, **given)
    announce(mcmc, plan_of(mcmc)._replace(bar=False))
    with source_errors((args, kwargs)), contextlib.ExitStack() as held:
        if directory is None:
            return _all_of_it(InMemory(job, draws_per_segment, layout), monitor)
        # absolute, because a program may change its working directory before it reads the result
        lock = Lock(Path(directory).expanduser().absolute())
        held.callback(lock.release)
        layout.processes.first(lock.take)
        return _all_of_it(OnDisk(job, draws_per_segment, layout, lock, resume), monitor)


def _all_of_it(keeper: InMemory | OnDisk, monitor: Callable[[PyTree], Any] | None) -> Run:
    """Compute segment after segment, until the end or a signal."""
    segments = keeper.segments
    lengths, signal_of = segments.lengths, segments.layout.processes.signal
    here, shown = keeper.start(), 0

    def show(shown: int) -> int:
        """Pass new draws to the monitor; returns how many draws it has seen."""
        draws = here.record["draws"]
        if monitor is not None and segments.layout.processes.is_first:
            for first in range(shown, draws, lengths.length):
                monitor(keeper.draws(first, min(first + lengths.length, draws)))
        return max(shown, draws)

    bar = tqdm(
        total=lengths.steps(lengths.segments),
        initial=lengths.steps(here.number),
        disable=not (segments.job.mcmc.progress_bar and segments.layout.processes.is_first),
        unit="step",
    )
    with stop_on_signal() as noted, bar:
        stopped, shown, told = signal_of(noted), show(shown), False
        while here.number < lengths.segments and stopped is None:
            number, (state, states) = here.number, segments.do(here.number, here.state)
            failed = states.get("diverging", np.zeros((1, 0)))[:, : lengths.drawn(number)]
            divergences = here.record["divergences"] + int(np.sum(failed))
            record = {"draws": lengths.draws(number + 1), "divergences": divergences}
            here = keeper.keep(number, states, Checkpoint(number + 1, state, record))
            _show(bar, lengths, number, here.record["divergences"], here.state)
            told = told or _told_of_frozen_chains(here.state, lengths.steps(number + 1))
            stopped, shown = signal_of(noted), show(shown)
    draws = here.record["draws"]
    if stopped is not None and draws < lengths.num_draws:
        warn(f"{stopped} ended the run after {draws} of {lengths.num_draws} draws: "
             f"{keeper.to_go_on}")  # fmt: skip
    return keeper.result(here)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[list[str]]:
    """Record SIGINT and SIGTERM, by name, instead of ending; only in the main thread.

    A second SIGINT raises KeyboardInterrupt.
    """
    noted: list[str] = []

    def note(number: int, _: FrameType | None) -> None:
        if noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        noted.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    old = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in old.items():
            # Python cannot restore a handler that was not set from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _show(bar: tqdm, lengths: Lengths, number: int, divergences: int, state: PyTree) -> None:
    """Show on the progress bar: steps, divergences and the mean step size after this segment."""
    facts = {"divergences": str(divergences)}
    step_size = getattr(getattr(state, "adapt_state", state), "step_size", None)
    if step_size is not None:
        facts["step size"] = f"{float(np.mean(np.asarray(step_size))):.2e}"
    bar.set_description("warmup" if number < lengths.warmup_segments else "sample", refresh=False)
    bar.set_postfix(facts, refresh=False)
    bar.update(lengths.steps(number + 1) - lengths.steps(number))
    bar.refresh()


def _told_of_frozen_chains(state: PyTree, draw: int) -> bool:
    """Warn if over `FROZEN` of the steps of a chain's last draw were undone; whether it warned."""
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
    choices = ("auto", OTHER_PROGRAM)
    if not isinstance(resume, bool) and not (isinstance(resume, str) and resume in choices):
        raise ValueError(f"resume must be 'auto', True, False or {OTHER_PROGRAM!r}, got {resume!r}")
    if directory is None and resume not in (False, "auto"):
        raise ValueError(
            f"resume={resume!r} needs a directory: expected the one of the run to go on with"
        )
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory must be a path, got {type(directory).__name__}")
