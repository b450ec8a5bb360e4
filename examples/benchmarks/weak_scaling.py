"""Work per device as rows, minibatch and devices grow together: operations, memory, traffic.

The figures are counted in compiled programs, not timed. Devices that are simulated on one host
share its cores, so their times would be meaningless. XLA counts one iteration of a loop: here one
step of SGRLD and the energy after it, or one leapfrog step of NUTS.

    python examples/benchmarks/weak_scaling.py --table docs/tables/weak_scaling.md

Steps of two real processes are timed with

    python examples/benchmarks/weak_scaling.py --times docs/tables/weak_scaling_times.md

Each process is bound to a core of its own and has one device. Both talk by Gloo. Three programs
take turns: one process alone, while the other waits; both processes without exchange, each with
its own run; one run of both, with twice the rows and twice the minibatch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

PROCESS = os.environ.get("WEAK_SCALING_PROCESS")
"""Number of this process; None in the process that starts the others."""
MOST_DEVICES = 8 if PROCESS is None else 1
if PROCESS is not None and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(PROCESS) % len(cores)]})  # before XLA counts the cores
FLAG = f"--xla_force_host_platform_device_count={MOST_DEVICES}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import chains, head, logistic  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from numpyro.infer import MCMC, NUTS  # noqa: E402

from numpyro_geom import SGRLD, HostRows  # noqa: E402
from numpyro_geom.rows.mesh_rows import MeshRows  # noqa: E402
from numpyro_geom.runs.mesh import DeviceLayout  # noqa: E402
from numpyro_geom.runs.segments import Job, Segments  # noqa: E402

BYTES = {"pred": 1, "s32": 4, "u32": 4, "f32": 4}
TRAVEL = r"= (.*?) (?:all-\w+|reduce-scatter|collective-\w+)(?:-start)?\("


class Work(NamedTuple):
    """Work of each device.

    Attributes:
        flops: operations on entries of arrays as XLA counts them, one iteration of each loop.
        data: bytes of its rows.
        batch: bytes of the minibatch that are exchanged per step.
        others: bytes of gradients, energies and flags that are exchanged.
    """

    flops: float
    data: int
    batch: int
    others: int


def work(
    name: str, shape: tuple[int, int], num_chains: int, rows: int, batch: int, columns: int
) -> Work:
    """Counts on a mesh of this shape, for these chains and rows (of all devices together)."""
    minibatch = partial(SGRLD, logistic, batch_size=batch, step_size=1e-6, num_steps=1)
    kernels = {
        "SGRLD": minibatch,
        "SGRLD, stratified": partial(minibatch, batching="stratified"),
        "NUTS": partial(NUTS, logistic, step_size=1e-3, max_tree_depth=5),
    }
    mcmc = chains(kernels[name](), 1, 1, num_chains)
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("chains", "rows"))
    layout = DeviceLayout.of(mcmc, mesh, "chains", "rows")
    x = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    y = np.zeros(rows, np.int32)
    segments = Segments(Job(mcmc, jax.random.key(0), (x, y)), 1, layout)
    one = jnp.int32(1)
    gather = MeshRows.rows
    if name == "NUTS":  # XLA would count the branch, never taken, for rows in another order
        MeshRows.rows = lambda self, i: self.__jax_array__()
    state = layout.place(segments.start)
    program = segments.program.lower(state, one, one, segments.arrays)
    MeshRows.rows = gather
    compiled = program.compile()
    exchanged = {"batch": 0, "others": 0}
    for types in re.findall(TRAVEL, compiled.as_text()):
        for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", types):
            sizes = [int(n) for n in shape.split(",") if n]
            of_batch = batch in sizes and name != "NUTS"
            exchanged["batch" if of_batch else "others"] += BYTES[kind] * math.prod(sizes)
    cost = compiled.cost_analysis()
    held = sum(s.data.nbytes for a in segments.arrays for s in a.addressable_shards[:1])
    return Work(float(cost["flops"]), held, exchanged["batch"], exchanged["others"])


RUNS = {
    "arrays, stratified": ("stratified", False),
    "`HostRows`, stratified": ("stratified", True),
    "arrays, replacement": ("replacement", False),
}
"""Batching, and whether each process reads its rows from a file."""
PROGRAMS = ("one process", "two processes, each its own run", "two processes, one run")


def segments_of(
    batching: str, on_host: bool, folder: Path, together: bool, options: argparse.Namespace
) -> Segments:
    """A chain of this process alone, or of both processes with twice the rows."""
    process = int(os.environ["WEAK_SCALING_PROCESS"])
    devices = jax.devices() if together else jax.local_devices()
    factor = len(devices)
    rows, batch = options.rows * factor, options.batch * factor
    x = np.random.default_rng(0).standard_normal((rows, options.columns), np.float32)
    data = x, np.zeros(rows, np.int32)
    if on_host:
        held = []
        for name, array in zip("xy", data, strict=True):
            path = folder / f"{name}-{process}-{together}.npy"
            np.save(path, array)
            held.append(HostRows(np.load(path, mmap_mode="r")))
        data = tuple(held)
    kernel = SGRLD(
        logistic, batch_size=batch, step_size=1e-6, num_steps=options.steps, batching=batching
    )
    mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
    layout = DeviceLayout.of(mcmc, Mesh(np.array(devices), ("rows",)), None, "rows")
    return Segments(Job(mcmc, jax.random.key(0), data), 1, layout)


def time_steps(options: argparse.Namespace) -> None:
    """In one of two processes: microseconds per step of each program, in turns.

    Two numbers each: time on the clock, and processor time of the first process.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    process = int(os.environ["WEAK_SCALING_PROCESS"])
    jax.distributed.initialize(options.coordinator, num_processes=2, process_id=process)
    folder, found = Path(os.environ["WEAK_SCALING_FOLDER"]), {}
    for name, kind in RUNS.items():
        alone, both = (segments_of(*kind, folder, x, options) for x in (False, True))
        states = [alone.start, alone.start, both.start]
        times: list[list[tuple[float, float]]] = [[] for _ in PROGRAMS]
        for turn in range(options.turns + 1):
            for k, segments in enumerate((alone, alone, both)):
                multihost_utils.sync_global_devices(f"{name} {turn} {k}")
                if k == 0 and process != 0:
                    continue
                before = time.perf_counter(), time.process_time()
                states[k], _ = segments.advance(states[k], 1, 1)
                after = time.perf_counter(), time.process_time()
                times[k].append(tuple(np.subtract(after, before) / options.steps * 1e6))
        found[name] = [x[1:] for x in times]  # the first turn compiles
    if process == 0:
        (folder / "times.json").write_text(json.dumps(found))


