"""Long runs in segments: every finished segment is on disk, and a crashed run can be resumed.

A run is a sequence of segments, and warm-up comes first. After each segment, its draws and the
state of the chains are written to a file. A resumed run gives the same draws, bit for bit, as a run
without a break.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from numpyro.infer import MCMC
from tqdm.auto import tqdm

from .._checks import check_int, check_keys, check_number, warn_outside
from .._numpyro import holding
from .._util import PyTree
from ..diagnostics.checks import largest_rhat
from ..diagnostics.draws import MAX_ENTRIES, entries, host, mixing_of, numeric, paths
from ..diagnostics.inference_data import after_run
from ..model.bad_rows import check_rows
from ..rows.host_rows import source_errors
from .identity import check_same, data_of, identity, versions
from .mesh import DeviceLayout, Processes
from .segments import Job, Lengths, Segments, without_mesh
from .store import Store

FROZEN = 0.25
"""Share of undone steps of a draw above which a chain hardly moves."""


class Run:
    """What `run_in_segments` returns.

    Attributes:
        num_draws: number of draws of each chain so far.
        finished: whether the run has all requested draws, or enough effective ones.
        ended_by: what ended the run, in words: ``num_samples``, ``min_ess`` with the number of
            effective draws, ``max_seconds``, or a signal.
    """

    def __init__(
        self, num_draws: int, finished: bool, ended_by: str, read: Callable[[], MCMC]
    ) -> None:
        self.num_draws, self.finished, self.ended_by = num_draws, finished, ended_by
        self._read = read

    @cached_property
    def mcmc(self) -> MCMC:
        """A copy of the MCMC that holds the draws; with a directory, they are read now.

        `numpyro_geom.to_inference_data` takes it. Its method ``run`` continues from the last state.
        As at the end of ``mcmc.run``, a warning tells of draws that are worth nothing.
        """
        return self._read()


def run_in_segments(
    mcmc: MCMC,
    rng_key: jax.Array,
    *args: Any,
    directory: str | os.PathLike[str] | None = None,
    draws_per_segment: int | None = None,
    on_bad_rows: Literal["error", "keep"] = "error",
    extra_fields: tuple[str, ...] | list[str] = (),
    init_params: PyTree = None,
    monitor: Callable[[PyTree], Any] | None = None,
    min_ess: float | None = None,
    max_seconds: float | None = None,
    mesh: Mesh | None = None,
    chain_axis: str | None = None,
    data_axis: str | None = None,
    **kwargs: Any,
) -> Run:
    """Run an MCMC in segments and store each finished segment on disk.

    After a crash, call it again with the same arguments. The run then continues where the last
    finished segment ended. A run without a break has the same draws, bit for bit. Any kernel of
    NumPyro can be used. To continue a finished run, call it with a larger ``num_samples``.

    ``directory`` holds a file for each segment, which `numpy.load` can open at any time, also
    during the run. Memory does not grow with the number of draws until ``mcmc`` of the result is
    used. SIGINT and SIGTERM end the run after the current segment. A second SIGINT ends it at once.
    If two processes run the same in one directory, they do the work twice, and do no harm.

    Differences from ``mcmc.run``: the number of draws is ``num_samples // thinning``, and a
    remainder of this division skips no steps. ``mcmc`` itself holds no draws afterwards; the result
    of `run_in_segments` holds them.

    Args:
        mcmc: kernel, lengths and chains; need not have run.
        rng_key: a key, such as ``jax.random.key(0)``, or one for each chain.
        args: the model's arguments.
        directory: where to keep the run; None for memory only.
        draws_per_segment: draws of each chain in a segment. A crash can lose at most one segment,
            and one segment is held in memory. A segment should take at least a second, because
            the work between two segments takes some hundredths of a second. None for up to 1,000
            draws and 8 million numbers.
        on_bad_rows: what to do about rows of the arguments' arrays that hold NaN: ``"error"`` to
            raise, ``"keep"`` for models that mask them.
        extra_fields: as for ``mcmc.run``.
        init_params: as for ``mcmc.run``.
        monitor: called after each segment with its draws, shaped (chains, draws, ...). Draws on
            disk from earlier calls of `run_in_segments` come first. The draws are what the MCMC's
            ``postprocess_fn`` returns. If it returns predictions, a
            `numpyro_geom.diagnostics.PredictionStream` can gather them, and no weights are stored.
            With several processes, only the first one calls it.
        min_ess: end after the first segment with so many effective draws of the worst entry's mean
            and square, and R-hat within the bound of
            `numpyro_geom.diagnostics.diagnose`. ``num_samples`` is then the most. A run ends where
            the estimate happens to be high, so the true number is a little smaller. Means of the
            draws have no bias from this, because where the run ends does not depend on them. The
            entries of a network's weights say nothing: keep predictions, by ``postprocess_fn``.
        max_seconds: end after the first segment at whose end the call has taken so long.
        mesh: devices that share the work, of this process or of all; see "Many devices" in the
            guide. Draws are the same on any mesh, up to the rounding of sums. A run can continue
            on another mesh, also of one device.
        chain_axis: axis of the mesh over which the chains are split.
        data_axis: axis of the mesh over which the rows of the data are split, in each argument
            with as many rows as a plate with observed sites.
        kwargs: the model's keyword arguments.

    Returns:
        The draws so far.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: if mesh, axes, chains and data do not fit each other, or if several processes
            were given different arguments.
        ValueError: for NaN in the arguments (the message names the rows).
        ValueError: if the directory holds a run with other settings, data or program (the message
            names the difference), or a run with more draws.
        ValueError: if a file in the directory is damaged, renamed, or of another run; the message
            names it. ``mcmc`` of the result raises this, too.
        RuntimeError: if the source of `HostRows` raises.
        TimeoutError: if the source of `HostRows` stalls.
        OSError: if a segment cannot be stored. All earlier segments are stored.

    Warns:
        SamplingWarning: once, if over a quarter of the steps of a chain's last draw in a segment
            were undone.
        RuntimeWarning: if a segment is missing and is computed again; if versions have changed,
            which may change the last bits; if a signal ended the run.

    Examples:
        >>> import jax, numpyro, tempfile
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_geom.runs import run_in_segments
        >>> def model():
        ...     numpyro.sample("x", dist.Normal(0, 1))
        >>> mcmc = MCMC(NUTS(model), num_warmup=100, num_samples=200, progress_bar=False)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     result = run_in_segments(mcmc, jax.random.key(0), directory=directory,
        ...                              draws_per_segment=50)
        ...     result.mcmc.get_samples()["x"].shape
        (200,)
    """
    _check(mcmc, rng_key, directory, extra_fields)
    if monitor is not None and not callable(monitor):
        raise TypeError(
            f"monitor must be a function of draws, such as `stream.add`, got {monitor!r}"
        )
    enough = Enough(min_ess, max_seconds)
    layout = DeviceLayout.of(mcmc, mesh, chain_axis, data_axis)
    if draws_per_segment is not None:
        draws_per_segment = check_int("draws_per_segment", draws_per_segment)
    layout.processes.all(lambda: check_rows(args, kwargs, on_bad_rows))
    job = Job(mcmc, rng_key, args, kwargs, tuple(extra_fields), init_params)
    with source_errors((args, kwargs)):
        segments, store = _prepared(job, draws_per_segment, directory, layout)
        return _all_of_it(segments, store, monitor, enough)


def _prepared(
    job: Job, length: int | None, directory: str | os.PathLike[str] | None, layout: DeviceLayout
) -> tuple[Segments, Store | None]:
    """The segments of a run, and its files if it has a directory."""
    processes, store = layout.processes, None
    given = {
        "directory": str(directory),
        "num_samples": str(job.mcmc.num_samples),
        "draws_per_segment": str(length),
    }
    _check_processes(processes, given)
    if directory is not None:
        # absolute, because a program may change its working directory before it reads the result
        store = Store(Path(directory).expanduser().absolute())
        stored = processes.first(store.look)
        length = stored if length is None else length
    if store is None and not processes.several:
        return Segments(job, length, layout), store
    # a run may continue on another mesh, so the program without a mesh identifies it
    plain = Segments(job, length, layout) if layout.mesh is None else without_mesh(job, length)
    same, length = processes.all(lambda: identity(plain)), plain.lengths.length
    _check_processes(processes, same | data_of(job, values=False))
    if store is not None:
        same |= data_of(job, values=True)
        about = {"length": length, "same": same, "versions": versions(layout.mesh)}
        processes.first(lambda: store.open(about, plain.lengths.steps))
    return plain if layout.mesh is None else Segments(job, length, layout), store


def _check_processes(processes: Processes, here: dict[str, str]) -> None:
    """Raise a ValueError unless all processes have the same texts."""
    first = processes.first(lambda: here)
    what = f"process {jax.process_index()} was given other arguments than process 0: its run"
    processes.all(lambda: check_same(what, first, here))


class Enough:
    """Whether a run may end before its last draw: at an effective sample size, or a time."""

    def __init__(self, min_ess: float | None, max_seconds: float | None) -> None:
        for name, value in {"min_ess": min_ess, "max_seconds": max_seconds}.items():
            if value is not None:
                check_number(name, value, above=0.0)
        self.min_ess, self._max_seconds = min_ess, max_seconds
        self._began = time.monotonic()
        self._parts: list[np.ndarray] = []

    def after(self, draws: PyTree) -> str:
        """What ends the run after a segment with these draws, None in warm-up; "" for nothing."""
        if self.min_ess is not None and draws is not None:
            names, values = entries(
                numeric({n: host(x) for n, x in paths(draws, "z")}), MAX_ENTRIES
            )
            self._parts.append(values)
            values = np.concatenate(self._parts, 1)
            mixing = mixing_of(dict(zip(names, np.moveaxis(values, -1, 0), strict=True)))
            if mixing is not None and mixing.names:
                worst = int(np.argmin(mixing.size))
                size = mixing.size[worst]
                text = f"min_ess: {size:,.0f} effective draws of {mixing.names[worst]}"
                rhat = 0.0 if mixing.rhat is None else float(np.max(mixing.rhat))
                if size >= self.min_ess and rhat <= largest_rhat(len(values)):
                    return text if mixing.rhat is None else f"{text}, R-hat {rhat:.3f}"
        taken = time.monotonic() - self._began
        if self._max_seconds is not None and taken >= self._max_seconds:
            return f"max_seconds: {taken:,.1f} seconds"
        return ""


class Place(NamedTuple):
    """How far a run is.

    Attributes:
        step: number of steps so far, warm-up included.
        digest: of the file of the last segment; "" in memory and before the first segment.
        state: of the chains; None if it is only in the file.
    """

    step: int
    digest: str
    state: PyTree = None


def _all_of_it(
    segments: Segments,
    store: Store | None,
    monitor: Callable[[PyTree], Any] | None,
    enough: Enough,
) -> Run:
    """Compute segment after segment, until the end, until it is enough, or until a signal."""
    job, layout, lengths = segments.job, segments.layout, segments.lengths
    processes = layout.processes

    def stored(place: Place, what: str, like: PyTree) -> PyTree:
        return store.read(place.step, place.digest, {what: like})[what]  # type: ignore[union-attr]

    def state_of(place: Place) -> PyTree:
        if place.state is not None:
            return place.state
        found: list[PyTree] = []
        processes.first(lambda: found.append(stored(place, "state", segments.start)))
        return processes.spread(found[0] if found else segments.start)

    def after(place: Place) -> tuple[Place, PyTree]:
        """The end of the next segment, and its draws if they are not on disk already."""
        known = None if store is None else processes.first(lambda: store.after(place.digest))
        if known is not None:
            return Place(*known), None
        step, digest = lengths.end(place.step), ""
        state, draws = segments.do(place.step, state_of(place))
        if store is not None:
            content = {"draws": draws, "state": state}
            digest = processes.first(lambda: store.write(step, place.digest, content))
        return Place(step, digest, state), draws

    here, told = Place(0, "", segments.start), False
    parts: list[Any] = [segments.no_draws]  # draws, or places on disk
    bar = tqdm(
        total=lengths.steps,
        disable=not (job.mcmc.progress_bar and processes.is_first),
        unit="step",
    )

    def draws_of(part: Any) -> dict[str, PyTree]:
        return stored(part, "draws", segments.shapes) if isinstance(part, Place) else part

    with stop_on_signal() as noted, bar:
        stopped, reached = processes.signal(noted), ""
        while here.step < lengths.steps and stopped is None and not reached:
            before = here
            here, draws = after(before)
            parts.append(draws if store is None else here._replace(state=None))
            told = told or _told_of_frozen_chains(here.state, here.step)
            _show(bar, here, before, lengths, draws)
            some = lengths.draws(here.step) > lengths.draws(before.step)
            looks = monitor is not None or enough.min_ess is not None
            drawn: Any = None
            if looks and processes.is_first and some:
                draws = draws_of(parts[-1]) if draws is None else draws
                drawn = draws[segments.fields[0]]
            if monitor is not None and drawn is not None:
                monitor(drawn)
            stopped = processes.signal(noted)
            reached = processes.first(partial(enough.after, drawn))
    state, num_draws = state_of(here), lengths.draws(here.step)
    finished = num_draws == lengths.num_draws or reached.startswith("min_ess")
    if stopped is not None and not finished:
        advice = "call `run_in_segments` again with the same arguments to go on"
        advice = "with a directory it could go on" if store is None else advice
        warn_outside(
            f"{stopped} ended the run after {num_draws} of {lengths.num_draws} draws: {advice}",
            RuntimeWarning,
        )

    def read() -> MCMC:
        states = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *map(draws_of, parts))
        mcmc = holding(job.mcmc, layout.readable((job.args, job.kwargs)), states, state)
        mcmc.post_warmup_state = state
        if hasattr(mcmc.sampler, "facts"):
            after_run(mcmc)
        return mcmc

    ended_by = reached or stopped or "num_samples"
    return Run(num_draws, finished, ended_by, read)


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


def _show(bar: tqdm, here: Place, before: Place, lengths: Lengths, draws: Any) -> None:
    """Show on the progress bar: steps, and divergences and the mean step size of this segment."""
    facts = {}
    if draws is not None and "diverging" in draws:
        facts["divergences"] = str(int(np.sum(draws["diverging"])))
    step_size = getattr(getattr(here.state, "adapt_state", here.state), "step_size", None)
    if step_size is not None:
        facts["step size"] = f"{float(np.mean(np.asarray(step_size))):.2e}"
    warmup = here.step <= lengths.num_warmup
    bar.set_description("warmup" if warmup else "sample", refresh=False)
    bar.set_postfix(facts, refresh=False)
    bar.update(here.step - before.step)
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


def _check(mcmc: Any, rng_key: Any, directory: Any, extra_fields: Any) -> None:
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
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory must be a path, got {type(directory).__name__}")
