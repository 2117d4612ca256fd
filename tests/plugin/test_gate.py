"""Tests what passes and what fails: every verdict, strict runs, further processes, and days on which all are slower."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from plugin_project import GEMMA, H100_FOLDER, LLAMA, SUITE, failures, junit_properties, only_sentence, recorded

from pytest_gputrain import GiB

TEST = f"test_tuning[{GEMMA}]"
OUT_OF_MEMORY, CRASHED = recorded("h100_out_of_memory"), recorded("crashed")
FAILS = {"regressed": "always", "over-limit": "always", "failed": "always", "inconclusive": "strict", "new": "strict"}
"""Of all other verdicts, a test passes."""


@dataclass(frozen=True)
class Row:
    """What the processes of a case reply, and what that means."""

    now: tuple[dict[str, Any], ...]
    verdict: str
    processes: int = 1
    sentence: str = "*"
    before: dict[str, Any] | None = None
    """When its baseline is recorded, which a crash prevents; as always where it is None."""
    mark: str = ""


ROWS = {
    "as-before": Row((recorded(),), "pass"),
    "slower": Row(
        (recorded(slower=1.05),),
        "regressed",
        3,
        "slower-bf16 * 5.0 %*4.94 s*4.70 s*(5 runs)*3.0 %*3 of 3 fresh runs*(baseline of 20*); same environment",
    ),
    "bigger": Row((recorded(bigger=2 * GiB),), "regressed", 3, "bigger-bf16 *2.00 GiB (5.7 %)*"),
    "faster": Row((recorded(slower=0.9),), "improved", 3, "* 10.0 % faster*"),
    "new": Row((recorded(),), "new", 1, "* has no baseline; record it with --gpu-baseline-new", before=CRASHED),
    "limited": Row((recorded(),), "over-limit", 3, mark="gpu_limit(memory='1 GiB')"),
    "out-of-memory": Row((OUT_OF_MEMORY,), "regressed", 2, "* ran out of device memory (warmup in step 1): CUDA out of *"),
    "out-of-memory-as-before": Row((OUT_OF_MEMORY,), "pass", before=OUT_OF_MEMORY),
    "out-of-memory-once": Row((OUT_OF_MEMORY, recorded()), "inconclusive", 3, "* in 1 of 3 runs; *"),
    "slower-once": Row((recorded(slower=1.2), recorded()), "pass", 4),
    "crashed": Row(
        (CRASHED,), "failed", 1, "* gave no measurement (measure in step 4): RuntimeError: CUDA error: an illegal *"
    ),
    "crashed-when-measured-again": Row((recorded(slower=1.2), CRASHED), "failed", 2),
}
NOTES = [
    "1 case without a baseline: new-bf16 has no baseline; *",
    "1 case better than the baseline: faster-bf16 *",
    "1 case in doubt: out-of-memory-once-bf16 ran out of device memory *",
    "slower-once-bf16: step time measured 4 times: +20.0 %, +0.0 %, +0.0 %, +0.0 %",
]
OWN = """
import pytest


def build(setup):
    raise AssertionError("its replies are recorded")


@pytest.mark.parametrize("name", [{names}])
def test_it(gputrain, name):
    gputrain.check(build, model=name)
