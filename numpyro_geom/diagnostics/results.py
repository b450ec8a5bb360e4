"""What a finished run, or the draws of a guide, give to the export.

`of_mcmc` and `of_draws` read them into one form, in which nothing tells where draws are from.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import MCMC, NUTS

from ..kernel import SGKernel
from ..laplace.draws import LaplaceDraws
from ..target.potential import takes_rng_key
from .replay import Arrays, host, is_numeric
from .summary import (
    SITE_TEMPERATURE,
    SamplingWarning,
    _outside,
    facts_as_attributes,
    is_measured,
)

PyTree = Any

LARGEST_SHAPE = 0.7
"""Pareto shape from which weights correct nothing (Vehtari et al., JMLR 25(72), 2024)."""
FEWEST_WEIGHTS = 25
"""Draws below which a tail, a fifth of them, has fewer than the five values that a shape needs."""
EQUAL_WEIGHTS = 0.01
"""Range of log weights, in nats, below which there is no tail that a shape could describe."""
RENAMED = {
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}


class Results(NamedTuple):
    """Draws and what is known of them.

    Attributes:
        model: what drew them, `param` sites at their values; None with ``potential_fn``.
        args: its arguments.
        kwargs: its keyword arguments.
        posterior: draws by name, shaped (chains, draws, ...).
        sample_stats: figures of each draw by name, shaped likewise.
        descriptions: what the figures are, by name.
        attributes: of ``posterior``: what is needed to repeat the run, as netCDF can store it.
        library: attributes of every group.
        targets_model: whether the draws are meant to be of the model's posterior.
    """

    model: Callable | None
    args: tuple
    kwargs: dict[str, Any]
    posterior: Arrays
    sample_stats: Arrays
    descriptions: dict[str, str]
    attributes: dict[str, Any]
    library: dict[str, str]
    targets_model: bool


def of_mcmc(mcmc: MCMC) -> Results:
    """Read a run that has been checked."""
    kernel = mcmc.sampler
    model, (args, kwargs) = getattr(kernel, "model", None), (mcmc._args, mcmc._kwargs)
    library = {"inference_library": "numpyro", "inference_library_version": numpyro.__version__}
    if isinstance(kernel, SGKernel):
        library = _this_library()
        if model is not None:
            model = kernel.runnable_model
            # as the kernel does: traced row indices cannot index a NumPy array
            args, kwargs = jax.tree.map(
                lambda x: jnp.asarray(x) if is_numeric(x) else x, (args, kwargs)
            )
    return Results(
        model=model,
        args=args,
        kwargs=kwargs,
        posterior=_name_leaves(mcmc.get_samples(group_by_chain=True), "z"),
        sample_stats=_sample_stats(mcmc),
        descriptions=_descriptions(kernel),
        attributes=_attributes(mcmc),
        library=library,
        # an expansion with target="factors" replaces priors
        targets_model=model is not None and not getattr(kernel, "replaced_sites", ()),
    )


def of_draws(draws: LaplaceDraws) -> Results:
    """Read the draws of a guide.

    Raises:
        ValueError: unless they have one or two dimensions.
    """
    shape = _chains_and_draws(draws)

    def by_chain(x: Any) -> np.ndarray:
        array = host(x)
        return array.reshape((*shape, *array.shape[np.ndim(draws.success) :]))

    stats = {"success": draws.success, "n_fevals": draws.num_evaluations}
    if draws.log_weight is not None:
        stats["log_weight"] = draws.log_weight
    attributes = {
        "guide": "RiemannianLaplace",
        **_storable(draws.settings),
        "seconds_per_draw": float(draws.seconds),
        **_versions(),
    }
    if draws.pareto_k is not None:
        attributes["pareto_k"] = float(draws.pareto_k)
    return Results(
        model=draws.model,
        args=draws.args,
        kwargs=draws.kwargs,
        posterior={name: by_chain(x) for name, x in draws.samples.items()},
        sample_stats={name: by_chain(x) for name, x in stats.items()},
        descriptions={
            "success": "whether the geodesic was followed to its end",
            "n_fevals": "evaluations of the geodesic's acceleration",
            "log_weight": "log target density minus log density of the draw, up to a constant; "
            "-inf where the geodesic failed",
        },
        attributes=attributes,
        library=_this_library(),
        targets_model=True,
    )


def warn_if_far(draws: LaplaceDraws) -> None:
    """Warn where geodesics failed, and where weights say that the draws are not the posterior's."""
    for message in _problems(draws):
        warnings.warn(message, SamplingWarning, stacklevel=_outside())


def _problems(draws: LaplaceDraws) -> Iterator[str]:
    success = np.asarray(draws.success)
    is_fisher = draws.settings["metric"] == "fisher"
    if not success.all():
        remedy = "reparametrise the model" if is_fisher else "use metric='fisher'"
        yield (
            f"{np.sum(~success)} of {success.size} geodesics failed: these draws, which `success` "
            "in sample_stats marks, are where the solver stopped, and leaving them out biases what "
            "is left. Draw again from a guide with a larger max_steps or rtol, standardise the "
            f"inputs, or {remedy}"
        )
    if draws.pareto_k is None or draws.pareto_k < LARGEST_SHAPE:
        return
    weights = np.asarray(draws.log_weight, float)
    weights = weights[np.isfinite(weights)]
    enough = weights.size >= FEWEST_WEIGHTS
    if enough and np.ptp(weights) < EQUAL_WEIGHTS:
        return
    if not enough or not np.isfinite(draws.pareto_k):
        yield (
            f"pareto_k could not be estimated from {weights.size} draws with a weight, and how "
            "near they are to the posterior is not known: draw some hundreds or more"
        )
        return
    other = "mode='hausdorff'" if is_fisher else "metric='fisher'"
    yield (
        f"pareto_k is {draws.pareto_k:.2g}, and from {LARGEST_SHAPE} on weights cannot turn the "
        "draws into draws of the posterior: leave log_weight alone, and take means and intervals "
        f"for rough ones. Run MCMC, reparametrise the model, or try {other}"
    )


