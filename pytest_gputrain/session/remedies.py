"""Finds the change that makes a case fit which does not, by trying candidates, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.validation import problem
from pytest_gputrain.gate.fit import Need
from pytest_gputrain.records import Case, EmulatedRun
from pytest_gputrain.utils.units import format_bytes

Try = Callable[[Case], Need | None]
"""The memory of a changed case; None if there is none."""


def remedy(case: Case, figures: EmulatedRun, attempt: Try, *, may_fit: bool = False) -> str:
    """Return the end of a sentence: the cheapest change with which the case fits, or that no change is enough.

    Args:
        figures: of the case, which does not fit.
        may_fit: it may fit as it is, so it is no news that a change is not enough; then empty.
    """
    hint = _hint(case, figures)
    tried: list[tuple[str, int]] = []
    for change in _changes(case, has_logits=bool(hint)):
        changed = attempt(case.replace(**change))
        if changed is None:
            continue
        change_text = ", ".join(f"{knob}={str(value).lower()}" for knob, value in change.items())
        if changed.fits:
            needed = "" if changed.bytes is None else f", in {format_bytes(changed.bytes)}"
            return f"{change_text} makes it fit{needed}{'' if 'loss_chunks' in change else hint}"
        if changed.bytes is not None:
            tried.append((change_text, changed.bytes))
    if may_fit:
        return ""
    spread = "spread it over more GPUs" + ("" if case.parallel in ("fsdp", "zero3") else " (parallel=fsdp)")
    if not tried:
        return f"{spread}{hint}"
    least, bytes_ = min(tried, key=lambda one: one[1])
    return f"not even {least} makes it fit, which needs {format_bytes(bytes_)}; {spread}{hint}"


_CHUNKS: Final = 16


def _changes(case: Case, *, has_logits: bool) -> Iterator[dict[str, Any]]:
    """Yield changes, the cheapest first: a fused optimizer, a loss by chunks, checkpointing, ever smaller micro-batches, and
    these with checkpointing.

    Args:
        has_logits: whether any are at the peak.
    """
    if case.code:
        return
    if case.optimizer == "adamw" and case.parallel in ("single", "ddp", "fsdp"):
        yield {"optimizer": "adamw-fused"}
    if has_logits and case.loss_chunks == 1 and problem(case.replace(loss_chunks=_CHUNKS), case.platforms) is None:
        yield {"loss_chunks": _CHUNKS}
    checkpointing = {"activation_checkpointing": True} if case.activation_checkpointing is not True else {}
    checkpointing = checkpointing if architectures()[case.model].blocks else {}
    if checkpointing:
        yield checkpointing
    size, whole = case.batch_size, case.batch_size * case.gradient_accumulation
    while size > 1:
        size = size // 2 if size % 2 == 0 else 1
        yield {"batch_size": size, "gradient_accumulation": whole // size}
    if case.batch_size > 1 and checkpointing:
        yield {"batch_size": 1, "gradient_accumulation": whole, **checkpointing}


def _hint(case: Case, figures: EmulatedRun) -> str:
    """Describe what only a change of code can do."""
    words = None if case.code else _vocabulary(case)
    logits = [
        row
        for row in (figures.largest.get(figures.peak_phase, ()) if figures.peak_phase else ())
        if words and row.shape and row.shape[-1] == words
    ]
    if not logits or logits[0].operator == "aten.t":
        return ""
    size = format_bytes(sum(row.bytes for row in logits))
    return f"; {size} at the peak are logits ({words:,} words wide), which a loss fused with the output layer never holds"


def _vocabulary(case: Case) -> int | None:
    words = architectures()[case.model].trained_part.language.get("vocab_size")
    return words if isinstance(words, int) else None
