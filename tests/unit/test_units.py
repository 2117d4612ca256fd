"""Text for people from numbers, and numbers from what people type."""

import math
import re
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_gputrain.records.tolerance import (
    CountTolerance,
    MemoryTolerance,
    read_count,
    read_count_tolerance,
    read_memory_tolerance,
)
from pytest_gputrain.utils.units import (
    GiB,
    KiB,
    MiB,
    format_bytes,
    format_percent,
    format_seconds,
    parse_bytes,
    parse_ratio,
    parse_seconds,
    read_bytes,
    read_ratio,
    read_seconds,
)

NUMBERS = st.from_regex(r"[0-9]{0,400}\.?[0-9]{0,20}(e[0-9]{1,4})?", fullmatch=True, alphabet=st.characters(codec="ascii"))
UNITS = st.sampled_from(["", "%", " %", "B", " GiB", "mb", "ib", "s", "min", "h", " h "])
TYPED = st.text() | st.builds(lambda number, unit: number + unit, NUMBERS, UNITS)


SHOWN = [
    (
        format_bytes,
        {
            0: "0 B",
            1023: "1023 B",
            KiB: "1.00 KiB",
            MiB - 1: "1,024 KiB",
            MiB: "1.00 MiB",
            9.994 * MiB: "9.99 MiB",
            9.996 * MiB: "10.0 MiB",
            35.6 * GiB: "35.6 GiB",
            141 * GiB: "141 GiB",
            4096 * GiB: "4,096 GiB",
            -2 * MiB: "-2.00 MiB",
        },
    ),
    (
        format_seconds,
        {
            4.7: "4.70 s",
            12.34: "12.3 s",
            1800: "1,800 s",
            1: "1.00 s",
            0.25: "250 ms",
            0.001: "1.00 ms",
            0.00025: "250 µs",
            0: "0.00 µs",
        },
    ),
    (format_percent, {0.051: "+5.1 %", -0.051: "-5.1 %", 0.0004: "+0.04 %", 2.5: "+250.0 %"}),
    (lambda ratio: format_percent(ratio, signed=False), {0.03: "3.0 %", 0.0: "0.0 %"}),
]


@pytest.mark.parametrize(("show", "value", "text"), [(show, *row) for show, table in SHOWN for row in table.items()])
def test_numbers_are_shown_in_the_largest_unit_of_at_least_one(show, value, text):
    assert show(value) == text


@given(st.floats(1e-12, 10) | st.floats(-1, -1e-12))
@example(1e-9)
def test_a_change_never_reads_as_none(ratio):
    assert re.search(r"[1-9]", format_percent(ratio)), format_percent(ratio)


READ = [
    (
        parse_bytes,
        "is not an amount of memory",
        {"512MiB": 512 * MiB, "2 GiB": 2 * GiB, " 1.5 kib ": 1536, "1e9 B": 10**9, "3MB": 3 * 10**6, "0 B": 0},
        ["", "5", "-5 MiB", "5 TiB", "5 ib", "1.2.3 MiB", ". B", "1e999 B", "nan B", "5 MiB x"],
    ),
    (
        parse_ratio,
        "is not a tolerance",
        {"3%": 0.03, "3 %": 0.03, " 0.03 ": 0.03, ".5": 0.5, "0": 0.0, "150%": 1.5},
        ["", "3", "1", "-3%", "%", "nan", "inf%", "3%%", "3‰", "1e-2", "0,03"],
    ),
    (
        parse_seconds,
        "is not a time",
        {"90": 90, "90s": 90, "15min": 900, "2h": 7200, "0.5 h": 1800, " 1.5 ": 1.5, "350 ms": 0.35},
        ["", "0", "-1", "0s", "1d", "1 m", "1h30", "nan", "inf", "1e3"],
    ),
]


@pytest.mark.parametrize(("parse", "text", "value"), [(parse, *row) for parse, _, table, _ in READ for row in table.items()])
def test_numbers_are_read_with_their_unit(parse, text, value):
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(("parse", "sentence", "text"), [(row[0], row[1], text) for row in READ for text in row[3]])
def test_text_without_a_clear_meaning_is_refused(parse, sentence, text):
    with pytest.raises(ValueError, match=sentence):
        parse(text)


