"""Makes the lines of the history from the results of a run, one for each case; storage appends them to the file."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from pytest_gputrain.cases.libraries import LIBRARIES
from pytest_gputrain.gate.memory import PHASES
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.gate.summary import summarise
from pytest_gputrain.records import (
    Emulated,
    Environment,
    HistoryLine,
    Measured,
    Measurement,
    MetricName,
    Result,
    TrainingPhase,
)
from pytest_gputrain.records.history import COUNT_KEYS, knobs
from pytest_gputrain.records.reply import failure_of
from pytest_gputrain.records.result import CaseResult
from pytest_gputrain.report.results import counts_of, latest, of_kind
from pytest_gputrain.storage.history import read
from pytest_gputrain.utils.git import RunInfo
from pytest_gputrain.utils.units import format_nics, format_topology

Declared = Measured | Emulated
"""Results of cases as they are declared."""

_KINDS: Final[dict[type[CaseResult], Literal["measurement", "emulation"]]] = {
    Measured: "measurement",
    Emulated: "emulation",
}


class _LineIdentity(msgspec.Struct, frozen=True):
    """The fields of a line that no two lines share."""

    session: str
    device: str
    suite: str
    key: str


def lines_of(results: Sequence[Result], session: RunInfo) -> list[HistoryLine]:
    """Return a line for each case, from the last test that judged it, or else from the last that measured it.

    Searches and loss curves leave none: their figures are of other batches and steps than the case's.
    """
    declared: Sequence[Declared] = latest(of_kind(results, Measured, Emulated))
    return [_line_of(part, part_session) for result in declared for part, part_session in _by_session(result, session)]


def unwritten(path: Path, lines: Sequence[HistoryLine], session: RunInfo) -> list[HistoryLine]:
    """Return the ``lines`` that the file lacks. A resumed run has figures of earlier runs, whose lines the file may have.

    Raises:
        HistoryError: the file cannot be read.
    """
    if not path.exists() or all(line.session == session.id for line in lines):
        return list(lines)
    # A line that was cut off is ignored here, because appending reports it.
    present = {identity for _, identity in read(path, _LineIdentity, lambda torn: None)}
    return [line for line in lines if _LineIdentity(line.session, line.device, line.suite, line.key) not in present]


def _by_session(result: Declared, session: RunInfo) -> Iterator[tuple[Declared, RunInfo]]:
    """Return the runs of a case with the session that measured each. The verdict belongs to the last session."""
    if not isinstance(result, Measured) or not result.resumed:
        yield result, session
        return
    sessions = [
        RunInfo(id=origin.session, created=origin.date, commit=origin.commit, branch=origin.branch)
        for origin in result.resumed
    ]
    counts = [origin.runs for origin in result.resumed]
    ends = [*itertools.accumulate(counts), len(result.replies)]
    begin = 0
    for end, part_session in zip(ends, [*sessions, session], strict=True):
        replies, begin = result.replies[begin:end], end
        if replies:
            summary = summarise(result.case, result.platform, replies)
            verdict = result.verdict if end == len(result.replies) else None
            yield msgspec.structs.replace(result, replies=replies, summary=summary, verdict=verdict), part_session


def _line_of(result: Declared, session: RunInfo) -> HistoryLine:
    measured = [reply for reply in result.replies if isinstance(reply, Measurement)]
    failed = next((reply for reply in result.replies if not isinstance(reply, Measurement)), None)
    environments = [getattr(reply, "environment", None) for reply in result.replies]
    environment: Environment | None = next(filter(None, environments), None)
    emulated = result.figures if isinstance(result, Emulated) else None
    verdict, summary = result.verdict, result.summary
    outcome: Any = "emulated" if emulated else "measured"
    outcome = "out_of_memory" if emulated and not emulated.fits else outcome
    sentence = verdict.sentence if verdict else None
    if failed is not None:
        outcome = failure_of(failed)
        sentence = sentence or f"{result.case} {describe_failure(failed)}"
    packages = emulated.packages if emulated else environment.packages if environment else {}
    steps = [run.median_step_seconds for run in measured]
    scatter = [abs(step - middle) for run, middle in zip(measured, steps, strict=True) for step in run.step_seconds]
    compared = {
        f"{field}_{name}": _compared(result, metric, field)
        for metric, name in _COMPARED.items()
        for field in ("baseline", "limit")
    }
    time = verdict.metric("step_seconds") if verdict else None
    counts = counts_of(result)
    return HistoryLine(
        kind=_KINDS[type(result)],
        date=session.created,
        session=session.id,
        commit=session.commit,
        branch=session.branch,
        suite=result.suite,
        key=result.key,
        scale=result.scale,
        platform=result.platform,
        device=result.device,
        **_machine(environment),
        version_gputrain=_own_version(),
        **{f"version_{name}": packages.get(name) for name in LIBRARIES},  # type: ignore[arg-type]
        **knobs(result.case),
        changed_variables=",".join(result.variables) or None,
        outcome=outcome,
        verdict=verdict.status if verdict else None,
        sentence=sentence,
        runs=len(measured),
        median_step_seconds=summary.median_step_seconds if summary else None,
        least_step_seconds=min(steps, default=None),
        most_step_seconds=max(steps, default=None),
        step_mad_seconds=statistics.median(scatter) if scatter else None,
        **{name: getattr(summary, name, None) for name in _OF_SUMMARY},  # type: ignore[arg-type]
        **{name: _count(result, measured, name) for name in _COUNTS},  # type: ignore[arg-type]
        **{name: _phase(result, measured, phase) for name, phase in PHASES.items()},  # type: ignore[arg-type]
        bytes_per_step=emulated.bytes_per_step if emulated else None,
        fits=emulated.fits if emulated else None,
        step_sensitivity=time.sensitivity if time else None,
        **compared,  # type: ignore[arg-type]
        **{key: counts.get(figure) for key, figure in COUNT_KEYS.items()},  # type: ignore[arg-type]
    )


@functools.cache
def _own_version() -> str:
    """Return this package's version. It is cached, because reading the metadata takes longer than the rest of a line."""
    return metadata.version("pytest-gputrain")


