"""Export of a run to ArviZ: InferenceData under ArviZ 0.2x, a DataTree under ArviZ 1.x.

Groups are built as xarray datasets, which both lines of ArviZ share; only `_container`
knows which of them is installed. Everything that needs the data replays the model on all rows,
in chunks, whatever the sampler subsampled.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import xarray as xr
from numpyro.infer import MCMC
from numpyro.primitives import Messenger
from numpyro.util import is_prng_key

from .._checks import check_flag, check_int
from ..laplace.draws import LaplaceDraws
from .replay import (
    Arrays,
    Model,
    host,
    is_numeric,
    latent_draws,
    observed_values,
    pointwise_log_prob,
    predictive_values,
    read_model,
)
from .results import of_draws, of_mcmc, paths, warn_if_far
from .summary import check_run, warn_if_unreliable
from .temperature import gradients_at_draws

MAX_CONSTANT_SIZE = 10**6
"""Entries up to which an argument of the model is stored without being asked for."""

SAMPLE_DIMS = ["chain", "draw"]


def to_inference_data(
    mcmc: MCMC | LaplaceDraws,
    *,
    log_likelihood: bool | str | Sequence[str] = False,
    gradients: bool = False,
    posterior_predictive: bool | Mapping[str, Any] | None = None,
    prior: bool | Mapping[str, Any] | None = None,
    constant_data: bool | Mapping[str, Any] | None = None,
    coords: Mapping[str, Sequence] | None = None,
    dims: Mapping[str, Sequence[str | None]] | None = None,
    rng_key: jax.Array | None = None,
    num_samples: int = 500,
    chunk_size: int | None = None,
) -> Any:
    """Put a finished run, or the draws of a guide, into the form that ArviZ works on.

    Any kernel of NumPyro will do, and so will what `RiemannianLaplace.draw` returns. Groups:

    - ``posterior``: draws of latent and deterministic sites, in the model's own space. With
      ``potential_fn`` the entries of ``z``: an array is called ``z``, the leaves of other pytrees
      are named by their path.
    - ``sample_stats``: ``diverging``, ``energy`` (U in nats where the last step of a draw
      started, a minibatch estimate if rows were drawn), ``lp`` (its negative), ``step_size``,
      ``n_steps``, ``grad_norm``, ``configurational_temperature``, ``kinetic_temperature`` for
      kernels with a momentum, ``acceptance_rate`` for kernels with a Metropolis test, and every
      array among the run's ``extra_fields``. Of a guide's draws: ``success``, whether the geodesic
      was followed to its end; ``n_fevals``, evaluations of its acceleration; and ``log_weight``,
      log target minus log density of the draw up to a constant, where it was asked for. There is
      no ``lp``, which would take a pass over the data for each draw.
    - ``observed_data``: the values of observed sites, all rows.
    - ``constant_data``: the other array arguments of the model.
    - ``log_likelihood``: log p(row | draw) of every row under every draw, on the full data. As
      in `numpyro.infer.log_likelihood` a masked row has 0, and the factors of ``scale``
      handlers and of plates are left out.
    - ``unconstrained_posterior``: on request, of each latent site ``w`` the unconstrained values
      ``z.w`` and the gradients ``grad_U.w`` there, on the full data.
    - ``posterior_predictive``, ``prior``, ``prior_predictive``: on request.

    A site in a plate has the plate's name as a dimension, with coordinates 0, 1, ...; other axes
    are called ``<site>_dim_0`` and so on, or as the model says in ``infer={"event_dims": ...}``.
    A plate with the name of a variable gets ``_dim`` appended, and ``/`` in names becomes ``.``
    (netCDF reserves it). The attributes of ``posterior`` hold kernel, settings, N, batch sizes,
    seeds, what warm-up has measured, and versions; or guide, settings, ``seconds_per_draw`` and
    ``pareto_k``. All of it can be written to netCDF.

    A guide's draws are independent, and of an approximation: ``posterior`` holds them as they are,
    without weights. ArviZ's R-hat and effective sample sizes tell nothing of its error, and
    ``az.loo`` takes them for draws of the posterior.

    Args:
        mcmc: a run `numpyro.infer.MCMC`, or a guide's `LaplaceDraws`, drawn with
            ``sample_shape=(chains, draws)``, or ``(draws,)`` for one chain.
        log_likelihood: True for all observed sites, or names of some (the only way for a
            ``numpyro.factor`` site to get in). Size: chains x draws x rows.
        gradients: True for gradients of U on all rows at the draws, from which
            `numpyro_geom.diagnostics.diagnose` tells errors of means and standard deviations.
        posterior_predictive: True to draw observed sites anew for each posterior draw (needs
            ``rng_key``), or draws by name, shaped (chains, draws, ...) or (chains * draws, ...).
        prior: True to draw ``num_samples`` times from the prior (needs ``rng_key``), or draws by
            name, shaped (draws, ...) or (chains, draws, ...); those of observed sites go to
            ``prior_predictive``.
        constant_data: True for all array arguments, False for none, None for those of up to
            a million entries; or arrays by name. An argument that holds the values of an
            observed site is not stored a second time.
        coords: labels of dimensions, by name; in place of 0, 1, ...
        dims: names of a variable's dimensions after chain and draw, by variable; in place of
            those from plates. None, or a list that is too short, leaves the rest as it was.
        rng_key: a key for what is drawn.
        num_samples: draws from the prior.
        chunk_size: pointwise values, rows times draws, that the device holds at once. None for
            262,144, or fewer if the model's temporary arrays then exceed 256 MiB. Where the
            model does not index its data by the plate, a chunk has at least all rows of a draw.

    Returns:
        An ``arviz.InferenceData`` under ArviZ 0.2x, an ``xarray.DataTree`` under ArviZ 1.x.

    Raises:
        TypeError: if ``mcmc`` is neither of the two, and for other arguments of the wrong type.
        ValueError: if it has not run; for a guide's draws with no dimension, none in one, or more
            than two; if the model that a group needs, a key, or the draws of a site are missing;
            for unknown sites; for labels that do not fit.

    Warns:
        SamplingWarning: see `numpyro_geom.diagnostics.warn_if_unreliable`; for a guide's draws
            where geodesics failed and where ``pareto_k`` is 0.7 or more.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_geom import to_inference_data
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=50, progress_bar=False)
        >>> y = 3 + jax.random.normal(jax.random.key(1), (20,))
        >>> mcmc.run(jax.random.key(0), y)
        >>> idata = to_inference_data(mcmc, log_likelihood=True)
        >>> idata.log_likelihood["y"].dims
        ('chain', 'draw', 'data')

        From a guide:

        >>> from numpyro_geom import RiemannianLaplace
        >>> guide = RiemannianLaplace(model, metric="euclidean")
        >>> params = guide.fit(jax.random.key(2), y)
        >>> draws = guide.draw(jax.random.key(3), params, sample_shape=(4, 50))
        >>> idata = to_inference_data(draws, log_likelihood=True)
        >>> idata.sample_stats["success"].dims
        ('chain', 'draw')
        >>> idata.posterior.attrs["metric"]
        'euclidean'
    """
    _check_source(mcmc)
    if chunk_size is not None:
        chunk_size = check_int("chunk_size", chunk_size)
    num_samples = check_int("num_samples", num_samples)
    for name, value in (("coords", coords), ("dims", dims)):
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict, got {type(value).__name__}")
    results = of_draws(mcmc) if isinstance(mcmc, LaplaceDraws) else of_mcmc(mcmc)
    model = None
    if results.model is not None:
        model = read_model(results.model, results.args, results.kwargs)
    pointwise = _pointwise_sites(model, log_likelihood)
    if check_flag("gradients", gradients) and (model is None or not results.targets_model):
        raise ValueError(
            "gradients=True needs a kernel with a model whose posterior is the target: not "
            "potential_fn, and not an expansion with target='factors'"
        )
    _check_request("posterior_predictive", posterior_predictive, model, rng_key)
    _check_request("prior", prior, model, rng_key)
    if isinstance(mcmc, LaplaceDraws):
        warn_if_far(mcmc)
    else:
        warn_if_unreliable(mcmc)

    posterior = results.posterior
    shape = next(iter(posterior.values())).shape[:2]
    observed = {} if model is None else observed_values(model)
    groups: dict[str, Arrays] = {
        "posterior": posterior,
        "sample_stats": results.sample_stats,
        "observed_data": observed,
        "constant_data": _constants(model, constant_data, observed),
    }
    if model is not None and pointwise:
        found = pointwise_log_prob(model, latent_draws(model, posterior), pointwise, chunk_size)
        groups["log_likelihood"] = {n: x.reshape((*shape, *x.shape[1:])) for n, x in found.items()}
    if model is not None and gradients:
        groups["unconstrained_posterior"] = gradients_at_draws(model, posterior)
    if model is not None and posterior_predictive is True:
        draws, names = latent_draws(model, posterior), model.of_kind("observed")
        found = predictive_values(model, draws, shape[0] * shape[1], names, rng_key, chunk_size)
        posterior_predictive = {n: x.reshape((*shape, *x.shape[1:])) for n, x in found.items()}
    if model is not None and prior is True:
        names = model.of_kind("latent", "deterministic", "observed")
        prior = predictive_values(model, {}, num_samples, names, rng_key, chunk_size)
    if isinstance(posterior_predictive, Mapping):
        groups["posterior_predictive"] = _by_chain(posterior_predictive, shape)
    if isinstance(prior, Mapping):
        groups["prior"], groups["prior_predictive"] = _split_prior(model, prior)

    labels = _Labels(model, coords, dims, {n for arrays in groups.values() for n in arrays})
    created = {
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
        **results.library,
    }
    datasets = {
        group: labels.dataset(group, arrays, created) for group, arrays in groups.items() if arrays
    }
    datasets["posterior"].attrs.update(results.attributes)
    for name, text in results.descriptions.items():
        if name in results.sample_stats:
            datasets["sample_stats"][name].attrs["description"] = text
    return _container(datasets)


def _container(datasets: dict[str, Any]) -> Any:
    """The one place that knows the lines of ArviZ: what the installed one works on."""
    import arviz  # slow to import, and only needed here

    if int(arviz.__version__.partition(".")[0]) >= 1:
        return xr.DataTree.from_dict(datasets)
    return arviz.InferenceData(**datasets)


# Requests


def _check_source(mcmc: Any) -> None:
    if isinstance(mcmc, LaplaceDraws):
        return
    if not isinstance(mcmc, MCMC):
        raise TypeError(
            "expected a numpyro.infer.MCMC or the LaplaceDraws of a guide, got "
            f"{type(mcmc).__name__}: pass the MCMC itself, not its draws, or what "
            "`guide.draw(rng_key, params, sample_shape=(chains, draws))` returns"
        )
    check_run(mcmc)


def _pointwise_sites(model: Model | None, request: Any) -> list[str]:
    """Names of the sites whose log likelihood is asked for."""
    if request is False:
        return []
    if model is None:
        raise ValueError(
            "log_likelihood needs a kernel with a model, and this one has potential_fn"
        )
    if request is True:
        return model.of_kind("observed")
    names = [request] if isinstance(request, str) else request
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"log_likelihood must be True, False, or names of observed sites, got {request!r}"
        )
    known = model.of_kind("observed", "factor")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"log_likelihood names {unknown}, which are not observed sites of the model: expected "
            f"some of {known}"
        )
    return list(names)


def _check_request(name: str, value: Any, model: Model | None, rng_key: Any) -> None:
    if value is None or value is False or isinstance(value, Mapping):
        return
    if value is not True:
        raise TypeError(f"{name} must be True or a dict of draws, got {type(value).__name__}")
    if model is None:
        raise ValueError(f"{name}=True needs a kernel with a model, and this one has potential_fn")
    if rng_key is None:
        raise ValueError(f"{name}=True draws anew: pass rng_key, such as jax.random.key(0)")
    if not is_prng_key(rng_key):
        raise TypeError(f"rng_key must be a single key, such as jax.random.key(0), got {rng_key!r}")


# Arrays by name


def _same(x: Any, y: np.ndarray) -> bool:
    return x.shape == y.shape and np.array_equal(host(x), y, equal_nan=y.dtype.kind == "f")


def _by_chain(draws: Mapping[str, Any], shape: tuple[int, ...]) -> Arrays:
    """Posterior predictive draws split into chains, where they are not yet."""
    found = {}
    for name, value in draws.items():
        x = host(value)
        if x.shape[:2] != shape and x.shape[:1] != (shape[0] * shape[1],):
            raise ValueError(
                f"posterior_predictive[{name!r}] has shape {x.shape}, expected it to start with "
                f"{shape} (chains, draws) or ({shape[0] * shape[1]},)"
            )
        found[name] = x if x.shape[:2] == shape else x.reshape((*shape, *x.shape[1:]))
    return found


def _split_prior(model: Model | None, prior: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Prior draws of latent and of observed sites, both shaped (chains, draws, ...)."""
    latent: Arrays = {}
    observed: Arrays = {}
    sites = {} if model is None else model.sites
    for name, value in prior.items():
        x = host(value)
        if x.ndim == 0:
            raise ValueError(f"prior[{name!r}] is a scalar, expected draws along the first axis")
        if name not in sites or x.ndim < len(sites[name].shape) + 2:
            x = x[np.newaxis]
        is_observed = name in sites and sites[name].kind == "observed"
        (observed if is_observed else latent)[name] = x
    return latent, observed


