"""Cost of a draw of `RiemannianLaplace` against the number of parameters and of rows.

The model is a network 1-h-h-1 (tanh, D = h^2 + 4 h + 1 parameters with N(0, 1) priors, known noise)
on N rows of y = sin x + 0.3 e, in float32. The position for the mode is where a few hundred Adam
steps end, the same for all methods; its accuracy does not matter here. Each method compiles one
program of two draws in sequence, from the mode to the ends of the geodesics, including its work at
the mode. Times are medians over calls; the methods of a size take turns. Ratios are to Monge's
metric at the same size in the same run. Temporary bytes are XLA's count for the program. If a draw
would take more than ``--limit`` seconds, extrapolated from the next smaller size, its program is
compiled and not run. Rows are processed in chunks.

    python examples/benchmarks/laplace_scale.py [--parts dimensions rows-100 rows-1000] [--write]
    python examples/benchmarks/laplace_scale.py --quick

``--write`` writes docs/tables/laplace_scale.md. ``--cells FILE`` stores finished sizes in a file
and reuses them, so that the sizes can be run one by one (``--sizes 1``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro.infer.util import potential_energy

from numpyro_geom import RiemannianLaplace
from numpyro_geom.diagnostics import SamplingWarning

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "laplace_scale.md"
NOISE = 0.3
LARGEST = 2000
"""Largest D for Cholesky factors, and largest N for the Woodbury identity."""
DRAWS = 2
ROUNDS = 3
ENOUGH = 5.0
"""Total seconds of a method at a size after which it is not called again."""
ADAM = {"steps": 500, "batch": 256, "rate": 3e-3}

METHODS: dict[str, dict[str, Any]] = {
    "monge": {"metric": "monge"},
    "fisher, cholesky": {"metric": "fisher", "solver": "cholesky"},
    "fisher, woodbury": {"metric": "fisher", "solver": "woodbury"},
    "fisher, cg": {"metric": "fisher", "solver": "cg"},
}


class Part(NamedTuple):
    """One series of sizes.

    Attributes:
        title: title in words.
        sizes: hidden units h and rows N of each size.
    """

    title: str
    sizes: tuple[tuple[int, int], ...]


HIDDEN = {100: 8, 1_000: 30, 10_000: 98, 100_000: 314}
"""D, about -> h."""
ROWS = (100, 1_000, 10_000, 100_000)
PARTS = {
    "dimensions": Part("N = 1,000 rows", tuple((h, 1_000) for h in HIDDEN.values())),
    "rows-100": Part("D = 97 parameters", tuple((HIDDEN[100], n) for n in ROWS)),
    "rows-1000": Part("D = 1,021 parameters", tuple((HIDDEN[1_000], n) for n in ROWS)),
}
QUICK = {"dimensions": Part("N = 40 rows", ((2, 40),))}
QUICK_METHODS = ["monge", "fisher, woodbury"]
SETTINGS = (
    "Network 1-h-h-1 (tanh), priors N(0, 1), noise 0.3 known, float32, rtol 1e-3, precision "
    "'fisher', two draws a call, one after the other, rows in chunks of 8,192."
)


def num_parameters(hidden: int) -> int:
    """Number of parameters D."""
    return hidden**2 + 4 * hidden + 1


# --- model and mode


def network(X: Any, y: Any, hidden: int) -> None:
    """A regression 1-h-h-1 with standard normal priors."""

    def weights(name: str, *shape: int) -> jax.Array:
        return numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))

    w1, b1 = weights("w1", 1, hidden), weights("b1", hidden)
    w2, b2 = weights("w2", hidden, hidden), weights("b2", hidden)
    w3, b3 = weights("w3", hidden), weights("b3", 1)
    with numpyro.plate("rows", X.shape[0]) as i:
        features = jnp.tanh(jnp.tanh(X[i] @ w1 + b1) @ w2 + b2)
        numpyro.sample("y", dist.Normal(features @ w3 + b3, NOISE), obs=y[i])


def make_data(num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Inputs from -4 to 4, standardised, shape (N, 1), and outputs."""
    key_x, key_noise = random.split(random.key(num_rows))
    x = random.uniform(key_x, (num_rows,), minval=-4.0, maxval=4.0)
    y = jnp.sin(x) + NOISE * random.normal(key_noise, x.shape)
    return ((x - x.mean()) / x.std())[:, None], y


