"""Keeps the replies of the tasks of one pytest process: a task is run once, however many tests ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pytest_gputrain.cases.identity import identity_of
from pytest_gputrain.execution.executor import Executor, WantedRuns, refuse_other_device
from pytest_gputrain.execution.resume import ResumedReplies, ResumedReport
from pytest_gputrain.gate.contention import holders_of
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.records import Case, Event, Host, Measurement, OutOfMemory, Reply, Task
from pytest_gputrain.session.prefetch import Prefetcher
from pytest_gputrain.session.tasks import TaskMaker
from pytest_gputrain.utils.errors import BadCase

Watch = Callable[[Case, Event, int], None]
"""Called with each progress event of a case and the number of its fresh process, from 1."""


class Replies:
    """The replies of tasks: from an earlier report, from an earlier test, or from a fresh process.

    Args:
        resumed_report: whose figures hold for this run, too.
    """

    def __init__(
        self, executor: Executor[Reply], tasks: TaskMaker, resumed_report: ResumedReport | None, watch: Watch
    ) -> None:
        self._executor = executor
        self._tasks = tasks
        self._resumed_report = resumed_report
        self._watch = watch
        self._kept: dict[bytes, bytes] = {}
        """Replies as encoded messages, which take less memory than records: a run may have thousands, and few tests need one
        again."""
        self._make_prefetcher: Callable[[], Prefetcher] | None = None
        self._prefetcher: Prefetcher | None = None

    def expect(self, make_prefetcher: Callable[[], Prefetcher]) -> None:
        """Set which runs tests will ask for. A fleet starts them when the first one is asked for.

        Args:
            make_prefetcher: makes what tells them; called when the first task runs, since collecting needs none of it.
        """
        self._make_prefetcher = make_prefetcher

    def take(
        self, task: Task, runs: int, *, inline: bool = False, builder: Any = None, before: tuple[Reply, ...] = ()
    ) -> tuple[Reply, ...]:
        """Return at least this many replies, and run fresh processes for those that are missing. Fewer are returned if one
        has no figures.

        Args:
            before: replies of the same test that are there already.

        Raises:
            BadCase: no process can be started, or the machine that was to run it refuses the case.
        """
        identity = identity_of(task, inline)
        # An inline function has no name by which it could be found again.
        earlier = before
        if not earlier and builder is None and (kept := self._kept.get(identity)):
            earlier = msgspec.msgpack.decode(kept, type=tuple[Reply, ...])
        earlier = earlier or self.resumed(task, inline, builder).replies
        replies = list(earlier)
        while len(replies) < runs and has_figures(replies):
            replies.append(self._run(task, inline, builder, len(replies) + 1))
        if builder is None and len(replies) > len(earlier):
            self._kept[identity] = msgspec.msgpack.encode(replies)
        return tuple(replies)

    def host_of(self, task: Task, inline: bool = False) -> Host:
        """Return the machine on which the task runs. With a fleet it is known when the first reply has come.

        Raises:
            BadCase: as `take`; or the task is inline, and run elsewhere.
        """
        if not self._executor.is_remote:
            return self._executor.host
        if inline:
            raise BadCase(
                f"{task.case} runs inline, in the pytest process, and the scheduler of --gpu-executor runs cases elsewhere; "
                "deselect its test"
            )
        self.take(task, 1)
        return self.resumed(task).host or self._executor.host_of(task)

    def want(self, suite: str, task: Task, runs: int, *, soon: bool = False) -> None:
        """Have a fleet start this many runs of the task, unless its first run has no figures.

        Args:
            soon: before those of other tasks.
        """
        if self._executor.is_remote and has_figures(self.take(task, 1)):
            self._executor.want([self._lacking(WantedRuns(suite, task, runs, soon))])

    def resumed(self, task: Task, inline: bool = False, builder: Any = None) -> ResumedReplies:
        """Return the replies that the resumed report has of the task."""
        if self._resumed_report is None or builder is not None:
            return ResumedReplies()
        return self._resumed_report.of(task, inline=inline, host=self._executor.host)

    def with_one_worker(self, task: Task, replies: tuple[Reply, ...]) -> tuple[tuple[Reply, ...], str]:
        """Add to each reply of the task what one worker alone takes in a fresh process, or say why that is not known.

        No reason where the task itself has no figures.
        """
        if not all(isinstance(reply, Measurement) for reply in replies):
            return replies, ""
        case, alone = task.case, self._tasks.alone(task)
        known_seconds = self.resumed(task).one_worker_seconds
        completed = [
            msgspec.structs.replace(reply, one_worker_seconds=seconds)
            for reply, seconds in zip(replies, known_seconds, strict=False)
        ]
        rest = replies[len(completed) :]
        if rest and self._executor.is_remote:
            self._executor.want([self._lacking(WantedRuns("", alone, len(rest), soon=True))])
        for reply, single in zip(rest, self.take(alone, len(rest)) if rest else (), strict=False):
            if not isinstance(single, Measurement):
                return replies, f"one worker alone {describe_failure(single)}"
            seconds = single.update_seconds(case.gradient_accumulation)
            if seconds is None:
                return replies, f"{len(single.step_seconds)} steps hold no whole update of {case.gradient_accumulation}"
            holders = tuple(dict.fromkeys((*reply.holders, *holders_of(single))))  # type: ignore[union-attr]
            completed.append(msgspec.structs.replace(reply, one_worker_seconds=seconds, holders=holders))
        if rest:
            refuse_other_device(case, self.host_of(task), self.host_of(alone))
        return tuple(completed), ""

    def _run(self, task: Task, inline: bool, builder: Any, run: int) -> Reply:
        self._begin()
        for arrived in self._executor.wait(task):
            self._look_ahead(arrived)
        reply = self._executor.run(
            task, watch=lambda event: self._watch(task.case, event, run), inline=inline, builder=builder
        )
        if has_figures([reply]) and self._executor.is_remote and (earlier := self.resumed(task).host) is not None:
            try:
                refuse_other_device(task.case, earlier, self._executor.host_of(task))
            except BadCase:
                self._executor.drop(task)
                raise
        if run == 1 and has_figures([reply]):
            self._look_ahead(task, reply)
        return reply

    def _begin(self) -> None:
        """Start the runs that tests will need, so that they run or are done when a test needs them."""
        if self._make_prefetcher is None or self._prefetcher is not None:
            return
        self._prefetcher = self._make_prefetcher()
        wanted = list(self._prefetcher.first())
        self._executor.want(map(self._lacking, wanted))
        for runs in wanted:
            if self.resumed(runs.task).replies:
                self._look_ahead(runs.task)

    def _look_ahead(self, task: Task, *asked: Reply) -> None:
        """Submit the further runs that tests will need, as the replies of the first runs show.

        Args:
            asked: the reply of a run that a test waits for.
        """
        if self._prefetcher is None:
            return
        resumed = self.resumed(task)
        replies = [*resumed.replies, *asked, *self._executor.arrived(task)]
        if not replies:  # Only a later run has ended yet, and replies are taken in the order of the runs.
            return
        figures = [reply for reply in replies if isinstance(reply, Measurement | OutOfMemory)]
        if len(figures) < len(replies):  # If a run has failed, no test asks for more runs.
            self._executor.drop(task)
            figures = []
        host = resumed.host or self._executor.host_of(task)
        self._executor.want(map(self._lacking, self._prefetcher.further(task, figures, host)))

    def _lacking(self, wanted: WantedRuns) -> WantedRuns:
        """Return the runs that an earlier report does not have."""
        return wanted._replace(runs=wanted.runs - len(self.resumed(wanted.task).replies))


def has_figures(replies: Sequence[Reply]) -> bool:
    """Tell whether every reply has figures: the case was measured, or ran out of memory."""
    return all(isinstance(reply, Measurement | OutOfMemory) for reply in replies)
