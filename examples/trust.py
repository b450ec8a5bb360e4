"""From a biased run to a trustworthy run, with the help of the diagnostics.

Bayesian logistic regression on six columns of scikit-learn's breast cancer data (569 rows). Three
runs of SGRLD are wrong for different reasons: a step size that is too large, a metric without its
divergence term, and a batch that is too small for the step size. The fourth run is right. A fifth
run, only in the summary, is the second run with its divergence term; it is also right. First,
`diagnose` judges each run without a reference. Then more expensive tools judge it: a comparison
with NUTS, and runs at several step sizes. This script makes every figure and number of the page
"Can I trust these draws?".

    python examples/trust.py                # print
    python examples/trust.py --write        # write docs/figures/trust_*.png, docs/tables/trust_*.md
    python examples/trust.py --quick --out FOLDER
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from PIL import Image
from sklearn.datasets import load_breast_cancer

from numpyro_geom import SGRLD, Monge, diagnose, to_inference_data
from numpyro_geom.diagnostics import compare_draws

mpl.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 7.0
"""Width of a figure in inches: at this width a page shows letters in about their size."""
COLUMNS = [0, 1, 4, 6, 8, 9]
"""Mean radius, texture, smoothness, concavity, symmetry and fractal dimension."""
SHOWN = {"w[0]": ("w", 0), "w[1]": ("w", 1), "w[3]": ("w", 3), "b": ("b",)}
"""Scalars in the figures of marginals."""
TOO_LARGE = 0.03
FULL_DATA_STEP = 0.003
"""A third of the step size that ``step_size="auto"`` finds on all rows."""
BATCH = 64


def model(X, y):
    """Logistic regression; the plate marks the rows as exchangeable."""
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 3))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w + b), obs=y[i])


SETTINGS: dict[str, dict[str, Any]] = {
    # the plain step, whose error is of first order
    "step": {"step_size": TOO_LARGE, "divergence": "none"},
    # in unscaled coordinates, where the gradient matters for Monge's metric
    "metric": {"metric": Monge(alpha2=1000.0, decay=0.9), "divergence": "none", "dense_mass": None},
    "repaired": {"metric": Monge(alpha2=1000.0, decay=0.9), "dense_mass": None},
    "batch": {"step_size": FULL_DATA_STEP, "batch_size": BATCH},
    "good": {"batch_size": BATCH, "control_variate": True},
}
TITLES = {
    "step": "1. step too large",
    "metric": "2. no divergence term",
    "repaired": '2, without `divergence="none"`',
    "batch": "3. batch too small",
    "good": "4. automatic step",
}


class Effort(NamedTuple):
    """Numbers of draws and chains.

    Attributes:
        num_warmup: draws of warm-up per chain.
        num_samples: draws kept per chain.
        num_chains: number of vectorised chains.
        num_steps: steps of each kernel between two draws.
        runs: names of the runs to make.
    """

    num_warmup: int
    num_samples: int
    num_chains: int
    num_steps: Any
    runs: tuple[str, ...]


LEVELS = (0.01, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Densities between contours, as shares of the largest one. Outside of each contour, a Gaussian in
two dimensions has the same share of its mass."""
ENDS = ("step", "good")
"""Runs that are examined in more ways."""
FACTORS = (1.0, 0.5, 0.25)
"""Multiples of a run's step size at which it is repeated."""
FULL = Effort(500, 1000, 4, "auto", ("step", "metric", "repaired", "batch", "good"))
QUICK = Effort(10, 40, 2, 5, ("step",))


def data() -> tuple[jax.Array, jax.Array]:
    """Standardised columns and labels."""
    X, y = load_breast_cancer(return_X_y=True)
    X = X[:, COLUMNS]
    X = (X - X.mean(0)) / X.std(0)
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.int32)


def kernel(name: str, effort: Effort, **changed: Any) -> SGRLD:
    """The kernel of a run."""
    return SGRLD(model, num_steps=effort.num_steps, **SETTINGS[name] | changed)


def run(kernel: Any, effort: Effort) -> MCMC:
    """Run vectorised chains."""
    mcmc = MCMC(
        kernel,
        num_warmup=effort.num_warmup,
        num_samples=effort.num_samples,
        num_chains=effort.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *data())
    return mcmc


