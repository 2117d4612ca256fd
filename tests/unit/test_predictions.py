"""Recorded predictions: how they are kept, compared, found again, and what they tell."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit_examples import CASE, live_tensor, prediction, recorded, values_of

from pytest_gputrain.gate.prediction import judge
from pytest_gputrain.records import Case, Measurement, OperatorWork, Prediction, Task, Verdict
from pytest_gputrain.records.prediction import MEASURED_ONLY
from pytest_gputrain.records.tolerance import MemoryTolerance
from pytest_gputrain.session.remedies import remedy
from pytest_gputrain.storage import prediction_cache as cache_module
from pytest_gputrain.storage.forecast import Forecast
from pytest_gputrain.storage.prediction_cache import PredictionCache
from pytest_gputrain.storage.recorded import MOST_CONDITIONS, PredictionStore
from pytest_gputrain.utils.units import GiB, MiB

TOLERANCE = MemoryTolerance(ratio=0.02)
LOGITS = live_tensor(bytes=9 * GiB)


def judged(now: Prediction, *before: Prediction, case: Case = CASE) -> Verdict:
    return judge(CASE, now, recorded(*before, case=case) if before else None, TOLERANCE, "H100")


def unfit(**fields: Any) -> Prediction:
    return prediction(**{"fits": False, "refused": LOGITS, "peak_reserved_bytes": 99 * GiB, **fields})


def test_the_same_passes() -> None:
    assert judged(prediction(), prediction()).status == "pass"


@pytest.mark.parametrize("field", ["flops_per_step", "recomputed_flops_per_step", "bytes_per_step"])
@pytest.mark.parametrize(("change", "status"), [(1, "regressed"), (-1, "improved")])
def test_counters_are_exact(field: str, change: int, status: str) -> None:
    now = prediction(**{field: getattr(prediction(), field) + change})
    assert judged(now, prediction()).status == status


@pytest.mark.parametrize("phase", ["build", "forward", "backward", "optimizer"])
@pytest.mark.parametrize(("change", "status"), [(512, "regressed"), (-512, "improved")])
def test_peaks_of_every_phase_are_exact(phase: str, change: int, status: str) -> None:
    peaks = prediction().phase_peak_bytes
    verdict = judged(prediction(phase_peak_bytes={**peaks, phase: peaks[phase] + change}), prediction())
    assert verdict.status == status
    assert f" in {phase}," in verdict.sentence


@pytest.mark.parametrize(("ratio", "status"), [(1.019, "pass"), (1.03, "regressed"), (0.985, "pass"), (0.97, "improved")])
def test_what_the_allocator_holds_has_a_tolerance(ratio: float, status: str) -> None:
    assert judged(prediction(peak_reserved_bytes=round(35 * GiB * ratio)), prediction()).status == status


def test_growth_beside_shrinking_is_a_regression() -> None:
    verdict = judged(prediction(flops_per_step=1, bytes_per_step=2 * 10**12), prediction())
    assert verdict.status == "regressed"
    assert "computes" not in verdict.sentence


def test_the_tensors_and_operators_behind_a_regression_are_named() -> None:
    peaks = prediction().phase_peak_bytes
    new = live_tensor(bytes=15 * GiB, count=291, operator="aten._foreach_sqrt", phase="optimizer", shape=(4096, 4096))
    largest = {**prediction().largest, "optimizer": (new, live_tensor())}
    operators = {"aten.mm": OperatorWork(calls=449, flops=10**15, bytes=9 * 10**11 + 10**9)}
    operators["aten._foreach_sqrt"] = OperatorWork(calls=7, flops=0, bytes=10**10)
    now = prediction(
        phase_peak_bytes={**peaks, "optimizer": 35 * GiB},
        largest=largest,
        operators=operators,
        bytes_per_step=10**12 + 11 * 10**9,
    )
    sentence = judged(now, prediction()).sentence
    assert sentence.startswith(
        f"{CASE} needs 15.0 GiB (75.0 %) more in optimizer, 35.0 GiB against 20.0 GiB allocated, most of it 15.0 GiB "
        "(291 x bfloat16[4096, 4096] by _foreach_sqrt in optimizer)"
    )
    assert "most of it _foreach_sqrt (+9.31 GiB in +7 calls)" in sentence


def test_tensors_that_went_are_named_too() -> None:
    peaks = prediction().phase_peak_bytes
    before = prediction(phase_peak_bytes={**peaks, "forward": 39 * GiB}, largest={"forward": (LOGITS,)})
    verdict = judged(prediction(largest={"forward": ()}), before)
    assert verdict.status == "improved"
    assert "most of it was 9.00 GiB (bfloat16[16384, 128256] by _log_softmax in forward)" in verdict.sentence


def test_other_libraries_are_other_conditions() -> None:
    now = prediction(packages={"torch": "2.14.0", "transformers": "5.23.0"}, bytes_per_step=2 * 10**12)
    verdict = judged(now, prediction())
    assert verdict.status == "not-comparable"
    assert "torch 2.13.0 -> 2.14.0" in verdict.sentence
    assert "moves 931 GiB (100.0 %) more a step" in verdict.sentence


def test_among_several_that_are_as_like_the_latest_counts() -> None:
    older, latest = (
        prediction(packages={"torch": version}, fits=fits) for version, fits in (("2.12.0", False), ("2.13.0", True))
    )
    now = unfit(packages={"torch": "2.14.0"})
    assert judged(now, older, latest).status == "failed"
    assert judged(now, latest, older).status == "not-comparable"


def test_fewer_processes_are_another_condition() -> None:
    verdict = judged(prediction(processes=2, bytes_per_step=2 * 10**12), prediction())
    assert verdict.status == "not-comparable"
    assert "processes all -> 2" in verdict.sentence


def test_the_phase_is_told_that_has_a_cause_with_a_name() -> None:
    peaks = prediction().phase_peak_bytes
    grown = {phase: size + (MiB if phase == "optimizer" else GiB) for phase, size in peaks.items()}
    row = live_tensor(bytes=GiB, operator="aten._to_copy", phase="forward", shape=(7,))
    now = prediction(phase_peak_bytes=grown, peak_phase="optimizer", largest={**prediction().largest, "forward": (row,)})
    sentence = judged(now, prediction()).sentence
    assert " more in forward, " in sentence
    assert "most of it 1.00 GiB (bfloat16[7] by _to_copy in forward)" in sentence


def test_the_prediction_of_the_same_libraries_counts_among_several() -> None:
    older = prediction(packages={"torch": "2.12.0"}, flops_per_step=1)
    assert judged(prediction(), older, prediction()).status == "pass"
    assert judged(prediction(), prediction(), older).status == "pass"


def test_another_card_is_another_condition() -> None:
    target = msgspec.structs.replace(prediction().target, memory_bytes=40 * GiB)
    verdict = judged(prediction(target=target), prediction())
    assert verdict.status == "not-comparable"
    assert "memory bytes" in verdict.sentence


def test_a_case_that_was_declared_otherwise_is_not_compared() -> None:
    verdict = judged(prediction(), prediction(), case=CASE.replace(batch_size=4))
    assert verdict.status == "not-comparable"
    assert "batch_size" in verdict.sentence


def test_without_a_record_what_fits_is_new_and_what_does_not_fails() -> None:
    assert judged(prediction()).status == "new"
    verdict = judged(unfit())
    assert verdict.status == "failed"
    assert "does not fit H100 (79.0 GiB): it needs 99.5 GiB, and runs out in forward for 9.00 GiB" in verdict.sentence


def test_what_is_recorded_not_to_fit_passes() -> None:
    assert judged(unfit(), unfit()).status == "pass"


@pytest.mark.parametrize("changed", [{"packages": {"torch": "2.14.0"}}, {"peak_reserved_bytes": 99 * GiB}])
def test_what_stopped_fitting_under_other_conditions_fails(changed: dict[str, Any]) -> None:
    target = msgspec.structs.replace(prediction().target, capability=(8, 0))
    assert judged(unfit(**{"target": target, **changed}), prediction()).status == "failed"
    assert judged(unfit(**{"target": target, **changed}), unfit()).status == "not-comparable"


def test_what_stopped_fitting_because_it_was_declared_otherwise_fails() -> None:
    assert judged(unfit(), prediction(), case=CASE.replace(batch_size=1)).status == "failed"


def test_a_case_that_trains_no_more_is_no_improvement() -> None:
    peaks = {"build": 16 * GiB, "forward": 30 * GiB}
    assert "it has no backward" in judged(prediction(phase_peak_bytes=peaks), prediction()).sentence
    assert judged(prediction(flops_per_step=0), prediction()).status == "regressed"


def test_a_build_that_does_not_fit_needs_what_it_takes() -> None:
    peaks = {**prediction().phase_peak_bytes, "build": 120 * GiB}
    single = unfit(refused=live_tensor(phase="build"), phase_peak_bytes=peaks)
    assert "it needs 120 GiB" in judged(single).sentence


def test_a_tensor_that_shrank_does_not_explain_growth() -> None:
    peaks = {**prediction().phase_peak_bytes, "forward": 32 * GiB}
    largest = {**prediction().largest, "forward": (live_tensor(bytes=3 * GiB),)}
    assert "_log_softmax" not in judged(prediction(phase_peak_bytes=peaks, largest=largest), prediction()).sentence


def test_no_longer_fitting_is_a_regression_and_fitting_again_is_none() -> None:
    worse = judged(unfit(peak_reserved_bytes=35 * GiB), prediction())
    assert worse.status == "regressed"
    assert "no longer fits H100 (79.0 GiB): it needs" in worse.sentence
    assert judged(prediction(), unfit(peak_reserved_bytes=35 * GiB)).status == "improved"


@given(values_of(Prediction))
def test_any_prediction_equals_itself(single: Prediction) -> None:
    assume((single.peak_reserved_bytes or 0) >= 0)
    assert judge(CASE, single, recorded(single), TOLERANCE, "H100").status == "pass"


def versions(number: int) -> Prediction:
    return prediction(packages={"torch": f"2.{number}.0"})


def test_an_update_replaces_the_same_conditions_and_keeps_others(tmp_path: Path) -> None:
    store = PredictionStore(tmp_path)
    store.update("h100", "llm", {"a": recorded(versions(1), versions(2)), "b": recorded(versions(1))})
    store.update("h100", "llm", {"a": recorded(msgspec.structs.replace(versions(1), flops_per_step=5))})
    a, b = (PredictionStore(tmp_path).get("h100", "llm", key) for key in "ab")
    assert a is not None
    assert b is not None
    assert {entry.packages["torch"]: entry.flops_per_step for entry in a.figures} == {"2.2.0": 10**15, "2.1.0": 5}
    assert b.figures == (versions(1),)


def test_the_oldest_conditions_make_room(tmp_path: Path) -> None:
    for number in range(MOST_CONDITIONS + 1):
        PredictionStore(tmp_path).update("h100", "llm", {"a": recorded(versions(number))})
    stored = PredictionStore(tmp_path).get("h100", "llm", "a")
    assert stored is not None
    assert {entry.packages["torch"] for entry in stored.figures} == {f"2.{n}.0" for n in range(1, MOST_CONDITIONS + 1)}


def test_predictions_of_another_declaration_go(tmp_path: Path) -> None:
    store = PredictionStore(tmp_path)
    store.update("h100", "llm", {"a": recorded(versions(1))})
    store.update("h100", "llm", {"a": recorded(versions(2), case=CASE.replace(batch_size=4))})
    stored = store.get("h100", "llm", "a")
    assert stored is not None
    assert stored.figures == (versions(2),)


TASK = Task(case=CASE, scale="full", device_type="cpu", root=".", target=prediction().target)


def test_a_prediction_is_found_again(tmp_path: Path) -> None:
    PredictionCache(tmp_path).put(TASK, prediction())
    assert PredictionCache(tmp_path).get(TASK) == prediction()
    longer = msgspec.structs.replace(TASK, case=CASE.replace(steps=99))
    assert PredictionCache(tmp_path).get(longer) == prediction()


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(TASK, case=CASE.replace(batch_size=4)),
        msgspec.structs.replace(TASK, scale="tiny"),
        msgspec.structs.replace(TASK, processes=8),
        msgspec.structs.replace(TASK, variables={"FLAG": "1"}),
        msgspec.structs.replace(TASK, target=msgspec.structs.replace(prediction().target, capability=(7, 0))),
    ],
)
def test_another_task_is_not(tmp_path: Path, other: Task) -> None:
    PredictionCache(tmp_path).put(TASK, prediction())
    assert PredictionCache(tmp_path).get(other) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("library_versions", lambda case: {"torch": "9"}),
        ("_files", lambda name: "others"),
        ("_own_code", lambda: "changed"),
        ("_is_local", lambda name: True),
    ],
)
def test_other_code_is_predicted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    monkeypatch.setattr(cache_module, "library_versions", lambda case: {"torch": "2.13.0"})
    monkeypatch.setattr(cache_module, "_is_local", lambda name: False)
    monkeypatch.setattr(cache_module, "_files", lambda name: "these")
    PredictionCache(tmp_path).put(TASK, prediction())
    assert PredictionCache(tmp_path).get(TASK) is not None
    monkeypatch.setattr(cache_module, name, value)
    assert PredictionCache(tmp_path).get(TASK) is None


def test_own_code_is_never_remembered(tmp_path: Path) -> None:
    task = msgspec.structs.replace(TASK, case=Case(model="mine", method="custom", code="test_it.py::mine"))
    PredictionCache(tmp_path).put(task, prediction())
    assert list(tmp_path.iterdir()) == []


def test_a_broken_cache_remembers_nothing(tmp_path: Path) -> None:
    PredictionCache(tmp_path).put(TASK, prediction())
    for file in tmp_path.iterdir():
        file.write_bytes(b"{")
    assert PredictionCache(tmp_path).get(TASK) is None


def test_what_nobody_asked_for_in_a_month_is_forgotten(tmp_path: Path) -> None:
    asked, forgotten, new = (msgspec.structs.replace(TASK, case=CASE.replace(batch_size=size)) for size in (2, 4, 8))
    for task in (asked, forgotten):
        PredictionCache(tmp_path).put(task, prediction())
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))
    assert PredictionCache(tmp_path).get(asked) is not None
    PredictionCache(tmp_path).put(new, prediction())
    assert [PredictionCache(tmp_path).get(task) is not None for task in (asked, forgotten, new)] == [True, False, True]


class Machine:
    """Predicts that a case fits if these knobs have these values."""

    def __init__(self, **cures: Any) -> None:
        self.cures = cures
        self.asked: list[Case] = []

    def __call__(self, case: Case) -> Prediction:
        self.asked.append(case)
        fits = bool(self.cures) and all(getattr(case, knob) == value for knob, value in self.cures.items())
        return prediction(fits=True) if fits else unfit()


BIG = CASE.replace(batch_size=8, activation_checkpointing=False)


@pytest.mark.parametrize(
    ("cures", "sentence", "tries"),
    [
        ({"optimizer": "adamw-fused"}, "optimizer=adamw-fused makes it fit, in 35.5 GiB", 1),
        ({"activation_checkpointing": True}, "activation_checkpointing=true makes it fit, in 35.5 GiB", 3),
        ({"batch_size": 4}, "batch_size=4, gradient_accumulation=2 makes it fit, in 35.5 GiB", 4),
        ({"batch_size": 2}, "batch_size=2, gradient_accumulation=4 makes it fit, in 35.5 GiB", 5),
        ({"batch_size": 1, "activation_checkpointing": True}, "batch_size=1, gradient_accumulation=8, activation_", 7),
        ({}, "makes it fit, which needs 99.5 GiB; spread it over more GPUs (parallel=fsdp)", 7),
    ],
)
def test_the_cheapest_change_that_fits_is_told(cures: dict[str, Any], sentence: str, tries: int) -> None:
    machine = Machine(**cures)
    assert sentence in remedy(BIG, unfit(), machine)
    assert len(machine.asked) == tries


def test_a_loss_by_chunks_is_tried_where_logits_are_at_the_peak() -> None:
    at_peak = unfit(largest={"backward": (LOGITS,)})
    machine = Machine(loss_chunks=16)
    assert remedy(BIG, at_peak, machine) == "loss_chunks=16 makes it fit, in 35.5 GiB"
    assert len(machine.asked) == 2
    for machine, prediction_, case in (
        (Machine(), unfit(largest={"backward": (live_tensor(shape=(4096,)),)}), BIG),
        (Machine(), at_peak, BIG.replace(loss_chunks=4)),
        (Machine(), at_peak, BIG.replace(model="gemma-2-9b")),
    ):
        remedy(case, prediction_, machine)
        assert not [asked for asked in machine.asked if asked.loss_chunks == 16]


def test_a_remedy_trains_on_as_many_samples() -> None:
    machine = Machine()
    remedy(BIG.replace(gradient_accumulation=3), unfit(), machine)
    assert {case.batch_size * case.gradient_accumulation for case in machine.asked} == {24}


def test_logits_at_the_peak_are_told() -> None:
    words = "9.00 GiB at the peak are logits (128,256 words wide), which a loss fused with the output layer never holds"
    assert words in remedy(BIG, unfit(largest={"backward": (LOGITS,)}), Machine())
    assert "logits" not in remedy(BIG, unfit(largest={"backward": (live_tensor(shape=(4096,)),)}), Machine())


def case_of(name: str) -> Case:
    return CASE.replace(model=name)


FORETOLD = {
    "llama-3.1-8b": prediction(roofline_seconds=3.0),
    "gemma-7b": prediction(roofline_seconds=1.0),
    "phi-3-mini-128k": unfit(roofline_seconds=0.1),
    "llama-2-13b": prediction(roofline_seconds=2.0),
}


@pytest.fixture
def forecast(tmp_path: Path) -> Forecast:
    entries = {str(case_of(name)): recorded(entry, case=case_of(name)) for name, entry in FORETOLD.items()}
    PredictionStore(tmp_path).update("h100", "llm", entries)
    return Forecast(tmp_path, "h100")


def test_short_tests_first_unknown_later_unfit_last(forecast: Forecast) -> None:
    names = [*FORETOLD, "gemma-2-9b"]
    for order in itertools.islice(itertools.permutations(names), 0, None, 7):
        tests = [("a", name) for name in order]
        forecast.order(tests, lambda test: test[0], lambda test: ("llm", [case_of(test[1])]))
        assert [name for _, name in tests] == ["gemma-7b", "llama-2-13b", "llama-3.1-8b", "gemma-2-9b", "phi-3-mini-128k"]


def test_files_and_other_tests_keep_their_places(forecast: Forecast) -> None:
    tests = [("a", "llama-3.1-8b"), ("a", ""), ("b", "phi-3-mini-128k"), ("a", "gemma-7b"), ("b", "gemma-7b"), ("b", "")]
    forecast.order(tests, lambda test: test[0], lambda test: ("llm", [case_of(test[1])] if test[1] else []))
    assert tests == [
        ("a", "gemma-7b"),
        ("a", ""),
        ("b", "gemma-7b"),
        ("a", "llama-3.1-8b"),
        ("b", "phi-3-mini-128k"),
        ("b", ""),
    ]


@given(st.randoms(use_true_random=False))
def test_nothing_known_changes_nothing(shuffle: random.Random) -> None:
    tests = [("a", name) for name in FORETOLD]
    shuffle.shuffle(tests)
    before = list(tests)
    Forecast(Path("/nowhere"), "h100").order(tests, lambda test: test[0], lambda test: ("llm", [case_of(test[1])]))
    assert tests == before


def test_a_prediction_of_another_declaration_is_none_of_this_case(forecast: Forecast) -> None:
    assert forecast.is_unfit("llm", case_of("phi-3-mini-128k"))
    assert not forecast.is_unfit("llm", case_of("phi-3-mini-128k").replace(batch_size=1))


@given(st.sampled_from(["h100", "h100 and not slow", "h100 and slow", "not (a100 or slow) and h100"]))
def test_platforms_of_an_expression(expression: str) -> None:
    from pytest_gputrain.session.selection import platforms_named

    assert platforms_named(expression) == ["h100"]


def test_a_phase_that_was_not_recorded_is_told_as_new() -> None:
    peaks = prediction().phase_peak_bytes
    verdict = judged(prediction(phase_peak_bytes={**peaks, "between": 20 * GiB}), prediction())
    assert verdict.status == "new"
    assert "has no peak between backward passes in its recorded prediction; record it with" in verdict.sentence


def test_the_cache_depends_on_this_package_and_on_nothing_beside_it() -> None:
    read: list[Path] = []
    package = Path(cache_module.__file__).parents[1]
    with mock.patch.object(Path, "read_bytes", lambda path: read.append(path) or b""):
        cache_module._own_code.__wrapped__()
    assert package / "worker" / "prediction" / "predict.py" in read
    assert [path for path in read if not path.is_relative_to(package)] == []


def test_what_a_measurement_has_and_a_prediction_has_not_is_none() -> None:
    properties = {name for name in dir(Measurement) if isinstance(getattr(Measurement, name), property)}
    figures = {*Measurement.__struct_fields__, *properties}
    lacking = {name for name in figures if name not in Prediction.__struct_fields__}
    assert set(MEASURED_ONLY) == lacking
    assert {getattr(prediction(), name) for name in lacking} == {None}
    with pytest.raises(AttributeError, match="a prediction has no peak_alocated"):
        _ = prediction().peak_alocated
