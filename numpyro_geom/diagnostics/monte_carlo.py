"""Effective sample sizes, Monte Carlo errors of means and standard deviations, and R-hat.

An error is s / sqrt(n), where s is the standard deviation of the averaged quantity and n is the
effective sample size of the same quantity. For a standard deviation, the quantity is (x - mean)^2;
for a share, it is an indicator.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from numpyro.diagnostics import effective_sample_size

from .._util import num_at_once


class MomentEstimates(NamedTuple):
    """Means and sds of scalars with their Monte Carlo errors, arrays of shape (scalars,)."""

    mean: np.ndarray
    mean_error: np.ndarray
    sd: np.ndarray
    sd_error: np.ndarray
    mean_size: np.ndarray  # effective sample size of the mean
    sd_size: np.ndarray  # effective sample size of the squared deviation from the mean

    @property
    def least_size(self) -> np.ndarray:
        """The smaller of both effective sample sizes."""
        return np.minimum(self.mean_size, self.sd_size)


def effective_size(values: np.ndarray, still: ArrayLike = 1.0) -> np.ndarray:
    """Effective size of each scalar's mean, from draws of shape (chains, draws, scalars).

    It is between 1 and n log10(n). Each chain is split into two halves, so that a drift reduces the
    size. A scalar that never changes says nothing of its size and gets ``still``: the size of the
    draws that it is computed from, if that is known.
    """
    half = values.shape[1] // 2
    halves = np.concatenate([values[:, :half], values[:, -half:]])
    number = values.shape[0] * values.shape[1]
    sizes = np.array(np.broadcast_to(still, values.shape[2]), float)
    moves = np.ptp(halves, axis=(0, 1)) > 0
    step = num_at_once(16 * number)
    for start in range(0, values.shape[2], step):
        some = np.flatnonzero(moves[start : start + step]) + start
        if some.size:
            sizes[some] = effective_sample_size(halves[..., some])
    # NaN: no variance within chains; negative: anticorrelated beyond what can be estimated
    sizes = np.where(np.isfinite(sizes) & (sizes > 0), sizes, np.where(sizes < 0, np.inf, 1.0))
    return np.clip(sizes, 1.0, number * max(1.0, np.log10(number)))


def estimate_moments(values: np.ndarray) -> MomentEstimates:
    """Moments of draws (chains, draws, scalars); errors of an sd by the delta method."""
    mean = values.mean(axis=(0, 1))
    squares = (values - mean) ** 2
    sd = np.sqrt(squares.mean(axis=(0, 1)))
    mean_size = effective_size(values)
    sd_size = effective_size(squares, mean_size)
    mean_error = sd / np.sqrt(mean_size)
    sd_error = squares.std(axis=(0, 1)) / np.sqrt(sd_size) / (2 * np.where(sd > 0, sd, 1.0))
    return MomentEstimates(mean, mean_error, sd, sd_error, mean_size, sd_size)


MOST_BATCHES = 64
"""Largest number of batches of a chain; at this number, each two batches become one."""
LEAST_BATCHED = 16
"""Smallest number of draws of a chain for an estimate."""


class BatchMeans:
    """Sums and sums of squares over batches of successive draws, all of the same length."""

    def __init__(self, chains: int, scalars: int) -> None:
        self.chains = chains
        self._length = 1
        self._sums: list[np.ndarray] = []  # each (2, chains, scalars): values, and squares
        self._open, self._count = np.zeros((2, chains, scalars)), 0

    def add(self, values: np.ndarray) -> None:
        """Add draws, shape (chains, draws, scalars)."""
        for k in range(values.shape[1]):
            x = values[:, k]
            self._open, self._count = self._open + np.stack([x, x**2]), self._count + 1
            if self._count == self._length:
                self._sums.append(self._open)
                self._open, self._count = np.zeros_like(self._open), 0
            if len(self._sums) == MOST_BATCHES:
                self._sums = self._joined(2)
                self._length *= 2

    def rhat_and_ess(self) -> tuple[np.ndarray, np.ndarray]:
        """R-hat of split chains, and effective draws of all chains; NaN if a scalar does not vary.

        The batches for effective draws are chosen such that their number is about their length. An
        unfinished batch is left out.

        Source: Gelman et al., Bayesian Data Analysis, 3rd ed., section 11.4, for R-hat; Flegal and
        Jones, Annals of Statistics 38, 2010, for batch means.
        """
        draws = len(self._sums) * self._length
        if draws < LEAST_BATCHED:
            raise ValueError(
                f"expected at least {LEAST_BATCHED} draws per chain to judge mixing by, got {draws}"
            )
        halves = np.array(self._joined(len(self._sums) // 2)[-2:])
        half = len(self._sums) // 2 * self._length
        means = halves[:, 0] / half
        variances = (halves[:, 1] - half * means**2) / (half - 1)
        within = variances.mean((0, 1))
        between = means.var(axis=(0, 1), ddof=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            total = (half - 1) / half * within + between
            rhat = np.sqrt(total / within)
            together = max(1, math.isqrt(draws) // self._length)
            length = together * self._length
            batches = np.array(self._joined(together))[:, 0] / length
            noise = length * batches.var(axis=(0, 1), ddof=1)
            ess = self.chains * draws * total / noise
        varies = within > 0
        return np.where(varies, rhat, np.nan), np.where(varies, ess, np.nan)

    def _joined(self, count: int) -> list[np.ndarray]:
        """Sums over ``count`` successive batches; batches left over at the start are dropped."""
        rest = len(self._sums) % count
        return [
            sum(self._sums[k : k + count])  # type: ignore[misc]
            for k in range(rest, len(self._sums), count)
        ]