# --- measurements


def figure(line: Any, form: str) -> str:
    """A figure and its Monte Carlo error; a dash if there are too few draws."""
    return "–" if line is None else f"{line.value:{form}} ± {line.error:{form[1:]}}"


def summary_row(name: str, mcmc: MCMC, report: Any, reference: MCMC) -> str:
    """The result of each tool for a run."""
    checks = {check.name: check for check in reversed(report.checks)}
    found = compare_draws(mcmc, reference)
    worst = max(found.scalars, key=lambda s: abs(s.sd_ratio - 1))
    shifted = max(found.scalars, key=lambda s: abs(s.mean_error))
    temperature = checks["configurational temperature"]
    cells = [
        TITLES[name],
        f"{checks['R-hat'].value:.3f}",
        f"{checks['effective sample size'].value:,.0f}",
        figure(checks.get("error of the means, in sd"), "+.2f"),
        f"{shifted.mean_error:+.2f} ± {shifted.mean_noise:.2f}",
        figure(checks.get("relative error of the sd"), "+.0%"),
        f"{worst.sd_ratio - 1:+.0%} ± {worst.sd_noise:.0%}",
        f"{temperature.value:.2f}",
        f"{len(report.flagged)} of {len(report.checks)}",
        "within noise" if found.within_noise else "differs",
    ]
    return f"| {' | '.join(cells)} |"


class Line(NamedTuple):
    """A mean or an sd over the step size h, and the line through it; errors are standard errors.

    Attributes:
        name: name of the scalar.
        moment: ``"mean"`` or ``"sd"``.
        values: the moment at each step size.
        errors: Monte Carlo errors of the values.
        limit: value of the line at h = 0.
        limit_error: error of the limit.
        bias: value of the line at the largest step size, minus the limit, over the sd at the
            smallest step size.
        bias_error: error of the bias.
    """

    name: str
    moment: str
    values: np.ndarray
    errors: np.ndarray
    limit: float
    limit_error: float
    bias: float
    bias_error: float


def lines_over(h: np.ndarray, runs: list[MCMC]) -> list[Line]:
    """Lines through the means and sds of all scalars, weighted by their Monte Carlo errors.

    The bias of an unadjusted step is proportional to h, to first order. So the line at h = 0 has
    none (Richardson extrapolation; Talay and Tubaro, 1990).
    """
    tables = [az.summary(to_inference_data(x), kind="all", round_to="none") for x in runs]
    found = []
    for name in tables[0].index:
        for moment in ("mean", "sd"):
            pairs = [t.loc[name, [moment, f"mcse_{moment}"]] for t in tables]
            values, errors = np.array(pairs, float).T
            (slope, limit), cov = np.polyfit(h, values, 1, w=1 / errors, cov="unscaled")
            slope_error, limit_error = np.sqrt(np.diag(cov))
            unit = h[0] / tables[-1].loc[name, "sd"]
            bias = slope * unit, slope_error * unit
            found.append(Line(name, moment, values, errors, limit, limit_error, *bias))
    return found


def table_of_lines(h: np.ndarray, lines: list[Line]) -> str:
    """The lines in Markdown."""
    head = ["", *(f"h = {x:.3g}" for x in h), "h → 0", f"bias at {h[0]:.3g}"]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for x in lines:
        factor, unit = (100, "%") if x.moment == "sd" else (1, " sd")
        digits = ".0f" if x.moment == "sd" else ".2f"
        cells = [f"{x.moment} of {x.name}", *(f"{v:.3f}" for v in x.values)]
        cells += [f"{x.limit:.3f} ± {x.limit_error:.3f}"]
        cells += [f"{factor * x.bias:+{digits}} ± {factor * x.bias_error:{digits}}{unit}"]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


SUMMARY_HEAD = (
    "run",
    "R-hat",
    "ESS",
    "mean off, in sd: `diagnose`",
    "NUTS",
    "sd off: `diagnose`",
    "NUTS",
    "temperature",
    "lines flagged",
    "`compare_draws` with NUTS",
)


