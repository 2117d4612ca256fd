"""``--gpu-emulate``: what it refuses, what it judges and records, and that its figures never meet those of a real GPU."""

import json
import re

import pytest
from plugin_project import GEMMA, H100, H100_FOLDER, LLAMA, SUITE, assert_refused, failures, only_sentence, skips

from pytest_gputrain.records import EmulatedRun

RUN = {
    "outcome": "emulated",
    "device_name": "NVIDIA H100 80GB HBM3",
    "device_memory_bytes": 84_943_715_696,
    "runtime": "13.0",
    "packages": {"torch": "2.13.0"},
    "fits": True,
    "peak_allocated_bytes": 33_640_000_512,
    "peak_reserved_bytes": 38_010_880_000,
    "device_used_bytes": 38_600_000_000,
    "flops_per_step": 740_000_000,
}
LOSS = {"file": "train.py", "function": "train", "text": "loss.item()", "line": 42}


def counted(waits=0, launches=1000):
    """A run of two timed steps, the second of which waits so often."""
    counts = {
        "steps": [0, 1],
        "kinds": [{"launches": launches}, {"launches": launches, "waits": waits}],
        "causes": [{"what": "waits", "own": LOSS, "counts": [0, waits]}],
    }
    return {**RUN, "counts": counts}


WAITS = "waits for the GPU 1 time in step 2 (0 before): 1 more at train.py:42 in train, loss.item()"
EMULATE = ("-m", "h100", "--gpu-emulate")
UPDATE = "--gpu-baseline-update"
TEST = f"test_tuning[{GEMMA}]"

CONFTEST = """
import collections
import contextlib
import json
from pathlib import Path

import msgspec
import pytest
from pytest_gputrain.execution import emulated
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.records import Crashed, EmulatedRun, OutOfMemory

HERE = Path(__file__).parent


def pytest_configure(config):
    launches = collections.Counter()

    def emulate(task, *, timeout_seconds, environ, watch=None, fork_server=None):
        with open(HERE / "launches.jsonl", "a") as log:
            launch = {"emulated": task.emulated, "processes": task.processes, "counts": task.counts}
            log.write(json.dumps({"id": str(task.case), **launch}) + "\\n")
        replies = json.loads((HERE / "replies.json").read_text())
        answers, before = replies.get(str(task.case), replies["*"]), launches[str(task.case)]
        launches[str(task.case)] += 1
        reply = answers[min(before, len(answers) - 1)]
        return msgspec.convert(reply, EmulatedRun | OutOfMemory | Crashed)

    patch = pytest.MonkeyPatch()
    patch.setattr(emulated.libraries, "find_torch", lambda: None)
    patch.setattr(emulated.EmulatingExecutor, "environment", lambda self, gpus: {})
    patch.setattr(emulated, "lease_emulated", contextlib.nullcontext)
    patch.setattr(launcher, "emulate", emulate)
    config.add_cleanup(patch.undo)
"""


@pytest.fixture
def emulating(project):
    """Three cases on a machine that emulates GPUs, without anything recorded."""
    (project.path / "conftest.py").write_text(CONFTEST)
    project.answer(RUN)
    project.write(test_tuning=SUITE)
    return project


@pytest.fixture
def gated(emulating):
    """The same cases with what was recorded of them."""
    emulating.run(*EMULATE, UPDATE).assert_outcomes(passed=3)
    return emulating


def emulated_baselines(project):
    return project.baselines("tuning", "emulated/h100")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--gpu-emulate emulates one platform, and none is named; add *"),
        (["-m", "not h100"], "--gpu-emulate emulates one platform, and none is named; add *"),
        (["-m", "h1000"], "--gpu-emulate emulates one platform, and none is named (did you mean 'h100'[?]); add *"),
        (["-m", "h100 or a100"], "--gpu-emulate emulates one platform, and -m names *"),
    ],
)
def test_it_takes_one_platform(emulating, arguments, sentence):
    assert_refused(emulating, sentence, *arguments, "--gpu-emulate")


