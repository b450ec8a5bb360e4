"""A run whose finished segments are on disk."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from .._numpyro import LazyMCMC, holding
from .._util import PyTree
from ..diagnostics.container import container
from .checkpoint import Checkpoint, Checkpoints
from .describe import Datasets, Describer, Names, now
from .digest import Digests
from .files import Lock, advised
from .fingerprint import check_same, digests_of_parts, fingerprint, program_of, versions, warn
from .job import Job, Run
from .mesh import Layout
from .segments import Done, Segments, without_mesh
from .store import DrawStore, check_free

STORE = "draws.zarr"
STATES = "state"
OTHER_PROGRAM = "other_program"
"""Value of ``resume`` that allows a different program."""
_NOT_BEGUN = (
    "cannot be prepared for the run. What was stored before is safe: make it writable, with room "
    "for more, and call `run` again with the same arguments"
)


class OnDisk:
    """Keeps the segments of a run in a folder; starts or continues the run there.

    With several processes, only the first one writes to the folder and reads states from it. The
    others open the draws at the end.

    Attributes:
        segments: the segments of the run. Their length may be that of the run in the folder.
        visible: number of draws that readers of the store see.
        damaged: numbers of segments to compute again before the run continues from the newest
            state.
        newest: the newest state, to which the run returns after repairs.
    """

    to_go_on = "call `run` again with the same arguments to go on"

    def __init__(
        self, job: Job, length: int | None, layout: Layout, lock: Lock, resume: bool | str
    ) -> None:
        folder = lock.directory
        self.processes, self.folder, self.lock = layout.processes, folder, lock
        with advised(f"{folder} {_NOT_BEGUN}"):
            record = self.processes.first(lambda: _newest_record(folder, resume))
        self._begins = record is None
        if record is not None and length is None:
            length = record["length"]
        # a run may continue on another mesh, so its digest is that of the program without a mesh
        plain = None if layout.mesh is None else without_mesh(job, length)
        self.segments = Segments(job, length, layout)
        digests = digests_of_parts(self.processes, job)
        self.about = self.processes.first(
            lambda: self._about(record, plain or self.segments, digests)
        )
        if record is not None:
            check_same(folder, record, self.about, resume == OTHER_PROGRAM)
            draws, wanted = record["draws"], self.segments.lengths.num_draws
            if draws > wanted:
                raise ValueError(
                    f"{folder} holds {draws} draws, more than num_samples asks for ({wanted}): "
                    "expected at least as many, or another directory"
                )
        run = self.about["run"]
        self.store = DrawStore(folder / STORE, self.segments.lengths.length, run)
        if self.processes.is_first:
            with advised(f"{folder} {_NOT_BEGUN}"):
                self.checkpoints = Checkpoints(folder / STATES, run)
        self._arguments = layout.readable((job.args, job.kwargs))
        self.describer = Describer(job.mcmc, self._arguments, str(self.about["created_at"]))
        self.visible = 0
        self.damaged: set[int] = set()
        self.newest: Checkpoint | None = None

    def start(self) -> Checkpoint:
        """Where to start or continue: after the last segment before which all segments are good."""
        with advised(f"{self.folder} {_NOT_BEGUN}"):
            found = self._shared(self._find)
        self.processes.all(self._check_visible)
        return found

    def keep(self, number: int, done: Done, after: Checkpoint) -> Checkpoint:
        """Store a segment; returns the checkpoint to continue from."""
        after = after._replace(record={**self.about, **after.record})
        if self.processes.first(lambda: self._keep(number, done, after)):
            return after
        return self._shared(lambda: self.newest)

    def draws(self, first: int, last: int) -> PyTree:
        """Draws ``first`` to ``last - 1``."""
        with self.store.open() as groups:
            some = groups["posterior"].to_dataset().isel(draw=slice(first, last))
            return Names(self.segments.job.mcmc, self.segments.shapes).read_draws(some)

    def result(self, here: Checkpoint) -> Run:
        """The result, with all draws in the store."""
        job, draws = self.segments.job, here.record["draws"]
        names = Names(job.mcmc, self.segments.shapes)
        if draws:
            self.processes.first(lambda: self._summarise(names, here))
        held = holding(job.mcmc, self._arguments, None, here.state)
        mcmc = LazyMCMC.of(held, partial(_read, self.store, names))
        mcmc.post_warmup_state = here.state
        groups = self.store.open()
        datasets = {name: groups[name].to_dataset() for name in groups.children}
        return Run(mcmc, container(datasets), draws, draws == job.num_draws)

    def _about(self, record: Any, plain: Segments, digests: Digests) -> dict[str, Any]:
        """The facts about the run that are saved with each state.

        The digests are shared, so that each array is read once.
        """
        length, mesh = self.segments.lengths.length, self.segments.layout.mesh
        axes = [] if mesh is None else [f"{name} {size}" for name, size in mesh.shape.items()]
        return {
            # a run from an earlier version has no name
            "run": secrets.token_hex(8) if record is None else record.get("run"),
            "length": length,
            "fingerprint": fingerprint(self.segments.job, length, digests),
            "program": program_of(plain, digests)._asdict(),
            "versions": versions() | ({"mesh": ", ".join(axes)} if axes else {}),
            "created_at": now() if record is None else record["created_at"],
        }

    def _check_visible(self) -> None:
        if not (self.store.path / "zarr.json").is_file():
            raise FileNotFoundError(
                f"{self.store.path}, which process 0 has made, is not there for process "
                f"{jax.process_index()}: expected a directory on a file system that all processes "
                "share"
            )

    def _summarise(self, names: Names, here: Checkpoint) -> None:
        """Write the attributes that depend on all draws to the store."""
        datasets = self._no_draws(here.state)
        with self.store.open() as groups:
            states = names.read(groups, all_of_them=False)
        self.describer.summarise(datasets, states, here.state)
        self.lock.check()
        with advised(
            "all draws are stored, but not what depends on all of them. Make room, and call `run` "
            "again with the same arguments"
        ):
            self.store.grow(datasets, self.visible)

    def _no_draws(self, state: PyTree) -> Datasets:
        return self.describer.datasets(self.segments.no_draws, state)

    def _find(self) -> Checkpoint:
        lengths = self.segments.lengths
        if self._begins:
            start, record = self.segments.start, {**self.about, "draws": 0, "divergences": 0}
            self.store.create(self._no_draws(start), 0)  # a state always comes with a store
            self.checkpoints.save(Checkpoint(0, start, record))
        self.newest = self._load(lengths.segments)
        self.visible = self.newest.record["draws"]
        if self.visible < lengths.draws(self.newest.number):
            # a longer run: the last segment was short and is computed again
            self.newest = self._load(self.newest.number - 1)
        datasets = self._no_draws(self.newest.state)
        self.store.check_same_run(datasets)
        first = lengths.warmup_segments
        for number in range(first, self.newest.number):
            problem = self.store.problem(number - first, datasets)
            if problem:
                self.damaged.add(number)
                warn(f"{problem}: its segment is done again")
        self.store.create(datasets, self.visible)
        return self._load(min(self.damaged)) if self.damaged else self.newest

    def _shared(self, find: Callable[[], Any]) -> Checkpoint:
        """The checkpoint that the first process finds, for all processes."""
        found: list[Checkpoint] = []

        def look() -> tuple[int, Any]:
            found.append(find())
            return found[0].number, found[0].record

        number, record = self.processes.first(look)
        state = found[0].state if found else self.segments.start
        return Checkpoint(number, self.processes.spread(state), record)

    def _keep(self, number: int, done: Done, after: Checkpoint) -> bool:
        """Store a segment; returns whether to continue after it (else after the newest state)."""
        lengths = self.segments.lengths
        segment = number - lengths.warmup_segments
        datasets: Datasets = {}
        self.lock.check()
        with advised(
            f"segment {number + 1} of {lengths.segments} could not be stored. All before it are "
            f"safe; make {self.folder} writable, with room for more, and call `run` again with the "
            "same arguments"
        ):
            try:
                if done.draws:
                    datasets = self.describer.datasets(done.states, done.state)
                    self.store.write(segment, datasets)
                    self.visible = max(self.visible, after.record["draws"])
                    self.store.grow(datasets, self.visible)
                self.checkpoints.save(after)
            except OSError:
                with contextlib.suppress(OSError):
                    if segment * lengths.length >= self.visible:
                        self.store.discard(segment, datasets)
                raise
        self.damaged.discard(number)
        newest = self.newest
        return newest is None or bool(self.damaged) or after.number >= newest.number

    def _load(self, at_most: int) -> Checkpoint:
        """The newest good checkpoint with a number of at most ``at_most``."""
        found = self.checkpoints.newest(
            lambda number: self.checkpoints.load(number, self.segments.start), at_most
        )
        if found is None:
            raise ValueError(
                f"no state in {self.checkpoints.folder} from which the run could go on can be "
                "read: restore one from a copy, or begin anew in another directory"
            )
        return found


def _read(store: DrawStore, names: Names) -> dict[str, PyTree]:
    with store.open() as groups:
        return names.read(groups)


def _newest_record(folder: Path, resume: bool | str) -> Any:
    """Record of the newest checkpoint that can be read; None if there is no run."""
    checkpoints = Checkpoints(folder / STATES)
    numbers = checkpoints.numbers()
    if numbers and resume is False:
        raise FileExistsError(
            f"{folder} holds a run: expected resume='auto' to go on with it, or another directory"
        )
    if not numbers and resume in (True, OTHER_PROGRAM):
        alone = " but draws without states" if os.path.lexists(folder / STORE) else ""
        raise FileNotFoundError(
            f"{folder} holds no run{alone}: expected the directory of a run, or "
            "resume='auto' to begin"
        )
    if not numbers:
        check_free(folder / STORE)
    found = checkpoints.newest(checkpoints.record)
    if numbers and found is None:
        raise ValueError(
            f"none of the states in {checkpoints.folder} can be read: restore one from a copy, or "
            "begin anew in another directory"
        )
    return found
