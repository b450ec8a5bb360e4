"""Kinds of model from public trackers and forums: `SGHMC` by default, compared with NUTS.

Both have 4 vectorized chains and 500 draws of warm-up, in float32, and go on until 1,000 effective
draws. Models are written anew with generated data; the docstring of each says where it was asked
about. Prints a Markdown table and writes it to docs/tables/public_models.md.

    python examples/benchmarks/public_models.py [--models NAMES]
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import TABLES, chains, head, in_process, versions
from jax import random
from jax.scipy.stats import norm
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import NUTS

from numpyro_geom import SGHMC, diagnose

TABLE = TABLES / "public_models.md"
CHAINS, WARMUP, PART, ENOUGH, SECONDS = 4, 500, 250, 1000, 300
KERNELS: dict[str, Callable] = {"NUTS": NUTS, "SGHMC": SGHMC}
RIGHT, SURE = 0.1, 4
"""Error of a mean in sds, or of the log of an sd, and Monte Carlo errors that may be beyond it."""
FEWEST = 100
"""Effective draws of both methods for a comparison."""
EDGE = 1e-6
"""Distance of probabilities from 0 and 1."""

normal, half_normal = dist.Normal, dist.HalfNormal


def several(law: dist.Distribution, *shape: int) -> dist.Distribution:
    return law.expand(shape).to_event(len(shape))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def reaction_times() -> tuple:
    """Shifted log-normal times of 12 subjects, each with its own shift (brms 218, 1305)."""
    rng = np.random.default_rng(1)
    subject, slow = np.repeat(np.arange(12), 40), rng.integers(0, 2, 480)
    log_time = -1 - 0.2 * slow + 0.2 * rng.normal(size=12)[subject] + 0.4 * rng.normal(size=480)
    y = (0.2 + 0.05 * rng.uniform(size=12))[subject] + np.exp(log_time)
    low = np.array([y[subject == j].min() for j in range(12)])

    def model(subject: Any, slow: Any, low: Any, y: Any) -> None:
        a, b = (numpyro.sample(name, normal(0, 1)) for name in "ab")
        between, sigma = (numpyro.sample(name, half_normal(1)) for name in ("between", "sigma"))
        with numpyro.plate("subjects", len(low)):
            effect = numpyro.sample("effect", normal(0, between))
            shift = numpyro.sample("shift", dist.Uniform(0, low))
        with numpyro.plate("rows", len(y)):
            times = dist.LogNormal(a + effect[subject] + b * slow, sigma)
            numpyro.factor("y", times.log_prob(y - shift[subject]))

    return model, (subject, slow, low, y)


def errors_in_variables() -> tuple:
    """A regression on a covariate that is measured with error (brms 'me', PyMC's forum)."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=150)
    y, seen = 1 + 0.8 * x + 0.3 * rng.normal(size=150), x + 0.5 * rng.normal(size=150)

    def model(seen: Any, y: Any) -> None:
        mean, sd = numpyro.sample("mean", normal(0, 1)), numpyro.sample("sd", half_normal(1))
        a, b = (numpyro.sample(name, normal(0, 5)) for name in "ab")
        sigma = numpyro.sample("sigma", half_normal(1))
        with numpyro.plate("rows", len(y)) as i:
            x = numpyro.sample("x", normal(mean, sd))
            numpyro.sample("seen", normal(x, 0.5), obs=seen[i])
            numpyro.sample("y", normal(a + b * x, sigma), obs=y[i])

    return model, (seen, y)


def monotonic() -> tuple:
    """Two ordered factors whose steps are simplexes (brms 550, 1410)."""
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 5, 200), rng.integers(0, 4, 200)
    y = 1 + 2 * np.array([0, 0.1, 0.6, 0.7, 1])[first] + rng.normal(size=200)
    y -= np.array([0, 0.5, 0.9, 1])[second]

    def model(first: Any, second: Any, y: Any) -> None:
        b = numpyro.sample("b", several(normal(0, 5), 3))
        sigma = numpyro.sample("sigma", half_normal(2))
        simplexes = [numpyro.sample(f"steps{n}", dist.Dirichlet(jnp.ones(n))) for n in (4, 3)]
        one, two = (jnp.concatenate([jnp.zeros(1), jnp.cumsum(x)]) for x in simplexes)
        with numpyro.plate("rows", len(y)) as i:
            mean = b[0] + b[1] * one[first[i]] + b[2] * two[second[i]]
            numpyro.sample("y", normal(mean, sigma), obs=y[i])

    return model, (first, second, y)


