"""How well draws predict: scores of classes, draw by draw, and rows that are left out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro.infer import MCMC
from scipy.special import entr, logsumexp

from .._checks import check_flag, check_int
from .._util import LANES, evenly, num_at_once
from ..laplace.draw import LaplaceDraws, normalized
from ..model.model import read
from .draws import (
    MAX_ENTRIES,
    as_array,
    check_run,
    draws_by_name,
    effective_size,
    entries,
    real_numbers,
)
from .inference_data import SAMPLE_DIMS, container
from .replay import latent_draws, model_of, pointwise_log_prob

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

    Attributes:
        num_draws: number of draws added so far, over all chains.

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
        self._labels: np.ndarray | None = None
        if labels is not None:
            y = as_array("labels", labels)
            if y.dtype.kind not in "iub":
                raise TypeError(f"labels must be integers, numbers of classes, got {y.dtype}")
            self._labels = y.astype(np.int64)
        self._logits = check_flag("logits", logits)
        self._shape: tuple[int, ...] = ()  # chains, rows, classes
        self.num_draws = 0
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
        if (y := self._labels) is not None and y.shape != (rows,):
            raise ValueError(f"labels must have shape ({rows},), one per row, got {y.shape}")
        if y is not None and (y.min() < 0 or y.max() >= classes):
            raise ValueError(
                f"labels must lie between 0 and {classes - 1}, got some from {y.min()} to {y.max()}"
            )
        p, log_p = _normalised(x, self._logits)
        self._shape = shape
        self.num_draws += chains * x.shape[1]
        self._sum = self._sum + p.sum((0, 1))
        self._entropies = self._entropies + entr(p).sum((0, 1, 3))
        if self._labels is not None:
            of_label = np.take_along_axis(log_p, self._labels[None, None, :, None], axis=3)[..., 0]
            self._log_sum = np.logaddexp(self._log_sum, logsumexp(of_label, axis=(0, 1)))
            some = of_label[..., evenly(rows, MIXING_ROWS)]
            self._of_label.append(np.exp(some).astype(np.float32))

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
        if not self.num_draws:
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


# --- leaving out rows


def loo(
    source: MCMC | LaplaceDraws, *, plate: str | None = None, num_rows: int = 1000, seed: int = 0
) -> Any:
    """Leave-one-out cross-validation of many rows, from some of them.

    ``az.loo`` smooths the importance weights of ``num_rows`` rows, drawn without replacement. Every
    row has an approximation, the log density at the posterior mean, and the drawn rows tell its
    error. Memory is that of the drawn rows' densities. With the drawn rows s, n of N::

        elpd = sum_i approx_i + (N / n) sum_s (loo_s - approx_s)

    Args:
        source: a `numpyro.infer.MCMC` that has run with a model, or a guide's `LaplaceDraws` with
            weights, by which they are resampled.
        plate: the plate whose rows are left out; None for the only one with observed sites. The
            density of a row is the product over these sites.
        num_rows: number of drawn rows, or all rows if there are fewer.
        seed: for the choice of rows. Models that are compared need the same choice.

    Returns:
        What ``az.loo(..., pointwise=True)`` returns, with the ``pareto_k`` of the drawn rows. The
        pointwise value of another row is its approximation plus the mean error, so that all values
        sum to elpd. The entry ``"subsampling_se"`` is the standard error from the choice of rows.
        ``se`` is that of all rows, as in ``az.loo``.

    Raises:
        ValueError: without a plate, for rows that cannot be drawn one by one or have no finite
            density at the posterior mean, and for draws without weights.

    References:
        Magnusson, Andersen, Jonasson and Vehtari, AISTATS 2020, Eq. 7 to 9.
    """
    import arviz as az
    import xarray as xr

    check_int("num_rows", num_rows, least=2)
    if isinstance(source, LaplaceDraws):
        samples, logs = source.resample(random.key(seed)), np.asarray(source.log_weight)
        shape = 1, logs.size
        posterior = {n: np.reshape(x, (*shape, *x.shape[logs.ndim :])) for n, x in samples.items()}
        efficiency = 1 / np.sum(normalized(logs) ** 2) / logs.size
    else:
        check_run(source)
        posterior = draws_by_name(source)
        values = entries(posterior, MAX_ENTRIES).values
        shape = values.shape[:2]
        efficiency = np.mean(effective_size(values, np.prod(shape))) / np.prod(shape)
    model: Any = model_of(source)
    sites = [] if model is None else [s for s in model.plan.sites if s.observed]
    plates = list(dict.fromkeys(p for s in sites for p, _ in s.plates))
    rows_of = plates[0] if plate is None and len(plates) == 1 else plate
    if rows_of is None or rows_of not in plates:
        raise ValueError(
            f"loo leaves out rows of a plate with observed sites: expected one of {plates} as "
            f"plate, got {plate!r}. Without a plate use az.loo"
        )
    size = model.plan.sizes[rows_of]
    if num_rows < size:  # checks that rows can be drawn
        plan = read(model.runnable, model.args, model.kwargs, batch_size={rows_of: num_rows}).plan
        model = model.replace(plan=plan)
    axes = {s.name: dict(s.plates)[rows_of] for s in sites if rows_of in dict(s.plates)}
    chosen = np.random.default_rng(seed).choice(size, min(num_rows, size), replace=False)
    rows = jnp.asarray(np.sort(chosen))
    draws = latent_draws(model, posterior)

    def by_row(found: dict) -> Any:  # draws, or blocks of rows, are the first axis
        flat = (jnp.moveaxis(x, axes[name], 1) for name, x in found.items())
        return sum(x.reshape(*x.shape[:2], -1).sum(2) for x in flat)

    @jax.jit
    def approximate(arrays: list, mean: dict, blocks: jax.Array) -> dict:
        known = model.with_arrays(arrays)
        return lax.map(lambda index: known.log_prob(mean, {rows_of: index}, [*axes]), blocks)

    some = by_row(pointwise_log_prob(model, draws, [*axes], {rows_of: rows}))
    mean = {name: x.mean(0, dtype=float).astype(x.dtype) for name, x in draws.items()}
    length = min(size, num_at_once(32 * LANES))
    blocks = np.minimum(np.arange(-(-size // length) * length), size - 1).reshape(-1, length)
    approx = np.asarray(by_row(approximate(model.arrays, mean, blocks)), float).ravel()[:size]
    if not np.isfinite(approx).all():
        raise ValueError("a row has no finite log density at the posterior mean: use az.loo")
    known = (*SAMPLE_DIMS, "rows"), np.asarray(some).reshape(*shape, -1)  # ArviZ keeps the dtype
    with az.rc_context({"stats.ic_scale": "log"}):  # type: ignore[attr-defined]
        data = container({"log_likelihood": xr.Dataset({"row": known})})
        found = az.loo(data, pointwise=True, reff=efficiency)
    old = hasattr(found, "loo_i")  # ArviZ 0.2x
    total, effective, pointwise = ("elpd_loo", "p_loo", "loo_i") if old else ("elpd", "p", "elpd_i")
    exact = np.asarray(found[pointwise].values, float)
    error = exact - approx[rows]
    every = approx + error.mean()
    every[rows] = exact
    elpd, of_choice = every.sum(), size * (size / len(rows) - 1) * error.var(ddof=1)
    squares = np.sum(approx**2) + size * np.mean(exact**2 - approx[rows] ** 2)
    found[total], found["se"] = elpd, (squares - (elpd**2 - of_choice) / size) ** 0.5
    found[effective] *= size / len(rows)
    found["n_data_points"], found["subsampling_se"] = size, of_choice**0.5
    found[pointwise] = xr.DataArray(every, dims="rows")
    return found
