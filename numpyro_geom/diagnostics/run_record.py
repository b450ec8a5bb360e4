"""Draws and facts about them in one form, for a run, a guide or a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import xarray as xr
from numpyro.infer import MCMC, NUTS

from .._numpyro import arguments_of
from ..kernel import SGKernel
from ..laplace.draw import LaplaceDraws
from ..model.arguments import on_device
from ..model.function import takes_rng_key
from .arrays import Arrays, group_of, host, is_numeric
from .run_facts import facts_as_attributes, is_measured, learned_scale
from .sources import draws_by_name

SITE_TEMPERATURE = "configurational_temperature."
"""Prefix of the name of a site's temperature in ``sample_stats``."""
RENAMED = {
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}


class RunRecord(NamedTuple):
    """Draws and facts about them."""

    posterior: Arrays  # draws by name, shaped (chains, draws, ...)
    sample_stats: Arrays  # figures of each draw by name, shaped (chains, draws, ...)
    attributes: Mapping[str, Any]  # of the posterior: settings and facts of the sampler
    unconstrained: Arrays = {}  # from `gradients_at_draws`, if it was requested
    model: Callable | None = None  # `param` sites at their values; None with a potential_fn
    args: tuple = ()  # of the model
    kwargs: dict[str, Any] = {}
    descriptions: dict[str, str] = {}  # of the figures, by name
    library: dict[str, str] = {}  # attributes of every group
    targets_model: bool = False  # whether the model's posterior is the target
    scale: xr.DataArray | None = None  # covariance of each chain's scaled coordinates

    @property
    def temperature(self) -> float:
        """The temperature tau of the target."""
        return float(self.attributes.get("temperature", 1.0))

    @property
    def of_this_package(self) -> bool:
        """Whether the draws come from a stochastic-gradient kernel."""
        return "final_step_size" in self.attributes


def record_of_container(container: Any) -> RunRecord:
    """Read an InferenceData or DataTree with a ``posterior``."""
    names = ("posterior", "sample_stats", "unconstrained_posterior")
    posterior, stats, unconstrained = (group_of(container, name) for name in names)
    return RunRecord(posterior, stats, container["posterior"].attrs, unconstrained)


def record_of_mcmc(mcmc: MCMC) -> RunRecord:
    """Read a run that `check_run` has accepted."""
    kernel = mcmc.sampler
    model, (args, kwargs) = getattr(kernel, "model", None), arguments_of(mcmc)
    library, targets_model = "numpyro", model is not None
    if isinstance(kernel, SGKernel):
        library, targets_model = "numpyro_geom", kernel.bound.targets_model
        if kernel.bound.model is not None:
            model = kernel.bound.model.runnable
            args, kwargs = on_device(args, kwargs)  # as the kernel does
    return RunRecord(
        posterior=draws_by_name(mcmc),
        sample_stats=sample_stats(mcmc),
        attributes=_attributes(mcmc),
        model=model,
        args=args,
        kwargs=kwargs,
        descriptions=_descriptions(kernel),
        library=_library(library),
        targets_model=targets_model,
        scale=learned_scale(mcmc),
    )


def record_of_guide(draws: LaplaceDraws) -> RunRecord:
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
    attributes = {
        "guide": "RiemannianLaplace",
        **_storable(draws.settings),
        "seconds_per_draw": float(draws.seconds),
        **package_versions(),
    }
    if draws.pareto_k is not None:
        attributes["pareto_k"] = float(draws.pareto_k)
    return RunRecord(
        posterior=by_chain(draws.samples),
        sample_stats=by_chain(stats),
        attributes=attributes,
        model=draws.model,
        args=draws.args,
        kwargs=draws.kwargs,
        descriptions={
            "success": "whether the geodesic was followed to its end",
            "n_fevals": "evaluations of the geodesic's acceleration",
            "log_weight": "log target density minus log density of the draw, up to a constant; "
            "NaN where the geodesic failed",
        },
        library=_library("numpyro_geom"),
        targets_model=True,
    )


