"""Kill long runs repeatedly at random times, and compare their draws with unbroken runs.

Each victim is a separate process that is ended by SIGKILL. A run over two processes loses one of
them, and the other has to end by itself. After each kill, the files are read and compared with
the unbroken run; then the run continues. A run that reaches its end counts if its draws are
identical. New runs are started until there are enough kills of each case.

    python examples/benchmarks/kill_runs.py --kills 25 --table docs/tables/kills.md
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.sharding import Mesh
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel

from numpyro_geom import GGMC, SGHMC, SGRLD, Expanded, HostRows
from numpyro_geom.runs import run_in_segments

ROWS = 100
PATIENCE = 120
"""Seconds after which a process counts as hung if the other process of its run was killed."""


def model(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([5, 2]).to_event(2))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal((x[i] @ slope).sum(-1), 1), obs=y[i])


EXPANDED = handlers.reparam(model, config={"slope": Expanded()})


class Case(NamedTuple):
    """A kind of run.

    Attributes:
        kernel: makes the kernel.
        processes: number of processes that share the run.
        on_host: whether the inputs are `HostRows` of a memory map.
    """

    kernel: Callable[[], MCMCKernel]
    processes: int = 1
    on_host: bool = False


MINIBATCH = {"batch_size": 16, "batching": "epoch", "step_size": 1e-3, "num_steps": 2}
CASES = {
    "SGHMC, control variate, `HostRows` of a memmap": Case(
        partial(SGHMC, model, control_variate=True, **MINIBATCH), on_host=True
    ),
    "GGMC, expansion": Case(partial(GGMC, EXPANDED, batch_size=16)),
    "NUTS": Case(partial(NUTS, model)),
    "SGRLD, two processes": Case(partial(SGRLD, model, **MINIBATCH), processes=2),
}


def go_on(case: Case, data: Path, directory: Path, segments: int) -> Any:
    """Start a run, or continue it."""
    mcmc = MCMC(case.kernel(), num_warmup=100, num_samples=20 * segments, progress_bar=False)
    x, y = np.load(data / "x.npy", mmap_mode="r"), np.load(data / "y.npy")
    inputs = HostRows(x) if case.on_host else jnp.asarray(x)
    mesh = {"mesh": Mesh(jax.devices(), ("rows",)), "data_axis": "rows"}
    settings = mesh if case.processes > 1 else {}
    key = jax.random.key(0)
    return run_in_segments(
        mcmc, key, inputs, jnp.asarray(y), directory=directory, draws_per_segment=20, **settings
    )


def is_unfinished(directory: Path, segments: int, case: Case, process: int, port: int) -> bool:
    """Whether a run that is started or continued does not reach its end."""
    together = case.processes > 1
    if together:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}", case.processes, process, heartbeat_timeout_seconds=5
        )
    result = go_on(case, directory.parent, directory, segments)
    if together:
        jax.distributed.shutdown()  # waits for the other process
    return not result.finished


def check(directory: Path, reference: Path) -> bool:
    """Whether the files are those of an unbroken run, bit for bit; prints which are not."""
    files = sorted(directory.glob("*.npz"))
    wrong = [x.name for x in files if x.read_bytes() != (reference / x.name).read_bytes()]
    if wrong:
        print(wrong, flush=True)
    return not wrong


def in_child(task: Callable[[], Any]) -> int:
    """Run a task in a separate process, forked before JAX has started; returns its id."""
    with warnings.catch_warnings():
        # JAX warns of its threads, and this process has not started any
        warnings.simplefilter("ignore")
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = int(bool(task()))
    finally:
        os._exit(code)


def in_children(task: Callable[..., Any], case: Case) -> list[int]:
    """Run a task in the processes of a case; returns their ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [in_child(partial(task, case, k, port)) for k in range(case.processes)]


def succeed(children: list[int]) -> bool:
    """Whether all processes end without an error and their tasks return false values."""
    return not any([os.waitpid(child, 0)[1] for child in children])


def have_ended(children: list[int], seconds: float = PATIENCE) -> bool:
    """Whether all processes end within so many seconds; ends the others."""
    until, running = time.monotonic() + seconds, list(children)
    while running and time.monotonic() < until:
        running = [child for child in running if os.waitpid(child, os.WNOHANG)[0] != child]
        time.sleep(0.02)
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not running


class Counts(NamedTuple):
    """What became of the runs of a case.

    Attributes:
        kills: number of kills.
        valid: kills after which the files were valid and the other processes had ended.
        runs: runs that were started.
        identical: runs whose draws are those of an unbroken run.
    """

    kills: int = 0
    valid: int = 0
    runs: int = 0
    identical: int = 0


def kill_again_and_again(folder: Path, case: Case, kills: int, segments: int, seed: int) -> Counts:
    """Kill runs of a case until there are enough kills."""
    rng = np.random.default_rng(seed)
    reference = folder / "reference"
    if not succeed(in_children(partial(is_unfinished, reference, segments), case)):
        raise RuntimeError("the run without a break failed")
    begun = time.monotonic()
    succeed(in_children(partial(is_unfinished, folder / "timed", segments), case))
    seconds = time.monotonic() - begun
    print(f"{seconds:.1f} s without a break", flush=True)
    counts = Counts()
    while counts.kills < kills:
        directory = folder / f"run-{counts.runs}"
        task = partial(is_unfinished, directory, segments)
        counts = counts._replace(runs=counts.runs + 1)
        while counts.kills < kills:
            children = in_children(task, case)
            time.sleep(rng.uniform(0, seconds / 2))
            if any([os.waitpid(child, os.WNOHANG)[0] for child in children]):
                break
            victim = children.pop(rng.integers(case.processes))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            valid = have_ended(children) and check(directory, reference)
            counts = counts._replace(kills=counts.kills + 1, valid=counts.valid + valid)
        if succeed(in_children(task, case)) and check(directory, reference):
            counts = counts._replace(identical=counts.identical + 1)
        print(counts, flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=25, help="of each case")
    parser.add_argument("--segments", type=int, default=100)
    parser.add_argument("--table", type=Path, help="file to write the table to")
    options = parser.parse_args()
    rows = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            rng = np.random.default_rng(1)
            x = rng.normal(size=(ROWS, 5)).astype(np.float32)
            np.save(Path(folder) / "x.npy", x)
            np.save(Path(folder) / "y.npy", (x.sum(1) + rng.normal(size=ROWS)).astype(np.float32))
            # compiled programs are kept on disk; otherwise compilation would take most of the time
            jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            print(name, flush=True)
            arguments = options.kills, options.segments, 0
            rows[name] = kill_again_and_again(Path(folder), case, *arguments)
    if options.table:
        lines = [f"| {' | '.join(map(str, (name, *row)))} |\n" for name, row in rows.items()]
        head = "| run | kills | files valid | runs | identical |\n|---|---|---|---|---|\n"
        options.table.write_text(head + "".join(lines))
    if any(row.identical < row.runs or row.valid < row.kills for row in rows.values()):
        raise SystemExit("not all were")


if __name__ == "__main__":
    main()
