"""The code of the home page and of the how-to pages runs, and prints what the pages show."""

from __future__ import annotations

import codeop
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from pages import BLOCK, OPTIONAL, with_scripts, words

from numpyro_geom.diagnostics.report import CHECKS

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [x for x in TEXTS if x.parent.name != "tables" and "```python" in x.read_text()]


def test_numbers_are_places_and_words_are_compared() -> None:
    assert words("sd 0.0101,\n  n 1,200") == words("sd 0.0099, n 950")
    assert words("[1. 1. -2e-3]") == words("[2. 3. 1e+4]")
    assert words("p = 1, so") == words("p = 0.42, so")
    assert words("ESS 5") != words("R-hat 5")


def test_a_block_and_what_it_prints() -> None:
    (block,) = BLOCK.finditer("a\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n")
    assert block.groups() == ("print(1)\n", "1\n")


def refused_at_a_prompt(code: str) -> str | None:
    """The first line that a plain prompt takes for an error, when it is given line by line."""
    compiler, given = codeop.CommandCompiler(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line in [*code.splitlines(), ""]:
            given.append(line)
            try:
                if compiler("\n".join(given), "<prompt>", "single") is not None:
                    given = []
            except SyntaxError:
                return line
    return "\n".join(given) or None


def test_a_prompt_needs_an_empty_line_after_a_function() -> None:
    assert refused_at_a_prompt("def f():\n    pass\n\nf()") is None
    assert refused_at_a_prompt("def f():\n    pass\nf()") == "f()"
    assert refused_at_a_prompt("class A:\n    x = 1\n\n    y = 2") == "    y = 2"


@pytest.mark.parametrize("page", TEXTS, ids=lambda x: x.stem)
def test_blocks_can_be_pasted_at_a_prompt(page: Path) -> None:
    if "a plain prompt ends a class" in page.read_text():
        return
    blocks = re.findall(r"^```python\n(.*?)^```", with_scripts(page.read_text()), re.M | re.S)
    assert [x for block in blocks if (x := refused_at_a_prompt(block))] == []


def test_a_table_is_as_old_as_its_last_new_number() -> None:
    newest = runpy.run_path(str(ROOT / ".ci" / "tables.py"))["newest"]
    commit = "commit {}\n\ndiff --git a/docs/tables/t.md b/docs/tables/t.md\n--- a\n+++ b\n@@\n{}\n"
    moved = commit.format("2026-01-03", "-| a | 1.5 | 2 |\n+| a b | 2 | 1.5 |")
    measured = commit.format("2026-01-02", "-| a | 1.4 | 2 |\n+| a | 1.5 | 2 |")
    assert newest(moved + measured) == {"t": "2026-01-02"}


def test_a_notebook_has_text_and_what_its_cells_printed_and_drew() -> None:
    notebook = runpy.run_path(str(ROOT / ".ci" / "notebooks.py"))["notebook"]
    page = ROOT / "docs" / "tutorials" / "hierarchical.md"
    cells = json.loads(notebook(page.read_text()))["cells"]
    text = "".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    assert "only one is subsampled" in text
    outputs = [x for cell in cells if cell["cell_type"] == "code" for x in cell["outputs"]]
    assert any("Verdict: fine." in x.get("text", "") for x in outputs)
    assert any("image/png" in x.get("data", {}) for x in outputs)


def test_pages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the examples extra is not installed")
    pytest.importorskip("flax", reason="the test extra is not installed")
    # compiled as quickly as the tests are, and with one device, as most readers have
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ["XLA_FLAGS"])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests" / "pages.py"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("package", sorted(OPTIONAL))
def test_what_blocks_of_pages_need(package: str) -> None:
    pytest.importorskip(package, reason="blocks of docs/how_to that need it are not run")


def test_gallery_shows_every_example() -> None:
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert examples <= set(re.findall(r"`(\w+\.py)`", gallery))


MODULES = ("", ".diagnostics", ".laplace.information", ".laplace")
ELSEWHERE = {"cyclical"}
"""The other name of the class of a schedule."""


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_every_public_name(module: str) -> None:
    topics = "\n".join(x.read_text() for x in (ROOT / "docs" / "reference").glob("*/index.md"))
    described = {x.rpartition(".")[2] for x in re.findall(r"^::: (.+)$", topics, re.M)}
    package = importlib.import_module(f"numpyro_geom{module}")
    assert set(package.__all__) - ELSEWHERE <= described


QUESTIONS = {
    "which kernel for 500,000 rows": ("choosing.md", ["many rows and a regression", "`SGHMC`"]),
    "what call": ("how_to/many_rows.md", ["MCMC(SGHMC(model), num_warmup=1000"]),
    "what gain": ("choosing.md", ["seconds to 1,000 effective draws", "NUTS"]),
    "is it right": ("trust.md", ["print(diagnose(mcmc))", "What each tool cannot see"]),
    "diagnose flagged my run": ("how_to/flagged.md", ["what to change", "minibatch noise binds"]),
    "how to plot in ArviZ": ("how_to/arviz.md", ["to_inference_data", "az.plot_trace"]),
    "my own kernel or metric": ("extending.md", ["## A kernel", "## A metric"]),
    "data from a file": ("how_to/data.md", ["read_csv", "Parquet", "DataLoader"]),
    "more rows than memory": ("large_data.md", ["HostRows(np.load", "Private memory"]),
    "hierarchies": ("how_to/hierarchical.md", ["Centred or not?", "200,000 rows"]),
    "which call": ("cheat_sheet.md", ["leaves invariant", "cost"]),
    "short answers": ("faq.md", ["Is it faster than NUTS?"]),
    "how for a network": ("how_to/network.md", ["random_flax_module", "train(", "Microcanonical("]),
    "a warning": ("warnings.md", ["<!-- all warnings -->", "how_to/flagged.md"]),
    "how to cite": ("about.md", ["CITATION.cff", "REPOSITORY/issues", "Apache"]),
    "nnx and equinox": ("how_to/modules.md", ["random_nnx_module", "random_eqx_module"]),
    "PyMC": ("how_to/from_pymc.md", ["get_jaxified_logp", "takes all rows"]),
    "marketing mix": ("how_to/marketing_mix.md", ["regions", "carry-over"]),
    "updating with new data": ("how_to/new_rows.md", ["init_to_draws", "new data"]),
    "how to resume": ("how_to/resume.md", ["run the same script again", "directory="]),
}
"""What a newcomer asks: the page with the answer, and words of the answer."""


def links(page: Path) -> set[Path]:
    """Pages that the text of a page links."""
    found = re.findall(r"\]\(([\w./]+\.md)(?:#[\w-]+)?\)", page.read_text())
    return {(page.parent / x).resolve() for x in found}


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_two_clicks_from_home(question: str) -> None:
    name, answer = QUESTIONS[question]
    page = ROOT / "docs" / name
    first = links(ROOT / "docs" / "index.md")
    assert page in first.union(*map(links, first))
    text = " ".join(page.read_text().split())
    assert all(word in text for word in answer)


def test_every_line_of_a_report_is_explained() -> None:
    text = (ROOT / "docs" / "how_to" / "flagged.md").read_text()
    table = text.partition("## The lines of the report")[2].partition("\n## ")[0]
    cells = {line.split("|")[1] for line in table.splitlines() if line.startswith("|")}
    explained = {name.strip() for cell in cells for name in cell.split(";")}
    assert {name.partition(",")[0] for name in CHECKS} <= explained
