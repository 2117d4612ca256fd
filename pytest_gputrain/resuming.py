"""What an earlier run measured already, for one that picks up what is missing."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_gputrain.baselines import BaselineError, read_report
from pytest_gputrain.cases import versions
from pytest_gputrain.records import Case, Environment, Measurement, Origin, OutOfMemory, Reply, Report, Result, Scale, Task
from pytest_gputrain.session import Session
from pytest_gputrain.settings import Settings


class Taken(NamedTuple):
    """What there is of one case."""

    replies: tuple[Reply, ...] = ()
    """As fresh processes gave them: without what one worker alone took."""
    one_worker_seconds: tuple[float, ...] = ()
    """Of the first of them."""
    origins: tuple[Origin, ...] = ()

    @property
    def environments(self) -> list[Environment]:
        figures = (reply for reply in self.replies if isinstance(reply, Measurement | OutOfMemory))
        return [reply.environment for reply in figures if reply.environment is not None]


class Resumption:
    """The figures of an earlier report that hold for this run, too.

    What concerns the code refuses the report as a whole: the commit, what is not committed, versions of libraries, and how
    others on the GPUs were seen. What concerns a case leaves that one to be measured: other steps, scale, device, processes.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self.path = path
        self.report = report
        self._found: dict[bytes, Taken] = {}
        for result in report.results:
            if result.search is None and not result.loss_curves and (taken := _taken(result, report)).replies:
                key = _key(result.case, result.scale, result.inline, result.device)
                known = self._found.get(key, Taken())
                self._found[key] = max(known, taken, key=lambda one: (len(one.replies), len(one.one_worker_seconds)))

    @classmethod
    def read(cls, path: Path, settings: Settings) -> Resumption:
        """Raises:
        BaselineError: the file is no report, or its figures are not those that this run would measure.
        """
        try:
            report = read_report(path)
        except BaselineError as error:
            raise BaselineError(f"--gpu-resume: {error}") from None
        for why in _refusals(report, settings):
            raise BaselineError(f"--gpu-resume: {path} {why}, or leave --gpu-resume out to measure all cases")
        return cls(path, report)

    def of(self, task: Task, *, inline: bool, device: str, nodes: int) -> Taken:
        """Replies of the case that stand for as many fresh processes.

        Args:
            device: slug of the machine that would run it.
            nodes: that it would take there.
        """
        taken = self._found.get(_key(task.case, task.scale, inline, device), Taken())
        same = ((environment.device_count, len(environment.hosts) or 1) for environment in taken.environments)
        return taken if all(one == (task.processes + task.servers, nodes) for one in same) else Taken()

    def beyond(self, results: list[Result]) -> Iterator[Result]:
        """What the earlier report has besides ``results``, unjudged: a run that resumes and is ended early loses nothing."""
        there = {(result.nodeid, result.key, result.device) for result in results}
        for result in self.report.results:
            taken = _taken(result, self.report)
            if (result.nodeid, result.key, result.device) not in there and 0 < len(result.replies) == len(taken.replies):
                yield msgspec.structs.replace(result, verdict=None, to_come=0, resumed=taken.origins)


def _key(case: Case, scale: Scale, inline: bool, device: str) -> bytes:
    return msgspec.json.encode((case.identity(), case.steps, case.warmup, scale, inline, device))


def _taken(result: Result, report: Report) -> Taken:
    """The result's replies up to the first without figures."""
    known = list(itertools.takewhile(_has_figures, result.replies))
    alone = itertools.takewhile(
        lambda seconds: seconds is not None, (getattr(reply, "one_worker_seconds", None) for reply in known)
    )
    earlier = sum(origin.runs for origin in result.resumed)
    here = Origin(
        session=report.session, date=report.created, commit=report.commit, branch=report.branch, runs=len(known) - earlier
    )
    bare = [
        msgspec.structs.replace(reply, one_worker_seconds=None) if isinstance(reply, Measurement) else reply
        for reply in known
    ]
    return Taken(tuple(bare), tuple(filter(None, alone)), (*result.resumed, here) if here.runs else result.resumed)


def _has_figures(reply: Reply) -> bool:
    """Whether it measured or ran out of memory, and tells where: a worker that the kernel killed may not."""
    return isinstance(reply, Measurement | OutOfMemory) and reply.environment is not None


def _refusals(report: Report, settings: Settings) -> Iterator[str]:
    """What would make its figures a lie, were they given for this run's."""
    now = Session.begin(settings.root, settings.written)
    there, here = report.commit.removesuffix("+dirty"), now.commit.removesuffix("+dirty")
    if there and here and there != here:
        yield f"is of commit {there}, and this is {here}; check that out"
    if there and here and report.changes != now.changes:
        yield f"is of {there} with other uncommitted changes than there are now; restore those"
    foreign = report.settings.get("foreign", settings.foreign)
    if foreign != settings.foreign:
        yield f"was measured with --gpu-foreign={foreign}; give the same"
    made_with = report.generator.rpartition(" ")[2]
    installed = {"python": platform.python_version(), "pytest-gputrain": metadata.version("pytest-gputrain"), **versions()}
    for environment in (one for result in report.results for one in _taken(result, report).environments):
        before = {"python": environment.python, "pytest-gputrain": made_with, **environment.packages}
        for name in before.keys() & installed.keys():
            if before[name] != installed[name]:
                yield f"was measured with {name} {before[name]}, and here is {installed[name]}; install that"
