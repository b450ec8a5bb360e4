"""Chains and calls (test_mcmc)"""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from methods import KEY, ROUNDING, STILL, Posterior, chains, same
from numpyro.infer.util import initialize_model
from numpyro.util import fori_collect
from targets import count_compilations

pytestmark = pytest.mark.numpyro_situations

Y = jnp.linspace(-1.0, 2.0, 12)


def normal(y: Any = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.deterministic("twice", 2 * mu)
    with numpyro.plate("data", 12 if y is None else y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(mu, sigma), obs=None if y is None else y[i])


def gaussian(z: jax.Array) -> jax.Array:
    return 0.5 * jnp.sum(((z - 1.0) / 0.5) ** 2)


def test_chain_methods(kernel: Any) -> None:
    """Two chains, in sequence, in parallel, vectorized and by a function, have the same draws"""
    found = []
    for method in ("sequential", "parallel", "vectorized", jax.vmap):
        mcmc = chains(kernel.quick(normal), num_chains=2, chain_method=method)
        mcmc.run(KEY, Y)
        found.append(mcmc.get_samples(group_by_chain=True))
        flat = mcmc.get_samples()
        assert found[-1]["mu"].shape == (2, 5)
        np.testing.assert_array_equal(jax.device_get(flat["mu"].reshape(2, 5)), found[-1]["mu"])
    assert np.ptp(found[0]["mu"], axis=0).min() > 0
    for other in found[1:]:
        for name, values in found[0].items():
            np.testing.assert_allclose(other[name], values, rtol=ROUNDING, atol=ROUNDING)


def test_more_chains_than_devices(kernel: Any) -> None:
    """Three parallel chains on two devices run in sequence, with NumPyro's warning"""
    with pytest.warns(UserWarning, match="not enough devices"):
        mcmc = chains(kernel.quick(normal), num_chains=3)
    mcmc.run(KEY, Y)
    assert mcmc.get_samples(group_by_chain=True)["mu"].shape == (3, 5)


def test_init_params(kernel: Any) -> None:
    """`init_params` of one chain and of two are where the chains start"""
    for num_chains in (1, 2):
        start = {"mu": jnp.arange(2.0)[:num_chains], "sigma": jnp.zeros(num_chains)}
        given = {n: x[0] for n, x in start.items()} if num_chains == 1 else start
        settings = {"num_chains": num_chains, "chain_method": "sequential"}
        mcmc = chains(kernel.quick(normal, step_size=STILL), 0, 1, **settings)
        mcmc.run(KEY, Y, init_params=given)
        draws = mcmc.get_samples(group_by_chain=True)
        np.testing.assert_allclose(draws["mu"][:, 0], start["mu"], atol=ROUNDING)
        np.testing.assert_allclose(draws["sigma"][:, 0], 1.0, atol=ROUNDING)


def test_jit_model_args(kernel: Any) -> None:
    """`jit_model_args=True`: new data of the same shape run without compiling"""
    settings = {"num_chains": 2, "chain_method": "vectorized", "jit_model_args": True}
    mcmc = chains(kernel.quick(paths), **settings)
    data = [Y, Y + 100.0, Y - 100.0]
    mcmc.warmup(KEY, z=Y)
    mcmc.run(KEY, z=Y)
    first = mcmc.get_samples()
    mcmc.run(KEY, z=data[1])
    with count_compilations() as compiled:
        mcmc.run(KEY, z=data[2])
        assert compiled() <= 1  # as with NUTS: NumPyro's own, for the constrained draws
    assert not same(mcmc.get_samples(), first)


def test_new_data(kernel: Any) -> None:
    """A second run on data of another shape forgets the first"""
    mcmc = chains(kernel(normal), 300, 300)
    mcmc.run(KEY, 0.3 * Y + 3.0)
    mcmc.run(KEY, 0.3 * Y[:8] - 3.0)
    # the posterior's sd is 0.1, and its mean that of the data up to a hundredth
    np.testing.assert_allclose(mcmc.get_samples()["mu"].mean(), 0.3 * Y[:8].mean() - 3, atol=0.1)


def test_warmup_apart(kernel: Any) -> None:
    """`warmup`, then `run` with the state's key, are one `run`; `collect_warmup` collects"""
    mcmc = chains(kernel.quick(normal), 4, 6)
    mcmc.run(KEY, Y)
    expected = mcmc.get_samples()
    mcmc.warmup(KEY, Y, collect_warmup=True)
    assert mcmc.get_samples()["mu"].shape == (4,)
    assert mcmc.post_warmup_state is not None
    mcmc.run(mcmc.post_warmup_state.rng_key, Y)
    assert same(mcmc.get_samples(), expected)


def test_continue(kernel: Any) -> None:
    """`post_warmup_state = last_state` goes on where a run stopped"""
    mcmc = chains(kernel.quick(normal), 4, 6)
    mcmc.run(KEY, Y)
    expected = mcmc.get_samples()["mu"]
    mcmc = chains(kernel.quick(normal), 4, 3)
    mcmc.run(KEY, Y)
    parts = [mcmc.get_samples()["mu"]]
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, Y)
    parts.append(mcmc.get_samples()["mu"])
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-6)