_OF_SUMMARY: Final = (
    "samples_per_second",
    "tokens_per_second",
    "scaling_efficiency",
    "model_flops_utilization",
    "joules_per_sample",
    "power_watts",
    "clock_mhz",
    "gpu_utilization",
    "gpu_seconds",
    "gpu_busy_share",
)

_COUNTS: Final = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_used_bytes",
    "peak_host_bytes",
    "model_bytes",
    "parameters",
    "trainable_parameters",
    "flops_per_step",
    "recomputed_flops_per_step",
)
"""Whole numbers that every process counts for itself, or that an emulated GPU gives."""

_COMPARED: Final[dict[MetricName, str]] = {
    "step_seconds": "step_seconds",
    "peak_allocated_bytes": "peak_allocated_bytes",
}


def _count(result: Result, measured: Sequence[Measurement], name: str) -> int | None:
    if isinstance(result, Emulated):
        return getattr(result.figures, name, None)
    values = [value for run in measured if (value := getattr(run, name)) is not None]
    return statistics.median_high(values) if values else None


def _phase(result: Result, measured: Sequence[Measurement], phase: TrainingPhase) -> int | None:
    if isinstance(result, Emulated):
        return result.figures.phase_peak_bytes.get(phase) if result.figures else None
    peaks = [run.phase_peak_bytes[phase] for run in measured if phase in run.phase_peak_bytes]
    return statistics.median_high(peaks) if peaks else None


def _compared(result: Result, metric: MetricName, field: str) -> float | int | None:
    metric_verdict = result.verdict.metric(metric) if result.verdict else None
    value: float | None = getattr(metric_verdict, field) if metric_verdict else None
    return round(value) if value is not None and metric.endswith("_bytes") else value


def _machine(environment: Environment | None) -> dict[str, Any]:
    if environment is None:
        return dict.fromkeys(_MACHINE)
    known = {name: getattr(environment, field) for name, field in _MACHINE.items()}
    facts = {name: None if fact is msgspec.UNSET else fact for name, fact in known.items()}
    return facts | {
        "topology": format_topology(environment.topology) if environment.topology else None,
        "nics": None if environment.nics is msgspec.UNSET else format_nics(environment.nics),
    }


_SAME: Final = ("device_name", "device_type", "device_count", "device_memory_bytes", "topology", "host", "cpu_model", "os")
_MACHINE: Final = {
    **{name: name for name in (*_SAME, "threads", "cores", "host_memory_bytes", "nics")},
    **{f"version_{name}": name for name in ("python", "driver", "runtime", "cudnn", "nccl")},
}
"""Fields of `Environment` by the key of a line."""
