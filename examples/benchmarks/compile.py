"""What a run compiles, compared with NUTS: lines of optimised HLO and CPU seconds.

Prints a Markdown table of ratios to NUTS on the same logistic regression, all in one process, and
writes it to docs/tables/compile.md; about two minutes.

- "sampling" is the program that NumPyro's loop compiles at every ``run``: 1,000 calls of
  ``sample``.
- "first run" is everything that ``init`` and that loop compile without any cache.
- "second run" is what is compiled if ``init`` has seen the same model and shapes before: only the
  loop.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro.infer import NUTS
from speed import logistic

from numpyro_geom import SGHMC, SGRLD

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "compile.md"
NUM_ROWS, NUM_COLUMNS, BATCH = 100_000, 5, 256


@contextlib.contextmanager
def backend_compilations() -> Iterator[list[str]]:
    """Names of the programs that XLA compiles within the block."""
    names: list[str] = []

    class Record(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found = re.search(r"Finished XLA compilation of (\S+)", record.getMessage())
            if found:
                names.append(found.group(1))

    handler, logger = Record(), logging.getLogger("jax._src.dispatch")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield names
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def lines_of(kernel: Any, data: tuple) -> tuple[int, float, float]:
    """Lines of the sampling program, CPU seconds to compile it, and CPU seconds of ``init``."""
    start = time.process_time()
    state = jax.block_until_ready(kernel.init(random.key(2), 500, None, data, {}))
    after_init = time.process_time()

    def loop(state: Any) -> Any:
        return lax.fori_loop(0, 1000, lambda _, s: kernel.sample(s, data, {}), state)

    lowered = jax.jit(loop).lower(state)
    before = time.process_time()
    text = lowered.compile().as_text()
    return len(text.splitlines()), time.process_time() - before, after_init - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-table", action="store_true", help="print only")
    arguments = parser.parse_args()
    X = random.normal(random.key(0), (NUM_ROWS, NUM_COLUMNS))
    y = random.bernoulli(random.key(1), jax.nn.sigmoid(X @ jnp.linspace(-1, 1, NUM_COLUMNS)))
    data = (X, y.astype(int))
    small = {"batch_size": BATCH}
    fixed = {**small, "step_size": 1e-5, "num_steps": 10}
    kernels = {
        "NUTS": lambda: NUTS(logistic),
        "SGRLD(batch_size=256)": lambda: SGRLD(logistic, **small),
        'SGRLD(metric="monge", batch_size=256)': lambda: SGRLD(logistic, metric="monge", **small),
        "SGHMC(control_variate=True, batch_size=256)": lambda: SGHMC(
            logistic, control_variate=True, **small
        ),
        "SGRLD(step_size=1e-5, num_steps=10, batch_size=256)": lambda: SGRLD(logistic, **fixed),
    }
    rows, base = [], None
    for name, make in kernels.items():
        jax.clear_caches()
        with backend_compilations() as programs:
            lines, seconds, first = lines_of(make(), data)
        again = lines_of(make(), data)[2]
        base = base or (lines, seconds, first + seconds, again + seconds)
        rows.append(
            f"| `{name}` | {lines:,} | {lines / base[0]:.2f} | {seconds / base[1]:.2f} | "
            f"{(first + seconds) / base[2]:.2f} | {(again + seconds) / base[3]:.2f} | "
            f"{len(programs)} |"
        )
    head = (
        f"Logistic regression, {NUM_ROWS:,} x {NUM_COLUMNS}, jax {jax.__version__}. Ratios are to "
        "NUTS: of lines, or of CPU seconds.\n\n"
        "| kernel | lines of HLO, sampling | ratio | compiling it | first `init` and compiling "
        "| second `init` and compiling | programs, first run |\n|---|---|---|---|---|---|---|\n"
    )
    text = head + "\n".join(rows) + "\n"
    print(text)
    if not arguments.no_table:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
