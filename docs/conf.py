"""Sphinx's settings: these pages as a site, the README as its front page, the API reference from the docstrings.

``tox -e docs`` builds it, with warnings as errors. The pages are Markdown that reads the same on GitHub.
"""

from __future__ import annotations

import pkgutil
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils.nodes import Element
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.ext.napoleon import GoogleDocstring

project = "pytest-gputrain"
author = "The pytest-gputrain developers"
release = metadata.version(project)
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
myst_heading_anchors = 3

nitpicky = True
default_role = "any"
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_mock_imports = ["torch"]  # not needed to read docstrings
maximum_signature_line_length = 100

INDEX = Path(__file__).with_name("README.md")
MADE_BY_USERS = "pytest_gputrain.Case"
"""The only class whose signature is of use: users read objects of the others."""


def complete_pages(app: Sphinx, page: str, text: list[str]) -> None:
    """Give the front page the contents of docs/README.md, group by group; links to the README lead to the front page."""
    if page == "index":
        text[0] += "\n```{toctree}\n:hidden:\n\nREADME\n```\n"
        for group in INDEX.read_text().split("\n## ")[1:]:
            pages = "\n".join(re.findall(r"\]\(([\w-]+)\.md\)", group))
            text[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {group.splitlines()[0]}\n\n{pages}\n```\n"
    text[0] = text[0].replace("](../README.md", "](index.md")


def read_google_style(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """As the extension napoleon does, except that it takes what is before a colon in a field's docstring for a type."""
    if what == "data":  # of a number it is int's
        lines.clear()
    if what in ("class", "exception", "function", "method"):
        lines[:] = GoogleDocstring(lines, what=what, name=name, obj=thing).lines()


def leave_signature_out(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str] | None:
    return ("", "") if what == "class" and name != MADE_BY_USERS else None


def accept_what_exists(app: Sphinx, environment: Any, node: Element, content: Element) -> Element | None:
    """Show names that no page describes, if only they can be imported; another one is a warning, so an error."""
    target = node["reftarget"]
    if node.get("refdomain") != "py" and node.get("reftype") != "any":
        return None
    try:
        with mock(autodoc_mock_imports):
            pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError):
        return None
    return content


def copy_pictures(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures to where the pages, and the README among them, look for them in HTML of their own."""
    for folder in ("pictures", "docs/pictures"):
        shutil.copytree(Path(__file__).parent / "pictures", app.outdir / folder, dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    app.connect("build-finished", copy_pictures)
    app.add_lexer("mermaid", TextLexer)  # which code hosts draw
    app.connect("source-read", complete_pages)
    app.connect("autodoc-process-docstring", read_google_style)
    app.connect("autodoc-process-signature", leave_signature_out)
    app.connect("missing-reference", accept_what_exists)
