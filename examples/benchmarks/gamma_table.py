"""Measure every treatment of Gamma: metric x mode x posterior, at the automatic step and a tenth.

Prints a Markdown table and writes it to docs/tables/gamma.md; about an hour on two cores.
``--only NAME`` runs one posterior. ``--momentum`` measures `SGHMC` instead, at several step sizes
on one banana, and writes docs/tables/gamma_momentum.md; about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import posteriors as P
from jax import random

from numpyro_geom import SGHMC, SGRLD, Monge

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
MASS_MODES = ("frozen", "corrected", "auxiliary")
STEPS = np.array([0.1, 0.05, 0.02, 0.01])
"""Step sizes that are given to `SGHMC`, each to a group of chains of one program."""
GROUP_STEPS = 1 << 24
"""Steps of the schedule for each group."""


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


def banana() -> P.Posterior:
    """x1 ~ N(0, 1), x2 given x1 ~ N(x1^2 / 2, 1/4): variances 1 and 3/4."""

    def model() -> None:
        x1 = numpyro.sample("x1", dist.Normal(0, 1))
        numpyro.sample("x2", dist.Normal(x1**2 / 2, 0.5))

    moments = np.array([0.0, 0.5]), np.sqrt([1.0, 0.75])
    return P.Posterior("banana", model, (), None, P.columns("x1", "x2"), moments)


def momentum_cells(metric: str, mode: str, given: bool, small: bool) -> list[str]:
    """Both variances with their Monte Carlo errors, and the share of steps that were undone.

    Args:
        metric: name of a metric.
        mode: ``gamma``.
        given: whether to give the step sizes `STEPS`; otherwise it is automatic.
        small: a quick look.
    """
    posterior, groups = banana(), len(STEPS) if given else 1
    # chains of a group, and draws of warm-up, which are half of the others
    num_chains, length = (20, 10) if small else (100, 50) if given else (200, 100)
    table = jnp.asarray(STEPS, jnp.float32)
    fixed: dict = {}
    if given:
        fixed = {"friction": 1.0, "num_steps": 200, "step_size": lambda t: table[t // GROUP_STEPS]}
    kernel = SGHMC(posterior.model, metric=metric, gamma=mode, **fixed)
    keys = random.split(random.key(0), groups * num_chains)
    state = kernel.init(keys, length, None, (), {})
    if given:
        start = np.repeat(np.arange(groups) * GROUP_STEPS, num_chains)
        state = state._replace(steps_taken=jnp.asarray(start, jnp.int32))

    @jax.jit
    def advance(state: Any) -> Any:
        def body(state: Any, _: None) -> Any:
            state = kernel.sample(state, (), {})
            return state, (state.z, state.num_diverging)

        return jax.lax.scan(body, state, None, length)

    state, _ = advance(state)
    parts = []
    for _ in range(2):
        state, part = advance(state)
        parts.append(part)
    z, undone = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    values = np.stack([z["x1"], z["x2"]], -1).astype(np.float64)
    squares = ((values - posterior.reference()[0]) ** 2).mean(0).reshape(groups, num_chains, 2)
    shares = (undone / np.asarray(state.num_steps)).mean(0).reshape(groups, num_chains).mean(1)
    cells = []
    for square, share in zip(squares, shares, strict=True):
        errors = square.std(0) / num_chains**0.5
        pairs = zip(square.mean(0), errors, strict=True)
        text = ", ".join(f"{m:.2g} ({e:.1g})" for m, e in pairs)
        cells.append(text + (f"; {share:.1%} undone" if share >= 0.0005 else ""))
    print(metric, mode, np.median(state.step_size), cells, flush=True)
    return cells


def momentum_table(small: bool) -> str:
    """The Markdown table of `SGHMC`."""
    lines = [
        "Variances of a banana that has 1 and 0.75, with Monte Carlo errors. `SGHMC`. Where the "
        "step size is given: 100 chains of 50 + 100 draws of 200 steps, friction 1. Automatic: "
        f"200 chains of 100 + 200 draws. Metrics with their defaults; jax {jax.__version__}.",
        "",
        "| metric | gamma | " + " | ".join(f"h = {h}" for h in STEPS) + " | automatic |",
        "|---" * (3 + len(STEPS)) + "|",
    ]
    for metric, mode in [("identity", "frozen")] + [(m, g) for m in METRICS for g in MASS_MODES]:
        cells = [c for given in (True, False) for c in momentum_cells(metric, mode, given, small)]
        label = "any" if metric == "identity" else mode
        lines.append(f"| {metric} | {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TARGETS, action="append")
    parser.add_argument("--small", action="store_true", help="a quick look, no table written")
    parser.add_argument("--cache", type=Path, help="JSON file to resume from and to write to")
    parser.add_argument("--momentum", action="store_true", help="measure SGHMC")
    options = parser.parse_args()
    if options.momentum:
        text = momentum_table(options.small)
        print(text)
        if not options.small:
            TABLE.with_name("gamma_momentum.md").write_text(text)
        return
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
