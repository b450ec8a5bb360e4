"""The guide's side of NumPyro's protocol, and its knowledge: model, data, compiled programs."""

from __future__ import annotations

import inspect
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.infer.autoguide import AutoContinuous

from .._checks import check_flag
from .._util import is_traced
from ..model.arguments import differentiated, on_device
from ..model.minibatch import Subsampling
from ..model.plates import read_subsampling
from ..rows.bad_rows import check_finite
from . import sampling
from .approximation import at_mode, half_log_det, learn
from .checks import check_precision, warn_of_hours
from .draws import Data
from .geodesic import Geodesic
from .information.form import Flat, Structure
from .information.model import is_unit
from .settings import LaplaceSettings, is_wide
from .target import Posterior, make_target

SUMMARY_DRAWS = 2000
"""Number of draws for `median` and `quantiles`."""


class BoundGuide(AutoContinuous):
    """A guide without a closed-form distribution, which runs functions of a `Posterior`."""

    prototype_trace: Any

    def __init__(
        self, model: Callable, settings: LaplaceSettings, prefix: str, init_loc_fn: Callable
    ) -> None:
        self._given = self.settings = settings
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)
        self._data: Data | None = None
        self._learned: dict[str, Any] = {}
        self._programs: dict = {}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.settings.as_dict().items())
        return f"{type(self).__name__}({getattr(self.model, '__name__', self.model)}, {arguments})"

    def __getstate__(self) -> dict:
        # NumPyro orders the leaves of a distribution anew in every process, and the structure
        # counts the leaves: without it programs are slower and give the same results
        learned = self._learned | {"structure": Structure()}
        return super().__getstate__() | {"_programs": {}, "_learned": learned}

    @differentiated()
    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        args, kwargs = on_device(args, kwargs)  # traced row indices cannot index a NumPy array
        with handlers.block():
            self._plan: Subsampling = read_subsampling(
                self.model, args, kwargs, self.settings.batch_size, sums=False
            )
        if self._plan.is_random:
            raise ValueError(
                "the model asks for a random key (numpyro.prng_key, as dropout does), and a mode "
                "is that of one energy: leave the randomness out, or use SGRLD, SGHMC or SGNHT"
            )
        try:
            super()._setup_prototype(*args, **kwargs)
        except ValueError:  # NumPyro's error does not name the argument
            check_finite(self.model, args, kwargs)
            raise
        sites = [s for s in self.prototype_trace.values() if s["type"] == "sample"]
        factors = [is_unit(s["fn"]) for s in sites if s["is_observed"]]
        self.settings = self._given.resolve(
            self.latent_dim, has_factor=any(factors), has_observed=not all(factors)
        )
        self._data, self._learned = None, {}
        if is_traced((args, kwargs, self._init_latent)):
            return
        with handlers.block():
            self._data = Data.of(self.model, args, kwargs)
        with handlers.block(), jax.ensure_compile_time_eval():
            posterior = learn(self.settings, self._posterior({}, args, kwargs), self._init_latent)
        names = ("structure", "diagonal_prior")
        self._learned = {name: getattr(posterior, name) for name in names}

    def _sample_latent(self, *args: Any, **kwargs: Any) -> jax.Array:
        kwargs.pop("sample_shape", None)
        loc = numpyro.param(f"{self.prefix}_loc", self._init_latent)
        latent, log_density = loc, jnp.zeros(())
        if numpyro.get_mask() is False:  # Predictive wants draws
            params = {f"{self.prefix}_loc": loc}
            key = numpyro.prng_key()[None]
            with handlers.block():
                geodesics, _ = self._geodesics(key, params, self._captured(), False, 1, False)
            latent = geodesics.position[0]
        elif self.settings.mode != "euclidean":
            with handlers.block():
                posterior = self._posterior({}, *on_device(args, kwargs))
                target = make_target(posterior)
                log_density = half_log_det(self.settings, target, loc)
        return numpyro.sample(
            f"_{self.prefix}_latent",
            dist.Delta(latent, log_density=log_density, event_dim=1),
            infer={"is_auxiliary": True},
        )

    def _get_posterior(self) -> Any:
        raise NotImplementedError(
            "a RiemannianLaplace guide has no distribution in closed form: use `sample_posterior`"
        )

    def get_base_dist(self) -> Any:
        """Raise: there is no base distribution in closed form."""
        return self._get_posterior()

    @abstractmethod
    def draw(self, rng_key: jax.Array, params: dict[str, jax.Array], *args: Any, **kw: Any) -> Any:
        """Draws with an account of each draw."""

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: dict[str, jax.Array],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        resample: bool = False,
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Values of all sites, as in `draw`, which documents the other arguments.

        Args:
            rng_key: for the draws.
            params: from `fit` or SVI.
            args: the training data; without any, those of `fit` or SVI.
            sample_shape: leading dimensions.
            resample: whether to resample draws by their importance weights, see
                `LaplaceDraws.resample`. If ``pareto_k`` is small, they are then draws of the
                posterior. This takes D + 1 times the cost.
            kwargs: keyword arguments of the training data; without any, those of `fit` or SVI.

        Returns:
            Site name -> values in the site's support, deterministic sites included.
        """
        check_flag("resample", resample)
        key_draw, key_choice = random.split(rng_key) if resample else (rng_key, rng_key)
        if resample:
            kwargs["log_weight"] = True
        draws = self.draw(key_draw, params, *args, sample_shape=sample_shape, **kwargs)
        return draws.resample(key_choice) if resample else draws.samples

    def median(self, params: dict[str, jax.Array], *args: Any, **kwargs: Any) -> dict:
        """Median of every entry of every site; see `quantiles`."""
        return jax.tree.map(lambda x: x[0], self.quantiles(params, [0.5], *args, **kwargs))

    def quantiles(
        self, params: dict[str, jax.Array], quantiles: Any, *args: Any, **kwargs: Any
    ) -> dict:
        """Quantiles of every entry of every site, over 2,000 draws with a fixed key.

        Args:
            params: from `fit` or SVI.
            quantiles: probabilities, a number or a list.
            args: the training data; without any, those of `fit` or SVI.
            kwargs: keyword arguments of the training data; without any, those of `fit` or SVI.

        Returns:
            Site name -> array whose first dimension is that of ``quantiles``.
        """
        shape = (SUMMARY_DRAWS,)
        draws = self.draw(random.key(0), params, *args, sample_shape=shape, **kwargs)
        probabilities = jnp.asarray(quantiles, jnp.result_type(float))
        return jax.tree.map(lambda x: jnp.quantile(x, probabilities, axis=0), draws.samples)

    def _starts(
        self, rng_key: jax.Array, num_starts: int, init: Mapping | None, args: tuple, kwargs: dict
    ) -> Flat:
        """Bind the model again; returns positions of ``init_loc_fn``, or the given position."""
        keys = random.split(rng_key, num_starts)
        self.prototype_trace = None
        with handlers.seed(rng_seed=keys[0]):
            self._setup_prototype(*args, **kwargs)
        if init is not None:
            return self._flat(init)[None]
        starts = [self._init_latent]
        args, kwargs = on_device(args, kwargs)
        for key in keys[1:]:
            with handlers.seed(rng_seed=key):
                super()._setup_prototype(*args, **kwargs)
            starts.append(self._init_latent)
        return jnp.stack(starts)

    def _posterior(self, params: dict, args: tuple, kwargs: dict) -> Posterior:
        """The model with its `param` sites at the given values, or at the prototype's values."""
        model = self.model
        if self._plan.has_params:
            model = handlers.substitute(model, data=self._fixed_params() | dict(params))
        shape = (self._unpack_latent, self.latent_dim)
        return Posterior(model, self._plan, args, kwargs, *shape, **self._learned)

    def _fixed_params(self) -> dict[str, jax.Array]:
        kinds = ("param", "mutable")
        trace = self.prototype_trace.items()
        return {name: site["value"] for name, site in trace if site["type"] in kinds}

    def _captured(self) -> Data:
        if self._data is None and self.prototype_trace is None and _needs_nothing(self.model):
            return Data.of(self.model, (), {})
        if self._data is None:
            raise RuntimeError(
                "the guide does not know the training data: expected a call of `fit`, of SVI "
                "outside of jit, or the model's arguments, as in "
                "`guide.sample_posterior(rng_key, params, *args)`"
            )
        return self._data

    def _training_data(self, params: Mapping, args: tuple, kwargs: dict) -> Data:
        """The given data, or the data of `fit` if the parameters have a mode."""
        data = Data.of(self.model, args, kwargs) if args or kwargs else self._captured()
        if self.prototype_trace is None:
            with handlers.seed(rng_seed=0):
                self._setup_prototype(*args, **kwargs)
        if not isinstance(params, Mapping) or f"{self.prefix}_loc" not in params:
            got = [*params] if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(
                f"expected params with {self.prefix + '_loc'!r}, as `fit` returns them, got {got}"
            )
        return data

    def _flat(self, values: Mapping[str, Any]) -> Flat:
        position = self._unpack_latent(self._init_latent)
        if not isinstance(values, Mapping) or set(position) != set(values):
            got = [*values] if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(
                f"init_params must have unconstrained values for the sites {sorted(position)}, got "
                f"{got}"
            )
        for name, value in position.items():
            if jnp.shape(values[name]) != value.shape:
                raise ValueError(
                    f"init_params[{name!r}] must have shape {value.shape}, got "
                    f"{jnp.shape(values[name])}"
                )
        parts = [jnp.ravel(jnp.asarray(values[n], v.dtype)) for n, v in position.items()]
        return jnp.concatenate(parts)

    @differentiated()
    def _run(self, fn: Callable, data: Data, params: dict, *inputs: Any, **static: Any) -> Any:
        """``fn(settings, posterior, loc, *inputs, **static)``, compiled once for each structure."""
        learned, chosen = tuple(self._learned.items()), tuple(static.items())
        key = (fn, chosen, data.signature, learned, self.settings.fingerprint)
        if key not in self._programs:

            def program(arrays: list, params: dict, *inputs: Any) -> Any:
                posterior = self._posterior(params, *data.build(arrays))
                loc = params.get(f"{self.prefix}_loc")
                return fn(self.settings, posterior, loc, *inputs, **static)

            self._programs[key] = jax.jit(program)
        return self._programs[key](data.arrays, self._fixed_params() | dict(params), *inputs)

    def _geodesics(
        self,
        keys: jax.Array,
        params: dict,
        data: Data,
        log_weight: bool,
        chunk: int | None,
        progress_bar: bool,
    ) -> tuple[Geodesic, jax.Array]:
        loc, at = params[f"{self.prefix}_loc"], self._run(at_mode, data, params)
        posterior = self._posterior(params, *data.build(data.arrays))
        if chunk is None:
            chunk = sampling.chunk_size(self.settings, posterior, log_weight=log_weight)
        chunk = max(1, min(chunk, keys.shape[0]))
        traced = is_traced(at.factor)
        if not traced:
            check_precision(self.settings, at, self._unpack_latent, loc)
        if traced or is_traced(keys):
            drawn = (self.settings, posterior, loc, at, keys)
            return sampling.draw(*drawn, log_weight=log_weight, chunk=chunk)

        def gaussian(keys: jax.Array) -> tuple:
            return self._run(sampling.gaussian, data, params, at, keys)

        def follow(draws: jax.Array, squares: jax.Array, max_steps: int) -> tuple:
            static = {"log_weight": log_weight, "max_steps": max_steps}
            return self._run(sampling.follow, data, params, at, draws, squares, **static)

        draws, squares = sampling.gaussian_in_chunks(gaussian, keys, chunk)
        if is_wide(loc.size) and self.settings.metric != "euclidean":
            self._warn_of_hours(data, params, draws)
        most = self.settings.max_steps
        return sampling.follow_in_chunks(
            *(follow, draws, squares, chunk, most), progress_bar=progress_bar
        )

    def _warn_of_hours(self, data: Data, params: dict, draws: jax.Array) -> None:
        """Time one acceleration, and warn with the least time for all draws."""
        for _ in range(2):  # the first run includes compilation
            begin = time.perf_counter()
            jax.block_until_ready(self._run(sampling.accelerate, data, params, draws[0]))
        warn_of_hours(time.perf_counter() - begin, draws.shape[0])


def _needs_nothing(model: Callable) -> bool:
    """Whether a model can be called without arguments."""
    try:
        inspect.signature(model).bind()
    except (TypeError, ValueError):
        return False
    return True
