"""Tests what people read on the terminal: the table, the sentences below it, the progress line."""

import re
from contextlib import nullcontext

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_examples import (
    CASE,
    RESULT_KINDS,
    crashed,
    emulated_run,
    measurement,
    out_of_memory,
    report,
    result,
    summary,
    timed_out,
    values_of,
)

from pytest_gputrain.records import Case, Counts, Event, MetricVerdict, Report, StepCounts, Verdict
from pytest_gputrain.records.verdict import LimitVerdict
from pytest_gputrain.report import json_report, uncompared
from pytest_gputrain.report.explanations import advice, explain
from pytest_gputrain.report.progress_line import ProgressLine, describe
from pytest_gputrain.report.terminal import render
from pytest_gputrain.utils.units import GiB

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def _render(*results, width=160, colour=False):
    return render(results, width=width, colour=colour)


def _verdict(status, *metrics, sentence="a sentence"):
    return Verdict(status=status, sentence=sentence, metrics=metrics)


def _custom(model, **fields):
    case = Case(model=model, method="custom", precision="fp32", code="test_a.py::f")
    return result(case, **fields)


COUNTS = Counts(steps=(0, 1), kinds=(StepCounts(waits=1, launches=1800, library_calls=41), StepCounts(h2d_bytes=4096)))
CHANGED = (
    MetricVerdict(metric="step_seconds", status="regressed", value=1.072, baseline=1.0, limit=1.03),
    MetricVerdict(metric="peak_allocated_bytes", status="pass", value=99, baseline=100, limit=102),
)
PHASES = (
    MetricVerdict(metric="peak_allocated_bytes", status="pass", value=100_000_004, baseline=100_000_000),
    MetricVerdict(metric="forward_peak_bytes", status="regressed", value=115, baseline=100),
    MetricVerdict(metric="backward_peak_bytes", status="regressed", value=107, baseline=100),
)


def test_tables_have_the_figures_of_the_published_ones(snapshot):
    peak = int(35.6 * GiB)
    peaks = tuple(measurement(peak_allocated_bytes=gib * GiB) for gib in (20, 30, 25))
    failed = {"summary": None, "verdict": _verdict("failed")}
    not_compared = MetricVerdict(metric="step_seconds", status="not-comparable", value=2.0, baseline=1.0)
    tables = {
        "figures": _render(result(replies=(measurement(model_bytes=15 * GiB),), summary=summary(0.42, peak))),
        "methods and named knobs": _render(*(result(CASE.replace(method=how, named=("batch_size",))) for how in METHODS)),
        "own code": _render(_custom("my_step")),
        "no figures": _render(
            result(replies=(out_of_memory(),), **failed),
            result(replies=(crashed(),), **failed),
            result(replies=(msgspec.structs.replace(crashed(), refused=True),), **failed),
            result(replies=(timed_out(),), **failed),
        ),
        "the peak that was judged": _render(result(replies=peaks, summary=summary(1.0, peak=25 * GiB))),
        "one run of two has figures": _render(result(replies=(out_of_memory(), peaks[0]), summary=summary(1.0, 20 * GiB))),
        "changes": _render(result(verdict=_verdict("regressed", *CHANGED))),
        "the change of the phase that regressed": _render(result(verdict=_verdict("regressed", *PHASES))),
        "no change in the peak": _render(result(verdict=_verdict("pass", *PHASES[:1]))),
        "nothing compared": _render(result(verdict=_verdict("pass", not_compared))),
        "measured": _render(result(verdict=None)),
        "emulated": _render(result(verdict=None, reply=emulated_run(counts=COUNTS))),
        "judged by one test, measured by another": _render(
            result(verdict=None), result(), result(CASE.replace(method="full"), verdict=None)
        ),
        "two suites": _render(result(), result(suite="vision"), result()),
    }
    titled = {
        "tiny scale": result(scale="tiny", device="cpu", platform="cpu"),
        "an unknown GPU": result(platform="unknown", device="nvidia-z9000"),
        "eight GPUs": result(CASE.replace(gpus=8, parallel="fsdp")),
        "CPU at full scale": result(platform="cpu", device="cpu"),
    }
    tables |= {what: _render(one).splitlines()[0] for what, one in titled.items()}
    assert tables == snapshot


METHODS = ("full", "lora", "qlora")