"""


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_each_verdict_has_its_sentence_and_passes_or_fails(h100, strict):
    names = (f'pytest.param("{name}", marks={f"pytest.mark.{row.mark}" if row.mark else []})' for name, row in ROWS.items())
    h100.write(test_own=OWN.format(names=", ".join(names)))
    for name, row in ROWS.items():
        h100.answer(row.before or recorded(), to=f"{name}-bf16")
    h100.run("--gpu-baseline-update")
    for name, row in ROWS.items():
        h100.answer(*row.now, to=f"{name}-bf16")
    result = h100.run("--gpu-json=report.json", "--junitxml=junit.xml", *(["--gpu-strict"] if strict else []))

    entries = {str(entry["key"]).removesuffix("-bf16"): entry for entry in h100.report()["results"]}
    assert {name: (entry["verdict"]["status"], len(entry["replies"])) for name, entry in entries.items()} == {
        name: (row.verdict, row.processes) for name, row in ROWS.items()
    }
    for name, row in ROWS.items():
        pytest.LineMatcher([entries[name]["verdict"]["sentence"]]).fnmatch_lines([row.sentence])
    told = {name[len("test_it[") : -1]: text.strip() for name, text in failures(result).items()}
    assert told == {
        name: entries[name]["verdict"]["sentence"] + (" (strict)" if FAILS[row.verdict] == "strict" else "")
        for name, row in ROWS.items()
        if FAILS.get(row.verdict) in ("always", strict and "strict")
    }
    assert result.ret == h100.report()["exit_status"] == pytest.ExitCode.TESTS_FAILED
    for name, row in ROWS.items():
        case = h100.junit()[f"test_it[{name}]"]
        assert junit_properties(case)["gputrain.verdict"] == row.verdict
        assert [entry.get("message") for entry in case.iter("failure")] == [
            f"Failed: {told[name]}" for name in {name} & told.keys()
        ]
    if not strict:
        result.stdout.fnmatch_lines_random(NOTES)
    crash = ["*worker of crashed-bf16*", "Traceback (most recent call last):", "*RuntimeError: CUDA error*"]
    result.stdout.fnmatch_lines(crash)
    result.stdout.fnmatch_lines(["out-of-memory-as-before*OOM*OOM*pass*"])


@pytest.mark.parametrize(
    ("ci", "ini", "arguments", "strict"),
    [
        (None, "", [], False),
        ("true", "", [], True),
        ("woodpecker", "", [], True),
        ("false", "", [], False),
        ("", "", [], False),
        ("true", "", ["--no-gpu-strict"], False),
        ("true", "false", [], False),
        (None, "true", [], True),
        (None, "false", ["--gpu-strict", "--no-gpu-strict"], False),
        (None, "true", ["--no-gpu-strict", "--gpu-strict"], True),
    ],
)
def test_the_last_word_on_the_command_line_counts_before_the_ini_file_and_that_before_ci(
    suite, monkeypatch, ci, ini, arguments, strict
):
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    suite.ini(*([f"gpu_strict = {ini}"] if ini else []))
    suite.run("-k", "gemma", *arguments).assert_outcomes(**{"failed" if strict else "passed": 1}, deselected=2)
    assert not (suite.path / "baselines").exists()


def test_what_cannot_be_compared_passes_unless_strict_and_says_what_differs(gated):
    gated.write(test_tuning=SUITE.replace("batch_size=2", "batch_size=4"))
    result = gated.run("--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert set(gated.verdicts().values()) == {"not-comparable"}
    result.stdout.fnmatch_lines(["3 cases not comparable with the baseline: *(batch_size 2 -> 4); record it with*"])
    gated.run("--gpu-strict").assert_outcomes(failed=3)
    gated.write(test_tuning=SUITE.replace("batch_size=2", "batch_size=2, steps=50, warmup=7"))
    gated.run("--gpu-strict").assert_outcomes(passed=3)  # more steps are still the same case
    gated.machine("NVIDIA A100-SXM4-80GB")
    sentence = only_sentence(gated.run("-k", "gemma", "--gpu-strict"), TEST)
    assert f"this machine is nvidia-a100-sxm4-80gb; there are some for {H100_FOLDER}" in sentence


@pytest.mark.parametrize(
    ("free", "processes", "why"),
    [
        (70 * GiB, 0, "70.0 GiB were free when it started, 78.0 GiB when it fitted"),
        (78 * GiB, 1, "it ran beside python (pid 4711, 1.00 GiB) on GPU 0"),
        (78 * GiB - 2**20, 0, None),
    ],
)
def test_running_out_of_what_others_took_says_nothing_of_the_case(suite, free, processes, why):
    suite.occupied(free_bytes=78 * GiB)
    suite.run("--gpu-baseline-update", "-k", "gemma")
    suite.answer(OUT_OF_MEMORY, to=GEMMA)
    suite.occupied(free_bytes=free, processes=processes)
    result = suite.run("-k", "gemma")
    if why is None:  # as much was free as ever
        assert "in 2 of 2 runs" in only_sentence(result, TEST)
        return
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.fnmatch_lines([f"1 case in doubt: {GEMMA} ran out of device memory *; {why}, so the case may still fit*"])
    suite.run("--gpu-strict", "-k", "gemma").assert_outcomes(failed=1, deselected=2)


def test_time_on_a_cpu_is_judged_on_request_against_five_runs(cpu):
    cpu.write(test_tuning=SUITE)
    cpu.run("--gpu-baseline-update", "-o", "gpu_judge_cpu_time=true").assert_outcomes(passed=3)
    assert [len(entry["runs"]) for entry in cpu.baselines("tuning").values()] == [5] * 3
    cpu.answer(recorded("cpu_measured", slower=1.2), to=GEMMA)
    cpu.run().assert_outcomes(passed=3)
    assert "20.0 %" in only_sentence(cpu.run("-o", "gpu_judge_cpu_time=true"), TEST)


def test_reruns_are_bounded_and_without_them_the_limit_is_wider(gated):
    gated.answer(recorded(slower=1.2), to=GEMMA)
    for reruns in range(3):
        before = len(gated.launches)
        gated.run("-k", "gemma", "-o", f"gpu_reruns={reruns}").assert_outcomes(failed=1, deselected=2)
        assert len(gated.launches) - before == reruns + 1
    gated.answer(recorded(slower=1.025), to=GEMMA)
    gated.run("-o", "gpu_reruns=0", "--gpu-strict").assert_outcomes(passed=3)


# The cases of a suite together

MANY = """
import pytest
from pytest_gputrain import Case, grid

