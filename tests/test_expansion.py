"""Parameter expansion: the merged position, the determinants, and the distribution of the product.

Given the factors, (V, a) -> (W, b) is linear. So the claims of "posterior" can be checked
without chains: the log-determinants against the Jacobian, and, for a Gaussian W, the integral over
V of the expanded density, which must be q(P, Q) times a constant.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.infer import HMC
from numpyro.infer.util import log_density, potential_energy
from numpyro.util import fori_collect
from tiers import short

from numpyro_geom.model import expansion as expansion_module
from numpyro_geom.model.expansion import Expansion, Factors, WithoutPrior, with_expansion
from numpyro_geom.model.model import Model
from numpyro_geom.model.plates import read_subsampling
from numpyro_geom.model.potential import function_potential

ROUNDING = 1e-10
"""Relative, of sums of some hundred terms in float64 after a solve with factors close to I."""

SHAPES = {"w": (2, 3), "b": (3,), "a": (2,), "kernel": (2, 2, 2, 3), "s": (3,), "t": (3,), "x": ()}
FORMS = {
    "full": Expansion(sites=["w"]),
    "left only": Expansion(right=0, sites=["w"]),
    "several": Expansion(left=2, right=3, sites=["w"]),
    "low rank": Expansion(rank=1, sites=["w"]),
    "fraction": Expansion(left=2, rank=0.7, sites=["w"]),
    "bias": Expansion(sites={"w": Factors(vectors="b")}),
    "bias left": Expansion(sites={"w": Factors(vectors="a", side="left")}),
    "kernel": Expansion(sites={"kernel": Factors(vectors=("b",))}),
    "normalisation": Expansion(right=2, sites={"s": Factors(vectors=("t",))}),
    "low-rank normalisation": Expansion(rank=2, sites={"s": Factors(vectors="t")}),
    "all": Expansion(
        left=2,
        rank=1,
        sites={
            "w": Factors(right=0, vectors="a", side="left"),
            "kernel": Factors(left=1, vectors="b"),
            "s": Factors(vectors="t"),
        },
    ),
}
forms = pytest.mark.parametrize("expansion", FORMS.values(), ids=FORMS.keys())


def position_of(shapes: dict = SHAPES, seed: int = 0, dtype: Any = None) -> dict:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def noisy(tree: Any, scale: float = 0.2, seed: int = 1) -> Any:
    """The tree with normal noise on every entry."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (x + scale * rng.normal(size=x.shape)).astype(x.dtype), tree)


def moved(expansion: Expansion, position: dict, scale: float = 0.2, seed: int = 1) -> dict:
    """An expanded position whose factors are not the identity."""
    expanded = jax.tree.map(np.asarray, expansion.init(random.key(7), position))
    factors = jax.tree.map(jnp.asarray, noisy(expanded["factors"], scale, seed))
    return {"sites": dict(position), "factors": factors}


def assert_close(value: Any, exact: Any, tolerance: float) -> None:
    """Every leaf within ``tolerance`` times the exact leaf's largest entry."""
    assert jax.tree.structure(value) == jax.tree.structure(exact)
    for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


# --- the merged position


@forms
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_starts_at_the_position_exactly(expansion: Expansion, wide: bool) -> None:
    with jax.enable_x64(wide):
        position = position_of()
        expanded = expansion.init(random.key(0), position)
        merged = expansion.merge(expanded)
        assert merged.keys() == position.keys()
        for name, value in position.items():
            assert merged[name].dtype == value.dtype
            np.testing.assert_array_equal(merged[name], value)
        assert {x.dtype for x in jax.tree.leaves(expanded["factors"])} == {position["w"].dtype}


@pytest.mark.parametrize("form", ["several", "low rank", "all"])
@pytest.mark.parametrize(("wide", "tolerance"), [(False, 2e-5), (True, ROUNDING)])
def test_contract_inverts_merge(form: str, wide: bool, tolerance: float) -> None:
    # float32: unit roundoff 6e-8 times condition numbers of at most about 100
    expansion = FORMS[form]
    with jax.enable_x64(wide):
        position = position_of(seed=3)
        expanded = moved(expansion, position_of())
        contracted = expansion.contract(position, expanded)
        assert_close(expansion.merge(contracted), position, tolerance)
        assert_close(contracted["factors"], expanded["factors"], 0.0)
        back = expansion.contract(expansion.merge(expanded), expanded)
        assert_close(back, expanded, tolerance)