def test_a_case_without_a_figure_to_compare_with_is_new_and_fails_where_that_is_strict(emulating):
    emulating.run(*EMULATE, "--gpu-json=report.json").assert_outcomes(passed=3)
    assert emulating.verdicts()[LLAMA] == "new"
    assert {launch["emulated"] for launch in emulating.launches} == {"h100"}
    strict = emulating.run(*EMULATE, "--gpu-strict")
    advised = r"was never recorded on an emulated H100; record it with (.*--gpu-baseline-new)"
    (remedy,) = re.findall(advised, failures(strict)[TEST])
    emulating.run(*remedy.split()).assert_outcomes(passed=3)
    emulating.run(*EMULATE, "--gpu-strict").assert_outcomes(passed=3)


def test_a_test_is_left_out_of_emulated_runs_by_its_marker(emulating):
    mark = "@pytest.mark.gpu_only_on({}, reason='it reads losses')\n@pytest.mark.p"
    for kinds, left_out in (("'cpu', 'gpu'", 3), ("'emulated'", 0)):
        emulating.write(test_tuning=SUITE.replace("@pytest.mark.p", mark.format(kinds)))
        emulating.run(*EMULATE).assert_outcomes(skipped=left_out, passed=3 - left_out)
        assert len(emulating.launches) == 3 - left_out


def test_a_run_in_a_folder_below_what_was_recorded_says_where_it_is(emulating, monkeypatch):
    below = emulating.without_configuration()
    emulating.run("benchmarks", *EMULATE, UPDATE).assert_outcomes(passed=3)
    monkeypatch.chdir(below)
    searched = f"only {below / 'baselines'} was searched, and {emulating.path / 'baselines'} *"
    emulating.run(*EMULATE).stdout.fnmatch_lines([f"* was never recorded on an emulated H100; {searched}"])


def test_one_byte_more_is_a_regression_and_one_less_an_improvement(gated):
    gated.run(*EMULATE, "--gpu-strict").assert_outcomes(passed=3)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        gated.answer({**RUN, name: RUN[name] + 1}, to=GEMMA)
        sentence = only_sentence(gated.run(*EMULATE, "--gpu-memory-tolerance=50%"), TEST)
        assert " 1 byte " in sentence
        gated.answer({**RUN, name: RUN[name] - 1}, to=GEMMA)
        gated.run(*EMULATE, "--gpu-json=report.json").assert_outcomes(passed=3)
        assert gated.verdicts()[GEMMA] == "improved"


def test_a_case_that_does_not_fit_fails_until_that_is_recorded(emulating):
    unfit = {**RUN, "fits": False, "refused": "CUDA out of memory. Tried to allocate 2.00 GiB."}
    emulating.answer(unfit, to=GEMMA)
    sentence = only_sentence(emulating.run(*EMULATE), TEST)
    assert "does not fit H100 (79.1 GiB): CUDA out of memory. Tried to allocate 2.00 GiB; if that is expected" in sentence
    emulating.run(*EMULATE, UPDATE).assert_outcomes(passed=3)
    emulating.run(*EMULATE, "--gpu-strict").assert_outcomes(passed=3)
    emulating.answer(unfit, to=LLAMA)
    assert "no longer fits" in only_sentence(emulating.run(*EMULATE), f"test_tuning[{LLAMA}]")


def test_a_strict_run_with_other_libraries_passes_equal_figures_and_says_to_record_them(gated):
    other = {**RUN, "packages": {"torch": "2.14.0"}}
    gated.answer(other)
    result = gated.run(*EMULATE, "--gpu-strict")
    result.assert_outcomes(passed=3)
    told = "*3 cases compared with a baseline of other versions: *-> 2.14.0); record it with --gpu-platform=h100 --gpu-emu*"
    result.stdout.fnmatch_lines([told])
    result.stdout.no_fnmatch_line("not compared: *")
    gated.answer({**other, "peak_reserved_bytes": RUN["peak_reserved_bytes"] + 1}, to=GEMMA)
    assert "(torch 2.13.0 -> 2.14.0); if that is expected, record" in only_sentence(gated.run(*EMULATE), TEST)


def test_what_no_test_asks_for_is_pruned(gated):
    gated.write(test_tuning=SUITE.replace('"gemma-7b", ', ""))
    result = gated.run(*EMULATE)
    result.stdout.fnmatch_lines([f"no test asks any more for 1 baseline: tuning {GEMMA} on h100; *"])
    gated.run(*EMULATE, "--gpu-baseline-prune").assert_outcomes(passed=2)
    assert GEMMA not in emulated_baselines(gated)


