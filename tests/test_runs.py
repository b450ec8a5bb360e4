"""Long runs: segments, their files, and failures."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel
from targets import vectorized
from tiers import short

from numpyro_geom import SGNHT, SGRLD, RMSprop, to_inference_data
from numpyro_geom.diagnostics import SamplingWarning
from numpyro_geom.runs import long_run, run_in_segments
from numpyro_geom.runs.segments import Segments

KEY = 3
SEGMENTS = [20, 25, 45, 65, 85, 95]
"""Steps after each segment of `go`, of which 25 are warm-up."""


class WalkState(NamedTuple):
    z: dict
    total: jax.Array
    diverging: jax.Array
    rng_key: jax.Array


class Walk(MCMCKernel):
    """A random walk: the cheapest kernel with memory and keys."""

    sample_field = "z"
    default_fields = ("z", "diverging")

    def __init__(self, size=3, scale=1.0, on_sample=None):
        self._size, self._scale, self._on_sample = size, scale, on_sample

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        z = {"x": jnp.zeros(self._size), "a/b": jnp.zeros(())}
        # a typed key in the state, and a scalar of Python's, whose type is weak
        return WalkState(z, 0.0, jnp.array(False), rng_key)

    def sample(self, state, model_args, model_kwargs):
        rng_key, key = random.split(state.rng_key)
        shift = sum(jnp.sum(x) for x in jax.tree.leaves((model_args, model_kwargs)))
        x = state.z["x"] + self._scale * random.normal(key, (self._size,)) + shift
        z = {"x": x, "a/b": x.sum() + state.total}
        return WalkState(z, state.total + 1, x[0] > 3, rng_key)


def walk(num_samples=70, num_warmup=25, kernel=None, **settings):
    kernel = Walk() if kernel is None else kernel
    settings = {"progress_bar": False, **settings}
    return MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **settings)


def go(directory, num_samples=70, *, key=KEY, data=0.0, length=20, **settings):
    return run_in_segments(
        walk(num_samples, **settings),
        random.key(key),
        jnp.full((2,), data),
        directory=directory,
        draws_per_segment=length,
    )


@lru_cache
def reference(num_samples=70):
    """Draws of `go` by NumPyro's own loop."""
    mcmc = walk(num_samples)
    mcmc.run(random.key(KEY), jnp.zeros(2))
    return {name: np.asarray(x) for name, x in mcmc.get_samples(group_by_chain=True).items()}


def assert_reference(result, draws=70):
    found = result.mcmc.get_samples(group_by_chain=True)
    for name, x in reference(draws).items():
        np.testing.assert_array_equal(found[name], x)


def file_of(directory, step):
    return Path(directory) / f"{step:010d}.npz"


def stored(directory):
    """Draws so far, read by NumPy alone."""
    found = []
    for path in sorted(Path(directory).glob("*.npz")):
        with np.load(path) as file:
            found.append(file["draws['z']['x']"])
    return np.concatenate(found, axis=1)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Keep small programs on disk too: the runs of this file are one program most of the time."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 0)
    yield
    jax.config.update(name, before)


# Draws


def test_draws_are_those_of_mcmc_run_with_and_without_a_directory(tmp_path):
    for result in (go(tmp_path / "run"), go(None)):
        assert (result.num_draws, result.finished) == (70, True)
        assert_reference(result)
        assert result.mcmc.get_extra_fields(group_by_chain=True)["diverging"].shape == (1, 70)
        assert int(result.mcmc.last_state.total) == 95
        # goes on from the last state, without a warm-up
        result.mcmc.run(result.mcmc.last_state.rng_key, jnp.zeros(2))
        assert int(result.mcmc.last_state.total) == 165
        assert result.mcmc.get_samples()["x"].shape == (70, 3)
    assert [int(path.stem) for path in sorted((tmp_path / "run").iterdir())] == SEGMENTS
    np.testing.assert_array_equal(stored(tmp_path / "run"), reference()["x"])


