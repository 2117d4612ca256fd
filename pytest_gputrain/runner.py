"""Measures and judges the cases of one pytest process: the only place that knows all the rooms below."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.baselines import BaselineError, ReportStore, Store, key_of
from pytest_gputrain.cases import problem, same_id
from pytest_gputrain.company import no_baseline_of
from pytest_gputrain.hardware import catalog
from pytest_gputrain.here import BadCase
from pytest_gputrain.judge import Circumstances, Judgement, Tolerance, judge
from pytest_gputrain.limits import NO_TERMS, Limited, Terms, against, with_limits
from pytest_gputrain.measuring import Bench
from pytest_gputrain.outcome import summarise
from pytest_gputrain.published import PublishedStore
from pytest_gputrain.records import (
    Baseline,
    Case,
    Host,
    LimitVerdict,
    Measurement,
    OutOfMemory,
    Published,
    Reply,
    Result,
    Scale,
    Task,
    Verdict,
)
from pytest_gputrain.reproduction import reproduce, why_not_comparable
from pytest_gputrain.rounds import Rounds
from pytest_gputrain.selection import Expected, platforms_of, what_lacks, why_skipped
from pytest_gputrain.session import in_ci
from pytest_gputrain.settings import Settings
from pytest_gputrain.studies import Study, record_losses, search_batch
from pytest_gputrain.suites import Suites

_RECORDED_RUNS: Final = 5
"""Fresh processes of a baseline. On a CPU whose time is not judged one tells all: its memory is exact."""


class CannotRun(Exception):
    """The case must not run here; the reason to skip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What a test asks of a case."""

    nodeid: str
    suite: str
    key: str
    task: Task
    host: Host
    judged: bool
    records: bool
    """Whether its figures become a baseline."""
    wanted: int
    """Fresh processes, where they leave no doubt."""
    baseline: Baseline | None
    hint: str
    scaling: bool
    inline: bool
    builder: Any
    terms: Terms


class Runner:
    """Runs cases for the tests of one pytest process; a case is measured once however many tests ask for it."""

    def __init__(self, settings: Settings, bench: Bench | None = None) -> None:
        """
        Args:
            bench: where cases run; on this machine by default.

        Raises:
            BaselineError: the report or the published tables to compare with cannot be read.
        """
        self.settings = settings
        self.bench = bench or Bench(settings)
        self.store = Store(settings.baseline_dir)
        published, report = settings.baseline == "published", settings.baseline not in ("measured", "published")
        self._published = PublishedStore.beside(settings.baseline_dir) if published else None
        self._report = ReportStore(Path(settings.baseline)) if report else None
        self._keys: dict[tuple[str, str], Case] = {}
        self._suites = Suites()
        self.rounds = Rounds()
        self.expected: Sequence[Expected] = ()

    def declare(self, suite: str, case: Case) -> Case:
        """Remember that ``case`` goes by its id in ``suite``, and return the first case that did."""
        return self._keys.setdefault((suite, str(case)), case)

    def scale(self) -> Scale:
        """Of the cases.

        Raises:
            BadCase: the hardware is not what the options ask for.
        """
        return self.bench.scale()

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
        reason = why_skipped(markers | set(declared), expression, self.bench.host.platform, case.gpus)
        if reason:
            raise CannotRun(reason)
        lacking = what_lacks(
            case,
            gpus=self.bench.host.gpus,
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
        case = self.bench.with_steps(case)
        key = key_of(case, self.bench.scale())
        inline = inline or self.settings.isolation == "inline"
        if inline and self.settings.gpu_ids:
            raise BadCase("an inline case runs on the first visible GPU; choose it by CUDA_VISIBLE_DEVICES, not --gpu-ids")
        if inline and self.is_study:
            raise BadCase(f"{case} runs inline, but --gpu-find-batch and --gpu-loss need fresh processes; deselect its test")
        processes, servers = self.bench.processes(case.gpus), self.bench.processes(case.servers)
        if inline and processes + servers > 1:
            raise BadCase(f"the case {case} has {processes + servers} processes, so it cannot run inline; leave inline out")
        if inline and case.parallel != "single":
            raise BadCase(f"the case {case} needs a process group, which an inline run has not; leave inline out")
        task = self.bench.task(case, module)
        host = self.bench.place(task, inline)
        # Read before the case has run for minutes, where its machine is known: a broken file is better told at once.
        baseline, hint = self._baseline(suite, key, host) if judged and self._published is None else (None, "")
        records = judged and self._records(baseline)
        asked = _Asked(
            nodeid=nodeid,
            suite=suite,
            key=key,
            task=task,
            host=host,
            judged=judged,
            records=records,
            wanted=self._runs(records, host),
            baseline=baseline,
            hint=hint,
            scaling=scaling,
            inline=inline,
            builder=builder,
            terms=terms,
        )
        if not self.is_study and asked.wanted > 1:
            self.bench.expect(task, asked.wanted)
        # A closure may be of no use when its test is over.
        if not records or inline:
            return self._result(asked, asked.wanted)
        return self.rounds.add(self._result(asked, 1), asked.wanted, functools.partial(self._result, asked))

    def _result(self, asked: _Asked, runs: int) -> Result:
        """What so many fresh processes of a case tell, and those that it takes further."""
        study = self._study(asked, runs)
        case, replies = study.case, study.replies
        limits: tuple[LimitVerdict, ...] = ()
        while asked.terms.caps and not self.is_study:
            limits, settled = self._limited(asked, replies)
            if settled:
                break
            replies = self.bench.measure(asked.task, asked.inline, asked.builder, len(replies) + 1, replies)
        verdict = row = None
        if asked.judged and self._published is not None:
            row, verdict = self._against_published(self._published, asked, case, replies)
        elif asked.judged:
            replies, verdict = self._verdict(asked, replies)
        return Result(
            nodeid=asked.nodeid,
            suite=asked.suite,
            key=asked.key,
            case=case,
            scale=asked.task.scale,
            platform=asked.host.platform,
            device=asked.host.device,
            replies=replies,
            resumed=self.bench.taken(asked.task, asked.inline, asked.builder).origins,
            inline=asked.inline,
            summary=summarise(case, asked.host.platform, replies),
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
        task, inline, builder = asked.task, asked.inline, asked.builder

        def launch(task: Task) -> Reply:
            return self.bench.measure(task, inline, builder, 1)[0]

        if self.settings.find_batch:
            return search_batch(task, self.settings.find_batch_max, launch)
        if self.settings.loss_steps is not None:
            return record_losses(task, self.settings.loss_steps, asked.host.platform, launch)
        return Study(case=task.case, replies=self.bench.measure(task, inline, builder, runs))

    def _runs(self, records: bool, host: Host) -> int:
        """Fresh processes that a case starts with."""
        if self.settings.runs is not None:
            return self.settings.runs
        time_counts = host.gpus or self.settings.judge_cpu_time
        return _RECORDED_RUNS if records and time_counts else 1

    def _limited(self, of: _Asked, replies: tuple[Reply, ...]) -> Limited:
        most = max(of.wanted, 1 + self.settings.reruns)
        cpu_time = self.settings.judge_cpu_time
        return against(of.terms.caps, of.task.case, replies, scale=of.task.scale, cpu_time=cpu_time, most=most)

    def _verdict(self, of: _Asked, replies: tuple[Reply, ...]) -> tuple[tuple[Reply, ...], Verdict]:
        """What the replies mean, after further fresh processes where that is in doubt."""
        most = len(replies) if of.records else max(len(replies), 1 + self.settings.reruns)
        looked = False
        while True:
            measured, no_scaling = replies, ""
            if of.scaling and of.task.processes > 1:
                measured, no_scaling = self.bench.beside_one_worker(of.task, replies)
            self._suites.add(of.suite, of.key, self._judge(of, measured, most, no_scaling).first)
            judgement = self._judge(of, measured, most, no_scaling)
            if judgement.settled:
                verdict = judgement.verdict
                if of.records:
                    verdict = self._recorded(verdict, of.task.case, measured, of.baseline, no_scaling)
                return measured, verdict
            if judgement.first is not None and not looked:
                looked = True
                self._look_around()
                continue
            # Not those of the replies with one worker's seconds: these are found anew.
            replies = self.bench.measure(of.task, of.inline, of.builder, len(replies) + 1, replies)

    def _judge(self, of: _Asked, replies: tuple[Reply, ...], most: int, no_scaling: str) -> Judgement:
        baselines = (self._report or self.store).suite(of.host.device, of.suite) if of.baseline else {}
        circumstances = Circumstances(most=most, prior=self._suites.prior(of.suite, baselines), shift=self._suites.shift)
        return judge(of.task.case, replies, of.baseline, self._tolerance(of.terms), of.hint, no_scaling, circumstances)

    def _tolerance(self, terms: Terms = NO_TERMS) -> Tolerance:
        """The command line counts before what the test says, and that before the ini file."""
        time, memory, typed = self.settings.time_tolerance, self.settings.memory_tolerance, self.settings.typed
        if terms.time_tolerance is not None and "time-tolerance" not in typed:
            time = terms.time_tolerance
        if terms.memory_tolerance is not None and "memory-tolerance" not in typed:
            memory = terms.memory_tolerance
        return Tolerance(time=time, memory=memory, cpu_time=self.settings.judge_cpu_time)

    def _look_around(self) -> None:
        """Measure so many other cases once that one can tell whether this one is slower or everything is, today.

        Their tests find the figures and go on from them. Where there are not enough cases, nothing is measured.
        """
        others = [
            expected
            for expected in self.expected
            if not self._suites.knows(expected.suite, key_of(expected.case, self.bench.scale()))
        ]
        if self._suites.lacking > len(others) or self.settings.isolation == "inline":
            return
        for suite, task in self.tasks(others):
            if not self._suites.lacking:
                return
            case, key = task.case, key_of(task.case, task.scale)
            try:
                host = self.bench.place(task)
                baseline, _ = self._baseline(suite, key, host)
            except BadCase:
                continue  # its own test will tell
            if baseline is not None and baseline.case.identity() == case.identity():
                replies = self.bench.measure(task, False, None, self._runs(False, host))
                first = judge(case, replies, baseline, self._tolerance()).first
                self._suites.add(suite, key, first)

    def look_ahead(self) -> None:
        """Let a fleet know what the tests of this run will ask for."""
        if not self.is_study:
            self.bench.ahead = lambda: self.tasks(self.expected)

    def tasks(self, expected: Iterable[Expected]) -> Iterator[tuple[str, Task]]:
        """The suites and tasks of those that may run."""
        for suite, case, markers, expression in expected:
            with contextlib.suppress(CannotRun, BadCase):
                self.check_selection(case, set(markers), expression)
                yield suite, self.bench.task(self.bench.with_steps(case), "")

    def _baseline(self, suite: str, key: str, host: Host) -> tuple[Baseline | None, str]:
        """The case's baseline, and for a missing one what else there is.

        Raises:
            BadCase: the baseline file cannot be read.
        """
        device = host.device
        if self._report is not None:
            return self._report.get(device, suite, key), f"not in {self._report.path.name}"
        if self.settings.baseline_dir_named and self.settings.baseline_update == "no" and not self.store.folder.is_dir():
            # Mistyped, it would make every case new, which passes unless strict.
            raise BadCase(f"the baseline folder {self.store.folder} does not exist; --gpu-baseline-update makes it")
        try:
            baseline = self.store.get(device, suite, key)
        except BaselineError as error:
            raise BadCase(str(error)) from None
        others = [] if baseline else self.store.other_devices(device, suite)
        return baseline, f"this machine is {device}; there are some for {', '.join(others)}" if others else ""

    def _against_published(
        self, store: PublishedStore, asked: _Asked, case: Case, replies: tuple[Reply, ...]
    ) -> tuple[Published | None, Verdict]:
        """The row that the case can be compared with, and what the comparison says."""
        scale, elsewhere = asked.task.scale, store.platforms_of(asked.suite, str(case))
        row = store.get(asked.host.platform, asked.suite, str(case))
        verdict = reproduce(case, replies, row, self._tolerance(asked.terms), scale=scale, elsewhere=elsewhere)
        return None if why_not_comparable(case, row, scale) else row, verdict

    def is_strict(self, device: str) -> bool:
        """Whether a case without a comparable baseline fails that ran on ``device``."""
        if self.settings.strict is not None:
            return self.settings.strict
        if self._published is not None:
            return False  # Strictness by itself is for figures that somebody forgot to record; nobody records these.
        return in_ci() and (self._report is not None or self.store.has_device(device))

    def _records(self, baseline: Baseline | None) -> bool:
        """Whether an update option wants the case's figures."""
        update = self.settings.baseline_update
        return update == "all" or (update == "new-only" and baseline is None)

    def _recorded(
        self, verdict: Verdict, case: Case, replies: tuple[Reply, ...], baseline: Baseline | None, no_scaling: str
    ) -> Verdict:
        """The verdict, turned into ``recorded`` where these figures can be stored."""
        known = [one for one in replies if isinstance(one, Measurement | OutOfMemory) and one.environment is not None]
        if len(known) < len(replies):
            return verdict
        if why_not := no_baseline_of(known, baseline):
            return msgspec.structs.replace(verdict, status="failed", sentence=f"{case} {why_not}")
        what = "running out of memory" if isinstance(known[0], OutOfMemory) else "today's figures"
        what += f", without a scaling efficiency ({no_scaling})," if no_scaling else ""
        before = f"; before, {verdict.sentence}" if baseline is not None else ""
        return msgspec.structs.replace(verdict, status="recorded", sentence=f"{case} has {what} as its baseline now{before}")


def suite_of(path: Path) -> str:
    """Name of a test file's suite: ``test_llm_finetuning.py`` holds ``llm_finetuning``."""
    return path.stem.removeprefix("test_")
