"""Tests cases of a user's own function: where it may be defined, what it is given, what it may return."""

import pytest
from plugin_project import BUILD, failures, recorded

CHECK = "\n\ndef test_{name}(gputrain):\n    gputrain.check({name}, precision='fp32', steps=2)\n"
CHECKED = CHECK.format(name="build")

HELPED = """
from my_helper import SIZE

from .helpers import logged


@logged
def build(setup):
    import torch

    import my_helper

    return lambda: torch.zeros(my_helper.SIZE, SIZE).sum()
"""
HELPERS = """
import functools


def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper
"""
TWO = """
def build(setup):
    import torch
    import torch.distributed as dist

    def step():
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    return step


def test_two(gputrain):
    figures = gputrain.check(build, parallel="ddp", gpus=2, precision="fp32", steps=2, scaling=True).figures
    assert figures.losses == (2.0, 2.0)
"""


def test_own_code_is_found_with_its_helpers_and_measured(project):
    (project.path / "pkg").mkdir()
    for name, text in (("__init__", ""), ("helpers", HELPERS), ("test_helped", HELPED + CHECKED)):
        (project.path / "pkg" / f"{name}.py").write_text(text)
    project.write(
        my_helper="SIZE = 16\n",
        my_recipes=BUILD,
        test_from_recipes=f"from my_recipes import build{CHECKED}",
        test_two=TWO,
    )
    # Packages of the project that this process would find imported already.
    project.spawn("--gpu-json=report.json").assert_outcomes(passed=3)
    results = {entry["suite"]: entry for entry in project.report()["results"]}
    assert results["from_recipes"]["case"]["code"] == "my_recipes.py::build"
    assert results["two"]["key"] == "build-fp32-ddp-gpus=2@tiny"
    assert results["two"]["summary"]["scaling_efficiency"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "imported"), [(".", "small_program"), ("src", "mypackage.small_program")])
def test_a_program_is_found_where_pythonpath_says(project, folder, imported):
    program = project.path / folder / f"{imported.replace('.', '/')}.py"
    program.parent.mkdir(parents=True, exist_ok=True)
    if program.parent.name == "mypackage":
        (program.parent / "__init__.py").write_text("")
    program.write_text(f"{BUILD}\n\ndef train(setup):\n    step = build(setup)\n    while True:\n        yield step()\n")
    (project.path / "benchmarks").mkdir()
    by_import = f"def by_import(setup):\n    from {imported} import build as again\n\n    return again(setup)\n"
    checks = "".join(CHECK.format(name=name) for name in ("build", "train", "by_import"))
    (project.path / "benchmarks" / "test_layout.py").write_text(
        f"from {imported} import build, train\n\n{by_import}{checks}"
    )
    (project.path / "pyproject.toml").write_text(f'[tool.pytest.ini_options]\npythonpath = ["{folder}"]\n')
    project.spawn("--gpu-json=report.json").assert_outcomes(passed=3)
    code = f"{program.relative_to(project.path)}::"
    codes = [f"{code}build", f"{code}train", "benchmarks/test_layout.py::by_import"]
    assert [entry["case"]["code"] for entry in project.report()["results"]] == codes


@pytest.mark.slow
def test_files_named_like_the_standard_library_do_not_break_the_worker(project):
    for name in ("timeit", "random", "queue", "token", "types", "torch"):
        (project.path / f"{name}.py").write_text("raise RuntimeError('a stray file was imported')\n")
    project.write(test_mine=BUILD + CHECKED)
    project.run().assert_outcomes(passed=1)