# --- figures


def marginals(mcmc: MCMC, reference: MCMC) -> Any:
    """Four marginal posteriors over those of NUTS."""
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 4.5), layout="constrained")
    rows = {s.name: s for s in compare_draws(mcmc, reference).scalars}
    for ax, (name, (site, *index)) in zip(axes.flat, SHOWN.items(), strict=True):
        x, y = (np.asarray(m.get_samples()[site])[(slice(None), *index)] for m in (mcmc, reference))
        bins = np.linspace(*np.quantile(np.concatenate([x, y]), [0.001, 0.999]), 41)
        ax.hist(y, bins, density=True, color="0.75", label="NUTS")
        ax.hist(x, bins, density=True, histtype="step", linewidth=1.4, label="this run")
        row = rows[name]
        ax.set_title(
            f"{name}: mean off {row.mean_error:+.2f} $\\pm$ {row.mean_noise:.2f} sd, "
            f"sd $\\times$ {row.sd_ratio:.2f} $\\pm$ {row.sd_noise:.2f}",
            fontsize="small",
        )
        ax.set_yticks([])
    axes[0, 0].legend(fontsize="small", frameon=False)
    return figure


def traces(idatas: Mapping[str, Any]) -> Any:
    """Energies and smoothed temperatures of all runs, one row per run, one line per chain."""
    size = (WIDTH, 2 * len(idatas) + 0.5)
    figure, axes = plt.subplots(
        len(idatas), 2, figsize=size, layout="constrained", sharex=True, sharey="col", squeeze=False
    )
    for (name, idata), (left, right) in zip(idatas.items(), axes, strict=True):
        stats = idata["sample_stats"]
        temperature = stats["configurational_temperature"]
        width = max(1, temperature.sizes["draw"] // 20)
        stats["energy"].plot.line(x="draw", ax=left, linewidth=0.7, add_legend=False)
        smooth = temperature.rolling(draw=width, center=True).mean()
        smooth.plot.line(x="draw", ax=right, linewidth=0.9, add_legend=False)
        right.axhline(1, color="black", linestyle="--", linewidth=1)
        left.set(title=TITLES[name], xlabel="", ylabel="energy U (nats)")
        right.set(title=f"mean {float(temperature.mean()):.2f}, target 1", xlabel="")
        right.set_ylabel("temperature")
    for ax in axes[-1]:
        ax.set_xlabel("draw")
    return figure


def bias_curves(curves: Mapping[str, tuple[np.ndarray, list[Line]]]) -> Any:
    """Bias against the step size, for a large step size and for the automatic one."""
    figure, axes = plt.subplots(
        1, len(curves), figsize=(WIDTH, 4), layout="constrained", squeeze=False
    )
    for (name, (h, lines)), ax in zip(curves.items(), axes.flat, strict=True):
        sds = {x.name: x.values[-1] for x in lines if x.moment == "sd"}
        shown = [x for x in lines if x.name in [*SHOWN][:3]]
        for k, x in enumerate(shown):
            color, is_sd = f"C{k}", x.moment == "sd"
            # shifted a little, so that the bars of different scalars do not overlap
            at = np.array([*h, 0.0]) + 0.004 * h[0] * (k - len(shown) / 2)
            values = (np.array([*x.values, x.limit]) - x.limit) / sds[x.name]
            errors = np.array([*x.errors, x.limit_error]) / sds[x.name]
            label, marker = f"{x.moment} of {x.name}", "o" if is_sd else "s"
            ax.errorbar(at, values, errors, color=color, fmt=marker, markersize=4, label=label)
            ax.plot([h[0], 0], [x.bias, 0], "-" if is_sd else "--", color=color, linewidth=1)
        ax.axhline(0, color="0.5", linewidth=0.8)
        ax.axvline(h[0], color="0.5", linestyle=":", label="step size of the run")
        ax.set(title=f"{TITLES[name]}\nh = {h[0]:.2g}", xlabel="step size h")
    axes[0, 0].set_ylabel("bias, in sd at the smallest h")
    handles = ax.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def plane(draws: Mapping[str, np.ndarray]) -> Any:
    """Draws of w[4] and b, the two worst scalars, over the density that NUTS implies."""
    reference = draws["NUTS"]
    mean, precision = reference.mean(0), np.linalg.inv(np.cov(reference.T))
    names = [name for name in ENDS if name in draws]
    spread = 4.5 * reference.std(0)
    x, y = np.linspace(mean - spread, mean + spread, 161).T
    gap = np.stack(np.meshgrid(x, y), axis=-1) - mean
    density = np.exp(-0.5 * np.einsum("...i,ij,...j", gap, precision, gap))
    figure, axes = plt.subplots(
        1, len(names), figsize=(WIDTH, 4), layout="constrained", sharey=True, squeeze=False
    )
    for ax, name in zip(axes.flat, names, strict=True):
        points = {"color": "tab:blue", "markersize": 4, "alpha": 0.45, "markeredgewidth": 0}
        ax.plot(*draws[name][::4].T, ".", **points)
        ax.contour(x, y, density, LEVELS[:-1], colors="black", linewidths=1)
        ax.set(xlim=x[[0, -1]], ylim=y[[0, -1]])
        ax.set(title=TITLES[name], xlabel="w[4]", ylabel="b" if name == "step" else "")
    return figure


# --- the script


def make(effort: Effort) -> Iterator[tuple[str, Any]]:
    """Names and contents of tables and figures."""
    reference = run(NUTS(model), effort)
    idatas, rows, planes, curves = {}, [], {"NUTS": _plane_draws(reference)}, {}
    for name in effort.runs:
        mcmc = run(kernel(name, effort), effort)
        report = diagnose(mcmc)
        rows.append(summary_row(name, mcmc, report, reference))
        if name == "repaired":
            continue
        yield f"{name}.md", _block(report if name == "step" else _about_bias(report))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report has the same findings
            idatas[name] = to_inference_data(mcmc)
        planes[name] = _plane_draws(mcmc)
        if name in ENDS:
            if name == "step":
                yield "compare_step.md", _block(compare_draws(mcmc, reference))
            yield f"{name}.png", marginals(mcmc, reference)
            h = np.median(mcmc.last_state.step_size) * np.array(FACTORS)
            smaller = [run(kernel(name, effort, step_size=float(x)), effort) for x in h[1:]]
            curves[name] = h, lines_over(h, [mcmc, *smaller])
            if name == "step":
                yield "bias_step.md", table_of_lines(*curves[name])
    head = [f"| {' | '.join(SUMMARY_HEAD)} |", "|---" * len(SUMMARY_HEAD) + "|"]
    yield "summary.md", "\n".join([*head, *rows])
    yield "traces.png", traces(idatas)
    yield "plane.png", plane(planes)
    yield "bias.png", bias_curves(curves)


def _block(text: Any) -> str:
    return f"```text\n{text}\n```"


def _about_bias(report: Any) -> str:
    """The lines of the head and of the group Bias."""
    head, _, rest = str(report).partition("Mixing\n")
    return head + rest[rest.index("Bias\n") : rest.index("Step\n")].rstrip()


def _plane_draws(mcmc: MCMC) -> np.ndarray:
    draws = mcmc.get_samples()
    return np.stack([np.asarray(draws["w"][:, 4]), np.asarray(draws["b"])], axis=-1)


def save(figure: Any, path: Path) -> None:
    """Save a figure as a PNG of 64 colours, which is small enough for a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(64)
    few.save(path, optimize=True)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Print all tables; write tables and figures if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few draws and one run: a smoke test")
    parser.add_argument("--write", action="store_true", help="write into the documentation")
    parser.add_argument("--out", type=Path, help="write into this folder")
    options = parser.parse_args(arguments)
    out = DOCS if options.write else options.out
    for name, made in make(QUICK if options.quick else FULL):
        if isinstance(made, str):
            print(f"\n{name}\n{made}", flush=True)
            if out is not None:
                path = out / "tables" / f"trust_{name}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(made + "\n")
        elif out is not None:
            save(made, out / "figures" / f"trust_{name}")
        else:
            plt.close(made)


if __name__ == "__main__":
    main()
