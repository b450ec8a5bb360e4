"""Step-size schedules: formulas, long runs in float32, noiseless phases, and bad arguments."""

from __future__ import annotations

import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro_geom.sampling.schedules import (
    Constant,
    Cyclical,
    Polynomial,
    Schedule,
    as_schedule,
    constant,
    cyclical,
    polynomial,
)

LAST = 2**31 - 1
STEPS = [0, 1, 2, 3, 7, 99, 100, 101, 4_567, 10**6, 16_777_217, 10**9 + 7, LAST - 1, LAST]
EPS = float(np.finfo(np.float32).eps)


def exact_polynomial(t: int, initial: float, final: float, power: float, delay: float) -> float:
    return final + (initial - final) * (1 + t / delay) ** -power


def exact_cyclical(t: int, peak: float, period: int, floor: float) -> float:
    # by the design's formula with the angle reduced in integers, and the small 1 + cos near the
    # end of a cycle written so that float64 has the digits
    return floor + (peak - floor) * math.cos(math.pi * (t % period) / (2 * period)) ** 2


def values(schedule: Schedule) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.array(STEPS, jnp.int32)))


def test_constant_is_constant() -> None:
    np.testing.assert_array_equal(values(constant(0.3)), np.float32(0.3))


@pytest.mark.parametrize(
    "arguments",
    [(0.1, 0.0, 0.55, 1.0), (1e-2, 1e-4, 1 / 3, 1000.0), (2.0, 0.5, 1.0, 7.5), (1e-6, 0, 2.0, 1)],
)
def test_polynomial_formula_to_float32_rounding(arguments) -> None:
    found = values(polynomial(*arguments))
    exact = [exact_polynomial(t, *arguments) for t in STEPS]
    # a power p multiplies the relative error of its base, which has three roundings: t, the
    # quotient and the sum; the power (a few units in the last place) and the scaling add theirs
    np.testing.assert_allclose(found, exact, rtol=EPS * (3 * arguments[2] + 6))


def test_polynomial_is_the_sgld_schedule() -> None:
    a, b, gamma = 0.02, 50.0, 0.55
    found = values(polynomial(a * b**-gamma, 0.0, gamma, delay=b))
    np.testing.assert_allclose(found, [a * (b + t) ** -gamma for t in STEPS], rtol=10 * EPS)


def test_polynomial_starts_at_initial_and_tends_to_final() -> None:
    schedule = polynomial(0.5, 0.25, 1.0)
    assert float(schedule(0)) == 0.5
    assert float(schedule(1)) == 0.375
    assert float(schedule(LAST)) == 0.25


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


