"""Networks on digits: SGHMC with and without parameter expansion, at equal numbers of gradients.

This follows the image experiments of Kim, Nam, Yun, Yang and Lee, "Parameter Expanded Stochastic
Gradient Markov Chain Monte Carlo" (ICLR 2025, sections 5.2 and 5.3). There, a matrix W = P V Q in
place of W gives more diverse draws (larger ensemble ambiguity, larger distances between draws) and
a better averaged prediction. The paper has a residual network of 20 layers on CIFAR-10, batches of
256, and 100 cycles of 5,000 steps from a random start. This script is small enough for two CPU
cores. It has a fully connected network (inputs)-400-10 and a convolutional network (two layers of 8
and 16 channels), both ReLU. The data are scikit-learn's digits (8 by 8, 1,438 training rows and 359
test rows, a fixed split). If a folder has MNIST, its first 10,000 rows with its 10,000 test rows
are used too (not in the table).

All methods start from the same Adam solution of the model without expansion, a new one for each
seed. They run the same ten cosine cycles of 100 steps of 64 rows, with a draw at the end of each
cycle. The first two cycles are left out. The momentum decay gamma h is 0.1 at the peak. Peak step
sizes h are given as the papers' learning rate N h^2. They are tuned for each method on the same
grid with `--tune`, by the negative log-likelihood of held-out training rows (MNIST uses the best
values of the digits). Priors are the paper's: N(0, 0.05) for SGHMC's weights. Under
the paper's model they are N(0, 0.02) for V and N(0, 0.5) for the entries of the factors, which is
another model. By the paper's rule, the input side of the first layer and the output side of the
last have no factor. The methods are:

    SGHMC                     no expansion
    PX posterior              the same posterior, sampled through factors
    PX posterior, rank 16     with factors D + L1' L2 (fully connected network only)
    PX factors                the paper's model, whose friction on factors is a hundredth

Results on the digits, three seeds (`docs/tables`), of a form in which factors also multiplied
biases and steps moved P and Q themselves: the order of the methods is the paper's. Under
"factors", the averaged prediction is better (fully connected: negative log-likelihood 0.06 to 0.07
against 0.18) and the draws are more diverse. But SGHMC without expansion has the same likelihood
(0.06) with a wider prior alone, `--prior-variance 0.5`, at a seventh of the time, with less
diversity. So at least a part of the gain comes from the other model. Expansion that leaves the
posterior unchanged does not help: full factors need a smaller step or predict worse, and factors of
rank 16 are about equal to none. The step sizes of the convolutional network come from three points
of the grid for SGHMC; the other methods use the same values.

    python examples/digits_network.py [--networks dense convolution] [--datasets digits mnist]
    python examples/digits_network.py --tune
    python examples/digits_network.py --quick

MNIST comes from `FOLDER/mnist_784.npz` (arrays X, y and n_train), with --data-dir or the variable
NUMPYRO_GEOM_DATA; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro import handlers
from numpyro.infer import init_to_sample
from numpyro.infer.util import initialize_model
from scipy.special import log_softmax, logsumexp

from numpyro_geom import SGHMC, Expanded
from numpyro_geom.diagnostics import PredictionStream
from numpyro_geom.model.model import Model
from numpyro_geom.model.plates import read_subsampling
from numpyro_geom.sampling.schedules import cyclical

CLASSES = 10
HIDDEN = 400
PRIOR_VARIANCE = 0.05
EXPANDED_PRIOR_VARIANCE = 0.02
MOMENTUM_DECAY = 0.1
GRID = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Learning rates N h^2 at the peak."""


# --- data


class Data(NamedTuple):
    """Images in [0, 1], shape (rows, side, side, 1), and their classes.

    Attributes:
        X: training images.
        y: their classes.
        test_X: test images.
        test_y: their classes.
        origin: source of the data, in words.
    """

    X: np.ndarray
    y: np.ndarray
    test_X: np.ndarray
    test_y: np.ndarray
    origin: str


