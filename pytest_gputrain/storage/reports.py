"""Reads reports of ``--gpu-json``, and gives their results as baselines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pytest_gputrain.records import (
    Baseline,
    BaselineRun,
    Case,
    Emulated,
    GpuSteps,
    Measured,
    Measurement,
    OutOfMemory,
    Recorded,
    Reply,
    Report,
)
from pytest_gputrain.records.memory import without_lines
from pytest_gputrain.storage.baselines import decode


def read_report(path: Path, remedy: str = "give the file that --gpu-json wrote") -> Report:
    """Read the report in a file.

    Raises:
        BaselineError: it cannot be read, or is none of this package.
    """
    return decode(path, Report, "a report of --gpu-json", remedy, edited=False)


class ReportStore:
    """The results of an earlier report, used as baselines."""

    def __init__(self, path: Path) -> None:
        """Read the report.

        Raises:
            BaselineError: the file is no report of this package.
        """
        report = read_report(path)
        self.path = path
        self._suites: dict[str, dict[str, Baseline]] = {}
        self._variants: dict[tuple[str, str, str], Baseline] = {}
        self._recorded: dict[tuple[str, str, str, str], Recorded] = {}
        for result in sorted(
            report.results, key=lambda result: not result.variables
        ):  # The last entry is used, which is the case with unchanged variables.
            if isinstance(result, Emulated) and (recorded := to_recorded(result)) is not None:
                for digest in ("", result.variables_digest):
                    self._recorded[result.platform, result.suite, result.key, digest] = recorded
            if not isinstance(result, Measured):
                continue  # The entry was emulated, or has another batch or other steps than the case.
            baseline = to_baseline(result, date=report.created, session=report.session, commit=report.commit)
            if baseline.runs:
                self._suites.setdefault(result.suite, {})[result.key] = baseline
                self._variants[result.suite, result.key, result.variables_digest] = baseline

    def get(self, device: str, suite: str, key: str, variables_digest: str = "") -> Baseline | None:
        """Return the case's figures in the report, whatever device they are from. The gate decides whether they can be
        compared.

        Those that a test measured with the same changed variables come first."""
        return self._variants.get((suite, key, variables_digest)) or self.suite(device, suite).get(key)

    def suite(self, device: str, suite: str) -> Mapping[str, Baseline]:
        return self._suites.get(suite, {})

    def recorded(self, platform: str, suite: str, key: str, variables_digest: str = "") -> Recorded | None:
        """Return the case's run on an emulated GPU of the platform; None if the report has none."""
        of = platform, suite, key
        return self._recorded.get((*of, variables_digest)) or self._recorded.get((*of, ""))


def to_recorded(result: Emulated) -> Recorded | None:
    """Return the figures of ``result`` in the form of `storage.emulated`; None if it has none."""
    if result.figures is None:
        return None
    case = Case(**result.case.identity())
    return Recorded(case=case, scale=result.scale, figures=(result.figures.as_stored(),))


def to_baseline(result: Measured | Emulated, *, date: str, session: str, commit: str) -> Baseline:
    """Return the figures of ``result`` as a baseline. It has no runs if nothing was measured, or if a process crashed or
    timed out.

    Args:
        date: UTC, ISO 8601; this and the rest of the run whose result it is, which earlier ones may have begun.
        session: id of the pytest run.
        commit: the commit of the measured code; empty if it is unknown.
    """
    origins, replies = (result.resumed, result.replies) if isinstance(result, Measured) else ((), ())
    earlier = [origin for origin in origins for _ in range(origin.runs)]
    runs = (
        _baseline_run(reply, date=origin.date, session=origin.session, commit=origin.commit)
        if origin
        else _baseline_run(reply, date=date, session=session, commit=commit)
        for reply, origin in itertools.zip_longest(replies, earlier)
    )
    baseline_runs = tuple(msgspec.structs.replace(run, variables=result.variables) for run in runs if run is not None)
    # The number of steps and the declared platforms do not change what figures mean, so the baseline's case lacks both.
    return Baseline(device=result.device, case=Case(**result.case.identity()), scale=result.scale, runs=baseline_runs)


def _baseline_run(reply: Reply, *, date: str, session: str, commit: str) -> BaselineRun | None:
    if isinstance(reply, OutOfMemory) and reply.environment is not None:
        return BaselineRun(
            outcome="out_of_memory",
            out_of=reply.where,
            environment=reply.environment,
            date=date,
            session=session,
            commit=commit,
        )
    if not isinstance(reply, Measurement):
        return None
    waited = reply.core_wait_share
    figures = {name: getattr(reply, name) for name in BaselineRun.__struct_fields__ if hasattr(reply, name)} | {
        "warmup": len(reply.warmup_seconds),
        "step_seconds": tuple(map(_short, reply.step_seconds)),
        "core_wait_share": None if waited is None else round(waited, 4),
        "input_seconds": _short(reply.input_seconds)
        if reply.input_seconds is not None and reply.environment.device_type != "cpu"
        else None,
        "gpu_steps": _short_steps(reply.gpu_steps) if reply.gpu_steps else None,
        "largest": without_lines(reply.largest),
        "counts": reply.counts.as_stored() if reply.counts else None,
        "evaluation_counts": reply.evaluation_counts.as_stored() if reply.evaluation_counts else None,
        "one_worker_seconds": None if reply.one_worker_seconds is None else _short(reply.one_worker_seconds),
    }
    return BaselineRun(outcome="measured", date=date, session=session, commit=commit, **figures)


def _short_steps(steps: GpuSteps) -> GpuSteps:
    seconds, collective_seconds = (tuple(map(_short, column)) for column in msgspec.structs.astuple(steps))
    return GpuSteps(seconds=seconds, collective_seconds=collective_seconds)


def _short(seconds: float) -> float:
    """Return the number rounded to six digits, which are more than a clock gives and readable in a diff."""
    return float(f"{seconds:.6g}")