def test_products_in_the_papers_order(x64: None) -> None:
    position = position_of()
    expansion = Expansion(left=2, right=2, sites={"w": Factors(vectors="b"), "kernel": Factors()})
    expanded = moved(expansion, position)
    merged = expansion.merge(expanded)
    (p1, p2), (q1, q2) = (expanded["factors"]["w"][side] for side in ("left", "right"))
    assert_close(merged["w"], p2 @ p1 @ position["w"] @ q1 @ q2, ROUNDING)
    assert_close(merged["b"], position["b"] @ q1 @ q2, ROUNDING)
    (p1, p2), (q1, q2) = (expanded["factors"]["kernel"][side] for side in ("left", "right"))
    kernel = jnp.einsum("iu,abul,lj->abij", p2 @ p1, position["kernel"], q1 @ q2)
    assert_close(merged["kernel"], kernel, ROUNDING)
    low = Expansion(rank=1, sites={"w": Factors(vectors="a", side="left")})
    expanded = moved(low, position)
    (left,), (right,) = (expanded["factors"]["w"][side] for side in ("left", "right"))
    p, q = (jnp.diag(f.diagonal) + f.first.T @ f.second for f in (left, right))
    merged = low.merge(expanded)
    assert_close(merged["w"], p @ position["w"] @ q, ROUNDING)
    assert_close(merged["a"], p @ position["a"], ROUNDING)


def test_which_sites() -> None:
    position = position_of() | {"stack": jnp.zeros((2, 3, 4))}
    assert Expansion().replaced(position) == ("kernel", "w")
    assert Expansion(sites=["stack", "s"]).replaced(position) == ("s", "stack")
    named = {"net/0.kernel": jnp.zeros((2, 3)), "net/0.bias": jnp.zeros(3)}
    named |= {"net/1.kernel": jnp.zeros((3, 1)), "kernel_of_kernel": jnp.zeros((3, 3))}
    rule = Expansion(biases=("kernel", "bias"))
    assert rule.replaced(named) == tuple(sorted(named))
    expanded = rule.init(random.key(0), named)
    assert expanded["factors"].keys() == named.keys() - {"net/0.bias"}
    # without the rule, or without a factor on the output side, a bias is never touched
    assert "net/0.bias" not in Expansion().replaced(named)
    last = {"net/0.kernel": Factors(right=0), "net/1.kernel": Factors()}
    with pytest.raises(ValueError, match="pairs no bias"):
        dataclasses.replace(rule, sites=last).replaced(named)


def test_low_rank_forms_no_square_matrix() -> None:
    size, rank = 50, 2
    position = {"w": jnp.ones((size, 3)), "b": jnp.ones(size)}
    setting = {"w": Factors(right=0, vectors="b", side="left")}
    expansion = Expansion(rank=rank, sites=setting)
    expanded = expansion.init(random.key(0), position)

    def energy(expanded: dict) -> Any:
        merged = expansion.merge(expanded)
        square = sum(jnp.sum(x**2) for x in merged.values())
        return square + expansion.correction(expanded, 1.0)

    text = str(jax.make_jaxpr(jax.value_and_grad(energy))(expanded))
    assert "f32[50,3]" in text
    assert "f32[50,50]" not in text


# --- the determinants


@forms
def test_log_determinants_against_the_jacobian(x64: None, expansion: Expansion) -> None:
    expanded = moved(expansion, position_of())
    flat, unravel = ravel_pytree(expanded["sites"])

    def product(flat: jax.Array) -> jax.Array:
        sites = unravel(flat)
        return ravel_pytree(expansion.merge({**expanded, "sites": sites}))[0]

    log_det = np.linalg.slogdet(jax.jit(jax.jacfwd(product))(flat))[1]
    correction = jax.jit(expansion.correction)
    assert abs(log_det) > 0.1
    for temperature in (1.0, 0.5):
        value = correction(expanded, temperature)
        exact = temperature * (minus_log_q(expansion, expanded) - log_det)
        np.testing.assert_allclose(value, exact, rtol=ROUNDING)


