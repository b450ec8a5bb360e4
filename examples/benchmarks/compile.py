"""Cost of a short run of each kind of model, in a first and in a second process, against NUTS.

    python examples/benchmarks/compile.py [--models eight_schools gaussian_process] [--no-table]

A run has 300 draws of warm-up and 300 draws, so most of its time is start and compilation. Each run
is a process of its own, and its CPU seconds are those of ``MCMC.run``. The first process compiles
everything. The second finds the programs of the first in JAX's cache on disk. Memory is the peak of
the first process minus its memory before the run. The lines of each model are put into
docs/tables/compile.md when they are measured; other lines there stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from common import TABLES, head, in_process, memory
from jax import random
from numpyro.infer import MCMC, NUTS
from speed import logistic, logistic_rows

from numpyro_geom import GGMC, SGHMC, SGRLD

TABLE = TABLES / "compile.md"
KERNELS: dict[str, Callable] = {"NUTS": NUTS, "SGRLD": SGRLD, "SGHMC": SGHMC, "GGMC": GGMC}
DRAWS = 300


def eight_schools() -> tuple:
    effects = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    errors = jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])

    def model(y, sd):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", 8):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mu + tau * z, sd), obs=y)

    return model, (effects, errors)


def regression(of: Callable) -> tuple:
    """500 rows and five columns, with the likelihood ``of`` a linear predictor and a shape."""
    X = random.normal(random.key(0), (500, 5))
    y = jnp.round(jnp.exp(0.3 * X.sum(1) + 0.3 * random.normal(random.key(1), (500,))))

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([5]).to_event(1))
        shape = numpyro.sample("shape", dist.Gamma(2, 0.1))
        with numpyro.plate("rows", X.shape[0]) as i:
            numpyro.sample("y", of(X[i] @ w, shape), obs=y[i])

    return model, (X, y)


def scalar_sites(number: int) -> tuple:
    """A linear regression whose coefficients are one site each."""
    X = random.normal(random.key(0), (1000, number))
    y = random.normal(random.key(1), (1000,)) + X.sum(1) / number**0.5

    def model(X, y):
        w = [numpyro.sample(f"w{k}", dist.Normal(0, 1)) for k in range(number)]
        with numpyro.plate("rows", X.shape[0]) as i:
            numpyro.sample("y", dist.Normal(X[i] @ jnp.stack(w), 1.0), obs=y[i])

    return model, (X, y)


def network() -> tuple:
    """A network of 65 parameters, 3,000 rows."""
    from flax import linen as nn
    from numpyro.contrib.module import random_flax_module

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.tanh(nn.Dense(16)(x)))[..., 0]

    X = random.normal(random.key(0), (3000, 2))
    y = random.bernoulli(random.key(1), jax.nn.sigmoid(3 * jnp.sin(2 * X[:, 0]) + X[:, 1]))

    def model(X, y):
        net = random_flax_module("net", Network(), dist.Normal(0, 1), input_shape=(1, 2))
        with numpyro.plate("rows", X.shape[0]) as i:
            numpyro.sample("y", dist.Bernoulli(logits=net(X[i])), obs=y[i])

    return model, (X, y)


def gaussian_process() -> tuple:
    x = jnp.linspace(0, 5, 50)
    y = jnp.sin(2 * x) + 0.2 * random.normal(random.key(0), (50,))

    def model(x, y):
        amplitude = numpyro.sample("amplitude", dist.LogNormal(0, 1))
        width = numpyro.sample("width", dist.LogNormal(0, 1))
        noise = numpyro.sample("noise", dist.LogNormal(-1, 1))
        squares = ((x[:, None] - x) / width) ** 2
        cov = amplitude**2 * jnp.exp(-squares / 2) + (noise**2 + 1e-4) * jnp.eye(x.size)
        numpyro.sample("y", dist.MultivariateNormal(covariance_matrix=cov), obs=y)

    return model, (x, y)


MODELS: dict[str, Callable[[], tuple]] = {
    "logistic_569x30": lambda: (logistic, logistic_rows(569, 30)),
    "logistic_100000x20": lambda: (logistic, logistic_rows(100_000, 20)),
    "eight_schools": eight_schools,
    "negative_binomial": lambda: regression(
        lambda eta, shape: dist.NegativeBinomial2(jnp.exp(eta), shape)
    ),
    "student_t": lambda: regression(lambda eta, shape: dist.StudentT(1 + shape, eta, 1.0)),
    "sites_50": lambda: scalar_sites(50),
    "sites_200": lambda: scalar_sites(200),
    "sites_1000": lambda: scalar_sites(1000),
    "network_65": network,
    "gaussian_process": gaussian_process,
}


def one(model: str, kernel: str) -> None:
    """Print CPU seconds, seconds and megabytes of one run."""
    fn, args = MODELS[model]()
    jax.block_until_ready(args)
    mcmc = MCMC(KERNELS[kernel](fn), num_warmup=DRAWS, num_samples=DRAWS, progress_bar=False)
    before, start, wall = memory("VmHWM"), time.process_time(), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(2), *args)
        jax.block_until_ready(mcmc.last_state)
    found = time.process_time() - start, time.perf_counter() - wall, memory("VmHWM") - before
    print(json.dumps(found))


def measured(model: str, kernel: str, folder: str) -> tuple[float, float, float]:
    """`one` in a new process, which keeps its programs in a folder."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return tuple(in_process(__file__, "--one", model, kernel, env=environment))


def row_of(model: str) -> str:
    """The line of the table for one model."""
    found = {}
    for kernel in KERNELS:
        with tempfile.TemporaryDirectory() as folder:
            cold, _, megabytes = measured(model, kernel, folder)
            again, *_ = measured(model, kernel, folder)
        found[kernel] = cold, again, megabytes
        print(model, kernel, *found[kernel], flush=True)
    base, cells = found["NUTS"], [_title(model)]
    for k, (digits, shown) in enumerate(((1, KERNELS), (1, KERNELS), (0, ["NUTS", "SGHMC"]))):
        cells.append(f"{base[k]:,.{digits}f}")
        cells += [f"{found[name][k] / base[k]:.2f}" for name in shown if name != "NUTS"]
    return f"| {' | '.join(cells)} |"


def _title(model: str) -> str:
    return model.replace("_", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "KERNEL"), help="a single run")
    parser.add_argument("--no-table", action="store_true", help="print only")
    arguments = parser.parse_args()
    if arguments.one:
        one(*arguments.one)
        return
    ours, memories = ("SGRLD", "SGHMC", "GGMC"), ("megabytes: NUTS", "SGHMC")
    about = (
        f"{DRAWS} draws of warm-up and {DRAWS} draws, one chain, jax {jax.__version__}. CPU "
        "seconds of NUTS, and ratios to them.\n"
    )
    titles = "first process: NUTS", *ours, "second: NUTS", *ours, *memories
    top = [about, *head("model", *titles)]
    print("\n".join(top))
    for model in arguments.models:
        found = row_of(model)
        print(found)
        if not arguments.no_table:
            lines = TABLE.read_text().splitlines() if TABLE.exists() else []
            known = {m: [x for x in lines if x.startswith(f"| {_title(m)} |")] for m in MODELS}
            known[model] = [found]
            TABLE.write_text("\n".join([*top, *itertools.chain(*known.values())]) + "\n")


if __name__ == "__main__":
    main()