def _constants(model: Model | None, request: Any, observed: Arrays) -> Arrays:
    """Array arguments of the model by name, without those that are observed values."""
    if isinstance(request, Mapping):
        return {name: host(x) for name, x in request.items()}
    if request is not None and not isinstance(request, bool):
        raise TypeError(
            f"constant_data must be True, False, None or a dict, got {type(request).__name__}"
        )
    if request is False or model is None:
        return {}
    arguments = _arguments(model.fn, *model.arguments)
    return {
        name: host(leaf)
        for name, leaf in paths(arguments, "", lambda x: not isinstance(x, (dict, list, tuple)))
        if is_numeric(leaf)
        and (request is True or leaf.size <= MAX_CONSTANT_SIZE)
        and not any(_same(leaf, values) for values in observed.values())
    }


def _arguments(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names in the model's signature."""
    while isinstance(fn, Messenger) and fn.fn is not None:
        fn = fn.fn
    try:
        signature = inspect.signature(fn)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature to read
        return dict(kwargs)
    found: dict[str, Any] = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


# Labels


class _Labels:
    """Names of dimensions and their coordinates, from plates and from the user."""

    def __init__(
        self,
        model: Model | None,
        coords: Mapping[str, Sequence] | None,
        dims: Mapping[str, Sequence[str | None]] | None,
        variables: Collection[str],
    ) -> None:
        self.sites = {} if model is None else model.sites
        self.sizes = {} if model is None else model.sizes
        self.coords = {} if coords is None else coords
        self.dims = {} if dims is None else dims
        self.variables = {_clean(name) for name in variables}

    def plate(self, name: str) -> str:
        taken = self.variables | set(SAMPLE_DIMS)
        return f"{_clean(name)}_dim" if _clean(name) in taken else _clean(name)

    def axes(self, name: str, shape: tuple[int, ...], group: str) -> list[str]:
        """A name for every axis after those of chains and draws."""
        names: list[str | None] = [None] * len(shape)
        site = self.sites.get(name)
        has_events = group != "log_likelihood"
        if site is not None:
            rows = len(shape) - (site.event_dim if has_events else 0)
            for order, (plate, dim) in enumerate(site.plates):
                # which axes of a deterministic site are events is not known: plates come first
                axis = order if site.kind == "deterministic" else rows + dim
                if 0 <= axis < len(shape) and shape[axis] == self.sizes[plate]:
                    names[axis] = self.plate(plate)
            if has_events and len(site.event_names) <= len(shape):
                names[len(shape) - len(site.event_names) :] = site.event_names
        given = list(self.dims.get(name, self.dims.get(_clean(name), ())))
        if len(given) > len(shape) and has_events:
            raise ValueError(
                f"dims[{name!r}] names {len(given)} dimensions, and {name!r} in {group} has "
                f"{len(shape)} (after chain and draw): {shape}"
            )
        for axis, chosen in enumerate(given[: len(shape)]):
            names[axis] = names[axis] if chosen is None else chosen
        unnamed = iter(range(len(shape)))
        return [f"{_clean(name)}_dim_{next(unnamed)}" if n is None else n for n in names]

    def dataset(self, group: str, arrays: Arrays, attrs: dict[str, Any]) -> xr.Dataset:
        """One group as a dataset with coordinates for all dimensions."""
        leading = [] if group.endswith("data") else SAMPLE_DIMS
        variables: dict[str, tuple[list[str], np.ndarray]] = {}
        sizes: dict[str, int] = {}
        for name, x in arrays.items():
            dims = leading + self.axes(name, x.shape[len(leading) :], group)
            for dim, size in zip(dims, x.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(
                        f"dimension {dim!r} has {size} entries in {name!r} and {sizes[dim]} "
                        f"elsewhere in {group}: give it another name in `dims`"
                    )
                if dim in self.variables:
                    raise ValueError(
                        f"dims[{name!r}] names a dimension {dim!r}, which is a variable: expected "
                        "another name"
                    )
            if _clean(name) in variables:
                raise ValueError(
                    f"two variables of {group} are called {_clean(name)!r}, in which '/' and '.' "
                    "are one: rename a site"
                )
            variables[_clean(name)] = (dims, x)
        coords = {}
        for dim, size in sizes.items():
            labels = np.asarray(self.coords.get(dim, np.arange(size)))
            if labels.shape != (size,):
                raise ValueError(
                    f"coords[{dim!r}] must have {size} labels, one for each entry of dimension "
                    f"{dim!r} in {group}, got shape {labels.shape}"
                )
            coords[dim] = labels
        if leading:
            attrs = {**attrs, "sample_dims": leading}
        return xr.Dataset(variables, coords, attrs)


def _clean(name: str) -> str:
    return name.replace("/", ".")
