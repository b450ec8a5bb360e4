"""Calibration by simulation: the default kernels and the guide on small models.

A parameter is drawn from the prior and data from the model, and the kernel draws from the
posterior. If the draws are right, then the rank of the parameter among the draws is uniform (Talts
et al. 2018, Validating Bayesian inference algorithms with simulation-based calibration). simuk
draws from the prior and takes the ranks. Runs are NumPyro's `MCMC` under `jax.vmap`, with one
data set in each lane, so that a kernel is compiled once for each model. Kernels of this package do
not choose coordinates of groups under `jax.vmap`. Where they would, see `ONE_BY_ONE`, their runs
follow each other.

    pip install simuk==0.2.0
    python examples/benchmarks/calibration.py --cache DIR [--models NAMES] [--methods NAMES]

Writes docs/tables/calibration.md. ``--cache`` names a folder for finished cells, which are not
computed again. Other cells of the table stay as they are.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import TABLES, in_process, kept_cells, versions
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.distributions.transforms import OrderedTransform
from numpyro.infer import MCMC, NUTS, Predictive
from scipy.stats import binom, norm

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, RiemannianLaplace

TABLE = TABLES / "calibration.md"
WARMUP, DRAWS, KEPT = 500, 1000, 100
LENGTHS = {"num_warmup": WARMUP, "num_samples": DRAWS, "thinning": DRAWS // KEPT}
SIMULATIONS = 500
FEW = 100
"""Data sets of a cell that would take too long; see `data_sets`."""
LEVEL = 0.05
NULL = 100_000
"""Simulated sets of uniform ranks, for the bands."""
SLOW = 0.8
"""Effective draws over kept draws below which ranks are not those of independent draws."""

METHODS: dict[str, Callable[[Callable], Any]] = {
    "NUTS": lambda model: NUTS(model),
    "SGHMC": lambda model: SGHMC(model),
    "GGMC": lambda model: GGMC(model),
    "SGRLD": lambda model: SGRLD(model),
    "SGNHT": lambda model: SGNHT(model),
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


SLOWEST = "hierarchy not centred", "mixture", "random walk", "Gaussian process"
"""Models some of whose data sets need long draws. All lanes take as many steps as the slowest."""


ONE_BY_ONE = ("hierarchy centred",)
"""Models whose groups have coordinates that the kernel chooses."""


def data_sets(name: str, method: str) -> int:
    """Number of data sets. A guide's search for a mode is not one program."""
    return FEW if method == "guide" or name in SLOWEST else SIMULATIONS


# --- draws for many data sets


def lanes(kernel: Any, data: dict[str, Any], seed: int) -> dict[str, Any]:
    """Kept draws for each data set, shape (data sets, draws, ...), in one program."""
    mcmc = MCMC(kernel, progress_bar=False, **LENGTHS)

    def one(key: jax.Array, data: dict[str, Any]) -> Any:
        mcmc.run(key, **data)
        return mcmc.get_samples()

    keys = random.split(random.key(seed), len(next(iter(data.values()))))
    return jax.jit(jax.vmap(one))(keys, data)


