"""Laplace approximations of a network on digits: predictions from straight and geodesic draws.

The network is 64-128-16-10 (tanh, 10,554 parameters with N(0, s) priors; `--hidden 1024 32` has
99,690). The data are scikit-learn's digits with standardised pixels, in the fixed split of
`digits_network.py`: ``--rows`` training rows and all 359 test rows. All methods start from the same
position, where Adam on all training rows ends. They use the same Gaussian velocities v ~ N(0,
P^-1), where P is the generalised Gauss-Newton matrix (``precision="fisher"``). So the methods
differ only in the path from the mode to the draw:

    MAP                     the mode itself
    last layer              theta = theta^ + v in the last layer's weights, the others at the mode
    euclidean               theta = theta^ + v
    euclidean, linearised   the same draws, logits linear in theta around the mode
    monge                   geodesics of I + g g'
    fisher                  geodesics of the Fisher metric, solves by conjugate gradients

Predictions are averaged probabilities. The measures are accuracy, negative log-likelihood in nats
per row, and the expected calibration error with 15 equal bins. A geodesic that is not followed to
its end counts as failed. Its draw is kept at the place where the solver stopped. Times are CPU
seconds without compilation.

    python examples/laplace_digits.py --rows 1437 --max-steps 400 --write
    python examples/laplace_digits.py --rows 1437 --max-steps 400 --hidden 1024 32 --draws 2 --write
    python examples/laplace_digits.py --quick

``--write`` writes a table in docs/tables, named by the number of parameters. ``--results FILE``
stores finished methods in a file and reuses them.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from digits_network import _nll, averaged, calibration_error, load_digits
from jax import lax, random
from numpyro import handlers
from numpyro.infer.util import potential_energy

from numpyro_geom import RiemannianLaplace
from numpyro_geom.diagnostics import SamplingWarning

TABLES = Path(__file__).parents[1] / "docs" / "tables"
CLASSES = 10
MAP = "MAP"
LAST = "last layer"
LAST_SITES = ("w3", "b3")
LINEARISED = "euclidean, linearised"
METHODS = {
    MAP: "",
    LAST: LAST,
    "euclidean": "euclidean",
    LINEARISED: "euclidean",
    "monge": "monge",
    "fisher": "fisher",
}
"""Method -> metric, or LAST for a straight draw of the last layer alone."""


class Effort(NamedTuple):
    """Sizes of the experiment.

    Attributes:
        hidden: units of the two layers.
        rows: number of training rows.
        draws: draws of each method.
        adam_steps: steps to the mode, on all rows.
        prior_sd: s.
        rtol: tolerance of the geodesics; that of conjugate gradients is a hundredth of it.
        max_steps: largest number of steps of a geodesic.
        solver: of the straight draws and of Monge's metric; the Fisher metric's is ``"cg"``.
    """

    hidden: tuple[int, int] = (128, 16)
    rows: int = 300
    draws: int = 10
    adam_steps: int = 600
    prior_sd: float = 0.3
    rtol: float = 1e-3
    max_steps: int = 60
    solver: str = "cg"


OPTIONS = ("hidden", "rows", "draws", "prior_sd", "rtol", "max_steps")
QUICK = Effort(hidden=(4, 3), rows=40, draws=2, adam_steps=50, prior_sd=0.5, solver="cholesky")


class Data(NamedTuple):
    """Standardised pixels, shape (rows, 64), and classes, of the training and the test part."""

    X: np.ndarray
    y: np.ndarray
    test_X: np.ndarray
    test_y: np.ndarray


def make_data(num_rows: int) -> Data:
    """The first training rows and all test rows, standardised by the training rows."""
    digits = load_digits()
    X, y = digits.X[:num_rows].reshape(-1, 64), digits.y[:num_rows]
    mean, sd = X.mean(axis=0), X.std(axis=0)
    sd = np.where(sd > 0, sd, 1)  # pixels that are always blank

    def scaled(X: np.ndarray) -> np.ndarray:
        # a pixel that is almost always blank would be tens of sd away when it is not
        return np.clip((X - mean) / sd, -5, 5).astype(np.float32)

    return Data(scaled(X), y, scaled(digits.test_X.reshape(-1, 64)), digits.test_y)


# --- model and mode


def shapes(hidden: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Site name -> shape."""
    sizes = (64, *hidden, CLASSES)
    found: dict[str, tuple[int, ...]] = {}
    for k, (rows, columns) in enumerate(zip(sizes, sizes[1:], strict=False), 1):
        found |= {f"w{k}": (rows, columns), f"b{k}": (columns,)}
    return found


