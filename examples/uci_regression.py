"""UCI regression with a small network: samplers and baselines in one table.

One hidden layer of 50 ReLU units on nine UCI data sets, after the regression experiment of
Franzese, Milios, Filippone and Michiardi, "A Scalable Bayesian Sampling Method Based on Stochastic
Gradient Descent Isotropization" (Entropy 2021, section 4.2 and appendix C.1). The paper has batches
of 64 rows, 20,000 Adam steps at 0.01 before the samplers start, 100 draws, and 10 splits. This
script differs in these points. The paper does not state its prior; here it is weights
N(0, 1 / inputs of the layer), biases N(0, 1), noise precision Gamma(2, rate 0.1), all on
standardised data. The rate in the prior of the noise keeps the mode from fitting small sets
exactly. The temperature is 1, where the paper uses 0.01 or other values. Step sizes are automatic.
Adam's rate falls along a cosine. Draws are 500 steps apart (the paper: 1,000). The likelihood is
that of the whole predictive mixture.

Baselines: MAP and an ensemble of five (Adam from five starts); dropout (rate 0.05 on the hidden
units, in training and prediction); and a Laplace approximation around MAP with the Fisher matrix,
whose predictions are linear in the weights ("Laplace") or follow geodesics of the Fisher metric
("Laplace fisher"). "Laplace fisher" and NUTS run only if they are named, and so do "SGLD T" and
"SGHMC T", which have the paper's temperature 0.01.

    python examples/uci_regression.py --data-dir FOLDER [--datasets yacht boston] [--splits 20]
    python examples/uci_regression.py --quick

Data come from `FOLDER/uci_<name>.npz` (arrays X, y, and train_index, test_index with one row per
split) or, without such a file, from OpenML. The variable NUMPYRO_GEOM_DATA names a default folder.
With `--cache`, a run that was killed continues. `--quick` needs no data: it generates a
set of the yacht data's size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, init_to_sample

from numpyro_geom import SGHMC, SGRLD, Expanded, RiemannianLaplace, train
from numpyro_geom.baselines import ISGD

HIDDEN = 50
BATCH_SIZE = 64
MODE_LEARNING_RATE = 0.01
GENERATED = "generated"


class Source(NamedTuple):
    """A data set on OpenML, and its size.

    Attributes:
        shape: rows and columns of X.
        openml: arguments of scikit-learn's `fetch_openml`; None if none are known.
        drop: columns besides X and y in OpenML's version.
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
NAMED = ("Laplace fisher", "NUTS", "SGLD T", "SGHMC T")
"""Methods that run only if they are named. The first two take minutes per split of the smallest
sets. The others have the temperature 0.01."""
QUICK_METHODS = ("MAP", "SGLD", "SGHMC", "I-SGD")
"""Methods that `--quick` runs by default, to stay within a minute."""
MEMBERS = 5
DROPOUT = 0.05


# --- data


class Dataset(NamedTuple):
    """A data set and its splits.

    Attributes:
        X: inputs, shape (rows, columns).
        y: targets, shape (rows,).
        train_index: rows of the training part of each split, shape (splits, n).
        test_index: rows of the test part.
        origin: source of the data, in words.
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
        data_dir: folder with `uci_<name>.npz`; None for the folder in NUMPYRO_GEOM_DATA.

    Raises:
        ValueError: for an unknown name, or files with other contents.
        FileNotFoundError: for a folder that does not exist, or a set without any source.
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
    """Row numbers of random splits, nine tenths for training; every call returns the same."""
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(num_rows) for _ in range(num_splits)])
    cut = round(0.9 * num_rows)
    return rows[:, :cut], rows[:, cut:]


def generated(num_rows: int = 308, num_columns: int = 6) -> Dataset:
    """A smooth function of a few columns plus noise, of the yacht data's size."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(num_rows, num_columns))
    y = 10 + 5 * np.sin(2 * X[:, 0]) + 3 * X[:, 1] * X[:, -1] + rng.normal(size=num_rows)
    return Dataset(X, y, *seeded_splits(num_rows), "generated, seeded 90/10 splits")


class Scale(NamedTuple):
    """Mean and standard deviation that standardise an array by column."""

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