def one_by_one(method: Any, data: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same from runs of a kernel, or fits of a guide, that follow each other."""

    def draws(key: jax.Array, data: dict[str, Any]) -> Any:
        if isinstance(method, RiemannianLaplace):
            params = method.fit(key, **data)
            return method.sample_posterior(random.fold_in(key, 1), params, sample_shape=(KEPT,))
        mcmc = MCMC(method, progress_bar=False, **LENGTHS)
        mcmc.run(key, **data)
        return mcmc.get_samples()

    found = [
        jax.tree.map(np.asarray, draws(key, {name: x[k] for name, x in data.items()}))
        for k, key in enumerate(random.split(random.key(seed), len(next(iter(data.values())))))
    ]
    return jax.tree.map(lambda *x: np.stack(x), *found)


def simulate(name: str, method: str, seed: int = 1) -> dict[str, Any]:
    """Ranks of every scalar, shape (simulations, scalars), its name and effective draws."""
    try:
        import simuk
        import xarray
    except ImportError as error:
        raise ImportError("calibration.py needs simuk: pip install simuk==0.2.0") from error

    model = MODELS[name]
    made = METHODS[method](model)
    chooses = method != "NUTS" and name in ONE_BY_ONE
    draw = one_by_one if chooses or method == "guide" else lanes

    class SBC(simuk.SBC):
        """Simulation-based calibration with draws for all data sets at once."""

        def _get_prior_predictive_samples_numpyro(self) -> tuple[dict, dict]:
            prior, data = super()._get_prior_predictive_samples_numpyro()
            self.prior = {n: np.asarray(prior[n]) for n in self.var_names}
            self.draws = jax.tree.map(np.asarray, draw(made, data, seed))
            return self.prior, data

        def _get_posterior_samples_numpyro(self, prior_predictive_draw: dict) -> dict:
            at = slice(self._simulations_complete, self._simulations_complete + 1)
            return {
                n: xarray.DataArray(x[at], dims=("chain", *(f"axis {k}" for k in range(1, x.ndim))))
                for n, x in self.draws.items()
            }

    # simuk sees by an example which sites are data
    example = Predictive(model, num_samples=1)(random.key(0))
    sbc = SBC(
        NUTS(model),
        num_simulations=data_sets(name, method),
        seed=seed,
        data_dir={n: example[n][0] for n in inspect.signature(model).parameters},
    )
    sbc.run_simulations()
    found: dict[str, list] = {"ranks": [], "names": [], "ess": []}
    for site in sbc.var_names:
        prior = sbc.prior[site].reshape(sbc.num_simulations, -1)
        ranks = sbc.simulations["prior_sbc"][site].values.reshape(prior.shape)
        draws = sbc.draws[site].reshape(*sbc.draws[site].shape[:2], -1)
        for k in np.flatnonzero(prior.std(0) > 1e-6):  # a Cholesky factor has constants
            ess = effective_sample_size(draws[None, ..., k].swapaxes(1, 2))
            found["ess"].append(float(np.nanmedian(ess)))
            found["ranks"].append(ranks[:, k].tolist())
            found["names"].append(f"{site}[{k}]" if prior.shape[1] > 1 else site)
    return found


# --- uniform ranks

SHARE = (np.arange(KEPT) + 1) / (KEPT + 1)
"""Of uniform ranks, those up to each number below ``KEPT``."""
SCORES = norm.ppf((np.arange(KEPT + 1) + 0.5) / (KEPT + 1))
"""Normal scores of the ranks."""


class Departures(NamedTuple):
    """How far ranks are from uniform ones, one number for each scalar.

    Attributes:
        tail: minus the least tail probability of the ECDF at any of its points.
        mean: mean of the normal scores: how far draws are too low, in posterior sds.
        spread: variance of the normal scores over that of uniform ranks, less 1.
    """

    tail: np.ndarray
    mean: np.ndarray
    spread: np.ndarray


def departures(histograms: np.ndarray) -> Departures:
    """Of the histograms of ranks from 0 to ``KEPT``, shape (scalars, ``KEPT`` + 1)."""
    simulations = int(histograms[0].sum())
    low, high = tail_tables(simulations)
    counts, at = histograms.cumsum(-1)[:, :-1], np.arange(KEPT)
    tail = np.minimum(low[at, counts], high[at, counts]).min(-1)
    mean, square = (histograms @ SCORES**k / simulations for k in (1, 2))
    return Departures(-tail, mean, (square - mean**2) / (SCORES**2).mean() - 1)


@functools.cache
def tail_tables(simulations: int) -> tuple[np.ndarray, np.ndarray]:
    """P(count <= n) and P(count >= n) at each point of the ECDF, for all counts n."""
    counts = np.arange(simulations + 1)
    laws = counts, simulations, SHARE[:, None]
    return binom.cdf(*laws), binom.sf(counts - 1, *laws[1:])


@functools.cache
def null(simulations: int) -> Departures:
    """Of uniform ranks, the sizes of departures in ascending order.

    The band is that of Saeilynoja, Buerkner, Vehtari (2022, algorithm 1), by simulation.
    """
    rng = np.random.default_rng(0)
    uniform = np.full(KEPT + 1, 1 / (KEPT + 1))
    parts = [departures(rng.multinomial(simulations, uniform, 1000)) for _ in range(NULL // 1000)]
    tail, mean, spread = map(np.concatenate, zip(*parts, strict=True))
    return Departures(np.sort(tail), np.sort(np.abs(mean)), np.sort(np.abs(spread)))


def histograms(ranks: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(x, minlength=KEPT + 1) for x in ranks])


def p_value(ranks: np.ndarray) -> float:
    """That all scalars have uniform ranks, by three departures and Bonferroni's bound."""
    found, of_null = departures(histograms(ranks)), null(ranks.shape[1])
    largest = found.tail.max(), np.abs(found.mean).max(), np.abs(found.spread).max()
    at_least = [NULL - np.searchsorted(x, y) for x, y in zip(of_null, largest, strict=True)]
    return min(1.0, 3 * len(ranks) * (min(at_least) + 1) / (NULL + 1))


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
{(2 * FEW) ** -0.5:.2f} with {FEW}). p-values are from simultaneous bands of the ECDF and from the
scores, by Bonferroni's bound. In bold: less than {LEVEL:g} over the number of cells that should be
right. Empty cells were not run. "ESS": the {KEPT} kept draws of the worst parameter are worth less
than {SLOW * KEPT:.0f} in half of the runs, and its ranks too spread, also for a right kernel.
"""


def cell(found: dict[str, Any], level: float) -> str:
    ranks, ess = np.asarray(found["ranks"]), min(found["ess"])
    p, off = p_value(ranks), departures(histograms(ranks))
    bias, sd = -off.mean[np.abs(off.mean).argmax()], 1 / np.sqrt(1 + off.spread)
    text = f"{max(p, 1e-4):.1g}" if p < 0.1 else f"{p:.2f}"
    text = f"**{text}**" if p < level else text
    slow = f", ESS {ess:.0f}" if ess < SLOW * KEPT else ""
    return f"{text}; {bias:+.2f}; {sd[np.abs(np.log(sd)).argmax()]:.2f}{slow}"


def table(found: dict[tuple[str, str], dict[str, Any]]) -> str:
    kept = kept_cells(TABLE)
    lines = [f"| model | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
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
