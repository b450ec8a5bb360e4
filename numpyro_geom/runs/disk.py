"""A run whose segments are on disk when they are done."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path
from typing import Any

from ..diagnostics.inference_data import _container
from .checkpoint import Checkpoint, Checkpoints, DamagedError
from .describe import Datasets, Describer, Names, view_of
from .files import stop_on_signal
from .fingerprint import differences, fingerprint, versions
from .plan import Done, Job, Plan, do_segment, no_draws, progress_of, show, warn, warn_if_stopped
from .result import Run, StoredMCMC, finish
from .segments import Segments
from .store import DrawStore

PyTree = Any
STORE = "draws.zarr"
STATES = "state"


def run_on_disk(job: Job, folder: Path, length: int | None, resume: bool | str) -> Run:
    """Begin a run, or go on with the one that the folder holds."""
    mcmc, args, kwargs = job.mcmc, job.args, job.kwargs
    checkpoints = Checkpoints(folder / STATES)
    record = _newest_record(folder, checkpoints, resume)
    if record is not None and length is None:
        length = record["length"]
    segments = Segments(*job, length)
    plan = Plan.of(mcmc, segments.length)
    now = datetime.datetime.now(datetime.UTC).isoformat()
    about = {
        "length": plan.length,
        "fingerprint": fingerprint(*job, plan.length),
        "versions": versions(),
        "created_at": now if record is None else record["created_at"],
    }
    if record is not None:
        _check_same(folder, record, about, plan)
    store = DrawStore(folder / STORE, plan.length)
    describer = Describer(mcmc, args, kwargs, str(about["created_at"]))
    if record is None:
        first = Checkpoint(0, segments.start, {**about, "draws": 0, "divergences": 0})
        store.create(describer.datasets(no_draws(segments), first.state), 0)
        checkpoints.save(first)
    task = _Task(checkpoints, segments, plan, store, describer, about)
    here = task.resume()
    with stop_on_signal() as stop, progress_of(mcmc, plan, here.number) as progress:
        while here.number < plan.segments and stop.signal is None:
            number, here = here.number, task.next(here)
            show(progress, plan, number, here.record["divergences"], here.state)
    draws = here.record["draws"]
    warn_if_stopped(stop.signal, draws, plan, "call `run` again with the same arguments to go on")
    names = Names(mcmc, segments.shapes)
    if draws:
        task.summarise(names, here)
    result = finish(StoredMCMC.of(view_of(mcmc, args, kwargs), store, names), here.state)
    groups = store.open()
    datasets = {name: groups[name].to_dataset() for name in groups.children}
    return Run(result, _container(datasets), draws, draws == plan.num_draws)


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
        checkpoints: Checkpoints,
        segments: Segments,
        plan: Plan,
        store: DrawStore,
        describer: Describer,
        about: dict[str, Any],
    ) -> None:
        self.checkpoints, self.store = checkpoints, store
        self.segments, self.plan = segments, plan
        self.describer, self.about = describer, about
        self.visible = 0
        self.damaged: set[int] = set()
        self.newest: Checkpoint | None = None

    def resume(self) -> Checkpoint:
        """Where to go on: after the last segment that is good, and so are all before it."""
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
        self._commit(here.number, done, after)
        self.damaged.discard(here.number)
        if self.newest is not None and not self.damaged and after.number < self.newest.number:
            return self.newest
        return after

    def summarise(self, names: Names, here: Checkpoint) -> None:
        """Give the store the attributes that depend on all draws."""
        datasets = self.describer.datasets(no_draws(self.segments), here.state)
        with self.store.open() as groups:
            self.describer.summarise(datasets, names.read(groups, all_of_them=False))
        self.store.grow(datasets, self.visible)

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
