"""A user's own kernel and metric, as in docs/extending.md; takes a few seconds."""

# --8<-- [start:imports]
import dataclasses

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import MCMC

from numpyro_geom import SGHMC, Metric, SGKernel
from numpyro_geom.sampling.algorithm import langevin_algorithm
from numpyro_geom.sampling.settings import positive
from numpyro_geom.sampling.state import Chain, StepReport

# --8<-- [end:imports]


# --8<-- [start:kernel]
class ClippedSGLD(SGKernel):
    """Langevin dynamics with the length of the gradient clipped at ``most``."""

    def __init__(self, model=None, *, potential_fn=None, most=1e3, step_size="auto",
                 batch_size=None, num_steps="auto", temperature=1.0):  # fmt: skip
        super().__init__(locals(), {"most": positive})

    def algorithm(self, settings):
        """The Langevin algorithm with another step."""

        def step(rng_key, potential, batch, chain, h, tau, learning):
            z = chain.position
            grad = jax.grad(potential.energy)(z, batch)
            leaves, treedef = jax.tree.flatten(grad)
            length = jnp.sqrt(sum(jnp.vdot(g, g) for g in leaves))
            cut = jnp.minimum(1.0, settings.most / length)
            keys = jax.tree.unflatten(treedef, list(random.split(rng_key, len(leaves))))
            z = jax.tree.map(
                lambda x, g, key: (
                    x - h * cut * g + jnp.sqrt(2 * h * tau) * random.normal(key, x.shape, x.dtype)
                ),
                z,
                grad,
                keys,
            )
            report = StepReport(grad, squared_drift=h * (cut * length) ** 2 / 2)
            return Chain(z, chain.metric_state, ()), report

        return langevin_algorithm(settings, step)


# --8<-- [end:kernel]


# --8<-- [start:metric]
@dataclasses.dataclass(frozen=True)
class MeanMagnitude(Metric):
    """A = 1 / (V + eps), with V the moving average of the gradient's magnitude."""

    decay: float = 0.99
    eps: float = 1e-4

    def statistic(self, grad):
        """The increment of V."""
        return jax.tree.map(jnp.abs, grad)

    def apply_inverse(self, state, vector):
        """A x."""
        return jax.tree.map(lambda v, x: x / (v + self.eps), state.statistic, vector)

    def apply_inverse_sqrt(self, state, vector):
        """A^{1/2} x."""
        return jax.tree.map(lambda v, x: x / jnp.sqrt(v + self.eps), state.statistic, vector)


# --8<-- [end:metric]


# --8<-- [start:use]
def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


y = 3 + jax.random.normal(jax.random.key(0), (100,))
spreads = {}
for kernel in (ClippedSGLD(model), SGHMC(model, metric=MeanMagnitude())):
    mcmc = MCMC(kernel, num_warmup=200, num_samples=2000, progress_bar=False)
    mcmc.run(jax.random.key(1), y)
    spreads[type(kernel).__name__] = float(mcmc.get_samples()["mu"].std())

print(spreads)
# --8<-- [end:use]
