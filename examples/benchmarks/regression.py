"""Bayesian logistic regression on large tables: the model, the rows, and the exact answer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np

COLUMNS = 20
PRIOR_SD = 100.0
CHUNK = 500_000
"""Rows that are in memory in float64 at once."""


logistic = partial(common.logistic, scale=PRIOR_SD)
"""Logistic regression with a wide prior."""


def rows(
    num_rows: int, smallest: float = 1e-3, folder: Path | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Columns with scales from ``smallest`` to 1, in directions that are not the parameters' axes.

    Args:
        num_rows: rows of the table.
        smallest: scale of the flattest direction. The posterior has about the condition number
            ``smallest ** -2``. With 1 the columns are independent.
        folder: where the table is written, as memory maps; None keeps it in memory.
    """
    rng = np.random.default_rng(0)
    scales = np.geomspace(1, smallest, COLUMNS)
    directions = np.linalg.qr(rng.normal(size=(COLUMNS, COLUMNS)))[0]
    w = directions.T @ (0.3 * rng.normal(size=COLUMNS) / np.sqrt(scales))
    X, y = (_empty(folder, *x) for x in (("X", (num_rows, COLUMNS), "f4"), ("y", num_rows, "i4")))
    for start in range(0, num_rows, CHUNK):
        part = slice(start, min(start + CHUNK, num_rows))
        x = (rng.normal(size=(part.stop - start, COLUMNS)) * scales) @ directions
        X[part], y[part] = x, rng.uniform(size=len(x)) < 1 / (1 + np.exp(-x @ w))
    return X, y


def laplace(X: Any, y: Any, prior_sd: float = PRIOR_SD) -> tuple[np.ndarray, np.ndarray]:
    """Mode and precision matrix, in float64, by Newton's method."""
    w = np.zeros(X.shape[1])
    for _ in range(30):
        gradient, precision = w / prior_sd**2, np.eye(w.size) / prior_sd**2
        for start in range(0, len(X), CHUNK):
            x, labels = (np.asarray(a[start : start + CHUNK], np.float64) for a in (X, y))
            p = 1 / (1 + np.exp(-x @ w))
            gradient = gradient + x.T @ (p - labels)
            precision = precision + (x * (p * (1 - p))[:, None]).T @ x
        step = np.linalg.solve(precision, gradient)
        w = w - step
        if gradient @ step < 1e-10:  # squared distance to the mode in posterior sds
            break
    return w, precision


def _empty(folder: Path | None, name: str, shape: Any, dtype: str) -> np.ndarray:
    if folder is None:
        return np.empty(shape, dtype)
    shape = tuple(np.atleast_1d(shape).tolist())
    return np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)