def load_digits() -> Data:
    """The digits of scikit-learn; a fifth of them are test rows."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install 'numpyro_geom[examples]'"
        ) from error
    images, y = datasets.load_digits(return_X_y=True)
    X = _as_images(images / 16)
    rows = np.random.default_rng(0).permutation(len(y))
    train, test = rows[: round(0.8 * len(y))], rows[round(0.8 * len(y)) :]
    origin = f"scikit-learn, seeded split of {len(train)} and {len(test)} rows"
    return Data(X[train], y[train], X[test], y[test], origin)


def load_mnist(data_dir: str | os.PathLike | None = None, num_rows: int = 10_000) -> Data:
    """The first rows of MNIST's training part and of its test part, from a folder.

    Args:
        data_dir: folder with `mnist_784.npz`; None for the folder in NUMPYRO_GEOM_DATA.
        num_rows: largest number of rows of each part.

    Raises:
        FileNotFoundError: without such a file.
        ValueError: for a file with other contents.
    """
    if data_dir is None:
        data_dir = os.environ.get("NUMPYRO_GEOM_DATA")
    if data_dir is None:
        raise FileNotFoundError(
            "no folder with mnist_784.npz is known: pass --data-dir or set NUMPYRO_GEOM_DATA"
        )
    path = Path(data_dir).expanduser() / "mnist_784.npz"
    if not path.is_file():
        raise FileNotFoundError(
            f"expected {path}, which is no file: change --data-dir or NUMPYRO_GEOM_DATA"
        )
    with np.load(path, allow_pickle=False) as arrays:
        missing = {"X", "y", "n_train"} - set(arrays.files)
        if missing:
            raise ValueError(f"{path} must have X, y and n_train, and lacks {sorted(missing)}")
        X, y, cut = arrays["X"], arrays["y"], int(arrays["n_train"])
    if X.ndim != 2 or round(X.shape[1] ** 0.5) ** 2 != X.shape[1] or y.shape != X.shape[:1]:
        raise ValueError(
            f"{path} must have X of shape (rows, side^2) and y of shape (rows,), got {X.shape} and "
            f"{y.shape}"
        )
    train = slice(0, min(cut, num_rows))
    test = slice(cut, min(len(y), cut + num_rows))
    y = np.asarray(y, int)
    origin = f"{path.name}, first {train.stop} and {test.stop - cut} rows"
    return Data(_as_images(X[train] / 255), y[train], _as_images(X[test] / 255), y[test], origin)


def _as_images(X: np.ndarray) -> np.ndarray:
    side = round(X.shape[1] ** 0.5)
    return X.reshape(-1, side, side, 1).astype(np.float32)


def held_out(data: Data) -> Data:
    """The training part alone; its last fifth replaces the test part."""
    cut = round(0.8 * len(data.y))
    X, y = data.X, data.y
    return Data(X[:cut], y[:cut], X[cut:], y[cut:], f"{data.origin}; a fifth held out")


# --- networks


def weights(name: str, variance: float, *shape: int) -> jax.Array:
    """A site of normal weights."""
    return numpyro.sample(name, dist.Normal(0, variance**0.5).expand(shape).to_event(len(shape)))


def dense_logits(w: Mapping[str, jax.Array], X: jax.Array) -> jax.Array:
    """Logits, shape (rows, classes), of the fully connected network."""
    hidden = jax.nn.relu(X.reshape(len(X), -1) @ w["w1"] + w["b1"])
    return hidden @ w["w2"] + w["b2"]


def dense(X, y=None, hidden=HIDDEN, variance=PRIOR_VARIANCE):
    """The model of the network with one hidden layer."""
    w = {
        "w1": weights("w1", variance, X.shape[1] * X.shape[2], hidden),
        "b1": weights("b1", variance, hidden),
        "w2": weights("w2", variance, hidden, CLASSES),
        "b2": weights("b2", variance, CLASSES),
    }
    with numpyro.plate("rows", X.shape[0]) as i:
        logits = dense_logits(w, X[i])
        numpyro.sample("y", dist.Categorical(logits=logits), obs=None if y is None else y[i])


def convolution_logits(w: Mapping[str, jax.Array], X: jax.Array) -> jax.Array:
    """Logits, shape (rows, classes), of the convolutional network."""

    def layer(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        dimensions = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dimensions)
        return jax.nn.relu(x + bias)

    x = layer(X, w["k1"], w["b1"])
    rows, side, _, channels = x.shape
    x = x.reshape(rows, side // 2, 2, side // 2, 2, channels).max(axis=(2, 4))
    x = layer(x, w["k2"], w["b2"]).max(axis=(1, 2))
    return x @ w["w3"] + w["b3"]


def convolution(X, y=None, channels=(8, 16), variance=PRIOR_VARIANCE):
    """Two layers of 3 by 3 kernels with pooling between them; global max pooling at the end."""
    first, second = channels
    w = {
        "k1": weights("k1", variance, 3, 3, 1, first),
        "b1": weights("b1", variance, first),
        "k2": weights("k2", variance, 3, 3, first, second),
        "b2": weights("b2", variance, second),
        "w3": weights("w3", variance, second, CLASSES),
        "b3": weights("b3", variance, CLASSES),
    }
    with numpyro.plate("rows", X.shape[0]) as i:
        logits = convolution_logits(w, X[i])
        numpyro.sample("y", dist.Categorical(logits=logits), obs=None if y is None else y[i])


class Network(NamedTuple):
    """A model, its predictions, and the sites of its factors.

    Attributes:
        model: NumPyro model of ``(X, y)``.
        logits: function of the sites and of images.
        sites: how many factors the sides of each matrix have, if not one.
    """

    model: Callable
    logits: Callable
    sites: dict[str, dict[str, int]]


NETWORKS = {
    "dense": Network(dense, dense_logits, {"w1": {"left": 0}, "w2": {"right": 0}}),
    "convolution": Network(
        convolution, convolution_logits, {"k1": {"left": 0}, "k2": {}, "w3": {"right": 0}}
    ),
}


# --- measures


class Measures(NamedTuple):
    """Measures of a chain's draws.

    Attributes:
        accuracy: share of test rows whose class has the largest averaged probability.
        nll: mean negative log-likelihood of the averaged probabilities, in nats.
        ece: expected calibration error of the averaged probabilities.
        ambiguity: mean negative log-likelihood of single draws minus that of the mean logits.
        distance: mean Euclidean distance between successive draws of all weights and biases.
        relative: the same divided by the norm of the earlier draw.
    """

    accuracy: float
    nll: float
    ece: float
    ambiguity: float
    distance: float
    relative: float


def ensemble_ambiguity(logits: np.ndarray) -> float:
    """Mean loss of single draws minus the loss of the mean logits, equation 41 of the paper.

    The paper's equation has log-likelihoods; losses make it at least 0. It does not depend on the
    labels.

    Args:
        logits: shape (draws, rows, classes).
    """
    return float(-logsumexp(log_softmax(logits, axis=-1).mean(axis=0), axis=-1).mean())


def distances(draws: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Mean distance between successive draws: absolute, and over the norm of the earlier draw."""
    flat = np.concatenate([np.reshape(x, (len(x), -1)) for x in draws.values()], axis=1)
    if len(flat) < 2:
        return 0.0, 0.0
    steps = np.linalg.norm(np.diff(flat, axis=0), axis=1)
    return float(steps.mean()), float((steps / np.linalg.norm(flat[:-1], axis=1)).mean())


