"""Predictive measures of a regressing ensemble."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp
from scipy.stats import norm

from .arrays import real_numbers


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
