"""MNIST with two networks: stochastic-gradient samplers, metrics and baselines in one table.

A network 784-400-400-10 with ReLU units on MNIST's 60,000 training rows, after Yu, Hartmann,
Williams and Klami, "Scalable Stochastic Gradient Riemannian Langevin Dynamics in Non-Diagonal
Metrics" (TMLR 2023, section 4.3, Tables 1, 2, 4, 8 and 10); `--hidden` has the paper's larger
networks. Taken from this paper: batches of 100 rows,
1,000 steps of burn-in, a draw every 100 steps, learning rates l = h N, Monge's alpha^2, Shampoo's
interval of 100 steps, and no Gamma term. The paper has 400 epochs and 10 runs; this script has
`--epochs` and `--seeds`. With `--network lenet`, the same methods sample LeNet-5 (61,706 weights),
as in Franzese et al. (Entropy 2021, Table 3).

Priors, which the paper takes from the library of Fortuin et al. (2021):

    gaussian     weights N(0, 2 / inputs of the layer), biases N(0, 1)
    horseshoe    the same times a scale for each array, half-Cauchy(1). The model is sampled as it
                 is written (centred). The scale has the coordinate u with scale = log(1 + e^u),
                 in which the paper's steps are stable. The paper's code leaves out the Jacobian
                 of u; this script includes it.

Methods besides SGRLD and its metrics, all with the same number of gradients except the ensemble:

    SGHMC          after Kim et al. (ICLR 2025, Table 11, Euler steps there): friction 100, h = 3e-4
    SGHMC cyclical the same as the peak of cosine cycles of 1,000 steps (the paper: 5,000), with a
                   draw at the end of each cycle
    I-SGD    half of the epochs for Adam to a mode, half to sample
    MAP, ensemble  Adam with early stopping on held-out rows, once and five times
    dropout        MAP with a fifth of the hidden dense units left out, also in 30 predictions
    last layer     MAP and 30 draws of the last layer's Laplace approximation (Fisher matrix)

Nothing is tuned here. The published settings are used, and no choice depends on test rows.

    python examples/mnist.py --data-dir FOLDER --cache FOLDER [--epochs 40] [--seeds 0 1]
    python examples/mnist.py --data-dir FOLDER --network lenet --priors gaussian
    python examples/mnist.py --data-dir FOLDER --hidden 800 --priors horseshoe
    python examples/mnist.py --data-dir FOLDER --epochs 400 --seeds 0 1 2 3 4 --together  # on a GPU
    python examples/mnist.py --quick

Measures are for the averaged prediction on the 10,000 test images. AUROC shows how well its entropy
separates MNIST from 2,000 evenly spaced test images of Fashion-MNIST. Curvature is that of the loss
in the pixels, the measure of the paper's Table 2, at 100 test images. No draw of weights is kept:
the chains' draws are predictions, which a `PredictionStream` gathers. With `--cache`, a run that
was killed continues, and finished runs are not repeated. The data are `mnist_784.npz` and
`fashion_mnist.npz` (arrays X, y and n_train) in the folder of --data-dir or NUMPYRO_GEOM_DATA;
without a folder they come from OpenML.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from convolution import convolve
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import MCMC
from scipy.special import log_softmax, logsumexp

from numpyro_geom import (
    SGHMC,
    SGRLD,
    Monge,
    RiemannianLaplace,
    RMSprop,
    Shampoo,
    Wenzel,
    cyclical,
    run_in_segments,
    train,
)
from numpyro_geom.baselines import ISGD
from numpyro_geom.diagnostics import PredictionStream

CLASSES = 10
THINNING = 100
"""Steps per draw."""
CYCLE = 1000
MEMBERS = 5
BASELINE_DRAWS = 30
DROPOUT = 0.2
NETWORKS = ("dense", "lenet")
OUTSIDE_ROWS = 2000
CURVATURE_ROWS = 100
DISTANCE_ENTRIES = 2000
"""Number of weights of each matrix that are used for distances."""
PRIORS = ("gaussian", "horseshoe")
QUICK_METHODS = ("SGRLD identity", "MAP")
"""Methods that `--quick` runs by default; most of its time is compilation."""


# --- data


class Data(NamedTuple):
    """Images in [0, 1], shape (rows, pixels), and their classes.

    Attributes:
        X: training images.
        y: their classes.
        test_X: test images.
        test_y: their classes.
        outside_X: out-of-distribution images.
        origin: source of the data, in words.
    """

    X: np.ndarray
    y: np.ndarray
    test_X: np.ndarray
    test_y: np.ndarray
    outside_X: np.ndarray
    origin: str


OPENML = {"mnist_784": "mnist_784", "fashion_mnist": "Fashion-MNIST"}
"""File names and the names of the same sets on OpenML, where the training part also comes first."""


def load(data_dir: str | os.PathLike | None = None) -> Data:
    """MNIST, and Fashion-MNIST as out-of-distribution images, from a folder or from OpenML.

    Args:
        data_dir: folder with `mnist_784.npz` and `fashion_mnist.npz`; None for the folder in
            NUMPYRO_GEOM_DATA, or for OpenML if this variable is not set.

    Raises:
        FileNotFoundError: for a folder without these files.
        ValueError: for files with other contents.
        ConnectionError: if OpenML cannot be reached.
    """
    if data_dir is None:
        data_dir = os.environ.get("NUMPYRO_GEOM_DATA")
    read = _from_openml if data_dir is None else partial(_from_file, Path(data_dir).expanduser())
    X, y, cut = read("mnist_784")
    others, _, first = read("fashion_mnist")
    if others.shape[1] != X.shape[1]:
        raise ValueError(
            f"expected images of one size, got {X.shape[1]} pixels in mnist_784 and "
            f"{others.shape[1]} in fashion_mnist"
        )
    rows = np.linspace(first, len(others) - 1, min(OUTSIDE_ROWS, len(others) - first)).astype(int)
    origin = "OpenML" if data_dir is None else "files"
    X, others = X.astype(np.float32) / 255, others[rows].astype(np.float32) / 255
    return Data(X[:cut], y[:cut], X[cut:], y[cut:], others, f"MNIST from {origin}")


def _from_file(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray, int]:
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise FileNotFoundError(
            f"expected {path}, which is no file: change --data-dir or NUMPYRO_GEOM_DATA, or leave "
            "both out to use OpenML"
        )
    with np.load(path, allow_pickle=False) as arrays:
        missing = {"X", "y", "n_train"} - set(arrays.files)
        if missing:
            raise ValueError(f"{path} must have X, y and n_train, and lacks {sorted(missing)}")
        X, y, cut = arrays["X"], arrays["y"], int(arrays["n_train"])
    if X.ndim != 2 or y.shape != X.shape[:1] or not 0 < cut < len(X):
        raise ValueError(
            f"{path} must have X of shape (rows, pixels), y of shape (rows,) and n_train below "
            f"their number, got {X.shape}, {y.shape} and {cut}"
        )
    return X, y.astype(np.int32), cut


def _from_openml(name: str) -> tuple[np.ndarray, np.ndarray, int]:
    try:
        from sklearn.datasets import fetch_openml
    except ImportError as error:
        raise ImportError(
            "OpenML needs scikit-learn: pip install 'numpyro_geom[examples]', or pass --data-dir"
        ) from error
    try:
        table = fetch_openml(OPENML[name], version=1, as_frame=False, parser="liac-arff")
    except Exception as error:  # no network, no such set, a broken answer: all the same to the user
        raise ConnectionError(
            f"could not fetch {OPENML[name]!r} from OpenML ({type(error).__name__}: {error}). Try "
            f"again, or put {name}.npz with X, y and n_train in a folder and pass --data-dir"
        ) from error
    X, y = np.asarray(table.data), np.asarray(table.target).astype(np.int32)
    if X.shape != (70_000, 784):
        raise ValueError(f"OpenML's {OPENML[name]!r} must have X of shape (70000, 784): {X.shape}")
    return X, y, 60_000


def digits() -> Data:
    """Small images from scikit-learn; the out-of-distribution images have shuffled pixels."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install 'numpyro_geom[examples]'"
        ) from error
    X, y = datasets.load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    rows, pixels = rng.permutation(len(y)), rng.permutation(X.shape[1])
    X, y = (X[rows] / 16).astype(np.float32), y[rows].astype(np.int32)
    cut = 1400
    outside = X[cut:, pixels]
    return Data(X[:cut], y[:cut], X[cut:], y[cut:], outside, "scikit-learn's digits")


