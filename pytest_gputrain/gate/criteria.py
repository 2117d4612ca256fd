"""Defines what a case is held to, and what judging gives. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from pytest_gputrain.gate.counts import BY_THE_RULES
from pytest_gputrain.gate.messages import OtherSide
from pytest_gputrain.gate.step_times import AGREEING, PRIOR_SD
from pytest_gputrain.records import Baseline, Case, EmulatedRun, MetricVerdict, Published, Scale, Verdict
from pytest_gputrain.records.tolerance import Cap, CountTerms, Tolerance

_Verdict = TypeVar("_Verdict", Verdict, MetricVerdict)


class Judged(NamedTuple, Generic[_Verdict]):
    """The verdict of a case, or of one of its figures."""

    verdict: _Verdict
    settled: bool = True
    """Whether no further fresh process could change the verdict. If one could, this is the verdict without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Criteria:
    """The baseline, limits and tolerances of a case."""

    case: Case
    scale: Scale
    judged: bool = True
    """Whether it is compared with anything but the limits of its test."""
    records: bool = False
    """Whether its figures become a baseline."""
    caps: tuple[Cap, ...] = ()
    """The limits of its test."""
    tolerance: Tolerance
    counts: CountTerms = BY_THE_RULES
    """How the counts of its steps are judged."""
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
    """Platforms that it was published for; None if it is not compared with published figures."""
    other_side: OtherSide | None = None
    """The words for what the case is compared with, if that is no stored baseline."""
    paired: bool = False
    """Whether each process comes with one of the baseline: see `pytest_gputrain.gate.step_times.decide`."""
    wanted: int = 1
    """Fresh processes to begin with."""
    most: int = 1
    """The most fresh processes of the case if the verdict is in doubt."""

    @property
    def compares_stored(self) -> bool:
        """Whether it is compared with a stored baseline."""
        return self.judged and self.published_for is None

    @property
    def again(self) -> str:
        """The advice to record a baseline again that lacks a figure, as the end of a sentence; empty if no baseline is
        stored."""
        return "" if self.other_side else "; record it again"

    def next_runs(self, have: int) -> int:
        """Return the total number of fresh processes to run if ``have`` of them do not decide the case."""
        return min(max(AGREEING, have + 1), self.most)
