"""A posterior in seconds, and when not to trust it: the script of docs/tutorials/laplace.md.

    python examples/tutorial_laplace.py

It takes about a minute on one CPU core, and writes into the current folder.
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
from numpyro.infer import MCMC, NUTS, Predictive
from sklearn.datasets import load_breast_cancer

from numpyro_geom import RiemannianLaplace, to_inference_data
from numpyro_geom.diagnostics import compare_draws, diagnose

# --8<-- [end:imports]

# --8<-- [start:model]
columns = [0, 1, 4, 6, 8, 9]  # radius, texture, smoothness, concavity, symmetry, fractal dimension
X, y = load_breast_cancer(return_X_y=True)
X = jnp.asarray((X[:, columns] - X[:, columns].mean(0)) / X[:, columns].std(0), jnp.float32)
y = jnp.asarray(y)


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 3))
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        logits = X[i] @ w + b
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=None if y is None else y[i])


# --8<-- [end:model]

times = [time.process_time()]
# --8<-- [start:mode]
guide = RiemannianLaplace(model)
params = guide.fit(jax.random.key(0), X, y)
# --8<-- [end:mode]
times.append(time.process_time())
# --8<-- [start:fit]
print(guide.fit_report)
# --8<-- [end:fit]

# --8<-- [start:weights]
num_draws = 500
draws = guide.draw(jax.random.key(1), params, sample_shape=(4, num_draws), log_weight=True)
# --8<-- [end:weights]
jax.block_until_ready(draws.samples)
times.append(time.process_time())
# --8<-- [start:draw]
resampled = draws.resample(jax.random.key(3))
print(f"k-hat {draws.pareto_k:.2f}")
print(diagnose(to_inference_data(draws)))
# --8<-- [end:draw]


# --8<-- [start:functions]
def nuts(model, *data):
    """Run NUTS with four chains."""
    mcmc = MCMC(
        NUTS(model),
        num_warmup=2 * num_draws,
        num_samples=2 * num_draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(2), *data)
    return mcmc


def worst(samples, reference, **chosen):
    """The largest errors over all scalars, in standard deviations of the reference."""
    rows = compare_draws(samples, reference, **chosen).scalars
    mean = max(rows, key=lambda row: abs(row.mean_error))
    sd = max(rows, key=lambda row: abs(row.sd_ratio - 1))
    return (
        f"mean {mean.mean_error:+.2f} sd ({mean.name}), noise {mean.mean_noise:.2f};  "
        f"sd {sd.sd_ratio - 1:+.0%} ({sd.name}), noise {sd.sd_noise:.0%}"
    )


# --8<-- [end:functions]


start = time.process_time()
# --8<-- [start:reference]
reference = nuts(model, X, y)
# --8<-- [end:reference]
jax.block_until_ready(reference.get_samples())
seconds = dict(zip(("fit", "draws"), np.diff(times), strict=True))
seconds["NUTS"] = time.process_time() - start
# --8<-- [start:nuts]
print("plain     ", worst(draws.samples, reference))
print("resampled ", worst(resampled, reference))
# --8<-- [end:nuts]
# --8<-- [start:cost]
for name, spent in seconds.items():
    print(f"{name:10s} {spent:4.1f} seconds")
# --8<-- [end:cost]

# --8<-- [start:predict]
flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in resampled.items()}
predicted = Predictive(model, flat)(jax.random.key(4), X[18:21])["y"].mean(0)
print("chance of a benign tumour, three patients:", np.asarray(predicted, float).round(2))
# --8<-- [end:predict]

# --8<-- [start:schools]
effects = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
errors = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def centred(errors, effects):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, errors), obs=effects)


def noncentred(errors, effects):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        z = numpyro.sample("z", dist.Normal(0, 1))
        theta = numpyro.deterministic("theta", mu + tau * z)
        numpyro.sample("y", dist.Normal(theta, errors), obs=effects)


# --8<-- [end:schools]

# --8<-- [start:both]
same = {"var_names": ["mu", "tau", "theta"]}
exact = nuts(noncentred, errors, effects)
found = {}
for schools in (centred, noncentred):
    other = RiemannianLaplace(schools)
    its_params = other.fit(jax.random.key(0), errors, effects)
    its_draws = other.draw(
        jax.random.key(1), its_params, sample_shape=(4, num_draws), log_weight=True
    )
    found[schools.__name__] = its_draws
    print(f"{schools.__name__}: k-hat {its_draws.pareto_k:.2f}")
    print("  plain     ", worst(its_draws.samples, exact, **same))
    print("  resampled ", worst(its_draws.resample(jax.random.key(3)), exact, **same))
# --8<-- [end:both]

# --8<-- [start:figure]
figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
shown = [
    ("regression, w[1]", lambda s: s["w"][..., 1], draws, reference),
    ("schools centred, log tau", lambda s: np.log(s["tau"]), found["centred"], exact),
    ("non-centred, log tau", lambda s: np.log(s["tau"]), found["noncentred"], exact),
]
for ax, (title, value, approximate, truth) in zip(axes, shown, strict=True):
    right = np.asarray(value(truth.get_samples()))
    bins = np.linspace(*np.quantile(right, [0.005, 0.995]), 30)
    ax.hist(right, bins, density=True, color=("C0", 0.4), label="NUTS")
    for label, color, samples in (
        ("plain", "C1", approximate.samples),
        ("resampled", "C3", approximate.resample(jax.random.key(3))),
    ):
        values = np.asarray(value(samples)).ravel()
        ax.hist(values, bins, density=True, histtype="step", color=color, label=label)
    ax.set(title=f"{title}\nk-hat {approximate.pareto_k:.2f}", yticks=[])

axes[2].legend(loc="upper left")
figure.savefig("marginals.png")
# --8<-- [end:figure]
