"""Submits to a fleet in advance the runs that tests are going to ask for, so that they find them done, or under way.

All of this guesses what the tests' own verdicts will be, by the same criteria, and it changes no verdict: a test takes the
runs of its case one by one, in the order in which they were submitted, until its verdict is settled. What was prefetched and
is not asked for is never looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pytest_gputrain.cases.identity import identity_of
from pytest_gputrain.execution.executor import ExpectedRuns
from pytest_gputrain.gate.suite_noise import SuiteNoise
from pytest_gputrain.records import Host, Reply, Task
from pytest_gputrain.records.tolerance import Terms
from pytest_gputrain.session.criteria import CaseCriteria, Criteria
from pytest_gputrain.utils.errors import BadCase


class ExpectedTask(NamedTuple):
    """A task that a test will ask for, presumably to check it."""

    suite: str
    task: Task
    terms: Terms


class _HostReplies(NamedTuple):
    replies: Sequence[Reply]
    host: Host


class Prefetcher:
    """Tells which runs the tests of a session will ask for.

    Args:
        host: machine that the tests were selected for.
    """

    def __init__(self, criteria: Criteria, expected_tasks: Iterable[ExpectedTask], host: Host) -> None:
        self._criteria = criteria
        self._host = host
        self._expected_tasks: defaultdict[bytes, list[ExpectedTask]] = defaultdict(list)
        for expected_task in expected_tasks:
            self._expected_tasks[identity_of(expected_task.task)].append(expected_task)
        self._suite_noise = SuiteNoise()
        """Not the tests' own: what they know of each other must not depend on what came in when."""
        self._to_come = set(self._expected_tasks)
        self._put_off: dict[bytes, _HostReplies] = {}

    def first(self) -> Iterator[ExpectedRuns]:
        """The runs that are known from the start."""
        runs = self._criteria.wanted(self._host, records=self._criteria.records_all)
        for expected_tasks in self._expected_tasks.values():
            yield ExpectedRuns(expected_tasks[0].suite, expected_tasks[0].task, runs)

    def further(self, task: Task, replies: Sequence[Reply], host: Host) -> Iterator[ExpectedRuns]:
        """The runs that the first replies of a task ask for, and those of tasks that were put off until these were there.

        Args:
            replies: with figures; none where there will be none.
            host: that they are of.
        """
        identity = identity_of(task)
        self._to_come.discard(identity)
        if not replies:
            self._expected_tasks.pop(identity, None)
        for case_criteria in self._all_criteria(identity, host):
            outcome = self._criteria.judge(case_criteria, replies, self._suite_noise, self._criteria.most(case_criteria))
            self._suite_noise.add(case_criteria.suite, case_criteria.key, outcome.first)
        waiting, self._put_off = self._put_off | {identity: _HostReplies(replies, host)}, {}
        for waiting_identity, host_replies in waiting.items():
            for case_criteria in self._all_criteria(waiting_identity, host_replies.host):
                if (prefetched := self._runs_needed(case_criteria, host_replies)) is not None:
                    yield prefetched

    def _runs_needed(self, case_criteria: CaseCriteria, host_replies: _HostReplies) -> ExpectedRuns | None:
        have = len(host_replies.replies)
        if have < case_criteria.wanted:
            return ExpectedRuns(case_criteria.suite, case_criteria.task, case_criteria.wanted)
        if case_criteria.records:
            return None
        outcome = self._criteria.judge(
            case_criteria, host_replies.replies, self._suite_noise, max(have, self._criteria.most(case_criteria))
        )
        if outcome.settled and self._criteria.judge_limits(case_criteria, host_replies.replies).settled:
            return None
        # Slower today may be all of them. A test in doubt looks at so many others, too, if there are as many.
        if outcome.first is not None and 0 < self._suite_noise.lacking <= len(self._to_come):
            self._put_off[identity_of(case_criteria.task)] = host_replies
            return None
        return ExpectedRuns(
            case_criteria.suite, case_criteria.task, self._criteria.next_runs(case_criteria, have), soon=True
        )

    def _all_criteria(self, identity: bytes, host: Host) -> Iterator[CaseCriteria]:
        for suite, task, terms in self._expected_tasks.get(identity, ()):
            try:
                yield self._criteria.for_case(suite, task, host, terms)
            except BadCase:
                continue  # its test will tell
