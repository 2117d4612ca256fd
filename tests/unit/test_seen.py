"""A run says in one line which part of the programs of its cases it has seen."""

import pytest
from unit_examples import CASE, cpu_environment, emulated_run, measurement, result

from pytest_gputrain.records import Counts, StepCounts, StepMemory
from pytest_gputrain.report.seen import line

BOTH = {"evaluate": 7, "checkpoint": 7}
OWN = CASE.replace(code="test_mine.py::train", steps=30)


def _measured(case=OWN, *, steps=30, counted=2, phases=BOTH):
    counts = Counts(steps=(0,) * counted, kinds=(StepCounts(),), on_cpu=True)
    memory = (StepMemory(steps, 10, 5),) if steps else ()
    reply = measurement(environment=cpu_environment(), memory_of_steps=memory, counts=counts, phase_peak_bytes=phases)
    return result(case, replies=(reply,))


def _emulated(counted):
    return result(OWN, reply=emulated_run(phase_peak_bytes=BOTH, counts=Counts(steps=(0,) * counted, kinds=(StepCounts(),))))


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([_measured(counted=30)], ""),
        ([_measured()], "operators and reads were counted in 2 of 30 steps"),
        ([_measured(), _measured()], "operators and reads were counted in 2 of 30 steps"),
        (
            [_measured(), _measured(OWN.replace(steps=10), steps=10)],
            "operators and reads were counted in 4 of 40 steps in 2 cases",
        ),
        ([_measured(steps=0)], "memory was counted in 4 of 30 steps, and operators and reads were counted in 2 of 30 steps"),
        ([_measured(OWN.replace(gradient_accumulation=8), steps=0, counted=30)], ""),
        ([_measured(OWN.replace(steps=3, epoch=True), counted=3)], "operators and reads were counted in 3 of 30 steps"),
        ([_measured(CASE.replace(steps=30))], ""),
        ([_measured(OWN.replace(method="script"))], ""),
        ([_emulated(30)], ""),
        ([_emulated(13)], "requests to the GPU were counted in 13 of 30 steps"),
    ],
    ids=[
        "all",
        "some",
        "alike",
        "others",
        "counted rounds",
        "whole rounds",
        "an epoch",
        "built-in model",
        "script",
        "emulated",
        "fewer",
    ],
)
def test_a_run_says_how_many_of_the_steps_were_counted(results, said):
    assert line(results) == said


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ([{}], "no evaluation was measured, and no checkpoint was measured"),
        ([BOTH, {"evaluate": 7}, {"evaluate": 7}], "no checkpoint was measured in 2 of 3 cases"),
        ([BOTH], ""),
    ],
)
def test_a_run_says_where_nothing_was_evaluated_or_saved(phases, said):
    built_in = result(CASE, replies=(measurement(),))
    seen = line([built_in, *(_measured(counted=30, phases=of_case) for of_case in phases)])
    assert seen == said
    nothing_beside = "no evaluation was measured, and no checkpoint was measured"
    assert line([_measured(phases={})]) == f"operators and reads were counted in 2 of 30 steps; {nothing_beside}"
