"""SWAG: a Gaussian fitted to the path of constant-rate stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform

from .._checks import check_int, check_key, check_number, check_shape
from .._foreign import Guide
from .._util import PyTree
from ..algorithms.sgrld import SGRLD
from ..kernel import SGKernel
from ..model.arguments import on_device, split_arrays
from .swag_path import SWAGParams, descend, draw

NUM_SNAPSHOTS = 100
"""Number of snapshots under ``collect_every=None``."""
BURN_IN = 0.2
"""Share of the constant-rate steps before the first snapshot."""
DRAWS_AT_ONCE = 32


class SWAG(Guide):
    """A NumPyro-style guide: a Gaussian with the moments of an SGD path. Approximate.

    First Adam finds a mode, with a rate that falls to zero along a cosine. From this mode descent
    at a constant rate l continues::

        theta' = theta - l grad Uhat(theta) / N

    This path gives snapshots theta_k. Let m be their mean and v their variances (entry by entry).
    Let d_k = theta_k - m_k be the deviations of the last K = ``rank`` snapshots, where m_k is the
    mean of the snapshots up to theta_k. With standard normal z1 and z2, a draw is::

        theta = m + sqrt(v / 2) z1 + sum_k d_k z2_k / sqrt(2 (K - 1))

    Distribution: a Gaussian on the unconstrained space that describes where SGD went. This
    Gaussian is not the posterior under any setting. Its width is proportional to the learning
    rate, and its shape is that of the gradient noise, see `numpyro_geom.VSGD`.

    ``learning_rate="auto"`` takes the rate l = h N for which the stationary law of SGD comes
    closest to the posterior in Kullback-Leibler divergence, unless this rate is unstable::

        h = min(2 D / tr C, 1 / (2 lam))

    C is the covariance of grad Uhat at the mode. lam is the largest eigenvalue of the Hessians of
    8 minibatches at the mode. The bound means that in a valley no step goes further than half way
    down along any coordinate.

    Choose `SWAG` for networks, as a cheap baseline after a mode search that is needed anyway. Cost:
    ``mode_steps + num_steps`` minibatch gradients. Memory: ``rank + 4`` copies of the parameters.

    Args:
        model: a NumPyro model with continuous latent sites and a plate over its rows. Its `param`
            sites keep their initial values.
        batch_size: rows per step: an int, or a dict plate -> int; fewer than all rows.
        rank: the number K of deviations, at least 2.
        learning_rate: ``"auto"`` or the constant rate l, per row: l / N multiplies grad Uhat.
        num_steps: steps at the constant rate; the first fifth is before the first snapshot.
        collect_every: steps between snapshots; None for the interval that gives 100 snapshots.
        mode_steps: number of Adam steps.
        mode_learning_rate: Adam's first learning rate, in units of the unconstrained position.
        batching: ``"replacement"``, ``"stratified"`` or ``"epoch"``.
        init_strategy: NumPyro's strategy for where Adam starts.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range; from `fit` for a model that has no minibatches.
        FloatingPointError: from `fit`, if training leaves the finite numbers.
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
        snapshots are taken every ``collect_every`` steps and not once per epoch, the first one
        after a fifth of the run; v is a running central moment, because the difference of two raw
        moments cancels in float32.
    """

    def __init__(
        self,
        model: Callable,
        *,
        batch_size: int | Mapping[str, int] | None = None,
        rank: int = 20,
        learning_rate: float | Literal["auto"] = "auto",
        num_steps: int = 10_000,
        collect_every: int | None = None,
        mode_steps: int = 5_000,
        mode_learning_rate: float = 0.01,
        batching: Literal["replacement", "stratified", "epoch"] = "replacement",
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        if isinstance(learning_rate, str) and learning_rate != "auto":
            raise ValueError(
                f"learning_rate must be 'auto' or a positive number, got {learning_rate!r}"
            )
        self._learning_rate: float | None = None
        if not isinstance(learning_rate, str):
            self._learning_rate = check_number("learning_rate", learning_rate, above=0.0)
        rank = check_int("rank", rank, least=2)
        num_steps = check_int("num_steps", num_steps)
        burn_in = int(BURN_IN * num_steps)
        kept = num_steps - burn_in
        if collect_every is None:
            collect_every = max(1, kept // max(NUM_SNAPSHOTS, rank))
        collect_every = check_int("collect_every", collect_every)
        num_snapshots = kept // collect_every
        self._descent: dict[str, Any] = {
            "rank": rank,
            "burn_in": burn_in,
            "collect_every": collect_every,
            "num_snapshots": num_snapshots,
            "mode_steps": check_int("mode_steps", mode_steps),
            "mode_learning_rate": check_number("mode_learning_rate", mode_learning_rate, above=0.0),
        }
        if num_snapshots < rank:
            raise ValueError(
                f"expected at least rank={rank} snapshots, got {num_snapshots} from {kept} steps "
                f"after the first fifth of num_steps={num_steps}, one every {collect_every}: "
                "raise num_steps, or lower collect_every or rank"
            )
        # what a kernel knows about models: plates, where to start, the map to the supports
        self._kernel: SGKernel = SGRLD(
            model, batch_size=batch_size, batching=batching, init_strategy=init_strategy
        )
        self.model = model
        # the map from flat positions to site values, and model arguments
        self._fitted: tuple[Callable[[jax.Array], PyTree], tuple, dict] | None = None

    def fit(
        self, rng_key: jax.Array, *args: Any, init_params: PyTree = None, **kwargs: Any
    ) -> SWAGParams:
        """Find a mode, run constant-rate descent from it, and return the moments of its path.

        Args:
            rng_key: for the start and the rows.
            args: the model's arguments.
            init_params: unconstrained site values where Adam starts, such as those of
                `numpyro_geom.train`; None for ``init_strategy``.
            kwargs: the model's keyword arguments.
        """
        check_key("rng_key", rng_key)
        args, kwargs = on_device(args, kwargs)
        key_start, key_train = random.split(rng_key)
        start, unravel = ravel_pytree(self._kernel.bind(key_start, 0, init_params, args, kwargs))
        if self._kernel.bound.on(args, kwargs).potential().deterministic:
            raise ValueError(
                "SWAG describes the noise of minibatch gradients, and these have none: expected a "
                "batch_size below the number of rows, got all rows at every step"
            )
        arrays, fill = split_arrays((args, kwargs))

        @jax.jit
        def train(arrays: list, *start: Any) -> tuple:
            # traced, because large arrays take long to compile as constants
            potential = self._kernel.bound.on(*fill(arrays)).potential()
            return descend(potential, unravel, *start, **self._descent)

        given = self._learning_rate
        rate = None if given is None else jnp.asarray(given, start.dtype)
        mode, params, energies = train(arrays, start, rate, key_train)
        _check_finite(mode, params, energies)
        self._fitted = unravel, args, kwargs
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
            rng_key: for the draws.
            params: from `fit`.
            args: the model's arguments; without any, those of `fit`.
            sample_shape: leading dimensions of every site's value.
            kwargs: the model's keyword arguments; without any, those of `fit`.

        Returns:
            Site name -> values in the site's support, ``sample_shape`` first.
        """
        shape = check_shape("sample_shape", sample_shape)
        constrain = self._constrain_fn(args, kwargs)
        flat = draw(rng_key, params, shape)
        if not shape:
            return constrain(flat)
        flat = flat.reshape(-1, flat.shape[-1])
        values = lax.map(constrain, flat, batch_size=DRAWS_AT_ONCE)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), values)

    def median(self, params: SWAGParams, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Site values at the Gaussian's mean: medians if the transform acts entry by entry.

        The arguments are those of `sample_posterior`.
        """
        return self._constrain_fn(args, kwargs)(params.mean)

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
            position = self._kernel.bind(random.key(0), 0, None, args, kwargs)
            self._fitted = ravel_pytree(position)[1], args, kwargs
        unravel, *known = self._fitted
        constrain = self._kernel.get_constrain_fn(*((args, kwargs) if given else known))
        return lambda flat: constrain(unravel(flat))


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
