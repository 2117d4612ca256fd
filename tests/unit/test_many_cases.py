"""What is made of thousands of results, none of which may have to be in memory with all others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from unit_examples import CASE, report, result

from pytest_gputrain.records import Report, Result, Verdict
from pytest_gputrain.report import json_report, terminal


def _results(*statuses: str) -> list[Result]:
    """One for each, of cases that a number tells apart."""
    made = []
    for number, status in enumerate(statuses):
        case = CASE.replace(batch_size=number + 1, named=("batch_size",))
        verdict = Verdict(status=status, sentence=f"{case} is {status}")  # type: ignore[arg-type]
        made.append(result(case=case, key=str(case), verdict=verdict))
    return made


@pytest.mark.parametrize("count", [0, 1, 3])
def test_results_written_one_by_one_make_the_same_document(tmp_path: Path, count: int) -> None:
    results = _results(*["pass"] * count)
    whole = report(*results)
    expected = msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"
    json_report.write(whole, tmp_path / "whole.json")
    json_report.write(report(), tmp_path / "parts.json", iter(results))
    json_report.write(report(*results[:1]), tmp_path / "both.json", iter(results[1:]))
    for name in ("whole", "parts", "both"):
        assert (tmp_path / f"{name}.json").read_bytes() == expected
    assert msgspec.json.decode(expected, type=Report) == whole


def test_a_text_like_the_end_of_a_document_does_not_split_it(tmp_path: Path) -> None:
    odd = report(*_results("pass"), notes=('"results": []\n}', "[]"))
    json_report.write(odd, tmp_path / "report.json")
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report) == odd


def _batches(results: Sequence[Result], most: int | None) -> tuple[list[int], str]:
    """Of the rows of the table, and its last line."""
    lines = terminal.render(results, width=200, colour=False, most=most).splitlines()
    return [int(line.partition("batch_size=")[2].split()[0]) for line in lines if "batch_size=" in line], lines[-1]


def test_of_too_many_cases_the_table_has_those_that_want_attention() -> None:
    results = _results("pass", "pass", "regressed", "recorded", "failed", "new", "pass")
    assert _batches(results, None)[0] == _batches(results, 7)[0] == [1, 2, 3, 4, 5, 6, 7]
    assert _batches(results, 4) == ([3, 4, 5, 6], "(and 3 more cases; the JSON report has all)")
