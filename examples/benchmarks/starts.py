"""Where chains start: 100 starts on hierarchical posteriors and networks, compared with NUTS.

A start is the state after ``SGHMC(model).init`` with default settings, before the first draw. The
comparison is of its energy U, on all data and in unconstrained coordinates, and of its
hyperparameters with those of draws of NUTS. Prints a Markdown table and writes it to
docs/tables/starts.md.

    python examples/benchmarks/starts.py --cache DIR [--models NAMES]

``--cache`` names a folder for results and for reference draws, which `numpyro_models.py` shares.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro_posteriors as N
import posteriors as P
import small_data as S
from jax import random
from numpyro.infer.util import potential_energy, unconstrain_fn
from numpyro_models import reference_draws

from numpyro_geom import SGHMC

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "starts.md"
CHAINS = 100
TAIL = 0.001
"""Share of the reference's energies beyond each end of their range."""


class Case(NamedTuple):
    """A posterior, and what to compare besides the energy; None for the posterior's scalars."""

    make: Callable[[], P.Posterior]
    scalars: Callable[[dict[str, Any]], Any] | None = None


CASES: dict[str, Case] = {
    "schools-centred": Case(N.MODELS["schools-centred"], N.scalars_of("mu", logs=("tau",))),
    "schools": Case(N.MODELS["schools"], N.scalars_of("mu", logs=("tau",))),
    "baseball": Case(N.baseball, N.scalars_of("share", logs=("kappa",))),
    "radon": Case(S.radon, N.scalars_of("mu", "slope", "basement", logs=("tau", "sigma"))),
    "kidney": Case(S.kidney, N.scalars_of("a", "b", logs=("shape", "tau"))),
    "mortality": Case(N.mortality, N.scalars_of("level", "slope", logs=("between",))),
    "horseshoe": Case(N.horseshoe, N.scalars_of(logs=("tau", "precision"))),
    "volatility": Case(N.volatility, N.scalars_of(logs=("sigma", "nu"))),
    "network-small": Case(P.network),
    "network": Case(N.network),
    "network-wide": Case(lambda: N.network((50,), 30)),
    "network-deep": Case(lambda: N.network((10, 10), 40)),
}


def energies(posterior: P.Posterior, z: Any) -> np.ndarray:
    """U at unconstrained positions with one leading axis."""
    energy = jax.vmap(lambda z: potential_energy(posterior.model, posterior.args, {}, z))
    return np.asarray(jax.jit(energy)(z), float)


def judge(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """100 starts of a posterior."""
    case = CASES[name]
    posterior = case.make()
    draws = reference_draws(name, posterior, folder)
    start = time.perf_counter()
    kernel = SGHMC(posterior.model)
    keys = random.split(random.key(seed), CHAINS)
    state = kernel.init(keys, S.DRAWS, None, posterior.args, {})
    constrain = kernel.postprocess_fn(posterior.args, {})
    sites = jax.jit(jax.vmap(constrain))(state.z)
    seconds = time.perf_counter() - start

    known = {
        k: jnp.asarray(draws[k].reshape(-1, *draws[k].shape[2:]), x.dtype)
        for k, x in state.z.items()
    }
    unconstrain = jax.vmap(lambda x: unconstrain_fn(posterior.model, posterior.args, {}, x))
    reference = energies(posterior, jax.jit(unconstrain)(known))
    low, high = np.quantile(reference, [TAIL, 1 - TAIL])
    spread = reference.std()
    found = energies(posterior, state.z)
    scalars = posterior.scalars if case.scalars is None else case.scalars
    truth = S.moments(scalars(draws))
    values = np.asarray(scalars({k: x[None] for k, x in sites.items()})[0], float)
    off = np.abs(values - truth["mean"]) / truth["sd"]
    return {
        "title": posterior.name,
        "parameters": sum(x[0].size for x in jax.tree.leaves(state.z)),
        "reference": [low, float(np.median(reference)), high, spread],
        "energies": found.tolist(),
        "inside": float(np.mean((found > low - spread) & (found < high + spread))),
        "below": float(np.mean(found <= low - spread)),
        "off": off.max(1).tolist(),
        "seconds": seconds,
    }


HEADER = f"""\
{CHAINS} starts of `SGHMC(model)` on each posterior, default settings, before the first draw. A
start is inside if its energy U is between the {TAIL:.1%} and the {1 - TAIL:.1%} quantile of the
reference, widened by the reference's standard deviation. A start with less energy is below. A mode
of D dimensions lies about D / 2 below the median. A deviation is the distance from the reference's
mean in its standard deviations, of the worst hyperparameter, or of the worst value of a network at
five inputs. The reference is 20,000 draws of NUTS in float64, and for baseball the exact law.
"""


def table(done: dict[str, Any]) -> str:
    """All finished runs, as Markdown."""
    lines = [
        "| posterior | inside | below | deviation, median | largest |",
        "|---|---|---|---|---|",
    ]
    for name in CASES:
        if name in done:
            found = done[name]
            lines.append(
                f"| {found['title']} | {found['inside']:.0%} | {found['below']:.0%} | "
                f"{np.median(found['off']):.1f} | {max(found['off']):.1f} |"
            )
    return "\n".join(lines) + f"\n\njax {jax.__version__}, numpyro {numpyro.__version__}.\n"


def main() -> None:
    """Run what is requested, or what is missing in the cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--models", help=f"some of {','.join(CASES)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run also what the cache has")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    path = options.cache / "starts.json"
    done = json.loads(path.read_text()) if path.exists() else {}
    for name in CASES if options.models is None else options.models.split(","):
        if options.again or name not in done:
            done[name] = judge(name, options.cache, options.seed)
            path.write_text(json.dumps(done))
            print(
                table({name: done[name]}).splitlines()[2],
                f"{done[name]['seconds']:.0f} s",
                flush=True,
            )
    text = HEADER + "\n" + table(done)
    TABLE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
