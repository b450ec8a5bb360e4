"""Attacks on runs: foreign files, links, mixed parts, lost locks, full disks, names."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil

import numpy as np
import pytest
import xarray as xr
from jax import random
from test_runs import Walk, assert_reference, cut, go, walk

from numpyro_geom.runs import files, keep, run, store
from numpyro_geom.runs.segments import Segments

pytest.importorskip("zarr")


def before_segment(monkeypatch, number, do):
    """Do something before the segment with this number; two of warm-up come first."""
    original, calls = Segments.do, iter(range(100))

    def segment(self, *arguments):
        if next(calls) == number:
            do()
        return original(self, *arguments)

    monkeypatch.setattr(Segments, "do", segment)


@pytest.mark.parametrize(
    ("resume", "error", "match"),
    [
        (
            "auto",
            FileExistsError,
            "holds the draws of run .* no states .* expected both or neither",
        ),
        (False, FileExistsError, "holds the draws of run"),
        (True, FileNotFoundError, "holds no run but draws without states"),
    ],
)
def test_draws_whose_states_are_gone_are_not_overwritten(tmp_path, resume, error, match):
    go(tmp_path, 20)
    shutil.rmtree(tmp_path / "state")
    chunk = tmp_path / "draws.zarr/posterior/x/c.0.0.0"
    before = chunk.read_bytes()
    with pytest.raises(error, match=match):
        go(tmp_path, 20, key=4, resume=resume)
    assert chunk.read_bytes() == before


@pytest.mark.parametrize("name", ["lock", "draws.zarr", "state"])
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_is_a_users_stays_as_it_is(tmp_path, name, kind):
    (tmp_path / "notes").write_text("mine")
    place = tmp_path / "run" / name
    place.parent.mkdir()
    if kind == "file":
        place.write_text("mine")
    elif kind == "link":
        place.symlink_to(tmp_path / ("notes" if name == "lock" else "run"))
    else:
        place.mkdir()
        (place / "notes").write_text("mine")
        if name == "state":  # a file more does no harm
            assert_reference(go(tmp_path / "run", 20), 20)
            assert (place / "notes").read_text() == "mine"
            return
    with pytest.raises(FileExistsError, match="expected .* or use another directory"):
        go(tmp_path / "run", 20)
    files_left = sorted(p.name for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock")
    assert files_left == sorted(
        ["notes"] + [name] * (kind == "file" and name != "lock") + ["notes"] * (kind == "folder")
    )
    assert (tmp_path / "notes").read_text() == "mine"
    assert kind != "file" or place.read_text() == "mine"


def test_a_users_zarr_store_is_refused(tmp_path):
    users = xr.DataTree.from_dict({"posterior": xr.Dataset({"x": ("draw", np.arange(5.0))})})
    users.to_zarr(tmp_path / "run/draws.zarr", consolidated=False)
    with pytest.raises(FileExistsError, match="the draws of a run without a name"):
        go(tmp_path / "run", 20)
    go(tmp_path / "other", 20)
    shutil.rmtree(tmp_path / "other/draws.zarr")
    users.to_zarr(tmp_path / "other/draws.zarr", consolidated=False)
    with pytest.raises(ValueError, match="not of the run whose states are beside it"):
        go(tmp_path / "other", 40)


def test_draws_and_states_of_different_runs_are_told_apart(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    go(one, 20)
    go(other, 20, key=4)
    shutil.rmtree(one / "draws.zarr")
    shutil.copytree(other / "draws.zarr", one / "draws.zarr")
    with pytest.raises(ValueError, match="expected the draws of run .*, got the draws of run"):
        go(one, 40)


def test_a_state_is_known_by_its_own_number_and_run(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    go(one, 60)
    go(other, 40, key=4)
    shutil.copy(one / "state/00000005.npz", one / "state/00000009.npz")
    with pytest.warns(RuntimeWarning, match="00000009.npz is the state after 5 segments"):
        go(one, 60)
    (one / "state/00000009.npz").unlink()
    shutil.copy(other / "state/00000004.npz", one / "state/00000004.npz")
    cut(one / "draws.zarr/posterior/x/c.0.2.0")
    with pytest.warns(RuntimeWarning, match="done again|goes on from an earlier") as told:
        assert_reference(go(one))
    assert any("00000004.npz is a state of another run" in str(w.message) for w in told)


def test_a_directory_without_names_goes_on(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(keep.secrets, "token_hex", lambda _: None)
        go(tmp_path, 20)
    assert store.root_of(tmp_path / "draws.zarr")["attributes"] == {}
    assert_reference(go(tmp_path))


def test_temporaries_are_new_files_and_go_away(tmp_path):
    (tmp_path / "notes").write_text("mine")
    (tmp_path / ".file.new").symlink_to(tmp_path / "notes")
    (tmp_path / "file").symlink_to(tmp_path / "notes")
    files.write_atomically(tmp_path / "file", b"ours")
    assert (tmp_path / "notes").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "ours"
    (tmp_path / f".file.{16 * '0'}.new").touch()
    files.remove_temporaries(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"notes", "file", ".file.new"}
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="irectory|links"):
        files.write_atomically(tmp_path / "link" / "file", b"theirs")
    with pytest.raises(OSError, match="irectory|links"):
        files.remove(tmp_path / "link" / "file")


def test_a_relative_directory_is_that_of_the_beginning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before_segment(monkeypatch, 3, lambda: os.chdir("/"))
    assert_reference(go("run"))
    assert (tmp_path / "run" / "draws.zarr").is_dir()


def replaced(lock):
    lock.unlink()
    lock.write_text("1 on elsewhere\n")


LOSSES = {
    "it is gone": lambda lock: lock.unlink(),
    "another file is in its place": replaced,
    "process 1 on elsewhere took it": lambda lock: lock.write_text("1 on elsewhere\n"),
}


@pytest.mark.parametrize("text", LOSSES)
def test_a_lost_lock_is_told_and_the_run_goes_on_later(tmp_path, monkeypatch, text):
    with monkeypatch.context() as patch:
        before_segment(patch, 3, lambda: LOSSES[text](tmp_path / "lock"))
        with pytest.raises(OSError, match=f"lost its lock .*{text}.*call `run` again") as caught:
            go(tmp_path)
    assert caught.value.errno == errno.ENOLCK
    assert_reference(go(tmp_path))


def test_a_lock_that_was_left_behind_holds_nobody_up(tmp_path):
    (tmp_path / "lock").write_text(f"{os.getppid()}\n")  # the number of one that lives
    assert_reference(go(tmp_path, 20), 20)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="on a file system with `flock`"):
        go(tmp_path)


class Named(Walk):
    """A walk of sites with these names."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def init(self, *args, **kwargs):
        state = super().init(*args, **kwargs)
        return state._replace(z={name: state.z["x"] for name in self.names})

    def sample(self, state, model_args, model_kwargs):
        return state._replace(z={name: x + 1 for name, x in state.z.items()})


