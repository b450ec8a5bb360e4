"""Draws and facts about them in one form, for a run, a guide or a file.

Facts are numbers (one per chain or one for all) and texts, which netCDF can store as attributes. So
a run and its export are judged by the same facts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import xarray as xr
from numpyro.infer import MCMC, NUTS

from ..kernel import SGKernel
from ..laplace.draw import LaplaceDraws
from ..model.centring import Path, Shares
from ..model.potential import takes_rng_key
from ..wreck import bridged
from .draws import Arrays, draws_by_name, group_of, host, is_numeric
from .replay import model_of

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
    kernel, bound = mcmc.sampler, getattr(mcmc.sampler, "bound", None)
    has_model = getattr(kernel, "model", None) is not None
    return RunRecord(
        posterior=draws_by_name(mcmc),
        sample_stats=sample_stats(mcmc),
        attributes=_attributes(mcmc),
        descriptions=_descriptions(kernel),
        library=_library("numpyro" if bound is None else "numpyro_geom"),
        targets_model=has_model if bound is None else bound.targets_model,
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
    kernel, facts = mcmc.sampler, getattr(mcmc.sampler, "facts", None)
    stats: Arrays = {}
    for field, value in mcmc.get_extra_fields(group_by_chain=True).items():
        if field == "site_temperatures":
            if value.shape[-1] > 1:  # for one site it is the total
                for k, site in enumerate(sorted(mcmc.last_state.z)):
                    stats[SITE_TEMPERATURE + str(site)] = host(value)[..., k]
            continue
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


def _attributes(mcmc: MCMC) -> dict[str, Any]:
    """The settings that are needed to repeat a run, and its facts."""
    kernel, state = mcmc.sampler, mcmc.last_state
    attrs: dict[str, Any] = {
        "kernel": type(kernel).__name__,
        **{n: getattr(mcmc, n) for n in ("num_chains", "num_warmup", "num_samples", "thinning")},
        **package_versions(),
    }
    model = model_of(mcmc)
    if model is not None and not model.on_host:
        with contextlib.suppress(Exception):  # a model can raise anything; this is only for advice
            attrs["hierarchy"] = int(model.is_hierarchy)
    if not hasattr(kernel, "facts"):
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
    if not hasattr(kernel, "facts"):
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


def is_measured(mcmc: MCMC) -> bool:
    """Whether warm-up has measured curvature and noise; False if nothing was automatic."""
    kernel = mcmc.sampler
    # the first measurement happens before the second draw
    return getattr(kernel, "measures", False) and int(np.min(mcmc.last_state.i)) > 1


def facts_as_attributes(mcmc: MCMC) -> dict[str, Any]:
    """Facts of a run with one of this package's kernels.

    Returns:
        A dict with these entries, each only if it applies:

        - ``gradients`` and ``passes``: gradients, and passes over the data, of a chain;
        - ``target_accept``;
        - ``bridged``: difference between the energies of chains that sampling can bridge, in nats;
        - ``searches``: searches for a start of each chain, if there were several;
          ``searches_above``: how many ended higher than can be bridged; ``search_gap``: the
          largest of these differences, in nats;
        - ``relaxation_steps``: steps in which the slowest direction relaxes; ``relaxations``: how
          many such times a chain spans;
        - ``scale_condition``: condition number of the covariance of the scaled coordinates (of its
          diagonal if it is structured); ``scale_structure``: that structure, and
          sites that are not centred, in words;
        - ``noise_without_control_variate`` and ``noise_with_control_variate``: largest eigenvalues
          of the minibatch noise (of `GGMC` their sums), if the control variate was chosen
          automatically;
        - ``curvature_ratio``: largest over smallest curvature in the second half of warm-up;
        - ``warmup_shrink``: factor on the step size from failed steps in warm-up;
        - ``bias_discretisation`` and ``bias_noise``: relative errors of variances; ``bias_terms``:
          their formulas; or ``bias_note``: why there are none.
    """
    kernel, state = mcmc.sampler, mcmc.last_state
    fields = jax.device_get(mcmc.get_extra_fields(group_by_chain=True))
    adaptation, dynamics = jax.device_get((state.adaptation, state.dynamics))
    h, steps = (np.asarray(fields[name], float) for name in ("step_size", "num_steps"))
    taken = mcmc.thinning * steps.sum(1)
    epoch = 1 if kernel.plan is None else kernel.plan.steps_per_epoch
    found: dict[str, Any] = {"gradients": taken, "passes": taken / epoch}
    if kernel.facts.trajectory:  # one gradient more than steps, and an energy of all rows
        trajectories = taken / steps.mean(1)
        found["gradients"] = taken + trajectories
        found["passes"] = (taken + trajectories) / epoch + trajectories
    if kernel.facts.adjusted:
        found["target_accept"] = kernel.facts.target_accept
    tau, z = kernel.settings.temperature, state.z
    chains = np.size(state.i)
    allowed = bridged(tau, sum(x.size for x in jax.tree.leaves(z)) // chains)
    found["bridged"] = allowed
    ends = np.atleast_2d(adaptation.ends)
    if ends.shape[1] > 1:
        above = ends - ends[:, :1]
        found["searches"] = ends.shape[1]
        found["searches_above"] = np.sum(above > allowed, 1)
        found["search_gap"] = np.max(np.where(np.isfinite(above), above, 0.0), 1)
    if (scale := learned_scale(mcmc)) is not None:
        spread = np.asarray(scale, float)
        if scale.ndim == 3:
            spread = np.linalg.eigvalsh(spread)
        found["scale_condition"] = spread.max(1) / spread.min(1)
    if (choice := kernel.bound.choice) is not None:
        found["noise_without_control_variate"], found["noise_with_control_variate"] = choice.noise
    text = {"bias_note": _without_bias(kernel)}
    if structure := _structure(state, kernel.bound.shares):
        text["scale_structure"] = structure
    if is_measured(mcmc):
        rate = _by_chain(kernel.facts.rate(adaptation.slowest, dynamics))
        curvature, noise = _by_chain(adaptation.curvature), _by_chain(adaptation.noise)
        found["relaxation_steps"] = 1 / (h.mean(1) * rate)
        found["relaxations"] = mcmc.thinning * (h * steps).sum(1) * rate
        smallest = np.maximum(_by_chain(adaptation.curvature_low), 1e-30)
        found["curvature_ratio"] = curvature / smallest
        found["warmup_shrink"] = _by_chain(adaptation.shrink)
        if not text["bias_note"]:
            parts = kernel.facts.bias(curvature, noise, h.mean(1), dynamics)
            found["bias_discretisation"], found["bias_noise"], terms = parts
            del text["bias_note"]
            text["bias_terms"] = terms
    elif not text["bias_note"]:
        text["bias_note"] = (
            "not measured, because step_size and num_steps are both given (num_steps='auto' "
            "measures it, and the relaxation time)"
        )
    # for a single chain, a number
    numbers = {name: np.squeeze(np.asarray(x, float)).tolist() for name, x in found.items()}
    return {**numbers, **text}


def learned_scale(mcmc: MCMC) -> xr.DataArray | None:
    """The covariance of each chain's scaled coordinates, with named entries, or None."""
    scale = getattr(mcmc.last_state, "scale", ())
    if not scale:
        return None
    matrix, position = jax.device_get((scale.inverse_mass_matrix, mcmc.last_state.z))
    if mcmc.num_chains == 1 and np.ndim(mcmc.last_state.i) == 0:
        matrix = matrix[None]
    else:
        position = jax.tree.map(lambda x: x[0], position)
    names = [
        f"{jax.tree_util.keystr(path, simple=True, separator='.')}{list(i) or ''}"
        for path, x in jax.tree_util.tree_leaves_with_path(position)
        for i in np.ndindex(np.shape(x))
    ]
    dims = ("parameter", "other_parameter")[: matrix.ndim - 1]
    return xr.DataArray(
        matrix,
        dims=("chain", *dims),
        coords={dim: names for dim in dims},
        attrs={"description": "covariance of the unconstrained parameters that warm-up learned"},
    )


