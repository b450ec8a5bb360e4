"""How sure draws are of means and spreads.

Monte Carlo errors are s / sqrt(n), s the standard deviation of what is averaged and n its own
effective sample size: that of (x - mean)^2 for a spread, of an indicator for a share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size

COLUMNS = 128
"""Scalars whose autocovariances are in memory at once."""


class MomentEstimates(NamedTuple):
    """Means and spreads of scalars with their Monte Carlo errors, arrays of shape (scalars,).

    Attributes:
        mean: the means.
        mean_error: their standard errors.
        sd: the standard deviations.
        sd_error: their standard errors.
        mean_size: effective sample size of the mean.
        sd_size: effective sample size of the squared deviation from it.
    """

    mean: np.ndarray
    mean_error: np.ndarray
    sd: np.ndarray
    sd_error: np.ndarray
    mean_size: np.ndarray
    sd_size: np.ndarray

    @property
    def least_size(self) -> np.ndarray:
        """The smaller of both effective sample sizes."""
        return np.minimum(self.mean_size, self.sd_size)


def effective_size(values: np.ndarray) -> np.ndarray:
    """Effective sample size of the mean of each scalar, between 1 and n log10(n).

    Chains count as two halves each, so that one that drifts is seen to. A scalar that never
    changes has 1.

    Args:
        values: shape (chains, draws, scalars).
    """
    half = values.shape[1] // 2
    halves = np.concatenate([values[:, :half], values[:, -half:]])
    number = values.shape[0] * values.shape[1]
    sizes = np.ones(values.shape[2])
    moves = np.ptp(halves, axis=(0, 1)) > 0
    for start in range(0, values.shape[2], COLUMNS):
        some = np.flatnonzero(moves[start : start + COLUMNS]) + start
        if some.size:
            sizes[some] = effective_sample_size(halves[..., some])
    # without variance within chains it is not a number; so anticorrelated is no estimate reliable
    sizes = np.where(np.isfinite(sizes) & (sizes > 0), sizes, np.where(sizes < 0, np.inf, 1.0))
    return np.clip(sizes, 1.0, number * max(1.0, np.log10(number)))


def estimate_moments(values: np.ndarray) -> MomentEstimates:
    """Means and standard deviations with their errors; the latter's by the delta method.

    Args:
        values: shape (chains, draws, scalars).
    """
    mean = values.mean(axis=(0, 1))
    squares = (values - mean) ** 2
    variance = squares.mean(axis=(0, 1))
    sd = np.sqrt(variance)
    mean_size, sd_size = effective_size(values), effective_size(squares)
    spread = squares.std(axis=(0, 1))
    safe = np.where(sd > 0, sd, 1.0)
    return MomentEstimates(
        mean=mean,
        mean_error=sd / np.sqrt(mean_size),
        sd=sd,
        sd_error=spread / np.sqrt(sd_size) / (2 * safe),
        mean_size=mean_size,
        sd_size=sd_size,
    )
