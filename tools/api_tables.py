#!/usr/bin/env python3
"""Writes the tables of docs/api.md from the code: every field of a case, and every platform's marker.

    tools/api_tables.py

A page on a code host shows tables, and not what Sphinx makes of the docstrings.
"""

from __future__ import annotations

import ast
from pathlib import Path

from pytest_gputrain.hardware.catalog import MARKERS
from pytest_gputrain.plugin.marker_help import lines as marker_lines
from pytest_gputrain.records import Case
from pytest_gputrain.records import case as module

PAGE = Path(__file__).parent.parent / "docs" / "api.md"


def fields() -> str:
    """Return the table of a case's fields: name, type, default, and the docstring below each."""
    tree = ast.parse(Path(module.__file__).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == Case.__name__)
    rows = []
    for field, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split()).replace("``", "`").replace("|", "\\|")
        kind = ast.unparse(field.annotation).replace("Whole", "int").replace("|", "\\|")
        default = "" if field.value is None else ast.unparse(field.value)
        rows.append(f"| `{ast.unparse(field.target)}` | `{kind}` | `{default}` | {text} |")
    return "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows])


def platforms() -> str:
    """Return the table of the platforms' markers."""
    told = dict(line.split(": gputrain: declared for ") for line in marker_lines() if ": gputrain: declared for " in line)
    return "\n".join(["| marker | declared for |", "|---|---|", *(f"| `{name}` | {told[name]} |" for name in MARKERS)])


TABLES = {"fields": fields, "platforms": platforms}


def filled(page: str) -> str:
    """Return the page with its tables as the code has them."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n\n", f"\n<!-- end of {name} -->"
        head, tail = page.partition(begin)[0], page.partition(end)[2]
        page = f"{head}{begin}{table()}\n{end}{tail}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
