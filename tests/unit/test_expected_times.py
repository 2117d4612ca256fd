"""Expected times of steps: how tables and sentences give them, and which steps they tell apart. Pure."""

import msgspec
import pytest
from test_fit import LORA, MEMORY, cell, emulated, report
from unit_examples import CASE, emulated_run, result

from pytest_gputrain import GiB
from pytest_gputrain.cli import main
from pytest_gputrain.gate.emulation import judge
from pytest_gputrain.gate.expected_times import describe_slowdown
from pytest_gputrain.hardware.rates import rates_of
from pytest_gputrain.records import Counts, ExpectedTime, OperatorWork, Recorded, StepCounts
from pytest_gputrain.records.fit import FitGpu
from pytest_gputrain.report import expected, fit
from pytest_gputrain.report.explanations import explain
from pytest_gputrain.report.html.cases import gathered
from pytest_gputrain.report.terminal import render
from pytest_gputrain.utils.units import format_interval

KNOWN = ExpectedTime(seconds=2.2, low=1.87, high=2.75, parts={"matrix products": 1.42, "attention": 0.58}, host_seconds=0.4)
ROUGH = msgspec.structs.replace(KNOWN, low=1.54, high=4.4, rough=True)
HOST_BOUND = ExpectedTime(seconds=0.12, low=0.1, high=0.15, parts={"pointwise": 0.055}, host_seconds=0.12)
NONE = ExpectedTime(seconds=None, unknown="nobody published what it sustains")
GPUS = tuple(FitGpu(marker=marker, title=title, memory_bytes=MEMORY) for marker, title in (("a", "A"), ("b", "B")))


def timed(seconds, gpu="a", *, batch=4, width=(0.85, 1.25), fit="fits", **fields):
    one = ExpectedTime(
        seconds=seconds, low=width[0] * seconds, high=width[1] * seconds, parts={"attention": seconds}, **fields
    )
    case = LORA.replace(batch_size=batch)
    return cell(fit, gpu=gpu, case=case, figures=emulated(30 * GiB, expected=one))


def times(*cells, **fields):
    """The rows of the table of expected times; none if there is no such table."""
    tables = fit.tables(report(*cells, gpus=GPUS, **fields))
    return next((table.rows for table in tables if table.title == "Expected time of a step"), ())


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (KNOWN, "2.20 s (1.87 to 2.75), 71 % matrix products"),
        (ROUGH, "2.20 s (1.54 to 4.40), rough, 71 % matrix products"),
        (HOST_BOUND, "120 ms (100 to 150), host-bound: GPU 55.0 ms, host 120 ms"),
        (NONE, "not known: nobody published what it sustains"),
    ],
)
def test_an_estimate_has_its_interval_and_what_dominates(one, text):
    assert expected.describe(one) == text


def test_the_ends_of_an_interval_are_in_the_unit_of_its_middle():
    assert format_interval(0.95, 0.807, 1.188) == "950 ms (807 to 1,188)"


def test_what_the_estimates_are_is_said_once_and_with_the_gpus_that_they_are_rough_for():
    said = list(expected.notes([("A", KNOWN), ("B", ROUGH), ("B", ROUGH), ("C", NONE), ("C", NONE)]))
    assert [note.partition(":")[0] for note in said] == [
        "expected times are estimates, and nothing was measured",
        "17 of 19 steps of an H200 are within such intervals, and 14 of 19 where their family of models was left out",
        "rough",
        "C has no expected time",
    ]
    assert " of B only published rates are known" in said[2]
    assert list(expected.notes([("A", KNOWN)])) == said[:2]
    assert list(expected.notes([("B", ROUGH)])) == [said[0], said[2]]
    assert list(expected.notes([("C", NONE)])) == said[3:]


def test_operators_that_estimates_leave_out_are_named_once_for_each_gpu():
    lacking = [msgspec.structs.replace(KNOWN, not_modelled=dict.fromkeys(names, 0.01)) for names in ("xy", "yz")]
    said = list(expected.notes([("A", lacking[0]), ("A", lacking[1]), ("B", lacking[1]), ("C", KNOWN)]))
    assert [note.partition(" leaves out ")[::2] for note in said[2:]] == [
        ("the expected time of A", "what is not known, the time of x, y, z"),
        ("the expected time of B", "what is not known, the time of y, z"),
    ]


def test_only_what_may_fit_has_a_speed_and_it_counts_all_tokens():
    rows = times(timed(2.0), timed(2.0, fit="within-error"), timed(2.0, fit="does-not-fit"), cell("fits"))
    assert rows == (("lora", "4", "A", "2.00 s (1.70 to 2.50)", "100 % attention", "4,096"),) * 2
    assert times(cell("fits")) == ()


def test_gpus_whose_intervals_overlap_cannot_be_told_apart():
    """A takes 1.7 to 2.5 seconds."""
    for seconds, told in ((2.93, "cannot tell"), (2.95, "slower")):
        first, second = times(timed(seconds, "b"), timed(2.0, "a"), sort="speed")
        assert (first[2], first[-1]) == ("A", "")
        assert (second[2], second[-1]) == ("B", told)


def test_speed_is_by_token_and_not_by_step():
    """Twice the batch in 1.5 times the seconds is faster, and the interval goes with the tokens."""
    rows = times(timed(2.0, "a"), timed(3.0, "b", batch=8), timed(2.2, "a"), timed(8.0, "a"), sort="speed")
    assert [(row[2], row[1]) for row in rows] == [("B", "8"), ("A", "4"), ("A", "4"), ("A", "4")]
    assert [row[-1] for row in rows] == ["", "cannot tell", "cannot tell", "slower"]


