"""A regression on 500,000 rows, from data to decision: the script of docs/tutorials/regression.md.

    python examples/tutorial_regression.py

It takes about a minute and a half on one CPU core, and writes into the current folder.
The page shows the parts between marks. It does not show the code that takes times, nor any part
named "cost".
"""

import time

# --8<-- [start:imports]
import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive

from numpyro_geom import SGHMC, diagnose, to_inference_data
from numpyro_geom.diagnostics import compare_draws

# --8<-- [end:imports]

# --8<-- [start:data]
num_rows, num_trial, num_draws = 500_000, 2_000, 1_000

COLUMNS = ["past orders", "weeks away", "basket", "coupon", "coupon x past orders"]
TRUTH = {"base": -0.8, "effect": np.array([0.30, -0.35, 0.10, 0.20, -0.15])}


def columns(past, weeks, basket, coupon):
    """The columns of the model, from inputs with mean 0 and standard deviation 1."""
    return jnp.stack([past, weeks, basket, coupon, coupon * past], axis=1).astype(jnp.float32)


def customers(rng, number):
    """Number of past orders, weeks since the last order, euros per order; standardised."""
    past, weeks = rng.poisson(3, number), rng.exponential(12, number)
    euros = rng.lognormal(3.5, 0.5, number)
    return (past - 3) / 3**0.5, (weeks - 12) / 12, (euros - 37.5) / 20


rng = np.random.default_rng(0)
X = columns(*customers(rng, num_rows), rng.integers(0, 2, num_rows))
y = jnp.asarray(rng.poisson(np.exp(TRUTH["base"] + X @ TRUTH["effect"])))
print(f"{len(y):,} customers, {y.mean():.2f} orders on average, {y.max()} at most")
# --8<-- [end:data]


# --8<-- [start:model]
def model(X, y=None):
    base = numpyro.sample("base", dist.Normal(0, 2))
    with numpyro.plate("feature", X.shape[1]):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("customers", X.shape[0]) as i:
        rate = jnp.exp(base + X[i] @ effect)
        numpyro.sample("y", dist.Poisson(rate), obs=None if y is None else y[i])


# --8<-- [end:model]


# --8<-- [start:run]
def run(kernel, rows):
    """Run four chains on the first rows."""
    mcmc = MCMC(
        kernel,
        num_warmup=num_draws,
        num_samples=num_draws,
        num_chains=4,
        chain_method="vectorized",
        jit_model_args=True,  # rows are arguments of the program, not constants
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), X[:rows], y[:rows], extra_fields=("num_steps",))
    return mcmc


# --8<-- [end:run]

start = time.process_time()
# --8<-- [start:nuts]
nuts = run(NUTS(model, dense_mass=True), num_trial)
# --8<-- [end:nuts]
jax.block_until_ready(nuts.get_samples())
nuts_seconds = time.process_time() - start

start = time.process_time()
# --8<-- [start:some]
some = run(SGHMC(model, batch_size=256), num_trial)
# --8<-- [end:some]
jax.block_until_ready(some.get_samples())
some_seconds = time.process_time() - start

# --8<-- [start:trial]
print(compare_draws(some, nuts))
# --8<-- [end:trial]

start = time.process_time()
# --8<-- [start:full]
mcmc = run(SGHMC(model), num_rows)
# --8<-- [end:full]
jax.block_until_ready(mcmc.get_samples())
seconds = time.process_time() - start

# --8<-- [start:diagnose]
print(diagnose(mcmc))
# --8<-- [end:diagnose]

# --8<-- [start:posterior]
idata = to_inference_data(mcmc, coords={"feature": COLUMNS})
table = az.summary(idata, kind="stats", round_to=4)[["mean", "sd"]]
table["truth"] = [TRUTH["base"], *TRUTH["effect"]]
print(table.astype(float).round(4))
# --8<-- [end:posterior]

# --8<-- [start:plots]
shown = idata.posterior["effect"].sel(feature=["coupon", "coupon x past orders"])
az.plot_trace(shown.to_dataset("feature"))
plt.tight_layout()
plt.savefig("trace.png")
az.plot_forest(idata, combined=True)
plt.savefig("forest.png")
# --8<-- [end:plots]