def test_nothing_has_a_time_and_all_says_that_it_is_emulated(emulating):
    outputs = ("--gpu-json=report.json", "--gpu-history=history.jsonl", "--gpu-html=report.html", "--gpu-summary=summary.md")
    result = emulating.run(*EMULATE, *outputs)
    emulated = "emulated NVIDIA H100 80GB HBM3 with 79.1 GiB*"
    result.stdout.fnmatch_lines(["tuning on H100 x1 (emulated), full scale", emulated])
    (first, *_) = emulating.report()["results"]
    assert (first["kind"], first["device"]) == ("emulated", "emulated/h100")
    assert [name for name in first["reply"] if "second" in name] == []
    (line, *_) = map(json.loads, (emulating.path / "history.jsonl").read_text().splitlines())
    assert (line["kind"], line["outcome"], line["device"]) == ("emulation", "emulated", "emulated/h100")
    assert [name for name, value in line.items() if name.endswith(("_seconds", "_per_second", "_watts")) and value] == []
    assert "emulated/h100" in (emulating.path / "report.html").read_text()
    summary = (emulating.path / "summary.md").read_text()
    assert summary.startswith("## gputrain on an emulated H100: 3 ")
    assert "| emulated/h100 |  |  | 31.3 GiB |" in summary


def test_figures_of_an_emulated_gpu_are_never_compared_with_measured_ones(h100):
    h100.write(test_tuning=SUITE)
    h100.run(UPDATE, "--gpu-runs=1").assert_outcomes(passed=3)
    before = h100.baseline_file("tuning", H100_FOLDER).read_bytes()
    (h100.path / "conftest.py").write_text(CONFTEST)
    h100.answer({**RUN, "peak_allocated_bytes": 1})
    h100.run(*EMULATE, "--gpu-json=emulated.json", "--gpu-baseline-new").assert_outcomes(passed=3)
    assert set(h100.verdicts("emulated.json").values()) == {"recorded"}
    assert h100.baseline_file("tuning", H100_FOLDER).read_bytes() == before
    # Nor is their report one to measure against or to resume.
    h100.machine(H100)
    for folder in (H100_FOLDER, "emulated/h100"):
        h100.baseline_file("tuning", folder).unlink()
    for option in ("--gpu-baseline=emulated.json", "--gpu-resume=emulated.json"):
        h100.run("-m", "h100", option, "--gpu-json=report.json").assert_outcomes(passed=3)
        results = h100.report()["results"]
        assert {(result["kind"], result["verdict"]["status"]) for result in results} == {("measured", "new")}


def test_an_earlier_emulated_report_is_compared_instead_of_the_baselines(counting):
    counting.answer(counted())
    counting.run(*EMULATE, "--gpu-json=earlier.json", "-k", "not llama-2")
    (counting.path / "launches.jsonl").unlink()
    against = (*EMULATE, "--gpu-baseline=earlier.json", "--gpu-json=report.json")
    counting.run(*against)
    assert counting.verdicts() == {LLAMA: "pass", GEMMA: "pass", "llama-2-13b-lora-bf16": "new"}
    counting.answer(counted(waits=1))
    counting.run(*against)
    sentences = {result["key"]: result["verdict"]["sentence"] for result in counting.report()["results"]}
    # As against a baseline, but without the advice to record it; and a second process has confirmed the counts.
    assert sentences[GEMMA] == f"{GEMMA} {WAITS}"
    assert sentences["llama-2-13b-lora-bf16"] == "llama-2-13b-lora-bf16: earlier.json has no figures of it"
    assert len((counting.path / "launches.jsonl").read_text().splitlines()) == 3 + 5
    counting.answer({**counted(), "device_name": "NVIDIA H100 PCIe"})
    counting.run(*against)
    (told,) = {result["verdict"]["sentence"] for result in counting.report()["results"] if result["key"] == GEMMA}
    changed = "device name NVIDIA H100 80GB HBM3 -> NVIDIA H100 PCIe"
    assert told == f"{GEMMA} takes the memory of earlier.json; earlier.json ran under other conditions ({changed})"


