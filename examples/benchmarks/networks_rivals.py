"""Networks by default and rivals: predictions of held-out rows over CPU seconds.

    python examples/benchmarks/networks_rivals.py rivals --data-dir FOLDER --bde PYTHON

FOLDER has `uci_airfoil.npz`, `uci_concrete.npz` and `uci_bike.npz` with the arrays X and y, and
PYTHON is an interpreter with `sklearn-contrib-bde`. The network has four hidden layers of 16 units
with relu, outputs a mean and a scale, and has a prior N(0, 1) on every weight. A fifth of the rows
is held out, and columns have mean 0 and sd 1. Four chains run as one program, each method in a
process of its own, and seconds are of everything: imports, training, compilation, sampling.

Each word makes a table of its own, docs/tables/networks_WORD.md. Rows that it has already are kept.

    rivals      methods on three data sets
    seeds       ten keys of `Microcanonical` by default, and its chains in a mode without mass
    published   networks with one noise scale, at the settings of a paper (needs uci_energy.npz)
    metrics     `SGHMC` and `SGRLD` with each metric for equal seconds, 15 draws of warm-up

In `metrics` a network 784-400-400-10 of MNIST comes last, for which FOLDER needs `mnist_784.npz`.
All methods start from the same four trained networks, and seconds are those after training. The
trained networks stay in the temporary folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import TABLES, chains, head, in_process, kept_cells, versions

import numpyro_geom
from numpyro_geom import SGHMC, Microcanonical, cyclical, run_in_segments, train

METRICS = ("identity", "rmsprop", "wenzel", "monge", "shampoo")
SECONDS = {"airfoil": 60, "concrete": 60, "bike": 180, "mnist": 300}
"""Seconds of a run with a metric."""
MOST_JUDGED = 40
"""Draws per chain that predict MNIST's test rows, evenly spaced."""
MODE_WITHOUT_MASS = 0.5
"""Nats per row by which a chain's density is worse than that of the run's middle chain."""
PUBLISHED = {"airfoil": -0.28, "bike": -0.132, "energy": -2.018}


class Rows(NamedTuple):
    """Rows to train on and to test on, and a model of them."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array
    model: Callable


def load(name: str, folder: Path, sizes: tuple = (16, 16, 16, 16, 2)) -> Rows:
    """A regression in units of its columns' sds, or MNIST."""
    if name == "mnist":
        with np.load(folder / "mnist_784.npz") as file:
            X, y = jnp.asarray(file["X"], jnp.float32) / 255, jnp.asarray(file["y"], jnp.int32)
            n = int(file["n_train"])
        return Rows(X[:n], y[:n], X[n:], y[n:], partial(model, sizes=(400, 400, 10)))
    with np.load(folder / f"uci_{name}.npz") as file:
        data = np.column_stack([file["X"], file["y"]])
    order = np.random.default_rng(0).permutation(len(data))
    first, second = np.split(data[order], [int(0.8 * len(data))])
    mean, sd = first.mean(0), first.std(0) + 1e-9
    parts = [(x - mean) / sd for x in (first, second)]
    arrays = (jnp.asarray(a, jnp.float32) for x in parts for a in (x[:, :-1], x[:, -1]))
    return Rows(*arrays, partial(model, sizes=sizes))


def likelihood(X: jax.Array, z: dict[str, jax.Array]) -> dist.Distribution:
    """What the network says of rows."""
    last = sum(name.startswith("w") for name in z) - 1
    for k in range(last + 1):
        X = X @ z[f"w{k}"] + z[f"b{k}"]
        X = jax.nn.relu(X) if k < last else X
    if X.shape[1] > 2:
        return dist.CategoricalLogits(X)
    scale = jnp.exp(z["log_scale"]) if "log_scale" in z else 1e-4 + jax.nn.softplus(X[:, 1])
    return dist.Normal(X[:, 0], scale)


