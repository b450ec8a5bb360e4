"""How long a draw should be: effective draws per gradient against the relaxation times per draw.

A Gaussian with variances from 0.01 to 1 and exact gradients, so that only the length of a draw
varies. Prints a Markdown table and writes it to docs/tables/draw_length.md; under a minute.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from common import TABLES
from jax import lax, random
from numpyro.diagnostics import effective_sample_size

from numpyro_geom import SGHMC, SGRLD, SGKernel

TABLE = TABLES / "draw_length.md"
LENGTHS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
PRECISIONS = jnp.logspace(0, 2, 8)
NUM_CHAINS, NUM_GRADIENTS = 32, 100_000


def energy(z: jax.Array) -> jax.Array:
    """Energy of the Gaussian."""
    return jnp.sum(PRECISIONS * z * z) / 2


def rate_of(kernel: SGKernel, num_steps: int) -> tuple[float, float]:
    """ESS of the slowest direction per thousand gradients, and per draw."""
    num_draws = NUM_GRADIENTS // num_steps
    keys = random.split(random.key(0), NUM_CHAINS)
    start = random.normal(random.key(1), (NUM_CHAINS, PRECISIONS.size)) / jnp.sqrt(PRECISIONS)
    state = kernel.init(keys, 0, start, (), {})

    @jax.jit
    def draws(state):
        def step(s, _):
            s = kernel.sample(s, (), {})
            return s, s.z[:, 0]

        return lax.scan(step, state, None, num_draws)[1].T

    size = float(effective_sample_size(np.asarray(draws(state))))
    return 1000 * size / (NUM_CHAINS * num_draws * num_steps), size / (NUM_CHAINS * num_draws)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-table", action="store_true", help="print only")
    arguments = parser.parse_args()
    h, stride = 0.002, 0.06  # bias_tolerance 0.1 at the largest precision: 0.1 / 50 and 2 sqrt(.09)
    kernels = {
        "SGRLD": (SGRLD(potential_fn=energy, step_size=h, num_steps=1), 1 / h, {}),
        "SGHMC, half of the critical friction": (None, 2 / stride, {"friction": 1.0}),
        "SGHMC, critical friction": (None, 1 / stride, {"friction": 2.0}),
        "SGHMC, friction 10 x critical": (None, 19.95 / stride, {"friction": 20.0}),
    }
    rows = []
    for name, (kernel, relaxation, extra) in kernels.items():
        found = []
        for length in LENGTHS:
            num_steps = max(1, round(length * relaxation))
            if kernel is None:
                one = SGHMC(potential_fn=energy, step_size=stride, num_steps=num_steps, **extra)
            else:
                one = kernel.replace(num_steps=num_steps)
            found.append(rate_of(one, num_steps))
        best = max(gradients for gradients, _ in found)
        cells = [f"{gradients / best:.2f} ({draw:.2f})" for gradients, draw in found]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    text = (
        "| kernel | "
        + " | ".join(f"{x:g}" for x in LENGTHS)
        + " |\n|---" * 1
        + "|---" * len(LENGTHS)
        + "|\n"
        + "\n".join(rows)
        + "\n"
    )
    print(text)
    if not arguments.no_table:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
