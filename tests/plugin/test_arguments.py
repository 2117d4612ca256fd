"""Tests arguments of own code: that they reach its process and its id, and that what cannot reach it is refused."""

from plugin_project import failures

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


def test_arguments_reach_the_worker_and_tell_cases_apart(project):
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
    "build, args={'width': object()}": (
        "args['width'] of build is an object, which cannot be passed to the process that trains; pass plain values (text, "
        "numbers, lists, dicts) from which build makes it, or measure a closure over it with inline=True"
    ),
    "build, args={'width': 8, 'names': [lambda: 0]}": "args['names'][0] of build is a lambda, which cannot be passed",
    "build, args={'width': dict}": "args['width'] of build is the class dict, which cannot be passed",
    "build, args={'width': {8: 1}}": "a name in args['width'] of build is 8, which cannot be passed",
    "build, args={'width': float('nan')}": "args['width'] of build is nan, which cannot be passed",
    "build, args={'widht': 8}": "build does not take these args after its setup: missing a required argument: 'width'",
    "build, width=8": "width is an argument of the function and not a field of a case; pass args={'width': 8}",
    "steps(None)": "steps(...) was called before; pass the function steps itself, and args={...}",
    "bare": "bare has no parameter for its setup; write def bare(setup), which has the device, for example",
    "build, args=[8]": "args of build is a list; give its keyword arguments as a dict, as args={'width': 64}",
    "CASE, args={'width': 8}": "args are for the function of own code, and gemma-7b-full-bf16 is a Case",
    "CASE.replace(args='{\"width\":8}')": "has args, but they are for the function of own code; leave them out",
}
"""Arguments, and what is said of them."""


def test_what_cannot_reach_the_worker_is_refused(project):
    tests = "".join(f"\n\ndef test_{at}(gputrain):\n    gputrain.check({given})\n" for at, given in enumerate(REFUSED))
    case = "from pytest_gputrain import Case\n\nCASE = Case(model='gemma-7b', sequence_length=64)\n"
    others = "\n\ndef steps(setup):\n    yield\n\n\ndef bare():\n    yield\n"
    project.write(test_mine=f"{case}{SIZED}{others}{tests}")
    told = [text.strip() for text in failures(project.run()).values()]
    assert len(told) == len(REFUSED)
    for text, sentence in zip(told, REFUSED.values(), strict=True):
        assert sentence in text
        assert "\n" not in text