def near_a_mode(X: jax.Array, y: jax.Array, hidden: int, num_steps: int) -> dict[str, jax.Array]:
    """Where Adam on minibatches ends; initial weights keep the variance of activations."""
    num_rows = X.shape[0]
    shapes = {"w1": (1, hidden), "b1": (hidden,), "w2": (hidden, hidden), "b2": (hidden,)}
    shapes |= {"w3": (hidden,), "b3": (1,)}
    keys = dict(zip(shapes, random.split(random.key(1), len(shapes)), strict=True))
    scales = {"w1": 1.0, "b1": 1.0, "w2": hidden**-0.5, "b2": 0.1, "w3": hidden**-0.5, "b3": 0.1}
    start = {n: scales[n] * random.normal(keys[n], shape) for n, shape in shapes.items()}
    batch = min(ADAM["batch"], num_rows)
    adam = optax.adam(optax.cosine_decay_schedule(ADAM["rate"], num_steps))

    @jax.jit
    def search(position: dict, X: jax.Array, y: jax.Array) -> dict:
        def energy(position: dict, rows: jax.Array) -> jax.Array:
            args = (X[rows], y[rows], hidden)
            prior = sum(jnp.sum(w**2) / 2 for w in position.values())
            # the rows of a batch represent all rows
            return (potential_energy(network, args, {}, position) - prior) / batch + (
                prior / num_rows
            )

        def step(k: jax.Array, carry: tuple) -> tuple:
            position, state = carry
            rows = random.randint(random.fold_in(random.key(2), k), (batch,), 0, num_rows)
            update, state = adam.update(jax.grad(energy)(position, rows), state)
            return optax.apply_updates(position, update), state

        return lax.fori_loop(0, num_steps, step, (position, adam.init(position)))[0]

    return search(start, X, y)


# --- cells


class Cell(NamedTuple):
    """A method at a size; times and evaluations are NaN if it was not run.

    Attributes:
        hidden: h.
        rows: N.
        method: name of the method.
        seconds: seconds per draw.
        evaluations: evaluations of the acceleration, mean over draws.
        ratio: ratio of seconds to those of Monge's metric in the same run.
        failed: number of draws that failed.
        megabytes: temporary memory of the program.
        note: why it was not run.
    """

    hidden: int
    rows: int
    method: str
    seconds: float
    evaluations: float
    ratio: float
    failed: int
    megabytes: float
    note: str = ""


def applies(method: str, hidden: int, num_rows: int) -> bool:
    """Whether the method's largest matrix is small enough."""
    if method == "fisher, cholesky":
        return num_parameters(hidden) <= LARGEST
    return method != "fisher, woodbury" or num_rows <= LARGEST


