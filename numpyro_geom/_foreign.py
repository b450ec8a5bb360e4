"""Foreign arguments and objects: arguments of NUTS, and classes or guides in place of kernels."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Self

ALIASES: dict[str, tuple[str, ...]] = {
    "adapt_step_size": ("step_size",),
    "epsilon": ("step_size",),
    "find_heuristic_step_size": ("step_size",),
    "learning_rate": ("step_size",),
    "lr": ("step_size", "learning_rate"),
    "step_size": ("learning_rate",),
    "mass_matrix": ("inverse_mass_matrix",),
    "regularize_mass_matrix": ("adapt_mass_matrix",),
    "max_tree_depth": ("num_steps",),
    "trajectory_length": ("num_steps",),
    "minibatch_size": ("batch_size",),
    "subsample_size": ("batch_size",),
    "preconditioner": ("metric",),
    "target_accept": ("bias_tolerance",),
    "target_accept_prob": ("target_accept", "bias_tolerance"),
    "init_loc_fn": ("init_strategy",),
    "init_strategy": ("init_loc_fn",),
}
"""Foreign names (NumPyro's and others), and our names with the same meaning in order of choice."""

MEANINGS = {
    "adapt_mass_matrix": "True learns the scale in warm-up, and its estimate is always regularised",
    "batch_size": "the number of rows per step",
    "bias_tolerance": "the error of posterior variances that the step size may cause",
    "init_loc_fn": "where the search for the mode starts",
    "init_strategy": "where chains start",
    "inverse_mass_matrix": "the covariance from which the scale is learned",
    "learning_rate": "'auto' or the constant rate per row",
    "metric": "'identity', 'rmsprop', 'monge' and others",
    "num_steps": "'auto' or the number of steps between two draws",
    "step_size": "'auto' finds one in warm-up, a number or a schedule is used as it is",
    "target_accept": "the acceptance rate to aim at",
}
"""Meanings of our names."""

OF_KERNELS = {
    **dict.fromkeys(
        ("num_warmup", "num_samples", "num_chains", "thinning", "chain_method", "progress_bar"),
        "pass it to MCMC, as in MCMC(kernel, num_warmup=1000, num_samples=1000)",
    ),
    **dict.fromkeys(
        ("init_params", "extra_fields", "rng_key"), "pass it to mcmc.run(rng_key, ...)"
    ),
    "adjusted": "use SGRLD(model, adjusted=True) or GGMC(model), whose steps are tested",
    "friction": "use SGHMC, SGNHT or GGMC, which have a momentum",
    "thermostat_mass": "use SGNHT, which has a thermostat",
    "forward_mode_differentiation": "drop it, gradients are always of reverse mode",
}
"""Arguments that kernels leave to other objects."""
OF_GUIDES = {
    "num_samples": "pass sample_shape=(1000,) to sample_posterior",
    "init_params": "pass it to fit",
}
"""Arguments that guides leave to other objects."""


def refuse_foreign(cls: type, args: tuple, arguments: Mapping[str, Any]) -> None:
    """Raise for arguments that a class's constructor does not have.

    Raises:
        TypeError: for an unknown name, and for too many positional arguments.
    """
    parameters = inspect.signature(cls).parameters
    kinds = [p.kind for p in parameters.values()]
    places = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(places) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise TypeError(
            f"{cls.__name__} takes {len(places)} positional argument{'s' * (len(places) > 1)}, "
            f"{' and '.join(places)}, got {len(args)}: pass the others by name, such as "
            f"{next(n for n in parameters if n not in places)}=..."
        )
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    for name in arguments:
        if name not in parameters:
            raise TypeError(
                f"{cls.__name__} got an unexpected keyword argument {name!r}: "
                f"{_remedy(name, list(parameters))}"
            )


def _remedy(name: str, own: list[str]) -> str:
    """Advice on the replacement of a name."""
    for other in ALIASES.get(name, ()):
        if other in own:
            return f"use {other}, {MEANINGS[other]}"
    elsewhere = OF_KERNELS if "potential_fn" in own else OF_GUIDES
    if name in elsewhere:
        return elsewhere[name]
    close = difflib.get_close_matches(name, own, n=1, cutoff=0.7)
    return f"did you mean {close[0]!r}?" if close else f"expected some of {own}"


class FirstAsked(property):
    """The property that `MCMC` reads first. Read from a class, it raises an error with advice."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The value, if there is an instance."""
        if instance is None:
            name = getattr(owner, "__name__", owner)
            raise AttributeError(
                f"expected a kernel, got the class {name}: make one with a model, as in "
                f"MCMC({name}(model), num_warmup=1000, num_samples=1000)"
            )
        return super().__get__(instance, owner)


class Guide:
    """A guide: it raises an error with advice when `MCMC` reads a kernel's first property."""

    def __new__(cls, *args: Any, **arguments: Any) -> Self:  # noqa: D102
        refuse_foreign(cls, args, arguments)
        return super().__new__(cls)

    @property
    def sample_field(self) -> str:
        """Raise: a guide has no such field."""
        name = type(self).__name__
        raise AttributeError(
            f"expected a kernel, got {name}, a guide: call params = guide.fit(rng_key, *args) and "
            "guide.sample_posterior(rng_key, params, sample_shape=(1000,)), or use "
            "MCMC(SGRLD(model), ...)"
        )