def hidden_markov() -> tuple:
    """Three states with ordered means, by the forward algorithm (NumPyro 1010, PyMC 1077)."""
    rng, state = np.random.default_rng(4), [0]
    for _ in range(299):
        state.append(state[-1] if rng.uniform() < 0.9 else rng.integers(3))
    y = np.array([-2.0, 0, 2])[state] + 0.7 * rng.normal(size=300)
    ordered = dist.transforms.OrderedTransform()

    def model(y: Any) -> None:
        rows = numpyro.sample("rows", dist.Dirichlet(jnp.ones((3, 3)) + 3 * jnp.eye(3)).to_event(1))
        law = dist.TransformedDistribution(several(normal(0, 3), 3), ordered)
        mean, sd = numpyro.sample("mean", law), numpyro.sample("sd", several(half_normal(1), 3))
        emission = normal(mean, sd).log_prob(y[:, None])

        def step(alpha: Any, log_prob: Any) -> tuple:
            return jax.nn.logsumexp(alpha[:, None] + jnp.log(rows), 0) + log_prob, None

        alpha, _ = jax.lax.scan(step, emission[0] - jnp.log(3.0), emission[1:])
        numpyro.factor("y", jax.nn.logsumexp(alpha))

    return model, (y,)


def capture_recapture() -> tuple:
    """Cormack, Jolly and Seber: survival and recapture (NumPyro 701, Stan's examples 119)."""
    rng, (animals, years) = np.random.default_rng(5), (80, 7)
    first, y = rng.integers(0, years - 1, animals), np.zeros((animals, years), int)
    for n in range(animals):
        alive, y[n, first[n]] = True, 1
        for year in range(first[n] + 1, years):
            alive = alive and rng.uniform() < 0.8
            y[n, year] = alive and rng.uniform() < 0.6
    last = np.array([np.flatnonzero(x).max() for x in y])

    def model(y: Any, first: Any, last: Any) -> None:
        unit = several(dist.Uniform(0, 1), years - 1)
        phi, p = numpyro.sample("phi", unit), numpyro.sample("p", unit)

        def never(chi: Any, both: Any) -> tuple:
            chi = 1 - both[0] + both[0] * (1 - both[1]) * chi
            return chi, chi

        _, chi = jax.lax.scan(never, 1.0, (phi[::-1], p[::-1]))
        chi, year = jnp.concatenate([chi[::-1], jnp.ones(1)]), jnp.arange(1, years)
        with numpyro.plate("animals", len(y)) as i:
            known = (year > first[i][:, None]) & (year <= last[i][:, None])
            seen = jnp.where(y[i][:, 1:] == 1, jnp.log(p), jnp.log1p(-p))
            log_prob = jnp.where(known, jnp.log(phi) + seen, 0.0).sum(-1)
            numpyro.factor("y", log_prob + jnp.log(chi[last[i]]))

    return model, (y, first, last)


def occupancy() -> tuple:
    """Whether 120 sites are occupied, from 4 visits of each (PyMC's examples 836)."""
    rng = np.random.default_rng(6)
    x, w = rng.normal(size=120), rng.normal(size=(120, 4))
    there = rng.uniform(size=120) < sigmoid(0.3 + x)
    y = there[:, None] * (rng.uniform(size=(120, 4)) < sigmoid(0.7 * w - 0.5))

    def model(x: Any, w: Any, y: Any) -> None:
        a, b = (numpyro.sample(name, several(normal(0, 2), 2)) for name in "ab")
        with numpyro.plate("sites", len(y)) as i:
            law = dist.Bernoulli(logits=a[0] + a[1] * x[i])
            there = numpyro.sample("there", law, infer={"enumerate": "parallel"})
            seen = jax.nn.sigmoid(b[0] + b[1] * w[i]) * jnp.asarray(there)[..., None]
            law = dist.Bernoulli(jnp.clip(seen, EDGE, 1 - EDGE)).to_event(1)
            numpyro.sample("y", law, obs=y[i])

    return model, (x, w, y)