def minus_log_q(expansion: Expansion, expanded: dict) -> float:
    """N(I, c^2 / side) entry by entry; of a low rank N(1, .) for D and N(0, .) for L1 and L2."""
    total = 0.0
    for sides in expanded["factors"].values():
        for factors in sides.values():
            for factor in factors:
                if isinstance(factor, tuple):
                    entries = [factor[0] - 1, factor[1], factor[2]]
                else:
                    entries = [factor - np.eye(factor.shape[0])]
                variance = expansion.factor_scale**2 / entries[0].shape[0]
                total += sum(float(np.sum(np.square(x))) for x in entries) / (2 * variance)
    return total


def gaussian(position: dict, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mean and precision of a Gaussian on a flattened position."""
    rng = np.random.default_rng(seed)
    size = ravel_pytree(position)[0].size
    root = rng.normal(size=(size, size)) / math.sqrt(size)
    return rng.normal(size=size), np.eye(size) + root @ root.T


def gaussian_energy(mean: np.ndarray, precision: np.ndarray) -> Callable:
    def energy(position: dict) -> jax.Array:
        off = ravel_pytree(position)[0] - mean
        return off @ precision @ off / 2

    return energy


def integrals(expansion: Expansion, temperatures: tuple[float, ...]) -> np.ndarray:
    """log of the integral over the sites of exp(-E / tau) / q(P, Q), for several factors each.

    E is quadratic in the sites, so that one Newton step and a determinant are exact.
    """
    position = position_of()
    potential = function_potential(gaussian_energy(*gaussian(position)))

    def log_integral(expanded: dict, temperature: jax.Array) -> jax.Array:
        energy = with_expansion(potential, expansion, temperature).energy
        flat, unravel = ravel_pytree(expanded["sites"])

        def over_sites(flat: jax.Array) -> jax.Array:
            return energy({**expanded, "sites": unravel(flat)}, {}) / temperature

        grad, hessian = jax.grad(over_sites)(flat), jax.hessian(over_sites)(flat)
        minimum = over_sites(flat) - grad @ jnp.linalg.solve(hessian, grad) / 2
        return -minimum - jnp.linalg.slogdet(hessian)[1] / 2

    several = [moved(expansion, position, seed=seed) for seed in range(4)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *several)
    over_both = jax.jit(jax.vmap(jax.vmap(log_integral, (0, None)), (None, 0)))
    log_q = [-minus_log_q(expansion, expanded) for expanded in several]
    return np.asarray(over_both(stacked, jnp.asarray(temperatures))) - log_q


@pytest.mark.parametrize("form", ["low rank", "bias", "kernel"])
def test_factors_have_the_law_q(x64: None, form: str) -> None:
    for values in integrals(FORMS[form], (1.0, 0.5)):
        np.testing.assert_allclose(values, values[0], rtol=ROUNDING)


@pytest.mark.parametrize("form", ["low rank", "bias"])
@pytest.mark.parametrize("wrong", [-1, None], ids=["one less", "none"])
def test_a_wrong_count_of_determinants_is_seen(
    x64: None, monkeypatch: Any, form: str, wrong: int | None
) -> None:
    sides_of = expansion_module._sides_of_site

    def miscounted(*args: Any) -> list:
        sides = sides_of(*args)
        return [
            s._replace(multiplicity=0 if wrong is None else s.multiplicity + wrong) for s in sides
        ]

    monkeypatch.setattr(expansion_module, "_sides_of_site", miscounted)
    assert np.ptp(integrals(FORMS[form], (1.0,))) > 0.1


def test_law_of_a_scalar_product_by_quadrature(x64: None) -> None:
    # w = p v q with an energy that is not quadratic, at tau = 0.5: the density of w is the
    # integral of exp(-E / tau) / |p q| over p and q, the trapezoidal rule on a grid without 0
    temperature, expansion = 0.5, Expansion()

    def energy(position: dict) -> jax.Array:
        w = position["w"][0, 0]
        return (w**2 - 1) ** 2 + 0.3 * w

    expanded_energy = with_expansion(
        function_potential(energy), expansion, temperature=temperature
    ).energy
    grid = jnp.linspace(-1.0, 3.0, 400)

    @jax.vmap
    def density(w: jax.Array) -> jax.Array:
        def at(p: jax.Array, q: jax.Array) -> jax.Array:
            factors = {"w": {"left": (p[None, None],), "right": (q[None, None],)}}
            expanded = {"sites": {"w": (w / (p * q))[None, None]}, "factors": factors}
            return jnp.exp(-expanded_energy(expanded, {}) / temperature) / jnp.abs(p * q)

        return jnp.sum(jax.vmap(jax.vmap(at, (None, 0)), (0, None))(grid, grid))

    w = jnp.linspace(-1.8, 1.8, 13)
    exact = jax.vmap(lambda w: jnp.exp(-energy({"w": w[None, None]}) / temperature))(w)
    ratio = density(w) / exact
    np.testing.assert_allclose(ratio, ratio[0], rtol=ROUNDING)


@pytest.mark.slow
def test_chains_keep_the_law_of_the_product() -> None:
    # 400 chains of Hamiltonian Monte Carlo start from the exact law (W, b) ~ N, (P, Q) ~ q and
    # take 20 draws, each a trajectory of 2: they hold it if the expanded energy is right. Scores
    # are of independent chains' means; 6 standard errors are passed by one of 116 functions with
    # probability 1e-6. Hamiltonian Monte Carlo has no bias at a finite step size.
    chains, draws = 400, 20
    expansion = Expansion(sites={"w": Factors(vectors="b")})
    position = position_of({"w": (2, 3), "b": (3,)})
    mean, precision = gaussian(position)
    root = np.linalg.cholesky(np.linalg.inv(precision))
    rng = np.random.default_rng(5)
    unravel = ravel_pytree(position)[1]
    exact = jnp.asarray(mean + rng.normal(size=(chains, mean.size)) @ root.T, jnp.float32)
    factors = jax.tree.map(
        lambda x: np.float32(x + 0.25 / len(x) ** 0.5 * rng.normal(size=(chains, *x.shape))),
        expansion.init(random.key(0), position)["factors"],
    )
    positions = jax.jit(jax.vmap(unravel))(exact)
    start = jax.jit(jax.vmap(expansion.contract))(positions, {"factors": factors})
    potential = function_potential(
        gaussian_energy(jnp.asarray(mean, jnp.float32), jnp.asarray(precision, jnp.float32))
    )
    energy = with_expansion(potential, expansion, 1.0).energy
    kernel = HMC(
        potential_fn=lambda z: energy(z, {}),
        step_size=0.1,
        trajectory_length=2.0,
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    state = kernel.init(random.split(random.key(1), chains), 0, start, (), {})

    def functions(z: Any) -> jax.Array:
        w = (ravel_pytree(expansion.merge(z))[0] - mean) @ np.linalg.inv(root).T
        p = jnp.concatenate(
            [
                ((x - jnp.eye(x.shape[0])) * math.sqrt(x.shape[0]) / 0.25).ravel()
                for x in jax.tree.leaves(z["factors"])
            ]
        )
        return jnp.concatenate(
            [w, jnp.outer(w, w)[jnp.triu_indices(w.size)], p, p**2, jnp.outer(p[:4], w).ravel()]
        )

    out = fori_collect(
        0,
        draws,
        lambda s: kernel.sample(s, (), {}),
        state,
        transform=lambda s: (jax.vmap(functions)(s.z), s.accept_prob),
        progbar=False,
    )
    values, accepted = np.asarray(out[0], np.float64), np.asarray(out[1])
    assert accepted.mean() > 0.7
    w = 9
    expected = [np.zeros(w), np.eye(w)[np.triu_indices(w)], np.zeros(13), np.ones(13), np.zeros(36)]
    of_chain = values.mean(axis=0)
    error = of_chain.std(axis=0, ddof=1) / math.sqrt(chains)
    scores = (of_chain.mean(axis=0) - np.concatenate(expected)) / error
    assert np.abs(scores).max() < 6


# --- the papers' target


def product_model(X: Any, y: Any = None) -> None:
    """V, P and Q as latent sites, as one would write the papers' target by hand."""
    v = numpyro.sample("w", dist.Normal(0, 1.5).expand([2, 3]).to_event(2))
    a = numpyro.sample("b", dist.Normal(0, 1.5).expand([3]).to_event(1))
    p = numpyro.sample("p", dist.Normal(0, 0.5**0.5).expand([2, 2]).to_event(2))
    q = numpyro.sample("q", dist.Normal(0, 0.5**0.5).expand([3, 3]).to_event(2))
    s = numpyro.sample("s", dist.HalfNormal(2.0))
    with numpyro.plate("data", X.shape[0]) as i:
        mean = X[i] @ (p @ v @ q) + a @ q
        numpyro.sample("y", dist.Normal(mean, s).to_event(1), obs=y[i])


def matrix_model(X: Any, y: Any = None) -> None:
    """Priors that must not matter: they are not Gaussian."""
    w = numpyro.sample("w", dist.Cauchy(0, 1).expand([2, 3]))
    b = numpyro.sample("b", dist.StudentT(3, 0, 1).expand([3]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(2.0))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w + b, s).to_event(1), obs=y[i])


