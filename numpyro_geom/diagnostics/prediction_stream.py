"""Measures of a classifying ensemble from a stream of draws: sums are kept, draws are not."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import entr, logsumexp

from .._checks import check_flag, check_int
from .arrays import evenly
from .batch_means import BatchMeans
from .predictive_input import by_confidence, check_labels, normalised, read_array

FUNCTION_ROWS = 1000
"""Number of rows, evenly spaced, for which R-hat and effective draws are computed."""
BLOCK_ENTRIES = 2**22
"""Number of probabilities that are in memory in float64 at once."""


class Classification(NamedTuple):
    """Measures of an ensemble of M draws on N rows: means over rows, with natural logarithms.

    Attributes:
        accuracy: share of rows where the most probable class is right (the first one in a tie).
        error: 1 - accuracy.
        nll: negative log-likelihood of the ensemble, - log of the mean over draws of p(label).
        nll_draws: negative log-likelihood of each draw, shape (M,); infinite if a draw gives a
            label probability 0.
        brier: sum over classes of (mean p - one-hot label)^2. For two classes, half of it, which
            is (p - y)^2, as in scikit-learn.
        calibration_error: see `expected_calibration_error`.
        confidence: mean probability of the most probable class.
        entropy: mean entropy of the ensemble's prediction, in nats.
        mutual_information: ``entropy`` minus the mean entropy of the single draws' predictions.
            It measures how much the draws disagree.
        ambiguity: mean of ``nll_draws`` minus ``nll``; never negative.
        ambiguity_geometric: the same for the ensemble that averages logits (the normalised
            geometric mean). It is the ambiguity of Wood et al. (2023) and of Kim et al. (2025),
            Eq. 41. It does not depend on labels.
        variance: variance of p over the draws (divided by M), summed over classes as in ``brier``.
            The mean Brier score of the single draws is ``brier + variance``.
    """

    accuracy: float
    error: float
    nll: float
    nll_draws: np.ndarray
    brier: float
    calibration_error: float
    confidence: float
    entropy: float
    mutual_information: float
    ambiguity: float
    ambiguity_geometric: float
    variance: float


class FunctionSpace(NamedTuple):
    """How well chains mix in function space: in the predicted probability of the label.

    Attributes:
        rhat: R-hat of split chains, shape (rows,); NaN for a row whose probability does not vary.
        ess: effective draws of all chains together, by batch means, of the same shape.
    """

    rhat: np.ndarray
    ess: np.ndarray


class PredictionStream:
    """Measures of an ensemble's predictions, computed from a stream of draws.

    A network's draws take gigabytes, and its predictions take megabytes. This object keeps a few
    arrays of the size of one prediction, whatever the number of draws. Pass `add` to
    `numpyro_geom.runs.run` as ``monitor``, or call it with each draw of the ensemble: for instance
    with the draws of several chains, or with the draws at the end of each cycle.

    Args:
        labels: classes 0, 1, ..., shape (rows,). None for rows without labels, such as images of
            another kind; `probabilities`, `entropy` and `mutual_information` need no labels.
        logits: whether `add` gets logits. Logits do not underflow where probabilities do.
        bins: number of bins of the calibration error.

    Raises:
        TypeError: for labels that are not integers.

    Examples:
        >>> import numpy as np
        >>> from numpyro_geom.diagnostics.predictive import PredictionStream
        >>> stream = PredictionStream(np.array([0, 1]))
        >>> stream.add(np.array([[[[0.9, 0.1], [0.6, 0.4]]]]))  # a draw of one chain
        >>> stream.add(np.array([[[[0.5, 0.5], [0.2, 0.8]]]]))
        >>> found = stream.classification()
        >>> found.accuracy, round(found.nll, 3)
        (1.0, 0.434)
    """

    def __init__(self, labels: Any = None, *, logits: bool = False, bins: int = 15) -> None:
        self._labels = None if labels is None else check_labels(labels).astype(np.int64)
        self._logits = check_flag("logits", logits)
        self._bins = check_int("bins", bins)
        self._draws = 0
        self._nll: list[np.ndarray] = []
        self._sums: tuple[np.ndarray, ...] = ()
        self._of_label = np.zeros(0)
        self._functions: BatchMeans | None = None

    @property
    def num_draws(self) -> int:
        """Number of draws added so far, over all chains."""
        return self._draws

    @property
    def probabilities(self) -> np.ndarray:
        """Class probabilities of the ensemble, shape (rows, classes)."""
        self._check_any()
        return self._sums[0] / self._draws

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
        return self.entropy - self._sums[3] / self._draws

    def add(self, predictions: Any) -> None:
        """Add draws.

        Args:
            predictions: probabilities (or logits) of shape (chains, draws, rows, classes), or
                (chains, draws, rows) for class 1 of two; or a dict with one such array, which
                `numpyro_geom.runs.run` passes to its ``monitor``. Every call must have the same
                chains.

        Raises:
            TypeError, ValueError: as `classification`.
        """
        x = read_array(predictions)
        if x.ndim not in (3, 4) or 0 in x.shape or (x.ndim == 4 and x.shape[3] < 2):
            raise ValueError(
                "predictions must have shape (chains, draws, rows, classes) with two classes or "
                "more, or (chains, draws, rows) for class 1 of two, got "
                f"{x.shape}: one draw of one chain is p[None, None]"
            )
        before = x.shape[0] if self._functions is None else self._functions.chains
        if x.shape[0] != before:
            raise ValueError(
                f"predictions must be of {before} chains as before, got {x.shape[0]}: pass "
                "a draw of each chain, or use another stream for other chains"
            )
        step = max(1, BLOCK_ENTRIES // max(1, x[:, 0].size))
        for first in range(0, x.shape[1], step):
            self._add(x[:, first : first + step])

    def classification(self) -> Classification:
        """All measures of the draws added so far.

        Raises:
            ValueError: if there are no draws or no labels, or if all draws give a label
                probability 0.
        """
        y = self._check_labelled()
        mean, mean_log, squares, _ = (x / self._draws for x in self._sums)
        log_mean = self._of_label - np.log(self._draws)
        impossible = np.flatnonzero(np.isneginf(log_mean))
        if impossible.size:
            raise ValueError(
                f"all draws give probability 0 to the label of {impossible.size} rows (the first "
                f"is {impossible[0]}), so the NLL is infinite: pass logits=True with the logits, "
                "which do not underflow, or bound the probabilities away from 0"
            )
        nll = -float(np.mean(log_mean))
        nll_draws = np.concatenate(self._nll, axis=1).ravel()
        rows, classes = mean.shape
        share = 0.5 if classes == 2 else 1.0
        truth = np.zeros_like(mean)
        truth[np.arange(rows), y] = 1.0
        accuracy = float(np.mean(mean.argmax(axis=1) == y))
        return Classification(
            accuracy=accuracy,
            error=1.0 - accuracy,
            nll=nll,
            nll_draws=nll_draws,
            brier=share * float(np.sum((mean - truth) ** 2, axis=1).mean()),
            calibration_error=calibration_error(mean, y, self._bins),
            confidence=float(mean.max(axis=1).mean()),
            entropy=float(self.entropy.mean()),
            mutual_information=float(self.mutual_information.mean()),
            ambiguity=float(nll_draws.mean()) - nll,
            ambiguity_geometric=-float(np.mean(logsumexp(mean_log, axis=-1))),
            variance=share * float(np.sum(squares - mean**2, axis=1).mean()),
        )

    def function_space(self) -> FunctionSpace:
        """R-hat and effective draws of the label's probability, for up to 1,000 rows.

        Raises:
            ValueError: if there are no labels, or if a chain has fewer than 16 draws.
        """
        self._check_labelled()
        assert self._functions is not None
        return FunctionSpace(*self._functions.rhat_and_ess())

    def _add(self, x: np.ndarray) -> None:
        chains, draws = x.shape[:2]
        predicted = normalised(x.reshape((chains * draws, *x.shape[2:])), self._logits)
        p, log_p = predicted
        rows, classes = p.shape[1:]
        if self._labels is not None:
            check_labels(self._labels, (rows, classes))
        with np.errstate(invalid="ignore"):
            new = p.sum(0), log_p.sum(0), (p**2).sum(0), entr(p).sum((0, 2))
            if not self._sums:
                self._sums = tuple(np.zeros_like(part) for part in new)
            if self._sums[0].shape != (rows, classes):
                raise ValueError(
                    f"predictions must be of shape {self._sums[0].shape} for each draw as before, "
                    f"got {(rows, classes)}"
                )
            self._sums = tuple(map(np.add, self._sums, new))
            if self._labels is not None:
                self._add_of_label(log_p, self._labels, chains)
        self._draws += chains * draws

    def _add_of_label(self, log_p: np.ndarray, y: np.ndarray, chains: int) -> None:
        """Update the sums that need labels y; ``log_p`` is (chains * draws, rows, classes)."""
        rows = len(y)
        of_label = np.take_along_axis(log_p, y[None, :, None], axis=2)[..., 0]
        some = evenly(rows, min(rows, FUNCTION_ROWS))
        if self._functions is None:
            self._of_label = np.full(rows, -np.inf)
            self._functions = BatchMeans(chains, len(some))
        self._of_label = np.logaddexp(self._of_label, logsumexp(of_label, axis=0))
        self._nll.append(-of_label.mean(axis=1).reshape(chains, -1))
        self._functions.add(np.exp(of_label[:, some]).reshape(chains, -1, len(some)))

    def _check_labelled(self) -> np.ndarray:
        self._check_any()
        if self._labels is None:
            raise ValueError("expected labels, and there are none: PredictionStream(labels)")
        return self._labels

    def _check_any(self) -> None:
        if not self._draws:
            raise ValueError("no draws have been added: call `add` with predictions first")


def calibration_error(mean: np.ndarray, y: np.ndarray, bins: int) -> float:
    """Expected calibration error: the gap of accuracy and confidence, by bin of confidence."""
    counts, sure, right = by_confidence(mean, y, bins)
    return float(np.abs(right - sure).sum() / counts.sum())
