"""The checks of a run as text after NumPyro's table, and as warnings where draws mislead."""

from __future__ import annotations

from typing import Any

from numpyro.infer import MCMC

from ..kernel import SGKernel
from .finished_mcmc import check_run
from .report import Report
from .run_checks import run_checks
from .run_record import RunRecord, record_of_mcmc
from .sampling_warning import warn_outside


def step_size_summary(mcmc: MCMC) -> str:
    """What step size a run had, what bias that causes, and what limits it, as a table.

    These are the checks of `numpyro_geom.diagnose` that need neither draws nor gradients at them,
    and so are at hand at once: temperatures against tau; step size and steps a draw; the bias of
    variances against ``bias_tolerance``, h lam_H / 2 from discretisation plus h lam_C / (2 tau)
    from minibatch noise to first order in the worst direction, which of the two binds and what to
    do; relaxation times 1 / (h lam_min) that the run spans; undone steps.

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
    return str(Report(tuple(run_checks(record_of_mcmc(mcmc)))))


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


def warn_of_record(run: RunRecord, checks: Any = run_checks) -> None:
    """Warn of the flagged ones of these checks, unless another package drew."""
    if run.of_this_package or "guide" in run.attributes:
        for check in checks(run):
            if check.ok is False:
                warn_outside(check.sentence)