def test_what_is_asked_for_again_is_launched_once_unless_its_steps_differ(h100):
    asked = "    gputrain.check(build, warmup=2)\n    gputrain.measure(build, warmup=2)\n"
    h100.write(test_mine=f"{BUILD}\n\ndef test_it(gputrain):\n{asked}    gputrain.measure(build, steps=6, warmup=2)\n")
    for options, launched in (
        ((), [(10, 2), (6, 2)]),
        (("--gpu-runs=2",), [(10, 2)] * 2 + [(6, 2)] * 2),
        (("--gpu-steps=9", "--gpu-warmup=0"), [(9, 0)]),
    ):
        before = len(h100.launches)
        h100.run(*options).assert_outcomes(passed=1)
        assert [(launch["steps"], launch["warmup"]) for launch in h100.launches[before:]] == launched


def test_what_failed_fails_again_without_another_launch(h100):
    h100.write(
        test_mine=f"{BUILD}{CHECKED}\n\ndef test_again(gputrain):\n    gputrain.measure(build, precision='fp32', steps=2)\n"
    )
    h100.answer(recorded("crashed"))
    h100.run().assert_outcomes(failed=2)
    assert len(h100.launches) == 1


def test_functions_that_a_worker_could_not_find_are_refused(h100, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "far_recipes.py").write_text(BUILD)
    h100.ini(f"pythonpath = {elsewhere}")
    top, below = "is not a function at the top level of a file", f"does not lie in a file below {h100.path}"
    refused = {
        "lambda setup: None": f"test_it.<locals>.<lambda> {top}*args={{...}}, or measure it with inline=True",
        "local": f"test_it.<locals>.local {top}*",
        "Group.method": f"Group.method {top}*",
        "functools.partial(Group.method)": "functools.partial(*",
        "len": f"len {below}, *",
        "textwrap.dedent": f"dedent {below}, *",
        "build": f"build {below}, so the worker may not run it",
        "here, gpus=2": "*choose parallel='ddp', under which torch.distributed is ready*",
        "Case(model='word2vec', optimizer='sgd', parallel='fsdp'), inline=True": "*needs a process group*; leave out inline",
    }
    local = "    def local(setup):\n        return lambda: None\n\n"
    tests = "".join(
        f"\n\ndef test_{number}(gputrain):\n{local}    gputrain.check({what})\n" for number, what in enumerate(refused)
    )
    imports = "import functools\nimport textwrap\n\nfrom far_recipes import build\nfrom pytest_gputrain import Case\n\n\n"
    here = "def here(setup):\n    return lambda: None\n\n\n"
    group = "class Group:\n    @staticmethod\n    def method(setup):\n        return lambda: None\n"
    h100.write(test_mine=f"{imports}{here}{group}{tests}")
    told = failures(h100.run())
    assert len(told) == len(refused)
    for number, sentence in enumerate(refused.values()):
        (text,) = told[f"test_{number}"].strip().replace(f"test_{number}.", "test_it.").splitlines()
        pytest.LineMatcher([text]).fnmatch_lines([sentence])
    assert h100.launches == []


INLINE = """
import os

import pytest
import torch

SEEN, PIDS = [], []


def build(setup):
    PIDS.append(os.getpid())
    return lambda: torch.zeros(8).sum()


def test_closure_leaves_random_state_and_threads(gputrain):
    weight = torch.zeros(64, 64)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    torch.set_num_threads(2)
    gputrain.check(lambda setup: lambda: SEEN.append(torch.rand(1) + weight.sum()), inline=True, precision="fp32", steps=4)
    assert len(SEEN) >= 4
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("size", [64, 1024])
def test_two_of_one_name(gputrain, size):
    def build(setup):
        return lambda: torch.zeros(size, size).sum()

    gputrain.check(build, inline=True, precision="fp32", steps=2)


def test_here(gputrain):
    gputrain.check(build, precision="fp32", steps=2)
    assert PIDS == [os.getpid()]
"""


@pytest.mark.slow
def test_inline_measures_closures_whose_baselines_are_apart_and_leaves_the_process_as_it_was(project):
    project.write(test_mine=INLINE)
    project.spawn("--gpu-isolation=inline", "--gpu-baseline-update").assert_outcomes(passed=4)
    project.spawn("--gpu-isolation=inline", "--gpu-json=report.json").assert_outcomes(passed=4)
    of_two = [entry["verdict"]["status"] for entry in project.report()["results"] if "two_of_one_name" in entry["nodeid"]]
    assert of_two == ["pass", "pass"]
    assert [entry["variables"] for entry in project.report()["results"]] == [[]] * 4, "what torch sets, no test has changed"