def multivariate_probit() -> tuple:
    """Three correlated answers of 100 people, with uniform latents (brms 1366, Stan's guide)."""
    rng = np.random.default_rng(7)
    X = np.stack([np.ones(100), rng.normal(size=100)], 1)
    root = np.linalg.cholesky([[1, 0.6, 0.2], [0.6, 1, 0.4], [0.2, 0.4, 1]])
    y = (X @ rng.normal(size=(2, 3)) + rng.normal(size=(100, 3)) @ root.T > 0).astype(int)

    def model(X: Any, y: Any) -> None:
        B = numpyro.sample("B", several(normal(0, 2), 2, 3))
        L = numpyro.sample("L", dist.LKJCholesky(3, 2.0))
        with numpyro.plate("rows", len(y)) as i:
            u = numpyro.sample("u", several(dist.Uniform(0, 1), 3))
            mean = X[i] @ B
            z, log_prob = mean[..., :0], 0.0
            for d in range(3):
                below = norm.cdf(-(mean[..., d] + (z * L[d, :d]).sum(-1)) / L[d, d])
                below, yes = jnp.clip(below, EDGE, 1 - EDGE), y[i][..., d] == 1
                share = jnp.where(yes, below + (1 - below) * u[..., d], below * u[..., d])
                log_prob += jnp.where(yes, jnp.log1p(-below), jnp.log(below))
                new = norm.ppf(jnp.clip(share, EDGE, 1 - EDGE))
                z = jnp.concatenate([z, new[..., None]], -1)
            numpyro.factor("y", log_prob)

    return model, (X, y)


def missing_entries() -> tuple:
    """A quarter of the entries of 80 vectors is missing (NumPyro 1150, PyMC's examples 461)."""
    rng = np.random.default_rng(8)
    root = np.linalg.cholesky([[1, 0.7, 0.3], [0.7, 1, 0.5], [0.3, 0.5, 1]])
    Y = rng.normal(size=(80, 3)) @ root.T * [1, 2, 0.5] + [0, 1, 2]
    missing = rng.uniform(size=Y.shape) < 0.25
    missing[missing.all(1)] = False
    where = np.nonzero(missing)
    Y[missing] = 0

    def model(Y: Any) -> None:
        mean = numpyro.sample("mean", several(normal(0, 5), 3))
        sd = numpyro.sample("sd", several(half_normal(2), 3))
        L = numpyro.sample("L", dist.LKJCholesky(3, 1.0))
        flat = dist.ImproperUniform(dist.constraints.real_vector, (), (missing.sum(),))
        full = Y.at[where].set(numpyro.sample("missing", flat))
        law = dist.MultivariateNormal(mean, scale_tril=sd[:, None] * L)
        with numpyro.plate("rows", len(Y)) as i:
            numpyro.factor("y", law.log_prob(full[i]))

    return model, (Y,)


def epidemic() -> tuple:
    """Susceptible, infected, recovered; negative binomial reports (Stan's case study)."""
    rng, (days, people) = np.random.default_rng(9), (30, 763.0)
    healthy, ill, reports = people - 2, 2.0, []
    for _ in range(days):
        new = 1.53 * healthy * ill / people
        healthy, ill = healthy - new, 0.5 * ill + new
        reports.append(rng.poisson(max(ill, 0.1) * rng.gamma(20) / 20))

    def model(y: Any) -> None:
        beta = numpyro.sample("beta", dist.LogNormal(0, 1))
        gamma = numpyro.sample("gamma", dist.LogNormal(-1, 1))
        spread = numpyro.sample("spread", dist.Exponential(5))
        first = numpyro.sample("first", dist.LogNormal(1, 1))

        def step(both: tuple, _: None) -> tuple:
            healthy, ill = both
            new = healthy * (1 - jnp.exp(-beta * ill / people))
            ill = ill * jnp.exp(-gamma) + new
            return (healthy - new, ill), ill

        _, infected = jax.lax.scan(step, (people - first, first), None, days)
        with numpyro.plate("days", days) as i:
            law = dist.NegativeBinomial2(infected[i] + 1e-5, 1 / spread)
            numpyro.sample("y", law, obs=y[i])

    return model, (np.array(reports),)


