"""Checked inputs of the measures of a classifying ensemble: probabilities, labels and scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

from .._checks import check_flag
from .arrays import as_array, group_of, real_numbers

GROUPS = ("posterior_predictive", "posterior")
"""Groups of an ArviZ object that are searched for the variable, in this order."""
TOLERANCE = 1e-3
"""Largest deviation of a sum of probabilities from 1. A float32 softmax over a thousand classes
deviates by about 1e-5."""


class Prediction(NamedTuple):
    """Predictions of an ensemble, in float64."""

    p: np.ndarray  # probabilities of each draw, shape (draws, rows, classes), summing to 1
    log_p: np.ndarray  # their logarithms; computed from logits, they do not underflow

    @property
    def mean(self) -> np.ndarray:
        """Probabilities of the ensemble, shape (rows, classes)."""
        return self.p.mean(axis=0)


def prediction(source: Any, var_name: str | None, logits: bool) -> Prediction:
    """Check the source of a measure and read it."""
    return normalised(read_source(source, var_name, logits), logits)


def read_source(source: Any, var_name: str | None, logits: bool) -> np.ndarray:
    """The numbers of a source as they are, in a shape that predictions can have."""
    check_flag("logits", logits)
    what = "logits" if logits else "probabilities"
    x = real_numbers(what, _values(source, var_name), finite=False)
    if x.ndim not in (2, 3) or 0 in x.shape or (x.ndim == 3 and x.shape[2] < 2):
        raise ValueError(
            f"{what} must have shape (draws, rows, classes) with two classes or more, or (draws, "
            f"rows) for the {what} of class 1 of two, got {x.shape}: one prediction is p[None]"
        )
    return x


def normalised(x: np.ndarray, logits: bool) -> Prediction:
    """Probabilities from numbers of shape (draws, rows, classes) or (draws, rows)."""
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
        return Prediction(np.exp(x), x)
    if x.ndim == 2:
        if min(x.shape) > 1 and np.abs(x.sum(axis=1) - 1).max() < TOLERANCE:
            raise ValueError(
                f"probabilities of shape {x.shape} are read as (draws, rows), those of class 1 of "
                "two, but each row sums to 1 and looks like (rows, classes): pass p[None]"
            )
        x = np.stack([1 - x, x], axis=-1)
    total = x.sum(axis=-1)
    if x.min() < 0 or np.abs(total - 1).max() > TOLERANCE:
        raise ValueError(
            f"probabilities must not be negative and must sum to 1 over classes, got a smallest of "
            f"{x.min():.3g} and sums from {total.min():.6g} to {total.max():.6g}: for logits pass "
            "logits=True"
        )
    x = x / total[..., None]
    with np.errstate(divide="ignore"):
        return Prediction(x, np.log(x))


def read_array(predictions: Any) -> np.ndarray:
    """An array, or the only array of a dict."""
    if isinstance(predictions, Mapping):
        if len(predictions) != 1:
            raise ValueError(
                f"predictions must be one array, got a dict of {sorted(map(str, predictions))}: "
                "have the MCMC's postprocess_fn return the predictions alone"
            )
        (predictions,) = predictions.values()
    return real_numbers("predictions", predictions, finite=False)


def class_labels(labels: Any, predicted: Prediction) -> np.ndarray:
    """Class numbers, one for each predicted row."""
    return check_labels(labels, predicted.p.shape[1:])


def check_labels(labels: Any, shape: tuple[int, int] | None = None) -> np.ndarray:
    """Class numbers, for predictions of shape (rows, classes)."""
    y = as_array("labels", labels)
    if y.dtype.kind not in "iub":
        raise TypeError(f"labels must be integers, the numbers of classes, got dtype {y.dtype}")
    if shape is None:
        return y
    rows, classes = shape
    if y.shape != (rows,):
        raise ValueError(f"labels must have shape ({rows},), one per row, got {y.shape}")
    y = y.astype(np.int64)
    if y.min() < 0 or y.max() >= classes:
        raise ValueError(
            f"labels must lie between 0 and {classes - 1}, got some from {y.min()} to {y.max()}"
        )
    return y


def by_confidence(
    mean: np.ndarray, y: np.ndarray, bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number of rows, sum of confidences and number of right predictions, for each bin (l, r].

    The bins of confidence have equal width.
    """
    sure = mean.max(axis=1)
    number = np.digitize(sure, np.linspace(0, 1, bins + 1), right=True) - 1
    number = np.clip(number, 0, bins - 1)
    right = (mean.argmax(axis=1) == y).astype(float)
    return tuple(np.bincount(number, w, bins) for w in (np.ones(len(y)), sure, right))  # type: ignore[return-value]


def sorted_scores(name: str, value: Any) -> np.ndarray:
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
    groups = [group for group in GROUPS if hasattr(source, group)]
    if not groups:
        if var_name is not None:
            raise ValueError(
                f"var_name={var_name!r} is for ArviZ objects with one of {list(GROUPS)}, and the "
                f"source is {type(source).__name__}: pass such an object, or an array alone"
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
