"""Judges a case by all that it is held to: limits of its test, and its baseline or a published row. Pure.

This is what a session calls, once more with every reply. `regression`, `published` and `limits` have the rules.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pytest_gputrain.gate import regression
from pytest_gputrain.gate.contention import why_not_recorded
from pytest_gputrain.gate.count_lines import count_changes
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.limits import judge_limits, with_limits
from pytest_gputrain.gate.messages import REPLACED
from pytest_gputrain.gate.new_device import judge_by_emulated, judge_by_published
from pytest_gputrain.gate.published import judge_published, why_not_comparable
from pytest_gputrain.records import Measurement, OutOfMemory, Published, Reply, Verdict


class Judgement(NamedTuple):
    verdict: Verdict | None
    """The verdict; None if the test only measures and states no limit."""
    settled: bool
    """Whether no further reply could change the verdict. If one could, this is the verdict without it."""
    asks_suite: bool = False
    """Whether the comparison with the baseline is in doubt, so that other cases of the suite should be measured to decide
    it."""


def judge(criteria: Criteria, replies: tuple[Reply, ...], shift: float = 0.0, no_scaling: str = "") -> Judgement:
    """Judge ``replies`` (one per fresh process, at least one).

    Args:
        shift: logarithm of how much slower all cases are today: see `pytest_gputrain.gate.step_times.suite_shift`.
        no_scaling: why the scaling efficiency, which was asked for, is not known.
    """
    case, tolerance = criteria.case, criteria.tolerance
    limits, limits_settled = judge_limits(
        criteria.caps, case, replies, scale=criteria.scale, cpu_time=tolerance.cpu_time, most=criteria.most
    )
    verdict, settled = None, True
    if criteria.judged and criteria.published_for is not None:
        verdict = judge_published(
            case, replies, criteria.row, tolerance, scale=criteria.scale, elsewhere=criteria.published_for
        )
    elif criteria.compares_stored:
        verdict, settled = regression.judge(criteria, replies, shift, no_scaling)
        if settled and criteria.records:
            verdict = _recorded(criteria, verdict, replies, no_scaling)
        elif verdict.status == "new":
            runs = [reply for reply in replies if isinstance(reply, Measurement)]
            if criteria.emulated is not None:
                verdict = judge_by_emulated(verdict, case, runs, criteria.emulated)
            elif criteria.row is not None and not why_not_comparable(case, criteria.row, criteria.scale):
                verdict = judge_by_published(verdict, case, runs, criteria.row)
    return Judgement(with_limits(case, verdict, limits), settled and limits_settled, asks_suite=not settled)


def comparable_row(criteria: Criteria) -> Published | None:
    """Return the published row that the case is compared with; None if it is compared with something else."""
    if criteria.published_for is None:
        return None
    return None if why_not_comparable(criteria.case, criteria.row, criteria.scale) else criteria.row


def _recorded(criteria: Criteria, verdict: Verdict, replies: tuple[Reply, ...], no_scaling: str) -> Verdict:
    """Return the verdict as ``recorded`` if these figures can be stored as a baseline."""
    case = criteria.case
    with_figures = [
        reply for reply in replies if isinstance(reply, Measurement | OutOfMemory) and reply.environment is not None
    ]
    if len(with_figures) < len(replies):
        return verdict
    if why_not := why_not_recorded(with_figures, criteria.baseline):
        return msgspec.structs.replace(verdict, status="failed", sentence=f"{case} {why_not}")
    what = "running out of memory" if isinstance(with_figures[0], OutOfMemory) else "today's figures"
    what += f", without a scaling efficiency ({no_scaling})," if no_scaling else ""
    before = f"{REPLACED}{verdict.sentence}" if criteria.baseline is not None else ""
    sentence = f"{case} has {what} as its baseline now{before}"
    old = criteria.baseline.runs[-1].counts if criteria.baseline is not None else None
    new = with_figures[0].counts if isinstance(with_figures[0], Measurement) else None
    accepted = tuple(count_changes(old, new)) if old and new else ()
    return msgspec.structs.replace(verdict, status="recorded", sentence=sentence, before=verdict.status, accepted=accepted)
