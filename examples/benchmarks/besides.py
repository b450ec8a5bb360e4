"""Models that people ask about in public, as a new user would run them: `SGHMC` against NUTS.

Kinds of models from NumPyro's issues and forum, with data generated here. Each method is a process
with default settings and 4 vectorized chains of 1,000 draws after 1,000 of warm-up. The table has
the differences of means and standard deviations beyond four Monte Carlo errors of both runs, what
`diagnose` says, and effective draws a second over those of NUTS. Prints a Markdown table and writes
it to docs/tables/besides.md. A second table, docs/tables/besides_seconds.md, has what `diagnose`,
`to_inference_data` and `print_summary` take after a run, also for the models of compile.py.

    python examples/benchmarks/besides.py --cache DIR [--models NAMES] [--methods SGHMC]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import compile as C
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import small_data as S
from jax import random
from numpyro import handlers
from numpyro.contrib.module import random_flax_module, random_nnx_module
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import CircularReparam

from numpyro_geom import SGHMC, diagnose, print_summary, to_inference_data

SHOWN = 5
"""Models in the table of the reports' seconds."""
TABLE = Path(__file__).parents[2] / "docs" / "tables" / "besides.md"
METHODS: dict[str, Callable[[Callable], Any]] = {
    "NUTS": lambda model: NUTS(model),
    "SGHMC": lambda model: SGHMC(model),
}
RIGHT = 0.1
"""Largest difference of a mean in sds, and of the logarithm of an sd, of a run that is right."""
ERRORS = 4
RNG = np.random.default_rng(0)


def data(*shape: int) -> Any:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def rows(law: Any, y: Any) -> None:
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", law(i), obs=jnp.asarray(y)[i])


def network(kind: str) -> Callable:
    """A small network as a module of Flax."""
    X = data(80, 2)
    y = np.sin(2 * X[:, 0]) + 0.3 * data(80)

    def model() -> None:
        if kind == "nnx":
            from flax import nnx

            class Net(nnx.Module):
                def __init__(self, rngs: Any) -> None:
                    self.one = nnx.Linear(2, 3, rngs=rngs)
                    self.two = nnx.Linear(3, 1, rngs=rngs)

                def __call__(self, x: Any) -> Any:
                    return self.two(jnp.tanh(self.one(x)))

            net = random_nnx_module("net", Net(nnx.Rngs(0)), dist.Normal(0, 1))
        else:
            from flax import linen

            module = linen.Sequential([linen.Dense(3), jnp.tanh, linen.Dense(1)])
            net = random_flax_module("net", module, dist.Normal(0, 1), inputs=X)
        mean = numpyro.deterministic("mean", net(jnp.asarray(X))[:, 0])
        rows(lambda i: dist.Normal(mean[i], 0.3), y)

    return model


def horseshoe(regularised: bool) -> Callable:
    """100 rows, 20 columns."""
    X = data(100, 20)
    y = X[:, :4] @ np.array([2.0, -1.0, 0.5, 0.25]) + data(100)

    def model() -> None:
        tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([20]).to_event(1))
        if regularised:
            slab = numpyro.sample("slab", dist.InverseGamma(2, 8))
            local = jnp.sqrt(slab * local**2 / (slab + tau**2 * local**2))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([20]).to_event(1))
        w = numpyro.deterministic("w", tau * local * z)
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        rows(lambda i: dist.Normal(X[i] @ w, sigma), y)

    return model


def ordinal() -> Callable:
    """Ordered logistic regression with five classes, 300 rows."""
    X = data(300, 3)
    y = np.digitize(X @ np.array([1.0, -0.5, 0.0]) + RNG.logistic(size=300), [-2, -0.5, 0.5, 2])

    def model() -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        cuts = dist.TransformedDistribution(
            dist.Normal(0, 2).expand([4]).to_event(1), dist.transforms.OrderedTransform()
        )
        cuts = numpyro.sample("cuts", cuts)
        rows(lambda i: dist.OrderedLogistic(X[i] @ w, cuts), y)

    return model


def rare() -> Callable:
    """Logistic regression, 50,000 rows with an event in 10,000."""
    X = data(50_000, 3)
    y = np.zeros(50_000, np.int32)
    y[np.argsort(-X @ np.array([1.0, 0, 0]) - RNG.gumbel(size=50_000))[:5]] = 1

    def model() -> None:
        b = numpyro.sample("b", dist.Normal(0, 10))
        w = numpyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
        rows(lambda i: dist.Bernoulli(logits=X[i] @ w + b), y)

    return model