def ex_gaussian() -> tuple:
    """A normal plus an exponential error (brms 222, 1781)."""
    rng = np.random.default_rng(10)
    x = rng.normal(size=500)
    y = 3 + 0.5 * x + 0.5 * rng.normal(size=500) + rng.exponential(0.8, 500)

    def model(x: Any, y: Any) -> None:
        a, b = numpyro.sample("a", normal(3, 2)), numpyro.sample("b", normal(0, 2))
        s, t = numpyro.sample("s", half_normal(1)), numpyro.sample("t", half_normal(1))
        with numpyro.plate("rows", len(y)) as i:
            rest = y[i] - a - b * x[i]
            tail = norm.logcdf(rest / s - s / t)
            numpyro.factor("y", tail - jnp.log(t) + s**2 / (2 * t**2) - rest / t)

    return model, (x, y)


def growth_curves() -> tuple:
    """Logistic growth with an asymptote and a midpoint per subject (brms 'nl')."""
    rng, t = np.random.default_rng(12), np.linspace(0, 10, 8)
    top, middle = 10 + 1.5 * rng.normal(size=15), 5 + 0.7 * rng.normal(size=15)
    Y = top[:, None] * sigmoid((t - middle[:, None]) / 1.2) + 0.4 * rng.normal(size=(15, 8))

    def model(Y: Any) -> None:
        mean = numpyro.sample("mean", normal(jnp.array([10.0, 5.0]), 3).to_event(1))
        width = numpyro.sample("width", dist.LogNormal(0, 1))
        sd = numpyro.sample("sd", several(half_normal(2), 2))
        sigma = numpyro.sample("sigma", half_normal(1))
        with numpyro.plate("subjects", len(Y)) as i:
            top = numpyro.sample("top", normal(mean[0], sd[0]))
            middle = numpyro.sample("middle", normal(mean[1], sd[1]))
            curve = top[:, None] * jax.nn.sigmoid((t - middle[:, None]) / width)
            numpyro.sample("y", normal(curve, sigma).to_event(1), obs=Y[i])

    return model, (Y,)


def factor_analysis() -> tuple:
    """Two factors of eight columns, loadings with a positive diagonal (PyMC's, Stan's forums)."""
    rng, (rows, size, factors) = np.random.default_rng(11), (100, 8, 2)
    W = np.tril(rng.normal(size=(size, factors)))
    W[0, 0] = W[1, 1] = 1
    Y = rng.normal(size=(rows, factors)) @ W.T + 0.5 * rng.normal(size=(rows, size))
    below, on = np.tril_indices(size, -1, factors), np.arange(factors)

    def model(Y: Any) -> None:
        diagonal = numpyro.sample("diagonal", several(half_normal(1), factors))
        others = numpyro.sample("others", several(normal(0, 1), len(below[0])))
        sigma = numpyro.sample("sigma", several(half_normal(1), size))
        W = jnp.zeros((size, factors)).at[below].set(others).at[on, on].set(diagonal)
        with numpyro.plate("rows", len(Y)) as i:
            f = numpyro.sample("f", several(normal(0, 1), factors))
            numpyro.sample("y", normal(f @ W.T, sigma).to_event(1), obs=Y[i])

    return model, (Y,)


MODELS: dict[str, Callable[[], tuple]] = {
    f.__name__: f
    for f in (
        *(reaction_times, errors_in_variables, monotonic, hidden_markov, capture_recapture),
        *(occupancy, multivariate_probit, missing_entries, epidemic, ex_gaussian),
        *(growth_curves, factor_analysis),
    )
}


def scalars(draws: dict[str, Any]) -> np.ndarray:
    """Entries of all sites that vary, side by side; positive ones as logarithms."""
    found = []
    for _, x in sorted(draws.items()):
        x = np.asarray(x, float).reshape(*x.shape[:2], -1)
        x = x[..., np.ptp(x, (0, 1)) > 0]
        found.append(np.log(x) if (x > 0).all() else x)
    return np.concatenate(found, -1)


def moments(x: np.ndarray) -> tuple:
    """Means, sds, their Monte Carlo errors (of an sd, relative), and the fewest effective draws."""
    mean, sd = x.mean((0, 1)), x.std((0, 1))
    squares = ((x - mean) / sd) ** 2
    sizes = [np.maximum(effective_sample_size(v), 1) for v in (x, squares)]
    of_sd = squares.std((0, 1)) / sizes[1] ** 0.5 / 2
    return mean, sd, sd / sizes[0] ** 0.5, of_sd, float(np.minimum(*sizes).min())


