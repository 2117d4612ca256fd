"""What is counted of each timed step of an emulated run, and the lines that it is told of."""

import textwrap
from pathlib import Path

import pytest

import pytest_gputrain

ROOT = Path(pytest_gputrain.__file__).parents[1]

PREAMBLE = """
    import threading
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    def training(setup, forward=None, width=256):
        net = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(setup.device)
        setup.watch(net)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        batch = torch.randn(32, width, device=setup.device)
        while True:
            loss = (forward(net, batch) if forward else net(batch)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
"""


@pytest.fixture
def counted(run_tests, tmp_path):
    """Run a training: the counts of its run, and the report's result."""

    def run(code, *arguments, file="test_own.py", case="", **variables):
        check = f"gputrain.check(train, precision='fp32', batch_size=32{case})"
        test = f"def test_train(gputrain):\n    {check}\n"
        (tmp_path / file).write_text(textwrap.dedent(PREAMBLE) + "\n" + textwrap.dedent(code) + "\n" + test)
        done, results = run_tests(*arguments, **variables)
        assert done.returncode == 0, done.stdout
        return results["test_train"]["reply"]

    return run


def of_last_step(reply):
    counts = reply["counts"]
    return counts["kinds"][counts["steps"][-1]]


def causes(reply, what, kind="causes"):
    """Own functions and texts of what asks for this, and how often in the last step."""
    counts = reply["counts"]
    at = counts["steps"][-1]
    rows = [row for row in counts.get(kind, []) if row["what"] == what and row["counts"][at]]
    return {(row["own"]["function"], row["own"]["text"]): row["counts"][at] for row in rows if "own" in row}


def test_a_training_that_waits_for_nothing_has_no_waits_though_its_steps_are_measured(counted):
    reply = counted("def train(setup):\n    return training(setup)")
    step = of_last_step(reply)
    assert {"waits", "mallocs", "frees", "h2d_pageable", "d2h_pinned"}.isdisjoint(step)
    assert step["library_calls"] == 4 + 7, "of four layers the first needs no gradient of its input"
    assert len(reply["counts"]["steps"]) == 10
    assert "others" not in reply["counts"]


def test_what_the_backward_pass_asks_for_has_the_line_of_the_forward_pass(counted):
    reply = counted("""
        def train(setup):
            def forward(net, batch):
                return (net(batch) * 2).sin()
            return training(setup, forward)
    """)
    rows = [row for row in reply["counts"]["causes"] if row["what"] == "library_calls" and row.get("backward")]
    assert {row["own"]["text"] for row in rows} == {"return (net(batch) * 2).sin()"}
    assert sum(row["counts"][0] for row in rows) == 7


def test_the_line_that_calls_an_operator_of_torch_ops_is_told_and_not_torch_s_own_line(counted):
    reply = counted("""
        def train(setup):
            return training(setup, lambda net, batch: torch.ops.aten.clone(net(batch)))
    """)
    (copies,) = [row for row in reply["counts"]["causes"] if row["what"] == "d2d" and not row.get("backward")]
    assert "torch.ops.aten.clone" in copies["own"]["text"]
    assert "library" not in copies


def test_a_comprehension_has_the_name_of_its_function_as_with_all_versions_of_python(counted):
    reply = counted("""
        def read(losses):
            return [loss.item() for loss in losses]

        def train(setup):
            for loss in training(setup):
                read([loss, loss])
                yield loss
    """)
    assert causes(reply, "waits") == {("read", "return [loss.item() for loss in losses]"): 2}


def test_what_checkpointing_computes_again_is_of_the_backward_pass_and_has_the_line_that_computes(counted):
    reply = counted("""
        def block(net, batch):
            return net(batch)  # again

        def train(setup):
            return training(setup, lambda net, batch: checkpoint(block, net, batch, use_reentrant=False))
    """)
    again = [row for row in reply["counts"]["causes"] if row.get("own", {}).get("text") == "return net(batch)  # again"]
    calls = {bool(row.get("backward")): 0 for row in again if row["what"] == "library_calls"}
    for row in again:
        if row["what"] == "library_calls":
            calls[bool(row.get("backward"))] += row["counts"][0]
    assert calls == {False: 4, True: 3 + 7}, "nothing in the backward pass needs what the last layer returned"


def test_what_another_thread_asks_for_is_told_apart_and_not_judged(counted):
    reply = counted("""
        def other():
            for _ in range(3):
                torch.cuda.synchronize()

        def train(setup):
            def forward(net, batch):
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
                return net(batch)
            return training(setup, forward)
    """)
    assert "waits" not in of_last_step(reply)
    assert causes(reply, "waits", "others") == {("other", "torch.cuda.synchronize()"): 3}


@pytest.mark.parametrize("file", ["test_größe.py", "test_训练.py", "test_🚀.py"])
def test_a_file_whose_name_is_not_ascii_is_named(counted, file):
    reply = counted(
        "def train(setup):\n    return training(setup, lambda net, batch: net(batch) * batch.sum().item())", file=file
    )
    (row,) = (row for row in reply["counts"]["causes"] if row["what"] == "waits")
    assert row["own"]["file"] == file


def test_of_two_functions_in_one_line_each_step_names_the_same(counted):
    reply = counted("""
        def train(setup):
            net, batch = nn.Linear(256, 256).to(setup.device), torch.randn(32, 256, device=setup.device)
            setup.watch(net)
            optimizer = torch.optim.AdamW(net.parameters(), fused=True)
            forward, after = (lambda: net(batch).square().mean()), (lambda: (lambda: net.weight.grad.mul_(2))())
            while True:
                loss = forward()
                loss.backward()
                after()
                optimizer.step()
                optimizer.zero_grad()
                yield loss
    """)
    assert set(reply["counts"]["steps"]) == {0}


