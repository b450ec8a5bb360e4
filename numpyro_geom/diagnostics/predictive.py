"""Predictions of an ensemble of draws, gathered draw by draw."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import entr, logsumexp

from .._checks import check_flag
from .._util import evenly
from .draws import as_array, real_numbers

MIXING_ROWS = 1000
"""Largest number of rows, evenly spaced, whose probabilities are kept for each draw."""
BINS = 15
"""Number of bins of the calibration error, as in Guo et al. (2017)."""
SUM_TOLERANCE = 1e-3
"""Largest deviation of a sum of probabilities from 1. A float32 softmax over a thousand classes
deviates by about 1e-5."""


class PredictionStream:
    """Class probabilities of an ensemble of draws, from a stream of the draws' predictions.

    A network's draws take gigabytes, and its predictions take megabytes. Pass `add` to
    `numpyro_geom.run_in_segments` as ``monitor``, or call it with each draw of the ensemble: for
    instance with the draws of several chains, or with the draws at the end of each cycle.

    The stream keeps sums of the size of one prediction, in float64. For each draw it keeps the
    label's probability of up to 1,000 rows, about 4 kB. scikit-learn computes more scores from
    `probabilities`, such as Brier scores and areas under curves.

    Args:
        labels: classes 0, 1, ..., shape (rows,). None for rows without labels, such as images of
            another kind; `probabilities`, `entropy` and `mutual_information` need no labels.
        logits: whether `add` gets logits. Logits do not underflow where probabilities do.

    Raises:
        TypeError: for labels that are not integers.

    Examples:
        >>> import numpy as np
        >>> from numpyro_geom.diagnostics import PredictionStream
        >>> stream = PredictionStream(np.array([0, 1]))
        >>> stream.add(np.array([[[[0.9, 0.1], [0.6, 0.4]]]]))  # a draw of one chain
        >>> stream.add(np.array([[[[0.5, 0.5], [0.2, 0.8]]]]))
        >>> stream.accuracy, round(stream.nll, 3)
        (1.0, 0.434)
    """

    def __init__(self, labels: Any = None, *, logits: bool = False) -> None:
        self._labels = None if labels is None else _check_labels(labels)
        self._logits = check_flag("logits", logits)
        self._shape: tuple[int, ...] = ()  # chains, rows, classes
        self._draws = 0
        self._sum: Any = 0.0
        self._entropies: Any = 0.0
        self._log_sum: Any = -np.inf
        self._of_label: list[np.ndarray] = []

    def add(self, predictions: Any) -> None:
        """Add draws.

        Args:
            predictions: probabilities (or logits) of shape (chains, draws, rows, classes). Every
                call must have the same chains, rows and classes.

        Raises:
            TypeError: for values that are not real numbers.
            ValueError: for shapes that do not fit; for labels that are not a class; for
                probabilities that are negative, do not sum to 1 or are not finite.
        """
        x = real_numbers("predictions", predictions)
        if x.ndim != 4 or 0 in x.shape or x.shape[3] < 2:
            raise ValueError(
                "predictions must have shape (chains, draws, rows, classes) with two classes or "
                f"more, got {x.shape}: one draw of one chain is p[None, None]"
            )
        chains, _, rows, classes = x.shape
        shape = chains, rows, classes
        if self._shape not in ((), shape):
            raise ValueError(
                f"predictions must have the chains, rows and classes {self._shape} as before, got "
                f"{shape}: use another stream for other chains or rows"
            )
        if self._labels is not None:
            _check_fit(self._labels, rows, classes)
        p, log_p = _normalised(x, self._logits)
        self._shape = shape
        self._draws += x.shape[1]
        self._sum = self._sum + p.sum((0, 1))
        self._entropies = self._entropies + entr(p).sum((0, 1, 3))
        if self._labels is not None:
            of_label = np.take_along_axis(log_p, self._labels[None, None, :, None], axis=3)[..., 0]
            self._log_sum = np.logaddexp(self._log_sum, logsumexp(of_label, axis=(0, 1)))
            some = of_label[..., evenly(rows, MIXING_ROWS)]
            self._of_label.append(np.exp(some).astype(np.float32))

    @property
    def num_draws(self) -> int:
        """Number of draws added so far, over all chains."""
        return self._draws * self._shape[0] if self._shape else 0

    @property
    def probabilities(self) -> np.ndarray:
        """Class probabilities of the ensemble, shape (rows, classes)."""
        self._check_any()
        return self._sum / self.num_draws

    @property
    def entropy(self) -> np.ndarray:
        """Entropy of the ensemble's prediction in nats, shape (rows,): its total uncertainty."""
        return entr(self.probabilities).sum(axis=-1)

    @property
    def mutual_information(self) -> np.ndarray:
        """The part of `entropy` that comes from disagreement between draws, in nats, shape (rows,).

        The rest of `entropy` is uncertainty on which all draws agree. Both can detect rows that are
        unlike the rows that the draws are conditioned on.
        """
        return self.entropy - self._entropies / self.num_draws

    @property
    def accuracy(self) -> float:
        """Share of rows where the most probable class is right (the first one in a tie)."""
        return float(np.mean(self._right()))

    @property
    def nll(self) -> float:
        """Negative log-likelihood of the ensemble, in nats per row.

        Infinite if all draws give a label probability 0.
        """
        self._check_labelled()
        return float(np.log(self.num_draws) - np.mean(self._log_sum))

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: the gap of accuracy and confidence, by bin of confidence.

        The sum over bins of (share of rows in the bin) |accuracy in the bin - mean confidence in
        the bin|. Confidence is the largest probability of a row. The 15 bins (l, r] have equal
        width.

        References:
            Naeini, Cooper and Hauskrecht (AAAI 2015); Guo et al. (ICML 2017), Eq. 3.
        """
        right, confidence = self._right(), self.probabilities.max(axis=1)
        bins = np.minimum(np.ceil(confidence * BINS), BINS).astype(int)
        gaps = np.bincount(bins, right - confidence)
        return float(np.abs(gaps).sum() / len(right))

    @property
    def label_probabilities(self) -> np.ndarray:
        """The label's probability in each draw, shape (chains, draws, rows), of up to 1,000 rows.

        Judge by it how well the chains mix. Their weights need not agree, because the units of a
        network can be exchanged. `numpyro.diagnostics.split_gelman_rubin` computes R-hat for each
        row, and `numpyro.diagnostics.effective_sample_size` effective draws.
        """
        self._check_labelled()
        return np.concatenate(self._of_label, axis=1)

    def _right(self) -> np.ndarray:
        return self.probabilities.argmax(axis=1) == self._check_labelled()

    def _check_labelled(self) -> np.ndarray:
        self._check_any()
        if self._labels is None:
            raise ValueError("expected labels, and there are none: PredictionStream(labels)")
        return self._labels

    def _check_any(self) -> None:
        if not self._draws:
            raise ValueError("no draws have been added: call `add` with predictions first")


def _normalised(x: np.ndarray, logits: bool) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and their logarithms."""
    if logits:
        x = x - logsumexp(x, axis=-1, keepdims=True)
        return np.exp(x), x
    total = x.sum(axis=-1)
    if x.min() < 0 or np.abs(total - 1).max() > SUM_TOLERANCE:
        raise ValueError(
            f"probabilities must not be negative and must sum to 1 over classes, got a smallest of "
            f"{x.min():.3g} and sums from {total.min():.6g} to {total.max():.6g}: for logits pass "
            "logits=True"
        )
    x = x / total[..., None]
    with np.errstate(divide="ignore"):
        return x, np.log(x)


def _check_labels(labels: Any) -> np.ndarray:
    y = as_array("labels", labels)
    if y.dtype.kind not in "iub":
        raise TypeError(f"labels must be integers, the numbers of classes, got dtype {y.dtype}")
    return y.astype(np.int64)


def _check_fit(y: np.ndarray, rows: int, classes: int) -> None:
    if y.shape != (rows,):
        raise ValueError(f"labels must have shape ({rows},), one per row, got {y.shape}")
    if y.min() < 0 or y.max() >= classes:
        raise ValueError(
            f"labels must lie between 0 and {classes - 1}, got some from {y.min()} to {y.max()}"
        )