def measure(name: str, kernel: str) -> dict[str, Any]:
    """One run: its moments, and all CPU seconds of the process until it has `ENOUGH` draws."""
    model, args = MODELS[name]()
    args = jax.tree.map(jnp.asarray, args)
    warnings.simplefilter("ignore")
    mcmc, parts, size = chains(KERNELS[kernel](model), WARMUP, PART, CHAINS), [], 0.0
    mcmc.warmup(random.key(0), *args)
    while size < ENOUGH and time.process_time() < SECONDS:
        mcmc.run(mcmc.post_warmup_state.rng_key, *args)
        mcmc.post_warmup_state = mcmc.last_state
        parts.append(mcmc.get_samples(group_by_chain=True))
        draws = jax.tree.map(lambda *x: np.concatenate(x, 1), *parts)
        *found, size = moments(scalars(draws))
    run = {"moments": [x.tolist() for x in found], "size": size, "seconds": time.process_time()}
    flags = [] if kernel == "NUTS" else diagnose(mcmc).flagged
    return run | {"flags": [f"{check.name} {check.figure}" for check in flags]}


def line(name: str, runs: dict[str, dict]) -> str:
    """A row of the table."""
    title, cells = name.replace("_", " "), []
    for run in runs.values():
        if "failed" in run:
            cells.append(run["failed"])
        else:
            text = f"{run['size']:.0f} in {run['seconds']:.0f} s"
            cells.append(text if run["size"] >= ENOUGH else f"not reached: {text}")
    if any("failed" in run for run in runs.values()):
        return f"| {title} | {' | '.join(cells)} |  |  |  |  |"
    (mean, sd, of_mean, of_sd), (truth, sd_truth, *errors) = (
        [np.array(x) for x in runs[kernel]["moments"]] for kernel in ("SGHMC", "NUTS")
    )
    shift, ratio = (mean - truth) / sd_truth, np.log(sd / sd_truth)
    errors = np.hypot(of_mean, errors[0]) / sd_truth, np.hypot(of_sd, errors[1])
    beyond = [np.abs(x) - SURE * e for x, e in zip((shift, ratio), errors, strict=True)]
    worst = [float(np.abs(x)[np.argmax(b)]) for x, b in zip((shift, ratio), beyond, strict=True)]
    result = "differs" if max(x.max() for x in beyond) > RIGHT else "right"
    least = min(run["size"] for run in runs.values())
    more = "too few draws" if least < FEWEST else result, "; ".join(runs["SGHMC"]["flags"])
    slow, fast = (run["size"] / run["seconds"] for run in runs.values())
    rate = f"{fast / slow:.1f}" if least >= ENOUGH else ""  # of runs that got there
    figures = rate, "{:.2f}, {:.2f}".format(*worst)
    return f"| {title} | {' | '.join([*cells, *figures, *more])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--one", nargs=2, help="a model and a kernel, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    known = {x.split(" | ")[0]: x for x in lines if x.startswith("| ")}
    for name in MODELS if options.models is None else options.models.split(","):
        cells = {k: in_process(__file__, "--one", name, k, seconds=2 * SECONDS) for k in KERNELS}
        new = line(name, cells)
        known[new.split(" | ")[0]] = new
        print(new, flush=True)
    rows = [known[key] for x in MODELS if (key := f"| {x.replace('_', ' ')}") in known]
    titles = "model", *KERNELS, "ratio", "differences", "result", "flagged"
    text = (
        f"A cell has the ESS of the worst scalar's mean or square, with {PART} draws of each "
        f"chain more until it is {ENOUGH}, and the CPU seconds of the process on one core. The "
        "ratio is that of ESS per second, `SGHMC` over NUTS. Differences are those of the scalar "
        "that is farthest beyond Monte Carlo error: of a mean in posterior sds, and of the "
        f"logarithm of an sd. A run is right if no difference is more than {RIGHT} beyond {SURE} "
        f"Monte Carlo errors of both; fewer than {FEWEST} effective draws of a method do not "
        f"tell. The last column has the flags of `diagnose` for the last {PART} draws of each "
        f"chain. None begin after {SECONDS} s.\n\n" + "\n".join([*head(*titles), *rows])
    )
    TABLE.write_text(f"{text}\n\n{versions()}\n")


if __name__ == "__main__":
    main()
