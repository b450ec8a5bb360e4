"""Time to a given accuracy on large tables: NUTS, HMCECS, and SGRLD with a control variate.

Logistic regression on generated rows. Prints Markdown tables and writes them to
docs/tables/control_variates.md. ``--small`` is a quick look, ``--budget`` the seconds that each
sampler gets.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import HMCECS, MCMC, NUTS

from numpyro_geom import SGRLD

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "control_variates.md"
NUM_COLUMNS = 20
MEAN_ERROR = 0.1
SD_ERROR = 0.05
TOLERANCE = 0.05


def logistic(X: Any, y: Any, subsample_size: int | None = None) -> None:
    """The model of the whole page; only HMCECS passes a subsample size."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0], subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def rows(num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Independent standard normal columns, labels from the model."""
    key_x, key_w, key_y = random.split(random.key(0), 3)
    X = random.normal(key_x, (num_rows, NUM_COLUMNS))
    w = random.normal(key_w, (NUM_COLUMNS,)) / NUM_COLUMNS**0.5
    return X, random.bernoulli(key_y, jax.nn.sigmoid(X @ w)).astype(jnp.int32)


def laplace(X: jax.Array, y: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Mode and standard deviations of the Laplace approximation, by Newton's method."""
    # in double precision, since a sum over all rows in single is off by a share of a deviation
    X, y = np.asarray(X, np.float64), np.asarray(y, np.float64)
    w = np.zeros(NUM_COLUMNS)
    for _ in range(8):
        p = 1 / (1 + np.exp(-X @ w))
        hessian = X.T @ (X * (p * (1 - p))[:, None]) + np.eye(NUM_COLUMNS)
        w = w - np.linalg.solve(hessian, X.T @ (p - y) + w)
    return w, np.sqrt(np.diag(np.linalg.inv(hessian)))


class Entrant(NamedTuple):
    """A sampler and its sizes.

    Attributes:
        kernel: the NumPyro kernel.
        args: further arguments of the model.
        num_warmup: draws of warm-up.
        batch: draws between two looks at the clock.
        share: share of the budget.
        num_chains: chains, vectorised.
    """

    kernel: Any
    args: tuple
    num_warmup: int
    batch: int
    share: float = 1.0
    num_chains: int = 1


class Result(NamedTuple):
    """What one sampler did.

    Attributes:
        total: seconds of everything, compilation and warm-up included.
        sampling: seconds of the draws after warm-up, without compilation.
        draws: draws, all chains together.
        ess: effective sample size of the worst coordinate.
        error: worst standardised error of a mean.
        ratios: smallest and largest ratio of standard deviations.
        reached: seconds (total, sampling) from which on the accuracy holds, or None.
        per_step: seconds of a stochastic-gradient step of all chains, or None.
        num_steps: steps a draw, or None.
    """

    total: float
    sampling: float
    draws: int
    ess: float
    error: float
    ratios: tuple[float, float]
    reached: tuple[float, float] | None
    per_step: float | None
    num_steps: float | None


def accuracy(draws: np.ndarray, reference: tuple) -> tuple[float, tuple[float, float]]:
    """Worst standardised error of the means; smallest and largest ratio of deviations."""
    mean, sd = reference
    flat = draws.reshape(-1, draws.shape[-1]).astype(np.float64)
    ratios = flat.std(0) / sd
    return float(np.abs((flat.mean(0) - mean) / sd).max()), (ratios.min(), ratios.max())


def measure(entrant: Entrant, data: tuple, reference: tuple, budget: float) -> Result:
    """Run batches of draws until the budget is spent, with a look at the clock after each."""
    start = time.perf_counter()
    mcmc = MCMC(
        entrant.kernel,
        num_warmup=entrant.num_warmup,
        num_samples=entrant.batch,
        num_chains=entrant.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    args = (*data, *entrant.args)
    fields = ("num_steps",) if isinstance(entrant.kernel, SGRLD) else ()
    mcmc.warmup(random.key(1), *args, extra_fields=fields)
    jax.block_until_ready(mcmc.post_warmup_state.z)
    seconds, draws, steps, records = [], [], [], []
    # at least two batches, since the first compiles
    while len(draws) < 2 or time.perf_counter() - start < entrant.share * budget:
        began = time.perf_counter()
        mcmc.run(random.key(2), *args, extra_fields=fields)
        draws.append(np.asarray(mcmc.get_samples(group_by_chain=True)["w"]))
        mcmc.post_warmup_state = mcmc.last_state
        seconds.append(time.perf_counter() - began)
        if fields:
            steps.append(float(np.mean(mcmc.get_extra_fields()["num_steps"])))
        together = np.concatenate(draws, axis=1)
        records.append((time.perf_counter() - start, *accuracy(together, reference)))
    rate = np.mean(seconds[1:])
    good = [
        error <= MEAN_ERROR and abs(low - 1) <= SD_ERROR and abs(high - 1) <= SD_ERROR
        for _, error, (low, high) in records
    ]
    reached = None
    if good[-1]:
        first = len(good) - (good[::-1].index(False) if False in good else len(good))
        reached = records[first][0], (first + 1) * rate
    total, error, ratios = records[-1]
    num_steps = float(np.mean(steps)) if steps else None
    return Result(
        total,
        rate * len(draws),
        together.shape[0] * together.shape[1],
        float(np.min(effective_sample_size(together))),
        error,
        ratios,
        reached,
        None if num_steps is None else rate / entrant.batch / num_steps,
        num_steps,
    )


def entrants(reference: tuple, small: bool) -> dict[str, Entrant]:
    """The samplers of one table; the first is what all others are compared with."""
    ref_params = {"w": jnp.asarray(reference[0], jnp.float32)}
    taylor = HMCECS(NUTS(logistic), num_blocks=10, proxy=HMCECS.taylor_proxy(ref_params))

    def sgrld(**settings: Any) -> SGRLD:
        return SGRLD(logistic, bias_tolerance=TOLERANCE, **settings)

    def corrected(batch_size: int, **settings: Any) -> SGRLD:
        return sgrld(batch_size=batch_size, control_variate=True, **settings)

    warmup, batch = (80, 200) if small else (200, 1000)
    return {
        "NUTS": Entrant(NUTS(logistic), (), 20 if small else 50, 10),
        "HMCECS, Taylor proxy, 256 rows": Entrant(taylor, (256,), 50 if small else 100, 50, 0.5),
        "SGRLD, 256 rows": Entrant(sgrld(batch_size=256), (), 40, 5, 0.35),
        "SGRLD + CV, 256 rows": Entrant(corrected(256), (), warmup, batch, 0.35),
        "SGRLD + CV, 512 rows": Entrant(corrected(512), (), warmup, batch, 0.35),
        "SGRLD + CV, 256 rows, rmsprop": Entrant(
            corrected(256, metric="rmsprop"), (), warmup, batch, 0.35
        ),
    }


def table(num_rows: int, budget: float, small: bool) -> tuple[str, dict[str, Result]]:
    """All samplers at one number of rows."""
    data = rows(num_rows)
    start = time.perf_counter()
    reference = laplace(*data)
    newton = time.perf_counter() - start
    lines = [
        f"N = {num_rows:,} x {NUM_COLUMNS}, float32, one chain, {budget:.0f} s for NUTS (less for "
        "the others). Accuracy: every mean within "
        f"{MEAN_ERROR} sd and every sd within {SD_ERROR:.0%} of the reference, from there on. "
        f"Reference: Newton's mode and inverse Hessian in double precision ({newton:.1f} s, also "
        "given to HMCECS and not counted), whose own error is of order N^-1/2 sd. SGRLD has "
        f"bias_tolerance={TOLERANCE}. ESS: worst coordinate. 'Sampling' leaves out compilation "
        "and warm-up.",
        "",
        "| sampler | time to accuracy, all | sampling | draws | mean error, sd ratio at the end "
        "| ESS | ESS/s, all | ESS/s, sampling | over NUTS, all | over NUTS, sampling |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    results: dict[str, Result] = {}
    for name, entrant in entrants(reference, small).items():
        try:
            r = results[name] = measure(entrant, data, reference, budget)
        except (MemoryError, RuntimeError) as error:  # HMCECS at many rows
            lines.append(f"| {name} | failed: {str(error).splitlines()[0][:80]} |" + " |" * 8)
            continue
        base = results["NUTS"]
        reached = f"not in {r.total:.0f} s | not in {r.sampling:.0f} s"
        if r.reached is not None:
            reached = f"{r.reached[0]:.1f} s | {r.reached[1]:.2f} s"
        rates, base_rates = [(x.ess / x.total, x.ess / x.sampling) for x in (r, base)]
        lines.append(
            f"| {name} | {reached} | {r.draws:,} | {r.error:.3f}, {r.ratios[0]:.2f} to "
            f"{r.ratios[1]:.2f} | {r.ess:.0f} | {rates[0]:.3g} | {rates[1]:.3g} | "
            f"{rates[0] / base_rates[0]:.3g} | {rates[1] / base_rates[1]:.3g} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines), results


def step_table(by_rows: dict[int, dict[str, Result]]) -> str:
    """Cost of a stochastic-gradient step against the number of rows."""
    lines = [
        "Sampling time over stochastic-gradient steps, NumPyro's loop included.",
        "",
        "| sampler | " + " | ".join(f"N = {n:,}: microseconds, steps a draw" for n in by_rows),
        "|---|" + "---|" * len(by_rows),
    ]
    lines[2] += " |"
    for name in next(iter(by_rows.values())):
        if name.startswith("SGRLD"):
            cells = [
                f"{by_rows[n][name].per_step * 1e6:.1f}, {by_rows[n][name].num_steps:.1f}"
                for n in by_rows
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for NUTS")
    options = parser.parse_args()
    sizes = {5_000: 6.0, 20_000: 6.0} if options.small else {1_000_000: 1.0, 100_000: 0.4}
    parts, by_rows = [], {}
    for num_rows, share in sizes.items():
        budget = share if options.small else share * options.budget
        text, by_rows[num_rows] = table(num_rows, budget, options.small)
        parts.append(text)
    parts.append(step_table(by_rows))
    text = "\n\n".join(parts) + "\n"
    print(text)
    if not options.small:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
