"""The memory of each step is recorded in short, compared by the number of the step, and its growth is found."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_examples import baseline, baseline_run, cpu_environment, judged, measurement

from pytest_gputrain.records import StepMemory
from pytest_gputrain.records.step_memory import LEAST_RISE, OfStep, counted_steps, folded, rise_of, unfolded
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance
from pytest_gputrain.utils.units import KiB, MiB

SIZES = st.integers(0, 3)
STEPS = st.lists(st.builds(OfStep, SIZES, SIZES), max_size=30)
CPU = cpu_environment()
TOLERANCE = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02))


@given(STEPS)
def test_a_record_has_every_step_and_one_row_for_alike_ones(steps):
    record = folded(steps)
    assert [*unfolded(record)] == steps
    assert all((one.peak, one.end) != (other.peak, other.end) for one, other in itertools.pairwise(record))
    assert counted_steps(record) == sum(step.peak > 0 for step in steps)
    assert msgspec.json.decode(msgspec.json.encode(record), type=tuple[StepMemory, ...]) == record


@given(
    first=st.integers(1, 40), every=st.integers(1, 12), rises=st.integers(3, 6), bytes_=st.integers(5, 99), data=st.data()
)
def test_a_rise_at_even_distances_is_found_with_step_and_size(first, every, rises, bytes_, data):
    after = data.draw(st.integers(0, every - 1))
    values = [0] * first + [step // every * bytes_ + bytes_ for step in range((rises - 1) * every + 1 + after)]
    assert rise_of(values, 4) == (first, every, bytes_)
    assert rise_of([value + MiB for value in values], 4) == (first, every, bytes_), "what is there already is no rise"
    assert rise_of(values, bytes_) is None, "it is allowed"
    assert rise_of([*values, values[-1] - 1], 0) is None, "it is given back"
    assert rise_of([*values, *[values[-1]] * every], 0) is None, "it has stopped"


@pytest.mark.parametrize(
    "values",
    [
        [0, 9, 18, 18, 18, 18],
        [0, 9, 9, 18],
        [0, 9, 9, 18, 27, 27, 27, 36],
        [5, 9, 2, 8, 1, 7, 3, 6],
        [0, 9, 9, 18, 27, 27, 27, 36, 40],
    ],
    ids=["stops", "two", "a cache that fills", "varying", "odd distances"],
)
def test_what_does_not_go_on_evenly_is_no_rise(values):
    assert rise_of([value * MiB for value in values]) is None


def _judge(now, before, environment=CPU, again=None, **fields):
    """Judge the memory of steps, in MiB: the peaks of steps if they are numbers, or peaks and ends.

    Args:
        again: the memory in a second run of the same code.
    """

    def record(steps):
        pairs = [step if isinstance(step, tuple) else (step, 1) for step in steps]
        return folded(OfStep(round(peak * MiB), round(end * MiB)) for peak, end in pairs)

    fields = {"peak_allocated_bytes": 10 * MiB, **fields}
    first, second = (
        measurement(environment=environment, memory_of_steps=record(steps), **fields) for steps in (now, again or now)
    )
    stored = baseline_run(environment=environment, memory_of_steps=record(before), peak_allocated_bytes=10 * MiB)
    return judged([first, second, first], baseline(stored), TOLERANCE).verdict


def test_a_spike_names_its_step():
    verdict = _judge([10] * 39 + [14] + [10] * 10, [10] * 50)
    assert verdict.status == "regressed"
    assert "peaks at 14.0 MiB in step 40 (10.0 MiB before) (" in verdict.sentence
    assert _judge([10] * 39 + [10.1] + [10] * 10, [10] * 50).status == "pass", "the tolerance of memory holds for steps"


def test_steps_are_compared_with_those_of_their_own_number():
    shapes = [5, 9, 2, 8, 1, 7, 3, 6]
    assert _judge(shapes, shapes).status == "pass"
    assert _judge(shapes[:5], shapes).status == "pass", "the steps that both have"
    verdict = _judge([5, 9, 2, 8, 3, 7, 3, 6], shapes)
    assert "peaks at 3.00 MiB in step 5 (1.00 MiB before) (" in verdict.sentence


def test_runs_of_one_code_that_differ_are_told_beside_the_growth():
    said = "; but runs of this code differ there by 3.00 MiB, as they do if the data have no seed"
    assert said in _judge([5, 9, 8], [5, 4, 8], again=[5, 6, 8]).sentence
    assert said.partition(" differ")[0] not in _judge([5, 9, 8], [5, 4, 8], again=[5, 9, 8]).sentence


def test_a_step_that_was_not_counted_is_not_compared():
    assert _judge([10, 14, 10], [10, (0, 0), 10]).status == "pass"
    assert _judge([10, (0, 0), 10], [10, 14, 10]).status == "pass"


def test_what_most_steps_need_more_is_told_once():
    verdict = _judge([11] * 50, [10] * 50, peak_allocated_bytes=11 * MiB)
    assert verdict.status == "regressed"
    assert "in step" not in verdict.sentence
    verdict = _judge([11] * 39 + [12] + [11] * 10, [10] * 50, peak_allocated_bytes=11 * MiB)
    assert "and peaks at 12.0 MiB in step 40 (10.0 MiB before), and needs more in 49 other steps (" in (verdict.sentence)


@pytest.mark.parametrize(
    ("grown", "said"),
    [
        ([0] * 8 + [*range(1, 23)], "after each step from step 9 on"),
        ([step // 10 for step in range(1, 31)], "after every 10 steps from step 10 on"),
    ],
    ids=["linear", "every tenth"],
)
def test_growth_over_steps_names_the_step_whatever_they_hold(grown, said):
    held = [5, 9, 2, 8, 1, 7] * 5
    before = [(20, end) for end in held]
    now = [(20, end + more / 32) for end, more in zip(held, grown, strict=True)]
    verdict = _judge(now, before)
    assert verdict.status == "regressed"
    assert f"keeps 32.0 KiB more of tensors {said}, which it did not before (" in verdict.sentence
    unknown = [*now[:3], (0, 0), (0, 0), *now[5:]]
    assert f"more of tensors {said}, which" in _judge(unknown, before).sentence, "steps keep their numbers"
    assert _judge(now, before, allowed_growth=32 * KiB).status == "pass"
    assert _judge(now, now).status == "pass"


def test_growth_is_found_across_steps_that_were_not_counted():
    now = [(20, 1 + (step // 10) / 32) for step in range(1, 31)]
    now[14:16] = [(0, 0)] * 2
    assert "after every 10 steps from step 10 on" in _judge(now, [20] * 30).sentence


def test_more_at_each_end_and_small_numbers_are_no_growth():
    held = [5, 9, 2, 8, 1, 7] * 5
    before = [(20, end) for end in held]
    assert _judge([(20, end + 3) for end in held], before).status == "pass"
    few = [(20, end + step * LEAST_RISE / MiB) for step, end in enumerate(held)]
    assert _judge(few, before).status == "pass"


def test_a_baseline_without_memory_of_steps_is_named_once():
    verdict = _judge([10] * 50, [])
    assert verdict.status == "pass"
    (metric,) = (metric for metric in verdict.metrics if metric.metric == "step_peak_bytes")
    assert (metric.status, metric.note) == ("not-comparable", "it was not recorded; record it again")
    assert not [metric for metric in _judge([], [10] * 50).metrics if metric.metric == "step_peak_bytes"]


def _judge_heap(*now, before=0, **fields):
    """Judge what the steps of as many processes leave on the heap, in KiB."""
    replies = [measurement(environment=CPU, heap_growth=None if one is None else one * KiB, **fields) for one in now]
    stored = baseline_run(environment=CPU, heap_growth=None if before is None else before * KiB)
    judgement = judged(replies, baseline(stored), TOLERANCE)
    return judgement, {metric.metric: metric.status for metric in judgement.verdict.metrics}.get("heap_growth")


def test_a_heap_that_grows_more_fails_once_two_processes_agree():
    assert _judge_heap(133)[0].settled is False
    judgement, status = _judge_heap(133, 133)
    assert (judgement.settled, status) == (True, "regressed")
    assert "leaves 133 KiB more on the host's heap after each step (0 B before): look" in (judgement.verdict.sentence)
    assert _judge_heap(133, 0)[1] == "pass"
    assert _judge_heap(64)[1] == _judge_heap(200, before=100)[1] == _judge_heap(133, allowed_growth=MiB)[1] == "pass"
    assert _judge_heap(215, 215, before=100)[1] == "regressed"


def test_a_heap_that_one_side_lacks_is_named_if_the_baseline_has_it():
    assert _judge_heap(133, before=None)[1] is None
    assert _judge_heap(None)[1] == "not-comparable"


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("phase", "said"), [("evaluate", "its evaluation"), ("checkpoint", "a checkpoint")])
def test_more_left_behind_beside_the_steps_fails(phase, said, processes):
    here = cpu_environment(device_count=processes)

    def judge(now, before, **fields):
        reply = measurement(environment=here, kept_behind={phase: now} if now is not None else {}, **fields)
        stored = baseline_run(environment=here, kept_behind={phase: before} if before is not None else {})
        verdict = judged([reply] * 2, baseline(stored), TOLERANCE).verdict
        return verdict.sentence, {metric.metric: metric.status for metric in verdict.metrics}.get(f"{phase}_kept_bytes")

    sentence, status = judge(384 * KiB, 100)
    assert status == "regressed"
    assert f"leaves 384 KiB of tensors behind {said} (100 B before) (" in sentence
    assert judge(100 + LEAST_RISE, 100)[1] == "pass"
    assert judge(384 * KiB, None)[1] is None
    assert judge(None, 100)[1] is None
    assert judge(384 * KiB, 100, counted_threads=2)[1] is None, "own threads decide what lives"


def _judge_beside(kept, peaks, **fields):
    """Judge what an evaluation leaves behind, and the peaks of an evaluation and a checkpoint, in MiB."""

    def run(kind, kept, peaks, **fields):
        sizes = dict(zip(("evaluate", "checkpoint"), (round(peak * MiB) for peak in peaks), strict=True))
        left = {} if kept is None else {"evaluate": round(kept * MiB), "checkpoint": 0}
        return kind(environment=CPU, phase_peak_bytes=sizes, kept_behind=left, **fields)

    stored = run(baseline_run, None if kept is None else 0, (5, 6))
    verdict = judged([run(measurement, kept, peaks, **fields)] * 3, baseline(stored), TOLERANCE).verdict
    return verdict.sentence, {metric.metric for metric in verdict.metrics if metric.status == "regressed"}


def test_what_an_evaluation_leaves_behind_is_told_once():
    sentence, regressed = _judge_beside(2, (7, 8))
    assert regressed == {"evaluate_kept_bytes", "evaluate_peak_bytes", "checkpoint_peak_bytes"}, "figures stay as they are"
    assert "leaves 2.00 MiB of tensors behind its evaluation (0 B before) (" in sentence
    assert "needs" not in sentence, "the peaks of both phases have the same bytes"


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ((8, 8), "needs 3.00 MiB (60.0 %) more in evaluation, 8.00 MiB against 5.00 MiB allocated"),
        ((7, 9), "needs 3.00 MiB (50.0 %) more while saving a checkpoint, 9.00 MiB against 6.00 MiB"),
    ],
    ids=["evaluation", "checkpoint"],
)
def test_a_peak_that_grew_by_more_than_what_is_left_is_told(peaks, said):
    sentence, _ = _judge_beside(2, peaks)
    assert said in sentence
    assert "leaves 2.00 MiB of tensors behind its evaluation (0 B before)" in sentence


def test_a_peak_is_judged_whole_where_what_is_left_is_not():
    both = {"evaluate_peak_bytes", "checkpoint_peak_bytes"}
    assert _judge_beside(None, (7, 8))[1] == _judge_beside(2, (7, 8), counted_threads=2)[1] == both
