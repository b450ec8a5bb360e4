"""Log evidence of logistic regressions: a guide's weights against long importance sampling.

    python examples/benchmarks/laplace_evidence.py --data-dir FOLDER

FOLDER has `logistic_NAME.npz` with the arrays X and y for the five sets of Yu et al. (2024), see
`examples/riemannian_laplace.py`. Columns are standardised, a column of ones is appended, and the
prior is N(0, 100) on each weight. The reference draws from a multivariate t distribution around the
mode, in float64, and shares nothing with the guide. It writes docs/tables/laplace_evidence.md.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
from common import TABLES, head, logistic, versions
from regression import laplace
from scipy import stats
from scipy.special import logsumexp

from numpyro_geom import RiemannianLaplace
from numpyro_geom.laplace import LaplaceDraws

SETS = ("ripley", "pima", "heart", "australian", "german")
PRIOR_SD = 10.0
DRAWS = 4_000
REFERENCE_DRAWS = 400_000
CHUNK = 20_000
"""Reference draws whose logits are in memory at once."""


def load(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Standardised columns with one of ones, and labels."""
    with np.load(folder / f"logistic_{name}.npz") as file:
        X, y = np.asarray(file["X"], float), np.asarray(file["y"], float)
    return np.column_stack([(X - X.mean(0)) / X.std(0), np.ones(len(X))]), y


def of_guide(X: np.ndarray, y: np.ndarray, metric: str) -> tuple[LaplaceDraws, float]:
    """Draws with weights, and seconds with compilation."""
    begin = time.perf_counter()
    guide = RiemannianLaplace(partial(logistic, scale=PRIOR_SD), metric)
    rows = X.astype(np.float32), y.astype(np.int32)
    params = guide.fit(jax.random.key(0), *rows)
    how = {"sample_shape": (DRAWS,), "log_weight": True, "progress_bar": False}
    draws = guide.draw(jax.random.key(1), params, **how)
    return draws, time.perf_counter() - begin


def reference(X: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Log evidence and its standard error, by draws of a t distribution with 5 degrees."""
    w, precision = laplace(X, y, PRIOR_SD)
    law = stats.multivariate_t(w, 1.1 * np.linalg.inv(precision), df=5)
    rng, logs = np.random.default_rng(2), []
    for _ in range(REFERENCE_DRAWS // CHUNK):
        draws = law.rvs(CHUNK, random_state=rng)
        logits = draws @ X.T
        joint = logits @ y - np.logaddexp(0, logits).sum(1)
        logs.append(joint + stats.norm(0, PRIOR_SD).logpdf(draws).sum(1) - law.logpdf(draws))
    logs = np.concatenate(logs)
    weights = np.exp(logs - logs.max())
    error = weights.std() / weights.mean() / len(logs) ** 0.5
    return float(logsumexp(logs) - np.log(len(logs))), float(error)


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    folder = parser.parse_args().data_dir
    titles = "data", "parameters", "metric", "log evidence", "reference", "Pareto k", "seconds"
    lines = head(*titles)
    for name in SETS:
        X, y = load(name, folder)
        exact, noise = reference(X, y)
        for metric in ("euclidean", "fisher"):
            draws, seconds = of_guide(X, y, metric)
            try:
                told = "{:.3f} +- {:.3f}".format(*draws.log_evidence())
            except ValueError:  # by the Pareto shape
                told = "refused"
            lines.append(
                f"| {name} | {X.shape[1]} | `{metric}` | {told} | {exact:.3f} +- {noise:.3f} | "
                f"{draws.pareto_k:.2f} | {seconds:.1f} |"
            )
            print(lines[-1], flush=True)
    (TABLES / "laplace_evidence.md").write_text("\n".join([*lines, "", versions(), ""]))


if __name__ == "__main__":
    main()
