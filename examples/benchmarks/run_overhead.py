"""Cost of `run_in_segments`: its time besides that of the chains, and its memory for many draws.

Within one run, two times are measured: that of the chains' program, which is that of `mcmc.run`,
and that of the work between two segments. Memory is the peak resident size of a fresh process.

    python examples/benchmarks/run_overhead.py --table docs/tables/runs.md
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from common import head, in_process, logistic, memory
from numpyro.infer import MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel

from numpyro_geom import SGRLD
from numpyro_geom.runs import run_in_segments
from numpyro_geom.runs.segments import Segments
from numpyro_geom.runs.store import Store

MEGABYTE = 2**20


def data(rows: int, columns: int):
    key_x, key_y = jax.random.split(jax.random.key(1))
    x = jax.random.normal(key_x, (rows, columns))
    return x, jax.random.bernoulli(key_y, jax.nn.sigmoid(x @ jnp.linspace(-1, 1, columns)))


def kernels() -> dict[str, MCMCKernel]:
    settings = {"batch_size": 100, "step_size": 1e-5, "num_steps": 50}
    return {"NUTS": NUTS(logistic), "SGRLD": SGRLD(logistic, **settings)}


@contextlib.contextmanager
def timed(owner: type, name: str) -> Iterator[list[float]]:
    """Seconds of each call of a method."""
    original, seconds = getattr(owner, name), []

    def method(self, *args):
        begun = time.monotonic()
        result = original(self, *args)
        seconds.append(time.monotonic() - begun)
        return result

    setattr(owner, name, method)
    try:
        yield seconds
    finally:
        setattr(owner, name, original)


def overhead(name: str, seconds: float, segments: int) -> dict[str, float]:
    """Times of a run whose segments take about ``seconds`` seconds each."""
    x, y = data(2000, 20)

    def go(num_samples: int, length: int) -> tuple[list[float], list[float]]:
        """Seconds of the chains in each segment, and of storing it."""
        mcmc = MCMC(kernels()[name], num_warmup=length, num_samples=num_samples, progress_bar=False)
        with (
            tempfile.TemporaryDirectory() as directory,
            timed(Segments, "advance") as chains,
            timed(Store, "write") as stored,
        ):
            run_in_segments(
                mcmc, jax.random.key(0), x, y, directory=directory, draws_per_segment=length
            )
        # the first segment is warm-up, and compiles
        return chains[1:], stored[1:]

    chains, _ = go(400, 200)
    length = max(20, round(200 * seconds / min(chains)))
    chains, storing = go(segments * length, length)
    return {
        "segment": sum(chains) / segments,
        "storing": sum(storing) / segments,
        "worst": max(storing),
        "share": sum(storing) / sum(chains),
    }


def peak(draws: int, size: int, length: int) -> None:
    """A Langevin chain on a normal distribution in ``size`` dimensions; prints peak sizes in MB."""
    kernel = SGRLD(potential_fn=lambda z: 0.5 * jnp.sum(z**2), step_size=0.1, num_steps=1)
    mcmc = MCMC(kernel, num_warmup=length, num_samples=draws, progress_bar=False)
    jax.block_until_ready(jnp.zeros(size))
    before = memory("VmHWM")
    with tempfile.TemporaryDirectory() as directory:
        how = {"draws_per_segment": length, "init_params": jnp.zeros(size)}
        run_in_segments(mcmc, jax.random.key(0), directory=directory, **how)
        stored = sum(path.stat().st_size for path in Path(directory).iterdir())
    print([before, memory("VmHWM"), stored / MEGABYTE])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="file to write the tables to")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds per segment")
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=10_000)
    parser.add_argument("--peak", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak(*options.peak)
        return
    titles = "segments", "seconds per segment", "storing one, s", "longest, s", "share"
    lines = head("kernel", *titles)
    for name in kernels():
        x = overhead(name, options.seconds, options.segments)
        lines.append(
            f"| {name} | {options.segments} | {x['segment']:.1f} | {x['storing']:.3f} | "
            f"{x['worst']:.3f} | {100 * x['share']:.2f}% |"
        )
        print(lines[-1], flush=True)
    titles = "stored, MB", "peak before the run, MB", "peak, MB", "difference, MB"
    lines += ["", *head("draws", "parameters", *titles)]
    for draws in (options.draws // 10, options.draws):
        before, after, stored = in_process(__file__, "--peak", draws, options.size, 500)
        lines.append(
            f"| {draws} | {options.size} | {stored:.0f} | {before:.0f} | {after:.0f} | "
            f"{after - before:.0f} |"
        )
        print(lines[-1], flush=True)
    if options.table:
        options.table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
