"""The find that docs/finding-waits.md follows, and those of its table: what they ask for as they are and mended."""

import json
import re
from pathlib import Path

import pytest
from recipes import patched

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "finding-waits.md").read_text()
(PROGRAM,), (MEND,), (CAUSES,) = (
    re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) for language in ("python", "diff", "json")
)
FINDS = Path(__file__).with_name("finds") / "finds.py"
WHERE = {
    "averaged": "AveragedModel.update_parameters",
    "batches": "send_to_device",
    "beit": "BeitRelativePositionBias.forward",
    "butterfly": "BOFTLayer.cayley_batch",
    "fourier": "FourierFTLayer.get_delta_weight",
    "images": "Qwen3VLVisionAttention.forward",
    "logged": "LightningModule.__to_tensor",
    "mean_of_losses": "BaseAggregator._cast_and_nan_check_input",
    "trainer": "Trainer._run_epoch",
    "wavelet": "_get_filter_tensors",
}
"""The function of the library in which a find waits."""


def rows(text):
    """Rows of the page's tables that have this text, as cells."""
    return [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in PAGE.splitlines()
        if row.startswith("| ") and text in row
    ]


def of_last_step(result):
    counts = result["reply"]["counts"]
    return counts["kinds"][counts["steps"][-1]]


def train(run_tests_in, folder, program):
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "test_gemma.py").write_text(program)
    done, results = run_tests_in(folder, "--gpu-steps=2", "--gpu-warmup=1")
    return " ".join(done.stdout.split()), results["test_gemma"]


@pytest.mark.slow
def test_the_program_fails_with_the_sentence_and_the_causes_of_the_page(run_tests_in, tmp_path):
    said, result = train(run_tests_in, tmp_path, PROGRAM)
    (sentence,) = re.findall(r"^(train-fp32.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert " ".join(sentence.split()) in said
    counts = result["reply"]["counts"]
    assert [cause for cause in counts["causes"] if cause["what"] == "waits"] == json.loads(CAUSES)
    step = of_last_step(result)
    assert rows("the program |") == [["the program", *figures(step)]]


@pytest.mark.slow
@pytest.mark.weekly
def test_the_mended_program_passes_and_asks_for_what_the_page_says(run_tests_in, tmp_path):
    _, result = train(run_tests_in, tmp_path, patched(PROGRAM, MEND))
    assert result["verdict"]["status"] == "new"
    assert rows("the mended program |") == [["the mended program", *figures(of_last_step(result))]]


def figures(step):
    """Waits, copies of memory that is not pinned, and kernels, as in the page's table."""
    pageable = step.get("h2d_pageable", 0) + step.get("d2h_pageable", 0)
    return [f"{number:,}" for number in (step.get("waits", 0), pageable, step["launches"])]


@pytest.mark.slow
@pytest.mark.weekly
def test_the_finds_of_the_table_wait_as_often_as_the_page_says(run_tests_in, tmp_path):
    (tmp_path / "test_finds.py").write_text(FINDS.read_text())
    done, results = run_tests_in(tmp_path, "-n2", "--gpu-steps=2", "--gpu-warmup=2")
    assert done.returncode == 0, done.stdout
    counted, shown = {}, {}
    for name, function in WHERE.items():
        before, after = (results[f"test_find[{name}-{mended}]"] for mended in (False, True))
        assert function in {
            cause["library"]["function"]
            for cause in before["reply"]["counts"]["causes"]
            if cause["what"] == "waits" and "library" in cause
        }
        counted[name] = [str(of_last_step(result).get("waits", 0)) for result in (before, after)]
        shown[name] = next([row[2], row[4]] for row in rows(f"`{function}`"))
    assert counted == shown
