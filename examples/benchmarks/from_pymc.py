"""A formula of Bambi by PyMC's NUTS, by `SGHMC` on PyMC's log density, and as a NumPyro model.

It needs `pip install pymc bambi "matplotlib<3.11"`, in an environment of its own, and writes
`docs/tables/from_pymc.md`. Seconds are of the process: building, compiling, warm-up and draws.

    python examples/benchmarks/from_pymc.py
"""

from __future__ import annotations

import time
from datetime import date
from importlib.metadata import version

import bambi
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pymc as pm
from common import TABLES, head
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from pymc.sampling.jax import get_jaxified_logp

from numpyro_geom import SGHMC

TABLE = TABLES / "from_pymc.md"
EFFECTS = np.array([1.0, -1.0, 0.5, 0.0, 0.2])
LENGTH = {"num_warmup": 1000, "num_samples": 1000, "progress_bar": False}


def pymc_model(table):
    """The PyMC model of the formula."""
    formula = bambi.Model("y ~ a + b + c + d + e", table)
    formula.build()
    return formula.backend.model


def nuts(table):
    """PyMC's own sampler."""
    model = pymc_model(table)
    settings = {"chains": 1, "cores": 1, "progressbar": False, "random_seed": 1}
    posterior = pm.sample(1000, tune=1000, model=model, **settings).posterior
    return {v.name: posterior[v.name].values for v in model.free_RVs}


def density(table):
    """PyMC's log density as an energy."""
    model = pymc_model(table)
    names = [v.name for v in model.value_vars]
    log_density = get_jaxified_logp(model)
    start = {name: jnp.asarray(x) for name, x in model.initial_point().items()}
    mcmc = MCMC(SGHMC(potential_fn=lambda z: -log_density([z[n] for n in names])), **LENGTH)
    mcmc.run(jax.random.key(0), init_params=start)
    return mcmc.get_samples(group_by_chain=True)


def native(table):
    """The same model in NumPyro, with priors as wide as those that Bambi chooses."""
    X, y = (jnp.asarray(table[x].to_numpy(), jnp.float32) for x in (list("abcde"), "y"))
    spread = float(y.std())

    def model(X, y):
        intercept = numpyro.sample("intercept", dist.Normal(0, 2.5 * spread))
        w = numpyro.sample("w", dist.Normal(0, 2.5 * spread).expand([X.shape[1]]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(spread))
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("y", dist.Normal(intercept + X[i] @ w, sigma), obs=y[i])

    mcmc = MCMC(SGHMC(model), **LENGTH)
    mcmc.run(jax.random.key(0), X, y)
    return mcmc.get_samples(group_by_chain=True)


METHODS = {"PyMC's NUTS": nuts, "`potential_fn`": density, "in NumPyro": native}


def main() -> None:
    """Run all sizes, and write the table."""
    lines = head("rows", "way", "seconds", "ESS", "ESS per second")
    for rows in (2_000, 50_000, 500_000):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(rows, len(EFFECTS)))
        table = pd.DataFrame(X, columns=list("abcde"))
        table["y"] = X @ EFFECTS + rng.normal(size=rows)
        for name, method in METHODS.items():
            start = time.process_time()
            draws = method(table)
            seconds = time.process_time() - start
            size = min(float(np.min(effective_sample_size(np.asarray(x)))) for x in draws.values())
            lines.append(
                f"| {rows:,} | {name} | {seconds:.1f} | {size:.0f} | {size / seconds:.0f} |"
            )
            print(lines[-1], flush=True)
    packages = ", ".join(f"{x} {version(x)}" for x in ("pymc", "bambi", "jax", "numpyro"))
    TABLE.write_text("\n".join([*lines, "", f"{date.today()}, one core, {packages}.", ""]))


if __name__ == "__main__":
    main()