def wide() -> Callable:
    """Logistic regression, 100,000 rows of 50 columns."""
    X = data(100_000, 50)
    y = (RNG.uniform(size=100_000) < 1 / (1 + np.exp(-X @ data(50) / 5))).astype(np.int32)

    def model() -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        rows(lambda i: dist.Bernoulli(logits=X[i] @ w), y)

    return model


def masks() -> Callable:
    """Two plates that cross, with a mask of the cells that were seen."""
    a, b, seen = data(12, 1), data(20), RNG.uniform(size=(12, 20)) < 0.6
    y = np.where(seen, a + b + 0.5 * data(12, 20), 0)

    def model() -> None:
        sd = numpyro.sample("sd", dist.HalfNormal(1).expand([3]).to_event(1))
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("subjects", 12, dim=-2):
            a = numpyro.sample("a", dist.Normal(0, sd[0]))
        with numpyro.plate("items", 20, dim=-1):
            b = numpyro.sample("b", dist.Normal(0, sd[1]))
        plates = numpyro.plate("subjects", 12, dim=-2), numpyro.plate("items", 20, dim=-1)
        with plates[0], plates[1], handlers.mask(mask=jnp.asarray(seen)):
            numpyro.sample("y", dist.Normal(mu + a + b, sd[2]), obs=jnp.asarray(y))

    return model


def censored() -> Callable:
    """Weibull times, some censored, by `numpyro.factor`."""
    x = data(150)
    time_to = np.exp(0.5 + 0.7 * x) * RNG.weibull(1.5, 150)
    event = time_to < 3
    t = jnp.asarray(np.minimum(time_to, 3), jnp.float32)

    def model() -> None:
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        shape = numpyro.sample("shape", dist.HalfNormal(2))
        law = dist.Weibull(jnp.exp(b[0] + b[1] * x), shape)
        survival = -((t / law.scale) ** shape)
        numpyro.factor("y", jnp.where(event, law.log_prob(t), survival).sum())

    return model


