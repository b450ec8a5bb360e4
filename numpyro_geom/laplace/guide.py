"""RiemannianLaplace: a Laplace approximation that follows the geodesics of a metric.

The guide passes the posterior to pure functions, each compiled once: `fit` finds modes and
computes what is needed at a mode, `draw` draws, and `predictive` predicts.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.autoguide import AutoContinuous

from .._checks import (
    check_arguments,
    check_flag,
    check_int,
    check_key,
    check_model,
    warn_outside,
)
from .._util import LANES, at_once, in_trace, is_traced
from ..model.arguments import differentiated, on_device
from ..model.arrowhead import ArrowRoot, Layout, find_layout
from ..model.bad_rows import check_finite
from ..model.jaxprs import lean_options
from ..model.minibatch import SubsamplePlates
from ..model.model import Model, read
from ..model.potential import in_coordinates
from ..model.start import as_position, some_rows, with_params, wrong_lane
from . import draw as drawing
from .draw import LaplaceDraws
from .fit import (
    CONVERGED,
    NEARER_STEPS,
    FitReport,
    at_law,
    at_mode,
    best_run,
    check_definite,
    find_mode,
    half_log_det,
    nearest_law,
    num_lanes,
    value_and_slope,
    warn_of_mode,
)
from .geodesic import Geodesic, RiemannianMetric
from .information.form import Flat, Structure
from .metrics import learn
from .predictive import FlatPosterior, Predictions, predict, predicted
from .settings import LaplaceSettings

PARAMS = ("param", "mutable")
SUMMARY_DRAWS = 2000
"""Number of draws for `median` and `quantiles`."""


class RiemannianLaplace(AutoContinuous):
    """Laplace approximation whose draws follow geodesics of a metric. Approximate.

    A draw starts at a mode theta^ with a Gaussian velocity and follows a geodesic for unit time::

        v ~ N(m, P^-1),    theta'' = -G^-1 [(d_v G) v - grad (v'G v) / 2],    theta = theta(1)

    The mode, P and the metric G belong to the unconstrained space, with the log-Jacobians of the
    transforms. They use all rows of the data, even if the model subsamples.

    ========================  ==============================================  ====================
    ``metric``                G                                               cost per evaluation
    ========================  ==============================================  ====================
    ``"euclidean"``           I: theta = theta^ + v                           none
    ``"monge"``               I + alpha2 g g', g the gradient of U            about 3 gradients
    ``"monge-log"``           the same, v through a logarithmic map           the same, and the map
    ``"fisher"``              Fisher information + prior part                 about 5 gradients, and
                                                                              a solve with G
    function of the position  its value, shape (D, D)                         autodiff, and a solve
    `RiemannianMetric`        your own, by its solves and forces              your own
    ========================  ==============================================  ====================

    Distribution of the draws: a Gaussian bent along the metric, which is not the posterior.
    ``"fisher"`` from the Hausdorff mode is exact if the posterior is a Gaussian seen through a
    change of coordinates that has this metric. ``"monge-log"`` is exact for Gaussians. ``"monge"``
    is too narrow even for Gaussians (Wasserstein-1 distance of a coordinate of N(0, I_D): 0.111 at
    D = 1, 0.271 at D = 10). ``"euclidean"`` uses only the curvature at the mode.
    Where the rows leave a scale open, the draws are wrong also by default: in calibration by
    simulation the sds of a scale near its bound (10 rows), of a mixture, and of the scales of a
    centred hierarchy and a random walk were 0.63 to 0.75 of the right ones.
    `draw` with ``log_weight=True`` shows how far to trust the draws. Its weights turn them into
    draws of the posterior if ``pareto_k`` is below min(1 - 1 / log10(draws), 0.7) and the
    exponential map is one to one. m is 0 except with ``mode="mean"``.

    Take ``"monge"`` if solves with the Fisher metric are too expensive. ``settings`` has the choice
    for each ``"auto"`` after `fit`.

    Args:
        model: a NumPyro model with continuous latent sites, the same one as for `MCMC`.
        metric: see the table. ``"auto"`` for ``"fisher"``, or ``"euclidean"`` in models whose only
            data are in ``numpyro.factor``, and above 200 dimensions in models with groups. A
            function gets the dict of unconstrained site values and returns G. Rows and columns of G
            are the flattened sites, in the order of the model. A
            `numpyro_geom.laplace.RiemannianMetric` works on vectors in that order.
        mode: ``"euclidean"`` for the maximum of the density. ``"hausdorff"`` for the maximum of the
            density over sqrt(det G), where G is the Fisher metric for any ``metric``. ``"mean"``
            starts at the Hausdorff mode with a nonzero mean m of the velocities: the draws then
            have the posterior's mean, to first order. With the metric ``"euclidean"`` and a model
            with groups or a series, it is the normal law N(m, L L') that is nearest to the
            posterior in Kullback-Leibler divergence, with sparse L at any D; only `fit` finds it.
            ``"auto"`` for ``"mean"`` with the metric ``"fisher"`` and the expected prior part up to
            200 dimensions, for this law above if there are groups, else ``"euclidean"``.
        precision: P: ``"hessian"`` of U at the mode, or ``"fisher"``, the Fisher metric at the
            mode. ``"auto"`` for ``"hessian"`` with a Euclidean mode up to 2,000 dimensions, else
            ``"fisher"``.
        prior_metric: prior part of the Fisher metric. ``"hessian"``: the Hessian of minus the log
            prior; geodesics fail where G is indefinite. ``"expected"``: the expectation of this
            Hessian, block by block, positive definite also for hierarchies. ``"auto"`` for
            ``"hessian"`` in models with a ``numpyro.factor``, which the expectation does not
            contain, else ``"expected"``.
        solver: solver of systems with the Fisher metric. ``"cholesky"`` forms G (up to 2,000
            dimensions), ``"cg"`` only needs products. Both give the same draws. ``"auto"`` forms
            G if there are up to 200 dimensions or outputs, and in generalised linear models.
        alpha2: scale of the gradient in Monge's metric.
        damping: multiple of I that is added to P.
        batch_size: plates whose rows a pass over the data may take in parts, named as in the
            kernels: an int for the only plate with observed rows, or a dict plate -> int. A part
            has up to 8,192 rows for any such number. This bounds memory and changes no result.
        rtol: relative tolerance of the geodesic's solver (Dormand-Prince, diffrax).
        atol: absolute tolerance of this solver.
        max_steps: steps after which a geodesic is given up, and flagged.
        prefix: prefix of the names of the guide's parameters.
        init_loc_fn: NumPyro's strategy for where the search for a mode starts.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range, and discrete latent sites; from `fit` and the draws
            for a precision that is not positive definite, and too many dimensions for the settings.
        RuntimeError: without training data, and if no search for a mode ends at finite values.

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
        Bayesian neural networks", NeurIPS 2023 (``"monge"``, RLA-B). Ours are the metric computed
        from the model, the check of each logarithmic map, weights and ``mode="mean"``.
    """

    prototype_trace: Any

    def __new__(cls, *args: Any, **arguments: Any) -> Self:  # noqa: D102
        check_arguments(cls, args, arguments)
        return super().__new__(cls)

    model: Any

    def __init__(
        self,
        model: Callable,
        metric: Literal["auto", "euclidean", "monge", "monge-log", "fisher"]
        | Callable
        | RiemannianMetric = "auto",
        *,
        mode: Literal["auto", "euclidean", "hausdorff", "mean"] = "auto",
        precision: Literal["auto", "hessian", "fisher"] = "auto",
        prior_metric: Literal["auto", "hessian", "expected"] = "auto",
        solver: Literal["auto", "cholesky", "cg"] = "auto",
        alpha2: float = 1.0,
        damping: float = 0.0,
        batch_size: int | Mapping[str, int] | None = None,
        rtol: float = 1e-3,
        atol: float = 1e-6,
        max_steps: int = 4096,
        prefix: str = "auto",
        init_loc_fn: Callable = init_to_uniform,
    ) -> None:
        check_model("model", model)
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, got {type(prefix).__name__}")
        settings = LaplaceSettings(
            *(metric, mode, precision, prior_metric, solver, alpha2, damping),
            *(batch_size, rtol, atol, max_steps),
        )
        self._given = self.settings = settings
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)
        self.fit_report: FitReport | None = None
        self._told = False  # whether the user knows how near the draws are
        self._data: Model | None = None
        self._layout: Layout | None = None
        self._learned: dict[str, Any] = {}
        self._programs: dict = {}

    @property
    def sample_field(self) -> str:  # noqa: D102 (`MCMC` reads it first: here it ends with advice)
        raise AttributeError(
            "expected a kernel, got RiemannianLaplace, a guide: call params = guide.fit(rng_key, "
            "*args) and guide.sample_posterior(rng_key, params, sample_shape=(1000,)), or use "
            "MCMC(SGRLD(model), ...)"
        )

    def fit(
        self,
        rng_key: jax.Array,
        *args: Any,
        num_starts: int = 4,
        max_steps: int = 2000,
        init_params: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Find the mode by L-BFGS from several starts.

        A best run that rounding has stopped early ends with Newton steps in the metric of P.

        A nearest normal law is found from the first start: by Adam, then by rounds of Newton steps.

        Args:
            rng_key: for the starts.
            args: the model's arguments.
            num_starts: number of runs, from positions of ``init_loc_fn``. The best finite run
                counts.
            max_steps: L-BFGS steps per run.
            init_params: unconstrained site values to start from, in a single run. With
                ``max_steps=0`` these values are taken as the mode.
            kwargs: the model's keyword arguments.

        Returns:
            Parameters for `sample_posterior` and the other methods: ``{prefix}_loc``, shape (D,),
            and the values of the model's `param` sites. For a nearest normal law also
            ``{prefix}_root``, whose ``times`` is L. ``guide.fit_report`` describes every run.

        Raises:
            RuntimeError: if no run ends at finite values.
            SamplingWarning: (a warning) about a run that has not converged, and about a poor mode.
            UserWarning: (a warning) about `param` sites at random values, which only SVI trains.
        """
        check_key("rng_key", rng_key)
        num_starts = check_int("num_starts", num_starts)
        max_steps = check_int("max_steps", max_steps, least=0)
        starts = self._starts(rng_key, num_starts, init_params, args, kwargs)
        with_params(self._read, {})  # which warns
        data, params = self._captured(), dict(self._read.fixed)
        if self._layout is not None:
            static = {"layout": self._layout, "searching": max_steps > 0}
            key = random.key_data(rng_key)
            loc, root, *found = self._run(nearest_law, data, params, starts[0], key, **static)
            value, norm = (np.asarray(x)[None] for x in found)
            self.fit_report = FitReport(value, norm, np.zeros(1, int), ("best",), np.nan)
            return params | {f"{self.prefix}_loc": loc, f"{self.prefix}_root": root}
        evaluate = partial(self._run, value_and_slope, data, params)
        runs = [find_mode(evaluate, start, max_steps) for start in starts]
        _, values, norms, steps = map(np.asarray, zip(*runs, strict=True))
        best, status = best_run(values, norms)
        params[f"{self.prefix}_loc"] = loc = jnp.asarray(runs[best][0])
        at = self._run(at_mode, data, params)
        for _ in range(NEARER_STEPS if max_steps > 0 else 0):
            if at.distance**2 < CONVERGED:
                break
            nearer = params | {f"{self.prefix}_loc": loc + at.left}
            there = self._run(at_mode, data, nearer)
            if not there.distance < at.distance / 2:
                break
            params, at, loc = nearer, there, loc + at.left
        self.fit_report = FitReport(values, norms, steps, status, float(at.distance))
        check_definite(self.settings, at, loc)
        self._told = warn_of_mode(self.fit_report, at, self._unpack_latent)
        return params

    def draw(
        self,
        rng_key: jax.Array,
        params: dict[str, jax.Array],
        *args: Any,
        sample_shape: int | tuple[int, ...] = (),
        log_weight: bool = False,
        progress_bar: bool = True,
        **kwargs: Any,
    ) -> LaplaceDraws:
        """Draws with an account of each: success, evaluations, and importance weights.

        Args:
            rng_key: for the draws.
            params: from `fit` or SVI.
            args: the training data; without any, the data of `fit` or SVI.
            sample_shape: leading dimensions, such as ``(chains, draws)``.
            log_weight: whether to compute importance weights, at D + 1 times the cost; with the
                metric ``"euclidean"`` at one evaluation of U.
            progress_bar: whether to show a progress bar on work of more than five seconds.
            kwargs: the training data by name.

        Raises:
            SamplingWarning: (a warning) if geodesics were not followed to their end, whose draws
                are NaN; if the weights cannot correct the draws; and, once after `fit`, if
                gradients at draws without weights show that a mean is off by a quarter of an sd, or
                a variance by a quarter.
            UserWarning: (a warning) if the draws may take more than a minute.
        """
        check_key("rng_key", rng_key)
        check_flag("log_weight", log_weight)
        given = sample_shape if isinstance(sample_shape, (tuple, list)) else (sample_shape,)
        shape = tuple(check_int("sample_shape", n, least=0) for n in given)
        data = self._training_data(params, args, kwargs)
        count = int(np.prod(shape))
        keys = random.split(rng_key, count) if shape else rng_key[None]
        begin = time.perf_counter()
        ends, weights = self._geodesics(keys, params, data, log_weight, progress_bar)
        samples = self._run(drawing.constrain, data, params, ends.position)
        ends = jax.block_until_ready(ends)
        seconds = (time.perf_counter() - begin) / max(count, 1)
        known = weights if log_weight else None
        within = is_traced(ends)
        pareto_k = drawing.pareto_shape(np.asarray(known)) if log_weight and not within else None
        found, model = (samples, *ends, known), self._posterior(params, data).model
        source = model.runnable, model.args, model.kwargs, self.settings.record()
        if count and not within:  # by name, because reports are above guides
            after_draws = import_module("numpyro_geom.diagnostics.inference_data").after_draws
            draws = LaplaceDraws._make((*found, pareto_k, seconds, *source))
            self._told = after_draws(draws, gradients=not self._told)
        found = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)
        return LaplaceDraws._make((*found, pareto_k, seconds, *source))

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: dict[str, jax.Array],
        *args: Any,
        sample_shape: int | tuple[int, ...] = (),
        resample: bool = False,
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Values of all sites, as in `draw`, which documents the other arguments.

        Args:
            rng_key: for the draws.
            params: from `fit` or SVI.
            args: the training data; without any, the data of `fit` or SVI.
            sample_shape: leading dimensions.
            resample: whether to resample draws by their importance weights, see
                `LaplaceDraws.resample`. If ``pareto_k`` is small, they are then draws of the
                posterior. This takes D + 1 times the cost.
            kwargs: the training data by name.

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
            args: the training data; without any, the data of `fit` or SVI.
            kwargs: the training data by name.

        Returns:
            Site name -> array with the dimension of ``quantiles`` first.
        """
        shape = (SUMMARY_DRAWS,)
        draws = self.draw(random.key(0), params, *args, sample_shape=shape, **kwargs)
        probabilities = jnp.asarray(quantiles, jnp.result_type(float))
        return jax.tree.map(lambda x: jnp.quantile(x, probabilities, axis=0), draws.samples)

    def predictive(
        self,
        rng_key: jax.Array,
        params: dict[str, jax.Array],
        *args: Any,
        num_samples: int = 1000,
        linearized: bool = False,
        progress_bar: bool = True,
        **kwargs: Any,
    ) -> Predictions:
        """Predict new rows, from draws given the training data.

        The observed sites' distributions have parameters, such as the outputs of a network.
        ``linearized=True`` replaces these parameters by their first-order expansion in the latent
        sites around the mode. This corrects the Euclidean approximation of networks, whose
        straight draws leave the region where the network fits (Immer, Korzepa and Bauer,
        "Improving predictions of Bayesian neural nets via local linearization", AISTATS 2021).
        Parameters with bounds are expanded in an unbounded form: a scale in its logarithm.

        Args:
            rng_key: for the draws and the samples of the observed sites.
            params: from `fit` or SVI.
            args: the model's arguments with the new rows.
            num_samples: number of draws.
            linearized: see above.
            progress_bar: as for `draw`.
            kwargs: the model's keyword arguments with the new rows.

        Raises:
            ValueError: if a parameter to be linearised has no unconstrained form.
        """
        num_samples = check_int("num_samples", num_samples)
        check_flag("linearized", linearized)
        key_draw, key_sites = random.split(rng_key)
        draws = self.draw(
            key_draw, params, sample_shape=(num_samples,), progress_bar=progress_bar
        ).unconstrained
        data = self._with_data(args, kwargs)
        given = self._posterior(params, data), params[f"{self.prefix}_loc"]
        one = partial(predicted(*given, linearized=linearized), key_sites)
        rows = max(x.size for x in jax.tree.leaves(jax.eval_shape(one, draws[0])))
        static = {"linearized": linearized, "lanes": LANES}
        if wrong_lane((one,), draws[:LANES], [rows]):
            static["lanes"] = 1
        return self._run(predict, data, params, key_sites, draws, **static)

    # As NumPyro uses guides

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in vars(self.settings).items())
        return f"{type(self).__name__}({getattr(self.model, '__name__', self.model)}, {arguments})"

    def __getstate__(self) -> dict:
        # NumPyro orders the leaves of a distribution anew in every process, and the structure
        # counts the leaves: without it programs are slower and give the same results
        learned = self._learned | {"structure": Structure()}
        state = super().__getstate__() | {"_programs": {}, "_learned": learned}
        # copies without the functions that a model has made of its arguments
        return {k: v.replace() if isinstance(v, Model) else v for k, v in state.items()}

    @differentiated()
    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with handlers.block():
            model = read(self.model, args, kwargs, batch_size=self.settings.batch_size, sums=False)
        if model.plan.is_random:
            raise ValueError(
                "the model asks for a random key (numpyro.prng_key, as dropout does), and a mode "
                "belongs to one energy: leave the randomness out, or use SGRLD, SGHMC or SGNHT"
            )
        args, kwargs = model.args, model.kwargs
        self._prototype(model)
        params = {n: s["value"] for n, s in self.prototype_trace.items() if s["type"] in PARAMS}
        self._read = model = model.replace(fixed=params)
        self._layout = None
        if self._given.wants_law(self.latent_dim):
            sites = self._unpack_latent(self._init_latent)
            self._layout = find_layout(
                in_coordinates(model.potential(), self._unpack_latent),
                model.plan.sites,
                {name: x.shape for name, x in sites.items()},
                self._init_latent.dtype,
            )
        self.settings = self._given.resolve(
            self.latent_dim,
            has_factor=bool(model.of_kind("factor")),
            has_observed=bool(model.of_kind("observed")),
            has_law=self._layout is not None,
        )
        self._data, self._learned = None, {}
        if is_traced((args, kwargs, self._init_latent)):
            self._read = model.replace(args=(), kwargs={})
            return
        self._data = model
        posterior = self._posterior({}, model)
        with handlers.block(), at_once():
            posterior = replace(posterior, lanes=num_lanes(posterior, self._init_latent))
            if self._layout is None:
                posterior = learn(posterior, self._init_latent)
        learned = ("structure", "diagonal_prior", "lanes")
        self._learned = {name: getattr(posterior, name) for name in learned}

    def _prototype(self, model: Model) -> None:
        """NumPyro's look at a model: on some rows, unless deterministic sites need all."""
        fn: Any = self.model
        rows = {} if model.of_kind("deterministic") else some_rows(model.plan)
        self.model = SubsamplePlates(fn, rows) if rows else fn
        try:
            super()._setup_prototype(*model.args, **model.kwargs)
        except ValueError:  # NumPyro's error does not name the argument
            check_finite(fn, model.args, model.kwargs)
            raise
        finally:
            self.model = fn

    def _sample_latent(self, *args: Any, **kwargs: Any) -> jax.Array:
        kwargs.pop("sample_shape", None)
        loc = numpyro.param(f"{self.prefix}_loc", self._init_latent)
        latent, log_density = loc, jnp.zeros(())
        params = {f"{self.prefix}_loc": loc}
        if self._layout is not None:
            params[f"{self.prefix}_root"] = numpyro.param(f"{self.prefix}_root", _no_root)
        if numpyro.get_mask() is False:  # Predictive wants draws
            key = numpyro.prng_key()[None]
            with handlers.block():
                if not self._told and not is_traced((params, self._captured().arrays)):
                    self._look_at(params)
                geodesics, _ = self._geodesics(key, params, self._captured(), False, False)
            latent = geodesics.position[0]
        elif self.settings.mode != "euclidean":
            with handlers.block():
                posterior = self._posterior({}, self._with_data(args, kwargs))
                log_density = half_log_det(posterior, loc)
        return numpyro.sample(
            f"_{self.prefix}_latent",
            dist.Delta(latent, log_density=log_density, event_dim=1),
            infer={"is_auxiliary": True},
        )

    def _look_at(self, params: dict) -> None:
        """Draw for the warnings alone. Another thread is outside of the caller's transformation."""

        def look() -> None:
            self.draw(random.key(0), params, sample_shape=(200,), progress_bar=False)

        with warnings.catch_warnings(record=True) as told, ThreadPoolExecutor(1) as pool:
            warnings.simplefilter("always")
            pool.submit(look).result()
        for x in told:
            warn_outside(str(x.message), x.category)

    def _get_posterior(self) -> Any:
        """Raise: there is no distribution in closed form."""
        raise NotImplementedError(
            "a RiemannianLaplace guide has no distribution in closed form: use `sample_posterior`"
        )

    get_base_dist = _get_posterior

    # The model, its data and compiled functions of them

    def _starts(
        self, rng_key: jax.Array, num_starts: int, init: Mapping | None, args: tuple, kwargs: dict
    ) -> Flat:
        """Bind the model again; returns positions of ``init_loc_fn``, or the given position."""
        keys = random.split(rng_key, num_starts)
        self.prototype_trace = None
        with handlers.seed(rng_seed=keys[0]):
            self._setup_prototype(*args, **kwargs)
        if init is not None:
            latent = self._unpack_latent(self._init_latent)
            found = as_position(init, latent, self.model, (), {}, batched=False, constrained=False)
            return jnp.concatenate([jnp.ravel(x) for x in found.values()])[None]
        starts = [self._init_latent]
        for key in keys[1:]:
            with handlers.seed(rng_seed=key):
                self._prototype(self._with_data(args, kwargs))
            starts.append(self._init_latent)
        return jnp.stack(starts)

    def _posterior(self, params: dict, model: Model) -> FlatPosterior:
        """The model with its `param` sites at the given values, or at the prototype's values."""
        fixed = {name: params.get(name, value) for name, value in model.fixed.items()}
        given = (self._unpack_latent, self.latent_dim, self.settings)
        return FlatPosterior(model.replace(fixed=fixed), *given, **self._learned)

    def _with_data(self, args: tuple, kwargs: dict) -> Model:
        """The model with other arguments."""
        args, kwargs = on_device(args, kwargs)
        return self._read.replace(args=args, kwargs=kwargs)

    def _captured(self) -> Model:
        """The model with the data of `fit` or SVI."""
        if self._data is None:
            raise RuntimeError(
                "the guide does not know the training data: expected a call of `fit`, of SVI "
                "outside of jit, or the model's arguments, as in "
                "`guide.sample_posterior(rng_key, params, *args)`"
            )
        return self._data

    def _training_data(self, params: Mapping, args: tuple, kwargs: dict) -> Model:
        """The model with the given data or the data of `fit`, if the parameters have a mode."""
        given = bool(args or kwargs)
        if self.prototype_trace is None and (given or _needs_nothing(self.model)):
            with handlers.seed(rng_seed=0):
                self._setup_prototype(*args, **kwargs)
        data = self._with_data(args, kwargs) if given else self._captured()
        if not isinstance(params, Mapping) or f"{self.prefix}_loc" not in params:
            got = [*params] if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(
                f"expected params with {self.prefix + '_loc'!r}, as `fit` returns them, got {got}"
            )
        return data

    @differentiated()
    def _run(self, fn: Callable, model: Model, params: dict, *inputs: Any, **static: Any) -> Any:
        """``fn(posterior, loc, *inputs, **static)``, compiled once for each structure."""
        learned, chosen = tuple(self._learned.items()), tuple(static.items())
        given = model.arrays, {**model.fixed, **params}, *inputs
        within = in_trace(given)
        options = None if within else lean_options()
        given_by_user = vars(self.settings) | {"batch_size": None}
        key = (fn, chosen, model.signature, learned, *given_by_user.values(), options is None)
        if key not in self._programs:

            def program(arrays: list, params: dict, *inputs: Any) -> Any:
                posterior = self._posterior(params, model.with_arrays(arrays))
                loc = params.get(f"{self.prefix}_loc")
                return fn(posterior, loc, *inputs, **static)

            self._programs[key] = jax.jit(program, compiler_options=options)
        return self._programs[key](*given)

    def _geodesics(
        self,
        keys: jax.Array,
        params: dict,
        data: Model,
        log_weight: bool,
        progress_bar: bool,
    ) -> tuple[Geodesic, jax.Array]:
        loc, root = params[f"{self.prefix}_loc"], params.get(f"{self.prefix}_root")
        at = self._run(at_mode, data, params) if root is None else at_law(root)
        posterior = self._posterior(params, data)
        chunk = max(1, min(drawing.chunk_size(posterior, log_weight=log_weight), keys.shape[0]))
        traced = is_traced(at.factor)
        if not (traced or isinstance(at.factor, ArrowRoot)):
            check_definite(self.settings, at, loc)
        if traced or is_traced(keys):
            given = posterior, loc, at

            def one(key: jax.Array) -> tuple[Geodesic, jax.Array]:
                first = drawing.gaussian(*given, key[None])
                ends = drawing.follow(*given, *first, log_weight=log_weight)
                return jax.tree.map(lambda x: x[0], ends)

            return lax.map(one, keys, batch_size=chunk)

        def follow(draws: jax.Array, squares: jax.Array, max_steps: int) -> tuple:
            static = {"log_weight": log_weight, "max_steps": max_steps}
            return self._run(drawing.follow, data, params, at, draws, squares, **static)

        count = keys.shape[0]
        parts = [keys[piece] for piece in drawing.pieces(count, chunk)]
        starts = [self._run(drawing.gaussian, data, params, at, part) for part in parts]
        draws, squares = (jnp.concatenate(x)[:count] for x in zip(*starts, strict=True))
        most = self.settings.max_steps
        return drawing.follow_in_chunks(
            *(follow, draws, squares, chunk, most), progress_bar=progress_bar
        )


def _no_root(rng_key: jax.Array) -> Any:
    raise RuntimeError(
        "SVI finds a mode, and these settings take the normal law nearest to the posterior: use "
        "`guide.fit`, or mode='euclidean' with SVI"
    )


def _needs_nothing(model: Callable) -> bool:
    """Whether a model can be called without arguments."""
    try:
        inspect.signature(model).bind()
    except (TypeError, ValueError):
        return False
    return True