def predict(network: Network, draws: Mapping[str, Any], X: np.ndarray) -> np.ndarray:
    """Logits, shape (draws, rows, classes)."""
    X = jnp.asarray(X)
    by_draw = {name: jnp.asarray(x) for name, x in draws.items()}
    return np.asarray(lax.map(lambda w: network.logits(w, X), by_draw), np.float64)


def measure(network: Network, draws: Mapping[str, Any], data: Data) -> Measures:
    """All measures, on the test part.

    Raises:
        FloatingPointError: if one is not finite.
    """
    logits = predict(network, draws, data.test_X)
    stream = PredictionStream(data.test_y, logits=True)
    stream.add(logits[None])
    result = Measures(
        accuracy=stream.accuracy,
        nll=stream.nll,
        ece=stream.calibration_error,
        ambiguity=ensemble_ambiguity(logits),
        **dict(zip(("distance", "relative"), distances(draws), strict=True)),
    )
    if not np.all(np.isfinite(result)):
        raise FloatingPointError(f"a measure is not finite: {result}")
    return result


# --- methods


@dataclasses.dataclass(frozen=True)
class Effort:
    """The cost of a method.

    Attributes:
        mode_steps: Adam steps to the start.
        period: stochastic-gradient steps per cycle, and so per draw.
        left_out: cycles before the first draw that counts.
        cycles: number of draws that count.
        batch_size: rows per step.
    """

    mode_steps: int = 1000
    period: int = 100
    left_out: int = 2
    cycles: int = 8
    batch_size: int = 64

    @property
    def num_gradients(self) -> int:
        """Gradient evaluations of a chain."""
        return self.period * (self.left_out + self.cycles)


