"""What a guide returns: an account of its search for a mode, and draws with their status."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ..model.abstract import abstract_trace
from ..model.arguments import HostArray, on_device, reads_values, split_arrays, without_host

LEAST_WEIGHTS = 5
"""Smallest number of weights whose tail has a shape."""
EQUAL_WEIGHTS = 0.01
"""Range of log weights, in nats, below which the weights have no tail to describe."""


class FitReport(NamedTuple):
    """An account of the runs of `RiemannianLaplace.fit`, one entry per run.

    Attributes:
        objective: value at the end of the run, in nats: U, or U + log det G / 2 for a Hausdorff
            mode.
        gradient_norm: Euclidean norm of the gradient at the end of the run.
        num_steps: L-BFGS and Newton steps.
        status: ``"best"``, ``"finite"`` or ``"not finite"``.
        distance: distance of the best run from the mode in posterior standard deviations, root
            mean square over the D directions.
    """

    objective: np.ndarray
    gradient_norm: np.ndarray
    num_steps: np.ndarray
    status: tuple[str, ...]
    distance: float

    def __str__(self) -> str:
        """A line for each run."""
        lines = ["run  status          objective  |gradient|  steps"]
        rows = zip(self.status, self.objective, self.gradient_norm, self.num_steps, strict=True)
        lines += [
            f"{i:3d}  {status:<10s} {value:14.6g} {norm:11.3g} {steps:6d}"
            for i, (status, value, norm, steps) in enumerate(rows)
        ]
        return "\n".join([*lines, f"best run: {self.distance:.2g} posterior sd from the mode"])


class LaplaceDraws(NamedTuple):
    """Draws of a guide and the status of each; leading dimensions are ``sample_shape``.

    Attributes:
        samples: site name -> values in the site's support, deterministic sites included; NaN if
            the geodesic failed.
        unconstrained: flat unconstrained positions, last dimension D; NaN if the geodesic failed.
        success: whether the geodesic was followed to its end.
        num_evaluations: evaluations of the geodesic's acceleration.
        log_weight: log target density minus log density of the draw, up to a constant. None
            unless requested, NaN if the geodesic failed.
        pareto_k: shape of the generalised Pareto tail of the weights (k-hat). Below
            `largest_shape` the draws can be reweighted to the posterior. Infinite if a geodesic
            failed, because its weight is not known. None without weights.
        seconds: wall time per draw, compilation included.
        model: the model, its `param` sites at the values of the draws.
        args: the model's arguments, the training data.
        kwargs: the model's keyword arguments.
        settings: the guide's settings, by name.
    """

    samples: dict[str, jax.Array]
    unconstrained: jax.Array
    success: jax.Array
    num_evaluations: jax.Array
    log_weight: jax.Array | None
    pareto_k: float | None
    seconds: float
    model: Callable
    args: tuple
    kwargs: dict
    settings: dict[str, Any]

    def resample(self, rng_key: jax.Array) -> dict[str, jax.Array]:
        """Resample the same number of draws by their importance weights, as posterior draws.

        This is systematic resampling, in random order. A draw with n times the mean weight is taken
        n times, rounded up or down. Failed draws are never taken. With `pareto_k` above
        `largest_shape` the result is not the posterior.

        Args:
            rng_key: for the choice.

        Returns:
            Site name -> values, with the shapes in `samples`.

        Raises:
            ValueError: without weights, for a single draw, and if no weight is finite.
        """
        if self.log_weight is None:
            raise ValueError("expected draws with weights: use draw(..., log_weight=True)")
        weights, count = normalized(self.log_weight), self.log_weight.size
        if count < 2:
            raise ValueError(
                "expected several draws to choose from, got 1: use sample_shape=(1000,)"
            )
        if not np.any(weights):
            raise ValueError(
                f"expected a finite weight, got none among {count} draws: every geodesic failed, "
                "see `success`"
            )
        key_start, key_order = random.split(rng_key)
        marks = (np.arange(count) + float(random.uniform(key_start))) / count
        ends = np.cumsum(weights)
        last = np.argmax(ends)  # rounding can leave a mark beyond the end
        taken = np.minimum(np.searchsorted(ends, marks, side="right"), last)
        chosen = random.permutation(key_order, jnp.asarray(taken))
        shape = self.log_weight.shape

        def take(x: jax.Array) -> jax.Array:
            flat = x.reshape(count, *x.shape[len(shape) :])
            return flat[chosen].reshape(x.shape)

        return jax.tree.map(take, self.samples)


class Data(NamedTuple):
    """Model arguments whose arrays are inputs of compiled programs.

    Attributes:
        tree: positional and keyword arguments. NumPy arrays are also on the host if the model
            reads their values there.
    """

    tree: tuple[tuple, dict]

    @classmethod
    def of(cls, model: Callable, args: tuple, kwargs: dict) -> Data:
        """Take NumPy arrays to the device."""
        tree = on_device(args, kwargs)
        return cls(tree if reads_values(_runner(model), *tree) else without_host(tree))

    @property
    def arrays(self) -> list:
        """The arrays that are inputs of programs."""
        return split_arrays(self.tree)[0]

    def build(self, arrays: list) -> tuple[tuple, dict]:
        """Positional and keyword arguments with these arrays."""
        return split_arrays(self.tree)[1](arrays)

    @property
    def signature(self) -> str:
        """A key of compiled programs: with an equal key a program is used again."""
        leaves, treedef = jax.tree.flatten(self.tree)
        told = [
            (x.shape, str(x.dtype), isinstance(x, HostArray) and x.tobytes())
            if isinstance(x, (jax.Array, HostArray))
            else repr(x)
            for x in leaves
        ]
        return f"{treedef}{told}"


def _runner(model: Callable) -> Callable:
    return lambda args, kwargs: abstract_trace(model, args, kwargs, {})


def normalized(log_weights: jax.Array | np.ndarray) -> np.ndarray:
    """Flat weights that sum to 1; 0 for failed draws, and all 0 if all draws failed."""
    logs = np.reshape(np.asarray(log_weights, float), -1)
    finite = np.isfinite(logs)
    if not finite.any():
        return np.zeros(logs.size)
    weights = np.where(finite, np.exp(np.where(finite, logs, 0) - logs[finite].max()), 0.0)
    return weights / weights.sum()


def largest_shape(num_draws: int) -> float:
    """Pareto shape above which the weights of this many draws correct nothing.

    Vehtari, Simpson, Gelman, Yao and Gabry, "Pareto smoothed importance sampling", JMLR 25(72),
    2024: min(1 - 1 / log10(S), 0.7).
    """
    return min(1 - 1 / math.log10(max(num_draws, 2)), 0.7)


def can_correct(log_weights: np.ndarray, shape: float) -> bool:
    """Whether weights of this Pareto shape turn the draws into draws of the posterior.

    They do if the shape is below `largest_shape`. They also do if all weights are equal, because
    then the draws are right as they are.
    """
    logs = np.asarray(log_weights)
    equal = bool(np.ptp(logs) < EQUAL_WEIGHTS)  # False if a weight is NaN
    return not np.isnan(logs).any() and (equal or shape < largest_shape(logs.size))


def pareto_shape(log_weights: np.ndarray) -> float:
    """Shape k of the generalised Pareto tail of importance weights, by ArviZ.

    Infinite if there is no tail, or if a weight is NaN, which means unknown.
    """
    import arviz as az

    weights = np.reshape(log_weights, -1).astype(float)
    if weights.size < LEAST_WEIGHTS or np.isnan(weights).any() or not np.isfinite(weights).any():
        return np.inf
    if hasattr(az, "psislw"):
        k = float(az.psislw(weights)[1])
    else:  # ArviZ 1.x expects log likelihoods, with the other sign
        from arviz_stats.base import array_stats

        try:
            k = float(array_stats.psislw(-weights)[1])
        except ValueError:  # too few weights for a tail
            k = np.inf
    return np.inf if np.isnan(k) else k
