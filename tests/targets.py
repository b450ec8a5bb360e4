"""Targets with known moments, small models that several tests share, and functions to run chains.

Models are at module level, so that kernels on them can be pickled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import MCMC

import numpyro_geom
from numpyro_geom import SGKernel, baselines
from numpyro_geom._numpyro import fields_of, holding
from numpyro_geom.kernel import SGState

PyTree = Any

# --- models


def regression_data(num_rows: int, num_columns: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Standard normal columns, and responses with coefficients from -1 to 1 and noise sd 0.5."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_rows, num_columns))
    y = X @ np.linspace(-1, 1, num_columns) + 0.5 * rng.normal(size=num_rows)
    return jnp.asarray(X), jnp.asarray(y)


def linear(X: jax.Array, y: jax.Array) -> None:
    """Linear regression with known noise: a Gaussian posterior, see :func:`linear_moments`."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 0.5), obs=y[i])


def linear_moments(X: jax.Array, y: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Posterior mean and covariance of ``w`` in :func:`linear`."""
    X, y = np.asarray(X, np.float64), np.asarray(y, np.float64)
    covariance = np.linalg.inv(np.eye(X.shape[1]) + X.T @ X / 0.25)
    return covariance @ X.T @ y / 0.25, covariance


def regression(X: jax.Array, y: jax.Array | None = None) -> None:
    """Linear regression with unknown noise: a vector site and a positive one."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, s), obs=None if y is None else y[i])


def replayed(X: jax.Array, y: jax.Array) -> None:
    """Like :func:`regression`, with deterministic sites outside and inside the plate."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    numpyro.deterministic("norm", jnp.sqrt(w @ w))
    with numpyro.plate("data", X.shape[0]) as i:
        fitted = numpyro.deterministic("fitted", X[i] @ w)
        numpyro.sample("y", dist.Normal(fitted, s), obs=y[i])


def logistic(X: jax.Array, y: jax.Array | None = None) -> None:
    """Logistic regression; without labels, the labels are latent and discrete."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=None if y is None else y[i])


def normal_mean(y: jax.Array) -> None:
    """One normal mean with known noise: the smallest model with rows."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def local_latents(y: jax.Array) -> None:
    """A latent for each row: z_n ~ N(mu, 1), y_n ~ N(z_n, 1), mu ~ N(0, 2^2)."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("data", y.shape[0]) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])


def half_square(z: PyTree) -> jax.Array:
    """The energy of a standard normal, for any pytree."""
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(z)) / 2


# --- exact distributions


class RowQuadratics(NamedTuple):
    """An energy theta' H theta / 2 - r' theta that is a prior plus a sum over rows.

    Attributes:
        prior: (H, r) of the part without rows, shapes (D, D) and (D,).
        rows: (H, r) of each row, shapes (N, D, D) and (N, D).
    """

    prior: tuple[np.ndarray, np.ndarray]
    rows: tuple[np.ndarray, np.ndarray]

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of exp(-energy)."""
        covariance = np.linalg.inv(self.prior[0] + self.rows[0].sum(axis=0))
        return covariance @ (self.prior[1] + self.rows[1].sum(axis=0)), covariance


def linear_quadratics(X: jax.Array, y: jax.Array) -> RowQuadratics:
    """The energy of :func:`linear`."""
    X, y = np.asarray(X, np.float64), np.asarray(y, np.float64)
    dim = X.shape[1]
    rows = np.einsum("ni,nj->nij", X, X) / 0.25, X * y[:, None] / 0.25
    return RowQuadratics((np.eye(dim), np.zeros(dim)), rows)


def local_quadratics(y: jax.Array) -> RowQuadratics:
    """The energy of :func:`local_latents`, position (mu, z_1, ..., z_N)."""
    y = np.asarray(y, np.float64)
    num = y.size
    hessians, slopes = np.zeros((num, num + 1, num + 1)), np.zeros((num, num + 1))
    for n in range(num):
        hessians[n, 0, 0] = 1
        hessians[n, 0, n + 1] = hessians[n, n + 1, 0] = -1
        hessians[n, n + 1, n + 1] = 2
        slopes[n, n + 1] = y[n]
    prior = np.zeros((num + 1, num + 1))
    prior[0, 0] = 1 / 4
    return RowQuadratics((prior, np.zeros(num + 1)), (hessians, slopes))


def all_batches(num_rows: int, batch_size: int) -> np.ndarray:
    """Every batch of a draw with replacement, all equally likely: (N^B, B) row indices."""
    return np.array(list(itertools.product(range(num_rows), repeat=batch_size)))


def langevin_law(
    energy: RowQuadratics, batch_size: int, step_size: float, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Stationary mean and covariance of Langevin steps with minibatches drawn with replacement.

    With J_b = I - h H_b over the equally likely batches b, at any h for which they exist::

        mean = (E H_b)^-1 E r_b
        S = E[J_b S J_b'] + h^2 Cov(H_b mean - r_b) + tau (2 h I - h^2 E H_b)

    The last term is of averaged noise: its vector is also in the position, and J_b moves it.
    """
    num_rows, dim = energy.rows[1].shape
    batches = all_batches(num_rows, batch_size)
    factor = num_rows / batch_size
    hessians = energy.prior[0] + factor * energy.rows[0][batches].sum(axis=1)
    slopes = energy.prior[1] + factor * energy.rows[1][batches].sum(axis=1)
    mean, _ = energy.moments()
    gradients = hessians @ mean - slopes
    source = step_size**2 * gradients.T @ gradients / len(batches)
    averaged = 2 * np.eye(dim) - step_size * hessians.mean(0)
    source += step_size * temperature * averaged
    jacobians = np.eye(dim) - step_size * hessians
    transfer = np.einsum("bij,bkl->ikjl", jacobians, jacobians) / len(batches)
    transfer = transfer.reshape(dim**2, dim**2)
    covariance = np.linalg.solve(np.eye(dim**2) - transfer, source.ravel())
    return mean, covariance.reshape(dim, dim)


