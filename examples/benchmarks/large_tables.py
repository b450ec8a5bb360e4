"""NUTS, HMCECS, blackjax and this package on large tables: the seconds that each needs.

Bayesian logistic regression with 20 columns. One call measures one table and puts it in its place
in docs/tables/large.md:

    python examples/benchmarks/large_tables.py --rows 100000 [--isotropic] [--methods NAME ...]

Every method is timed in the same four parts: the work before the first draw (start values, the
search for a mode), compilation of the loop, warm-up, and sampling. Sampling takes ``--seconds``
seconds, the same for each method. The data are arguments of the loop's program.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import HMCECS, NUTS
from numpyro.infer.util import log_density
from regression import COLUMNS, PRIOR_SD, laplace, logistic, rows

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, HostRows

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "large.md"
BASE = "NUTS(model, dense_mass=True)"
SMALLEST = 5e-4
"""Scale of the flattest direction; the largest is 1."""
BATCH = 256
ON_HOST = 10_000_000
"""Number of rows from which our kernels read them from the host, and NUTS is left out."""
ENOUGH = 20
"""Smallest number of effective draws for a rate."""
GOAL = 1000
"""Effective draws in the column "seconds to"."""

HEAD = (
    "| method | start, compile, warm-up, sample (s) "
    f"| ESS/s, sampling | over NUTS | ESS/s, all included | over NUTS | seconds to ESS {GOAL:,}"
    " | mean error | sd ratios |",
    "|---|---|---|---|---|---|---|---|---|",
)

CHOSEN: dict[str, Any] = {"batch_size": BATCH, "control_variate": True}


class Entrant(NamedTuple):
    """A method.

    Attributes:
        start: (key, number of warm-up draws, data) -> state.
        advance: (state, data) -> the state after one draw, and the draw.
        num_warmup: draws of warm-up.
        chunk: draws between two checks of the time.
    """

    start: Callable
    advance: Callable
    num_warmup: int
    chunk: int


class Result(NamedTuple):
    """Seconds of the four parts, and the draws, shape (draws, columns)."""

    start: float
    compiling: float
    warmup: float
    sampling: float
    draws: np.ndarray


def of_kernel(make: Callable, num_warmup: int, chunk: int, *more: Any) -> Entrant:
    """A NumPyro kernel; ``make`` gets the data, and ``more`` are further model arguments."""
    kernel: Any = None

    def start(rng_key: jax.Array, num_warmup: int, data: tuple) -> Any:
        nonlocal kernel
        kernel = make(data)
        return kernel.init(rng_key, num_warmup, None, (*data, *more), {})

    def advance(state: Any, data: tuple) -> tuple:
        state = kernel.sample(state, (*data, *more), {})
        # HMCECS's own ``z`` has the rows of the step beside the parameters
        return state, ravel_pytree(getattr(state, "hmc_state", state).z)[0]

    return Entrant(start, advance, num_warmup, chunk)


def newton(data: tuple) -> jax.Array:
    """A mode, in float32 and in one program, as a user would write it."""

    @jax.jit
    def search(data: tuple) -> jax.Array:
        def energy(w: jax.Array) -> jax.Array:
            return -log_density(logistic, data, {}, {"w": w})[0]

        def step(_: int, w: jax.Array) -> jax.Array:
            return w - jnp.linalg.solve(jax.hessian(energy)(w), jax.grad(energy)(w))

        return lax.fori_loop(0, 12, step, jnp.zeros(COLUMNS))

    return search(data)


def hmcecs(data: tuple) -> HMCECS:
    """HMCECS with a Taylor proxy at a mode; the search for the mode is part of the start."""
    proxy = HMCECS.taylor_proxy({"w": newton(data)})
    return HMCECS(NUTS(logistic, dense_mass=True), num_blocks=10, proxy=proxy)


def of_blackjax(step: Callable, draw_steps: int) -> Entrant:
    """``step(key, w, minibatch, data) -> w`` from a mode, with ``draw_steps`` steps per draw."""

    def start(rng_key: jax.Array, num_warmup: int, data: tuple) -> tuple:
        return rng_key, newton(data)

    def advance(state: tuple, data: tuple) -> tuple:
        key_next, key_draw = random.split(state[0])

        def body(w: jax.Array, key: jax.Array) -> tuple:
            key_rows, key_step = random.split(key)
            i = random.randint(key_rows, (BATCH,), 0, data[0].shape[0])
            return step(key_step, w, (data[0][i], data[1][i])), None

        w, _ = lax.scan(body, state[1], random.split(key_draw, draw_steps))
        return (key_next, w), w

    return Entrant(start, advance, 100, 50)


def by_hand(num_rows: int, stiffest: float) -> dict[str, Entrant]:
    """Blackjax, with the largest step sizes that keep the stiffest variance within about 10%.

    The rule is for a minibatch gradient whose noise has the covariance (rows / batch) times the
    Hessian.
    """
    noise = num_rows / BATCH * stiffest

    def energy(w: jax.Array, rows: tuple) -> jax.Array:
        logits = rows[0] @ w
        likelihood = jnp.sum(rows[1] * logits - jax.nn.softplus(logits))
        return num_rows / BATCH * likelihood - 0.5 * jnp.sum((w / PRIOR_SD) ** 2)

    estimate = jax.grad(energy)
    sgld = blackjax.sgld(estimate)
    h = 0.1 / (stiffest / 2 + noise / 2)
    # all steps of a trajectory use the same batch: with a friction of 0.5 / h, this adds
    # trajectory x h^2 noise to a variance of 1
    trajectory = 10
    h_momentum = (0.1 / (trajectory * noise)) ** 0.5
    sghmc = blackjax.sghmc(estimate, trajectory, alpha=0.5 / h_momentum)
    return {
        "blackjax.sgld, step by hand": of_blackjax(lambda k, w, b: sgld.step(k, w, b, h), 200),
        "blackjax.sghmc, step by hand": of_blackjax(
            lambda k, w, b: sghmc.step(k, w, b, h_momentum), 20
        ),
    }


def entrants(num_rows: int, condition: float, stiffest: float) -> dict[str, Entrant]:
    """All methods for this size."""
    large, stiff = num_rows >= 10**6, condition > 1e3
    warmup = 200 if large and not stiff else 500
    diagonal = warmup if not stiff else min(warmup, 5 * 10**6 // num_rows)
    each = max(1, min(50, 10**6 // num_rows))

    def ours(make: Callable, **settings: Any) -> Entrant:
        chunk = 1000 if "batch_size" in settings else 10
        return of_kernel(lambda _: make(logistic, **settings), 1000, chunk)

    def nuts(warmup: int, **settings: Any) -> Entrant:
        return of_kernel(lambda _: NUTS(logistic, **settings), warmup, each)

    methods = {
        BASE: nuts(warmup, dense_mass=True),
        "NUTS(model)": nuts(diagonal),
        "HMCECS(NUTS(model, dense_mass=True)), Taylor proxy": of_kernel(hmcecs, 1000, 100, BATCH),
        **by_hand(num_rows, stiffest),
        "SGHMC(model)": ours(SGHMC),
        "SGRLD(model)": ours(SGRLD),
        'SGRLD(model, metric="monge")': ours(SGRLD, metric="monge"),
        "SGNHT(model)": ours(SGNHT),
        "GGMC(model)": ours(GGMC),
        "SGHMC(model, ...)": ours(SGHMC, **CHOSEN),
        "SGRLD(model, ...)": ours(SGRLD, **CHOSEN),
    }
    if num_rows >= ON_HOST:
        return {n: m for n, m in methods.items() if n.startswith("SG")}
    return methods


def measure(entrant: Entrant, data: tuple, seconds: float, limit: float) -> Result | None:
    """Time the four parts; None if warm-up does not end within the limit."""
    jax.clear_caches()  # no method finds programs that another one has compiled
    clock = time.perf_counter()

    def lap() -> float:
        nonlocal clock
        before, clock = clock, time.perf_counter()
        return clock - before

    on_host = isinstance(data[0], HostRows)
    arrays = () if on_host else data
    state = jax.block_until_ready(entrant.start(random.key(1), entrant.num_warmup, data))
    start = lap()

    @jax.jit
    def advance(state: Any, arrays: tuple) -> tuple:
        def body(state: Any, _: None) -> tuple:
            return entrant.advance(state, data if on_host else arrays)

        return lax.scan(body, state, None, entrant.chunk)

    program = advance.lower(state, arrays).compile()
    compiling = lap()
    begun = clock
    for _ in range(-(-entrant.num_warmup // entrant.chunk)):
        state, _ = jax.block_until_ready(program(state, arrays))
        if time.perf_counter() - begun > limit:
            return None
    warmup = lap()
    draws = []
    while time.perf_counter() - clock < seconds:
        state, draw = program(state, arrays)
        draws.append(np.asarray(draw, np.float64))
    return Result(start, compiling, warmup, lap(), np.concatenate(draws))


def line(
    name: str,
    entrant: Entrant,
    r: Result | None,
    mean: np.ndarray,
    sd: np.ndarray,
    base: list[float] | None,
    limit: float,
) -> tuple[str, list[float] | None]:
    """A line of the table, and the two rates; ``base`` has the rates of NUTS, or None for NUTS."""
    if r is None:
        text = f"{entrant.num_warmup} draws of warm-up took more than {limit:.0f} s"
        return f"| `{name}` | {text} |" + " |" * 7, None
    columns = range(0, r.draws.shape[1], COLUMNS)  # some at a time, for memory
    size = min(
        float(np.min(effective_sample_size(r.draws[None, :, k : k + COLUMNS]))) for k in columns
    )
    before = r.start + r.compiling + r.warmup
    rates = [size / r.sampling, size / (before + r.sampling)] if size >= ENOUGH else None
    base = rates if name == BASE else base
    cells = ["– | ", "– | "]
    if rates is not None:
        ratios = (
            ["", ""] if base is None else [f"{x / b:.3g}" for x, b in zip(rates, base, strict=True)]
        )
        cells = [f"{x:.3g} | {ratio}" for x, ratio in zip(rates, ratios, strict=True)]
    to_goal = f"{before + r.sampling * GOAL / size:.1f}" if size >= GOAL else "not reached"
    error, spread = np.abs((r.draws.mean(0) - mean) / sd).max(), r.draws.std(0) / sd
    text = (
        f"| `{name}` | {r.start:.1f}, {r.compiling:.1f}, {r.warmup:.1f}, {r.sampling:.1f} | "
        f"{' | '.join(cells)} | {to_goal} | "
        f"{error:.2f} | {spread.min():.2f} to {spread.max():.2f} |"
    )
    return text, rates


def table(arguments: argparse.Namespace, folder: Path) -> str:
    """Measure, and write each line when it is done."""
    num_rows = arguments.rows
    on_host = num_rows >= ON_HOST
    X, y = rows(num_rows, 1.0 if arguments.isotropic else SMALLEST, folder if on_host else None)
    mean, precision = laplace(X, y)
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    data = (HostRows(X), HostRows(y)) if on_host else (jnp.asarray(X), jnp.asarray(y))
    stiffest, condition = np.linalg.norm(precision, 2), np.linalg.cond(precision)
    lines = [
        f"**{num_rows:,} rows, condition {condition:.2g}**",
        "",
        *HEAD,
    ]
    base: list[float] | None = None
    for name, entrant in entrants(num_rows, float(condition), float(stiffest)).items():
        if arguments.methods and not any(m in name for m in arguments.methods):
            continue
        r = measure(entrant, data, arguments.seconds, arguments.limit)
        text, rates = line(name, entrant, r, mean, sd, base, arguments.limit)
        base = rates if name == BASE else base
        lines.append(text)
        print(text, flush=True)
    if on_host:
        lines.append(
            "\nRows are in a file, read by `HostRows`. NUTS, HMCECS, blackjax and `GGMC(model)` "
            "are not run: they want all rows in memory or pass over all of them in every draw."
        )
    lines.append(f"\n{made_with(arguments.seconds)}, blackjax {blackjax.__version__}.")
    return "\n".join(lines) + "\n"


def made_with(seconds: float) -> str:
    """Date, machine and versions."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = found[1] if found else platform.processor()
    return (
        f"{datetime.date.today()}, {machine}, {len(os.sched_getaffinity(0))} core(s), "
        f"{seconds:g} seconds of sampling; jax {jax.__version__}, numpyro {numpyro.__version__}"
    )


def put(text: str) -> None:
    """Replace the table with the same title, or add it; in the order of rows."""
    old = TABLE.read_text() if TABLE.exists() else ""
    parts = [p for p in re.split(r"(?m)^(?=\*\*)", old) if p.strip()]

    def key(part: str) -> tuple:
        num_rows, condition = re.findall(r"[\d][\d,.e+-]*", part.partition("\n")[0])
        return int(num_rows.replace(",", "")), float(condition) > 100

    parts = [p for p in parts if key(p) != key(text)] + [text]
    TABLE.write_text("\n".join(p.strip() + "\n" for p in sorted(parts, key=key)))


def main() -> None:
    """Run one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--isotropic", action="store_true", help="independent columns of scale 1")
    parser.add_argument("--methods", nargs="+", help="only those whose name has one of these")
    parser.add_argument("--seconds", type=float, default=10.0, help="of sampling, each method")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of warm-up, at most")
    parser.add_argument("--no-table", action="store_true", help="print only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = table(arguments, Path(folder))
    print(text)
    if not arguments.no_table:
        put(text)


if __name__ == "__main__":
    main()
