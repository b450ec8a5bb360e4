"""A residual network on CIFAR-10 with stochastic-gradient samplers, as in the papers.

The network has 20 layers with filter response normalisation and Swish (274,042 parameters). The
sampler runs 100 cosine cycles of 5,000 steps of 256 rows, with one draw at the end of each cycle.
This is the setting of Kim, Nam, Yun, Yang and Lee, "Parameter Expanded Stochastic Gradient Markov
Chain Monte Carlo" (ICLR 2025), appendix D.2, run by `kim_2025` of `published.py`. Predictions
on the test images are gathered during the run, and weights are not kept. A run that was killed
continues if the script is called again:

    python examples/cifar.py --data-dir FOLDER --directory runs/sghmc
    python examples/cifar.py --data-dir FOLDER --directory runs/px --sampler PXSGHMC
    python examples/cifar.py --quick        # 20 steps on generated images
    python examples/cifar.py --measure resnet lenet     # start, compile, cost over a loop by hand
    python examples/cifar.py --memory                   # writes benchmarks/long/cifar_memory.md

Images are read from `FOLDER/cifar10.npz` (arrays X of shape (60000, 32, 32, 3) in uint8 and y; the
50,000 training rows come first), or from OpenML. With `--augment`, images are shifted and mirrored
randomly at every step, and the temperature is 0.01, as in the paper's section 5.2.2. A GPU is
recommended: on two CPU cores, a step takes seconds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import mnist
import numpy as np
import numpyro
import numpyro.distributions as dist
from convolution import convolve
from jax import lax, random
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.infer import MCMC, init_to_sample
from published import kim_2025

from numpyro_geom import SGHMC, Expanded, run_in_segments
from numpyro_geom.diagnostics import PredictionStream

TRAINING_ROWS = 40_960
PRIOR_VARIANCE = {"SGLD": 0.2, "pSGLD": 0.2, "SGHMC": 0.05, "SGNHT": 0.05, "PXSGHMC": 0.02}
FACTOR_VARIANCE = 0.5


class Layer(nn.Module):
    """A convolution and filter response normalisation, with a threshold."""

    features: int
    size: int = 3
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape)
        bias, shift, threshold = (
            self.param(name, nn.initializers.zeros, (self.features,))
            for name in ("bias", "shift", "threshold")
        )
        scale = self.param("scale", nn.initializers.ones, (self.features,))
        x = convolve(x, kernel, self.stride) + bias
        x = x * lax.rsqrt(jnp.mean(x**2, (1, 2), keepdims=True) + 1e-6)
        return jnp.maximum(scale * x + shift, threshold)


class ResNet20(nn.Module):
    """Twenty layers in three stages, with projections where the shape changes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        x = nn.swish(Layer(16, name="first")(x))
        for stage, features in enumerate((16, 32, 64)):
            for block in range(3):
                name = f"stage{stage}_block{block}"
                stride = 2 if stage > 0 and block == 0 else 1
                y = nn.swish(Layer(features, stride=stride, name=f"{name}_a")(x))
                y = Layer(features, name=f"{name}_b")(y)
                if stride > 1:
                    x = Layer(features, 1, stride, name=f"{name}_projection")(x)
                x = nn.swish(x + y)
        return nn.Dense(10, name="last")(x.mean((1, 2)))


def make_model(variance: float, augment: bool) -> Callable:
    """The NumPyro model: normal weights and one label per row."""

    def model(x: jax.Array, y: jax.Array) -> None:
        prior = dist.Normal(0.0, variance**0.5)
        net = random_flax_module("net", ResNet20(), prior, input_shape=(1, *x.shape[1:]))
        with numpyro.plate("rows", x.shape[0]) as i:
            images = x[i]
            if augment:
                images = shifted_and_mirrored(numpyro.prng_key(), images)
            numpyro.sample("y", dist.Categorical(logits=net(images)), obs=y[i])

    return model


