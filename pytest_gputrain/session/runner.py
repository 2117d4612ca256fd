"""Measures and judges the cases of one pytest process: the only module that knows all the packages below."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gputrain.cases.identity import key_of, same_id, suite_of
from pytest_gputrain.cases.validation import problem
from pytest_gputrain.execution.executor import Executor
from pytest_gputrain.gate.limits import with_limits
from pytest_gputrain.gate.suite_noise import SuiteNoise
from pytest_gputrain.gate.summary import summarise
from pytest_gputrain.hardware import catalog
from pytest_gputrain.records import (
    Case,
    LimitVerdict,
    Reply,
    Result,
    Scale,
    Task,
    Verdict,
)
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.records.tolerance import NO_TERMS, Terms
from pytest_gputrain.session.criteria import Bar, Standards
from pytest_gputrain.session.interleave import Rounds
from pytest_gputrain.session.prefetch import Claim, Foresight
from pytest_gputrain.session.selection import Expected, platforms_of, what_lacks, why_skipped
from pytest_gputrain.session.studies import Study, record_losses, search_batch
from pytest_gputrain.utils.errors import BadCase, CannotRun


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What a test asks of a case."""

    nodeid: str
    bar: Bar
    scaling: bool
    inline: bool
    builder: Any


class Runner:
    """Runs cases for the tests of one pytest process; a case is measured once however many tests ask for it."""

    def __init__(self, settings: Settings, executor: Executor | None = None) -> None:
        """
        Args:
            bench: where cases run; on this machine by default.

        Raises:
            BaselineError: the report or the published tables to compare with cannot be read.
        """
        self.settings = settings
        self.executor = executor or Executor(settings)
        self.standards = Standards(settings)
        self._keys: dict[tuple[str, str], Case] = {}
        self._suites = SuiteNoise()
        self.rounds = Rounds(self.executor)
        self._expected: Sequence[Expected] = ()

    def expect(self, cases: Sequence[Expected]) -> None:
        """Take notice of what the tests that were collected are parametrized with."""
        self._expected = cases
        self.executor.environment.collected()

    def declare(self, suite: str, case: Case) -> Case:
        """Remember that ``case`` goes by its id in ``suite``, and return the first case that did."""
        return self._keys.setdefault((suite, str(case)), case)

    def refuse_namesake(self, suite: str, case: Case, known: Case | None) -> None:
        """Files of one name in two folders would replace each other's baselines.

        Args:
            known: the case whose baseline there is.

        Raises:
            BadCase: that one is another file's, which is still there.
        """
        theirs, ours = ("" if one is None else one.code.partition("::")[0].removeprefix("inline:") for one in (known, case))
        # Code of a module that a test imports may move.
        are_tests = suite_of(Path(theirs)) == suite == suite_of(Path(ours))
        if are_tests and theirs != ours and (self.settings.root / theirs).is_file():
            raise BadCase(
                f"{case} of {ours} would share its baseline with that of {theirs}: both are the suite {suite}; rename a file"
            )

    def scale(self) -> Scale:
        """Of the cases.

        Raises:
            BadCase: the hardware is not what the options ask for.
        """
        return self.executor.scale()

    def check_selection(self, case: Case, markers: set[str], expression: str, *, scaling: bool = False) -> None:
        """Args:
            scaling: the test wants to know how the case scales.

        Raises:
            BadCase: the case names something unknown.
            CannotRun: this machine is not what the test was selected for, or lacks the devices.
        """
        wrong = problem(case, catalog.MARKERS)
        if wrong:
            raise BadCase(wrong)
        declared = platforms_of(case.platforms) if case.platforms else ()
        reason = why_skipped(markers | set(declared), expression, self.executor.host.platform, case.gpus)
        if reason:
            raise CannotRun(reason)
        lacking = what_lacks(
            case,
            gpus=self.executor.host.gpus,
            most_nodes=self.settings.nodes,
            most_processes=self.settings.processes,
            all_of_them=scaling and not self.is_study,
        )
        if lacking:
            raise CannotRun(lacking)

    def run(
        self,
        nodeid: str,
        suite: str,
        case: Case,
        *,
        judged: bool,
        scaling: bool = False,
        inline: bool = False,
        builder: Any = None,
        module: str = "",
        terms: Terms = NO_TERMS,
    ) -> Result:
        """Measure ``case``, unless this session did already, and judge it if asked and if its own figures were wanted.

        Args:
            scaling: compare a case of several processes with one worker alone, too.
            inline: run in this process.
            builder: the user's function itself, for an inline run that has no address.
            module: name under which this process imported the file of ``case.code``.
            terms: limits, which count for a case that is only measured, too, and tolerances of the test.

        Raises:
            BadCase: the id is another case's, the baseline cannot be read, or an inline run cannot have its GPU or the
                processes that a study takes.
        """
        judged = judged and not self.is_study
        first = self.declare(suite, case)
        if first.identity() != case.identity():
            raise BadCase(same_id(suite, first, case))
        case = self.executor.with_steps(case)
        inline = inline or self.settings.isolation == "inline"
        if inline and self.settings.gpu_ids:
            raise BadCase("an inline case runs on the first visible GPU; choose it by CUDA_VISIBLE_DEVICES, not --gpu-ids")
        if inline and self.is_study:
            raise BadCase(f"{case} runs inline, but --gpu-find-batch and --gpu-loss need fresh processes; deselect its test")
        processes, servers = self.executor.processes(case.gpus), self.executor.processes(case.servers)
        if inline and processes + servers > 1:
            raise BadCase(f"the case {case} has {processes + servers} processes, so it cannot run inline; leave inline out")
        if inline and case.parallel != "single":
            raise BadCase(f"the case {case} needs a process group, which an inline run has not; leave inline out")
        task = self.executor.task(case, module, growth_bytes=terms.growth_bytes, inline=inline)
        # What a study runs on is known when it has: the case as it is declared would be measured for nothing.
        host = self.executor.host if self.is_study else self.executor.host_of(task, inline)
        # Read before the case has run for minutes, where its machine is known: a broken file is better told at once.
        bar = self.standards.bar(suite, task, host, terms, judged=judged)
        self.refuse_namesake(suite, case, bar.baseline.case if bar.baseline else None)
        asked = _Asked(nodeid=nodeid, bar=bar, scaling=scaling, inline=inline, builder=builder)
        if not self.is_study and bar.wanted > 1:
            self.executor.expect(task, bar.wanted)
        # A closure may be of no use when its test is over.
        if not bar.records or inline:
            return self._result(asked, bar.wanted)
        return self.rounds.add(self._result(asked, 1), task, bar.wanted, functools.partial(self._result, asked))

    def _result(self, asked: _Asked, runs: int) -> Result:
        """What so many fresh processes of a case tell, and those that it takes further."""
        bar, study = asked.bar, self._study(asked, runs)
        case, replies, host = study.task.case, study.replies, self.executor.host_of(study.task, asked.inline)
        limits: tuple[LimitVerdict, ...] = ()
        while bar.terms.caps and not self.is_study:
            limits, settled = self.standards.limited(bar, replies)
            if settled:
                break
            replies = self._another(asked, replies)
        verdict = row = None
        if bar.judged and self.standards.are_published:
            row, verdict = self.standards.against_published(bar, case, replies)
        elif bar.judged:
            replies, verdict = self._verdict(asked, replies)
        return Result(
            nodeid=asked.nodeid,
            suite=bar.suite,
            key=bar.key,
            case=case,
            scale=bar.task.scale,
            platform=host.platform,
            device=host.device,
            replies=replies,
            resumed=self.executor.resumed(bar.task, asked.inline, asked.builder).origins,
            inline=asked.inline,
            variables=tuple(bar.task.variables),
            variables_digest=bar.task.variables_digest,
            summary=summarise(case, host.platform, replies),
            verdict=with_limits(case, verdict, limits),
            published=row,
            search=study.search,
            loss_curves=study.loss_curves,
        )

    @property
    def is_study(self) -> bool:
        """Whether an option wants to know something else than the cases' own figures."""
        return self.settings.find_batch or self.settings.loss_steps is not None

    def _study(self, asked: _Asked, runs: int) -> Study:
        """The case's own figures, or what an option wants to know instead. A process is started for each task once."""
        task, inline, builder = asked.bar.task, asked.inline, asked.builder

        def launch(task: Task) -> Reply:
            return self.executor.measure(task, inline, builder, 1)[0]

        if self.settings.find_batch:
            return search_batch(task, self.settings.find_batch_max, launch)
        if self.settings.loss_steps is not None:
            return record_losses(task, self.settings.loss_steps, asked.bar.host.platform, launch)
        return Study(task=task, replies=self.executor.measure(task, inline, builder, runs))

    def _verdict(self, of: _Asked, replies: tuple[Reply, ...]) -> tuple[tuple[Reply, ...], Verdict]:
        """What the replies mean, after further fresh processes where that is in doubt."""
        bar = of.bar
        most = len(replies) if bar.records else max(len(replies), self.standards.most(bar))
        looked = False
        while True:
            measured, no_scaling = replies, ""
            if of.scaling and bar.task.processes > 1:
                measured, no_scaling = self.executor.with_one_worker(bar.task, replies)
            judgement = self.standards.judgement(bar, measured, self._suites, most, no_scaling)
            self._suites.add(bar.suite, bar.key, judgement.first)
            judgement = self.standards.judgement(bar, measured, self._suites, most, no_scaling)
            if judgement.settled:
                verdict = judgement.verdict
                return measured, self.standards.recorded(bar, verdict, measured, no_scaling) if bar.records else verdict
            if judgement.first is not None and not looked:
                looked = True
                self._look_around()
                continue
            # Not those of the replies with one worker's seconds: these are found anew.
            replies = self._another(of, replies)

    def _another(self, of: _Asked, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        """The replies of a case in doubt, and that of a further process."""
        task, have = of.bar.task, len(replies)
        self.executor.expect(task, self.standards.next_runs(of.bar, have), soon=True)
        return self.executor.measure(task, of.inline, of.builder, have + 1, replies)

    def _look_around(self) -> None:
        """Measure so many other cases once that one can tell whether this one is slower or everything is, today.

        Their tests find the figures and go on from them. Where there are not enough cases, nothing is measured.
        """
        if not self._suites.lacking:
            return
        others = [
            expected
            for expected in self._expected
            if not self._suites.knows(expected.suite, key_of(expected.case, self.executor.scale()))
        ]
        if self._suites.lacking > len(others) or self.settings.isolation == "inline":
            return
        for suite, task, terms in self.claims(others):
            if not self._suites.lacking:
                return
            try:
                bar = self.standards.bar(suite, task, self.executor.host_of(task), terms)
            except BadCase:
                continue  # its own test will tell
            if bar.baseline is not None and bar.baseline.case.identity() == task.case.identity():
                replies = self.executor.measure(task, False, None, bar.wanted)
                self._suites.add(suite, bar.key, self.standards.judgement(bar, replies, self._suites, bar.wanted).first)

    def look_ahead(self) -> None:
        """Let a fleet know what the tests of this run will ask for."""
        if self.is_study:
            return

        @functools.cache  # found out when the first case runs: collecting needs none of it
        def foresight() -> Foresight:
            return Foresight(self.standards, self.claims(self._expected), self.executor.host)

        self.executor.expected_runs = lambda: foresight().first()
        self.executor.further_runs = lambda task, replies, host: foresight().further(task, replies, host)

    def claims(self, expected: Iterable[Expected]) -> Iterator[Claim]:
        """Of those that may run."""
        for suite, case, markers, expression, terms in expected:
            with contextlib.suppress(CannotRun, BadCase):
                self.check_selection(case, set(markers), expression)
                growth, stepped = terms.growth_bytes, self.executor.with_steps(case)
                yield Claim(suite, self.executor.task(stepped, "", growth_bytes=growth, prefetched=True), terms)

    def is_strict(self, device: str) -> bool:
        """Whether a case without a comparable baseline fails that ran on ``device``."""
        return self.standards.is_strict(device)
