"""Runs the code blocks of documentation pages, and compares or writes their output.

    python tests/pages.py [--write] docs/index.md docs/how_to/*.md

The blocks of a page share a namespace; different pages do not. A text block directly after a Python
block is the output of that block. For numbers, only their places are compared, because the values
differ between machines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import linecache
import re
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "how_to").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*(?:e[-+]?\d+)?|inf\b|nan\b)")


def words(text: str) -> str:
    """The text with one symbol for each number, and one space for any whitespace."""
    return re.sub(r"\s+", " ", NUMBER.sub("#", text)).strip()


def run(path: Path) -> Iterator[tuple[re.Match, str]]:
    """The blocks of a page, and the output of each."""
    text, names = path.read_text(), {"__name__": "page"}
    for k, block in enumerate(BLOCK.finditer(text)):
        name = f"<{path.name}, block {k + 1}>"
        linecache.cache[name] = (len(block[1]), None, block[1].splitlines(True), name)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block[1], name, "exec"), names)
        lines = [line.rstrip() for line in printed.getvalue().strip("\n").splitlines()]
        yield block, "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Run the pages; the exit status is 1 if the output of a page differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="*", default=PAGES)
    parser.add_argument("--write", action="store_true", help="put what is printed into the pages")
    options = parser.parse_args()
    wrong = []
    for path in options.pages:
        start = time.process_time()
        text = path.read_text()
        for block, printed in run(path):
            if words(printed) == words(block[2] or ""):
                continue
            wrong.append(f"{path}: expected\n{block[2]}\nand got\n{printed}")
            text = text.replace(block[0], f"```python\n{block[1]}```\n\n```text\n{printed}```\n")
        if options.write:
            path.write_text(text)
        print(f"{path.name}: {time.process_time() - start:.1f} s", flush=True)
    if wrong and not options.write:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