def shifted_and_mirrored(rng_key: jax.Array, images: jax.Array) -> jax.Array:
    """Each image shifted by up to four pixels (zeros fill the edge) and randomly mirrored."""
    key_shift, key_mirror = random.split(rng_key)
    rows, height, width, _ = images.shape
    padded = jnp.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    corner = random.randint(key_shift, (rows, 2), 0, 9)

    def window(image: jax.Array, at: jax.Array) -> jax.Array:
        return lax.dynamic_slice(image, (at[0], at[1], 0), (height, width, image.shape[-1]))

    moved = jax.vmap(window)(padded, corner)
    mirrored = random.bernoulli(key_mirror, 0.5, (rows, 1, 1, 1))
    return jnp.where(mirrored, moved[:, :, ::-1], moved)


def factors(site: dict, number: int = 1, rank: float | None = None) -> Expanded | None:
    """One factor on each side of every layer, except at the network's two ends.

    Of a normalisation layer the scale has a factor. The paper's factors also multiply the biases
    and the other vectors of such layers, with the same number of parameters.
    """
    name = site["name"]
    left = number * (name.endswith(".kernel") and "first" not in name)
    right = number * (name.endswith((".kernel", ".scale")) and "last" not in name)
    if left + right == 0:
        return None
    return Expanded(
        left=left,
        right=right,
        rank=rank,
        factor_scale=FACTOR_VARIANCE**0.5,
        prior_scale=PRIOR_VARIANCE["PXSGHMC"] ** 0.5,
    )


def load(folder: str | None) -> tuple[np.ndarray, np.ndarray]:
    """All images as floats centred at 0, and labels."""
    path = Path(folder or ".") / "cifar10.npz"
    if path.exists():
        with np.load(path) as file:
            x, y = file["X"], file["y"]
    else:
        from sklearn.datasets import fetch_openml

        x, y = fetch_openml("CIFAR_10", version=1, return_X_y=True, as_frame=False)
        x = x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    x = np.asarray(x, np.float32).reshape(-1, 32, 32, 3)
    training = x[:50_000]
    x = (x - training.mean((0, 1, 2))) / training.std((0, 1, 2))
    return x, np.asarray(y, np.int32)


def generated(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of the right shape: noise with a bright square, whose place shows the class."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, rows).astype(np.int32)
    x = rng.normal(size=(rows, 32, 32, 3)).astype(np.float32)
    for image, label in zip(x, y, strict=True):
        at = 3 * label
        image[at : at + 3, at : at + 3] += 3.0
    return x, y


def sample(parsed: argparse.Namespace) -> None:
    """Run the sampler and gather predictions on the test images."""
    if parsed.quick:
        x, y = generated(96)
        train, test = slice(0, 64), slice(64, 96)
        settings = {"num_rows": 64, "steps_per_cycle": 10, "batch_size": 16}
        num_samples = 2
    else:
        x, y = load(parsed.data_dir)
        train, test = slice(0, TRAINING_ROWS), slice(50_000, 60_000)
        settings = {"num_rows": TRAINING_ROWS, "steps_per_cycle": parsed.steps_per_cycle}
        num_samples = parsed.cycles
    kernel = make_kernel(parsed.sampler, parsed.augment, **settings)
    images = jnp.asarray(x[test])

    @jax.jit
    def logits(draw: dict) -> jax.Array:
        params = nested({name: v for name, v in draw.items() if name.startswith("net/")})
        return lax.map(lambda x: ResNet20().apply({"params": params}, x[None])[0], images)

    stream = PredictionStream(y[test], logits=True)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=num_samples,
        # keep the predictions of a draw, not its 274,042 weights
        postprocess_fn=lambda draw: {"logits": logits(draw)},
    )
    begun = time.time()
    run_in_segments(
        mcmc,
        random.key(parsed.seed),
        jnp.asarray(x[train]),
        jnp.asarray(y[train]),
        directory=parsed.directory,
        draws_per_segment=1,
        monitor=lambda draws: print(add(stream, draws["logits"]), flush=True),
    )
    print(f"{time.time() - begun:.0f} s")
    print(f"calibration error {stream.calibration_error:.4f}")


