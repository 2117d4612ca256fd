"""A GPU that has no baselines yet: its cases are held to the predictions for its platform, and the run says so."""

import msgspec
import pytest
from plugin_project import GEMMA, H100_FOLDER, PREDICTION, SUITE, Project, failures, only_sentence, recorded

from pytest_gputrain.records import Case
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.storage.recorded import PredictionStore
from pytest_gputrain.utils.units import GiB

REPLY = recorded()
PEAK = REPLY["peak_allocated_bytes"]


@pytest.fixture
def suite(h100: Project) -> Project:
    """Three cases of which one is predicted, with the very figures that its process gives."""
    h100.write(test_tuning=SUITE)
    _predict(h100, PEAK)
    return h100


def _predict(project: Project, peak: int, **fields: object) -> None:
    prediction = msgspec.structs.replace(
        PREDICTION, peak_allocated_bytes=peak, **{"flops_per_step": REPLY["flops_per_step"] or 0, **fields}
    )
    case = Case(model="gemma-7b", method="lora", batch_size=2, sequence_length=8192)
    entry = Recorded(case=case, scale="full", figures=(prediction,))
    PredictionStore(project.path / "baselines").update("h100", "tuning", {GEMMA: entry})


def test_a_case_within_its_prediction_is_new_and_says_what_it_was_held_to(suite: Project) -> None:
    result = suite.run("--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    (new,) = [entry for entry in suite.report()["results"] if entry["key"] == GEMMA]
    assert new["verdict"]["status"] == "new"
    assert "within what is predicted for h100" in new["verdict"]["sentence"]
    assert "its time is not judged" in new["verdict"]["sentence"]
    assert "peak_allocated_bytes" in [metric["metric"] for metric in new["verdict"]["metrics"]]
    result.stdout.fnmatch_lines(
        ["1 case without a baseline, compared with its prediction*", "2 cases without a baseline: *"]
    )
    assert GEMMA in str(failures(suite.run("--gpu-strict")))
    (suite.path / "baselines" / "predicted" / "h100" / "tuning.json").write_text("{")
    suite.run().assert_outcomes(passed=3)  # a damaged file of predictions stops no real run


def test_a_case_far_above_its_prediction_fails_on_its_first_run(suite: Project) -> None:
    _predict(suite, round((PEAK - 2 * GiB) / 1.05))
    sentence = only_sentence(suite.run("-k", "gemma"), f"test_tuning[{GEMMA}]")
    assert "more memory" in sentence
    assert "predicted for h100; it has no baseline here" in sentence
    assert sentence.endswith("record it with --gpu-baseline-update")
    suite.answer({**REPLY, "flops_per_step": 110})
    _predict(suite, PEAK, flops_per_step=100)
    assert "computes 10.0 % more" in only_sentence(suite.run("-k", "gemma"), f"test_tuning[{GEMMA}]")


def test_a_prediction_says_nothing_to_an_update_a_baseline_another_case_or_another_platform(suite: Project) -> None:
    _predict(suite, PEAK // 4)
    suite.run("--gpu-baseline-update", "--gpu-runs=1").assert_outcomes(passed=3)
    suite.run().assert_outcomes(passed=3)
    suite.baseline_file("tuning", H100_FOLDER).unlink()
    suite.write(test_tuning=SUITE.replace("batch_size=2", "batch_size=4"))
    suite.run().assert_outcomes(passed=3)
    suite.write(test_tuning=SUITE)
    suite.machine("NVIDIA A100-SXM4-80GB")
    suite.run().assert_outcomes(passed=3)
