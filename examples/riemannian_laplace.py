"""Riemannian Laplace approximations: distance of their draws from the posterior, and their cost.

These are the experiments of Yu, Hartmann, Williams, Girolami and Klami, "Riemannian Laplace
Approximation with the Fisher Metric" (AISTATS 2024, sections 5.2 to 5.4 and 16.2 to 16.5). The
tables show the paper's figures next to ours. The targets are a banana from both of its modes, two
squiggles and a funnel, logistic regression on standardised and raw inputs, and a small network on
the data of Snelson and Ghahramani. Names of metrics are those of `RiemannianLaplace`. The paper's
names are ELA (euclidean), RLA-B (monge), RLA-BLog (monge-log), and RLA-F (fisher). The squiggles
and the funnel have no observed site; there, "fisher" is a function that returns the metric, as is
"empirical" for logistic regression: products of the scores of rows, plus the prior's precision.

The distance is the Wasserstein-1 distance (POT) to reference draws: exact draws if there is a
sampler, else NUTS. Its floor is the distance of as many other reference draws. The paper has 10,000
draws against 20,000 of Stan. This script has 2,000 against 4,000 by default, with a higher floor.
Geodesics that are not followed to their end count as failed. As in the paper, the distance is for
the other draws alone. The evaluations are for all draws; failed ones count up to the limit.
The funnel is compared in the coordinates in which it is a Gaussian, because its own coordinates
have heavy tails. Networks are compared by their predictions on test data: mean squared error of the
mean, and negative log density of the mixture.

    python examples/riemannian_laplace.py --data-dir FOLDER [--targets banana ripley] [--write DIR]
    python examples/riemannian_laplace.py --quick

FOLDER (default: the variable NUMPYRO_GEOM_DATA) has `logistic_<name>.npz` (arrays X, y), and for
the networks `snelson.npz` and `derived_nn_maps.npz` (modes, noise and prior precision). Targets
without a file are left out. The banana, squiggles, funnel and scikit-learn's breast cancer data
need no folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, init_to_value
from scipy.special import logsumexp

from numpyro_geom import RiemannianLaplace
from numpyro_geom.diagnostics import SamplingWarning

METRICS = ("euclidean", "monge", "monge-log", "fisher")
EMPIRICAL = "empirical"
SETS = ("ripley", "pima", "heart", "australian", "german")
HIDDEN = 10
BANANA_MEAN = 1.3711657
"""Mean of the banana's observations, which determines its posterior."""
SQUIGGLES = {"squiggle": (5.0, 0.05), "squiggle-narrow": (10.0, 0.001)}
"""Variances of the underlying Gaussians."""
FREQUENCY = 1.5
REFERENCE = "reference"


class Figures(NamedTuple):
    """The paper's figures for a row: W1 and its sd, or MSE and NLL; and evaluations, or None."""

    first: float
    second: float
    evaluations: float | None = None


