"""Posteriors with many groups or times: effective draws per second, beside NUTS.

    python examples/benchmarks/hierarchies.py [--models normal logistic ...] [--limit 900]

Each run is a process of its own on one core, by default and through ``MCMC``; its CPU seconds
include start and compilation, but not imports. ESS is that of the worst parameter, and ESS/s
divides it by the seconds of the whole run. NUTS has 500 draws after 500 of warm-up, ours 1,000
after 1,000. NUTS runs a non-centred version of a model where that is better, see `NON_CENTRED`. It
does not run on 100,000 rows and more (scale.py has it there), nor `GGMC` with rows on the host.
Errors of SGHMC are of the parameters that all groups share, against GGMC, which is exact: the
largest difference of means in sds, and the ratio of sds. They have the Monte Carlo error of both. A
line is put into docs/tables/hierarchies.md when it is measured; other lines there stay.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from typing import Any

import arviz as az
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import TABLES, head, in_process, logistic
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam

from numpyro_geom import GGMC, SGHMC, HostRows

TABLE = TABLES / "hierarchies.md"
KERNELS = {"SGHMC": SGHMC, "GGMC": GGMC, "NUTS": NUTS}
COLUMNS = 15
GROUPED = (
    "intercept",
    "slope",
    "level",
    "person",
    "district",
    "school",
    "level_decentered",
    "state",
    "product",
    "z",
)
"""Sites with a value for each group."""
NOT_IDENTIFIED = tuple(f"{side}{of}" for side in ("user", "item") for of in ("", "_sd", "_root"))
"""Sites that the rows do not tell apart: columns of a factor may change places and signs."""
NON_CENTRED = {"few": "level"}
"""Model -> the site that is not centred for NUTS."""
ON_HOST = ("host",)
"""Models with rows on the host."""
LARGE = (*ON_HOST, "normal", "logistic", "negative_binomial", "nested", "nested_logistic")
LARGE += ("ratings", "regression", "many_items")
"""Models of 100,000 rows and more."""
NUM_DRAWS = {"NUTS": 500, "SGHMC": 1000, "GGMC": 1000}
"""Draws, and as many of warm-up."""


def two_level(family: str, num_groups: int = 1000, rows_per_group: int = 200) -> tuple:
    """An intercept and a slope for each group, centred, and 15 columns with sds from 0.2 to 5."""
    rng = np.random.default_rng(0)
    num_rows = num_groups * rows_per_group
    X = (rng.normal(size=(num_rows, COLUMNS)) * np.geomspace(0.2, 5, COLUMNS)).astype("f4")
    x = rng.normal(size=num_rows).astype("f4")
    group = rng.integers(0, num_groups, num_rows)
    w = 0.2 * rng.normal(size=COLUMNS) / X.std(0)
    intercept, slope = 0.5 + 0.3 * rng.normal(size=(2, num_groups))
    mean = X @ w + intercept[group] + slope[group] * x
    if family == "logistic":
        y = rng.uniform(size=num_rows) < 1 / (1 + np.exp(-mean))
    elif family == "normal":
        y = mean + rng.normal(size=num_rows)
    else:
        y = rng.poisson(np.exp(mean) * rng.gamma(2.0, size=num_rows) / 2.0)

    def model(X: Any, x: Any, group: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 5).expand([COLUMNS]).to_event(1))
        mu = numpyro.sample("mu", dist.Normal(0, 5).expand([2]).to_event(1))
        tau = numpyro.sample("tau", dist.HalfNormal(5).expand([2]).to_event(1))
        if family != "logistic":
            scale = numpyro.sample("scale", dist.HalfNormal(5))
        with numpyro.plate("groups", num_groups):
            intercept = numpyro.sample("intercept", dist.Normal(mu[0], tau[0]))
            slope = numpyro.sample("slope", dist.Normal(mu[1], tau[1]))
        with numpyro.plate("rows", len(y)) as i:
            mean = X[i] @ w + intercept[group[i]] + slope[group[i]] * x[i]
            if family == "logistic":
                law = dist.Bernoulli(logits=mean)
            elif family == "normal":
                law = dist.Normal(mean, scale)
            else:
                law = dist.NegativeBinomial2(jnp.exp(mean), scale)
            numpyro.sample("y", law, obs=y[i])

    return model, (X, x, group, y.astype("f4"))


def zipf() -> tuple:
    """400 levels of Zipf frequency, centred: the median has 17 of 40,000 rows, the first 9,788."""
    num_rows, num_levels = 40_000, 400
    rng = np.random.default_rng(51)
    p = 1 / np.arange(1, num_levels + 1) ** 1.2
    group = rng.choice(num_levels, size=num_rows, p=p / p.sum())
    level = rng.normal(size=num_levels)
    x = rng.normal(size=num_rows).astype("f4")
    y = rng.random(num_rows) < 1 / (1 + np.exp(-(-1 + level[group] + 0.5 * x)))

    def model(group: Any, x: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        b = numpyro.sample("b", dist.Normal(0, 2))
        with numpyro.plate("levels", num_levels):
            level = numpyro.sample("level", dist.Normal(mu, tau))
        with numpyro.plate("rows", len(y)) as i:
            logits = level[group[i]] + b * x[i]
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    return model, (group, x, y.astype("f4"))


def few_rows(num_groups: int = 400, rows_per_group: int = 5) -> tuple:
    """Groups with few rows and a small spread, centred: a funnel."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(num_groups), rows_per_group)
    logits = 0.5 * rng.normal(size=num_groups)[group]
    y = rng.uniform(size=group.size) < 1 / (1 + np.exp(-logits))

    def model(group: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.LogNormal(-1, 1))
        with numpyro.plate("levels", num_groups):
            level = numpyro.sample("level", dist.Normal(mu, tau))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Bernoulli(logits=level[group[i]]), obs=y[i])

    return model, (group, y.astype("f4"))


