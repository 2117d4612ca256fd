"""Recorded predictions: how they are kept, compared, found again, and what they tell."""

import itertools
import os
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from unit_examples import CASE, live_tensor, prediction, recorded

from pytest_gputrain.gate.fit import Need
from pytest_gputrain.gate.prediction import judge, needed_bytes
from pytest_gputrain.records import Case, EmulatedRun, Limit, Measurement, OperatorWork, Prediction, Task
from pytest_gputrain.records.prediction import MEASURED_ONLY
from pytest_gputrain.records.tolerance import MemoryTolerance
from pytest_gputrain.session.remedies import remedy
from pytest_gputrain.storage import result_cache as cache_module
from pytest_gputrain.storage.forecast import Forecast
from pytest_gputrain.storage.recorded import MOST_CONDITIONS, PredictionStore
from pytest_gputrain.storage.result_cache import ResultCache
from pytest_gputrain.utils.units import GiB, MiB

TOLERANCE = MemoryTolerance(ratio=0.02)
LOGITS = live_tensor(bytes=9 * GiB)


def judged(now, *before, case=CASE):
    return judge(CASE, now, recorded(*before, case=case) if before else None, TOLERANCE, "H100")


def unfit(**fields):
    return prediction(**{"fits": False, "refused": LOGITS, "peak_reserved_bytes": 99 * GiB, **fields})


@pytest.mark.parametrize("field", ["flops_per_step", "recomputed_flops_per_step", "bytes_per_step"])
@pytest.mark.parametrize(("change", "status"), [(1, "regressed"), (-1, "improved")])
def test_counters_are_exact(field, change, status):
    now = prediction(**{field: getattr(prediction(), field) + change})
    assert judged(now, prediction()).status == status


@pytest.mark.parametrize(("change", "status"), [(512, "regressed"), (-512, "improved")])
def test_peaks_of_every_phase_are_exact_and_what_the_allocator_holds_has_a_tolerance(change, status):
    peaks = prediction().phase_peak_bytes
    for phase in ("build", "forward", "backward", "optimizer"):
        verdict = judged(prediction(phase_peak_bytes={**peaks, phase: peaks[phase] + change}), prediction())
        assert verdict.status == status
        assert f" in {phase}," in verdict.sentence
    for ratio, of_reserved in ((1.019, "pass"), (1.03, "regressed"), (0.985, "pass"), (0.97, "improved")):
        assert judged(prediction(peak_reserved_bytes=round(35 * GiB * ratio)), prediction()).status == of_reserved
    for more, of_bytes in ((MiB, "pass"), (MiB + 1, "regressed"), (-MiB, "pass"), (-MiB - 1, "improved")):
        now = prediction(peak_reserved_bytes=35 * GiB + more)
        assert judge(CASE, now, recorded(prediction()), MemoryTolerance(bytes=MiB), "H100").status == of_bytes


def _peaks(**phases):
    return {**prediction().phase_peak_bytes, **phases}


def _largest(**phases):
    return {**prediction().largest, **phases}