# What goes wrong in the worker, and what it tells beside its figures


BROKEN = """
import sys

import pytest


def starting(setup):
    from pytest_gputrain.execution.launch.launcher import in_process

    in_process(None, gpus=(), timeout_seconds=1)


def printing(setup):
    print("said on stdout")
    print("said on stderr", file=sys.stderr)
    raise LookupError("lost")


def build(setup):
    import torch

    model, buffer = torch.nn.Linear(256, 256), []

    def step():
        buffer.append(model(torch.ones(16, 256)).detach())

    return step


@pytest.mark.gpu_tolerance(growth="64 KiB")
def test_allowed(gputrain):
    gputrain.check(build, precision="fp32", steps=2)


@pytest.mark.gpu_tolerance(growth=8 * 1024)
def test_too_few_bytes(gputrain):
    gputrain.check(build, precision="fp32", steps=2)
"""


def test_own_code_that_does_what_it_may_not_fails_with_its_sentence_and_is_not_recorded(project):
    project.write(test_mine=BROKEN + "".join(CHECK.format(name=name) for name in ("starting", "printing", "build")))
    result = project.run("--gpu-baseline-update")
    result.assert_outcomes(passed=1, failed=4)
    told = {name: text.strip() for name, text in failures(result).items()}
    assert "a worker of pytest-gputrain must not start workers" in told["test_starting"]
    keeps, remedy = "build keeps 16.0 KiB more of tensors", 'allow it with @pytest.mark.gpu_tolerance(growth="20 KiB")'
    assert keeps in told["test_too_few_bytes"]
    assert keeps in told["test_build"]
    assert told["test_build"].endswith(remedy)
    result.stdout.fnmatch_lines(["said on stdout", "said on stderr", "LookupError: lost"])
    assert list(project.baselines("mine")) == ["build-fp32@tiny"]


NOTED = """
def decorated(setup):
    import torch
    from squares import square

    weight = torch.zeros(64, 64, requires_grad=True)
    return lambda: square(weight).sum().backward()


def in_place(setup):
    import torch

    model = torch.nn.Linear(8, 8)
    model.compile(backend="eager")
    return lambda: model(torch.ones(8)).sum().backward()


def loader(setup):
    import torch
    from torch.utils.data import DataLoader

    data = DataLoader(torch.ones(2, 4), num_workers=1)
    return lambda: sum(float(batch.sum()) for batch in data)
"""
SQUARES = "import torch\n\n\n@torch.compile(backend='eager')\ndef square(weight):\n    return weight**2\n"


@pytest.mark.slow
def test_what_is_not_compiled_on_a_cpu_and_what_is_not_counted_is_told_once(project):
    checks = "".join(CHECK.format(name=name) for name in ("decorated", "in_place", "loader"))
    project.write(squares=SQUARES, test_noted=NOTED + checks, test_plain=BUILD + CHECKED)
    result = project.run("--gpu-json=report.json")
    result.assert_outcomes(passed=4)
    notes = [line for line in result.outlines if "torch.compile" in line or "such as those of a DataLoader" in line]
    assert sorted(notes) == [
        "1 case: memory and FLOPs of processes that the code starts, such as those of a DataLoader, are not counted: "
        "loader-fp32",
        "2 cases not compiled: decorated-fp32 (and 1 more) use torch.compile, which has no effect on memory and time on "
        "a CPU, because tensors are counted one by one; its effect shows on a GPU",
    ]
    uncompiled = {entry["key"] for entry in project.report()["results"] if entry["replies"][0]["uncompiled"]}
    assert uncompiled == {"decorated-fp32@tiny", "in_place-fp32@tiny"}
