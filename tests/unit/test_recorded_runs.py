"""Recorded runs on emulated GPUs: how they are kept, and what they tell a run on a real GPU."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from unit_examples import CASE, emulated_run, recorded

from pytest_gputrain.execution.fleet.durations import Durations
from pytest_gputrain.records import EmulatedRun, Measurement, OperatorWork, Task
from pytest_gputrain.storage.emulated import MOST_CONDITIONS, EmulationStore
from pytest_gputrain.storage.forecast import Forecast
from pytest_gputrain.utils.units import GiB


def versions(number):
    return emulated_run(packages={"torch": f"2.{number}.0"})


def test_an_update_replaces_the_same_conditions_and_keeps_others(tmp_path):
    def update(**records):
        EmulationStore(tmp_path).update("h100", "llm", records)
        stored = {key: EmulationStore(tmp_path).get("h100", "llm", key) for key in "ab"}
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


def test_a_heap_that_does_not_grow_is_stored(tmp_path):
    def stored(growth):
        store = EmulationStore(tmp_path)
        store.update("h100", "llm", {"a": recorded(msgspec.structs.replace(versions(1), heap_growth=growth))})
        return store.get("h100", "llm", "a").figures[0].heap_growth

    assert [stored(growth) for growth in (0, 7, None)] == [0, 7, None]


# What they tell a real run


def case_of(name):
    return CASE.replace(model=name)


def work(seconds):
    """Operators whose FLOPs take so long on an H100, and whose bytes take less."""
    return {"aten.mm": OperatorWork(calls=1, flops=round(seconds * 989.4e12), bytes=1)}


RECORDED = {
    "llama-3.1-8b": emulated_run(operators=work(3.0)),
    "gemma-7b": emulated_run(operators=work(1.0)),
    "phi-3-mini-128k": emulated_run(operators=work(0.1), fits=False),
    "llama-2-13b": emulated_run(operators=work(2.0)),
}


@pytest.fixture
def forecast(tmp_path):
    entries = {str(case_of(name)): recorded(entry, case=case_of(name)) for name, entry in RECORDED.items()}
    EmulationStore(tmp_path).update("h100", "llm", entries)
    return Forecast(tmp_path, "h100")


def test_short_tests_first_unknown_later_unfit_last(forecast):
    names = [*RECORDED, "gemma-2-9b"]
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


STEPS = CASE.steps + CASE.warmup


@pytest.mark.parametrize(
    ("fields", "knobs", "seconds"),
    [
        ({}, {}, 1.0),
        ({}, {"precision": "fp32"}, 989.4 / 67),
        ({}, {"precision": "fp32", "tf32": True}, 2.0),
        ({"operators": {"aten.convolution": work(1.0)["aten.mm"]}}, {"precision": "fp32"}, 2.0),
        ({"operators": {"aten.mm": OperatorWork(calls=1, flops=1, bytes=round(3.35e12))}}, {}, 1.0),
        ({"allocated_by_rank": (GiB,) * 4, "processes": 4}, {}, 0.25),
    ],
    ids=["arithmetic", "fp32", "products in TF32", "convolutions in TF32", "memory traffic", "work of four processes"],
)
def test_the_time_of_the_work_is_at_the_peaks_of_the_gpu(tmp_path, fields, knobs, seconds):
    case = CASE.replace(**knobs)
    run = emulated_run(**{"operators": work(1.0), **fields})
    EmulationStore(tmp_path).update("h100", "llm", {str(case): recorded(run, case=case)})
    assert Forecast(tmp_path, "h100").seconds("llm", case) == pytest.approx(STEPS * seconds, rel=0.01)


def test_what_a_run_takes_is_known_from_its_history_and_else_from_its_emulated_run(forecast, tmp_path):
    history = tmp_path / "history.jsonl"
    line = {"suite": "llm", "key": str(case_of("gemma-7b")), "platform": "h100", "median_step_seconds": 100.0}
    history.write_text(json.dumps(line) + "\n" + json.dumps(line | {"platform": "a100", "median_step_seconds": 7.0}) + "\n")

    def seconds_of(name, durations, scale="full"):
        return durations.of("llm", Task(case=case_of(name), scale=scale, device_type="gpu", root="."))

    durations = Durations("h100", history, forecast)
    assert seconds_of("gemma-7b", durations) == 100 * STEPS
    assert seconds_of("llama-2-13b", durations) == pytest.approx(2 * STEPS, rel=0.01)
    assert seconds_of("gemma-2-9b", durations) == 0
    assert seconds_of("llama-2-13b", durations, scale="tiny") == 0
    assert seconds_of("llama-2-13b", Durations("h100", None, None)) == 0


def test_what_a_measurement_has_and_an_emulated_run_has_not_is_none():
    figures = {name for name in dir(Measurement) if not name.startswith("_")}
    lacking = figures - set(dir(EmulatedRun))
    assert {getattr(emulated_run(), name) for name in lacking} == {None}
    assert emulated_run().update_seconds(4) is None
    with pytest.raises(AttributeError, match="a run on an emulated GPU has no peak_alocated"):
        _ = emulated_run().peak_alocated