# --- chains


def vectorized(kernel: Any, num_warmup: int, num_samples: int, num_chains: int) -> MCMC:
    """An MCMC of chains in one program, which has not run."""
    lengths = {"num_warmup": num_warmup, "num_samples": num_samples, "num_chains": num_chains}
    return MCMC(kernel, **lengths, chain_method="vectorized", progress_bar=False)


def run(
    kernel: Any,
    *args: Any,
    num_warmup: int = 0,
    num_samples: int = 4,
    seed: int = 0,
    **settings: Any,
) -> MCMC:
    """A finished run of NumPyro's own ``MCMC``, without a progress bar.

    Args:
        kernel: of this package or of NumPyro.
        args: the model's arguments.
        num_warmup: as in ``MCMC``.
        num_samples: as in ``MCMC``.
        seed: of the key.
        settings: ``init_params`` and ``extra_fields`` go to ``MCMC.run``, others to ``MCMC``.
    """
    of_run = {k: settings.pop(k) for k in ("init_params", "extra_fields") if k in settings}
    settings = {"progress_bar": False, **settings}
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **settings)
    mcmc.run(random.key(seed), *args, **of_run)
    return mcmc


def assert_trees_equal(left: PyTree, right: PyTree) -> None:
    """The same structure and the same bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = random.key_data(a), random.key_data(b)
        np.testing.assert_array_equal(a, b)


def spread(state: SGState, num_chains: int, seed: int = 0) -> SGState:
    """Many chains from the state of one, each with its own keys."""
    keys = random.split(random.key(seed), num_chains)
    return jax.vmap(lambda key: state._replace(rng_key=key))(keys)


def last_draws(
    kernel: SGKernel,
    args: tuple,
    *,
    num_chains: int,
    seed: int = 0,
    init_params: PyTree = None,
    kwargs: dict[str, Any] | None = None,
) -> tuple[SGState, PyTree]:
    """Independent chains after one draw each: ``num_steps`` steps from a common start.

    The kernel should take enough steps per draw to forget the start. Then the positions are
    independent, and the errors of their moments are known.

    Returns:
        The states, and the constrained draws: leaves of shape (chains, ...).
    """
    kwargs = {} if kwargs is None else kwargs

    @jax.jit  # with the start: one program compiles faster than NumPyro's many small operations
    def run(rng_key: jax.Array) -> tuple[SGState, PyTree]:
        state = kernel.init(rng_key, 0, init_params, args, kwargs)
        state = jax.vmap(lambda s: kernel.sample(s, args, kwargs))(spread(state, num_chains, seed))
        return state, jax.vmap(kernel.postprocess_fn(args, kwargs))(state.z)

    return run(random.key(seed))


def columns(values: dict[str, Any], names: tuple[str, ...]) -> np.ndarray:
    """Draws of several sites side by side: (n, D) in double precision."""
    arrays = [np.asarray(values[name], np.float64) for name in names]
    return np.concatenate([x.reshape(len(x), -1) for x in arrays], axis=1)


def mean_scores(draws: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Deviations of the means of independent draws (n, D) in Monte Carlo standard errors."""
    return (draws.mean(0) - mean) / (draws.std(0, ddof=1) / np.sqrt(len(draws)))


def covariance_scores(draws: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """The same for every entry of the covariance about the exact mean: (D, D)."""
    centred = draws - mean
    products = np.einsum("ni,nj->nij", centred, centred)
    return (products.mean(0) - covariance) / (products.std(0, ddof=1) / np.sqrt(len(draws)))


SIGMAS = 5.5
"""Threshold on scores; a score exceeds it by chance with probability 4e-8."""


def assert_moments(draws: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    """Independent draws have this mean and covariance, up to Monte Carlo error."""
    scores = mean_scores(draws, mean)
    assert np.abs(scores).max() < SIGMAS, f"means off: {draws.mean(0)}, {mean}, scores {scores}"
    scores = covariance_scores(draws, mean, covariance)
    assert np.abs(scores).max() < SIGMAS, f"covariance off: {np.cov(draws.T)}, {covariance}"


# --- compilations

_compilations = 0


KERNELS = [
    kernel
    for kernel in (*vars(numpyro_geom).values(), *vars(baselines).values())
    if isinstance(kernel, type) and issubclass(kernel, SGKernel) and kernel is not SGKernel
]
"""Every public kernel."""


def _listen(event: str, _: float, **__: Any) -> None:
    global _compilations
    _compilations += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextmanager
def count_compilations() -> Iterator[Callable[[], int]]:
    """Programs compiled so far within the block, as a function without arguments."""
    before = _compilations
    yield lambda: _compilations - before


def as_if_run(
    mcmc: MCMC,
    draws: Any,
    *args: Any,
    fields: Mapping[str, Any] | None = None,
    last_state: Any = None,
    **kwargs: Any,
) -> MCMC:
    """A copy of an MCMC as after ``run``, with draws that were made elsewhere.

    ``draws`` are the values of its ``sample_field``, and ``fields`` are the other fields of the
    state. All are shaped (chains, draws, ...). ``args`` and ``kwargs`` are the model's arguments.
    """
    states = {fields_of(mcmc, ())[0][0]: draws, **({} if fields is None else fields)}
    return holding(mcmc, (args, kwargs), states, last_state)
