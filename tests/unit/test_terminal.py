"""Tests what people read on the terminal: the table, the sentences below it, the progress line."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_examples import CASE, RESULT_KINDS, crashed, measurement, out_of_memory, prediction, result, timed_out, values_of

from pytest_gputrain.records import Case, Event, MetricVerdict, Result, Summary, Verdict
from pytest_gputrain.report.progress_line import ProgressLine, describe
from pytest_gputrain.report.terminal import advice, explain, render
from pytest_gputrain.utils.units import GiB

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def _render(*results: Result, width: int = 160, colour: bool = False) -> str:
    return render(results, width=width, colour=colour)


def _verdict(status: Any, *metrics: MetricVerdict, sentence: str = "a sentence") -> Verdict:
    return Verdict(status=status, sentence=sentence, metrics=metrics)


def _summary(seconds: float, peak: int = 40_000_000_000) -> Summary:
    return Summary(
        median_step_seconds=seconds,
        samples_per_second=1.0,
        tokens_per_second=None,
        peak_allocated_bytes=peak,
        model_flops_utilization=None,
    )


def _custom(model: str, **fields: Any) -> Result:
    case = Case(model=model, method="custom", precision="fp32", code="test_a.py::f")
    return result(case, **fields)


def test_table_has_the_figures_of_the_published_ones() -> None:
    peak = int(35.6 * GiB)
    reply = measurement(peak_allocated_bytes=peak, model_bytes=15 * GiB)
    text = _render(result(replies=(reply,), summary=_summary(0.42, peak)))
    row = next(line for line in text.splitlines() if "Llama 3.1 8B" in line)
    assert re.split(r"\s{2,}", row.strip()) == ["Llama 3.1 8B", "LoRA", "bf16", "35.6 GiB", "(15.0 GiB)", "420 ms", "pass"]
    for header in ("Model", "Method", "Setting", "Peak mem.", "(Model)", "Sec/step", "Verdict"):
        assert header in text


def test_knobs_of_the_id_are_the_setting() -> None:
    case = CASE.replace(named=("batch_size",))
    assert "bf16-batch_size=2" in _render(result(case))


@pytest.mark.parametrize(("method", "shown"), [("full", "Full"), ("lora", "LoRA"), ("qlora", "QLoRA")])
def test_methods_are_spelt_as_published(method: str, shown: str) -> None:
    assert f" {shown} " in _render(result(CASE.replace(method=method)))


def test_own_code_is_shown_by_its_name() -> None:
    row = next(line for line in _render(_custom("my_step")).splitlines() if "my_step" in line)
    assert re.split(r"\s{2,}", row.strip())[:2] == ["my_step", "fp32"]


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        (out_of_memory(), "OOM"),
        (crashed(), "crashed"),
        (msgspec.structs.replace(crashed(), refused=True), "refused"),
        (timed_out(), "timed out"),
    ],
)
def test_a_case_without_figures_is_shown_with_its_outcome(reply: Any, shown: str) -> None:
    assert shown in _render(result(replies=(reply,), summary=None, verdict=_verdict("failed")))


def test_peak_is_the_one_that_was_judged() -> None:
    replies = tuple(measurement(peak_allocated_bytes=gib * GiB) for gib in (20, 30, 25))
    assert "25.0 GiB" in _render(result(replies=replies, summary=_summary(1.0, peak=25 * GiB)))


def test_figures_are_shown_where_one_run_has_some() -> None:
    replies = (out_of_memory(), measurement(peak_allocated_bytes=20 * GiB))
    assert "20.0 GiB" in _render(result(replies=replies, summary=_summary(1.0, peak=20 * GiB)))


def test_changes_are_shown_where_metrics_were_compared() -> None:
    time = MetricVerdict(metric="step_seconds", status="regressed", value=1.072, baseline=1.0, limit=1.03)
    memory = MetricVerdict(metric="peak_allocated_bytes", status="pass", value=99, baseline=100, limit=102)
    text = _render(result(verdict=_verdict("regressed", time, memory)))
    assert "+7.2 %" in text
    assert "-1.0 %" in text
    assert "Δ time" in text


def test_no_changes_are_shown_where_none_was_compared() -> None:
    metric = MetricVerdict(metric="step_seconds", status="not-comparable", value=2.0, baseline=1.0)
    text = _render(result(verdict=_verdict("pass", metric)))
    assert "Δ" not in text
    assert "%" not in text


def test_a_case_that_was_only_measured_says_so() -> None:
    assert "measured" in _render(result(verdict=None))


def test_a_case_that_was_only_predicted_says_so() -> None:
    only_predicted = result(verdict=None, reply=prediction())
    assert _render(only_predicted).splitlines()[-1].endswith("predicted")


def test_a_case_that_was_judged_is_not_shown_again_where_another_test_measured_it() -> None:
    other = result(CASE.replace(method="full"), verdict=None)
    text = _render(result(verdict=None), result(), other)
    assert len(re.findall("Llama 3.1 8B .* LoRA .* pass", text)) == 1
    assert len(re.findall("measured", text)) == 1


def test_tiny_figures_are_said_to_be_no_models_own() -> None:
    text = _render(result(scale="tiny", device="cpu", platform="cpu"))
    assert "llm on CPU, tiny scale (tiny stand-ins for the models named)" in text
    assert "stand-ins" not in _render(result())


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({}, "llm on H100 x1, full scale"),
        ({"platform": "unknown", "device": "nvidia-z9000"}, "llm on nvidia-z9000 x1, full scale"),
        ({"case": CASE.replace(gpus=8, parallel="fsdp")}, "llm on H100 x8, full scale"),
        ({"platform": "cpu", "device": "cpu"}, "llm on CPU, full scale"),
    ],
)
def test_a_table_is_titled_by_suite_device_and_scale(fields: dict[str, Any], title: str) -> None:
    assert title in _render(result(**fields))


def test_suites_have_tables_of_their_own() -> None:
    text = _render(result(), result(suite="vision"), result())
    assert text.count("llm on") == text.count("vision on") == 1
    assert text.count("Llama 3.1 8B") == 3


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool) -> None:
    case = CASE.replace(named=("batch_size", "activation_checkpointing", "gradient_accumulation", "optimizer"))
    time = MetricVerdict(metric="step_seconds", status="pass", value=1.0, baseline=1.1)
    memory = MetricVerdict(metric="peak_allocated_bytes", status="pass", value=99, baseline=100)
    results = [
        result(case, verdict=_verdict("not-comparable", time, memory)),
        _custom("a_function_with_a_name_of_" + "some_length_" * 8),
        result(suite="s" * 200),
    ]
    lines = ESCAPE.sub("", _render(*results, width=width, colour=colour)).splitlines()
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(("width", "model_memory"), [(80, False), (100, True)])
def test_figures_and_verdict_fit_the_terminal(width: int, model_memory: bool) -> None:
    time = MetricVerdict(metric="step_seconds", status="regressed", value=1.072, baseline=1.0, limit=1.03)
    memory = MetricVerdict(metric="peak_allocated_bytes", status="pass", value=99, baseline=100, limit=102)
    case = CASE.replace(activation_checkpointing=True, named=("activation_checkpointing",))
    text = _render(result(case, verdict=_verdict("regressed", time, memory)), width=width)
    assert ("(14.9 GiB)" in text) == model_memory
    for part in ("Llama 3.1 8B", "LoRA", "37.3 GiB", "1.00 s", "+7.2 %", "-1.0 %", "regressed"):
        assert part in text


@pytest.mark.parametrize(("width", "change"), [(80, False), (120, True)])
def test_scaling_efficiency_is_shown_where_there_is_one(width: int, change: bool) -> None:
    case = CASE.replace(parallel="ddp", gpus=8, activation_checkpointing=True, named=("gpus", "activation_checkpointing"))
    metrics = [
        MetricVerdict(metric="step_seconds", status="pass", value=1.02, baseline=1.0, limit=1.03),
        MetricVerdict(metric="peak_allocated_bytes", status="pass", value=99, baseline=100, limit=102),
        MetricVerdict(metric="scaling_efficiency", status="pass", value=0.913, baseline=0.9),
    ]
    summary = msgspec.structs.replace(_summary(1.02), scaling_efficiency=0.913)
    text = _render(result(case, summary=summary, verdict=_verdict("not-comparable", *metrics)), result(), width=width)
    rows = [line for line in text.splitlines() if "%" in line]
    assert max(map(len, text.splitlines())) <= width
    assert ["91.3 %" in row for row in rows] == [True]
    for part in ("37.3 GiB", "1.02 s", "+2.0 %", "-1.0 %", "not-comparable"):
        assert part in rows[0]
    assert ("+1.4 %" in rows[0]) == change
    assert "Scaling" not in _render(result(), width=width)


def test_a_case_of_many_knobs_takes_few_lines_of_a_narrow_terminal() -> None:
    knobs = {"offload_optimizer": True, "offload_param": True, "overlap_comm": False, "stage3_max_live_parameters": 10**9}
    case = CASE.replace(parallel="zero3", named=tuple(knobs), **knobs)
    memory = MetricVerdict(metric="peak_allocated_bytes", status="pass", value=2.0, baseline=2.0, limit=3.0)
    text = _render(result(case, verdict=_verdict("pass", memory)), width=80)
    assert len(text.splitlines()) <= 3 + 5
    assert max(map(len, text.splitlines())) <= 80
    assert "1000000000" in re.sub(r"\s", "", text)


def test_own_code_has_no_empty_column_and_keeps_its_words_at_80_columns() -> None:
    time = MetricVerdict(metric="step_seconds", status="pass", value=1.02, baseline=1.0, limit=1.03)
    memory = MetricVerdict(metric="peak_allocated_bytes", status="pass", value=99, baseline=100, limit=102)
    case = Case(
        model="fine_tuning_of_a_language_model",
        method="custom",
        precision="bf16-amp",
        code="test_a.py::f",
        batch_size=16,
        gradient_accumulation=4,
        named=("batch_size", "gradient_accumulation"),
    )
    for verdict in (_verdict("new"), _verdict("pass", time, memory)):
        text = _render(result(case, verdict=verdict), _custom("short"), width=80)
        assert max(map(len, text.splitlines())) <= 80
        assert "Method" not in text
        for word in ("fine_tuning_of_a_language_model", "batch_size=16", "gradient_accumulation=4", "37.3 GiB", "1.00 s"):
            assert word in text


def test_a_word_longer_than_its_line_is_broken_all_the_same() -> None:
    text = _render(_custom("z" * 100), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("z") == 100


def test_the_advice_of_a_first_run_is_a_line_of_the_explanation() -> None:
    new = [_custom(name, verdict=_verdict("new", sentence=f"{name} was never recorded")) for name in ("a", "b")]
    assert advice(new) == explain(new)[0] == "2 cases without a baseline: a was never recorded (and 1 more)"
    assert advice([*new, result()]) == ""
    assert advice([result(verdict=None)]) == ""


def test_colour_is_used_only_where_wanted() -> None:
    assert "\x1b" in _render(result(), colour=True)
    assert "\x1b" not in _render(result())


def test_colour_changes_no_word() -> None:
    results = [result(), result(verdict=_verdict("regressed")), result(verdict=None)]
    assert ESCAPE.sub("", _render(*results, colour=True)).split() == _render(*results).split()


@pytest.mark.parametrize("model", ["[red]", "[/]", "[bold]x[/bold]", "a[/red]", "x[link=y]", ":smile:", "\\[red]"])
def test_markup_in_a_name_is_shown_as_it_is(model: str) -> None:
    assert model in _render(_custom(model))


@pytest.mark.parametrize("suite", ["[red]", "[/]", ":smile:"])
def test_markup_in_a_title_is_shown_as_it_is(suite: str) -> None:
    assert suite in _render(result(suite=suite))


@given(
    st.one_of(*map(values_of, RESULT_KINDS)).filter(lambda candidate: candidate.replies or candidate.figures),
    st.sampled_from([40, 80, 120]),
    st.booleans(),
)
def test_any_result_can_be_shown(any_result: Result, width: int, colour: bool) -> None:
    if any(not getattr(reply, "step_seconds", True) for reply in any_result.replies):
        return
    assert _render(any_result, width=width, colour=colour)
    assert isinstance(explain([any_result]), list)


# Sentences below the table


def test_changes_within_the_limit_are_told_for_some_and_counted_for_the_rest() -> None:
    noted = MetricVerdict(metric="peak_allocated_bytes", status="pass", note="changed by +4 bytes, within the limit")
    lines = explain([result(verdict=_verdict("pass", noted))] * 9)
    assert lines[0] == f"{CASE}: peak memory changed by +4 bytes, within the limit"
    assert (len(lines), lines[-1]) == (7, "(and 3 more; the JSON report has all)")


def test_what_passed_in_full_needs_no_sentence() -> None:
    assert explain([result(), result(verdict=None), result(verdict=_verdict("regressed"))]) == []


@pytest.mark.parametrize(
    ("status", "what"), [("new", "without a baseline"), ("not-comparable", "not comparable with the baseline")]
)
def test_cases_without_comparison_are_counted_with_an_example(status: str, what: str) -> None:
    results = [result(verdict=_verdict(status, sentence=f"case {number}")) for number in range(3)]
    assert explain(results[:1]) == [f"1 case {what}: case 0"]
    assert explain(results) == [f"3 cases {what}: case 0 (and 2 more)"]


def test_what_was_not_counted_is_told_once_a_note_and_case() -> None:
    results = [result(case=CASE.replace(model=f"case {number}"), replies=(_NOTED, _NOTED)) for number in (0, 0, 1)]
    assert explain(results) == ["2 cases: processes are not counted: case 0-lora-bf16 (and 1 more)"]


_NOTED = measurement(notes=("processes are not counted",))


def test_metrics_that_were_not_compared_are_counted_by_reason() -> None:
    time = MetricVerdict(metric="step_seconds", status="not-comparable", note="too few runs")
    memory = MetricVerdict(metric="peak_allocated_bytes", status="not-comparable", note="no peak")
    results = [result(verdict=_verdict("pass", time)), result(verdict=_verdict("pass", time, memory))]
    assert explain(results) == [
        "2 cases with step time not compared: too few runs",
        "1 case with peak memory not compared: no peak",
    ]


def test_a_case_not_comparable_at_all_is_told_once() -> None:
    time = MetricVerdict(metric="step_seconds", status="not-comparable", note="too few runs")
    assert len(explain([result(verdict=_verdict("not-comparable", time))])) == 1


# The progress line


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Event(phase="start"), "starting"),
        (Event(phase="count"), "counting allocations"),
        (Event(phase="measure"), "step 0/10"),
        (Event(phase="measure", step=3), "step 3/10"),
        (Event(phase="measure", step=3, step_seconds=0.42, allocated_bytes=GiB), "step 3/10  420 ms/step  1.00 GiB"),
        (Event(phase="warmup", step_seconds=2.0), "warming up  2.00 s/step"),
        (Event(phase="measure", step=1, allocated_bytes=0), "step 1/10  0 B"),
    ],
)
def test_live_line_tells_case_phase_and_figures(event: Event, text: str) -> None:
    assert describe(CASE, event) == f"llama-3.1-8b-lora-bf16  {text}"


def test_live_line_tells_what_is_no_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLine(80, nullcontext, "emulated").show(CASE, Event(phase="measure", step=3, allocated_bytes=GiB))
    assert "llama-3.1-8b-lora-bf16  emulated  step 3/10  1.00 GiB" in capsys.readouterr().out


@given(values_of(Event))
def test_any_event_can_be_described(event: Event) -> None:
    assert describe(CASE, event).startswith(str(CASE))


def test_live_line_stays_within_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLine(20, nullcontext).show(CASE.replace(model="m" * 99), Event(phase="build"))
    assert re.sub(r"\x1b(\[[0-9]*[A-Za-z]|[A-Z78])|\r", "", capsys.readouterr().out) == "m" * 19


def test_live_line_comes_back_to_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    progress_line = ProgressLine(80, nullcontext)
    progress_line.show(CASE, Event(phase="build"))
    progress_line.clear()
    drawn = capsys.readouterr().out
    assert drawn.count("\x1b7") == drawn.count("\x1b8") == 2
    assert "\n" not in drawn


def test_nothing_drawn_needs_no_clearing(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLine(80, nullcontext).clear()
    assert capsys.readouterr().out == ""


def test_live_line_is_not_drawn_for_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    progress_line = ProgressLine(80, nullcontext)
    for _ in range(100):
        progress_line.show(CASE, Event(phase="build"))
    assert 0 < capsys.readouterr().out.count("building") < 100


def test_the_change_of_memory_is_that_of_the_phase_that_regressed() -> None:
    metrics = (
        MetricVerdict(metric="peak_allocated_bytes", status="pass", value=100_000_004, baseline=100_000_000),
        MetricVerdict(metric="forward_peak_bytes", status="regressed", value=115, baseline=100),
        MetricVerdict(metric="backward_peak_bytes", status="regressed", value=107, baseline=100),
    )
    verdict = Verdict(status="regressed", sentence="x", metrics=metrics)
    assert "+15.0 %" in _render(result(verdict=verdict))
    assert "+0.0 %" in _render(result(verdict=Verdict(status="pass", sentence="x", metrics=metrics[:1])))
