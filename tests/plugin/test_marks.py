"""Tests the markers by which a test states limits and tolerances for its own cases."""

import re

import pytest
from plugin_project import (
    GEMMA,
    H100_FOLDER,
    LLAMA,
    LLAMA_2,
    SUITE,
    failures,
    junit_properties,
    only_sentence,
    recorded,
    skips,
)

from pytest_gputrain import GiB

TEST = f"test_tuning[{GEMMA}]"


def _marked(project, *marks, file="", case=""):
    """The suite with ``marks`` on its test, in the file, and on the parameters of one case."""
    on_test = "".join(f"@pytest.mark.{mark}\n" for mark in marks)
    text = SUITE.replace("@pytest.mark.parametrize", f"{on_test}@pytest.mark.parametrize")
    text = text.replace("CASES = ", f"{f'pytestmark = pytest.mark.{file}' if file else ''}\nCASES = ")
    if case:
        text = text.replace(
            "\n\n\n@pytest", f"\nCASES[1] = pytest.param(CASES[1], marks=pytest.mark.{case})\n\n\n@pytest", 1
        )
    project.write(test_tuning=text)


def test_a_limit_fails_without_a_baseline_and_says_where_it_stands(suite):
    _marked(suite, "gpu_limit(memory='24 GiB')")
    suite.answer(recorded(bigger=-20 * GiB))
    suite.answer(recorded(), to=GEMMA)
    result = suite.run("--gpu-json=report.json", "--junitxml=junit.xml")
    assert re.fullmatch(
        rf"{GEMMA} .*35\.0 GiB.*24\.0 GiB.*3 fresh runs \(gpu_limit on test_tuning\)", only_sentence(result, TEST)
    )
    assert suite.verdicts() == {GEMMA: "over-limit", LLAMA: "new", LLAMA_2: "new"}
    result.stdout.fnmatch_lines(["*Gemma*over-limit*"])
    limits = {result["key"]: result["verdict"]["limits"][0]["status"] for result in suite.report()["results"]}
    assert (limits[GEMMA], limits[LLAMA]) == ("over-limit", "pass")
    assert junit_properties(suite.junit()[TEST])["gputrain.limit.peak_allocated_bytes"] == str(24 * GiB)
    suite.run("--gpu-baseline-update").assert_outcomes(passed=2, failed=1)
    assert GEMMA not in suite.baselines("tuning", H100_FOLDER)
    test = suite.path / "test_tuning.py"
    test.write_text(test.read_text().replace("gputrain.check", "gputrain.measure"))
    assert " 24.0 GiB " in only_sentence(suite.run("-k", "gemma"), TEST)
    suite.answer(recorded(), recorded(bigger=-20 * GiB), to=GEMMA)
    suite.run("-k", "gemma").assert_outcomes(passed=1, deselected=2)  # one bad process


def test_at_tiny_scale_a_limit_is_told_as_not_judged(cpu):
    _marked(cpu, "gpu_limit(memory='1 KiB', time='1 ms')")
    result = cpu.run()
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [
            "3 cases with the limit of peak memory not judged: it is meant for the full model, and this is the tiny scale",
            "3 cases with the limit of step time not judged: *",
        ]
    )


CLASSES = """
import pytest
from pytest_gputrain import Case


@pytest.mark.gpu_limit(time=0.5)
class TestBase:
    def test_it(self, gputrain):
        gputrain.check(Case(model="gemma-7b", method="lora", batch_size=2, sequence_length=8192))


@pytest.mark.gpu_limit(time="9s")
class TestDerived(TestBase):
    pass
"""


