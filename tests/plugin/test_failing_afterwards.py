"""Tests what fails after the timed steps: the figures are reported, the case fails, and no baseline is made of it."""

import json
from typing import Any

import pytest
from plugin_project import Project, failures

SUITE = """
def build(setup):
    import os, time

    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    weight = torch.ones(64, 64, requires_grad=True)
    timed = []

    def step():
        if _get_current_dispatch_mode() is None:
            timed.append(1)
        elif timed:  # the step after them, whose operations are counted
            {fault}
        loss = (weight**2).sum()
        loss.backward()
        return loss.detach()

    return step


def test_it(gputrain):
    gputrain.check(build, precision="fp32", steps=3, warmup=1{more})
"""

FAULTS = {
    "exception": ("raise ValueError('no luck')", "failed afterwards (check): ValueError: no luck"),
    "memory": ("raise torch.OutOfMemoryError('CUDA: full')", "failed afterwards (check): OutOfMemoryError: CUDA: full"),
    "exit": ("os._exit(3)", "failed afterwards (check): the worker ended with exit code 3 without a reply"),
    "hang": ("time.sleep(600)", "was ended after 20.0 s (check)"),
}


def reply_of(project: Project) -> dict[str, Any]:
    (result,) = project.report()["results"]
    (reply,) = result["replies"]
    typed_reply: dict[str, Any] = reply
    return typed_reply


@pytest.mark.slow
def test_figures_are_kept_and_the_cases_fail(project: Project) -> None:
    suites = (SUITE.format(fault=fault, more=f", model='{name}'") for name, (fault, _) in FAULTS.items())
    project.write(**{f"test_{name}_afterwards": suite for name, suite in zip(FAULTS, suites, strict=True)})
    result = project.run("--gpu-json=report.json", "--gpu-timeout=20s")
    result.assert_outcomes(failed=len(FAULTS))
    for entry in project.report()["results"]:
        (reply,) = entry["replies"]
        sentence = entry["verdict"]["sentence"]
        assert sentence.startswith(f"{entry['case']['model']}-fp32 was measured (")
        assert FAULTS[entry["case"]["model"]][1] in sentence
        assert entry["verdict"]["status"] == "failed"
        assert reply["outcome"] in ("crashed", "timed_out")
        assert len(reply["measured"]["step_seconds"]) == 3
        assert reply["measured"]["peak_allocated_bytes"] >= 64 * 64 * 4
        assert reply["measured"]["flops_per_step"] is None


@pytest.mark.slow
def test_figures_of_an_inline_case_are_kept(project: Project) -> None:
    project.write(test_mine=SUITE.format(fault=FAULTS["exception"][0], more=", inline=True"))
    # In a process of its own: pytester would forget parts of torch that the error imports, and that torch imports once only.
    project.spawn("--gpu-json=report.json").assert_outcomes(failed=1)
    assert len(reply_of(project)["measured"]["step_seconds"]) == 3


def test_figures_of_a_failed_check_are_kept(project: Project) -> None:
    suite = SUITE.format(fault="pass", more="")
    project.write(test_mine=suite.replace("return loss.detach()", "return loss.detach() / 0 * 0"))
    result = project.run("--gpu-json=report.json")
    (failure,) = failures(result).values()
    assert "failed afterwards (check): the loss of timed step 1 is nan" in failure
    assert reply_of(project)["measured"]["losses"] == []


@pytest.mark.slow
def test_an_update_refuses_them(project: Project) -> None:
    sound = SUITE.format(fault="pass", more="")
    project.write(test_mine=sound)
    project.run("--gpu-baseline-update").assert_outcomes(passed=1)
    path = next(project.path.glob("baselines/cpu/mine.json"))
    before = path.read_text()
    project.write(test_mine=SUITE.format(fault=FAULTS["memory"][0], more=""))
    project.run("--gpu-baseline-update").assert_outcomes(failed=1)
    assert json.loads(path.read_text()) == json.loads(before)