def test_verdicts_are_told_with_what_is_behind_them(snapshot):
    sqrt = live_tensor(bytes=15 * GiB, count=291, operator="aten._foreach_sqrt", phase="optimizer", shape=(4096, 4096))
    moved = OperatorWork(calls=449, flops=10**15, bytes=9 * 10**11 + 10**9)
    more_moved = {"aten.mm": moved, "aten._foreach_sqrt": OperatorWork(calls=7, flops=0, bytes=10**10)}
    copied = live_tensor(bytes=GiB, operator="aten._to_copy", phase="forward", shape=(7,))
    grown = {phase: size + (MiB if phase == "optimizer" else GiB) for phase, size in prediction().phase_peak_bytes.items()}
    other_target = msgspec.structs.replace(prediction().target, capability=(8, 0))
    smaller = msgspec.structs.replace(prediction().target, memory_bytes=40 * GiB)
    newer, double = {"torch": "2.14.0", "transformers": "5.23.0"}, {"bytes_per_step": 2 * 10**12}
    older, older_unfit = (prediction(packages={"torch": "2.12.0"}, flops_per_step=1, fits=fits) for fits in (True, False))
    latest, now_unfit = prediction(packages={"torch": "2.13.0"}), unfit(packages={"torch": "2.14.0"})
    verdicts = {
        "the same": judged(prediction(), prediction()),
        "nothing recorded": judged(prediction()),
        "nothing recorded, does not fit": judged(unfit()),
        "its build does not fit": judged(
            unfit(refused=live_tensor(phase="build"), phase_peak_bytes=_peaks(build=120 * GiB))
        ),
        "does not fit as recorded": judged(unfit(), unfit()),
        "no longer fits": judged(unfit(peak_reserved_bytes=35 * GiB), prediction()),
        "fits again": judged(prediction(), unfit(peak_reserved_bytes=35 * GiB)),
        "fewer FLOPs and more bytes": judged(prediction(flops_per_step=1, **double), prediction()),
        "larger by a tensor, slower by an operator": judged(
            prediction(
                phase_peak_bytes=_peaks(optimizer=35 * GiB),
                largest=_largest(optimizer=(sqrt, live_tensor())),
                operators=more_moved,
                bytes_per_step=10**12 + 11 * 10**9,
            ),
            prediction(),
        ),
        "smaller by a tensor": judged(
            prediction(largest={"forward": ()}),
            prediction(phase_peak_bytes=_peaks(forward=39 * GiB), largest={"forward": (LOGITS,)}),
        ),
        "the phase that has a cause with a name": judged(
            prediction(phase_peak_bytes=grown, peak_phase="optimizer", largest=_largest(forward=(copied,))), prediction()
        ),
        "a tensor that shrank explains no growth": judged(
            prediction(phase_peak_bytes=_peaks(forward=32 * GiB), largest=_largest(forward=(live_tensor(bytes=3 * GiB),))),
            prediction(),
        ),
        "trains no more": judged(prediction(phase_peak_bytes={"build": 16 * GiB, "forward": 30 * GiB}), prediction()),
        "computes nothing": judged(prediction(flops_per_step=0), prediction()),
        "a phase that was not recorded": judged(prediction(phase_peak_bytes=_peaks(between=20 * GiB)), prediction()),
        "other libraries": judged(prediction(packages=newer, **double), prediction()),
        "the same libraries among several": judged(prediction(), older, prediction()),
        "the same libraries before others": judged(prediction(), prediction(), older),
        "unlike all, the latest fitted": judged(now_unfit, older_unfit, latest),
        "unlike all, the latest did not fit": judged(now_unfit, latest, older_unfit),
        "fewer processes": judged(prediction(processes=2, **double), prediction()),
        "another card": judged(prediction(target=smaller), prediction()),
        "another capability, no longer fits": judged(unfit(target=other_target), prediction()),
        "another capability, does not fit as recorded": judged(unfit(target=other_target), unfit()),
        "other libraries, no longer fits": judged(now_unfit, prediction()),
        "declared otherwise": judged(prediction(), prediction(), case=CASE.replace(batch_size=4)),
        "declared otherwise, no longer fits": judged(unfit(), prediction(), case=CASE.replace(batch_size=1)),
    }
    assert {name: f"{verdict.status}: {verdict.sentence}" for name, verdict in verdicts.items()} == snapshot


def versions(number):
    return prediction(packages={"torch": f"2.{number}.0"})


def test_an_update_replaces_the_same_conditions_and_keeps_others(tmp_path):
    def update(**records):
        PredictionStore(tmp_path).update("h100", "llm", records)
        stored = {key: PredictionStore(tmp_path).get("h100", "llm", key) for key in "ab"}
        return {
            key: {it.packages["torch"]: it.flops_per_step for it in kept.figures} for key, kept in stored.items() if kept
        }

    other = {"2.1.0": 10**15}
    assert update(a=recorded(versions(1), versions(2)), b=recorded(versions(1))) == {
        "a": {**other, "2.2.0": 10**15},
        "b": other,
    }
    changed = msgspec.structs.replace(versions(1), flops_per_step=5)
    assert update(a=recorded(changed)) == {"a": {"2.2.0": 10**15, "2.1.0": 5}, "b": other}
    redeclared = recorded(versions(2), case=CASE.replace(batch_size=4))
    assert update(a=redeclared) == {"a": {"2.2.0": 10**15}, "b": other}, "those of another declaration go"
    for number in range(1, MOST_CONDITIONS + 2):
        stored = update(b=recorded(versions(number)))
    assert set(stored["b"]) == {f"2.{n}.0" for n in range(2, MOST_CONDITIONS + 2)}, "the oldest conditions make room"


