"""Predictive measures of a classifying ensemble: its draws are the members.

Everything here takes class probabilities (or logits) of each draw, as an array or as a variable of
an ArviZ object, and is accumulated in float64. `regression`, `draw_distances` and
`input_curvature` are in the same family and are exported from here too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import entr

from .._checks import check_int
from .network_curvature import input_curvature
from .prediction_stream import (
    Classification,
    FunctionSpace,
    PredictionStream,
    calibration_error,
)
from .predictive_input import class_labels, prediction, read_source, sorted_scores
from .regression_measures import Regression, regression
from .successive_draws import draw_distances

__all__ = [
    "Classification",
    "FunctionSpace",
    "OutOfDistribution",
    "PredictionStream",
    "Regression",
    "classification",
    "confidence",
    "draw_distances",
    "expected_calibration_error",
    "input_curvature",
    "out_of_distribution",
    "predictive_entropy",
    "regression",
]


def classification(
    source: Any,
    labels: Any,
    *,
    var_name: str | None = None,
    logits: bool = False,
    bins: int = 15,
) -> Classification:
    """All measures of predicted class probabilities against labels.

    Args:
        source: probabilities, shape (draws, rows, classes), or (draws, rows) for the probability
            of class 1 of two; or an ArviZ object, where chains are put one after the other. One
            prediction is an ensemble of one draw: ``p[None]``.
        labels: classes 0, 1, ..., shape (rows,).
        var_name: of an ArviZ object, the variable in ``posterior_predictive``, or ``posterior``.
        logits: whether ``source`` holds logits; they do not underflow where probabilities do.
        bins: of the calibration error.

    Returns:
        A `Classification`.

    Raises:
        TypeError: for labels that are not integers, or values that are not real numbers.
        ValueError: for shapes that do not fit, labels that are no class, probabilities that are
            negative, do not sum to 1 or are not finite; where all draws give a label probability 0
            (its NLL is infinite); and for a variable that is missing.

    Examples:
        >>> import numpy as np
        >>> from numpyro_geom.diagnostics.predictive import classification
        >>> draws = np.array([[[0.9, 0.1], [0.6, 0.4]], [[0.5, 0.5], [0.2, 0.8]]])
        >>> found = classification(draws, np.array([0, 1]))
        >>> found.accuracy, round(found.nll, 3), round(found.ambiguity, 3)
        (1.0, 0.434, 0.051)

    References:
        Kim et al., "Parameter Expanded SG-MCMC" (ICLR 2025), appendix B.1.
    """
    stream = PredictionStream(labels, logits=logits, bins=bins)
    stream.add(read_source(source, var_name, logits)[None])
    return stream.classification()


def expected_calibration_error(
    source: Any, labels: Any, *, var_name: str | None = None, logits: bool = False, bins: int = 15
) -> float:
    """Expected calibration error: the gap of accuracy and confidence, by bin of confidence.

    The sum over bins of (share of rows in it) |accuracy in it - mean confidence in it|, with
    ``bins`` equal-width bins (l, r] of the ensemble's largest probability; a probability of 0
    belongs to the first.

    Args:
        source: as in `classification`.
        labels: likewise.
        var_name: likewise.
        logits: likewise.
        bins: number of bins.

    Returns:
        A number from 0 to 1.

    Raises:
        TypeError, ValueError: as `classification`.

    Examples:
        >>> from numpyro_geom.diagnostics.predictive import expected_calibration_error
        >>> expected_calibration_error([[0.9, 0.9, 0.9, 0.9]], [1, 1, 1, 0])
        0.15

    References:
        Naeini, Cooper and Hauskrecht (AAAI 2015); Guo et al. (ICML 2017), Eq. 3.
    """
    bins = check_int("bins", bins)
    predicted = prediction(source, var_name, logits)
    return calibration_error(predicted.mean, class_labels(labels, predicted), bins)


def confidence(source: Any, *, var_name: str | None = None, logits: bool = False) -> np.ndarray:
    """Probability of the ensemble's most probable class, for each row: shape (rows,).

    Args:
        source: as in `classification`.
        var_name: likewise.
        logits: likewise.

    Raises:
        TypeError, ValueError: as `classification`.

    Examples:
        >>> from numpyro_geom.diagnostics.predictive import confidence
        >>> confidence([[[0.9, 0.1]], [[0.5, 0.5]]])
        array([0.7])
    """
    return prediction(source, var_name, logits).mean.max(axis=1)


def predictive_entropy(
    source: Any, *, var_name: str | None = None, logits: bool = False
) -> np.ndarray:
    """Entropy of the ensemble's prediction in nats, for each row: shape (rows,).

    Args:
        source: as in `classification`.
        var_name: likewise.
        logits: likewise.

    Raises:
        TypeError, ValueError: as `classification`.

    Examples:
        >>> from numpyro_geom.diagnostics.predictive import predictive_entropy
        >>> predictive_entropy([[0.5, 1.0]])
        array([0.69314718, 0.        ])
    """
    return _entropy(prediction(source, var_name, logits).mean)


class OutOfDistribution(NamedTuple):
    """How well a score tells rows in distribution (the positives) from others (the negatives).

    Attributes:
        auroc: probability that a row in distribution has the higher score, ties counted half.
        tnr95: share of the others that a threshold rejects which accepts 95% of the rows in
            distribution.
        tnr99: the same at 99%.
    """

    auroc: float
    tnr95: float
    tnr99: float


def out_of_distribution(inside: Any, outside: Any) -> OutOfDistribution:
    """AUROC, and true negative rate at true positive rates of 95% and 99%.

    Rows in distribution are the positives, and a row is accepted if its score is at or above the
    threshold. The threshold is the highest at which at least 95% (99%) of the positives are
    accepted, and the true negative rate is the share of ``outside`` strictly below it.

    Args:
        inside: scores of rows in distribution, shape (n,): higher for what is more in it, such as
            ``confidence(p)`` or ``-predictive_entropy(p)``.
        outside: scores of rows out of distribution, shape (m,).

    Returns:
        An `OutOfDistribution`.

    Raises:
        TypeError: for scores that are not real numbers.
        ValueError: for scores that are not vectors, empty, or NaN.

    Examples:
        >>> from numpyro_geom.diagnostics.predictive import out_of_distribution
        >>> out_of_distribution([0.9, 0.8, 0.7], [0.1, 0.7])
        OutOfDistribution(auroc=0.9166666666666666, tnr95=0.5, tnr99=0.5)

    References:
        Liang, Li and Srikant (ICLR 2018); Kim et al. (ICLR 2025), table 2 and appendix B.3.
    """
    positive, negative = sorted_scores("inside", inside), sorted_scores("outside", outside)
    below = np.searchsorted(negative, positive, side="left")
    not_above = np.searchsorted(negative, positive, side="right")
    auroc = float(np.mean(below + not_above)) / (2 * negative.size)

    def rejected(percent: int) -> float:
        accepted = -(-percent * positive.size // 100)  # rounded up, in integers
        threshold = positive[positive.size - accepted]
        return float(np.searchsorted(negative, threshold, side="left")) / negative.size

    return OutOfDistribution(auroc, rejected(95), rejected(99))


def _entropy(mean: np.ndarray) -> np.ndarray:
    return np.asarray(entr(mean).sum(axis=-1))