def random_slopes(centred: bool, num_groups: int = 150, size: int = 13) -> tuple:
    """A regression of 13 columns for each group of 10 rows."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(num_groups), 10)
    X = np.column_stack([np.ones(group.size), rng.normal(size=(group.size, size - 1))])
    sd, mean = 0.5 * np.exp(0.3 * rng.normal(size=size)), rng.normal(size=size)
    slopes = mean + sd * rng.normal(size=(num_groups, size))
    y = np.sum(X * slopes[group], axis=1) + rng.normal(size=group.size)

    def model(X: Any, group: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 2).expand([size]).to_event(1))
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([size]).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        law = dist.Normal(mu, tau) if centred else dist.Normal(0, 1).expand([size])
        with numpyro.plate("groups", num_groups):
            slope = numpyro.sample("slope", law.to_event(1))
        slope = slope if centred else mu + tau * slope
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(jnp.sum(X[i] * slope[group[i]], -1), noise), obs=y[i])

    return model, (X.astype("f4"), group, y.astype("f4"))


def matches(centred: bool, players: int = 1000, num_rows: int = 40_000) -> tuple:
    """Matches of two players each (Bradley and Terry)."""
    rng = np.random.default_rng(1)
    skill, first = 0.8 * rng.normal(size=players), rng.integers(0, players, num_rows)
    second = (first + rng.integers(1, players, num_rows)) % players
    won = rng.uniform(size=num_rows) < 1 / (1 + np.exp(skill[second] - skill[first]))

    def model(first: Any, second: Any, won: Any) -> None:
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("players", players):
            skill = numpyro.sample("level", dist.Normal(0, tau if centred else 1))
        skill = skill if centred else tau * skill
        with numpyro.plate("rows", len(won)) as i:
            logits = skill[first[i]] - skill[second[i]]
            numpyro.sample("won", dist.Bernoulli(logits=logits), obs=won[i])

    return model, (first, second, won.astype("f4"))


def crossed(users: int = 2000, items: int = 400, num_rows: int = 60_000) -> tuple:
    """Ratings with an effect of each user and of each item, centred."""
    rng = np.random.default_rng(2)
    user, item = rng.integers(0, users, num_rows), rng.integers(0, items, num_rows)
    y = 3 + 0.6 * rng.normal(size=users)[user] + 0.8 * rng.normal(size=items)[item]
    y += 0.7 * rng.normal(size=num_rows)

    def model(user: Any, item: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        with numpyro.plate("users", users):
            a = numpyro.sample("person", dist.Normal(0, tau[0]))
        with numpyro.plate("items", items):
            b = numpyro.sample("level", dist.Normal(0, tau[1]))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(mu + a[user[i]] + b[item[i]], noise), obs=y[i])

    return model, (user, item, y.astype("f4"))


def nested(family: str, districts: int = 400, schools: int = 4600) -> tuple:
    """Pupils in schools in districts, centred."""
    rng = np.random.default_rng(0)
    num_rows = 200_000
    district = rng.integers(0, districts, schools)
    school = rng.integers(0, schools, num_rows)
    x = rng.normal(size=num_rows).astype("f4")
    means = 1 + 0.7 * rng.normal(size=districts)[district] + 0.5 * rng.normal(size=schools)
    mean = means[school] + 0.5 * x
    if family == "normal":
        y = mean + rng.normal(size=num_rows)
    else:
        y = rng.uniform(size=num_rows) < 1 / (1 + np.exp(-mean))

    def model(district_of: Any, school_of: Any, x: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        slope = numpyro.sample("b", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(2).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(2)) if family == "normal" else None
        with numpyro.plate("districts", districts):
            district = numpyro.sample("district", dist.Normal(mu, tau[0]))
        with numpyro.plate("schools", schools):
            school = numpyro.sample("school", dist.Normal(district[district_of], tau[1]))
        with numpyro.plate("rows", len(y)) as i:
            mean = school[school_of[i]] + slope * x[i]
            law = dist.Bernoulli(logits=mean) if scale is None else dist.Normal(mean, scale)
            numpyro.sample("y", law, obs=y[i])

    return model, (district, school, x, y.astype("f4"))


def item_response(persons: int, items: int) -> tuple:
    """The two-parameter logistic model: each person answers each item."""
    rng = np.random.default_rng(0)
    ability = rng.normal(size=persons)
    discrimination, difficulty = np.exp(0.3 * rng.normal(size=items)), rng.normal(size=items)
    person, item = np.repeat(np.arange(persons), items), np.tile(np.arange(items), persons)
    logits = discrimination[item] * (ability[person] - difficulty[item])
    y = rng.uniform(size=logits.size) < 1 / (1 + np.exp(-logits))

    def model(person: Any, item: Any, y: Any) -> None:
        with numpyro.plate("items", items):
            discrimination = numpyro.sample("discrimination", dist.LogNormal(0, 0.5))
            difficulty = numpyro.sample("difficulty", dist.Normal(0, 2))
        with numpyro.plate("persons", persons):
            ability = numpyro.sample("person", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y)) as i:
            logits = discrimination[item[i]] * (ability[person[i]] - difficulty[item[i]])
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    return model, (person, item, y.astype("f4"))


def local_level(by_innovations: bool = False, num_times: int = 2000) -> tuple:
    """A random walk with noise, by `scan`, or by `cumsum` of innovations."""
    rng = np.random.default_rng(0)
    y = np.cumsum(0.3 * rng.normal(size=num_times)) + rng.normal(size=num_times)

    def model(y: Any) -> None:
        step = numpyro.sample("step", dist.LogNormal(-1, 1))
        noise = numpyro.sample("noise", dist.LogNormal(0, 1))

        def next_time(before: Any, y: Any) -> tuple:
            state = numpyro.sample("state", dist.Normal(before, step))
            numpyro.sample("y", dist.Normal(state, noise), obs=y)
            return state, None

        if by_innovations:
            z = numpyro.sample("z", dist.Normal(0, 1).expand([len(y)]).to_event(1))
            numpyro.sample("y", dist.Normal(step * jnp.cumsum(z), noise).to_event(1), obs=y)
        else:
            scan(next_time, jnp.zeros(()), y)

    return model, (y.astype("f4"),)


def volatility(by_innovations: bool = False, num_times: int = 2000) -> tuple:
    """Returns whose log volatility is a random walk."""
    rng = np.random.default_rng(0)
    state = np.cumsum(0.1 * rng.normal(size=num_times)) - 1
    y = np.exp(state) * rng.standard_t(8, size=num_times)

    def model(y: Any) -> None:
        step = numpyro.sample("step", dist.Exponential(10))
        freedom = numpyro.sample("freedom", dist.Exponential(0.1))
        if by_innovations:
            z = numpyro.sample("z", dist.Normal(0, 1).expand([len(y)]).to_event(1))
            state = jnp.cumsum(step * z)
        else:
            state = numpyro.sample("state", dist.GaussianRandomWalk(step, num_steps=len(y)))
        numpyro.sample("y", dist.StudentT(freedom, 0, jnp.exp(state)), obs=y)

    return model, (y.astype("f4"),)


def regression(num_columns: int = 1000, num_rows: int = 100_000) -> tuple:
    """A logistic regression without structure; columns have 20 factors in common."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, num_columns))
    X += rng.normal(size=(num_rows, 20)) @ rng.normal(size=(20, num_columns))
    w = 0.1 * rng.normal(size=num_columns) / 20**0.5
    y = rng.uniform(size=num_rows) < 1 / (1 + np.exp(-X @ w))

    return logistic, (X.astype("f4"), y.astype("f4"))


