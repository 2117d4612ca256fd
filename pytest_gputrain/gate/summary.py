"""Derives the figures that readers see from the replies of a case, or says why there are none. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pytest_gputrain.gate import rank_spread
from pytest_gputrain.gate.loss_trend import describe_failed_curves
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.gate.scaling import efficiency
from pytest_gputrain.hardware import catalog
from pytest_gputrain.records import Case, LossStudy, Measurement, Reply, Result, Summary
from pytest_gputrain.utils.sanitize import shown

_DETAIL_LINES: Final = 25
"""The lines shown of a detail: of its beginning, where a traceback has own code, and of its end, where it has the error."""


def summarise(case: Case, platform: str, replies: tuple[Reply, ...]) -> Summary | None:
    """Return the figures of a case from the runs that measured; None if none did.

    Args:
        platform: catalog marker of the machine.
    """
    measured = [reply for reply in replies if isinstance(reply, Measurement)]
    if not measured:
        return None
    seconds = statistics.median(run.median_step_seconds for run in measured)
    first = measured[0]
    samples = first.batch_size / seconds
    return Summary(
        median_step_seconds=seconds,
        samples_per_second=samples,
        tokens_per_second=first.tokens_per_step / seconds if first.tokens_per_step else None,
        peak_allocated_bytes=statistics.median_high(run.peak_allocated_bytes for run in measured),
        model_flops_utilization=_utilization(case, platform, first, seconds),
        scaling_efficiency=efficiency(case, measured),
        ranks=rank_spread.widest(measured),
        first_step_seconds=_middle(next(iter(run.warmup_seconds), None) for run in measured),
        **_gpu_figures(measured),
    )


def _utilization(case: Case, platform: str, run: Measurement, seconds: float) -> float | None:
    """Compute the utilization: the time that the FLOPs of a step would take at peak rates, as a share of the time that it
    took."""
    peak = catalog.peak_flops(platform, case.precision, tf32=bool(case.tf32))
    # A step that multiplies in two types has no single peak rate. A head in fp32 is such a second type, unless autocast
    # changes its type.
    of_two_types = case.quantized_compute not in ("", case.precision) or (case.unquantized_fp32 and case.precision == "bf16")
    if peak is None or run.flops_per_step is None or of_two_types:
        return None
    in_tf32 = run.tf32_share if run.tf32_share and case.precision == "fp32" and not case.tf32 else 0.0
    peak_of_tf32 = catalog.peak_flops(platform, "fp32", tf32=True)
    if in_tf32 and peak_of_tf32 is None:
        return None
    seconds_of_flop = (1 - in_tf32) / peak + (in_tf32 / peak_of_tf32 if peak_of_tf32 else 0.0)
    return run.flops_per_step * seconds_of_flop / case.gpus / seconds


def _middle(values: Iterable[float | None]) -> float | None:
    """Compute the median over the runs that have the figure; None if none has."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def _gpu_figures(measured: Sequence[Measurement]) -> dict[str, Any]:
    """Return the figures of a summary that come from GPUs."""
    samples = [run.telemetry for run in measured if run.telemetry is not None]
    clocks = [telemetry.clock_mhz for telemetry in samples if telemetry.clock_mhz is not None]
    joules = _middle(run.joules_per_step for run in measured)
    return {
        "joules_per_step": joules,
        "joules_per_sample": None if joules is None else joules / measured[0].batch_size,
        "power_watts": _middle(telemetry.power_watts for telemetry in samples),
        "clock_mhz": statistics.median_low(clocks) if clocks else None,
        "gpu_utilization": _middle(telemetry.utilization for telemetry in samples),
        "gpu_seconds": _middle(run.gpu_seconds for run in measured),
        "gpu_busy_share": _middle(run.gpu_busy_share for run in measured),
    }


def failure_of(result: Result) -> str | None:
    """Say why a result is no measurement; None if it is one."""
    for reply in result.replies:
        if not isinstance(reply, Measurement):
            return f"{result.case} {describe_failure(reply)}"
    return describe_failed_curves(result.case, result.loss_curves) if isinstance(result, LossStudy) else None


def detail_of(result: Result) -> str:
    """Return the traceback, stacks or stderr of a failed case, without the middle of a long text; empty for other cases."""
    for reply in result.replies:
        detail: str = getattr(reply, "detail", "")
        if detail:
            lines = detail.rstrip().splitlines()
            left_out = len(lines) - 2 * _DETAIL_LINES
            if left_out > 1:
                lines[_DETAIL_LINES:-_DETAIL_LINES] = [f"  ... {left_out} lines, which --gpu-json has ..."]
            return shown("\n".join(lines))
    return ""
