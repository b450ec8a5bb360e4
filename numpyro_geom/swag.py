"""SWAG: a Gaussian fitted to the path of constant-rate stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform

from ._checks import check_int, check_number
from .algorithms.sgrld import SGRLD
from .baselines.vsgd import optimal_rate
from .bound import on_device
from .kernel import SGKernel
from .target.potential import Potential
from .warmup.lanczos import extreme_eigenvalues

PyTree = Any

NUM_SNAPSHOTS = 100
"""Snapshots that are taken under ``collect_every=None``."""
BURN_IN = 0.2
"""Share of the steps at the constant rate that pass before the first snapshot."""
RATE_BATCHES = 8
"""Minibatches whose curvature bounds the learning rate."""
NOISE_BATCHES = 64
"""Minibatches from which the noise of the gradient is measured."""
LARGEST_DRIFT = 0.5
"""Bound on the rate times the curvature of a minibatch."""
LANCZOS_STEPS = 20
DRAWS_AT_ONCE = 32


class SWAGParams(NamedTuple):
    """The fitted Gaussian, on the flattened unconstrained space of dimension D.

    Attributes:
        mean: mean of the snapshots, shape (D,).
        variance: their second central moment, entry by entry, shape (D,).
        deviations: of the last ``rank`` snapshots the difference from the mean of all snapshots
            until then, oldest first, shape (rank, D).
        learning_rate: the constant rate l of theta' = theta - l grad Uhat / N, a scalar.
    """

    mean: jax.Array
    variance: jax.Array
    deviations: jax.Array
    learning_rate: jax.Array


class _Fitted(NamedTuple):
    """What a guide remembers of the model arguments that it has seen."""

    unravel: Callable[[jax.Array], PyTree]
    args: tuple
    kwargs: dict


class Moments(NamedTuple):
    """Running moments of a sequence of vectors.

    Attributes:
        mean: shape (D,).
        sum_squares: sum of squared differences from the mean, shape (D,).
        deviations: the last ones, in a ring, shape (rank, D).
        num_values: how many vectors there were.
    """

    mean: jax.Array
    sum_squares: jax.Array
    deviations: jax.Array
    num_values: jax.Array


class SWAG:
    """A NumPyro-style guide: Gaussian with the moments of an SGD path. Approximate.

    Adam finds a mode, its rate falling to zero along a cosine. From there constant-rate descent
    runs on::

        theta' = theta - l grad Uhat(theta) / N

    Of snapshots theta_k on the way, with their mean m, their variances v (entry by entry) and the
    deviations d_k = theta_k - m_k of the last K = ``rank`` ones from the mean m_k until then, a
    draw is, with standard normal z1 and z2::

        theta = m + sqrt(v / 2) z1 + sum_k d_k z2_k / sqrt(2 (K - 1))

    Distribution: a Gaussian on the unconstrained space that describes where SGD went. It is not
    the posterior, and no setting makes it so: its width is proportional to the learning rate and
    its shape is that of the gradient noise, see `numpyro_geom.VSGD`.

    ``learning_rate="auto"`` takes the rate l = h N for which the stationary law of SGD comes
    closest to the posterior in Kullback-Leibler divergence, unless that is unstable::

        h = min(2 D / tr C, 1 / (2 lam))

    C is the covariance of grad Uhat at the mode and lam the largest eigenvalue of the Hessians of
    8 minibatches there: in a valley a step takes no coordinate further than half way down.

    Choose it for networks, as a cheap baseline on top of a mode search that is needed anyway. Cost:
    ``mode_steps + num_steps`` minibatch gradients, memory of ``rank + 4`` copies of the parameters.

    Args:
        model: a NumPyro model with continuous latent sites and a plate over its rows. Its `param`
            sites keep the values they start with.
        batch_size: rows a step, an int, or a dict plate -> int; fewer than there are.
        rank: deviations K that are kept, at least 2.
        learning_rate: ``"auto"`` or the constant rate l, per row: l / N multiplies grad Uhat.
        num_steps: steps at the constant rate; the first fifth pass before the first snapshot.
        collect_every: steps between snapshots; None for as many as make 100 snapshots.
        mode_steps: Adam steps before.
        mode_learning_rate: Adam's first learning rate, in units of the unconstrained position.
        batching: ``"replacement"`` or ``"epoch"``.
        init_strategy: NumPyro's, where Adam starts.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range; from `fit` for a model that has no minibatches.
        FloatingPointError: from `fit`, where training leaves the finite numbers.
        RuntimeError: from `sample_posterior`, before `fit` and without model arguments.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import Predictive
        >>> from numpyro_geom import SWAG
        >>> def model(X, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with numpyro.plate("data", X.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=None if y is None else y[i])
        >>> X = jax.random.normal(jax.random.key(0), (500, 2))
        >>> y = X @ jnp.array([1.0, -1.0])
        >>> guide = SWAG(model, batch_size=50, num_steps=1000, mode_steps=1000)
        >>> params = guide.fit(jax.random.key(1), X, y)
        >>> draws = guide.sample_posterior(jax.random.key(2), params, sample_shape=(100,))
        >>> draws["w"].shape
        (100, 2)
        >>> Predictive(model, draws)(jax.random.key(3), X[:10])["y"].shape
        (100, 10)

    References:
        Maddox, Garipov, Izmailov, Vetrov and Wilson, "A Simple Baseline for Bayesian Uncertainty
        in Deep Learning", NeurIPS 2019, Algorithm 1 and Eq. 1. Deviations: the mode is found by
        Adam; the learning rate has an automatic choice, after Mandt, Hoffman and Blei (JMLR 2017);
        snapshots come every ``collect_every`` steps in place of once an epoch, the first ones
        after a fifth of the run; v is a running central moment, because the difference of two raw
        moments cancels in float32.
    """

    def __init__(
        self,
        model: Callable,
        *,
        batch_size: int | Mapping[str, int] | None = None,
        rank: int = 20,
        learning_rate: float | str = "auto",
        num_steps: int = 10_000,
        collect_every: int | None = None,
        mode_steps: int = 5_000,
        mode_learning_rate: float = 0.01,
        batching: str = "replacement",
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        if isinstance(learning_rate, str) and learning_rate != "auto":
            raise ValueError(
                f"learning_rate must be 'auto' or a positive number, got {learning_rate!r}"
            )
        self._learning_rate = (
            None
            if isinstance(learning_rate, str)
            else check_number("learning_rate", learning_rate, above=0.0)
        )
        self._rank = check_int("rank", rank, least=2)
        self._mode_steps = check_int("mode_steps", mode_steps)
        self._mode_learning_rate = check_number("mode_learning_rate", mode_learning_rate, above=0.0)
        num_steps = check_int("num_steps", num_steps)
        self._burn_in = int(BURN_IN * num_steps)
        kept = num_steps - self._burn_in
        if collect_every is None:
            collect_every = max(1, kept // max(NUM_SNAPSHOTS, self._rank))
        self._collect_every = check_int("collect_every", collect_every)
        self._num_snapshots = kept // self._collect_every
        if self._num_snapshots < self._rank:
            raise ValueError(
                f"expected at least rank={self._rank} snapshots, got {self._num_snapshots} from "
                f"{kept} steps after the first fifth of num_steps={num_steps}, one every "
                f"{self._collect_every}: raise num_steps, or lower collect_every or rank"
            )
        # what a kernel knows about models: plates, where to start, the way back to the supports
        self._kernel: SGKernel = SGRLD(
            model, batch_size=batch_size, batching=batching, init_strategy=init_strategy
        )
        self.model = model
        self._fitted: _Fitted | None = None

    def fit(self, rng_key: jax.Array, *args: Any, **kwargs: Any) -> SWAGParams:
        """Find a mode, run constant-rate descent from it, and return what it went through.

        Args:
            rng_key: for the start and the rows.
            args: the model's arguments.
            kwargs: the model's keyword arguments.
        """
        args, kwargs = on_device(args, kwargs)
        key_start, key_train = random.split(rng_key)
        start, fitted = self._prepare(key_start, args, kwargs)
        if self._kernel.potential(args, kwargs).deterministic:
            raise ValueError(
                "SWAG describes the noise of minibatch gradients, and these have none: expected a "
                "batch_size below the number of rows, got all rows at every step"
            )
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = [x for x in leaves if isinstance(x, jax.Array)]

        @jax.jit
        def train(arrays: list, start: jax.Array, rng_key: jax.Array) -> tuple:
            # traced: as constants, large arrays would take long to compile
            given = iter(arrays)
            rebuilt = [next(given) if isinstance(x, jax.Array) else x for x in leaves]
            args, kwargs = jax.tree.unflatten(treedef, rebuilt)
            potential = self._kernel.potential(args, kwargs)
            return self._train(potential, fitted.unravel, start, rng_key)

        mode, params, energies = train(arrays, start, key_train)
        _check_finite(mode, params, energies)
        self._fitted = fitted
        return params

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: SWAGParams,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Draw site values, deterministic sites included.

        Args:
            rng_key: of the draws.
            params: from `fit`.
            args: the model's arguments; those of `fit` unless any are given.
            sample_shape: leading dimensions of every site's value.
            kwargs: the model's keyword arguments, likewise.

        Returns:
            Site name -> values in the site's support, ``sample_shape`` first.
        """
        shape = tuple(check_int("sample_shape", n, least=0) for n in _as_tuple(sample_shape))
        constrain = self._constrain_fn(args, kwargs)
        flat = draw(rng_key, params, shape)
        if not shape:
            return constrain(flat)
        flat = flat.reshape(-1, flat.shape[-1])
        values = lax.map(constrain, flat, batch_size=DRAWS_AT_ONCE)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), values)

    def median(self, params: SWAGParams, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Site values at the mean of the Gaussian: medians where the transform is entry by entry.

        Args:
            params: from `fit`.
            args: the model's arguments; those of `fit` unless any are given.
            kwargs: the model's keyword arguments, likewise.
        """
        return self._constrain_fn(args, kwargs)(params.mean)

    def _prepare(self, rng_key: jax.Array, args: tuple, kwargs: dict) -> tuple[jax.Array, _Fitted]:
        """Read the model; the flat position at which training starts, and the way back."""
        position = self._kernel.bind(rng_key, 0, None, args, kwargs)
        start, unravel = ravel_pytree(position)
        return start, _Fitted(unravel, args, kwargs)

    def _constrain_fn(self, args: tuple, kwargs: dict) -> Callable[[jax.Array], dict]:
        """From a flat position to site values."""
        args, kwargs = on_device(args, kwargs)
        given = bool(args or kwargs)
        if self._fitted is None:
            if not given:
                raise RuntimeError(
                    "expected `fit` first, or the model's arguments: call "
                    "`params = guide.fit(rng_key, *args)`, or pass `*args` with saved params"
                )
            _, self._fitted = self._prepare(random.key(0), args, kwargs)
        fitted = self._fitted
        if not given:
            args, kwargs = fitted.args, fitted.kwargs
        constrain = self._kernel.get_constrain_fn(args, kwargs)
        return lambda flat: constrain(fitted.unravel(flat))

    def _train(
        self, potential: Potential, unravel: Callable, start: jax.Array, rng_key: jax.Array
    ) -> tuple[jax.Array, SWAGParams, jax.Array]:
        """The mode that Adam ends in, the parameters, and the energies at both ends of descent."""
        key_stream, key_mode, key_rate, key_descent, key_rows = random.split(rng_key, 5)
        num_data = potential.num_data

        def energy(flat: jax.Array, batch: Any) -> jax.Array:
            return potential.energy(unravel(flat), batch)

        def descend(direction: Callable, carry: tuple, num_steps: int) -> tuple:
            def step(_: int, carry: tuple) -> tuple:
                flat, state, stream, key = carry
                key, key_batch = random.split(key)
                batch, stream = potential.draw(key_batch, stream)
                update, state = direction(jax.grad(energy)(flat, batch) / num_data, state)
                return (flat + update).astype(flat.dtype), state, stream, key

            return lax.fori_loop(0, num_steps, step, carry)

        adam = optax.adam(
            optax.cosine_decay_schedule(self._mode_learning_rate, max(1, self._mode_steps))
        )
        carry = (start, adam.init(start), potential.init_stream(key_stream), key_mode)
        mode, _, stream, _ = descend(adam.update, carry, self._mode_steps)
        if self._learning_rate is None:
            rate = num_data * stable_rate(energy, potential, mode, key_rate)
        else:
            rate = jnp.asarray(self._learning_rate, mode.dtype)

        def sgd(grad: jax.Array, state: tuple) -> tuple[jax.Array, tuple]:
            return -rate * grad, state

        def snapshot(carry: tuple, _: None) -> tuple[tuple, None]:
            walker, moments = carry
            walker = descend(sgd, walker, self._collect_every)
            return (walker, update_moments(moments, walker[0])), None

        walker = descend(sgd, (mode, (), stream, key_descent), self._burn_in)
        begin = (walker, init_moments(mode, self._rank))
        (walker, moments), _ = lax.scan(snapshot, begin, None, self._num_snapshots)
        rows = potential.curvature_batch(key_rows)
        energies = jnp.stack([energy(mode, rows), energy(walker[0], rows)])
        params = SWAGParams(
            mean=moments.mean,
            variance=moments.sum_squares / self._num_snapshots,
            deviations=jnp.roll(moments.deviations, -(self._num_snapshots % self._rank), axis=0),
            learning_rate=rate,
        )
        return mode, params, energies


def draw(rng_key: jax.Array, params: SWAGParams, sample_shape: tuple[int, ...] = ()) -> jax.Array:
    """Flat unconstrained positions from the Gaussian of `SWAG`, shape (*sample_shape, D)."""
    key_diagonal, key_deviations = random.split(rng_key)
    rank, size = params.deviations.shape
    dtype = params.mean.dtype
    z1 = random.normal(key_diagonal, (*sample_shape, size), dtype)
    z2 = random.normal(key_deviations, (*sample_shape, rank), dtype)
    low_rank = jnp.matmul(z2, params.deviations, precision=lax.Precision.HIGHEST)
    scale = jnp.sqrt(params.variance / 2)
    return params.mean + scale * z1 + low_rank / (2 * (rank - 1)) ** 0.5


def init_moments(like: jax.Array, rank: int) -> Moments:
    """Moments of nothing, for vectors like ``like``."""
    zeros = jnp.zeros_like(like)
    return Moments(zeros, zeros, jnp.zeros((rank, like.size), like.dtype), jnp.zeros((), jnp.int32))


def update_moments(moments: Moments, value: jax.Array) -> Moments:
    """Moments with one vector more, by Welford's recursion."""
    num_values = moments.num_values + 1
    before = value - moments.mean
    mean = moments.mean + before / num_values.astype(value.dtype)
    after = value - mean
    oldest = moments.num_values % moments.deviations.shape[0]
    return Moments(
        mean=mean,
        sum_squares=moments.sum_squares + before * after,
        deviations=moments.deviations.at[oldest].set(after),
        num_values=num_values,
    )


def stable_rate(
    energy: Callable[[jax.Array, Any], jax.Array],
    potential: Potential,
    position: jax.Array,
    rng_key: jax.Array,
) -> jax.Array:
    """The rate h = min(2 D / tr C, 1 / (2 lam)) of theta' = theta - h grad Uhat; see `SWAG`.

    Args:
        energy: ``(flat position, batch) -> scalar``.
        potential: where batches come from.
        position: flat, a mode.
        rng_key: for the batches.
    """
    key_noise, key_curvature = random.split(rng_key)

    def fresh_batch(key: jax.Array) -> Any:
        key_stream, key_batch = random.split(key)
        return potential.draw(key_batch, potential.init_stream(key_stream))[0]

    def add_gradient(moments: Moments, key: jax.Array) -> tuple[Moments, None]:
        return update_moments(moments, jax.grad(energy)(position, fresh_batch(key))), None

    keys = random.split(key_noise, NOISE_BATCHES)
    gradients, _ = lax.scan(add_gradient, init_moments(position, 1), keys)
    best = optimal_rate(gradients.sum_squares / (NOISE_BATCHES - 1), 1, 1.0)

    def curvature(key: jax.Array) -> jax.Array:
        key_batch, key_start = random.split(key)
        batch = fresh_batch(key_batch)
        _, product = jax.linearize(jax.grad(lambda flat: energy(flat, batch)), position)
        start = random.normal(key_start, position.shape, position.dtype)
        return extreme_eigenvalues(product, position.size, start, LANCZOS_STEPS).largest_magnitude

    lam = jnp.max(jnp.abs(lax.map(curvature, random.split(key_curvature, RATE_BATCHES))))
    return jnp.minimum(best, LARGEST_DRIFT / lam)


def _check_finite(mode: jax.Array, params: SWAGParams, energies: jax.Array) -> None:
    found, ended = np.asarray(energies)
    if not (np.all(np.isfinite(mode)) and np.isfinite(found)):
        raise FloatingPointError(
            "the search for a mode left the finite numbers: expected a finite energy and position, "
            f"got energy {found:.4g} and {int(np.sum(~np.isfinite(mode)))} entries of the position "
            "that are not finite. Lower mode_learning_rate, pass another init_strategy, or check "
            "the data for values that are not finite"
        )
    if not (all(np.all(np.isfinite(x)) for x in params) and np.isfinite(ended)):
        raise FloatingPointError(
            "constant-rate descent left the finite numbers: expected a finite energy and position "
            f"all the way, got energy {ended:.4g} at learning_rate="
            f"{float(params.learning_rate):.3g}. Pass a smaller one, a larger batch_size, or more "
            "mode_steps"
        )


def _as_tuple(shape: Any) -> tuple:
    if not isinstance(shape, (tuple, list)):
        raise TypeError(
            f"sample_shape must be a tuple of integers such as (100,), got {shape!r} of type "
            f"{type(shape).__name__}"
        )
    return tuple(shape)
