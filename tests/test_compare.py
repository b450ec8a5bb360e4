"""Comparison with reference draws: its errors, its false alarms and its power."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from targets import as_if_run, vectorized
from tiers import short

from numpyro_geom import to_inference_data
from numpyro_geom.diagnostics import compare_draws, comparison
from numpyro_geom.diagnostics.comparison import differences
from numpyro_geom.diagnostics.draws import Scalars, estimate_moments, read_draws


def autoregressive(
    rng: np.random.Generator, correlation: float, chains: int, draws: int, scalars: int
) -> np.ndarray:
    """Stationary chains of standard normals; effective sizes are known."""
    noise = rng.normal(size=(draws, chains, scalars))
    x = noise.copy()
    for t in range(1, draws):
        x[t] = correlation * x[t - 1] + np.sqrt(1 - correlation**2) * noise[t]
    return x.swapaxes(0, 1)


def table(x: np.ndarray, y: np.ndarray) -> tuple:
    """The part that compares scalars, without the directions."""
    names = tuple(map(str, range(x.shape[2])))
    return differences(Scalars(names, x), Scalars(names, y))


@pytest.mark.parametrize(
    ("own", "other", "skewed"), [(0.0, 0.0, False), (0.9, 0.9, False), (0.8, 0.0, True)]
)
def test_false_alarms_of_scalars(own: float, other: float, skewed: bool) -> None:
    rng = np.random.default_rng(0)
    repeats = 100
    x = autoregressive(rng, own, 4, 500, 4 * repeats)
    y = autoregressive(rng, other, 4, 500, 4 * repeats)
    if skewed:
        x, y = np.exp(x / 2), np.exp(y / 2)
    # 4 scalars a comparison: the correction is for 12 tests in place of 3 x 400
    p_values = np.array([s.p_value for s in table(x, y)])
    assert np.all(p_values == 1.0) or p_values.min() > 0
    raw = np.array(
        [
            min(s.p_value for s in table(x[..., k : k + 4], y[..., k : k + 4]))
            for k in range(0, 4 * repeats, 4)
        ]
    )
    # level 0.005 by design, of 100: more than 4 has probability 2e-4 at that level
    assert np.sum(raw < comparison.FALSE_ALARM / 2) <= 4
    # and the test is not too conservative: p < 0.5 in at least a tenth (nominally a half)
    assert np.sum(raw < 0.5) >= 10


def test_squares_that_never_change_have_the_size_of_the_draws() -> None:
    # half of the values are 0 and half are 1, so that all are as far from their mean
    coins = np.random.default_rng(0).permuted(np.tile([0.0, 1.0], (4, 250)), axis=1)[..., None]
    found = estimate_moments(coins)
    assert found.sd_size == found.mean_size > 400


@pytest.mark.parametrize("correlation", short([0.0, 0.8], kept=[0.8]))
def test_false_alarms_of_directions(correlation: float) -> None:
    rng = np.random.default_rng(1)
    level, count = comparison.FALSE_ALARM / 2, 0
    for _ in range(60):
        x, y = (autoregressive(rng, correlation, 4, 500, 3) for _ in range(2))
        count += min(d.p_value for d in compare_draws({"w": x}, {"w": y}).directions) < level
    # 60 x 0.005 are 0.3 by design: more than 3 have probability 3e-4
    assert count <= 3


def test_errors_of_autocorrelated_draws() -> None:
    rng = np.random.default_rng(2)
    r, chains, draws = 0.8, 4, 4000
    x, y = autoregressive(rng, r, chains, draws, 6), rng.normal(size=(chains, draws, 6))
    number = chains * draws
    rows = table(x, y)
    # the autocorrelation of z_t is r^t, that of its square r^2t; var(z^2) / 4 = 1 / 2
    mean = np.sqrt((1 + r) / (1 - r) / number + 1 / number)
    sd = np.sqrt((1 + r**2) / (1 - r**2) / (2 * number) + 1 / (2 * number))
    # an effective size of thousands is known to some 10%, its root to 5%; six of them to 2%
    assert np.mean([s.mean_noise for s in rows]) == pytest.approx(mean, rel=0.1)
    assert np.mean([s.sd_noise for s in rows]) == pytest.approx(sd, rel=0.1)


def test_power_on_an_sd_off_by_a_tenth() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(2, 4, 1000, 5))
    x[..., 3] *= 1.1
    # errors of an sd: sqrt(2 / 2n) = 1.6% at n = 4000; 10% are 6 of them, 4 are seen
    found = compare_draws({"w": x}, {"w": y})
    assert not found.within_noise
    assert found.verdict.startswith("differs: ")
    assert "w[3]" in found.verdict
    row = found.scalars[3]
    assert abs(row.sd_ratio - 1.1) < 5 * row.sd_noise
    assert all(abs(s.sd_ratio - 1) < 5 * s.sd_noise for k, s in enumerate(found.scalars) if k != 3)


def test_power_on_a_mean_off_by_a_tenth_and_on_a_shape() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(2, 4, 1000, 3))
    x[..., 0] += 0.15
    x[..., 1] = np.sqrt(12) * (rng.uniform(size=(4, 1000)) - 0.5)  # the same mean and sd
    rows = table(x, y)
    assert abs(rows[0].mean_error - 0.15) < 5 * rows[0].mean_noise
    level = comparison.FALSE_ALARM / 2
    assert [s.p_value < level for s in rows] == [True, True, False]
    assert abs(rows[1].mean_error) < 5 * rows[1].mean_noise
    # a uniform distribution of sd 1 is on (-1.73, 1.73); 95% of it is within 1.645
    assert abs(rows[1].coverage - 0.95) < 5 * rows[1].coverage_noise


def test_directions_see_what_no_scalar_shows() -> None:
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(2, 4, 500, 2))
    x[..., 1] = 0.6 * x[..., 0] + 0.8 * x[..., 1]
    found = compare_draws({"w": x}, {"w": y})
    assert all(s.p_value > 0.005 for s in found.scalars)
    assert not found.within_noise
    # the variance along (cos a, sin a) is 1 + 0.6 sin 2a
    ratios = [d.sd_ratio for d in found.directions]
    assert min(ratios) == pytest.approx(0.4**0.5, abs=0.06)
    assert max(ratios) == pytest.approx(1.6**0.5, abs=0.06)
    assert "worst of 32 directions" in str(found)
    assert compare_draws({"w": x[..., 0]}, {"w": y[..., 0]}).directions == ()


def model(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    s = numpyro.sample("s", dist.HalfNormal(2).expand([2]).to_event(1))
    numpyro.deterministic("one", 1.0)
    with numpyro.plate("data", 20) as i:
        numpyro.sample("y", dist.Normal(mu, s[0] + s[1]), obs=y[i])


@pytest.mark.arviz
def test_runs_exports_and_dicts_give_the_same() -> None:
    y = 1 + jax.random.normal(jax.random.key(0), (20,))
    mcmc = vectorized(NUTS(model), 500, 1000, 2)
    mcmc.run(jax.random.key(1), y)
    other = mcmc.get_samples(group_by_chain=True)
    mcmc.run(jax.random.key(2), y)
    idata = to_inference_data(mcmc)
    read_draws(idata["posterior"], "draws")  # a group of it will do
    draws = mcmc.get_samples(group_by_chain=True)
    results = [compare_draws(x, other) for x in (mcmc, idata, draws)]
    names = {"mu", "s[0]", "s[1]"}
    for found in results:
        assert found.constant == ("one",)
        assert {s.name for s in found.scalars} == names
        assert found.within_noise
    rows = [[s[1:] for s in sorted(found.scalars)] for found in results]
    for row in rows[1:]:
        np.testing.assert_allclose(row, rows[0], rtol=1e-6)
    text = str(results[0])
    assert "constant, left out: one" in text
    assert "within noise: 3 scalars and 32 directions" in text
    assert repr(results[0]) == text


def two(seed: int = 0, draws: int = 200) -> tuple[dict, dict]:
    x, y = np.random.default_rng(seed).normal(size=(2, 2, draws, 3))
    return {"w": x}, {"w": y}


def test_what_only_one_side_has_is_left_out_and_named() -> None:
    x, y = two()
    found = compare_draws({**x, "extra": x["w"]}, {**y, "other": y["w"]})
    assert found.left_out == ("extra", "other")
    assert "in one of the two only, left out: extra, other" in str(found)
    for names in (["w"], "w"):
        assert compare_draws({**x, "extra": x["w"]}, y, var_names=names).left_out == ()


def ended(draws: Any) -> MCMC:
    """A run that has ended with given draws."""
    return as_if_run(MCMC(NUTS(model), num_warmup=0, num_samples=1, progress_bar=False), draws)


@pytest.mark.arviz
def test_names_with_a_slash_are_those_of_exports() -> None:
    import arviz as az

    x, y = two()
    groups = {"posterior": {"net.w": y["w"]}}
    exported = az.from_dict(groups) if az.__version__ >= "1" else az.from_dict(**groups)
    draws = {"net/w": x["w"], "mu": x["w"][..., 0]}
    for names in ("net/w", ["net.w"], None):
        found = compare_draws(ended(draws), exported, var_names=names)
        assert [s.name for s in found.scalars] == ["net.w[0]", "net.w[1]", "net.w[2]"]
        assert found.left_out == (() if names else ("mu",))


def test_names_that_become_one_are_an_error() -> None:
    x, y = two()
    with pytest.raises(ValueError, match=r"draws must have names that differ .*'l\.w', 'l/w'"):
        compare_draws({"l/w": x["w"], "l.w": y["w"]}, {"l.w": y["w"]})


def test_positions_in_tuples_and_nested_dicts() -> None:
    x, y = two()
    positions = ({"a": x["w"][..., 0]}, x["w"])
    found = compare_draws(ended(positions), {"z.0.a": y["w"][..., 0], "z.1": y["w"]})
    assert [s.name for s in found.scalars] == ["z.0.a", "z.1[0]", "z.1[1]", "z.1[2]"]


def test_draws_of_a_vector_are_not_chains() -> None:
    flat = np.random.default_rng(0).normal(size=(1000, 10))
    with pytest.raises(ValueError, match="'w' of shape .1000, 10. would be 1000 chains of 10"):
        compare_draws({"w": flat}, {"w": flat})
    # a run may have many short chains
    assert compare_draws(ended({"w": flat}), ended({"w": flat})).sizes == ((1000, 10), (1000, 10))


def test_coverage_of_draws_that_are_all_inside() -> None:
    rng = np.random.default_rng(10)
    x, y = rng.uniform(-1.5, 1.5, size=(4, 500, 1)), rng.normal(size=(4, 500, 1))
    (row,) = table(x, y)
    assert row.coverage == 1.0
    # sqrt(0.9 x 0.1 / n), both sides with 2,000 independent draws, up to the error of an ESS
    assert row.coverage_noise == pytest.approx(0.3 * np.sqrt(2 / 2000), rel=0.2)


def test_chains_that_stand_still_differ() -> None:
    x, y = two()
    x["w"][..., 1] = 0.0
    found = compare_draws(x, y)
    assert found.scalars[1].p_value == 0.0
    assert found.scalars[1].ess == 1.0
    assert not found.within_noise


def test_chains_in_different_places_say_little() -> None:
    x, y = two()
    x["w"] = x["w"] / 100 + np.array([-1.0, 1.0])[:, None, None]
    found = compare_draws(x, y)
    assert max(s.ess for s in found.scalars) < 10
    if found.within_noise:
        assert "That says little" in found.verdict


def test_many_scalars_show_the_worst() -> None:
    rng = np.random.default_rng(9)
    x, y = rng.normal(size=(2, 2, 200, 40))
    x[..., 37] += 1
    found = compare_draws({"w": x}, {"w": y})
    lines = str(found).splitlines()
    assert lines[1].startswith("w[37]")
    assert len(lines) == 1 + comparison.SHOWN + 5
    assert "draws: 2 chains of 200; reference: 2 chains of 200" in lines
    assert len(found.scalars) == 40


def test_errors() -> None:
    x, y = two()
    with pytest.raises(TypeError, match="draws must be a run MCMC"):
        compare_draws(x["w"], y)
    with pytest.raises(ValueError, match="the MCMC has not run"):
        compare_draws(x, MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False))
    with pytest.raises(ValueError, match=r"reference must have arrays .* of shape \(200,\)"):
        compare_draws(x, {"w": y["w"][0, :, 0]})
    with pytest.raises(ValueError, match="no variable in common"):
        compare_draws(x, {"v": y["w"]})
    with pytest.raises(ValueError, match=r"draws has no variables \['v'\]"):
        compare_draws(x, y, var_names=["v"])
    with pytest.raises(ValueError, match="must have one shape"):
        compare_draws(x, {"w": y["w"][..., :2]})
    with pytest.raises(ValueError, match="the same chains and draws"):
        compare_draws({**x, "v": x["w"][:1]}, {**y, "v": y["w"]})
    with pytest.raises(ValueError, match="at least 8 draws per chain"):
        compare_draws({"w": x["w"][:, :1]}, y)
    with pytest.raises(ValueError, match="constant in the reference"):
        compare_draws(x, {"w": np.zeros_like(y["w"])})
    with pytest.raises(ValueError, match="draws that are constant"):
        compare_draws({"w": np.ones((2, 50))}, {"w": np.ones((2, 50))})
    bad = x["w"].copy()
    bad[0, 3, 1] = np.nan
    with pytest.raises(ValueError, match=r"draws of 'w' that are not finite \(1 values\)"):
        compare_draws({"w": bad}, y)