PAPER: dict[tuple[str, str], Figures] = {
    ("banana", "euclidean"): Figures(1.434, 0.01),
    ("banana", "monge"): Figures(0.811, 0.009, 70.4),
    ("banana", "monge-log"): Figures(0.788, 0.013, 70.4),
    ("banana", "fisher"): Figures(0.791, 0.014, 24.9),
    ("banana-hausdorff", "euclidean"): Figures(1.386, 0.009),
    ("banana-hausdorff", "monge"): Figures(0.341, 0.006, 51.3),
    ("banana-hausdorff", "monge-log"): Figures(0.208, 0.007, 60.0),
    ("banana-hausdorff", "fisher"): Figures(0.143, 0.009, 32.7),
    ("ripley", "euclidean"): Figures(0.106, 0.004),
    ("ripley", "monge"): Figures(0.236, 0.001, 29.7),
    ("ripley", "monge-log"): Figures(0.16, 0.065, 45.2),
    ("ripley", "fisher"): Figures(0.064, 0.002, 12.2),
    ("pima", "euclidean"): Figures(0.149, 0.0),
    ("pima", "monge"): Figures(0.274, 0.0, 41.7),
    ("pima", "monge-log"): Figures(0.21, 0.007, 78.5),
    ("pima", "fisher"): Figures(0.147, 0.0, 12.2),
    ("heart", "euclidean"): Figures(0.529, 0.001),
    ("heart", "monge"): Figures(0.649, 0.0, 40.2),
    ("heart", "monge-log"): Figures(1.154, 0.189, 71.6),
    ("heart", "fisher"): Figures(0.514, 0.0, 13.2),
    ("australian", "euclidean"): Figures(0.441, 0.001),
    ("australian", "monge"): Figures(0.522, 0.001, 51.5),
    ("australian", "monge-log"): Figures(0.745, 0.203, 79.1),
    ("australian", "fisher"): Figures(0.417, 0.001, 18.0),
    ("german", "euclidean"): Figures(0.388, 0.001),
    ("german", "monge"): Figures(0.431, 0.0, 58.4),
    ("german", "monge-log"): Figures(0.676, 0.1, 104.0),
    ("german", "fisher"): Figures(0.387, 0.0, 14.2),
    ("ripley-raw", "euclidean"): Figures(0.437, 0.017),
    ("ripley-raw", "monge"): Figures(0.489, 0.012, 30.2),
    ("ripley-raw", "monge-log"): Figures(0.554, 0.253, 45.0),
    ("ripley-raw", "fisher"): Figures(0.247, 0.012, 12.7),
    ("pima-raw", "euclidean"): Figures(0.21, 0.01),
    ("pima-raw", "monge"): Figures(0.294, 0.004, 5632.9),
    ("pima-raw", "monge-log"): Figures(0.216, 0.014, 1690.4),
    ("pima-raw", "fisher"): Figures(0.112, 0.008, 15.4),
    ("heart-raw", "euclidean"): Figures(0.842, 0.026),
    ("heart-raw", "monge"): Figures(0.96, 0.012, 7868.2),
    ("heart-raw", "monge-log"): Figures(0.898, 0.029, 3161.1),
    ("heart-raw", "fisher"): Figures(0.644, 0.012, 17.9),
    ("australian-raw", "euclidean"): Figures(0.454, 0.004),
    ("australian-raw", "monge"): Figures(0.455, 0.01, 18513.8),
    ("australian-raw", "monge-log"): Figures(0.467, 0.005, 12298.6),
    ("australian-raw", "fisher"): Figures(0.378, 0.005, 18.0),
    ("german-raw", "euclidean"): Figures(0.846, 0.002),
    ("german-raw", "monge"): Figures(0.92, 0.003, 3545.9),
    ("german-raw", "monge-log"): Figures(0.898, 0.003, 2985.5),
    ("german-raw", "fisher"): Figures(0.823, 0.001, 17.8),
    ("ripley", EMPIRICAL): Figures(0.106, 0.004, 12.0),
    ("pima", EMPIRICAL): Figures(0.148, 0.0, 12.1),
    ("heart", EMPIRICAL): Figures(0.53, 0.0, 13.8),
    ("ripley-raw", EMPIRICAL): Figures(0.426, 0.011, 12.1),
    ("pima-raw", EMPIRICAL): Figures(0.199, 0.001, 12.5),
    ("heart-raw", EMPIRICAL): Figures(0.942, 0.02, 17.0),
    ("snelson", "euclidean"): Figures(2.235, 3.02),
    ("snelson", "monge"): Figures(0.2, 0.193, 6677.8),
    ("snelson", "monge-log"): Figures(0.107, 0.201, 6674.7),
    ("snelson", "fisher"): Figures(0.072, 0.121, 242.9),
    ("snelson", REFERENCE): Figures(0.073, 0.126),
    ("snelson-gap", "euclidean"): Figures(1.365, 3.171),
    ("snelson-gap", "monge"): Figures(1.646, 1.031, 6573.2),
    ("snelson-gap", "monge-log"): Figures(0.27, 1.122, 4793.9),
    ("snelson-gap", "fisher"): Figures(0.564, 1.063, 727.7),
    ("snelson-gap", REFERENCE): Figures(0.394, 0.872),
    ("snelson-std", "euclidean"): Figures(0.718, 2.538),
    ("snelson-std", "monge"): Figures(0.072, 0.11, 2065.4),
    ("snelson-std", "monge-log"): Figures(0.072, 0.121, 1428.1),
    ("snelson-std", "fisher"): Figures(0.071, 0.115, 77.7),
    ("snelson-std", REFERENCE): Figures(0.073, 0.122),
}
"""The paper does not state whether its maps of monge-log converged."""


# --- targets: models with one site "theta" on the real numbers


def identity(theta: Any) -> Any:
    return theta


@dataclasses.dataclass(frozen=True)
class Target:
    """A posterior, and the known facts about it.

    Attributes:
        model: NumPyro model with one unconstrained vector site, ``theta``.
        args: its arguments.
        origin: source of the data, in words.
        exact: ``(rng, count) -> draws``; None if NUTS is the reference.
        metric: function that replaces ``"fisher"`` in a model without observed sites.
        empirical: the metric `EMPIRICAL`.
        exact_map: velocity at the mode -> end of the metric's geodesic.
        settings: settings of the guide; the default is the Euclidean mode, as in the paper.
        fit: arguments of the guide's `fit`.
        compare: coordinates in which distances are measured.
        test: x and y of test data; if given, predictions are scored instead of draws.
        show: x at which a figure shows predictions.
        unit: standard deviation that y was divided by; scores are in the original unit.
    """

    model: Callable
    args: tuple
    origin: str
    exact: Callable[[np.random.Generator, int], np.ndarray] | None = None
    metric: Callable | None = None
    empirical: Callable | None = None
    exact_map: Callable[[np.ndarray], np.ndarray] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"mode": "euclidean"})
    fit: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compare: Callable[[np.ndarray], np.ndarray] = identity
    test: tuple[np.ndarray, np.ndarray] | None = None
    show: np.ndarray | None = None
    unit: float = 1.0


