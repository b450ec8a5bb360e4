"""A Bayesian network from a flax module: the script of docs/tutorials/network.md.

    python examples/tutorial_network.py

It takes some three minutes on one CPU core, and writes into the current folder.
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
from flax import linen as nn
from numpyro.contrib.module import random_flax_module
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, Predictive
from sklearn.datasets import load_digits, load_sample_images
from sklearn.metrics import roc_auc_score

from numpyro_geom import Microcanonical, diagnose, train
from numpyro_geom.diagnostics import PredictionStream

# --8<-- [end:imports]

# --8<-- [start:data]
num_rows, num_draws, num_epochs = 1_438, 100, 100

images, labels = load_digits(return_X_y=True)  # 1,797 digits of 8 by 8 pixels
order = np.random.default_rng(0).permutation(len(labels))
images, labels = jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order])
X, y = images[:num_rows], labels[:num_rows]
X_test, y_test = images[1_438:], labels[1_438:]

photos = np.concatenate([photo.mean(-1)[:424, :640] for photo in load_sample_images().images])
patches = photos.reshape(-1, 8, 80, 8).transpose(0, 2, 1, 3).reshape(-1, 64)[::23] / 255
other = jnp.asarray(patches, jnp.float32)  # patches of photographs, which are not digits
print(f"{len(y):,} digits to learn from, {len(y_test)} to test, {len(other)} pieces of photographs")
# --8<-- [end:data]


# --8<-- [start:model]
class Net(nn.Module):  # one hidden layer, and logits of the ten digits
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(50)(x)))


def model(X, y=None):
    net = random_flax_module("net", Net(), dist.Normal(0, 0.5), input_shape=(64,))
    with numpyro.plate("data", X.shape[0]) as i:
        logits = numpyro.deterministic("logits", net(X[i]))
        numpyro.sample("y", dist.Categorical(logits=logits), obs=None if y is None else y[i])


# --8<-- [end:model]

start = time.process_time()
# --8<-- [start:sample]
mcmc = MCMC(
    Microcanonical(model),
    num_warmup=num_draws,
    num_samples=num_draws,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(1), X, y)
draws = mcmc.get_samples(group_by_chain=True)
# --8<-- [end:sample]
jax.block_until_ready(draws)
seconds = {"chains": time.process_time() - start}

start = time.process_time()
# --8<-- [start:train]
found = train(model, jax.random.key(0), X, y, batch_size=64, num_epochs=num_epochs, num_starts=4)
# --8<-- [end:train]
jax.block_until_ready(found.position)
seconds["four trained networks"] = time.process_time() - start
# --8<-- [start:cost]
print({name: f"{spent:.0f} s" for name, spent in seconds.items()})
# --8<-- [end:cost]


# --8<-- [start:predict]
def logits(samples, X, batch_ndims=2):
    """Logits of each draw and row, shape (draws, rows, 10)."""
    predict = Predictive(model, samples, batch_ndims=batch_ndims, return_sites=["logits"])
    return np.asarray(predict(jax.random.key(2), X)["logits"]).reshape(-1, len(X), 10)


networks = {name: x for name, x in found.position.items()}
members = {
    "one trained network": lambda X: logits(networks, X, 1)[:1],
    "four trained networks": lambda X: logits(networks, X, 1),
    "chains": lambda X: logits(draws, X),
}
inside = {name: PredictionStream(y_test, logits=True) for name in members}
outside = {name: PredictionStream(logits=True) for name in members}
print(f"{'':22s} accuracy    NLL  calibration error  AUROC of photographs")
for name, of in members.items():
    digits, others = inside[name], outside[name]
    digits.add(of(X_test)[None])
    others.add(of(other)[None])
    is_other = np.repeat([0, 1], [len(X_test), len(other)])
    auroc = roc_auc_score(is_other, np.concatenate([digits.entropy, others.entropy]))
    print(
        f"{name:22s} {digits.accuracy:8.3f} {digits.nll:6.3f}"
        f" {digits.calibration_error:18.3f} {auroc:21.3f}"
    )
# --8<-- [end:predict]


# --8<-- [start:mixing]
weights = max(float(split_gelman_rubin(x).max()) for x in draws.values())
stream = PredictionStream(y_test, logits=True)
stream.add(logits(draws, X_test).reshape(4, -1, len(X_test), 10))
predictions = split_gelman_rubin(stream.label_probabilities)
print(f"R-hat of the worst weight: {weights:.2f}")
print(f"R-hat of predictions, median of the test rows: {np.nanmedian(predictions):.2f}")
print(diagnose(mcmc))
# --8<-- [end:mixing]

# --8<-- [start:figure]
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for ax, name in zip(axes, ("one trained network", "chains"), strict=True):
    for of, color, label in ((inside, "C0", "digits"), (outside, "C1", "photographs")):
        bins = np.linspace(0, np.log(10), 30)
        ax.hist(of[name].entropy, bins, density=True, alpha=0.5, color=color, label=label)
    ax.set(title=name, xlabel="entropy of the prediction, in nats", yticks=[])

axes[1].legend()
figure.savefig("entropy.png")
# --8<-- [end:figure]
