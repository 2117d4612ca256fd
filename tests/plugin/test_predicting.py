"""Tests ``--gpu-predict``: predictions of cases, without the device and without training."""

import msgspec
import pytest
from plugin_project import (
    GEMMA,
    H100_FOLDER,
    LLAMA,
    LLAMA_2,
    PREDICTION,
    SUITE,
    assert_refused,
    failures,
    only_sentence,
    recorded,
    skips,
)

from pytest_gputrain.records import Case
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.storage.recorded import PredictionStore
from pytest_gputrain.utils.units import GiB

PREDICT = ("--gpu-predict", "--gpu-platform=h100")


OWN = """
def build(setup):
    import torch

    weight = torch.zeros(1024, {width}, device=setup.device, requires_grad=True)

    def step():
        loss = (weight * 2).sum()
        loss.backward()
        return loss.detach()

    return step


def test_it(gputrain):
    gputrain.check(build, precision="fp32")
"""
TEST = "test_it"

ZOO = """
import pytest
from pytest_gputrain import Case, grid

CASES = grid(Case(precision="fp32", batch_size=4), model=["wide-deep", "ctr-dnn"], platforms=["h100"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tables(gputrain, case):
    gputrain.check(case)
"""


def own(project, width):
    (project.path / "test_mine.py").write_text(OWN.format(width=width))


def predictions(project, suite="mine"):
    return project.baseline_file(suite, "predicted/h100")


def test_it_needs_one_platform_and_refuses_what_it_cannot_do(project):
    own(project, 1024)
    for arguments, problem in {
        ("-m", "h100 or a100"): "-m names h100, a100",
        ("-m", "not h100"): "none is named",
        ("-m", "h1000"): "none is named (did you mean 'h100'?)",
    }.items():
        sentence = f"--gpu-predict predicts for one platform, and {problem}; add --gpu-platform=h100, or -m h100"
        assert_refused(project, sentence, "--gpu-predict", *arguments)
    for other in ("--gpu-loss", "--gpu-baseline=published", "--gpu-runs=3", "--gpu-isolation=inline"):
        given = "--gpu-loss=20" if other == "--gpu-loss" else other
        assert_refused(project, f"--gpu-predict and {other} contradict each other: it trains nothing, *", *PREDICT, given)


def test_a_recorded_prediction_passes_and_a_bigger_one_fails_with_what_grew(project):
    own(project, 1024)
    sentence = only_sentence(project.run(*PREDICT, "--gpu-strict"), TEST)
    assert "has no recorded prediction for H100" in sentence
    assert sentence.endswith("record it with --gpu-predict --gpu-baseline-update-new-only (strict)")
    project.run(*PREDICT).assert_outcomes(passed=1)
    project.run(*PREDICT, "--gpu-baseline-update").stdout.fnmatch_lines(
        ["*1 baseline recorded in *predicted/h100/mine.json*"]
    )
    before = predictions(project).read_bytes()
    project.run(*PREDICT, "--gpu-baseline-update").assert_outcomes(passed=1)
    assert predictions(project).read_bytes() == before, "the same prediction is the same bytes"
    project.run(*PREDICT, "--gpu-strict").assert_outcomes(passed=1)
    own(project, 2048)
    sentence = only_sentence(project.run(*PREDICT), TEST)
    assert sentence.startswith(
        "build-fp32 needs 12.0 MiB (100.0 %) more in forward, 24.0 MiB against 12.0 MiB allocated, most of it 8.00 MiB "
        "(float32[1024, 2048] by zeros in build), and more in build, backward and between backward passes; moves "
    )


def test_what_does_not_fit_fails_until_that_is_recorded(project, predictor):
    own(project, 1024)
    predictor.reply = msgspec.structs.replace(PREDICTION, fits=False, refused=PREDICTION.largest["backward"][0])
    assert "does not fit H100" in only_sentence(project.run(*PREDICT), TEST)
    project.run(*PREDICT, "--gpu-baseline-update").assert_outcomes(passed=1)
    result = project.run(*PREDICT, "--gpu-strict")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*does not fit: build-fp32*"])


