"""Runs the code blocks of documentation pages, and compares or writes their output.

    python tests/pages.py [--write] docs/index.md docs/how_to/*.md

The blocks of a page share a namespace; different pages do not. A text block directly after a Python
block is the output of that block. For numbers, only their places are compared, because the values
differ between machines.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import linecache
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "how_to").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
INCLUDE = re.compile(r'^--8<-- "(examples/[\w.]+?)(?::(\w+))?"$', re.M)
OPTIONAL = {"arviz_stats", "bambi", "pandas", "pyarrow", "torch"}
"""Without one of these packages a page runs up to the block that needs it."""
NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})*\.?\d*(?:e[-+]?\d+)?|inf\b|nan\b)")


def words(text: str) -> str:
    """The text with one symbol for each number, and one space for any whitespace."""
    return re.sub(r"\s+", " ", NUMBER.sub("#", text)).strip()


def with_scripts(page: str) -> str:
    """The text of a page with the parts of scripts that it includes."""

    def part(match: re.Match) -> str:
        text, name = (ROOT / match[1]).read_text(), match[2]
        if name is not None:
            _, _, text = text.partition(f"# --8<-- [start:{name}]\n")
            text, _, _ = text.partition(f"# --8<-- [end:{name}]\n")
        return text.removesuffix("\n")  # empty lines at the end of a part are on the page, too

    return INCLUDE.sub(part, page)


def changed(code: str, small: dict[str, str]) -> str:
    """The code with each of these lines in the place of another."""
    for line, other in small.items():
        code = code.replace(line, other)
    return code


def run(
    path: Path, small: dict[str, str] | None = None, names: dict | None = None
) -> Iterator[tuple[re.Match, str]]:
    """The blocks of a page, and the output of each.

    Args:
        path: the page.
        small: texts of the code, and what runs in place of each.
        names: the namespace of the code, empty before.
    """
    text, small = path.read_text(), small or {}
    names = {} if names is None else names
    names["__name__"] = "page"
    missing = [line for line in small if with_scripts(text).count(line) != 1]
    if missing:
        raise ValueError(f"expected once on {path.name}: {missing}")
    for k, block in enumerate(BLOCK.finditer(text)):
        code = changed(with_scripts(block[1]), small)
        name = f"<{path.name}, block {k + 1}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, name, "exec", dont_inherit=True), names)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            print(f"{path.name}: no block after block {k} was run, for want of {error.name}")
            return
        lines = [line.rstrip() for line in printed.getvalue().strip("\n").splitlines()]
        yield block, "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Run the pages; the exit status is 1 if the output of a page differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="*", default=PAGES)
    parser.add_argument("--write", action="store_true", help="put what is printed into the pages")
    options = parser.parse_args()
    wrong = []
    gc.set_threshold(50_000)  # as in the tests
    for path in map(Path.resolve, options.pages):
        start = time.process_time()
        text = path.read_text()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for block, printed in run(path):
                if words(printed) == words(block[2] or ""):
                    continue
                wrong.append(f"{path}: expected\n{block[2]}\nand got\n{printed}")
                shown = f"```python\n{block[1]}```\n\n```text\n{printed}```\n"
                text = text.replace(block[0], shown)
        if options.write:
            path.write_text(text)
        print(f"{path.name}: {time.process_time() - start:.1f} s", flush=True)
    if wrong and not options.write:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
