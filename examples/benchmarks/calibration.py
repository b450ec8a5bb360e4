"""Calibration by simulation: the default kernels and the guide on small models.

`numpyro_geom.diagnostics.calibrate` draws parameters from the prior and data from the model, and
ranks the parameters among draws of the posterior. Runs are lanes of one program. Kernels of this
package do not choose coordinates of groups under `jax.vmap`. Where they would, see `ONE_BY_ONE`,
their runs follow each other.

    python examples/benchmarks/calibration.py --cache DIR [--models NAMES] [--methods NAMES]

Writes docs/tables/calibration.md. ``--cache`` names a folder for finished cells, which are not
computed again. Other cells of the table stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import TABLES, head, in_process, kept_cells, versions
from jax import random
from numpyro.distributions.transforms import OrderedTransform
from numpyro.infer import MCMC, NUTS
from scipy.stats import norm

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, Microcanonical, RiemannianLaplace
from numpyro_geom.diagnostics import calibrate

TABLE = TABLES / "calibration.md"
WARMUP, DRAWS, KEPT = 500, 1000, 100
LENGTHS = {"num_warmup": WARMUP, "num_samples": DRAWS, "thinning": DRAWS // KEPT}
SIMULATIONS = 500
FEW = 100
"""Data sets of a cell that would take too long; see `data_sets`."""
LEVEL = 0.05
SLOW = 0.8
"""Share of the kept draws, below which a cell says how many are ranked."""

METHODS: dict[str, Callable[[Callable], Any]] = {
    "NUTS": lambda model: NUTS(model),
    "SGHMC": lambda model: SGHMC(model),
    "GGMC": lambda model: GGMC(model),
    "SGRLD": lambda model: SGRLD(model),
    "SGNHT": lambda model: SGNHT(model),
    "Microcanonical": lambda model: Microcanonical(model),
    "guide": lambda model: RiemannianLaplace(model),
    "temperature 1.3": lambda model: SGHMC(model, temperature=1.3),
}
WRONG = "temperature 1.3"
"""This method must fail. NUTS is a check of the script."""


# --- models. An argument with the name of an observed site is None where data are drawn.

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(40, 3)), jnp.float32)
GROUP = jnp.asarray(np.repeat(np.arange(8), 4))
PLACE = jnp.asarray(np.sort(RNG.uniform(-1, 1, 20)), jnp.float32)
GONE = np.arange(30) % 3 == 0


def regression(law: Callable[[Any], Any], scale: float = 1.0) -> Callable:
    """A regression on three columns, where ``law`` has the linear predictor."""

    def model(y: Any = None) -> None:
        b = numpyro.sample("b", dist.Normal(0, 0.5 * scale))
        w = numpyro.sample("w", dist.Normal(0, scale).expand([3]).to_event(1))
        of_rows = law(X @ w + b)  # its own sites are outside of the plate
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", of_rows, obs=y)

    return model


def normal(mean: Any) -> Any:
    return dist.Normal(mean, numpyro.sample("sigma", dist.HalfNormal(1)))


def student(mean: Any) -> Any:
    return dist.StudentT(3, mean, numpyro.sample("sigma", dist.HalfNormal(1)))


def gamma(log_mean: Any) -> Any:
    shape = numpyro.sample("shape", dist.LogNormal(0.5, 0.5))
    return dist.Gamma(shape, shape * jnp.exp(-log_mean))


def hierarchy(centred: bool) -> Callable:
    """Eight groups of four rows."""

    def model(y: Any = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", 8):
            if centred:
                x = numpyro.sample("x", dist.Normal(mu, tau))
            else:
                x = mu + tau * numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", len(GROUP)):
            numpyro.sample("y", dist.Normal(x[GROUP], 1), obs=y)

    return model


def mixture(y: Any = None) -> None:
    """Two normals with ordered means."""
    ordered = dist.TransformedDistribution(
        dist.Normal(0, 2).expand([2]).to_event(1), OrderedTransform()
    )
    mean = numpyro.sample("mean", ordered)
    share = numpyro.sample("share", dist.Beta(4, 4))
    law = dist.MixtureSameFamily(
        dist.Categorical(jnp.stack([share, 1 - share])), dist.Normal(mean, 1)
    )
    with numpyro.plate("rows", 60):
        numpyro.sample("y", law, obs=y)


def truncated(y: Any = None) -> None:
    """A site between two bounds, and one above a bound."""
    mean = numpyro.sample("mean", dist.TruncatedNormal(0, 1, low=-0.5, high=1))
    sd = numpyro.sample("sd", dist.TruncatedNormal(1, 0.5, low=0.5))
    with numpyro.plate("rows", 10):
        numpyro.sample("y", dist.Normal(mean, sd), obs=y)


def simplex(y: Any = None) -> None:
    """Shares of four classes among 20 counts."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.full(4, 1.5)))
    numpyro.sample("y", dist.Multinomial(20, share), obs=y)


