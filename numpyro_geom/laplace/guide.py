"""RiemannianLaplace: a Laplace approximation that follows the geodesics of a metric."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.util import constrain_fn
from tqdm import tqdm

from .._checks import check_choice, check_flag, check_int, check_number
from ..bound import on_device
from ..diagnostics.summary import SamplingWarning
from ..fisher import Structure, learn_structure
from ..minibatch import Plan, SubsamplePlates, make_plan
from ..target.potential import CHUNK_ROWS
from .approximation import (
    AtMode,
    Settings,
    at_mode,
    choose_solver,
    draw_one,
    end_fn,
    gaussian_fn,
    half_log_det,
    objective,
    prior_part,
    start_of,
)
from .draws import Data, FitReport, LaplaceDraws, pareto_shape
from .geodesic import Geodesic
from .mode import NEWTON_LIMIT, Runs, search
from .predictive import Predictions, predict
from .target import Target, make_target

PyTree = Any
Flat = jax.Array

METRICS = ("euclidean", "monge", "monge-log", "fisher", "empirical-fisher")
MODES = ("euclidean", "hausdorff")
PRECISIONS = ("hessian", "fisher")
PRIORS = ("hessian", "expected", "softabs")
SOLVERS = ("auto", "cholesky", "woodbury", "cg")

CONVERGED = 1e-4
"""A mode is converged where g' P^-1 g / D, its squared distance in posterior sd, is below this."""
ILL_CONDITIONED = 1e6
"""Condition number of P above which float32 is not enough."""
CHUNK_ENTRIES = 2**23
"""Floating point numbers of the draws that are solved together, about."""
MOST_AT_ONCE = 1024
SUMMARY_DRAWS = 2000


