"""Predictive measures of an ensemble of draws.

Measures of a classifier take class probabilities (or logits) of each draw, as an array or as a
variable of an ArviZ object. `PredictionStream` takes them one by one and keeps sums, not draws.
Sums are in float64. This module also exports `draw_distances` and `input_curvature`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.special import entr, logsumexp
from scipy.stats import norm

from .._checks import check_flag, check_int
from .._util import num_at_once
from .draws import as_array, evenly, group_of, real_numbers
from .monte_carlo import BatchMeans
from .network_measures import draw_distances, input_curvature

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


FUNCTION_ROWS = 1000
"""Number of rows, evenly spaced, for which R-hat and effective draws are computed."""
PREDICTION_GROUPS = ("posterior_predictive", "posterior")
"""Groups of an ArviZ object that are searched for the variable, in this order."""
SUM_TOLERANCE = 1e-3
"""Largest deviation of a sum of probabilities from 1. A float32 softmax over a thousand classes
deviates by about 1e-5."""


class Classification(NamedTuple):
    """Measures of an ensemble of M draws on N rows: means over rows, with natural logarithms.

    Attributes:
        accuracy: share of rows where the most probable class is right (the first one in a tie).
        error: 1 - accuracy.
        nll: negative log-likelihood of the ensemble, - log of the mean over draws of p(label).
        nll_draws: negative log-likelihood of each draw, shape (M,); infinite if a draw gives a
            label probability 0.
        brier: sum over classes of (mean p - one-hot label)^2. For two classes, half of it, so
            (p - y)^2, as in scikit-learn.
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
        self._labels = None if labels is None else _check_labels(labels).astype(np.int64)
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

    @property
    def by_confidence(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Number of rows, sum of confidences and number of right predictions, for each bin (l, r].

        The bins of confidence have equal width.
        """
        y, mean = self._check_labelled(), self.probabilities
        sure = mean.max(axis=1)
        number = np.digitize(sure, np.linspace(0, 1, self._bins + 1), right=True) - 1
        number = np.clip(number, 0, self._bins - 1)
        right = (mean.argmax(axis=1) == y).astype(float)
        counts, sums, hits = (
            np.bincount(number, w, self._bins) for w in (np.ones(len(y)), sure, right)
        )
        return counts, sums, hits

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: the gap of accuracy and confidence, by bin of confidence."""
        counts, sure, right = self.by_confidence
        return float(np.abs(right - sure).sum() / counts.sum())

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
        x = _array(predictions)
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
        step = num_at_once(x[:, 0].size)
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
            calibration_error=self.calibration_error,
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
        p, log_p = _normalised(x.reshape((chains * draws, *x.shape[2:])), self._logits)
        rows, classes = p.shape[1:]
        if self._labels is not None:
            _check_labels(self._labels, (rows, classes))
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
                of_label = np.take_along_axis(log_p, self._labels[None, :, None], axis=2)[..., 0]
                some = evenly(rows, FUNCTION_ROWS)
                if self._functions is None:
                    self._of_label = np.full(rows, -np.inf)
                    self._functions = BatchMeans(chains, len(some))
                self._of_label = np.logaddexp(self._of_label, logsumexp(of_label, axis=0))
                self._nll.append(-of_label.mean(axis=1).reshape(chains, -1))
                self._functions.add(np.exp(of_label[:, some]).reshape(chains, -1, len(some)))
        self._draws += chains * draws

    def _check_labelled(self) -> np.ndarray:
        self._check_any()
        if self._labels is None:
            raise ValueError("expected labels, and there are none: PredictionStream(labels)")
        return self._labels

    def _check_any(self) -> None:
        if not self._draws:
            raise ValueError("no draws have been added: call `add` with predictions first")


def classification(
    source: Any, labels: Any, *, var_name: str | None = None, logits: bool = False, bins: int = 15
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
    return stream_of(source, labels, var_name, logits, bins).classification()


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
    return stream_of(source, labels, var_name, logits, bins).calibration_error


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
    return stream_of(source, None, var_name, logits).probabilities.max(axis=1)


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
    return stream_of(source, None, var_name, logits).entropy


def stream_of(
    source: Any, labels: Any, var_name: str | None = None, logits: bool = False, bins: int = 15
) -> PredictionStream:
    """A `PredictionStream` of all draws of a source; arguments as in `classification`."""
    stream = PredictionStream(labels, logits=logits, bins=bins)
    what = "logits" if logits else "probabilities"
    x = real_numbers(what, _values(source, var_name), finite=False)
    if x.ndim not in (2, 3) or 0 in x.shape or (x.ndim == 3 and x.shape[2] < 2):
        raise ValueError(
            f"{what} must have shape (draws, rows, classes) with two classes or more, or (draws, "
            f"rows) for the {what} of class 1 of two, got {x.shape}: one prediction is p[None]"
        )
    stream.add(x[None])
    return stream


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
    positive, negative = _sorted_scores("inside", inside), _sorted_scores("outside", outside)
    below = np.searchsorted(negative, positive, side="left")
    not_above = np.searchsorted(negative, positive, side="right")
    auroc = float(np.mean(below + not_above)) / (2 * negative.size)

    def rejected(percent: int) -> float:
        accepted = -(-percent * positive.size // 100)  # rounded up, in integers
        threshold = positive[positive.size - accepted]
        return float(np.searchsorted(negative, threshold, side="left")) / negative.size

    return OutOfDistribution(auroc, rejected(95), rejected(99))


class Regression(NamedTuple):
    """Measures of an ensemble of M Gaussian predictions on N rows.

    Attributes:
        rmse: root mean square of y minus the mean over draws of the predicted means.
        nll: mean over rows of - log of the mixture's density, in nats per row. The mixture is
            (1/M) sum over draws of N(y; mean, sd^2).
        nll_draws: the same for each draw alone, shape (M,).
        ambiguity: mean of ``nll_draws`` minus ``nll``; never negative.
        variance: mean over rows of the variance of the predicted means over draws (divided
            by M), in squared units of y.
    """

    rmse: float
    nll: float
    nll_draws: np.ndarray
    ambiguity: float
    variance: float


def regression(means: Any, sds: Any, y: Any) -> Regression:
    """Root mean square error and negative log-likelihood of the Gaussian mixture of all draws.

    Args:
        means: predicted means, shape (draws, rows), in units of y.
        sds: predicted standard deviations in units of y: a number; shape (draws,) for one per
            draw; or shape (draws, rows).
        y: observed values, shape (rows,).

    Returns:
        A `Regression`.

    Raises:
        TypeError: for values that are not real numbers.
        ValueError: for shapes that do not fit, values that are not finite, or ``sds`` that are not
            positive.

    Examples:
        >>> from numpyro_geom.diagnostics.predictive import regression
        >>> found = regression([[0.0, 1.0], [2.0, 1.0]], 1.0, [1.0, 0.0])
        >>> round(found.rmse, 4), round(found.nll, 4), found.variance
        (0.7071, 1.4189, 0.5)
    """
    m, s, t = (real_numbers(*x) for x in (("means", means), ("sds", sds), ("y", y)))
    if m.ndim != 2 or m.size == 0 or t.shape != m.shape[1:]:
        raise ValueError(
            f"means must have shape (draws, rows) and y shape (rows,), got {m.shape} and {t.shape}"
        )
    if s.shape not in ((), m.shape[:1], m.shape):
        raise ValueError(
            f"sds must be a number, or have shape {m.shape[:1]} or {m.shape} as the means have, "
            f"got {s.shape}: for one sd per row pass np.broadcast_to(sds, {m.shape})"
        )
    if not (s > 0).all():
        raise ValueError(f"sds must be positive, got a smallest of {s.min():g}")
    s = s[:, None] if s.ndim == 1 else s
    log_p = norm.logpdf(t, m, s)
    nll = -float(np.mean(logsumexp(log_p, axis=0) - math.log(len(m))))
    nll_draws = -log_p.mean(axis=1)
    return Regression(
        rmse=float(np.sqrt(np.mean((t - m.mean(axis=0)) ** 2))),
        nll=nll,
        nll_draws=nll_draws,
        ambiguity=float(nll_draws.mean()) - nll,
        variance=float(m.var(axis=0).mean()),
    )


def _normalised(x: np.ndarray, logits: bool) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and their logarithms, from numbers (draws, rows, classes) or (draws, rows)."""
    what = "logits" if logits else "probabilities"
    bad = ~np.isfinite(x)
    if bad.any():
        raise ValueError(
            f"{what} must be finite, and {bad.sum()} of {x.size} are not (the first at "
            f"{tuple(int(k) for k in np.argwhere(bad)[0])})"
        )
    if logits:
        if x.ndim == 2:
            x = np.stack([np.zeros_like(x), x], axis=-1)
        x = x - logsumexp(x, axis=-1, keepdims=True)
        return np.exp(x), x
    if x.ndim == 2:
        if min(x.shape) > 1 and np.abs(x.sum(axis=1) - 1).max() < SUM_TOLERANCE:
            raise ValueError(
                f"probabilities of shape {x.shape} are read as (draws, rows) of class 1 of "
                "two, but each row sums to 1 and looks like (rows, classes): pass p[None]"
            )
        x = np.stack([1 - x, x], axis=-1)
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


def _array(predictions: Any) -> np.ndarray:
    """An array, or the only array of a dict."""
    if isinstance(predictions, Mapping):
        if len(predictions) != 1:
            raise ValueError(
                f"predictions must be one array, got a dict of {sorted(map(str, predictions))}: "
                "have the MCMC's postprocess_fn return the predictions alone"
            )
        (predictions,) = predictions.values()
    return real_numbers("predictions", predictions, finite=False)


def _check_labels(labels: Any, shape: tuple[int, int] | None = None) -> np.ndarray:
    """Class numbers, for predictions of shape (rows, classes)."""
    y = as_array("labels", labels)
    if y.dtype.kind not in "iub":
        raise TypeError(f"labels must be integers, the numbers of classes, got dtype {y.dtype}")
    if shape is None:
        return y
    rows, classes = shape
    if y.shape != (rows,):
        raise ValueError(f"labels must have shape ({rows},), one per row, got {y.shape}")
    if y.min() < 0 or y.max() >= classes:
        raise ValueError(
            f"labels must lie between 0 and {classes - 1}, got some from {y.min()} to {y.max()}"
        )
    return y


def _sorted_scores(name: str, value: Any) -> np.ndarray:
    """A sorted vector."""
    x = real_numbers(name, value, finite=False)
    if x.ndim != 1 or x.size == 0 or np.isnan(x).any():
        raise ValueError(
            f"{name} must be a vector of at least one score and without NaN, got shape {x.shape} "
            f"with {np.isnan(x).sum()} NaN"
        )
    return np.sort(x)


def _values(source: Any, var_name: str | None) -> np.ndarray:
    """The array itself, or a variable with its chains concatenated."""
    groups = [group for group in PREDICTION_GROUPS if hasattr(source, group)]
    if not groups:
        if var_name is not None:
            raise ValueError(
                f"var_name={var_name!r} is for ArviZ objects with one of "
                f"{list(PREDICTION_GROUPS)}, and the source is {type(source).__name__}: pass such "
                "an object, or an array alone"
            )
        return as_array("source", source)
    variables = {group: group_of(source, group) for group in groups}
    for arrays in variables.values():
        if var_name in arrays:
            x = arrays[var_name]
            return x.reshape((-1, *x.shape[2:]))
    known = {group: sorted(arrays) for group, arrays in variables.items()}
    raise ValueError(
        f"var_name must name a variable with class probabilities, got {var_name!r}: there are "
        f"{known}. A `numpyro.deterministic` site in the model stores them"
    )
