"""Tests that several workers of xdist give the same verdicts, table, report and baselines as one process."""

import itertools
import json
import re
from typing import Any

import pytest
from plugin_project import BUILD, GEMMA, H100, H100_FOLDER, LLAMA, LLAMA_2, Project, recorded, table_rows

pytest.importorskip("xdist")


def _comparable(report: dict[str, Any]) -> list[Any]:
    return sorted(report["results"], key=lambda result: result["nodeid"])


def test_two_workers_give_the_failures_report_and_table_of_one(gated: Project) -> None:
    suite = gated
    suite.answer(recorded(slower=1.05), to=GEMMA)
    suite.answer(recorded(slower=0.8), to=LLAMA)
    alone = suite.run("--gpu-json=alone.json")
    both = suite.spawn("-n2", "--gpu-json=both.json")
    both.assert_outcomes(passed=2, failed=1)
    both.stdout.fnmatch_lines([f"FAILED test_tuning.py::test_tuning[[]{GEMMA}[]]*is 5.0 % slower*"])
    assert _comparable(suite.report("both.json")) == _comparable(suite.report("alone.json"))
    assert suite.report("both.json")["exit_status"] == 1
    assert sorted(table_rows(both.stdout.str())) == sorted(table_rows(alone.stdout.str()))


@pytest.mark.slow
def test_two_workers_record_every_baseline(suite: Project) -> None:
    suite.spawn("-n2", "-m", "a100").assert_outcomes(skipped=3)
    result = suite.spawn("-n2", "--gpu-baseline-update")
    result.assert_outcomes(passed=3)
    entries = suite.baselines("tuning", H100_FOLDER)
    assert {key: len(entry["runs"]) for key, entry in entries.items()} == {LLAMA: 5, GEMMA: 5, LLAMA_2: 5}
    assert len(re.findall("3 baselines recorded in ", result.stdout.str())) == 1
    suite.spawn("-n2", "--gpu-strict").assert_outcomes(passed=3)


@pytest.mark.slow
def test_a_crash_in_a_later_run_of_a_worker_fails_the_run(suite: Project) -> None:
    suite.answer(recorded(), recorded("crashed"), to=GEMMA)
    result = suite.spawn("-n2", "--gpu-baseline-update")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines([f"FAILED test_tuning.py::test_tuning[[]{GEMMA}[]]*gave no measurement*"])
    assert sorted(suite.baselines("tuning", H100_FOLDER)) == sorted([LLAMA, LLAMA_2])


@pytest.mark.slow
def test_real_cases_under_two_workers_gate_as_alone(project: Project) -> None:
    tests = "".join(f"\n\ndef test_{n}(gputrain):\n    gputrain.check(build_{n}, precision='fp32', steps=2)\n" for n in "ab")
    project.write(
        test_mine=BUILD + BUILD.replace("def build", "def build_a") + BUILD.replace("def build", "def build_b") + tests
    )
    project.spawn("-n2", "--gpu-baseline-update").assert_outcomes(passed=2)
    assert sorted(project.baselines("mine")) == ["build_a-fp32@tiny", "build_b-fp32@tiny"]
    project.spawn("--gpu-strict", "--gpu-json=report.json").assert_outcomes(passed=2)
    assert set(project.verdicts().values()) == {"pass"}


def test_workers_take_turns_on_one_gpu(h100: Project) -> None:
    h100.write(
        test_turns="""
        import json
        import time
        from pathlib import Path

        import pytest


        @pytest.mark.parametrize("turn", range(4))
        def test_turn(gpu, turn):
            begin = time.monotonic()
            time.sleep(0.2)
            Path(f"turn-{turn}.json").write_text(json.dumps([begin, time.monotonic()]))
        """
    )
    h100.spawn("-n2").assert_outcomes(passed=4)
    turns = sorted(json.loads(file.read_text()) for file in h100.path.glob("turn-*.json"))
    assert len(turns) == 4
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(turns))


def test_two_gpus_are_used_at_the_same_time(h100: Project) -> None:
    h100.machine(H100, gpus=2)
    h100.write(
        test_meeting="""
        import time
        from pathlib import Path

        import pytest


        @pytest.mark.parametrize("name", ["a", "b"])
        def test_meeting(gpu, name):
            Path(f"here-{name}").write_text(gpu.uuid)
            other = Path("here-b" if name == "a" else "here-a")
            for _ in range(600):
                if other.exists():
                    break
                time.sleep(0.05)
            else:
                pytest.fail("nobody came")
        """
    )
    h100.spawn("-n2").assert_outcomes(passed=2)
    assert len({file.read_text() for file in h100.path.glob("here-?")}) == 2


def test_a_crashed_xdist_worker_costs_only_its_own_test(suite: Project) -> None:
    suite.write(test_aa="import os\n\n\ndef test_gone():\n    os._exit(1)\n")
    result = suite.spawn("-n2", "--gpu-json=report.json")
    result.assert_outcomes(passed=3, failed=1)
    assert len(suite.report()["results"]) == 3


@pytest.mark.slow
def test_the_same_id_for_two_own_codes_is_told_whichever_workers_they_run_on(h100: Project) -> None:
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