@pytest.mark.parametrize("width", [80, 120])
def test_figures_and_verdicts_fit_the_terminal(width, snapshot):
    case = CASE.replace(activation_checkpointing=True, named=("activation_checkpointing",))
    scaling = MetricVerdict(metric="scaling_efficiency", status="pass", value=0.913, baseline=0.9)
    efficient = msgspec.structs.replace(summary(1.02), scaling_efficiency=0.913)
    parallel = case.replace(parallel="ddp", gpus=8, named=("gpus", "activation_checkpointing"))
    knobs = {"offload_optimizer": True, "offload_param": True, "overlap_comm": False, "stage3_max_live_parameters": 10**9}
    many = CASE.replace(parallel="zero3", named=tuple(knobs), **knobs)
    own = CASE.replace(model="fine_tuning_of_a_language_model", method="custom", code="test_a.py::f", named=("batch_size",))
    tables = [
        _render(result(case, verdict=_verdict("regressed", *CHANGED)), width=width),
        _render(result(many, verdict=_verdict("pass", CHANGED[1])), width=width),
        _render(result(own, verdict=_verdict("new")), _custom("short"), width=width),
        _render(result(own, verdict=_verdict("pass", *CHANGED)), _custom("short"), width=width),
        _render(
            result(parallel, summary=efficient, verdict=_verdict("not-comparable", *CHANGED, scaling)), result(), width=width
        ),
    ]
    assert max(map(len, "\n".join(tables).splitlines())) <= width
    if width == 80:
        assert tables == snapshot
    results = [_custom("Z" * 100), result(suite="s" * 200)]
    coloured = _render(*results, width=width, colour=True)
    assert ESCAPE.sub("", coloured) == _render(*results, width=width) != coloured, "colour changes no word"
    assert max(map(len, ESCAPE.sub("", coloured).splitlines())) <= width
    assert coloured.count("Z") == 100, "a word longer than its line is broken"


def test_the_advice_of_a_first_run_is_a_line_of_the_explanation():
    new = [_custom(name, verdict=_verdict("new", sentence=f"{name} was never recorded")) for name in ("a", "b")]
    assert advice(new) == explain(new)[0] == "2 cases without a baseline: a was never recorded (and 1 more)"
    assert advice([*new, result()]) == ""
    assert advice([result(verdict=None)]) == ""


def test_advice_says_how_to_accept_figures_that_are_worse():
    worse = result(verdict=_verdict("regressed"))
    accept = "regressed; if that is expected, record"
    assert advice([result(), worse]) == f"1 case {accept} it with --gpu-baseline-update"
    assert advice([worse, worse]) == f"2 cases {accept} them with --gpu-baseline-update"


def test_where_all_was_compared_there_is_no_line_and_time_is_not_compared_with_an_emulated_run():
    metrics = (MetricVerdict(metric="step_seconds", status="pass", value=1.0, baseline=1.0),)
    assert uncompared.line([result(verdict=Verdict(status="pass", sentence="", metrics=metrics)), result()]) == ""
    held = Verdict(status="new", sentence="", held_to="emulated")
    assert uncompared.line([result(CASE, verdict=held)]) == "not compared: step time of 1 case"


@pytest.mark.parametrize("name", ["[/]", "[bold]x[/bold]", ":smile:", "\\[red]"])
def test_markup_in_a_name_or_title_is_shown_as_it_is(name):
    assert name in _render(_custom(name))
    assert name in _render(result(suite=name))


@given(
    st.one_of(*map(values_of, RESULT_KINDS)).filter(lambda candidate: candidate.replies or candidate.figures),
    st.sampled_from([40, 80, 120]),
    st.booleans(),
)
def test_any_result_can_be_shown(any_result, width, colour):
    if any(not getattr(reply, "step_seconds", True) for reply in any_result.replies):
        return
    assert _render(any_result, width=width, colour=colour)
    assert isinstance(explain([any_result]), list)


def test_sentences_below_the_table_are_few_and_counted(snapshot):
    noted = MetricVerdict(metric="peak_allocated_bytes", status="pass", note="changed by +4 bytes, within the limit")
    time = MetricVerdict(metric="step_seconds", status="not-comparable", note="too few runs")
    memory = MetricVerdict(metric="peak_allocated_bytes", status="not-comparable", note="no peak")
    new, uncomparable = (
        [result(verdict=_verdict(status, sentence=f"case {number}")) for number in range(3)]
        for status in ("new", "not-comparable")
    )
    uncounted = measurement(notes=("processes are not counted",))
    explained = {
        "passed in full": explain([result(), result(verdict=None), result(verdict=_verdict("regressed"))]),
        "changes within the limit": explain([result(verdict=_verdict("pass", noted))] * 9),
        "one new": explain(new[:1]),
        "three new": explain(new),
        "one not comparable": explain(uncomparable[:1]),
        "three not comparable": explain(uncomparable),
        "not comparable at all": explain([result(verdict=_verdict("not-comparable", time))]),
        "metrics not compared": explain(
            [result(verdict=_verdict("pass", time)), result(verdict=_verdict("pass", time, memory))]
        ),
        "not counted, once a note and case": explain(
            [result(CASE.replace(model=f"case {number}"), replies=(uncounted, uncounted)) for number in (0, 0, 1)]
        ),
    }
    assert explained == snapshot


