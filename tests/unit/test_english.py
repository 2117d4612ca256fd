"""The docstrings of the package's functions begin with a verb (PEP 257)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parents[2] / "pytest_gputrain"
_NO_VERBS = frozenset(
    "a all an as at both by every for from how in of one that the these those what where whether which why with".split()
)
"""First words of sentences that describe a result or a condition, but not what the function does."""


def _fragments(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or any("property" in ast.unparse(part) for part in node.decorator_list):
            continue
        docstring = ast.get_docstring(node) or "None"
        if docstring.split()[0].rstrip(",.:").lower() in _NO_VERBS:
            yield f"{node.name}: {docstring.splitlines()[0]}"


@pytest.mark.parametrize("path", sorted(_PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_docstrings_of_functions_begin_with_a_verb(path: Path) -> None:
    assert not list(_fragments(path.read_text()))


def test_a_fragment_is_found() -> None:
    source = 'def found():\n    """Of two, the first."""\n\ndef fine():\n    """Return the first of two."""\n'
    assert list(_fragments(source)) == ["found: Of two, the first."]
