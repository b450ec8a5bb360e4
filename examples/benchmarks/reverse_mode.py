"""Models whose density has reverse-mode derivatives only: means, sds and seconds beside NUTS's.

    python examples/benchmarks/reverse_mode.py [--limit 300] [--no-table]

The models are a growth curve solved by ``jax.experimental.ode.odeint``, the same curve solved by
diffrax with its default adjoint, and a regression with a link function that has a custom_vjp. Each
run is a process of its own. Its seconds include start and compilation. A run is ended after
``--limit`` seconds. Errors are differences of means in NUTS's sds, and ratios of sds, of the worst
parameter. Prints a Markdown table and writes it to docs/tables/reverse_mode.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from jax.experimental.ode import odeint
from numpyro.infer import MCMC, NUTS

from numpyro_geom import GGMC, SGHMC, SGRLD

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "reverse_mode.md"
TIMES = jnp.linspace(0, 4, 9)
CAPACITY = 3.0
KERNELS = {
    "NUTS": NUTS,
    "SGHMC": SGHMC,
    "GGMC": GGMC,
    'SGRLD, metric="monge"': lambda model: SGRLD(model, metric="monge"),
}


@jax.custom_vjp
def softplus(x):
    return jax.nn.softplus(x)


softplus.defvjp(lambda x: (softplus(x), x), lambda x, u: (u * jax.nn.sigmoid(x),))


def growth(rate, start):
    """The logistic growth curve by JAX's solver."""
    field = lambda y, t, rate: rate * y * (1 - y / CAPACITY)  # noqa: E731
    return odeint(field, start, TIMES, rate, rtol=1e-5, atol=1e-5, mxstep=100)


def growth_by_diffrax(rate, start):
    import diffrax

    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, rate: rate * y * (1 - y / CAPACITY)),
        diffrax.Tsit5(),
        t0=0.0,
        t1=4.0,
        dt0=0.1,
        y0=start,
        args=rate,
        saveat=diffrax.SaveAt(ts=TIMES),
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
        max_steps=256,
        throw=False,
    ).ys


def curve(solve):
    def model(y):
        rate = numpyro.sample("rate", dist.LogNormal(0, 0.5))
        start = numpyro.sample("start", dist.LogNormal(0, 0.5))
        sd = numpyro.sample("sd", dist.HalfNormal(0.5))
        with numpyro.plate("times", TIMES.size):
            numpyro.sample("y", dist.Normal(solve(rate, start), sd), obs=y)

    noise = 0.1 * random.normal(random.key(0), TIMES.shape)
    return model, (CAPACITY / (1 + (CAPACITY / 0.6 - 1) * jnp.exp(-0.9 * TIMES)) + noise,)


def counts():
    X = random.normal(random.key(0), (300, 3))
    y = random.poisson(random.key(1), softplus(X @ jnp.array([0.5, -0.3, 0.2]) + 1))

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", X.shape[0]) as i:
            numpyro.sample("y", dist.Poisson(softplus(X[i] @ w + b)), obs=y[i])

    return model, (X, y)


MODELS = {
    "odeint": lambda: curve(growth),
    "diffrax, default adjoint": lambda: curve(growth_by_diffrax),
    "custom_vjp": counts,
}


def one(model: str, kernel: str) -> None:
    """Print seconds, means and sds of one run."""
    fn, args = MODELS[model]()
    mcmc = MCMC(KERNELS[kernel](fn), num_warmup=500, num_samples=1000, progress_bar=False)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(2), *args)
    draws = [np.reshape(x, (1000, -1)) for _, x in sorted(mcmc.get_samples().items())]
    flat, seconds = np.concatenate(draws, axis=1), time.perf_counter() - start
    print(json.dumps([seconds, [*map(float, flat.mean(0))], [*map(float, flat.std(0))]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one run")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "KERNEL"), help="a single run")
    parser.add_argument("--no-table", action="store_true", help="print only")
    arguments = parser.parse_args()
    if arguments.one:
        one(*arguments.one)
        return
    lines = [
        f"500 draws of warm-up and 1,000 draws, one chain, jax {jax.__version__}.\n",
        "| model | kernel | seconds | ratio | largest error of a mean, sds | ratios of sds |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for model in MODELS:
        truth: Any = None
        for kernel in KERNELS:
            command = [sys.executable, __file__, "--one", model, kernel]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True, timeout=arguments.limit
                )
            except subprocess.TimeoutExpired:
                lines.append(f"| {model} | `{kernel}` | more than {arguments.limit:.0f} | | | |")
                print(lines[-1], flush=True)
                continue
            seconds, mean, sd = json.loads(done.stdout.splitlines()[-1])
            mean, sd = np.array(mean), np.array(sd)
            truth = truth or (seconds, mean, sd)
            error, ratio = np.abs(mean - truth[1]) / truth[2], sd / truth[2]
            lines.append(
                f"| {model} | `{kernel}` | {seconds:.1f} | {seconds / truth[0]:.2f} | "
                f"{error.max():.2f} | {ratio.min():.2f} to {ratio.max():.2f} |"
            )
            print(lines[-1], flush=True)
    if not arguments.no_table:
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