X, Y = np.random.default_rng(0).normal(size=(8, 2)), np.random.default_rng(1).normal(size=(8, 3))
LAYER = {"w": Factors(vectors="b")}


def model_parts(model: Any, batch_size: int | None = None) -> tuple[Any, Any]:
    args = (jnp.asarray(X), jnp.asarray(Y))
    plan = read_subsampling(matrix_model, args, {}, batch_size, "replacement")
    return plan, Model(model, args, {}, plan).potential()


def test_factors_is_the_product_model(x64: None) -> None:
    expansion = Expansion(sites=LAYER, target="factors", prior_scale=1.5)
    position = position_of({"w": (2, 3), "b": (3,), "s": ()})
    model = pickle.loads(pickle.dumps(WithoutPrior(matrix_model, expansion.replaced(position))))
    _, potential = model_parts(model)
    # the whole energy is tempered, the new prior too: E does not depend on the temperature
    energy = with_expansion(potential, expansion, temperature=0.5).energy

    def by_hand(z: dict) -> jax.Array:
        factors = {"p": z["factors"]["w"]["left"][0], "q": z["factors"]["w"]["right"][0]}
        args = (jnp.asarray(X), jnp.asarray(Y))
        return potential_energy(product_model, args, {}, {**z["sites"], **factors})

    points = [moved(expansion, position_of(SHAPES | {"s": ()}, seed=k)) for k in range(3)]
    keep = ("w", "b", "s")
    points = [{**p, "sites": {k: p["sites"][k] for k in keep}} for p in points]
    ours = jax.jit(jax.value_and_grad(lambda z: energy(z, {})))
    theirs = jax.jit(jax.value_and_grad(by_hand))
    gaps = []
    for point in points:
        value, grad = ours(point)
        exact, exact_grad = theirs(point)
        gaps.append(value - exact)
        assert_close(grad, exact_grad, ROUNDING)
    np.testing.assert_allclose(gaps, gaps[0], atol=ROUNDING)


