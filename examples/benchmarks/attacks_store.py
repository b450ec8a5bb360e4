"""Attack long runs and rows on the host in every known way, and report the outcomes.

Each attack is made on real runs, in a separate process with a time limit, so that a crash or an
endless wait is an outcome too. There are two good outcomes: draws that are bit for bit those of an
undisturbed run, and errors that state what was expected, what was got and what to do. In both
cases, no file of the user may have changed.

    python examples/benchmarks/attacks_store.py --table docs/tables/attacks_store.md
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import xarray as xr
from jax import random
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel

from numpyro_geom import SGRLD, HostRows, run
from numpyro_geom.runs.segments import Segments

PATIENCE = 60.0
"""Seconds after which an attack counts as an endless wait."""
TYPED = (ValueError, TypeError, OSError)
DOCUMENTED = (
    "is being written by process",
    "could not read",
    "`monitor`",
)
"""Texts of the RuntimeErrors that the documentation of `run` lists."""
USERS = b"a file of the user's own\n"
MODULES = ("arviz", "zarr", "google_crc32c", "numpyro_geom.runs.keep")
"""Imported before the first fork."""
TEXT = 150
"""Number of characters of an error in the table."""


class Attack(NamedTuple):
    """One row of the table; ``do`` gets an empty folder and returns the outcome."""

    part: str
    title: str
    do: Callable[[Path], str]


ATTACKS: list[Attack] = []


def attack(part: str, title: str) -> Callable:
    """Add a row to the table."""

    def note(do: Callable[[Path], str]) -> Callable[[Path], str]:
        ATTACKS.append(Attack(part, title, do))
        return do

    return note


# One model for the store, one for rows


class WalkState(NamedTuple):
    """The position of a walk, by site, and its key."""

    z: dict
    rng_key: jax.Array


class Walk(MCMCKernel):
    """A random walk of sites with the given names: the cheapest kernel with a state."""

    sample_field = "z"

    def __init__(self, names: tuple[str, ...] = ("x",)):
        self._names = names

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        """At zero."""
        return WalkState({name: jnp.zeros(3) for name in self._names}, rng_key)

    def sample(self, state, model_args, model_kwargs):
        """A step, the same for all sites."""
        rng_key, key = random.split(state.rng_key)
        shift = random.normal(key, (3,))
        return WalkState({name: x + shift for name, x in state.z.items()}, rng_key)


def go(folder, draws=40, *, key=0, names=("x",), **settings):
    """Start or continue a walk in a folder: 10 draws per segment, one segment of warm-up."""
    mcmc = MCMC(Walk(names), num_warmup=10, num_samples=draws, progress_bar=False)
    return run(mcmc, random.key(key), directory=folder, draws_per_segment=10, **settings)


def model(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]) as i:
        features = X[i].reshape(i.shape[0], -1)[:, :2].astype(float)
        numpyro.sample(
            "y", dist.Normal(features.sum(-1) * w[0] + w[1], 1.0), obs=y[i].astype(float)
        )


def rows_of(*shape: int) -> np.ndarray:
    """Some rows."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


X, Y = rows_of(300, 2), rows_of(300)


class RowWalk(Walk):
    """A cheap walk driven by the rows of the data; it does not need the model."""

    def sample(self, state, model_args, model_kwargs):
        """A step by some of the rows."""
        rng_key, key = random.split(state.rng_key)
        X, y = (x if isinstance(x, HostRows) else jnp.asarray(x) for x in model_args)
        i = random.randint(key, (8,), 0, X.shape[0])
        step = X[i].reshape(8, -1).astype(float).sum() + y[i].sum()
        return WalkState({"x": state.z["x"] + step}, rng_key)


def go_rows(X, y=Y, folder=None, draws=20, full=False, **settings):
    """A walk by rows, or the model of rows (``full``): 5 draws per segment."""
    settings_of_kernel = {"batch_size": 8, "step_size": 1e-4, "num_steps": 4}
    kernel = SGRLD(model, **settings_of_kernel) if full else RowWalk()
    mcmc = MCMC(kernel, num_warmup=0, num_samples=draws, progress_bar=False)
    return run(mcmc, random.key(0), X, y, directory=folder, draws_per_segment=5, **settings)


# What comes of an attack


class Wrong(Exception):
    """An outcome that is neither a right answer nor an error that says what to do."""


def demand(holds: Any, text: str) -> None:
    """Raise if a condition does not hold."""
    if not holds:
        raise Wrong(text)


def draws_of(result: Any) -> np.ndarray:
    """All draws of a lazy result."""
    name = next(iter(result.idata.posterior.data_vars))
    lazily = result.idata.posterior[name].values
    at_once = np.asarray(result.mcmc.get_samples(group_by_chain=True)[name])
    demand(np.array_equal(lazily, at_once), "the result's two readings differ")
    return lazily


def same(result: Any, reference: Any = None) -> str:
    """The outcome of a run that must equal an undisturbed run."""
    demand(result.finished, "not finished")
    expected = draws_of(go(None) if reference is None else reference)
    found = draws_of(result)
    demand(found.shape == expected.shape, f"{found.shape[1]} draws in place of {expected.shape[1]}")
    demand(np.array_equal(found, expected), "other draws")
    return "the same draws"


def refused(do: Callable[[], Any], *untouched: Path) -> str:
    """The error of a call; the user's files must not change."""
    before = [content_of(path) for path in untouched]
    try:
        do()
    except TYPED as error:
        demand(not type(error).__module__.startswith("jax"), f"untyped {said(error)}")
        text = said(error)
    except RuntimeError as error:
        demand(any(part in str(error) for part in DOCUMENTED), f"untyped {said(error)}")
        text = said(error)
    else:
        text = ""
    for path, content in zip(untouched, before, strict=True):
        demand(content_of(path) == content, f"{path.name} was changed {text and f'({text})'}")
    demand(text, "no error")
    return text


