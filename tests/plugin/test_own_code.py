"""Tests cases of a user's own function: where it may be defined, what it is given, what it may return."""

from __future__ import annotations

import pytest
from plugin_project import BUILD, Project, failures, only_sentence, recorded

CHECKED = """

def test_it(gputrain):
    gputrain.check(build, precision="fp32", steps=2)
"""

COUNTED = f"""{BUILD.replace("import torch", "import torch; open('launches', 'a').write('x')", 1)}

def test_first(gputrain):
    gputrain.check(build, precision="fp32", steps=2)


def test_second(gputrain):
    assert gputrain.measure(build, precision="fp32", steps=2).peak_allocated_bytes > 0
"""


def test_measure_returns_the_figures_of_the_code(project: Project) -> None:
    project.write(
        test_mine=f"""{BUILD}

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
"""
    )
    project.run().assert_outcomes(passed=2)


def test_two_tests_that_ask_for_the_same_launch_it_once(project: Project) -> None:
    project.write(test_mine=COUNTED)
    project.run().assert_outcomes(passed=2)
    assert (project.path / "launches").read_text() == "x"


def test_runs_launches_as_many_processes(project: Project) -> None:
    project.write(test_mine=COUNTED)
    project.run("--gpu-runs=2", "--gpu-json=report.json", "-k", "first").assert_outcomes(passed=1, deselected=1)
    assert (project.path / "launches").read_text() == "xx"
    assert len(project.report()["results"][0]["replies"]) == 2


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


@pytest.mark.parametrize("option", ["steps", "warmup"])
def test_options_override_the_numbers_of_steps(h100: Project, option: str) -> None:
    h100.write(
        test_mine="""
        from pytest_gputrain import Case


        def test_it(gputrain):
            gputrain.check(Case(model="gemma-7b", method="lora", sequence_length=64, steps=5, warmup=2))
        """
    )
    h100.run(f"--gpu-{option}=9").assert_outcomes(passed=1)
    (launched,) = h100.launches
    assert (launched["steps"], launched["warmup"]) == ((9, 2) if option == "steps" else (5, 9))


def test_warmup_zero_is_taken_at_its_word(h100: Project) -> None:
    h100.write(test_mine=f"{BUILD}\n\ndef test_it(gputrain):\n    gputrain.check(build)\n")
    h100.run("--gpu-warmup=0").assert_outcomes(passed=1)
    assert [launched["warmup"] for launched in h100.launches] == [0]


def test_a_test_can_compare_two_cases(project: Project) -> None:
    larger = BUILD.replace("def build", "def larger").replace("zeros(64, 64", "zeros(128, 64")
    project.write(
        test_mine=f"""{BUILD}{larger}

def test_halved(gputrain):
    small = gputrain.measure(build, precision="fp32", steps=2)
    large = gputrain.measure(larger, precision="fp32", steps=2)
    assert large.peak_allocated_bytes >= 1.9 * small.peak_allocated_bytes
    assert large.peak_allocated_bytes <= 1.1 * small.peak_allocated_bytes, "figures differ"
"""
    )
    result = project.run()
    assert "figures differ" in failures(result)["test_halved"]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("lambda setup: None", "test_it.<locals>.<lambda> is not a function at the top level of a file"),
        ("local", "test_it.<locals>.local is not a function at the top level of a file"),
        ("Group.method", "Group.method is not a function at the top level of a file"),
        ("functools.partial(Group.method)", "functools.partial("),
        ("len", "len does not lie in a file below "),
        ("textwrap.dedent", "dedent does not lie in a file below "),
    ],
)
def test_a_function_that_a_worker_could_not_find_is_refused(h100: Project, what: str, sentence: str) -> None:
    h100.write(
        test_mine=f"""
        import functools
        import textwrap


        class Group:
            @staticmethod
            def method(setup):
                return lambda: None


        def test_it(gputrain):
            def local(setup):
                return lambda: None

            gputrain.check({what})
        """
    )
    assert only_sentence(h100.run(), "test_it").startswith(sentence)
    assert h100.launches == []


