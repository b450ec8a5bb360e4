"""R-hat and effective draws from batch means, for draws that are not kept."""

from __future__ import annotations

import math

import numpy as np

MOST_BATCHES = 64
"""Largest number of batches of a chain; at this number, each two batches become one."""
LEAST_DRAWS = 16
"""Smallest number of draws of a chain for an estimate."""


class BatchMeans:
    """Sums and sums of squares over batches of successive draws; all batches have the same length.

    Args:
        chains: number of chains.
        scalars: number of scalars.
    """

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
        if draws < LEAST_DRAWS:
            raise ValueError(
                f"expected at least {LEAST_DRAWS} draws per chain to judge mixing by, got {draws}"
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
