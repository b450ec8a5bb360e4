"""SWAG: a Gaussian fitted to the path of constant-rate stochastic gradient descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform

from .._checks import (
    Guide,
    check_batch_size,
    check_int,
    check_key,
    check_model,
    check_shape,
)
from .._random import tree_normal
from .._util import LANES, PyTree, tree_axpy
from ..model.arguments import on_device
from ..model.derivatives import linearize
from ..model.model import Model
from ..model.potential import Potential
from ..model.start import wrong_lane
from ..sampling.algorithm import check_noisy
from ..sampling.settings import auto_or, positive
from ..warmup.lanczos import LANCZOS_STEPS, extreme_eigenvalues
from ..warmup.training import start

BURN_IN = 0.2
"""Share of the constant-rate steps before the first snapshot."""
LARGEST_RATE_DRIFT = 0.5
"""Bound on the product of the rate and the curvature of a minibatch."""


class SWAGParams(NamedTuple):
    """The fitted Gaussian over unconstrained site values.

    Attributes:
        mean: mean of the snapshots, a pytree like a position.
        variance: second central moment of the snapshots, entry by entry.
        deviations: the last ``rank`` snapshots, each minus the mean of all snapshots up to it,
            oldest first; the first axis has the size ``rank``.
        learning_rate: the constant rate l of theta' = theta - l grad Uhat / N, a scalar.
    """

    mean: PyTree
    variance: PyTree
    deviations: PyTree
    learning_rate: jax.Array


class SWAG(Guide):
    """A NumPyro-style guide: a Gaussian with the moments of an SGD path. Approximate.

    From a mode, such as `numpyro_geom.train` finds, descent goes on at a constant rate l::

        theta' = theta - l grad Uhat(theta) / N

    This path gives snapshots theta_k. Let m be their mean and v their variances (entry by entry).
    Let d_k = theta_k - m_k be the deviations of the last K = ``rank`` snapshots, where m_k is the
    mean of the snapshots up to theta_k. With standard normal z1 and z2, a draw is::

        theta = m + sqrt(v / 2) z1 + sum_k d_k z2_k / sqrt(2 (K - 1))

    Distribution: a Gaussian on the unconstrained space that describes where SGD went. This
    Gaussian is not the posterior under any setting. Its width is proportional to the learning
    rate, and it has the shape of the gradient noise.

    ``learning_rate="auto"`` takes the rate l = h N for which the stationary law of SGD comes
    closest to the posterior in Kullback-Leibler divergence, unless this rate is unstable::

        h = min(2 D / tr C, 1 / (2 lam))

    C is the covariance of grad Uhat at the mode. lam is the largest eigenvalue of the Hessians of
    8 minibatches at the mode. The bound means that in a valley no step goes further than half way
    down along any coordinate.

    Choose `SWAG` for networks, as a cheap baseline after a training that is needed anyway. Cost:
    ``num_steps`` minibatch gradients. Memory: ``rank + 4`` copies of the parameters.

    Args:
        model: a NumPyro model with continuous latent sites and a plate over its rows. Its `param`
            sites keep their initial values.
        batch_size: rows per step: an int, or a dict plate -> int; fewer than all rows.
        rank: the number K of deviations, at least 2.
        learning_rate: ``"auto"`` or the constant rate l, per row: l / N multiplies grad Uhat.
        num_steps: steps at the constant rate; the first fifth is before the first snapshot. Then
            come about 100 snapshots, or ``rank`` if that is more.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range; from `fit` without a position to start from, and for a
            model that has no minibatches.
        FloatingPointError: from `fit`, if the path leaves the finite numbers.
        RuntimeError: from `sample_posterior`, before `fit` and without model arguments.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import Predictive
        >>> from numpyro_geom import train
        >>> from numpyro_geom.baselines import SWAG
        >>> def model(X, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with numpyro.plate("data", X.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=None if y is None else y[i])
        >>> X = jax.random.normal(jax.random.key(0), (500, 2))
        >>> y = X @ jnp.array([1.0, -1.0])
        >>> guide = SWAG(model, batch_size=50, num_steps=1000)
        >>> mode = train(model, jax.random.key(1), X, y, batch_size=50).position
        >>> params = guide.fit(jax.random.key(2), X, y, init_params=mode)
        >>> draws = guide.sample_posterior(jax.random.key(3), params, sample_shape=(100,))
        >>> draws["w"].shape
        (100, 2)
        >>> Predictive(model, draws)(jax.random.key(4), X[:10])["y"].shape
        (100, 10)

    References:
        Maddox, Garipov, Izmailov, Vetrov and Wilson, "A Simple Baseline for Bayesian Uncertainty
        in Deep Learning", NeurIPS 2019, Algorithm 1 and Eq. 1. Deviations: the learning rate has an
        automatic choice, after Mandt, Hoffman and Blei (JMLR 2017); there are more snapshots than
        epochs; v is a central moment, because the difference of two raw ones cancels in float32.
    """

    def __init__(
        self,
        model: Callable,
        *,
        batch_size: int | Mapping[str, int] | None = None,
        rank: int = 20,
        learning_rate: float | Literal["auto"] = "auto",
        num_steps: int = 10_000,
    ) -> None:
        check_model("model", model)
        check_batch_size(batch_size)
        learning_rate = auto_or(positive, "a positive number")("learning_rate", learning_rate)
        rank = check_int("rank", rank, least=2)
        num_steps = check_int("num_steps", num_steps)
        self._burn_in = int(BURN_IN * num_steps)
        kept = num_steps - self._burn_in
        if kept < rank:
            raise ValueError(
                f"expected at least rank={rank} snapshots, got {kept} steps after the first fifth "
                f"of num_steps={num_steps}: raise num_steps, or lower rank"
            )
        self._interval = kept // max(min(kept, 100), rank)
        self._num_snapshots = kept // self._interval
        self.model, self._rank, self._learning_rate = model, rank, learning_rate
        self._batch_size: Any = batch_size
        self._fitted: Model | None = None  # the model with its arguments

    def fit(
        self, rng_key: jax.Array, *args: Any, init_params: PyTree = None, **kwargs: Any
    ) -> SWAGParams:
        """Run constant-rate descent from a mode, and return the moments of its path.

        Args:
            rng_key: for the rows.
            args: the model's arguments.
            init_params: unconstrained site values where the path starts: a mode, such as the
                position of `numpyro_geom.train`.
            kwargs: the model's keyword arguments.
        """
        check_key("rng_key", rng_key)
        model, mode = self._start(init_params, args, kwargs)
        check_noisy(
            model.potential(), "SWAG describes the noise of minibatch gradients", "use train"
        )
        if init_params is None:
            raise ValueError(
                "SWAG goes on from a mode: expected init_params, such as "
                "train(model, rng_key, *args, batch_size=100).position"
            )

        @jax.jit
        def path(arrays: list, mode: PyTree, rng_key: jax.Array) -> tuple:
            # traced, because large arrays take long to compile as constants
            return self._path(model.with_arrays(arrays).potential(), mode, rng_key)

        params, energy = path(model.arrays, mode, rng_key)
        if not (all(np.all(np.isfinite(x)) for x in jax.tree.leaves(params) + [energy])):
            raise FloatingPointError(
                "constant-rate descent left the finite numbers: expected a finite energy and "
                f"position all the way, got energy {energy:.4g} at learning_rate="
                f"{float(params.learning_rate):.3g}. Pass a smaller one, a larger batch_size, or "
                "the position of a longer training as init_params"
            )
        self._fitted = model
        return params

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: SWAGParams,
        *args: Any,
        sample_shape: int | tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Draw site values, deterministic sites included.

        Args:
            rng_key: for the draws.
            params: from `fit`.
            args: the model's arguments; without any, the arguments of `fit`.
            sample_shape: leading dimensions of every site's value.
            kwargs: the model's keyword arguments.

        Returns:
            Site name -> values in the site's support, ``sample_shape`` first.
        """
        shape = check_shape("sample_shape", sample_shape)
        model = self._model(params, args, kwargs)

        def draw(key: jax.Array) -> dict:
            return model.constrain(normal_draw(key, params))

        if not shape:
            return draw(rng_key)
        keys = random.split(rng_key, math.prod(shape))
        wrong = wrong_lane((draw,), keys[:LANES], model.plan.sizes.values())
        values = lax.map(draw, keys, batch_size=1 if wrong else LANES)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), values)

    def median(self, params: SWAGParams, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Site values at the Gaussian's mean: medians if the transform acts entry by entry.

        The arguments are as for `sample_posterior`.
        """
        return self._model(params, args, kwargs).constrain(params.mean)

    def _start(self, init_params: PyTree, args: tuple, kwargs: dict) -> tuple[Model, PyTree]:
        how: dict[str, Any] = {"batch_size": self._batch_size, "init_strategy": init_to_uniform}
        return start(self.model, random.key(0), init_params, args, kwargs, **how)

    def _model(self, params: SWAGParams, args: tuple, kwargs: dict) -> Model:
        """The model with other arguments, or with those of `fit`."""
        if not (args or kwargs):
            if self._fitted is None:
                raise RuntimeError(
                    "expected `fit` first, or the model's arguments: call "
                    "`params = guide.fit(rng_key, *args, init_params=...)`, or pass `*args` with "
                    "saved params"
                )
            return self._fitted
        if self._fitted is None:
            self._fitted, _ = self._start(params.mean, args, kwargs)
        args, kwargs = on_device(args, kwargs)
        return self._fitted.replace(args=args, kwargs=kwargs)

    def _path(
        self, potential: Potential, mode: PyTree, rng_key: jax.Array
    ) -> tuple[SWAGParams, jax.Array]:
        """The moments of descent from a mode, and the energy at its end."""
        key_stream, key_rate, key_descent, key_rows = random.split(rng_key, 4)
        rate: Any = self._learning_rate
        if isinstance(rate, str):
            rate = potential.num_data * _stable_rate(potential, mode, key_rate)
        rate = jnp.asarray(rate, jnp.result_type(*jax.tree.leaves(mode)))

        def step(_: Any, carry: tuple) -> tuple:
            position, key, stream = carry
            key, key_batch = random.split(key)
            batch, stream = potential.draw(key_batch, stream)
            grad = jax.grad(potential.energy)(position, batch)
            return tree_axpy(-rate / potential.num_data, grad, position), key, stream

        def snapshot(carry: tuple, count: jax.Array) -> tuple[tuple, None]:
            descent, moments = carry
            descent = lax.fori_loop(0, self._interval, step, descent)
            return (descent, update_moments(moments, descent[0], count)), None

        descent = mode, key_descent, potential.init_stream(key_stream)
        zeros = jax.tree.map(jnp.zeros_like, mode)
        last = jax.tree.map(lambda x: jnp.zeros((self._rank, *x.shape), x.dtype), mode)
        carry = lax.fori_loop(0, self._burn_in, step, descent), (zeros, zeros, last)
        counts = jnp.arange(1, self._num_snapshots + 1)
        (descent, (mean, squares, deviations)), _ = lax.scan(snapshot, carry, counts)
        variance = jax.tree.map(lambda x: x / self._num_snapshots, squares)
        energy = potential.energy(descent[0], potential.curvature_batch(key_rows))
        return SWAGParams(mean, variance, deviations, rate), energy


def normal_draw(rng_key: jax.Array, params: SWAGParams) -> PyTree:
    """An unconstrained position from the Gaussian of `SWAG`."""
    key_diagonal, key_deviations = random.split(rng_key)
    rank = jax.tree.leaves(params.deviations)[0].shape[0]
    weights = random.normal(key_deviations, (rank,)) / (2 * (rank - 1)) ** 0.5

    def one(m: jax.Array, v: jax.Array, d: jax.Array, z: jax.Array) -> jax.Array:
        low_rank = jnp.tensordot(weights.astype(m.dtype), d, 1, precision=lax.Precision.HIGHEST)
        return m + jnp.sqrt(v / 2) * z + low_rank

    return jax.tree.map(one, *params[:3], tree_normal(key_diagonal, params.mean))


def update_moments(moments: tuple, value: PyTree, count: jax.Array) -> tuple:
    """Moments with one more value, by Welford's recursion; ``count`` is the new number of values.

    The moments are the mean, the sum of squared differences from it, and the last deviations.
    """

    def one(mean: jax.Array, squares: jax.Array, last: jax.Array, x: jax.Array) -> tuple:
        before = x - mean
        mean = mean + before / count.astype(x.dtype)
        after = x - mean
        return mean, squares + before * after, jnp.concatenate([last[1:], after[None]])

    found = jax.tree.map(one, *moments, value)
    return jax.tree.transpose(jax.tree.structure(value), jax.tree.structure((0, 0, 0)), found)


def _stable_rate(potential: Potential, position: PyTree, rng_key: jax.Array) -> jax.Array:
    """The rate h = min(2 D / tr C, 1 / (2 lam)) of theta' = theta - h grad Uhat; see `SWAG`."""
    key_noise, key_curvature = random.split(rng_key)
    flat, unravel = ravel_pytree(position)

    def gradient(key: jax.Array) -> Callable[[jax.Array], jax.Array]:
        key_stream, key_batch = random.split(key)
        batch, _ = potential.draw(key_batch, potential.init_stream(key_stream))
        return jax.grad(lambda x: potential.energy(unravel(x), batch))

    def noise(key: jax.Array) -> jax.Array:
        first, second = (gradient(k)(flat) for k in random.split(key))
        return jnp.sum((first - second) ** 2) / 2

    def curvature(key: jax.Array) -> jax.Array:
        key_batch, key_start = random.split(key)
        _, product = linearize(gradient(key_batch), flat)
        start = random.normal(key_start, flat.shape, flat.dtype)
        return extreme_eigenvalues(product, flat.size, start, LANCZOS_STEPS).largest_magnitude

    trace = jnp.mean(lax.map(noise, random.split(key_noise, 64)))
    lam = jnp.max(jnp.abs(lax.map(curvature, random.split(key_curvature, 8))))
    return jnp.minimum(2 * flat.size / trace, LARGEST_RATE_DRIFT / lam)
