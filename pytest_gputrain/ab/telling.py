"""A comparison, printed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from pytest_gputrain.records import Result
from pytest_gputrain.report import layout, terminal

FAILING: Final = ("regressed", "failed")
_UNBOUNDED: Final = 1000


def tell(results: Sequence[Result], more: Iterable[str]) -> tuple[str, ...]:
    """Print the table, what changed, and what was not compared; the last of these is returned, too."""
    on_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if on_terminal else _UNBOUNDED
    changed = [
        result.verdict.sentence
        for result in results
        if result.verdict is not None and result.verdict.status in (*FAILING, "improved")
    ]
    notes = (*terminal.explain(results), *more)
    layout.put("\n".join([terminal.render(results, width=width, colour=on_terminal), *changed, *notes]))
    return notes
