"""Where a run keeps its segments: in memory, or in a folder from which it can go on.

Both keepers name draws, dimensions and attributes as `to_inference_data` does.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import MCMC

from .._numpyro import LazyMCMC, holding, sample_field
from .._util import PyTree
from ..diagnostics.draws import paths
from ..diagnostics.inference_data import Labels, constants, container, now
from ..diagnostics.record import facts_as_attributes, record_of_mcmc, sample_stats
from ..diagnostics.replay import model_of, observed_values
from ..kernel import SGKernel
from ..model.digests import Digests
from ..rows.host_rows import host_rows_in
from .files import Lock, advised
from .fingerprint import check_same, digests_of_parts, fingerprint, program_of, versions, warn
from .mesh import Layout
from .segments import Job, Segments, without_mesh
from .store import Checkpoint, Checkpoints, Datasets, DrawStore, check_free

STORE = "draws.zarr"
STATES = "state"
OTHER_PROGRAM = "other_program"
"""Value of ``resume`` that allows a different program."""
_NOT_BEGUN = (
    "cannot be prepared for the run. What was stored before is safe: make it writable, with room "
    "for more, and call `run` again with the same arguments"
)


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


class InMemory:
    """Keeps the draws of a run in memory."""

    to_go_on = "with a directory it could go on"

    def __init__(self, job: Job, length: int | None, layout: Layout) -> None:
        self.segments = Segments(job, length, layout)
        self._kept = [jax.tree.map(lambda x: x[:, :0], self.segments.no_draws)]
        arguments = self._arguments = layout.readable((job.args, job.kwargs))
        self._describer = Describer(job.mcmc, arguments, now())

    def start(self) -> Checkpoint:
        """The checkpoint before the first segment."""
        # names that cannot be exported raise before there are draws
        self._describer.datasets(self.segments.no_draws, self.segments.start)
        return Checkpoint(0, self.segments.start, {"draws": 0, "divergences": 0})

    def keep(self, number: int, states: dict[str, PyTree], after: Checkpoint) -> Checkpoint:
        """Keep the draws of a segment."""
        draws = self.segments.lengths.drawn(number)
        if draws:
            self._kept.append(jax.tree.map(lambda x: x[:, :draws], states))
        return after

    def draws(self, first: int, last: int) -> PyTree:
        """Draws ``first`` to ``last - 1``, all of one segment."""
        kept = self._kept[1 + first // self.segments.lengths.length]
        return kept[self.segments.fields[0]]

    def result(self, here: Checkpoint) -> Run:
        """The result, with all draws."""
        job = self.segments.job
        states = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *self._kept)
        mcmc = holding(job.mcmc, self._arguments, states, here.state)
        mcmc.post_warmup_state = here.state
        datasets = self._describer.datasets(states, here.state)
        draws = here.record["draws"]
        if draws:
            self._describer.summarise(datasets, states, here.state)
        return Run(mcmc, container(datasets), draws, draws == job.num_draws)


class OnDisk:
    """Keeps the segments of a run in a folder; starts or continues the run there.

    With several processes, only the first one writes to the folder and reads states from it. The
    others open the draws at the end.

    Attributes:
        segments: the segments of the run. A run in the folder gives their length.
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
        # a run may continue on another mesh, so the program without a mesh identifies it
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
        self.damaged: set[int] = set()
        self.newest: Checkpoint | None = None

    def start(self) -> Checkpoint:
        """Where to start or continue: after the last segment before which all segments are good."""
        with advised(f"{self.folder} {_NOT_BEGUN}"):
            found = self._shared(self._find)
        self.processes.all(self._check_visible)
        return found

    def keep(self, number: int, states: dict[str, PyTree], after: Checkpoint) -> Checkpoint:
        """Store a segment; returns the checkpoint to continue from."""
        after = after._replace(record={**self.about, **after.record})
        if self.processes.first(lambda: self._keep(number, states, after)):
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
        mcmc = LazyMCMC.of(held, partial(_all_fields, self.store, names))
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
            self.store.describe(datasets)

    def _no_draws(self, state: PyTree) -> Datasets:
        return self.describer.datasets(self.segments.no_draws, state)

    def _find(self) -> Checkpoint:
        lengths = self.segments.lengths
        if self._begins:
            start, record = self.segments.start, {**self.about, "draws": 0, "divergences": 0}
            self.store.create(self._no_draws(start), 0)  # a state always comes with a store
            self.checkpoints.save(Checkpoint(0, start, record))
        self.newest = self._load(lengths.segments)
        visible = self.newest.record["draws"]
        if visible < lengths.draws(self.newest.number):
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
        self.store.create(datasets, visible)
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

    def _keep(self, number: int, states: dict[str, PyTree], after: Checkpoint) -> bool:
        """Store a segment; returns whether to continue after it (else after the newest state)."""
        lengths = self.segments.lengths
        segment = number - lengths.warmup_segments
        self.lock.check()
        with advised(
            f"segment {number + 1} of {lengths.segments} could not be stored. All before it are "
            f"safe; make {self.folder} writable, with room for more, and call `run` again with the "
            "same arguments"
        ):
            if lengths.drawn(number):
                datasets = self.describer.datasets(states, after.state)
                self.store.write(segment, datasets, after.record["draws"])
            self.checkpoints.save(after)
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


