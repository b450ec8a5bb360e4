"""diagnose: figures against hand-made draws, flags of good and bad runs, both kinds of source."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from jax import random
from numpyro import handlers
from numpyro.infer import HMC, MCMC, NUTS
from scripts import load_script
from targets import vectorized

from numpyro_geom import SGRLD, to_inference_data
from numpyro_geom.diagnostics import Check, Report, diagnose, moments, replay
from numpyro_geom.diagnostics.checks import checks_of, weight_checks
from numpyro_geom.diagnostics.draws import effective_size, mixing_of
from numpyro_geom.diagnostics.facts import Run
from numpyro_geom.diagnostics.inference_data import container
from numpyro_geom.diagnostics.moments import MomentErrors
from numpyro_geom.diagnostics.moments import moment_errors as moments_or_none
from numpyro_geom.laplace.draw import pareto_shape

SD = np.array([1.0, 0.1, 3.0])
CHAINS, DRAWS = 4, 500


def correlated(size: int = 3, correlation: float = 0.9) -> np.ndarray:
    """A covariance whose stiff directions contribute little to the coordinates' variances."""
    matrix = np.full((size, size), correlation) + (1 - correlation) * np.eye(size)
    return matrix * np.outer(SD, SD)


def gaussian_arrays(covariance: np.ndarray, target: np.ndarray, mean: float = 0.0) -> dict:
    """Independent draws of one Gaussian with the gradients of another, centred at 5."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(CHAINS, DRAWS, len(SD)))
    z = 5.0 + mean * SD + noise @ np.linalg.cholesky(covariance).T
    return {"z.w": z, "grad_U.w": (z - 5.0) @ np.linalg.inv(target)}


def idata_of(posterior: dict, stats: dict | None = None, **attrs: Any) -> Any:
    """A container with groups of these arrays."""
    groups = {"posterior": posterior, "sample_stats": {} if stats is None else stats}
    datasets = {}
    for group, arrays in groups.items():
        if arrays:
            data = {
                name: (["chain", "draw", *(f"{name}_{k}" for k in range(x.ndim - 2))], x)
                for name, x in arrays.items()
            }
            datasets[group] = xr.Dataset(data)
    if "posterior" in datasets:
        datasets["posterior"].attrs.update(attrs)
    return container(datasets)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape)


def line(found: Report, name: str) -> Check:
    (only,) = [check for check in found.checks if check.name == name]
    return only


def moment_errors(arrays: dict, temperature: float) -> MomentErrors:
    found = moments_or_none(arrays, temperature)
    assert found is not None
    return found


# Errors of moments


# 2,000 independent draws: a variance has the relative error sqrt(2 / 2000) = 0.032, an sd 0.016
SD_ERROR = 0.016


@pytest.mark.parametrize("temp", [1.0, 0.25])
def test_moment_errors_of_exact_draws_are_within_their_monte_carlo_error(temp: float) -> None:
    arrays = gaussian_arrays(temp * correlated(), correlated())
    found = moment_errors(arrays, temp)
    assert list(found.names) == ["w[0]", "w[1]", "w[2]"]
    # for a Gaussian the figures are the actual errors of these draws
    assert np.all(np.abs(found.sd) < 4 * found.sd_error)
    assert np.all(np.abs(found.mean) < 4 * found.mean_error)
    np.testing.assert_allclose(found.sd_error, SD_ERROR, rtol=0.25)
    np.testing.assert_allclose(found.mean_error, 2000**-0.5, rtol=0.25)


@pytest.mark.parametrize("factor", [0.8, 1.1, 1.5])
def test_moment_errors_are_those_of_the_draws(factor: float) -> None:
    found = moment_errors(gaussian_arrays(factor**2 * correlated(), correlated()), 1.0)
    np.testing.assert_allclose(found.sd, factor - 1, atol=4 * factor * SD_ERROR)


def test_an_error_of_one_stiff_direction_is_weighed_by_its_share() -> None:
    values, vectors = np.linalg.eigh(correlated())
    values[0] *= 2  # of all variances it is a small part
    wrong = vectors @ np.diag(values) @ vectors.T
    found = moment_errors(gaussian_arrays(wrong, correlated()), 1.0)
    truth = np.sqrt(np.diag(wrong) / np.diag(correlated())) - 1
    # exact to first order in the share; a coordinate's own temperature would be off by up to 1
    np.testing.assert_allclose(found.sd, truth, atol=5 * SD_ERROR + 0.5 * truth.max())


def test_moment_errors_of_a_shifted_mean() -> None:
    found = moment_errors(gaussian_arrays(np.diag(SD**2), np.diag(SD**2), 0.5), 1.0)
    np.testing.assert_allclose(found.mean, 0.5, atol=5 * 2000**-0.5)


def test_noise_of_many_coordinates_does_not_look_like_an_error() -> None:
    # 80 coordinates, 2,000 draws: with S from the draws themselves the figure would be off by
    # about 80 / 2000 / 2 = 0.02; from other draws it has mean 0
    z = normal(CHAINS, DRAWS, 80)
    found = moment_errors({"z.w": z, "grad_U.w": z}, 1.0)
    assert abs(found.sd.mean()) < 4 * SD_ERROR / 80**0.5 + 0.003


def test_draws_without_a_finite_gradient_are_left_out() -> None:
    arrays = gaussian_arrays(np.diag(SD**2), np.diag(SD**2))
    arrays["grad_U.w"][1, 7] = np.nan
    found = moment_errors(arrays, 1.0)
    assert found.left_out == 1
    assert np.all(np.isfinite(found.sd))


MOMENTS = (
    "draws with a finite gradient",
    "error of the means, in sd",
    "relative error of the sd",
)


def moments_of(z: np.ndarray, grad: np.ndarray, **facts: Any) -> list[Check]:
    """The two checks of moments, or the one check that replaces them."""
    errors = moments_or_none({"z.w": z, "grad_U.w": grad}, 1.0)
    found = checks_of(Run({}, {}, facts, moments=errors))
    return [check for check in found if check.name in MOMENTS]


def test_monte_carlo_error_alone_is_hardly_ever_flagged() -> None:
    rng = np.random.default_rng(0)
    flagged = 0
    for _ in range(60):
        shocks = rng.normal(size=(4, 260, 5))
        z = np.empty_like(shocks)
        z[:, 0] = shocks[:, 0]
        for k in range(1, 260):
            z[:, k] = 0.6 * z[:, k - 1] + 0.8 * shocks[:, k]
        flagged += any(line.ok is False for line in moments_of(z, z))
        one = rng.normal(size=(1, 1000, 40))  # too many coordinates for S
        flagged += any(line.ok is False for line in moments_of(one, one))
    # 240 lines, each at 1%: more than 9 has a chance of 1e-4
    assert flagged <= 9


def test_correlations_that_are_not_known_are_told() -> None:
    z = np.random.default_rng(0).normal(size=(1, 1000, 60))
    mean, sd = moments_of(z, z)
    assert mean.ok is None
    assert sd.ok is None
    assert "no error of a moment" in sd.where
    wide = z * np.where(np.arange(60) == 7, 1.5, 1.0)
    assert moments_of(wide, wide)[1].ok is False


def test_what_monte_carlo_error_hides_is_neither_right_nor_wrong() -> None:
    z = np.random.default_rng(0).normal(size=(4, 15, 1))
    mean, sd = moments_of(z, z)
    assert sd.ok is None
    assert "Monte Carlo error hides it" in sd.remark
    assert mean.ok is (True if abs(mean.value) < 0.25 else None)


SIZES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1e3, 1e4, 1e5, 1e6)


def assert_flagged_from(flags: list[bool], size: float) -> None:
    """Every size from ``size`` on is flagged, and the smallest, within Monte Carlo error, is not.

    In between, each size that is flagged is followed by flagged sizes.
    """
    assert flags == sorted(flags)
    assert not flags[0]
    assert all(flags[SIZES.index(size) :])


# the error of a mean is 0.1 with 100 draws, and less with more: a shift of 1 is 10 of them or more
@pytest.mark.parametrize("shape", [(1, 100, 2), (4, 500, 3), (1, 400, 30)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("where", ["one", "all", "alternating"])
def test_a_shift_that_is_flagged_is_flagged_at_any_larger_size(
    shape: tuple, sign: float, where: str
) -> None:
    index = np.arange(shape[-1])
    shifted = {"one": index == 0, "all": index >= 0, "alternating": (-1.0) ** index}[where]
    z = normal(*shape)
    found = [moments_of(z, z + sign * size * shifted) for size in SIZES]
    assert_flagged_from([mean.ok is False for mean, _ in found], 1.0)
    # a shift changes nothing about the sd
    assert {sd.ok for _, sd in found} == {moments_of(z, z)[1].ok}


def test_gradients_of_the_wrong_sign_are_flagged_at_any_size() -> None:
    z = normal(4, 500, 2)
    # at size 1 no gradient is left, and from there on the draws are at the top of a hill
    flags = [moments_of(z, z * (1 - size))[1].ok is False for size in SIZES]
    assert_flagged_from(flags, 1.0)


def test_gradients_that_never_change_are_flagged() -> None:
    z = normal(4, 500, 2)
    for constant in (0.0, 0.1, -1e6):
        mean, sd = moments_of(z, np.full_like(z, constant))
        assert mean.ok is (abs(constant) < 1)
        assert sd.ok is False


@pytest.mark.arviz
@pytest.mark.parametrize("follows", [True, False])
def test_a_chain_that_moves_at_half_time_is_not_fine(follows: bool) -> None:
    z = normal(4, 500, 2)
    later = np.arange(500)[:, None] >= 250
    for size in (1.0, 10.0, 1e3, 1e6):
        # to a place away from the only mode, or to a second mode, of which gradients know nothing
        moved = z + size * later
        mean, sd = moments_of(moved, moved if follows else z)
        assert False in (mean.ok, sd.ok) if follows else (mean.ok, sd.ok) == (None, None)
        # nor is it if the gradients alone have the step
        assert moments_of(z, z + size * later)[0].ok is None
        assert line(diagnose(idata_of({"w": moved})), "R-hat").ok is False


# What weights say of draws without them


def weighted(mean: float, sd: float, size: int = 2000, noise: float = 0.0, seed: int = 0) -> dict:
    """Standard normal draws, with weights for N(mean, sd^2) times the exponential of noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1, size))
    log_weight = x**2 / 2 - ((x - mean) / sd) ** 2 / 2 + noise * rng.normal(size=x.shape)
    arrays = {"x": np.stack([x, 0 * x], -1), "none": np.zeros((1, size, 0))}
    return {"draws": arrays, "log_weight": log_weight, "correct": True}


