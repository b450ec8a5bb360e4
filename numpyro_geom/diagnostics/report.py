"""One report of a run: each line has a figure, its expected value, and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from .._checks import check_flag, check_number
from .._util import evenly
from .checks import CHECKS, Check, checks_of
from .draws import LEAST_PER_CHAIN, Arrays, check_run, chosen, group_of, mixing_of
from .facts import Run
from .inference_data import run_of_mcmc, targets_model
from .moments import gradients_at_draws, moment_errors
from .replay import latent_draws, model_of, pointwise_log_prob, summed_out
from .table import FLAGGED, Printed, Row

UNDECIDED = "?"
GROUPS = ("Mixing", "Bias", "Step", "Cost")


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Printed):
    """What `diagnose` found; prints as a table, also in notebooks.

    Attributes:
        checks: tuple of `Check`; the first one that is flagged is the cause of the others.
    """

    checks: tuple[Check, ...]
    _align = (str.ljust, str.ljust)

    @property
    def ok(self) -> bool:
        """Whether no check is flagged."""
        return not self.flagged

    @property
    def flagged(self) -> tuple[Check, ...]:
        """Checks whose figure is not as expected."""
        return tuple(check for check in self.checks if check.ok is False)

    @property
    def undecided(self) -> tuple[Check, ...]:
        """Checks with an expected value for which Monte Carlo error prevents a decision."""
        return tuple(check for check in self.checks if check.ok is None and check.threshold)

    @property
    def verdict(self) -> str:
        """One sentence: whether the run is fine, or what is wrong with it."""
        if not self.flagged:
            unknown = "; ".join(check.name for check in self.undecided)
            return f"Verdict: {f'no fault found; not known: {unknown}' if unknown else 'fine'}."
        cause = self.flagged[0]
        figure = f"{cause.name}: {cause.figure}, expected {cause.threshold}"
        return f"Verdict: {CHECKS[cause.name].problem} ({figure})."

    def _above(self) -> list[str]:
        flagged, hidden = len(self.flagged), len(self.undecided)
        text = "Nothing is flagged"
        if flagged:
            text = f"{flagged} of {len(self.checks)} figures flagged"
        if hidden:
            text += f", {hidden} undecided (marked {UNDECIDED})"
        return [self.verdict, f"{text}."]

    def _table(self) -> list[Row]:
        rows = [Row(("", "figure", "value", "expected"), ("",))]
        given: set[str] = set()
        for group in GROUPS:
            found = [check for check in self.checks if CHECKS[check.name].group == group]
            rows += [Row((group,))] if found else []
            for check in found:
                # advice that several checks give is shown once
                new = check.ok is False and check.advice not in given
                given |= {check.advice} if new else set()
                mark = {True: "ok", False: FLAGGED, None: UNDECIDED if check.threshold else ""}
                first = mark[check.ok].ljust(len(FLAGGED))
                cells = (first, check.name, check.figure, check.threshold)
                rows.append(Row(cells, (check.where, check.advice if new else "")))
        return rows


def diagnose(
    source: Any,
    *,
    var_names: str | Sequence[str] | None = None,
    gradients: bool = True,
    seconds: float | None = None,
) -> Report:
    r"""Say whether the draws of a run can be trusted, and what to do if they cannot.

    The first line is a verdict with its cause. The figures follow in the groups Mixing, Bias, Step
    and Cost. Figures that do not apply are left out. Each figure has one of four outcomes:

    - as expected: ``ok`` is True;
    - flagged (``!!``), because the figure is not as expected: ``ok`` is False;
    - undecided (``?``), because Monte Carlo error is too large to decide: ``ok`` is None;
    - without an expected value: ``ok`` is None.

    The checks (each is a function of `numpyro_geom.diagnostics.checks`):

    - **draws**: values that are not finite; effective sample sizes, of a mean or of a square about
      it, at least 400 over all chains; rank-normalised R-hat, at most 1.01. For more than four
      chains, the bound on R-hat is its value at 400 effective draws, (1 + 2 chains / 400)^1/2.
      These checks detect chains that are too short or that disagree. They cannot detect a bias
      that all chains share.
    - **moments**: errors of the means, at most 0.25 sd, and of the standard deviations, at most 3%,
      beyond Monte Carlo error with a chance of 1% over all coordinates together. They are those of
      the worst unconstrained coordinate, from gradients of U on all rows at the draws
      (`numpyro_geom.diagnostics.moments` has the identities). The sds detect the bias of any kernel
      in the region where the draws are, and the means detect chains that have not converged.
      Neither detects a mode that no chain visits. Where the draws cannot determine all
      correlations (above 200 dimensions), the two are flagged or undecided.
    - **temperatures**: means over all steps that are tau for the target, within ``bias_tolerance``.
    - **step size**: the bias of variances that the step size causes, to first order, at most
      ``bias_tolerance``, if warm-up has measured it.
    - **length**: the number of relaxation times 1 / (h lam_min) that a chain spans, at least 50.
    - **divergences**: draws with steps that were not finite or not stable, at most 1%, or with
      rejected trajectories of huge energy errors, at most 0.5%.
    - **chains**: a chain that does not move, whose energy stays far above where it started, or far
      above that of another chain; a metric with ``divergence="corrected"`` whose memory is long.
      ``mcmc.run`` warns of these at its end, and of chains that hardly move; a long run when its
      draws are first read.
    - **guides**: failed geodesics, the Pareto shape of the weights, and the means and sds without
      weights against those with weights, with the tolerances of **moments**.

    Args:
        source: an `MCMC` that has run, with any kernel; or the result of `to_inference_data` (with
            ``gradients=True`` it includes the checks of moments); or any other InferenceData or
            DataTree with a ``posterior`` group.
        var_names: names of the variables of ``posterior`` for R-hat and effective sample sizes;
            None for all. Weights of a network can be exchanged, so None then judges the densities
            of 64 rows in their place.
        gradients: if True, and ``source`` is an MCMC, evaluate the gradient on all rows at the
            draws, for the checks of moments. It costs one pass over the data per draw, and some
            for lines between draws. One gradient is timed. All of them take at most ten seconds;
            draws are left out accordingly. The checks are undecided if fewer than eight draws of
            each chain would be left.
        seconds: sampling time in seconds, for effective draws per second. None for the attribute
            ``sampling_time`` of ``posterior``, if there is one.

    Returns:
        A `Report`.

    Raises:
        TypeError: for another source.
        ValueError: if the MCMC has not run, if there is no ``posterior``, or if a variable does not
            exist.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_geom import SGRLD
        >>> from numpyro_geom.diagnostics import diagnose
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> y = 3 + jax.random.normal(jax.random.key(1), (100,))
        >>> mcmc = MCMC(SGRLD(model), num_warmup=100, num_samples=20, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), y)
        >>> report = diagnose(mcmc)
        >>> report.ok
        False
        >>> [check.name for check in report.flagged][:2]
        ['relaxation times per chain', 'effective sample size']

    References:
        Vehtari et al., "Rank-normalization, folding, and localization: an improved R-hat",
        Bayesian Analysis 16(2), 2021. Stein, "A bound for the error in the normal approximation",
        1972 (the identity); Gorham, Mackey, "Measuring sample quality with Stein's method", 2015
        (its use on draws).
    """
    check_flag("gradients", gradients)
    if isinstance(source, MCMC):
        check_run(source)
        run = run_of_mcmc(source)
        arrays, told = _gradients(source, run) if gradients else ({}, {})
        run = run._replace(facts={**run.facts, **told})
    else:
        _check_container(source)
        names = ("posterior", "sample_stats", "unconstrained_posterior")
        draws, stats, arrays = (group_of(source, name) for name in names)
        run = Run(draws, stats, source["posterior"].attrs)
    if seconds is None:
        seconds = run.facts.get("sampling_time")
    if seconds is not None:
        seconds = check_number("seconds", seconds, above=0.0)
    judged: Any = run.draws
    if var_names is None and run.facts.get("network"):
        judged = densities_of_rows(source, run) if isinstance(source, MCMC) else {}
    if var_names is not None:
        judged = {n: judged[n] for n in chosen(var_names, judged, "the posterior")}
    moments = moment_errors(arrays, run.temperature)
    mixing = mixing_of(judged, independent="guide" in run.facts)
    run = run._replace(mixing=mixing, moments=moments, seconds=seconds)
    return Report(tuple(checks_of(run)))


def _gradients(mcmc: MCMC, run: Run) -> tuple[Arrays, dict[str, Any]]:
    model = model_of(mcmc)
    if model is None or not targets_model(mcmc) or run.facts.get("network"):
        return {}, {}
    summed = summed_out(model, run.draws)
    draws = [run.draws.get(name) for name in model.of_kind("latent") if name not in summed]
    if not draws or not all(x is not None and x.dtype.kind == "f" for x in draws):
        return {}, {}
    return gradients_at_draws(model, run.draws, least_draws=LEAST_PER_CHAIN)


def densities_of_rows(mcmc: MCMC, run: Run, most: int = 64) -> Arrays:
    """Log densities of up to ``most`` rows at each draw: what a network predicts, in one number."""
    model: Any = model_of(mcmc)
    sites = [s for s in model.plan.sites if s.observed and s.plates]
    plates = {plate: model.plan.sizes[plate] for s in sites for plate, _ in s.plates}
    rows = {p: jnp.asarray(evenly(size, most), jnp.int32) for p, size in plates.items()}
    if not rows:
        return {}
    draws, (chains, count) = latent_draws(model, run.draws), np.shape(run.stats["diverging"])
    found = pointwise_log_prob(model, draws, [s.name for s in sites], rows)
    return {f"density of {n}": x.reshape((chains, count, -1)) for n, x in found.items()}


def _check_container(source: Any) -> None:
    if hasattr(source, "posterior"):
        return
    if type(source).__name__ in ("Dataset", "DataTree", "InferenceData"):
        raise ValueError(
            "expected a group `posterior`, and there is none: pass what "
            "`numpyro_geom.to_inference_data(mcmc)` returns"
        )
    raise TypeError(
        "expected a numpyro.infer.MCMC that has run, or the InferenceData or DataTree of one, "
        f"got {type(source).__name__}"
    )