TASK = Task(case=CASE, scale="full", device_type="cpu", root=".", target=prediction().target)


def test_a_prediction_is_found_again_for_the_same_task_only(tmp_path):
    ResultCache(tmp_path, Prediction).put(TASK, prediction())
    replace = msgspec.structs.replace
    for same in (TASK, replace(TASK, case=CASE.replace(steps=99))):
        assert ResultCache(tmp_path, Prediction).get(same) == prediction()
    for other in (
        replace(TASK, case=CASE.replace(batch_size=4)),
        replace(TASK, scale="tiny"),
        replace(TASK, processes=8),
        replace(TASK, variables={"FLAG": "1"}),
        replace(TASK, target=replace(prediction().target, capability=(7, 0))),
    ):
        assert ResultCache(tmp_path, Prediction).get(other) is None
    for file in tmp_path.iterdir():
        file.write_bytes(b"{")
    assert ResultCache(tmp_path, Prediction).get(TASK) is None, "nor in a broken cache"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("library_versions", lambda case: {"torch": "9"}),
        ("_files", lambda name: "others"),
        ("_own_code", lambda: "changed"),
        ("_is_local", lambda name: True),
    ],
)
def test_other_code_is_predicted_anew(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(cache_module, "library_versions", lambda case: {"torch": "2.13.0"})
    monkeypatch.setattr(cache_module, "_is_local", lambda name: False)
    monkeypatch.setattr(cache_module, "_files", lambda name: "these")
    ResultCache(tmp_path, Prediction).put(TASK, prediction())
    assert ResultCache(tmp_path, Prediction).get(TASK) is not None
    monkeypatch.setattr(cache_module, name, value)
    assert ResultCache(tmp_path, Prediction).get(TASK) is None


def test_another_workspace_of_cublas_is_answered_anew(tmp_path, monkeypatch):
    ResultCache(tmp_path, Prediction).put(TASK, prediction())
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert ResultCache(tmp_path, Prediction).get(TASK) is None


def test_a_run_on_an_emulated_gpu_is_found_again_for_the_same_memory_and_stand_ins_only(tmp_path):
    run = EmulatedRun(
        **{"device_name": "NVIDIA H100 80GB HBM3", "device_memory_bytes": 80 * GiB, "runtime": "13.0", "packages": {}},
        **{"fits": True, "peak_allocated_bytes": 1, "peak_reserved_bytes": 2, "device_used_bytes": 3},
    )
    task = msgspec.structs.replace(TASK, target=None, emulated="h100", limit=Limit(bytes=0))
    cache = ResultCache(tmp_path, EmulatedRun, "these")
    cache.put(task, run)
    assert cache.get(task) == run
    assert ResultCache(tmp_path, EmulatedRun, "others").get(task) is None
    for other in (
        {"limit": Limit(bytes=5)},
        {"limit": Limit(bytes=0, of_steps=True)},
        {"emulated": "h200"},
        {"limit": None},
    ):
        assert cache.get(msgspec.structs.replace(task, **other)) is None


def test_own_code_is_never_remembered(tmp_path):
    task = msgspec.structs.replace(TASK, case=Case(model="mine", method="custom", code="test_it.py::mine"))
    ResultCache(tmp_path, Prediction).put(task, prediction())
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_asked_for_in_a_month_is_forgotten(tmp_path):
    asked, forgotten, new = (msgspec.structs.replace(TASK, case=CASE.replace(batch_size=size)) for size in (2, 4, 8))
    for task in (asked, forgotten):
        ResultCache(tmp_path, Prediction).put(task, prediction())
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))
    assert ResultCache(tmp_path, Prediction).get(asked) is not None
    ResultCache(tmp_path, Prediction).put(new, prediction())
    assert [ResultCache(tmp_path, Prediction).get(task) is not None for task in (asked, forgotten, new)] == [
        True,
        False,
        True,
    ]


