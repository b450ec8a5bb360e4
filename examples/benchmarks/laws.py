"""The laws of all kernels, against quadrature; and densities of papers.

The first compares every kernel in every metric, in default settings, with the law of three curved
targets in two dimensions, and writes docs/tables/laws.md; about half an hour of one core.
``--densities`` compares the samplers of Rensmeyer and Niggemann (AISTATS 2025) with the densities
that they derive, those of Yu et al. (TMLR 2023) with their funnel, and writes long/densities.md
beside this script; some minutes.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import TABLES, chains, head, versions
from jax import random
from jax.scipy.stats import norm
from numpyro.diagnostics import effective_sample_size

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, Monge, RMSprop, Shampoo, diagnose
from numpyro_geom.baselines import ISGD, AdamSGLD

METRICS = ("rmsprop", "wenzel", "monge", "shampoo")
# Laws of all kernels


def banana_law(x: Any) -> Any:
    """x1 ~ N(0, 1), x2 given x1 ~ N(x1^2 / 2, 1/4)."""
    return norm.logpdf(x[0]) + norm.logpdf(x[1], x[0] ** 2 / 2, 0.5)


def funnel_law(x: Any) -> Any:
    """x1 ~ N(0, 1), x2 given x1 ~ N(0, e^x1)."""
    return norm.logpdf(x[0]) + norm.logpdf(x[1], 0, jnp.exp(x[0] / 2))


def student_law(x: Any) -> Any:
    """A Student t with five degrees of freedom, the correlation .8, and scales 1 and 2."""
    y = x[1] / 2
    return -3.5 * jnp.log1p((x[0] ** 2 + y**2 - 1.6 * x[0] * y) / (0.36 * 5))


LAWS: dict[str, Callable[[Any], Any]] = {
    "banana": banana_law,
    "funnel": funnel_law,
    "Student t": student_law,
}
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
LAW_CHAINS, LAW_DRAWS = 16, 1000
TOLERATED = {"mean": 0.1, "sd": 0.05, "share": 0.02}
"""Largest errors of a right run: of a mean in sds, of an sd (relative), of a quantile's share."""
SURE = 4
"""Monte Carlo errors beyond which a difference is real."""


def kernels() -> dict[str, Callable[[Callable], Any]]:
    """Every kernel in every metric, by name."""
    found: dict[str, Callable[[Callable], Any]] = {}

    def add(kernel: Any, text: str = "", **settings: Any) -> None:
        metric = settings.get("metric")
        label = [kernel.__name__, metric if isinstance(metric, str) else text]
        label += [f"{k}={v!r}" for k, v in settings.items() if isinstance(v, str | bool)][
            isinstance(metric, str) :
        ]
        found[", ".join(filter(None, label))] = lambda model: kernel(model, **settings)

    follows, others = Monge(1.0, 0.9), ("identity", *METRICS)
    for kernel in (SGRLD, SGHMC, SGNHT, GGMC):
        for metric in others:
            add(kernel, metric=metric)
    for metric in others:
        add(SGRLD, metric=metric, adjusted=True)
    for kernel in (SGRLD, SGHMC):
        for divergence in ("corrected", "auxiliary"):
            for metric in METRICS:
                if (metric, divergence) != ("shampoo", "corrected"):
                    add(kernel, metric=metric, divergence=divergence)
        add(kernel, "Monge(1.0, 0.9)", metric=follows)
    for metric in METRICS:
        add(SGRLD, metric=metric, divergence="auxiliary", adjusted=True)
    add(SGRLD, "Monge(1.0, 0.9)", metric=follows, adjusted=True)
    add(AdamSGLD)
    add(ISGD)
    return found


def law_model(law: Any) -> None:
    """A model whose argument is the number of the law."""
    flat = dist.ImproperUniform(dist.constraints.real, (), ())
    x = jnp.stack([numpyro.sample(name, flat) for name in "ab"])
    numpyro.factor("log density", jax.lax.switch(law, list(LAWS.values()), x))


def exact(law: Callable) -> dict[str, np.ndarray]:
    """Means, sds and quantiles of both coordinates, by quadrature."""
    u = np.linspace(-6, 6, 3001)
    x, weight = 0.5 * np.sinh(u), 0.5 * np.cosh(u)
    with jax.enable_x64(True):
        grid = jnp.asarray(np.stack(np.meshgrid(x, x, indexing="ij")))
        density = np.exp(np.asarray(jax.jit(law)(grid))) * np.outer(weight, weight)
    found: dict[str, list] = {"mean": [], "sd": [], "quantiles": []}
    for k in range(2):
        marginal = density.sum(1 - k)
        marginal /= marginal.sum()
        mean = marginal @ x
        found["mean"].append(mean)
        found["sd"].append(np.sqrt(marginal @ (x - mean) ** 2))
        below = np.cumsum(marginal) - marginal / 2  # the rule of the trapezoid
        found["quantiles"].append(np.interp(SHARES, below, x))
    return {key: np.asarray(value) for key, value in found.items()}


