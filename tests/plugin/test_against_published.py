"""Tests ``--gpu-baseline=published``: verdicts, sentences and the table of a run, in one process and under xdist."""

import re

import pytest
from plugin_project import GEMMA, H100, LLAMA, LLAMA_2, assert_refused, failures, recorded

from pytest_gputrain import GiB, MiB

PUBLISHED = "--gpu-baseline=published"
TUNING = """
import pytest
from pytest_gputrain import Case, grid

LLM = Case(batch_size=2, sequence_length=8192, activation_checkpointing=True, gradient_accumulation=32)
CASES = grid(LLM, model=["llama-3.1-8b", "gemma-7b", "llama-2-13b"], method=["lora"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tuning(gputrain, case):
    gputrain.check(case)
"""
QLORA = "gemma-2-9b-qlora-fp32-attention=sdpa-4.49"


def answer(seconds, used):
    """A reply with so many thousand MiB in use, the table's unit."""
    return recorded() | {"step_seconds": [seconds] * 5, "device_used_bytes": used * 1000 * MiB}


@pytest.fixture
def suite(h100):
    """Three published LoRA cases, as fast and as big as published for an H100."""
    h100.write(test_llm_finetuning=TUNING)
    h100.answer(answer(6.4, 36), to=LLAMA)
    h100.answer(answer(9.5, 51), to=GEMMA)
    h100.answer(answer(9.8, 43), to=LLAMA_2)
    return h100


def test_each_case_is_judged_by_its_row_with_what_the_table_was_made_with(suite):
    suite.run(PUBLISHED, "--gpu-strict").assert_outcomes(passed=3)
    told = "3 cases without a baseline or an emulated run, compared with its published memory: *llm-trainer*"
    suite.run().stdout.fnmatch_lines([told])
    suite.answer(answer(7.4, 36), to=LLAMA)
    # What is allocated and reserved is not what was published.
    suite.answer(answer(9.5, 57) | {"peak_allocated_bytes": 70 * GiB, "peak_reserved_bytes": 70 * GiB}, to=GEMMA)
    suite.answer(recorded("h100_out_of_memory"), to=LLAMA_2)
    result = suite.run(PUBLISHED, "--gpu-json=report.json")
    told = {name[len("test_tuning[") : -1]: text.strip() for name, text in failures(result).items()}
    assert re.fullmatch(
        rf"{LLAMA} .*15\.6 %.*7\.40 s.*6\.40 s.*6\.64 s.*llm-trainer.*torch 2\.5\.1, transformers 4\.49\.0 on NVIDIA H100"
        r".*torch 2\.9\.1\+cu128 on NVIDIA H100 80GB HBM3.*",
        told[LLAMA],
    )
    assert "49.8 GiB in use on the device" in told[GEMMA]
    assert told[LLAMA_2].endswith("on NVIDIA H100 it fits")
    row = next(result["published"] for result in suite.report()["results"] if result["key"] == LLAMA)
    assert (row["table"], row["platform"]) == ("llm-trainer", "h100")
    assert row["cells"]["Peak Mem. (Model Mem.)"] == "36 GiB (16 GiB)"
    assert _of_case(_section(result.stdout.str()), 4) == [
        f"{LLAMA} | regressed",
        "sec/step | 6.4 s | 7.40 s | 1.16",
        "device memory | 36,000 MiB | 36,000 MiB | 1.00",
        "model memory | 16,000 MiB | 15,360 MiB | 0.96",
    ]
    suite.ini("gpu_baseline = published")
    assert set(failures(suite.run("--gpu-time-tolerance=15%"))) == {f"test_tuning[{case}]" for case in (GEMMA, LLAMA_2)}


def test_running_out_of_memory_as_published_passes(suite):
    then = 'method=["qlora"], precision=["fp32"], attention=["sdpa-4.49"]'
    suite.write(test_llm_finetuning=TUNING.replace('method=["lora"]', then).replace("gemma-7b", "gemma-2-9b"))
    for reply, verdict in ((recorded("h100_out_of_memory"), "pass"), (answer(20.0, 70), "improved")):
        suite.answer(reply, to=QLORA)
        suite.run(PUBLISHED, "-k", "gemma", "--gpu-json=report.json").assert_outcomes(passed=1, deselected=2)
        assert suite.verdicts() == {QLORA: verdict}


@pytest.mark.parametrize(
    ("device", "batch_size", "arguments", "told"),
    [
        ("NVIDIA H200", 2, [], "3 cases not comparable*cannot be compared: published for a100, h100, rtx_pro_6000 only*"),
        (H100, 2, ["--gpu-scale=tiny"], "3 cases not comparable*"),
        (H100, 4, [], "*it is not the case of its row in llm-trainer (batch_size 2 -> 4)*"),
    ],
    ids=["another platform", "tiny", "another case"],
)
def test_what_has_no_row_passes_as_not_comparable_in_ci_too_unless_strict(
    suite, monkeypatch, device, batch_size, arguments, told
):
    monkeypatch.setenv("CI", "true")
    suite.machine(device)
    suite.write(test_llm_finetuning=TUNING.replace("batch_size=2", f"batch_size={batch_size}"))
    result = suite.run(PUBLISHED, *arguments, "--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert set(suite.verdicts().values()) == {"not-comparable"}
    result.stdout.fnmatch_lines([told])
    assert "Published" not in result.stdout.str()
    suite.run(PUBLISHED, *arguments, "--gpu-strict").assert_outcomes(failed=3)


def test_no_table_is_written_and_a_damaged_one_stops_the_run_with_its_place(suite):
    for update in ("--gpu-baseline-update", "--gpu-baseline-new"):
        assert_refused(suite, "*it cannot update a published table", PUBLISHED, update)
    folder = suite.path / "baselines" / "published"
    folder.mkdir(parents=True)
    (folder / "broken.json").write_text('{"format": 2, "name": "broken"}')
    assert_refused(suite, "*broken.json is not a published table: *restore it from git", PUBLISHED)


def _section(text):
    return [re.sub(r"\s{2,}", " | ", line.strip()) for line in text.partition("= gputrain =")[2].splitlines()]


def _of_case(lines, count):
    """The first ``count`` lines about the Llama case."""
    index = next(place for place, line in enumerate(lines) if line.startswith(LLAMA))
    return lines[index : index + count]
