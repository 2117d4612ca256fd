"""Verdicts on runs on an emulated GPU."""

import fnmatch

import msgspec
import pytest

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


def _judged(before=STORED, **changes):
    now = msgspec.structs.replace(RUN, **changes)
    return judge(CASE, now, Recorded(case=CASE, scale="full", figures=(before,)), "H100")


def test_the_recorded_figures_pass():
    verdict = _judged()
    assert (verdict.status, verdict.sentence) == ("pass", f"{CASE} takes the recorded memory")


PEFT = {"torch": "2.13.0", "peft": "0.18.0"}
RECORD = "record it with --gpu-emulate --gpu-baseline-update"
OTHERS = f"it was recorded under other conditions (peft absent -> 0.18.0); {RECORD}"


@pytest.mark.parametrize(
    ("byte", "status", "sentence"),
    [
        (0, "pass", f"{CASE} takes the recorded memory; {OTHERS}"),
        (-1, "improved", f"*1 byte less memory*; {OTHERS}"),
        (1, "regressed", f"*1 byte more memory*; {OTHERS.replace('; ', '; if that is expected, ')}"),
    ],
)
def test_other_versions_forgive_no_growth_and_figures_that_are_no_higher_pass(byte, status, sentence):
    verdict = _judged(packages=PEFT, peak_reserved_bytes=RUN.peak_reserved_bytes + byte)
    assert (verdict.status, verdict.other_conditions) == (status, "peft absent -> 0.18.0")
    assert fnmatch.fnmatchcase(verdict.sentence, sentence)


@pytest.mark.parametrize(
    ("before", "now", "status", "sentence"),
    [
        (UNFIT, RUN, "improved", "fits H100 now; it was recorded under other conditions (torch 2.12.0 -> 2.13.0); record"),
        (STORED, UNFIT, "regressed", "no longer fits H100 (79.0 GiB): CUDA out of memory; it was recorded under other *"),
    ],
)
def test_what_fits_with_other_versions_is_told(before, now, status, sentence):
    verdict = judge(CASE, now, Recorded(case=CASE, scale="full", figures=(before,)), "H100")
    assert verdict.status == status
    assert fnmatch.fnmatchcase(verdict.sentence, f"{CASE} {sentence}*")


def test_a_phase_that_grows_below_the_whole_peak_fails_with_the_tensor_and_its_line():
    new = _tensor("aten.exp", 2 * MiB, line="train.py:12")
    verdict = _judged(
        phase_peak_bytes=RUN.phase_peak_bytes | {"forward": 32 * MiB},
        largest=RUN.largest | {"forward": (*RUN.largest["forward"], new)},
    )
    assert verdict.status == "regressed"
    assert (
        f"{CASE} needs 2.00 MiB (6.7 %) more in forward, 32.0 MiB against 30.0 MiB allocated, all of it 2.00 MiB "
        "(float32[524288] by exp in forward at train.py:12)" == verdict.sentence
    )


def test_growth_of_the_peak_is_told_with_its_phase():
    verdict = _judged(peak_allocated_bytes=41 * MiB, phase_peak_bytes=RUN.phase_peak_bytes | {"backward": 41 * MiB})
    assert verdict.status == "regressed"
    assert "needs 1.00 MiB (2.5 %) more memory: 41.0 MiB against 40.0 MiB peak allocated, in backward" in verdict.sentence


def test_a_growth_of_a_few_bytes_is_told_with_all_digits():
    verdict = _judged(peak_reserved_bytes=64 * MiB + 512)
    assert "67,109,376 against 67,108,864 bytes peak reserved" in verdict.sentence


def test_a_phase_that_is_gone_fails():
    phases = {phase: peak for phase, peak in RUN.phase_peak_bytes.items() if phase != "optimizer"}
    assert "no longer trains: it has no optimizer" in _judged(phase_peak_bytes=phases).sentence


def test_figures_that_were_not_recorded_are_told_and_do_not_fail():
    old = msgspec.structs.replace(RUN, phase_peak_bytes={}, largest={}, bytes_per_step=None, operators={})
    unrecorded = _judged(before=old)
    assert unrecorded.status == "pass"
    assert "its peaks of phases were not recorded, so they are not compared" in unrecorded.sentence


def test_work_that_was_recorded_and_is_not_counted_now_does_not_pass():
    uncounted = _judged(flops_per_step=None, recomputed_flops_per_step=None, bytes_per_step=None, operators={})
    assert uncounted.status == "not-comparable"
    assert "the bytes that it moves are not compared, because they were not counted" in uncounted.sentence


@pytest.mark.parametrize(("percent", "status"), [(1.0, "pass"), (1.1, "regressed"), (-1.1, "improved")])
def test_bytes_moved_may_grow_by_one_percent(percent, status):
    assert _judged(bytes_per_step=round(1000 * MiB * (1 + percent / 100))).status == status


def test_more_bytes_moved_are_told_with_the_operator_and_the_line_that_is_new():
    moved = _work(at11=(0, 100 * MiB), at40=(0, 30 * MiB))  # line 9 has moved to line 11
    verdict = _judged(bytes_per_step=1030 * MiB, operators=RUN.operators | {"aten.clone": moved})
    assert verdict.sentence == (
        f"{CASE} moves 30.0 MiB (3.0 %) more a step, most of it clone (+30.0 MiB in +1 calls) at train.py:40"
    )