def level(y: Any = None) -> None:
    """A random walk with noise."""
    step = numpyro.sample("step", dist.LogNormal(-1, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1, 0.5))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(step, 20))
    numpyro.sample("y", dist.Normal(walk, noise).to_event(1), obs=y)


def gaussian_process(y: Any = None) -> None:
    """Variance, length and noise, at 20 points."""
    variance = numpyro.sample("variance", dist.LogNormal(0, 0.5))
    length = numpyro.sample("length", dist.LogNormal(-1, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.5))
    away = (PLACE[:, None] - PLACE) / length
    covariance = variance * jnp.exp(-(away**2) / 2) + noise**2 * jnp.eye(len(PLACE))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(PLACE)), covariance), obs=y)


def missing(seen: Any = None, y: Any = None) -> None:
    """A regression, where a third of the column is missing."""
    m = numpyro.sample("m", dist.Normal(0, 1))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    count = int(GONE.sum())
    seen = numpyro.sample("seen", dist.Normal(m, 1).expand([30 - count]).to_event(1), obs=seen)
    gone = numpyro.sample("gone", dist.Normal(m, 1).expand([count]).to_event(1))
    x = jnp.zeros(30).at[np.flatnonzero(GONE)].set(gone)
    x = x.at[np.flatnonzero(~GONE)].set(seen)
    with numpyro.plate("rows", 30):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * x, sigma), obs=y)


def correlation(y: Any = None) -> None:
    """The scales and the correlation matrix of three columns."""
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.5).expand([3]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(3, 2.0))
    law = dist.MultivariateNormal(jnp.zeros(3), scale_tril=scale[:, None] * root)
    with numpyro.plate("rows", 15):
        numpyro.sample("y", law, obs=y)


MODELS = {
    "normal regression": regression(normal),
    "logistic regression": regression(lambda x: dist.Bernoulli(logits=x)),
    "Poisson regression": regression(lambda x: dist.Poisson(jnp.exp(x)), 0.5),
    "gamma regression": regression(gamma),
    "Student t regression": regression(student),
    "hierarchy not centred": hierarchy(centred=False),
    "hierarchy centred": hierarchy(centred=True),
    "mixture": mixture,
    "truncated sites": truncated,
    "simplex": simplex,
    "random walk": level,
    "Gaussian process": gaussian_process,
    "missing data": missing,
    "correlation": correlation,
}


SLOWEST = (
    "hierarchy not centred",
    "hierarchy centred",
    "mixture",
    "random walk",
    "Gaussian process",
)
"""Models some of whose data sets need long draws. All lanes take as many steps as the slowest."""


ONE_BY_ONE = ("hierarchy centred",)
"""Models whose groups have coordinates that the kernel chooses."""


def data_sets(name: str, method: str) -> int:
    """Number of data sets. A guide's search for a mode is not one program."""
    return FEW if method == "guide" or name in SLOWEST else SIMULATIONS