def test_weights_show_the_error_of_means_and_sds() -> None:
    mean, sd = weight_checks(**weighted(0.4, 0.8))
    assert (mean.ok, sd.ok) == (False, False)
    # 0 - 0.4 in units of 1, and 1 / 0.8
    assert abs(mean.value + 0.4) < 4 * mean.error < 0.2
    assert abs(sd.value - 0.25) < 4 * sd.error < 0.2
    assert mean.where == sd.where == "x[0]"  # x[1] never changes
    # an error that is certain and small is fine
    assert [check.ok for check in weight_checks(**weighted(0.1, 0.98))] == [True, True]
    # an equal weight for all, up to rounding
    equal = weighted(0.0, 1.0)
    assert [check.ok for check in weight_checks(**equal)] == [True, True]
    assert all(check.error < 1e-12 for check in weight_checks(**equal))


def test_errors_of_what_weights_show_are_monte_carlo_errors() -> None:
    found = [list(weight_checks(**weighted(0.3, 0.9, 400, seed=k))) for k in range(200)]
    for checks, truth in zip(zip(*found, strict=True), (-0.3, 1 / 0.9 - 1), strict=True):
        values, errors = (
            np.array([getattr(c, name) for c in checks]) for name in ("value", "error")
        )
        # the sd of 200 values is known to 5%; the mean has a bias of order 1 / 400
        assert 0.8 < values.std() / errors.mean() < 1.25
        assert abs(values.mean() - truth) < 4 * values.std() / 200**0.5 + 5 / 400


