"""Reads the report of an earlier run, so that a run measures only what is missing (`--gpu-resume`)."""

from __future__ import annotations

import itertools
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_gputrain.cases.libraries import versions
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.records import (
    BatchSearch,
    Case,
    Environment,
    Host,
    LossStudy,
    Measured,
    Measurement,
    Origin,
    OutOfMemory,
    Reply,
    Report,
    Result,
    Scale,
    Task,
)
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.reports import read_report
from pytest_gputrain.utils.git import RunInfo


class ResumedReplies(NamedTuple):
    """The replies that an earlier report has of one case."""

    replies: tuple[Reply, ...] = ()
    """The replies of fresh processes, without the times of one worker alone."""
    one_worker_seconds: tuple[float, ...] = ()
    """The step times of one worker alone in the first of them."""
    origins: tuple[Origin, ...] = ()
    host: Host | None = None
    """The host of the first reply."""

    @property
    def environments(self) -> list[Environment]:
        figures = (reply for reply in self.replies if isinstance(reply, Measurement | OutOfMemory))
        return [reply.environment for reply in figures if reply.environment is not None]


class ResumedReport:
    """The figures of an earlier report that a resumed run does not measure again.

    What concerns the code refuses the report as a whole: the commit, what is not committed, versions of libraries, and how
    others on the GPUs were seen. What concerns a case leaves that one to be measured: other steps, scale, device, processes.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self.path = path
        self.report = report
        self._found: defaultdict[bytes, list[ResumedReplies]] = defaultdict(list)
        for result in report.results:
            if isinstance(result, Measured) and (resumed := _resumed_replies(result, report)).replies:
                self._found[_key(result.case, result.scale, result.inline, result.variables_digest)].append(resumed)

    @classmethod
    def read(cls, path: Path, settings: Settings) -> ResumedReport:
        """Read the report that this run resumes.

        Raises:
            BaselineError: the file is no report, or its figures are not those that this run would measure.
        """
        try:
            report = read_report(path)
        except BaselineError as error:
            raise BaselineError(f"--gpu-resume: {error}") from None
        for why in _reasons_to_refuse(report, settings):
            raise BaselineError(f"--gpu-resume: {path} {why}, or leave --gpu-resume out to measure all cases")
        return cls(path, report)

    def of(self, task: Task, *, inline: bool, host: Host) -> ResumedReplies:
        """Return the report's replies of the case. If several tests have some, the test with the most replies counts.

        Args:
            host: the machine that would run it; one without a name may turn out to be any device of its platform.
        """
        fitting = [
            resumed
            for resumed in self._found.get(_key(task.case, task.scale, inline, task.variables_digest), ())
            if resumed.host is not None
            and resumed.host.platform == host.platform
            and (resumed.host.device == host.device or not host.name)
            and all(
                _processes_and_nodes(environment) == (task.processes + task.servers, task.nodes)
                for environment in resumed.environments
            )
        ]
        return max(
            fitting, key=lambda resumed: (len(resumed.replies), len(resumed.one_worker_seconds)), default=ResumedReplies()
        )

    def beyond(self, results: Iterable[Result]) -> Iterator[Result]:
        """Return the earlier results that ``results`` lacks, without verdicts, so that a resumed run that is ended early
        loses nothing."""
        there = {_result_key(result) for result in results}
        for result in self.report.results:
            if _result_key(result) in there:
                continue
            if isinstance(result, BatchSearch | LossStudy):
                yield result
            elif isinstance(result, Measured) and (resumed := _resumed_replies(result, self.report)).replies:
                replies = result.replies[: len(resumed.replies)]
                yield msgspec.structs.replace(result, replies=replies, verdict=None, to_come=0, resumed=resumed.origins)


def _key(case: Case, scale: Scale, inline: bool, variables_digest: str) -> bytes:
    return msgspec.json.encode((case.identity(), case.steps, case.warmup, case.epoch, scale, inline, variables_digest))


def _result_key(result: Result) -> tuple[str, str, str, str]:
    return result.nodeid, result.key, result.device, result.variables_digest


def _processes_and_nodes(environment: Environment) -> tuple[int, int]:
    """Return the numbers of processes and of nodes."""
    return environment.device_count, len(environment.hosts) or 1


def _resumed_replies(result: Measured, report: Report) -> ResumedReplies:
    """Return the replies of the result up to the first one without figures."""
    replies = list(itertools.takewhile(_has_figures, result.replies))
    alone = itertools.takewhile(
        lambda seconds: seconds is not None, (getattr(reply, "one_worker_seconds", None) for reply in replies)
    )
    earlier = sum(origin.runs for origin in result.resumed)
    here = Origin(
        session=report.session, date=report.created, commit=report.commit, branch=report.branch, runs=len(replies) - earlier
    )
    bare = [
        msgspec.structs.replace(reply, one_worker_seconds=None) if isinstance(reply, Measurement) else reply
        for reply in replies
    ]
    origins = (*result.resumed, here) if here.runs else result.resumed
    resumed = ResumedReplies(tuple(bare), tuple(filter(None, alone)), origins)
    name = next((environment.host for environment in resumed.environments), "")
    return resumed._replace(
        host=Host(name=name, platform=result.platform, device=result.device, gpus=int(result.platform != CPU))
    )


def _has_figures(reply: Reply) -> bool:
    """Tell whether a reply has figures and the environment they belong to. The reply of a worker that the kernel killed may
    lack the environment."""
    return isinstance(reply, Measurement | OutOfMemory) and reply.environment is not None


def _reasons_to_refuse(report: Report, settings: Settings) -> Iterator[str]:
    """Yield the reasons why this run cannot use the figures of the report."""
    now = RunInfo.begin(settings.root, settings.written)
    there, here = report.commit.removesuffix("+dirty"), now.commit.removesuffix("+dirty")
    if there and here and there != here:
        yield f"is of commit {there}, and this is {here}; check that commit out"
    if there and here and report.changes != now.changes:
        yield f"is of {there} with other uncommitted changes; restore them"
    foreign = report.settings.get("foreign", settings.foreign)
    if foreign != settings.foreign:
        yield f"was measured with gpu_foreign={foreign}; give the same"
    made_with = report.generator.rpartition(" ")[2]
    installed = {"python": platform.python_version(), "pytest-gputrain": metadata.version("pytest-gputrain"), **versions()}
    for environment in (
        resumed
        for result in report.results
        if isinstance(result, Measured)
        for resumed in _resumed_replies(result, report).environments
    ):
        before = {"python": environment.python, "pytest-gputrain": made_with, **environment.packages}
        for name in before.keys() & installed.keys():
            if before[name] != installed[name]:
                yield f"was measured with {name} {before[name]}, and here is {installed[name]}; install that"
