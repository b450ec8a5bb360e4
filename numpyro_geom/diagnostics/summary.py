"""The table of a run, what limits its step size, and warnings where the draws mislead."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from ..kernel import SGKernel
from ..warmup.step_size import MAX_NUM_STEPS

ENOUGH_RELAXATIONS = 50
"""Relaxation times below which a run is too short: about 25 independent draws."""
WIDE_CURVATURE = 10.0
"""Ratio of curvatures measured along a chain above which one step size does not fit."""

SITE_TEMPERATURE = "configurational_temperature."
"""What the name of a site's temperature among ``sample_stats`` begins with."""


class SamplingWarning(UserWarning):
    """The draws may be wrong or too few; the message says what to do."""


class _Facts(NamedTuple):
    """What a run of a stochastic-gradient kernel tells; arrays have one entry a chain."""

    step_size: np.ndarray  # mean over the run
    num_steps: np.ndarray  # steps a draw, mean over the run
    steps: np.ndarray  # steps of the run, between kept draws too
    travelled: np.ndarray  # sum of the step sizes of all those steps
    undone: int  # draws with an undone step
    draws: int
    measured: bool
    shrink: np.ndarray
    curvature: np.ndarray
    curvature_low: np.ndarray
    rate: np.ndarray  # of relaxation in the slowest direction, per unit of step size
    noise: np.ndarray
    clamped: float | None  # share of entries whose noise could not be taken away; None without
    dynamics: Any

    def budget(self, kernel: SGKernel) -> tuple[np.ndarray, np.ndarray, str]:
        """Relative errors of a variance from discretisation and minibatch noise, and their text."""
        disc, noise, text = kernel.rule.bias(
            self.curvature, self.noise, self.step_size, self.dynamics
        )
        return np.asarray(disc), np.asarray(noise), text

    @property
    def relaxation(self) -> np.ndarray:
        """Steps in which the slowest direction relaxes."""
        return 1 / (self.step_size * self.rate)

    @property
    def relaxations(self) -> np.ndarray:
        """Relaxation times that the run spans."""
        return self.travelled * self.rate


def check_run(mcmc: Any) -> None:
    """Raise unless ``mcmc`` is an MCMC that has drawn something.

    Raises:
        TypeError: if it is not a `numpyro.infer.MCMC`.
        ValueError: if it has no draws.
    """
    if not isinstance(mcmc, MCMC):
        raise TypeError(
            f"expected a numpyro.infer.MCMC, got {type(mcmc).__name__}: pass the object itself, "
            "not its draws"
        )
    if mcmc._states is None:
        raise ValueError("the MCMC has not run: call `mcmc.run(rng_key, ...)` first")
    state = mcmc.last_state
    if state is not None and state is mcmc.post_warmup_state:  # so it is before a run is resumed
        draws = getattr(state, "i", None)
        if draws is not None and int(np.max(draws)) <= mcmc.num_warmup:
            raise ValueError(
                "the MCMC has only been warmed up and holds no draws of the posterior: call "
                "`mcmc.run(rng_key, ...)` first"
            )
    if not jax.tree.leaves(mcmc._states[mcmc._sample_field]):
        raise ValueError(
            "the run holds no draws of any site: do not exclude all of them in `extra_fields`"
        )


def is_measured(mcmc: MCMC) -> bool:
    """Whether warm-up has measured curvature and noise: not where nothing was automatic."""
    kernel = mcmc.sampler
    # the first measurement is before the second draw
    return isinstance(kernel, SGKernel) and kernel.measures and int(np.min(mcmc.last_state.i)) > 1


def facts_as_attributes(mcmc: MCMC) -> dict[str, Any]:
    """What `numpyro_geom.diagnostics.diagnose` needs of a run besides draws and their figures.

    A number, or one a chain, each: types that netCDF can store. The kernel must be one of this
    package's.
    """
    kernel, facts = mcmc.sampler, _facts(mcmc)
    epoch = 1 if kernel.plan is None else kernel.plan.steps_per_epoch
    found: dict[str, Any] = {"gradients": facts.steps, "passes": facts.steps / epoch}
    if kernel.facts.trajectory:  # one gradient more than steps, and an energy of all rows
        trajectories = facts.steps / facts.num_steps
        found = {
            "gradients": facts.steps + trajectories,
            "passes": (facts.steps + trajectories) / epoch + trajectories,
        }
    if kernel.facts.adjusted:
        found["target_accept"] = kernel.facts.target_accept
    if facts.clamped is not None:
        found["clamped"] = facts.clamped
    if facts.measured:
        found["relaxation_steps"], found["relaxations"] = facts.relaxation, facts.relaxations
        found["curvature_ratio"] = facts.curvature / np.maximum(facts.curvature_low, 1e-30)
        if kernel.rule.bias is not None and not kernel.facts.adjusted and kernel.temperature > 0:
            found["bias_discretisation"], found["bias_noise"], _ = facts.budget(kernel)
    # of a single chain a number
    return {name: np.squeeze(np.asarray(x, float)).tolist() for name, x in found.items()}


