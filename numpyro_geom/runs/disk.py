"""A run whose segments are on disk when they are done."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ..diagnostics.container import container
from .checkpoint import Checkpoint, Checkpoints, DamagedError
from .describe import Datasets, Describer, Names, view_of
from .files import stop_on_signal
from .fingerprint import differences, fingerprint, versions
from .mesh import Layout
from .plan import Done, Job, Plan, do_segment, no_draws, progress_of, show, warn, warn_if_stopped
from .processes import Alone
from .result import Run, StoredMCMC, finish
from .segments import Segments
from .store import DrawStore

PyTree = Any
STORE = "draws.zarr"
STATES = "state"


def run_on_disk(
    job: Job,
    folder: Path,
    length: int | None,
    resume: bool | str,
    layout: Layout | None,
    processes: Alone,
) -> Run:
    """Begin a run, or go on with the one that the folder holds.

    Of several processes the first alone writes to the folder and reads states from it; the others
    open the draws at the end.
    """
    mcmc, (args, kwargs) = job.mcmc, job.for_readers(layout)
    record = processes.first(lambda: _newest_record(folder, Checkpoints(folder / STATES), resume))
    if record is not None and length is None:
        length = record["length"]
    segments = Segments(*job, length, layout)
    plan = Plan.of(mcmc, segments.length)
    about = processes.first(lambda: _about(job, plan, record, layout))
    if record is not None:
        _check_same(folder, record, about, plan)
    store = DrawStore(folder / STORE, plan.length)
    describer = Describer(mcmc, args, kwargs, str(about["created_at"]))
    task = _Task(folder / STATES, segments, plan, store, describer, about, processes)
    here = task.resume(begin=record is None)
    processes.all(lambda: _check_visible(store))
    with stop_on_signal() as stop, progress_of(mcmc, plan, here.number) as progress:
        stopped = processes.signal(stop.signal)
        while here.number < plan.segments and stopped is None:
            number, here = here.number, task.next(here)
            show(progress, plan, number, here.record["divergences"], here.state)
            stopped = processes.signal(stop.signal)
    draws = here.record["draws"]
    warn_if_stopped(stopped, draws, plan, "call `run` again with the same arguments to go on")
    names = Names(mcmc, segments.shapes)
    if draws:
        processes.first(lambda: task.summarise(names, here))
    result = finish(StoredMCMC.of(view_of(mcmc, args, kwargs), store, names), here.state)
    groups = store.open()
    datasets = {name: groups[name].to_dataset() for name in groups.children}
    return Run(result, container(datasets), draws, draws == plan.num_draws)


def _about(job: Job, plan: Plan, record: Any, layout: Layout | None) -> dict[str, Any]:
    """What is saved of the run with each state."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return {
        "length": plan.length,
        "fingerprint": fingerprint(*job, plan.length),
        "versions": versions() | ({} if layout is None else {"mesh": layout.text}),
        "created_at": now if record is None else record["created_at"],
    }


def _check_visible(store: DrawStore) -> None:
    if not (store.path / "zarr.json").is_file():
        raise FileNotFoundError(
            f"{store.path}, which process 0 has made, is not there for process "
            f"{jax.process_index()}: expected a directory on a file system that all processes share"
        )


def _newest_record(folder: Path, checkpoints: Checkpoints, resume: bool | str) -> Any:
    """What the newest checkpoint that can be read knows of the run; None if there is no run."""
    numbers = checkpoints.numbers()
    if numbers and resume is False:
        raise FileExistsError(
            f"{folder} holds a run: expected resume='auto' to go on with it, or another directory"
        )
    if not numbers and resume is True:
        raise FileNotFoundError(
            f"{folder} holds no run: expected the directory of one, or resume='auto' to begin"
        )
    for number in numbers:
        try:
            return checkpoints.record(number)
        except DamagedError as error:
            warn(f"{error}: the run goes on from an earlier state")
    if numbers:
        raise ValueError(
            f"none of the states in {checkpoints.folder} can be read: restore one from a copy, or "
            "begin anew in another directory"
        )
    return None


def _check_same(folder: Path, record: dict, about: dict, plan: Plan) -> None:
    changed = differences(record["fingerprint"], about["fingerprint"])
    if changed:
        raise ValueError(
            f"{folder} holds a run that differs in: {'; '.join(changed)}. Expected the same "
            "arguments as before, or another directory"
        )
    if record["draws"] > plan.num_draws:
        raise ValueError(
            f"{folder} holds {record['draws']} draws, more than num_samples asks for "
            f"({plan.num_draws}): expected at least as many, or another directory"
        )
    changed = differences(record["versions"], about["versions"])
    if changed:
        warn(f"the run was begun with other versions, and draws may differ: {'; '.join(changed)}")


