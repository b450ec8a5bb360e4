"""diagnose: one report of a run, each line a figure, what it should be, and what to do."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

import xarray as xr
from numpyro.infer import MCMC

from .._checks import check_flag, check_number
from .lines import Kernel, Line, Run, step_size_lines, trouble_lines
from .mixing_lines import draw_lines
from .replay import Arrays, read_model
from .results import of_mcmc
from .summary import _figure, check_run
from .target_lines import moment_lines, temperature_lines
from .temperature import gradients_at_draws, is_real


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What `diagnose` found; printed as a table, in notebooks too.

    Attributes:
        lines: of `Line`, in the order in which they are printed.
    """

    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Whether no line is flagged."""
        return not self.flagged

    @property
    def flagged(self) -> tuple[Line, ...]:
        """Lines whose figure is not what it should be."""
        return tuple(line for line in self.lines if line.ok is False)

    def to_dataframe(self) -> Any:
        """A `pandas.DataFrame`, one row a line, indexed by name."""
        import pandas as pd  # comes with xarray

        return pd.DataFrame(self.lines, columns=Line._fields).set_index("name")

    def __str__(self) -> str:
        rows = [("", "figure", "value", "expected", "")]
        rows += [
            (_MARKS[line.ok], line.name, _value(line), line.threshold, line.remark)
            for line in self.lines
        ]
        widths = [max(len(row[k]) for row in rows) for k in range(4)]
        texts = [
            "  ".join([*(x.ljust(w) for x, w in zip(row, widths, strict=False)), row[4]]).rstrip()
            for row in rows
        ]
        count = len(self.flagged)
        verdict = "nothing is flagged" if count == 0 else f"{count} of {len(self.lines)} flagged"
        return "\n".join([*texts, verdict])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{x}</th>" for x in ("", "figure", "value", "expected", "what to do"))
        body = ""
        for line in self.lines:
            cells = (_MARKS[line.ok], line.name, _value(line), line.threshold, line.remark)
            style = ' style="background:#fdd;color:#000"' if line.ok is False else ""
            body += f"<tr{style}>" + "".join(f"<td>{html.escape(x)}</td>" for x in cells) + "</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


_MARKS = {True: "ok", False: "!!", None: ""}


def diagnose(
    source: Any,
    *,
    var_names: str | Sequence[str] | None = None,
    gradients: bool = True,
    seconds: float | None = None,
) -> Report:
    r"""Say whether the draws of a run can be trusted, and what to do where they cannot.

    Lines that do not apply are left out. A line is flagged (``ok`` is False) if its figure is not
    as expected; ``ok`` is None where nothing is expected, and where Monte Carlo error is too large
    to say:

    - **draws**: values that are not finite; effective sample sizes, bulk and tail, of at least 400
      in all; R-hat (rank-normalised) at most 1.01, or, of more than four chains, what 400
      effective draws make of it, (1 + 2 chains / 400)^1/2. They see chains that are too short or
      disagree, and nothing of a bias that all chains share.
    - **moments**: error of the means, in standard deviations, and relative error of the standard
      deviations, both of the worst unconstrained coordinate, from gradients of U on all rows at the
      draws: for draws of exp(-U / tau), with m and S their mean and covariance,

          E[(S grad U)_j] = 0,    E[(theta_j - m_j) (S grad U)_j] = tau S_jj,

      and what is off from that is, on a Gaussian, the error itself
      (see `numpyro_geom.diagnostics.temperature`). That of the standard deviations sees bias of
      any kernel, in the region where the draws are, and overstates it where it is large. That of
      the means sees chains that have not arrived; a constant step with a constant metric keeps
      E[grad U] at 0 whatever its bias. A mode that no chain visits neither can see. Flagged where
      larger than 0.25 and 0.05, and than Monte Carlo error explains with a chance of 1% in all
      coordinates together. In more dimensions than the draws can tell correlations of (a tenth of
      the effective draws of half the run, at most 200), S is its diagonal, the lines are called
      **scaled force** and **scaled virial**, and they are flagged or not told.
    - **temperatures**: the mean of (theta - c) . grad U / D over all steps, from the minibatch
      gradients that the kernel used, in total and for each site, and that of r'M^-1 r / D. Both
      are tau for the target. Flagged where off by more than ``bias_tolerance``, beyond Monte Carlo
      error.
    - **step size**: its bias of variances to first order, h lam_H / 2 from discretisation and
      h lam_C / (2 tau) from minibatch noise (or as the kernel's docstring says); the sum at most
      ``bias_tolerance``. Measured under ``step_size="auto"`` or ``num_steps="auto"``.
    - **length**: relaxation times 1 / (h lam_min) that a chain spans, at least 50.
    - undone steps or divergences, acceptance, clamped noise, effort.

    Args:
        source: an `MCMC` that has run, with any kernel; or what `to_inference_data` made of it
            (``gradients=True`` there gives the lines on moments), or any other InferenceData or
            DataTree with a ``posterior`` group.
        var_names: names of the variables of ``posterior`` whose R-hat and effective sample sizes
            to look at; None for all.
        gradients: evaluate the gradient on all rows at the draws of an MCMC, for the lines on
            moments. It costs a pass over the data for each draw.
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
        >>> [line.name for line in report.flagged][:2]
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
        run = _of_mcmc(source, gradients)
    else:
        run = _of_idata(source)
    if seconds is None:
        seconds = run.attrs.get("sampling_time")
    if seconds is not None:
        seconds = check_number("seconds", seconds, above=0.0)
    posterior = _chosen(run.posterior, var_names)
    kernel = Kernel.read(run.attrs)
    return Report(
        (
            *draw_lines(posterior, run, seconds),
            *moment_lines(run, kernel.temperature),
            *temperature_lines(run.stats, kernel),
            *step_size_lines(run.attrs, kernel),
            *trouble_lines(run),
        )
    )


# What there is to read


def _of_mcmc(mcmc: MCMC, gradients: bool) -> Run:
    results = of_mcmc(mcmc)
    found: Arrays = {}
    if gradients and results.targets_model:
        model = read_model(results.model, results.args, results.kwargs)  # type: ignore[arg-type]
        draws = [results.posterior.get(name) for name in model.of_kind("latent")]
        if draws and all(x is not None and is_real(x) for x in draws):
            found = gradients_at_draws(model, results.posterior)
    return Run(results.posterior, results.sample_stats, found, results.attributes)


def _of_idata(source: Any) -> Run:
    if not hasattr(source, "posterior"):
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
    return Run(
        _group(source, "posterior"),
        _group(source, "sample_stats"),
        _group(source, "unconstrained_posterior"),
        source["posterior"].attrs,
    )


def _group(source: Any, name: str) -> Arrays:
    """Arrays of a group, chains and draws first; none if it is missing."""
    try:
        group = source[name]
    except KeyError:
        return {}
    return {
        str(key): x.transpose("chain", "draw", ...).values
        for key, x in group.data_vars.items()
        if {"chain", "draw"} <= set(x.dims) and x.dtype.kind in "biuf"
    }


def _chosen(posterior: Arrays, var_names: str | Sequence[str] | None) -> Arrays:
    if var_names is None:
        return posterior
    names = [var_names] if isinstance(var_names, str) else list(var_names)
    if not names:
        raise ValueError("var_names is empty: expected names of variables, or None for all")
    unknown = [name for name in names if name not in posterior]
    if unknown:
        raise ValueError(
            f"var_names has {unknown}, which are not variables of posterior: expected some of "
            f"{list(posterior)}"
        )
    return {name: posterior[name] for name in names}


def _value(line: Line) -> str:
    error = "" if line.error is None else f" +- {line.error:.2g}"
    # R-hat is judged by its third decimal
    return (f"{line.value:.4g}" if line.name == "R-hat" else _figure(line.value)) + error