def test_what_has_no_time_or_no_emulation_is_skipped(emulating):
    emulating.write(
        test_tuning="""
        from pytest_gputrain import Case

        CASE = Case(model="llama-3.1-8b", method="lora", batch_size=2, sequence_length=8192)

        def test_served(gputrain):
            gputrain.check(Case(model="word2vec", parallel="ps", gpus=2, servers=2, precision="fp32", batch_size=8))

        def test_speed(gputrain):
            assert gputrain.measure(CASE).median_step_seconds < 1

        def test_memory(gputrain):
            figures = gputrain.measure(CASE)
            assert figures.peak_reserved_bytes > figures.peak_allocated_bytes

        def test_telemetry_of_what_was_checked(gputrain):
            assert gputrain.check(CASE).figures.telemetry is None

        def test_misspelt_figure(gputrain):
            gputrain.measure(CASE).step_second

        def test_closure(gputrain):
            gputrain.check(lambda setup: None, inline=True)
        """
    )
    result = emulating.run("--gpu-platform=h100", "--gpu-emulate")
    result.assert_outcomes(passed=1, skipped=4, failed=1)
    (misspelt,) = failures(result).values()
    assert "has no step_second" in misspelt
    result.stdout.fnmatch_lines(["not compared: *4 tests skipped"])
    assert skips(result)["test_closure"] == "runs inline, but an emulated GPU needs a process of its own"
    assert skips(result)["test_speed"] == "reads median_step_seconds, which an emulated GPU does not have"
    assert skips(result)["test_telemetry_of_what_was_checked"] == "reads telemetry, which an emulated GPU does not have"
    assert "parameter servers" in skips(result)["test_served"]
    strict = failures(emulating.run("--gpu-platform=h100", "--gpu-emulate", "--gpu-strict", "-k", "speed"))
    (sentence,) = strict.values()
    remedy = 'leave the test out by @pytest.mark.gpu_only_on("cpu", "gpu", reason="it reads median_step_seconds") (strict)'
    assert f"reads median_step_seconds, which an emulated GPU does not have; {remedy}" in sentence


def test_that_nothing_was_emulated_is_told_and_fails_where_strict(emulating):
    emulating.write(test_tuning=SUITE.replace('method=["lora"])', 'method=["lora"], platforms=["h100"])'))
    for strict, code in (((), 0), (("--gpu-strict",), 1)):
        result = emulating.run("--gpu-emulate", "--gpu-platform=a100", "--gpu-json=report.json", *strict)
        result.stdout.fnmatch_lines(["nothing was emulated: every case was skipped (not declared for a100, *)"])
        assert set(skips(result).values()) == {"not declared for a100, which this run emulates"}
        assert result.ret == emulating.report()["exit_status"] == code


OWN = """
def build(setup):
    return lambda: None


def test_it(gputrain):
    gputrain.check(build, precision="fp32")
"""


def test_files_of_one_name_do_not_share_a_baseline(emulating):
    for folder in ("first", "second"):
        (emulating.path / folder).mkdir()
        (emulating.path / folder / "test_mine.py").write_text(OWN)
    record = ("--gpu-emulate", "--gpu-platform=h100", UPDATE)
    emulating.run("first", *record).assert_outcomes(passed=1)
    before = emulating.baseline_file("mine", "emulated/h100").read_bytes()
    sentence = only_sentence(emulating.run("second", *record), "test_it")
    assert sentence == (
        "build-fp32 of second/test_mine.py would share its baseline with that of first/test_mine.py: both are the suite "
        "mine; rename a file"
    )
    assert emulating.baseline_file("mine", "emulated/h100").read_bytes() == before
    # A file that moved is another matter.
    (emulating.path / "first" / "test_mine.py").unlink()
    emulating.run("second", *record).assert_outcomes(passed=1)


HINT = (
    "-m 'h100' left out the tests in test_mine.py, which carry no platform's marker: mark them with @pytest.mark.h100, or "
    "give --gpu-platform=h100 instead of -m"
)