def test_the_nearest_marker_counts_for_each_keyword(suite):
    _marked(
        suite, "gpu_limit(memory=30 * 2**30)", file="gpu_limit(memory='1 GiB', time='4s')", case="gpu_limit(memory='40 GiB')"
    )
    suite.write(test_classes=CLASSES)
    told = {name: text.strip() for name, text in failures(suite.run("-o", "gpu_reruns=0")).items()}
    assert told.keys() == {*(f"test_tuning[{name}]" for name in (LLAMA, GEMMA, LLAMA_2)), "TestBase::test_it"}
    of_file = f"{GEMMA} takes 4.70 s a step, over its limit of 4.00 s in 1 fresh run (gpu_limit in test_tuning.py)"
    assert told[TEST] == of_file
    assert "30.0 GiB in 1 fresh run (gpu_limit on test_tuning) and takes 4.70 s" in told[f"test_tuning[{LLAMA}]"]
    assert told["TestBase::test_it"].endswith("limit of 500 ms in 1 fresh run (gpu_limit on the class TestBase)")


SENSELESS = {
    "gpu_limit(memory='5 s')": "gpu_limit on test_it: memory: '5 s' is not an amount of memory; *",
    "gpu_limit(memory=True)": "gpu_limit on test_it: memory: True is not an amount of memory; *",
    "gpu_limit(memory='0 GiB')": "gpu_limit on test_it: memory='0 GiB' lets nothing pass; state more *",
    "gpu_limit(time=float('inf'))": "gpu_limit on test_it: time: inf is not a time; *",
    "gpu_limit(step='1 s')": "gpu_limit on test_it knows no 'step'; it takes memory, time and counts such as *",
    "gpu_limit(memroy='1GiB')": "gpu_limit on test_it knows no 'memroy' (did you mean 'memory'?); it takes *",
    "gpu_limit('24 GiB')": "gpu_limit on test_it takes memory=, time= and counts such as waits= or launches=, as @*",
    "gpu_limit()": "gpu_limit on test_it takes memory=, time= and counts such as waits= or launches=, as @*",
    "gpu_limit(launchs=2000)": "gpu_limit on test_it knows no 'launchs' (did you mean 'launches'?); it takes *",
    "gpu_limit(waits='none')": "gpu_limit on test_it: waits: 'none' is not a count; write it as 0 or 2000",
    "gpu_tolerance(waits='many')": "gpu_tolerance on test_it: waits: 'many' is not a tolerance; write it as 5 %, 2 or *",
    "gpu_limit(time='1s') gpu_limit(time='2s')": "2 markers gpu_limit are on test_it; give one with all *",
    "gpu_only_on('emulate', reason='x')": "gpu_only_on on test_it knows no kind of run 'emulate' (did you mean 'emulated'*",
    "gpu_only_on(3, reason='x')": "gpu_only_on on test_it knows no kind of run 3; known: cpu, emulated, gpu",
    "gpu_only_on('cpu')": "gpu_only_on on test_it takes kinds of runs (cpu, emulated, gpu) and a reason, as @pytest.mark.*",
    "gpu_only_on(reason='x')": "gpu_only_on on test_it takes kinds of runs *",
    "gpu_only_on('cpu', reason='')": "gpu_only_on on test_it takes kinds of runs *",
    "gpu_only_on('cpu', reason='x', why='y')": "gpu_only_on on test_it takes kinds of runs *",
    "gpu_onlyon('cpu', reason='x')": "there is no marker 'gpu_onlyon' (did you mean 'gpu_only_on'?)",
    "gpu_limits(memory='24 GiB')": "there is no marker 'gpu_limits' (did you mean 'gpu_limit'?)",
    "gpu_tolerance(time=3)": "gpu_tolerance on test_it: time: 3 is not a tolerance; write it as 0.05, *",
    "gpu_tolerance(memory='3%+3%')": "gpu_tolerance on test_it: memory: '3%+3%' is not a tolerance; *",
    "gpu_tolerance(growth=-1)": "gpu_tolerance on test_it: growth: -1 is not an amount of memory; *",
    "gpu_tolerance(step='5 %')": "gpu_tolerance on test_it knows no 'step'*; it takes time, memory, growth and counts *",
    "gpu_tolerance()": "gpu_tolerance on test_it takes time=, memory=, growth= and counts such as *",
}
"""Markers, and the sentence of their test."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnknownMarkWarning")
def test_a_marker_that_makes_no_sense_fails_its_test_with_one_sentence(h100):
    tests = "".join(
        "\n\n"
        + "".join(f"@pytest.mark.{mark}\n" for mark in re.split(" (?=gpu_)", marks))
        + f"def test_{at}(gputrain):\n    gputrain.check(CASE)\n"
        for at, marks in enumerate(SENSELESS)
    )
    case = 'CASE = Case(model="gemma-7b", method="lora", sequence_length=64)\n'
    h100.write(test_odd=f"import pytest\nfrom pytest_gputrain import Case\n\n{case}{tests}")
    told = failures(h100.run())
    assert len(told) == len(SENSELESS)
    for at, sentence in enumerate(SENSELESS.values()):
        text = told[f"test_{at}"].strip()
        assert "\n" not in text
        pytest.LineMatcher([text]).fnmatch_lines([sentence.replace("test_it", f"test_{at}").replace("[", "[[]")])
    assert h100.launches == []


LEFT_OUT = "gpu_only_on {} leaves it out of runs of the kind {}: it reads losses"


@pytest.mark.parametrize("machine", ["cpu", "h100"])
def test_a_test_is_left_out_of_the_kinds_of_runs_that_its_nearest_marker_does_not_name(machine, request):
    project = request.getfixturevalue(machine)
    kind, other = ("cpu", "gpu") if machine == "cpu" else ("gpu", "cpu")
    _marked(project, f"gpu_only_on('{other}', reason='it reads losses')", case=f"gpu_only_on('{kind}', reason='no other')")
    result = project.run("--gpu-strict", "--strict-markers", "-rs")
    result.assert_outcomes(skipped=2, failed=1)  # which has no baseline
    assert skips(result) == dict.fromkeys(
        [f"test_tuning[{LLAMA}]", f"test_tuning[{LLAMA_2}]"], LEFT_OUT.format("on test_tuning", kind)
    )
    assert [launch["id"] for launch in project.launches] == [GEMMA]
    result.stdout.fnmatch_lines(["not compared: 1 case without a baseline, 2 tests left out by gpu_only_on"])


def test_tests_that_are_all_left_out_pass_where_strict_and_ask_for_no_baseline(gated):
    _marked(gated, file="gpu_only_on('cpu', 'emulated', reason='it reads losses')")
    result = gated.run("--gpu-strict", "-k", "llama")
    result.assert_outcomes(skipped=2, deselected=1)
    assert result.ret == pytest.ExitCode.OK
    assert skips(result)[f"test_tuning[{LLAMA}]"] == LEFT_OUT.format("in test_tuning.py", "gpu")
    gated.write(test_other=SUITE)
    gated.run("--gpu-baseline-prune", "--gpu-baseline-new").stdout.fnmatch_lines(["3 baselines removed from *tuning.json*"])


@pytest.fixture
def slower(gated):
    """A case that is 6 % slower than its baseline and needs 4 % more memory."""
    gated.answer(recorded(slower=1.06, bigger=round(1.4 * GiB)), to=GEMMA)
    return gated


def test_a_tolerance_of_the_test_lets_more_pass_before_the_ini_file_and_after_the_command_line(slower):
    assert list(failures(slower.run())) == [TEST]
    slower.ini("gpu_time_tolerance = 3%", "gpu_memory_tolerance = 3%")
    _marked(slower, "gpu_tolerance(time='10 %')")
    memory_alone = only_sentence(slower.run(), TEST)
    assert "4.0 %" in memory_alone
    assert "6.0 %" not in memory_alone
    for memory in ("'2 % + 1 GiB'", "0.05", "2 * 2**30"):
        _marked(slower, f"gpu_tolerance(time=0.1, memory={memory})")
        slower.run().assert_outcomes(passed=3)
    assert "6.0 %" in only_sentence(slower.run("--gpu-time-tolerance=3%"), TEST)
    assert "4.0 %" in only_sentence(slower.run("--gpu-memory-tolerance=3%"), TEST)


def test_a_tolerance_of_one_case_is_that_of_no_other(slower):
    _marked(slower, case="gpu_tolerance(time='10 %', memory='5%')")
    slower.answer(recorded(slower=1.06), to=LLAMA)
    assert list(failures(slower.run())) == [f"test_tuning[{LLAMA}]"]