TUNE = Effort(left_out=1, cycles=3)
QUICK = Effort(mode_steps=300, period=50, left_out=1, cycles=4)

START = "Adam, the start"


def methods(network: Network) -> dict[str, dict[str, Expanded]]:
    """Method name -> factors by site; low rank only if a side is long enough for it to matter."""

    def expanded(**settings: Any) -> dict[str, Expanded]:
        return {name: Expanded(**sides, **settings) for name, sides in network.sites.items()}

    found = {
        "SGHMC": {},
        "PX posterior": expanded(),
        "PX posterior, rank 16": expanded(rank=16),
        "PX factors": expanded(factor_scale=0.5**0.5, prior_scale=EXPANDED_PRIOR_VARIANCE**0.5),
    }
    if "w2" not in network.sites:
        del found["PX posterior, rank 16"]
    return found


LEARNING_RATES = {
    "dense": {
        "SGHMC": 0.1,
        "PX posterior": 0.03,
        "PX posterior, rank 16": 0.1,
        "PX factors": 0.01,
    },
    "convolution": {
        "SGHMC": 0.03,
        "PX posterior": 0.03,
        "PX factors": 0.01,
    },
}
"""N h^2 at the peak, by network and method. For the fully connected network, `--tune` chose them on
the digits. For the convolutional network, SGHMC's was chosen among 0.03, 0.1 and 0.3, and its
expansions are not tuned."""


def prepare(model: Callable, X: jax.Array, y: jax.Array, key: jax.Array, effort: Effort) -> dict:
    """The start of the chains: Adam on minibatches, with a rate that falls along a cosine."""
    key_start, key_stream, key_steps = random.split(key, 3)
    plan = read_subsampling(model, (X, y), {}, effort.batch_size)
    info = initialize_model(key_start, model, init_strategy=init_to_sample, model_args=(X, y))
    adam = optax.adam(optax.cosine_decay_schedule(0.003, effort.mode_steps))

    @jax.jit
    def search(position: dict, X: jax.Array, y: jax.Array) -> dict:
        potential = Model(model, (X, y), {}, plan).potential()

        def step(k: jax.Array, carry: tuple) -> tuple:
            position, state, stream = carry
            batch, stream = potential.draw(random.fold_in(key_steps, k), stream)
            grad = jax.grad(potential.energy)(position, batch)
            update, state = adam.update(jax.tree.map(lambda g: g / len(y), grad), state)
            return optax.apply_updates(position, update), state, stream

        carry = (position, adam.init(position), potential.init_stream(key_stream))
        return lax.fori_loop(0, effort.mode_steps, step, carry)[0]

    return search(info.param_info.z, X, y)


def make_kernel(
    model: Callable, factors: dict[str, Expanded], rate: float, num_rows: int, effort: Effort
) -> SGHMC:
    """A kernel of cosine cycles from the peak h with N h^2 = rate, one draw at each cycle's end."""
    peak = (rate / num_rows) ** 0.5
    return SGHMC(
        handlers.reparam(model, config=factors),
        friction=MOMENTUM_DECAY / peak,
        step_size=cyclical(peak, effort.period),
        num_steps=effort.period,
        batch_size=effort.batch_size,
    )


class Chain(NamedTuple):
    """A chain's draws and their cost.

    Attributes:
        draws: dict site -> array, draws first; all sites are real-valued.
        undone: share of steps that the kernel undid.
        seconds: seconds per 1,000 gradients, in the fastest cycle.
    """

    draws: dict[str, np.ndarray]
    undone: float
    seconds: float


