"""UCI regression with a small network: stochastic-gradient samplers side by side.

One hidden layer of 50 ReLU units on nine UCI data sets, after the regression experiment of
Franzese, Milios, Filippone and Michiardi, "A Scalable Bayesian Sampling Method Based on Stochastic
Gradient Descent Isotropization" (Entropy 2021, section 4.2 and appendix C.1). Theirs: batches of 64
rows, 20,000 Adam steps at 0.01 before the samplers start, 100 draws a thousand steps apart, 10
splits. Ours: the prior, which they do not give (weights N(0, 1 / inputs of the layer), biases
N(0, 1), noise precision Gamma(2, rate 0.1), all on standardised data), temperature 1 where they
take 0.01 or temper otherwise, automatic step sizes, Adam's rate falling along a cosine, and the
score: the likelihood of the whole predictive mixture in place of that of a Gaussian with its
moments. The rate in the noise's prior keeps the mode from fitting small sets exactly.

    python examples/uci_regression.py --data-dir FOLDER [--datasets yacht boston] [--splits 10]
    python examples/uci_regression.py --quick

Data come from `FOLDER/uci_<name>.npz` (arrays X, y, and train_index, test_index with one row a
split) or, without such a file, from OpenML. The variable NUMPYRO_GEOM_DATA names a default folder.
`--quick` needs no data: it generates a set of the yacht data's size.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
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
from numpyro.infer import MCMC, NUTS, init_to_sample
from numpyro.infer.util import initialize_model

from numpyro_geom import ISGD, PXSGHMC, SGHMC, SGRLD, SWAG, VSGD, Expansion, Factors
from numpyro_geom.target.plates import read_subsampling
from numpyro_geom.target.potential import model_potential

HIDDEN = 50
BATCH_SIZE = 64
MODE_LEARNING_RATE = 0.01
GENERATED = "generated"


class Source(NamedTuple):
    """Where a data set is on OpenML, and how large it is.

    Attributes:
        shape: rows and columns of X.
        openml: arguments of scikit-learn's `fetch_openml`; None where we know of none.
        drop: columns beside X and y in OpenML's version.
    """

    shape: tuple[int, int]
    openml: dict[str, Any] | None
    drop: tuple[str, ...] = ()


SOURCES = {
    "yacht": Source((308, 6), {"name": "yacht_hydrodynamics", "version": 1}),
    "boston": Source((506, 13), {"data_id": 531}),
    "energy": Source((768, 8), {"data_id": 44960}, ("cooling_load",)),
    "concrete": Source((1030, 8), {"data_id": 44959}),
    "wine": Source((1599, 11), {"data_id": 44972}),
    "kin8nm": Source((8192, 8), {"data_id": 44980}),
    "power": Source((9568, 4), None),
    "naval": Source((11934, 16), {"data_id": 44969}, ("gt_turbine_decay_state_coefficient",)),
    "protein": Source((45730, 9), {"data_id": 44963}),
}
SMALLEST = ("yacht", "boston")
"""Where NUTS is not too slow."""
LEFT_OUT_OF_QUICK = ("SGRLD rmsprop", "SGRLD shampoo", "PX-SGHMC", "VSGD", "NUTS")
"""Methods that `--quick` runs only by name, to stay within a minute."""


# --- data


class Dataset(NamedTuple):
    """A data set and its splits.

    Attributes:
        X: inputs, shape (rows, columns).
        y: targets, shape (rows,).
        train_index: rows of the training part of each split, shape (splits, n).
        test_index: of the test part.
        origin: where it is from, in words.
    """

    X: np.ndarray
    y: np.ndarray
    train_index: np.ndarray
    test_index: np.ndarray
    origin: str


def load_dataset(name: str, data_dir: str | os.PathLike | None = None) -> Dataset:
    """A data set from a folder, or from OpenML.

    Args:
        name: one of `SOURCES`.
        data_dir: folder with `uci_<name>.npz`; None for the one that NUMPYRO_GEOM_DATA names.

    Raises:
        ValueError: for an unknown name, or data that are not what they should be.
        FileNotFoundError: for a folder that does not exist, or a set that is nowhere.
        ConnectionError: if OpenML cannot be reached.
    """
    if name not in SOURCES:
        raise ValueError(f"dataset must be one of {sorted(SOURCES)}, got {name!r}")
    if data_dir is None:
        data_dir = os.environ.get("NUMPYRO_GEOM_DATA")
    if data_dir is not None:
        folder = Path(data_dir).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(
                f"expected a folder of uci_<name>.npz files, got {folder}, which is none: change "
                "--data-dir or NUMPYRO_GEOM_DATA, or leave both out to use OpenML"
            )
        path = folder / f"uci_{name}.npz"
        if path.is_file():
            return _from_file(path)
    return _from_openml(name)


def _from_file(path: Path) -> Dataset:
    with np.load(path, allow_pickle=False) as arrays:
        missing = {"X", "y"} - set(arrays.files)
        if missing:
            raise ValueError(f"{path} must have the arrays X and y, and lacks {sorted(missing)}")
        X, y = np.asarray(arrays["X"], float), np.asarray(arrays["y"], float)
        if X.ndim != 2 or y.shape != X.shape[:1]:
            raise ValueError(
                f"{path} must have X of shape (rows, columns) and y of shape (rows,), got "
                f"{X.shape} and {y.shape}"
            )
        if {"train_index", "test_index"} <= set(arrays.files):
            train, test = arrays["train_index"], arrays["test_index"]
            return Dataset(X, y, np.atleast_2d(train), np.atleast_2d(test), f"{path}, its splits")
    return Dataset(X, y, *seeded_splits(len(y)), f"{path}, seeded 90/10 splits")


def _from_openml(name: str) -> Dataset:
    source = SOURCES[name]
    if source.openml is None:
        raise FileNotFoundError(
            f"we know of no version of {name!r} on OpenML: put uci_{name}.npz with the arrays X "
            "and y in a folder and pass it with --data-dir"
        )
    try:
        from sklearn.datasets import fetch_openml
    except ImportError as error:
        raise ImportError(
            "OpenML needs scikit-learn: pip install 'numpyro_geom[examples]', or pass --data-dir"
        ) from error
    try:
        table = fetch_openml(**source.openml, as_frame=False, parser="liac-arff")
    except Exception as error:  # no network, no such set, a broken answer: all the same to the user
        raise ConnectionError(
            f"could not fetch {name!r} from OpenML ({type(error).__name__}: {error}). Try again, "
            f"or put uci_{name}.npz with the arrays X and y in a folder and pass --data-dir"
        ) from error
    keep = [i for i, column in enumerate(table.feature_names) if column not in source.drop]
    X, y = np.asarray(table.data[:, keep], float), np.asarray(table.target, float)
    if X.shape != source.shape or y.shape != X.shape[:1]:
        raise ValueError(
            f"OpenML's {name!r} must have X of shape {source.shape}, got {X.shape} and y of shape "
            f"{y.shape}: the version there is another one; pass --data-dir with the one you want"
        )
    return Dataset(X, y, *seeded_splits(len(y)), "OpenML, seeded 90/10 splits (no standard ones)")


def seeded_splits(num_rows: int, num_splits: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of random splits, nine tenths for training, the same at every call."""
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(num_rows) for _ in range(num_splits)])
    cut = round(0.9 * num_rows)
    return rows[:, :cut], rows[:, cut:]


