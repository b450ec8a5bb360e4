"""Long runs: segments, the store, checkpoints, and failures."""

from __future__ import annotations

import errno
import json
import os
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
import xarray as xr
from jax import random
from numpyro.infer import MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel
from tiers import short

from numpyro_geom import SGNHT, SGRLD, RMSprop, to_inference_data
from numpyro_geom.diagnostics import SamplingWarning, print_summary
from numpyro_geom.runs import files, keep, run, store
from numpyro_geom.runs.fingerprint import changes, fingerprint
from numpyro_geom.runs.segments import Job, Segments

pytest.importorskip("zarr")

KEY = 3
CHECKOUT = Path(__file__).resolve().parents[1]


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


def go(directory, num_samples=70, *, key=KEY, data=0.0, length=20, resume="auto", **settings):
    return run(
        walk(num_samples, **settings),
        random.key(key),
        jnp.full((2,), data),
        directory=directory,
        draws_per_segment=length,
        resume=resume,
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
        np.testing.assert_array_equal(result.idata.posterior[name.replace("/", ".")].values, x)


def opened(directory):
    return xr.open_datatree(Path(directory) / "draws.zarr", engine="zarr", consolidated=True)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Keep small programs on disk too: the runs of this file are one program most of the time."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 0)
    yield
    jax.config.update(name, before)


# Draws


@pytest.mark.arviz
def test_draws_are_those_of_mcmc_run_with_and_without_a_directory(tmp_path):
    stored, kept = go(tmp_path / "run"), go(None)
    for result in (stored, kept):
        assert (result.num_draws, result.finished) == (70, True)
        assert_reference(result)
        assert result.idata.sample_stats["diverging"].shape == (1, 70)
        assert int(result.mcmc.last_state.total) == 95
        # goes on from the last state, without a warm-up
        result.mcmc.run(result.mcmc.last_state.rng_key, jnp.zeros(2))
        assert int(result.mcmc.last_state.total) == 165
        assert result.mcmc.get_samples()["x"].shape == (70, 3)


@pytest.mark.arviz
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
        result = run(
            make(), random.key(KEY), jnp.zeros(2), directory=directory, draws_per_segment=4
        )
        found = result.mcmc.get_samples(group_by_chain=True)
        assert result.idata.posterior["x"].shape == (2, 10, 3)
        for name, x in mcmc.get_samples(group_by_chain=True).items():
            np.testing.assert_array_equal(found[name], x)


def model(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("double", 2 * slope)
    with numpyro.plate("rows", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal(x[i] @ slope, 1), obs=y[i])


def group_names(idata):
    # a method of an InferenceData, a tuple of paths of a DataTree
    names = idata.groups() if callable(idata.groups) else idata.groups
    return {name.strip("/") for name in names} - {""}


@pytest.mark.arviz
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
    job = Job(mcmc, random.key(0), (x, y))
    before = fingerprint(job, 10)
    mcmc.run(random.key(0), x, y)
    # nor does it depend on what a kernel learns of the model, such as the steps of an epoch
    assert changes(before, fingerprint(job, 10)) == []
    assert json.loads(json.dumps(before)) == before
    run(make(30), random.key(0), x, y, directory=tmp_path, draws_per_segment=20)
    result = run(make(50), random.key(0), x, y, directory=tmp_path)
    expected = to_inference_data(mcmc)
    assert group_names(result.idata) == group_names(expected)
    for group in ("posterior", "sample_stats", "observed_data", "constant_data"):
        found = result.idata[group]
        assert set(found.data_vars) == set(expected[group].data_vars)
        for name, values in expected[group].data_vars.items():
            np.testing.assert_array_equal(found[name].values, values.values)
            assert found[name].dims == values.dims
            assert found[name].attrs == values.attrs
        different = {n for n, v in expected[group].attrs.items() if found.attrs.get(n) != v}
        assert different <= {"created_at"}
    print_summary(result.mcmc)
    assert "slope[0]" in capsys.readouterr().out


@pytest.mark.arviz
def test_values_are_read_when_they_are_asked_for(tmp_path):
    result = go(tmp_path)
    (tmp_path / "draws.zarr/posterior/x/c.0.1.0").unlink()
    np.testing.assert_array_equal(  # of a chunk that is there
        result.idata.posterior["x"][:, :20].values, reference()["x"][:, :20]
    )
    assert not np.array_equal(result.idata.posterior["x"].values, reference()["x"])


def test_default_length_and_directory_in_text(tmp_path):
    result = run(walk(), random.key(KEY), jnp.zeros(2), directory=str(tmp_path))
    assert_reference(result)
    assert (tmp_path / "draws.zarr/posterior/x/c.0.0.0").stat().st_size == 70 * 3 * 4 + 4


def test_model_arguments_in_a_dict_compile_once(tmp_path):
    traces = []

    class Counting(Walk):
        def sample(self, state, model_args, model_kwargs):
            traces.append(None)
            return super().sample(state, model_args, model_kwargs)

    for directory in (None, tmp_path):
        traces.clear()
        data = {"a": jnp.zeros(2)}
        run(walk(kernel=Counting()), random.key(0), data, draws_per_segment=20, directory=directory)
        # the loop traces its body twice: one pass finds the types of what it carries
        assert 0 < len(traces) <= 2


# Faults


class Killed(BaseException):
    """What is raised in place of a process that ends: nothing tidies up after it."""


def test_killed_at_every_instant_of_writing(tmp_path, monkeypatch):
    calls = {"count": 0, "fatal": -1}

    def dangerous(function):
        def wrapped(*args, **kwargs):
            calls["count"] += 1
            if calls["count"] == calls["fatal"]:
                raise Killed
            return function(*args, **kwargs)

        return wrapped

    go(tmp_path / "complete")
    monkeypatch.setattr(os, "replace", dangerous(os.replace))
    go(tmp_path / "counted")
    total = calls["count"]
    assert total > 30
    for fatal in range(1, total + 1, 7):
        directory = tmp_path / f"run-{fatal}"
        calls.update(count=0, fatal=fatal)
        with pytest.raises(Killed):
            go(directory)
        calls.update(fatal=-1)
        newest = max((int(p.stem) for p in (directory / "state").glob("*.npz")), default=-1)
        if newest >= 0:
            with opened(directory) as groups:
                draws = groups["posterior"].sizes["draw"]
                assert draws >= min(70, 20 * max(0, newest - 2))
                for name, x in reference().items():
                    found = groups["posterior"][name.replace("/", ".")].values
                    np.testing.assert_array_equal(found, x[:, :draws])
        result = go(directory)
        assert_reference(result)
        assert int(result.mcmc.last_state.total) == 95


WORKER = """
import sys
sys.path[:0] = [{tests!r}]
import numpyro
numpyro.set_host_device_count(2)
import test_runs as t
result = t.go({directory!r}, 4000, length=20)
print(result.finished, result.num_draws)
"""


def worker(directory):
    code = WORKER.format(tests=str(Path(__file__).parent), directory=str(directory))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def wait_for(directory, segments):
    """Until a run has stored so many segments of draws, or a minute."""
    for _ in range(6000):
        states = [int(path.stem) for path in (directory / "state").glob("*.npz")]
        if max(states, default=0) >= segments + 2:
            return
        time.sleep(0.01)
    raise TimeoutError


def test_killed_processes_and_sigterm(tmp_path):
    process = worker(tmp_path)
    try:
        wait_for(tmp_path, 10)
    finally:
        process.kill()
        process.communicate()
    with opened(tmp_path) as groups:
        draws = groups["posterior"].sizes["draw"]
        assert 200 <= draws < 4000
        np.testing.assert_array_equal(
            groups["posterior"]["x"].values, reference(4000)["x"][:, :draws]
        )
    process = worker(tmp_path)
    try:
        wait_for(tmp_path, draws // 20 + 5)
        with pytest.raises(RuntimeError, match=f"being written by process {process.pid}"):
            go(tmp_path, 4000)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    finished, draws = out.split()
    assert finished == "False"
    assert 0 < int(draws) < 4000
    assert_reference(go(tmp_path, 4000), 4000)


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
    assert result.idata.posterior["x"].shape == (1, 40, 3)
    np.testing.assert_array_equal(result.mcmc.get_samples()["x"], reference()["x"][0, :40])
    assert signal.getsignal(signal.SIGINT) is before


def test_two_writers_and_no_signals_in_a_thread(tmp_path):
    found = []

    def other():
        try:
            go(tmp_path)
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=other)
    lock = files.Lock(tmp_path)
    lock.take()
    thread.start()
    thread.join()
    lock.release()
    assert f"being written by process {os.getpid()}" in found[0]
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(found) == 1
    assert_reference(go(tmp_path))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(bytes(content))


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.arviz
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("segment", [0, 2])
def test_damaged_draws_are_done_again(tmp_path, damage, segment):
    go(tmp_path, 60)
    chunk = tmp_path / f"draws.zarr/posterior/x/c.0.{segment}.0"
    damage(chunk)
    if damage is flip:  # every reader notices
        with opened(tmp_path) as groups, pytest.raises(ValueError, match="checksum"):
            groups["posterior"]["x"].load()
    with pytest.warns(RuntimeWarning, match=rf"c\.0\.{segment}\.0 .*: its segment is done again"):
        result = go(tmp_path)
    assert_reference(result)


def change(path):
    """Other numbers in a file that is sound in itself."""
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "leaf_1": arrays["leaf_1"] + 1})