def run_chain(
    kernel: SGHMC, sample: Callable, start: dict, rows: tuple, key: jax.Array, effort: Effort
) -> Chain:
    """Run cycle by cycle, so that the time excludes compilation and other work on the machine.

    Args:
        kernel: from `make_kernel`.
        sample: its compiled ``sample``, which chains share.
        start: dict site -> array.
        rows: X and y.
        key: key of the chain.
        effort: cycles.
    """
    state = kernel.init(key, effort.left_out, start, rows, {})
    values = jax.jit(kernel.postprocess_fn(rows, {}))
    draws, undone, seconds = [], 0, []
    for cycle in range(effort.left_out + effort.cycles):
        begin = time.perf_counter()
        state = jax.block_until_ready(sample(state, rows, {}))
        seconds.append(time.perf_counter() - begin)
        undone += int(state.num_diverging)
        if cycle >= effort.left_out:
            draws.append(jax.tree.map(np.asarray, values(state.z)))
    stacked = jax.tree.map(lambda *x: np.stack(x), *draws)
    return Chain(stacked, undone / effort.num_gradients, 1000 * min(seconds) / effort.period)


# --- experiment


class Result(NamedTuple):
    """The result of one method with one seed.

    Attributes:
        data: name of the data.
        network: name of the network.
        method: name of the method.
        rate: N h^2 at the peak.
        measures: measures on the test part.
        undone: share of steps that the kernel undid.
        seconds: seconds per 1,000 gradients.
    """

    data: str
    network: str
    method: str
    rate: float
    measures: Measures
    undone: float
    seconds: float


def at_identity(site: str, value: jax.Array, factors: Expanded) -> dict[str, jax.Array]:
    """A start at a value of an expanded site: V is this value, and the factors are the identity."""

    def model() -> None:
        numpyro.sample(site, dist.Normal(0, 1).expand(value.shape).to_event())

    expanded = handlers.reparam(model, config={site: factors})
    trace = handlers.trace(handlers.seed(expanded, random.key(0))).get_trace()
    sites = {name: x["value"] for name, x in trace.items() if x["type"] == "sample"}
    return {name: value if name.endswith("_V") else 0 * x for name, x in sites.items()}


def run_network(
    data_name: str,
    data: Data,
    network_name: str,
    network: Network,
    chosen: Sequence[str],
    rates: Mapping[str, float],
    effort: Effort,
    seeds: Sequence[int],
) -> list[Result]:
    """All methods from the same starts, one for each seed."""
    X, y = jnp.asarray(data.X), jnp.asarray(data.y)
    starts = [prepare(network.model, X, y, random.key(seed), effort) for seed in seeds]
    record = partial(Result, data_name, network_name)
    results = []
    for start in starts:
        draw = {name: value[None] for name, value in start.items()}
        results.append(record(START, 0.0, measure(network, draw, data), 0.0, 0.0))
    available = methods(network)
    for name in chosen:
        kernel = make_kernel(network.model, available[name], rates[name], len(y), effort)
        sample = jax.jit(kernel.sample)
        for seed, start in zip(seeds, starts, strict=True):
            # a key by name, so that a method's draws do not depend on the other methods
            key = random.fold_in(random.key(seed), zlib.crc32(name.encode()))
            begin = time.perf_counter()
            at = dict(start)
            for site, factors in available[name].items():
                at |= at_identity(site, at.pop(site), factors)
            chain = run_chain(kernel, sample, at, (X, y), key, effort)
            found = measure(network, chain.draws, data)
            results.append(record(name, rates[name], found, chain.undone, chain.seconds))
            print(
                f"  {name}, seed {seed}: accuracy {found.accuracy:.4f}, NLL {found.nll:.4f}, "
                f"undone {chain.undone:.3f}, {time.perf_counter() - begin:.1f} s",
                flush=True,
            )
    return results


