"""`Model`: a model with its arguments, read once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer.util import log_density, potential_energy

from numpyro_geom import SGRLD
from numpyro_geom.bound import bind
from numpyro_geom.model import Model, read
from numpyro_geom.model import start as starts
from numpyro_geom.model.arguments import HostArray

N = 40
X = np.asarray(random.normal(random.key(0), (N, 2)), np.float32)
Y = np.asarray(X @ np.array([1.0, -1.0]), np.float32)


def regression(X: Any, y: Any = None) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    numpyro.deterministic("norm", jnp.linalg.norm(w))
    numpyro.factor("ridge", -jnp.sum(w**2))
    with numpyro.plate("data", X.shape[0]) as i:
        obs = None if y is None else y[i]
        numpyro.sample("y", dist.Normal(X[i] @ w, s), obs=obs)


POSITION = {"w": jnp.array([0.5, -0.5]), "s": jnp.array(0.2)}


@pytest.fixture(scope="module")
def model() -> Model:
    return read(regression, (X,), {"y": Y}, batch_size=10)


def test_sites_of_all_kinds(model: Model) -> None:
    kinds = {name: site.kind for name, site in model.sites.items()}
    assert kinds == {
        "w": "latent", "s": "latent", "norm": "deterministic", "ridge": "factor", "y": "observed"
    }  # fmt: skip
    assert model.sites["y"].shape == (N,)
    assert model.sites["y"].plates == (("data", -1),)
    assert model.sites["w"].event_dim == 1
    assert model.of_kind("latent", "observed") == ["w", "s", "y"]
    assert dict(model.plan.batch_sizes) == {"data": 10}
    assert model.plan.num_data == N


def test_the_energy_is_numpyros(model: Model) -> None:
    expected = potential_energy(regression, (jnp.asarray(X), jnp.asarray(Y)), {}, POSITION)
    np.testing.assert_allclose(model.energy(POSITION), expected, rtol=1e-6)
    summed = model.sum_over_rows(lambda rows: model.energy(POSITION, rows))
    np.testing.assert_allclose(summed, expected, rtol=1e-5)


def test_energies_of_rows_add_up_to_the_part_of_the_plate(model: Model) -> None:
    rows = {"data": jnp.arange(N)}
    each = model.row_energies(POSITION, "data", rows)
    values = model.constrain(POSITION)
    told = model.log_prob(values, rows, ["y"])["y"]
    assert each.shape == (N,)
    np.testing.assert_allclose(each, -told, rtol=1e-5)


def test_log_densities_on_some_rows_are_those_of_all_rows(model: Model) -> None:
    values = model.constrain(POSITION)
    every = model.log_prob(values, {}, ["y", "ridge"])
    some = model.log_prob(values, {"data": jnp.array([3, 30])}, ["y"])
    np.testing.assert_allclose(some["y"], every["y"][np.array([3, 30])], rtol=1e-6)
    np.testing.assert_allclose(every["ridge"], -0.5, rtol=1e-6)


def test_the_two_spaces(model: Model) -> None:
    values = model.constrain(POSITION)
    np.testing.assert_allclose(values["s"], np.exp(0.2), rtol=1e-6)
    np.testing.assert_allclose(values["norm"], 0.5**0.5, rtol=1e-6)
    back = model.unconstrain({name: values[name] for name in POSITION})
    for name, x in POSITION.items():
        np.testing.assert_allclose(back[name], x, rtol=1e-5)


def test_a_trace_at_a_position_and_one_at_values_agree(model: Model) -> None:
    by_position = model.trace(POSITION, unconstrained=True)
    by_values = model.trace(model.constrain(POSITION))
    for name in ("w", "s", "y", "norm"):
        np.testing.assert_allclose(by_position[name]["value"], by_values[name]["value"], rtol=1e-6)


def test_sites_without_values_are_drawn_with_a_key(model: Model) -> None:
    with pytest.raises(AssertionError):  # by NumPyro, for want of a key
        model.trace({"w": POSITION["w"]})
    drawn = [model.trace({}, rng_key=random.key(k), redraw=True)["y"]["value"] for k in (0, 1)]
    assert drawn[0].shape == (N,)
    assert not np.allclose(drawn[0], drawn[1])
    given = model.trace({}, rng_key=random.key(0))["y"]["value"]
    np.testing.assert_array_equal(given, Y)


def test_arrays_are_inputs_of_programs(model: Model) -> None:
    assert [x.shape for x in model.arrays] == [(N, 2), (N,)]
    assert not any(isinstance(x, HostArray) for x in model.arrays)
    energy = jax.jit(lambda arrays, z: model.with_arrays(arrays).energy(z))
    np.testing.assert_allclose(energy(model.arrays, POSITION), model.energy(POSITION), rtol=1e-5)
    other = read(regression, (X + 1,), {"y": Y}, batch_size=10)
    np.testing.assert_allclose(energy(other.arrays, POSITION), other.energy(POSITION), rtol=1e-5)
    assert energy._cache_size() == 1


def test_a_model_that_needs_values_keeps_its_arrays_as_constants() -> None:
    def groups(index: Any, y: Any) -> None:
        number = int(np.asarray(index).max()) + 1  # reads the values of an array on the device
        with numpyro.plate("groups", number):
            a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", y.shape[0]) as i:
            numpyro.sample("y", dist.Normal(a[index[i]], 1), obs=y[i])

    index = jnp.arange(N) % 4
    found = read(groups, (index, jnp.asarray(Y)))
    assert found.arrays == []
    assert found.with_arrays([]).energy({"a": jnp.zeros(4)}) == found.energy({"a": jnp.zeros(4)})
    assert found.signature != read(groups, (3 - index, jnp.asarray(Y))).signature


def test_signatures_tell_shapes_settings_and_what_the_host_reads(model: Model) -> None:
    same = read(regression, (X + 1,), {"y": Y}, batch_size=10)
    assert model.signature == same.signature
    assert model.signature != read(regression, (X[:30],), {"y": Y[:30]}, batch_size=10).signature
    assert model.signature != read(regression, (X,), {"y": Y}, batch_size=20).signature

    def by_host(index: Any, y: Any) -> None:
        with numpyro.plate("groups", int(np.max(index)) + 1):
            a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(a[index].sum(), 1), obs=y.sum())

    index = np.arange(N) % 4
    found = read(by_host, (index, Y))
    assert len(found.arrays) == 2
    assert found.signature != read(by_host, (3 - index, Y)).signature


def test_params_keep_their_values() -> None:
    def with_param(y: Any) -> None:
        shift = numpyro.param("shift", 2.0)
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + shift, 1), obs=y)

    found = read(with_param, (jnp.ones(3),)).replace(fixed={"shift": 5.0})
    expected = handlers.substitute(with_param, data={"shift": 5.0})
    z = {"mu": jnp.array(0.3)}
    np.testing.assert_allclose(
        -found.energy(z), log_density(expected, (jnp.ones(3),), {}, z)[0], rtol=1e-6
    )


def test_rows_of_latent_sites_are_gathered() -> None:
    def local(y: Any) -> None:
        with numpyro.plate("data", y.shape[0]) as i:
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y[i])

    found = read(local, (jnp.asarray(Y),), batch_size={"data": 8})
    z = {"z": jnp.linspace(-1, 1, N)}
    summed = found.sum_over_rows(lambda rows: found.energy(z, rows))
    np.testing.assert_allclose(summed, found.energy(z), rtol=1e-5)


def test_more_rows_than_32_bits_number_are_refused() -> None:
    def model() -> None:
        mean = numpyro.sample("mean", dist.Normal())
        with numpyro.plate("rows", 2**31, subsample_size=10):
            numpyro.sample("y", dist.Normal(mean, 1), obs=np.ones(10))

    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 rows.*, got 2147483648 in the plate"):
        read(model, (), {}, batch_size=10)


def test_starts_of_many_alike_sites_are_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are the same starts."""

    def model() -> None:
        for k in range(20):
            numpyro.sample(f"x{k}", dist.Gamma(2, 1))

    programs, compiled = [], starts.compiled

    def recorded(fn: Any, *args: Any) -> Any:
        programs.append(getattr(fn, "__name__", ""))
        return compiled(fn, *args)

    monkeypatch.setattr(starts, "compiled", recorded)
    given = SGRLD(model).settings, random.split(random.key(0), 2), 10, None, (), {}
    _, one = bind(*given)
    assert "start" not in programs
    monkeypatch.setattr(starts, "MANY_ALIKE", 20)
    _, other = bind(*given)
    assert "start" in programs
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), one, other)