def test_weights_that_are_noise_are_hardly_ever_flagged() -> None:
    # weights that know nothing of the draws, worth half of them
    flags = [
        c.ok is False for k in range(100) for c in weight_checks(**weighted(0, 1, 100, 0.8, k))
    ]
    assert sum(flags) <= 8  # 200 at 1% each: more than 8 has a chance of 2e-4


def test_few_or_unknown_weights_say_nothing() -> None:
    assert not list(weight_checks(**weighted(3.0, 1.0, size=24)))
    lost = weighted(0.4, 0.8)
    lost["log_weight"][0, ::2] = np.nan
    lost["draws"]["x"][0, ::2] = np.nan
    assert [check.ok for check in weight_checks(**lost)] == [False, False]


@pytest.mark.arviz
def test_the_report_of_a_guide_shows_what_weights_say() -> None:
    given = weighted(0.0, 1.25)
    stats = {"success": np.ones((1, 2000), bool), "log_weight": given["log_weight"]}
    found = diagnose(
        idata_of({"x": given["draws"]["x"][..., 0]}, stats, guide="RiemannianLaplace", pareto_k=0.3)
    )
    (flagged,) = found.flagged
    assert flagged.name == "relative error of the sd, by weights"
    assert "resample=True" in flagged.advice
    assert found.verdict.startswith("Verdict: the draws are biased (relative error of the sd, by")
    # weights that cannot correct the draws are no remedy
    checks = weight_checks(**{**given, "correct": False})
    assert "resample" not in "".join(check.advice for check in checks)


@pytest.mark.parametrize("divergence", ["none", "published"])
def test_a_drift_with_another_invariant_distribution_is_what_to_change_first(
    divergence: str,
) -> None:
    z = 1.5 * normal(4, 500, 2)
    mean, sd = moments_of(z, z, divergence=divergence, final_step_size=0.1)
    assert sd.ok is False
    assert f"divergence='{divergence}' has another invariant distribution" in sd.advice
    _, plain = moments_of(z, z, divergence="exact", final_step_size=0.1)
    assert "divergence" not in plain.advice


@pytest.mark.arviz
@pytest.mark.parametrize("chains", [2, 4])
def test_chains_that_stand_still_apart_disagree(chains: int) -> None:
    # within the chains there is no variance but rounding
    still = np.broadcast_to(np.arange(float(chains))[:, None, None], (chains, 100, 1))
    found = diagnose(idata_of({"x": still}))
    assert line(found, "R-hat").ok is False


def test_draws_without_any_gradient_are_flagged() -> None:
    z = normal(4, 20, 2)
    grad = z.copy()
    grad[:, ::2, 0] = grad[:, 1::2, 1] = np.inf
    (only,) = moments_of(z, grad)
    assert (only.name, only.value, only.ok) == ("draws with a finite gradient", 0.0, False)
    (only,) = moments_of(z, np.full_like(z, np.nan))
    assert (only.name, only.ok) == ("draws with a finite gradient", False)


def test_coordinates_that_rounding_hides_are_left_out() -> None:
    def sparse() -> None:
        numpyro.sample("p", dist.Dirichlet(jnp.full(6, 0.2)))

    draws = np.random.default_rng(0).dirichlet(np.full(6, 0.2), (1, 300)).astype(np.float32)
    arrays, _ = moments.gradients_at_draws(replay.unchecked(sparse, (), {}), {"p": draws})
    hidden = np.isnan(arrays["grad_U.p"]).all((0, 1))
    assert hidden.any()  # the last sticks, of which nothing is left
    assert not hidden[0]
    found = moment_errors(arrays, 1.0)
    assert list(found.hidden) == [f"p[{k}]" for k in np.flatnonzero(hidden)]


def rows(X: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, scale), obs=y[i])


@functools.cache
def data() -> tuple[jax.Array, jax.Array]:
    X = random.normal(random.key(0), (40, 2))
    return X, X @ jnp.array([1.0, -0.5]) + 0.7 * random.normal(random.key(1), (40,))


@functools.cache
def run(step_size: Any = "auto") -> MCMC:
    """Two chains on 40 rows, batch 10."""
    kernel = SGRLD(rows, step_size=step_size, batch_size=10, dense_mass=None, control_variate=False)
    mcmc = vectorized(kernel, 50, 200, 2)
    mcmc.run(random.key(2), *data())
    return mcmc


@functools.cache
def reports() -> tuple[Report, Report, Any]:
    """Reports of the run and of its export, and the export itself."""
    idata = to_inference_data(run(), gradients=True)
    return diagnose(run()), diagnose(idata), idata


