"""Sample with the installed package, and hold the time of its import against NumPyro's."""

from __future__ import annotations

import subprocess
import sys
import time

import jax
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_geom

MOST = 1.5
"""Times of `import numpyro` that `import numpyro_geom` may take."""


def model(y: jax.Array) -> None:
    """The mean of a normal distribution."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def seconds(module: str) -> float:
    """How long a new interpreter takes to import a module."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


if not numpyro_geom.__file__.startswith(sys.prefix):
    sys.exit(f"expected the installed package, got {numpyro_geom.__file__}")
y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
mcmc = MCMC(numpyro_geom.SGHMC(model), num_warmup=200, num_samples=200, progress_bar=False)
mcmc.run(jax.random.key(1), y)
mean = float(mcmc.get_samples()["mu"].mean())
if abs(mean - float(y.mean())) > 0.01:  # the posterior's sd, and 10 standard errors or so
    sys.exit(f"expected a posterior mean of {y.mean():.3f}, got {mean:.3f}")
times = [(seconds("numpyro"), seconds("numpyro_geom")) for _ in range(5)]
host, ours = map(min, zip(*times, strict=True))
print(f"mean {mean:.3f}; import numpyro {host:.2f} s, numpyro_geom {ours:.2f} s: {ours / host:.2f}")
sys.exit(ours > MOST * host)
