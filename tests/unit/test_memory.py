"""Peaks of phases against those of a baseline, and the tensors behind what changed."""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from unit_examples import CASE, baseline, baseline_run, cpu_environment, live_tensor, measurement

from pytest_gputrain.gate.memory import tensor
from pytest_gputrain.gate.regression import judge
from pytest_gputrain.records import Measurement, Verdict
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance
from pytest_gputrain.utils.units import GiB

TOLERANCE = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02))
PEAKS = {"build": 10 * GiB, "forward": 20 * GiB, "backward": 40 * GiB, "between": 12 * GiB, "optimizer": 15 * GiB}
WEIGHTS = live_tensor(bytes=10 * GiB, phase="build", shape=(5, 2**30), operator="aten.zeros")
NEW = live_tensor(bytes=2 * GiB, count=2, operator="aten.mul", shape=(2**29,), lines=("a.py:3", "a.py:9"))
ROWS = dict.fromkeys(PEAKS, (WEIGHTS,))


def _counted(processes: int = 1, **phases: int) -> Measurement:
    """One whose ``phases`` have so many bytes more than the baseline's, in `NEW`."""
    peaks = {phase: size + phases.get(phase, 0) for phase, size in PEAKS.items()}
    largest = {phase: (WEIGHTS, NEW) if phases.get(phase, 0) > 0 else (WEIGHTS,) for phase in PEAKS}
    peak = max(size for phase, size in peaks.items() if phase != "build")
    environment = cpu_environment(device_count=processes)
    return measurement(environment=environment, peak_allocated_bytes=peak, phase_peak_bytes=peaks, largest=largest)


def _judged(reply: Measurement, processes: int = 1, **fields: Any) -> Verdict:
    defaults = {"peak_allocated_bytes": 40 * GiB, "phase_peak_bytes": PEAKS, "largest": ROWS, **fields}
    run = baseline_run(environment=cpu_environment(device_count=processes), **defaults)
    return judge(CASE, [reply], baseline(run), TOLERANCE).verdict


def test_growth_is_told_with_its_phase_and_what_grew(snapshot: SnapshotAssertion) -> None:
    verdicts = {
        "below the peak": _judged(_counted(forward=2 * GiB, optimizer=GiB)),
        "of the peak": _judged(_counted(backward=2 * GiB)),
        "within the limit": _judged(_counted(forward=8)),
        "of the peak, within the limit": _judged(_counted(backward=8)),
        "a baseline without phases": _judged(_counted(), phase_peak_bytes={}, largest={}),
        "a baseline without tensors": _judged(_counted(forward=2 * GiB), largest={}),
    }
    assert {name: f"{verdict.status}: {verdict.sentence}" for name, verdict in verdicts.items()} == snapshot


@pytest.mark.parametrize("phase", PEAKS)
@pytest.mark.parametrize(
    ("share", "status"), [(0.019, "pass"), (0.021, "regressed"), (-0.019, "pass"), (-0.021, "improved")]
)
def test_every_phase_has_the_tolerance_of_the_peak(phase: str, share: float, status: str) -> None:
    assert _judged(_counted(**{phase: round(PEAKS[phase] * share)})).status == status  # type: ignore[index]


@pytest.mark.parametrize("phase", PEAKS)
@pytest.mark.parametrize(("share", "status"), [(0.49, "pass"), (0.51, "regressed"), (-0.49, "pass"), (-0.51, "improved")])
def test_phases_of_several_processes_have_a_share_of_the_peak(phase: str, share: float, status: str) -> None:
    """A buffer of gloo that is let go of late is as large in a phase that needs little as in one that needs much."""
    changed = _counted(2, **{phase: round(PEAKS["backward"] * share)})
    assert _judged(changed, processes=2).metric(f"{phase}_peak_bytes").status == status  # type: ignore[union-attr,arg-type]


def test_three_lines_are_named_at_most() -> None:
    row = live_tensor(lines=tuple(f"a.py:{number}" for number in range(6)))
    assert tensor(row).endswith("at a.py:0, a.py:1, a.py:2 and 3 more lines)")


def test_memory_has_improved_only_where_every_run_needs_less() -> None:
    def run(peak: int) -> Measurement:
        return measurement(peak_allocated_bytes=peak * GiB)

    stored = baseline(baseline_run(peak_allocated_bytes=40 * GiB))
    for peaks, status in (((30, 30), "improved"), ((30, 40), "pass"), ((40, 30), "pass")):
        metric = judge(CASE, [run(peak) for peak in peaks], stored, TOLERANCE).verdict.metric("peak_allocated_bytes")
        assert metric is not None
        assert metric.status == status