def content_of(path: Path) -> Any:
    """All contents of a path: bytes of files, targets of links."""
    if path.is_symlink():
        return os.readlink(path)
    if path.is_dir():
        return {child.name: content_of(child) for child in sorted(path.iterdir())}
    return path.read_bytes() if path.is_file() else None


def said(error: BaseException) -> str:
    """An error in short."""
    text = " ".join(str(error).split())
    for folder in (tempfile.gettempdir(), str(Path(tempfile.gettempdir()).resolve())):
        text = text.replace(f"{folder}/", "")
    text = text if len(text) <= TEXT else text[: TEXT - 1] + "…"
    return f"{type(error).__name__}: {text}"


def warned(do: Callable[[], Any]) -> tuple[Any, str]:
    """The result of a call, and its first warning."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = do()
    ours = [w for w in told if issubclass(w.category, RuntimeWarning)]
    return result, said(ours[0].message) if ours else "no warning"


def users(path: Path, content: bytes = USERS) -> Path:
    """A file of the user's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@contextlib.contextmanager
def patched(owner: Any, name: str, function: Callable) -> Iterator[None]:
    """Replace a function temporarily."""
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def before_segment(number: int, do: Callable[[], Any]) -> Iterator[None]:
    """Do something before the segment with this number, counted from 0."""
    original, calls = Segments.do, iter(range(10**9))

    def segment(self, *arguments):
        if next(calls) == number:
            do()
        return original(self, *arguments)

    with patched(Segments, "do", segment):
        yield