def tune(
    data_name: str,
    data: Data,
    network_name: str,
    network: Network,
    chosen: Sequence[str],
    effort: Effort,
) -> dict[str, float]:
    """For each method, the learning rate of the grid with the smallest held-out NLL."""
    data, best = held_out(data), {}
    X, y = jnp.asarray(data.X), jnp.asarray(data.y)
    start = prepare(network.model, X, y, random.key(100), effort)
    available = methods(network)
    for name in chosen:
        losses = {}
        for rate in GRID:
            kernel = make_kernel(network.model, available[name], rate, len(y), effort)
            chain = run_chain(
                kernel, jax.jit(kernel.sample), start, (X, y), random.key(101), effort
            )
            try:
                losses[rate] = measure(network, chain.draws, data).nll
            except FloatingPointError:
                losses[rate] = float("inf")
        best[name] = min(losses, key=losses.__getitem__)
        print(f"{data_name}, {network_name}, {name}: held-out NLL by N h^2")
        print("  " + ", ".join(f"{k:g}: {v:.4f}" for k, v in losses.items()), flush=True)
    return best


def table(results: Sequence[Result]) -> str:
    """Markdown: mean ± sd over seeds; times are those of the fastest cycle."""
    lines = [
        "| data | network | method | N h² | accuracy, % | NLL | ECE | s per 1,000 gradients "
        "| ratio |",
        "|---" * 9 + "|",
    ]

    def of(*what: str) -> list[Result]:
        return [r for r in results if (r.data, r.network, r.method) == what]

    def seconds(mine: list[Result]) -> float:
        return min(r.seconds for r in mine)

    for data, network, method in dict.fromkeys((r.data, r.network, r.method) for r in results):
        mine, base = of(data, network, method), of(data, network, "SGHMC")
        values = np.array([r.measures[:3] for r in mine]) * [100, 1, 1]
        formats = (".2f", ".4f", ".4f")
        cells = [
            f"{mean:{form}} ± {sd:{form}}"
            for mean, sd, form in zip(values.mean(axis=0), values.std(axis=0), formats, strict=True)
        ]
        if method == START:
            cells = ["–", *cells, "–", "–"]
        else:
            ratio = f"{seconds(mine) / seconds(base):.1f}" if base else "–"
            cells = [f"{mine[0].rate:g}", *cells, f"{seconds(mine):.2f}", ratio]
        lines.append(f"| {' | '.join((data, network, method, *cells))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Run the experiment and print its table."""
    available = list(methods(NETWORKS["dense"]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder with mnist_784.npz; default NUMPYRO_GEOM_DATA")
    parser.add_argument("--datasets", nargs="+", choices=["digits", "mnist"], default=["digits"])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", choices=available, default=available)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument(
        "--prior-variance", type=float, default=PRIOR_VARIANCE, help="of weights without expansion"
    )
    parser.add_argument("--tune", action="store_true", help="search the grid, then run")
    parser.add_argument("--out", help="file to write the table to")
    parser.add_argument(
        "--quick", action="store_true", help="digits, 32 hidden units, few steps, one seed"
    )
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    if not options.prior_variance > 0:
        parser.error(f"--prior-variance must be above 0, got {options.prior_variance}")
    effort, sizes = Effort(), {}
    if options.quick:
        effort, options.seeds, sizes = QUICK, 1, {"hidden": 32}
        options.datasets, options.networks = ["digits"], ["dense"]
    networks = {
        name: network._replace(
            model=partial(network.model, variance=options.prior_variance, **sizes)
        )
        for name, network in NETWORKS.items()
    }
    results: list[Result] = []
    for data_name in options.datasets:
        try:
            data = load_digits() if data_name == "digits" else load_mnist(options.data_dir)
        except (OSError, ValueError, ImportError) as error:
            print(f"{data_name} is left out: {error}", file=sys.stderr)
            continue
        for network_name in options.networks:
            network = networks[network_name]
            chosen = [m for m in options.methods if m in methods(network)]
            print(f"{data_name}, from {data.origin}: {network_name}", flush=True)
            args = (data_name, data, network_name, network, chosen)
            if options.tune:
                rates = tune(*args, QUICK if options.quick else TUNE)
            else:
                rates = LEARNING_RATES[network_name]
            results += run_network(*args, rates, effort, range(options.seeds))
    if not results:
        sys.exit("no data set could be loaded: see above, or try --datasets digits")
    text = table(results)
    print(f"\n{text}")
    if options.out is not None:
        Path(options.out).write_text(text + "\n")
    return results


if __name__ == "__main__":
    main()
