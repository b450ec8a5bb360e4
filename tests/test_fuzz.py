"""Random arguments end in right answers or typed errors: `fuzz_arguments.py` looks for more cases.

The cases are few and fixed here. Run the script for a longer search.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from scripts import load_script
from tiers import short

fuzz = load_script("benchmarks/fuzz_arguments")
Arguments, CALLS = fuzz.Arguments, fuzz.CALLS
QUICK = tuple(
    sorted(
        {
            *("RMSprop", "Wenzel", "Monge", "Shampoo", "Identity", "Expanded"),
            *("cyclical", "HostRows", "compare_draws", "fisher_root"),
            "PredictionStream",
        }
    )
)
"""Calls that compile nothing, or little."""
SLOW = ("SGRLD", "SGHMC", "SGNHT", "GGMC", "ISGD", "AdamSGLD", "diagnose")
SLOW_KEPT = ("SGHMC", "SGNHT", "ISGD", "AdamSGLD", "diagnose")


def check(case) -> None:
    outcome = fuzz.outcome_of(case)
    assert outcome.kind not in fuzz.FAILURES, f"{case}: {outcome}"


@pytest.mark.parametrize("call", QUICK)
def test_arguments_of_quick_calls(call: str) -> None:
    rng = np.random.default_rng([0, *call.encode()])
    check(Arguments(call, ()))
    for _ in range(30):
        check(fuzz.random_case(rng, (call,)))


@pytest.mark.parametrize("call", short(SLOW, kept=SLOW_KEPT))
def test_arguments_of_kernels_and_reports(call: str) -> None:
    rng = np.random.default_rng([0, *call.encode()])
    for _ in range(15):
        check(fuzz.random_case(rng, (call,)))


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", ["Ellipsis", "dates"])
def test_no_argument_takes_what_it_cannot_use(call: str, value: str) -> None:
    for name in CALLS[call].arguments():
        outcome = fuzz.outcome_of(Arguments(call, ((name, value),)))
        assert outcome.kind in ("typed error", "error of the user's function"), (name, outcome)


FOUND = {
    "Monge alpha2=10**400": "alpha2 must be a finite number",
    "Expanded right=float16": "right must be an integer of at least 0, got array",
    "diagnose var_names=0.5": "var_names must be a name or a list of names, got 0.5",
    "compare_draws var_names=mcmc": "var_names must be a name or a list of names, got MCMC",
    "PredictionStream labels=keys": "labels must be an array",
    "PredictionStream batch=key": "predictions must be an array, got .*which NumPy cannot read",
    "RiemannianLaplace.sample_posterior params=0.0": "expected params with 'auto_loc'.* got float",
    "RiemannianLaplace.sample_posterior params=matrix": "expected params .* got ndarray",
    "train y=jax": r"values of site 'y' have shape \(12, 2\), and its dist.* \(12,\): exp",
    "SGRLD x=complexes": "the energy of the model is complex: expected a real one",
    "GGMC potential_fn=distribution": "potential_fn must be a function, got .*Normal",
    "RiemannianLaplace.sample_posterior sample_shape=texts": "sample_shape must be an integer",
    "SGNHT divergence=3-D": "SGNHT got an unexpected keyword argument 'divergence'",
}
"""Cases that once ended in another way, and the error of each now."""


# the guide of these is fitted first
FITTED = {name for name in FOUND if name.startswith("RiemannianLaplace.sample_posterior")}


@pytest.mark.parametrize(
    ("case", "match"),
    short(FOUND.items(), kept=[item for item in FOUND.items() if item[0] not in FITTED]),
    ids=FOUND,
)
def test_cases_that_failed_once(case: str, match: str) -> None:
    call, _, change = case.partition(" ")
    name, _, value = change.partition("=")
    outcome = fuzz.outcome_of(Arguments(call, ((name, value),)))
    assert outcome.kind == "typed error", outcome
    assert re.search(match, outcome.told), outcome


def test_the_error_of_a_model_is_not_that_of_a_conversion() -> None:
    """Strings in a list cannot become floats, which is not why the model fails."""
    outcome = fuzz.outcome_of(Arguments("ISGD", (("y", "['w']"),)))
    assert "could not convert" not in outcome.told
