"""Rewrites the committed files of format 1 to format 2: their number and nothing else. Used once, and deleted after it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    samples = ROOT / "tests" / "unit" / "samples" / "format-2"
    files = [*(ROOT / "baselines").rglob("*.json"), *samples.rglob("*.json*")]
    for path in files:
        data, changed = re.subn(rb'^( |\{)"format":( ?)1,', rb'\1"format":\g<2>2,', path.read_bytes(), flags=re.MULTILINE)
        assert changed, f"{path} has no format"
        path.write_bytes(data)
    print(f"{len(files)} files rewritten")


if __name__ == "__main__":
    main()
