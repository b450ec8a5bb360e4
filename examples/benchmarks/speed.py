"""Time and memory of a stochastic-gradient step, as ratios measured side by side in one run.

Prints Markdown tables and writes them to docs/tables/speed.md and momentum.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from common import TABLES, head, logistic
from jax import lax, random
from numpyro import handlers
from numpyro.infer.util import potential_energy

from numpyro_geom import SGHMC, SGNHT, SGRLD, Expanded, Shampoo


def race(entrants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each function; rounds are interleaved, so all have the same conditions."""
    for fn in entrants.values():
        jax.block_until_ready(fn())
    times: dict[str, list[float]] = {name: [] for name in entrants}
    for _ in range(rounds):
        for name, fn in entrants.items():
            start = time.perf_counter()
            jax.block_until_ready(fn())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def sampler(kernel: Any, *args: Any) -> Callable[[], Any]:
    """A compiled call of the kernel's `sample`; each call continues where the last one ended."""
    states = [kernel.init(random.key(1), 0, None, args, {})]
    step = jax.jit(lambda state: kernel.sample(state, args, {}))

    def call() -> Any:
        states[0] = step(states[0])
        return states[0].z

    return call


# Logistic regression


def logistic_rows(num_rows: int, num_columns: int) -> tuple:
    """Generated data."""
    key_x, key_y = random.split(random.key(0))
    X = random.normal(key_x, (num_rows, num_columns))
    y = random.bernoulli(key_y, jax.nn.sigmoid(X[:, 0])).astype(jnp.int32)
    return X, y


def logistic_table() -> str:
    """Our loop against hand-written loops, blackjax, and NumPyro's subsampling."""
    import blackjax

    num_rows, num_columns, batch, num_steps, h = 100_000, 50, 256, 100, 1e-7
    X, y = logistic_rows(num_rows, num_columns)
    kernel = SGRLD(logistic, step_size=h, batch_size=batch, num_steps=num_steps)
    start = jnp.zeros(num_columns)

    def energy(w: jax.Array, rows: jax.Array) -> jax.Array:
        logits = X[rows] @ w
        fit = jnp.sum(jnp.logaddexp(0.0, logits) - y[rows] * logits)
        return 0.5 * w @ w + num_rows / batch * fit

    def hand_step(carry: tuple, _: Any) -> tuple:
        key, w = carry
        key, key_rows, key_noise = random.split(key, 3)
        rows = random.randint(key_rows, (batch,), 0, num_rows)
        grad = jax.grad(energy)(w, rows)
        noise = random.normal(key_noise, w.shape)
        return (key, w - h * grad + jnp.sqrt(2 * h) * noise), None

    sgld = blackjax.sgld(lambda w, rows: -jax.grad(energy)(w, rows))

    def blackjax_step(carry: tuple, _: Any) -> tuple:
        key, w = carry
        key, key_rows, key_step = random.split(key, 3)
        rows = random.randint(key_rows, (batch,), 0, num_rows)
        return (key, sgld.step(key_step, w, rows, h)), None

    def numpyro_step(carry: tuple, _: Any) -> tuple:
        key, w = carry
        key, key_rows, key_noise = random.split(key, 3)
        model = handlers.seed(logistic, key_rows)
        grad = jax.grad(lambda w: potential_energy(model, (X, y, batch), {}, {"w": w}))(w)
        return (key, w - h * grad + jnp.sqrt(2 * h) * random.normal(key_noise, w.shape)), None

    def loop(step: Callable) -> Callable[[], Any]:
        run = jax.jit(lambda w: lax.scan(step, (random.key(0), w), None, num_steps)[0][1])
        return lambda: run(start)

    times = race(
        {
            "SGRLD, identity metric": sampler(kernel, X, y),
            "hand-written lax.scan": loop(hand_step),
            "blackjax.sgld in lax.scan": loop(blackjax_step),
            "NumPyro's own plate subsampling": loop(numpyro_step),
        },
        60,
    )
    ours = times["SGRLD, identity metric"]
    lines = ["Logistic regression, 100,000 x 50, batch 256, float32, 100 steps per call.", ""]
    lines += head("loop", "microseconds per step", "SGRLD's time over this")
    lines += [
        f"| {name} | {seconds / num_steps * 1e6:.1f} | {ours / seconds:.2f} |"
        for name, seconds in times.items()
    ]
    return "\n".join(lines)


def ratios(times: dict[str, float], per: int, unit: float, titles: tuple[str, str, str]) -> str:
    """A table of times and of ratios to the first."""
    base = next(iter(times.values()))
    lines = [f"| {n} | {t / per * unit:.3g} | {t / base:.2f} |" for n, t in times.items()]
    return "\n".join(head(*titles) + lines)


def momentum_table() -> str:
    """Kernels with a momentum against SGRLD and against blackjax."""
    import blackjax

    num_rows, num_columns, batch, num_steps, h = 100_000, 50, 256, 100, 1e-5
    X, y = logistic_rows(num_rows, num_columns)
    fixed = {"step_size": h, "batch_size": batch, "num_steps": num_steps}

    times = race(
        {
            "SGRLD, identity metric": sampler(SGRLD(logistic, **fixed), X, y),
            "SGHMC": sampler(SGHMC(logistic, friction=1.0, **fixed), X, y),
            "SGNHT": sampler(SGNHT(logistic, friction=1.0, **fixed), X, y),
        },
        60,
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
        },
        60,
    )
    head = "The same on 256 rows, all of them at every step, 100 steps per call."
    titles = ("kernel", "microseconds per step", "over blackjax")
    return "\n\n".join([text, head, ratios(times, num_steps, 1e6, titles)])


