"""Tests what passes and what fails: every verdict, strict runs, further processes, and days on which all are slower."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from plugin_project import (
    GEMMA,
    H100_FOLDER,
    LLAMA,
    LLAMA_2,
    SUITE,
    Project,
    failures,
    junit_properties,
    only_sentence,
    recorded,
)

from pytest_gputrain import GiB

TEST = f"test_tuning[{GEMMA}]"
OUT_OF_MEMORY, CRASHED = recorded("h100_out_of_memory"), recorded("crashed")
NEWER = {"packages": recorded()["environment"]["packages"] | {"torch": "2.10.0+cu130"}, "runtime": "13.0"}
FAILS = {"regressed": "always", "over-limit": "always", "failed": "always", "inconclusive": "strict", "new": "strict"}
"""Of all other verdicts, a test passes."""


@dataclass(frozen=True)
class Row:
    """What the processes of a case reply, and what that means."""

    now: tuple[dict[str, Any], ...]
    verdict: str
    sentence: str = "*"
    processes: int = 1
    before: dict[str, Any] | None = None
    """When its baseline is recorded, which a crash prevents; as always where it is None."""
    mark: str = ""


ROWS = {
    "as-before": Row((recorded(),), "pass"),
    "little-slower": Row((recorded(slower=1.02),), "pass", processes=3),
    "slower": Row(
        (recorded(slower=1.05),),
        "regressed",
        "slower-bf16 is 5.0 % slower at 4.94 s a step than baseline 4.70 s +- 0.03 (5 runs); limit 3.0 %; "
        "3 of 3 fresh runs slower (baseline of 20*); same environment",
        processes=3,
    ),
    "bigger": Row(
        (recorded(bigger=2 * GiB),),
        "regressed",
        "bigger-bf16 needs 2.00 GiB (5.7 %) more memory: 37.0 GiB against 35.0 GiB peak allocated in 3 runs, limit 35.8 *",
        processes=3,
    ),
    "slower-and-bigger": Row(
        (recorded(slower=1.1, bigger=2 * GiB),),
        "regressed",
        "slower-and-bigger-bf16 is 10.0 % slower * and needs 2.00 GiB (5.7 %) more memory*",
        processes=3,
    ),
    "with-newer-torch": Row(
        (recorded(slower=1.05, **NEWER),),
        "regressed",
        "* since then: torch 2.9.1+cu128 -> 2.10.0+cu130, runtime 12.8 -> 13.0",
        processes=3,
    ),
    "faster": Row((recorded(slower=0.9),), "improved", "* 10.0 % faster*", processes=3),
    "new": Row(
        (recorded(),), "new", "new-bf16 has no baseline; record it with --gpu-baseline-update-new-only", before=CRASHED
    ),
    "limited": Row((recorded(),), "over-limit", processes=3, mark="gpu_limit(memory='1 GiB')"),
    # Another run of pytest, because ten cases would tell a slower day.
    "out-of-memory": Row(
        (OUT_OF_MEMORY,),
        "regressed",
        "out-of-memory-bf16 ran out of device memory (warmup in step 1): CUDA out of *fitted with 35.0 GiB allocated*",
        processes=2,
    ),
    "out-of-memory-and-new": Row(
        (OUT_OF_MEMORY,), "failed", "*; if that is expected, record it with --gpu-baseline-update", before=CRASHED
    ),
    "out-of-memory-as-before": Row((OUT_OF_MEMORY,), "pass", before=OUT_OF_MEMORY),
    "fits-again": Row((recorded(),), "improved", before=OUT_OF_MEMORY),
    "out-of-memory-once": Row(
        (OUT_OF_MEMORY, recorded()), "inconclusive", "* in 1 of 3 runs; *; same environment", processes=3
    ),
    "bigger-once": Row((recorded(bigger=2 * GiB), recorded()), "pass", processes=2),
    "slower-once": Row((recorded(slower=1.2), recorded()), "pass", processes=4),
    "crashed": Row(
        (CRASHED,),
        "failed",
        "crashed-bf16 gave no measurement (measure in step 4): "
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    ),
    "crashed-when-measured-again": Row((recorded(slower=1.2), CRASHED), "failed", "* gave no measurement *", processes=2),
}
NOTES = [
    [
        "1 case without a baseline: new-bf16 has no baseline; *",
        "1 case better than the baseline: faster-bf16 *",
    ],
    [
        "1 case in doubt: out-of-memory-once-bf16 ran out of device memory *",
        "slower-once-bf16: step time measured 4 times: +20.0 %, +0.0 %, +0.0 %, +0.0 %",
    ],
]
"""Of the rows in groups of nine."""

OWN = """
import pytest


def build(setup):
    raise AssertionError("its replies are recorded")


