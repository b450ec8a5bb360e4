"""Two processes on the loopback address with one run: draws, errors, a kill, and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.sharding import Mesh
from targets import vectorized

from numpyro_geom import SGRLD, HostRows, run_in_segments

pytestmark = [
    pytest.mark.arviz,
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform == "win32", reason="jaxlib has no Gloo there, by which processors talk"
    ),
]

ROWS, CHAINS, LENGTH = 301, 4, 10
PATIENCE = 300
"""Seconds after which a process that has not ended counts as hung."""


SETTINGS = {"stratified": {"batching": "stratified"}, "control variate": {"control_variate": True}}


def data():
    rng = np.random.default_rng(4)
    return rng.standard_normal((ROWS, 3)), rng.integers(0, 2, ROWS)


def model(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ slope), obs=y[i])


def go(directory, num_samples, mesh=None, key=0, rows=None, **settings):
    kernel = SGRLD(model, batch_size=32, step_size=1e-2, num_steps=3, **settings)
    mcmc = vectorized(kernel, 20, num_samples, CHAINS)
    axes = {} if mesh is None else {"mesh": mesh, "chain_axis": "chains", "data_axis": "rows"}
    return run_in_segments(
        mcmc,
        jax.random.key(key),
        *(data() if rows is None else rows),
        directory=directory,
        draws_per_segment=LENGTH,
        **axes,
    )


def draws(result):
    return np.asarray(result.mcmc.get_samples(group_by_chain=True)["slope"])


# In the processes


def join(process, port, cache):
    """Be one of two processes with two devices each."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=2, process_id=process, heartbeat_timeout_seconds=5
    )


def mesh_of_both(rows_apart):
    """Four devices; rows on two processes, or chains."""
    devices = np.array(jax.devices()).reshape(2, 2)
    return Mesh(devices.T if rows_apart else devices, ("chains", "rows"))


def mesh_of_the_other():
    """A mesh that has no device of this process."""
    devices = [d for d in jax.devices() if d.process_index != jax.process_index()]
    return Mesh(np.array(devices).reshape(2, 1), ("chains", "rows"))


def in_memory_and_on_disk(folder, out):
    """Tell draws, and errors that one of the processes alone would meet; then run for long."""
    tell(out, in_memory(folder))
    on_disk(folder / "run", 20_000)


def tell(out, found):
    """Write a file atomically."""
    new = Path(f"{out}.new")
    new.write_text(json.dumps(found))
    new.replace(out)


def in_memory(folder):
    process = jax.process_index()
    errors = []
    attempts = [
        {"directory": None, "key": process},
        {"directory": folder if process else folder / "other"},
        {"directory": folder / "file" / "run"},
        {"directory": None, "mesh": mesh_of_the_other()},
    ]
    for attempt in attempts:
        try:
            go(**{"num_samples": 20, "mesh": mesh_of_both(True), **attempt})
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    result = go(None, 20, mesh_of_both(True))
    return {"errors": errors, "draws": draws(result).tolist(), "finished": result.finished}


class Failing:
    """Rows of a source that fails from a read on."""

    def __init__(self, array, at):
        self.array, self.at, self.reads = array, at, 0
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, rows):
        self.reads += 1
        if self.reads >= self.at:
            raise OSError("the drive is gone")
        return self.array[rows]


def on_host(folder, out):
    """Tell draws from rows in a file, and errors."""
    process, mesh = jax.process_index(), mesh_of_both(True)
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    both = HostRows(x), HostRows(y)
    go(folder / "run", 10, mesh, rows=both, **SETTINGS["stratified"])
    result = go(folder / "run", 20, mesh, rows=both, **SETTINGS["stratified"])
    found = {"stratified": draws(result).tolist()}
    tell(out, found)
    result = go(None, 20, mesh, rows=both, **SETTINGS["control variate"])
    found["control variate"] = draws(result).tolist()
    tell(out, found)
    with_nan = np.array(x)
    with_nan[153, 1] = np.nan if process else 0.0
    found["errors"] = []
    for rows in (
        HostRows(Failing(x, 40) if process else x),
        HostRows(with_nan),
        HostRows(x[process:]),
    ):
        try:
            go(None, 200, mesh, rows=(rows, both[1]), batching="stratified")
        except Exception as error:
            found["errors"].append(f"{type(error).__name__}: {error}")
    tell(out, found)


def on_disk(folder, num_samples):
    result = go(folder, num_samples, mesh_of_both(False))
    return {"draws": draws(result).tolist(), "finished": result.finished}


# Around them

WORKER = """
import sys
sys.path[:0] = [{tests!r}]
import pathlib
import test_processes
test_processes.join({process}, {port}, {cache!r})
folder, out = pathlib.Path({folder!r}), {out!r}
test_processes.{call}
"""


