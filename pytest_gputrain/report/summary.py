"""Writes a run in Markdown for the page of a CI job: first what failed, then a row for every case.

GitHub takes it from the file that ``GITHUB_STEP_SUMMARY`` names, up to 1 MiB for a step; of more it shows nothing at all.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from pytest_gputrain.gate.messages import count, listed
from pytest_gputrain.hardware.catalog import CPU, title_of
from pytest_gputrain.records import FAILING, STRICTLY_FAILING, Emulated, Result
from pytest_gputrain.report import published, terminal
from pytest_gputrain.report.github import Failure
from pytest_gputrain.report.results import BY_ATTENTION, count_columns, latest, verdict_of
from pytest_gputrain.utils import markdown
from pytest_gputrain.utils.files import write_atomically
from pytest_gputrain.utils.units import format_bytes, format_seconds

MOST_BYTES: Final = 1024 * 1024
"""The most that all commands of a step may write together."""
_HEADERS: Final = ("Verdict", "Suite", "Case", "Device", "Sec/step", "Δ time", "Peak memory", "Δ memory")
_MOST_NOTES: Final = 3
"""The notes that are shown unfolded."""
_TO_ACCEPT: Final = re.compile(rf"^(- \*\*|## .*\b\d+ ({'|'.join((*FAILING, *STRICTLY_FAILING))})\b)", re.MULTILINE)
_CUT: Final = "\n\nCut here, because GitHub shows 1 MiB of a step at most. The report of `--gpu-json` has all.\n"
_UNFOLDED: Final = "\n\n</details>"


def write(
    target: Path | Literal["auto", "none"], results: Sequence[Result], failures: Sequence[Failure], notes: Sequence[str]
) -> None:
    """Write the summary of a run, if the run is to have one.

    Args:
        target: a file, which is replaced; ``auto`` for the one that GitHub names, which is appended to, or none elsewhere.

    Raises:
        OSError: it cannot be written.
    """
    named = os.environ.get("GITHUB_STEP_SUMMARY", "") if target == "auto" else ""
    if target == "none" or (target == "auto" and not named):
        return
    summary_lines = lines(results, failures, notes)
    if isinstance(target, Path):
        write_atomically(target, fitted(summary_lines, MOST_BYTES).encode())
        return
    path = Path(named)
    present = path.stat().st_size if path.exists() else 0
    with path.open("a", encoding="utf-8") as file:  # Other commands of the CI step may write to it, too.
        file.write(fitted(summary_lines, MOST_BYTES - present))


def lines(results: Sequence[Result], failures: Sequence[Failure], notes: Sequence[str], title: str = "") -> list[str]:
    """Return the whole summary.

    Args:
        title: of the heading, if it is not the one that names the devices.
    """
    shown = latest(results)
    title = title or " on ".join(filter(None, ("gputrain", listed(dict.fromkeys(map(_device, shown))))))
    columns = count_columns(shown)
    rows = (_row(result, [column[at] for column in columns.values()]) for at, result in enumerate(shown))
    cases = sorted(rows, key=lambda row: BY_ATTENTION.index(row[0]))
    counts = Counter(row[0] for row in cases)
    counted_verdicts = ", ".join(f"{counts[status]} {status}" for status in BY_ATTENTION if counts[status])
    summary_lines = [f"## {markdown.escaped(title)}: {counted_verdicts or 'no case has run'}", ""]
    summary_lines += [
        f"- **{markdown.escaped(failure.title)}** {markdown.escaped(failure.sentence)}" for failure in failures
    ]
    summary_lines += [""] if failures else []
    if cases:
        summary_lines += [*markdown.table((*_HEADERS, *columns), cases), ""]
    noted = [f"- {markdown.escaped(note)}" for note in notes]
    if len(noted) > _MOST_NOTES:
        noted = [f"<details><summary>{count(len(noted), 'note')}</summary>", "", *noted, "", "</details>"]
    return [*summary_lines, *noted, ""]


def is_to_accept(text: str) -> bool:
    """Tell whether a summary has a failure or a case without a comparable baseline, or no heading that could say so."""
    return bool(_TO_ACCEPT.search(text)) or not text.startswith("## ")


def _device(result: Result) -> str:
    if isinstance(result, Emulated):
        return f"an emulated {title_of(result.platform)}"
    return "a CPU" if result.device == CPU else result.device


def _row(result: Result, counts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(result, Emulated) and result.figures is not None:
        seconds, peak = "", format_bytes(result.figures.peak_allocated_bytes)
    elif result.summary is not None:
        seconds = format_seconds(result.summary.median_step_seconds)
        peak = format_bytes(result.summary.peak_allocated_bytes)
    else:
        seconds = peak = published.outcome(result)
    changes = (terminal.change("step_seconds", result), terminal.change("peak_allocated_bytes", result))
    return (verdict_of(result), result.suite, result.key, result.device, seconds, changes[0], peak, changes[1], *counts)


def fitted(summary_lines: Sequence[str], most_bytes: int) -> str:
    """Return as many of the lines as fit into ``most_bytes``, with a sentence if some are left out.

    A folded part ends at the cut, because the sentence would be hidden in it.
    """
    whole = "\n".join(summary_lines)
    if len(whole.encode()) <= most_bytes:
        return whole
    bytes_left = most_bytes - len(_CUT.encode()) - len(_UNFOLDED)
    fitting: list[str] = []
    for line in summary_lines:
        bytes_left -= len(line.encode()) + 1
        if bytes_left < 0:
            break
        fitting.append(line)
    is_folded = sum(line.startswith("<details>") for line in fitting) > fitting.count("</details>")
    return "\n".join(fitting) + (_UNFOLDED if is_folded else "") + _CUT if fitting else ""