def banana_model(y):
    theta = numpyro.sample("theta", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(theta[0] + theta[1] ** 2, 2), obs=y)


def banana_draws(mean: float, num_rows: int, rng: np.random.Generator, count: int) -> np.ndarray:
    """Exact draws: theta1 given theta2 is Gaussian; theta2 comes from inversion on a grid."""
    grid = np.linspace(-5, 5, 100_001)
    # mean ~ N(theta1 + theta2^2, 4 / rows), with theta1 ~ N(0, 4) integrated out
    spread = 4 + 4 / num_rows
    log_p = -(grid**2) / 8 - (mean - grid**2) ** 2 / (2 * spread)
    below = np.cumsum(np.exp(log_p))
    theta2 = np.interp(rng.uniform(size=count), below / below[-1], grid)
    precision = (num_rows + 1) / 4
    theta1 = num_rows * (mean - theta2**2) / (4 * precision)
    return np.stack([theta1 + rng.normal(size=count) / np.sqrt(precision), theta2], axis=1)


def banana(folder: Path | None, mode: str) -> Target:
    origin, y = "simulated", np.random.default_rng(0).normal(0, 2, size=100)
    y += BANANA_MEAN - y.mean()
    if folder is not None and (folder / "banana_y.npz").is_file():
        origin, y = str(folder / "banana_y.npz"), _arrays(folder / "banana_y.npz", "y")[0]
    return Target(
        banana_model,
        (jnp.asarray(y),),
        origin,
        exact=lambda rng, count: banana_draws(float(y.mean()), len(y), rng, count),
        settings={"mode": mode},
    )


def flat_site():
    return numpyro.sample("theta", dist.ImproperUniform(constraints.real_vector, (), (2,)))


def squiggle(variances: tuple[float, float]) -> Target:
    """(theta1, theta2 + sin(1.5 theta1)) is Gaussian."""
    sd = np.sqrt(variances)

    def model(sd):
        theta = flat_site()
        straight = theta.at[1].add(jnp.sin(FREQUENCY * theta[0]))
        numpyro.factor("density", dist.Normal(0, sd).to_event(1).log_prob(straight))

    def metric(position):
        bend = FREQUENCY * jnp.cos(FREQUENCY * position["theta"][0])
        scaled = jnp.array([[1.0, 0.0], [bend, 1.0]]) / sd[:, None]
        return scaled.T @ scaled

    def exact(rng: np.random.Generator, count: int) -> np.ndarray:
        draws = sd * rng.normal(size=(count, 2))
        draws[:, 1] -= np.sin(FREQUENCY * draws[:, 0])
        return draws

    def exact_map(velocity: np.ndarray) -> np.ndarray:
        along = FREQUENCY * velocity[..., 0]
        return np.stack([velocity[..., 0], velocity[..., 1] + along - np.sin(along)], axis=-1)

    start = {"init_params": {"theta": jnp.zeros(2)}, "max_steps": 0}
    exactly = {"exact": exact, "metric": metric, "exact_map": exact_map}
    return Target(model, (jnp.asarray(sd),), "–", fit=start, **exactly)


def funnel() -> Target:
    """theta2 ~ N(0, 9), theta1 ~ N(0, exp(theta2)), from the mode of the underlying Gaussian."""

    def model(width):
        theta = flat_site()
        numpyro.factor("width", dist.Normal(0, width).log_prob(theta[1]))
        numpyro.factor("rest", dist.Normal(0, jnp.exp(theta[1] / 2)).log_prob(theta[0]))

    def metric(position):
        t = position["theta"]
        rate = jnp.exp(-t[1] / 2)
        jacobian = jnp.array([[rate, -t[0] * rate / 2], [0.0, 1 / 3]])
        return jacobian.T @ jacobian

    def straight(theta: np.ndarray) -> np.ndarray:
        return np.stack([theta[..., 0] * np.exp(-theta[..., 1] / 2), theta[..., 1] / 3], axis=-1)

    def bent(velocity: np.ndarray) -> np.ndarray:
        return velocity * np.stack(
            [np.exp(velocity[..., 1] / 2), np.ones(velocity.shape[:-1])], axis=-1
        )

    return Target(
        model,
        (3.0,),
        "–",
        exact=lambda rng, count: bent(rng.normal(size=(count, 2)) * [1.0, 3.0]),
        metric=metric,
        exact_map=bent,
        fit={"init_params": {"theta": jnp.zeros(2)}, "max_steps": 0},
        compare=straight,
    )