@pytest.mark.parametrize("method", ["vectorized", "sequential", "parallel", jax.vmap])
def test_chains(tmp_path, method):
    class Chains(Walk):
        def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
            one = lambda key: Walk.init(self, key, 0, None, (), {})  # noqa: E731
            if rng_key.shape:
                self.sample = jax.vmap(super().sample, in_axes=(0, None, None))
                return jax.vmap(one)(rng_key)
            return one(rng_key)

    def make():
        return walk(30, 10, Chains(), num_chains=2, chain_method=method, thinning=3)

    mcmc = make()
    mcmc.run(random.key(KEY), jnp.zeros(2))
    for directory in (tmp_path, None):
        result = run_in_segments(
            make(), random.key(KEY), jnp.zeros(2), directory=directory, draws_per_segment=4
        )
        found = result.mcmc.get_samples(group_by_chain=True)
        for name, x in mcmc.get_samples(group_by_chain=True).items():
            np.testing.assert_array_equal(found[name], x)


def model(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("double", 2 * slope)
    with numpyro.plate("rows", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal(x[i] @ slope, 1), obs=jnp.asarray(y)[i])


def group_names(idata):
    # a method of an InferenceData, a tuple of paths of a DataTree
    names = idata.groups() if callable(idata.groups) else idata.groups
    return {name.strip("/") for name in names} - {""}


@pytest.mark.parametrize("kind", short(["sgrld", "nuts"], kept=["sgrld"]))
def test_a_model_interrupted_and_made_longer(tmp_path, kind, capsys):
    x = random.normal(random.key(1), (30, 2))
    y = np.asarray(x @ jnp.array([1.0, -1.0]))  # its copy on the device must not outlive a trace

    def make(num_samples):
        settings = {"batch_size": 7, "batching": "epoch", "step_size": 1e-3, "num_steps": 3}
        settings["metric"] = "wenzel"
        kernel = NUTS(model) if kind == "nuts" else SGRLD(model, **settings)
        return MCMC(kernel, num_warmup=30, num_samples=num_samples, progress_bar=False)

    mcmc = make(50)
    mcmc.run(random.key(0), x, y)
    run_in_segments(make(30), random.key(0), x, y, directory=tmp_path, draws_per_segment=20)
    result = run_in_segments(make(50), random.key(0), x, y, directory=tmp_path)
    expected, idata = to_inference_data(mcmc), to_inference_data(result.mcmc)
    assert group_names(idata) == group_names(expected)
    for group in ("posterior", "sample_stats", "observed_data"):
        found = idata[group]
        assert set(found.data_vars) == set(expected[group].data_vars)
        for name, values in expected[group].data_vars.items():
            np.testing.assert_array_equal(found[name].values, values.values)
            assert found[name].dims == values.dims
            assert found[name].attrs == values.attrs
        different = {n for n, v in expected[group].attrs.items() if found.attrs.get(n) != v}
        assert different <= {"created_at"}
    result.mcmc.print_summary()
    assert "slope[0]" in capsys.readouterr().out


def test_draws_are_read_when_they_are_asked_for(tmp_path):
    result = go(tmp_path)
    file_of(tmp_path, 65).unlink()
    with pytest.raises(FileNotFoundError, match="0000000065.npz"):
        _ = result.mcmc


def test_default_length_and_a_relative_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_in_segments(walk(), random.key(KEY), jnp.zeros(2), directory="run")
    monkeypatch.chdir("/")
    assert_reference(result)
    assert [int(path.stem) for path in sorted((tmp_path / "run").iterdir())] == [25, 95]


def test_model_arguments_in_a_dict_compile_once(tmp_path):
    traces = []

    class Counting(Walk):
        def sample(self, state, model_args, model_kwargs):
            traces.append(None)
            return super().sample(state, model_args, model_kwargs)

    for directory in (None, tmp_path):
        traces.clear()
        data = {"a": jnp.zeros(2)}
        run_in_segments(
            walk(kernel=Counting()), random.key(0), data, draws_per_segment=20, directory=directory
        )
        # the loop traces its body twice: one pass finds the types of what it carries
        assert 0 < len(traces) <= 2


# Faults


class Killed(BaseException):
    """What is raised in place of a process that ends: nothing tidies up after it."""


@pytest.mark.parametrize("name", short(["fsync", "replace"], kept=["replace"]))
def test_killed_at_every_instant_of_writing(tmp_path, monkeypatch, name):
    calls, original = {"count": 0, "fatal": -1}, getattr(os, name)

    def dangerous(*args, **kwargs):
        calls["count"] += 1
        if calls["count"] == calls["fatal"]:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(os, name, dangerous)
    go(tmp_path / "counted")
    total = calls["count"]
    assert total == len(SEGMENTS) * (2 if name == "fsync" else 1)  # of a file, and of the folder
    for fatal in range(1, total + 1):
        directory = tmp_path / f"run-{fatal}"
        calls.update(count=0, fatal=fatal)
        with pytest.raises(Killed):
            go(directory)
        calls.update(fatal=-1)
        if list(directory.glob("*.npz")):
            found = stored(directory)
            np.testing.assert_array_equal(found, reference()["x"][:, : found.shape[1]])
        result = go(directory)
        assert_reference(result)
        assert int(result.mcmc.last_state.total) == 95


WORKER = """
import signal, sys, threading, time
sys.path[:0] = [{tests!r}]
import numpyro
numpyro.set_host_device_count(2)
import test_runs as t

def tell():  # that a signal ends the run, and not the process
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.001)
    open({directory!r} + "/ready-{number}", "w").close()

threading.Thread(target=tell, daemon=True).start()
result = t.go({directory!r}, {draws}, length=20)
print(result.finished, result.num_draws)
"""


KILLED_DRAWS = 8000


def worker(directory, number):
    code = WORKER.format(
        tests=str(Path(__file__).parent),
        directory=str(directory),
        number=number,
        draws=KILLED_DRAWS,
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def wait_for(directory, segments, number):
    """Until a run has stored so many segments and a process is ready, or a minute."""
    for _ in range(6000):
        ready = (directory / f"ready-{number}").exists()
        if ready and len(list(directory.glob("*.npz"))) >= segments:
            return
        time.sleep(0.01)
    raise TimeoutError


def test_killed_processes_two_at_once_and_sigterm(tmp_path):
    process = worker(tmp_path, 0)
    try:
        wait_for(tmp_path, 10, 0)
    finally:
        process.kill()
        process.communicate()
    found = stored(tmp_path)
    assert found.shape[1] < KILLED_DRAWS
    np.testing.assert_array_equal(found, reference(KILLED_DRAWS)["x"][:, : found.shape[1]])
    both = [worker(tmp_path, number) for number in (1, 2)]
    try:
        wait_for(tmp_path, found.shape[1] // 20 + 5, 1)
        both[0].send_signal(signal.SIGTERM)
        (out, _), (other, _) = (process.communicate(timeout=60) for process in both)
    finally:
        for process in both:
            process.kill()
    finished, draws = out.split()
    assert finished == "False"
    assert 0 < int(draws) < KILLED_DRAWS
    assert other.split() == ["True", str(KILLED_DRAWS)]
    assert_reference(go(tmp_path, KILLED_DRAWS), KILLED_DRAWS)


@pytest.mark.parametrize("directory", [True, False])
def test_sigint_finishes_the_segment(tmp_path, directory, monkeypatch):
    directory = tmp_path if directory else None
    before = signal.getsignal(signal.SIGINT)
    advance = Segments.advance
    calls = iter(range(100))

    def interrupted(self, *counts):
        if next(calls) == 3:  # two of warm-up came before
            os.kill(os.getpid(), signal.SIGINT)
        return advance(self, *counts)

    monkeypatch.setattr(Segments, "advance", interrupted)
    with pytest.warns(RuntimeWarning, match="SIGINT ended the run after 40 of 70 draws"):
        result = go(directory)
    assert (result.num_draws, result.finished) == (40, False)
    np.testing.assert_array_equal(result.mcmc.get_samples()["x"], reference()["x"][0, :40])
    assert signal.getsignal(signal.SIGINT) is before


class Autoregression(MCMCKernel):
    """x <- rho x + (1 - rho^2)^1/2 xi: n draws are n (1 - rho) / (1 + rho) effective ones."""

    sample_field = "z"
    default_fields = ("z",)
    rho = 0.8

    def __init__(self, apart=0.0):
        self._apart = apart  # distance of the chains' means

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        keys = rng_key.reshape(-1)
        return WalkState({"x": jnp.zeros(keys.size)}, 0.0, jnp.array(False), keys)

    def sample(self, state, model_args, model_kwargs):
        keys = jax.vmap(random.split)(state.rng_key)
        noise = jax.vmap(random.normal)(keys[:, 1])
        mean = self._apart * jnp.arange(len(keys))
        x = mean + self.rho * (state.z["x"] - mean) + (1 - self.rho**2) ** 0.5 * noise
        return state._replace(z={"x": x}, rng_key=keys[:, 0])


def test_a_run_ends_at_an_effective_sample_size(tmp_path):
    mcmc = vectorized(Autoregression(), 20, 100_000, 4)

    def go_on(directory, min_ess, **limits):
        return run_in_segments(
            mcmc,
            random.key(1),
            directory=directory,
            draws_per_segment=500,
            min_ess=min_ess,
            **limits,
        )

    result = go_on(tmp_path, 1000)
    assert result.finished
    assert result.ended_by.startswith("min_ess: 1,")
    assert "effective draws of x" in result.ended_by
    assert "R-hat 1.0" in result.ended_by
    # 1,000 effective draws of four chains are 9 / 4 x 1,000 draws of each; an estimate is off by
    # some per cent, and a segment is a fifth of them
    assert 2000 <= result.num_draws <= 3000
    assert result.mcmc.get_samples(True)["x"].shape == (4, result.num_draws)
    # the segments on disk are judged again, and more are asked for
    again = go_on(tmp_path, 1000)
    assert (again.num_draws, again.ended_by) == (result.num_draws, result.ended_by)
    assert go_on(tmp_path, 1500).num_draws > result.num_draws
    ended = go_on(None, 1e9, max_seconds=0.001)
    assert (ended.num_draws, ended.finished) == (0, False)
    assert ended.ended_by.startswith("max_seconds: ")


def test_chains_that_disagree_are_never_enough():
    mcmc = vectorized(Autoregression(apart=1.0), 0, 1000, 2)
    result = run_in_segments(mcmc, random.key(1), draws_per_segment=250, min_ess=5)
    assert (result.num_draws, result.ended_by) == (1000, "num_samples")


def test_no_signals_in_a_thread(tmp_path):
    thread = threading.Thread(target=go, args=(tmp_path,))
    thread.start()
    thread.join()
    assert_reference(go(tmp_path))


def flip(path, other):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(bytes(content))


def cut(path, other):
    path.write_bytes(path.read_bytes()[:-3])


def empty(path, other):
    path.write_bytes(b"")


def archive(path, other):
    np.savez(path, x=np.arange(3))


def folder(path, other):
    path.unlink()
    path.mkdir()


def change(path, other):
    """Other numbers in a file that is sound in itself."""
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "state.total": arrays["state.total"] + 1})


def foreign(path, other):
    go(other, key=4)
    shutil.copy(file_of(other, int(path.stem)), path)


def renamed(path, other):
    path.unlink()
    shutil.copy(file_of(path.parent, 25), path)


def notes(path, other):
    path.write_text("mine")


def pickled(path, other):
    np.savez(path, record=np.array([print], object), sha256=np.zeros(32, np.uint8))


def link(path, other):
    path.unlink()
    path.symlink_to(other / "nowhere")


@pytest.mark.parametrize("step", [45, 95])
@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (flip, ValueError, "is damaged"),
        (cut, ValueError, "is damaged"),
        (empty, ValueError, "is damaged"),
        (archive, ValueError, "is damaged, or no run has made it"),
        (folder, IsADirectoryError, ""),
        (change, ValueError, "is damaged, or was replaced"),
        (foreign, ValueError, r"a run that differs in: rng_key \(was"),
        (renamed, ValueError, "was renamed from 0000000025.npz"),
        (notes, ValueError, "is damaged, or no run has made it"),
        (pickled, ValueError, "allow_pickle=False"),
        (link, FileNotFoundError, ""),
    ],
)
def test_a_bad_file_is_named_and_without_it_the_run_goes_on(tmp_path, damage, error, match, step):
    directory = tmp_path / "run"
    go(directory)
    path = file_of(directory, step)
    damage(path, tmp_path / "other")
    with pytest.raises(error, match=f"{path.name}.*{match}"):
        _ = go(directory).mcmc
    shutil.move(path, tmp_path / "away")
    told = "0000000065.npz follows a segment that is missing or has changed"
    with warnings.catch_warnings() if step == 95 else pytest.warns(RuntimeWarning, match=told):
        assert_reference(go(directory))


