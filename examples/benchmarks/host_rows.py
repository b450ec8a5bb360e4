"""Rows on the host: memory and speed of `HostRows` compared with an array on the device.

Memory is that of a fresh process whose private memory is limited to less than the file. Speed is
that of two compiled programs that differ only in the source of the rows, timed in turns.

    python examples/benchmarks/host_rows.py --table docs/tables/host_rows.md
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import head, in_process, logistic, memory
from numpyro.infer import MCMC

from numpyro_geom import SGRLD, HostRows
from numpyro_geom.model.arguments import on_device
from numpyro_geom.rows.reader import Reader

COLUMNS = 20
MEGABYTE = 2**20


def network(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1], 32]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([32]).to_event(1))
    with numpyro.plate("data", x.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=jnp.tanh(x[i] @ w) @ v), obs=y[i])


MODELS = {"logistic": logistic, "network": network}


def write_rows(folder: Path, rows: int, dtype: type) -> None:
    """Files with ``rows`` rows, written in parts."""
    rng = np.random.default_rng(0)
    weights = np.linspace(-1, 1, COLUMNS)
    name = name_of(rows, dtype)
    with open(folder / f"x{name}", "wb") as file_x, open(folder / f"y{name}", "wb") as file_y:
        for start in range(0, rows, 10**6):
            x = rng.normal(size=(min(10**6, rows - start), COLUMNS)).astype(dtype)
            y = rng.random(len(x)) < 1 / (1 + np.exp(-x @ weights))
            file_x.write(x.tobytes())
            file_y.write(y.astype(np.int32).tobytes())


def mapped(folder: Path, rows: int, dtype: type) -> tuple[np.memmap, np.memmap]:
    name = name_of(rows, dtype)
    return (
        np.memmap(folder / f"x{name}", dtype, "r", shape=(rows, COLUMNS)),
        np.memmap(folder / f"y{name}", np.int32, "r", shape=(rows,)),
    )


def name_of(rows: int, dtype: type) -> str:
    return f"-{rows}-{np.dtype(dtype)}"


def child(folder: Path, rows: int, on_host: bool, limit: int, steps: int) -> dict:
    """A run in this process, under a memory limit; returns its memory and time."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit * MEGABYTE, limit * MEGABYTE))
    private, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            private.append(memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        x, y = mapped(folder, rows, np.float64)
        data = (HostRows(x), HostRows(y)) if on_host else (jnp.asarray(x), jnp.asarray(y))
        kernel = SGRLD(logistic, batch_size=1000, step_size=1e-7, num_steps=steps // 10)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=10, progress_bar=False)
        mcmc.run(jax.random.key(0), *data)
        mean = float(mcmc.get_samples()["w"].mean())
    finally:
        done.set()
        watcher.join()
    return {"private": max(private), "peak": memory("VmHWM"), "mean": mean}


def in_a_fresh_process(
    folder: Path, rows: int, on_host: bool, limit: int, steps: int
) -> dict | None:
    """The same in a fresh process; None if it failed."""
    settings = [str(folder), str(rows), str(int(on_host)), str(limit), str(steps)]
    found = in_process(__file__, "--child", *settings)
    return None if "failed" in found else found


def memory_table(
    folder: Path, sizes: list[int], limit: int, steps: int, run_child: Callable
) -> list[str]:
    bounds = "limit of private memory, MB", "peak private, MB", "peak with mapped pages, MB"
    lines = head("rows", "file, MB", "rows in", *bounds)
    draws = {}
    for on_host, allowed in ((True, limit), (False, 0), (False, limit)):
        for rows in sizes:
            if not on_host and allowed and rows * COLUMNS * 4 < limit * MEGABYTE // 2:
                continue
            file = rows * COLUMNS * 8 / MEGABYTE
            found = run_child(folder, rows, on_host, allowed, steps)
            cells = "ends for want of memory | –"
            if found is not None:
                cells = f"{found['private']:.0f} | {found['peak']:.0f}"
                if draws.setdefault(rows, found["mean"]) != found["mean"]:
                    raise RuntimeError(f"draws differ: {draws[rows]} and {found['mean']}")
            place = "`HostRows`" if on_host else "the device"
            bound = allowed if allowed else "none"
            lines.append(f"| {rows:,} | {file:.0f} | {place} | {bound} | {cells} |")
            print(lines[-1], flush=True)
    return lines


def speed(
    folder: Path, rows: int, model: str, batch_size: int, seconds: float, repeats: int
) -> tuple[float, float, float]:
    """Microseconds per step: on the device, on the host, and on the host without reading ahead."""
    x, y = mapped(folder, rows, np.float32)
    programs = {}
    for place, data in (
        ("device", (jnp.asarray(x), jnp.asarray(y))),
        ("host", (HostRows(x), HostRows(y))),
    ):
        kernel = SGRLD(MODELS[model], step_size=1e-9, num_steps=256, batch_size=batch_size)
        state = kernel.init(jax.random.key(0), 0, None, data, {})
        step = jax.jit(lambda state, kernel=kernel, data=data: kernel.sample(state, data, {}))
        jax.block_until_ready(step(state).z)
        programs[place] = (step, state)

    def per_step(place: str) -> float:
        step, state = programs[place]
        begun, draws = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            state = jax.block_until_ready(step(state))
            draws += 1
        return (time.perf_counter() - begun) / (256 * draws) * 1e6

    times: list[tuple[float, float, float]] = []
    for _ in range(repeats):
        device, host = per_step("device"), per_step("host")
        with mock.patch.object(Reader, "prepare", return_value=None):
            times.append((device, host, per_step("host")))
    return tuple(statistics.median(column) for column in zip(*times, strict=True))  # type: ignore


def speed_table(
    folder: Path,
    rows: int,
    models: list[str],
    batch_sizes: list[int],
    seconds: float,
    repeats: int,
) -> list[str]:
    times = "device, us per step", "`HostRows`, us per step"
    compared = "ratio of steps per second", "ratio if nothing is read ahead"
    lines = head("model", "batch size", *times, *compared)
    for model in models:
        for batch_size in batch_sizes:
            device, host, behind = speed(folder, rows, model, batch_size, seconds, repeats)
            lines.append(
                f"| {model} | {batch_size:,} | {device:.0f} | {host:.0f} | {device / host:.2f} | "
                f"{device / behind:.2f} |"
            )
            print(lines[-1], flush=True)
    return lines


def pass_table(folder: Path, rows: int, repeats: int) -> list[str]:
    """Seconds per pass over all rows, from memory and from a file that is not cached."""
    x, y = mapped(folder, rows, np.float32)
    seconds: dict[str, list[float]] = {"device": [], "host": [], "cold": []}
    for place, data in (
        ("device", (jnp.asarray(x), jnp.asarray(y))),
        ("host", (HostRows(x), HostRows(y))),
    ):
        kernel = SGRLD(logistic, step_size=1e-9, num_steps=1, batch_size=100)
        state = kernel.init(jax.random.key(0), 0, None, data, {})
        potential = kernel.bound.on(*on_device(data, {})).potential()
        full = jax.jit(
            lambda z, p=potential: p.on_all_rows(  # type: ignore[misc]
                lambda rows: jax.value_and_grad(p.energy)(z, rows)
            )
        )
        jax.block_until_ready(full(state.z))
        for _ in range(repeats):
            begun = time.perf_counter()
            jax.block_until_ready(full(state.z))
            seconds[place].append(time.perf_counter() - begun)
    # only pages that no process has mapped can leave the cache
    x._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    forget(folder / f"x{name_of(rows, np.float32)}")
    begun = time.perf_counter()
    jax.block_until_ready(full(state.z))
    seconds["cold"].append(time.perf_counter() - begun)
    lines = head("a pass over all rows, from", "seconds")
    names = {
        "device": "the device",
        "host": "`HostRows`, file in the cache of the system",
        "cold": "`HostRows`, file on disk",
    }
    lines += [f"| {names[k]} | {statistics.median(v):.2f} |" for k, v in seconds.items()]
    print("\n".join(lines[2:]), flush=True)
    return lines


def forget(path: Path) -> None:
    """Drop a file from the cache of the system."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="file to write the tables to")
    parser.add_argument("--rows", type=int, default=10**7)
    parser.add_argument("--limit", type=int, default=1024, help="MB of private memory")
    parser.add_argument("--steps", type=int, default=10_000, help="of the run in a fresh process")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a timing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few rows, for a look")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, *numbers = options.child
        rows, on_host, limit, steps = map(int, numbers)
        print(json.dumps(child(Path(folder), rows, bool(on_host), limit, steps)))
        return
    models, batch_sizes = list(MODELS), [100, 1000, 10_000]
    sizes, run_child = [options.rows // 10, options.rows], in_a_fresh_process
    if options.quick:  # in this process, without a limit
        run_child = lambda folder, rows, on_host, _, steps: child(folder, rows, on_host, 0, steps)  # noqa: E731
        options.rows, options.steps, options.seconds, options.repeats = 20_000, 50, 0.01, 1
        models, batch_sizes, sizes = ["logistic"], [100], [options.rows]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for rows in sizes:
            write_rows(folder, rows, np.float64)
        lines = memory_table(folder, sizes, options.limit, options.steps, run_child)
        for rows in sizes:
            (folder / f"x{name_of(rows, np.float64)}").unlink()
        write_rows(folder, options.rows, np.float32)
        timing = options.seconds, options.repeats
        lines += ["", *speed_table(folder, options.rows, models, batch_sizes, *timing)]
        lines += ["", *pass_table(folder, options.rows, options.repeats)]
    if options.table:
        options.table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
