"""Distances between joint laws, with what they are where both sides have one law.

Draws are thinned until they are about independent. If both laws are one, labels "draws" and
"reference" can be permuted without changing the law of a distance: its values under random
permutations are what it has by chance, its floor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist, pdist
from scipy.stats import t

MOST_DRAWS = 500
"""Draws a side that enter a distance."""
FEWEST_DRAWS = 20
PERMUTATIONS = 599
"""Of labels; the smallest probability that they can show is 1 in 600."""
SOLVED_PERMUTATIONS = 19
"""Of labels, where each costs an assignment problem."""
PROJECTIONS = 32
ROWS = 256
"""Rows of a kernel matrix in memory at once."""


class Distance(NamedTuple):
    """A distance between two joint laws.

    Attributes:
        name: which.
        value: of the draws, in reference standard deviations.
        floor: mean where both laws are one.
        floor_error: standard deviation there.
        p_value: probability there of a value as large.
    """

    name: str
    value: float
    floor: float
    floor_error: float
    p_value: float


def thin(values: np.ndarray, size: float, most: int = MOST_DRAWS) -> np.ndarray:
    """About independent draws of all chains: every k-th, k twice the autocorrelation time.

    From shape (chains, draws, scalars), with ``size`` effective draws of the slowest scalar, to
    (number, scalars).
    """
    number = values.shape[0] * values.shape[1]
    time = number / size
    every = 1 if time <= 1.2 else int(np.ceil(2 * time))  # e^-4 of the correlation is left
    every = max(every, -(-number // most))
    return values[:, ::every].reshape(-1, values.shape[2])[:most]


def distances(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator, *, wasserstein: bool
) -> tuple[Distance, ...]:
    """Sliced Wasserstein-2, MMD and, on request, exact Wasserstein-1.

    Of standardised draws and as many of the reference, both of shape (n, scalars).
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
    if chance.size <= SOLVED_PERMUTATIONS:  # so few suffice to fit a normal law
        score = (value - mean) / (sd * np.sqrt(1 + 1 / chance.size))
        p_value = t.sf(score, chance.size - 1)
    else:
        # a value that rounding alone tells from the first is as large
        p_value = (1 + np.sum(chance >= value * (1 - 1e-9))) / (1 + chance.size)
    return Distance(name, *map(float, (value, mean, sd, p_value)))


def _sliced(pooled: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Root mean square over directions of the one-dimensional W2, for each labelling.

    Bonneel, Rabin, Peyre and Pfister (2015); both sides have as many draws, so that sorted ones
    are matched in order.
    """
    total = np.zeros(len(labels))
    half = labels.shape[1] // 2
    for _ in range(PROJECTIONS):
        direction = rng.standard_normal(pooled.shape[1])
        line = pooled @ (direction / np.linalg.norm(direction))
        order = np.argsort(line, kind="stable")
        ranked = labels[:, order]
        ranks = np.broadcast_to(line[order], ranked.shape)
        # a mask picks row by row, in order
        gaps = ranks[ranked].reshape(-1, half) - ranks[~ranked].reshape(-1, half)
        total += np.einsum("ij,ij->i", gaps, gaps) / half
    return np.sqrt(total / PROJECTIONS)


def _mmd(pooled: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Maximum mean discrepancy for each labelling, the kernel exp(-|x - y|^2 / 2 l^2).

    Gretton, Borgwardt, Rasch, Schoelkopf and Smola (JMLR 13, 2012), the biased estimate, which is
    not negative; l is the median distance between two draws.
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
    """Wasserstein-1 with Euclidean cost for each labelling: the best matching of both sides."""
    costs = (cdist(pooled[row], pooled[~row]) for row in labels)
    return np.array([cost[linear_sum_assignment(cost)].mean() for cost in costs])
