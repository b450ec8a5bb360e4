"""Importance weights of `RiemannianLaplace` on logistic regression: how much they correct.

Draws use the Fisher metric from the Euclidean mode, float64 and standardised inputs, as in
riemannian_laplace.py. The reference is NUTS. For each data set, the table has the shape k of the
tail of the weights, their effective sample size, and the largest error of a coordinate's mean and
sd, without and with weights, in posterior standard deviations. It also has the error of exact draws
with the same effective sample sizes: the expected largest of D absolute standard errors.

    python examples/laplace_weights.py --data-dir FOLDER [--draws 4000] [--write]
    python examples/laplace_weights.py --quick

Data come from `FOLDER/logistic_<name>.npz` (arrays X and y), or from scikit-learn's breast cancer
data with ``--targets breast-cancer``. The variable NUMPYRO_GEOM_DATA names a default folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_value
from riemannian_laplace import TARGETS, Target

from numpyro_geom import RiemannianLaplace

TABLE = Path(__file__).parents[1] / "docs" / "tables" / "laplace_weights.md"
NAMES = ("ripley", "pima", "heart", "australian", "german")
SMALL = "breast-cancer"


class Row(NamedTuple):
    """One data set; errors are the largest over coordinates, in posterior sd.

    Attributes:
        name: name of the data.
        size: D.
        shape: Pareto shape of the weights.
        ess: effective sample size of the weights.
        mean: errors of the mean, without and with weights.
        sd: relative errors of the sd, without and with weights.
        floor: errors of exact draws of the same sizes, of the mean and of the sd.
    """

    name: str
    size: int
    shape: float
    ess: float
    mean: tuple[float, float]
    sd: tuple[float, float]
    floor: tuple[float, float]


def reference_draws(target: Target, mode: np.ndarray, key: jax.Array, count: int) -> np.ndarray:
    """NUTS, four chains, shape (4, count / 4, D)."""
    near = init_to_value(values={"theta": jnp.asarray(mode)})
    mcmc = MCMC(
        NUTS(target.model, dense_mass=True, init_strategy=near),
        num_warmup=500,
        num_samples=count // 4,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(key, *target.args)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["theta"])


def run(name: str, target: Target, num_draws: int, num_reference: int) -> Row:
    """One data set."""
    key_fit, key_draw, key_reference = random.split(random.key(0), 3)
    guide = RiemannianLaplace(target.model, mode="euclidean")
    params = guide.fit(key_fit, *target.args)
    draws = guide.draw(key_draw, params, sample_shape=(num_draws,), log_weight=True)
    reference = reference_draws(
        target, np.asarray(params["auto_loc"]), key_reference, num_reference
    )
    theta, size = np.asarray(draws.unconstrained), reference.shape[-1]
    exact = reference.reshape(-1, size)
    centre, spread = exact.mean(axis=0), exact.std(axis=0)
    log_weight = np.asarray(draws.log_weight)
    weight = np.exp(log_weight - log_weight.max())
    errors = []
    for w in (np.ones(num_draws), weight):
        w = w / w.sum()
        mean = w @ theta
        sd = np.sqrt(w @ (theta - mean) ** 2)
        errors.append((np.abs(mean - centre) / spread, np.abs(sd / spread - 1)))
    ess = float(weight.sum() ** 2 / np.sum(weight**2))
    many = effective_sample_size(reference), effective_sample_size((reference - centre) ** 2)
    noise = [np.sqrt(1 / ess + 1 / n.min()) for n in many]
    # the expected largest of D absolute standard normal values
    normal = np.abs(np.random.default_rng(0).normal(size=(20_000, size))).max(axis=1).mean()
    return Row(
        name,
        size,
        float(draws.pareto_k),
        ess,
        (errors[0][0].max(), errors[1][0].max()),
        (errors[0][1].max(), errors[1][1].max()),
        # a Gaussian's sd has 1 / sqrt(2) of the error of its mean
        (float(normal * noise[0]), float(normal * noise[1] / 2**0.5)),
    )


def table(rows: Sequence[Row], num_draws: int, num_reference: int) -> str:
    """Markdown."""
    lines = [
        f"Fisher metric, float64, standardised inputs, {num_draws:,} draws against "
        f"{num_reference:,} of NUTS; errors are the largest over coordinates, in posterior sd.",
        "",
        "| data | D | k | effective draws | mean, plain | mean, weighted | of exact draws | "
        "sd, plain | sd, weighted | of exact draws |",
        "|---" * 10 + "|",
    ]
    lines += [
        f"| {r.name} | {r.size} | {r.shape:.2f} | {r.ess:,.0f} | {r.mean[0]:.3f} | "
        f"{r.mean[1]:.3f} | {r.floor[0]:.3f} | {r.sd[0]:.3f} | {r.sd[1]:.3f} | {r.floor[1]:.3f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the data sets and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", default=os.environ.get("NUMPYRO_GEOM_DATA"))
    parser.add_argument("--targets", nargs="+", choices=[*NAMES, SMALL], default=list(NAMES))
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--reference", type=int, default=20_000)
    parser.add_argument("--write", action="store_true", help=f"write the table to {TABLE.name}")
    parser.add_argument("--quick", action="store_true", help="few draws, five columns")
    options = parser.parse_args(arguments)
    if min(options.draws, options.reference) < 100:
        parser.error("--draws and --reference must be at least 100")
    if options.quick:
        options.targets, options.draws, options.reference = [SMALL], 400, 2000
    folder = None if options.data_dir is None else Path(options.data_dir)
    rows = []
    with jax.enable_x64(True):
        for name in options.targets:
            try:
                target = TARGETS[name](folder)
            except (OSError, ValueError, ImportError) as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            if options.quick:
                X, y = target.args
                chosen = X[:, jnp.array([0, 1, 4, 8, -1])]
                target = dataclasses.replace(target, args=(chosen, y))
            rows.append(run(name, target, options.draws, options.reference))
            print(rows[-1], flush=True)
    if not rows:
        sys.exit("no data set could be loaded: see above, or try --quick")
    text = table(rows, options.draws, options.reference)
    print(f"\n{text}")
    if options.write:
        TABLE.write_text(text)
    return rows


if __name__ == "__main__":
    main()
