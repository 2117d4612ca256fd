"""Tests the gate of memory in each phase of training on a CPU: growth below the peak fails, too, and is named."""

import pytest
from plugin_project import GEMMA, SUITE, failures, only_sentence, recorded

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


def test_growth_below_the_peak_fails_and_names_tensor_operator_and_line(project):
    project.write(test_gan=GAN)
    project.run("--gpu-baseline-update").assert_outcomes(passed=4)
    project.run("--gpu-strict", "--gpu-json=report.json").assert_outcomes(passed=4)
    runs = {entry["case"]["model"]: entry["runs"][0] for entry in project.baselines("gan").values()}
    before = {entry["case"]["model"]: entry["replies"][0] for entry in project.report()["results"]}
    (project.path / "grown.txt").touch()
    told = failures(project.run("--gpu-json=report.json"))
    lines = enumerate((project.path / "test_gan.py").read_text().splitlines(), start=1)
    line_of = {text.partition("# in ")[2]: number for number, text in lines if "# in " in text}
    results = {entry["case"]["model"]: entry for entry in project.report()["results"]}
    for phase in ("build", "forward", "between", "optimizer"):
        assert before[phase]["phase_peak_bytes"] == runs[phase]["phase_peak_bytes"], "the same code has the same bytes"
        assert before[phase]["phase_peak_bytes"].keys() == {*PHASES}
        assert before[phase]["phase_peak_bytes"]["backward"] == before[phase]["peak_allocated_bytes"]
        where = "between backward passes" if phase == "between" else f"in {phase}"
        sentence = told[f"test_gan[{phase}]"]
        assert sentence.startswith(f"{phase}-fp32 needs ")
        assert f" more {where}, " in sentence
        assert "memory:" not in sentence, "the peak of training is as it was"
        assert f" 512 KiB (float32[128, 1024] by zeros {where} at test_gan.py:{line_of[phase]})" in sentence
        status = {metric["metric"]: metric["status"] for metric in results[phase]["verdict"]["metrics"]}
        assert status["peak_allocated_bytes"] == "pass"
        assert [name for name in PHASES if status[f"{name}_peak_bytes"] == "regressed"] == [phase]


@pytest.mark.parametrize(("before", "now"), [("forward", "forward optimizer"), ("forward optimizer", "forward")])
def test_a_phase_that_only_one_side_has_is_told(cpu, before, now):
    cpu.write(test_tuning=SUITE)
    cpu.answer({**recorded("cpu_measured"), "phase_peak_bytes": dict.fromkeys(before.split(), 2_500_000)})
    cpu.run("--gpu-baseline-update", "-k", "gemma")
    cpu.answer({**recorded("cpu_measured"), "phase_peak_bytes": dict.fromkeys(now.split(), 2_500_000)})
    sentence = only_sentence(cpu.run("--gpu-strict", "-k", "gemma"), f"test_tuning[{GEMMA}]")
    assert f"{GEMMA} has no peak in optimizer{', as' if len(before) > len(now) else ' in'} its baseline of 20" in sentence


EVALUATES = """
def build(setup):
    from pathlib import Path

    import torch
    from torch import nn

    changed = (Path(__file__).parent / "changed.txt").read_text()
    model = nn.Linear(32, 1000)
    optimizer = torch.optim.SGD(model.parameters())

    def evaluate():
        outputs = []
        with torch.no_grad():
            for _ in range(6):
                output = model(torch.ones(64, 32))  # in evaluate
                outputs.append(output if "keeps" in changed else output.argmax(-1))
                "reads" in changed and output.sum().item()  # reads

    def save(folder):
        state = model.state_dict()
        if "copies" in changed:
            state = {name: value.clone() for name, value in state.items()}  # in checkpoint
        torch.save(state, folder / "last.pt")

    if "neither" not in changed:
        setup.evaluation(evaluate)
        setup.checkpoint(save)

    def step():
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_evaluating(gputrain):
    gputrain.check(build, precision="fp32", steps=2, warmup=1)
"""


def test_evaluation_and_checkpoints_are_judged(project):
    changed, test = project.path / "changed.txt", "test_evaluating"
    project.write(test_mine=EVALUATES)
    lines = enumerate((project.path / "test_mine.py").read_text().splitlines(), start=1)
    line_of = {text.partition("# ")[2]: number for number, text in lines if "# " in text}
    changed.write_text("nothing")
    project.run("--gpu-baseline-update").assert_outcomes(passed=1)
    project.run("--gpu-strict").assert_outcomes(passed=1)
    changed.write_text("keeps")
    sentence = only_sentence(project.run(), test)
    assert sentence.startswith("build-fp32 needs ")
    at = f"(6 x float32[64, 1000] by addmm in evaluation at test_mine.py:{line_of['in evaluate']})"
    assert " more in evaluation, 1.60 MiB against 639 KiB allocated, limit 652 KiB, now 1.46 MiB " + at in sentence
    changed.write_text("copies")
    sentence = only_sentence(project.run(), test)
    at = f"(float32[1000, 32] by clone while saving a checkpoint at test_mine.py:{line_of['in checkpoint']})"
    assert " more while saving a checkpoint, " in sentence
    assert f"most of it 125 KiB {at}" in sentence
    changed.write_text("reads")
    sentence = only_sentence(project.run(), test)
    assert sentence.startswith("build-fp32 runs 24 operators in its evaluation (18 before) and reads values ")
    at = f"more of each at test_mine.py:{line_of['reads']} in build.<locals>.evaluate, "
    assert f" 6 times in its evaluation (0 before): {at}" in sentence
    changed.write_text("neither")
    sentence = only_sentence(project.run("--gpu-strict"), test)
    assert sentence.startswith("build-fp32 has no peak in evaluation and while saving a checkpoint, as its baseline of 20")


def test_a_baseline_without_an_evaluation_stays_valid(project):
    project.write(test_mine=EVALUATES)
    (project.path / "changed.txt").write_text("neither")
    project.run("--gpu-baseline-update").assert_outcomes(passed=1)
    (project.path / "changed.txt").write_text("nothing")
    result = project.run("--gpu-strict")
    result.assert_outcomes(passed=1)
    told = "*peak of the evaluation not compared: it was not recorded; record it again"
    result.stdout.fnmatch_lines_random([told, "not compared: *peak of the evaluation of 1 case*"])