def test_own_code_without_the_marker_that_selects_it_is_told(emulating):
    (emulating.path / "test_tuning.py").unlink()
    emulating.write(test_mine=OWN)
    result = emulating.run(*EMULATE)
    assert [line for line in result.outlines if "left out" in line] == [HINT]
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    emulating.write(test_tuning=SUITE)
    result = emulating.run(*EMULATE, "--collect-only")
    assert [line for line in result.outlines if "left out" in line] == [HINT], "beside others that are selected"
    for arguments in (["-m", "h100", "-k", "gemma"], ["-m", "not h100"], ["-m", "slow"], ["-k", "gemma"]):
        listed = emulating.run("--collect-only", "--gpu-emulate", "--gpu-platform=h100", *arguments)
        assert "left out" not in listed.stdout.str()


def test_each_environment_is_emulated_and_one_is_recorded(emulating):
    emulating.write(
        test_tuning="""
        from pytest_gputrain import Case

        CASE = Case(model="gemma-7b", method="lora", batch_size=2, sequence_length=8192)

        def test_changed(gputrain, monkeypatch):
            monkeypatch.setenv("FLAG", "1")
            gputrain.check(CASE)

        def test_plain(gputrain):
            gputrain.check(CASE)
        """
    )
    options = ("--gpu-emulate", "--gpu-platform=h100", "--gpu-json=report.json")
    emulating.run(*options).assert_outcomes(passed=2)
    assert [result["variables"] for result in emulating.report()["results"]] == [["FLAG"], []]
    assert len(emulating.launches) == 2
    result = emulating.run(*options, UPDATE)
    result.stdout.fnmatch_lines([f"*{GEMMA} is not recorded as test_tuning.py::test_changed*"])


def test_a_case_of_several_gpus_is_one_launch_of_all_its_processes_and_one_that_fails_gives_no_figures(emulating):
    assert RUN.keys() - {"outcome"} <= set(EmulatedRun.__struct_fields__)
    emulating.answer({**RUN, "processes": 8})
    eight = ("--gpu-set=parallel=fsdp", "--gpu-set=gpus=8", "-k", "gemma")
    emulating.run(*EMULATE, *eight).assert_outcomes(passed=1, deselected=2)
    assert [launch["processes"] for launch in emulating.launches] == [8]
    emulating.answer({"outcome": "crashed", "sentence": "no stand-ins", "phase": "import"}, to=GEMMA)
    result = emulating.run(*EMULATE, UPDATE)
    assert only_sentence(result, TEST) == f"{GEMMA} gave no figures (import): no stand-ins"
    assert GEMMA not in emulated_baselines(emulating)


def launched(project, case):
    return [launch["id"] for launch in project.launches].count(case)


@pytest.fixture
def counting(emulating):
    """The cases with recorded counts, in which no step waits."""
    emulating.answer(counted())
    emulating.run(*EMULATE, UPDATE).assert_outcomes(passed=3)
    return emulating


def test_growth_of_a_count_fails_only_if_a_second_process_confirms_it(counting):
    began = launched(counting, GEMMA)
    counting.run(*EMULATE).assert_outcomes(passed=3)
    assert launched(counting, GEMMA) == began + 1, "a run that passes is never run twice"
    counting.answer(counted(waits=1), to=GEMMA)
    assert only_sentence(counting.run(*EMULATE), TEST) == f"{GEMMA} {WAITS}"
    assert launched(counting, GEMMA) == began + 3
    counting.answer(counted(waits=1), counted(), to=GEMMA)
    result = counting.run(*EMULATE)
    result.assert_outcomes(passed=3)
    doubt = f"1 case in doubt: {GEMMA} {WAITS}, which a second run in a fresh process does not confirm"
    result.stdout.fnmatch_lines([doubt])
    counting.answer(counted(waits=1), {"outcome": "crashed", "sentence": "no", "phase": "import"}, to=GEMMA)
    assert WAITS in only_sentence(counting.run(*EMULATE, "--gpu-strict"), TEST)


