"""A run that survives a crash, with rows on disk: the script of docs/tutorials/long_run.md.

    python examples/tutorial_long_run.py

It takes some minutes on one CPU core, and writes into the current folder. The files take
170 MB.
The page shows all of it.
"""

# --8<-- [start:imports]
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_geom import SGHMC, HostRows, diagnose, run_in_segments, to_inference_data

# --8<-- [end:imports]

# --8<-- [start:rows]
num_rows, num_draws = 2_000_000, 1_000
folder = Path("tutorial_long_run")
folder.mkdir(exist_ok=True)

rng = np.random.default_rng(0)
truth = rng.normal(size=20)
X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float32, (num_rows, 20))
y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.int32, (num_rows,))
for start in range(0, num_rows, 100_000):  # in blocks: memory does not grow with the rows
    rows = slice(start, min(start + 100_000, num_rows))
    X[rows] = rng.normal(size=X[rows].shape)
    y[rows] = rng.random(len(y[rows])) < 1 / (1 + np.exp(-X[rows] @ truth))

X.flush(), y.flush()
megabytes = (folder / "X.npy").stat().st_size / 1e6
print(f"X.npy has {num_rows:,} rows and {megabytes:,.0f} MB")
# --8<-- [end:rows]


# --8<-- [start:fit]
def model(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


X = HostRows(np.load(folder / "X.npy", mmap_mode="r"))
y = HostRows(np.load(folder / "y.npy", mmap_mode="r"))


def fit(num_samples, directory="run", monitor=None):
    mcmc = MCMC(
        SGHMC(model),
        num_warmup=num_draws,
        num_samples=num_samples,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    return run_in_segments(
        mcmc,
        jax.random.key(0),
        *(X, y),
        directory=folder / directory,
        draws_per_segment=num_draws // 10,
        monitor=monitor,
    )


# --8<-- [end:fit]


# --8<-- [start:crash]
segments = []


def crash(draws):
    """The machine fails after four segments."""
    segments.append(draws["w"].shape)
    if len(segments) == 4:
        raise SystemError("the machine is gone")


try:
    fit(num_draws, monitor=crash)
except SystemError as error:
    print(f"stopped: {error}")
# --8<-- [end:crash]

# --8<-- [start:look]
files = sorted((folder / "run").glob("*.npz"))
w = np.concatenate([np.load(file)["draws['z']['w']"] for file in files], axis=1)
print("chains, draws and columns on disk:", w.shape)
print(f"mean of w[0] so far: {w[..., 0].mean():.3f}")
# --8<-- [end:look]

# --8<-- [start:resume]
result = fit(num_draws)
print(f"{result.num_draws} draws per chain, finished: {result.finished}")
# --8<-- [end:resume]

# --8<-- [start:same]
unbroken = fit(num_draws, "unbroken")
both = [np.asarray(r.mcmc.get_samples()["w"]) for r in (result, unbroken)]
print("bit for bit the draws of a run without a break:", np.array_equal(*both))
# --8<-- [end:same]

# --8<-- [start:longer]
longer = fit(2 * num_draws)
print(f"{longer.num_draws} draws per chain, finished: {longer.finished}")
print(diagnose(to_inference_data(longer.mcmc)).verdict)
# --8<-- [end:longer]

# --8<-- [start:changed]
y = HostRows(1 - np.load(folder / "y.npy"))
try:
    fit(2 * num_draws)
except ValueError as error:
    print("refused:", str(error).partition(" that ")[2].partition(" (was")[0])
# --8<-- [end:changed]
