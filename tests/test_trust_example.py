"""The trust example: the output of a quick run, and the contents of the page."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pages
import pytest
from scripts import load_script

pytest.importorskip("sklearn", reason="the examples extra is not installed")

pytestmark = pytest.mark.arviz
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("trust")


@pytest.mark.slow
def test_quick_run_writes_tables_and_figures(example: ModuleType, tmp_path: Path) -> None:
    example.main(["--quick", "--out", str(tmp_path)])
    tables = {path.name for path in (tmp_path / "tables").iterdir()}
    named = ("step", "compare_step", "summary", "bias_step")
    assert tables == {f"trust_{name}.md" for name in named}
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert figures == {f"trust_{name}.png" for name in ("step", "traces", "plane", "bias")}
    report = (tmp_path / "tables" / "trust_step.md").read_text()
    # h lam_H is about 2, so that the stiffest variance is twice the target's: 80 draws see that
    assert re.search(r"^!!  configurational temperature", report, re.M)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::numpyro_geom._checks.SamplingWarning")  # short runs
def test_page_runs_block_after_block() -> None:
    few = {"num_warmup=500, num_samples=1000": "num_warmup=30, num_samples=60, progress_bar=False"}
    assert len([*pages.run(ROOT / "docs" / "trust.md", few)]) == 8


def test_page_includes_every_table_and_figure() -> None:
    page = (ROOT / "docs" / "trust.md").read_text()
    included = set(re.findall(r'^--8<-- "(tables/trust_\w+\.md)"$', page, re.M))
    assert included == {f"tables/{p.name}" for p in (ROOT / "docs/tables").glob("trust_*.md")}
    shown = set(re.findall(r"\((figures/trust_\w+\.png)\)", page))
    files = list((ROOT / "docs/figures").glob("trust_*.png"))
    assert shown == {f"figures/{p.name}" for p in files}
    assert all(p.stat().st_size < 150_000 for p in files)