# --- model


class SoftplusHalfCauchy(dist.HalfCauchy):
    """Half-Cauchy that is sampled in the coordinate u with x = log(1 + e^u)."""

    support = constraints.softplus_positive


def shapes_of(kind: str, pixels: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Layer -> shape of its weights; the output layer is last."""
    if kind == "dense":
        return {"1": (pixels, hidden), "2": (hidden, hidden), "3": (hidden, CLASSES)}
    side = (math.isqrt(pixels) // 2 - 4) // 2
    dense = {"3": (16 * side * side, 120), "4": (120, 84), "5": (84, CLASSES)}
    return {"1": (5, 5, 1, 6), "2": (5, 5, 6, 16), **dense}


def features_of(
    w: Mapping[str, jax.Array], X: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Inputs of the last layer, shape (rows, units); with ``key``, some dense units are dropped."""
    layers = sorted(name[1:] for name in w if name[0] == "w")
    for layer in layers[:-1]:
        weights, bias = w[f"w{layer}"], w[f"b{layer}"]
        if weights.ndim == 4:
            if layer == "1":
                side = math.isqrt(X.shape[1])
                X = X.reshape(-1, side, side, 1)
            X = jax.nn.relu(convolve(X, weights, pad=2 if layer == "1" else 0) + bias)
            rows, side, _, channels = X.shape
            X = X.reshape(rows, side // 2, 2, side // 2, 2, channels).max((2, 4))
            continue
        X = jax.nn.relu(X.reshape(len(X), -1) @ weights + bias)
        if key is not None:
            kept = random.bernoulli(random.fold_in(key, int(layer)), 1 - DROPOUT, X.shape)
            X = jnp.where(kept, X / (1 - DROPOUT), 0.0)
    return X


def logits_of(w: Mapping[str, jax.Array], X: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Logits, shape (rows, classes), of sites ``w`` at images ``X``."""
    last = max(name[1:] for name in w if name[0] == "w")
    return features_of(w, X, key) @ w[f"w{last}"] + w[f"b{last}"]


def curvature_of(w: Mapping[str, jax.Array], X: jax.Array, y: jax.Array) -> jax.Array:
    """|largest eigenvalue| / |gradient| of the loss in the pixels, shape (rows,).

    Exact for these networks: logits are linear in the pixels near an image,
    so the Hessian is that of the softmax, ``B B'``, between two Jacobians.
    """

    def of_row(x: jax.Array, label: jax.Array) -> jax.Array:
        def of_image(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = logits_of(w, x[None])[0]
            return logits, logits

        jacobian, logits = jax.jacrev(of_image, has_aux=True)(x)
        p = jax.nn.softmax(logits)
        B = jnp.diag(jnp.sqrt(p)) - jnp.outer(p, jnp.sqrt(p))
        largest = jnp.linalg.eigvalsh(B.T @ jacobian @ jacobian.T @ B)[-1]
        gradient = (p - jax.nn.one_hot(label, CLASSES)) @ jacobian
        return largest / (jnp.linalg.norm(gradient) + 1e-6)

    return jax.vmap(of_row)(X, y)


def network(X, y=None, prior="gaussian", kind="dense", hidden=400, dropout=False):
    """The model, with the layers of a kind of `NETWORKS`."""

    def site(name: str, scale: float, *shape: int) -> jax.Array:
        if prior == "horseshoe":
            scale = scale * numpyro.sample(f"scale_{name}", SoftplusHalfCauchy(1.0))
        return numpyro.sample(name, dist.Normal(0, scale).expand(shape).to_event(len(shape)))

    w = {}
    for layer, shape in shapes_of(kind, X.shape[1], hidden).items():
        w[f"w{layer}"] = site(f"w{layer}", (2 / math.prod(shape[:-1])) ** 0.5, *shape)
        w[f"b{layer}"] = site(f"b{layer}", 1.0, shape[-1])
    with numpyro.plate("rows", X.shape[0]) as i:
        logits = logits_of(w, X[i], numpyro.prng_key() if dropout else None)
        numpyro.sample("y", dist.Categorical(logits=logits), obs=None if y is None else y[i])


def start(key: jax.Array, shapes: Mapping[str, tuple], prior: str) -> dict[str, jax.Array]:
    """The start of chains and training: a draw of the Gaussian prior; biases 0, scales 1."""
    found: dict[str, jax.Array] = {}
    for layer, shape in shapes.items():
        normals = random.normal(random.fold_in(key, int(layer)), shape)
        found[f"w{layer}"] = (2 / math.prod(shape[:-1])) ** 0.5 * normals
        found[f"b{layer}"] = jnp.zeros(shape[-1])
    if prior == "horseshoe":
        found |= {f"scale_{name}": jnp.log(jnp.expm1(1.0)) for name in list(found)}
    return found


# --- tasks and measures


@dataclasses.dataclass(frozen=True)
class Task:
    """A posterior, and the cost of a method.

    Attributes:
        data: the rows.
        prior: one of `PRIORS`.
        kind: one of `NETWORKS`.
        hidden: units of a dense layer.
        epochs: passes over the rows.
        burn_in: steps before the first draw.
        batch_size: rows per step.
        timed: whether steps are timed, in a separate program. Chains of one run step together.
    """

    data: Data
    prior: str
    kind: str = "dense"
    hidden: int = 400
    epochs: int = 40
    burn_in: int = 1000
    batch_size: int = 100
    timed: bool = True

    @property
    def model(self) -> Callable:
        """The model, a function of X and y."""
        return partial(network, prior=self.prior, kind=self.kind, hidden=self.hidden)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Layer -> shape of its weights."""
        return shapes_of(self.kind, self.data.X.shape[1], self.hidden)

    @property
    def rows(self) -> tuple[jax.Array, jax.Array]:
        """The model's arguments."""
        return jnp.asarray(self.data.X), jnp.asarray(self.data.y)

    @property
    def epoch(self) -> int:
        """Steps per epoch."""
        return math.ceil(len(self.data.y) / self.batch_size)

    def start(self, key: jax.Array) -> dict[str, jax.Array]:
        """The start of a chain or of training."""
        return start(key, self.shapes, self.prior)

    def predict(
        self, z: Mapping[str, jax.Array], key: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        """The values kept of a draw: logits, and some weights for distances."""
        some = [z[f"w{layer}"].ravel() for layer in self.shapes]
        some = [x[:: max(1, x.size // DISTANCE_ENTRIES)] for x in some]
        test_X, test_y = (jnp.asarray(x) for x in (self.data.test_X, self.data.test_y))
        every = max(1, len(test_y) // CURVATURE_ROWS)
        return {
            "test": logits_of(z, test_X, key),
            "outside": logits_of(z, jnp.asarray(self.data.outside_X), key),
            "weights": jnp.concatenate(some),
            "curvature": curvature_of(z, test_X[::every], test_y[::every]).mean(),
        }


class Result(NamedTuple):
    """The result of one method with one seed.

    Attributes:
        accuracy: share of test rows whose most probable class is right.
        nll: negative log-likelihood of the averaged prediction, in nats per row.
        brier: its Brier score.
        ece: its expected calibration error.
        auroc: how well its entropy detects out-of-distribution images.
        ambiguity: mean NLL of single draws minus that of the mean logits.
        distance: relative distance of successive draws, from some of the weights; NaN if the draws
            are not a chain.
        draws: number of draws.
        undone: share of steps that were undone or flagged.
        milliseconds: per step of all chains of a run, without compilation and predictions; NaN if
            not measured.
        seconds: total time.
        confidence: mean probability of the most probable class.
        curvature: mean over draws of the loss's curvature in the pixels.
    """

    accuracy: float
    nll: float
    brier: float
    ece: float
    auroc: float
    ambiguity: float
    distance: float
    draws: int
    undone: float = float("nan")
    milliseconds: float = float("nan")
    seconds: float = float("nan")
    confidence: float = float("nan")
    curvature: float = float("nan")


class Measures:
    """Gathers predictions of draws; the draws themselves are not kept."""

    def __init__(self, data: Data) -> None:
        self._test = PredictionStream(data.test_y, logits=True)
        self._outside = PredictionStream(logits=True)
        self._test_y, self._log_p = data.test_y, 0.0
        self._last: np.ndarray | None = None
        self._distances: list[float] = []
        self._curvatures: list[float] = []

    def add(self, predictions: Mapping[str, Any]) -> None:
        """Add draws, shaped (1, draws, ...)."""
        self._test.add(predictions["test"])
        self._outside.add(predictions["outside"])
        self._log_p = self._log_p + log_softmax(predictions["test"], axis=-1).sum((0, 1))
        self._curvatures += np.ravel(predictions["curvature"]).tolist()
        for weights in np.asarray(predictions["weights"])[0]:
            if self._last is not None:
                away = np.linalg.norm(weights - self._last)
                self._distances.append(float(away / np.linalg.norm(self._last)))
            self._last = weights

    def result(self, follow: bool = True) -> Result:
        """All measures; ``follow`` tells whether the draws are successive draws of a chain."""
        from sklearn.metrics import roc_auc_score

        test, p = self._test, self._test.probabilities
        entropies = [stream.entropy for stream in (self._test, self._outside)]
        truth = np.repeat([0, 1], [len(x) for x in entropies])
        return Result(
            accuracy=test.accuracy,
            nll=test.nll,
            brier=float(((p - np.eye(p.shape[1])[self._test_y]) ** 2).sum(axis=1).mean()),
            ece=test.calibration_error,
            auroc=float(roc_auc_score(truth, np.concatenate(entropies))),
            ambiguity=-float(np.mean(logsumexp(self._log_p / test.num_draws, axis=-1))),
            distance=float(np.mean(self._distances)) if follow and self._distances else math.nan,
            draws=test.num_draws,
            confidence=float(p.max(axis=1).mean()),
            curvature=float(np.mean(self._curvatures)),
        )


def of_draws(task: Task, draws: Iterable[tuple]) -> list[Result]:
    """Measures of given draws; each draw is a tuple of arguments of `Task.predict`."""
    measures, predict = Measures(task.data), jax.jit(task.predict)
    for draw in draws:
        found = predict(*draw)
        measures.add(jax.tree.map(lambda x: np.asarray(x)[None, None], found))
    return [measures.result(follow=False)]


# --- methods

Method = Callable[[Task, jax.Array, Path | None], list[Result]]
"""A result for each key; only chains take several keys, in an array."""


def chain(make: Callable[[Task], Any], num_steps: int = THINNING, trained: bool = False) -> Method:
    """A chain of a kernel, from the start, or from a mode that takes half of the epochs."""

    def method(task: Task, key: jax.Array, folder: Path | None) -> list[Result]:
        several, epochs, burn_in = key.ndim > 0, task.epochs, task.burn_in
        keys = jax.vmap(lambda k: random.split(k, 3))(key.reshape(-1))
        positions = [task.start(k) for k in keys[:, 0]]
        if trained:
            epochs = max(1, task.epochs // 2)
            for n, k in enumerate(keys[:, 1]):
                options = {"batch_size": task.batch_size, "init_params": positions[n]}
                positions[n] = train(
                    task.model, k, *task.rows, num_epochs=task.epochs - epochs, **options
                ).position
        measures, kernel = [Measures(task.data) for _ in keys], make(task)
        mcmc = MCMC(
            kernel,
            num_warmup=burn_in // num_steps,
            num_samples=(epochs * task.epoch - burn_in) // num_steps,
            num_chains=len(keys),
            chain_method="vectorized",
            postprocess_fn=task.predict,
            progress_bar=False,
            jit_model_args=True,
        )

        def monitor(predictions: Mapping[str, Any]) -> None:
            for n, of_chain in enumerate(measures):
                of_chain.add({name: x[n : n + 1] for name, x in predictions.items()})

        stacked = jax.tree.map(lambda *x: jnp.stack(x), *positions)
        done = run_in_segments(
            mcmc,
            keys[:, 2] if several else keys[0, 2],
            *task.rows,
            directory=folder,
            draws_per_segment=max(1, 1000 // num_steps),
            init_params=stacked if several else positions[0],
            extra_fields=("num_diverging",),
            monitor=monitor,
        )
        if not done.finished:
            raise KeyboardInterrupt("the run was stopped; called again it goes on")
        fields, state = done.mcmc.get_extra_fields(group_by_chain=True), done.mcmc.last_state
        undone = np.asarray(fields["num_diverging"]).sum(1)
        results = [x.result() for x in measures]
        results = [
            x._replace(undone=float(u / (x.draws * num_steps)))
            for x, u in zip(results, undone, strict=True)
        ]
        if task.timed:
            time_a_step = milliseconds(kernel, state, task, num_steps)
            results = [x._replace(milliseconds=time_a_step) for x in results]
        return results

    return method


def milliseconds(kernel: Any, state: Any, task: Task, num_steps: int) -> float:
    """Milliseconds per step of all chains, in the fastest of three draws after the last draw."""
    sample, rows = jax.jit(kernel.sample), task.rows
    state = jax.block_until_ready(sample(state, rows, {}))
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        state = jax.block_until_ready(sample(state, rows, {}))
        seconds.append(time.perf_counter() - begin)
    return 1000 * min(seconds) / num_steps


RATES: dict[tuple[str, int], dict[str, float]] = {
    ("gaussian", 400): {"identity": 0.05, "wenzel": 0.075, "rmsprop": 2.5e-4, "shampoo": 0.0025},
    ("gaussian", 800): {"identity": 0.05, "wenzel": 0.05, "rmsprop": 5e-4, "shampoo": 0.0075},
    ("gaussian", 1200): {"identity": 0.025, "wenzel": 0.05, "rmsprop": 5e-4, "shampoo": 0.0075},
    ("horseshoe", 400): {"identity": 0.25, "wenzel": 0.75, "rmsprop": 5e-4, "shampoo": 0.005},
    ("horseshoe", 800): {"identity": 0.5, "wenzel": 0.5, "rmsprop": 5e-4, "shampoo": 0.005},
    ("horseshoe", 1200): {"identity": 0.25, "wenzel": 0.25, "rmsprop": 5e-4, "shampoo": 0.005},
}
"""Learning rates l = h N of Yu et al.'s Table 4 by prior and hidden units."""
MONGE = {
    ("gaussian", 1200): (0.025, 0.75),
    ("horseshoe", 400): (0.25, 1.25),
    ("horseshoe", 800): (0.25, 0.5),
    ("horseshoe", 1200): (0.25, 0.075),
}
"""Monge's rate and alpha^2; elsewhere its best alpha^2 is 0."""


def sgrld(name: str, metric: Any = None) -> Method:
    """SGRLD with the rates of Yu et al.; sizes that the paper lacks have those of 400 units."""

    def make(task: Task) -> SGRLD:
        size = (task.prior, task.hidden if task.hidden in (800, 1200) else 400)
        rate, alpha2 = MONGE[size] if name == "monge" else (RATES[size][name], None)
        return SGRLD(
            task.model,
            metric=metric if alpha2 is None else Monge(alpha2=alpha2, decay=0.9),
            divergence="none",
            step_size=rate / len(task.data.y),
            batch_size=task.batch_size,
            batching="epoch",
            num_steps=THINNING,
        )

    return chain(make)


def sghmc(cycle: int | None = None) -> Method:
    """SGHMC with the steps of Kim et al.: a constant step size, or cycles with one draw each."""
    num_steps = THINNING if cycle is None else cycle

    def make(task: Task) -> SGHMC:
        return SGHMC(
            task.model,
            friction=100.0,
            step_size=3e-4 if cycle is None else cyclical(3e-4, cycle),
            batch_size=task.batch_size,
            batching="epoch",
            num_steps=num_steps,
        )

    return chain(make, num_steps)


def isgd(task: Task) -> ISGD:
    """I-SGD with one rate per layer."""
    groups = {name: name[-1] for name in task.start(random.key(0))}
    return ISGD(task.model, groups=groups, batch_size=task.batch_size, num_steps=THINNING)


def mode(task: Task, key: jax.Array, **settings: Any) -> dict[str, jax.Array]:
    """A mode by Adam with early stopping on held-out rows; unconstrained."""
    key_start, key_train = random.split(key)
    return train(
        partial(task.model, **settings),
        key_train,
        *task.rows,
        batch_size=task.batch_size,
        num_epochs=task.epochs,
        patience=3,
        init_params=task.start(key_start),
    ).position


def ensemble(members: int) -> Method:
    """Modes from several starts."""

    def method(task: Task, key: jax.Array, folder: Path | None) -> list[Result]:
        modes = [mode(task, random.fold_in(key, member)) for member in range(members)]
        return of_draws(task, ((position,) for position in modes))

    return method


def dropout(task: Task, key: jax.Array, folder: Path | None) -> list[Result]:
    """A mode trained with dropout, and its predictions with dropout."""
    key_mode, key_units = random.split(key)
    position = mode(task, key_mode, dropout=True)
    return of_draws(task, ((position, k) for k in random.split(key_units, BASELINE_DRAWS)))


def last_layer(task: Task, key: jax.Array, folder: Path | None) -> list[Result]:
    """Laplace approximation of the last layer's weights; the other layers are at a mode."""
    key_mode, key_draw = random.split(key)
    position, last = mode(task, key_mode), max(task.shapes)
    names = (f"w{last}", f"b{last}")
    X, y = task.rows
    found = jax.jit(lambda X: jax.lax.map(partial(features_of, position), X))
    lots = X.reshape(-1, task.batch_size, X.shape[1]) if not len(X) % task.batch_size else X[None]
    features = found(lots).reshape(len(X), -1)
    scales = {names[0]: (2 / features.shape[1]) ** 0.5, names[1]: 1.0}
    if task.prior == "horseshoe":
        scales = {n: s * jax.nn.softplus(position[f"scale_{n}"]) for n, s in scales.items()}

    def model(F: jax.Array, y: jax.Array) -> None:
        w, b = (
            numpyro.sample(n, dist.Normal(0, scales[n]).expand(x.shape).to_event(x.ndim))
            for n, x in ((n, position[n]) for n in names)
        )
        with numpyro.plate("rows", len(F)):
            numpyro.sample("y", dist.Categorical(logits=F @ w + b), obs=y)

    guide = RiemannianLaplace(model, metric="euclidean", mode="euclidean", precision="fisher")
    params = guide.fit(key_draw, features, y, init_params={n: position[n] for n in names})
    draws = guide.sample_posterior(key_draw, params, sample_shape=(BASELINE_DRAWS,))
    each = ({**position, **{n: draws[n][k] for n in names}} for k in range(BASELINE_DRAWS))
    return of_draws(task, ((z,) for z in each))


METHODS: dict[str, Method] = {
    "SGRLD identity": sgrld("identity", "identity"),
    "SGRLD rmsprop": sgrld("rmsprop", RMSprop(decay=0.99, eps=1e-8)),
    "SGRLD wenzel": sgrld("wenzel", Wenzel(decay=0.99, eps=1e-8)),
    "SGRLD monge": sgrld("monge"),
    "SGHMC": sghmc(),
    "MAP": ensemble(1),
    "ensemble": ensemble(MEMBERS),
    "dropout": dropout,
    "last layer": last_layer,
    "SGHMC cyclical": sghmc(CYCLE),
    "I-SGD": chain(isgd, trained=True),
    "SGRLD shampoo": sgrld("shampoo", Shampoo(decay=0.99, eps=1e-8, interval=100)),
}

CHAINS = [name for name in METHODS if name.startswith("SG") or name == "I-SGD"]
"""Methods that take several seeds in one run."""


class Published(NamedTuple):
    """The papers' results: Yu et al., Tables 1 and 8; Franzese et al., Table 3."""

    accuracy: float
    nll: float
    ece: float


PUBLISHED = {
    ("dense", "gaussian", "SGRLD identity"): Published(0.9685, 0.1310, 0.0430),
    ("dense", "gaussian", "SGRLD wenzel"): Published(0.9686, 0.1315, 0.0438),
    ("dense", "gaussian", "SGRLD rmsprop"): Published(0.9689, 0.1307, 0.0447),
    ("dense", "gaussian", "SGRLD shampoo"): Published(0.9689, 0.1286, 0.0421),
    ("dense", "horseshoe", "SGRLD identity"): Published(0.9823, 0.0750, 0.0281),
    ("dense", "horseshoe", "SGRLD wenzel"): Published(0.9807, 0.0768, 0.0248),
    ("dense", "horseshoe", "SGRLD rmsprop"): Published(0.9798, 0.0678, 0.0124),
    ("dense", "horseshoe", "SGRLD monge"): Published(0.9831, 0.0629, 0.0180),
    ("dense", "horseshoe", "SGRLD shampoo"): Published(0.9820, 0.0641, 0.0164),
    ("dense 800", "horseshoe", "SGRLD identity"): Published(0.9818, 0.0798, 0.0316),
    ("dense 800", "horseshoe", "SGRLD wenzel"): Published(0.9789, 0.0839, 0.0273),
    ("dense 800", "horseshoe", "SGRLD rmsprop"): Published(0.9800, 0.0656, 0.0106),
    ("dense 800", "horseshoe", "SGRLD monge"): Published(0.9834, 0.0612, 0.0178),
    ("dense 800", "horseshoe", "SGRLD shampoo"): Published(0.9824, 0.0603, 0.0136),
    ("lenet", "gaussian", "SGRLD identity"): Published(0.9927, 0.0280, 0.0531),
    ("lenet", "gaussian", "SGHMC"): Published(0.9931, 0.0268, 0.0531),
    ("lenet", "gaussian", "MAP"): Published(0.9887, 0.0353, 0.0468),
    ("lenet", "gaussian", "dropout"): Published(0.9913, 0.0363, 0.0541),
    ("lenet", "gaussian", "I-SGD"): Published(0.9916, 0.0264, 0.0491),
}


def skipped(prior: str, method: str, hidden: int = 400) -> bool:
    """Whether the paper omits the pair: there, its best alpha^2 is 0."""
    return method == "SGRLD monge" and prior == "gaussian" and hidden != 1200


# --- experiment


def run_seeds(
    task: Task, method: str, seeds: Sequence[int], cache: Path | None
) -> list[dict[str, Any]]:
    """One method with seeds, as chains of one run if there are several.

    Cached results are reused, and a failure is a result too.
    """
    name = f"{task.prior}-{method.replace(' ', '_')}-"
    kept = [] if cache is None else [cache / f"{name}{seed}.json" for seed in seeds]
    if kept and all(file.is_file() for file in kept):
        return [json.loads(file.read_text()) for file in kept]
    folder = None if cache is None else cache / f"{name}{'-'.join(map(str, seeds))}"
    # a key by name, so that a method's draws do not depend on the other methods
    keys = [random.fold_in(random.key(seed), zlib.crc32(method.encode())) for seed in seeds]
    records: list[dict[str, Any]]
    records = [{"prior": task.prior, "method": method, "seed": seed} for seed in seeds]
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            found = METHODS[method](task, keys[0] if len(keys) == 1 else jnp.stack(keys), folder)
        seconds = (time.perf_counter() - begin) / len(seeds)
        for record, result in zip(records, found, strict=True):
            record |= result._replace(seconds=seconds)._asdict()
    except FloatingPointError as error:
        for record in records:
            record["failed"] = f"{type(error).__name__}: {error}"
    for file, record in zip(kept, records, strict=False):
        file.write_text(json.dumps(record, indent=1))
    if folder is not None and folder.is_dir():
        shutil.rmtree(folder)
    return records


def table(records: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Markdown: means over seeds, and standard deviations if there are several."""
    paper = "Franzese et al." if kind == "lenet" else "Yu et al."
    lines = [
        "| prior | method | seeds | draws | accuracy, % | NLL | Brier | ECE | AUROC | ambiguity "
        "| distance / norm | confidence | curvature | steps undone, % | ms per step "
        f"| {paper}: accuracy, % | NLL | ECE |",
        "|---" * 18 + "|",
    ]
    for prior, method in dict.fromkeys((r["prior"], r["method"]) for r in records):
        mine = [r for r in records if (r["prior"], r["method"]) == (prior, method)]
        good = [r for r in mine if "failed" not in r]
        published = PUBLISHED.get((kind, prior, method))

        def cell(name: str, form: str, factor: float = 1.0, good: list = good) -> str:
            values = np.array([r[name] for r in good], float) * factor
            values = values[np.isfinite(values)]
            if not len(values):
                return "–"
            text = f"{values.mean():{form}}"
            return text if len(values) < 2 else f"{text} ± {values.std(ddof=1):{form}}"

        if good:
            cells = [
                f"{good[0]['draws']}",
                *(cell("accuracy", ".2f", 100), cell("nll", ".4f"), cell("brier", ".4f")),
                *(cell("ece", ".4f"), cell("auroc", ".3f"), cell("ambiguity", ".4f")),
                *(cell("distance", ".3f"), cell("confidence", ".4f"), cell("curvature", ".2f")),
                cell("undone", ".2g", 100),
            ]
            times = [r["milliseconds"] for r in good if np.isfinite(r["milliseconds"])]
            cells.append(f"{min(times):.2f}" if times else "–")
        else:
            cells = ["failed", *["–"] * 11]
        theirs = ["–"] * 3
        if published is not None:
            theirs = [f"{100 * published.accuracy:.2f}", f"{published.nll:.4f}"]
            theirs.append(f"{published.ece:.4f}")
        lines.append(f"| {' | '.join((prior, method, str(len(mine)), *cells, *theirs))} |")
    return "\n".join(lines)


def short(records: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Markdown: a method in a line, with four columns of `table` by prior."""
    rows = [[x.strip() for x in y.split("|")[1:-1]] for y in table(records, kind).splitlines()]
    columns = [rows[0].index(x) for x in ("accuracy, %", "NLL", "ECE", "AUROC")]
    names = [rows[0][k] for k in columns]
    found = {(row[0], row[1]): [row[k] for k in columns] for row in rows[2:]}
    priors = list(dict.fromkeys(prior for prior, _ in found))
    head = ["method", *(f"{p}: {n}" if n == names[0] else n for p in priors for n in names)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for method in dict.fromkeys(method for _, method in found):
        cells = [x for p in priors for x in found.get((p, method), ["–"] * len(names))]
        lines.append(f"| {' | '.join((method, *cells))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the experiment and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder of the two files; default NUMPYRO_GEOM_DATA")
    parser.add_argument("--network", choices=NETWORKS, default="dense")
    parser.add_argument("--hidden", type=int, default=400, help="units of a dense layer")
    parser.add_argument("--priors", nargs="+", choices=PRIORS, default=list(PRIORS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument(
        "--together",
        action="store_true",
        help="all seeds of a chain in one run, as vectorized chains: faster on a GPU",
    )
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--cache", help="folder for what is finished and for runs under way")
    parser.add_argument("--out", help="file to write a short table to")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="scikit-learn's digits, 32 units, few steps, one seed, two methods unless named",
    )
    options = parser.parse_args(arguments)
    if options.hidden < 1:
        parser.error(f"--hidden must be at least 1, got {options.hidden}")
    if options.epochs < 2:
        parser.error(f"--epochs must be at least 2, got {options.epochs}")
    sizes: dict[str, Any] = {
        "epochs": options.epochs,
        "kind": options.network,
        "hidden": options.hidden,
    }
    named = options.network
    if options.hidden != 400 and named == "dense":
        named = f"dense {options.hidden}"
    methods = METHODS if options.methods is None else options.methods
    if options.quick and options.network != "dense":
        parser.error("--quick has images of 8 x 8 pixels, too small for --network lenet")
    if options.quick:
        sizes = {"epochs": 60, "hidden": 32, "burn_in": 200, "batch_size": 50, "timed": False}
        options.seeds = options.seeds[: 2 if options.together else 1]
        methods = QUICK_METHODS if options.methods is None else methods
    try:
        data = digits() if options.quick else load(options.data_dir)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(str(error))
    cache = None
    if options.cache is not None:
        length = "quick" if options.quick else f"epochs-{options.epochs}"
        length = length if named == "dense" else f"{named.replace(' ', '-')}-{length}"
        cache = Path(options.cache).expanduser() / length
        cache.mkdir(parents=True, exist_ok=True)
    print(f"{data.origin}: {len(data.y)} rows, {sizes['epochs']} epochs", flush=True)
    records = []
    for method in methods:
        together = options.together and method in CHAINS
        for seeds in [options.seeds] if together else [[seed] for seed in options.seeds]:
            for prior in options.priors:
                if skipped(prior, method, options.hidden):
                    continue
                found = run_seeds(Task(data, prior, **sizes), method, seeds, cache)
                records += found
                print(*map(json.dumps, found), sep="\n", flush=True)
    records = sorted(records, key=lambda r: r["prior"])
    print(f"\n{table(records, named)}")
    if options.out is not None:
        Path(options.out).write_text(short(records, named) + "\n")
    return records


if __name__ == "__main__":
    main()
