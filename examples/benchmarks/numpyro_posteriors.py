"""Models like NumPyro's examples, written from their source papers.

Data are generated here with a fixed seed, or are small published tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import posteriors as P
import small_data as S
from numpyro.contrib.control_flow import scan
from scipy.special import betaln

SCHEDULE = np.linspace(-1, 1, 5)
"""Inputs at which networks are compared."""
STEPS_A_YEAR = 4
"""Steps of the Lotka-Volterra equations: U at draws is then that of 100 to 0.001, or rounding."""


def scalars_of(*names: str, logs: tuple[str, ...] = ()) -> Callable[[dict[str, Any]], Any]:
    """Entries of these sites side by side; those in ``logs`` as logarithms."""

    def scalars(draws: dict[str, Any]) -> Any:
        return S.scalars_of(*logs, *names)({**draws, **{n: jnp.log(draws[n]) for n in logs}})

    return scalars


def singles(*columns: np.ndarray) -> tuple[Any, ...]:
    """Arrays of single precision."""
    return tuple(jnp.asarray(x, jnp.float32) for x in columns)


HITS = np.array([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
"""Hits of 18 players in their first 45 at bats of 1970 (Efron, Morris 1975)."""


def baseball() -> P.Posterior:
    """Batting averages, partially pooled, with the prior of Carpenter's Stan case study (2016)."""

    def model(hits: Any) -> None:
        share = numpyro.sample("share", dist.Uniform(0, 1))
        kappa = numpyro.sample("kappa", dist.Pareto(1, 1.5))
        with numpyro.plate("players", len(hits)) as i:
            skill = numpyro.sample("skill", dist.Beta(share * kappa, (1 - share) * kappa))
            numpyro.sample("hits", dist.Binomial(45, skill), obs=hits[i])

    scalars = scalars_of("share", "skill", logs=("kappa",))
    return P.Posterior("baseball", model, (jnp.asarray(HITS),), None, scalars)


def baseball_draws() -> dict[str, np.ndarray]:
    """Independent draws from the posterior: skills integrate out; two parameters are on a grid."""
    rng = np.random.default_rng(0)
    logit, log_kappa = np.linspace(-2.5, 0.5, 601)[:, None], np.linspace(0, 20, 2001)[1:]
    share = 1 / (1 + np.exp(-logit))
    a, b = share * np.exp(log_kappa), (1 - share) * np.exp(log_kappa)
    density = np.log(share * (1 - share)) - 1.5 * log_kappa
    for hits, players in zip(*np.unique(HITS, return_counts=True), strict=True):
        density = density + players * (betaln(a + hits, b + 45 - hits) - betaln(a, b))
    weights = np.exp(density - density.max()).ravel()
    picked = rng.choice(weights.size, (S.CHAINS, S.REFERENCE_DRAWS), p=weights / weights.sum())
    a, b, share, log_kappa = (
        np.broadcast_to(x, density.shape).ravel()[picked] for x in (a, b, share, log_kappa)
    )
    skill = rng.beta(a[..., None] + HITS, b[..., None] + 45 - HITS)
    return {"share": share, "kappa": np.exp(log_kappa), "skill": skill}


def horseshoe() -> P.Posterior:
    """Regression with the horseshoe prior (Carvalho, Polson, Scott 2010), 100 rows, 20 columns."""
    rng = np.random.default_rng(11)
    X = rng.normal(size=(100, 20))
    y = X[:, :4] @ np.array([2.0, -1.0, 0.5, 0.25]) + 0.7 * rng.normal(size=100)

    def model(X: Any, y: Any) -> None:
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([X.shape[1]]).to_event(1))
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        w = numpyro.deterministic("w", tau * local * z)
        precision = numpyro.sample("precision", dist.Gamma(3, 1))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, precision**-0.5), obs=y[i])

    scalars = scalars_of("w", logs=("tau", "precision", "local"))
    return P.Posterior("horseshoe", model, singles(X, y), None, scalars)