def add(stream: PredictionStream, logits: np.ndarray) -> str:
    """Add the draws of a cycle to the stream; returns a line about all draws so far."""
    stream.add(logits)
    return f"{stream.num_draws} draws: accuracy {stream.accuracy:.4f}, NLL {stream.nll:.4f}"


def nested(sites: dict[str, jax.Array]) -> dict:
    """Parameters of the module from sites such as net/first.kernel."""
    tree: dict = {}
    for name, value in sites.items():
        layer, leaf = name.removeprefix("net/").rsplit(".", 1)
        tree.setdefault(layer, {})[leaf] = value
    return tree


def make_kernel(
    sampler: str, augment: bool, config: Callable = factors, **settings: object
) -> object:
    """The paper's sampler with its prior, temperature and start."""
    model = make_model(PRIOR_VARIANCE[sampler], augment)
    if sampler == "PXSGHMC":
        settings["config"] = config
    temperature = 0.01 if augment else 1.0
    return kim_2025(
        model, sampler, temperature=temperature, init_strategy=init_to_sample, **settings
    )


class Case(NamedTuple):
    """A network to measure.

    Attributes:
        model: NumPyro model of images and labels.
        logits: function of sites and images; there are 10 classes.
        shape: shape of an image.
        config: factors by site.
        batch_size: rows per step; the papers use 256 and 128.
    """

    model: Callable
    logits: Callable
    shape: tuple[int, ...]
    config: Callable
    batch_size: int


def cases() -> dict[str, Case]:
    """The networks by name."""
    resnet = make_model(PRIOR_VARIANCE["SGHMC"], augment=False)
    return {
        "resnet": Case(
            resnet,
            lambda position, x: ResNet20().apply({"params": nested(position)}, x),
            (32, 32, 3),
            factors,
            32,
        ),
        "lenet": Case(
            partial(mnist.network, kind="lenet"),
            mnist.logits_of,
            (784,),
            lambda site: Expanded(prior_scale=1.0) if site["name"].endswith("w") else None,
            128,
        ),
    }


def measure(name: str, num_steps: int = 16) -> None:
    """Seconds for start, compilation and a step, of the kernels and of a hand-written loop."""
    case = cases()[name]
    x = random.normal(random.key(0), (256, *case.shape))
    y = random.randint(random.key(1), (256,), 0, 10)
    settings = {
        "step_size": 1e-5,
        "friction": 100.0,
        "num_steps": num_steps,
        "batch_size": case.batch_size,
        "init_strategy": init_to_sample,
        "control_variate": False,
    }
    kernels = {
        "SGHMC": SGHMC(case.model, **settings),
        "PXSGHMC": SGHMC(handlers.reparam(case.model, config=case.config), **settings),
    }
    programs, states, rows = {}, {}, {}
    for kind, kernel in kernels.items():
        begun = time.time()
        state = jax.block_until_ready(kernel.init(random.key(0), 0, None, (x, y), {}))
        started = time.time()
        sample = jax.jit(lambda state, x, y, kernel=kernel: kernel.sample(state, (x, y), {}))
        programs[kind], states[kind] = sample.lower(state, x, y).compile(), state
        rows[kind] = [started - begun, time.time() - started]
    position = states["SGHMC"].z
    begun = time.time()
    by_hand = jax.jit(hand_written(case.logits, case.batch_size, num_steps))
    start = (position, jax.tree.map(jnp.zeros_like, position), random.key(0))
    programs["by hand"], states["by hand"] = by_hand.lower(start, x, y).compile(), start
    rows["by hand"] = [0.0, time.time() - begun]
    seconds: dict[str, list[float]] = {kind: [] for kind in programs}
    for _ in range(5):
        for kind, program in programs.items():
            begun = time.time()
            states[kind] = jax.block_until_ready(program(states[kind], x, y))
            seconds[kind].append((time.time() - begun) / num_steps)
    print("| sampler | init (s) | compile (s) | over by hand | ms per step | over by hand |")
    print("|---|---|---|---|---|---|")
    best = {kind: min(s) for kind, s in seconds.items()}
    for kind, (init, compiling) in rows.items():
        print(
            f"| {name}, {kind} | {init:.1f} | {compiling:.1f} "
            f"| {compiling / rows['by hand'][1]:.2f} | {1000 * best[kind]:.1f} "
            f"| {best[kind] / best['by hand']:.2f} |"
        )