@pytest.mark.parametrize("name", [{names}])
def test_it(gputrain, name):
    gputrain.check(build, model=name)
"""


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("group", [0, 1])
def test_each_verdict_has_its_sentence_and_passes_or_fails(h100: Project, group: int, strict: bool) -> None:
    rows = {name: ROWS[name] for name in list(ROWS)[9 * group : 9 * group + 9]}
    names = (f'pytest.param("{name}", marks={f"pytest.mark.{row.mark}" if row.mark else []})' for name, row in rows.items())
    h100.write(test_own=OWN.format(names=", ".join(names)))
    for name, row in rows.items():
        h100.answer(row.before or recorded(), to=f"{name}-bf16")
    h100.run("--gpu-baseline-update")
    for name, row in rows.items():
        h100.answer(*row.now, to=f"{name}-bf16")
    result = h100.run("--gpu-json=report.json", "--junitxml=junit.xml", *(["--gpu-strict"] if strict else []))

    entries = {str(entry["key"]).removesuffix("-bf16"): entry for entry in h100.report()["results"]}
    assert {name: entry["verdict"]["status"] for name, entry in entries.items()} == {
        name: row.verdict for name, row in rows.items()
    }
    assert {name: len(entry["replies"]) for name, entry in entries.items()} == {
        name: row.processes for name, row in rows.items()
    }
    for name, row in rows.items():
        pytest.LineMatcher([entries[name]["verdict"]["sentence"]]).fnmatch_lines([row.sentence])
    fails = {name for name, row in rows.items() if FAILS.get(row.verdict) in ("always", strict and "strict")}
    told = {name[len("test_it[") : -1]: text.strip() for name, text in failures(result).items()}
    assert told == {
        name: entries[name]["verdict"]["sentence"] + (" (strict)" if FAILS[rows[name].verdict] == "strict" else "")
        for name in fails
    }
    assert result.ret == h100.report()["exit_status"] == pytest.ExitCode.TESTS_FAILED
    xml = h100.junit()[""]
    assert (xml.get("tests"), xml.get("failures"), xml.get("errors")) == ("9", str(len(fails)), "0")
    for case in xml:
        name = str(case.get("name"))[len("test_it[") : -1]
        assert junit_properties(case)["gputrain.verdict"] == rows[name].verdict
        messages = [entry.get("message") for entry in case.iter("failure")]
        assert messages == [f"Failed: {told[name]}" for name in {name} & fails]
    if not strict:
        result.stdout.fnmatch_lines_random(NOTES[group])
    if group == 1:
        crash = ["*worker of crashed-bf16*", "Traceback (most recent call last):", "*RuntimeError: CUDA error*"]
        result.stdout.fnmatch_lines(crash)
        result.stdout.fnmatch_lines(["out-of-memory-as-before*OOM*OOM*pass*"])


def test_a_first_run_passes_makes_no_baseline_and_fails_where_strict(suite: Project) -> None:
    suite.run().assert_outcomes(passed=3)
    assert not (suite.path / "baselines").exists()
    (sentence,) = failures(suite.run("--gpu-strict", "-k", "gemma")).values()
    assert sentence == f"{GEMMA} has no baseline; record it with --gpu-baseline-update-new-only (strict)"


@pytest.mark.parametrize(
    ("ci", "ini", "arguments", "strict"),
    [
        (None, "", [], False),
        ("true", "", [], True),
        ("woodpecker", "", [], True),
        ("false", "", [], False),
        ("", "", [], False),
        ("true", "", ["--no-gpu-strict"], False),
        ("true", "", ["-o", "gpu_strict=false"], False),
        ("true", "false", [], False),
        (None, "true", [], True),
        (None, "true", ["--no-gpu-strict"], False),
        (None, "false", ["--gpu-strict"], True),
        (None, "false", ["--gpu-strict", "--no-gpu-strict"], False),
        (None, "true", ["--no-gpu-strict", "--gpu-strict"], True),
        (None, "false", ["--no-gpu-strict", "--gpu-strict", "--no-gpu-strict"], False),
    ],
)
def test_the_last_word_on_the_command_line_counts_before_the_ini_file_and_that_before_ci(
    suite: Project, monkeypatch: pytest.MonkeyPatch, ci: str | None, ini: str, arguments: list[str], strict: bool
) -> None:
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    suite.ini(*([f"gpu_strict = {ini}"] if ini else []))
    suite.run("-k", "gemma", *arguments).assert_outcomes(**{"failed" if strict else "passed": 1}, deselected=2)


def test_ci_fails_cases_that_only_another_device_has_and_names_it(gated: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    gated.machine("NVIDIA A100-SXM4-80GB")
    monkeypatch.setenv("CI", "true")
    sentence = only_sentence(gated.run("-k", "gemma"), TEST)
    assert f"this machine is nvidia-a100-sxm4-80gb; there are some for {H100_FOLDER}" in sentence


def test_changed_knobs_are_not_compared_and_pass_unless_strict(gated: Project) -> None:
    gated.write(test_tuning=SUITE.replace("batch_size=2", "batch_size=4"))
    result = gated.run("--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert set(gated.verdicts().values()) == {"not-comparable"}
    result.stdout.fnmatch_lines(["3 cases not comparable with the baseline: *(batch_size 2 -> 4); record it with*"])
    gated.run("--gpu-strict").assert_outcomes(failed=3)
    gated.write(test_tuning=SUITE.replace("batch_size=2", "batch_size=2, steps=50, warmup=7"))
    gated.run("--gpu-strict").assert_outcomes(passed=3)  # more steps are still the same case


@pytest.mark.parametrize(
    ("free", "processes", "why"),
    [
        (70 * GiB, 0, "70.0 GiB were free when it started, 78.0 GiB for its baseline"),
        (78 * GiB, 1, "it ran beside python (pid 4711, 1.00 GiB) on GPU 0"),
        (78 * GiB - 2**20, 0, None),
    ],
)
def test_running_out_of_what_others_took_says_nothing_of_the_case(
    suite: Project, free: int, processes: int, why: str | None
) -> None:
    suite.occupied(free_bytes=78 * GiB)
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    assert [run["free_bytes"] for run in suite.baselines("tuning", H100_FOLDER)[GEMMA]["runs"]] == [78 * GiB] * 5
    suite.answer(OUT_OF_MEMORY, to=GEMMA)
    suite.occupied(free_bytes=free, processes=processes)
    before = len(suite.launches)
    result = suite.run("--gpu-json=report.json")
    if why is None:  # as much was free as ever
        assert "in 2 of 2 runs" in only_sentence(result, TEST)
        return
    result.assert_outcomes(passed=3)
    assert suite.verdicts() == {LLAMA: "pass", GEMMA: "inconclusive", LLAMA_2: "pass"}
    assert len(suite.launches) - before == 3
    doubt = f"1 case in doubt: {GEMMA} ran out of device memory *; {why}, so the case may still fit*"
    result.stdout.fnmatch_lines([doubt])
    suite.run("--gpu-strict", "-k", "gemma").assert_outcomes(failed=1, deselected=2)


GROWING = """
import pytest


