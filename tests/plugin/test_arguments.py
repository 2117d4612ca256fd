"""Tests arguments of own code: that they reach its process and its id, and that what cannot reach it is refused."""

import pytest
from plugin_project import Project, failures, only_sentence

SIZED = """
import pytest


def build(setup, width, depth=1, *, names=()):
    import torch

    assert names in ((), ["a", "b"])
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    setup.watch(model)

    def step():
        loss = model(torch.randn(4, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step

"""


def test_arguments_reach_the_worker_and_tell_cases_apart(project: Project) -> None:
    project.write(
        test_mine=SIZED
        + """
@pytest.mark.parametrize("width", [32, 64])
def test_sized(gputrain, width):
    result = gputrain.check(build, args={"width": width, "depth": 2}, precision="fp32", batch_size=4, steps=2)
    assert result.figures.parameters == 2 * width * (width + 1)


def test_long(gputrain):
    figures = gputrain.measure(build, args={"names": ("a", "b"), "width": 8}, precision="fp32", batch_size=4, steps=2)
    assert figures.parameters == 72
"""
    )
    project.run("--gpu-json=report.json").assert_outcomes(passed=3)
    results = project.report()["results"]
    assert [result["key"] for result in results[:2]] == [
        "build-fp32-batch_size=4-depth=2-width=32@tiny",
        "build-fp32-batch_size=4-depth=2-width=64@tiny",
    ]
    assert results[0]["case"]["args"] == '{"depth":2,"width":32}'
    assert results[2]["key"].startswith("build-fp32-batch_size=4-args=")


REFUSED = {
    "{'width': object()}": (
        "args['width'] of build is an object, which cannot be passed to the "
        "process that trains; pass plain values (text, numbers, lists, dicts) from which "
        "build makes it, or measure a closure over it with inline=True"
    ),
    "{'width': 8, 'names': [lambda: 0]}": "args['names'][0] of build is a lambda, which cannot be passed",
    "{'width': tmp_path}": "args['width'] of build is a PosixPath, which cannot be passed",
    "{'width': dict}": "args['width'] of build is the class dict, which cannot be passed",
    "{'width': {8: 1}}": "a name in args['width'] of build is 8, which cannot be passed",
    "{'width': float('nan')}": "args['width'] of build is nan, which cannot be passed",
    "{'widht': 8}": "build does not take these args after its setup: missing a required argument: 'width'",
    "{'width': 8, 'deep': 8}": "build does not take these args after its setup: got an unexpected keyword argument 'deep'",
    "[8]": "args of build is a list; give its keyword arguments as a dict, as args={'width': 64}",
}
"""Arguments, and what is said of them."""


def test_what_cannot_reach_the_worker_is_refused(project: Project) -> None:
    tests = "".join(
        f"\n\ndef test_{at}(gputrain, tmp_path):\n    gputrain.check(build, args={given})\n"
        for at, given in enumerate(REFUSED)
    )
    project.write(test_mine=SIZED + tests)
    told = failures(project.run())
    assert len(told) == len(REFUSED)
    for at, sentence in enumerate(REFUSED.values()):
        assert sentence in told[f"test_{at}"]
        assert "\n" not in told[f"test_{at}"].strip()


def test_a_case_of_the_zoo_has_no_arguments(project: Project) -> None:
    project.write(
        test_mine="""
        from pytest_gputrain import Case

        CASE = Case(model="gemma-7b", method="lora", sequence_length=64)


        def test_given(gputrain):
            gputrain.check(CASE, args={"width": 8})


        def test_declared(gputrain):
            gputrain.check(CASE.replace(args='{"width":8}'))
        """
    )
    sentences = failures(project.run())
    assert sentences["test_given"].startswith("args are for the function of own code, and gemma-7b-lora-bf16 is a Case")
    assert "has args, but they are for the function of own code; leave them out" in sentences["test_declared"]


@pytest.mark.slow
def test_a_loop_that_never_yields_is_told_so_when_its_time_is_over(project: Project) -> None:
    project.write(
        test_mine="""
        def build(setup):
            import time

            while True:
                time.sleep(0.1)


        def test_it(gputrain):
            gputrain.check(build, precision="fp32")
        """
    )
    sentence = only_sentence(project.run("--gpu-timeout=8s"), "test_it")
    assert sentence.endswith(
        "--gpu-timeout allows more, and a function that trains in a loop of its own has to yield after each step"
    )


@pytest.mark.slow
def test_variables_that_an_import_sets_are_no_test_s_change(project: Project) -> None:
    project.write(
        test_mine="import os\n\nos.environ['SET_AT_IMPORT'] = '1'\n"
        + SIZED.replace("import torch", "import os\n\n    import torch\n\n    assert os.environ['SET_AT_IMPORT'] == '1'", 1)
        + "\ndef test_it(gputrain):\n    gputrain.check(build, args={'width': 8}, precision='fp32', batch_size=4, steps=2)\n"
    )
    project.run("--gpu-json=report.json").assert_outcomes(passed=1)
    assert project.report()["results"][0]["variables"] == []
