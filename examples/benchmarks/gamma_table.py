"""Measure every treatment of Gamma: metric x mode x posterior, at the automatic step and a tenth.

Prints a Markdown table and writes it to docs/tables/gamma.md; about an hour on two cores.
``--only NAME`` runs one posterior.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import posteriors as P

from numpyro_geom import SGRLD, Monge

METRICS = ("rmsprop", "wenzel", "monge", "shampoo")
OBJECTS = {"monge": Monge(alpha2=1.0, decay=0.9)}
"""Settings of the literature, if they are not the defaults."""
MODES = ("corrected", "published", "none", "frozen", "auxiliary")
TARGETS = {
    "banana": P.banana,
    "funnel": P.funnel,
    "logistic-std": P.logistic,
    "logistic-raw": lambda: P.logistic(raw=True),
    "hierarchical": P.hierarchical,
    "network": P.network,
}
TABLE = Path(__file__).parents[2] / "docs" / "tables" / "gamma.md"


def measure(posterior: P.Posterior, metric: str, mode: str, reference: tuple, small: bool) -> list:
    """Worst errors at the automatic step size and at a tenth of it."""
    it = OBJECTS.get(metric, metric)
    kernel = SGRLD(posterior.model, metric=it, gamma=mode, batch_size=posterior.batch_size)
    runs = P.run_chains(
        kernel,
        posterior,
        num_chains=4 if small else 8,
        num_warmup=64,
        num_samples=20 if small else 25,
        step_factors=(1.0, 0.1),
    )
    rows = []
    for values, state in runs:
        mean, mean_mc, ratio, ratio_mc = P.errors(values, *reference)
        rows.append(
            {
                "mean": mean,
                "mean_mc": mean_mc,
                "ratio": ratio,
                "ratio_mc": ratio_mc,
                "h": float(np.median(state.step_size)),
                "num_steps": int(np.median(state.num_steps)),
                "relaxations": float(
                    np.median(len(values) * state.num_steps * state.step_size * slowest(state))
                ),
                "undone": int(state.num_diverging),
            }
        )
    return rows


def slowest(state: object) -> np.ndarray:
    """lam_min of every chain."""
    return np.asarray(state.adaptation.slowest)


def write(results: dict) -> str:
    """The Markdown table."""
    names = list(results)
    lines = [
        "| metric | gamma | step | " + " | ".join(names) + " |",
        "|---" * (3 + len(names)) + "|",
    ]
    cases = [("identity", "frozen")] + [(m, g) for m in METRICS for g in MODES]
    for metric, mode in cases:
        for k, step in enumerate(("automatic", "a tenth")):
            cells = []
            for name in names:
                row = results[name].get(f"{metric}/{mode}")
                if row is None:
                    cells.append("")
                    continue
                r = row[k]
                short = "*" if r["relaxations"] < 5 else ""
                if r["mean"] > 10:
                    cells.append("lost")
                    continue
                cells.append(f"{r['mean']:.2f} ({r['mean_mc']:.2f}), {r['ratio']:.2f}{short}")
            label = "any" if metric == "identity" else mode
            lines.append(f"| {metric} | {label} | {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TARGETS, action="append")
    parser.add_argument("--small", action="store_true", help="a quick look, no table written")
    parser.add_argument("--cache", type=Path, help="JSON file to resume from and to write to")
    options = parser.parse_args()
    results: dict = {}
    if options.cache and options.cache.exists():
        results = json.loads(options.cache.read_text())
    for name in options.only or TARGETS:
        posterior = TARGETS[name]()
        reference = posterior.reference()
        column = results.setdefault(name, {})
        for metric, mode in [("identity", "frozen")] + [(m, g) for m in METRICS for g in MODES]:
            if f"{metric}/{mode}" in column:
                continue
            start = time.perf_counter()
            column[f"{metric}/{mode}"] = rows = measure(
                posterior, metric, mode, reference, options.small
            )
            print(
                f"{name:14s} {metric:9s} {mode:10s}",
                "  ".join(
                    f"h {r['h']:.1e} x{r['num_steps']}: mean {r['mean']:.2f} ({r['mean_mc']:.2f}) "
                    f"sd x{r['ratio']:.2f} ({r['ratio_mc']:.2f}) undone {r['undone']}"
                    for r in rows
                ),
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
            if options.cache:
                options.cache.write_text(json.dumps(results))
    table = write(results)
    print(table)
    if not options.small and set(results) >= set(options.only or TARGETS):
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(table)


if __name__ == "__main__":
    main()
