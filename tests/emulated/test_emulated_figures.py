"""What an emulated run tells beside its peak: peaks of phases, the tensors there and their lines, and the bytes moved."""

import shutil
import textwrap

import pytest

PROGRAM = """
    import os

    PLANTED = os.environ.get("PLANTED", "")

    def train(setup):
        import torch
        from torch import nn

        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(setup.device)
        setup.watch(model)
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            if PLANTED == "moved":
                model[0].weight.data.clone()  # line moved
            batch = torch.randn(2048, 1024, device=setup.device)
            output = model(batch)
            if PLANTED == "held":
                held = torch.empty(3000, 1024, device=setup.device)  # line held
            loss = (output - batch).square().mean()
            if PLANTED == "cubed":
                loss = loss + (model[0](batch) * 2).pow(3).mean()  # line cubed
            loss.backward()
            if PLANTED == "between":
                torch.empty(1000, 1024, device=setup.device)  # line between
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    def test_train(gputrain):
        gputrain.check(train, precision="fp32", batch_size=2048)
"""


def line_of(what):
    lines = textwrap.dedent(PROGRAM).splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.endswith(f"# line {what}"))


@pytest.fixture(scope="module")
def recorded(run_tests_in, tmp_path_factory):
    """A folder with the program and its baseline."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "test_own.py").write_text(textwrap.dedent(PROGRAM))
    done, _ = run_tests_in(folder, "--gpu-baseline-update")
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def planted(recorded, run_tests_in):
    """Run the program beside its baseline with something planted: its result."""

    def run(what, *arguments):
        done, results = run_tests_in(recorded, "--gpu-strict", *arguments, PLANTED=what)
        return done, results["test_train"]

    return run


def test_the_highest_peak_of_a_phase_is_that_of_the_run(planted):
    _, result = planted("")
    assert result["verdict"]["status"] == "pass"
    reply = result["reply"]
    phases = reply["phase_peak_bytes"]
    assert set(phases) == {"build", "forward", "backward", "between", "optimizer"}
    assert max(phases.values()) == reply["peak_allocated_bytes"]
    # The optimizer made two moments of each weight in the first step, which is no part of the build.
    live = [row for row in reply["largest"]["optimizer"] if row["shape"] == [4096, 1024]]
    made = {
        (row["operator"], row["phase"], row["count"]) for row in live if row["operator"] in ("aten.mm", "aten.empty_strided")
    }
    weight, gradient = ("aten.empty_strided", "build", 1), ("aten.mm", "backward", 1)
    assert made == {weight, gradient, ("aten.empty_strided", "optimizer", 2)}
    assert phases["build"] == reply["model_bytes"]


@pytest.mark.parametrize(
    ("what", "phase", "shape"),
    [
        ("held", "in forward", "float32[3000, 1024] by empty"),
        ("between", "between backward passes", "float32[1000, 1024] by"),
    ],
)
def test_a_planted_tensor_is_named_with_its_phase_and_line(planted, what, phase, shape):
    done, result = planted(what)
    assert done.returncode == 1
    sentence = result["verdict"]["sentence"]
    assert phase in sentence
    assert shape in sentence
    assert f"test_own.py:{line_of(what)}" in sentence


def test_what_a_backward_pass_allocates_has_the_line_of_the_forward_pass(planted):
    _, result = planted("cubed")
    made = [row for row in result["reply"]["largest"]["backward"] if row["phase"] == "backward"]
    assert {line for row in made for line in row["lines"]} == {f"test_own.py:{line_of('cubed')}"}


def test_three_percent_more_bytes_moved_fail_with_the_operator_and_its_line(planted):
    """No peak grows: the copy is freed before the forward pass allocates more."""
    done, result = planted("moved")
    assert done.returncode == 1
    sentence = result["verdict"]["sentence"]
    assert f"more a step, most of it clone (+32.0 MiB in +1 calls) at test_own.py:{line_of('moved')}" in sentence
    assert {metric["metric"] for metric in result["verdict"]["metrics"] if metric["status"] == "regressed"} == {
        "bytes_per_step"
    }


def test_lines_that_move_change_nothing_that_is_recorded(recorded, run_tests, tmp_path):
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    stored = (tmp_path / "baselines/emulated/h100/own.json").read_text()
    assert "test_own.py:1" not in stored
    (tmp_path / "test_own.py").write_text("\n\n\n" + textwrap.dedent(PROGRAM))
    done, _ = run_tests("--gpu-baseline-update")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "baselines/emulated/h100/own.json").read_text() == stored


def test_a_compiled_model_has_peaks_of_all_phases_and_flops(run_tests, tmp_path):
    (tmp_path / "test_own.py").write_text(
        textwrap.dedent("""
            def train(setup):
                import torch

                torch.manual_seed(0)
                first, second = (torch.nn.Linear(1024, 1024, device=setup.device) for _ in range(2))
                run = torch.compile(lambda batch: second(torch.nn.functional.gelu(first(batch)) * 2), fullgraph=True)
                optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
                batch = torch.randn(4096, 1024, device=setup.device)
                while True:
                    loss = run(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    yield loss

            def test_train(gputrain):
                gputrain.check(train, precision="fp32", batch_size=4096)
        """)
    )
    done, results = run_tests()
    reply = results["test_train"]["reply"]
    assert done.returncode == 0, done.stdout
    assert set(reply["phase_peak_bytes"]) == {"build", "forward", "backward", "between", "optimizer"}
    named = [row for row in reply["largest"]["backward"] if row["operator"] == "compiled code"]
    assert [4096, 1024] in [row["shape"] for row in named]
    assert all(row["lines"] for row in named)
    # They are counted in a step without compiled code, which fullgraph=True forbids. The batch needs no gradient.
    assert reply["flops_per_step"] == 5 * 2 * 4096 * 1024 * 1024


@pytest.fixture
def own(run_tests, tmp_path):
    """Run a loop whose steps have these lines: its reply."""
    source = textwrap.dedent("""
        import os

        def train(setup):
            import torch

            weight = torch.ones(1024, 1024, device=setup.device, requires_grad=True)
            step = 0
            while True:
                step += 1
                loss = (weight @ weight).sum()
        STEPS
                loss.backward()
                weight.grad = None
                yield loss

        def test_train(gputrain):
            gputrain.check(train, precision="fp32")
    """)

    def run(steps):
        (tmp_path / "test_own.py").write_text(source.replace("STEPS", textwrap.indent(textwrap.dedent(steps), " " * 8)))
        done, results = run_tests()
        assert done.returncode == 0, done.stdout
        return results["test_train"]["reply"]

    return run


def test_a_step_that_fails_only_where_flops_are_counted_keeps_its_figures(own):
    """A GPU computes ``ctc_loss`` of lengths on the host, and torch refuses them under any dispatch mode."""
    reply = own("""
        scores = torch.randn(50, 4, 20, device=setup.device, requires_grad=True).log_softmax(2)
        labels = torch.randint(1, 20, (4, 10), dtype=torch.int)
        loss = loss + torch.nn.functional.ctc_loss(scores, labels, torch.tensor([50] * 4), torch.tensor([10] * 4))
    """)
    assert reply["fits"]
    assert reply["flops_per_step"] is None
    assert reply["bytes_per_step"] is None
    assert reply["phase_peak_bytes"]["backward"] > 0
    assert any(note.startswith("without FLOPs and bytes moved, because") for note in reply["notes"])


def test_a_program_that_records_its_memory_itself_keeps_peaks_of_phases_without_tensors(own):
    reply = own("torch.cuda.memory._record_memory_history(max_entries=1000)")
    assert reply["phase_peak_bytes"]["backward"] >= 3 * 4 * 1024**2
    assert reply["largest"] == {}
    assert any("the program itself records torch's memory history" in note for note in reply["notes"])


def test_a_step_of_more_allocations_than_torch_keeps_says_that_tensors_are_not_named(own):
    reply = own("""
        from pytest_gputrain.worker import device_allocations
        device_allocations.MOST_EVENTS = 1000
        for _ in range(400):
            torch.empty(1024, device=setup.device)
    """)
    assert reply["largest"] == {}
    assert reply["phase_peak_bytes"]["backward"] > 0
    assert any("a step made about 333 allocations or more" in note for note in reply["notes"])


def test_forward_passes_in_other_threads_give_no_wrong_lines(own, tmp_path):
    """Each thread counts its own nodes, so a number tells no line once two threads have counted."""
    reply = own("""
        import threading
        other = torch.ones(64, 64, device=setup.device, requires_grad=True)
        thread = threading.Thread(target=lambda: [other * 2 for _ in range(200)])
        thread.start()
        thread.join()
    """)
    made = [row for row in reply["largest"]["backward"] if row["phase"] == "backward"]
    backward = next(
        number for number, line in enumerate((tmp_path / "test_own.py").read_text().splitlines(), 1) if "backward()" in line
    )
    assert {line for row in made for line in row["lines"]} == {f"test_own.py:{backward}"}


def test_what_a_backward_pass_of_a_script_allocates_has_the_line_of_the_forward_pass(emulate):
    done, report = emulate("""
        import torch
        weight = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        loss = (weight * 2).pow(3).sum()
        loss.backward()
    """)
    assert done.returncode == 0, done.stderr
    rows = {row["where"]: row["count"] for row in report["processes"][0]["devices"][0]["peak"]["tensors"]}
    assert rows["backward pass of train.py:4 in <module>"] >= 1
    assert "backward pass" not in rows


@pytest.mark.parametrize(
    ("variant", "where"),
    [("-c", "line 2 of the code that python -c was given"), ("-", "line 2 of standard input")],
)
def test_code_that_lies_in_no_file_is_named_as_such(emulate_text, variant, where):
    assert where in emulate_text(variant, "import torch\nx = torch.ones(1 << 20, device='cuda')\n")


def test_programs_that_run_out_of_memory_or_use_nested_tensors_keep_their_figures(own):
    reply = own("""
        try:
            torch.empty(1 << 40, device=setup.device)
        except torch.OutOfMemoryError:
            pass
        parts = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], device=setup.device) * 2
        jagged = torch.nested.as_nested_tensor(list(parts.unbind()), layout=torch.jagged)
        (jagged * 2).values().sum()
        layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, 1).to(setup.device).eval()
        with torch.no_grad():
            encoder(torch.ones(1, 8, 16).to(setup.device), src_key_padding_mask=torch.arange(8).to(setup.device)[None] > 5)
    """)
    assert reply["largest"]["backward"]


def test_nodes_of_a_double_backward_pass_get_no_line_of_another_operator(emulate):
    """Autograd's thread makes them, and counts them apart: their numbers are those of other nodes of the program."""
    done, report = emulate("""
        import torch
        weight = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        small = torch.ones(4, device="cuda", requires_grad=True)
        (slope,) = torch.autograd.grad((weight.exp() * 2).sum(), weight, create_graph=True)
        penalty = slope.square().sum()
        for _ in range(60):
            small = small * 2
        (penalty + small.sum()).backward()
    """)
    assert done.returncode == 0, done.stderr
    rows = [row for row in report["processes"][0]["devices"][0]["peak"]["tensors"] if row["bytes"] >= 4 << 20]
    assert all("train.py:8" not in row["where"] for row in rows), rows


