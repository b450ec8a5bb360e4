"""Cost of a step with a momentum, of an expansion, and of GGMC's trajectory, measured together.

Prints Markdown tables of ratios measured in one run and writes them to docs/tables/momentum.md;
about five minutes. ``--small`` is a quick look.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from speed import logistic, logistic_rows, race, sampler

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, Expansion, Factors
from numpyro_geom.model.model import Model
from numpyro_geom.model.plates import read_subsampling

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "momentum.md"


def ratios(times: dict[str, float], per: int, unit: float, titles: tuple[str, str, str]) -> str:
    """A table of times and of ratios to the first."""
    base = next(iter(times.values()))
    lines = ["| " + " | ".join(titles) + " |", "|---|---|---|"]
    lines += [f"| {n} | {t / per * unit:.3g} | {t / base:.2f} |" for n, t in times.items()]
    return "\n".join(lines)


def step_table(small: bool) -> str:
    """Kernels with a momentum against SGRLD and against blackjax."""
    import blackjax

    num_rows, num_columns, batch, num_steps, h = 100_000, 50, 256, 100, 1e-5
    X, y = logistic_rows(num_rows, num_columns)
    fixed = {"step_size": h, "batch_size": batch, "num_steps": num_steps}

    times = race(
        {
            "SGRLD, identity metric": sampler(SGRLD(logistic, **fixed), X, y),
            "SGHMC": sampler(SGHMC(logistic, friction=1.0, **fixed), X, y),
            "SGHMC, euler": sampler(SGHMC(logistic, **fixed, integrator="euler", friction=1), X, y),
            "SGNHT": sampler(SGNHT(logistic, friction=1.0, **fixed), X, y),
        },
        5 if small else 60,
    )
    head = "Logistic regression, 100,000 x 50, batch 256, float32, 100 steps per call."
    titles = ("kernel", "microseconds per step", "over SGRLD")
    text = head + "\n\n" + ratios(times, num_steps, 1e6, titles)

    few_X, few_y = X[:batch], y[:batch]

    def log_density_gradient(w: jax.Array, _: None) -> jax.Array:
        def energy(w: jax.Array) -> jax.Array:
            logits = few_X @ w
            return 0.5 * w @ w + jnp.sum(jnp.logaddexp(0.0, logits) - few_y * logits)

        return -jax.grad(energy)(w)

    peer = blackjax.sghmc(log_density_gradient, num_steps)
    run = jax.jit(lambda w: peer.step(random.key(0), w, None, h))
    whole = {"step_size": h, "num_steps": num_steps}
    times = race(
        {
            "blackjax.sghmc": lambda: run(jnp.zeros(num_columns)),
            "SGHMC": sampler(SGHMC(logistic, friction=1.0, **whole), few_X, few_y),
            "SGHMC, euler": sampler(
                SGHMC(logistic, friction=1.0, integrator="euler", **whole), few_X, few_y
            ),
        },
        5 if small else 60,
    )
    head = "The same on 256 rows, all of them at every step, 100 steps per call."
    titles = ("kernel", "microseconds per step", "over blackjax")
    return "\n\n".join([text, head, ratios(times, num_steps, 1e6, titles)])


# Networks, as plain NumPyro sites


def dense(X: Any, y: Any) -> None:
    """784-400-10."""
    w1 = numpyro.sample("w1", dist.Normal(0, 0.1).expand([784, 400]).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0, 0.1).expand([400]).to_event(1))
    w2 = numpyro.sample("w2", dist.Normal(0, 0.1).expand([400, 10]).to_event(2))
    b2 = numpyro.sample("b2", dist.Normal(0, 0.1).expand([10]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        hidden = jax.nn.relu(X[i] @ w1 + b1)
        numpyro.sample("y", dist.Categorical(logits=hidden @ w2 + b2), obs=y[i])


def convolutional(X: Any, y: Any) -> None:
    """Three 3 x 3 convolutions of 16, 32 and 32 channels on 28 x 28 images, and a dense layer."""
    sizes = (1, 16, 32, 32)
    kernels = [
        numpyro.sample(f"k{n}", dist.Normal(0, 0.1).expand([3, 3, a, b]).to_event(4))
        for n, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))
    ]
    w = numpyro.sample("w", dist.Normal(0, 0.1).expand([32, 10]).to_event(2))
    with numpyro.plate("data", X.shape[0]) as i:
        hidden = X[i].reshape(-1, 28, 28, 1)
        for n, k in enumerate(kernels):
            stride = (1, 1) if n == 0 else (2, 2)
            hidden = lax.conv_general_dilated(
                hidden, k, stride, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            hidden = jax.nn.relu(hidden)
        numpyro.sample("y", dist.Categorical(logits=hidden.mean((1, 2)) @ w), obs=y[i])


def expansion_table(small: bool) -> str:
    """Forms of expansion against no expansion."""
    num_rows, num_steps = (500, 5) if small else (5_000, 50)
    X = random.uniform(random.key(0), (num_rows, 784))
    y = random.randint(random.key(1), (num_rows,), 0, 10)

    def make(model: Callable, expansion: Expansion | None) -> Callable[[], Any]:
        kernel = SGHMC(
            model,
            expansion=expansion,
            friction=1.0,
            step_size=1e-6,
            batch_size=100,
            num_steps=num_steps,
        )
        return sampler(kernel, X, y)

    inner = {"w1": Factors(left=0, right=1), "w2": Factors(left=1, right=0)}
    forms = {
        "none": None,
        "rank 16, hidden side": Expansion(rank=16, sites=inner),
        "rank 16, all sides but the output": Expansion(rank=16, sites={**inner, "w1": Factors()}),
        "full, hidden side": Expansion(sites=inner),
        "full, both sides": Expansion(),
        "full, both sides, target='factors'": Expansion(target="factors"),
    }
    rounds = 2 if small else 7
    parts = []
    titles = ("expansion", "milliseconds per step", "over none")
    times = race({name: make(dense, form) for name, form in forms.items()}, rounds)
    parts.append(f"SGHMC on a network 784-400-10, batch 100, {num_steps} steps per call.")
    parts.append(ratios(times, num_steps, 1e3, titles))
    chosen = ("none", "full, both sides", "full, both sides, target='factors'")
    times = race({name: make(convolutional, forms[name]) for name in chosen}, rounds)
    parts.append("SGHMC on a network of three convolutions, batch 100, as above.")
    parts.append(ratios(times, num_steps, 1e3, titles))
    return "\n\n".join(parts)


def trajectory_table(small: bool) -> str:
    """A trajectory of GGMC against its parts."""
    num_rows, batch = (20_000, 256) if small else (200_000, 256)
    X, y = logistic_rows(num_rows, 50)
    plan = read_subsampling(logistic, (X, y), {}, batch, "replacement")
    start = {"w": jnp.zeros(50)}

    def later(kernel: GGMC) -> Callable[[], Any]:
        """As `sampler`, after a first draw, which also computes the energy at its start."""
        state = kernel.init(random.key(1), 0, None, (X, y), {})
        step = jax.jit(lambda state: kernel.sample(state, (X, y), {}))
        state = step(state)
        return lambda: step(state).z

    def full_energy() -> Callable[[], Any]:
        @jax.jit
        def energy(position: dict, X: jax.Array, y: jax.Array) -> jax.Array:
            potential = Model(logistic, (X, y), {}, plan).potential()
            return potential.on_all_rows(lambda rows: potential.energy(position, rows))

        return lambda: energy(start, X, y)

    lines = [
        f"GGMC, logistic regression, {num_rows:,} x 50, batch {batch}. A trajectory over L + 1 "
        "gradient steps of SGHMC and 1.1 energies on all rows:",
        "",
        "| L | trajectory (ms) | L + 1 steps of SGHMC (ms) | energy on all rows (ms) | ratio |",
        "|---|---|---|---|---|",
    ]
    for length in (1, 10, 100):
        fixed = {"step_size": 1e-5, "batch_size": batch, "friction": 1.0}
        times = race(
            {
                "ggmc": later(GGMC(logistic, num_steps=length, **fixed)),
                "sghmc": sampler(SGHMC(logistic, num_steps=length + 1, **fixed), X, y),
                "energy": full_energy(),
            },
            3 if small else 30,
        )
        t, s, e = (1e3 * times[k] for k in ("ggmc", "sghmc", "energy"))
        lines.append(f"| {length} | {t:.2f} | {s:.2f} | {e:.2f} | {t / (s + 1.1 * e):.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    steps = step_table(options.small)
    print(f"{steps}\n\n{expansion_table(options.small)}\n\n{trajectory_table(options.small)}")
    if not options.small:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(steps + "\n")


if __name__ == "__main__":
    main()
