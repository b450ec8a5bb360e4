"""Export of a run to ArviZ: InferenceData under ArviZ 0.2x, a DataTree under ArviZ 1.x.

Groups are built as xarray datasets, which both versions of ArviZ accept. Only `container` knows
which version is installed. Groups that need the data replay the model on all rows, in chunks,
even if the sampler used subsamples.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import xarray as xr
from numpyro.infer import MCMC

from .._checks import check_flag, check_int, check_key
from ..laplace.draw import LaplaceDraws
from ..model.arguments import by_name
from ..model.model import Model
from .draws import Arrays, check_run, host, is_numeric, paths, stored_name
from .gradients import gradients_at_draws
from .record import RunRecord, record_of_guide, record_of_mcmc
from .replay import latent_draws, model_of, observed_values, pointwise_log_prob, predictive_values
from .report import warn_of_record, warn_of_wrecks

MAX_CONSTANT_SIZE = 10**6
"""Largest number of entries of an array argument that is stored by default."""
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
) -> Any:
    """Convert a finished run, or the draws of a guide, to the form that ArviZ uses.

    The run can have any kernel of NumPyro. The draws of a guide are the result of
    `RiemannianLaplace.draw`. Groups:

    - ``posterior``: draws of latent and deterministic sites, in the model's own space. With
      ``potential_fn`` it holds the entries of ``z``: an array is called ``z``, and the leaves of
      other pytrees are named by their path.
    - ``sample_stats`` of a run: ``diverging``; ``energy`` (U in nats at the start of the last step
      of a draw; a minibatch estimate if rows were subsampled); ``lp`` (minus ``energy``);
      ``step_size``; ``n_steps``; ``grad_norm``; ``configurational_temperature``;
      ``kinetic_temperature`` for kernels with a momentum; ``acceptance_rate`` for kernels with a
      Metropolis test; every array among the run's ``extra_fields``.
    - ``sample_stats`` of a guide's draws: ``success``, whether the geodesic was followed to its
      end; ``n_fevals``, the number of evaluations of its acceleration; ``log_weight``, log target
      minus log density of the draw up to a constant, if weights were requested. There is no ``lp``,
      because it would take a pass over the data per draw.
    - ``observed_data``: the values of observed sites, all rows.
    - ``constant_data``: the other array arguments of the model.
    - ``log_likelihood``: log p(row | draw) of every row under every draw, on the full data. As
      in `numpyro.infer.log_likelihood`, a masked row has 0, and the factors of ``scale``
      handlers and of plates are left out.
    - ``unconstrained_posterior``: on request. For each latent site ``w`` it holds the unconstrained
      values ``z.w`` and the gradients ``grad_U.w`` there, on the full data.
    - ``posterior_predictive``, ``prior``, ``prior_predictive``: on request.

    A site in a plate has the plate's name as a dimension, with coordinates 0, 1, .... Other axes
    are called ``<site>_dim_0`` and so on, or have the names in ``infer={"event_dims": ...}`` of the
    site. If a plate and a variable have the same name, the plate's dimension gets the suffix
    ``_dim``. A ``/`` in a name becomes ``.``, because netCDF reserves ``/``. For a run, the
    attributes of ``posterior`` hold the kernel, settings, N, batch sizes, seeds, versions, and what
    warm-up measured. For a guide, they hold the guide, settings, ``seconds_per_draw`` and
    ``pareto_k``. All groups can be written to netCDF.

    A guide's draws are independent draws of an approximation. ``posterior`` holds them as they are,
    without weights. ArviZ's R-hat and effective sample sizes cannot detect the error of the
    approximation, and ``az.loo`` treats these draws as draws of the posterior.

    Args:
        mcmc: a `numpyro.infer.MCMC` that has run; or a guide's `LaplaceDraws`, drawn with
            ``sample_shape=(chains, draws)``, or ``(draws,)`` for one chain.
        log_likelihood: True for all observed sites, or the names of some. A ``numpyro.factor`` site
            is included only if it is named. Size: chains x draws x rows.
        gradients: True for gradients of U on all rows at the draws. From them
            `numpyro_geom.diagnostics.diagnose` computes errors of means and standard deviations.
        posterior_predictive: True to draw observed sites anew for each posterior draw (needs
            ``rng_key``), or draws by name, shaped (chains, draws, ...) or (chains * draws, ...).
        prior: True to draw ``num_samples`` times from the prior (needs ``rng_key``), or draws by
            name, shaped (draws, ...) or (chains, draws, ...). Draws of observed sites go to
            ``prior_predictive``.
        constant_data: True for all array arguments, False for none, None for arrays of up
            to a million entries; or arrays by name. An argument that holds the values of an
            observed site is not stored a second time.
        coords: labels of dimensions, by name of the dimension. They replace 0, 1, ....
        dims: names of a variable's dimensions after chain and draw, by variable. They replace
            the names from plates. An entry None, or a missing entry at the end of a list, keeps
            the original name.
        rng_key: a key for predictive and prior draws.
        num_samples: number of draws from the prior.

    Returns:
        An ``arviz.InferenceData`` under ArviZ 0.2x, an ``xarray.DataTree`` under ArviZ 1.x.

    Raises:
        TypeError: if ``mcmc`` is neither of the two, and for other arguments of the wrong type.
        ValueError: if the MCMC has not run; for a guide's draws with no dimension, an empty
            dimension, or more than two dimensions; if a group needs a model, a key, or the draws
            of a site that is missing; for unknown sites; for labels that do not fit.

    Warns:
        SamplingWarning: see `numpyro_geom.diagnostics.warn_if_unreliable`. For a guide's draws: if
            geodesics failed, or if ``pareto_k`` is too large for the number of draws.

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
    """
    of_guide = isinstance(mcmc, LaplaceDraws)
    if not of_guide and not isinstance(mcmc, MCMC):
        raise TypeError(
            "expected a numpyro.infer.MCMC or the LaplaceDraws of a guide, got "
            f"{type(mcmc).__name__}: pass the MCMC itself, not its draws, or what "
            "`guide.draw(rng_key, params, sample_shape=(chains, draws))` returns"
        )
    if rng_key is not None:
        check_key("rng_key", rng_key)
    if not of_guide:
        check_run(mcmc)
    num_samples = check_int("num_samples", num_samples)
    for name, value in (("coords", coords), ("dims", dims)):
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict, got {type(value).__name__}")
    run = record_of_guide(mcmc) if of_guide else record_of_mcmc(mcmc)
    model = model_of(mcmc)
    pointwise = _pointwise_sites(model, log_likelihood)
    if check_flag("gradients", gradients) and (model is None or not run.targets_model):
        raise ValueError(
            "gradients=True needs a kernel with a model whose posterior is the target: not "
            "potential_fn, not an expansion with target='factors', not a model that asks for "
            "random keys, and not one without free parameters"
        )
    _check_request("posterior_predictive", posterior_predictive, model, rng_key)
    _check_request("prior", prior, model, rng_key)
    if not of_guide:
        warn_of_wrecks(mcmc)
    warn_of_record(run)

    posterior = run.posterior
    shape = next(iter(posterior.values())).shape[:2]

    def by_chain(arrays: Arrays) -> Arrays:
        return {name: x.reshape((*shape, *x.shape[1:])) for name, x in arrays.items()}

    observed = {} if model is None else observed_values(model)
    groups: dict[str, Arrays] = {
        "posterior": posterior,
        "sample_stats": run.sample_stats,
        "observed_data": observed,
        "constant_data": constants(model, constant_data, observed),
    }
    if model is not None and pointwise:
        found = pointwise_log_prob(model, latent_draws(model, posterior), pointwise)
        groups["log_likelihood"] = by_chain(found)
    if model is not None and gradients:
        found, told = gradients_at_draws(model, posterior)
        groups["unconstrained_posterior"] = found
        run = run._replace(attributes={**run.attributes, **told})
    if model is not None and posterior_predictive is True:
        draws, names = latent_draws(model, posterior), model.of_kind("observed")
        found = predictive_values(model, draws, shape[0] * shape[1], names, rng_key)
        posterior_predictive = by_chain(found)
    if model is not None and prior is True:
        names = model.of_kind("latent", "deterministic", "observed")
        prior = predictive_values(model, {}, num_samples, names, rng_key)
    if isinstance(posterior_predictive, Mapping):
        groups["posterior_predictive"] = _by_chain(posterior_predictive, shape)
    if isinstance(prior, Mapping):
        groups["prior"], groups["prior_predictive"] = _split_prior(model, prior)

    return container(Labels(groups, model, coords, dims).datasets(run, now()))


def _pointwise_sites(model: Model | None, request: Any) -> list[str]:
    """Names of the sites whose log likelihood is requested."""
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


def _by_chain(draws: Mapping[str, Any], shape: tuple[int, ...]) -> Arrays:
    """Posterior predictive draws, split into chains if they are flat."""
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


def constants(model: Model | None, request: Any, observed: Arrays) -> Arrays:
    """Array arguments of the model by name, except observed values."""
    if isinstance(request, Mapping):
        return {name: host(x) for name, x in request.items()}
    if request is not None and not isinstance(request, bool):
        raise TypeError(
            f"constant_data must be True, False, None or a dict, got {type(request).__name__}"
        )
    if request is False or model is None:
        return {}
    arguments = by_name(model.fn, model.args, model.kwargs)
    return {
        name: host(leaf)
        for name, leaf in paths(arguments, "", lambda x: not isinstance(x, (dict, list, tuple)))
        if is_numeric(leaf)
        and (request is True or leaf.size <= MAX_CONSTANT_SIZE)
        and not any(
            leaf.shape == y.shape and np.array_equal(host(leaf), y, equal_nan=y.dtype.kind == "f")
            for y in observed.values()
        )
    }


def now() -> str:
    """The time in ISO format."""
    return datetime.datetime.now(datetime.UTC).isoformat()


def container(datasets: dict[str, Any]) -> Any:
    """The object for the installed version of ArviZ; only this function knows the version."""
    import arviz  # slow to import, and only needed here

    if int(arviz.__version__.partition(".")[0]) >= 1:
        return xr.DataTree.from_dict(datasets)
    return arviz.InferenceData(**datasets)


class Labels:
    """Groups of arrays with names of dimensions and coordinates, from plates and from the user."""

    def __init__(
        self,
        groups: Mapping[str, Arrays],
        model: Model | None,
        coords: Mapping[str, Sequence] | None = None,
        dims: Mapping[str, Sequence[str | None]] | None = None,
    ) -> None:
        self._groups = groups
        self._sites, self._sizes = ({}, {}) if model is None else (model.sites, model.plan.sizes)
        self._coords = {} if coords is None else coords
        self._dims = {} if dims is None else dims
        self._variables = {stored_name(name) for arrays in groups.values() for name in arrays}
        known = sorted(self._variables | {stored_name(name) for name in self._sites})
        for name in self._dims:
            if stored_name(name) not in known:
                close = difflib.get_close_matches(stored_name(name), known, n=1)
                remedy = f"did you mean {close[0]!r}?" if close else f"expected some of {known}"
                raise ValueError(f"dims names {name!r}, which is no site or variable: {remedy}")

    def datasets(self, run: RunRecord, created_at: str) -> dict[str, xr.Dataset]:
        """The groups that are not empty, as datasets; facts about the run are attributes."""
        created = {"created_at": created_at, **run.library}
        found = {
            group: self._dataset(group, arrays).assign_attrs(created)
            for group, arrays in self._groups.items()
            if arrays
        }
        found["posterior"].attrs.update(run.attributes)
        if run.scale is not None:
            found["sample_stats"]["inverse_mass_matrix"] = run.scale
        for name, text in run.descriptions.items():
            if name in run.sample_stats:
                found["sample_stats"][name].attrs["description"] = text
        return found

    def _axes(self, name: str, shape: tuple[int, ...], group: str) -> list[str]:
        """A name for every axis after the chains and the draws."""
        names: list[str | None] = [None] * len(shape)
        site = self._sites.get(name)
        has_events = group != "log_likelihood"
        if site is not None:
            rows = len(shape) - (site.event_dim if has_events else 0)
            for order, (plate, dim) in enumerate(site.plates):
                # the event axes of a deterministic site are unknown: assume that plates come first
                axis = order if site.kind == "deterministic" else rows + dim
                if 0 <= axis < len(shape) and shape[axis] == self._sizes[plate]:
                    taken = stored_name(plate) in {*self._variables, *SAMPLE_DIMS}
                    names[axis] = stored_name(plate) + ("_dim" if taken else "")
            if has_events and len(site.event_names) <= len(shape):
                names[len(shape) - len(site.event_names) :] = site.event_names
        given = list(self._dims.get(name, self._dims.get(stored_name(name), ())))
        if len(given) > len(shape) and has_events:
            raise ValueError(
                f"dims[{name!r}] names {len(given)} dimensions, and {name!r} in {group} has "
                f"{len(shape)} (after chain and draw): {shape}"
            )
        for axis, chosen in enumerate(given[: len(shape)]):
            names[axis] = names[axis] if chosen is None else chosen
        unnamed = iter(range(len(shape)))
        return [f"{stored_name(name)}_dim_{next(unnamed)}" if n is None else n for n in names]

    def _dataset(self, group: str, arrays: Arrays) -> xr.Dataset:
        """One group as a dataset with coordinates for all dimensions."""
        leading = [] if group.endswith("data") else SAMPLE_DIMS
        variables: dict[str, tuple[list[str], np.ndarray]] = {}
        sizes: dict[str, int] = {}
        for name, x in arrays.items():
            dims = leading + self._axes(name, x.shape[len(leading) :], group)
            for dim, size in zip(dims, x.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(
                        f"dimension {dim!r} has {size} entries in {name!r} and {sizes[dim]} "
                        f"elsewhere in {group}: give it another name in `dims`"
                    )
                if dim in self._variables:
                    raise ValueError(
                        f"dims[{name!r}] names a dimension {dim!r}, which is a variable: expected "
                        "another name"
                    )
            if stored_name(name) in variables:
                raise ValueError(
                    f"two variables of {group} are called {stored_name(name)!r}, in which '/' and "
                    "'.' are one: rename a site"
                )
            variables[stored_name(name)] = (dims, x)
        coords = {}
        for dim, size in sizes.items():
            labels = np.asarray(self._coords.get(dim, np.arange(size)))
            if labels.shape != (size,):
                raise ValueError(
                    f"coords[{dim!r}] must have {size} labels, one for each entry of dimension "
                    f"{dim!r} in {group}, got shape {labels.shape}"
                )
            coords[dim] = labels
        return xr.Dataset(variables, coords, {"sample_dims": leading} if leading else {})
