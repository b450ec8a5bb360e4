"""Check the automatic step size and the length of a draw.

Prints a Markdown table of the worst variance ratio on seven posteriors, in default settings, and
writes it to docs/tables/bias.md. Lines of that table that are not measured stay as they are.

    python examples/benchmarks/step_size_table.py [--targets banana logistic] [--kernels SGRLD]

With ``--lengths``, effective draws per gradient against the relaxation times per draw, written to
docs/tables/draw_length.md: a Gaussian with variances from 0.01 to 1 and exact gradients, so that
only the length of a draw varies; under a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import posteriors as P
from common import TABLES, head
from jax import lax, random
from numpyro.diagnostics import effective_sample_size

from numpyro_geom import SGHMC, SGRLD, Monge, SGKernel

TABLE = TABLES / "bias.md"
TARGETS: dict[str, Callable[[], P.Posterior]] = {
    "gaussian": P.gaussian,
    "logistic": P.logistic,
    "raw": lambda: P.logistic(raw=True),
    "poisson": P.poisson,
    "hierarchical": P.hierarchical,
    "network": P.network,
    "banana": P.banana,
}
LENGTHS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
PRECISIONS = jnp.logspace(0, 2, 8)
NUM_CHAINS, NUM_GRADIENTS = 32, 100_000
MOVES = {"metric": Monge(alpha2=1.0, decay=0.9)}
KERNELS: dict[str, Callable[..., Any]] = {
    "SGRLD": SGRLD,
    "SGHMC": SGHMC,
    "SGRLD, divergence='none'": partial(SGRLD, divergence="none"),
    "SGRLD, Monge(1.0, 0.9)": partial(SGRLD, **MOVES),
    "SGRLD, Monge(1.0, 0.9), bias_tolerance=0.03": partial(SGRLD, bias_tolerance=0.03, **MOVES),
}


def row(title: str, kernel: Any, values: Any, state: Any, mean: Any, sd: Any) -> str:
    """One line of the table."""
    _, _, ratio, ratio_mc = P.errors(values, mean, sd)
    learned, h = state.adaptation, np.asarray(state.step_size)
    parts = kernel.facts.bias(learned.curvature, learned.noise, h, state.dynamics)
    rate = np.asarray(kernel.facts.rate(learned.slowest, state.dynamics))
    spanned = np.median(len(values) * np.asarray(state.num_steps) * h * rate)
    binds = "noise" if np.median(learned.noise) > np.median(learned.curvature) else "curvature"
    return (
        f"{title} | {np.median(h):.1e} "
        f"| {np.median(state.num_steps):.0f} | {np.median(1 + parts[0] + parts[1]):.2f} "
        f"| {ratio**2:.2f} ({2 * ratio * ratio_mc:.2f}) | {spanned:.0f} | {binds} |"
    )


def energy(z: jax.Array) -> jax.Array:
    """Energy of the Gaussian of draw lengths."""
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


def length_table() -> str:
    """Each row is relative to its best length; in brackets are effective draws per draw."""
    h, stride = 0.002, 0.06  # bias_tolerance 0.1 at the largest precision: 0.1 / 50 and 2 sqrt(.09)
    damped = partial(SGHMC, potential_fn=energy, step_size=stride, num_steps=1)
    kernels = {
        "SGRLD": (SGRLD(potential_fn=energy, step_size=h, num_steps=1), 1 / h),
        "SGHMC, half of the critical friction": (damped(friction=1.0), 2 / stride),
        "SGHMC, critical friction": (damped(friction=2.0), 1 / stride),
        "SGHMC, friction 10 x critical": (damped(friction=20.0), 19.95 / stride),
    }
    lines = head("kernel", *(f"{x:g}" for x in LENGTHS))
    for name, (kernel, relaxation) in kernels.items():
        steps = [max(1, round(length * relaxation)) for length in LENGTHS]
        found = [rate_of(kernel.replace(num_steps=n), n) for n in steps]
        best = max(gradients for gradients, _ in found)
        cells = [f"{gradients / best:.2f} ({draw:.2f})" for gradients, draw in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all targets, or all lengths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=[*KERNELS])
    parser.add_argument("--lengths", action="store_true", help="the table of draw lengths")
    options = parser.parse_args()
    if options.lengths:
        text = length_table()
        print(text)
        (TABLES / "draw_length.md").write_text(text)
        return
    small = options.small
    old = TABLE.read_text().splitlines()[2:] if TABLE.exists() else []
    known = {tuple(x.split(" | ")[:2]): x for x in old}
    for target in options.targets:
        posterior = TARGETS[target]()
        mean, sd = posterior.reference(40_000)
        for label in options.kernels:
            rows = {} if posterior.batch_size is None else {"batch_size": posterior.batch_size}
            kernel = KERNELS[label](posterior.model, **rows)
            values, state, _ = P.run_chains(
                kernel,
                posterior,
                num_chains=4 if small else 16,
                num_warmup=32 if small else 500,
                num_samples=20 if small else 1000,
            )
            title = f"| {posterior.name}", label
            known[title] = row(" | ".join(title), kernel, values, state, mean, sd)
            print(known[title], flush=True)
    if not small:
        names = list(dict.fromkeys(name for name, _ in known))
        lines = [known[n, k] for n in names for k in KERNELS if (n, k) in known]
        worst = "worst variance ratio (its Monte Carlo error)"
        titles = "steps per draw", "predicted", worst, "relaxation times", "binds"
        lines = head("posterior", "kernel", "h", *titles) + lines
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
