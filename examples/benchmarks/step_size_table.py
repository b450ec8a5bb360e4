"""Check the automatic step size: worst variance ratio on seven posteriors, identity metric.

Prints a Markdown table and writes it to docs/tables/bias.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import posteriors as P

from numpyro_geom import SGRLD

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "bias.md"
TARGETS = (P.gaussian, P.logistic, lambda: P.logistic(raw=True), P.poisson, P.hierarchical)
TARGETS += (P.network, P.banana)


def main() -> None:
    """Run all targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    lines = [
        "| posterior | h | steps a draw | predicted | worst variance ratio (its Monte Carlo error) "
        "| relaxation times | binds |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        posterior = target()
        mean, sd = posterior.reference()
        kernel = SGRLD(posterior.model, batch_size=posterior.batch_size)
        runs = P.run_chains(
            kernel,
            posterior,
            num_chains=4 if small else 16,
            num_warmup=32 if small else 64,
            num_samples=20 if small else 50,
        )
        values, state = runs[0]
        _, _, ratio, ratio_mc = P.errors(values, mean, sd)
        learned, h = state.adaptation, np.asarray(state.step_size)
        predicted = np.median(1 + h * (learned.curvature + learned.noise) / 2)
        spanned = np.median(len(values) * np.asarray(state.num_steps) * h * learned.slowest)
        binds = "noise" if np.median(learned.noise) > np.median(learned.curvature) else "curvature"
        lines.append(
            f"| {posterior.name} | {np.median(h):.1e} | {np.median(state.num_steps):.0f} "
            f"| {predicted:.2f} | {ratio**2:.2f} ({2 * ratio * ratio_mc:.2f}) | {spanned:.0f} "
            f"| {binds} |"
        )
        print(lines[-1], flush=True)
    if not small:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