class RiemannianLaplace(AutoContinuous):
    """Laplace approximation whose draws follow geodesics of a metric. Approximate.

    A draw starts at a mode theta^ with a Gaussian velocity and follows a geodesic for unit time::

        v ~ N(0, P^-1),    theta'' = -G^-1 [(d_v G) v - grad (v'G v) / 2],    theta = theta(1)

    on the unconstrained space, where all of the mode, P and the metric G live, log-Jacobians of the
    transforms included. Everything is of all rows of the data, also where the model subsamples.

    ========================  ==============================================  ====================
    ``metric``                G                                               cost of an evaluation
    ========================  ==============================================  ====================
    ``"euclidean"``           I: theta = theta^ + v                           none
    ``"monge"``               I + alpha2 g g', g the gradient of U            about 3 gradients
    ``"monge-log"``           the same, v through a logarithmic map           the same, and the map
    ``"fisher"``              Fisher information + prior part                 about 5 gradients, and
                                                                              a solve with G
    ``"empirical-fisher"``    outer products of the scores + prior part       the same
    function of the position  what it returns, shape (D, D)                   autodiff, and a solve
    ========================  ==============================================  ====================

    Distribution of the draws: a Gaussian bent along the metric, which is not the posterior.
    ``"fisher"`` is exact where the posterior is a Gaussian seen through a change of coordinates
    with that metric, from the Hausdorff mode; ``"monge-log"`` is exact for Gaussians; ``"monge"``
    is too narrow even there (Wasserstein-1 distance of a coordinate of N(0, I_D): 0.111, 0.145,
    0.171, 0.211, 0.271 at D = 1, 2, 3, 5, 10); ``"euclidean"`` sees the curvature at the mode
    alone. ``"empirical-fisher"`` is there for comparison: it is not an estimate of the Fisher
    information. `draw` with ``log_weight=True`` tells how far to trust the draws, and its weights
    turn them into draws of the posterior where ``pareto_k`` is below 0.7 and the exponential map
    is one to one.

    Choose ``"fisher"`` first. Choose ``"monge"`` for models whose energy is cheap and whose number
    of outputs times parameters is too large for solves.

    Args:
        model: a NumPyro model with continuous latent sites. The same model goes to `MCMC`.
        metric: see the table. A function gets the dict of unconstrained site values and returns G
            in the order in which the model runs its sites, each flattened.
        mode: ``"euclidean"`` for the maximum of the density, or ``"hausdorff"`` for that of the
            density over sqrt(det G), G the Fisher metric whatever ``metric`` is.
        precision: P: ``"hessian"`` of U at the mode, or ``"fisher"``, the Fisher metric there. None
            for ``"fisher"`` with a Hausdorff mode and above 2,000 dimensions, else ``"hessian"``.
        prior_metric: prior part of the Fisher metric. ``"hessian"``: of minus the log prior, which
            must be positive definite. ``"expected"``: its expectation, block by block, positive
            definite also for hierarchies. ``"softabs"``: absolute eigenvalues of the Hessian.
        solver: of systems with the Fisher metric. ``"cholesky"`` forms G (up to 2,000 dimensions),
            ``"woodbury"`` works in the space of the observations' parameters (up to 2,000, priors
            independent), ``"cg"`` needs products alone. All give the same draws; ``"auto"`` takes
            the cheapest.
        alpha2: scale of the gradient in Monge's metric.
        damping: multiple of I that is added to P.
        batch_size: plates whose rows a pass over the data may take in parts, named as in the
            kernels: an int for the only plate with observed rows, or a dict plate -> int. Parts
            have up to 8,192 rows whatever the number is; it bounds memory and changes no result.
        rtol: relative tolerance of the geodesic's solver (Dormand-Prince, diffrax).
        atol: absolute tolerance of it.
        max_steps: steps after which a geodesic is given up, and flagged.
        prefix: of the guide's parameters.
        init_loc_fn: NumPyro's strategy for where the search for a mode starts.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range; for models with discrete latent sites; from `fit` and
            the draws for a precision that is not positive definite and dimensions that are too
            large for what was asked.
        RuntimeError: without training data, and where no search for a mode ends at finite values.

    Examples:
        >>> import jax, numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import Predictive
        >>> from numpyro_geom import RiemannianLaplace
        >>> def model(X, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 3).expand([2]).to_event(1))
        ...     with numpyro.plate("data", X.shape[0]) as i:
        ...         obs = None if y is None else y[i]
        ...         numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=obs)
        >>> X = jax.random.normal(jax.random.key(0), (100, 2))
        >>> y = (X @ jnp.array([1.0, -2.0]) > 0).astype(float)
        >>> guide = RiemannianLaplace(model)
        >>> params = guide.fit(jax.random.key(1), X, y)
        >>> draws = guide.sample_posterior(jax.random.key(2), params, sample_shape=(500,))
        >>> draws["w"].shape
        (500, 2)
        >>> Predictive(model, draws)(jax.random.key(3), X[:10])["y"].shape
        (500, 10)

    References:
        Yu, Hartmann, Williams, Girolami and Klami, "Riemannian Laplace Approximation with the
        Fisher Metric", AISTATS 2024 (``"fisher"`` is its RLA-F, ``"monge-log"`` its RLA-BLog);
        Bergamin, Moreno-Munoz, Hauberg and Arvanitidis, "Riemannian Laplace approximations for
        Bayesian neural networks", NeurIPS 2023 (``"monge"``, RLA-B). Deviations: the metric is
        derived from the model instead of written by hand; the logarithmic map is continued and
        checked, draw by draw; geodesics that fail are flagged and never left out; importance
        weights are ours.
    """

    prototype_trace: Any

    def __init__(
        self,
        model: Callable,
        metric: str | Callable = "fisher",
        *,
        mode: str = "euclidean",
        precision: str | None = None,
        prior_metric: str = "hessian",
        solver: str = "auto",
        alpha2: float = 1.0,
        damping: float = 0.0,
        batch_size: int | Mapping[str, int] | None = None,
        rtol: float = 1e-3,
        atol: float = 1e-6,
        max_steps: int = 4096,
        prefix: str = "auto",
        init_loc_fn: Callable = init_to_uniform,
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be a NumPyro model (a function), got {model!r}")
        if not callable(metric):
            check_choice("metric", metric, METRICS)
        if precision is not None:
            check_choice("precision", precision, PRECISIONS)
        self._settings = Settings(
            metric=metric,
            mode=check_choice("mode", mode, MODES),
            precision=precision,
            prior_metric=check_choice("prior_metric", prior_metric, PRIORS),
            solver=check_choice("solver", solver, SOLVERS),
            alpha2=check_number("alpha2", alpha2, least=0.0),
            damping=check_number("damping", damping, least=0.0),
            rtol=check_number("rtol", rtol, above=0.0),
            atol=check_number("atol", atol, above=0.0),
            max_steps=check_int("max_steps", max_steps),
        )
        self._batch_size = batch_size
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)
        self.report: FitReport | None = None
        self._data: Data | None = None
        self._programs: dict = {}

    def __getstate__(self) -> dict:
        # NumPyro orders the leaves of a distribution anew in every process, and the structure
        # counts them: without it programs are slower and give the same
        settings = self._settings._replace(structure=Structure())
        return super().__getstate__() | {"_programs": {}, "_settings": settings}

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the guide, by name."""
        settings = self._settings._asdict()
        del settings["structure"], settings["diagonal_prior"]
        if callable(settings["metric"]):
            settings["metric"] = getattr(settings["metric"], "__name__", "function")
        if self.prototype_trace is not None:
            settings["precision"] = self._settings.chosen_precision(self.latent_dim)
        return settings

    # What NumPyro asks of a guide

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        args, kwargs = on_device(args, kwargs)  # traced row indices cannot index a NumPy array
        with handlers.block():
            self._plan: Plan = make_plan(self.model, args, kwargs, self._batch_size)
        super()._setup_prototype(*args, **kwargs)
        self._learn(args, kwargs)

    def _new_start(self, args: tuple, kwargs: dict) -> Flat:
        """Another position of ``init_loc_fn``."""
        args, kwargs = on_device(args, kwargs)
        super()._setup_prototype(*args, **kwargs)
        return self._init_latent

    def _learn(self, args: tuple, kwargs: dict) -> None:
        """Look at the model's structure, and keep the arguments."""
        leaves = jax.tree.leaves((args, kwargs, self._init_latent))
        self._settings = self._settings._replace(structure=Structure(), diagonal_prior=False)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            self._data = None
            return
        self._data = Data.of(args, kwargs)
        if not self._settings.uses_fisher(self.latent_dim):
            return
        with handlers.block(), jax.ensure_compile_time_eval():
            position = self._unpack_latent(self._init_latent)
            model = self._bound_model({})
            structure = learn_structure(model, self._plan, args, kwargs, position)
            self._settings = self._settings._replace(structure=structure)
            target, _ = self._targets({}, args, kwargs)
            if target.num_outputs == 0 and self._settings.needs_outputs:
                raise ValueError(
                    "the model has no observed site with a distribution (numpyro.factor has none), "
                    f"and metric={self._settings.metric!r} is the information of such sites: "
                    "expected `numpyro.sample(..., obs=data)`. Pass the data, metric='monge', or a "
                    "function of the position that returns your metric"
                )
            diagonal = self._has_diagonal_prior(target)
            self._settings = self._settings._replace(diagonal_prior=diagonal)

    def _sample_latent(self, *args: Any, **kwargs: Any) -> jax.Array:
        kwargs.pop("sample_shape", None)
        loc = numpyro.param(f"{self.prefix}_loc", self._init_latent)
        if numpyro.get_mask() is False:  # Predictive asks for draws
            data, params = self._captured(), self._fixed_params() | {f"{self.prefix}_loc": loc}
            key = numpyro.prng_key()[None]
            with handlers.block():
                geodesics, _ = self._draw(
                    key, params, data, log_weight=False, chunk=1, progress_bar=False
                )
            latent, log_density = geodesics.position[0], jnp.zeros(())
        elif self._settings.mode == "hausdorff":
            with handlers.block():
                target, _ = self._targets({}, *on_device(args, kwargs))
                latent, log_density = loc, half_log_det(self._settings, target, loc)
        else:
            latent, log_density = loc, jnp.zeros(())
        return numpyro.sample(
            f"_{self.prefix}_latent",
            dist.Delta(latent, log_density=log_density, event_dim=1),
            infer={"is_auxiliary": True},
        )

    def _get_posterior(self) -> Any:
        raise NotImplementedError(
            "a RiemannianLaplace guide has no distribution in closed form: use `sample_posterior`"
        )

    def get_transform(self, params: dict) -> Any:
        """There is none in closed form."""
        return self._get_posterior()

    def get_posterior(self, params: dict) -> Any:
        """There is none in closed form."""
        return self._get_posterior()

    # Fitting

    def fit(
        self,
        rng_key: jax.Array,
        *args: Any,
        num_starts: int = 4,
        max_steps: int = 2000,
        init_params: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Find the mode by L-BFGS from several starts, in small dimensions ended by Newton steps.

        Args:
            rng_key: for the starts.
            args: the model's arguments.
            num_starts: runs, from positions of ``init_loc_fn``; the best finite one is taken.
            max_steps: L-BFGS steps of a run.
            init_params: unconstrained site values to start from, in one run. With
                ``max_steps=0`` they are taken as the mode.
            kwargs: the model's keyword arguments.

        Returns:
            Parameters for `sample_posterior` and the other methods: ``{prefix}_loc``, shape (D,),
            and the values of the model's `param` sites. ``guide.report`` tells of every run.

        Raises:
            RuntimeError: where no run ends at finite values.
            SamplingWarning: (a warning) where the best run has not converged.
        """
        num_starts = check_int("num_starts", num_starts)
        max_steps = check_int("max_steps", max_steps, least=0)
        keys = random.split(rng_key, num_starts)
        self.prototype_trace = None
        with handlers.seed(rng_seed=keys[0]):
            self._setup_prototype(*args, **kwargs)
        starts = [self._init_latent if init_params is None else self._flat(init_params)]
        for key in keys[1:] if init_params is None else ():
            with handlers.seed(rng_seed=key):
                starts.append(self._new_start(args, kwargs))
        data = self._captured()
        params = self._fixed_params()

        def run(arrays: list, params: dict, starts: Flat) -> Runs:
            target, _ = self._targets(params, *data.build(arrays))
            newton = self._settings.mode == "euclidean" and target.size <= NEWTON_LIMIT
            aim = objective(self._settings, target)
            return search(aim, starts, max_steps, newton=newton)

        runs = self._jit("fit", data, (max_steps,), run)(data.arrays, params, jnp.stack(starts))
        values = np.asarray(runs.objective)
        finite = np.isfinite(values) & np.isfinite(np.asarray(runs.gradient_norm))
        if not finite.any():
            raise RuntimeError(
                f"the search for a mode ended at finite values in none of {len(values)} runs "
                f"(objectives {values}): expected at least one. Pass another `init_loc_fn`, "
                "`init_params`, or check the model and the data for values that are not finite"
            )
        best = int(np.argmin(np.where(finite, values, np.inf)))
        params[f"{self.prefix}_loc"] = runs.position[best]
        status = ["finite" if ok else "not finite" for ok in finite]
        status[best] = "best"
        prepared = self._prepare(params, data)
        self.report = FitReport(
            values,
            np.asarray(runs.gradient_norm),
            np.asarray(runs.num_steps),
            tuple(status),
            float(prepared.distance),
        )
        self._check(prepared, runs.position.dtype)
        if not self.report.distance**2 < CONVERGED:
            warnings.warn(
                f"the search for a mode has not converged: the best of {len(values)} runs is "
                f"{self.report.distance:.2g} posterior standard deviations from the mode (root "
                f"mean square; expected below {CONVERGED**0.5:g}), |gradient| "
                f"{self.report.gradient_norm[best]:.3g}. Raise `max_steps` or `num_starts`, "
                "or use float64 (numpyro.enable_x64())",
                SamplingWarning,
                stacklevel=2,
            )
        return params

    # Draws

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: dict[str, jax.Array],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Draw site values; see `draw` for what became of each draw.

        Args:
            rng_key: of the draws.
            params: from `fit`, or of SVI.
            args: the training data; those of `fit` or SVI unless any are given.
            sample_shape: leading dimensions of every site's value.
            kwargs: likewise.

        Returns:
            Site name -> values in the site's support, deterministic sites included.

        Raises:
            SamplingWarning: (a warning) where geodesics were not followed to their end.
        """
        return self.draw(rng_key, params, *args, sample_shape=sample_shape, **kwargs).samples

    def draw(
        self,
        rng_key: jax.Array,
        params: dict[str, jax.Array],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        log_weight: bool = False,
        chunk_size: int | None = None,
        progress_bar: bool = True,
        **kwargs: Any,
    ) -> LaplaceDraws:
        """Draws with an account of each: success, evaluations, and importance weights.

        Args:
            rng_key: of the draws.
            params: from `fit`, or of SVI.
            args: the training data; those of `fit` or SVI unless any are given.
            sample_shape: leading dimensions, such as ``(chains, draws)``.
            log_weight: whether to compute importance weights, at D + 1 times the cost.
            chunk_size: draws solved at once; None for as many as fit in a bounded memory.
            progress_bar: whether to show one on work of more than five seconds.
            kwargs: like args.
        """
        check_flag("log_weight", log_weight)
        shape = tuple(check_int("sample_shape", n, least=0) for n in sample_shape)
        data = Data.of(args, kwargs) if args or kwargs else self._captured()
        if self.prototype_trace is None:
            with handlers.seed(rng_seed=0):
                self._setup_prototype(*args, **kwargs)
        if f"{self.prefix}_loc" not in params:
            raise ValueError(
                f"expected params with {self.prefix + '_loc'!r}, as `fit` returns them, got "
                f"{sorted(params)}"
            )
        if chunk_size is not None:
            chunk_size = check_int("chunk_size", chunk_size)
        count = int(np.prod(shape))
        keys = random.split(rng_key, count) if shape else rng_key[None]
        begin = time.perf_counter()
        (geodesics, weights), samples = self._draw_all(
            keys, self._fixed_params() | dict(params), data, log_weight, chunk_size, progress_bar
        )
        geodesics = jax.block_until_ready(geodesics)
        seconds = (time.perf_counter() - begin) / max(count, 1)

        def shaped(x: jax.Array) -> jax.Array:
            return x.reshape(*shape, *x.shape[1:])

        traced = isinstance(geodesics.position, jax.core.Tracer)
        pareto_k = None
        if not traced:
            self._warn_failed(geodesics)
            if log_weight:
                pareto_k = pareto_shape(np.asarray(weights))
        return LaplaceDraws(
            samples=jax.tree.map(shaped, samples),
            unconstrained=shaped(geodesics.position),
            success=shaped(geodesics.success),
            num_evaluations=shaped(geodesics.num_evaluations),
            log_weight=shaped(weights) if log_weight else None,
            pareto_k=pareto_k,
            seconds=seconds,
            model=self._bound_model(params),
            args=data.build(data.arrays)[0],
            kwargs=data.build(data.arrays)[1],
            settings=self.settings,
        )

    def predictive(
        self,
        rng_key: jax.Array,
        params: dict[str, jax.Array],
        *args: Any,
        num_samples: int = 1000,
        linearized: bool = False,
        **kwargs: Any,
    ) -> Predictions:
        """Predict new rows from draws given the training data.

        ``linearized=True`` replaces the parameters of the observed sites' distributions, a
        network's outputs say, by their first-order expansion in the latent sites around the mode:
        the cure of the Euclidean approximation of networks, whose straight draws leave the region
        where the network fits (Immer, Korzepa and Bauer, "Improving predictions of Bayesian neural
        nets via local linearization", AISTATS 2021). Parameters with bounds are expanded where they
        have none, a scale in its logarithm.

        Args:
            rng_key: of the draws and of what is sampled.
            params: from `fit`, or of SVI.
            args: the model's arguments with the new rows.
            num_samples: draws.
            linearized: see above.
            kwargs: the model's keyword arguments, likewise.

        Returns:
            `numpyro_geom.laplace.Predictions`: samples of the observed sites, and their log
            likelihood for the rows whose values are among the arguments.

        Raises:
            ValueError: where a parameter to be linearised has no unconstrained form.
        """
        num_samples = check_int("num_samples", num_samples)
        check_flag("linearized", linearized)
        key_draw, key_sites = random.split(rng_key)
        draws = self.draw(key_draw, params, sample_shape=(num_samples,))
        data = Data.of(args, kwargs)
        values = self._fixed_params() | dict(params)

        def run(arrays: list, params: dict, key: jax.Array, draws: Flat) -> Predictions:
            args, kwargs = data.build(arrays)
            model, loc = self._bound_model(params), params[f"{self.prefix}_loc"]
            unravel = self._unpack_latent
            return predict(model, args, kwargs, unravel, key, loc, draws, linearized=linearized)

        program = self._jit("predict", data, (linearized,), run)
        return program(data.arrays, values, key_sites, draws.unconstrained)

    def median(self, params: dict[str, jax.Array], *args: Any, **kwargs: Any) -> dict:
        """Median of every entry of every site, over 2,000 draws with a fixed key.

        Args:
            params: from `fit`, or of SVI.
            args: the training data; those of `fit` or SVI unless any are given.
            kwargs: likewise.
        """
        return jax.tree.map(lambda x: x[0], self.quantiles(params, [0.5], *args, **kwargs))

    def quantiles(
        self, params: dict[str, jax.Array], quantiles: Any, *args: Any, **kwargs: Any
    ) -> dict:
        """Quantiles of every entry of every site, over 2,000 draws with a fixed key.

        Args:
            params: from `fit`, or of SVI.
            quantiles: probabilities, a number or a list.
            args: the training data; those of `fit` or SVI unless any are given.
            kwargs: likewise.

        Returns:
            Site name -> array whose first dimension is that of ``quantiles``.
        """
        shape = (SUMMARY_DRAWS,)
        draws = self.draw(random.key(0), params, *args, sample_shape=shape, **kwargs)
        probabilities = jnp.asarray(quantiles, jnp.result_type(float))
        return jax.tree.map(lambda x: jnp.quantile(x, probabilities, axis=0), draws.samples)

    # Inside

    def _bound_model(self, params: dict) -> Callable:
        """The model with its `param` sites at the given values, or those of the prototype."""
        if not self._plan.has_params:
            return self.model
        return handlers.substitute(self.model, data=self._fixed_params() | dict(params))

    def _fixed_params(self) -> dict[str, jax.Array]:
        return {
            name: site["value"]
            for name, site in self.prototype_trace.items()
            if site["type"] in ("param", "mutable")
        }

    def _captured(self) -> Data:
        if self._data is None and self.prototype_trace is None and _needs_nothing(self.model):
            return Data.of((), {})
        if self._data is None:
            raise RuntimeError(
                "the guide does not know the training data: expected a call of `fit`, of SVI "
                "outside of jit, or the model's arguments, as in "
                "`guide.sample_posterior(rng_key, params, *args)`"
            )
        return self._data

    def _flat(self, values: Mapping[str, Any]) -> Flat:
        position = self._unpack_latent(self._init_latent)
        missing = sorted(set(position) ^ set(values))
        if missing:
            raise ValueError(
                f"init_params must have unconstrained values for the sites {sorted(position)}, got "
                f"{sorted(values)}"
            )
        for name, value in position.items():
            if jnp.shape(values[name]) != value.shape:
                raise ValueError(
                    f"init_params[{name!r}] must have shape {value.shape}, got "
                    f"{jnp.shape(values[name])}"
                )
        parts = [jnp.ravel(jnp.asarray(values[n], v.dtype)) for n, v in position.items()]
        return jnp.concatenate(parts)

    def _targets(self, params: dict, args: tuple, kwargs: dict) -> tuple[Target, Target]:
        """The posterior with its Fisher form, and with the form that the metric is made of."""
        model, settings = self._bound_model(params), self._settings
        target = make_target(
            model, self._plan, args, kwargs, self._unpack_latent, self.latent_dim,
            structure=settings.structure,
        )  # fmt: skip
        if settings.metric != "empirical-fisher":
            return target, target
        empirical = make_target(
            model, self._plan, args, kwargs, self._unpack_latent, self.latent_dim,
            structure=settings.structure, empirical=True,
        )  # fmt: skip
        return target, empirical

    def _has_diagonal_prior(self, target: Target) -> bool:
        """Whether Q is diagonal: Q z is then Q 1 times z, entry by entry, for a random z."""
        if self._settings.prior_metric == "softabs":
            return False

        def gap(theta: Flat, z: Flat) -> jax.Array:
            product = prior_part(self._settings, target).product
            diagonal = product(theta, jnp.ones_like(theta))
            scale = jnp.max(jnp.abs(diagonal)) * jnp.max(jnp.abs(z))
            return jnp.max(jnp.abs(product(theta, z) - diagonal * z)) / scale

        key_theta, key_z = random.split(random.key(1))
        theta = self._init_latent + random.normal(key_theta, self._init_latent.shape) / 10
        z = random.normal(key_z, theta.shape, theta.dtype)
        return bool(jax.jit(gap)(theta.astype(z.dtype), z) < 1e-4)

    def _prepare(self, params: dict, data: Data) -> AtMode:
        def prepare(arrays: list, params: dict) -> AtMode:
            target, _ = self._targets(params, *data.build(arrays))
            return at_mode(self._settings, target, params[f"{self.prefix}_loc"])

        return self._jit("prepare", data, (), prepare)(data.arrays, params)

    def _check(self, prepared: AtMode, dtype: Any) -> None:
        """Refuse a precision or a prior part that is not positive definite."""
        if isinstance(prepared.smallest, jax.core.Tracer):
            return
        bend = np.abs(np.asarray(prepared.prior))
        if np.max(bend) > 1e3 * np.finfo(bend.dtype).eps:
            worst = self._unpack_latent(jnp.asarray(bend / np.max(bend)))
            sites = sorted(name for name, x in worst.items() if np.max(x) > 0.1)
            raise ValueError(
                "the Hessian of minus the log prior is not positive definite at the mode (its "
                f"most negative eigenvalue is {-np.linalg.norm(bend):.2g} of the largest), along "
                f"the sites {sites}: expected a log-concave prior. Use prior_metric='expected' or "
                "'softabs', or reparametrise these sites"
            )
        if prepared.factor.size == 0:
            return
        smallest, largest = float(prepared.smallest), float(prepared.largest)
        if not smallest > 0 or not np.all(np.isfinite(prepared.factor)):
            raise ValueError(
                f"the {self.settings['precision']} precision at the mode is not positive definite: "
                f"expected eigenvalues above 0, got a smallest of {smallest:.4g} (largest "
                f"{largest:.4g}). The position is a saddle or flat: use precision='fisher', "
                f"damping={max(1e-6 * abs(largest), -2 * smallest):.2g}, or search again with more "
                "`num_starts`"
            )
        if dtype == jnp.float32 and largest > ILL_CONDITIONED * smallest:
            warnings.warn(
                f"the precision has condition number {largest / smallest:.2g}, and float32 carries "
                f"{ILL_CONDITIONED:g}: expect many rejected steps and inexact draws. Use float64 "
                "(numpyro.enable_x64()) or standardise the inputs",
                SamplingWarning,
                stacklevel=3,
            )

    def _jit(self, name: str, data: Data, settings: tuple, fn: Callable) -> Callable:
        """Compile a function once for the same structure of the data."""
        key = (name, settings, data.signature, self._settings)
        if key not in self._programs:
            self._programs[key] = jax.jit(fn)
        return self._programs[key]

    def _draw_all(
        self,
        keys: jax.Array,
        params: dict,
        data: Data,
        log_weight: bool,
        chunk: int | None,
        progress_bar: bool,
    ) -> tuple[tuple[Geodesic, jax.Array], dict]:
        geodesics, weights = self._draw(
            keys, params, data, log_weight=log_weight, chunk=chunk, progress_bar=progress_bar
        )

        def constrain(arrays: list, params: dict, flat: Flat) -> dict:
            args, kwargs = data.build(arrays)
            model = SubsamplePlates(self._bound_model(params))

            def one(flat: Flat) -> dict:
                position = self._unpack_latent(flat)
                return constrain_fn(model, args, kwargs, position, return_deterministic=True)

            return lax.map(one, flat, batch_size=32)

        samples = self._jit("constrain", data, (), constrain)(
            data.arrays, params, geodesics.position
        )
        return (geodesics, weights), samples

    def _draw(
        self,
        keys: jax.Array,
        params: dict,
        data: Data,
        *,
        log_weight: bool,
        chunk: int | None,
        progress_bar: bool,
    ) -> tuple[Geodesic, jax.Array]:
        prepared = self._prepare(params, data)
        self._check(prepared, params[f"{self.prefix}_loc"].dtype)

        def gaussian(arrays: list, params: dict, prepared: AtMode, keys: jax.Array) -> tuple:
            target, _ = self._targets(params, *data.build(arrays))
            draw = gaussian_fn(self._settings, target, params[f"{self.prefix}_loc"], prepared)
            return jax.vmap(draw)(keys)

        def follow(
            arrays: list, params: dict, prepared: AtMode, draws: Flat, squares: jax.Array
        ) -> tuple[Geodesic, jax.Array]:
            target, own = self._targets(params, *data.build(arrays))
            end = end_fn(self._settings, target, own, params[f"{self.prefix}_loc"])

            def one(draw: Flat, square: jax.Array) -> tuple[Geodesic, jax.Array]:
                start = start_of(self._settings, prepared, draw, square)
                return draw_one(target, start, end, log_weight=log_weight)

            return jax.vmap(one)(draws, squares)

        if chunk is None:
            chunk = self._chunk_size(data, params, log_weight)
        count = keys.shape[0]
        chunk = max(1, min(chunk, count))
        if isinstance(keys, jax.core.Tracer) or isinstance(prepared.factor, jax.core.Tracer):

            def both(key: jax.Array) -> tuple[Geodesic, jax.Array]:
                first = gaussian(data.arrays, params, prepared, key[None])
                ends = follow(data.arrays, params, prepared, *first)
                return jax.tree.map(lambda x: x[0], ends)

            return lax.map(both, keys, batch_size=chunk)
        draw_program = self._jit("gaussian", data, (), gaussian)
        follow_program = self._jit("follow", data, (log_weight,), follow)
        pieces = [np.arange(i, i + chunk) % count for i in range(0, count, chunk)]  # equal shapes
        starts = [draw_program(data.arrays, params, prepared, keys[piece]) for piece in pieces]
        draws, squares = (jnp.concatenate(x)[:count] for x in zip(*starts, strict=True))
        # a chunk takes as long as its longest geodesic: short and long ones go apart
        order = np.argsort(np.asarray(squares), kind="stable")
        parts = []
        bar = tqdm(pieces, delay=5, disable=not progress_bar, desc="geodesics")
        for piece in bar:
            now = order[piece]
            part = follow_program(data.arrays, params, prepared, draws[now], squares[now])
            parts.append(jax.block_until_ready(part))
        back = np.argsort(order, kind="stable")
        return jax.tree.map(lambda *x: jnp.concatenate(x)[:count][back], *parts)

    def _chunk_size(self, data: Data, params: dict, log_weight: bool) -> int:
        target, _ = self._targets(params, *data.build(data.arrays))
        rows, settings = target.num_outputs, self._settings
        if self._batch_size is not None or self._plan.batch_sizes:
            rows = min(rows, CHUNK_ROWS)
        entries = 20 * target.size + 20 * rows
        if settings.needs_outputs and choose_solver(settings, target) != "cg":
            fast = settings.structure.affine and settings.structure.diagonal
            entries += (0 if fast else rows * target.size) + target.size**2
        if log_weight:
            entries *= target.size + 1
        return int(np.clip(CHUNK_ENTRIES // entries, 1, MOST_AT_ONCE))

    def _warn_failed(self, geodesics: Geodesic) -> None:
        failed = int(np.sum(~np.asarray(geodesics.success)))
        if failed:
            total = geodesics.success.shape[0]
            why = f"no end within max_steps={self._settings.max_steps}, or not finite"
            if self._settings.metric == "monge-log":
                why += ", or a logarithmic map that did not converge"
            warnings.warn(
                f"{failed} of {total} geodesics failed: {why}. These draws are where the solver "
                "stopped, and `draw(...).success` tells which; leaving them out biases the rest. "
                "Raise max_steps, loosen rtol, standardise the inputs, or use metric='fisher'",
                SamplingWarning,
                stacklevel=3,
            )


def _needs_nothing(model: Callable) -> bool:
    """Whether a model can be called without arguments."""
    try:
        inspect.signature(model).bind()
    except (TypeError, ValueError):
        return False
    return True