def sample_stats(mcmc: MCMC) -> Arrays:
    """Figures of each draw, under the names that ArviZ uses."""
    kernel = mcmc.sampler
    stats: Arrays = {}
    for field, value in mcmc.get_extra_fields(group_by_chain=True).items():
        if field == "site_temperatures" and len(value) > 1:  # for one site it is the total
            stats.update({SITE_TEMPERATURE + str(site): host(x) for site, x in value.items()})
        if not is_numeric(value):
            continue
        if field == "accept_prob" and isinstance(kernel, SGKernel) and not kernel.facts.adjusted:
            continue
        x = host(value)
        if field == "potential_energy":
            if isinstance(kernel, SGKernel):
                stats["energy"] = x
            stats["lp"] = -x
        else:
            stats[RENAMED.get(field, field)] = x
    if isinstance(kernel, SGKernel) and not kernel.facts.trajectory and "diverging" in stats:
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
    from .. import __version__  # not yet defined while the package is being imported

    return {
        "numpyro_geom_version": __version__,
        "numpyro_version": numpyro.__version__,
        "jax_version": jax.__version__,
        "arviz_version": metadata.version("arviz"),
    }


def _attributes(mcmc: MCMC) -> dict[str, Any]:
    """The settings that are needed to repeat a run, and its facts."""
    kernel, state = mcmc.sampler, mcmc.last_state
    attrs: dict[str, Any] = {
        "kernel": type(kernel).__name__,
        **{n: getattr(mcmc, n) for n in ("num_chains", "num_warmup", "num_samples", "thinning")},
        **package_versions(),
    }
    if not isinstance(kernel, SGKernel):
        return attrs
    attrs.update(_storable(kernel.settings.record()))
    if kernel.plan is not None:
        attrs["num_data"] = kernel.plan.num_data
        attrs["plate_sizes"] = json.dumps(dict(kernel.plan.sizes))
        attrs["batch_sizes"] = json.dumps(dict(kernel.plan.batch_sizes))
    attrs["seed"] = json.dumps(np.asarray(state.seed).tolist())
    figures = {
        "final_step_size": state.step_size,
        "final_num_steps": state.num_steps,
        "steps_taken": state.steps_taken,
    }
    if is_measured(mcmc):
        names = {"lam_H": "curvature", "lam_C": "noise", "lam_min": "slowest"}
        figures |= {name: getattr(state.adaptation, x) for name, x in names.items()}
    # a number, or one number per chain
    attrs.update({name: np.asarray(x).tolist() for name, x in figures.items()})
    return {**attrs, **facts_as_attributes(mcmc)}


def _descriptions(kernel: Any) -> dict[str, str]:
    """Descriptions of the figures in ``sample_stats``, mainly of energies."""
    if not isinstance(kernel, SGKernel):
        return {}
    if kernel.plan is None:
        estimated = takes_rng_key(kernel.settings.potential_fn)
    else:
        estimated = bool(kernel.plan.batch_sizes)
    source = "minibatch estimate" if estimated else "on all data"
    of_step, of_draw = "where the last step of the draw started", "mean over the draw's steps"
    temperature = (
        "(z - c) . grad U / D, with c where the chain was at the end of warm-up; its mean "
    )
    texts = {
        "energy": f"U in nats {of_step}, {source}",
        "lp": f"minus U in nats {of_step}, {source}",
        "diverging": "a step of the draw, or of the next draw, was not finite or not stable: "
        "leave the draw out",
        "grad_norm": f"Euclidean norm of grad U {of_step}, {source}",
        "configurational_temperature": f"{of_draw} of {temperature}is the temperature",
        "kinetic_temperature": f"r'M^-1 r / D of the momentum, a {of_draw}",
        "step_size": "h of the last step of the draw",
        "n_steps": "stochastic-gradient steps of the draw",
        "acceptance_rate": "mean acceptance probability of the draw's steps",
        "squared_drift": "h grad U' A grad U / (2 tau) where the previous draw ended",
    }
    if kernel.facts.trajectory:
        at_start = "at the trajectory's start"
        texts |= {
            "energy": "U in nats of the draw, on all data",
            "lp": "minus U in nats of the draw, on all data",
            "diverging": "the trajectory's energy error was not finite or above 1000 tau",
            "acceptance_rate": "acceptance probability of the draw's trajectory",
            "kinetic_temperature": "r'M^-1 r / D of the draw's momentum, after the trajectory",
            "grad_norm": f"{texts['grad_norm']}; {at_start}",
            "configurational_temperature": f"{at_start} {temperature}is the temperature",
        }
    return texts


def _storable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in types that netCDF can store."""
    return {n: int(value) if isinstance(value, bool) else value for n, value in settings.items()}


def _library(name: str) -> dict[str, str]:
    version = package_versions()[f"{name}_version"]
    return {"inference_library": name, "inference_library_version": version}
