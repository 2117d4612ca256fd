"""Tests the gate of memory in each phase of training on a CPU: growth below the peak fails, too, and is named."""

import json

import pytest
from plugin_project import Project, failures, only_sentence

PHASES = ("build", "forward", "backward", "between", "optimizer")

GAN = """
import pytest


def build(setup):
    from pathlib import Path

    import torch

    grown = (Path(__file__).parent / "grown.txt").exists()

    def rows(phase):
        return 128 if grown and setup.case.model == phase else 1

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


@pytest.mark.parametrize("phase", ["build", "forward", "between", "optimizer"])
def test_gan(gputrain, phase):
    gputrain.check(build, model=phase, precision="fp32", steps=2, warmup=1)
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


_STORED: list[str] = []


@pytest.fixture
def gan(project: Project) -> Project:
    """A case for each phase that may grow, with baselines, which the first test that wants them records."""
    project.write(test_gan=GAN)
    file = project.baseline_file("gan")
    if not _STORED:
        project.run("--gpu-baseline-update").assert_outcomes(passed=4)
        _STORED.append(file.read_text())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_STORED[0])
    return project


def test_growth_below_the_peak_fails_and_names_tensor_operator_and_line(gan: Project) -> None:
    (gan.path / "grown.txt").touch()
    told = failures(gan.run("--gpu-json=report.json"))
    lines = enumerate((gan.path / "test_gan.py").read_text().splitlines(), start=1)
    line_of = {text.partition("# in ")[2]: number for number, text in lines if "# in " in text}
    results = {entry["case"]["model"]: entry for entry in gan.report()["results"]}
    for phase in ("build", "forward", "between", "optimizer"):
        where = "between backward passes" if phase == "between" else f"in {phase}"
        sentence = told[f"test_gan[{phase}]"]
        assert sentence.startswith(f"{phase}-fp32 needs ")
        assert f" more {where}, " in sentence
        assert "memory:" not in sentence, "the peak of training is as it was"
        assert f" 512 KiB (float32[128, 1024] by zeros {where} at test_gan.py:{line_of[phase]})" in sentence
        status = {metric["metric"]: metric["status"] for metric in results[phase]["verdict"]["metrics"]}
        assert status["peak_allocated_bytes"] == "pass"
        assert [name for name in PHASES if status[f"{name}_peak_bytes"] == "regressed"] == [phase]


def test_the_same_code_has_the_same_phases_to_the_byte_and_a_baseline_a_line_for_each_tensor(gan: Project) -> None:
    gan.run("--gpu-json=report.json", "--gpu-runs=2", "-k", "build").assert_outcomes(passed=1, deselected=3)
    (result,) = gan.report()["results"]
    stored = gan.baselines("gan")
    assert len(result["replies"]) == 2
    for reply in result["replies"]:
        assert tuple(sorted(reply["phase_peak_bytes"])) == tuple(sorted(PHASES))
        assert reply["phase_peak_bytes"] == stored["build-fp32@tiny"]["runs"][0]["phase_peak_bytes"]
        assert reply["phase_peak_bytes"]["backward"] == reply["peak_allocated_bytes"]
    assert result["verdict"]["sentence"] == "build-fp32 is within its limits: time on a CPU is shown, not judged"
    rows = [row for entry in stored.values() for tensors in entry["runs"][0]["largest"].values() for row in tensors]
    largest = {"bytes": 4 * 1024**2, "count": 1, "operator": "aten.zeros", "phase": "backward"}
    assert any(largest.items() <= row.items() for row in rows)
    assert not any("lines" in row for row in rows)
    lines = [line for line in gan.baseline_file("gan").read_text().splitlines() if '"operator"' in line]
    assert len(lines) == len(rows)
    assert all('"dtype"' in line for line in lines)


def test_the_tolerance_of_a_test_applies_to_phases(gan: Project) -> None:
    (gan.path / "grown.txt").touch()
    gan.write(test_gan=GAN.replace("@pytest", "@pytest.mark.gpu_tolerance(memory='1 MiB')\n@pytest"))
    result = gan.run("-k", "forward")
    result.assert_outcomes(passed=1, deselected=3)
    result.stdout.fnmatch_lines(["*forward-fp32: peak of forward changed by +458,7* bytes, within the limit*"])


@pytest.mark.slow
def test_a_baseline_without_phases_is_told_and_strict_fails(gan: Project) -> None:
    file = gan.baseline_file("gan")
    document = json.loads(file.read_text())
    for stored in document["cases"].values():
        del stored["runs"][0]["phase_peak_bytes"], stored["runs"][0]["largest"]
    file.write_text(json.dumps(document))
    missing = (
        "build-fp32 has no peak in build, forward, backward, optimizer and between backward passes in its baseline of 20"
    )
    result = gan.run("-k", "build")
    result.assert_outcomes(passed=1, deselected=3)
    result.stdout.fnmatch_lines([f"1 case without a baseline: {missing}*; record it with --gpu-baseline-update"])
    assert only_sentence(gan.run("--gpu-strict", "-k", "build"), "test_gan[build]").startswith(missing)


@pytest.mark.slow
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