class _Task:
    """The segments of a run on disk, done one after the other.

    Attributes:
        visible: draws that readers of the store see.
        damaged: numbers of segments to do again before the newest state is gone on from.
        newest: the newest state, to which the run comes back after repairs.
    """

    def __init__(
        self,
        folder: Path,
        segments: Segments,
        plan: Plan,
        store: DrawStore,
        describer: Describer,
        about: dict[str, Any],
        processes: Alone,
    ) -> None:
        self.processes, self.store = processes, store
        if processes.is_first:
            self.checkpoints = Checkpoints(folder)
        self.segments, self.plan = segments, plan
        self.describer, self.about = describer, about
        self.visible = 0
        self.damaged: set[int] = set()
        self.newest: Checkpoint | None = None

    def resume(self, begin: bool) -> Checkpoint:
        """Where to go on, or begin: after the last segment that is good, and so are all before."""
        if begin:
            self.processes.first(self._begin)
        return self._shared(self._find)

    def next(self, here: Checkpoint) -> Checkpoint:
        """Do a segment and store it."""
        done = do_segment(self.segments, self.plan, here.number, here.state)
        after = Checkpoint(
            here.number + 1,
            done.state,
            {
                **self.about,
                "draws": self.plan.draws(here.number + 1),
                "divergences": here.record["divergences"] + done.divergences,
            },
        )
        if self.processes.first(lambda: self._keep(here.number, done, after)):
            return after
        return self._shared(lambda: self.newest)

    def summarise(self, names: Names, here: Checkpoint) -> None:
        """Give the store the attributes that depend on all draws."""
        datasets = self.describer.datasets(no_draws(self.segments), here.state)
        with self.store.open() as groups:
            self.describer.summarise(datasets, names.read(groups, all_of_them=False))
        self.store.grow(datasets, self.visible)

    def _begin(self) -> None:
        first = Checkpoint(0, self.segments.start, {**self.about, "draws": 0, "divergences": 0})
        self.store.create(self.describer.datasets(no_draws(self.segments), first.state), 0)
        self.checkpoints.save(first)

    def _find(self) -> Checkpoint:
        plan = self.plan
        self.newest = self._load(plan.segments)
        self.visible = self.newest.record["draws"]
        if self.newest.record["draws"] < plan.draws(self.newest.number):
            # a run that is made longer: its last segment was a short one, and is done again
            self.newest = self._load(self.newest.number - 1)
        datasets = self.describer.datasets(no_draws(self.segments), self.newest.state)
        first = plan.warmup_segments
        for number in range(first, self.newest.number):
            problem = self.store.problem(number - first, datasets)
            if problem:
                self.damaged.add(number)
                warn(f"{problem}: its segment is done again")
        self.store.create(datasets, self.visible)
        return self._load(min(self.damaged)) if self.damaged else self.newest

    def _keep(self, number: int, done: Done, after: Checkpoint) -> bool:
        """Store a segment; whether to go on after it, and not after the newest."""
        self._commit(number, done, after)
        self.damaged.discard(number)
        newest = self.newest
        return newest is None or bool(self.damaged) or after.number >= newest.number

    def _shared(self, find: Callable[[], Any]) -> Checkpoint:
        """What the first process finds, for all of them."""
        found: list[Checkpoint] = []

        def look() -> tuple[int, Any]:
            found.append(find())
            return found[0].number, found[0].record

        number, record = self.processes.first(look)
        state = found[0].state if found else self.segments.start
        return Checkpoint(number, self.processes.spread(state), record)

    def _commit(self, number: int, done: Done, after: Checkpoint) -> None:
        segment = number - self.plan.warmup_segments
        datasets: Datasets = {}
        try:
            if done.draws:
                datasets = self.describer.datasets(done.states, done.state)
                self.store.write(segment, datasets)
                self.visible = max(self.visible, after.record["draws"])
                self.store.grow(datasets, self.visible)
            self.checkpoints.save(after)
        except OSError as error:
            with contextlib.suppress(OSError):
                if segment * self.plan.length >= self.visible:
                    self.store.discard(segment, datasets)
            raise OSError(
                error.errno,
                f"{error.strerror}: segment {number + 1} of {self.plan.segments} could not be "
                f"stored. All before it are safe; make {self.store.path.parent} writable, with "
                "room for more, and call `run` again with the same arguments",
            ) from error

    def _load(self, at_most: int) -> Checkpoint:
        """The newest good checkpoint with a number of at most so many."""
        for number in self.checkpoints.numbers():
            if number <= at_most:
                try:
                    return self.checkpoints.load(number, self.segments.start)
                except DamagedError as error:
                    warn(f"{error}: the run goes on from an earlier state")
        raise ValueError(
            f"no state in {self.checkpoints.folder} from which the run could go on can be read: "
            "restore one from a copy, or begin anew in another directory"
        )