def network(X, y=None, dropout=0.0):
    """One hidden layer of ReLU units and Gaussian noise of unknown precision."""
    columns = X.shape[1]
    w1 = numpyro.sample("w1", dist.Normal(0, columns**-0.5).expand([columns, HIDDEN]).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([HIDDEN]).to_event(1))
    w2 = numpyro.sample("w2", dist.Normal(0, HIDDEN**-0.5).expand([HIDDEN]).to_event(1))
    b2 = numpyro.sample("b2", dist.Normal(0, 1))
    precision = numpyro.sample("precision", dist.Gamma(2.0, 0.1))
    with numpyro.plate("data", X.shape[0]) as i:
        hidden = jax.nn.relu(X[i] @ w1 + b1)
        if dropout:
            hidden = dropped(numpyro.prng_key(), hidden, dropout)
        mean = hidden @ w2 + b2
        numpyro.sample("y", dist.Normal(mean, precision**-0.5), obs=None if y is None else y[i])


def dropped(key: jax.Array | None, hidden: jax.Array, rate: float) -> jax.Array:
    """Hidden units after dropout: some are 0, the others are scaled up. Without a key, all."""
    if key is None:
        return hidden
    return jnp.where(random.bernoulli(key, 1 - rate, hidden.shape), hidden / (1 - rate), 0.0)


Predictions = tuple[np.ndarray, np.ndarray]
"""Means, shape (draws, rows), and noise sds, shape (draws,), on the standardised scale."""


def predict(
    draws: dict[str, Any], X: np.ndarray, key: jax.Array | None = None, around: dict | None = None
) -> Predictions:
    """Predictions of draws.

    Args:
        draws: draws of the sites, in their supports.
        X: standardised inputs, shape (rows, columns).
        key: key for dropout, split over the draws; None for no dropout.
        around: weights around which the network is linearised; None for the network itself.
    """

    def mean(w: dict, key: jax.Array | None) -> jax.Array:
        hidden = jax.nn.relu(jnp.asarray(X, w["w1"].dtype) @ w["w1"] + w["b1"])
        return dropped(key, hidden, DROPOUT) @ w["w2"] + w["b2"]

    def one(w: dict, key: jax.Array | None) -> jax.Array:
        if around is None:
            return mean(w, key)
        origin = {k: around[k] for k in w}
        away = jax.tree.map(jnp.subtract, w, origin)
        return sum(jax.jvp(lambda w: mean(w, key), (origin,), (away,)))

    weights = {k: jnp.asarray(draws[k]) for k in ("w1", "b1", "w2", "b2")}
    keys = None if key is None else random.split(key, len(weights["b2"]))
    means = jax.jit(lambda w, keys: lax.map(lambda pair: one(*pair), (w, keys)))(weights, keys)
    return np.asarray(means, np.float64), np.asarray(draws["precision"], np.float64) ** -0.5


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
        target: the scale that standardised the targets.
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
    """The cost of a method.

    Attributes:
        mode_steps: Adam steps to the common start.
        num_warmup: warm-up draws.
        num_samples: draws that count.
        num_steps: stochastic-gradient steps per draw.
        nuts: warm-up and draws of NUTS.
    """

    mode_steps: int = 20_000
    num_warmup: int = 50
    num_samples: int = 100
    num_steps: int = 500
    nuts: tuple[int, int] = (300, 300)


QUICK = Effort(mode_steps=2000, num_warmup=30, num_samples=50, num_steps=100, nuts=(50, 50))


class Train(NamedTuple):
    """One split's training part, standardised.

    Attributes:
        X: inputs.
        y: targets.
        modes: modes that Adam found from `MEMBERS` starts, in the sites' supports, stacked.
        effort: cost of the methods.
    """

    X: jax.Array
    y: jax.Array
    modes: dict[str, jax.Array]
    effort: Effort

    @property
    def batch_size(self) -> int:
        """Rows per step."""
        return min(BATCH_SIZE, self.X.shape[0] // 2)

    @property
    def mode(self) -> dict[str, jax.Array]:
        """The start of all methods except the ensemble, unconstrained: the first of the modes."""
        mode = {name: value[0] for name, value in self.modes.items()}
        return {**mode, "precision": jnp.log(mode["precision"])}


def prepare(X: np.ndarray, y: np.ndarray, key: jax.Array, effort: Effort) -> Train:
    """Find modes by Adam from several starts."""
    prepared = Train(jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32), {}, effort)
    return prepared._replace(modes=adam(network, prepared, key, MEMBERS))


