"""Does `diagnose` separate good runs from bad ones? 8 posteriors x kernels, good and bad settings.

The truth about a run is the worst relative error of a standard deviation of its draws. It includes
bias and Monte Carlo error, against exact moments or long NUTS runs. `diagnose` should flag
runs above 10% and pass those below 3%. Prints tables and writes them to docs/tables/diagnose.md.
``--quick`` uses two posteriors and few draws. ``--cache`` stores finished runs in a file, so that
the rest can run later (``--seconds`` stops early).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import posteriors as P
from common import TABLES, chains, head
from jax import random

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, Monge, to_inference_data
from numpyro_geom._numpyro import holding
from numpyro_geom.baselines import AdamSGLD
from numpyro_geom.diagnostics import diagnose

TABLE = TABLES / "diagnose.md"
WRONG, RIGHT = 0.1, 0.03
"""A run should be flagged from the first worst sd error, and not below the second."""
CHAINS, SHORT = 16, 30
"""Chains per run; draws per chain of a run that is stopped too early."""
CHUNK, WARMUP = 50, 500
"""Draws per call of the compiled function, which a kernel's runs share; draws of warm-up."""
FACTS = "bias_discretisation", "bias_noise", "relaxations"
"""Facts of each chain that the cache keeps."""
MOST_STEPS = 200_000
"""Largest number of steps of a chain; beyond it, the chain has fewer draws."""

POSTERIORS: dict[str, Callable[[], P.Posterior]] = {
    "gaussian": lambda: P.gaussian(condition=100.0),
    "banana": P.banana,
    "funnel": P.funnel,
    "logistic": P.logistic,
    "raw": lambda: P.logistic(raw=True),
    "poisson": P.poisson,
    "hierarchical": P.hierarchical,
    "stiff": lambda: P.gaussian(condition=1e4),
}

CLOSE = {"bias_tolerance": 0.04}
KERNELS: dict[str, tuple[Callable[..., Any], bool, float]] = {
    # constructor, whether it uses minibatches, and the multiple of its step size that is too large
    "SGRLD": (SGRLD, True, 15.0),
    "GGMC": (GGMC, False, 4.0),
    "SGHMC": (partial(SGHMC, **CLOSE), False, 5.0),
    "SGRLD rmsprop": (
        partial(SGRLD, metric="rmsprop", divergence="frozen", **CLOSE),
        False,
        10.0,
    ),
    "SGRLD monge, no Gamma": (
        partial(SGRLD, metric=Monge(alpha2=100.0, decay=0.9), divergence="none"),
        False,
        1.0,
    ),
    "SGNHT": (partial(SGNHT, **CLOSE), False, 5.0),
    "AdamSGLD": (AdamSGLD, False, 1.0),
}


HEADER = """\
A run's error is the worst relative error of a standard deviation of its own draws, bias and Monte
Carlo error together, against exact moments or 40,000 draws of NUTS. The runs are on the eight
posteriors of `examples/benchmarks/posteriors.py`, with 16 chains. They have 1,000 draws after 500
draws of warm-up, or fewer where that is more than 200,000 steps. Other runs were stopped after 30
draws, or have 4 to 15 times the automatic step size. SGRLD is on minibatches, the others are on all
rows. SGHMC, SGNHT and SGRLD rmsprop have `bias_tolerance=0.04`. One kernel has a metric without
Gamma, and so another law. All other settings are the defaults. A run with few effective draws can
have a small error by luck, because n draws leave an error of about (2n)^-1/2 in each standard
deviation. `diagnose` still says rightly that the draws are too few. One row leaves out the runs
that were stopped early.
"""