def _all_fields(store: DrawStore, names: Names) -> dict[str, PyTree]:
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


class Describer:
    """Names, dimensions and attributes of a run's draws, the same as in `to_inference_data`."""

    def __init__(self, mcmc: MCMC, arguments: tuple, created_at: str) -> None:
        self._mcmc, self._arguments, self._created_at = mcmc, arguments, created_at
        self._static: dict[str, dict[str, np.ndarray]] | None = None
        self._model: Any = None

    def datasets(self, states: Mapping[str, PyTree], last_state: PyTree) -> Datasets:
        """Groups of an ArviZ container, from arrays of shape (chains, draws, ...) by field."""
        view = holding(self._mcmc, self._arguments, states, last_state)
        results = _quietly(record_of_mcmc, view)
        if self._static is None:
            observed = {}
            self._model = model_of(view)
            if self._model is not None:
                # of rows in parts, each process has only its own
                in_parts = any(x.is_part for x in host_rows_in(self._arguments))
                observed = {} if in_parts else observed_values(self._model)
            given = constants(self._model, None, observed)
            self._static = {"observed_data": observed, "constant_data": given}
        groups = {
            "posterior": results.posterior,
            "sample_stats": results.sample_stats,
            **self._static,
        }
        # attributes that depend on the draws are set when all draws exist
        later = {}
        if isinstance(self._mcmc.sampler, SGKernel):
            later = _quietly(facts_as_attributes, view)
        settings = {name: x for name, x in results.attributes.items() if name not in later}
        # the scale is not learned yet; the state of the chains will have it
        results = results._replace(attributes=settings, scale=None)
        return Labels(groups, self._model).datasets(results, self._created_at)

    def summarise(
        self, datasets: Datasets, states: Mapping[str, PyTree], last_state: PyTree
    ) -> None:
        """Set attributes that depend on all draws; ``states`` may lack the draws themselves."""
        if isinstance(self._mcmc.sampler, SGKernel):
            states = {**states, sample_field(self._mcmc): {}}
            view = holding(self._mcmc, self._arguments, states, last_state)
            datasets["posterior"].attrs.update(facts_as_attributes(view))


def _quietly(function: Callable[[MCMC], Any], mcmc: MCMC) -> Any:
    """Call a function without warnings: before the first segment, all draws are zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return function(mcmc)


class Names:
    """The place of each field of the state in an ArviZ container.

    The places are found by exporting one draw in which every entry has a different number. So they
    are right for any names that the export chooses. A field that the export leaves out has no
    place. ``shapes`` are a segment's shapes by field, the field of the draw first.
    """

    def __init__(self, mcmc: MCMC, shapes: Mapping[str, PyTree]) -> None:
        self.shapes = shapes
        field, *others = shapes
        self.draw = [(name, leaf) for name, leaf in paths(shapes[field], "z")]
        leaves, structure = jax.tree.flatten({name: shapes[name] for name in others})
        # not integers, because the export might produce the same integers
        marks = [np.full((1, 1), k + 0.5) for k in range(len(leaves))]
        fields: dict[str, PyTree] = jax.tree.unflatten(structure, marks)
        view = holding(mcmc, ((), {}), {field: {}, **fields})
        found = {float(x.ravel()[0]): name for name, x in sample_stats(view).items()}
        self.stats: dict[str, list[tuple[str, int]]] = {
            name: [
                (found[sign * float(mark[0, 0])], sign)
                for mark in jax.tree.leaves(fields[name])
                for sign in (1, -1)
                if sign * float(mark[0, 0]) in found
            ]
            for name in others
        }

    def read(self, groups: Any, *, all_of_them: bool = True) -> dict[str, PyTree]:
        """Fields of all draws, (chains, draws, ...); or only those with one number per draw."""
        found: dict[str, PyTree] = {}
        field, *others = self.shapes
        if all_of_them:
            found[field] = self.read_draws(groups["posterior"])
        for name in others:
            leaves, structure = jax.tree.flatten(self.shapes[name])
            if not all_of_them and any(len(leaf.shape) > 2 for leaf in leaves):
                continue
            if len(leaves) == len(self.stats[name]):
                values = []
                for (variable, sign), leaf in zip(self.stats[name], leaves, strict=True):
                    value = _read(groups["sample_stats"], variable, leaf)
                    values.append(-value if sign < 0 else value)
                found[name] = jax.tree.unflatten(structure, values)
        return found

    def read_draws(self, posterior: Any) -> PyTree:
        """The draws themselves, shaped (chains, draws, ...)."""
        field, *_ = self.shapes
        leaves = [_read(posterior, name, leaf) for name, leaf in self.draw]
        return jax.tree.unflatten(jax.tree.structure(self.shapes[field]), leaves)


def _read(group: Any, name: str, like: Any) -> np.ndarray:
    return np.asarray(group[name.replace("/", ".")].values).astype(like.dtype)
