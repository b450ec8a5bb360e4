"""Bias of the step size without a reference: runs at several step sizes, extrapolated to h = 0."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from scipy.special import fdtrc, stdtrit

from .._checks import check_int, check_key, check_number
from ..bound import CHOSEN
from ..kernel import SGKernel, SGState
from .draws import MomentEstimates, chosen, estimate_moments, named, paths, to_scalars
from .table import FALSE_ALARM, SHOWN, Printed, Row, caveat


class ScalarBias(NamedTuple):
    """How the mean or the sd of one scalar depends on the step size; errors are standard errors.

    Attributes:
        name: name of the scalar.
        moment: ``"mean"`` or ``"sd"``.
        values: the moment at each step size.
        errors: Monte Carlo errors of the values.
        limit: value of the fitted line at h = 0.
        limit_error: standard error of the limit.
        slope: slope of the line, per unit of h.
        slope_error: standard error of the slope.
        bias: slope times the kernel's own step size, over the sd at the smallest h. (That sd is
            always positive; the limit of an sd may not be.) The bias of a mean is in sds, the bias
            of an sd is relative.
        bias_error: standard error of the bias.
        fit: p-value of the F test that the line fits.
        ess: smallest effective sample size of mean and sd over the runs.
    """

    name: str
    moment: str
    values: tuple[float, ...]
    errors: tuple[float, ...]
    limit: float
    limit_error: float
    slope: float
    slope_error: float
    bias: float
    bias_error: float
    fit: float
    ess: float


@dataclass(frozen=True, repr=False)
class BiasCurve(Printed):
    """What `bias_vs_step` found; prints as a table and a verdict.

    Attributes:
        scalars: mean and sd of each scalar.
        step_size: the kernel's own step size h.
        step_sizes: the step sizes of the runs.
        num_steps: steps per draw at each of them.
        undone: number of draws with failed steps at each of them.
        constant: names of scalars that never change; they are left out.
    """

    scalars: tuple[ScalarBias, ...]
    step_size: float
    step_sizes: tuple[float, ...]
    num_steps: tuple[int, ...]
    undone: tuple[int, ...]
    constant: tuple[str, ...] = ()

    @property
    def biased(self) -> tuple[ScalarBias, ...]:
        """Scalars with a bias larger than chance allows, at 1% for all together; the largest first.

        The test uses Student's t, with effective draws minus one degrees of freedom.
        """
        level = FALSE_ALARM / 2 / len(self.scalars)
        limits = -stdtrit(np.maximum([s.ess - 1 for s in self.scalars], 1.0), level)
        seen = [
            s
            for s, limit in zip(self.scalars, limits, strict=True)
            if abs(s.bias) > limit * s.bias_error
        ]
        return tuple(sorted(seen, key=lambda s: -abs(s.bias)))

    @property
    def bent(self) -> tuple[ScalarBias, ...]:
        """Moments that a line in h does not fit, at 1% for all together; the worst first."""
        ranked = sorted(self.scalars, key=lambda s: s.fit)
        return tuple(s for s in ranked if s.fit < FALSE_ALARM / len(ranked))

    @property
    def verdict(self) -> str:
        """The largest bias at the kernel's own step size, or how large a bias was detectable."""
        where = f"at h = {self.step_size:.3g}, the kernel's own"
        if self.biased:
            worst = self.biased[0]
            unit, percent = ("%", 100) if worst.moment == "sd" else (" sd", 1)
            text = (
                f"biased {where}: {len(self.biased)} of {len(self.scalars)} means and sds, "
                f"most of all the {worst.moment} of {worst.name} by {percent * worst.bias:+.2g} +- "
                f"{percent * worst.bias_error:.1g}{unit}"
            )
        else:
            means = [s.bias_error for s in self.scalars if s.moment == "mean"]
            sds = [s.bias_error for s in self.scalars if s.moment == "sd"]
            text = (
                f"no bias seen {where}: the bias of means and sds of {len(self.scalars) // 2} "
                f"scalars is within noise, which is up to {max(means, default=0.0):.1g} sd for "
                f"means and {100 * max(sds, default=0.0):.2g}% for sds"
            )
            text += caveat((s.ess, s.name) for s in self.scalars)
        if self.bent:
            names = ", ".join(f"{s.moment} of {s.name}" for s in self.bent[:3])
            text += (
                f". A line in h does not fit {len(self.bent)} of them ({names}): the limits at "
                "h = 0 are off, use smaller factors"
            )
        return text

    def _table(self) -> list[Row]:
        header = ["scalar", "", *(f"h={h:.3g}" for h in self.step_sizes)]
        header += ["h -> 0", "+-", f"bias at {self.step_size:.3g}", "+-", "line fits, p"]
        shown: Sequence[ScalarBias] = self.scalars
        if len(shown) > SHOWN:
            shown = sorted(shown, key=lambda s: -abs(s.bias) / s.bias_error)[:SHOWN]
        rows = []
        for s in shown:
            percent, unit = (100.0, "%") if s.moment == "sd" else (1.0, " sd")
            limits = [*(f"{v:.4g}" for v in (*s.values, s.limit)), f"{s.limit_error:.2g}"]
            bias = [f"{percent * s.bias:+.3f}{unit}", f"{percent * s.bias_error:.2g}"]
            rows.append([s.name, s.moment, *limits, *bias, f"{s.fit:.2g}"])
        return [Row(header), *map(Row, rows)]

    def _below(self) -> list[str]:
        lines = []
        if len(self.scalars) > SHOWN:
            lines.append(f"the {SHOWN} of {len(self.scalars)} whose bias stands out the most")
        lines.append(f"steps per draw: {', '.join(map(str, self.num_steps))}")
        if any(self.undone):
            lines.append(
                f"draws with failed steps: {', '.join(map(str, self.undone))}. They avoid part of "
                "the target, which no line in h describes: use smaller factors"
            )
        if self.constant:
            lines.append(f"constant, left out: {', '.join(self.constant)}")
        return [*lines, self.verdict]