@pytest.mark.slow
def test_gradients_at_draws_are_those_of_the_density() -> None:
    idata = reports()[2]
    group, (X, y) = idata["unconstrained_posterior"], data()
    w, log_scale = (group[f"z.{n}"].values.astype(float) for n in ("w", "scale"))
    scale = np.exp(log_scale)
    np.testing.assert_allclose(scale, idata.posterior["scale"].values, rtol=1e-5)
    residual = np.asarray(y, float) - w @ np.asarray(X, float).T
    # -log p with the Jacobian of scale = exp(log_scale)
    of_w = w / 4 - residual @ np.asarray(X, float) / scale[..., None] ** 2
    of_scale = scale**2 - 1 + len(y) - np.sum(residual**2, -1) / scale**2
    # float32 sums of some 40: the largest error of 400 draws is 9e-6
    np.testing.assert_allclose(group["grad_U.w"].values, of_w, rtol=1e-5, atol=3e-5)
    np.testing.assert_allclose(group["grad_U.scale"].values, of_scale, rtol=1e-5, atol=3e-5)


# The report


@pytest.mark.arviz
def test_a_run_and_its_export_give_the_same_checks() -> None:
    direct, exported, _ = reports()
    assert direct.checks == exported.checks
    names = [line.name for line in direct.checks]
    expected = {
        "R-hat",
        "effective sample size",
        "effective draws per gradient",
        "error of the means, in sd",
        "relative error of the sd",
        "configurational temperature",
        "step size",
        "steps per draw",
        "bias of variances",
        "relaxation times per chain",
        "divergences",
        "passes over the data",
    }
    assert set(names) == expected
    assert len({check.name for check in direct.checks}) == len(direct.checks)


@pytest.mark.arviz
def test_figures_are_those_of_the_run() -> None:
    import arviz as az

    mcmc, (found, _, idata) = run(), reports()
    fields = mcmc.get_extra_fields(group_by_chain=True)
    steps = float(fields["num_steps"].sum())
    posterior = xr.Dataset(dict(idata.posterior.data_vars))
    squares = (posterior - posterior.mean(("chain", "draw"))) ** 2
    sizes = [az.ess(x, method="mean") for x in (posterior, squares)]
    ess = min(float(x.min()) for size in sizes for x in size.values())
    assert line(found, "effective sample size").value == pytest.approx(ess)
    assert line(found, "effective draws per gradient").value == pytest.approx(ess / steps)
    # 40 rows in batches of 10, two chains
    assert line(found, "passes over the data").value == pytest.approx(steps / 2 / 4)
    state = mcmc.last_state
    parts = mcmc.sampler.facts.bias(
        state.adaptation.curvature, state.adaptation.noise, state.step_size, state.dynamics
    )
    assert line(found, "bias of variances").value == pytest.approx(
        float(jnp.max(parts[0] + parts[1])), rel=1e-3
    )
    for name, value in (
        ("lam_H", state.adaptation.curvature),
        ("lam_C", state.adaptation.noise),
        ("lam_min", state.adaptation.slowest),
        ("final_step_size", state.step_size),
        ("final_num_steps", state.num_steps),
    ):
        np.testing.assert_array_equal(idata.posterior.attrs[name], value)


def test_temperatures_are_measured_from_a_fixed_centre() -> None:
    # a mean of 100 sd: from the origin the sd of z . grad U would be 100, and of a draw's mean
    # over ten steps of a chain that forgets in two still about 40
    def far(z: dict) -> jax.Array:
        return jnp.sum((z["a"] - 100.0) ** 2) / 2 + jnp.sum((z["b"] + 100.0) ** 2) / 2

    kernel = SGRLD(potential_fn=far, step_size=0.02, num_steps=100)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=200, progress_bar=False)
    mcmc.run(random.key(0), init_params={"a": jnp.full(3, 100.0), "b": jnp.full(1, -100.0)})
    values = np.asarray(mcmc.get_extra_fields()["configurational_temperature"], float)
    # h lam / 2 = 1%; a draw spans two relaxation times
    assert values.std() < 3
    assert abs(values.mean() - 1.01) < 5 * values.std() / np.sqrt(100)


def test_other_kernels_of_numpyro() -> None:
    # the default length, 2 pi, brings a Gaussian back to where it was
    kernel = HMC(rows, trajectory_length=1.5)
    mcmc = MCMC(kernel, num_warmup=200, num_samples=2000, num_chains=2, progress_bar=False,
                chain_method="vectorized")  # fmt: skip
    mcmc.run(random.key(3), *data(), extra_fields=("num_steps",))
    found = diagnose(mcmc, seconds=2.0)
    names = [line.name for line in found.checks]
    assert "divergences" in names
    assert not [n for n in names if "temperature" in n or "bias" in n]
    # 4,000 draws know an sd to 1.6% if they are independent: 5% is tolerated
    assert line(found, "relative error of the sd").ok
    ess = line(found, "effective sample size").value
    assert line(found, "effective draws per second").value == pytest.approx(ess / 2)
    steps = float(mcmc.get_extra_fields()["num_steps"].sum())
    assert line(found, "effective draws per gradient").value == pytest.approx(ess / steps)


def test_a_step_size_that_is_too_large_is_flagged() -> None:
    step = 10 * float(np.mean(run().last_state.step_size))  # at 12 a chain stands still
    flagged = [line.name for line in diagnose(run(step)).flagged]
    assert "relative error of the sd" in flagged
    assert "configurational temperature" in flagged
    assert "bias of variances" in flagged


