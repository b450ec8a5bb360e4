"""Metrics on a network by default: predictions of held-out rows after equal CPU seconds.

    python examples/benchmarks/networks_metrics.py --data-dir FOLDER [--seconds 50]

Data, network and scores are those of `networks_default.py`. Each pair of a kernel and a metric has
four chains, 30 draws of warm-up, and then draws until the process has taken so many seconds,
imports, training and compilation included. It writes docs/tables/networks_metrics.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
from common import TABLES, in_process, versions
from networks_default import load, model, scores
from numpyro.infer import MCMC

import numpyro_geom
from numpyro_geom import run_in_segments

KERNELS = ("SGHMC", "SGRLD")
METRICS = ("identity", "rmsprop", "wenzel", "monge", "shampoo")
WARMUP, SEGMENT = 30, 5


def one(kernel: str, metric: str, name: str, folder: Path, seconds: float) -> dict[str, float]:
    """Draws, seconds and scores of a kernel with a metric."""
    X, y, X_test, y_test = load(name, folder)
    mcmc = MCMC(
        getattr(numpyro_geom, kernel)(model, metric=metric),
        num_warmup=WARMUP,
        num_samples=2000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    left = seconds - time.process_time()
    how = {"draws_per_segment": SEGMENT, "max_seconds": left}
    run = run_in_segments(mcmc, jax.random.key(1), X, y, **how)
    spent = time.process_time()
    draws = run.mcmc.get_samples(group_by_chain=True)
    return {"draws": run.num_draws, "seconds": spent, **scores(draws, X_test, y_test)}


def main() -> None:
    """Run all, or one in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--data", default="airfoil")
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(*given.one, given.data, given.data_dir, given.seconds)))
        return
    lines = [
        "| data | kernel | metric | draws | CPU s | error | density | worst chain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    how = ("--data-dir", given.data_dir, "--data", given.data, "--seconds", given.seconds)
    for kernel in KERNELS:
        for metric in METRICS:
            found = in_process(__file__, *how, "--one", kernel, metric)
            if "failed" in found:
                cells = found["failed"], *[""] * 4
            else:
                figures = (found[k] for k in ("error", "density", "worst"))
                cells = found["draws"], f"{found['seconds']:.0f}", *(f"{x:.3f}" for x in figures)
            row = given.data, f"`{kernel}`", f"`{metric}`", *map(str, cells)
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
    (TABLES / "networks_metrics.md").write_text("\n".join([*lines, "", versions(), ""]))


if __name__ == "__main__":
    main()
