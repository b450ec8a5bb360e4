"""A hierarchical model with a latent value per group: the script of docs/tutorials/hierarchical.md.

    python examples/tutorial_hierarchical.py

It takes five minutes on one CPU core, and writes into the current folder.
The page shows the parts between marks. It does not show the code that takes times, nor any part
named "cost".
"""

import time

# --8<-- [start:imports]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_geom import SGHMC, diagnose, to_inference_data
from numpyro_geom.diagnostics import compare_draws

# --8<-- [end:imports]

# --8<-- [start:data]
num_some, num_rows, num_draws = 10_000, 400_000, 1_000
NUM_SCHOOLS = 30
rng = np.random.default_rng(0)
level = 0.5 * rng.normal(size=NUM_SCHOOLS)  # true effect of each school; tau is 0.5
share = 1.2 ** -np.arange(NUM_SCHOOLS)
school = rng.choice(NUM_SCHOOLS, num_rows, p=share / share.sum())
hours = rng.normal(size=num_rows).astype(np.float32)
score = level[school] + 0.3 * hours + rng.normal(size=num_rows)
school, hours, score = jnp.asarray(school), jnp.asarray(hours), jnp.asarray(score, jnp.float32)
pupils = np.bincount(school[:num_some], minlength=NUM_SCHOOLS)
print(f"a school has {pupils.min()} to {pupils.max():,} of the first {num_some:,} pupils")
# --8<-- [end:data]


# --8<-- [start:model]
def model(school, hours, score):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    noise = numpyro.sample("noise", dist.HalfNormal(2))
    with numpyro.plate("schools", NUM_SCHOOLS):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    with numpyro.plate("pupils", score.shape[0]) as i:
        mean = theta[school[i]] + slope * hours[i]
        numpyro.sample("score", dist.Normal(mean, noise), obs=score[i])


# --8<-- [end:model]


# --8<-- [start:function]
def run(kernel, rows):
    """Run four chains on the first rows."""
    mcmc = MCMC(
        kernel,
        num_warmup=num_draws,
        num_samples=num_draws,
        num_chains=4,
        chain_method="vectorized",
        jit_model_args=True,
        progress_bar=False,
    )
    data = school[:rows], hours[:rows], score[:rows]
    mcmc.run(jax.random.key(1), *data, extra_fields=("num_steps",))
    return mcmc


# --8<-- [end:function]

start = time.process_time()
# --8<-- [start:nuts]
nuts = run(NUTS(model), num_some)
# --8<-- [end:nuts]
jax.block_until_ready(nuts.get_samples())
nuts_seconds = time.process_time() - start

start = time.process_time()
# --8<-- [start:some]
some = run(SGHMC(model), num_some)
# --8<-- [end:some]
jax.block_until_ready(some.get_samples())
some_seconds = time.process_time() - start

# --8<-- [start:run]
print(compare_draws(some, nuts, var_names=["mu", "tau", "slope", "noise"]))
# --8<-- [end:run]

# --8<-- [start:diagnose]
print(diagnose(some))
# --8<-- [end:diagnose]

# --8<-- [start:shrinkage]
raw = np.bincount(school[:num_some], score[:num_some], NUM_SCHOOLS) / np.maximum(pupils, 1)
figure, ax = plt.subplots(figsize=(6, 3.5))
theta = np.asarray(some.get_samples()["theta"])
ax.axhline(0, color="#808080", linewidth=0.5)
ax.plot(pupils, raw - level, "o", color="C1", label="mean score of the school")
ax.errorbar(pupils, theta.mean(0) - level, 2 * theta.std(0), fmt="o", color="C0", label="theta")
ax.set(xscale="log", xlabel="pupils in the school", ylabel="minus the true level")
ax.legend()
figure.savefig("shrinkage.png")
# --8<-- [end:shrinkage]

start = time.process_time()
# --8<-- [start:many]
mcmc = run(SGHMC(model), num_rows)
# --8<-- [end:many]
jax.block_until_ready(mcmc.get_samples())
seconds = time.process_time() - start

# --8<-- [start:full]
print(diagnose(mcmc).verdict)
for name in ("mu", "tau", "slope", "noise"):
    draws = mcmc.get_samples()[name]
    print(f"{name:6s} {draws.mean():.4f} +- {draws.std():.4f}")
# --8<-- [end:full]

# --8<-- [start:cost]
drawn = int(nuts.get_extra_fields()["num_steps"].sum())
print(f"{'run':18s}     rows  seconds  gradients after warm-up  rows of each")
print(f"{'NUTS':18s} {num_some:8,} {nuts_seconds:8.0f} {drawn:24,} {num_some:13,}")
for rows, took, result in ((num_some, some_seconds, some), (num_rows, seconds, mcmc)):
    facts = to_inference_data(result).posterior.attrs
    gradients = int(sum(facts["gradients"]))
    each = rows if isinstance(facts["batch_size"], str) else facts["batch_size"]  # "all"
    print(f"{'SGHMC':18s} {rows:8,} {took:8.0f} {gradients:24,} {each:13,}")
# --8<-- [end:cost]