def gaussian(size: int) -> Target:
    """N(0, I), compared in its first coordinate."""

    def model():
        numpyro.sample("theta", dist.Normal(0, 1).expand([size]).to_event(1))

    def exact(rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.normal(size=(count, size))

    return Target(
        model,
        (),
        "–",
        exact,
        metric=lambda position: jnp.eye(size),
        compare=lambda theta: theta[..., :1],
    )


def logistic_model(X, y):
    theta = numpyro.sample("theta", dist.Normal(0, 10).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ theta), obs=y[i])


def logistic(X: np.ndarray, y: np.ndarray, origin: str, *, raw: bool) -> Target:
    """Logistic regression; inputs are standardised, or raw with a final column of ones."""
    if not raw:
        X = (X - X.mean(axis=0)) / X.std(axis=0)
    X = np.concatenate([X, np.ones((len(X), 1))], axis=1)
    X, y = jnp.asarray(X), jnp.asarray(y)

    def empirical(position):
        scores = X * (y - jax.nn.sigmoid(X @ position["theta"]))[:, None]
        return scores.T @ scores + jnp.eye(X.shape[1]) / 100

    return Target(logistic_model, (X, y), origin, empirical=empirical)


def logistic_from(folder: Path | None, name: str, *, raw: bool) -> Target:
    path = _file(folder, f"logistic_{name}.npz")
    X, y = _arrays(path, "X", "y")
    if X.ndim != 2 or y.shape != X.shape[:1] or not np.isin(y, (0, 1)).all():
        raise ValueError(
            f"{path} must have X of shape (rows, columns) and y of zeros and ones, shape (rows,), "
            f"got {X.shape} and {y.shape}"
        )
    return logistic(X, y.astype(float), str(path), raw=raw)


def breast_cancer() -> Target:
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError as error:
        raise ImportError(
            "the breast cancer data are scikit-learn's: pip install 'numpyro_geom[examples]'"
        ) from error
    X, y = load_breast_cancer(return_X_y=True)
    return logistic(X, y.astype(float), "scikit-learn", raw=False)


def outputs(theta: Any, x: Any) -> jax.Array:
    """Outputs, at every x, of a network with one input, ten tanh units and one output."""
    w1, b1, w2 = (theta[i * HIDDEN : (i + 1) * HIDDEN] for i in range(3))
    return jnp.tanh(jnp.asarray(x)[:, None] * w1 + b1) @ w2 + theta[-1]


def network_model(x, y, noise, precision):
    size = 3 * HIDDEN + 1
    theta = numpyro.sample("theta", dist.Normal(0, precision**-0.5).expand([size]).to_event(1))
    with numpyro.plate("rows", x.shape[0]) as i:
        numpyro.sample("y", dist.Normal(outputs(theta, x[i]), noise), obs=y[i])


def snelson(folder: Path | None, which: str, *, raw: bool = True) -> Target:
    """The network; its mode, noise and prior precision are given. Data are raw or standardised."""
    path = _file(folder, "snelson.npz")
    x, y, grid, train, test = _arrays(
        path, "x", "y", "x_grid", f"{which}_train_idx", f"{which}_test_idx"
    )
    theta, noise, precision = _arrays(
        _file(folder, "derived_nn_maps.npz"),
        *(f"{which}_{'orig' if raw else 'std'}_{x}" for x in ("theta", "sigma", "prior_prec")),
    )
    unit = 1.0
    if not raw:
        unit, centre = float(y[train].std()), x[train].mean()
        y = (y - y[train].mean()) / unit
        x, grid = (x - centre) / x[train].std(), (grid - centre) / x[train].std()
    args = (jnp.asarray(x[train]), jnp.asarray(y[train]), float(noise), float(precision))
    return Target(
        network_model,
        args,
        str(path),
        settings={"mode": "euclidean", "precision": "fisher"},
        fit={"init_params": {"theta": jnp.asarray(theta)}, "max_steps": 0},
        test=(x[test], y[test]),
        show=grid,
        unit=unit,
    )


def _file(folder: Path | None, name: str) -> Path:
    if folder is None:
        raise FileNotFoundError(
            f"expected a folder with {name}, got none: pass --data-dir or set NUMPYRO_GEOM_DATA"
        )
    if not (folder / name).is_file():
        raise FileNotFoundError(f"expected the file {folder / name}, which is not there")
    return folder / name


def _arrays(path: Path, *names: str) -> list[np.ndarray]:
    with np.load(path, allow_pickle=False) as arrays:
        missing = set(names) - set(arrays.files)
        if missing:
            raise ValueError(
                f"{path} must have the arrays {sorted(names)}, and lacks {sorted(missing)}"
            )
        return [np.asarray(arrays[name]) for name in names]