@pytest.mark.slow
def test_the_suite_is_predicted_recorded_and_gated_under_xdist(project):
    pytest.importorskip("xdist")
    project.write(test_tables=ZOO)
    project.spawn("-m", "h100", "--gpu-predict", "-n2", "--gpu-baseline-update").assert_outcomes(passed=2)
    keys = set(msgspec.json.decode(predictions(project, "tables").read_bytes())["cases"])
    assert keys == {"wide-deep-full-fp32", "ctr-dnn-full-fp32"}
    result = project.run("-m", "h100", "--gpu-predict", "--gpu-strict")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["tables on H100 x1 (predicted), full scale*", "*predicted for h100*nothing was trained"])


def test_a_known_prediction_is_not_made_again(project, predictor, monkeypatch):
    project.write(test_tables=ZOO)

    def count(*arguments):
        project.run(*PREDICT, "-k", "wide-deep", *arguments).assert_outcomes(passed=1, deselected=1)
        return len(predictor.tasks)

    assert [count(), count()] == [1, 1]
    monkeypatch.setenv("TRANSFORMERS_SOMETHING", "1")
    assert [count(), count("--cache-clear")] == [2, 3]


def test_on_a_cpu_the_tiny_scale_is_predicted(project, predictor):
    project.write(test_tables=ZOO)
    project.run("-m", "cpu", "--gpu-predict", "--gpu-json=report.json").assert_outcomes(passed=2)
    assert {task.scale for task in predictor.tasks} == {"tiny"}
    assert {result["scale"] for result in project.report()["results"]} == {"tiny"}


def test_that_nothing_was_predicted_is_told_and_fails_where_strict(project):
    project.write(test_tables=ZOO)
    for strict, code in (((), 0), (("--gpu-strict",), 1)):
        result = project.run("--gpu-predict", "--gpu-platform=a100", "--gpu-json=report.json", *strict)
        result.stdout.fnmatch_lines(["nothing was predicted: every case was skipped (not declared for a100, *)"])
        assert set(skips(result).values()) == {"not declared for a100, which this run predicts for"}
        assert result.ret == project.report()["exit_status"] == code


def test_files_of_one_name_do_not_share_a_baseline(project, predictor):
    for folder in ("first", "second"):
        (project.path / folder).mkdir()
        (project.path / folder / "test_mine.py").write_text(OWN.format(width=1024))
    project.run("first", *PREDICT, "--gpu-baseline-update").assert_outcomes(passed=1)
    before = predictions(project).read_bytes()
    sentence = only_sentence(project.run("second", *PREDICT, "--gpu-baseline-update"), TEST)
    assert sentence == (
        "build-fp32 of second/test_mine.py would share its baseline with that of first/test_mine.py: both are the suite "
        "mine; rename a file"
    )
    assert predictions(project).read_bytes() == before
    # A file that moved is another matter.
    (project.path / "first" / "test_mine.py").unlink()
    project.run("second", *PREDICT, "--gpu-baseline-update").assert_outcomes(passed=1)


def test_memory_can_be_compared_and_time_cannot(project, predictor):
    project.write(
        test_mine=f"""{OWN.format(width=1)}

def test_memory(gputrain):
    assert gputrain.measure(build, precision="fp32").peak_allocated_bytes == {PREDICTION.peak_allocated_bytes}


def test_time(gputrain):
    assert gputrain.measure(build, needs=("median_step_seconds",), precision="fp32").median_step_seconds > 0


def test_time_is_none(gputrain):
    figures = gputrain.check(build, precision="fp32").figures
    assert (figures.median_step_seconds, figures.step_seconds) == (None, None)


def test_misspelt_need(gputrain):
    gputrain.measure(build, needs=["step_second"], precision="fp32")


def test_closure(gputrain):
    gputrain.check(lambda setup: build(setup), inline=True)


def test_compiled(gputrain):
    from pytest_gputrain import Case

    gputrain.check(Case(model="phi-3-mini-128k", sequence_length=512, compile="default"))
"""
    )
    result = project.run(*PREDICT)
    result.assert_outcomes(passed=3, skipped=3, failed=1)
    (misspelt,) = failures(result).values()
    assert "needs='step_second' is not a figure of a case (did you mean 'step_seconds'?)" in misspelt
    assert skips(result) == {
        "test_time": "needs median_step_seconds, which cannot be predicted",
        "test_closure": "runs inline, but a prediction needs a process of its own",
        "test_compiled": "is compiled, and a prediction does not know the compiled code",
    }


# What predictions mean to a real run

PEAK, FLOPS = recorded()["peak_allocated_bytes"], recorded()["flops_per_step"]


