"""Sphinx's settings: these pages as a site, with the README as its front page.

``tox -e docs`` builds it, with warnings as errors. The pages are Markdown that reads the same on GitHub.
"""

from __future__ import annotations

import re
import shutil
from importlib import metadata
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

project = "pytest-gputrain"
author = "The pytest-gputrain developers"
release = metadata.version(project)
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
myst_heading_anchors = 3

INDEX = Path(__file__).with_name("README.md")


def complete_pages(app: Sphinx, page: str, text: list[str]) -> None:
    """Give the front page the contents of docs/README.md, group by group; links to the README lead to the front page."""
    if page == "index":
        text[0] += "\n```{toctree}\n:hidden:\n\nREADME\n```\n"
        for group in INDEX.read_text().split("\n## ")[1:]:
            pages = "\n".join(re.findall(r"\]\(([\w-]+)\.md\)", group))
            text[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {group.splitlines()[0]}\n\n{pages}\n```\n"
    text[0] = text[0].replace("](../README.md", "](index.md")


def copy_pictures(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures to where the pages, and the README among them, look for them in HTML of their own."""
    for folder in ("pictures", "docs/pictures"):
        shutil.copytree(Path(__file__).parent / "pictures", app.outdir / folder, dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    app.connect("build-finished", copy_pictures)
    app.add_lexer("mermaid", TextLexer)  # which code hosts draw
    app.connect("source-read", complete_pages)