TARGETS: dict[str, Callable[[Path | None], Target]] = {
    "banana": lambda folder: banana(folder, "euclidean"),
    "banana-hausdorff": lambda folder: banana(folder, "hausdorff"),
    **{name: (lambda folder, v=v: squiggle(v)) for name, v in SQUIGGLES.items()},
    "funnel": lambda folder: funnel(),
    **{f"gaussian-{size}": (lambda folder, n=size: gaussian(n)) for size in (1, 10)},
    **{name: (lambda folder, n=name: logistic_from(folder, n, raw=False)) for name in SETS},
    "breast-cancer": lambda folder: breast_cancer(),
    **{f"{name}-raw": (lambda folder, n=name: logistic_from(folder, n, raw=True)) for name in SETS},
    "snelson": lambda folder: snelson(folder, "complete"),
    "snelson-gap": lambda folder: snelson(folder, "gap"),
    "snelson-std": lambda folder: snelson(folder, "complete", raw=False),
}
QUICK_TARGETS = ("banana-hausdorff", "breast-cancer")


def metrics_of(name: str) -> tuple[str, ...]:
    """Metrics that run by default, which take minutes at most."""
    if name.startswith(("banana", "gaussian")):
        return METRICS
    if name.startswith("snelson") or (name.endswith("-raw") and not name.startswith("ripley")):
        return ("euclidean", "fisher")
    return METRICS if name == "ripley" else ("euclidean", "monge", "fisher")


# --- draws


class Draws(NamedTuple):
    """Draws of a guide.

    Attributes:
        position: shape (repeats, draws, D).
        success: shape (repeats, draws).
        evaluations: shape (repeats, draws).
    """

    position: np.ndarray
    success: np.ndarray
    evaluations: np.ndarray


@dataclasses.dataclass(frozen=True)
class Effort:
    """Sizes of a run.

    Attributes:
        draws: draws of a guide, per repeat.
        reference: number of reference draws, different ones in each repeat.
        repeats: repeats of the guide's draws.
        num_warmup: warm-up of NUTS.
    """

    draws: int = 2000
    reference: int = 4000
    repeats: int = 3
    num_warmup: int = 1000


QUICK = Effort(draws=100, reference=200, repeats=2, num_warmup=100)


def make_guide(target: Target, metric: str) -> RiemannianLaplace:
    own = {"fisher": target.metric, EMPIRICAL: target.empirical}.get(metric)
    return RiemannianLaplace(target.model, own or metric, **target.settings)


def find_mode(guide: RiemannianLaplace, target: Target, key: jax.Array) -> dict[str, jax.Array]:
    with warnings.catch_warnings():
        if target.fit.get("max_steps") == 0:  # the mode is given and must not change
            warnings.simplefilter("ignore", SamplingWarning)
        return guide.fit(key, *target.args, **target.fit)


def draw(
    guide: RiemannianLaplace,
    target: Target,
    params: dict[str, jax.Array],
    key: jax.Array,
    shape: tuple[int, int],
) -> Draws:
    """Draws of a guide and the outcome of their geodesics; equal keys give equal velocities."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # failures are counted in the table
        drawn = guide.draw(key, params, *target.args, sample_shape=shape, progress_bar=False)
    return Draws(
        np.asarray(drawn.unconstrained),
        np.asarray(drawn.success),
        np.asarray(drawn.num_evaluations),
    )


def nuts_draws(
    target: Target, near: np.ndarray, key: jax.Array, count: int, num_warmup: int
) -> np.ndarray:
    """Shuffled draws of four NUTS chains; Gaussian draws ``near`` give start and mass matrix."""
    kernel = NUTS(
        target.model,
        dense_mass=True,
        inverse_mass_matrix={("theta",): jnp.cov(near.T)},
        init_strategy=init_to_value(values={"theta": jnp.asarray(near.mean(axis=0))}),
    )
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=-(-count // 4),
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(key, *target.args)
    # shuffled, so that any part of them is a sample of all
    return np.random.default_rng(0).permutation(np.asarray(mcmc.get_samples()["theta"]))[:count]


def wasserstein(x: np.ndarray, y: np.ndarray) -> float:
    """Wasserstein-1 distance of two samples, with Euclidean distances between points.

    Raises:
        ImportError: without POT.
    """
    try:
        import ot
    except ImportError as error:
        raise ImportError("Wasserstein distances need POT: pip install pot") from error
    return float(ot.emd2([], [], ot.dist(x, y, metric="euclidean"), numItermax=10**9))


# --- rows of the tables


class Row(NamedTuple):
    """One metric on one target.

    Attributes:
        target: name of the target.
        metric: name of the metric, or `REFERENCE`.
        size: D.
        scores: shape (repeats, 1) with W1, or (repeats, 2) with MSE and NLL.
        floor: W1 of other reference draws, shape (repeats,).
        evaluations: mean per draw; None without geodesics.
        failed: share of draws whose geodesic failed.
        map_error: largest error of the map; None without an exact map.
    """

    target: str
    metric: str
    size: int
    scores: np.ndarray
    floor: np.ndarray
    evaluations: float | None
    failed: float
    map_error: float | None


def predictive_score(outputs: np.ndarray, noise: float, y: np.ndarray) -> tuple[float, float]:
    """Mean squared error of the mean, and negative log density of the equal mixture, per test row.

    Args:
        outputs: shape (draws, rows).
        noise: standard deviation.
        y: shape (rows,).
    """
    log_p = -(((y - outputs) / noise) ** 2) / 2 - np.log(noise * np.sqrt(2 * np.pi))
    mixture = logsumexp(log_p, axis=0) - np.log(len(outputs))
    return float(np.mean((y - outputs.mean(axis=0)) ** 2)), float(-np.mean(mixture))


def predictions(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Predictions of the networks ``theta``, shape (draws, rows)."""
    return np.asarray(jax.jit(jax.vmap(lambda t: outputs(t, x)))(jnp.asarray(theta)))