@pytest.mark.arviz
def test_chains_that_disagree_or_are_too_short_are_flagged() -> None:
    good = idata_of({"x": normal(4, 500, 2)})
    assert diagnose(good).ok
    apart = normal(4, 500, 2) + np.arange(4)[:, None, None] * np.array([0.0, 1.0])
    found = diagnose(idata_of({"x": apart}))
    assert line(found, "R-hat").where == "x[1]"
    assert line(found, "R-hat").ok is False
    # of sixteen chains R-hat is larger for the same number of effective draws
    assert [x.threshold for x in diagnose(idata_of({"x": normal(16, 500)})).checks] == [
        "at most 1.04",
        "at least 400",
    ]
    short = diagnose(idata_of({"x": normal(4, 60)}))
    assert "effective sample size" in {line.name for line in short.flagged}


@pytest.mark.arviz
def test_draws_whose_squares_are_too_few_are_flagged() -> None:
    rng = np.random.default_rng(0)
    spread = np.exp(np.sin(np.arange(500) / 40))
    mixing = mixing_of({"x": rng.choice([-1.0, 1.0], (4, 500)) * spread})
    assert mixing.size[0] < 100
    # their mean alone has nearly as many effective draws as there are
    assert effective_size(rng.choice([-1.0, 1.0], (4, 500, 1)) * spread[:, None])[0] > 1500


# 2,000 independent values with standard deviation 0.5: the error of their mean is 0.011
@pytest.mark.arviz
@pytest.mark.parametrize(("mean", "ok"), [(1.0, True), (1.09, True), (1.2, False), (0.8, False)])
def test_temperatures_are_compared_with_the_temperature(mean: float, ok: bool) -> None:
    values = 2 * (mean + 0.5 * normal(4, 500))
    stats = {
        "configurational_temperature": values,
        "kinetic_temperature": values,
    }
    found = diagnose(idata_of({"x": normal(4, 500)}, stats, temperature=2.0, bias_tolerance=0.1))
    lines = [x for x in found.checks if "temperature" in x.name]
    assert [x.ok for x in lines] == [ok] * 2
    assert lines[0].value == pytest.approx(values.mean())
    assert lines[0].error == pytest.approx(2 * 0.5 / 2000**0.5, rel=0.25)


@pytest.mark.arviz
@pytest.mark.parametrize(
    ("attrs", "name", "ok"),
    [
        ({"bias_discretisation": [0.0, 0.1], "bias_noise": 0.02}, "bias of variances", False),
        ({"bias_discretisation": 0.01, "bias_noise": 0.09}, "bias of variances", True),
        (
            {"relaxations": [20.0, 30.0], "relaxation_steps": 5},
            "relaxation times per chain",
            False,
        ),
        ({"pareto_k": 0.5}, "Pareto shape of weights", True),
    ],
)
def test_lines_from_attributes(attrs: dict, name: str, ok: bool) -> None:
    found = diagnose(idata_of({"x": normal(4, 500)}, **attrs))
    assert line(found, name).ok is ok
    assert found.ok is ok


@pytest.mark.arviz
def test_lines_from_sample_stats() -> None:
    stats = {
        "diverging": np.arange(40).reshape(4, 10) % 10 == 7,
        "success": np.ones((4, 10), bool),
    }
    found = diagnose(idata_of({"x": normal(4, 500)[:, :10]}, stats, target_accept=0.8))
    assert (line(found, "divergences").value, line(found, "divergences").ok) == (4, False)
    assert line(found, "failed geodesics").ok


def test_the_text_begins_with_a_verdict_and_goes_by_groups() -> None:
    first = "      run longer & more, " + "with words " * 6
    advice = "run longer & more, " + "with words " * 12 + "to the end"
    found = Report(
        (
            Check("bias of variances", 0.2, None, "at most 0.1", False, "", "use step_size"),
            Check("R-hat", 1.2346, None, "at most 1.01", False, "w[0]", advice),
            Check(
                "relative error of the sd", 0.125, 0.2, "within 0.05 of 0", None, "w, " + "x" * 60
            ),
            Check("kinetic temperature", 1.01, 0.01, "1, within 10%", True),
            Check("effective sample size", 3.0, None, "at least 400", False, "w", advice),
            Check("step size", 0.2),
            Check("passes over the data", 12300.0),
        )
    )
    assert str(found).splitlines() == [
        "Verdict: the step is too large (bias of variances: 0.2, expected at most 0.1).",
        "3 of 7 figures flagged, 1 undecided (marked ?).",
        "",
        "    figure                    value         expected",
        "Mixing",
        "!!  R-hat                     1.235         at most 1.01      w[0]",
        first + "with",
        "      words " + "with words " * 5 + "to the end",
        "!!  effective sample size     3             at least 400      w",
        "Bias",
        "!!  bias of variances         0.2           at most 0.1",
        "      use step_size",
        "?   relative error of the sd  0.125 +- 0.2  within 0.05 of 0",
        "      w, " + "x" * 60,
        "ok  kinetic temperature       1.01 +- 0.01  1, within 10%",
        "Step",
        "    step size                 0.2",
        "Cost",
        "    passes over the data      12,300",
    ]
    assert not found.ok
    assert [check.name for check in found.undecided] == ["relative error of the sd"]


def test_the_verdict_of_runs_without_a_flag() -> None:
    fine = Check("R-hat", 1.0, None, "at most 1.01", True)
    hidden = Check("kinetic temperature", 1.2, 0.2, "1, within 10%", None)
    assert str(Report((fine,))).startswith("Verdict: fine.\nNothing is flagged.")
    unsure = str(Report((fine, hidden))).splitlines()
    assert unsure[:2] == [
        "Verdict: no fault found; not known: kinetic temperature.",
        "Nothing is flagged, 1 undecided (marked ?).",
    ]