def adam(model: Callable, part: Train, key: jax.Array, num_starts: int) -> dict:
    """Modes from minibatches, in the sites' supports; the rate falls along a cosine."""
    X, y, _, effort = part
    schedule = optax.cosine_decay_schedule(MODE_LEARNING_RATE, effort.mode_steps)
    found = train(
        model,
        key,
        X,
        y,
        batch_size=part.batch_size,
        optimiser=optax.adam(schedule),
        num_epochs=math.ceil(effort.mode_steps / math.ceil(len(y) / part.batch_size)),
        validation=0.0,
        num_starts=num_starts,
        init_strategy=init_to_sample,
    ).position
    return {**found, "precision": jnp.exp(found["precision"])}


Method = Callable[[Train, jax.Array, np.ndarray], Predictions]
"""Predictions at inputs, from the training part and a key."""


def of_draws(draw: Callable[[Train, jax.Array], dict]) -> Method:
    """The method that predicts with draws of the sites."""
    return lambda part, key, X: predict(draw(part, key), X)


def kernel_method(make: Callable[..., Any]) -> Method:
    """Run a stochastic-gradient kernel from the mode."""

    def draw(part: Train, key: jax.Array) -> dict[str, jax.Array]:
        effort = part.effort
        mcmc = MCMC(
            make(network, batch_size=part.batch_size, num_steps=effort.num_steps),
            num_warmup=effort.num_warmup,
            num_samples=effort.num_samples,
            progress_bar=False,
            jit_model_args=True,
        )
        mode = dict(part.mode)
        if make is make_expanded:
            w = mode["w1_expanded_V"] = mode.pop("w1")
            mode["w1_expanded_Q1"] = jnp.zeros((w.shape[-1], w.shape[-1]))  # the identity
        mcmc.run(key, part.X, part.y, init_params=mode)
        return mcmc.get_samples()

    return of_draws(draw)


HIDDEN_SIDE = Expanded(left=0)
"""A factor on the hidden side of the first layer."""


def make_expanded(model: Callable, **settings: Any) -> SGHMC:
    """SGHMC with a factor on the hidden side."""
    return SGHMC(handlers.reparam(model, config={"w1": HIDDEN_SIDE}), **settings)


def run_map(part: Train, key: jax.Array, X: np.ndarray) -> Predictions:
    """One draw: the mode."""
    return predict({name: value[:1] for name, value in part.modes.items()}, X)


def run_ensemble(part: Train, key: jax.Array, X: np.ndarray) -> Predictions:
    """All modes."""
    return predict(part.modes, X)


def run_dropout(part: Train, key: jax.Array, X: np.ndarray) -> Predictions:
    """A mode trained with dropout; predictions use as many dropout patterns as there are draws."""
    key_train, key_units = random.split(key)
    mode = adam(partial(network, dropout=DROPOUT), part, key_train, 1)
    draws = {k: jnp.repeat(v, part.effort.num_samples, axis=0) for k, v in mode.items()}
    return predict(draws, X, key_units)


