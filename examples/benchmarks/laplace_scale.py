"""Cost of a draw of `RiemannianLaplace` against the number of parameters and of rows.

The model is a network 1-h-h-1 (tanh, D = h^2 + 4 h + 1 parameters with N(0, 1) priors, known noise)
on N rows of y = sin x + 0.3 e, in float32. The position for the mode is where a few hundred Adam
steps end, the same for all methods; its accuracy does not matter here. Each method compiles one
program of two draws in sequence, from the mode to the ends of the geodesics, including its work at
the mode. "linearised" is two straight draws with linearised predictions of 1,000 rows. Rows are
processed in chunks. Temporary bytes are XLA's count for the program. Times are CPU seconds.

Programs with more than `MOST_HIDDEN` hidden units or `MOST_ROWS` rows are compiled, for their
memory, and not run.

    python examples/benchmarks/laplace_scale.py [--write]
    python examples/benchmarks/laplace_scale.py --quick
    python examples/benchmarks/laplace_scale.py --groups 300 1000 10000 --write

``--groups`` compares the nearest normal law of a hierarchy with NumPyro's guides, which have
10,000 steps of Adam with a decreasing rate. Each group has a normal intercept and a normal slope,
centred, and six rows at x = -1 and 1. So intercepts and slopes are independent in the posterior,
and all moments are known by quadrature over the mean and the sd of each. Errors are of 1,000 draws.

    python examples/benchmarks/laplace_scale.py --last-layer 2000 8000 24000 --write

``--last-layer`` has a softmax of 1,000 classes on 512 known inputs, 512,000 weights, with
``metric="euclidean"`` and ``batch_size=512``. Megabytes are the peak of a process of its own, above
what it has with the data. ``--write`` writes docs/tables/laplace_scale.md, laplace_groups.md or
laplace_last_layer.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import TABLES, head, in_process, memory
from jax import lax, random
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import (
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)
from numpyro.infer.util import potential_energy

from numpyro_geom import RiemannianLaplace

GROUPS_TABLE = TABLES / "laplace_groups.md"
TABLE = TABLES / "laplace_scale.md"
NOISE = 0.3
DRAWS = 2
NEW_ROWS = 1000
"""Rows to predict with linearised outputs."""
ADAM = {"steps": 500, "batch": 256, "rate": 3e-3}

METHODS = {
    "euclidean": "euclidean",
    "linearised": "euclidean",
    "monge": "monge",
    "fisher": "fisher",
}
"""Method -> metric."""
HIDDEN = {1_000: 30, 10_000: 98, 100_000: 314}
"""D, about -> h."""
ROWS = (1_000, 10_000, 60_000)
SIZES = tuple(itertools.product(HIDDEN.values(), ROWS))
"""Hidden units h and rows N, a smaller size first."""
QUICK_SIZES = ((2, 40), (2, 80), (4, 40))
MOST_HIDDEN, MOST_ROWS = 30, 10_000
SETTINGS = (
    "Network 1-h-h-1 (tanh), priors N(0, 1), noise 0.3 known, float32, rtol 1e-3, precision "
    "'fisher', two draws per call, one after the other, rows in chunks of 8,192."
)


GUIDES = {
    "RiemannianLaplace": RiemannianLaplace,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": AutoLowRankMultivariateNormal,
    "AutoLaplaceApproximation": AutoLaplaceApproximation,
}
SVI_STEPS = 10_000
MOST_DENSE = 2_500
"""Largest D at which the guides of NumPyro are run."""
PER_GROUP = 6
SPREADS = {"intercept": 1.0, "slope": 0.6}


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
    """A method at a size.

    Attributes:
        hidden: h.
        rows: N.
        method: name of the method.
        megabytes: temporary memory of the program.
        compilation: CPU seconds of compiling it.
        seconds: CPU seconds per draw; None if it was not run, as the next two.
        evaluations: evaluations of the acceleration, mean over draws.
        failed: number of draws that failed.
    """

    hidden: int
    rows: int
    method: str
    megabytes: float
    compilation: float
    seconds: float | None = None
    evaluations: float | None = None
    failed: int | None = None


class Size(NamedTuple):
    """Hidden units h, data, and a position for the mode."""

    hidden: int
    X: jax.Array
    y: jax.Array
    mode: dict[str, jax.Array]


def compile_draws(size: Size, method: str) -> tuple:
    """The compiled program of draws, which returns success and evaluations, and its arguments."""
    guide = RiemannianLaplace(
        network,
        METHODS[method],
        mode="euclidean",
        precision="fisher",
        batch_size=len(size.y) // 2,  # any number below N lets the guide take rows in chunks
        init_loc_fn=init_to_value(values=size.mode),
    )
    # `fit` would take one more solve, for the distance from the mode
    svi = SVI(network, guide, optax.sgd(0.0), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), size.X, size.y, size.hidden))

    def one(key: jax.Array, params: dict, X: jax.Array, y: jax.Array) -> tuple:
        if method == "linearised":
            new = (X[:NEW_ROWS], y[:NEW_ROWS], size.hidden)
            found = guide.predictive(key, params, *new, num_samples=1, linearized=True)
            return jnp.isfinite(found.log_likelihood["y"]).all(), jnp.zeros((), jnp.int32)
        draw = guide.draw(key, params, X, y, size.hidden)
        return draw.success & jnp.isfinite(draw.unconstrained).all(), draw.num_evaluations

    # data and mode are arguments: XLA would compute with constants at compile time
    def several(keys: jax.Array, *inputs: Any) -> tuple:
        return lax.map(lambda key: one(key, *inputs), keys)

    arguments = (random.split(random.key(3), DRAWS), params, size.X, size.y)
    return jax.jit(several).lower(*arguments).compile(), arguments


def measure(size: Size, method: str) -> Cell:
    """A cell."""
    begin = time.process_time()
    program, arguments = compile_draws(size, method)
    compilation = time.process_time() - begin
    megabytes = program.memory_analysis().temp_size_in_bytes / 1e6
    cell = Cell(size.hidden, len(size.y), method, megabytes, compilation)
    if size.hidden > MOST_HIDDEN or len(size.y) > MOST_ROWS:
        return cell
    begin = time.process_time()
    success, evaluations = map(np.asarray, program(*arguments))
    return cell._replace(
        seconds=(time.process_time() - begin) / DRAWS,
        evaluations=float(evaluations.mean()),
        failed=int(np.sum(~success)),
    )


def run_size(hidden: int, num_rows: int, adam_steps: int) -> list[Cell]:
    """Run the methods at one size."""
    print(f"D = {num_parameters(hidden):,}, N = {num_rows:,}", flush=True)
    X, y = make_data(num_rows)
    size = Size(hidden, X, y, near_a_mode(X, y, hidden, adam_steps))
    return [measure(size, method) for method in METHODS]


# --- table


def slope(cells: Sequence[Cell], growing: Callable[[Cell], int]) -> str:
    """Slope of log temporary bytes on a log size; 1 is linear growth."""
    if len({growing(c) for c in cells}) < 2:
        return "-"
    logs = np.log([(growing(c), c.megabytes) for c in cells])
    return f"{np.polyfit(*logs.T, 1)[0]:.2f}"


def slopes_of_memory(cells: Sequence[Cell]) -> str:
    """Markdown: slopes of the memory in D at each N, and in N at each D."""
    sizes = {"D": lambda c: num_parameters(c.hidden), "N": lambda c: c.rows}
    methods = list(dict.fromkeys(c.method for c in cells))
    lines = head("slope of log memory", *methods)
    for growing, fixed in (("D", "N"), ("N", "D")):
        of = sizes[fixed]
        for value in dict.fromkeys(map(of, cells)):
            mine = [[c for c in cells if c.method == m and of(c) == value] for m in methods]
            found = [slope(some, sizes[growing]) for some in mine]
            lines.append(f"| in {growing}, {fixed} = {value:,} | {' | '.join(found)} |")
    return "\n".join(lines)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: the cells that were run, and the growth of the memory of all."""
    costs = "CPU s per draw", "evaluations", "failed", "MB", "CPU s to compile"
    lines = head("D", "N", "method", *costs)
    for c in cells:
        if c.seconds is not None:
            seconds = float(f"{c.seconds:.2g}")
            lines.append(
                f"| {num_parameters(c.hidden):,} | {c.rows:,} | {c.method} | {seconds:,g} | "
                f"{c.evaluations:.0f} | {c.failed} of {DRAWS} | {c.megabytes:.1f} | "
                f"{c.compilation:.0f} |"
            )
    return "\n".join([SETTINGS, "", *lines, "", slopes_of_memory(cells)])