def sparse() -> P.Posterior:
    """Sparse regression with pairwise interactions by a kernel (Agrawal et al. 2019).

    60 rows, 8 columns. The weights of all columns and pairs are integrated out.
    """
    rng = np.random.default_rng(12)
    X = rng.normal(size=(60, 8))
    y = 1.5 * X[:, 0] - X[:, 1] + X[:, 0] * X[:, 1] + 0.3 * rng.normal(size=60)
    expected = 3  # columns that matter

    def model(X: Any, y: Any) -> None:
        num_rows, num_columns = X.shape
        noise = numpyro.sample("noise", dist.InverseGamma(3, 1))
        scale = expected / (num_columns - expected) * jnp.sqrt(noise / num_rows)
        eta = numpyro.sample("eta", dist.HalfCauchy(1)) * scale
        slab = numpyro.sample("slab", dist.InverseGamma(3, 1))
        pairs = numpyro.sample("pairs", dist.InverseGamma(3, 1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([num_columns]).to_event(1))
        both = eta**2 * jnp.sqrt(pairs) / slab
        Z = X * jnp.sqrt(slab) * local / jnp.sqrt(slab + (eta * local) ** 2)
        linear, squares = Z @ Z.T, Z**2 @ (Z**2).T
        kernel = both**2 / 2 * ((1 + linear) ** 2 - squares) + (eta**2 - both**2) * linear
        kernel += (1 - both**2 / 2) + noise * jnp.eye(num_rows)
        numpyro.sample("y", dist.MultivariateNormal(0.0, kernel), obs=y)

    scalars = scalars_of(logs=("noise", "eta", "slab", "pairs", "local"))
    return P.Posterior("sparse regression", model, singles(X, y), None, scalars)


def volatility() -> P.Posterior:
    """Returns of 200 days, whose log volatility is a random walk (Hoffman, Gelman 2014)."""
    rng = np.random.default_rng(13)
    y = np.exp(-4.0 + np.cumsum(0.1 * rng.normal(size=200))) * rng.standard_t(8, size=200)

    def model(y: Any) -> None:
        sigma = numpyro.sample("sigma", dist.Exponential(50))
        nu = numpyro.sample("nu", dist.Exponential(0.1))
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(sigma, len(y)))
        numpyro.sample("y", dist.StudentT(nu, 0, jnp.exp(walk)).to_event(1), obs=y)

    scalars = scalars_of("walk", logs=("sigma", "nu"))
    return P.Posterior("stochastic volatility", model, singles(y), None, scalars)


def gaussian_process() -> P.Posterior:
    """Hyperparameters of a Gaussian process at 30 points, with wide priors."""
    rng = np.random.default_rng(14)
    x = np.sort(rng.uniform(-1, 1, 30))
    y = np.sin(3 * x) + 0.4 * x**2 + 0.15 * rng.normal(size=30)

    def model(x: Any, y: Any) -> None:
        variance = numpyro.sample("variance", dist.LogNormal(0, 10))
        length = numpyro.sample("length", dist.LogNormal(0, 10))
        noise = numpyro.sample("noise", dist.LogNormal(0, 10))
        kernel = variance * jnp.exp(-(((x[:, None] - x) / length) ** 2) / 2)
        kernel += (noise + 1e-6) * jnp.eye(len(x))
        numpyro.sample("y", dist.MultivariateNormal(0.0, kernel), obs=y)

    scalars = scalars_of(logs=("variance", "length", "noise"))
    return P.Posterior("Gaussian process", model, singles(x, y), None, scalars)


