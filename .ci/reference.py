"""A page for each public name, made in memory from the lists on the pages of topics.

A topic, ``docs/reference/TOPIC/index.md``, is an introduction and paragraphs of lines ``::: NAME``.
A paragraph becomes a page: it has the first name's name, and the others share it. The topic itself
shows a table of the names. The navigation has the pages under the topic.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

TOPIC = re.compile(r"reference/\w+/index\.md")
NAME = re.compile(r"^::: (.+)(\n    options:)?", flags=re.MULTILINE)
ALL = "<!-- all names -->"
"""What ``docs/api.md`` has in the place of the table of all names."""


def label(name: str) -> str:
    """A name without its module."""
    return name.rpartition(".")[2]


def link(name: str) -> str:
    """A reference to the description of a name."""
    return f"[`{label(name)}`][{name}]"


def page(paragraph: str, topic: str) -> str:
    """The text of a page: the first name is its title, and what its topic says comes last."""

    def block(match: re.Match[str]) -> str:
        level = 2 if match.start() else 1
        return f"\n::: {match[1]}\n    options:\n      heading_level: {level}"

    return f"{NAME.sub(block, paragraph)}\n\n---\n\n{topic}\n"


def grown(nav: Any, entry: Callable[[str], Any]) -> Any:
    """A navigation with ``entry(path)`` in the place of each path."""
    if isinstance(nav, str):
        return entry(nav)
    if isinstance(nav, dict):
        return {title: grown(below, entry) for title, below in nav.items()}
    return [grown(below, entry) for below in nav]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs when it knows the files, and before it reads the navigation."""
    handler = config.plugins["mkdocstrings"].get_handler("python")
    options = handler.get_options({})
    overview = ["| topic | names |", "|---|---|"]

    def entry(path: str) -> str | list[str | dict[str, str]]:
        if not TOPIC.fullmatch(path):
            return path
        topic = files.get_file_from_path(path)
        title, introduction, *paragraphs = topic.content_string.strip().split("\n\n")
        about = f"[{title[2:]}](index.md): {introduction}"
        pages: list[str | dict[str, str]] = [path]
        links, table = [], ["| name | what it is |", "|---|---|"]
        for paragraph in paragraphs:
            names = [match[1] for match in NAME.finditer(paragraph)]
            uri = path.replace("index.md", f"{label(names[0])}.md")
            files.append(File.generated(config, uri, content=page(paragraph, about)))
            pages.append({label(names[0]): uri})
            links += map(link, names)
            for name in names:
                summary = handler.collect(name, options).docstring.value.splitlines()[0]
                table.append(f"| {link(name)} | {summary} |")
        topic.content_string = "\n\n".join((title, introduction, "\n".join(table)))
        overview.append(f"| [{title[2:]}]({path}) | {', '.join(links)} |")
        return pages

    config.nav = grown(config.nav, entry)
    api = files.get_file_from_path("api.md")
    api.content_string = api.content_string.replace(ALL, "\n".join(overview))
    return files
