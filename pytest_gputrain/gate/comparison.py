"""Holds the runs of a case, the baseline that they are compared with, and the limits and tolerances. Pure."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.host_bound import HOST_PRIOR_SD, LEAST_HOST_TOLERANCE, Pace, held_up, other_host, pace
from pytest_gputrain.gate.messages import OtherSide, describe_process_count
from pytest_gputrain.gate.own_training import lost_tensors
from pytest_gputrain.records import Baseline, BaselineRun, Case, Environment, Measurement, OutOfMemory, Reply
from pytest_gputrain.records.tolerance import Tolerance


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The runs of a case, the baseline that they are compared with, and the criteria."""

    criteria: Criteria
    replies: Sequence[Measurement | OutOfMemory]
    baseline: Baseline
    tolerance: Tolerance
    most: int
    """The most runs of the case that there may be."""
    prior: float
    """See `pytest_gputrain.gate.step_times.suite_prior`."""
    shift: float
    """See `pytest_gputrain.gate.step_times.suite_shift`."""
    doubted_from: float = 0.5
    """See `pytest_gputrain.gate.step_times.decide`."""

    @classmethod
    def of(cls, criteria: Criteria, replies: Sequence[Reply], baseline: Baseline, shift: float) -> Comparison:
        return cls(
            criteria=criteria,
            replies=[reply for reply in replies if isinstance(reply, Measurement | OutOfMemory)],
            baseline=baseline,
            tolerance=criteria.tolerance,
            most=len(replies) if criteria.records else max(len(replies), criteria.most),
            prior=criteria.prior,
            shift=shift,
        )

    @property
    def case(self) -> Case:
        return self.criteria.case

    @property
    def side(self) -> OtherSide:
        return self.criteria.other_side or OtherSide.stored(self.baseline)

    @functools.cached_property
    def measured(self) -> Sequence[Measurement]:
        return [reply for reply in self.replies if isinstance(reply, Measurement)]

    @functools.cached_property
    def fitted(self) -> Sequence[BaselineRun]:
        return [run for run in self.baseline.runs if run.outcome == "measured"]

    @property
    def baseline_fits(self) -> bool:
        # Either all runs of a recorded baseline have a measurement, or all ran out of memory. A report may have both kinds,
        # and one bad process must not change the verdict.
        return 2 * len(self.fitted) >= len(self.baseline.runs)

    @property
    def here(self) -> Environment:
        return self.measured[0].environment

    @functools.cached_property
    def pace(self) -> Pace:
        return pace(self.fitted, self.measured)

    @functools.cached_property
    def held_up(self) -> str:
        return held_up(self.measured, self.fitted)

    @functools.cached_property
    def other_host(self) -> str:
        """How the host differs from that of the baseline. If other programs take its cores, it also counts as another
        host."""
        return self.held_up or other_host(self.measured, self.fitted)

    @functools.cached_property
    def why_time_is_foreign(self) -> str:
        return _why_time_is_foreign(self.here, self.fitted, self.tolerance)

    @functools.cached_property
    def lost_tensors(self) -> str:
        """A sentence on tensors that trained in the baseline and train in none of today's processes; empty for none. On a
        GPU a router may choose other experts in another process."""
        lost = [lost_tensors(run.trained, self.fitted[-1].trained) for run in self.measured]
        return lost[0] if all(lost) else ""

    @property
    def before(self) -> list[float]:
        """The median step of each run of the baseline."""
        return [statistics.median(run.step_seconds) for run in self.fitted]

    @property
    def now(self) -> list[float]:
        return [run.median_step_seconds for run in self.measured]

    def held_to(self, least: float, **rule: Any) -> Comparison:
        """Return this comparison with a time tolerance of at least ``least``, and with other constants of the rule for
        times."""
        tolerance = dataclasses.replace(self.tolerance, time=max(self.tolerance.time, least))
        return dataclasses.replace(self, tolerance=tolerance, **rule)

    def for_host(self) -> Comparison:
        """Return this comparison with the wider tolerance for steps whose time the host decides, if the host decides
        theirs."""
        if not self.pace.is_host_bound:
            return self
        return self.held_to(LEAST_HOST_TOLERANCE, prior=HOST_PRIOR_SD, shift=0.0, doubted_from=1.0)


def _why_time_is_foreign(here: Environment, fitted: Sequence[BaselineRun], tolerance: Tolerance) -> str:
    if here.device_type == "cpu":
        # Fresh processes of one machine differed by up to 26 % in the same tiny step, and by more beside other programs.
        if not tolerance.cpu_time:
            return "time on a CPU is shown, not judged"
        if len(fitted) < tolerance.cpu_runs:
            return f"time on a CPU is judged against {tolerance.cpu_runs} runs or more, and there are {len(fitted)}"
    other = other_device(here, fitted)
    if other:
        return other
    hosts = {run.environment.host for run in fitted} - {here.host}
    if here.device_type == "cpu" and hosts:
        return f"recorded on the host {min(hosts)}, here {here.host}"
    return describe_process_count(here, fitted)


def other_device(here: Environment | None, runs: Iterable[BaselineRun]) -> str:
    """Name the other device that the baseline was recorded on; empty if it was recorded on this one, or if this one is not
    known."""
    for there in (run.environment for run in runs):
        if here is not None and here.device_name != there.device_name:
            return f"recorded on {there.device_name}, here {here.device_name}"
    return ""
