"""Tests cases whose GPUs are also used by processes of others."""

import pytest
from plugin_project import GEMMA, H100, H100_FOLDER, failures, only_sentence, recorded

from pytest_gputrain import GiB

TEST = f"test_tuning[{GEMMA}]"
WHO = "python (pid 4711, 1.00 GiB) on GPU 0"


@pytest.fixture
def recorded_suite(suite):
    """Three cases with baselines of an H100 that they had for themselves."""
    suite.occupied(free_bytes=78 * GiB)
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    return suite


def test_a_slower_case_beside_others_is_in_doubt_and_no_baseline_unless_they_are_ignored(recorded_suite):
    recorded_suite.answer(recorded(slower=1.2), to=GEMMA)
    recorded_suite.occupied(free_bytes=77 * GiB, processes=1)
    result = recorded_suite.run("--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert recorded_suite.verdicts()[GEMMA] == "inconclusive"
    result.stdout.fnmatch_lines([f"1 case in doubt: {GEMMA} *20.0 %*; measured beside {WHO}; *"])
    reply = next(result for result in recorded_suite.report()["results"] if result["key"] == GEMMA)["replies"][0]
    assert (reply["other_processes"], reply["holders"][0]["pid"]) == (1, 4711)

    file = recorded_suite.baseline_file("tuning", H100_FOLDER)
    before = file.read_text()
    result = recorded_suite.run("--gpu-baseline-update", "-k", "gemma")
    assert f"{GEMMA} was measured beside {WHO}, so it is not recorded" in only_sentence(result, TEST)
    assert file.read_text() == before

    sentence = only_sentence(recorded_suite.run("-o", "gpu_foreign=ignore", "--gpu-json=report.json"), TEST)
    assert "20.0 %" in sentence
    replies = [reply for result in recorded_suite.report()["results"] for reply in result["replies"]]
    assert not any(reply.get("holders") for reply in replies)
    recorded_suite.answer(recorded())
    recorded_suite.run("-o", "gpu_foreign=ignore", "--gpu-baseline-update").assert_outcomes(passed=3)


def test_error_measures_nothing_beside_others(recorded_suite):
    launched = len(recorded_suite.launches)
    recorded_suite.occupied(free_bytes=77 * GiB, processes=1)
    result = recorded_suite.run("-o", "gpu_foreign=error", "-k", "gemma")
    result.assert_outcomes(failed=1, deselected=2)
    (sentence,) = failures(result).values()
    assert f"{GEMMA} was not measured: its GPUs are in use by {WHO}" in sentence
    assert len(recorded_suite.launches) == launched
    recorded_suite.occupied(free_bytes=78 * GiB)
    recorded_suite.run("-o", "gpu_foreign=error", "-k", "gemma").assert_outcomes(passed=1, deselected=2)


def _telemetry(**telemetry):
    example = {"readings": 9, "energy_joules": None, "power_watts": None, "clock_mhz": None, "utilization": None}
    return {**example, "throttled": None, **telemetry}


def test_energy_is_in_the_summary_and_lowered_clocks_are_told_whatever_the_verdict(recorded_suite):
    hot = {"HW Thermal Slowdown": 0.4, "SW Power Cap": 1.0}
    telemetry = _telemetry(energy_joules=7000.0, power_watts=650.0, clock_mhz=1500, throttled=hot)
    recorded_suite.answer({**recorded(), "telemetry": telemetry}, to=GEMMA)
    result = recorded_suite.run("--gpu-json=report.json", "-k", "gemma")
    result.stdout.fnmatch_lines([f"{GEMMA}: its GPUs lowered their clocks (HW Thermal Slowdown for 40.0 % of the time)"])
    summary = recorded_suite.report()["results"][0]["summary"]
    assert (summary["joules_per_step"], summary["joules_per_sample"]) == (1400.0, 700.0)
    assert (summary["power_watts"], summary["clock_mhz"], summary["first_step_seconds"]) == (650.0, 1500, 6.3)
    recorded_suite.answer({**recorded(slower=1.2), "telemetry": telemetry}, to=GEMMA)
    assert "HW Thermal Slowdown for 40.0 % of the time" in only_sentence(recorded_suite.run(), TEST)


def test_a_lower_power_limit_is_named_with_a_slower_step(recorded_suite):
    recorded_suite.machine(H100, power_limit_watts=700.0)
    recorded_suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    recorded_suite.machine(H100, power_limit_watts=500.0)
    recorded_suite.answer(recorded(slower=1.2), to=GEMMA)
    assert "power limit 700 W -> 500 W" in only_sentence(recorded_suite.run(), TEST)
