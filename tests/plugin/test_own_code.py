"""Tests cases of a user's own function: where it may be defined, what it is given, what it may return."""

import pytest
from plugin_project import BUILD, H100_FOLDER, Project, failures, only_sentence

CHECKED = """

def test_{name}(gputrain):
    gputrain.check(build, precision="fp32", steps=2)
"""

FIGURES = f"""{BUILD}

def larger(setup):
    import torch

    weight = torch.zeros(128, 64, requires_grad=True)
    return lambda: (weight**2).sum().backward()


def watched(setup):
    import torch

    assert (setup.scale, setup.device.type, setup.dtype) == ("tiny", "cpu", torch.float32)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    setup.watch(model)
    data = torch.randn(4, 256)

    def step():
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_plain(gputrain):
    figures = gputrain.measure(build, precision="fp32", steps=3, warmup=1, batch_size=8)
    assert len(figures.step_seconds) == 3
    assert len(figures.warmup_seconds) == 1
    assert len(figures.losses) == 3
    assert all(seconds > 0 for seconds in figures.step_seconds)
    assert figures.samples_per_second == 8 / figures.median_step_seconds
    assert figures.parameters is None
    assert figures.environment.device_type == "cpu"


def test_watched(gputrain):
    figures = gputrain.measure(watched, precision="fp32", steps=3, warmup=1)
    assert figures.parameters == figures.trainable_parameters == 256 * 257
    assert figures.model_bytes == 4 * 256 * 257
    assert figures.flops_per_step == 2 * (2 * 4 * 256 * 256)
    assert figures.losses[-1] < figures.losses[0]


def test_compared(gputrain):
    small, large = (gputrain.measure(code, precision="fp32", steps=2) for code in (build, larger))
    assert 1.9 <= large.peak_allocated_bytes / small.peak_allocated_bytes <= 2.1
"""
HELPED = """
from my_helper import SIZE


def build(setup):
    import torch

    import my_helper

    return lambda: torch.zeros(my_helper.SIZE, SIZE).sum()
"""
DECORATORS = """
import functools


def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper
"""
IN_A_PACKAGE = """
from .helpers import VALUE


def build(setup):
    return lambda: VALUE


def test_in_a_package(gputrain):
    assert gputrain.measure(build, steps=2).losses == (3.0, 3.0)
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


def test_own_code_is_found_with_its_helpers_and_measured(project: Project) -> None:
    (project.path / "pkg").mkdir()
    for name, text in (("__init__", ""), ("helpers", "VALUE = 3.0\n"), ("test_in_a_package", IN_A_PACKAGE)):
        (project.path / "pkg" / f"{name}.py").write_text(text)
    project.write(
        my_helper="SIZE = 16\n",
        my_recipes=BUILD,
        my_decorators=DECORATORS,
        test_figures=FIGURES,
        test_helped=HELPED + CHECKED.format(name="helped"),
        test_from_recipes=f"from my_recipes import build\n{CHECKED.format(name='recipes')}",
        test_decorated="from my_decorators import logged\n"
        + BUILD.replace("def build", "@logged\ndef build")
        + CHECKED.format(name="decorated"),
        test_two=TWO,
    )
    # Packages of the project that this process would find imported already.
    result = project.spawn("--gpu-json=report.json")
    result.assert_outcomes(passed=8)
    results = {entry["nodeid"].partition("::")[2]: entry for entry in project.report()["results"]}
    assert results["test_recipes"]["case"]["code"] == "my_recipes.py::build"
    assert results["test_two"]["key"] == "build-fp32-ddp-gpus=2@tiny"
    assert results["test_two"]["summary"]["scaling_efficiency"] > 0


@pytest.mark.slow
def test_files_named_like_the_standard_library_do_not_break_the_worker(project: Project) -> None:
    for name in ("timeit", "random", "queue", "token", "types", "torch"):
        (project.path / f"{name}.py").write_text("raise RuntimeError('a stray file was imported')\n")
    project.write(test_mine=BUILD + CHECKED.format(name="it"))
    project.run().assert_outcomes(passed=1)


@pytest.mark.slow
def test_what_is_asked_for_again_is_launched_once_and_several_runs_as_often(project: Project) -> None:
    code = BUILD.replace("import torch", "import torch; open('launches', 'a').write('x')", 1)
    again = "\n\ndef test_second(gputrain):\n    assert gputrain.measure(build, precision='fp32', steps=2).losses\n"
    project.write(test_mine=code + CHECKED.format(name="first") + again)
    project.run("--gpu-runs=2", "--gpu-json=report.json").assert_outcomes(passed=2)
    assert (project.path / "launches").read_text() == "xx"
    assert {len(entry["replies"]) for entry in project.report()["results"]} == {2}


def test_other_steps_are_measured_again(h100: Project) -> None:
    h100.write(
        test_mine="""
        from pytest_gputrain import Case

        CASE = Case(model="gemma-7b", method="lora", sequence_length=64)


        def test_both(gputrain):
            gputrain.measure(CASE, steps=5)
            gputrain.measure(CASE, steps=6)
            gputrain.measure(CASE, steps=5)
        """
    )
    h100.run().assert_outcomes(passed=1)
    assert [launched["steps"] for launched in h100.launches] == [5, 6]


@pytest.mark.parametrize(
    ("options", "steps", "warmup"),
    [([], 5, 2), (["--gpu-steps=9"], 9, 2), (["--gpu-warmup=9"], 5, 9), (["--gpu-warmup=0"], 5, 0)],
)
def test_options_override_the_numbers_of_steps(h100: Project, options: list[str], steps: int, warmup: int) -> None:
    h100.write(test_mine=f"{BUILD}\n\ndef test_it(gputrain):\n    gputrain.check(build, steps=5, warmup=2)\n")
    h100.run(*options).assert_outcomes(passed=1)
    assert [(launched["steps"], launched["warmup"]) for launched in h100.launches] == [(steps, warmup)]


def test_knobs_and_a_name_of_own_code_tell_its_cases_apart(h100: Project) -> None:
    checks = "".join(f"    gputrain.check(build, {knob})\n" for knob in ("batch_size=2", "batch_size=4", "model='my-mlp'"))
    h100.write(test_mine=f"{BUILD}\n\ndef test_it(gputrain):\n{checks}")
    h100.run("--gpu-baseline-update").assert_outcomes(passed=1)
    keys = ["build-bf16-batch_size=2", "build-bf16-batch_size=4", "my-mlp-bf16"]
    assert sorted(h100.baselines("mine", H100_FOLDER)) == keys


def test_functions_that_a_worker_could_not_find_are_refused(h100: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "far_recipes.py").write_text(BUILD)
    h100.ini(f"pythonpath = {elsewhere}")
    top, below = "is not a function at the top level of a file", f"does not lie in a file below {h100.path}"
    remedies = "define it there and pass values from the test with args={...}, or measure it with inline=True"
    refused = {
        "lambda setup: None": f"test_it.<locals>.<lambda> {top}*; {remedies}",
        "local": f"test_it.<locals>.local {top}*",
        "Group.method": f"Group.method {top}*",
        "functools.partial(Group.method)": "functools.partial(*",
        "len": f"len {below}, *",
        "textwrap.dedent": f"dedent {below}, *",
        "build": f"build {below}, so the worker may not run it",
        "here, gpus=2": "*choose parallel='ddp', under which torch.distributed is ready*",
    }
    local = "    def local(setup):\n        return lambda: None\n\n"
    tests = "".join(
        f"\n\ndef test_{number}(gputrain):\n{local}    gputrain.check({what})\n" for number, what in enumerate(refused)
    )
    here = "def here(setup):\n    return lambda: None\n\n\n"
    group = "class Group:\n    @staticmethod\n    def method(setup):\n        return lambda: None\n"
    h100.write(test_mine=f"import functools\nimport textwrap\n\nfrom far_recipes import build\n\n\n{here}{group}{tests}")
    told = failures(h100.run())
    assert len(told) == len(refused)
    for number, sentence in enumerate(refused.values()):
        text = told[f"test_{number}"].strip().replace(f"test_{number}.", "test_it.")
        pytest.LineMatcher(text.splitlines()).fnmatch_lines([sentence.replace("[", "[[]")])
        assert "\n" not in text
    assert h100.launches == []


# In pytest's own process

INLINE = """
import os

