"""Tests that several workers of xdist give the same verdicts, table, report and baselines as one process."""

import itertools
import json
import re

import pytest
from plugin_project import GEMMA, H100, H100_FOLDER, LLAMA, LLAMA_2, recorded, table_rows

pytest.importorskip("xdist")


def test_two_workers_give_the_failures_report_history_and_table_of_one(gated):
    gated.answer(recorded(slower=1.05), to=GEMMA)
    gated.answer(recorded(slower=0.8), to=LLAMA)
    reports, tables, histories = [], [], []
    for run, name, workers in ((gated.run, "alone", []), (gated.spawn, "both", ["-n2"])):
        result = run(*workers, f"--gpu-json={name}.json", f"--gpu-history={name}.jsonl")
        result.assert_outcomes(passed=2, failed=1)
        assert gated.report(f"{name}.json")["exit_status"] == result.ret
        result.stdout.fnmatch_lines([f"FAILED test_tuning.py::test_tuning[[]{GEMMA}[]]* 5.0 %*"])
        reports.append(sorted(gated.report(f"{name}.json")["results"], key=lambda entry: entry["nodeid"]))
        tables.append(sorted(table_rows(result.stdout.str())))
        lines = map(json.loads, (gated.path / f"{name}.jsonl").read_text().splitlines())
        histories.append(sorted((line | {"date": None, "session": None} for line in lines), key=lambda line: line["key"]))
    for of_one, of_two in (reports, tables, histories):
        assert of_two == of_one != []


@pytest.mark.slow
def test_two_workers_record_every_baseline(suite):
    suite.spawn("-n2", "-m", "a100").assert_outcomes(skipped=3)
    result = suite.spawn("-n2", "--gpu-baseline-update")
    result.assert_outcomes(passed=3)
    entries = suite.baselines("tuning", H100_FOLDER)
    assert {key: len(entry["runs"]) for key, entry in entries.items()} == {LLAMA: 5, GEMMA: 5, LLAMA_2: 5}
    assert len(re.findall("3 baselines recorded in ", result.stdout.str())) == 1
    suite.spawn("-n2", "--gpu-strict").assert_outcomes(passed=3)


@pytest.mark.slow
def test_a_crash_in_a_later_run_of_a_worker_fails_the_run(suite):
    suite.answer(recorded(), recorded("crashed"), to=GEMMA)
    result = suite.spawn("-n2", "--gpu-baseline-update")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines([f"FAILED test_tuning.py::test_tuning[[]{GEMMA}[]]*gave no measurement*"])
    assert sorted(suite.baselines("tuning", H100_FOLDER)) == sorted([LLAMA, LLAMA_2])


MEETING = """
import json
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize("turn", range(4))
def test_turn(gpu, turn):
    begin = time.monotonic()
    time.sleep(0.5)
    Path(f"turn-{turn}.json").write_text(json.dumps([gpu.uuid, begin, time.monotonic()]))
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_workers_take_turns_on_one_gpu_and_use_two_at_the_same_time(h100, gpus):
    h100.machine(H100, gpus=gpus)
    h100.write(test_turns=MEETING)
    h100.spawn("-n2").assert_outcomes(passed=4)
    turns = sorted((json.loads(file.read_text()) for file in h100.path.glob("turn-*.json")), key=lambda turn: turn[1])
    assert len({gpu for gpu, *_ in turns}) == gpus
    one_by_one = [end <= begin for (_, _, end), (_, begin, _) in itertools.pairwise(turns)]
    assert all(one_by_one) == (gpus == 1)


def test_a_crashed_xdist_worker_costs_only_its_own_test(suite):
    suite.write(test_aa="import os\n\n\ndef test_gone():\n    os._exit(1)\n")
    result = suite.spawn("-n2", "--gpu-json=report.json")
    result.assert_outcomes(passed=3, failed=1)
    assert len(suite.report()["results"]) == 3


@pytest.mark.slow
def test_the_same_id_for_two_own_codes_is_told_whichever_workers_they_run_on(h100):
    code = "def build(setup):\n    return lambda: None\n\n\ndef test_it(gputrain):\n    gputrain.check(build)\n"
    for folder in ("one", "two"):
        (h100.path / folder).mkdir()
        (h100.path / folder / "test_same.py").write_text(code)
    arguments = ("--import-mode=importlib", "--gpu-baseline-update")
    h100.run(*arguments).assert_outcomes(passed=1, failed=1)
    h100.baseline_file("same", H100_FOLDER).unlink()
    # Workers do not know of each other's cases: the controller refuses to store the second, and says so.
    result = h100.spawn("-n2", *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["not recorded: two different cases of the suite same have the id build-bf16*"])
