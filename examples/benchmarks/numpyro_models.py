"""Models like NumPyro's examples: each kernel with its default settings, compared with NUTS.

Each run has 4 vectorised chains of 1,000 draws after 1,000 of warm-up. The table has errors of
means and standard deviations against a long NUTS run in float64, and the verdict of `diagnose`.
Prints a Markdown table and writes it to docs/tables/numpyro_models.md.

    python examples/benchmarks/numpyro_models.py --cache DIR [--models NAMES] [--kernels NAMES]

``--cache`` names a folder for reference draws and results. Stored results are not computed again,
and the table has all of them; its other cells stay. Every run is a separate process that is stopped
after ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import posteriors as P
import small_data as S
from common import TABLES, head, in_process, kept_cells, versions
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import NUTS
from numpyro_posteriors import MODELS, REFERENCES

from numpyro_geom import GGMC, SGHMC, SGRLD

TABLE = TABLES / "numpyro_models.md"
WRONG = 0.2, 0.15
"""Error of a mean in standard deviations, and of a standard deviation, that must be flagged."""
RIGHT = 0.1, 0.07
"""Errors up to which a flag is a false alarm."""
TOO_FEW = ("R-hat", "effective sample size", "relaxation times")
"""Flags that ask for more draws. They are not false alarms for a run that is right by luck."""
REFERENCE_SECONDS = 1200

KERNELS: dict[str, Callable[[Callable], Any]] = {
    "NUTS": lambda model: NUTS(model),
    "SGRLD": lambda model: SGRLD(model),
    "SGHMC": lambda model: SGHMC(model),
    "GGMC": lambda model: GGMC(model),
}


def reference_draws(name: str, posterior: P.Posterior, folder: Path) -> dict[str, np.ndarray]:
    """Sites of a long NUTS run, shape (chains, draws, ...); kept in the folder."""
    path = folder / f"{name}.npz"
    if not path.exists():
        known = REFERENCES.get(name)
        np.savez(path, **(S.reference_run(name, posterior) if known is None else known()))
    with np.load(path) as found:
        return dict(found)


def result_path(folder: Path, name: str, label: str, seed: int) -> Path:
    """The file with a run's result."""
    return folder / f"{name} {label} {seed}.json"


def measure(name: str, label: str, seed: int, folder: Path) -> dict[str, Any]:
    """The reference if it is missing, and one run unless ``label`` is empty."""
    posterior = MODELS[name]()
    draws = np.asarray(posterior.scalars(reference_draws(name, posterior, folder)), float)
    if label:
        kernel = KERNELS[label](posterior.model)
        found = S.judge(posterior, kernel, S.moments(draws), seed)
        return found | {"rhat_reference": float(np.max(split_gelman_rubin(draws)))}
    return {}


def verdict(found: dict[str, Any]) -> str:
    """Whether the draws are right, and whether `diagnose` says so."""
    if "failed" in found:
        return "failed"
    errors, flagged = found["beyond_reference"], bool(found["flags"])
    too_few = any(name.startswith(TOO_FEW) for name in found["flags"])
    if any(error > bound for error, bound in zip(errors, WRONG, strict=True)):
        return "wrong, flagged" if flagged else "**wrong, not flagged**"
    if all(error <= bound for error, bound in zip(errors, RIGHT, strict=True)):
        return "right, too few draws" if too_few else "right, flagged" if flagged else "right"
    return "between, too few draws" if too_few else "between, flagged" if flagged else "between"


def cell(found: dict[str, Any]) -> str:
    """A cell of the table."""
    if "failed" in found:
        return found["failed"]
    said, gradients = verdict(found), found["gradients"] / S.CHAINS / S.DRAWS
    off = "" if said.startswith("right") else f" ({found['mean']:.2f} sd)"
    return f"{found['ess']:.0f} by {gradients:.1f}: {said}{off}"


HEADER = f"""\
Models as in NumPyro's examples (`examples/benchmarks/numpyro_posteriors.py`), default settings, 4
vectorized chains of 1,000 draws after 1,000 of warm-up, in float32. A cell has the ESS of the worst
scalar, gradients per draw, the verdict and, unless the run is right, the largest error of a mean in
sd, against 20,000 draws of NUTS in float64. A run is wrong where a mean is off by more than
{WRONG[0]:g} sd or an sd by more than {WRONG[1]:.0%}, and right within {RIGHT[0]:g} sd and
{RIGHT[1]:.0%}, beyond three Monte Carlo errors. "Flagged" is by `diagnose`. "Too few draws" is a
flag of R-hat, an effective sample size or the relaxation times.
"""


def table(folder: Path, seed: int) -> str:
    """All finished runs, as Markdown; other cells are those of the table as it is."""
    kept = kept_cells(TABLE)
    lines = head("model", *KERNELS)
    for name, make in MODELS.items():
        cells = []
        for label in KERNELS:
            path = result_path(folder, name, label, seed)
            found = json.loads(path.read_text()) if path.exists() else {}
            cells.append(cell(found) if found else kept.get((make().name, label), "–"))
        lines.append(f"| {make().name} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{versions()}\n"


def main() -> None:
    """Run what is requested and missing in the cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--models", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--kernels", help="some of " + ",".join(KERNELS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240, help="after which a run is stopped")
    parser.add_argument("--again", action="store_true", help="run also what the cache has")
    parser.add_argument(
        "--one", nargs=3, metavar=("MODEL", "KERNEL", "SEED"), help="in this process"
    )
    options = parser.parse_args()
    folder = options.cache
    folder.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        name, label, seed = options.one
        print(json.dumps(measure(name, label, int(seed), folder)))
        return

    def run(name: str, label: str, seconds: float) -> dict[str, Any]:
        one = ("--cache", folder, "--one", name, label, options.seed)
        return in_process(__file__, *one, seconds=seconds)

    for name in MODELS if options.models is None else options.models.split(","):
        if not (folder / f"{name}.npz").exists():
            run(name, "", REFERENCE_SECONDS)
        for label in KERNELS if options.kernels is None else options.kernels.split(","):
            path = result_path(folder, name, label, options.seed)
            if options.again or not path.exists():
                found = run(name, label, options.seconds)
                path.write_text(json.dumps(found))
                print(name, label, cell(found), found.get("flags"), flush=True)
    text = HEADER + "\n" + table(folder, options.seed)
    TABLE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
