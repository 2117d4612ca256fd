"""What each line of a program asks of an emulated GPU, as `gputrain emulate` tells it and a test judges it."""

import re

import pytest

TRAINING = """
import torch
from torch import nn
from torch.nn.functional import relu

model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), foreach=False)
for step in range(6):
    x = torch.randn(8, 64).cuda()
    loss = relu(model(x)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step != 2:
        print(loss.item())
"""


def table_of(told):
    """The head of the table, its columns, and its rows by line of the program."""
    lines = [line.removeprefix("gputrain:") for line in told.splitlines()]
    start = next(at for at, line in enumerate(lines) if line.startswith("   what each line asks of the GPU"))
    names = lines[start + 1].split()
    ends = [match.end() for match in re.finditer(r"\S+", lines[start + 1])]
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("     "):
            break
        cells = [line[begin:end].strip() for begin, end in zip([0, *ends], ends, strict=False)]
        rows[line[ends[-1] :].strip()] = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
    return lines[start].strip(), rows


def test_a_step_is_told_by_line_and_the_whole_run_beside_it(emulate):
    done, report = emulate(TRAINING)
    head, rows = table_of(done.stderr)
    assert head == "what each line asks of the GPU in a step, from one update to the next (3 of 5 steps ask for the same):"
    assert rows["train.py:15 in <module>, print(loss.item())"] == {"waits": "1", "d2h_bytes": "4 B"}
    assert rows["train.py:9 in <module>, x = torch.randn(8, 64).cuda()"] == {
        "waits": "1",
        "pageable": "1",
        "h2d_bytes": "2.00 KiB",
    }
    assert rows["train.py:12 in <module>, optimizer.step()"] == {"work": "8"}
    step, whole = rows["in a step"], rows["in the whole run"]
    assert (step["waits"], step["pageable"]) == ("2", "1")
    # Five times a loss, six batches, the weights and biases of four layers, and torch's first use of the GPU.
    assert (whole["waits"], whole["pageable"]) == ("20", "14")
    lines = [row for line, row in rows.items() if not line.startswith(("in a step", "in the whole"))]
    assert sum(int(row.get("work", 0)) for row in lines) == int(step["work"])
    assert report["processes"][0]["steps"]["steps"] == [0, 1, 2, 1, 1]


STEPS = {
    "one": ("first = make()", ["first"], 5),
    "two in turn": ("first, second = make(), make()", ["first", "second"], 5),
    "one twice as often": ("first, second = make(), make()", ["first", "second", "second"], 11),
    "one that ends": ("first, second = make(), make()", ["first"], 5),
}


@pytest.mark.parametrize(("made", "updates", "steps"), STEPS.values(), ids=STEPS)
def test_a_step_ends_with_the_optimizer_that_updates_most_often(emulate, made, updates, steps):
    body = "\n".join(f"    {name}.step()" for name in updates)
    _, report = emulate(f"""
import torch

weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
weight.grad = torch.ones_like(weight)
def make():
    return torch.optim.SGD([weight])
{made}
for _ in range(6):
{body}
{"del first" if len(updates) == 1 and "second" in made else ""}
""")
    assert len(report["processes"][0]["steps"]["steps"]) == steps


def test_a_launch_of_a_cuda_graph_in_which_the_optimizer_steps_ends_a_step(emulate):
    """The capture updates nothing, so it is a part of the first of these steps."""
    done, report = emulate("""
import torch

weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
optimizer = torch.optim.SGD([weight], foreach=False)
weight.grad = torch.ones_like(weight)
optimizer.step()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    optimizer.step()
for _ in range(5):
    graph.replay()
    print(weight.sum().item())
""")
    steps = report["processes"][0]["steps"]
    kinds = [steps["kinds"][kind] for kind in steps["steps"]]
    assert [kind.get("captures", 0) for kind in kinds] == [1, 0, 0, 0, 0]
    assert [kind.get("replays") for kind in kinds] == [1] * 5
    _, rows = table_of(done.stderr)
    assert rows["train.py:13 in <module>, print(weight.sum().item())"]["waits"] == "1"
    assert rows["train.py:12 in <module>, graph.replay()"] == {"work": "1"}
    assert rows["train.py:10 in <module>, optimizer.step()"] == {"gpu_work": "1"}


def test_a_capture_that_fails_keeps_its_private_pool(emulate):
    done, _ = emulate("""
import torch

x = torch.ones(8, device="cuda")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        (x + 1).sum().item()
except RuntimeError:
    pass
""")
    assert "up to 2.00 MiB in private pools" in done.stderr


def test_without_an_optimizer_the_whole_run_is_told_with_that_of_other_threads(emulate):
    done, report = emulate("""
import threading
import torch

x = torch.ones(8, device="cuda")
def work():
    for _ in range(3):
        x.exp()
thread = threading.Thread(target=work)
thread.start()
thread.join()
""")
    head, rows = table_of(done.stderr)
    assert head == "what each line asks of the GPU in the whole run:"
    assert rows["train.py:8 in work, x.exp()"]["work"] == "3"
    assert report["processes"][0]["steps"] is None


def test_a_program_whose_environment_lacks_the_package_is_told_that_nothing_was_counted(emulate):
    code = "import sys\nsys.modules['pytest_gputrain'] = None\nimport torch\ntorch.ones(8, device='cuda')"
    done, report = emulate(code, fresh=True)
    assert "what each line asks of the GPU is not known: pytest-gputrain is not in the program's environment" in done.stderr
    assert report["processes"][0]["asked"] is None


def test_lines_of_code_that_python_is_given_as_text_are_told(emulate_text):
    told = emulate_text("-c", "import torch\nx = torch.ones((), device='cuda')\nx.item()")
    _, rows = table_of(told)
    assert rows["the code that python -c was given:3 in <module>"]["waits"] == "1"


CASE = """
import pytest

from pytest_gputrain import Script


@pytest.mark.gpu_limit(waits={waits})
def test(gputrain):
    gputrain.check(Script("train.py"))
"""


@pytest.fixture
def script(tmp_path, run_tests):
    """Run a script as a test: the sentence of its result, and what was replied."""

    def run(text, *options, waits=9):
        (tmp_path / "train.py").write_text(text)
        (tmp_path / "test_script.py").write_text(CASE.format(waits=waits))
        _, results = run_tests(*options)
        return results["test"]["verdict"], results["test"]["reply"]

    return run


def test_a_script_that_asks_for_more_fails_with_its_line(script):
    verdict, reply = script(TRAINING, "--gpu-baseline-update")
    assert verdict["status"] == "recorded"
    assert reply["counts"]["steps"] == [0, 1, 2, 1, 1]
    assert script(TRAINING)[0]["status"] == "pass"
    more = TRAINING.replace("    loss.backward()\n", "    loss.backward()\n    assert loss >= 0\n")
    verdict, _ = script(more)
    assert verdict["status"] == "regressed"
    assert "at train.py:12 in <module>, assert loss >= 0" in verdict["sentence"]


def test_a_script_is_held_to_the_limits_of_its_test(script):
    script(TRAINING, "--gpu-baseline-update")
    verdict, _ = script(TRAINING, waits=1)
    assert verdict["status"] == "over-limit"
    assert "waits for the GPU 2 times" in verdict["sentence"]


def test_nothing_is_counted_where_counts_are_off(script):
    assert script(TRAINING, "--gpu-baseline-update", "-o", "gpu_counts=off")[1]["counts"] is None
