"""Export of a run to ArviZ: InferenceData under ArviZ 0.2x, a DataTree under ArviZ 1.x.

`arviz.from_numpyro` accepts our kernels too. It fails for names with a slash under ArviZ 1.x, which
networks have, and it does not know the draws of guides, rows on the host, and a run's facts. So the
groups are made here, as xarray datasets, which both versions of ArviZ accept.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

import jax
import numpy as np
import numpyro
from numpyro.infer import MCMC, NUTS

from .._checks import check_flag
from .._numpyro import states_of
from .._util import are_known
from ..laplace.draw import LaplaceDraws
from ..model.model import Model
from .checks import LEAST_DRAWS, warn_of_guide, warn_of_run
from .draws import Arrays, check_run, chosen, draws_by_name, host, is_numeric, paths, stored_name
from .facts import Run, facts_of, storable
from .moments import gradients_at_draws, moment_errors
from .replay import latent_draws, model_of, observed_values, pointwise_log_prob

SAMPLE_DIMS = ("chain", "draw")
RENAMED = {
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}


def to_inference_data(
    mcmc: MCMC | LaplaceDraws,
    *,
    log_likelihood: bool | str | Sequence[str] = False,
    log_prior: bool = False,
    gradients: bool = False,
    coords: Mapping[str, Sequence] | None = None,
    **groups: Mapping[str, Any],
) -> Any:
    """Convert a finished run, or the draws of a guide, to the form that ArviZ uses.

    The run can have any kernel of NumPyro. The draws of a guide are the result of
    `RiemannianLaplace.draw`. Groups:

    - ``posterior``: draws of latent and deterministic sites, in the model's own space. With
      ``potential_fn`` it holds the entries of ``z``: an array is called ``z``, and the leaves of
      other pytrees are named by their path.
    - ``sample_stats`` of a run: ``diverging`` (a step of the draw, or of the next draw, was not
      finite or not stable); ``energy`` (U of the draw in nats; if rows are
      subsampled, an estimate from the same rows for all draws); ``lp`` (minus ``energy``);
      ``step_size``; ``n_steps``; ``grad_norm``; ``configurational_temperature``;
      ``kinetic_temperature`` for kernels with a momentum; ``acceptance_rate`` for kernels with a
      Metropolis test; every array among the run's ``extra_fields``.
    - ``sample_stats`` of a guide's draws: ``success``, whether the geodesic was followed to its
      end; ``n_fevals``, the number of evaluations of its acceleration; ``log_weight`` of
      `numpyro_geom.laplace.LaplaceDraws`, if weights were requested. There is no ``lp``, because it
      would take a pass over the data per draw.
    - ``observed_data``: the values of observed sites, all rows.
    - ``log_likelihood``: log p(row | draw) of every row under every draw, on the full data. As
      in `numpyro.infer.log_likelihood`, a masked row has 0, and the factors of ``scale``
      handlers and of plates are left out.
    - ``log_prior``: log p(site) of every latent site under every draw, in the model's own space.
      With it and ``log_likelihood``, ``az.psense_summary`` of ArviZ 1.x tells how much the
      posterior depends on the prior.
    - ``unconstrained_posterior``: on request. For each latent site ``w`` it holds the unconstrained
      values ``z.w`` and the gradients ``grad_U.w`` there, on the full data.

    A site in a plate has the plate's name as a dimension, with coordinates 0, 1, .... Other axes
    are called ``<site>_dim_0`` and so on, or have the names in ``infer={"event_dims": ...}`` of the
    site. If a plate and a variable have the same name, the plate's dimension gets the suffix
    ``_dim``. A ``/`` in a name becomes ``.``, because netCDF reserves ``/``. For a run, the
    attributes of ``posterior`` hold the kernel, settings, N, batch sizes, seeds, versions, and what
    warm-up measured. For a guide, they hold the guide, settings, ``seconds_per_draw``,
    ``pareto_k``, and ``log_evidence`` with its error. All groups can be written to netCDF.

    A guide's draws are independent draws of an approximation. ``posterior`` holds them as they are,
    without weights. ArviZ's R-hat and effective sample sizes cannot detect the error of the
    approximation, and ``az.loo`` treats these draws as draws of the posterior.

    Args:
        mcmc: a `numpyro.infer.MCMC` that has run; or a guide's `LaplaceDraws`, drawn with
            ``sample_shape=(chains, draws)``, or ``(draws,)`` for one chain.
        log_likelihood: True for all observed sites, or the names of some. A ``numpyro.factor`` site
            is included only if it is named. Size: chains x draws x rows.
        log_prior: True for the log prior densities of the latent sites.
        gradients: True for gradients of U on all rows at the draws. From them
            `numpyro_geom.diagnostics.diagnose` computes errors of means and standard deviations.
        coords: labels of dimensions, by name of the dimension. They replace 0, 1, ....
        groups: further groups by the names of ArviZ, such as ``constant_data={"X": X}`` and
            ``posterior_predictive={"y": draws}``. Draws are shaped (chains, draws, ...), as from
            ``numpyro.infer.Predictive(model, mcmc.get_samples(group_by_chain=True),
            batch_ndims=2)``.

    Returns:
        An ``arviz.InferenceData`` under ArviZ 0.2x, an ``xarray.DataTree`` under ArviZ 1.x.

    Raises:
        TypeError: if ``mcmc`` is neither of the two, and for other arguments of the wrong type.
        ValueError: if the MCMC has not run; for a guide's draws with no dimension, an empty
            dimension, or more than two dimensions; if a group needs a model, or the draws
            of a site that is missing; for unknown sites.

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
    if not of_guide:
        check_run(mcmc)
    for name, value in {"coords": coords, **groups}.items():
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict, got {type(value).__name__}")
    run = run_of_guide(mcmc) if of_guide else run_of_mcmc(mcmc)
    model = model_of(mcmc)
    densities = {
        "log_likelihood": _sites(model, "log_likelihood", log_likelihood, "observed", "factor"),
        "log_prior": _sites(model, "log_prior", check_flag("log_prior", log_prior), "latent"),
    }
    if check_flag("gradients", gradients) and (model is None or not targets_model(mcmc)):
        raise ValueError(
            "gradients=True needs a kernel with a model whose posterior is the target: not "
            "potential_fn, not a model that asks for random keys, and not one without free "
            "parameters"
        )
    draws: Any = run.draws
    shape, facts = next(iter(draws.values())).shape[:2], dict(run.facts)
    found = {"posterior": draws, "sample_stats": run.stats}
    if model is not None:
        found["observed_data"] = observed_values(model)
    for group, names in densities.items():
        if model is not None and names:
            values = pointwise_log_prob(model, latent_draws(model, draws), names)
            found[group] = {n: x.reshape((*shape, *x.shape[1:])) for n, x in values.items()}
    if model is not None and gradients:
        found["unconstrained_posterior"], told = gradients_at_draws(model, draws)
        facts |= told
    found |= {group: {n: host(x) for n, x in arrays.items()} for group, arrays in groups.items()}
    return container(_datasets(found, model, facts, {} if coords is None else coords))