def model(X: jax.Array, y: jax.Array, sizes: tuple[int, ...]) -> None:
    """The network with its prior."""
    z, inputs = {}, X.shape[1]
    for k, outputs in enumerate(sizes):
        sd = (2 / inputs) ** 0.5 if sizes[-1] > 2 else 1.0
        law = dist.Normal(0, sd).expand([inputs, outputs])
        z[f"w{k}"] = numpyro.sample(f"w{k}", law.to_event(2))
        z[f"b{k}"] = numpyro.sample(f"b{k}", dist.Normal(0, 1).expand([outputs]).to_event(1))
        inputs = outputs
    if inputs == 1:
        z["log_scale"] = numpyro.sample("log_scale", dist.Normal(0, 1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", likelihood(X[i], z), obs=y[i])


def scores(rows: Rows, log_p: Any, mean: Any) -> dict[str, float]:
    """Error (of classes its rate) and density of held-out rows, and the chains that are worse."""
    log_p, mean = np.asarray(log_p, float), np.asarray(mean, float)

    def density(log_p: np.ndarray) -> float:
        return -float(np.mean(np.logaddexp.reduce(log_p, 0) - np.log(len(log_p))))

    each = sorted(map(density, log_p.reshape(4, -1, log_p.shape[-1])))
    mean, y = mean.mean(0), np.asarray(rows.y_test)
    if mean.ndim > 1:
        error = float(np.mean(mean.argmax(1) != y))
    else:
        error = float(np.sqrt(np.mean((mean - y) ** 2)))
    lost = sum(bool(x > np.median(each) + MODE_WITHOUT_MASS) for x in each)
    return {"error": error, "density": density(log_p), "worst": each[-1], "lost": lost}


def of_draws(rows: Rows, draws: dict[str, jax.Array]) -> dict[str, float]:
    """The same from draws of weights with leading axes of chains and draws."""

    def predict(z: dict) -> tuple[jax.Array, jax.Array]:
        found = likelihood(rows.X_test, z)
        mean = found.mean if isinstance(found, dist.Normal) else found.probs
        return found.log_prob(rows.y_test), mean

    flat = {n: x.reshape((-1, *x.shape[2:])) for n, x in draws.items()}
    return scores(rows, *jax.jit(lambda z: jax.lax.map(predict, z))(flat))


def trained(rows: Rows, num_epochs: int = 1000) -> dict[str, jax.Array]:
    """Four networks trained by Adam, with early stopping on a tenth of the rows."""
    how = {"optimiser": optax.adam(3e-3), "num_epochs": num_epochs, "num_starts": 4}
    how |= {"batch_size": 64, "patience": max(10, num_epochs // 10)}
    return train(rows.model, jax.random.key(1), rows.X, rows.y, **how).position


def ensemble(rows: Rows) -> dict[str, float]:
    """Four trained networks."""
    draws = jax.block_until_ready({n: x[:, None] for n, x in trained(rows).items()})
    return {"seconds": time.process_time(), **of_draws(rows, draws)}


def sampled(kernel: Any, count: int, rows: Rows, start: Any = None, seed: int = 1) -> dict:
    """As many draws as of warm-up, of four chains."""
    mcmc = chains(kernel, count, count)
    mcmc.run(jax.random.key(seed), rows.X, rows.y, init_params=start)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    return {"seconds": time.process_time(), **of_draws(rows, draws)}


def by_default(kernel: str, count: int, rows: Rows) -> dict[str, float]:
    """A kernel with no argument but the model."""
    return sampled(getattr(numpyro_geom, kernel)(rows.model), count, rows)


def in_cycles(count: int, rows: Rows) -> dict[str, float]:
    """SGHMC from trained networks, with a draw at the end of each cycle of 500 step sizes."""
    steps = cyclical(0.05 / len(rows.y) ** 0.5, 500, explore=0.5)  # by hand
    kernel = SGHMC(rows.model, friction=100, step_size=steps, num_steps=500)
    return sampled(kernel, count, rows, trained(rows))


def of_keys(count: int, keys: int, rows: Rows) -> dict[str, float]:
    """`Microcanonical` by default with several keys."""
    kernel, runs = Microcanonical(rows.model), []
    for key in range(keys):
        runs.append(sampled(kernel, count, rows, seed=key))
        print(key, runs[-1], flush=True)
    density = [x["density"] for x in runs]
    middle = {"keys": keys, "middle": float(np.median(density)), "density": max(density)}
    return {**middle, "worst": max(x["worst"] for x in runs), "lost": sum(x["lost"] for x in runs)}


def of_bde(python: Path, warmup: int, steps: int, rows: Rows) -> dict[str, float]:
    """The rival with four members, every tenth of its draws, and else as its authors call it."""
    with tempfile.TemporaryDirectory() as folder:
        file, arrays = Path(folder) / "rows.npz", ("X", "y", "X_test")
        np.savez(file, **{n: np.asarray(getattr(rows, n)) for n in arrays})
        script = Path(__file__).with_name("networks_bde.py")
        found = in_process(script, file, 1, warmup, steps, python=python)
        if "failed" in found:
            return found
        with np.load(file) as said:
            law = dist.Normal(said["mean"], said["scale"])
    log_p, mean = (x.reshape(-1, len(rows.y_test)) for x in (law.log_prob(rows.y_test), law.mean))
    return {**found, **scores(rows, log_p, mean)}


def at_equal_seconds(kernel: str, metric: str, seconds: int, rows: Rows) -> dict[str, float]:
    """As many draws as a kernel takes in some seconds."""
    mcmc = chains(getattr(numpyro_geom, kernel)(rows.model, metric=metric), 15, 2000)
    how = {"draws_per_segment": 1, "max_seconds": seconds - time.process_time()}
    on_mnist = rows.X.shape[1] == 784
    if on_mnist:
        file = Path(tempfile.gettempdir()) / "networks_rivals_mnist.npz"
        if not file.exists():
            np.savez(file, **trained(rows, num_epochs=42))
        with np.load(file) as saved:
            how |= {"init_params": dict(saved), "max_seconds": seconds}
    run = run_in_segments(mcmc, jax.random.key(1), rows.X, rows.y, **how)
    if not run.num_draws:
        return {"failed": f"no draw in {seconds} s"}
    draws = run.mcmc.get_samples(group_by_chain=True)
    every = -(-run.num_draws // MOST_JUDGED) if on_mnist else 1
    return {"draws": run.num_draws, **of_draws(rows, {n: x[:, ::every] for n, x in draws.items()})}


def jobs(word: str, given: argparse.Namespace) -> dict[str, Callable]:
    """The rows of a table, and how each is measured."""

    def on(name: str, measure: Callable, *settings: Any, **options: Any) -> Callable:
        return lambda: measure(*settings, load(name, given.data_dir, **options))

    rows = {}
    for name in ("airfoil", "concrete", "bike"):
        if word == "rivals":
            default, small = partial(on, name, by_default), name != "bike"
            rows[f"{name}, `bde`"] = on(name, of_bde, given.bde, 5_000, 2_000)
            if small:
                long = on(name, of_bde, given.bde, 50_000, 10_000)
                rows[f"{name}, `bde`, ten times the steps"] = long
            rows[f"{name}, four trained networks"] = on(name, ensemble)
            for n in (5, 20, 100) if small else (2, 5):
                rows[f"{name}, `Microcanonical`, {n} + {n}"] = default("Microcanonical", n)
            if small:
                rows[f"{name}, `SGHMC`, 20 + 20"] = default("SGHMC", 20)
                rows[f"{name}, `SGHMC`, 20 + 20 cycles"] = on(name, in_cycles, 20)
        if word == "seeds":
            rows[name] = on(name, of_keys, 5 if name == "bike" else 20, 10)
    for name, seconds in SECONDS.items() if word == "metrics" else ():
        for kernel, metric in itertools.product(("SGHMC", "SGRLD"), METRICS):
            label = f"{name}, {kernel} {metric}"
            rows[label] = on(name, at_equal_seconds, kernel, metric, seconds)
    if word == "published":
        for name, paper in PUBLISHED.items():
            for n in (20, 300) if name == "energy" else (20,):
                run = on(name, by_default, "Microcanonical", n, sizes=(16, 16, 16, 1))
                rows[f"{name}, {n} + {n} (paper: {paper})"] = run
    return rows


COLUMNS = {
    "rivals": {"seconds": "CPU s", "density": "density", "error": "error", "worst": "worst chain"},
    "seeds": {
        **{"keys": "keys", "middle": "middle run", "density": "worst run"},
        **{"worst": "worst chain", "lost": "lost chains"},
    },
    "published": {"seconds": "CPU s", "error": "error", "density": "density"},
    "metrics": {"draws": "draws", "error": "error", "density": "density", "worst": "worst chain"},
}


def main() -> None:
    """Make a table, or one of its rows in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("word", choices=COLUMNS)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--bde", type=Path)
    parser.add_argument("--row")
    given = parser.parse_args()
    rows, columns = jobs(given.word, given), COLUMNS[given.word]
    if given.row:
        print(json.dumps(rows[given.row]()))
        return
    path = TABLES / f"networks_{given.word}.md"
    kept, lines = kept_cells(path), head("data", *columns.values())
    for label in rows:
        cells = [kept.get((label, title)) for title in columns.values()]
        if None in cells:
            how = "--data-dir", given.data_dir, "--bde", given.bde, "--row", label
            found = in_process(__file__, given.word, *how)
            whole = "seconds", "draws", "keys", "lost"
            cells = [f"{found[k]:.{0 if k in whole else 3}f}" for k in columns if k in found]
            cells = cells or [found["failed"], *[""] * (len(columns) - 1)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        path.write_text("\n".join([*lines, "", versions(), ""]))


if __name__ == "__main__":
    main()
