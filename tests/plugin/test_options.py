"""Tests the options as pytest reads them: switches and their opposites, what is ini-only, and flags that went."""

import re

import pytest
from plugin_project import GEMMA, assert_refused, recorded

from pytest_gputrain.execution.settings import OPTIONS

ONE_CASE = "-k", "gemma"


def test_the_help_has_each_option_of_the_command_line_once_with_its_opposite_and_each_setting_of_the_ini_file(project):
    result = project.run("--help")
    begin = result.outlines.index("gputrain: GPU training benchmarks:")
    of_group = result.outlines[begin : result.outlines.index("", begin)]
    lines = [line for line in of_group if line.startswith("  -")]
    typed = [option for option in OPTIONS if not option.ini_only]
    assert [re.split(r"[=, ]", line.strip())[0] for line in lines] == [option.flag for option in typed]
    switches = [f"{option.flag}, --no-gpu-{option.name}" for option in typed if option.switch]
    assert [line.split("  ")[1] for line in lines if "--no-" in line] == switches
    assert "(default: 3%)" in result.stdout.str(), "percent signs are as they are"
    settings = result.stdout.str().partition("[pytest] configuration options")[2]
    for option in OPTIONS:
        begins = option.help[:15] if option.ini_only else f"as {option.flag}"
        assert re.search(rf"^  {option.ini} \(string\):\s+{re.escape(begins)}", settings, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpu-nodes=2"], "--gpu-nodes is set in the ini file: gpu_nodes = 2, or -o gpu_nodes=2 for one run"),
        (["--gpu-nodes", "2"], "--gpu-nodes is set in the ini file: gpu_nodes = 2, or *"),
        (["--gpu-nodes"], "--gpu-nodes is set in the ini file: *"),
        (["--gpu-nodes", "test_tuning.py"], "--gpu-nodes is set in the ini file: gpu_nodes = test_tuning.py, or *"),
    ],
)
def test_the_flag_of_a_setting_of_the_ini_file_is_refused(suite, words, sentence):
    assert_refused(suite, sentence, *words)
    suite.ini(f"addopts = {' '.join(words)}")
    assert_refused(suite, sentence)


@pytest.mark.parametrize(
    "abbreviated", ["--gpu-node=2", "--gpu-fleet-arg=x", "--gpu-emulat", "--gpu-stric", "--no-gpu-stric"]
)
def test_an_abbreviation_is_no_option(suite, abbreviated):
    result = suite.run(abbreviated)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*unrecognized arguments: {abbreviated}"])


def test_a_setting_of_the_ini_file_counts_and_the_command_line_overrides_it(suite):
    for switch in ("emulate", "find-batch"):
        suite.ini(f"gpu_{switch.replace('-', '_')} = true")
        suite.run(*ONE_CASE, f"--no-gpu-{switch}", "--gpu-json=report.json").assert_outcomes(passed=1, deselected=2)
        assert suite.verdicts() == {GEMMA: "new"}
    suite.ini("gpu_nodes = 0")
    assert_refused(suite, "gpu_nodes: '0' is not a whole number from 1 on", launched=2)
    suite.run(*ONE_CASE, "-o", "gpu_nodes=1").assert_outcomes(passed=1, deselected=2)
    suite.ini()
    # Several lines have the form that the ini file has.
    lines = "gpu_fleet_args=h100: -p a\ngpu"
    assert_refused(suite, "gpu_fleet_args: 'gpu' is neither arguments *", "-o", lines, launched=3)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("gpu_nodess=2", " (did you mean 'gpu_nodes'[?])"),
        ("gpu_reruns =0", " (did you mean 'gpu_reruns'[?])"),
        ("gpu_zzzzzzzzzz=0", ""),
    ],
)
def test_a_misspelt_setting_of_the_command_line_is_refused(suite, override, hint):
    assert_refused(suite, f"-o {override}: there is no setting of this name{hint}", "-o", override)


def test_a_misspelt_setting_of_the_ini_file_is_told_by_pytest_and_one_of_another_plugin_left_alone(suite):
    suite.ini("gpu_nodess = 2")
    with (suite.path / "conftest.py").open("a") as file:
        file.write("\n\ndef pytest_addoption(parser):\n    parser.addini('gpu_fan', 'speed')\n")
    result = suite.run(*ONE_CASE, "-o", "gpu_fan=high")
    result.assert_outcomes(passed=1, deselected=2, warnings=1)
    result.stdout.fnmatch_lines(["*PytestConfigWarning: Unknown config option: gpu_nodess*"])


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_workers_have_the_settings_of_the_controller(gated, workers):
    pytest.importorskip("xdist")
    gated.ini("gpu_steps = 3", "gpu_warmup = 2", "gpu_strict = true", "gpu_timeout = 5min", "gpu_reruns = 0")
    gated.answer(recorded(slower=1.2), to=GEMMA)
    options = ("-o", "gpu_steps=7", "--gpu-timeout=6min", "--no-gpu-strict", "-o", "gpu_reruns=1")
    result = gated.spawn(workers, *options) if workers == "-n2" else gated.run(*options)
    result.assert_outcomes(passed=2, failed=1)
    launched = {(launch["steps"], launch["warmup"], launch["timeout_seconds"]) for launch in gated.launches}
    assert launched == {(7, 2, 360.0)}
    assert [launch["id"] for launch in gated.launches].count(GEMMA) == 2
