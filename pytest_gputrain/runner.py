"""Measures and judges the cases of one pytest process: the only place that knows all the rooms below."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pytest_gputrain import launch
from pytest_gputrain.baselines import BaselineError, ReportStore, Store, key_of
from pytest_gputrain.cases import problem, same_id
from pytest_gputrain.hardware import catalog, topology
from pytest_gputrain.hardware.devices import Gpu, HardwareError
from pytest_gputrain.hardware.lease import lease, lease_cores
from pytest_gputrain.hardware.machine import Machine, detect
from pytest_gputrain.judge import Tolerance, describe_failure, judge
from pytest_gputrain.outcome import summarise
from pytest_gputrain.published import PublishedStore
from pytest_gputrain.records import (
    Baseline,
    Case,
    Event,
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
from pytest_gputrain.scaling import one_worker
from pytest_gputrain.selection import platforms_of, why_skipped
from pytest_gputrain.settings import Settings
from pytest_gputrain.studies import Study, record_losses, search_batch

Watch = Callable[[Case, Event], None]


class CannotRun(Exception):
    """The case must not run here; the reason to skip."""


class BadCase(Exception):
    """The case makes no sense, or what it needs is broken; the sentence to fail with."""


class Runner:
    """Runs cases for the tests of one pytest process; a case is measured once however many tests ask for it."""

    def __init__(self, settings: Settings, *, watch: Watch = lambda case, event: None) -> None:
        """Raises:
        BaselineError: the report or the published tables to compare with cannot be read.
        """
        self.settings = settings
        self.watch = watch
        self.store = Store(settings.baseline_dir)
        published, report = settings.baseline == "published", settings.baseline not in ("measured", "published")
        self._published = PublishedStore.beside(settings.baseline_dir) if published else None
        self._report = ReportStore(Path(settings.baseline)) if report else None
        self._machine: Machine | None = None
        self._preloaded = launch.Preloaded() if settings.isolation == "auto" else None
        self._replies: dict[bytes, tuple[Reply, ...]] = {}
        self._keys: dict[tuple[str, str], Case] = {}

    @property
    def machine(self) -> Machine:
        """Found out when the first case asks: collecting needs no driver.

        Raises:
            BadCase: the hardware is not what the options ask for.
        """
        if self._machine is None:
            try:
                self._machine = detect(platform=self.settings.platform, gpu_ids=self.settings.gpu_ids)
            except HardwareError as error:
                raise BadCase(str(error)) from None
        return self._machine

    def close(self) -> None:
        """End what was kept running for the cases to come."""
        if self._preloaded is not None:
            self._preloaded.close()

    def declare(self, suite: str, case: Case) -> Case:
        """Remember that ``case`` goes by its id in ``suite``, and return the first case that did."""
        return self._keys.setdefault((suite, str(case)), case)

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
        reason = why_skipped(markers | set(declared), expression, self.machine.platform, case.gpus)
        if reason:
            raise CannotRun(reason)
        here = len(self.machine.gpus)
        if here and case.gpus > here and case.gpus % here:
            raise CannotRun(
                f"needs {case.gpus} GPUs, found {here}; several nodes are taken whole, so no number of them fits"
            )
        if here and case.gpus > here and case.servers:
            raise CannotRun(f"needs {case.gpus} GPUs, found {here}; a case with parameter servers stays on one node")
        if here and (nodes := self._nodes(case)) > self.settings.nodes:
            raise CannotRun(f"needs {case.gpus} GPUs, found {here}; --gpu-nodes={nodes} takes those of {nodes} nodes")
        if self.machine.gpus:
            return
        if scaling and not self._is_study and self._processes(case.gpus) < case.gpus:
            # Fewer would exercise the engine as well, but their efficiency is not that of the case.
            raise CannotRun(f"needs {case.gpus} processes; --gpu-processes={case.gpus} runs them on a CPU")
        if case.gpus + case.servers > 1 and self.settings.processes == 1:
            few = "two workers and two servers at most" if case.servers else "two of them"
            raise CannotRun(f"needs {case.gpus + case.servers} processes; --gpu-processes=2 runs {few} on a CPU")
        if case.parallel.startswith("zero") and case.precision == "fp16":
            raise CannotRun("needs a GPU: DeepSpeed's fp16 refuses a CPU")

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
    ) -> Result:
        """Measure ``case``, unless this session did already, and judge it if asked and if its own figures were wanted.

        Args:
            scaling: compare a case of several processes with one worker alone, too.
            inline: run in this process.
            builder: the user's function itself, for an inline run that has no address.
            module: name under which this process imported the file of ``case.code``.

        Raises:
            BadCase: the id is another case's, the baseline cannot be read, or an inline run cannot have its GPU or the
                processes that a study takes.
        """
        judged = judged and not self._is_study
        first = self.declare(suite, case)
        if first.identity() != case.identity():
            raise BadCase(same_id(suite, first, case))
        steps, warmup = self.settings.steps, self.settings.warmup
        case = case.replace(steps=case.steps if steps is None else steps, warmup=case.warmup if warmup is None else warmup)
        scale = self._scale()
        key = key_of(case, scale)
        # Read first: a broken file is better told before the case has run for minutes.
        baseline, hint = self._baseline(suite, key) if judged and self._published is None else (None, "")
        inline = inline or self.settings.isolation == "inline"
        if inline and self.settings.gpu_ids:
            raise BadCase("an inline case runs on the first visible GPU; choose it by CUDA_VISIBLE_DEVICES, not --gpu-ids")
        if inline and self._is_study:
            raise BadCase(f"{case} runs inline, but --gpu-find-batch and --gpu-loss need fresh processes; deselect its test")
        processes, servers = self._processes(case.gpus), self._processes(case.servers)
        if inline and processes + servers > 1:
            raise BadCase(f"the case {case} has {processes + servers} processes, so it cannot run inline; leave inline out")
        if inline and case.parallel != "single":
            raise BadCase(f"the case {case} needs a process group, which an inline run has not; leave inline out")
        task = Task(
            case=case,
            scale=scale,
            device_type=self.machine.device_type,
            processes=processes,
            servers=servers,
            root=str(self.settings.root),
            module=module,
            import_paths=tuple(path for path in sys.path if path),
        )
        study = self._study(task, inline, builder)
        case, replies = study.case, study.replies
        no_scaling = ""
        if scaling and judged and self._published is None and processes > 1:
            replies, no_scaling = self._beside_one_worker(task, replies)
        verdict = row = None
        tolerance = Tolerance(time=self.settings.time_tolerance, memory=self.settings.memory_tolerance)
        if judged and self._published is not None:
            row, verdict = self._against_published(self._published, suite, case, replies, tolerance)
        elif judged:
            verdict = judge(case, replies, baseline, tolerance, hint, no_scaling)
            verdict = self._recorded(verdict, case, replies, baseline, no_scaling)
        return Result(
            nodeid=nodeid,
            suite=suite,
            key=key,
            case=case,
            scale=scale,
            platform=self.machine.platform,
            device=self.machine.slug,
            replies=replies,
            summary=summarise(case, self.machine, replies),
            verdict=verdict,
            published=row,
            search=study.search,
            loss_curves=study.loss_curves,
        )

    @property
    def _is_study(self) -> bool:
        """Whether an option wants to know something else than the cases' own figures."""
        return self.settings.find_batch or self.settings.loss_steps is not None

    def _study(self, task: Task, inline: bool, builder: Any) -> Study:
        """The case's own figures, or what an option wants to know instead. A process is started for each task once."""

        def launch(task: Task) -> Reply:
            return self._measure(task, inline, builder)[0]

        if self.settings.find_batch:
            return search_batch(task, self.settings.find_batch_max, launch)
        if self.settings.loss_steps is not None:
            return record_losses(task, self.settings.loss_steps, self.machine.platform, launch)
        return Study(case=task.case, replies=self._measure(task, inline, builder))

    def _measure(self, task: Task, inline: bool, builder: Any) -> tuple[Reply, ...]:
        case = task.case
        identity = msgspec.json.encode((case.identity(), case.steps, case.warmup, task.scale, task.curve, inline))
        known = self._replies.get(identity)
        # An inline function has no address to be known by again.
        if known is not None and builder is None:
            return known
        replies: list[Reply] = []
        while len(replies) < self.settings.runs and all(isinstance(reply, Measurement | OutOfMemory) for reply in replies):
            replies.append(self._launch(task, inline, builder))
        self._replies[identity] = tuple(replies)
        return self._replies[identity]

    def _beside_one_worker(self, task: Task, replies: tuple[Reply, ...]) -> tuple[tuple[Reply, ...], str]:
        """The case's replies with what one worker alone takes, or why that is not known; empty where the case itself has
        no figures."""
        if not all(isinstance(reply, Measurement) for reply in replies):
            return replies, ""
        case = one_worker(task.case)
        alone = self._measure(msgspec.structs.replace(task, case=case, processes=self._processes(case.gpus)), False, None)
        seconds: list[float] = []
        for reply in alone:
            if not isinstance(reply, Measurement):
                return replies, f"one worker alone {describe_failure(reply)}"
            update = reply.update_seconds(case.gradient_accumulation)
            if update is None:
                return replies, f"{len(reply.step_seconds)} steps hold no whole update of {case.gradient_accumulation}"
            seconds.append(update)
        median = statistics.median(seconds)
        return tuple(msgspec.structs.replace(reply, one_worker_seconds=median) for reply in replies), ""

    def _baseline(self, suite: str, key: str) -> tuple[Baseline | None, str]:
        """The case's baseline, and for a missing one what else there is.

        Raises:
            BadCase: the baseline file cannot be read.
        """
        device = self.machine.slug
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
        self, store: PublishedStore, suite: str, case: Case, replies: tuple[Reply, ...], tolerance: Tolerance
    ) -> tuple[Published | None, Verdict]:
        """The row that the case can be compared with, and what the comparison says."""
        scale, elsewhere = self._scale(), store.platforms_of(suite, str(case))
        row = store.get(self.machine.platform, suite, str(case))
        verdict = reproduce(case, replies, row, tolerance, scale=scale, elsewhere=elsewhere)
        return None if why_not_comparable(case, row, scale) else row, verdict

    def is_strict(self) -> bool:
        """Whether a case without a comparable baseline fails."""
        if self.settings.strict is not None:
            return self.settings.strict
        if self._published is not None:
            return False  # Strictness by itself is for figures that somebody forgot to record; nobody records these.
        in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false", "no", "off")
        return in_ci and (self._report is not None or self.store.has_device(self.machine.slug))

    def _recorded(
        self, verdict: Verdict, case: Case, replies: tuple[Reply, ...], baseline: Baseline | None, no_scaling: str
    ) -> Verdict:
        """The verdict, turned into ``recorded`` where an update option stores these figures."""
        update = self.settings.baseline_update
        if update == "no" or (update == "new-only" and baseline is not None):
            return verdict
        if any(not isinstance(reply, Measurement | OutOfMemory) or reply.environment is None for reply in replies):
            return verdict
        out = any(isinstance(reply, OutOfMemory) for reply in replies)
        what = "running out of memory" if out else "today's figures"
        what += f", without a scaling efficiency ({no_scaling})," if no_scaling else ""
        before = f"; before, {verdict.sentence}" if baseline is not None else ""
        return msgspec.structs.replace(verdict, status="recorded", sentence=f"{case} has {what} as its baseline now{before}")

    def _launch(self, task: Task, inline: bool, builder: Any) -> Reply:
        def watch(event: Event) -> None:
            self.watch(task.case, event)

        visible = self.machine.gpus
        nodes = self._nodes(task.case)
        count = min(task.case.gpus, len(visible)) if visible else task.processes + task.servers
        with _lent(visible[:1] if inline else visible, count) as gpus:
            between = topology.paths(gpus)
            if inline:
                reply = launch.inline(task, builder)
            elif nodes > 1:
                cluster = launch.Cluster(nodes=nodes, shared=self.settings.shared, rendezvous=self.settings.rendezvous)
                reply = launch.on_nodes(
                    task, gpus=gpus, timeout_seconds=self.settings.timeout_seconds, cluster=cluster, watch=watch
                )
            else:
                reply = launch.in_process(
                    task,
                    gpus=gpus,
                    timeout_seconds=self.settings.timeout_seconds,
                    watch=watch,
                    preloaded=self._preloaded,
                )
            return _with_hardware(reply, gpus[0].driver, between) if gpus else reply

    def _processes(self, declared: int) -> int:
        """On a CPU a parallelism is exercised rather than measured: fewer processes show as much."""
        return declared if self.machine.gpus else min(declared, self.settings.processes)

    def _nodes(self, case: Case) -> int:
        """That the case takes: as many as have its GPUs, or on a CPU as many as the option allows."""
        if self.machine.gpus:
            return math.ceil(case.gpus / len(self.machine.gpus))
        return 1 if case.servers else min(self.settings.nodes, self._processes(case.gpus))

    def _scale(self) -> Scale:
        if self.settings.scale != "auto":
            return self.settings.scale
        return "full" if self.machine.gpus else "tiny"


@contextlib.contextmanager
def _lent(gpus: tuple[Gpu, ...], count: int) -> Iterator[tuple[Gpu, ...]]:
    """So many of the GPUs, or turns on as many cores of a machine that has none."""
    if not gpus:
        with lease_cores(count):
            yield ()
        return
    try:
        with lease(gpus, count) as lent:
            yield lent
    except HardwareError as error:
        raise BadCase(str(error)) from None


def suite_of(path: Path) -> str:
    """Name of a test file's suite: ``test_llm_finetuning.py`` holds ``llm_finetuning``."""
    return path.stem.removeprefix("test_")


def _with_hardware(reply: Reply, driver: str, between: tuple[tuple[str, ...], ...]) -> Reply:
    """The reply with what only the parent knows of the machine."""
    if isinstance(reply, Measurement | OutOfMemory) and reply.environment is not None:
        environment = msgspec.structs.replace(reply.environment, driver=driver, topology=between)
        return msgspec.structs.replace(reply, environment=environment)
    return reply