def test_what_is_a_users_stays_as_it_is(tmp_path):
    (tmp_path / "notes").write_text("mine")
    for name in ("12.npz", "0000000020.npz.new", "lock"):
        (tmp_path / name).symlink_to(tmp_path / "notes")
    assert_reference(go(tmp_path))
    assert (tmp_path / "notes").read_text() == "mine"
    with pytest.raises(FileExistsError):
        go(tmp_path / "notes")


FAULTS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "forbidden": errno.EACCES}


@pytest.mark.parametrize("number", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("at", [1, 7])
def test_what_cannot_be_written_harms_nothing(tmp_path, monkeypatch, number, at):
    calls = []
    fsync = os.fsync

    def failing(descriptor):
        calls.append(None)
        if len(calls) >= at:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(
            OSError, match="All segments before it are safe.*call `run_in_segments`"
        ) as caught:
            go(tmp_path)
        assert caught.value.errno == number
    assert len(list(tmp_path.iterdir())) == at // 2
    assert_reference(go(tmp_path))


@pytest.mark.parametrize("num_chains", short([1, 2], kept=[1]))
def test_chains_that_hardly_move_are_told_in_warmup(num_chains):
    def model():
        numpyro.sample("x", dist.Normal(0, 1e-3))

    def run_with(step_size, **kwargs):
        kernel = SGRLD(model, step_size=step_size, num_steps=20, **kwargs)
        run_in_segments(mcmc_of(kernel, num_chains), random.key(KEY), draws_per_segment=10)

    def mcmc_of(kernel, num_chains):
        return vectorized(kernel, 40, 20, num_chains)

    with pytest.warns(SamplingWarning, match="chain . hardly moves: .* of the 20 steps") as told:
        run_with(1e-3)
    frozen = [w for w in told if "hardly moves" in str(w.message)]
    assert len(frozen) == 1
    assert "of draw 10," in str(frozen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SamplingWarning)
        run_with(1e-7)


def test_the_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("CI", raising=False)
    go(tmp_path, progress_bar=True)
    shown = capsys.readouterr().err
    assert "sample: 100%" in shown
    assert "95/95" in shown
    assert "divergences=" in shown


# What a directory holds


CHANGES = [
    ({"key": 4}, r"rng_key \(was"),
    ({"data": 1.0}, r"data args\[0\] \(was"),
    ({"length": 10}, r"draws_per_segment \(was 20, is 10\)"),
    ({"num_warmup": 20}, r"num_warmup \(was 25, is 20\)"),
    ({"thinning": 2, "num_samples": 200}, r"thinning \(was 1, is 2\)"),
    ({"num_chains": 2, "chain_method": "sequential"}, r"num_chains \(was 1, is 2\)"),
    ({"kernel": Walk(scale=2.0)}, r"kernel setting scale \(was 1.0, is 2.0\)"),
    ({"num_samples": 30}, "of a longer run: num_samples asks for 55 steps"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    go(directory)
    return directory


@pytest.mark.parametrize(("change", "match"), CHANGES)
def test_another_run_is_refused(finished, change, match):
    with pytest.raises(ValueError, match=match):
        go(finished, **change)
    assert_reference(go(finished))


KERNELS = [
    (SGNHT, {"thermostat_mass": 2.0}),
    (SGRLD, {"metric": RMSprop(decay=0.5)}),
    (SGRLD, {"step_size": lambda t: 0.01 / (1 + t)}),
]


@pytest.mark.parametrize(("cls", "change"), short(KERNELS, kept=KERNELS[1:2]))
def test_a_kernel_with_another_argument_is_refused(tmp_path, cls, change):
    def go_on(**changed):
        settings = {"step_size": lambda t: 0.01 / (2 + t), "num_steps": 1}
        if cls is SGNHT:
            settings |= {"thermostat_mass": 1.0, "friction": 1.0}
        kernel = cls(potential_fn=lambda z: 0.5 * z**2, **settings | changed)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=4, progress_bar=False)
        return run_in_segments(mcmc, random.key(0), init_params=jnp.ones(()), directory=tmp_path)

    go_on()
    # what a function computes is in the program
    name = (
        "program" if callable(change.get("step_size")) else f"kernel setting {next(iter(change))}"
    )
    with pytest.raises(ValueError, match=rf"differs in: {name} \(was"):
        go_on(**change)
    assert go_on().finished


def test_other_versions_are_told(finished, monkeypatch):
    monkeypatch.setattr(long_run, "versions", lambda mesh: "jax 99")
    match = r"goes on with other versions.*jax .*, now jax 99"
    with pytest.warns(RuntimeWarning, match=match) as told:
        go(finished)
    assert len([w for w in told if "versions" in str(w.message)]) == 1
    with pytest.raises(ValueError, match="of a longer run"):
        go(finished, num_samples=30)


def test_files_of_killed_writes_go_after_a_day(tmp_path):
    for hours in (23, 25):
        path = tmp_path / f"0000000020.npz.{hours:08x}.new"
        path.touch()
        os.utime(path, (time.time() - 3600 * hours,) * 2)
    go(tmp_path)
    assert [path.name for path in tmp_path.glob("*.new")] == [f"0000000020.npz.{23:08x}.new"]


def test_a_file_that_another_process_renames_meanwhile_is_passed_over(finished, monkeypatch):
    new = finished / f"0000000020.npz.{0:08x}.new"
    new.touch()
    lstat = Path.lstat

    def renamed(path):
        if path == new:
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", renamed)
    assert_reference(go(finished))


class Named(Walk):
    """A walk of sites with these names."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def init(self, *args, **kwargs):
        state = super().init(*args, **kwargs)
        return state._replace(z={name: state.z["x"] for name in self.names})

    def sample(self, state, model_args, model_kwargs):
        z = {name: x + k for k, (name, x) in enumerate(sorted(state.z.items()))}
        return state._replace(z=z)


def test_sites_of_any_name_are_stored(tmp_path):
    names = "..", "", "a/b", "a.b", "../../x", "a\0b", "a\ud800", "x" * 300, "X", "x", "record"
    found = run_in_segments(
        walk(20, kernel=Named(*names)), random.key(0), directory=tmp_path / "run"
    )
    for k, name in enumerate(sorted(names)):
        np.testing.assert_array_equal(found.mcmc.get_samples()[name][-1], np.full(3, 45.0 * k))
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


BAD_INPUT = [
    ({"mcmc": "no"}, TypeError, "expected a numpyro.infer.MCMC, got str"),
    ({"directory": 3}, TypeError, "directory must be a path, got int"),
    ({"min_ess": -1}, ValueError, "min_ess must be a finite number above 0"),
    ({"max_seconds": "long"}, TypeError, "max_seconds must be a number"),
    ({"draws_per_segment": 0}, ValueError, "draws_per_segment must be"),
    ({"draws_per_segment": 2.5}, TypeError, "draws_per_segment must be"),
]


@pytest.mark.parametrize(("arguments", "error", "match"), BAD_INPUT)
def test_bad_input(arguments, error, match):
    arguments = {"mcmc": walk(), "rng_key": random.key(0), **arguments}
    with pytest.raises(error, match=match):
        run_in_segments(**arguments)
