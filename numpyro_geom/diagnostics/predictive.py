"""Predictive measures of a classifying ensemble, whose members are the draws.

Every function here takes class probabilities (or logits) of each draw, as an array or as a
variable of an ArviZ object. Sums are in float64. This module also exports `regression`,
`draw_distances` and `input_curvature`.
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
            of class 1 of two; or an ArviZ object, whose chains are concatenated. A single
            prediction is an ensemble of one draw: ``p[None]``.
        labels: classes 0, 1, ..., shape (rows,).
        var_name: the variable of an ArviZ object, in ``posterior_predictive`` or ``posterior``.
        logits: whether ``source`` holds logits. Logits do not underflow where probabilities do.
        bins: number of bins of the calibration error.

    Returns:
        A `Classification`.

    Raises:
        TypeError: for labels that are not integers, or values that are not real numbers.
        ValueError: for shapes that do not fit; for labels that are not a class; for probabilities
            that are negative, do not sum to 1 or are not finite; if all draws give a label
            probability 0 (the NLL is then infinite); for a missing variable.

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
    """Expected calibration error: the difference of accuracy and confidence, by bin of confidence.

    The sum over bins of (share of rows in the bin) |accuracy in the bin - mean confidence in the
    bin|. The ``bins`` bins (l, r] of the ensemble's largest probability have equal width. A
    probability of 0 belongs to the first bin.

    Args:
        source: as in `classification`.
        labels: as in `classification`.
        var_name: as in `classification`.
        logits: as in `classification`.
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
        var_name: as in `classification`.
        logits: as in `classification`.

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
        var_name: as in `classification`.
        logits: as in `classification`.

    Raises:
        TypeError, ValueError: as `classification`.

    Examples:
        >>> from numpyro_geom.diagnostics.predictive import predictive_entropy
        >>> predictive_entropy([[0.5, 1.0]])
        array([0.69314718, 0.        ])
    """
    return _entropy(prediction(source, var_name, logits).mean)


class OutOfDistribution(NamedTuple):
    """How well a score separates in-distribution rows (positives) from other rows (negatives).

    Attributes:
        auroc: probability that an in-distribution row has a higher score than another row; ties
            count half.
        tnr95: share of the other rows that are rejected at the threshold that accepts 95% of the
            in-distribution rows.
        tnr99: the same at 99%.
    """

    auroc: float
    tnr95: float
    tnr99: float


def out_of_distribution(inside: Any, outside: Any) -> OutOfDistribution:
    """AUROC, and true negative rate at true positive rates of 95% and 99%.

    In-distribution rows are the positives. A row is accepted if its score is at or above the
    threshold. The threshold is the highest score at which at least 95% (99%) of the positives are
    accepted. The true negative rate is the share of ``outside`` strictly below the threshold.

    Args:
        inside: scores of in-distribution rows, shape (n,). A higher score means more
            in-distribution; for instance ``confidence(p)`` or ``-predictive_entropy(p)``.
        outside: scores of out-of-distribution rows, shape (m,).

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
