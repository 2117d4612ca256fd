"""Tests cases of scripts: what they are called, where they are refused, and that they are judged like others."""

import re

import pytest
from plugin_project import H100_FOLDER, failures, only_sentence, recorded, table_rows

from pytest_gputrain import GiB

TEST = """
from pytest_gputrain import Script


def test_train(gputrain):
    gputrain.check(Script("train.py", "--max-steps=8", "--out", "runs/a"))
"""
KEY = "train.py-max-steps=8-out-runs/a"


@pytest.fixture
def scripted(h100):
    h100.write(test_scripts=TEST, train="")
    return h100


def test_a_script_is_a_case_like_others(scripted):
    lines = scripted.run().stdout.lines
    advice, table = (next(n for n, line in enumerate(lines) if word in line) for word in ("has no baseline;", "Peak mem."))
    assert advice < table
    assert sum("has no baseline;" in line for line in lines) == 1
    scripted.run("--gpu-baseline-update").assert_outcomes(passed=1)
    assert list(scripted.baselines("scripts", H100_FOLDER)) == [KEY]
    scripted.answer(recorded(bigger=5 * GiB))
    result = scripted.run("--gpu-json=report.json")
    assert re.match(rf"{re.escape(KEY)} .*5\.00 GiB \(14\.3 %\)", only_sentence(result, "test_train"))
    (entry,) = scripted.report()["results"]
    assert (entry["case"]["method"], entry["case"]["code"]) == ("script", "train.py")
    assert entry["case"]["args"] == '["--max-steps=8","--out","runs/a"]'
    assert table_rows(result.stdout.str())[0].startswith("train.py | max-steps=8-out-runs/a | 40.0 GiB")
    scripted.write(test_scripts=TEST.replace('"runs/a"))', '"runs/a"), model="small")'))
    scripted.run("--gpu-json=report.json").assert_outcomes(passed=1)
    assert list(scripted.verdicts()) == [KEY.replace("train.py", "small")], "a name of its own replaces the file"


def test_without_a_gpu_a_script_fails_with_what_helps(project):
    project.write(test_scripts=TEST, train="")
    assert only_sentence(project.run(), "test_train") == (
        f"{KEY} was not measured: a script's memory is known from torch's CUDA allocator, and this run has no GPU; add "
        "--gpu-emulate --gpu-platform=h100, which needs torch's CUDA build but no GPU, or run it on a machine with one"
    )


REFUSED = {
    '"none.py")': "none.py is not a Python file below",
    '"../train.py")': "../train.py is not a Python file below",
    '"train.py", 8)': "the argument 8 of train.py is not text, as arguments of a command line are; write '8'",
    '"train.py"), precision="fp32"': "precision is not a field that a test may set for a script, which reads its settings",
    '"train.py"), inline=True': "train.py is a script, which needs a process of its own; leave out inline=True",
    '"train.py"), args={"a": 1}': "args are for the function of own code, and train.py is a Script; leave them out",
}
"""Arguments of a script, and what is said of them."""


def test_what_is_no_script_is_refused(h100):
    calls = (f"def test_{at}(gputrain):\n    gputrain.check(Script({call})\n" for at, call in enumerate(REFUSED))
    h100.write(test_scripts="\n\n".join(["from pytest_gputrain import Script\n", *calls]), train="")
    told = failures(h100.run())
    assert len(told) == len(REFUSED)
    for at, sentence in enumerate(REFUSED.values()):
        assert told[f"test_{at}"].startswith(sentence)


def test_options_that_do_not_reach_a_script_are_refused(scripted):
    for option, sentence in {
        "--gpu-set=batch_size=4": "is a script, whose arguments --gpu-set does not reach; deselect its test",
        "--gpu-find-batch": "is a script, which --gpu-find-batch and --gpu-loss cannot change; deselect its test",
        "--gpu-isolation=inline": "is a script, which needs a process of its own; leave out --gpu-isolation=inline",
    }.items():
        (said,) = failures(scripted.run(option)).values()
        assert said.strip().endswith(sentence)