def test_low_rank_entries_have_the_papers_prior(x64: None) -> None:
    expansion = Expansion(rank=1, sites=["w"], target="factors", factor_prior_scale=0.3)
    expanded = moved(expansion, position_of())
    exact = np.sum(np.square(expanded["sites"]["w"])) / 2
    exact += np.sum(np.square(ravel_pytree(expanded["factors"])[0])) / (2 * 0.3**2)
    np.testing.assert_allclose(expansion.correction(expanded, 1.0), exact, rtol=ROUNDING)


def test_without_prior_keeps_sites_latent(x64: None) -> None:
    model = WithoutPrior(matrix_model, ("w", "b"))
    args = (jnp.asarray(X), jnp.asarray(Y))
    params = {k: jnp.ones(s) for k, s in (("w", (2, 3)), ("b", (3,)), ("s", ()))}
    density, trace = log_density(model, args, {}, params)
    full, _ = log_density(matrix_model, args, {}, params)
    prior = dist.Cauchy(0, 1).log_prob(1.0) * 6 + dist.StudentT(3, 0, 1).log_prob(1.0) * 3
    np.testing.assert_allclose(density, full - prior, rtol=ROUNDING)
    assert trace["w"]["type"] == "sample"
    assert not trace["w"]["is_observed"]