@pytest.mark.parametrize("damage", [flip, cut, change])
def test_damaged_states_are_passed_over(tmp_path, damage):
    go(tmp_path, 60)
    states = sorted((tmp_path / "state").glob("*.npz"))
    assert [int(path.stem) for path in states] == [0, 4, 5]
    damage(states[-1])
    with pytest.warns(RuntimeWarning, match="00000005.npz .*goes on from an earlier state"):
        assert_reference(go(tmp_path))
    for path in (tmp_path / "state").glob("*.npz"):
        damage(path)
    with (
        pytest.warns(RuntimeWarning, match="goes on from"),
        pytest.raises(ValueError, match="none of the states .* can be read"),
    ):
        go(tmp_path)


def test_a_state_with_objects_is_not_unpickled(tmp_path):
    go(tmp_path, 20)
    for path in (tmp_path / "state").glob("*.npz"):
        np.savez(path, leaf_0=np.array([print], object), sha256=np.zeros(32, np.uint8))
    with (
        pytest.warns(RuntimeWarning, match="allow_pickle=False"),
        pytest.raises(ValueError, match="none of the states"),
    ):
        go(tmp_path)


FAULTS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "forbidden": errno.EACCES}


@pytest.mark.parametrize("number", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("at", [3, 30, 41])
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
        if at == 3:  # nothing to save yet
            with pytest.raises(OSError, match=os.strerror(number)):
                go(tmp_path)
        else:
            with pytest.raises(OSError, match="All before it are safe.*call `run` again") as caught:
                go(tmp_path)
            assert caught.value.errno == number
            with opened(tmp_path) as groups:
                found = groups["posterior"]["x"].values
            np.testing.assert_array_equal(found, reference()["x"][:, : found.shape[1]])
    assert not list(tmp_path.rglob(".*.new"))
    assert_reference(go(tmp_path))


@pytest.mark.slow
def test_a_file_system_that_is_full_and_states_that_become_read_only(tmp_path):
    enter = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=256k none {tmp_path}"
    try:
        subprocess.run([*enter, "sh", "-c", mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system of its own for a test: {error}")
    script = """
import errno, os, sys
import numpy as np
from test_runs import assert_reference, go, opened, reference
from numpyro_geom.runs.segments import Segments

folder = sys.argv[1]
advance, done = Segments.advance, []

def shell(command):
    assert os.system(command) == 0, command

def shut(self, *counts):
    done.append(None)
    if len(done) == 60:
        shell(f"cd {folder} && mount --bind state state && mount -o remount,bind,ro state")
    return advance(self, *counts)

repairs = {
    errno.ENOSPC: f"mount -o remount,size=64m {folder}",
    errno.EROFS: f"umount {folder}/state",
}
for number, repair in repairs.items():
    try:
        go(folder, 3000)
    except OSError as error:
        assert error.errno == number, error
    else:
        raise AssertionError("the run ended")
    with opened(folder) as groups:
        draws = groups["posterior"].sizes["draw"]
        assert draws >= 20
        found = groups["posterior"]["x"].values
    np.testing.assert_array_equal(found, reference(3000)["x"][:, :draws])
    shell(repair)
    Segments.advance = shut
Segments.advance = advance
assert_reference(go(folder, 3000), 3000)
print("the same")
"""
    found = subprocess.run(
        [*enter, "sh", "-c", f'{mount} && exec "$@"', "-", sys.executable, "-c", script, tmp_path],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "tests")])},
    )  # fmt: skip
    assert found.stdout.endswith("the same\n"), found.stderr