def _sites(model: Model | None, group: str, request: Any, *kinds: str) -> list[str]:
    """Names of the sites whose densities are requested; True for those of the first kind."""
    if request is False:
        return []
    if model is None:
        raise ValueError(f"{group} needs a kernel with a model, and this one has potential_fn")
    if request is True:
        return model.of_kind(kinds[0])
    return chosen(request, model.of_kind(*kinds), "the model", group)


# What a run and a guide say


def after_run(mcmc: MCMC) -> None:
    """Warn of draws that are worth nothing; `MCMC.run` calls this at its end.

    Warns:
        SamplingWarning: if a chain does not move or hardly moves, if its energy stays far above
            where it started or above that of another chain, or if statistics of a metric cannot
            follow the position.
    """
    states: Any = states_of(mcmc)
    last = mcmc.last_state
    if not are_known((states, last)) or states["potential_energy"].shape[1] < LEAST_DRAWS:
        return
    if np.max(host(last.i) - host(last.adaptation.num_warmup)) > 0:  # draws of warm-up may fail
        draws = dict(paths(mcmc.get_samples(group_by_chain=True), "z"))
        stats = {"energy": host(states["potential_energy"])}
        warn_of_run(Run(draws, stats, facts_of_mcmc(mcmc)))


def after_draws(draws: LaplaceDraws, *, gradients: bool) -> bool:
    """Warn of a guide's draws, shape (draws,); returns whether gradients need no further look.

    ``gradients`` asks for a look, which takes some draws and has no use beside weights.
    """
    run = run_of_guide(draws)
    looks = gradients and draws.log_weight is None and draws.success.size >= LEAST_DRAWS
    if looks:
        model: Any = model_of(draws)
        arrays, _ = gradients_at_draws(model, run.draws, least_draws=LEAST_DRAWS)
        run = run._replace(moments=moment_errors(arrays, 1.0))
    warn_of_guide(run)
    return looks or not gradients