def factors(users: int = 100, items: int = 60, rank: int = 3, num_rows: int = 2000) -> tuple:
    """A matrix as a product of two factors, each with correlated columns."""
    rng = np.random.default_rng(0)
    sides = [rng.normal(size=(n, rank)) * (1.0, 0.7, 0.5)[:rank] for n in (users, items)]
    user, item = rng.integers(0, users, num_rows), rng.integers(0, items, num_rows)
    y = np.sum(sides[0][user] * sides[1][item], axis=1) + 0.5 * rng.normal(size=num_rows)

    def side(name: str, size: int) -> Any:
        sd = numpyro.sample(f"{name}_sd", dist.HalfNormal(1).expand([rank]).to_event(1))
        root = numpyro.sample(f"{name}_root", dist.LKJCholesky(rank, 2.0))
        with numpyro.plate(f"{name}s", size):
            law = dist.MultivariateNormal(scale_tril=sd[:, None] * root)
            return numpyro.sample(name, law)

    def model(user: Any, item: Any, y: Any) -> None:
        u, v = side("user", users), side("item", items)
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        numpyro.deterministic("product", u[:100] @ v[:60].T)
        with numpyro.plate("rows", len(y)) as i:
            mean = jnp.sum(u[user[i]] * v[item[i]], axis=-1)
            numpyro.sample("y", dist.Normal(mean, noise), obs=y[i])

    return model, (user, item, y.astype("f4"))


