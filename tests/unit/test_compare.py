"""Tests ``gputrain compare``: one report judged against another, with its exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit_examples import CASE, crashed, gpu_environment, measurement, out_of_memory, prediction, report, result

from pytest_gputrain.cli.main import main
from pytest_gputrain.records import Case, Result
from pytest_gputrain.records.study import LossCurve
from pytest_gputrain.report import json_report
from pytest_gputrain.utils.units import GiB

SETTINGS = {"time_tolerance": 0.03, "memory_tolerance": {"ratio": 0.02, "bytes": 0}, "judge_cpu_time": False}

Compare = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    def run(base: list[Result], head: list[Result], *arguments: str, **settings: Any) -> tuple[int, str, str]:
        for name, results in (("a.json", base), ("b.json", head)):
            json_report.write(report(*results, settings=SETTINGS | settings), tmp_path / name)
        code = main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def measured(*seconds: float, case: Case = CASE, **fields: Any) -> Result:
    """A case with so many fresh processes."""
    return result(case, replies=tuple(measurement(step_seconds=(duration,) * 3, **fields) for duration in seconds))


BASE = measured(1.0, 1.001, 0.999, 1.0, 1.0)


def test_a_slower_case_is_told_by_its_sentence_and_fails(compare: Compare) -> None:
    head = [measured(1.08, 1.081, 1.08)]
    code, out, _ = compare([BASE], head)
    assert code == 1
    assert f"\n{CASE} is 8.0 % slower at 1.08 s a step than base 1.00 s" in out
    assert "3 of 3 fresh runs slower" in out
    assert " regressed" in out
    assert compare([BASE], head, "--fail-on=failed,new")[0] == 0
    assert compare([BASE], head, "--fail-on=never")[0] == 0
    assert compare([BASE], [BASE])[0] == 0


def test_what_passes_is_said_by_the_head(compare: Compare) -> None:
    code, out, _ = compare([BASE], [measured(1.08, 1.081, 1.08)], time_tolerance=0.1)
    assert (code, "slower" in out) == (0, False)


def test_more_memory_is_told(compare: Compare) -> None:
    code, out, _ = compare([BASE], [measured(1.0, 1.0, 1.0, peak_allocated_bytes=42 * 10**9)])
    assert code == 1
    assert "needs 1.86 GiB (5.0 %) more memory" in out


def test_an_improvement_is_told_without_a_word_of_recording(compare: Compare) -> None:
    code, out, _ = compare([BASE], [measured(0.9, 0.9, 0.9)])
    assert code == 0
    assert f"{CASE} is 10.0 % faster" in out
    assert "--gpu-baseline-update" not in out


def test_one_run_against_one_has_the_wider_limit(compare: Compare) -> None:
    """Nothing can be measured again, so a single slow run must be slower by more."""
    base = measured(1.0)
    assert compare([base], [measured(1.05)])[0] == 0
    assert compare([base], [measured(1.2)])[0] == 1


def test_cases_of_one_side_only_are_told(compare: Compare) -> None:
    other = result(CASE.replace(method="full"))
    code, out, _ = compare([BASE, other], [BASE, result(CASE.replace(method="qlora"))], "--fail-on=new")
    assert code == 1
    assert "llama-3.1-8b-qlora-bf16: a.json has no such case" in out
    assert "llama-3.1-8b-full-bf16: only a.json has it" in out


def test_a_case_that_only_the_base_has_is_not_comparable(compare: Compare) -> None:
    other = result(CASE.replace(method="full"))
    assert compare([BASE, other], [BASE])[0] == 0
    assert compare([BASE, other], [BASE], "--fail-on=not-comparable")[0] == 1
    assert compare([BASE], [BASE], "--fail-on=not-comparable")[0] == 0


def test_a_crash_fails_whatever_the_base_has(compare: Compare) -> None:
    failed = result(replies=(crashed(),), summary=None, verdict=None)
    for base in ([BASE], [failed], []):
        code, out, _ = compare(base, [failed])
        assert code == 1
        assert f"{CASE} gave no measurement" in out


def test_running_out_of_memory_where_it_fitted_regresses(compare: Compare) -> None:
    head = result(replies=(out_of_memory(),) * 3, summary=None)
    code, out, _ = compare([BASE], [head])
    assert code == 1
    assert "ran out of device memory" in out


def test_another_device_is_not_comparable(compare: Compare) -> None:
    head = measured(1.2, 1.2, 1.2, environment=gpu_environment(device_name="NVIDIA A100", device_type="rocm"))
    code, out, _ = compare([BASE], [head], "--fail-on=not-comparable")
    assert code == 1
    assert "recorded on NVIDIA H100 80GB HBM3, here NVIDIA A100" in out


def test_a_slower_machine_is_told_from_a_slower_case(compare: Compare) -> None:
    """From ten cases on: all are 2.5 % slower, one is 8 %, and one 4 %, most of which is not its own."""
    cases = [CASE.replace(batch_size=size, named=("batch_size",)) for size in range(1, 13)]
    base = [measured(1.0, 1.001, 0.999, 1.0, 1.0, case=case) for case in cases]
    head = [measured(*[{5: 1.08, 6: 1.04}.get(case.batch_size, 1.025)] * 3, case=case) for case in cases]
    code, out, _ = compare(base, head)
    assert code == 1
    assert [row.split()[-1] for row in out.splitlines() if "batch_size=5" in row or "batch_size=6" in row][:2] == [
        "regressed",
        "inconclusive",
    ]
    assert "the median case is +2.5 % off base: the machine rather than a case" in out


def test_a_suite_that_is_slower_as_a_whole_regresses(compare: Compare) -> None:
    cases = [CASE.replace(batch_size=size, named=("batch_size",)) for size in range(1, 13)]
    base = [measured(1.0, 1.001, 0.999, 1.0, 1.0, case=case) for case in cases]
    code, out, _ = compare(base, [measured(1.05, 1.05, 1.05, case=case) for case in cases])
    assert code == 1
    assert "all cases together regressed: the median case is +5.0 % off base" in out


def test_predictions_are_compared_with_predictions(compare: Compare) -> None:
    fields: dict[str, Any] = {"device": "predicted/h100"}
    peaks = prediction().phase_peak_bytes
    more = prediction(peak_allocated_bytes=33 * GiB, phase_peak_bytes={**peaks, "backward": 33 * GiB})
    base, head = result(reply=prediction(), **fields), result(reply=more, **fields)
    code, out, _ = compare([base], [head])
    assert code == 1
    assert "backward" in out
    assert compare([base], [base], "--fail-on=regressed,new,not-comparable")[0] == 0
    code, out, _ = compare([BASE], [base], "--fail-on=not-comparable")
    assert code == 1
    assert f"{CASE}: a.json has no prediction of it" in out
    code, out, _ = compare([base], [BASE], "--fail-on=not-comparable")
    assert code == 1
    assert f"{CASE}: a.json has no figures of it" in out


@pytest.mark.parametrize("broken", ["missing", "damaged", "without tolerances"])
def test_bad_input_is_one_sentence_and_code_2(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    compare([BASE], [BASE])
    head = tmp_path / "b.json"
    if broken == "missing":
        head.unlink()
    elif broken == "damaged":
        head.write_text("{")
    else:
        json_report.write(report(BASE), head)
    assert main(["compare", str(tmp_path / "a.json"), str(head)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"gputrain: {head} ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("where", ["case", "curve"])
def test_a_report_with_a_precision_of_another_name_is_refused(compare: Compare, where: str) -> None:
    curve = LossCurve(precision="fp16", outcome="recorded", losses=(1.0,))
    named = result(loss_curves=(curve,)) if where == "curve" else measured(1.0, case=CASE.replace(precision="fp16"))
    code, out, err = compare([named], [BASE])
    assert (code, out) == (2, "")
    assert err.endswith(
        f"a.json names in {named.key} the precision 'fp16', which is called 'fp16-amp' (autocast over weights in fp32); "
        "write the report again\n"
    )


def test_a_report_without_cases_is_refused(compare: Compare) -> None:
    code, _, err = compare([BASE], [])
    assert code == 2
    assert err.endswith("b.json has no case to compare\n")


def test_a_report_compared_with_itself_is_within_its_limits(compare: Compare) -> None:
    every = [BASE, result(CASE.replace(method="full"), replies=(out_of_memory(),), summary=None)]
    code, out, _ = compare(every, every, "--fail-on=regressed,failed,new,not-comparable,inconclusive,improved")
    assert code == 0, out
