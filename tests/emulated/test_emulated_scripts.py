"""Checks real scripts on an emulated GPU. Needs a CUDA build of torch, and no GPU."""

import re
from pathlib import Path

import pytest
from recipes import patched

SCRIPT = """
import os
import sys

import torch

steps, width = map(int, sys.argv[1:3])
with torch.device("cuda"):
    model = torch.nn.Linear(width, width)
optimizer = torch.optim.AdamW(model.parameters(), fused="fused" in sys.argv)
for _ in range(steps):
    model(torch.ones(64, width, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
if "twice" in sys.argv and os.environ.pop("FIRST", "1") == "1":
    import subprocess

    subprocess.run([sys.executable, *sys.argv], env={**os.environ, "FIRST": "0"}, check=True)
"""

TESTS = """
import pytest

from pytest_gputrain import Script


@pytest.mark.parametrize("more", [(), ("fused",), ("twice",)], ids=["plain", "fused", "twice"])
def test_trains(gputrain, more):
    result = gputrain.check(Script("train.py", "4", "2048", *more))
    assert 64 < result.figures.peak_allocated_bytes >> 20 < 200


def test_does_not_fit(gputrain):
    gputrain.check(Script("train.py", "4", "200000"))


def test_too_short(gputrain):
    gputrain.check(Script("train.py", "1", "2048"))


def test_no_gpu(gputrain):
    gputrain.check(Script("idle.py"))
"""


PAGE = re.compile(
    r"^```python\n(?P<program>.*?)^```\n.*?^```py\n(?P<test>.*?)^```\n.*?"
    r"peaks at (?P<peak>[\w. ]+?) on an emulated H100.*?"
    r"^```diff\n(?P<regression>.*?)^```\n.*?^```text\n(?P<sentence>.*?)^```",
    re.DOTALL | re.MULTILINE,
)


@pytest.fixture
def run(tmp_path, run_tests):
    """Run the tests: what they printed, and their results."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "idle.py").write_text("import torch")
    (tmp_path / "test_scripts.py").write_text(TESTS)
    return run_tests


def test_scripts_are_held_to_what_is_recorded(run):
    done, results = run("--gpu-baseline-update", "-k", "plain or fused")
    assert "2 passed" in done.stdout
    plain, fused = (results[f"test_trains[{name}]"] for name in ("plain", "fused"))
    assert plain["reply"]["peak_allocated_bytes"] > fused["reply"]["peak_allocated_bytes"] > 0
    done, results = run("-k", "plain")
    assert "1 passed" in done.stdout
    assert results["test_trains[plain]"]["verdict"]["status"] == "pass"


def test_what_gives_no_figures_fails_with_one_sentence(run):
    done, results = run("-k", "not plain and not fused")
    out = done.stdout
    assert "4 failed" in out
    assert "train.py used the GPU in 2 processes" in out
    assert results["test_does_not_fit"]["reply"]["fits"] is False
    assert "train.py took too few steps to be measured: 0 could" in out
    assert "idle.py never used the GPU; let it choose" in out


def test_the_recipe_of_a_script_has_its_figure_and_fails_for_its_regression(tmp_path, run_tests):
    page = PAGE.search((Path(__file__).parents[2] / "docs/own-loops-more.md").read_text())
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/test_train.py").write_text(page["test"])
    script = tmp_path / "train.py"
    script.write_text(page["program"])
    out = run_tests("benchmarks", "--gpu-baseline-update")[0].stdout
    assert "1 passed" in out
    assert f" {page['peak']} " in out
    script.write_text(patched(page["program"], page["regression"]))
    out = run_tests("benchmarks")[0].stdout
    assert "1 failed" in out
    assert " ".join(page["sentence"].split()) in " ".join(out.split())


CHOOSING = """
import torch

with torch.device("cuda"):
    model, router = torch.nn.Linear(512, 512), torch.nn.Linear(512, 4)
optimizer = torch.optim.AdamW([*model.parameters(), *router.parameters()])
for step in range(3):
    x = torch.randn(64, 512).cuda()
    scores, chosen = router(x).softmax(-1).max(-1)
    rows = (chosen == 0).nonzero().flatten()
    loss = (model(x[rows]) * scores[rows, None]).square().mean()
    loss.backward()
    optimizer.step()
    print(float(loss))
"""


def test_a_script_s_choices_among_unknown_scores_are_dealt_in_turn(tmp_path, run_tests):
    (tmp_path / "choosing.py").write_text(CHOOSING)
    (tmp_path / "test_choosing.py").write_text(
        "from pytest_gputrain import Script\ndef test(gputrain):\n    gputrain.check(Script('choosing.py'))\n"
    )
    _, results = run_tests()
    notes = "\n".join(results["test"]["reply"]["notes"])
    assert re.search("^balanced routing is assumed: unknown scores were distributed evenly", notes, re.MULTILINE)
    assert re.search(r"^made-up values were read.*choosing\.py:14", notes, re.MULTILINE)