def test_a_figure_that_says_nothing_is_not_shown() -> None:
    for error, shown in ((0.2, True), (520.0, False)):
        noise = normal(4, 100) - normal(4, 100).mean()
        stats = {"configurational_temperature": 1.05 + error * noise}
        found = line(Report(tuple(checks_of(Run({}, stats, {})))), "configurational temperature")
        assert found.ok is (True if shown else None)
        assert found.figure.startswith("1.05" if shown else "-")
    assert "Monte Carlo error" in found.where


@pytest.mark.arviz
def test_chains_that_stand_still_are_flagged_and_blame_no_gradient() -> None:
    still = np.full((2, 50, 1), 3.0)
    stats = {"configurational_temperature": np.zeros((2, 50))}
    found = diagnose(idata_of({"x": still}, stats))
    assert line(found, "configurational temperature").ok is False
    assert "(chains that do not move: 2" in found.verdict
    assert moments_of(still, still) == []


@pytest.mark.arviz
def test_only_some_variables() -> None:
    bad = normal(4, 500) + np.arange(4)[:, None]
    idata = idata_of({"x": normal(4, 500), "y": bad})
    assert not diagnose(idata).ok
    assert diagnose(idata, var_names="x").ok
    with pytest.raises(
        ValueError, match=r"posterior has no variables \['z'\]: it has \['x', 'y'\]"
    ):
        diagnose(idata, var_names=["x", "z"])


# Sources that say little


@pytest.mark.arviz
def test_without_sample_stats_there_are_still_lines_on_draws() -> None:
    assert [line.name for line in diagnose(idata_of({"x": normal(4, 500)})).checks] == [
        "R-hat",
        "effective sample size",
    ]


@pytest.mark.arviz
@pytest.mark.parametrize(
    ("values", "name"),
    [
        (normal(2, 1), "draws per chain"),
        (np.ones((2, 50)), "chains that do not move"),
        (np.where(np.arange(50) == 3, np.nan, normal(2, 50)), "entries that are not finite"),
    ],
)
def test_draws_of_which_nothing_can_be_said(values: np.ndarray, name: str) -> None:
    found = diagnose(idata_of({"x": values}))
    assert found.checks[0].name == name
    assert not found.ok


@pytest.mark.arviz
def test_one_chain_has_no_rhat(capsys: pytest.CaptureFixture) -> None:
    names = [line.name for line in diagnose(idata_of({"x": normal(1, 500)})).checks]
    assert names == ["effective sample size"]
    assert capsys.readouterr().err == ""


@pytest.mark.arviz
def test_chains_that_stand_still_at_different_places_are_flagged() -> None:
    found = diagnose(idata_of({"x": np.repeat(np.arange(4.0)[:, None], 50, 1)}))
    assert line(found, "R-hat").ok is False


@pytest.mark.parametrize("bad", [3, None, {"x": np.ones(4)}, np.ones((2, 3))])
def test_other_sources_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a numpyro.infer.MCMC that has run, or the Inf"):
        diagnose(bad)


@pytest.mark.arviz
def test_no_variables_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"expected names of variables, got none: the posterior has \['x'\]"
    ):
        diagnose(idata_of({"x": normal(2, 20)}), var_names=[])


@pytest.mark.arviz
def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"has not run: call `mcmc.run\(rng_key, ...\)` first"):
        diagnose(MCMC(SGRLD(rows), num_warmup=1, num_samples=1))
    empty = container({"prior": xr.Dataset({"x": ("draw", np.ones(3))})})
    with pytest.raises(ValueError, match="expected a group `posterior`, and there is none"):
        diagnose(empty)
    good = idata_of({"x": normal(4, 500)})
    with pytest.raises(ValueError, match="seconds must be a finite number above 0, got -1"):
        diagnose(good, seconds=-1)
    with pytest.raises(TypeError, match="gradients must be True or False, got 1"):
        diagnose(good, gradients=1)  # type: ignore[arg-type]


def test_discrete_sites_have_no_gradient() -> None:
    def model() -> None:
        numpyro.sample("k", dist.Bernoulli(0.5))

    read = replay.unchecked(handlers.seed(model, random.key(0)), (), {})
    with pytest.raises(ValueError, match=r"the sites \['k'\] are discrete, and U has no gradient"):
        moments.gradients_at_draws(read, {"k": np.ones((2, 10), int)})


def test_gradients_need_a_model() -> None:
    kernel = SGRLD(potential_fn=lambda z: z**2 / 2, step_size=0.1, num_steps=1)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=10, progress_bar=False)
    mcmc.run(random.key(0), init_params=jnp.zeros(()))
    assert "relative error of the sd" not in [line.name for line in diagnose(mcmc).checks]
    with pytest.raises(ValueError, match="gradients=True needs a kernel with a model"):
        to_inference_data(mcmc, gradients=True)


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    module = load_script("benchmarks/diagnose_table")
    posterior = module.POSTERIORS["gaussian"]()
    _, sd = posterior.reference()
    found = module.judge(posterior, "gaussian", "GGMC", sd, 100)
    assert [run["setting"] for run in found] == ["as is", "30 draws", "step x 4"]
    assert "| GGMC |" in module.table({"gaussian GGMC": found})


def change_point() -> None:
    """Twelve per day for 30 days, then 20: the log density jumps where tau passes a day."""
    day = jnp.arange(60)
    tau = numpyro.sample("tau", dist.Uniform(0, 60))
    rates = numpyro.sample("rates", dist.Exponential(0.05).expand([2]).to_event(1))
    with numpyro.plate("days", 60):
        counts = jnp.where(day < 30, 12.0, 20.0)
        numpyro.sample("counts", dist.Poisson(jnp.where(day < tau, *rates)), obs=counts)