def build(setup):
    from pathlib import Path

    import torch

    size = int(Path(__file__).with_name("size.txt").read_text())
    weight = torch.zeros(size, 1024, requires_grad=True)

    def step():
        loss = (weight**2).sum()
        loss.backward()
        return loss.detach()

    return step


def other(setup):
    import torch

    weight = torch.zeros(64, 64)
    return lambda: weight.sum()


def test_before(gputrain):
    gputrain.check(other, precision="fp32", steps=3, warmup=1)


def test_grown(gputrain):
    gputrain.check(build, precision="fp32", steps=3, warmup=1)


def test_after():
    pass
"""


def test_memory_growth_measured_here_fails_exactly_its_test(project: Project) -> None:
    project.write(test_growing=GROWING)
    size = project.path / "size.txt"
    size.write_text("1024")
    project.run("--gpu-baseline-update").assert_outcomes(passed=3)
    size.write_text("1280")
    result = project.run("--junitxml=junit.xml")
    result.assert_outcomes(passed=2, failed=1)
    sentence = only_sentence(result, "test_grown")
    assert sentence.startswith("build-fp32 needs 5.00 MiB (25.0 %) more memory: 25.0 MiB against 20.0 MiB peak allocated, ")
    grown = "15.0 MiB (3 x float32[1280, 1024] by mul in backward at test_growing.py:14)"
    assert f", limit 20.4 MiB, in backward, now {grown}, " in sentence
    assert ", and more in build, forward and between backward passes (baseline of 20" in sentence
    assert sentence.endswith("); same environment")

    suite = project.junit()[""]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "0")
    properties = junit_properties(project.junit()["test_grown"])
    assert properties["gputrain.case"] == "build-fp32@tiny"
    assert properties["gputrain.verdict"] == "regressed"
    assert int(properties["gputrain.peak_allocated_bytes"]) >= 5 * 1280 * 1024 * 4
    assert float(properties["gputrain.median_step_seconds"]) > 0
    (failure,) = suite.iter("failure")
    assert failure.text is not None
    assert sentence in failure.text


def test_time_on_a_cpu_is_judged_on_request_against_five_runs(project: Project) -> None:
    project.machine(None)
    project.write(test_tuning=SUITE)
    project.run("--gpu-baseline-update", "-o", "gpu_judge_cpu_time=true").assert_outcomes(passed=3)
    assert [len(entry["runs"]) for entry in project.baselines("tuning").values()] == [5] * 3
    project.answer(recorded("cpu_measured", slower=1.2), to=GEMMA)
    project.run().assert_outcomes(passed=3)
    assert "is 20.0 % slower" in only_sentence(project.run("-o", "gpu_judge_cpu_time=true"), TEST)


def _launches(project: Project, *arguments: str) -> list[str]:
    """Ids of the cases that a run launches, in order."""
    before = len(project.launches)
    project.run(*arguments)
    return [launched["id"] for launched in project.launches[before:]]


def test_reruns_are_bounded_and_without_them_the_limit_is_wider(gated: Project) -> None:
    gated.answer(recorded(slower=1.2), to=GEMMA)
    for reruns, launches in (("0", 1), ("1", 2), ("2", 3)):
        assert _launches(gated, "-k", "gemma", "-o", f"gpu_reruns={reruns}") == [GEMMA] * launches
    gated.answer(recorded(slower=1.12), to=GEMMA)
    assert list(failures(gated.run("-o", "gpu_reruns=0"))) == [TEST]
    gated.answer(recorded(slower=1.025), to=GEMMA)
    gated.run("-o", "gpu_reruns=0", "--gpu-strict").assert_outcomes(passed=3)


MANY = """
import pytest
from pytest_gputrain import Case, grid

