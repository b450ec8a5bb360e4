"""Step-size schedules: formulas, long runs in float32, noiseless phases, and bad arguments."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro_geom import SGRLD
from numpyro_geom.sampling.schedules import check_step_size, cyclical

LAST = 2**31 - 1
STEPS = [0, 1, 2, 3, 7, 99, 100, 101, 4_567, 10**6, 16_777_217, 10**9 + 7, LAST - 1, LAST]
EPS = float(np.finfo(np.float32).eps)


def exact_cyclical(t: int, peak: float, period: int, floor: float) -> float:
    # by the design's formula with the angle reduced in integers, and the small 1 + cos near the
    # end of a cycle written so that float64 has the digits
    return floor + (peak - floor) * math.cos(math.pi * (t % period) / (2 * period)) ** 2


def values(schedule: Callable) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.array(STEPS, jnp.int32)))


# a period of one step, small ones, one that is no float32, the largest one
@pytest.mark.parametrize("period", [1, 2, 100, 16_777_217, LAST])
@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_cyclical_formula_to_float32_rounding(period: int, floor: float) -> None:
    found = values(cyclical(0.1, period, floor))
    exact = [exact_cyclical(t, 0.1, period, floor) for t in STEPS]
    # three roundings in the angle, doubled by the square; sine, square and scaling add theirs.
    # The angle grows in relative terms by at most 1, as |d log sin x / d log x| <= 1.
    np.testing.assert_allclose(found, exact, rtol=12 * EPS)


def test_cyclical_agrees_with_the_cosine_form() -> None:
    schedule = cyclical(0.1, 50, floor=0.02)
    t = np.arange(200)
    exact = 0.02 + (0.1 - 0.02) / 2 * (1 + np.cos(np.pi * np.mod(t, 50) / 50))
    np.testing.assert_allclose(jax.vmap(schedule)(jnp.arange(200)), exact, rtol=12 * EPS)
    assert float(schedule(150)) == pytest.approx(0.1, rel=EPS)


def test_cyclical_never_stops_at_the_end_of_a_long_cycle() -> None:
    # 1 + cos would cancel to 0 in float32
    assert float(cyclical(0.1, 10**6)(10**6 - 1)) == pytest.approx(
        0.1 * math.sin(math.pi / 2e6) ** 2, rel=12 * EPS
    )


@pytest.mark.parametrize("period", [1, 3, 10, 100])
@pytest.mark.parametrize("explore", [0.0, 0.07, 0.1, 0.3, 0.9])  # 0.07 * 100 > 7 in float64
def test_exploration_has_no_noise(period: int, explore: float) -> None:
    covered = [k / period < explore for k in range(period)]
    if all(covered):
        with pytest.raises(ValueError, match="leaves no step with noise"):
            cyclical(0.1, period, explore=explore)
        return
    schedule = cyclical(0.1, period, explore=explore)
    start = (LAST // period - 3) * period  # late cycles
    for t in (jnp.arange(3 * period), start + jnp.arange(3 * period)):
        found = jax.jit(jax.vmap(schedule.noise))(t)
        np.testing.assert_array_equal(found, np.tile(np.where(covered, 0.0, 1.0), 3))


def test_scalars_of_the_default_float_type() -> None:
    schedule = cyclical(0.1, 50, floor=0.01, explore=0.25)
    for method in (schedule, schedule.noise):
        for t in (5, np.int64(5), jnp.int32(5), jnp.uint32(5)):
            found = method(t)
            assert found.shape == ()
            assert found.dtype == jnp.float32
            assert not found.weak_type
    with jax.enable_x64(True):
        assert schedule(jnp.int64(5)).dtype == jnp.float64
        assert schedule.noise(jnp.int32(5)).dtype == jnp.float64


def test_hashable_picklable_and_equal_by_value() -> None:
    schedule = cyclical(0.1, 50, floor=0.01, explore=0.25)
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert check_step_size(schedule) is schedule
    with pytest.raises(AttributeError, match="cannot assign"):
        schedule.peak = 2.0


def scheduled(step_size: object) -> Callable:
    return SGRLD(potential_fn=lambda z: z @ z, step_size=step_size).settings.schedule


@pytest.mark.parametrize("number", [0.25, 1, np.float32(0.25), np.float64(0.25), jnp.float32(0.25)])
def test_numbers_are_constant(number) -> None:
    assert type(check_step_size(number)) is float
    found = scheduled(number)(jnp.int32(7))
    assert (float(found), found.dtype) == (float(number), jnp.float32)


@pytest.mark.parametrize(
    "function",
    [
        optax.cosine_decay_schedule(0.1, 1000),
        optax.polynomial_schedule(0.1, 0.01, 2.0, 1000),
        lambda t: 0.1 * (1 + t / 100) ** -0.55,
    ],
)
def test_any_function_of_the_step_count_works(function) -> None:
    schedule = scheduled(function)
    for t in (0, 5, 500, 5000):
        found = jax.jit(schedule)(jnp.int32(t))
        np.testing.assert_array_equal(found, jax.jit(function)(jnp.int32(t)))
        assert found.dtype == jnp.float32


INF, NAN = float("inf"), float("nan")
BAD = [
    (lambda: cyclical(0.0, 10), ValueError, "peak must be"),
    (lambda: cyclical(INF, 10), ValueError, "peak must be"),
    (lambda: cyclical(0.1, 0), ValueError, "period must be an integer of at least 1, got 0"),
    (lambda: cyclical(0.1, 10.0), TypeError, "period must be an integer"),
    (lambda: cyclical(0.1, 2**31), ValueError, r"period must be at most 2\^31 - 1"),
    (lambda: cyclical(0.1, 10, floor=-0.1), ValueError, "floor must be"),
    (lambda: cyclical(0.1, 10, floor=0.1), ValueError, "floor must be below peak.*is a number"),
    (lambda: cyclical(0.1, 10, explore=1.0), ValueError, "explore must be .* below 1"),
    (lambda: cyclical(0.1, 10, explore=-0.1), ValueError, "explore must be"),
    (lambda: cyclical(0.1, 10, explore=0.95), ValueError, "leaves no step with noise"),
    (lambda: check_step_size(0), ValueError, "step_size must be a finite number above 0, got 0"),
    (lambda: check_step_size(-1e-3), ValueError, "step_size must be a finite number above 0"),
    (lambda: check_step_size(NAN), ValueError, "step_size must be a finite number above 0"),
    (lambda: check_step_size(INF), ValueError, "step_size must be a finite number above 0"),
    (
        lambda: check_step_size("fast"),
        ValueError,
        "positive number or a schedule.*'fast'",
    ),
    (lambda: check_step_size(None), TypeError, "'auto', a positive number or a schedule.*None"),
    (lambda: check_step_size(True), TypeError, "'auto', a positive number or a schedule.*bool"),
    (
        lambda: check_step_size([0.1, 0.2]),
        TypeError,
        "positive number or a schedule.*list",
    ),
    (lambda: check_step_size(np.ones(2)), TypeError, "'auto', a positive number or a schedule"),
    (lambda: check_step_size(1j), TypeError, "'auto', a positive number or a schedule.*complex"),
    (lambda: check_step_size(lambda t: jnp.ones(2)), TypeError, "to a real scalar"),
    (lambda: check_step_size(lambda t: (t, 0.1)), TypeError, "to a real scalar"),
    (lambda: check_step_size(lambda t: None), TypeError, "to a real scalar"),
    (lambda: check_step_size(lambda t: 1j * t), TypeError, "to a real scalar"),
    (lambda: check_step_size(lambda: 0.1), TypeError, "positional argument"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_errors_say_what_was_expected(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