MODELS = {
    "normal": (lambda: two_level("normal"), "1,000 groups x 2, Normal"),
    "logistic": (lambda: two_level("logistic"), "1,000 groups x 2, logistic"),
    "host": (
        lambda: two_level("logistic", 10_000),
        "10,000 groups x 2, logistic, `HostRows`",
    ),
    "negative_binomial": (
        lambda: two_level("negative_binomial"),
        "1,000 groups x 2, negative binomial",
    ),
    "nested": (lambda: nested("normal"), "4,600 schools in 400 districts, Normal"),
    "nested_logistic": (
        lambda: nested("logistic"),
        "4,600 schools in 400 districts, logistic",
    ),
    "few": (few_rows, "400 groups of 5 rows, logistic"),
    "slopes": (lambda: random_slopes(True), "150 groups x 13, 10 rows each, centred"),
    "slopes_apart": (lambda: random_slopes(False), "150 groups x 13, 10 rows each, non-centred"),
    "matches": (lambda: matches(True), "1,000 players, centred"),
    "matches_apart": (lambda: matches(False), "1,000 players, non-centred"),
    "crossed": (crossed, "2,000 users x 400 items, Normal"),
    "zipf": (zipf, "400 levels of Zipf frequency"),
    "items": (lambda: item_response(200, 30), "item response, 200 x 30"),
    "level": (local_level, "local level by `scan`"),
    "level_apart": (lambda: local_level(True), "local level by `cumsum` of innovations"),
    "volatility": (volatility, "stochastic volatility"),
    "volatility_apart": (lambda: volatility(True), "stochastic volatility by innovations"),
    "factors": (factors, "matrix factorisation, 100 x 60, LKJ priors"),
    "ratings": (
        lambda: factors(5000, 1000, 2, 500_000),
        "matrix factorisation, 5,000 x 1,000, LKJ priors",
    ),
    "regression": (regression, "logistic regression without groups"),
    "many_items": (lambda: item_response(5000, 50), "item response, 5,000 x 50"),
}
"""Name -> data and model, and a description."""