def timed(options: argparse.Namespace) -> list[str]:
    """The lines of the table of times."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        given = ["--rows", "--batch", "--columns", "--steps", "--turns"]
        command = [sys.executable, __file__, "--coordinator", coordinator]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by default nothing is cleaned up
        for name in given:
            command += [name, str(getattr(options, name[2:]))]
        processes: list[subprocess.Popen] = []
        try:
            for k in range(2):
                own = {"WEAK_SCALING_PROCESS": str(k), "WEAK_SCALING_FOLDER": folder}
                processes.append(subprocess.Popen(command, env={**os.environ, **own}))
            if any([process.wait() for process in processes]):
                raise RuntimeError("a process failed: see what it said")
        finally:
            for process in processes:
                process.kill()
        found = json.loads((Path(folder) / "times.json").read_text())
    lines = []
    for name, times in found.items():
        alone, apart, both = np.array(times).transpose(0, 2, 1)  # program, clock, turn
        numbers = [f"{np.median(x[0]):.0f}" for x in (alone, apart, both)]
        ratios = [both[0] / alone[0], apart[0] / alone[0], both[1] / alone[1]]
        numbers += [
            "{:.2f} ({:.2f} to {:.2f})".format(*np.quantile(x, [0.5, 0.25, 0.75])) for x in ratios
        ]
        lines.append(f"| {name} | {options.batch} | " + " | ".join(numbers) + " |")
        print(lines[-1], flush=True)
    return lines


TIMES = (
    *("rows", "minibatch per process", "µs per step: one process", "two, each its own run"),
    *("two, one run", "one run of two / one process", "each its own run / one process"),
    "processor time: one run of two / one process",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="file to write the table to")
    parser.add_argument("--rows", type=int, default=10_000, help="rows of the data per device")
    parser.add_argument("--batch", type=int, default=256, help="rows of the minibatch per device")
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--times", type=Path, help="time two processes, and write that table")
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 8192], help="for --times")
    parser.add_argument("--steps", type=int, default=100, help="steps that are timed together")
    parser.add_argument("--turns", type=int, default=8, help="how often each program is timed")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.coordinator:
        return time_steps(options)
    if options.times:
        lines = head(*TIMES)
        for batch in options.batches:
            options.batch = batch
            lines += timed(options)
        options.times.write_text("\n".join(lines[:5]) + "\n")
        return None
    lines = head(
        *("kernel", "devices: chains x rows", "chains", "rows", "minibatch"),
        *("operations per device, thousands", "if one device did all", "MB of data per device"),
        *("KB exchanged per step: minibatch", "the rest"),
    )
    for name in ("SGRLD", "SGRLD, stratified", "NUTS"):
        for shape in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (8, 1)):
            num_chains, parts = shape
            sizes = (num_chains, options.rows * parts, options.batch * parts, options.columns)
            x, alone = work(name, shape, *sizes), work(name, (1, 1), *sizes)
            minibatch = "all" if name == "NUTS" else sizes[2]
            lines.append(
                f"| {name} | {num_chains} x {parts} | {num_chains} | {sizes[1]} | {minibatch} | "
                f"{x.flops / 1e3:.0f} | {alone.flops / 1e3:.0f} | {x.data / 1e6:.2f} | "
                f"{x.batch / 1e3:.1f} | {x.others / 1e3:.2f} |"
            )
            print(lines[-1], flush=True)
    if options.table:  # of many devices those with one axis, and the most of them
        lines = [x for x in lines if not re.search(r"\| (1 x [24]|2 x 4) \|", x)]
        options.table.write_text("\n".join(lines) + "\n")
    return None


if __name__ == "__main__":
    main()