# --- hierarchies


def hierarchy(x: jax.Array, y: jax.Array) -> None:
    """An intercept and a slope for each group, centred."""
    groups = len(y) // PER_GROUP
    values = []
    for name in SPREADS:
        mu = numpyro.sample(f"mu_{name}", dist.Normal(0, 5))
        tau = numpyro.sample(f"tau_{name}", dist.LogNormal(0, 1))
        with numpyro.plate("groups", groups):
            values.append(numpyro.sample(name, dist.Normal(mu, tau)))
    with numpyro.plate("rows", len(y)) as i:
        mean = values[0][i // PER_GROUP] + values[1][i // PER_GROUP] * x[i]
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


def data_of_groups(groups: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs -1, 1, -1, ... and outputs, groups one after the other."""
    rng = np.random.default_rng(0)
    a, b = (np.repeat(1 + tau * rng.normal(size=groups), PER_GROUP) for tau in SPREADS.values())
    x = np.tile([-1.0, 1.0], groups * PER_GROUP // 2)
    return x.astype("f4"), (a + b * x + rng.normal(size=x.size)).astype("f4")


def exact_moments(x: np.ndarray, y: np.ndarray) -> dict[str, tuple]:
    """Site -> means and sds by quadrature over mu and log tau; those of tau are of its log."""
    found = {}
    for name, weights in {"intercept": 1, "slope": x}.items():
        means = (y * weights).reshape(-1, PER_GROUP).mean(1).astype(float)
        mu = np.linspace(means.mean() - 1, means.mean() + 1, 801)[:, None]
        log_tau, within = np.linspace(-2.5, 1.5, 801), 1 / PER_GROUP
        total = np.exp(2 * log_tau) + within
        squares = (means**2).sum() - 2 * mu * means.sum() + mu**2 * len(means)
        log_p = -0.5 * len(means) * np.log(total) - squares / (2 * total)
        log_p = log_p - mu**2 / 50 - log_tau**2 / 2
        p = np.exp(log_p - log_p.max())
        p /= p.sum()

        def mean_of(x: np.ndarray, p: np.ndarray = p) -> float:
            return float((p * x).sum())

        for site, values in ((f"mu_{name}", mu), (f"tau_{name}", log_tau)):
            mean = mean_of(values)
            found[site] = mean, mean_of((values - mean) ** 2) ** 0.5
        share = np.exp(2 * log_tau) / total
        # a group's mean given mu and tau is (1 - share) mu + share m, linear in m
        rest, first, second = (1 - share) * mu, mean_of(share), mean_of(share**2)
        constant, both = mean_of(rest), mean_of(rest * share)
        mean = constant + first * means
        square = mean_of(rest**2) + 2 * means * both + means**2 * second
        found[name] = mean, (square + mean_of(share) * within - mean**2) ** 0.5
    return found


def run_guide(name: str, x: jax.Array, y: jax.Array) -> tuple:
    """CPU seconds of fitting and of 1,000 draws, compiled, and the draws."""
    guide = GUIDES[name](hierarchy)
    begin = time.process_time()
    if name == "RiemannianLaplace":
        params = guide.fit(random.key(0), x, y)
    else:
        rate = optax.exponential_decay(1e-2, SVI_STEPS, 1e-2)
        svi = SVI(hierarchy, guide, optax.adam(rate), Trace_ELBO())
        params = svi.run(random.key(0), SVI_STEPS, x, y, progress_bar=False).params
    fitted = time.process_time() - begin
    for seed in range(2):  # the first call compiles
        begin = time.process_time()
        draws = guide.sample_posterior(random.key(seed), params, sample_shape=(1000,))
        jax.block_until_ready(draws)
    return fitted, time.process_time() - begin, draws


def table_of_groups(sizes: Sequence[int]) -> str:
    """Markdown: a row for each number of groups and guide."""
    lines = head(
        *("groups x 2", "D", "guide", "mean off by, sd: shared", "groups, root mean square"),
        *("sd over exact: shared", "groups", "CPU s to fit", "CPU ms of 1,000 draws"),
    )
    for groups in sizes:
        x, y = data_of_groups(groups)
        exact, size = exact_moments(x, y), 2 * groups + 4
        for name in GUIDES:
            if size > MOST_DENSE and name != "RiemannianLaplace":
                continue
            try:
                fitted, drawn, draws = run_guide(name, jnp.asarray(x), jnp.asarray(y))
            except ValueError:  # NumPyro's, of parameters that are not finite
                lines.append(f"| {groups:,} | {size:,} | {name} | not finite" + " | -" * 5 + " |")
                continue
            off, width = {}, {}
            for site, (mean, sd) in exact.items():
                values = np.asarray(draws[site], float)
                values = np.log(values) if site.startswith("tau") else values
                off[site], width[site] = (values.mean(0) - mean) / sd, values.std(0) / sd
            shared = [site for site in exact if site not in SPREADS]
            local = np.concatenate([off[site] for site in SPREADS])
            widths = [width[site] for site in shared], [width[site].mean() for site in SPREADS]
            cells = (
                f"{groups:,}",
                f"{size:,}",
                name,
                f"{max(abs(off[site]) for site in shared):.2f}",
                f"{np.sqrt(np.mean(local**2)):.2f}",
                *(f"{min(w):.2f} to {max(w):.2f}" for w in widths),
                f"{fitted:.0f}",
                f"{1000 * drawn:,.0f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def last_layer(rows: int) -> str:
    """A line on the guide of a last layer with known inputs, in a process of its own."""

    def model(x: jax.Array, y: jax.Array) -> None:
        weights = numpyro.sample("w", dist.Normal(0, 0.1).expand([512, 1000]).to_event(2))
        with numpyro.plate("rows", len(x)) as i:
            numpyro.sample("y", dist.Categorical(logits=x[i] @ weights), obs=y[i])

    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 512)).astype(np.float32)
    y = np.argmax(x @ rng.normal(0, 0.2, (512, 1000)) + rng.gumbel(size=(rows, 1000)), 1)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    guide = RiemannianLaplace(model, "euclidean", batch_size=512)
    begin = time.process_time()
    params = guide.fit(random.key(0), x, y)
    fitted = time.process_time()
    jax.block_until_ready(guide.sample_posterior(random.key(1), params, sample_shape=(5,)))
    seconds = f"{fitted - begin:.0f} | {(time.process_time() - fitted) / 5:.0f}"
    return f"| {rows:,} | {seconds} | {memory('VmHWM') - before:,.0f} |"


def main(arguments: Sequence[str] | None = None) -> list[Cell]:
    """Run the sizes and print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write the tables to {TABLE.name}")
    parser.add_argument("--quick", action="store_true", help="tiny networks")
    parser.add_argument("--groups", type=int, nargs="+", help="numbers of groups")
    parser.add_argument("--last-layer", type=int, nargs="+", help="numbers of rows")
    parser.add_argument("--one", type=int)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(last_layer(options.one)))
        return []
    if options.groups:
        cells, text, path = [], table_of_groups(options.groups), GROUPS_TABLE
    elif options.last_layer:
        lines = ["1,000 classes, 512 inputs, 512,000 weights, `batch_size=512`.", ""]
        lines += head("rows", "CPU s to fit", "CPU s of a draw", "megabytes")
        lines += [in_process(__file__, "--one", n) for n in options.last_layer]
        cells, text, path = [], "\n".join(lines) + "\n", TABLES / "laplace_last_layer.md"
    else:
        sizes, steps = (QUICK_SIZES, 50) if options.quick else (SIZES, ADAM["steps"])
        cells = [cell for size in sizes for cell in run_size(*size, steps)]
        text, path = table(cells) + "\n", TABLE
    print(f"\n{text}")
    if options.write:
        path.write_text(text)
    return cells


if __name__ == "__main__":
    main()