def run_nuts(part: Train, key: jax.Array) -> dict[str, jax.Array]:
    """The reference, on all rows."""
    num_warmup, num_samples = part.effort.nuts
    mcmc = MCMC(NUTS(network), num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    mcmc.run(key, part.X, part.y, init_params=part.mode)
    return mcmc.get_samples()


def laplace_method(metric: str) -> Method:
    """Draws of a Laplace approximation around MAP; Gaussian draws predict linearly."""

    def run(part: Train, key: jax.Array, X: np.ndarray) -> Predictions:
        guide = RiemannianLaplace(network, metric=metric, mode="euclidean", precision="fisher")
        key_fit, key_draw = random.split(key)
        params = guide.fit(key_fit, part.X, part.y, init_params=part.mode, max_steps=0)
        shape = (part.effort.num_samples,)
        draws = guide.sample_posterior(key_draw, params, sample_shape=shape)
        mode = {name: value[0] for name, value in part.modes.items()}
        return predict(draws, X, around=mode if metric == "euclidean" else None)

    return run


def methods() -> dict[str, Method]:
    """Method name -> prediction function."""
    return {
        "MAP": run_map,
        "ensemble": run_ensemble,
        "dropout": run_dropout,
        "Laplace": laplace_method("euclidean"),
        "Laplace fisher": laplace_method("fisher"),
        "SGLD": kernel_method(SGRLD),
        "SGRLD rmsprop": kernel_method(partial(SGRLD, metric="rmsprop")),
        "SGRLD shampoo": kernel_method(partial(SGRLD, metric="shampoo")),
        "SGHMC": kernel_method(SGHMC),
        "SGLD T": kernel_method(partial(SGRLD, temperature=0.01)),
        "SGHMC T": kernel_method(partial(SGHMC, temperature=0.01)),
        "PX-SGHMC": kernel_method(make_expanded),
        "I-SGD": kernel_method(ISGD),
        "NUTS": of_draws(run_nuts),
    }


# --- experiment


class Result(NamedTuple):
    """The result of one method on one split; ``score`` is None if it failed."""

    dataset: str
    split: int
    method: str
    score: Score | None
    seconds: float
    failure: str = ""


def evaluate(method: Method, part: Train, test: tuple, target: Scale, key: jax.Array) -> Score:
    """Score of a method's draws on the test part ``(X, y)``, X standardised and y not.

    Raises:
        FloatingPointError: if the score is not finite.
    """
    result = score(*method(part, key, test[0]), test[1], target)
    if not np.all(np.isfinite(result)):
        raise FloatingPointError(f"the score is not finite: {result}")
    return result


def run_split(
    name: str,
    data: Dataset,
    split: int,
    chosen: dict[str, Method],
    effort: Effort,
    seed: int,
    cache: Path | None = None,
) -> list[Result]:
    """All methods on one split, standardised by its training part; ``cache`` is reused."""
    kept = None if cache is None else cache / f"{name}-{split}-seed-{seed}.json"
    done: dict[str, Result] = {}
    if kept is not None and kept.is_file():
        done = {r[2]: _result(r) for r in json.loads(kept.read_text())}
    part = None
    rows, test_rows = data.train_index[split], data.test_index[split]
    inputs, target = scale_of(data.X[rows]), scale_of(data.y[rows])
    key_mode, key_methods = random.split(random.fold_in(random.key(seed), split))
    test = (inputs.apply(data.X[test_rows]), data.y[test_rows])
    for method_name, method in chosen.items():
        if method_name in done:
            continue
        if part is None:
            X, y = inputs.apply(data.X[rows]), target.apply(data.y[rows])
            part = prepare(X, y, key_mode, effort)
        # a key by name, so that a method's draws do not depend on the other methods
        key = random.fold_in(key_methods, zlib.crc32(method_name.encode()))
        start = time.perf_counter()
        found, failure = None, ""
        try:
            found = evaluate(method, part, test, target, key)
        except Exception as error:  # counted and shown: one method must not stop the others
            failure = f"{type(error).__name__}: {error}"
            print(f"{name} split {split}, {method_name} failed: {failure}", file=sys.stderr)
        seconds = time.perf_counter() - start
        done[method_name] = Result(name, split, method_name, found, seconds, failure)
        if kept is not None:
            kept.write_text(json.dumps(list(done.values())))
    return [done[method_name] for method_name in chosen]


def _result(entries: Sequence[Any]) -> Result:
    result = Result(*entries)
    return result._replace(score=None if result.score is None else Score(*result.score))


# --- tables


def scores_of(results: Sequence[Result], dataset: str, method: str) -> dict[int, Score]:
    """Split -> score, for the splits that did not fail."""
    return {
        r.split: r.score
        for r in results
        if (r.dataset, r.method) == (dataset, method) and r.score is not None
    }


def table(results: Sequence[Result]) -> str:
    """Markdown: mean ± sd over the splits that did not fail, failures, and Franzese et al."""
    lines = [
        "| data | splits | method | RMSE | MNLL | failed | seconds "
        "| Franzese et al.: RMSE | MNLL |",
        "|---" * 9 + "|",
    ]
    for dataset, method in dict.fromkeys((r.dataset, r.method) for r in results):
        mine = [r for r in results if (r.dataset, r.method) == (dataset, method)]
        scores = np.array(list(scores_of(results, dataset, method).values())).reshape(-1, 2)
        cells = ["–", "–"]
        if len(scores):
            pairs = zip(scores.mean(axis=0), scores.std(axis=0), strict=True)
            cells = [f"{mean:.4g} ± {sd:.2g}" for mean, sd in pairs]
        failed = f"{sum(r.score is None for r in mine)} of {len(mine)}"
        seconds = f"{np.median([r.seconds for r in mine]):.1f}"
        theirs = ["–", "–"]
        if method in PUBLISHED and dataset in PUBLISHED[method]:
            rmse, rmse_sd, mnll, mnll_sd = PUBLISHED[method][dataset]
            theirs = [f"{rmse:g} ± {rmse_sd:g}", f"{mnll:g} ± {mnll_sd:g}"]
        row = (dataset, str(len(mine)), method, *cells, failed, seconds, *theirs)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


PUBLISHED: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "MAP": {
        "wine": (0.641, 0.05, 1.182, 0.03),
        "protein": (4.733, 0.05, 3.964, 0.04),
        "naval": (0.001, 0.0, 0.920, 0.0),
        "kin8nm": (0.080, 0.0, 0.924, 0.0),
        "power": (4.354, 0.12, 3.071, 0.06),
        "boston": (3.705, 1.19, 5.421, 2.73),
    },
    "dropout": {
        "wine": (0.637, 0.04, 1.065, 0.12),
        "protein": (4.968, 0.05, 4.218, 0.06),
        "naval": (0.003, 0.0, -2.322, 0.75),
        "kin8nm": (0.139, 0.01, -0.086, 0.41),
        "power": (4.531, 0.16, 2.941, 0.04),
        "boston": (3.803, 1.26, 3.989, 1.23),
    },
    "SGLD": {
        "wine": (0.759, 0.07, 1.546, 0.25),
        "protein": (5.687, 0.05, 5.604, 0.08),
        "naval": (0.007, 0.0, -1.751, 0.28),
        "kin8nm": (0.171, 0.07, 5.140, 7.05),
        "power": (11.753, 3.25, 8.429, 3.14),
        "boston": (9.602, 2.06, 30.386, 15.77),
    },
    "SGHMC": {
        "wine": (0.628, 0.04, 1.041, 0.12),
        "protein": (4.712, 0.03, 4.142, 0.02),
        "naval": (0.0, 0.0, -2.763, 1.33),
        "kin8nm": (0.076, 0.0, -0.798, 0.39),
        "power": (4.310, 0.14, 2.924, 0.04),
        "boston": (3.659, 1.24, 3.097, 0.83),
    },
    "SGLD T": {
        "wine": (0.752, 0.07, 1.526, 0.24),
        "protein": (5.673, 0.04, 5.591, 0.07),
        "naval": (0.007, 0.0, -1.752, 0.28),
        "kin8nm": (0.169, 0.07, 5.118, 7.06),
        "power": (11.351, 3.02, 8.288, 3.04),
        "boston": (9.417, 2.07, 33.212, 19.69),
    },
    "SGHMC T": {
        "wine": (0.628, 0.04, 1.104, 0.14),
        "protein": (4.684, 0.03, 4.191, 0.02),
        "naval": (0.0, 0.0, -2.966, 1.89),
        "kin8nm": (0.076, 0.0, -0.756, 0.42),
        "power": (4.326, 0.13, 3.116, 0.07),
        "boston": (3.692, 1.19, 9.826, 5.72),
    },
    "I-SGD": {
        "wine": (0.635, 0.05, 1.129, 0.15),
        "protein": (4.699, 0.03, 4.371, 0.03),
        "naval": (0.001, 0.0, -2.466, 1.12),
        "kin8nm": (0.079, 0.0, -0.460, 0.65),
        "power": (4.320, 0.13, 3.122, 0.07),
        "boston": (3.703, 1.19, 9.799, 5.69),
    },
}
"""Method -> data set -> RMSE and MNLL with their sds over ten splits: Franzese et al., Tables 1, 2.

Without a T these are their results at temperature 1. "MAP" is their baseline and "dropout" is their
DROP (rate 0.5). Their RMSEs have three decimals, which is too few for naval."""
THEIR_SPLITS = 10