def mortality() -> P.Posterior:
    """Deaths by age in 40 areas of 5 regions, by Gompertz's law with group effects.

    The model computes the numbers of groups from NumPy arrays, and does not index its rows.
    """
    rng = np.random.default_rng(15)
    area, age = (x.ravel() for x in np.meshgrid(np.arange(40), np.arange(8), indexing="ij"))
    region, years = area % 5, (age - 3.5) / 2
    population = rng.integers(50, 500, 320)
    rate = -3.0 + 0.3 * rng.normal(size=40)[area] + (0.9 + 0.1 * rng.normal(size=5)[region]) * years
    deaths = rng.poisson(population * np.exp(rate))

    def model(area: Any, region: Any, years: Any, population: Any, deaths: Any) -> None:
        num_areas, num_regions = len(np.unique(area)), int(region.max()) + 1
        level = numpyro.sample("level", dist.Normal(-3, 3))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        between = numpyro.sample("between", dist.HalfNormal(1).expand([2]).to_event(1))
        with numpyro.plate("regions", num_regions):
            of_region = numpyro.sample("of_region", dist.Normal(0, 1))
        with numpyro.plate("areas", num_areas):
            of_area = numpyro.sample("of_area", dist.Normal(0, 1))
        with numpyro.plate("rows", len(deaths)):
            log_rate = level + between[0] * of_area[area]
            log_rate += (slope + between[1] * of_region[region]) * years
            numpyro.sample("deaths", dist.Poisson(population * jnp.exp(log_rate)), obs=deaths)

    args = area, region, years.astype("f4"), population.astype("f4"), deaths
    scalars = scalars_of("level", "slope", "of_region", "of_area", logs=("between",))
    return P.Posterior("mortality, 40 areas", model, args, None, scalars)


def zero_inflated() -> P.Posterior:
    """Counts with more zeros than a Poisson distribution (Lambert 1992), 250 rows."""
    rng = np.random.default_rng(16)
    X = np.column_stack([np.ones(250), rng.normal(size=(250, 2))])
    rate = np.exp(X @ np.array([0.7, 0.5, -0.3]))
    gate = 1 / (1 + np.exp(-X @ np.array([-0.5, 0.0, 0.8])))
    y = rng.poisson(rate) * (rng.uniform(size=250) > gate)

    def model(X: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        c = numpyro.sample("c", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(y)) as i:
            law = dist.ZeroInflatedPoisson(jax.nn.sigmoid(X[i] @ c), rate=jnp.exp(X[i] @ b))
            numpyro.sample("y", law, obs=y[i])

    args = *singles(X), jnp.asarray(y, jnp.int32)
    return P.Posterior("zero-inflated Poisson", model, args, None, scalars_of("b", "c"))


def autoregressive() -> P.Posterior:
    """An AR(2) series of 150 values, in NumPyro's ``scan``."""
    rng = np.random.default_rng(17)
    y = np.zeros(150)
    for t in range(2, 150):
        y[t] = 0.3 + 0.9 * y[t - 1] - 0.4 * y[t - 2] + 0.5 * rng.normal()

    def model(y: Any) -> None:
        constant = numpyro.sample("constant", dist.Normal(0, 1))
        a = numpyro.sample("a", dist.Normal(0, 1).expand([2]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))

        def step(carry: tuple, now: Any) -> tuple:
            last, before = carry
            mean = constant + a[0] * last + a[1] * before
            now = numpyro.sample("y", dist.Normal(mean, sigma), obs=now)
            return (now, last), None

        scan(step, (y[1], y[0]), y[2:])

    scalars = scalars_of("constant", "a", logs=("sigma",))
    return P.Posterior("AR(2)", model, singles(y), None, scalars)


def predator_prey() -> P.Posterior:
    """Pelts of hare and lynx, 1900 to 1920, by the Lotka-Volterra equations (Carpenter 2018).

    In logarithms, which stay positive.
    """
    hare = [30, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22, 25.4, 27.1, 40.3, 57, 76.6, 52.3]
    hare += [19.5, 11.2, 7.6, 14.6, 16.2, 24.7]
    lynx = [4, 6.1, 9.8, 35.2, 59.4, 41.7, 19, 13, 8.3, 9.1, 7.4, 8, 12.3, 19.5, 45.7, 51.1, 29.7]
    lynx += [15.8, 9.7, 10.1, 8.6]

    def change(_: Any, log_z: Any, rates: Any) -> Any:
        u, v = jnp.exp(log_z)
        return jnp.stack([rates[0] - rates[1] * v, rates[3] * u - rates[2]])

    def path(log_first: Any, rates: Any, years: int) -> Any:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(change),
            diffrax.Tsit5(),
            *(0.0, years - 1.0, 1 / STEPS_A_YEAR, log_first, rates),
            saveat=diffrax.SaveAt(ts=jnp.arange(float(years))),
            adjoint=diffrax.DirectAdjoint(),  # supports Hessians
            max_steps=STEPS_A_YEAR * years,
        )
        return solution.ys

    def model(y: Any) -> None:
        middle, width = jnp.array([1, 0.05, 1, 0.05]), jnp.array([0.5, 0.05, 0.5, 0.05])
        rates = numpyro.sample("rates", dist.TruncatedNormal(middle, width, low=0.0).to_event(1))
        first = dist.LogNormal(jnp.log(10), 1).expand([2]).to_event(1)
        first = numpyro.sample("first", first)
        sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1).expand([2]).to_event(1))
        log_z = path(jnp.log(first), rates, len(y))
        numpyro.sample("y", dist.LogNormal(log_z, sigma).to_event(2), obs=y)

    scalars = scalars_of(logs=("rates", "first", "sigma"))
    pelts = singles(np.column_stack([hare, lynx]))
    return P.Posterior("Lotka-Volterra", model, pelts, None, scalars)