def test_first_of_several_chains(kernel: Any) -> None:
    """The first of two chains is the chain that its key alone gives"""
    mcmc = chains(kernel.quick(normal), num_chains=2, chain_method="sequential")
    mcmc.run(KEY, Y)
    both = mcmc.get_samples()["mu"]
    mcmc = chains(kernel.quick(normal))
    mcmc.run(random.split(KEY)[0], Y)
    np.testing.assert_allclose(both[:5], mcmc.get_samples()["mu"], rtol=1e-5)


def test_progress_bar(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With the progress bar and without it, draws are the same"""
    for name in ("CI", "PYTEST_XDIST_WORKER"):  # NumPyro switches the bar off under either
        monkeypatch.delenv(name, raising=False)
    found = []
    for shown in (True, False):
        mcmc = chains(kernel.quick(normal), progress_bar=shown)
        mcmc.run(KEY, Y)
        found.append(mcmc.get_samples())
        assert ("steps of size" in capsys.readouterr().err) == shown
    np.testing.assert_allclose(found[0]["mu"], found[1]["mu"], rtol=1e-5)


def test_extra_fields(kernel: Any) -> None:
    """`extra_fields`, nested ones too, come by chain or flat; `~z.x` leaves a site out"""
    mcmc = chains(kernel.quick(normal), num_chains=2, chain_method="sequential")
    mcmc.run(KEY, Y, extra_fields=("num_steps", "adaptation.curvature", "~z.sigma", "~z.twice"))
    assert set(mcmc.get_samples()) == {"mu"}
    by_chain = mcmc.get_extra_fields(group_by_chain=True)
    assert by_chain["adaptation.curvature"].shape == (2, 5)
    np.testing.assert_array_equal(by_chain["num_steps"], 1)
    assert mcmc.get_extra_fields()["diverging"].shape == (10,)


def test_thinning(kernel: Any) -> None:
    """`thinning=2` keeps every second draw"""
    mcmc = chains(kernel.quick(normal), 2, 6)
    mcmc.run(KEY, Y)
    every = mcmc.get_samples()["mu"]
    mcmc = chains(kernel.quick(normal), 2, 6, thinning=2)
    mcmc.run(KEY, Y)
    np.testing.assert_allclose(mcmc.get_samples()["mu"], every[1::2], rtol=1e-6)


def test_summary(kernel: Any, capsys: pytest.CaptureFixture) -> None:
    """`mcmc.print_summary()`, with deterministic sites and without"""
    mcmc = chains(kernel.quick(normal), num_samples=10)
    mcmc.run(KEY, Y)
    mcmc.print_summary()
    without = capsys.readouterr().out
    mcmc.print_summary(exclude_deterministic=False)
    assert "mu" in without
    assert "twice" not in without
    assert "twice" in capsys.readouterr().out


def test_no_warmup(kernel: Any) -> None:
    """`num_warmup=0` with a step size of one's own"""
    mcmc = chains(kernel.quick(normal), 0, 5)
    mcmc.run(KEY, Y)
    assert np.isfinite(mcmc.get_samples()["mu"]).all()
    assert len(np.unique(mcmc.get_samples()["mu"])) > 1


def test_diverging(kernel: Any) -> None:
    """Steps that are far too large are marked in `diverging`, in warm-up too; draws stay finite"""
    mcmc = chains(kernel.quick(normal, step_size=10.0), 10, 10)
    mcmc.warmup(KEY, 0.01 * Y, extra_fields=("diverging",), collect_warmup=True)
    marked = int(mcmc.get_extra_fields()["diverging"].sum())
    mcmc.run(KEY, 0.01 * Y, extra_fields=("diverging",))
    marked += int(mcmc.get_extra_fields()["diverging"].sum())
    adjusted = "accept_prob" in mcmc.get_extra_fields()  # a rejection is no divergence
    assert marked > 0 or (adjusted and mcmc.get_extra_fields()["accept_prob"].mean() < 0.5)
    assert np.isfinite(mcmc.get_samples()["mu"]).all()


def test_fixed_num_steps(kernel: Any) -> None:
    """A number of steps per draw that the user sets"""
    mcmc = chains(kernel.quick(normal, num_steps=5))
    mcmc.run(KEY, Y, extra_fields=("num_steps",))
    np.testing.assert_array_equal(mcmc.get_extra_fields()["num_steps"], 5)


def test_legacy_keys(kernel: Any) -> None:
    """`jax.random.PRNGKey(0)` gives the draws of `jax.random.key(0)`"""
    found = []
    for key in (random.PRNGKey(0), random.key(0)):
        mcmc = chains(kernel.quick(normal))
        mcmc.run(key, Y)
        found.append(mcmc.get_samples())
    assert same(*found)


def test_pickle(kernel: Any) -> None:
    """A pickled `MCMC` has its draws, and goes on as the original does"""
    mcmc = chains(kernel.quick(normal))
    mcmc.run(KEY, Y)
    copy = pickle.loads(pickle.dumps(mcmc))
    assert same(copy.get_samples(), mcmc.get_samples())
    for either in (mcmc, copy):
        either.post_warmup_state = either.last_state
        either.run(KEY, Y)
    assert same(copy.get_samples(), mcmc.get_samples())


def test_postprocess_fn(kernel: Any) -> None:
    """A `postprocess_fn` of one's own, a host copy of the states, and `jax.tree` over the draws"""
    mcmc = chains(kernel.quick(normal), postprocess_fn=lambda z: {"minus": -z["mu"]})
    mcmc.run(KEY, Y)
    mcmc.transfer_states_to_host()
    draws = jax.tree.map(np.asarray, mcmc.get_samples())
    np.testing.assert_array_equal(draws["minus"][-1], -mcmc.last_state.z["mu"])


def test_functional(kernel: Any) -> None:
    """`initialize_model`'s potential and start, with `init` and `sample` in `fori_collect`"""
    info = initialize_model(KEY, normal, model_args=(Y,))
    made = kernel.quick(potential_fn=info.potential_fn)
    state = made.init(KEY, 2, info.param_info.z, (), {})
    draws = fori_collect(
        *(2, 6, lambda s: made.sample(s, (), {}), state),
        transform=lambda s: info.postprocess_fn(s.z),
        progbar=False,
    )
    assert draws["twice"].shape == (4,)
    np.testing.assert_allclose(draws["twice"], 2 * draws["mu"], rtol=1e-6)
    assert (draws["sigma"] > 0).all()


def test_mapped(kernel: Any) -> None:
    """`init` and `sample` of a potential under `vmap` and `pmap`"""
    made = kernel.quick(potential_fn=gaussian)
    starts, keys = jnp.array([0.0, -1.0]), random.split(KEY, 2)
    found = []
    for mapped in (jax.vmap, jax.pmap):
        states = mapped(lambda z, key: made.init(key, 0, z, (), {}))(starts, keys)
        for _ in range(2):
            states = mapped(lambda s: made.sample(s, (), {}))(states)
        found.append(states.z)
    assert (found[0] != starts).all()
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_run_in_jit(kernel: Any) -> None:
    """A whole run inside `jax.jit`, data traced"""

    @jax.jit
    def draws(key: jax.Array, y: jax.Array) -> dict:
        mcmc = chains(kernel.quick(normal), num_chains=2, chain_method="vectorized")
        mcmc.run(key, y)
        return mcmc.get_samples()

    mcmc = chains(kernel.quick(normal), num_chains=2, chain_method="vectorized")
    mcmc.run(KEY, Y)
    np.testing.assert_allclose(draws(KEY, Y)["mu"], mcmc.get_samples()["mu"], rtol=ROUNDING)


def test_traced_step_size(kernel: Any) -> None:
    """A `step_size` that is traced"""

    @jax.jit
    def draws(step_size: jax.Array) -> dict:
        mcmc = chains(kernel.quick(normal, step_size=step_size))
        mcmc.run(KEY, Y)
        return mcmc.get_samples()

    assert np.isfinite(draws(0.01)["mu"]).all()


def test_empty_model(kernel: Any) -> None:
    """A model without any site: a run without draws"""
    mcmc = chains(kernel.quick(lambda: None))
    with pytest.warns(UserWarning, match="no free parameter"):
        mcmc.run(KEY)
    assert mcmc.get_samples() == {}


def paths(a: Any = None, b: Any = None, z: Any = None) -> None:
    mean = numpyro.sample("a", dist.Normal(0, 1))
    if a is not None:
        mean = mean + a * numpyro.sample("x", dist.HalfNormal(0.5))
    if b is not None:
        mean = mean + b * numpyro.sample("y", dist.HalfNormal(0.5))
    numpyro.sample("obs", dist.Normal(mean, 1), obs=z)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit_model_args"])
def test_execution_paths(kernel: Any, jit: bool) -> None:
    """Arguments that are None or not decide which sites a model has, run after run"""
    mcmc = chains(kernel.quick(paths), jit_model_args=jit)
    x, z = np.arange(10.0), np.linspace(-1, 1, 10)
    mcmc.run(KEY, x, b=None, z=z)
    assert set(mcmc.get_samples()) == {"a", "x"}
    mcmc.run(KEY, a=None, b=x, z=z)
    assert set(mcmc.get_samples()) == {"a", "y"}
    mcmc.run(KEY, a=x, b=x, z=z)
    assert set(mcmc.get_samples()) == {"a", "x", "y"}


def test_potential(kernel: Any) -> None:
    """A potential of an array without shape, and its Gaussian law"""
    mcmc = chains(kernel(potential_fn=gaussian), 500, 2000)
    mcmc.run(KEY, init_params=jnp.array(0.0))
    mcmc.print_summary()
    Posterior({"z": mcmc.get_samples(group_by_chain=True)}).check("z", 1.0, 0.5)


COVARIANCE = np.array([[2.0, 1.2, 0.0], [1.2, 1.0, -0.3], [0.0, -0.3, 0.5]])
PRECISION = jnp.asarray(np.linalg.inv(COVARIANCE))


def test_dense_mass(kernel: Any) -> None:
    """A correlated Gaussian with `dense_mass=True`"""
    mcmc = chains(kernel(potential_fn=lambda z: z @ PRECISION @ z / 2, dense_mass=True), 500, 2000)
    mcmc.run(KEY, init_params=jnp.zeros(3))
    draws = mcmc.get_samples(group_by_chain=True)
    Posterior({"z": draws}).check("z", 0.0, np.sqrt(np.diag(COVARIANCE)))
    np.testing.assert_allclose(
        np.corrcoef(draws[0].T)[0, 1], 1.2 / np.sqrt(2.0), atol=0.05
    )  # at 200 effective draws the sd is 0.02


def wxyz() -> None:
    parts = [numpyro.sample(n, dist.Normal(0, 9).expand([k]).to_event(1)) for n, k in SIZES]
    numpyro.sample("obs", dist.Normal(jnp.concatenate(parts), 1).to_event(1), obs=jnp.zeros(5))


SIZES = (("w", 2), ("x", 1), ("y", 1), ("z", 1))


def test_dense_mass_blocks(kernel: Any) -> None:
    """`dense_mass` as blocks of sites, in any order, and no warm-up"""
    for blocks in ([("w",), ("y", "x")], [("z",)]):
        made = kernel(wxyz, dense_mass=blocks, step_size=0.1, num_steps=1, control_variate=False)
        mcmc = chains(made, 0, 1)
        mcmc.run(KEY)
        assert mcmc.get_samples()["w"].shape == (1, 2)


def test_inverse_mass_matrix(kernel: Any) -> None:
    """`inverse_mass_matrix` as an array and as a dict, which `adapt_mass_matrix=False` keeps"""
    given = jnp.arange(1.0, 6.0)
    for dense, matrix in ((False, given), (True, given), ([("w",)], {("w",): given[:2]})):
        settings = {"inverse_mass_matrix": matrix, "dense_mass": dense, "adapt_mass_matrix": False}
        settings |= {"step_size": 1e-9, "num_steps": 1, "control_variate": False}
        mcmc = chains(kernel(wxyz, **settings), 2, 1)
        mcmc.run(KEY)
        assert np.isfinite(mcmc.get_samples()["w"]).all()


def test_x64(kernel: Any) -> None:
    """A run in 64-bit mode is in float64, and one before it is in float32"""
    mcmc = chains(kernel.quick(normal))
    mcmc.run(KEY, Y)
    assert mcmc.get_samples()["mu"].dtype == jnp.float32
    with jax.enable_x64(True):
        mcmc = chains(kernel.quick(normal))
        mcmc.run(KEY, np.linspace(-1.0, 2.0, 12))
        assert {x.dtype for x in mcmc.get_samples().values()} == {jnp.dtype("float64")}
        assert mcmc.last_state.potential_energy.dtype == jnp.float64


def test_hooks(kernel: Any) -> None:
    """The hooks of composite kernels: `refresh`, `get_constrain_fn`, `wrap_model`"""
    made = kernel.quick(normal)
    state = made.init(KEY, 2, None, (Y,), {})
    refreshed = made.refresh(state, (Y + 5.0,), {})
    assert same(refreshed.z, state.z)
    assert refreshed.potential_energy > state.potential_energy
    values = made.get_constrain_fn((Y,), {})(state.z)
    assert set(values) == {"mu", "sigma", "twice"}
    seen: list = []

    def wrapper(model: Any) -> Any:
        return lambda *args: (seen.append(1), model(*args))[1]

    wrapped = made.wrap_model(wrapper)
    wrapped.init(KEY, 2, None, (Y,), {})
    assert seen
    assert made.model == normal


def test_validation(kernel: Any) -> None:
    """With `numpyro.enable_validation` a good model runs and a value out of its support raises"""
    with numpyro.validation_enabled():
        kernel.draws(normal, Y)

        def bad(y: Any) -> None:
            rate = numpyro.sample("rate", dist.HalfNormal(1))
            numpyro.sample("y", dist.Exponential(rate), obs=y)

        with pytest.raises(ValueError, match="'y' are outside of the support .* in rows"):
            kernel.draws(bad, Y)