# --8<-- [start:check]
new = customers(np.random.default_rng(1), num_rows // 50)
X_new = columns(*new, np.zeros(len(new[0])))
held_out = columns(*new, np.random.default_rng(2).integers(0, 2, len(new[0])))
orders = np.random.default_rng(3).poisson(np.exp(TRUTH["base"] + held_out @ TRUTH["effect"]))

thinned = {site: values[::20] for site, values in mcmc.get_samples().items()}
predicted = Predictive(model, thinned)(jax.random.key(2), held_out)["y"]
numbers = np.arange(6)
shares = (np.asarray(predicted)[..., None] == numbers).mean(1)
low, high = np.quantile(shares, [0.05, 0.95], axis=0)

figure, ax = plt.subplots(figsize=(6, 3.5))
ax.bar(numbers, shares.mean(0), color="C0", alpha=0.5, label="predicted, mean")
ax.vlines(numbers, low, high, color="C1", linewidth=5, label="predicted, 90%")
ax.plot(numbers, (orders[:, None] == numbers).mean(0), "o", color="C3", label="observed")
ax.set(xlabel="orders per customer", ylabel="share of new customers", yscale="log")
ax.legend()
figure.savefig("predictive.png")
# --8<-- [end:check]

# --8<-- [start:decide]
MARGIN, COST = 12.0, 1.0  # euros earned per order, and cost per coupon


def gain(draws):
    """Gain of a coupon for each new customer in euros, one row per draw."""
    with_coupon = columns(*new, np.ones(len(new[0])))
    rate = [jnp.exp(draws["base"][:, None] + draws["effect"] @ x.T) for x in (with_coupon, X_new)]
    return MARGIN * (rate[0] - rate[1]) - COST


true = np.asarray(gain({"base": jnp.array([TRUTH["base"]]), "effect": TRUTH["effect"][None]}))[0]
print("draws of          coupons  expected gain, euros  90% interval     gain in truth")
for name, run_of in (("NUTS, few rows", nuts), ("SGHMC, all rows", mcmc)):
    gains = np.asarray(gain({k: v[::8] for k, v in run_of.get_samples().items()}))
    chosen = gains.mean(0) > 0
    total = gains[:, chosen].sum(1)
    interval = "{:,.0f} to {:,.0f}".format(*np.quantile(total, [0.05, 0.95]))
    print(
        f"{name:16s}  {chosen.sum():7,}  {total.mean():20,.0f}  {interval:15s}"
        f"  {true[chosen].sum():13,.0f}"
    )

print(f"a coupon for all  {len(true):7,}  {'':20s}  {'':15s}  {true.sum():13,.0f}")
print(f"the best choice   {(true > 0).sum():7,}  {'':20s}  {'':15s}  {true[true > 0].sum():13,.0f}")
# --8<-- [end:decide]

# --8<-- [start:save]
idata.to_netcdf("coupons.nc")
again = az.from_netcdf("coupons.nc")
draws = {name: np.concatenate(again.posterior[name].values) for name in ("base", "effect")}
print(np.asarray(gain(draws)).mean(0)[:3].round(2), "euros for the first three new customers")
# --8<-- [end:save]

# --8<-- [start:cost]
energy = jax.jit(
    jax.value_and_grad(lambda z, X, y: -numpyro.infer.util.log_density(model, (X, y), {}, z)[0])
)
z = {name: jnp.asarray(values[0]) for name, values in mcmc.get_samples().items()}
jax.block_until_ready(energy(z, X, y))  # compile
start = time.process_time()
for _ in range(20):
    jax.block_until_ready(energy(z, X, y))
one = (time.process_time() - start) / 20

drawn = int(nuts.get_extra_fields()["num_steps"].sum())  # without the steps of warm-up
rest = []
for result in (some, mcmc):
    facts = to_inference_data(result).posterior.attrs
    rest.append((sum(facts["steps_taken"]), facts["batch_size"]))
table = [
    ("NUTS, few rows", nuts_seconds, 2 * drawn, num_trial, nuts),
    ("SGHMC, few rows", some_seconds, *rest[0], some),
    ("SGHMC, all rows", seconds, *rest[1], mcmc),
    ("NUTS, all rows, estimated", 2 * drawn * one, 2 * drawn, num_rows, None),
]
print(f"{'run':26s}   seconds  gradients  rows of each  worst ESS")
for name, took, gradients, rows, result in table:
    ess = ""
    if result is not None:
        ess = az.summary(to_inference_data(result))["ess_bulk"].astype(float).min().round()
    print(f"{name:26s}  {took:8.0f}  {gradients:9,}  {rows:12,}  {ess:>9}")
# --8<-- [end:cost]