def step_size_summary(mcmc: MCMC) -> str:
    """What step size a run had, what bias that causes, and what limits it, in a few lines.

    The bias of a variance is h lam_H / 2 from discretisation plus h lam_C / (2 tau) from
    minibatch noise, to first order, in the worst direction. Several chains give a range.

    Args:
        mcmc: a run MCMC whose kernel is one of this package's.

    Returns:
        Lines of text: step size and steps a draw; the bias against ``bias_tolerance``, which
        limit binds and what to do; relaxation times 1 / (h lam_min) that the run spans; draws
        with undone steps; the mean configurational temperature against tau.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC, or has another kernel.
        ValueError: if it has not run.
    """
    check_run(mcmc)
    kernel = mcmc.sampler
    if not isinstance(kernel, SGKernel):
        raise TypeError(
            "step_size_summary needs a kernel of numpyro_geom, such as SGRLD, got "
            f"{type(kernel).__name__}"
        )
    facts = _facts(mcmc)
    return "\n".join(
        [
            f"step size h: {_span(facts.step_size)}, steps a draw: {_span(facts.num_steps)}",
            *_bias_lines(mcmc, kernel, facts),
            *_relaxation_lines(kernel, facts),
            *_clamped_lines(facts),
            f"undone steps: in {facts.undone} of {facts.draws} draws",
            *_temperature_lines(mcmc, kernel),
            *_kinetic_lines(mcmc, kernel),
        ]
    )