def generated(num_rows: int = 308, num_columns: int = 6) -> Dataset:
    """A smooth function of a few columns plus noise, in the size of the yacht data."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(num_rows, num_columns))
    y = 10 + 5 * np.sin(2 * X[:, 0]) + 3 * X[:, 1] * X[:, -1] + rng.normal(size=num_rows)
    return Dataset(X, y, *seeded_splits(num_rows), "generated, seeded 90/10 splits")


class Scale(NamedTuple):
    """What standardises one array by column."""

    mean: np.ndarray
    sd: np.ndarray

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Standardised values."""
        return (values - self.mean) / self.sd


def scale_of(values: np.ndarray) -> Scale:
    """Mean and standard deviation by column; constant columns are only centred."""
    sd = values.std(axis=0)
    return Scale(values.mean(axis=0), np.where(sd > 0, sd, 1.0))


# --- model and score


def network(X, y=None):
    """One hidden layer of ReLU units and Gaussian noise of unknown precision."""
    columns = X.shape[1]
    w1 = numpyro.sample("w1", dist.Normal(0, columns**-0.5).expand([columns, HIDDEN]).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([HIDDEN]).to_event(1))
    w2 = numpyro.sample("w2", dist.Normal(0, HIDDEN**-0.5).expand([HIDDEN]).to_event(1))
    b2 = numpyro.sample("b2", dist.Normal(0, 1))
    precision = numpyro.sample("precision", dist.Gamma(2.0, 0.1))
    with numpyro.plate("data", X.shape[0]) as i:
        mean = jax.nn.relu(X[i] @ w1 + b1) @ w2 + b2
        numpyro.sample("y", dist.Normal(mean, precision**-0.5), obs=None if y is None else y[i])