def test_a_heap_that_grows_fails_only_if_a_second_process_agrees(counting):
    steady, growing = ({**counted(), "heap_growth": size} for size in (0, 200_000))
    counting.answer(steady, to=GEMMA)
    counting.run(*EMULATE, UPDATE).assert_outcomes(passed=3)
    counting.answer(growing, to=GEMMA)
    sentence = only_sentence(counting.run(*EMULATE), TEST)
    assert sentence.startswith(f"{GEMMA} leaves 195 KiB more on the host's heap after each step (0 B before): look for")
    counting.answer(growing, steady, to=GEMMA)
    counting.run(*EMULATE).assert_outcomes(passed=3)


def test_two_tests_of_a_case_share_the_run_that_confirms_its_limit(counting):
    limited = SUITE.replace("@pytest.mark.p", "@pytest.mark.gpu_limit(waits=0)\n@pytest.mark.p")
    counting.write(test_tuning=limited, test_too=limited.replace("gputrain.check", "gputrain.measure"))
    counting.answer(counted(waits=1), to=GEMMA)
    began = launched(counting, GEMMA)
    result = counting.run(*EMULATE)
    result.assert_outcomes(passed=4, failed=2)
    assert launched(counting, GEMMA) == began + 2
    over = "waits for the GPU 1 time in step 2, over its limit of 0: 1 at train.py:42 in train, loss.item()"
    sentences = [f"{GEMMA} {WAITS}; it also {over}", f"{GEMMA} {over}"]
    result.stdout.fnmatch_lines_random([f"{sentence} (gpu_limit on test_tuning)" for sentence in sentences])


@pytest.mark.parametrize(
    ("setting", "outcome", "counts"),
    [
        ("gpu_counts = judge", "failed", True),
        ("gpu_counts = tell", "passed", True),
        ("gpu_counts = off", "passed", False),
        ("gpu_count_tolerance = waits=1", "passed", True),
        ("gpu_count_tolerance = waits=100 %", "failed", True),
    ],
)
def test_the_ini_file_says_how_counts_are_judged(counting, setting, outcome, counts):
    counting.answer(counted(waits=1))
    counting.ini(setting)
    counting.run(*EMULATE, "-k", "gemma").assert_outcomes(**{outcome: 1}, deselected=2)
    assert counting.launches[-1]["counts"] == counts


def test_a_tolerance_of_a_test_counts_before_that_of_the_ini_file(counting):
    counting.answer(counted(waits=2), to=GEMMA)
    counting.ini("gpu_count_tolerance = waits=1, launches=5 %")
    for tolerance, failed in (("waits=2", 0), ("launches='5 %'", 1)):
        marked = f"@pytest.mark.gpu_tolerance({tolerance})\n@pytest.mark.p"
        counting.write(test_tuning=SUITE.replace("@pytest.mark.p", marked))
        counting.run(*EMULATE).assert_outcomes(passed=3 - failed, failed=failed)


def test_an_update_prints_every_count_that_it_changes_and_confirms_none(counting):
    began = launched(counting, GEMMA)
    counting.answer(counted(waits=1, launches=1001), to=GEMMA)
    counting.answer(counted(launches=1001), to=LLAMA)
    result = counting.run(*EMULATE, UPDATE)
    result.assert_outcomes(passed=3)
    assert launched(counting, GEMMA) == began + 1
    lines = [
        f"1 case recorded with launches 1,000 -> 1,001 a step: {LLAMA}",
        f"1 case recorded with waits 0 -> 1 in 2 steps, launches 1,000 -> 1,001 a step: {GEMMA}",
    ]
    result.stdout.fnmatch_lines_random(lines)
    result.stdout.no_fnmatch_line("*1,000 -> 1,000*")


def test_counts_that_a_baseline_lacks_are_told_once_and_an_update_adds_them(gated):
    before = emulated_baselines(gated)[GEMMA]
    gated.answer(counted(waits=1))
    result = gated.run(*EMULATE, "--gpu-strict")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["3 cases with *: what its steps ask of the GPU was not recorded; record it with *"])
    gated.run(*EMULATE, UPDATE).assert_outcomes(passed=3)
    (run,) = emulated_baselines(gated)[GEMMA]["runs"].values()
    assert run.pop("counts")["steps"] == [0, 1]
    assert [run] == [*before["runs"].values()]
    gated.run(*EMULATE, "--gpu-strict").stdout.no_fnmatch_line("*was not recorded*")
