"""The cost of each automatic choice of `SGHMC(model)`: runs with and without given values.

Logistic regression of 20 columns whose scales differ by a factor of 1,000; 1,000 draws of warm-up
and 1,000 draws. Each run is a separate process, so that no run finds the compiled programs of
another. The first run makes all choices automatically. Each later run is given one more choice of
the first run: rows and control variate, the scale, step size and number of steps, the start. The
difference of two runs is the cost of that choice, with compilation. Prints a Markdown table and
writes it to docs/tables/automatic.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import random
from numpyro.infer import MCMC
from regression import logistic, rows

from numpyro_geom import SGHMC

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "automatic.md"
TOLD = {
    "nothing": (),
    "rows and control variate": ("batch_size", "control_variate"),
    "scale": ("inverse_mass_matrix", "adapt_mass_matrix"),
    "step size, friction, number of steps": ("step_size", "friction", "num_steps"),
    "start": ("init_params",),
}


def run(num_rows: int, told: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds of one run with these arguments, and the values that the next run can be given."""
    X, y = (jax.device_put(x) for x in rows(num_rows))
    arguments = dict(told)
    init_params = arguments.pop("init_params", None)
    matrix = arguments.get("inverse_mass_matrix")
    arguments |= {} if matrix is None else {"inverse_mass_matrix": np.asarray(matrix)}
    start = time.perf_counter()
    mcmc = MCMC(SGHMC(logistic, **arguments), num_warmup=1000, num_samples=1000, progress_bar=False)
    mcmc.run(
        random.key(0), X, y, init_params=init_params and {"w": np.asarray(init_params, np.float32)}
    )
    jax.block_until_ready(mcmc.get_samples())
    seconds = time.perf_counter() - start
    state, settings = mcmc.last_state, mcmc.sampler.settings
    found = {
        "batch_size": settings.batch_size,
        "control_variate": settings.control_variate,
        "inverse_mass_matrix": state.scale and state.scale.inverse_mass_matrix.tolist(),
        "adapt_mass_matrix": False,
        "step_size": float(state.step_size),
        "friction": float(state.dynamics.friction),
        "num_steps": int(state.num_steps),
        "init_params": np.asarray(mcmc.get_samples()["w"][-1]).tolist(),
    }
    return seconds, {name: told.get(name, found[name]) for name in found}


def of_a_process(num_rows: int, told: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """The same as `run`, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(told))
        command = [sys.executable, __file__, "--rows", str(num_rows), "--told", str(path)]
        subprocess.run(command, check=True)
        seconds, found = json.loads(path.read_text())
    return seconds, found


def lines(num_rows: int, repeats: int) -> list[str]:
    """Lines of the table."""
    seconds: dict[str, list[float]] = {name: [] for name in TOLD}
    found: dict[str, Any] = {}
    for _ in range(repeats):
        told: dict[str, Any] = {}
        for name, arguments in TOLD.items():
            told |= {argument: found[argument] for argument in arguments}
            taken, found = of_a_process(num_rows, told)
            seconds[name].append(taken)
    medians = [float(np.median(x)) for x in seconds.values()]
    rows_a_step = found["batch_size"] or num_rows
    head = f"{num_rows:,} ({rows_a_step:,} rows per step)"
    costs = [before - after for before, after in zip(medians, medians[1:], strict=False)]
    shares = " | ".join(f"{x:.1f} s, {x / medians[0]:.0%}" for x in costs)
    return [f"| {head} | {medians[0]:.1f} s | {shares} | {medians[-1]:.1f} s |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-table", action="store_true", help="print only")
    arguments = parser.parse_args()
    if arguments.told is not None:
        told = json.loads(arguments.told.read_text())
        arguments.told.write_text(json.dumps(run(arguments.rows[0], told)))
        return
    names = " | ".join([*TOLD][1:])
    text = f"| rows | run, nothing given | {names} | all given |\n|" + "---|" * (len(TOLD) + 2)
    for num_rows in arguments.rows:
        text += "\n" + "\n".join(lines(num_rows, arguments.repeats))
    text += f"\n\nMedians of {arguments.repeats} runs, one chain; jax {jax.__version__}.\n"
    print(text)
    if not arguments.no_table:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
