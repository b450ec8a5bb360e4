"""Kill a long run repeatedly at random times, and compare its draws with an unbroken run.

Each victim is a separate process that is ended by SIGKILL. After each kill, the store is opened
and compared with the unbroken run; then the run continues. A run that reaches its end counts
if its draws are identical. New runs are started until there are enough kills.

    python examples/benchmarks/kill_runs.py --kills 100
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import xarray as xr
from numpyro.infer import MCMC, NUTS

from numpyro_geom import SGRLD
from numpyro_geom.runs import run

KERNELS = ("sgrld", "nuts")
SETTINGS = {"batch_size": 16, "batching": "epoch", "step_size": 1e-3, "num_steps": 2}
MODULES = ("arviz", "zarr", "google_crc32c")
"""Imported before the first fork; otherwise imports would take most of a victim's time."""


def model(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([5]).to_event(1))
    with numpyro.plate("data", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal(x[i] @ slope, 1), obs=y[i])


def go_on(kind: str, directory: Path, segments: int) -> Any:
    """Start a run, or continue it."""
    kernel = NUTS(model) if kind == "nuts" else SGRLD(model, **SETTINGS)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=20 * segments, progress_bar=False)
    key_x, key_y = jax.random.split(jax.random.key(1))
    x = jax.random.normal(key_x, (100, 5))
    y = x @ jnp.arange(5.0) + jax.random.normal(key_y, (100,))
    return run(mcmc, jax.random.key(0), x, y, directory=directory, draws_per_segment=20)


def is_unfinished(kind: str, directory: Path, segments: int) -> bool:
    """Whether a run that is started or continued does not reach its end."""
    return not go_on(kind, directory, segments).finished


def problem_of(directory: Path, reference: Path) -> str:
    """Where the draws of a store differ from the first draws of an unbroken run."""
    finished = finished_draws(directory)
    if finished is None:
        return ""
    with xr.open_datatree(directory / "draws.zarr", engine="zarr") as found:
        if not finished:
            return ""
        with xr.open_datatree(reference / "draws.zarr", engine="zarr") as expected:
            for group in ("posterior", "sample_stats"):
                draws = found[group].sizes["draw"]
                if draws < finished:
                    return f"{group} holds {draws} draws, and {finished} were finished"
                for name, values in found[group].data_vars.items():
                    same = expected[group][name].isel(draw=slice(draws))
                    if not np.array_equal(values.values, same.values):
                        return f"{name} differs"
    return ""


def finished_draws(directory: Path) -> int | None:
    """Number of finished draws in the newest saved state; None before the first state."""
    states = sorted((directory / "state").glob("*.npz"))
    if not states:
        return None
    segments_of_warmup = 5
    return 20 * max(0, int(states[-1].stem) - segments_of_warmup)


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


def succeeds(task: Callable[[], Any]) -> bool:
    """Whether a task ends without an error and returns a false value, which means no problem."""
    return os.waitpid(in_child(task), 0)[1] == 0


def check(directory: Path, reference: Path) -> bool:
    """Whether the store is valid; prints what is wrong."""

    def task() -> str:
        problem = problem_of(directory, reference)
        if problem:
            print(problem, flush=True)
        return problem

    return succeeds(task)


def kill_again_and_again(folder: Path, kills: int, segments: int, seed: int) -> tuple[int, int]:
    """Number of kills after which the store was valid, and number of runs with identical draws."""
    for module in MODULES:
        importlib.import_module(module)
    rng = np.random.default_rng(seed)
    cache = folder / "compiled"
    # compiled programs are kept on disk; otherwise compilation would take most of the time
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    seconds = {}
    for kind in KERNELS:
        reference = folder / f"{kind}-reference"
        if not succeeds(partial(is_unfinished, kind, reference, segments)):
            raise RuntimeError("the run without a break failed")
        begun = time.monotonic()
        succeeds(partial(is_unfinished, kind, folder / f"{kind}-timed", segments))
        seconds[kind] = time.monotonic() - begun
        print(f"{kind}: {seconds[kind]:.1f} s without a break", flush=True)
    done = good = identical = number = 0
    while done < kills:
        kind = KERNELS[number % len(KERNELS)]
        reference, directory = folder / f"{kind}-reference", folder / f"run-{number}"
        task = partial(is_unfinished, kind, directory, segments)
        number += 1
        over = False
        while not over and done < kills:
            child = in_child(task)
            time.sleep(rng.uniform(0, seconds[kind] / 2))
            over = os.waitpid(child, os.WNOHANG)[0] == child
            if not over:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                done += 1
            good += check(directory, reference) and not over
        if succeeds(task):
            identical += check(directory, reference)
        print(
            f"{done} kills, {good} stores valid and complete; {identical} of {number} runs "
            "identical to those without a break",
            flush=True,
        )
    if identical < number or good < done:
        raise SystemExit("not all were")
    return good, identical


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--segments", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kill_again_and_again(Path(folder), options.kills, options.segments, options.seed)


if __name__ == "__main__":
    main()