def runs(posterior: P.Posterior, label: str, num_samples: int) -> Iterator[tuple[str, Any]]:
    """Runs of a kernel on a posterior: setting, InferenceData."""
    make, minibatches, factor = KERNELS[label]
    rows = {"batch_size": posterior.batch_size} if minibatches else {}
    kernel = make(posterior.model, **rows)
    args, fields = posterior.args, kernel.default_fields
    state = kernel.init(random.split(random.key(0), CHAINS), WARMUP, None, args, {})

    @jax.jit
    def advance(state: Any) -> Any:
        def body(state: Any, _: Any) -> Any:
            state = kernel.sample(state, args, {})
            return state, {name: getattr(state, name) for name in fields}

        return jax.lax.scan(body, state, None, CHUNK)

    constrain = jax.jit(jax.vmap(jax.vmap(kernel.postprocess_fn(args, {}))))

    def sample(state: Any, draws: int) -> Any:
        chunks = []
        for _ in range(draws // CHUNK):
            state, chunk = advance(state)
            chunks.append(jax.tree.map(lambda x: np.swapaxes(x, 0, 1), jax.device_get(chunk)))
        found = jax.tree.map(lambda *x: np.concatenate(x, 1), *chunks)
        mcmc = chains(kernel, WARMUP, draws, CHAINS)
        # `mcmc.run` would compile the kernel anew for every run
        draws = jax.device_get(constrain(found.pop("z")))
        mcmc = holding(mcmc, (args, {}), {"z": draws, **found}, state)
        return state, to_inference_data(mcmc, gradients=True)

    for _ in range(WARMUP // CHUNK):
        state, _ = advance(state)
    good = state
    most = MOST_STEPS // int(np.median(np.asarray(good.num_steps)))
    num_samples = max(2 * CHUNK, min(num_samples, most))
    _, idata = sample(good, num_samples)
    yield "as is", idata
    yield f"{SHORT} draws", first_draws(idata, SHORT)
    if factor > 1:
        steps = np.maximum(1, np.asarray(good.num_steps) // factor).astype(np.int32)
        state = good._replace(step_size=good.step_size * factor, num_steps=jax.numpy.asarray(steps))
        state, _ = advance(state)
        yield f"step x {factor:g}", sample(state, num_samples // 2)[1]


def first_draws(idata: Any, draws: int) -> Any:
    """The run with only its first ``draws`` draws."""
    share = draws / idata.posterior.sizes["draw"]
    part = idata.isel(draw=slice(None, draws))
    attrs = part["posterior"].attrs
    for name in ("relaxations", "gradients", "passes"):
        if name in attrs:
            attrs[name] = (share * np.asarray(attrs[name])).tolist()
    return part


def worst_error(posterior: P.Posterior, idata: Any, sd: np.ndarray) -> float:
    """Largest relative error of a standard deviation of the draws."""
    draws = {str(name): x.values for name, x in idata["posterior"].data_vars.items()}
    values = np.asarray(posterior.scalars(draws), float)
    return float(np.max(np.abs(values.reshape(-1, values.shape[-1]).std(0) / sd - 1)))


def judge(posterior: P.Posterior, name: str, label: str, sd: np.ndarray, draws: int) -> list[dict]:
    """The true errors of a kernel's runs, and what `diagnose` says."""
    found = []
    start = time.perf_counter()
    for kind, idata in runs(posterior, label, draws):
        report = diagnose(idata)
        found.append(
            {
                "posterior": name,
                "kernel": label,
                "setting": kind,
                "error": worst_error(posterior, idata, sd),
                "flags": [check.name for check in report.flagged],
                "figures": [list(check[:3]) for check in report.checks],
                "facts": {k: v for k, v in idata["posterior"].attrs.items() if k in FACTS},
            }
        )
        row = found[-1]
        print(f"{name:13s} {label:22s} {kind:10s} {row['error']:8.3f} {row['flags']}", flush=True)
    print(f"  {time.perf_counter() - start:.0f} s", flush=True)
    return found


def table(done: dict[str, Any]) -> str:
    """All tables as Markdown."""
    found = [run for value in done.values() for run in value if isinstance(run, dict)]
    wrong = [run for run in found if not run["error"] <= WRONG]
    right = [run for run in found if run["error"] < RIGHT]
    between = [run for run in found if RIGHT <= run["error"] <= WRONG]
    groups = (wrong, between, right)

    def cells(keep: Callable[[dict], bool], flagged: Callable[[dict], Any]) -> str:
        """Flagged runs of those kept in each group."""
        kept = [[run for run in group if keep(run)] for group in groups]
        return " | ".join(f"{sum(bool(flagged(r)) for r in g)} of {len(g)}" for g in kept)

    shares = "above 10%", "3% to 10%", "below 3%"
    lines = head("flagged runs, by kernel", *shares)
    for label in dict.fromkeys(run["kernel"] for run in found):
        lines.append(f"| {label} | {cells(lambda r, k=label: r['kernel'] == k, flags)} |")
    lines.append(f"| **all** | {cells(lambda r: True, flags)} |")
    kept = cells(lambda r: setting(r) != f"{SHORT} draws", flags)
    lines.append(f"| **all that were not stopped early** | {kept} |")
    lines += ["", *head("by setting", *shares)]
    for kind in ("as is", f"{SHORT} draws", "larger step"):
        lines.append(f"| {kind} | {cells(lambda r, k=kind: setting(r) == k, flags)} |")
    lines += ["", *head("flagged by", *shares)]
    for reason, names in REASONS.items():
        lines.append(
            f"| {reason} | {cells(lambda r: True, lambda r, n=names: n & set(flags(r)))} |"
        )
    rest = "all but the bias of the step size"
    known = REASONS["bias of the step size"]
    lines.append(f"| {rest} | {cells(lambda r: True, lambda r: set(flags(r)) - known)} |")
    titles = "kernel", "setting", "true error", "flagged by"
    lines += ["", *head("missed, or flagged without need", *titles)]
    for run in found:
        missed, needless = run not in right and not flags(run), run in right and flags(run)
        if missed or needless:
            reasons = ", ".join(flags(run)) if needless else "nothing"
            lines.append(
                f"| {run['posterior']} | {run['kernel']} | {run['setting']} "
                f"| {100 * run['error']:.1f}% | {reasons} |"
            )
    return "\n".join(lines) + "\n"


REASONS = {
    "draws (R-hat, effective sample sizes, no movement, energies)": {
        "R-hat",
        "effective sample size",
        "draws per chain",
        "chains that do not move",
        "energy above the start",
        "energy above the best chain",
        "entries that are not finite",
    },
    "moments from gradients": {
        "error of the means, in sd",
        "relative error of the sd",
        "draws with a finite gradient",
    },
    "temperatures": {"configurational temperature", "kinetic temperature"},
    "bias of the step size": {"bias of variances"},
    "relaxation times": {"relaxation times per chain"},
    "divergences": {"divergences"},
}


def flags(run: dict) -> list[str]:
    """Checks that are flagged."""
    return run["flags"]


def setting(run: dict) -> str:
    """The kind of setting of a run."""
    kinds = "as is", f"{SHORT} draws"
    return run["setting"] if run["setting"] in kinds else "larger step"


def main() -> None:
    """Run everything that is missing in the cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--posteriors", nargs="+", choices=POSTERIORS, default=list(POSTERIORS))
    parser.add_argument("--draws", type=int, default=1000)
    options = parser.parse_args()
    if options.quick:
        options.draws = 100
    end = time.monotonic() + options.seconds
    done: dict[str, Any] = {}
    if options.cache is not None and options.cache.exists():
        done = json.loads(options.cache.read_text())

    def save() -> None:
        if options.cache is not None:
            options.cache.write_text(json.dumps(done))

    names = ["gaussian", "banana"] if options.quick else options.posteriors
    labels = ["SGRLD", "GGMC"] if options.quick else list(KERNELS)
    for label in labels:
        for name in names:
            if f"{name} {label}" in done:
                continue
            if time.monotonic() > end:
                print("stopped")
                return
            posterior = POSTERIORS[name]()
            if f"{name} sd" not in done:
                done[f"{name} sd"] = posterior.reference(40_000)[1].tolist()
                save()
            sd = np.asarray(done[f"{name} sd"])
            done[f"{name} {label}"] = judge(posterior, name, label, sd, options.draws)
            save()
    text = table(done)
    print(text)
    if not options.quick:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(HEADER + "\n" + text)


if __name__ == "__main__":
    main()