def standing(results: Sequence[Result]) -> str:
    """Markdown: wins, ties and losses of each method at one standard error.

    The comparison with MAP uses paired differences over the splits. The comparison with Franzese et
    al. (same method) uses the two means. A win is a lower RMSE or MNLL by more than one standard
    error.
    """
    lines = [
        "| method | against MAP: RMSE | MNLL | against the paper: RMSE | MNLL |",
        "|---|---|---|---|---|",
    ]
    datasets = list(dict.fromkeys(r.dataset for r in results))
    for method in dict.fromkeys(r.method for r in results):
        counts = np.zeros((4, 3), int)
        for dataset in datasets:
            mine = scores_of(results, dataset, method)
            base = scores_of(results, dataset, "MAP")
            both = sorted(mine.keys() & base.keys())
            if method != "MAP" and len(both) > 1:
                away = np.array([np.subtract(mine[k], base[k]) for k in both])
                error = away.std(axis=0, ddof=1) / len(both) ** 0.5
                counts[0, _place(away.mean(axis=0)[0], error[0])] += 1
                counts[1, _place(away.mean(axis=0)[1], error[1])] += 1
            theirs = PUBLISHED.get(method, {}).get(dataset)
            if theirs is not None and len(mine) > 1 and dataset != "naval":
                scores = np.array(list(mine.values()))
                for i in (0, 1):
                    own = scores[:, i].std(ddof=1) ** 2 / len(scores)
                    error = (own + theirs[2 * i + 1] ** 2 / THEIR_SPLITS) ** 0.5
                    counts[2 + i, _place(scores[:, i].mean() - theirs[2 * i], error)] += 1
        cells = ["–" if not row.sum() else " / ".join(map(str, row)) for row in counts]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def likelihoods(results: Sequence[Result]) -> str:
    """Markdown: mean MNLL of each method on each data set."""
    datasets = list(dict.fromkeys(r.dataset for r in results))
    lines = [f"| MNLL | {' | '.join(datasets)} |", "|---" * (1 + len(datasets)) + "|"]
    for method in dict.fromkeys(r.method for r in results):
        found = [[x.mnll for x in scores_of(results, d, method).values()] for d in datasets]
        cells = [f"{np.mean(x):.3g}" if x else "–" for x in found]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _place(difference: float, error: float) -> int:
    """0 for lower by more than the error, 2 for higher, 1 for neither."""
    return 1 + (difference > error) - (difference < -error)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Run the experiment and print its tables."""
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
    parser.add_argument("--cache", help="folder for what is finished")
    parser.add_argument("--out", help="folder for uci.md and uci_standing.md")
    parser.add_argument("--quick", action="store_true", help="one split of generated data")
    options = parser.parse_args(arguments)
    if options.splits < 1:
        parser.error(f"--splits must be at least 1, got {options.splits}")
    if options.quick:
        options.datasets, options.splits, options.cache = [GENERATED], 1, None
    effort = QUICK if options.quick else Effort()
    cache = None
    if options.cache is not None:
        cache = Path(options.cache).expanduser()
        cache.mkdir(parents=True, exist_ok=True)
    asked = QUICK_METHODS if options.quick else [m for m in available if m not in NAMED]
    chosen = {method: available[method] for method in options.methods or asked}
    results: list[Result] = []
    for name in options.datasets:
        try:
            data = generated() if name == GENERATED else load_dataset(name, options.data_dir)
        except (OSError, ValueError, ImportError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        splits = min(options.splits, len(data.train_index))
        print(f"{name}: {data.X.shape[0]} rows, {data.X.shape[1]} columns, from {data.origin}")
        for split in range(splits):
            results += run_split(name, data, split, chosen, effort, options.seed, cache)
            jax.clear_caches()  # NumPyro compiles a loop at every run, and JAX keeps all of them
    if not results:
        sys.exit("no data set could be loaded: see above, or try --quick")
    print(f"\n{table(results)}\n\n{standing(results)}")
    if options.out is not None:
        folder = Path(options.out)
        (folder / "uci.md").write_text(likelihoods(results) + "\n")
        (folder / "uci_standing.md").write_text(standing(results) + "\n")
    return results


if __name__ == "__main__":
    main()