class Machine:
    """Predicts that a case fits if these knobs have these values."""

    def __init__(self, **cures):
        self.cures = cures
        self.asked = []

    def __call__(self, case):
        self.asked.append(case)
        fits = bool(self.cures) and all(getattr(case, knob) == value for knob, value in self.cures.items())
        return Need(fits, needed_bytes(prediction() if fits else unfit()))


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
def test_the_cheapest_change_that_fits_is_told(cures, sentence, tries):
    machine = Machine(**cures)
    assert sentence in remedy(BIG, unfit(), machine)
    assert len(machine.asked) == tries
    assert {case.batch_size * case.gradient_accumulation for case in machine.asked} == {8}, "as many samples"


def test_a_loss_by_chunks_is_tried_where_logits_are_at_the_peak():
    at_peak = unfit(largest={"backward": (LOGITS,)})
    machine = Machine(loss_chunks=16)
    assert remedy(BIG, at_peak, machine) == "loss_chunks=16 makes it fit, in 35.5 GiB"
    words = "9.00 GiB at the peak are logits (128,256 words wide), which a loss fused with the output layer never holds"
    assert words in remedy(BIG, at_peak, Machine())
    assert len(machine.asked) == 2
    for machine, prediction_, case in (
        (Machine(), unfit(largest={"backward": (live_tensor(shape=(4096,)),)}), BIG),
        (Machine(), at_peak, BIG.replace(loss_chunks=4)),
        (Machine(), at_peak, BIG.replace(model="gemma-2-9b")),
    ):
        remedy(case, prediction_, machine)
        assert not [asked for asked in machine.asked if asked.loss_chunks == 16]


def case_of(name):
    return CASE.replace(model=name)


FORETOLD = {
    "llama-3.1-8b": prediction(roofline_seconds=3.0),
    "gemma-7b": prediction(roofline_seconds=1.0),
    "phi-3-mini-128k": unfit(roofline_seconds=0.1),
    "llama-2-13b": prediction(roofline_seconds=2.0),
}


@pytest.fixture
def forecast(tmp_path):
    entries = {str(case_of(name)): recorded(entry, case=case_of(name)) for name, entry in FORETOLD.items()}
    PredictionStore(tmp_path).update("h100", "llm", entries)
    return Forecast(tmp_path, "h100")


def test_short_tests_first_unknown_later_unfit_last(forecast):
    names = [*FORETOLD, "gemma-2-9b"]
    order_by = (lambda test: test[0], lambda test: ("llm", [case_of(test[1])] if test[1] else []))
    for order in itertools.islice(itertools.permutations(names), 0, None, 7):
        tests = [("a", name) for name in order]
        forecast.order(tests, *order_by)
        assert [name for _, name in tests] == ["gemma-7b", "llama-2-13b", "llama-3.1-8b", "gemma-2-9b", "phi-3-mini-128k"]
        before = list(tests)
        Forecast(Path("/nowhere"), "h100").order(tests, *order_by)
        assert tests == before, "where nothing is known"
    tests = [("a", "llama-3.1-8b"), ("a", ""), ("b", "phi-3-mini-128k"), ("a", "gemma-7b"), ("b", "gemma-7b"), ("b", "")]
    forecast.order(tests, *order_by)
    assert "".join(file for file, _ in tests) == "aababb", "files and other tests keep their places"
    assert [name for _, name in tests] == ["gemma-7b", "", "gemma-7b", "llama-3.1-8b", "phi-3-mini-128k", ""]
    assert forecast.is_unfit("llm", case_of("phi-3-mini-128k"))
    assert not forecast.is_unfit("llm", case_of("phi-3-mini-128k").replace(batch_size=1)), "which is declared otherwise"


def test_the_cache_depends_on_this_package_and_on_nothing_beside_it():
    read = []
    package = Path(cache_module.__file__).parents[1]
    with mock.patch.object(Path, "read_bytes", lambda path: read.append(path) or b""):
        cache_module._own_code.__wrapped__()
    assert package / "worker" / "prediction" / "predict.py" in read
    assert [path for path in read if not path.is_relative_to(package)] == []


def test_what_a_measurement_has_and_a_prediction_has_not_is_none():
    properties = {name for name in dir(Measurement) if isinstance(getattr(Measurement, name), property)}
    figures = {*Measurement.__struct_fields__, *properties}
    lacking = {name for name in figures if name not in Prediction.__struct_fields__}
    assert set(MEASURED_ONLY) == lacking
    assert {getattr(prediction(), name) for name in lacking} == {None}
    with pytest.raises(AttributeError, match="a prediction has no peak_alocated"):
        _ = prediction().peak_alocated
