"""One report of a run: each line has a figure, its expected value, and what to do.

`diagnose` runs all checks. `step_size_summary`, `print_summary` and `warn_if_unreliable` run only
the checks that need neither the draws nor gradients at the draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod as product
from operator import attrgetter
from typing import Any

import numpy as np
import xarray as xr
from numpyro.diagnostics import summary
from numpyro.infer import MCMC

from .._checks import check_flag, check_number
from .._numpyro import arguments_of, holding, sample_field, states_of
from .._util import num_at_once
from .._warning import warn_outside
from ..kernel import SGKernel
from ..wreck import warn_of_run
from .checks import Check, draw_checks, moments_right, run_checks
from .draws import LEAST_PER_CHAIN, Arrays, check_run, chosen, host, paths
from .gradients import gradients_at_draws
from .moments import moment_checks, shift_checks
from .record import RunRecord, record_of_container, record_of_mcmc
from .replay import model_of, summed_out
from .table import FLAGGED, Printed, Row

LEAST_PROB = 0.01
"""Below this probability of an interval, NumPyro's table has one label for both of its ends."""
MOST_ENTRIES = 100
"""A site with more entries has a summary over its entries in place of a line for each."""
UNDECIDED = "?"
GROUPS = ("Mixing", "Bias", "Step", "Cost", "Other")
KINDS: dict[str, tuple[str, str]] = {
    "entries that are not finite": ("Mixing", "draws are not finite"),
    "failed geodesics": ("Step", "geodesics failed"),
    "draws with failed steps": ("Step", "steps were not finite or not stable"),
    "divergences": ("Step", "trajectories diverged"),
    "acceptance rate": ("Step", "too many steps are rejected"),
    "jump of the energy": ("Bias", "the density jumps where gradients do not see it"),
    "energy above the best chain": ("Mixing", "a chain is in a worse mode"),
    "entries that change from draw to draw": ("Mixing", "the chains do not move"),
    "bias of variances": ("Bias", "the step is too large"),
    "largest over smallest curvature": ("Step", "one step size does not fit all of the posterior"),
    "relaxation times per chain": ("Mixing", "the chains are too short"),
    "R-hat": ("Mixing", "the chains disagree"),
    "error of the means": ("Bias", "the draws are not centred on the target"),
    "shift of the means by the step": ("Bias", "the step is too large"),
    "scaled force": ("Bias", "the draws are not centred on the target"),
    "relative error of the sd": ("Bias", "the draws are biased"),
    "scaled virial": ("Bias", "the draws are biased"),
    "configurational temperature": ("Bias", "the draws are biased"),
    "kinetic temperature": ("Bias", "the momenta are biased"),
    "draws per chain": ("Mixing", "the draws are too few"),
    "effective sample size": ("Mixing", "the draws are too few"),
    "Pareto shape of weights": ("Bias", "the guide is far from the posterior"),
    "weights or gradients": ("Bias", "how near the guide is to the posterior is not known"),
    "draws with a finite gradient": ("Bias", "gradients are not finite at the draws"),
    "coordinates with a gradient": ("Bias", "gradients are not finite at the draws"),
    "searches for a start": ("Mixing", ""),
    "step size": ("Step", ""),
    "steps per draw": ("Step", ""),
    "rows per step": ("Step", ""),
    "condition number": ("Step", ""),
    "effective draws per gradient": ("Cost", ""),
    "effective draws per second": ("Cost", ""),
    "passes over the data": ("Cost", ""),
}
"""For each figure (its name up to a comma): its group, and the problem if it is flagged. An earlier
entry is the cause of a later one."""


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Printed):
    """What `diagnose` found; prints as a table, also in notebooks.

    Attributes:
        checks: tuple of `Check`, in the order of printing.
        of_step: whether these are the checks of `step_size_summary`, which does not use the draws.
    """

    checks: tuple[Check, ...]
    of_step: bool = False
    _align = (str.ljust, str.ljust)

    def __post_init__(self) -> None:
        ordered = sorted(self.checks, key=lambda check: GROUPS.index(_kind(check)[0]))
        object.__setattr__(self, "checks", tuple(ordered))

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
        subject = "Verdict on the step alone" if self.of_step else "Verdict"
        if not self.flagged:
            said = "fine, as far as can be told" if self.undecided else "fine"
            return f"{subject}: {said}."
        names = list(KINDS)
        cause = min(
            self.flagged, key=lambda c: names.index(_name(c)) if _name(c) in names else len(names)
        )
        figure = f"{cause.name}: {cause.figure}, expected {cause.threshold}"
        return f"{subject}: {_kind(cause)[1]} ({figure})."

    def to_dataframe(self) -> Any:
        """A `pandas.DataFrame` with one row per check, indexed by name."""
        import pandas as pd  # comes with xarray

        return pd.DataFrame(self.checks, columns=Check._fields).set_index("name")

    def _above(self) -> list[str]:
        flagged, hidden = len(self.flagged), len(self.undecided)
        text = "Nothing is flagged"
        if flagged:
            text = f"{flagged} of {len(self.checks)} figures flagged"
        if hidden:
            text += f", {hidden} undecided (marked {UNDECIDED})"
        text += ". diagnose(mcmc) looks at the draws too." if self.of_step else "."
        return [self.verdict, text]

    def _table(self) -> list[Row]:
        rows = [Row(("", "figure", "value", "expected"), ("",))]
        given: set[str] = set()
        for group in GROUPS:
            found = [check for check in self.checks if _kind(check)[0] == group]
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