BAD_NAMES = {
    "points": ("..",), "point": (".",), "empty": ("",), "metadata": ("zarr.json",),
    "long": ("é" * 130,), "zero": ("a\0b",), "no text": ("a\ud800",), "twice": ("a/b", "a.b"),
}  # fmt: skip


@pytest.mark.parametrize("names", BAD_NAMES.values(), ids=BAD_NAMES)
def test_names_that_cannot_be_stored_are_refused_before_a_draw(tmp_path, monkeypatch, names):
    before_segment(monkeypatch, 0, lambda: pytest.fail("draws are made"))
    kernel, folder = Named(*names), tmp_path / "run"
    with pytest.raises(ValueError, match="cannot be stored: expected|two variables of posterior"):
        run(walk(kernel=kernel), random.key(0), directory=folder)
    assert {p.name for p in tmp_path.iterdir()} == {"run"}
    assert {p.name for p in folder.iterdir()} <= {"lock", "state", "draws.zarr"}
    if len(names) > 1:
        with pytest.raises(ValueError, match="two variables of posterior"):
            run(walk(kernel=kernel), random.key(0))


@pytest.mark.arviz
def test_names_that_can_be_stored(tmp_path):
    names = "../../x", "c/0/0", "a b\n%*", "__x"
    found = run(walk(20, kernel=Named(*names)), random.key(0), directory=tmp_path / "run")
    for name in names:
        assert found.idata.posterior[name.replace("/", ".")].shape == (1, 20, 3)
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_names_that_a_file_system_takes_for_one(tmp_path, monkeypatch):
    def one_case(function):
        return lambda path: function(path.with_name(path.name.lower()))

    monkeypatch.setattr(store, "own_folder", one_case(store.own_folder))
    monkeypatch.setattr(store, "remove_temporaries", one_case(store.remove_temporaries))
    lstat = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: lstat(str(path).replace("/X", "/x")))
    with pytest.raises(ValueError, match="'X' and 'x' are one name|'x' and 'X' are one name"):
        run(walk(kernel=Named("x", "X")), random.key(0), directory=tmp_path)


@pytest.mark.parametrize(("name", "at"), [("mkdir", 1), ("replace", 2), ("open", 5)])
def test_a_full_disk_at_the_beginning_says_what_to_do(tmp_path, monkeypatch, name, at):
    original, calls = getattr(os, name), iter(range(1, 10_000))

    def failing(place, *args, **kwargs):
        ours = str(place).startswith((str(tmp_path), "."))
        if ours and next(calls) >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(place, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing)
        with pytest.raises(OSError, match="call `run` again with the same arguments") as caught:
            go(tmp_path / "run")
    assert caught.value.errno == errno.ENOSPC
    assert_reference(go(tmp_path / "run"))