@pytest.mark.parametrize(("parse", "kind"), [(parse_bytes, int), (parse_ratio, float), (parse_seconds, float)])
@given(text=TYPED)
@example(text="9" * 400 + "%")
@example(text="9" * 400 + " GiB")
@example(text="9" * 400 + "h")
def test_any_text_is_a_sane_number_or_refused(parse, kind, text):
    try:
        value = parse(text)
    except ValueError:
        return
    assert isinstance(value, kind)
    assert math.isfinite(value)
    assert value > 0 if parse is parse_seconds else value >= 0


NO_NUMBERS = [True, False, None, [1], b"1 GiB", -1, -0.5, math.nan, math.inf, -math.inf, 10**400, 2**63]


@pytest.mark.parametrize(
    ("read", "value", "meant"),
    [
        (read_bytes, 24 * GiB, 24 * GiB),
        (read_bytes, 1.5 * GiB, 3 * GiB // 2),
        (read_bytes, 0.1 * GiB, 107_374_182),
        (read_bytes, 0, 0),
        (read_bytes, "24 GiB", 24 * GiB),
        (read_ratio, 0.5, 0.5),
        (read_ratio, 0, 0.0),
        (read_ratio, "150 %", 1.5),
        (read_seconds, 0.5, 0.5),
        (read_seconds, 90, 90.0),
        (read_seconds, "90", 90.0),
        (read_memory_tolerance, 0.5, MemoryTolerance(ratio=0.5)),
        (read_memory_tolerance, 0.0, MemoryTolerance()),
        (read_memory_tolerance, 1, MemoryTolerance(bytes=1)),
        (read_memory_tolerance, 512 * MiB, MemoryTolerance(bytes=512 * MiB)),
        (read_memory_tolerance, "3 % + 1 GiB", MemoryTolerance(ratio=0.03, bytes=GiB)),
        (partial(read_count_tolerance, "waits"), 2, CountTolerance(more=2)),
        (partial(read_count_tolerance, "waits"), "2", CountTolerance(more=2)),
        (partial(read_count_tolerance, "waits"), 0.05, CountTolerance(ratio=0.05)),
        (partial(read_count_tolerance, "launches"), "5 % + 2", CountTolerance(ratio=0.05, more=2)),
        (partial(read_count_tolerance, "h2d_bytes"), "5 % + 1 MiB", CountTolerance(ratio=0.05, more=MiB)),
        (partial(read_count, "launches"), 2000, 2000),
        (partial(read_count, "fp32_flops"), 1e12, 10**12),
        (partial(read_count, "d2h_bytes"), "1 MiB", MiB),
    ],
)
def test_a_marker_has_numbers_or_text(read, value, meant):
    assert (read(value), type(read(value))) == (meant, type(meant))


@pytest.mark.parametrize(
    ("read", "values", "sentence"),
    [
        (read_bytes, [*NO_NUMBERS, 0.5, "1e30 B"], "is not an amount of memory; write it as 24 * GiB, which is a number"),
        (read_ratio, [*NO_NUMBERS, 1, 1.5, 3], "is not a tolerance; write it as 0.05, which is a ratio below 1, or '5 %'"),
        (read_seconds, [*NO_NUMBERS, 0, 0.0], "is not a time; write it as 0.5, which is a number of seconds, or '500 ms'"),
        (partial(read_count, "waits"), [*NO_NUMBERS, 1.5, "2000"], "is not a count; write it as 0 or 2000"),
        (
            partial(read_count_tolerance, "waits"),
            [*NO_NUMBERS, 1.5, "1 MiB", "-1", "5 % + 5 %"],
            "is not a tolerance; write it as ",
        ),
        (read_memory_tolerance, [*NO_NUMBERS, 1.5, 1.5 * GiB], "is not a tolerance; write it as 0.03 (a float is a ratio"),
    ],
)
def test_numbers_without_a_clear_meaning_are_refused(read, values, sentence):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{value!r} {sentence}")) as caught:
            read(value)
        assert len(str(caught.value).splitlines()) == 1
