"""Gain of a control variate and a momentum on large tables, beside HMCECS and NUTS.

Logistic regression on generated rows, timed as in `rivals.py`, which has the same columns of
methods. Writes docs/tables/control_variates.md, in about a quarter of an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import TABLES, head, logistic
from jax import random
from numpyro.infer import HMCECS, NUTS
from regression import laplace
from rivals import Clock, OutOfTimeError, Problem, of_kernel

from numpyro_geom import GGMC, SGHMC, SGRLD

TABLE = TABLES / "control_variates.md"
NUM_COLUMNS = 20
TOLERANCE = 0.05
ENOUGH = 50
"""Smallest number of effective draws for an estimate of it."""
HEAD = head("sampler", "mean error; sd ratios", "ESS/s of sampling", "ESS/s, all included")


def problem_of(num_rows: int) -> Problem:
    """Independent standard normal columns, labels from the model, and the Laplace approximation."""
    key_x, key_w, key_y = random.split(random.key(0), 3)
    X = random.normal(key_x, (num_rows, NUM_COLUMNS))
    w = random.normal(key_w, (NUM_COLUMNS,)) / NUM_COLUMNS**0.5
    y = random.bernoulli(key_y, jax.nn.sigmoid(X @ w)).astype(jnp.int32)
    mode, hessian = laplace(X, y, prior_sd=1.0)
    sd = np.sqrt(np.diag(np.linalg.inv(hessian)))
    return Problem(logistic, (X, y), mode, sd, float(np.linalg.cond(hessian)))


def methods(problem: Problem) -> dict[str, Callable]:
    """The samplers of one table; HMCECS is given the mode."""
    proxy = HMCECS.taylor_proxy({"w": jnp.asarray(problem.mean, jnp.float32)})
    hmcecs = HMCECS(NUTS(logistic), num_blocks=10, proxy=proxy)

    def ours(make: Callable, num_warmup: int, chunk: int, **settings: Any) -> Callable:
        if make is not GGMC:
            settings = {"bias_tolerance": TOLERANCE, **settings}
        return of_kernel(lambda model, _: make(model, **settings), num_warmup, chunk)

    plain = partial(ours, num_warmup=50, chunk=20)
    corrected = partial(ours, num_warmup=200, control_variate=True)
    return {
        "NUTS": of_kernel(lambda model, _: NUTS(model), 500, 50),
        "HMCECS, Taylor proxy, 256 rows": of_kernel(
            lambda *_: hmcecs, 500, 100, 256, inner=lambda state: state.hmc_state
        ),
        "SGRLD, 256 rows": plain(SGRLD, batch_size=256),
        "SGHMC, 256 rows": plain(SGHMC, batch_size=256),
        "GGMC, 1,024 rows": plain(GGMC, batch_size=1024),
        "SGRLD + control variate, 256 rows": corrected(SGRLD, chunk=1000, batch_size=256),
        "SGRLD + control variate, 512 rows": corrected(SGRLD, chunk=1000, batch_size=512),
        "SGHMC + control variate, 256 rows": corrected(SGHMC, chunk=1000, batch_size=256),
        "SGHMC + control variate, 64 rows": corrected(SGHMC, chunk=1000, batch_size=64),
        "GGMC + control variate, 256 rows": corrected(GGMC, chunk=50, batch_size=256, num_steps=20),
    }


def table(num_rows: int, seconds: float) -> str:
    """All samplers at one number of rows."""
    problem = problem_of(num_rows)
    lines = [f"**{num_rows:,} rows x {NUM_COLUMNS} columns.**", "", *HEAD]
    for name, run in methods(problem).items():
        jax.clear_caches()  # no method finds programs that another one has compiled
        try:
            found = run(problem, seconds, Clock(10 * seconds))
        except OutOfTimeError:
            lines.append(f"| {name} | warm-up not done in {10 * seconds:.0f} s | | |")
            continue
        ratios = found.draws.std(0) / problem.sd
        error = np.abs((found.draws.mean(0) - problem.mean) / problem.sd).max()
        rates = found.size / found.seconds[-1], found.size / sum(found.seconds)
        cells = [f"{rate:.3g}" if found.size >= ENOUGH else "too few draws" for rate in rates]
        moments = f"{error:.2f}; {ratios.min():.2f} to {ratios.max():.2f}"
        lines.append(f"| {name} | {moments} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0, help="of sampling, at least")
    seconds = parser.parse_args().seconds
    TABLE.write_text("\n".join(table(rows, seconds) for rows in (100_000, 1_000_000)))


if __name__ == "__main__":
    main()