def record(project, model, **figures):
    """Store a prediction of a case of the suite, by default with the very figures that its process gives."""
    case = Case(batch_size=2, sequence_length=8192, method="lora", model=model)
    prediction = msgspec.structs.replace(PREDICTION, **{"peak_allocated_bytes": PEAK, "flops_per_step": FLOPS, **figures})
    entry = Recorded(case=case, scale="full", figures=(prediction,))
    PredictionStore(project.path / "baselines").update("h100", "tuning", {str(case): entry})


def test_a_real_run_starts_with_what_is_short_and_warns_of_what_will_not_fit(suite):
    suite.run("-m", "h100")
    for model, seconds, fits in (("llama-3.1-8b", 2.0, False), ("gemma-7b", 3.0, True), ("llama-2-13b", 1.0, True)):
        record(suite, model, roofline_seconds=seconds, fits=fits)
    result = suite.run("-m", "h100")
    assert [launch["id"] for launch in suite.launches] == [LLAMA, GEMMA, LLAMA_2, LLAMA_2, GEMMA, LLAMA]
    result.stdout.fnmatch_lines([f"gputrain: predicted not to fit h100, and run last: {LLAMA}"])


def test_a_case_without_a_baseline_is_held_to_its_prediction_and_says_so(suite):
    record(suite, "gemma-7b")
    result = suite.run("--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    (verdict,) = [entry["verdict"] for entry in suite.report()["results"] if entry["key"] == GEMMA]
    assert verdict["status"] == "new"
    assert "within what is predicted for h100" in verdict["sentence"]
    assert "its time is not judged" in verdict["sentence"]
    assert "peak_allocated_bytes" in [metric["metric"] for metric in verdict["metrics"]]
    result.stdout.fnmatch_lines(
        ["1 case without a baseline, compared with its prediction*", "2 cases without a baseline: *"]
    )
    assert GEMMA in str(failures(suite.run("--gpu-strict")))
    record(suite, "gemma-7b", peak_allocated_bytes=round((PEAK - 2 * GiB) / 1.05))
    sentence = only_sentence(suite.run("-k", "gemma"), f"test_tuning[{GEMMA}]")
    assert "more memory" in sentence
    assert "predicted for h100; it has no baseline here" in sentence
    assert sentence.endswith("record it with --gpu-baseline-update")
    record(suite, "gemma-7b", flops_per_step=round(FLOPS / 1.1))
    assert "computes 10.0 % more" in only_sentence(suite.run("-k", "gemma"), f"test_tuning[{GEMMA}]")
    (suite.path / "baselines" / "predicted" / "h100" / "tuning.json").write_text("{")
    suite.run().assert_outcomes(passed=3)  # a damaged file of predictions stops no real run


def test_a_prediction_says_nothing_to_an_update_a_baseline_another_case_or_another_platform(suite):
    record(suite, "gemma-7b", peak_allocated_bytes=PEAK // 4)
    suite.run("--gpu-baseline-update", "--gpu-runs=1").assert_outcomes(passed=3)
    suite.run().assert_outcomes(passed=3)
    suite.baseline_file("tuning", H100_FOLDER).unlink()
    suite.write(test_tuning=SUITE.replace("batch_size=2", "batch_size=4"))
    suite.run().assert_outcomes(passed=3)
    suite.write(test_tuning=SUITE)
    suite.machine("NVIDIA A100-SXM4-80GB")
    suite.run().assert_outcomes(passed=3)


# Own code that the marker of a platform leaves out

HINT = (
    "-m 'h100' left out the tests in test_mine.py, which carry no platform's marker: mark them with @pytest.mark.h100, or "
    "give --gpu-platform=h100 instead of -m"
)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_own_code_without_the_marker_that_selects_it_is_told(project, workers):
    own(project, 1024)
    result = project.run("-m", "h100", "--gpu-predict", *workers)
    assert [line for line in result.outlines if "left out" in line] == [HINT]
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    project.write(test_tables=ZOO)
    result = project.run("-m", "h100", "--collect-only", "--gpu-predict", *workers)
    assert [line for line in result.outlines if "left out" in line] == [HINT], "beside others that are selected"
    for arguments in (("-m", "h100", "-k", "wide"), ("-m", "not h100"), ("-m", "slow"), ("-k", "wide")):
        assert "left out" not in project.run("--collect-only", *PREDICT, *arguments).stdout.str()