def compile_draws(method: str, mode: dict, X: jax.Array, y: jax.Array, hidden: int) -> tuple:
    """The compiled program of two draws, and its arguments without the key."""
    batch_size = max(1, X.shape[0] // 2)  # any number below N lets the guide take rows in chunks
    settings = METHODS[method] | {"mode": "euclidean", "precision": "fisher"}
    guide = RiemannianLaplace(network, **settings, batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the search for a mode has not", SamplingWarning)
        params = guide.fit(random.key(0), X, y, hidden, init_params=mode, max_steps=0)

    # data and mode are arguments: XLA would compute with constants at compile time
    def two(key: jax.Array, params: dict, X: jax.Array, y: jax.Array) -> tuple:
        draws = guide.draw(key, params, X, y, hidden, sample_shape=(DRAWS,), chunk_size=1)
        return draws.unconstrained, draws.success, draws.num_evaluations

    return jax.jit(two).lower(random.key(0), params, X, y).compile(), (params, X, y)


def skip_reason(smaller: Cell, hidden: int, num_rows: int, limit: float) -> str:
    """Why a cell is not run, from the cell of the next smaller size; empty if it is run."""
    growth = num_rows / smaller.rows * num_parameters(hidden) / num_parameters(smaller.hidden)
    expected = smaller.seconds * growth
    if expected <= limit:
        return ""
    if np.isnan(expected):
        return "not run: too long already at a smaller size"
    return f"not run: {expected:.0f} s expected, more than {limit:g} s a draw"


def run_size(
    hidden: int,
    num_rows: int,
    methods: Sequence[str],
    before: dict[str, Cell],
    limit: float,
    adam_steps: int,
) -> list[Cell]:
    """Run the methods at one size.

    Args:
        hidden: h.
        num_rows: N.
        methods: names of methods.
        before: the methods' cells at the next smaller size.
        limit: seconds per draw above which a method is not run.
        adam_steps: Adam steps to the mode.
    """
    X, y = make_data(num_rows)
    mode = near_a_mode(X, y, hidden, adam_steps)
    programs, memory, notes = {}, {}, {}
    for method in methods:
        begin = time.perf_counter()
        program, args = compile_draws(method, mode, X, y, hidden)
        print(f"  {method}: compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        memory[method] = program.memory_analysis().temp_size_in_bytes / 1e6
        notes[method] = ""
        if method in before:
            notes[method] = skip_reason(before[method], hidden, num_rows, limit)
        if not notes[method]:
            programs[method] = (program, args)

    times: dict[str, list[float]] = {method: [] for method in programs}
    ends: dict[str, tuple] = {}
    for k in range(ROUNDS):
        for method, (program, args) in programs.items():
            if sum(times[method]) > ENOUGH:
                continue
            begin = time.perf_counter()
            result = jax.block_until_ready(program(random.key(3), *args))
            times[method].append((time.perf_counter() - begin) / DRAWS)
            if k == 0:
                ends[method] = result
                print(f"  {method}: {times[method][0]:.3g} s a draw", flush=True)
    seconds = {method: statistics.median(values) for method, values in times.items()}
    cells = []
    for method, megabytes in memory.items():
        figures: tuple = (np.nan, np.nan, np.nan, 0)
        if method in ends:
            _, success, evaluations = ends[method]
            ratio = seconds[method] / seconds.get("monge", np.nan)
            failed = int(np.sum(~np.asarray(success)))
            figures = (seconds[method], float(np.mean(evaluations)), ratio, failed)
        cells.append(Cell(hidden, num_rows, method, *figures, megabytes, notes[method]))
    return cells


class Store:
    """Cells by size and method, in a file of JSON lines if ``path`` is given.

    Args:
        path: the file, or None.
        num_new: how many new sizes may be run.
    """

    def __init__(self, path: Path | None, num_new: int) -> None:
        self.path, self.num_new = path, num_new
        self.sizes: dict[tuple[int, int], dict[str, Cell]] = {}
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                self._keep([Cell(*values) for values in json.loads(line)])

    def _keep(self, cells: list[Cell]) -> None:
        for c in cells:
            self.sizes.setdefault((c.hidden, c.rows), {})[c.method] = c

    def at(self, hidden: int, num_rows: int) -> dict[str, Cell]:
        """The stored cells of a size, by method."""
        found = self.sizes.get((hidden, num_rows), {})
        return {method: found[method] for method in METHODS if method in found}

    def add(self, cells: list[Cell]) -> None:
        """Store the cells of a size."""
        self._keep(cells)
        self.num_new -= 1
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(cells) + "\n")


def run_part(
    part: Part, store: Store, methods: Sequence[str], limit: float, adam_steps: int
) -> list[Cell]:
    """All sizes of a part that are in the store or may be run."""
    cells: list[Cell] = []
    before: dict[str, Cell] = {}
    for hidden, num_rows in part.sizes:
        chosen = [method for method in methods if applies(method, hidden, num_rows)]
        # if a method is missing, the whole size is run again, because ratios are within one run
        if set(chosen) - set(store.at(hidden, num_rows)) and store.num_new > 0:
            print(f"h = {hidden}, N = {num_rows}", flush=True)
            new = run_size(hidden, num_rows, chosen, before, limit, adam_steps)
            for c in new:
                what = c.note or f"{c.seconds:.3g} s a draw, {c.evaluations:.0f} evaluations"
                print(f"  {c.method}: {what}, {c.megabytes:.1f} MB, {c.failed} failed", flush=True)
            store.add(new)
        before = store.at(hidden, num_rows)
        cells += before.values()
    return cells


# --- table


def slope(cells: Sequence[Cell], method: str) -> float:
    """Slope of log temporary bytes on log(D + N); 1 is linear growth."""
    mine = [c for c in cells if c.method == method]
    size = [num_parameters(c.hidden) + c.rows for c in mine]
    if len(set(size)) < 2:
        return np.nan
    return float(np.polyfit(np.log(size), np.log([c.megabytes for c in mine]), 1)[0])


def table(part: Part, cells: Sequence[Cell]) -> str:
    """Markdown rows, and the growth of the memory."""
    lines = [
        "| D | N | method | s a draw | evaluations | over monge | failed | temporary MB |",
        "|---" * 8 + "|",
    ]
    for c in cells:
        ran = not np.isnan(c.seconds)
        row = (
            f"{num_parameters(c.hidden):,}",
            f"{c.rows:,}",
            c.method,
            f"{c.seconds:.3g}" if ran else "-",
            f"{c.evaluations:.0f}" if ran else "-",
            f"{c.ratio:.3g}" if np.isfinite(c.ratio) else "-",
            f"{c.failed} of {DRAWS}" if ran else "-",
            f"{c.megabytes:.1f}",
        )
        lines.append(f"| {' | '.join(row)} |")
    notes = [
        f"{c.method} at D = {num_parameters(c.hidden):,}, N = {c.rows:,} {c.note}."
        for c in cells
        if c.note
    ]
    slopes = [f"{method} {slope(cells, method):.2f}" for method in METHODS]
    slopes = [text for text in slopes if not text.endswith("nan")]
    if not slopes:
        return "\n".join([*lines, "", *notes]).rstrip()
    memory = (
        f"Slope of log memory on log(D + N), {part.title}: {', '.join(slopes)}; 1 is linear, less "
        "is better than linear."
    )
    return "\n".join([*lines, "", *notes, *([""] if notes else []), memory])


def main(arguments: Sequence[str] | None = None) -> list[Cell]:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a draw, at most")
    parser.add_argument("--cells", type=Path, help="file that keeps finished sizes")
    parser.add_argument("--sizes", type=int, default=100, help="how many new sizes to run")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {TABLE.name}")
    parser.add_argument("--quick", action="store_true", help="a tiny network, two methods")
    options = parser.parse_args(arguments)
    if not options.limit > 0:
        parser.error(f"--limit must be above 0, got {options.limit}")
    parts, steps = {name: PARTS[name] for name in options.parts}, ADAM["steps"]
    if options.quick:
        parts, steps, options.methods = QUICK, 50, QUICK_METHODS
    store = Store(options.cells, options.sizes)
    cells: list[Cell] = []
    texts = [SETTINGS]
    for part in parts.values():
        new = run_part(part, store, options.methods, options.limit, steps)
        cells += new
        if new:
            texts.append(table(part, new))
    text = "\n\n".join(texts) + "\n"
    print(f"\n{text}")
    if options.write:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(text)
    return cells


if __name__ == "__main__":
    main()