CASES = grid(Case(model="gemma-7b", method="lora", sequence_length=512), batch_size=range(1, 13))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_many(gputrain, case):
    gputrain.check(case)
"""


@pytest.fixture
def many(h100: Project) -> Project:
    """Twelve cases with baselines."""
    h100.write(test_many=MANY)
    h100.run("--gpu-baseline-update").assert_outcomes(passed=12)
    return h100


def test_a_day_on_which_all_cases_are_slower_fails_once_and_not_each_case(many: Project) -> None:
    many.answer(recorded(slower=1.05))
    before = len(many.launches)
    result = many.run("--gpu-json=report.json", "--junitxml=junit.xml")
    result.assert_outcomes(passed=12, failed=1)
    assert len(many.launches) - before == 12, "ten are asked before one is called slower, and none twice"
    assert set(many.verdicts().values()) == {"inconclusive"}
    sentence = only_sentence(result, "all_cases_together")
    assert (
        sentence
        == "all cases together regressed: the median case is +5.0 % off its baseline; look for a change that all share"
    )
    result.stdout.fnmatch_lines([f"FAILED gputrain::all_cases_together - {sentence}"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert sentence in many.report()["notes"]
    suite = many.junit()[""]
    assert (suite.get("tests"), suite.get("failures")) == ("13", "1")
    (entry,) = (case for case in suite if list(case.iter("failure")))
    assert (entry.get("classname"), entry.get("name")) == ("gputrain", "all_cases_together")
    assert next(entry.iter("failure")).get("message") == sentence
    two = [f"test_many.py::test_many[gemma-7b-lora-bf16-batch_size={size}]" for size in (4, 5)]
    assert len(_launches(many, *two)) == 6  # too few to tell a slower day


def test_a_slower_case_among_many_fails_alone_also_on_a_slower_day(many: Project) -> None:
    slow = "gemma-7b-lora-bf16-batch_size=1"
    many.answer(recorded(slower=1.05), to=slow)
    result = many.run()
    assert list(failures(result)) == [f"test_many[{slow}]"]
    assert "all cases together" not in result.stdout.str()
    many.answer(recorded(slower=1.02))
    many.answer(recorded(slower=1.15), to=slow)
    result = many.run()
    assert list(failures(result)) == [f"test_many[{slow}]"]
    result.stdout.fnmatch_lines(
        ["the median case is +2.0 % off its baseline, which points to the machine and not to a case"]
    )


def test_a_new_case_in_front_leaves_the_others_the_noise_of_their_suite(h100: Project) -> None:
    h100.write(test_many=MANY)
    h100.answer(*(recorded(slower=times) for times in (1.0, 1.06, 0.95, 1.04, 0.97)))
    h100.run("--gpu-baseline-update").assert_outcomes(passed=12)
    first, slow = (f"gemma-7b-lora-bf16-batch_size={size}" for size in (1, 12))
    h100.answer(recorded())
    h100.answer(recorded(slower=1.1), to=slow)
    limits = []
    for _ in range(2):
        h100.run("--gpu-json=report.json")
        (metrics,) = (result["verdict"]["metrics"] for result in h100.report()["results"] if result["key"] == slow)
        (metric,) = (metric for metric in metrics if metric["metric"] == "step_seconds")
        limits.append(metric["limit"] / metric["baseline"])
        file = h100.baseline_file("many", H100_FOLDER)
        stored = json.loads(file.read_text())
        stored["cases"].pop(first, None)
        file.write_text(json.dumps(stored))
    assert limits[1] == pytest.approx(limits[0], rel=1e-3)
