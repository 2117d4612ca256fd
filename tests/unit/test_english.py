"""The docstrings of the package's functions begin with a verb (PEP 257)."""

import ast
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parents[2] / "pytest_gputrain"
_NO_VERBS = {
    *("a", "all", "an", "as", "at", "both", "by", "every", "for", "from", "how", "in"),
    *("of", "one", "that", "the", "these", "those", "what", "where", "whether", "which", "why", "with"),
}
"""First words of sentences that describe a result or a condition, but not what the function does."""


def _fragments(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or any("property" in ast.unparse(part) for part in node.decorator_list):
            continue
        docstring = ast.get_docstring(node) or "None"
        if docstring.split()[0].rstrip(",.:").lower() in _NO_VERBS:
            yield f"{node.name}: {docstring.splitlines()[0]}"


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = [
        f"{path.relative_to(_PACKAGE)}: {text}" for path in _PACKAGE.rglob("*.py") for text in _fragments(path.read_text())
    ]
    assert not found, "\n".join(sorted(found))


def test_a_fragment_is_found() -> None:
    source = 'def found():\n    """Of two, the first."""\n\ndef fine():\n    """Return the first of two."""\n'
    assert list(_fragments(source)) == ["found: Of two, the first."]
