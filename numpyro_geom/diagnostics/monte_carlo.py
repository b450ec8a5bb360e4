"""Effective sample sizes, and Monte Carlo errors of means and standard deviations.

An error is s / sqrt(n), where s is the standard deviation of the averaged quantity and n is the
effective sample size of the same quantity. For a standard deviation, the quantity is (x - mean)^2;
for a share, it is an indicator.
"""

from __future__ import annotations

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