def layers(widths: list[int]) -> tuple[Callable, Callable]:
    """A tanh network: samples its weights, with variance 1 / inputs; and computes its values."""
    shapes = {f"w{k}": shape for k, shape in enumerate(zip(widths, widths[1:], strict=False))}
    shapes |= {f"b{k}": (width,) for k, width in enumerate(widths[1:])}

    def weights() -> dict[str, Any]:
        return {
            name: numpyro.sample(
                name,
                dist.Normal(0, shape[0] ** -0.5 if name[0] == "w" else 1).expand(shape).to_event(),
            )
            for name, shape in shapes.items()
        }

    def values(draw: dict[str, Any], x: Any) -> Any:
        for k in range(len(widths) - 1):
            x = x @ draw[f"w{k}"] + draw[f"b{k}"]
            x = jnp.tanh(x) if k < len(widths) - 2 else x
        return x[..., 0]

    return weights, values


def network(widths: tuple[int, ...] = (5, 5), num_rows: int = 100) -> P.Posterior:
    """A tanh network for regression with unknown noise; its values at five inputs are compared."""
    rng = np.random.default_rng(18)
    x = np.sort(rng.uniform(-1, 1, num_rows))[:, None]
    y = np.sin(4 * x[:, 0]) + 0.2 * rng.normal(size=num_rows)
    weights, values = layers([1, *widths, 1])

    def model(x: Any, y: Any) -> None:
        draw = weights()
        precision = numpyro.sample("precision", dist.Gamma(3, 0.2))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(values(draw, x[i]), precision**-0.5), obs=y[i])

    def scalars(draws: dict[str, Any]) -> Any:
        fn = jax.vmap(jax.vmap(lambda draw: values(draw, SCHEDULE[:, None])))
        found = fn({name: x for name, x in draws.items() if name[1:].isdigit()})
        return jnp.concatenate([jnp.log(draws["precision"])[..., None], found], -1)

    name = f"network 1-{'-'.join(map(str, widths))}-1, {num_rows} rows"
    return P.Posterior(name, model, singles(x, y), None, scalars)


MODELS: dict[str, Callable[[], P.Posterior]] = {
    "ar2": autoregressive,
    "zip": zero_inflated,
    "schools": lambda: S.eight_schools(False),
    "schools-centred": lambda: S.eight_schools(True),
    "baseball": baseball,
    "mortality": mortality,
    "gp": gaussian_process,
    "horseshoe": horseshoe,
    "sparse": sparse,
    "volatility": volatility,
    "network": network,
    "lotka-volterra": predator_prey,
}

REFERENCES: dict[str, Callable[[], dict[str, np.ndarray]]] = {"baseball": baseball_draws}
"""Draws by site, shape (chains, draws, ...), of models that do not need NUTS."""