def bias_vs_step(
    kernel: SGKernel,
    rng_key: jax.Array,
    *args: Any,
    factors: Sequence[float] = (1.0, 0.5, 0.25),
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 4,
    var_names: str | Sequence[str] | None = None,
    init_params: Any = None,
    **kwargs: Any,
) -> BiasCurve:
    """Run a kernel at several step sizes and extrapolate its means and sds to h = 0.

    Without a Metropolis test, the bias of a mean or a standard deviation (sd) is b h to first
    order, for discretisation and minibatch noise alike. So a line is fitted to each moment over h,
    weighted by the inverse squares of the Monte Carlo errors. The line gives the unbiased value at
    h = 0 (Richardson extrapolation). The bias is b h over the sd at the smallest h. It has an error
    bar and needs no reference. An F test detects moments that a line does not fit. The bias errors
    and the F test account for small effective sample sizes, because these are uncertain themselves.

    The kernel warms up once, by its own rules, and learns metric, friction and step size. The
    kernel's own step size h is a number, or the median over chains of the automatic step sizes.
    Then the kernel is run at h times each of ``factors``, from the last state of the previous run.
    The time between draws is the same at every step size: the number of steps grows as h falls. So
    all runs have about the same number of effective draws. All runs share one compiled program. The
    cost is about the cost of ``sum(1 / f)`` ordinary runs.

    The limit h -> 0 need not be the posterior. Adam-SGLD, and SGRLD with ``gamma="none"`` or
    ``"published"``, are biased in this limit too, and this function cannot detect that bias. A
    metric that keeps adapting (``gamma="corrected"``) has an additional bias in h, rarely on
    a straight line.

    Args:
        kernel: a kernel with ``step_size="auto"`` or a number; it is not changed.
        rng_key: a key.
        *args: the model's arguments.
        factors: multiples of the kernel's own step size, at least three.
        num_warmup: draws of warm-up.
        num_samples: draws of each chain at each step size. Before them, a fifth as many draws are
            dropped.
        num_chains: number of vectorised chains. With more chains, the errors are better known.
        var_names: site or sites to report, which can be deterministic; None for the latent sites.
            Entries that never change, such as those above the diagonal of a Cholesky factor, are
            left out.
        init_params: start of each chain, as for `numpyro.infer.MCMC.run`; with a leading axis of
            chains if there are several.
        **kwargs: the model's keyword arguments.

    Returns:
        The curve; ``print`` shows it.

    Raises:
        TypeError: for kernels of other packages, and for other arguments of a wrong type.
        ValueError: for kernels without a bias from a step size, a step size that changes,
            temperature 0, values out of range, unknown sites, if no scalar moves, and if one
            moves in some runs only.

    Examples:
        >>> import jax
        >>> from numpyro_geom import SGRLD
        >>> from numpyro_geom.diagnostics import bias_vs_step
        >>> kernel = SGRLD(potential_fn=lambda z: z**2 / 2, gamma="none", step_size=0.4,
        ...                num_steps=5)
        >>> curve = bias_vs_step(kernel, jax.random.key(0), num_warmup=20, num_samples=500,
        ...                      num_chains=16, init_params=jax.numpy.zeros(16))
        >>> bool(curve.scalars[1].bias > 0.05)  # of the sd; 1 / sqrt(1 - h / 2) in theory
        True

    Source: Talay and Tubaro (1990) for the expansion in h; Vollmer, Zygalakis and Teh (JMLR 17,
    2016) for minibatch gradients.
    """
    sizes = _check(kernel, factors)
    check_key("the second argument, rng_key,", rng_key)
    num_warmup = check_int("num_warmup", num_warmup, least=0)
    num_samples = check_int("num_samples", num_samples, least=8)
    num_chains = check_int("num_chains", num_chains)
    if kernel.settings.schedule is None and num_warmup == 0:
        raise ValueError("step_size='auto' is found in warm-up, and num_warmup is 0: expected both")
    kernel = kernel.replace()
    keys = random.split(rng_key, num_chains)
    if num_chains == 1 and init_params is not None:
        init_params = jax.tree.map(lambda x: jnp.asarray(x)[None], init_params)
    state = kernel.init(keys, num_warmup, init_params, args, kwargs)
    constrain = jax.vmap(kernel.postprocess_fn(args, kwargs))
    names = _choose(jax.eval_shape(constrain, state.z), state.z, var_names)
    state = jax.jit(
        lambda s: lax.fori_loop(0, num_warmup, lambda _, s: kernel.sample(s, args, kwargs), s)
    )(state)
    given, num_steps = kernel.settings.step_size, kernel.settings.given_num_steps
    step_size = float(np.median(state.step_size) if isinstance(given, str) else given)
    num_steps = int(np.median(state.num_steps)) if num_steps is None else num_steps

    @jax.jit
    def reported(z: Any) -> dict[str, jax.Array]:
        # within the program, so that only the requested sites are computed and kept
        found = dict(paths(jax.vmap(constrain)(z), "z"))
        return {name: found[name] for name in names}

    step_sizes = tuple(step_size * factor for factor in sizes)
    steps = tuple(max(1, round(num_steps / factor)) for factor in sizes)
    # all runs share one program, with `unit` steps per call; a draw is one or several calls
    unit = math.gcd(*steps)
    dropped = -(-num_samples // 5)
    values, ends = jnp.asarray(step_sizes), jnp.cumsum((dropped + num_samples) * jnp.asarray(steps))

    def one_after_another(t: jax.Array) -> jax.Array:
        return values[jnp.searchsorted(ends[:-1], t, side="right")]

    given = kernel.settings.as_dict()
    found_out = {name: given[name] for name in CHOSEN if name in given}
    kernel = kernel.replace(step_size=one_after_another, num_steps=unit, **found_out)
    kernel.init(keys, 0, state.z, args, kwargs)
    state = state._replace(steps_taken=jnp.zeros_like(state.steps_taken))
    run = jax.jit(functools.partial(_run, kernel, dropped, num_samples, args, kwargs))
    found, undone, moved = [], [], []
    for h, number in zip(step_sizes, steps, strict=True):
        state, z, flags = run(state, jnp.asarray(number // unit))
        arrays = {name: np.asarray(x) for name, x in reported(z).items()}
        scalars = to_scalars(arrays, f"the run at h = {h:.3g}")
        found.append(estimate_moments(scalars.values))
        moved.append(np.any(np.ptp(scalars.values, axis=1) > 0, axis=0))  # some chain moves
        undone.append(int(flags.sum()))
    moves = np.any(moved, 0)
    if (stuck := named(scalars.names, moves & ~np.all(moved, 0))) or not moves.any():
        raise ValueError(
            f"expected scalars that vary, got {stuck or scalars.names}, constant in "
            f"{'one run but not in all' if stuck else 'all'} runs: look for undone steps"
        )
    found = [MomentEstimates(*(x[moves] for x in m)) for m in found]
    biases = fit_biases(named(scalars.names, moves), step_size, np.array(step_sizes), found)
    constant = named(scalars.names, ~moves)
    return BiasCurve(biases, step_size, step_sizes, steps, tuple(undone), constant)


def _run(
    kernel: SGKernel,
    dropped: int,
    num_samples: int,
    args: tuple,
    kwargs: dict,
    state: SGState,
    repeats: jax.Array,
) -> tuple[SGState, Any, jax.Array]:
    """Draws at a step size: the last state, positions (chains, draws, ...), undone steps."""

    def part(_: int, carry: tuple) -> tuple:
        state, undone = carry
        state = kernel.sample(state, args, kwargs)
        return state, undone | state.diverging

    def draw(state: SGState, _: None) -> tuple[SGState, Any]:
        start = state, jnp.zeros_like(state.diverging)
        state, undone = lax.fori_loop(0, repeats, part, start)
        return state, (state.z, undone)

    state = lax.fori_loop(0, dropped, lambda _, s: draw(s, None)[0], state)
    state, (z, undone) = lax.scan(draw, state, None, num_samples)
    return state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), z), undone


def _check(kernel: Any, factors: Any) -> tuple[float, ...]:
    """Check the kernel and return the factors in falling order."""
    if not isinstance(kernel, SGKernel):
        raise TypeError(
            f"expected a kernel of numpyro_geom, such as SGRLD(model), got {type(kernel).__name__}"
        )
    name = type(kernel).__name__
    if kernel.facts.adjusted:
        raise ValueError(f"the steps of this {name} are Metropolis-adjusted: they have no bias")
    if kernel.facts.bias is None:
        raise ValueError(f"the bias of {name} does not come from a step size, see its docstring")
    if callable(kernel.settings.step_size):
        raise ValueError(f"step_size must be 'auto' or a number, got {kernel.settings.step_size!r}")
    if kernel.settings.temperature == 0:
        raise ValueError("temperature must be above 0, got 0: there is no distribution to bias")
    if not isinstance(factors, Iterable):
        raise TypeError(f"factors must be a sequence of numbers, got {factors!r}")
    sizes = sorted({check_number("factors", f, above=0.0) for f in factors}, reverse=True)
    if len(sizes) < 3:
        raise ValueError(
            f"factors must be at least three different numbers, got {list(factors)}: with fewer "
            "nothing tells whether a line fits"
        )
    return tuple(sizes)


def _choose(values: Any, z: Any, names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names of the sites to report; by default the sites of the position."""
    known = [name for name, _ in paths(values, "z")]
    if names is None:
        return tuple(name for name, _ in paths(z, "z") if name in known) or tuple(known)
    return tuple(chosen(names, known, "the model"))


def fit_biases(
    names: tuple[str, ...], own: float, step_sizes: np.ndarray, found: list[MomentEstimates]
) -> tuple[ScalarBias, ...]:
    """Weighted least squares for mean and sd of all scalars, with one estimate per step size."""
    runs = MomentEstimates(*map(np.stack, zip(*found, strict=True)))
    size, scale = runs.least_size.min(0), own / runs.sd[-1]  # the limit can be below 0
    fits = {
        "mean": _fit(step_sizes, runs.mean, runs.mean_error, size, scale),
        "sd": _fit(step_sizes, runs.sd, runs.sd_error, size, scale),
    }
    return tuple(
        ScalarBias(
            name=name,
            moment=moment,
            values=tuple(fit["values"][:, k].tolist()),
            errors=tuple(fit["errors"][:, k].tolist()),
            **{n: float(x[k]) for n, x in fit.items() if x.ndim == 1},
        )
        for k, name in enumerate(names)
        for moment, fit in fits.items()
    )


def _fit(
    h: np.ndarray, values: np.ndarray, errors: np.ndarray, size: np.ndarray, scale: np.ndarray
) -> dict[str, np.ndarray]:
    """Fit values = limit + slope h with weights 1 / errors^2; fields as in `ScalarBias`.

    The errors are estimated from ``size`` effective draws, so the test of the residuals uses an F
    distribution.
    """
    weights = 1 / errors**2
    total = weights.sum(0)
    centre = (weights * h[:, None]).sum(0) / total
    offset = h[:, None] - centre
    spread = (weights * offset**2).sum(0)
    slope = (weights * offset * values).sum(0) / spread
    middle = (weights * values).sum(0) / total
    residual = (weights * (values - middle - slope * offset) ** 2).sum(0) / (len(h) - 2)
    return {
        "values": values,
        "errors": errors,
        "limit": middle - slope * centre,
        "limit_error": np.sqrt(1 / total + centre**2 / spread),
        "slope": slope,
        "slope_error": np.sqrt(1 / spread),
        "bias": scale * slope,
        "bias_error": scale * np.sqrt(1 / spread),
        "fit": fdtrc(len(h) - 2, np.maximum(size - 1, 1.0), residual),
        "ess": size,
    }