def test_refusing_a_closure_names_both_remedies(h100: Project) -> None:
    h100.write(test_mine="def test_it(gputrain):\n    gputrain.check(lambda setup: None)\n")
    assert only_sentence(h100.run(), "test_it").endswith(
        "define it there, where args={...} gives it what it uses of the test, or measure it with inline=True"
    )


def test_inline_measures_a_closure(project: Project) -> None:
    project.write(
        test_mine="""
        import torch

        SEEN = []


        def test_it(gputrain):
            weight = torch.zeros(64, 64)

            def local(setup):
                return lambda: SEEN.append(weight.sum())

            figures = gputrain.check(local, inline=True, precision="fp32", steps=4).figures
            assert len(figures.step_seconds) == 4
            assert len(SEEN) >= 4
        """
    )
    project.spawn().assert_outcomes(passed=1)


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


def test_own_code_on_two_processes_exchanges_scales_and_is_named_once(project: Project) -> None:
    project.write(
        test_two="""
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
    )
    result = project.run("--gpu-json=report.json")
    result.assert_outcomes(passed=1)
    (row,) = project.report("report.json")["results"]
    assert row["key"] == "build-fp32-ddp-gpus=2@tiny"
    assert row["summary"]["scaling_efficiency"] > 0


def test_several_gpus_without_a_parallelism_name_the_one_for_own_code(project: Project) -> None:
    project.write(test_two=BUILD + "\ndef test_two(gputrain):\n    gputrain.check(build, gpus=2, precision='fp32')\n")
    assert "choose parallel='ddp', under which torch.distributed is ready" in only_sentence(project.run(), "test_two")


def test_inline_leaves_the_random_state_and_threads_of_the_process(project: Project) -> None:
    project.write(
        test_mine="""
        import torch


        def test_it(gputrain):
            torch.manual_seed(7)
            expected = torch.rand(3)
            torch.manual_seed(7)
            torch.set_num_threads(2)
            gputrain.measure(lambda setup: lambda: torch.rand(1), inline=True, precision="fp32", steps=2)
            assert torch.equal(torch.rand(3), expected)
            assert torch.get_num_threads() == 2
        """
    )
    project.spawn().assert_outcomes(passed=1)


def test_two_inline_closures_of_one_name_do_not_share_a_baseline(project: Project) -> None:
    project.write(
        test_mine="""
        import pytest
        import torch


        @pytest.mark.parametrize("size", [64, 1024])
        def test_it(gputrain, size):
            def build(setup):
                return lambda: torch.zeros(size, size).sum()

            gputrain.check(build, inline=True, precision="fp32", steps=2)
        """
    )
    project.spawn("--gpu-baseline-update")
    project.spawn("--gpu-json=report.json")
    assert [result["verdict"]["status"] for result in project.report()["results"]] == ["pass", "pass"]


def test_inline_isolation_runs_zoo_and_own_code_in_this_process(project: Project) -> None:
    project.write(
        test_mine="""
        import os

        PIDS = []


        def build(setup):
            import torch
            from pathlib import Path

            Path("pid.txt").write_text(str(os.getpid()))
            return lambda: torch.zeros(8).sum()


        def test_it(gputrain):
            from pathlib import Path

            gputrain.check(build, precision="fp32", steps=2)
            assert Path("pid.txt").read_text() == str(os.getpid())
        """
    )
    project.spawn("--gpu-isolation=inline").assert_outcomes(passed=1)


def test_helpers_beside_the_test_file_are_imported(project: Project) -> None:
    project.write(
        my_helper="SIZE = 16\n",
        test_mine="""
        from my_helper import SIZE


        def build(setup):
            import torch

            import my_helper

            return lambda: torch.zeros(my_helper.SIZE, SIZE).sum()


        def test_it(gputrain):
            gputrain.check(build, precision="fp32", steps=2)
        """,
    )
    project.run().assert_outcomes(passed=1)


def test_a_function_of_a_helper_module_is_found(project: Project) -> None:
    project.write(my_recipes=BUILD)
    project.write(test_mine=f"from my_recipes import build\n{CHECKED}")
    project.run("--gpu-json=report.json").assert_outcomes(passed=1)
    assert project.report()["results"][0]["case"]["code"] == "my_recipes.py::build"


def test_a_function_decorated_by_a_helper_is_found_in_its_own_file(project: Project) -> None:
    project.write(
        my_decorators="""
        import functools


        def logged(function):
            @functools.wraps(function)
            def wrapper(*args):
                return function(*args)

            return wrapper
        """
    )
    body = BUILD.replace("def build", "@logged\ndef build")
    project.write(test_mine=f"from my_decorators import logged\n{body}{CHECKED}")
    result = project.run()
    assert failures(result) == {}


def test_a_function_outside_of_the_root_is_refused(h100: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "far_recipes.py").write_text(BUILD)
    h100.ini(f"pythonpath = {elsewhere}")
    h100.write(test_mine="from far_recipes import build\n\n\ndef test_it(gputrain):\n    gputrain.check(build)\n")
    assert only_sentence(h100.run(), "test_it") == (
        f"build does not lie in a file below {h100.path}, so the worker may not run it"
    )


def test_files_named_like_the_standard_library_do_not_break_the_worker(project: Project) -> None:
    for name in ("timeit", "random", "queue", "token", "types", "torch"):
        (project.path / f"{name}.py").write_text("raise RuntimeError('a stray file was imported')\n")
    project.write(test_mine=BUILD + CHECKED)
    result = project.run()
    assert failures(result) == {}
    result.assert_outcomes(passed=1)


def test_knobs_of_own_code_tell_its_cases_apart(h100: Project) -> None:
    h100.write(
        test_mine=f"""{BUILD}

def test_it(gputrain):
    gputrain.check(build, batch_size=2)
    gputrain.check(build, batch_size=4)
"""
    )
    h100.run("--gpu-baseline-update").assert_outcomes(passed=1)
    assert sorted(h100.baselines("mine", "nvidia-h100-80gb-hbm3")) == ["build-bf16-batch_size=2", "build-bf16-batch_size=4"]


def test_a_name_given_to_own_code_is_its_id(h100: Project) -> None:
    h100.write(test_mine=f"{BUILD}\n\ndef test_it(gputrain):\n    gputrain.check(build, model='my-mlp')\n")
    h100.run("--gpu-json=report.json").assert_outcomes(passed=1)
    assert list(h100.verdicts()) == ["my-mlp-bf16"]


def test_measuring_at_the_top_level_of_a_module_cannot_multiply(project: Project) -> None:
    project.write(
        test_mine="""
        import subprocess
        import sys


        def build(setup):
            import os

            from pytest_gputrain.execution.launch.launcher import in_process

            in_process(None, gpus=(), timeout_seconds=1)


        def test_it(gputrain):
            gputrain.check(build, precision="fp32")
        """
    )
    assert "a worker of pytest-gputrain must not start workers" in only_sentence(project.run(), "test_it")


def test_a_measurement_without_figures_fails_the_test_with_the_reason(h100: Project) -> None:
    h100.answer(recorded("h100_out_of_memory"))
    h100.write(test_mine=f"{BUILD}\n\ndef test_it(gputrain):\n    gputrain.measure(build)\n")
    assert only_sentence(h100.run(), "test_it").startswith(
        "build-bf16 ran out of device memory (warmup in step 1): CUDA out of "
    )


def test_a_step_in_a_package_imports_its_siblings(project: Project) -> None:
    package = project.path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helpers.py").write_text("VALUE = 3.0\n")
    (package / "test_in_a_package.py").write_text(
        "from .helpers import VALUE\n\n\n"
        "def build(setup):\n    return lambda: VALUE\n\n\n"
        "def test_it(gputrain):\n    assert gputrain.measure(build, steps=2).losses == (3.0, 3.0)\n"
    )
    project.spawn().assert_outcomes(passed=1)


def test_what_a_crashed_worker_printed_is_in_the_report(project: Project) -> None:
    project.write(
        test_mine="""
        import sys

        def build(setup):
            print("said on stdout")
            print("said on stderr", file=sys.stderr)
            raise LookupError("lost")

        def test_it(gputrain):
            gputrain.measure(build)
        """
    )
    result = project.spawn()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["said on stdout", "said on stderr", "LookupError: lost"])


def test_that_nothing_of_a_step_is_compiled_on_a_cpu_is_told_once(project: Project) -> None:
    helper = """
import torch


@torch.compile(backend="eager")
def square(weight):
    return weight**2
"""
    compiled = """
def decorated(setup):
    import torch
    from squares import square

    weight = torch.zeros(64, 64, requires_grad=True)

    def step():
        square(weight).sum().backward()

    return step


def in_place(setup):
    import torch

    model = torch.nn.Linear(8, 8)
    model.compile(backend="eager")

    def step():
        model(torch.ones(8)).sum().backward()

    return step


def test_compiled(gputrain):
    gputrain.check(decorated, precision="fp32", steps=1)
    gputrain.check(in_place, precision="fp32", steps=1)
"""
    project.write(squares=helper, test_compiled=compiled, test_plain=BUILD + CHECKED.replace("steps=2", "steps=1"))
    result = project.run("--gpu-json=report.json")
    result.assert_outcomes(passed=2)
    notes = [line for line in result.outlines if "torch.compile" in line]
    assert notes == [
        "2 cases not compiled: decorated-fp32 (and 1 more) uses torch.compile, which has no effect on a CPU, where tensors "
        "are counted; what it changes, a GPU shows"
    ]
    uncompiled_by_case = {entry["key"]: entry["replies"][0]["uncompiled"] for entry in project.report()["results"]}
    assert uncompiled_by_case == {"decorated-fp32@tiny": True, "in_place-fp32@tiny": True, "build-fp32@tiny": False}


BUFFERED = """
import pytest


def build(setup):
    import torch

    model, buffer = torch.nn.Linear(256, 256), []

    def step():
        buffer.append(model(torch.ones(16, 256)).detach())

    return step


def test_leaks(gputrain):
    gputrain.check(build, precision="fp32", steps=2)


@pytest.mark.gpu_tolerance(growth="64 KiB")
def test_allowed(gputrain):
    gputrain.check(build, precision="fp32", steps=2)
"""


def test_tensors_that_every_step_keeps_fail_a_test_unless_it_allows_them(project: Project) -> None:
    project.write(test_mine=BUFFERED)
    result = project.run()
    result.assert_outcomes(passed=1, failed=1)
    assert only_sentence(result, "test_leaks") == (
        "build-fp32 gave no measurement (count): build keeps 16.0 KiB more of tensors after every step, most of it float32 "
        "[16, 256] (16.0 KiB) made by aten.addmm in test_mine.py:10; do not keep them (a loss that is kept without detach() "
        'keeps its graph), or, if a buffer is meant to fill, allow it with @pytest.mark.gpu_tolerance(growth="20 KiB")'
    )


@pytest.mark.parametrize(("growth", "outcome"), [("20 * 1024", "passed"), ("8 * 1024", "failed")])
def test_growth_that_a_test_allows_is_bytes_where_it_is_a_number(project: Project, growth: str, outcome: str) -> None:
    project.write(test_mine=BUFFERED.replace('growth="64 KiB"', f"growth={growth}"))
    project.run("-k", "allowed").assert_outcomes(**{outcome: 1}, deselected=1)


def test_own_code_in_another_precision_than_it_says_is_not_recorded(project: Project) -> None:
    project.write(test_mine=BUFFERED.replace('precision="fp32"', 'precision="bf16"'))
    result = project.run("-k", "allowed", "--gpu-baseline-update")
    assert 'does not train in precision "bf16"' in only_sentence(result, "test_allowed")
    assert list((project.path / "baselines").rglob("*.json")) == []


def test_processes_of_a_loader_are_told_once_in_a_run(project: Project) -> None:
    project.write(
        test_mine="""
        def build(setup):
            import torch
            from torch.utils.data import DataLoader

            loader = DataLoader(torch.ones(2, 4), num_workers=1)
            return lambda: sum(float(batch.sum()) for batch in loader)


        def test_it(gputrain):
            gputrain.check(build, precision="fp32", steps=1, warmup=0)
        """
    )
    result = project.run()
    result.assert_outcomes(passed=1)
    notes = [line for line in result.outlines if "such as a DataLoader's" in line]
    assert notes == [
        "1 case: what processes hold and compute that it starts itself, such as a DataLoader's, is not counted: build-fp32"
    ]