def print_summary(mcmc: MCMC, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
    """Print NumPyro's table of a run, then `step_size_summary`, and warn where needed.

    With a kernel that is not one of this package's only the table is printed.

    Args:
        mcmc: a run MCMC.
        prob: mass of the credible intervals in the table.
        exclude_deterministic: leave deterministic sites out of the table.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC.
        ValueError: if it has not run.

    Warns:
        SamplingWarning: see `warn_if_unreliable`.
    """
    check_run(mcmc)
    mcmc.print_summary(prob=prob, exclude_deterministic=exclude_deterministic)
    if isinstance(mcmc.sampler, SGKernel):
        print(step_size_summary(mcmc))
    warn_if_unreliable(mcmc)


def warn_if_unreliable(mcmc: MCMC) -> None:
    """Warn where a run's draws are biased, too few, or not the target's.

    A `SamplingWarning` is issued when

    - steps were undone after warm-up because they were not finite or unstable;
    - the run spans fewer than 50 relaxation times of the slowest direction;
    - the step size, a number or a schedule, causes more bias than ``bias_tolerance``;
    - the curvature that warm-up measured varied by a factor of more than 10.

    The last three need ``step_size="auto"`` or ``num_steps="auto"``: otherwise nothing is
    measured. Kernels that are not this package's cause no warning.

    Args:
        mcmc: a run MCMC.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC.
        ValueError: if it has not run.
    """
    check_run(mcmc)
    kernel = mcmc.sampler
    if not isinstance(kernel, SGKernel):
        return
    for message in _problems(kernel, _facts(mcmc)):
        warnings.warn(message, SamplingWarning, stacklevel=_outside())


def _problems(kernel: SGKernel, facts: _Facts) -> list[str]:
    automatic = kernel.automatic
    found = []
    if facts.undone:
        remedy = (
            "a longer warm-up (each undone step in it halves the step size) or a smaller "
            "bias_tolerance"
            if automatic
            else "a smaller step_size"
        )
        found.append(
            f"steps were undone after warm-up in {facts.undone} of {facts.draws} draws, because "
            "they were not finite or unstable: draws avoid the region where that happens. Use "
            f"{remedy}, or check that the model is proper and finite there"
        )
    if not facts.measured:
        return found
    spans = float(np.median(facts.relaxations))
    if spans < ENOUGH_RELAXATIONS:
        found.append(
            f"a chain spans about {spans:.2g} relaxation times of the slowest direction "
            f"({_span(facts.relaxation)} steps each), fewer than {ENOUGH_RELAXATIONS}: its draws "
            "are few in effect and may not have reached the target. Increase num_samples or "
            "num_steps, or use a metric that fits the posterior's scales better"
            + (", or a larger batch_size" if _noise_binds(kernel, facts) else "")
        )
    given = not automatic and kernel.rule.bias is not None and not kernel.facts.adjusted
    if given and kernel.temperature > 0:
        total = float(np.max(sum(facts.budget(kernel)[:2])))
        if total > kernel.bias_tolerance:
            limit = float(np.mean(facts.step_size)) * kernel.bias_tolerance / total
            found.append(
                f"variances are too large by up to about {total:.2g} (relative), more than "
                f"bias_tolerance={kernel.bias_tolerance:g}: use step_size='auto', or a step size "
                f"of at most {limit:.2g}" + _noise_hint(kernel, facts)
            )
    ratio = float(np.max(facts.curvature / np.maximum(facts.curvature_low, 1e-30)))
    if ratio > WIDE_CURVATURE:
        found.append(
            f"the curvature measured in the second half of warm-up varied by a factor of "
            f"{ratio:.2g}: one step size does not fit all of the posterior, and where the "
            "curvature is largest the draws are the most biased. Reparametrise the model (a "
            "non-centred hierarchy, for instance), use a smaller bias_tolerance, or compare with "
            "a run at a tenth of the step size"
        )
    return found


def _facts(mcmc: MCMC) -> _Facts:
    fields = jax.device_get(mcmc.get_extra_fields(group_by_chain=True))
    adaptation, dynamics = jax.device_get((mcmc.last_state.adaptation, mcmc.last_state.dynamics))
    clamped = getattr(getattr(dynamics, "extra", dynamics), "clamped", None)
    h = np.asarray(fields["step_size"], float)
    steps = np.asarray(fields["num_steps"], float)
    return _Facts(
        step_size=h.mean(1),
        num_steps=steps.mean(1),
        steps=mcmc.thinning * steps.sum(1),
        travelled=mcmc.thinning * (h * steps).sum(1),
        undone=int(fields["diverging"].sum()),
        draws=fields["diverging"].size,
        measured=is_measured(mcmc),
        shrink=np.atleast_1d(adaptation.shrink).astype(float),
        curvature=np.atleast_1d(adaptation.curvature).astype(float),
        curvature_low=np.atleast_1d(adaptation.curvature_low).astype(float),
        rate=np.atleast_1d(mcmc.sampler.rule.rate(adaptation.slowest, dynamics)).astype(float),
        noise=np.atleast_1d(adaptation.noise).astype(float),
        clamped=None if clamped is None else float(np.mean(clamped)),
        dynamics=dynamics,
    )


def _noise_binds(kernel: SGKernel, facts: _Facts) -> bool:
    tau = kernel.temperature if kernel.temperature > 0 else 1.0
    return not kernel.facts.adjusted and bool(
        np.median(facts.noise) / tau > np.median(facts.curvature)
    )


def _noise_hint(kernel: SGKernel, facts: _Facts) -> str:
    if not _noise_binds(kernel, facts):
        return ""
    return "; a larger batch_size lowers the bias of a given step size in proportion"


def _noise_remedy(kernel: SGKernel) -> str:
    if kernel.settings.control_variate or kernel.model is None:
        return "a larger batch_size allows larger steps, in proportion"
    return "control_variate=True or a larger batch_size allows larger steps"


def _bias_lines(mcmc: MCMC, kernel: SGKernel, facts: _Facts) -> list[str]:
    if kernel.facts.adjusted:
        accepted = float(np.mean(mcmc.get_extra_fields(group_by_chain=True)["accept_prob"]))
        return [
            f"no bias, steps are Metropolis-adjusted: acceptance rate {accepted:.2f} "
            f"(target {kernel.facts.target_accept})"
        ]
    if kernel.temperature == 0:
        return ["temperature 0: the draws are the path of an optimiser, not of a posterior"]
    if kernel.rule.bias is None:
        return [f"bias: not that of a step size, see the docstring of {type(kernel).__name__}"]
    if not facts.measured:
        return [
            "bias and relaxation time: not measured, because step_size and num_steps are both "
            "given (num_steps='auto' measures them)"
        ]
    discretisation, noise, text = facts.budget(kernel)
    lines = [
        f"relative bias of variances: {text.format(_span(discretisation), _span(noise))}; "
        f"bias_tolerance is {kernel.bias_tolerance:g}"
    ]
    noisy = _noise_binds(kernel, facts)
    limit = "minibatch noise" if noisy else "discretisation"
    total = float(np.max(discretisation + noise))
    if kernel.automatic and np.min(facts.shrink) < 1:
        lines.append(
            "undone steps in warm-up bind: they made the step size smaller by a factor of "
            f"{_span(1 / facts.shrink)}; a model without such regions allows larger steps"
        )
    elif kernel.automatic:
        remedy = (
            _noise_remedy(kernel)
            if noisy
            else "a metric that fits the posterior's scales allows larger steps"
        )
        lines.append(f"{limit} binds: {remedy}; less bias by a smaller bias_tolerance")
    elif total > kernel.bias_tolerance:
        limit_h = float(np.mean(facts.step_size)) * kernel.bias_tolerance / total
        lines.append(
            f"{limit} is the larger part: take a step size of at most {limit_h:.2g}"
            + (" or a larger batch_size" if noisy else "")
        )
    return lines


def _clamped_lines(facts: _Facts) -> list[str]:
    if facts.clamped is None:
        return []
    return [
        f"noise correction: {100 * facts.clamped:.2g}% of the entries had more minibatch "
        "noise than could be taken from the injected one"
    ]


def _relaxation_lines(kernel: SGKernel, facts: _Facts) -> list[str]:
    if not facts.measured:
        return []
    formula = "" if kernel.facts.momentum else " 1 / (h lam_min)"
    text = (
        f"relaxation time{formula}: {_span(facts.relaxation)} steps; a chain of "
        f"{_span(facts.steps)} steps spans {_span(facts.relaxations)} of them"
    )
    if np.median(facts.relaxations) < ENOUGH_RELAXATIONS:
        text += f", too few (below {ENOUGH_RELAXATIONS}): increase num_samples"
        bounded = np.max(facts.num_steps) >= MAX_NUM_STEPS
        text += (
            f", give num_steps (the automatic one stops at {MAX_NUM_STEPS}), or use another metric"
            if bounded
            else " or num_steps, or use another metric"
        )
    return [text]


def _temperature_lines(mcmc: MCMC, kernel: SGKernel) -> list[str]:
    values = np.asarray(
        mcmc.get_extra_fields(group_by_chain=True)["configurational_temperature"], float
    )
    mean, tau = float(values.mean()), kernel.temperature
    text = f"configurational temperature: {mean:.3g}"
    if values.shape[1] >= 4 and values.std() > 0:  # what an effective sample size needs
        error = float(values.std() / np.sqrt(effective_sample_size(values)))
        text += f" +- {error:.2g} (Monte Carlo error)"
        # the bias that is tolerated shows up here too
        if abs(mean - tau) > 3 * error + kernel.bias_tolerance * tau:
            verdict = "higher" if mean > tau else "lower"
            return [
                f"{text}, {verdict} than tau = {tau:g}: the chain has not reached the target, or "
                "the step size is too large"
            ]
    return [f"{text}, expected tau = {tau:g}"]


def _kinetic_lines(mcmc: MCMC, kernel: SGKernel) -> list[str]:
    if not kernel.facts.momentum:
        return []
    values = mcmc.get_extra_fields(group_by_chain=True)["kinetic_temperature"]
    mean = float(np.mean(np.asarray(values, float)))
    return [f"kinetic temperature: {mean:.3g}, expected tau = {kernel.temperature:g}"]


def _span(values: np.ndarray) -> str:
    """One figure, or the range over chains where they differ visibly."""
    low, high = (_figure(float(x)) for x in (np.min(values), np.max(values)))
    return low if low == high else f"{low} to {high}"


def _figure(x: float) -> str:
    """Three digits; large figures are counts."""
    text = f"{x:.3g}"
    return f"{float(text):,.0f}" if 1000 <= abs(x) < 1e9 else text


def _outside() -> int:
    """Stack level of the first caller outside this package, where a warning should point."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level
