"""The files of format 2 hold what those of format 1 held: keys, figures, and their order. Used once, then deleted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BEFORE = "732aa0c"
"""The commit before the files were rewritten."""
MOVED = {
    f"tests/unit/samples/format-2/{name}": f"tests/unit/samples/format-1-a08732f/{name}"
    for name in ("report.json", "history.jsonl")
}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def pairs(text: str) -> list[Any]:
    """Each line or document with its names in order and its numbers as they are written."""
    documents = text.splitlines() if text.startswith('{"') else [text]
    return [json.loads(one, object_pairs_hook=list, parse_float=str, parse_int=str) for one in documents]


COMMITTED = git("ls-tree", "-r", "--name-only", BEFORE, "baselines").split()


def test_no_file_came_or_went() -> None:
    assert len(COMMITTED) == 17
    assert sorted(str(path.relative_to(ROOT)) for path in (ROOT / "baselines").rglob("*.json")) == sorted(COMMITTED)


@pytest.mark.parametrize("name", [*COMMITTED, *MOVED])
def test_only_the_number_changed(name: str) -> None:
    before, after = pairs(git("show", f"{BEFORE}:{MOVED.get(name, name)}")), pairs((ROOT / name).read_text())
    for document in before:
        assert document[0] == ("format", "1")
        document[0] = ("format", "2")
    assert after == before
    assert len((ROOT / name).read_bytes()) == len(git("show", f"{BEFORE}:{MOVED.get(name, name)}").encode())