SCHEDULES = [
    constant(0.1),
    polynomial(0.1, 0.01, 0.55),
    cyclical(0.1, 50, floor=0.01, explore=0.25),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_noise_is_one_outside_exploration(schedule: Schedule) -> None:
    found = float(schedule.noise(jnp.int32(49)))
    assert found == 1.0
    assert float(schedule.noise(3)) == (0.0 if isinstance(schedule, Cyclical) else 1.0)


@pytest.mark.parametrize("schedule", [*SCHEDULES, as_schedule(lambda t: 0.5)])
def test_scalars_of_the_default_float_type(schedule: Schedule) -> None:
    for method in (schedule, schedule.noise):
        for t in (5, np.int64(5), jnp.int32(5), jnp.uint32(5)):
            found = method(t)
            assert found.shape == ()
            assert found.dtype == jnp.float32
            assert not found.weak_type
    with jax.enable_x64(True):
        assert schedule(jnp.int64(5)).dtype == jnp.float64
        assert schedule.noise(jnp.int32(5)).dtype == jnp.float64


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hashable_picklable_and_equal_by_value(schedule: Schedule) -> None:
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert as_schedule(schedule) is schedule
    # as a static argument: two equal ones share a compiled function
    traced = []

    def step(schedule: Schedule, t: jax.Array) -> jax.Array:
        traced.append(schedule)
        return schedule(t)

    compiled = jax.jit(step, static_argnums=0)
    assert compiled(schedule, 7) == compiled(again, 7)
    assert len(traced) == 1


def test_repr_tells_the_arguments() -> None:
    assert repr(cyclical(0.1, 50)) == "Cyclical(peak=0.1, period=50, floor=0.0, explore=0.0)"
    assert repr(polynomial(1, 0, 1)) == ("Polynomial(initial=1.0, final=0.0, power=1.0, delay=1.0)")


@pytest.mark.parametrize("number", [0.25, 1, np.float32(0.25), np.float64(0.25), jnp.float32(0.25)])
def test_numbers_become_constants(number) -> None:
    schedule = as_schedule(number)
    assert schedule == Constant(float(number))
    assert type(schedule.step_size) is float


@pytest.mark.parametrize(
    "function",
    [
        optax.constant_schedule(0.1),
        optax.cosine_decay_schedule(0.1, 1000),
        optax.polynomial_schedule(0.1, 0.01, 2.0, 1000),
        optax.warmup_exponential_decay_schedule(0.01, 0.1, 10, 100, 0.5),
    ],
)
def test_optax_schedules_work(function) -> None:
    schedule = as_schedule(function)
    for t in (0, 5, 500, 5000):
        found = jax.jit(schedule)(jnp.int32(t))
        np.testing.assert_array_equal(found, jax.jit(function)(jnp.int32(t)))
        assert found.dtype == jnp.float32
        assert schedule.noise(t) == 1.0


def test_users_own_schedule_passes() -> None:
    class Alternating(Schedule):
        def __call__(self, t):
            return jnp.asarray(0.1)

        def noise(self, t):
            return jnp.asarray(t % 2, float)

    schedule = Alternating()
    assert as_schedule(schedule) is schedule
    assert [float(schedule.noise(t)) for t in range(3)] == [0.0, 1.0, 0.0]


INF, NAN = float("inf"), float("nan")
BAD = [
    (lambda: constant(0), ValueError, "step_size must be a finite number above 0, got 0"),
    (lambda: constant(-0.1), ValueError, "step_size must be a finite number above 0"),
    (lambda: constant("fast"), TypeError, "step_size must be a number, got 'fast'"),
    (lambda: polynomial(0.0, 0.0, 1.0), ValueError, "initial must be"),
    (lambda: polynomial(0.1, -0.1, 1.0), ValueError, "final must be"),
    (lambda: polynomial(0.1, 0.1, 1.0), ValueError, r"final must be below initial.*constant\("),
    (lambda: polynomial(0.1, 0.2, 1.0), ValueError, "final must be below initial"),
    (lambda: polynomial(0.1, 0.0, 0.0), ValueError, "power must be"),
    (lambda: polynomial(0.1, 0.0, NAN), ValueError, "power must be"),
    (lambda: polynomial(0.1, 0.0, 1.0, delay=0), ValueError, "delay must be"),
    (lambda: polynomial(0.1, None, 1.0), TypeError, "final must be a number"),
    (lambda: cyclical(0.0, 10), ValueError, "peak must be"),
    (lambda: cyclical(INF, 10), ValueError, "peak must be"),
    (lambda: cyclical(0.1, 0), ValueError, "period must be an integer of at least 1, got 0"),
    (lambda: cyclical(0.1, 10.0), TypeError, "period must be an integer"),
    (lambda: cyclical(0.1, 2**31), ValueError, r"period must be at most 2\^31 - 1"),
    (lambda: cyclical(0.1, 10, floor=-0.1), ValueError, "floor must be"),
    (lambda: cyclical(0.1, 10, floor=0.1), ValueError, r"floor must be below peak.*constant\("),
    (lambda: cyclical(0.1, 10, explore=1.0), ValueError, r"explore must be .* in \[0, 1\)"),
    (lambda: cyclical(0.1, 10, explore=-0.1), ValueError, "explore must be"),
    (lambda: cyclical(0.1, 10, explore=0.95), ValueError, "leaves no step with noise"),
    (lambda: as_schedule(0), ValueError, "step_size must be a finite number above 0, got 0"),
    (lambda: as_schedule(-1e-3), ValueError, "step_size must be a finite number above 0"),
    (lambda: as_schedule(NAN), ValueError, "step_size must be a finite number above 0"),
    (lambda: as_schedule(INF), ValueError, "step_size must be a finite number above 0"),
    (lambda: as_schedule("fast"), ValueError, "'auto', a positive number or a schedule.*'fast'"),
    (lambda: as_schedule(None), TypeError, "'auto', a positive number or a schedule.*None"),
    (lambda: as_schedule(True), TypeError, "'auto', a positive number or a schedule.*bool"),
    (lambda: as_schedule([0.1, 0.2]), TypeError, "'auto', a positive number or a schedule.*list"),
    (lambda: as_schedule(np.ones(2)), TypeError, "'auto', a positive number or a schedule"),
    (lambda: as_schedule(1j), TypeError, "'auto', a positive number or a schedule.*complex"),
    (lambda: as_schedule(lambda t: jnp.ones(2)), TypeError, "to a real scalar"),
    (lambda: as_schedule(lambda t: (t, 0.1)), TypeError, "to a real scalar"),
    (lambda: as_schedule(lambda t: None), TypeError, "to a real scalar"),
    (lambda: as_schedule(lambda t: 1j * t), TypeError, "to a real scalar"),
    (lambda: as_schedule(lambda: 0.1), TypeError, "positional argument"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_errors_say_what_was_expected(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_frozen() -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        Polynomial(0.1, 0.0, 1.0).power = 2.0