@pytest.mark.slow
def test_a_density_that_jumps_is_flagged() -> None:
    mcmc = MCMC(NUTS(change_point), num_warmup=100, num_samples=300, progress_bar=False)
    mcmc.run(random.key(0))
    assert line(diagnose(mcmc), "relative error of the sd").ok is False


def test_gradients_that_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> None:
        numpyro.sample("x", dist.Normal(0, 1))

    mcmc = MCMC(NUTS(model), num_warmup=10, num_samples=20, progress_bar=False)
    mcmc.run(random.key(0))
    assert not any("not looked at" in check.where for check in diagnose(mcmc).checks)
    monkeypatch.setattr(moments, "MOST_SECONDS", 0.0)
    found = {check.name: check for check in diagnose(mcmc).undecided}
    assert "not looked at" in found["relative error of the sd"].where


def test_time_is_what_limits_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> None:
        numpyro.sample("x", dist.Normal(0, 1))

    turns = iter(range(10))
    monkeypatch.setattr(moments.time, "perf_counter", lambda: next(turns))
    monkeypatch.setattr(moments, "MOST_SECONDS", 60.0)
    posterior = {"x": normal(CHAINS, DRAWS)}
    read = replay.unchecked(model, (), {})
    # a block of 32 gradients takes 1 s, so there is time for 1,920
    arrays, told = moments.gradients_at_draws(read, posterior)
    assert told == {"gradients_every": 2}
    assert arrays["grad_U.x"].shape == (CHAINS, DRAWS // 2)
    np.testing.assert_allclose(arrays["grad_U.x"], posterior["x"][:, ::2], rtol=1e-6)
    monkeypatch.setattr(moments, "MOST_SECONDS", 3.0)  # 8 draws of each chain would be 400
    found = moments.gradients_at_draws(read, {"x": normal(50, 40)}, least_draws=8)
    assert found == ({}, {"gradient_seconds": 1 / 32})


def swapped(*shape: int) -> np.ndarray:
    """Two chains in different modes, each of independent draws."""
    return normal(2, *shape) + 9.0 * np.arange(2).reshape(2, *[1] * len(shape))


AUTO = {"final_step_size": 0.1, "step_size": "auto", "bias_tolerance": 0.1, "dense_mass": "auto"}
BY_HAND = {"final_step_size": 0.1, "step_size": 0.1, "dense_mass": "auto"}
ROWS = {"num_data": 900, "batch_sizes": '{"data": 9}'}
WRONG = {"z.w": 3 * normal(4, 500, 3), "grad_U.w": 3 * normal(4, 500, 3)}
BIAS = {"bias_discretisation": 0.3, "bias_noise": 0.0}
SHORT = {"relaxations": 20.0, "relaxation_steps": 9.0}
SLOW = {"relaxations": 0.1, "relaxation_steps": 1e6}
GUIDE = {"guide": "RiemannianLaplace", "metric": "monge"}
EDGE = np.where(np.arange(500)[:, None] % 2 == np.arange(2), np.inf, normal(4, 500, 2))
HIGH = normal(2, 500) + np.array([[0], [99]])
SD_LINE, BIAS_LINE = "relative error of the sd", "bias of variances"
ADVICE: dict[str, tuple[str, dict, dict, str, str]] = {
    "too wide, auto": (SD_LINE, WRONG, AUTO, "use a smaller bias_tolerance", "auto"),
    "too wide, by hand": (SD_LINE, WRONG, BY_HAND, "use step_size='auto'", "toler"),
    "too wide, on rows": (SD_LINE, WRONG, AUTO | ROWS, "control_variate=True", "auto"),
    "too wide, on all rows": (
        *(SD_LINE, WRONG, AUTO | ROWS | {"batch_sizes": "{}"}),
        *("bias_tolerance, or increase num_samples", "batch_size"),
    ),
    "too wide, controlled": (
        *(SD_LINE, WRONG, AUTO | ROWS | {"control_variate": 1}),
        *("a larger batch_size", "control_variate"),
    ),
    "too wide, of NUTS": (SD_LINE, WRONG, {"kernel": "NUTS"}, "target_accept_prob", "batch"),
    "too wide, of a guide": (SD_LINE, WRONG, GUIDE, "metric='fisher', or run MCMC", "num_"),
    "large bias, auto": (BIAS_LINE, {}, AUTO | BIAS, "num_warmup", "auto"),
    "large bias, by hand": (BIAS_LINE, {}, BY_HAND | BIAS, "use step_size='auto'", "num_warmup"),
    "too short": ("relaxation", {}, AUTO | SHORT, "increase num_samples", "dense_mass"),
    "hardly moved, auto": ("relaxation", {}, AUTO | SLOW, "use dense_mass=True", "auto"),
    "hardly moved, by hand": ("relaxation", {}, BY_HAND | SLOW, "use step_size='auto'", "samples"),
    "hardly moved, scaled": (
        *("relaxation", {}, AUTO | SLOW | {"scaled": 1}),
        *("500 times longer: standardise", "dense_mass"),
    ),
    "hardly moved, low rank": (
        *("relaxation", {}, AUTO | SLOW | {"scaled": 1, "dense_mass": "low_rank"}),
        *("use dense_mass=True", "auto"),
    ),
    "hardly moved, few steps": (
        *("relaxation", {}, AUTO | SLOW | {"num_steps": 1}),
        *("use num_steps='auto', use dense_mass=True", "step_size"),
    ),
    "modes": ("R-hat", {"a": swapped(500)}, {}, "different labellings", "num_samples"),
    "slow chains": (
        *("R-hat", {"a": np.cumsum(normal(2, 500), 1)}, {}),
        *("increase num_samples", "labellings"),
    ),
    "stuck": ("chains that do", {"a": np.ones((4, 500))}, AUTO, "bias_tolerance", "auto"),
    "undone": (
        *("chains that do", {}, BY_HAND | {"undone": [1.0, 0.5, 0.5, 0.5]}),
        *("step_size='auto'", "bias_tolerance"),
    ),
    "not centred": (
        *("error of the means", {"z.w": normal(4, 500) + 1, "grad_U.w": normal(4, 500) + 1}, AUTO),
        *("increase num_warmup and num_samples", "bias_tolerance"),
    ),
    "at the edge": (
        *("draws with a finite", {"z.w": normal(4, 500, 2), "grad_U.w": EDGE}, AUTO),
        *("at the edge of the support", "step_size"),
    ),
    "few draws": ("draws per chain", {"a": normal(4, 1)}, {}, "increase num_samples", "step_size"),
    "not finite": (
        *("entries that are not finite", {"a": np.where(np.arange(500) == 3, np.nan, 1.0)[None]}),
        *({}, "the model is proper", "num_samples"),
    ),
    "a worse mode": (
        *("energy above the best", {"energy": HIGH}, {"dimensions": 2}),
        *("in another mode than chain 0", "step_size"),
    ),
    "far above its start": (
        *("energy above the start", {"energy": HIGH}, {"dimensions": 2, "start_energy": 0.0}),
        *("init_params of higher density", "mode"),
    ),
    "a slow metric": (
        *("memory of the metric", {}, {"metric_lag": 3.0, "divergence": "corrected"}),
        *("divergence='auxiliary' or divergence='frozen'", "tolerance"),
    ),
    "divergences": ("divergences", {"diverging": np.ones((4, 500))}, AUTO, "bias_tolerance", "aim"),
    "divergences of NUTS": (
        *("divergences", {"diverging": np.ones((4, 500))}, {"kernel": "NUTS"}),
        *("larger target_accept_prob", "auto"),
    ),
    "hot": (
        *("kinetic", {"kinetic_temperature": 1.5 + normal(4, 500) / 99}, AUTO),
        *("smaller bias_tolerance", "noise"),
    ),
    "cold": (
        *("kinetic", {"kinetic_temperature": 0.5 + normal(4, 500) / 99}, AUTO),
        *("noise is missing", "bias_tolerance"),
    ),
    "failed geodesics": (
        *("failed geodesics", {"success": np.zeros((4, 500))}, GUIDE),
        *("use metric='fisher'", "reparametrise"),
    ),
    "failed geodesics, fisher": (
        *("failed geodesics", {"success": np.zeros((4, 500))}, GUIDE | {"metric": "fisher"}),
        *("reparametrise the model", "use metric"),
    ),
    "unknown guide": (
        *("weights or gradients", {"success": np.ones((4, 500))}, GUIDE),
        *("draw(..., log_weight=True)", "num_samples"),
    ),
    "far guide": (
        *("Pareto shape", {}, GUIDE | {"pareto_k": 1.2}),
        *("do not use log_weight, .* try metric='fisher'", "draw more"),
    ),
    "far guide, fisher": (
        *("Pareto shape", {}, GUIDE | {"pareto_k": 1.2, "metric": "fisher"}),
        *("do not use log_weight, .* draw more", "metric="),
    ),
    "few weights": (
        *("Pareto shape", {"log_weight": np.where(np.arange(500) < 3, normal(4, 500), np.nan)}),
        *(GUIDE | {"pareto_k": np.nan}, "draw hundreds or more", "log_weight"),
    ),
}
OF_STATS = {"energy", "diverging", "kinetic_temperature", "success", "log_weight"}


@pytest.mark.arviz
@pytest.mark.parametrize(
    ("name", "arrays", "facts", "given", "not_given"), ADVICE.values(), ids=ADVICE
)
def test_advice_fits_the_run(name, arrays, facts, given, not_given) -> None:
    stats = {n: x for n, x in arrays.items() if n in OF_STATS}
    arrays = {n: x for n, x in arrays.items() if n not in OF_STATS}
    unconstrained = arrays if any(n.startswith("z.") for n in arrays) else {}
    draws = {"w": normal(4, 500)} if unconstrained or not arrays else arrays
    mixing, moments = mixing_of(draws), moments_or_none(unconstrained, 1.0)
    every = checks_of(Run(draws, stats, facts, mixing=mixing, moments=moments))
    (found,) = [c for c in every if c.name.startswith(name)]
    assert found.ok is False
    assert all(part in found.advice for part in given.split(" .* "))
    assert not_given not in found.advice


def temperatures(size: float) -> list[Check]:
    return checks_of(Run({}, {"kinetic_temperature": 1 + size + 0.3 * normal(4, 500)}, AUTO))


def weights(size: float) -> list[Check]:
    log_weight = size * normal(4, 500)  # of draws of N(0, 1) for N(size, 1)
    about = GUIDE | {"pareto_k": pareto_shape(log_weight)}
    return checks_of(Run({"x": normal(4, 500)}, {"log_weight": log_weight}, about))


@pytest.mark.arviz
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("checks", [temperatures, weights])
def test_what_is_flagged_is_flagged_at_any_larger_size(checks: Any, sign: float) -> None:
    flags = [any(check.ok is False for check in checks(sign * size)) for size in SIZES]
    assert_flagged_from(flags, 1.0)
