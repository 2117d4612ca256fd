"""Judges a case by all that it is held to: limits of its test, and its baseline or a published row. Pure.

This is what a session calls, once more with every reply. `regression`, `published` and `limits` have the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from pytest_gputrain.gate import regression
from pytest_gputrain.gate.contention import why_not_recorded
from pytest_gputrain.gate.count_lines import count_changes
from pytest_gputrain.gate.counts import BY_THE_RULES
from pytest_gputrain.gate.limits import judge_limits, with_limits
from pytest_gputrain.gate.new_device import judge_by_emulated, judge_by_published
from pytest_gputrain.gate.published import judge_published, why_not_comparable
from pytest_gputrain.gate.step_times import AGREEING, PRIOR_SD
from pytest_gputrain.records import Baseline, Case, EmulatedRun, Measurement, OutOfMemory, Published, Reply, Scale, Verdict
from pytest_gputrain.records.tolerance import Cap, CountTerms, Tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Criteria:
    """The baseline, limits and tolerances of a case."""

    case: Case
    scale: Scale
    judged: bool
    """Whether it is compared with anything but the limits of its test."""
    records: bool = False
    """Whether its figures become a baseline."""
    caps: tuple[Cap, ...] = ()
    """The limits of its test."""
    tolerance: Tolerance
    counts: CountTerms = BY_THE_RULES
    """How it is judged what its steps ask of a CPU."""
    baseline: Baseline | None = None
    hint: str = ""
    """Further information about a missing baseline."""
    elsewhere: str = ""
    """Where it may be instead, with the remedy."""
    emulated: EmulatedRun | None = None
    """The run of a case without a baseline on an emulated GPU of the platform; None if there is none that applies."""
    variables: tuple[str, ...] = ()
    """Names of the environment variables that its test has changed."""
    prior: float = PRIOR_SD
    """Standard deviation that is expected between its processes: see `pytest_gputrain.gate.step_times.suite_prior`."""
    row: Published | None = None
    """The published row of the case and its platform; None if there is none, or if the case has a baseline."""
    published_for: tuple[str, ...] | None = None
    """Platforms that it was published for; None where it is not compared with published figures."""
    wanted: int = 1
    """Fresh processes to begin with."""
    most: int = 1
    """Fresh processes that there may be of it in doubt."""

    @property
    def compares_stored(self) -> bool:
        """Whether it is compared with a stored baseline."""
        return self.judged and self.published_for is None

    def first_ratio(self, replies: Sequence[Reply]) -> float | None:
        """Logarithm of the first run's step time over the baseline's; None where the two are not compared."""
        return regression.first_ratio(self.case, replies, self.baseline, self.tolerance)

    def next_runs(self, have: int) -> int:
        """Return how many fresh processes it takes in all if ``have`` of them leave the case in doubt: enough that they can
        agree."""
        return min(max(AGREEING, have + 1), self.most)


class Judgement(NamedTuple):
    verdict: Verdict | None
    """The verdict; None if the test only measures and states no limit."""
    settled: bool
    """Whether a further reply could not change the verdict. If not, it is the one if there is to be none."""
    asks_suite: bool = False
    """Whether it is the comparison with the baseline that is in doubt, of which other cases of the suite may tell more."""


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
        circumstances = regression.Circumstances(
            most=len(replies) if criteria.records else max(len(replies), criteria.most),
            prior=criteria.prior,
            shift=shift,
            variables=criteria.variables,
            counts=criteria.counts,
            elsewhere=criteria.elsewhere,
        )
        verdict, settled = regression.judge(
            case, replies, criteria.baseline, tolerance, criteria.hint, no_scaling, circumstances
        )
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
    """Return the published row that the case is compared with; None where it is compared with something else."""
    if criteria.published_for is None:
        return None
    return None if why_not_comparable(criteria.case, criteria.row, criteria.scale) else criteria.row


def _recorded(criteria: Criteria, verdict: Verdict, replies: tuple[Reply, ...], no_scaling: str) -> Verdict:
    """Turn the verdict into ``recorded`` where these figures can be stored."""
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
    before = f"; before, {verdict.sentence}" if criteria.baseline is not None else ""
    sentence = f"{case} has {what} as its baseline now{before}"
    old = criteria.baseline.runs[-1].counts if criteria.baseline is not None else None
    new = with_figures[0].counts if isinstance(with_figures[0], Measurement) else None
    accepted = tuple(count_changes(old, new)) if old and new else ()
    return msgspec.structs.replace(verdict, status="recorded", sentence=sentence, before=verdict.status, accepted=accepted)