def laplace_prior() -> Callable:
    """Regression with a Laplace prior (the lasso), 50 rows, 10 columns."""
    X = data(50, 10)
    y = X[:, 0] - X[:, 1] + data(50)

    def model() -> None:
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        w = numpyro.sample("w", dist.Laplace(0, tau).expand([10]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        rows(lambda i: dist.Normal(X[i] @ w, sigma), y)

    return model


def latin() -> Callable:
    """Three crossed effects on a few hundred rows, with uniform priors of their sds."""
    group = jnp.asarray(RNG.integers(0, (5, 8, 12), (300, 3)))
    y = sum(data(n)[group[:, k]] for k, n in enumerate((5, 8, 12))) + data(300)

    def model() -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        sd = numpyro.sample("sd", dist.Uniform(0, 10).expand([4]).to_event(1))
        mean = mu
        for k, n in enumerate((5, 8, 12)):
            with numpyro.plate(f"groups {k}", n):
                effect = numpyro.sample(f"effect {k}", dist.Normal(0, sd[k]))
            mean = mean + effect[group[:, k]]
        rows(lambda i: dist.Normal(mean[i], sd[3]), y)

    return model


def circular() -> Callable:
    """Clock times: a von Mises mean, through `CircularReparam`."""
    y = RNG.vonmises(1.0, 2.0, 100).astype(np.float32)

    def model() -> None:
        loc = numpyro.sample("loc", dist.VonMises(0, 1))
        concentration = numpyro.sample("concentration", dist.HalfNormal(5))
        rows(lambda i: dist.VonMises(loc, concentration), y)

    return handlers.reparam(model, config={"loc": CircularReparam()})


def improper() -> Callable:
    """Flat priors by `ImproperUniform`."""
    x, y = data(60), 1 + 2 * data(60)

    def model() -> None:
        real, positive = dist.constraints.real, dist.constraints.positive
        a = numpyro.sample("a", dist.ImproperUniform(real, (), ()))
        b = numpyro.sample("b", dist.ImproperUniform(real, (), ()))
        sigma = numpyro.sample("sigma", dist.ImproperUniform(positive, (), ()))
        rows(lambda i: dist.Normal(a + b * x[i], sigma), y)

    return model


def zero_sum() -> Callable:
    """Effects that sum to zero."""
    group, y = jnp.asarray(RNG.integers(0, 8, 100)), data(100)

    def model() -> None:
        effect = numpyro.sample("effect", dist.ZeroSumNormal(1.0, (8,)))
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        rows(lambda i: dist.Normal(mu + effect[group[i]], sigma), y)

    return model


def spatial() -> Callable:
    """Counts of 49 areas on a grid, with a conditional autoregression (CAR)."""
    at = np.arange(49)
    beside = (np.abs(at[:, None] // 7 - at // 7) + np.abs(at[:, None] % 7 - at % 7)) == 1
    y = RNG.poisson(np.exp(1 + 0.5 * np.sin(at / 7)))

    def model() -> None:
        tau = numpyro.sample("tau", dist.Gamma(3, 1))
        alpha = numpyro.sample("alpha", dist.Uniform(0, 0.99))
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        law = dist.CAR(jnp.full(49, mu), alpha, tau, jnp.asarray(beside, jnp.float32))
        log_rate = numpyro.sample("log_rate", law)
        rows(lambda i: dist.Poisson(jnp.exp(log_rate[i])), y)

    return model


def change_point() -> Callable:
    """A rate that changes at an unknown year, summed out by hand."""
    y = RNG.poisson(np.where(np.arange(80) < 35, 3.0, 1.0))

    def model() -> None:
        rate = numpyro.sample("rate", dist.Exponential(1).expand([2]).to_event(1))
        each = dist.Poisson(rate).log_prob(jnp.asarray(y)[:, None])
        before, after = jnp.cumsum(each[:, 0]), jnp.cumsum(each[::-1, 1])[::-1]
        numpyro.factor("y", jax.nn.logsumexp(before[:-1] + after[1:]))

    return model


def zero_inflated() -> Callable:
    """Zero-inflated negative binomial counts."""
    x = data(200)
    y = RNG.poisson(np.exp(1 + 0.5 * x) * RNG.gamma(2, 0.5, 200)) * (RNG.uniform(size=200) < 0.7)

    def model() -> None:
        gate = numpyro.sample("gate", dist.Beta(1, 1))
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        size = numpyro.sample("size", dist.HalfNormal(5))
        law = dist.NegativeBinomial2
        rows(lambda i: dist.ZeroInflatedDistribution(
            law(jnp.exp(b[0] + b[1] * x[i]), size), gate=gate), y)  # fmt: skip

    return model


def garch() -> Callable:
    """A GARCH(1, 1) of 300 returns, by `lax.scan`."""
    r = 0.1 * data(300)

    def model() -> None:
        level = numpyro.sample("level", dist.HalfNormal(0.1))
        share = numpyro.sample("share", dist.Dirichlet(jnp.array([2.0, 5.0, 2.0])))

        def step(v: Any, x: Any) -> Any:
            return level**2 * share[2] + share[0] * x**2 + share[1] * v, v

        variance = jax.lax.scan(step, jnp.float32(0.01), jnp.asarray(r))[1]
        rows(lambda i: dist.Normal(0, jnp.sqrt(variance[i])), r)

    return model


def beta_regression() -> Callable:
    """Shares near 0 and 1."""
    x = data(150)
    mean = 1 / (1 + np.exp(-1 - x))
    y = np.clip(RNG.beta(5 * mean, 5 - 5 * mean), 1e-4, 1 - 1e-4).astype(np.float32)

    def model() -> None:
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        phi = numpyro.sample("phi", dist.Gamma(2, 0.2))
        m = jax.nn.sigmoid(b[0] + b[1] * jnp.asarray(x))
        rows(lambda i: dist.BetaProportion(m[i], phi), y)

    return model


MODELS: dict[str, Callable[[], Callable]] = {
    "nnx module": lambda: network("nnx"),
    "flax module": lambda: network("flax"),
    "horseshoe": lambda: horseshoe(False),
    "regularised horseshoe": lambda: horseshoe(True),
    "ordinal regression": ordinal,
    "rare events, 50,000 rows": rare,
    "logistic, 100,000 x 50": wide,
    "crossing plates with a mask": masks,
    "censored survival": censored,
    "Laplace prior": laplace_prior,
    "three crossed effects": latin,
    "von Mises, CircularReparam": circular,
    "ImproperUniform priors": improper,
    "ZeroSumNormal": zero_sum,
    "CAR of 49 areas": spatial,
    "change point, summed out": change_point,
    "zero-inflated negative binomial": zero_inflated,
    "GARCH by scan": garch,
    "beta regression": beta_regression,
}


def bound(build: Callable[[], tuple]) -> Callable[[], Callable]:
    """A model of compile.py with its arguments."""

    def model() -> Callable:
        fn, args = build()
        return partial(fn, *args)

    return model


TIMED = MODELS | {name.replace("_", " "): bound(build) for name, build in C.MODELS.items()}
AFTER: dict[str, Callable[[MCMC], Any]] = {
    "diagnose": diagnose,
    "to_inference_data": to_inference_data,
    "print_summary": print_summary,
}


def after(mcmc: MCMC) -> tuple[dict[str, float], Any]:
    """Processor seconds of each report of a run, in this order, and what `diagnose` says."""
    seconds, results = {}, []
    for name, report in AFTER.items():
        begin = time.process_time()
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            results.append(report(mcmc))
        seconds[name] = time.process_time() - begin
    return seconds, results[0]


def measure(name: str, method: str, path: Path, seed: int = 1) -> None:
    """One run: moments of its scalars, seconds, and flags."""
    model = TIMED[name]()
    begin = time.process_time()
    mcmc = MCMC(
        METHODS[method](model),
        num_warmup=S.DRAWS,
        num_samples=S.DRAWS,
        num_chains=S.CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        mcmc.run(random.key(seed), extra_fields=("num_steps",))
    found = jax.device_get(mcmc.get_samples(group_by_chain=True))
    seconds = time.process_time() - begin
    sites = ["mean"] if "mean" in found else [n for n in found if n not in ("z", "loc_unwrapped")]
    traced = handlers.trace(handlers.seed(model, 0)).get_trace()
    parts = []
    for site in sites:
        x = np.asarray(found[site], float).reshape(S.CHAINS, S.DRAWS, -1)
        support = getattr(traced[site].get("fn"), "support", None)
        support = getattr(support, "base_constraint", support)
        # their tails may have no variance
        parts.append(np.log(x) if support is dist.constraints.positive else x)
    draws = np.concatenate(parts, -1)
    kept = S.moments(draws) | {
        "ess": float(effective_sample_size(draws).min()),
        "rhat": float(split_gelman_rubin(draws).max()),
        "seconds": seconds,
        "steps": float(np.mean(mcmc.get_extra_fields()["num_steps"])),
        "warned": [str(x.message)[:200] for x in warned],
    }
    if method != "NUTS":
        kept["after"], report = after(mcmc)
        kept["flags"] = [f"{check.name} {check.figure}" for check in report.flagged]
        kept["verdict"] = report.verdict
    path.write_text(json.dumps(kept))


def line(name: str, found: dict[str, dict[str, Any]]) -> str:
    """A row of the table."""
    known, ours = (found[m] for m in METHODS)
    ran = [x.get("failed", f"{x.get('ess', 0):.0f}, {x.get('rhat', 0):.2f}") for x in (known, ours)]
    seconds = " / ".join(f"{x['seconds']:.0f}" if "seconds" in x else "-" for x in (known, ours))
    flags = ours.get("flags", [])
    more = f", and {len(flags) - 1} more" if len(flags) > 1 else ""
    flagged = f"{''.join(flags[:1])}{more}"
    if "failed" in ours or "failed" in known:
        return f"| {name} | {ran[0]} | {ran[1]} | {seconds} | | | not compared | {flagged} |"
    mean, sd = (np.asarray([x[k] for x in (known, ours)]) for k in ("mean", "sd"))
    errors = [
        np.hypot(*(np.asarray(x[k]) for x in (known, ours))) for k in ("mean_error", "sd_error")
    ]
    away = np.abs(np.diff(mean, axis=0)[0]) / sd[0], np.abs(np.diff(np.log(sd), axis=0)[0])
    beyond = [float(np.max(x - ERRORS * e)) for x, e in zip(away, errors, strict=True)]
    same = max(beyond) <= RIGHT
    result = ("right" if same else "wrong") + (", flagged" if flags else "")
    result = "**wrong**" if result == "wrong" else result
    ratio = ours["ess"] / ours["seconds"] / (known["ess"] / known["seconds"])
    return (
        f"| {name} | {ran[0]} | {ran[1]} | {seconds} | {ratio:.2g} | "
        f"{away[0].max():.2f}, {away[1].max():.2f} | {result} | {flagged} |"
    )


HEADER = f"""\
Default settings, 4 vectorized chains of 1,000 draws after 1,000 of warm-up, float32. "ESS" is that
of the worst scalar in all chains together, with the largest R-hat. Seconds are processor seconds of
one core with compiling, and the ratio is that of ESS a second, also with compiling. Differences are
the largest of a mean, in posterior sds, and of the logarithm of an sd. "Right" means that no
difference is more than {RIGHT:g} beyond {ERRORS} Monte Carlo errors of both runs. Positive sites
are compared by their logarithms, and networks by their values at the data. The last column has the
first check that `diagnose` flags. A run of more than 300 processor seconds is stopped.

"""


def kept_lines() -> dict[str, str]:
    """Lines of the table as it is, by model."""
    text = TABLE.read_text() if TABLE.exists() else ""
    return {x.split(" | ")[0].removeprefix("| "): x for x in text.splitlines() if " | " in x}


def table(folder: Path) -> str:
    kept = kept_lines()
    lines = [
        "| model | NUTS: ESS, R-hat | SGHMC | seconds, NUTS / SGHMC | ESS a second over NUTS | "
        "differences | result | flagged |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        paths = {m: path_of(folder, name, m) for m in METHODS}
        if all(x.exists() for x in paths.values()):
            lines.append(line(name, {m: json.loads(x.read_text()) for m, x in paths.items()}))
        elif name in kept:
            lines.append(kept[name])
    return "\n".join(lines) + f"\n\njax {jax.__version__}, numpyro {numpyro.__version__}.\n"


def seconds_table(folder: Path) -> str:
    """Processor seconds of a run and of its reports, where these take the largest share of it."""
    known = {}
    for name in TIMED:
        path = path_of(folder, name, "SGHMC")
        found = json.loads(path.read_text()) if path.exists() else {}
        if "after" in found:
            known[name] = found["seconds"], found["after"].values()
    shares = {name: max(reports) / run for name, (run, reports) in known.items()}
    late = sum(share > 1 for share in shares.values())
    lines = ["| model | run | " + " | ".join(AFTER) + " |", "|---|---|" + "---|" * len(AFTER)]
    for name in sorted(shares, key=shares.__getitem__, reverse=True)[:SHOWN]:
        run, reports = known[name]
        lines.append(f"| {name} | " + " | ".join(f"{x:.1f}" for x in (run, *reports)) + " |")
    return (
        "`SGHMC(model)`, 4 vectorized chains of 1,000 draws after 1,000 of warm-up. Processor "
        "seconds of `mcmc.run` with compiling, and of each report after it, in this order, in one "
        f"process. Of {len(known)} models {late} had a report that took longer than the run. "
        "These had the largest shares:\n\n"
        + "\n".join(lines)
        + f"\n\njax {jax.__version__}, numpyro {numpyro.__version__}.\n"
    )


def path_of(folder: Path, name: str, method: str) -> Path:
    return folder / f"{name} {method}.json"


def main() -> None:
    """Run what is requested and missing in the cache, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--models", help=f"some of {'; '.join(TIMED)}, separated by semicolons")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seconds", type=int, default=300, help="processor seconds of a run")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "METHOD"), help="in this process")
    options = parser.parse_args()
    folder = options.cache
    folder.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        measure(*options.one, path_of(folder, *options.one))
        return
    for name in MODELS if options.models is None else options.models.split(";"):
        for method in options.methods:
            path = path_of(folder, name, method)
            if not path.exists():
                command = [sys.executable, __file__, "--cache", folder, "--one", name, method]
                most = partial(resource.setrlimit, resource.RLIMIT_CPU, 2 * (options.seconds,))
                done = subprocess.run(command, preexec_fn=most, stderr=subprocess.PIPE, text=True)
                lines = done.stderr.strip().splitlines() if done.returncode else []
                failed = [x for x in lines if not x.startswith(("-", "For simplicity"))][-1:]
                if done.returncode < 0:
                    failed = [f"not done in {options.seconds} s"]
                if failed:
                    path.write_text(json.dumps({"failed": failed[0][:200]}))
                print(name, method, *failed, flush=True)
    text = seconds_table(folder)
    TABLE.with_name("besides_seconds.md").write_text(text)
    print(text)
    if len(options.methods) == len(METHODS):
        text = HEADER + table(folder)
        TABLE.write_text(text)
        print(text)


if __name__ == "__main__":
    main()