def judge(x: np.ndarray, known: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """The error that is largest beyond what is tolerated and due to chance, and its own error.

    Args:
        x: draws, shape (chains, draws, 2).
        known: from `exact`.

    Returns:
        For means (in sds), sds (relative) and shares below quantiles, (error, Monte Carlo error).
    """
    scaled = (x - known["mean"]) / known["sd"]
    below = (x[..., None] < known["quantiles"]).mean(1) - np.asarray(SHARES)
    per_chain = {
        "mean": scaled.mean(1),
        "sd": ((scaled - scaled.mean((0, 1))) ** 2).mean(1),
        "share": below.reshape(len(x), -1),
    }
    found = {}
    for key, values in per_chain.items():
        value, error = values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5
        if key == "sd":
            error, value = error / (2 * np.sqrt(value)), np.sqrt(value) - 1
        worst = int(np.argmax(np.abs(value) - SURE * error))
        found[key] = float(value[worst]), float(error[worst])
    return found


def law_cell(build: Callable, law: int, known: dict, small: bool) -> dict[str, Any]:
    """A run of a kernel on a law: its errors, what is said of it, and its effective draws."""
    draws = 100 if small else LAW_DRAWS
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kernel = build(law_model)
            mcmc = chains(kernel, draws, draws, LAW_CHAINS)
            mcmc.run(random.key(law), jnp.int32(law), extra_fields=("num_steps", "num_diverging"))
        except ValueError as error:
            return {"refused": str(error)}
    ran = time.process_time() - start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = diagnose(mcmc)
    found, extra = jax.device_get((mcmc.get_samples(True), mcmc.get_extra_fields(True)))
    x = np.asarray(np.stack([found["a"], found["b"]], -1), float)
    sizes = [effective_sample_size(f) for f in (x, (x - known["mean"]) ** 2)]
    steps, settings = float(np.sum(extra["num_steps"])), kernel.settings
    products = {"auxiliary": 2 if hasattr(settings, "friction") else 1, "corrected": 1}
    gradients = steps * (1 + products.get(getattr(settings, "divergence", None), 0))
    return judge(x, known) | {
        "ess": float(np.nan_to_num(np.min(sizes))),
        "gradients": gradients,
        "failed": float(np.sum(extra["num_diverging"])) / steps,
        "flags": [check.name for check in report.flagged],
        "verdict": report.verdict,
        "warned": [str(warning.message) for warning in caught],
        "seconds": [ran, time.process_time() - start - ran],
    }


def is_wrong(cell: dict[str, Any]) -> bool | None:
    """Whether an error is beyond what is tolerated and due to chance; None if chance hides it."""
    if any(abs(cell[k][0]) - SURE * cell[k][1] > most for k, most in TOLERATED.items()):
        return True
    hidden = any(max(abs(cell[k][0]), 2 * cell[k][1]) > most for k, most in TOLERATED.items())
    return None if hidden else False


def law_text(cell: dict[str, Any] | None) -> str:
    """A cell of the table."""
    if cell is None:
        return ""
    if "refused" in cell:
        return "refused"
    parts = [f"{cell[k][0]:+.2f} ({cell[k][1]:.2f})" for k in ("mean", "sd")]
    parts.append(f"{cell['share'][0]:+.3f} ({cell['share'][1]:.3f})")
    text = "lost" if abs(cell["mean"][0]) > 10 else ", ".join(parts)
    if is_wrong(cell):
        text = f"**{text}**"
    text += f"<br>{cell['ess'] / cell['gradients']:.1e}"
    if cell["failed"] > 0:
        text += f", {cell['failed']:.1g} failed"
    flags = cell["flags"]
    return text + (f"<br>!! {flags[0]}" if flags else "")


def laws(options: Any) -> str:
    """The Markdown table of laws."""
    results: dict = {}
    if options.cache and options.cache.exists():
        results = json.loads(options.cache.read_text())
    known = [exact(law) for law in LAWS.values()]
    for name, build in kernels().items():
        if options.only and not any(part in name for part in options.only):
            continue
        row = results.setdefault(name, {})
        for k, law in enumerate(LAWS):
            if law not in row:
                cell = law_cell(build, k, known[k], options.small)
                row[law] = cell
                print(name, law, cell, flush=True)
        jax.clear_caches()
        if options.cache:
            options.cache.write_text(json.dumps(results))
    cells = [c for row in results.values() for c in row.values() if "refused" not in c]
    count = {w: [bool(c["flags"]) for c in cells if is_wrong(c) is w] for w in (True, False, None)}
    lines = [
        f"{LAW_CHAINS} vectorized chains of {LAW_DRAWS:,} draws after {LAW_DRAWS:,} of warm-up, "
        "float32, one run each. A cell has the error of a mean in posterior sds, of an sd "
        "(relative), and of the share of draws below one of five quantiles (5 to 95%), each with "
        "its Monte Carlo error by the spread of the chains. It is the coordinate and quantile that "
        f"is farthest beyond {SURE} Monte Carlo errors. Wrong cells are bold: farther beyond them "
        f"than {TOLERATED['mean']}, {TOLERATED['sd']} or {TOLERATED['share']}. Then follow "
        "effective draws of the worst mean or second moment per gradient (a product with the "
        "Hessian counts as one), the share of failed steps, and the first check that `diagnose` "
        "flags.",
        "",
        f"{len(cells)} runs: {len(count[True])} are wrong ({sum(count[True])} of them flagged), "
        f"{len(count[False])} are right ({sum(count[False])} flagged), and for {len(count[None])} "
        f"Monte Carlo errors are too large to say ({sum(count[None])} flagged). The table has the "
        "kernels with a wrong run; the script prints all runs.",
        "",
        *head("kernel", *LAWS),
    ]
    for name in kernels():
        row = results.get(name, {})
        if any(is_wrong(cell) for cell in row.values() if "refused" not in cell):
            lines.append(f"| {name} | " + " | ".join(law_text(row.get(law)) for law in LAWS) + " |")
    return "\n".join(lines) + f"\n\n{versions()}\n"


# Densities of Rensmeyer and Niggemann


DERIVED: dict[str, tuple[Callable[..., Any], Callable[[np.ndarray], np.ndarray]]] = {
    "PSGLD": (
        partial(SGRLD, metric=RMSprop(0.9, 0.1), divergence="published"),
        lambda x: (0.1 + x) ** 0.9,
    ),
    "PSGLD, corrected": (
        partial(SGRLD, metric=RMSprop(0.9, 0.1), divergence="corrected"),
        np.ones_like,
    ),
    "SGRLD, Monge": (
        partial(SGRLD, metric=Monge(1.0, 0.9), divergence="none"),
        lambda x: 1 + x**2,
    ),
    "SGRLD, Shampoo": (
        partial(SGRLD, metric=Shampoo(decay=0.9, interval=1), divergence="none"),
        lambda x: x,
    ),
    "Adam-SGLD": (
        partial(AdamSGLD, drift=1.0, mean_decay=0.5, square_decay=0.9, eps=0.1),
        lambda x: np.exp(-x) * (x + 0.1) ** 0.1,
    ),
}
"""Kernel, and the derived density over that of N(0, 1)."""
DENSITY_STEP = 5e-5
"""h, half of the paper's step."""
SHRINKING = ", shrinking"
"""After a name: with the paper's steps 0.1 / n^0.55, twice h."""


def density_row(name: str, small: bool) -> str:
    """Variance and largest error of the distribution function, of chains that start at N(0, 1)."""
    make, factor = DERIVED[name.removesuffix(SHRINKING)]
    step: Any = DENSITY_STEP
    if name.endswith(SHRINKING):
        step = lambda t: 0.05 * (1 + t) ** -0.55  # noqa: E731
    num_chains, length = (100, 2) if small else (400, 250)
    kernel = make(potential_fn=lambda z: jnp.sum(jnp.square(z)) / 2, step_size=step, num_steps=2000)
    keys = random.split(random.key(0), num_chains)
    start = random.normal(random.key(1), (num_chains, 1))
    state = kernel.init(keys, 0, start, (), {})

    @jax.jit
    def advance(state: Any) -> Any:
        def body(state: Any, _: None) -> Any:
            state = kernel.sample(state, (), {})
            return state, state.z[..., 0]

        return jax.lax.scan(body, state, None, length)

    state, _ = advance(state)
    x = np.asarray(advance(state)[1], float)
    squares = (x**2).mean(0)
    found, error = squares.mean(), squares.std(ddof=1) / num_chains**0.5
    grid = np.linspace(-9, 9, 200_001)
    normal = np.exp(-(grid**2) / 2)
    laws = [normal * factor(np.abs(grid)), normal]
    derived = float(laws[0] @ grid**2 / laws[0].sum())
    share = (np.arange(x.size) + 0.5) / x.size
    away = [
        np.abs(np.interp(np.sort(x.ravel()), grid, np.cumsum(p) / p.sum()) - share).max()
        for p in laws
    ]
    print(name, derived, found, error, away, flush=True)
    return (
        f"| {name} | {derived:.3f} | {found:.3f} ± {error:.3f} | {(found - derived) / error:+.1f} "
        f"| {away[0]:.3f} | {away[1]:.3f} |"
    )


def densities(small: bool) -> str:
    """The Markdown tables of densities and of the funnel."""
    laws = "from the derived law", "from N(0, 1)"
    lines = [
        "N(0, 1) with N = 1, decay 0.9, eps 0.1, and the paper's step of 1e-4 (h = 5e-5). 400 "
        "chains from N(0, 1), each of 500,000 steps and 500,000 more that count. Shrinking steps "
        "are the paper's 0.1 / n^0.55. The last columns are the largest errors of the "
        f"distribution function. jax {jax.__version__}.",
        "",
        *head("sampler", "variance, derived", "ours", "in standard errors", *laws),
    ]
    names = [*DERIVED, *(name + SHRINKING for name in ("PSGLD", "PSGLD, corrected"))]
    lines += [density_row(name, small) for name in names]
    lines += [
        "",
        "The funnel of Yu et al. 2023, with the steps and metrics of their appendix A.4: 16 chains "
        "of 2,000,000 steps from ones, mean 2, variance 80 and noise of sd 1, in float64. Exact: "
        "share 0.132, sd 8.944, and -20.807 for the lowest hundredth.",
        "",
        *head("metric", "share below -10", "sd", "lowest hundredth", "failed steps"),
    ]
    with jax.enable_x64(True):  # as the paper; in 32 bits Monge gets stuck at the funnel's end
        lines += [funnel_row(name, small) for name in FUNNEL]
    return "\n".join(lines) + "\n"


# The funnel of Yu et al. 2023


FUNNEL_ROWS = 1000
"""Rows of noise. Metrics are of gradients per row, and the paper's of their sum."""
FUNNEL: dict[str, tuple[Any, float]] = {
    "identity": ("identity", 0.001),
    "rmsprop": (RMSprop(0.995, 1e-12), 0.0025 / FUNNEL_ROWS),
    "shampoo": (
        Shampoo(decay=0.9995, eps=1e-6 / FUNNEL_ROWS**2, interval=1, vector="full"),
        0.003 / FUNNEL_ROWS,
    ),
    "monge": (Monge(0.1 * FUNNEL_ROWS**2, 0.7), 0.003),
}
"""Metric and step of appendix A.4. Without its limit on gradients in the Monge metric."""


def noisy_funnel(noise: Any) -> None:
    """theta2 ~ N(0, 80), theta1 ~ N(2, softplus(theta2)); rows add noise of mean 0 to gradients.

    The constants, and the noise of sd 1, are those of the paper's code.
    """
    theta = numpyro.sample("theta", dist.ImproperUniform(dist.constraints.real_vector, (), (2,)))
    sd = jnp.sqrt(jax.nn.softplus(theta[1]))
    numpyro.factor("law", norm.logpdf(theta[1], 0, 80**0.5) + norm.logpdf(theta[0], 2, sd))
    with numpyro.plate("rows", FUNNEL_ROWS) as i:
        numpyro.factor("noise", noise[i] @ theta)


def funnel_row(name: str, small: bool) -> str:
    """Of theta2: share below -10, sd, and quantile of the lowest hundredth; and failed steps."""
    metric, step = FUNNEL[name]
    num_chains, draws = (4, 20) if small else (16, 2000)
    kernel = SGRLD(
        noisy_funnel, metric=metric, divergence="none", step_size=step, batch_size=1, num_steps=1000
    )
    noise = random.normal(random.key(0), (FUNNEL_ROWS, 2))
    noise = (noise - noise.mean(0)) / (FUNNEL_ROWS * noise.std(0))
    keys, start = random.split(random.key(1), num_chains), {"theta": jnp.ones((num_chains, 2))}
    state = kernel.init(keys, 0, start, (noise,), {})

    @jax.jit
    def advance(state: Any) -> Any:
        def body(state: Any, _: None) -> Any:
            state = kernel.sample(state, (noise,), {})
            return state, (state.z["theta"][..., 1], state.num_diverging / 1000)

        return jax.lax.scan(body, state, None, draws)[1]

    x, failed = (np.asarray(found, float) for found in advance(state))
    cells = [name]
    for found in ((x < -10).mean(0), x.std(0), np.quantile(x, 0.01, axis=0), failed.mean(0)):
        cells.append(f"{found.mean():.3f} ± {found.std(ddof=1) / num_chains**0.5:.3f}")
    print(cells, flush=True)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="part of a kernel's name")
    parser.add_argument("--small", action="store_true", help="a quick look, no table written")
    parser.add_argument("--cache", type=Path, help="JSON file to resume from and to write to")
    parser.add_argument("--densities", action="store_true", help="densities in one dimension")
    options = parser.parse_args()
    text = densities(options.small) if options.densities else laws(options)
    print(text)
    if not options.small:
        path = Path(__file__).with_name("long") / "densities.md"
        (path if options.densities else TABLES / "laws.md").write_text(text)


if __name__ == "__main__":
    main()
