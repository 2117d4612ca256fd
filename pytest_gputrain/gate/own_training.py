"""Compares what own code trains, and on what shapes, with a baseline. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final

from pytest_gputrain.gate.messages import OtherSide, listed
from pytest_gputrain.records import BatchShapes, TrainedTensors
from pytest_gputrain.records.own_training import TensorShapes, module_of

_MOST_NAMES: Final = 4
_MOST_SHAPES: Final = 3


def lost_tensors(now: TrainedTensors | None, before: TrainedTensors | None) -> str:
    """Return which tensors trained in a baseline and no longer do, as a phrase that follows the case's name; empty for none.

    A new tensor that does not train is no loss, and neither is one that is gone: of a module, as many tensors less have to
    train as more do not. So another layer may be the one that does not, as an expert that no sample chose.
    """
    if now is None or before is None:
        return ""
    idle, idle_before = _by_module(now), _by_module(before)
    lost = [
        f"{name} ({count})" if count > 1 else name
        for name, count in now.idle.items()
        if count > before.idle.get(name, 0)
        and idle[module := module_of(name)] > idle_before[module]
        and now.learning.get(module, 0) < before.learning.get(module, 0)
    ]
    more = [f"{len(lost) - _MOST_NAMES} more"] if len(lost) > _MOST_NAMES else []
    named = listed([*lost[:_MOST_NAMES], *more])
    return f"no longer trains {named}, which got a gradient or changed before" if lost else ""


def _by_module(trained: TrainedTensors) -> Counter[str]:
    """Return the number of tensors of each module that do not train."""
    counts: Counter[str] = Counter()
    for name, count in trained.idle.items():
        counts[module_of(name)] += count
    return counts


def other_shapes(now: BatchShapes | None, before: BatchShapes | None, side: OtherSide) -> str:
    """Say that own code trains on other shapes than a baseline, and where that shows first; empty if it does not.

    Args:
        side: where the baseline comes from.
    """
    if now is None or before is None:
        return ""
    name = "the baseline" if side.remedies else side.name
    said = f"its batches have other shapes than in {name}"
    for step, (new, old) in enumerate(zip(now.known(), before.known(), strict=False), start=1):
        if new != old:
            return f"{said}: {_shown(new, old)} in step {step}, where it had {_shown(old, new)}"
    if now.last != before.last:
        return f"{said}: {_shown(now.last, before.last)} in the last one, where it had {_shown(before.last, now.last)}"
    return said if now.steps == before.steps and now.digest != before.digest else ""


def _shown(shapes: TensorShapes, others: TensorShapes) -> str:
    """Return shapes as text, ``[8, 128] and [8]``: only those that the other side lacks, if there are any."""
    chosen = [shape for shape in shapes if shape not in others] or shapes
    more = [f"{len(chosen) - _MOST_SHAPES} more"] if len(chosen) > _MOST_SHAPES else []
    return listed([*(str([*shape]) for shape in chosen[:_MOST_SHAPES]), *more])
