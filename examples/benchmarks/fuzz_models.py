"""Random models whose posterior a quadrature knows, and random settings of kernels and guides.

A model has one to three blocks. A block is a latent site of a random family and shape, and rows of
data in one of one or two plates, with a mask, a scale, groups, or a nested plate. Blocks are
independent, so that each parameter has a posterior in at most two dimensions. Some blocks have
rows that lean on each other, or values of a wrong number of axes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.distributions.transforms import OrderedTransform
from numpyro.infer import MCMC

import numpyro_geom as ng
from numpyro_geom.diagnostics import SamplingWarning

ERRORS = 5.0
"""Standard errors that an estimate may be off: once in two million estimates by chance."""
LEAST_ESS = 50
"""Effective draws below which a run is too short to be compared."""
ROWS = {"rows": 60, "others": 40}
GROUPS = 3


class Family(NamedTuple):
    """A latent site and its data.

    Attributes:
        prior: of one parameter.
        likelihood: of a row, given the parameter.
        dim: dimensions of the unconstrained parameter.
    """

    prior: Callable[[], Any]
    likelihood: Callable[[Any], Any]
    dim: int = 1


def ordered() -> Any:
    return dist.TransformedDistribution(
        dist.Normal(0, 1).expand([2]).to_event(1), OrderedTransform()
    )


FAMILIES = {
    "normal": Family(lambda: dist.Normal(0.5, 2.0), lambda x: dist.Normal(x, 1.5)),
    "t": Family(lambda: dist.Normal(0.0, 1.0), lambda x: dist.StudentT(4.0, x, 1.0)),
    "logit": Family(lambda: dist.Normal(0.0, 1.0), lambda x: dist.Bernoulli(logits=x)),
    "rate": Family(lambda: dist.Gamma(2.0, 1.0), dist.Poisson),
    "heavy": Family(lambda: dist.HalfCauchy(1.0), dist.Poisson),
    "time": Family(lambda: dist.LogNormal(0.0, 0.5), dist.Exponential),
    "scale": Family(lambda: dist.HalfNormal(2.0), lambda x: dist.Normal(0.0, x)),
    "probability": Family(lambda: dist.Beta(2.0, 3.0), lambda x: dist.Bernoulli(probs=x)),
    "interval": Family(lambda: dist.Uniform(-1.0, 2.0), lambda x: dist.Normal(x, 2.0)),
    "truncated": Family(lambda: dist.TruncatedNormal(0.0, 1.0, low=-0.5), dist.Laplace),
    "simplex": Family(
        lambda: dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])), lambda x: dist.Categorical(probs=x), 2
    ),
    "correlation": Family(
        lambda: dist.LKJCholesky(2, 2.0),
        lambda x: dist.MultivariateNormal(jnp.zeros(2), scale_tril=x),
    ),
    "ordered": Family(ordered, lambda x: dist.OrderedLogistic(0.0, x), 2),
}  # fmt: skip
SHAPES = {
    "one": (),
    "vector": (3,),
    "matrix": (2, 2),
    "groups": (GROUPS,),
    "nested": (),
    "local": (),
    "cox": (),
}
LEANS: dict[str, Callable[[Any], Any]] = {
    "by the largest": lambda weight: weight / weight.max(),
    "cumulative": lambda weight: weight.cumsum() / weight.sum(),
}
"""Weights of rows that depend on the other rows that are drawn."""
AXES = ("axis of the values", "axis of the law")
"""Blocks whose values, or whose law of a row, have an axis too many."""


def partial_likelihood(x: Any, covariate: Any) -> Any:
    """Terms of Cox's partial likelihood of rows in the order of falling times."""
    return x * covariate - jax.lax.cumlogsumexp(x * covariate)


