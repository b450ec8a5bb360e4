"""Work per device as rows, minibatch and devices grow together: operations, memory, traffic.

The figures are counted in compiled programs, not timed. Devices that are simulated on one host
share its cores, so their times would be meaningless. XLA counts one iteration of a loop: here one
step of SGRLD and the energy after it, or one leapfrog step of NUTS.

    python examples/benchmarks/weak_scaling.py --table docs/tables/weak_scaling.md
"""

from __future__ import annotations

import argparse
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

MOST_DEVICES = 8
FLAG = f"--xla_force_host_platform_device_count={MOST_DEVICES}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from numpyro.infer import MCMC, NUTS  # noqa: E402

from numpyro_geom import SGRLD  # noqa: E402
from numpyro_geom.rows.mesh_rows import MeshRows  # noqa: E402
from numpyro_geom.runs.job import Job  # noqa: E402
from numpyro_geom.runs.mesh import Layout  # noqa: E402
from numpyro_geom.runs.segments import Segments  # noqa: E402

BYTES = {"pred": 1, "s32": 4, "u32": 4, "f32": 4}
TRAVEL = r"= (.*?) (?:all-\w+|reduce-scatter|collective-\w+)(?:-start)?\("


class Work(NamedTuple):
    """Work of each device.

    Attributes:
        flops: operations on entries of arrays as XLA counts them, one iteration of each loop.
        data: bytes of its rows.
        batch: bytes of the minibatch that are exchanged in a step.
        others: bytes of gradients, energies and flags that are exchanged.
    """

    flops: float
    data: int
    batch: int
    others: int


def model(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", x.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ slope), obs=y[i])


def work(
    name: str, shape: tuple[int, int], chains: int, rows: int, batch: int, columns: int
) -> Work:
    """Counts on a mesh of this shape, for these chains and rows (of all devices together)."""
    kernels = {
        "SGRLD": lambda: SGRLD(model, batch_size=batch, step_size=1e-6, num_steps=1),
        "SGRLD, stratified": lambda: SGRLD(
            model, batch_size=batch, step_size=1e-6, num_steps=1, batching="stratified"
        ),
        "NUTS": lambda: NUTS(model, step_size=1e-3, max_tree_depth=5),
    }
    mcmc = MCMC(
        kernels[name](),
        num_warmup=1,
        num_samples=1,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("chains", "rows"))
    layout = Layout.of(mcmc, mesh, "chains", "rows")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="file to write the table to")
    parser.add_argument("--rows", type=int, default=10_000, help="rows of the data a device")
    parser.add_argument("--batch", type=int, default=256, help="rows of the minibatch a device")
    parser.add_argument("--columns", type=int, default=50)
    options = parser.parse_args()
    lines = [
        "| kernel | devices: chains x rows | chains | rows | minibatch | operations a device, "
        "thousands | if one device did all | MB of data a device | KB exchanged a step: minibatch "
        "| the rest |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ("SGRLD", "SGRLD, stratified", "NUTS"):
        for shape in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (8, 1)):
            chains, parts = shape
            sizes = (chains, options.rows * parts, options.batch * parts, options.columns)
            x, alone = work(name, shape, *sizes), work(name, (1, 1), *sizes)
            minibatch = "all" if name == "NUTS" else sizes[2]
            lines.append(
                f"| {name} | {chains} x {parts} | {chains} | {sizes[1]} | {minibatch} | "
                f"{x.flops / 1e3:.0f} | {alone.flops / 1e3:.0f} | {x.data / 1e6:.2f} | "
                f"{x.batch / 1e3:.1f} | {x.others / 1e3:.2f} |"
            )
            print(lines[-1], flush=True)
    if options.table:
        options.table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
