"""The tutorials run at a small size, and their pages show all of their output and figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tutorials
from pages import BLOCK

import numpyro_geom
from numpyro_geom import SGHMC, RiemannianLaplace

pytest.importorskip("matplotlib", reason="the examples extra is not installed")
DOCS = Path(__file__).parents[1] / "docs"
pytestmark = pytest.mark.filterwarnings(
    "ignore::numpyro_geom._checks.SamplingWarning"  # small runs are too short
)
PAGES = sorted(path.stem for path in (DOCS / "tutorials").glob("*.md"))


class Quick(SGHMC):
    """With no step size to find: most of the time of a small run is compiling."""

    def __init__(self, model=None, **settings):
        quick = {"step_size": 0.003, "friction": 1.0, "num_steps": 2, "batch_size": 128}
        settings = {**quick, **settings}
        super().__init__(model, **{**settings, "num_steps": 2})


def straight(model):
    """A guide whose draws need no geodesics."""
    return RiemannianLaplace(model, metric="euclidean", mode="hausdorff", precision="fisher")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpyro_geom, "SGHMC", Quick)
    monkeypatch.setattr(numpyro_geom, "RiemannianLaplace", straight)


SMALL = {
    "regression": {"= 500_000, 2_000, 1_000": "= 3_000, 300, 30"},
    "laplace": {"num_draws = 500": "num_draws = 50"},
    "hierarchical": {"= 10_000, 400_000, 1_000": "= 300, 600, 30"},
    "long_run": {"= 2_000_000, 1_000": "= 1_000, 40"},
    "network": {"= 1_438, 100, 100": "= 200, 16, 2"},
}
"""What runs in the place of a script's numbers."""


def small(name: str, out: Path) -> dict[str, str]:
    """Printed output of each part of a small run."""
    text = tutorials.script(name).read_text()
    assert all(text.count(line) == 1 for line in SMALL[name])
    return tutorials.run(name, out, SMALL[name])


def shown(name: str, kind: str) -> set[str]:
    """What is in the documentation of a tutorial, without what names have in common."""
    start = f"tutorial_{name}_"
    return {path.stem.removeprefix(start) for path in (DOCS / kind).glob(f"{start}*")}


@pytest.mark.parametrize("name", PAGES)
def test_page_includes_every_part_table_and_figure(name: str) -> None:
    """Its Python blocks are the parts of the script in their order, so the page runs as they do."""
    page = (DOCS / "tutorials" / f"{name}.md").read_text()
    lines = "".join(block[1] for block in BLOCK.finditer(page)).splitlines()
    parts = [part for part, _, _ in tutorials.parts(tutorials.script(name).read_text()) if part]
    assert lines == [
        f'--8<-- "examples/tutorial_{name}.py:{part}"'
        for part in parts
        if part not in tutorials.NOT_SHOWN
    ]
    tables = re.findall(rf'^--8<-- "tables/tutorial_{name}_(\w+)\.md"$', page, re.M)
    assert len(tables) == len(set(tables))
    assert set(tables) == shown(name, "tables")
    assert set(tables) <= set(parts)
    figures = re.findall(rf"\(\.\./figures/tutorial_{name}_(\w+)\.png\)", page)
    assert set(figures) == shown(name, "figures")
    sizes = [path.stat().st_size for path in (DOCS / "figures").glob(f"tutorial_{name}_*")]
    assert max(sizes, default=0) < 150_000


@pytest.mark.arviz
@pytest.mark.slow
def test_regression(tmp_path: Path) -> None:
    printed = small("regression", tmp_path)
    assert set(printed) == shown("regression", "tables")
    assert {p.stem for p in tmp_path.glob("*.png")} == shown("regression", "figures")
    assert printed["trial"].startswith("scalar ")
    assert printed["diagnose"].startswith("Verdict: ")
    choices = re.findall(r"^(?:a coupon|the best).*?([\d,]+) +(-?[\d,]+)$", printed["decide"], re.M)
    everybody, best = (float(gain.replace(",", "")) for _, gain in choices)
    assert best >= max(everybody, 0)
    assert (tmp_path / "coupons.nc").stat().st_size > 0


@pytest.mark.slow
def test_laplace(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the examples extra is not installed")
    printed = small("laplace", tmp_path)
    assert set(printed) == shown("laplace", "tables")
    assert {p.stem for p in tmp_path.glob("*.png")} == shown("laplace", "figures")
    shape = {
        name: float(k) for name, k in re.findall(r"^(\w+): k-hat (\S+)$", printed["both"], re.M)
    }
    assert set(shape) == {"centred", "noncentred"}


@pytest.mark.slow
def test_hierarchical(tmp_path: Path) -> None:
    printed = small("hierarchical", tmp_path)
    assert set(printed) == shown("hierarchical", "tables")
    assert {p.stem for p in tmp_path.glob("*.png")} == shown("hierarchical", "figures")
    assert len(re.findall(r"^(?:NUTS|SGHMC) ", printed["cost"], re.M)) == 3


@pytest.mark.slow
def test_long_run(tmp_path: Path) -> None:
    printed = small("long_run", tmp_path)
    assert set(printed) == shown("long_run", "tables")
    assert printed["resume"] == "40 draws per chain, finished: True\n"
    assert printed["same"].endswith("without a break: True\n")
    assert printed["longer"].startswith("80 draws per chain, finished: True\n")
    assert "differs in: data args[1]" in printed["changed"]


@pytest.mark.slow
def test_network(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the examples extra is not installed")
    pytest.importorskip("flax", reason="the test extra is not installed")
    printed = small("network", tmp_path)
    assert set(printed) == shown("network", "tables")
    assert {p.stem for p in tmp_path.glob("*.png")} == shown("network", "figures")
    assert len(re.findall(r"^(?:one|four|chains).*?( +[\d.]+){4}$", printed["predict"], re.M)) == 3
