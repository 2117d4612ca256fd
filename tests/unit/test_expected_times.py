"""Expected times of steps: how tables and sentences give them, and which steps they tell apart. Pure."""

import msgspec
import pytest
from test_fit import LORA, MEMORY, cell, emulated, report
from unit_examples import CASE, emulated_run, result

from pytest_gputrain import GiB
from pytest_gputrain.cli import main
from pytest_gputrain.records import ExpectedTime
from pytest_gputrain.records.fit import FitGpu
from pytest_gputrain.report import expected, fit
from pytest_gputrain.report.html.cases import gathered
from pytest_gputrain.report.terminal import explain, render
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
        "rough",
        "C has no expected time",
    ]
    assert " of B only published rates are known" in said[1]
    assert list(expected.notes([("A", KNOWN)])) == said[:1]
    assert list(expected.notes([("C", NONE)])) == said[2:]


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
    rows = times(timed(2.0, "a"), timed(3.0, "b", batch=8), timed(8.0, "a"), sort="speed")
    assert [(row[2], row[1]) for row in rows] == [("B", "8"), ("A", "4"), ("A", "4")]
    assert [row[-1] for row in rows] == ["", "cannot tell", "slower"]


def test_two_cases_of_one_gpu_are_told_apart_by_their_ratio():
    """What is off of one is off of the other, too."""
    for seconds, told in ((2.1, "cannot tell"), (2.3, "slower")):
        assert times(timed(2.0), timed(seconds), sort="speed")[1][-1] == told


def test_images_have_samples_a_second():
    of_images = msgspec.structs.replace(timed(2.0), case=LORA.replace(sequence_length=None, resolution="512x512"))
    table = fit.tables(report(of_images, gpus=GPUS))[-1]
    assert table.headers[-1] == "samples/s"
    assert table.rows[0][-1] == "2.00"


def test_the_command_knows_no_other_order(capsys):
    with pytest.raises(SystemExit):
        main.main(["predict", "llama-3.1-8b", "--gpu=h100", "--sort=price"])
    assert "argument --sort: invalid choice: 'price'" in capsys.readouterr().err


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