# A network


def network(X: Any, y: Any) -> None:
    """A 784-400-400-10 classifier with normal priors, as plain NumPyro sites."""
    hidden = X
    sizes = (784, 400, 400, 10)
    with numpyro.plate("data", X.shape[0]) as i:
        hidden = X[i]
    for k, (n_in, n_out) in enumerate(zip(sizes, sizes[1:], strict=False)):
        w = numpyro.sample(f"w{k}", dist.Normal(0, 0.1).expand([n_in, n_out]).to_event(2))
        b = numpyro.sample(f"b{k}", dist.Normal(0, 0.1).expand([n_out]).to_event(1))
        hidden = hidden @ w + b
        hidden = jax.nn.relu(hidden) if k < 2 else hidden
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Categorical(logits=hidden), obs=y[i])


def network_table() -> str:
    """Metrics and treatments of Gamma against the identity metric."""
    num_rows, num_steps = 20_000, 100
    X = random.uniform(random.key(0), (num_rows, 784))
    y = random.randint(random.key(1), (num_rows,), 0, 10)

    def make(metric: Any, divergence: str = "none", steps: int = num_steps) -> Callable[[], Any]:
        kernel = SGRLD(
            network,
            metric=metric,
            divergence=divergence,
            step_size=1e-8,
            batch_size=100,
            num_steps=steps,
        )
        return sampler(kernel, X, y)

    rounds = 5
    metrics = race(
        {
            "identity": make("identity"),
            "rmsprop": make("rmsprop"),
            "wenzel": make("wenzel"),
            "monge": make("monge"),
            "shampoo, interval 100": make(Shampoo(interval=100)),
            "shampoo, interval 1000": make(Shampoo(interval=1000)),
            "shampoo, frozen after warm-up": make(Shampoo(), "frozen"),
        },
        rounds,
    )
    lines = [
        "Network 784-400-400-10, batch 100, float32, divergence='none', "
        f"{num_steps} steps per call.",
        "",
        ratios(metrics, num_steps, 1e3, ("metric", "milliseconds per step", "over identity")),
        "",
        *head("metric", "divergence", "over divergence='none'"),
    ]
    for metric in ("rmsprop", "monge"):
        times = race({g: make(metric, g) for g in ("none", "corrected", "auxiliary")}, rounds)
        lines += [
            f"| {metric} | {g} | {t / times['none']:.2f} |" for g, t in times.items() if g != "none"
        ]
    return "\n".join(lines)


def expansion_table() -> str:
    """Parameter expansion against the same kernel without it."""
    num_rows, num_steps = 20_000, 50
    X = random.uniform(random.key(0), (num_rows, 784))
    y = random.randint(random.key(1), (num_rows,), 0, 10)

    def make(expanded: Expanded | None) -> Callable[[], Any]:
        model = handlers.reparam(
            network, config=lambda site: expanded if site["name"].startswith("w") else None
        )
        kernel = SGHMC(
            model,
            step_size=1e-5,
            friction=1.0,
            batch_size=100,
            num_steps=num_steps,
            control_variate=False,
            dense_mass=None,
        )
        return sampler(kernel, X, y)

    times = race(
        {
            "none": make(None),
            "full factors, with a `prior_scale`": make(Expanded(prior_scale=1.0)),
            "full factors": make(Expanded()),
            "rank 8": make(Expanded(rank=8)),
        },
        5,
    )
    titles = "expansion", "milliseconds per step", "over none"
    return (
        f"SGHMC on the same network, {num_steps} steps per call.\n\n"
        f"{ratios(times, num_steps, 1e3, titles)}"
    )


# Memory


def memory_table() -> str:
    """Bytes that one call of `sample` needs besides its arguments, as counted by XLA."""
    lines = [
        "Temporary memory of one compiled `sample`, logistic regression with 50 columns.",
        "",
        *head("rows N", "steps per call", "temporary kB", "flops"),
    ]
    for num_rows, num_steps in ((10_000, 100), (1_000_000, 100), (10_000, 10_000)):
        args = logistic_rows(num_rows, 50)
        kernel = SGRLD(logistic, step_size=1e-7, batch_size=256, num_steps=num_steps)
        state = kernel.init(random.key(1), 0, None, args, {})
        compiled = jax.jit(lambda s, a, k=kernel: k.sample(s, a, {})).lower(state, args).compile()
        temp = compiled.memory_analysis().temp_size_in_bytes
        cost = compiled.cost_analysis()
        lines.append(f"| {num_rows:,} | {num_steps:,} | {temp / 1e3:.1f} | {cost['flops']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Run all parts."""
    parts = [logistic_table(), network_table(), expansion_table(), memory_table()]
    texts = {"speed.md": "\n\n".join(parts), "momentum.md": momentum_table()}
    for name, text in texts.items():
        print(text, end="\n\n")
        (TABLES / name).write_text(text + "\n")


if __name__ == "__main__":
    main()
