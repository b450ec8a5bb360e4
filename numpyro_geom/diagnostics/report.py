"""One report of a run, each line a figure, what it should be, and what to do.

`diagnose` has all of it; `step_size_summary`, `print_summary` and `warn_if_unreliable` what needs
neither draws nor gradients at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xarray as xr
from numpyro.infer import MCMC

from .._checks import check_flag, check_number
from .._warning import warn_outside
from ..kernel import SGKernel
from . import checks
from .arrays import Arrays, chosen
from .draw_checks import draw_checks, guide_checks
from .full_data import read_model
from .gradients import gradients_at_draws
from .moment_errors import moment_checks
from .report_table import Report
from .run_checks import run_checks
from .run_record import RunRecord, record_of_container, record_of_mcmc
from .sources import check_run
from .step_shift import shift_checks


def diagnose(
    source: Any,
    *,
    var_names: str | Sequence[str] | None = None,
    gradients: bool = True,
    seconds: float | None = None,
) -> Report:
    r"""Say whether the draws of a run can be trusted, and what to do where they cannot.

    The first line is a verdict with its cause. Figures follow in the groups Mixing, Bias, Step and
    Cost; those that do not apply are left out. One is flagged (``!!``, and ``ok`` is False) if it
    is not as expected, and undecided (``?``, and ``ok`` is None) where Monte Carlo error is too
    large to say; ``ok`` is None too where nothing is expected. `warn_if_unreliable` warns of the
    flagged ones of the last four kinds, which need neither draws nor gradients, and
    `step_size_summary` shows these:

    - **draws**: values that are not finite; effective sample sizes, bulk and tail, of at least 400
      in all; R-hat (rank-normalised) at most 1.01, or, of more than four chains, what 400
      effective draws make of it, (1 + 2 chains / 400)^1/2. They see chains that are too short or
      disagree, and nothing of a bias that all chains share.
    - **moments**: error of the means, in standard deviations, and relative error of the standard
      deviations, both of the worst unconstrained coordinate, from gradients of U on all rows at the
      draws: for draws of exp(-U / tau), with m and S their mean and covariance,

          E[(S grad U)_j] = 0,    E[(theta_j - m_j) (S grad U)_j] = tau S_jj,

      and what is off from that is, on a Gaussian, the error itself
      (see `numpyro_geom.diagnostics.moment_errors`). That of the standard deviations sees bias of
      any kernel, in the region where the draws are, and overstates it where it is large. That of
      the means sees chains that have not arrived; a constant step with a constant metric keeps
      E[grad U] at 0 whatever its bias. A mode that no chain visits neither can see. Flagged where
      larger than 0.25 and 0.05, and than Monte Carlo error explains with a chance of 1% in all
      coordinates together. In more dimensions than the draws can tell correlations of (a tenth of
      the effective draws of half the run, at most 200), S is its diagonal, they are called
      **scaled force** and **scaled virial**, and they are flagged or not told.
    - **shift of the means**: of Langevin kernels (`numpyro_geom.SGRLD`), what the step size moves
      the mean of the worst unconstrained coordinate by, in standard deviations, to first order:
      -Cov(theta_j, h grad U' A grad U / 4 tau) / s_j over the draws. Flagged above 0.15. Without
      thinning. It sees a scale that is shared by many parameters, each of them a little too wide.
    - **temperatures**: the mean of (theta - c) . grad U / D over all steps, from the minibatch
      gradients that the kernel used, in total and for each site, and that of r'M^-1 r / D. Both
      are tau for the target. Flagged where off by more than ``bias_tolerance``, beyond Monte Carlo
      error.
    - **step size**: its bias of variances to first order, h lam_H / 2 from discretisation and
      h lam_C / (2 tau) from minibatch noise (or as the kernel's docstring says); the sum at most
      ``bias_tolerance``. Measured under ``step_size="auto"`` or ``num_steps="auto"``.
    - **length**: relaxation times 1 / (h lam_min) that a chain spans, at least 50; and the ratio of
      the largest to the smallest curvature in the second half of warm-up, at most 15 in the median
      chain: above it one step size does not fit all of the posterior.
    - failed steps or divergences; acceptance, at least half of what was aimed at; clamped noise, at
      most 5%; of a guide's draws failed geodesics and the Pareto shape of weights; effort.

    Args:
        source: an `MCMC` that has run, with any kernel; or what `to_inference_data` made of it
            (``gradients=True`` there gives the checks of moments), or any other InferenceData or
            DataTree with a ``posterior`` group.
        var_names: names of the variables of ``posterior`` whose R-hat and effective sample sizes
            to look at; None for all.
        gradients: evaluate the gradient on all rows at the draws of an MCMC, for the checks of
            moments. It costs a pass over the data for each draw; where eight draws of each chain
            take more than some half a minute, these checks are undecided.
        seconds: how long sampling took, for effective draws a second; None for the attribute
            ``sampling_time`` of ``posterior``, if there is one.

    Returns:
        A `Report`.

    Raises:
        TypeError: for another source.
        ValueError: if the MCMC has not run, there is no ``posterior`` or no such variable.

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
        ['effective sample size, bulk', 'effective sample size, tail']

    References:
        Vehtari et al., "Rank-normalization, folding, and localization: an improved R-hat",
        Bayesian Analysis 16(2), 2021. Stein, "A bound for the error in the normal approximation",
        1972 (the identity); Gorham, Mackey, "Measuring sample quality with Stein's method", 2015
        (its use on draws).
    """
    check_flag("gradients", gradients)
    if isinstance(source, MCMC):
        check_run(source)
        run = record_of_mcmc(source)
        if gradients:
            unconstrained, told = _gradients(run)
            run = run._replace(unconstrained=unconstrained, attributes={**run.attributes, **told})
    else:
        _check_container(source)
        run = record_of_container(source)
    if seconds is None:
        seconds = run.attributes.get("sampling_time")
    if seconds is not None:
        seconds = check_number("seconds", seconds, above=0.0)
    posterior = run.posterior
    if var_names is not None:
        posterior = {n: posterior[n] for n in chosen(var_names, posterior, "the posterior")}
    return Report(
        (
            *draw_checks(posterior, run, seconds),
            *moment_checks(run),
            *shift_checks(run),
            *run_checks(run),
            *guide_checks(run),
        )
    )


def _gradients(run: RunRecord) -> tuple[Arrays, dict[str, Any]]:
    if not run.targets_model:
        return {}, {}
    model = read_model(run.model, run.args, run.kwargs)  # type: ignore[arg-type]
    summed = model.summed_out(run.posterior)
    draws = [run.posterior.get(name) for name in model.of_kind("latent") if name not in summed]
    if not draws or not all(x is not None and x.dtype.kind == "f" for x in draws):
        return {}, {}
    return gradients_at_draws(model, run.posterior, least_draws=checks.LEAST_DRAWS)


def _check_container(source: Any) -> None:
    if hasattr(source, "posterior"):
        return
    kinds = (xr.Dataset, getattr(xr, "DataTree", xr.Dataset))
    if isinstance(source, kinds) or type(source).__name__ == "InferenceData":
        raise ValueError(
            "expected a group `posterior`, and there is none: pass what "
            "`numpyro_geom.to_inference_data(mcmc)` returns"
        )
    raise TypeError(
        "expected a numpyro.infer.MCMC that has run, or the InferenceData or DataTree of one, "
        f"got {type(source).__name__}"
    )


def step_size_summary(mcmc: MCMC) -> str:
    """What step size a run had, what bias that causes, and what limits it, as a table.

    These are the checks of `numpyro_geom.diagnose` that need neither draws nor gradients at them,
    and so are at hand at once: temperatures against tau; step size and steps a draw; the bias of
    variances against ``bias_tolerance``, h lam_H / 2 from discretisation plus h lam_C / (2 tau)
    from minibatch noise to first order in the worst direction, which of the two binds and what to
    do; relaxation times 1 / (h lam_min) that the run spans; failed steps.

    Args:
        mcmc: a run MCMC whose kernel is one of this package's.

    Returns:
        The table, as `numpyro_geom.diagnose` prints it.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC, or has another kernel.
        ValueError: if it has not run.
    """
    check_run(mcmc)
    if not isinstance(mcmc.sampler, SGKernel):
        raise TypeError(
            "step_size_summary needs a kernel of numpyro_geom, such as SGRLD, got "
            f"{type(mcmc.sampler).__name__}"
        )
    return str(Report(tuple(run_checks(record_of_mcmc(mcmc))), of_step=True))


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

    A `SamplingWarning` is issued for each check of `step_size_summary` that is flagged. Kernels
    that are not this package's cause no warning.

    Args:
        mcmc: a run MCMC.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC.
        ValueError: if it has not run.
    """
    check_run(mcmc)
    warn_of_record(record_of_mcmc(mcmc))


def warn_of_record(run: RunRecord) -> None:
    """Warn of what a run or a guide says of its draws, unless another package drew.

    Of checks with the same advice the first one is enough.
    """
    if run.of_this_package or "guide" in run.attributes:
        given: set[str] = set()
        for check in (*run_checks(run), *guide_checks(run)):
            if check.ok is False and check.advice not in given:
                given.add(check.advice)
                warn_outside(check.sentence)