def run_of_mcmc(mcmc: MCMC) -> Run:
    """Read a run that `check_run` has accepted."""
    about: dict[str, Any] = {
        "kernel": type(mcmc.sampler).__name__,
        "inference_library": "numpyro_geom" if hasattr(mcmc.sampler, "facts") else "numpyro",
        **{n: getattr(mcmc, n) for n in ("num_chains", "num_warmup", "num_samples", "thinning")},
        **package_versions(),
    }
    return Run(draws_by_name(mcmc), sample_stats(mcmc), {**about, **facts_of_mcmc(mcmc)})


def facts_of_mcmc(mcmc: MCMC) -> dict[str, Any]:
    """`facts_of` a run with one of this package's kernels; empty for others."""
    if not hasattr(mcmc.sampler, "facts"):
        return {}
    states: Any = states_of(mcmc)
    return facts_of(mcmc.sampler, states, mcmc.last_state, mcmc.thinning)


def targets_model(source: MCMC | LaplaceDraws) -> bool:
    """Whether the posterior of the model is the target."""
    if isinstance(source, LaplaceDraws):
        return True
    bound = getattr(source.sampler, "bound", None)
    if bound is None:
        return getattr(source.sampler, "model", None) is not None
    return bound.targets_model


def run_of_guide(draws: LaplaceDraws) -> Run:
    """Read the draws of a guide, of one or two dimensions."""
    shape = np.shape(draws.success)
    if len(shape) not in (1, 2) or 0 in shape:
        got = f"sample_shape={shape}" if shape else "a single draw, sample_shape=()"
        raise ValueError(
            "expected draws with sample_shape=(draws,) or (chains, draws), at least one, got "
            f"{got}: call `guide.draw(rng_key, params, sample_shape=(4, 500))`, for instance"
        )

    def by_chain(arrays: Mapping[str, Any]) -> Arrays:
        extra = [np.newaxis] * (2 - len(shape))
        return {name: host(x)[(*extra, ...)] for name, x in arrays.items()}

    stats = {"success": draws.success, "n_fevals": draws.num_evaluations}
    if draws.log_weight is not None:
        stats["log_weight"] = draws.log_weight
    facts = {
        "guide": "RiemannianLaplace",
        "inference_library": "numpyro_geom",
        **storable(draws.settings),
        "seconds_per_draw": float(draws.seconds),
        **package_versions(),
    }
    if draws.pareto_k is not None:
        facts["pareto_k"] = float(draws.pareto_k)
        with suppress(ValueError):
            facts["log_evidence"] = draws.log_evidence()
    return Run(by_chain(draws.samples), by_chain(stats), facts)


