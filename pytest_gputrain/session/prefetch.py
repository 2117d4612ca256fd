"""What tests are going to ask a fleet for, told before they do: they then find it done, or under way.

All of this guesses what the tests' own judgement will be, by the same standards, and it changes no verdict: a test takes the
runs of its case one by one, in the order in which they were submitted, until its judgement is settled. What was foreseen and
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
from pytest_gputrain.session.criteria import Bar, Standards
from pytest_gputrain.utils.errors import BadCase


class Claim(NamedTuple):
    """A task that a test will ask for, presumably to check it."""

    suite: str
    task: Task
    terms: Terms


class _Known(NamedTuple):
    replies: Sequence[Reply]
    host: Host


class Foresight:
    """
    Args:
        host: machine that the tests were selected for.
    """

    def __init__(self, standards: Standards, claims: Iterable[Claim], host: Host) -> None:
        self._standards = standards
        self._host = host
        self._claims: defaultdict[bytes, list[Claim]] = defaultdict(list)
        for claim in claims:
            self._claims[identity_of(claim.task)].append(claim)
        self._suites = SuiteNoise()
        """Of its own: what tests know of each other must not depend on what came in when."""
        self._to_come = set(self._claims)
        self._put_off: dict[bytes, _Known] = {}

    def first(self) -> Iterator[ExpectedRuns]:
        """What is known from the start."""
        runs = self._standards.wanted(self._host, records=self._standards.records_all)
        for claims in self._claims.values():
            yield ExpectedRuns(claims[0].suite, claims[0].task, runs)

    def further(self, task: Task, replies: Sequence[Reply], host: Host) -> Iterator[ExpectedRuns]:
        """What the first runs of a task ask for, and those of tasks that were put off until it was there.

        Args:
            replies: with figures; none where there will be none.
            host: that they are of.
        """
        identity = identity_of(task)
        self._to_come.discard(identity)
        if not replies:
            self._claims.pop(identity, None)
        for bar in self._bars(identity, host):
            judgement = self._standards.judgement(bar, replies, self._suites, self._standards.most(bar))
            self._suites.add(bar.suite, bar.key, judgement.first)
        waiting, self._put_off = self._put_off | {identity: _Known(replies, host)}, {}
        for one, known in waiting.items():
            for bar in self._bars(one, known.host):
                if (prefetched := self._asked_for(bar, known)) is not None:
                    yield prefetched

    def _asked_for(self, bar: Bar, known: _Known) -> ExpectedRuns | None:
        have = len(known.replies)
        if have < bar.wanted:
            return ExpectedRuns(bar.suite, bar.task, bar.wanted)
        if bar.records:
            return None
        judgement = self._standards.judgement(bar, known.replies, self._suites, max(have, self._standards.most(bar)))
        if judgement.settled and self._standards.limited(bar, known.replies).settled:
            return None
        # Slower today may be all of them. A test in doubt looks at so many others, too, if there are as many.
        if judgement.first is not None and 0 < self._suites.lacking <= len(self._to_come):
            self._put_off[identity_of(bar.task)] = known
            return None
        return ExpectedRuns(bar.suite, bar.task, self._standards.next_runs(bar, have), soon=True)

    def _bars(self, identity: bytes, host: Host) -> Iterator[Bar]:
        for suite, task, terms in self._claims.get(identity, ()):
            try:
                yield self._standards.bar(suite, task, host, terms)
            except BadCase:
                continue  # its test will tell
