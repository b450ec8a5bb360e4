"""Check the automatic step size.

Prints a Markdown table of the worst variance ratio on seven posteriors, in default settings, and
writes it to docs/tables/bias.md. Lines of that table that are not measured stay as they are.

    python examples/benchmarks/step_size_table.py [--targets banana logistic] [--kernels SGRLD]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import posteriors as P
from common import TABLES, head

from numpyro_geom import SGHMC, SGRLD, Monge

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


def main() -> None:
    """Run all targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=[*KERNELS])
    options = parser.parse_args()
    old = TABLE.read_text().splitlines()[2:] if TABLE.exists() else []
    known = {tuple(x.split(" | ")[:2]): x for x in old}
    for target in options.targets:
        posterior = TARGETS[target]()
        mean, sd = posterior.reference(40_000)
        for label in options.kernels:
            rows = {} if posterior.batch_size is None else {"batch_size": posterior.batch_size}
            kernel = KERNELS[label](posterior.model, **rows)
            lengths = {"num_chains": 16, "num_warmup": 500, "num_samples": 1000}
            values, state, _ = P.run_chains(kernel, posterior, **lengths)
            title = f"| {posterior.name}", label
            known[title] = row(" | ".join(title), kernel, values, state, mean, sd)
            print(known[title], flush=True)
    names = list(dict.fromkeys(name for name, _ in known))
    lines = [known[n, k] for n in names for k in KERNELS if (n, k) in known]
    worst = "worst variance ratio (its Monte Carlo error)"
    titles = "steps per draw", "predicted", worst, "relaxation times", "binds"
    lines = head("posterior", "kernel", "h", *titles) + lines
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