CASES = grid(Case(model="gemma-7b", method="lora", sequence_length=512), batch_size=range(1, 13))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_many(gputrain, case):
    gputrain.check(case)
"""
FIRST, LAST = (f"gemma-7b-lora-bf16-batch_size={size}" for size in (1, 12))


@pytest.fixture
def many(h100):
    """Twelve cases with baselines."""
    h100.write(test_many=MANY)
    h100.run("--gpu-baseline-update").assert_outcomes(passed=12)
    return h100


def test_a_day_on_which_all_cases_are_slower_fails_once_and_not_each_case(many):
    many.answer(recorded(slower=1.05))
    before = len(many.launches)
    result = many.run("--gpu-json=report.json", "--junitxml=junit.xml")
    result.assert_outcomes(passed=12, failed=1)
    assert len(many.launches) - before == 12, "ten are asked before one is called slower, and none twice"
    assert set(many.verdicts().values()) == {"inconclusive"}
    sentence = only_sentence(result, "all_cases_together")
    assert sentence.startswith("all cases together regressed, the median one by +5.0 %; ")
    result.stdout.fnmatch_lines([f"FAILED gputrain::all_cases_together - {sentence}"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert sentence in many.report()["notes"]
    junit = many.junit()
    assert (junit[""].get("tests"), junit[""].get("failures")) == ("13", "1")
    assert next(junit["all_cases_together"].iter("failure")).get("message") == sentence
    before = len(many.launches)
    many.run(*(f"test_many.py::test_many[gemma-7b-lora-bf16-batch_size={size}]" for size in (4, 5)))
    assert len(many.launches) - before == 6, "too few to tell a slower day"
    many.run("--gpu-baseline-update").assert_outcomes(passed=12)  # which accepts it


def test_a_slower_case_among_many_fails_alone_also_on_a_slower_day(many):
    for all_slower, slower in ((1.0, 1.05), (1.02, 1.15)):
        many.answer(recorded(slower=all_slower))
        many.answer(recorded(slower=slower), to=FIRST)
        result = many.run()
        assert list(failures(result)) == [f"test_many[{FIRST}]"]
        day = "the time of the median case changed by +2.0 %, which points to the machine and not to a case"
        assert (day in result.outlines) == (all_slower > 1)


def test_a_new_case_in_front_leaves_the_others_the_noise_of_their_suite(h100):
    h100.write(test_many=MANY)
    h100.answer(*(recorded(slower=times) for times in (1.0, 1.06, 0.95, 1.04, 0.97)))
    h100.run("--gpu-baseline-update").assert_outcomes(passed=12)
    h100.answer(recorded())
    h100.answer(recorded(slower=1.1), to=LAST)
    limits = []
    for _ in range(2):
        h100.run("--gpu-json=report.json")
        (metrics,) = (result["verdict"]["metrics"] for result in h100.report()["results"] if result["key"] == LAST)
        (metric,) = (metric for metric in metrics if metric["metric"] == "step_seconds")
        limits.append(metric["limit"] / metric["baseline"])
        file = h100.baseline_file("many", H100_FOLDER)
        stored = json.loads(file.read_text())
        stored["cases"].pop(FIRST, None)
        file.write_text(json.dumps(stored))
    assert limits[1] == pytest.approx(limits[0], rel=1e-3)


TERMINAL = """
def pytest_sessionstart(session):
    session.config.pluginmanager.get_plugin("terminalreporter").isatty = lambda: True
"""


def test_a_terminal_gets_whole_words_and_files_whole_sentences(gated, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    gated.write(terminal_stand_in=TERMINAL)
    gated.pytester.syspathinsert()
    gated.answer(recorded(slower=1.05), to=GEMMA)
    gated.answer(recorded(slower=0.9), to=LLAMA)
    told = gated.run("--junitxml=junit.xml", "--gpu-json=report.json", "-p", "terminal_stand_in").stdout
    ours = told.str()[told.str().index("= FAILURES =") :].splitlines()
    assert [line for line in ours if len(line) > 80 and "junit.xml" not in line] == []
    sentences = {entry["verdict"]["status"]: entry["verdict"]["sentence"] for entry in gated.report()["results"]}
    for status in ("regressed", "improved"):
        assert len(sentences[status]) > 80
        assert sentences[status] in " ".join(" ".join(ours).split())
    assert sentences["regressed"] in (gated.path / "junit.xml").read_text()
