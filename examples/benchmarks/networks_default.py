"""Networks by default: predictions of held-out rows over CPU seconds, for two regressions.

    python examples/benchmarks/networks_default.py --data-dir FOLDER

FOLDER has `uci_airfoil.npz` and `uci_concrete.npz` with the arrays X and y. The network has four
hidden layers of 16 units with relu, outputs a mean and a scale, and has a prior N(0, 1) on every
weight. A fifth of the rows is held out, and columns have mean 0 and sd 1. Four chains run as one
program, each method in a process of its own, and seconds are of everything:
imports, training, compilation, sampling. It writes docs/tables/networks_default.md.

With `--seconds 60` it compares metrics: `SGHMC` and `SGRLD` have 15 draws of warm-up, and then draw
until the process has taken so many seconds. It writes docs/tables/networks_metrics.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import TABLES, chains, head, in_process, versions

import numpyro_geom
from numpyro_geom import run_in_segments, train

SIZES = (16, 16, 16, 16, 2)
METHODS = {
    "four trained networks": 0,
    "`Microcanonical`, 20 + 20": 20,
    "`Microcanonical`, 100 + 100": 100,
    "`SGHMC`, 20 + 20": 20,
    "`SGHMC`, 100 + 100": 100,
}
METRICS = ("identity", "rmsprop", "wenzel", "monge", "shampoo")


def load(name: str, folder: Path) -> list[jax.Array]:
    """Rows to train on and rows to test on: X, y, X, y."""
    with np.load(folder / f"uci_{name}.npz") as file:
        data = np.column_stack([file["X"], file["y"]])
    order = np.random.default_rng(0).permutation(len(data))
    first, second = np.split(data[order], [int(0.8 * len(data))])
    mean, sd = first.mean(0), first.std(0) + 1e-9
    parts = [(x - mean) / sd for x in (first, second)]
    return [jnp.asarray(a, jnp.float32) for x in parts for a in (x[:, :-1], x[:, -1])]


def network(X: jax.Array, weights: list) -> tuple[jax.Array, jax.Array]:
    """Mean and scale of each row."""
    for w, b in weights[:-1]:
        X = jax.nn.relu(X @ w + b)
    out = X @ weights[-1][0] + weights[-1][1]
    return out[:, 0], 1e-4 + jax.nn.softplus(out[:, 1])


def model(X: jax.Array, y: jax.Array) -> None:
    """The network with its prior."""
    weights, inputs = [], X.shape[1]
    for k, outputs in enumerate(SIZES):
        w = numpyro.sample(f"w{k}", dist.Normal(0, 1).expand([inputs, outputs]).to_event(2))
        b = numpyro.sample(f"b{k}", dist.Normal(0, 1).expand([outputs]).to_event(1))
        weights.append((w, b))
        inputs = outputs
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(*network(X[i], weights)), obs=y[i])


def one(method: str, name: str, folder: Path) -> dict[str, float]:
    """Seconds, error and density of one method."""
    X, y, X_test, y_test = load(name, folder)
    count = METHODS[method]
    if count == 0:
        how = {"optimiser": optax.adam(3e-3), "num_epochs": 1000, "patience": 100, "num_starts": 4}
        found = train(model, jax.random.key(1), X, y, batch_size=64, **how)
        draws = {n: x[:, None] for n, x in found.position.items()}
    else:
        kernel = getattr(numpyro_geom, method.split("`")[1])(model)
        mcmc = chains(kernel, count, count)
        mcmc.run(jax.random.key(1), X, y)
        draws = mcmc.get_samples(group_by_chain=True)
    jax.block_until_ready(draws)
    return {"seconds": time.process_time(), **scores(draws, X_test, y_test)}


def at_equal_seconds(method: str, name: str, folder: Path, seconds: float) -> dict[str, float]:
    """Number of draws, error and density of a kernel with a metric."""
    X, y, X_test, y_test = load(name, folder)
    kernel, metric = method.split()
    mcmc = chains(getattr(numpyro_geom, kernel)(model, metric=metric), 15, 2000)
    left = {"draws_per_segment": 5, "max_seconds": seconds - time.process_time()}
    run = run_in_segments(mcmc, jax.random.key(1), X, y, **left)
    draws = run.mcmc.get_samples(group_by_chain=True)
    return {"draws": run.num_draws, **scores(draws, X_test, y_test)}


def scores(draws: dict[str, jax.Array], X_test: jax.Array, y_test: jax.Array) -> dict[str, float]:
    """Error and density of held-out rows, of all four chains and of the worst one."""

    def predict(z: dict) -> tuple[jax.Array, jax.Array]:
        return network(X_test, [(z[f"w{k}"], z[f"b{k}"]) for k in range(len(SIZES))])

    flat = {n: x.reshape((-1, *x.shape[2:])) for n, x in draws.items()}
    mean, scale = (np.asarray(x, float) for x in jax.jit(lambda z: jax.lax.map(predict, z))(flat))
    gap = (np.asarray(y_test) - mean) / scale
    log_p = -(gap**2) / 2 - np.log(scale) - np.log(2 * np.pi) / 2
    chains = log_p.reshape(4, -1, len(y_test))

    def density(log_p: np.ndarray) -> float:
        return -float(np.mean(np.logaddexp.reduce(log_p, 0) - np.log(len(log_p))))

    return {
        "error": float(np.sqrt(np.mean((mean.mean(0) - np.asarray(y_test)) ** 2))),
        "density": density(log_p),
        "worst": max(map(density, chains)),
    }


def main() -> None:
    """Run all, or one in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one and given.seconds:
        print(json.dumps(at_equal_seconds(*given.one, given.data_dir, given.seconds)))
        return
    if given.one:
        print(json.dumps(one(*given.one, given.data_dir)))
        return
    methods, first, table = list(METHODS), "seconds", "networks_default.md"
    titles = "data, method and draws", "CPU s"
    if given.seconds:
        methods = [f"{kernel} {metric}" for kernel in ("SGHMC", "SGRLD") for metric in METRICS]
        titles, first, table = ("data, kernel and metric", "draws"), "draws", "networks_metrics.md"
    lines = head(*titles, "error", "density", "worst chain")
    how = "--data-dir", given.data_dir, "--seconds", given.seconds, "--one"
    for name in ("airfoil", "concrete"):
        for method in methods:
            found = in_process(__file__, *how, method, name)
            cells = [f"{found[k]:.3f}" for k in ("error", "density", "worst") if k in found]
            cells = [f"{found[first]:.0f}", *cells] if cells else [found["failed"]]
            lines.append(f"| {name}, {method} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    (TABLES / table).write_text("\n".join([*lines, "", versions(), ""]))


if __name__ == "__main__":
    main()
