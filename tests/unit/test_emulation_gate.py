"""Verdicts on runs on an emulated GPU."""

import msgspec
import pytest
from unit_examples import told

from pytest_gputrain.gate.counts import BY_THE_RULES
from pytest_gputrain.gate.emulation import judge
from pytest_gputrain.records import (
    Case,
    CountCause,
    Counts,
    EmulatedRun,
    LiveTensor,
    OperatorWork,
    Place,
    Recorded,
    StepCounts,
)
from pytest_gputrain.records.tolerance import CountTerms
from pytest_gputrain.utils.units import GiB, MiB

CASE = Case(model="gemma-3-1b", method="lora", precision="bf16")
UNFIT = EmulatedRun(
    device_name="NVIDIA H100", device_memory_bytes=79 * GiB, runtime="13.0", packages={"torch": "2.12.0"}, fits=False,
    refused="CUDA out of memory.", peak_allocated_bytes=78 * GiB, peak_reserved_bytes=79 * GiB, device_used_bytes=79 * GiB,
)  # fmt: skip


def _tensor(operator, size, phase="forward", line=""):
    return LiveTensor(
        bytes=size, count=1, operator=operator, phase=phase, shape=(size // 4,), dtype="float32",
        lines=(line,) if line else (),
    )  # fmt: skip


def _work(**lines):
    flops = sum(flops for flops, _ in lines.values())
    moved = sum(moved for _, moved in lines.values())
    rows = tuple((f"train.py:{line.removeprefix('at')}", *work) for line, work in lines.items())
    return OperatorWork(calls=len(lines), flops=flops, bytes=moved, lines=rows)


RUN = EmulatedRun(
    device_name="NVIDIA H100", device_memory_bytes=79 * GiB, runtime="13.0", packages={"torch": "2.13.0"}, fits=True,
    peak_allocated_bytes=40 * MiB, peak_reserved_bytes=64 * MiB, device_used_bytes=GiB,
    phase_peak_bytes={
        "build": 8 * MiB, "forward": 30 * MiB, "backward": 40 * MiB, "between": 20 * MiB, "optimizer": 25 * MiB,
    },
    largest={"forward": (_tensor("aten.mm", 4 * MiB),), "backward": (_tensor("aten.mm", 4 * MiB),)},
    flops_per_step=1000, recomputed_flops_per_step=100, bytes_per_step=1000 * MiB,
    operators={"aten.mm": _work(at7=(1100, 900 * MiB)), "aten.clone": _work(at9=(0, 100 * MiB))},
)  # fmt: skip


STORED = RUN.as_stored()


def test_a_refusal_is_stored_without_its_line():
    refused = msgspec.structs.replace(RUN, refused="CUDA out of memory (at train.py:5 in grow)")
    assert refused.as_stored().refused == "CUDA out of memory"


def _judged(before=STORED, terms=BY_THE_RULES, **changes):
    now = msgspec.structs.replace(RUN, **changes)
    return judge(CASE, now, Recorded(case=CASE, scale="full", figures=(before,)), "h100", terms)


def _counts(waits=1, launches=1000, update=True):
    kind = StepCounts(waits=waits, launches=launches, update=update)
    line = Place(file="train.py", function="train", text="loss.item()", line=42)
    return Counts(steps=(0, 0), kinds=(kind,), causes=(CountCause(what="waits", counts=(waits,), own=line),))


PEFT = {"torch": "2.13.0", "peft": "0.18.0"}
COUNTED = msgspec.structs.replace(STORED, counts=_counts().as_stored())
COUNTED_BEFORE_CHECKPOINTING = msgspec.structs.replace(COUNTED, recomputed_flops_per_step=0)
WITHOUT_PHASES = msgspec.structs.replace(STORED, phase_peak_bytes={})
OLD = msgspec.structs.replace(RUN, phase_peak_bytes={}, largest={}, bytes_per_step=None, operators={})


def _phases(**peaks):
    return RUN.phase_peak_bytes | peaks


def test_verdicts_are_told_with_all_that_matters(snapshot):
    new = (*RUN.largest["forward"], _tensor("aten.exp", 2 * MiB, line="train.py:12"))
    copies = _work(at11=(0, 100 * MiB), at40=(0, 30 * MiB))  # line 9 has moved to line 11
    uncounted = {"flops_per_step": None, "recomputed_flops_per_step": None, "bytes_per_step": None, "operators": {}}
    larger = {"peak_allocated_bytes": 41 * MiB}
    verdicts = {
        "as recorded": _judged(),
        "as recorded with other versions": _judged(packages=PEFT),
        "a byte less with other versions": _judged(packages=PEFT, peak_reserved_bytes=RUN.peak_reserved_bytes - 1),
        "a byte more with other versions": _judged(packages=PEFT, peak_reserved_bytes=RUN.peak_reserved_bytes + 1),
        "fits now": _judged(UNFIT),
        "fits no more": judge(CASE, UNFIT, Recorded(case=CASE, scale="full", figures=(STORED,)), "h100"),
        "a phase below the peak": _judged(
            phase_peak_bytes=_phases(forward=32 * MiB), largest=RUN.largest | {"forward": new}
        ),
        "the peak and its phase": _judged(**larger, phase_peak_bytes=_phases(backward=41 * MiB)),
        "the peak beside a phase that is better": _judged(**larger, phase_peak_bytes=_phases(forward=29 * MiB)),
        "a few bytes": _judged(peak_reserved_bytes=64 * MiB + 512),
        "no optimizer": _judged(phase_peak_bytes={"forward": 30 * MiB, "backward": 40 * MiB, "build": 8 * MiB}),
        "an old baseline": _judged(OLD),
        "work is not counted now": _judged(**uncounted),
        "more bytes at a new line": _judged(bytes_per_step=1030 * MiB, operators=RUN.operators | {"aten.clone": copies}),
        "a recomputed FLOP": _judged(
            recomputed_flops_per_step=101, operators=RUN.operators | {"aten.mm": _work(at7=(1101, 900 * MiB))}
        ),
        "more waits": _judged(COUNTED, counts=_counts(waits=2)),
        "fewer waits": _judged(COUNTED, counts=_counts(waits=0, launches=1003)),
        "less memory for more kernels": _judged(
            COUNTED_BEFORE_CHECKPOINTING, peak_allocated_bytes=24 * MiB, counts=_counts(launches=1330)
        ),
        "fewer bytes": _judged(COUNTED, bytes_per_step=900 * MiB, counts=_counts()),
        "fewer bytes by more kernels": _judged(COUNTED, bytes_per_step=900 * MiB, counts=_counts(launches=1003)),
        "counts are new": _judged(counts=_counts(waits=9)),
        "counts of a script are new": _judged(WITHOUT_PHASES, phase_peak_bytes={}, counts=_counts(waits=9)),
        "counts are gone": _judged(COUNTED),
        "counts are gone where they are told": _judged(COUNTED, terms=CountTerms(mode="tell")),
        "no such step was recorded": _judged(COUNTED, counts=_counts(update=False)),
        "more waits are told": _judged(COUNTED, counts=_counts(waits=2), terms=CountTerms(mode="tell")),
        "more waits are left out": _judged(COUNTED, counts=_counts(waits=2), terms=CountTerms(mode="off")),
    }
    assert told(verdicts) == snapshot
    assert _judged(packages=PEFT).other_conditions == "peft absent -> 0.18.0"


@pytest.mark.parametrize(("percent", "status"), [(1.0, "pass"), (1.1, "regressed"), (-1.1, "improved")])
def test_bytes_moved_may_grow_by_one_percent(percent, status):
    assert _judged(bytes_per_step=round(1000 * MiB * (1 + percent / 100))).status == status


def test_a_baseline_that_counts_recomputed_flops_with_the_others_passes():
    together = msgspec.structs.replace(STORED, flops_per_step=1100, recomputed_flops_per_step=0)
    assert _judged(together) == _judged()
    assert _judged(together, recomputed_flops_per_step=101).status == "regressed"