def test_a_step_that_only_moves_bytes_is_judged_by_them(run_tests, tmp_path):
    source = textwrap.dedent("""
        import torch

        def train(setup):
            weight = torch.ones(1024, 1024, device=setup.device, requires_grad=True)
            while True:
                weight.exp().sum().backward()
                weight.grad = None
                yield

        def test_train(gputrain):
            gputrain.check(train, precision="fp32")
    """)
    (tmp_path / "test_own.py").write_text(source)
    _, results = run_tests()
    assert results["test_train"]["reply"]["flops_per_step"] is None
    assert results["test_train"]["reply"]["bytes_per_step"] >= 4 * 4 * 1024**2


def test_more_steps_take_no_more_memory(planted):
    """The losses that a worker would keep of each step are no memory of the program."""
    done, _ = planted("", "--gpu-steps=20")
    assert done.returncode == 0, done.stdout


def test_a_backward_pass_of_another_thread_is_no_phase_of_the_training(own):
    reply = own("""
        import threading
        side = torch.ones(4096, 4096, device=setup.device, requires_grad=True)
        thread = threading.Thread(target=lambda: (side * 2).exp().sum().backward())
        thread.start()
        thread.join()
        del side
    """)
    assert reply["phase_peak_bytes"]["backward"] < 3 * 4 * 4096**2 < reply["phase_peak_bytes"]["forward"]
