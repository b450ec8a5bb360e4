"""The kernel and the metric of docs/extending.md: they run, are correct, and are short."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pages
import pytest
from targets import KERNELS

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "extending.py"


@pytest.fixture(scope="module")
def page() -> dict:
    """The names of the page after its blocks have run, one after another."""
    names: dict = {}
    for block, printed in pages.run(ROOT / "docs" / "extending.md", names=names):
        assert pages.words(printed) == pages.words(block[2] or "")
    return names


def test_toy_kernel_and_metric_sample_the_posterior(page: dict) -> None:
    # the posterior's is 0.1; bias_tolerance allows 5% of it, and 2,000 draws of an autocorrelation
    # of e^-1/2 (about 480 in effect) have a standard error of 3.2%: four of them
    assert [*page["spreads"]] == ["ClippedSGLD", "SGHMC"]
    for spread in page["spreads"].values():
        assert spread == pytest.approx(0.1, rel=0.05 + 4 * 0.032)


@pytest.mark.parametrize("part", ["kernel", "metric"])
def test_each_takes_fewer_than_sixty_lines(part: str) -> None:
    text = SCRIPT.read_text()
    found = re.search(rf"# --8<-- \[start:{part}\]\n(.*?)# --8<-- \[end:{part}\]", text, re.DOTALL)
    assert found is not None
    assert found.group(1).count("\n") < 60


def test_an_argument_of_its_own_is_recorded_and_replaced(page: dict) -> None:
    kernel = page["ClippedSGLD"](potential_fn=lambda z: z @ z / 2, most=5.0)
    assert kernel.settings.record()["most"] == 5.0
    assert kernel.replace(most=7.0).settings.most == 7.0
    assert "most=5.0" in repr(kernel)
    with pytest.raises(ValueError, match="most must be a finite number above 0"):
        kernel.replace(most=-1.0)
    with pytest.raises(ValueError, match="temperature must be"):
        kernel.replace(temperature=-1.0)
    with pytest.raises(AttributeError, match=r"settings are frozen: use kernel.replace\(most"):
        kernel.settings.most = 3.0


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_docstring_describes_each_argument(kernel: type) -> None:
    """Entries of shared arguments are added; the order is that of the signature."""
    entries = inspect.getdoc(kernel).partition("\nArgs:\n")[2].partition("\n\n")[0]  # type: ignore
    assert re.findall(r"^ {4}(\w+): ", entries, re.MULTILINE) == [
        *inspect.signature(kernel).parameters
    ]
