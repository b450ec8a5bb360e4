"""Gain of a control variate and a momentum on large tables, compared with NUTS and HMCECS.

Logistic regression on generated rows. Prints Markdown tables and writes them to
docs/tables/control_variates.md; about a quarter of an hour. ``--small`` is a quick look.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import HMCECS, NUTS

from numpyro_geom import GGMC, SGHMC, SGRLD, SGKernel

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "control_variates.md"
NUM_COLUMNS = 20
MEAN_ERROR, SD_ERROR = 0.1, 0.05
TOLERANCE = 0.05
ENOUGH = 50
"""Smallest number of effective draws for an estimate of it."""


def logistic(X: Any, y: Any, subsample_size: int | None = None) -> None:
    """The model of the whole page; only HMCECS passes a subsample size."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0], subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def rows(num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Independent standard normal columns, and labels from the model."""
    key_x, key_w, key_y = random.split(random.key(0), 3)
    X = random.normal(key_x, (num_rows, NUM_COLUMNS))
    w = random.normal(key_w, (NUM_COLUMNS,)) / NUM_COLUMNS**0.5
    return X, random.bernoulli(key_y, jax.nn.sigmoid(X @ w)).astype(jnp.int32)


def laplace(X: jax.Array, y: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Mode and standard deviations of the Laplace approximation, by Newton's method."""
    # in double precision: a sum over all rows in single precision is off by a part of a deviation
    X, y = np.asarray(X, np.float64), np.asarray(y, np.float64)
    w = np.zeros(NUM_COLUMNS)
    for _ in range(8):
        p = 1 / (1 + np.exp(-X @ w))
        hessian = X.T @ (X * (p * (1 - p))[:, None]) + np.eye(NUM_COLUMNS)
        w = w - np.linalg.solve(hessian, X.T @ (p - y) + w)
    return w, np.sqrt(np.diag(np.linalg.inv(hessian)))


class Entrant(NamedTuple):
    """A sampler and its sizes.

    Attributes:
        kernel: the NumPyro kernel.
        num_warmup: draws of warm-up.
        batch: draws between two checks of the time.
        seconds: sampling time, unless the accuracy is reached earlier.
        subsample_size: third argument of the model, or None.
    """

    kernel: Any
    num_warmup: int
    batch: int
    seconds: float
    subsample_size: int | None = None


class Result(NamedTuple):
    """The result of one sampler.

    Attributes:
        compiling: seconds.
        warmup: seconds.
        sampling: seconds.
        draws: shape (draws, columns).
        reached: seconds of sampling after which the draws are accurate, or None.
        steps: stochastic-gradient steps of the sampling, or None.
    """

    compiling: float
    warmup: float
    sampling: float
    draws: np.ndarray
    reached: float | None
    steps: int | None

    @property
    def ess(self) -> float:
        """Effective sample size of the worst column."""
        return float(np.min(effective_sample_size(self.draws[None])))


def accuracy(draws: np.ndarray, reference: tuple) -> tuple[float, float, float]:
    """Worst standardised error of the means; smallest and largest ratio of deviations."""
    mean, sd = reference
    ratios = draws.std(0, dtype=np.float64) / sd
    error = np.abs((draws.mean(0, dtype=np.float64) - mean) / sd).max()
    return float(error), float(ratios.min()), float(ratios.max())


def measure(entrant: Entrant, data: tuple, reference: tuple) -> Result:
    """Compile, warm up, and draw until the draws are accurate or the time is up.

    The data are arguments of the compiled program, as with ``MCMC(..., jit_model_args=True)``.
    NumPyro's default makes them constants. 80 MB of constants take longer to compile than to
    sample.
    """
    more = () if entrant.subsample_size is None else (entrant.subsample_size,)
    kernel = entrant.kernel
    state = kernel.init(random.key(1), entrant.num_warmup, None, (*data, *more), {})

    def advance(state: Any, data: tuple, num_draws: int) -> tuple:
        def body(state: Any, _: None) -> tuple:
            state = kernel.sample(state, (*data, *more), {})
            return state, (state.z["w"], getattr(state, "num_steps", 0))

        return lax.scan(body, state, None, num_draws)

    def compiled(num_draws: int) -> Any:
        return jax.jit(lambda s, d: advance(s, d, num_draws)).lower(state, data).compile()

    start = time.perf_counter()
    warm_up = compiled(entrant.num_warmup)
    once = time.perf_counter() - start  # a user compiles one program for warm-up and sampling
    run = compiled(entrant.batch)
    start = time.perf_counter()
    state, _ = jax.block_until_ready(warm_up(state, data))
    warmup = time.perf_counter() - start
    draws, steps, sampling, reached = [], 0, 0.0, None
    while sampling < entrant.seconds:
        start = time.perf_counter()
        state, (w, num_steps) = jax.block_until_ready(run(state, data))
        sampling += time.perf_counter() - start
        draws.append(np.asarray(w))
        steps += int(np.sum(num_steps))
        error, low, high = accuracy(np.concatenate(draws), reference)
        accurate = error <= MEAN_ERROR and max(1 - low, high - 1) <= SD_ERROR
        if not accurate:
            reached = None
        elif reached is None:
            reached = sampling
        elif sampling > 3 * reached:  # and the draws stay accurate
            break
    together = np.concatenate(draws)
    is_ours = isinstance(kernel, SGKernel)
    return Result(once, warmup, sampling, together, reached, steps if is_ours else None)


def entrants(reference: tuple, seconds: float) -> dict[str, Entrant]:
    """The samplers of one table."""
    params = {"w": jnp.asarray(reference[0], jnp.float32)}
    taylor = HMCECS(NUTS(logistic), num_blocks=10, proxy=HMCECS.taylor_proxy(params))

    def sgrld(**settings: Any) -> SGRLD:
        return SGRLD(logistic, bias_tolerance=TOLERANCE, **settings)

    def sghmc(**settings: Any) -> SGHMC:
        return SGHMC(logistic, bias_tolerance=TOLERANCE, **settings)

    def ggmc(**settings: Any) -> GGMC:
        return GGMC(logistic, **settings)

    def corrected(make: Any, batch: int = 1000, **settings: Any) -> Entrant:
        return Entrant(make(control_variate=True, **settings), 200, batch, seconds / 4)

    return {
        "NUTS": Entrant(NUTS(logistic), 500, 10, seconds),
        "HMCECS, Taylor proxy, 256 rows": Entrant(taylor, 500, 100, seconds / 2, 256),
        "SGRLD, 256 rows": Entrant(sgrld(batch_size=256), 50, 20, seconds / 4),
        "SGHMC, 256 rows": Entrant(sghmc(batch_size=256), 50, 20, seconds / 4),
        "GGMC, 1,024 rows": Entrant(ggmc(batch_size=1024), 50, 20, seconds / 4),
        "SGRLD + control variate, 256 rows": corrected(sgrld, batch_size=256),
        "SGRLD + control variate, 512 rows": corrected(sgrld, batch_size=512),
        "SGHMC + control variate, 256 rows": corrected(sghmc, batch_size=256),
        "SGHMC + control variate, 64 rows": corrected(sghmc, batch_size=64),
        "GGMC + control variate, 256 rows": corrected(ggmc, 50, batch_size=256, num_steps=20),
    }


def table(num_rows: int, seconds: float) -> tuple[str, dict[str, str]]:
    """All samplers at one number of rows, and the cost per step of those with steps."""
    data = rows(num_rows)
    reference = laplace(*data)
    lines = [
        f"**{num_rows:,} rows x {NUM_COLUMNS} columns.**",
        "",
        "| sampler | mean error; sd ratios | accurate after (s of sampling) | ESS/s of sampling "
        "| ESS/s, all included |",
        "|---|---|---|---|---|",
    ]
    costs = {}
    for name, entrant in entrants(reference, seconds).items():
        r = measure(entrant, data, reference)
        error, low, high = accuracy(r.draws, reference)
        rates = r.ess / r.sampling, r.ess / (r.compiling + r.warmup + r.sampling)
        cells = [f"{rate:.3g}" if r.ess >= ENOUGH else "too few draws" for rate in rates]
        lines.append(
            f"| {name} | {error:.2f}; {low:.2f} to {high:.2f} "
            f"| {'not reached' if r.reached is None else f'{r.reached:.2f}'} | "
            + " | ".join(cells)
            + " |"
        )
        if r.steps is not None:
            each = r.sampling / r.steps * 1e6
            costs[name] = f"{each:.1f} ({r.steps / len(r.draws):.0f} steps per draw)"
        print(lines[-1], costs.get(name, ""), flush=True)
    return "\n".join(lines), costs


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=100.0, help="of sampling, for NUTS")
    options = parser.parse_args()
    sizes = (5_000, 20_000) if options.small else (100_000, 200_000, 1_000_000)
    seconds = 4.0 if options.small else options.seconds
    parts, costs = [], {}
    for num_rows in sizes:
        text, costs[num_rows] = table(num_rows, seconds)
        parts.append(text)
    lines = ["| microseconds per step | " + " | ".join(f"{n:,} rows" for n in sizes) + " |"]
    lines.append("|---" * (1 + len(sizes)) + "|")
    for name in costs[sizes[0]]:
        lines.append(f"| {name} | " + " | ".join(costs[n][name] for n in sizes) + " |")
    text = "\n\n".join([*parts, "\n".join(lines)]) + "\n"
    print(text)
    if not options.small:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text("\n\n".join([parts[0], parts[2]]) + "\n")


if __name__ == "__main__":
    main()