def in_child(task: Callable[[], Any]) -> int:
    """Run a task in a separate process, forked before JAX has started."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        task()
        code = 0
    finally:
        os._exit(code)


def wait_for(done: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE / 2
    while not done():
        demand(time.monotonic() < end, "the other process did not get there")
        time.sleep(0.01)


# A store that refuses strangers

STRANGERS = "A store that refuses strangers"


def without_states(folder: Path) -> Path:
    go(folder)
    shutil.rmtree(folder / "state")
    return folder / "draws.zarr"


@attack(STRANGERS, "draws whose `state` was deleted, `resume='auto'`")
def _(folder):
    store = without_states(folder)
    return refused(lambda: go(folder, key=1), store)


@attack(STRANGERS, "the same, `resume=False`")
def _(folder):
    store = without_states(folder)
    return refused(lambda: go(folder, key=1, resume=False), store)


@attack(STRANGERS, "the same, `resume=True`")
def _(folder):
    store = without_states(folder)
    return refused(lambda: go(folder, resume=True), store)


@attack(STRANGERS, "a run that was killed before its first state was there")
def _(folder):
    (folder / "draws.zarr").mkdir(parents=True)
    killed = in_child(lambda: dies_at(os, "replace", 3, lambda: go(folder)))
    os.waitpid(killed, 0)
    demand(not list(folder.glob("state/*.npz")), "it got too far")
    return same(go(folder))


def dies_at(owner: Any, name: str, at: int, do: Callable[[], Any]) -> None:
    """End the process without a trace at one call of a function."""
    original, calls = getattr(owner, name), iter(range(1, 10**9))

    def function(*args, **kwargs):
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with patched(owner, name, function):
        do()


@attack(STRANGERS, "a user's file called `lock`")
def _(folder):
    lock = users(folder / "lock")
    return refused(lambda: go(folder), lock)


@attack(STRANGERS, "`lock` is a link to a user's file")
def _(folder):
    target = users(folder / "notes")
    (folder / "lock").symlink_to(target)
    return refused(lambda: go(folder), target)


@attack(STRANGERS, "`lock` is a link to where nothing is yet")
def _(folder):
    folder.mkdir()
    (folder / "lock").symlink_to(folder / "notes")
    return refused(lambda: go(folder), folder / "notes")


@attack(STRANGERS, "`lock` is a folder")
def _(folder):
    (folder / "lock").mkdir(parents=True)
    return refused(lambda: go(folder))


@attack(STRANGERS, "`lock` is a pipe")
def _(folder):
    folder.mkdir()
    os.mkfifo(folder / "lock")
    return refused(lambda: go(folder))


@attack(STRANGERS, "the run's directory is a user's file")
def _(folder):
    file = users(folder / "run")
    return refused(lambda: go(file), file)


@attack(STRANGERS, "`draws.zarr` is a user's file")
def _(folder):
    file = users(folder / "draws.zarr")
    return refused(lambda: go(folder), file)


@attack(STRANGERS, "`draws.zarr` is a link to a user's folder")
def _(folder):
    kept = users(folder / "other" / "notes").parent
    (folder / "draws.zarr").symlink_to(kept)
    return refused(lambda: go(folder), kept)


def stranger(path: Path, zarr_format: int = 3) -> Path:
    """A Zarr store made by a user."""
    groups = xr.DataTree.from_dict({"posterior": xr.Dataset({"x": ("draw", np.arange(5.0))})})
    groups.to_zarr(path, zarr_format=zarr_format)
    return path


@attack(STRANGERS, "`draws.zarr` is a user's Zarr store")
def _(folder):
    store = stranger(folder / "draws.zarr")
    return refused(lambda: go(folder), store)


@attack(STRANGERS, "the same of Zarr format 2")
def _(folder):
    store = stranger(folder / "draws.zarr", 2)
    return refused(lambda: go(folder), store)


@attack(STRANGERS, "the run's directory is a user's Zarr store itself")
def _(folder):
    store = stranger(folder / "data.zarr")
    before = content_of(store)
    outcome = same(go(store))
    after = content_of(store)
    demand(all(after[name] == x for name, x in before.items()), "the user's store was changed")
    return f"{outcome}, the user's files as they were"


@attack(STRANGERS, "a user's Zarr store put in the place of the draws, states kept")
def _(folder):
    go(folder)
    shutil.rmtree(folder / "draws.zarr")
    store = stranger(folder / "draws.zarr")
    return refused(lambda: go(folder), store)


@attack(STRANGERS, "the same of Zarr format 2")
def _(folder):
    go(folder)
    shutil.rmtree(folder / "draws.zarr")
    store = stranger(folder / "draws.zarr", 2)
    return refused(lambda: go(folder), store)


@attack(STRANGERS, "`state` is a user's file")
def _(folder):
    file = users(folder / "state")
    return refused(lambda: go(folder), file)


@attack(STRANGERS, "`state` is a link to a user's folder")
def _(folder):
    kept = users(folder / "other" / "notes").parent
    (folder / "state").symlink_to(kept)
    return refused(lambda: go(folder), kept)


@attack(STRANGERS, "a user's `12.npz` and `.00000001.npz.new` in `state`")
def _(folder):
    mine = users(folder / "state" / "12.npz"), users(folder / "state" / ".00000001.npz.new")
    outcome = same(go(folder))
    demand(all(path.read_bytes() == USERS for path in mine), "a file was changed")
    return f"{outcome}, the user's files as they were"


@attack(STRANGERS, "temporary names that are links to a user's file")
def _(folder):
    target = users(folder / "notes")
    go(folder, 10)
    for name in ("draws.zarr/.zarr.json.new", "state/.00000003.npz.new"):
        (folder / name).symlink_to(target)
    outcome = same(go(folder))
    demand(target.read_bytes() == USERS, "the file was changed")
    return f"{outcome}, the user's file as it was"


@attack(STRANGERS, "a group's folder is replaced by a link to a user's folder")
def _(folder):
    go(folder, 20)
    kept = folder / "other"
    shutil.move(folder / "draws.zarr" / "posterior", kept)
    (folder / "draws.zarr" / "posterior").symlink_to(kept)
    return refused(lambda: go(folder), kept)


@attack(STRANGERS, "a variable's folder becomes a link while the run is under way")
def _(folder):
    target = folder / "other"

    def swap():
        x = folder / "draws.zarr" / "posterior" / "x"
        shutil.move(x, target)
        users(target / "c.0.2.0")
        x.symlink_to(target)

    with before_segment(3, swap):
        outcome = refused(lambda: go(folder))
    demand((target / "c.0.2.0").read_bytes() == USERS, "the user's file was changed")
    return outcome


@attack(STRANGERS, "chunks and states that are links to a user's file")
def _(folder):
    go(folder, 20)
    target = users(folder / "notes")
    for path in (folder / "draws.zarr/posterior/x/c.0.1.0", folder / "state/00000003.npz"):
        path.unlink()
        path.symlink_to(target)
    result, warning = warned(lambda: go(folder))
    outcome = same(result)
    demand(target.read_bytes() == USERS, "the user's file was changed")
    return f"{warning}; then {outcome}"


MIXED = "Parts of different runs"


def swapped(one: Path, other: Path, name: str) -> None:
    """Exchange a part of two runs."""
    shutil.move(one / name, one / "kept")
    shutil.move(other / name, one / name)


@attack(MIXED, "draws of one run, states of another with another key")
def _(folder):
    go(folder / "a", key=0)
    go(folder / "b", key=1)
    swapped(folder / "a", folder / "b", "draws.zarr")
    return refused(lambda: go(folder / "a", 60), folder / "a" / "draws.zarr")


@attack(MIXED, "the same, the states are the stranger's")
def _(folder):
    go(folder / "a", key=0)
    go(folder / "b", key=1)
    swapped(folder / "a", folder / "b", "state")
    return refused(lambda: go(folder / "a", 60, key=1), folder / "a" / "draws.zarr")


@attack(MIXED, "a state renamed to a later number")
def _(folder):
    go(folder)
    state = folder / "state"
    (state / "00000004.npz").rename(state / "00000007.npz")
    result, warning = warned(lambda: go(folder, 80))
    return f"{warning}; then {same(result, go(None, 80))}"


@attack(MIXED, "a state copied over an earlier one")
def _(folder):
    go(folder)
    state = folder / "state"
    shutil.copy(state / "00000005.npz", state / "00000004.npz")
    (folder / "draws.zarr/posterior/x/c.0.3.0").unlink()
    result, warning = warned(lambda: go(folder, 80))
    return f"{warning}; then {same(result, go(None, 80))}"


@attack(MIXED, "the newest state is another run's")
def _(folder):
    go(folder / "a", 20, key=0)
    go(folder / "b", 40, key=1)
    shutil.copy(folder / "b/state/00000005.npz", folder / "a/state/00000005.npz")
    return refused(lambda: go(folder / "a"), folder / "a" / "draws.zarr")


@attack(MIXED, "an earlier state, needed for a repair, is another run's")
def _(folder):
    go(folder / "a", 40, key=0)
    go(folder / "b", 30, key=1)
    shutil.copy(folder / "b/state/00000004.npz", folder / "a/state/00000004.npz")
    (folder / "a/draws.zarr/posterior/x/c.0.3.0").unlink()
    result, warning = warned(lambda: go(folder / "a"))
    return f"{warning}; then {same(result)}"


@attack(MIXED, "the same arguments run twice, parts exchanged")
def _(folder):
    go(folder / "a", 20)
    go(folder / "b", 40)
    swapped(folder / "a", folder / "b", "draws.zarr")
    return refused(lambda: go(folder / "a", 40), folder / "a" / "draws.zarr")


@attack(MIXED, "`draws.zarr` was deleted, states kept")
def _(folder):
    go(folder)
    shutil.rmtree(folder / "draws.zarr")
    result, warning = warned(lambda: go(folder))
    return f"{warning}; then {same(result)}"


@attack(MIXED, "the root's `zarr.json` was cut short")
def _(folder):
    go(folder)
    root = folder / "draws.zarr" / "zarr.json"
    root.write_bytes(root.read_bytes()[:30])
    return same(go(folder, 60), go(None, 60))


# Paths and locks

PATHS = "Paths and locks"


@attack(PATHS, "`os.chdir` during a run whose directory is relative")
def _(folder):
    folder.mkdir()
    os.chdir(folder)
    with before_segment(2, lambda: os.chdir("/")):
        result = go("run")
    return same(result)


@attack(PATHS, "`os.chdir` before the result is read")
def _(folder):
    folder.mkdir()
    os.chdir(folder)
    result = go("run")
    os.chdir("/")
    return same(result)


@attack(PATHS, "`lock` is deleted during the run")
def _(folder):
    with before_segment(2, lambda: (folder / "lock").unlink()):
        return refused(lambda: go(folder)) + "; then " + same(go(folder))


@attack(PATHS, "`lock` is replaced during the run by another process, which writes on")
def _(folder):
    def other():
        wait_for(lambda: (folder / "ready").exists())
        (folder / "lock").unlink()
        with before_segment(1, lambda: time.sleep(3.0)):
            go(folder)

    child = in_child(other)

    def let():
        users(folder / "ready")
        wait_for(lambda: (folder / "lock").exists() and str(child) in (folder / "lock").read_text())

    with before_segment(2, let):
        text = refused(lambda: go(folder))
    os.waitpid(child, 0)
    return f"{text}; then {same(go(folder))}"


@attack(PATHS, "the directory is moved away during the run")
def _(folder):
    with before_segment(2, lambda: folder.rename(folder.with_name("moved"))):
        text = refused(lambda: go(folder))
    demand(not folder.exists(), "another directory was begun")
    return f"{text}; then {same(go(folder.with_name('moved')))}"


@attack(PATHS, "SIGKILL leaves a lock behind")
def _(folder):
    child = in_child(lambda: go(folder, 10**6))
    wait_for(lambda: (folder / "state" / "00000003.npz").exists())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    demand(str(child) in (folder / "lock").read_text(), "no lock was left")
    draws = 10 * max(int(path.stem) for path in (folder / "state").glob("*.npz"))
    return same(go(folder, draws), go(None, draws))


@attack(PATHS, "the lock left behind names a process that lives: the number was given again")
def _(folder):
    go(folder, 10)
    text = (folder / "lock").read_text()
    (folder / "lock").write_text(text.replace(str(os.getpid()), "1"))
    return same(go(folder))


@attack(PATHS, "two processes at once")
def _(folder):
    child = in_child(lambda: go(folder, 10**6))
    try:
        wait_for(lambda: (folder / "state" / "00000001.npz").exists())
        text = refused(lambda: go(folder, 10**6))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return text


def no_promise(*_: Any) -> None:
    """A `flock` of a network file system that grants the lock to every host."""


@attack(PATHS, "two hosts on a file system whose locks do not see each other")
def _(folder):
    def other():
        with patched(fcntl, "flock", no_promise), before_segment(1, lambda: time.sleep(2.0)):
            wait_for(lambda: (folder / "ready").exists())
            go(folder)

    child = in_child(other)

    def let():
        users(folder / "ready")
        wait_for(lambda: str(child) in (folder / "lock").read_text())

    with patched(fcntl, "flock", no_promise), before_segment(2, let):
        text = refused(lambda: go(folder))
    os.waitpid(child, 0)
    return f"{text}; then {same(go(folder))}"


@attack(PATHS, "a file system without locks")
def _(folder):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with patched(fcntl, "flock", flock):
        return refused(lambda: go(folder))


@attack(PATHS, "a killed run's own child lives on, and holds the lock")
def _(folder):
    def parent():
        def begin_child():
            child = in_child(lambda: time.sleep(6))
            users(folder / "child", str(child).encode())

        with before_segment(2, begin_child):
            go(folder, 10**6)

    first = in_child(parent)
    wait_for(lambda: (folder / "child").exists() and (folder / "child").read_text())
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    return refused(lambda: go(folder, 10**6))


# Names of sites

NAMES = "Names of sites"


def name_is(*names: str) -> Callable[[Path], str]:
    def do(folder: Path) -> str:
        def outcome() -> str:
            result = go(folder, 20, names=names)
            expected = go(None, 20).idata.posterior["x"].values
            # opened as any reader would
            with xr.open_datatree(
                folder / "draws.zarr", engine="zarr", consolidated=True
            ) as groups:
                stored = groups["posterior"].to_dataset()
                for name in names:
                    values = stored[name.replace("/", ".")].values
                    demand(np.array_equal(values, expected), f"other draws of {name!r}")
                    demand(
                        np.array_equal(result.mcmc.get_samples()[name], expected[0]),
                        f"other draws of {name!r} in the result",
                    )
            return "the same draws"

        with before_segment(0, lambda: users(folder.with_name("drawn"))):
            try:
                text = outcome()
            except TYPED as error:
                text = said(error)
                demand(not folder.with_name("drawn").exists(), f"after draws were made: {text}")
        inside = {path.name for path in folder.parent.iterdir()}
        demand(inside <= {folder.name, "drawn"}, "something was written outside of the directory")
        if folder.exists():
            left = {path.name for path in folder.iterdir()}
            demand(left <= {"lock", "state", "draws.zarr"}, f"{left} were written")
        return text

    return do


for names, title in {
    ("..",): "`..`",
    (".",): "`.`",
    ("",): "the empty name",
    ("zarr.json",): "`zarr.json`",
    ("__x",): "`__x`, which Zarr keeps for itself",
    ("a/b", "a.b"): "`a/b` beside `a.b`",
    ("../../x",): "`../../x`",
    ("c/0/0",): "`c/0/0`",
    ("c.0.0", "x"): "`c.0.0`, as chunks are called",
    ("x" * 300,): "a name of 300 bytes",
    ("é" * 124,): "a name of 248 bytes in 124 letters",
    ("a\0b",): "a name with a zero byte",
    ("a\ud800",): "a name that is no text in UTF-8",
    ("a b\n%2F?*:|",): "a name with spaces, a new line and signs",
    ("chain",): "`chain`, as the axis is called",
    ("draw",): "`draw`, likewise",
    ("x", "x_dim_0"): "`x_dim_0`, as an axis of `x` is called",
}.items():
    attack(NAMES, title)(name_is(*names))


@attack(NAMES, "`a/b` beside `a.b` without a directory")
def _(folder):
    with before_segment(0, lambda: users(folder / "drawn")):
        text = refused(lambda: go(None, names=("a/b", "a.b")))
    demand(not (folder / "drawn").exists(), f"after draws were made: {text}")
    return text


# A full disk and signals

DISK = "A full disk and signals"


def fails_in_turn(owner: Any, name: str, folder: Path, every: int) -> str:
    """Let each call of a function fail, in one run for each; then continue."""
    inside = str(folder.resolve())
    fatal, calls, original = 0, 0, getattr(owner, name)

    def function(*args, **kwargs):
        nonlocal calls
        place = args[0] if args else ""
        mine = isinstance(place, int) or str(place).startswith((inside, ".")) or "dir_fd" in kwargs
        if mine:
            calls += 1
        if mine and calls == fatal:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    expected = go(None, 30)
    with patched(owner, name, function):
        go(folder / "counted", 30)
    total = calls
    failed = 0
    for fatal in range(1, total + 1, every):
        directory, calls = folder / f"run-{fatal}", 0
        with patched(owner, name, function):
            try:
                go(directory, 30)
            except OSError as error:
                demand(error.errno == errno.ENOSPC, said(error))
                demand("call `run` again" in str(error), f"does not say what to do: {said(error)}")
                failed += 1
        fatal_was, fatal = fatal, 0
        if list(directory.glob("state/*.npz")):
            with xr.open_datatree(directory / "draws.zarr", engine="zarr") as groups:
                found = groups["posterior"]["x"].values
            reference = draws_of(expected)[:, : found.shape[1]]
            demand(np.array_equal(found, reference), f"other draws in the store at {fatal_was}")
        same(go(directory, 30), expected)
        left = [path.name for path in directory.rglob(".*")]
        demand(not left, f"{left} left behind")
        shutil.rmtree(directory)
    demand(failed, "nothing failed")
    return f"{failed} of {total} calls: OSError each, the store valid, then the same draws"


for owner, name, every in (
    (os, "fsync", 5),
    (os, "replace", 6),
    (os, "mkdir", 3),
    (os, "open", 11),
):
    attack(DISK, f"full at a call of `{name}`")(
        lambda folder, owner=owner, name=name, every=every: fails_in_turn(
            owner, name, folder, every
        )
    )


@attack(DISK, "a file system of 256 KB fills, and is made larger")
def _(folder):
    folder.mkdir()
    code = (
        "import attacks_store as a, os, sys\n"
        "folder = a.Path(sys.argv[1])\n"
        "text = a.refused(lambda: a.go(folder, 3000))\n"
        "assert not os.system(f'mount -o remount,size=64m {folder}')\n"
        "print(text + '; then ' + a.same(a.go(folder, 3000), a.go(None, 3000)))\n"
    )
    mount = f'mount -t tmpfs -o size=256k none {folder} && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "-"]
    found = subprocess.run(
        [*inside, sys.executable, "-c", code, str(folder)],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    demand(not found.returncode, found.stderr.strip()[-300:])
    return found.stdout.strip().splitlines()[-1]


def twice(folder: Path, wait: float) -> str:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(wait)
    return ""


@attack(DISK, "SIGINT twice between two segments")
def _(folder):
    try:
        with before_segment(2, lambda: twice(folder, 0.01)):
            go(folder)
    except KeyboardInterrupt:
        return f"KeyboardInterrupt; then {same(go(folder))}"
    return "no interrupt"


@attack(DISK, "SIGINT twice while a segment of minutes is computed")
def _(folder):
    kernel = SGRLD(potential_fn=lambda z: 0.5 * jnp.sum(z**2), step_size=0.1, num_steps=10**8)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=10, progress_bar=False)
    sent = []

    def send():
        time.sleep(8)
        for _ in range(2):
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    threading.Thread(target=send, daemon=True).start()
    try:
        run(mcmc, random.key(0), init_params=jnp.zeros(10), directory=folder)
    except KeyboardInterrupt:
        seconds = time.monotonic() - sent[-1]
        demand(seconds < 5, f"stopped after {seconds:.0f} seconds")
        return "KeyboardInterrupt within 5 seconds"
    return "no interrupt"


@attack(DISK, "SIGINT twice at each kind of writing")
def _(folder):
    count = 0
    for name in ("fsync", "replace"):
        for at in (2, 9, 16):
            directory = folder / f"{name}-{at}"
            original, calls = getattr(os, name), iter(range(10**9))

            def function(*args, original=original, calls=calls, at=at, **kwargs):
                if next(calls) == at:
                    twice(folder, 0.0)
                return original(*args, **kwargs)

            try:
                with patched(os, name, function):
                    go(directory)
            except KeyboardInterrupt:
                count += 1
            same(go(directory))
    return f"{count} times KeyboardInterrupt, each time the same draws then"


@attack(DISK, "1,000 segments: memory")
def _(folder):
    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    sizes = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            patched(os, "fsync", lambda _: None)
        )  # the disk's speed is not at issue
        for number in (200, 1000):
            stack.enter_context(
                before_segment(number, lambda number=number: sizes.update({number: resident()}))
            )
        go(folder, 10_000)
    grown = sizes[1000] - sizes[200]
    demand(grown < 16, f"{grown:.0f} MB more after 1,000 than after 200 segments")
    return f"{max(0, round(grown))} MB more after 1,000 than after 200 segments"


# Rows on the host

ROWS = "Rows on the host"


class Source:
    """Rows of an array, which go through ``fault`` when one is set."""

    def __init__(self, array: np.ndarray, dtype: Any = None, shape: Any = None):
        self.array, self.fault = array, None
        self.shape = array.shape if shape is None else shape
        self.dtype = np.dtype(array.dtype if dtype is None else dtype)

    def __getitem__(self, rows):
        found = self.array[rows]
        return found if self.fault is None else self.fault(found)


def raises(error: BaseException) -> Callable[[Any], Any]:
    """A fault."""

    def fault(_: Any) -> Any:
        raise error

    return fault


def in_mid_run(folder: Path, fault: Callable, timeout: float = 5.0, **settings: Any) -> str:
    """A source with a fault from the third segment on, and the run after the fault is removed."""
    source = Source(X)
    data = HostRows(source, timeout=timeout)
    with before_segment(2, lambda: setattr(source, "fault", fault)):
        text = refused(lambda: go_rows(data, folder=folder, **settings))
    source.fault = None
    again = go_rows(data, folder=folder, **settings)
    return f"{text}; then {same(again, go_rows(X, **settings))}"


def memmap_of(folder: Path, array: np.ndarray = X) -> Any:
    """A file of rows, mapped."""
    folder.mkdir(exist_ok=True)
    np.save(folder / "X.npy", array)
    return np.load(folder / "X.npy", mmap_mode="r")


@attack(ROWS, "a memory map is cut short under the run")
def _(folder):
    rows, path = rows_of(20_000, 2), folder / "X.npy"
    data = HostRows(memmap_of(folder, rows))
    with before_segment(2, lambda: os.truncate(path, 4096)):
        text = refused(lambda: go_rows(data, rows[:, 0], folder / "run"))
    np.save(path, rows)
    again = HostRows(np.load(path, mmap_mode="r"))
    expected = go_rows(rows, rows[:, 0])
    return f"{text}; then {same(go_rows(again, rows[:, 0], folder / 'run'), expected)}"


@attack(ROWS, "a memory map is cut short before the run")
def _(folder):
    rows = rows_of(20_000, 2)
    data = HostRows(memmap_of(folder, rows))
    os.truncate(folder / "X.npy", 4096)
    return refused(lambda: go_rows(data, rows[:, 0]))


@attack(ROWS, "the same, passed without `HostRows`")
def _(folder):
    rows = rows_of(20_000, 2)
    data = memmap_of(folder, rows)
    os.truncate(folder / "X.npy", 4096)
    return refused(lambda: go_rows(data, rows[:, 0]))


@attack(ROWS, "the same, with `on_bad_rows='keep'`")
def _(folder):
    rows = rows_of(20_000, 2)
    data = memmap_of(folder, rows)
    os.truncate(folder / "X.npy", 4096)
    return refused(lambda: go_rows(data, rows[:, 0], on_bad_rows="keep"))


@attack(ROWS, "`HostRows` of a memory map that is cut short")
def _(folder):
    data = memmap_of(folder, rows_of(20_000, 2))
    os.truncate(folder / "X.npy", 4096)
    return refused(lambda: HostRows(data))


@attack(ROWS, "a memory map's file is deleted under the run")
def _(folder):
    data = HostRows(memmap_of(folder))
    with before_segment(2, (folder / "X.npy").unlink):
        return same(go_rows(data), go_rows(X))


@attack(ROWS, "a memory map's file is replaced by another under the run")
def _(folder):
    data = HostRows(memmap_of(folder))
    np.save(folder / "new.npy", X + 1)
    with before_segment(2, lambda: os.replace(folder / "new.npy", folder / "X.npy")):
        return same(go_rows(data), go_rows(X))


def series() -> Any:
    """A series with labels that are not positions."""
    import pandas as pd

    return pd.Series(Y, index=np.arange(len(Y))[::-1])


BAD_SOURCES = {
    "of objects": lambda: X.astype(object),
    "of texts": lambda: X.astype(str),
    "of dates": lambda: X.astype("datetime64[s]"),
    "with named fields": lambda: np.zeros(300, [("a", "f4"), ("b", "f4")]),
    "masked": lambda: np.ma.masked_less(X, -1.0),
    "a pandas series with labels": series,
    "without rows": lambda: X[:0],
    "without axes": lambda: X[0, 0],
    "whose shape is no shape": lambda: Source(X, shape=(None, 2)),
    "that has fewer rows than it says": lambda: Source(X, shape=(400, 2)),
    "that has more columns than it says": lambda: Source(X, shape=(300, 1)),
    "that says whole numbers and gives fractions": lambda: Source(X, dtype=np.int32),
    "that says unsigned numbers and gives negative ones": lambda: Source(
        X.astype(np.int64), dtype=np.uint8
    ),
    "that says real numbers and gives complex ones": lambda: Source(
        X.astype(complex), dtype=np.float32
    ),
    "that says numbers and gives texts": lambda: Source(X.astype(str), dtype=np.float32),
    "of whole numbers above 32 bits, without x64": lambda: np.full((300, 2), 2**40),
    "of float64 above 32 bits, without x64": lambda: np.full((300, 2), 1e300),
    "of NaN in one row": lambda: np.where(np.arange(300)[:, None] == 7, np.nan, X),
    "of NaN in all rows": lambda: np.full((300, 2), np.nan),
}
for what, make in BAD_SOURCES.items():

    @attack(ROWS, f"a source {what}")
    def _(folder, make=make):
        return refused(lambda: go_rows(HostRows(make(), timeout=5.0)))


for what in ("of objects", "of texts", "masked", "without rows"):

    @attack(ROWS, f"an array {what}, without `HostRows`")
    def _(folder, what=what):
        return refused(lambda: go_rows(BAD_SOURCES[what](), full=True))


@attack(ROWS, "an array of whole numbers above 32 bits, without `HostRows` and x64")
def _(folder):
    _, warning = warned(lambda: go_rows(np.full((300, 2), 2**40)))
    demand(warning != "no warning", "other numbers without a word")
    return warning


GOOD_SOURCES = {
    "with one axis": lambda: X[:, 0],
    "with three axes": lambda: rows_of(300, 2, 3),
    "with one row": lambda: X[:1],
    "of float64, without x64": lambda: X.astype(np.float64),
    "of truth values": lambda: X > 0,
    "of float16": lambda: X.astype(np.float16),
    "with the other order of bytes": lambda: X.astype(">f4"),
    "in Fortran's order": lambda: np.asfortranarray(X),
    "with a negative step": lambda: X[::-1],
}
for what, make in GOOD_SOURCES.items():

    @attack(ROWS, f"a source {what}")
    def _(folder, make=make):
        array = make()
        y = Y[: len(array)]
        plain = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("="))
        return same(go_rows(HostRows(array), y), go_rows(plain, y))


@attack(ROWS, "a source of float64, with x64")
def _(folder):
    array = np.random.default_rng(1).normal(size=(300, 2))
    with jax.enable_x64(True):
        return same(go_rows(HostRows(array)), go_rows(array))


@attack(ROWS, "a source that raises in mid-run")
def _(folder):
    return in_mid_run(folder, raises(OSError("the drive is gone")))


@attack(ROWS, "a source that calls `sys.exit`")
def _(folder):
    return in_mid_run(folder, raises(SystemExit(3)))


@attack(ROWS, "a source that raises KeyboardInterrupt")
def _(folder):
    return in_mid_run(folder, raises(KeyboardInterrupt()))


@attack(ROWS, "a source that gives None in mid-run")
def _(folder):
    return in_mid_run(folder, lambda rows: None)


@attack(ROWS, "a source that gives fewer rows in mid-run")
def _(folder):
    return in_mid_run(folder, lambda rows: rows[1:])


@attack(ROWS, "a source that gives texts in mid-run")
def _(folder):
    return in_mid_run(folder, lambda rows: rows.astype(str))


@attack(ROWS, "a source that gives a list of unequal rows in mid-run")
def _(folder):
    return in_mid_run(folder, lambda rows: [[1.0], [1.0, 2.0]])


@attack(ROWS, "a source that stalls in mid-run")
def _(folder):
    return in_mid_run(folder, lambda rows: time.sleep(2.0) or rows, timeout=0.5)


@attack(ROWS, "a source that never answers in mid-run")
def _(folder):
    return in_mid_run(folder, lambda rows: threading.Event().wait(), timeout=0.5)


@attack(ROWS, "a source that never answers from the start")
def _(folder):
    source = Source(X)
    source.fault = lambda rows: threading.Event().wait()
    return refused(lambda: go_rows(HostRows(source, timeout=0.5)))


@attack(ROWS, "a source that never answers, and Ctrl-C twice")
def _(folder):
    source = Source(X)
    data = HostRows(source, timeout=4.0)

    def never(rows):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return threading.Event().wait()

    try:
        with before_segment(2, lambda: setattr(source, "fault", never)):
            go_rows(data, folder=folder)
    except (KeyboardInterrupt, TimeoutError):
        return "KeyboardInterrupt or TimeoutError, when the source's `timeout` is over"
    return "WRONG: no interrupt"


@attack(ROWS, "a slow source")
def _(folder):
    source = Source(X)
    source.fault = lambda rows: time.sleep(0.05) or rows
    return same(go_rows(HostRows(source)), go_rows(X))


@attack(ROWS, "a source that fails every 13th read, and `run` called again and again")
def _(folder):
    reads = iter(range(10**9))
    source = Source(X)
    data = HostRows(source)

    def flaky(rows):
        if next(reads) % 13 == 12:
            raise OSError("try again")
        return rows

    source.fault = flaky
    for count in range(50):
        try:
            result = go_rows(data, folder=folder)
        except RuntimeError as error:
            demand("could not read" in str(error), said(error))
        else:
            return f"after {count} errors {same(result, go_rows(X))}"
    raise Wrong("it never ended")


@attack(ROWS, "a source that grows under the run")
def _(folder):
    source = Source(X)

    def grow(rows):
        source.array, source.shape = np.concatenate([X, X]), (600, 2)
        return rows

    data = HostRows(source)
    with before_segment(2, lambda: setattr(source, "fault", grow)):
        return same(go_rows(data), go_rows(X))


@attack(ROWS, "a source that shrinks under the run")
def _(folder):
    def shrink(rows):
        source.array, source.shape = X[:5], (5, 2)
        return rows

    source = Source(X)
    data = HostRows(source)
    with before_segment(2, lambda: setattr(source, "fault", shrink)):
        return refused(lambda: go_rows(data))


@attack(ROWS, "a source that calls JAX")
def _(folder):
    source = Source(X)
    source.fault = lambda rows: jnp.asarray(rows) * 1
    data = HostRows(source, timeout=5.0)
    try:
        return same(go_rows(data), go_rows(X))
    except TimeoutError as error:
        return said(error)


@attack(ROWS, "a forked child reads rows while its parent does")
def _(folder):
    data = HostRows(Source(X))
    ready = []

    def child():
        signal.alarm(20)
        demand(np.array_equal(data.reader.take(np.arange(40), np.float32), X[:40]), "other rows")

    def fork():
        source = data.source
        source.fault = lambda rows: time.sleep(0.3) or rows
        data.reader.prepare(np.arange(40), np.float32)
        ready.append(in_child(child))

    with before_segment(2, fork):
        outcome = same(go_rows(data), go_rows(X))
    demand(not os.waitpid(ready[0], 0)[1], "the child did not get its rows")
    return outcome


@attack(ROWS, "NaN in a row, `on_bad_rows='drop'`")
def _(folder):
    bad = np.where(np.arange(300)[:, None] == 7, np.nan, X)
    found = go_rows(HostRows(bad), HostRows(Y), on_bad_rows="drop")
    return same(found, go_rows(np.delete(X, 7, 0), np.delete(Y, 7)))


@attack(ROWS, "NaN in one of three axes, `on_bad_rows='drop'`")
def _(folder):
    rows = rows_of(300, 2, 3)
    bad = rows.copy()
    bad[9, 1, 2] = np.nan
    found = go_rows(HostRows(bad), HostRows(Y), on_bad_rows="drop")
    return same(found, go_rows(np.delete(rows, 9, 0), np.delete(Y, 9)))


@attack(ROWS, "infinity in one row")
def _(folder):
    result = go_rows(HostRows(np.where(np.arange(300)[:, None] == 7, np.inf, X)), full=True)
    demand(np.isfinite(draws_of(result)).all(), "draws that are not finite")
    return "draws stay finite"


@attack(ROWS, "NaN that the source gives in mid-run only")
def _(folder):
    source = Source(X)
    data = HostRows(source)
    with before_segment(2, lambda: setattr(source, "fault", lambda rows: rows * np.nan)):
        result = go_rows(data, folder=folder, full=True)
    demand(np.isfinite(draws_of(result)).all(), "draws that are not finite")
    diverging = result.idata.sample_stats["diverging"].values
    demand(diverging[:, 10:].all(), "not counted")
    return "the steps are undone and counted in `diverging`"


# The table


def outcome_of(each: Attack, folder: Path) -> str:
    """The outcome of an attack, made in a separate process."""
    folder.mkdir()
    out = folder / "outcome"

    def task() -> None:
        os.setpgrp()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        warnings.simplefilter("ignore")
        try:
            text = each.do(folder / "here")
        except Wrong as error:
            text = f"WRONG: {error}"
        except BaseException as error:
            text = f"WRONG: untyped {said(error)}"
        out.write_text(text)

    child, end = in_child(task), time.monotonic() + PATIENCE
    status = None
    while status is None and time.monotonic() < end:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = code if ended else None
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return "WRONG: no end" + (f" after: {out.read_text()}" if out.exists() else "")
    if os.WIFSIGNALED(status):
        return f"WRONG: killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return out.read_text() if out.exists() else f"WRONG: ended with status {status}"


def table(attacks: list[Attack], folder: Path) -> tuple[str, int]:
    """Numbers of attacks and of right outcomes, and how many outcomes are wrong."""
    # compiled programs are kept on disk; otherwise compilation would take most of the time
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    for module in MODULES:
        importlib.import_module(module)
    # and compiled quickly, because all attacks compute the same
    jax.config.update("jax_disable_most_optimizations", True)
    right = {each.part: [0, 0] for each in attacks}
    total = time.monotonic()
    for number, each in enumerate(attacks):
        begun = time.monotonic()
        outcome = outcome_of(each, folder / f"{number}")
        right[each.part][0] += 1
        right[each.part][1] += not outcome.startswith("WRONG")
        print(f"{time.monotonic() - begun:5.1f} s  {each.title}: {outcome}", flush=True)
        shutil.rmtree(folder / f"{number}", ignore_errors=True)
    print(f"{time.monotonic() - total:.0f} s")
    lines = [f"| {part} | {n} | {good} |\n" for part, (n, good) in right.items()]
    wrong = len(attacks) - sum(good for _, good in right.values())
    return "| attacks on | number | right outcome |\n|---|---|---|\n" + "".join(lines), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="file to write the table to")
    parser.add_argument("--only", help="attacks whose title or part holds this text")
    options = parser.parse_args()
    chosen = [a for a in ATTACKS if options.only is None or options.only in a.title + a.part]
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        text, wrong = table(chosen, Path(folder))
    print(f"{len(chosen)} attacks, {wrong} with a wrong outcome")
    if options.table:
        options.table.write_text(text)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
