"""Rounds of two sides: what they have in common goes, what sets the sides apart stays."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_examples import CASE, SETTINGS, cpu_environment, crashed, gpu_environment, measurement, report, result, summary

from pytest_gputrain.gate.ab import compare, missing
from pytest_gputrain.gate.step_times import levelled
from pytest_gputrain.records import Counts, StepCounts

SECONDS = st.lists(st.tuples(st.floats(1e-4, 1e4), st.floats(0.5, 2)), min_size=1, max_size=8)


def _round(seconds, case=CASE, **fields):
    reply = measurement(step_seconds=(seconds,) * 3, **{"environment": cpu_environment(), **fields})
    return report(result(case, replies=(reply,)), settings=SETTINGS)


def _only(judged):
    ((result, settled),) = judged.values()
    assert settled, "after the last round"
    return result


def _verdict(base, head):
    return _only(compare([_round(seconds) for seconds in base], [_round(seconds) for seconds in head], "base")).verdict


@given(SECONDS, st.floats(0.5, 2))
def test_a_difference_stays_and_the_moods_of_rounds_go(moods, slower):
    base = [mood for mood, _ in moods]
    base_seconds, head_seconds = levelled(base, [mood * slower for mood in base])
    assert [new / old for old, new in zip(base_seconds, head_seconds, strict=True)] == pytest.approx([slower] * len(moods))
    assert base_seconds == pytest.approx([base_seconds[0]] * len(base_seconds))


def test_what_is_left_of_a_round_is_that_of_the_formula_by_hand():
    """Differences of 1, 3 and 8 %, of which the median is 3; the mean of all logarithms is 12 %."""
    base, head = ([math.exp(x / 100) for x in logs] for logs in ((0, 10, 20), (1, 13, 28)))
    base_seconds, head_seconds = (list(map(math.log, side)) for side in levelled(base, head))
    halves = [0.015 - 0.02 / math.sqrt(2), 0.015, 0.015 + 0.05 / math.sqrt(2)]
    assert base_seconds == pytest.approx([0.12 - half for half in halves])
    assert head_seconds == pytest.approx([0.12 + half for half in halves])


def test_a_machine_that_drifts_by_ten_percent_hides_no_five():
    moods = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert _verdict(moods, [1.05 * mood for mood in moods]).status == "regressed"
    assert _verdict(moods, moods).status == "pass"


def _after(rounds, base, head, here=cpu_environment, **fields):
    before, after = ([_round(s, environment=here()) for s in base], [_round(s, environment=here(), **fields) for s in head])
    judged = compare(before, after, "base", rounds)
    ((result, settled),) = judged.values()
    return result.verdict.status if settled else None


def test_rounds_end_once_the_time_cannot_mean_anything_else():
    assert _after(5, [1], [1]) is None, "one round does not show how much rounds differ"
    assert _after(5, [1] * 2, [1] * 2) == "pass"
    assert _after(5, [1] * 2, [1.1] * 2) == "regressed"
    assert _after(5, [1] * 2, [0.9] * 2) == "improved"
    # A slowdown near the limit takes all of them, as does one round that is slow.
    assert [_after(5, [1] * n, [1.04] * n) for n in (2, 3, 4, 5)] == [None, None, None, "regressed"]
    assert [_after(5, [1] * n, [1, 1.05, 1, 1, 1][:n]) for n in (2, 3, 4, 5)] == [None, None, None, "pass"]
    assert _after(5, [1] * 2, [1.013] * 2) is None, "beyond a third of the limit"
    assert _after(5, [1] * 3, [1, 1.2, 1.2]) is None, "not all rounds are far beyond it"


def test_a_case_has_further_rounds_while_one_of_its_figures_may_change():
    bigger = {"here": gpu_environment, "peak_allocated_bytes": 1 << 40}
    assert [_after(5, [1] * n, [1] * n, **bigger) for n in (1, 2, 3)] == [None, None, "regressed"]


def test_counts_are_judged_as_the_settings_of_head_say():
    def status(settings):
        base, head = (_round(1, counts=Counts(steps=(0,), kinds=(StepCounts(waits=waits),))) for waits in (0, 1))
        head = msgspec.structs.replace(head, settings=SETTINGS | settings)
        ((result, _),) = compare([base] * 2, [head] * 2, "base").values()
        return result.verdict.status

    assert status({}) == status({"counts": "judge", "count_tolerances": {}}) == "regressed"
    assert status({"counts": "off"}) == status({"count_tolerances": {"waits": {"ratio": 0.0, "more": 1}}}) == "pass"


def test_what_no_further_round_can_change_has_one():
    assert _after(5, [1], [1], case=OTHER_MODEL) == "new"
    for base, head in (([_round(1)], [BROKEN]), ([BROKEN], [_round(1)])):
        ((_, settled),) = compare(base, head, "base", 5).values()
        assert settled


OTHER_MODEL = CASE.replace(model="gemma-7b")
BROKEN = report(result(CASE, replies=(crashed(),)), settings=SETTINGS)
SIDES = {
    "better: without the advice to record it": ([_round(1.0)] * 5, [_round(0.9)] * 5),
    "fewer rounds than judge time on a CPU": ([_round(1)] * 3, [_round(2)] * 3),
    "a head that crashes": ([_round(1)], [BROKEN]),
    "a base that crashes": ([BROKEN], [_round(1)]),
    "another case by the same name": ([_round(1)], [_round(1, CASE.replace(batch_size=4))]),
    "a case of one side": ([_round(1)], [_round(1, OTHER_MODEL)]),
}


def test_what_is_said_of_two_sides(snapshot):
    said = {}
    for what, (base, head) in SIDES.items():
        judged = _only(compare(base, head, "base"))
        said[what] = f"{judged.verdict.status}: {judged.verdict.sentence}"
    assert said == snapshot


def test_cases_that_head_lacks_in_all_rounds_or_in_some_are_told():
    both, other = [_round(1), _round(1)], _round(1, OTHER_MODEL)
    assert missing(both, both) == []
    assert missing(both, [_round(1), other]) == [(str(CASE), 1)]
    assert missing(both, [other, other]) == [(str(CASE), 0)]


def test_the_figures_of_all_rounds_are_medians():
    summaries = [summary(seconds, peak) for seconds, peak in ((1.0, 10), (3.0, 40), (2.0, 20), (8.0, 30))]
    replies = [(measurement(step_seconds=(made.median_step_seconds,)),) for made in summaries]
    rounds = [report(result(summary=it, replies=of), settings=SETTINGS) for it, of in zip(summaries, replies, strict=True)]
    judged = _only(compare([_round(1.0)] * 4, rounds, "base"))
    assert [reply.step_seconds for reply in judged.replies] == [of.step_seconds for (of,) in replies], (
        "as they were measured"
    )
    assert (judged.summary.median_step_seconds, judged.summary.peak_allocated_bytes) == (2.5, 30)
    assert judged.summary.tokens_per_second is None


@pytest.mark.parametrize("head", [[1.1] * 5, [0.9] * 5, [1.0] * 5])
def test_no_word_of_a_verdict_is_of_baselines_but_the_name_of_the_case(head):
    case = CASE.replace(model="baseline", code="a.py::baseline", method="custom")
    head_rounds = [_round(seconds, case, flops_per_step=5) for seconds in head]
    judged = _only(compare([_round(1.0, case)] * 5, head_rounds, "base"))
    assert judged.verdict.sentence.startswith("baseline-bf16 ")
    assert "baseline" not in judged.verdict.sentence.removeprefix("baseline-bf16")
    assert not [metric.note for metric in judged.verdict.metrics if "baseline" in metric.note]