def _structure(state: Any, shares: Shares) -> str:
    """The structure of the coordinates in words; empty for a matrix, a diagonal and no scale."""
    scale, found = getattr(state, "scale", ()), []
    if scale and scale.is_structured:
        curvature = state.control.anchor.curvature if state.control else ()
        misfit = f", misfit {np.max(np.asarray(curvature.misfit)):.1g}" if curvature else ""
        found.append(f"{scale.root.layout!r}{misfit}")
    elif scale and scale.has_both:
        most = int(np.max(np.sum(np.asarray(scale.root.factors) != 1, axis=-1)))
        found.append(f"a diagonal and {most} other directions")
    for name, given in shares.items():
        share = np.asarray(given.share if isinstance(given, Path) else given)
        found.append(f"{name} not centred (share of rows {share.min():.2g} to {share.max():.2g})")
    return "; ".join(found)


def _by_chain(x: Any) -> np.ndarray:
    return np.atleast_1d(np.asarray(x, float))


def _without_bias(kernel: SGKernel) -> str:
    """Why the step size of a kernel has no such bias; empty if it has one."""
    if kernel.facts.adjusted:
        return "none, steps are Metropolis-adjusted"
    if kernel.settings.temperature == 0:
        return "temperature 0: the draws are the path of an optimiser, not of a posterior"
    if kernel.facts.bias is None:
        return f"none from a step size, see the docstring of {type(kernel).__name__}"
    return ""
