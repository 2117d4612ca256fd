"""Tests that a run says in its last lines what it is not green for, and fails for it where it is strict."""

import pytest
from plugin_project import (
    GEMMA,
    H100_FOLDER,
    LLAMA,
    LLAMA_2,
    SUITE,
    assert_refused,
    failures,
    recorded,
)

DECLARED = SUITE.replace('method=["lora"]', 'method=["lora"], platforms=["h100"]')
CAUGHT = SUITE.replace(
    "    gputrain.check(case)",
    "    try:\n        gputrain.check(case)\n    except pytest.fail.Exception:\n        pass",
)


def test_an_option_that_skips_every_case_is_told_also_by_a_mark_that_a_conftest_adds(suite):
    pytest.importorskip("pytest_benchmark")
    suite.write(test_plain="def test_plain(benchmark):\n    benchmark(int)\n")
    for strict, status in (((), 0), (("--gpu-strict",), 1)):
        result = suite.run("--benchmark-only", *strict)
        result.stdout.fnmatch_lines(["nothing was measured: every case was skipped (*--benchmark-only*)"])
        assert result.ret == status
    with (suite.path / "conftest.py").open("a") as file:
        file.write("\n\ndef pytest_collection_modifyitems(items):\n    for item in items:\n")
        file.write("        item.add_marker(pytest.mark.skip('slow'))\n")
    result = suite.run("--gpu-strict")
    result.stdout.fnmatch_lines(["nothing was measured: every case was skipped (slow)"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_run_in_a_folder_below_the_baselines_says_where_they_are(suite, monkeypatch):
    below = suite.without_configuration()
    suite.run("benchmarks", "--gpu-baseline-update").assert_outcomes(passed=3)
    with monkeypatch.context() as inside:
        inside.chdir(below)
        remedy = (
            f"only {below / 'baselines'} was searched, and {suite.path / 'baselines'} has baselines of this file: start "
            f"pytest in {suite.path}, or save an empty pytest.ini there"
        )
        result = suite.run()
        result.assert_outcomes(passed=3)
        (told,) = (line for line in result.outlines if line.startswith("3 cases without a baseline: "))
        assert told == f"3 cases without a baseline: {LLAMA} has no baseline; {remedy} (and 2 more)"
        strict = failures(suite.run("--gpu-strict"))
        assert strict[f"test_tuning[{GEMMA}]"].strip() == f"{GEMMA} has no baseline; {remedy} (strict)"
        (below / "pytest.ini").touch()
        assert "was searched" not in suite.run().stdout.str()
        (below / "pytest.ini").rename(suite.path / "pytest.ini")
        suite.run("--gpu-strict").assert_outcomes(passed=3)


def last_line(result):
    """Return that of the section of this plugin."""
    section = result.stdout.str().partition("= gputrain =")[2].splitlines()
    return [line for line in section if line and not line.startswith("=")][-1]


def test_a_platform_that_is_not_there_is_told_and_fails_where_strict(cpu, monkeypatch):
    cpu.write(test_tuning=DECLARED)
    told = "nothing was measured: every case was skipped (needs h100 x1, found cpu)"

    def status(*arguments):
        result = cpu.run("-m", "h100", "--gpu-json=report.json", *arguments)
        result.assert_outcomes(skipped=3)
        assert ("--gpu-baseline-update" in arguments) or told in result.outlines
        assert result.ret == cpu.report()["exit_status"]
        return int(result.ret)

    monkeypatch.setenv("CI", "1")
    assert (status(), status("--no-gpu-strict"), status("--gpu-baseline-update")) == (1, 0, 0)
    pytest.importorskip("xdist")
    result = cpu.spawn("-n2", "-m", "h100")
    assert told in result.outlines
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_what_a_cpu_lacks_or_somebody_marked_is_not_missed(cpu):
    cpu.write(test_tuning=SUITE.replace("batch_size=2, ", "parallel='ddp', gpus=2, "))
    result = cpu.run("-o", "gpu_processes=1", "--gpu-strict")
    result.assert_outcomes(skipped=3)
    assert result.ret == pytest.ExitCode.OK
    assert last_line(result) == "not compared: 3 tests skipped"
    for mark in ("skip", "skipif(True, reason='no')", "xfail(run=False)"):
        cpu.write(test_tuning=DECLARED.replace("@pytest", f"@pytest.mark.{mark}\n@pytest", 1))
        assert cpu.run("-m", "h100", "--gpu-strict").ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("text", "told", "strict_status"),
    [
        (CAUGHT, "1 failure caught by the test, which passed", 1),
        (SUITE.replace("@pytest", "@pytest.mark.xfail\n@pytest", 1), "1 failure expected by a mark (xfail)", 0),
    ],
    ids=["caught", "expected"],
)
def test_a_failure_that_does_not_fail_its_test_is_told(gated, text, told, strict_status):
    gated.write(test_tuning=text)
    gated.answer(recorded(slower=1.1), to=GEMMA)
    for strict, status in (((), 0), (("--gpu-strict",), strict_status)):
        result = gated.run(*strict)
        result.stdout.fnmatch_lines([f"{told}: test_tuning.py::test_tuning[[]{GEMMA}[]]: {GEMMA} *10.0 %*"])
        assert result.ret == status


SWALLOWED = """
import contextlib
import os
import threading

import pytest


def ask(gputrain, how):
    if how == "damaged":
        gputrain.check(CASES[1])
    if how == "knob":
        gputrain.check(CASES[1], precision="fp99")
    if how == "crashed":
        gputrain.measure(CASES[1])
    if how == "call":
        gputrain.check()
    if how == "elsewhere":
        gputrain.check(CASES[1], platforms=("a100",))
    if how == "late":
        thread.start()
    if how == "forked" and (child := os.fork()):
        os.waitpid(child, 0)
    elif how == "forked":
        try:
            gputrain.check(CASES[1])
        finally:
            os._exit(0)


def late(gputrain):
    with contextlib.suppress(BaseException):
        gputrain.check(Waits())


class Waits:
    def __call__(self):
        pass

    @property
    def __name__(self):
        released.wait()


released = threading.Event()
thread = None


def test_other(gputrain):
    gputrain.check(CASES[0])


def test_swallows(gputrain):
    global thread
    thread = threading.Thread(target=late, args=(gputrain,))
    try:
        ask(gputrain, "HOW")
    except BaseException:
        pass


def test_releases():
    released.set()
    "HOW" == "late" and thread.join()
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("damaged", "*tuning.json*"),
        ("knob", "*fp99*"),
        ("crashed", f"{GEMMA} *"),
        ("call", "gputrain.check() ended by TypeError: *"),
        ("elsewhere", "its case was skipped: needs a100 x1, found h100"),
        ("late", "gputrain.check() had not ended when its test did"),
        ("forked", "gputrain was asked in a process that the test forked, whose answer nobody reads; *"),
    ],
)
def test_a_request_that_ends_without_figures_is_told_where_its_test_hides_it(gated, how, told):
    cases = SUITE.partition("\n\n\n@pytest")[0]
    gated.write(test_tuning=f"{cases}\n{SWALLOWED.replace('HOW', how)}")
    gated.answer(recorded("crashed"), to=GEMMA)
    if how == "damaged":
        file = gated.baseline_file("tuning", H100_FOLDER)
        file.write_text(file.read_text().replace(f'"{GEMMA}"', f'"{GEMMA}'))
    for strict, status in (((), 0), (("--gpu-strict",), 1)):
        result = gated.run("-k", "swallows or releases", *strict)
        result.assert_outcomes(passed=2, deselected=1)
        result.stdout.fnmatch_lines([f"1 failure caught by the test, which passed: test_tuning.py::test_swallows: {told}"])
        assert result.ret == status


def test_a_case_that_is_not_measured_again_is_told(gated):
    gated.write(test_tuning=f"{SUITE}\n\ntest_again = test_tuning\n")
    result = gated.run("-k", GEMMA, "--gpu-json=report.json")
    assert len(gated.launches) == 1
    first, second = (f"test_tuning.py::test_{name}[[]{GEMMA}[]]" for name in ("tuning", "again"))
    result.stdout.fnmatch_lines(
        [
            "Gemma 7B * pass (measured before)",
            f"1 case not measured again, even if what the code reads has changed: {GEMMA} in {second} has the figures of "
            f"{first}",
        ]
    )
    assert [bool(one.get("measured_for")) for one in gated.report()["results"]] == [False, True]


def test_an_update_in_ci_never_fails_for_being_there(suite, monkeypatch):
    for name, value in {"CI": "true", "GITHUB_EVENT_NAME": "pull_request"}.items():
        monkeypatch.setenv(name, value)
    result = suite.run("--gpu-baseline-update")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "the gate did not run in this pull request's job: --gpu-baseline-update records figures, and compares none",
            f"3 baselines recorded in {suite.baseline_file('tuning', H100_FOLDER)}; review the difference in git",
            "not compared: 3 cases recorded instead",
        ]
    )
    monkeypatch.setenv("GITHUB_EVENT_NAME", "push")
    assert "the gate did not run" not in suite.run("--gpu-baseline-update").stdout.str()


def test_memory_that_was_not_counted_is_told_in_the_last_line_also_where_it_grows_and_strict_passes(cpu):
    cpu.write(test_tuning=SUITE.replace(', "gemma-7b", "llama-2-13b"', ""))

    def hold(memory):
        cpu.answer({**recorded("cpu_measured"), "uncounted_memory": True, "notes": [f"a step holds {memory} in NumPy"]})

    hold("15 MiB")
    assert cpu.run("--gpu-baseline-update").ret == pytest.ExitCode.OK
    hold("150 MiB")
    result = cpu.run("--gpu-strict")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["1 case: a step holds 150 MiB in NumPy: *"])
    assert last_line(result).startswith("not compared: uncounted memory of 1 case")


# Baselines that no test asks for

ONE_LESS = SUITE.replace('"llama-3.1-8b", ', "")


def test_a_baseline_whose_test_is_gone_is_told_and_removed_on_request(gated):
    gated.write(test_tuning=ONE_LESS)
    for strict, status in (((), 0), (("--gpu-strict",), 1)):
        result = gated.run(*strict)
        told = f"no test asks any more for 1 baseline: tuning {LLAMA} on {H100_FOLDER}; --gpu-baseline-prune removes *"
        result.stdout.fnmatch_lines([told, "not compared: 1 baseline that no test asked for"])
        assert result.ret == status
    result = gated.run("--gpu-baseline-prune", "--gpu-strict")
    result.stdout.fnmatch_lines(["1 baseline removed from *tuning.json; review the difference in git"])
    assert result.ret == pytest.ExitCode.OK
    assert sorted(gated.baselines("tuning", H100_FOLDER)) == [GEMMA, LLAMA_2]


@pytest.mark.parametrize("others", ["with results", "none"])
@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["alone", "xdist"])
def test_baselines_of_a_file_whose_tests_pass_and_ask_for_nothing_are_told(gated, workers, others):
    """As after a ``return`` before the check; the device is that of another file's results, or this machine."""
    if others != "none":
        gated.write(test_other=SUITE.replace("gputrain.check", "gputrain.measure"))
    gated.write(test_tuning=SUITE.replace("    gputrain.check", "    return\n    gputrain.check"))
    if workers:
        pytest.importorskip("xdist")
    result = gated.spawn(*workers, "--gpu-strict")
    result.stdout.fnmatch_lines(["no test asks any more for 3 baselines: *", "*3 baselines that no test asked for"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


WITHOUT_CASES = "def test_it(tmp_path):\n    pass\n"


@pytest.mark.parametrize("left", [WITHOUT_CASES, ""], ids=["others", "none"])
@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["alone", "xdist"])
def test_baselines_of_a_file_without_any_test_with_cases_are_told(gated, workers, left):
    """Also where no other file has one."""
    gated.write(test_plain=WITHOUT_CASES, test_tuning=left)
    if workers:
        pytest.importorskip("xdist")
    result = gated.spawn(*workers, "--gpu-strict")
    result.stdout.fnmatch_lines([f"no test asks any more for 3 baselines: tuning {GEMMA} on {H100_FOLDER}, *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    for partly in (["test_plain.py"], ["test_plain.py", "test_tuning.py::test_it"] if left else ["--collect-only"]):
        assert "no test asks any more" not in gated.run(*partly, "--gpu-strict").stdout.str()
    gated.run("--gpu-baseline-prune")
    assert not gated.baseline_file("tuning", H100_FOLDER).exists()


def test_baselines_of_a_file_whose_cases_are_all_for_another_device_stay_where_no_case_ran(gated):
    file = gated.baseline_file("tuning", H100_FOLDER)
    file.with_stem("plain").write_text(file.read_text().replace('"tuning"', '"plain"'))
    gated.write(test_plain=WITHOUT_CASES, test_tuning=DECLARED.replace("h100", "a100"))
    gated.run("--gpu-baseline-prune").assert_outcomes(passed=1, skipped=3)
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("text", [WITHOUT_CASES, "import pytest\n\npytest.skip('no', allow_module_level=True)\n"])
def test_a_file_that_skips_itself_or_has_another_of_its_name_is_not_missed(gated, text):
    gated.write(test_plain=WITHOUT_CASES, test_tuning=text)
    if text == WITHOUT_CASES:
        (gated.path / "benchmarks").mkdir()
        (gated.path / "benchmarks" / "test_tuning.py").write_text(SUITE)
    result = gated.run("--gpu-strict", "test_plain.py", "test_tuning.py")
    assert "no test asks any more" not in result.stdout.str()
    assert result.ret == pytest.ExitCode.OK


def test_files_whose_tests_with_cases_are_not_seen_as_such_in_this_run_are_not_missed(gated):
    """Tests that ``--lf`` leaves out, and deselected ones that ask while they run."""
    gated.write(test_plain=WITHOUT_CASES + "    assert not __import__('os').path.exists('broken')\n")
    (gated.path / "broken").touch()
    gated.run("test_plain.py", "-p", "cacheprovider").assert_outcomes(failed=1)
    (gated.path / "broken").unlink()
    here = ["-p", "cacheprovider", "--lf", "--gpu-strict"]
    last_failed = gated.run(*here)
    last_failed.assert_outcomes(passed=1)
    asks = "def test_asks(request):\n    request.getfixturevalue('gputrain')\n"
    gated.write(test_tuning=asks)
    asking = gated.run("-k", "it", "--gpu-strict")
    asking.assert_outcomes(passed=1, deselected=1)
    for result in (last_failed, asking):
        assert "asks any more" not in result.stdout.str()
        assert result.ret == pytest.ExitCode.OK


def test_under_xdist_a_baseline_whose_test_is_gone_is_told_as_well(gated):
    pytest.importorskip("xdist")
    gated.write(test_tuning=ONE_LESS)
    result = gated.spawn("-n2", "--gpu-strict")
    result.stdout.fnmatch_lines([f"no test asks any more for 1 baseline: tuning {LLAMA} on {H100_FOLDER}; *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("parametrized", [True, False])
def test_a_skipped_test_hides_no_baseline_but_those_it_may_ask_for(gated, parametrized):
    skipped_test = "    'gemma' in str(case) and pytest.skip('no')\n    gputrain" if parametrized else "    gputrain"
    other = "" if parametrized else "\n\ndef test_other(gputrain):\n    pytest.skip('no')\n"
    gated.write(test_tuning=ONE_LESS.replace("    gputrain", skipped_test) + other)
    result = gated.run("--gpu-strict")
    named = f"1 baseline: tuning {LLAMA} on {H100_FOLDER}"
    if parametrized:
        result.stdout.fnmatch_lines([f"no test asks any more for {named}; *"])
    else:
        result.stdout.fnmatch_lines([f"no test that ran to its end asked for {named}; 1 of its tests skipped"])
    result.stdout.fnmatch_lines(["not compared: 1 test skipped, 1 baseline that no test asked for"])
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if parametrized else pytest.ExitCode.OK)


LEFT_OUT = "\n\ndef pytest_collection_modifyitems(items):\n    del items[0]\n"


@pytest.mark.parametrize(
    ("text", "conftest", "arguments", "why"),
    [
        (SUITE, "", ["-k", "gemma"], "tests of it were deselected"),
        (SUITE, "", [f"test_tuning.py::test_tuning[{GEMMA}]"], "only some of its tests were chosen"),
        (SUITE, "", ["--maxfail=1"], "1 of its tests failed, 1 of its tests not run"),
        (
            SUITE.replace("    gputrain", "    'gemma' in str(case) and pytest.skip('no')\n    gputrain"),
            "",
            [],
            "1 of its *skipped",
        ),
        (SUITE, LEFT_OUT, [], "tests of it were left out"),
    ],
    ids=["deselected", "chosen", "failed", "skipped", "left out"],
)
def test_nothing_is_removed_of_a_file_that_was_not_seen_to_its_end(gated, text, conftest, arguments, why):
    gated.write(test_tuning=text)
    with (gated.path / "conftest.py").open("a") as file:
        file.write(conftest)
    gated.answer(recorded("crashed"), to=GEMMA)
    before = gated.baseline_file("tuning", H100_FOLDER).read_bytes()
    result = gated.run("--gpu-baseline-prune", *arguments)
    result.stdout.fnmatch_lines([f"not pruned, because not every test ran to its end: test_tuning.py: {why}"])
    assert gated.baseline_file("tuning", H100_FOLDER).read_bytes() == before
    assert "no test asks any more" not in gated.run("--gpu-strict", *arguments).stdout.str()


def test_a_case_of_another_platform_keeps_nobody_from_pruning_and_the_file_goes_with_its_last_entry(gated):
    # It cannot have a baseline of this device that anybody compares with.
    elsewhere = "\nCASES[0] = CASES[0].replace(platforms=('a100',))\n\n\n@pytest"
    gated.write(test_tuning=ONE_LESS.replace("\n\n\n@pytest", elsewhere))
    gated.run("--gpu-baseline-prune").assert_outcomes(passed=1, skipped=1)
    assert sorted(gated.baselines("tuning", H100_FOLDER)) == [LLAMA_2]
    gated.write(test_tuning=ONE_LESS.replace("CASES = ", "CASES = [Case(model='gemma-7b', sequence_length=8)] or "))
    gated.run("--gpu-baseline-prune").assert_outcomes(passed=1, failed=0)
    assert not gated.baseline_file("tuning", H100_FOLDER).exists()


def test_baselines_of_the_other_scale_and_of_other_devices_stay(gated):
    other = gated.baseline_file("tuning", "nvidia-a100")
    other.parent.mkdir()
    other.write_text(gated.baseline_file("tuning", H100_FOLDER).read_text().replace(H100_FOLDER, "nvidia-a100"))
    gated.run("--gpu-baseline-update", "--gpu-scale=tiny").assert_outcomes(passed=3)
    gated.write(test_tuning=ONE_LESS)
    before = other.read_bytes()
    gated.run("--gpu-baseline-prune", "--gpu-scale=tiny").assert_outcomes(passed=2)
    assert sorted(gated.baselines("tuning", H100_FOLDER)) == sorted(
        [LLAMA, GEMMA, LLAMA_2, f"{GEMMA}@tiny", f"{LLAMA_2}@tiny"]
    )
    assert other.read_bytes() == before


def test_pruning_needs_the_cases_of_the_tests_in_one_process(suite):
    for against in ("--gpu-set=batch_size=1,2", "--gpu-find-batch", "--gpu-loss=20", "--gpu-baseline=published"):
        assert_refused(suite, "--gpu-baseline-prune and --gpu-* contradict each other: *", "--gpu-baseline-prune", against)
    pytest.importorskip("xdist")
    result = suite.spawn("-n2", "--gpu-baseline-prune")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--gpu-baseline-prune and -n contradict each other" in result.stderr.str()