def test_any_growth_of_recomputed_flops_fails():
    verdict = _judged(recomputed_flops_per_step=101, operators=RUN.operators | {"aten.mm": _work(at7=(1101, 900 * MiB))})
    assert verdict.status == "regressed"
    assert "recomputes 1 FLOP (1.0 %) more a step, most of it mm (+1 FLOP) at train.py:7" in verdict.sentence


def test_a_baseline_that_counts_recomputed_flops_with_the_others_passes():
    together = msgspec.structs.replace(STORED, flops_per_step=1100, recomputed_flops_per_step=0)
    assert _judged(before=together) == _judged()
    assert _judged(before=together, recomputed_flops_per_step=101).status == "regressed"


def _counts(waits=1, launches=1000, update=True):
    kind = StepCounts(waits=waits, launches=launches, update=update)
    line = Place(file="train.py", function="train", text="loss.item()", line=42)
    return Counts(steps=(0, 0), kinds=(kind,), causes=(CountCause(what="waits", counts=(waits,), own=line),))


COUNTED = msgspec.structs.replace(STORED, counts=_counts().as_stored())


def test_what_a_step_asks_for_is_judged_beside_its_memory():
    verdict = _judged(before=COUNTED, counts=_counts(waits=2))
    assert verdict.status == "regressed"
    assert verdict.sentence == (
        f"{CASE} waits for the GPU 2 times a step (1 before): 1 more at train.py:42 in train, loss.item()"
    )
    assert verdict.metric("waits").status == "regressed"
    assert verdict.metric("peak_allocated_bytes").status == "pass"


def test_a_step_that_asks_for_less_is_better():
    verdict = _judged(before=COUNTED, counts=_counts(waits=0, launches=1003))
    assert verdict.status == "improved"
    assert verdict.sentence == (
        f"{CASE} waits for the GPU 0 times a step (1 before); launches 1,003 kernels a step (1,000 before), within the "
        "limit; record it with --gpu-emulate --gpu-baseline-update"
    )


def test_less_memory_for_more_kernels_fails_with_both_and_the_reason():
    before = msgspec.structs.replace(COUNTED, recomputed_flops_per_step=0)
    verdict = _judged(before=before, peak_allocated_bytes=24 * MiB, counts=_counts(launches=1330))
    assert verdict.status == "regressed"
    assert verdict.sentence == (
        f"{CASE} recomputes 100 FLOP more a step; launches 1,330 kernels a step (1,000 before); but it needs 16.0 MiB "
        "(40.0 %) less memory: 24.0 MiB against 40.0 MiB peak allocated; activation checkpointing is new; if that is "
        "expected, record it with "
        "--gpu-emulate --gpu-baseline-update"
    )


def test_fewer_bytes_moved_are_no_improvement_where_work_rose():
    assert _judged(before=COUNTED, bytes_per_step=900 * MiB, counts=_counts()).status == "improved"
    verdict = _judged(before=COUNTED, bytes_per_step=900 * MiB, counts=_counts(launches=1003))
    assert verdict.status == "pass"
    assert "the bytes that it moves fell by 10.0 % while the number of its kernels rose" in verdict.sentence


@pytest.mark.parametrize("phases", [RUN.phase_peak_bytes, {}], ids=["a case", "a script, which has no phases"])
def test_counts_that_were_not_recorded_are_told_and_do_not_fail(phases):
    before = msgspec.structs.replace(STORED, phase_peak_bytes=phases)
    verdict = _judged(before, phase_peak_bytes=phases, counts=_counts(waits=9))
    assert verdict.status == "pass"
    assert verdict.sentence == (
        f"{CASE} takes the recorded memory; what its steps ask of the GPU was not recorded, so it is not compared; record "
        "it with --gpu-emulate --gpu-baseline-update"
    )


@pytest.mark.parametrize("now", [None, _counts(update=False)])
def test_counts_that_were_recorded_and_cannot_be_compared_do_not_pass(now):
    verdict = _judged(before=COUNTED, counts=now)
    assert verdict.status == "not-comparable"
    assert "what its steps ask of the GPU is not compared, because" in verdict.sentence


def test_counts_that_are_missing_do_not_fail_where_they_are_only_told():
    recorded = Recorded(case=CASE, scale="full", figures=(COUNTED,))
    assert judge(CASE, RUN, recorded, "H100", CountTerms(mode="tell")).status == "pass"


def test_memory_that_is_better_in_a_phase_is_not_told_beside_a_higher_peak():
    verdict = _judged(peak_allocated_bytes=41 * MiB, phase_peak_bytes=RUN.phase_peak_bytes | {"forward": 29 * MiB})
    assert verdict.sentence == f"{CASE} needs 1.00 MiB (2.5 %) more memory: 41.0 MiB against 40.0 MiB peak allocated"


@pytest.mark.parametrize(("mode", "told"), [("tell", True), ("off", False)])
def test_counts_may_be_told_only_or_left_out(mode, told):
    now = msgspec.structs.replace(RUN, counts=_counts(waits=2))
    verdict = judge(CASE, now, Recorded(case=CASE, scale="full", figures=(COUNTED,)), "H100", CountTerms(mode=mode))
    assert verdict.status == "pass"
    assert ("waits for the GPU 2 times" in verdict.sentence) is told
