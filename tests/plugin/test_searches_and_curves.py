"""Tests ``--gpu-find-batch`` and ``--gpu-loss`` from the command line to the report."""

import pytest
from plugin_project import GEMMA, SUITE, failures, only_sentence, recorded, table_rows


@pytest.fixture
def suite(h100):
    """Three cases of which batches up to 6 fit; the recorded replies have the batch that was asked for."""
    h100.write(test_tuning=SUITE)
    for batch in range(1, 9):
        fitting = {**recorded("h100_measured"), "batch_size": batch}
        h100.answer(fitting if batch <= 6 else recorded("h100_out_of_memory"), to=f"{GEMMA}-batch_size={batch}")
    return h100


def _search(project):
    (result,) = project.report()["results"]
    assert result["verdict"] is None
    return result["search"]


def _answer_losses(project, **losses):
    for precision, curve in losses.items():
        name = f"gemma-7b-lora-{precision.replace('_', '-')}"
        project.answer({**recorded("h100_measured"), "losses": curve}, to=name)


FALLING = [10 - step / 4 for step in range(30)]


def test_the_largest_and_the_fastest_batch_are_found_and_judged_by_no_baseline(suite):
    suite.run("--gpu-baseline-update", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    (suite.path / "launches.jsonl").unlink()
    result = suite.run("--gpu-find-batch", "--gpu-strict", "--gpu-json=report.json", "-k", "gemma")
    result.assert_outcomes(passed=1, deselected=2)
    tried = [launched["id"].rpartition("=")[2] for launched in suite.launches]
    assert tried == ["1", "2", "4", "8", "6", "7", "5"]
    assert (_search(suite)["largest"], _search(suite)["fastest"]) == (6, 6)
    assert suite.report()["results"][0]["key"] == GEMMA
    (row,) = table_rows(result.stdout.str())
    assert row.startswith("Gemma 7B | LoRA | bf16 | ")
    assert row.endswith("(6) | 6 | 7 | searched")
    # Nor is it a baseline: a report of searches has no figures of the cases themselves.
    result = suite.run("--gpu-baseline=report.json", "-k", "gemma")
    result.stdout.fnmatch_lines(["*report.json has no figures of it*"])


def test_the_maximum_bounds_the_search_which_is_made_once_for_several_tests(suite):
    suite.write(test_tuning=SUITE.replace("gputrain.check(case)", "gputrain.check(case); gputrain.measure(case)"))
    result = suite.run("--gpu-find-batch", "-o", "gpu_find_batch_max=3", "-k", "gemma")
    assert [launched["id"].rpartition("=")[2] for launched in suite.launches] == ["1", "2", "3"]
    result.stdout.fnmatch_lines(["*the largest batch tried, 3, fits; a higher gpu_find_batch_max allows more"])


@pytest.mark.parametrize(
    ("batch", "name", "outcomes", "largest", "sentence"),
    [
        (1, "h100_out_of_memory", ["out_of_memory"], None, "* ran out of device memory (warmup in step 1): *"),
        (4, "crashed", ["fits", "fits", "crashed"], None, f"{GEMMA}-batch_size=4 gave no measurement (*"),
        (4, "timed_out", ["fits", "fits", "timed_out", "fits"], 3, None),
    ],
)
def test_a_try_that_does_not_fit_bounds_the_search_and_one_that_crashes_fails_it(
    suite, batch, name, outcomes, largest, sentence
):
    suite.answer(recorded(name), to=f"{GEMMA}-batch_size={batch}")
    result = suite.run("--gpu-find-batch", "--gpu-json=report.json", "-k", "gemma")
    assert [attempt["outcome"] for attempt in _search(suite)["tries"]] == outcomes
    assert _search(suite)["largest"] == largest
    told = [text.strip() for text in failures(result).values()]
    pytest.LineMatcher(told).fnmatch_lines([sentence] if sentence else [])
    assert len(told) == (sentence is not None)


def test_what_cannot_be_studied_is_told(h100):
    h100.write(test_mine="def test_it(gputrain):\n    gputrain.check(lambda setup: None, inline=True, model='mine')\n")
    for option in ("--gpu-find-batch", "--gpu-loss=20"):
        assert only_sentence(h100.run(option), "test_it") == (
            "mine-bf16 runs inline, but --gpu-find-batch and --gpu-loss need fresh processes; deselect its test"
        )


def test_loss_curves_of_each_precision_are_kept_and_shown(h100):
    h100.write(test_tuning=SUITE)
    _answer_losses(h100, fp32=FALLING, bf16_amp=FALLING, fp16_amp=FALLING, bf16=[10.0] * 30)
    result = h100.run("--gpu-loss=30", "--gpu-json=report.json", "-k", "gemma")
    result.assert_outcomes(passed=1, deselected=2)
    assert [launched["id"].removeprefix("gemma-7b-lora-") for launched in h100.launches] == [
        "fp32",
        "bf16-amp",
        "fp16-amp",
        "bf16",
    ]
    assert {(launched["steps"], launched["warmup"]) for launched in h100.launches} == {(30, 0)}
    (case_result,) = h100.report()["results"]
    assert case_result["loss_curves"][0]["losses"] == FALLING
    assert [row.rpartition(" | ")[2] for row in table_rows(result.stdout.str())] == [*["converging"] * 3, "flat"]


def test_a_precision_that_diverges_alone_fails_a_check_and_one_without_a_curve_any_case(h100):
    test = f"test_tuning[{GEMMA}]"
    h100.write(test_tuning=SUITE)
    _answer_losses(h100, fp32=FALLING, bf16_amp=FALLING, fp16_amp=FALLING[:9], bf16=FALLING)
    sentence = f"{GEMMA} diverges in fp16-amp (its loss is not finite in step 10), but not in fp32"
    assert only_sentence(h100.run("--gpu-loss=30", "-k", "gemma"), test) == sentence
    h100.write(test_tuning=SUITE.replace("check", "measure"))
    h100.run("--gpu-loss=30", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    h100.answer(recorded("h100_out_of_memory"), to="gemma-7b-lora-fp32")
    h100.run("--gpu-loss=30", "--gpu-json=report.json", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    (case_result,) = h100.report()["results"]
    assert [curve["outcome"] for curve in case_result["loss_curves"]] == ["out_of_memory", *["recorded"] * 3]
    h100.answer(recorded("h100_out_of_memory"), to=GEMMA)
    assert f"{GEMMA} " in only_sentence(h100.run("--gpu-loss=30", "-k", "gemma"), test)