def timed(name: str, kernel: str, num_draws: int) -> dict[str, Any]:
    """A whole run, timed, with the moments of the shared parameters."""
    model, data = MODELS[name][0]()
    data = tuple(map(HostRows if name in ON_HOST else jnp.asarray, data))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began = time.process_time()
    if kernel == "NUTS" and name in NON_CENTRED:
        model = handlers.reparam(model, config={NON_CENTRED[name]: LocScaleReparam(0.0)})
    mcmc = MCMC(
        KERNELS[kernel](model), num_warmup=num_draws, num_samples=num_draws, progress_bar=False
    )
    mcmc.run(random.key(1), *data)
    draws = {
        k: np.asarray(x, np.float64)[None]
        for k, x in mcmc.get_samples().items()
        if k not in NOT_IDENTIFIED
    }
    seconds = time.process_time() - began
    shared = {k: x for k, x in draws.items() if k not in GROUPED}
    return {
        "seconds": seconds,
        "ess": min(float(x.min()) for x in az.ess(draws, method="mean").data_vars.values()),
        "num_draws": num_draws,
        "rows": int(len(data[-1])),
        "mean": np.concatenate([np.ravel(x.mean((0, 1))) for x in shared.values()]).tolist(),
        "sd": np.concatenate([np.ravel(x.std((0, 1))) for x in shared.values()]).tolist(),
    }


def row_of(name: str, limit: float) -> str:
    """A row of the table."""
    about = MODELS[name][1]
    kernels = ["SGHMC"] + ["GGMC"] * (name not in ON_HOST) + ["NUTS"] * (name not in LARGE)
    runs = {k: in_process(__file__, "--one", name, k, NUM_DRAWS[k], seconds=limit) for k in kernels}
    cells = {kernel: ("", "") for kernel in KERNELS}
    for kernel, run in runs.items():
        if "failed" in run:
            cells[kernel] = ("", run["failed"])
        else:
            rate, whole = run["ess"] / run["seconds"], f"{run['seconds']:.0f}, {run['ess']:.0f}"
            cells[kernel] = (f"{rate:.2f}", whole)
    runs = {k: run for k, run in runs.items() if "failed" not in run}
    ours, theirs = runs.get("SGHMC"), runs.get("NUTS")
    exact = runs.get("GGMC") or theirs
    if ours and exact:
        mean, sd = (np.array(exact[k]) for k in ("mean", "sd"))
        away = np.abs(np.array(ours["mean"]) - mean) / sd
        ratio = np.array(ours["sd"]) / sd
        errors = [f"{away.max():.2f}", f"{ratio.min():.2f} to {ratio.max():.2f}"]
    else:
        errors = ["", ""]
    known = ours or theirs
    rates, wholes = zip(*cells.values(), strict=True)
    rows = f"{known['rows']:,}" if known else ""
    return "| " + " | ".join([about, rows, *rates, *errors, *wholes]) + " |"


def main() -> None:
    """Run all models and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    parser.add_argument("--limit", type=float, default=900)
    parser.add_argument("--no-table", action="store_true")
    parser.add_argument("--one", nargs=3)
    given = parser.parse_args()
    if given.one:
        warnings.simplefilter("ignore")
        name, kernel, num_draws = given.one
        print(json.dumps(timed(name, kernel, int(num_draws))))
        return
    top = head(
        *("Model", "Rows", "ESS/s: SGHMC", "GGMC", "NUTS", "means off by, sd", "sds, ratio"),
        *("CPU s, ESS: SGHMC", "GGMC", "NUTS"),
    )
    print("\n".join(top), flush=True)
    for name in given.models:
        line = row_of(name, given.limit)
        print(line, flush=True)
        if not given.no_table:
            known = {
                about: x for x in TABLE.read_text().splitlines() if (about := x.split(" | ")[0])
            }
            known[line.split(" | ")[0]] = line
            titles = (f"| {about}" for _, about in MODELS.values())
            lines = [known[title] for title in titles if title in known]
            TABLE.write_text("\n".join([*top, *lines]) + "\n")


if __name__ == "__main__":
    main()