class Pair:
    """Two processes and their messages."""

    def __init__(self, tmp_path, cache, folder, call):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.outs = [tmp_path / f"out-{k}.json" for k in range(2)]
        self.logs = [tmp_path / f"log-{k}.txt" for k in range(2)]
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
        self.processes = []
        for k in range(2):
            self.outs[k].unlink(missing_ok=True)
            code = WORKER.format(
                tests=str(Path(__file__).parent),
                process=k,
                port=port,
                cache=str(cache),
                folder=str(folder),
                call=call,
                out=str(self.outs[k]),
            )
            with open(self.logs[k], "w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", code],
                        env={**os.environ, **flags},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def told(self):
        """The messages so far of both; fails with their output if one hangs or fails."""
        self.wait_for(lambda: all(out.exists() for out in self.outs))
        return [json.loads(out.read_text()) for out in self.outs]

    def wait_for(self, condition):
        """Until a condition is met; fails if a process has failed, or it takes too long."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if condition():
                return
            if any(process.poll() for process in self.processes):
                pytest.fail(f"a process failed; {self.said()}")
            time.sleep(0.02)
        pytest.fail(f"a process hung; {self.said()}")

    def ended(self):
        """The results of both."""
        until = time.monotonic() + PATIENCE
        for process in self.processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"a process hung; {self.said()}")
        if any(process.returncode for process in self.processes):
            pytest.fail(f"a process failed; {self.said()}")
        return self.told()

    def said(self):
        return "\n".join(
            f"process {k}: {log.read_text()[-3000:]}" for k, log in enumerate(self.logs)
        )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Programs that several pairs compile; the first process alone writes to it."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def alone():
    """Draws of one process without a mesh."""
    with jax.enable_x64(True):
        return draws(go(None, 200))


def test_rows_on_the_host_of_two_processes(tmp_path, cache):
    for name, array in zip("xy", data(), strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    with Pair(tmp_path, cache, tmp_path, "on_host(folder, out)") as pair:
        pair.told()
        pair.wait_for(lambda: all("control variate" in out.read_text() for out in pair.outs))
        first, second = pair.ended()
    for name, settings in SETTINGS.items():
        assert first[name] == second[name]
        with jax.enable_x64(True):
            assert_close(first[name], draws(go(None, 20, **settings)))
    texts = (
        "RuntimeError: HostRows of a Failing .* OSError: the drive is gone",
        "ValueError: the data hold NaN in .*: row 153 of 301",
        r"ValueError: process 1 was given other .* \(was float64\[301, 3\], is float64\[300, 3\]",
    )
    for text, match in zip(second["errors"], texts, strict=True):
        assert re.match(match, text), text
    other = "RuntimeError: another process of the run failed: see what process 1 says"
    assert first["errors"] == [other] * 3


def assert_close(found, alone):
    # in 64 bits sums in another order differ by some 1e-16 per step, and steps contract
    np.testing.assert_allclose(found, alone[:, : np.shape(found)[1]], rtol=0, atol=1e-12)


def wait_for(pair, folder, segments):
    """Until a run has stored so many segments."""
    pair.wait_for(lambda: len(list(folder.glob("*.npz"))) >= segments)


def check_draws_and_errors(first, second, alone):
    assert first["finished"]
    assert second["finished"]
    assert first["draws"] == second["draws"]
    assert np.shape(first["draws"]) == (CHAINS, 20, 3)
    assert_close(first["draws"], alone)
    here, there = first["errors"], second["errors"]
    assert len(here) == len(there) == 4
    for k, name in enumerate(["rng_key", "directory"]):
        assert there[k].startswith("ValueError: process 1 was given other arguments")
        assert name in there[k]
        assert here[k] == (
            "RuntimeError: another process of the run failed: see what process 1 says"
        )
    assert here[2].startswith("NotADirectoryError")
    assert there[2].startswith("NotADirectoryError")
    assert there[2].endswith("(in process 0)")
    for text in (here[3], there[3]):
        assert "expected devices of all processes, or of this process alone" in text


def test_draws_and_errors_a_killed_process_and_a_signal(tmp_path, cache, alone):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "run"
    with Pair(tmp_path, cache, tmp_path, "in_memory_and_on_disk(folder, out)") as pair:
        check_draws_and_errors(*pair.told(), alone)
        wait_for(pair, folder, 5)
        pair.processes[0].send_signal(signal.SIGKILL)  # the one that writes
        try:  # it notices by a broken connection, or by heartbeats that are missing
            other = pair.processes[1].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the other process waits for ever; {pair.said()}")
        assert other != 0
    with Pair(tmp_path, cache, folder, "tell(out, test_processes.on_disk(folder, 20_000))") as pair:
        before = len(list(folder.glob("*.npz")))
        wait_for(pair, folder, before + 2)
        pair.processes[1].send_signal(signal.SIGTERM)
        first, second = pair.ended()
    assert first == second
    assert not first["finished"]
    assert_close(np.array(first["draws"])[:, :200], alone)