def logits(w: Mapping[str, jax.Array], X: jax.Array) -> jax.Array:
    """Logits of the classes, shape (rows, 10)."""
    features = jnp.tanh(jnp.tanh(X @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"])
    return features @ w["w3"] + w["b3"]


def network(X: Any, y: Any, hidden: tuple[int, int], prior_sd: float) -> None:
    """The model."""
    w = {
        name: numpyro.sample(name, dist.Normal(0, prior_sd).expand(shape).to_event(len(shape)))
        for name, shape in shapes(hidden).items()
    }
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Categorical(logits=logits(w, X[i])), obs=y[i])


def near_a_mode(data: Data, effort: Effort) -> tuple[dict[str, jax.Array], float]:
    """The position where Adam ends, and the norm of the gradient of the energy there, in nats."""
    model = partial(network, hidden=effort.hidden, prior_sd=effort.prior_sd)
    names = shapes(effort.hidden)
    keys = random.split(random.key(1), len(names))
    start = {
        name: random.normal(key, shape) / (shape[0] ** 0.5 if len(shape) == 2 else 10)
        for key, (name, shape) in zip(keys, names.items(), strict=True)
    }
    adam = optax.adam(optax.cosine_decay_schedule(0.01, effort.adam_steps))

    @jax.jit
    def search(position: dict, X: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
        slope = jax.grad(lambda w: potential_energy(model, (X, y), {}, w))

        def step(_: jax.Array, carry: tuple) -> tuple:
            position, state = carry
            update, state = adam.update(slope(position), state)
            return optax.apply_updates(position, update), state

        end, _ = lax.fori_loop(0, effort.adam_steps, step, (position, adam.init(position)))
        return end, jnp.sqrt(sum(jnp.sum(g**2) for g in slope(end).values()))

    mode, norm = search(start, jnp.asarray(data.X), jnp.asarray(data.y))
    return mode, float(norm)


# --- methods


class Result(NamedTuple):
    """One line of the table; NaN for missing figures.

    Attributes:
        method: name of the method.
        draws: number of draws.
        accuracy: share of test rows with a right prediction.
        nll: negative log-likelihood of averaged probabilities, in nats per row.
        ece: expected calibration error.
        seconds: CPU seconds per draw.
        evaluations: evaluations of the acceleration, mean over draws.
        failed: number of draws that were not followed to their end.
    """

    method: str
    draws: int
    accuracy: float
    nll: float
    ece: float
    seconds: float = np.nan
    evaluations: float = np.nan
    failed: int = 0


def measure(of_draws: jax.Array, y: np.ndarray) -> tuple[float, float, float]:
    """Accuracy, NLL and ECE of logits of shape (draws, rows, classes)."""
    log_p = averaged(np.asarray(of_draws, np.float64))
    accuracy = float(np.mean(log_p.argmax(axis=-1) == y))
    return accuracy, float(_nll(log_p, y)), calibration_error(np.exp(log_p), y)


def linearised(mode: dict, draws: dict, X: jax.Array) -> jax.Array:
    """Logits that are linear in theta around the mode, shape (draws, rows, classes)."""

    def one(w: dict) -> jax.Array:
        move = jax.tree.map(jnp.subtract, w, mode)
        value, change = jax.jvp(lambda w: logits(w, X), (mode,), (move,))
        return value + change

    return lax.map(one, draws)


class Drawn(NamedTuple):
    """Draws by site, whether each succeeded, and CPU seconds per draw."""

    draws: dict[str, jax.Array]
    success: jax.Array
    evaluations: jax.Array
    seconds: float


def draw(metric: str, mode: dict, data: Data, effort: Effort) -> Drawn:
    """Draws with a metric; equal velocities for all of them."""
    X, y = jnp.asarray(data.X), jnp.asarray(data.y)
    model = partial(network, hidden=effort.hidden, prior_sd=effort.prior_sd)
    fixed: dict[str, jax.Array] = {}
    if metric == LAST:
        metric, fixed = "euclidean", {k: x for k, x in mode.items() if k not in LAST_SITES}
        model = handlers.condition(model, data=fixed)
    guide = RiemannianLaplace(
        model,
        metric,
        mode="euclidean",
        solver="cg" if metric == "fisher" else effort.solver,
        precision="fisher",
        rtol=effort.rtol,
        max_steps=effort.max_steps,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the search for a mode has not", SamplingWarning)
        start = {name: x for name, x in mode.items() if name not in fixed}
        params = guide.fit(random.key(0), X, y, init_params=start, max_steps=0)

    def some(key: jax.Array, params: dict, X: jax.Array, y: jax.Array) -> tuple:
        # one by one: products of several networks at once are many times slower on a CPU
        draws = guide.draw(key, params, X, y, sample_shape=(effort.draws,), chunk_size=1)
        return draws.samples, draws.success, draws.num_evaluations

    begin = time.perf_counter()
    program = jax.jit(some).lower(random.key(2), params, X, y).compile()
    print(f"{metric}: compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    begin = time.process_time()  # CPU time does not depend on other work on the machine
    draws, *fate = jax.block_until_ready(program(random.key(2), params, X, y))
    seconds = (time.process_time() - begin) / effort.draws
    repeated = {k: jnp.broadcast_to(x, (effort.draws, *x.shape)) for k, x in fixed.items()}
    return Drawn(draws | repeated, *fate, seconds)


def run(method: str, mode: dict, data: Data, effort: Effort, known: dict[str, Drawn]) -> Result:
    """Draw, unless draws with this metric are known, and predict."""
    test_X = jnp.asarray(data.test_X)
    if method == MAP:
        return Result(method, 1, *measure(logits(mode, test_X)[None], data.test_y))
    metric = METHODS[method]
    if metric not in known:
        known[metric] = draw(metric, mode, data, effort)
    drawn = known[metric]
    if method == LINEARISED:
        found = linearised(mode, drawn.draws, test_X)
    else:
        found = lax.map(lambda w: logits(w, test_X), drawn.draws)
    return Result(
        method,
        effort.draws,
        *measure(found, data.test_y),
        drawn.seconds,
        float(np.mean(drawn.evaluations)),
        int(np.sum(~np.asarray(drawn.success))),
    )


# --- table


def table(results: Sequence[Result]) -> str:
    """Markdown rows."""
    lines = [
        "| method | draws | accuracy, % | NLL | ECE | CPU s per draw | evaluations | failed |",
        "|---" * 8 + "|",
    ]
    for r in results:
        drawn = r.method != MAP
        row = (
            r.method,
            str(r.draws) if drawn else "-",
            f"{100 * r.accuracy:.2f}",
            f"{r.nll:.4f}",
            f"{r.ece:.4f}",
            f"{r.seconds:.3g}" if drawn else "-",
            f"{r.evaluations:.0f}" if drawn else "-",
            str(r.failed) if drawn else "-",
        )
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Run the methods and print their table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Effort()
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--hidden", type=int, nargs=2, default=default.hidden, help="units")
    parser.add_argument("--rows", type=int, default=default.rows, help="to train on")
    parser.add_argument("--draws", type=int, default=default.draws, help="of each method")
    parser.add_argument("--prior-sd", type=float, default=default.prior_sd)
    parser.add_argument("--rtol", type=float, default=default.rtol, help="of the geodesics")
    parser.add_argument("--max-steps", type=int, default=default.max_steps, help="of a geodesic")
    parser.add_argument("--results", type=Path, help="file that keeps finished methods")
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables")
    parser.add_argument("--quick", action="store_true", help="few rows, units, steps and draws")
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in OPTIONS}
    given["hidden"] = tuple(given["hidden"])
    for name, value in given.items():
        if not np.min(value) > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value}")
    effort = QUICK if options.quick else Effort(**given)
    data = make_data(effort.rows)
    mode, norm = near_a_mode(data, effort)
    size = sum(x.size for x in mode.values())
    settings = (
        f"Network 64-{effort.hidden[0]}-{effort.hidden[1]}-10 (tanh), {size:,} parameters, priors "
        f"N(0, {effort.prior_sd:g}), {len(data.y):,} rows to train on and {len(data.test_y)} to "
        f"test on; {effort.adam_steps:,} Adam steps on all rows, |gradient| {norm:.2g} at their "
        f"end; float32, rtol {effort.rtol:g}, at most {effort.max_steps:,} steps, the same "
        "velocities for all methods."
    )
    print(settings, flush=True)
    results: dict[str, Result] = {}
    known: dict[str, Drawn] = {}
    if options.results is not None and options.results.is_file():
        for line in options.results.read_text().splitlines():
            result = Result(*json.loads(line))
            results[result.method] = result
    for method in options.methods:
        if method in results:
            continue
        results[method] = run(method, mode, data, effort, known)
        print(results[method], flush=True)
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps(results[method]) + "\n")
    chosen = [results[method] for method in METHODS if method in results]
    text = f"{settings}\n\n{table(chosen)}\n"
    print(f"\n{text}")
    if options.write:
        TABLES.mkdir(parents=True, exist_ok=True)
        (TABLES / f"laplace_digits_{size}.md").write_text(text)
    return chosen


if __name__ == "__main__":
    main()
