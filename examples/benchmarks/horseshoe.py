"""Networks with a horseshoe prior: one scale per tensor or per weight, and which settings mix.

A network 64-32-10 on scikit-learn's digits, 1,347 training rows and 450 test rows. The prior of
a weight is N(0, (tau lambda)^2). "tensor" has one half-Cauchy lambda per tensor. "weight" has one
half-Cauchy lambda per weight and a half-Cauchy tau (the horseshoe proper). Sites are the weights
divided by their scales (non-centred), unless a line says "centred".

    python examples/benchmarks/horseshoe.py [--quick] [--only NAME ...]

Prints a table; `--write` puts it into docs/tables/horseshoe.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from sklearn.datasets import load_digits

from numpyro_geom import SGHMC, Identity
from numpyro_geom.diagnostics import PredictionStream

SIZES = (64, 32, 10)
TABLE = Path(__file__).resolve().parents[2] / "docs" / "tables" / "horseshoe.md"
HEADER = (
    "| prior | settings | steps per draw | ESS of log lambda | its sd over the prior's "
    "| ESS of a label's log probability | accuracy | NLL | seconds |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def data() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Training rows and labels, and test rows and labels."""
    digits = load_digits()
    x = (digits.data - digits.data.mean()) / digits.data.std()
    order = np.random.default_rng(0).permutation(len(x))
    x, y = jnp.asarray(x[order], float), jnp.asarray(digits.target[order])
    return x[:1347], y[:1347], x[1347:], y[1347:]


def network(prior: str, centred: bool) -> Callable:
    """A NumPyro model of rows and labels; the logits are a deterministic site."""

    def model(x: jax.Array, y: jax.Array) -> None:
        weights = []
        for k, shape in enumerate(zip(SIZES[:-1], SIZES[1:], strict=True)):
            scale = shape[0] ** -0.5
            if prior == "weight":
                scale *= numpyro.sample(f"{k}.global", dist.HalfCauchy(1.0))
                one = dist.HalfCauchy(jnp.ones(shape)).to_event(2)
                scale *= numpyro.sample(f"{k}.local", one)
            elif prior == "tensor":
                scale *= numpyro.sample(f"{k}.local", dist.HalfCauchy(1.0))
            if centred:
                w = numpyro.sample(f"{k}.w", dist.Normal(0, scale * jnp.ones(shape)).to_event(2))
            else:
                unit = dist.Normal(0, jnp.ones(shape)).to_event(2)
                w = scale * numpyro.sample(f"{k}.z", unit)
            weights.append(w)
        with numpyro.plate("rows", x.shape[0]) as i:
            logits = jnp.tanh(x[i] @ weights[0]) @ weights[1]
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y[i])

    return model


PAPER = {"step_size": 3e-3, "friction": 10.0, "num_steps": 50, "batch_size": 128}
"""A step size found by hand: three times as much is unstable. Friction times step size is as in the
papers."""
LOCAL = {"*.local": Identity(3.0**2), "*": "identity"}
SETTINGS: dict[str, tuple[bool, dict]] = {
    "given step": (False, PAPER),
    "given step, local scales 3 times as far": (False, {**PAPER, "metric": LOCAL}),
    "given step, friction 1": (False, {**PAPER, "friction": 1.0}),
    "given step, centred": (True, PAPER),
    "automatic": (False, {}),
    "automatic, centred": (True, {}),
    "automatic, no scale": (False, {"dense_mass": None}),
}
"""Name -> whether the weights are centred, and settings of the kernel."""
CASES = [("weight", name) for name in SETTINGS]
CASES += [("tensor", name) for name, (_, given) in SETTINGS.items() if given in (PAPER, {})]
"""Which arrays have their own scale, and the name of the settings."""


def row(prior: str, name: str, num_warmup: int, num_samples: int) -> str:
    """One line of the table."""
    centred, settings = SETTINGS[name]
    x, y, x_test, y_test = data()
    model = network(prior, centred)
    begun = time.time()
    mcmc = MCMC(
        SGHMC(model, **settings),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), x, y, extra_fields=("num_steps",))
    draws = mcmc.get_samples(group_by_chain=True)
    seconds = time.time() - begun
    steps = float(np.mean(np.asarray(mcmc.get_extra_fields()["num_steps"])))

    def probabilities(draw: dict) -> jax.Array:
        model_of = numpyro.handlers.substitute(model, draw)
        trace = numpyro.handlers.trace(model_of).get_trace(x_test, y_test)
        return jax.nn.softmax(trace["y"]["fn"].logits)

    probs = np.asarray(jax.lax.map(lambda chain: jax.lax.map(probabilities, chain), draws))
    stream = PredictionStream(y_test)
    stream.add(probs)
    scales = [np.asarray(v) for n, v in draws.items() if n.endswith(".local")]
    local = np.log(np.concatenate([v.reshape(2, num_samples, -1) for v in scales], axis=2))
    some = local[:, :, :: max(1, local.shape[2] // 200)]
    likely = np.take_along_axis(probs, np.asarray(y_test)[None, None, :, None], 3)[..., 0]
    # the log of a half-Cauchy has the standard deviation pi / 2
    return (
        f"| {prior} | {name} | {steps:.0f} "
        f"| {np.median(effective_sample_size(some)):.0f} "
        f"| {np.median(some.std((0, 1))) / (np.pi / 2):.2f} "
        f"| {np.median(effective_sample_size(np.log(likely + 1e-12))):.0f} "
        f"| {stream.accuracy:.3f} | {stream.nll:.3f} | {seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few draws of two cases")
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), help="settings; default all")
    parser.add_argument("--write", action="store_true", help="write docs/tables/horseshoe.md")
    parsed = parser.parse_args()
    cases = [case for case in CASES if not parsed.only or case[1] in parsed.only]
    draws = (20, 20) if parsed.quick else (500, 500)
    rows = [HEADER]
    print(HEADER, flush=True)
    for case in cases[: 2 if parsed.quick else None]:
        rows.append(row(*case, *draws))
        print(rows[-1], flush=True)
    if parsed.write:
        TABLE.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
