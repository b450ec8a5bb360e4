"""Distances between joint distributions, with their values under equal distributions.

Draws are thinned until they are about independent. If both distributions are equal, a permutation
of the labels "draws" and "reference" does not change the distribution of a distance. So random
permutations of the labels give the values of the distance by chance, its floor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist, pdist
from scipy.stats import t

MOST_DRAWS = 500
"""Largest number of draws per side in a distance."""
FEWEST_DRAWS = 20
PERMUTATIONS = 599
"""Number of permutations of the labels; their smallest possible p-value is 1 in 600."""
SOLVED_PERMUTATIONS = 19
"""Number of permutations if each needs the solution of an assignment problem."""
PROJECTIONS = 32
ROWS = 256
"""Rows of a kernel matrix in memory at once."""


class Distance(NamedTuple):
    """A distance between two joint distributions.

    Attributes:
        name: name of the distance.
        value: the distance, in reference standard deviations.
        floor: its mean if both distributions are equal.
        floor_error: its standard deviation in that case.
        p_value: probability of a value at least as large in that case.
    """

    name: str
    value: float
    floor: float
    floor_error: float
    p_value: float


def thin(values: np.ndarray, size: float, most: int = MOST_DRAWS) -> np.ndarray:
    """About independent draws of all chains: every k-th draw, k twice the autocorrelation time.

    From shape (chains, draws, scalars) to (number, scalars). ``size`` is the number of effective
    draws of the slowest scalar.
    """
    number = values.shape[0] * values.shape[1]
    time = number / size
    every = 1 if time <= 1.2 else int(np.ceil(2 * time))  # the remaining correlation is e^-4
    every = max(every, -(-number // most))
    return values[:, ::every].reshape(-1, values.shape[2])[:most]


def distances(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator, *, wasserstein: bool
) -> tuple[Distance, ...]:
    """Sliced Wasserstein-2, MMD and, on request, exact Wasserstein-1.

    Both sides are standardised and have the same number of draws, shape (n, scalars).
    """
    n = len(x)
    pooled = np.concatenate([x, y])
    labels = np.zeros((PERMUTATIONS + 1, 2 * n), bool)
    labels[0, :n] = True
    for row in labels[1:]:
        row[rng.permutation(2 * n)[:n]] = True
    values = {"sliced Wasserstein-2": _sliced(pooled, labels, rng), "MMD": _mmd(pooled, labels)}
    if wasserstein:
        values["Wasserstein-1"] = _exact(pooled, labels[: SOLVED_PERMUTATIONS + 1])
    return tuple(_judge(name, *x) for name, x in values.items())


def _judge(name: str, value: float, *by_permutation: float) -> Distance:
    chance = np.array(by_permutation)
    mean, sd = chance.mean(), chance.std(ddof=1)
    if chance.size <= SOLVED_PERMUTATIONS:  # few, but enough to fit a normal distribution
        score = (value - mean) / (sd * np.sqrt(1 + 1 / chance.size))
        p_value = t.sf(score, chance.size - 1)
    else:
        # values that differ by rounding alone count as equal
        p_value = (1 + np.sum(chance >= value * (1 - 1e-9))) / (1 + chance.size)
    return Distance(name, *map(float, (value, mean, sd, p_value)))


def _sliced(pooled: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Root mean square over directions of the one-dimensional W2, for each labelling.

    Bonneel, Rabin, Peyre and Pfister (2015). Both sides have the same number of draws, so the
    sorted draws are matched in order.
    """
    total = np.zeros(len(labels))
    half = labels.shape[1] // 2
    for _ in range(PROJECTIONS):
        direction = rng.standard_normal(pooled.shape[1])
        line = pooled @ (direction / np.linalg.norm(direction))
        order = np.argsort(line, kind="stable")
        ranked = labels[:, order]
        ranks = np.broadcast_to(line[order], ranked.shape)
        # a mask selects entries row by row, in order
        gaps = ranks[ranked].reshape(-1, half) - ranks[~ranked].reshape(-1, half)
        total += np.einsum("ij,ij->i", gaps, gaps) / half
    return np.sqrt(total / PROJECTIONS)


def _mmd(pooled: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Maximum mean discrepancy for each labelling, with the kernel exp(-|x - y|^2 / 2 l^2).

    Gretton, Borgwardt, Rasch, Schoelkopf and Smola (JMLR 13, 2012). This is the biased estimate,
    which is never negative; l is the median distance between two draws.
    """
    number = len(pooled)
    weights = np.where(labels, 1.0, -1.0).T / (number // 2)
    gaps = pdist(pooled[:: max(1, number // 500)], "sqeuclidean")
    scale = max(float(np.median(gaps)), np.finfo(float).tiny)
    total = np.zeros(len(labels))
    for start in range(0, number, ROWS):
        rows = slice(start, start + ROWS)
        kernel = np.exp(-cdist(pooled[rows], pooled, "sqeuclidean") / (2 * scale))
        total += np.einsum("ij,ij->j", weights[rows], kernel @ weights)
    return np.sqrt(np.maximum(total, 0))


def _exact(pooled: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Wasserstein-1 with Euclidean cost for each labelling: the optimal matching of both sides."""
    costs = (cdist(pooled[row], pooled[~row]) for row in labels)
    return np.array([cost[linear_sum_assignment(cost)].mean() for cost in costs])