def sample_stats(mcmc: MCMC) -> Arrays:
    """Figures of each draw, under the names that ArviZ uses."""
    kernel, facts = mcmc.sampler, getattr(mcmc.sampler, "facts", None)
    stats: Arrays = {}
    for field, value in mcmc.get_extra_fields(group_by_chain=True).items():
        if not is_numeric(value):
            continue
        if field == "accept_prob" and facts is not None and not facts.adjusted:
            continue
        x = host(value)
        if field == "potential_energy":
            if facts is not None:
                stats["energy"] = x
            stats["lp"] = -x
        else:
            stats[RENAMED.get(field, field)] = x
    if facts is not None and not facts.trajectory and "diverging" in stats:
        # a step that fails may have started at the end of the previous draw
        failed = stats["diverging"].astype(bool)
        after = np.roll(failed, -1, 1)
        after[:, -1:] = False
        stats["diverging"] = failed | after
    if isinstance(kernel, NUTS) and "n_steps" in stats:
        stats["tree_depth"] = np.log2(stats["n_steps"]).astype(int) + 1
    return stats


def package_versions() -> dict[str, str]:
    """Versions of the packages that the draws depend on."""
    return {
        "numpyro_geom_version": metadata.version("numpyro_geom"),
        "numpyro_version": numpyro.__version__,
        "jax_version": jax.__version__,
        "arviz_version": metadata.version("arviz"),
    }


# Groups of ArviZ


def container(datasets: dict[str, Any]) -> Any:
    """The object for the installed version of ArviZ; only this function knows the version."""
    import arviz  # slow to import, and only needed here

    if int(arviz.__version__.partition(".")[0]) >= 1:
        import xarray as xr

        return xr.DataTree.from_dict(datasets)
    return arviz.InferenceData(**datasets)


def _datasets(
    groups: Mapping[str, Arrays],
    model: Model | None,
    facts: Mapping[str, Any],
    coords: Mapping[str, Sequence],
) -> dict[str, Any]:
    """The groups that are not empty, with dimensions from plates; facts are attributes."""
    import xarray as xr

    library = facts["inference_library"]
    created = {
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "inference_library": library,
        "inference_library_version": facts[f"{library}_version"],
    }
    variables = {stored_name(name) for arrays in groups.values() for name in arrays}
    found = {}
    for group, arrays in groups.items():
        if not arrays:
            continue
        leading = () if group.endswith("data") else SAMPLE_DIMS
        named = {
            stored_name(name): (
                (*leading, *_axes(model, name, x.shape[len(leading) :], group, variables)),
                x,
            )
            for name, x in arrays.items()
        }
        if len(named) < len(arrays):
            raise ValueError(
                f"two variables of {group} have one name after '/' becomes '.', among "
                f"{sorted(arrays)}: rename a site"
            )
        sizes = {dim: size for dims, x in named.values() for dim, size in zip(dims, x.shape)}  # noqa: B905
        labels = {dim: np.arange(size) for dim, size in sizes.items()}
        labels |= {dim: np.asarray(x) for dim, x in coords.items() if dim in sizes}
        about = created | ({"sample_dims": [*leading]} if leading else {})
        found[group] = xr.Dataset(named, labels, about)
    found["posterior"].attrs.update(facts)
    return found


def _axes(
    model: Model | None, name: str, shape: tuple[int, ...], group: str, variables: set[str]
) -> list[str]:
    """A name for every axis after the chains and the draws."""
    names: list[str | None] = [None] * len(shape)
    site = None if model is None else model.sites.get(name)
    if model is not None and site is not None:
        has_events = group not in ("log_likelihood", "log_prior")
        rows = len(shape) - (site.event_dim if has_events else 0)
        for order, (plate, dim) in enumerate(site.plates):
            # the event axes of a deterministic site are unknown: assume that plates come first
            axis = order if site.kind == "deterministic" else rows + dim
            if 0 <= axis < len(shape) and shape[axis] == model.plan.sizes[plate]:
                taken = stored_name(plate) in {*variables, *SAMPLE_DIMS}
                names[axis] = stored_name(plate) + ("_dim" if taken else "")
        if has_events and len(site.event_names) <= len(shape):
            names[len(shape) - len(site.event_names) :] = site.event_names
    unnamed = iter(range(len(shape)))
    return [f"{stored_name(name)}_dim_{next(unnamed)}" if n is None else n for n in names]
