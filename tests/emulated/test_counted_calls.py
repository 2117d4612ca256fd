"""Calls of Python functions in a step of an emulated run: where they are told of, and what a change of them says."""

import textwrap
from collections import Counter

import pytest

TRAINING = """
    import sys
    import pytest
    import torch
    from torch import nn

    def helper(value):
        return value

    def training(setup, hook=None, accumulation=1, before=None):
        net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]).to(setup.device)
        setup.watch(net)
        if hook:
            net[1].weight.register_hook(hook)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        batch = torch.randn(8, 16, device=setup.device)
        while True:
            for micro_batch in range(accumulation):
                if before:
                    before()
                loss = net(batch).square().mean()
                loss.backward()
                if micro_batch == accumulation - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                yield loss
"""


@pytest.fixture
def run_training(run_tests, tmp_path):
    """Run a training: the completed process, and its result."""

    def run(code, *arguments, case="", marker="", **variables):
        check = f"gputrain.check(train, precision='fp32', batch_size=8{case})"
        test = f"\n{marker}\ndef test_train(gputrain):\n    {check}\n"
        (tmp_path / "test_own.py").write_text(f"{textwrap.dedent(TRAINING)}\n{textwrap.dedent(code)}\n{test}")
        done, results = run_tests(*arguments, **variables)
        return done, results["test_train"]

    return run


def calls_of(reply, step):
    """The calls of a step by the text of the own line, and their sum as the step has it."""
    counts = reply["counts"]
    at = counts["steps"][step]
    calls = Counter()
    for row in counts["causes"]:
        if row["what"] == "python_calls" and row["counts"][at]:
            calls[row["own"]["text"]] += row["counts"][at]
    return calls, counts["kinds"][at].get("python_calls", 0)


def test_hooks_on_autograd_s_thread_count_and_a_second_run_has_the_same_calls(run_training):
    code = """
        def hook(gradient):
            helper(gradient)
            helper(gradient)

        def train(setup):
            return training(setup, hook)
    """
    replies = [run_training(code, PYTHONHASHSEED=seed)[1]["reply"] for seed in "12"]
    calls, number = calls_of(replies[0], -1)
    assert calls["def hook(gradient):"] == 1
    assert calls["helper(gradient)"] == 2
    assert number == calls.total(), "every call has an own line"
    assert replies[0] == replies[1]


def test_where_gradients_are_accumulated_the_calls_are_those_of_the_same_micro_batch(run_training):
    """The step whose FLOPs were counted was the first micro-batch of a round."""
    code = """
        def train(setup):
            loop = training(setup, accumulation=2)
            return lambda: next(loop)
    """
    _, result = run_training(code, "--gpu-steps=4", case=", gradient_accumulation=2")
    assert "optimizer.step()" in calls_of(result["reply"], -1)[0]
    assert calls_of(result["reply"], -2)[1] == 0


def test_more_python_between_the_same_launches_is_told_and_fails_with_a_tolerance(run_training):
    code = """
        def train(setup):
            return training(setup, before=checked)

        def checked():
            for _ in range({}):
                helper(1)
    """
    done, _ = run_training(code.format(1), "--gpu-baseline-update")
    assert done.returncode == 0, done.stdout
    done, result = run_training(code.format(200))
    assert done.returncode == 0, done.stdout
    (note,) = (metric["note"] for metric in result["verdict"]["metrics"] if metric["metric"] == "python_calls")
    assert note.endswith("199 more at test_own.py:34 in checked, helper(1), which is not judged")
    assert note in done.stdout
    done, result = run_training(code.format(200), marker="@pytest.mark.gpu_tolerance(python_calls='10 %')")
    assert done.returncode == 1, done.stdout
    assert "199 more at test_own.py:34 in checked, helper(1)" in result["verdict"]["sentence"]


def test_a_case_whose_step_of_calls_fails_has_all_else_and_says_so(run_training):
    done, result = run_training("""
        def before():
            monitoring = getattr(sys, "monitoring", None)
            if sys.getprofile() or (monitoring and monitoring.get_tool(3)):
                raise RuntimeError("no step like this")

        def train(setup):
            return training(setup, before=before)
    """)
    assert done.returncode == 0, done.stdout
    reply = result["reply"]
    assert reply["flops_per_step"]
    assert "python" not in reply["counts"]
    assert (
        "without calls of Python functions, because the step in which they are counted failed "
        "(RuntimeError: no step like this)" in reply["notes"]
    )
