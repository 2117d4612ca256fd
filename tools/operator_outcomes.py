"""Outcomes of samples of torch's databases on an emulated GPU, and the table that they make."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

KINDS: Final = {
    "known": "operators, known inputs",
    "unknown": "operators, unknown inputs",
    "sparse": "operators, sparse inputs",
    "module": "modules",
    "optimizer": "optimizers",
    "error": "operators' error inputs",
    "memory": "checks of torch.cuda, most of memory",
    "value": "known values of operators",
}
"""The rows of the table."""

AGREES: Final = "agrees"
ASSUMED: Final = "assumed"
"""It agrees as far as the report of the run says what its sizes rest on."""
RAISED: Final = "raised"
"""It raised an error on the emulated GPU only."""
WRONG: Final = "wrong"
CRASHED: Final = "crashed"
"""Its process ended before it had run all samples."""
LEFT_OUT: Final = "left out"


class Outcome(NamedTuple):
    """The outcome of one sample."""

    kind: str
    name: str
    verdict: str
    reason: str = ""
    sample: int = 0


def difference(one: Any, other: Any) -> str:
    """Describe the first difference of two signatures, of which the first is the emulated GPU's."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        if one and isinstance(one[0], str) and one[0].startswith("torch.") and other[0] != one[0]:
            return f"{one[0]} in place of {other[0]}"
        found = next((pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]), None)
        if found is not None:
            numbers = all(isinstance(side, list) and all(isinstance(n, int) for n in side) for side in found)
            return f"{found[0]} in place of {found[1]}" if numbers else difference(*found)
    if isinstance(one, dict) and isinstance(other, dict):
        key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
        return f"{key}: {difference(one.get(key), other.get(key))}"
    if isinstance(one, list) and isinstance(other, list):
        return f"{len(one)} elements in place of {len(other)}"
    return f"{one} in place of {other}"


def share(outcomes: Iterable[Outcome]) -> tuple[int, int]:
    """Return how many agree, and of how many."""
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    agree = counts[AGREES] + counts[ASSUMED]
    return agree, counts.total() - counts[LEFT_OUT]


def table(outcomes: Sequence[Outcome]) -> str:
    """Write the shares, and then what does not agree."""
    lines = [
        "| | agree | of | by an assumption | raised | wrong | crashed | left out |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, title in KINDS.items():
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        if not own:
            continue
        counts = collections.Counter(outcome.verdict for outcome in own)
        agree, of = share(own)
        percent = f"{math.floor(10000 * agree / of) / 100:.2f} %" if of else ""
        cells = (f"{counts[verdict]:,}" for verdict in (ASSUMED, RAISED, WRONG, CRASHED, LEFT_OUT))
        lines.append(f"| {title} | {percent} | {of:,} | {' | '.join(cells)} |")
    failing = [outcome for outcome in outcomes if outcome.verdict in (RAISED, WRONG, CRASHED)]
    groups = collections.Counter((outcome.kind, outcome.name, outcome.reason) for outcome in failing)
    if groups:
        lines += ["", "| kind | name | samples | reason |", "| --- | --- | --- | --- |"]
    order = list(KINDS)
    for kind, name, reason in sorted(groups, key=lambda group: (order.index(group[0]), group)):
        text = reason.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {kind} | {name} | {groups[kind, name, reason]:,} | {text} |")
    return "\n".join(lines)
