"""Runs the tests that look for a sentence that was changed, and then the unit tests: what CI will say of it, in two minutes.

    python tools/changed_sentences.py           what differs from the last commit; or from COMMIT, if one is named

A sentence is what stands in quotes. A test is found by three words in a row that the code no longer has: in the test, in the
rest of its file, or in its snapshots. Tests that the environment `tests` skips are only named, and so are pages.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
_SKIPPED: Final = {"emulated": ("tests/emulated", "tests/gpu"), "bare": ("tests/bare",)}
"""Folders of tests that need another environment than `tests`, by its name in tox.ini."""
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_BETWEEN: Final = re.compile(r"\{[^}]*\}|[^A-Za-z' -]+")
_GOES_ON: Final = re.compile(r'"\s*\n\s*[rf]*"')


def phrases(text: str) -> set[str]:
    """Return each three words that follow each other, or two that stand alone."""
    found: set[str] = set()
    for run in _BETWEEN.split(text):
        words = run.split()
        length = min(len(words), 3)
        found.update(" ".join(words[at : at + length]) for at in range(len(words) - length + 1) if length > 1)
    return found


def changed(diff: str) -> set[str]:
    """Return the phrases in quotes that a diff removes and does not add again."""
    lines: dict[str, set[str]] = {"-": set(), "+": set()}
    for line in diff.splitlines():
        if line[:1] in lines and line[:3] not in ("---", "+++"):
            for quoted in _QUOTED.findall(line):
                lines[line[0]] |= phrases(quoted)
    return lines["-"] - lines["+"]


def tests_of(path: Path, sought: set[str]) -> Iterator[str]:
    """Yield the ids of the tests of a file that have one of the phrases; the file, if the rest of it or its snapshots do."""
    lines = path.read_text().splitlines(keepends=True)
    tests: dict[str, str] = {}
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            tests[node.name] = "".join(lines[start : node.end_lineno])
            lines[start : node.end_lineno] = [""] * ((node.end_lineno or 0) - start)
    snapshots = path.parent / "__snapshots__" / f"{path.stem}.ambr"
    name = str(path.relative_to(ROOT))
    if _has("".join(lines), sought) or (snapshots.exists() and _has(snapshots.read_text(), sought)):
        yield name
    else:
        yield from (f"{name}::{test}" for test, text in tests.items() if _has(text, sought))


def _has(text: str, sought: set[str]) -> bool:
    joined = _GOES_ON.sub("", text)
    return any(phrase in joined for phrase in sought)


def main(arguments: Sequence[str]) -> int:
    commit = arguments[0] if arguments else "HEAD"
    command = ("git", "diff", "-U0", commit, "--", "pytest_gputrain")
    sought = changed(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    found = [each for path in sorted(ROOT.glob("tests/*/test_*.py")) for each in tests_of(path, sought)]
    print(f"phrases that are gone: {', '.join(sorted(sought)) or 'none'}")
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        if _has(page.read_text(), sought):
            print(f"shown on {page.relative_to(ROOT)}")
    named = [each for each in found if not each.startswith("tests/unit")]
    for environment, folders in _SKIPPED.items():
        if skipped := [each for each in named if each.startswith(folders)]:
            print(f"run by `tox -e {environment}`:", *skipped)
            named = [each for each in named if each not in skipped]
    pytest = (sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal")
    runs = (
        [*pytest, "--slow", "-m", "not (weekly or ray or recipes)", *named] if named else [],
        [*pytest, "tests/unit"],
    )
    return max(subprocess.run(run, cwd=ROOT, check=False).returncode for run in runs if run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
