"""Finds the change that makes a case fit which does not, by predicting candidates, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.validation import problem
from pytest_gputrain.gate.prediction import needed_bytes
from pytest_gputrain.records import Case, Prediction
from pytest_gputrain.utils.units import format_bytes

Predict = Callable[[Case], Prediction | None]
"""The prediction of a changed case; None where there is none."""


def remedy(case: Case, prediction: Prediction, predict: Predict, *, may_fit: bool = False) -> str:
    """Return a sentence's end: the cheapest change under which the case fits, or that none of those tried is enough.

    Args:
        prediction: of the case, which does not fit.
        may_fit: it may fit as it is, so it is no news that a change is not enough; then empty.
    """
    hint = _hint(case, prediction)
    tried: list[tuple[str, int]] = []
    for change in _changes(case, has_logits=bool(hint)):
        changed = predict(case.replace(**change))
        if changed is None:
            continue
        change_text = ", ".join(f"{knob}={str(value).lower()}" for knob, value in change.items())
        needed = needed_bytes(changed)
        if changed.fits:
            return f"{change_text} makes it fit, in {format_bytes(needed)}{'' if 'loss_chunks' in change else hint}"
        tried.append((change_text, needed))
    if may_fit:
        return ""
    spread = "spread it over more GPUs" + ("" if case.parallel in ("fsdp", "zero3") else " (parallel=fsdp)")
    if not tried:
        return f"{spread}{hint}"
    least, needed = min(tried, key=lambda attempt: attempt[1])
    return f"not even {least} makes it fit, which needs {format_bytes(needed)}; {spread}{hint}"


_CHUNKS: Final = 16


def _changes(case: Case, *, has_logits: bool) -> Iterator[dict[str, Any]]:
    """Yield changes, cheapest first: the same arithmetic, that of the head twice, a third more of all, ever smaller batches
    that fill a GPU less, both.

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


def _hint(case: Case, prediction: Prediction) -> str:
    """Describe what only a change of code can do."""
    words = None if case.code else _vocabulary(case)
    logits = [
        row for row in prediction.largest.get(prediction.peak_phase, ()) if words and row.shape and row.shape[-1] == words
    ]
    if not logits or logits[0].operator == "aten.t":
        return ""
    size = format_bytes(sum(row.bytes for row in logits))
    return f"; {size} at the peak are logits ({words:,} words wide), which a loss fused with the output layer never holds"


def _vocabulary(case: Case) -> int | None:
    facts = architectures()[case.model].trained_part.config
    words = facts.get("vocab_size") or facts.get("text_config", {}).get("vocab_size")
    return words if isinstance(words, int) else None