def memory(batch_size: int = 256) -> str:
    """Markdown: megabytes of states, and of temporary arrays of programs, which are not run."""
    two = {"config": partial(factors, number=2)}
    x = jax.ShapeDtypeStruct((TRAINING_ROWS, 32, 32, 3), float)
    y = jax.ShapeDtypeStruct((TRAINING_ROWS,), int)
    lines = [f"jax {jax.__version__}, {jax.default_backend()}, {batch_size} rows per step.", ""]
    lines += ["| sampler | state, MB | temporary, MB |", "|---|---|---|"]
    for name, more in {"SGHMC": {}, "PXSGHMC": {}, "PXSGHMC, two factors": two}.items():
        settings = {"num_rows": TRAINING_ROWS, "batch_size": batch_size, "steps_per_cycle": 2}
        kernel = make_kernel(name.split(",")[0], augment=False, **settings, **more)

        def start(key: jax.Array, x: jax.Array, y: jax.Array, kernel: Any = kernel) -> Any:
            return kernel.init(key, 0, None, (x, y), {})

        state = jax.eval_shape(start, random.key(0), x, y)
        sample = jax.jit(lambda state, x, y, kernel=kernel: kernel.sample(state, (x, y), {}))
        # fast to compile; arrays are assigned before
        found = sample.lower(state, x, y).compile({"xla_backend_optimization_level": 0})
        sizes = found.memory_analysis()
        lines.append(
            f"| {name} | {sizes.output_size_in_bytes / 1e6:.2f} "
            f"| {sizes.temp_size_in_bytes / 1e6:.2f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def hand_written(logits: Callable, batch_size: int, num_steps: int) -> Callable:
    """A draw of SGHMC without this package, from (position, momentum, key)."""
    h, friction, variance = 1e-5, 100.0, PRIOR_VARIANCE["SGHMC"]

    def draw(carry: tuple, x: jax.Array, y: jax.Array) -> tuple:
        def energy(position: dict, rows: jax.Array) -> jax.Array:
            log_p = jax.nn.log_softmax(logits(position, x[rows]))
            likely = jnp.take_along_axis(log_p, y[rows][:, None], 1)
            prior = sum(jnp.sum(v**2) for v in position.values()) / (2 * variance)
            return prior - len(x) / batch_size * jnp.sum(likely)

        def step(_: int, carry: tuple) -> tuple:
            position, momentum, key = carry
            key, key_rows, key_noise = random.split(key, 3)
            grad = jax.grad(energy)(position, random.randint(key_rows, (batch_size,), 0, len(x)))
            keys = random.split(key_noise, len(position))
            scale = (2 * friction * h) ** 0.5
            momentum = {
                name: (1 - friction * h) * r - h * grad[name] + scale * random.normal(k, r.shape)
                for (name, r), k in zip(momentum.items(), keys, strict=True)
            }
            position = {name: v + h * momentum[name] for name, v in position.items()}
            return position, momentum, key

        return lax.fori_loop(0, num_steps, step, carry)

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=os.environ.get("NUMPYRO_GEOM_DATA"))
    parser.add_argument("--directory", help="where the run is kept; it goes on from there")
    parser.add_argument("--sampler", choices=sorted(PRIOR_VARIANCE), default="SGHMC")
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--steps-per-cycle", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20 steps on generated images")
    parser.add_argument(
        "--measure", nargs="+", choices=["resnet", "lenet"], help="starting, compiling and a step"
    )
    parser.add_argument("--memory", action="store_true", help="memory of a step, as compiled")
    parsed = parser.parse_args()
    if parsed.memory:
        path = Path(__file__).with_name("benchmarks") / "long" / "cifar_memory.md"
        path.write_text(memory())
        return
    for name in parsed.measure or ():
        measure(name)
    if parsed.measure is None:
        sample(parsed)


if __name__ == "__main__":
    main()