def test_two_cases_of_one_gpu_are_told_apart_by_their_ratio():
    """What is off of one is off of the other, too."""
    for seconds, told in ((2.1, "cannot tell"), (2.3, "slower")):
        assert times(timed(2.0), timed(seconds), sort="speed")[1][-1] == told


def test_images_have_samples_a_second():
    of_images = msgspec.structs.replace(timed(2.0), case=LORA.replace(sequence_length=None, resolution="512x512"))
    table = fit.tables(report(of_images, gpus=GPUS))[-1]
    assert table.headers[-1] == "samples/s"
    assert table.rows[0][-1] == "2.00"


def test_the_command_knows_no_other_order_and_one_model(capsys):
    with pytest.raises(SystemExit):
        main.main(["predict", "llama-3.1-8b", "--gpu=h100", "--sort=price"])
    assert "argument --sort: invalid choice: 'price'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["predict", "llama-3.1-8b", "qwen3-8b", "--gpu=h100"])
    assert "gputrain predict takes one model: run it again for qwen3-8b" in capsys.readouterr().err


@pytest.mark.parametrize(("one", "shown"), [(ROUGH, True), (NONE, False), (None, False)])
def test_emulated_cases_show_what_they_are_expected_to_take_where_that_is_known(one, shown):
    of_case = result(reply=emulated_run(expected=one))
    table, said = render([of_case], width=200, colour=False), explain([of_case])
    assert ("2.20 s (1.54 to 4.40), rough" in table) is ("Expected" in table) is shown
    told = f"{CASE} is expected to take 2.20 s (1.54 to 4.40), rough, 71 % matrix products"
    assert (told in said) is shown
    assert ("rough: of NVIDIA H100 80GB HBM3 only published rates" in " ".join(said)) is shown
    (row,) = gathered([of_case]).rows
    assert ("2.20 s (1.54 to 4.40), rough, 71 % matrix products" in [cell.text for cell in row.cells]) is shown


H200 = rates_of("h200")
MOVED = int(0.02 * H200.bandwidth * H200.kinds["pointwise"])
"""The bytes that pointwise operators move in 20 ms."""
TUNED = LORA.replace(precision="bf16")


def running(*, expected=None, counts=None, **moved):
    """A run whose step is expected to take one second, with operators that move so many times 20 ms."""
    work = {name: OperatorWork(calls=1000, flops=0, bytes=int(share * MOVED)) for name, share in moved.items()}
    one = ExpectedTime(seconds=1.0, low=0.85, high=1.25, parts={"matrix products": 0.9}, host_seconds=0.1)
    return emulated(30 * GiB, operators=work, expected=expected or one, counts=counts)


def slowdown(before, now, *grown, case=TUNED, rates=H200):
    return describe_slowdown(case, grown or ("bytes_per_step",), before, now, rates)


def test_what_the_growth_of_each_kind_of_work_costs_is_told_where_that_is_known():
    many, few = (
        msgspec.structs.replace(running(), operators={"copy_": OperatorWork(calls=calls, flops=0, bytes=20 * MOVED)})
        for calls in (13_000, 1000)  # of 2.5 microseconds, where a kernel moves too much for the cache
    )
    flops = int(0.1 / (1 / (67e12 * H200.kinds["products_fp32"]) - 1 / (989.4e12 * H200.kinds["products_16bit"])))
    tf32, fp32 = (
        running(mm=1, counts=Counts(steps=(0,), kinds=(StepCounts(slow_flops={"fp32": number}),))) for number in (0, flops)
    )
    one, five, both = running(copy_=1), running(copy_=5), ("bytes_per_step", "flops_per_step")
    told = {
        "a step is expected to take about 9 % longer (4 to 15 %)": [slowdown(one, five)],  # 80 of the 920 ms before
        "a step is expected to take less than 1 % longer": [slowdown(one, running(copy_=1.2))],
        "a step is expected to take about 3 % longer (2 to 5 %)": [slowdown(few, many, "work", "launches")],
        "a step is expected to take about 11 % longer (6 to 19 %)": [slowdown(tf32, fp32, "fp32_flops")],
        "": [
            slowdown(one, five, "waits"),  # whose cost is not that of an operator
            slowdown(one, five, "bytes_per_step", "d2h"),
            slowdown(one, running(copy_=1, _cudnn_rnn=1)),  # which computes, and nobody knows how much
            slowdown(one, five, rates=None),
            slowdown(one, five, *both, case=TUNED.replace(precision="fp32")),  # in TF32 or not
            slowdown(running(), five),
            slowdown(one, running(copy_=5, expected=HOST_BOUND)),
            slowdown(one, running(copy_=5, expected=NONE)),
            slowdown(running(copy_=2), running(copy_=1, mul=2)),  # by less than its error
        ],
    }
    assert {sentence: [sentence] * len(said) for sentence, said in told.items()} == told


def test_a_failing_case_says_what_its_growth_costs():
    before, now = (
        msgspec.structs.replace(
            running(copy_=share),
            bytes_per_step=int(share * MOVED),
            flops_per_step=1,
            peak_reserved_bytes=int((31 + share) * GiB),  # which a new tensor also takes, and which costs no time
        )
        for share in (1, 5)
    )
    recorded = Recorded(case=TUNED, scale="full", figures=(before.as_stored(),))
    verdict = judge(TUNED, now, recorded, "h200", rates=H200)
    assert verdict.status == "regressed"
    assert "; a step is expected to take about 9 % longer (4 to 15 %)" in verdict.sentence
    assert "expected" not in judge(TUNED, now, recorded, "h200").sentence