def test_clocks_that_jump(tmp_path, monkeypatch):
    hours = iter([0, 5, -9, 3, -100] * 1000)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 3600 * next(hours))
    assert_reference(go(tmp_path, 30, progress_bar=True), 30)
    assert_reference(go(tmp_path, progress_bar=True))


@pytest.mark.parametrize("num_chains", short([1, 2], kept=[1]))
def test_chains_that_hardly_move_are_told_in_warmup(num_chains):
    def model():
        numpyro.sample("x", dist.Normal(0, 1e-3))

    def run_with(step_size, **kwargs):
        kernel = SGRLD(model, step_size=step_size, num_steps=20, **kwargs)
        run(mcmc_of(kernel, num_chains), random.key(KEY), draws_per_segment=10)

    def mcmc_of(kernel, num_chains):
        return MCMC(
            kernel,
            num_warmup=40,
            num_samples=20,
            num_chains=num_chains,
            chain_method="vectorized",
            progress_bar=False,
        )

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
    divergences = int(np.sum(reference()["x"][..., 0] > 3))
    assert f"divergences={divergences}" in shown


# What a directory holds


CHANGES = [
    ({"key": 4}, r"rng_key \(was"),
    ({"data": 1.0}, r"data args\[0\] \(was"),
    ({"length": 10}, r"draws_per_segment \(was 20, is 10\)"),
    ({"num_warmup": 20}, r"num_warmup \(was 25, is 20\)"),
    ({"thinning": 2, "num_samples": 200}, r"thinning \(was 1, is 2\)"),
    ({"num_chains": 2, "chain_method": "sequential"}, r"num_chains \(was 1, is 2\)"),
    ({"kernel": Walk(scale=2.0)}, r"kernel setting scale \(was 1.0, is 2.0\)"),
    ({"num_samples": 30}, "holds 70 draws, more than num_samples asks for"),
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
        return run(mcmc, random.key(0), init_params=jnp.ones(()), directory=tmp_path)

    go_on()
    with pytest.raises(ValueError, match=rf"differs in: kernel setting {next(iter(change))} \(was"):
        go_on(**change)
    assert go_on().finished


def test_a_directory_of_an_earlier_version(finished, monkeypatch):
    current = keep.check_same

    def earlier(where, old, *new):
        names = {"fingerprint": None, "model": "by byte code", "data args[0]": "of another kind"}
        record = {k: x for k, x in (old["fingerprint"] | names).items() if x is not None}
        old = {name: x for name, x in old.items() if name != "program"}
        current(where, {**old, "fingerprint": record}, *new)

    monkeypatch.setattr(keep, "check_same", earlier)
    with pytest.warns(RuntimeWarning, match="begun with an earlier version of numpyro_geom"):
        assert_reference(go(finished))
    with (
        pytest.warns(RuntimeWarning, match="earlier version"),
        pytest.raises(ValueError, match=r"differs in: num_warmup \(was"),
    ):
        go(finished, num_warmup=20)


def test_other_versions_are_told(finished, monkeypatch):
    told = keep.versions()
    monkeypatch.setattr(keep, "versions", lambda: {**told, "jax_version": "99"})
    with pytest.warns(RuntimeWarning, match=r"other versions.*jax_version \(was .*, is 99\)"):
        go(finished)


@pytest.mark.parametrize("other", [(np.zeros(3),), (np.zeros(2), np.zeros(1))])
def test_a_state_of_another_form(tmp_path, other):
    kept = store.Checkpoints(tmp_path)
    kept.save(store.Checkpoint(0, (np.zeros(2),), {}))
    with pytest.raises(ValueError, match="another form .* Go on with that version, or begin anew"):
        kept.load(0, other)


def test_resume(finished, tmp_path):
    with pytest.raises(FileExistsError, match="holds a run"):
        go(finished, resume=False)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        go(tmp_path, resume=True)
    assert_reference(go(tmp_path, resume=False))
    assert_reference(go(tmp_path, resume=True))


BAD_INPUT = [
    ({"mcmc": "no"}, TypeError, "expected a numpyro.infer.MCMC, got str"),
    ({"directory": 3}, TypeError, "directory must be a path, got int"),
    ({"draws_per_segment": 0}, ValueError, "draws_per_segment must be"),
    ({"draws_per_segment": 2.5}, TypeError, "draws_per_segment must be"),
    ({"resume": "yes"}, ValueError, "resume must be 'auto', True, False or .* got 'yes'"),
    ({"resume": True}, ValueError, "resume=True needs a directory"),
]


@pytest.mark.parametrize(("arguments", "error", "match"), BAD_INPUT)
def test_bad_input(arguments, error, match):
    arguments = {"mcmc": walk(), "rng_key": random.key(0), **arguments}
    with pytest.raises(error, match=match):
        run(**arguments)


def test_without_zarr(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match="pip install"):
        go(tmp_path)