def simulate(name: str, method: str, seed: int = 1) -> dict[str, Any]:
    """Shares of draws below each scalar, shape (data sets, scalars), and their p-value."""
    model = MODELS[name]
    made: Any = METHODS[method](model)

    def of_guide(key: jax.Array, **data: Any) -> Any:
        params = made.fit(key, **data)
        return made.sample_posterior(random.fold_in(key, 1), params, sample_shape=(KEPT,))

    guide, chooses = method == "guide", method != "NUTS" and name in ONE_BY_ONE
    draw = of_guide if guide else MCMC(made, progress_bar=False, **LENGTHS)
    how = {"num_datasets": data_sets(name, method), "lanes": not (guide or chooses)}
    found = calibrate(model, draw, random.key(seed), **how)
    return {
        "shares": found.shares.values.tolist(),
        "p": float(found.p),
        "draws": int(found.num_draws),
    }


# --- table


def path_of(folder: Path, name: str, method: str) -> Path:
    return folder / f"{name} {method}.json"


def results(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    paths = {(n, m): path_of(folder, n, m) for n in MODELS for m in METHODS}
    return {key: json.loads(x.read_text()) for key, x in paths.items() if x.exists()}


HEADER = f"""\
{SIMULATIONS:,} data sets from the prior predictive of each model, at least {FEW} for the guide and
for {", ".join(SLOWEST)}. Default settings, one chain, {WARMUP} draws of warm-up, every
{DRAWS // KEPT}th of {DRAWS:,} draws. Runs are lanes of one program, but on {", ".join(ONE_BY_ONE)}
those of this package, which chooses coordinates of groups outside of `jax.vmap` only. A cell has
the p-value of uniform ranks of all parameters, the largest bias of a parameter in posterior sds,
and the sd farthest from the right one, over the right one: normal scores of the ranks, with
standard errors of {SIMULATIONS**-0.5:.2f} and {(2 * SIMULATIONS) ** -0.5:.2f} ({FEW**-0.5:.2f} and
{(2 * FEW) ** -0.5:.2f} with {FEW}). p-values are those of `calibrate`. In bold: less than {LEVEL:g}
over the number of cells that should be right. Empty cells were not run. "ESS": the worst parameter
was ranked among fewer than {SLOW * KEPT:.0f} draws, because half of the runs have no more.
"""


def cell(found: dict[str, Any], level: float) -> str:
    scores = norm.ppf(np.asarray(found["shares"]))
    bias, sd = -scores.mean(0), 1 / scores.std(0)
    p, bias = found["p"], bias[np.abs(bias).argmax()]
    text = f"{max(p, 1e-4):.1g}" if p < 0.1 else f"{p:.2f}"
    text = f"**{text}**" if p < level else text
    slow = f", ESS {found['draws']}" if found["draws"] < SLOW * KEPT else ""
    return f"{text}; {bias:+.2f}; {sd[np.abs(np.log(sd)).argmax()]:.2f}{slow}"


def table(found: dict[tuple[str, str], dict[str, Any]]) -> str:
    kept = kept_cells(TABLE)
    lines = head("model", *METHODS)
    right = [key for key in found if key[1] != WRONG]
    level = LEVEL / len(right)
    for name in MODELS:
        cells = [
            cell(found[name, m], level) if (name, m) in found else kept.get((name, m), "")
            for m in METHODS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{versions()}\n"


def main() -> None:
    """Run what is requested and missing in the cache, each cell in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--models", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--methods", help=f"some of {','.join(METHODS)}")
    parser.add_argument("--seconds", type=float, default=900, help="wall time of a cell")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "METHOD"), help="in this process")
    options = parser.parse_args()
    folder = options.cache
    folder.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        begin = time.process_time()
        found = simulate(*options.one) | {"seconds": time.process_time() - begin}
        print(json.dumps(found))
        return
    for name in MODELS if options.models is None else options.models.split(","):
        for method in METHODS if options.methods is None else options.methods.split(","):
            path = path_of(folder, name, method)
            if not path.exists():
                quiet = os.environ | {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
                one = ("--cache", folder, "--one", name, method)
                found = in_process(__file__, *one, seconds=options.seconds, env=quiet)
                if "failed" in found:
                    print(name, method, found["failed"], flush=True)
                    continue
                path.write_text(json.dumps(found))
            if path.exists():
                found = json.loads(path.read_text())
                print(
                    f"{name}, {method}: {cell(found, LEVEL)}, {found['seconds']:.0f} s", flush=True
                )
    found = results(folder)
    text = HEADER + "\n" + table(found)
    TABLE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
