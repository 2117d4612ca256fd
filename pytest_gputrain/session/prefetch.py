"""Submits to a fleet in advance the runs that tests are going to ask for, so that they find them done, or under way.

All of this guesses what the tests' own verdicts will be, by the same criteria, and it changes no verdict: a test takes the
runs of its case one by one, in the order in which they were submitted, until its verdict is settled. A run that was
prefetched and that no test takes is never looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pytest_gputrain.cases.identity import identity_of, key_of
from pytest_gputrain.execution.executor import WantedRuns
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.judge import judge
from pytest_gputrain.gate.regression import first_ratio
from pytest_gputrain.gate.suite_noise import SuiteNoise
from pytest_gputrain.records import Host, Reply, Task
from pytest_gputrain.records.tolerance import Terms
from pytest_gputrain.session.criteria import CriteriaLookup, records
from pytest_gputrain.utils.errors import BadCase


class ExpectedTask(NamedTuple):
    """A task that a test will need, presumably to check its case."""

    suite: str
    task: Task
    terms: Terms


class _HostReplies(NamedTuple):
    replies: tuple[Reply, ...]
    host: Host


class Prefetcher:
    """Finds out which runs the tests of a session will need.

    Args:
        host: machine that the tests were selected for.
    """

    def __init__(self, lookup: CriteriaLookup, expected_tasks: Iterable[ExpectedTask], host: Host) -> None:
        self._lookup = lookup
        self._host = host
        self._expected_tasks: defaultdict[bytes, list[ExpectedTask]] = defaultdict(list)
        for expected_task in expected_tasks:
            self._expected_tasks[identity_of(expected_task.task)].append(expected_task)
        self._suite_noise = SuiteNoise()
        """The noise of the suite for guesses only: the tests' own must not depend on the order in which replies come in."""
        self._to_come = set(self._expected_tasks)
        self._put_off: dict[bytes, _HostReplies] = {}

    def first(self) -> Iterator[WantedRuns]:
        """Return the runs that are known from the start."""
        runs = self._lookup.wanted(self._host, records=records(self._lookup.settings, recorded=True))
        for expected_tasks in self._expected_tasks.values():
            yield WantedRuns(expected_tasks[0].suite, expected_tasks[0].task, runs)

    def further(self, task: Task, replies: Sequence[Reply], host: Host) -> Iterator[WantedRuns]:
        """Return the runs that become necessary by the first replies of a task, and the runs of tasks that waited for them.

        Args:
            replies: the replies with figures; empty if the task will have no figures.
            host: the machine that the replies are from.
        """
        identity = identity_of(task)
        self._to_come.discard(identity)
        if not replies:
            self._expected_tasks.pop(identity, None)
        for expected, criteria in self._criteria(identity, host):
            first = first_ratio(criteria, replies)
            self._suite_noise.add(expected.suite, key_of(criteria.case, criteria.scale), first)
        waiting, self._put_off = self._put_off | {identity: _HostReplies(tuple(replies), host)}, {}
        for waiting_identity, host_replies in waiting.items():
            for expected, criteria in self._criteria(waiting_identity, host_replies.host):
                if runs := self._runs_needed(expected, criteria, host_replies):
                    yield runs

    def _runs_needed(self, expected: ExpectedTask, criteria: Criteria, host_replies: _HostReplies) -> WantedRuns | None:
        replies, have = host_replies.replies, len(host_replies.replies)
        if have < criteria.wanted:
            return WantedRuns(expected.suite, expected.task, criteria.wanted)
        if criteria.records or judge(criteria, replies, self._suite_noise.shift).settled:
            return None
        # If a case looks slower, perhaps the whole suite is. So this case waits until enough others have been measured, if
        # there are as many.
        is_compared = first_ratio(criteria, replies) is not None
        if is_compared and 0 < self._suite_noise.lacking <= len(self._to_come):
            self._put_off[identity_of(expected.task)] = host_replies
            return None
        return WantedRuns(expected.suite, expected.task, criteria.next_runs(have), soon=True)

    def _criteria(self, identity: bytes, host: Host) -> Iterator[tuple[ExpectedTask, Criteria]]:
        for expected in self._expected_tasks.get(identity, ()):
            try:
                yield expected, self._lookup.of(expected.suite, expected.task, host, expected.terms)
            except BadCase:
                continue  # The test of this case reports the error.