def _chains_and_draws(draws: LaplaceDraws) -> tuple[int, int]:
    shape = np.shape(draws.success)
    if len(shape) not in (1, 2) or 0 in shape:
        got = f"sample_shape={shape}" if shape else "a single draw, sample_shape=()"
        raise ValueError(
            "expected draws with sample_shape=(draws,) or (chains, draws), at least one, got "
            f"{got}: call `guide.draw(rng_key, params, sample_shape=(4, 500))`, for instance"
        )
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def paths(
    tree: PyTree, root: str, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """Leaves of a pytree, named by path; ``root`` comes before paths that start with a number."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        keys = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path]
        if not keys or not isinstance(keys[0], str):
            keys.insert(0, root)
        yield ".".join(map(str, keys)), leaf


def _name_leaves(tree: PyTree, root: str) -> Arrays:
    return {name: host(leaf) for name, leaf in paths(tree, root)}


# Of a run


def _sample_stats(mcmc: MCMC) -> Arrays:
    kernel = mcmc.sampler
    stats: Arrays = {}
    for field, value in mcmc.get_extra_fields(group_by_chain=True).items():
        if field == "site_temperatures" and len(value) > 1:  # of a single site it is that of all
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
    if isinstance(kernel, NUTS) and "n_steps" in stats:
        stats["tree_depth"] = np.log2(stats["n_steps"]).astype(int) + 1
    return stats


def _attributes(mcmc: MCMC) -> dict[str, Any]:
    """What is needed to repeat a run, in types that netCDF can store."""
    kernel, state = mcmc.sampler, mcmc.last_state
    attrs: dict[str, Any] = {
        "kernel": type(kernel).__name__,
        "num_chains": mcmc.num_chains,
        "num_warmup": mcmc.num_warmup,
        "num_samples": mcmc.num_samples,
        "thinning": mcmc.thinning,
        **_versions(),
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
        figures["lam_H"] = state.adaptation.curvature
        figures["lam_C"] = state.adaptation.noise
        figures["lam_min"] = state.adaptation.slowest
    # a number, or one a chain
    attrs.update({name: np.asarray(x).tolist() for name, x in figures.items()})
    attrs.update(facts_as_attributes(mcmc))
    return attrs


def _descriptions(kernel: Any) -> dict[str, str]:
    """What the figures in ``sample_stats`` are, energies above all."""
    if not isinstance(kernel, SGKernel):
        return {}
    if kernel.plan is None:
        estimated = takes_rng_key(kernel.potential_fn)  # type: ignore[arg-type]
    else:
        estimated = bool(kernel.plan.batch_sizes)
    source = "minibatch estimate" if estimated else "on all data"
    texts = {
        "energy": f"U in nats where the last step of the draw started, {source}",
        "lp": f"minus U in nats where the last step of the draw started, {source}",
        "diverging": "a step of the draw was not finite or unstable, and was undone",
        "grad_norm": f"Euclidean norm of grad U where the last step of the draw started, {source}",
        "configurational_temperature": "mean over the draw's steps of (z - c) . grad U / D, with c "
        "where the chain was at the end of warm-up; its mean is the temperature",
        "kinetic_temperature": "r'M^-1 r / D of the momentum, a mean over the draw's steps",
        "step_size": "h of the last step of the draw",
        "n_steps": "stochastic-gradient steps of the draw",
        "acceptance_rate": "mean acceptance probability of the draw's steps",
    }
    if kernel.facts.trajectory:
        texts["energy"] = "U in nats of the draw, on all data"
        texts["lp"] = "minus U in nats of the draw, on all data"
        texts["diverging"] = "the trajectory's energy error was not finite or above 1000 tau"
        texts["acceptance_rate"] = "acceptance probability of the draw's trajectory"
        texts["kinetic_temperature"] = "r'M^-1 r / D of the draw's momentum, after the trajectory"
        texts["grad_norm"] += "; at the trajectory's start"
        texts["configurational_temperature"] = texts["configurational_temperature"].replace(
            "mean over the draw's steps of ", "at the trajectory's start "
        )
    return texts


def _storable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in types that netCDF can store."""
    return {n: int(value) if isinstance(value, bool) else value for n, value in settings.items()}


def _versions() -> dict[str, str]:
    from .. import __version__  # not yet defined while the package is being imported

    return {
        "numpyro_geom_version": __version__,
        "numpyro_version": numpyro.__version__,
        "jax_version": jax.__version__,
        "arviz_version": metadata.version("arviz"),
    }


def _this_library() -> dict[str, str]:
    version = _versions()["numpyro_geom_version"]
    return {"inference_library": "numpyro_geom", "inference_library_version": version}
