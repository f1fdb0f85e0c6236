"""What the documentation's site has besides docs/: pages of the repository's other folders, and linked files.

The pages link to each other by their places in the repository, so that they can also be read there.
A link out of docs/ leads to one of PAGES, or to a copy of the file under ``source/``. A link to a folder
becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {  # file of the repository -> page of the site
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "benchmarks/RESULTS.md": "results.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")

_EXAMPLE = re.compile(r"^(>>> .*(?:\n(?!\n).+)*)", re.MULTILINE)  # up to the next empty line


def linked(text: str, folder: str) -> tuple[str, list[str]]:
    """The Markdown of a page in ``folder``, with links for the site, and the files to copy."""
    files: list[str] = []
    place = os.path.relpath(folder, "docs") if folder.startswith("docs") else "."  # of the page on the site

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(os.path.join(folder, target))
        if path in PAGES:
            return f"[{label}]({os.path.relpath(PAGES[path], place)}{anchor})"
        if path.startswith("docs/"):
            return f"[{label}]({os.path.relpath(path.removeprefix('docs/'), place)}{anchor})"
        if (ROOT / path).is_dir():
            return label
        if path.startswith("..") or not (ROOT / path).is_file():
            raise PluginError(f"a page of {folder or 'the repository'} links to {target}, which is not there")
        files.append(path)
        return f"[{label}]({os.path.relpath(f'source/{path}', place)})"

    return _LINK.sub(link, text), files


def folder_of(page: File) -> str:
    return os.path.join("docs", os.path.dirname(page.src_uri)).rstrip("/")


def on_files(files: Files, config: Any) -> Files:
    copies: set[str] = set()
    for path, page in PAGES.items():
        text, more = linked((ROOT / path).read_text(encoding="utf-8"), os.path.dirname(path))
        files.append(File.generated(config, page, content=text))
        copies.update(more)
    for file in files.documentation_pages():
        if file.src_uri not in PAGES.values():
            copies.update(linked(file.content_string, folder_of(file))[1])
    for path in sorted(copies):
        files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown if page.file.src_uri in PAGES.values() else linked(markdown, folder_of(page.file))[0]


class Doctests(griffe.Extension):
    """The worked examples of a docstring stand in blocks of code, not in quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
