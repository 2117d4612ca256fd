"""Runs the studies of a case, which take several processes: the search for its batch, and its loss curves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from pytest_gputrain.gate import loss_trend
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.hardware import catalog
from pytest_gputrain.records import Case, Measurement, Reply, Task
from pytest_gputrain.records.reply import failure_of
from pytest_gputrain.records.study import LossCurve, Search, Try
from pytest_gputrain.session.batch_search import find_batch

Launch = Callable[[Task], Reply]
"""Runs a task in a fresh process."""

COMPARED: Final = ("fp32", "bf16-amp", "fp16-amp")
"""Precisions of the loss curves, beside the case's own. fp32 first: the others are compared with it."""
_OF_ONE_PRECISION: Final = {"tf32": None, "quantized_compute": "", "unquantized_fp32": None, "master_weights": False}
"""Knobs that one precision has and another has not, as they are in a case without them."""


class SearchedBatch(NamedTuple):
    task: Task
    """The task with the fastest batch; if there is none, with the one that crashed, or with 1."""
    reply: Reply
    """The reply of that task."""
    search: Search


class RecordedLosses(NamedTuple):
    task: Task
    """The task in the precision of the case."""
    reply: Reply
    """The reply of that task."""
    loss_curves: tuple[LossCurve, ...]


def search_batch(task: Task, most: int, launch: Launch) -> SearchedBatch:
    """Search for the largest batch that fits and for the fastest one. Each try trains the case in a fresh process."""
    named = tuple(dict.fromkeys([*task.case.named, "batch_size"]))
    replies: dict[int, Reply] = {}

    def task_of(batch: int) -> Task:
        return msgspec.structs.replace(task, case=task.case.replace(batch_size=batch, named=named))

    def try_batch(batch: int) -> Try:
        replies[batch] = launch(task_of(batch))
        return _try(batch, batch * task.processes, replies[batch])

    search = find_batch(try_batch, most)
    shown = search.fastest or search.tries[-1].batch_size
    return SearchedBatch(task_of(shown), replies[shown], search)


def _try(batch: int, samples: int, reply: Reply) -> Try:
    if not isinstance(reply, Measurement):
        return Try(batch_size=batch, outcome=failure_of(reply), reason=describe_failure(reply))
    return Try(
        batch_size=batch,
        outcome="fits" if reply.batch_size >= samples else "capped",
        samples_per_second=reply.samples_per_second,
        peak_allocated_bytes=reply.peak_allocated_bytes,
        reason="" if reply.batch_size >= samples else f"the tiny scale trains on {reply.batch_size} samples at most",
    )


def record_losses(task: Task, steps: int, platform: str, launch: Launch) -> RecordedLosses:
    """Train the task's case in every precision, from one seed on one batch. Return the curves, and the reply of the case's
    own precision.

    Args:
        platform: catalog marker. A precision that it or the parallelism lacks is left out, unless it is the case's own.
    """
    case = task.case.replace(steps=steps, warmup=0)

    def task_of(precision: str) -> Task:
        # The other precisions are compared with fp32, so that the run in fp32 computes everything in fp32.
        plain = {} if precision == case.precision else _OF_ONE_PRECISION
        return msgspec.structs.replace(task, case=case.replace(precision=precision, **plain), curve=True)

    curves: dict[str, LossCurve] = {}
    replies: dict[str, Reply] = {}
    for precision in dict.fromkeys([*COMPARED, case.precision]):
        reason = "" if precision == case.precision else _why_left_out(case, platform, precision)
        if reason:
            curves[precision] = LossCurve(precision=precision, outcome="left_out", reason=reason)
            continue
        reply = launch(task_of(precision))
        replies[precision] = reply
        curves[precision] = _curve(precision, reply, steps, curves.get("fp32"))
    return RecordedLosses(task_of(case.precision), replies[case.precision], tuple(curves.values()))


def _curve(precision: str, reply: Reply, steps: int, fp32: LossCurve | None) -> LossCurve:
    """Return the curve of one precision, compared with that of fp32, which has none to be compared with."""
    if not isinstance(reply, Measurement):
        return LossCurve(precision=precision, outcome=failure_of(reply), reason=describe_failure(reply))
    finite = len(reply.losses) == steps
    reference = fp32.losses if fp32 else ()
    return LossCurve(
        precision=precision,
        outcome="recorded",
        losses=reply.losses,
        non_finite_step=None if finite else len(reply.losses) + 1,
        trend=loss_trend.trend(
            reply.losses,
            precision=precision,
            reference=reference if fp32 and fp32.trend != "diverging" else (),
            finite=finite,
        ),
        gap=loss_trend.gap(reply.losses, reference),
    )


def _why_left_out(case: Case, platform: str, precision: str) -> str:
    """Say why the case has no curve in that precision; empty if it has one."""
    if platform in catalog.PLATFORMS and catalog.PLATFORMS[platform].lacks(precision):
        return f"{catalog.PLATFORMS[platform].title} has no {precision.removesuffix('-amp')} arithmetic"
    if case.parallel == "ps" and precision == "fp16-amp":
        return "parameter servers take no gradients of a scaled loss"
    return ""
