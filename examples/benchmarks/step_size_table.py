"""Check the automatic step size: worst variance ratio on seven posteriors, default settings.

Prints a Markdown table and writes it to docs/tables/bias.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import posteriors as P

from numpyro_geom import SGHMC, SGRLD

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "bias.md"
TARGETS = (P.gaussian, P.logistic, lambda: P.logistic(raw=True), P.poisson, P.hierarchical)
TARGETS += (P.network, P.banana)


def row(posterior: P.Posterior, kernel: Any, values: Any, state: Any, mean: Any, sd: Any) -> str:
    """One line of the table."""
    _, _, ratio, ratio_mc = P.errors(values, mean, sd)
    learned, h = state.adaptation, np.asarray(state.step_size)
    parts = kernel.facts.bias(learned.curvature, learned.noise, h, state.dynamics)
    rate = np.asarray(kernel.facts.rate(learned.slowest, state.dynamics))
    spanned = np.median(len(values) * np.asarray(state.num_steps) * h * rate)
    binds = "noise" if np.median(learned.noise) > np.median(learned.curvature) else "curvature"
    return (
        f"| {posterior.name} | {type(kernel).__name__} | {np.median(h):.1e} "
        f"| {np.median(state.num_steps):.0f} | {np.median(1 + parts[0] + parts[1]):.2f} "
        f"| {ratio**2:.2f} ({2 * ratio * ratio_mc:.2f}) | {spanned:.0f} | {binds} |"
    )


def main() -> None:
    """Run all targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    lines = [
        "| posterior | kernel | h | steps per draw | predicted | worst variance ratio (its Monte "
        "Carlo error) | relaxation times | binds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        posterior = target()
        mean, sd = posterior.reference(40_000)
        for make in (SGRLD, SGHMC):
            rows = {} if posterior.batch_size is None else {"batch_size": posterior.batch_size}
            kernel = make(posterior.model, **rows)
            runs = P.run_chains(
                kernel,
                posterior,
                num_chains=4 if small else 16,
                num_warmup=32 if small else 500,
                num_samples=20 if small else 1000,
            )
            lines.append(row(posterior, kernel, *runs[0], mean, sd))
            print(lines[-1], flush=True)
    if not small:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
