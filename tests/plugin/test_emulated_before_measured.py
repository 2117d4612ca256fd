"""What recorded emulated runs mean to a run on a real GPU: its order, and what a case without a baseline is held to."""

import msgspec
import pytest
from plugin_project import GEMMA, H100_FOLDER, LLAMA, LLAMA_2, RECORDED, SUITE, failures, only_sentence, recorded

from pytest_gputrain.records import Case, EmulatedRun, OperatorWork, Recorded
from pytest_gputrain.storage.emulated import EmulationStore
from pytest_gputrain.utils.units import GiB

RUN = msgspec.json.decode((RECORDED / "h100_emulated.json").read_bytes(), type=EmulatedRun)
PEAK, FLOPS = recorded()["peak_allocated_bytes"], recorded()["flops_per_step"]


def record(project, model, **figures):
    """Store a run of a case of the suite, by default with the very figures that its process gives."""
    case = Case(batch_size=2, sequence_length=8192, method="lora", model=model)
    figures = {"peak_allocated_bytes": PEAK, "peak_reserved_bytes": 2 * PEAK, "flops_per_step": FLOPS, **figures}
    entry = Recorded(case=case, scale="full", figures=(msgspec.structs.replace(RUN, **figures),))
    EmulationStore(project.path / "baselines").update("h100", "tuning", {str(case): entry})


def test_a_real_run_starts_with_what_is_short_and_warns_of_what_will_not_fit(suite):
    suite.run("-m", "h100")
    for model, moved, fits in (("llama-3.1-8b", 2, False), ("gemma-7b", 3, True), ("llama-2-13b", 1, True)):
        record(suite, model, operators={"aten.add": OperatorWork(calls=1, flops=0, bytes=moved * 10**12)}, fits=fits)
    result = suite.run("-m", "h100")
    assert [launch["id"] for launch in suite.launches] == [LLAMA, GEMMA, LLAMA_2, LLAMA_2, GEMMA, LLAMA]
    result.stdout.fnmatch_lines([f"gputrain: did not fit an emulated h100, and run last: {LLAMA}"])


def test_a_case_without_a_baseline_is_held_to_its_emulated_run_and_says_so(suite):
    record(suite, "gemma-7b")
    result = suite.run("--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    (verdict,) = [entry["verdict"] for entry in suite.report()["results"] if entry["key"] == GEMMA]
    assert (verdict["status"], verdict["held_to"]) == ("new", "emulated")
    assert "within what is recorded on an emulated NVIDIA H100 80GB HBM3" in verdict["sentence"]
    assert "its time is not judged" in verdict["sentence"]
    assert "peak_allocated_bytes" in [metric["metric"] for metric in verdict["metrics"]]
    result.stdout.fnmatch_lines(
        ["1 case without a baseline, compared with an emulated run*", "2 cases without a baseline: *"]
    )
    assert GEMMA in str(failures(suite.run("--gpu-strict")))
    record(suite, "gemma-7b", peak_allocated_bytes=round((PEAK - 2 * GiB) / 1.05))
    sentence = only_sentence(suite.run("-k", "gemma"), f"test_tuning[{GEMMA}]")
    assert " GiB" in sentence
    assert "recorded on an emulated NVIDIA H100 80GB HBM3; it has no baseline here" in sentence
    assert sentence.endswith("record it with --gpu-baseline-update")
    record(suite, "gemma-7b", flops_per_step=round(FLOPS / 1.1))
    assert "computes 10.0 % more" in only_sentence(suite.run("-k", "gemma"), f"test_tuning[{GEMMA}]")
    (suite.path / "baselines" / "emulated" / "h100" / "tuning.json").write_text("{")
    suite.run().assert_outcomes(passed=3)  # a damaged file of emulated runs stops no real run


@pytest.mark.parametrize("fits", [True, False])
def test_the_peak_of_a_run_that_did_not_fit_is_no_limit(suite, fits):
    record(suite, "gemma-7b", peak_allocated_bytes=PEAK // 4, fits=fits)
    suite.run("-k", "gemma").assert_outcomes(passed=0 if fits else 1, failed=1 if fits else 0, deselected=2)


def test_an_emulated_run_says_nothing_to_an_update_a_baseline_another_case_or_another_platform(suite):
    record(suite, "gemma-7b", peak_allocated_bytes=PEAK // 4)
    suite.run("--gpu-baseline-update", "--gpu-runs=1").assert_outcomes(passed=3)
    suite.run().assert_outcomes(passed=3)
    suite.baseline_file("tuning", H100_FOLDER).unlink()
    suite.write(test_tuning=SUITE.replace("batch_size=2", "batch_size=4"))
    suite.run().assert_outcomes(passed=3)
    suite.write(test_tuning=SUITE)
    suite.machine("NVIDIA A100-SXM4-80GB")
    suite.run().assert_outcomes(passed=3)