def predict(draws: dict[str, Any], X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means, shape (draws, rows), and noise sds, shape (draws,), on the standardised scale."""

    def one(draw: dict) -> jax.Array:
        hidden = jax.nn.relu(jnp.asarray(X, draw["w1"].dtype) @ draw["w1"] + draw["b1"])
        return hidden @ draw["w2"] + draw["b2"]

    weights = {k: jnp.asarray(draws[k]) for k in ("w1", "b1", "w2", "b2")}
    means = np.asarray(lax.map(jax.jit(one), weights), np.float64)
    return means, np.asarray(draws["precision"], np.float64) ** -0.5


class Score(NamedTuple):
    """Root mean squared error and mean negative log-likelihood, on the target's own scale."""

    rmse: float
    mnll: float


def score(means: np.ndarray, sds: np.ndarray, y: np.ndarray, target: Scale) -> Score:
    """Score of the equal mixture of Gaussians N(means[s], sds[s]^2).

    Args:
        means: standardised, shape (draws, rows).
        sds: standardised, shape (draws,).
        y: targets on their own scale, shape (rows,).
        target: what standardised the targets.
    """
    means = target.mean + target.sd * means
    sds = (target.sd * sds)[:, None]
    log_p = -0.5 * ((y - means) / sds) ** 2 - np.log(sds) - 0.5 * math.log(2 * math.pi)
    mixture = np.logaddexp.reduce(log_p, axis=0) - math.log(len(means))
    rmse = np.sqrt(np.mean((y - means.mean(axis=0)) ** 2))
    return Score(float(rmse), float(-np.mean(mixture)))


# --- methods


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much work a method may do.

    Attributes:
        mode_steps: Adam steps to the mode from which all start.
        num_warmup: warm-up draws.
        num_samples: draws that count.
        num_steps: stochastic-gradient steps a draw.
        nuts: warm-up and draws of NUTS.
    """

    mode_steps: int = 20_000
    num_warmup: int = 50
    num_samples: int = 100
    num_steps: int = 1000
    nuts: tuple[int, int] = (300, 300)


QUICK = Effort(mode_steps=2000, num_warmup=30, num_samples=50, num_steps=100, nuts=(50, 50))


class Train(NamedTuple):
    """One split's training part, standardised.

    Attributes:
        X: inputs.
        y: targets.
        mode: unconstrained position that Adam found.
        draw_mode: the same in the sites' supports.
        effort: how much work to do.
    """

    X: jax.Array
    y: jax.Array
    mode: dict[str, jax.Array]
    draw_mode: dict[str, jax.Array]
    effort: Effort

    @property
    def batch_size(self) -> int:
        """Rows a step."""
        return min(BATCH_SIZE, self.X.shape[0] // 2)


def prepare(X: np.ndarray, y: np.ndarray, key: jax.Array, effort: Effort) -> Train:
    """Find the mode from minibatches, with Adam and a rate that falls along a cosine."""
    X, y = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    key_start, key_stream, key_steps = random.split(key, 3)
    plan = read_subsampling(network, (X, y), {}, min(BATCH_SIZE, X.shape[0] // 2))
    info = initialize_model(key_start, network, init_strategy=init_to_sample, model_args=(X, y))
    adam = optax.adam(optax.cosine_decay_schedule(MODE_LEARNING_RATE, effort.mode_steps))

    @jax.jit
    def search(position: dict, X: jax.Array, y: jax.Array) -> dict:
        potential = model_potential(network, plan, (X, y), {})

        def step(k: jax.Array, carry: tuple) -> tuple:
            position, state, stream = carry
            batch, stream = potential.draw(random.fold_in(key_steps, k), stream)
            grad = jax.grad(potential.energy)(position, batch)
            update, state = adam.update(jax.tree.map(lambda g: g / len(y), grad), state)
            return optax.apply_updates(position, update), state, stream

        carry = (position, adam.init(position), potential.init_stream(key_stream))
        return lax.fori_loop(0, effort.mode_steps, step, carry)[0]

    mode = search(info.param_info.z, X, y)
    return Train(X, y, mode, info.postprocess_fn(mode), effort)


Method = Callable[[Train, jax.Array], dict[str, jax.Array]]


def kernel_method(make: Callable[..., Any]) -> Method:
    """Run a stochastic-gradient kernel from the mode."""
    compiled: dict[Any, MCMC] = {}  # the splits of a data set share one program

    def run(train: Train, key: jax.Array) -> dict[str, jax.Array]:
        effort = train.effort
        if (train.X.shape, effort) not in compiled:
            kernel = make(network, batch_size=train.batch_size, num_steps=effort.num_steps)
            compiled[train.X.shape, effort] = MCMC(
                kernel,
                num_warmup=effort.num_warmup,
                num_samples=effort.num_samples,
                progress_bar=False,
                jit_model_args=True,
            )
        mcmc = compiled[train.X.shape, effort]
        mcmc.run(key, train.X, train.y, init_params=train.mode)
        return mcmc.get_samples()

    return run


def run_map(train: Train, key: jax.Array) -> dict[str, jax.Array]:
    """One draw: the mode."""
    return {name: value[None] for name, value in train.draw_mode.items()}


def run_nuts(train: Train, key: jax.Array) -> dict[str, jax.Array]:
    """The reference, on all rows."""
    num_warmup, num_samples = train.effort.nuts
    mcmc = MCMC(NUTS(network), num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    mcmc.run(key, train.X, train.y, init_params=train.mode)
    return mcmc.get_samples()


def swag_method(guide_class: Any) -> Method:
    """SWAG, which has a mode search of its own."""

    def run(train: Train, key: jax.Array) -> dict[str, jax.Array]:
        effort = train.effort
        guide = guide_class(
            network,
            batch_size=train.batch_size,
            mode_steps=effort.mode_steps,
            mode_learning_rate=MODE_LEARNING_RATE,
            num_steps=effort.num_samples * effort.num_steps,
            init_strategy=init_to_sample,
        )
        key_fit, key_draw = random.split(key)
        params = guide.fit(key_fit, train.X, train.y)
        shape = (effort.num_samples,)
        return guide.sample_posterior(key_draw, params, sample_shape=shape)

    return run


def methods() -> dict[str, Method]:
    """Method name -> function of the training part and a key."""
    hidden_side = Expansion(sites={"w1": Factors(left=0, right=1, vectors=("b1",))})
    return {
        "MAP": run_map,
        "SGLD": kernel_method(SGRLD),
        "SGRLD rmsprop": kernel_method(partial(SGRLD, metric="rmsprop")),
        "SGRLD shampoo": kernel_method(partial(SGRLD, metric="shampoo")),
        "SGHMC": kernel_method(SGHMC),
        "PX-SGHMC": kernel_method(partial(PXSGHMC, expansion=hidden_side)),
        "I-SGD": kernel_method(ISGD),
        "VSGD": kernel_method(VSGD),
        "SWAG": swag_method(SWAG),
        "NUTS": run_nuts,
    }


# --- experiment


class Result(NamedTuple):
    """What one method did on one split; ``score`` is None where it failed."""

    dataset: str
    method: str
    score: Score | None
    seconds: float
    failure: str = ""


def evaluate(method: Method, train: Train, test: tuple, target: Scale, key: jax.Array) -> Score:
    """Score of a method's draws on the test part ``(X, y)``, X standardised and y not.

    Raises:
        FloatingPointError: if the score is not finite.
    """
    result = score(*predict(method(train, key), test[0]), test[1], target)
    if not np.all(np.isfinite(result)):
        raise FloatingPointError(f"the score is not finite: {result}")
    return result


def run_split(
    name: str, data: Dataset, split: int, chosen: dict[str, Method], effort: Effort, seed: int
) -> list[Result]:
    """All methods on one split, standardised by its training part."""
    rows, test_rows = data.train_index[split], data.test_index[split]
    inputs, target = scale_of(data.X[rows]), scale_of(data.y[rows])
    key_mode, key_methods = random.split(random.fold_in(random.key(seed), split))
    train = prepare(inputs.apply(data.X[rows]), target.apply(data.y[rows]), key_mode, effort)
    test = (inputs.apply(data.X[test_rows]), data.y[test_rows])
    results = []
    for method_name, method in chosen.items():
        # by name, so that a method's draws do not depend on which others run
        key = random.fold_in(key_methods, zlib.crc32(method_name.encode()))
        start = time.perf_counter()
        found, failure = None, ""
        try:
            found = evaluate(method, train, test, target, key)
        except Exception as error:  # counted and shown: one method must not stop the others
            failure = f"{type(error).__name__}: {error}"
            print(f"{name} split {split}, {method_name} failed: {failure}", file=sys.stderr)
        seconds = time.perf_counter() - start
        results.append(Result(name, method_name, found, seconds, failure))
    return results


def table(results: Sequence[Result]) -> str:
    """Markdown: mean ± sd over the splits that did not fail, and how many did."""
    lines = [
        "| data | method | RMSE | MNLL | failed | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for dataset, method in dict.fromkeys((r.dataset, r.method) for r in results):
        mine = [r for r in results if (r.dataset, r.method) == (dataset, method)]
        scores = np.array([r.score for r in mine if r.score is not None]).reshape(-1, 2)
        cells = ["–", "–"]
        if len(scores):
            pairs = zip(scores.mean(axis=0), scores.std(axis=0), strict=True)
            cells = [f"{mean:.4g} ± {sd:.2g}" for mean, sd in pairs]
        failed = sum(r.score is None for r in mine)
        seconds = np.mean([r.seconds for r in mine])
        lines.append(
            f"| {dataset} | {method} | {' | '.join(cells)} | {failed} of {len(mine)} | "
            f"{seconds:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Run the experiment and print its table."""
    available = methods()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder of uci_<name>.npz; default NUMPYRO_GEOM_DATA")
    parser.add_argument(
        "--datasets", nargs="+", choices=[*SOURCES, GENERATED], default=list(SOURCES)
    )
    parser.add_argument("--methods", nargs="+", choices=list(available), default=None)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one split of generated data")
    options = parser.parse_args(arguments)
    if options.splits < 1:
        parser.error(f"--splits must be at least 1, got {options.splits}")
    if options.quick:
        options.datasets, options.splits = [GENERATED], 1
    effort = QUICK if options.quick else Effort()
    results: list[Result] = []
    for name in options.datasets:
        try:
            data = generated() if name == GENERATED else load_dataset(name, options.data_dir)
        except (OSError, ValueError, ImportError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        slow = () if name in SMALLEST else ("NUTS",)
        slow = LEFT_OUT_OF_QUICK if options.quick else slow
        asked = [m for m in available if m not in slow]
        if options.methods is not None:
            asked = options.methods
        chosen = {m: available[m] for m in asked}
        splits = min(options.splits, len(data.train_index))
        print(f"{name}: {data.X.shape[0]} rows, {data.X.shape[1]} columns, from {data.origin}")
        for split in range(splits):
            results += run_split(name, data, split, chosen, effort, options.seed)
    if not results:
        sys.exit("no data set could be loaded: see above, or try --quick")
    print(f"\n{table(results)}")
    return results


if __name__ == "__main__":
    main()
