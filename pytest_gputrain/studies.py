"""Several processes for one case: the search for its batch, and its loss curves. What they find is judged by no baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from pytest_gputrain import loss
from pytest_gputrain.findings import LossCurve, Search, Try
from pytest_gputrain.hardware import catalog
from pytest_gputrain.records import Case, Crashed, Lost, Measurement, OutOfMemory, Reply, Task, TimedOut
from pytest_gputrain.search import find_batch
from pytest_gputrain.sentences import describe_failure

Launch = Callable[[Task], Reply]
"""Runs a task in a fresh process."""

COMPARED: Final = ("fp32", "bf16-amp", "fp16")
"""Precisions of the loss curves, beside the case's own. fp32 first: the others are compared with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What became of a case."""

    task: Task
    """As the replies' process ran it."""
    replies: tuple[Reply, ...]
    search: Search | None = None
    loss_curves: tuple[LossCurve, ...] = ()


def search_batch(task: Task, most: int, launch: Launch) -> Study:
    """Find the batches of the task's case, with the reply of the fastest; of the one that crashed, or of 1, without any."""
    named = tuple(dict.fromkeys([*task.case.named, "batch_size"]))
    replies: dict[int, Reply] = {}

    def task_of(batch: int) -> Task:
        return msgspec.structs.replace(task, case=task.case.replace(batch_size=batch, named=named))

    def try_batch(batch: int) -> Try:
        replies[batch] = launch(task_of(batch))
        return _try(batch, batch * task.processes, replies[batch])

    search = find_batch(try_batch, most)
    shown = search.fastest or search.tries[-1].batch_size
    return Study(task=task_of(shown), replies=(replies[shown],), search=search)


def _try(batch: int, samples: int, reply: Reply) -> Try:
    if not isinstance(reply, Measurement):
        return Try(batch_size=batch, outcome=_outcome(reply), reason=describe_failure(reply))
    return Try(
        batch_size=batch,
        outcome="fits" if reply.batch_size >= samples else "capped",
        samples_per_second=reply.samples_per_second,
        peak_allocated_bytes=reply.peak_allocated_bytes,
        reason="" if reply.batch_size >= samples else f"the tiny scale trains on {reply.batch_size} samples at most",
    )


def record_losses(task: Task, steps: int, platform: str, launch: Launch) -> Study:
    """Train the task's case in every precision, from one seed on one batch, with the reply of its own precision.

    Args:
        platform: catalog marker. A precision that it or the parallelism lacks is left out, unless it is the case's own.
    """
    case = task.case.replace(steps=steps, warmup=0)

    def task_of(precision: str) -> Task:
        return msgspec.structs.replace(task, case=case.replace(precision=precision), curve=True)

    curves: dict[str, LossCurve] = {}
    replies: dict[str, Reply] = {}
    for precision in dict.fromkeys([*COMPARED, case.precision]):
        reason = "" if precision == case.precision else _why_left_out(case, platform, precision)
        if reason:
            curves[precision] = LossCurve(precision=precision, outcome="left_out", reason=reason)
            continue
        reply = launch(task_of(precision))
        replies[precision] = reply
        curves[precision] = _curve(precision, reply, steps)
    reference = curves["fp32"].losses
    compared = (
        curve if precision == "fp32" else msgspec.structs.replace(curve, gap=loss.gap(curve.losses, reference))
        for precision, curve in curves.items()
    )
    return Study(task=task_of(case.precision), replies=(replies[case.precision],), loss_curves=tuple(compared))


def _curve(precision: str, reply: Reply, steps: int) -> LossCurve:
    if not isinstance(reply, Measurement):
        return LossCurve(precision=precision, outcome=_outcome(reply), reason=describe_failure(reply))
    finite = len(reply.losses) == steps
    return LossCurve(
        precision=precision,
        outcome="recorded",
        losses=reply.losses,
        non_finite_step=None if finite else len(reply.losses) + 1,
        trend=loss.trend(reply.losses, finite=finite),
    )


def _why_left_out(case: Case, platform: str, precision: str) -> str:
    """Why the case has no curve in that precision; empty where it has one."""
    if platform in catalog.PLATFORMS and catalog.peak_flops(platform, precision) is None:
        return f"{catalog.PLATFORMS[platform].title} has no {precision.removesuffix('-amp')} arithmetic"
    if case.parallel == "ps" and precision == "fp16":
        return "parameter servers take no gradients of a scaled loss"
    return ""


def _outcome(
    reply: Crashed | OutOfMemory | TimedOut | Lost,
) -> Literal["out_of_memory", "timed_out", "crashed", "lost"]:
    match reply:
        case OutOfMemory():
            return "out_of_memory"
        case TimedOut():
            return "timed_out"
        case Crashed():
            return "crashed"
        case Lost():
            return "lost"


def failed_curves(case: Case, curves: Sequence[LossCurve]) -> str | None:
    """The sentence for precisions that gave no curve, None where all did that could.

    Running out of memory in another precision than the case's own is no failure: fp32 takes twice the room of bf16 weights.
    """
    told = ("recorded", "left_out", "out_of_memory")
    failed = [
        f"in {curve.precision} {curve.reason}"
        for curve in curves
        if curve.outcome not in (told if curve.precision != case.precision else told[:2])
    ]
    return f"{case} {'; '.join(failed)}" if failed else None


def diverged(case: Case, curves: Sequence[LossCurve]) -> str | None:
    """The sentence for precisions in which the case diverges while it does not in fp32; None where there are none.

    Where fp32 diverges too, the recipe does and no precision is to blame: that is told, but fails no test, unless the case
    as declared leaves the finite numbers.
    """
    own = next((curve for curve in curves if curve.precision == case.precision), None)
    if own is not None and own.non_finite_step is not None:
        return f"{case} diverges: its loss is not finite in step {own.non_finite_step}"
    if any(curve.precision == "fp32" and curve.trend == "diverging" for curve in curves):
        return None
    worse = [
        f"{curve.precision}{f' (its loss is not finite in step {curve.non_finite_step})' if curve.non_finite_step else ''}"
        for curve in curves
        if curve.trend == "diverging"
    ]
    compared = any(curve.precision == "fp32" and curve.trend for curve in curves)
    beside = "but not in fp32" if compared else "and fp32 gave no curve to compare with"
    return f"{case} diverges in {' and in '.join(worse)}, {beside}" if worse else None
