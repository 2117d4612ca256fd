"""Tests the gate of memory in each phase of training on a CPU: growth below the peak fails, too, and is named."""

from __future__ import annotations

import json

import pytest
from plugin_project import Project, only_sentence

PHASES = ("build", "forward", "backward", "between", "optimizer")

GAN = """
from pathlib import Path

HERE = Path(__file__).parent


def rows(phase):
    return 128 if (HERE / "grown.txt").read_text() == phase else 1


def build(setup):
    import torch

    class Network(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            ctx.save_for_backward(weight)
            return (weight**2).sum()

        @staticmethod
        def backward(ctx, gradient):
            torch.zeros(1024, 1024)  # the peak of the step
            return 2 * gradient * ctx.saved_tensors[0]

    class Plain(torch.optim.SGD):
        def step(self, closure=None):
            torch.zeros(rows("optimizer"), 1024)  # in optimizer
            return super().step(closure)

    torch.zeros(rows("build"), 1024)  # in build
    weight = torch.zeros(16, 1024, requires_grad=True)
    optimizer = Plain([weight], lr=0.1)

    def step():
        torch.zeros(rows("forward"), 1024)  # in forward
        Network.apply(weight).backward()
        torch.zeros(rows("between"), 1024)  # in between
        Network.apply(weight).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_gan(gputrain):
    gputrain.check(build, precision="fp32", steps=2, warmup=1)
"""

STEP = """
def build(setup):
    import torch

    weight = torch.zeros(16, 1024, requires_grad=True)
    {make}

    def step():
        (weight**2).sum().backward()
        {update}

    return step


def test_it(gputrain):
    gputrain.check(build, precision="fp32", steps=2, warmup=1)
"""
PLAIN = {"make": "", "update": "weight.detach().sub_(weight.grad); weight.grad = None"}
BY_SGD = {"make": "optimizer = torch.optim.SGD([weight], lr=0.1)", "update": "optimizer.step(); optimizer.zero_grad()"}


@pytest.fixture
def gan(project: Project) -> Project:
    """One case with its baseline."""
    (project.path / "grown.txt").write_text("nothing")
    project.write(test_gan=GAN)
    project.run("--gpu-baseline-update").assert_outcomes(passed=1)
    return project


@pytest.mark.parametrize("phase", ["build", "forward", "between", "optimizer"])
def test_growth_below_the_peak_fails_and_names_tensor_operator_and_line(gan: Project, phase: str) -> None:
    (gan.path / "grown.txt").write_text(phase)
    result = gan.run("--gpu-json=report.json")
    gan_source = (gan.path / "test_gan.py").read_text()
    line = next(number for number, text in enumerate(gan_source.splitlines(), start=1) if text.endswith(f"# in {phase}"))
    where = "between backward passes" if phase == "between" else f"in {phase}"
    sentence = only_sentence(result, "test_gan")
    assert sentence.startswith("build-fp32 needs ")
    assert f" more {where}, " in sentence
    assert "memory:" not in sentence, "the peak of training is as it was"
    assert f" 512 KiB (float32[128, 1024] by zeros {where} at test_gan.py:{line})" in sentence
    (case_result,) = gan.report()["results"]
    status = {metric["metric"]: metric["status"] for metric in case_result["verdict"]["metrics"]}
    assert status["peak_allocated_bytes"] == "pass"
    assert [name for name in PHASES if status[f"{name}_peak_bytes"] == "regressed"] == [phase]


def test_the_same_code_has_the_same_phases_to_the_byte(gan: Project) -> None:
    gan.run("--gpu-json=report.json", "--gpu-runs=2").assert_outcomes(passed=1)
    (result,) = gan.report()["results"]
    (stored,) = gan.baselines("gan").values()
    for reply in result["replies"]:
        assert tuple(sorted(reply["phase_peak_bytes"])) == tuple(sorted(PHASES))
        assert reply["phase_peak_bytes"] == stored["runs"][0]["phase_peak_bytes"]
        assert reply["phase_peak_bytes"]["backward"] == reply["peak_allocated_bytes"]
    assert result["verdict"]["sentence"] == "build-fp32 is within its limits: time on a CPU is shown, not judged"


def test_a_baseline_keeps_the_tensors_but_no_lines(gan: Project) -> None:
    (stored,) = gan.baselines("gan").values()
    rows = [row for tensors in stored["runs"][0]["largest"].values() for row in tensors]
    largest = {"bytes": 4 * 1024**2, "count": 1, "operator": "aten.zeros", "phase": "backward"}
    assert any(largest.items() <= row.items() for row in rows)
    assert not any("lines" in row for row in rows)
    # One row is one line of the file.
    assert gan.baseline_file("gan").read_text().count('"operator"') == len(rows)
    assert all('"dtype"' in line for line in gan.baseline_file("gan").read_text().splitlines() if '"operator"' in line)


def test_tolerance_of_the_test_applies_to_phases(gan: Project) -> None:
    (gan.path / "grown.txt").write_text("forward")
    marked = "import pytest\n\n\n@pytest.mark.gpu_tolerance(memory='1 MiB')\ndef test_gan"
    gan.write(test_gan=GAN.replace("def test_gan", marked))
    result = gan.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*build-fp32: peak of forward changed by +458,7* bytes, within the limit*"])


def test_a_baseline_without_phases_is_told_and_strict_fails(gan: Project) -> None:
    file = gan.baseline_file("gan")
    document = json.loads(file.read_text())
    (stored,) = document["cases"].values()
    del stored["runs"][0]["phase_peak_bytes"], stored["runs"][0]["largest"]
    file.write_text(json.dumps(document))
    result = gan.run()
    result.assert_outcomes(passed=1)
    missing = (
        "build-fp32 has no peak in build, forward, backward, optimizer and between backward passes in its baseline of 20"
    )
    result.stdout.fnmatch_lines([f"1 case without a baseline: {missing}*; record it with --gpu-baseline-update"])
    assert only_sentence(gan.run("--gpu-strict"), "test_gan").startswith(missing)


def test_a_phase_that_only_one_side_has_is_told(project: Project) -> None:
    project.write(test_step=STEP.format(**PLAIN))
    project.run("--gpu-baseline-update").assert_outcomes(passed=1)
    project.write(test_step=STEP.format(**BY_SGD))
    new = only_sentence(project.run("--gpu-strict"), "test_it")
    assert new.startswith("build-fp32 has no peak in optimizer in its baseline of ")
    project.run("--gpu-baseline-update").assert_outcomes(passed=1)
    project.write(test_step=STEP.format(**PLAIN))
    gone = only_sentence(project.run("--gpu-strict"), "test_it")
    assert gone.startswith("build-fp32 has no peak in optimizer, as its baseline of ")
