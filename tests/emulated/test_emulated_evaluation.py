"""Evaluation and the saving of a checkpoint on an emulated GPU: what grew there fails, with its phase and its line."""

import pytest

SUITE = """
from pathlib import Path

import pytest
import torch
from torch import nn


def train(setup):
    case = setup.case.model
    changed = case if (Path(__file__).parent / "changed").exists() else ""
    model = nn.Linear(32, 5000).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters())

    def evaluate():
        outputs = []
        with torch.no_grad():
            for _ in range(6):
                output = model(torch.zeros(64, 32, device=setup.device))
                outputs.append(output if changed == "keeps" else output.argmax(-1))
                if changed == "reads":
                    output.sum().item()

    def save(folder):
        state = model.state_dict()
        if changed == "gathers":
            state = {name: value.clone() for name, value in state.items()}
        if changed == "copies":
            state = {name: torch.cat([value.cpu(), value.cpu()]) for name, value in state.items()}
        torch.save(state, folder / "last.pt")

    if case != "adds" or changed:
        setup.evaluation(evaluate)
        setup.checkpoint(save)
    while True:
        loss = model(torch.ones(4, 32, device=setup.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("change", ["nothing", "keeps", "reads", "gathers", "copies", "adds"])
def test_train(gputrain, change):
    gputrain.check(train, model=change, precision="fp32", batch_size=4, steps=2, warmup=1)
"""
_LINES = {text.strip(): f"test_own.py:{number}" for number, text in enumerate(SUITE.splitlines(), start=1)}


@pytest.fixture(scope="module")
def told(run_tests_in, tmp_path_factory):
    """The results of the changed program, by its change, beside those of the same program before."""
    folder = tmp_path_factory.mktemp("evaluating")
    (folder / "test_own.py").write_text(SUITE)
    done, before = run_tests_in(folder, "--gpu-baseline-update")
    assert done.returncode == 0, done.stdout
    (folder / "changed").touch()
    _, now = run_tests_in(folder)
    return {name.partition("[")[2].rstrip("]"): (before[name]["reply"], now[name]) for name in now}


def test_only_what_has_changed_fails_and_steps_are_as_they_were(told):
    status = {change: result["verdict"]["status"] for change, (_, result) in told.items()}
    assert status == {
        "nothing": "pass",
        **dict.fromkeys(("keeps", "reads", "gathers", "copies"), "regressed"),
        "adds": "pass",
    }
    for before, result in told.values():
        steps = before["phase_peak_bytes"].keys() - {"evaluate", "checkpoint", "checkpoint_host"}
        for figure in ("peak_allocated_bytes", "peak_reserved_bytes", "counts", "flops_per_step"):
            assert result["reply"][figure] == before[figure], figure
        assert all(result["reply"]["phase_peak_bytes"][phase] == before["phase_peak_bytes"][phase] for phase in steps)


@pytest.mark.parametrize(
    ("change", "sentence", "line"),
    [
        ("keeps", " more in evaluation, ", "output = model(torch.zeros(64, 32, device=setup.device))"),
        ("reads", " waits for the GPU 6 times in its evaluation (0 before)", "output.sum().item()"),
        ("gathers", " more while saving a checkpoint, ", "state = {name: value.clone() for name, value in state.items()}"),
        (
            "copies",
            " more on the host while saving a checkpoint, ",
            "state = {name: torch.cat([value.cpu(), value.cpu()]) for name, value in state.items()}",
        ),
        ("adds", "its peak in evaluation was not recorded, so it is not compared; record it with ", ""),
    ],
)
def test_the_sentence_names_the_phase_and_the_line(told, change, sentence, line):
    said = told[change][1]["verdict"]["sentence"]
    assert sentence in said
    assert not line or _LINES[line] in said