def score(target: Target, position: np.ndarray, reference: np.ndarray | None) -> tuple[float, ...]:
    """W1 from the reference; for networks, MSE and NLL."""
    if target.test is None:
        return (wasserstein(target.compare(position), reference),)
    x, y = target.test
    mse, nll = predictive_score(predictions(position, x), target.args[2], y)
    return mse * target.unit**2, nll + float(np.log(target.unit))


def summarise(name: str, metric: str, target: Target, draws: Draws, references: Any) -> Row:
    """A row without its floor.

    Args:
        name: name of the target.
        metric: metric of the guide.
        target: the posterior.
        draws: draws of the guide.
        references: reference draws of each repeat.
    """
    kept = zip(draws.position, draws.success, references, strict=True)
    scores = [score(target, position[success], other) for position, success, other in kept]
    return Row(
        name,
        metric,
        draws.position.shape[-1],
        np.array(scores),
        np.full(1, np.nan),
        None if metric == "euclidean" else float(draws.evaluations.mean()),
        float(np.mean(~draws.success)),
        None,
    )


def largest_error(target: Target, velocity: np.ndarray, position: np.ndarray) -> float | None:
    """Largest distance of draws from the end of the exact map, relative to its norm.

    The mode is the origin.
    """
    if target.exact_map is None:
        return None
    end = target.exact_map(velocity)
    norm = np.linalg.norm(end, axis=-1)
    return float(np.max(np.linalg.norm(position - end, axis=-1) / norm))


def run_target(
    name: str, target: Target, metrics: Sequence[str], effort: Effort, seed: int
) -> tuple[list[Row], dict[str, np.ndarray]]:
    """Rows of the table, and the draws of one repeat by metric for the figures."""
    key = random.fold_in(random.key(seed), zlib.crc32(name.encode()))
    key_fit, key_draw, key_reference = random.split(key, 3)
    shape = (effort.repeats, effort.draws)
    guide = make_guide(target, "euclidean")
    params = find_mode(guide, target, key_fit)
    straight = draw(guide, target, params, key_draw, shape)

    start = time.perf_counter()
    networks = target.test is not None
    part = effort.draws + effort.reference
    count = effort.draws if networks else effort.repeats * part
    if target.exact is not None:
        everything = target.exact(np.random.default_rng([seed, zlib.crc32(name.encode())]), count)
    else:
        near = straight.position.reshape(-1, straight.position.shape[-1])
        everything = nuts_draws(target, near, key_reference, count, effort.num_warmup)
    rows, shown = [], {REFERENCE: everything[: effort.draws]}
    if networks:
        references, floor = [None] * effort.repeats, np.full(1, np.nan)
        scores = np.array([score(target, everything, None)])
        rows.append(Row(name, REFERENCE, everything.shape[-1], scores, floor, None, 0.0, None))
    else:
        everything = everything.reshape(effort.repeats, part, -1)
        references = [target.compare(draws[effort.draws :]) for draws in everything]
        pairs = zip(everything[:, : effort.draws], references, strict=True)
        floor = np.array([score(target, *pair)[0] for pair in pairs])
    _tell(name, REFERENCE, start)

    for metric in metrics:
        start = time.perf_counter()
        try:
            draws = straight
            if metric != "euclidean":
                draws = draw(make_guide(target, metric), target, params, key_draw, shape)
            row = summarise(name, metric, target, draws, references)._replace(floor=floor)
        except (ValueError, FloatingPointError) as error:  # one metric must not stop the others
            print(f"{name}, {metric} failed: {error}", file=sys.stderr)
            continue
        if metric == "fisher":
            # the draws of a Euclidean guide minus the mode are the velocities
            row = row._replace(map_error=largest_error(target, straight.position, draws.position))
        rows.append(row)
        shown[metric] = draws.position[0][draws.success[0]]
        _tell(name, metric, start)
    return rows, shown