# --- minibatches and transformations


def test_minibatches_and_their_noise(x64: None) -> None:
    expansion = Expansion(sites=LAYER)
    expanded = moved(expansion, position_of({"w": (2, 3), "b": (3,), "s": ()}))
    plan, plain = model_parts(matrix_model, batch_size=2)
    _, full = model_parts(matrix_model)
    potential = with_expansion(plain, expansion, 0.5)
    exact = with_expansion(full, expansion, 0.5).energy(expanded, {})
    pairs = [potential.energy(expanded, {"data": jnp.arange(k, k + 2)}) for k in (0, 2, 4, 6)]
    np.testing.assert_allclose(np.mean(pairs), exact, rtol=ROUNDING)
    in_chunks = potential.on_all_rows(lambda rows: potential.energy(expanded, rows))
    np.testing.assert_allclose(in_chunks, exact, rtol=ROUNDING)
    ((weight, rows),) = potential.score_noise(random.key(0))
    ((plain_weight, plain_rows),) = plain.score_noise(random.key(0))
    assert weight == plain_weight
    assert_close(rows(expanded), plain_rows(expansion.merge(expanded)), 0.0)
    assert potential.num_data == plain.num_data


@pytest.mark.parametrize("form", ["full", "low rank"])
def test_hessian_vector_products_in_float32(form: str) -> None:
    expansion, position = FORMS[form], position_of()
    potential = function_potential(gaussian_energy(*gaussian(position)))
    energy = with_expansion(potential, expansion, 1.0).energy
    chains = jax.tree.map(
        lambda *x: np.stack(x), *[moved(expansion, position, seed=k) for k in range(3)]
    )
    other = noisy(chains, 1.0, seed=9)

    @jax.jit
    @jax.vmap
    def product(at: Any, along: Any) -> Any:
        grad, linear = jax.linearize(jax.grad(lambda z: energy(z, {})), at)
        return grad, linear(along)

    grad, linear = product(chains, other)
    for tree in (grad, linear):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(tree))
        assert {x.dtype for x in jax.tree.leaves(tree)} == {np.dtype(np.float32)}
    step = 1e-2  # a central difference: rounding 1e-7 / step, truncation step^2
    ahead, behind = (
        product(jax.tree.map(lambda x, d, s=s: x + s * step * d, chains, other), other)[0]
        for s in (1, -1)
    )
    slope = ravel_pytree(jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind))[0]
    exact = ravel_pytree(linear)[0]
    assert np.linalg.norm(slope - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize("rank", short([None, 2], kept=[None]))
def test_curvature_factor_is_that_of_the_hessian(x64: None, rank: int | None) -> None:
    """Of a Gaussian with one curvature c: the largest of the expanded Hessian over c."""
    keys = random.split(random.key(0), 4)
    shapes = {"w": (4, 3), "b": (3,), "kernel": (2, 2, 3, 5), "other": (2,)}
    position = {
        name: random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    sites = {"w": Factors(left=2, vectors="b"), "kernel": Factors()}
    expansion = Expansion(sites=sites, rank=rank)
    start, unravel = ravel_pytree(expansion.init(random.key(0), position))

    def energy(flat: jax.Array) -> jax.Array:
        away = jax.tree.map(jnp.subtract, expansion.merge(unravel(flat)), position)
        return 1.5 * sum(jnp.sum(x**2) for x in away.values())

    largest = float(jnp.linalg.eigvalsh(jax.hessian(energy)(start))[-1])
    assert float(expansion.curvature_factor(position)) == pytest.approx(largest / 3, rel=0.01)
    if rank is None:
        alone = Expansion(left=2, right=1, sites=["w"])
        top = float(jnp.linalg.svd(position["w"])[1][0])
        expected = 1 + 3 * top**2
        assert float(alone.curvature_factor(position)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("rank", [None, 1])
def test_a_singular_factor_has_infinite_energy(rank: int | None) -> None:
    expansion = Expansion(rank=rank, sites=["w"])
    expanded = expansion.init(random.key(0), position_of())
    expanded["factors"] = jax.tree.map(jnp.zeros_like, expanded["factors"])
    if rank is None:
        assert expansion.correction(expanded, 1.0) == np.inf
    else:  # D = 0 has no determinant lemma: the kernel undoes a step to here all the same
        assert not np.isfinite(expansion.correction(expanded, 1.0))


def test_settings_are_values() -> None:
    for expansion in FORMS.values():
        again = pickle.loads(pickle.dumps(expansion))
        assert again == expansion
        assert hash(again) == hash(expansion)
        assert dataclasses.replace(expansion, factor_friction=2.0) != expansion
    assert Expansion(sites=["w"]) == Expansion(sites={"w": Factors()})


def test_friction_of_factors() -> None:
    expansion = Expansion(rank=1, factor_friction=0.01)
    expanded = expansion.init(random.key(0), position_of())
    scale = expansion.friction_scale(expanded)
    assert jax.tree.structure(scale) == jax.tree.structure(expanded)
    assert set(jax.tree.leaves(scale["sites"])) == {1.0}
    assert set(jax.tree.leaves(scale["factors"])) == {0.01}


# --- the papers' parameter counts


def residual_network() -> tuple[dict[str, Any], dict[str, Factors]]:
    """Shapes of ResNet-20-FRN for ten classes, with projections, and what multiplies each site."""
    shapes: dict[str, tuple] = {}
    sites: dict[str, Factors] = {}

    def layer(name: str, size: int, inputs: int, outputs: int) -> None:
        shapes[f"{name}.kernel"] = (size, size, inputs, outputs)
        for vector in ("bias", "scale", "shift", "threshold"):
            shapes[f"{name}.{vector}"] = (outputs,)
        sites[f"{name}.kernel"] = Factors(
            left=0 if name == "first" else None, vectors=f"{name}.bias"
        )
        sites[f"{name}.scale"] = Factors(vectors=(f"{name}.shift", f"{name}.threshold"))

    layer("first", 3, 3, 16)
    inputs = 16
    for outputs in (16, 32, 64):
        for block in range(3):
            name = f"{outputs}.{block}"
            layer(f"{name}.a", 3, inputs, outputs)
            layer(f"{name}.b", 3, outputs, outputs)
            if inputs != outputs:
                layer(f"{name}.projection", 1, inputs, outputs)
            inputs = outputs
    shapes |= {"last.kernel": (64, 10), "last.bias": (10,)}
    sites["last.kernel"] = Factors(right=0)
    return {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}, sites


@pytest.mark.parametrize(
    ("factors", "rank", "count"),
    [(1, None, 383_098), (2, None, 492_154), (1, 1 / 8, 303_610), (1, 1 / 4, 330_874)],
)
def test_parameter_counts_of_the_paper(factors: int, rank: float | None, count: int) -> None:
    shapes, sites = residual_network()
    assert sum(math.prod(x.shape) for x in shapes.values()) == 274_042
    expansion = Expansion(left=factors, right=factors, rank=rank, sites=sites)
    expanded = jax.eval_shape(expansion.init, random.key(0), shapes)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(expanded)) == count


# --- bad input

F = Factors


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        (lambda: Expansion(left=-1), ValueError, "left must be an integer of at least 0, got -1"),
        (lambda: Expansion(right=1.5), TypeError, "right must be an integer"),
        (lambda: Expansion(left=0, right=0), ValueError, "both 0: expected at least one factor"),
        (lambda: Expansion(rank=0), ValueError, "rank must be an integer of at least 1"),
        (lambda: Expansion(rank=1.5), ValueError, "a fraction of the side between 0 and 1, got 1"),
        (lambda: Expansion(rank="low"), TypeError, "rank must be an integer"),
        (lambda: Expansion(sites="w"), TypeError, "sites must be a sequence of names, got 'w'"),
        (lambda: Expansion(sites=[]), ValueError, "sites is empty"),
        (lambda: Expansion(sites=[1]), TypeError, "must be names of sites, got 1"),
        (lambda: Expansion(sites={"w": 1}), TypeError, "sites must map names to Factors"),
        (lambda: Expansion(biases="kernel"), TypeError, "biases must be a sequence of names"),
        (lambda: Expansion(biases=("kernel",)), ValueError, "biases must be two words"),
        (lambda: Expansion(target="prior"), ValueError, r"one of \['posterior', 'factors'\]"),
        (lambda: Expansion(factor_scale=0), ValueError, "factor_scale must be a finite number ab"),
        (lambda: Expansion(factor_friction=-1), ValueError, "factor_friction must be a finite"),
        (lambda: Expansion(prior_scale="wide"), TypeError, "prior_scale must be a number"),
        (lambda: Factors(left=0, right=0), ValueError, "left and right are both 0"),
        (lambda: Factors(vectors=1), TypeError, "vectors must be a sequence of names"),
        (lambda: Factors(side="top"), ValueError, r"side must be one of \['left', 'right'\]"),
        (lambda: WithoutPrior(None, "w"), TypeError, "names must be a sequence of names"),
    ],
)
def test_bad_settings(settings: Callable, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        settings()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sites": ["v"]}, "no site 'v' to expand: expected one of"),
        ({"sites": {"w": F(vectors="v")}}, "no site 'v' to expand: expected one of"),
        ({"sites": ["x"]}, "'x' is a scalar: expected a matrix"),
        ({"sites": ["w"], "rank": 3}, "rank is 3 and the left side of site 'w' has dimension 2"),
        ({"sites": {"w": F(vectors="a")}}, r"must have the shape \(3,\), got \(2,\)"),
        ({"sites": {"w": F(vectors="b", side="left")}}, r"must have the shape \(2,\), got \(3,\)"),
        ({"sites": {"w": F(vectors="kernel")}}, r"must have the shape \(3,\)"),
        ({"sites": {"w": F(vectors="w")}}, "site 'w' is multiplied with 'w' and with 'w'"),
        (
            {"sites": {"w": F(vectors="b"), "kernel": F(vectors="b")}},
            "site 'b' is multiplied with 'w' and with 'kernel'",
        ),
        ({"sites": {"w": F(right=0, vectors="b")}}, "shares the right factors of 'w', which has n"),
        ({"right": 0, "sites": ["s"]}, "site 's' of shape .* gets no factor"),
        ({"sites": {"s": F(left=1)}}, "'s' is a vector and has right factors only"),
        ({"biases": ("w", "bias")}, "pairs no bias with a matrix"),
    ],
)
def test_settings_that_do_not_fit_the_position(settings: dict, match: str) -> None:
    expansion = Expansion(**settings)
    with pytest.raises(ValueError, match=match):
        expansion.replaced(position_of())
    with pytest.raises(ValueError, match=match):
        expansion.init(random.key(0), position_of())


def test_positions_without_matrices() -> None:
    with pytest.raises(ValueError, match="nothing to expand: expected a site with two axes"):
        Expansion().replaced({"x": jnp.zeros(()), "b": jnp.zeros(3)})
    with pytest.raises(TypeError, match="expected a position that is a dict"):
        Expansion().replaced(jnp.zeros((2, 3)))


@pytest.mark.parametrize(
    ("names", "match"),
    [(["s"], "of site 's', which is on .*: expected a latent"), (["y"], "'y', which is observed")],
)
def test_without_prior_needs_real_latent_sites(names: list, match: str) -> None:
    model = WithoutPrior(matrix_model, names)
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3), "s": jnp.ones(())}
    with pytest.raises(ValueError, match=match):
        log_density(model, (X, Y), {}, params)