def _results(*statuses):
    """One for each, of cases that a number tells apart."""
    made = []
    for number, status in enumerate(statuses):
        case = CASE.replace(batch_size=number + 1, named=("batch_size",))
        verdict = Verdict(status=status, sentence=f"{case} is {status}")
        made.append(result(case=case, key=str(case), verdict=verdict))
    return made


@pytest.mark.parametrize("count", [0, 1, 3])
def test_results_written_one_by_one_make_the_same_document(tmp_path, count):
    results = _results(*["pass"] * count)
    whole = report(*results, notes=('"results": []\n}', "[]"))  # which looks like the end of a document
    expected = msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"
    json_report.write(whole, tmp_path / "whole.json")
    json_report.write(report(notes=whole.notes), tmp_path / "parts.json", iter(results))
    json_report.write(report(*results[:1], notes=whole.notes), tmp_path / "both.json", iter(results[1:]))
    for name in ("whole", "parts", "both"):
        assert (tmp_path / f"{name}.json").read_bytes() == expected
    assert msgspec.json.decode(expected, type=Report) == whole


def _batches(results, most):
    """Of the rows of the table, and its last line."""
    lines = render(results, width=200, colour=False, most=most).splitlines()
    return [int(line.partition("batch_size=")[2].split()[0]) for line in lines if "batch_size=" in line], lines[-1]


def test_of_too_many_cases_the_table_has_those_that_want_attention():
    results = _results("pass", "pass", "regressed", "recorded", "failed", "new", "pass")
    assert _batches(results, None)[0] == _batches(results, 7)[0] == [1, 2, 3, 4, 5, 6, 7]
    assert _batches(results, 4) == ([3, 4, 5, 6], "(and 3 more cases; the JSON report has all)")


def test_cases_metrics_limits_tests_and_baselines_are_counted():
    lacking = MetricVerdict(metric="flops_per_step", status="not-comparable")
    limit = LimitVerdict(metric="step_seconds", status="not-judged", value=1.0, limit=2.0, stated="gpu_limit on test_it")
    results = [
        result(verdict=Verdict(status="new", sentence="")),
        result(verdict=Verdict(status="new", sentence="", metrics=(lacking,))),
        result(verdict=Verdict(status="recorded", sentence="")),
        result(verdict=Verdict(status="pass", sentence="", metrics=(lacking,), limits=(limit,))),
        result(verdict=Verdict(status="pass", sentence=""), replies=(measurement(uncounted_memory=True),)),
    ]
    assert uncompared.line(results, skipped=1, unclaimed=2) == (
        "not compared: 2 cases without a baseline, 1 case recorded instead, FLOPs of 1 case, step time of 1 case, "
        "uncounted memory of 1 case, "
        "1 test skipped, 2 baselines that no test asked for"
    )


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
def test_live_line_tells_case_phase_and_figures(event, text):
    assert describe(CASE, event) == f"llama-3.1-8b-lora-bf16  {text}"


def test_live_line_tells_what_is_no_measurement_and_stays_within_the_terminal(capsys):
    ProgressLine(80, nullcontext, "emulated").show(CASE, Event(phase="measure", step=3, allocated_bytes=GiB))
    assert "llama-3.1-8b-lora-bf16  emulated  step 3/10  1.00 GiB" in capsys.readouterr().out
    ProgressLine(20, nullcontext).show(CASE.replace(model="m" * 99), Event(phase="build"))
    assert re.sub(r"\x1b(\[[0-9]*[A-Za-z]|[A-Z78])|\r", "", capsys.readouterr().out) == "m" * 19


def test_live_line_comes_back_to_where_it_was(capsys):
    progress_line = ProgressLine(80, nullcontext)
    progress_line.show(CASE, Event(phase="build"))
    progress_line.clear()
    ProgressLine(80, nullcontext).clear()  # of which nothing was drawn
    drawn = capsys.readouterr().out
    assert drawn.count("\x1b7") == drawn.count("\x1b8") == 2
    assert "\n" not in drawn