import pytest
import torch

SEEN = []


def build(setup):
    from pathlib import Path

    Path("pid.txt").write_text(str(os.getpid()))
    return lambda: torch.zeros(8).sum()


def test_closure(gputrain):
    weight = torch.zeros(64, 64)

    def local(setup):
        return lambda: SEEN.append(weight.sum())

    figures = gputrain.check(local, inline=True, precision="fp32", steps=4).figures
    assert len(figures.step_seconds) == 4
    assert len(SEEN) >= 4


def test_random_state_and_threads_are_left(gputrain):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    torch.set_num_threads(2)
    gputrain.measure(lambda setup: lambda: torch.rand(1), inline=True, precision="fp32", steps=2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("size", [64, 1024])
def test_two_of_one_name(gputrain, size):
    def build(setup):
        return lambda: torch.zeros(size, size).sum()

    gputrain.check(build, inline=True, precision="fp32", steps=2)


def test_here(gputrain):
    from pathlib import Path

    gputrain.check(build, precision="fp32", steps=2)
    assert Path("pid.txt").read_text() == str(os.getpid())
"""


@pytest.mark.slow
def test_inline_measures_closures_whose_baselines_are_apart_and_leaves_the_process_as_it_was(project: Project) -> None:
    project.write(test_mine=INLINE)
    project.spawn("--gpu-isolation=inline", "--gpu-baseline-update").assert_outcomes(passed=5)
    project.spawn("--gpu-isolation=inline", "--gpu-json=report.json").assert_outcomes(passed=5)
    of_two = [entry["verdict"]["status"] for entry in project.report()["results"] if "two_of_one_name" in entry["nodeid"]]
    assert of_two == ["pass", "pass"]


def test_inline_refuses_an_engine_that_needs_a_process_group(project: Project) -> None:
    project.write(
        test_one="""
        from pytest_gputrain import Case

        def test_sharded(gputrain):
            gputrain.check(Case(model="word2vec", precision="fp32", optimizer="sgd", parallel="fsdp"), inline=True)
        """
    )
    sentence = only_sentence(project.run(), "test_sharded")
    assert sentence.endswith("needs a process group, which an inline run does not have; leave out inline")


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


def test_starting(gputrain):
    gputrain.check(starting, precision="fp32")


def test_printing(gputrain):
    gputrain.measure(printing)


def test_leaks(gputrain):
    gputrain.check(build, precision="fp32", steps=2)


@pytest.mark.gpu_tolerance(growth="64 KiB")
def test_allowed(gputrain):
    gputrain.check(build, precision="fp32", steps=2)


@pytest.mark.gpu_tolerance(growth=20 * 1024)
def test_bytes(gputrain):
    gputrain.check(build, precision="fp32", steps=2)


@pytest.mark.gpu_tolerance(growth=8 * 1024)
def test_too_few_bytes(gputrain):
    gputrain.check(build, precision="fp32", steps=2)


@pytest.mark.gpu_tolerance(growth="64 KiB")
def test_other_precision(gputrain):
    gputrain.check(build, precision="bf16", steps=2, model="other")
"""


def test_own_code_that_does_what_it_may_not_fails_with_its_sentence_and_is_not_recorded(project: Project) -> None:
    project.write(test_mine=BROKEN)
    result = project.run("--gpu-baseline-update")
    result.assert_outcomes(passed=2, failed=5)
    told = {name: text.strip() for name, text in failures(result).items()}
    assert "a worker of pytest-gputrain must not start workers" in told["test_starting"]
    assert told["test_leaks"] == (
        "build-fp32 gave no measurement (count): build keeps 16.0 KiB more of tensors after every step, most of it float32 "
        "[16, 256] (16.0 KiB) made by aten.addmm in test_mine.py:24; do not keep them (a loss that is kept without detach() "
        'keeps its graph), or, if a buffer is meant to fill, allow it with @pytest.mark.gpu_tolerance(growth="20 KiB")'
    )
    assert "build keeps 16.0 KiB more" in told["test_too_few_bytes"]
    assert 'does not train in precision "bf16"' in told["test_other_precision"]
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


def test_noted(gputrain):
    gputrain.check(decorated, precision="fp32", steps=1)
    gputrain.check(in_place, precision="fp32", steps=1)
    gputrain.check(loader, precision="fp32", steps=1, warmup=0)
"""
SQUARES = "import torch\n\n\n@torch.compile(backend='eager')\ndef square(weight):\n    return weight**2\n"


@pytest.mark.slow
def test_what_is_not_compiled_on_a_cpu_and_what_is_not_counted_is_told_once(project: Project) -> None:
    project.write(squares=SQUARES, test_noted=NOTED, test_plain=BUILD + CHECKED.format(name="plain"))
    result = project.run("--gpu-json=report.json")
    result.assert_outcomes(passed=2)
    notes = [line for line in result.outlines if "torch.compile" in line or "such as those of a DataLoader" in line]
    assert sorted(notes) == [
        "1 case: memory and FLOPs of processes that it starts, such as those of a DataLoader, are not counted: loader-fp32",
        "2 cases not compiled: decorated-fp32 (and 1 more) uses torch.compile, which has no effect on a CPU, because "
        "tensors are counted one by one; its effect shows on a GPU",
    ]
    uncompiled = {entry["key"] for entry in project.report()["results"] if entry["replies"][0]["uncompiled"]}
    assert uncompiled == {"decorated-fp32@tiny", "in_place-fp32@tiny"}


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "imported"), [(".", "small_program"), ("src", "mypackage.small_program")])
def test_a_program_is_found_where_pythonpath_says(project: Project, folder: str, imported: str) -> None:
    program = project.path / folder / f"{imported.replace('.', '/')}.py"
    program.parent.mkdir(parents=True, exist_ok=True)
    if program.parent.name == "mypackage":
        (program.parent / "__init__.py").write_text("")
    program.write_text(f"{BUILD}\n\ndef train(setup):\n    step = build(setup)\n    while True:\n        yield step()\n")
    benchmarks = project.path / "benchmarks"
    benchmarks.mkdir()
    (benchmarks / "test_layout.py").write_text(
        f"from {imported} import build, train\n\n\ndef by_import(setup):\n    from {imported} import build as again\n\n"
        "    return again(setup)\n\n\ndef test_it(gputrain):\n"
        "    for own in (build, train, by_import):\n        gputrain.check(own, precision='fp32', steps=2)\n"
    )
    (project.path / "pyproject.toml").write_text(f'[tool.pytest.ini_options]\npythonpath = ["{folder}"]\n')
    project.spawn("--gpu-json=report.json").assert_outcomes(passed=1)
    code = f"{program.relative_to(project.path)}::"
    assert [entry["case"]["code"] for entry in project.report()["results"]] == [
        f"{code}build",
        f"{code}train",
        "benchmarks/test_layout.py::by_import",
    ]
