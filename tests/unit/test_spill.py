"""Records that are kept out of memory."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.utils import spill
from pytest_gputrain.utils.spill import SelectedRecords, SpilledDict, SpilledList


@given(
    st.lists(st.lists(st.floats(allow_nan=False))),
    st.lists(st.tuples(st.integers(0, 20), st.lists(st.floats(allow_nan=False)))),
    st.integers(0, 200),
    st.slices(20),
)
def test_a_spilled_list_is_the_list_of_its_records(
    records: list[list[float]], changes: list[tuple[int, list[float]]], memory_bytes: int, some: slice
) -> None:
    """Wherever they are kept: some in memory, some in the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "_MEMORY_BYTES", memory_bytes)
        made: SpilledList[list[float]] = SpilledList(list[float])
    expected = []
    for record in records:
        made.append(record)
        expected.append(record)
    for place, record in changes:
        if place < len(expected):
            made[place] = expected[place] = record
    assert list(made) == expected
    assert list(made[some]) == expected[some]
    backwards = SelectedRecords(made, range(len(expected))[::-1])
    assert list(backwards[some]) == expected[::-1][some]
    assert list(backwards.those(bool)) == [*filter(bool, expected[::-1])]


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers()))))
def test_a_spilled_dict_is_the_dictionary_of_its_records(changes: list[tuple[int, list[int]]]) -> None:
    made: SpilledDict[int, list[int]] = SpilledDict(list[int])
    expected = {}
    for key, record in changes:
        made[key] = expected[key] = record
    assert dict(made) == expected
    assert list(made) == list(expected)
    assert [key in made for key in range(7)] == [key in expected for key in range(7)]
    for key in list(expected)[::2]:
        del made[key], expected[key]
    assert dict(made) == expected
    assert made.get(9) is None


def test_records_are_in_memory_only_while_they_are_looked_at() -> None:
    made: SpilledList[list[float]] = SpilledList(list[float])
    record = [number / 7 for number in range(10_000)]
    tracemalloc.start()
    for _ in range(100):
        made.append(record)
    assert all(len(record_) == len(record) for record_ in made)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * spill._MEMORY_BYTES, "100 records of 90 kB are 9 MB"


def test_what_the_disk_does_not_take_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_MEMORY_BYTES", 0)
    made: SpilledList[list[int]] = SpilledList(list[int])
    made.append([1])
    full = OSError(28, "No space left on device")
    for answer in (lambda *_: 1, _raiser(full)):  # a disk takes a part of it, or nothing
        monkeypatch.setattr(os, "pwrite", answer)
        made.append([2, 3])
    monkeypatch.undo()
    made.append([4])
    assert list(made) == [[1], [2, 3], [2, 3], [4]]


def _raiser(error: Exception):  # type: ignore[no-untyped-def]
    def raise_it(*_: object) -> int:
        raise error

    return raise_it