def _tell(name: str, metric: str, start: float) -> None:
    print(f"{name}, {metric}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


# --- output


def spread(values: np.ndarray) -> str:
    """Mean ± sd over the repeats."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


def _ours(row: Row) -> tuple[str, str]:
    evaluations = "–" if row.evaluations is None else f"{row.evaluations:.1f}"
    return evaluations, f"{row.failed:.1%}" if row.failed else "0"


def _theirs(row: Row) -> tuple[str, str, str]:
    """The paper's two figures and its number of evaluations."""
    paper = PAPER.get((row.target, row.metric))
    if paper is None:
        return "–", "–", "–"
    evaluations = "–" if paper.evaluations is None else f"{paper.evaluations:g}"
    return f"{paper.first:.3f}", f"{paper.second:.3f}", evaluations


def table(rows: Sequence[Row]) -> str:
    """Markdown: distances of draws, and scores of predictions."""
    parts = []
    draws = [r for r in rows if r.scores.shape[1] == 1]
    if draws:
        lines = [
            "| target | D | metric | W1 | floor | evaluations | failed | largest error of the map "
            "| the paper's W1 | its evaluations |",
            "|---" * 10 + "|",
        ]
        for r in draws:
            first, second, evaluations = _theirs(r)
            paper = first if first == "–" else f"{first} ± {second}"
            error = "–" if r.map_error is None else f"{r.map_error:.1e}"
            cells = [r.target, str(r.size), r.metric, spread(r.scores[:, 0]), spread(r.floor)]
            lines.append(f"| {' | '.join([*cells, *_ours(r), error, paper, evaluations])} |")
        parts.append("\n".join(lines))
    networks = [r for r in rows if r.scores.shape[1] == 2]
    if networks:
        lines = [
            "| network | D | metric | MSE | NLL | evaluations | failed | the paper's MSE | its NLL "
            "| its evaluations |",
            "|---" * 10 + "|",
        ]
        for r in networks:
            name = "NUTS" if r.metric == REFERENCE else r.metric
            cells = [r.target, str(r.size), name, *(spread(column) for column in r.scores.T)]
            lines.append(f"| {' | '.join([*cells, *_ours(r), *_theirs(r)])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def short(rows: Sequence[Row]) -> str:
    """Markdown: a target in a line, with distances and evaluations by metric; then networks."""
    draws = [r for r in rows if r.scores.shape[1] == 1]
    others = table([r for r in rows if r.scores.shape[1] == 2])
    if not draws:
        return others

    def cell(distance: str, evaluations: str) -> str:
        return distance if evaluations == "–" else f"{distance} ({float(evaluations):,.0f})"

    found = {(r.target, r.metric): r for r in draws}
    metrics = [m for m in (*METRICS, EMPIRICAL) if any(r.metric == m for r in draws)]
    heads = ["target", "floor", *metrics, *(f"{m}, paper" for m in metrics)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for target in dict.fromkeys(r.target for r in draws):
        mine = [found.get((target, m)) for m in metrics]
        ours = ["–" if r is None else cell(f"{r.scores.mean():.3f}", _ours(r)[0]) for r in mine]
        theirs = ["–" if r is None else cell(*_theirs(r)[::2]) for r in mine]
        floor = next(r.floor.mean() for r in draws if r.target == target)
        lines.append(f"| {' | '.join((target, f'{floor:.3f}', *ours, *theirs))} |")
    return "\n\n".join(filter(None, ["\n".join(lines), others]))


FIGURES = {
    "banana": (("banana", "banana-hausdorff"), (-7.5, 3.5), (-3.5, 3.5)),
    "squiggle": (("squiggle", "squiggle-narrow"), (-9.0, 9.0), (-4.0, 4.0)),
    "funnel": (("funnel",), (-12.0, 12.0), (-10.0, 8.0)),
}
"""File -> targets, and the shown part of the plane."""
NETWORKS = ("snelson", "snelson-gap")


def save_figures(
    folder: Path, targets: Mapping[str, Target], shown: Mapping[str, dict[str, np.ndarray]]
) -> None:
    """One PNG for each entry of `FIGURES` and one for the networks, of the targets that ran.

    Raises:
        ImportError: without Matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "figures need Matplotlib: pip install 'numpyro_geom[examples]', or leave out --write"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in {**{k: v[0] for k, v in FIGURES.items()}, "networks": NETWORKS}.items():
        rows = [name for name in names if name in shown]
        if not rows:
            continue
        columns = list(dict.fromkeys(metric for name in rows for metric in shown[name]))
        figure = Figure(figsize=(2.7 * len(columns), 2.4 * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
        for axes, name in zip(grid, rows, strict=True):
            for place, metric in zip(axes, columns, strict=True):
                place.set_title(f"{name}: {metric}", fontsize=8)
                place.tick_params(labelsize=7)
                if metric not in shown[name]:
                    continue
                if file == "networks":
                    _bands(place, targets[name], shown[name][metric])
                else:
                    _scatter(place, targets[name], shown[name][metric], *FIGURES[file][1:])
        figure.savefig(folder / f"riemannian_laplace_{file}.png", dpi=75)


def _scatter(axes: Any, target: Target, draws: np.ndarray, x: tuple, y: tuple) -> None:
    """Draws over contours of the density that hold 50%, 90% and 99% of the mass in the plot."""
    across, up = np.meshgrid(np.linspace(*x, 200), np.linspace(*y, 200))
    points = jnp.asarray(np.stack([across.ravel(), up.ravel()], axis=1))

    def log_density(theta: jax.Array) -> jax.Array:
        return numpyro.infer.util.log_density(target.model, target.args, {}, {"theta": theta})[0]

    values = np.asarray(jax.jit(jax.vmap(log_density))(points))
    values = values - values.max()
    ordered = np.sort(np.exp(values))[::-1]
    held = np.cumsum(ordered) / ordered.sum()
    levels = np.log([ordered[np.searchsorted(held, share)] for share in (0.99, 0.9, 0.5)])
    axes.contour(across, up, values.reshape(across.shape), levels, colors="0.5", linewidths=0.7)
    axes.plot(*draws[:600].T, ".", markersize=1.5, color="C0")
    axes.set_xlim(*x)
    axes.set_ylim(*y)


def _bands(axes: Any, target: Target, draws: np.ndarray) -> None:
    """Median and central 95% of predictions, noise included, and the training data."""
    assert target.show is not None
    x, y, noise, _ = target.args
    values = predictions(draws[:1000], target.show)
    values = values + noise * np.random.default_rng(0).normal(size=values.shape)
    low, middle, high = np.quantile(values, [0.025, 0.5, 0.975], axis=0)
    axes.fill_between(target.show, low, high, alpha=0.3, linewidth=0)
    axes.plot(target.show, middle, linewidth=1)
    axes.plot(x, y, ".", markersize=1.5, color="black")
    axes.set_ylim(-5, 5)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the experiments, print their tables, and write the requested files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder of the data; default NUMPYRO_GEOM_DATA")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS))
    parser.add_argument(
        "--metrics", nargs="+", choices=(*METRICS, EMPIRICAL), help="default: by target"
    )
    parser.add_argument("--draws", type=int, help="draws of a guide")
    parser.add_argument("--reference", type=int, help="reference draws")
    parser.add_argument("--repeats", type=int, help="repeats of a guide's draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few draws, and targets without data")
    parser.add_argument(
        "--write", type=Path, help="folder for tables/riemannian_laplace.md and figures/"
    )
    options = parser.parse_args(arguments)
    sizes = {k: getattr(options, k) for k in ("draws", "reference", "repeats")}
    for name, value in sizes.items():
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    effort = dataclasses.replace(
        QUICK if options.quick else Effort(), **{k: v for k, v in sizes.items() if v is not None}
    )
    chosen = options.targets or (QUICK_TARGETS if options.quick else list(TARGETS))
    named = options.data_dir or os.environ.get("NUMPYRO_GEOM_DATA")
    folder = None if named is None else Path(named).expanduser()
    rows: list[Row] = []
    targets, shown = {}, {}
    with jax.enable_x64(True):
        for name in chosen:
            try:
                target = TARGETS[name](folder)
            except (OSError, ValueError, ImportError) as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            metrics = options.metrics
            if metrics is None:
                metrics = ("euclidean", "fisher") if options.quick else metrics_of(name)
            more, shown[name] = run_target(name, target, metrics, effort, options.seed)
            targets[name] = target
            rows += more
            print(table(more), file=sys.stderr, flush=True)
        if not rows:
            sys.exit("no target could be run: see above, or try --quick")
        head = (
            f"{effort.draws} draws against {effort.reference} reference draws, {effort.repeats} "
            f"repeats (mean ± sd), float64, seed {options.seed}."
        )
        print(f"{head}\n\n{table(rows)}\n")
        if options.write is not None:
            path = options.write / "tables" / "riemannian_laplace.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{head}\n\n{short(rows)}\n")
            save_figures(options.write / "figures", targets, shown)
    return rows


if __name__ == "__main__":
    main()