@dataclasses.dataclass(frozen=True)
class Block:
    """A latent site with its data.

    Attributes:
        name: of the site.
        family: a name in `FAMILIES`.
        shape: a name in `SHAPES`: one parameter; several as an event; one for each group of rows;
            one with data in a nested plate; one with a normal latent value for each row; or one
            with Cox's partial likelihood.
        plate: a name in `ROWS`.
        mask: whether some data are masked out.
        scale: what the data's log-likelihood is multiplied by; None for a weight for each row.
        fault: a name in `LEANS` or `AXES`, or none.
    """

    name: str
    family: str
    shape: str
    plate: str
    mask: bool
    scale: float | None
    fault: str = ""

    def data(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Random data, with parameters from the prior."""
        family, rows = FAMILIES[self.family], ROWS[self.plate]
        columns = {"nested": (4,), "vector": (3,), "matrix": (2, 2)}.get(self.shape, ())
        group = rng.integers(0, GROUPS, rows)
        key, key_y = jax.random.split(jax.random.key(int(rng.integers(2**31))))
        batch = (rows, *columns)

        @jax.jit
        def sample() -> jax.Array:
            x = family.prior().sample(key, SHAPES[self.shape])
            x = x[group] if self.shape == "groups" else x
            of_x = dist.Normal(x, 2**0.5) if self.shape == "local" else family.likelihood(x)
            of_x = dist.Normal(0, 1) if self.shape == "cox" else of_x
            return of_x.sample(key_y, batch[: len(batch) - len(of_x.batch_shape)])

        y = sample()
        mask = rng.random(y.shape[: len(batch) if self.shape == "nested" else 1]) < 0.8
        weight = rng.uniform(0.5, 2.0, rows).astype(np.float32)
        return {"y": np.asarray(y), "group": group, "mask": mask, "weight": weight}

    def latent(self) -> Any:
        """Sample the site."""
        prior, shape = FAMILIES[self.family].prior(), SHAPES[self.shape]
        if self.shape == "groups":
            with numpyro.plate(f"{self.name} groups", GROUPS):
                return numpyro.sample(self.name, prior)
        return numpyro.sample(self.name, prior.expand(shape).to_event(len(shape)))

    def observe(self, x: Any, data: dict[str, Any], i: Any) -> None:
        """Observe the rows of the plate."""
        y, mask = data["y"][i], data["mask"][i]
        if self.shape == "local":
            x = numpyro.sample(f"{self.name} local", dist.Normal(x, 1))
            of_x = dist.Normal(x, 1)
        else:
            of_x = FAMILIES[self.family].likelihood(
                x[data["group"][i]] if self.shape == "groups" else x
            )
        if self.shape in ("vector", "matrix"):
            of_x = of_x.to_event(len(SHAPES[self.shape]))
        if self.shape == "cox":
            numpyro.factor(f"{self.name} y", mask * partial_likelihood(x, y))
            return
        weight = data["weight"][i] if self.scale is None else self.scale
        if self.fault in LEANS:
            weight = LEANS[self.fault](data["weight"][i])
        elif self.fault == "axis of the values":
            y = y[:, None]
        elif self.fault == "axis of the law":
            of_x = of_x.expand((len(y), *(of_x.batch_shape or (1,))))
        inner = numpyro.plate(f"{self.name} columns", 4, dim=-1) if self.shape == "nested" else None
        if inner is not None and np.ndim(weight):
            weight = weight[:, None]
        with inner or contextlib.nullcontext(), handlers.scale(scale=weight):
            of_x = of_x.mask(mask) if self.mask else of_x
            numpyro.sample(f"{self.name} y", of_x, obs=y)

    def posterior(self, data: dict[str, np.ndarray], temperature: float) -> list[np.ndarray]:
        """Mean, sd and fourth central moment over sd^4 of each entry of the site, by quadrature."""
        y = data["y"]
        rows = len(y)
        weight = data["weight"] if self.scale is None else np.full(rows, self.scale)
        weight = LEANS[self.fault](data["weight"]) if self.fault in LEANS else weight
        mask = data["mask"] if self.mask or self.shape == "cox" else np.ones(data["mask"].shape)
        weight = mask * weight.reshape((rows,) + (1,) * (mask.ndim - 1))
        if self.shape == "groups":
            parts = [(y[data["group"] == g], weight[data["group"] == g]) for g in range(GROUPS)]
        elif self.shape in ("vector", "matrix"):
            flat = y.reshape(
                (rows, int(np.prod(SHAPES[self.shape])), *y.shape[1 + len(SHAPES[self.shape]) :])
            )
            parts = [(flat[:, k], weight) for k in range(flat.shape[1])]
        else:
            parts = [(y.reshape((weight.size, *y.shape[weight.ndim :])), weight.reshape(-1))]
        moments = [quadrature(self.family, *part, temperature, self.shape) for part in parts]
        return [
            np.stack(m).reshape((*SHAPES[self.shape], *m[0].shape))
            for m in zip(*moments, strict=True)
        ]


def quadrature(family: str, y: Any, weight: Any, temperature: float, shape: str) -> tuple:
    """Moments of one parameter under exp(-U / temperature), U on the unconstrained space."""
    prior, likelihood, dim = FAMILIES[family]
    if shape == "local":
        likelihood = lambda x: dist.Normal(x, 2**0.5)  # noqa: E731
    with jax.enable_x64(True):
        axis = jnp.linspace(-15, 15, 6001) if dim == 1 else jnp.linspace(-10, 10, 401)
        grid = jnp.stack(jnp.meshgrid(*[axis] * dim), -1).reshape(-1, dim)
        d = prior()
        to = dist.biject_to(d.support)
        y, weight = jnp.asarray(y), jnp.asarray(weight)

        def of_point(u: jax.Array) -> tuple[jax.Array, jax.Array]:
            u = u if to.domain.event_dim else u[0]
            x = to(u)
            energy = d.log_prob(x) + to.log_abs_det_jacobian(u, x)
            terms = partial_likelihood(x, y) if shape == "cox" else likelihood(x).log_prob(y)
            return energy + jnp.sum(weight * terms), x

        log_p, x = jax.lax.map(of_point, grid, batch_size=2000)
        p = jax.nn.softmax(jnp.where(jnp.isfinite(log_p), log_p, -jnp.inf) / temperature)
        p = p.reshape((-1,) + (1,) * (x.ndim - 1))
        mean = jnp.sum(p * x, 0)
        variance = jnp.sum(p * (x - mean) ** 2, 0)
        fourth = jnp.sum(p * (x - mean) ** 4, 0)
        return tuple(np.asarray(m) for m in (mean, variance**0.5, fourth / variance**2))


BIASED = {"ISGD", "AdamSGLD", "VSGD"}
"""Kernels whose law is not the posterior; only that their draws are finite is asked of them."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and a run.

    Attributes:
        blocks: of the model.
        kernel: name of a kernel or guide.
        settings: code of each setting, by name.
        chain_method: as for `MCMC`.
        x64: whether to run in 64 bits.
        seed: of data and chains.
    """

    blocks: tuple[Block, ...]
    kernel: str
    settings: tuple[tuple[str, str], ...]
    chain_method: str
    x64: bool
    seed: int

    def model(self, data: dict[str, dict]) -> None:
        """The model."""
        latent = {block.name: block.latent() for block in self.blocks}
        for plate in dict.fromkeys(block.plate for block in self.blocks):
            own = [block for block in self.blocks if block.plate == plate]
            dim = -2 if own[0].shape == "nested" else -1
            with numpyro.plate(plate, ROWS[plate], dim=dim) as i:
                for block in own:
                    block.observe(latent[block.name], data[block.name], i)

    def __call__(self) -> str:
        """Run it; returns what is wrong with the draws."""
        rng = np.random.default_rng(self.seed)
        data = {block.name: block.data(rng) for block in self.blocks}
        settings = {name: eval(code, {"ng": ng}) for name, code in self.settings}
        temperature = settings.get("temperature", 1.0)
        with jax.enable_x64(self.x64):
            draws, mcmc, report = self.draws(data, settings)
        problem = ""
        for block in self.blocks:
            drawn = mcmc is not None and block.plate in mcmc.sampler.plan.batch_sizes
            leans = block.shape == "cox" or block.fault in LEANS
            if block.fault in AXES or (leans and drawn):
                fault = block.fault or block.shape
                return f"{block.name}: rows that are no terms of a sum ({fault})"
            found = np.asarray(draws[block.name], np.float64)
            if not np.isfinite(found).all():
                return f"{block.name}: draws that are not finite"
            if self.is_exact_law(settings):
                moments = block.posterior(data[block.name], temperature)
                problem = problem or self.difference(block.name, found, *moments)
        with jax.enable_x64(self.x64):
            for check in report().flagged if problem else ():
                warnings.warn(SamplingWarning(f"diagnose: {check.sentence}"), stacklevel=1)
        return problem

    def is_exact_law(self, settings: dict[str, Any]) -> bool:
        """Whether the law of the draws should be the tempered posterior, up to a small bias."""
        if settings.get("temperature") == 0:
            return False
        return self.kernel not in BIASED and settings.get("gamma") not in ("none", "published")

    def draws(
        self, data: Any, settings: dict[str, Any]
    ) -> tuple[dict, MCMC | None, Callable[[], ng.diagnostics.Report]]:
        """Draws by site, shaped (chains, draws, ...), their run, and what tells of them."""
        kernel = getattr(ng, self.kernel)(self.model, **settings)
        key = jax.random.key(self.seed)
        if self.kernel == "RiemannianLaplace":
            params = kernel.fit(key, data)
            found = kernel.draw(key, params, data, sample_shape=(2, 500), progress_bar=False)
            report = lambda: ng.diagnose(ng.to_inference_data(found, gradients=True))  # noqa: E731
            return found.samples, None, report
        mcmc = MCMC(
            kernel, num_warmup=300, num_samples=400, num_chains=2, progress_bar=False,
            chain_method=self.chain_method,
        )  # fmt: skip
        mcmc.run(key, data)
        return mcmc.get_samples(group_by_chain=True), mcmc, lambda: ng.diagnose(mcmc)

    def difference(self, name: str, x: np.ndarray, mean: Any, sd: Any, kurtosis: Any) -> str:
        """Where moments differ from the exact ones by more than the errors allow."""
        moving = sd > 1e-9  # zeros and ones of a Cholesky factor are constant
        x, mean, sd, kurtosis = x[..., moving], mean[moving], sd[moving], kurtosis[moving]
        z = (x - mean) / sd
        ess, ess_square = effective_sample_size(z), effective_sample_size(z**2)
        shift, spread = np.abs(z.mean((0, 1))), np.abs((z**2).mean((0, 1)) - 1)
        if min(ess.min(), ess_square.min()) < LEAST_ESS:
            return (
                f"{name}: an effective sample size of {min(ess.min(), ess_square.min()):.0f}, a "
                f"mean is off by {shift.max():.2f}, a variance by {spread.max():.2f}"
            )
        settings = dict(self.settings)
        exact = self.kernel in ("GGMC", "RiemannianLaplace") or settings.get("adjusted") == "True"
        bias = 0.0 if exact else 0.1  # bias_tolerance, of variances: half of it for each sd
        allowed = ERRORS / ess**0.5 + bias, ERRORS * ((kurtosis - 1) / ess_square) ** 0.5 + 2 * bias
        for what, value, most in (("mean", shift, allowed[0]), ("variance", spread, allowed[1])):
            worst = np.argmax(value - most)
            if value.flat[worst] > most.flat[worst]:
                off, allowed_off = value.flat[worst], most.flat[worst]
                return f"{name}: {what} is off by {off:.2f}, allowed {allowed_off:.2f}"
        return ""


METRICS = (
    "'identity'", "'rmsprop'", "'wenzel'", "'monge'", "'shampoo'", "ng.Monge(alpha2=1.0)",
    "{'*': 'rmsprop'}", "ng.Shampoo(vector='full')", "ng.Scaled(0.5)",
)  # fmt: skip
SETTINGS: dict[str, tuple[float, tuple[str, ...]]] = {
    "metric": (0.4, METRICS),
    "gamma": (0.3, ("'frozen'", "'auxiliary'", "'corrected'", "'none'", "'published'")),
    "batch_size": (0.5, ("None", "1", "10", "1000", "'auto'",
                         "{'rows': 60}", "{'rows': 20, 'others': 10}")),
    "batching": (0.4, ("'replacement'", "'stratified'", "'epoch'")),
    "num_steps": (0.3, ("1", "3", "20")),
    "step_size": (0.1, ("0.01", "ng.cyclical(0.1, 10)", "ng.polynomial(0.1, 0.01, 0.5)")),
    "temperature": (0.2, ("0.5", "2.0", "0.0")),
    "control_variate": (0.5, ("True", "False", "'auto'")),
    "anchor_interval": (0.1, ("1", "50")),
    "adjusted": (0.15, ("True",)),
    "dense_mass": (0.3, ("True", "False", "None")),
    "adapt_mass_matrix": (0.1, ("False",)),
    "expansion": (0.15, ("ng.Expansion()", "ng.Expansion(left=0, rank=1)",
                         "ng.Expansion(right=2)")),
    "integrator": (0.2, ("'euler'", "'baoab'", "'badodab'")),
    "friction": (0.2, ("0.1", "3.0")),
    "max_norm": (0.05, ("1000.0",)),
    "target_accept": (0.2, ("0.65", "0.95")),
    "mode": (0.3, ("'euclidean'", "'hausdorff'", "'mean'")),
    "solver": (0.3, ("'cg'", "'cholesky'")),
    "preconditioner": (0.5, ("'diagonal'",)),
}  # fmt: skip
"""Probability that a setting is given, and code of its values."""
GUIDE_METRICS = ("'euclidean'", "'monge'", "'monge-log'", "'fisher'")
KERNELS = ("SGRLD", "SGRLD", "SGHMC", "SGHMC", "SGNHT", "GGMC", "GGMC", "PXSGHMC", "ISGD",
           "AdamSGLD", "VSGD", "RiemannianLaplace")  # fmt: skip


@functools.cache
def names_of(kernel: str) -> frozenset[str]:
    """Names of the arguments of a kernel or guide."""
    return frozenset(inspect.signature(getattr(ng, kernel)).parameters)


def random_block(rng: np.random.Generator, number: int) -> Block:
    """A random block."""
    shape = str(rng.choice(list(SHAPES)))
    return Block(
        name=f"x{number}",
        family="normal" if shape in ("local", "cox") else str(rng.choice(list(FAMILIES))),
        shape=shape,
        plate="others" if rng.random() < 0.2 else "rows",
        mask=bool(rng.random() < 0.3),
        scale=1.0
        if shape in ("local", "cox") or rng.random() < 0.6
        else [None, 0.5][rng.integers(2)],
    )


def random_case(rng: np.random.Generator) -> Model:
    """A random case."""
    kernel = str(rng.choice(KERNELS))
    blocks = tuple(random_block(rng, k) for k in range(rng.choice([1, 1, 2, 3])))
    # a plate with a plate in it is at dim=-2, for all of its blocks
    outer = {block.plate for block in blocks if block.shape == "nested"}
    blocks = tuple(
        dataclasses.replace(block, shape="nested") if block.plate in outer else block
        for block in blocks
    )
    given = {
        name: str(rng.choice(values))
        for name, (probability, values) in SETTINGS.items()
        if rng.random() < probability and name in names_of(kernel)
    }
    if rng.random() < 0.75:  # else most runs would be refused
        plates = {block.plate: int(rng.choice([1, 8, 20])) for block in blocks}
        given["batch_size"] = str(plates)
        if kernel not in BIASED and rng.random() < 0.3:
            given.pop("batch_size")
            given.pop("control_variate", None)
    if kernel == "RiemannianLaplace":
        given["metric"] = str(rng.choice(GUIDE_METRICS))
        given.pop("batch_size", None)
    case = Model(
        blocks=blocks,
        kernel=kernel,
        settings=tuple(given.items()),
        chain_method=str(rng.choice([*4 * ["vectorized"], "sequential", "parallel"])),
        x64=bool(rng.random() < 0.15),
        seed=int(rng.integers(2**31)),
    )
    faults = {"cox": (), "local": AXES, "nested": (*LEANS, AXES[0])}
    possible = faults.get(blocks[0].shape, (*LEANS, *AXES))
    if rng.random() < 0.2 and possible:
        first = dataclasses.replace(blocks[0], fault=str(rng.choice(possible)))
        case = dataclasses.replace(case, blocks=(first, *blocks[1:]))
    return case