def _name(check: Check) -> str:
    return check.name.partition(",")[0]


def _kind(check: Check) -> tuple[str, str]:
    return KINDS.get(_name(check), ("Other", check.name))


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

    The checks are listed here. Those from **temperatures** on need neither the draws nor gradients
    at the draws. `step_size_summary` shows them, and `warn_if_unreliable` warns if one of them is
    flagged.

    - **draws**: values that are not finite; bulk and tail effective sample sizes, at least 400 over
      all chains; rank-normalised R-hat, at most 1.01. For more than four chains, the bound on R-hat
      is its value at 400 effective draws, (1 + 2 chains / 400)^1/2. These checks detect chains that
      are too short or that disagree. They cannot detect a bias that all chains share.
    - **moments**: the error of the means, in standard deviations, and the relative error of the
      standard deviations. Both are for the worst unconstrained coordinate, and both are computed
      from gradients of U on all rows at the draws. Let m and S be the mean and the covariance of
      the draws. Draws of exp(-U / tau) satisfy

          E[(S grad U)_j] = 0,    E[(theta_j - m_j) (S grad U)_j] = tau S_jj.

      On a Gaussian target, the deviation from these identities is the error itself
      (see `numpyro_geom.diagnostics.moments`). The error of the standard deviations detects
      the bias of any kernel in the region where the draws are. It overstates a large bias. The
      error of the means detects chains that have not reached the target. It does not detect bias
      under a constant step size and a constant metric, because E[grad U] then stays 0. Neither
      detects a mode that no chain visits. An error is flagged if it exceeds its tolerance (0.25 for
      means, 0.03 for standard deviations) and also exceeds what Monte Carlo error explains with a
      chance of 1% over all coordinates together. In high dimensions, the draws cannot determine
      all correlations. The full S is used in up to 200 dimensions, and at most a tenth of the
      effective draws of half the run. Above that, S is its diagonal, the figures are called
      **scaled force** and **scaled virial**, and each is either flagged or undecided.
    - **shift of the means**: only for Langevin steps without averaged noise, without thinning. It
      is the shift of the mean that the step size causes, to first order, in standard deviations:
      -Cov(theta_j, h grad U' A grad U / 4 tau) / s_j over the draws, for the worst unconstrained
      coordinate. It is flagged above 0.15. It detects a scale that many parameters share when each
      of these parameters is a little too wide.
    - **temperatures**: the mean of (theta - c) . grad U / D over all steps, in total and for each
      site, and the mean of r'M^-1 r / D. The gradients are the minibatch gradients that the kernel
      used. Both means are tau for the target. A temperature is flagged if it differs from tau by
      more than ``bias_tolerance``, beyond Monte Carlo error.
    - **step size**: the bias of variances that the step size causes, to first order. It is the sum
      of h lam_H / 2 from discretisation, or its square with averaged noise, and
      h lam_C / (2 tau) from minibatch noise (or as the kernel's docstring says). The sum must be at
      most ``bias_tolerance``. It is measured under ``step_size="auto"`` or ``num_steps="auto"``.
    - **length**: the number of relaxation times 1 / (h lam_min) that a chain spans, at least 50;
      and the ratio of the largest to the smallest curvature in the second half of warm-up, at most
      15 in the median chain. Above 15, one step size does not fit the whole posterior. That is not
      flagged if **moments** are all as expected, since then it has done nothing to the draws.
    - **other**: failed steps (divergences), if more than 2% (0.5%) of the draws, or of the variance
      of an entry (of its logarithm, if it is positive), is at draws with them, or 5% if **moments**
      are all as expected; the acceptance rate, at least half of its target;
      for the draws of a guide, failed geodesics, the Pareto shape of
      the weights, and the means and sds without weights against those with weights, with the
      tolerances of **moments**; the number of passes over the data.

    Args:
        source: an `MCMC` that has run, with any kernel; or the result of `to_inference_data` (with
            ``gradients=True`` it includes the checks of moments); or any other InferenceData or
            DataTree with a ``posterior`` group.
        var_names: names of the variables of ``posterior`` for R-hat and effective sample sizes;
            None for all.
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
            unconstrained, told = _gradients(source, run)
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
    moments = tuple(moment_checks(run))
    return Report(
        (
            *draw_checks(posterior, run, seconds),
            *moments,
            *shift_checks(run),
            *run_checks(run, moments_right(moments)),
        )
    )


def _gradients(mcmc: MCMC, run: RunRecord) -> tuple[Arrays, dict[str, Any]]:
    model = model_of(mcmc)
    if model is None or not run.targets_model:
        return {}, {}
    summed = summed_out(model, run.posterior)
    draws = [run.posterior.get(name) for name in model.of_kind("latent") if name not in summed]
    if not draws or not all(x is not None and x.dtype.kind == "f" for x in draws):
        return {}, {}
    return gradients_at_draws(model, run.posterior, least_draws=LEAST_PER_CHAIN)


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
    """A table of the step size of a run, the bias that it causes, and what limits it.

    It has the checks of `numpyro_geom.diagnose` that need neither the draws nor gradients at the
    draws, so it takes almost no time:

    - temperatures against tau;
    - the step size and the steps per draw;
    - the bias of variances against ``bias_tolerance``, to first order in the worst direction:
      h lam_H / 2 from discretisation, or its square with averaged noise, plus h lam_C / (2 tau)
      from minibatch noise, which of the two is the limit, and what to do;
    - the number of relaxation times 1 / (h lam_min) that the run spans;
    - failed steps.

    Args:
        mcmc: an MCMC that has run with a kernel of this package.

    Returns:
        The table, as `numpyro_geom.diagnose` prints it.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC, or has another kernel.
        ValueError: if it has not run.
    """
    check_run(mcmc)
    run = record_of_mcmc(mcmc)
    if not run.of_this_package:
        raise TypeError(
            "step_size_summary needs a kernel of numpyro_geom, such as SGRLD, got "
            f"{type(mcmc.sampler).__name__}"
        )
    return str(Report(tuple(run_checks(run)), of_step=True))


def print_summary(mcmc: MCMC, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
    """Print NumPyro's table of a run, then `step_size_summary`, and warn of problems.

    A site with more than 100 entries has a table of five lines: the 5%, 50% and 95% quantiles of
    each column over the entries, the entry with the fewest effective draws, and the one with the
    largest R-hat. With a kernel of another package, `step_size_summary` is left out.

    Args:
        mcmc: an MCMC that has run.
        prob: probability of the credible intervals in the table.
        exclude_deterministic: whether to leave deterministic sites out of the table.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC.
        ValueError: if it has not run, or ``prob`` is not from 0.01 to below 1.

    Warns:
        SamplingWarning: see `warn_if_unreliable`.
    """
    check_run(mcmc)
    if not LEAST_PROB <= check_number("prob", prob, above=0.0) < 1:
        raise ValueError(f"prob must be at least {LEAST_PROB} and below 1, got {prob!r}")
    check_flag("exclude_deterministic", exclude_deterministic)
    _print_draws(mcmc, prob, exclude_deterministic)
    if hasattr(mcmc.sampler, "facts"):
        print(step_size_summary(mcmc))
    warn_if_unreliable(mcmc)


def _print_draws(mcmc: MCMC, prob: float, exclude_deterministic: bool) -> None:
    """Print NumPyro's table, with a table of its own for each site of many entries."""
    states: Any = states_of(mcmc)
    field = sample_field(mcmc)
    sites = states[field]
    if exclude_deterministic and isinstance(sites, dict):
        last = attrgetter(field)(mcmc.last_state)
        sites = {n: x for n, x in sites.items() if not isinstance(last, dict) or n in last}
    arrays = dict(paths(sites, field))
    wide = {n: x for n, x in arrays.items() if product(x.shape[2:]) > MOST_ENTRIES}
    if wide:
        states = states | {field: {n: x for n, x in arrays.items() if n not in wide}}
        mcmc = holding(mcmc, arguments_of(mcmc), states, mcmc.last_state)
        exclude_deterministic = False
    mcmc.print_summary(prob=prob, exclude_deterministic=exclude_deterministic)
    for name, x in wide.items():
        _print_entries(name, host(x), prob)


def _print_entries(name: str, x: np.ndarray, prob: float) -> None:
    """Print quantiles over the entries of a site, and its worst entries, in NumPyro's columns."""
    flat = x.reshape(*x.shape[:2], -1)
    parts = np.array_split(flat, -(-flat.shape[2] // num_at_once(flat[..., 0].size)), axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):  # entries that are constant
        found = [summary({name: part}, prob)[name] for part in parts]
    columns = {key: np.concatenate([part[key] for part in found]) for key in found[0]}
    table = np.stack(list(columns.values()), axis=1)
    rows = {f"{q:.0%} quantile": np.nanquantile(table, q, axis=0) for q in (0.05, 0.5, 0.95)}
    for key, sign in (("n_eff", 1), ("r_hat", -1)):
        worst = np.argmin(np.nan_to_num(sign * columns[key], nan=np.inf))
        index = ",".join(map(str, np.unravel_index(worst, x.shape[2:])))
        rows[f"worst {key}, {name}[{index}]"] = table[worst]
    title = f"{len(table)} entries of {name}"
    width = max(map(len, (title, *rows)))
    print(f"\n{title:>{width}}", *(f"{key:>9}" for key in columns))
    for label, row in rows.items():
        print(f"{label:>{width}}", *(f"{value:>9.2f}" for value in row))
    print()


def warn_if_unreliable(mcmc: MCMC) -> None:
    """Warn if the draws of a run are biased, too few, or not draws of the target.

    A chain that is a wreck (`numpyro_geom.wreck`) and each flagged check of `step_size_summary`
    issue a `SamplingWarning`. Kernels of other packages cause no warning.

    Args:
        mcmc: an MCMC that has run.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC.
        ValueError: if it has not run.
    """
    check_run(mcmc)
    warn_of_wrecks(mcmc)
    warn_of_record(record_of_mcmc(mcmc))


def warn_of_wrecks(mcmc: MCMC) -> None:
    """Warn of chains whose draws are worth nothing; not for kernels of other packages."""
    kernel, states = mcmc.sampler, states_of(mcmc)
    if isinstance(kernel, SGKernel) and states and kernel.bound.point is None:
        warn_of_run(kernel.settings, kernel.facts, states, mcmc.last_state)


def warn_of_record(run: RunRecord) -> None:
    """Issue the warnings of a run or a guide; none for kernels of other packages.

    Of the checks with the same advice, the first one causes a warning.
    """
    if run.of_this_package or "guide" in run.attributes:
        given: set[str] = set()
        for check in run_checks(run):
            if check.ok is False and check.advice not in given:
                given.add(check.advice)
                warn_outside(check.sentence)