def test_this_package_below_a_symbolic_link_is_no_own_code(counted, tmp_path_factory):
    link = tmp_path_factory.mktemp("linked") / "link"
    link.symlink_to(ROOT)
    reply = counted(
        """
        def train(setup):
            def forward(net, batch):
                return net(batch) * batch.sum().item()
            return training(setup, forward)
        """,
        PYTHONPATH=str(link),
    )
    assert of_last_step(reply)["waits"] == 1
    assert causes(reply, "waits") == {("train.<locals>.forward", "return net(batch) * batch.sum().item()"): 1}


def test_a_function_whose_gradient_is_compiled_too_has_its_line(counted):
    reply = counted("""
        def train(setup):
            torch._dynamo.config.recompile_limit = 64
            scaled, steps = torch.compile(lambda x, by: x * by, dynamic=False), iter(range(100))
            return training(setup, lambda net, batch: scaled(net(batch), next(steps) / 100))
    """)
    line = "scaled, steps = torch.compile(lambda x, by: x * by, dynamic=False), iter(range(100))"
    assert causes(reply, "compilations") == {("<lambda>", line): 1}


def test_where_a_program_clears_the_counters_of_torch_compile_nothing_is_compiled(counted):
    reply = counted("""
        def train(setup):
            compiled, steps = torch.compile(lambda x, by: x * by, dynamic=False), iter(range(100))
            def forward(net, batch):
                step = next(steps)
                if step in (5, 8):
                    torch._dynamo.utils.counters.clear()
                return compiled(net(batch), min(step, 6))
            return training(setup, forward)
    """)
    counts = reply["counts"]
    compilations = [counts["kinds"][kind].get("compilations", 0) for kind in counts["steps"]]
    assert max(compilations) == 1, compilations


def test_micro_batches_and_updates_are_steps_of_different_kinds(counted):
    reply = counted(
        """
        def train(setup):
            net = nn.Linear(256, 256).to(setup.device)
            setup.watch(net)
            optimizer = torch.optim.AdamW(net.parameters(), fused=True)
            batch, step = torch.randn(32, 256, device=setup.device), 0
            while True:
                loss = net(batch).square().mean()
                loss.backward()
                step += 1
                if step % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                yield loss
        """,
        "--gpu-steps=8",
        case=", gradient_accumulation=4",
    )
    counts = reply["counts"]
    assert [counts["kinds"][kind].get("update", True) for kind in counts["steps"]] == [False] * 3 + [True] + [False] * 3 + [
        True
    ]
    launches = [counts["kinds"][kind]["launches"] for kind in counts["steps"]]
    assert launches[:4] == launches[4:]
    assert len(set(launches)) == 3, "with an update, after one, where no gradient is added to another, and between"


def test_a_copy_is_counted_by_its_direction_and_by_whether_memory_is_pinned(counted):
    reply = counted("""
        def train(setup):
            pageable, pinned = torch.ones(1000), torch.ones(2000).pin_memory()
            back, device = torch.empty(3000).pin_memory(), torch.ones(3000, device=setup.device)
            def forward(net, batch):
                pageable.to(setup.device, non_blocking=True)
                pinned.to(setup.device, non_blocking=True)
                back.copy_(device, non_blocking=True)
                device.cpu()
                device.clone()
                return net(batch)
            return training(setup, forward)
    """)
    step = of_last_step(reply)
    expected = {"h2d_pageable": 1, "h2d_pinned": 1, "h2d_bytes": 12_000, "d2h_pinned": 1, "d2h_pageable": 1, "waits": 1}
    assert {name: step.get(name) for name in expected} == expected
    assert step["d2h_bytes"] == 24_000
    assert causes(reply, "d2d")["train.<locals>.forward", "device.clone()"] == 1


def test_kernels_of_compiled_code_and_its_graph_breaks_are_counted(counted):
    reply = counted("""
        def train(setup):
            @torch.compile
            def compiled(x):
                y = x.sin() * 2
                print("", end="")
                return y.cos() + 1
            return training(setup, lambda net, batch: compiled(net(batch)))
    """)
    names = {row["by"] for row in reply["counts"]["causes"] if row["what"] == "launches"}
    assert any(name.startswith("triton_") for name in names)
    assert "compilations" not in of_last_step(reply)


def test_of_the_waits_of_a_case_in_fp16_none_is_the_worker_s_own(run_tests, tmp_path):
    """The gradient scaler of torch reads whether a gradient has overflowed, and nothing else waits."""
    (tmp_path / "test_zoo.py").write_text(
        textwrap.dedent("""
            from pytest_gputrain import Case

            CASE = Case(
                model="resnet-50", method="full", precision="fp16-amp", batch_size=2, resolution="64x64", max_grad_norm=1.0
            )

            def test_fp16(gputrain):
                gputrain.check(CASE)
        """)
    )
    done, results = run_tests()
    assert done.returncode == 0, done.stdout
    counts = results["test_fp16"]["reply"]["counts"]
    ((function, number),) = [
        (row["library"]["function"], row["counts"]) for row in counts["causes"] if row["what"] == "waits"
    ]
    assert function.startswith("GradScaler._maybe_opt_step")
    assert number == [1]
